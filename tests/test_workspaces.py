"""Workspaces of cuBLAS and cuBLASLt: when they are taken, how large, by which version, and what inference mode sees."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from asked_for import made
from torch import nn
from torch_versions import BIAS_WORKSPACE, WORKSPACES_ARE_KEPT

import gpumem_magic
from gpumem_magic.owners.search import find_owners
from gpumem_magic.units import KIB, MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card.generations import (
    LARGE_WORKSPACE,
    WORKSPACE,
    BlasPolicy,
    blas_policy,
    context,
    cublas_workspace_bytes,
    is_rocm,
    parse_version,
)

KEEPS = "A100-40GB,torch=2.13"
"""A device of a version that keeps workspaces, and shares them between cuBLAS and cuBLASLt, whichever PyTorch runs the tests."""


@pytest.fixture(autouse=True)
def off_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    yield
    gpu.turn_off()


def squares(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(512, 512, device="cuda", requires_grad=True) for _ in range(count)]


def test_one_workspace_before_the_backward_pass_and_two_after() -> None:
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    product = a @ b
    assert torch.cuda.memory_allocated() - start == MIB + WORKSPACE
    product.sum().backward()
    del product
    assert torch.cuda.memory_allocated() - start == 2 * MIB + 2 * WORKSPACE


def test_a_thread_takes_the_handle_of_one_that_has_ended() -> None:
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    for _ in range(3):
        thread = threading.Thread(target=lambda: a @ b)
        thread.start()
        thread.join()
    assert torch.cuda.memory_allocated() - start == WORKSPACE
    both = threading.Barrier(2)

    def at_once() -> None:
        a @ b
        both.wait()

    threads = [threading.Thread(target=at_once) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    a @ b
    assert torch.cuda.memory_allocated() - start == 2 * WORKSPACE


@pytest.mark.parametrize(
    ("version", "variable", "taken"), [("2.11", "0", True), ("2.13", "0", False), ("2.13", "1", True)]
)
def test_columns_with_rows_are_multiplied_without_cublas_since_2_13(
    version: str, variable: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", variable)
    gpu.turn_on(f"A100-40GB,torch={version}")
    columns, rows = torch.zeros(4, 128, 1, device="cuda"), torch.zeros(4, 1, 128, device="cuda")
    assert (made(lambda: torch.bmm(columns, rows))[1:] == [WORKSPACE]) is taken
    # (Rows with columns are cuBLAS's as ever.)
    assert (made(lambda: torch.bmm(rows, columns))[1:] == []) is taken


def test_every_stream_has_its_own() -> None:
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    (a @ b), (a @ b)
    assert torch.cuda.memory_allocated() - start == WORKSPACE
    with torch.cuda.stream(torch.cuda.Stream()):
        (a @ b), (a @ b)
    assert torch.cuda.memory_allocated() - start == 2 * WORKSPACE


def test_clearing_gives_them_back() -> None:
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    a @ b
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == start
    a @ b
    assert torch.cuda.memory_allocated() - start == WORKSPACE


@pytest.mark.parametrize(
    ("device", "kept"),
    [
        ("A100-40GB,torch=1.12", 0),
        ("A100-40GB,torch=2.6", WORKSPACE),
        ("H100,torch=2.6", LARGE_WORKSPACE),
        ("A100-40GB,torch=2.15", 0),
        ("A100-40GB,torch=2.5+rocm6", 0),
        ("A100-40GB,torch=2.6+rocm6", LARGE_WORKSPACE),
    ],
)
def test_what_stays_after_a_product_depends_on_version_and_generation(device: str, kept: int) -> None:
    gpu.turn_on(device)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    a @ b
    assert torch.cuda.memory_allocated() - start == kept


def test_without_that_option_the_version_in_use_decides() -> None:
    gpu.turn_on("A100-40GB")
    layer, x = nn.Linear(512, 512).cuda(), squares(1)[0]
    start = torch.cuda.memory_allocated()
    y = layer(x)
    kept = WORKSPACE + BIAS_WORKSPACE if WORKSPACES_ARE_KEPT else 0
    assert torch.cuda.memory_allocated() - start == y.nbytes + kept
    passing = 0 if WORKSPACES_ARE_KEPT else MIB
    assert torch.cuda.max_memory_allocated() - start == y.nbytes + kept + passing


def test_newest_versions_take_a_workspace_for_the_call() -> None:
    gpu.turn_on("A100-40GB,torch=2.15")
    a, b = squares()
    start = torch.cuda.memory_allocated()
    a @ b
    assert torch.cuda.max_memory_allocated() - start == MIB + WORKSPACE


@pytest.mark.parametrize(("device", "takes"), [("A100-40GB,torch=2.15", MIB), ("H100,torch=2.15", MIB)])
def test_a_bias_needs_less_where_nothing_is_kept(device: str, takes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the build of 2.15.0 does over a runtime without a card; whether the two libraries would share one is no matter then."""
    for unified in ("0", "1"):
        monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", unified)
        gpu.turn_on(device)
        layer, x = nn.Linear(512, 512).cuda(), squares(1)[0]
        start = torch.cuda.memory_allocated()
        y = layer(x)
        assert torch.cuda.max_memory_allocated() - start == y.nbytes + takes
        gpu.turn_off()


