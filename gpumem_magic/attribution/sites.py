"""What a stack says about its allocation: which part of PyTorch, or of the program, requested the memory, or let go of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from gpumem_magic.looks.code import MOVES, is_compiler_file, is_library_file, is_module_file, is_sharing_file
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
# What autocast casts: weights, which it keeps, and what goes into an operator.
CAST = "cast"
# Keys and values of earlier tokens.
CACHE = "cache"
# Activation checkpointing computes a forward again, within backward.
RECOMPUTED = "recomputed"
# Where memory is let go: by what a backward had saved, and by zero_grad.
SAVED = "saved"
ZEROED = "zeroed"

# The way from an operator to the recorder: every C++ stack begins with it.
_PLUMBING = re.compile(
    r"^(?:torch::unwind|torch::CapturedTraceback|torch::cuda::|c10::|std::|at::detail::|at::TensorBase|\?\?)"
)
# A package that a program uses by name; PyTorch's own frames say little that the operator does not.
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?!torch[/\\])")
# The operator in a backward, by the forward operator that it belongs to: BmmBackward0.
_BACKWARD_NODE = re.compile(r"Backward\d*::apply|AccumulateGrad::apply")
# "at::(anonymous namespace)::f(long, c10::ArrayRef<long>)": the list of arguments says little and is long.
_ARGUMENTS = re.compile(r"(?<!operator)\((?!anonymous namespace\)).*$", re.DOTALL)

# What one frame shows. A C++ frame by its name; a Python frame by its file and name, the first line that fits.
_NATIVE_SIGNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (WORKSPACE, r"[Ww]orkspace|CUDABlasHandle|cublasHandle"),
        (SAVED, r"SavedVariable::(?:reset_data|~SavedVariable)|::release_variables"),
        (CAST, r"at::autocast::cached_cast"),
        (BACKWARD, r"torch::autograd::(?:Engine|Node|PyNode)::|Backward\d*::apply|AccumulateGrad"),
    )
)
_CALL, _APPLY, _MODULE_INIT, _OTHER_INIT, _LEAVE = "call", "apply", "module init", "other init", "leave autocast"
_TORCH = r"[/\\]?torch[/\\]"
_PYTHON_SIGNS = tuple(
    (kind, re.compile(file), re.compile(name))
    for kind, file, name in (
        (ZEROED, r"", r"^zero_grad$"),
        (OPTIMIZER, _TORCH + r"optim[/\\]|[/\\](?:bitsandbytes|apex)[/\\]optim", r""),
        # Optimizers of other libraries and of the program's own: a step in a file that is named after what it holds.
        (OPTIMIZER, r"optim\w*(?:[/\\]|\.py$)", r"^(?:step|_init_group|_?init_states?|update_\w+)$"),
        (PARAMETERS, _TORCH + r"nn[/\\]modules[/\\]module\.py$", r"^(?:_apply|convert|to_empty|cuda|<lambda>)$"),
        (PARAMETERS, _TORCH + r"nn[/\\]parameter\.py$", r"^__deepcopy__$"),
        (_CALL, _TORCH + r"nn[/\\]modules[/\\]module\.py$", r"^(?:_call_impl|_wrapped_call_impl|__call__)$"),
        (CACHE, r"", r"(?i)kv_?cache|key_?value_?cache|^init_cache"),
        (CACHE, r"(?i)cache\w*\.py$", r"(?i)^(?:update|append|lazy_init|allocate|reorder_cache|crop|batch_)"),
        (
            PARAMETERS,
            r"",
            r"^(?:_load_from_state_dict|_load_parameter_into_model|_load_state_dict_into_meta_model|from_pretrained|load_state_dict"
            r"|load_(?:model|weights?|checkpoint\w*)|create_weights?|_?init(?:_all)?_weights?(?:_list)?)$",
        ),
        (_MODULE_INIT, _TORCH + r"nn[/\\]modules[/\\]\w+\.py$", r"^(?:__init__|reset_parameters)$"),
        (_OTHER_INIT, _TORCH, r"^__init__$"),
        (CONSTRUCTOR, r"", r"^(?:__init__|reset_parameters)$"),
        (FUNCTION, _TORCH + r"nn[/\\]functional\.py$", r""),
        (
            BACKWARD,
            _TORCH + r"(?:_tensor|autograd[/\\](?:__init__|graph))\.py$",
            r"^(?:backward|grad|_engine_run_backward)$",
        ),
        (_APPLY, _TORCH + r"autograd[/\\]function\.py$", r"^apply$"),
        (_APPLY, _TORCH + r"utils[/\\]checkpoint\.py$", r"^unpack_hook$"),
        (_LEAVE, _TORCH + r"(?:amp|cuda[/\\]amp)[/\\]autocast_mode\.py$", r"^__exit__$"),
        # A module that is called by its method.
        (FORWARD, r"", r"^forward$"),
    )
)


def is_python(frame: Frame) -> bool:
    """C++ frames have no file, or a C++ one; Python's have a .py file, a notebook's cell or ``<string>``."""
    return frame.filename.endswith((".py", ">")) or "ipykernel_" in frame.filename


def is_library(frame: Frame) -> bool:
    """Whether the frame is of installed code, not of the user's own."""
    return is_library_file(frame.filename)


