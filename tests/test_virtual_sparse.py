"""Sparse tensors on the virtual GPU: what they hold, what operators with them return and cost, gradients of embeddings."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from asked_for import events, made

import gpumem_magic
from gpumem_magic.virtual import gpu

# PyTorch says it once in a process: whichever test is the first would fail.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

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


FORMS: list[dict[str, Any]] = [
    {"layout": torch.sparse_csr},
    {"layout": torch.sparse_csc},
    {"layout": torch.sparse_bsr, "blocksize": (1, 3)},
    {"layout": torch.sparse_bsc, "blocksize": (3, 1)},
]
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
    lambda a, x: torch.zeros_like(a).copy_(a),
    lambda a, x: a.sum(1),
    lambda a, x: a.sum((0, 1)),
    lambda a, x: torch.sum(a, 1, keepdim=True),
    lambda a, x: a.asinh().frac(),
    lambda a, x: a.nan_to_num(),
    lambda a, x: a.signbit(),
    *(lambda a, x, form=form: a.to_sparse(**form) for form in FORMS[:2]),
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


@pytest.mark.parametrize("values", ["", ",values=real", ",values=auto"])
@pytest.mark.parametrize("operation", EXACT)
def test_inference_mode_hands_over_whole_what_others_are_for(
    operation: Callable[..., torch.Tensor], values: str
) -> None:
    """`a @ x` and `a.cpu()` came as one operator, for which there is no rule; or their parts had no values."""
    gpu.turn_on(f"T4{values}")
    x = torch.arange(12.0).reshape(3, 4)
    with torch.inference_mode():
        host = matrix("cpu")
        expected, found = operation(host, x), operation(host.cuda(), x.cuda())
        assert described(found) == described(expected)
        if "real" in values:
            torch.testing.assert_close(found.to_dense().cpu(), expected.to_dense())


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
        (lambda: matrix("cuda").cumsum(0), "virtual GPU cannot run `aten.cumsum"),
        (lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8).cuda(), "cannot hold a quantised"),
    ],
)
def test_what_there_is_no_rule_for_is_refused_in_one_line(operation: Callable[[], Any], text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=text) as error:
            operation()
    assert "\n" not in str(error.value)


def test_shapes_and_devices_are_checked() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.rand(3, 4, device="cuda").sparse_mask(matrix("cuda"))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x3 and 4x3\)"):
        matrix("cuda") @ torch.rand(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        matrix("cuda") @ torch.rand(3, 3)


# ---- in compressed form


def by_rows(device: str) -> torch.Tensor:
    """[[0, 1, 2], [0, 0, 0], [3, 0, 0], [0, 0, 4]]: where each row begins, which columns, which numbers."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return torch.sparse_csr_tensor([0, 2, 2, 3, 4], [1, 2, 0, 2], numbers, (4, 3), device=device)


def looks(result: torch.Tensor) -> Any:
    if result.layout is torch.strided:
        return tuple(result.shape), result.dtype
    return result.layout, tuple(result.shape), result.dtype, result._nnz()


OF_ROWS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, x: a @ x,
    lambda a, x: a @ x[:, 0],
    lambda a, x: torch.sparse.mm(a, x),
    lambda a, x: torch.addmm(torch.ones(4, 2, device=x.device), a, x),
    lambda a, x: a.t() @ torch.ones(4, 2, device=x.device),
    lambda a, x: torch.ones(2, 4, device=x.device) @ a,
    lambda a, x: torch.nn.functional.linear(x.t(), a),
    lambda a, x: a.to_sparse_csc() @ x,
    lambda a, x: torch.eye(4, device=x.device).to_sparse_bsr((2, 2)) @ a.to_dense(),
    lambda a, x: torch.sparse.sampled_addmm(a, torch.ones(4, 2, device=x.device), x.t()),
    lambda a, x: a * 2,
    lambda a, x: a * a,
    lambda a, x: -a,
    lambda a, x: a.sin(),
    lambda a, x: a.sum(),
    lambda a, x: a.t(),
    lambda a, x: a.transpose(0, 1),
    lambda a, x: a.clone(),
    lambda a, x: a.double(),
    lambda a, x: a.cpu(),
    lambda a, x: a.to_dense(),
    lambda a, x: a.to_sparse(),
    lambda a, x: a.to_sparse().to_sparse_csr(),
    lambda a, x: a.to_sparse_csc(),
    lambda a, x: torch.zeros_like(a),
    lambda a, x: torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), a.values(), a.shape),
    lambda a, x: torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), [5.0, 6, 7, 8], a.shape, device=x.device),
    lambda a, x: torch.ones(4, 3, device=x.device).sparse_mask(a),
    lambda a, x: torch.ones_like(a),
    lambda a, x: a.asinh().frac(),
    lambda a, x: a.isposinf(),
    lambda a, x: a.angle(),
    *(
        lambda a, x, form=form: torch.tensor([[1.0, 0, 2], [0, 0, 3], [0, 0, 0]]).to(x.device).to_sparse(**form)
        for form in FORMS
    ),
]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("values", ["", ",values=real", ",values=auto"])
@pytest.mark.parametrize("operation", OF_ROWS)
def test_compressed_matrices_are_as_on_the_host(
    operation: Callable[..., torch.Tensor], values: str, mode: Callable[[], Any]
) -> None:
    gpu.turn_on(f"T4{values}")
    x = torch.arange(6.0).reshape(3, 2)
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("ignore")
        expected, found = operation(by_rows("cpu"), x), operation(by_rows("cuda"), x.cuda())
        assert looks(found) == looks(expected)
        if "real" in values:
            assert torch.equal(found.to_dense().cpu(), expected.to_dense())


