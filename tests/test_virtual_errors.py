"""Errors on the virtual GPU: the type and the words are those of a device, and so is what the user sees of the way there."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

from gpumem_magic.tracebacks import leave_out_ours
from gpumem_magic.user_report import Report
from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xvirtual:1GiB")
    gpu.turn_off()


def zeros(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, device=device, dtype=dtype)


def frames(error: BaseException) -> list[str]:
    """The modules of the traceback's frames that are not hidden from an IPython user, outermost first."""
    found = []
    entry: TracebackType | None = error.__traceback__
    while entry is not None:
        if "__tracebackhide__" not in entry.tb_frame.f_locals:
            found.append(entry.tb_frame.f_globals["__name__"])
        entry = entry.tb_next
    return found


def own_frames(error: BaseException) -> int:
    return sum("gpumem_magic" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


# ---- out of memory


def fills_the_device(size: int = 1 << 30) -> None:
    zeros(size, dtype=torch.uint8)


def test_out_of_memory_has_the_type_and_the_words_of_the_installed_torch() -> None:
    kept = zeros(100 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fills_the_device()
    text = str(caught.value)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 1024.00 MiB"
    )
    assert "Of the allocated memory 100.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch" in text
    assert isinstance(caught.value, RuntimeError)
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    del kept


def test_the_allocator_goes_on_after_out_of_memory() -> None:
    kept = zeros(100 * MIB, dtype=torch.uint8)
    del kept
    with pytest.raises(torch.OutOfMemoryError):
        fills_the_device()
    stats = torch.cuda.memory_stats()
    assert stats["num_ooms"] == 1
    assert stats["num_alloc_retries"] == 1
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 0, "the cache was given back in the attempt"
    again = zeros(200 * MIB, dtype=torch.uint8)
    assert torch.cuda.memory_allocated() == 200 * MIB
    del again


def test_an_operator_that_runs_out_leaves_its_arguments_alone() -> None:
    x = zeros(60 * MIB)
    x.requires_grad_()
    before = torch.cuda.memory_allocated()
    for attempt in (lambda: (x * 2) * (x * 3) * (x * 4), lambda: (x.sin() * x.cos()).exp().sum().backward()):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert torch.cuda.memory_allocated() == before
    assert x.grad is None


def test_a_program_can_catch_it_and_try_a_smaller_batch() -> None:
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    batch, tried = 1 << 18, []
    while True:
        tried.append(batch)
        try:
            layer(zeros(batch, 1024)).sum().backward()
            break
        except torch.cuda.OutOfMemoryError:
            batch //= 2
    assert tried == [1 << 18, 1 << 17, 1 << 16]
    assert layer.weight.grad is not None


def test_each_device_runs_out_by_itself() -> None:
    kept = zeros(600 * MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has"):
        zeros(600 * MIB, dtype=torch.uint8, device="cuda:1")
    assert zeros(600 * MIB, dtype=torch.uint8, device="cuda:0").device.index == 0
    del kept


def test_a_memory_fraction_is_a_limit() -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    with pytest.raises(torch.OutOfMemoryError, match=r"256\.00 MiB allowed"):
        zeros(300 * MIB, dtype=torch.uint8)


# ---- what the user sees of it

WAYS: list[Callable[[], Any]] = [
    lambda: fills_the_device(),
    lambda: torch.zeros(1 << 30, dtype=torch.uint8).cuda(),
    lambda: torch.tensor([1.0]).to("cuda").expand(1 << 30).clone(),
    lambda: torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1 << 15, 1 << 14, device="meta"))).to_empty(device="cuda"),
    lambda: torch.nn.Linear(3, 4, device="cuda")(zeros(2, 5)),
    lambda: zeros(3) + zeros(4),
    lambda: zeros(3, device="cuda:1") + zeros(3),
    lambda: zeros(3, 4) @ zeros(4, 2, dtype=torch.float16),
    lambda: zeros(3)[5],
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=range(len(WAYS)))
def test_no_frame_of_the_virtual_gpu_is_shown(way: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        way()
    shown = frames(caught.value)
    assert [name for name in shown if name.startswith("gpumem_magic.virtual")] == []
    assert [name for name in shown if "_subclasses" in name or "_meta" in name or "_refs" in name] == []
    assert shown[0] == __name__
    assert own_frames(caught.value) <= 2
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    leave_out_ours(caught.value)
    assert own_frames(caught.value) == 0


def test_a_plain_cell_shows_the_programs_frames_alone() -> None:
    """IPython hides no frame that is the last one."""
    with clean_shell() as shell, capture_output(display=False) as shown:
        shell.run_line_magic("load_ext", "gpumem_magic")
        for line in ("torch.zeros(3, device='cuda') + torch.zeros(4, device='cuda')", "{}['other']"):
            shell.run_cell(f"import torch\n{line}")
    assert shown.stdout.count("----> 2") == shown.stdout.count("Traceback") == 2
    assert "gpumem_magic" not in shown.stdout


def test_a_failure_of_our_own_keeps_its_frames() -> None:
    with pytest.raises(ValueError, match="rows") as caught:
        Report.show(None, "some")  # type: ignore[arg-type]
    leave_out_ours(caught.value)
    assert own_frames(caught.value) == 1


def test_frames_of_the_program_within_a_backward_pass_are_shown() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)

    def complain(gradient: torch.Tensor) -> None:
        raise ValueError("the program's own")

    weight.register_hook(complain)
    with pytest.raises(ValueError, match="the program's own") as caught:
        (weight * 2).sum().backward()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "complain"
    assert own_frames(caught.value) <= 1


