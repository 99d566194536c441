"""What a trial's program would have computed and moved: FLOPs by PyTorch's own formulas, and bytes between host and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry

from gpumem_magic.looks.objects import is_a
from gpumem_magic.looks.tensors import nbytes, no_dispatch, no_functions
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_TO, _INTO = "aten::_to_copy", "aten::copy_"


class Costs:
    """Counts from now on, in a process that has no other program: nothing is put back.

    engine: the virtual machine's. iterations: how many of training have ended by now.
    """

    def __init__(self, engine: Any, iterations: Callable[[], int]) -> None:
        self._iterations = iterations
        self._flops: Counter[int] = Counter()
        self._moved: Counter[int] = Counter()
        self._perform = engine.perform
        self._inside = False
        engine.perform = self._counted

    def of_one(self) -> tuple[int, int]:
        """FLOPs and bytes moved in the last whole iteration; of all where there were none."""
        count = self._iterations()
        return (self._flops[count - 1], self._moved[count - 1]) if count else (self._flops.total(), self._moved.total())

    def _counted(self, func: Any, args: Any, kwargs: Any, device: int, answer: Any = None) -> Any:
        formula = None if self._inside else flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is None:
            out = self._perform(func, args, kwargs, device, answer)
            if (name := func.name()) in (_TO, _INTO):
                self._moved[self._iterations()] += _between(*((args[0], out) if name == _TO else (args[1], args[0])))
            return out
        self._inside = True
        try:
            out = self._perform(func, args, kwargs, device, answer)
        finally:
            self._inside = False
        self._flops[self._iterations()] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def _between(source: Any, target: Any) -> int:
    """The bytes that a copy takes from the host to the device or back."""
    if is_a(source, VirtualTensor) == is_a(target, VirtualTensor):
        return 0
    with no_functions(), no_dispatch():
        return nbytes(target)
