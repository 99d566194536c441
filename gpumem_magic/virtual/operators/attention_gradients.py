"""What attention's backward kernels hold while they run: sums over rows, and gradients that several blocks add to.

Memory-efficient: ``transformers/cuda/attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h`` of ATen. A query's
gradient is added up in blocks by kernels that each see a part of the keys; those of keys and values too, where they do not fit
into registers. Recorded on a GPU (float32, 1000 tokens, 32 heads of 64): 128,000 bytes twice, and 8,396,800. Flash:
``flash_api.cpp``, `mha_bwd`. Both want the result's gradient plain, token by token, and flash the result, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import deterministic
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.rules import BESIDE, special

_FLOAT = 4
# Of a block of the query's gradient: a lock, a counter, and room up to 16 bytes.
_HEAD_OF_BLOCK = 4
# Generations whose multiprocessors have too little shared memory for blocks of 128 rows. (7.5's kernels need less of it.)
_SMALL_SHARED = {(8, 6), (8, 9), (12, 0)}
_FLASH_ROWS = 128


class Heads(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    size: int


class Blocks(NamedTuple):
    """rows, columns: of its blocks. in_registers: whether the gradients of keys and values are added up there."""

    rows: int
    columns: int
    in_registers: bool


def kernel_for(capability: tuple[int, int], half: bool, size: int, dropout: bool) -> Blocks:
    """The one that PyTorch has compiled for the head size, as ``generate_kernels.py`` lists them."""
    if half and 64 < size <= 96 and capability in ((8, 6), (8, 9)) and not dropout:
        return Blocks(128, 64, True)
    most = next((bound for bound in (32, 64, 128) if size <= bound), 2**16)
    large = most > 64 and capability not in _SMALL_SHARED and (capability >= (8, 0) or (half and capability >= (7, 0)))
    rows = 128 if large else 64
    in_registers = half and most <= rows
    return Blocks(rows, 128 if in_registers and capability >= (8, 0) and most > 64 else 64, in_registers)


def workspace_bytes(shape: Heads, kernel: Blocks, half: bool) -> int:
    """Where blocks add up what several of them contribute to."""
    rows, columns, in_registers = kernel
    numbers = _parts(shape.queries, rows) * _parts(shape.size, columns) * (_HEAD_OF_BLOCK + rows * columns)
    if half and not in_registers:
        splits = _parts(shape.keys, columns)
        if shape.batch * shape.heads >= 256 and shape.keys <= 2 * columns:
            splits = 1
        splits = max(1, min(splits, 200 // (shape.batch * shape.heads)))
        if deterministic.are_ensured():
            splits = 1
        numbers += 2 * splits * columns * _parts(shape.size, rows) * rows
    return shape.batch * shape.heads * _parts(numbers, 4) * 4 * _FLOAT


def _parts(number: int, size: int) -> int:
    return -(-number // size)


# The dimensions, token by token, of what has its heads before its tokens.
_BY_TOKEN = (0, 2, 1, 3)


def copies_by_token(tensors: Sequence[Any], heads_first: bool) -> list[int]:
    """Bytes of the copies of those tensors that do not lie plainly, token by token."""
    return [bytes_of(one) for one in tensors if not _lies_by_token(one, heads_first)]


def _lies_by_token(tensor: Any, heads_first: bool) -> bool:
    if not heads_first or tensor.dim() != 4:
        return bool(tensor.is_contiguous())
    expected = 1
    for dim in reversed(_BY_TOKEN):
        if tensor.shape[dim] != 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.shape[dim]
    return True


_EFFICIENT = (
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._efficient_attention_backward.default,
)


@special(*_EFFICIENT)
def _of_plain_gradient(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if func is _EFFICIENT[1]:
        # (PyTorch's rule for shapes has no place for the result, and so takes a later argument for the scale.)
        kwargs = {name: value for name, value in kwargs.items() if name != "scale"}
    with engine.scratch(device, *copies_by_token(args[:1], func is _EFFICIENT[0])):
        if func is _EFFICIENT[0] and args[1].shape[1] != args[2].shape[1]:
            # (PyTorch's rule for shapes has as many heads everywhere.)
            of_query, _, _, of_bias = engine.fake_call(func, args, kwargs)
            results = (of_query, *(_like_by_token(engine, one) for one in args[2:4]), of_bias)
            engine.settle(results)
            _scaled(engine, func, args, kwargs, results, device)
            return results
        if func is _EFFICIENT[0] or args[4] is not None:
            return engine.run(func, args, kwargs, device)
        # (PyTorch's rule for shapes has a number where the kernel has no gradient of a bias.)
        results = engine.fake_call(func, args, kwargs)[:3]
        engine.settle(results)
        _plain(engine, func, args, kwargs, results, device)
        return (*results, None)


def _like_by_token(engine: Engine, tensor: Any) -> Any:
    """One of that shape that lies plainly, token by token, where its heads come before its tokens."""
    by_token = engine.fake_call(_aten.transpose.int, (tensor, 1, 2), {})
    plain = engine.fake_call(_aten.empty_like.default, (by_token,), {"memory_format": torch.contiguous_format})
    return engine.fake_call(_aten.transpose.int, (plain, 1, 2), {})


@special(_aten._padded_dense_to_jagged_forward.default)
def _packed(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """``NestedTensorTransformerFunctions.cu`` has a place for the values and one like it, for the result."""
    width, rows = args[0].shape[-1], args[2] if len(args) > 2 else kwargs.get("total_L")
    size = 0 if rows is None else int(rows) * width * args[0].element_size()
    with engine.scratch(device, size):
        return engine.run(func, args, kwargs, device)


@special(_EFFICIENT[0], table=BESIDE)
def _scaled(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    query, key, value, dropout = args[1], args[2], args[3], args[9]
    batch, heads, queries, size = query.shape
    shape = Heads(batch, heads, queries, key.shape[2], size)
    # Gradients of keys and values whose heads several queries share, apart for each query's, before these are added up.
    apart = [bytes_of(one) // one.shape[1] * heads for one in (key, value) if one.shape[1] != heads]
    with engine.scratch(device, *apart):
        return _efficient(engine, device, shape, value.shape[-1], query.dtype, bool(dropout))


@special(_EFFICIENT[1], table=BESIDE)
def _plain(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    query, key, value, ends, dropout = args[1], args[2], args[3], args[6], args[11]
    batch, queries, heads, size = query.shape
    shape = Heads(batch, heads, queries, key.shape[1], size)
    # Of sequences one after the other each has a part as large as the longest one's.
    each = shape if ends is None else shape._replace(batch=ends.shape[0] - 1, queries=args[8], keys=args[9])
    return _efficient(engine, device, shape, value.shape[-1], query.dtype, bool(dropout), each)


def _efficient(
    engine: Engine, device: int, shape: Heads, width: int, dtype: Any, dropout: bool, each: Heads | None = None
) -> tuple[int, ...]:
    """width: of a row of the result. each: the shape by which the kernel works, where it is another."""
    half, capability = dtype in HALF, engine.memory.capability(device)
    kernel = kernel_for(capability, half, max(shape.size, width), dropout)
    sums = shape.batch * shape.heads * shape.queries * _FLOAT
    products = []
    if not half or not (kernel.in_registers or capability != (7, 0)):
        # The result times its gradient, summed up, and the sums head by head: they lie so where one of both is one. In float32.
        products = [sums * width] * (3 if half else 1) + [sums] * (shape.heads > 1 and shape.queries > 1)
    # The sums go first.
    with ExitStack() as workspace, ExitStack() as sums_of_rows:
        with engine.scratch(device, *products):
            sums_of_rows.enter_context(engine.scratch(device, sums))
        workspace.enter_context(engine.scratch(device, workspace_bytes(each or shape, kernel, half)))
    return ()


@special(
    _aten._scaled_dot_product_flash_attention_backward.default, _aten._flash_attention_backward.default, table=BESIDE
)
def _flash(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    query, key = args[1], args[2]
    if query.dim() != 4:
        return _flash_of_rows(engine, args, device)
    scaled = func is _aten._scaled_dot_product_flash_attention_backward.default
    batch, heads, queries = query.shape[0], query.shape[1 if scaled else 2], query.shape[2 if scaled else 1]
    keys, shared = key.shape[2 if scaled else 1], key.shape[1 if scaled else 2]
    rows = batch * heads * _parts(queries, _FLASH_ROWS) * _FLASH_ROWS
    return _of_flash(engine, device, query, batch * heads, (rows, rows), batch * keys * heads if shared != heads else 0)


def _flash_of_rows(engine: Engine, args: Any, device: int) -> list[int]:
    """Of sequences one after the other (`mha_varlen_bwd`), each of which may end within a block of rows."""
    query, key, ends = args[1], args[2], args[6]
    if query.dim() != 3 or ends is None:
        return []
    (tokens, heads, _), batch = query.shape, ends.shape[0] - 1
    rows = heads * (tokens + _FLASH_ROWS * batch)
    padded = batch * heads * _parts(args[8], _FLASH_ROWS) * _FLASH_ROWS
    sums = padded if is_padded(engine, device, query, ends) else rows
    expanded = key.shape[0] * heads if key.shape[1] != heads else 0
    return _of_flash(engine, device, query, batch * heads, (sums, rows), expanded)


# Since when the sums of such sequences follow each other, too, where each had as many as the longest (`mha_varlen_fwd` in
# ``flash_api.cpp``; the builds of 2.6 and 2.7).
_SUMS_AFTER_EACH_OTHER_FROM = (2, 7)


def is_padded(engine: Engine, device: int, query: Any, ends: Any) -> bool:
    version = engine.memory.torch_version(device)
    return query.dim() == 3 and ends is not None and version < _SUMS_AFTER_EACH_OTHER_FROM


# Since when heads of more than 192 numbers are taken for such of 256, and those of more than 128 for a multiple of 64 (`mha_fwd`
# and `mha_bwd` in ``flash_api.cpp``: the builds of 2.6, 2.7, 2.12 and 2.14, and pull request 174114, which came into 2.11).
_LARGEST_WHOLE_FROM, _BY_64_FROM = (2, 7), (2, 11)


def rounded_head(size: int, version: tuple[int, int]) -> int:
    """How many numbers of a head flash's kernels add up."""
    if size > 192 and version >= _LARGEST_WHOLE_FROM:
        return 256
    step = 64 if size > 128 and version >= _BY_64_FROM else 32
    return _parts(size, step) * step


def _of_flash(engine: Engine, device: int, query: Any, heads: int, rows: tuple[int, int], expanded: int) -> list[int]:
    """rows: of all heads, in whole blocks; for their sums, and for the gradient. expanded: those of keys whose heads several
    queries share, apart for each query's."""
    size = query.shape[-1]
    rounded = rounded_head(size, engine.memory.torch_version(device))
    # The deterministic kernel adds up one copy for each group of blocks that run at a time.
    processors = engine.memory.processors(device)[0]
    copies = _parts(processors, heads) if deterministic.are_ensured() else 1
    blocks = [rows[0] * _FLOAT, copies * rows[1] * rounded * _FLOAT]
    return blocks + [expanded * size * query.element_size()] * 2 if expanded else blocks
