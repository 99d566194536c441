"""Activations by module and operator, and the module and operator in which a forward failed."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from causes_cells import Notebook, notebook
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.causes.inside import CONTRACTIONS, ELEMENTWISE, NORMALISATIONS, OTHERS, class_of
from gpumem_magic.devices.base import CompiledResults
from gpumem_magic.recording.failing_place import failing_place
from gpumem_magic.recording.model import Recording
from gpumem_magic.recording.modules import MOST_SWITCHES, ModuleTrace, ModuleWatch
from gpumem_magic.report.inside import NOT_SAVED, OUTSIDE, ActivationBreakdown, LayerRow, OperatorRow
from gpumem_magic.units import MIB
from gpumem_magic.user_report import Report
from gpumem_magic.views.inside import (
    MAX_TREE_ROWS,
    inside_lines,
    is_informative,
    tree,
)

BLOCKS = """
class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return torch.nn.functional.softmax(scores, dim=-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.norm, self.up = Attention(width), nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.act, self.down = nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x + self.attention(x)))))


class Model(nn.Module):
    def __init__(self, width=256, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().cuda()
x = torch.randn(8, 256, 256, device="cuda")
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook() as found:
        found.cell(BLOCKS)
        yield found


@pytest.fixture(scope="module")
def trained(book: Notebook) -> Report:
    return book.measured("out = model(x)\nloss = out.pow(2).mean()\nloss.backward()")


def child(row: LayerRow, path: str) -> LayerRow:
    for name in path.split("."):
        row = next(one for one in row.children if one.name == name)
    return row


def rows(row: LayerRow) -> Iterator[LayerRow]:
    yield row
    for one in row.children:
        yield from rows(one)


def test_the_tree_adds_up_to_the_category(trained: Report) -> None:
    before_backward = next(row for row in trained.checkpoints if "loss = " in row.statement)
    top = trained.layers()
    # The row before has all but the gradient of the loss itself, which is made just before the engine runs.
    assert top.activations == (before_backward.categories["activations"] or 0) + 4
    assert isinstance(trained.recording, Recording)
    view = DeviceView(trained.recording, 0)
    backward = next(span for span in trained.recording.spans if span.kind == "backward")
    live = view.timeline.live_at(backward.start.positions[0])
    assert top.activations == sum(one.requested for one in live if view.labels[one.index].category == "activations")
    assert top.parameters == before_backward.categories["parameters"]
    assert sum(one.activations for one in top.children) == top.activations
    assert [one.name for one in top.children] == ["model", OUTSIDE]
    for row in rows(top):
        for column in ("activations", "parameters", "gradients"):
            assert sum(getattr(one, column) for one in row.children) <= getattr(row, column)


def test_a_module_has_what_it_made(trained: Report) -> None:
    block = child(trained.layers(), "model.layers.1")
    one = 8 * 256 * 256 * 4
    assert block.type == "Block"
    assert child(block, "up").type == "Linear"
    assert child(block, "up").activations == 2 * one
    assert child(block, "act").activations == 2 * one
    # The softmax of the scores, and its input's product and sum, are the attention's own, not a linear layer's.
    attention = child(block, "attention")
    assert attention.activations >= 4 * one
    assert sum(each.activations for each in attention.children) == 3 * one
    assert child(block, "up").parameters == (256 * 512 + 512) * 4
    assert child(block, "up").gradients == child(block, "up").parameters
    assert trained.layers().gradients == trained.layers().parameters


def test_operators_add_up_and_are_told_apart(trained: Report) -> None:
    found = {row.name: row for row in trained.operators()}
    assert sum(row.bytes for row in found.values()) == trained.layers().activations
    one = 8 * 256 * 256 * 4
    assert {CONTRACTIONS, NORMALISATIONS, ELEMENTWISE} <= set(found)
    assert found[ELEMENTWISE].operations["gelu"] == 3 * 2 * one
    # A softmax keeps its result; so does the product after it, which counts it.
    assert found[NORMALISATIONS].shared >= 3 * one
    for row in found.values():
        assert row.name == NOT_SAVED or sum(row.operations.values()) == row.bytes


def test_it_shows_in_the_text_and_the_page_and_is_saved(trained: Report) -> None:
    lines = inside_lines(trained.inside)
    assert lines[0] == "Activations by module at the start of the first backward (MiB):"
    assert any("0 to 2" in line and "Block, each" in line for line in lines)
    assert len(lines) <= 8
    for line in lines[:-1]:
        assert line in str(trained.explain())
    page = trained._repr_mimebundle_()[0]["text/html"]
    assert "Activations by module and operator (MiB)</summary>" in page
    again = Report.from_dict(json.loads(trained.to_json()))
    assert again == trained
    assert again.layers() == trained.layers()


def test_evaluation_has_layers_at_the_peak_and_no_operators(book: Notebook) -> None:
    report = book.measured("with torch.no_grad():\n    out = model(x)")
    assert report.inside is not None
    assert report.inside.moment == "at the peak"
    assert report.operators() == ()


def test_a_program_without_modules_says_so(book: Notebook) -> None:
    report = book.measured("y = x + 1")
    with pytest.raises(ValueError, match="no module"):
        report.layers()
    assert "inside" not in report.to_dict()


def test_nothing_of_the_users_is_kept(book: Notebook) -> None:
    book.cell("gone = Model().cuda()")
    book.measured("(gone(x) ** 2).mean().backward()")
    kept = weakref.ref(book.shell.user_ns.pop("gone"))
    gc.collect()
    assert kept() is None


def test_the_layer_of_a_real_device_comes_from_the_graph(book: Notebook) -> None:
    """Without positions, as on a real device, the operations' parameters name the module."""
    from gpumem_magic.recording import recorder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder.Recorder, "_cheap_positions", lambda self: None)
        report = book.measured("out = model(x)\nloss = out.pow(2).mean()\nloss.backward()")
    top = report.layers()
    # Only the forward's result, which nothing keeps for backward but `pow`, has no module.
    assert child(top, "model").activations > 0.9 * top.activations
    assert child(top, "model.layers.1.down").activations > 0
    assert sum(one.activations for one in top.children) == top.activations


