"""What programs and tools that look at tensor objects see on a virtual device: what they would see on a card."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True, params=["T4", "T4,values=real", "T4,values=auto"])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    gpu.turn_on(request.param)
    yield
    gpu.turn_off()


def _is_parameters_class(kind: Any) -> bool:
    return kind == torch.nn.Parameter and kind != torch.Tensor and issubclass(kind, torch.nn.Parameter)


def _seen_on_a_device(*shapes: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What the loop of many an answer in forums finds."""
    return sorted(
        (type(one).__name__, tuple(one.shape))
        for one in gc.get_objects()
        if torch.is_tensor(one) and tuple(one.shape) in shapes
    )


def test_a_parameters_class_is_that_of_parameters() -> None:
    moved, made = torch.nn.Linear(3, 3).cuda().weight, torch.nn.Linear(3, 3, device="cuda").weight
    for weight in (moved, made, copy.deepcopy(moved), pickle.loads(pickle.dumps(moved)), copy.copy(moved)):
        assert _is_parameters_class(type(weight))
        assert repr(type(weight)) == "<class 'torch.nn.parameter.Parameter'>"
        assert {torch.nn.Parameter: True, torch.Tensor: False}[type(weight)]
        assert weight.is_cuda
        assert weight.requires_grad
    for tensor in (moved.detach(), moved.data, moved.clone(), moved + 1, moved[0], moved.to(torch.float16)):
        assert type(tensor) == torch.Tensor  # noqa: E721 (a device's class equals it)
        assert not isinstance(tensor, torch.nn.Parameter)


def test_a_parameter_keeps_its_class_where_it_is_moved_and_written() -> None:
    linear = torch.nn.Linear(3, 3).cuda()
    with torch.no_grad():
        assert _is_parameters_class(type(linear.weight.add_(1)))
    linear.weight.data = torch.zeros(3, 3, device="cuda")
    assert _is_parameters_class(type(linear.weight))
    linear.half()
    assert _is_parameters_class(type(linear.weight))
    linear.cpu()
    assert type(linear.weight) is torch.nn.Parameter


def test_a_parameter_of_inference_mode_is_converted_outside_of_it() -> None:
    linear = torch.nn.Linear(3, 3).cuda()
    with torch.inference_mode():
        linear.half()
    linear.float()
    assert linear.weight.dtype == torch.float32
    assert linear.cpu().weight.device.type == "cpu"


def test_both_classes_go_into_one_operator() -> None:
    weight, tensor = torch.nn.Parameter(torch.ones(4, 4, device="cuda")), torch.ones(4, 4, device="cuda")
    for one, other in ((weight, tensor), (tensor, weight), (weight, weight)):
        assert type(one * other) == torch.Tensor  # noqa: E721
    (weight * tensor).sum().backward()
    assert type(weight.grad) == torch.Tensor  # noqa: E721
    torch.optim.Adam([weight]).step()


def test_the_dictionary_is_the_programs() -> None:
    linear = torch.nn.Linear(3, 3).cuda()
    for tensor in (linear.weight, torch.zeros(3, device="cuda"), torch.arange(3, device="cuda") * 2):
        assert vars(tensor) == {}
        tensor.mine = 1  # type: ignore[attr-defined]
        seen = tensor.__dict__
        assert seen == {"mine": 1}
        seen["more"] = 2
        seen.update(third=3)
        assert (seen.setdefault("more", 5), seen.setdefault("fourth", 4), seen.pop("third"), seen.pop("none", 0)) == (
            2,
            4,
            3,
            0,
        )
        seen |= {"fifth": 5}
        assert vars(tensor) == {"mine": 1, "more": 2, "fourth": 4, "fifth": 5}
        assert tensor.more == 2  # type: ignore[attr-defined]
        assert type(copy.copy(seen)) is dict
        seen.clear()
        with pytest.raises(KeyError):
            seen.popitem()
        assert not hasattr(tensor, "mine")
        tensor.__dict__ = {"mine": 2}
        assert vars(tensor) == {"mine": 2}
        assert (tensor + 1).is_cuda


def test_a_table_of_values_follows_swapped_tensors() -> None:
    one, other = torch.tensor([1, 2], device="cuda"), torch.tensor([3, 4, 5], device="cuda")
    one.name_of_it = "one"  # type: ignore[attr-defined]
    torch.utils.swap_tensors(one, other)
    assert (one.tolist(), other.tolist()) == ([3, 4, 5], [1, 2])
    assert (vars(one), vars(other)) == ({}, {"name_of_it": "one"})


def test_a_device_tensor_is_swapped_with_one_on_the_host() -> None:
    one, other = torch.tensor([1, 2], device="cuda"), torch.tensor([3, 4, 5])
    torch.utils.swap_tensors(one, other)
    assert (one.device.type, other.device) == ("cpu", torch.device("cuda", 0))
    assert (one.tolist(), other.tolist()) == ([3, 4, 5], [1, 2])


def test_the_collector_shows_the_programs_tensors_once() -> None:
    linear = torch.nn.Linear(37, 41).cuda()
    numbers = torch.arange(43, device="cuda")
    host = torch.zeros(47)
    assert _seen_on_a_device((41, 37), (43,), (47,)) == [("Parameter", (41, 37)), ("Tensor", (43,)), ("Tensor", (47,))]
    del linear
    gc.collect()
    assert _seen_on_a_device((41, 37), (43,), (47,)) == [("Tensor", (43,)), ("Tensor", (47,))]
    assert all(any(one is it for it in gc.get_objects()) for one in (numbers, host))
    assert any(one is host for generation in range(3) for one in gc.get_objects(generation=generation))
