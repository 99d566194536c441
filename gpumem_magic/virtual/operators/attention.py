"""`scaled_dot_product_attention` on a virtual device: the kernel that CUDA would choose, and what that kernel allocates.

C++ sees meta tensors and would always take the math path, which writes the whole score matrix. The rules are those of PyTorch's
`sdp_utils`: by data type, head size, mask, and the device's generation, in the order flash, memory-efficient,
math, cuDNN, and on an H100 or B200 with newer versions cuDNN first (`Chooser.prefers_cudnn`); the user's switches and order
(`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`) count. What cuDNN's kernels take is in `cudnn_attention`.

Where the memory-efficient kernel's random numbers began stands on the host, unless a graph is captured (``attention.cu`` in
ATen/native/transformers/cuda; recordings with 2.1 and 2.9). From 2.14 on, without dropout, two numbers stand on the device that
nobody writes, before the results (the build of 2.14; eight published peaks are met to the byte with them, and five of these were
tried without and were not: `benchmarks/compiled_published.py`). Flash has it on the device, drawn or not, since 2.7 (pull request
146372). Before, it had it on the host unless a graph is captured (``flash_api.cpp``; a recording with 2.5); there it has today's
shape, which compiled code asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.units import listed
from gpumem_magic.virtual.card.generations import wheels
from gpumem_magic.virtual.engine import deterministic
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.mismatch import type_of_c
from gpumem_magic.virtual.engine.modes import ThreadFlag, because
from gpumem_magic.virtual.engine.rules import BESIDE, ON_HOST, special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.attention_gradients import copies_by_token, is_padded, rounded_head

_SEEDS_ON_DEVICE_FROM = (2, 14)
# Since when three dimensions are taken for those of one sample, keys and values of one head are shared by all queries' without
# being asked to, and the memory-efficient kernel takes heads that are shared (the build of 2.14; that of 2.12 does none of it).
_SHARED_FROM = (2, 14)
_FLASH_SEEDS_ON_DEVICE_FROM = (2, 7)
# Since when a mask chooses between two numbers. (The builds of 2.6, 2.11 and 2.13 do, a recording with 2.8, too; that of 2.5 by
# what may not be seen.)
_CHOSEN_FROM = (2, 6)
# Since when half precision is added up in float32 where no kernel is taken, and flash has parts for twice the multiprocessors.
# (The builds of 2.5 and 2.6 do so, that of 2.4 does not.)
_WIDE_FROM = _TWICE_FROM = (2, 5)
FLASH, EFFICIENT, MATH, CUDNN = "flash", "efficient", "math", "cudnn"
# The numbers of `torch.nn.attention.SDPBackend`.
_KERNELS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
_USUAL_ORDER = (1, 2, 0, 3)
# What kernels want, in words.
_SWITCHED_ON = "to be switched on"
_HEADS = "as many heads of keys and values as of queries"
_OF_ONE_KIND = "four dimensions (batch, heads, length, features) and one type"
# What sets a variable (`c10::utils::check_env`).
_SET = ("1", "ON", "YES", "TRUE", "true", "yes", "on")
# Where cuDNN may come first; since when it is not taken with dropout, nor for so many samples. (The wheel of 2.13 leaves these to
# flash, that of 2.11 does not; of 2.12 it is not known.)
_CUDNN_FIRST_FROM, _CUDNN_FIRST_ON = (2, 9), ((9, 0), (10, 0), (10, 3))
_NARROWER_FROM, _MOST_SAMPLES = (2, 13), 65535


class Chooser(NamedTuple):
    """What decides on a kernel: the card, and the version of PyTorch."""

    capability: tuple[int, int]
    version: tuple[int, int]

    @property
    def prefers_cudnn(self) -> bool:
        """Whether cuDNN is tried before flash (`check_prefer_cudnn_attention` in ``sdp_utils.cpp``): with 2.9 where it is 9.9 or
        newer, with later ones where it is newer than 9.15.0, which the wheels have since 2.11."""
        if self.capability not in _CUDNN_FIRST_ON or self.version < _CUDNN_FIRST_FROM:
            return False
        its = wheels(self.version)
        enough = its is None or its.cudnn > (90900 - 1 if self.version < (2, 10) else 91500)
        return enough and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "") not in _SET


def first_of(fits: set[str], gpu: Chooser) -> str:
    """Which of the kernels that are `fitting` CUDA takes. Raises CUDA's RuntimeError where none is allowed."""
    for kernel in order(gpu):
        if kernel in fits:
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def fitting(lacking: Mapping[str, Sequence[str]]) -> set[str]:
    """The kernels that CUDA could take, of those that the program allows: "flash", "efficient", "math" and "cudnn". lacking: what
    each wants and does not get (`unmet`)."""
    fits = {kernel for kernel, wants in lacking.items() if not wants}
    return fits | {MATH} if torch.backends.cuda.math_sdp_enabled() else fits


