"""A failed request in a file: where it was made, what the other devices held, and what the driver was asked for."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hostile_snapshots import recording

from gpumem_magic.attribution.places import place_in_program
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.user_report import load

MIB = 1 << 20
OWN = Frame("/home/me/train.py", "step", 12)
TOP = Frame("/home/me/train.py", "<module>", 40)
LINEAR = Frame("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "forward", 125)
GATHER = Frame("/env/lib/python3.11/site-packages/torch/nn/parallel/scatter_gather.py", "gather", 70)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((LINEAR, OWN, TOP), "train.py:12 step"),
        ((Frame("??", "at::_ops::linear::call(at::Tensor const&)", 0), LINEAR, OWN), "train.py:12 step, in linear"),
        ((Frame("/env/site-packages/torch/nn/functional.py", "softmax", 9), TOP), "train.py:40, in softmax"),
        ((Frame("??", "torch::autograd::generated::BmmBackward0::apply", 0),), "BmmBackward0, in backward"),
        ((Frame("??", "malloc", 0),), ""),
        ((), ""),
    ],
)
def test_the_place(frames: tuple[Frame, ...], words: str) -> None:
    assert place_in_program(frames) == words


def failing(frames: list[Frame], *, expandable: bool = False) -> dict[str, Any]:
    """One device that held all that there was, and another with a single segment that came before the failure, one after."""
    data = recording(random.Random(3), 30)
    first = data["device_traces"][0]
    for number, event in enumerate(first):
        event["time_us"] = 1000 + number
    failed = {
        "action": "oom",
        "device_free": 5 * MIB,
        "size": 50 * MIB + 512,
        "stream": 0,
        "time_us": 5000,
        "frames": [frame._asdict() for frame in frames],
    }
    second = copy.deepcopy([one for one in first if one["action"] == "segment_alloc"][:1])
    early = {**second[0], "addr": 1 << 44, "size": 2 * MIB, "time_us": 10, "action": "segment_alloc"}
    late = {**early, "addr": (1 << 44) + (1 << 30), "time_us": 9000}
    segments = [
        {
            "device": 1,
            "address": event["addr"],
            "total_size": 2 * MIB,
            "allocated_size": 0,
            "active_size": 0,
            "requested_size": 0,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": event["addr"], "size": 2 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
            ],
        }
        for event in (early, late)
    ]
    return {
        **data,
        "segments": [*data["segments"], *segments],
        "device_traces": [[*first, failed], [early, late]],
        "allocator_settings": {"expandable_segments": expandable},
    }


def saved(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "failed.pickle"
    path.write_bytes(pickle.dumps(data))
    return path


def test_the_verdict_says_where_and_who_was_elsewhere(tmp_path: Path) -> None:
    report = load(saved(tmp_path, failing([LINEAR, OWN, TOP])))
    if report.device.index != 0:
        report = next(one for one in report.devices if one.device.index == 0)
    assert report.error is not None
    assert report.error.place == "train.py:12 step"
    assert report.answer.startswith("Out of memory at train.py:12 step: ")
    assert "Wanted 50.0 MiB; " in report.answer
    assert "cuda:1 2.0 MiB." in report.error.elsewhere, "what came later does not count"
    assert "DataParallel" not in report.error.elsewhere
    assert report.error.elsewhere in " ".join(str(report).split())
    again = type(report).from_dict(report.to_dict())
    assert (again.error.place, again.error.elsewhere) == (report.error.place, report.error.elsewhere)


def test_data_parallel_is_named(tmp_path: Path) -> None:
    report = load(saved(tmp_path, failing([GATHER, OWN, TOP])))
    found = next(one.error for one in (report, *report.devices) if one.device.index == 0)
    assert found is not None
    assert "DataParallel gathers on the first" in found.elsewhere


def test_on_another_device_than_the_first_data_parallel_gathers_nothing(tmp_path: Path) -> None:
    data = failing([GATHER, OWN, TOP])
    data["segments"] = [{**segment, "device": 1 - segment["device"]} for segment in data["segments"]]
    data["device_traces"].reverse()
    report = load(saved(tmp_path, data))
    found = next(one.error for one in (report, *report.devices) if one.device.index == 1)
    assert found is not None
    assert "gathers" not in found.elsewhere
    assert "the part of the batch that cuda:1 got took the most" in found.elsewhere


def test_under_expandable_segments_the_driver_is_asked_for_whole_steps(tmp_path: Path) -> None:
    for expandable, asked in ((False, 52 * MIB), (True, 60 * MIB)):
        report = load(saved(tmp_path, failing([OWN], expandable=expandable)))
        found = next(one.error for one in (report, *report.devices) if one.device.index == 0)
        assert found is not None
        assert found.segment == asked
