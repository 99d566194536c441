"""PyTorch's optimizers by what their steps can do."""

from __future__ import annotations

# On all parameters at once (``foreach``), or on one after the other.
OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
# In one kernel (``fused``).
FUSED = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})
