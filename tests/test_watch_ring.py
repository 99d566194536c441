"""The ring, the marks and the thinning: bounded, and no peak is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.widgets.columns import ALLOCATED, SENT
from gpumem_magic.widgets.marks import CELL, CHECKPOINT, USER, Mark, Marks, named_marks, short
from gpumem_magic.widgets.ring import Ring
from gpumem_magic.widgets.thin import thin, without_gaps

sizes = st.lists(st.integers(0, 1 << 45), min_size=1, max_size=400)


@settings(deadline=None)
@given(sizes, st.sampled_from([2, 4, 16, 64]))
def test_a_ring_is_bounded_ordered_and_keeps_the_highest_and_the_newest(values: list[int], capacity: int) -> None:
    ring = Ring(capacity, 2, 1)
    for time, value in enumerate(values):
        ring.push([time, value])
        assert len(ring) <= capacity
        assert ring.latest == [time, value]
    rows = list(ring)
    assert ring.taken == len(values)
    assert max(row[1] for row in rows) == max(values)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert all(values[int(time)] == value for time, value in rows)
    # Each row stands for `per_row` samples, the last one for what there is.
    assert len(rows) == -(-len(values) // ring.per_row)
    for place, (_, value) in enumerate(rows):
        assert value == max(values[place * ring.per_row : (place + 1) * ring.per_row])


def test_a_day_at_ten_hertz_fits_where_minutes_do() -> None:
    ring = Ring(64, 2, 1)
    for time in range(86_400):
        ring.push([time, time == 50_000])
    assert len(ring) <= 64
    assert ring.per_row == 2048
    assert [50_000.0, 1.0] in list(ring)


def test_a_rings_mistakes_are_named() -> None:
    for capacity in (0, 1, 3):
        with pytest.raises(ValueError, match="even"):
            Ring(capacity, 2, 1)
    with pytest.raises(ValueError, match="no column 2"):
        Ring(4, 2, 2)
    ring = Ring(4, 2, 1)
    with pytest.raises(ValueError, match="a row of 3 numbers"):
        ring.push([1, 2, 3])
    for place in (0, -1):
        with pytest.raises(IndexError):
            ring.row(place)
        with pytest.raises(IndexError):
            ring.replace(place, [1, 2])


def test_a_row_can_be_replaced_and_byte_counts_stay_exact() -> None:
    ring = Ring(4, 2, 1)
    ring.push([1, (1 << 52) + 1])
    assert int(ring.row(0)[1]) == (1 << 52) + 1
    ring.replace(0, [1, 7])
    assert list(ring) == [[1, 7]]


def test_marks_stay_bounded_and_a_users_own_stay_longest() -> None:
    marks = Marks(limit=10)
    for time in range(500):
        marks.add(Mark(float(time), USER if time % 100 == 0 else CELL, str(time)))
        assert len(marks) <= 10
    assert [mark.label for mark in marks if mark.kind == USER] == ["0", "100", "200", "300", "400"]
    assert [mark.time for mark in marks] == sorted(mark.time for mark in marks)
    for time in range(50):
        marks.add(Mark(float(500 + time), USER, "own"))
    assert len(marks) == 10


def test_labels_are_one_short_line() -> None:
    assert short("a\n  b\tc") == "a b c"
    assert len(short("x" * 500)) == 120


def test_names_have_room_and_a_users_own_come_first() -> None:
    marks = [
        Mark(10.0, CELL, "In [1]"),
        Mark(11.0, USER, "mine"),
        Mark(50.0, CELL, "In [2]"),
        Mark(51.0, CHECKPOINT, "loss.backward()"),
        Mark(99.0, USER, "at the very end"),
        Mark(101.0, USER, "later"),
    ]
    found = [(mark.label, on_left) for mark, on_left in named_marks(marks, 0.0, 100.0)]
    assert found == [("mine", False), ("at the very end", True), ("In [2]", False)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([CELL, USER]), st.text(max_size=40)), max_size=60))
def test_names_never_cross_the_ends_of_the_axis_or_each_other(drawn: list[tuple[float, str, str]]) -> None:
    found = named_marks([Mark(*each) for each in drawn], 0.0, 100.0)
    places = []
    for mark, on_left in found:
        width = min(len(mark.label), 24) + 2
        places.append((mark.time - width, mark.time) if on_left else (mark.time, mark.time + width))
    places.sort()
    assert all(high <= 100.001 for _, high in places)
    assert all(first[1] <= second[0] + 0.001 for first, second in itertools.pairwise(places))
    assert bool(found) == bool(drawn)


@settings(deadline=None)
@given(sizes, st.integers(1, 40))
def test_thinning_keeps_the_peak_the_order_and_the_last(values: list[int], points: int) -> None:
    rows = []
    for time, size in enumerate(values):
        row = [0.0] * len(SENT)
        row[0], row[ALLOCATED] = float(time), float(size)
        rows.append(row)
    kept = thin(rows, points)
    assert len(kept) <= points + 1 or len(rows) <= points
    assert kept[-1] == rows[-1]
    assert max(row[ALLOCATED] for row in kept) == max(values)
    assert [row[0] for row in kept] == sorted({row[0] for row in kept})


def test_a_pause_parts_the_rows() -> None:
    rows = [[time] for time in (1.0, 2.0, 9.0, 9.5)]
    assert [len(part) for part in without_gaps(rows, 3.0)] == [2, 2]
    assert without_gaps([], 1.0) == []
