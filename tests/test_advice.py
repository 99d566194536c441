"""Advice: each change is made to a copy of a cell and run; what it says is what the changed cell takes, byte for byte."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from causes_cells import Notebook, notebook
from small_card import SMALL

import gpumem_magic
from gpumem_magic.advice.advise import ChangeOutcome
from gpumem_magic.advice.answer import Advice
from gpumem_magic.advice.changes.adapters import lora
from gpumem_magic.advice.changes.attention import fused_attention
from gpumem_magic.advice.changes.batches import accumulation
from gpumem_magic.advice.changes.compiled import compilation
from gpumem_magic.advice.changes.gradients import dropped, earlier
from gpumem_magic.advice.changes.graph import no_graph
from gpumem_magic.advice.changes.keeping import kept_results
from gpumem_magic.advice.changes.losses import chunked_cross_entropy
from gpumem_magic.advice.changes.optimizers import eight_bit, ways
from gpumem_magic.advice.changes.precision import autocast
from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence, NamedModule
from gpumem_magic.advice.program_texts import ProgramTexts
from gpumem_magic.advice.proposal import ROUNDING, SAME
from gpumem_magic.advice.trial import MOST_ITERATIONS, CellTrials
from gpumem_magic.units import human

LOOP = """
for step in range(4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""


def seen(**more: Any) -> Evidence:
    found: dict[str, Any] = {
        "categories": {"activations": 50, "optimizer_state": 30, "gradients": 20},
        "allocated": 100, "cached": 10, "ran_backward": True, "names": frozenset({"model"}),
        "modules": (NamedModule("model", (), "", False, "Sequential"),), "bfloat16": True,
        "batches": ("x",), "batch_size": 8,
    }  # fmt: skip
    return Evidence(**{**found, **more})


def changed(idea: Any, code: str, **more: Any) -> list[str]:
    """The texts that an idea's proposals make of a program, and as Python says they are programs."""
    found = [one.made(CellDraft(code)) for one in idea(seen(**more), CellDraft(code))]
    for text in found:
        ast.parse(text)
    return found


# ---- text


def test_adapters_are_made_below_their_import_and_where_an_optimizer_of_theirs_follows() -> None:
    module = NamedModule("model", ("first", "last"), "", False, "Sequential")
    make = "optimizer = torch.optim.Adam(model.parameters())\n"
    (text,) = changed(lora, f"import torch\nmodel = Net()\n{make}{LOOP}", modules=(module,), optimizers=("optimizer",))
    assert text.splitlines()[:4] == [
        "from peft import LoraConfig, get_peft_model",
        "import torch",
        "model = Net()",
        'model = get_peft_model(model, LoraConfig(r=8, target_modules=["first", "last"]))',
    ]
    # The model is from a cell before: both come first, the import above.
    (text,) = changed(lora, f"{make}{LOOP}", modules=(module,), optimizers=("optimizer",))
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["from", "model", "optimizer"]
    with pytest.raises(Unchangeable, match="`optimizer` was made before this cell"):
        changed(lora, LOOP, modules=(module,), optimizers=("optimizer",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(a=1)"),
        ("f(1)", "f(1, a=1)"),
        ("f(1,)", "f(1, a=1)"),
        ("f((1))", "f((1), a=1)"),
        ("f(a=0)", "f(a=1)"),
        ("f(b=0)", "f(a=1)"),
        ("f(\n    1,\n    c='ü',  # why )\n)", "f(\n    1,\n    c='ü', a=1  # why )\n)"),
        ("f('ä', b=2, c=3)", "f('ä', a=1, c=3)"),
        ("x = g(f(\n    1\n))", "x = g(f(\n    1, a=1\n))"),
    ],
)
def test_an_argument_is_put_into_a_call(before: str, after: str) -> None:
    draft = CellDraft(before)
    for call in draft.calls(["f"]):
        draft.argument(call, "a", "1", ("b",))
    assert draft.finished() == after


def test_what_is_not_changed_stays_as_it_was_typed() -> None:
    code = "if x:\n\t# first\n\ty = f( 1 )   # ü\n\tz = '''a\n b'''\nw = 2"
    draft = CellDraft(code)
    [suite] = [one for one in draft.suites() if ast.unparse(one[0]).startswith("y")]
    draft.after(suite[0], "new()")
    draft.before(suite[0], "old()")
    assert draft.finished() == code.replace("\ty = f", "\told()\n\ty = f").replace("ü\n", "ü\n\tnew()\n")
    draft = CellDraft(code)
    with pytest.raises(Unchangeable, match="several lines"):
        draft.wrap([draft.tree.body[0]], "with a:")
    draft = CellDraft("a = 1; b = 2")
    with pytest.raises(Unchangeable, match="same line"):
        draft.after(draft.tree.body[0], "c = 3")
    with pytest.raises(Unchangeable, match="nothing"):
        CellDraft(code).finished()


# ---- ideas


def test_gradients_are_dropped_and_earlier() -> None:
    code = "for i in y:\n    opt.zero_grad(set_to_none=False)\n    loss.backward()\n    opt.step()\n    log(loss)\n"
    [text] = changed(dropped, code)
    assert text == code.replace("False", "True")
    [text] = changed(earlier, code)
    assert text == code.replace("opt.step()\n", "opt.step()\n    opt.zero_grad()\n")
    # Somebody reads them, another's, or nobody lets go of them.
    assert changed(earlier, code.replace("log(loss)", "log(w.grad)")) == []
    assert changed(earlier, code.replace("opt.step", "other.step")) == []
    assert changed(earlier, "for i in y:\n    loss.backward()\n    opt.step()") == []


def test_optimizers_other_ways() -> None:
    made = "torch.optim.Adam(p, foreach=False)"
    assert set(changed(ways, made)) == {made.replace("foreach=False", way) for way in ("fused=True", "foreach=True")}
    assert changed(ways, "torch.optim.Adam(p, fused=True)") == []
    assert changed(ways, "torch.optim.RMSprop(p)") == ["torch.optim.RMSprop(p, foreach=False)"]
    [text] = changed(eight_bit, "import torch\no = torch.optim.AdamW(p, lr=1, fused=True)")
    assert text == "import bitsandbytes\nimport torch\no = bitsandbytes.optim.AdamW8bit(p, lr=1)"


def test_forwards_are_wrapped() -> None:
    [text] = changed(autocast, LOOP)
    assert (
        '    with torch.autocast("cuda", torch.bfloat16):\n        loss = model(x).square().mean()\n    loss.back'
        in text
    )
    with pytest.raises(Unchangeable):
        changed(autocast, text)
    [text] = changed(accumulation, LOOP)
    assert text == LOOP.replace(
        "    loss = model(x).square().mean()\n    loss.backward()",
        "    for half_of_x in x.chunk(2):\n        loss = model(half_of_x).square().mean()\n        (loss / 2).backward()",
    )
    with pytest.raises(Unchangeable, match="stands between"):
        changed(accumulation, LOOP.replace("    loss.back", "    print(x)\n    optimizer.zero_grad()\n    loss.back"))
    loss = NamedModule("criterion", (), "", False, "MSELoss", has_parameters=False)
    [text] = changed(compilation, "model = net()\ncriterion = MSELoss()\n", modules=(loss, *seen().modules))
    assert text == "model = net()\nmodel.compile()\ncriterion = MSELoss()\n"
    [text] = changed(no_graph, "import torch\nfor i in y:\n    out = model(i)\n", ran_backward=False)
    assert text == "import torch\nwith torch.no_grad():\n    for i in y:\n        out = model(i)\n"
    assert changed(no_graph, LOOP) == []


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("y = (q @ k.transpose(-2, -1) / 8).softmax(-1) @ v", "q, k, v, scale=1 / (8)"),
        ("s = q @ k.mT * c\np = F.softmax(s, dim=-1)\ny = p @ v", "q, k, v, scale=c"),
        ("y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v", "q, k, v, scale=1.0"),
        ("y = (q @ k.transpose(-2, -1)).softmax(1) @ v", None),
        ("y = (q @ k.transpose(0, 1)).softmax(-1) @ v", None),
        ("y = (q @ k + m).softmax(-1) @ v", None),
        ("y = p @ v", None),
    ],
)
def test_attention_that_is_written_out_is_found(code: str, arguments: str | None) -> None:
    found = changed(fused_attention, code)
    if arguments is None:
        assert found == []
    else:
        assert found[0].endswith(f"y = torch.nn.functional.scaled_dot_product_attention({arguments})")


