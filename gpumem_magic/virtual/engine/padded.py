"""How much of a batch is padding: read off its mask, or its ids, when they are copied from the host.

Rows that end (or begin) with one and the same number, as `pad_sequence` and tokenizers make them. Whether that number is padding
is for others to say: it is where all else in a mask is the other one, or where the program names it (``padding_idx``).
"""

from __future__ import annotations

import torch

from gpumem_magic.devices.base import Padded
from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.births import Call
from gpumem_magic.virtual.engine.host_calls import host_keys

_MOVING = frozenset(map(id, overloads("_to_copy")))
_KINDS = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})
# Batches of more positions are read by nobody, and of less than one part in so many that is padding nobody asks.
_MOST = 1 << 18
_LEAST = 8


def may_be_padded(call: Call) -> bool:
    return id(call[0]) in _MOVING


def padded(call: Call) -> Padded | None:
    """What is known of the padding in a tensor of the host that is being copied to the device (`may_be_padded`); None where there
    is none, and where a mask can be read in two ways."""
    source = call[1][0]
    # (A class of the program's own may have words of its own for all that is asked here.)
    if type(source) is not torch.Tensor or source.layout is not torch.strided or source.is_meta:
        return None
    if source.dim() != 2 or source.dtype not in _KINDS or min(source.shape) < 2 or source.numel() > _MOST:
        return None
    with no_functions(), host_keys():
        behind, before = _of_side(source, True), _of_side(source.flip(1), False)
        return behind if before is None else before if behind is None else None


def _of_side(rows: torch.Tensor, at_end: bool) -> Padded | None:
    """The same of padding behind the rows' ends. at_end: whether these are theirs in the program."""
    count, positions = rows.shape
    number = rows[:, -1].mode().values
    # Most have none: a look at the last column is enough.
    if _LEAST * int((rows[:, -1] == number).sum()) < count:
        return None
    is_it = rows == number
    lengths = ((~is_it) * torch.arange(1, positions + 1, dtype=torch.int32)).amax(1)
    shortest, longest = int(lengths.min()), int(lengths.max())
    total = count * positions - int(lengths.sum())
    # (A row without anything is of no batch: all zeros, or all ones, of a mask from its other side.)
    if shortest == 0 or _LEAST * total < count * positions or _is_of_order(lengths, count == positions):
        return None
    is_mask = False
    if bool(((rows == 0) | (rows == 1)).all()):
        # Of what else there is of two numbers (segments of a text), nothing is padding for certain. Integers say 0 for it, and
        # with 0 in front they may as well be segments.
        is_mask = int(is_it.sum()) == total and (rows.dtype is torch.bool or (at_end and int(number) == 0))
        if not is_mask:
            return None
    return Padded((count, positions), total, int(number), shortest, longest, is_mask, at_end)


def _is_of_order(lengths: torch.Tensor, is_square: bool) -> bool:
    """Whether each row has more, or less, than the one above it, as in a mask of what comes later."""
    steps = lengths.diff()
    is_sorted = bool((steps >= 0).all()) or bool((steps <= 0).all())
    return is_sorted and bool((steps != 0).any()) and (is_square or int(steps.abs().max()) == 1)
