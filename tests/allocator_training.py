"""A training loop as an allocator sees it, near the end of the memory: what splits what is known for each of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings
from gpumem_magic.units import GIB, MIB

# One weight that nearly fills a sixth of the device, four small ones, and a batch of 59 rows.
WEIGHT = 3816 * 163_200 * 4
WEIGHTS = (4 * MIB,) * 4 + (WEIGHT,)
BATCH = 59 * 163_200 * 4
ACTIVATIONS = tuple(size * MIB for size in (347, 406, 160, 231, 441, 185, 246, 216))
# Each is made while scratch memory of this size is there.
SCRATCH = tuple(size * MIB for size in (97, 109, 175, 242, 59, 417, 266, 65))
TOTAL = int(15.78 * GIB)
OUTSIDE = 1374 * MIB


@dataclass
class Training:
    """What happened: every event, how many iterations began, and the request that failed, if one did."""

    allocator: CachingAllocator
    events: list[TraceEvent] = field(default_factory=list)
    begun: int = 0
    failure: DeviceOutOfMemory | None = None


def train(
    iterations: int,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    available: int = TOTAL - OUTSIDE,
    leak: int = 0,
    stacks: bool = False,
) -> Training:
    """Adam's steps of one tensor after another, with two temporaries each; gradients that are kept and filled with zeros.

    leak: bytes that every iteration keeps for good. stacks: each request says which line of the program it is from.
    """
    line = [0]
    memory = DeviceMemory(TOTAL, TOTAL - available)
    allocator = CachingAllocator(
        0, memory, settings, (lambda: (Frame("train.py", "loop", line[0]),)) if stacks else None
    )
    run = Training(allocator)
    allocator.sinks.append(run.events)

    def new(size: int, number: int) -> int:
        line[0] = number
        return allocator.malloc(size)

    for size in WEIGHTS:
        new(size, 1)
    gradients: list[int] = []
    states: list[int] = []
    batch: list[int] = []
    output = 0
    try:
        for _ in range(iterations):
            run.begun += 1
            fresh = [new(BATCH, 2), new(BATCH, 3)]
            for address in batch:
                allocator.free(address)
            batch = fresh
            if leak:
                new(leak, 4)
            activations = []
            for size, scratch in zip(ACTIVATIONS, SCRATCH, strict=True):
                work = new(scratch, 5)
                activations.append(new(size, 6))
                allocator.free(work)
            result = new(BATCH, 7)
            allocator.free(output)
            output = result
            backward(allocator, new, gradients, activations)
            for number, size in enumerate(WEIGHTS):
                if len(states) <= 2 * number:
                    states += [new(size, 11), new(size, 12)]
                first = new(size, 13)
                second = new(size, 14)
                allocator.free(first)
                allocator.free(second)
    except DeviceOutOfMemory as failure:
        run.failure = failure
    return run


def backward(
    allocator: CachingAllocator, new: Callable[[int, int], int], gradients: list[int], activations: list[int]
) -> None:
    """The first one's gradients stay; later ones are added to those and freed."""
    of_output = new(BATCH, 8)
    is_first = not gradients
    for number, size in enumerate(reversed(WEIGHTS)):
        gradient = new(size, 9 if number == 0 else 10)
        if is_first:
            gradients.append(gradient)
        else:
            allocator.free(gradient)
        if number == 0:
            for address in reversed(activations):
                allocator.free(address)
            allocator.free(of_output)
