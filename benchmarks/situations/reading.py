"""The situations: their facts from this folder's texts, and the cells of some from a file beside the project."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
FACTS = HERE / "facts.txt"
OWN = HERE / "own.txt"
# Where the cells of the situations in `facts.txt` are; `own.txt` has its own.
SHARED = HERE.parents[2] / "shared" / "data" / "memory_cases.md"
CELL = "# %%\n"
_START = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
KINDS = ("cause", "place", "line", "remedy")
_TITLE = re.compile(r"(?m)^== ")
_FACT = re.compile(r"(device|sample|cause|place|line|remedy):\s*(.*)")
_CODE = re.compile(r"```python\n(.*?)```", re.S)


@dataclass(frozen=True)
class Situation:
    """cells: the last one is measured; none where the text with the cells is not here. facts: kind -> patterns that the answer
    must all show, none for an innocent twin. sample: whether it is one of the few that every run of the tests tries."""

    name: str
    device: str
    cells: tuple[str, ...]
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sample: bool = False

    @property
    def is_innocent(self) -> bool:
        return not self.facts


def situations() -> list[Situation]:
    """All of them, in the order of the texts."""
    shared = _shared_cells(SHARED.read_text("utf-8")) if SHARED.is_file() else {}
    return [*(_with(one, shared) for one in _read(FACTS)), *_read(OWN)]


def _with(one: Situation, shared: dict[str, tuple[str, tuple[str, ...]]]) -> Situation:
    device, cells = shared.get(one.name, ("", ()))
    return Situation(one.name, device, cells, one.facts, one.sample)


def _read(path: Path) -> list[Situation]:
    return [_situation(part) for part in _TITLE.split(path.read_text("utf-8"))[1:]]


def _situation(part: str) -> Situation:
    head, *cells = part.split(CELL)
    name, *lines = head.strip().splitlines()
    read = [found.groups() for line in lines if (found := _FACT.match(line))]
    facts = {kind: found for kind in KINDS if (found := tuple(words for key, words in read if key == kind))}
    settings = dict(pair for pair in read if pair[0] not in KINDS)
    if cells:
        cells[0] = _START + cells[0]
    return Situation(name, settings.get("device", "T4"), tuple(cells), facts, settings.get("sample") == "yes")


def _shared_cells(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    found = {}
    for part in re.split(r"(?m)^## ", text)[1:]:
        name = part.split()[0]
        device = re.search(r"Device: `(.*?)`", part)
        assert device is not None, name
        found[name] = device[1], tuple(_CODE.findall(part))
    return found