@pytest.mark.parametrize(
    ("operation", "most"),
    [
        # All that there can be: as many as both have, and as the result has places.
        (lambda a: a + a, 8),
        (lambda a: a @ a.to_dense().t().to_sparse_csr(), 16),
        (lambda a: a.to_dense().to_sparse_csr(), 12),
        (lambda a: a.to_dense().to_sparse_bsc((2, 3)), 2),
    ],
)
def test_how_many_elements_a_result_has_depends_on_values(operation: Callable[..., torch.Tensor], most: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert operation(by_rows("cuda"))._nnz() == most
        gpu.turn_on("T4,values=real")
        assert operation(by_rows("cuda"))._nnz() == operation(by_rows("cpu"))._nnz()


def test_a_compressed_matrix_has_three_tensors() -> None:
    before = torch.cuda.memory_allocated()
    a = torch.sparse_csr_tensor(torch.arange(1001), torch.arange(1000), torch.ones(1000), (1000, 1000), device="cuda")
    # 1,001 and 1,000 numbers of 64 bits, 1,000 of 32, each rounded to 512 bytes.
    assert torch.cuda.memory_allocated() - before == 8192 + 8192 + 4096
    # The matrix by columns is the same memory by other names; numbers of other types have copies of the indices.
    turned = a.t()
    assert torch.cuda.memory_allocated() - before == 20480
    doubled = a.double()
    assert torch.cuda.memory_allocated() - before == 20480 + 8192 * 3
    del a, turned, doubled
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_what_a_compressed_matrix_gives_gradients_to() -> None:
    for device in ("cpu", "cuda"):
        a, x = by_rows(device), torch.ones(3, 2, device=device, requires_grad=True)
        weights = a.values().clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), weights, a.shape) @ x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (3, 2)
        assert weights.grad is not None
        assert weights.grad.shape == (4,)


def test_blocks_have_their_indices_in_32_bits_while_they_multiply() -> None:
    a = torch.eye(4096).to_sparse_bsr((64, 64)).cuda()
    x = torch.ones(4096, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    product = a @ x
    # The result, and 65 and 64 numbers, each rounded to 512 bytes.
    assert torch.cuda.max_memory_allocated() - before == 16384 + 512 + 512
    del product


def test_a_coordinate_tensor_of_lists_is_on_the_device() -> None:
    made = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device="cuda", requires_grad=True)
    assert (made.device.type, made._nnz(), made.requires_grad) == ("cuda", 2, True)
    assert torch.sparse_coo_tensor((2, 3), device="cuda").is_cuda


def test_a_compressed_matrix_without_a_rule_is_refused_in_one_line() -> None:
    with pytest.raises(NotImplementedError, match=r"virtual GPU cannot run `aten\.cumsum"):
        by_rows("cuda").cumsum(0)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(4x3 and 4x2\)"):
        by_rows("cuda") @ torch.ones(4, 2, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        by_rows("cuda") @ torch.ones(3, 2)


def taken_in_backward(hook: Callable[[torch.Tensor], None] | None = None) -> list[int]:
    """What a backward pass into the rows of a table asks for. 10 rows of 16 numbers, 640 bytes; their places, 80."""
    table = torch.nn.Embedding(100, 16, sparse=True, device="cuda")
    if hook is not None:
        table.weight.register_hook(hook)
    rows = table(torch.arange(10, device="cuda")) * torch.ones((), device="cuda")
    gradient = torch.ones(10, 16, device="cuda")
    return made(lambda: rows.backward(gradient))


def test_a_leaf_keeps_a_sparse_gradient_as_it_comes() -> None:
    # accumulate_grad.h: new_grad is sparse, its parts lie plainly, and only the engine holds it. The rows are the product's own
    # gradient, the places the indices that the table was asked with: nothing is copied.
    assert taken_in_backward() == [640]


def test_a_leaf_copies_a_sparse_gradient_that_somebody_holds() -> None:
    # Its values first: of the arguments of `copy_into_sparse` (SparseTensor.cpp) the last is made first.
    kept: list[torch.Tensor] = []
    assert taken_in_backward(kept.append) == [640, 640, 80]


def test_a_leaf_copies_rows_that_do_not_lie_plainly() -> None:
    # The gradient of a sum is one number, expanded.
    table = torch.nn.Embedding(100, 16, sparse=True, device="cuda")
    rows = table(torch.arange(10, device="cuda")).sum()
    assert made(rows.backward) == [4, 640, 80]


def test_a_product_with_a_dense_matrix_sorts_the_elements_first_where_they_are_not() -> None:
    # s_addmm_out_sparse_dense_cuda, as a real H100 was asked for (PyTorch 2.11): zeros to add to, and the result; where the
    # elements are not sorted, `coalesce`, whose values and places come last; rows in compressed form, both in 32 bits,
    # the result by columns.
    scattered = torch.sparse_coo_tensor(torch.randint(0, 50, (2, 200)), torch.ones(200), (50, 50)).cuda()
    dense = torch.ones(50, 16, device="cuda")
    inside = [4 * 51, 4 * 200, 4 * 200, 3200]
    asked = made(lambda: torch.sparse.mm(scattered, dense))
    assert asked[:5] == [3200, 3200, 1600, 1600, 1600]
    assert asked[-6:] == [4 * 200, 2 * 8 * 200, *inside]
    ordered = torch.sparse_coo_tensor(torch.arange(50).repeat(2, 1), torch.ones(50), (50, 50)).coalesce().cuda()
    assert made(lambda: torch.sparse.mm(ordered, dense)) == [3200, 3200, 4 * 51, 4 * 50, 4 * 50, 3200]


def test_a_compressed_tensor_brings_its_values_first() -> None:
    rows = torch.eye(8).to_sparse_csr()
    # Eight elements, where the rows begin, the columns.
    assert made(lambda: rows.to("cuda")) == [8 * 4, 9 * 8, 8 * 8]


# A number of a place has eight bytes, a value four.
HALF_FULL = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]])


