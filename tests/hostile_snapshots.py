"""Snapshot files as an attacker, a bad disk or a bug would make them, and the road from such a file to a report and a page."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpumem_magic.files.loaded import report_of, views_of
from gpumem_magic.snapshot.files import SnapshotFileError, read
from gpumem_magic.timeline_page.view import timeline_of_files
from gpumem_magic.user_report import Report

MIB = 1 << 20
BASE = 0x7F0000000000
MARKUP = '</script><img src=x onerror="window.broken=1"><script>window.broken=1</script>'
TEXTS = [
    MARKUP,
    "\x1b[2J\x1b[31mred",
    "a\u202egnp.exe",
    "line\nbreak\r",
    "\ud800",
    "$\\frac{",
    "x" * 5000,
    "",
    "../../etc",
    "{{7*7}}",
]
NUMBERS = [
    -1,
    0,
    1,
    511,
    512,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
]
SHAPES: list[Any] = [None, True, [], {}, [[]], {"frames": 3}, (1, 2), "oom", [None] * 20]


def event(action: str, address: int, size: int, number: int, frames: Any) -> dict[str, Any]:
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": 0, "time_us": 1_000_000 + number, "frames": frames}


def recording(source: random.Random, length: int = 40) -> dict[str, Any]:
    """A sound one: segments with blocks beside each other, some freed, some left; sometimes on two devices."""
    stacks = [
        [{"filename": "/home/me/train.py", "name": "step", "line": 12}],
        [
            {"filename": "??", "name": "at::native::empty_cuda(long)", "line": 0},
            {"filename": "/env/lib/python3.11/site-packages/torch/optim/adam.py", "name": "_init_group", "line": 180},
            {"filename": "/home/me/train.py", "name": "<module>", "line": 40},
        ],
        [],
    ]
    devices = source.choice([1, 1, 1, 2])
    segments, traces = [], []
    for device in range(devices):
        trace: list[dict[str, Any]] = []
        live: list[tuple[int, int, Any]] = []
        base = BASE + device * (1 << 36)
        trace.append(event("segment_alloc", base, 64 * MIB, 0, stacks[0]))
        top = base
        for number in range(length):
            if live and source.random() < 0.4:
                address, size, frames = live.pop(source.randrange(len(live)))
                trace.append(event("free_requested", address, size, number, frames))
                trace.append(event("free_completed", address, size, number, frames))
            elif top + 2 * MIB <= base + 64 * MIB:
                size = source.choice([512, 4096, MIB + 512, 2 * MIB])
                frames = source.choice(stacks)
                trace.append(event("alloc", top, size, number, frames))
                live.append((top, size, frames))
                top += size
        blocks = []
        place = base
        for address, size, frames in sorted(live, key=lambda one: one[0]):
            if address > place:
                blocks.append(_block(place, address - place, "inactive", []))
            blocks.append(_block(address, size, "active_allocated", frames))
            place = address + size
        blocks.append(_block(place, base + 64 * MIB - place, "inactive", []))
        segments.append(
            {
                "device": device, "address": base, "total_size": 64 * MIB, "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
                "allocated_size": 0, "active_size": 0, "requested_size": 0,
            }
        )  # fmt: skip
        traces.append(trace)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {"expandable_segments": False}}


def _block(address: int, size: int, state: str, frames: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


class _Calls:
    """Its pickle would make a file when loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def hand_made(canary: Path) -> dict[str, bytes]:
    """Named for what they try."""
    call = pickle.dumps(_Calls(canary), 4)
    contains_itself: list[Any] = []
    contains_itself.append(contains_itself)
    doubling = b"\x80\x04]\x94" + b"".join(b"(h%ch%ce]\x94(h%ch%ce" % ((k % 90,) * 4) for k in range(60)) + b"."
    sound = recording(random.Random(5))
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    long_trace = {**sound, "device_traces": [[sound["device_traces"][0][1]] * 20_000]}
    return {
        "reduce": call,
        "reduce beside data": pickle.dumps({**sound, "extra": _Calls(canary)}, 4),
        "reduce in a frame": pickle.dumps({"segments": [], "device_traces": [[{"frames": [_Calls(canary)]}]]}, 2),
        "global": b"\x80\x02cos\nsystem\n(X\x04\0\0\0truetR.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "persistent id": b"\x80\x02Phello\n.",
        "nested 400 deep": pickle.dumps(deep, 4),
        "nested a million deep": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "contains itself": pickle.dumps({"segments": contains_itself, "device_traces": []}, 4),
        "doubles with every step": doubling,
        "announces 4 GiB": b"\x80\x02X\xff\xff\xff\xffabc.",
        "announces 2^63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f" + b"a.",
        "memo of 2^32": b"\x80\x02]r\xff\xff\xff\xff.",
        "frame of 2^63": b"\x80\x04\x95" + b"\xff" * 8 + b"}.",
        "gzip of zeros": gzip.compress(b"\0" * (64 * MIB), 9),
        "gzip within gzip": gzip.compress(gzip.compress(pickle.dumps(sound, 4))),
        "gzip cut off": gzip.compress(pickle.dumps(sound, 4))[:-20],
        "json nested deep": b"[" * 200_000,
        "json with infinite numbers": json.dumps(
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1e999}]]}
        ).encode(),
        "one event twenty thousand times": pickle.dumps(long_trace, 4),
        "four thousand devices": pickle.dumps({"segments": [], "device_traces": [[]] * 4000}, 4),
        "five thousand devices": pickle.dumps({"segments": [], "device_traces": [[]] * 5000}, 4),
        "one segment fifty times": pickle.dumps({**sound, "segments": sound["segments"] * 50}, 4),
        "overlapping segments": pickle.dumps({**sound, "segments": copies(sound["segments"], 50)}, 4),
        "one trace for two thousand devices": pickle.dumps(
            {**sound, "device_traces": sound["device_traces"] * 2000}, 4
        ),
        "a trace for each of a hundred devices": pickle.dumps(
            {**sound, "device_traces": copies(sound["device_traces"][:1], 100)}, 4
        ),
        "markup as a pool": pickle.dumps({**sound, "segments": [{**sound["segments"][0], "segment_type": MARKUP}]}, 4),
        "markup everywhere": pickle.dumps(with_markup(sound), 4),
        "a report that is none": pickle.dumps(
            {**sound, "gpumem_magic": {"report": {"schema": 1, "device": MARKUP}}}, 4
        ),
        "a start that does not fit": pickle.dumps(
            {
                **sound,
                "device_traces": [sound["device_traces"][0][3:]],
                "gpumem_magic": {"start": {"0": copies(sound["segments"], 3)}},
            },
            4,
        ),
        "a start that is none": pickle.dumps({**sound, "gpumem_magic": {"start": {"0": [MARKUP, {}, -1]}}}, 4),
        "labels that are none": pickle.dumps(
            {**sound, "gpumem_magic": {"labels": {"0": {"born": [[[], {}, [], 1]]}}}}, 4
        ),
    }


