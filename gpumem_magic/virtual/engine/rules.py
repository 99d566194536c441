"""The rules for operators: what runs in the place of one, what a kernel takes beside its results, and what is true of its calls.

Files of `virtual.operators` register theirs when they are imported; the engine asks once for each operator that it meets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import aten, overloads
from gpumem_magic.virtual.engine import deterministic, filled, kernel_rules
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.calls import (
    giving,
    is_made_of_others,
    may_allocate,
    may_resize,
    run_in_parts,
    shaped_like,
    write_by_others,
    writes_by_others,
    writes_first,
)
from gpumem_magic.virtual.engine.kernel_types import may_refuse
from gpumem_magic.virtual.engine.overlaps import may_not_meet, writes_once, written_apart

# What runs in the place of an operator.
SPECIAL: dict[Any, Callable[..., Any]] = {}
# The same for operators with a sparse tensor among their arguments, in coordinate and in compressed form; those that are not here
# are refused.
SPARSE: dict[Any, Callable[..., Any]] = {}
COMPRESSED: dict[Any, Callable[..., Any]] = {}
# What kernels take once their result is there: rules ``rule(engine, func, args, kwargs, out, device)``, which return the bytes of
# the blocks that are held until the kernel ends; or `Kernels`, where they follow from the arguments' looks and the card, and are
# asked for once. With `special`: ``@special(*functions, table=BESIDE)``.
BESIDE: dict[Any, Callable[..., Sequence[int] | Kernels]] = {}
# Operators of which some results are on the host, where the fake mode has all on the device: rules
# ``rule(engine, func, args, kwargs, out, device)``, which give the results as they are. With `special`, too.
ON_HOST: dict[Any, Callable[..., Any]] = {}
# Operators that a trace of TorchScript's leaves out, since it has those that they call in C++: rules like handlers, which see to
# that. Others come here when they were recorded, and the trace waits.
TRACED: dict[Any, Callable[..., Any]] = {}
# When an operator with a rule is like any other, and the rule would do nothing but run it: ``plain(engine, args, kwargs)``. By
# looks: where that follows from how the arguments look.
PLAIN: dict[Any, Callable[..., bool]] = {}
PLAIN_BY_LOOKS: set[Any] = set()
# Where it follows from that outside of backward passes, unless kernels are asked to be deterministic.
OUTSIDE_BACKWARD: set[Any] = set()


def special(
    *functions: Any,
    table: dict[Any, Callable[..., Any]] = SPECIAL,
    plain: Callable[..., bool] | None = None,
    by_looks: bool = False,
    outside_backward: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``handler(engine, func, args, kwargs, device)``, which runs in the place of these operators.

    `Engine.run` makes the results as it does for all others; `Engine.scratch` is memory that the kernel holds while it runs.
    plain, by_looks, outside_backward: see `PLAIN`; it is asked at each call, and has to be quick.
    """

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            table[function] = handler
            if plain is not None:
                PLAIN[function] = plain
            if by_looks:
                PLAIN_BY_LOOKS.add(function)
            if outside_backward:
                OUTSIDE_BACKWARD.add(function)
        return handler

    return register


class Met(NamedTuple):
    """What is true of each call of an operator: the rules for it, and what it does with memory.

    parts: what runs the others that it is made of, if it is. again: whether its results and its memory are the same for all
    arguments that look alike, unless `plain` says no.
    body: what an operator of the program's own runs. takes_after: whether a library takes memory after it. asks: whether `plain`
    may say no of arguments that look like others of which it said yes. writes: whether its first argument is written to in place.
    stays_apart, once, apart: see `may_not_meet`, `writes_once`, `written_apart`.
    like: of one with ``out=`` that has no shape rule, the operator that returns what it writes.
    grows: whether its kernel begins with results without elements (`deterministic.GROWN`).
    has_types: whether its kernel takes some types alone (`kernel_types`). assigns: whether it assigns to parts (`filled`).
    """

    func: Any
    handler: Callable[..., Any] | None
    parts: Callable[..., Any] | None
    on_host: Callable[..., Any] | None
    allocates: bool
    resizes: bool
    beside: Callable[..., Sequence[int] | Kernels] | None
    again: bool
    plain: Callable[..., bool] | None
    body: Callable[..., Any] | None
    takes_after: bool
    asks: bool
    writes: bool
    stays_apart: bool
    like: Any
    once: bool
    apart: tuple[str, ...]
    grows: bool
    has_types: bool
    assigns: bool


@functools.cache
def writing_each() -> frozenset[int]:
    """The ids of the operators that write to lists of tensors, and whose kernels count that as a new version of each.

    Autograd refuses what it saved of an older one. `increment_version` is in ATen/native/cuda/Foreach*.cu, and not for these
    three (2.6, 2.11 and 2.13 were run); nor do optimizers' fused kernels count.
    """
    silent = overloads("_foreach_zero_ _foreach_lerp_.Scalar _foreach_lerp_.ScalarList")
    packets = [getattr(aten, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    each = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return frozenset(id(one) for one in each if one not in silent)


def _beside_of_result(func: Any) -> Callable[..., Any] | None:
    """The rule of the operator that gives what this one writes into ``out=``: one kernel does both."""
    like = giving(func)
    rule = BESIDE.get(like)
    if rule is None:
        return None
    written = {argument.name for argument in func._schema.arguments if argument.is_out}

    def beside(engine: Any, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> Any:
        others = {name: value for name, value in kwargs.items() if name not in written}
        return rule(engine, like, args, others, out, device)

    return beside


def meet(func: Any, takes_after: bool) -> Met:
    """What is true of each of its calls. takes_after: whether a library takes memory after it."""
    allocates, handler, plain = may_allocate(func), SPECIAL.get(func), PLAIN.get(func)
    resizes = not allocates and may_resize(func)
    parts = run_in_parts if is_made_of_others(func) else write_by_others if writes_by_others(func) else None
    on_host, body = ON_HOST.get(func), kernel_rules.body_of(func)
    again = (handler is None or plain is not None) and on_host is None and not (parts or resizes or body)
    return Met(
        func,
        handler,
        parts,
        on_host,
        allocates,
        resizes,
        BESIDE.get(func) or (_beside_of_result(func) if resizes else None),
        again,
        plain,
        body,
        takes_after,
        plain is not None and func not in PLAIN_BY_LOOKS,
        not allocates and writes_first(func),
        may_not_meet(func),
        shaped_like(func) if resizes and handler is None else None,
        writes_once(func),
        written_apart(func),
        func in deterministic.GROWN,
        may_refuse(func),
        func in filled.ASSIGN,
    )
