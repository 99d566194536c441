"""What cuDNN's attention holds: seeds before its results, and room to work in.

After ``cudnn/MHA.cpp`` and ``transformers/cuda/attention.cu`` in ATen, 2.11. What the library works in was recorded on an H100
(cuDNN 9.19, 90 calls): backward takes the query's gradient and a sum for each row in float32, and the gradients of keys and
values apart for each head where several share theirs, behind 256 bytes; forward takes these 256 bytes. A single query without a
mask has its keys divided over blocks, as flash has: the parts of the result, and two sums for each. How many parts is a fit to
eight calls.
"""

from __future__ import annotations

from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.rules import special

_FLOAT = 4
_HEAD, _HEAD_OF_PARTS = 256, 128
_KEYS_OF_A_BLOCK, _MOST_PARTS = 128, 16


@special(_aten._scaled_dot_product_cudnn_attention.default)
def _forward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Where nobody wants the sums, none are made."""
    engine.memory.uses_cudnn(device)
    out = engine.fake_call(func, args, kwargs)
    query, key, _, mask, wants_sums = args[:5]
    engine.settle(out[6:8])
    engine.settle(out[0])
    if wants_sums:
        engine.settle(out[1])
    else:
        out = (out[0], None, *out[2:])
    with engine.scratch(device, _room(query, key, mask, engine.memory.processors(device)[0])):
        return out


def _room(query: Any, key: Any, mask: Any, processors: int) -> int:
    batch, heads, queries, size = query.shape
    if queries > 1:
        return _HEAD
    parts = 1 if mask is not None else _parts(batch * key.shape[1], -(-key.shape[2] // _KEYS_OF_A_BLOCK), processors)
    return _HEAD_OF_PARTS + parts * batch * heads * (size + 2) * _FLOAT if parts > 1 else 0


def _parts(rows: int, blocks: int, processors: int) -> int:
    """Twice as many as long as each has more than one block of keys, and two of them share a multiprocessor."""
    if 2 * rows > processors:
        return 1
    parts = 1
    while parts < _MOST_PARTS and 2 * parts < blocks and 2 * parts * rows <= 2 * processors:
        parts *= 2
    return parts


@special(_aten._scaled_dot_product_cudnn_attention_backward.default)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A gradient whose last dimension does not lie plainly is copied."""
    engine.memory.uses_cudnn(device)
    gradient, query, key, value = args[:4]
    out = engine.run(func, args, kwargs, device)
    batch, heads, queries, size = query.shape
    room = _HEAD + batch * heads * queries * (size + 1) * _FLOAT
    if key.shape[1] != heads:
        room += batch * heads * key.shape[2] * (size + value.shape[-1]) * query.element_size()
    with engine.scratch(device, bytes_of(gradient) if gradient.stride(-1) != 1 else 0, room):
        return out
