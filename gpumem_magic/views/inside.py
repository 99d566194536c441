"""The activations by module and by operator, in words and as the lines of a tree."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_magic.owners.tree import alike
from gpumem_magic.report.inside import ActivationBreakdown, LayerRow
from gpumem_magic.units import MIB, mib

MAX_TREE_ROWS = 60
_TEXT_ROWS = 6
# Less than one part in so many gets no line of its own in a text.
_SHARE = 100
# What one part in so many is missing from is nearly all.
_NEARLY = 1000


@dataclass(frozen=True)
class TreeLine:
    """A line of the tree; ``0 to 23`` for alike siblings, with the bytes of one of them: activations, parameters, gradients."""

    name: str
    type: str
    depth: int
    times: int
    bytes: tuple[int, int, int]


def is_informative(inside: ActivationBreakdown | None) -> bool:
    """Whether there is a MiB of activations, and more than one place where it is."""
    return (
        inside is not None
        and inside.layers.activations >= MIB
        and len(tree(inside.layers, _TEXT_ROWS, activations_only=True)) > 1
    )


def sentence_of(inside: ActivationBreakdown) -> str:
    """What the figures are about."""
    total = mib(inside.layers.activations)
    return f"{total} MiB of activations {inside.moment}; identical modules share a line, which shows the bytes of one."


def inside_lines(inside: ActivationBreakdown | None) -> list[str]:
    """At most eight lines for a terminal; none where there is nothing to tell apart."""
    if inside is None or not is_informative(inside):
        return []
    shown = tree(inside.layers, _TEXT_ROWS, activations_only=True)
    names = [f"{'  ' * (one.depth + 1)}{one.name}" for one in shown]
    sizes = [mib(one.bytes[0]) for one in shown]
    left, right = max(map(len, names)), max(map(len, sizes))
    found = [f"Activations by module {inside.moment} (MiB):"]
    for one, name, size in zip(shown, names, sizes, strict=True):
        kind = f"{one.type}, each" if one.times > 1 else one.type
        found.append(f"{name:<{left}}  {size:>{right}}  {kind}".rstrip())
    words = [f"{one.name} {mib(one.bytes)}" for one in inside.operators if one.bytes >= MIB / 2]
    return [*found, f"Kept by operators (MiB): {', '.join(words)}."] if words else found


def tree(top: LayerRow, most: int, *, activations_only: bool = False) -> list[TreeLine]:
    """At most so many lines, in the tree's order: the lines with most activations are opened first.

    activations_only: what has little of them is left out, and a module with nearly all of its parent's joins it.
    """
    least = top.activations // _SHARE if activations_only else 0

    def under(line: _TreeRow) -> list[_TreeRow]:
        found = _grown(line, activations_only)
        return [one for one in found if one.row.activations * one.times * line.times >= least]

    lines = under(_TreeRow(top, "", "", -1, 1))
    todo = list(lines)
    while todo:
        largest = max(todo, key=lambda one: one.row.activations * one.times)
        todo.remove(largest)
        inner = under(largest)
        if inner and len(lines) + len(inner) > most:
            # Below lesser lines there is nothing that the reader should see first.
            break
        place = lines.index(largest) + 1
        lines[place:place] = inner
        todo += inner
    return [
        TreeLine(one.name, one.type, one.depth, one.times, (one.row.activations, one.row.parameters, one.row.gradients))
        for one in lines[:most]
    ]


@dataclass(eq=False)
class _TreeRow:
    row: LayerRow
    name: str
    type: str
    depth: int
    times: int


def _grown(line: _TreeRow, activations_only: bool) -> list[_TreeRow]:
    """The lines under one. What holds one other module, or several alike ones, and nothing else joins them."""
    found = []
    for name, times, row in alike(line.row.children, _same):
        spot = row
        while times == 1 and (only := _only_child(spot, activations_only)) is not None:
            inner_name, times, spot = only
            name = f"{name}.{inner_name}"
        if any(_figures(spot)):
            found.append(_TreeRow(spot, name, spot.type, line.depth + 1, times))
    return found


def _only_child(row: LayerRow, activations_only: bool) -> tuple[str, int, LayerRow] | None:
    """The child, or the alike children, that account for a module; None where it has something of its own, or several."""
    groups = alike(row.children, _same)
    if activations_only:
        groups = [one for one in groups if one[1] * one[2].activations * _NEARLY >= row.activations]
    if len(groups) != 1:
        return None
    _, times, child = groups[0]
    if activations_only:
        missing = row.activations - times * child.activations
        return groups[0] if row.activations and missing * _NEARLY <= row.activations else None
    return groups[0] if tuple(size * times for size in _figures(child)) == _figures(row) else None


def _figures(row: LayerRow) -> tuple[int, int, int]:
    return row.activations, row.parameters, row.gradients


def _same(one: LayerRow, other: LayerRow) -> bool:
    return (
        one.type == other.type
        and _figures(one) == _figures(other)
        and [child.name for child in one.children] == [child.name for child in other.children]
        and all(map(_same, one.children, other.children))
    )
