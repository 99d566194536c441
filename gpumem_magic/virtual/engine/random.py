"""Random numbers on a virtual GPU that computes: drawn as a run on the host would draw them.

A device shares the host's generator as long as nobody puts the two into different states: `torch.manual_seed` seeds both, and so
do programs that seed them one after the other. One that is seeded otherwise has a generator of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _OfDevice(torch._C.Generator):
    """A device's own, where it does not share the host's."""

    number = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)


class DeviceRandom:
    """The generators of all devices."""

    def __init__(self, device_count: int) -> None:
        self._own: list[torch.Generator | None] = [None] * device_count

    def generator(self, device: int) -> torch.Generator:
        """The generator that the device draws from."""
        return self._own[device] or torch.default_generator

    def seed(self, device: int, seed: int) -> None:
        self._own[device] = own = _OfDevice()
        own.number = device
        own.manual_seed(seed)
        self.meet()

    def set_state(self, device: int, state: torch.Tensor) -> None:
        own = _OfDevice()
        own.number = device
        own.set_state(state)
        self._own[device] = own
        self.meet()

    def meet(self) -> None:
        """Where a device's generator stands as the host's does, there is one for both from now on."""
        if any(self._own):
            shared = torch.default_generator.get_state()
            self._own = [own if own is None or not own.get_state().equal(shared) else None for own in self._own]

    def is_shared(self, device: int) -> bool:
        """Whether the device draws from the host's generator."""
        return self._own[device] is None

    @contextmanager
    def drawing(self, device: int) -> Iterator[None]:
        """Inside, what is drawn on the host without a generator of the program's own comes from the device's."""
        own = self._own[device]
        if own is None:
            yield
            return
        hosts = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(hosts)
