"""Older and rarer ways to name types, devices, streams, modules of TorchScript and NVIDIA's profilers."""

from __future__ import annotations

import functools
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

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
            NotImplementedError, match=r"cannot hold a quantised tensor\. Use integer tensors with a scale"
        ):
            build()
    assert torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255).is_cuda


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


# ---- TorchScript


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.rand(2, 3))])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_move_with_their_parameters(make: Any) -> None:
    module = make(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).cuda()
    assert all(tensor.is_cuda for tensor in [*module.parameters(), *module.buffers()])
    module(torch.rand(2, 3, device="cuda")).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert module.cpu()(torch.rand(2, 3)).device.type == "cpu"


def with_a_device(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return torch.ones(3, device=x.device if device is None else device)


# As where annotations are no strings, read before any device is turned on.
with_a_device.__annotations__["device"] = Optional[torch.device]  # noqa: UP045
with_a_device.__annotations__.update(dict.fromkeys(("x", "return"), torch.Tensor))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_may_take_a_device_or_none() -> None:
    scripted = torch.jit.script(with_a_device)
    x = torch.rand(3, device="cuda")
    assert scripted(x).device == x.device
    assert scripted(x, x.device).device == x.device


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_outlives_its_module() -> None:
    """Python collects the module in a circle; C++ goes on holding its parameters."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).cuda()
    module.circle = [module]
    traced = torch.jit.trace(module, torch.rand(2, 3, device="cuda"))
    del module
    gc.collect()
    assert [parameter.device for parameter in traced.parameters()] == [torch.device("cuda", 0)] * 2
    traced(torch.rand(2, 3, device="cuda")).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in traced.parameters())
    assert traced.cpu()(torch.rand(2, 3)).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_has_numbers_that_are_constants() -> None:
    """TorchScript reads each of them, as a tensor on the host."""
    traced = torch.jit.trace(lambda x: (x * 2.5 + 1) / 3, torch.rand(2, 3, device="cuda"))
    found = traced(torch.full((2, 3), 2.0, device="cuda"))
    assert found.is_cuda
    assert found.tolist() == [[2.0] * 3] * 2


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_make_tensors_where_their_arguments_are() -> None:
    def made(x: torch.Tensor, n: int):  # type: ignore[no-untyped-def]
        beside = torch.full([n, 3], 1.0, device=x.device) + torch.zeros([n, 3], device=torch.device("cuda", 0))
        return x + beside

    script, x = torch.jit.script(made), torch.rand(2, 3, device="cuda")
    assert script(x, 2).is_cuda
    assert script(x, n=2).is_cuda
    traced = torch.jit.trace(lambda x: x + torch.ones(3, device=x.device), x)
    assert traced(x).is_cuda


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_loaded_to_the_device() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(3, 4)), file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location="cuda")
    assert loaded(torch.rand(2, 3, device="cuda")).is_cuda
    file.seek(0)
    assert torch.jit.load(file)(torch.rand(2, 3)).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_saved_from_the_device(tmp_path: Path) -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
    path = tmp_path / "script.pt"
    with pytest.warns(UserWarning, match="no values for tensors on a virtual GPU"):
        script.save(path)
    for place, expected in ((None, "cuda"), ("cpu", "cpu"), ("cuda", "cuda")):
        loaded = torch.jit.load(path, map_location=place)
        assert {tensor.device.type for tensor in (*loaded.parameters(), *loaded.buffers())} == {expected}
        assert loaded(torch.rand(2, 3, device=expected)).device.type == expected
    (tmp_path / "trained.pt").write_bytes(b"a model that was trained for a week")
    traced = torch.jit.trace(nn.Linear(3, 4).cuda(), torch.rand(2, 3, device="cuda"), check_trace=False)
    for model in (script, traced):
        with pytest.raises(RuntimeError, match="left as it is"):
            torch.jit.save(model, str(tmp_path / "trained.pt"))
    assert (tmp_path / "trained.pt").read_bytes() == b"a model that was trained for a week"


@pytest.mark.parametrize("values", ["real", "stand-in"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_convolutions_are_traced(values: str) -> None:
    """A trace keeps what `convolution` calls in C++."""
    gpu.turn_off()
    gpu.turn_on(f"T4,values={values}")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(98, 2)).cuda()
    x = torch.rand(2, 3, 8, 8, device="cuda")
    model(x).sum().backward()  # and cuBLAS takes its workspaces
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    traced = torch.jit.trace(model, x, check_trace=False)
    assert [node.kind() for node in traced.inlined_graph.nodes()].count("aten::_convolution") == 2
    assert traced(x).tolist() == model(x).tolist()
    traced(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    del traced
    gc.collect()
    assert torch.cuda.memory_allocated() == before


class Drawing(nn.Module):
    """It draws numbers, makes some, and asks for sizes, as normalizing flows do."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        numbers = pictures.to(torch.float32)
        sums = torch.zeros(pictures.shape[0], device=pictures.device)
        numbers = numbers + torch.rand_like(numbers).detach()
        return sums + numbers.view(numbers.size(0), -1).log().sum(dim=1)


@pytest.mark.parametrize("values", ["real", "auto", "stand-in"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_has_what_the_program_asks_for_and_nothing_else(values: str) -> None:
    """What the virtual device asks for is not written down, and nobody is warned of it."""
    gpu.turn_off()
    on_host = torch.jit.trace(Drawing(), torch.ones(2, 3, 4, dtype=torch.int64), check_trace=False)
    gpu.turn_on(f"T4,values={values}")
    x = torch.randint(0, 9, (2, 3, 4), device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(Drawing().cuda(), x, check_trace=False)
    # (What is made on the device is named once more, by `detach`.)
    apart = {"prim::Constant", "aten::detach"}
    found, expected = (
        [node.kind() for node in one.inlined_graph.nodes() if node.kind() not in apart] for one in (traced, on_host)
    )
    assert found == expected
    assert traced(x).shape == (2,)
    assert torch._C._get_tracing_state() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_stays_where_the_error_of_its_trace_is_kept() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(self.layer(x).shape)

    model = Failing().cuda()
    with pytest.raises(ValueError, match="2, 4") as kept:
        torch.jit.trace(model, torch.rand(2, 3, device="cuda"))
    with pytest.raises(RuntimeError, match=r"the error that ended it is kept.*let go of the error"):
        model.cpu()
    del kept
    gc.collect()
    assert not next(model.cpu().parameters()).is_cuda


@pytest.mark.parametrize("way", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_saved_with_values_that_are_real(tmp_path: Path, way: str) -> None:
    gpu.turn_off()
    gpu.turn_on("2xT4,values=real")
    layer = nn.Linear(3, 4).to("cuda:1")
    script = torch.jit.script(layer) if way == "script" else torch.jit.trace(layer, torch.rand(2, 3, device="cuda:1"))
    path, buffer = tmp_path / "script.pt", io.BytesIO()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        script.save(path)
    assert [str(one.message) for one in said if ".grad" in str(one.message)] == []
    torch.jit.save(script, buffer, _extra_files={"words": "some"})
    for place, expected in ((None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0")):
        buffer.seek(0)
        words = {"words": ""}
        for loaded in (torch.jit.load(path, map_location=place), torch.jit.load(buffer, place, words)):
            assert {str(parameter.device) for parameter in loaded.parameters()} == {expected}
            assert loaded.weight.tolist() == layer.weight.tolist()
            assert loaded.weight.requires_grad
        assert words == {"words": b"some"}
    assert script.weight.device.index == 1


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
