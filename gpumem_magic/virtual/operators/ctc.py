"""CTC's loss as cuDNN works it out: the gradient with the loss, and room for both ways through the targets.

After ``native/LossCTC.cpp`` and ``native/cudnn/LossCTC.cpp``, torch 2.11. How much cuDNN works in is what 9.19 answered on an
H100 (1,194 questions, each met to the byte); other cards and versions are taken to be alike. The table of the targets is as long
as the longest of them where the lengths are numbers, and as the longest that cuDNN can take where they are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import equivalent
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of
from gpumem_magic.virtual.operators.data_dependent import _placed

_LONGEST = 255
_NUMBER = 4
_SUM, _MEAN = 2, 1
# Since when cuDNN takes lengths that are tensors. (An H100 says so of 2.11; before, it is not known.)
_TENSORS_FROM = (2, 11)


def is_cudnns(log_probs: Any, targets: Any, given: Any, wanted: Any, blank: int) -> bool:
    """Whether PyTorch asks cuDNN (`_use_cudnn_ctc_loss`). given, wanted: the lengths of both, tensors or numbers."""
    if not torch.backends.cudnn.enabled or blank or not targets.is_contiguous() or targets.dtype != torch.int32:
        return False
    if (log_probs.dim(), log_probs.dtype, targets.dim()) != (3, torch.float32, 1):
        return False
    lengths = [one.tolist() if isinstance(one, torch.Tensor) else [*one] for one in (given, wanted)]
    if any(target > _LONGEST or target > length for length, target in zip(*lengths, strict=False)):
        return False
    if isinstance(given, torch.Tensor) and isinstance(wanted, torch.Tensor):
        engine: Any = engine_of(log_probs)
        of_32_bits = given.dtype == wanted.dtype == torch.int32
        return of_32_bits and engine.memory.torch_version(log_probs.get_device()) >= _TENSORS_FROM
    return targets.device.type == "cpu" and all(length == log_probs.shape[0] for length in lengths[0])


def loss(
    log_probs: Any, targets: Any, given: Any, wanted: Any, reduction: int, deterministic: bool, zero_infinity: bool
) -> Any:
    tensors = isinstance(given, torch.Tensor)
    way = _aten._cudnn_ctc_loss.Tensor if tensors else _aten._cudnn_ctc_loss.default
    losses = way(log_probs, targets, given, wanted, 0, deterministic, zero_infinity)[0]
    if reduction == _SUM:
        return losses.sum()
    if reduction != _MEAN:
        return losses
    if tensors and wanted.device != losses.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {losses.device} and cpu!"
        )
    lengths = wanted if tensors else torch.tensor(wanted, dtype=losses.dtype).to(losses.device)
    return (losses / lengths.clamp(min=1)).mean()


@special(_aten._cudnn_ctc_loss.default, _aten._cudnn_ctc_loss.Tensor)
def _by_cudnn(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    log_probs, targets, given, wanted = args[:4]
    steps, batch, symbols = log_probs.shape
    engine.memory.uses_cudnn(device)
    moved: Sequence[int] = ()
    beside = 0
    if isinstance(given, torch.Tensor):
        longest = _LONGEST
        moved = [one.numel() * _NUMBER for one in (targets, given, wanted) if not isinstance(one, VirtualTensor)]
    else:
        longest = max(wanted, default=0)
        beside = sum(wanted) + 2 * batch
    with engine.scratch(device, *moved):
        gradient = _placed(engine, tuple(log_probs.shape), log_probs.dtype, device)
        both_ways = 2 * steps * (2 * longest + 1)
        room = batch * (both_ways + steps * symbols + 2 * longest + 3) + beside
        with engine.scratch(device, room * _NUMBER):
            return _placed(engine, (batch,), log_probs.dtype, device), gradient


@equivalent(_aten._cudnn_ctc_loss.default, _aten._cudnn_ctc_loss.Tensor)
def _on_the_host(
    log_probs: Any, targets: Any, given: Any, wanted: Any, blank: int, deterministic: bool, zero_infinity: bool
) -> Any:
    lengths = [one.tolist() if isinstance(one, torch.Tensor) else [*one] for one in (given, wanted)]
    losses, table = _aten._ctc_loss.default(log_probs, targets.to(torch.int64), *lengths, blank, zero_infinity)
    gradient = _aten._ctc_loss_backward.default(
        torch.ones_like(losses), log_probs, targets.to(torch.int64), *lengths, losses, table, blank, zero_infinity
    )
    return losses, gradient