def unmet(
    gpu: Chooser,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    dropout: float = 0.0,
) -> dict[str, list[str]]:
    """What each fused kernel wants and does not get, in words."""
    same_kind = query.dtype == key.dtype == value.dtype and query.dim() == key.dim() == value.dim() == 4
    if not same_kind:
        return {kernel: [_OF_ONE_KIND] for kernel in (FLASH, EFFICIENT, CUDNN)}
    capability = gpu.capability
    lengths, other_lengths = query.shape[-2], key.shape[-2]
    batches = query.shape[0] == key.shape[0] == value.shape[0]
    heads = query.shape[1] == key.shape[1] == value.shape[1]
    newer, pairs = gpu.version >= _SHARED_FROM, key.shape[1] == value.shape[1]
    shared = enable_gqa or (newer and pairs and key.shape[1] == 1)
    divided = newer and pairs and shared and query.shape[1] % max(1, key.shape[1]) == 0
    size, size_of_values = query.shape[-1], value.shape[-1]
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    of_all = [
        # (`check_nonzero_sequence_lengths_dense` in ``sdp_utils_cpp.h``: without samples or heads the fused kernels run.)
        (bool(lengths and other_lengths), "sequences that are not empty"),
        # (`check_last_dim_stride_equals_1_dense` in ``sdp_utils_cpp.h``; a permuted bias of T5's is not so.)
        (dense and (mask is None or mask.stride(-1) == 1), "rows whose numbers lie next to each other"),
        (batches, "keys and values for each sample"),
    ]
    grouped = [*of_all, (heads or shared, _HEADS)]
    half, recent = query.dtype in HALF, capability >= (8, 0)
    wants = {
        FLASH: [
            (torch.backends.cuda.flash_sdp_enabled(), _SWITCHED_ON),
            *grouped,
            (recent, "a card of Ampere's generation or a newer one"),
            (half, "16-bit numbers"),
            (mask is None, "no mask but `is_causal`"),
            (size == key.shape[-1] == size_of_values <= 256, "heads of one size, at most 256"),
            (not is_causal or lengths == other_lengths, "as many keys as queries with `is_causal`"),
        ]
    }
    kinds = (*HALF, torch.float32) if recent else (torch.float16, torch.float32)
    step = _alignment(capability, query.dtype)
    wants[EFFICIENT] = [
        (torch.backends.cuda.mem_efficient_sdp_enabled(), _SWITCHED_ON),
        *of_all,
        (heads or divided, f"{_HEADS}, without `enable_gqa`" if enable_gqa and not newer else _HEADS),
        (query.dtype in kinds, "float16 or float32" if not recent else "16-bit numbers or float32"),
        # (`check_head_dim_size_mem_efficient` in ``sdp_utils.cpp``.)
        (size % step == 0 and size_of_values % step == 0, f"heads whose size is a multiple of {step}"),
        (size == key.shape[-1], "heads of one size"),
    ]
    # (The heads of DeepSeek's models are let pass on Blackwell.)
    sizes = size, size_of_values
    most = 192 if capability[0] == 10 and sizes == (192, 128) else 256 if capability == (9, 0) else 128
    several = key.shape[2] != 1 and (query.shape[2] != 1 or not dropout)
    if gpu.version >= _NARROWER_FROM:
        several = several and not dropout and query.shape[0] <= _MOST_SAMPLES
    wants[CUDNN] = [
        (torch.backends.cuda.cudnn_sdp_enabled(), _SWITCHED_ON),
        *grouped,
        (recent, "a card of Ampere's generation or a newer one"),
        (half, "16-bit numbers"),
        (all(one % 8 == 0 and one <= most for one in sizes), f"heads whose size is a multiple of 8, at most {most}"),
        (several, "more than one key"),
        # (`check_attn_mask_shape` in ``sdp_utils_cpp.h``: for each query, or each sample's head and query.)
        (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad), "a mask of two or four dimensions"),
        (not deterministic.are_ensured(), "algorithms that need not be deterministic"),
    ]
    return {kernel: [words for is_met, words in asked if not is_met] for kernel, asked in wants.items()}


