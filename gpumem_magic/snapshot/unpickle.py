"""Reading an untrusted pickle: it can hold dictionaries, lists, tuples, strings, numbers and None, and nothing else.

Three fences, one behind the other. The scan walks over the operations before any is carried out: it knows only those that plain
data needs, and what they declare (lengths, places in the memo) must fit into the file. The C unpickler then loads, and would
refuse every global. What comes out is walked without recursion: it must not be too deep, contain itself, or be a small file
that stands for an enormous structure.

The scan is a regular expression, since a loop over a million operations would take longer than the loading.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from gpumem_magic.snapshot.values import PlainDataError
from gpumem_magic.units import MIB, human

MAX_BYTES = 2048 * MIB
# PyTorch's own data are 6 deep; a report that we keep beside them has its rows within rows.
MAX_DEPTH = 64
# Shared parts count as often as they are referred to: PyTorch's stacks are, some 5 values for each byte.
MAX_VALUES_PER_BYTE = 64
MAX_VALUES_OF_SMALL_FILE = 1 << 20
_BUFFER = 1 << 17

_CONTAINERS = frozenset({dict, list, tuple})
# A frame of protocol 4 comes with its length, a string of each kind with one of 1, 4 or 8 bytes.
_LENGTHS = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_TRACES = b"device_traces"
# With its place in the memo, as far as it has one.
_LIST = re.compile(rb"\](?:\x94|q.|r....)?", re.DOTALL)
_LIST_OF_LISTS = re.compile(
    rb"(?:\x94|q.|r....)?" + _LIST.pattern + rb"\(?((?:" + _LIST.pattern + rb"){1,64})", re.DOTALL
)
# None, and an operation that makes a persistent id of it.
_MARK = b"NQ"
_FRAME, _PROTOCOL, _STOP = 0x95, 0x80, ord(".")
_NUMBER_TOO_LONG = "an integer of more than 72 bits"
_LONG = b"|".join(re.escape(bytes([size])) + b"." * size for size in range(10))
_NUMBER = b"(?:K.|M..|J....|G.{8}|\\x8a(?:" + _LONG + b")|[N\\x88\\x89])"
_EACH_NUMBER = re.compile(_NUMBER, re.DOTALL)
# Numbers with the beginnings of frames before and between them, and what makes a tuple of some of them.
_PARTED = re.compile(
    rb"(?P<mark>\(?)(?P<parts>(?:" + _NUMBER + rb"|\x95.{8}){1,160})(?P<tuple>[\x85\x86\x87t]?)", re.DOTALL
)
_LENGTH_OF_TUPLE = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_REFUSED = {
    **dict.fromkeys(b"c\x93", "a global (it would import and hand out a function or class)"),
    **dict.fromkeys(b"R", "a call of a function (REDUCE)"),
    **dict.fromkeys(b"bio\x81\x92", "the creation of an object"),
    **dict.fromkeys(b"\x82\x83\x84", "an extension code"),
    **dict.fromkeys(b"PQ", "a persistent id"),
    **dict.fromkeys(b"BC\x8e\x96\x97\x98STU", "bytes"),
    **dict.fromkeys(b"\x8f\x90\x91", "a set"),
    **dict.fromkeys(b"\x85\x86\x87t", "a tuple of something other than numbers"),
    **dict.fromkeys(b"ILFVpgld", "the text form of protocol 0"),
    **dict.fromkeys(b"012", "an operation that plain data does not need"),
    ord("\x8b"): _NUMBER_TOO_LONG,
    ord("\x8a"): _NUMBER_TOO_LONG,
    ord("r"): "a place in the memo beyond anything in the file",
}


class SnapshotFileError(ValueError):
    """A file that can't be read as a snapshot. One line: the file, what is wrong with it, and what to do."""


def loads(data: bytes, name: str, taking_list: Callable[[], list[Any]] = list) -> Any:
    """The plain data in a pickle of protocol 2 to 5. `name` is for errors: the file that the bytes came from.

    taking_list: makes the lists of events (those in the first list of the name "device_traces"), which are filled as the pickle
    is read, by `extend` and `append`; what these raise is raised.

    Raises SnapshotFileError for anything but dict, list, tuple (of numbers), str, int, float, bool and None, for data that is
    cut off or damaged, and for what would take far more memory than the file has.
    """
    if len(data) > MAX_BYTES:
        _refuse(name, f"it has {human(len(data))}, but at most {human(MAX_BYTES)} can be read", "Record fewer events.")
    lists = _scan(data, name)
    file: io.RawIOBase | io.BytesIO = io.BytesIO(data) if taking_list is list else _Pieces(_with_marks(data, lists))
    try:
        # The buffer lets the unpickler look ahead; without it every operation of protocol 2 is a call of read().
        loaded = _Unpickler(io.BufferedReader(file, _BUFFER), taking_list).load()
    except PlainDataError:
        raise
    except MemoryError:
        _refuse(name, "there is not enough memory to load it", "Load it on a machine with more.")
    except Exception as error:  # the C unpickler raises many kinds for damaged data
        _refuse(name, f"the pickle is damaged ({one_line(error)})", "Copy or record it again.")
    check_values(loaded, len(data), name)
    return loaded


