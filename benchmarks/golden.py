"""Everything that users are shown, written down, so that a change which should change nothing can be checked.

    python benchmarks/golden.py record FOLDER [--only WORDS] [--snapshots FOLDER] [--jobs 2]
    python benchmarks/golden.py compare FOLDER FOLDER [--lines 40]

`record` runs the notebooks of ``golden_cells/*.txt`` (``== title``, cells divided by ``# %%``) on virtual GPUs, those of
``tests/innocent_cells`` with ``%%gpumem`` at the head of every cell, and loads every snapshot file. The package is the one that
Python finds, so ``PYTHONPATH=other/checkout`` records another version with the same cells. Each notebook and each file has a
process of its own, so that their order does not matter. Of every cell: what it printed and displayed. Of every new report:
``to_dict()``, text, HTML, picture, the words of the figure, the snapshot that it saves, the report that this loads to, and the
timeline page's data. Of every file moreover what ``gpumem show`` prints; of all, ``gpumem diff`` and ``gpumem replay`` of some.

What no two runs have in common is left out: times, addresses of Python's objects, folders, hashes of the page's script. Only what
users can name is used (magics, `gpumem_magic.load`, `measure`, a report's methods, the command), so that rooms may move.

`compare` says for each item whether it is the same, shows each difference once, and exits with 1 if there is one. Pictures are
compared by their pixels.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import gc
import hashlib
import io
import json
import os
import pickle
import random
import re
import site
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SNAPSHOTS = HERE.parents[1] / "shared" / "data" / "snapshots"
SETUP = """
import random, torch, gpumem_magic
from torch import nn
import torch.nn.functional as F
random.seed(0), torch.manual_seed(0)

def mib(n): return torch.empty(n << 18, device="cuda")
def net(width=512, layers=3):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]).cuda()
"""
INNOCENT = SETUP + '%gpumem_device A100-40GB,torch=2.13\ndevice = "cuda"\n'
PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
PAGE_DATA = re.compile(r'(<script type="application/json" id="data">)(.*?)(</script>)', re.DOTALL)
HTML, PNG = "text/html", "image/png"


class Notebook:
    """title: with the file's name in front; setup: a cell before all; head: a line put at the top of every cell, or ""."""

    def __init__(self, title: str, cells: list[str], setup: str, head: str) -> None:
        self.title, self.cells, self.setup, self.head = title, cells, setup, head


def notebooks() -> Iterator[Notebook]:
    kinds = ((HERE / "golden_cells", SETUP, ""), (HERE.parent / "tests" / "innocent_cells", INNOCENT, "%%gpumem -q\n"))
    for folder, setup, head in kinds:
        for text in sorted(folder.glob("*.txt")):
            for part in re.split(r"(?m)^== ", text.read_text("utf-8"))[1:]:
                title, _, body = part.partition("\n")
                cells = [cell.strip("\n") for cell in body.split("# %%\n")]
                yield Notebook(f"{folder.name}/{text.stem}, {title}", cells, setup, head)


# ---- recording


class Item:
    """A folder of files about one notebook or snapshot file, free of what changes from run to run."""

    def __init__(self, folder: Path, scratch: Path, snapshots: Path) -> None:
        self._folder = folder
        self.scratch = scratch
        folder.mkdir(parents=True, exist_ok=True)
        roots = {
            str(scratch): "<scratch>",
            str(Path(_package().__file__).parent): "<package>",
            str(Path(_package().__file__).parents[1]): "<project>",
            str(HERE.parent): "<project>",
            str(snapshots): "<snapshots>",
            sysconfig.get_path("stdlib"): "<python>",
            **{str(path): "<site>" for path in site.getsitepackages()},
            tempfile.gettempdir(): "<temporary>",
        }
        self._roots = sorted(roots.items(), key=lambda one: -len(one[0]))

    def text(self, name: str, text: str) -> None:
        (self._folder / name).write_text(self._plain(text).rstrip("\n") + "\n", "utf-8")

    def data(self, name: str, data: Any) -> None:
        self.text(name, "\n".join(_lines(data)))

    def picture(self, name: str, png: bytes) -> None:
        (self._folder / name).write_bytes(png)

    def html(self, name: str, html: str) -> None:
        """One element to a line; pictures as the hash of their pixels."""
        html = PICTURE.sub(lambda found: f"<picture {_pixels_hash(base64.b64decode(found[1]))}>", html)
        self.text(name, re.sub(r"(?<=>)(?=<)|&gt;&lt;", "\n", html))

    def _plain(self, text: str) -> str:
        for path, word in self._roots:
            text = text.replace(path, word)
        text = re.sub(r"<package>/[\w/]+\.py(:\d+|\", line \d+|(?=\"))?", "<package>", text)
        # A traceback's look into the package: its lines are the package's business.
        text = re.sub(r"(File <package>)[^\n]*\n(?:[^\n]+(?:\n|$))*", r"\1\n", text)
        text = re.sub(r"\bat 0x[0-9a-f]{6,}", "at <address>", text)
        text = re.sub(r"\b\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\b", "<date>", text)
        text = re.sub(r"<temporary>/tmp\w+", "<temporary>", text)
        text = re.sub(r"(id=|#|url\(#|--)?gpumem-[0-9a-f]{8,}", r"\1gpumem-<number>", text)
        return re.sub(r"sha256-[A-Za-z0-9+/=]{44}", "sha256-<hash>", text)


