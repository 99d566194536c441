"""What several causes propose, those of a file's stacks among them."""

from __future__ import annotations

LOSS_IN_PARTS = (
    "Compute head and loss for some of the positions at a time, each part in a `torch.utils.checkpoint.checkpoint`: then one "
    "part's are there at once"
)
WITHOUT_SCORES = '`torch.nn.functional.scaled_dot_product_attention` (`attn_implementation="sdpa"`) never stores them.'
