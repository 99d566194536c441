"""The program's own functions that an error left, and which of their variables had graphs."""

from __future__ import annotations

from itertools import islice
from typing import Any

from gpumem_magic.causes.model import LeftFunctions
from gpumem_magic.looks import tensors
from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.objects import is_sequence, locals_of, members, traceback_of

# So many elements of a list are looked at.
_ELEMENTS = 100


def left_functions(error: BaseException) -> LeftFunctions:
    """What the frames of its traceback say."""
    found = LeftFunctions()
    traceback = traceback_of(error)
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if whose(frame.f_code.co_filename) != OWN or frame.f_code.co_name.startswith("<"):
            continue
        variables = locals_of(frame)
        found.modules.update({name: one for name, one in variables.items() if tensors.is_module(one)})
        with tensors.no_functions(), tensors.no_dispatch():
            lists = [name for name, one in variables.items() if is_sequence(one) and _has_graphs(one)]
            alone = [name for name, one in variables.items() if _has_graph(one)]
        if lists or alone:
            found.graphs.setdefault(frame.f_code.co_name, (*lists, *alone))
    return found


def _has_graph(one: Any) -> bool:
    return tensors.is_tensor(one) and tensors.grad_fn(one) is not None


def _has_graphs(sequence: Any) -> bool:
    return any(map(_has_graph, islice(members(sequence), _ELEMENTS)))
