"""A day of ``%gpumem_watch`` at 10 Hz, as fast as it goes: the memory of the kernel and of the page, and the comms.

    python benchmarks/watch_day.py [--samples 864000]
    python benchmarks/watch_day.py --samples 288000 --watches 32

The second is eight hours in 32 watches, one after another; half way through each the page closes its comm (a tab is closed, an
output cleared), and the watch goes on without it. Exit status 1 where comms are left, or memory grows by more than 8 MiB.

The kernel is a real one, the watch has the live chart's front, and a virtual T4 whose memory moves before each sample; only the
clock is made up. Every message goes over the wire and is read here. The page's half is `watch_page.mjs`, in node, with the
chart's own code. Needs Linux (the kernel's memory is read from /proc) and node.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from watch import in_kernel

from gpumem_magic.units import MIB

PER_SECOND = 10
MOST = 8 * MIB


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def day_in_kernel(shell: Any, samples: int, watches: int) -> dict[str, Any]:
    """Takes all samples. Memory is read after a twentieth of them, or a quarter where there are several watches (what is
    loaded once is loaded by then), and at the end."""
    import comm
    import torch

    from gpumem_magic.widgets.observer import Observer
    from gpumem_magic.widgets.watch import Watch, choose_front

    now = time.time()

    def clock() -> float:
        return now

    manager = comm.get_comm_manager()
    before = len(manager.comms)
    kept = [torch.empty(1 << 20, device="cuda")]
    first = highest = opened = comms = closed = 0
    begin = time.thread_time()
    each = samples // watches
    for number in range(each * watches):
        if number % each == 0:
            observer = Observer(clock=clock)
            watch = Watch(PER_SECOND, lambda watch: choose_front(watch, shell, False), observer)
            watch._started = now
            watch.front.open()
            opened = max(opened, len(manager.comms) - before)
        kept[:] = [torch.empty(1024 * (1 + number % 977), device="cuda")]
        if number % 5 == 0:
            observer.mark(f"loss.backward() of turn {number}", "checkpoint" if number % 3000 else "mark")
        watch._tick()
        now += 1 / PER_SECOND
        if number % 20 == 0:
            # Its thread that publishes must keep up: at 10 Hz it has all the time that there is.
            time.sleep(0.002)
        if number % 1000 == 0:
            # The virtual GPU keeps a journal until its figures are asked for; that is not the watch's memory.
            torch.cuda.memory_stats()
        if watches > 1 and number % each == each // 2:
            close_by_page(manager, watch.front.widget.comm.comm_id)
            closed += 1
        if number == (samples // (20 if watches == 1 else 4)):
            first = resident()
        if number % (samples // 20) == 0:
            highest = max(highest, resident())
            print(f"{number:,} samples: {resident() / MIB:.1f} MiB", file=sys.stderr)
        if number % each == each - 1:
            comms = max(comms, len(manager.comms) - before)
            rows, name = len(observer.series[0].ring), type(watch.front).__name__
            watch.front.close(watch.samples())
    time.sleep(1.0)
    last = resident()
    cpu = time.thread_time() - begin
    return {
        "front": name, "first": first, "last": last, "highest": highest, "comms": comms, "opened": opened, "rows": rows,
        "left": len(manager.comms) - before, "closed": closed, "cpu_ms": 1000 * cpu / samples,
    }  # fmt: skip


def close_by_page(manager: Any, comm_id: str) -> None:
    """What the kernel does where a page says that it has closed its end."""
    manager.comm_close(None, None, {"header": {}, "metadata": {}, "content": {"comm_id": comm_id, "data": {}}})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=86_400 * PER_SECOND)
    parser.add_argument("--watches", type=int, default=1)
    options = parser.parse_args()
    here = Path(__file__).resolve()
    node = shutil.which("node")
    if node is not None:
        done = subprocess.run(
            [node, "--expose-gc", str(here.parent / "watch_page.mjs"), str(options.samples)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        page = json.loads(done.stdout)
        print(
            f"page    {page['samples']:,} samples: {(page['after'] - page['before']) / MIB:.1f} MiB more than before, "
            f"{page['highest'] / MIB:.1f} MiB at most with node itself"
        )
    found, wire = in_kernel(here.stem, f"day_in_kernel(get_ipython(), {options.samples}, {options.watches})")
    first = "a twentieth of it" if options.watches == 1 else "a quarter of it"
    print(
        f"kernel  {options.samples:,} samples ({found['front']}, {found['rows']:,} rows kept): "
        f"{(found['last'] - found['first']) / MIB:+.1f} MiB from {first} to the end, "
        f"{(found['highest'] - found['first']) / MIB:+.1f} MiB at most; {found['cpu_ms']:.2f} ms CPU a sample and step"
    )
    print(
        f"comms   {found['opened']} opened at a time (a widget and its layout), {found['comms']} at a watch's end, "
        f"{found['closed']} closed by the page, {found['left']} after; "
        f"{wire.samples:,} messages of {wire.bytes / wire.samples:.0f} bytes were read"
    )
    return int(found["left"] > 0 or found["last"] - found["first"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