@pytest.mark.parametrize(
    ("kept", "now"),
    [
        ("sums.append(loss)", "sums.append(loss.detach())"),
        ("sums.append(model(x))", "sums.append(model(x).detach())"),
        ("sums += loss / 2", "sums += (loss / 2).detach()"),
        ("sums = sums + loss", "sums = sums + loss.detach()"),
        ("sums.append(loss)\n    print(len(sums))", "sums.append(loss.detach())\n    print(len(sums))"),
        ("sums.append(loss.item())", None),
        ("sums += 1", None),
        ("rates.append(rate())", None),
        # Something goes backward from it, or may.
        ("sums.append(loss)\n    loss = sums[-1]", None),
        ("sums.append(loss)\ntorch.stack(sums).mean().backward()", None),
    ],
)
def test_what_a_loop_keeps_loses_its_graph(kept: str, now: str | None) -> None:
    code = f"for x in y:\n    loss = model(x)\n    loss.backward()\n    {kept}\n"
    found = changed(kept_results, code, grown=60, tensors=("x", "loss"))
    assert found == ([] if now is None else [code.replace(kept, now)])
    assert changed(kept_results, code, grown=1, tensors=("x", "loss")) == []
    lists = {"sums": 50} if "append" in kept else {}
    on_host = changed(kept_results, code, grown=60, tensors=("x", "loss"), lists=lists, host=200)[len(found) :]
    assert on_host == (
        [] if now is None or "append" not in now else [code.replace(kept, now.replace("()", "().cpu()", 1))]
    )


