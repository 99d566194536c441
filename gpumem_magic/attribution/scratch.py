"""Which allocations of a real device are what a kernel works in, cuDNN's convolutions above all, and no tensor of the program's.

A virtual device tells. On a real one such memory is gone before anything else is asked for (`Workspace` in
`aten/src/ATen/native/cudnn/Conv_v8.cpp`, 2.9 to 2.13, is given back where the call ends). So are gradients that are added to
others in place; but these are as large as what they are the gradients of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumem_magic.attribution.owners import Roles
from gpumem_magic.attribution.phase_map import PhaseMap
from gpumem_magic.devices.base import DeviceLog, Label
from gpumem_magic.recording.model import BACKWARD, FORWARD, RECOMPUTATION
from gpumem_magic.snapshot.timeline import Allocation

# The layers whose kernels work in memory of their own.
_LAYERS = ("torch/nn/modules/conv.py",)


def scratch_of_kernels(
    log: DeviceLog, allocations: Sequence[Allocation], held: Mapping[int, Roles], phases: PhaseMap
) -> dict[int, Label]:
    """Index of an allocation -> its label."""
    if log.facts.kind == "virtual":
        return {}
    passing, elsewhere = [], set()
    for one in allocations:
        phase = phases.at_event(one.born) if one.born >= 0 else None
        kind = "" if phase is None else phase.kind
        if kind != BACKWARD:
            elsewhere.add(one.requested)
        if one.index not in held and kind in (BACKWARD, FORWARD, RECOMPUTATION) and _is_gone_at_once(log, one):
            passing.append((kind, one))
    found = {}
    for kind, one in passing:
        frames = log.events[one.born].frames
        if kind != BACKWARD:
            if frames and frames[0].filename.replace("\\", "/").endswith(_LAYERS):
                found[one.index] = Label("workspace", "stack")
        # (What Python asks for in a backward is a program's own.)
        elif not frames and one.requested not in elsewhere:
            found[one.index] = Label("workspace", "inferred")
    return found


def _is_gone_at_once(log: DeviceLog, one: Allocation) -> bool:
    """Whether the next that its device's allocator did was to take it back."""
    if one.born < 0 or one.born + 1 >= len(log.events):
        return False
    following = log.events[one.born + 1]
    return following.action == "free_requested" and following.address == one.address
