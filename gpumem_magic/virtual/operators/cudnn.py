"""cuDNN's scratch memory for convolutions: what cuDNN itself answers where it is installed (`cudnn_library`), else an estimate.

The rules are a fit: what cuDNN 9.20 answers for the layers of eight networks on an A100, an RTX 3090, an H100 and a T4, in short,
judged by those of six others and by 9.10 (`benchmarks/convolution_plans.py` asks again and says how they do); on Hopper, what
9.19 took on a real H100 for 58,000 calls, with every other network left to judge them. Tensor cores work with the channels last
and, in TF32, with rounded values: hence the copies. What single kernels take for themselves is left out, and so are partial sums
of a weight's gradient, but on an A100.

On a card, kernels of one point without stride are plain products in the plain layout (`_product`). A library that is asked for a
card that is not there knows no such way, so it is not asked for them. Nor is it for gradients that go by transforms on an H100
(`_transformed`).

Before PyTorch 2.8 the library is cuDNN 9.7 or older, which cannot be asked. What differs there:

* In half precision on tensor cores, and the plain layout, input, weight and result are copied as they are. The published peak of
  a 3-D layer on an A100 (pytorch issue 95024) is met to the byte, those of a 2-D layer (123533) to the printed 0.01 GiB.

* On a V100 forwards in float32 are as a recording with 2.0 shows (`_forward_on_volta`).

* A large kernel that slides over images takes its weight twice, as 8.9 does on an A100 for many and 9.1 on an A10G for one. For
  one image 8.9 copies input, weight and result (ResNet-50 with 2.2).

All else is as since: recordings of ResNet-50's training (one sample; an A100 with 2.2, an A10G with 2.5) show the same copies in
TF32, and the one with 2.2 the same sums of few tiles (`_gathered`); and nvidia-smi's figures for VGG-16 and ResNet-50
(`benchmarks/accuracy`) agree with them.

As PyTorch does in ``Conv_v8.cpp``: what has no room is no error, since cuDNN then takes a way that needs less; and with
``torch.backends.cudnn.benchmark`` the first call of each kind empties the cache after its trials. How much the trials themselves
take is known where cuDNN answers; there it can be all that is free. Elsewhere it is what trials on an H100 took
(`largest_tried`). With ``deterministic`` the H100 took the same in half precision, and in TF32 in more than 90 % of 2,400 calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import ceil, prod
from typing import Protocol

import torch

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.snapshot.rules import round_size, segment_size
from gpumem_magic.units import GIB, MIB, round_up
from gpumem_magic.virtual.card.catalog import DeviceState
from gpumem_magic.virtual.card.generations import Version, is_rocm, parse_version, wheels
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.engine.modes import origin
from gpumem_magic.virtual.operators import cudnn_library
from gpumem_magic.virtual.operators.workspaces import version_text

# A tile of 2 x 2 results needs 4 x 4 values, where Winograd's transform is fused with what follows.
_FUSED_VALUES = 16
_FIRST_THAT_ANSWERS = (2, 8)
"""The first PyTorch whose cuDNN (9.10) can be asked, and so could be learnt from."""


def estimate(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool = True) -> int:
    """Bytes that cuDNN of a PyTorch version takes for the call on a GPU of that compute capability, as far as they can be
    estimated; else 0."""
    other = by_another_way(call, capability, version, tf32)
    if other is not None:
        return other
    if call.groups != 1:
        return _in_groups(call, tf32) if is_as_recorded(capability, version) else 0
    copies = _copied(call, capability, version, tf32)
    return copies + _beside_copies(call, copies, capability, version, tf32)


def _in_groups(call: Convolution, tf32: bool) -> int:
    """Copies of both sides, and of a weight of more than one point, where a group has enough channels for tensor cores.

    What an H100 took for most of 519 calls (cuDNN 9.19), from all of which it was read. Partial sums of a weight's gradient are
    left out, and so is what it takes for few channels.
    """
    if call.dtype == torch.float32 and not tf32:
        return 0
    half = call.dtype in (torch.float16, torch.bfloat16)
    if call.last and call.way != "forward":
        return _gradient_in_groups_that_lie_last(call, half)
    fewest = _CHANNELS_OF_A_GROUP[half].get(call.way)
    if call.last:
        fewest = _CHANNELS_OF_A_GROUP_THAT_LIES_LAST if half else None
    points, skips = prod(call.kernel), set(call.stride) != {1}
    if fewest is None or call.fine[1] // call.groups < fewest or (points == 1 and not half):
        return 0
    if call.way == "weight" and ((points == 1 and skips) or (not half and call.fine[0] == 1)):
        return 0
    weight = prod(call.weight) if points > 1 and not call.last else 0
    parts = call.groups if call.last else 1
    return (prod(call.fine) + prod(call.coarse) + weight) * call.dtype.itemsize + parts * _ALIGNMENT


def _gradient_in_groups_that_lie_last(call: Convolution, half: bool) -> int:
    """With the channels last a gradient's copies go by the kernel, too."""
    channels, points, skips = call.fine[1] // call.groups, prod(call.kernel), set(call.stride) != {1}
    fine, coarse, weight = (prod(shape) * call.dtype.itemsize for shape in (call.fine, call.coarse, call.weight))
    of_each = _ALIGNMENT * call.groups
    if call.way == "weight":
        if half:
            is_copied = not skips and channels >= _FEW if points == 1 else skips and channels >= _MANY
        else:
            is_copied = channels >= _FEW and not (skips and points > 1 and channels >= _SEVERAL)
        return fine + coarse + _ALIGNMENT if is_copied else 0
    if half:
        is_copied = (
            not skips and channels >= _FEW if points == 1 else skips and channels * points >= _NUMBERS_OF_A_RESULT
        )
        return fine + coarse + of_each if is_copied else 0
    if points == 1:
        if channels < 2 * _FEW:
            return 0
        return fine + coarse + of_each + (weight if channels >= _MANY else 0)
    if not skips or channels < _FEW:
        return 0
    return fine + coarse + weight + of_each if channels >= _SEVERAL else coarse + weight + _ALIGNMENT