def test_an_error_outside_of_modules_names_none(book: Notebook) -> None:
    report = book.measured("model(x)\nx @ torch.ones(3, 3, device='cuda')")
    assert report.error is not None
    assert report.error.module == ""
    assert "It failed in" not in str(report)


FAILURES = [
    ("out = model(big)", "layers.0.attention", "softmax"),
    ("out = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9)).cuda()(torch.ones(2, 8, device='cuda'))", "1", "linear"),
    (
        "class Odd(nn.Module):\n    def forward(self, x):\n        return x @ x\nOdd()(torch.ones(2, 3))",
        "Odd",
        "matmul",
    ),
    ("class Odd(nn.Module):\n    def forward(self, x):\n        raise KeyError('x')\nOdd()(x)", "Odd", ""),
]


@pytest.mark.parametrize(("cell", "module", "operator"), FAILURES)
def test_an_error_names_module_and_operator(cell: str, module: str, operator: str) -> None:
    with notebook("virtual:600MiB,context=0MiB") as book:
        book.cell(BLOCKS + "\nbig = torch.randn(4, 4400, 256, device='cuda')")
        report = book.measured(cell)
        assert report.error is not None
        assert (report.error.module, report.error.operator) == (module, operator)
        row = next(row for row in report.checkpoints if row.kind == "error")
        last = row
        while last.parts:
            last = last.parts[-1]
        assert last.label == (f"{module}, {operator}" if operator else module)
        assert last.allocated == row.allocated
        assert f"It failed in the forward of `{module}`{f', calling `{operator}`' if operator else ''}." in " ".join(
            str(report).split()
        )
        assert Report.from_dict(report.to_dict()) == report