def half_full() -> torch.Tensor:
    return HALF_FULL.float().cuda()


def test_a_transposed_tensor_is_a_clone_whose_places_change_by_way_of_a_third_list() -> None:
    a = half_full().to_sparse()
    assert made(lambda: a.t()) == [4 * 4, 4 * 2 * 8, 4 * 8]


def test_of_a_compressed_matrix_with_other_values_the_places_come_last_first() -> None:
    a = half_full().to_sparse_csr()
    assert made(lambda: a.neg()) == [4 * 4, 4 * 8, (3 + 1) * 8]


def test_a_dense_matrix_is_looked_through_twice_where_it_is_compressed() -> None:
    a = half_full()
    # What is there, counted and listed by rows and columns, which stays; where each row begins; the same in one line; values.
    counted, listed = 4, made(lambda: a.ne(0).nonzero())[-1]
    by_rows = made(lambda: a.to_sparse_csr())
    mask, in_rows, in_line = 12, 4 * 2 * 8, 4 * 8
    assert by_rows == [
        mask, counted, 1, in_rows, listed, (3 + 1) * 8, counted, 1, in_line, listed, 4 * 4,
    ]  # fmt: skip
    # By columns the mask and the matrix are turned first.
    by_columns = made(lambda: a.to_sparse_csc())
    assert by_columns == [
        mask, mask, counted, 1, in_rows, listed, (4 + 1) * 8, mask, counted, 1, in_line, listed, a.nbytes, 4 * 4,
    ]  # fmt: skip


def test_a_dense_matrix_is_laid_out_and_counted_block_by_block() -> None:
    a = half_full()
    counted, listed = 4, made(lambda: a.ne(0).nonzero())[-1]
    # Where something is; the matrix and that by blocks; sums of numbers of 64 bits; whether a block has any. Then as without
    # blocks, of which four are not empty.
    mask, blocks = 12, 6
    assert made(lambda: a.to_sparse_bsr((1, 2))) == [
        mask, a.nbytes, mask, blocks * 8, mask * 8, blocks, counted, 1, 4 * 2 * 8, listed, (3 + 1) * 8, counted, 1, 4 * 8, listed,
        4 * 2 * 4,
    ]  # fmt: skip
    # By columns the blocks' mask and the blocks are turned first.
    by_columns = made(lambda: a.to_sparse_bsc((1, 2)))
    assert by_columns[5:8] == [blocks, blocks, counted]
    assert by_columns[-2:] == [a.nbytes, 4 * 2 * 4]


def test_a_coordinate_tensor_by_rows_shares_its_values() -> None:
    a = half_full().to_sparse()
    assert made(lambda: a.to_sparse_csr()) == [(3 + 1) * 8]
    assert made(lambda: a.to_sparse_csr().to_sparse()) == [(3 + 1) * 8, 4 * 2 * 8]


def test_rows_become_columns_by_sorting_the_places() -> None:
    a = half_full().to_sparse_csr()
    numbers = 4 * 8
    sorts = made(lambda: torch.zeros(4, dtype=torch.int64, device="cuda").sort())[1:]
    scan = made(lambda: torch.ones(1, dtype=torch.int64, device="cuda").cumsum(0))[-1]
    # An offset; where rows begin; both numbers of each place, and what comes of them; one number for each, sorted; then the
    # result, of which where columns begin is made twice.
    assert made(lambda: a.to_sparse_csc()) == [
        8, 8, scan, 3 * 8, 4 * 8, 2 * numbers, numbers, numbers, numbers, *sorts, 2 * numbers, 4 * 4, 5 * 8, 5 * 8, 4 * 8,
    ]  # fmt: skip


