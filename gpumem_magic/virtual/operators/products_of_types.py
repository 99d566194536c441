"""Matrix products whose result or weights have a type of their own: ``torch.mm(a, b, out_dtype=torch.float32)``, 4-bit weights.

CUDA alone has kernels for them. Rules of PyTorch take two arguments (`mm.dtype` in 2.9), or the type for a factor (`baddbmm`).
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.host_calls import equivalent
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators.data_dependent import _placed

_PRODUCT_OF = {
    **dict.fromkeys(overloads("mm.dtype mm.dtype_out addmm.dtype addmm.dtype_out"), _aten.mm.default),
    **dict.fromkeys(overloads("bmm.dtype bmm.dtype_out baddbmm.dtype baddbmm.dtype_out"), _aten.bmm.default),
}


@special(*_PRODUCT_OF)
def _in_another_type(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What is added is copied into the result (`_addmm_dtype_cuda` and its like in ``cuda/Blas.cpp``, also what they refuse)."""
    *added, left, right, dtype = args
    shape = engine.fake_call(_PRODUCT_OF[func], (left, right), {}).shape
    if dtype != left.dtype and (dtype != torch.float32 or left.dtype not in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    for one in added:
        engine.fake_call(_aten.expand.default, (one, shape), {})
    out = kwargs.get("out")
    if out is None:
        return _placed(engine, tuple(shape), dtype, device)
    if dtype != out.dtype:
        raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
    if shape != out.shape:
        engine.run(_aten.resize_.default, (out, shape), {}, device)
    engine.forget(out)
    engine.memory.after_operator(func, args, device)
    return out


# ---- with real values: the host multiplies in the type of the result, which holds every product of two halves


@equivalent(*overloads("mm.dtype bmm.dtype"))
def _product(left: Any, right: Any, dtype: torch.dtype) -> Any:
    return left.to(dtype) @ right.to(dtype)


@equivalent(*overloads("mm.dtype_out bmm.dtype_out"))
def _product_into(left: Any, right: Any, dtype: torch.dtype, *, out: Any) -> Any:
    return out.copy_(_product(left, right, dtype))


@equivalent(*overloads("addmm.dtype baddbmm.dtype"))
def _sum(added: Any, left: Any, right: Any, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _product(left, right, dtype) * alpha
    return product if not beta else added.to(dtype) * beta + product


@equivalent(*overloads("addmm.dtype_out baddbmm.dtype_out"))
def _sum_into(added: Any, left: Any, right: Any, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
    return out.copy_(_sum(added, left, right, dtype, beta=beta, alpha=alpha))


# ---- weights of 4 bits, two to a byte: the first in the upper half (``cuda/int4mm.cu``)

_ROWS_OF_A_TILE = 8
_NULL = 8


@equivalent(_aten._convert_weight_to_int4pack.default)
def _packed(weight: Any, inner_tiles: int) -> Any:
    """As many bytes as CUDA's tiles have, in the order in which they came: nobody but `_weight_int4pack_mm` reads them."""
    rows, half = weight.shape
    tiles = (rows // _ROWS_OF_A_TILE, half * 2 // (inner_tiles * 16), 32, inner_tiles // 2)
    return weight.contiguous().view(torch.int32).reshape(tiles)


@equivalent(_aten._weight_int4pack_mm.default)
def _product_with_packed(input: Any, packed: Any, group: int, scales_and_zeros: Any) -> Any:
    """Each group of a row has a scale, and what is added for 8."""
    halves = packed.contiguous().view(torch.uint8).reshape(packed.shape[0] * _ROWS_OF_A_TILE, -1)
    numbers = torch.stack([halves >> 4, halves & 15], -1).flatten(1).float() - _NULL
    scales, zeros = (part.mT[..., None] for part in scales_and_zeros.float().unbind(-1))
    weight = (numbers.unflatten(1, (-1, group)) * scales + zeros).flatten(1)
    return (input.float() @ weight.to(input.dtype).float().mT).to(input.dtype)
