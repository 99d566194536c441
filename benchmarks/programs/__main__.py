"""Public programs on the virtual GPU, each run and judged.

    python benchmarks/programs --repositories DIR [--packages FOLDER ...] [--only TEXT] [--values] [--results PATH] [--update]

DIR holds the programs' repositories as git keeps them (``DIR/owner+name/repo``, ``DIR/owner/name`` or ``DIR/owner/name.git``);
``programs.toml`` says which, and what is run. Each program is laid out in a scratch folder and run by ``gpumem run``, with values
that are stand-ins, and judged:

works          it ended as it should (or its time was up while it ran on the device), with stand-ins or, if it fails so, with
               values=auto, or with values=real where the report says that this is needed
its own fault  it fails the same way on the host, where nothing is virtual
refused        the virtual GPU said in one line what it cannot do, and what to do instead
not judged     its time was up before it came to the device, or to where it fails with stand-ins
wrong          anything else

``--values`` runs it on the host and with ``values=real`` as well, compares what they print, and whether stand-ins take the same
way (iterations, lines but for their numbers, peak); where they do not, the report has to say that it may be so. Where the time of
one was up, its report says how far it came, and they are compared as far as both went.
``--results`` keeps the outcomes in a file and runs only what is not in it yet; ``--again VERDICT`` runs those with that verdict
again. ``--update`` also puts them into ``results.csv``, which the documentation shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import kept_rows  # noqa: E402
from data import RECIPES  # noqa: E402
from judging import Run, came_further, is_refusal, run, same_text, way_taken  # noqa: E402
from layout import Missing, lay_out, repository, script_of  # noqa: E402

# What nearly every program imports sooner or later, and what the command does: imported once with --fork.
_COMMON = (
    "torch", "torch._dynamo", "torch.utils.data", "torchvision.datasets", "gpumem_magic.cli", "gpumem_magic.virtual.machine",
    "gpumem_magic.recording.recorder", "gpumem_magic.causes.why", "gpumem_magic.report.build", "gpumem_magic.user_report",
    "gpumem_magic.views.text",
)  # fmt: skip
# Before a program that says nothing of a device.
_ON_THE_DEVICE = (
    "import torch; torch.set_default_device('cuda' if torch.cuda.is_available() else 'cpu'); torch.manual_seed(0)\n"
)
RESULTS = HERE / "results.csv"
KEY = ("repository", "program")
VERDICTS = ("works", "its own fault", "refused", "not judged", "wrong")
LIMIT = 60


@dataclass(frozen=True)
class Outcome:
    """What became of a program. Sizes are in bytes; None: not tried. ended: not by the time's being up."""

    repository: str
    program: str
    domain: str
    verdict: str
    error: str = ""
    seconds: float = 0
    host_bytes: int = 0
    peak: int | None = None
    real_peak: int | None = None
    same_output: bool | None = None
    way: str = ""
    real: str = ""
    answer: str = ""
    values: str = "stand-in"
    day: str = ""
    ended: bool = True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repositories", metavar="DIR", type=Path, required=True)
    parser.add_argument("--packages", metavar="FOLDER", action="append", default=[], help="folders of further packages")
    parser.add_argument("--only", metavar="TEXT", default="", help="programs with TEXT in repository or name")
    parser.add_argument("--values", action="store_true", help="compare with the host and with values=real")
    parser.add_argument("--results", metavar="PATH", type=Path, help="keep outcomes here, and go on from them")
    parser.add_argument("--again", metavar="VERDICT", default="", help="run programs of this verdict again")
    parser.add_argument("--update", action="store_true", help=f"put the rows into {RESULTS.name}")
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=1e9, help="of the processor's time, for each at most"
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="import once what nearly all programs import: much faster, and all begin with the same random numbers",
    )
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="keep what the programs print in FOLDER")
    options = parser.parse_args()
    sys.path[1:1] = options.packages
    known = _read(options.results)
    if options.fork:
        for name in _COMMON:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
    for one in table():
        key = f"{one['repository']}: {one['name']}"
        if options.only not in key:
            continue
        old = known.get(key)
        if old is not None and old.verdict != options.again and not (options.values and not old.real):
            continue
        try:
            outcome = judged(one, options)
        except Missing as why:
            print(f"{key}: left out: {why}", flush=True)
            continue
        known[key] = outcome
        print(
            f"{outcome.verdict:<14}{outcome.way:<7}{outcome.seconds:5.0f} s  {key}  {outcome.error[:200]}", flush=True
        )
        if options.results is not None:
            options.results.write_text(
                json.dumps({name: dataclasses.asdict(one) for name, one in known.items()}, indent=1)
            )
    outcomes = [known[key] for one in table() if (key := f"{one['repository']}: {one['name']}") in known]
    if options.update:
        kept_rows.update(RESULTS, map(row_of, outcomes), KEY)
    print(counts(outcomes))
    return int(any(one.verdict == "wrong" or one.way == "silent" for one in outcomes))


