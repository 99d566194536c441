"""TorchScript on a virtual device: what was compiled, traced, loaded and saved."""

from __future__ import annotations

import gc
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from causes_cells import notebook
from torch import nn

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.torch_face import scripts

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript")


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.rand(2, 3))])
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


def test_a_script_may_take_a_device_or_none() -> None:
    scripted = torch.jit.script(with_a_device)
    x = torch.rand(3, device="cuda")
    assert scripted(x).device == x.device
    assert scripted(x, x.device).device == x.device


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


def test_a_trace_has_numbers_that_are_constants() -> None:
    """TorchScript reads each of them, as a tensor on the host."""
    traced = torch.jit.trace(lambda x: (x * 2.5 + 1) / 3, torch.rand(2, 3, device="cuda"))
    found = traced(torch.full((2, 3), 2.0, device="cuda"))
    assert found.is_cuda
    assert found.tolist() == [[2.0] * 3] * 2


def test_compiled_functions_make_tensors_where_their_arguments_are() -> None:
    def made(x: torch.Tensor, n: int):  # type: ignore[no-untyped-def]
        beside = torch.full([n, 3], 1.0, device=x.device) + torch.zeros([n, 3], device=torch.device("cuda", 0))
        return x + beside

    script, x = torch.jit.script(made), torch.rand(2, 3, device="cuda")
    assert script(x, 2).is_cuda
    assert script(x, n=2).is_cuda
    traced = torch.jit.trace(lambda x: x + torch.ones(3, device=x.device), x)
    assert traced(x).is_cuda


def test_compiled_modules_are_loaded_to_the_device() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(3, 4)), file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location="cuda")
    assert loaded(torch.rand(2, 3, device="cuda")).is_cuda
    file.seek(0)
    assert torch.jit.load(file)(torch.rand(2, 3)).device.type == "cpu"


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


def test_a_compiled_module_whose_values_are_saved_takes_nothing_on_the_device() -> None:
    gpu.turn_off()
    machine = gpu.turn_on("T4,values=real")
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
    script[0].bias.requires_grad_(False)
    log, buffer = machine.devices[0].start_log(), io.BytesIO()
    torch.jit.save(script, buffer)
    assert log.events == []
    log.stop()
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert [(one.is_cuda, one.requires_grad) for one in loaded.parameters()] == [(True, one != 1) for one in range(4)]
    assert [one.tolist() for one in loaded.parameters()] == [one.tolist() for one in script.parameters()]


@pytest.mark.parametrize("way", ["script", "trace"])
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


# ---- where a graph puts things, and asks where they lie


def moved_there(host: torch.Tensor, there: torch.Tensor):  # type: ignore[no-untyped-def]
    return [
        host.cuda(),
        host.to("cuda"),
        host.to(there.device),
        host.to("cuda", torch.float16),
        host.to(device="cuda", dtype=torch.float64, non_blocking=True),
        host.to("cuda:0", copy=True),
        host.to(there),
        host.type_as(there),
        there.to(host.device),
        there.to(host),
        there.type_as(host),
        host if host.is_cuda else host.cuda(),
        there.new_zeros([2], device="cpu"),
        torch.empty_like(there, device="cpu").zero_(),
        torch.cat([there, host.cuda()]),
    ]


def made_there(host: torch.Tensor, there: torch.Tensor):  # type: ignore[no-untyped-def]
    return [
        torch.tensor([1.0, 2.0], device="cuda"),
        torch.tensor([[1, 2], [3, 4]], device="cuda"),
        torch.tensor(3, device=there.device),
        torch.tensor(2.5, device=there.device, dtype=torch.float64),
        torch.tensor(True, device=there.device),
        torch.tensor([1.0, 2.0], device="cuda", requires_grad=True),
        torch.tensor([1.0, 2.0], device=host.device, requires_grad=True),
        torch.as_tensor([1, 2], device="cuda"),
        torch.zeros(3, device="cuda", dtype=torch.float16),
        torch.arange(3, device=there.device),
        torch.where(there > 1, there, torch.tensor(0.0, device=there.device)),
    ]


def asked_where(host: torch.Tensor, there: torch.Tensor):  # type: ignore[no-untyped-def]
    where = [there.is_cuda, host.is_cuda, there.is_cpu, host.is_cpu, there.is_meta, there.device.type == "cuda"]
    same = [there.device == torch.device("cuda:0"), there.device == torch.device("cuda")]
    return where, same, there.device, host.device, there.get_device(), there.device.index, there.device.type


def in_a_fork(host: torch.Tensor, there: torch.Tensor):  # type: ignore[no-untyped-def]
    later = torch.jit.fork(torch.relu, host.cuda())
    return [torch.jit.wait(later)]


