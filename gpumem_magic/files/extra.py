"""What a measured cell knew beyond what a snapshot holds: saved beside the snapshot, and loaded again.

Names and categories come from live objects, which a file no longer has, and a snapshot only has the segments at its end; with
both kept, a saved recording gives the same ledger. Labels are found again by what does not change: the event that made a block,
or its address where it was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumem_magic.attribution.ledger import KINDS_OF_EVIDENCE, TENANT_CATEGORIES
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import KnownLabels
from gpumem_magic.snapshot.model import Segment, Snapshot
from gpumem_magic.snapshot.plain import snapshot_from_data, snapshot_to_data
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.snapshot.values import PlainDataError


def labels_to_save(timeline: Timeline, labels: Sequence[Label]) -> dict[str, list[list[Any]]]:
    """Plain data: [event or address, category, evidence, name], for blocks born in the recording and for those from before."""
    saved: dict[str, list[list[Any]]] = {"born": [], "before": []}
    for one, label in zip(timeline.allocations, labels, strict=True):
        group, key = ("born", one.born) if one.born >= 0 else ("before", one.address)
        saved[group].append([key, label.category, label.evidence, label.name])
    return saved


def saved_labels(saved: Any, device: int) -> KnownLabels | None:
    """The labels of a device's allocations; None where there are none, or they are damaged."""
    found = saved.get(str(device)) if isinstance(saved, dict) else None
    if not isinstance(found, dict):
        return None
    born, before = _by_key(found.get("born")), _by_key(found.get("before"))
    return None if born is None or before is None else KnownLabels(born, before)


def start_to_save(start: Sequence[Segment]) -> list[dict[str, Any]]:
    """Plain data: the segments when the recording began."""
    segments: list[dict[str, Any]] = snapshot_to_data(Snapshot(tuple(start), ()))["segments"]
    return segments


def saved_start(saved: Any, device: int) -> tuple[Segment, ...] | None:
    """The segments when the recording of a device began; None where they were not kept, or are damaged."""
    found = saved.get(str(device)) if isinstance(saved, dict) else None
    if not isinstance(found, list):
        return None
    try:
        segments = snapshot_from_data(found).segments
    except PlainDataError:
        return None
    return segments if all(segment.device == device for segment in segments) else None


def _by_key(entries: Any) -> dict[int, Label] | None:
    labels: dict[int, Label] = {}
    if not isinstance(entries, list):
        return None
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 4:
            return None
        key, category, evidence, name = entry
        known = category in TENANT_CATEGORIES and evidence in KINDS_OF_EVIDENCE
        if not (isinstance(key, int) and known and (name is None or isinstance(name, str))):
            return None
        labels[key] = Label(category, evidence, name)
    return labels
