"""Out of memory: the facts, the texts of every PyTorch, the flush and retry; and the addresses of the device."""

from __future__ import annotations

import pytest
from allocator_programs import start_run
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.allocator.failure import DeviceOutOfMemory, oom_text
from gpumem_magic.allocator.memory import BASE_ADDRESS, ChunkedAddresses, DeviceMemory, FirstFitAddresses
from gpumem_magic.units import GIB, MIB


def failure_of(limit: int | None = None) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        requested=50 * MIB - 100,
        rounded=50 * MIB,
        segment_size=50 * MIB,
        device=0,
        total=15 * GIB + 799 * MIB,
        free=48 * MIB,
        allocated=14 * GIB + 370 * MIB,
        reserved=14 * GIB + 400 * MIB,
        limit=limit,
        largest_free=20 * MIB,
        outside=1372 * MIB,
    )


OLD = (
    "CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 15.78 GiB total capacity; 14.36 GiB already allocated; "
    "48.00 MiB free; 14.39 GiB reserved in total by PyTorch)"
)
NEW = (
    "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 15.78 GiB of which 48.00 MiB is free. "
    "Of the allocated memory 14.36 GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting "
)
SPLIT_HINT = (
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
PAGE = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_PAGE = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
AVOID = "=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("1.8", OLD),
        ("1.9.1+cu111", OLD),
        ("1.10", f"{OLD} If reserved memory is >> allocated memory try setting {SPLIT_HINT}"),
        ("2.0.1", f"{OLD} If reserved memory is >> allocated memory try setting {SPLIT_HINT}"),
        ("2.1", NEW.replace("capacity", "capacty") + SPLIT_HINT),
        ("2.2", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.8.0", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.9", f"{NEW}PYTORCH_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.10.0", f"{NEW}PYTORCH_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.11", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({NEW_PAGE})"),
        ("2.13.0+cpu", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({NEW_PAGE})"),
    ],
)
def test_texts_of_every_era(version: str, text: str) -> None:
    assert failure_of().message(version) == text


def test_the_limit_is_told_by_the_versions_that_tell_it() -> None:
    failure = failure_of(limit=8 * GIB)
    assert "48.00 MiB free; 8.00 GiB allowed; 14.39 GiB reserved in total" in failure.message("1.8")
    assert "allowed" not in failure.message("2.2")
    assert "is free. 8.00 GiB allowed; Of the allocated memory" in failure.message("2.13")


def test_processes_are_told_in_their_order() -> None:
    text = oom_text(failure_of(), "2.13", process_id=500, process_bytes=15 * GIB, others={700: 2 * MIB, 300: 100 * MIB})
    assert (
        "is free. Process 300 has 100.00 MiB memory in use. Including non-PyTorch memory, this process has 15.00 GiB memory "
        "in use. Process 700 has 2.00 MiB memory in use. Of the allocated memory"
    ) in text
    assert oom_text(failure_of(), "1.8", process_id=500, process_bytes=15 * GIB) == OLD


def test_unknown_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="oldest that is known"):
        failure_of().message("1.7")
    with pytest.raises(ValueError, match="not a PyTorch version"):
        failure_of().message("newest")


def test_an_exabyte_is_refused_at_once() -> None:
    run = start_run()
    with pytest.raises(DeviceOutOfMemory) as caught:
        run.allocator.malloc(1 << 60)
    assert caught.value.message("2.13") == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert run.events == []
    assert run.allocator.memory_stats()["num_ooms"] == 0


def test_out_of_memory_tells_what_was_there() -> None:
    run = start_run(64 * MIB)
    allocator = run.allocator
    allocator.memory.outside = 4 * MIB
    kept = [allocator.malloc(5 * MIB - 100) for _ in range(4)]
    allocator.free(kept.pop(1))
    del run.events[:]
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(60 * MIB - 1)
    failure = caught.value
    assert (failure.requested, failure.rounded, failure.segment_size) == (60 * MIB - 1, 60 * MIB, 60 * MIB)
    assert (failure.total, failure.free, failure.outside) == (64 * MIB, 40 * MIB, 4 * MIB)
    assert (failure.allocated, failure.reserved, failure.limit) == (15 * MIB, 20 * MIB, None)
    assert (failure.device, failure.largest_free) == (0, 5 * MIB)
    assert [(event.action, event.address, event.size) for event in run.events] == [("oom", 40 * MIB, 60 * MIB)]
    assert allocator.memory_stats()["num_ooms"] == allocator.num_alloc_retries == 1
    assert str(failure) == failure.message("2.13")