def table() -> Iterator[dict[str, Any]]:
    """Every program, with what holds for its repository."""
    for every in tomllib.loads((HERE / "programs.toml").read_text(encoding="utf-8"))["repository"]:
        shared = {key: value for key, value in every.items() if key not in ("name", "program")}
        for one in every["program"]:
            name = one.get("name") or one["script"]
            row = {"repository": every["name"], "name": name, **shared, **one}
            yield row if "entry" not in row else {**row, "entry": row["entry"].replace("$name", name)}


def judged(one: Mapping[str, Any], options: argparse.Namespace) -> Outcome:
    """Lays a program out for each way of running it, runs it, and compares."""
    for package in one.get("packages", ()):
        if importlib.util.find_spec(package) is None:
            raise Missing(f"it needs the package {package}")
    for wanted in one.get("versions", ()):
        package, _, version = wanted.partition("==")
        if (there := _version(package)) != version:
            raise Missing(f"it needs {package} {version}, and {there or 'none'} is here")
    source = None if one.get("installed") else repository(options.repositories, one["repository"])
    device = one.get("device", "T4")
    found = _once(one, source, device, options, "stand-ins")
    verdict, error, values = "works", "", "stand-in"
    on_host = None
    if found.status:
        error = found.last_error
        on_host = _once(one, source, None, options, "host")
        if on_host.status and on_host.last_error.split(":")[0] == error.split(":")[0]:
            verdict = "its own fault"
        else:
            # (Where a library's compiled code ends the process there is no report, but a warning before.)
            ways = ["auto", *["real"] * ("values=real" in found.report.get("answer", "") + found.err)]
            unknown = on_host.status is None
            for values in ways:
                with_values = _once(one, source, f"{device},values={values}", options, values)
                if with_values.status == 0 or (with_values.status is None and came_further(with_values, found)):
                    found = with_values
                    break
                unknown = unknown or with_values.status is None
            else:
                values = "stand-in"
                if "own_fault" in one:
                    verdict = "its own fault"
                elif is_refusal(found):
                    verdict = "refused"
                else:
                    verdict = "not judged" if unknown else "wrong"
    elif found.status is None and not found.peak:
        verdict, error = "not judged", "its time was up before it came to the device"
    outcome = Outcome(
        one["repository"], one["name"], one["domain"], verdict, error, found.seconds, found.host_bytes,
        found.peak, values=values, answer=found.report.get("answer", ""), day=date.today().isoformat(),
        ended=found.status is not None,
    )  # fmt: skip
    if options.values and verdict not in ("its own fault", "not judged"):
        on_host = on_host or _once(one, source, None, options, "host")
        real = _once(one, source, f"{device},values=real", options, "real")
        outcome = dataclasses.replace(
            outcome,
            # One that was stopped may not have come to its peak, and compiled code has another.
            real_peak=None if None in (real.status, found.status) or real.ran_compiled_code_eagerly else real.peak,
            way=way_taken(found, real),
            real="works" if not real.status else real.last_error,
            same_output=_prints_the_same(real, on_host),
        )
    return outcome


