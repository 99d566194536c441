"""Advice for what stands in functions of other cells and files: they are changed, and what is said is what they take then."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from causes_cells import Notebook, notebook
from small_card import SMALL

from gpumem_magic.advice.answer import Advice
from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.program_texts import ProgramTexts
from gpumem_magic.advice.proposal import SAME, Proposal
from gpumem_magic.advice.written_functions import WrittenFunction, written_functions
from gpumem_magic.trials.counting import own_functions

LARGE = "virtual:64GiB,context=0MiB,idle=0MiB"
TRAIN = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def train(width, batch):
    net = nn.Sequential(*[Block(width) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for step in range(6):
        x = torch.randn(batch, width, device="cuda")
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses
"""


def advice_of(book: Notebook, cell: str) -> Advice:
    said = book.cell("%%gpumem --advise -o advice\n" + cell)
    assert "advice" in book.shell.user_ns, said
    found = book.shell.user_ns.pop("advice")
    assert isinstance(found, Advice)
    return found


def test_a_training_function_is_changed_and_takes_what_was_said() -> None:
    cell = "train(512, 3072)"
    with notebook(SMALL) as book:
        book.cell(TRAIN)
        train = book.shell.user_ns["train"]
        code = train.__code__
        advice = advice_of(book, cell)
        assert book.shell.user_ns["train"] is train
        assert train.__code__ is code
    found = advice.found
    assert not found.base.run.fits
    assert found.best is not None
    assert found.best.run.fits
    assert advice.code.strip() == cell
    ((place, text),) = advice.functions.items()
    assert place.startswith("In [")
    assert place.endswith("]: train")
    assert advice.diff.splitlines()[0] == f"--- {place}"
    assert "this cell" not in advice.diff
    names = {one.name for one in found.outcomes}
    assert "recomputing the activations of Block (4 in net)" in names
    assert any(name.startswith("half the batch") for name in names)
    assert "states of optimizer on the host between its steps" in names
    # As somebody does it: the changed function is put in the place of the other.
    with notebook(LARGE) as book:
        book.cell(TRAIN)
        book.cell(text)
        assert book.measured(cell).peak.allocated == found.best.need.allocated < found.base.need.allocated


ATTENTION = """
import torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        return weights @ v

    def loss(self, x, y):
        return F.cross_entropy(self(x)[:, 0], y)

attention = Attention(64).cuda()
"""


def test_a_method_of_a_model_that_is_there_already_is_changed() -> None:
    cell = (
        "x = torch.randn(16, 1024, 64, device='cuda')\n"
        "y = torch.zeros(16, dtype=torch.int64, device='cuda')\n"
        "attention.loss(x, y).backward()"
    )
    with notebook(SMALL) as book:
        book.cell(ATTENTION)
        advice = advice_of(book, cell)
    found = advice.found
    (fused,) = (one for one in found.outcomes if one.name == "scaled_dot_product_attention")
    ((place, text),) = fused.program.changed.items()
    assert place.name == "Attention.forward"
    assert "scaled_dot_product_attention" in text
    assert fused.need.allocated < found.base.need.allocated
    # What a method needs above it stands above its class.
    diff = advice.diffs["cross-entropy in pieces"].splitlines()
    assert diff[1] == "@@ above the class of Attention.loss @@"
    assert "+from torch.utils.checkpoint import checkpoint" in diff
    # The function's module has this one.
    assert "+import torch.nn.functional as F" not in diff
    assert "-        return F.cross_entropy(self(x)[:, 0], y)" in diff
    whole = ATTENTION.replace(place.text.replace("\n", "\n    ").rstrip(), text.replace("\n", "\n    ").rstrip())
    assert whole != ATTENTION
    with notebook(LARGE) as book:
        book.cell(whole)
        assert book.measured(cell).peak.allocated == fused.need.allocated


