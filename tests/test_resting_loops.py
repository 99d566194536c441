"""Loops in which nothing touches a device are not told, iteration for iteration; what moves memory there has its row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from IPython.utils.capture import capture_output
from shell_fakes import FakeObserver, clean_shell, shell_with_device
from test_cell import _MANAGER, _bodies

from gpumem_magic.recording import hook
from gpumem_magic.recording.cell import CellRun, prepare


class Still:
    """Devices on which nothing moves."""

    moves = 0

    def __init__(self) -> None:
        self.untold = 0

    def tell(self, moved: Any) -> None:
        pass

    def left_out(self, line: int, count: int) -> None:
        self.untold += count


class StillObserver(FakeObserver):
    def __init__(self) -> None:
        super().__init__()
        self.devices = Still()


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as made:
        yield made


@pytest.fixture
def device() -> Iterator[Any]:
    with shell_with_device() as made:
        yield made


def report(shell: Any, body: str, flags: str = "") -> Any:
    with capture_output():
        shell.run_cell(f"%%gpumem -q -o found {flags}\n{body}").raise_error()
    return shell.user_ns["found"]


def rows(found: Any) -> list[tuple[tuple[int, ...], int, str, int]]:
    return [(row.iteration, row.line, row.label, row.allocated) for row in found.checkpoints if row.allocated]


# ---- the program is the same


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies)
def test_any_program_means_the_same_where_loops_rest_at_once(shell: Any, body: list[str]) -> None:
    text = _MANAGER + "n, t, u, turns = 1, [], 0, iter([1] * 9)\n" + "\n".join(body) + "\n(n, t)\n"
    plain = CellRun(shell, prepare(shell, text)).run()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hook, "QUIET_TURNS", 0)
        patches.setattr(hook, "QUIET_STATEMENTS", 0)
        run = CellRun(shell, prepare(shell, text))
        run.observe(StillObserver())
        assert run.run() == plain
    assert run.hook_failure is None


LOOP = """total = 0
for i in range(5_000):
    total += i
    if i == 4_000: failing
