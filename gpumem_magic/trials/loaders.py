"""What a trial finds of processes that the notebook has begun: they go on as if there had been no trial.

A DataLoader's iterator talks to its workers, and ends them when it goes, over pipes and flags that a fork shares; so does
multiprocessing with the process that notes what is shared.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import Any

# Iterators that persistent loaders had: they are never thrown away here.
_KEPT: list[object] = []


def leave_workers() -> None:
    """From now on, in a trial's process: nothing is put back. It has such processes of its own."""
    trackers: Any = sys.modules.get("multiprocessing.resource_tracker")
    if trackers is not None:
        trackers._resource_tracker.__init__()
    loading: Any = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    loader, iterator = loading.DataLoader, loading._MultiProcessingDataLoaderIter
    begin, fetch, end = loader.__iter__, iterator._next_data, iterator._shutdown_workers

    @wraps(begin)
    def __iter__(self: Any) -> Any:
        if _is_anothers(self._iterator):
            _KEPT.append(self._iterator)
            self._iterator = None
        return begin(self)

    @wraps(fetch)
    def _next_data(self: Any) -> Any:
        if _is_anothers(self):
            raise RuntimeError("a trial has no workers for a DataLoader's iterator that an earlier cell began")
        return fetch(self)

    @wraps(end)
    def _shutdown_workers(self: Any) -> None:
        if not _is_anothers(self):
            end(self)
        elif self._worker_pids_set:
            # This process's note of them is by the iterator's address, which another one may have next.
            self._worker_pids_set = False
            loading._utils.signal_handling._remove_worker_pids(id(self))

    loader.__iter__, iterator._next_data, iterator._shutdown_workers = __iter__, _next_data, _shutdown_workers


def _is_anothers(iterator: Any) -> bool:
    """Whether its workers belong to the process that this one came from."""
    return any(worker._parent_pid != os.getpid() for worker in getattr(iterator, "_workers", ()))
