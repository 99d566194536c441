"""What every device, real or virtual, can be asked: its facts, its counters now, and the log of what its allocator does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings

if TYPE_CHECKING:
    from gpumem_magic.devices.reads import Reads


class DeviceError(Exception):
    """A device cannot be used, turned on or turned off. The text is one line and says what to do."""


@dataclass(frozen=True)
class DeviceFacts:
    """What does not change. kind: "cuda" or "virtual". `total_bytes` is torch's figure, `smi_total_bytes` nvidia-smi's; None
    where unknown."""

    name: str
    kind: str
    index: int
    uuid: str | None
    total_bytes: int | None
    smi_total_bytes: int | None

    @property
    def capacity(self) -> int:
        """What nvidia-smi gives as the total, or torch's figure without it, in bytes; 0 where neither is known."""
        return (self.total_bytes if self.smi_total_bytes is None else self.smi_total_bytes) or 0


class Counters(NamedTuple):
    """What allocator and driver report at a moment, in bytes; null (None) is unavailable, never 0.

    device_used = reserved + context + other_processes, or reserved + context_or_others where the driver can't tell this
    process from the others (context and other_processes are None then).
    """

    allocated: int
    reserved: int
    device_used: int | None
    context: int | None
    other_processes: int | None
    context_or_others: int | None
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0


@dataclass(frozen=True)
class Label:
    """What an allocation is and how that is known (the ledger's categories and kinds of evidence)."""

    category: str
    evidence: str
    name: str | None = None


class CodePlace(NamedTuple):
    """Where in a program memory was asked for. file, line and function: the innermost frame that is neither PyTorch's nor ours;
    those of `own`: the innermost one that is no installed library's either, "" and 0 where there is none. text: of that line;
    expression: what stands there in it (``pred - y``), "" where that is not known."""

    file: str
    line: int
    function: str
    own_file: str
    own_line: int
    own_function: str
    text: str
    expression: str


# So many of the tensors that an operator is given are noted.
MOST_INPUTS = 8


class Birth(NamedTuple):
    """How an allocation came to be. operator: by the name that users know; kernel: by PyTorch's own; both "" where unknown.
    shape: None for what a kernel works with. inputs: (shape, type) of its tensors, `MOST_INPUTS` at most; 1 for a dimension that
    is only expanded. node: of autograd's graph, where a backward made it; place is then that of the forward, as far as that is
    known. sharing: the functions of PyTorch's that share parameters among ranks, pass on between stages of a pipeline, or move a
    module's tensors, which asked for it, the innermost first. why: in words, why the operator goes no way that takes less."""

    operator: str
    kernel: str
    shape: tuple[int, ...] | None
    dtype: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    place: CodePlace | None
    node: str = ""
    sharing: tuple[str, ...] = ()
    why: str = ""


class Padded(NamedTuple):
    """A matrix of the host's whose rows end, or begin, with a number that may be padding. shape: rows and positions; padded: how
    many of the positions have that number there; number: which; shortest, longest: what the rows have without it; is_mask:
    whether all else is the other one of 0 and 1; at_end: whether it stands there in the rows."""

    shape: tuple[int, int]
    padded: int
    number: int
    shortest: int
    longest: int
    is_mask: bool
    at_end: bool


@dataclass(frozen=True)
class DeviceLog:
    """What a device's allocator did between two moments.

    start: the segments when the log began. events: since then; "position p" is the moment after the first p events.
    origins: index of an alloc event -> how the block came to be: "workspace" (a library's scratch memory), "estimate"
    (likewise, of a size that only the library knows: a virtual device's estimate), "convolution_scratch" (likewise, and the
    library told it), "recurrent_scratch" and "recurrent_kept"
    (the same for recurrent layers: while a call runs, and from forward to backward), "autocast" (a copy of a weight that autocast
    keeps), "host_copy" (a copy from the host),
    "factory" (torch.zeros, randn, empty and so on), "compute" (an operator's output or scratch), "summed" (a stand-in for
    what is only known as a total: the events were dropped, or the allocator has none).
    carried: address -> label known from an earlier recording, of blocks that were live at the start.
    settings: the allocator's, without which block sizes can't be recounted.
    births: index of an event -> how the allocation came to be, or the request that failed; of the large ones, on a virtual
    device.
    copied: index of an alloc event -> the address, on the same device, of what it was made as a copy of (`clone`, another type, a
    deep copy's storage); on a virtual device.
    padded: index of an alloc event -> what is known of the padding in what was copied there from the host; likewise.
    final: the segments at the end, where these were told apart from the events, with stacks of blocks from before.
    places: what `Log.position` had answered -> the position in `events`, where events had to be left out and the two are
    not the same; None where they are.
    """

    facts: DeviceFacts
    start: tuple[Segment, ...]
    events: Sequence[TraceEvent]
    origins: Mapping[int, str] = field(default_factory=dict)
    carried: Mapping[int, Label] = field(default_factory=dict)
    settings: AllocatorSettings = DEFAULT_SETTINGS
    places: Mapping[int, int] | None = None
    final: tuple[Segment, ...] | None = None
    births: Mapping[int, Birth] = field(default_factory=dict)
    copied: Mapping[int, int] = field(default_factory=dict)
    padded: Mapping[int, Padded] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a device. bytes: all of it, None where the driver does not say; user and command likewise."""

    pid: int
    bytes: int | None
    user: str | None = None
    command: str | None = None


class Log(Protocol):
    """What a device's allocator does, from `Device.start_log` until `stop`."""

    @property
    def first(self) -> int:
        """What `Device.glance` would have answered as the position when this log began."""

    @property
    def growing(self) -> DeviceLog | None:
        """The log itself, whose events grow; None where they are found out at the end (a real device)."""

    def position(self) -> int:
        """The number of events so far. Never falls, and is the same twice only where nothing moved."""

    def moment(self, exact: bool = True) -> tuple[int, Counters]:
        """The position and the device's figures of now. exact: whether what is outside of the allocator may be no older, by
        some milliseconds, on a real device, whose driver takes its time to answer."""

    def forget(self, needed: Set[int]) -> None:
        """Positions that were answered so far and are not needed will not be asked about: what only they need may go."""

    def tell(self, moved: Callable[[bool], None] | None) -> None:
        """Calls `moved` at each event from now on, with whether it is a free; None: no longer. A real device can't."""

    def stop(self) -> DeviceLog:
        """Ends the log. Allowed once."""


