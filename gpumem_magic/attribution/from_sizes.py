"""What sizes prove: sets of tensors with the sizes of the parameters are gradients and states."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.answers import Answers
from gpumem_magic.attribution.size_sets import whole_copies
from gpumem_magic.attribution.step_phases import StepPhases
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER
from gpumem_magic.snapshot.timeline import Allocation

BACKWARD_THREAD = "has no Python stack (a thread of backward), and no sizes that prove what it is"
ADAM_COPIES = 2
# Below this many tensors a match of sizes may be chance.
_PROOF = 4
# The share of a set's bytes that proves it.
_MOST = 0.95


class BySizes(Answers):
    """The rules that count. runs: the parts of the recording's steps."""

    runs: StepPhases

    def sizes_of_parameters(self) -> Counter[int]:
        """The parameters' sizes: of those with a stack; or half of Adam's states; none where neither is there."""
        with_stack = self.labelled("parameters")
        # A model that was moved or converted had its parameters twice; those that stay are one set.
        framed = Counter(one.requested for one in with_stack if one.freed is None)
        framed = framed or Counter(one.requested for one in with_stack)
        if framed.total() >= _PROOF:
            return framed
        born: dict[int, Counter[int]] = defaultdict(Counter)
        for one in self.labelled("optimizer_state"):
            # Two runs of the optimizer may each make new states; those of one run are counted.
            if one.born >= 0:
                born[self.runs.number_of(one.born)][one.requested] += 1
        for states in born.values():
            half = Counter({size: count // ADAM_COPIES for size, count in states.items() if count >= ADAM_COPIES})
            # Adam keeps a count of steps beside its two copies; it is tiny.
            odd = sum(size for size, count in states.items() if count % ADAM_COPIES and size > 512)
            if half.total() >= _PROOF and not odd:
                return half
        return Counter()

    def sizes_of_a_backward(self, survivors: Iterable[list[Allocation]]) -> Counter[int]:
        """What one backward left behind, where several did the same: the gradients, so also the parameters' sizes."""
        runs = (Counter(one.requested for one in run) for run in survivors)
        sets = Counter(frozenset(run.items()) for run in runs if run.total() >= _PROOF)
        if not sets:
            return Counter()
        sizes = Counter(dict(sets.most_common(1)[0][0]))
        # The loss's own gradient is no parameter's: what has no counterpart among all that stays does not count.
        stays = Counter(one.requested for one in self.allocations if one.freed is None and one.born < 0)
        paired = Counter({size: count for size, count in sizes.items() if stays[size] >= count})
        return paired if paired.total() >= _PROOF and _bytes(paired) > _MOST * _bytes(sizes) else sizes

    def gradients(self, survivors: Iterable[list[Allocation]], parameters: Counter[int]) -> None:
        """Survivors of a backward that match parameters' sizes are gradients; a stack of backward suffices too."""
        for run in survivors:
            left = Counter(parameters)
            for one in run:
                if left[one.requested] > 0:
                    left[one.requested] -= 1
                    self.is_known(
                        one, "gradients", "inferred", "outlived its backward, and has the size of a parameter"
                    )
                elif self.is_workspace(one):
                    self.is_a_workspace(one)
                elif self.sites[one.index] == BACKWARD or self.let_go_by(one) == sites.ZEROED:
                    self.is_known(one, "gradients", "lifetime", "was asked for in backward, and outlived it")
                else:
                    self.is_unknown(one, BACKWARD_THREAD)

    def like_other_gradients(self, survivors: Iterable[list[Allocation]], sizes: Counter[int]) -> None:
        """What a backward left behind and nothing told of, where others are gradients, or a set of the same sizes stays."""
        stays = [one for one in self.allocations if one.born < 0 and one.freed is None]
        if sizes.total() < _PROOF or not (
            whole_copies(sizes, self.labelled("gradients")) or whole_copies(sizes, stays)
        ):
            return
        for run in survivors:
            why = "outlived its backward, with a set of the same sizes as gradients or parameters"
            self.hand_out(["gradients"], sizes, [one for one in run if self.is_open(one)], why)

    def added(self) -> None:
        """A backward that finds gradients makes them all again and adds them: a whole copy among what it let go of at once."""
        gradients = self.labelled("gradients")
        made_in: dict[int, list[Allocation]] = defaultdict(list)
        for one in gradients:
            made_in[self.runs.number_of(one.born)].append(one)
        passing: dict[int, list[Allocation]] = defaultdict(list)
        for one in self.labelled("activation_gradients"):
            passing[self.runs.number_of(one.born)].append(one)
        # Runs follow each other and allocations are in the order of their births: each gradient comes and goes once.
        coming, there, ends = deque(gradients), Counter[int](), list[tuple[int, int]]()
        for number, run in sorted(passing.items()):
            # The last of them may be let go of a moment after the backward has ended.
            made = [*run, *made_in[number]]
            begin, end = min(one.born for one in made), max(one.born for one in made)
            while coming and coming[0].born < begin:
                there[coming[0].requested] += 1
                if (freed := coming[0].freed) is not None:
                    heappush(ends, (freed, coming[0].requested))
                coming.popleft()
            while ends and ends[0][0] <= end:
                there[heappop(ends)[1]] -= 1
            there += Counter()  # without those that are gone
            if there.total() >= _PROOF and whole_copies(there, made) == 1:
                why = "was added to a gradient that was there, as a whole set of the gradients' sizes"
                self.hand_out(["gradients"], there, sorted(made, key=lambda one: (one.freed or 0) - one.born), why)

    def made_in_constructors(self, sizes: Counter[int]) -> None:
        """Whole copies of the parameters that the program's own constructors made, in order: themselves, then states."""
        if sizes.total() < _PROOF:
            return
        made = [
            one
            for one, site in zip(self.allocations, self.sites, strict=True)
            if site == sites.CONSTRUCTOR and one.born >= 0 and self.is_open(one)
        ]
        copies = whole_copies(sizes, made)
        roles = ([] if self.has("parameters") else ["parameters"]) + ["optimizer_state"] * ADAM_COPIES
        why = "was made in a constructor, as a whole set of the parameters' sizes"
        self.hand_out(roles[:copies], sizes, sorted(made, key=lambda one: one.born), why)

    def start(self, parameters: Counter[int]) -> None:
        """Copies of the parameters among what was there before: themselves, Adam's two states, and gradients.

        Only whole copies count, of what stayed for good and of what the trace frees apart.
        """
        if parameters.total() < _PROOF:
            return
        before = [one for one in self.allocations if one.born < 0 and self.is_open(one)]
        stayed = [one for one in before if one.freed is None]
        copies = whole_copies(parameters, stayed)
        roles = [] if self.has("parameters") else ["parameters"]
        states_born = self.has("optimizer_state")
        if not states_born and copies - len(roles) in (1, 2):
            roles += ["optimizer_state"] * (copies - len(roles))
        why = "was there before, as a whole set of the parameters' sizes"
        self.hand_out(roles[:copies], parameters, sorted(stayed, key=lambda one: one.address), why)
        freed = [one for one in before if one.freed is not None]
        changed = [one for one in freed if self.let_go_by(one) == OPTIMIZER]
        if whole_copies(parameters, changed):
            # An optimizer that puts new memory in the place of all that it updates: the parameters themselves, if none stayed.
            self.hand_out(roles[copies:] or ["optimizer_state"], parameters, sorted(changed, key=_end), why)
            self.hand_out(
                ["optimizer_state"] * ADAM_COPIES, parameters, [one for one in changed if self.is_open(one)], why
            )
            freed = [one for one in freed if self.is_open(one)]
        copies = whole_copies(parameters, freed)
        if copies == 1:
            self.hand_out(["gradients"], parameters, sorted(freed, key=lambda one: one.address), why)
        elif states_born and copies in (ADAM_COPIES, ADAM_COPIES + 1):
            # An optimizer that makes its states anew in each step gives the old ones back.
            roles = ["optimizer_state"] * ADAM_COPIES + ["gradients"] * (copies - ADAM_COPIES)
            self.hand_out(roles, parameters, sorted(freed, key=lambda one: one.address), why)


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _end(one: Allocation) -> int:
    return -1 if one.freed is None else one.freed