def _prints_the_same(real: Run, on_host: Run) -> bool | None:
    """None where that says nothing: it failed on the host, or was stopped after some iterations and printed then how it ended."""
    stopped = "Stopped as asked" in real.err
    whole = real.status == on_host.status == 0 and not stopped
    same = None if on_host.status else same_text(real.said, on_host.said, whole=whole)
    return None if same is False and stopped else same


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """Not a `TemporaryDirectory`, which a forked copy of this process would remove as it ends, with the report in it."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _once(
    one: Mapping[str, Any], source: Path | None, device: str | None, options: argparse.Namespace, way: str
) -> Run:
    with _scratch_folder() as scratch:
        folder, home = Path(scratch, "program"), Path(scratch, "home")
        folder.mkdir()
        home.mkdir()
        if source is not None:
            lay_out(source, one["commit"], folder)
        script = one.get("script", "entry.py")
        if script.endswith(".ipynb"):
            notebook = folder / script
            script = f"{script.removesuffix('.ipynb')}.py"
            (folder / script).write_text(script_of(notebook.read_text(encoding="utf-8")), encoding="utf-8")
        for file, before, after in one.get("change", ()):
            text = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace(before, after), encoding="utf-8")
        if "entry" in one:
            (folder / script).write_text(one["entry"], encoding="utf-8")
        if one.get("default_device"):
            text = (folder / script).read_text(encoding="utf-8")
            (folder / script).write_text(_ON_THE_DEVICE + text, encoding="utf-8")
        place = folder / one.get("folder", Path(script).parent)
        for recipe, where, *numbers in one.get("data", ()):
            RECIPES[recipe](home / where[2:] if where.startswith("~/") else place / where, *numbers)
        path = [str(folder / part) for part in one.get("path", ())] + [str(Path(p).resolve()) for p in options.packages]
        before = [["-c", one["prepare"]]] if "prepare" in one else []
        for words in (*before, *([other] for other in one.get("before", ()))):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
            made = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True)
            if made.returncode:
                raise Missing(f"what it needs could not be made: {made.stderr.strip().rpartition(chr(10))[2]}")
        found = run(
            place, str((folder / script).relative_to(place)), one.get("arguments", ()), device=device, packages=path,
            limit=min(one.get("seconds", LIMIT), options.seconds), iterations=one.get("iterations"), home=home, fork=options.fork,
        )  # fmt: skip
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        name = f"{one['repository']} {one['name']}".replace("/", "+")
        (options.logs / f"{name}.{way}").write_text(f"{found.status}\n{found.out}\n==== stderr\n{found.err}")
    return found


def _read(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.exists():
        return {}
    return {name: Outcome(**one) for name, one in json.loads(path.read_text()).items()}


def counts(outcomes: list[Outcome]) -> str:
    """The last line."""
    number = Counter(one.verdict for one in outcomes)
    compared = [one for one in outcomes if one.same_output is not None]
    words = [f"{number[verdict]} {verdict}" for verdict in VERDICTS]
    late = sum(one.verdict == "works" and not one.ended for one in outcomes)
    words[0] += f" ({late} until their time was up, {_with(outcomes, 'auto')} with values=auto"
    words[0] += f", {needed} with values=real)" if (needed := _with(outcomes, "real")) else ")"
    same = sum(bool(one.same_output) for one in compared)
    real = f"; with values=real {same} of {len(compared)} print what the CPU prints" if compared else ""
    ways = Counter(one.way for one in outcomes if one.way)
    if ways:
        real += f"; stand-ins: {ways['same']} go the same way, {ways['said']} say that they may not, {ways['silent']} are silent"
    return f"{len(outcomes)} programs: {', '.join(words)}{real}"


def _with(outcomes: list[Outcome], values: str) -> int:
    return sum(one.verdict == "works" and one.values == values for one in outcomes)


def row_of(one: Outcome) -> dict[str, str]:
    """A row of the results, as the documentation shows it. Sizes are in MiB; empty: not tried, or nothing to compare."""
    works = one.verdict == "works"
    beside = ""
    if one.real_peak is not None and one.peak is not None:
        beside = "same" if one.peak == one.real_peak else f"{one.peak / max(1, one.real_peak) - 1:+.2%}"
    return {
        "repository": one.repository,
        "program": one.program,
        "domain": one.domain,
        "result": one.verdict if one.ended or not works else "time was up",
        "values": one.values if works else "",
        "s": f"{one.seconds:.0f}",
        "host MiB": f"{one.host_bytes / 2**20:,.0f}",
        "peak MiB": "" if one.peak is None else f"{one.peak / 2**20:,.1f}",
        "beside real": beside,
        "prints": {None: "", True: "yes", False: "no"}[one.same_output],
        "way": one.way,
        "day": one.day,
    }


if __name__ == "__main__":
    sys.exit(main())
