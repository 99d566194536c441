"""Stores of `torch.distributed` for a rank that runs alone: no server, and nobody who connects.

What a rank sets, those that run later or beside it find (`letters`). What it adds, every rank is taken to add, so that a number
of ranks that is waited for is there. What it never set, rank 0 is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.virtual.torch_face.letters import Letters


def classes(world: int, rank: int, letters: Letters) -> tuple[type[Any], dict[str, type[Any]]]:
    """One for a group that nobody gave a store, and those in place of the ones that connect processes, by their names."""

    # What PyTorch holds of a store calls its methods only as long as the object is there.
    kept: list[Any] = []

    class Store(torch.distributed.Store):  # type: ignore[misc, name-defined]
        """name: what ranks that mean the same store call it."""

        def __init__(self, name: str) -> None:
            super().__init__()
            kept.append(self)
            self._name = name
            self._own: dict[str, bytes] = {}

        def set(self, key: str, value: str | bytes) -> None:
            self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
            letters.tell(f"{self._name} {key}", self._own[key])

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._own[key]

        def add(self, key: str, value: int) -> int:
            number = int(self._own.get(key, b"0")) + world * value
            self._own[key] = str(number).encode()
            return number

        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            now = self._own[key] if self.check([key]) else b""
            if now != expected_value.encode():
                return now or expected_value.encode()
            self.set(key, desired_value)
            return desired_value.encode()

        def check(self, keys: list[str]) -> bool:
            return all(self._has(key) for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            for key in keys:
                # (Where this one is the first, nobody else is there to be asked.)
                if not self._has(key, 0 if rank else None):
                    raise torch.distributed.DistStoreError(
                        f"rank {rank} runs alone, and waits for {key!r}, which {'rank 0' if rank else 'another rank'} was to "
                        "set: `gpumem run --nproc` runs all ranks"
                    )

        def delete_key(self, key: str) -> bool:
            return self._own.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._own)

        def _has(self, key: str, source: int | None = None) -> bool:
            if key not in self._own:
                try:
                    self._own[key] = letters.told(f"{self._name} {key}", source)
                except LookupError:
                    return False
            return True

    class TCPStore(Store):
        def __init__(self, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(f"{host_name}:{port}")
            self.host, self.port = host_name, port

    class FileStore(Store):
        def __init__(self, path: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(path)
            self.path = path

    return Store, {"TCPStore": TCPStore, "FileStore": FileStore}
