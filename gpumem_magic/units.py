"""Bytes, counts and shapes to words. MiB = 2^20 and GiB = 2^30 everywhere in the package, always written out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`, or the number itself."""
    return -(-number // step) * step


def mib(size: int, *, signed: bool = False) -> str:
    """`size` bytes as whole MiB with thousands separators: ``3,769`` (no unit; the column's head says MiB)."""
    return f"{round(size / MIB):{'+' if signed else ''},}"


def human(size: int) -> str:
    """`size` bytes with the unit that keeps three or four digits: ``512 B``, ``8.1 MiB``, ``1,278 MiB``, ``14.7 GiB``."""
    magnitude = abs(size)
    if magnitude < KIB:
        return f"{size} B"
    if magnitude < MIB:
        return f"{size / KIB:,.1f} KiB"
    if magnitude < 100 * MIB:
        return f"{size / MIB:.1f} MiB"
    if magnitude < 10 * GIB:
        return f"{size / MIB:,.0f} MiB"
    return f"{size / GIB:,.1f} GiB"


def counted(number: int, one: str, several: str | None = None) -> str:
    """``1 segment``, ``1,024 segments``; several: the plural, where an "s" does not make it."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def listed(words: Sequence[str], joint: str = "and") -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Numbers that follow each other in one: ``["0", "2-7"]``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in found]


def shape_words(shape: Sequence[int]) -> str:
    """As a tuple: ``(8, 1024)``, ``(8,)``."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def amount(size: int) -> str:
    """`size` bytes for a sentence beside a table: whole MiB as there, ``2,376 MiB``; what is small keeps its digits."""
    return f"{mib(size)} MiB" if abs(size) >= 100 * MIB else human(size)


def allocator_text(size: int) -> str:
    """`size` bytes as PyTorch's caching allocator prints it in an error: exactly 1 GiB is ``1024.00 MiB``."""
    if size <= KIB:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"


def percent(part: int, whole: int) -> str:
    """``7 %``, and not ``100 %`` for what is nearly so."""
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    return f"{99 if 99 <= share < 100 else round(share)} %"