def test_below_an_operator_no_frame_is_shown() -> None:
    x = zeros(160 * MIB).requires_grad_()
    for fails in (lambda: x.softmax(-1), lambda: x * x, lambda: x.double()):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fails()
        assert set(frames(caught.value)) == {__name__}


def test_frames_of_the_program_within_an_operator_of_c_are_shown() -> None:
    def pack(kept: torch.Tensor) -> torch.Tensor:
        raise ValueError("the program's own")

    weight = torch.ones(4, device="cuda", requires_grad=True)
    with (
        pytest.raises(ValueError, match="the program's own") as caught,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept),
    ):
        weight.exp()
    assert frames(caught.value) == [__name__, __name__]


def test_an_error_that_the_program_was_dealing_with_stays_its_context() -> None:
    def deal_with_it() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            fills_the_device()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        deal_with_it()
    assert isinstance(caught.value.__context__, KeyError)


def test_tensors_of_the_failed_operator_do_not_live_in_its_traceback() -> None:
    x = zeros(80 * MIB)
    try:
        x.double()
    except torch.OutOfMemoryError as error:
        caught = error
    assert torch.cuda.memory_allocated() == 320 * MIB
    del x
    assert torch.cuda.memory_allocated() == 0
    assert str(caught).startswith("CUDA out of memory")


def test_shape_errors_are_not_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG, logger="torch._subclasses.fake_tensor"):
        for way in (lambda: zeros(3, 4) @ zeros(3, 4), lambda: F.conv2d(zeros(1, 2, 3, 3), zeros(1, 3, 3, 3))):
            with pytest.raises(RuntimeError):
                way()
    assert [record for record in caplog.records if "failed" in record.getMessage()] == []
    assert "failed" not in capfd.readouterr().err


