"""`torch.export` of models on a virtual GPU: the trace is PyTorch's own, and what it makes runs on the device."""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.torch_face.saving import StandInsNotSaved

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    with warnings.catch_warnings():
        # PyTorch's own: advice about TF32, and what it says of its parts while they are imported.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


class Wide(nn.Module):
    """Per row of the input it makes 4 KiB three times, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 1024)
        self.register_buffer("scale", torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * self.scale).relu() + torch.ones(x.shape[0], 1, device=x.device)


def peak(program: object, x: torch.Tensor) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        program(x)  # type: ignore[operator]
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("strict", [False, True])
def test_what_was_exported_runs_on_the_device(strict: bool) -> None:
    model, x = Wide().cuda().eval(), torch.rand(1024, 1024, device="cuda")
    model(x)
    weights = torch.cuda.memory_allocated()
    sizes = ({0: torch.export.Dim("rows")},)
    exported = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)
    # A trace takes nothing, and the program that comes of it holds the model's own tensors.
    assert torch.cuda.memory_allocated() == weights
    devices = [
        node.meta["val"].device for node in exported.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    assert set(devices) == {torch.device("cuda", 0)}
    program = exported.module()
    # A graph lets go of what it needs no more: at the end there are two of the three, and the ones.
    assert peak(program, x) == 1024 * (2 * 4096 + 4)
    assert peak(program, x[:256]) == 256 * (2 * 4096 + 4)
    fast = torch.compile(program)
    peak(fast, x)
    assert peak(fast, x) == 4 * MIB


def test_what_was_exported_trains() -> None:
    model = Wide().cuda()
    exported = torch.export.export(model, (torch.rand(64, 1024, device="cuda"),))
    exported.module()(torch.rand(64, 1024, device="cuda")).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in model.parameters())


def test_a_file_of_it_holds_every_tensor_and_replaces_none_of_another_run(tmp_path: Path) -> None:
    path, x = tmp_path / "model.pt2", torch.rand(8, 1024, device="cuda")
    exported = torch.export.export(Wide().cuda().eval(), (x,))
    with pytest.warns(UserWarning, match=r"model\.pt2 contains zeros"):
        torch.export.save(exported, path)
    again = torch.export.load(path)
    assert {name: (value.shape, value.device) for name, value in again.state_dict.items()} == {
        name: (value.shape, value.device) for name, value in exported.state_dict.items()
    }
    assert not again.state_dict["scale"].requires_grad
    assert again.module()(x).is_cuda
    other = tmp_path / "other.pt2"
    gpu.turn_off()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.rand(2, 2),)), other)
    written = other.read_bytes()
    gpu.turn_on("A100-40GB")
    with pytest.raises(StandInsNotSaved, match=r"other\.pt2 exists"):
        torch.export.save(exported, other)
    assert other.read_bytes() == written


def test_values_that_are_computed_go_through_it(tmp_path: Path) -> None:
    gpu.turn_on("A100-40GB,values=real")
    model, x = Wide().cuda().eval(), torch.rand(8, 1024, device="cuda")
    for strict in (False, True):
        exported = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(exported.module()(x).cpu(), model(x).cpu())
    torch.export.save(exported, tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x).cpu(), model(x).cpu())


def test_what_needs_more_than_a_trace_is_refused_by_name() -> None:
    x = torch.rand(8, 1024, device="cuda")
    model = Wide().cuda().eval()
    exported = torch.export.export(model, (x,))
    with pytest.raises(NotImplementedError, match=r"AOTInductor cannot take a model on the virtual GPU"):
        torch._inductor.aot_compile(exported.module(), (x,))
    with pytest.raises(NotImplementedError, match=r"draft_export cannot take a model on the virtual GPU"):
        torch.export.draft_export(model, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.draft_export(nn.Linear(2, 2), (torch.rand(2, 2),))
        gc.collect()  # PyTorch's log of it is a file that nobody closes.


def test_onnx_through_torchscript_wants_the_weights() -> None:
    pytest.importorskip("torch.onnx._internal.torchscript_exporter.utils")
    with pytest.raises(
        NotImplementedError, match=r"torch\.onnx\.export cannot take .* before it is moved to the device"
    ):
        torch.onnx.export(nn.Linear(4, 3).cuda(), (torch.rand(2, 4, device="cuda"),), io.BytesIO(), dynamo=False)
