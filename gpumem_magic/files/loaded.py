"""A snapshot file becomes a report: the same rows, categories and words as for a cell, from what a recording holds.

There are no objects left, so categories rest on stacks, lifetimes and sizes; what the file lacks is said in the notes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpumem_magic.allocator.seed import seed_of
from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.allocator.verdict import verdict_of
from gpumem_magic.attribution.from_stacks import attribute_by_stacks
from gpumem_magic.attribution.ledger import Balance, Ledger, Outside
from gpumem_magic.attribution.sites import folded
from gpumem_magic.files.kept import kept_labels, kept_start
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.report.model import LABELS, Peak, ReportData, ReportDevice, ReportError, Row
from gpumem_magic.report.out_of_memory import OutOfMemory, out_of_memory
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.snapshot.files import LoadedSnapshot, SnapshotFileError, read
from gpumem_magic.snapshot.model import INACTIVE, Frame, Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings, segment_size
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.snapshot.unpickle import one_line
from gpumem_magic.units import human

# Settings are tried on a recorded failure for some seconds at most.
_MOST_STEPS = 4_000_000


def load(path: str | os.PathLike[str]) -> ReportData:
    """The report of a snapshot file: a recording that this package saved, or anybody's (see `snapshot.files.read`).

    Raises SnapshotFileError (a ValueError, in one line) for what is not one, OSError where it can't be opened.
    """
    with no_automatic_collection():
        return report_of(read(path))


def report_of(
    loaded: LoadedSnapshot, device: int | None = None, at: str = "peak", views: Sequence[FileView] = ()
) -> ReportData:
    """The report of one device (by default that with the highest peak; the others are under `devices`).

    at: "peak", "end", or the number of an event, whose state then is a row of its own. views: what `views_of` gave for the same
    file and device, so that nothing is recounted. A file that was saved with its report gives that one back. Raises
    SnapshotFileError where there is no such device or event.
    """
    kept = (loaded.extra or {}).get("report")
    if isinstance(kept, dict) and device is None and at == "peak":
        try:
            return _with_recording(report_from_dict(kept), loaded)
        except ValueError as error:
            raise SnapshotFileError(f"{one_line(loaded.path)}: the report in it is damaged: {error}") from None
    first, *others = views or views_of(loaded, device)
    return _with_recording(replace(first.report(at), devices=tuple(view.report() for view in others)), loaded)


def _with_recording(report: ReportData, loaded: LoadedSnapshot) -> ReportData:
    devices = tuple(replace(other, recording=loaded) for other in report.devices)
    return replace(report, recording=loaded, devices=devices)


def views_of(loaded: LoadedSnapshot, device: int | None = None) -> list[FileView]:
    """The device's view, or all devices', the one with the highest peak first. Raises SnapshotFileError where there is none."""
    if device is not None:
        return [FileView(loaded, device)]
    if not loaded.devices:
        raise SnapshotFileError(
            f"{one_line(loaded.path)}: it holds no segments and no events. There is nothing to report."
        )
    return sorted((FileView(loaded, found.device) for found in loaded.devices), key=lambda view: -view.peak[0])


@dataclass(frozen=True)
class LargeAllocation:
    """An allocation that is live at a position. Sizes are bytes; born and freed are indices of events (-1: before the
    recording; None: never). stack: lines for a reader, innermost first, library frames folded. why: where it is unknown.
    name: of what held it, in a recording that this package saved."""

    requested: int
    size: int
    category: str
    evidence: str
    why: str
    born: int
    freed: int | None
    stack: tuple[str, ...]
    name: str | None = None


class FileView:
    """What a file says about one device. Raises SnapshotFileError where the file has none of that number, or can't be
    recounted."""

    def __init__(self, loaded: LoadedSnapshot, device: int) -> None:
        found = [one for one in loaded.devices if one.device == device]
        if not found:
            there = ", ".join(str(one.device) for one in loaded.devices) or "none"
            raise SnapshotFileError(f"{one_line(loaded.path)}: it has no device {device}. It has: {there}.")
        self.loaded = loaded
        self.device = device
        self.beginning = found[0]
        self.final = tuple(segment for segment in loaded.snapshot.segments if segment.device == device)
        traces = loaded.snapshot.device_traces
        # A trace of one event was recorded with enabled="state": it leads nowhere.
        self.events: tuple[TraceEvent, ...] = traces[device] if self.beginning.kind != "none" else ()
        self.notes: list[str] = []
        self.settings = self._settings()
        self.start = self._start()
        try:
            self.timeline = Timeline(self.start, self.events, self.settings)
        except OverflowError:
            raise SnapshotFileError(
                f"{one_line(loaded.path)}: its sizes add up to more than 8 EiB: they are damaged. Copy or record it again."
            ) from None
        found_labels = attribute_by_stacks(self.timeline, self.events, self.final)
        self.labels, self.reasons = found_labels.labels, found_labels.reasons
        kept = kept_labels((loaded.extra or {}).get("labels"), device, self.timeline)
        if kept is not None:
            self.labels, self.reasons = kept, {}
        self._ledger = Ledger(self.timeline, self.labels)

    @property
    def peak(self) -> tuple[int, int]:
        """The highest allocated bytes, and the first position that has them."""
        return self.timeline.peak(0, len(self.timeline))

    def position(self, at: str) -> int:
        """The position that "peak", "end" or an event's number means: after that event. Raises SnapshotFileError."""
        if at == "peak":
            return self.peak[1]
        if at == "end":
            return len(self.timeline)
        number = int(at) if at.isascii() and at.isdecimal() and len(at) < 19 else -1
        if not 0 <= number < len(self.timeline):
            raise SnapshotFileError(
                f"{one_line(self.loaded.path)}: no event {at!r}. Say peak, end, or a number from 0 to {len(self.timeline) - 1}."
            )
        return number + 1

    def report(self, at: str = "peak") -> ReportData:
        """Rows: the start, the last failed request, the end, and `at` where that is another moment."""
        chosen = self.position(at)
        highest, peak_position = self.peak
        failures = [index for index, event in enumerate(self.events) if event.action == "oom"]
        last_failure = failures[-1:]
        end = len(self.timeline)
        # Every report shows the peak and the end; another moment gets a row of its own.
        asked = {} if chosen in (0, peak_position, end) else {chosen: "statement"}
        marked = {0: "before"} | asked | dict.fromkeys(last_failure, "error")
        balances = self._ledger.at([0, chosen, peak_position, end, *last_failure])
        rows: list[Row] = []
        before = 0
        for position, kind in [*sorted(marked.items()), (end, "after")]:
            words = self._words(position, kind)
            rows.append(self._row(kind, words, balances[position], before))
            before = position
        top = balances[peak_position]
        return ReportData(
            torch=self.loaded.torch,
            device=ReportDevice(
                f"GPU {self.device} of {one_line(os.path.basename(self.loaded.path))}",
                "cuda",
                self.device,
                None,
                None,
                None,
            ),
            checkpoints=tuple(rows),
            peak=Peak(
                where=_at_event(peak_position, len(self.events)),
                allocated=top.allocated,
                reserved=top.reserved,
                device_used=None,
                peak_allocated=highest,
                peak_reserved=self.timeline.peak_reserved(0, end)[0],
                categories=top.categories(Outside()),
            ),
            error=self._error(failures),
            evidence=top.evidence,
            notes=(*self.beginning.notes(), *self.notes, *self._why_unknown(peak_position)),
        )

    def sizes(self, position: int) -> dict[str, int]:
        """Bytes by category at a position, in the order of a bar, with "allocated" and "reserved" behind them."""
        balance = self._ledger.at([position])[position]
        known = {name: size for name, size in balance.categories(Outside()).items() if size is not None}
        return {**known, "allocated": balance.allocated, "reserved": balance.reserved}

    def largest(self, position: int, count: int = 10) -> list[LargeAllocation]:
        """The largest allocations that are live at a position, largest first."""
        live = sorted(self.timeline.live_at(position), key=lambda one: (-one.requested, one.index))[:count]
        at_end = {block.address: block.frames for segment in self.final for block in segment.blocks}
        found = []
        for one in live:
            label = self.labels[one.index]
            frames: tuple[Frame, ...] = ()
            if one.born >= 0:
                frames = self.events[one.born].frames
            elif one.freed is None:
                frames = at_end.get(one.address, ())
            found.append(
                LargeAllocation(
                    one.requested,
                    one.size,
                    label.category,
                    label.evidence,
                    self.reasons.get(one.index, ""),
                    one.born,
                    one.freed,
                    tuple(folded(frames)) if frames else (),
                    label.name,
                )
            )
        return found

    def segments(self, position: int) -> tuple[Segment, ...]:
        """The segments and blocks at a position."""
        return self.timeline.segments_at(position)

    def _settings(self) -> AllocatorSettings:
        try:
            return settings_from_dict(self.loaded.snapshot.allocator_settings)
        except (ValueError, TypeError, AttributeError) as error:
            self.notes.append(f"The allocator's settings in the file are not understood ({error}); defaults are used.")
            return DEFAULT_SETTINGS

    def _start(self) -> tuple[Segment, ...]:
        if not self.events:
            return self.final
        if self.beginning.kind == "empty":
            return ()
        kept = kept_start((self.loaded.extra or {}).get("start"), self.device)
        if kept is not None:
            return kept
        try:
            state = start_of(self.final, self.events, self.settings)
        except ValueError as error:
            raise SnapshotFileError(
                f"{one_line(self.loaded.path)}: its segments and events do not fit together: {error}."
            ) from None
        if state.uncertain:
            whose = "size of a block" if state.uncertain == 1 else f"sizes of {state.uncertain:,} blocks"
            bounds = "is a lower bound" if state.uncertain == 1 else "are lower bounds"
            self.notes.append(f"The {whose} from before the recording {bounds} (by up to 1 MiB each).")
        if state.orphans:
            which = "A block" if state.orphans == 1 else f"{state.orphans:,} blocks"
            self.notes.append(f"{which} from before the recording lay in segments that are not known.")
        return state.segments

    def _row(self, kind: str, words: str, balance: Balance, before: int) -> Row:
        position = balance.position
        return Row(
            kind=kind,
            label=words,
            statement=words,
            line=0,
            iteration=(),
            parts=(),
            allocated=balance.allocated,
            reserved=balance.reserved,
            device_used=None,
            peak_allocated=self.timeline.peak(before, position)[0],
            peak_reserved=self.timeline.peak_reserved(before, position)[0],
            categories=balance.categories(Outside()),
        )

    def _words(self, position: int, kind: str) -> str:
        total = len(self.events)
        if kind == "error":
            return f"out of memory at event {position:,}"
        if kind == "after":
            return f"the end, after {total:,} events" if total else "the state in the file"
        return "the start" if position == 0 else _at_event(position, total)

    def _error(self, failures: list[int]) -> ReportError | None:
        if not failures:
            return None
        index = failures[-1]
        event = self.events[index]
        rounded = event.size
        times = "" if len(failures) == 1 else f" (the last of {len(failures):,})"
        return ReportError(
            "torch.OutOfMemoryError",
            f"event {index:,}{times}: {human(rounded)} could not be had; the driver had {human(event.address)} free",
            None,
            requested=rounded,
            rounded=rounded,
            segment=segment_size(rounded, self.settings),
            largest_free=self.timeline.largest_free_at(index, event.stream),
            verdict=self._verdict(index),
        )

    def _verdict(self, failed: int) -> OutOfMemory | None:
        verdict = verdict_of(
            self.start,
            self.events,
            self.timeline,
            self.settings,
            event=failed,
            final=self.final,
            most_steps=_MOST_STEPS,
            can_replay=seed_of(self.final, self.events, self.settings).reason is None,
        )
        return None if verdict is None else out_of_memory(verdict, self._in_words, self.timeline.reserved_at(0))

    def _in_words(self, life: Allocation) -> str:
        """An allocation for a reader: ``activations of train.py:14 forward``."""
        category = self.labels[life.index].category
        kind = "a block" if category == "unknown" else LABELS[category]
        if life.born < 0:
            return f"{kind} from before the recording"
        frames = self.events[life.born].frames
        return f"{kind} of {folded(frames)[0]}" if frames else f"{kind} of event {life.born:,}"

    def _why_unknown(self, position: int) -> list[str]:
        sizes: Counter[str] = Counter()
        for one in self.timeline.live_at(position):
            if one.index in self.reasons:
                sizes[self.reasons[one.index]] += one.requested
        return [f"Unknown at the peak: {human(size)} {why}." for why, size in sizes.most_common() if size]


