"""What PyTorch's own CUDA build asks its allocator for, operator by operator, beside the virtual GPU. No GPU is needed.

    python benchmarks/stand_in_runtime --python OTHER/bin/python [--card A100] [--only TEXT ...]
        [--sweeps | --opinfo | --modules | --optimizers | --script FILE [ARGUMENT ...]]
    python benchmarks/stand_in_runtime --save FILE [--sweeps | --opinfo | --modules | --optimizers]
    python benchmarks/stand_in_runtime --against FILE [--card H100] [--only TEXT ...]

OTHER is an environment with a CUDA build of PyTorch, as `pip install torch` makes it on Linux; its version is the one compared.
ATen's, CUB's and the allocator's host code run over a CUDA runtime in which no kernel runs (`runtime.c`), built into a scratch
folder with `cc` and that environment's headers. The cases of `cases.txt` run here and there: what each allocates and frees, in
order, is compared. With --sweeps, cases at many shapes are (`sweeps.txt`). With --opinfo, --modules or --optimizers, samples of
PyTorch's own tests are, each with its gradients. With --script a whole program is, by `gpumem diff --events`: OTHER needs what
it imports, and no kernel makes the values it reads.

On a computer with a GPU, --save keeps in FILE what this environment's PyTorch asks for there, and --against compares such a
file with the virtual GPU, on any computer: all that FILE has (some thousands of calls take an hour), or with --only those with
a TEXT in their name, in seconds. Of a sample the name is operator, type, number and way ("softmax float64 0 backward").

It was run with each version from 2.1 to 2.14, and on an H100 with 2.11. (2.3 lacks `crt/host_defines.h`: a newer PyTorch's
triton has it, whose `crt` can be copied beside that environment's `cuda_runtime_api.h`.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import saved
import sweeps
from building import HERE, Unfit, Wheel, build, wheel

from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.card.models import GpuModel


class Case(NamedTuple):
    name: str
    setup: str
    expression: str


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/stand_in_runtime",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--python", metavar="OTHER", help="the Python of an environment with a CUDA build")
    way.add_argument("--save", metavar="FILE", help="keep what the GPU of this computer is asked for")
    way.add_argument("--against", metavar="FILE", help="compare with what another computer's --save kept")
    parser.add_argument(
        "--card", help="a card of `gpumem devices` (default: A100, and with --against the one that FILE names)"
    )
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+", help="cases, or operators, with a TEXT in their name: no others run"
    )
    for flag, of, drawn in (
        ("--opinfo", "operators", "each operator, with gradients, once and twice, in place and with out="),
        ("--modules", "modules", "each module, with gradients, for training and for inference, with autocast"),
        ("--optimizers", "optimizers", "each optimizer, three steps"),
    ):
        text = f"PyTorch's own samples of {drawn}, in place of the cases; both environments need expecttest"
        parser.add_argument(flag, dest="of", action="store_const", const=of, help=text)
    parser.add_argument("--sweeps", action="store_true", help="cases at many shapes, in place of those of cases.txt")
    parser.add_argument(
        "--script", metavar="FILE", nargs=argparse.REMAINDER, help="a program, and its arguments, in place of the cases"
    )
    parser.add_argument("--most", type=int, default=4, help="samples of one of these and a type (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which samples, and their values (default: %(default)s)")
    parser.add_argument("--types", metavar="NAME", nargs="+", help="of operators, as float64 (default: six of them)")
    parser.add_argument("--drawn", metavar="FILE", help="samples that samples.py drew before")
    parser.add_argument("--processes", type=int, default=1, help="with --save: that run side by side (default: 1)")
    parser.add_argument("--minutes", type=float, default=60, help="with --save: what is not done then is left out")
    options = parser.parse_args()
    if options.script is not None:
        return (
            by_script(options.python, options.card or "A100", options.script)
            if options.script and options.python
            else parser.error("which script, and with which --python?")
        )
    if options.against:
        return against(options.against, options.card, options.only)
    if options.sweeps:
        listed = [Case(*one) for one in sweeps.drawn(options.seed)]
    else:
        listed = read((HERE / "cases.txt").read_text(encoding="utf-8"))
    wanted = [case for case in listed if options.only is None or any(text in case.name for text in options.only)]
    if not (wanted or options.of):
        parser.error(f"no case has {' or '.join(options.only)} in its name")
    try:
        with tempfile.NamedTemporaryFile() as drawn:
            request: dict[str, Any] = {"cases": wanted}
            if options.of:
                asked = {
                    "of": options.of,
                    "only": options.only,
                    "most": options.most,
                    "seed": options.seed,
                    "types": options.types,
                }
                request = {"of": options.of, "samples": options.drawn or drawn.name}
                if not options.drawn:
                    draw(asked, drawn.name)
            if options.save:
                saved.save(options.save, request, options.processes, options.minutes)
                return 0
            title, there, here = both(options.python, options.card or "A100", request)
    except (Unfit, catalog.UnknownDevice) as why:
        print(f"Not compared: {str(why).rstrip('.')}.", file=sys.stderr)
        return 1
    print(title)
    print("\n".join(grouped(there, here) if options.of else words(wanted, there, here)))
    return 0


def against(file: str, card: str | None, only: list[str] | None) -> int:
    """What another computer's GPU was asked for, beside the virtual one of its name and its PyTorch."""
    try:
        with tempfile.NamedTemporaryFile() as drawn:
            about, request, there = saved.read(file, drawn.name)
            there = {
                name: events for name, events in there.items() if only is None or any(text in name for text in only)
            }
            if not there:
                raise Unfit(f"nothing that was recorded has {' or '.join(only or ())} in its name")
            # (Without what was cut off when it was recorded, and what nobody asked for.)
            request["names"] = list(there)
            version = ".".join(about["torch"].split(".")[:2])
            spec = f"{card or key_of(about['name'])},torch={version}"
            here = run(sys.executable, request, spec, {})
    except (Unfit, catalog.UnknownDevice, OSError) as why:
        print(f"Not compared: {str(why).rstrip('.')}.", file=sys.stderr)
        return 1
    print(f"PyTorch {about['torch']} on {about['name']} (A), {spec} on the virtual GPU (B)")
    cases = [Case(*case) for case in request.get("cases", ())]
    print("\n".join(words([one for one in cases if one.name in there], there, here) if cases else grouped(there, here)))
    return 0