def test_a_flush_and_retry_is_counted_and_seen() -> None:
    run = start_run(64 * MIB)
    allocator = run.allocator
    small = allocator.malloc(1000)
    cached = allocator.malloc(40 * MIB)
    allocator.free(cached)
    allocator.free(small)
    del run.events[:]
    allocator.malloc(50 * MIB)
    assert [event.action for event in run.events] == ["segment_free", "segment_free", "segment_alloc", "alloc"]
    # The large pool goes first.
    assert [event.size for event in run.events[:2]] == [40 * MIB, 2 * MIB]
    assert allocator.num_alloc_retries == 1
    assert allocator.memory_stats()["num_ooms"] == 0


# Streams.


# Addresses.


def test_addresses_are_first_fit_and_reused() -> None:
    addresses = FirstFitAddresses()
    taken = [addresses.take(size) for size in (2 * MIB, 20 * MIB, 3 * MIB, 2 * MIB)]
    assert taken == [BASE_ADDRESS + offset * MIB for offset in (0, 2, 22, 26)]
    addresses.give_back(taken[1])
    assert addresses.take(22 * MIB) == BASE_ADDRESS + 28 * MIB
    assert addresses.take(18 * MIB) == taken[1]
    assert addresses.take(2 * MIB) == taken[1] + 18 * MIB
    with pytest.raises(KeyError):
        addresses.give_back(12345)


@given(
    st.lists(
        st.one_of(st.integers(1, 9).map(lambda n: ("take", n * MIB)), st.tuples(st.just("give"), st.integers(0, 9)))
    )
)
def test_addresses_never_overlap_and_are_the_lowest(program: list[tuple[str, int]]) -> None:
    addresses = FirstFitAddresses()
    taken: dict[int, int] = {}
    for action, number in program:
        if action == "take":
            span = -(-number // (2 * MIB)) * 2 * MIB
            candidates = sorted([BASE_ADDRESS, *(start + length for start, length in taken.items())])
            lowest = next(
                place
                for place in candidates
                if all(place + span <= start or start + length <= place for start, length in taken.items())
            )
            assert addresses.take(number) == lowest
            taken[lowest] = span
        elif taken:
            address = sorted(taken)[number % len(taken)]
            del taken[address]
            addresses.give_back(address)


def test_chunks_come_from_above_and_are_filled_from_below() -> None:
    top = 1 << 40
    addresses = ChunkedAddresses(top)

    def take(size: int) -> int:
        """How far below the top, in MiB."""
        return (top - addresses.take(size * MIB)) // MIB

    # A chunk of 32 MiB each, of 64 for the third; then what they leave free, the lowest first.
    assert [take(size) for size in (20, 20, 44)] == [32, 64, 128]
    assert [take(size) for size in (16, 12, 2, 14)] == [84, 44, 68, 160]
    # A chunk goes when all of it is free, and its place is the highest.
    addresses.give_back(top - 32 * MIB)
    assert [take(22), take(20)] == [32, 192]
    addresses.give_back(top - 64 * MIB)
    addresses.give_back(top - 44 * MIB)
    assert take(30) == 64
    with pytest.raises(KeyError):
        addresses.give_back(12345)


@given(
    st.lists(
        st.one_of(st.integers(1, 90).map(lambda n: ("take", n * MIB)), st.tuples(st.just("give"), st.integers(0, 9)))
    )
)
def test_chunked_addresses_never_overlap_and_come_back(program: list[tuple[str, int]]) -> None:
    top = 1 << 40
    addresses = ChunkedAddresses(top)
    taken: dict[int, int] = {}
    for action, number in program:
        if action == "take":
            start = addresses.take(number)
            assert start % (2 * MIB) == 0
            assert start + number <= top
            assert all(start + number <= other or other + length <= start for other, length in taken.items())
            taken[start] = number
        elif taken:
            address = sorted(taken)[number % len(taken)]
            del taken[address]
            addresses.give_back(address)
    for address in taken:
        addresses.give_back(address)
    assert addresses.take(1) == top - 32 * MIB


def test_memory_outside_counts() -> None:
    memory = DeviceMemory(100 * MIB, outside=30 * MIB)
    assert memory.free == 70 * MIB
    assert memory.allocate(71 * MIB) is None
    address = memory.allocate(70 * MIB)
    assert address is not None
    memory.outside = 40 * MIB
    assert memory.free == 0
    memory.release(address, 70 * MIB)
    assert (memory.free, memory.reserved) == (60 * MIB, 0)