def order(gpu: Chooser) -> list[str]:
    """The kernels in the order in which they are tried (`torch._C._get_sdp_priority_order`)."""
    ask = getattr(torch._C, "_get_sdp_priority_order", None)
    order = [number for number in (ask() if ask is not None else _USUAL_ORDER) if number in _KERNELS]
    if gpu.prefers_cudnn and tuple(order) == _USUAL_ORDER:
        # The program has none of its own.
        order.sort(key=lambda number: _KERNELS[number] != CUDNN)
    return [_KERNELS[number] for number in order]


def _alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """The head size must be a multiple of this, in elements, for the memory-efficient kernel."""
    half = dtype in HALF
    step = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        step = max(step, 128 // (16 if half else 32))
    return step


class Attention:
    """The operator for tensors of the virtual devices."""

    def __init__(
        self, capability_of: Callable[[int], tuple[int, int]], version_of: Callable[[int], tuple[int, int]]
    ) -> None:
        self._capability_of = capability_of
        self._version_of = version_of

    def gpu(self, device: int) -> Chooser:
        return Chooser(self._capability_of(device), self._version_of(device))

    def install(self, patches: Patches) -> None:
        patches.kernels("AutogradCUDA", [(_aten.scaled_dot_product_attention.default, self.attend)])
        patches.kernels("AutogradMeta", [(_aten.scaled_dot_product_attention.default, self._attend_distributed)])

    def _attend_distributed(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of a distributed tensor of virtual pieces, which C++ takes for one on ``meta``; others go their usual way."""
        if query.device.type == "cuda":
            return self.attend(query, *args, **kwargs)
        usual = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.scaled_dot_product_attention.default._op_dk(usual, query, *args, **kwargs)  # type: ignore[no-any-return]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """The operator itself, in terms of the kernels' own operators (which have derivatives)."""
        if not query.device == key.device == value.device:
            raise RuntimeError(
                "Expected query, key, and value to have the same device type, but got query.device: "
                f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
            )
        _check_types(query, key, value, attn_mask)
        # (Of a tensor in a compiler's trace, Python's name for the device is C++'s; the index is the same.)
        device = next(t.device.index for t in (query, key, value) if t.device.index is not None)
        gpu = self.gpu(device)
        if query.dim() == key.dim() == value.dim() == 3 and gpu.version >= _SHARED_FROM:
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(0)
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            out = self.attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return out.squeeze(0)
        lacking = unmet(gpu, query, key, value, attn_mask, is_causal, enable_gqa, dropout_p)
        kernel = first_of(fitting(lacking), gpu)
        if key.shape[-2] != value.shape[-2] and kernel in _OTHER_LENGTHS:
            raise RuntimeError(_OTHER_LENGTHS[kernel])
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype, gpu.version)
        if kernel == MATH and gpu.version < _CHOSEN_FROM and not enable_gqa:
            with because(_why_plain(lacking)):
                return _step_by_step(query, key, value, attn_mask, dropout_p, is_causal, scale, gpu.version)
        if kernel == MATH:
            with _MASKING.raised(), because(_why_plain(lacking)):
                return _aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
                    query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
                )[0]
        size = query.shape[-1]
        scale = size**-0.5 if scale is None else scale
        if kernel == FLASH:
            # The kernel wants head sizes in steps of 8; others are padded, and the result is cut.
            extra = -size % 8
            if extra:
                query, key, value = (F.pad(tensor, (0, extra)) for tensor in (query, key, value))
            out = _first_of(
                _aten._scaled_dot_product_flash_attention.default(
                    query, key, value, dropout_p, is_causal, False, scale=scale
                )
            )
            # What is padded goes from the last to the first.
            del value, key, query
            return out[..., :size] if extra else out  # type: ignore[no-any-return]
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if kernel == CUDNN:
            bias = attn_mask
            if bias is not None:
                bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            return _first_of(  # type: ignore[no-any-return]
                _aten._scaled_dot_product_cudnn_attention.default(
                    query, key, value, bias, wanted, dropout_p, is_causal, False, scale=scale
                )
            )
        # (Under one name: what it is made from goes first.)
        attn_mask = _efficient_mask(attn_mask, query, key)
        return _first_of(  # type: ignore[no-any-return]
            _aten._scaled_dot_product_efficient_attention.default(
                query, key, value, attn_mask, wanted, dropout_p, is_causal, scale=scale
            )
        )


# What is said of values that are not as many as the keys, where it is not said of a product: ``flash_api.cpp``, ``attention.cu``.
_OTHER_LENGTHS = {
    FLASH: "v must have shape (batch_size, seqlen_k, num_heads_k, head_size_og)",
    EFFICIENT: "Expected key.size(1) == value.size(1) to be true, but got false.  (Could this error message be improved?  If so, "
    "please report an enhancement request to PyTorch.)",
}

