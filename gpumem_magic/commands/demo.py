"""``gpumem demo``: a short training program is written down, measured on a virtual card, and shown."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stderr
from pathlib import Path

from gpumem_magic.commands.common import guarded
from gpumem_magic.snapshot.whole_file import printable, replace_file

PROGRAM = "training.py"
PAGE = "report.html"


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the report, then where the program and the report's page are. 0; 2 where they can't be written."""
    folder = Path(options.folder)
    program, page = folder / PROGRAM, folder / PAGE
    _write_program(program)
    flags = {"--device": options.device, "--html": str(page), "--json": options.json, "--png": options.png}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    with redirect_stderr(sys.stdout):
        status: int = options.main(["run", *given, str(program)])
    if status == 0:
        print(f"\nThe program that was measured: {printable(program)}")
        print(f"Its report as a page for the browser: {printable(page)}")
        print("Your own: `gpumem run --device T4 SCRIPT`, or `%load_ext gpumem_magic` and `%%gpumem` in a notebook.")
    return status


def _write_program(path: Path) -> None:
    """Raises ValueError where there is another file in its place: that is not run, and not replaced."""
    text = Path(__file__).with_name("demo_program.txt").read_bytes()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(text))
    elif path.read_bytes() != text:
        name = printable(path)
        raise ValueError(
            f"{name} is not as the demo wrote it: `gpumem run {name}` runs yours, `gpumem demo OTHER_FOLDER` a new one"
        )