def test_other_forms_of_attention() -> None:
    code = "a = nn.MultiheadAttention(8, 2)\nout, _ = a(x, x, x)\ny = a(x, x, x)[0]\nz, w = a(x, x, x)"
    [text] = changed(fused_attention, code)
    assert text == code.replace("_ = a(x, x, x)", "_ = a(x, x, x, need_weights=False)").replace(
        "y = a(x, x, x)", "y = a(x, x, x, need_weights=False)"
    )
    assert changed(fused_attention, "m = M(attn_implementation='eager')") == ['m = M(attn_implementation="sdpa")']


def test_changes_keep_the_results_that_they_say() -> None:
    """Run on the host, with numbers."""
    head = (
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))\nx = torch.randn(8, 6)\ny = torch.arange(8) % 5\n"
        "optimizer = torch.optim.Adam(model.parameters(), foreach=False)\nq = torch.randn(2, 2, 8, 6)\n"
    )
    code = head + LOOP.replace("model(x).square().mean()", "F.cross_entropy(model(x), y)").replace(
        "_grad()", "_grad(set_to_none=False)"
    )
    code += "out = (q @ q.transpose(-2, -1) / 3).softmax(-1) @ q\n"
    before = _results(code)
    count = 0
    for idea in (dropped, earlier, ways, accumulation, chunked_cross_entropy, fused_attention):
        for one in idea(seen(batches=("x", "y")), CellDraft(code)):
            after = _results(one.made(CellDraft(code)))
            assert all(a.allclose(b, atol=1e-5) for a, b in zip(before, after, strict=True)), one.name
            if one.results == SAME:
                assert all(a.equal(b) for a, b in zip(before, after, strict=True)), one.name
            else:
                assert one.results == ROUNDING
            count += 1
    assert count == 7


def _results(code: str) -> list[Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "<cell>", "exec"), names)
    return [*(one.detach() for one in names["model"].parameters()), names["out"], names["loss"].new_tensor(0)]


# ---- in a notebook


CELL = """
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(3)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(3072, 512, device="cuda")
""" + LOOP.replace("range(4)", "range(3)")


@pytest.fixture(scope="module")
def advised() -> Iterator[tuple[Notebook, Advice, str]]:
    """A notebook, the advice for a cell that does not fit, and what was shown."""
    with notebook(SMALL) as book:
        book.cell("kept = torch.ones(1024, 1024, device='cuda')")
        names = dict(book.shell.user_ns)
        before = book.allocated()
        said = book.cell("%%gpumem --advise -o advice\n" + CELL)
        assert "advice" in book.shell.user_ns, said
        advice = book.shell.user_ns.pop("advice")
        new = {name for name, one in book.shell.user_ns.items() if names.get(name) is not one}
        assert not {name for name in new if not name.startswith("_")} - {"In", "Out"}
        assert book.allocated() == before
        yield book, advice, said


def peak_of(book: Notebook, one: ChangeOutcome) -> int:
    """What the changed cell takes, run as a user would run it beside the 4 MiB that are kept."""
    if one.conf:
        book.cell(f"import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = '{one.conf}'")
    with notebook("virtual:64GiB,context=0MiB,idle=0MiB") as other:
        other.cell("kept = torch.ones(1024, 1024, device='cuda')")
        return other.measured(one.program.cell).peak.allocated


def test_what_was_said_is_what_it_saves(advised: tuple[Notebook, Advice, str]) -> None:
    book, advice, _ = advised
    found = advice.found
    assert not found.base.run.fits
    assert found.best is not None
    assert found.best.run.fits
    peaks = {one.name: peak_of(book, one) for one in (found.base, found.best, *found.outcomes[-2:])}
    book.cell(f"%gpumem_device {SMALL}")
    for one in (found.base, found.best, *found.outcomes[-2:]):
        assert one.need.allocated == peaks[one.name], one.name