# Up in the math path, where C++ adds a mask to the scores in place, but for subclasses of tensors.
_MASKING = ThreadFlag()


def _why_plain(lacking: dict[str, list[str]]) -> str:
    """Why none of the fused kernels was taken that come before it."""
    flash, efficient = (listed(lacking[kernel]) for kernel in (FLASH, EFFICIENT))
    if flash == efficient:
        return f"they want {flash}" if flash else ""
    return f"flash attention wants {flash}, the memory-efficient kernel {efficient}" if flash and efficient else ""


def is_mask_added(args: Any) -> bool:
    """Whether a sum is that of scores and a mask in the math path."""
    return _MASKING.is_up and len(args) == 2 and isinstance(args[1], VirtualTensor)


def _first_of(results: Sequence[Any]) -> Any:
    """The first of a kernel's results; the others go in their order, as C++ lets go of them."""
    kept = list(results)
    del results
    first = kept[0]
    for place in range(len(kept)):
        kept[place] = None
    return first


def _step_by_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    version: tuple[int, int],
) -> torch.Tensor:
    """`_scaled_dot_product_attention_math` of ``attention.cpp`` as it was before 2.6, without groups of heads."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root, kind = abs(scale) ** 0.5, query.dtype
    is_wide = version >= _WIDE_FROM and kind in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if is_wide:
        query, key, value = query.float(), key.float(), value.float()
    scaled = query * (-root if scale < 0 else root)
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, query.dtype, version)
    scores = scaled @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = scores.softmax(-1) if version < _WIDE_FROM else _aten._safe_softmax.default(scores, -1)
    if dropout:
        scores = torch.dropout(scores, dropout, train=True)
    # C++ makes the second of its results first, and lets go of its variables from the last to the first.
    other = scores.to(kind)
    product = scores @ value
    out = product.to(kind)
    del product, scores, scaled, value, key, query, other
    return out  # type: ignore[no-any-return]


def _additive(mask: torch.Tensor, dtype: torch.dtype, version: tuple[int, int]) -> torch.Tensor:
    """What is added to the scores, for a mask of what may be seen (``attention.cpp`` in ATen/native/transformers)."""
    if version >= _CHOSEN_FROM:
        return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))
    if version < _WIDE_FROM:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
    lowest = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    hidden = mask.logical_not()
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    out = torch.where(hidden, lowest, zero)
    del zero, hidden, lowest
    return out


# Rows of a mask begin at multiples of so many numbers.
_ALIGNED = 8


def _efficient_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel takes it: additive, expanded, and its rows aligned in memory: one that does not lie
    so, as a part of a larger one may, is padded (`preprocess_mask` in ``transformers/attention.cpp``)."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(step % _ALIGNED for step in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, _ALIGNED - width % _ALIGNED))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _check_types(query: Any, key: Any, value: Any, mask: Any) -> None:
    """As `validate_sdpa_input` in ``transformers/attention.cpp`` does."""
    if not query.dtype == key.dtype == value.dtype:
        names = [type_of_c(one.dtype) for one in (query, key, value)]
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: {} key.dtype: {} and value.dtype: {} "
            "instead.".format(*names)
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{type_of_c(mask.dtype)} and  query.dtype: {type_of_c(query.dtype)} instead."
        )


@special(_aten.scaled_dot_product_attention.default)
def _without_autograd(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operator comes whole, below the key that the kernel above is registered for."""
    return engine.attend(*args, **kwargs)


_EFFICIENT_FORWARD = (_aten._scaled_dot_product_efficient_attention.default, _aten._efficient_attention_forward.default)
# The widest rows that the kernel keeps in registers.
_WIDEST_ROW = 128


