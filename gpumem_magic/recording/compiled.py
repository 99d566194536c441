"""What PyTorch's compiler says of its work while a recording runs: where its graphs ended early, what it compiled again."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.recording.model import CompiledCode, CompilerPlace

_TABLES = "torch._dynamo.utils"
# What is ours and makes the same code for the device again: a trial's process has one thread, a recording hooks into modules.
_OURS = ("num_threads", "_global_forward_hooks", "_global_forward_pre_hooks")


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
                breaks[place(frame.filename, frame.lineno or 0), frame.line or "", _head(one.reason)] += 1
        again: dict[tuple[str, str], list[str]] = {}
        for one in _since(self._compiled, _metrics()):
            reason = getattr(one, "recompile_reason", None) or ""
            if reason and one.co_filename and not any(word in reason for word in _OURS):
                # (A module of PyTorch's own, such as `nn.Linear`, goes through a function of the compiler's.)
                key = (
                    ("", "")
                    if _is_torchs(one)
                    else (place(one.co_filename, one.co_firstlineno or 0), one.co_name or "")
                )
                again.setdefault(key, []).append(_head(reason.partition(": ")[2] or reason))
        return CompiledCode(
            max(0, _graphs() - self._graphs),
            tuple(CompilerPlace(*key, count) for key, count in breaks.items()),
            tuple(CompilerPlace(*key, reasons[-1], len(reasons)) for key, reasons in again.items()),
        )


def _is_torchs(one: Any) -> bool:
    return bool(one.co_filename.startswith(os.path.dirname(torch.__file__)))


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


def _head(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
