"""`benchmarks/convolution_plans.py`, as far as it needs no cuDNN: its layers, what it counts, and how it asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project_scripts import load

from gpumem_magic.virtual.card.models import CATALOG
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.operators.cudnn import estimate

TOOL = load(Path(__file__).resolve().parents[1] / "benchmarks" / "convolution_plans.py")


@pytest.fixture(scope="module")
def layers() -> list[Any]:
    return list(TOOL.read(TOOL.LAYERS.read_text(encoding="utf-8")))


def test_every_layer_is_one(layers: list[Any]) -> None:
    """PyTorch makes the result that the line says."""
    assert len(layers) == len({layer[:1] + layer[3:] for layer in layers}) > 250
    for layer in layers:
        run = torch.nn.functional
        dimensions = len(layer.given) - 1
        how: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        name = f"conv{'_transpose' if layer.transposed else ''}{dimensions}d"
        x, weight = torch.empty(2, *layer.given, device="meta"), torch.empty(layer.weight, device="meta")
        made = getattr(run, name)(x, weight, groups=layer.groups, **how)
        assert tuple(made.shape) == (2, *layer.made), layer


def test_both_sorts_of_networks_are_there(layers: list[Any]) -> None:
    networks = {layer.network: layer.fitted for layer in layers}
    assert sorted(networks.values()) == [False] * 6 + [True] * 8


def test_a_line_says_what_is_not_usual() -> None:
    text = "# why\n\nNet: 1,8 held out\n3x9x9 8x4x4 3x3 stride=2x2\n8x4x4 4x8x8 2x2 stride=2x2 groups=2 t\n"
    first, second = TOOL.read(text)
    assert first.weight == (8, 3, 3, 3)
    assert (first.batches, first.fitted, first.padding, first.groups) == ((1, 8), False, (0, 0), 1)
    assert second.weight == (8, 2, 2, 2)
    call = second.call("forward", 8, TOOL.KINDS[0])
    assert (call.fine, call.coarse) == ((8, 4, 8, 8), (8, 8, 4, 4))


def test_answers_are_counted_beside_the_estimate(layers: list[Any]) -> None:
    class Doubling:
        def workspaces(self, call: Convolution, model: Any, tf32: bool, deterministic: bool) -> Iterator[int]:
            guess = estimate(call, model.capability, (2, 13), tf32)
            yield guess if call.way == "forward" else 2 * guess

    kind = TOOL.KINDS[0]
    some = [layer for layer in layers if layer.network in ("VGG-16", "U-Net")]
    fitted, others = TOOL.compare(Doubling(), CATALOG["A100-40GB"], kind, some, (2, 13))
    of_vgg = [layer for layer in some if layer.network == "VGG-16"]
    assert fitted.count == len(of_vgg) * 2 * 3
    sizes = {
        way: sum(estimate(layer.call(way, n, kind), (8, 0), (2, 13)) for layer in of_vgg for n in (1, 32))
        for way in TOOL.WAYS
    }
    assert fitted.off == sizes["input"] + sizes["weight"] > 0
    assert fitted.taken == sizes["forward"] + 2 * fitted.off
    assert fitted.count // 3 <= fitted.alike < fitted.count
    assert others.count > 0
    assert str(others).endswith(" GiB")


def test_the_recorded_sizes_are_those_of_the_recordings() -> None:
    found = {one.recording: [] for one in TOOL.recorded()}
    for one in TOOL.recorded():
        found[one.recording].append(one.nbytes)
    assert [len(sizes) for sizes in found.values()] == [1, 6]


@pytest.mark.parametrize("fitted", [True, False])
def test_the_estimate_is_nearer_to_a_real_h100_than_nothing_is(fitted: bool) -> None:
    """On networks that it was chosen by, and on others."""
    guessed, nothing = TOOL.Tally(), TOOL.Tally()
    products = TOOL.Tally()
    for took in TOOL.on_an_h100():
        if took.fitted == fitted:
            guess = estimate(took.call, (9, 0), TOOL.ITS_VERSION, took.tf32)
            guessed.add(took.nbytes, guess)
            nothing.add(took.nbytes, 0)
            if TOOL.is_plain_product(took.call, (9, 0), took.tf32):
                products.add(took.nbytes, guess)
    assert guessed.count == 288
    assert guessed.alike > 0.7 * guessed.count > nothing.alike
    assert guessed.off < 0.5 * nothing.off
    assert products.alike > 0.7 * products.count > 20