def by_script(python: str, card: str, script: list[str]) -> int:
    """`gpumem diff --events` of a program's recordings."""
    try:
        other = wheel(python)
        version = ".".join(other.version.split(".")[:2])
        with tempfile.TemporaryDirectory() as scratch:
            there, here = (f"{scratch}/{name}.pickle" for name in ("cuda_build", "virtual"))
            environment = stand_in(other, card_model(card), Path(scratch))
            for command, added in (
                ([python, HERE / "whole.py", there, "-"], environment),
                ([sys.executable, HERE / "whole.py", here, f"{card},torch={version}"], {}),
            ):
                if subprocess.run([*command, *script], env={**os.environ, **added}, check=False).returncode:
                    raise Unfit(f"{script[0]} failed {'over the stand-in runtime' if added else 'on the virtual GPU'}")
            command = [sys.executable, "-m", "gpumem_magic", "diff", "--events", there, here]
            return subprocess.run(command, check=False).returncode
    except (Unfit, catalog.UnknownDevice) as why:
        print(f"Not compared: {str(why).rstrip('.')}.", file=sys.stderr)
        return 1


def key_of(name: str) -> str:
    """The catalogue's key of a card by the name that its driver says."""
    found = next((key for key, model in catalog.CATALOG.items() if model.name == name), None)
    if found is None:
        raise Unfit(f"no card of the catalogue says that it is a {name}; name one by --card")
    return found


def draw(asked: dict[str, Any], file: str) -> None:
    command = [sys.executable, str(HERE / "samples.py"), file]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unfit(f"no samples: {(done.stderr.strip().splitlines() or ['no word why'])[-1]}")