def _at_event(position: int, total: int) -> str:
    if not total:
        return "the state in the file"
    return "the start" if position == 0 else f"event {position - 1:,} of {total:,}"


def fragmentation(segments: tuple[Segment, ...], count: int = 12, width: int = 60) -> list[str]:
    """A picture in text of the segments with the most free memory: ``#`` is in use, ``.`` is free; and what it adds up to."""
    free_of: Mapping[int, int] = {
        number: sum(block.size for block in segment.blocks if block.state == INACTIVE)
        for number, segment in enumerate(segments)
    }
    lines = []
    for number in sorted(free_of, key=lambda one: (-free_of[one], one))[:count]:
        segment = segments[number]
        if not free_of[number]:
            break
        largest = max((block.size for block in segment.blocks if block.state == INACTIVE), default=0)
        lines.append(
            f"{human(segment.total_size):>10} {_drawn(segment, width)} {human(free_of[number])} free, "
            f"largest piece {human(largest)}"
        )
    total = sum(free_of.values())
    pieces = sum(1 for segment in segments for block in segment.blocks if block.state == INACTIVE)
    split = sum(size for number, size in free_of.items() if size < segments[number].total_size)
    lines.append(
        f"{len(segments):,} segments; {human(total)} cached but free in {pieces:,} pieces, {human(split)} of it in segments "
        "that are partly in use."
    )
    return lines


def _drawn(segment: Segment, width: int) -> str:
    """Each character is an equal share of the segment; ``:`` where it is partly in use."""
    used = [0] * width
    if not segment.total_size:
        return "[]"
    for block in segment.blocks:
        if block.state == INACTIVE:
            continue
        begin, end = block.address - segment.address, block.address - segment.address + block.size
        for cell in range(begin * width // segment.total_size, min(-(-end * width // segment.total_size), width)):
            low, high = cell * segment.total_size // width, (cell + 1) * segment.total_size // width
            used[cell] += max(0, min(end, high) - max(begin, low))
    cells = []
    for cell, size in enumerate(used):
        room = (cell + 1) * segment.total_size // width - cell * segment.total_size // width
        cells.append("#" if size >= room else ":" if size else ".")
    return f"[{''.join(cells)}]"