def test_the_gradient_through_columns_is_worked_out_by_rows() -> None:
    a, x = half_full().to_sparse_csr(), torch.zeros(4, 2, device="cuda", requires_grad=True)
    y = a @ x
    gradient = torch.ones_like(y)
    rows = made(lambda: a.to_sparse_csc())
    x_and_zeros = [x.nbytes, x.nbytes]
    assert made(lambda: torch.autograd.grad(y, x, gradient))[: len(rows) + 2] == [*rows, *x_and_zeros]


def test_blocks_are_not_taken_apart_into_rows() -> None:
    blocks = torch.eye(4, device="cuda").to_sparse_bsr((2, 2))
    with pytest.raises(RuntimeError, match="expected SparseCsr or SparseCsc layout but got SparseBsr"):
        blocks.to_sparse_csr()


def test_conjugates_keep_their_places() -> None:
    a = half_full().to(torch.complex64).to_sparse()
    assert made(lambda: torch.conj_physical(a)) == [4 * 8, 4 * 2 * 8]


# ---- on an H100 with 2.11, of whose libraries the sizes are known

COLUMNS_OF_A, ROWS_OF_B = torch.tensor([1, 3, 0, 2]), torch.tensor([0, 0, 2, 3, 3])


@pytest.fixture
def h100() -> None:
    gpu.turn_on("H100,torch=2.11,values=real")


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """(3, 4) with four elements and (4, 5) with five: of pairs of a column and that row there are 2 + 0 + 1 + 2."""
    a = torch.sparse_coo_tensor(torch.stack([torch.tensor([0, 0, 1, 2]), COLUMNS_OF_A]), torch.ones(4), (3, 4))
    b = torch.sparse_coo_tensor(torch.stack([ROWS_OF_B, torch.tensor([0, 4, 1, 1, 2])]), torch.ones(5), (4, 5))
    return a.coalesce().cuda(), b.coalesce().cuda()


def test_a_product_of_two_sparse_matrices_takes_what_its_pairs_of_elements_need(h100: None) -> None:
    a, b = factors()
    products = 5
    rooms = [12 * 4 + 311 + 768, 2 * products * (8 + 4) + 4391 + 768]
    of_a, of_b = [4 * (3 + 1), 4 * 4, 4 * 4], [4 * (4 + 1), 4 * 5, 4 * 5]
    count = (a @ b)._nnz()
    assert count == (a.cpu() @ b.cpu())._nnz()
    assert made(lambda: a @ b) == [*of_a, *of_b, 4 * (3 + 1), *rooms, 4 * count, 4 * count, 2 * 8 * count]
    assert torch.equal((a @ b).to_dense().cpu(), a.cpu().to_dense() @ b.cpu().to_dense())
    # By rows: zeros, a result that grows, and all numbers in 32 bits.
    rows, columns = a.to_sparse_csr(), b.to_sparse_csr()
    result = rows @ columns
    assert (result.layout, result.crow_indices().dtype) == (torch.sparse_csr, torch.int32)
    assert torch.equal(result.to_dense().cpu(), a.cpu().to_dense() @ b.cpu().to_dense())
    assert made(lambda: rows @ columns) == [
        8 * 4, 8, 8 * 4, 4 * 4, 4 * 4, 4 * 5, 4 * 5, 4 * 4, *rooms, 4 * count, 4 * count,
    ]  # fmt: skip
    # By columns they become rows first, the right one before the left.
    by_columns = rows.to_sparse_csc(), columns.to_sparse_csc()
    product = made(lambda: by_columns[0] @ by_columns[1])
    turned = [made(lambda one=one: one.to_sparse_csr()) for one in by_columns]
    assert product[: len(turned[1]) + len(turned[0])] == turned[1] + turned[0]
    assert product[-2:] == [4 * count, 4 * count]


def test_a_product_without_elements_is_zeros(h100: None) -> None:
    nothing = torch.zeros(3, 3, device="cuda")
    by_rows, by_places = nothing.to_sparse_csr(), nothing.to_sparse()
    assert made(lambda: by_rows @ by_rows) == [8 * 4, 8, 8 * 4]
    assert made(lambda: by_places @ by_places) == [4 * 4, 4 * 4, 4 * 4, 311 + 512]


