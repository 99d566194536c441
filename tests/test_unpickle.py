"""The unpickler for files of strangers: plain data come out as they are, everything else is refused in one line."""

from __future__ import annotations

import builtins
import collections
import datetime
import io
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.snapshot.unpickle import MAX_DEPTH, SnapshotFileError, loads

MIB = 1 << 20

numbers = st.none() | st.booleans() | st.integers(-(1 << 71), (1 << 71) - 1) | st.floats(allow_nan=False)
plain = st.recursive(
    numbers | st.text() | st.tuples() | st.tuples(numbers) | st.tuples(numbers, numbers) | st.lists(numbers).map(tuple),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def sample() -> dict[str, Any]:
    """Small, with every kind of operation that a snapshot's pickle has."""
    frames = [{"filename": "train.py", "name": "step ü", "line": 12}, {"filename": "?" * 300, "name": "", "line": 0}]
    event = {"action": "alloc", "addr": 0x7F1200000000, "size": 70_000, "time_us": 1 << 50, "frames": frames}
    blocks = [{"address": 1 << 40, "size": 512, "state": "inactive", "frames": []}]
    segment = {"address": 1 << 40, "blocks": blocks, "segment_pool_id": (0, 0), "is_expandable": False, "share": 0.5}
    return {"segments": [segment], "device_traces": [[event, dict(event, size=-5)], []], "none": None, "yes": True}


def refused(data: bytes) -> str:
    with pytest.raises(SnapshotFileError) as caught:
        loads(data, "run.pickle")
    text = str(caught.value)
    assert text.startswith("run.pickle: ")
    assert "\n" not in text
    assert len(text) < 400
    return text


@given(plain, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=150, deadline=None)
def test_plain_data_come_out_as_pickle_would_give_them(data: Any, protocol: int) -> None:
    pickled = pickle.dumps(data, protocol)
    loaded = loads(pickled, "x")
    assert loaded == data
    assert repr(loaded) == repr(pickle.loads(pickled))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_shared_parts_stay_shared_and_long_memos_work(protocol: int) -> None:
    shared = [{"line": number, "name": f"function {number}"} for number in range(70_000)]
    loaded = loads(pickle.dumps([shared, shared], protocol), "x")
    assert loaded[0] == shared
    assert loaded[0] is loaded[1]


def test_frames_of_protocol_4_may_be_many() -> None:
    data = [f"text number {number} " * 20 for number in range(5000)]
    assert loads(pickle.dumps(data, 4), "x") == data


def in_frames(data: Any, size: int) -> bytes:
    """A pickle of protocol 4 whose frames are so short; Python's begin every 64 KiB, between any two values."""
    file = io.BytesIO()
    pickler = pickle._Pickler(file, 4)  # type: ignore[attr-defined]
    pickler.framer._FRAME_SIZE_TARGET = size
    pickler.dump(data)
    return file.getvalue()


@given(plain, st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_a_frame_may_begin_anywhere(data: Any, size: int) -> None:
    event = {
        "action": "alloc",
        "pool_id": (0, 1),
        "addr": 1 << 45,
        "of": (1, 2.5, None),
        "more": (1, 2, 3, 4, 5),
        "one": (7,),
    }
    data = {"device_traces": [[event, dict(event, frames=[])], []], "given": data}
    pickled = in_frames(data, size)
    assert loads(pickled, "x") == data
    taken: list[list[Any]] = []

    def list_of_events() -> list[Any]:
        taken.append([])
        return taken[-1]

    assert loads(pickled, "x", list_of_events) == data


@pytest.mark.parametrize(
    "operations",
    [b"}K\x00%s\x86", b"}K\x00K\x00%s\x87", b"}%s\x85", b"}(}%sK\x00K\x00K\x00t", b"((K\x00%sK\x00K\x00K\x00tt"],
)
def test_a_frame_hides_no_tuple_of_something_else(operations: bytes) -> None:
    frame = b"\x95" + struct.pack("<Q", 4)
    assert "a tuple of something other than numbers" in refused(b"\x80\x04" + operations % frame + b"NNNN.")


def test_a_frame_between_numbers_must_not_be_longer_than_the_file() -> None:
    data = b"\x80\x04K\x00\x95" + struct.pack("<Q", 1 << 40) + b"K\x00\x86."
    assert "it is cut off" in refused(data)


class _Calls:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return builtins.open, (str(self.target), "w")


def _hostile(canary: Path) -> dict[str, bytes]:
    """Pickles that would do something when loaded; what they do is make the canary file."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "secret" if value == "marked" else None

    persistent = io.BytesIO()
    Persistent(persistent, 4).dump(["marked"])
    path = str(canary).encode()
    call = b"cbuiltins\nopen\n(X" + struct.pack("<I", len(path)) + path + b"X\x01\0\0\0wtR"
    return {
        **{f"reduce {protocol}": pickle.dumps(_Calls(canary), protocol) for protocol in range(2, 6)},
        **{f"reduce inside {protocol}": pickle.dumps({"a": [_Calls(canary)]}, protocol) for protocol in range(2, 6)},
        "global by name": b"\x80\x02cos\nsystem\n.",
        "global from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "call": b"\x80\x02" + call + b".",
        "call after data": pickle.dumps(sample(), 4)[:-1] + call + b".",
        "instance": b"\x80\x02(X\x01\0\0\0aibuiltins\nopen\n.",
        "object": b"\x80\x02(cbuiltins\nopen\nX\x01\0\0\0ao.",
        "new object": b"\x80\x02cbuiltins\nlist\n)\x81.",
        "new object with keywords": b"\x80\x04\x8c\x08builtins\x8c\x04list\x93)}\x92.",
        "state": b"\x80\x02}}b.",
        "extension code": b"\x80\x02\x82\x01.",
        "long extension code": b"\x80\x02\x84\x01\0\0\0.",
        "persistent id": persistent.getvalue(),
        "persistent id as text": b"\x80\x02Pname\n.",
        "ordered dictionary": pickle.dumps(collections.OrderedDict(a=1), 4),
        "date": pickle.dumps({"day": datetime.date(2020, 1, 1)}, 4),
    }


def test_nothing_is_imported_called_or_made(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name, data in _hostile(canary).items():
        text = refused(data)
        assert "do not trust this file" in text, name
        assert not canary.exists(), name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a pickle"),
        (b"\x80", "not a pickle"),
        (b"(lp0\n.", "not a pickle"),
        (b"\x80\x00.", "protocol is 0"),
        (b"\x80\x09.", "protocol is 9"),
        (b"\x80\x04", "cut off"),
        (b"\x80\x04.", "damaged"),
        (b"\x80\x04(.", "damaged"),
        (b"\x80\x04h\x07.", "damaged"),
        (b"\x80\x04K\x01K\x02s.", "damaged"),
        (b"\x80\x04]]K\x01s.", "damaged"),
        (b"\x80\x04}]K\x01s.", "damaged"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "damaged"),
        (b"\x80\x04\xff.", "unknown operation 0xff"),
        (pickle.dumps(b"bytes", 4), "bytes"),
        (pickle.dumps(bytearray(b"bytes"), 5), "bytes"),
        (b"\x80\x05\x96\xff\xff\xff\xff\x0f\0\0\0.", "bytes"),
        (pickle.dumps({1, 2}, 4), "a set"),
        (pickle.dumps(("text", 1), 4), "a tuple of something other than numbers"),
        (pickle.dumps(((1, 2), 3), 4), "a tuple of something other than numbers"),
        (b"\x80\x02I5\n.", "protocol 0"),
        (b"\x80\x022.", "plain data does not need"),
        (pickle.dumps(1 << 72, 4), "72 bits"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "72 bits"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "cut off (a string of 4,294,967,295 bytes is announced at byte 2)"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "cut off (a string"),
        (b"\x80\x04\x8c\xffabc.", "cut off (a string"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "cut off"),
    ],
)
def test_damage_is_named(data: bytes, words: str) -> None:
    assert words in refused(data)


def _memory_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x02Nr\x00\x00\x00\x80.",
        b"\x80\x02Nr\x00\x00\x01\x00.",
        b"\x80\x02Np4294967295\n.",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\x7f\0\0\0\0.",
        b"\x80\x04]" + b"]" * MIB + b".",
        b"\x80\x04(" + b"}" * MIB + b"l.",
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(data: bytes) -> None:
    assert _memory_of(data) < 4 * MIB


def _nested(depth: int) -> Any:
    data: Any = []
    for number in range(depth - 1):
        data = [data] if number % 2 else {"a": data}
    return data


def test_nesting_is_allowed_up_to_a_limit() -> None:
    assert loads(pickle.dumps(_nested(MAX_DEPTH), 4), "x") == _nested(MAX_DEPTH)
    assert "deep" in refused(pickle.dumps(_nested(MAX_DEPTH + 1), 4))


def test_a_million_levels_are_refused_without_recursion() -> None:
    # Each level comes with an integer, so that it is not taken for a heap of empty lists.
    assert "deep" in refused(b"\x80\x04" + b"](K\x01" * 300_000 + b"]" + b"e" * 300_000 + b".")


def test_a_tuple_in_a_tuple_is_refused_since_its_hash_would_recurse() -> None:
    assert "a tuple" in refused(b"\x80\x04})" + b"\x85" * 500_000 + b"Ns.")
    memo = b"\x80\x04}K\x01\x85\x94" + b"h\x00\x85\x94Ns."
    assert "a tuple" in refused(memo)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert "contains itself" in refused(pickle.dumps(loop, 4))
    ring: dict[str, Any] = {}
    ring["list"] = [{"back": ring}]
    assert "contains itself" in refused(pickle.dumps({"segments": ring}, 4))


def test_a_small_file_that_stands_for_an_enormous_structure_is_refused() -> None:
    data: list[Any] = ["lol"] * 10
    for _ in range(30):
        data = [data] * 10
    assert "stand for more than" in refused(pickle.dumps(data, 4))


def test_every_truncation_is_refused() -> None:
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(sample(), protocol)
        for length in range(len(data)):
            refused(data[:length])


def test_what_follows_the_end_is_not_looked_at() -> None:
    # PyTorch's page pads its pickle with zeros.
    assert loads(pickle.dumps(sample(), 4) + b"\0\0", "x") == sample()


def test_the_name_of_the_file_stays_on_one_line() -> None:
    with pytest.raises(SnapshotFileError) as caught:
        loads(b"", "a\nb\x1b[31m.pickle")
    assert str(caught.value).startswith("a b [31m.pickle: ")


def _is_plain(data: Any) -> bool:
    todo = [data]
    while todo:
        value = todo.pop()
        if type(value) is dict:
            todo += [*value, *value.values()]
        elif type(value) in (list, tuple):
            todo += value
        elif value is not None and type(value) not in (str, int, float, bool):
            return False
    return True


def _found_or_error(data: bytes) -> tuple[Any, str | None]:
    try:
        return loads(data, "mutated.pickle"), None
    except SnapshotFileError as error:
        return None, str(error)


def test_ten_thousand_mutated_files(tmp_path: Path) -> None:
    """Each is refused in one line, or holds plain data that the ordinary unpickler finds too; nothing is executed."""
    canary = tmp_path / "canary"
    seeds = [pickle.dumps(sample(), protocol) for protocol in (2, 3, 4, 5)]
    seeds = seeds * 5 + list(_hostile(canary).values())
    hostile = [*seeds[20:], b"r\xff\xff\xff\xff", b"cos\nsystem\n", b"R", b"X\xff\xff\xff\x7f", b"]" * 50, b"\x8e" * 3]
    random_source = random.Random(20240607)
    loaded = 0
    tracemalloc.start()
    for number in range(10_000):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(random_source.choice((1, 1, 2, 4))):
            place = random_source.randrange(len(data) + 1)
            kind = random_source.choice((0, 0, 0, 0, 1, 2, 3, 4))
            if kind == 0 and place < len(data):
                data[place] = random_source.randrange(256)
            elif kind == 1:
                del data[place : place + random_source.randint(1, 8)]
            elif kind == 2:
                data[place:place] = random_source.choice(hostile)[:40]
            elif kind == 3:
                data[place:place] = random_source.randbytes(random_source.randint(1, 6))
            else:
                data = data[:place] + data[random_source.randrange(len(data) + 1) :]
        found, error = _found_or_error(bytes(data))
        if error is None:
            loaded += 1
            assert _is_plain(found)
            assert repr(found) == repr(pickle.loads(bytes(data)))
        else:
            assert error.startswith("mutated.pickle: ")
            assert "\n" not in error
        assert not canary.exists()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded > 300
    assert peak < 8 * MIB
