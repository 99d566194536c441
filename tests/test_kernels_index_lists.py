"""What looking up and writing by lists of indices takes beside its result, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made, steps

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import index_lists


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    # (The figures are those of this version, whichever is installed.)
    gpu.turn_on("A100-80GB,torch=2.13")
    yield
    gpu.turn_off()


def test_integers_of_32_bits_are_made_64_wide() -> None:
    rows = torch.zeros(100, 16, device="cuda")
    indices = torch.zeros(50, dtype=torch.int32, device="cuda")
    # The wide list, the rows, and the list goes.
    assert steps(lambda: rows[indices]) == [("alloc", 50 * 8), ("alloc", 50 * 16 * 4), ("free_requested", 50 * 8)]
    assert made(lambda: rows[indices.long()[:0]]) == [50 * 8]
    assert made(lambda: rows[indices, indices]) == [50 * 8, 50 * 8, 50 * 4]


@pytest.mark.parametrize("values", ["stand-in", "auto"])
def test_a_list_of_numbers_comes_to_the_device_once_and_a_gradient_keeps_it(values: str) -> None:
    """As an H100 was asked for it (2.11): the gradient sorts the list, which it need not fetch again."""
    gpu.turn_off()
    gpu.turn_on(f"H100,torch=2.11,values={values}")
    table = torch.zeros(5, 100, device="cuda", requires_grad=True)
    assert made(lambda: table[:, [3, 97]]) == [2 * 8, 5 * 2 * 4]
    out = table[:, [3, 97]]
    assert torch.cuda.memory_allocated() == 2048 + 512 + 512, "the table, the result and the list"
    one = torch.ones_like(out)
    # The gradient; the list wrapped around, and multiplied; sorted, with places, and places for that, and what the sort takes.
    assert made(lambda: torch.autograd.grad(out, table, one))[:6] == [2000, 16, 16, 16, 16, 16]
    flags = table[:, [True] * 40 + [False] * 60]
    assert flags.shape == (5, 40)


def test_such_integers_on_the_host_come_to_the_device_as_they_are() -> None:
    rows = torch.zeros(100, 16, device="cuda")
    assert made(lambda: rows[torch.zeros(50, dtype=torch.int32)]) == [50 * 4, 50 * 8, 50 * 16 * 4]
    assert made(lambda: rows[torch.zeros(50, dtype=torch.int64)]) == [50 * 8, 50 * 16 * 4]


def test_lists_that_lie_across_each_other_are_laid_out() -> None:
    table = torch.zeros(8, 400, dtype=torch.bool, device="cuda")
    down = torch.zeros(8, 1, dtype=torch.int64, device="cuda")
    along = torch.zeros(400, dtype=torch.int64, device="cuda")
    # Both get 8 x 400 places, one with steps of 1 and 0, the other with 0 and 1.
    assert made(lambda: table[down, along]) == [8 * 400 * 8, 8 * 400 * 8, 8 * 400]
    # Alike they stay as they are.
    assert made(lambda: table[down.expand(8, 400), down.expand(8, 400)]) == [8 * 400]


def test_only_what_is_not_contiguous_is_laid_out() -> None:
    table = torch.zeros(8, 400, device="cuda")
    plain = torch.zeros(5, 6, dtype=torch.int64, device="cuda")
    turned = torch.zeros(6, 5, dtype=torch.int64, device="cuda").t()
    assert made(lambda: table[plain, turned]) == [5 * 6 * 8, 5 * 6 * 4]


def test_writing_takes_the_same() -> None:
    rows = torch.zeros(100, 16, device="cuda")
    indices = torch.zeros(50, dtype=torch.int32, device="cuda")
    values = torch.zeros(50, 16, device="cuda")

    def write() -> None:
        rows[indices] = values

    assert steps(write) == [("alloc", 50 * 8), ("free_requested", 50 * 8)]
    accumulated = made(lambda: rows.index_put_((indices,), values, accumulate=True))
    wide = made(lambda: rows.index_put_((indices.long(),), values, accumulate=True))
    # `indices.long()` is the program's, and lasts; the operator's own copy comes at the same place.
    assert accumulated == wide


def test_positions_of_a_mask_are_plain_lists() -> None:
    # 32 flags known on the host, of two dimensions: eight places, one list for each dimension, with one of the program's beside.
    table = torch.zeros(4, 8, 40, device="cuda")
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[0] = True
    indices = torch.zeros(8, dtype=torch.int64, device="cuda")
    values = torch.zeros(8, device="cuda")
    assert made(lambda: table.index_put_((mask.cuda(), indices), values))[-1] == 255 + 3 * 256
    assert made(lambda: table.index_put_((mask, indices), values)) == [2 * 8 * 8]
    assert index_lists.bytes_laid_out(index_lists.lies_of_positions(30, 2)) == []


def test_a_mask_on_the_host_is_added_up_there() -> None:
    table = torch.zeros(4, 8, 40, device="cuda")
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[0] = True
    values = torch.zeros(8, 40, device="cuda")
    # Two lists come, the first holds their sum; then the places in order, where each stood, and their numbers.
    wanted = [64, 64, 64, 64, 64, 1]
    assert made(lambda: table.index_put_((mask,), values, accumulate=True)) == wanted


def test_a_list_of_numbers_is_made_on_the_device() -> None:
    rows = torch.zeros(100, 16, device="cuda", requires_grad=True)
    # The list, the rows; the graph keeps the list.
    assert steps(lambda: rows[[3, 4, 5]]) == [("alloc", 3 * 8), ("alloc", 3 * 16 * 4)]
    with torch.no_grad():
        assert steps(lambda: rows[:, [3, 4, 5]])[-1] == ("free_requested", 3 * 8)
    out = rows[[3, 4, 5]]
    gradient = torch.zeros_like(out)
    # The list is wrapped around, multiplied and copied for the sort, with the places and a plain gradient's number beside it.
    asked = steps(lambda: torch.autograd.grad(out, rows, gradient))
    assert asked[:4] == [("alloc", 100 * 16 * 4), ("alloc", 3 * 8), ("alloc", 3 * 8), ("free_requested", 3 * 8)]


def test_a_list_comes_before_the_number_that_is_written() -> None:
    rows = torch.zeros(100, 16, device="cuda")

    def write() -> None:
        rows[[1, 2, 3]] = 1.0

    assert steps(write) == [("alloc", 3 * 8), ("alloc", 4), ("free_requested", 4), ("free_requested", 3 * 8)]


@pytest.mark.parametrize(
    ("version", "positions"), [("2.13", [128]), ("2.9", [128]), ("2.8", [64, 64]), ("2.6", [64, 64])]
)
def test_each_list_of_the_host_comes_by_itself(version: str, positions: list[int]) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-80GB,torch={version}")
    table = torch.zeros(4, 8, 40, device="cuda")
    indices = torch.zeros(5, dtype=torch.int64)
    assert made(lambda: table[indices, indices]) == [5 * 8, 5 * 8, 5 * 40 * 4]
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[0] = True
    assert made(lambda: table[mask]) == [*positions, 8 * 40 * 4]


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_mask_of_other_sizes_is_refused(host: bool, dtype: torch.dtype) -> None:
    table = torch.zeros(6, 1, device="cuda")
    mask = torch.zeros(2, 3, dtype=dtype, device="cpu" if host else "cuda")
    words = r"mask \[2, 3\] at index 0 does not match the shape of the indexed tensor \[6, 1\] at index 0$"
    with pytest.raises(IndexError, match=words):
        table[mask]
    with pytest.raises(IndexError, match=words):
        table[mask] = 0
    with pytest.raises(IndexError, match=words):
        table.index_put_((mask,), torch.ones(1, device="cuda"), accumulate=True)
    with pytest.raises(IndexError, match=r"mask \[2, 3\] at index 1 .* tensor \[5, 2, 4\] at index 2$"):
        torch.zeros(5, 2, 4, device="cuda")[:, mask]
    assert table[torch.zeros(6, 1, dtype=dtype, device=mask.device)].shape[1:] == ()


def test_a_size_that_was_assumed_refuses_no_mask() -> None:
    """On a card the first mask may select four elements as well."""
    table = torch.zeros(8, 3, device="cuda")
    chosen = table[torch.randn(8, device="cuda") > 2]
    assert chosen.shape == (8, 3)
    assert chosen[torch.ones(4, dtype=torch.bool, device="cuda")].shape == (4, 3)
    with pytest.raises(IndexError, match="shape of the mask"):
        chosen[torch.ones(4, 2, dtype=torch.bool, device="cuda")]


@pytest.mark.parametrize("lead", [(), (slice(None),)])
def test_what_is_written_by_a_mask_says_how_many_it_chooses(lead: tuple[slice, ...]) -> None:
    """So the gradient of what was written has its shape: pictures in the places of their tokens."""
    before = (3,) * len(lead)
    words = torch.zeros(*before, 2, 20, 16, device="cuda")
    pictures = torch.ones(*before, 8, 16, device="cuda", requires_grad=True)
    mask = torch.randint(50, (2, 20), device="cuda") == 7
    words[(*lead, mask)] = pictures
    words.sum().backward()
    assert pictures.grad is not None
    assert words[(*lead, mask)].shape == pictures.grad.shape == pictures.shape
    mask[0] = True
    assert words[(*lead, mask)].shape[-2] == 40
