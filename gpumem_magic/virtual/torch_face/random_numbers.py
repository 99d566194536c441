"""The random numbers of `torch.cuda` on a virtual GPU that computes: they are drawn from the host's generators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda.random
import torch.random

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.random import DeviceRandom
from gpumem_magic.virtual.torch_face.streams import Generator, device_index


class ComputingGenerator(Generator):
    """A generator on a virtual device that computes: its numbers are those of a host's generator with the same seed."""

    def get_state(self) -> torch.Tensor:
        return torch._C.Generator.get_state(self)

    def set_state(self, state: torch.Tensor) -> Any:
        return torch._C.Generator.set_state(self, state)


class _Generators(tuple[Any, ...]):
    """`torch.cuda.default_generators`: what each device draws from now."""

    random: DeviceRandom

    def __getitem__(self, place: Any) -> Any:
        return self.random.generator(range(len(self))[place])

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))


def install(patches: Patches, random: DeviceRandom, device_count: int) -> None:
    def seed_one(seed: int) -> None:
        random.seed(device_index(None), int(seed))

    def seed_all(seed: int) -> None:
        for device in range(device_count):
            random.seed(device, int(seed))

    def get_state(device: Any = "cuda") -> torch.Tensor:
        return random.generator(device_index(device)).get_state()

    def set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        random.set_state(device_index(device), new_state.cpu())

    def set_all_states(new_states: Any) -> None:
        for device, state in enumerate(new_states):
            set_state(state, device)

    for name, function in {
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "seed": lambda: seed_one(_any_seed()),
        "seed_all": lambda: seed_all(_any_seed()),
        "initial_seed": lambda: random.generator(device_index(None)).initial_seed(),
        "get_rng_state": get_state,
        "get_rng_state_all": lambda: [get_state(device) for device in range(device_count)],
        "set_rng_state": set_state,
        "set_rng_state_all": set_all_states,
    }.items():
        for owner in (torch.cuda, torch.cuda.random):
            patches.set(owner, name, function)

    def then_meet(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            random.meet()
            return out

        return change

    for name in ("manual_seed", "seed", "set_rng_state"):
        replaced = then_meet(getattr(torch.random, name))
        for home in (torch, torch.random):
            patches.set(home, name, replaced)
    generators = _Generators([None] * device_count)
    generators.random = random
    patches.set(torch.cuda, "default_generators", generators)
    patches.set(torch, "Generator", ComputingGenerator)


def _any_seed() -> int:
    return int.from_bytes(os.urandom(6), "little")
