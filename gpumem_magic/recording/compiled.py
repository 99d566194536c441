"""What PyTorch's compiler says of its work while a recording runs: where its graphs ended early, what it could not compile, and
what it compiled again."""

from __future__ import annotations

import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpumem_magic.recording.model import CompiledCode, CompilerPlace

_TABLES = "torch._dynamo.utils"
# What is ours and makes the same code for the device again: a trial's process has one thread, a recording hooks into modules.
_OURS = ("num_threads", "_global_forward_hooks", "_global_forward_pre_hooks")
# What Dynamo answers by running the function eagerly. Other failures are raised, unless its setting suppresses them
# (`torch._dynamo.convert_frame`; a function that does nothing with tensors is skipped, too; before 2.13 so is one that breaks its
# graph within a loop).
_RUNS_EAGERLY = ("SkipFrame", "Unsupported", "UserError")


class CompilerTables:
    """Dynamo's tables, read at the beginning and at the end. Nothing is imported for the question, and nothing is changed."""

    def __init__(self) -> None:
        self._graphs = _graphs()
        # (The objects, too: a table that was emptied meanwhile begins anew.)
        self._breaks = _table("graph_break_reasons")
        self._compiled = _metrics()

    def read(self, place: Callable[[str, int], str]) -> CompiledCode:
        """What came since. place: a file and its line in words."""
        breaks: Counter[tuple[str, str, str]] = Counter()
        for one in _since(self._breaks, _table("graph_break_reasons")):
            if one.user_stack:
                frame = one.user_stack[-1]
                # (Without a line where it is the compiler that cuts: between DistributedDataParallel's buckets.)
                where = place(frame.filename, frame.lineno) if frame.lineno else ""
                breaks[where, frame.line or "", _words(_head(one.reason))] += 1
        again: dict[tuple[str, str], list[str]] = {}
        failed: Counter[CompilerPlace] = Counter()
        compiled = _metrics()
        functions = {_function(one): one for one in compiled if one.co_filename}
        for one in _since(self._compiled, compiled):
            reason = getattr(one, "recompile_reason", None) or ""
            if _is_failure(one):
                failed[_failure(one, place)] += 1
            elif reason and not one.co_filename and _function(one) in functions:
                # As often as Dynamo compiles one function: its limit ends before the function's name is noted.
                where, name = _named(functions[_function(one)], place)
                failed[CompilerPlace(where, name, _head(one.fail_reason or reason), 0)] += 1
            elif reason and one.co_filename and not any(word in reason for word in _OURS):
                words = _head(reason.partition(": ")[2] or reason).partition(" # ")[0].strip()
                again.setdefault(_named(one, place), []).append(words)
        return CompiledCode(
            max(0, _graphs() - self._graphs),
            tuple(CompilerPlace(*key, count) for key, count in breaks.items()),
            tuple(CompilerPlace(*key, reasons[-1], len(reasons)) for key, reasons in again.items()),
            tuple(replace(one, count=count) for one, count in failed.items()),
        )


def _is_failure(one: Any) -> bool:
    """Whether a function was not compiled although there was something to compile."""
    kind, reason = getattr(one, "fail_type", None), getattr(one, "fail_reason", None) or ""
    runs = kind in _RUNS_EAGERLY or getattr(one, "config_suppress_errors", False)
    return bool(kind and one.co_filename and runs) and (kind != "SkipFrame" or "graph break" in reason)


def _function(one: Any) -> str:
    """Dynamo's number for the function: what was compiled of it has this and a number of its own."""
    return str(getattr(one, "compile_id", None) or "").partition("/")[0]


def _named(one: Any, place: Callable[[str, int], str]) -> tuple[str, str]:
    """Where a function is, and its name; a module of PyTorch's own, such as `nn.Linear`, goes through one of the compiler's."""
    if one.co_filename.startswith(os.path.dirname(torch.__file__)):
        return "", ""
    return place(one.co_filename, one.co_firstlineno or 0), one.co_name or ""


def _failure(one: Any, place: Callable[[str, int], str]) -> CompilerPlace:
    """The function that was given up and for which line, not counted yet. Without a line, the function stands for it."""
    file, line = one.fail_user_frame_filename, one.fail_user_frame_lineno
    reason, (where, name) = _head(one.fail_reason or ""), _named(one, place)
    if not (file and line):
        return CompilerPlace(where, name, reason, 0)
    return CompilerPlace(place(file, line), linecache.getline(file, line).strip(), reason, 0, name, where)


def _since(before: list[Any], now: list[Any]) -> list[Any]:
    known = {id(one) for one in before}
    return [one for one in now if id(one) not in known]


def _table(name: str) -> list[Any]:
    return list(getattr(sys.modules.get(_TABLES), name, ()))


def _metrics() -> list[Any]:
    read = getattr(sys.modules.get(_TABLES), "get_compilation_metrics", None)
    return [] if read is None else list(read())


def _graphs() -> int:
    counters = getattr(sys.modules.get(_TABLES), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def _words(reason: str) -> str:
    """Why a graph broke. For a branch by a tensor's value the compiler has two ways to say it, one of them its own jargon
    (`torch._dynamo.symbolic_convert.generic_jump`)."""
    return "Data-dependent branching" if reason.startswith("generic_jump TensorVariable") else reason


def _head(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
