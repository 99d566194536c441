"""What a recording is: numbers and strings only, no tensor, no exception, no frame.

A *moment* is a position in each device's log with the counters read there. Checkpoints are moments after a statement of the
user's; spans are pairs of moments with a meaning (forward, backward, ...); sightings are looks at a live object.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_magic.devices.base import Counters, DeviceLog, Label
from gpumem_magic.snapshot.files import LoadedSnapshot
from gpumem_magic.snapshot.timeline import Allocation

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
RECOMPUTATION = "recomputation"
PHASES = frozenset({FORWARD, BACKWARD, OPTIMIZER, RECOMPUTATION})
"""The kinds of spans that are phases of training."""
AUTOCAST_ENDS = "autocast ends"
"""The kind of a span in which autocast lets go of what it keeps."""
NO_WIDE_WEIGHTS = "no float32 weights"
"""Its label where there are none that autocast would cast."""
WORKSPACES_GO = "workspaces go"
"""The kind of a span in which a program has PyTorch give cuBLAS's workspaces back."""

Failed = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""The statement that an error came through: its text, line and iteration, and the lines of the loops around it."""

NOBODY = -1
"""Stands for no module where a module's number could."""


class Moment(NamedTuple):
    """Per device index: how many events of its log had happened, and what its counters said.

    tick: the recorder's own count of moments. It orders those between which no memory moved.
    """

    positions: Mapping[int, int]
    counters: Mapping[int, Counters]
    tick: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A moment after a statement. kind: before | statement | error | after.

    line: as the notebook shows it, the magic's own line being 1; 0 for before and after. iteration: 1-based counters of the
    cell's own loops around the statement, outermost first. loops: the lines of those loops, same order and length. begin: where
    its statement began, if rows before it were left out of a long run; else at the row before.
    """

    kind: str
    label: str
    statement: str
    line: int
    moment: Moment
    iteration: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    begin: Moment | None = None


@dataclass(frozen=True)
class Span:
    """An interval with a name: kind is forward | backward | optimizer | recomputation | range | mark (a mark's end is its start)
    | `AUTOCAST_ENDS` | `WORKSPACES_GO` | annotation (a range of the program's own, found beside a file's events; its end is its
    start).

    recomputation: forward work that activation checkpointing does again inside a backward. failed: an exception left it.
    Iterations are not recorded: they follow from the optimizer's steps. skipped: how many iterations of a long run were left
    out just before it. steps_left_out: how many steps of the first optimizer went with these, and with iterations that had rows
    of their own. graph: whether autograd had recorded what a forward gave. beside: whether forwards that have no spans began
    meanwhile in other threads. evaluating: whether a forward's module was in evaluation mode.
    """

    kind: str
    label: str
    start: Moment
    end: Moment
    failed: bool = False
    skipped: int = 0
    steps_left_out: int = 0
    graph: bool = False
    beside: bool = False
    evaluating: bool = False


class Sighting(NamedTuple):
    """A live object seen to hold the storage at `address` when the device's log stood at `position`.

    role: what it was there as: "parameter", "buffer", "gradient", "optimizer_state", "kv_cache", "input" (an argument of
    the outermost forward that autograd did not compute), "named" (a variable of the cell held it), "output" (a variable of
    the cell held it, and autograd computed it), "weights" (a dictionary with a model's names and shapes held it),
    "states" (what an optimizer's `state_dict` gave, or a copy of that, held it),
    "beside" (a list with a tensor of each weight's shape, before there were gradients) and "beside_gradients" (the same later).
    name: its name for a reader (``decoder.weight``, ``output``) or None. of: of a gradient, its parameter's address; else 0.
    """

    device: int
    position: int
    address: int
    role: str
    name: str | None = None
    of: int = 0


# What keeps a tensor: a variable's name, a list or dictionary that a name leads to, autograd's graph, or nothing: a temporary.
KEPT_BY_NAME, KEPT_BY_LIST, KEPT_BY_GRAPH, NOT_KEPT, NOT_KNOWN = "name", "list", "backward", "temporary", "unknown"
# How the place of what a tensor's graph keeps begins (``graph of loss: self saved by gelu``), and of what only its own references
# keep.
OF_A_GRAPH = "graph of "
OF_A_CYCLE = "a reference cycle"
# And what of it is PyTorch's compiler's.
OF_A_TRACE = "`torch.compile`'s, from tracing"


@dataclass(frozen=True)
class Hold:
    """What kept the allocation at `address` when the device's log stood at `position`. keeper: one of the words above; place: in
    words (``lit.outputs[0]['preds']``). dtype and shape: of the largest tensor on it."""

    device: int
    position: int
    address: int
    keeper: str
    place: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """The user's error, as strings and numbers. Those from `requested` on are bytes, for an out-of-memory error only.

    requested: what the program asked for; rounded: that to 512; segment: what the allocator asked the driver for;
    largest_free: the largest cached-but-free block that was there. module: inside a forward, the module's name in the outermost
    one, or its class; operator: what was called there; place: of a file's failed request, in words; elsewhere: a sentence
    about the other devices; "" where unknown.
    """

    type: str
    message: str
    line: int | None
    requested: int | None = None
    rounded: int | None = None
    segment: int | None = None
    largest_free: int | None = None
    device: int | None = None
    module: str = ""
    operator: str = ""
    place: str = ""
    elsewhere: str = ""


@dataclass(frozen=True)
class StandIn:
    """How often a line read a value from a virtual device, which has none, and was given a stand-in.

    supplied: how many of these were values that the user supplied. decides: what may be made of what the line reads: that a
    "loop" ends, or the program does ("end"), a "size", an error that is caught ("except") or would be ("try"), the way of an
    ``if`` ("branch"), what has "gradients", or which object is called or removed ("choice"); or something is selected by it
    ("selection": on the device as much as there can be), or it is only checked for numbers that are none ("check"), or
    `GradScaler` goes by it ("step"), or whole numbers of a list are printed, or a text that is made of them, or an ``if`` that
    only prints goes by it ("text"), or an operator's own memory goes by it ("operator"). latest: nothing was read after it.
    caller: where a library read, the line of the program's own that called it. fails: the error that ended the program may come
    of what the line read. returned: how many went back to a device from the host, as they were, where nothing was made of them
    that is known here. widest: how many were selected by a mask of several dimensions, all that there can be.
    """

    line: str
    count: int
    supplied: int = field(default=0, metadata={"only_with": "supplied"})
    decides: str = field(
        default="",
        metadata={
            "only_with": "decides",
            "one_of": (
                "except",
                "try",
                "end",
                "loop",
                "size",
                "branch",
                "gradients",
                "choice",
                "selection",
                "check",
                "step",
                "text",
                "operator",
            ),
        },
    )
    latest: bool = field(default=False, metadata={"only_with": "latest"})
    caller: str = field(default="", metadata={"only_with": "caller"})
    fails: bool = field(default=False, metadata={"only_with": "fails"})
    returned: int = field(default=0, metadata={"only_with": "returned"})
    widest: int = field(default=0, metadata={"only_with": "widest"})


@dataclass(frozen=True)
class ModuleName:
    """path: the outermost module's variable or class, then the module's name in it (``model.encoder.0``). type: its class."""

    path: str
    type: str


@dataclass(frozen=True)
class ModuleTrace:
    """switches: by device, (position in its log, number of the module at work from there on, -1 for none), in order; empty where
    positions cost too much to be read for each module. parameters: (device, address) -> number of the module that owns it.
    compiled: the same of what compiled code made for a module in it, alive at the first backward."""

    names: tuple[ModuleName, ...] = ()
    switches: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    parameters: Mapping[tuple[int, int], int] = field(default_factory=dict)
    compiled: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def of(self, device: int, one: Allocation) -> int | None:
        """The number of the module that made an allocation which lives at the first backward; None where none is known."""
        if one.born < 0:
            return None
        inner = self.compiled.get((device, one.address))
        return self.at(device, one.born) if inner is None else inner

    def at(self, device: int, event: int) -> int | None:
        """The number of the innermost module that was at work at an event of a device's log; None for none."""
        switches = self.switches.get(device, ())
        rank = bisect_left(switches, (event + 1, NOBODY))
        number = switches[rank - 1][1] if rank else NOBODY
        return None if number == NOBODY else number


@dataclass(frozen=True)
class KnownLabels:
    """What a saved recording knew of its allocations. born: by the event that made a block; before: by the address of one that
    was there before the recording."""

    born: Mapping[int, Label]
    before: Mapping[int, Label]

    def of(self, allocations: Iterable[Allocation]) -> tuple[Label, ...]:
        """Their labels, in order."""
        unknown = Label("unknown", "unknown")
        return tuple(
            self.born.get(one.born, unknown) if one.born >= 0 else self.before.get(one.address, unknown)
            for one in allocations
        )


@dataclass(frozen=True)
class CompilerPlace:
    """Where the compiler did something. place: ``14`` in the cell itself, ``trainer.py:210`` elsewhere, "" in PyTorch itself.

    text: what stands there, or the function's name. reason: in the compiler's own words. count: how often. function: the name of
    the function that was given up for it, and where that begins (`around`).
    """

    place: str
    text: str
    reason: str
    count: int
    function: str = field(default="", metadata={"only_with": "function"})
    around: str = field(default="", metadata={"only_with": "function"})


@dataclass(frozen=True)
class CompiledCode:
    """What torch.compile did during the recording. graphs: how many it took. breaks: where one ended before its function did.

    again: functions that it compiled once more, for other inputs than before; `reason` is the last one. failed: where it gave a
    function up, which then runs eagerly as a whole.
    """

    graphs: int = 0
    breaks: tuple[CompilerPlace, ...] = ()
    again: tuple[CompilerPlace, ...] = ()
    failed: tuple[CompilerPlace, ...] = field(default=(), metadata={"only_with": "failed"})


@dataclass(frozen=True)
class Recording:
    """Everything that was seen. `logs` is by device index; `primary` is the device that the report is about.

    left_out: the line of a loop -> how many of its iterations have no rows here, since the run was long. modules: which of them
    was at work when, up to the first backward. file: where it was read from, None where a program was watched as it ran; then
    its checkpoints are at events and not after statements, and its moments have no counters. labels: by device, where the file
    kept them. holds: who held what at the end, and what the first backward's graph saved. own_file: the file name of the
    program's own code. eager: whether nothing ran that torch.compile made, None where that is not known.
    """

    torch: str
    primary: int
    logs: Mapping[int, DeviceLog]
    checkpoints: tuple[Checkpoint, ...]
    spans: tuple[Span, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    error: Failure | None = None
    stand_ins: tuple[StandIn, ...] = ()
    notes: tuple[str, ...] = ()
    overhead_seconds: float = 0.0
    left_out: Mapping[int, int] = field(default_factory=dict)
    modules: ModuleTrace = field(default_factory=ModuleTrace)
    file: LoadedSnapshot | None = None
    labels: Mapping[int, KnownLabels] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    own_file: str = ""
    compiled: CompiledCode = field(default_factory=CompiledCode)
    eager: bool | None = None

    @property
    def was_watched(self) -> bool:
        """Whether objects and phases were looked at as the program ran. A file has stacks, lifetimes and sizes."""
        return self.file is None