class Device(Protocol):
    """One GPU, or one emulated GPU."""

    @property
    def facts(self) -> DeviceFacts: ...

    def counters(self) -> Counters:
        """Figures of now. Cheap (microseconds on a virtual device)."""

    def glance(self, log: Log | None = None) -> tuple[Counters, int]:
        """Figures of now for who looks on from another thread, ten times a second: the program never waits for it.

        And a position of the same moment: on a real device the number of all events so far; on a virtual one that of the log's,
        0 without a log.
        """

    def segments(self) -> tuple[Segment, ...]:
        """The allocator's segments and blocks now."""

    def start_log(self) -> Log:
        """Begins to keep events. Several logs may run at once."""

    def end_logs(self) -> None:
        """Ends whatever logs run, where nobody is left to end them."""

    def remember(self, labels: Mapping[int, Label]) -> None:
        """Keeps the labels of blocks that are live now (by address) for later recordings: the next log's `carried`."""

    @property
    def labels(self) -> Mapping[int, Label]:
        """What is known of blocks that are live now, by address; empty on a real device, which does not say when one goes."""

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Who has memory on the device; None where the driver does not say."""


class CompiledResults(NamedTuple):
    """modules: (device index, address) -> the `id` of the module whose result it is. roots: the outermost of these modules that a
    compiled function found by a name, under that name."""

    modules: Mapping[tuple[int, int], int] = {}
    roots: Mapping[str, Any] = {}


class FilledPart(NamedTuple):
    """A look at a part of a tensor's memory, in elements, and where in it those lie that look so."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    starts: tuple[int, ...]


class Machine(Protocol):
    """All devices of one kind that the process sees: the GPUs of this computer, or the virtual ones that are on."""

    @property
    def devices(self) -> Sequence[Device]: ...

    def current_device(self) -> int:
        """The number of the program's current device. Asking brings nothing into use."""

    def in_use(self) -> Sequence[Device]:
        """The devices that are worth a chart: all virtual ones; of the GPUs the current one, and those that hold memory."""

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        """(device index, address of the allocation that holds the tensor's storage), or None for a tensor elsewhere."""

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        """The same at once, inside of `looks.tensors.no_functions` and `no_dispatch`; None also where that takes more."""

    def compiled_results(self) -> CompiledResults:
        """What compiled code made, as far as it lives. Empty on a real device, whose compiled code does not say."""

    def filled_parts(self) -> Mapping[tuple[int, int], tuple[FilledPart, ...]]:
        """(device index, address) -> the parts that the program assigned to, of large tensors of which it assigned to no more.
        Empty on a real device, which does not say."""

    def rewritten(self) -> Mapping[tuple[int, int], int]:
        """(device index, address) -> how often the program has written to it in place, of what was made as a copy
        (`DeviceLog.copied`). Empty on a real device, which does not say."""

    def settle(self) -> None:
        """Does the frees that wait (a virtual machine frees late), so that counters and logs are those of now."""

    def look(self, device: Device) -> tuple[tuple[Segment, ...], Mapping[int, Label]]:
        """A device's segments and labels of the same moment, also from another thread."""

    @property
    def reads(self) -> Reads | None:
        """Which lines of the program read values that do not exist; only grows: a recorder takes the difference. None on a real
        machine, which has the values."""

    def notes(self) -> list[str]:
        """What a reader of the figures must know about how they came to be."""
