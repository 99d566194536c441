"""What is allocated at the peak, at a failure and after any row, opened up into groups of alike tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from recording_fakes import Tape
from test_attribution import STEPS, play

from gpumem_magic.report.build import build
from gpumem_magic.report.tensors import groups_at
from gpumem_magic.user_report import Report


def report_of(steps: list) -> Report:
    tape = Tape()
    tape.row(kind="before")
    play(tape, steps, {})
    tape.row("x = f()", 1)
    tape.row(kind="after")
    return Report.of(build(tape.finish()))


@given(STEPS)
@settings(max_examples=30, deadline=None)
def test_groups_add_up_at_every_position(steps) -> None:
    report = report_of(steps)
    view = report.source
    for position in range(view.end + 1):
        for most in (1, 3, 1000):
            groups = groups_at(view, position, most)
            assert sum(group.bytes for group in groups) == view.timeline.allocated_at(position)
            assert sum(group.count for group in groups) == len(view.timeline.live_at(position))
            assert len(groups) <= most + 1
    assert sum(group.bytes for group in report.tensors()) == report.peak.allocated
    for row in report.checkpoints:
        assert sum(group.bytes for group in report.tensors(at=row)) == row.allocated


def test_moments_that_are_not_known_are_refused() -> None:
    report = report_of([])
    with pytest.raises(ValueError, match="no request"):
        report.tensors(at="failure")
    with pytest.raises(ValueError, match="no moment"):
        report.tensors(at="later")
    again = Report.from_dict(report.to_dict())
    assert again.tensors() == report.tensors()
    with pytest.raises(ValueError, match="without its recording"):
        again.tensors(at=again.checkpoints[0])
