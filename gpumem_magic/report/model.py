"""The report that a user holds: numbers and strings only, in the ledger's schema 1 (`to_dict`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# In the order in which a bar stacks them, bottom (left) to top (right).
CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",
    "activation_gradients",
    "temporaries",
    "workspace",
    "unknown",
    "rounding",
    "cached",
    "context",
    "other_processes",
    "context_or_others",
)
SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """The state after a statement (or part of one), and the peaks inside it. Bytes; None is unavailable, never 0."""

    kind: str  # before | statement | part | error | after
    label: str
    statement: str
    line: int
    iteration: tuple[int, ...]
    parts: tuple[Row, ...]
    allocated: int
    reserved: int
    device_used: int | None
    peak_allocated: int
    peak_reserved: int
    categories: Mapping[str, int | None]
