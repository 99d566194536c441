"""What the subcommands share: files opened with errors as one line on standard error, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

FAILED = 1
UNREADABLE = 2


def guarded(work: Callable[[], int]) -> int:
    """Runs it; a file that can't be read or written is one line on standard error and status 2.

    Where nobody reads on (``| head``), it ends in silence with status 1.
    """
    try:
        status = work()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, ValueError) as error:
        print(f"gpumem: {' '.join(str(error).split())}", file=sys.stderr)
        return UNREADABLE


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right, two spaces between."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