def copies(parts: list[Any], times: int) -> list[Any]:
    return [copy.deepcopy(part) for _ in range(times) for part in parts]


def with_markup(data: dict[str, Any]) -> dict[str, Any]:
    """The same recording with hostile text wherever text can stand."""
    changed = copy.deepcopy(data)
    for trace in changed["device_traces"]:
        for number, one in enumerate(trace):
            text = TEXTS[number % len(TEXTS)]
            one["frames"] = [
                {"filename": f"{text}.py", "name": text, "line": number},
                {"filename": "??", "name": text, "line": 0},
            ]
            one["user_metadata"] = text
    for segment in changed["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [{"filename": MARKUP, "name": MARKUP, "line": 1}]
    changed["external_annotations"] = [{"device": 0, "time_us": 1_000_005, "stage": "START", "name": MARKUP}]
    changed["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": MARKUP, MARKUP: MARKUP}
    return changed


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Sound recordings with one to four things wrong: values of the data, or bytes of the file."""
    source = random.Random(seed)
    bases = [recording(source, length) for length in (1, 3, 10, 40, 90)]
    for number in range(count):
        data = copy.deepcopy(bases[number % len(bases)])
        if source.random() < 0.75:
            for _ in range(source.choice([1, 1, 2, 4])):
                _mutate(data, source)
        if source.random() < 0.1:
            # (What holds itself is no JSON, and a pickle like any other.)
            with suppress(ValueError):
                yield json.dumps(data, default=str).encode("utf-8", "replace")
                continue
        content = bytearray(pickle.dumps(data, source.choice([2, 3, 4, 4, 5])))
        if source.random() < 0.4:
            for _ in range(source.choice([1, 2, 6])):
                _damage(content, source)
        yield gzip.compress(bytes(content), 1) if source.random() < 0.1 else bytes(content)


def _mutate(data: Any, source: random.Random) -> None:
    """One value somewhere becomes something else, goes, or comes twice."""
    holder, value = None, data
    key: Any = None
    for _ in range(source.randint(1, 6)):
        if isinstance(value, dict) and value:
            holder, key = value, source.choice(list(value))
        elif isinstance(value, list) and value:
            holder, key = value, source.randrange(len(value))
        else:
            break
        value = holder[key]
    if holder is None:
        return
    kind = source.randrange(10)
    if kind < 4:
        holder[key] = source.choice(NUMBERS)
    elif kind < 6:
        holder[key] = source.choice(TEXTS)
    elif kind == 6:
        holder[key] = source.choice(SHAPES)
    elif kind == 7:
        del holder[key]
    elif kind == 8 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(source.choice(holder))] * source.choice([1, 3])
    elif isinstance(value, int) and not isinstance(value, bool):
        holder[key] = value + source.choice([-512, -1, 1, 512, MIB, -MIB, 1 << 40])


def _damage(content: bytearray, source: random.Random) -> None:
    place = source.randrange(len(content)) if content else 0
    kind = source.randrange(5)
    if kind < 2 and content:
        content[place] = source.randrange(256)
    elif kind == 2:
        del content[place : place + source.randint(1, 8)]
    elif kind == 3:
        content[place:place] = source.randbytes(source.randint(1, 6))
    else:
        del content[place:]
        content += b"."


def walk(path: Path) -> str:
    """The road from a file to a report, its text and a page. Returns the error's one line, or "" where it went well.

    Raises AssertionError where a loaded file's figures do not add up or its page could be taken for something else; any other
    exception is a mistake of ours.
    """
    try:
        loaded = read(path)
        views = views_of(loaded)
        report = Report.of(report_of(loaded, views=views))
    except (SnapshotFileError, OSError) as error:
        text = str(error)
        assert text, "an error without words"
        assert "\n" not in text, "an error of several lines"
        assert path.name in text, "the file is not named"
        return text
    for view in views:
        for position in {0, len(view.timeline) // 2, view.peak[1], len(view.timeline)}:
            sizes = view.sizes(position)
            layers = [size for name, size in sizes.items() if name not in ("allocated", "reserved")]
            assert sum(layers) == sizes["reserved"] == view.timeline.reserved_at(position)
            assert sizes["cached"] >= 0
            assert sum(layers) - sizes["cached"] == sizes["allocated"] == view.timeline.allocated_at(position)
    assert "\x1b" not in str(report)
    page = timeline_of_files([views]).to_html()
    assert "onerror" not in re.sub(r"\\u003[ce]", "", page) or "<img" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    return ""
