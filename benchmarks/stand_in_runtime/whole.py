"""Runs a program with the allocator's history on, and keeps the snapshot: python whole.py OUT SPEC SCRIPT [ARGUMENT ...].

SPEC is a virtual GPU, or "-" for CUDA. The snapshot is that of the program's end, or of its error, while its variables live. It
runs in either environment, and so needs nothing but PyTorch and what the program imports.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def main(out: str, spec: str, script: str) -> None:
    if spec == "-":
        torch.cuda.init()
    else:
        from gpumem_magic.virtual import gpu

        gpu.turn_on(spec)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).resolve().parent)
    program: dict[str, Any] = {"__name__": "__main__", "__file__": script}
    code = compile(Path(script).read_text(encoding="utf-8"), script, "exec")
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000_000)
    try:
        exec(code, program)
    finally:
        torch.cuda.memory._dump_snapshot(out)


if __name__ == "__main__":
    main(*sys.argv[1:4])
