"""Values that programs check: what is taken for granted holds, and each line that reads an answer is listed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import tensors


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("T4")
    gpu.turn_off()


SIZES = [(), (3, 4), (1000, 40)]

ANSWERS: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor | bool], bool]] = [
    (lambda x, y: (x >= y).all(), True),
    (lambda x, y: (x <= 1).all(), True),
    (lambda x, y: (x < 1000).all(), True),
    (lambda x, y: ((x >= 0) & (x <= 1)).all(), True),
    (lambda x, y: torch.isnan(x).any(), False),
    (lambda x, y: torch.isinf(x).any(), False),
    (lambda x, y: torch.isfinite(x).all(), True),
    (lambda x, y: x.isfinite().all(), True),
    (lambda x, y: (x == 50256).all(), False),
    (lambda x, y: (x == y).all(), False),
    (lambda x, y: (x == x).all(), True),
    (lambda x, y: (x != x).any(), False),
    (lambda x, y: torch.isclose(x, y).all(), True),
    (lambda x, y: torch.equal(x, y), True),
    (lambda x, y: torch.allclose(x, y), True),
    (lambda x, y: x.min() >= 0, True),
    (lambda x, y: x.max() <= 1, True),
    (lambda x, y: x.max() < 1000, True),
    (lambda x, y: x.mean() <= 0, False),
    (lambda x, y: x.std() < 1e-6, False),
    (lambda x, y: x.mean() > 0.5, False),
]

OF_MANY: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = [
    (lambda x, y: (x <= y).any(), False),
    (lambda x, y: (x > 1e-3).any(), False),
    (lambda x, y: (x < 1e-3).any(), False),
    (lambda x, y: (~(x < 0)).all(), True),
    (lambda x, y: torch.logical_not(x < 0).all(), True),
    (lambda x, y: (x >= y).all(-1)[0], True),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("check", "answer"), ANSWERS)
def test_what_is_taken_for_granted_holds(
    machine: gpu.VirtualMachine,
    check: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | bool],
    answer: bool,
    size: tuple[int, ...],
) -> None:
    x, y = torch.rand(size, device="cuda"), torch.rand(size, device="cuda")
    assert bool(check(x, y)) is answer
    assert sum(machine.reads.counts.values()) == 1, "the line is listed"


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(("check", "answer"), OF_MANY)
def test_all_of_many_are_in_order_and_none_is_not(
    check: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], answer: bool, size: tuple[int, ...]
) -> None:
    assert bool(check(torch.rand(size, device="cuda"), torch.rand(size, device="cuda"))) is answer


COUNTS: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
    (lambda x: x.isnan().sum(), 0),
    (lambda x: (torch.isnan(x) | torch.isinf(x)).sum(), 0),
    (lambda x: torch.isfinite(x).sum(), 120),
    (lambda x: torch.count_nonzero(~torch.isfinite(x)), 0),
    (lambda x: (torch.isfinite(x) & ~x.isnan()).sum(), 120),
]


@pytest.mark.parametrize("card", ["T4", "T4,values=auto"])
@pytest.mark.parametrize(("count", "found"), COUNTS)
def test_numbers_that_are_none_are_counted(
    count: Callable[[torch.Tensor], torch.Tensor], found: int, card: str
) -> None:
    gpu.turn_off()
    gpu.turn_on(card)
    x = torch.rand(3, 40, device="cuda")
    assert int(count(x)) == found
    if (count(x) == found).logical_not():
        raise AssertionError
    largest = x.max()
    if not (largest.isnan().sum() == 0 and x.min().isnan().sum() == 0):
        raise AssertionError("a single number's mask is counted, too")
    mask = x.isnan()
    mask |= x > 0.5
    kept = x[mask]
    assert len(kept) == int(mask.sum()), "what a mask became counts as any mask does"


def test_an_assert_of_a_comparison_holds() -> None:
    x, y = torch.rand(100, 40, device="cuda"), torch.rand(100, 40, device="cuda")
    assert (x - y).abs().max() < 1e-6
    assert torch.norm(x - y) < 1e-6 and x.sum() == y.sum()  # noqa: PT018
    assert 0 < x.max() < 100
    assert x.any() == True  # noqa: E712
    with pytest.raises(AssertionError):
        assert x.any().item() == True  # noqa: E712
    with pytest.raises(AssertionError):
        assert [one for one in (x, y) if one.sum() > 2.0] == [x, y]


def test_what_is_known_is_answered_from_what_is_known(machine: gpu.VirtualMachine) -> None:
    labels = torch.tensor([1, 0, 2], device="cuda")
    assert not (labels > 0).all()
    assert (labels == 2).any()
    assert torch.isfinite(torch.tensor(float("inf"), device="cuda")).logical_not()
    assert not machine.reads.counts


def test_tensors_of_other_shapes_are_not_equal() -> None:
    assert not torch.equal(torch.rand(3, device="cuda"), torch.rand(4, device="cuda"))


def test_an_answer_ends_when_the_mask_is_written_to() -> None:
    mask = torch.rand(100, 100, device="cuda") >= 0
    assert mask.all()
    mask[0] = False
    assert not mask.all(), "unknown again, and the stand-in of a flag is False"


def test_an_answer_is_no_attribute_of_the_programs() -> None:
    mask = torch.rand(100, 100, device="cuda") >= 0
    assert tensors.own_attributes(mask) == {}
    assert tensors.own_attributes(pickle.loads(pickle.dumps(mask))) == {}
    assert copy.copy(mask).is_cuda


def test_checks_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.rand(100, 40, device="cuda")
        assert ((x >= 0) & (x <= 1)).all()
        assert not torch.isnan(x).any()


def test_checks_that_pytorch_makes_itself() -> None:
    sound, window = torch.rand(2, 4000, device="cuda"), torch.hann_window(256, device="cuda")
    spectrum = torch.stft(sound, 256, 128, window=window, return_complex=True)
    assert torch.istft(spectrum, 256, 128, window=window).shape == (2, 3968)
    assert torch.cov(torch.rand(3, 8, device="cuda"), aweights=torch.rand(8, device="cuda")).shape == (3, 3)
    torch.testing.assert_close(sound, sound.clone())


def test_a_detectors_loss_checks_its_boxes() -> None:
    head = nn.Linear(16, 4).cuda()
    boxes = head(torch.rand(300, 16, device="cuda")).sigmoid()
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)
    if not (corners[:, 2:] >= corners[:, :2]).all():
        raise ValueError("boxes must be in corner format")
    if (corners[:, 2:] <= corners[:, :2]).any():
        raise ValueError("boxes must not be empty")
    widths = (corners[:, 2:] - corners[:, :2]).clamp(min=0)
    widths.prod(-1).sum().backward()


def test_a_step_that_is_skipped_for_values_that_are_no_numbers_is_taken() -> None:
    layer = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    loss = layer(torch.rand(8, 4, device="cuda")).mean()
    if torch.isfinite(loss) and not torch.isnan(loss):
        loss.backward()
        optimizer.step()
    assert optimizer.state


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(0),
        lambda model: model.to(device=0),
        lambda model: model.to(0, torch.float16),
        lambda model: model.cuda(0),
        lambda model: model.to(torch.device(0)),
    ],
)
def test_a_number_is_a_device(move: Callable[[nn.Module], nn.Module]) -> None:
    model = move(nn.Linear(2, 2))
    assert model.weight.device == torch.device("cuda", 0)
    assert model.to(torch.float64).weight.dtype == torch.float64


@pytest.mark.parametrize(
    "move",
    [lambda model, tensor: model.to(tensor), lambda model, tensor: model.to(tensor=tensor)],
)
def test_a_tensor_is_a_device_and_a_type(move: Callable[[nn.Module, torch.Tensor], nn.Module]) -> None:
    model = move(nn.BatchNorm1d(2), torch.empty(0, device="cuda", dtype=torch.float64))
    for tensor in (model.weight, model.running_mean):
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.dtype == torch.float64
    assert torch.cuda.memory_allocated() == 5 * 512


def _asserts_on_one_line(x: torch.Tensor, y: torch.Tensor) -> None:
    assert (x == y).all()


def _asserts_that_not(x: torch.Tensor, y: torch.Tensor) -> None:
    assert not (x == y).all(), "equal"


def _asserts_on_several(x: torch.Tensor, y: torch.Tensor) -> None:
    assert (x != y).any() and (x == 3).any(), (  # noqa: PT018
        "a message on a line of its own"
    )


@pytest.mark.parametrize("asserts", [_asserts_on_one_line, _asserts_that_not, _asserts_on_several])
def test_what_a_program_asserts_holds(asserts: Callable[..., None]) -> None:
    asserts(torch.randn(300, device="cuda"), torch.randn(300, device="cuda"))


def test_what_is_compared_after_it_was_read_is_not_taken_to_hold() -> None:
    x = torch.randn(300, device="cuda")
    with pytest.raises(AssertionError):
        assert (x == 1).all().item() is True


def test_a_distribution_of_the_hosts_takes_samples_of_the_device() -> None:
    # It checks that each number is equal to itself.
    torch.distributions.Normal(0.0, 1.0).log_prob(torch.randn(300, device="cuda"))


@pytest.mark.parametrize("values", ["stand-in", "auto"])
def test_a_small_distribution_is_as_it_has_to_be(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few elements flags are guessed one by one (a sum is not within a tolerance of one), and none of that is asked here."""
    # (Libraries turn the checks off where they are imported.)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    gpu.turn_off()
    machine = gpu.turn_on(f"T4,values={values}")
    scores = torch.nn.Linear(4, 2, device="cuda")(torch.rand(3, 4, device="cuda"))
    kinds: list[torch.distributions.Distribution] = []
    for probabilities in (scores.softmax(-1), scores[0].softmax(-1)):
        kinds.append(torch.distributions.Categorical(probabilities))
        kinds.append(torch.distributions.Categorical(logits=probabilities))
        kinds.append(torch.distributions.Bernoulli(probabilities))
    kinds.append(torch.distributions.Bernoulli(scores[0, 0].sigmoid()))
    for kind in kinds:
        kind.log_prob(kind.sample())
    assert not machine.reads.counts
    # What is known is looked at.
    with pytest.raises(ValueError, match="Expected parameter probs"):
        torch.distributions.Categorical(torch.tensor([0.5, -0.5], device="cuda"))
    with pytest.raises(ValueError, match="to be within the support"):
        kinds[1].log_prob(torch.tensor([5], device="cuda"))


def test_a_mask_that_is_only_guessed_selects_as_many_of_one_tensor_as_of_another() -> None:
    x = torch.randn(8, 4, device="cuda")[:, torch.tensor([1, 3], device="cuda")]
    wide = torch.randn(8, 2, 300, device="cuda")
    mask = x / x >= 1
    assert len(x[mask]) == len(wide[mask, :]) == x.numel()
