"""The program's own functions that an error left, and which of their variables had graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gpumem_magic.looks import tensors
from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.objects import is_sequence, locals_of, members, traceback_of

# So many elements of a list are looked at.
_ELEMENTS = 100


@dataclass
class LeftFunctions:
    """graphs: of each function, outermost first, the variables that had graphs, lists first. modules: those that were variables
    there, for a look, not to be kept."""

    graphs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """```outputs` and `losses` of evaluate()``: the outermost's that has any; \"\" where there is none."""
        function, names = next(iter(self.graphs.items()), ("", ()))
        return f"{' and '.join(f'`{name}`' for name in names[:2])} of {function}()" if names else ""


def left_functions(error: BaseException) -> LeftFunctions:
    found = LeftFunctions()
    traceback = traceback_of(error)
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if whose(frame.f_code.co_filename) != OWN or frame.f_code.co_name.startswith("<"):
            continue
        variables = locals_of(frame)
        found.modules.update({name: one for name, one in variables.items() if tensors.is_module(one)})
        lists = [name for name, one in variables.items() if is_sequence(one) and _has_graphs(one)]
        alone = [name for name, one in variables.items() if tensors.is_tensor(one) and tensors.grad_fn(one) is not None]
        if lists or alone:
            found.graphs.setdefault(frame.f_code.co_name, (*lists, *alone))
    return found


def _has_graphs(sequence: Any) -> bool:
    return any(
        tensors.is_tensor(one) and tensors.grad_fn(one) is not None for one in islice(members(sequence), _ELEMENTS)
    )
