"""What examples in PyTorch's documentation met over a virtual GPU (`benchmarks/docstrings.py` runs them all)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project_scripts import load
from torch.overrides import TorchFunctionMode

from gpumem_magic.virtual import gpu

docstrings = load(Path(__file__).parents[1] / "benchmarks" / "docstrings.py")


@pytest.fixture(params=["T4", "T4,values=real"], autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    gpu.turn_on(request.param)
    try:
        yield
    finally:
        torch.set_default_device(None)
        gpu.turn_off()


def test_a_file_is_read_where_new_tensors_are_on_the_device() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.arange(3, device="cuda"), "y": torch.ones(2)}, file)
    torch.set_default_device("cuda")
    file.seek(0)
    read = torch.load(file)
    assert [(one.device.type, len(one)) for one in read.values()] == [("cuda", 3), ("cpu", 2)]
    storage = torch.ones(2, device="cpu").untyped_storage()
    assert storage.cuda().cpu().nbytes() == 8


@pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="this PyTorch has no redispatch_function"
)
def test_what_a_program_puts_over_functions_sees_its_own_calls_alone() -> None:
    seen = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", func))
            with self:
                return torch.overrides.redispatch_function(func, types, args, kwargs)

    def called(device: str) -> list[Any]:
        seen.clear()
        x = torch.ones(3, device=device)
        with Notes():
            x.mul(2).add(1)
        return list(seen)

    assert called("cuda") == called("cpu")


@pytest.mark.filterwarnings("ignore:torch.asarray")
def test_an_array_is_tracked_as_on_the_host() -> None:
    def asked(device: str) -> list[Any]:
        leaf = torch.ones(3, device=device, requires_grad=True)
        found: list[Any] = []
        for source in (leaf, leaf + 2):
            for given in ({}, {"requires_grad": False}, {"requires_grad": True}):
                for copy in (None, True, False):
                    made = torch.asarray(
                        source.detach().requires_grad_() if source.is_leaf else source, copy=copy, **given
                    )
                    found.append((made.requires_grad, made.is_leaf, made.data_ptr() == source.data_ptr()))
        return found

    assert asked("cuda") == asked("cpu")


def test_one_order_of_dimensions_is_refused_where_there_are_several() -> None:
    x = torch.empty((1, 2, 3, 4), device="cuda")
    assert x.dim_order() == (0, 1, 2, 3)
    assert x.dim_order(ambiguity_check=[torch.contiguous_format, torch.channels_last]) == (0, 1, 2, 3)
    with pytest.raises(RuntimeError, match="does not have unique dim order"):
        x.dim_order(ambiguity_check=True)


def test_operators_that_cuda_lacks_say_so() -> None:
    with pytest.raises(
        NotImplementedError, match="Could not run 'aten::_spdiags' with arguments from the 'CUDA' backend"
    ):
        torch.sparse.spdiags(torch.ones(3, 3, device="cuda"), torch.tensor([0, -1, -2], device="cuda"), (3, 3))
    with pytest.raises(NotImplementedError, match="\"dot\" not implemented for 'Long'"):
        torch.vdot(torch.tensor([2, 3], device="cuda"), torch.tensor([2, 1], device="cuda"))


def test_a_norm_of_one_kernel_is_called_so_in_the_graph() -> None:
    x = torch.ones(2, 3, device="cuda", requires_grad=True)
    assert type(torch.nn.functional.rms_norm(x, [3]).grad_fn).__name__ == "FusedRmsNormBackward0"


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_the_size_of_a_compressed_sparse_tensor_is_found_by_its_indices() -> None:
    ends, places = torch.tensor([0, 2, 4], device="cuda"), torch.tensor([0, 1, 0, 4], device="cuda")
    assert torch.sparse_csr_tensor(ends, places, torch.ones(4, 3, device="cuda")).shape == (2, 5, 3)
    assert torch.sparse_csc_tensor(
        values=torch.ones(4, device="cuda"), row_indices=places, ccol_indices=ends
    ).shape == (5, 2)
    blocks = torch.ones(4, 2, 3, device="cuda")
    assert torch.sparse_bsr_tensor(ends, places, blocks).shape == (4, 15)
    assert torch.sparse_compressed_tensor(ends, places, blocks, layout=torch.sparse_bsc).shape == (10, 6)


def test_examples_show_the_same_where_new_tensors_are_on_the_device() -> None:
    """A sample of what the command runs."""
    gpu.turn_off()
    gpu.turn_on("T4,values=real")
    found = dict(docstrings._docstrings())
    for name in (
        "torch.sort",
        "torch.nn.GRU",
        "torch.func.jvp",
        "torch.sparse_csr_tensor",
        "torch.serialization.skip_data",
    ):
        on_card, on_host = (docstrings._run(found[name], name, device) for device in ("cuda", "cpu"))
        assert on_card
        assert [*map(docstrings._without_device, on_card)] == [*map(docstrings._without_device, on_host)], name