"""


def test_an_error_in_a_loop_that_rests_is_at_its_line_and_iteration(shell: Any) -> None:
    run = CellRun(shell, prepare(shell, LOOP))
    run.observe(StillObserver())
    with pytest.raises(NameError) as caught:
        run.run()
    found = run.failed(caught.value.__traceback__)
    assert found is not None
    assert found == ("failing", 5, (4_001,), (3,))
    assert shell.user_ns["total"] == sum(range(4_001))


def test_every_iteration_is_counted_and_few_are_told(shell: Any) -> None:
    for body in (
        "n = 0\nfor i in range(100_000):\n    n += 1\n",
        "n = 0\nwhile n < 100_000:\n    n += 1\n",
        "n = 0\nfor i in range(100):\n    for j in range(1_000):\n        n += 1\n",
    ):
        observer = StillObserver()
        run = CellRun(shell, prepare(shell, body))
        run.observe(observer)
        run.run()
        assert shell.user_ns["n"] == 100_000
        assert len(observer.rows) < 2_000
        assert observer.devices.untold + len({row[2] for row in observer.rows if row[2]}) >= 100


def test_an_observer_without_devices_is_told_of_all(shell: Any) -> None:
    observer = FakeObserver()
    run = CellRun(shell, prepare(shell, "for i in range(1_000):\n    x = i\n"))
    run.observe(observer)
    run.run()
    assert len(observer.rows) == 1_000


# ---- the figures are right


def test_what_allocates_in_a_loop_that_rests_has_its_row(device: Any) -> None:
    found = report(
        device,
        "kept = []\nfor i in range(3_000):\n    n = i\n    if i == 2_000:\n"
        "        kept.append(torch.zeros(1024, 1024, device='cuda'))\n        n += 1\n"
        "        kept.append(torch.zeros(2048, 1024, device='cuda'))\n    n -= 1\nlast = 1\n",
    )
    told = rows(found)
    mib = 1 << 20
    assert [(iteration, line, size // mib) for iteration, line, _, size in told if iteration == (2_001,)] == [
        ((2_001,), 6, 4),
        ((2_001,), 8, 12),
    ]
    assert found.peak.where.endswith("in iteration 2001, line 8")
    assert [(one.line, one.total) for one in found.folded] == [(3, 3_000)]
    assert told[-1][-1] == found.checkpoints[-1].allocated == 12 * mib


def test_what_allocates_in_an_inner_loop_too(device: Any) -> None:
    found = report(
        device,
        "for i in range(400):\n    for j in range(3):\n        n = i * j\n        if (i, j) == (350, 1):\n"
        "            x = torch.zeros(1024, 1024, device='cuda')\n",
    )
    assert found.peak.where.startswith("`x = torch.zeros(1024, 1024, device='cuda')` in iteration 351")
    assert found.checkpoints[-1].allocated == 1 << 22


def test_what_is_freed_there_is_freed_in_the_report(device: Any) -> None:
    found = report(
        device, "x = torch.zeros(1024, 1024, device='cuda')\nfor i in range(9_000):\n    if i == 8_000: del x\n"
    )
    assert found.checkpoints[1].allocated == 1 << 22
    assert found.checkpoints[-1].allocated == 0
    assert not any("do not add up" in note for note in found.notes)


def test_a_loop_that_works_on_the_device_is_told_as_ever(device: Any) -> None:
    found = report(device, "for i in range(300):\n    x = torch.zeros(256, 1024 + i, device='cuda')\n    n = i\n")
    assert found.recording.left_out == {}
    assert len(found.recording.checkpoints) == 602


def test_phases_on_the_host_are_told_as_ever(device: Any) -> None:
    found = report(
        device, "layer = torch.nn.Linear(2, 2)\nx = torch.zeros(1, 2)\nfor i in range(300):\n    y = layer(x)\n"
    )
    assert len(found.recording.spans) == 300
    assert found.recording.left_out == {}


@pytest.mark.parametrize("flags", ["", "--no-lines"])
def test_the_rows_that_are_kept_do_not_grow_with_the_loop(device: Any, flags: str) -> None:
    counts = []
    for length in (20_000, 400_000):
        found = report(device, f"n = 0\nfor i in range({length}):\n    n += i\n", flags)
        counts.append(len(found.recording.checkpoints))
    assert max(counts) < 1_000


def test_a_limit_on_iterations_still_ends_a_loop(device: Any) -> None:
    cell = "import torch\nn = 0\nfor i in range(5_000):\n    n += 1\n    if n == 1:\n        x = torch.ones(1, device='cuda')\n"
    report(device, cell, "--max-iterations 3000")
    assert device.user_ns["n"] == 3_000


WHILES = [
    # (cell, n at its end, iterations)
    ("n = 0\nwhile n < 5_000:\n    n += 1\nelse:\n    n = -n\n", -5_000, 5_000),
    (
        "n = 0\nwhile True:\n    n += 1\n    if n % 2: continue\n    if n > 4_000: break\nelse:\n    n = -n\n",
        4_002,
        4_002,
    ),
    ("n = 0\nwhile (n := n + 1) < 5_000: pass\n", 5_000, 4_999),
]


@pytest.mark.parametrize(("body", "end", "iterations"), WHILES)
def test_a_while_that_rests_ends_as_it_would(device: Any, body: str, end: int, iterations: int) -> None:
    found = report(device, body)
    assert device.user_ns["n"] == end
    assert [one.total for one in found.folded] == [iterations]


TEST = "n = 0\ndef test():\n    if n == 3_000: {}\n    return n < {}\n"


def test_what_a_resting_while_allocates_in_its_test_has_its_row(device: Any) -> None:
    allocates = "globals().update(x=torch.zeros(1024, 1024, device='cuda'))"
    for end, total in ((5_000, 5_000), (3_000, 3_001)):
        found = report(device, TEST.format(allocates, end) + "x = None\nwhile test():\n    n += 1\nelse:\n    y = 1\n")
        assert next(row[:2] for row in rows(found) if row[0]) == ((3_001,), 7)
        assert [one.total for one in found.folded] == [total]
        assert found.checkpoints[-1].allocated == 1 << 22


def test_an_error_in_the_test_of_a_resting_while_is_at_its_iteration(shell: Any) -> None:
    run = CellRun(shell, prepare(shell, TEST.format("1 / 0", 5_000) + "while test():\n    n += 1\n"))
    observer = StillObserver()
    run.observe(observer)
    with pytest.raises(ZeroDivisionError) as caught:
        run.run()
    found = run.failed(caught.value.__traceback__)
    assert found is not None
    assert found[1:] == (6, (3_001,), (6,))
    assert observer.devices.untold + len({row[2] for row in observer.rows if row[2]}) == 3_000


def test_an_error_in_an_iteration_that_was_not_told_counts_it_once(device: Any) -> None:
    with capture_output():
        device.run_cell("%%gpumem -q -o found\nn = 0\nwhile True:\n    n += 1\n    if n == 2_000: 1 / 0\n")
    assert [one.total for one in device.user_ns["found"].folded] == [2_000]
