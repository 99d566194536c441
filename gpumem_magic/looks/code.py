"""Whose code a frame runs (PyTorch's, ours, an installed library's or the program's own), and what stands at its place."""

from __future__ import annotations

import linecache
import os
import re
import sys
from itertools import islice
from types import CodeType

from gpumem_magic.looks.shell import running_shell

# Whose a file is. What is passed over is neither the program's nor a library's that it would know.
OWN, LIBRARY, TORCH, PASSED_OVER = "own", "library", "torch", "passed over"

_LIBRARY_FILE = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|^<frozen |^torch[/\\]")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What runs a script: whoever called it is no part of the program.
_RUNNER = os.path.join(_OURS, "recording", "script.py")
# Code without a file that is a program's: a notebook's cell under old IPythons, a script from standard input.
_TYPED = ("<ipython-input", "<stdin>", "<string>", "<gpumem")
# What PyTorch's compiler generated: the folder that it names for a user, or that it was given.
_GENERATED = re.compile(r"[/\\]torchinductor_[^/\\]+[/\\]")
# What of PyTorch's spreads a program over ranks: gradients' buckets, sharded parameters, stages of a pipeline, and their helpers.
_SHARING_FILE = re.compile(
    r"(?:^|[/\\])torch[/\\](?:distributed[/\\](?:(?:fsdp|pipelining)[/\\]|utils\.py$)|nn[/\\]parallel[/\\]distributed\.py$)"
)
# A module's methods that make its tensors anew, and what they all go by.
_MODULE_FILE = re.compile(r"(?:^|[/\\])torch[/\\]nn[/\\]modules[/\\]module\.py$")
MOVES = "_apply"
_MOVING = frozenset((MOVES, "to", "cuda", "to_empty", "half", "bfloat16", "float", "double", "type"))
# What of PyTorch's runs the code that its compiler generated.
_COMPILER_FILE = re.compile(r"(?:^|[/\\])torch[/\\]_inductor[/\\]")
_LONGEST = 100
_CELL = re.compile(r"^<ipython-input-(\d+)-|[/\\]?ipykernel_\d+[/\\]")


def _pytorch() -> str:
    """The folder of the PyTorch that is loaded; where none is, a file cannot tell."""
    spec = getattr(sys.modules.get("torch"), "__file__", None)
    return os.path.dirname(os.path.abspath(spec)) + os.sep if spec else "/site-packages/torch/"


def is_runner_file(filename: str) -> bool:
    """Whether it is ours that runs a script."""
    return filename == _RUNNER


def cell_of(filename: str) -> str:
    """``In [4]`` for the file of a notebook's cell, "another cell" where nobody knows its number; "" for any other file."""
    found = _CELL.search(filename)
    if found is None:
        return ""
    if found[1]:
        return f"In [{found[1]}]"
    shell = running_shell()
    # IPython 7 cannot tell.
    told = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)(filename)
    number = re.fullmatch(r"In\s?\[(\d+)\]", str(told[1])) if told else None
    return f"In [{number[1]}]" if number else "another cell"


def is_library_file(filename: str) -> bool:
    """Whether it is installed code."""
    return _LIBRARY_FILE.search(filename) is not None


def is_sharing_file(filename: str) -> bool:
    """Whether it is PyTorch's code that shares memory among ranks."""
    return _SHARING_FILE.search(filename) is not None


def is_module_file(filename: str) -> bool:
    """Whether it is PyTorch's `torch.nn.Module`."""
    return _MODULE_FILE.search(filename) is not None


def moves(function: str) -> bool:
    """Whether a function of that file makes a module's tensors anew: elsewhere, or in another type."""
    return function in _MOVING


def is_compiler_file(filename: str) -> bool:
    """Whether it is PyTorch's code that runs what its compiler generated. A library's function around it says nothing of it."""
    return _COMPILER_FILE.search(filename) is not None


def is_generated_file(filename: str) -> bool:
    """Whether PyTorch's compiler wrote it."""
    return bool(_GENERATED.search(filename)) or _is_below(filename, os.environ.get("TORCHINDUCTOR_CACHE_DIR"))


def is_our_file(filename: str) -> bool:
    """Whether it is this package's."""
    return filename.startswith(_OURS)


def whose(filename: str) -> str:
    """One of the words above."""
    if filename.startswith(_pytorch()):
        return TORCH
    if filename.startswith((_OURS, "<frozen ")) or (filename.startswith("<") and not filename.startswith(_TYPED)):
        return PASSED_OVER
    if is_generated_file(filename):
        return PASSED_OVER
    if is_library_file(filename):
        # Python's own (`copy`, `contextlib`) only carries a call on.
        return LIBRARY if _INSTALLED.search(filename) else PASSED_OVER
    return OWN


def _is_below(filename: str, folder: str | None) -> bool:
    return bool(folder) and filename.startswith(os.path.join(os.path.abspath(str(folder)), ""))


def line_at(filename: str, line: int) -> str:
    """The line's text, without its indentation; "" where its file is not to be had."""
    return linecache.getline(filename, line).strip()


def expression_at(code: CodeType, instruction: int) -> str:
    """The source of the expression at which an instruction stands, in one line; "" before Python 3.11, and where it is long."""
    if sys.version_info < (3, 11):
        return ""
    first, last, start, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None or last - first > 3:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= _LONGEST else ""
