"""Whether a program that asks for the same in each iteration would ever fail: the emulated allocator serves further turns.

Pieces may lie otherwise in every iteration for long, though all ask for the same. What the allocator does follows from where its
blocks lie: once they lie as after an earlier turn, nothing new can come.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.program import ALLOC, FAILED, FREE, PoolId, Program
from gpumem_magic.devices.base import DeviceLog
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.recording.repetition import ENOUGH, period_at_end
from gpumem_magic.trials.counting import AT_LEAST, CHEAP_EVENTS
from gpumem_magic.virtual.engine.device import VirtualDevice

# So many are played on at most: about two seconds' work.
_MOST_STEPS, _MOST_TURNS = 200_000, 200


class _TurnStep(NamedTuple):
    """age: of the block that is freed, in requests since it was asked for."""

    action: str
    age: int
    size: int
    stream: int
    pool: PoolId | None


class FurtherTurns:
    """Is asked wherever an iteration may end the run. counts: the program's loops may do something else later."""

    def __init__(self, recorder: Recorder, devices: Sequence[VirtualDevice], counts: bool) -> None:
        self._recorder = recorder
        self._devices = devices
        self._counts = counts
        self._are_steady = False
        # Looking takes time, and what is not steady may not be soon.
        self._next_look = ENOUGH

    def are_known(self) -> bool:
        """Whether the last iterations repeat exactly, or ask for the same and will find it for ever in what is reserved now."""
        count = len(self._recorder.iterations)
        if self._counts and (count < AT_LEAST or self.events < CHEAP_EVENTS):
            return False
        if count >= self._next_look and self._recorder.alike < ENOUGH:
            self._look(count)
        return self._are_steady or self._recorder.alike >= ENOUGH

    def begin_anew(self) -> None:
        """Something else happened between the iterations: those that follow have to show it again."""
        self._are_steady = False
        self._next_look = len(self._recorder.iterations) + ENOUGH

    @property
    def events(self) -> int:
        """So much the allocators have done."""
        return sum(log.position() for log in self._recorder.logs.values())

    def _look(self, count: int) -> None:
        ends = self._recorder.iteration_ends
        if not period_at_end([tuple(now[at] - then[at] for at in now) for then, now in pairwise(ends)]):
            self._next_look = count + 1
            return
        found = [
            log.growing is not None and _go_on(log.growing, [one[index] for one in ends], self._devices[index])
            for index, log in self._recorder.logs.items()
        ]
        self._next_look = 2 * count if False in found else count + max(1, count // 4)
        self._are_steady = all(found)


def _go_on(log: DeviceLog, ends: Sequence[int], device: VirtualDevice) -> bool | None:
    """Whether further turns are served for ever; None where the last ones do not ask for the same yet.

    ends: where the iterations ended in the log, after where the first began.
    """
    if device.allocator.settings.garbage_collection_threshold > 0:
        # What is collected goes by the ages of blocks.
        return False
    program = Program(log.start, log.events, device.segments())
    steps, places = _steps(program, ends)
    turns = [tuple(steps[first:last]) for first, last in pairwise(places)]
    period = period_at_end(turns)
    if not period:
        return None
    turn = [step for one in turns[len(turns) - period :] for step in one]
    begun = steps[places[-1] :]
    if begun != turn[: len(begun)] or any(step.action == FAILED for step in turn):
        return False
    asked = [step.block for step in program.steps if step.action == ALLOC]
    live = {number: log.events[block].address for number, block in enumerate(asked) if block not in program.freed}
    live.update((number, address) for address, number in program.before.items() if number not in program.freed)
    return _are_served(turn[len(begun) :] + turn[: len(begun)], len(asked), live, device)


def _steps(program: Program, ends: Sequence[int]) -> tuple[list[_TurnStep], list[int]]:
    """All steps, and where in them the iterations end."""
    numbers = {number: number for number in program.before.values()}
    steps: list[_TurnStep] = []
    places: list[int] = []
    made = 0
    for step in program.steps:
        while len(places) < len(ends) and ends[len(places)] <= step.event:
            places.append(len(steps))
        age = made - numbers[step.block] if step.action == FREE else 0
        if step.action == ALLOC:
            numbers[step.block] = made
            made += 1
        steps.append(_TurnStep(step.action, age, step.size, step.stream, step.pool_id))
    return steps, places + [len(steps)] * (len(ends) - len(places))


def _are_served(turn: Sequence[_TurnStep], made: int, live: dict[int, int], device: VirtualDevice) -> bool:
    """Whether turns come back to where they were. made: requests so far; live: a request's number (below 0: from before) ->
    address."""
    memory = DeviceMemory(device.memory.total, device.memory.outside)
    allocator = CachingAllocator(0, memory, device.allocator.settings_in_force)
    allocator.adopt(device.segments())
    reserved = allocator.reserved
    oldest = max((step.age for step in turn), default=0)
    seen = set()
    for _ in range(min(_MOST_TURNS, _MOST_STEPS // max(1, len(turn)))):
        # What is older than all that is freed stays.
        blocks = frozenset((made - at <= oldest, at - made * (made - at <= oldest), live[at]) for at in live)
        state = blocks, tuple((one.address, one.total_size) for one in allocator.segments())
        if state in seen:
            return True
        seen.add(state)
        for step in turn:
            if step.action == ALLOC:
                try:
                    live[made] = allocator.malloc(step.size, step.stream, step.pool)
                except DeviceOutOfMemory:
                    return False
                made += 1
            elif step.action == FREE:
                if made - step.age not in live:
                    return False
                allocator.free(live.pop(made - step.age))
            else:
                allocator.empty_cache()
        if allocator.peak_reserved > reserved:
            return False
    return False
