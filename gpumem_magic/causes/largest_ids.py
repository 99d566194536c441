"""Embeddings with a row for each number up to the largest id, of which few occur."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.written import Written
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

_TABLES = ("torch.nn.modules.sparse.Embedding", "torch.nn.modules.sparse.EmbeddingBag")
_BY_LARGEST = re.compile(r"\bEmbedding(?:Bag)?\([^\n]*\bmax\(")
_LARGEST = re.compile(r"\b(?P<name>\w+)\s*=[^=\n]*\bmax\([^\n]*\+\s*1\b")
_LOOKUPS = re.compile(r"^_?embedding(?:_bag)?$")
# Rows so many times as many as were looked up; and one part in so many of the peak.
_TIMES, _SHARE = 8, 4


def sized_by_the_largest(scene: Scene) -> Iterator[Cause]:
    """``nn.Embedding(ids.max() + 1, 64)``, with its gradient and states."""
    tables = [one for one in scene.held if one.kind == "parameter" and any(map(one.goes_through, _TABLES))]
    table = max(tables, key=lambda one: one.size, default=None)
    written = _written(scene) if table is not None else None
    if table is None or written is None:
        return
    rows = table.shape[0]
    read = sum(
        max((prod(shape) for shape, dtype in birth.inputs if dtype in ("int64", "int32")), default=0)
        for _, birth in scene.births
        if _LOOKUPS.match(birth.kernel) and table.shape in (shape for shape, _ in birth.inputs)
    )
    there = [one for one in scene.timeline.live_at(scene.moment) if one.requested == table.requested]
    if _TIMES * read > rows or size_of(there) < scene.part_of_peak(_SHARE):
        return
    beside = f", {human(size_of(there))} with what trains it" if len(there) > 1 else ""
    of_which = f", of which {read:,} at most were looked up here" if read else ""
    yield Cause(
        "sized_by_the_largest",
        f"{quoted(table.place)} has a row for each number up to the largest id, {rows:,} (`{written.shown}`, {written.words})"
        f"{of_which}: {human(table.size)}{beside}.",
        "Numbered one after the other (`np.unique(ids, return_inverse=True)`), the ids that occur need a row each and no more.",
        size_of(there),
    )


def _written(scene: Scene) -> Written | None:
    """Where a table is made as long as the largest number asks for, itself or by a variable's value."""
    largest = scene.program.stating(_LARGEST)
    name = found["name"] if largest is not None and (found := _LARGEST.search(largest.statement)) else ""
    by_name = scene.program.stating(re.compile(rf"\bEmbedding(?:Bag)?\([^\n]*\b{name}\b")) if name else None
    return scene.program.stating(_BY_LARGEST) or (largest if by_name is not None else None)
