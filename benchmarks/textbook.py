"""The textbook memory of a training step, for comparison with a measured one: bytes for each parameter, and activations.

Bytes for each parameter are those of the usual guides (Hugging Face's "model memory anatomy", the ml-engineering book); the
activations of a transformer layer are those of Korthikanti et al., "Reducing Activation Recomputation" (2205.05198), written for
any size of a value. Pure arithmetic: nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_VALUE_BYTES = {"fp32": 4, "bf16": 2, "autocast": 4}
_STATES = {"sgd": 0, "sgd+momentum": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
PRECISIONS = tuple(_VALUE_BYTES)
OPTIMIZERS = tuple(_STATES)


@dataclass(frozen=True)
class PerParameter:
    """Bytes for each parameter. autocast: parameters, gradients and states in float32; the casts live in the activations."""

    parameters: float
    gradients: float
    optimizer_state: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_state


def textbook(optimizer: str, precision: str) -> PerParameter:
    """What the guides say. optimizer and precision: of OPTIMIZERS and PRECISIONS; ValueError for another."""
    if optimizer not in _STATES or precision not in _VALUE_BYTES:
        raise ValueError(
            f"no textbook figure for {optimizer} in {precision}: optimizers are {', '.join(OPTIMIZERS)}, precisions "
            f"{', '.join(PRECISIONS)}"
        )
    size = _VALUE_BYTES[precision]
    return PerParameter(size, size, size * _STATES[optimizer])


def measured(categories: Mapping[str, int | None], parameter_count: int) -> PerParameter:
    """The same from a report's row: ``measured(row.categories, count)``. Raises ValueError where there are no parameters."""
    if parameter_count < 1:
        raise ValueError("a model without parameters has no bytes for each of them")
    names = ("parameters", "gradients", "optimizer_state")
    return PerParameter(*((categories.get(name) or 0) / parameter_count for name in names))


def layer_activation_bytes(
    batch: int, tokens: int, width: int, heads: int, value_bytes: int, *, scores: bool = True
) -> int:
    """What a transformer layer with dropout keeps for its backward pass, in bytes.

    With 2 bytes a value: ``tokens * batch * width * (34 + 5 * heads * tokens / width)``. scores: False for an attention that
    never writes its scores (flash).
    """
    hidden = tokens * batch * width * (16 * value_bytes + 2)
    return hidden + (batch * heads * tokens * tokens * (2 * value_bytes + 1) if scores else 0)
