"""Operators whose result on a virtual device is not just a shape: copies across, values, and sizes that depend on values."""

from __future__ import annotations

import cmath
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_magic.looks.tensors import SPARSE_PARTS
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import shares, supplied, tallies, values
from gpumem_magic.virtual.engine.arguments import refuse_lengths_of_ctc
from gpumem_magic.virtual.engine.asserts import asserted
from gpumem_magic.virtual.engine.calls import Counted, bytes_of, sparse_of, users_line, with_constants
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.few import Surely
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices, together
from gpumem_magic.virtual.engine.modes import STATE, made_plainly, origin, pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import index_lists
from gpumem_magic.virtual.operators.copies import staged_bytes
from gpumem_magic.virtual.operators.positions import hold_while_found

# ---- values


@special(_aten._local_scalar_dense.default, _aten.item.default)
def _read_scalar(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    found = values.known(args[0])
    if found is not None and found.exact:
        if found.supplied:
            engine.count_stand_in(by_user=True)
        if engine.reads.flags and args[0].dtype == torch.bool:
            engine.reads.flags.pop(users_line(), None)
        return found.host.item()
    given = supplied.value_for(args[0].dtype, users_line)
    if given is not None:
        engine.count_stand_in(by_user=True)
        return supplied.scalar(given, args[0].dtype)
    held = asserted(*users_line()) if args[0].dtype == torch.bool else None
    if held is not None:
        engine.count_stand_in(dtype=args[0].dtype)
        return held
    if (count := values.counted(args[0])) is not None:
        return _unknown_number(engine, args[0].dtype, count)
    if found is not None:
        value = found.host.item()
        if isinstance(value, int) or cmath.isfinite(value):
            return _unknown_number(engine, args[0].dtype, value)
    return _unknown_number(
        engine, args[0].dtype, engine.guessed(args[0], _aten.zeros.default((), dtype=args[0].dtype)).item()
    )


def _unknown_number(engine: Engine, dtype: torch.dtype, value: Any) -> Any:
    """What is given for a number that nobody knows, where this is what is guessed."""
    line = engine.count_stand_in(dtype=dtype)
    return engine.reads.flag(line, value) if dtype == torch.bool else value


@special(_aten.equal.default, _aten.allclose.default)
def _equal(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> bool:
    refuse_mixed_devices(func, args, kwargs)
    _compare(engine, func, args, kwargs)
    hosts = [values.exact(tensor) for tensor in args[:2]]
    if None not in hosts:
        _note_supplied(engine, *args[:2])
        return bool(func(*hosts, *args[2:], **kwargs))
    given = supplied.value_for(torch.bool, users_line)
    engine.count_stand_in(by_user=given is not None)
    if given is not None:
        return bool(supplied.scalar(given, torch.bool))
    known = [values.known(tensor) for tensor in args[:2] if isinstance(tensor, VirtualTensor)]
    if len(known) == 2 and None not in known:
        return bool(func(*[found.host for found in known if found is not None], *args[2:], **kwargs))
    # Unknown values count as zeros, which are the same.
    return func is _aten.allclose.default or args[0].shape == args[1].shape


def _compare(engine: Engine, func: Any, args: Any, kwargs: Any) -> None:
    """All elements compared, and whether all are true (``Equal.cpp``, `allclose` in ``TensorCompare.cpp``).

    Tensors on the same memory in the same layout are equal without a look at it.
    """
    first, second = args[:2]
    exactly = func is _aten.equal.default
    if exactly and (first.shape != second.shape or not first.numel() or _is_same(first, second)):
        return
    with pushed(engine.mode):
        alike = first == second if exactly else torch.isclose(first, second, *args[2:], **kwargs)
        alike.all()


def _is_same(first: Any, second: Any) -> bool:
    """Whether both show the same memory in the same way."""
    storages = [tensor.untyped_storage()._cdata for tensor in (first, second)]
    lies = [(tensor.storage_offset(), tensor.stride()) for tensor in (first, second)]
    return storages[0] == storages[1] and lies[0] == lies[1]


def _note_supplied(engine: Engine, *tensors: Any) -> None:
    """Notes the line where the user's values for one of the tensors decide."""
    known = [values.known(tensor) for tensor in tensors if isinstance(tensor, VirtualTensor)]
    if any(found is not None and found.supplied for found in known):
        engine.count_stand_in(by_user=True)


@special(_aten._assert_async.default, _aten._assert_async.msg)
def _assert_nothing(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """A check of values, of which there are none."""


# Since when the lowest and the highest element are looked for together, by `bincount` and by `histc` (``SummaryOps.cu``; the
# builds of 2.11, 2.12 and 2.13).
_COUNTED_AT_ONCE_FROM, _BINNED_AT_ONCE_FROM = (2, 13), (2, 12)

# ---- copies


def _stays(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether a copy goes from a device to one."""
    if not isinstance(args[0], VirtualTensor):
        return False
    target = kwargs.get("device")
    return target is None or target.type == "cuda"


def _is_asked_for_its_shape(target: Any) -> bool:
    """Whether C++ wants a tensor without memory, as for a product with known zeros (``BinaryOps.cpp``): virtual devices have a
    number there."""
    return target is not None and target.type == "meta" and target.index is None


@special(_aten._to_copy.default, plain=_stays, by_looks=True)
def _to_copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    # (A number that C++ multiplies known zeros with comes as one.)
    args = with_constants(func, args)
    source = args[0]
    target = kwargs.get("device")
    if _is_asked_for_its_shape(target):
        dtype = kwargs.get("dtype") or source.dtype
        # (One zero on the device stands for known zeros there.)
        known = source._is_zerotensor() and source.device.type != "cpu"
        with engine.scratch(device, source.element_size() if known else 0):
            return made_plainly(torch.empty_strided, source.size(), source.stride(), dtype=dtype, device=target)
    if not isinstance(source, VirtualTensor):
        if target is None or target.type == "cpu":
            return func(*args, **kwargs)
        if source.layout is not torch.strided:
            return _sparse_to_device(source, target)
        meta = _aten.empty_like.default(
            source, dtype=kwargs.get("dtype"), device=torch.device("meta"), memory_format=kwargs.get("memory_format")
        )
        if source.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        place = device if target.index is None else target.index
        with origin("host_copy"):
            made = engine.wrap(meta, place)
        with engine.scratch(place, staged_bytes(made, source, kwargs.get("non_blocking", False))):
            pass
        engine.note_back(source)
        return made
    if target is None or target.type in ("cuda", "meta"):
        return engine.run(func, args, kwargs, device)
    # (As a copy on the device lies, which is asked for once: PyTorch's rule has the host's lie no other way.)
    shape = engine.fake_call(func, args, {**kwargs, "device": source.fake_device, "pin_memory": None})
    with engine.scratch(device, staged_bytes(source, shape)):
        pass
    host = _host_like(shape)
    return _read_into(engine, source, host if engine.computes else host.zero_())


def _read_into(engine: Engine, source: Any, host: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    """Writes the values of a device tensor into a host tensor: known ones, supplied ones, or zeros. in_place: into one that the
    program had."""
    found = values.known(source)
    given = None if found is not None and found.exact else supplied.value_for(source.dtype, users_line)
    if found is None or not found.exact or found.supplied:
        by_user = given is not None or (found is not None and found.exact)
        line = engine.count_stand_in(by_user, source.dtype, several=source.numel() > 1)
        if not by_user:
            engine.away.note(host, line, in_place)
    if given is not None:
        return supplied.fill(given, host)
    if found is None:
        return engine.guessed(source, host)
    host.copy_(found.host)
    # What unknown values have made no number of is a stand-in, too.
    return host if found.exact or not host.is_floating_point() else host.nan_to_num_(0.0, 0.0, 0.0)


def _sparse_to_device(source: torch.Tensor, target: torch.device) -> Any:
    device = torch.device("cuda", STATE.last_device if target.index is None else target.index)
    *places, elements = SPARSE_PARTS[source.layout]
    if source.layout is torch.sparse_coo:
        moved = [part(source).to(device) for part in (*places, elements)]
    else:
        # (The elements come first, as an H100 was asked.)
        first = elements(source).to(device)
        moved = [*(part(source).to(device) for part in places), first]
    made = sparse_of(moved, source.shape, source.layout)
    return made._coalesced_(source.is_coalesced()) if source.layout is torch.sparse_coo else made


def _host_like(like: FakeTensor) -> torch.Tensor:
    """A real host tensor with the fake tensor's shape, strides and dtype."""
    blank: torch.Tensor = _aten.empty_strided.default(
        like.size(), like.stride(), dtype=like.dtype, device=torch.device("cpu")
    )
    return blank


@special(
    *overloads("set_.source_Storage set_.source_Storage_storage_offset"),
    *overloads("set_.source_Tensor set_.source_Tensor_storage_offset"),
)
def _set(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The fake mode remembers calls with their arguments, and would keep this storage alive."""
    remembers = engine.fake.cache_enabled
    engine.fake.cache_enabled = False
    try:
        out = engine.run(func, args, kwargs, device)
    finally:
        engine.fake.cache_enabled = remembers
    engine.mark(args[0])
    return out


def _is_within(engine: Engine, args: Any, kwargs: Any) -> bool:
    return isinstance(args[0], VirtualTensor) and isinstance(args[1], VirtualTensor)


@special(_aten.copy_.default, plain=_is_within, by_looks=True)
def _copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    target = args[0]
    if not isinstance(args[1], torch.Tensor):
        # (C++ has made a tensor of a number, and hands the number on.)
        args = target, torch.tensor(args[1], device="cpu"), *args[2:]
    if isinstance(target, VirtualTensor):
        staged = 0 if isinstance(args[1], VirtualTensor) else staged_bytes(target, *args[1:3])
        with engine.scratch(device, staged):
            engine.run(func, args, kwargs, device)
        engine.note_back(args[1])
        return target
    with engine.scratch(device, staged_bytes(args[1], target)):
        pass
    return _read_into(engine, args[1], target, in_place=True)


# ---- sizes that depend on values: the largest that there can be


def _blank(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> FakeTensor:
    """A fake tensor on the device, without memory yet."""
    meta = _aten.empty.memory_format(shape, dtype=dtype, device=torch.device("meta"))
    tensor: FakeTensor = FakeTensor.__new__(FakeTensor, engine.fake, meta, torch.device("cuda", device))
    return tensor


def _placed(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Any:
    tensor = _blank(engine, shape, dtype, device)
    engine.settle(tensor)
    return tensor


def found_among(engine: Engine, device: int, source: Any, count: int) -> Any:
    """The positions of so many elements, those of each dimension side by side."""

    def make() -> Any:
        tensor = _blank(engine, (source.dim(), count), torch.int64, device).t_()
        engine.settle(tensor)
        return tensor

    return hold_while_found(engine, device, source, make)


def _hold_positions(engine: Engine, device: int, mask: Any, count: int, held: ExitStack) -> None:
    """Holds the positions of a mask, after the search for them."""
    listed = count * mask.dim() * 8
    hold_while_found(engine, device, mask, lambda: held.enter_context(engine.scratch(device, listed)))


def _selected(engine: Engine, operator: str, mask: Any) -> int:
    """How many elements of a mask, whose values are not known, are taken to be true."""
    most, likely = tallies.taken(engine, mask)
    return most if isinstance(most, Surely) else engine.selected(operator, most, likely, shape=mask.shape)


@special(*overloads("nonzero nonzero.out"))
def _nonzero(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    host = values.exact(args[0])
    if host is not None:
        _note_supplied(engine, args[0])
        count = int(host.count_nonzero())
    else:
        count = _selected(engine, "nonzero", args[0])
        values.selects(args[0], count)
    out = kwargs.get("out")
    if out is None:
        return found_among(engine, device, args[0], count)
    return hold_while_found(engine, device, args[0], lambda: _positions_into(engine, device, out, args[0].dim(), count))


def _positions_into(engine: Engine, device: int, out: Any, dims: int, count: int) -> Any:
    """Where `out` has the right size, it is written as it lies; else it becomes what would be returned (``Nonzero.cu``)."""
    if out.shape == (count, dims):
        with engine.scratch(device, 0 if out.t().is_contiguous() else count * dims * 8):
            return out
    return out.resize_((dims, count)).t_()


@special(*overloads("masked_select masked_select.out"))
def _masked_select(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    shape = together(args[1].shape, args[0].shape)
    refuse_mixed_devices(func, args, kwargs)
    if args[1].dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    mask = values.exact(args[1])
    known = None if mask is None else int(mask.expand(shape).sum())
    count = _selected(engine, "masked_select", args[1].expand(shape)) if known is None else known
    _note_supplied(engine, args[1])
    # The places are found first, one number for each dimension.
    with ExitStack() as held:
        _hold_positions(engine, device, args[1].expand(shape or (1,)), count, held)
        out = kwargs.get("out")
        return _placed(engine, (count,), args[0].dtype, device) if out is None else out.resize_((count,))


@special(_aten.bincount.default)
def _bincount(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    if args[0].dim() != 1:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and args[0].numel() and weights.shape != args[0].shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    host = values.exact(args[0])
    if host is not None:
        size = max(least, int(host.max()) + 1 if host.numel() else 0)
    else:
        highest = shares.highest_of(engine, args[0])
        if highest is None:
            # There is no largest size here: classes are as many as the program says.
            engine.other_sizes["of `bincount` minlength, or 1"] += 1
        else:
            engine.largest_sizes["bincount"] += 1
        engine.count_stand_in(sized=True)
        size = max(least, 1 + int(highest or 0))
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    if not args[0].numel():
        return _placed(engine, (size,), dtype, device)
    # The lowest and the highest are looked for first: one after the other, since 2.13 at once, and then held to the end.
    with ExitStack() as held:
        if weights is not None and weights.dtype not in (torch.float32, torch.float64):
            # The weights are made float64 before (`_bincount_cuda` in ``SummaryOps.cu``).
            held.enter_context(engine.scratch(device, weights.numel() * torch.float64.itemsize))
        at_once = engine.memory.torch_version(device) >= _COUNTED_AT_ONCE_FROM
        ends = _ends(engine, args[0], at_once, lowest=args[0].dtype != torch.uint8)
        out = _placed(engine, (size,), dtype, device)
        del ends
    return out


def _ends(engine: Engine, source: Any, at_once: bool, lowest: bool = True) -> Any:
    """The lowest and the highest element, if both are there at the end. lowest: whether that is looked for, too, where one is
    looked for after the other."""
    with pushed(engine.mode):
        if at_once:
            return source.aminmax()
        if lowest:
            source.min()
        source.max()
    engine.table.drain()
    return None


@special(_aten.histc.default)
def _histogram(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Without a range of its own, from the lowest element to the highest."""
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)
    out = engine.run(func, args, kwargs, device)
    if low == high and args[0].numel():
        _ends(engine, args[0], engine.memory.torch_version(device) >= _BINNED_AT_ONCE_FROM)
    return out


@special(_aten._pack_padded_sequence.default)
def _pack_padded(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The lengths are on the host, so the size is exact. Rows of as many sequences are a piece (``PackedSequence.cpp``)."""
    padded, lengths, batch_first = args
    if isinstance(lengths, VirtualTensor):
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got 1D {lengths.device} Long tensor"
        )
    steps = padded.transpose(0, 1) if batch_first else padded
    of_each = lengths.tolist()
    if len(of_each) != steps.shape[1]:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(of_each)} (batch_size={steps.shape[1]})"
        )
    if min(of_each) <= 0:
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"
        )
    if any(shorter > longer for longer, shorter in pairwise(of_each)):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement if you do not "
            "need ONNX exportability."
        )
    pieces, sizes, begin = [], [], 0
    for so_many, end in zip(range(lengths.numel(), 0, -1), reversed(of_each), strict=True):
        if end > begin:
            pieces.append(steps[begin:end, :so_many].contiguous().flatten(0, 1))
            sizes += [so_many] * (end - begin)
            begin = end
    return torch.cat(pieces), torch.tensor(sizes, dtype=torch.int64)


@special(_aten._pad_packed_sequence.default)
def _pad_packed(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    data, sizes, batch_first, _, total = args
    steps = max(len(sizes), total)
    batch = int(sizes[0])
    lengths = torch.tensor([int((sizes > row).sum()) for row in range(batch)], dtype=torch.int64)
    padded = torch.zeros((steps, batch, *data.shape[1:]), dtype=data.dtype, device=torch.device("cuda", device))
    return (padded.transpose(0, 1) if batch_first else padded), lengths


@special(_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
def _ctc_loss(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """One loss for each sequence, and the table of the forward pass: a row for every time step and target position."""
    log_probs, targets, input_lengths, target_lengths = args[:4]
    host = values.exact(target_lengths) if isinstance(target_lengths, VirtualTensor) else target_lengths
    given = values.exact(input_lengths) if isinstance(input_lengths, VirtualTensor) else input_lengths
    refuse_lengths_of_ctc(log_probs, targets, given, host, args[4] if len(args) > 4 else kwargs.get("blank", 0))
    longest = targets.shape[-1] if host is None else max((int(length) for length in host), default=0)
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    with _lengths_on_the_device(engine, batch, device):
        table = _placed(engine, (batch, log_probs.shape[0], 2 * longest + 1), log_probs.dtype, device)
        return _placed(engine, (batch,), log_probs.dtype, device), table


@contextmanager
def _lengths_on_the_device(engine: Engine, batch: int, device: int) -> Iterator[None]:
    """The lengths of both, and where each target begins; they go in the order in which ``LossCTC.cu`` has declared them."""
    blocks = [_placed(engine, (batch,), torch.int64, device) for _ in range(3)]
    try:
        yield
    finally:
        for place in (1, 0, 0):
            del blocks[place]


@special(_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The gradient, and a second table like the forward pass's while it is worked out. Of long inputs the blanks' part is a sum
    of both tables (`is_large` in ``LossCTC.cu``)."""
    log_probs, losses, log_alpha = args[1], args[5], args[6]
    with _lengths_on_the_device(engine, log_alpha.shape[0], device), engine.scratch(device, bytes_of(log_alpha)):
        gradient = _placed(engine, tuple(log_probs.shape), log_probs.dtype, device)
        if log_probs.dim() < 3:
            return gradient
        steps, batch, symbols = log_probs.shape
        if 2 * steps + 24 * batch // 10 + 2 * symbols // 10 <= _LONG_INPUTS:
            return gradient
        with pushed(engine.mode):
            both = log_alpha[..., ::2] + log_alpha[..., ::2]
            blanks = torch.logsumexp(both, 2, True)
            del blanks, both
            engine.table.drain()
            if not (len(args) > 8 and args[8]):
                return gradient
            zero = gradient.new_zeros(())
            without = losses.view(1, batch, 1) == float("inf")
            gradient, before = torch.where(without, zero, gradient), gradient
            del without
            del zero
            del before
            engine.table.drain()
            return gradient


# Steps and symbols from which the gradient of CTC's loss goes the way for many.
_LONG_INPUTS = 450


@special(_aten._grouped_mm.default)
def _grouped_mm(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """One product for each group; the groups' ends are values, the shape is not. Rows of the result start at 16 bytes."""
    left, right, *rest = args
    refuse_mixed_devices(func, args, kwargs)
    ends = rest[0] if rest else kwargs.get("offs")
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, left.shape[0] if left.dim() == 3 else ends.shape[0])
    dtype = (rest[2] if len(rest) > 2 else kwargs.get("out_dtype")) or left.dtype
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    out = _placed(engine, (*shape[:-1], row), dtype, device).narrow(-1, 0, shape[-1])
    if {left.dtype, right.dtype, dtype} == {torch.bfloat16} and engine.memory.capability(device)[0] in (9, 10):
        groups = shape[0] if left.dim() == right.dim() else ends.shape[0]
        with engine.scratch(device, *_about_groups(groups, engine.memory.processors(device)[0])):
            return out
    return out


def _about_groups(groups: int, processors: int) -> tuple[int, int]:
    """What CUTLASS's product by groups works in (``GroupMM.cu``, since 2.8).

    Three addresses, three strides and three sizes of each group, the addresses at 16 bytes; and on each multiprocessor four
    descriptors of tensors: of the factors, the result, and what would be added to it."""
    return 24 * (groups + groups % 2) + (3 * 8 + 3 * 4) * groups, 4 * 128 * processors


@special(_aten.repeat_interleave.Tensor)
def _repeat_interleave(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    size = kwargs.get("output_size")
    is_counted = size is None or isinstance(size, Counted)
    if size is None:
        # There is no largest size here; every element once is what a program with stand-in counts can go on with.
        engine.other_sizes["of `repeat_interleave` each element once"] += 1
        engine.count_stand_in(sized=True)
        size = args[0].numel()
    # Where each one's repetitions end (``Repeat.h`` in ATen/native).
    with pushed(engine.mode):
        plain = args[0].contiguous()
        ends = args[0].cumsum(0) if args[0].numel() else None
        if is_counted and ends is not None:
            # Whether none is negative.
            places = args[0] >= 0
            places.all()
            del places
            engine.table.drain()
    out = _placed(engine, (size,), args[0].dtype, device)
    del ends, plain
    return out


def _takes_nothing(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether all indices are there as the kernel wants them."""
    lists = [index for index in args[1] if index is not None]
    if not lists or not all(isinstance(one, VirtualTensor) for one in (args[0], *lists)):
        return False
    shape, strides = lists[0].shape, lists[0].stride()
    return all(one.dtype is torch.int64 and one.shape == shape and one.stride() == strides for one in lists)


@special(_aten.index.Tensor, _aten._unsafe_index.Tensor, plain=_takes_nothing, by_looks=True)
def _index(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, indices = args[0], list(args[1])
    if not isinstance(source, VirtualTensor):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    index_lists.refuse_others(source, indices, engine.assumed)
    expanded: list[Any] = []
    with ExitStack() as held:
        on_host: list[int] = []
        widened: list[int] = []
        lies: list[index_lists.Lie] = []
        for index in indices:
            if index is None:
                expanded.append(index)
            elif not index_lists.is_mask(index):
                expanded.append(index)
                on_host += index_lists.bytes_to_device(index)
                widened.append(index_lists.bytes_widened(index))
                lies.append(index_lists.lie_of(index))
            elif isinstance(index, VirtualTensor):
                # CUDA finds the positions first, in memory that it gives back after.
                host = values.exact(index)
                if host is not None:
                    _note_supplied(engine, index)
                    count = int(host.count_nonzero())
                else:
                    count = _selected(engine, "boolean mask", index)
                    values.selects(index, count)
                _hold_positions(engine, device, index, count, held)
                expanded += [_blank(engine, (count,), torch.int64, device) for _ in range(index.dim())]
                lies += index_lists.lies_of_positions(count, index.dim())
            else:
                positions = index.nonzero(as_tuple=True)
                expanded += positions
                version = engine.memory.torch_version(device)
                on_host += index_lists.positions_to_device(positions[0].numel(), index.dim(), version)
                lies += map(index_lists.lie_of, positions)
        held.enter_context(engine.scratch(device, *on_host, *widened, *index_lists.bytes_laid_out(lies)))
        return engine.run(func, (source, expanded), kwargs, device)
