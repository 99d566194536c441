"""Facts about single layers, in exact bytes: one layer's weights, an LSTM's step, the workspace of the first product."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from accuracy.plans import Plan, Readings, Skip, current_devices, readings
from accuracy.table import Row

_OLD = "virtual:16GiB,torch=1.12"
_NEW = "virtual:16GiB,torch=2.0"


def plan(row: Row) -> Plan | Skip:
    if "leftover" in row.extras.replace("-", "") or row.how_to_build.startswith("forward inside a function"):
        return Plan("left over", _NEW, _left_over, "memory_allocated")
    if "X(1000)" in row.model:
        reading = "large segment" if "segment" in row.metric else "small blocks"
        return Plan("product", _NEW, _product, reading)
    if row.model.startswith("nn.LSTM"):
        return Plan("lstm", _OLD, _lstm, "after" if "backward" in row.extras else "before")
    if row.model.startswith("nn.Linear("):
        return Plan("linear", _OLD, _linear_weights, "memory_allocated")
    if re.match(r"Linear\(1024,1024\), inp\(512,1024\)", row.model):
        return Plan("linear step", _OLD, _linear_step, "after" if row.extras.startswith("after") else "before")
    return Skip("no such small program is written down")


def _allocated(name: str) -> Readings:
    return {name: readings()["memory_allocated"]}


def _linear_weights() -> Readings:
    layer = torch.nn.Linear(1024, 1024).cuda()
    found = readings()
    del layer
    return found


def _linear_step() -> Readings:
    """The readme's listing: the input and the loss live in the function, and the result of the layer does not."""
    layer = torch.nn.Linear(1024, 1024).cuda()
    inputs = torch.randn(512, 1024, device="cuda")
    loss = layer(inputs).mean()
    found = _allocated("before")
    loss.backward()
    return found | _allocated("after")


def _lstm() -> Readings:
    layer = torch.nn.LSTM(1024, 1024).cuda()
    inputs = torch.randn(10, 10, 1024, device="cuda")
    found = _allocated("before")
    out, _ = layer(inputs)
    out.mean().backward()
    return found | _allocated("after")


def _product() -> Readings:
    inputs, weights, bias = torch.rand(1000).cuda(), torch.rand(1000, 10).cuda(), torch.rand(10).cuda()
    out = inputs @ weights + bias
    (device,) = current_devices()
    segments = device.segments()
    large = [segment.total_size for segment in segments if segment.segment_type == "large"]
    small = sum(segment.allocated_size for segment in segments if segment.segment_type == "small")
    del out
    return {"large segment": sum(large), "small blocks": small}


def _left_over() -> Readings:
    def work() -> None:
        torch.nn.Linear(1, 1).cuda()(torch.ones(1, 1, device="cuda"))

    _call(work)
    return readings()


def _call(work: Callable[[], None]) -> None:
    work()