def test_the_answer_comes_first_and_can_be_copied(advised: tuple[Notebook, Advice, str]) -> None:
    _, advice, said = advised
    first, second = str(advice).splitlines()[:2]
    assert str(advice).strip() in said.replace("\n\n\n", "\n\n")
    assert first.startswith("With ")
    assert "the cell fits on a card of 256MiB (" in first
    assert second.startswith("As it is, it fails at line ")
    assert all(line.startswith(("@", "+", "-", " ")) for line in advice.diff.splitlines())
    ast.parse(advice.code)
    data = advice.to_dict()
    assert data["advised"]["fits"]
    assert data["trials"] == len(advice.found.tried)
    for one in data["changes"]:
        assert one["saves"] == data["as_it_is"]["peak_allocated"] - one["peak_allocated"]
        assert one["ending"] == "error" or sum(one["categories"].values()) >= one["peak_allocated"]
    by_name = {one["change"]: one for one in data["changes"]}
    recomputed = next(one for name, one in by_name.items() if name.startswith("recomputing"))
    assert recomputed["flops"] > data["as_it_is"]["flops"]
    moved = next(one for name, one in by_name.items() if "on the host" in name)
    # Both moments of all parameters, to the host and back.
    parameters = 4 * 3 * (2 * 512 * 2048 + 2048 + 512)
    assert moved["moved"] - data["as_it_is"]["moved"] == 4 * parameters
    words = [text.get_text() for text in advice.plot().axes[0].texts]
    assert any("256 MiB" in word for word in words)


GROWING = """
model = nn.Linear(512, 8192).cuda()
optimizer = torch.optim.SGD(model.parameters())
losses, kept = [], []
for step in range(60):
    x = torch.randn(128, 512, device="cuda")
    out = model(x)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
    kept.append(out)
"""


def test_what_grows_is_run_to_its_end_and_what_keeps_it_is_changed() -> None:
    """It fails after more iterations than those of programs that take no more in later ones."""
    with notebook(SMALL) as book:
        book.cell("%%gpumem --advise -o advice\n" + GROWING)
        found = book.shell.user_ns.pop("advice").found
        assert found.base.run.iteration[0] > MOST_ITERATIONS
        assert found.best.name == ".detach().cpu() on what goes into kept"
        changed = GROWING.replace("kept.append(out)", "kept.append(out.detach().cpu())")
        assert found.best.program.cell.strip() == changed.strip()
        # Each of 60 turns left 128 x 8192 numbers, and its loss.
        assert found.base.need.allocated - found.best.need.allocated >= 59 * 128 * 8192 * 4
        with notebook("virtual:64GiB,context=0MiB,idle=0MiB") as other:
            assert other.measured(found.best.program.cell).peak.allocated == found.best.need.allocated


OF_PARTS = """
model = nn.Linear(512, 8192).cuda()
optimizer = torch.optim.SGD(model.parameters())
last_rows = []
for step in range(400):
    out = model(torch.randn(64, 512, device="cuda"))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    last_rows.append(out[-1])
"""


def test_a_row_of_each_result_keeps_all_of_it_and_growing_cells_are_compared_after_as_many_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpumem_magic.trials.loops._MANY_EVENTS", 1500)
    with notebook("virtual:1GiB,context=0MiB,idle=0MiB") as book:
        book.cell("%%gpumem --advise -o advice\n" + OF_PARTS)
        advice = book.shell.user_ns.pop("advice")
        found = advice.found
    count = found.base.run.left_after
    assert count == MOST_ITERATIONS < found.tried[0].left_after < 400
    assert found.base.run.growing == 64 * 8192 * 4
    growing = [one.run for one in found.outcomes if one.run.growing == found.base.run.growing]
    assert growing
    assert {one.left_after for one in growing} == {count}
    (cloned,) = [one for one in found.outcomes if one.name == ".detach().clone() on what goes into last_rows"]
    assert cloned.run.growing == 8192 * 4
    (moved,) = [one for one in found.outcomes if one.name == ".detach().cpu() on what goes into last_rows"]
    assert moved.run.growing == 0
    first, second = str(advice).splitlines()[:2]
    assert ".detach().clone() on what goes into last_rows" in first
    assert "; each iteration still adds 32.0 KiB" in first
    assert str(advice).endswith(f"until its iterations repeated exactly, or for {MOST_ITERATIONS} of them.")
    assert second.startswith(f"As it is, its first {count} iterations fit on a card of 1GiB (")
    assert ", and each still adds " in second


