"""Results lie as CUDA's kernels have them, where PyTorch's shape rules say otherwise: worked out from the kernels' host code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True, params=["", ",values=real"])
def device(request: pytest.FixtureRequest) -> None:
    gpu.turn_on(f"A100-40GB,torch=2.13{request.param}")


def turned(*shape: int) -> torch.Tensor:
    """Its last two dimensions lie the other way round."""
    return torch.randn(*shape, device="cuda").transpose(-1, -2).contiguous().transpose(-1, -2)


def gradient(call: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor, turns: bool = True) -> torch.Tensor:
    given = given.requires_grad_()
    out = call(given)
    weights = turned(*out.shape) if turns else torch.ones_like(out)
    (found,) = torch.autograd.grad(out, given, weights)
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.rms_norm(x, (6,)),
        lambda x: F.log_softmax(x, -1),
    ],
    ids=["layer_norm", "rms_norm", "log_softmax"],
)
def test_a_gradient_is_made_in_one_piece(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert gradient(call, torch.randn(2, 4, 6, device="cuda")).is_contiguous()


@pytest.mark.parametrize("loss", [F.huber_loss, F.mse_loss, F.smooth_l1_loss])
def test_a_loss_gives_a_gradient_in_one_piece_for_what_is_turned(loss: Callable[..., torch.Tensor]) -> None:
    target = torch.zeros(4, 6, device="cuda")
    assert gradient(lambda x: loss(x, target), turned(4, 6), turns=False).is_contiguous()


@pytest.mark.parametrize(
    "call",
    [F.hardtanh, F.hardswish, lambda x: torch.logit(x, 0.1), F.elu, F.softplus, F.hardsigmoid],
    ids=["tanh", "swish", "logit", "elu", "softplus", "sigmoid"],
)
def test_what_goes_number_by_number_lies_as_the_gradient_that_came(
    call: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert gradient(call, torch.rand(2, 4, 6, device="cuda")).stride() == (24, 1, 4)


@pytest.mark.parametrize("call", [torch.copysign, torch.xlogy])
def test_of_two_that_lie_otherwise_the_first_decides(call: Callable[..., torch.Tensor]) -> None:
    plain = torch.rand(2, 4, 6, device="cuda")
    assert call(plain, turned(2, 4, 6)).is_contiguous()
    assert call(turned(2, 4, 6), plain).stride() == (24, 1, 4)
    assert call(plain, 2.0).shape == call(plain, torch.rand(4, 1, device="cuda")).shape == plain.shape


def test_in_inference_mode_a_part_of_a_weight_is_viewed_as_a_batch_of_one() -> None:
    # As position embeddings are (YOLOS): a view of what was made outside of it is none of inference mode.
    weight = torch.nn.Parameter(torch.zeros(1, 91, 96, device="cuda"))
    with torch.inference_mode():
        found = weight[:, 1:-10].transpose(1, 2).view(1, 96, 8, 10)
    assert found.shape == (1, 96, 8, 10)
    assert not found.is_inference()
    assert found.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("channels", [3, 16])
def test_an_image_with_channels_last_stays_so_when_it_is_made_larger(channels: int) -> None:
    image = torch.rand(2, channels, 4, 4, device="cuda").to(memory_format=torch.channels_last)
    larger = F.interpolate(image, scale_factor=2, mode="bilinear")
    assert larger.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", [",values=real"], indirect=True)
def test_values_are_the_hosts_however_a_gradient_lies() -> None:
    given, weights = torch.randn(2, 4, 6), torch.randn(2, 6, 4).transpose(1, 2)
    found = []
    for place in ("cpu", "cuda"):
        here = given.to(place, copy=True).requires_grad_()
        out = F.layer_norm(here, (6,)) * F.hardswish(here)
        out.backward(weights.to(place))
        assert here.grad is not None
        found.append(here.grad.cpu())
    torch.testing.assert_close(*found)


def test_a_view_of_a_normed_gradient_needs_no_copy() -> None:
    """In Swin a mean over positions gives a turned gradient, and the layer below views what the norm makes of it."""
    given = torch.randn(2, 4, 6, device="cuda", requires_grad=True)
    out = F.layer_norm(given.view(8, 6).view(2, 4, 6), (6,))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.autograd.grad(out, given, turned(2, 4, 6))
    # The turned weights take two, the gradient one, and its copy of what came one.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 4


@pytest.mark.parametrize(
    ("shape", "strides", "viewed"),
    [
        ((2, 1, 8, 32), (256, 32, 32, 1), (2, 1, 256)),
        ((2, 8, 1, 32), (256, 32, 256, 1), (2, 8, 32, 1)),
        ((4, 1, 6), (6, 99, 1), (4, 1, 2, 3)),
        ((1, 5), (7, 1), (5, 1, 1)),
        ((3, 4, 1), (8, 1, 4), (3, 2, 1, 2)),
    ],
)
def test_a_view_with_dimensions_of_one_lies_as_the_hosts(
    shape: tuple[int, ...], strides: tuple[int, ...], viewed: tuple[int, ...]
) -> None:
    host, here = (torch.empty_strided(shape, strides, device=device) for device in ("cpu", "cuda"))
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        view = here.view(viewed)
        assert view.stride() == host.view(viewed).stride()
        assert view.untyped_storage()._cdata == here.untyped_storage()._cdata
    assert torch.cuda.memory_allocated() == before


def test_a_heads_only_token_is_no_copy_for_the_product_that_follows() -> None:
    """Generation token by token: what attention gives lies so."""
    heads = torch.empty_strided((2, 8, 1, 32), (256, 32, 32, 1), device="cuda")
    weight = torch.zeros(64, 256, device="cuda")
    with torch.inference_mode():
        F.linear(heads.flatten(1), weight)  # the workspace
        assert made(lambda: F.linear(heads.transpose(1, 2).reshape(2, 1, 256), weight)) == [2 * 64 * 4]


@pytest.mark.parametrize(
    ("its_strides", "expected"),
    [((64, 64, 8, 1), (64, 64, 8, 1)), ((64, 1, 8, 1), (64, 1, 8, 1))],
    ids=["plain", "last"],
)
def test_a_convolution_of_one_channel_to_one_lies_as_its_image(
    its_strides: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Both are contiguous either way; cuDNN's result has the strides of the layout that the image's are like."""
    image = torch.empty_strided((2, 1, 8, 8), its_strides, device="cuda", requires_grad=True)
    weight = torch.zeros(1, 1, 3, 3, device="cuda", requires_grad=True)
    out = F.conv2d(image, weight, padding=1)
    assert out.stride() == expected
    of_image, of_weight = torch.autograd.grad(out, (image, weight), torch.ones(2, 1, 8, 8, device="cuda"))
    assert of_image.stride() == expected
    assert of_weight.stride() == ((9, 1, 3, 1) if expected[1] == 1 else (9, 9, 3, 1))


