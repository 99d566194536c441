"""What normalisations take while they run: batch norms that cuDNN runs, group norms, and the gradients of layer norms."""

from __future__ import annotations

from contextlib import ExitStack
from math import ceil, prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import accumulator
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices, scalar_name
from gpumem_magic.virtual.engine.modes import ThreadFlag, pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.engine.strides import like_channels_last
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.copies import GROUPS_AS_THEY_LIE_FROM
from gpumem_magic.virtual.operators.cudnn import is_as_recorded as cudnn_as_recorded
from gpumem_magic.virtual.operators.reductions import shared_by_statistics

# Of group norms in half precision: since when the statistics are in float32 first.
_WIDE_FROM = (2, 13)
# Of layer norms: since when their rows are added up in parts, and since when the sums of each row are no tensors.
_FROM, _ROWS_IN_ONE_KERNEL_FROM = (2, 8), (1, 11)
_FEW_ROWS = 64 * 1024
_COLUMNS_OF_A_BLOCK, _ROWS_OF_A_BLOCK, _MOST_BLOCKS = 32, 32, 32 * 1024


# The largest batches that go to cuDNN, in training and in evaluation.
_MOST_SAMPLES = {True: 880801, False: 65535}


# Whether a batch norm is under way that may go to cuDNN; the kernel that a program calls itself is PyTorch's own.
whole_batch_norm = ThreadFlag()
# The name under which the mean that a batch norm keeps for its gradient says that it was not cuDNN's.
_NOT_CUDNNS = "_gpumem_not_cudnns"


def by_cudnn(input: Any, weight: Any, bias: Any, mean: Any, training: bool) -> bool:
    """Whether a batch norm with these goes to cuDNN (`_select_batch_norm_backend` in ATen/native/Normalization.cpp)."""
    if weight is None or bias is None or input.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    if mean is None and not training:
        return False
    if input.shape[0] > _MOST_SAMPLES[bool(training)]:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    return bool(input.dtype != torch.float16 or weight.dtype == torch.float32)


def _gradient_by_cudnn(args: Any) -> bool:
    """Whether the forward went to cuDNN. The gradient isn't given a bias, only asked for its gradient."""
    input, weight, mean, kept, training = args[1], args[2], args[3], args[5], args[7]
    return not hasattr(kept, _NOT_CUDNNS) and by_cudnn(input, weight, weight, mean, training)


