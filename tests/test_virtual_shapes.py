"""Operators without a shape rule of PyTorch's: the same shapes as on the host, or the largest that there can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_magic.virtual import gpu

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


def layouts(results: Any) -> list[Any]:
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return [(tensor.shape, tensor.dtype, tensor.stride() if tensor.numel() else None) for tensor in tensors]


SAME_AS_ON_THE_HOST: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "geqrf": (torch.geqrf, [torch.rand(2, 5, 3)]),
    "geqrf wide": (torch.geqrf, [torch.rand(3, 5)]),
    "dirichlet": (torch._sample_dirichlet, [torch.ones(4, 3)]),
    "binomial": (torch.binomial, [torch.ones(4), torch.full((4,), 0.5)]),
    "fake quantisation": (
        lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, -128, 127),
        [torch.rand(3, 4).t()],
    ),
    "fake quantisation by channel": (
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, -128, 127),
        [torch.rand(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int32)],
    ),
    "least squares": (lambda a, b: torch.linalg.lstsq(a, b, driver="gels").solution, [torch.rand(2, 5, 3), torch.rand(2, 5, 4)]),
    "least squares of a vector": (
        lambda a, b: torch.linalg.lstsq(a, b, driver="gels").solution,
        [torch.rand(5, 3), torch.rand(5)],
    ),
    "is_set_to": (lambda x: torch.full((), x.is_set_to(x.view(2, 2).view(4))), [torch.rand(4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_ON_THE_HOST)
def test_results_are_like_those_of_the_host(name: str) -> None:
    function, arguments = SAME_AS_ON_THE_HOST[name]
    expected = function(*arguments)
    found = function(*[argument.cuda() for argument in arguments])
    assert all(leaf.is_cuda for leaf in tree_leaves(found) if leaf.dim()), "on the device"
    assert layouts(found) == layouts(expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.multi_margin_loss(x, torch.zeros(2, dtype=torch.long, device=x.device)),
        lambda x: F.multilabel_margin_loss(x, torch.zeros(2, 4, dtype=torch.long, device=x.device)),
        lambda x: F.fractional_max_pool3d(x.view(1, 1, 2, 2, 2), 1, output_size=1).sum(),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum(),
        lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample().sum(),
        lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample().sum(),
        lambda x: x.index_fill(1, torch.tensor([0, 1], device=x.device), x.sum()).sum(),
        lambda x: torch.linalg.lstsq(torch.rand(4, 4, device=x.device), x.t()).solution.sum(),
    ],
)
def test_gradients_have_the_shape_of_what_they_belong_to(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(2, 4, device="cuda", requires_grad=True)
    loss(x).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert x.grad.is_cuda


def test_statistics_of_channels_for_batches_on_many_devices() -> None:
    x = torch.rand(8, 6, 4, 4, device="cuda", dtype=torch.float16)
    mean, inverse = torch.batch_norm_stats(x, 1e-5)
    assert [(part.shape, part.dtype) for part in (mean, inverse)] == [((6,), torch.float32)] * 2
    counts = torch.full((1,), 8.0, device="cuda")
    gathered = torch.batch_norm_gather_stats_with_counts(
        x, mean.view(1, -1), inverse.view(1, -1), mean, inverse, 0.1, 1e-5, counts
    )
    assert [part.shape for part in gathered] == [(6,), (6,)]
    out = torch.batch_norm_elemt(x, mean, mean, mean, inverse, 1e-5)
    assert (out.shape, out.dtype) == (x.shape, torch.float16)
    sums = torch.batch_norm_backward_reduce(out, x, mean, inverse, mean, True, True, False)
    assert [part.numel() for part in sums] == [6, 6, 6, 0]
    back = torch.batch_norm_backward_elemt(out, x, mean, inverse, mean, *sums[:2], counts.int())
    assert back.shape == x.shape


def test_dense_becomes_sparse_by_its_values_or_the_largest_size(machine: gpu.VirtualMachine) -> None:
    known = torch.tensor([[0, 3], [0, 0]], device="cuda").to_sparse()
    assert known._nnz() == 1
    assert not machine.notes()
    unknown = torch.rand(2, 3, 4, device="cuda").to_sparse(2)
    assert (unknown._nnz(), unknown.values().shape, unknown.indices().shape) == (6, (6, 4), (2, 6))
    assert "to_sparse (1)" in machine.notes()[0]


def test_weights_kept_orthogonal_begin_with_a_decomposition() -> None:
    for name in ("matrix_exp", "cayley", "householder"):
        layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 6).cuda(), orthogonal_map=name)
        layer(torch.rand(2, 4, device="cuda")).sum().backward()
        assert layer.weight.shape == (6, 4)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_fused_step_allocates_nothing_but_states(kind: Any, tensor: bool) -> None:
    layer = torch.nn.Linear(64, 64).cuda()
    rate = torch.tensor(1e-3, device="cuda") if tensor else 1e-3
    optimizer = kind(layer.parameters(), lr=rate, fused=True)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        pytest.skip("this PyTorch has no such kernel for CUDA")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 1024
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert all(tree_map(lambda value: value is None or value.is_cuda, states))
