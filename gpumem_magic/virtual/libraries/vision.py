"""torchvision's kernels on a virtual device. Of overlapping boxes all are kept where nobody knows their values."""

from __future__ import annotations

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
