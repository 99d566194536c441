"""The watch of several engines, from what they send: pauses, clocks that differ, engines that are gone, busy or fail."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from watch_fakes import MIB, FakeDevice

from gpumem_magic.widgets import engines
from gpumem_magic.widgets.columns import ALLOCATED, SENT, TIME
from gpumem_magic.widgets.engines import MIME, EnginesObserver, begin, end, usual_hz

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Answer:
    def __init__(self, number: int, late: float) -> None:
        self.msg_ids = [f"request-{number}"]
        self.failure: Exception | None = None
        self.is_ready = True
        self.metadata = {"submitted": NOW, "completed": NOW + timedelta(seconds=late), "received": NOW}

    def wait(self, _seconds: float) -> None:
        pass

    def ready(self) -> bool:
        return self.is_ready

    def get(self) -> None:
        if self.failure is not None:
            raise self.failure


class Client:
    """Its engines' clocks are as late as it is told; what is asked of them is kept."""

    def __init__(self, **late: float) -> None:
        self.ids = list(range(len(late)))
        self.metadata: Any = defaultdict(lambda: {"outputs": []})
        self.answers = [Answer(number, seconds) for number, seconds in enumerate(late.values())]
        self.asked: list[tuple[int, Any]] = []

    def __getitem__(self, engine: int) -> Any:
        client = self

        class View:
            def apply_async(self, function: Any, *_: Any) -> Answer:
                client.asked.append((engine, function))
                return client.answers[engine]

        return View()

    def sends(self, engine: int, *rows: tuple[float, int], **more: Any) -> None:
        """rows: of the engine's one device: time, bytes allocated."""
        row = [None] * len(SENT)
        made = [(0, [time, *row[1:ALLOCATED], size, *row[ALLOCATED + 1 :]]) for time, size in rows]
        content = {"devices": [asdict(FakeDevice().facts)], "rows": made, **more}
        self.metadata[f"request-{engine}"]["outputs"].append({"data": {MIME: content}})


def begun(client: Client) -> tuple[EnginesObserver, list[Any]]:
    observer, undo = EnginesObserver(client, client.ids, 10.0), []
    observer.follow(None, undo)
    return observer, undo


def rows(observer: EnginesObserver) -> list[list[tuple[float, float]]]:
    return [[(row[TIME], row[ALLOCATED]) for row in series.ring] for series in observer.series]


def test_rows_are_on_the_notebooks_clock_and_the_newest_figures_of_a_moment_stand() -> None:
    client = Client(same=0.0, late=-60.0)
    observer, _ = begun(client)
    client.sends(0, (1.0, MIB), (2.0, 2 * MIB))
    client.sends(1, (1.0, 3 * MIB))
    client.sends(0, (1.0, 4 * MIB))
    sample = observer.observe()
    assert rows(observer) == [[(1.0, 4 * MIB), (2.0, 2 * MIB)], [(61.0, 3 * MIB)]]
    assert [series.title for series in observer.series] == ["engine 0 cuda:0", "engine 1 cuda:0"]
    assert [len(sample.rows), len(sample.relabelled), sample.series] == [3, 1, 2]


def test_engines_stand_in_their_order_whichever_sends_first() -> None:
    client = Client(slow=0.0, quick=0.0)
    observer, _ = begun(client)
    client.sends(1, (1.0, MIB))
    observer.observe()
    client.sends(0, (2.0, MIB))
    observer.observe()
    assert [series.title for series in observer.shown] == ["engine 0 cuda:0", "engine 1 cuda:0"]
    assert [series.number for series in observer.shown] == [1, 0]


def test_what_comes_in_a_pause_is_not_kept_also_where_it_comes_again() -> None:
    client = Client(one=0.0)
    observer, undo = begun(client)
    client.sends(0, (1.0, MIB))
    observer.observe()
    client.sends(0, (2.0, MIB))
    observer.observe(resting=True)
    client.sends(0, (1.0, MIB), (2.0, MIB), (3.0, MIB), notes=["its driver is gone"])
    undo.pop()()
    assert rows(observer) == [[(1.0, MIB), (3.0, MIB)]]
    assert observer.notes == ["engine 0: its driver is gone"]


def test_engines_that_are_gone_or_fail_or_are_busy_are_named_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "_PATIENCE", 0.0)
    client = Client(gone=0.0, failed=0.0, busy=0.0)
    client.answers[1].is_ready = client.answers[2].is_ready = False
    observer, undo = begun(client)
    client.sends(0, (1.0, MIB))
    client.ids.remove(0)
    client.answers[1].is_ready, client.answers[1].failure = True, ModuleNotFoundError("No module named 'gpumem_magic'")
    observer.observe()
    undo.pop()()
    assert rows(observer) == [[(1.0, MIB)]]
    assert [mark.label for mark in observer.marks] == ["engine 0 is gone"]
    assert observer.notes == [
        "Engine 0 is gone: its last figures are from before that.",
        "Engine 1 is not watched: ModuleNotFoundError: No module named 'gpumem_magic'",
        "Engine 2 is busy: its watch ends with what it does.",
    ]
    assert client.asked == [(0, begin), (1, begin), (2, begin), (2, end)]


def test_an_engines_error_at_the_beginning_is_the_magics() -> None:
    client = Client(one=0.0)
    client.answers[0].failure = ModuleNotFoundError("No module named 'gpumem_magic'")
    with pytest.raises(ModuleNotFoundError):
        begun(client)


def test_many_engines_send_less_often() -> None:
    assert [usual_hz(range(count)) for count in (1, 4, 40, 100_000)] == [10.0, 10.0, 1.0, 0.01]
