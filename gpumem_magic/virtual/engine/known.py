"""A virtual GPU that knows what is small (``values=auto``): times, masks, indices, schedules, labels, flags, counters.

A storage has a twin on the host while its values are known: those that were copied from the host or made of constants, and all
that is computed from them, up to a size. An operator with an unknown argument makes unknown results, and what it writes into is
known no longer. Where all is tiny, an unknown argument counts as what it is guessed to be, and the result is not *sure*:
who reads it reads a stand-in. What is of equal elements is known in any size (`uniform`). Nothing is drawn from the host's random
generator.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from gpumem_magic.failures import is_own_failure
from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import few, guesses, refused_values, shares, tallies, triangles, uniform, values
from gpumem_magic.virtual.engine.alike import Answer
from gpumem_magic.virtual.engine.calls import users_line, with_size
from gpumem_magic.virtual.engine.computing import (
    ComputingEngine,
    dim_of_size,
    has_values,
    runs_in_parts,
    written_by,
)
from gpumem_magic.virtual.engine.host_calls import FactoryCall, HostCall, host_keys
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.refusals import CannotRun
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import GUESS, KNOWN, VirtualTensor, all_attributes
from gpumem_magic.virtual.engine.triangles import Shape, Triangle
from gpumem_magic.virtual.engine.twins import leaves, mapped, on_host
from gpumem_magic.virtual.engine.uniform import Uniform
from gpumem_magic.virtual.engine.values import Known
from gpumem_magic.virtual.engine.ways import OF_SHAPES, OVERWRITING, SENDING, Way, sized_by_values, way_of

# The largest view of known values that an operator is run on, in elements: more than is kept, for sums over what is expanded.
_MOST_READ = 1 << 20
# The largest mask of which only a share is known that is written on the host with its ones, in elements: that takes eight times
# its memory meanwhile.
_MOST_FILLED = 1 << 24
# What may bring a large matrix to the host; others are not run on one that is known by its two elements.
_COPYING = set(overloads("_to_copy copy_"))
# What asks whether numbers are equal, or are not.
_EQUAL, _OTHER = set(overloads("eq.Scalar eq.Tensor")), set(overloads("ne.Scalar ne.Tensor"))
# How the names of factories begin that draw random numbers.
_DRAWING = ("rand", "normal")


class KnownEngine(ComputingEngine):
    """Runs operators on virtual tensors, and on twins where all arguments have one and the results are small."""

    def __init__(self, memory: Memory, device_count: int, bounds: values.Bounds) -> None:
        super().__init__(memory, device_count, StorageTable(memory.malloc, memory.free))
        self.bounds = bounds
        # The storages that a captured graph writes to.
        self.tape: list[Placement] | None = None
        self._given_now: dict[int, torch.Tensor] = {}
        self._freshly = 0
        # Whether a bound was noted (`few`).
        self._bounded = False
        # Whether choices were noted (`shares`).
        self._spread = False

    # ---- what is known

    def known(self, tensor: Any) -> Known | None:
        if tensor.layout is not torch.strided:
            return None
        given = all_attributes(tensor).get(KNOWN)
        if type(given) is values.Given and given.version == values.version(tensor):
            return Known(given.host, True, True)
        with self.lock, torch._C.DisableTorchFunction():
            placement = self._placed_and_known(tensor)
            if placement is None:
                return None
            with no_functions(), host_keys():
                equal = isinstance(placement.twin, Uniform)
                host = placement.twin.seen_as(tensor) if equal else self.twins.view(tensor)
                return Known(host, placement.sure, placement.supplied)

    def _placed_and_known(self, tensor: Any) -> Placement | None:
        """The placement of a dense tensor's storage where that has a twin."""
        placement = self.table.find(tensor.untyped_storage())
        if placement is None or placement.twin is None or placement.twin is values.BLANK:
            return None
        if placement.watch() is None or (isinstance(placement.twin, Uniform) and not placement.twin.fits(tensor)):
            return None
        return placement

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor | None:
        found = self.known(tensor)
        return found.host if found is not None and found.exact else None

    def at_most(self, tensor: Any) -> int | None:
        placement = self.table.find(tensor.untyped_storage()) if _is_dense(tensor) else None
        if placement is None:
            return None
        apart = few.apart(tensor)
        if placement.twin is not None and apart == tensor.numel():
            if type(placement.twin) is Uniform and placement.sure:
                return few.Surely(tensor.numel() if bool(placement.twin.element) else 0)
            found = None if isinstance(placement.twin, Uniform) else self.known(tensor)
            if found is not None and found.exact:
                with no_functions(), host_keys():
                    return few.Surely(found.host.count_nonzero())
        told = None if placement.told is None else placement.told.get(few.look_of(tensor))
        if told is not None or placement.few is None:
            return told
        # (Where the same element shows at several places, they are all of one kind.)
        times = tensor.numel() // apart if apart else 0
        is_whole = apart * tensor.element_size() == placement.nbytes
        most = min(placement.few if is_whole else int(placement.few), apart)
        return type(most)(most * times)

    def at_most_around(self, view: Any) -> int | None:
        if not _is_dense(view):
            return None
        storage = view.untyped_storage()
        placement = self.table.find(storage) if view.numel() * view.element_size() < storage.nbytes() else None
        if placement is None:
            return None
        if type(placement.twin) is Uniform and placement.sure and placement.twin.fits(view):
            return few.Surely(storage.nbytes() // view.element_size() if bool(placement.twin.element) else 0)
        return placement.few

    def tell(self, mask: Any, count: int) -> None:
        if _is_dense(mask):
            placement = self.twins.placement(mask)
            placement.told = {**(placement.told or {}), few.look_of(mask): few.Exactly(count)}
            self._bounded = True

    def has_each_once(self, indices: Any, dim: int) -> bool:
        placement = self.table.find(indices.untyped_storage()) if _is_dense(indices) else None
        once = None if placement is None else placement.once
        if once is None or not indices.dim() or once.version != values.version(indices):
            return False
        length, first = indices.shape[dim], indices.storage_offset() // once.stride % once.length
        return bool(indices.stride(dim) == once.stride and first + length <= once.length)

    def _hold_once(self, indices: Any, dim: int) -> None:
        if _is_dense(indices) and indices.numel() and indices.dim() and not indices.is_inference():
            once = few.Once(indices.stride(dim), indices.shape[dim], values.version(indices))
            self.twins.placement(indices).once = once

    def _bound(self, written: list[Any], out: Any, most: int | None) -> None:
        """Ends the bounds of what was written to, and notes that of a result."""
        for leaf in written:
            placement = self.table.find(leaf.untyped_storage()) if _is_dense(leaf) else None
            if placement is not None:
                placement.few = placement.told = None
        if most is not None and _is_dense(out):
            self.twins.placement(out).few = most
            self._bounded = True

    def among(self, tensor: Any) -> int | None:
        placement = self.table.find(tensor.untyped_storage()) if _is_dense(tensor) else None
        return None if placement is None else placement.among

    def share(self, tensor: Any) -> Fraction | None:
        placement = self.table.find(tensor.untyped_storage()) if _is_dense(tensor) else None
        return None if placement is None else placement.share

    def bound(self, tensor: Any) -> float | None:
        placement = self.table.find(tensor.untyped_storage()) if self._spread and _is_dense(tensor) else None
        return None if placement is None else placement.bound

    def chance(self, tensor: Any) -> float | None:
        found = self.known(tensor) if isinstance(tensor, VirtualTensor) else Known(tensor, True)
        if found is None or not found.exact or not found.host.numel() or found.host.is_meta:
            return None
        with no_functions(), host_keys():
            element = uniform.element_of(found.host)
            if element is None and found.host.numel() > _MOST_READ:
                return None
            return float((found.host if element is None else element).double().clamp(0, 1).mean())

    def kinds(self, tensor: Any) -> int | None:
        if not isinstance(tensor, VirtualTensor) or tensor.dtype == torch.bool or not shares.is_counted(tensor):
            return None
        found = self.known(tensor)
        if found is None or not found.exact or not found.host.numel() or found.host.is_meta:
            return None
        with no_functions(), host_keys():
            lowest, highest = map(int, found.host.aminmax())
        return highest - lowest + 1 if highest - lowest + 1 < found.host.numel() else None

    def _have_spread(self, written: list[Any], out: Any, found: shares.Spread | None) -> None:
        """Ends what was known of choices in what was written to, and notes it of a result."""
        for leaf in written:
            placement = self.table.find(leaf.untyped_storage()) if _is_dense(leaf) else None
            if placement is not None:
                placement.among = placement.share = placement.bound = None
        if found is None:
            return
        made = out if found.place is None else out[found.place]
        # (What is there is noted for a whole storage.)
        if not _is_dense(made) or not _owns_storage(made):
            return
        self._spread = True
        if found.total is None or made.numel() > values.MOST_GUESSED:
            placement = self.twins.placement(made)
            placement.among, placement.bound = found.among, found.bound
            placement.share = found.share if found.total is None else Fraction(found.total[0], made.numel())
        elif self.bounds.follows and self.tape is None and self.host_of(made) is None:
            with no_functions(), host_keys():
                counts = shares.spread_evenly(*found.total, made)
            self._have(made, counts, sure=False)

    def learn(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        if self._may_learn(tensor) and host.layout is torch.strided:
            self._have(tensor, host)

    def _may_learn(self, tensor: Any) -> bool:
        free = not self._nested and self.tape is None
        return free and tensor.layout is torch.strided and self.bounds.hold(tensor)

    def fill(self, tensor: VirtualTensor, call: FactoryCall, device: int) -> None:
        if call.name == "randperm":
            self._hold_once(tensor, 0)
        if call.name == "eye" and not self.bounds.hold(tensor):
            self._bound([], tensor, few.Surely(min(tensor.shape)))
        draws = call.name.startswith(_DRAWING)
        if not draws and not self.bounds.hold(tensor):
            with no_functions(), host_keys():
                element = call.one()
            if element is not None and not self._nested and self.tape is None and uniform.is_whole(tensor):
                self._have_equal(tensor, element)
        elif not draws and self._may_learn(tensor):
            with no_functions(), host_keys():
                host = call()
            self.learn(tensor, host)
        elif draws and call.name.startswith("randint") and tensor.numel() <= values.MOST_GUESSED:
            # What is worked out of one such number agrees with it: a slice from `i` to `i + n` has n elements.
            with no_functions(), host_keys():
                self.guess(tensor, shares.drawn_evenly(tensor, *call.bounds()))
        elif draws and self.bounds.guesses:
            guess = guesses.of_factory(call.name)
            if guess is not None:
                all_attributes(tensor)[GUESS] = guess
        among = shares.of_factory(call.name, *call.bounds()) if draws else None
        if among is not None and not self._nested and self.tape is None and _is_dense(tensor):
            self._spread = True
            placement = self.twins.placement(tensor)
            placement.among, placement.bound = among, shares.lowest_drawn(among, *call.bounds())

    def supply(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        if not _owns_storage(tensor):
            all_attributes(tensor)[KNOWN] = values.Given(host, values.version(tensor))
            return
        self._have(tensor, host, supplied=True)

    def twin_of(self, storage: Any) -> Any:
        """The host's bytes of a storage on a device, where all of them are known for sure."""
        placement = self.table.find(storage)
        if placement is None or not isinstance(placement.twin, torch.UntypedStorage) or not placement.sure:
            return None
        return placement.twin if placement.twin.nbytes() >= storage.nbytes() else None

    def guess(self, tensor: VirtualTensor, host: torch.Tensor, sure: bool = False) -> None:
        if (
            self.tape is not None
            or tensor.layout is not torch.strided
            or tensor.numel() > self.bounds.most_guessed(tensor)
        ):
            return
        if _owns_storage(tensor):
            self._have(tensor, host, sure=sure)
            return
        # Of what lies around it, as much is known as before.
        placement = self._placed_and_known(tensor)
        if placement is not None and not isinstance(placement.twin, Uniform):
            with self.lock, no_functions(), host_keys():
                self.twins.view(tensor).copy_(host)
            placement.sure = placement.sure and sure

    def _have(self, tensor: VirtualTensor, host: torch.Tensor, sure: bool = True, supplied: bool = False) -> None:
        with self.lock, no_functions(), host_keys():
            placement = self.twins.placement(tensor)
            placement.put(None)
            self.twins.keep(tensor, host.detach(), (host,))
            placement.sure, placement.supplied = sure, supplied
        all_attributes(tensor)[KNOWN] = True

    def _have_equal(self, tensor: VirtualTensor, element: torch.Tensor, supplied: bool = False) -> None:
        """All elements of a tensor that is whole are equal to this one."""
        if self.bounds.hold(tensor):
            # That may be written part by part.
            self._have(tensor, element.expand(tensor.size()), supplied=supplied)
            return
        self._have_short(tensor, Uniform(element, tensor.untyped_storage().nbytes()), supplied)

    def blank(self, tensor: VirtualTensor) -> None:
        """Nothing was written into a new tensor yet: what is written part by part may become known."""
        if self._may_learn(tensor):
            self.twins.placement(tensor).put(values.BLANK)
            all_attributes(tensor)[KNOWN] = True

    def forget(self, tensor: Any) -> None:
        all_attributes(tensor).pop(KNOWN, None)
        if tensor.layout is torch.strided:
            placement = self.table.find(tensor.untyped_storage())
            if placement is not None:
                placement.put(None)

    def mark(self, tensor: VirtualTensor) -> None:
        """After a tensor was put on another storage."""
        all_attributes(tensor).pop(KNOWN, None)
        if self._placed_and_known(tensor) is not None:
            all_attributes(tensor)[KNOWN] = True

    # ---- operators

    def perform(self, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None = None) -> Any:
        known = self._ways.get(id(func))
        if known is None:
            known = self._ways[id(func)] = way_of(func), func
        way = known[0]
        if self._nested:
            return super().perform(func, args, kwargs, device)
        if way.refuses is not None and self.tape is None and any_known((args, *kwargs.values())):
            self._refuse(way, func, args, kwargs, device)
        if way.looks:
            out = super().perform(func, args, kwargs, device)
            if any_known(args):
                _mark_views(args, out)
            if args and isinstance(args[0], VirtualTensor):
                guess = all_attributes(args[0]).get(GUESS)
                if guess is not None:
                    _guess_views(out, guess)
            return out
        if torch.is_inference_mode_enabled() and runs_in_parts(func):
            # Each of those is followed.
            return super().perform(func, args, kwargs, device)
        self._nested = True
        try:
            most = few.asked(way.few, self, args, kwargs) if self._bounded or way.begins else None
            spread = shares.asked(way.spread, self, args, kwargs) if self._spread or way.chooses else None
            if way.makes or any_known(args) or (kwargs and any_known(kwargs.values())):
                out = self._followed(way, func, args, kwargs, device)
            else:
                out = super().perform(func, args, kwargs, device, answer)
                if way.writes:
                    self._drop(func, args, kwargs)
                if way.guess is not None and self.bounds.guesses:
                    guesses.note(way.guess, self.fresh, out, args, kwargs)
            if spread is not None or self._spread:
                self._have_spread(written_by(func, args, kwargs) if way.writes else [], out, spread)
            if way.orders:
                self._hold_once(out[1], few.dim_of_order(func, args, kwargs))
            if self._bounded or most is not None:
                self._bound(written_by(func, args, kwargs) if way.writes else [], out, most)
            if way.counts:
                self._count(args[0], out)
            return out
        finally:
            self._nested = False
            self._ahead = None

    def _count(self, mask: Any, number: Any) -> None:
        count = tallies.all_or_none(mask, number)
        if count is None and tallies.is_count(mask, number):
            count = tallies.note(self, mask, number, users_line())
        if count is not None:
            with no_functions(), host_keys():
                host = _aten.full.default(number.shape, count, dtype=number.dtype)
            self.guess(number, host)

    def _refuse(self, way: Way, func: Any, args: Any, kwargs: Any, device: int) -> None:
        """Raises what is to be said of values that the operator's kernel refuses, where they are known.

        What does not go together for other reasons (shapes, types) is refused before a kernel runs, and said instead.
        """
        assert way.refuses is not None
        with self.lock, no_functions(), host_keys():
            error = refused_values.refusal(func, way.refuses, self._looked_through, args, kwargs)
        if error is None:
            return
        if not way.first:
            self._nested = True
            try:
                super().perform(func, args, kwargs, device)
            finally:
                self._nested = False
        raise error

    def _looked_through(self, tensor: Any) -> torch.Tensor | None:
        """The values of an argument on the host where they are known for sure and not too many to look at."""
        # (An overload may take a number where another takes a tensor: `repeat_interleave(x, 2)`.)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() > _MOST_READ:
            return None
        if isinstance(tensor, VirtualTensor):
            return self.host_of(tensor)
        return tensor if type(tensor) is torch.Tensor and tensor.is_cpu else None

    def _followed(self, way: Way, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        """Runs an operator, and runs it on the host as well where that is possible and cheap."""
        found = self._all_known(func, args, kwargs) if way.computes and self.tape is None else None
        compares = found is not None and not found.sure and _asks_whether_equal(func, args)
        if compares:
            # No number that is only guessed is equal to a given one.
            found = None
        ahead = None
        # (A size that is only guessed is not the one that the same mask gives elsewhere: `Engine.selected`.)
        if found is not None and way.first and (found.sure or not sized_by_values(func)):
            ahead = self._ahead = self._attempt(found, func, args, kwargs, device)
            self._along = dim_of_size(func, args, kwargs)
        try:
            if ahead is not None and func is _aten.repeat_interleave.Tensor:
                kwargs = with_size(kwargs, ahead[1].shape[0])
            out = super().perform(func, args, kwargs, device)
        except CannotRun:
            if ahead is None:
                raise
            out = self._out_of(func, args, kwargs, ahead[1], device)
        if (
            found is not None
            and not found.sure
            and not found.written
            and _is_followed(out)
            and self.host_of(out) is not None
        ):
            # The operator's rule knows more than follows from guesses.
            return out
        if found is not None and has_values(func, args, out) and self._are_small(out, found):
            if ahead is None:
                ahead = self._attempt(found, func, args, kwargs, device)
            if ahead is not None and self._kept(out, ahead, found):
                return out
        if way.equal and self._are_equal(func, args, kwargs, out, device):
            return out
        if way.writes:
            self._drop(func, args, kwargs)
        if compares:
            all_attributes(out)[GUESS] = float(func in _OTHER)
        elif way.guess is not None and self.bounds.guesses:
            guesses.note(way.guess, self.fresh, out, args, kwargs)
        return out

    def _are_equal(self, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> bool:
        """Has the elements of a result be known where they are all equal, or a triangle's, since those of each argument are."""
        if self.tape is not None or not isinstance(out, VirtualTensor) or out.layout is not torch.strided:
            return False
        written = written_by(func, args, kwargs)
        tensors = [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, torch.Tensor)]
        of_no_matter = tensors[:1] if func in OVERWRITING or func in OF_SHAPES else []
        read = tensors[len(of_no_matter) :]
        if any(one is not out for one in written) or any(_is_unknown(one) or self.away.holds(one) for one in read):
            return False
        found = _Arguments(written)
        shape: Shape | None = None
        with self.lock, no_functions(), host_keys():
            for leaf in of_no_matter:
                found.given[id(leaf)] = _aten.zeros.default((), dtype=leaf.dtype)
            for leaf in read:
                several, its = self._elements(leaf, found)
                if several is None or (its is not None and shape not in (None, its)):
                    return False
                found.given[id(leaf)] = several
                shape = its or shape
            if shape is not None and not triangles.follows(func):
                return False
            if triangles.cuts(func):
                made = triangles.cut(func, args, kwargs, found.given[id(args[0])], out)
                return made is not None and self._have_triangle(out, *made, found.supplied)
            for leaf in {id(leaf): leaf for leaf in tensors}.values():
                element = found.given[id(leaf)]
                # Of a triangle there are two of each.
                sizes = (1,) * (leaf.dim() - 1) + (1 if shape is None else 2,) if leaf.dim() else ()
                found.given[id(leaf)] = element.expand(sizes[-1:]).reshape(sizes).clone()
        done = self._attempt(found, func, *uniform.for_one(func, args, kwargs), device)
        if done is None or type(done[1]) is not torch.Tensor or done[1].dtype is not out.dtype:
            return False
        with self.lock, no_functions(), host_keys():
            equal = uniform.element_of(done[1])
            if equal is None:
                return shape is not None and self._have_triangle(out, done[1].reshape(-1), shape, found.supplied)
            if uniform.is_whole(out):
                self._have_equal(out, equal, found.supplied)
                return True
            # A part was overwritten with what is all around it.
            around = self._placed_and_known(out) if written else None
            return around is not None and isinstance(around.twin, Uniform) and around.twin.holds(equal) and around.sure

    def _elements(self, leaf: torch.Tensor, found: _Arguments) -> tuple[torch.Tensor | None, Shape | None]:
        """A copy of what all elements of an argument surely are, or the two that are in these places."""
        host = leaf
        if isinstance(leaf, VirtualTensor):
            placement = self._placed_and_known(leaf)
            if placement is not None and type(placement.twin) is Triangle:
                found.supplied = found.supplied or placement.supplied
                return placement.twin.seen_by(leaf) or (None, None)
            known = self.known(leaf)
            if known is None or not known.exact:
                return None, None
            found.supplied = found.supplied or known.supplied
            host = known.host
        element = uniform.element_of(host)
        return (element, None) if element is not None else triangles.of_host(host) or (None, None)

    def _have_triangle(self, tensor: VirtualTensor, elements: torch.Tensor, shape: Shape, supplied: bool) -> bool:
        twin = triangles.twin(tensor, elements, shape)
        if twin is None:
            return False
        element = uniform.element_of(shape.there(elements))
        if element is not None:
            self._have_equal(tensor, element, supplied)
        elif self.bounds.hold(tensor):
            self._have(tensor, twin.seen_as(tensor), supplied=supplied)
        else:
            self._have_short(tensor, twin, supplied)
        return True

    def _have_short(self, tensor: VirtualTensor, twin: Uniform, supplied: bool) -> None:
        placement = self.twins.placement(tensor)
        placement.put(twin)
        placement.sure, placement.supplied = True, supplied
        all_attributes(tensor)[KNOWN] = True

    def fresh(self) -> float:
        """A number like a loss: small, positive, and smaller each time."""
        self._freshly += 1
        return 1 / (1 + 0.01 * self._freshly)

    def guessed(self, tensor: VirtualTensor, host: torch.Tensor) -> torch.Tensor:
        share = self.share(tensor) if self._spread and shares.is_counted(tensor) else None
        if share is not None and host.numel() <= _MOST_FILLED:
            with no_functions(), host_keys():
                return shares.fill(host, share)
        guess = all_attributes(tensor).get(GUESS)
        return guesses.fill(host, self.bound(tensor) if guess is None else guess)

    def _attempt(
        self, found: _Arguments, func: Any, args: Any, kwargs: Any, device: int
    ) -> tuple[HostCall, Any, Any] | None:
        for leaf in found.blank:
            placement = self.twins.placement(leaf)
            placement.put(None)
            placement.sure, placement.supplied = True, False
        self._given_now = found.given
        try:
            return self._computed(func, args, kwargs, device)
        except Exception as error:  # no value is worth an error of the program's
            if not is_own_failure(error):
                raise
            return None

    def _kept(self, out: Any, ahead: tuple[HostCall, Any, Any], found: _Arguments) -> bool:
        try:
            self._keep(out, *ahead)
        except Exception as error:
            if not is_own_failure(error):
                raise
            for leaf in leaves(out):
                if isinstance(leaf, VirtualTensor):
                    self.forget(leaf)
            return False
        for leaf in (*leaves(out), *found.written):
            if isinstance(leaf, VirtualTensor):
                placement = self.twins.placement(leaf)
                placement.sure, placement.supplied = found.sure, found.supplied
                all_attributes(leaf)[KNOWN] = True
        return True

    def _all_known(self, func: Any, args: Any, kwargs: Any) -> _Arguments | None:
        """How sure the values of all arguments are; None where one is not known, and not to be guessed."""
        found = _Arguments(written_by(func, args, kwargs))
        unknown: list[Any] = []
        if func in OF_SHAPES:
            return self._of_shape(args[0], found)
        for leaf in leaves([*args, *kwargs.values()]):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not isinstance(leaf, VirtualTensor):
                if leaf.numel() > _MOST_READ or leaf.is_meta:
                    return None
                found.sure = found.sure and not self.away.holds(leaf)
                continue
            if leaf.layout is not torch.strided or leaf.numel() > _MOST_READ:
                return None
            if type(all_attributes(leaf).get(KNOWN)) is values.Given:
                known = self.known(leaf)
                if known is not None:
                    found.supplied = found.any = True
                    found.given[id(leaf)] = known.host
                    continue
            placement = self._placed_and_known(leaf)
            if placement is not None and type(placement.twin) is Triangle and func not in _COPYING:
                return None
            equal = placement is not None and isinstance(placement.twin, Uniform)
            if leaf is args[0] and self._is_overwritten(func, args):
                if placement is None or equal:
                    found.blank.append(leaf)
            elif placement is not None:
                if equal:
                    if any(leaf is one for one in found.written):
                        return None
                    found.given[id(leaf)] = placement.twin.seen_as(leaf)
                found.sure = found.sure and placement.sure
                found.supplied = found.supplied or placement.supplied
                found.any = True
            else:
                unknown.append(leaf)
        return found if self._guessed(func, unknown, found) else None

    def _of_shape(self, like: Any, found: _Arguments) -> _Arguments | None:
        """For an operator that asks a tensor for its shape and type alone: one without values stands for it."""
        if like.layout is not torch.strided or like.numel() > _MOST_READ:
            return None
        with no_functions(), host_keys():
            found.given[id(like)] = _aten.empty_strided.default(
                like.size(), like.stride(), dtype=like.dtype, device=torch.device("cpu")
            )
        return found

    def _is_overwritten(self, func: Any, args: Any) -> bool:
        """Whether what was in the first argument's storage is of no matter."""
        target = args[0]
        if func in OVERWRITING and _owns_storage(target) and self.bounds.hold(target):
            return True
        placement = self.table.find(target.untyped_storage())
        return placement is not None and placement.twin is values.BLANK and func._schema.arguments[0].is_write

    def _guessed(self, func: Any, unknown: list[Any], found: _Arguments) -> bool:
        """Has unknown arguments count as what they are guessed to be, where all is tiny. False where one stays unknown."""
        if not unknown:
            return True
        if not (found.any and self.bounds.follows) or any(
            leaf.numel() > self.bounds.most_guessed(leaf) for leaf in unknown
        ):
            return False
        found.sure = False
        for leaf in unknown:
            if not _owns_storage(leaf):
                with no_functions(), host_keys():
                    host = _aten.zeros.default(leaf.size(), dtype=leaf.dtype)
                    found.given[id(leaf)] = self.guessed(leaf, host)
            else:
                self._give(leaf)
        return True

    def _give(self, tensor: Any) -> None:
        """From now on an unknown tensor has the values that it is guessed to have."""
        with no_functions(), host_keys():
            placement = self.twins.placement(tensor)
            noted = placement.among, placement.share, placement.bound, placement.few, placement.told
            placement.put(None)
            self.guessed(tensor, self.twins.view(tensor))
            placement.sure, placement.supplied = False, False
            placement.among, placement.share, placement.bound, placement.few, placement.told = noted
        all_attributes(tensor)[KNOWN] = True

    def _are_small(self, out: Any, found: _Arguments) -> bool:
        """Whether results may be kept: small ones, and into what is known already any."""
        for leaf in leaves(out):
            if isinstance(leaf, VirtualTensor):
                if leaf.layout is not torch.strided:
                    return False
                if any(leaf is written for written in found.written):
                    continue
                if leaf.numel() > (self.bounds.of(leaf) if found.sure else self.bounds.most_guessed(leaf)):
                    return False
        return True

    def _call(self, func: Any, args: Any, kwargs: Any, device: int) -> HostCall:
        given, self._given_now = self._given_now, {}
        if not given:
            return super()._call(func, args, kwargs, device)

        def host(arg: Any) -> Any:
            mine = given.get(id(arg))
            return on_host(self.twins, arg) if mine is None else mine

        host_kwargs = {name: mapped(host, arg) for name, arg in kwargs.items()}
        return HostCall(func, [mapped(host, arg) for arg in args], host_kwargs, device, None)

    def _drop(self, func: Any, args: Any, kwargs: Any) -> None:
        """What an operator has written is not known any more."""
        if func.namespace in SENDING:
            return
        for leaf in written_by(func, args, kwargs):
            if isinstance(leaf, VirtualTensor) and leaf.layout is torch.strided:
                all_attributes(leaf).pop(KNOWN, None)
                if func not in guesses.RULES:
                    all_attributes(leaf).pop(GUESS, None)
                placement = self.table.find(leaf.untyped_storage())
                if placement is not None:
                    placement.put(None)
                    if self.tape is not None:
                        self.tape.append(placement)

    def replay(self, tape: list[Placement]) -> None:
        """A captured graph runs again: what it writes is not known."""
        with self.lock:
            for placement in tape:
                placement.put(None)


class _Arguments:
    """What is known of an operator's arguments. given: values (by `id`) that no storage's twin holds."""

    def __init__(self, written: list[Any]) -> None:
        self.written = written
        self.any = False
        self.sure = True
        self.supplied = False
        self.blank: list[Any] = []
        self.given: dict[int, torch.Tensor] = {}


def _asks_whether_equal(func: Any, args: Any) -> bool:
    """Whether floating numbers are compared for equality, other than with themselves."""
    return (func in _EQUAL or func in _OTHER) and args[0].is_floating_point() and args[0] is not args[1]


def any_known(args: Any) -> bool:
    for arg in args:
        if isinstance(arg, VirtualTensor):
            if KNOWN in all_attributes(arg):
                return True
        elif isinstance(arg, (list, tuple)):
            if any_known(arg):
                return True
        elif isinstance(arg, torch.Tensor):
            # A host tensor's values are known.
            return True
    return False


def _is_unknown(tensor: torch.Tensor) -> bool:
    """Whether the values of an operator's argument cannot be known, at a glance."""
    if isinstance(tensor, VirtualTensor):
        return KNOWN not in all_attributes(tensor)
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _is_dense(tensor: Any) -> bool:
    return isinstance(tensor, VirtualTensor) and tensor.layout is torch.strided


def _is_followed(out: Any) -> bool:
    return isinstance(out, VirtualTensor) and KNOWN in all_attributes(out)


def _mark_views(args: Any, out: Any) -> None:
    for leaf in leaves(out):
        if isinstance(leaf, VirtualTensor):
            all_attributes(leaf)[KNOWN] = True


def _guess_views(out: Any, guess: Any) -> None:
    for leaf in leaves(out):
        if isinstance(leaf, VirtualTensor):
            all_attributes(leaf)[GUESS] = guess


def _owns_storage(tensor: Any) -> bool:
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())
