"""torchvision's kernels on a virtual device. Of overlapping boxes all are kept where nobody knows their values."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import torch

from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.kernel_rules import built_in
from gpumem_magic.virtual.engine.tensors import engine_of


@built_in("torchvision::nms")
def suppress(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """``nms_kernel.cu``: the boxes in the order of their scores, a bit for each pair of boxes, then what is kept."""
    count = boxes.shape[0]
    order = scores.argsort(descending=True)
    sorted_boxes = boxes.index_select(0, order)
    pairs = boxes.new_empty((count * -(-count // 64),), dtype=torch.int64)
    kept = cast(Engine, engine_of(boxes)).selected("nms", count)
    del sorted_boxes, pairs
    return order.narrow(0, 0, kept).clone()


# The most samples whose columns are multiplied at once.
_TOGETHER = 32


def _samples_together(count: int) -> int:
    """The largest divisor of their number that is not above that."""
    return next((size for size in range(min(count, _TOGETHER), 1, -1) if count % size == 0), 1)


def _in_groups(weight: Any, groups: int) -> Any:
    return weight.view(groups, weight.shape[0] // groups, *weight.shape[1:])


@built_in("torchvision::deform_conv2d")
def deform(input: Any, weight: Any, offset: Any, mask: Any, bias: Any, *how: Any) -> Any:
    """``deform_conv2d_kernel.cu`` (torchvision 0.26): the points that each place looks at are columns, which the weight
    multiplies for some samples at once; then the samples are put in order, and the bias is added."""
    groups = how[6]
    input, offset, weight, mask, bias = (one.contiguous() for one in (input, offset, weight, mask, bias))
    count, channels = input.shape[:2]
    places = offset.shape[2:]
    out = input.new_zeros((count, weight.shape[0], *places))
    if not count:
        return out
    together = _samples_together(count)
    blocks = count // together
    sums = input.new_zeros((blocks, groups, weight.shape[0] // groups, together * places[0], places[1]))
    columns = input.new_zeros((groups, channels * weight[0, 0].numel() // groups, together * places.numel()))
    weight = _in_groups(weight, groups)
    for block, group in product(range(blocks), range(groups)):
        sums[block, group].flatten(1).addmm_(weight[group].flatten(1), columns[group])
    in_order = sums.view(blocks, -1, together, *places).transpose(1, 2)
    out.view(blocks, together, -1, *places).copy_(in_order)
    return out + bias.view(1, -1, 1, 1)


@built_in("torchvision::_deform_conv2d_backward")
def deform_backward(grad: Any, input: Any, weight: Any, offset: Any, mask: Any, bias: Any, *how: Any) -> Any:
    """The same file: the gradients of what is looked at first, then the weight's, with columns of its own, then the bias's."""
    groups = how[6]
    grad, input, weight, offset, mask, bias = (one.contiguous() for one in (grad, input, weight, offset, mask, bias))
    of_input, of_offset, of_mask = (torch.zeros_like(one) for one in (input, offset, mask))
    if count := input.shape[0]:
        together = _samples_together(count)
        shape = (count // together, together, groups, weight.shape[0] // groups, *grad.shape[2:])
        by_group = grad.view(shape).permute(0, 2, 3, 1, 4, 5)
        sizes = (groups, input.shape[1] * weight[0, 0].numel() // groups, together * grad.shape[2:].numel())
        columns = input.new_empty(sizes)
        for block, group in product(range(shape[0]), range(groups)):
            columns[group].addmm_(
                _in_groups(weight, groups)[group].flatten(1).transpose(0, 1), by_group[block, group].flatten(1)
            )
        del columns
        of_weight = torch.zeros_like(weight)
        plain, columns = by_group.contiguous(), input.new_empty(sizes)
        for block, group in product(range(shape[0]), range(groups)):
            _in_groups(of_weight, groups)[group].flatten(1).addmm_(
                plain[block, group].flatten(1), columns[group].transpose(1, 0)
            )
        del plain, columns
    else:
        of_weight = torch.zeros_like(weight)
    total = grad.sum((0, 2, 3))
    return of_input, of_weight, of_offset, of_mask, torch.ones_like(bias) * total
