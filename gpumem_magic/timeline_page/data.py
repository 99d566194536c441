"""A recording as the page wants it: columns of small numbers, each text once, nothing that a browser could take for markup.

Whatever a file says ends up as the text of an element and never as markup; here every string is made short and printable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpumem_magic.attribution.ledger import KINDS_OF_EVIDENCE, TENANT_CATEGORIES
from gpumem_magic.attribution.sites import folded, is_library, is_python, words_of
from gpumem_magic.report.model import LABELS
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.timeline_page.source import TimelineSource
from gpumem_magic.views.palette import COLOURS, DARK

_LONGEST_TEXT = 300
_MOST_FRAMES = 100
# Kinds of frames in a stack.
_OWN, _LIBRARY, _NATIVE = range(3)


def page_data(title: str, sources: Sequence[TimelineSource]) -> dict[str, Any]:
    """Everything that the page shows. The devices come in the order of `sources`."""
    return {
        "title": plain(title),
        "categories": [
            {"key": key, "label": LABELS[key], "light": COLOURS[key], "dark": DARK.get(key, COLOURS[key])}
            for key in TENANT_CATEGORIES
        ],
        "evidence": list(KINDS_OF_EVIDENCE),
        "cached": {"light": COLOURS["cached"], "dark": DARK["cached"]},
        "devices": [_device(source) for source in sources],
    }


def script_json(data: Any) -> str:
    """JSON that can stand in a ``<script type="application/json">``: no character of it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def plain(text: str) -> str:
    """Short and printable: no line breaks, no controls, nothing that turns the direction of writing."""
    line = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}\u2026"
    return line if line.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in line)


def _device(source: TimelineSource) -> dict[str, Any]:
    texts = _Texts()
    allocations = source.view.timeline.allocations
    extents = source.view.timeline.extents
    stacks, numbers = _numbered(
        [source.view.frames_of(one) for one in allocations]
        + [source.view.frames_of_free(one) for one in allocations]
        + [source.view.frames_of_extent(one) for one in extents]
    )
    read = [tuple(folded(frames)) if frames else () for frames in stacks]
    numbers_read: dict[tuple[str, ...], int] = {}
    stack_of, stack_of_free = numbers[: len(allocations)], numbers[len(allocations) : 2 * len(allocations)]
    whys = [source.view.why(one) for one in allocations]
    reasons = sorted(set(whys) - {""})
    number_of = {reason: number for number, reason in enumerate(reasons)}
    before = 0
    births = []
    for one in allocations:
        births.append(one.born - before)
        before = one.born
    return {
        "name": plain(source.name),
        "answer": "".join(character if character.isprintable() else "\ufffd" for character in source.answer),
        "notes": [plain(note) for note in source.view.recording.notes],
        "events": len(source.view.timeline),
        "opensAt": source.view.peak[1] if source.opens_at is None else source.opens_at,
        "times": _times(source),
        "marks": [[mark.position, plain(mark.words), mark.kind] for mark in source.marks],
        "reasons": [plain(reason) for reason in reasons],
        # The first is how far the alloc event lies behind the one before; -1 in the next two is never.
        "born": births,
        "lived": [-1 if one.freed is None else max(one.freed - one.born, 0) for one in allocations],
        "waited": [
            -1 if one.completed is None or one.freed is None else max(one.completed - one.freed, 0)
            for one in allocations
        ],
        "requested": [one.requested for one in allocations],
        "size": [one.size for one in allocations],
        "address": [one.address for one in allocations],
        "stream": [one.stream for one in allocations],
        "category": [TENANT_CATEGORIES.index(label.category) for label in source.view.labels],
        "evidence": [KINDS_OF_EVIDENCE.index(label.evidence) for label in source.view.labels],
        "holder": [-1 if label.name is None else texts.number(label.name) for label in source.view.labels],
        "reason": [number_of.get(why, -1) for why in whys],
        "stack": stack_of,
        "freedBy": [number if stacks[number] else -1 for number in stack_of_free],
        "stacks": [_stack(frames, texts) for frames in stacks],
        # The one frame that tells the most, of each stack; and stacks that read the same have one number.
        "heads": [_head(lines, texts) for lines in read],
        "alike": [numbers_read.setdefault(lines, len(numbers_read)) for lines in read],
        "strings": texts.all,
        "extents": [
            [
                extent.address,
                extent.size,
                extent.born,
                -1 if extent.gone is None else extent.gone,
                extent.stream,
                plain(extent.pool),
                int(extent.expandable),
                number,
            ]
            for extent, number in zip(extents, numbers[2 * len(allocations) :], strict=True)
        ],
    }


def _numbered(stacks: Sequence[tuple[Frame, ...]]) -> tuple[list[tuple[Frame, ...]], list[int]]:
    """The different stacks, and the number of each that was given. A stack is compared once for each object that it is."""
    different: dict[tuple[Frame, ...], int] = {}
    known: dict[int, int] = {}
    numbers = []
    for frames in stacks:
        number = known.get(id(frames))
        if number is None:
            number = known[id(frames)] = different.setdefault(frames, len(different))
        numbers.append(number)
    return list(different), numbers


class _Texts:
    """Each text once; a stack is a list of numbers. Thousands of stacks have few different frames: each is looked at once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._kinds: dict[Frame, int] = {}
        self._frames: dict[Frame, int] = {}

    @property
    def all(self) -> list[str]:
        return list(self._numbers)

    def number(self, text: str) -> int:
        return self._numbers.setdefault(plain(text), len(self._numbers))

    def kind(self, frame: Frame) -> int:
        known = self._kinds.get(frame)
        if known is None:
            known = _NATIVE if not is_python(frame) else _LIBRARY if is_library(frame) else _OWN
            self._kinds[frame] = known
        return known

    def frame(self, frame: Frame) -> int:
        """3 x the number of its text + its kind."""
        known = self._frames.get(frame)
        if known is None:
            known = self._frames[frame] = 3 * self.number(words_of(frame)) + self.kind(frame)
        return known


def _stack(frames: tuple[Frame, ...], texts: _Texts) -> list[int]:
    """Python's frames first, innermost first, then the native ones."""
    ordered = sorted(frames, key=lambda frame: texts.kind(frame) == _NATIVE)
    return [texts.frame(frame) for frame in ordered[:_MOST_FRAMES]]


def _head(lines: tuple[str, ...], texts: _Texts) -> int:
    telling = [line for line in lines if not line.startswith("(")]
    return texts.number(telling[0]) if telling else -1


def _times(source: TimelineSource) -> list[int]:
    """Microseconds since the first event; [] where the trace has no times."""
    times = [event.time_us for event in source.view.log.events]
    if not any(times):
        return []
    first = times[0]
    return [time - first for time in times]
