"""Events that become events while a pickle is read: the same as read first and converted then, in far less memory."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.snapshot import files
from gpumem_magic.snapshot.events import EventReader, TakingList
from gpumem_magic.snapshot.files import SnapshotFileError, read
from gpumem_magic.snapshot.plain import snapshot_from_data
from gpumem_magic.snapshot.unpickle import loads

MIB = 1 << 20


def trace(events: int, base: int = 0x7F0000000000) -> list[dict[str, Any]]:
    """Events as PyTorch writes them, with few stacks that many share, one failed request among them."""
    stacks = [
        [{"filename": "train.py", "name": f"f{number}", "line": number}, {"filename": "??", "name": "at::x", "line": 0}]
        for number in range(7)
    ]
    found: list[dict[str, Any]] = []
    for number in range(events):
        action = ("alloc", "free_requested", "free_completed")[number % 3]
        event = {
            "action": action,
            "addr": base + number // 3 * 512,
            "size": 500 + number,
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + number,
            "compile_context": "N/A",
            "user_metadata": f"part {number // 400}" if number % 800 > 400 else "",
            "frames": stacks[number % 7],
        }
        if number % 1000 == 999:
            event["action"] = "oom"
            event["device_free"] = event.pop("addr")
        found.append(event)
    return found


def data_of(*traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": [], "device_traces": list(traces), "allocator_settings": {}, "external_annotations": []}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(1,), (2500,), (0, 0, 2500), (1500, 0, 3), (0,), ()])
def test_traces_are_taken_as_they_are_read(protocol: int, sizes: tuple[int, ...]) -> None:
    data = data_of(*(trace(size, 1 << (30 + place)) for place, size in enumerate(sizes)))
    pickled = pickle.dumps(data, protocol)
    reader = EventReader()
    loaded = loads(pickled, "x", reader.taking_list)
    filled = next((place for place, size in enumerate(sizes) if size), None)
    if filled is not None:
        assert isinstance(loaded["device_traces"][filled], TakingList)
    snapshot = snapshot_from_data(loaded, reader)
    assert snapshot == snapshot_from_data(data)
    assert [len(one) for one in snapshot.device_traces] == list(sizes)
    assert reader.keys == {key for one in data["device_traces"] for event in one[:64] for key in event}


def test_a_stack_that_nothing_else_holds_is_not_taken_for_another() -> None:
    """Without a memo, each event's stack is a list of its own, gone with the event: the next may lie at its address."""
    single = "}(X\x06\0\0\0action"
    events = []
    for number in range(3000):
        name = f"f{number:05}"
        events.append(
            f"{single}X\x05\0\0\0allocX\x04\0\0\0addrM\x00{chr(number % 128)}X\x04\0\0\0sizeK\x01X\x06\0\0\0streamK\0"
            f"X\x07\0\0\0time_usK\x05X\x06\0\0\0frames]}}(X\x08\0\0\0filenameX\x04\0\0\0a.pyX\x04\0\0\0nameX\x06\0\0\0{name}"
            "X\x04\0\0\0lineK\x01uau"
        )
    pieces = ["(" + "".join(events[first : first + 100]) + "e" for first in range(0, 3000, 100)]
    content = ("\x02}X\x0d\0\0\0device_traces](]" + "".join(pieces) + "es.").encode("latin-1")
    reader = EventReader()
    snapshot = snapshot_from_data(loads(b"\x80" + content, "x", reader.taking_list), reader)
    assert [one.frames[0].name for one in snapshot.device_traces[0]] == [f"f{number:05}" for number in range(3000)]


def test_the_dictionaries_are_never_all_there(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(data_of(trace(60_000)), 4))
    tracemalloc.start()
    read(path)
    streamed = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    files._checked(loads(path.read_bytes(), "x"), "x")
    whole = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole > 1.5 * streamed


def _same_event_again(data: dict[str, Any]) -> None:
    data["device_traces"][0].append(data["device_traces"][0][0])


def _same_trace_again(data: dict[str, Any]) -> None:
    data["device_traces"].append(data["device_traces"][0])


def _elsewhere_first(data: dict[str, Any]) -> None:
    data["segments"] = [{"device_traces": [[1, 2], [{}]]}]


def _of_old_pytorch(data: dict[str, Any]) -> None:
    for event in data["device_traces"][0]:
        del event["time_us"]


@pytest.mark.parametrize(
    "change",
    [_same_event_again, _same_trace_again, _elsewhere_first, _of_old_pytorch],
)
def test_what_is_shared_or_unusual_reads_as_without_streaming(change: Any, tmp_path: Path) -> None:
    data = data_of(trace(3000))
    change(data)
    content = pickle.dumps(data, 4)
    path = tmp_path / "run.pickle"
    path.write_bytes(content)
    assert _outcome(lambda: read(path).snapshot) == _outcome(
        lambda: files._checked(loads(content, str(path)), str(path))[1]
    )


def test_damaged_files_read_as_without_streaming(tmp_path: Path) -> None:
    source = random.Random(19)
    path = tmp_path / "run.pickle"
    seeds = [pickle.dumps(data_of([], trace(40), trace(5)), protocol) for protocol in (2, 4)]
    loaded = 0
    for number in range(3000):
        content = bytearray(seeds[number % 2])
        for _ in range(source.choice((1, 1, 2))):
            place = source.randrange(2, len(content))
            content[place : place + source.randrange(2)] = source.choice(
                (b"", b"N", b"]", b"h\x05", source.randbytes(2))
            )
        path.write_bytes(content)
        streamed = _outcome(lambda: read(path).snapshot)
        name = str(path)
        whole = _outcome(lambda content=bytes(content), name=name: files._checked(loads(content, name), name)[1])
        if whole == streamed:
            loaded += not isinstance(whole, str)
            continue
        # What is wrong lies where nobody looks: in a value of an event that is not read.
        assert isinstance(whole, str), content
        assert "deep" in whole or "stand for" in whole, whole
    assert loaded > 300


def _outcome(work: Any) -> Any:
    try:
        return work()
    except SnapshotFileError as error:
        return str(error)
