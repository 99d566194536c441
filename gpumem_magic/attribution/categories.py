"""The rules that say what an allocation is. The first that matches wins, over the allocation's whole life.

Every answer carries its evidence: "identity" (a live object held this address), "lifetime" (the phases of birth and
death), "stack" (where the request came from), "inferred", or "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.autocast import copies_of_weights
from gpumem_magic.attribution.copied import copied_from
from gpumem_magic.attribution.grown import grown_keys_and_values
from gpumem_magic.attribution.owners import Roles, lives_at, owners, tenants
from gpumem_magic.attribution.phase_map import Phase, PhaseMap, phases_on
from gpumem_magic.attribution.scratch import scratch_of_kernels
from gpumem_magic.devices.base import Birth, DeviceLog, Label
from gpumem_magic.looks.code import MOVES
from gpumem_magic.recording.model import (
    BACKWARD,
    FORWARD,
    KEPT_BY_GRAPH,
    OPTIMIZER,
    RECOMPUTATION,
    WORKSPACES_GO,
    Checkpoint,
    Hold,
    Sighting,
    Span,
)
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.virtual.card.generations import LARGE_WORKSPACE, LT_WORKSPACE, WORKSPACE

UNKNOWN = Label("unknown", "unknown")

# cuBLAS keeps one for each handle and stream; nothing of the user's holds it.
_WORKSPACE_SIZES = (WORKSPACE, LARGE_WORKSPACE)
_MOST_WORKSPACES = 4

_IDENTITY = (
    ("parameter", "parameters"),
    ("kv_cache", "kv_cache"),
    ("buffer", "buffers"),
    ("optimizer_state", "optimizer_state"),
    ("states", "optimizer_state"),
    ("gradient", "gradients"),
    ("weights", "parameters"),
)
_KNOWN_FOR_CERTAIN = frozenset({"parameter", "buffer", "gradient", "optimizer_state", "kv_cache"})
OF_A_TRAINING = frozenset({"parameters", "buffers", "optimizer_state", "gradients", "kv_cache"})
"""A copy of these counts as what was copied."""
_HOLDING_NAMES = ("named", "output")
_MADE = ("host_copy", "factory")
# What makes tensors of one number: where a moving average begins.
_FILLED = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full")
# The node of what was moved in forward: its gradient comes from where the result was.
_MOVES_BACK = "ToCopyBackward"


def attribute(
    log: DeviceLog,
    timeline: Timeline,
    spans: Iterable[Span],
    sightings: Iterable[Sighting],
    checkpoints: Iterable[Checkpoint] = (),
    holds: Iterable[Hold] = (),
) -> list[Label]:
    """One label per allocation of `timeline`, in its order. Spans, sightings and holds may be of several devices."""
    device = log.facts.index
    held = owners(timeline.allocations, (look for look in sightings if look.device == device))
    spans = list(spans)
    map_ = PhaseMap(phases_on(device, spans, checkpoints))
    told = {
        **copies_of_weights(log, timeline.allocations, held, map_, spans),
        **grown_keys_and_values(log.births, timeline.allocations, map_),
    }
    in_graphs = ((one.address, one.position) for one in holds if one.device == device and one.keeper == KEPT_BY_GRAPH)
    saved = {one.index for one in tenants(timeline.allocations, in_graphs) if one is not None}
    # (What is held by an object, or for backward, may be as large: a weight of 4096 x 4096 in 16 bits is.)
    stays = [
        one for one in timeline.allocations if one.freed is None and one.index not in held and one.index not in saved
    ]
    sizes = sizes_of_libraries(log.facts.kind, [(one.requested, one.stream) for one in stays])
    told.update({one.index: Label("workspace", "inferred") for one in stays if one.requested in sizes})
    told.update(scratch_of_kernels(log, timeline.allocations, held, map_))
    told.update(_cleared(timeline.allocations, device, spans))
    sources = copied_from(log, timeline.allocations)
    labels: list[Label] = [UNKNOWN] * len(timeline.allocations)
    # (What is copied is there before its copy.)
    for one in sorted(timeline.allocations, key=lambda one: one.born):
        of_copied = labels[sources[one.index]] if one.index in sources else None
        labels[one.index] = _label(_Case.of(one, log, held, map_, told, of_copied))
    # Of a forward that no module did, or that nobody saw, this is all that is known.
    return [
        Label("activations", "identity") if label is UNKNOWN and one.index in saved else label
        for one, label in zip(timeline.allocations, labels, strict=True)
    ]


def workspace_sizes(kind: str, stays: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The sizes by which cuBLAS's memory is known among what stays (bytes that were asked for, and the stream): on each there are
    few of it.

    kind: of the device; a virtual one tells of its own.
    """
    counts = Counter(one for one in stays if one[0] in _WORKSPACE_SIZES)
    too_many = {size for (size, _), count in counts.items() if count > _MOST_WORKSPACES}
    return frozenset(size for size, _ in counts if kind != "virtual" and size not in too_many)


