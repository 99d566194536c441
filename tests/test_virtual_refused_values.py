"""Values that a card's kernel refuses: where they are known, the line that hands them over raises what the host says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("card_with_values")


def on_device(*numbers: float, rows: int = 0) -> torch.Tensor:
    made = torch.tensor(numbers, device="cuda")
    return made.view(rows, -1) if rows else made


def unknown(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


# What is wrong in each, and the words in which the host says so.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "index": (lambda: unknown(3, 4)[on_device(0, 5)], IndexError, "index 5 is out of bounds"),
    "index of columns": (lambda: unknown(3, 4)[:, on_device(-5)], IndexError, "index -5 is out of bounds"),
    "list": (lambda: unknown(3, 4)[[0, 3]], IndexError, "index 3 is out of bounds"),
    "assignment": (lambda: unknown(3, 4).__setitem__(on_device(3), 1.0), IndexError, "index 3 is out of bounds"),
    "rows": (lambda: unknown(3, 4).index_select(0, on_device(3)), IndexError, "out of range"),
    "added": (lambda: unknown(3, 4).index_add_(1, on_device(4), unknown(3, 1)), RuntimeError, "index 4 is out of bounds"),
    "copied": (lambda: unknown(3, 4).index_copy_(0, on_device(3), unknown(1, 4)), IndexError, "index 3 is out of"),
    "filled": (lambda: unknown(3, 4).index_fill_(-1, on_device(4), 1.0), IndexError, "index 4 is out of bounds"),
    "gather": (lambda: unknown(3, 4).gather(1, on_device(4, 0, 0, rows=3)), RuntimeError, "index 4 is out of bounds"),
    "scatter": (lambda: unknown(3, 4).scatter(1, on_device(-1, rows=1), 1.0), RuntimeError, "index -1 is out of bounds"),
    "scatter_add": (
        lambda: unknown(3, 4).scatter_add_(0, on_device(3, rows=1), unknown(1, 1)),
        RuntimeError,
        "index 3 is out of bounds",
    ),
    "take": (lambda: unknown(3, 4).take(on_device(12)), IndexError, "tried to access index 12 on a tensor of 12"),
    "embedding": (lambda: F.embedding(on_device(0, 50_000), unknown(50_000, 8)), IndexError, "index out of range"),
    "bag": (lambda: F.embedding_bag(on_device(10, rows=1), unknown(10, 8)), RuntimeError, "takes value 10"),
    "label": (lambda: F.cross_entropy(unknown(2, 3), on_device(0, 3)), IndexError, "Target 3 is out of bounds"),
    "label of a pixel": (
        lambda: F.cross_entropy(unknown(2, 3, 2), on_device(0, 3, 1, 1, rows=2)),
        IndexError,
        "Target 3 is out of bounds",
    ),
    "no class": (lambda: F.one_hot(on_device(0, 3), 3), RuntimeError, "index 3 is out of bounds|Class values"),
    "more than there is": (
        lambda: unknown(3).masked_scatter(on_device(1, 1, 0).bool(), unknown(1)),
        RuntimeError,
        "Number of elements of source",
    ),
    "negative count": (lambda: torch.bincount(on_device(-1, 2)), RuntimeError, "non-negative"),
    "an end without end": (lambda: torch.histc(unknown(4), 4, 0, float("inf")), RuntimeError, r"\[0, inf\] is not finite"),
    "ends the wrong way": (lambda: torch.histc(unknown(4), 4, 3, 1), RuntimeError, "max must be larger than min"),
    "no bins": (lambda: torch.histc(unknown(4), 0), RuntimeError, "bins must be > 0"),
    "infinite values": (lambda: torch.histc(on_device(1.0, float("inf"))), RuntimeError, r"\[1, inf\] is not finite"),
    "segments that are too short": (
        lambda: torch.segment_reduce(unknown(6), "sum", lengths=on_device(2, 3)),
        RuntimeError,
        "Expected all rows of lengths",
    ),
    "negative segment": (
        lambda: torch.segment_reduce(unknown(6), "sum", lengths=on_device(-2, 8)),
        RuntimeError,
        "lengths contains negative value",
    ),
    "negative repeats": (
        lambda: unknown(2).repeat_interleave(on_device(1, -1)),
        RuntimeError,
        "repeats can not be negative",
    ),
    "negative weights": (lambda: torch.multinomial(on_device(-1.0, 2.0), 1), RuntimeError, "element < 0"),
    "no weights": (lambda: torch.multinomial(on_device(0.0, 0.0), 1), RuntimeError, "sum of probabilities <= 0"),
    "chance": (lambda: torch.bernoulli(on_device(0.5, 1.5)), RuntimeError, "p_in <= 1"),
    "chance in place": (lambda: unknown(2).bernoulli_(on_device(0.5, -0.5)), RuntimeError, "p_in <= 1"),
    "deviation": (lambda: torch.normal(0.0, on_device(-1.0)), RuntimeError, "std >= 0"),
    "rate": (lambda: torch.poisson(on_device(-1.0)), RuntimeError, "non-negative"),
    "target of a chance": (
        lambda: F.binary_cross_entropy(unknown(1).sigmoid(), on_device(2.0)),
        RuntimeError,
        "between 0 and 1",
    ),
    "assertion": (lambda: torch._assert_async(on_device(0.0)), RuntimeError, "got zero"),
    "length": (
        lambda: F.ctc_loss(unknown(4, 1, 3).log_softmax(2), on_device(1, 2, rows=1), on_device(5), on_device(2)),
        RuntimeError,
        "at most 4, but got value 5",
    ),
    "order": (
        lambda: torch.searchsorted(unknown(2), unknown(1), sorter=on_device(1, 5)),
        RuntimeError,
        "sorter index out of range",
    ),
    "place before pooling": (
        lambda: F.max_unpool2d(unknown(1, 1, 1, 1), on_device(9).view(1, 1, 1, 1), 2),
        RuntimeError,
        "invalid max index: 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_known_values_that_a_kernel_refuses_raise_what_the_host_says(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


def test_what_is_in_bounds_or_ignored_raises_nothing() -> None:
    assert unknown(3, 4)[on_device(-3, 2)].shape == (2, 4)
    assert unknown(3, 4)[on_device(1, 0, 1).bool()].shape == (2, 4)
    assert unknown(3, 4).index_fill_(0, on_device(-1), 1.0).shape == (3, 4)
    assert F.cross_entropy(unknown(2, 3), on_device(2, -100)).shape == ()
    assert F.cross_entropy(unknown(2, 3), on_device(2, 7), ignore_index=7).shape == ()
    assert F.cross_entropy(unknown(1, 3), on_device(0.5, 0.5, 0.0, rows=1)).shape == ()
    assert torch.multinomial(on_device(0.0, 1.0), 1).tolist() in ([0], [1])
    assert torch.bernoulli(on_device(0.0, 1.0)).shape == (2,)
    assert torch.empty(2, device="cuda").fill_(7.0).bernoulli_(0.5).shape == (2,)
    assert F.embedding(on_device(0, 9), unknown(10, 8)).shape == (2, 8)
    assert torch.histc(unknown(4), 5, -1, 1).shape == torch.histc(on_device(1.0, 1.0), 5).shape == (5,)
    assert torch.segment_reduce(unknown(6), "sum", lengths=on_device(2, 4)).shape == (2,)
    assert torch.segment_reduce(unknown(6), "sum", lengths=on_device(2, 3), unsafe=True).shape == (2,)


def test_values_that_nobody_knows_raise_nothing() -> None:
    """(With real values these are in bounds.)"""
    labels = unknown(8, 3).argmax(-1)
    assert F.cross_entropy(unknown(8, 3), labels).shape == ()
    assert unknown(3, 4)[labels].shape == (8, 4)
    assert torch.multinomial(unknown(8).softmax(0), 2).shape == (2,)


def test_the_line_that_hands_them_over_is_the_one_that_fails() -> None:
    def step() -> torch.Tensor:
        labels = on_device(0, 3)
        scores = unknown(2, 3)
        return F.cross_entropy(scores, labels)

    with pytest.raises(IndexError) as error:
        step()
    assert str(error.traceback[1].statement).strip() == "return F.cross_entropy(scores, labels)"


# Values that a kernel would refuse, in calls that go wrong before one runs; and what is said of that.
_BEFORE_A_KERNEL: dict[str, tuple[Callable[[], object], str]] = {
    "scatter": (lambda: unknown(3, 4).scatter(0, on_device(0, 9, 1, 2, rows=2), unknown(1, 1)), "no larger size than src"),
    "gather": (lambda: unknown(3, 4).gather(1, on_device(*range(8), rows=4)), "index|no larger than self"),
    "dimensions": (lambda: unknown(3, 4).gather(0, on_device(9)), "same number of dimensions"),
    "added": (lambda: unknown(3, 4).index_add(0, on_device(9), unknown(1, 5)), "source tensor shape must match"),
    "copied": (lambda: unknown(3, 4).index_copy(0, on_device(9), unknown(1, 5)), "same slice shapes"),
    "put": (lambda: unknown(3, 4).put(on_device(99, 1), unknown(3)), "same number of elements"),
    "rows": (lambda: unknown(3, 4).index_select(0, on_device(9, rows=1)), "Index is supposed to be"),
}  # fmt: skip


@pytest.mark.parametrize("name", _BEFORE_A_KERNEL)
def test_shapes_that_do_not_fit_are_said_before_values(name: str) -> None:
    call, words = _BEFORE_A_KERNEL[name]
    with pytest.raises((RuntimeError, IndexError), match=words):
        call()


def _losses(
    given: object = (4, 4),
    wanted: object = (2, 2),
    blank: int = 0,
    rows: int = 2,
    symbols: int = 3,
    **types: torch.dtype,
) -> torch.Tensor:
    scores = unknown(4, 2, symbols).log_softmax(2).to(types.get("scores", torch.float32))
    lengths = [torch.tensor(one, dtype=types.get("lengths", torch.int64)) for one in (given, wanted)]
    return F.ctc_loss(scores, on_device(1, 2, 2, 1, rows=rows), *lengths, blank)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: _losses(given=(5, 4)),
            r"input_lengths to have value at most 4, but got value 5 \(.* for ctc_loss_gpu\)",
        ),
        (lambda: _losses(given=(-1, 4)), "input_lengths to have value at least 0, but got value -1"),
        (lambda: _losses(wanted=(-1, 2)), "target_lengths to have value at least 0, but got value -1"),
        (lambda: _losses(wanted=(3, 2)), "size at least 3 at dimension 1, but got size 2 for argument #2 'targets'"),
        (lambda: _losses(wanted=(1, 2), rows=0), "size 3 at dimension 0, but got size 4 for argument #2 'targets'"),
        (lambda: _losses(rows=4), "size 2 at dimension 0, but got size 4 for argument #2 'targets'"),
        (lambda: _losses(given=(4,)), "input_lengths must be of size batch_size"),
        (lambda: _losses(wanted=(2,)), "target_lengths must be of size batch_size"),
        (lambda: _losses(blank=3), "blank must be in label range"),
        (lambda: _losses(lengths=torch.float32), "input_lengths must be integral"),
        (lambda: _losses(scores=torch.float16), "\"ctc_loss_cuda\" not implemented for 'Half'"),
    ],
)
def test_ctc_loss_looks_at_its_lengths_as_a_card_does(call: Callable[[], object], words: str) -> None:
    assert _losses(rows=0).shape == _losses(wanted=(0, 1), given=(3, 4)).shape == ()
    with pytest.raises(RuntimeError, match=words) as refused:
        call()
    assert refused.type is (NotImplementedError if "not implemented" in words else RuntimeError)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x, mask: x.__setitem__(mask.byte(), 1.0),
            "masked_fill only supports boolean masks, but got dtype Byte",
        ),
        (lambda x, mask: x.masked_select(mask.byte()), "masked_select: expected BoolTensor for mask"),
        (
            lambda x, mask: torch.where(mask.int(), x, x),
            "condition to be a boolean tensor, but got a tensor with dtype Int",
        ),
        (
            lambda x, mask: x[mask[:, 0].to(torch.int8)],
            "tensors used as indices must be long, int, byte or bool tensors",
        ),
        (lambda x, mask: torch.bincount(mask[0].int(), unknown(3)), "1-d and have the same length as input"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*uint8:UserWarning")
def test_masks_and_places_of_other_types_are_refused(
    call: Callable[[torch.Tensor, torch.Tensor], object], words: str
) -> None:
    x, mask = unknown(3, 4), unknown(3, 4) > 0
    x[mask[:, 0].int() * 0] = 1.0
    with pytest.raises((RuntimeError, IndexError), match=words):
        call(x, mask)
