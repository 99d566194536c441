"""Private pools: a MemPool, or the memory of a CUDA graph. Each is a small and a large pool beside the default ones."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_magic.allocator.adoption import AdoptingHeap
from gpumem_magic.allocator.blocks import DEFAULT_POOL, Pool, PoolGroup, PoolId
from gpumem_magic.allocator.heap import Stacks
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.snapshot.rules import AllocatorSettings


class PooledHeap(AdoptingHeap):
    """A heap with private pools, some of which may be under way: they take the requests of some streams."""

    def __init__(self, device: int, memory: DeviceMemory, settings: AllocatorSettings, stacks: Stacks | None) -> None:
        # Newest first.
        self._routes: list[tuple[PoolGroup, Callable[[int], bool]]] = []
        super().__init__(device, memory, settings, stacks)

    def create_pool(
        self, pool_id: PoolId, *, no_split: bool = False, use_on_oom: bool = False, own_memory: bool = False
    ) -> None:
        """A private pool with one more user; what it is like is decided when it is new. Raises ValueError for (0, 0)."""
        if pool_id == DEFAULT_POOL:
            raise ValueError("(0, 0) is the default pool")
        if pool_id not in self._groups:
            self._groups[pool_id] = PoolGroup(pool_id, no_split=no_split, use_on_oom=use_on_oom, own_memory=own_memory)
        self._groups[pool_id].users += 1

    def begin_pool(self, pool_id: PoolId, accepts: Callable[[int], bool] | None = None) -> None:
        """From now on requests on the streams that `accepts` takes (by default all) go to this pool; the newest wins.

        It is created where it does not exist, and has one more user. Raises ValueError where it is under way already.
        """
        if any(group.id == pool_id for group, _ in self._routes):
            raise ValueError(f"the pool {pool_id} is under way already")
        self.create_pool(pool_id)
        self._routes.insert(0, (self._groups[pool_id], accepts or (lambda stream: True)))

    def end_pool(self, pool_id: PoolId) -> None:
        """Ends what `begin_pool` began; the pool keeps its user. Raises ValueError where it is not under way."""
        remaining = [route for route in self._routes if route[0].id != pool_id]
        if len(remaining) == len(self._routes):
            raise ValueError(f"the pool {pool_id} is not under way")
        self._routes = remaining

    def release_pool(self, pool_id: PoolId) -> None:
        """One user less. Without any, the next `empty_cache` or flush can give the pool's unused memory back.

        Raises ValueError for a pool that does not exist or has no user.
        """
        group = self._known(pool_id)
        if not group.users:
            raise ValueError(f"the pool {pool_id} has no user")
        group.users -= 1
        self._forget_unheld()

    def _known(self, pool_id: PoolId) -> PoolGroup:
        try:
            return self._groups[pool_id]
        except KeyError:
            raise ValueError(f"there is no pool {pool_id}") from None

    def _forget_unheld(self) -> None:
        """Drops private pools without users and without memory."""
        unheld = [pool_id for pool_id, group in self._groups.items() if group.is_private and not group.users]
        if unheld:
            held = {segment.pool.group.id for segment in self._segments.values()}
            for pool_id in unheld:
                if pool_id not in held:
                    del self._groups[pool_id]

    def _routed(self, pool: Pool, stream: int, pool_id: PoolId | None) -> Pool:
        if pool_id is not None:
            return self._group_of(pool_id).pool(pool.name)
        for group, accepts in self._routes:
            if accepts(stream):
                return group.pool(pool.name)
        return pool