@pytest.mark.parametrize(
    ("version", "peak", "kept"), [("2.6", MIB, 0), ("2.9", MIB, MIB), ("2.11", MIB, MIB), ("2.12", 0, 0)]
)
def test_a_product_with_a_bias_has_a_workspace_of_its_own(version: str, peak: int, kept: int) -> None:
    gpu.turn_on(f"A100-40GB,torch={version}")
    layer, x = nn.Linear(512, 512).cuda(), squares(1)[0]
    start = torch.cuda.memory_allocated()
    y = layer(x)
    assert torch.cuda.max_memory_allocated() - start == y.nbytes + WORKSPACE + peak
    assert torch.cuda.memory_allocated() - start == y.nbytes + WORKSPACE + kept


@pytest.mark.parametrize(("version", "unified", "kept"), [("2.11", "1", WORKSPACE), ("2.13", "0", MIB)])
def test_a_variable_says_whether_the_two_libraries_share_one(
    version: str, unified: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the wheels of 2.11 and 2.13 do over a runtime without a card: where they share none, 2.13 takes cuBLASLt's alone."""
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", unified)
    gpu.turn_on(f"A100-40GB,torch={version}")
    layer, x = nn.Linear(512, 512).cuda(), squares(1)[0]
    start = torch.cuda.memory_allocated()
    y = layer(x)
    assert torch.cuda.memory_allocated() - start == y.nbytes + kept
    del y
    x @ x
    assert torch.cuda.memory_allocated() - start == WORKSPACE + (kept if kept == MIB else 0)


def test_a_product_of_integers_has_none_of_cublaslts() -> None:
    gpu.turn_on("A100-40GB,torch=2.11")
    a = torch.ones(32, 32, dtype=torch.int8, device="cuda")
    start = torch.cuda.memory_allocated()
    product = torch._int_mm(a, a)
    assert torch.cuda.memory_allocated() - start == product.nbytes + WORKSPACE
    # Since 2.12 those of cuBLASLt's ask for no handle of cuBLAS's.
    gpu.turn_on("A100-40GB,torch=2.12")
    a = torch.ones(32, 32, dtype=torch.int8, device="cuda")
    start = torch.cuda.memory_allocated()
    product = torch._int_mm(a, a)
    assert torch.cuda.memory_allocated() - start == product.nbytes


def test_the_variable_for_the_workspace_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    a @ b
    assert torch.cuda.memory_allocated() - start == 128 * KIB


def test_a_program_may_set_the_variable_until_its_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it sets it in its first lines, when `gpumem run` has turned the device on (``parseChosenWorkspaceSize``)."""
    gpu.turn_on(KEEPS)
    a, b = squares()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    start = torch.cuda.memory_allocated()
    a @ b
    assert torch.cuda.memory_allocated() - start == 128 * KIB


def test_a_recording_that_begins_later_knows_workspaces_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":2048:1")
    gpu.turn_on("A100-40GB,torch=2.9")
    kept = nn.Linear(512, 512).cuda()(squares(1)[0])
    holdings = find_owners(gpu.current(), {"kept": kept})  # type: ignore[arg-type]
    assert sum(one.size for one in holdings.held if one.kind == "workspace") == 3 * MIB
    assert holdings.lost == ()
    with gpumem_magic.measure() as measured:
        del kept
    # cuBLAS's, and the one of cuBLASLt for products with a bias.
    assert [row.categories["workspace"] for row in measured.report.checkpoints] == [3 * MIB] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_allocates_what_no_grad_allocates(mode: type[torch.no_grad]) -> None:
    gpu.turn_on(KEEPS)
    layer = nn.Linear(512, 512).cuda()
    x = torch.zeros(4, 128, 512, device="cuda")
    start = torch.cuda.memory_allocated()
    with mode():
        y = torch.einsum("bid,bjd->bij", layer(x), x.transpose(0, 1).reshape(4, 128, 512))
    # The layer's result, the copy that reshape makes and the scores; one workspace.
    assert torch.cuda.max_memory_allocated() - start == 2 * x.nbytes + y.nbytes + WORKSPACE
    assert torch.cuda.memory_allocated() - start == y.nbytes + WORKSPACE


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        ({}, BlasPolicy(WORKSPACE, True, 0, True)),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, BlasPolicy(WORKSPACE, True, 0, True)),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, BlasPolicy(0, True, 0, True)),
        ({"CUBLAS_WORKSPACE_CONFIG": "many"}, BlasPolicy(WORKSPACE, True, 0, True)),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, BlasPolicy(WORKSPACE, True, MIB, True, True)),
        (
            {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "4096"},
            BlasPolicy(WORKSPACE, True, 4 * MIB, True, True),
        ),
    ],
)
def test_variables(environment: dict[str, str], policy: BlasPolicy) -> None:
    assert blas_policy((2, 13), WORKSPACE, environment) == policy


def test_blackwell_got_hoppers_workspace_later() -> None:
    assert cublas_workspace_bytes((2, 9), (10, 0)) == WORKSPACE
    assert cublas_workspace_bytes((2, 13), (10, 0)) == cublas_workspace_bytes((2, 13), (12, 0)) == LARGE_WORKSPACE


def test_versions_are_read_as_torch_writes_them() -> None:
    assert parse_version("2.6.0+cu124") == (2, 6)
    assert parse_version(torch.__version__) >= (2, 9)
    assert is_rocm("2.2.2+rocm5.7")
    for text in ("", "new", "2", "2.x"):
        with pytest.raises(ValueError, match="PyTorch version"):
            parse_version(text)


def test_contexts_are_the_measured_ones_of_the_same_gpu_where_there_are_any() -> None:
    own = context("A100-80GB", (8, 0), (2, 1), True)
    assert (own.nbytes, own.is_estimate) == (481 * MIB, False)
    assert context("A100-80GB", (8, 0), (2, 1), False).nbytes == 942 * MIB
    assert context("A100-80GB", (8, 0), (1, 10), False).nbytes == 1823 * MIB
    other = context("T4", (7, 5), (1, 4), False)
    assert (other.nbytes, other.is_estimate) == (877 * MIB, True)


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("A100-40GB,torch=2.9", [WORKSPACE, MIB]),  # As a recording of OPT shows.
        ("A100-40GB,torch=2.6", [MIB, WORKSPACE]),
    ],
)
def test_a_workspace_of_cublaslts_that_is_kept_comes_after_that_of_its_handle(device: str, sizes: list[int]) -> None:
    gpu.turn_on(device)
    x, layer = torch.zeros(64, 512, device="cuda"), nn.Linear(512, 512, device="cuda")
    with torch.no_grad():
        assert made(lambda: layer(x)) == [64 * 512 * 4, *sizes]


@pytest.mark.parametrize(("rows", "inner", "asked"), [(0, 8, []), (5, 0, [5 * 16 * 4]), (5, 8, [5 * 16 * 4, MIB])])
def test_a_product_that_multiplies_nothing_has_no_workspace(rows: int, inner: int, asked: list[int]) -> None:
    """It returns before it asks for one (``Blas.cpp``; the build of 2.6)."""
    gpu.turn_on("A100,torch=2.6")
    torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
    x, weight, bias = (torch.zeros(*shape, device="cuda") for shape in ((rows, inner), (16, inner), (16,)))
    assert made(lambda: torch.nn.functional.linear(x, weight, bias)) == asked


def beside_and_reserved() -> int:
    """What the driver says that the process holds beside PyTorch's allocator, in MiB."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) // MIB


@pytest.mark.parametrize(("version", "extra"), [("2.9", [1 << 20]), ("2.10", []), ("2.11", [1 << 20])])
def test_a_single_row_with_a_bias_is_cublaslts_but_with_2_10(version: str, extra: list[int]) -> None:
    """As an H100 was asked for it with 2.11; none with a single column to be summed over."""
    gpu.turn_on(f"H100,torch={version}")
    bias, weight, column = (torch.zeros(*shape, device="cuda") for shape in ((16,), (16, 8), (16, 1)))
    row, single = torch.zeros(1, 8, device="cuda"), torch.zeros(8, 1, device="cuda")
    torch.addmm(bias, single, column.t())  # takes cuBLAS's
    assert made(lambda: torch.nn.functional.linear(row, weight, bias)) == [64, *extra]


def test_each_threads_handle_takes_its_own_from_the_driver() -> None:
    """Measured on an H100 (driver 580.159, torch 2.11.0+cu130): 618.8 MiB, with a product 684.8, with its gradient 748.8."""
    gpu.turn_on("H100,torch=2.11")
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    assert beside_and_reserved() == 619
    product = x @ x
    assert beside_and_reserved() == 619 + 64 + 2
    product.sum().backward()
    assert beside_and_reserved() == 619 + 2 * 64 + 2


def test_a_part_of_the_context_comes_with_the_first_kernel_that_works_element_by_element() -> None:
    """Likewise: 526.8 MiB with an empty tensor, in `benchmarks/truth` also with random numbers, weights from the host, products
    and `cat`; 92 more with the first fill, conversion or addition."""
    gpu.turn_on("2xH100,torch=2.11")
    layer = nn.Linear(8, 8).cuda()
    x = torch.randn(8, 8, device="cuda")
    none = torch.zeros(8, 0, device="cuda") + 1
    torch.cat([x, x]).clone()
    assert beside_and_reserved() == 527
    x @ x
    assert beside_and_reserved() == 527 + 64 + 2
    with torch.no_grad():
        layer.weight.add_(1)
    assert beside_and_reserved() == 619 + 64 + 2
    x.half().mul_(2)
    assert beside_and_reserved() == 619 + 64 + 2
    # Each card has a context of its own.
    torch.cuda.set_device(1)
    x = torch.randn(8, 8, device="cuda")
    assert beside_and_reserved() == 527
    assert torch.cuda.memory_allocated() == 512 + none.numel()
    x.half()
    assert beside_and_reserved() == 619


def test_a_kernel_that_finds_no_room_for_its_part_of_the_context_is_an_error() -> None:
    gpu.turn_on("H100,torch=2.11,total=640MiB")
    x = torch.empty(40, MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        x.zero_()
    assert torch.cuda.mem_get_info()[0] == (640 - 527 - 40) * MIB


def test_cudnn_begins_with_less_and_shares_what_comes_once() -> None:
    """Likewise: 628.8 MiB after a convolution or attention in half precision, 636.8 after training an LSTM or attention."""
    gpu.turn_on("H100,torch=2.11")
    image, kernel = torch.ones(1, 4, 32, 32, device="cuda"), torch.ones(4, 4, 3, 3, device="cuda")
    nn.functional.conv2d(image, kernel)
    assert beside_and_reserved() == 619 + 8 + 2
    image.view(64, 64) @ image.view(64, 64)
    assert beside_and_reserved() == 619 + 8 + 2 + 64
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    nn.LSTM(64, 64, device="cuda")(torch.ones(4, 2, 64, device="cuda"))[0].sum().backward()
    assert beside_and_reserved() == 619 + 2 * 8 + 2
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    query = torch.ones(2, 4, 16, 64, device="cuda", dtype=torch.half, requires_grad=True)
    out = nn.functional.scaled_dot_product_attention(query, query, query)
    assert beside_and_reserved() == 619 + 8 + 2
    out.sum().backward()
    assert beside_and_reserved() == 619 + 2 * 8 + 2


def test_the_first_stream_of_a_program_comes_with_all_of_the_pool() -> None:
    """Likewise: 688.8 MiB with one or four."""
    gpu.turn_on("H100,torch=2.11")
    x = torch.ones(1, device="cuda")
    torch.cuda.current_stream().synchronize()
    assert beside_and_reserved() == 619
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    assert beside_and_reserved() == 619 + 70
    assert len(streams) + x.numel() == 3


@pytest.mark.parametrize("device", ["H100,torch=2.11,context=700MiB", "A100-80GB,torch=2.11", "H100,torch=2.6"])
def test_a_context_with_libraries_grows_no_more(device: str) -> None:
    gpu.turn_on(device)
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    before = beside_and_reserved()
    (x @ x).sum().backward()
    assert torch.cuda.Stream().device.index == 0
    assert beside_and_reserved() == before


def test_a_handle_that_has_no_room_is_the_librarys_error() -> None:
    gpu.turn_on("H100,torch=2.11,total=680MiB")
    image = torch.ones(1, 4, 32, 32, device="cuda")
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        image.view(64, 64) @ image.view(64, 64)
    full = torch.ones(54 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_INITIALIZED"):
        nn.functional.conv2d(image, image[:, :, :3, :3])
    assert full.numel() == 54 * MIB


def test_backward_runs_on_the_streams_of_the_forward() -> None:
    """A thread and a stream have a workspace of their own: two for the forward and two for the backward."""
    gpu.turn_on(KEEPS)
    a, b = squares()
    a.requires_grad_()
    side = torch.cuda.Stream()
    start = torch.cuda.memory_allocated()
    loss = (a @ b).sum()
    with torch.cuda.stream(side):
        loss = loss + (a @ b).sum()
    torch.cuda.memory._record_memory_history()
    loss.backward()
    # (What else is kept is smaller than one.)
    assert (torch.cuda.memory_allocated() - start) // WORKSPACE == 4
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    workspaces = [event["stream"] for event in events if event["action"] == "alloc" and event["size"] == WORKSPACE]
    assert sorted(workspaces) == [0, side.cuda_stream]
    torch.cuda.memory._record_memory_history(None)


def test_a_pass_of_torch_func_runs_in_the_devices_thread() -> None:
    gpu.turn_on(KEEPS)
    a, b = squares()
    start = torch.cuda.memory_allocated()
    torch.func.grad(lambda a: (a @ b).sum())(a)
    assert (torch.cuda.memory_allocated() - start) // WORKSPACE == 2