# ---- devices and types that do not fit


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (
            lambda: torch.nn.Linear(4, 4, device="cuda")(torch.zeros(2, 4)),
            "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0 "
            "(when checking argument in method wrapper_CUDA_addmm)",
        ),
        (
            lambda: F.embedding(torch.zeros(2, dtype=torch.long), zeros(4, 4)),
            "Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0 "
            "(when checking argument in method wrapper_CUDA__index_select)",
        ),
        (
            lambda: zeros(3) + torch.zeros(3),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: zeros(3) * zeros(3, device="cuda:1"),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!",
        ),
        (
            lambda: torch.mm(torch.zeros(3, 3), zeros(3, 3)),
            "Expected all tensors to be on the same device, but got mat2 is on cuda:0, different from other tensors on cpu "
            "(when checking argument in method wrapper_CUDA_mm)",
        ),
        (
            lambda: torch.nn.Linear(4, 4, device="cpu")(zeros(2, 4)),
            "Expected all tensors to be on the same device, but got mat1 is on cuda:0, different from other tensors on cpu "
            "(when checking argument in method wrapper_CUDA_addmm)",
        ),
        (
            lambda: F.embedding(zeros(2, dtype=torch.long), torch.zeros(4, 4)),
            "Expected all tensors to be on the same device, but got index is on cuda:0, different from other tensors on cpu "
            "(when checking argument in method wrapper_CUDA__index_select)",
        ),
        (
            lambda: torch.stack([torch.zeros(2), zeros(2)]),
            "Expected all tensors to be on the same device, but got tensors is on cuda:0, different from other tensors on cpu "
            "(when checking argument in method wrapper_CUDA_cat)",
        ),
        (
            lambda: zeros(3, 3).scatter_(0, torch.zeros(1, 3, dtype=torch.long), 1.0),
            "Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0 "
            "(when checking argument in method wrapper_CUDA_scatter__value)",
        ),
        (
            lambda: torch.searchsorted(zeros(3), torch.zeros(3)),
            "Expected all tensors to be on the same device, but got self is on cpu, different from other tensors on cuda:0 "
            "(when checking argument in method wrapper_CUDA_Tensor_searchsorted)",
        ),
        (
            lambda: zeros(3).clamp(torch.zeros(3)),
            "Expected all tensors to be on the same device, but got min is on cpu, different from other tensors on cuda:0 "
            "(when checking argument in method wrapper_CUDA_clamp_Tensor)",
        ),
        (
            lambda: F.mse_loss(zeros(2, 3), torch.zeros(2, 3)),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: F.mse_loss(torch.zeros(2, 3), zeros(2, 3)),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: F.smooth_l1_loss(zeros(2), torch.zeros(2)),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: F.binary_cross_entropy(zeros(2), torch.zeros(2)),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: zeros(3).masked_fill(torch.zeros(3).bool(), 1.0),
            "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
        ),
        (
            lambda: torch.zeros(3).masked_fill(torch.zeros(3).bool(), zeros(())),
            "masked_fill_: Expected inputs to be on same device",
        ),
        (
            lambda: F.scaled_dot_product_attention(zeros(1, 1, 2, 4), *[torch.zeros(1, 1, 2, 4)] * 2),
            "Expected query, key, and value to have the same device type, but got query.device: cuda:0 key.device: cpu and "
            "value.device: cpu instead.",
        ),
        (
            lambda: setattr(zeros(2).requires_grad_(), "grad", torch.zeros(2)),
            "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'. Please ensure that the "
            "gradient and the tensor are on the same device",
        ),
        (
            lambda: F.embedding(zeros(2), zeros(3, 3)),
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
            "torch.cuda.FloatTensor instead (while checking arguments for embedding)",
        ),
        (
            lambda: torch.fft.fft(zeros(6, dtype=torch.float16)),
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal "
            "size of[6]",
        ),
        (
            lambda: F.conv2d(torch.zeros(1, 2, 3, 3), zeros(1, 2, 3, 3)),
            "Expected all tensors to be on the same device, but got weight is on cuda:0, different from other tensors on cpu "
            "(when checking argument in method wrapper_CUDA___slow_conv2d_forward)",
        ),
        (
            lambda: F.conv2d(torch.zeros(2, 2, 3, 3), zeros(1, 2, 3, 3)),
            "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should be a "
            "MKLDNN tensor and weight is a dense tensor",
        ),
        (
            lambda: F.conv2d(zeros(2, 2, 3, 3), torch.zeros(1, 2, 3, 3)),
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
        ),
        (
            lambda: zeros(2, 2).index_put_((zeros(1, dtype=torch.long),), torch.zeros(1, 2)),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: torch._foreach_add([zeros(2)], [torch.zeros(2)]),
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
        (
            lambda: zeros(2).masked_fill_(zeros(2, dtype=torch.uint8), 1),
            "masked_fill only supports boolean masks, but got dtype Byte",
        ),
        (
            lambda: zeros(2).masked_scatter(zeros(2, dtype=torch.uint8), zeros(2)),
            "masked_scatter_ only supports boolean masks, but got mask with dtype Byte",
        ),
        (
            lambda: torch.mm(zeros(3, 3), zeros(3, 3, dtype=torch.float16)),
            "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
        ),
        (
            lambda: torch.nn.GRU(2, 2)(zeros(3, 2)),
            "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and parameter tensor at cpu",
        ),
        (
            lambda: torch.nn.LSTM(2, 2, device="cuda")(torch.zeros(3, 2)),
            "Input and parameter tensors are not at the same device, found input tensor at cpu and parameter tensor at cuda:0",
        ),
        (
            lambda: torch.nn.LSTM(2, 2, device="cuda")(zeros(3, 2), (torch.zeros(1, 2), torch.zeros(1, 2))),
            "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden tensor at cpu",
        ),
        (
            lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
            "Expected a 'cuda' device type for generator but found 'cpu'",
        ),
        (
            lambda: zeros(3).normal_(generator=torch.Generator()),
            "Expected a 'cuda' device type for generator but found 'cpu'",
        ),
        (
            lambda: torch.randperm(3, generator=torch.Generator("cuda")),
            "Expected a 'cpu' device type for generator but found 'cuda'",
        ),
        (lambda: zeros(2, dtype=torch.long).softmax(0), "\"host_softmax\" not implemented for 'Long'"),
        (lambda: torch.linalg.svd(zeros(2, 2).bfloat16()), "\"svd_cuda_gesvdjBatched\" not implemented for 'BFloat16'"),
        (lambda: torch.linalg.svd(zeros(40, 2).bfloat16()), "\"svd_cuda_gesvdj\" not implemented for 'BFloat16'"),
        (lambda: torch.linalg.eigvalsh(zeros(2, 2).half()), "\"linalg_eigh_cuda\" not implemented for 'Half'"),
        (lambda: torch.linalg.cholesky(zeros(2, 2).half()), "\"cholesky_cusolver\" not implemented for 'Half'"),
        (lambda: torch.linalg.qr(zeros(40, 2).half()), "\"geqrf_cuda\" not implemented for 'Half'"),
        (lambda: torch.linalg.qr(zeros(9, 4, 2).half()), "\"geqrf_batched_cuda\" not implemented for 'Half'"),
        (lambda: torch.geqrf(zeros(4, 2).half()), "\"geqrf_cuda\" not implemented for 'Half'"),
        (lambda: torch.linalg.lu(zeros(2, 2).half()), "\"lu_factor_cusolver\" not implemented for 'Half'"),
        (lambda: torch.linalg.det(zeros(9, 2, 2).half()), "\"lu_factor_cublas\" not implemented for 'Half'"),
        (lambda: torch.linalg.eig(zeros(2, 2).half()), "\"linalg_eig_cuda\" not implemented for 'Half'"),
        (
            lambda: torch.cholesky_solve(zeros(2, 2).half(), zeros(2, 2).half()),
            "\"cholesky_cuda_potrs\" not implemented for 'Half'",
        ),
        (lambda: torch.cholesky_inverse(zeros(2, 2).half()), "\"cholesky_cuda_potri\" not implemented for 'Half'"),
        (
            lambda: torch.linalg.householder_product(zeros(3, 2).half(), zeros(2).half()),
            "\"orgqr_cuda\" not implemented for 'Half'",
        ),
        (
            lambda: torch.ormqr(zeros(3, 2).half(), zeros(2).half(), zeros(3, 4).half()),
            "\"orgmr_cuda\" not implemented for 'Half'",
        ),
        (lambda: torch.linalg.ldl_factor(zeros(2, 2).half()), "\"ldl_factor_looped_cusolver\" not implemented for 'Half'"),
        (
            lambda: torch.linalg.ldl_solve(zeros(2, 2).half(), zeros(2, dtype=torch.int32), zeros(2, 1).half()),
            "\"ldl_solve_looped_cusolver\" not implemented for 'Half'",
        ),
        # (Up to 8 rows, up to 64, and as many columns as rows: `lu_solve_kernel` in BatchLinearAlgebra.cpp of ATen's CUDA.)
        (
            lambda: torch.linalg.lu_solve(zeros(2, 2).half(), zeros(2, dtype=torch.int32), zeros(2, 1).half()),
            "\"lu_solve_cublas\" not implemented for 'Half'",
        ),
        (
            lambda: torch.linalg.lu_solve(zeros(40, 40).half(), zeros(40, dtype=torch.int32), zeros(40, 1).half()),
            "\"lu_solve_cusolver\" not implemented for 'Half'",
        ),
        (
            lambda: torch.linalg.lu_solve(zeros(20, 20).half(), zeros(20, dtype=torch.int32), zeros(20, 20).half()),
            "\"triangular_solve_cuda\" not implemented for 'Half'",
        ),
        (
            lambda: torch.linalg.solve(zeros(99, 40, 40).bfloat16(), zeros(99, 40, 1).bfloat16()),
            "\"lu_factor_magma_batched\" not implemented for 'BFloat16'",
        ),
        (
            lambda: torch.linalg.solve_triangular(zeros(2, 2).half(), zeros(2, 2).half(), upper=True),
            "\"triangular_solve_cuda\" not implemented for 'Half'",
        ),
        (
            lambda: F.conv2d(zeros(1, 2, 3, 3, dtype=torch.float16), zeros(1, 2, 3, 3)),
            "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        ),
        (
            lambda: zeros(3, 4).numpy(),
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
        ),
        (
            lambda: zeros(3).pin_memory(),
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_in_pytorchs_words(way: Callable[[], Any], text: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        way()
    assert str(caught.value) == text


def test_a_generator_of_the_same_device_and_matrices_without_elements_are_not_refused() -> None:
    assert torch.randn(3, device="cuda", generator=torch.Generator("cuda")).is_cuda
    assert torch.randperm(3, generator=torch.Generator()).tolist() != []
    assert torch.linalg.cholesky(zeros(0, 0).half()).shape == (0, 0)


@pytest.mark.parametrize("named", [{}, {"device": "cuda"}, {"device": "cuda:0", "dtype": torch.float32}])
@pytest.mark.parametrize("drawn", [False, True])
def test_numbers_of_a_normal_distribution_are_drawn_into_what_is_given(named: dict[str, Any], drawn: bool) -> None:
    out = torch.zeros(10, device="cuda")
    given = {**named, "generator": torch.Generator("cuda")} if drawn else named
    before = torch.cuda.memory_allocated()
    assert torch.normal(0.5, 1.0, (10,), out=out, **given) is out
    assert torch.cuda.memory_allocated() == before
    assert torch.rand(10, out=out, **given) is out
    mean = torch.zeros(3, device="cuda")
    assert torch.normal(mean=mean, std=1.0, **({"generator": given["generator"]} if drawn else {})).is_cuda


def test_no_default_device_counts_for_numbers_of_a_normal_distribution() -> None:
    with torch.device("cuda"):
        assert torch.normal(0.0, 1.0, (3,)).is_cpu


def test_a_changed_tensor_that_backward_needs_has_its_type_in_the_error() -> None:
    out = zeros(3).requires_grad_().exp()
    out.add_(1)
    with pytest.raises(RuntimeError, match=r"\[torch\.cuda\.FloatTensor \[3\]\], which is output 0 of"):
        out.sum().backward()


def test_matrices_too_large_for_the_host_are_refused_likewise() -> None:
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(8192x8192 and 4x4\)$"):
        torch.mm(zeros(8192, 8192, dtype=torch.float16), zeros(4, 4, dtype=torch.float16))


def test_a_host_number_goes_with_any_device() -> None:
    assert (zeros(3) * torch.tensor(2.0)).device.index == 0
    assert torch.where(zeros(3) > 0, torch.tensor(1.0), zeros(3)).is_cuda


SHAPES: list[Callable[[str], Any]] = [
    lambda d: torch.zeros(3, 4, device=d) + torch.zeros(5, device=d),
    lambda d: torch.zeros(3, 4, device=d).add_(torch.zeros(5, device=d)),
    lambda d: torch.cat([torch.zeros(3, 4, device=d), torch.zeros(3, device=d)]),
    lambda d: torch.cat([torch.zeros(3, 4, device=d), torch.zeros(3, 5, device=d)]),
    lambda d: torch.zeros(3, 4, device=d) @ torch.zeros(3, 4, device=d),
    lambda d: torch.bmm(torch.zeros(3, 4, 5, device=d), torch.zeros(3, 4, 5, device=d)),
    lambda d: torch.zeros(3, 4, device=d).view(5),
    lambda d: torch.zeros(3, 4, device=d).t().view(-1),
    lambda d: F.conv2d(torch.zeros(3, 4, 5, 5, device=d), torch.zeros(3, 5, 3, 3, device=d)),
    lambda d: F.layer_norm(torch.zeros(3, 4, device=d), (5,)),
    lambda d: F.embedding(torch.zeros(3, 4, dtype=torch.long, device=d), torch.zeros(7, device=d)),
    lambda d: torch.stack([torch.zeros(3, 4, device=d), torch.zeros(3, device=d)]),
    lambda d: torch.zeros(3, 4, device=d).sum(5),
    lambda d: F.cross_entropy(torch.zeros(3, 4, device=d), torch.zeros(5, dtype=torch.long, device=d)),
    lambda d: F.cross_entropy(torch.zeros(3, 4, device=d), torch.zeros(3, 2, device=d)),
    lambda d: F.batch_norm(torch.zeros(3, 4, device=d), torch.zeros(5, device=d), torch.ones(5, device=d)),
    lambda d: torch.zeros(3, 4, device=d)[torch.zeros(3, dtype=torch.long, device=d), torch.zeros(2, dtype=torch.long, device=d)],
    lambda d: torch.zeros(3, 4, device=d).index_put(
        (torch.zeros(3, dtype=torch.long, device=d), torch.zeros(2, dtype=torch.long, device=d)), torch.zeros((), device=d)
    ),
    lambda d: torch.zeros(3, 4, device=d).masked_select(torch.zeros(5, dtype=torch.bool, device=d)),
    lambda d: torch.ops.aten.mse_loss(torch.zeros(3, 4, device=d), torch.zeros(5, device=d)),
]  # fmt: skip


@pytest.mark.parametrize("way", SHAPES, ids=range(len(SHAPES)))
def test_wrong_shapes_are_refused_in_the_words_that_host_and_device_share(way: Callable[[str], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError)) as on_host:
        way("cpu")
    with pytest.raises(type(on_host.value)) as on_device:
        way("cuda")
    assert str(on_device.value) == str(on_host.value)


def test_a_device_number_that_there_is_not() -> None:
    for way, wanted in (
        (lambda: zeros(3, device="cuda:2"), 3),
        (lambda: torch.zeros(3).to("cuda:7"), 8),
        (lambda: torch.cuda.set_device(2), 3),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal") as caught:
            way()
        assert f"has 2 devices and no cuda:{wanted - 1}; turn on as many as it takes, as with `{wanted}xT4`" in str(
            caught.value
        )
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_name(5)


def test_an_operator_without_a_shape_rule_says_which_and_what_to_do() -> None:
    with pytest.raises(NotImplementedError) as caught:
        torch.ops.aten._transform_bias_rescale_qkv(zeros(2, 3, 12), zeros(12), 2)
    assert "aten._transform_bias_rescale_qkv" in str(caught.value)
    assert "Run this line on the host" in str(caught.value)


@pytest.mark.parametrize("name", ["numpy", "item", "tolist"])
def test_a_temporary_that_cannot_be_converted_is_free_while_its_error_is_handled(name: str) -> None:
    x = zeros(2, MIB // 8, dtype=torch.float32)
    args = (1, 2) if name == "tolist" else ()
    before = torch.cuda.memory_allocated()
    with pytest.raises((TypeError, RuntimeError)) as caught:
        getattr(x * 2, name)(*args)
    assert caught.value.__traceback__ is not None
    assert torch.cuda.memory_allocated() == before


# ---- what C++ warns of


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is shown of warnings, on a device that is turned on behind it: (message, category, file, line, ...)."""
    found: list[Any] = []
    gpu.turn_off()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *said: found.append(said))
        gpu.turn_on("virtual:1GiB")
        torch.set_warn_always(True)
        yield found
        torch.set_warn_always(False)
        gpu.turn_off()


def test_it_is_said_at_the_programs_line(shown: list[Any]) -> None:
    def reversed_twice(x: torch.Tensor) -> torch.Tensor:
        return x.T

    x = zeros(2, 3, 4)
    reversed_twice(x)
    ((message, category, file, line, *_),) = shown
    assert category is UserWarning
    assert "The use of `x.T`" in str(message)
    assert (file, line) == (__file__, reversed_twice.__code__.co_firstlineno + 1)


def test_it_is_recorded_at_the_programs_line(shown: list[Any]) -> None:
    def reversed_twice(x: torch.Tensor) -> torch.Tensor:
        return x.T

    x = zeros(2, 3, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        reversed_twice(x)
    (one,) = found
    assert "The use of `x.T`" in str(one.message)
    assert (one.filename, one.lineno) == (__file__, reversed_twice.__code__.co_firstlineno + 1)
    assert not shown


def test_what_the_program_warns_of_itself_stays_where_it_was(shown: list[Any]) -> None:
    warnings.warn("mine", RuntimeWarning, stacklevel=1)
    ((message, category, file, *_),) = shown
    assert (str(message), category, file) == ("mine", RuntimeWarning, __file__)