def test_a_module_in_no_other_and_code_without_a_source_are_no_trouble() -> None:
    namespace: dict[str, object] = {"torch": torch}
    exec("class Hidden(torch.nn.Module):\n def forward(self, x): return x + torch.ones(7)", namespace)
    inner = namespace["Hidden"]()  # type: ignore[operator]

    class Around(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError) as caught:
        Around()(torch.ones(3))
    assert failing_place(caught.value) == ("Hidden", "Hidden", "")


def test_the_operator_is_read_where_the_call_stands() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python tells the place of a call in its line from 3.11 on")

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).sum() + torch.cat(
                [x, torch.ones(1, 2, 3)],
            )

    with pytest.raises(RuntimeError) as caught:
        Two()(torch.ones(3))
    assert failing_place(caught.value)[2] == "cat"


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("addmm", CONTRACTIONS),
        ("bmm", CONTRACTIONS),
        ("convolution", CONTRACTIONS),
        ("scaled_dot_product_flash_attention", CONTRACTIONS),
        ("native_layer_norm", NORMALISATIONS),
        ("cudnn_batch_norm", NORMALISATIONS),
        ("log_softmax", NORMALISATIONS),
        ("gelu", ELEMENTWISE),
        ("native_dropout", ELEMENTWISE),
        ("mul", ELEMENTWISE),
        ("embedding", OTHERS),
        ("max_pool2d_with_indices", OTHERS),
        ("nll_loss", OTHERS),
    ],
)
def test_classes_of_operators(operation: str, expected: str) -> None:
    assert class_of(operation) == expected


def test_a_program_without_backward_is_followed_for_a_while_only() -> None:
    position = iter(range(10 * MOST_SWITCHES))
    watch = ModuleWatch(lambda: {0: next(position)}, lambda tensor: None, CompiledResults)
    module = torch.nn.Linear(1, 1)
    for _ in range(MOST_SWITCHES):
        watch.begins(module, 1, lambda: "model")
        watch.ended(0)
    trace = watch.trace()
    assert not watch.running
    assert len(trace.switches[0]) <= MOST_SWITCHES + 1
    assert trace.at(0, 10 * MOST_SWITCHES) is None
    assert trace.at(0, 0) is not None
    assert ModuleTrace().at(0, 5) is None


layers = st.recursive(
    st.builds(LayerRow, st.sampled_from("0123"), st.sampled_from(["", "A"]), *[st.integers(0, 9)] * 3),
    lambda inner: st.lists(inner, max_size=4).map(
        lambda them: LayerRow(
            "m",
            "M",
            *(sum(getattr(one, name) for one in them) for name in ("activations", "parameters", "gradients")),
            tuple(them),
        )
    ),
    max_leaves=30,
)


@settings(max_examples=60, deadline=None)
@given(layers, st.integers(1, 80), st.booleans())
def test_a_tree_has_no_more_lines_than_asked_for(row: LayerRow, most: int, activations_only: bool) -> None:
    top = LayerRow("", "", row.activations, row.parameters, row.gradients, (row,))
    lines = tree(top, most, activations_only=activations_only)
    assert len(lines) <= most
    assert all(one.depth == 0 or lines[place - 1].depth >= one.depth - 1 for place, one in enumerate(lines))
    # The lines of the first level are the whole, where nothing is left out.
    if not activations_only and len(tree(top, 10_000)) <= most:
        assert sum(one.times * one.bytes[0] for one in lines if one.depth == 0) == row.activations
    large = replace(top, activations=top.activations + MIB)
    assert len(inside_lines(ActivationBreakdown("at the peak", large, (OperatorRow("x", MIB, 0, {"x": MIB}),)))) <= 8


def test_small_change_is_not_shown() -> None:
    small = LayerRow("", "", 9, 9, 9, (LayerRow("a", "A", 5, 5, 5), LayerRow("b", "B", 4, 4, 4)))
    assert not is_informative(ActivationBreakdown("at the peak", small))
    assert not is_informative(None)
    assert len(tree(small, MAX_TREE_ROWS)) == 2
