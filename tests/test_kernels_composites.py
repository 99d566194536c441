"""Operators that C++ puts together differently for CUDA: what they keep and what they make on the way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import events, made
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    # (Of this version, whichever is installed: before 2.12 products with a bias keep a workspace more.)
    gpu.turn_on("A100-40GB,torch=2.13")
    yield
    gpu.turn_off()


def square(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2048, 2048, device="cuda", dtype=dtype, requires_grad=True)


def growth_and_peak(before: int) -> tuple[float, float]:
    return (torch.cuda.memory_allocated() - before) / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def test_dropout_keeps_one_byte_an_element_for_its_mask() -> None:
    x = square()
    before = torch.cuda.memory_allocated()
    y = F.dropout(x, 0.1)
    assert growth_and_peak(before)[0] == 16 + 4
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_under_vmap_dropout_has_one_byte_an_element_for_its_mask_too() -> None:
    models, of_host = torch.ones(8, 32, 128, device="cuda", requires_grad=True), torch.ones(8, 400)
    each = models.nbytes

    def dropped(one: torch.Tensor) -> torch.Tensor:
        return F.dropout(one, 0.1)

    # The mask, and the result; one mask for all is made as the input is.
    assert made(lambda: vmap(dropped, randomness="different")(models)) == [each // 4, each]
    assert made(lambda: vmap(dropped, randomness="same")(models)) == [each, each // 8, each]
    # Gradients inside and outside of it.
    inside = vmap(grad(lambda one: dropped(one).sum()), randomness="different")
    assert made(lambda: inside(models.detach()))[:2] == [each // 4, each]
    # The host's tensors are dropped by the host, with and without a device turned on.
    torch.manual_seed(0)
    here = vmap(dropped, randomness="different")(of_host)
    gpu.turn_off()
    torch.manual_seed(0)
    assert torch.equal(vmap(dropped, randomness="different")(of_host), here)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_is_its_input(p: float, train: bool) -> None:
    x = square()
    before = torch.cuda.memory_allocated()
    y = torch.dropout(x, p, train)
    assert growth_and_peak(before) == (0, 0)
    assert y.shape == x.shape


def test_dropout_of_everything_has_a_result_and_a_gradient() -> None:
    x = square()
    F.dropout(x, 1.0).sum().backward()
    assert x.grad is not None


def test_dropout_of_nothing_and_under_inference() -> None:
    assert F.dropout(torch.zeros(0, 3, device="cuda"), 0.5).shape == (0, 3)
    with torch.inference_mode():
        x = torch.zeros(2048, 2048, device="cuda")
        before = torch.cuda.memory_allocated()
        y = F.dropout(x, 0.5)
        assert growth_and_peak(before) == (16, 20)
        assert y.shape == x.shape


@pytest.mark.parametrize("operator", [F.softmax, F.log_softmax])
def test_float16_scores_become_float32_inside_the_kernel(operator: object) -> None:
    x = square(torch.float16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = operator(x, -1, dtype=torch.float32)  # type: ignore[operator]
    assert y.dtype == torch.float32
    assert growth_and_peak(before) == (16, 16)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float16


def test_bfloat16_scores_are_converted_first() -> None:
    x = square(torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = F.softmax(x, -1, dtype=torch.float32)
    assert y.dtype == torch.float32
    assert growth_and_peak(before) == (16, 32)


def test_the_hosts_own_operators_are_back_afterwards() -> None:
    F.dropout(square(), 0.5)
    gpu.turn_off()
    y = F.dropout(torch.ones(1000), 0.5)
    assert set(y.tolist()) <= {0.0, 2.0}
    gpu.turn_on("T4")


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 0), (torch.bfloat16, 16 * 4)])
def test_batch_norm_in_evaluation_keeps_what_its_kernel_returns(dtype: torch.dtype, kept: int) -> None:
    """cuDNN's has no mean and deviation, which PyTorch's own kernel has (bfloat16 goes there): two of each channel's."""
    layer = torch.nn.BatchNorm2d(16).cuda().eval()
    x = torch.zeros(4, 16, 8, 8, device="cuda", dtype=dtype)
    assert made(lambda: layer(x)) == [x.numel() * dtype.itemsize, *[kept] * (2 if kept else 0)]