class _Unpickler(pickle.Unpickler):
    """The second fence: the scan lets no global through that would get here, and no persistent id but our own marks."""

    def __init__(self, file: io.BufferedReader, taking_list: Callable[[], list[Any]]) -> None:
        super().__init__(file)
        self._taking_list = taking_list

    def find_class(self, module: str, qualname: str) -> NoReturn:
        raise pickle.UnpicklingError("globals are not allowed")

    def persistent_load(self, pid: Any) -> list[Any]:
        if pid is not None or self._taking_list is list:
            raise pickle.UnpicklingError("persistent ids are not allowed")
        return self._taking_list()


class _Lists(NamedTuple):
    """Where lists of events are made: the places of their one byte, and of the frame that has them (-1: none)."""

    places: tuple[int, ...] = ()
    frame: int = -1


def _with_marks(data: bytes, lists: _Lists) -> Iterator[memoryview]:
    """The pickle in pieces, with the persistent id None in place of each of these lists.

    The frame around them would be too short, so it goes without one: the unpickler then reads operation by operation.
    """
    view, done = memoryview(data), 0
    if lists.places and lists.frame >= 0:
        yield view[: lists.frame]
        done = lists.frame + 9
    for place in lists.places:
        yield view[done:place]
        yield memoryview(_MARK)
        done = place + 1
    yield view[done:]


