"""Two recordings, allocation by allocation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.snapshot import pairing
from gpumem_magic.snapshot.model import ACTIVE, Block, Segment, TraceEvent
from gpumem_magic.snapshot.pairing import Grown, Recorded, growths, longest_common, pair
from gpumem_magic.snapshot.timeline import Timeline

SIZES = st.lists(st.integers(0, 3), max_size=14)


def length_by_table(a: Sequence[int], b: Sequence[int]) -> int:
    """The textbook's way: the longest common subsequence of every two beginnings."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(SIZES, SIZES)
def test_no_pairing_is_longer(a: list[int], b: list[int]) -> None:
    pairs = longest_common(a, b)
    assert len(pairs) == length_by_table(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(one[0] < other[0] and one[1] < other[1] for one, other in itertools.pairwise(pairs))


@given(SIZES, SIZES)
def test_a_bounded_search_gives_a_pairing_too(a: list[int], b: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "MOST_DIFFERENCES", 2)
        pairs = longest_common(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(one[0] < other[0] and one[1] < other[1] for one, other in itertools.pairwise(pairs))
    if a == b:
        assert len(pairs) == len(a)


def recorded(*steps: tuple[str, int, int]) -> Recorded:
    """(action, address, bytes) in a segment of 2 MiB that is opened first."""
    events = [TraceEvent("segment_alloc", 1 << 20, 2 << 20)]
    for action, address, size in steps:
        events.append(TraceEvent(action, (1 << 20) + address, size))
    return Recorded((), events, Timeline((), events))


def test_pairs_tell_bytes_frees_and_places() -> None:
    one = recorded(
        ("alloc", 0, 100), ("alloc", 512, 600), ("free_requested", 0, 100), ("free_completed", 0, 100), ("alloc", 0, 40)
    )
    other = recorded(("alloc", 0, 101), ("alloc", 512, 2000), ("alloc", 2560, 600), ("alloc", 3584, 40))
    found = pair(one, other)
    assert found.pairs == [(0, 0), (1, 2), (2, 3)]
    assert (list(found.alone_a), list(found.alone_b)) == ([], [1])
    # 101 bytes are not 100; the first is freed in one of the two; the second and third lie elsewhere.
    assert (found.exact, found.freed_alike, found.same_place) == (2, 2, 1)
    assert found.matched == pytest.approx(6 / 7)
    assert (found.bytes_a, found.bytes_paired) == (512 + 1024 + 512, 512 + 1024 + 512)


def test_growth_is_as_asked_for_where_sizes_from_before_are_not_known() -> None:
    """A block from before, of 1.5 MiB as asked for, is freed; 0.5 MiB are asked for before that, and 1 byte after."""

    def begun(kept: int, unsettled: int) -> Recorded:
        """With so many bytes in that block."""
        before = Segment(0, 8 << 20, 4 << 20, 0, "large", (Block(8 << 20, kept, 3 << 19, ACTIVE),))
        events = [TraceEvent("segment_alloc", 1 << 20, 2 << 20), TraceEvent("alloc", 1 << 20, 1 << 19)]
        events += [TraceEvent("free_completed", 8 << 20, 3 << 19), TraceEvent("alloc", (1 << 20) + (1 << 19), 1)]
        return Recorded((before,), events, Timeline((before,), events), unsettled)

    known, other = begun(3 << 19, 0), begun(2 << 20, 1)
    assert growths(known, known) == (Grown(1 << 19, (1 << 19) - (3 << 19) + 512),) * 2
    assert growths(known, other) == growths(other, known) == (Grown(1 << 19, (1 << 19) - (3 << 19) + 1),) * 2
    assert known.growth != other.growth


def test_the_same_recording_agrees_in_everything() -> None:
    one = recorded(("alloc", 0, 100), ("alloc", 512, 600), ("free_completed", 0, 100), ("alloc", 0, 40))
    found = pair(one, one)
    assert found.matched == 1
    assert found.exact == found.freed_alike == found.same_place == 3


def test_recordings_without_allocations_agree() -> None:
    assert pair(recorded(), recorded()).matched == 1