def _makes_statistics(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether a whole batch norm trains, with weights of a type that no way refuses, and with both or none."""
    weight, bias = args[1:3]
    return (
        whole_batch_norm.is_up
        and bool(args[5])
        and (weight is None or (bias is not None and weight.dtype == args[0].dtype))
    )


@special(_aten.native_batch_norm.default, plain=_makes_statistics)
def _batch_forward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In evaluation cuDNN returns a mean and a deviation of no elements (``cudnn/BatchNorm.cpp``). Recorded with 2.5."""
    input, weight, bias, mean, _, training = args[:6]
    cudnn = whole_batch_norm.is_up and by_cudnn(input, weight, bias, mean, training)
    expected = torch.float32 if input.dtype == torch.float16 else input.dtype
    if cudnn and weight.device == input.device and weight.dtype != expected:
        names = scalar_name(input.dtype), scalar_name(weight.dtype)
        raise RuntimeError(
            f"Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'; but type "
            f"torch.cuda.{names[0]}Tensor does not equal torch.cuda.{names[1]}Tensor (while checking arguments for "
            "cudnn_batch_norm)"
        )
    if training or not cudnn:
        out, kept, deviation = engine.run(func, args, kwargs, device)
        if not cudnn:
            setattr(kept, _NOT_CUDNNS, True)
        return out, kept, deviation
    refuse_mixed_devices(func, args, kwargs)
    out = torch.empty_like(input)
    return out, *(torch.empty(0, dtype=weight.dtype, device=out.device) for _ in range(2))


@special(_aten.native_group_norm.default, table=BESIDE)
def _group_forward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """With a weight or a bias: what each sample's channels are multiplied by and moved by. One value for each needs less.

    ``group_norm_kernel.cu`` in ATen/native/cuda. All are float32 for half precision, and are held until the kernels are on their
    way.
    """
    input, weight, bias, samples, channels, inner, groups = args[:7]
    if not samples:
        return []
    item, version = accumulator(input.dtype).itemsize, engine.memory.torch_version(device)
    wide = copies_of(input) if version >= GROUPS_AS_THEY_LIE_FROM else []
    if item > input.element_size() and version >= _WIDE_FROM:
        # Mean and deviation of each group, before they are rounded.
        wide += [samples * groups * item] * 2
    if inner == 1 or (weight is None and bias is None):
        return wide
    return [*wide, *[samples * channels * item] * 2]


# Since when channels of one number are not added up first (the builds of 2.12 and 2.14).
_NO_SUMS_OF_ONE_FROM = (2, 14)


@special(_aten.native_group_norm_backward.default, table=BESIDE)
def _group_backward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """Adds up the gradient, and its product with the input, over each channel and each group."""
    input, (weight, samples, channels, inner, groups, wanted) = args[1], args[4:10]
    item = accumulator(input.dtype).itemsize
    by_channel, by_group = samples * channels * item, samples * groups * item
    one_each = inner == 1 and engine.memory.torch_version(device) >= _NO_SUMS_OF_ONE_FROM
    with engine.scratch(device, *([] if one_each else [by_channel, by_channel])):
        if wanted[0]:
            with ExitStack() as factors, engine.scratch(device, by_group, by_group):
                factors.enter_context(engine.scratch(device, 0 if inner == 1 or weight is None else by_channel))
    return ()


# Rows and columns of a batch norm whose channels lie last (`flexible_launch_configs` in Normalization.cuh).
_TILE, _MOST_THREADS, _ROWS_OF_A_THREAD, _MOST_DOWN, _FEWEST_DOWN = 32, 512, 16, 128, 8


def _channels_lie_last(tensor: Any) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last):
        return True
    return bool(tensor.is_contiguous() and tensor.stride(1) == 1)


