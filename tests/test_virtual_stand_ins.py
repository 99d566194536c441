"""Stand-in values that the user supplies: for everything, for a line, for a tensor; and that the report says so."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpumem_magic
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report import schema
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import supplied


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu.VirtualMachine]:
    monkeypatch.setattr(supplied, "_supplied", [])
    yield gpu.turn_on("T4")
    gpu.turn_off()


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose values nobody knows."""
    return torch.empty(shape, device="cuda", dtype=dtype)


def test_for_everything_by_kind() -> None:
    gpumem_magic.stand_in(2.5)
    gpumem_magic.stand_in(7)
    assert unknown().item() == 2.5
    assert unknown(3).tolist() == [2.5] * 3
    assert unknown(dtype=torch.float16).cpu() == 2.5
    assert unknown(dtype=torch.int64).item() == 7
    assert not (unknown() > 1)
    gpumem_magic.stand_in(True)
    assert unknown() > 1
    assert torch.equal(unknown(2), unknown(2))
    host = torch.zeros(2)
    host.copy_(unknown(2))
    assert host.tolist() == [2.5, 2.5]


def test_positions_and_tokens_of_long_sequences_are_known(machine: gpu.VirtualMachine) -> None:
    """Libraries decide by them whether sequences were packed, padded or shifted: a guess would take another attention mask."""
    positions = torch.arange(16_384, device="cuda")[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    assert ((steps != 1).cumsum(-1)[:, -1] == 0).all()
    tokens = torch.arange(8 * 2048).view(8, 2048).cuda() % 100
    assert int((tokens == 0).sum()) == 164
    assert not machine.reads.counts


def test_a_generators_state_stays_known_on_the_device(machine: gpu.VirtualMachine) -> None:
    """As a checkpoint that is read with ``map_location="cuda"`` has it."""
    state = torch.get_rng_state()
    assert state.cuda().cpu().equal(state)
    assert not machine.reads.counts
    image = torch.full((3, 224, 224), 7, dtype=torch.uint8).add_(torch.arange(224, dtype=torch.uint8))
    assert not image.cuda().cpu().equal(image)


def test_what_follows_from_a_drawn_number_agrees_with_it(machine: gpu.VirtualMachine) -> None:
    """A slice that begins at random has its length, as where windows of a text are cut on the host."""
    for starts, least in (
        (torch.randint(100, (3,), device="cuda"), 0),
        (torch.randint(5, 100, (3,), device="cuda"), 5),
        (torch.randint(5, high=100, size=(3,), device="cuda"), 5),
    ):
        assert [len(range(200)[start : start + 50]) for start in starts] == [50] * 3
        assert starts.tolist() == [least, (least + 99) // 2, 99]
        assert machine.reads.counts
        machine.reads.counts.clear()
    gpumem_magic.stand_in(9)
    assert torch.randint(5, 100, (3,), device="cuda").tolist() == [9] * 3


@pytest.mark.parametrize("count", [64, 5000])
def test_what_was_drawn_among_so_many_has_as_many_classes(machine: gpu.VirtualMachine, count: int) -> None:
    """As a loss counts labels, or makes one-hot rows of them: nearly all draws have some of each."""
    for low, high in ((0, 10), (3, 10)):
        labels = torch.randint(low, high, (count,), device="cuda")
        assert len(torch.bincount(labels)) == len(torch.bincount(labels.clone(), minlength=4)) == high
        assert torch.nn.functional.one_hot(labels).shape == (count, high)
        assert (labels.max().item(), labels.amax().item(), labels.min().item()) == (high - 1, high - 1, low)
        assert len(torch.bincount(labels, minlength=high + 5)) == high + 5
    assert torch.randint(-5, 5, (count,), device="cuda").max().item() < 5


def test_a_single_number_that_was_drawn_is_the_lowest(machine: gpu.VirtualMachine) -> None:
    assert [torch.randint(7, 90, size, device="cuda").item() for size in ((), (1,))] == [7, 7]
    chosen = torch.rand(3000, 12, device="cuda").argmax(1)
    assert len(torch.bincount(chosen)) == chosen.max().item() + 1 == 12


def test_known_values_stay_what_they_are() -> None:
    gpumem_magic.stand_in(2.5)
    assert torch.tensor(4.0, device="cuda").item() == 4.0


def test_for_a_line_before_all_and_the_newer_before_the_older() -> None:
    gpumem_magic.stand_in(1.0)
    gpumem_magic.stand_in(2.0, line="first = loss.item()")
    loss = unknown()
    first = loss.item()
    second = loss.item()
    assert (first, second) == (2.0, 1.0)
    gpumem_magic.stand_in(3.0, line="again = loss.item()")
    newer = gpumem_magic.stand_in(4.0, line="again = loss.item()")
    again = loss.item()
    assert again == 4.0
    newer.remove()
    newer.remove()
    assert supplied._supplied[-1].value == 3.0
    gpumem_magic.stand_in(True, line="if loss > 100")
    if loss > 100:
        again = 5.0
    assert again == 5.0


def test_for_a_place() -> None:
    code = "first = loss.item()\nsecond = loss.item()\n"
    names: dict[str, Any] = {"loss": unknown(), "__name__": "program"}
    with gpumem_magic.stand_in(9.0, line="program.py:2"):
        exec(compile(code, "/some/where/program.py", "exec"), names)
        assert (names["first"], names["second"]) == (0.0, 9.0)
    exec(compile(code, "/some/where/program.py", "exec"), names)
    assert names["second"] == 0.0


def test_a_function_is_called_for_every_read() -> None:
    losses = iter([3.0, 2.0, 1.0])
    gpumem_magic.stand_in(lambda: next(losses), line="loss.item() > 1.5")
    loss, steps = unknown(), 0
    while loss.item() > 1.5:
        steps += 1
    assert steps == 2


def test_a_list_for_what_a_line_reads_and_its_shape() -> None:
    gpumem_magic.stand_in([1, 2, 3], line="tolist()")
    assert unknown(3, dtype=torch.int32).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"the stand-in has the shape \(3,\), and what is read has \(4,\)"):
        unknown(4).tolist()


def test_for_a_tensor_and_what_is_made_of_it(machine: gpu.VirtualMachine) -> None:
    loss = unknown()
    one = gpumem_magic.stand_in(2.5, tensor=loss)
    assert loss.item() == 2.5
    assert loss > 2
    assert (loss * 2).item() == 5.0
    assert sum(machine.reads.supplied.values()) == sum(machine.reads.counts.values()) == 3
    loss.normal_()
    assert loss.item() == 0.0
    gpumem_magic.stand_in(1.5, tensor=loss)
    one.remove()
    assert loss.item() == 0.0
    large = unknown(2000, dtype=torch.bool)
    gpumem_magic.stand_in(torch.arange(2000) < 30, tensor=large)
    assert large.nonzero().shape == (30, 1)
    assert unknown(2000)[large].shape == (30,)
    assert unknown(2000).masked_select(large).shape == (30,)


def test_no_tensor_is_kept() -> None:
    loss = unknown()
    handle = gpumem_magic.stand_in(2.5, tensor=loss)
    gone = weakref.ref(loss)
    del loss
    gc.collect()
    assert gone() is None
    handle.remove()


@given(share=st.floats(0, 1), number=st.integers(0, 400), size=st.integers(1, 300))
def test_counts_are_never_more_than_there_can_be(share: float, number: int, size: int) -> None:
    mask = unknown(size, dtype=torch.bool)
    values = unknown(size)
    with gpumem_magic.stand_in(count=number):
        assert len(mask.nonzero()) == len(values[mask]) == len(values.masked_select(mask)) == min(number, size)
        assert len(values.unique()) == len(values.unique_consecutive()) == min(number, size)
    with gpumem_magic.stand_in(count=share):
        assert len(mask.nonzero()) == math.ceil(share * size)
    assert len(mask.nonzero()) == size


def marked(size: int, number: int) -> torch.Tensor:
    """A mask in which so many places were marked; nobody knows which, nor whether some are the same."""
    mask = torch.zeros(size, device="cuda", dtype=torch.uint8)
    mask[unknown(number, dtype=torch.int64)] = 1
    return mask


def test_a_mask_has_no_more_than_a_program_marked_in_it() -> None:
    values, first, second = unknown(2000), marked(2000, 128), marked(2000, 384)
    for mask, most in (
        (first, 128),
        (first | second, 512),
        (torch.cat([first, second]), 512),
        (torch.stack([first, second])[0], 512),
        (first & second, 128),
        (first.bool() & (values > 0), 128),
        (first.clone().view(20, 100), 128),
        (first[:100], 100),
        (first > 0, 128),
        (first == 1, 128),
        (first == 0, 2000),
        (first != 0, 128),
        (first < 1, 2000),
        (~first.bool(), 2000),
        (first + (values > 0), 2000),
    ):
        assert len(mask.nonzero()) == most
    assert values[first.bool()].shape == values.masked_select(first > 0).shape == (128,)
    # A token's two experts of eight, and the tokens of one of them.
    experts = torch.zeros(500, 8, device="cuda").scatter_(1, unknown(500, 2, dtype=torch.int64), 1)
    assert len(experts.nonzero()) == 1000
    assert len(experts[:, 3].nonzero()) == 500


def test_large_masks_of_a_diagonal_have_as_many_as_they_have() -> None:
    """Contrastive losses leave each row's own element out; a mask of 700 x 700 flags is too large to be followed."""
    size = 700
    count, values = size * size, unknown(size, size)
    for mask, there in (
        (torch.eye(size, dtype=torch.bool, device="cuda"), size),
        (~torch.eye(size, dtype=torch.bool, device="cuda"), count - size),
        (torch.eye(size, device="cuda").bool(), size),
        (torch.eye(size, device="cuda") != 0, size),
        (torch.eye(size, device="cuda") == 0, count - size),
        (torch.ones(size, size, dtype=torch.bool, device="cuda").fill_diagonal_(False), count - size),
        (torch.zeros(size, size, dtype=torch.bool, device="cuda").fill_diagonal_(True), size),
        (~torch.zeros(size, size, dtype=torch.bool, device="cuda").fill_diagonal_(True), count - size),
    ):
        assert values[mask].shape == (there,)
    both = torch.cat([torch.eye(size, dtype=torch.bool, device="cuda")] * 2)
    assert len((~both).nonzero()) == 2 * (count - size)
    assert len(torch.eye(size, 3000, device="cuda").nonzero()) == size
    # What is written otherwise is not known to be as many.
    written = torch.eye(size, dtype=torch.bool, device="cuda")
    written[3:5] = True
    assert len(written.nonzero()) == 3 * size
    assert len((~written).nonzero()) == count
    assert len((torch.eye(size, device="cuda") != 1).nonzero()) == count
    torch.diagonal(written).copy_(values[0] > 0)
    assert len((~written).nonzero()) == count


def test_what_a_large_mask_of_a_diagonal_selects_is_no_guess() -> None:
    for mask, guessed in ((lambda eye: ~eye, False), (lambda eye: ~eye | (unknown(700, 700) > 0), True)):
        gpu.turn_off()
        with gpumem_magic.measure(device="T4") as measured:
            unknown(700, 700)[mask(torch.eye(700, dtype=torch.bool, device="cuda"))].sum()
        assert ("a selection may have another size" in measured.report.answer) is guessed


def test_what_a_product_puts_in_order_before_it_multiplies_is_no_selection_of_the_programs() -> None:
    for shown, said in (("", False), ("a.coalesce().values()", True)):
        gpu.turn_off()
        with gpumem_magic.measure(device="T4") as measured:
            places = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]])
            a = torch.sparse_coo_tensor(places, torch.ones(4), (3, 3)).to("cuda")
            w = torch.ones(3, 5, device="cuda", requires_grad=True)
            torch.spmm(a, w).sum().backward()
            eval(shown or "None")
        assert ("a selection may have another size" in measured.report.answer) is said, measured.report.answer


