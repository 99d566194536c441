"""How fast recordings are replayed, and how that and the host's memory grow with their length.

    python benchmarks/replay.py FILE... [--events 1000000] [--no-page]

For each FILE: replayed events per second, the best of several runs; and, beside PyTorch's own command, how long load, ledger and
picture take. Then the first FILE that begins with an empty allocator is repeated with new addresses until it is long: for each
length, the processor time of loading, replaying, of making its page and (with node) of what the page does before it shows, and
the host memory that reading and replaying the longest takes, in times of its file's size.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.replayable import Replayable, replayables
from gpumem_magic.allocator.settings import settings_to_dict
from gpumem_magic.snapshot.files import read, write
from gpumem_magic.snapshot.model import INACTIVE, Snapshot, TraceEvent

RUNS = 7
# A repetition's addresses lie above those of the one before.
APART = 1 << 44
MOST_MEMORY = 6

# Linux: unlike what getrusage says, it does not begin with what the parent had.
_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
_IDLE = "import gpumem_magic.allocator.replayable, gpumem_magic.snapshot.files"
# As `gpumem_magic.load` and `gpumem show` read.
_READ = """import sys, time
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.snapshot.files import read
held = no_automatic_collection()  # for as long as it has a name
held.__enter__()
began = time.process_time()
loaded = read(sys.argv[1])
print(time.process_time() - began)
"""
_REPLAY = f"""{_READ}
from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.replayable import replayables
(one,) = replayables(loaded)
assert replay(one.seed.start, one.events, one.settings, one.device, one.final).agrees
"""
_PICTURE = f"""{_READ}
from gpumem_magic.files.loaded import views_of
from gpumem_magic.timeline_page.view import timeline_of_files
view = timeline_of_files([views_of(loaded)])
open(sys.argv[2], "wb").write(view.to_png()[0])
"""


_PAGE = f"""{_READ}
import time
from gpumem_magic.files.loaded import report_of, views_of
from gpumem_magic.timeline_page.view import timeline_of_files
began = time.process_time()
views = views_of(loaded)
report_of(loaded, views=views)
reported = time.process_time()
timeline_of_files([views]).save(sys.argv[2])
print(reported - began, time.process_time() - reported)
"""


# What a browser does with the page until it can be read, without the drawing of its elements.
_OPENING = """
import {{ readFileSync }} from "node:fs";
import {{ eventsAround, extentEvents, flameOf, groupsOf, pathsOf }} from "{folder}/lists.js";
import {{ Device, paint, wholeView }} from "{folder}/model.js";
const page = readFileSync(process.argv[1], "utf8");
const begin = process.cpuUsage();
const mark = page.indexOf('id="data">') + 10;
const data = JSON.parse(page.slice(mark, page.indexOf("</script>", mark)));
const device = new Device(data.devices[0]);
const [width, height] = [1200, 356];
const colours = {{ shades: data.categories.map(() => [1, 2, 3]), edge: data.categories.map(() => 4), cached: 5, paper: 6 }};
paint(device, wholeView(device), width, height, colours, new Uint32Array(width * height), new Int32Array(width * height));
device.sums(device.peak, data.categories.length);
device.segmentsAt(device.peak);
const live = device.stackAt(device.peak);
groupsOf(device, live, () => "");
flameOf(pathsOf(device, live, (one) => device.stacks[device.stack[one]].map(String)), 0.001);
eventsAround(device, extentEvents(device), device.peak, 13);
const used = process.cpuUsage(begin);
console.log((used.user + used.system) / 1e6);
"""
_MODULES = Path(__file__).parents[1] / "gpumem_magic" / "timeline_page"


def opening(page: Path) -> str:
    """Processor seconds until a page can be read; "n/a" without node."""
    node = shutil.which("node")
    if node is None:
        return "n/a"
    program = _OPENING.format(folder=_MODULES.as_uri())
    command = [node, "--input-type=module", "-e", program, str(page)]
    return f"{float(subprocess.run(command, capture_output=True, text=True, check=True).stdout):.2f}"


def best(work: Callable[[], object]) -> float:
    """The least processor seconds of several runs: what other programs do counts less than on the clock."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def once_more(one: Replayable) -> list[TraceEvent]:
    """The trace, and at its end what frees everything, so that it can begin anew with an empty allocator."""
    events = list(one.events)
    for segment in one.final:
        for block in segment.blocks:
            if block.state != INACTIVE:
                event = TraceEvent("free_requested", block.address, block.requested_size, segment.stream)
                events += [event, event._replace(action="free_completed")]
    for segment in one.final:
        action = "segment_unmap" if segment.is_expandable else "segment_free"
        events.append(TraceEvent(action, segment.address, segment.total_size, segment.stream))
    return events


