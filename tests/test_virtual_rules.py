"""Rules for kernels that PyTorch has no shape rule for, registered by their user."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import kernel_rules as rules

MIB = 1 << 20


@torch.library.custom_op("gpumem_test::squeeze_rows", mutates_args=())
def squeeze_rows(x: torch.Tensor, keep: int) -> torch.Tensor:
    # (In place of a compiled extension, which wants the tensor's memory.)
    return torch.from_numpy(x.numpy()[:keep].copy())


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rules, "rules_of_users", {})
    monkeypatch.setattr(rules, "_functions", {})
    gpu.turn_on("T4")
    yield
    gpu.turn_off()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library whose kernel is a Python function over a compiled extension."""
    module = types.ModuleType("fake_kernels")

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    module.fused = fused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    return module


def test_without_a_rule_the_error_says_which_operator_and_how_to_give_one() -> None:
    with pytest.raises(NotImplementedError) as caught:
        squeeze_rows(torch.zeros(4, 4, device="cuda"), 2)
    assert "gpumem_test.squeeze_rows" in str(caught.value)
    assert 'gpumem_magic.register_kernel("gpumem_test::squeeze_rows", rule)' in str(caught.value)


@pytest.mark.parametrize(
    "target", ["gpumem_test::squeeze_rows", "gpumem_test::squeeze_rows.default", squeeze_rows, torch.ops.gpumem_test.squeeze_rows,
               torch.ops.gpumem_test.squeeze_rows.default],
)  # fmt: skip
def test_a_rule_for_an_operator_says_what_it_returns_and_allocates(target: Any) -> None:
    @gpumem_magic.register_kernel(target)
    def rule(x: torch.Tensor, keep: int) -> torch.Tensor:
        scratch = torch.empty(4 * MIB, dtype=torch.uint8, device=x.device)
        del scratch
        return x.new_empty(keep, x.shape[1])

    x = torch.zeros(1024, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    out = squeeze_rows(x, 512)
    assert out.shape == (512, 256)
    assert out.is_cuda
    assert torch.cuda.memory_allocated() == int(1.5 * MIB)
    assert torch.cuda.max_memory_allocated() == 5 * MIB


def test_on_the_host_the_kernel_itself_runs() -> None:
    gpumem_magic.register_kernel("gpumem_test::squeeze_rows", lambda x, keep: x.new_empty(0))
    assert torch.equal(squeeze_rows(torch.ones(4, 4), 2), torch.ones(2, 4))


def test_a_rule_in_place_of_a_function(library: Any) -> None:
    original = library.fused
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        library.fused(torch.zeros(3, device="cuda"))
    gpumem_magic.register_kernel("fake_kernels.fused", lambda x: x * 2)
    x = torch.zeros(3, device="cuda", requires_grad=True)
    library.fused(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(library.fused(torch.ones(3)), torch.full((3,), 2.0))
    gpu.turn_off()
    assert library.fused is original
    gpu.turn_on("L4")
    assert library.fused(torch.zeros(3, device="cuda")).is_cuda


def test_a_second_rule_takes_the_place_of_the_first(library: Any) -> None:
    for size in (3, 5):
        gpumem_magic.register_kernel("fake_kernels.fused", lambda x, size=size: x.new_empty(size))
        gpumem_magic.register_kernel("gpumem_test::squeeze_rows", lambda x, keep, size=size: x.new_empty(size))
    x = torch.zeros(2, 2, device="cuda")
    assert library.fused(x).shape == (5,)
    assert squeeze_rows(x, 1).shape == (5,)


def test_out_of_memory_in_a_rule_is_that_of_the_kernel() -> None:
    gpumem_magic.register_kernel("gpumem_test::squeeze_rows", lambda x, keep: x.new_empty(1 << 40))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        squeeze_rows(torch.zeros(2, device="cuda"), 1)


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (3, TypeError, "expected an operator"),
        ("squeeze_rows", TypeError, "expected an operator"),
        ("fake_kernels.nothing", ImportError, "there is no nothing in fake_kernels"),
        ("no_such_library.fused", ImportError, "No module named"),
    ],
)
def test_what_is_no_target_is_refused(library: Any, target: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        gpumem_magic.register_kernel(target, lambda x: x)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="not Tensor"):
        gpumem_magic.register_kernel("a::b", torch.zeros(3))


def test_asking_for_the_package_imports_no_torch() -> None:
    code = "import gpumem_magic, sys; assert 'register_kernel' in dir(gpumem_magic); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
