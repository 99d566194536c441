"""What a stack says about its allocation: which part of PyTorch, or of the program, requested the memory."""

from __future__ import annotations

import re

from gpumem_magic.looks.code import is_library_file
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.units import counted

# Kinds of sites, beside the phases.
NO_STACK = "no stack"
PARAMETERS = "parameters"
WORKSPACE = "workspace"
FUNCTION = "function"
SCRIPT = "script"
# Within the program's own __init__: what a module or an optimizer keeps is often made there.
CONSTRUCTOR = "constructor"
# C++ frames only, although Python frames are recorded: the thread that backward runs on has none.
NATIVE = "native"

_OPTIMIZER_FILE = re.compile(r"[/\\]?torch[/\\]optim[/\\]|[/\\](?:bitsandbytes|apex)[/\\]optim")
_MODULES_FILE = re.compile(r"[/\\]?torch[/\\]nn[/\\]modules[/\\]\w+\.py$")
_MODULE_FILE = re.compile(r"[/\\]?torch[/\\]nn[/\\]modules[/\\]module\.py$")
_FUNCTION_FILE = re.compile(r"[/\\]?torch[/\\]nn[/\\]functional\.py$")
_BACKWARD_FILE = re.compile(r"[/\\]?torch[/\\](?:_tensor|autograd[/\\](?:__init__|graph))\.py$")
# The way from an operator to the recorder: every C++ stack begins with it.
_PLUMBING = re.compile(
    r"^(?:torch::unwind|torch::CapturedTraceback|torch::cuda::|c10::|at::detail::|at::TensorBase|\?\?)"
)
# The operator in a backward, by the forward operator that it belongs to: BmmBackward0.
_BACKWARD_NODE = re.compile(r"Backward\d*::apply|AccumulateGrad::apply")
# "at::(anonymous namespace)::f(long, c10::ArrayRef<long>)": the list of arguments says little and is long.
_ARGUMENTS = re.compile(r"(?<!operator)\((?!anonymous namespace\)).*$", re.DOTALL)
_WORKSPACE = re.compile(r"[Ww]orkspace|CUDABlasHandle|cublasHandle")
_BACKWARD_NAMES = ("torch::autograd::Engine::", "torch::autograd::Node::", "Backward0::apply", "AccumulateGrad")
_MOVING = frozenset({"_apply", "convert", "to_empty"})
_LOADING = frozenset({"_load_from_state_dict", "_load_parameter_into_model", "_load_state_dict_into_meta_model"})


def is_python(frame: Frame) -> bool:
    """C++ frames have no file, or a C++ one; Python's have a .py file, a notebook's cell or ``<string>``."""
    return frame.filename.endswith((".py", ">")) or "ipykernel_" in frame.filename


def is_library(frame: Frame) -> bool:
    """Whether the frame is of installed code, not of the user's own."""
    return is_library_file(frame.filename)


def site_of(frames: tuple[Frame, ...]) -> str:
    """One of the kinds above. Looks from the innermost frame outwards; the first telling one decides."""
    if not frames:
        return NO_STACK
    if any(_WORKSPACE.search(frame.name) for frame in frames if not is_python(frame)):
        return WORKSPACE
    python = [frame for frame in frames if is_python(frame)]
    if not python:
        backward = any(name in frame.name for frame in frames for name in _BACKWARD_NAMES)
        return BACKWARD if backward else NATIVE
    found = SCRIPT
    for frame in python:
        if _OPTIMIZER_FILE.search(frame.filename):
            return OPTIMIZER
        if _MODULE_FILE.search(frame.filename):
            if frame.name in _MOVING:
                return PARAMETERS
            if found in (SCRIPT, FUNCTION) and frame.name in ("_call_impl", "_wrapped_call_impl", "__call__"):
                found = FORWARD
        elif frame.name in _LOADING:
            return PARAMETERS
        elif frame.name in ("__init__", "reset_parameters") and found in (SCRIPT, CONSTRUCTOR):
            if _MODULES_FILE.search(frame.filename):
                return PARAMETERS
            found = SCRIPT if is_library(frame) else CONSTRUCTOR
        elif _FUNCTION_FILE.search(frame.filename) and found == SCRIPT:
            found = FUNCTION
        elif _BACKWARD_FILE.search(frame.filename) and frame.name in ("backward", "grad", "_engine_run_backward"):
            # A forward within: activation checkpointing computes it again.
            return FORWARD if found == FORWARD else BACKWARD
    return found


def words_of(frame: Frame) -> str:
    """A frame in one line: ``train.py:12 step``, or a C++ function without its arguments."""
    if is_python(frame):
        return f"{frame.filename}:{frame.line} {frame.name}"
    return _ARGUMENTS.sub("", frame.name) or frame.filename


def folded(frames: tuple[Frame, ...], most: int = 6) -> list[str]:
    """A stack for a reader, innermost first: the user's own Python frames, and between them how many others there are."""
    lines: list[str] = []
    hidden = 0
    python = [frame for frame in frames if is_python(frame)]
    own = [frame for frame in python if not is_library(frame)]
    nodes = [frame for frame in frames if _BACKWARD_NODE.search(frame.name)]
    telling = [frame for frame in frames if not _PLUMBING.match(frame.name)]
    shown = own or python[:1] or nodes[:1] or telling[:1] or list(frames[:1])
    for frame in python or frames:
        if frame in shown and len(lines) < most:
            if hidden:
                lines.append(f"({counted(hidden, 'library frame')})")
                hidden = 0
            lines.append(words_of(frame))
        else:
            hidden += 1
    if hidden:
        lines.append(f"({counted(hidden, 'more frame')})")
    return lines