class _Pieces(io.RawIOBase):
    """A file of pieces of memory, which are not copied into one."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            found = next(self._pieces, None)
            if found is None:
                return 0
            self._piece = found
        part = self._piece[: len(buffer)]
        buffer[: len(part)] = part
        self._piece = self._piece[len(part) :]
        return len(part)


@lru_cache(maxsize=8)
def _plain_operations(memo_limit: int) -> re.Pattern[bytes]:
    """Matches a run of operations of fixed size. Places in the memo are below about twice the limit.

    The unpickler keeps a table as long as the highest place, so a place of four billion in a file of nine bytes would cost
    gigabytes. A tuple is matched as a whole, with the numbers in it: nested ones would make a hash recurse without end.
    """
    last_byte = (memo_limit.bit_length() - 1) // 8
    classes = [b"."] * last_byte + [b"[\\x00-" + re.escape(bytes([memo_limit >> 8 * last_byte])) + b"]"]
    place = b"".join(classes + [b"\\x00"] * (3 - last_byte)) if last_byte < 4 else b"...."
    operations = (
        b"h.|j....|q.|r" + place,
        # What a frame may part is left to `_parted_by_frames`.
        _NUMBER + b"(?:" + _NUMBER + b"(?:" + _NUMBER + b"\\x87|\\x86)|\\x85|(?!" + _NUMBER + b"{0,2}\\x95))",
        b"\\((?:" + _NUMBER + b"{4,64}t|(?!" + _NUMBER + b"{0,64}\\x95))",
        b"[\\x94}\\])aesu]",
        # Strings of up to three bytes: newer PyTorchs write "N/A" and "" anew with each event.
        b"\\x8c(?:\\x00|\\x01.|\\x02..|\\x03...)",
    )
    # Possessive groups come with Python 3.11; before, the matcher keeps a way back from each repetition, so they are bounded.
    return re.compile(b"(?:" + b"|".join(operations) + b"){0,4096}", re.DOTALL)


def _scan(data: bytes, name: str) -> _Lists:
    """Raises SnapshotFileError for what is not plain data, from the first operation to the last (STOP)."""
    size = len(data)
    if size < 2 or data[0] != _PROTOCOL:
        _refuse(name, "it is not a pickle of protocol 2 to 5", "Pass a file of torch.cuda.memory._dump_snapshot.")
    if not 2 <= data[1] <= 5:
        _refuse(name, f"its pickle protocol is {data[1]}", "Save it again with protocol 2 to 5.")
    # An empty list is one byte in the file and sixty in memory; in real data some content follows each.
    if data.count(b"]") + data.count(b"}") > size // 3 + 64:
        _refuse(name, "it is made of empty lists and dictionaries", "Record it again.")
    match = _plain_operations(max(size, 256)).match
    position, frame, lists = 2, -1, _Lists()
    while True:
        run = match(data, position)
        position = run.end() if run else position
        if position >= size:
            _cut_off(name)
        operation = data[position]
        if operation in _LENGTHS:
            start = position + 1 + _LENGTHS[operation]
            length = int.from_bytes(data[position + 1 : start], "little")
            if start > size or length > size - start:
                _cut_off(name, f" (a string of {length:,} bytes is announced at byte {position:,})")
            position = start + length
            if length == len(_TRACES) and not lists.places and data[start:position] == _TRACES:
                lists = _Lists(_lists_behind(data, position), frame)
        elif operation == _FRAME:
            frame = _checked_frame(data, position, name)
            position += 9
        elif operation == _STOP:
            return lists
        elif parted := _parted_by_frames(data, position, name):
            for place in parted.frames:
                frame = _checked_frame(data, place, name)
            position = parted.end
        elif run is None or run.end() == run.start():
            if _is_cut_off(data, position):
                _cut_off(name)
            _refuse_operation(data, position, name)


def _checked_frame(data: bytes, position: int, name: str) -> int:
    """The position of a frame, which must not be longer than what follows."""
    if int.from_bytes(data[position + 1 : position + 9], "little") > len(data) - position - 9:
        _cut_off(name)
    return position


class _Parted(NamedTuple):
    """Numbers, perhaps a tuple of them, between which frames begin: the places of these, and where it all ends.

    The pickler begins a frame every 64 KiB, wherever it is.
    """

    frames: tuple[int, ...]
    end: int


def _parted_by_frames(data: bytes, position: int, name: str) -> _Parted | None:
    """None where no frame is near. Raises SnapshotFileError where a tuple would be of something else than these numbers."""
    found = _PARTED.match(data, position)
    if found is None:
        return None
    frames, numbers, place, end = [], 0, found.start("parts"), found.end("parts")
    while place < end:
        number = _EACH_NUMBER.match(data, place)
        if number is None:
            frames.append(place)
            place += 9
        else:
            numbers += 1
            place = number.end()
    made = found["tuple"]
    if not frames:
        return None
    if not found["mark"] if made == b"t" else numbers < _LENGTH_OF_TUPLE.get(made, 0):
        _refuse_operation(data, found.end() - 1, name)
    return _Parted(tuple(frames), found.end())


def _lists_behind(data: bytes, position: int) -> tuple[int, ...]:
    """The places of the first lists in a list whose key ends at a position: empty ones, and one that is filled next."""
    found = _LIST_OF_LISTS.match(data, position)
    return tuple(one.start() for one in _LIST.finditer(data, *found.span(1))) if found else ()


def _refuse_operation(data: bytes, position: int, name: str) -> NoReturn:
    what = _REFUSED.get(data[position], f"the unknown operation 0x{data[position]:02x}")
    _refuse(name, f"it holds {what} at byte {position:,}", "A snapshot is plain data: do not trust this file.")


def _is_cut_off(data: bytes, position: int) -> bool:
    """Whether the operation that the scan did not match is a good one that goes beyond the end."""
    operation = data[position : position + 1]
    need = {b"K": 2, b"h": 2, b"q": 2, b"M": 3, b"J": 5, b"j": 5, b"r": 5, b"G": 9}.get(operation, 0)
    if operation == b"\x8a":
        announced = data[position + 1 : position + 2]
        need = 2 + announced[0] if announced and announced[0] < 10 else 0 if announced else 2
    return len(data) - position < need


def check_values(loaded: Any, size: int, name: str) -> None:
    """Depth, cycles, and the number of values when shared parts are counted as often as they are referred to."""
    levels = check_depth(loaded, name)
    most = MAX_VALUES_OF_SMALL_FILE + MAX_VALUES_PER_BYTE * size
    values_in: dict[int, int] = {}
    for level in reversed(levels):
        for value in level:
            if id(value) not in values_in:
                values = len(value) + sum(filter(None, map(values_in.get, map(id, _children(value)))))
                if values > most:
                    _refuse(name, f"its {human(size)} stand for more than {most:,} values", "Do not trust this file.")
                values_in[id(value)] = values


def check_depth(loaded: Any, name: str) -> list[list[Any]]:
    """The containers level by level, each once a level; one that contains itself is on every level and never ends.

    Raises SnapshotFileError where there are more levels than a snapshot has.
    """
    level = [loaded] if type(loaded) in _CONTAINERS else []
    levels = []
    while level:
        levels.append(level)
        if len(levels) > MAX_DEPTH:
            _refuse(name, f"it is nested more than {MAX_DEPTH} deep, or contains itself", "Do not trust this file.")
        below = chain.from_iterable(map(_children, level))
        level = list({id(value): value for value in below if type(value) in _CONTAINERS}.values())
    return levels


def _children(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


def _cut_off(name: str, detail: str = "") -> NoReturn:
    _refuse(name, f"it is cut off{detail}", "Copy or record it again.")


def _refuse(name: str, what: str, advice: str) -> NoReturn:
    raise SnapshotFileError(f"{one_line(name)}: {what}. {advice}") from None


def one_line(text: object) -> str:
    """The text of anything as one printable line of at most 200 characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(text)[:1000]).split())
    return line if len(line) <= 200 else f"{line[:197]}..."
