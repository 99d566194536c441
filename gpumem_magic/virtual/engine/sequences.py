"""Calls of PyTorch's functions that come down to several operators: the next one like them runs these on the host one after the
other, and takes and gives back the memory that each took on the device.

So a function costs its way through C++'s dispatcher and back once, and not for each operator that it is made of. As in
`functions`, nothing may be tracked. The operators are the very ones that ran before, so that the values are the same to the last
digit. What is kept here holds no tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gpumem_magic.looks.tensors import is_view
from gpumem_magic.virtual.engine.alike import Answer
from gpumem_magic.virtual.engine.tensors import VirtualTensor, is_ordinary

# A function with more operators is no short one, and takes long enough itself.
_MOST = 32
_CPU = torch.device("cpu")
# (The name is another's while a device is on.)
_DEVICE = torch.device


class Handed(NamedTuple):
    """The function's own argument of that number."""

    number: int


class Made(NamedTuple):
    """A tensor that an operator made, by its number among all of the sequence."""

    number: int


class OperatorStep(NamedTuple):
    """An operator. args, kwargs: with `Handed` and `Made` in place of tensors. function: what the host calls. results: the
    numbers of the tensors that it gives; new: of those that lie in memory of their own, with their bytes. gone: of those whose
    memory was given back before.
    """

    func: Any
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Answer
    results: tuple[int | None, ...]
    new: tuple[tuple[int, int], ...]
    gone: tuple[int, ...]


class OperatorSequence(NamedTuple):
    """Operators in their order. made: how many tensors they give. out: the number of the one that the function returns; None
    where that is its first argument, or (silently) nothing. writes: how often the first argument is written to. memory, like: in
    whose memory the returned tensor lies, and how, where that is another one's. left: those whose memory is given back in the
    end, or after an error, in that order."""

    steps: tuple[OperatorStep, ...]
    device: int
    made: int
    out: int | None
    memory: int | None
    like: Any
    writes: int
    silently: bool
    left: tuple[int, ...]


class _SequenceEngine(Protocol):
    alike: Any
    table: Any

    def again_on_host(self, func: Any, args: Any, kwargs: Any, answer: Answer) -> Any:
        """What the host calls for an operator whose memory follows from how its arguments look; None for others."""


class SequenceListener:
    """Hears the operators of one call of a function. given: its arguments, those in lists one by one."""

    def __init__(self, engine: _SequenceEngine, given: Sequence[Any]) -> None:
        self._engine = engine
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        # (Which of two an operator's argument was is not known where they are one.)
        self.fits = len({id(one) for one in tensors}) == len(tensors)
        # By `id`: what a tensor is in the sequence, a weak reference to it, and what the memory that it looks at is of.
        self._known: dict[int, tuple[Any, Any, Any]] = {
            id(one): (Handed(number), weakref.ref(one), Handed(number))
            for number, one in enumerate(given)
            if isinstance(one, torch.Tensor)
        }
        self._steps: list[OperatorStep] = []
        # The placements of new memory that is still there, by the number of its first tensor.
        self._lives: dict[int, Any] = {}
        self._made = self._writes = 0
        self._device: int | None = None

    def heard(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run. Inside `no_functions`."""
        if self.fits:
            self.fits = len(self._steps) < _MOST and self._note(func, args, kwargs, out)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        answer = self._engine.alike.found(self._engine.alike.looks(func, args, kwargs))
        if answer is None or (self._device is not None and answer.device != self._device):
            return False
        self._device = answer.device
        function = self._engine.again_on_host(func, args, kwargs, answer)
        if function is None:
            return False
        try:
            wired = tuple(self._wired(arg) for arg in args)
            named = {name: self._wired(arg) for name, arg in kwargs.items()}
        except LookupError:
            return False
        gone = tuple(number for number, placement in self._lives.items() if placement.watch() is None)
        for number in gone:
            del self._lives[number]
        flat = (*args, *kwargs.values())
        if func._schema.is_mutable and not self._writes_well(answer, args):
            return False
        outs = (out,) if answer.kind is None else out
        if len(outs) != len(answer.made):
            return False
        results: list[int | None] = []
        new: list[tuple[int, int]] = []
        for one, made in zip(outs, answer.made, strict=True):
            if made is None or isinstance(made, int):
                results.append(None)
                continue
            if type(one) is not VirtualTensor:
                return False
            number = self._made
            self._made += 1
            results.append(number)
            if made[3] is None:
                placement = self._engine.table.find(one.untyped_storage())
                if placement is None:
                    return False
                self._lives[number] = placement
                new.append((number, placement.nbytes))
                memory: Any = Made(number)
            else:
                memory = self._memory(flat[made[3]])
            self._known[id(one)] = Made(number), weakref.ref(one), memory
        self._steps.append(OperatorStep(func, function, wired, named, answer, tuple(results), tuple(new), gone))
        return True

    def _writes_well(self, answer: Answer, args: Any) -> bool:
        """Whether an operator writes to memory of the sequence's own, or to the function's first argument."""
        if answer.made != [0] or answer.kind is not None:
            return False
        memory = self._memory(args[0])
        if isinstance(memory, Handed):
            self._writes += 1
            return memory.number == 0
        return True

    def _memory(self, tensor: Any) -> Any:
        return self._known[id(tensor)][2]

    def _wired(self, arg: Any) -> Any:
        """An argument as the sequence has it. Raises LookupError for a tensor that nobody knows."""
        if isinstance(arg, torch.Tensor):
            place, known, _ = self._known[id(arg)]
            if known() is not arg:
                raise LookupError
            return place
        if type(arg) in (list, tuple):
            return type(arg)(self._wired(one) for one in arg)
        return _CPU if type(arg) is _DEVICE else arg

    def operators(self, first: Any, out: Any) -> OperatorSequence | None:
        """What was heard, after the function has returned; None where it may not be run so. first: the function's argument."""
        if not self.fits or not self._steps or self._device is None:
            return None
        number: int | None = None
        memory: int | None = None
        like: Any = None
        if out is None or out is first:
            if not self._writes or not is_ordinary(first):
                return None
        else:
            known = self._known.get(id(out))
            if self._writes or type(out) is not VirtualTensor or known is None or known[1]() is not out:
                return None
            # (Autograd has to know of a view.)
            if not isinstance(known[0], Made) or not isinstance(known[2], Made) or is_view(out) or out.requires_grad:
                return None
            number, memory = known[0].number, known[2].number
            if number != memory:
                like = out.size(), out.stride(), out.dtype, out.storage_offset()
        if any(number != memory and placement.watch() is not None for number, placement in self._lives.items()):
            return None
        return OperatorSequence(
            tuple(self._steps),
            self._device,
            self._made,
            number,
            memory,
            like,
            self._writes,
            out is None,
            self._left(memory),
        )

    def _left(self, memory: int | None) -> tuple[int, ...]:
        """Whose memory waits to be given back, in the order in which they went, and then those that went before."""
        order = self._engine.table.waiting()
        last = sorted(
            (order.get(id(placement.watch), 0), number) for number, placement in self._lives.items() if number != memory
        )
        left = [number for _, number in last]
        return (*left, *(number for number in range(self._made) if number not in left and number != memory))