def test_where_the_places_are_not_known_the_elements_are_spread_evenly() -> None:
    gpu.turn_on("H100,torch=2.11")
    places = torch.randint(0, 100, (2, 5000), device="cuda")
    a = torch.sparse_coo_tensor(places, torch.rand(5000, device="cuda"), (100, 100))
    # 50 elements in each of 100 columns and rows; every place of the result may be taken.
    blocks = -(-(100 * 50 * 50) // 768)
    room = 2 * 100 * 50 * 50 * 12 + 4391 + -(-16 * (blocks + 32) // 256) * 256
    assert made(lambda: a @ a)[-4:] == [room, 4 * 10_000, 4 * 10_000, 2 * 8 * 10_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_blocks_are_multiplied_with_the_rows_that_they_need(dtype: torch.dtype, h100: None) -> None:
    blocks, rows = torch.eye(8).to(dtype).to_sparse_bsr((2, 2)).cuda(), torch.ones(8, 5, device="cuda", dtype=dtype)
    out = 8 * 5 * dtype.itemsize
    # Of four blocks: their rows, their products, and where these belong. Half precision is multiplied and added up in float32.
    of_rows, listed, factors = 4 * 2 * 5, 4 * 2 * 8, 4 * 2 * 2
    inside = {
        torch.float32: [of_rows * 4, of_rows * 4, listed],
        torch.float16: [of_rows * 2, factors * 4, of_rows * 4, of_rows * 4, listed, 8 * 5 * 4],
        torch.float64: [out, 4 * 5, 4 * 4],
    }[dtype]
    assert made(lambda: blocks @ rows) == [out, out, *inside]
    assert made(lambda: torch.addmm(rows, blocks, rows)) == [out, *inside]
    assert torch.equal((blocks @ rows).cpu(), rows.cpu())


def test_a_triangular_system_by_rows_is_solved_by_cusparse(h100: None) -> None:
    matrix, right = (torch.eye(16, device="cuda") * 4).to_sparse_csr(), torch.ones(16, 2, device="cuda")
    assert made(lambda: torch.triangular_solve(right, matrix)) == [128, 2490]
    assert torch.equal(torch.triangular_solve(right, matrix)[0].cpu(), torch.full((16, 2), 0.25))


def test_a_row_of_a_coordinate_tensor_is_looked_for(h100: None) -> None:
    a = half_full().to_sparse()
    counted, found = 4, made(lambda: a.to_dense().ne(0).nonzero())[-1]
    # Two of four elements lie in the first row: which, their values, the dimension that is left, their places.
    asked = [4, counted, 1, 2 * 8, found, 2 * 4, 2 * 8, 2, counted, 1, 8, found, 2 * 2 * 8, 2 * 8]
    assert made(lambda: a[0]) == asked
    assert torch.equal(a[0].to_dense().cpu(), HALF_FULL[0].float())
    assert torch.equal(a.narrow_copy(0, 1, 2).to_dense().cpu(), HALF_FULL[1:].float())


def test_sums_of_coordinates_are_made_one_by_their_places(h100: None) -> None:
    a = half_full().to_sparse()
    values, lines = 4 * 4, 4 * 8
    summed = made(lambda: torch.sparse.sum(a, 1))
    assert summed[:5] == [values, lines, lines, lines, lines]
    assert torch.equal(torch.sparse.sum(a, 1).to_dense().cpu(), HALF_FULL.sum(1).float())
    # Last go the places, then the values, as recorded on an H100.
    moves = events(lambda: torch.sparse.sum(a, 1))
    first = [move["addr"] for move in moves if move["action"] == "alloc"][:2]
    freed = [move["addr"] for move in moves if move["action"] == "free_requested"]
    assert [at for at in freed if at in first] == first[::-1]


@pytest.mark.parametrize("dims", [0, 1, (0, 1), 2, (0, 2), (1, 2), (0, 1, 2)])
def test_a_sum_of_some_dimensions_gives_its_gradient_to_each_element(dims: int | tuple[int, ...], h100: None) -> None:
    def gradient(device: str) -> torch.Tensor:
        rows = torch.tensor([[0, 0, 1, 2], [0, 2, 1, 0]])
        a = torch.sparse_coo_tensor(rows, torch.ones(4, 3), (3, 3, 3)).coalesce().to(device).requires_grad_()
        found = torch.sparse.sum(a, dims)
        (found if found.layout is torch.strided else torch.sparse.sum(found)).sum().backward()
        assert a.grad is not None
        return a.grad

    expected, found = gradient("cpu"), gradient("cuda")
    assert described(found) == described(expected)
    assert found._values().shape == expected._values().shape
    assert torch.equal(found.to_dense().cpu(), expected.to_dense())


def test_what_was_summed_up_is_found_by_the_numbers_of_its_places(h100: None) -> None:
    a = half_full().to_sparse().requires_grad_()
    summed = torch.sparse.sum(a, 1)
    given = summed.detach()
    places = summed._nnz() * 8
    taken = made(lambda: torch.autograd.grad(summed, a, given, retain_graph=True))
    assert taken == [4 * 4, places, 4 * 8, 4 * 8, 2 * 4 * 8]
    # Of none there is nothing to give on.
    empty = torch.sparse_coo_tensor(size=(3, 4), device="cuda").requires_grad_()
    gradient = torch.autograd.grad(torch.sparse.sum(empty, 1), empty, torch.sparse_coo_tensor(size=(3,), device="cuda"))
    assert gradient[0]._nnz() == 0


def test_places_of_one_are_looked_for_among_those_of_the_other(h100: None) -> None:
    a, b = half_full().to_sparse(), torch.eye(3, 4, device="cuda").to_sparse()
    # Numbers up to the longer list's length, those of its places, where each of the three begins and how often it is there.
    assert made(lambda: a * b) == [4 * 8, 4 * 8, 2 * 3 * 8, 8, 2 * 3 * 8, 3 * 4]
    assert torch.equal((a * b).to_dense().cpu(), HALF_FULL * torch.eye(3, 4))
    by_rows = a.to_sparse_csr()
    assert torch.equal((by_rows * by_rows).to_dense().cpu(), HALF_FULL.float())
    assert made(lambda: by_rows * by_rows)[:3] == [8, 2 * 4 * 8, 2 * 4 * 8]
    assert made(lambda: a * 2) == [2 * 4 * 8, 4 * 4]


def test_a_product_in_half_precision_with_a_vector_is_computed(h100: None) -> None:
    rows, vector = (torch.eye(4, device="cuda") * 2).half().to_sparse_csr(), torch.ones(4, device="cuda").half()
    assert torch.equal((rows @ vector).cpu(), torch.full((4,), 2.0).half())


def test_elements_of_a_row_are_pools_of_a_softmax(h100: None) -> None:
    a = half_full().to_sparse()
    elements, rows = a._nnz(), 3
    values, listed = elements * 4, elements * 8
    sort, count, scan = 255 + 256 * 2, 1535, 1279
    # The result; the strides of the dimensions, and each element's number by them. Then their order, how many each row has,
    # where it begins in that order, and its largest value.
    pools = [16, listed, listed, sort, listed, count, rows * 8, scan]
    assert made(lambda: torch.sparse.softmax(a, 1)) == [values, 2 * listed, *pools, rows * 4]
    expected = torch.sparse.softmax(a.cpu(), 1).to_dense()
    assert torch.allclose(torch.sparse.softmax(a, 1).to_dense().cpu(), expected)
    assert made(lambda: torch.sparse.log_softmax(a, 0))[-1] == 4 * 4
    # A row without elements is no pool.
    b = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]).cuda().to_sparse()
    assert made(lambda: torch.sparse.softmax(b, 1))[-1] == 2 * 4
    # Of its gradient no largest values are needed; both its elements and those of the result have numbers.
    weights = a.clone().requires_grad_()
    result = torch.sparse.softmax(weights, 1)
    gradient = torch.sparse_coo_tensor(a.indices(), torch.ones(elements, device="cuda"), a.shape).coalesce()
    asked = made(lambda: torch.autograd.grad(result, weights, gradient, retain_graph=True))
    assert asked == [values, 2 * listed, 16, listed, 16, listed, listed, *pools]


def test_where_places_are_not_known_a_softmax_has_as_many_pools_as_rows() -> None:
    edges = torch.stack([torch.arange(5000, device="cuda") % 100, torch.arange(5000, device="cuda") % 77])
    a = torch.sparse_coo_tensor(edges, torch.ones(5000, 4, device="cuda"), (100, 77, 4)).coalesce()
    assert made(lambda: torch.sparse.softmax(a, 1))[-1] == 100 * 4 * 4
    # Along a dimension of the values these are normalised, beside room for them.
    along = made(lambda: torch.sparse.softmax(a, 2))
    assert along == [a.values().nbytes, a.indices().nbytes, a.values().nbytes]


def test_attention_over_edges_trains(h100: None) -> None:
    on_host = half_full().cpu().to_sparse().requires_grad_()
    on_device = half_full().to_sparse().requires_grad_()
    for edges in (on_host, on_device):
        torch.sparse.mm(
            torch.sparse.softmax(edges, 1), torch.arange(8.0, device=edges.device).view(4, 2)
        ).sum().backward()
    assert on_device.grad is not None
    assert on_host.grad is not None
    assert torch.allclose(on_device.grad.to_dense().cpu(), on_host.grad.to_dense())


def test_a_batch_of_matrices_is_compressed_as_one(machine: gpu.VirtualMachine) -> None:
    """As an H100 was asked with 2.11: whether all have as many elements, two searches in one mask, a list for each at the end."""
    x = torch.zeros(4, 16, 16, device="cuda", dtype=torch.half)
    # The first's elements and all's, each as numbers to add up; whether they are as many.
    numbers = [8, 2048, 32, 8192, 4, 1]
    asked = made(lambda: x.to_sparse_csr())
    assert asked[:7] == [1024, *numbers]
    assert asked[-2:] == [4 * 17 * 8, 4 * 16 * 8]
    assert asked.count((4 * 16 + 1) * 8) == 1, "where the rows of all begin"
    # By columns they are laid beside each other, with where something is; both are copied again to be read row by row.
    by_columns = made(lambda: x.to_sparse_csc())
    assert by_columns[:9] == [1024, *numbers, 2048, 1024]
    # Of blocks each one's sum is taken first, of numbers that lie block by block.
    of_blocks = made(lambda: x.to_sparse_bsr((2, 2)))
    assert of_blocks[:12] == [1024, 2048, 1024, 2048, 8192, 256, 8, 512, 32, 2048, 4, 1]
    assert of_blocks[-2:] == [4 * 9 * 8, 4 * 8 * 8]


@pytest.mark.parametrize("make", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_a_compressed_batch_looks_as_on_the_host(make: str) -> None:
    host = torch.eye(8).repeat(2, 3, 1, 1)
    block = [(4, 2)] if "bs" in make else []
    there, here = (getattr(one, make)(*block) for one in (host, host.cuda()))
    rows = make in ("to_sparse_csr", "to_sparse_bsr")
    names = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
    assert here.shape == there.shape
    for name in (*names, "values"):
        assert getattr(here, name)().shape == getattr(there, name)().shape
    assert getattr(torch.zeros(0, 4, 4, device="cuda"), make)(*block).shape == (0, 4, 4)


FEW = 3
INDICES, FLOATS, DOUBLES = 2 * FEW * 8, FEW * 4, FEW * 8


@pytest.mark.parametrize(
    ("ours", "theirs", "way", "expected"),
    [
        # What is of another type than both have in common is made anew, what is not added once is multiplied, and the lists
        # are put one behind the other.
        (torch.float32, torch.float64, "add", [DOUBLES, 2 * INDICES, 2 * DOUBLES]),
        (torch.float64, torch.float32, "add", [DOUBLES, 2 * INDICES, 2 * DOUBLES]),
        (torch.int64, torch.float32, "add", [FLOATS, 2 * INDICES, 2 * FLOATS]),
        (torch.float16, torch.float64, "sub", [DOUBLES, DOUBLES, 2 * INDICES, 2 * DOUBLES]),
        (torch.float32, torch.float32, "sub_", [FLOATS, 2 * INDICES, 2 * FLOATS]),
        (torch.float64, torch.float32, "add_", [DOUBLES, 2 * INDICES, 2 * DOUBLES]),
        (torch.float32, torch.float32, "mul_", [FEW * 8, FEW * 8, 2 * FEW * 8, 8, INDICES, FLOATS]),
        (torch.float32, torch.float64, "mul", [FEW * 8, FEW * 8, 2 * FEW * 8, 8, INDICES, DOUBLES, DOUBLES]),
    ],
)
def test_two_types_meet_in_the_one_that_holds_both(
    ours: torch.dtype, theirs: torch.dtype, way: str, expected: list[int]
) -> None:
    """As PyTorch's CUDA build of 2.13 asks for."""
    left, right = matrix("cuda").to(ours), matrix("cuda").to(theirs)
    results = []
    assert made(lambda: results.append(getattr(left, way)(right))) == expected
    assert results[0].dtype == (ours if way.endswith("_") else torch.promote_types(ours, theirs))
    assert results[0].layout is torch.sparse_coo


def test_what_does_not_fit_the_type_is_refused() -> None:
    with pytest.raises(RuntimeError, match="result type float32 to output int64"):
        matrix("cuda").long().add_(matrix("cuda"))


def test_in_place_too_a_list_longer_than_the_places_is_summed_up() -> None:
    places = torch.zeros(2, 9, dtype=torch.int64, device="cuda")
    many = torch.sparse_coo_tensor(places, torch.zeros(9, device="cuda"), (3, 3), check_invariants=False)
    asked = made(lambda: many.sub_(many))
    assert many._nnz() <= 9
    # The product with -1, both lists; the numbers of 18 places.
    assert asked[:4] == [9 * 4, 2 * 18 * 8, 18 * 4, 18 * 8]


def test_sums_hold_both_lists_and_not_what_the_host_merges() -> None:
    """`add_out_sparse_cuda`: the places and the values of both, in order, until there are more of them than places."""
    gpu.turn_off()
    gpu.turn_on("A100-40GB,values=real")
    ours = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 2.0]), (3, 3)).coalesce().cuda()
    theirs = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([3.0, 4.0]), (3, 3)).coalesce().cuda()
    for made_of, values in (
        (ours + theirs, [1, 2, 3, 4]),
        (ours.sub(theirs, alpha=2), [1, 2, -6, -8]),
        (ours.clone().add_(theirs, alpha=3), [1, 2, 9, 12]),
        (ours.clone().sub_(theirs.long()), [1, 2, -3, -4]),
    ):
        assert not made_of.is_coalesced()
        assert made_of._indices().tolist() == [[0, 1, 0, 2], [1, 2, 1, 0]]
        assert made_of._values().tolist() == values
    narrow = ours.half().add_(theirs)
    assert (narrow.dtype, narrow._values().tolist()) == (torch.float16, [4, 2, 4])
    nothing = torch.sparse_coo_tensor((3, 3)).cuda()
    assert (nothing - theirs)._values().tolist() == [-3, -4]
    assert (ours + nothing)._values().tolist() == [1, 2]
    many = (ours + theirs) + (ours + theirs)
    assert (many._nnz(), (many + ours)._values().tolist()) == (8, [9, 6, 8])