def test_what_a_program_marks_is_forgotten_when_it_writes_something_else() -> None:
    for write in (
        lambda mask: mask.copy_(unknown(2000)),
        lambda mask: mask[5:].copy_(unknown(1995)),
        lambda mask: mask.logical_not_(),
        lambda mask: mask.add_(1),
        lambda mask: mask.random_(),
    ):
        mask = marked(2000, 10)
        assert len(mask.nonzero()) == 10
        write(mask)
        assert len(mask.nonzero()) == 2000
    mask = marked(2000, 10)
    mask[unknown(30, dtype=torch.int64)] = 1
    assert len(mask.nonzero()) == 40
    assert len(torch.ones(2000, device="cuda").index_put((unknown(3, dtype=torch.int64),), unknown()).nonzero()) == 2000
    rows = torch.zeros(20, 100, device="cuda").index_fill_(0, unknown(3, dtype=torch.int64), 1)
    assert len(rows.nonzero()) == 300
    assert len(rows.zero_().nonzero()) == 0


def test_what_a_program_marks_and_shuffles_has_no_more() -> None:
    """As masked autoencoders do."""
    kept = torch.zeros(3, 2000, device="cuda")
    kept[:, :500] = 1
    order = torch.argsort(torch.rand(3, 2000, device="cuda"), dim=1)
    mask = kept.gather(1, order.argsort(1)).bool()
    tokens = torch.zeros(3, 8000, 2, device="cuda")
    assert tokens[mask[..., None].tile(1, 4, 2)].shape == (3 * 500 * 4 * 2,)
    assert (
        tokens[:, ::4][mask].shape == tokens[:, ::4][mask[..., None].expand(-1, -1, 2)].view(-1, 2).shape == (1500, 2)
    )
    one = torch.zeros(2000, device="cuda")
    one[300:800] = 1
    for shuffled in (
        one[torch.randperm(2000, device="cuda")],
        one.index_select(0, order[1]),
        one.gather(0, order[1, 100:]),
        one[torch.rand(2000, device="cuda").topk(1000).indices],
    ):
        assert len(shuffled.nonzero()) == 500
    # How many are left out is known where it is known how many there are, and not only how many at most.
    few = torch.zeros(30, device="cuda")
    few[:10] = 1
    shuffled = few[torch.randperm(30, device="cuda")].bool()
    assert len((~shuffled).nonzero()) == len(shuffled.logical_not().nonzero()) == 20
    assert len((~(shuffled & unknown(30, dtype=torch.bool))).nonzero()) == 30
    assert len((~few[torch.randperm(30, device="cuda")[:20]].bool()).nonzero()) == 20
    # An index may be there twice.
    for anywhere in (order.flatten(), order[0] // 2, order[:, 0].repeat(700), torch.stack([order[0]] * 2).flatten()):
        assert len(one[anywhere].nonzero()) == len(anywhere)
    order.fill_(0)
    assert len(kept.gather(1, order).nonzero()) == 6000


def test_each_part_of_a_mask_has_as_many_as_were_written_by_it() -> None:
    words = torch.zeros(2, 20, 4, device="cuda")
    mask = unknown(2, 20, dtype=torch.bool)
    pictures = [torch.ones(count, 4, device="cuda", requires_grad=True) for count in (3, 7)]
    for part, picture in enumerate(pictures):
        words[part][mask[part]] = picture
    words.sum().backward()
    assert [picture.grad.shape[0] for picture in pictures if picture.grad is not None] == [3, 7]
    assert len(mask.nonzero()) == len(mask[0, :10].nonzero()) + 30 == 40
    mask.logical_not_()
    assert len(mask[0].nonzero()) == 20


def test_a_count_for_one_line_leaves_the_others_and_the_note(machine: gpu.VirtualMachine) -> None:
    gpumem_magic.stand_in(count=3, line="few = mask.nonzero()")
    mask = unknown(50, dtype=torch.bool)
    few = mask.nonzero()
    assert few.shape == (3, 1)
    assert not machine.notes()
    assert mask.nonzero().shape == (50, 1)
    assert "nonzero (1)" in machine.notes()[0]


def test_the_report_says_what_was_supplied() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        loss = torch.empty((), device="cuda")
        loss.item()
        with gpumem_magic.stand_in(2.5):
            loss.item()
            for _ in range(2):
                loss.item()
    report = measured.report
    assert [(one.count, one.supplied) for one in report.stand_ins] == [(1, 0), (1, 1), (2, 2)]
    assert "(2 times, supplied)" in str(report)
    again = schema.report_from_dict(schema.report_to_dict(report))
    assert again.stand_ins == report.stand_ins
    assert "supplied" not in schema.report_to_dict(report)["stand_ins"][0]
    assert StandIn("3", 2).supplied == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, TypeError, "needs a value or a count"),
        ({"value": "high"}, TypeError, "a number, a list, a host tensor or a function, not str"),
        ({"value": 1.0, "line": 12}, TypeError, "part of a line's source"),
        ({"value": 1.0, "line": " "}, TypeError, "part of a line's source"),
        ({"count": -1}, ValueError, "a share from 0.0 to 1.0"),
        ({"count": 1.5}, ValueError, "a share from 0.0 to 1.0"),
        ({"count": float("nan")}, ValueError, "a share from 0.0 to 1.0"),
        ({"count": True}, TypeError, "a share from 0.0 to 1.0"),
        ({"value": 1.0, "tensor": torch.zeros(3)}, TypeError, "must be on a virtual GPU, not a Tensor"),
        ({"count": 3, "tensor": torch.zeros(3)}, TypeError, "a tensor's stand-in is a value"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        gpumem_magic.stand_in(**arguments)
    assert "\n" not in str(caught.value)
    assert supplied._supplied == []


def test_a_virtual_tensor_is_no_value_and_shapes_must_fit() -> None:
    with pytest.raises(TypeError, match="must be on the host"):
        gpumem_magic.stand_in(unknown(2))
    with pytest.raises(ValueError, match="has the shape"):
        gpumem_magic.stand_in([1.0, 2.0], tensor=unknown(3))


@pytest.mark.parametrize("values", ["stand-in", "auto"])
def test_no_number_that_nobody_knows_is_equal_to_a_given_one(values: str) -> None:
    """`if loss == 0: continue` skips no step (a detector's training loop)."""
    gpu.turn_on(f"T4,values={values}")
    loss = torch.rand(300, 300, device="cuda").sum() / torch.tensor(2.0, device="cuda").clamp(min=1)
    several = loss * torch.ones(3, device="cuda")
    # (What an `assert` reads is as it asserts.)
    answers = [bool(one) for one in (loss == 0, loss != 0, (several == 0).any(), (several != 0).all())]
    assert answers == [False, True, False, True]
    # What is not a number is not equal to itself.
    answers = [bool(one) for one in (loss == loss, loss != loss, (torch.zeros(3, device="cuda") == 0).all())]
    assert answers == [True, False, True]
