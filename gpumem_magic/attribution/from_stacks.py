"""Categories without live objects: what the stacks, the order of births and deaths, and the sizes of a recording prove.

A stack says in which part of a training step memory was asked for, the stack of its free who let go of it; whether it outlived
the part of the step says what it was for. What has no stack (backward runs on a C++ thread; what was there before the
recording) is *inferred* where the sizes of the parameters, counted, explain it, or where it stayed through everything that was
recorded. What nothing tells is unknown, with the reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.categories import UNKNOWN
from gpumem_magic.attribution.constructors import Makers
from gpumem_magic.attribution.from_sizes import ADAM_COPIES, BySizes
from gpumem_magic.attribution.replacing import Replacements
from gpumem_magic.attribution.size_sets import equal_sets
from gpumem_magic.attribution.step_phases import StepPhases
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation, Timeline

BEFORE = "was there before the recording began, with no stack, and nothing tells what it is"
NO_STACKS = "has no stack, like all of this recording"
# What lives for fewer events than this is a passing copy.
_PASSING_EVENTS = 4
# Forward, backward, the optimizer's step, and the forward in which the next batch takes its place.
_RUNS_OF_A_BATCH = 4


class _Kept(NamedTuple):
    """What is asked for at a site, and stays."""

    category: str
    why: str
    name: str | None = None


_KEPT = {
    FORWARD: _Kept("activations", "was asked for in a forward, and outlived it"),
    sites.CAST: _Kept("activations", "was cast by autocast in a forward, and outlived it", "autocast's copy"),
    sites.CACHE: _Kept("kv_cache", "was asked for by a cache of keys and values"),
    OPTIMIZER: _Kept("optimizer_state", "was asked for by an optimizer, and outlived its step"),
    sites.PARAMETERS: _Kept("parameters", "was asked for where a module is made, loaded or moved"),
    sites.WORKSPACE: _Kept("workspace", "was asked for by cuBLAS"),
}
_PASSING = {
    FORWARD: "was gone at the end of the forward that asked for it",
    sites.CAST: "was gone at the end of the forward that asked for it",
    sites.CACHE: "was gone soon after a key-value cache asked for it",
    OPTIMIZER: "was gone at the end of the optimizer's step that asked for it",
    sites.PARAMETERS: "was gone before the module was made, loaded or moved",
}
# What a free by these says of memory that a forward or the program asked for.
_ENDS_A_FORWARD = (sites.SCRIPT, BACKWARD, OPTIMIZER, sites.ZEROED, sites.CAST, sites.SAVED)
_AFTER_BACKWARD = (sites.SCRIPT, OPTIMIZER, sites.ZEROED, FORWARD, sites.CAST)
_FORWARD_SITES = (FORWARD, sites.CAST, sites.CACHE)


@dataclass(frozen=True)
class Attribution:
    """labels: one for each allocation of the timeline. reasons: why an allocation is unknown; grounds: how its category is known;
    both by its index. stretches: the parts of training steps that stacks show, as `StepPhases.stretches` gives them."""

    labels: tuple[Label, ...]
    reasons: Mapping[int, str]
    grounds: Mapping[int, str] = field(default_factory=dict)
    stretches: Sequence[tuple[str, int, int]] = ()


def attribute_by_stacks(timeline: Timeline, events: Sequence[TraceEvent], final: Iterable[Segment]) -> Attribution:
    """Labels from the stacks of a trace's allocations, and from those of the blocks at its end, for blocks from before."""
    return _Attributor(timeline, events, final).run()