def test_what_takes_too_long_is_ended_and_named_and_what_was_not_begun_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_magic.advice.advise._SECONDS", 3)
    monkeypatch.setattr("gpumem_magic.advice.advise._TIMES_LONGER", 0)
    slow = "import time\nif optimizer.defaults['fused']:\n    time.sleep(1000)\n"
    cell = GROWING.replace("losses, kept", f"{slow}losses, kept").replace("range(60)", "range(4)")
    with notebook(SMALL) as book:
        book.cell("%%gpumem --advise -o advice\n" + cell)
        advice = book.shell.user_ns.pop("advice")
        ended = str(advice).partition("Ended after 3 s, before it could say anything: ")[2].splitlines()[0]
        # On a busy computer compiling may take longer, too.
        assert "fused=True" in ended
        assert "foreach=False" in [one.name for one in advice.found.outcomes]
        monkeypatch.setattr("gpumem_magic.advice.advise.MINUTES", 0.0001)
        book.cell("%%gpumem --advise -o advice\n" + cell)
        found = book.shell.user_ns.pop("advice")
        assert "fused=True, foreach=False" in str(found).partition("Not begun any more, for want of time")[2]
        assert not found.found.outcomes


def test_after_an_interrupt_what_was_run_by_then_is_said_and_the_interrupt_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = CellTrials.run

    def interrupted(self: CellTrials, program: ProgramTexts, *given: Any, **more: Any) -> Any:
        if "foreach=False" in program.cell:
            raise KeyboardInterrupt
        return run(self, program, *given, **more)

    monkeypatch.setattr(CellTrials, "run", interrupted)
    with notebook(SMALL) as book:
        said = book.cell("%%gpumem --advise -o advice\n" + GROWING.replace("range(60)", "range(4)"))
        advice = book.shell.user_ns.pop("advice")
    assert said.strip().endswith(
        "KeyboardInterrupt: the other trials were ended. Nothing of the cell ran in the notebook."
    )
    found = advice.found
    assert found.outcomes
    assert found.best in found.outcomes
    assert "foreach=False" in found.left_out
    assert not {one.name for one in found.outcomes} & {*found.left_out}
    assert str(advice).splitlines()[-1].startswith("Stopped by Ctrl-C before these were run to their ends: ")
    assert "for want of time" not in str(advice)


def test_what_leaves_the_card_as_it_was_is_said_of_the_tensors() -> None:
    """Three results of 4 MiB less lie in segments that are as many as before."""
    with notebook(SMALL) as book:
        book.cell("%%gpumem --advise -o advice\n" + GROWING.replace("range(60)", "range(4)"))
        advice = book.shell.user_ns.pop("advice")
        base, best = advice.found.base, advice.found.best
        assert best.name == ".detach().cpu() on what goes into kept"
        assert best.run.used == base.run.used
        assert best.need.allocated < base.need.allocated
        first = str(advice).splitlines()[0]
        assert f"tensors take {human(best.need.allocated)} at the peak instead of {human(base.need.allocated)}" in first
        assert f"nvidia-smi's highest stays {human(base.run.used)}" in first


def test_a_loop_that_only_prepares_is_never_cut_short() -> None:
    """It has more turns than iterations are wanted."""
    code = (
        f"""
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range({2 * MOST_ITERATIONS})]).cuda()
for parameter in model[:-1].parameters():
    parameter.requires_grad = False
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(3072, 512, device="cuda")
"""
        + LOOP
    )
    with notebook(SMALL) as book:
        book.cell("%%gpumem --advise -o advice\n" + code)
        base = book.shell.user_ns.pop("advice").found.base
        assert base.need.allocated == book.measured(code).peak.allocated


def test_one_line_for_what_cannot_be_advised() -> None:
    with notebook(SMALL) as book:
        assert "no cell has run yet" not in book.cell("%gpumem_advise")  # its setup ran
        said = book.cell("%%gpumem --advise\nraise KeyError('x')")
        assert "%%gpumem --advise: the cell raises KeyError: 'x' (line 2)" in said
        assert "advice is for one card" in book.cell("%%gpumem --advise --device T4,V100-16GB\nx = 1")
        book.cell("out = torch.ones(300, 1 << 18, device='cuda')")
        said = book.cell("%gpumem_advise -o advice")
        assert "No change that was run makes the cell fit" in said
        advice = book.shell.user_ns["advice"]
        assert advice.diff == ""
        assert not advice.fits
        # The failed run's traceback is no part of the trials.
        assert advice.found.base.run.categories.get("unknown", 0) == 0
        report = gpumem_magic.last_report()
        assert report is None or report.error is None
