"""Programs on the virtual GPU with ``values=real`` beside the same programs on the host: do they print the same?

    python benchmarks/real_values [--device T4] [--only WORD] [--overhead | --ways]

The programs are in `basics`, `numerics`, `networks`, `modern` and `deciding`: small ones in the shape of PyTorch's tutorials and
examples, each a function of the device. They print losses, predictions, choices and counts; what they print must be the same to
the last digit that is printed. ``--ways`` runs them with stand-ins and with values=auto instead, and says which go another way
than with real values though the report's first line has no word about it. ``--overhead`` times operators, their gradients and
optimizers' steps on tensors of 1 to 16 MiB, and the steps of the programs in `heavy`, whose tensors are above 1 MiB, on the host
and on the virtual GPU, in turn. It says which take at most twice as long.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import basics
import deciding
import modern
import networks
import numerics
import overhead
import torch
import ways

from gpumem_magic.virtual import gpu

Program = Callable[[str], None]


def programs() -> dict[str, Program]:
    """All programs by their names, in the order of the files."""
    return {
        name: function
        for module in (basics, numerics, networks, modern, deciding)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["device"]
    }


def printed(program: Program, device: str) -> str:
    """What a program prints, without the device's name; an error's text where it fails."""
    torch.manual_seed(0)
    # (Compiling a program turns it off for all that follow.)
    torch.distributions.Distribution.set_default_validate_args(True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program(device)
        except Exception:
            out.write(traceback.format_exc())
    return plain(out.getvalue())


def plain(text: str) -> str:
    """Without the device, and without the line breaks that its name brings about."""
    words = text.replace("device='cuda:0'", "").replace(",", " ").split()
    return " ".join(words).replace(" )", ")")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="T4", help="the virtual GPU (default T4)")
    parser.add_argument("--only", default="", help="programs with this word in their name")
    parser.add_argument("--overhead", action="store_true", help="time operators instead")
    parser.add_argument("--sizes", type=float, nargs="+", default=overhead.SIZES, help="of their tensors, in MiB")
    parser.add_argument(
        "--ways", action="store_true", help="compare the ways that programs take with stand-ins instead"
    )
    options = parser.parse_args()
    chosen = {name: program for name, program in programs().items() if options.only in name}
    if options.overhead:
        gpu.turn_on(f"{options.device},values=real")
        overhead.compare(options.only, options.sizes)
        return 0
    if options.ways:
        return int(ways.compare(chosen, options.device) > 0)
    wanted = {name: printed(program, "cpu") for name, program in chosen.items()}
    machine = gpu.turn_on(f"{options.device},values=real")
    same = 0
    for name, program in chosen.items():
        found = printed(program, "cuda")
        if found == wanted[name] and "Traceback" not in found:
            same += 1
            continue
        print(f"-- {name}")
        print(
            "\n".join(
                difflib.unified_diff(wanted[name].split(" "), found.split(" "), "host", "virtual", lineterm="", n=2)
            )
        )
    print(f"{same} of {len(chosen)} programs print the same; {sum(machine.reads.counts.values())} stand-ins were read")
    return int(same < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
