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
from gpumem_magic.attribution.categories import UNKNOWN, WORKSPACE_SIZES
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
# What is asked for there, and stays.
_KEPT = {
    FORWARD: "activations",
    OPTIMIZER: "optimizer_state",
    sites.PARAMETERS: "parameters",
    sites.WORKSPACE: "workspace",
}


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
        # What a backward left behind, by the part of the step in which it was born.
        survivors: dict[int, list[Allocation]] = defaultdict(list)
        for one, site in zip(self._allocations, self._sites, strict=True):
            answer: Label | str
            if one.born < 0:
                answer = self._from_before(one, site)
            elif self._kind_of_run(site) != BACKWARD:
                answer = self._by_site(one, site)
            elif self._outlives(one):
                survivors[self._runs.number_of(one.born)].append(one)
                continue
            else:
                answer = Label("activation_gradients", "stack" if site == BACKWARD else "inferred")
            self._put(one, answer)
        parameters = self._sizes_of_parameters()
        self._gradients(survivors.values(), parameters)
        self._added()
        sizes = parameters or _sizes_of_a_backward(survivors.values())
        self._made_in_constructors(sizes)
        self._start(sizes)
        return Attribution(tuple(self._labels.get(one.index, UNKNOWN) for one in self._allocations), self._reasons)

    def _put(self, one: Allocation, answer: Label | str) -> None:
        """answer: a label, or why there is none."""
        if isinstance(answer, str):
            self._reasons[one.index] = answer
        else:
            self._labels[one.index] = answer

    def _outlives(self, one: Allocation) -> bool:
        """Whether it is still live when the part of the step in which it was born is over."""
        following = self._runs.next_after(one.born)
        return one.freed is None or (following is not None and one.freed > following[0])

    def _by_site(self, one: Allocation, site: str) -> Label | str:
        if site in _KEPT:
            stays = one.freed is None if site == sites.PARAMETERS else site == sites.WORKSPACE or self._outlives(one)
            return Label(_KEPT[site] if stays else "temporaries", "stack")
        if site == sites.NO_STACK:
            return Label("workspace", "inferred") if self._is_workspace(one) else NO_STACKS
        # Asked for between the parts of a step, by the program itself or by a function of torch.nn.functional.
        following = self._runs.next_after(one.born)
        if one.freed is not None and (following is None or one.freed < following[0]):
            return Label("temporaries", "lifetime")
        if site == sites.CONSTRUCTOR:
            return OWN_CODE
        if following is not None and following[1] == BACKWARD and one.freed is not None:
            return Label("activations", "lifetime")
        if following is not None and following[1] == FORWARD and self._is_used_up(one):
            return Label("inputs", "inferred")
        return Label("activations", "stack") if site == sites.FUNCTION else OWN_CODE

    def _is_used_up(self, one: Allocation) -> bool:
        """Whether it is gone when the next step is under way, as a batch is; what stays longer is the program's own."""
        if one.freed is None:
            return False
        return self._runs.number_of(one.freed) - self._runs.number_of(one.born) <= _RUNS_OF_A_BATCH

    def _is_workspace(self, one: Allocation) -> bool:
        """By its size, and if it is one of few: a library has one for each handle and stream."""
        few = self._of_size[one.requested] <= _MOST_WORKSPACES
        return few and one.requested in WORKSPACE_SIZES and one.freed is None

    def _from_before(self, one: Allocation, site: str) -> Label | str:
        if site in _KEPT:
            return Label(_KEPT[site], "stack")
        if self._is_workspace(one):
            return Label("workspace", "inferred")
        return OWN_CODE if site == sites.SCRIPT else BEFORE if self._has_stacks else NO_STACKS

    # What sizes prove

    def _sizes_of_parameters(self) -> Counter[int]:
        """The parameters' sizes: of those with a stack; or half of Adam's states; none where neither is there."""
        framed = Counter(one.requested for one in self._labelled("parameters"))
        if framed.total() >= _PROOF:
            return framed
        born: dict[int, Counter[int]] = defaultdict(Counter)
        for one in self._labelled("optimizer_state"):
            # Two runs of the optimizer may each make new states; those of one run are counted.
            if one.born >= 0:
                born[self._runs.number_of(one.born)][one.requested] += 1
        for states in born.values():
            half = Counter({size: count // _ADAM_COPIES for size, count in states.items() if count >= _ADAM_COPIES})
            # Adam keeps a count of steps beside its two copies; it is tiny.
            odd = sum(size for size, count in states.items() if count % _ADAM_COPIES and size > 512)
            if half.total() >= _PROOF and not odd:
                return half
        return Counter()

    def _gradients(self, survivors: Iterable[list[Allocation]], parameters: Counter[int]) -> None:
        """Survivors of a backward that match parameters' sizes are gradients; a stack of backward suffices too."""
        for run in survivors:
            left = Counter(parameters)
            for one in run:
                answer: Label | str = BACKWARD_THREAD
                if left[one.requested] > 0:
                    left[one.requested] -= 1
                    answer = Label("gradients", "inferred")
                elif self._is_workspace(one):
                    answer = Label("workspace", "inferred")
                elif self._sites[one.index] == BACKWARD:
                    answer = Label("gradients", "lifetime")
                self._put(one, answer)

    def _added(self) -> None:
        """A backward that finds gradients makes them all again and adds them: a whole copy among what it let go of at once."""
        gradients = self._labelled("gradients")
        passing: dict[int, list[Allocation]] = defaultdict(list)
        for one in self._labelled("activation_gradients"):
            passing[self._runs.number_of(one.born)].append(one)
        for run in passing.values():
            begin, end = run[0].born, run[-1].born
            there = Counter(
                one.requested for one in gradients if one.born < begin and (one.freed is None or one.freed > end)
            )
            if there.total() >= _PROOF and _whole_copies(there, run) == 1:
                self._hand_out(["gradients"], there, sorted(run, key=lambda one: (one.freed or 0) - one.born))

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
        roles = ([] if self._has("parameters") else ["parameters"]) + ["optimizer_state"] * _ADAM_COPIES
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
        roles = [] if self._has("parameters") else ["parameters"]
        states_born = self._has("optimizer_state")
        if not states_born and copies - len(roles) in (1, 2):
            roles += ["optimizer_state"] * (copies - len(roles))
        self._hand_out(roles[:copies], parameters, sorted(stayed, key=lambda one: one.address))
        freed = [one for one in before if one.freed is not None]
        copies = _whole_copies(parameters, freed)
        if copies == 1:
            self._hand_out(["gradients"], parameters, sorted(freed, key=lambda one: one.address))
        elif states_born and copies in (_ADAM_COPIES, _ADAM_COPIES + 1):
            # An optimizer that makes its states anew in each step gives the old ones back.
            roles = ["optimizer_state"] * _ADAM_COPIES + ["gradients"] * (copies - _ADAM_COPIES)
            self._hand_out(roles, parameters, sorted(freed, key=lambda one: one.address))

    def _hand_out(self, roles: Sequence[str], parameters: Counter[int], tenants: Sequence[Allocation]) -> None:
        left = [(role, Counter(parameters)) for role in roles]
        for one in tenants:
            for role, sizes in left:
                if sizes[one.requested] > 0:
                    sizes[one.requested] -= 1
                    self._labels[one.index] = Label(role, "inferred")
                    self._reasons.pop(one.index, None)
                    break

    def _labelled(self, category: str) -> list[Allocation]:
        return [one for one in self._allocations if self._labels.get(one.index, UNKNOWN).category == category]

    def _has(self, category: str) -> bool:
        return any(label.category == category for label in self._labels.values())


def _sizes_of_a_backward(survivors: Iterable[list[Allocation]]) -> Counter[int]:
    """What one backward left behind, where several did the same: the gradients, so also the parameters' sizes."""
    runs = (Counter(one.requested for one in run) for run in survivors)
    sets = Counter(frozenset(run.items()) for run in runs if run.total() >= _PROOF)
    return Counter(dict(sets.most_common(1)[0][0])) if sets else Counter()


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
