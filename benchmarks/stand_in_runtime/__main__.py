"""What PyTorch's own CUDA build asks its allocator for, operator by operator, beside the virtual GPU. No GPU is needed.

    python benchmarks/stand_in_runtime --python OTHER/bin/python [--card A100] [--only TEXT ...]
        [--opinfo | --modules | --optimizers | --script FILE [ARGUMENT ...]]

OTHER is an environment with a CUDA build of PyTorch, as `pip install torch` makes it on Linux; its version is the one compared.
ATen's, CUB's and the allocator's host code run over a CUDA runtime in which no kernel runs (`runtime.c`), built into a scratch
folder with `cc` and that environment's headers. The cases of `cases.txt` run here and there: what each allocates and frees, in
order, is compared. With --opinfo, --modules or --optimizers, samples of PyTorch's own tests are, each with its gradients. With
--script a whole program is, by `gpumem diff --events`: OTHER needs what it imports, and no kernel makes the values it reads.

It was run with 2.1, 2.6, 2.11 and 2.13.
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
    parser.add_argument(
        "--python", metavar="OTHER", required=True, help="the Python of an environment with a CUDA build"
    )
    parser.add_argument("--card", default="A100", help="a card of `gpumem devices` (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="cases, or operators, with a TEXT in their name")
    for flag, of, drawn in (
        ("--opinfo", "operators", "each operator, with gradients, once and twice, in place and with out="),
        ("--modules", "modules", "each module, with gradients, for training and for inference, with autocast"),
        ("--optimizers", "optimizers", "each optimizer, three steps"),
    ):
        text = f"PyTorch's own samples of {drawn}, in place of the cases; both environments need expecttest"
        parser.add_argument(flag, dest="of", action="store_const", const=of, help=text)
    parser.add_argument(
        "--script", metavar="FILE", nargs=argparse.REMAINDER, help="a program, and its arguments, in place of the cases"
    )
    parser.add_argument("--most", type=int, default=4, help="samples of one of these and a type (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which samples, and their values (default: %(default)s)")
    options = parser.parse_args()
    if options.script is not None:
        return (
            by_script(options.python, options.card, options.script) if options.script else parser.error("which script?")
        )
    if options.of:
        request = {"of": options.of, "only": options.only, "most": options.most, "seed": options.seed}
        return by_sample(options.python, options.card, request)
    listed = read((HERE / "cases.txt").read_text(encoding="utf-8"))
    wanted = [case for case in listed if options.only is None or any(text in case.name for text in options.only)]
    if not wanted:
        parser.error(f"no case has {' or '.join(options.only)} in its name")
    try:
        title, there, here = both(options.python, options.card, {"cases": wanted})
    except (Unfit, catalog.UnknownDevice) as why:
        print(f"Not compared: {str(why).rstrip('.')}.", file=sys.stderr)
        return 1
    print(title)
    print("\n".join(words(wanted, there, here)))
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


def by_sample(python: str, card: str, request: dict[str, Any]) -> int:
    try:
        with tempfile.NamedTemporaryFile() as drawn:
            command = [sys.executable, str(HERE / "samples.py"), drawn.name]
            done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unfit(f"no samples: {(done.stderr.strip().splitlines() or ['no word why'])[-1]}")
            title, there, here = both(python, card, {"of": request["of"], "samples": drawn.name})
    except (Unfit, catalog.UnknownDevice) as why:
        print(f"Not compared: {str(why).rstrip('.')}.", file=sys.stderr)
        return 1
    print(title)
    print("\n".join(grouped(there, here)))
    return 0


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
        return dict(json.loads(Path(out.name).read_text(encoding="utf-8")))


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