def test_places_are_spread_over_sides_of_one() -> None:
    column = torch.ones(5, 1).to_sparse().to("cuda")
    results = []
    sizes = made(lambda: results.append(torch._sparse_broadcast_to(column, (2, 5, 7))))
    assert sizes == [2 * 5 * 7 * 4, 3 * 2 * 5 * 7 * 8, 7 * 8]
    assert described(results[0]) == ((2, 5, 7), torch.float32, 2 * 5 * 7, 3, (2 * 5 * 7,))
    assert not results[0].is_coalesced()
    with pytest.raises(RuntimeError, match="must match the existing size"):
        torch._sparse_broadcast_to(column, (4, 7))


def test_parts_of_sums_are_summed_up_before_anything_but_their_sign_is_asked() -> None:
    places = torch.zeros(2, 9, dtype=torch.int64, device="cuda")
    parts = torch.sparse_coo_tensor(places, torch.zeros(9, device="cuda"), (30, 30), check_invariants=False)
    assert not (-parts).is_coalesced()
    assert parts.sin().is_coalesced()
    with pytest.raises(RuntimeError, match="sin_ requires coalesced input"):
        parts.sin_()
    assert made(lambda: parts.neg_()) == made(lambda: parts.div_(2)) == []


@pytest.mark.parametrize("values", ["zeros", "real"])
def test_places_may_have_dense_dimensions(values: str) -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB" if values == "zeros" else "A100-40GB,values=real")
    source = torch.ones(3, 4, 5, device="cuda")
    found = []
    sizes = made(lambda: found.append(source.to_sparse_csr(dense_dim=1)))
    # Where something is, the sum over what is dense (its numbers as integers beside it), and where that is not nothing.
    assert sizes[:4] == [60, 12 * 8, 60 * 8, 12]
    assert sides(found[0]) == [(4,), (12,), (12, 5)]
    blocks = torch.ones(4, 8, 5, device="cuda").to_sparse_bsr((2, 2), dense_dim=1)
    assert sides(blocks) == [(3,), (8,), (8, 2, 2, 5)]
    batch = torch.ones(2, 3, 4, 5, device="cuda").to_sparse_csc(dense_dim=1)
    assert (batch.ccol_indices().shape, batch.values().shape) == ((2, 5), (2, 12, 5))