@special(*_EFFICIENT_FORWARD, table=BESIDE)
def _sums(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Wider rows of half precision are added up in float32 (``kernel_forward.h``, `kNeedsOutputAccumulatorBuffer`)."""
    is_wide = max(args[0].shape[-1], args[2].shape[-1]) > _WIDEST_ROW
    return [out[0].numel() * 4] if is_wide and args[0].dtype in HALF else []


@special(*_EFFICIENT_FORWARD, table=ON_HOST)
def _with_seeds(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> Any:
    """The results, with the seed and the offset of random numbers where CUDA has them."""
    place = 5 if func is _EFFICIENT_FORWARD[0] else 8
    dropout = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    if torch.cuda.is_current_stream_capturing():
        return out
    if dropout or engine.memory.torch_version(device) < _SEEDS_ON_DEVICE_FROM:
        return (*out[:2], *(torch.empty((), dtype=torch.long) for _ in range(2)), *out[4:])
    engine.settle(out[2:4])
    return out


_SCALED_FLASH = _aten._scaled_dot_product_flash_attention.default


@special(_SCALED_FLASH, _aten._flash_attention_forward.default)
def _flash(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Likewise of flash. (What computes on the host as well keeps them where its own operator has them.)

    With few queries and many keys blocks share a row: partial results and their sums, for each part of the keys
    (`set_params_splitkv` in ``flash_api.cpp``). With dropout the seeds are made twice.
    """
    out = engine.fake_call(func, args, kwargs)
    if func is _SCALED_FLASH and 0 in args[0].stride():
        out = (_like_queries(engine, args[0]), *out[1:])
    if func is not _SCALED_FLASH and not engine.computes and is_padded(engine, device, args[0], args[3]):
        shape = (args[3].shape[0] - 1, args[0].shape[1], args[5])
        out = (out[0], engine.fake_call(_aten.new_empty.default, (out[1], shape), {}), *out[2:])
    newer = engine.memory.torch_version(device) >= _FLASH_SEEDS_ON_DEVICE_FROM
    engine.settle(out[:2])
    place = 3 if func is _SCALED_FLASH else 7
    dropout = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    parts = _partial_results(engine, device, *args[:2]) if func is _SCALED_FLASH and not dropout else ()
    with engine.scratch(device, *parts, first_out=newer):
        if not newer and not engine.computes and not torch.cuda.is_current_stream_capturing():
            # The last but the mask for debugging.
            return (*out[:-3], *(torch.empty(one.shape, dtype=one.dtype) for one in out[-3:-1]), out[-1])
        if dropout:
            with engine.scratch(device, bytes_of(out[-3])):
                engine.settle(out[-2])
                engine.settle(out[-3])
        engine.settle(out[-3:])
    return out


def _like_queries(engine: Engine, query: Any) -> Any:
    """Made like the queries token by token, as `mha_fwd` sees them: heads that are one, expanded, lie between tokens and numbers
    then. PyTorch's shape rule makes it like the queries as they are given."""
    for func, more in ((_aten.transpose.int, (1, 2)), (_aten.empty_like.default, ()), (_aten.transpose.int, (1, 2))):
        query = engine.fake_call(func, (query, *more), {})
    return query


# The blocks of keys for each head size, queries of a block, the most parts, and how full all but the fullest must be.
_ROWS_OF_PARTS, _MOST_PARTS, _FULL_ENOUGH, _NEARLY_FULL = 64, 128, 0.8, 0.85


def _partial_results(engine: Engine, device: int, query: Any, key: Any) -> tuple[int, ...]:
    batch, heads, queries, size = query.shape
    if queries == 1 and heads > key.shape[1] and size % 8 == 0:
        # One query for each of several heads that share keys: queries of one head.
        heads, queries = key.shape[1], heads // key.shape[1]
    columns = 256 if size <= 64 else 128 if size <= 128 else 64
    rows = batch * heads * ceil(queries / _ROWS_OF_PARTS)
    twice = 2 if engine.memory.torch_version(device) >= _TWICE_FROM else 1
    parts = parts_of_keys(rows, twice * engine.memory.processors(device)[0], ceil(key.shape[2] / columns))
    if parts == 1:
        return ()
    sums = parts * batch * heads * queries * 4
    return sums, sums * rounded_head(size, engine.memory.torch_version(device))


def parts_of_keys(rows: int, processors: int, blocks: int) -> int:
    """How many parts fill the card best (`num_splits_heuristic`): the fewest that are nearly as good as the best."""
    if not rows or rows >= _FULL_ENOUGH * processors:
        return 1
    filled = {}
    for parts in range(1, min(_MOST_PARTS, processors, blocks) + 1):
        if parts == 1 or ceil(blocks / parts) != ceil(blocks / (parts - 1)):
            waves = rows * parts / processors
            filled[parts] = waves / ceil(waves)
    best = max(filled.values())
    return next(parts for parts, share in filled.items() if share >= _NEARLY_FULL * best)


@special(_aten._scaled_dot_product_flash_attention_backward.default, _aten._flash_attention_backward.default)
def _flash_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Seeds may stand on the host; for the shapes of the gradients anything of the device's stands for them."""
    seeds = [one if isinstance(one, VirtualTensor) else args[5] for one in args[12:14]]
    heads_first = func is _aten._scaled_dot_product_flash_attention_backward.default
    with engine.scratch(device, *copies_by_token((args[0], args[4]), heads_first)):
        return engine.run(func, (*args[:12], *seeds, *args[14:]), kwargs, device)