class _Attributor(BySizes):
    def __init__(self, timeline: Timeline, events: Sequence[TraceEvent], final: Iterable[Segment]) -> None:
        super().__init__(timeline, events, final)
        self.runs = StepPhases(
            (one.born, self._kind_of_run(site), site == sites.SCRIPT)
            for one, site in zip(self.allocations, self.sites, strict=True)
        )

    def _kind_of_run(self, site: str) -> str | None:
        """The part of a step that an allocation shows to be under way; None where it shows none."""
        if site == OPTIMIZER:
            return site
        if site in _FORWARD_SITES:
            return FORWARD
        if site in (BACKWARD, sites.RECOMPUTED, sites.NATIVE) or (site == sites.NO_STACK and self.has_stacks):
            return BACKWARD
        return None

    def run(self) -> Attribution:
        # What a backward left behind, by the part of the step in which it was born.
        survivors: dict[int, list[Allocation]] = defaultdict(list)
        for one, site in zip(self.allocations, self.sites, strict=True):
            if one.born < 0:
                self._from_before(one, site)
            elif site == sites.RECOMPUTED:
                self._recomputed(one)
            elif self._kind_of_run(site) != BACKWARD:
                self._by_site(one, site)
            elif self._outlives(one) or self.let_go_by(one) in _AFTER_BACKWARD:
                survivors[self.runs.number_of(one.born)].append(one)
            else:
                evidence = "stack" if site == BACKWARD else "inferred"
                self.is_known(one, "activation_gradients", evidence, "was asked for in backward, and gone at its end")
        self._made_by_modules()
        parameters = self.sizes_of_parameters()
        self.gradients(survivors.values(), parameters)
        self.added()
        sizes = parameters or self.sizes_of_a_backward(survivors.values())
        self.like_other_gradients(survivors.values(), sizes)
        self.made_in_constructors(sizes)
        self._cast_of_weights(sizes)
        self.start(sizes)
        self._took_the_place_of()
        self._like_a_later_one()
        self._stayed_throughout()
        self._the_programs_own()
        labels = tuple(self.labels.get(one.index, UNKNOWN) for one in self.allocations)
        return Attribution(labels, self.reasons, self.grounds, self.runs.stretches())

    def _cast_of_weights(self, sizes: Counter[int]) -> None:
        """What backward kept of a forward under autocast: a weight's copy where it is half as large as one, each once."""
        was_on = self.has("autocast_copies")
        left: dict[int, Counter[int]] = defaultdict(
            lambda: Counter({size // 2: count for size, count in sizes.items()})
        )
        for one, site in zip(self.allocations, self.sites, strict=True):
            label = self.labels.get(one.index, UNKNOWN)
            if site not in ((sites.CAST, FORWARD) if was_on else (sites.CAST,)) or label.category != "activations":
                continue
            run = left[self.runs.number_of(one.born)]
            if run[one.requested] > 0:
                run[one.requested] -= 1
                why = "was kept by a forward under autocast, and is half as large as a parameter"
                self.is_known(one, "autocast_copies", "inferred", why)

    def _outlives(self, one: Allocation) -> bool:
        """Whether it is still live when the part of the step in which it was born is over."""
        following = self.runs.next_after(one.born)
        return one.freed is None or (following is not None and one.freed > following[0])

    # One allocation by its stacks

    def _by_site(self, one: Allocation, site: str) -> None:
        ended_by = self.let_go_by(one)
        if site == sites.NO_STACK:
            if self.is_workspace(one):
                self.is_a_workspace(one)
            else:
                self.is_unknown(one, NO_STACKS)
        elif site in (FORWARD, sites.SCRIPT, sites.FUNCTION) and self.is_workspace(one):
            self.is_a_workspace(one)
        elif ended_by == sites.SAVED and site in (*_FORWARD_SITES, sites.SCRIPT, sites.FUNCTION):
            kept = _KEPT.get(site, _KEPT[FORWARD])
            self.is_known(
                one, kept.category, "stack", "was held for backward, as the stack of its free says", kept.name
            )
        elif site in _KEPT:
            self._by_telling_site(one, site, ended_by)
        else:
            self._between(one, site)

    def _recomputed(self, one: Allocation) -> None:
        if self.let_go_by(one) == FORWARD:
            self.is_known(one, "temporaries", "stack", "was gone before its forward had been computed again")
        else:
            self.is_known(one, "activations", "stack", "was computed again for backward (activation checkpointing)")

    def _by_telling_site(self, one: Allocation, site: str, ended_by: str) -> None:
        kept = _KEPT[site]
        if site == sites.WORKSPACE:
            stays = True
        elif site in _FORWARD_SITES:
            stays = self._outlives(one) or ended_by in _ENDS_A_FORWARD or self.runs.pauses_between(one.born, one.freed)
        elif site == sites.PARAMETERS:
            stays = self._outlives(one) or (ended_by not in ("", sites.PARAMETERS) and self._is_long_lived(one))
        else:
            stays = self._outlives(one)
        if not stays:
            self.is_known(one, "temporaries", "stack", _PASSING[site])
        elif site in (FORWARD, sites.CAST) and ended_by == sites.CAST:
            why = "was let go of at the end of autocast, which keeps what it casts of the weights"
            self.is_known(one, "autocast_copies", "stack", why)
        else:
            self.is_known(one, kept.category, "stack", kept.why, kept.name)

    def _is_long_lived(self, one: Allocation) -> bool:
        """Whether it lived while more was made, loaded or moved: then it is no passing copy."""
        return one.freed is not None and one.freed - one.born > _PASSING_EVENTS

    def _between(self, one: Allocation, site: str) -> None:
        """Asked for between the parts of a step, by the program itself or by a function of torch.nn.functional."""
        following = self.runs.next_birth(one.born)
        if one.freed is not None and (following is None or one.freed < following[0]):
            self.is_known(one, "temporaries", "lifetime", "was gone before the next part of a step began")
        elif site == sites.CONSTRUCTOR:
            self.is_unknown(one, "was asked for in a constructor of the program")
        elif following is not None and following[1] == BACKWARD and one.freed is not None:
            self.is_known(one, "activations", "lifetime", "was asked for before a backward, and lived into it")
        elif following is not None and following[1] == FORWARD and self._is_used_up(one):
            self.is_known(one, "inputs", "inferred", "was asked for before a forward, and gone a step later")
        elif site == sites.FUNCTION:
            self.is_known(one, "activations", "stack", "was asked for by a function of torch.nn.functional")

    def _is_used_up(self, one: Allocation) -> bool:
        """Whether it is gone when the next step is under way, as a batch is; what stays longer is the program's own."""
        if one.freed is None:
            return False
        return self.runs.number_of(one.freed) - self.runs.number_of(one.born) <= _RUNS_OF_A_BATCH

    def _from_before(self, one: Allocation, site: str) -> None:
        ended_by = self.let_go_by(one) if self.has_stacks else ""
        if site in _KEPT and not (site == FORWARD and self.is_workspace(one)):
            self.is_known(one, _KEPT[site].category, "stack", _KEPT[site].why, _KEPT[site].name)
        elif self.is_workspace(one):
            self.is_a_workspace(one)
        elif ended_by == sites.SAVED:
            self.is_known(one, "activations", "stack", "was held for backward, as the stack of its free says")
        elif ended_by == sites.ZEROED:
            self.is_known(one, "gradients", "stack", "was let go of by zero_grad")
        elif site == sites.NO_STACK:
            self.is_unknown(one, BEFORE if self.has_stacks else NO_STACKS)

    # What sizes prove

    def _made_by_modules(self) -> None:
        """What the constructors of the program's own modules made and kept: a class with a forward is a module."""
        makers = Makers(self.frames)
        for one, site in zip(self.allocations, self.sites, strict=True):
            if site == sites.CONSTRUCTOR and self.is_open(one) and makers.is_module(self.frames[one.index]):
                self.is_known(one, "parameters", "stack", "was asked for in the constructor of a module, and stays")

    # What is left

    def _took_the_place_of(self) -> None:
        """What a program computed and put in the place of a parameter or a state (``p.data = ...``) is what that was."""
        made = (
            one
            for one, site in zip(self.allocations, self.sites, strict=True)
            if one.born >= 0 and site in (OPTIMIZER, sites.SCRIPT)
        )

        def is_kept(old: Allocation) -> bool:
            return self.labels.get(old.index, UNKNOWN).category in ("parameters", "optimizer_state", "buffers")

        def take(old: Allocation, new: Allocation) -> None:
            why = "took the place of one that was freed in the same function"
            self.is_known(new, self.labels[old.index].category, "stack", why)

        Replacements(made, self.allocations, self.events, self.frames).follow(is_kept, take)

    def _like_a_later_one(self) -> None:
        """What was there before, and was let go of as memory of the same size was that a later step asked for."""
        known: dict[tuple[int, str], Label] = {}
        for one in self.allocations:
            label = self.labels.get(one.index)
            if one.freed is not None and one.born >= 0 and label is not None and label.category != "temporaries":
                known.setdefault((one.requested, self.let_go_by(one)), label)
        for one in self.allocations:
            if one.born < 0 and one.freed is not None and self.is_open(one):
                label = known.get((one.requested, self.let_go_by(one)))
                if label is not None:
                    why = "was let go of where memory of the same size was that a later step asked for"
                    self.is_known(one, label.category, "inferred", why)

    def _stayed_throughout(self) -> None:
        """What was there before, and stays: parameters, or where several sets have the same sizes, what training keeps."""
        stayed = [one for one in self.allocations if one.born < 0 and one.freed is None and self.is_open(one)]
        if not self.has_stacks or any(self.sites[one.index] == sites.SCRIPT for one in stayed):
            stayed = [one for one in stayed if self.has_stacks and self.sites[one.index] == sites.NO_STACK]
        if not stayed:
            return
        trains = BACKWARD in self.runs.kinds or OPTIMIZER in self.runs.kinds
        sets = equal_sets(one.requested for one in stayed) if trains and not self.has("parameters") else 1
        if sets in (3, 4):
            sizes = Counter({size: n // sets for size, n in Counter(one.requested for one in stayed).items()})
            roles = ["parameters"] + ["gradients"] * (sets - 3) + ["optimizer_state"] * ADAM_COPIES
            why = f"was there before and stays, as one of {sets} sets of the same sizes"
            self.hand_out(roles, sizes, sorted(stayed, key=lambda one: one.address), why)
            return
        known = sum(one.requested for one in self.labelled("parameters"))
        if known and sum(one.requested for one in stayed) < known:
            return
        for one in stayed:
            self.is_known(one, "parameters", "inferred", "was there before the recording began, and stays to its end")

    def _the_programs_own(self) -> None:
        """What the program itself asked for outside modules, and keeps: it computed it from a forward, or it is what goes in."""
        for one, site in zip(self.allocations, self.sites, strict=True):
            if not self.is_open(one) or site not in (sites.SCRIPT, sites.CONSTRUCTOR):
                continue
            if self.runs.kind_at(one.born) == FORWARD:
                self.is_known(one, "activations", "inferred", "was computed by the program after a forward, and kept")
            else:
                self.is_known(one, "inputs", "inferred", "was asked for by the program itself, and kept")
