"""The ledger in the categories of the DNNMem paper (Gao et al., ESEC/FSE 2020), for comparison with estimators that use them.

Weights (with the optimizer's states, which the paper does not tell apart), weight gradients, in/out tensors, ephemeral tensors
and resident buffers: the CUDA context, fragmentation inside blocks, and what the allocator reserves beyond them. The same bytes
as the ledger's, added up otherwise; what the paper has no name for stays outside of its five groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "weights": ("parameters", "buffers", "optimizer_state"),
        "weight_gradients": ("gradients",),
        "in_out": ("inputs", "activations", "kv_cache", "autocast_copies", "activation_gradients"),
        "ephemeral": ("temporaries", "workspace"),
        "context": ("context",),
        "fragmentation": ("rounding",),
        "reservation": ("cached",),
        "outside": ("unknown", "other_processes", "context_or_others"),
    }
)
"""The ledger's categories in each group. Context, fragmentation and reservation are the paper's resident buffers."""
RESIDENT = ("context", "fragmentation", "reservation")


@dataclass(frozen=True)
class DnnMemView:
    """One moment, in bytes; None where nothing of a group is available, never 0."""

    groups: Mapping[str, int | None]

    @property
    def resident(self) -> int | None:
        """Context, fragmentation and reservation together; None where the context can't be told from other processes."""
        parts = [self.groups[name] for name in RESIDENT]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    @property
    def total(self) -> int:
        """Everything that is available: what nvidia-smi shows, where the driver says it."""
        return sum(value for value in self.groups.values() if value is not None)


def dnnmem_view(categories: Mapping[str, int | None]) -> DnnMemView:
    """The view of a row or peak: ``dnnmem_view(report.peak.categories)``. Raises KeyError for a category without a group."""
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    groups: dict[str, int | None] = dict.fromkeys(GROUPS)
    for name, size in categories.items():
        group = group_of[name]
        if size is not None:
            groups[group] = (groups[group] or 0) + size
    return DnnMemView(MappingProxyType(groups))