@lru_cache(1 << 16)
def _sign(filename: str, name: str) -> tuple[bool, str]:
    """Whether it is a frame of Python's, and what it shows ("": nothing)."""
    if is_python(Frame(filename, name, 0)):
        return True, next(
            (kind for kind, file, word in _PYTHON_SIGNS if file.search(filename) and word.search(name)), ""
        )
    return False, next((kind for kind, pattern in _NATIVE_SIGNS if pattern.search(name)), "")


def tells_a_part(frame: Frame) -> bool:
    """Whether it is a function of a module's, an optimizer's or autograd's, or one that fills or makes a model."""
    return bool(_sign(frame.filename, frame.name)[1])


def _signs(frames: Sequence[Frame]) -> tuple[list[str], list[str]]:
    """What the Python frames show, and the C++ frames, each innermost first."""
    python: list[str] = []
    native: list[str] = []
    for frame in frames:
        is_pythons, kind = _sign(frame.filename, frame.name)
        (python if is_pythons else native).append(kind)
    return python, native


def site_of(frames: Sequence[Frame]) -> str:
    """Which of the kinds above asked for memory. Looks from the innermost frame outwards; the first telling one decides."""
    if not frames:
        return NO_STACK
    python, native = _signs(frames)
    if WORKSPACE in native:
        return WORKSPACE
    in_backward = BACKWARD in native
    if not python:
        return BACKWARD if in_backward else NATIVE
    found = SCRIPT
    for kind in python:
        if kind in (OPTIMIZER, PARAMETERS, CACHE):
            return kind
        if kind in (_CALL, FORWARD) and found in (SCRIPT, FUNCTION):
            found = FORWARD
        elif found in (SCRIPT, CONSTRUCTOR) and kind in (_MODULE_INIT, CONSTRUCTOR, _OTHER_INIT):
            if kind == _MODULE_INIT:
                return PARAMETERS
            found = SCRIPT if kind == _OTHER_INIT else CONSTRUCTOR
        elif kind == FUNCTION and found == SCRIPT:
            found = FUNCTION
        elif kind == BACKWARD:
            in_backward = True
    # The thread of backward begins with a function's own backward, with a compiled one, or with a checkpoint's.
    in_backward = in_backward or python[-1] == _APPLY
    if found == FORWARD:
        return RECOMPUTED if in_backward else CAST if CAST in native else FORWARD
    return BACKWARD if in_backward else found


# What ranks share: the buckets in which DistributedDataParallel sends gradients, FSDP2's and FSDP1's parameters in one piece and
# what they are gathered in, gradients in one piece, and what the neighbouring stages of a pipeline send.
MAKES_BUCKETS, REMAKES_BUCKETS = "_ddp_init_helper", "_pre_forward"
OF_BUCKETS = "DistributedDataParallel"
_OF_SHARING = {
    MAKES_BUCKETS: "gradients",
    REMAKES_BUCKETS: "gradients",
    "foreach_all_gather": "parameters",
    "foreach_all_gather_copy_out": "parameters",
    "init_all_gather_outputs": "parameters",
    "alloc_all_gather_outputs": "parameters",
    "_alloc_padded_unsharded_flat_param": "parameters",
    "_use_low_precision_shard": "parameters",
    "foreach_reduce": "gradients",
    "_get_reduce_scatter_tensors": "gradients",
    "create_recv_tensor": "activations",
    "_setup_forward_recv_info": "activations",
    "_prepare_forward_infra": "activations",
    "_create_grad_recv_info": "activation_gradients",
}


# Where C++ asks for it; what else they do, other functions of Python's do for them.
_INNERMOST = (MAKES_BUCKETS, REMAKES_BUCKETS)
_OF_FLAT_ONES = ("_alloc_padded_unsharded_flat_param", "_use_low_precision_shard")
# What a compiler tries kernels with before it keeps one, and the functions of Inductor's that do so: at first launches, for
# products that may be padded, and for max-autotune.
TRIALS = "trials of compiled kernels"
TRYING = frozenset({"benchmark_gpu", "_should_pad", "benchmark_example_value"})
# Who gathers whole parameters for the layers at work, FSDP2 and FSDP1.
GATHERERS = ("fully_shard", "FullyShardedDataParallel")