def _sums_of_single_channels(call: Convolution, capability: tuple[int, int], version: Version) -> int | None:
    """A weight's gradient of one channel in each group, in half precision with the channels last: eight sums in float32 for each
    image, unless there is little to add up. None for other calls.

    What an H100 took (cuDNN 9.19) in 64 of 70 calls of 16 to 512 channels, 1 to 32 images of 14 to 112 points each way, and
    kernels of 3, 5 and 7. Five of the others took another size, which is not known.
    """
    half = call.dtype in (torch.float16, torch.bfloat16)
    alone = call.groups == call.fine[1] == call.coarse[1] > 1 and len(call.stride) == 2
    if not (alone and half and call.last and call.way == "weight" and is_as_recorded(capability, version)):
        return None
    results, points = (side[0] * prod(side[2:]) for side in (call.coarse, call.fine))
    if results < _RESULTS_OF_A_CHANNEL or (call.fine[0] == 1 and points < _POINTS_OF_ONE_IMAGE):
        return 0
    sums = _SUMS_OF_AN_IMAGE * call.fine[0] * prod(call.kernel) * round_up(call.fine[1], _CHANNELS_OF_SUMS)
    return sums * _BYTES_OF_A_SUM


def by_another_way(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool = True) -> int | None:
    """What it takes on a card by a way that a library does not name for one that is only described; None for other calls."""
    product = _product(call, capability, version, tf32)
    if product is not None:
        return product
    if call.groups != 1:
        return _sums_of_single_channels(call, capability, version)
    return _transformed(call, capability, version, tf32)


def largest_tried(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool = True) -> int:
    """What the largest plan takes of those that ``torch.backends.cudnn.benchmark`` tries, where that is known: on an H100.

    On tensor cores there is one that copies everything. In float32 there is one by Fourier transforms, of all weights at once.
    """
    if call.groups != 1 or not is_as_recorded(capability, version):
        return 0
    tensor_cores = tf32 if call.dtype == torch.float32 else _has_tensor_cores(call.dtype, capability)
    multiple = _CHANNELS_TOGETHER if call.dtype == torch.float32 else 2 * _CHANNELS_TOGETHER
    copied = sum(_copies(call, multiple)) + _ALIGNMENT if tensor_cores else 0
    if call.dtype != torch.float32 or call.last or len(call.stride) != 2 or set(call.dilation) != {1}:
        return copied
    if call.way == "input":
        return max(copied, _by_tiled_fourier_transforms(call))
    return max(copied, _by_fourier_transforms(call) if set(call.stride) == {1} else 0)


def _by_fourier_transforms(call: Convolution) -> int:
    """Of a forward or a weight's gradient: images, weights and results have transforms of one size, a power of two, and there are
    two buffers, each for both that are given or for what is made. The second of the given ones is copied."""
    edge = max(size + points - 1 for size, points in zip(call.fine[2:], call.kernel, strict=True))
    size = max(_SMALLEST_TRANSFORM, 1 << (edge - 1).bit_length())
    if size > _LARGEST_TRANSFORM:
        return 0
    fine, weight, coarse = (prod(shape[:2]) for shape in (call.fine, call.weight, call.coarse))
    given, made, copied = (
        (fine + weight, coarse, call.weight) if call.way == "forward" else (fine + coarse, weight, call.coarse)
    )
    return 2 * _bytes_of_a_transform(size) * max(given, made) + prod(copied) * call.dtype.itemsize


def _by_tiled_fourier_transforms(call: Convolution) -> int:
    """Of an input's gradient: transforms of 32 x 32, of one tile of each image, or of two at once where that is too small for it.

    With a stride each of its phases is a convolution of its own, of copies, which begin at multiples of 16 bytes.
    """
    if prod(call.kernel) == 1:
        return 0
    phases = prod(call.stride)
    given, fine, points, coarse = call.fine[1], list(call.fine[2:]), list(call.kernel), list(call.coarse[2:])
    copied = 0
    if phases > 1:
        given = max(given, _CHANNELS_TOGETHER)
        for place, (stride, padding) in enumerate(zip(call.stride, call.padding, strict=True)):
            fine[place] = ceil(fine[place] / stride)
            points[place] = ceil((points[place] + -padding % stride) / stride)
            coarse[place] = fine[place] + 2 * ceil(padding / stride) - points[place] + 1
        values = call.fine[0] * given * phases * prod(fine) + given * call.coarse[1] * phases * prod(points)
        copied = (values + prod(call.coarse[:2]) * prod(coarse)) * call.dtype.itemsize + _ALIGNMENT
    edge = max(size + point - 1 for size, point in zip(fine, points, strict=True))
    tiles = 1 if edge <= _TILE_OF_A_TRANSFORM else 2
    weights = phases * given * call.coarse[1]
    sides = call.fine[0] * (phases * given + call.coarse[1])
    return _bytes_of_a_transform(_TILE_OF_A_TRANSFORM) * (weights + tiles * sides) + copied


