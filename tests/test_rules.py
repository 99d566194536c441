"""The arithmetic of sizes, by the examples that decide and by what must hold for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.snapshot.rules import (
    DEFAULT_SETTINGS,
    UNLIMITED,
    AllocatorSettings,
    pool_of,
    pool_of_segment,
    round_size,
    segment_size,
    should_split,
)
from gpumem_magic.units import GIB, MIB


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (10 * MIB - 1, 10 * MIB)],
)
def test_requests_are_rounded_to_512(size: int, rounded: int) -> None:
    assert round_size(size) == rounded


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200, 4, 1536),  # not above 512 * 4: the ordinary rule
        (2049, 4, 2560),
        (5000, 8, 5120),
        (4096, 4, 4096),
        (4097, 4, 5120),
        (1200, 2, 1536),
        (1200, 1, 1536),  # one division is off
        (100, 4, 512),
        (600 * MIB, 8, 640 * MIB),
        (5 * GIB + 1, 4, 6 * GIB),
    ],
)
def test_power_of_two_divisions(size: int, divisions: int, rounded: int) -> None:
    assert round_size(size, AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)) == rounded


def test_divisions_are_chosen_by_interval() -> None:
    divisions = [0] * 16
    divisions[1] = 2
    settings = AllocatorSettings(roundup_power2_divisions=tuple(divisions))
    assert round_size(2 * MIB + 1, settings) == 3 * MIB
    assert round_size(4 * MIB + 1, settings) == 4 * MIB + 512
    first = AllocatorSettings(roundup_power2_divisions=(2, *[0] * 15))
    # Everything below 1 MiB belongs to the first interval, everything above 32 GiB to the last.
    assert round_size(600 * 1024, first) == 768 * 1024
    last = AllocatorSettings(roundup_power2_divisions=(*[0] * 15, 2))
    assert round_size(70 * GIB, last) == 96 * GIB


@pytest.mark.parametrize(
    ("rounded", "pool", "segment"),
    [
        (512, "small", 2 * MIB),
        (MIB, "small", 2 * MIB),
        (MIB + 512, "large", 20 * MIB),
        (10 * MIB - 512, "large", 20 * MIB),
        (10 * MIB, "large", 10 * MIB),
        (10 * MIB + 512, "large", 12 * MIB),
        (19 * MIB, "large", 20 * MIB),
        (21 * MIB, "large", 22 * MIB),
    ],
)
def test_pools_and_segments(rounded: int, pool: str, segment: int) -> None:
    assert pool_of(rounded) == pool
    assert segment_size(rounded) == segment
    assert pool_of_segment(segment) == pool


def test_large_segment_size_is_for_shared_segments_only() -> None:
    settings = AllocatorSettings(large_segment_size=12 * MIB)
    assert segment_size(MIB, settings) == 2 * MIB
    assert segment_size(5 * MIB, settings) == 12 * MIB
    assert segment_size(14 * MIB, settings) == 14 * MIB


def test_splitting() -> None:
    assert should_split(512, 512, "small")
    assert not should_split(0, 512, "small")
    assert not should_split(MIB, 4 * MIB, "large")  # exactly 1 MiB is not worth it
    assert should_split(MIB + 512, 4 * MIB, "large")
    assert should_split(512, 4 * MIB, "large", expandable=True)
    limited = AllocatorSettings(max_split_size=20 * MIB)
    assert should_split(5 * MIB, 20 * MIB - 512, "large", limited)
    assert not should_split(5 * MIB, 20 * MIB, "large", limited)


def test_default_settings() -> None:
    assert AllocatorSettings() == DEFAULT_SETTINGS
    assert DEFAULT_SETTINGS.max_split_size == UNLIMITED == 2**64 - 1
    assert DEFAULT_SETTINGS.max_non_split_rounding == DEFAULT_SETTINGS.large_segment_size == 20 * MIB


@given(
    st.integers(1, 80 * GIB),
    st.sampled_from([0, 1, 2, 4, 8, 16]),
)
def test_every_rounded_size_fits_its_segment(size: int, divisions: int) -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    rounded = round_size(size, settings)
    assert rounded >= size
    assert rounded - size < 512 or divisions > 1
    assert rounded < 2 * max(size, 512)
    assert round_size(rounded, settings) == rounded
    assert segment_size(rounded, settings) >= rounded
    assert segment_size(rounded, settings) % (2 * MIB) == 0
