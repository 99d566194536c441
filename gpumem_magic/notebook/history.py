"""What each cell did to the memory, in the order in which the cells ran. Numbers and strings only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.units import MIB, human, mib
from gpumem_magic.views.sheet import CAME, HIGHEST, THERE, WENT, Sheet

_BAR = 32
_TITLE = 36
# Less than this is no growth worth a word.
_LEAST = MIB


@dataclass(frozen=True)
class State:
    """Bytes of all devices together at a moment; device_used is None where the driver does not say."""

    allocated: int
    reserved: int
    device_used: int | None


@dataclass(frozen=True)
class CellRecord:
    """One run of a cell. key: what tells cells apart (the notebook's id of it, else its text). error: its type, or None.

    peak: the highest allocated bytes, where it was higher than anything before it; None where that is not known.
    """

    number: int
    key: str
    title: str
    before: State
    after: State
    peak: int | None = None
    error: str | None = None

    @property
    def change(self) -> int:
        return self.after.allocated - self.before.allocated


class CellHistory:
    """The runs of a notebook's cells, oldest first; of the last thousand."""

    LIMIT = 1000

    def __init__(self) -> None:
        self.records: list[CellRecord] = []
        self.left_out = 0

    def add(self, record: CellRecord) -> str | None:
        """Keeps a run, and returns a sentence where it left more than the same cell's last run did."""
        before = self.last_run(record.key)
        self.records.append(record)
        if len(self.records) > self.LIMIT:
            del self.records[0]
            self.left_out += 1
        return added(before, record)

    def last_run(self, key: str) -> CellRecord | None:
        return next((one for one in reversed(self.records) if one.key == key), None)


def added(before: CellRecord | None, now: CellRecord) -> str | None:
    """``running this cell again left another 1.2 GiB``; None where it did not."""
    if before is None:
        return None
    more = now.after.allocated - before.after.allocated
    # What other cells did in between is not this cell's doing.
    more = min(more, now.change)
    if more < _LEAST:
        return None
    return f"running this cell again left another {human(more)} (its last run was In [{before.number}])"


def waterfall(records: Sequence[CellRecord], left_out: int = 0) -> str:
    """A line a run: its number, its first line, what it changed, and a bar from what was there to what is there now."""
    if not records:
        return "No cell has been recorded yet."
    scale = max(max(one.before.allocated, one.after.allocated, one.peak or 0) for one in records)
    width = max(len(str(one.number)) for one in records)
    raised = any(one.peak is not None for one in records)
    head = f"{'':{width + 3}}{'MiB allocated':<{_TITLE}}{'change':>10}{'after':>10}"
    lines = [head + f"{'new peak':>10}" * raised]
    if left_out:
        lines.append(f"{left_out:,} earlier runs are left out.")
    seen: dict[str, CellRecord] = {}
    for one in records:
        title = one.title if len(one.title) < _TITLE else f"{one.title[: _TITLE - 2]}…"
        change = f"{mib(one.change, signed=True)}" if abs(one.change) >= MIB / 2 else "0"
        figures = f"{change:>10}{mib(one.after.allocated):>10}" + f"{_new_peak(one):>10}" * raised
        line = f"[{one.number:>{width}}] {title:<{_TITLE}}{figures}  {_bar(one, scale)}"
        notes = [word for word in (one.error, added(seen.get(one.key), one)) if word]
        lines.append(line.rstrip())
        lines += [f"{'':{width + 3}}^ {note}" for note in notes]
        seen[one.key] = one
    last = records[-1].after
    used = "" if last.device_used is None else f", nvidia-smi {human(last.device_used)}"
    lines.append(f"Now: allocated {human(last.allocated)}, reserved {human(last.reserved)}{used}.")
    return "\n".join(lines)


def sheet(records: Sequence[CellRecord], left_out: int = 0) -> Sheet:
    """The same with a table for a notebook."""
    text = waterfall(records, left_out)
    if not records:
        return Sheet(text)
    raised = any(one.peak is not None for one in records)
    rows = [("cell", "change", "after", *["new peak"] * raised, "", "")]
    bars = []
    seen: dict[str, CellRecord] = {}
    for one in records:
        notes = [word for word in (one.error, added(seen.get(one.key), one)) if word]
        change = mib(one.change, signed=True) if abs(one.change) >= MIB / 2 else "0"
        figures = (change, mib(one.after.allocated), *[_new_peak(one)] * raised)
        rows.append((f"[{one.number}]", *figures, one.title, "; ".join(notes)))
        low, high = sorted((one.before.allocated, one.after.allocated))
        moved = (CAME if one.change > 0 else WENT, high - low)
        bars.append(((THERE, low), moved, (HIGHEST, max(0, (one.peak or 0) - high))))
        seen[one.key] = one
    head = f"What each cell did to the allocated memory (MiB). {text.splitlines()[-1]}"
    if left_out:
        head += f"\n{left_out:,} earlier runs are left out."
    whole = max(sum(size for _, size in bar) for bar in bars)
    title = 3 + raised
    return Sheet(head, rows, range(1, title), code=(title,), bars=bars, whole=whole, text=text)


def _new_peak(one: CellRecord) -> str:
    return "" if one.peak is None else mib(one.peak)


def _bar(one: CellRecord, scale: int) -> str:
    """What stayed as ``=``, what came as ``+``, what went as ``-``, the peak beyond as ``.``."""
    if scale <= 0:
        return ""
    low = min(one.before.allocated, one.after.allocated)
    high = max(one.before.allocated, one.after.allocated)
    stayed, moved = round(_BAR * low / scale), round(_BAR * high / scale)
    peak = max(moved, round(_BAR * (one.peak or 0) / scale))
    return "=" * stayed + ("+" if one.change > 0 else "-") * (moved - stayed) + "." * (peak - moved)
