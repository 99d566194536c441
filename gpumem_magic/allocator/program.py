"""A trace as a program: requests and frees of blocks by identity, not by address, so that another allocator can run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_magic.allocator.recorded_pools import PrivatePools
from gpumem_magic.snapshot.model import ACTIVE, Segment, TraceEvent

ALLOC = "alloc"
FREE = "free"
# The program emptied the cache.
FLUSH = "flush"
# A request that failed in the recording.
FAILED = "failed"

PoolId = tuple[int, int]
_RELEASES = frozenset({"segment_free", "segment_unmap"})
# What follows releases that a request needed, and that another allocator decides for itself.
_SEARCHES = frozenset({"segment_alloc", "segment_map", "oom"})


class ReplayStep(NamedTuple):
    """action: one of the constants above. event: the index of its event. block: which block is meant; the same number in an
    alloc and in its free. round: 0 as recorded, 1 and up in a repetition. size: requested bytes (rounded ones for FAILED)."""

    action: str
    event: int
    block: int
    round: int
    size: int
    stream: int
    pool_id: PoolId | None


@dataclass(frozen=True)
class RepeatedPart:
    """A part of a program that can be run again: the events first..stop-1.

    handed: block that was there when the part began and that it frees -> the block of the part that stands for it in
    the next round. once: blocks of the part that a further round does not make again (an optimizer's states). replaced:
    those that it makes anew and whose predecessor goes then. passing: those that have to fit, and of whose life nothing is known.
    """

    first: int
    stop: int
    handed: Mapping[int, int] = field(default_factory=dict)
    once: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    passing: frozenset[int] = frozenset()


class Program:
    """One device's trace up to an event. Numbers of blocks: the index of the alloc event; negative for one from before.

    start: the segments when the trace began; final: those at its end, which tell which pools requests were for. stop: only
    the events before it belong to the program; None is all.
    """

    def __init__(
        self,
        start: Sequence[Segment],
        events: Sequence[TraceEvent],
        final: Sequence[Segment] = (),
        stop: int | None = None,
    ) -> None:
        self.start = tuple(start)
        # Address of a block that was allocated at the start -> its number. One that waited for a stream is free soon.
        self.before: dict[int, int] = {}
        for segment in start:
            for block in segment.blocks:
                if block.state == ACTIVE:
                    self.before[block.address] = -1 - len(self.before)
        self.steps: list[ReplayStep] = []
        # Block -> the event that freed it.
        self.freed: dict[int, int] = {}
        self._count = len(events) if stop is None else stop
        self._read(events, PrivatePools(start, events, final))

    def run(self, repetition: RepeatedPart | None = None, rounds: int = 0) -> Iterator[ReplayStep]:
        """The steps as recorded, then those of `rounds` repetitions. Raises ValueError for a part that is not in it."""
        yield from self.steps
        if repetition is None or not rounds:
            return
        if not 0 <= repetition.first <= repetition.stop <= self._count:
            raise ValueError(
                f"events {repetition.first} to {repetition.stop} are not within the {self._count} of the program"
            )
        again = self._again(repetition)
        for round_number in range(1, rounds + 1):
            shift = round_number * self._count
            for step, age in again:
                yield step._replace(block=step.block + shift - age * self._count, round=round_number)

    def _again(self, repetition: RepeatedPart) -> list[tuple[ReplayStep, int]]:
        """The steps of one round, each with how many rounds ago its block was made."""
        steps: list[tuple[ReplayStep, int]] = []
        for step in self.steps:
            if not repetition.first <= step.event < repetition.stop:
                continue
            if step.action == ALLOC:
                if step.block in repetition.passing:
                    steps += [(step, 0), (step._replace(action=FREE), 0)]
                    continue
                if step.block in repetition.once:
                    continue
                steps.append((step, 0))
                if step.block in repetition.replaced:
                    steps.append((step._replace(action=FREE), 1))
            elif step.action == FREE:
                if step.block >= repetition.first:
                    if step.block not in repetition.once:
                        steps.append((step, 0))
                elif step.block in repetition.handed:
                    steps.append((step._replace(block=repetition.handed[step.block]), 1))
            elif step.action == FLUSH:
                steps.append((step, 0))
        return steps

    def _read(self, events: Sequence[TraceEvent], private: PrivatePools) -> None:
        live = dict(self.before)
        for index in range(self._count):
            event = events[index]
            action = event.action
            if action == "alloc":
                live[event.address] = index
                self._add(ALLOC, index, index, event, private.of(event) if private else None)
            elif action == "free_completed":
                # Memory that waits for a stream is not free before.
                block = live.pop(event.address, None)
                if block is not None:
                    self.freed[block] = index
                    self._add(FREE, index, block, event, None)
            elif action == "oom":
                self._add(FAILED, index, index, event, private.of(event) if private else None)
            elif action != "snapshot" and action != "free_requested":
                if private:
                    private.note(index, event)
                if action in _RELEASES and self._ends_a_flush(events, index):
                    self._add(FLUSH, index, index, event, None)

    def _add(self, action: str, index: int, block: int, event: TraceEvent, pool_id: PoolId | None) -> None:
        self.steps.append(ReplayStep(action, index, block, 0, event.size, event.stream, pool_id))

    def _ends_a_flush(self, events: Sequence[TraceEvent], index: int) -> bool:
        """Whether releases end here that no request asked for: `torch.cuda.empty_cache()`."""
        if index + 1 >= len(events):
            return True
        following = events[index + 1].action
        return following not in _RELEASES and following not in _SEARCHES
