"""`torch.autocast("cuda")` for virtual tensors.

PyTorch's own kernels for the AutocastCUDA key ask C++ whether a tensor is on CUDA, and are told meta. While the virtual GPU
is on, Python kernels for the operators in ATen/autocast_mode.h take their place; afterwards the originals are back. Weights are
cast once in a region and kept until it ends, which is memory that shows in the report.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.modes import STATE, is_ours, origin
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import composites

_KEY = "AutocastCUDA"

_LOWER = """
    addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution _convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
    rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell scaled_dot_product_attention
"""
_FLOAT32 = """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv
    exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2 logsumexp
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm
    pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
"""
# Computed in float32 by asking the operator for that result type: its argument is not copied.
_FLOAT32_RESULT = "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
# What only some versions cast: to what, the first of them, and the first that does it no more. (The dispatcher of 1.9, 1.10, 2.0,
# 2.1, 2.6 and 2.10 to 2.13 says which operators have a kernel of autocast's.)
_Version = tuple[int, int]
_OF_SOME: dict[str, tuple[str, _Version, _Version]] = {
    "gelu": (_FLOAT32, (0, 0), (1, 10)),
    "cat stack": (_WIDEST, (0, 0), (1, 10)),
    "rms_norm": (_FLOAT32, (2, 12), (99, 0)),
}
# Before, its parts were cast by themselves: in half precision the squares, which since 2.6 are float32 anyway.
_BY_PARTS, _BY_PARTS_UNTIL = "rms_norm", (2, 6)


# Since when the type of a region comes along to the thread that goes backward, as whether there is one always did: before, what
# is cast there becomes float16, until a region begins in the backward itself. (The build of 2.5 has it, not those of 2.2 to 2.4.)
_CARRIED_FROM = (2, 5)


# Since when a copy that is kept goes backward also where it was made without gradients. (The build of 2.12 has it so, that of 2.7
# does not; it belongs to what inference mode keeps since 2.11, pull request 165068.)
_KEPT_WITH_GRADIENT_FROM = (2, 11)


class _OfThread(threading.local):
    """Of the thread that goes backward: what it casts to, and how many regions began in it."""

    dtype = torch.float16
    nesting = 0


class AutocastKernels:
    """The kernels, while they are installed."""

    def __init__(self, torch_version: Callable[[int], tuple[int, int]]) -> None:
        self._torch_version = torch_version
        self._cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._type: Callable[[str], torch.dtype] = torch.get_autocast_dtype
        self._backwards = _OfThread()
        self._without_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def install(self, patches: Patches, versions: list[_Version]) -> None:
        """versions: of each device."""
        policies: dict[str, Callable[[Any], Callable[..., Any]]] = {
            _LOWER: self._lower,
            _FLOAT32: self._float32,
            _FLOAT32_RESULT: self._float32_result,
            _WIDEST: self._widest,
        }
        kernels = [(operator, make(operator)) for names, make in policies.items() for operator in _overloads(names)]
        for names, (like, since, until) in _OF_SOME.items():
            casting = frozenset(index for index, version in enumerate(versions) if since <= version < until)
            if casting:
                kernels += [(one, self._on_some(one, policies[like](one), casting)) for one in _overloads(names)]
        if versions and max(versions) < _BY_PARTS_UNTIL:
            kernels += [(one, self._by_parts(one)) for one in _overloads(_BY_PARTS)]
        patches.kernels(_KEY, [*kernels, (torch.ops.aten.binary_cross_entropy.default, _refuse)])
        self._count_by_thread(patches)
        if versions and max(versions) < _CARRIED_FROM:
            self._keep_type_by_thread(patches)
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            self._cast_weights.clear()
            clear()

        patches.set(torch, "clear_autocast_cache", clear_autocast_cache)
        patches.also_undo(self._cast_weights.clear)

    def _count_by_thread(self, patches: Patches) -> None:
        """Each thread counts the regions that it is in: the copies of weights go where the outermost of the thread that goes
        backward ends, as it does for each part that is worked out anew, also within a region of the program's."""
        begin, end, mine = torch.autocast_increment_nesting, torch.autocast_decrement_nesting, self._backwards

        def autocast_increment_nesting() -> int:
            if not STATE.backward:
                return begin()
            mine.nesting += 1
            return mine.nesting

        def autocast_decrement_nesting() -> int:
            if not STATE.backward:
                return end()
            mine.nesting -= 1
            return mine.nesting

        patches.set(torch, "autocast_increment_nesting", autocast_increment_nesting)
        patches.set(torch, "autocast_decrement_nesting", autocast_decrement_nesting)

    def _keep_type_by_thread(self, patches: Patches) -> None:
        get, choose, mine = torch.get_autocast_dtype, torch.set_autocast_dtype, self._backwards

        def get_autocast_dtype(device_type: str) -> torch.dtype:
            return mine.dtype if STATE.backward and device_type == "cuda" else get(device_type)

        def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
            if STATE.backward and device_type == "cuda":
                mine.dtype = dtype
            else:
                choose(device_type, dtype)

        def as_before() -> None:
            self._type = get

        self._type = get_autocast_dtype
        patches.set(torch, "get_autocast_dtype", get_autocast_dtype)
        patches.set(torch, "set_autocast_dtype", set_autocast_dtype)
        patches.also_undo(as_before)

    # ---- policies

    def _lower(self, operator: Any) -> Callable[..., Any]:
        return self._cast_first(operator, lambda given: self._type("cuda"))

    def _float32(self, operator: Any) -> Callable[..., Any]:
        return self._cast_first(operator, lambda given: torch.float32)

    def _widest(self, operator: Any) -> Callable[..., Any]:
        def widest(given: tuple[Any, ...]) -> torch.dtype:
            is_wide = any(tensor.dtype == torch.float32 for tensor in _castables(given))
            return torch.float32 if is_wide else self._type("cuda")

        return self._cast_first(operator, widest)

    def _cast_first(self, operator: Any, dtype_for: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = dtype_for((*args, *kwargs.values()))
            with torch._C._ExcludeDispatchKeyGuard(self._without_autocast):
                named = self._cast(list(kwargs.values()), dtype)
                given = self._cast(args, dtype)
                try:
                    return operator(*given, **dict(zip(kwargs, named, strict=True)))
                finally:
                    # Made from the last to the first, they go from the first on.
                    for place in range(len(given)):
                        given[place] = None

        return kernel

    def _float32_result(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._without_autocast):
                if _castable(args[0]) and kwargs.get("dtype") is None and not _has_dtype_at(operator, args):
                    kwargs = {**kwargs, "dtype": torch.float32}
                return operator(*args, **kwargs)

        return kernel

    def _on_some(self, operator: Any, kernel: Callable[..., Any], devices: frozenset[int]) -> Callable[..., Any]:
        def kernel_of_some(*args: Any, **kwargs: Any) -> Any:
            given = _castables((*args, *kwargs.values()))
            if any(tensor.device.index in devices for tensor in given):
                return kernel(*args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(self._without_autocast):
                return operator(*args, **kwargs)

        return kernel_of_some

    def _by_parts(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._without_autocast), composites.parts_are_cast.raised():
                return operator(*args, **kwargs)

        return kernel

    # ---- casting

    def _cast(self, args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
        """An operator's arguments, the last one first: a bias, a weight, the input.

        ``cached_cast(type, args, device_type)...`` in ATen/autocast_mode.h, as GCC evaluates a call's
        arguments. Recorded with 2.5.
        """
        cast = [self._cast_one(arg, dtype) for arg in reversed(args)]
        cast.reverse()
        return cast

    def _cast_one(self, arg: Any, dtype: torch.dtype) -> Any:
        if isinstance(arg, (list, tuple)):
            # Those of a list in their order.
            return type(arg)([self._cast_one(one, dtype) for one in arg]) if type(arg) in (list, tuple) else arg
        if not _castable(arg) or arg.dtype == dtype:
            return arg
        keep = (
            dtype != torch.float32
            and arg.dtype == torch.float32
            and arg.requires_grad
            and arg.is_leaf
            and not arg._is_view()
            and torch.is_autocast_cache_enabled()
            # Since 2.11 (pull request 165068).
            and not (torch.is_inference_mode_enabled() and self._torch_version(arg.device.index) >= (2, 11))
        )
        if not keep:
            return arg.to(dtype)
        differentiable = self._torch_version(arg.device.index) >= _KEPT_WITH_GRADIENT_FROM
        known = self._cast_weights.get(id(arg))
        if known is None or known[0] is not arg or known[1].dtype != dtype:
            with origin("autocast"), torch.set_grad_enabled(True if differentiable else torch.is_grad_enabled()):
                known = self._cast_weights[id(arg)] = (arg, arg.to(dtype))
        return known[1]


@functools.cache
def _overloads(names: str) -> list[Any]:
    """All overloads of the operators that make new tensors: neither out= nor in-place ones. Names that this torch lacks are
    left out."""
    packets = [getattr(torch.ops.aten, name) for name in names.split() if hasattr(torch.ops.aten, name)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [
        operator
        for operator in operators
        if not any(one.alias_info is not None and one.alias_info.is_write for one in operator._schema.arguments)
    ]


def _castable(arg: Any) -> bool:
    return _on_device(arg) and arg.dtype.is_floating_point and arg.dtype != torch.float64


def _on_device(arg: Any) -> bool:
    """A virtual tensor, or one on a virtual device in a compiler's trace, where C++ calls that device ``meta:i``."""
    if isinstance(arg, VirtualTensor):
        return True
    if not isinstance(arg, torch.Tensor) or type(arg) in (torch.Tensor, torch.nn.Parameter):
        return False
    return arg.device.type == "cuda" or is_ours(arg.device)


def _castables(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _castables(arg)
        elif _castable(arg):
            yield arg


def _has_dtype_at(operator: Any, args: Any) -> bool:
    """Whether a result type was given by position, or the overload takes none."""
    names = [argument.name for argument in operator._schema.arguments]
    if "dtype" not in names:
        return True
    position = names.index("dtype")
    return position < len(args) and args[position] is not None


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
