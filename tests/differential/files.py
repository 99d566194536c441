"""Damaged and hostile files, each read as everything that reads files would: nothing runs, nothing hangs, nothing grows.

    python tests/differential/files.py [--count 20000] [--seed 1] [--jobs 2] [--seconds 3600] [--of FILE...]

The mutants come from real recordings (measured here, PyTorch's own dumps, and those of `shared`, where it lies beside the
project), from reports and from pages, and from `hostile_snapshots`. Changed are values, texts (to markup and control codes),
opcodes (calls that would leave a canary) and bytes. Each is read by `gpumem_magic.load`, `Report.load` and the commands, and
shown as text, HTML and as an interactive page. `--of` takes only mutants of those files, however large. A mutant fails the run
where anything of it was executed (a canary, an audit event, an element of a page), raised what is no clear refusal, or took more
than two seconds or 1 GiB; a large one, more than a recording of its size may: 3 s for each 54 MiB, and 6 times its size.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import pickletools
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import hostile_snapshots  # noqa: E402
from hostile_snapshots import MARKUP, TEXTS  # noqa: E402

SECONDS = 2.0
GIB = 1 << 30
# What a million events may take. A JSON mutant has each stack written out, and so has fifty times the bytes of its pickle.
_SECONDS_PER_BYTE = 3 / (54 << 20)
_MEMORY_PER_BYTE = 6
RECORDINGS = HERE.parents[1].parent / "shared" / "data" / "snapshots"
LARGEST = 20_000
# Each hands over to something that runs: while a file is read, none may come.
_FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
    "os.remove",
)
_PAGE_MARKUP = [
    MARKUP,
    "<script>window.broken=1</script>",
    '"><svg onload=window.broken=1>',
    "</style><iframe src=x>",
    "javascript:alert(1)",
]


# ---- what is mutated


def bases(folder: Path) -> dict[str, bytes]:
    """Real files of every kind that this package and PyTorch write."""
    import torch

    import gpumem_magic
    from gpumem_magic.views.html import card
    from gpumem_magic.virtual import gpu

    found: dict[str, bytes] = {}

    def keep(name: str, report: Any) -> None:
        report.save_snapshot(folder / f"{name}.pickle")
        report.save(folder / f"{name}.json")
        report.timeline().save(folder / f"{name}.timeline.html")
        found[f"{name}.html"] = card(report, None).encode()

    with gpumem_magic.measure(device="2xT4") as training:
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 32, device="cuda")).sum().backward()
            optimizer.step()
        other = torch.empty(1000, device="cuda:1")
    keep("training", training.report)
    torch.cuda.memory._record_memory_history()
    with contextlib.suppress(torch.OutOfMemoryError), gpumem_magic.measure() as failing:
        kept = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(20)]
    keep("failing", failing.report)
    torch.cuda.memory._dump_snapshot(str(folder / "dumped.pickle"))
    torch.cuda.memory._record_memory_history(None)
    del model, optimizer, other
    kept = None  # noqa: F841
    gpu.turn_off()
    found |= {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in sorted(RECORDINGS.glob("*.pickle.gz")) if RECORDINGS.is_dir() else ():
        content = path.read_bytes()
        if len(content) < LARGEST:
            found[path.name] = content
    return found


class Mutants:
    """Files made from `bases`, each with one to four things wrong. synthetic: the share of those that are made from nothing."""

    def __init__(self, bases: dict[str, bytes], source: random.Random, canary: Path, synthetic: float = 0.15) -> None:
        self.bases = bases
        self.bases_unpacked = {name: self._unpacked(name, content) for name, content in bases.items()}
        self.synthetic = synthetic
        self.source = source
        self.canary = canary
        self._plain: dict[str, Any] = {}
        self._synthetic = hostile_snapshots.mutations(source.getrandbits(32), 1 << 60)

    def one(self) -> tuple[str, bytes, int]:
        """The name of what was done to what, the file, and how many bytes it has when it is unpacked."""
        source = self.source
        if source.random() < self.synthetic:
            content = next(self._synthetic)
            return "synthetic", content, len(content)
        # Pages are many bytes of one kind: fewer of them.
        pages = source.random() < 0.1 and any(one.endswith(".html") for one in self.bases)
        name = source.choice([one for one in self.bases if one.endswith(".html") == pages])
        content = self.bases[name]
        kind = source.choice(["values", "values", "texts", "bytes", "opcodes"])
        if name.endswith(".html"):
            content = self._bytes(content) if kind == "bytes" else self._page(content)
        elif kind == "bytes":
            content = self._bytes(content)
        elif kind == "opcodes" and ".pickle" in name:
            content = self._opcodes(self._unpacked(name, content))
        else:
            data = self._copy(name, content)
            if kind == "texts":
                data = self._with_texts(data)
            for _ in range(source.choice([1, 1, 2, 4])):
                hostile_snapshots._mutate(data, source)
            text = ""
            if ".pickle" not in name or source.random() >= 0.9:
                # Data that contain themselves are no JSON: these are pickled.
                with contextlib.suppress(ValueError, RecursionError):
                    text = json.dumps(data, default=str)
            content = text.encode("utf-8", "replace") or pickle.dumps(data, source.choice([2, 3, 4, 4, 5]))
            kind = f"{kind} of data"
        size = len(self.bases_unpacked[name]) if content[:2] == b"\x1f\x8b" else len(content)
        if (name.endswith(".gz") and content[:2] != b"\x1f\x8b") or source.random() < 0.05:
            content = gzip.compress(content, 1)
        return f"{kind} of {name}", content, size

    @staticmethod
    def _unpacked(name: str, content: bytes) -> bytes:
        return gzip.decompress(content) if name.endswith(".gz") else content

    def _copy(self, name: str, content: bytes) -> Any:
        if name not in self._plain:
            raw = self._unpacked(name, content)
            self._plain[name] = pickle.dumps(json.loads(raw) if name.endswith(".json") else pickle.loads(raw))
        return pickle.loads(self._plain[name])

    def _bytes(self, content: bytes) -> bytes:
        damaged = bytearray(content)
        for _ in range(self.source.choice([1, 1, 2, 6, 40])):
            hostile_snapshots._damage(damaged, self.source)
        return bytes(damaged)

    def _page(self, content: bytes) -> bytes:
        text = content.decode("utf-8", "replace")
        place = self.source.randrange(len(text)) if text else 0
        return (text[:place] + self.source.choice([*TEXTS, *_PAGE_MARKUP]) + text[place:]).encode(
            "utf-8", "surrogatepass"
        )

    def _with_texts(self, data: Any) -> Any:
        """Some of the texts become hostile ones. What several share, such as a stack's frames, they still share."""
        share = self.source.choice([0.02, 0.3, 1.0])
        done: dict[int, Any] = {}

        def changed(value: Any) -> Any:
            if isinstance(value, dict | list | tuple):
                if id(value) not in done:
                    done[id(value)] = (
                        {key: changed(one) for key, one in value.items()}
                        if isinstance(value, dict)
                        else [changed(one) for one in value]
                    )
                return done[id(value)]
            if isinstance(value, str) and self.source.random() < share:
                return self.source.choice([*TEXTS, *_PAGE_MARKUP])
            return value

        return changed(data)

    def _opcodes(self, content: bytes) -> bytes:
        """A pickle with a call put in between two of its opcodes: it would make the canary."""
        places = []
        with contextlib.suppress(Exception):
            for _, _, position in pickletools.genops(content):
                places.append(position or 0)
                if len(places) > 5000:
                    break
        path = str(self.canary).encode()
        size = len(path).to_bytes(4, "little")
        call = self.source.choice(
            [
                b"cos\nmkdir\n(X" + size + path + b"tR0",
                b"cbuiltins\nopen\n(X" + size + path + b"X\x01\x00\x00\x00wtR0",
                b"\x8c\x02os\x8c\x05mkdir\x93X" + size + path + b"\x85R0",
                b"(X" + size + path + b"ios\nmkdir\n0",
                b"cbuiltins\neval\n(X\x0e\x00\x00\x00print('canary')tR0",
                b"Pcanary\n0",
                b"\x82\x010",
                b"ccopyreg\n_reconstructor\n0",
                b"cos\nmkdir\nX" + size + path + b"\x85\x8194}b",
            ]
        )
        place = self.source.choice(places or [0])
        return content[:place] + call + content[place:]


