"""What a program imported by name before the virtual GPU was turned on (``from torch import tensor, zeros``).

Names in `torch` are replaced while the device is on, and other modules, the notebook's among them, may hold the originals under
names of their own. Those are replaced as well, and put back. An original that is out of reach (a default argument, a closure)
calls CUDA's kernels, of which builds for the host have none: kernels of ours take their place.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from gpumem_magic.looks import objects
from gpumem_magic.looks.code import is_library_file
from gpumem_magic.looks.modules import Remembered
from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.operators.factories import Factories

# Factories without tensors among their arguments. Those that the host's own code puts together from `empty` and a kernel that
# fills it (zeros, rand, ...) are here too: one call makes one tensor, and constants are known.
_NAMES = """
    empty empty_strided empty_permuted zeros ones full eye arange linspace logspace rand randn randint randperm normal
    scalar_tensor tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window
"""

_READ = _aten._local_scalar_dense.default


class Captured:
    """Replaces other modules' names for PyTorch's functions, and CUDA's factory kernels, while it is installed."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        # How often each of our functions was held when no other module had a name for one.
        self._held: list[int] = []

    def install(self, patches: Patches) -> None:
        """To be called after all of PyTorch's names have been replaced."""
        kernels = [
            (operator, self._maker(name))
            for name in _NAMES.split()
            for operator in _without_tensors(getattr(torch.ops.aten, name))
        ]
        # `torch.tensor([x[0], x[1]])` reads numbers of the device past everything that is ours.
        patches.kernels("CUDA", [*kernels, (_READ, self._read)])
        # What was imported meanwhile is put back, too, from other libraries as well.
        patches.also_undo(lambda: self._put_back(patches))
        if not _exchange(
            [(before, new) for home, before, new in _functions(patches) if f"{home}.".startswith("torch.")]
        ):
            self._held = _counts(patches)

    def _put_back(self, patches: Patches) -> None:
        # Where all of ours are still in their places, and nobody else holds one, no name means one.
        in_place = all(vars(owner).get(name) is placed for owner, name, _, placed in patches.exchanged())
        if not in_place or _counts(patches) != self._held:
            _exchange([(new, before) for _, before, new in _functions(patches)])

    def _read(self, tensor: torch.Tensor) -> Any:
        return self._factories.engine.handle(_READ, (), (tensor,), {})

    def _maker(self, name: str) -> Any:
        # The functions of `torch` before anybody replaced them.
        original = getattr(torch._C._VariableFunctions, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            index = self._factories.index_of(kwargs.get("device"))
            return self._factories.make(original, index or 0, args, kwargs)

        return make


def _without_tensors(packet: Any) -> list[Any]:
    found = []
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        arguments = operator._schema.arguments
        named = {argument.name for argument in arguments}
        if "device" in named and not any(str(argument.type) == "Tensor" for argument in arguments):
            found.append(operator)
    return found


def _functions(patches: Patches) -> list[tuple[str, Any, Any]]:
    """(module, original, what stands for it) of the public functions and types of modules that are replaced."""
    return [
        (owner.__name__, before, placed)
        for owner, name, before, placed in patches.exchanged()
        if isinstance(owner, ModuleType) and not name.startswith("_") and callable(before) and callable(placed)
    ]


def _counts(patches: Patches) -> list[int]:
    """How many references there are to each function of ours."""
    return [sys.getrefcount(placed) for _, _, placed in _functions(patches)]


# Modules of Python's and of installed packages in which no name was found, and how many names each had: they are looked through
# again once they have more. (One that gives an old name a function of ours later goes on with PyTorch's: see `patching`.)
_barren: Remembered[int] = Remembered()


def _exchange(pairs: list[tuple[Any, Any]]) -> bool:
    """Every name in a loaded module, not of PyTorch's or of this package, that means the first of a pair means the second.

    Says whether there was one.
    """
    by_id = {id(old): (old, new) for old, new in pairs}
    looked_for = frozenset(by_id)
    found = False
    for key, module in list(sys.modules.items()):
        if key.startswith(("torch.", "gpumem_magic.")) or key in ("torch", "gpumem_magic"):
            continue
        names: Any = getattr(module, "__dict__", None)
        if type(names) is not dict or len(names) == _barren.of(module):
            continue
        # Nearly every module has none of them, which is seen without a step of Python's for each of its names.
        if looked_for.isdisjoint(map(id, list(names.values()))):
            if type(module) is ModuleType and is_library_file(str(names.get("__file__"))):
                _barren.note(module, len(names))
        else:
            names.update({name: by_id[id(value)][1] for name, value in objects.items(names) if id(value) in by_id})
            found = True
    return found