def sizes_of_libraries(kind: str, stays: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The same with what cuBLASLt keeps beside cuBLAS's own (PyTorch 2.9 to 2.11, for products with a bias). Tensors may be of
    its size, too: there is no more of it than of cuBLAS's.

    stays: what no object of Python's and no graph holds.
    """
    sizes = workspace_sizes(kind, stays)
    most = sum(size in sizes for size, _ in stays)
    few = sum(size == LT_WORKSPACE for size, _ in stays) <= most
    return sizes | {LT_WORKSPACE} if sizes and few else sizes


def _cleared(allocations: Iterable[Allocation], device: int, spans: Iterable[Span]) -> dict[int, Label]:
    """The workspaces that PyTorch gave back because it was told to, as Lightning tells it at the end of a training."""
    times = [
        (one.start.positions[device], one.end.positions[device])
        for one in spans
        if one.kind == WORKSPACES_GO and device in one.start.positions and device in one.end.positions
    ]
    known = Label("workspace", "stack")
    return {
        one.index: known
        for one in (allocations if times else ())
        if one.freed is not None and any(start <= one.freed < end for start, end in times)
    }


def labels_to_carry(timeline: Timeline, labels: Sequence[Label]) -> dict[int, Label]:
    """Address -> label of what is live at the end of the log, for `Device.remember`. What is unknown is left out."""
    return {
        allocation.address: label
        for allocation, label in zip(timeline.allocations, labels, strict=True)
        if allocation.freed is None and label.category != "unknown"
    }


def sharing_functions(log: DeviceLog, allocation: Allocation) -> tuple[str, ...]:
    """PyTorch's functions that share memory among ranks in whose course it was asked for, the innermost first."""
    if allocation.born < 0:
        return ()
    birth = log.births.get(allocation.born)
    return sites.sharing(log.events[allocation.born].frames) if birth is None else birth.sharing


@dataclass(frozen=True)
class _Case:
    """All that the rules look at for one allocation. origin: None on a real device, which can't tell. told: what it is by what it
    has in common with others. of_copied: what that is of which it is a copy."""

    allocation: Allocation
    roles: Roles
    origin: str | None
    phase: Phase | None
    phases: PhaseMap
    carried: Label | None
    frames: tuple[Frame, ...]
    stack: tuple[str, ...]
    sharing: tuple[str, ...]
    birth: Birth | None
    told: Label | None
    of_copied: Label | None

    @classmethod
    def of(
        cls,
        allocation: Allocation,
        log: DeviceLog,
        held: Mapping[int, Roles],
        phases: PhaseMap,
        told: Mapping[int, Label],
        of_copied: Label | None,
    ) -> _Case:
        at_start = allocation.born < 0
        frames = () if at_start else log.events[allocation.born].frames
        birth = log.births.get(allocation.born)
        return cls(
            allocation,
            held.get(allocation.index, {}),
            None if at_start else log.origins.get(allocation.born, "compute" if log.facts.kind == "virtual" else None),
            None if at_start else phases.at_event(allocation.born),
            phases,
            log.carried.get(allocation.address) if at_start else None,
            frames,
            tuple(frame.name for frame in frames),
            sharing_functions(log, allocation),
            birth,
            told.get(allocation.index),
            of_copied,
        )

    @property
    def at_start(self) -> bool:
        return self.allocation.born < 0

    @property
    def between(self) -> bool:
        """Born in this log, in no phase."""
        return self.phase is None and not self.at_start

    @property
    def name(self) -> str | None:
        return next((self.roles[role] for role in (*_HOLDING_NAMES, "input") if self.roles.get(role)), None)

    @property
    def is_named(self) -> bool:
        return any(role in self.roles for role in _HOLDING_NAMES)

    @property
    def came_in_another_thread(self) -> bool:
        """Whether the program put it on the device itself while a phase ran, which had no part in it: so does who loads the next
        batch in a thread."""
        if self.phase is None:
            return False
        return self.origin == "host_copy" or (self.origin is None and sites.site_of(self.frames) == sites.SCRIPT)

    @property
    def follows_forward(self) -> bool:
        return self.phases.follows_forward(self.allocation.born)

    def lives_at_next(self, *kinds: str) -> bool:
        """Whether it is still live when the next phase (of these kinds) begins."""
        start = self.phases.next_start(self.allocation.born, *kinds)
        return start is not None and lives_at(self.allocation, start)

    def outlives(self, phase: Phase) -> bool:
        return lives_at(self.allocation, phase.end)


def _label(case: _Case) -> Label:
    for rule in _RULES:
        label = rule(case)
        if label is not None:
            return label
    return UNKNOWN


def _identity(case: _Case) -> Label | None:
    for role, category in _IDENTITY:
        if role in case.roles:
            return Label(category, "identity", case.roles[role])
    return None


def _copied(case: _Case) -> Label | None:
    """A copy that the program makes and keeps of what belongs to a model or its training: with a parameter's name and shape, that
    of a gradient is no weight."""
    of = case.of_copied
    if of is None or of.category not in OF_A_TRAINING or not case.between:
        return None
    if "input" in case.roles or not _KNOWN_FOR_CERTAIN.isdisjoint(case.roles):
        return None
    is_kept = case.is_named or case.allocation.freed is None or case.lives_at_next()
    return Label(of.category, "inferred", case.name) if is_kept else None


def _beside_weights(case: _Case) -> Label | None:
    """One for each weight: what was filled is an optimizer's that was written by hand, what was computed a copy of them."""
    if not case.between or {"beside", "beside_gradients"}.isdisjoint(case.roles):
        return None
    if case.birth is not None and case.birth.operator in _FILLED:
        return Label("optimizer_state", "inferred", case.name)
    return Label("parameters", "inferred", case.name) if case.origin == "compute" and "beside" in case.roles else None


def _summed(case: _Case) -> Label | None:
    """A stand-in for what is only known as a total: its birth says nothing about it."""
    return UNKNOWN if case.origin == "summed" else None


def _trial(case: _Case) -> Label | None:
    """What Inductor times kernels with. A workspace that stays is none of it."""
    if case.allocation.freed is not None and (case.origin == "trial" or not sites.TRYING.isdisjoint(case.stack)):
        return Label("temporaries", "stack", sites.TRIALS)
    return None


def _workspace(case: _Case) -> Label | None:
    if case.origin in ("estimate", "recurrent_scratch"):
        return Label("workspace", "inferred", "cuDNN, estimated")
    if case.origin in ("workspace", "convolution_scratch") or any(
        "cublas" in name.lower() or "cudnn" in name.lower() for name in case.stack
    ):
        return Label("workspace", "stack")
    return None


def _told(case: _Case) -> Label | None:
    return case.told


def _moved(case: _Case) -> Label | None:
    """What a module's `.to()` or its like made, where no look saw the module: it was a function's own, and is gone. (A buffer of
    its may be among it.)"""
    return Label("parameters", "stack") if MOVES in case.sharing else None


def _cache(case: _Case) -> Label | None:
    """Asked for by a cache's own code, and kept for the next token."""
    place = None if case.birth is None else case.birth.place
    if place is None or not sites.is_of_a_cache(place.file, place.function):
        return None
    if case.phase is not None and (case.phase.kind == BACKWARD or not case.outlives(case.phase)):
        return None
    return Label("kv_cache", "stack", case.name)


def _shared(case: _Case) -> Label | None:
    found = sites.of_sharing(case.sharing)
    return None if found is None else Label(found[0], "stack", found[1])


def _carried(case: _Case) -> Label | None:
    return case.carried if case.carried is not None and case.carried.category != "unknown" else None


def _inputs(case: _Case) -> Label | None:
    if case.at_start:
        if "input" in case.roles:
            return Label("inputs", "identity", case.name)
        return Label("inputs", "inferred", case.name) if set(case.roles) == {"named"} else None
    if not {"input", "named"}.isdisjoint(case.roles) and case.came_in_another_thread:
        return Label("inputs", "identity", case.name)
    if not case.between or "output" in case.roles:
        return None
    # Under no_grad a forward's output looks like an input to the next module; what a forward left behind is an output.
    if "input" in case.roles and not (case.origin == "compute" and case.follows_forward):
        return Label("inputs", "identity", case.name)
    if case.origin in _MADE and case.is_named:
        return Label("inputs", "identity", case.name)
    if case.origin is None and not case.follows_forward:
        if case.is_named:
            return Label("inputs", "inferred", case.name)
        if case.allocation.freed is not None and case.lives_at_next(FORWARD):
            return Label("inputs", "inferred")
    # A batch that only a function's local variable held: it came from the host and a phase worked on it.
    if case.origin in _MADE and case.lives_at_next(FORWARD, BACKWARD):
        if case.allocation.freed is not None:
            return Label("inputs", "lifetime")
        if case.origin == "host_copy":
            return Label("inputs", "inferred")
    return None


def _activations(case: _Case) -> Label | None:
    if case.at_start:
        return Label("activations", "identity", case.name) if "output" in case.roles else None
    if case.phase is not None:
        if case.phase.kind in (FORWARD, RECOMPUTATION) and (case.outlives(case.phase) or case.is_named):
            return Label("activations", "lifetime", case.name)
        return None
    if case.is_named:
        return Label("activations", "identity", case.name)
    if case.origin not in _MADE and case.lives_at_next(BACKWARD):
        return Label("activations", "lifetime")
    return None


def _activation_gradients(case: _Case) -> Label | None:
    if case.phase is not None and case.phase.kind == BACKWARD:
        category = "activation_gradients"
        node = "" if case.birth is None else case.birth.node
        if case.origin == "host_copy" and not node.startswith(_MOVES_BACK):
            # What forward had saved on the host (`save_on_cpu`), brought back for the operator that needs it.
            category = "activations"
        return Label(category, "lifetime", case.name)
    return None


def _temporaries(case: _Case) -> Label | None:
    if case.phase is not None:
        if not case.outlives(case.phase):
            return Label("temporaries", "lifetime")
        # What a failed step had in hand was on its way out: its states and gradients have been found by identity.
        return Label("temporaries", "inferred") if case.phase.failed and case.phase.kind == OPTIMIZER else None
    if case.between and case.allocation.freed is not None:
        return Label("temporaries", "inferred" if case.lives_at_next() else "lifetime")
    return None


_RULES = (
    _copied,
    _identity,
    _summed,
    _trial,
    _workspace,
    _told,
    _shared,
    _moved,
    _cache,
    _carried,
    _beside_weights,
    _inputs,
    _activations,
    _activation_gradients,
    _temporaries,
)
