"""Addresses in short lists: whatever goes in and out, the answers are those of one sorted list."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.snapshot import addresses
from gpumem_magic.snapshot.addresses import SortedAddresses

NUMBERS = st.integers(-3, 40)


@given(st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), max_size=120), st.integers(2, 9))
def test_the_answers_are_those_of_one_sorted_list(steps: list[tuple[bool, int, int]], most: int) -> None:
    plain: list[int] = []
    with patch.object(addresses, "_MOST", most):
        tested = SortedAddresses()
        for adds, number, other in steps:
            if adds:
                insort(plain, number)
                tested.add(number)
            elif number in plain:
                plain.remove(number)
                tested.remove(number)
            else:
                with pytest.raises(KeyError):
                    tested.remove(number)
            after = bisect_right(plain, other)
            assert tested.above(other) == (plain[after] if after < len(plain) else None)
            assert tested.at_or_below(other) == (plain[after - 1] if after else None)
            low, high = sorted((number, other))
            assert tested.between(low, high) == plain[bisect_left(plain, low) : bisect_left(plain, high)]
            assert tested.between(high, low) == plain[bisect_left(plain, high) : bisect_left(plain, low)]
        assert tested.between(-100, 100) == plain


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=30), st.integers(-3, 120), st.integers(1, 30))
def test_what_touches_a_range_shares_a_byte_with_it(pieces: list[tuple[int, int]], address: int, size: int) -> None:
    tested, sizes, end = SortedAddresses(), {}, 0
    for gap, length in pieces:
        tested.add(end + gap)
        sizes[end + gap] = length
        end += gap + length
    wanted = set(range(address, address + size))
    touching = [start for start in sorted(sizes) if wanted & set(range(start, start + sizes[start]))]
    assert tested.touching(address, size, sizes.__getitem__) == touching


def test_no_list_grows_without_end() -> None:
    many = SortedAddresses()
    for number in range(10_000):
        many.add(number * 7919 % 10_007)
    assert max(map(len, many._lists)) <= addresses._MOST
    assert len(many._lists) >= 10_000 // addresses._MOST
    for number in range(10_000):
        many.remove(number * 7919 % 10_007)
    assert many.above(-1) is many.at_or_below(10**9) is None
    assert many._lists == many._lasts == []
