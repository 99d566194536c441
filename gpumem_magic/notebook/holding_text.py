"""Who holds the memory, and what was freed, in words and columns for a terminal and a notebook."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from gpumem_magic.owners.holders import ELEMENT, Holder, detach_words, freed_by_detaching, holders, matching
from gpumem_magic.owners.model import FREE_TRACEBACK, Held, Holdings, size_of
from gpumem_magic.owners.tree import COLUMNS, Branch
from gpumem_magic.report.tensors import places_in_words
from gpumem_magic.spelling import did_you_mean
from gpumem_magic.units import KIB, MIB, counted, human
from gpumem_magic.views.sheet import THERE, Sheet

if TYPE_CHECKING:
    from gpumem_magic.owners.free import Freed

SHOWN = 15
_HEADS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
}
_UNNAMED = "Nothing is on the device."
# Rounding that the figures show: they have one digit.
_SEEN = 51 * KIB
_LOOKS = "%gpumem_who --cycles looks for reference cycles"


def summary(holdings: Holdings, limit: int | None = SHOWN, *, looked: bool = False) -> Sheet:
    """Everybody who keeps memory, by bytes. limit: how many lines, None for all. looked: whether cycles were looked for."""
    everybody = [one for one in holders(holdings) if one.bytes or one.frees]
    if not everybody and not holdings.lost:
        return Sheet(_UNNAMED)
    count = len(holdings.held) + len(holdings.lost)
    head = (
        f"{human(holdings.allocated)} in {counted(count, 'allocation')}: what holds it, and what deleting would free."
    )
    shown = everybody[:limit]
    rows = [("MiB", "frees", "held by", "")]
    rows += [(_mib(one.bytes), _frees(one), _name_of(one), _advice(one)) for one in shown]
    sizes = [one.bytes for one in shown]
    rest = everybody[len(shown) :]
    if rest:
        sizes.append(sum(one.bytes for one in rest))
        rows.append((_mib(sizes[-1]), "", f"{len(rest)} more", "%gpumem_who --all"))
    if holdings.lost:
        sizes.append(sum(one.size for one in holdings.lost))
        rows.append((_mib(sizes[-1]), "", "no name was found", "" if looked else _LOOKS))
    bars = [((THERE, size),) for size in sizes]
    requested = [one.requested for one in holdings.held] + [one.requested for one in holdings.lost]
    rounding = holdings.allocated - sum(requested)
    after = [_links(holdings)]
    if rounding >= _SEEN:
        after.append(f"Counted in the allocator's blocks, as deleting frees them: {human(rounding)} is rounding.")
    return Sheet(head, rows, range(2), "\n".join(filter(None, after)), code=(2, 3), bars=bars, whole=max(sizes))


def details(holdings: Holdings, name: str, limit: int | None = SHOWN) -> Sheet | None:
    """What one name keeps, allocation by allocation; None where nothing of that name holds memory."""
    found = matching(holdings, name)
    if not found:
        return None
    number = holdings.number(name)
    rounding = size_of(found) - sum(one.requested for one in found)
    of_it = f", {human(rounding)} of it rounding" if rounding >= _SEEN else ""
    lines = [f"{name} keeps {human(size_of(found))} in {counted(len(found), 'allocation')}{of_it}."]
    if number is not None:
        lines += _of_root(holdings, number)
    rows = [("MiB", "what", "", "also held by")]
    groups = _alike(found)
    for group in groups[:limit]:
        first = group[0]
        others = [holdings.roots[each].name for each in first.roots if each != number]
        times = f"{len(group):,} × " if len(group) > 1 else ""
        words = f"{times}{places_in_words([one.place for one in group])}"
        rows.append((_mib(size_of(group)), words, _tensor(first), _list(others)))
    bars = [((THERE, size_of(group)),) for group in groups[:limit]]
    rest = [one for group in groups[len(rows) - 1 :] for one in group]
    if rest:
        rows.append((_mib(size_of(rest)), f"{len(rest):,} more", "", ""))
    return Sheet("\n".join(lines), rows, range(1), code=(1, 3), bars=bars, whole=max(map(size_of, groups)))


def _alike(found: Sequence[Held]) -> list[list[Held]]:
    """Allocations whose names differ only in numbers, of one shape and with the same holders, together; the most bytes first."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for one in found:
        alike = re.sub(r"\d+", "#", one.place), one.dtype, one.shape, one.roots, one.device
        groups.setdefault(alike, []).append(one)
    return sorted(groups.values(), key=lambda group: -size_of(group))


def tree(branches: Sequence[Branch]) -> Sheet:
    """The tree of layers, in MiB."""
    if not branches:
        return Sheet("Nothing on the device belongs to a module.")
    rows = [("MiB", *(_HEADS[column] for column in COLUMNS), "all")]
    for branch in branches:
        words = f"{branch.name} (each of {branch.times})" if branch.times > 1 else branch.name
        figures = (*branch.bytes, sum(branch.bytes))
        rows.append(("  " * branch.depth + words, *(_mib(size) if size else "" for size in figures)))
    note = "Activations are what a live graph saved; an operation without parameters counts with the layer before it."
    return Sheet("", rows, after=note)