def _shared_by_blocks(input: Any, sums: int) -> list[int]:
    """What blocks of rows share, with so many sums for each channel, and a semaphore for each block of columns."""
    channels = input.shape[1]
    rows = input.numel() // max(1, channels)
    if not rows:
        return []
    across = min(_power_of_two(channels), _TILE)
    down = min(_power_of_two(-(-rows // _ROWS_OF_A_THREAD)), _MOST_THREADS // across)
    if across * down != _MOST_THREADS:
        across = min(_power_of_two(channels), _MOST_THREADS // down)
    blocks = min(-(-rows // (down * _ROWS_OF_A_THREAD)), _MOST_DOWN)
    if blocks < _FEWEST_DOWN:
        return []
    return [sums * channels * blocks * accumulator(input.dtype).itemsize, -(-channels // across) * 4]


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


@special(_aten.native_batch_norm.default, table=BESIDE)
def _batch_own_forward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """PyTorch's own kernel for channels that lie last, or samples of one value for each channel: ``Normalization.cuh``. What lies
    in neither way has none: numbers stand in the place of a weight and a bias (`Impl::General` in ``Normalization.cu``)."""
    input, weight, bias, mean, _, training = args[:6]
    if training and whole_batch_norm.is_up and by_cudnn(input, weight, bias, mean, training):
        return _room_of_cudnn(engine, input, device, is_gradient=False)
    if _channels_lie_last(input) and not (input.dim() == 5 and _is_last_alone(input)):
        return _shared_by_blocks(input, 4) if training else []
    if input.is_contiguous() or not input.numel():
        return []
    with engine.scratch(device, *(_statistics_of_a_tensor(engine, input, device) if training else [])):
        pass
    return [accumulator(input.dtype).itemsize for one in (weight, bias) if one is None]


@special(_aten.batch_norm_backward.default)
def _batch_backward_of_an_update(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """That of `_batch_norm_with_update`, which chooses again who does it (`_new_batch_norm_backward_cuda` in
    ``Normalization.cu``, since 2.4). What cuDNN kept comes last."""
    native = _aten.native_batch_norm_backward.default
    return _batch_own_backward(engine, native, args[: len(native._schema.arguments)], kwargs, device)


def _statistics_of_a_tensor(engine: Engine, input: Any, device: int) -> list[int]:
    """By one operator for means and variances of any tensor, which reads float16 as it is and bfloat16 as float32."""
    wide = accumulator(input.dtype).itemsize
    others = (0, *range(2, input.dim()))
    shared = shared_by_statistics(engine, input.shape, input.stride(), others, wide, device)
    return [input.numel() * wide if input.dtype == torch.bfloat16 else 0, *shared]


@special(_aten.native_batch_norm_backward.default)
def _batch_own_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The same kernel's gradient: the sums that the input's gradient needs, those of weight and bias, and then the first."""
    gradient, input, training, wanted = args[0], args[1], args[7], args[-1]
    if not input.numel():
        # (PyTorch's shape rule, and the host's function, divide by the number of rows.)
        return _nothing_to_add_up(engine, args, device)
    needs_sums = training or any(wanted[1:])
    its_forward_by_cudnn = _gradient_by_cudnn(args)
    if training and its_forward_by_cudnn:
        return _batch_backward_by_cudnn(engine, func, args, kwargs, device)
    last = _channels_lie_last(input)
    if wanted[0] and needs_sums and not last:
        return engine.run(func, args, kwargs, device)
    each = input.shape[1] * accumulator(input.dtype).itemsize
    sums = [each, each] if needs_sums and wanted[0] else []
    # In evaluation cuDNN's forward keeps no deviation, so it is worked out again.
    with engine.scratch(device, each if its_forward_by_cudnn else 0, *sums):
        of_input, *others = engine.fake_call(func, args, kwargs)
        engine.settle(tuple(one for one in others if one is not None))
        in_blocks = needs_sums and last and _channels_lie_last(gradient)
        with engine.scratch(device, *(_shared_by_blocks(input, 2) if in_blocks else [])):
            pass
        if not wanted[0]:
            # (The shape rule makes one all the same.)
            return None, *others
        # Where the two do not lie alike a number stands in the place of a weight (`Impl::General`).
        is_general = training and args[2] is None and not _channels_lie_last(gradient)
        with engine.scratch(device, accumulator(input.dtype).itemsize if is_general else 0):
            engine.settle(of_input)
    return of_input, *others


def _batch_backward_by_cudnn(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """All three gradients, also those that nobody wants: a frozen layer makes its own and drops them (``cudnn/BatchNorm.cpp``;
    recorded on a GPU). One that does not lie as the input does is laid out first: that of a sum, for one.
    """
    gradient, input, wanted = args[0], args[1], args[-1]
    last = _LAST.get(input.dim()) if _is_taken_as_last(input) else None
    lies = gradient.is_contiguous() if last is None else gradient.is_contiguous(memory_format=last)
    with engine.scratch(device, 0 if lies else bytes_of(gradient)):
        out = engine.run(func, (*args[:-1], [True] * len(wanted)), kwargs, device)
        with engine.scratch(device, *_room_of_cudnn(engine, input, device, is_gradient=True)):
            return tuple(one if is_wanted else None for one, is_wanted in zip(out, wanted, strict=True))


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_last_alone(input: Any) -> bool:
    last = _LAST.get(input.dim())
    return last is not None and not input.is_contiguous() and bool(input.is_contiguous(memory_format=last))


def _is_taken_as_last(input: Any) -> bool:
    """Whether cuDNN is given it so (`suggest_memory_format`): images of one point lie either way, and by their strides."""
    return input.dim() in _LAST and like_channels_last(input.shape, input.stride())


# What cuDNN works in where the channels lie last: a head, and for so many channels at once a number, and for blocks of rows a sum
# and a square (forward a number more). Rows of four channels; there are fewer where there are more channels.
_HEADS, _BYTES_OF_A_CHANNEL, _BYTES_OF_A_NUMBER = (1072, 1056), 8, 4
_CHANNELS_AT_ONCE = ((4, 64), (1, 16))
_FEWEST_CHANNELS = 4
_ROWS = {torch.float32: 64, torch.float16: 160}
_ROWS_OF_A_GRADIENT = 96


def _room_of_cudnn(engine: Engine, input: Any, device: int, is_gradient: bool) -> list[int]:
    """In bytes, as an H100's cuDNN 9.19 answered for 2,600 shapes in both types, every time. On other cards, and before, nothing
    is counted."""
    known = cudnn_as_recorded(engine.memory.capability(device), engine.memory.torch_version(device))
    if not known or input.dtype not in _ROWS or not _is_taken_as_last(input):
        return []
    channels = input.shape[1]
    rows = _ROWS_OF_A_GRADIENT if is_gradient else _ROWS[input.dtype]
    if channels < _FEWEST_CHANNELS:
        together, rows = _FEWEST_CHANNELS, rows * _FEWEST_CHANNELS
    else:
        together = next(together for multiple, together in _CHANNELS_AT_ONCE if channels % multiple == 0)
    blocks = ceil(input.numel() / channels / rows)
    of_a_block = _BYTES_OF_A_CHANNEL * together + (0 if is_gradient else _BYTES_OF_A_NUMBER)
    return [_HEADS[is_gradient] + ceil(channels / together) * (_BYTES_OF_A_NUMBER + of_a_block * blocks)]


def _nothing_to_add_up(engine: Engine, args: Any, device: int) -> tuple[Any, ...]:
    """Gradients for no samples: of the weight and the bias zeros."""
    input, wanted = args[1], args[-1]
    width, dtype = input.shape[1], accumulator(input.dtype)
    with pushed(engine.mode):
        of_input = torch.empty_like(input) if wanted[0] else None
        return of_input, *(input.new_zeros(width, dtype=dtype) if one else None for one in wanted[1:])


_RMS_BACKWARD = tuple(overloads("_fused_rms_norm_backward") if hasattr(_aten, "_fused_rms_norm_backward") else ())


def _makes_gradients_alone(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether all lies plainly, and there are too few rows for sums in parts."""
    gradient, input = args[:2]
    if not (gradient.is_contiguous() and input.is_contiguous()):
        return False
    if not isinstance(input, VirtualTensor) or input.numel() > _FEW_ROWS * prod(args[2]):
        return False
    return engine.memory.torch_version(input.fake_device.index) >= _ROWS_IN_ONE_KERNEL_FROM


@special(_aten.native_layer_norm_backward.default, *_RMS_BACKWARD, plain=_makes_gradients_alone)
def _layer_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The gradients of weight and bias, where there are many more rows than columns, are added up in parts, then the parts.

    ``layer_norm_kernel.cu`` in ATen/native/cuda, `LaunchGammaBetaBackwardCUDAKernel`: above 65,536 rows, and with few enough
    columns for the card, there is a row of each gradient for up to 32 rows of the input, and a second tensor for each gradient in
    place of the first. The first stages of Swin and ConvNeXt are such, most language models are not. In 2.13 and 2.8, and not in
    2.6. The gradient that comes is laid out once the results are there.

    Up to 1.10 the input's gradient takes four numbers for each row: two sums, a factor and what is added (`ds`, `db`, `scale` and
    `bias` there).
    """
    gradient, input, columns = args[0], args[1], prod(args[2])
    rows = input.numel() // max(1, columns)
    by_row = 0
    if args[-1][0] and engine.memory.torch_version(device) < _ROWS_IN_ONE_KERNEL_FROM:
        by_row = rows * accumulator(input.dtype).itemsize
    with engine.scratch(device, *copies_of(input)), ExitStack() as later:
        out = engine.run(func, args, kwargs, device)
        later.enter_context(engine.scratch(device, *copies_of(gradient), *[by_row] * 4))
        processors = engine.memory.processors(device)[0]
        few_columns = columns // _COLUMNS_OF_A_BLOCK < processors // 2
        if rows <= _FEW_ROWS or not few_columns or engine.memory.torch_version(device) < _FROM:
            return out
        across = -(-columns // _COLUMNS_OF_A_BLOCK)
        down = min(_MOST_BLOCKS // across, -(-rows // _ROWS_OF_A_BLOCK))
        gradients = list(out)
        del out
        with pushed(engine.mode):
            parts = [None if one is None else one.new_empty(down, columns) for one in gradients[1:]]
            for place, part in enumerate(parts, 1):
                if part is not None:
                    gradients[place] = part.sum(0).view(gradients[place].shape)
        return tuple(gradients)