def _bytes_of_a_transform(size: int) -> int:
    return size * (size // 2 + 1) * _BYTES_OF_A_COMPLEX


def _transformed(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool) -> int | None:
    """What a gradient of a 3 x 3 kernel takes where cuDNN chooses one by transforms on Hopper; None for other calls.

    The sizes are an H100's (9.19), to the byte. Where it chooses which is a fit: many channels for few points, in TF32 not too
    many, since tensor cores are faster then; Fourier transforms for many small images, and without TF32 for an input's gradient
    with enough points for its weights.
    """
    recorded = call.groups == 1 and call.dtype == torch.float32 and is_as_recorded(capability, version)
    if not recorded or not _is_plain(call) or (call.last and tf32):
        return None
    given, made = call.fine[1], call.coarse[1]
    if call.way == "input":
        points = call.fine[0] * prod(call.fine[2:])
        enough = (
            points >= _POINTS_FOR_TILES * (1 if made <= given else 2) and given * made <= _WEIGHTS_OF_A_POINT * points
        )
        chosen = not call.last and not tf32 and call.fine[0] > 1 and given >= _FEW_CHANNELS and enough
        return _by_tiled_fourier_transforms(call) if chosen else None
    if call.way != "weight":
        return None
    results = call.coarse[0] * prod(call.coarse[2:])
    mean = given * made / (given + made)
    if tf32:
        small = max(call.fine[2:]) <= _POINTS_OF_A_SMALL_IMAGE
        if call.fine[0] >= _MANY_IMAGES and small and _FEW_CHANNELS <= made <= given and made < _BLOCK:
            return _by_fourier_transforms(call)
        chosen = min(given, made) >= _CHANNELS_TO_TRANSFORM and given * made < _MANY_WEIGHTS
        chosen &= _FEWEST_RESULTS <= results <= _RESULTS_TO_TRANSFORM * mean**0.75
        return _unfused_winograd(call) if chosen else None
    enough = mean >= _CHANNELS_OF_ALL or (mean >= _FEWEST_CHANNELS and results <= _RESULTS_OF_FEW_CHANNELS * mean**2)
    chosen = (given >= _BLOCK or (min(given, made) >= _FEW_CHANNELS and enough)) and results >= _FEWEST_RESULTS
    if call.last:
        chosen &= results * mean >= _WORTH_A_COPY
    size = _unfused_winograd(call)
    if not chosen or size > _LARGEST_WINOGRAD:
        return None
    return size + (sum(_copies(call, 1)) + _ALIGNMENT if call.last else 0)


def _unfused_winograd(call: Convolution, multiple: int = 1) -> int:
    """Tiles of 4 x 4 results need 6 x 6 values of both sides, and so many are kept of each weight.

    multiple: what the number of tiles is rounded up to.
    """
    tiles = call.coarse[0] * prod(ceil(size / _EDGE_OF_A_WINOGRAD_TILE) for size in call.coarse[2:])
    tiles = round_up(tiles, multiple)
    given, made = call.fine[1], call.coarse[1]
    return _UNFUSED_VALUES * (tiles * (given + made) + given * made) * call.dtype.itemsize


def is_as_recorded(capability: tuple[int, int], version: Version) -> bool:
    """Whether it is what was recorded on an H100."""
    return capability == (9, 0) and version >= _FIRST_THAT_ANSWERS


def _is_left_to_plain_cores(call: Convolution) -> bool:
    """Of an input's gradient, which is a transposed convolution's forward, too: along a line with few multiplications, or in a
    small volume with a small kernel. Read from what an H100 took in TF32 for 63 of the first (57 agree) and 24 of the second."""
    if call.way != "input" or call.dtype != torch.float32 or call.last:
        return False
    if len(call.kernel) > 2:
        return 1 < prod(call.kernel) <= _POINTS_IN_A_SMALL_KERNEL and prod(call.fine) < _NUMBERS_OF_A_VOLUME
    products = prod(call.coarse) * call.fine[1] * prod(call.kernel)
    return call.fine[2] == call.kernel[0] == 1 and products < _PRODUCTS_OF_A_LINE


def _copied(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool) -> int:
    recorded = is_as_recorded(capability, version)
    if recorded and (_reads_patches(call) or (tf32 and _is_left_to_plain_cores(call))):
        return 0
    if call.dtype == torch.float32:
        if not _runs_in_tf32(capability, tf32):
            if capability == (7, 0) and version < _FIRST_THAT_ANSWERS and call.way == "forward" and not call.last:
                return _forward_on_volta(call)
            return _in_float32(call, capability)
        if recorded and call.last:
            return _in_tf32_with_channels_last(call)
        if call.way == "forward" and _begins_with_images(call):
            if recorded:
                return sum(_copies(call, 1))
            if version < _FIRST_THAT_ANSWERS and call.coarse[1] >= _CHANNELS_TOGETHER:
                return sum(_copies(call, 1)) if _is_8_9(version) and call.fine[0] == 1 else 2 * _copies(call, 1)[1]
        return _in_tf32(call, capability)
    if not _has_tensor_cores(call.dtype, capability):
        return 0
    if call.last:
        return _in_half_with_channels_last(call) if recorded else 0
    if version < _FIRST_THAT_ANSWERS or capability == (7, 0):
        return _in_channels_last(call)
    return _in_half_precision(call)


def _beside_copies(call: Convolution, copies: int, capability: tuple[int, int], version: Version, tf32: bool) -> int:
    """Copies begin at multiples of 16 bytes, wherever PyTorch's allocator puts them; Winograd's weights are no copies. Where
    there are more tiles of results than multiprocessors, Hopper's go from one to the next by an order that takes 131 bytes more.

    On an H100 (cuDNN 9.19, 50,000 calls) the size in the allocator is the very one in 70 % with both, and in 49 % without.
    """
    aligned = _ALIGNMENT if copies and not _goes_by_winograd(call, capability, tf32) else 0
    on_tensor_cores = tf32 or _has_tensor_cores(call.dtype, (9, 0))
    if (
        not is_as_recorded(capability, version)
        or call.way == "weight"
        or not (copies or call.last)
        or not on_tensor_cores
    ):
        return aligned
    side = call.coarse if call.way == "forward" else call.fine
    tiles = ceil(side[0] * prod(side[2:]) / _TILE[0]) * ceil(side[1] / _TILE[1])
    return aligned + (_ORDER_OF_TILES if tiles > _MULTIPROCESSORS else 0)


def _goes_by_winograd(call: Convolution, capability: tuple[int, int], tf32: bool) -> bool:
    """Whether what it takes are transformed weights: in float32 without tensor cores, in the plain layout, before Hopper."""
    plain = call.dtype == torch.float32 and not call.last
    return plain and not _runs_in_tf32(capability, tf32) and capability < (9, 0)


def _runs_in_tf32(capability: tuple[int, int], tf32: bool) -> bool:
    return tf32 and capability >= (8, 0)


def _has_tensor_cores(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    first = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}.get(dtype)
    return first is not None and capability >= first


def _is_product(call: Convolution) -> bool:
    return set(call.kernel) == {1} and set(call.stride) == {1}


def _is_plain(call: Convolution) -> bool:
    return call.kernel == (3, 3) and set(call.stride) == {1} and set(call.dilation) == {1}


def _fused_winograd(call: Convolution) -> int:
    """The weights of a kernel of 3 x 3, laid out anew and transformed to 4 x 4, with one number for each result.

    What cuDNN 9.10 and 9.20 answer wherever they choose it (720 times in the layers of `benchmarks/convolution_plans.py`), and
    all six sizes of a recording on a Turing card with 8.9.
    """
    if not _is_plain(call) or call.way == "weight":
        return 0
    given, made = call.fine[1], call.coarse[1]
    if call.way == "input":
        given, made = made, given
    return 4 * (_FUSED_VALUES * round_up(given, 8) * round_up(made, 32) + given * made * prod(call.kernel) + made)


_FEW_CHANNELS = 16
_FEW_CHANNELS_IN_HALF = 32
_FEW_CHANNELS_OF_A_VOLUME = 32
_FEW_CHANNELS_OF_A_PRODUCT = 20
_FEW_POINTS = 4
_FEW_WEIGHTS = 512
_LARGE_KERNEL = 25
_FEW_SUMMANDS = 192
_MANY_SUMMANDS = 3200
_FEW_SUMMANDS_OF_A_WEIGHT = 64
_MANY_VALUES_OF_A_WEIGHT = 384
_MANY_RESULTS = 2**14
_EDGE_OF_A_TILE = 64
_SUMMANDS_OF_A_TILE, _FEW_TILES, _TILES_OF_MANY_SUMMANDS = 1536, 24, 512
_FEW_TILES_OF_A_GRADIENT, _CHANNELS_OF_A_GRADIENT = 32, 200
_FEW_VALUES, _VALUES_OF_A_COUNTER, _VALUES_OF_A_LARGE_COUNTER = 2**18, 1024, 8192
_BESIDE_TILES = 159
_WHOLE_SUMMANDS = 1152
_LARGE_SUMS = 3
_BYTES_OF_A_SUM = 4
_BYTES_OF_A_READ = 16
_BLOCK = 128
_BLOCKS_AT_ONCE = 80
_SUMMANDS_OF_A_BLOCK = 1024
_CHANNELS_TOGETHER = 4
_CHANNELS_OF_AN_IMAGE = 4
_SMALLEST_TRANSFORM, _LARGEST_TRANSFORM = 16, 256
_TILE_OF_A_TRANSFORM = 32
_UNFUSED_VALUES = 36
_EDGE_OF_A_WINOGRAD_TILE = 4
_LARGEST_WINOGRAD = 3 * GIB
_MANY_IMAGES = 64
_POINTS_OF_A_SMALL_IMAGE = 32
_CHANNELS_TO_TRANSFORM = 24
_MANY_WEIGHTS = 2**17
_FEWEST_RESULTS = 150
_POINTS_FOR_TILES = 6300
_WEIGHTS_OF_A_POINT = 32
_RESULTS_TO_TRANSFORM = 400
_FEWEST_CHANNELS, _CHANNELS_OF_ALL = 12, 32
_RESULTS_OF_FEW_CHANNELS = 95
_WORTH_A_COPY = 85_000
_BYTES_OF_A_COMPLEX = 8
_BYTES_OF_A_PLACE = 6
_POINTS_OF_A_FIRST_KERNEL = 49
_POINTS_OF_A_PATCH = 100
_WIDTH_OF_A_PATCH, _CHANNELS_OF_A_LARGE_PATCH = 14, 1024
_WIDTH_OF_A_SMALL_PATCH, _WIDTH_OF_A_PATCH_IN_HALF, _CHANNELS_OF_A_PATCH = 6, 16, 448
_WIDE = 8
_ALIGNMENT = 16
_CHANNELS_OF_A_GROUP = {
    True: {"forward": 4, "input": 4, "weight": 32},
    False: {"forward": 8, "input": 16, "weight": 8},
}
_CHANNELS_OF_A_GROUP_THAT_LIES_LAST = 16
# Of a group that lies last, for its gradients; and how many numbers one result is made of.
_FEW, _SEVERAL, _MANY = 8, 64, 128
_NUMBERS_OF_A_RESULT = 400
_POINTS_IN_A_SMALL_KERNEL, _NUMBERS_OF_A_VOLUME, _PRODUCTS_OF_A_LINE = 8, 1_500_000, 240_000_000
_SUMS_OF_AN_IMAGE, _CHANNELS_OF_SUMS = 8, 32
_RESULTS_OF_A_CHANNEL, _POINTS_OF_ONE_IMAGE = 784, 3136
_ORDER_OF_TILES = 131
_TILE = (256, 128)
_MULTIPROCESSORS = 132
_CUDNN_9 = 90000
_BLAS_WORKSPACE_OF_8_9 = 128 * MIB


def _copies(call: Convolution, multiple: int) -> tuple[int, int, int]:
    """Bytes of the two sides and the weight between them, with channels in such multiples."""

    size = call.dtype.itemsize
    given, made = round_up(call.fine[1], multiple), round_up(call.coarse[1], multiple)
    fine, coarse = (
        shape[0] * channels * prod(shape[2:]) * size for shape, channels in ((call.fine, given), (call.coarse, made))
    )
    return fine, given * made * prod(call.kernel) * size, coarse


def _in_tf32(call: Convolution, capability: tuple[int, int]) -> int:
    """Copies in TF32; few summands or channels aren't worth them. Hopper's kernels round what they read, and only want the
    channels last."""
    fine, weight, coarse = _copies(call, 4)
    given, made = call.fine[1], call.coarse[1]
    summands = given * prod(call.kernel)
    results = call.coarse[0] * prod(call.coarse[2:])
    if call.last and capability >= (9, 0):
        return 0
    if call.way == "forward":
        if summands < _FEW_SUMMANDS or max(given, made) < _CHANNELS_TOGETHER:
            return 0
        if call.last:
            return fine + weight
        if capability >= (9, 0):
            # Results are copied, too, unless they are more channels than were given, each of few summands.
            whole = summands >= _WHOLE_SUMMANDS or given >= made
        else:
            gathered = _gathered(call, capability)
            if gathered:
                return fine + weight + gathered
            whole = summands >= _MANY_SUMMANDS and results <= _MANY_RESULTS
        return fine + weight + (coarse if whole else 0)
    if call.way == "input":
        if call.last:
            return weight + coarse
        few = given < _FEW_CHANNELS or results < _FEW_SUMMANDS_OF_A_WEIGHT
        return 0 if few else fine + weight + coarse + _gathered(call, capability)
    few = min(given, made) < _FEW_CHANNELS // 2 and prod(call.kernel) < _LARGE_KERNEL
    if few or results < _FEW_SUMMANDS_OF_A_WEIGHT:
        return 0
    # A weight of one point has both layouts.
    copied = int(not call.last and prod(call.kernel) > 1)
    return fine + coarse + weight * (copied + (_partial_sums(call) if capability == (8, 0) else 0))


def _gathered(call: Convolution, capability: tuple[int, int]) -> int:
    """The result in float32, in whole tiles, where several blocks add up what makes one of them, and what they wait on; else 0.

    Its size is that of cuDNN 9.20's answers, and of a recording with 8.9. When it is so was fitted to the answers for an A100 and
    an RTX 3090: where many numbers are summed for few tiles, and on an A100 also for more of them.
    """
    if capability >= (9, 0):
        return 0
    forward = call.way == "forward"
    side, other = (call.coarse, call.fine) if forward else (call.fine, call.coarse)
    channels, summands = (
        round_up(side[1], _CHANNELS_TOGETHER),
        round_up(other[1], _CHANNELS_TOGETHER) * prod(call.kernel),
    )
    values = round_up(side[0] * prod(side[2:]), _EDGE_OF_A_TILE) * round_up(channels, _EDGE_OF_A_TILE)
    tiles = values // _EDGE_OF_A_TILE**2
    many = capability == (8, 0) and summands >= _MANY_SUMMANDS and tiles <= _TILES_OF_MANY_SUMMANDS
    few = summands >= _SUMMANDS_OF_A_TILE
    if forward:
        few &= tiles <= _FEW_TILES
    else:
        # A gradient with a stride goes by other kernels.
        many &= set(call.stride) == {1}
        few &= capability == (8, 0) and set(call.stride) == {1}
        few &= tiles <= _FEW_TILES_OF_A_GRADIENT and channels >= _CHANNELS_OF_A_GRADIENT
    if not (many or few):
        return 0
    counters = values // (_VALUES_OF_A_COUNTER if values <= _FEW_VALUES else _VALUES_OF_A_LARGE_COUNTER)
    return _BYTES_OF_A_SUM * (values + counters) + _BESIDE_TILES


def _partial_sums(call: Convolution) -> int:
    """How many weights, where the sum over all results is split between so many blocks that they keep an A100 busy."""
    blocks = ceil(call.coarse[1] / _BLOCK) * ceil(call.fine[1] * prod(call.kernel) / _BLOCK)
    results = call.coarse[0] * prod(call.coarse[2:])
    split = min(_BLOCKS_AT_ONCE // blocks, results // _SUMMANDS_OF_A_BLOCK)
    return split if split > 1 else 0


def is_plain_product(call: Convolution, capability: tuple[int, int], tf32: bool) -> bool:
    """Whether it is a kernel of one point on tensor cores, in the plain layout."""
    on_tensor_cores = call.dtype == torch.float32 and _runs_in_tf32(capability, tf32)
    on_tensor_cores |= _has_tensor_cores(call.dtype, capability)
    return on_tensor_cores and call.groups == 1 and not call.last and _is_product(call)


def _product(call: Convolution, capability: tuple[int, int], version: Version, tf32: bool) -> int | None:
    """What cuDNN takes for a plain product; None for other calls.

    As recordings show. For one image in TF32, 8.9 (2.1 to 2.3) holds 128 MiB on an A100 for 71 of 99 such calls of ResNet-50, and
    on an RTX 3090 for large images, unless channels don't come in fours. 9.1 on an A10G takes nothing for 40 % of those that are
    no weight's gradient, and at most 3.1 MiB for the others. A weight's gradient is made beside its place, or of copies where it
    sums few results. In half precision 9.1 takes nothing on an A100. With 9.19 on an H100 80 % take nothing, and a weight's
    gradient has one sum for each image, in float32, unless copies take much less or the weight is small: of up to 512 values none
    of 36 gradients of images took anything in three programs (those of volumes do).
    """
    if not is_plain_product(call, capability, tf32):
        return None
    half = _has_tensor_cores(call.dtype, capability)
    if version >= _FIRST_THAT_ANSWERS:
        fine, _, coarse = _copies(call, 8 if half else _CHANNELS_TOGETHER)
        is_small = not half and len(call.stride) == 2 and prod(call.weight) <= _FEW_WEIGHTS
        few = is_small or prod(call.coarse[2:]) < _FEW_POINTS
        if call.way != "weight" or few:
            return 0
        sums = call.coarse[0] * prod(call.weight) * _BYTES_OF_A_SUM
        return fine + coarse if sums > _LARGE_SUMS * (fine + coarse) else sums
    if half:
        return 0
    fine, weight, coarse = _copies(call, _CHANNELS_TOGETHER)
    if call.way == "weight" and call.coarse[0] * prod(call.coarse[2:]) < _FEW_SUMMANDS_OF_A_WEIGHT:
        return fine + coarse + _ALIGNMENT
    if any(channels % _CHANNELS_TOGETHER for channels in (call.fine[1], call.coarse[1])):
        return 0
    is_8_9 = _is_8_9(version)
    if is_8_9 and call.coarse[0] > 1:
        return _product_of_many(call, capability)
    return (_BLAS_WORKSPACE_OF_8_9 if is_8_9 else 0) + (weight if call.way == "weight" else 0)


def _is_8_9(version: Version) -> bool:
    its = wheels(version)
    return its is not None and its.cudnn < _CUDNN_9


def _product_of_many(call: Convolution, capability: tuple[int, int]) -> int:
    """Of several images in TF32, by 8.9: a product for each, which needs rows of whole 16 bytes, and for a weight's gradient one
    sum for each, unless copies take less.

    In a recording of ResNet-50 on an A100 with 2.3 (128 images) it is so but where images are of 14 x 14: there some are copied
    although their rows are whole. Whether 9.1 does so, too, is not known.
    """
    fine, weight, coarse = _copies(call, _CHANNELS_TOGETHER)
    if call.way == "weight":
        sums = call.coarse[0] * prod(call.weight) * _BYTES_OF_A_SUM
        partial = _partial_sums(call) if capability == (8, 0) else 0
        return sums if sums <= fine + coarse else fine + coarse + weight * partial + _ALIGNMENT
    if prod(call.coarse[2:]) * call.dtype.itemsize % _BYTES_OF_A_READ == 0:
        return 0
    return fine + weight + (coarse if call.way == "input" else 0) + _ALIGNMENT


def _in_float32(call: Convolution, capability: tuple[int, int]) -> int:
    """Winograd, fused. Its kernels and others want the plain layout. On Hopper it is never chosen."""
    if capability >= (9, 0):
        many = call.fine[1] * prod(call.kernel) >= _MANY_VALUES_OF_A_WEIGHT
        if (call.way == "weight" and (call.last or not many)) or (call.way != "weight" and not call.last):
            return 0
        fine, weight, coarse = _copies(call, 4)
        # A weight of one point has both layouts.
        return fine + coarse + weight * (prod(call.kernel) > 1)
    if call.last:
        copied = prod(call.kernel) > 1 and (call.way != "weight" or len(call.stride) > 2)
        return sum(_copies(call, 4)) if copied else 0
    return _fused_winograd(call)


def _forward_on_volta(call: Convolution) -> int:
    """By 8.x, in float32. With a stride, the weights laid out anew, and six bytes for each place of the result. Of a kernel of
    3 x 3 with many channels and images, transforms: those that need the fewest multiplications (a complex one takes three).

    All 40 sizes that a V100's recording of ResNet-18 shows (244 and 256 images), to the byte; where there are fewer channels or
    images, where an image needs several tiles, and what gradients take, it does not say.
    """
    if len(call.stride) != 2 or set(call.dilation) != {1}:
        return _in_float32(call, (7, 0))
    if set(call.stride) != {1}:
        return prod(call.weight) * call.dtype.itemsize + _BYTES_OF_A_PLACE * prod(call.coarse[2:])
    edge = max(call.fine[2:]) + max(call.kernel) - 1
    few = call.fine[0] < _MANY_IMAGES or min(call.fine[1], call.coarse[1]) < _BLOCK
    if not _is_plain(call) or few or edge > _TILE_OF_A_TRANSFORM:
        return _in_float32(call, (7, 0))
    size = _SMALLEST_TRANSFORM if edge <= _SMALLEST_TRANSFORM else _TILE_OF_A_TRANSFORM
    tiles = prod(ceil(length / _EDGE_OF_A_WINOGRAD_TILE) for length in call.coarse[2:])
    if _UNFUSED_VALUES * tiles <= 3 * size * (size // 2 + 1):
        return _unfused_winograd(call, _EDGE_OF_A_TILE)
    return _by_fourier_transforms(call) if size == _SMALLEST_TRANSFORM else _by_tiled_fourier_transforms(call)


def _in_half_precision(call: Convolution) -> int:
    """Copies with the channels last. A weight of one point needs none."""
    fine, weight, coarse = _copies(call, 8)
    given, made = call.fine[1], call.coarse[1]
    if prod(call.kernel) == 1:
        few = prod(call.coarse[2:]) < _FEW_POINTS
        few |= call.way == "forward" and min(given, made) < _FEW_CHANNELS_OF_A_PRODUCT
        return 0 if few else fine + coarse
    if call.way == "forward" and given < _FEW_CHANNELS_IN_HALF and prod(call.kernel) < _LARGE_KERNEL:
        return 0
    return fine + weight + coarse


def _begins_with_images(call: Convolution) -> bool:
    """Whether a large kernel slides over images, as a ResNet's first does."""
    return call.fine[1] < _CHANNELS_OF_AN_IMAGE and _slides(call) and prod(call.kernel) >= _POINTS_OF_A_FIRST_KERNEL


def _reads_patches(call: Convolution) -> bool:
    """Whether a forward cuts images into patches, as a vision transformer's first layer does, and Hopper's kernels read these as
    they lie: in half precision where they become few channels, in float32 where there are few images.

    Of 1,250 such calls in TF32 and bfloat16 (1 to 128 images, patches of 4 to 32 points each way, 64 to 1,024 channels) cuDNN
    9.19, asked for an H100, takes at most 4 KiB in 848; this says so of 465 of them, and of none of the others. With it 1,015
    estimates are within 2 % or 4 KiB, without it 550.
    """
    images, made, width = call.fine[0], call.coarse[1], min(call.kernel)
    cut = call.kernel == call.stride and not any(call.padding) and call.fine[1] < _CHANNELS_OF_AN_IMAGE
    if call.way != "forward" or call.last or not cut or len(call.stride) != 2:
        return False
    if call.dtype == torch.float32:
        return width >= _WIDTH_OF_A_PATCH and images < _MANY_IMAGES and made < _CHANNELS_OF_A_LARGE_PATCH
    narrow = width % 2 == 0 and _WIDTH_OF_A_SMALL_PATCH <= width <= _WIDTH_OF_A_PATCH_IN_HALF
    return narrow and made < _CHANNELS_OF_A_PATCH


def _slides(call: Convolution) -> bool:
    return min(call.stride) < min(call.kernel)


def _in_half_with_channels_last(call: Convolution) -> int:
    """On Hopper nothing needs a copy but what has odd channels. A forward reads images as they are, but for large kernels: four
    channels are enough for those that slide."""
    if call.way != "forward" or call.coarse[1] % 8 or call.fine[1] > _CHANNELS_OF_AN_IMAGE:
        return _of_odd_channels(call, 8)
    if _begins_with_images(call):
        return sum(_copies(call, _CHANNELS_TOGETHER)[:2]) if len(call.stride) == 2 else 0
    return _of_odd_channels(call, 8) if prod(call.kernel) >= _POINTS_OF_A_PATCH else 0


def _in_tf32_with_channels_last(call: Convolution) -> int:
    """On Hopper: odd channels; both sides of images, where a gradient needs them, but for a weight's of a small kernel, and of
    volumes with few channels for the weight's; and what is widely dilated."""
    fine, weight, coarse = _copies(call, 1)
    if prod(call.kernel) == 1:
        return 0
    if call.way == "weight" and len(call.stride) > 2 and call.fine[1] <= _FEW_CHANNELS_OF_A_VOLUME:
        return fine + coarse
    if call.fine[1] < _CHANNELS_OF_AN_IMAGE:
        if call.way == "forward":
            return fine + weight
        if call.way == "weight":
            fine, _, coarse = _copies(call, _CHANNELS_TOGETHER)
            return fine + coarse if prod(call.kernel) >= _POINTS_OF_A_FIRST_KERNEL else 0
        return _of_odd_channels(call, _CHANNELS_TOGETHER) if _is_plain(call) else fine + weight + coarse
    if min(call.dilation) > _WIDE:
        return weight + coarse + (fine if call.way != "input" else 0)
    return _of_odd_channels(call, _CHANNELS_TOGETHER)


def _of_odd_channels(call: Convolution, multiple: int) -> int:
    """A copy of each side whose channels are no multiple, and then of the weight, too."""
    if prod(call.kernel) == 1:
        return 0
    fine, weight, coarse = _copies(call, multiple)
    odd = bool(call.fine[1] % multiple), bool(call.coarse[1] % multiple)
    return weight * any(odd) + fine * odd[0] + coarse * odd[1]


def _in_channels_last(call: Convolution) -> int:
    """Copies as they are."""
    if _is_product(call):
        return 0
    return sum(prod(shape) for shape in (call.fine, call.weight, call.coarse)) * call.dtype.itemsize


class _DeviceWithAllocator(DeviceState, Protocol):
    @property
    def allocator(self) -> CachingAllocator: ...


class _PlanSizes:
    """What the plans for a call take, in the order in which they are tried: each is asked for when it is wanted first."""

    def __init__(self, plans: Iterator[int], kind: str) -> None:
        self.kind = kind
        self._known: list[int] = []
        self._plans = plans

    def __iter__(self) -> Iterator[int]:
        for number in count():
            if number == len(self._known):
                try:
                    self._known.append(next(self._plans))
                except StopIteration:
                    return
            yield self._known[number]


class Scratch:
    """Takes scratch memory for convolutions and gives it back.

    malloc(device, nbytes), stream_of(device) and free(device, address) are the machine's.
    """

    def __init__(
        self,
        devices: Sequence[_DeviceWithAllocator],
        malloc: Callable[[int, int], int],
        stream_of: Callable[[int], int],
        free: Callable[[int, int], None],
    ) -> None:
        self._devices = devices
        self._malloc = malloc
        self._free = free
        self._stream_of = stream_of
        self._tried: set[tuple[int, Convolution]] = set()
        self._asked: dict[tuple[int, Convolution, bool, bool], _PlanSizes | None] = {}

    def take(self, device: int, call: Convolution) -> None:
        """For the time of a call. Nothing where there is no room, since cuDNN has ways that need none."""
        sizes = self._sizes(device, call)
        if torch.backends.cudnn.benchmark and (device, call) not in self._tried:
            self._tried.add((device, call))
            self._search(device, call, sizes)
            self._devices[device].allocator.empty_cache()
        for size in sizes:
            if self._briefly(device, size, sizes.kind):
                return

    def _sizes(self, device: int, call: Convolution) -> _PlanSizes:
        """The user's figure for the device; or what the installed cuDNN answers; or the estimate."""
        model = self._devices[device].model
        if model.convolution_bytes is not None:
            return _PlanSizes(iter((model.convolution_bytes,)), "workspace")
        text = version_text(self._devices[device])
        if is_rocm(text):
            return _PlanSizes(iter(()), "workspace")
        version = parse_version(text)
        # What it answers for these is another way's.
        other_way = by_another_way(call, model.capability, version, _tf32()) is not None
        library = cudnn_library.installed() if model.asks_cudnn and not other_way else None
        if library is not None:
            key = (
                device,
                call,
                _tf32(),
                torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            )
            if key not in self._asked:
                its = wheels(version)
                same = its is not None and library.version // 100 == its.cudnn // 100
                kind = "convolution_scratch" if same else "estimate"
                sizes = _PlanSizes(library.workspaces(call, model, *key[2:]), kind)
                # Kept when the first is there: where somebody interrupts, it is asked again.
                self._asked[key] = sizes if any(True for _ in sizes) else None
            answered = self._asked[key]
            if answered is not None:
                return answered
        return _PlanSizes(iter((estimate(call, model.capability, version, _tf32()),)), "estimate")

    def _search(self, device: int, call: Convolution, sizes: _PlanSizes) -> None:
        """The trials share one block, as large as the largest plan that a free one has room for (`get_plans_from_find`). (A
        library that is asked for a card that is not there leaves some out.)"""
        gpu = self._devices[device]
        version = parse_version(version_text(gpu))
        others = (
            0
            if gpu.model.convolution_bytes is not None
            else largest_tried(call, gpu.model.capability, version, _tf32())
        )
        free, stream = gpu.allocator.memory.free, self._stream_of(device)
        fitting = [size for size in (*sizes, others) if size <= free or gpu.allocator.finds(size, stream) is not None]
        most = max(fitting, default=0)
        kind = "estimate" if most == others else sizes.kind
        while most and not self._briefly(device, most, kind):
            most //= 2

    def _briefly(self, device: int, size: int, kind: str) -> bool:
        """Whether there was room."""
        if not size:
            return True
        if kind == "estimate" and not self._fits(device, size):
            return False
        try:
            with origin(kind):
                address = self._malloc(device, size)
        except torch.OutOfMemoryError:
            # PyTorch catches it and tries the next.
            return False
        self._free(device, address)
        return True

    def _fits(self, device: int, size: int) -> bool:
        """Whether the memory is there without emptying the cache, which an estimate must not bring about."""
        allocator = self._devices[device].allocator
        if allocator.finds(size, self._stream_of(device)) is not None:
            return True
        settings = allocator.settings_in_force
        needed = segment_size(round_size(size, settings), settings)
        within_limit = allocator.limit is None or allocator.reserved + needed <= allocator.limit
        return within_limit and needed <= allocator.memory.free


def _tf32() -> bool:
    """Whether float32 convolutions may run in TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        # Since 2.9 it can't be read where the newer settings say different things of convolutions and recurrent nets.
        return bool(getattr(torch.backends.cudnn, "conv").fp32_precision == "tf32")  # noqa: B009