def test_batch_norm_of_too_many_samples_is_not_cudnns() -> None:
    layer = torch.nn.BatchNorm1d(2).cuda().eval()
    x = torch.zeros(65536, 2, 1, device="cuda")
    assert made(lambda: layer(x[:-1])) == [65535 * 2 * 4]
    assert made(lambda: layer(x)) == [65536 * 2 * 4, 8, 8]


def test_autocast_casts_the_last_argument_first() -> None:
    layer = torch.nn.Linear(8, 16).cuda()
    x = torch.zeros(32, 8, device="cuda")
    with torch.autocast("cuda", torch.float16):
        asked = made(lambda: layer(x))
    assert asked[:4] == [16 * 2, 16 * 8 * 2, 32 * 8 * 2, 32 * 16 * 2], "bias, weight, input, result"


def test_autocast_casts_a_list_in_its_order() -> None:
    first, second = torch.zeros(4, 8, device="cuda"), torch.zeros(8, 16, device="cuda")
    with torch.autocast("cuda", torch.float16):
        asked = made(lambda: torch.einsum("ab,bc->ac", first, second))
    assert asked[:2] == [4 * 8 * 2, 8 * 16 * 2]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("version", "least"), [("2.10", []), ("2.11", [4])])
def test_how_alike_rows_are_is_limited_by_a_number_of_the_host_in_older_versions(
    version: str, least: list[int], inference: bool
) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={version}")
    x, y = torch.zeros(100, 1024, device="cuda"), torch.zeros(100, 1024, device="cuda")
    row, whole = 100 * 4, 100 * 1024 * 4
    with torch.inference_mode(inference):
        # Each norm and a copy of it; both divided, their product, and its sums.
        assert made(lambda: F.cosine_similarity(x, y)) == [row, row, row, row, *least, whole, whole, whole, row]


def test_linear_in_inference_lays_out_an_input_for_a_weight_that_may_have_a_gradient() -> None:
    x = torch.zeros(4, 3, 8, device="cuda").transpose(0, 1)
    layer = torch.nn.Linear(8, 24, device="cuda")
    torch.mm(x[0], layer.weight.detach().t())
    copied, result = 4 * 3 * 8 * 4, 4 * 3 * 24 * 4
    with torch.inference_mode():
        assert made(lambda: layer(x)) == [copied, result]
        assert made(lambda: F.linear(x, layer.weight)) == [copied, result]
        assert made(lambda: layer(x.contiguous())) == [copied, result]
        # One without gradients is multiplied matrix by matrix, as each lies.
        assert made(lambda: F.linear(x, layer.weight.detach())) == [result]


def test_batch_norm_in_inference_lets_go_of_its_first_statistic_first() -> None:
    layer = torch.nn.BatchNorm2d(3, affine=False, device="cuda", dtype=torch.float64).eval()
    x = torch.zeros(4, 3, 6, 6, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        taken = events(lambda: layer(x))
    _, mean, deviation, first, second = [one["addr"] for one in taken]
    assert (first, second) == (mean, deviation)


@pytest.mark.parametrize(("torch_version", "is_cast"), [("2.11", False), ("2.12", True)])
def test_rms_norm_under_autocast_is_worked_out_in_float32_since_212(torch_version: str, is_cast: bool) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    layer = torch.nn.RMSNorm(64, device="cuda", dtype=torch.float16)
    x = torch.zeros(2, 16, 64, device="cuda", dtype=torch.float16)
    half, rows = 2 * 16 * 64 * 2, 2 * 16 * 4
    with torch.autocast("cuda"):
        # The weight and the input, cast; the result; a number for each row.
        assert made(lambda: layer(x)) == ([64 * 4, 2 * half, 2 * half, rows] if is_cast else [half, rows])


def test_the_input_s_gradient_of_a_batch_norm_in_evaluation_needs_no_sums() -> None:
    layer = torch.nn.BatchNorm1d(3, device="cuda").eval()
    x = torch.zeros(4, 3, device="cuda", requires_grad=True)
    size = 4 * 3 * 4
    out = layer(x)
    ones = torch.ones_like(out)
    assert made(lambda: torch.autograd.grad(out, x, ones, retain_graph=True)) == [size]
    # With those of weight and bias: both sums, the two gradients, the input's.
    assert made(lambda: torch.autograd.grad(out, [x, *layer.parameters()], ones)) == [12, 12, 12, 12, size]


def test_a_batch_norm_of_no_samples_has_gradients() -> None:
    layer = torch.nn.BatchNorm2d(5, device="cuda")
    x = torch.zeros(0, 5, 2, 2, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad.shape, layer.weight.grad.shape) == ((0, 5, 2, 2), (5,))


@pytest.mark.parametrize(("torch_version", "fused"), [("2.11", False), ("2.12", True)])
def test_an_encoder_layer_s_narrow_heads_take_a_fused_kernel_since_212(torch_version: str, fused: bool) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, device="cuda").eval()
    x = torch.zeros(2, 5, 16, device="cuda")
    tokens = 2 * 5 * 16 * 4
    with torch.inference_mode():
        layer(x)
        # Queries, keys and values in one, and the context; or all of them once more, and scores.
        assert made(lambda: layer(x))[:3] == ([3 * tokens, tokens, tokens] if fused else [3 * tokens, 3 * tokens, 800])


