"""Sizes in words."""

from __future__ import annotations

from gpumem_magic.units import GIB, MIB, human, spans

WORDS = {
    0: "0 B",
    512: "512 B",
    2048: "2.0 KiB",
    round(8.1 * MIB): "8.1 MiB",
    1278 * MIB: "1,278 MiB",
    round(14.7 * GIB): "14.7 GiB",
}


def test_a_size_keeps_three_or_four_digits_and_names_its_unit() -> None:
    assert {size: human(size) for size in WORDS} == WORDS


def test_numbers_that_follow_each_other_are_one_span() -> None:
    assert spans([7, 0, 2, 3, 4]) == ["0", "2-4", "7"]
    assert spans([]) == []
