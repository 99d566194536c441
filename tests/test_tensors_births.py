"""What a virtual device tells of large allocations: operator, shapes, the line, the module, and what keeps them."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
from causes_cells import notebook

from gpumem_magic.report.model import TensorGroup, TensorKind
from gpumem_magic.units import MIB
from gpumem_magic.virtual.engine import births

DEVICE = "T4,torch=2.13"


def groups_of(cells: list[str], at: str = "peak") -> tuple[TensorGroup, ...]:
    with notebook(DEVICE) as book:
        for cell in cells[:-1]:
            book.cell(cell)
        report = book.measured(cells[-1])
        groups = report.tensors(at)
        assert sum(group.bytes for group in groups) == report.peak.allocated or at != "peak"
        return groups


def test_an_operator_its_inputs_and_its_expression_are_known() -> None:
    groups = groups_of(
        ['x = torch.empty(4096, 1, device="cuda")\ny = torch.empty(4096, device="cuda")', "a = 1\nz = (x - y).abs()"]
    )
    a = next(one for one in groups if one.operator == "sub")
    assert (a.shape, a.dtype, a.line, a.keeper) == ((4096, 4096), "float32", 3, "temporary")
    assert a.inputs == (TensorKind((4096, 1), "float32"), TensorKind((4096,), "float32"))
    assert a.expression == ("x - y" if sys.version_info >= (3, 11) else "")


def test_what_a_backward_makes_is_known_by_the_line_of_its_forward() -> None:
    cell = "h = x.pow(2)\nloss = h.sum()\nloss.backward()"
    groups = groups_of(['x = torch.empty(1024, 1024, device="cuda", requires_grad=True)', cell])
    made = [(one.operator, one.line) for one in groups if one.backward and one.bytes >= MIB]
    assert ("pow", 2) in made


def test_a_function_of_another_cell_is_an_inner_place_and_one_of_this_cell_a_line() -> None:
    function = "def f(x):\n    return torch.nn.functional.softmax(x @ x, -1)"
    there = groups_of([f'{function}\nx = torch.empty(1024, 1024, device="cuda")', "\n\ny = f(x)"])
    soft = next(one for one in there if one.operator == "softmax")
    assert (soft.statement, soft.line, soft.keeper, soft.kept_by) == ("y = f(x)", 4, "name", "y")
    assert soft.inner.endswith(":2 f")
    here = groups_of(['x = torch.empty(1024, 1024, device="cuda")', f"{function}\n\ny = f(x)"])
    soft = next(one for one in here if one.operator == "softmax")
    assert (soft.line, soft.inner) == (3, "")


def test_modules_keepers_and_failures() -> None:
    train = 'model = net(1024, 4)\nx = torch.randn(4096, 1024, device="cuda")\nlosses = []'
    groups = groups_of([train, "for _ in range(3):\n    losses.append(model(x).mean())"])
    saved = next(one for one in groups if one.operator == "linear" and one.count > 3)
    assert saved.module == "model.*.0"
    assert saved.keeper == "backward"
    assert any(one.category == "parameters" and one.kept_by == "model" and one.count == 8 for one in groups)
    failed = groups_of([train, "kept = [model(x).detach() for _ in range(3)]\nbig = mib(20000)"], "failure")
    held = next(one for one in failed if one.keeper == "list")
    assert (held.count, held.kept_by) == (3, "kept[0…2]")


def test_a_call_that_looks_like_an_earlier_one_is_told_alike_without_a_look_at_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[object] = []
    look = births._inputs
    monkeypatch.setattr(births, "_inputs", lambda call: (looked.append(call[0]), look(call))[1])
    step = "    y = torch.softmax(x @ w, -1)\n    y.sum().backward()\n    w.grad = None\n    del y"
    told, looks = [], []
    with notebook(DEVICE) as book:
        book.cell('x, w = (torch.empty(512, 512, device="cuda", requires_grad=r) for r in (False, True))')
        for turns in (2, 2, 6):
            looked.clear()
            report = book.measured(f"for _ in range({turns}):\n{step}")
            told.append([(one.operator, one.shape, one.inputs, one.line) for one in report.tensors("peak")])
            # (Softmax's backward copies its spread gradient meanwhile: it is worked out anew each time.)
            looks.append(sum("backward" not in str(one) for one in looked))
        # (The first cell makes a workspace.) Another cell is another place, each more turn the same one.
        assert looks[1] == looks[2] > 0
        assert told[1] == told[2]
        # Of another shape it is another.
        book.cell('x = torch.empty(1024, 512, device="cuda")')
        other = book.measured(f"for _ in range(2):\n{step}").tensors("peak")
        made = next(one for one in other if one.operator == "softmax" and not one.backward)
        assert (made.shape, made.inputs) == ((1024, 512), (TensorKind((1024, 512), "float32"),))


def test_nothing_is_kept_of_the_program() -> None:
    with notebook(DEVICE) as book:
        book.cell('x = torch.empty(1024, 1024, device="cuda", requires_grad=True)')
        book.measured("y = (x * 2).sum()\ny.backward()")
        left = weakref.ref(book.shell.user_ns["x"])
        book.cell("del x, y")
        gc.collect()
        assert left() is None


def test_parameters_that_a_loop_names_in_turn_are_their_models() -> None:
    loop = "for (a, b) in zip(old, model.parameters()):\n    c = a + b"
    groups = groups_of(["model = net(1024, 4)\nold = [one.detach() for one in net(1024, 4).parameters()]", loop])
    counts = {one.kept_by: one.count for one in groups if one.category == "parameters"}
    # (The last one has the loop's name, too, to the end.)
    assert counts == {"model": 8}


def test_gradients_of_weights_that_share_their_memory_are_kept_by_their_model() -> None:
    """Of an LSTM's weights, which are one allocation, one is named; under autocast each has a gradient of its own."""
    setup = """
class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.LSTM(512, 512, batch_first=True)
        self.out = torch.nn.Linear(512, 4)
    def forward(self, x):
        return self.out(self.recurrent(x)[0][:, -1])
model = Reader().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    cell = """
for turn in range(4):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(64, 50, 512, device="cuda")).sum()
    loss.backward()
    if turn % 2:
        optimizer.step()
        optimizer.zero_grad()
"""
    gradients = [one for one in groups_of([setup, cell]) if one.category == "gradients"]
    assert [one.kept_by for one in gradients] == ["model"]
    assert gradients[0].bytes > 8 * MIB


def test_of_statements_on_one_line_the_one_that_made_a_tensor_is_named() -> None:
    with notebook("T4") as book:
        book.cell("layer = torch.nn.Linear(1024, 1024).cuda()\nx = torch.ones(1024, 1024).cuda()")
        report = book.measured("y = x.relu(); layer.zero_grad(); layer(x).exp().sum().backward(); z = y.neg()")
        made = {group.statement for group in report.tensors() if group.statement}
        assert "layer(x).exp().sum().backward()" in made
        assert "layer.zero_grad()" not in made
        assert all(group.statement == "y = x.relu()" for group in report.tensors() if group.operator == "relu")