def _described(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return [_described(one) for one in found]
    if not isinstance(found, torch.Tensor):
        return str(found)
    return str(found.device), found.dtype, found.shape, found.requires_grad, found.tolist()


@pytest.mark.parametrize("within", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [moved_there, made_there, asked_where, in_a_fork])
@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_a_script_does_what_the_function_does(values: str, function: Any, within: Any) -> None:
    gpu.turn_off()
    gpu.turn_on(f"T4,values={values}")
    host, there = torch.ones(4, 3), torch.full((4, 3), 2.0, device="cuda")
    expected = _described(function(host, there))
    scripted = torch.jit.script(function)
    # (From the second and third call on, another executor runs it.)
    for _ in range(3):
        with within():
            assert _described(scripted(host, there)) == expected


class Moves(nn.Module):
    """It takes its input to the device itself, and the text for which it was made stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = torch.ones(3)
        if x.is_cuda:
            return self.layer(x)
        return self.layer(x.to("cuda")) + beside.to(self.layer.weight.device)


def test_a_scripted_module_may_move_what_it_is_given() -> None:
    scripted = torch.jit.script(Moves()).cuda()
    before = str(scripted.graph), torch.cuda.memory_allocated()
    for _ in range(3):
        out = scripted(torch.ones(2, 3))
        assert out.is_cuda
        out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in scripted.parameters())
    scripted.zero_grad()
    del out
    assert str(scripted.graph) == before[0]
    frozen = torch.jit.freeze(scripted.eval())
    assert frozen(torch.ones(2, 3)).is_cuda
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    assert torch.jit.load(file)(torch.ones(2, 3)).is_cuda


def test_a_script_that_goes_takes_its_tensors_with_it() -> None:
    nn.Linear(3, 3).cuda()(torch.ones(2, 3, device="cuda"))  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    scripted = torch.jit.script(Moves()).cuda()
    scripted(torch.ones(2, 3))
    assert torch.cuda.memory_allocated() > before
    del scripted
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_what_a_script_asks_for_does_not_fit() -> None:
    @torch.jit.script
    def grow(x: torch.Tensor):  # type: ignore[no-untyped-def]
        return (
            x.expand(1 << 20, 1 << 20).contiguous().to("cuda")
            if x.is_cuda
            else x.cuda().expand(1 << 17, 1 << 17).clone()
        )

    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        grow(torch.ones(1))


def within_autocast(x: torch.Tensor):  # type: ignore[no-untyped-def]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = x @ x
        soft = torch.softmax(product, 1)
    return product, soft, x @ x


def without_autocast(x: torch.Tensor):  # type: ignore[no-untyped-def]
    return x @ x, torch.softmax(x @ x, 1)


def test_a_script_casts_as_autocast_says() -> None:
    x = torch.ones(4, 4, device="cuda")
    inside, plain = torch.jit.script(within_autocast), torch.jit.script(without_autocast)
    for _ in range(3):
        assert [one.dtype for one in inside(x)] == [torch.bfloat16, torch.float32, torch.float32]
        with torch.autocast("cuda"):
            assert [one.dtype for one in plain(x)] == [torch.float16, torch.float32]
        assert [one.dtype for one in plain(x)] == [torch.float32, torch.float32]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert [one.dtype for one in plain(x)] == [torch.bfloat16, torch.float32]


class Makes(nn.Module):
    """It makes tensors where its input lies, as models make positions and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = torch.zeros(4, device=x.device)
        beside = torch.ones(4)
        return self.layer(x) + positions.to(x.dtype) + mask + beside.to(x.device) + beside.cuda().type_as(x)


@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_a_trace_is_the_same_again_and_names_the_card(values: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"T4,values={values}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(Makes().cuda(), torch.ones(2, 4, device="cuda"))
    graph = traced.inlined_graph
    constants = {str(node.output().toIValue()) for node in graph.findAllNodes("prim::Constant")}
    assert {"cpu", "cuda:0"} <= constants
    assert not constants & {"meta", "meta:0"}
    assert traced(torch.ones(3, 4, device="cuda")).is_cuda
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(traced, file)
    file.seek(0)
    assert torch.jit.load(file)(torch.ones(3, 4, device="cuda")).is_cuda


def test_a_script_that_cannot_be_copied_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any) -> None:
        raise RuntimeError("no such pass")

    monkeypatch.setattr(scripts, "_prepare", fail)
    scripted, x = torch.jit.script(without_autocast), torch.ones(2, 2, device="cuda")
    with pytest.warns(UserWarning, match="`without_autocast` runs in TorchScript as it is.*no such pass"):
        assert scripted(x)[0].is_cuda
    assert scripted(x)[0].is_cuda


def test_after_the_device_a_script_fails_as_it_does_without_one() -> None:
    scripted = torch.jit.script(asked_where)
    scripted(torch.ones(1), torch.ones(1, device="cuda"))
    gpu.turn_off()
    assert _described(scripted(torch.ones(1), torch.ones(1))) == _described(asked_where(torch.ones(1), torch.ones(1)))


def length(x: torch.Tensor):  # type: ignore[no-untyped-def]
    return torch.tensor([x.size()[0]])


def test_a_trace_has_a_script_as_the_program_wrote_it() -> None:
    scripted = torch.jit.script(length)
    for place in ("cpu", "cuda"):
        traced = torch.jit.trace(lambda x: scripted(x) + 1, torch.ones(7, device=place))
        assert traced(torch.ones(5, device=place)).tolist() == [6]
        assert "gpumem_magic_script" not in str(traced.inlined_graph)


def test_a_recording_adds_nothing_to_a_trace() -> None:
    """It looks at a module's input and result while C++ writes down what is asked of them."""
    gpu.turn_off()
    cell = (
        "x = torch.ones(2, 4, device='cuda')\ntext = str(torch.jit.trace(Makes().cuda(), x, check_trace=False).graph)\n"
    )
    with notebook("T4") as book:
        book.shell.user_ns["Makes"] = Makes
        book.cell(cell)
        plain = _unmangled(book.shell.user_ns["text"])
        said = book.cell("%%gpumem -q\n" + cell)
        assert _unmangled(book.shell.user_ns["text"]) == plain
        assert "TracerWarning" not in said


def _unmangled(graph: str) -> str:
    """Without the numbers by which TorchScript tells modules of one class apart."""
    return re.sub(r"___torch_mangle_\d+\.", "", graph)
