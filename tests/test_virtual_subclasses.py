"""Tensor classes of the program's own on the virtual GPU: plain subclasses, and classes that wrap tensors."""

from __future__ import annotations

import copy
import copyreg
import io
import operator
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from seen_operators import Seen
from torch.utils._pytree import tree_map

from gpumem_magic.virtual import gpu


class Plain(torch.Tensor):
    """A subclass that only has another name."""


class Labelled(torch.Tensor):
    """Hands a label on to what is made of it, as images with metadata do."""

    label: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Labelled):
            out.label = next(arg.label for arg in args if isinstance(arg, Labelled))
        return out


class Bag:
    """No tensor, and has a table of what functions of PyTorch's make of it, as dictionaries of tensors do."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TABLE[func](*args, **(kwargs or {})) if func in TABLE else NotImplemented


TABLE: dict[Any, Any] = {}


class Wrapped(torch.Tensor):
    """Holds another tensor, as quantised weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapped({self.inner!r})"

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def open_(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        out = func(*tree_map(open_, args), **tree_map(open_, kwargs or {}))
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, out)


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xT4")
    gpu.turn_off()


def test_a_plain_subclass_goes_to_the_device() -> None:
    moved = torch.zeros(3).as_subclass(Plain).cuda()
    assert moved.is_cuda
    assert (moved + 1).device == torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_made_of_a_subclass_is_of_its_class(device: str) -> None:
    made = torch.ones(3, device=device).as_subclass(Plain)
    assert isinstance(made, Plain)
    assert isinstance(made.exp(), Plain)
    assert isinstance(torch.stack([made, made]), Plain)
    assert all(isinstance(one, Plain) for one in made)
    made += 1
    assert isinstance(made, Plain)
    # There and back, and PyTorch's own class again.
    assert type(made.cpu()) is Plain
    assert isinstance(made.cpu().to(device), Plain)
    assert made.cpu().to(device).device.type == device
    plain = made.as_subclass(torch.Tensor)
    assert not isinstance(plain, Plain)
    assert not isinstance(plain + 1, Plain)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_subclass_with_a_word_of_its_own_has_it_on_the_device_too(device: str) -> None:
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    made = (weight * 2).as_subclass(Labelled)
    made.label = "first"
    product = (made + 1) @ weight
    assert product.label == "first"
    assert made[0].label == made.detach().cpu().label == made.detach().cpu().to(device).label == "first"
    assert torch.nn.Linear(2, 2, device=device)(made).label == "first"
    # Where it is already, too, and with another type.
    assert made.to(device).label == made.to(device, torch.float64).label == "first"
    assert made.to(device, torch.float64).device.type == device
    product.sum().backward()
    assert weight.grad is not None
    assert not isinstance(weight.grad, Labelled)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attributes_of_a_subclass_are_copied_with_all_that_they_hold(device: str) -> None:
    tensor = torch.ones(3, device=device).as_subclass(Labelled)
    tensor.label = "first"
    other = torch.zeros(2, device=device).as_subclass(Labelled)
    other.__dict__.update(copy.deepcopy(tensor.__dict__))
    assert (other + 1).label == "first"
    assert other.device == tensor.device
    assert other.shape == (2,)


def test_a_copy_on_the_host_given_a_device_tensors_class_stays_on_the_host() -> None:
    tensor = torch.ones(3, device="cuda")
    for kind in (type(tensor), type(tensor.as_subclass(Plain))):
        host = torch.full((3,), 2.0).as_subclass(kind)
        assert host.device == torch.device("cpu")
        assert host.tolist() == [2, 2, 2]
    assert type(torch.ones(3).as_subclass(type(tensor))) is torch.Tensor


