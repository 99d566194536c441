"""What the subcommands share: errors as one line on standard error, and which program is to run."""

from __future__ import annotations

import io
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec

from gpumem_magic.recording.quiet import no_automatic_collection

FAILED = 1
UNREADABLE = 2
INTERRUPTED = 128 + signal.SIGINT


def guarded(work: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """A subcommand in which a file that can't be read or written is one line on standard error and status 2.

    Where nobody reads on (``| head``), it ends in silence with status 1; Ctrl-C is one line and status 130.
    """

    @wraps(work)
    def run(options: Namespace) -> int:
        _print_anything()
        try:
            # A file's events are millions of objects and no cycles: looking for garbage among them only takes time.
            with no_automatic_collection():
                status = work(options)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Python flushes once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except KeyboardInterrupt:
            print("gpumem: interrupted", file=sys.stderr)
            return INTERRUPTED
        except (OSError, ValueError) as error:
            print(f"gpumem: {' '.join(str(error).split())}", file=sys.stderr)
            return UNREADABLE

    return run


def program_of(options: Namespace) -> tuple[str, ModuleSpec | None]:
    """The file that a command is to run, and its module where ``-m`` names one. Raises ValueError where there is none."""
    from gpumem_magic.recording.script import find_module

    spec = None
    if options.is_module:
        try:
            spec = find_module(options.script)
        except ImportError as error:
            raise ValueError(str(error)) from None
    path = options.script if spec is None else str(spec.origin)
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}")
    return path, spec


def _print_anything() -> None:
    """A terminal or pipe that is not Unicode's (LANG on a cluster, Windows) gets ? for what it can't show, not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
