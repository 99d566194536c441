"""Random numbers that compiled code draws a second time in its backward pass: of dropout and of attention that are recomputed.

PyTorch's compiler wraps such an operator in one that sets the generator's state around it, and has the rule for a card under the
card's key. Tensors of a virtual device are asked by their class, so that it is put there, too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.modes import OperatorMode
from gpumem_magic.virtual.engine.tensors import VirtualParameter, VirtualTensor

# Since 2.8, and before it; tested on 2.13.
_NAMES = ("graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state")


def prepare(module: ModuleType, patches: Patches) -> None:
    for name in _NAMES:
        operator: Any = getattr(module, name, None)
        on_a_card = operator and operator.py_kernels.get(torch._C.DispatchKey.CUDA)
        if on_a_card:
            _answer_for(operator.python_key_table, on_a_card, patches)


def _answer_for(rules: dict[Any, Any], on_a_card: Any, patches: Patches) -> None:
    def under_the_mode(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:  # (it was popped: what the operator wraps may make a tensor from nothing)
            return on_a_card(*args, **kwargs)

    def take_out() -> None:
        for kind in (VirtualTensor, VirtualParameter, OperatorMode):
            rules.pop(kind, None)

    patches.also_undo(take_out)
    rules.update({VirtualTensor: on_a_card, VirtualParameter: on_a_card, OperatorMode: under_the_mode})
