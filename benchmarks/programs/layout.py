"""Lays a program out in a scratch folder: its sources from git, and made-up data in the form that it reads."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

_LARGEST = 16 << 20  # larger files are no sources
_FOR_IPYTHON = re.compile(r"^(\s*)(?:[\w, ]+ = )?get_ipython\(\)\.(?:run_line_magic|system|getoutput)\(.*")


class Missing(Exception):
    """What a program needs is not here. The text says what."""


def repository(folder: Path, name: str) -> Path:
    """Where the git directory of ``owner/name`` is."""
    owner, _, project = name.partition("/")
    for place in (folder / f"{owner}+{project}" / "repo", folder / owner / project, folder / owner / f"{project}.git"):
        if place.exists():
            return place / ".git" if (place / ".git").exists() else place
    raise Missing(f"{name} is not in {folder}")


def lay_out(source: Path, commit: str, target: Path) -> None:
    """Writes a commit's files. Those that are large, or absent from an incomplete copy, are left out."""
    git = ["git", "--git-dir", str(source)]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", commit], capture_output=True, check=False)
    if listed.returncode:
        raise Missing(f"{source} has no commit {commit}")
    names = {}
    for line in listed.stdout.decode().split("\0")[:-1]:
        (mode, kind, blob), name = line.split("\t", 1)[0].split(), line.split("\t", 1)[1]
        if kind == "blob" and mode != "120000":
            names[name] = blob
    wanted = "\n".join(dict.fromkeys(names.values())) + "\n"
    sizes = subprocess.run(
        [*git, "cat-file", "--batch-check"], input=wanted.encode(), capture_output=True, check=False
    ).stdout.decode()
    small = {
        blob
        for blob, kind, *size in (line.split() for line in sizes.splitlines())
        if kind == "blob" and int(size[0]) <= _LARGEST
    }
    contents = _contents(git, sorted(small))
    for name, blob in names.items():
        if blob in contents:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(contents[blob])


def _contents(git: list[str], blobs: list[str]) -> dict[str, bytes]:
    found = subprocess.run(
        [*git, "cat-file", "--batch"], input=("\n".join(blobs) + "\n").encode(), capture_output=True, check=False
    ).stdout
    contents = {}
    position = 0
    while position < len(found):
        end = found.index(b"\n", position)
        header = found[position:end].decode().split()
        size = int(header[2])
        contents[header[0]] = found[end + 1 : end + 1 + size]
        position = end + 1 + size + 1
    return contents


def script_of(notebook: str) -> str:
    """A notebook's cells one after another, without lines that are for IPython or a shell, and cells in other languages."""
    cells = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join(_plain(cell) for cell in cells if not cell.lstrip().startswith("%%")) + "\n"


def _plain(cell: str) -> str:
    """Lines for IPython or a shell do nothing; what begins with ``%`` within an expression is none."""
    lines = TransformerManager().transform_cell(cell).splitlines()
    return "\n".join(_FOR_IPYTHON.sub(r"\1pass", line) for line in lines)
