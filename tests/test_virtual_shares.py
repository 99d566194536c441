"""Choices among so many, and draws by chance: sizes that depend on them are as is likely, and add up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import shares

TOKENS, EXPERTS, EACH = 4096, 8, 2


@pytest.fixture(autouse=True, params=["T4", "T4,values=auto"])
def device(request: pytest.FixtureRequest) -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on(request.param)
    gpu.turn_off()


def scores(classes: int = EXPERTS) -> torch.Tensor:
    return torch.randn(TOKENS, classes, device="cuda").softmax(-1)


def chosen() -> torch.Tensor:
    return scores().topk(EACH, dim=-1).indices


# ---- routers of experts: what each gives, by how many tokens go to each


def by_comparing(indices: torch.Tensor) -> list[int]:
    return [len(torch.where(indices == expert)[0]) for expert in range(EXPERTS)]


def by_one_hot(indices: torch.Tensor) -> list[int]:
    masks = F.one_hot(indices, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(masks.sum((-1, -2)), 0).nonzero()
    return [len(torch.where(masks[expert].squeeze(0))[1]) for expert in hit]


def by_one_hot_with_one_place_more(indices: torch.Tensor) -> list[int]:
    masks = F.one_hot(indices, EXPERTS + 1)
    return [len(masks[..., expert].nonzero()) for expert in range(EXPERTS)]


def by_counting(indices: torch.Tensor) -> list[int]:
    counts: list[int] = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
    return counts


def by_ranges(indices: torch.Tensor) -> list[int]:
    counts = torch.histc(indices.float().view(-1), bins=EXPERTS, min=0, max=EXPERTS)
    return [int(count) for count in counts]


def by_scattered_ones(indices: torch.Tensor) -> list[int]:
    ones = indices.new_zeros((TOKENS, EXPERTS)).scatter_(1, indices, 1)
    counts: list[int] = ones.sum(0).cpu().tolist()
    return counts


def by_ends(indices: torch.Tensor) -> list[int]:
    ends = F.one_hot(indices, EXPERTS).sum(1).sum(0).cumsum(0)
    begins = [0, *ends.tolist()]
    return [end - begin for begin, end in itertools.pairwise(begins)]


def by_masked_rows(indices: torch.Tensor) -> list[int]:
    rows = torch.ones(TOKENS, 4, device="cuda")
    return [len(rows[(indices == expert).any(-1)]) for expert in range(EXPERTS)]


@pytest.mark.parametrize(
    "route",
    [
        by_comparing,
        by_one_hot,
        by_one_hot_with_one_place_more,
        by_counting,
        by_ranges,
        by_scattered_ones,
        by_ends,
        by_masked_rows,
    ],
)
def test_tokens_are_spread_evenly_over_experts(route: Callable[[torch.Tensor], list[int]]) -> None:
    assert route(chosen()) == [TOKENS * EACH // EXPERTS] * EXPERTS
    assert route(scores().topk(EACH, dim=-1)[1].clone()) == [TOKENS * EACH // EXPERTS] * EXPERTS


def test_a_switch_sends_each_token_to_one_expert() -> None:
    experts = scores().argmax(-1)
    assert [len(experts[experts == expert]) for expert in range(EXPERTS)] == [TOKENS // EXPERTS] * EXPERTS
    best, places = scores().max(dim=-1)
    assert len(best[places == 3]) == TOKENS // EXPERTS


def test_a_layer_of_experts_takes_what_its_tokens_take() -> None:
    """All of them in all experts, as the largest possible sizes would have it, are four times as much."""
    torch.cuda.reset_peak_memory_stats()
    x, indices = torch.ones(TOKENS, 256, device="cuda"), chosen()
    before = torch.cuda.memory_allocated()
    held = [x[torch.where(indices == expert)[0]] for expert in range(EXPERTS)]
    assert torch.cuda.memory_allocated() - before == EACH * x.nbytes
    assert sum(map(len, held)) == EACH * TOKENS


# ---- draws by chance


def test_masks_that_are_drawn_have_their_share() -> None:
    x = torch.ones(TOKENS, 4, device="cuda")
    masked = torch.rand(TOKENS, device="cuda") < 0.15
    assert len(x[masked]) == masked.sum().item() == -(-TOKENS * 15 // 100)
    assert len(x[~masked]) == TOKENS * 85 // 100 + 1
    assert len(x[torch.rand_like(x[:, 0]) >= 0.75]) == TOKENS // 4
    tossed = torch.zeros(TOKENS, device="cuda").bernoulli_(0.5).bool()
    assert len(tossed.nonzero()) == TOKENS // 2
    labels = torch.randint(0, 10, (TOKENS,), device="cuda")
    assert len(x[labels == 3]) == -(-TOKENS // 10)
    assert len(x[(labels == 3) | (labels == 4)]) == -(-TOKENS * 19 // 100)
    assert len(x[(labels == 3) & masked]) == -(-TOKENS * 15 // 1000)


def test_a_mask_says_on_the_host_how_many_it_selects() -> None:
    x, drawn = torch.ones(TOKENS, device="cuda"), torch.rand(TOKENS, device="cuda")
    for mask in (drawn < 0.15, drawn > 0.7, chosen().flatten()[:TOKENS] == 3):
        assert len(x[mask]) == int(mask.cpu().sum()) == mask.sum().item() == len(x.cpu()[mask.cpu()])


# ---- what is no choice


def test_who_was_right_is_not_taken_from_a_share() -> None:
    """Predictions beside labels: nothing says how many are right."""
    predicted, labels = scores().argmax(-1), torch.randint(0, EXPERTS, (TOKENS,)).cuda()
    assert len(torch.where(predicted == labels)[0]) == TOKENS


def labels_of_what_is_found(classes: int = 90) -> torch.Tensor:
    """As a detector has them: of each box, the label of each class, where its score is above a bound."""
    found = scores(classes)[:400] > 0.05
    labels = torch.arange(1, classes + 1, device="cuda").expand_as(found)
    return labels.reshape(-1)[found.reshape(-1).nonzero().squeeze(1)]


def test_what_is_taken_from_known_labels_is_one_of_them() -> None:
    taken = labels_of_what_is_found()
    assert len(taken) == 400 * 90, "all may be found"
    turns = [len(torch.where(taken == label)[0]) for label in torch.unique(taken)]
    assert turns == [400] * 90, "a turn for each class, and not for each box"
    taken = torch.cat([taken, taken]).clone()
    assert len(taken.unique(return_counts=True)[1]) == 90
    taken[3] = 7
    assert len(taken.unique()) == len(taken), "unknown again"


CLAMPED: list[tuple[Callable[[torch.Tensor], torch.Tensor], float]] = [
    (lambda x: x.clamp(min=2)[3, 1], 2),
    (lambda x: x.clamp(2, 9).ceil().view(-1)[5], 2),
    (lambda x: torch.clamp_min(x, 2.5).long()[0, 0], 2),
    (lambda x: torch.clamp(x, max=-3).clone().mean(), -3),
    (lambda x: -(x.clip(min=1) * 4 / 2)[0, 0], -2),
    (lambda x: torch.stack([x.clamp(min=4), x.clamp(min=4)]).amax(), 4),
    (lambda x: x.clamp(min=2).sum(), 320),
    (lambda x: x.clone().clamp_(min=5)[torch.randperm(40, device="cuda")].max(), 5),
    (lambda x: x.clamp(min=5).clamp(max=3)[0, 0], 3),
]


@pytest.mark.parametrize(("made", "read"), CLAMPED)
def test_what_was_clamped_is_no_zero_where_zero_lies_outside(
    device: gpu.VirtualMachine, made: Callable[[torch.Tensor], torch.Tensor], read: float
) -> None:
    x = torch.randn(40, 4, device="cuda")
    number = made(x)
    assert number.item() == number.cpu().item() == read
    assert device.reads.counts, "a stand-in all the same"


def test_a_bound_ends_where_something_else_is_written(device: gpu.VirtualMachine) -> None:
    sizes = torch.randn(40, device="cuda").clamp(min=2)
    assert sizes.max() > 1
    assert not sizes[3] <= 1
    assert sizes.tolist() == [2.0] * 40
    sizes -= torch.randn(40, device="cuda")
    assert sizes[3].item() != 2
    assert torch.randn(40, device="cuda").clamp(-1, 1)[0].item() != -1
    assert (
        F.interpolate(torch.randn(1, 1, 8, 8), size=int(torch.randn(9, device="cuda").clamp(min=1)[2])).shape[-1] == 1
    )


def test_there_are_no_more_kinds_than_can_be_drawn_or_chosen() -> None:
    assert len(torch.randint(0, 10, (3000,), device="cuda").unique()) == 10
    assert len(chosen().unique()) == EXPERTS
    assert len(chosen()[:1].unique()) == EACH, "nor than there are"
    places = torch.arange(3000, device="cuda")
    assert len(places[torch.randperm(3000, device="cuda")].unique()) == 3000
    assert len(torch.rand(3000, device="cuda").unique()) == 3000


def test_what_was_written_over_is_no_choice_any_more() -> None:
    indices, mask = chosen(), chosen() == 1
    indices.copy_(torch.randn_like(indices, dtype=torch.float32) > 0)
    mask.logical_xor_(torch.randn(mask.shape, device="cuda") > 0)
    assert len(torch.where(indices == 1)[0]) == indices.numel()
    assert len(torch.where(mask)[0]) == mask.numel()


def test_a_part_that_is_drawn_or_chosen_says_nothing_of_the_whole() -> None:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda")

    drawn, mask, indices = normal(TOKENS), normal(TOKENS, 4) > 0, (normal(2, TOKENS) * 9).long()
    drawn[:10].uniform_()
    mask[:, 0].bernoulli_(0.5)
    torch.argmax(normal(TOKENS, 8), dim=-1, out=indices[0])
    assert len((drawn < 0.15).nonzero()) == len((indices[1] == 3).nonzero()) == TOKENS
    assert len(mask.nonzero()) == mask.numel()


def test_a_number_that_the_program_has_shown_comes_first() -> None:
    mask = scores().argmax(-1) == 0
    positions = mask.nonzero()
    assert len(positions) == TOKENS // EXPERTS
    assert len(mask.nonzero()) == int(mask.sum()) == len(positions)


def test_the_report_says_what_was_taken(device: gpu.VirtualMachine) -> None:
    torch.where(chosen() == 1)
    torch.where(torch.randn(9, device="cuda") > 0)
    notes = " ".join(device.notes())
    assert "choices were taken to be spread evenly and draws to be as is likely: nonzero (1)." in notes
    assert "the largest possible was assumed: nonzero (1)." in notes


@given(st.integers(0, 5000), st.integers(0, 40), st.lists(st.integers(1, 12), min_size=1, max_size=2))
def test_counts_add_up_and_differ_by_one(total: int, among: int, shape: list[int]) -> None:
    counts = shares.spread_evenly(total, among, torch.empty(shape, dtype=torch.int64)).flatten().tolist()
    over = counts[: among or len(counts)]
    assert sum(counts) == total
    assert max(over) - min(over) <= 1


@pytest.mark.parametrize(
    ("draw", "share"),
    [
        (lambda: torch.bernoulli(torch.full((TOKENS,), 0.25, device="cuda")).bool(), 0.25),
        (lambda: torch.empty(TOKENS, device="cuda").bernoulli_(torch.tensor(0.25, device="cuda")) > 0, 0.25),
        (lambda: torch.distributions.Bernoulli(torch.tensor(0.5, device="cuda")).sample((TOKENS,)).bool(), 0.5),
        (lambda: torch.rand(TOKENS, device="cuda") < torch.full((TOKENS,), 0.25, device="cuda"), 0.25),
        (lambda: torch.tensor(0.75, device="cuda") <= torch.rand(TOKENS, device="cuda"), 0.25),
        (lambda: torch.rand(EXPERTS, TOKENS, device="cuda")[:, 0] < torch.tensor([1.0, 0.0] * 4, device="cuda"), 0.5),
        (lambda: torch.bernoulli(torch.rand(TOKENS, device="cuda")).bool(), 0.5),
    ],
)
def test_what_is_drawn_with_chances_that_are_known_has_their_share(
    draw: Callable[[], torch.Tensor], share: float
) -> None:
    mask = draw()
    assert len(torch.ones(len(mask), 4, device="cuda")[mask]) == share * len(mask)


def test_of_chances_that_nobody_knows_all_may_come_true() -> None:
    mask = torch.bernoulli(torch.randn(TOKENS, device="cuda").sigmoid()).bool()
    assert len(torch.ones(TOKENS, 4, device="cuda")[mask]) == TOKENS
