"""The small files: one JSON text for each program that was measured. They name a GPU and versions, and no person or folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpumem_magic.units import human
from truth.measuring import SCHEMA

NEEDED = {
    "schema",
    "workload",
    "script",
    "kind",
    "gpu",
    "total_bytes",
    "versions",
    "driver_by",
    "told",
    "rows",
    "peak",
    "error",
}


def write(found: dict[str, Any], folder: Path) -> int:
    """Writes a measured program; the answer is the file's size in bytes. Raises OSError."""
    text = json.dumps(found, separators=(",", ":")).replace('],["', '],\n["') + "\n"
    path = folder / f"{found['workload']}.json"
    path.write_text(text, encoding="utf-8")
    return path.stat().st_size


def read(folder: Path) -> list[dict[str, Any]]:
    """All programs in a folder, by name. Raises OSError; ValueError, in one line, for a file that is something else."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
        if not isinstance(data, dict) or not data.keys() >= NEEDED or data["schema"] != SCHEMA:
            raise ValueError(f"{path.name} is not a measured program of schema {SCHEMA}")
        found.append(data)
    return found


def in_a_line(found: dict[str, Any]) -> str:
    """``peak 1.2 GiB allocated, 1.4 GiB reserved, driver 1.9 GiB; ran out of memory in line 12``."""
    peaks = highest(found)
    words = f"peak {human(peaks['allocated'])} allocated, {human(peaks['reserved'])} reserved, driver " + (
        "not available" if peaks["driver"] is None else human(peaks["driver"])
    )
    return words + (f"; ran out of memory in line {found['error']['line']}" if found["error"] else "")


def highest(found: dict[str, Any]) -> dict[str, Any]:
    """The highest of each figure over the rows, in bytes; None where it was not available."""
    rows = found["rows"]
    drivers = [row[5] for row in rows if row[5] is not None]
    return {
        "allocated": max(row[6] for row in rows),
        "reserved": max(row[7] for row in rows),
        "driver": max(drivers) if drivers else None,
    }


def virtual_name(found: dict[str, Any]) -> str:
    """The virtual GPU that stands for the recorded one: the catalogue's with its name, else one of its size."""
    from gpumem_magic.virtual.card.catalog import CATALOG

    total = f"total={found['total_bytes']}B"
    version = str(found["versions"]["torch"]).partition("+")[0]
    for key, model in CATALOG.items():
        if model.name == found["gpu"]:
            return f"{key},{total}" if found["kind"] == "virtual" else f"{key},torch={version},{total}"
    return f"virtual:{found['total_bytes']}B"
