"""What an operator does with values, by its schema: whether it only looks, makes them, works them out, or writes into tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import few, guesses, kernel_rules, refused_values, shares, tallies, uniform
from gpumem_magic.virtual.engine.computing import comes_first, touches_values

# They write all of their first argument.
OVERWRITING = set(overloads("zero_ fill_.Scalar fill_.Tensor copy_"))
# They make known values of a tensor whose own are not asked for.
OF_SHAPES = set(overloads("zeros_like ones_like full_like new_zeros new_ones new_full"))
# The host's function divides by the number of samples, which ends the process where there are none.
_NOT_COMPUTED = set(overloads("native_batch_norm_backward"))
# Other processes, if there are any, are taken to hold the same values; and nothing is sent to them.
SENDING = ("c10d", "_c10d_functional")


class Way(NamedTuple):
    """What an operator does with values. looks: it only gives other views. makes: values come of no tensor's.

    equal: of equal elements it makes equal ones. few, begins, orders: see `few`; spread, chooses: see `shares`; refuses: see
    `refused_values`; counts: see `tallies`.
    """

    looks: bool
    writes: bool
    makes: bool
    computes: bool
    first: bool
    guess: Callable[..., Any] | None
    equal: bool
    few: Callable[..., Any] | None = None
    begins: bool = False
    orders: bool = False
    spread: shares.Rule | None = None
    chooses: bool = False
    refuses: refused_values.Rule | None = None
    counts: bool = False


def way_of(func: Any) -> Way:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Way(True, False, False, False, False, None, False)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    gives = schema.is_mutable or any("Tensor" in str(value.type) for value in schema.returns)
    ours = kernel_rules.for_operator(func) is None or comes_first(func)
    computes = gives and not draws and func.namespace not in SENDING and ours and func not in _NOT_COMPUTED
    of_none = not any("Tensor" in str(argument.type) for argument in schema.arguments)
    constant = of_none and "empty" not in schema.name
    return Way(
        looks=not touches_values(func) or not gives,
        writes=schema.is_mutable,
        makes=computes and (constant or func in OF_SHAPES or func in OVERWRITING),
        computes=computes,
        first=comes_first(func) or sized_by_values(func),
        guess=guesses.RULES.get(func),
        equal=computes and uniform.follows(func),
        few=few.RULES.get(func),
        begins=func in few.BEGINNING,
        orders=func in few.ORDERING,
        spread=shares.RULES.get(func),
        chooses=func in shares.BEGINNING,
        refuses=refused_values.RULES.get(func),
        counts=func in tallies.COUNTING,
    )


def sized_by_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags
