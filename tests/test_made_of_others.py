"""Operators that are made of others take on a card what their parts take; sizes that `out=` changes are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch_versions import TORCH

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.rules import SPECIAL
from gpumem_magic.virtual.operators import made_of_others

ROWS, COLUMNS = 512, 1024
WHOLE = ROWS * COLUMNS * 4


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB,context=0")
    gpu.turn_off()


def sizes(run: Callable[[], object]) -> list[int]:
    """Bytes of each allocation while it runs, those of 4 KiB or less left out."""
    torch.cuda.memory._record_memory_history()
    kept = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return [event["size"] for event in trace if event["action"] == "alloc" and event["size"] > 4096]


@pytest.mark.parametrize(
    ("run", "wholes"),
    [
        # log(sigmoid(x)); 1 - y, which the rest is done to in place.
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y), [1, 1]),
        # x - maximum, whose exponential is taken in place.
        (lambda x, y: x.logsumexp(1), [1]),
        # x - y.
        (lambda x, y: torch.dist(x, y), [1]),
        # |x|, and a byte for each.
        (lambda x, y: x.isinf(), [1, 1 / 4]),
        # Squares, ones beside x and its norms in one, likewise for y; the product.
        (lambda x, y: torch.cdist(x, y), [1, 1, 1, 1, 1, 1 / 2]),
        # -y, whose rest is done in place.
        (lambda x, y: F.soft_margin_loss(x, y), [1]),
    ],
)  # fmt: skip
def test_parts_are_allocated_as_on_a_card(run: Callable[..., object], wholes: list[float]) -> None:
    x, y = (torch.zeros(ROWS, COLUMNS, device="cuda") for _ in range(2))
    run(x, y)  # cuBLAS's workspace stays
    assert [round(size / WHOLE, 1) for size in sizes(lambda: run(x, y))] == [round(part, 1) for part in wholes]


@pytest.mark.parametrize(
    "write",
    [
        lambda part, row: part.slice_scatter(row[None], 0, 2, 3),
        lambda part, row: part.select_scatter(row, 0, 2),
        lambda part, row: part.diagonal_scatter(row[:8]),
        lambda part, row: part.as_strided_scatter(row, (COLUMNS,), (1,)),
    ],
)
def test_another_tensor_with_a_part_written_copies_the_whole_storage(write: Callable[..., torch.Tensor]) -> None:
    """As on the host, where the same function runs; the same each time."""
    x, row = torch.zeros(ROWS, COLUMNS, device="cuda"), torch.zeros(COLUMNS, device="cuda")
    on_host = write(torch.zeros(ROWS, COLUMNS)[4:12], torch.zeros(COLUMNS))
    for _ in range(2):
        assert sizes(lambda: write(x[4:12], row)) == [WHOLE]
        found = write(x[4:12], row)
        assert (found.storage_offset(), found.stride()) == (on_host.storage_offset(), on_host.stride())
        assert found.untyped_storage().nbytes() == on_host.untyped_storage().nbytes() == WHOLE


def test_a_tangent_lies_as_its_tensor_each_time() -> None:
    """PyTorch's fake mode gives what it remembers of one no place in its storage, and a view of both would differ."""
    table = torch.zeros(ROWS, 2, device="cuda")
    for _ in range(3):
        times = table[:, 1]
        _, tangent = torch.func.jvp(lambda t: t[:, None] * 2, (times,), (torch.ones_like(times),))
        assert tangent.shape == (ROWS, 1)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(times, torch.ones_like(times))
            lies = torch.autograd.forward_ad.unpack_dual(dual).tangent
            assert (lies.stride(), lies.storage_offset()) == (times.stride(), times.storage_offset())


def test_the_median_of_all_sorts_all() -> None:
    x = torch.zeros(ROWS, COLUMNS, device="cuda")
    values, indices, *_ = sizes(x.median)
    assert (values, indices) == (WHOLE, 2 * WHOLE)
    assert x[:0].median().shape == ()


@pytest.mark.parametrize("values", ["none", "auto", "real"])
def test_results_and_gradients_are_those_of_the_host(values: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,context=0,values={values}" if values != "none" else "A100-40GB,context=0")
    programs: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
        lambda x: x.logsumexp((0, 1), keepdim=True),
        lambda x: torch.cdist(x, x.detach() + 1),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=torch.ones(30, 30, device=x.device) > 0),
        lambda x: F.affine_grid(x[:6, :1].reshape(1, 2, 3), [1, 1, 4, 4], align_corners=False),
        lambda x: F.bilinear(x, x, torch.ones(2, 30, 30, device=x.device)),
        lambda x: x.median(),
    )  # fmt: skip
    for number, program in enumerate(programs):
        host = torch.linspace(-1, 1, 900).view(30, 30).requires_grad_()
        card = host.detach().to("cuda").requires_grad_()
        on_host, on_card = program(host), program(card)
        assert (on_host.shape, on_host.dtype) == (on_card.shape, on_card.dtype), number
        on_host.sum().backward()
        on_card.sum().backward()
        assert card.grad is not None
        if values == "real":
            torch.testing.assert_close(on_card.detach().cpu(), on_host.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(card.grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "wholes", "with_positive"),
    [
        # The result; the logarithm of the sigmoid. With a weight of the positive that times the target first.
        ("2.3", [1, 1], [1, 1, 1]),
        # The highest; the result, and three exponents.
        ("2.2", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),
        # The logarithm, the weights, the result.
        ("2.4", [1, 1], [1, 1, 1]),
    ],
)
def test_a_cross_entropy_with_logits_as_older_versions_have_it(
    version: str, wholes: list[int], with_positive: list[int]
) -> None:
    """As the CUDA builds of 2.2 to 2.4 do."""
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,context=0,torch={version},values=real")
    host = torch.linspace(-3, 3, ROWS * COLUMNS).view(ROWS, COLUMNS)
    given = [host, host.sigmoid().flip(0), torch.full((COLUMNS,), 2.0)]
    x, y, positive = (one.cuda() for one in given)
    assert sizes(lambda: F.binary_cross_entropy_with_logits(x, y)) == [WHOLE * one for one in wholes]
    found = sizes(lambda: F.binary_cross_entropy_with_logits(x, y, x, pos_weight=positive))
    assert [size for size in found if size == WHOLE] == [WHOLE * one for one in with_positive]
    for more, reduction in ((None, "mean"), (positive, "sum"), (positive, "none")):
        on_host = None if more is None else given[2]
        expected = F.binary_cross_entropy_with_logits(*given[:2], host, reduction=reduction, pos_weight=on_host)
        card = F.binary_cross_entropy_with_logits(x, y, x, reduction=reduction, pos_weight=more)
        torch.testing.assert_close(card.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_each_has_a_function_of_all_devices() -> None:
    """Asked for one that is not there, C++ would run what lies at its place."""
    left_out = set(made_of_others._OPERATORS) - set(made_of_others._KEYS)
    # (2.9 has none for two of them, which run as other operators do.)
    assert len(left_out) == (0 if TORCH >= (2, 10) else 2)
    assert set(made_of_others._KEYS) <= set(SPECIAL)


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_group_norm_takes_numbers_for_channels_and_groups(precision: torch.dtype) -> None:
    x = torch.zeros(32, 64, 8, 8, device="cuda", dtype=precision, requires_grad=True)
    layer = torch.nn.GroupNorm(32, 64, device="cuda", dtype=precision)
    channels, groups = 32 * 64 * 4, 32 * 32 * 4
    whole = x.numel() * x.element_size()
    statistics = 32 * 32 * x.element_size()
    forward = sizes(lambda: layer(x))
    assert forward == [size for size in (whole, statistics, statistics, channels, channels) if size > 4096]
    out = layer(x)
    gradient = torch.zeros_like(out)
    backward = sizes(lambda: torch.autograd.grad(out, [x, layer.weight, layer.bias], gradient, retain_graph=True))
    assert backward == [size for size in (whole, channels, channels, groups, groups, channels) if size > 4096]


@pytest.mark.parametrize(
    ("rows", "version", "parts"), [(70_000, "2.13", 2188), (70_000, "2.6", 0), (60_000, "2.13", 0)]
)
def test_a_layer_norm_of_many_rows_adds_them_up_in_parts(rows: int, version: str, parts: int) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,context=0,torch={version}")
    x = torch.zeros(rows, 96, device="cuda", requires_grad=True)
    layer = torch.nn.LayerNorm(96, device="cuda")
    out = layer(x)
    gradient = torch.zeros_like(out)
    found = sizes(lambda: torch.autograd.grad(out, [x, layer.weight, layer.bias], gradient))
    assert found[0] == rows * 96 * 4
    assert found[1:3] == [parts * 96 * 4] * (2 * bool(parts))


def test_a_result_that_is_given_grows() -> None:
    x = torch.zeros(ROWS, COLUMNS, device="cuda")
    out = torch.empty(0, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.add(x, 1, out=out)
    assert torch.cuda.memory_allocated() - before == WHOLE
    with pytest.warns(UserWarning, match="was resized"):
        torch.sum(x, 1, out=out)
    assert torch.cuda.memory_allocated() - before == WHOLE
    del out
    assert torch.cuda.memory_allocated() == before


def test_what_is_written_by_others_is_made_and_copied() -> None:
    x = torch.zeros(ROWS * COLUMNS, device="cuda")
    number, flags = torch.zeros((), device="cuda"), torch.zeros(ROWS, COLUMNS, dtype=torch.bool, device="cuda")
    matrix = x.view(ROWS, COLUMNS)
    # The sizes, a byte for each, and the result that is copied.
    asked = sizes(lambda: torch.ops.aten.isinf.out(matrix, out=flags))
    assert asked[:2] == [WHOLE, WHOLE // 4]
    assert set(asked[2:]) <= {WHOLE // 4}
    # Of float16 numbers, made float32 in a tensor of its own.
    half, wide = x.half(), torch.zeros(ROWS * COLUMNS, device="cuda", dtype=torch.float64)
    assert sizes(lambda: torch.softmax(half, 0, dtype=torch.float64, out=wide)) == [2 * WHOLE]
    torch.dot(x, x, out=number)
    assert number.shape == ()


def test_writing_into_a_result_takes_what_making_it_takes() -> None:
    x = torch.zeros(1 << 16, 64, device="cuda")
    rows = torch.zeros(64, device="cuda")
    buffers = sizes(lambda: x.sum(0))
    assert buffers
    assert sizes(lambda: torch.amax(x, 0, out=rows)) == sizes(lambda: x.amax(0)) != []
    assert sizes(lambda: torch.mean(x, 0, out=rows)) == buffers


def test_the_variance_of_complex_numbers_is_that_of_their_parts() -> None:
    x = torch.zeros(ROWS, COLUMNS, 8, dtype=torch.complex64, device="cuda")
    part = ROWS * COLUMNS * 4
    out = torch.zeros(ROWS, COLUMNS, device="cuda")
    # Of the real and of the imaginary parts, and their sum; with the mean a pair of both, and a complex mean.
    assert sizes(lambda: x.var(2)) == [part] * 3
    assert sizes(lambda: torch.std(x, 2, out=out)) == [part] * 2
    assert sizes(lambda: torch.std_mean(x, 2)) == [*[part] * 5, 2 * part]
    assert sizes(lambda: x.real.var(2)) == [part]


def test_a_power_of_integers_is_worked_out_in_its_type() -> None:
    flags = torch.zeros(ROWS, COLUMNS, dtype=torch.bool, device="cuda")
    numbers = torch.zeros(ROWS, COLUMNS, dtype=torch.int64, device="cuda")
    assert sizes(lambda: flags.square()) == [2 * WHOLE, 2 * WHOLE]
    assert sizes(lambda: numbers**0.5) == [WHOLE, WHOLE]
    assert sizes(lambda: numbers**2) == [2 * WHOLE]


def test_transforms_into_a_result_are_made_and_copied() -> None:
    x = torch.zeros(ROWS, COLUMNS, device="cuda")
    half = COLUMNS // 2 + 1
    whole, part = (torch.zeros(ROWS, columns, dtype=torch.complex64, device="cuda") for columns in (COLUMNS, half))
    made = ROWS * half * 8
    assert sizes(lambda: torch.fft.rfft(x, out=part)) == [made]
    # The other half is filled in where it belongs.
    assert sizes(lambda: torch.fft.fft(x, out=whole)) == [made]
    assert sizes(lambda: torch.fft.irfft(part, out=x)) == [WHOLE, made]
    assert sizes(lambda: torch.logcumsumexp(x, 1, out=x)) == []


def test_numbers_are_taken_as_they_are() -> None:
    x, flags = torch.ones(ROWS, COLUMNS, device="cuda"), torch.ones(ROWS, COLUMNS, dtype=torch.int64, device="cuda")
    assert sizes(lambda: torch.remainder(x, 2.0, out=x)) == []
    assert sizes(lambda: torch.copysign(x, -3.14, out=x)) == []
    assert sizes(lambda: torch.bitwise_and(flags, 3, out=flags)) == []
    assert sizes(lambda: torch.special.zeta(x, 2.0, out=x)) == []