def test_an_encoder_looks_whether_its_padding_is_at_the_end() -> None:
    inner = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device="cuda")
    encoder = torch.nn.TransformerEncoder(inner, 1).eval()
    x, padding = torch.zeros(2, 5, 16, device="cuda"), torch.zeros(2, 5, device="cuda", dtype=torch.bool)
    with torch.inference_mode():
        encoder(x, src_key_padding_mask=padding)
        found = made(lambda: encoder(x, src_key_padding_mask=padding))
    # The mask in float32, its opposite; a column of padding, both, as integers, each row's end, and how many each has;
    # whether the two are the same, and all of them.
    assert found[:10] == [40, 10, 2, 12, 48, 16, 80, 80, 2, 1]


def test_a_note_says_where_a_card_may_pack_padded_sequences() -> None:
    """`nn.TransformerEncoder` asks for nested tensors where all padding is at the end, and autograd follows nothing."""
    gpu.turn_off()
    machine = gpu.turn_on("T4,values=stand-in")
    inner = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device="cuda")
    encoder = torch.nn.TransformerEncoder(inner, 1).eval()
    x = torch.randn(2, 3, 16, device="cuda")
    known, unknown = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool().cuda(), x[..., 0] > 0.5

    def noted(padding: torch.Tensor) -> bool:
        before = machine.engine.padded_encoders
        encoder(x, src_key_padding_mask=padding)
        return machine.engine.padded_encoders > before

    assert not noted(unknown), "the parameters are followed"
    with torch.no_grad():
        assert [noted(one) for one in (known, unknown)] == [False, True]
    (note,) = [one for one in machine.notes() if "TransformerEncoder" in one]
    assert note.startswith("nn.TransformerEncoder ran on padded sequences (1 time), since where they end is unknown")


@pytest.mark.parametrize("dims", [1, 2])
def test_of_a_depthwise_convolution_the_gradient_of_the_weight_comes_first(dims: int) -> None:
    """Sequences are images of one row to it (`view4d` in Convolution.cpp)."""
    x = torch.zeros(2, 4, *[8] * dims, device="cuda", requires_grad=True)
    weight = torch.zeros(4, 1, *[3] * dims, device="cuda", requires_grad=True)
    out = (F.conv1d if dims == 1 else F.conv2d)(x, weight, groups=4)
    ones = torch.ones_like(out)
    assert made(lambda: out.backward(ones)) == [4 * 3**dims * 4, 2 * 4 * 8**dims * 4]


@pytest.mark.parametrize("dims", [1, 2])
def test_a_depthwise_convolution_s_gradient_of_the_weight_is_made_of_a_plain_input(dims: int) -> None:
    """As Mamba's layers have it (`mamba_scan` on an H100): sequences whose channels come last, and turned images."""
    x = torch.zeros(2, *[8] * (dims - 1), 8, 4, device="cuda", requires_grad=True).transpose(1, -1)
    weight = torch.zeros(4, 1, *[3] * dims, device="cuda", requires_grad=True)
    out = (F.conv1d if dims == 1 else F.conv2d)(x, weight, groups=4)
    ones, plain = torch.ones_like(out), 2 * 4 * 8**dims * 4
    assert made(lambda: torch.autograd.grad(out, (x, weight), ones)) == [plain, 4 * 3**dims * 4, plain]


def test_a_sequence_is_made_plain_for_its_convolution_s_gradients_until_the_bias_has_its_own() -> None:
    x = torch.zeros(2, 8, 4, device="cuda").transpose(1, 2).requires_grad_()
    weight, bias = (
        torch.zeros(6, 4, 3, device="cuda", requires_grad=True),
        torch.zeros(6, device="cuda", requires_grad=True),
    )
    out = F.conv1d(x, weight, bias)
    before = made(lambda: torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True))
    assert before[1] == 2 * 8 * 4 * 4, "also where no gradient needs it"


