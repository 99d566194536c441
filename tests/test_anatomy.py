"""The DNNMem paper's categories as a view of the ledger, and the textbook's anatomy beside a measured step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpumem_magic import measure
from gpumem_magic.report.dnnmem import GROUPS, dnnmem_view
from gpumem_magic.report.model import CATEGORIES
from gpumem_magic.virtual import gpu

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from textbook import OPTIMIZERS, PRECISIONS, layer_activation_bytes, measured, textbook

sizes = st.dictionaries(st.sampled_from(CATEGORIES), st.one_of(st.none(), st.integers(0, 1 << 40)))


def test_every_category_is_in_exactly_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(CATEGORIES)


@given(sizes)
def test_the_view_has_the_ledgers_bytes_and_no_others(categories: dict[str, int | None]) -> None:
    view = dnnmem_view(categories)
    assert view.total == sum(size for size in categories.values() if size is not None)
    for group, names in GROUPS.items():
        known = [size for name in names if (size := categories.get(name)) is not None]
        assert view.groups[group] == (sum(known) if known else None)


def test_resident_memory_is_not_available_where_the_context_is_not() -> None:
    assert dnnmem_view({"context": None, "rounding": 1, "cached": 2}).resident is None
    assert dnnmem_view({"context": 4, "rounding": 1, "cached": 2}).resident == 7


def test_a_category_that_nobody_placed_is_refused() -> None:
    with pytest.raises(KeyError):
        dnnmem_view({"new": 1})


@pytest.mark.parametrize(
    ("optimizer", "precision", "total"),
    [("adamw", "fp32", 16), ("adamw", "bf16", 8), ("adam", "autocast", 16), ("sgd", "fp32", 8), ("rmsprop", "bf16", 6)],
)
def test_textbook_figures(optimizer: str, precision: str, total: float) -> None:
    assert textbook(optimizer, precision).total == total


def test_what_the_textbook_does_not_know_is_said_in_one_line() -> None:
    with pytest.raises(ValueError, match="no textbook figure for lion in fp32: optimizers are sgd"):
        textbook("lion", "fp32")
    with pytest.raises(ValueError, match="without parameters"):
        measured({}, 0)


@given(st.integers(1, 8), st.integers(1, 256), st.integers(1, 8), st.integers(1, 64))
def test_half_precision_gives_the_published_formula(batch: int, tokens: int, heads: int, size: int) -> None:
    width = heads * size
    formula = tokens * batch * width * (34 + 5 * heads * tokens / width)
    assert layer_activation_bytes(batch, tokens, width, heads, 2) == round(formula)
    assert layer_activation_bytes(batch, tokens, width, heads, 2, scores=False) == 34 * tokens * batch * width


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd+momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_measured_step_is_the_textbooks(optimizer: str, precision: str) -> None:
    gpu.turn_on("A100-40GB")
    try:
        with measure() as measuring:
            model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
            model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
            made = MAKERS[optimizer](model.parameters())
            x = torch.zeros(8, 256, device="cuda", dtype=model[0].weight.dtype)
            for _ in range(2):
                made.zero_grad()
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
                    loss = model(x).float().sum()
                loss.backward()
                made.step()
        count = sum(parameter.numel() for parameter in model.parameters())
        del model, made, x, loss
    finally:
        gpu.turn_off()
    (after,) = [row for row in measuring.report.checkpoints if row.kind == "after"]
    assert measured(after.categories, count) == textbook(optimizer, precision)
    view = dnnmem_view(after.categories)
    assert view.total == after.device_used
    assert view.resident is not None
