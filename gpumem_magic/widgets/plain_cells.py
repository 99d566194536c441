"""What lives on a device while nobody measures: parameters, gradients, optimizer states and activations of plain cells.

A virtual device tells each of its events, and hooks say in which phase it falls and who holds what, as in a recording, of which
nothing else is kept. A real one is too busy for that: there it is what the notebook's modules and optimizers hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Device, DeviceFacts, Machine
from gpumem_magic.failures import swallowed
from gpumem_magic.recording import under_way
from gpumem_magic.recording.model import Moment, Sighting
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.widgets.live import LiveLabels

if TYPE_CHECKING:
    from gpumem_magic.recording.phases import Phases

_NO_MOMENT = Moment({}, {})


class _Telling(Device, Protocol):
    """A virtual device."""

    def follow(self, told: Callable[[TraceEvent, str], None]) -> Callable[[], None]:
        """Tells of each event and its origin (see `DeviceLog`) until the answer is called."""


class _Told(list[Sighting]):
    """Passes everything on, and keeps nothing."""

    def __init__(self, told: Callable[[Sighting], None]) -> None:
        super().__init__()
        self._told = told

    def append(self, look: Sighting, /) -> None:
        self._told(look)


class _Hooks:
    """Phases and sightings of one plain cell. Who wants to measure, or to change the device, ends them: a `Run` of
    `under_way` that gives way."""

    def __init__(self, machine: Machine, followed: Mapping[int, LiveLabels], lock: Any) -> None:
        from gpumem_magic.recording.guard import Guard
        from gpumem_magic.recording.identity import Witness
        from gpumem_magic.recording.phases import Phases

        def see(look: Sighting) -> None:
            with lock:
                if look.device in followed:
                    followed[look.device].see(look)

        def position(device: int) -> int:
            return followed[device].position if device in followed else 0

        self.witness = Witness(machine, position)
        self.witness.sightings = _Told(see)
        self.phases: Phases = Phases(lambda: _NO_MOMENT, self.witness, Guard(), grown=lambda: self.phases.spans.clear())

    def is_running(self) -> bool:
        return False

    def put_back(self) -> None:
        self.phases.stop()
        self.witness.forget()
        under_way.close(self)


class PlainCells:
    """Of one notebook, from `start` until `stop`. Hooks are there only while a cell runs; its own thread puts them in and out."""

    def __init__(self, shell: Any, machine: Callable[[], Machine | None] = machines.in_use) -> None:
        self._shell = shell
        self._machine = machine
        # Frees may come in the sampler's thread.
        self._lock = threading.RLock()
        self._followed: dict[int, LiveLabels] = {}
        self._ends: dict[int, tuple[_Telling, DeviceFacts, Callable[[], None]]] = {}
        self._hooks: _Hooks | None = None
        self._depth = 0
        self._stopped = False

    def start(self) -> None:
        self._shell.events.register("pre_run_cell", self._begins)
        self._shell.events.register("post_run_cell", self._ended)
        self._trying(self._follow)

    def stop(self) -> None:
        """May come from any thread. Hooks of a cell that still runs go when it ends."""
        self._stopped = True
        for _, _, end in self._ends.values():
            end()
        if not self._depth:
            self._leave()

    def requested(self, device: Device) -> dict[str, int] | None:
        """Layer -> requested bytes of what is live; None for a device that is not followed."""
        with self._lock:
            known = self._ends.get(device.facts.index)
            return self._followed[device.facts.index].requested() if known is not None and known[0] is device else None

    def learn(self, device: Device, at_end: Mapping[int, tuple[int, str]]) -> None:
        """Takes what a measured cell has found out. at_end: address -> (requested bytes, category)."""
        with self._lock:
            if device.facts.index in self._followed:
                self._followed[device.facts.index].learn(at_end)

    # Cells

    def _begins(self, _info: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not self._stopped:
            self._trying(self._follow)
            self._trying(self._hook)

    def _ended(self, _result: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        self._trying(self._look_around)
        if self._stopped:
            self._leave()

    def _leave(self) -> None:
        for name, callback in (("pre_run_cell", self._begins), ("post_run_cell", self._ended)):
            if callback in self._shell.events.callbacks[name]:
                self._shell.events.unregister(name, callback)

    def _trying(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # The cell is the user's, and the samples stand without categories.
            swallowed(error)

    def _follow(self) -> None:
        """Every virtual device that is on from now on, and none that has gone."""
        machine = self._machine()
        is_virtual = machine is not None and machine is machines.virtual()
        devices = cast("Sequence[_Telling]", machine.devices if machine is not None and is_virtual else ())
        for index, (device, facts, end) in list(self._ends.items()):
            if not any(one is device and one.facts == facts for one in devices):
                end()
                with self._lock:
                    del self._ends[index], self._followed[index]
        new = [one for one in devices if one.facts.index not in self._ends]
        if machine is None or not new:
            return
        machine.settle()
        for device in new:
            labels = LiveLabels(device.facts.index, device.segments(), device.labels)
            end = device.follow(self._taker(labels))
            with self._lock:
                self._followed[device.facts.index] = labels
                self._ends[device.facts.index] = device, device.facts, end
        self._look_around()

    def _taker(self, labels: LiveLabels) -> Callable[[TraceEvent, str], None]:
        def take(event: TraceEvent, origin: str) -> None:
            hooks = self._hooks
            with self._lock:
                labels.take(event, origin, None if hooks is None else hooks.phases.innermost)

        return take

    def _hook(self) -> None:
        machine = self._machine()
        if machine is None or not self._followed or under_way.is_any():
            return
        hooks = self._hooks = _Hooks(machine, self._followed, self._lock)
        # Known before anything is replaced: an interrupt leaves nothing that the cell's end does not find.
        under_way.open(hooks)
        hooks.phases.start()

    def _look_around(self) -> None:
        """Every module and optimizer of the notebook, and what recordings have found out; the hooks go."""
        machine, hooks, self._hooks = self._machine(), self._hooks, None
        try:
            if machine is not None and self._followed and not self._stopped:
                machine.settle()
                looks = hooks if hooks is not None else _Hooks(machine, self._followed, self._lock)
                looks.witness.cell_ended(self._shell.user_ns)
                looks.witness.forget()
                with self._lock:
                    for index, (device, _, _) in self._ends.items():
                        self._followed[index].carry(device.labels)
        finally:
            if hooks is not None:
                hooks.put_back()


def held_by_namespace(machine: Machine, device: int, namespace: Mapping[str, Any]) -> dict[str, int]:
    """Layer -> bytes on a device in the storages of a notebook's modules and optimizers. Keeps nothing, runs nothing of theirs.

    Gradients are not asked for: a backward in another thread may be at work on them.
    """
    from gpumem_magic.looks import objects, tensors
    from gpumem_magic.recording.identity import END_LIMIT, tensors_in

    found: dict[int, tuple[int, str]] = {}

    def note(tensor: Any, category: str) -> None:
        for piece in tensors.pieces(tensor):
            where = machine.locate(piece)
            if where is None or where[0] != device or where[1] in found:
                continue
            # (A sparse tensor has no storage of its own.)
            with suppress(RuntimeError):
                found[where[1]] = int(tensors.storage(piece).nbytes()), category

    with tensors.no_functions(), tensors.no_dispatch():
        for _, value in objects.items(namespace):
            if tensors.is_module(value):
                for kind, category in ((tensors.PARAMETERS, "parameters"), (tensors.BUFFERS, "buffers")):
                    for _, tensor in tensors.tensors_of(value, kind):
                        note(tensor, category)
            elif tensors.is_optimizer(value):
                working = tensors.working_optimizer(value)
                for tensor in tensors.parameters_of(working):
                    note(tensor, "parameters")
                for _, state in tensors.states_of(working):
                    for _, tensor in tensors_in(state, "", END_LIMIT):
                        note(tensor, "optimizer_state")
    sums: dict[str, int] = {}
    for size, category in found.values():
        sums[category] = sums.get(category, 0) + size
    return sums
