"""The parts of ``gpumem show`` below the report: groups by stack, a user's own categories, ranges, settings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpumem_magic.attribution.groups import StackGroup, groups_of, matching, stacks_with
from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.ranges import named_ranges
from gpumem_magic.report.filling import in_words
from gpumem_magic.report.model import LABELS
from gpumem_magic.report.tensors import ALL_GROUPS, groups_at
from gpumem_magic.snapshot.files import LoadedSnapshot
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import amount, counted, human
from gpumem_magic.views.segments import fragmentation

_INDENT = " " * 14
# So many different sizes of a group are written out, and so many ranges.
_MOST_SIZES = 3
_MOST_RANGES = 12
# So many stacks that asked for segments: they are seldom the question.
_MOST_SEGMENTS = 3


def asked_for(view: DeviceView, position: int, moment: str) -> str:
    """What is allocated at a moment, in a sentence."""
    sizes = view.sizes(position)
    words = in_words(groups_at(view, position, ALL_GROUPS), sizes)
    told = f"{moment[:1].upper()}{moment[1:]}: {amount(sizes['allocated'])} allocated"
    return f"{told}, of which {words}." if words else f"{told}."


def largest(view: DeviceView, position: int, moment: str, most: int, search: str | None) -> Iterator[str]:
    """The largest groups of allocations that one stack asked for."""
    groups = groups_of(view, position, matching(view, search) if search else None)
    if search:
        size, count = sum(one.requested for one in groups), sum(one.count for one in groups)
        yield ""
        yield f"{printable(search)!r} is in {counted(count, 'allocation')} ({moment}): {human(size)}."
    if groups and most > 0:
        yield ""
        yield f"The largest allocations ({moment}), those of one stack together:"
    for group in groups[: max(most, 0)]:
        yield from _group(group)
    if len(groups) > most > 0:
        rest = groups[most:]
        size, count = sum(one.requested for one in rest), sum(one.count for one in rest)
        yield f"  {human(size):>10}  in {counted(count, 'more allocation')}, of {counted(len(rest), 'stack')}"


def _group(group: StackGroup) -> Iterator[str]:
    sizes = sorted(group.sizes.items(), key=lambda one: -one[0] * one[1])
    times = ", ".join(f"{count:,} × {human(size)}" for size, count in sizes[:_MOST_SIZES])
    more = f" and {counted(len(sizes) - _MOST_SIZES, 'other size')}" if len(sizes) > _MOST_SIZES else ""
    how_many = f", {times}{more}" if group.count > 1 else ""
    name = f" {printable(group.name)}" if group.name else ""
    known = f"{'it' if group.count == 1 else 'each'} {group.why}" if group.why else group.evidence
    yield f"  {human(group.requested):>10}  {LABELS[group.category]}{name}{how_many} ({known})"
    yield from (f"{_INDENT}{printable(line)}" for line in group.stack)
    if group.freed:
        yield f"{_INDENT}let go at {printable(group.freed)}"


def own_categories(patterns: Sequence[str]) -> list[tuple[str, re.Pattern[str]]]:
    """What ``--category NAME=PATTERN`` means. Raises ValueError for what is no such pair."""
    found = []
    for given in patterns:
        name, divided, pattern = given.partition("=")
        if not (name.strip() and divided and pattern):
            raise ValueError(f"--category {given}: write NAME=PATTERN, such as kv=_allocate_kv_cache")
        try:
            found.append((name.strip(), re.compile(pattern)))
        except re.error as error:
            raise ValueError(f"--category {given}: {pattern!r} is no pattern ({error})") from None
    return found


def by_own_categories(
    view: DeviceView, position: int, moment: str, categories: Sequence[tuple[str, re.Pattern[str]]]
) -> Iterator[str]:
    """How much is live whose stack has a frame that fits; the first pattern that does counts. What is left is said."""
    if not categories:
        return
    searches = [(name, stacks_with(pattern.search)) for name, pattern in categories]
    sizes: dict[str, list[int]] = defaultdict(list)
    for one in view.timeline.live_at(position):
        frames = view.frames_of(one)
        sizes[next((name for name, fits in searches if fits(frames)), "")].append(one.requested)
    yield ""
    yield f"By your own categories ({moment}):"
    for name in dict.fromkeys([*(name for name, _ in categories), ""]):
        of_it = sizes.get(name, [])
        words = printable(name) if name else "all else"
        yield f"  {human(sum(of_it)):>10}  {words}, {counted(len(of_it), 'allocation')}"


def segments(view: DeviceView, position: int, moment: str, top: int) -> Iterator[str]:
    """The segments that have the most free memory, and which stacks asked for the most."""
    there = view.timeline.segments_at(position)
    yield ""
    yield f"Segments ({moment}; # in use, : partly, . free):"
    yield from (f"  {line}" for line in fragmentation(there))
    stack_of = view.stacks_of_segments(position)
    sizes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for one in there:
        frames = stack_of.get(one.address, ())
        sizes[tuple(folded(frames)) if frames else ()].append(one.total_size)
    ranked = sorted((stack for stack in sizes if stack), key=lambda stack: -sum(sizes[stack]))
    most = min(top, _MOST_SEGMENTS)
    if not ranked or most <= 0:
        return
    yield ""
    yield f"What asked for the segments ({moment}):"
    for stack in ranked[:most]:
        yield f"  {human(sum(sizes[stack])):>10}  in {counted(len(sizes[stack]), 'segment')}"
        yield from (f"{_INDENT}{printable(line)}" for line in stack)
    if rest := [size for stack in ranked[most:] for size in sizes[stack]]:
        stacks = counted(len(ranked) - most, "stack")
        yield f"  {human(sum(rest)):>10}  in {counted(len(rest), 'more segment')}, of {stacks}"
    if unknown := sizes.get(()):
        yield f"  {human(sum(unknown)):>10}  in {counted(len(unknown), 'segment')} without a stack"


def settings(loaded: LoadedSnapshot) -> str:
    """The allocator's settings that were in force."""
    given = loaded.snapshot.allocator_settings
    text = given.get("PYTORCH_CUDA_ALLOC_CONF") or given.get("PYTORCH_ALLOC_CONF")
    if isinstance(text, str) and text:
        return f"Allocator settings: {printable(text)}."
    if given.get("expandable_segments") is True:
        return "Allocator settings: expandable_segments:True."
    return "Allocator settings: the defaults." if given else ""


def ranges(loaded: LoadedSnapshot, view: DeviceView) -> Iterator[str]:
    """The program's own ranges: how often, and the highest that was allocated in them."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, begin, end in named_ranges(loaded, view.device, view.log.events):
        found[name].append((begin, end))
    if not found:
        return
    yield ""
    yield "Ranges of the program:"
    highest = {name: max(view.timeline.peak(*one) for one in parts) for name, parts in found.items()}
    for name in sorted(found, key=lambda one: -highest[one][0])[:_MOST_RANGES]:
        size, position = highest[name]
        yield f"  {human(size):>10}  {printable(name[:80])}, {len(found[name]):,} ×; highest at event {max(position - 1, 0):,}"
    if len(found) > _MOST_RANGES:
        yield f"  {counted(len(found) - _MOST_RANGES, 'more range')}"
