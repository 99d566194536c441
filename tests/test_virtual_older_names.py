"""Older and rarer ways to name types, devices, streams and NVIDIA's profilers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda.nvtx
import torch.cuda.profiler
from torch import nn
from torch_versions import TORCH

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


# ---- types


def test_a_default_type_on_cuda_is_a_default_device() -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(3).is_cuda
    assert nn.Linear(2, 2).weight.is_cuda
    torch.set_default_tensor_type(torch.cuda.DoubleTensor)
    assert (torch.rand(3).device.type, torch.rand(3).dtype) == ("cuda", torch.float64)
    torch.set_default_tensor_type("torch.FloatTensor")
    assert (torch.rand(3).device.type, torch.rand(3).dtype) == ("cpu", torch.float32)


def test_the_old_constructor_follows_the_default_type() -> None:
    before, new = torch.Tensor([1.0]), vars(torch.Tensor).get("__new__")
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    rays = torch.zeros(4, 6, device="cuda")
    ends = torch.Tensor([1e10]).expand(rays[..., :1].shape)
    assert torch.cat([rays, ends], -1).shape == (4, 7)
    assert [tuple(one.shape) for one in (torch.Tensor(2, 3), torch.Tensor(), torch.Tensor(torch.Size([4])))] == [
        (2, 3),
        (0,),
        (4,),
    ]
    assert not torch.LongTensor([1]).is_cuda
    assert nn.Parameter(torch.Tensor(2)).is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    after = torch.Tensor([1.0])
    assert (type(after), after.device, after.item()) == (type(before), before.device, before.item())
    assert vars(torch.Tensor).get("__new__") is new
    assert torch.Tensor(2, 3).shape == (2, 3)


@pytest.mark.parametrize(
    "name", ["FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "ByteTensor", "BoolTensor"]
)
def test_old_constructors_on_cuda_take_sizes_lists_and_arrays(name: str) -> None:
    kind = getattr(torch.cuda, name)
    made = [
        kind(),
        kind(2, 3),
        kind(torch.Size([4])),
        kind([1, 0]),
        kind((1, 0)),
        kind(np.ones((2, 3))),
    ]
    assert [tuple(one.shape) for one in made] == [(0,), (2, 3), (4,), (2,), (2,), (2, 3)]
    assert all(one.is_cuda and isinstance(one, kind) for one in made)
    like = made[0].new(np.ones((2, 2)))
    assert (like.shape, like.dtype, like.is_cuda) == ((2, 2), made[0].dtype, True)


@pytest.mark.filterwarnings("ignore:.*quant")
def test_quantised_tensors_are_refused_and_what_to_do_is_said() -> None:
    x, scale, zero = torch.rand(4, 4, device="cuda"), torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    for build in (
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(x, scale, zero, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(torch.rand(4, 4), 0.1, 0, torch.qint8).cuda(),
        lambda: torch._empty_affine_quantized([4, 4], scale=0.1, zero_point=0, dtype=torch.qint8, device="cuda"),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"cannot hold (what `[\w.]+` makes, )?a quantised tensor\. Use torchao's .* real GPU\.$",
        ):
            build()
    assert torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255).is_cuda


@pytest.mark.filterwarnings("ignore:.*(quant|TypedStorage)")
@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_layers_of_a_quantised_network_have_no_kernel_on_the_device(values: str) -> None:
    gpu.turn_on(f"T4,values={values}")
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    layers = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, torch.qint8)
    assert layers(torch.rand(2, 4)).shape == (2, 4)
    with pytest.raises(NotImplementedError, match=r"^Could not run 'quantized::linear_dynamic' with arguments"):
        layers(torch.rand(2, 4, device="cuda"))


@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_a_dlpack_capsule_has_the_tensors_memory(values: str) -> None:
    gpu.turn_on(f"T4,values={values}")
    x = torch.ones(300, device="cuda")
    before = torch.cuda.memory_allocated()
    for y in (torch.from_dlpack(x), torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))):
        assert y.data_ptr() == x.data_ptr()
        y[0] += 1
    assert torch.cuda.memory_allocated() == before
    if values == "real":
        assert x[0] == 3
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(x.requires_grad_())
    with pytest.raises(
        BufferError, match=r"no memory to share\. Hand the library a copy on the host \(tensor\.cpu\(\)\)"
    ):
        x.__dlpack__()
    # (PyTorch 2.9 asks NumPy for an array on the device, which refuses, also on a card.)
    moves = values == "real" and TORCH >= (2, 11)
    assert torch.from_dlpack(torch.ones(2).numpy(), device="cuda" if moves else "cpu").sum() == 2


def test_a_default_type_on_cuda_ends_with_the_device() -> None:
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    gpu.turn_off()
    assert torch.zeros(3).device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("convert", "device", "dtype"),
    [
        (lambda x: x.type(torch.cuda.FloatTensor), "cuda", torch.float32),
        (lambda x: x.type("torch.cuda.HalfTensor"), "cuda", torch.float16),
        (lambda x: x.cuda().type(torch.cuda.LongTensor), "cuda", torch.int64),
        (lambda x: x.cuda().type(torch.FloatTensor), "cpu", torch.float32),
        (lambda x: x.cuda().type("torch.DoubleTensor"), "cpu", torch.float64),
        (lambda x: x.cuda().type(torch.float16), "cuda", torch.float16),
        (lambda x: x.type(torch.float16), "cpu", torch.float16),
        (lambda x: x.cuda().new_tensor([1, 2]), "cuda", torch.float32),
        (lambda x: x.cuda().new_tensor([1, 2], dtype=torch.int64, device="cpu"), "cpu", torch.int64),
        (lambda x: x.cuda().half().new([1, 2]), "cuda", torch.float16),
        (lambda x: x.cuda().new(2, 3), "cuda", torch.float32),
    ],
)
def test_conversions_by_type(convert: Callable[[torch.Tensor], torch.Tensor], device: str, dtype: torch.dtype) -> None:
    converted = convert(torch.rand(3))
    assert (converted.device.type, converted.dtype) == (device, dtype)


def test_types_say_their_names() -> None:
    assert torch.rand(3).type() == "torch.FloatTensor"
    assert torch.rand(3, device="cuda").type() == "torch.cuda.FloatTensor"


# ---- streams and events of every kind of device


def test_streams_and_events_without_cuda_in_their_name() -> None:
    streams = [torch.Stream(), torch.Stream("cuda"), torch.Stream(device=torch.device("cuda", 0))]
    assert all(isinstance(stream, torch.Stream) and stream.device == torch.device("cuda", 0) for stream in streams)
    event = torch.Event("cuda", enable_timing=True)
    with streams[0]:
        assert torch.cuda.current_stream() == streams[0]
        x = torch.rand(3, device="cuda")
        event.record()
    x.record_stream(streams[1])
    streams[1].wait_event(event)
    streams[1].wait_stream(torch.cuda.default_stream())
    assert event.query()
    assert isinstance(torch.cuda.Stream(), torch.Stream)
    assert isinstance(torch.cuda.Event(), torch.Event)
    assert torch.Stream("cpu").device.type == "cpu"
    assert isinstance(torch.Stream("cpu"), torch.Stream)


# ---- NVIDIA's profilers, which see nothing


def test_ranges_of_nvtx_count_their_depth() -> None:
    assert [torch.cuda.nvtx.range_push(name) for name in "abc"] == [0, 1, 2]
    assert [torch.cuda.nvtx.range_pop() for _ in range(4)] == [2, 1, 0, -2]
    torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("there"))
    with torch.cuda.nvtx.range("step"), torch.autograd.profiler.emit_nvtx():
        torch.rand(3, device="cuda")


def test_nvidias_profilers_can_be_started() -> None:
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    with torch.cuda.profiler.profile():
        torch.rand(3, device="cuda")
    free, total = torch.cuda.cudart().cudaMemGetInfo(0)
    assert (free, total) == torch.cuda.mem_get_info()


def test_the_first_profiler_shows_the_hosts_times_and_says_so() -> None:
    layer = nn.Linear(3, 3).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.warns(UserWarning, match="the profiler's times are the host's"):
            profiler = torch.autograd.profiler.profile(use_cuda=True)
    with profiler:
        layer(torch.rand(2, 3, device="cuda"))
    assert "aten::linear" in {event.key for event in profiler.key_averages()}


@pytest.mark.filterwarnings("ignore")
def test_the_default_device_can_be_asked_for_afterwards() -> None:
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.get_default_device().type == "cuda"
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.get_default_device().type == "cpu"


def test_a_function_that_is_chosen_by_a_tensors_class_is_that_for_tensors() -> None:
    @functools.singledispatch
    def chosen(one: Any) -> str:
        return "object"

    chosen.register(torch.Tensor)(lambda one: "tensor")
    chosen.register(list)(lambda one: "list")
    layer = nn.LSTM(2, 3).cuda()
    for tensor in (
        torch.ones(2),
        torch.ones(2, device="cuda"),
        layer.weight_ih_l0,
        layer(torch.ones(1, 1, 2).cuda())[0],
    ):
        assert chosen(tensor) == "tensor"
    # (By whichever class it was asked first.)
    chosen._clear_cache()  # type: ignore[attr-defined]
    assert chosen(torch.ones(2, device="cuda")) == chosen(torch.ones(2)) == "tensor"
    assert chosen([]) == "list"
    # As programs compare them.
    assert type(torch.ones(2, device="cuda")) == torch.Tensor  # noqa: E721
    assert type(torch.ones(2, device="cuda")) in (list, torch.Tensor)


def test_a_tensors_class_is_found_in_tables_of_classes() -> None:
    class Mine(torch.Tensor):
        """A program's own."""

    tensor = torch.ones(2, device="cuda")
    own = tensor.as_subclass(Mine)
    table = {torch.Tensor: "tensor", Mine: "mine", list: "list"}
    assert [table[type(one)] for one in (tensor, own, torch.ones(2), [])] == ["tensor", "mine", "tensor", "list"]
    assert type(tensor) in {torch.Tensor, int}
    assert {type(tensor): 1} == {torch.Tensor: 1}
    assert len({type(tensor), torch.Tensor, type(own), Mine}) == 2
    assert type(own) not in {torch.Tensor}