def _package() -> Any:
    import gpumem_magic

    return gpumem_magic


def _lines(data: Any, indent: str = "", key: str = "") -> Iterator[str]:
    """JSON, with what is short on one line."""
    whole = json.dumps(data, ensure_ascii=False, default=repr)
    if len(whole) < 120 or not isinstance(data, dict | list | tuple) or not data:
        yield f"{indent}{key}{whole}"
    elif isinstance(data, dict):
        yield f"{indent}{key}{{"
        for name, value in data.items():
            yield from _lines(value, indent + " ", f"{json.dumps(str(name))}: ")
        yield f"{indent}}}"
    else:
        yield f"{indent}{key}["
        for value in data:
            yield from _lines(value, indent + " ")
        yield f"{indent}]"


def _pixels_hash(png: bytes) -> str:
    pixels = _pixels(png)
    return f"{pixels.shape[1]}x{pixels.shape[0]} {hashlib.sha256(pixels.tobytes()).hexdigest()[:16]}"


def _pixels(png: bytes) -> Any:
    from matplotlib.image import imread

    return imread(io.BytesIO(png), format="png")


class _NumbersAndTexts(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot holds {module}.{name}")


def _snapshot_lines(path: Path, *, clock: bool) -> Iterator[str]:
    """A saved snapshot: an event or block to a line, its stack as a number; the stacks follow. clock: with its times."""
    with path.open("rb") as file:
        data = _NumbersAndTexts(file).load()
    stacks: dict[tuple[str, ...], str] = {}

    def without_stacks(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: stack_number(inner) if name == "frames" and isinstance(inner, list) else without_stacks(inner)
                for name, inner in value.items()
                if name != "overhead_seconds" and (clock or name != "time_us")
            }
        return [without_stacks(inner) for inner in value] if isinstance(value, list | tuple) else value

    def stack_number(frames: list[Any]) -> str:
        texts = tuple(f"{one['filename']}:{one['line']} {one['name']}" for one in frames)
        return stacks.setdefault(texts, f"stack {len(stacks)}")

    yield from _lines(without_stacks(data))
    for texts, name in stacks.items():
        yield name
        yield from (f"  {text}" for text in texts)


def record_report(item: Item, stem: str, report: Any, *, pictures: bool = True, clock: bool = False) -> None:
    """Everything that a report has. clock: its events' times come from a file, and are the same in every run."""
    as_data = {**report.to_dict(), "overhead_seconds": 0}
    item.data(f"{stem}.report.json", _without_times(as_data))
    again = type(report).from_dict(report.to_dict())
    same = again.to_dict() == report.to_dict() and str(again) == str(report)
    views = "".join(f"\n---- {kind}\n{report.view(kind)}" for kind in ("table", "plot"))
    item.text(f"{stem}.report.txt", f"{report!r}\n{report}{views}\n---- from_dict gives the same: {same}")
    _attempt(item, f"{stem}.page.json", lambda: _record_page(item, stem, report.timeline(), pictures, clock))
    _attempt(item, f"{stem}.snapshot.txt", lambda: _record_snapshot(item, stem, report, clock))
    if pictures:
        bundle, _ = report._repr_mimebundle_(include=(HTML, PNG))
        item.html(f"{stem}.report.html", bundle[HTML])
        item.picture(f"{stem}.report.png", base64.b64decode(bundle[PNG]))
        from matplotlib.text import Text

        words = [one.get_text() for one in report.plot().findobj(Text) if one.get_text() and one.get_visible()]
        item.text(f"{stem}.figure.txt", "\n".join(words))


def _record_page(item: Item, stem: str, timeline: Any, pictures: bool, clock: bool) -> None:
    page = timeline.to_html()
    (found,) = PAGE_DATA.findall(page)
    data = json.loads(found[1])
    for device in data["devices"] if not clock else ():
        del device["times"]
    item.data(f"{stem}.page.json", data)
    if pictures:
        item.html(f"{stem}.page.html", PAGE_DATA.sub(r"\1\3", page))
        item.picture(f"{stem}.page.png", timeline.to_png()[0])
    item.text(f"{stem}.page.txt", repr(timeline))


def _record_snapshot(item: Item, stem: str, report: Any, clock: bool) -> None:
    path = item.scratch / "saved.pickle"
    report.save_snapshot(path)
    item.text(f"{stem}.snapshot.txt", "\n".join(_snapshot_lines(path, clock=clock)))
    item.data(f"{stem}.loaded.json", _without_times(_package().load(path).to_dict()))
    _show(item, f"{stem}.show.txt", "show", str(path))


def _without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: 0 if name == "overhead_seconds" else _without_times(value) for name, value in data.items()}
    return [_without_times(value) for value in data] if isinstance(data, list | tuple) else data