def test_a_sign_s_gradient_is_multiplied_by_numbers() -> None:
    x = torch.zeros(10, device="cuda", requires_grad=True)
    ((x * 2).sgn() * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (10,)


def test_an_out_that_nobody_wrote_a_kernel_for_makes_a_result_and_copies_it() -> None:
    # native_functions.yaml: expand_copy has `autogen: expand_copy.out`.
    row, out = torch.zeros(1, 1000, device="cuda"), torch.zeros(4, 1000, device="cuda")
    assert made(lambda: torch.expand_copy(row, (4, 1000), out=out)) == [16000]


def test_pixel_unshuffle_lies_plainly_also_of_channels_that_lie_last() -> None:
    # PixelShuffle.cpp: `math_pixel_unshuffle` is for all devices but the host, whose kernel keeps the channels last.
    images = torch.zeros(2, 2, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    assert torch.pixel_unshuffle(images, 2).is_contiguous()
    assert made(lambda: torch.pixel_unshuffle(images, 2)) == [4096]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_bias_is_added_out_of_place_under_a_dispatch_mode() -> None:
    """As an H100 was asked for it in a selective checkpoint."""
    layer, x = torch.nn.Linear(128, 384).cuda(), torch.zeros(64, 4, 128, device="cuda").transpose(0, 1)
    layer(x)  # the workspace
    copied, product = 4 * 64 * 128 * 4, 4 * 64 * 384 * 4
    assert made(lambda: layer(x)) == [copied, product]
    with Watching():
        assert made(lambda: layer(x)) == [copied, product, product]


def test_a_mean_with_smoothed_labels_is_divided_by_the_weights_of_those_that_count() -> None:
    x = torch.zeros(6, 2, device="cuda")
    labels = torch.tensor([0, 1, 0, 1, 1, 1]).cuda()
    weight = torch.ones(2, device="cuda")
    one, each = 4, 6 * 4
    loss = [x.nbytes, one, one, x.nbytes, each, each]
    counted = made(lambda: labels.masked_select(labels != 0))[1:]
    assert counted[-1] == 4 * 8
    found = made(lambda: F.cross_entropy(x, labels, weight, ignore_index=0, label_smoothing=0.1))
    assert found == [*loss, 6, 6, *counted, 4 * 4, *[one] * 6]
    # Without weights it is a mean.
    assert len(made(lambda: F.cross_entropy(x, labels, ignore_index=0, label_smoothing=0.1))) < len(found)


def test_a_batch_norm_by_its_kernels_name_is_not_cudnns() -> None:
    """It keeps a mean and a deviation in evaluation, and makes no gradient that nobody wants."""
    x = torch.zeros(4, 16, 8, 8, device="cuda", requires_grad=True)
    ones, mean, size = torch.ones(16, device="cuda"), torch.zeros(16, device="cuda"), 4 * 16 * 8 * 8 * 4

    def norm(training: bool) -> torch.Tensor:
        return torch.native_batch_norm(x, ones, mean, mean, ones, training, 0.1, 1e-5)[0]

    def whole() -> torch.Tensor:
        return F.batch_norm(x, mean, ones, ones, mean, True)

    assert made(lambda: norm(training=False)) == [size, 64, 64]
    gradient = torch.zeros_like(x)
    # (The same call by both ways, so that neither is taken for the other.)
    for out, kept in ((whole(), [size, 64, 64]), (norm(training=True), [size]), (whole(), [size, 64, 64])):
        assert made(partial(torch.autograd.grad, out, x, gradient)) == kept


def test_the_gradient_of_a_batch_norm_that_updates_has_the_own_kernels_sums() -> None:
    x = torch.zeros(4, 3, device="cuda", requires_grad=True)
    weight, bias = (torch.ones(3, device="cuda", requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    out = torch.ops.aten._batch_norm_with_update(x, weight, bias, mean, variance, 0.1, 1e-5)[0]
    ones = torch.ones_like(out)
    # Both sums, the gradients of weight and bias, the input's.
    assert made(lambda: torch.autograd.grad(out, [x, weight, bias], ones)) == [12, 12, 12, 12, 4 * 3 * 4]
