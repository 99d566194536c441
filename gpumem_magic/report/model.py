"""What a report says: numbers and strings only. It measures nothing, and knows nothing about display or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumem_magic.allocator.verdict import FailedRequest
from gpumem_magic.attribution.ledger import TENANT_CATEGORIES
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.recording.model import (
    KEPT_BY_GRAPH,
    KEPT_BY_LIST,
    KEPT_BY_NAME,
    NOT_KEPT,
    NOT_KNOWN,
    CompiledCode,
    Recording,
    StandIn,
)
from gpumem_magic.report.contents import Contents
from gpumem_magic.report.inside import ActivationBreakdown
from gpumem_magic.report.ranks import Ranks

# In the order in which a bar stacks them, bottom (left) to top (right).
CATEGORIES = (
    *TENANT_CATEGORIES,
    "rounding",
    "cached",
    "context",
    "other_processes",
    "context_or_others",
)
# The categories that add up to `allocated`; with `cached` they add up to `reserved`.
ALLOCATED_CATEGORIES = CATEGORIES[: CATEGORIES.index("cached")]
# There before any tensor, and none of PyTorch's allocator.
OUTSIDE_CATEGORIES = CATEGORIES[CATEGORIES.index("cached") + 1 :]
SCHEMA = 1
# Of rows.
SKIPPED = "skipped"
KINDS = ("before", "statement", "part", SKIPPED, "error", "after")
KEEPERS = (KEPT_BY_NAME, KEPT_BY_LIST, KEPT_BY_GRAPH, NOT_KEPT, NOT_KNOWN)

# So many causes are shown at once.
MOST_CAUSES = 3

# Reports of before these were told apart have them among the activations.
LATER_CATEGORIES = {"kv_cache": 0, "autocast_copies": 0}

# What belongs to a model and its training, whatever the batch.
OF_A_MODEL = ("parameters", "buffers", "gradients", "optimizer_state")

# What a reader is told.
LABELS = {name: name.replace("_", " ") for name in CATEGORIES} | {
    "kv_cache": "KV cache",
    "cached": "cached, free",
    "context": "CUDA context",
    "context_or_others": "context or other processes",
}


@dataclass(frozen=True)
class TensorKind:
    """A tensor's shape and type (``float32``)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are alike, alive at one moment. What is not known is "" (a line: 0, a shape: None, inputs: none).

    bytes: what was asked for; count: of blocks. What the blocks have more is a group of its own, `rounding`, so that a moment's
    groups add up to `allocated`. category: "" for what is left out of a long list, which is the last group. shape: None also
    where shapes differ. operator: as a user knows it (``sub``, ``cross_entropy``); inputs: what it was given; backward: whether
    its backward made them. statement and line: of the user's cell; expression: what stands there (``pred - y``). inner: the
    innermost frame that is neither PyTorch's nor ours, where that is another place (``modeling_llama.py:244 forward``). keeper:
    what keeps them at that moment; kept_by: the place in words (``lit.outputs[0]['preds']``, ``backward of mul``).
    """

    bytes: int
    count: int
    category: str = field(metadata={"one_of": ("", *TENANT_CATEGORIES, "rounding")})
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    operator: str = ""
    inputs: tuple[TensorKind, ...] = ()
    backward: bool = False
    statement: str = ""
    line: int = 0
    expression: str = ""
    inner: str = ""
    module: str = ""
    keeper: str = field(default=NOT_KNOWN, metadata={"one_of": KEEPERS})
    kept_by: str = ""


@dataclass(frozen=True)
class Skipped:
    """Iterations of a loop without rows of their own, by number. like: the one that each of them repeats, None where they differ
    or nobody looked."""

    first: int
    last: int
    like: int | None


@dataclass(frozen=True)
class Row:
    """The state after a statement (or part of one), and the peaks inside it. Bytes; None is unavailable, never 0.

    position: of that state in the device's log, -1 where the recording is not at hand; not a part of the JSON.
    loops: the lines of the loops around it, as many as `iteration` has counters. skipped: which iterations a row of that kind
    stands for.
    """

    kind: str = field(metadata={"one_of": KINDS})
    label: str
    statement: str
    line: int
    iteration: tuple[int, ...]
    parts: tuple[Row, ...]
    allocated: int
    reserved: int
    device_used: int | None
    peak_allocated: int
    peak_reserved: int
    categories: Mapping[str, int | None] = field(metadata={"keys": CATEGORIES, "later": LATER_CATEGORIES})
    position: int = field(default=-1, compare=False, metadata={"unwritten": True})
    loops: tuple[int, ...] = field(default=(), metadata={"only_with": "loops"})
    skipped: Skipped | None = field(default=None, metadata={"only_with": "skipped"})


@dataclass(frozen=True)
class Peak:
    """A row's figures at the first moment of maximum allocated, in bytes. where: the statement (and part), in words.
    tensors: what is allocated then, the largest first; empty where that is not known."""

    where: str
    allocated: int
    reserved: int
    device_used: int | None
    peak_allocated: int
    peak_reserved: int
    categories: Mapping[str, int | None] = field(metadata={"keys": CATEGORIES, "later": LATER_CATEGORIES})
    tensors: tuple[TensorGroup, ...] = field(default=(), metadata={"only_with": "tensors"})
    position: int = field(default=-1, compare=False, metadata={"unwritten": True})


@dataclass(frozen=True)
class ReportError:
    """The user's error. What follows the line is for an out-of-memory error only, and None where it is not known: four sizes in
    bytes, and the verdict: what stood in the way and which settings would have helped. module: inside a forward, the
    module's name in the outermost one, or its class; operator: what was called there; place: where a file's request failed, in
    words, or a cell's, where that is inside what stands at `line`; elsewhere: what the other devices held then; "" where
    unknown. tensors: what was allocated when a request failed, as of the peak's. asked: the tensor that the request was for,
    where an operator told."""

    type: str
    message: str
    line: int | None
    requested: int | None = None
    rounded: int | None = None
    segment: int | None = None
    largest_free: int | None = None
    verdict: FailedRequest | None = field(default=None, metadata={"only_with": "verdict"})
    module: str = field(default="", metadata={"only_with": "module"})
    operator: str = field(default="", metadata={"only_with": "module"})
    place: str = field(default="", metadata={"only_with": "place"})
    elsewhere: str = field(default="", metadata={"only_with": "elsewhere"})
    tensors: tuple[TensorGroup, ...] = field(default=(), metadata={"only_with": "tensors"})
    asked: TensorKind | None = field(default=None, metadata={"only_with": "asked"})

    @property
    def at(self) -> str:
        """`` at line 12`` of the cell, `` at train.py:12 step`` of a file, or ""."""
        return f" at line {self.line}" if self.line is not None else f" at {self.place}" if self.place else ""

    @property
    def wanted(self) -> int | None:
        """The bytes of the request that failed, rounded as the allocator does, where that is known."""
        return self.requested if self.requested is None or self.rounded is None else self.rounded


@dataclass(frozen=True)
class Folded:
    """A loop (at `line`) of which only `kept` of `total` iterations have rows."""

    line: int
    total: int
    kept: int


@dataclass(frozen=True)
class Owner:
    """Who held memory at the end of the cell, in bytes; over all owners `bytes` add up to what has a name.

    kind: variable | out | traceback | module | thread | cycle | library. frees: what comes back if it alone lets go; statement:
    what lets go of it, None where no single one does. together: statements that free all of `bytes`, where others hold some of it
    too, and together_frees what they free.
    """

    name: str
    kind: str
    type: str
    bytes: int
    frees: int
    statement: str | None
    together: str
    together_frees: int


@dataclass(frozen=True)
class Cause:
    """Why memory was what it was. name: the cause's in the catalogue; remedy: what to do, or "". bytes: what is at stake.
    describes: it says what the memory is, and blames nothing."""

    name: str
    text: str
    remedy: str
    bytes: int
    describes: bool = field(default=False, metadata={"only_with": "describes"})

    @property
    def sentence(self) -> str:
        """The text with what to do, as it stands among a report's notes."""
        return f"{self.text} {self.remedy}".strip()


