"""Categories without live objects: what the stacks, the order of births and deaths, and the sizes of a recording prove.

A stack says in which part of a training step memory was asked for; whether it outlived that part says what it was for. What has
no stack (backward runs on a C++ thread; what was there before the recording) is *inferred* where the sizes of the parameters,
counted, explain it exactly, and otherwise unknown, with the reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.categories import WORKSPACE_SIZES
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation, Timeline

BEFORE = "was there before the recording began, and has no stack"
NO_STACKS = "has no stack, like all of this recording"
BACKWARD_THREAD = "has no Python stack (a thread of backward), and no sizes that prove what it is"
OWN_CODE = "was asked for outside modules, optimizers and backward"
_ADAM_COPIES = 2
# Below this many tensors a match of sizes may be chance.
_PROOF = 4
# Forward, backward, the optimizer's step, and the forward in which the next batch takes its place.
_RUNS_OF_A_BATCH = 4
_MOST_WORKSPACES = 4


@dataclass(frozen=True)
class Attribution:
    """labels: one for each allocation of the timeline. reasons: why an allocation is unknown, by its index."""

    labels: tuple[Label, ...]
    reasons: Mapping[int, str]


def attribute_by_stacks(timeline: Timeline, events: Sequence[TraceEvent], final: Iterable[Segment]) -> Attribution:
    """Labels from the stacks of a trace's allocations, and from those of the blocks at its end, for blocks from before."""
    return _Attributor(timeline, events, final).run()


