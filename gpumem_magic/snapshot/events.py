"""The events of a trace from plain data, a thousand at a time, and in the same step as a pickle is read.

A million events are eight million values. They are checked by columns, which costs a fraction of a loop's time; a column that
is not as expected is looked at event by event, for the error to say which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, cast

from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.values import LIMIT, dict_of, int_of, list_of, pool_id_of, wrong

# As many as a pickle has in one go.
_BATCH = 1000
# The kinds of keys are those of the first events.
_SAMPLE = 64
# Addresses come again and again: equal ones are one object, of so many at a time.
_MOST_NUMBERS = 1 << 14

# So much of an event's metadata is kept.
_MOST_METADATA = 200

_columns = itemgetter("action", "addr", "size", "stream", "time_us")
_event = partial(cast(Any, tuple.__new__), TraceEvent)


class EventReader:
    """Makes events of dictionaries, and remembers the stacks that they share.

    keys: of the first events of each trace. Lists and dictionaries are recognised by their identity, so they are kept.
    """

    def __init__(self) -> None:
        self.keys: set[Any] = set()
        self._stacks: dict[int, tuple[Frame, ...]] = {id(None): ()}
        self._kept: list[Any] = []
        self._frames: dict[int, Frame] = {}
        self._equal_frames: dict[tuple[str, str, int], Frame] = {}
        self._equal: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._numbers: dict[int, int] = {}
        self._pools: dict[tuple[int, int], tuple[int, int]] = {}
        self._metadata: dict[str, str] = {}

    def taking_list(self) -> TakingList:
        """A list in an unpickler's hands, whose items become events and are let go."""
        return TakingList(self)

    def trace(self, trace: Any, where: str) -> tuple[TraceEvent, ...]:
        """The events of one device. Raises PlainDataError."""
        if isinstance(trace, TakingList):
            return trace.handed_over()
        events: list[TraceEvent] = []
        self.add(events, list_of(trace, where), where)
        return tuple(events)

    def add(self, events: list[TraceEvent], more: Sequence[Any], where: str) -> None:
        """Adds what comes behind the events that are there. Raises PlainDataError."""
        first = len(events)
        if first < _SAMPLE:
            self.keys.update(key for data in islice(more, _SAMPLE - first) if type(data) is dict for key in data)
        for start in range(0, len(more), _BATCH):
            batch = more[start : start + _BATCH]
            events += self._by_columns(batch, where) or self._one_by_one(batch, where, first + start)

    def _by_columns(self, batch: Sequence[Any], where: str) -> list[TraceEvent] | None:
        """None where something is unusual, which need not be wrong."""
        if set(map(type, batch)) != {dict}:
            return None
        try:
            actions, *figures = zip(*map(_columns, batch), strict=True)
        except KeyError:
            return None
        for column in figures:
            if set(map(type, column)) != {int} or min(column) < 0 or max(column) >= LIMIT:
                return None
        pools = [data.get("pool_id") for data in batch]
        if any(pools):
            pools = [self._pool(pool, where) for pool in pools]
        if set(map(type, actions)) != {str} or "oom" in actions:
            return None
        if len(self._numbers) > _MOST_NUMBERS:
            self._numbers.clear()
        addresses, sizes, streams, times = figures
        same = self._numbers.setdefault
        # The two events of a free come at one time.
        same_time = dict[int, int]().setdefault
        lists = [data.get("frames") for data in batch]
        stacks = list(map(self._stacks.get, map(id, lists)))
        if None in stacks:
            stacks = [self.stack(frames, f"{where}[..].frames") for frames in lists]
        metadata = [data.get("user_metadata", "") for data in batch]
        if set(map(type, metadata)) != {str} or any(metadata):
            metadata = list(map(self._words, metadata))
        rows = (
            actions,
            map(same, addresses, addresses),
            map(same, sizes, sizes),
            streams,
            map(same_time, times, times),
            stacks,
            pools,
            metadata,
        )
        return list(map(_event, zip(*rows, strict=True)))

    def _one_by_one(self, batch: Sequence[Any], where: str, first: int) -> Iterator[TraceEvent]:
        for index, data in enumerate(batch, first):
            place = f"{where}[{index}]"
            dict_of(data, place)
            action = data.get("action")
            if type(action) is not str:
                wrong(f"{place}.action", "there" if action is None else "a word", action)
            address = int_of(data, "device_free" if action == "oom" else "addr", place)
            size, stream = int_of(data, "size", place), int_of(data, "stream", place, 0)
            time = int_of(data, "time_us", place, 0)
            pool_id = self._pool(data.get("pool_id"), place)
            frames = self.stack(data.get("frames"), f"{place}.frames")
            metadata = self._words(data.get("user_metadata"))
            yield TraceEvent(action, address, size, stream, time, frames, pool_id, metadata)

    def _words(self, value: Any) -> str:
        """Metadata, equal ones as one object; "" for what is no text, since a trace is whole without it."""
        if type(value) is not str:
            return ""
        text = readable(value[:_MOST_METADATA])
        if len(self._metadata) > _MOST_NUMBERS:
            self._metadata.clear()
        return self._metadata.setdefault(text, text)

    def _pool(self, value: Any, where: str) -> tuple[int, int] | None:
        if value is None:
            return None
        pair = pool_id_of(value, where)
        return self._pools.setdefault(pair, pair)

    def stack(self, frames: Any, where: str) -> tuple[Frame, ...]:
        """A list of frames as a tuple; equal ones are one. Raises PlainDataError."""
        if not frames:
            return ()
        known = self._stacks.get(id(frames))
        if known is None:
            # JSON has no shared lists: equal ones become one here.
            converted = tuple(self._frame(frame, where) for frame in list_of(frames, where))
            known = self._stacks[id(frames)] = self._equal.setdefault(converted, converted)
            self._kept.append(frames)
        return known

    def _frame(self, data: Any, where: str) -> Frame:
        """A dictionary as a frame; equal ones are one. The list that has it is kept, so its identity stays its own."""
        known = self._frames.get(id(data))
        if known is None:
            dict_of(data, where)
            filename, name, line = data.get("filename"), data.get("name"), data.get("line")
            if type(filename) is not str or type(name) is not str or type(line) is not int:
                wrong(where, "a frame of filename, name and line", data)
            known = self._equal_frames.get((filename, name, line))
            if known is None:
                known = Frame(readable(filename), readable(name), line)
                self._equal_frames[filename, name, line] = known
            self._frames[id(data)] = known
        return known


class TakingList(list[Any]):
    """Stays empty: what an unpickler puts in becomes an event at once, and the dictionary that it was is emptied.

    So a long trace is never there as dictionaries, which take more memory than all the rest. A file that uses one of them
    elsewhere, too, finds it empty there; as an event it is refused.
    """

    def __init__(self, reader: EventReader) -> None:
        self.events: list[TraceEvent] = []
        self._is_handed_over = False
        self._reader = reader

    def extend(self, batch: Iterable[Any]) -> None:
        items = list(batch)
        if len(set(map(id, items))) < len(items):
            wrong("device_traces", "a list of different events")
        self._reader.add(self.events, items, "device_traces")
        for data in items:
            data.clear()

    def append(self, item: Any) -> None:
        self.extend((item,))

    def handed_over(self) -> tuple[TraceEvent, ...]:
        """The events, once. Raises PlainDataError where one trace is that of several devices."""
        if self._is_handed_over:
            wrong("device_traces", "a list of different traces")
        self._is_handed_over = True
        return tuple(self.events)


def readable(text: str) -> str:
    """The text, with what no encoding can carry (half of a surrogate pair) replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
