"""The activations of a program by module and by operator. Numbers and strings only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OUTSIDE = "outside modules"
NOT_SAVED = "not kept for backward"
# Modules are not nested deeper.
DEEPEST = 200


@dataclass(frozen=True)
class LayerRow:
    """A module, the modules in it included. Bytes as requested.

    name: its own, without those around it; "" for the whole, and OUTSIDE for what no module accounts for. type: its class, ""
    where unknown. activations and parameters (with buffers): alive at the moment. gradients: at the end of the first backward.
    """

    name: str
    type: str
    activations: int
    parameters: int
    gradients: int
    children: tuple[LayerRow, ...] = ()


@dataclass(frozen=True)
class OperatorRow:
    """A class of operators. bytes: activations that they keep for backward, each counted in the first class that keeps it.

    shared: what they keep as well, and an earlier class counts. operations: the bytes by operation (``softmax``).
    """

    name: str
    bytes: int
    shared: int
    operations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationBreakdown:
    """moment: which one it is, in words. layers: the whole. operators: empty where no backward ran."""

    moment: str
    layers: LayerRow
    operators: tuple[OperatorRow, ...] = ()