def freed_text(freed: Freed, *, dry: bool) -> str:
    """The answer in sentences."""
    be = "would be" if dry else "was"
    looked = ", ".join(freed.words)
    lines = [
        f"{human(freed.allocated)} in tensors {be} freed ({looked}), and {human(freed.reserved)} {be} returned to the device."
        if freed.allocated
        else f"{looked.capitalize()}: no tensor {'would be' if dry else 'was'} freed, "
        f"and {human(freed.reserved)} {be} returned to the device."
    ]
    lines.append(
        f"{human(freed.left_allocated)} {'would stay' if dry else 'stays'} allocated, "
        f"{human(freed.left_reserved)} reserved."
    )
    keepers = [one for one in freed.holders if one.bytes]
    if keepers:
        named = [f"{one.name} ({human(one.bytes)})" for one in keepers[:4]]
        more = f" and {len(keepers) - 4} more" if len(keepers) > 4 else ""
        lines.append(f"Still held by {', '.join(named)}{more}; `%gpumem_who` shows what frees each.")
    if freed.nameless:
        lines.append(
            f"{human(freed.nameless)} has no name"
            + ("." if "cycles" in freed.words else ": `%gpumem_free cycles` frees what is in reference cycles.")
        )
    if "out" not in freed.words and any(one.kind == "out" for one in freed.holders):
        lines.append("Results in Out are kept: `%gpumem_free out` releases them.")
    return "\n".join(lines)


def unknown_name(holdings: Holdings, name: str, variables: Container[str]) -> str:
    """One line for a name that holds nothing, or is none of the variables, with those that do hold and read like it."""
    hint = did_you_mean(name, [root.name for root in holdings.roots], 3) or "; %gpumem_who alone lists who does"
    first = name.partition(".")[0].partition("[")[0]
    return (
        f"{name} holds no memory on the device"
        if first in variables or not first.isidentifier()
        else f"there is no variable {first}"
    ) + hint


def _of_root(holdings: Holdings, number: int) -> list[str]:
    one = next((each for each in holders(holdings) if each.name == holdings.roots[number].name), None)
    if one is None:
        return []
    lines = []
    if one.statement is not None:
        frees = human(one.frees) if one.kind == "traceback" else _freed(one)
        lines.append(f"`{_typed(one.statement)}` frees {frees}.")
    if one.together and one.together_frees > one.frees:
        steps = "`, then `".join(map(_typed, one.together))
        lines.append(f"`{steps}` frees {human(one.together_frees)}.")
    graphs = [each for each in holdings.reached(number) if each.kind == "graph"]
    if any(each.in_traceback for each in graphs):
        # Nobody can detach what a function that failed called its own.
        return lines
    if one.kind == "variable" and (detached := size_of(freed_by_detaching(holdings, number))):
        its_own = all(len(each.trail) <= ELEMENT for each in graphs)
        lines.append(f"Detaching frees {human(detached)}: {detach_words(one.name, one.type if its_own else '')}.")
    return lines


def _links(holdings: Holdings) -> str:
    """What comes back without deleting anything."""
    lines = []
    gradients = size_of(one for one in holdings.held if one.kind == "gradient")
    freed = size_of(holdings.freed_by_zero_grad())
    if gradients:
        name = next(iter(holdings.optimizers)) if len(holdings.optimizers) == 1 else "optimizer"
        clears = f"; `{name}.zero_grad()` frees {human(freed)}" if freed else ""
        lines.append(f"Gradients: {human(gradients)}{clears}.")
    graphs = size_of(one for one in holdings.held if one.kind == "graph")
    if graphs:
        lines.append(
            f"Autograd's graphs: {human(graphs)} saved for backward; `%gpumem_who NAME` shows what detaching a "
            "variable frees."
        )
    return "\n".join(lines)


def _name_of(one: Holder) -> str:
    kind = f" ({one.type})" if one.type and one.type not in one.name else ""
    return f"{one.name}{kind}"


def _frees(one: Holder) -> str:
    return _mib(one.frees) if one.statement is not None else ""


def _freed(one: Holder) -> str:
    if one.collected:
        return f"{human(one.frees)}, {human(one.collected)} of it after a garbage collection (`%gpumem_free cycles`)"
    return human(one.frees) if one.frees else "nothing by itself"


def _advice(one: Holder) -> str:
    if one.statement is None:
        return ""
    words = _typed(one.statement)
    if one.collected and one.kind not in ("cycle", "traceback"):
        words += ", then %gpumem_free cycles"
    if one.together and one.together_frees - one.frees > max(MIB, one.frees // 100):
        words = f"{', then '.join(map(_typed, one.together))} (frees {_mib(one.together_frees)})"
    return words


def _typed(statement: str) -> str:
    """What to type: an error's frames are mostly in reference cycles, which `%gpumem_free` alone frees, too."""
    return "%gpumem_free" if statement == FREE_TRACEBACK else statement


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tensor(one: Held) -> str:
    return f"{one.dtype} {'x'.join(str(length) for length in one.shape)}".strip() if one.dtype else ""


def _mib(size: int) -> str:
    """MiB with one digit; what is smaller than that keeps a sign of life."""
    return f"{size / MIB:,.1f}" if size >= _SEEN or not size else "<0.1"