@dataclass(frozen=True, repr=False, kw_only=True)
class ReportData:
    """Where one device's memory went. `devices` holds the same for every other device that was used.

    answer: the report in a sentence or two: the peak or the failure, where, of what, and what to do. contents: what was held at
    the moment that was asked for, where a snapshot file was read.
    checkpoints: the rows in the order in which they ran. evidence: kind -> bytes at the peak. retries: how often the allocator
    gave cached memory back and tried again. inside: what `layers` and `operators` tell, None where no module ran.
    remarks: what has to be said besides, in order: `notes` are all of it in words, `causes` why memory was what it was.
    compiled: what torch.compile did, None where it did nothing.
    ranks: of a program's ranks together, where this is the report of the worst of them.
    source: what it was made from, numbers and strings too, which `timeline` and `save_snapshot` need; not a part of the JSON.
    """

    torch: str
    device: DeviceFacts
    checkpoints: tuple[Row, ...]
    peak: Peak
    error: ReportError | None = None
    evidence: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    stand_ins: tuple[StandIn, ...] = ()
    folded: tuple[Folded, ...] = ()
    remarks: tuple[str | Cause, ...] = ()
    overhead_seconds: float = 0.0
    devices: tuple[ReportData, ...] = ()
    owners: tuple[Owner, ...] = ()
    inside: ActivationBreakdown | None = field(default=None, metadata={"only_with": "inside"})
    answer: str = field(default="", metadata={"only_with": "answer"})
    contents: Contents | None = field(default=None, compare=False, metadata={"only_with": "contents"})
    compiled: CompiledCode | None = field(default=None, metadata={"only_with": "compiled"})
    ranks: Ranks | None = field(default=None, metadata={"only_with": "ranks"})
    source: DeviceView | None = field(default=None, compare=False, metadata={"unwritten": True})

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know besides the figures, one sentence or two each."""
        return tuple(one if isinstance(one, str) else one.sentence for one in self.remarks)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why memory was what it was, as far as that is known."""
        return tuple(one for one in self.remarks if isinstance(one, Cause))

    @property
    def shown_causes(self) -> tuple[Cause, ...]:
        """The first few causes, of those that explain a twentieth of the peak or of what grew; the others are for who asks."""
        first, last = (self.checkpoints[0], self.checkpoints[-1]) if self.checkpoints else (None, None)
        grown = last.allocated - first.allocated if first is not None and last is not None else 0
        least = min(self.peak.allocated, grown if grown > 0 else self.peak.allocated) / 20
        return tuple(one for one in self.causes if one.bytes >= least)[:MOST_CAUSES]

    @property
    def recording(self) -> Recording | None:
        """What was recorded; None for a report that was read from JSON."""
        return None if self.source is None else self.source.recording
