"""Loops of a trial's program that make no step of an optimizer: they end by their turns, unless they only prepare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_magic.trials.loops import CHEAP_EVENTS, TrialLimit


@pytest.mark.parametrize(("events", "turns"), [(CHEAP_EVENTS, 4), (0, None)])
def test_a_loop_without_steps_ends_after_so_many_turns_that_worked(events: int, turns: int | None) -> None:
    further: Any = SimpleNamespace(events=0, are_known=lambda: False)
    limit = TrialLimit(3, further, [])
    loop: Any = SimpleNamespace(index=1, kind="for")
    limit.statement_began(loop)
    ended = None
    for turn in range(1, 10):
        if limit.should_end(loop, (turn,), False):
            ended = turn
            break
        further.events += events
    assert ended == turns