@pytest.mark.parametrize("where", ["cuda:1", "cpu"])
def test_a_saved_tensor_of_a_class_comes_back_of_it_with_its_attributes(where: str) -> None:
    tensor = torch.ones(3, device="cuda").as_subclass(Labelled)
    tensor.label = "first"
    file = io.BytesIO()
    torch.save({"it": tensor, "view": tensor[1:]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where, weights_only=False)
    assert isinstance(loaded["it"], Labelled)
    assert loaded["it"].label == loaded["view"].label == "first"
    assert loaded["it"].device == torch.device(where)
    assert (loaded["it"] + 1).label == "first"
    assert loaded["it"].untyped_storage()._cdata == loaded["view"].untyped_storage()._cdata
    again = pickle.loads(pickle.dumps(tensor))
    assert isinstance(again, Labelled)
    assert (again.label, str(again.device)) == ("first", "cuda:0")


def test_classes_of_tensors_are_pickled_as_those_that_they_have_on_the_host() -> None:
    tensor = torch.ones(3, device="cuda")
    parameter = torch.nn.Parameter(tensor)
    for kind, wanted in (
        (type(tensor), torch.Tensor), (type(tensor.as_subclass(Plain)), Plain), (type(parameter), torch.nn.Parameter),
        (torch.Tensor, torch.Tensor), (torch.nn.Parameter, torch.nn.Parameter), (Plain, Plain),
    ):  # fmt: skip
        assert pickle.loads(pickle.dumps(kind)) is wanted
    gpu.turn_off()
    kinds = {type(tensor).__class__, type(parameter).__class__, type(torch.Tensor), type(torch.nn.Parameter)}
    assert not kinds & copyreg.dispatch_table.keys()


def test_types_of_tensors_equal_those_that_they_have_on_the_host() -> None:
    """As programs ask that compare types by ``==``, or look for them in a list."""
    tensor = torch.ones(3, device="cuda")
    own = tensor.as_subclass(Plain)

    class Further(type(own)):  # type: ignore[misc]
        """Of the program's, made of what a tensor is of."""

    for one, other, equal in (
        (type(tensor), torch.Tensor, True), (torch.Tensor, type(tensor), True), (type(own), Plain, True),
        (type(own), torch.Tensor, False), (type(tensor), Plain, False), (Further, Plain, False), (Further, type(own), False),
    ):  # fmt: skip
        assert operator.eq(one, other) is equal
    assert type(tensor) in (torch.Tensor, list)
    # (So they are one key of a table; a class that is made of one of them is another.)
    assert {torch.Tensor: 1, type(tensor): 2, Further: 3} == {torch.Tensor: 2, Further: 3}
    assert isinstance(own, type(own))
    assert isinstance(tensor, torch.Tensor)
    assert not isinstance(torch.ones(3), type(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_quantised_is_dequantised_as_on_the_host(dtype: torch.dtype) -> None:
    host = torch.ones(3, dtype=dtype).dequantize()
    made = torch.ones(3, device="cuda", dtype=dtype).dequantize()
    assert (made.dtype, made.device.type, made.shape) == (host.dtype, "cuda", host.shape)


def test_a_subclass_takes_no_memory_of_its_own() -> None:
    tensor = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    made = tensor.as_subclass(Plain)
    assert torch.cuda.memory_allocated() == before
    assert made.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_table_of_functions_knows_those_that_were_replaced(when: str) -> None:
    if when == "before":
        gpu.turn_off()
    TABLE.clear()
    TABLE[torch.zeros_like] = lambda bag, device=None: Bag(torch.zeros_like(bag.inner, device=device))
    if when == "before":
        gpu.turn_on("2xT4")
    bag = Bag(torch.ones(2, device="cuda:1"))
    found: Any = torch.zeros_like
    assert found(bag).inner.device == torch.device("cuda", 1)
    assert found(bag, device="cuda").inner.device == torch.device("cuda", 0)
    assert found(bag, device="cpu").inner.device == torch.device("cpu")
    with pytest.raises(TypeError, match="ones_like"):
        torch.ones_like(bag)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="zeros_like"):
        torch.zeros_like(3)  # type: ignore[call-overload]


def test_a_tensors_class_is_pytorchs_by_its_name() -> None:
    # Libraries that know arrays of many kinds (opt_einsum, autoray) look the module up.
    kind = type(torch.ones(2, device="cuda"))
    assert (kind.__module__, kind.__name__) == ("torch", "Tensor")


def test_a_wrapper_goes_to_the_device_and_its_inside_is_what_costs() -> None:
    wrapped = Wrapped(torch.zeros(1024, 256)).to("cuda:1")
    assert type(wrapped) is Wrapped
    assert (wrapped.device, wrapped.is_cuda, wrapped.is_meta, wrapped.is_cpu) == (
        torch.device("cuda:1"),
        True,
        False,
        False,
    )
    assert wrapped.get_device() == 1
    assert torch.cuda.memory_allocated(1) == 1 << 20
    assert not torch.cuda.memory_allocated(0)
    del wrapped
    assert not torch.cuda.memory_allocated(1)


def test_a_layer_goes_to_the_device_with_a_wrapped_weight_and_a_plain_bias() -> None:
    layer = torch.nn.Linear(4, 3)
    layer.weight = torch.nn.Parameter(Wrapped(layer.weight.detach()), requires_grad=False)
    weight, bias = layer.weight, layer.bias
    layer.cuda()
    assert layer.weight is weight
    assert layer.bias is bias
    assert isinstance(weight, Wrapped)
    assert weight.inner.is_cuda
    assert bias.is_cuda
    assert layer(torch.ones(2, 4, device="cuda")).shape == (2, 3)
    layer.cpu()
    assert not weight.inner.is_cuda
    assert not bias.is_cuda


def test_operators_with_wrappers_go_through_their_class() -> None:
    wrapped = Wrapped(torch.zeros(4, 4)).cuda()
    other = torch.zeros(4, 4, device="cuda")
    for result in (wrapped + 1, wrapped @ wrapped, wrapped + other, other + wrapped, torch.cat([other, wrapped])):
        assert type(result) is Wrapped
        assert result.inner.is_cuda
    back = wrapped.cpu()
    assert (type(back), back.device.type, type(back.inner)) == (Wrapped, "cpu", torch.Tensor)


def test_gradients_flow_past_a_wrapped_weight() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(Wrapped(torch.zeros(4, 4)), requires_grad=False)
    layer.cuda()
    assert layer.weight.is_cuda
    x = torch.zeros(2, 4, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.device == x.device


def test_wrappers_on_the_host_and_on_meta_are_left_alone() -> None:
    wrapped = Wrapped(torch.zeros(2, 2)).cuda()
    assert Wrapped(torch.zeros(2, 2)).device.type == "cpu"
    meta = Wrapped(torch.zeros(2, 2, device="meta"))
    assert meta.is_meta
    assert not meta.is_cuda
    gpu.turn_off()
    assert "device" not in vars(Wrapped)
    assert Wrapped(torch.ones(2, 2)).sum().inner == 4
    del wrapped


def test_pytorchs_masked_tensors() -> None:
    masked = pytest.importorskip("torch.masked").masked_tensor
    mask = torch.ones(3, dtype=torch.bool, device="cuda")
    with pytest.warns(UserWarning, match="prototype"):
        made = masked(torch.zeros(3, device="cuda"), mask)
    assert made.get_data().is_cuda


class Scaled(torch.nn.Parameter):
    """A parameter with something beside it, made with its class as quantised layers make theirs."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float = 1.0) -> Any:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made

    def rescaled(self) -> torch.Tensor:
        return self * self.scale


def test_a_parameter_class_made_of_a_tensor_on_the_device() -> None:
    data = torch.zeros(512, 512, device="cuda")
    before = torch.cuda.memory_allocated()
    made = Scaled(data, 2.0)
    assert torch.cuda.memory_allocated() == before
    assert isinstance(made, Scaled)
    assert isinstance(made, torch.nn.Parameter)
    assert (made.is_cuda, made.scale, made.data_ptr()) == (True, 2.0, data.data_ptr())
    assert made.rescaled().device == data.device
    layer = torch.nn.Linear(512, 512, bias=False)
    layer.weight = made
    x = torch.zeros(2, 512, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert isinstance(Scaled(torch.ones(2)), Scaled)
    del made, data, layer, x
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("values", ["", ",values=real", ",values=auto"])
def test_a_dictionary_that_is_handed_on_leaves_a_tensor_where_it_is(values: str) -> None:
    """As classes with metadata do it, by assignment: from the host to the device, between two there, and back."""
    gpu.turn_on(f"T4{values}")

    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(found, Told) and isinstance(args[0], Told):
                found.__dict__ = args[0].__dict__.copy()
            return found

    host: Any = torch.arange(3.0).as_subclass(Told)
    host.told = "first"
    moved = host.to("cuda")
    later = (moved + 1) * 2
    back = later.cpu()
    again = back.cuda()
    assert [one.told for one in (moved, later, back, again)] == ["first"] * 4
    assert [one.device.type for one in (moved, later, back, again)] == ["cuda", "cuda", "cpu", "cuda"]
    assert type(later) == Told  # noqa: E721
    assert torch.nn.functional.linear(later[None], torch.ones(2, 3, device="cuda")).shape == (1, 2)
    if values:
        assert (back.tolist(), again.tolist()) == ([2.0, 4.0, 6.0], [2.0, 4.0, 6.0])


def test_a_classs_own_ways_of_making_tensors_are_the_programs_and_no_shape_rules() -> None:
    class Made(torch.Tensor):
        def new_empty(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a shape rule called it")

        new_zeros = new_full = new_empty

    x: Any = torch.ones(1, 1, 8, 8, device="cuda").as_subclass(Made)
    layer = torch.nn.Conv2d(1, 2, 3).cuda()
    found = layer(x)
    assert (type(found) == Made, found.shape, found.is_cuda) == (True, (1, 2, 6, 6), True)  # noqa: E721
    found.sum().backward()
    assert layer.weight.grad is not None
    assert type(x) == Made  # noqa: E721
    with pytest.raises(AssertionError, match="a shape rule called it"):
        x.new_empty(3)


def test_results_are_of_a_classs_kind_on_whichever_side_a_parameter_is() -> None:
    one: Any = torch.ones(2, 2, device="cuda").as_subclass(Plain)
    weight = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
    for found in (one * weight, weight * one, torch.nn.functional.linear(one, weight), torch.cat([weight, one])):
        assert type(found) == Plain  # noqa: E721


@pytest.mark.parametrize("other", ["cuda", "cpu"])
def test_a_parameter_made_on_the_default_device_can_be_swapped(other: str) -> None:
    with torch.device("cuda"):
        kept = torch.nn.Parameter(torch.rand(3))
    given = torch.nn.Parameter(torch.rand(2, 2, device=other))
    torch.utils.swap_tensors(kept, given)
    assert kept.shape == (2, 2)
    assert given.shape == (3,)
    assert (kept.device.type, given.device.type) == (other, "cuda")


def test_a_mode_of_the_programs_notes_the_same_operators_as_on_the_host() -> None:
    noted = []
    for device in ("cpu", "cuda"):
        layer = torch.nn.Linear(4, 3, device=device)
        data = torch.ones(2, 4, device=device)
        with Seen() as mode:
            layer(data).relu().sum().backward()
        noted.append(mode.seen)
    assert noted[0] == noted[1]


class Noted(torch.Tensor):
    """Made of a tensor by its own class, with something beside it."""

    note: str

    def __new__(cls: Any, tensor: torch.Tensor, note: str = "") -> Any:
        made = super().__new__(cls, tensor)
        made.note = note
        return made


class Dispatching(torch.Tensor):
    """Holds the tensor that it is made of, and says itself what operators do with it."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    seen: ClassVar[list[str]] = []

    def __new__(cls: Any, tensor: torch.Tensor) -> Any:
        made = super().__new__(cls, tensor)
        made.inner = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        inner = tree_map(lambda one: one.inner if isinstance(one, cls) else one, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, out)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_class_makes_one_of_a_tensor(device: str) -> None:
    data = torch.ones(256, device=device, requires_grad=True)
    before = torch.cuda.memory_allocated()
    made: Any = Noted(data, "a note")
    assert torch.cuda.memory_allocated() == before
    assert (type(made).__name__, made.note, made.device.type) == ("Noted", "a note", device)
    assert made.data_ptr() == data.data_ptr()
    assert isinstance(made * 2, Noted)
    # As `alias`, which autograd knows.
    (made * 3).sum().backward()
    assert data.grad is not None
    assert data.grad.shape == data.shape
    assert isinstance(type(made)(data), Noted)
    assert isinstance(Plain(data.detach()), Plain)
    assert not isinstance(torch.Tensor(data.detach()), Noted)
    gpu.turn_off()
    assert "__new__" not in vars(torch.Tensor)
    assert type(Noted(torch.ones(2), "on the host")) is Noted


def test_a_class_that_dispatches_is_asked_what_operators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: str) -> tuple[list[str], str, torch.Size]:
        monkeypatch.setattr(Dispatching, "seen", [])
        data = torch.ones(4, 6, device=device).t()
        made: Any = Dispatching(data)
        assert (made.device.type, made.stride(), made.dtype) == (device, (1, 6), torch.float32)
        out = (made @ made.t()).relu().sum(0)
        assert type(out) is Dispatching
        return Dispatching.seen, out.inner.device.type, out.shape

    assert run("cuda") == (run("cpu")[0], "cuda", torch.Size([6]))


def test_a_class_is_not_asked_before_it_is_made() -> None:
    """`_make_subclass` calls no function: the object's own attributes come after it."""

    class Told(torch.Tensor):
        source: torch.Tensor

        def __new__(cls: Any, source: torch.Tensor) -> Any:
            return cls._make_subclass(cls, source, True)

        def __init__(self, source: torch.Tensor) -> None:
            self.source = source

        @classmethod
        def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = tree_map(lambda one: one.source if isinstance(one, cls) else one, (args, kwargs or {}))
            return func(*args, **kwargs)

    data = torch.ones(3, device="cuda")
    made: Any = Told(data)
    assert (made + 1).is_cuda
    assert isinstance(made, Told)
