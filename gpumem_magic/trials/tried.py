"""What one trial came to: numbers and strings, and the course of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumem_magic.snapshot.model import Segment
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings

FITS, MEMORY, ERROR = "fits", "memory", "error"


@dataclass(frozen=True)
class Course:
    """A run's requests and frees on one device, by identity.

    steps: (whether it is a request, the block's number, its stream, its private pool), in order; blocks from before have negative
    numbers. sizes: of the requests, in order, in bytes. live: the blocks at the peak, each with its share's place in
    `Tried.shares`. start: the segments before. whole: whether the program went to its end. available: what the device has for
    them in bytes, of `total`.
    """

    steps: tuple[tuple[bool, int, int, tuple[int, int] | None], ...]
    sizes: tuple[int, ...]
    live: tuple[tuple[int, int], ...]
    start: tuple[Segment, ...]
    whole: bool
    available: int
    total: int
    settings: AllocatorSettings = DEFAULT_SETTINGS


@dataclass(frozen=True)
class Share:
    """What one line holds at the peak, in bytes. line: 0 where none is known; text: its statement, or what made it."""

    category: str
    line: int
    text: str
    bytes: int


@dataclass(frozen=True)
class Tried:
    """One run of a program with these values. ending: one of the words above. Sizes are bytes; `used` is what nvidia-smi
    would have said at its highest, of `capacity`.

    iterations: of training; repeats: whether it ended since they repeated exactly; assumes: although a loop goes by its
    number, and may do something else later; cut: whether a library's loop was left, with all that follows it.
    line, statement, iteration: where it failed; wanted: the request that failed; error: the first line of another error.
    notes: what its report says besides. before: what was allocated when it began.
    kept: activations at the start of the first backward by the path of the module that made them, "" for none.
    grown: what was held more after its last iteration than after the first; growing: what each still added when it was ended,
    after `left_after` of them.
    seconds: of the processor that it took, where that was asked.
    flops, moved: of one iteration, where they were counted: FLOPs by PyTorch's formulas, bytes between host and device.
    """

    device: str
    values: Mapping[str, int]
    ending: str
    capacity: int
    used: int
    allocated: int
    reserved: int
    categories: Mapping[str, int]
    shares: tuple[Share, ...] = ()
    where: str = ""
    iterations: int = 0
    repeats: bool = False
    assumes: bool = False
    cut: bool = False
    retries: int = 0
    line: int = 0
    statement: str = ""
    iteration: tuple[int, ...] = ()
    wanted: int = 0
    error: str = ""
    before: int = 0
    course: Course | None = field(default=None, repr=False, compare=False)
    flops: int = 0
    notes: tuple[str, ...] = ()
    moved: int = 0
    grown: int = 0
    growing: int = 0
    left_after: int = 0
    seconds: float = field(default=0, compare=False)
    kept: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.ending == FITS