def of_sharing(functions: Sequence[str]) -> tuple[str, str | None] | None:
    """The category of what these functions asked for (`Birth.sharing`), and who holds it where no name of the program's does;
    None where they say nothing."""
    for place, name in enumerate(functions):
        if name in _INNERMOST:
            return None if place else (_OF_SHARING[name], OF_BUCKETS)
        if name in _OF_SHARING:
            category = _OF_SHARING[name]
            return category, GATHERERS[name in _OF_FLAT_ONES] if category == "parameters" else None
    return None


def sharing(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The functions of PyTorch's in a stack that share memory among ranks or move a module, the innermost first."""
    return tuple(
        one.name
        for one in frames
        if is_sharing_file(one.filename) or (one.name == MOVES and is_module_file(one.filename))
    )


def is_of_a_cache(filename: str, function: str) -> bool:
    """Whether this is where a cache of keys and values asks for its memory."""
    return _sign(filename, function) == (True, CACHE)


def letting_go(frames: Sequence[Frame]) -> str:
    """Which of the kinds above gave memory back, by the stack of a free: SAVED, ZEROED, CAST (at the end of autocast), BACKWARD,
    OPTIMIZER, PARAMETERS, FORWARD (some module was at work), or SCRIPT."""
    python, native = _signs(frames)
    if SAVED in native:
        return SAVED
    for kind in python:
        if kind in (OPTIMIZER, PARAMETERS, ZEROED):
            return kind
        if kind == _LEAVE:
            return CAST
        if kind in (_CALL, FORWARD):
            return FORWARD
    if BACKWARD in native or BACKWARD in python or not python or python[-1] == _APPLY:
        return BACKWARD
    return SCRIPT


def constructors(frames: Sequence[Frame]) -> list[Frame]:
    """The constructors in a stack that are not PyTorch's own, innermost first."""
    return [frame for frame in frames if _sign(frame.filename, frame.name) == (True, CONSTRUCTOR)]


def words_of(frame: Frame) -> str:
    """A frame in one line: ``train.py:12 step``, or a C++ function without its arguments."""
    if is_python(frame):
        return f"{frame.filename}:{frame.line} {frame.name}"
    return _ARGUMENTS.sub("", frame.name) or frame.filename


def let_go_at(frames: tuple[Frame, ...]) -> str:
    """Where memory was let go of, in one line: the frame that a reader sees first, and the C++ frame which says that backward
    had held it."""
    held = _holding(frames)
    if held is not None and not any(map(is_python, frames)):
        return words_of(held)
    first = next((line for line in folded(frames) if not line.startswith("(")), "")
    return first if held is None else f"{first}, by {words_of(held)}"


def folded(frames: tuple[Frame, ...], most: int = 6) -> list[str]:
    """A stack for a reader, innermost first: the user's own Python frames and the one of a library that tells the most, and
    between them how many others there are."""
    lines: list[str] = []
    hidden = 0
    python = [frame for frame in frames if is_python(frame)]
    own = [frame for frame in python if not is_library(frame)]
    shown = [*_telling(python), *own] or python[:1] or _telling_native(frames)
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


def _telling_native(frames: Sequence[Frame]) -> list[Frame]:
    """The C++ frame that says what went on: a node of backward, what held it for one, or else the first that is no plumbing."""
    # The plain text first: names can be long, and few have it.
    node = next((one for one in frames if "::apply" in one.name and _BACKWARD_NODE.search(one.name)), None)
    telling = node or _holding(frames) or next((one for one in frames if not _PLUMBING.match(one.name)), None)
    return [telling] if telling else list(frames[:1])


def _holding(frames: Sequence[Frame]) -> Frame | None:
    """The C++ frame of a free which says that backward had held the memory."""
    return next((one for one in frames if _sign(one.filename, one.name) == (False, SAVED)), None)


def _telling(python: Sequence[Frame]) -> list[Frame]:
    """The library's frame, within the program's own, that says what went on: of an installed package, or an optimizer's."""
    for frame in python:
        if not is_library(frame) or is_compiler_file(frame.filename):
            return []
        kind = _sign(frame.filename, frame.name)[1]
        if kind in (OPTIMIZER, PARAMETERS, ZEROED) or _PACKAGE.search(frame.filename):
            return [frame]
    return []
