"""Owners in a report: at the cell's end and at an error, with bytes that add up, and nothing of the user's kept."""

from __future__ import annotations

import gc
import weakref

import torch
from causes_cells import notebook

import gpumem_magic
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.user_report import Report

MIB = 1 << 20

TRAIN = """
model = net()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(512, 512, device="cuda")
for _ in range(2):
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


def test_owners_add_up_to_what_is_allocated() -> None:
    with notebook() as book:
        report = book.measured(TRAIN)
        last = report.checkpoints[-1]
        assert sum(owner.bytes for owner in report.owners) == last.allocated
        by_name = {owner.name: owner for owner in report.owners}
        assert by_name["optimizer"].type == "Adam"
        assert by_name["model"].frees == 0
        assert by_name["model"].together == "del model, optimizer, loss"
        book.cell("del model, optimizer, loss")
        machine_says = torch.cuda.memory_allocated()
        assert last.allocated - machine_says == by_name["model"].together_frees


def test_a_saved_report_has_its_owners_and_causes() -> None:
    with notebook() as book:
        report = book.measured(TRAIN + "del model")
        again = report_from_dict(report.to_dict())
        assert again.owners == report.owners
        assert again.causes == report.causes
        assert [cause.name for cause in again.causes if cause.name == "del_freed_nothing"]


def test_an_error_names_what_it_pins() -> None:
    with notebook("T4") as book:
        book.cell("def bad():\n    big = mib(9000)\n    return mib(9000)")
        report = book.measured("x = mib(100)\nbad()")
        assert report.error is not None
        assert report.error.type.endswith("OutOfMemoryError")
        pinned = report.owners[0]
        assert (pinned.name, pinned.bytes) == ("this error's traceback", 9000 * MIB)
        assert [owner.name for owner in report.owners[1:]] == ["x"]
        assert "pinned_by_traceback" in [cause.name for cause in report.causes]
        book.cell("%gpumem_free")
        assert torch.cuda.memory_allocated() == 100 * MIB


def test_nothing_of_the_users_is_kept_after_a_measured_cell() -> None:
    with notebook() as book:
        book.measured(
            TRAIN + "class Mine(Exception): pass\ntry:\n    raise Mine\nexcept Mine as error:\n    kept = error"
        )
        names = ("model", "optimizer", "x", "loss", "kept")
        watched = [weakref.ref(book.shell.user_ns[name]) for name in names]
        book.cell("del model, optimizer, x, loss, kept")
        gc.collect()
        assert [reference() for reference in watched] == [None] * len(names)


def test_the_engines_entry_is_put_back_after_an_error_and_an_interrupt() -> None:
    with notebook() as book:
        before = torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward
        for ending in ("1 / 0", "raise KeyboardInterrupt", "loss.backward()\nloss.backward()"):
            book.measured(TRAIN + ending)
            assert (torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward) == before


def test_a_search_that_fails_leaves_the_report_whole() -> None:
    import gpumem_magic.causes.why as why

    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("no way")

    usual = why.find_owners
    why.find_owners = broken  # type: ignore[assignment]
    try:
        with notebook() as book:
            report = book.measured("x = mib(8)")
    finally:
        why.find_owners = usual
    assert isinstance(report, Report)
    assert report.checkpoints[-1].allocated == 8 * MIB
    assert report.owners == ()
    assert any("looking for who holds the memory (RuntimeError: no way)" in note for note in report.notes)


def test_a_script_has_owners_too() -> None:
    from gpumem_magic.virtual import gpu

    gpu.turn_on("A100-40GB")
    try:
        with gpumem_magic.measure() as measured:
            weights = torch.empty(8 << 18, device="cuda")
        assert [(owner.name, owner.bytes) for owner in measured.report.owners] == [("weights", 8 * MIB)]
        del weights
    finally:
        gpu.turn_off()
