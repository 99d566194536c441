"""Which arguments of a call are sizes: of tensors that it makes, or of their parts."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gpumem_magic.looks.expressions import arguments, called, dotted

# What takes sizes, beside modules and their like, whose names begin with a capital.
_OF_SIZES = (
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "one_hot", "view",
    "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_empty", "new_full", "resize_", "unflatten", "narrow", "split",
    "tile", "broadcast_to", "chunk", "tensor_split", "pad", "unfold", "topk", "multinomial",
)  # fmt: skip
_NO_MODULES = ("Error", "Exception", "Warning")
# Of these, what takes values besides: which of its arguments by place may be sizes, and the names of those that are none.
_AMONG_VALUES = {
    "full": (slice(1), ("fill_value",)),
    "new_full": (slice(1), ("fill_value",)),
    "linspace": (slice(2, 3), ("start", "end", "stop")),
    "pad": (slice(2), ("value",)),
    "randint": (slice(0), ("low", "high")),
    "narrow": (slice(-1, None), ("start",)),
}


def sizes_given(call: ast.Call) -> Sequence[ast.expr]:
    """Arguments that may be sizes; of a module or another object that is made, all."""
    name = called(call)
    if name[:1].isupper():
        return () if name.endswith(_NO_MODULES) else arguments(call)
    if name not in _OF_SIZES:
        return ()
    if name not in _AMONG_VALUES or any(isinstance(one, ast.Starred) for one in call.args):
        return arguments(call)
    places, values = _AMONG_VALUES[name]
    by_place = call.args[places]
    if name == "randint" and all(one.arg != "size" for one in call.keywords):
        # The last, where it stands behind the bounds: Python's and NumPy's take two before it.
        bounds = 2 if dotted(call.func).endswith("random.randint") else 1
        by_place = call.args[bounds:][-1:]
    return [*by_place, *(one.value for one in call.keywords if one.arg not in values)]