def repeated(one: Replayable, length: int) -> Replayable:
    """At least as many events, each repetition at addresses of its own."""
    single = once_more(one)
    events = []
    for turn in range(-(-length // len(single))):
        shift = turn * APART
        events += [
            event._replace(address=event.address + shift) if event.action != "oom" else event for event in single
        ]
    return Replayable(one.device, tuple(events), (), one.settings, one.seed, ())


def run(one: Replayable) -> None:
    result = replay(one.seed.start, one.events, one.settings, one.device, one.final)
    if not result.agrees:
        raise SystemExit("the replay does not agree with the recording: its speed means nothing")


def child(*command: str) -> tuple[float, float, str]:
    """Seconds on the clock, processor seconds, and what a program of its own printed."""
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{command[0]} {command[1]:.40} ended with status {done.returncode}: {done.stderr[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def memory(program: str, *arguments: str) -> tuple[float, int]:
    """Seconds on the clock, and the most bytes of memory, that a program takes."""
    seconds, _, printed = child("-c", f"{program}\n{_PEAK}", *arguments)
    return seconds, int(printed.split()[-1]) * 1024


def beside_torch(path: str, folder: Path) -> None:
    ours = child("-c", _PICTURE, path, str(folder / "ours.png"))
    unpacked = folder / "plain.pickle"
    loaded = read(path)
    write(loaded.snapshot, unpacked)
    page = child("-m", "torch.cuda._memory_viz", "trace_plot", str(unpacked), "-o", str(folder / "theirs.html"))
    print(f"  load, ledger and picture  {ours[0]:6.2f} s ({ours[1]:.2f} s of a processor)")
    print(f"  torch's trace_plot        {page[0]:6.2f} s ({page[1]:.2f} s of a processor)")


def growth(one: Replayable, most: int, folder: Path) -> None:
    path, page = folder / "long.pickle", folder / "long.html"
    print("  seconds of a processor     file   load  replay  report  page made   page      opens")
    for length in (most // 100, most // 10, most):
        long = repeated(one, length)
        seconds = best(partial(run, long))
        write(Snapshot((), (long.events,), settings_to_dict(one.settings)), path)
        size = path.stat().st_size
        read_in, reported, drawn = map(float, child("-c", _PAGE, str(path), str(page))[2].split())
        print(
            f"  {len(long.events):>9,} events  {size / 2**20:9.1f} MiB {read_in:6.2f} {seconds:7.2f} {reported:7.2f}"
            f" {drawn:10.2f} {page.stat().st_size / 2**20:6.1f} MiB {opening(page):>6}"
        )
    _, idle = memory(_IDLE)
    print(f"  its file has {size / 2**20:.1f} MiB; an interpreter that reads nothing takes {idle / 2**20:.1f} MiB")
    for words, program in (("reading", _READ), ("reading and replaying", _REPLAY)):
        seconds, most_bytes = memory(program, str(path))
        times = (most_bytes - idle) / size
        verdict = "within" if times <= MOST_MEMORY else "above"
        print(
            f"  {words:<22} {seconds:6.2f} s, {most_bytes / 2**20:,.0f} MiB: {times:.1f} times the file ({verdict} {MOST_MEMORY})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--events", type=int, default=1_000_000, help="the length of the longest trace")
    parser.add_argument("--no-page", action="store_true", help="without the comparison with torch's command")
    options = parser.parse_args(argv)
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} processors")
    whole: Replayable | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in options.files:
            for one in replayables(read(path)):
                if one.seed.reason is not None:
                    print(f"{os.path.basename(path)}: not replayed: {one.seed.reason}")
                    continue
                seconds = best(partial(run, one))
                print(
                    f"{os.path.basename(path)}: {len(one.events):,} events, {seconds * 1000:.1f} ms, "
                    f"{len(one.events) / seconds:,.0f} events/s"
                )
                if whole is None and not one.seed.start:
                    whole = one
            if not options.no_page:
                beside_torch(path, folder)
        if whole is not None and options.events:
            print("Repeated with new addresses:")
            growth(whole, options.events, folder)


if __name__ == "__main__":
    main()
