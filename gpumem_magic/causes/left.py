"""The program's own functions that an error left: which of their variables had graphs, and whether one handled another error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from types import FrameType
from typing import Any

from gpumem_magic.causes.model import LeftFunctions
from gpumem_magic.causes.written import Written
from gpumem_magic.looks import tensors
from gpumem_magic.looks.code import LIBRARY, OWN, cell_of, line_at, whose
from gpumem_magic.looks.objects import is_sequence, locals_of, members, traceback_of
from gpumem_magic.tracebacks import context_of

# So many elements of a list are looked at.
_ELEMENTS = 100


def left_functions(error: BaseException) -> LeftFunctions:
    """What the frames of its traceback say."""
    found = LeftFunctions()
    handling = _frames_that_handle(error)
    measured = ""
    in_library = False
    traceback = traceback_of(error)
    while traceback is not None:
        frame, line, traceback = traceback.tb_frame, traceback.tb_lineno, traceback.tb_next
        file = frame.f_code.co_filename
        if (its := whose(file)) != OWN:
            # (What lies before the first is the shell.)
            in_library = in_library or (its == LIBRARY and bool(measured))
            continue
        found.called_back = in_library
        # (The cell or script that runs is the first that an error's way leads through.)
        measured = measured or file
        where = "" if file == measured else cell_of(file) or os.path.basename(file)
        place = Written(where, line, line_at(file, line))
        found.way.append(place)
        if frame in handling:
            found.retry = place
        if frame.f_code.co_name.startswith("<"):
            continue
        found.functions.add(frame.f_code.co_name)
        variables = locals_of(frame)
        found.modules.update({name: one for name, one in variables.items() if tensors.is_module(one)})
        if names := tensors.unheard(_with_graphs, variables):
            found.graphs.setdefault(frame.f_code.co_name, names)
    return found


def _with_graphs(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of lists of tensors with graphs, then of such tensors."""
    lists = [name for name, one in variables.items() if is_sequence(one) and _has_graphs(one)]
    return (*lists, *(name for name, one in variables.items() if _has_graph(one)))


def _frames_that_handle(error: BaseException) -> list[FrameType]:
    """The frames that had caught another error when this one was raised: their calls that failed first begin its traceback."""
    found: list[FrameType] = []
    seen = {id(error)}
    handled = context_of(error)
    while handled is not None and id(handled) not in seen:
        seen.add(id(handled))
        if (first := traceback_of(handled)) is not None:
            found.append(first.tb_frame)
        handled = context_of(handled)
    return found


def _has_graph(one: Any) -> bool:
    return tensors.is_tensor(one) and tensors.grad_fn(one) is not None


def _has_graphs(sequence: Any) -> bool:
    return any(map(_has_graph, islice(members(sequence), _ELEMENTS)))
