"""Parameters of a program's own class have it on a device, as `Module._apply` and `Parameter.__new__` keep it on a card."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("T4")
    yield
    gpu.turn_off()


class Named(torch.nn.Parameter):
    """With a constructor of its own, and something to say."""

    def __new__(cls, data: Any = None, requires_grad: bool = True, *, name: str = "") -> Any:
        made: Any = super().__new__(cls, data, requires_grad)
        made.told = name
        return made

    def twice(self) -> torch.Tensor:
        return self * 2


class Bare(torch.nn.Parameter):
    """Nothing but another class."""


class Module(torch.nn.Module):
    def __init__(self, kind: Any = Named, size: int = 4) -> None:
        super().__init__()
        self.weight = kind(torch.ones(size, size))
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_a_parameter_that_moves_keeps_its_class_and_what_it_holds() -> None:
    module = Module()
    weight: Any = module.weight
    weight.told = "first"
    module.cuda()
    assert module.weight is weight
    assert type(weight).__name__ == "Named"
    assert isinstance(weight, Named)
    assert weight.is_cuda
    assert weight.told == "first"
    # (What is no class of the program's stays PyTorch's.)
    assert not isinstance(module.bias, Named)
    module(torch.ones(2, 4, device="cuda")).sum().backward()
    assert weight.grad is not None
    assert not isinstance(weight.twice(), torch.nn.Parameter)
    module.cpu()
    assert type(weight) is Named
    assert weight.told == "first"
    assert module.cuda().half().weight is weight
    assert isinstance(weight, Named)


@pytest.mark.parametrize("kind", [Named, Bare])
def test_a_parameter_that_is_made_on_the_device_has_its_class(kind: Any) -> None:
    made = kind(torch.ones(3, device="cuda"), requires_grad=False)
    assert isinstance(made, kind)
    assert made.is_cuda
    assert not made.requires_grad
    assert repr(made).startswith("Parameter containing:\ntensor([1., 1., 1.]")
    copied = copy.deepcopy(made)
    assert isinstance(copied, kind)
    assert copied.data_ptr() != made.data_ptr()
    module = torch.nn.Module()
    module.weight = made
    assert dict(module.named_parameters()) == {"weight": made}


def test_it_is_saved_and_read_again() -> None:
    module = Module().cuda()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = Module()
    again.load_state_dict(torch.load(file, map_location="cpu"))
    assert type(again.weight) is Named
    assert again.weight.tolist() == torch.ones(4, 4).tolist()
    assert pickle.loads(pickle.dumps(module.weight)).is_cuda


def _step_takes(kind: Any, **options: Any) -> int:
    """What a step of Adam takes above what was there, in the second one, whose states are made."""
    module = torch.nn.ParameterList([kind(torch.ones(1 << 20)) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(module.parameters(), **options)
    for _ in range(2):
        sum((one * 1).sum() for one in module).backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    return torch.cuda.max_memory_allocated() - before


def test_optimizers_take_such_parameters_one_by_one() -> None:
    # `_default_to_fused_or_foreach` (torch/optim/optimizer.py) asks for the very types `Tensor` and `Parameter`.
    alone = _step_takes(torch.nn.Parameter, foreach=False)
    assert _step_takes(Bare) == alone
    assert _step_takes(torch.nn.Parameter) > alone


@pytest.mark.parametrize("where", ["named", "default", "moved"])
def test_a_lazy_module_has_its_weights_where_they_were_to_be(where: str) -> None:
    if where == "named":
        layers = [torch.nn.LazyConv2d(3, 3, device="cuda"), torch.nn.LazyBatchNorm2d(device="cuda")]
    elif where == "default":
        with torch.device("cuda"):
            layers = [torch.nn.LazyConv2d(3, 3), torch.nn.LazyBatchNorm2d()]
    else:
        layers = [torch.nn.LazyConv2d(3, 3).cuda(), torch.nn.LazyBatchNorm2d().cuda()]
    weight = layers[0].weight
    model = torch.nn.Sequential(*layers)
    # (PyTorch itself copies no buffer without a size.)
    twin = torch.nn.Sequential(copy.deepcopy(layers[0]), torch.nn.BatchNorm2d(3, device="cuda"))
    before = torch.cuda.memory_allocated()
    for made in (model, twin):
        made(torch.ones(2, 2, 8, 8, device="cuda")).sum().backward()
        assert {tensor.device.type for tensor in made.state_dict().values()} == {"cuda"}
        assert {one.grad is not None for one in made.parameters()} == {True}
    assert model[0].weight is weight
    assert torch.cuda.memory_allocated() > before
    assert torch.nn.LazyLinear(3, device="cpu")(torch.ones(1, 2)).device.type == "cpu"


def test_a_lazy_module_is_where_it_was_put_before_it_has_a_size() -> None:
    layer = torch.nn.LazyLinear(3).to("cuda").half()
    assert (layer.weight.device, layer.weight.is_cuda) == (torch.device("cuda:0"), True)
    assert next(layer.parameters()).device == layer.bias.device
    assert layer(torch.ones(1, 2, device="cuda", dtype=torch.float16)).device.type == "cuda"
    back = torch.nn.LazyLinear(3, device="cuda").cpu()
    assert (back.weight.device.type, back.weight.is_cuda) == ("cpu", False)
    assert back(torch.ones(1, 2)).device.type == "cpu"


@pytest.mark.parametrize(
    "moves",
    [
        lambda layer: layer.to(torch.float16),
        lambda layer: layer.to(torch.float16).cuda(),
        lambda layer: layer.cuda().to(torch.float16),
        lambda layer: layer.to("cuda", torch.float16),
        lambda layer: layer.cuda().half().cpu(),
    ],
)
def test_a_lazy_module_has_the_type_that_it_was_given(moves: Any) -> None:
    layer = moves(torch.nn.LazyLinear(3))
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float16, torch.float16)
    layer(torch.ones(2, 4, device=layer.weight.device, dtype=torch.float16))
    assert (layer.weight.dtype, tuple(layer.weight.shape)) == (torch.float16, (3, 4))


class Listed(torch.Tensor):
    """Keeps its class after what it lists."""

    listed: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs or {})
        return found.as_subclass(cls) if func in cls.listed else found


@pytest.mark.parametrize("kind", [set, list, dict.fromkeys])
@pytest.mark.parametrize("when", ["before", "earlier", "now"])
def test_a_class_that_lists_functions_knows_them(kind: Any, when: str) -> None:
    to = torch.Tensor.to
    if when != "now":
        gpu.turn_off()
        to = torch.Tensor.to if when == "before" else to
    Listed.listed = kind([torch.Tensor.clone, to])
    said = vars(Listed)["__torch_function__"]
    gpu.turn_off()
    gpu.turn_on("T4")
    if when == "now":
        Listed.listed = kind([torch.Tensor.clone, torch.Tensor.to])
    made = torch.ones(3).as_subclass(Listed).to("cuda")
    assert (type(made).__name__, made.device.type) == ("Listed", "cuda")
    assert isinstance(made.to(torch.float64), Listed)
    assert not isinstance(made + 1, Listed)
    gpu.turn_off()
    assert vars(Listed)["__torch_function__"].__func__.__code__ is said.__func__.__code__ or when == "now"


class Wrong(torch.Tensor):
    """Fails."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError(func.__name__)


def test_an_error_of_such_a_class_is_its_own() -> None:
    made = torch.ones(3).as_subclass(Wrong)
    with pytest.raises(LookupError, match="to") as caught:
        made.to("cuda")
    # (The outermost is that of what stands for `Tensor.to`.)
    names = [Path(str(entry.path)).name for entry in caught.traceback]
    assert "known_functions.py" not in names
    assert names[0] == names[-1] == Path(__file__).name