def _attempt(item: Item, name: str, make: Callable[[], None]) -> None:
    """What cannot be had is written down as its error, in one line."""
    try:
        make()
    except Exception as error:
        item.text(name, f"{type(error).__name__}: {error}")


def _show(item: Item, name: str, *arguments: str) -> None:
    from gpumem_magic.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            status: Any = main(arguments)
        except SystemExit as left:
            status = left.code
    item.text(name, f"{out.getvalue()}{errors.getvalue()}\nexit status: {status}")


def record_notebook(item: Item, notebook: Notebook) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.history_manager.enabled = False
    names = [str(value) for value in getattr(type(shell).colors, "values", None) or ["nocolor"]]
    shell.run_line_magic("colors", "nocolor" if "nocolor" in names else "NoColor")
    shell.user_ns["get_ipython"] = lambda: shell
    shell.run_line_magic("load_ext", "gpumem_magic")
    _run(shell, notebook.setup)
    last = None
    reports = 0
    for number, cell in enumerate(notebook.cells, start=1):
        printed = _run(shell, notebook.head + cell)
        stem = f"{number:02}"
        text = [f">>> {line}" for line in cell.splitlines()] + [printed[0]]
        for place, bundle in enumerate(printed[1]):
            text.append(f"---- displayed: {', '.join(sorted(bundle))}\n{bundle.get('text/plain', '')}")
            if HTML in bundle:
                item.html(f"{stem}.displayed-{place}.html", bundle[HTML])
        item.text(f"{stem}.printed.txt", "\n".join(text))
        report = _package().last_report()
        if report is not None and report is not last:
            last = report
            reports += 1
            record_report(item, stem, report, pictures=not notebook.head)
    item.text("reports.txt", f"{reports} reports of {len(notebook.cells)} cells")


def _run(shell: Any, cell: str) -> tuple[str, list[dict[str, Any]]]:
    """What a cell wrote (child processes too), and what it displayed."""
    from IPython.utils.capture import capture_output

    with tempfile.TemporaryFile() as file:
        outputs = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with capture_output() as captured:
                shell.run_cell(cell, store_history=True)
        finally:
            for number, kept in enumerate(outputs, start=1):
                os.dup2(kept, number)
                os.close(kept)
        file.seek(0)
        written = file.read().decode("utf-8", "replace")
    return f"{captured.stdout}{captured.stderr}{written}", [dict(one.data) for one in captured.outputs]


def record_file(item: Item, path: Path) -> None:
    try:
        report = _package().load(path)
    except (OSError, ValueError) as error:
        item.text("load.txt", f"{type(error).__name__}: {error}")
        report = None
    if report is not None:
        record_report(item, "peak", report, clock=True)
    for moment in ("peak", "end", "1"):
        _show(item, f"show-{moment}.txt", "show", str(path), "--at", moment)
    redacted = item.scratch / "redacted.pickle"
    _show(item, "redacted.txt", "show", str(path), "--redact", str(redacted))
    if redacted.exists():
        item.text("redacted-snapshot.txt", "\n".join(_snapshot_lines(redacted, clock=True)))
    _show(item, "replay.txt", "replay", str(path))
    _show(item, "replay-expandable.txt", "replay", str(path), "--conf", "expandable_segments:True")


def record_command(item: Item, files: list[Path]) -> None:
    _show(item, "side-by-side.txt", "show", *map(str, files))
    for first, second in pairwise(files):
        _show(item, f"diff {first.name}.txt", "diff", str(first), str(second))
    _show(item, "devices.txt", "devices")
    for name in ("", "run", "show", "diff", "replay", "calibrate", "devices"):
        _show(item, f"help {name}.txt", *[word for word in (name, "--help") if word])
    _show(item, "errors.txt", "show")
    _show(item, "errors-option.txt", "show", "nowhere.pickle", "--att", "3")
    _show(item, "errors-file.txt", "show", "nowhere.pickle")