# ---- what reads them


class Elements(HTMLParser):
    """The elements of a page and their attributes' names, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name.startswith("on") or (value or "").strip().lower().startswith("javascript:"):
                self.found[f"{tag} {name}"] += 1
        if tag in ("script", "iframe", "img", "object", "embed", "link", "base", "form"):
            self.found[tag] += 1


def elements(page: str) -> Counter[str]:
    parser = Elements()
    parser.feed(page)
    return parser.found


class Reader:
    """Reads a file in every way. Raises AssertionError, and whatever is a mistake of ours."""

    def __init__(self, folder: Path, report_elements: Counter[str]) -> None:
        self.folder = folder
        self.report_elements = report_elements
        self.events: list[str] = []
        self.listening = False
        self.pictures = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (
            self.listening
            and event in _FORBIDDEN
            and not (event == "os.remove" and str(self.folder) in str(arguments[0]))
        ):
            self.events.append(f"{event}{arguments}")

    def read(self, path: Path, size: int, everything: bool) -> str:
        """ "loaded" or "refused". `slowest` and `largest` are then the readings that took most of what they may: the share of
        it, and seconds or bytes."""
        self.listening, self.pictures = True, everything
        self.slowest, self.largest = (0.0, 0.0), (0.0, 0)
        self.size = size
        try:
            refused = self._limited(hostile_snapshots.walk, path)
            if not refused:
                import gpumem_magic

                self._limited(lambda path: self._show(gpumem_magic.load(path)), path)
            report = self._limited(self._as_report, path)
            if everything:
                page = str(self.folder / "page.html")
                for arguments in (
                    ["show", str(path), "--html", page],
                    ["replay", str(path)],
                    ["diff", str(path), str(path)],
                ):
                    self._limited(self._command, arguments, files=arguments.count(str(path)))
        finally:
            self.listening = False
        return "refused" if refused and report is None else "loaded"

    def _limited(self, work: Callable[[Any], Any], argument: Any, files: int = 1) -> Any:
        before = _highest(reset=True)
        began = time.process_time()
        try:
            return work(argument)
        finally:
            seconds, memory = time.process_time() - began, max(_highest() - before, 0)
            self.slowest = max(self.slowest, (seconds / max(SECONDS, files * self.size * _SECONDS_PER_BYTE), seconds))
            self.largest = max(self.largest, (memory / max(GIB, files * self.size * _MEMORY_PER_BYTE), memory))

    def _as_report(self, path: Path) -> Any:
        from gpumem_magic.user_report import Report

        try:
            report = Report.load(path)
        except (ValueError, OSError) as error:
            words = str(error)
        else:
            self._show(report)
            return report
        assert words, "an error without words"
        assert "\n" not in words, "an error of several lines"
        return None

    def _show(self, report: Any) -> None:
        from gpumem_magic.views.html import card

        assert "\x1b" not in str(report)
        if self.pictures:
            report.plot()
        page = card(report, None)
        more = elements(page) - self.report_elements
        assert not more, f"a report's page has {dict(more)}"

    def _command(self, arguments: list[str]) -> None:
        from gpumem_magic import cli

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                status: Any = cli.main(arguments)
            except SystemExit as error:
                status = error.code
        assert status in (0, 1, 2), arguments
        assert "\x1b" not in out.getvalue(), arguments
        assert "Traceback" not in out.getvalue(), out.getvalue()


def _highest(reset: bool = False) -> int:
    """The most bytes that this process has had in memory since the last reset (Linux; elsewhere since its start)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One process's share."""
    source = random.Random(f"{options.seed} {options.part}")
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    found: list[str] = []
    slowest, largest = (0.0, 0.0, ""), (0.0, 0, "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / "bases"
        made.mkdir()
        real = bases(made)
        canary, path = folder / "canary", folder / "case.pickle"
        reader = Reader(folder, elements(real["training.html"].decode()) | elements(real["failing.html"].decode()))
        if options.of:
            mutants = Mutants({one.name: one.read_bytes() for one in options.of}, source, canary, synthetic=0.0)
        else:
            mutants = Mutants(real, source, canary)
        first = options.part == 0 and not options.of
        # What is imported when it is first needed is no mutant's doing.
        path.write_bytes(real["dumped.pickle"])
        reader.read(path, len(real["dumped.pickle"]), everything=True)
        hand_made = list(hostile_snapshots.hand_made(canary).items()) if first else []
        last = time.monotonic() + options.seconds
        for number in range(options.count):
            if time.monotonic() > last:
                break
            what, content, size = (
                (f"hand made: {hand_made[number][0]}", hand_made[number][1], len(hand_made[number][1]))
                if number < len(hand_made)
                else mutants.one()
            )
            path.write_bytes(content)
            try:
                outcomes[reader.read(path, size, everything=number % 25 == 0)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcomes["mistakes"] += 1
                found.append(f"--- {what}\n{traceback.format_exc()}")
                if options.keep is not None:
                    options.keep.mkdir(exist_ok=True)
                    (options.keep / f"{options.part}-{number}").write_bytes(content)
            what_of_it = f"{what}, {size / (1 << 20):.1f} MiB"
            slowest = max(slowest, (*reader.slowest, what_of_it))
            largest = max(largest, (*reader.largest, what_of_it))
            kinds[what.partition(":")[0].partition(" of ")[0]] += 1
            if canary.exists() or reader.events:
                outcomes["executed"] += 1
                found.append(f"--- {what}: executed {reader.events}")
                reader.events.clear()
                with contextlib.suppress(OSError):
                    canary.rmdir() if canary.is_dir() else canary.unlink()
    return {"outcomes": outcomes, "kinds": kinds, "found": found, "slowest": slowest, "largest": largest}


def parts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    running = []
    for part in range(options.jobs):
        command = [
            sys.executable,
            __file__,
            "--part",
            str(part),
            "--seed",
            options.seed,
            "--count",
            str((options.count + part) // options.jobs),
            "--seconds",
            str(options.seconds),
        ]
        command += ["--keep", str(options.keep)] if options.keep is not None else []
        command += ["--of", *map(str, options.of)] if options.of else []
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MPLBACKEND": "agg"})
        )
    for process in running:
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(
                f"a process that reads files ended with {process.returncode}: it was killed by one of them"
            )
        yield json.loads(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="read nothing more after so long")
    parser.add_argument("--of", type=Path, nargs="+", metavar="FILE", help="take only mutants of these recordings")
    parser.add_argument("--keep", type=Path, help="a folder for the files that are read wrongly")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (4 * GIB, 4 * GIB))
        answers, sys.stdout = sys.stdout, io.StringIO()
        answer = work(options)
        sys.stdout = answers
        json.dump(answer, sys.stdout)
        return 0
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    found: list[str] = []
    slowest, largest = (0.0, 0.0, ""), (0.0, 0, "")
    for answer in parts(options):
        outcomes.update(answer["outcomes"])
        kinds.update(answer["kinds"])
        found += answer["found"]
        slowest = max(slowest, tuple(answer["slowest"]))
        largest = max(largest, tuple(answer["largest"]))
    print("\n".join(re.sub(r"(?m)^", "  ", one)[2:] for one in found[:30]))
    print("made by: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))
    bad = outcomes["mistakes"] + outcomes["executed"] + (slowest[0] > 1) + (largest[0] > 1)
    print(
        f"{outcomes['loaded'] + outcomes['refused'] + outcomes['mistakes']:,} files in {time.monotonic() - began:,.0f} s: {outcomes['loaded']:,} loaded, "
        f"{outcomes['refused']:,} refused, {outcomes['mistakes']} read wrongly, {outcomes['executed']} executed; nearest to its limit "
        f"in time: {slowest[1]:.2f} s, {slowest[0]:.0%} of it ({slowest[2]}); in memory: {largest[1] / (1 << 20):,.0f} MiB, "
        f"{largest[0]:.0%} of it ({largest[2]})"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
