"""A program's own function modes and dispatch modes see on a virtual GPU what they see on a device, and nothing of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_magic.virtual import gpu


class Functions(TorchFunctionMode):
    """Notes the functions that a program calls, with what it gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (No tensor is kept.)
        self.seen.append((func, (kwargs or {}).get("device")))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [getattr(func, "__name__", str(func)) for func, _ in self.seen]


class Operators(TorchDispatchMode):
    """Notes the operators, and the devices that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        self.seen.append((func.name().removeprefix("aten::"), "" if device is None else str(device)))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["T4", "T4,values=real"], autouse=True)
def card(request: pytest.FixtureRequest) -> Iterator[None]:
    gpu.turn_on(request.param)
    yield
    gpu.turn_off()


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(2, 3, device="cuda"),
    "empty": lambda: torch.empty((2,), device="cuda"),
    "rand": lambda: torch.rand(2, device="cuda"),
    "randperm": lambda: torch.randperm(5, device="cuda"),
    "arange": lambda: torch.arange(5, device="cuda"),
    "eye": lambda: torch.eye(3, device="cuda"),
    "full_like": lambda: torch.full_like(torch.Tensor([1.0]), 2.0, device="cuda"),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda", requires_grad=True),
    "as_tensor": lambda: torch.as_tensor([1, 2], device="cuda"),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), device="cuda"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_function_mode_sees_a_factory_once_and_by_its_public_name(name: str) -> None:
    with Functions() as mode:
        made = MAKERS[name]()
    assert mode.names == [name]
    assert mode.seen == [(getattr(torch, name), "cuda")]
    assert made.is_cuda


def test_each_mode_has_its_turn_and_the_last_word_is_the_upper_ones() -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2 if func is torch.ones else func(*args, **(kwargs or {}))

    with Functions() as lower, Doubled():
        made = torch.ones(2, device="cuda")
    assert lower.names[0] == "ones"
    assert made.is_cuda
    assert torch.cuda.memory_allocated() == 512


def test_a_mode_that_puts_a_device_into_factories_knows_them() -> None:
    class OnDevice(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in torch.utils._device._device_constructors() and kwargs.get("device") is None:
                kwargs["device"] = "cuda"
            return func(*args, **kwargs)

    with OnDevice():
        layer = torch.nn.Linear(4, 4)
        numbers = torch.tensor([1.0])
        elsewhere = torch.ones(1, device="cpu")
    assert layer.weight.is_cuda
    assert numbers.is_cuda
    assert elsewhere.is_cpu


METHODS: dict[str, tuple[list[str], Callable[[torch.Tensor], Any]]] = {
    "to": (["to"], lambda host: host.to("cuda")),
    "to a type": (["to"], lambda host: host.to("cuda", torch.half)),
    "new_zeros": (["new_zeros"], lambda host: host.new_zeros(3, device="cuda")),
    "new_tensor": (["new_tensor"], lambda host: host.new_tensor([1.0], device="cuda")),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_function_mode_sees_a_method_of_a_host_tensor_once(name: str) -> None:
    expected, call = METHODS[name]
    host = torch.ones(2)
    with Functions() as mode:
        made = call(host)
    assert mode.names == expected
    assert made.is_cuda


def test_of_a_module_that_moves_a_mode_sees_no_exchange_of_ours() -> None:
    layer = torch.nn.Linear(3, 4)
    with Functions() as mode:
        layer.to("cuda")
    assert layer.weight.is_cuda
    assert mode.names.count("to") == 2
    assert not {"detach", "requires_grad_", "untyped_storage", "device"} & set(mode.names)


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda tensor: tensor.tolist(),
    "__deepcopy__": copy.deepcopy,
    "__repr__": repr,
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "type": lambda tensor: tensor.type(),
    "__get__": lambda tensor: (tensor.device, tensor.is_cuda)[0],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_to_a_tensor_is_seen_and_answered(name: str) -> None:
    tensor = torch.ones(2, device="cuda")
    plainly = QUESTIONS[name](tensor)
    with Functions() as mode:
        answer = QUESTIONS[name](tensor)
    assert set(mode.names) == {name}
    assert str(answer) == str(plainly)


OPERATORS: dict[str, tuple[list[tuple[str, str]], Callable[[torch.Tensor], Any]]] = {
    "ones": ([("ones", "cuda:0")], lambda host: torch.ones(2, device="cuda")),
    "randperm": ([("randperm", "cuda:0")], lambda host: torch.randperm(5, device="cuda")),
    "to": ([("_to_copy", "cuda:0")], lambda host: host.to("cuda")),
    "to a type": ([("_to_copy", "cuda:0")], lambda host: host.to("cuda", torch.half)),
    "tensor": (
        [("lift_fresh", ""), ("_to_copy", "cuda:0")],
        lambda host: torch.tensor([1.0], device="cuda", requires_grad=True),
    ),
    "parameter": ([("empty.memory_format", "cuda:0")], lambda host: torch.nn.Parameter(torch.empty(2, device="cuda"))),
    "product": (
        [("ones", "cuda:0"), ("permute", ""), ("mm", "")],
        lambda host: (lambda one: one @ one.T)(torch.ones(2, 3, device="cuda")),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_dispatch_mode_sees_operators_on_the_device_they_are_for(name: str) -> None:
    expected, call = OPERATORS[name]
    host = torch.ones(2)
    with Operators() as lower, Operators() as upper:
        call(host)
    assert upper.seen == expected
    assert lower.seen == expected


def _train() -> float:
    torch.manual_seed(3)
    torch.cuda.reset_peak_memory_stats()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 4)
    )
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(256, 64, device="cuda")
    for _ in range(2):
        order = torch.randperm(256, device="cuda")
        loss = torch.nn.functional.cross_entropy(model(batch[order]), torch.zeros(256, device="cuda").long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_mode_changes_neither_values_nor_memory(mode: Any) -> None:
    _train()
    plain = _train(), torch.cuda.max_memory_allocated()
    with mode():
        watched = _train(), torch.cuda.max_memory_allocated()
    assert watched == plain


redispatch = getattr(torch.overrides, "redispatch_function", None)


class PassedOn(Functions):
    """Passes each call on, and goes on seeing what is called inside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, None))
        assert len(self.seen) < 50
        with self:
            return redispatch(func, types, args, kwargs or {})


class Told(torch.Tensor):
    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return redispatch(func, types, args, kwargs or {})


def _several(tensor: torch.Tensor) -> None:
    tensor.to(torch.float64)
    tensor.type_as(torch.ones(1, dtype=torch.float64))
    torch.ones_like(tensor)
    tensor.new_zeros(2)
    _ = tensor.device, tensor.data, tensor + 1


SEVERAL = ["to", "type_as", "ones_like", "new_zeros", "__get__", "__get__", "add"]


@pytest.mark.skipif(redispatch is None, reason="newer than this PyTorch")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mode_passes_calls_on(device: str) -> None:
    made = torch.zeros(3, device=device)
    with PassedOn() as mode:
        _several(made)
        torch.zeros(3, device=device)
    assert [name for name in mode.names if name != "ones"] == [*SEVERAL, "zeros"]


@pytest.mark.skipif(redispatch is None, reason="newer than this PyTorch")
def test_a_class_passes_calls_on() -> None:
    Told.seen = []
    _several(torch.zeros(3).as_subclass(Told))
    assert Told.seen == SEVERAL
