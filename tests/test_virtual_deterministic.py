"""Deterministic algorithms: what has none on a card is refused on a virtual one, in the same words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gpu.turn_off()


def image(*size: int) -> torch.Tensor:
    return torch.zeros(size or (2, 3, 8, 8), device="cuda", requires_grad=True)


def places(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.int64, device="cuda")


def classes_of_pixels(reduction: str) -> Callable[[], Any]:
    return lambda: F.nll_loss(image().log_softmax(1), places(2, 8, 8), reduction=reduction)


def bag(mode: str) -> Callable[[], Any]:
    return lambda: F.embedding_bag(places(4, 4), image(9, 8), mode=mode).sum().backward()


def pooled_back() -> Any:
    out, indices = F.max_pool2d(image(), 2, return_indices=True)
    return F.max_unpool2d(out, indices, 2)


REFUSED: dict[str, Callable[[], Any]] = {
    "adaptive_avg_pool2d_backward_cuda": lambda: F.adaptive_avg_pool2d(image(), 3).sum().backward(),
    "adaptive_avg_pool3d_backward_cuda": lambda: F.adaptive_avg_pool3d(image(1, 2, 4, 4, 4), 3).sum().backward(),
    "adaptive_max_pool2d_backward_cuda": lambda: F.adaptive_max_pool2d(image(), 3).sum().backward(),
    "avg_pool3d_backward_cuda": lambda: F.avg_pool3d(image(1, 2, 4, 4, 4), 2).sum().backward(),
    "fractional_max_pool2d_backward_cuda": lambda: F.fractional_max_pool2d(image(), 2, 3).sum().backward(),
    "max_unpooling2d_forward_out": pooled_back,
    "upsample_bicubic2d_backward_out_cuda": lambda: F.interpolate(image(), 16, mode="bicubic").sum().backward(),
    "upsample_linear1d_backward_out_cuda": lambda: F.interpolate(image(2, 3, 8), 16, mode="linear").sum().backward(),
    "upsample_bilinear2d_aa_backward_out_cuda": lambda: (
        F.interpolate(image(), 16, mode="bilinear", antialias=True).sum().backward()
    ),
    "reflection_pad1d_backward_out_cuda": lambda: F.pad(image(2, 3, 8), (2, 2), mode="reflect").sum().backward(),
    "grid_sampler_2d_backward_cuda": lambda: (
        F.grid_sample(image(), image(2, 4, 4, 2), mode="bicubic", align_corners=False).sum().backward()
    ),
    "nll_loss2d_forward_out_cuda_template": classes_of_pixels("mean"),
    "embedding_bag_backward_cuda_max": bag("max"),
    "_histc_cuda with floating point input": lambda: torch.histc(image().detach(), 10),
    "_bincount_cuda": lambda: places(9).bincount(torch.zeros(9, device="cuda")),
    "median CUDA with indices output": lambda: image().median(1),
    "put_": lambda: torch.zeros(9, device="cuda").put_(places(3), torch.ones(3, device="cuda"), accumulate=True),
    "index_reduce_cuda": lambda: torch.zeros(9, device="cuda").index_reduce_(
        0, places(3), torch.ones(3, device="cuda"), "amax"
    ),
    "scatter_reduce_cuda_prod_": lambda: torch.zeros(9, device="cuda").scatter_reduce(
        0, places(3), torch.ones(3, device="cuda"), "prod"
    ),
}
KEPT: dict[str, Callable[[], Any]] = {
    "the mean of an image": lambda: F.adaptive_avg_pool2d(image(), 1).sum().backward(),
    "bilinear enlarging, which PyTorch makes of other operators": lambda: (
        F.interpolate(image(), 16, mode="bilinear").sum().backward()
    ),
    "pooling": lambda: F.max_pool2d(image(), 2).sum().backward(),
    "padding with the edge": lambda: F.pad(image(), (1, 1, 1, 1), mode="replicate").sum().backward(),
    "a loss for each pixel": classes_of_pixels("none"),
    "sums of bags": bag("sum"),
    "whole numbers' histogram": lambda: torch.histc(places(9), 3),
    "counts without weights": lambda: places(9).bincount(minlength=3),
    "the median of all": lambda: image().median(),
    "cumsum": lambda: image().cumsum(0),
    "a product": lambda: (image(8, 8) @ image(8, 8)).sum().backward(),
    "scatter_add": lambda: torch.zeros(9, device="cuda").scatter_add(0, places(3), torch.ones(3, device="cuda")),
}


@pytest.mark.parametrize("values", ["", ",values=real"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_order_is_refused_as_on_a_card(name: str, values: str) -> None:
    gpu.turn_on(f"T4{values}")
    with pytest.raises(RuntimeError) as caught:
        REFUSED[name]()
    said = str(caught.value)
    assert said.startswith(f"{name} does not have a deterministic implementation, but you set 'torch.use_determin")
    assert "'warn_only=True'" in said


@pytest.mark.parametrize("what", KEPT)
def test_what_has_one_runs(what: str) -> None:
    gpu.turn_on("T4,torch=2.13")
    KEPT[what]()


@pytest.mark.parametrize("name", ["_bincount_cuda", "median CUDA with indices output"])
def test_it_only_warns_where_that_was_asked_for_and_once(name: str) -> None:
    gpu.turn_on("T4")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        REFUSED[name]()
    (warning,) = caught
    assert str(warning.message).startswith(f"{name} does not have a deterministic implementation")
    assert "True, warn_only=True)'. You can file an issue" in str(warning.message)
    if name == "_bincount_cuda":
        assert warning.filename == __file__


@pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta", r"ignore:scatter_reduce\(\) is in beta")
@pytest.mark.parametrize("values", ["", ",values=real"])
def test_nothing_is_refused_without_the_setting_and_all_is_with_it(values: str) -> None:
    gpu.turn_on(f"T4{values}")
    torch.use_deterministic_algorithms(False)
    for run in REFUSED.values():
        for _ in range(3):
            run()
    torch.use_deterministic_algorithms(True)
    for name, run in REFUSED.items():
        with pytest.raises(RuntimeError, match=name):
            run()


@pytest.mark.parametrize(("version", "setting", "refused"), [
    ("2.9", None, True), ("2.9", ":4096:8", False), ("2.9", ":4096:2", True), ("2.13", None, False),
])  # fmt: skip
def test_products_want_a_setting_up_to_2_9(
    version: str, setting: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    gpu.turn_on(f"T4,torch={version}")
    x = image(8, 8)
    if refused:
        with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 or"):
            x @ x
    else:
        x @ x
    # The same is so of what sorts, by then.
    if version == "2.9":
        with pytest.raises(RuntimeError, match="kthvalue CUDA does not"):
            image().kthvalue(2)
    else:
        image().kthvalue(2)