class _Attributor:
    def __init__(self, timeline: Timeline, events: Sequence[TraceEvent], final: Iterable[Segment]) -> None:
        self._timeline = timeline
        self._allocations = timeline.allocations
        at_end = {block.address: block.frames for segment in final for block in segment.blocks if block.frames}
        # By identity: a file's equal stacks are one tuple, and hashing long ones for each allocation would take long.
        known: dict[int, str] = {}
        self._sites: list[str] = []
        for one in self._allocations:
            left = at_end.get(one.address, ()) if one.freed is None else ()
            frames = events[one.born].frames if one.born >= 0 else left
            if id(frames) not in known:
                known[id(frames)] = sites.site_of(frames)
            self._sites.append(known[id(frames)])
        self._has_stacks = any(site != sites.NO_STACK for site in self._sites)
        self._runs = _StepPhases(
            (one.born, self._kind_of_run(site)) for one, site in zip(self._allocations, self._sites, strict=True)
        )
        self._of_size = Counter(one.requested for one in self._allocations)
        self._labels: dict[int, Label] = {}
        self._reasons: dict[int, str] = {}

    def _kind_of_run(self, site: str) -> str | None:
        """The part of a step that an allocation shows to be under way; None where it shows none."""
        if site in (FORWARD, OPTIMIZER):
            return site
        if site in (BACKWARD, sites.NATIVE) or (site == sites.NO_STACK and self._has_stacks):
            return BACKWARD
        return None

    def run(self) -> Attribution:
        survivors: list[Allocation] = []
        for one, site in zip(self._allocations, self._sites, strict=True):
            if one.born < 0:
                self._from_before(one, site)
            elif site in (BACKWARD, sites.NATIVE) or (site == sites.NO_STACK and self._has_stacks):
                if self._outlives(one):
                    survivors.append(one)
                else:
                    evidence = "stack" if site == BACKWARD else "inferred"
                    self._labels[one.index] = Label("activation_gradients", evidence)
            else:
                self._by_site(one, site)
        parameters = self._sizes_of_parameters(survivors)
        self._gradients(survivors, parameters)
        sizes = parameters or self._sizes_of_a_backward(survivors)
        self._made_in_constructors(sizes)
        self._start(sizes)
        return Attribution(
            tuple(self._labels.get(one.index, Label("unknown", "unknown")) for one in self._allocations), self._reasons
        )

    def _outlives(self, one: Allocation) -> bool:
        """Whether it is still live when the part of the step in which it was born is over."""
        end = self._runs.end_of(one.born)
        return one.freed is None or (end is not None and one.freed > end)

    def _by_site(self, one: Allocation, site: str) -> None:
        if site == sites.WORKSPACE:
            self._labels[one.index] = Label("workspace", "stack")
        elif site == sites.PARAMETERS:
            category = "parameters" if one.freed is None else "temporaries"
            self._labels[one.index] = Label(category, "stack")
        elif site == OPTIMIZER:
            category = "optimizer_state" if self._outlives(one) else "temporaries"
            self._labels[one.index] = Label(category, "stack")
        elif site == FORWARD:
            category = "activations" if self._outlives(one) else "temporaries"
            self._labels[one.index] = Label(category, "stack")
        elif site == sites.NO_STACK and self._is_workspace(one):
            self._labels[one.index] = Label("workspace", "inferred")
        elif site == sites.NO_STACK:
            self._reasons[one.index] = NO_STACKS
        else:
            self._script(one, site)

    def _script(self, one: Allocation, site: str) -> None:
        """Asked for between the parts of a step, by the program itself or by a function of torch.nn.functional."""
        following = self._runs.next_after(one.born)
        if one.freed is not None and (following is None or one.freed < following[0]):
            self._labels[one.index] = Label("temporaries", "lifetime")
        elif site == sites.CONSTRUCTOR:
            self._reasons[one.index] = OWN_CODE
        elif following is not None and following[1] == BACKWARD and one.freed is not None:
            self._labels[one.index] = Label("activations", "lifetime")
        elif following is not None and following[1] == FORWARD and self._is_used_up(one):
            self._labels[one.index] = Label("inputs", "inferred")
        elif site == sites.FUNCTION:
            self._labels[one.index] = Label("activations", "stack")
        else:
            self._reasons[one.index] = OWN_CODE

    def _is_used_up(self, one: Allocation) -> bool:
        """Whether it is gone when the next step is under way, as a batch is; what stays longer is the program's own."""
        if one.freed is None:
            return False
        return self._runs.number_of(one.freed) - self._runs.number_of(one.born) <= _RUNS_OF_A_BATCH

    def _is_workspace(self, one: Allocation) -> bool:
        """By its size, and if it is one of few: a library has one for each handle and stream."""
        few = self._of_size[one.requested] <= _MOST_WORKSPACES
        return few and one.requested in WORKSPACE_SIZES and one.freed is None

    def _from_before(self, one: Allocation, site: str) -> None:
        if site == FORWARD:
            self._labels[one.index] = Label("activations", "stack")
        elif site == OPTIMIZER:
            self._labels[one.index] = Label("optimizer_state", "stack")
        elif site in (sites.PARAMETERS, sites.WORKSPACE):
            self._labels[one.index] = Label(site, "stack")
        elif self._is_workspace(one):
            self._labels[one.index] = Label("workspace", "inferred")
        else:
            self._reasons[one.index] = OWN_CODE if site == sites.SCRIPT else BEFORE if self._has_stacks else NO_STACKS

    # What sizes prove

    def _sizes_of_parameters(self, survivors: Sequence[Allocation]) -> Counter[int]:
        """The parameters' sizes: of those with a stack; or half of Adam's states; none where neither is there."""
        framed = Counter(one.requested for one in self._allocations if self._is(one, "parameters"))
        if framed.total() >= _PROOF:
            return framed
        born: dict[int, Counter[int]] = defaultdict(Counter)
        for one in self._allocations:
            # Two runs of the optimizer may each make new states; those of one run are counted.
            if one.born >= 0 and self._is(one, "optimizer_state"):
                born[self._runs.number_of(one.born)][one.requested] += 1
        for states in born.values():
            half = Counter({size: count // _ADAM_COPIES for size, count in states.items() if count >= _ADAM_COPIES})
            # Adam keeps a count of steps beside its two copies; it is tiny.
            odd = sum(size for size, count in states.items() if count % _ADAM_COPIES and size > 512)
            if half.total() >= _PROOF and not odd:
                return half
        return Counter()

    def _sizes_of_a_backward(self, survivors: Sequence[Allocation]) -> Counter[int]:
        """What one backward left behind, where several did the same: the gradients, so also the parameters' sizes."""
        runs: dict[int, Counter[int]] = defaultdict(Counter)
        for one in survivors:
            runs[self._runs.number_of(one.born)][one.requested] += 1
        sets = Counter(frozenset(run.items()) for run in runs.values() if run.total() >= _PROOF)
        if not sets:
            return Counter()
        return Counter(dict(sets.most_common(1)[0][0]))

    def _gradients(self, survivors: Sequence[Allocation], parameters: Counter[int]) -> None:
        """Survivors of a backward that match parameters' sizes are gradients; a stack of backward suffices too."""
        runs: dict[int, list[Allocation]] = defaultdict(list)
        for one in survivors:
            runs[self._runs.number_of(one.born)].append(one)
        for run in runs.values():
            left = Counter(parameters)
            for one in run:
                if left[one.requested] > 0:
                    left[one.requested] -= 1
                    self._labels[one.index] = Label("gradients", "inferred")
                elif self._sites[one.index] == BACKWARD:
                    self._labels[one.index] = Label("gradients", "lifetime")
                elif self._is_workspace(one):
                    self._labels[one.index] = Label("workspace", "inferred")
                else:
                    self._reasons[one.index] = BACKWARD_THREAD

    def _made_in_constructors(self, sizes: Counter[int]) -> None:
        """Whole copies of the parameters that the program's own constructors made, in order: themselves, then states."""
        if sizes.total() < _PROOF:
            return
        made = [
            one
            for one, site in zip(self._allocations, self._sites, strict=True)
            if site == sites.CONSTRUCTOR and one.born >= 0 and one.index not in self._labels
        ]
        copies = _whole_copies(sizes, made)
        framed = any(self._is(one, "parameters") for one in self._allocations)
        roles = ([] if framed else ["parameters"]) + ["optimizer_state"] * _ADAM_COPIES
        self._hand_out(roles[:copies], sizes, sorted(made, key=lambda one: one.born))

    def _start(self, parameters: Counter[int]) -> None:
        """Copies of the parameters among what was there before: themselves, Adam's two states, and gradients.

        Only whole copies count, of what stayed for good and of what the trace frees apart.
        """
        if parameters.total() < _PROOF:
            return
        before = [one for one in self._allocations if one.born < 0 and self._labels.get(one.index) is None]
        stayed = [one for one in before if one.freed is None]
        copies = _whole_copies(parameters, stayed)
        framed = any(self._is(one, "parameters") for one in self._allocations)
        roles = [] if framed else ["parameters"]
        states_born = any(self._is(one, "optimizer_state") for one in self._allocations)
        if not states_born and copies - len(roles) in (1, 2):
            roles += ["optimizer_state"] * (copies - len(roles))
        self._hand_out(roles[:copies], parameters, sorted(stayed, key=_address))
        freed = [one for one in before if one.freed is not None]
        copies = _whole_copies(parameters, freed)
        if copies == 1:
            self._hand_out(["gradients"], parameters, sorted(freed, key=_address))
        elif states_born and copies in (_ADAM_COPIES, _ADAM_COPIES + 1):
            # An optimizer that makes its states anew in each step gives the old ones back.
            roles = ["optimizer_state"] * _ADAM_COPIES + ["gradients"] * (copies - _ADAM_COPIES)
            self._hand_out(roles, parameters, sorted(freed, key=_address))

    def _hand_out(self, roles: Sequence[str], parameters: Counter[int], tenants: Sequence[Allocation]) -> None:
        left = [(role, Counter(parameters)) for role in roles]
        for one in tenants:
            for role, sizes in left:
                if sizes[one.requested] > 0:
                    sizes[one.requested] -= 1
                    self._labels[one.index] = Label(role, "inferred")
                    self._reasons.pop(one.index, None)
                    break

    def _is(self, one: Allocation, category: str) -> bool:
        label = self._labels.get(one.index)
        return label is not None and label.category == category


def _address(one: Allocation) -> int:
    return one.address


def _whole_copies(sizes: Counter[int], tenants: Iterable[Allocation]) -> int:
    """How often all of the sizes are among the tenants'."""
    there = Counter(one.requested for one in tenants)
    return min(there[size] // count for size, count in sizes.items())


class _StepPhases:
    """Stretches of a trace in which one part of a training step is under way, told by what each allocation shows."""

    def __init__(self, births: Iterable[tuple[int, str | None]]) -> None:
        self._starts: list[int] = []
        self._kinds: list[str] = []
        for born, kind in sorted((born, kind) for born, kind in births if born >= 0 and kind is not None):
            if not self._kinds or self._kinds[-1] != kind:
                self._starts.append(born)
                self._kinds.append(kind)

    def number_of(self, event: int) -> int:
        return bisect_right(self._starts, event) - 1

    def next_after(self, event: int) -> tuple[int, str] | None:
        """Where the next run begins, and its kind."""
        rank = bisect_right(self._starts, event)
        return (self._starts[rank], self._kinds[rank]) if rank < len(self._starts) else None

    def end_of(self, event: int) -> int | None:
        """Where the run that the event is in ends; None where it is the last."""
        following = self.next_after(event)
        return None if following is None else following[0]