def sides(matrix: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in (matrix.crow_indices(), matrix.col_indices(), matrix.values())]


def test_a_module_that_holds_a_sparse_matrix_is_copied() -> None:
    class Propagates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = matrix("cuda")

    copied = copy.deepcopy(Propagates())
    assert described(copied.matrix) == described(matrix("cpu"))
    assert copied.matrix.is_coalesced()
    before = torch.cuda.memory_allocated()
    again = copy.deepcopy(copied)
    assert torch.cuda.memory_allocated() - before == 2 * 512  # indices and values, each a block
    assert again.matrix._values().data_ptr() != copied.matrix._values().data_ptr()


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ("", r"the virtual GPU cannot run `aten\.abs\.out"),
        (
            ",values=real",
            r"the virtual GPU cannot hold what `aten\.abs\.out` writes to a tensor with layout torch\.sparse_coo",
        ),
    ],
)
def test_what_is_written_to_a_sparse_tensor_without_a_rule_is_refused(values: str, refused: str) -> None:
    gpu.turn_on(f"T4{values}")
    a = matrix("cuda")
    with pytest.raises(NotImplementedError, match=refused):
        torch.abs(a, out=torch.zeros_like(a))


def test_a_matrix_without_rows_is_compressed() -> None:
    none = torch.zeros(0, 4, device="cuda")
    assert [none.to_sparse(layout=layout, blocksize=size).shape for layout, size in EMPTY] == [(0, 4)] * 3


