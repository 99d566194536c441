"""Sparse tensors on the virtual GPU: what they hold, what operators with them return and cost, gradients of embeddings."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.virtual import gpu

PLACES = torch.tensor([[0, 1, 2], [1, 0, 2]])


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


def matrix(device: str) -> torch.Tensor:
    return torch.sparse_coo_tensor(PLACES, torch.rand(3), (3, 3), check_invariants=False).coalesce().to(device)


def described(result: torch.Tensor) -> Any:
    if result.layout is torch.sparse_coo:
        return tuple(result.shape), result.dtype, result._nnz(), result.sparse_dim(), result._values().shape
    return tuple(result.shape), result.dtype


EXACT: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, x: torch.sparse.mm(a, x),
    lambda a, x: torch.spmm(a, x),
    lambda a, x: a @ x,
    lambda a, x: a.t() @ x,
    lambda a, x: x.t() @ a,
    lambda a, x: a @ x[:, 0],
    lambda a, x: torch.sparse.addmm(x, a, x),
    lambda a, x: a * 2,
    lambda a, x: a / 2,
    lambda a, x: a.neg(),
    lambda a, x: a.pow(2).sqrt().abs(),
    lambda a, x: a.transpose(0, 1),
    lambda a, x: a.T,
    lambda a, x: a.clone(),
    lambda a, x: a.half(),
    lambda a, x: a.to(torch.float64),
    lambda a, x: a.coalesce(),
    lambda a, x: a.detach(),
    lambda a, x: torch.cat([a, a], 1),
    lambda a, x: torch.stack([a, a]),
    lambda a, x: torch.bmm(torch.stack([a, a]), torch.stack([x, x])),
    lambda a, x: torch.sparse.softmax(a, 1),
    lambda a, x: torch.sparse.sum(a),
    lambda a, x: torch.sparse.sum(a, 0),
    lambda a, x: (x @ x.t()).sparse_mask(a),
    lambda a, x: a.to_dense(),
    lambda a, x: a.norm(),
    lambda a, x: a.cpu(),
    lambda a, x: torch.zeros_like(a),
]


@pytest.mark.parametrize("operation", EXACT)
def test_results_have_as_many_elements_as_on_the_host(operation: Callable[..., torch.Tensor]) -> None:
    x = torch.rand(3, 4, requires_grad=True)
    expected = operation(matrix("cpu"), x)
    y = x.detach().cuda().requires_grad_()
    found = operation(matrix("cuda"), y)
    assert described(found) == described(expected)
    if expected.requires_grad and expected.layout is torch.strided:
        found.sum().backward()
        assert y.grad is not None
        assert y.grad.shape == y.shape


def test_two_of_them_have_all_elements_one_behind_the_other() -> None:
    total = matrix("cuda") + matrix("cuda")
    assert (total._nnz(), total.is_coalesced()) == (6, False)
    with pytest.raises(RuntimeError, match="Cannot get indices on an uncoalesced tensor"):
        total.indices()
    assert total.coalesce().indices().shape == (2, 6), "as many as there can be"


def test_a_product_of_matrices_may_fill_every_place(machine: gpu.VirtualMachine) -> None:
    assert (matrix("cuda") @ matrix("cuda"))._nnz() == 9
    assert "product of sparse matrices (1)" in machine.notes()[0]


def test_memory_is_that_of_the_elements() -> None:
    places = torch.zeros(2, 1 << 16, dtype=torch.long)
    before = torch.cuda.memory_allocated()
    a = torch.sparse_coo_tensor(places, torch.rand(1 << 16), (1000, 1000), check_invariants=False).cuda()
    held = 2 * 8 * (1 << 16) + 4 * (1 << 16)
    assert torch.cuda.memory_allocated() - before == held
    b = a.clone()
    assert torch.cuda.memory_allocated() - before == 2 * held
    torch.cuda.reset_peak_memory_stats()
    c = b.coalesce()
    assert torch.cuda.memory_allocated() - before == 3 * held
    assert torch.cuda.max_memory_allocated() - before == 3 * held + 3 * 8 * (1 << 16), "three lists beside it"
    del a, b, c
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SparseAdam(weights),
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        lambda weights: torch.optim.Adagrad(weights),
    ],
)
def test_gradients_of_embeddings_hold_a_row_for_each_index(make: Callable[..., torch.optim.Optimizer]) -> None:
    table = torch.nn.Embedding(1 << 16, 128, sparse=True).cuda()
    words = torch.randint(0, 1 << 16, (64, 32), device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        table(words).sum().backward()
    rows = 2 * 64 * 32
    grad = table.weight.grad
    assert grad is not None
    assert (grad.layout, grad._nnz(), grad._values().shape) == (torch.sparse_coo, rows, (rows, 128))
    # The dense gradient would be 32 MiB.
    assert torch.cuda.memory_allocated() - before == rows * (128 * 4 + 8)
    make(list(table.parameters())).step()
    table.zero_grad()


def test_the_report_counts_a_sparse_gradient_as_a_gradient() -> None:
    table = torch.nn.Embedding(1 << 14, 128, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    words = torch.randint(0, 1 << 14, (64, 32), device="cuda")
    with gpumem_magic.measure() as measured:
        table(words).sum().backward()
        optimizer.step()
    categories = measured.report.to_dict()["checkpoints"][-1]["categories"]
    assert categories["gradients"] == 64 * 32 * (128 * 4 + 8)
    assert not any("failed" in note for note in measured.report.to_dict()["notes"])


def test_a_graph_network_trains() -> None:
    adjacency = matrix("cuda")
    features, labels = torch.rand(3, 8, device="cuda"), torch.tensor([0, 1, 0], device="cuda")
    first, second = torch.nn.Linear(8, 16).cuda(), torch.nn.Linear(16, 2).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    for _ in range(2):
        hidden = torch.spmm(adjacency, first(features)).relu()
        torch.nn.functional.cross_entropy(torch.sparse.mm(adjacency, second(hidden)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_of_edges_have_gradients() -> None:
    weights = torch.rand(3, device="cuda", requires_grad=True)
    a = torch.sparse_coo_tensor(PLACES.cuda(), weights, (3, 3), check_invariants=False)
    torch.sparse.mm(a, torch.rand(3, 4, device="cuda")).sum().backward()
    assert weights.grad is not None
    assert weights.grad.shape == (3,)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (lambda: torch.eye(3).to_sparse_csr().cuda(), "cannot hold a tensor with layout torch.sparse_csr. Use dense"),
        (lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], device="cuda"), "cannot hold a compressed sparse tensor"),
        (lambda: torch.eye(3, device="cuda").to_sparse_csr(), "layout torch.sparse_csr. Use dense"),
        (lambda: torch.eye(4, device="cuda").to_sparse_bsr((2, 2)), "layout torch.sparse_bsr. Use dense"),
        (lambda: matrix("cuda").to_sparse_csc(), "layout torch.sparse_csc. Use dense"),
        (
            lambda: torch.sparse_csr_tensor(
                *(torch.tensor(one, device="cuda") for one in ([0, 1], [0], [1.0])), (1, 1)
            ),
            "layout torch.sparse_csr. Use dense",
        ),
        (lambda: matrix("cuda").cumsum(0), "virtual GPU cannot run aten.cumsum"),
        (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]).cuda(), "cannot hold a nested tensor"),
        (lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8).cuda(), "cannot hold a quantised"),
    ],
)
def test_what_there_is_no_rule_for_is_refused_in_one_line(operation: Callable[[], Any], text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=text) as error:
            operation()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", ["real", "auto"])
def test_compressed_tensors_are_refused_with_values_too(values: str) -> None:
    gpu.turn_on(f"T4,values={values}")
    for dense in (torch.eye(3).cuda(), matrix("cuda")):
        with pytest.raises(NotImplementedError, match=r"cannot hold a tensor with layout torch\.sparse_csr"):
            dense.to_sparse_csr()


def test_shapes_and_devices_are_checked() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.rand(3, 4, device="cuda").sparse_mask(matrix("cuda"))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x3 and 4x3\)"):
        matrix("cuda") @ torch.rand(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        matrix("cuda") @ torch.rand(3, 3)