def record(folder: Path, snapshots: Path, only: str, jobs: int) -> int:
    files = sorted(snapshots.glob("*.pickle*"))
    tasks: list[tuple[str, Callable[[Item], None]]] = [
        *((one.title, partial(record_notebook, notebook=one)) for one in notebooks()),
        *((f"snapshots/{path.name}", partial(record_file, path=path)) for path in files),
        ("command", partial(record_command, files=files)),
    ]
    if not files:
        print(f"no snapshot files in {snapshots}: see --snapshots", file=sys.stderr)
    print(f"{_package().__file__}: {len(tasks)} items")
    for name in ("torch", "matplotlib.figure", "IPython.core.interactiveshell"):
        import_module(name)  # here once, and not in every child
    running: dict[int, str] = {}
    failed = []
    chosen = [task for task in tasks if only in task[0]]
    while chosen or running:
        if chosen and len(running) < jobs:
            title, make = chosen.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _in_child(folder / re.sub(r"[^\w/.,' -]", "_", title), make, snapshots)
            running[child] = title
            continue
        child, status = os.wait()
        title = running.pop(child)
        print(f"{'recorded' if status == 0 else 'FAILED'}  {title}")
        if status:
            failed.append(title)
    return 1 if failed else 0


def _in_child(folder: Path, make: Callable[[Item], None], snapshots: Path) -> None:
    status = 1
    try:
        # When Python collects garbage depends on everything that was ever made.
        gc.disable()
        random.seed(0)
        with tempfile.TemporaryDirectory(prefix="gpumem-golden-") as scratch:
            os.chdir(scratch)
            make(Item(folder, Path(scratch), snapshots))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ---- comparing


def compare(before: Path, after: Path, most_lines: int) -> int:
    names = sorted({str(path.relative_to(top)) for top in (before, after) for path in top.rglob("*") if path.is_file()})
    different = 0
    told: dict[tuple[str, ...], str] = {}
    for name in names:
        found = _difference(before / name, after / name, most_lines)
        if not found:
            print(f"     {name}: the same")
            continue
        different += 1
        first = told.setdefault(tuple(found), name)
        if first != name and found[1:]:
            print(f"==== {name}: as in {first}")
        else:
            print(f"==== {name}: {found[0]}", *(f"  {line}" for line in found[1:]), sep="\n")
    print(f"\n{len(names)} items: {len(names) - different} the same, {different} different")
    return 1 if different else 0


def _difference(before: Path, after: Path, most_lines: int) -> list[str]:
    if not before.exists() or not after.exists():
        return ["only in the second" if after.exists() else "only in the first"]
    old, new = before.read_bytes(), after.read_bytes()
    if old == new:
        return []
    if before.suffix == ".png":
        first, second = _pixels(old), _pixels(new)
        if first.shape != second.shape:
            return [f"{first.shape[1]}x{first.shape[0]} pixels before, {second.shape[1]}x{second.shape[0]} now"]
        changed = int((first != second).any(axis=-1).sum())
        return [f"{changed:,} of {first.shape[0] * first.shape[1]:,} pixels differ"] if changed else []
    return _text_difference(old.decode().splitlines(), new.decode().splitlines(), most_lines)


def _text_difference(old: list[str], new: list[str], most_lines: int) -> list[str]:
    """The first differing part is looked at closely; a long rest is only counted: aligning it would take minutes."""
    start = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    end = next(
        (n for n, (a, b) in enumerate(zip(reversed(old[start:]), reversed(new[start:]), strict=False)) if a != b),
        min(len(old), len(new)) - start,
    )
    near = max(start - 2, 0)
    old, new = old[near : len(old) - max(end - 2, 0)], new[near : len(new) - max(end - 2, 0)]
    lines = list(difflib.unified_diff(old[:4000], new[:4000], lineterm="", n=2))[2:]
    shown = [line[:300] for line in lines[:most_lines]]
    if len(lines) > most_lines:
        shown.append(f"... {len(lines) - most_lines} more lines of difference")
    return [f"differs from line {start + 1}, within {max(len(old), len(new))} lines", *shown]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("folder", type=Path)
    one.add_argument("--only", default="", metavar="WORDS", help="only items with these words in their title")
    one.add_argument("--snapshots", type=Path, default=SNAPSHOTS, metavar="FOLDER")
    one.add_argument("--jobs", type=int, default=1)
    two = commands.add_parser("compare")
    two.add_argument("folders", type=Path, nargs=2)
    two.add_argument("--lines", type=int, default=40, help="of difference, for each item")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.folders[0], options.folders[1], options.lines)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets, also in PyTorch, is the same in every run then.
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
        own = {"PYTHONHASHSEED": "0", "GPUMEM_CALIBRATION": "", "COLUMNS": "120", "NO_COLOR": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **quiet, **own})
    return record(options.folder.resolve(), options.snapshots.resolve(), options.only, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
