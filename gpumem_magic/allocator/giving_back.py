"""Returning memory to the driver: on request, before a request fails, and by garbage collection; and the memory limit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from gpumem_magic.allocator.blocks import ADDRESS_MASK, DEFAULT_POOL, FREE, KEY_SHIFT, CachedBlock, Pool, PoolId
from gpumem_magic.allocator.heap import Stacks
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.pool_checkpoints import CheckpointedHeap
from gpumem_magic.snapshot.rules import UNLIMITED, AllocatorSettings


class ReleasingHeap(CheckpointedHeap):
    """A heap that gives back what it does not need."""

    def __init__(self, device: int, memory: DeviceMemory, settings: AllocatorSettings, stacks: Stacks | None) -> None:
        self._fraction = None if settings.memory_fraction >= 1.0 else settings.memory_fraction
        super().__init__(device, memory, settings, stacks)

    @property
    def limit(self) -> int | None:
        """What the memory fraction allows to reserve, or None without one."""
        return None if self._fraction is None else int(self._fraction * self.memory.total)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved to a share of the device's total; 1 is no limit. Raises ValueError beyond 0 to 1."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a memory fraction lies between 0 and 1, not {fraction}")
        self._fraction = fraction if fraction < 1.0 else None
        self._apply_settings()

    @property
    def settings_in_force(self) -> AllocatorSettings:
        """The settings, with the memory fraction that was set last."""
        return replace(self.settings, memory_fraction=1.0 if self._fraction is None else self._fraction)

    def complete_pending(self, stream: int | None = None) -> None:
        """Finishes the work of one stream, or of all, and frees the blocks that waited for nothing else."""
        for queue_of in [stream] if stream is not None else list(self._pending):
            for block in self._pending.pop(queue_of, ()):
                self._complete_pending(block)

    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Gives unused segments, and unused pages of expandable ones, back to the driver, after waiting for all streams.

        By default of the default pools, and of private pools that nobody holds any more; else of the given pool only.
        Raises ValueError for a pool that does not exist.
        """
        self._books.events["num_sync_all_streams"] += 1
        self.complete_pending()
        if pool_id is not None and pool_id != DEFAULT_POOL:
            group = self._known(pool_id)
            self._release_unused(group.small)
            self._release_unused(group.large)
            self._forget_unheld()
            return
        self._release_unused(self._large)
        self._release_unused(self._small)
        if pool_id is None:
            for group in [group for group in self._groups.values() if group.is_private and not group.users]:
                self._release_unused(group.small)
                self._release_unused(group.large)
            self._forget_unheld()

    def release_segment(self, address: int) -> None:
        """Gives one cached segment back. Raises ValueError where none starts at `address` or a part of it is in use."""
        segment = self._segments.get(address)
        if segment is None or segment.page or segment.first.is_split or segment.first.state != FREE:
            raise ValueError(f"no unused segment at address {address:#x}")
        self._release(segment.first)

    def release_pages(self, address: int, size: int) -> bool:
        """Takes the memory from pages of an expandable segment; whether they are all that the free block there can give.

        Raises ValueError where they are not unused pages of one segment.
        """
        block = self._free_block_over(address, size)
        begin, end = self._pages_within(block)
        if (
            address < begin
            or address + size > end
            or (address - begin) % block.segment.page
            or size % block.segment.page
        ):
            raise ValueError(f"no whole pages of {size} bytes at address {address:#x}")
        self._unmap(block, address, address + size)
        return (address, address + size) == (begin, end)

    def _free_block_over(self, address: int, size: int) -> CachedBlock:
        block = self._blocks.get(address)
        if block is None:
            # The pages begin within the block.
            keys = [key for segment in self._segments.values() if segment.page for key in segment.free]
            starts = [start for start in (key & ADDRESS_MASK for key in keys) if start < address]
            block = self._blocks[max(starts)] if starts else None
        inside = block is not None and address + size <= block.address + block.size
        if block is None or not inside or size <= 0 or block.state != FREE or not block.segment.page:
            raise ValueError(f"no unused pages at address {address:#x}")
        return block

    def _release_unused(self, pool: Pool) -> None:
        """By stream, size and address: first whole segments, then the pages of expandable ones."""
        growing = []
        for stream in sorted(pool.free):
            for key in list(pool.free[stream]):
                block = self._blocks[key & ADDRESS_MASK]
                if block.segment.page:
                    growing.append(block)
                elif not block.is_split:
                    self._release(block)
        for block in growing:
            begin, end = self._pages_within(block)
            if begin < end:
                self._unmap(block, begin, end)

    def _release_available(self, pool: Pool, rounded: int, stream: int) -> bool:
        """With a split limit: gives back one cached oversize block that would do, or several that do together."""
        least = self._max_split
        if least == UNLIMITED:
            return False
        wanted = max(rounded, least)
        blocks = [self._blocks[key & ADDRESS_MASK] for key in pool.free.get(stream, ())]
        index = bisect_left(pool.free.get(stream, []), wanted << KEY_SHIFT)
        if index < len(blocks) and not blocks[index].segment.page:
            if blocks[index].is_split:
                return False
            self._release(blocks[index])
            return True
        released = 0
        # Downwards from the largest; what was given back stays so even where it is not enough.
        for block in reversed(blocks[:index]):
            if released >= wanted or block.size < least:
                break
            if not block.is_split and not block.segment.page:
                self._release(block)
                released += block.size
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Gives back unused large segments that are older than the mean, until reserved is below the threshold."""
        limit = self.limit
        assert limit is not None
        surplus = self.reserved - int(self._settings.garbage_collection_threshold * limit)
        keys = [key for stream in sorted(self._large.free) for key in self._large.free[stream]]
        whole = [block for block in (self._blocks[key & ADDRESS_MASK] for key in keys) if not block.is_split]
        while surplus > 0 and any(not block.segment.page for block in whole):
            mean = sum(map(self._large.age, whole)) / len(whole)
            # A pass is never cut short: PyTorch does not want to be back here soon.
            old = [block for block in whole if self._large.age(block) >= mean and not block.segment.page]
            if not old:
                break
            for block in old:
                surplus -= block.size
                whole.remove(block)
                self._release(block)