def test_a_function_of_a_file_below_a_decorator_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "advised_steps.py").write_text(
        "import functools\nimport torch\n\n"
        "def told(function):\n    @functools.wraps(function)\n    def inside(*given):\n        return function(*given)\n"
        "    return inside\n\n"
        "@told\ndef steps(model, optimizer, x):\n    for _ in range(3):\n        model(x).sum().backward()\n"
        "        optimizer.step()\n        optimizer.zero_grad(set_to_none=False)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with notebook(SMALL) as book:
        book.cell("from advised_steps import steps")
        found = advice_of(
            book,
            "model = net(1024, 4)\noptimizer = torch.optim.SGD(model.parameters())\n"
            "x = torch.randn(4096, 1024, device='cuda')\nsteps(model, optimizer, x)",
        ).found
    (dropped,) = (one for one in found.outcomes if one.name.startswith("zero_grad(set_to_none=True)"))
    ((place, text),) = dropped.program.changed.items()
    assert place.where == "advised_steps.py:10: steps"
    assert text.startswith("@told\n")
    assert dropped.need.allocated < found.base.need.allocated
    # What the function is given is changed where it is made.
    (recomputed,) = (one for one in found.outcomes if one.name.startswith("recomputing"))
    assert not recomputed.program.changed
    assert "apply_activation_checkpointing(model" in recomputed.program.cell


def named(text: str, name: str = "f") -> WrittenFunction:
    return WrittenFunction("cell", 1, name, text, "", frozenset({"import torch"}))


def test_one_change_is_made_in_all_texts_that_have_it() -> None:
    def edit(draft: CellDraft) -> None:
        for call in draft.calls(["g"]):
            draft.argument(call, "a", "1")

    place = named("def f():\n    return g()\n")
    program = Proposal("a", SAME, edits={None: edit, place: edit}).made_in(ProgramTexts("g(f())"))
    assert program.cell == "g(f(), a=1)"
    assert program.changed == {place: "def f():\n    return g(a=1)\n"}
    with pytest.raises(Unchangeable):
        Proposal("a", SAME, edits={None: edit}).made_in(ProgramTexts("f()"))


def test_lines_stand_behind_what_a_function_makes_and_not_what_it_is_given() -> None:
    text = "@torch.no_grad()\ndef f(x):\n    if x:\n        return x\n    model = net()\n    return model(x)\n"
    draft = ProgramTexts("").draft(named(text))
    draft.behind("model", "model.compile()")
    draft.at_top("import torch", "import other")
    changed = draft.finished()
    assert changed.splitlines()[:2] == ["import other", "@torch.no_grad()"]
    assert changed.splitlines()[6:8] == ["    model.compile()", "    return model(x)"]
    assert named(text).apart(changed) == ("import other\n", changed.removeprefix("import other\n"))
    with pytest.raises(Unchangeable, match="`x` is not made here"):
        ProgramTexts("").draft(named(text)).behind("x", "x.compile()")


def test_which_functions_have_a_text_that_can_be_changed() -> None:
    namespace: dict[str, Any] = {}
    exec("def typed(): return 1", namespace)  # (Its source is nowhere.)

    def around() -> None:
        """Has a variable of a function around it."""
        assert around

    class Kind:
        @staticmethod
        def still() -> int:
            return 2

        def moving(self) -> int:
            return 3

    around.__wrapped__ = around  # type: ignore[attr-defined]
    namespace |= {"around": around, "Kind": Kind, "short": lambda: 4}
    found = {
        one.name.rpartition(".")[2]: one
        for _, one in written_functions(["typed", "around", "Kind", "short"], namespace)
    }
    assert set(found) == {"around", "still", "moving"}
    assert found["moving"].margin == " " * 8
    ast.parse(found["moving"].text)
    assert len(list(own_functions(["around"], namespace))) == 1


def test_a_class_that_a_comprehension_mentions_is_found() -> None:
    with notebook(SMALL) as book:
        book.cell(TRAIN)
        found = {one.name for _, one in written_functions(["train"], book.shell.user_ns)}
    assert found == {"train", "Block.__init__", "Block.forward"}