def both(python: str, card: str, request: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What is compared, in words, and the answers of both sides."""
    model, other = card_model(card), wheel(python)
    version = ".".join(other.version.split(".")[:2])
    with tempfile.TemporaryDirectory() as scratch:
        there = run(python, request, None, stand_in(other, model, Path(scratch)))
    here = run(sys.executable, request, f"{card},torch={version}", {})
    title = f"PyTorch {other.version} over the stand-in runtime (A), {card},torch={version} on the virtual GPU (B)"
    return title, there, here


def read(text: str) -> list[Case]:
    """`name: setup || expression`, a line each; told=N; first in the setup is the number that the host reads back."""
    cases = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, code = line.partition(": ")
            setup, _, expression = code.rpartition(" || ")
            cases.append(Case(name, setup, expression))
    return cases


def card_model(card: str) -> GpuModel:
    spec = catalog.parse(card)
    if isinstance(spec, catalog.RealDevice):
        raise Unfit(f"{card} is a real device; a card of the catalogue is needed")
    return spec.models[0]


def stand_in(other: Wheel, model: GpuModel, scratch: Path) -> dict[str, str]:
    """The environment in which that wheel finds the runtime, which says of the card what the catalogue does."""
    described = {
        "NAME": model.name,
        "CAPABILITY": model.capability[0] * 10 + model.capability[1],
        "TOTAL": model.total_bytes,
        "MULTIPROCESSORS": model.multi_processor_count,
        "THREADS": model.max_threads_per_multiprocessor,
        "SHARED": model.shared_memory_per_multiprocessor,
        "SHARED_OPTIN": model.shared_memory_per_block_optin,
        "L2": model.l2_cache_bytes,
    }
    return build(other, scratch) | {f"STAND_IN_{key}": str(value) for key, value in described.items()}


def run(python: str, request: dict[str, Any], virtual: str | None, environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as out:
        asked = json.dumps({**request, "virtual": virtual})
        command = [python, str(HERE / "running.py"), out.name]
        everything = {**os.environ, **environment}
        done = subprocess.run(command, input=asked, env=everything, capture_output=True, text=True, check=False)
        if done.returncode:
            side = "on the virtual GPU" if virtual else "over the stand-in runtime"
            raise Unfit(f"{side} nothing ran: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}")
        return saved.answers(Path(out.name).read_text(encoding="utf-8"))


def words(cases: list[Case], there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What differs, and the counts. A case that fails over the stand-in says nothing about the virtual GPU and is left out."""
    ran = [case for case in cases if not isinstance(there[case.name], str)]
    alike = [case for case in ran if sizes(there[case.name]) == sizes(here[case.name])]
    with_frees = [case for case in alike if there[case.name] == here[case.name]]
    lines = []
    for case in ran:
        if case not in with_frees:
            kind = "frees in another order" if case in alike else "other allocations"
            lines += [f"\n{case.name}: {kind}  ({case.setup} || {case.expression})"]
            lines += [f"  A {shown(there[case.name])}", f"  B {shown(here[case.name])}"]
    for case in cases:
        if case not in ran:
            lines.append(f"\n{case.name}: left out, over the stand-in runtime: {there[case.name]}")
    return [
        *lines,
        f"\n{len(alike)} of {len(ran)} cases alike (allocations), {len(with_frees)} alike with their frees.",
    ]


def grouped(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Operators that differ, those with the most calls first, with one call each; and the counts."""
    ran = [name for name, events in there.items() if not isinstance(events, str)]
    alike = {name for name in ran if sizes(there[name]) == sizes(here.get(name))}
    with_frees = {name for name in alike if there[name] == here[name]}
    groups: dict[tuple[bool, str], list[str]] = {}
    for name in ran:
        if name not in with_frees:
            groups.setdefault((name in alike, operator_of(name)), []).append(name)
    lines = []
    for (only_frees, operator), names in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        kind = "frees in another order" if only_frees else "other allocations"
        first = names[0]
        lines.append(f"\n{operator}: {kind} in {len(names)}  ({first.partition(' ')[2]})")
        lines += [f"  A {shown(there[first])}", f"  B {shown(here.get(first))}"]
    operators = {operator_of(name) for name in ran}
    failed = sorted({operator_of(name) for name in there} - operators)
    if failed:
        lines.append(f"\nLeft out, since nothing of them runs over the stand-in runtime: {', '.join(failed)}")
    share = f"{len(alike)} of {len(ran)} calls alike (allocations), {len(with_frees)} alike with their frees"
    return [*lines, f"\n{share}; {len(operators)} operators."]


def operator_of(name: str) -> str:
    """Of a call, whose name is ``operator type number way``."""
    return name.split(" ")[0]


def sizes(events: Any) -> Any:
    return [size for what, size in events if what == "+"] if isinstance(events, list) else events


def shown(events: Any) -> str:
    return " ".join(f"{what}{number}" for what, number in events) if isinstance(events, list) else str(events)


if __name__ == "__main__":
    sys.exit(main())