def test_a_gradient_of_one_channel_is_copied_where_the_images_channels_are_last() -> None:
    """`to`, though no value moves."""
    image = torch.zeros(2, 4, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    weight = torch.zeros(1, 4, 1, 1, device="cuda", requires_grad=True)
    out = F.conv2d(image, weight)
    assert out.stride() == (64, 1, 8, 1)
    plain = torch.ones(2, 1, 8, 8, device="cuda")
    asked = made(lambda: torch.autograd.grad(out, weight, plain))
    assert asked[0] == plain.nbytes
    assert plain.nbytes not in made(lambda: torch.autograd.grad(F.conv2d(image, weight), weight, out))[1:]


def test_a_sequence_of_one_channel_goes_through_as_an_image_of_one_row() -> None:
    """Its stride of the channel is then like that of channels last."""
    weight = torch.zeros(4, 1, 3, device="cuda")
    plain, other = torch.zeros(2, 1, 8, device="cuda"), torch.empty_strided((2, 1, 8), (8, 1, 1), device="cuda")
    assert F.conv1d(plain, weight, padding=1).stride() == (32, 8, 1)
    assert F.conv1d(other, weight, padding=1).stride() == (32, 1, 4)


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_a_margin_gives_a_gradient_in_one_piece(loss: Callable[..., torch.Tensor]) -> None:
    target = torch.zeros(4, dtype=torch.long, device="cuda")
    if loss is F.multilabel_margin_loss:
        target = torch.zeros(4, 6, dtype=torch.long, device="cuda")
    assert gradient(lambda x: loss(x, target), turned(4, 6), turns=False).is_contiguous()


def test_a_dropouts_gradient_lies_plainly_or_with_the_channels_last() -> None:
    sequence, image = torch.ones(2, 4, 6, device="cuda"), torch.ones(2, 3, 4, 5, device="cuda")
    assert gradient(lambda x: F.dropout(x, 0.5), sequence).is_contiguous()
    image = image.requires_grad_()
    out = F.dropout(image, 0.5)
    (found,) = torch.autograd.grad(out, image, torch.ones_like(out, memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_group_norm_gives_the_strides_of_one_piece_where_an_image_is_a_single_point() -> None:
    """So that a convolution behind it does not take its channels for the last dimension."""
    image = torch.empty_strided((2, 4, 1, 1), (4, 1, 4, 4), device="cuda", requires_grad=True)
    out = F.group_norm(image * 1.0, 2)
    assert out.stride() == (4, 1, 1, 1)
    assert F.conv2d(out, torch.zeros(3, 4, 1, 1, device="cuda")).stride() == (3, 1, 1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.add(x, x, out=out),
        lambda x, out: torch.sin(x, out=out),
        lambda x, out: torch.where(x > 0, x, x, out=out),
        lambda x, out: torch.clamp(x, 0, 1, out=out),
        lambda x, out: torch.pow(x, 2, out=out),
        lambda x, out: torch.addcmul(x, x, x, out=out),
    ],
    ids=["add", "sin", "where", "clamp", "pow", "addcmul"],
)
def test_what_is_written_to_lies_as_the_operands_do_once_it_was_given_another_size(
    call: Callable[..., torch.Tensor],
) -> None:
    """As on the host, whose kernels go through `TensorIterator` too."""
    images = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for source in (torch.ones(3, 4, 5).permute(2, 0, 1), images, torch.ones(3, 4)):
        given, dtype = source.to("cuda"), source.dtype
        out = torch.empty(0, dtype=dtype, device="cuda")
        assert call(given, out) is out
        assert out.stride() == call(source, torch.empty(0, dtype=dtype)).stride()
        # What has that size already keeps its strides.
        kept = torch.empty(source.shape, dtype=dtype, device="cuda")
        assert call(given, kept).is_contiguous()