EMPTY: list[tuple[torch.layout, Any]] = [
    (torch.sparse_csr, None),
    (torch.sparse_csc, None),
    (torch.sparse_bsr, (1, 2)),
]


_FORMS = {
    "coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc, "bsr": torch.sparse_bsr, "bsc": torch.sparse_bsc,
}  # fmt: skip
_MATRICES = {
    "a matrix": torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0], [0, 0, 0, 4], [5, 0, 0, 0]]),
    "batches": torch.tensor([[[1.0, 0], [0, 2]], [[3, 0], [4, 0]], [[0, 5], [6, 0]]]),
    "a dense dimension": torch.tensor([[[1.0, 2], [0, 0]], [[3, 4], [5, 6]], [[0, 0], [0, 0]]]),
    "both": torch.tensor([[[[1.0, 2], [0, 0]], [[0, 0], [3, 4]]], [[[0, 0], [5, 6]], [[7, 8], [0, 0]]]]),
}


def _converted(source: torch.Tensor, kind: str, first: str, second: str) -> Any:
    """The tensors that it is made of, or what PyTorch says to it."""
    dense = int(kind in ("a dense dimension", "both"))
    blocks = {"blocksize": (1, 1) if kind != "a matrix" else (2, 2)}
    given = {"dense_dim": dense} if dense and first != "coo" else {}
    try:
        if first == "coo":
            between = source.to_sparse(source.dim() - dense)
        else:
            between = source.to_sparse(layout=_FORMS[first], **given, **(blocks if first[0] == "b" else {}))
        made = between.to_sparse(layout=_FORMS[second], **(blocks if second[0] == "b" else {}))
    except RuntimeError as error:
        return str(error)
    if made.layout is torch.sparse_coo:
        return [made.shape, made._indices(), made._values()]
    if made.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [made.shape, made.crow_indices(), made.col_indices(), made.values()]
    return [made.shape, made.ccol_indices(), made.row_indices(), made.values()]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", _MATRICES)
@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_every_form_becomes_every_other_as_on_the_host(values: str, kind: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"T4,values={values}")
    source = _MATRICES[kind]
    for first in _FORMS:
        for second in _FORMS:
            expected = _converted(source, kind, first, second)
            found = _converted(source.cuda(), kind, first, second)
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected, (first, second)
                continue
            assert found[0] == expected[0]
            assert [(part.shape, part.dtype) for part in found[1:]] == [
                (part.shape, part.dtype) for part in expected[1:]
            ]
            if values == "real":
                assert [part.tolist() for part in found[1:]] == [part.tolist() for part in expected[1:]]
