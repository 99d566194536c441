"""What a watch leaves behind: numbers and strings, as a dictionary, as CSV, as a few lines of text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.units import counted, human
from gpumem_magic.widgets.columns import (
    ALLOCATED,
    DEVICE_USED,
    FIRST_LAYER,
    LAYER_LABELS,
    LAYERS,
    PEAK,
    RESERVED,
    SENT,
    TIME,
    layers_of,
    value,
)
from gpumem_magic.widgets.marks import USER, Mark

SCHEMA = 1
_BREAKDOWN = 5


@dataclass(frozen=True)
class DeviceSamples:
    """One device's rows, oldest first. per_row: how many samples share a row at most; the highest of them was kept.

    title: which device it is. latest: the newest sample, which need not be among the rows.
    """

    title: str
    facts: DeviceFacts
    rows: tuple[tuple[float, ...], ...]
    per_row: int
    taken: int
    latest: tuple[float, ...] | None

    @property
    def name(self) -> str:
        virtual = "virtual " if self.facts.kind == "virtual" else ""
        return f"{self.title}  {virtual}{self.facts.name}"

    @property
    def peak(self) -> int | None:
        """The highest allocated while it was watched, in bytes, also between two samples; None without samples."""
        return value(list(self.latest), PEAK) if self.latest is not None else None

    @property
    def highest(self) -> tuple[float, ...] | None:
        """The sample with the most allocated."""
        return max(self.rows, key=lambda row: row[ALLOCATED], default=None)


@dataclass(frozen=True)
class Samples:
    """All that a watch kept. Times are seconds since the epoch, sizes bytes. running: whether more samples were to come."""

    started: float
    ended: float
    hz: float
    dropped: int
    cpu_seconds: float
    devices: tuple[DeviceSamples, ...]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    running: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. A row is a list in the order of `columns`: its time in seconds since the epoch, then bytes or None."""
        return {
            "schema": SCHEMA,
            "started": self.started,
            "ended": self.ended,
            "hz": self.hz,
            "dropped": self.dropped,
            "cpu_seconds": self.cpu_seconds,
            "running": self.running,
            "columns": list(SENT),
            "devices": [
                {
                    "title": device.title,
                    **asdict(device.facts),
                    "peak_allocated": device.peak,
                    "samples": device.taken,
                    "samples_per_row": device.per_row,
                    "rows": [plain(row) for row in device.rows],
                }
                for device in self.devices
            ],
            "marks": [mark.to_dict() for mark in self.marks],
            "notes": list(self.notes),
        }

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """A table with a row for each sample and device, bytes as whole numbers, empty where unavailable.

        path: also written there. Raises OSError where that is not possible.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["device", "name", "seconds", *SENT[1:]])
        for device in self.devices:
            for row in device.rows:
                seconds = f"{row[TIME] - self.started:.3f}"
                writer.writerow([device.title, device.facts.name, seconds, *plain(row)[1:]])
        if path is not None:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
        return text.getvalue()

    def __str__(self) -> str:
        return summary(self)

    def __repr__(self) -> str:
        devices = ", ".join(device.facts.name for device in self.devices) or "no device"
        return f"<WatchSamples of {devices}: {_length(self)}>"


def plain(row: Sequence[float]) -> list[Any]:
    """A row as JSON: bytes as whole numbers, None where unavailable."""
    return [row[TIME], *(None if math.isnan(figure) else int(figure) for figure in row[1:])]


def _length(samples: Samples) -> str:
    taken = max((device.taken for device in samples.devices), default=0)
    return f"{duration(samples.ended - samples.started)}, {counted(taken, 'sample')} at up to {samples.hz:g} Hz"


def duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def summary(samples: Samples) -> str:
    """A few lines of text: what a saved notebook, a terminal and a screen reader get."""
    head = "GPU memory so far" if samples.running else "GPU memory, watched"
    lines = [f"{head}: {_length(samples)}"]
    if not samples.devices:
        lines.append("No GPU was in use. `%gpumem_device T4` turns a virtual one on.")
    for device in samples.devices:
        lines += _device_lines(device, samples)
    own = [mark for mark in samples.marks if mark.kind == USER]
    if own:
        words = ", ".join(f"{mark.label} ({duration(mark.time - samples.started)})" for mark in own[:10])
        lines.append(f"marks: {words}{', …' if len(own) > 10 else ''}")
    lines += [f"note: {note}" for note in samples.notes]
    return "\n".join(lines)


def _device_lines(device: DeviceSamples, samples: Samples) -> list[str]:
    highest = device.highest
    if highest is None or device.latest is None:
        return [device.name]
    row, now = list(highest), list(device.latest)
    driver = max((size for each in device.rows if (size := value(list(each), DEVICE_USED)) is not None), default=None)
    parts = [f"peak allocated {human(device.peak or 0)}"]
    if driver is not None:
        parts.append(f"nvidia-smi up to {human(driver)} of {human(device.facts.capacity)}")
    lines = [f"{device.name}:  {', '.join(parts)}"]
    sizes = {layer: size for layer, size in layers_of(row).items() if size}
    tenants = LAYERS[: LAYERS.index("cached")]
    largest = sorted((layer for layer in sizes if layer in tenants), key=lambda layer: -(sizes[layer] or 0))
    if largest:
        words = ", ".join(f"{LAYER_LABELS[layer]} {human(sizes[layer] or 0)}" for layer in largest[:_BREAKDOWN])
        more = ", …" if len(largest) > _BREAKDOWN else ""
        at = duration(row[TIME] - samples.started)
        lines.append(f"  highest sample (at {at}): {words}{more}")
    last = f"allocated {human(value(now, ALLOCATED) or 0)}, reserved {human(value(now, RESERVED) or 0)}"
    lines.append(f"  at the end: {last}")
    return lines


def present_layers(samples: Samples) -> list[str]:
    """The layers that any sample has bytes in, in the order of a bar."""
    found = [False] * len(LAYERS)
    for device in samples.devices:
        for row in device.rows:
            for place in range(len(LAYERS)):
                if row[FIRST_LAYER + place] > 0:
                    found[place] = True
    return [layer for layer, there in zip(LAYERS, found, strict=True) if there]
