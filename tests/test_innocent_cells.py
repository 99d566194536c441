"""Cells as tutorials have them, in our own words: whatever is said of them has to be true, and no fault may be found.

Each text in ``innocent_cells`` holds notebooks (``== title``) of cells (``# %%``); every cell is measured on a virtual GPU.
Causes that describe (what the optimizer keeps, a peak inside its step, a layer that saves most) are facts, with tests of their
own; those that blame are false here.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes_cells import Notebook, names, notebook

TEXTS = sorted((Path(__file__).parent / "innocent_cells").glob("*.txt"))
START = """import torch
from torch import nn
import torch.nn.functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
"""
DESCRIBING = frozenset(
    {
        "optimizer_states",
        "optimizer_temporaries",
        "dominating_layer",
        "attention_scores",
        "only_cached",
        "key_value_cache",
        "autocast_copies",
        "optimizer_history",
        "left_over_copy",
        "held_over",
        "whole_batch",
        "left_results",
        "joined",
        "filled_in_parts",
        "carried_on",
        "products_summed",
        "rows_averaged",
        "diagonal_matrix",
        "overlapping_windows",
        "built_beside",
        "grown_result",
        "wide_indices",
        "double_precision",
        "gradients_in_evaluation",
        "alike_buffers",
        "waiting_graphs",
        "wide_loss",
        "large_images",
        "largest_batch",
        "data_ready",
        "padding",
        "steady",
        "caught_shortage",
        "second_copy",
        "unread_results",
        "unused_models",
        "retained_gradients",
        "asked_for",
        "matrices_of_rows",
        "all_at_once",
        "sets_of_weights",
        "kept_steps",
        "repeated_modules",
        "joined_to_be_reduced",
        "outside_of_autocast",
        "joined_weights",
    }
)
LEAST_CELLS = 200


def notebooks(text: Path) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"(?m)^== ", text.read_text("utf-8"))[1:]:
        title, _, body = part.partition("\n")
        yield title, body.split("# %%\n")


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


CASES = [(text.stem, title, cells) for text in TEXTS for title, cells in notebooks(text)]


@pytest.mark.parametrize(
    ("title", "cells"),
    [pytest.param(title, cells, id=f"{stem}: {title}") for stem, title, cells in CASES],
)
def test_no_fault_is_found(book: Notebook, title: str, cells: list[str]) -> None:
    book.cell(START)
    try:
        with book.forgetting():
            for number, cell in enumerate(cells):
                report = book.measured(cell)
                assert report.error is None, (number, report.error)
                blamed = set(names(report)) - DESCRIBING
                assert not blamed, (number, [one for one in report.causes if one.name in blamed])
            # (A first one may have nothing but definitions.)
            assert report.peak.allocated
    finally:
        book.cell("%gpumem_free out traceback cycles cache")
        gc.collect()


def test_there_are_enough_of_them() -> None:
    assert sum(len(cells) for _, _, cells in CASES) >= LEAST_CELLS
    assert len({title for _, title, _ in CASES}) == len(CASES)
