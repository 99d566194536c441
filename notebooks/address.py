"""Writes the project's public address where a reader needs it: `python notebooks/address.py https://github.com/OWNER/REPOSITORY`.

The address is `Repository` under `[project.urls]` in `pyproject.toml`. From it are made the badges in `docs/online.md`,
which open the notebooks on Binder and on Colab, and the first code cell of each notebook, which installs the tool on Colab.
Whoever forks the project runs this once with the fork's address; without an argument it writes everything anew from the one
place, and with `none` it takes the address out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
LIST = ("<!-- notebooks: written by notebooks/address.py -->", "<!-- end of notebooks -->")
BADGES = ("<!-- badges: written by notebooks/address.py -->", "<!-- end of badges -->")
_GITHUB = re.compile(
    r"https://github\.com/([A-Za-z0-9][A-Za-z0-9-]*)/([A-Za-z0-9._-]+?)(?:\.git)?/?"
)
_TABLE = re.compile(r'^\[project\.urls\]\nRepository = "([^"\n]*)"\n\n', re.MULTILINE)
_BEFORE = "[project.scripts]\n"
_FIELD = re.compile(r'^REPOSITORY = "[^"]*"', re.MULTILINE)


def cleaned(address: str) -> str:
    """The address without an ending of its own. Raises ValueError where it is no repository on GitHub."""
    found = _GITHUB.fullmatch(address.strip())
    if found is None:
        raise ValueError(f"{address!r} is not like https://github.com/OWNER/REPOSITORY")
    return f"https://github.com/{found[1]}/{found[2]}"


def address_of(pyproject: str) -> str:
    """What `pyproject.toml` says; empty where it says nothing."""
    found = _TABLE.search(pyproject)
    return found[1] if found else ""


def with_address(pyproject: str, address: str) -> str:
    """`pyproject.toml` with another address, or with none."""
    rest = _TABLE.sub("", pyproject)
    if not address:
        return rest
    return rest.replace(_BEFORE, f'[project.urls]\nRepository = "{address}"\n\n{_BEFORE}', 1)


def links(address: str, name: str) -> tuple[str, str]:
    """Where Binder and where Colab open a notebook of this folder."""
    place = address.removeprefix("https://github.com/")
    path = f"notebooks/{name}"
    return (
        f"https://mybinder.org/v2/gh/{place}/HEAD?labpath={quote(path, safe='')}",
        f"https://colab.research.google.com/github/{place}/blob/main/{path}",
    )


def listed(titles: dict[str, str]) -> str:
    """README's list of notebooks, between its two marks. titles: of each file."""
    rows = [
        f"| [{name.removesuffix('.ipynb')}](notebooks/{name}) | {title} |"
        for name, title in titles.items()
    ]
    return "\n".join([LIST[0], "| notebook | |", "|---|---|", *rows, LIST[1]])


def badges(address: str, titles: dict[str, str]) -> str:
    """What the documentation says of running them elsewhere, between its two marks."""
    if address:
        lines = ["| notebook | run it |", "|---|---|"]
        for name, title in titles.items():
            binder, colab = links(address, name)
            lines.append(
                f"| {title} | [![Open {name} on Binder](open_binder.svg)]({binder})"
                f" [![Open {name} on Colab](open_colab.svg)]({colab}) |"
            )
    else:
        own = "https://github.com/OWNER/REPOSITORY"
        binder, colab = links(own, next(iter(titles)))
        lines = [
            "Fork the project. Binder opens your fork at",
            f"`{binder}`, Colab at",
            f"`{colab}`;",
            f"`python3 notebooks/address.py {own}` puts badges with these links here, and the address",
            "into the notebooks, where Colab installs from it.",
        ]
    return "\n".join([BADGES[0], *lines, BADGES[1]])


def _between(path: Path, marks: tuple[str, str], text: str) -> str:
    """The file with another text in place of what is between its two marks, and of these."""
    before, start, rest = path.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (start and end):
        raise ValueError(f"{path.name}: the two marks around what is written here are not there")
    return before + text + after


def written(root: Path) -> dict[Path, str]:
    """Each file that depends on the address, with the text that it should have."""
    address = address_of((root / "pyproject.toml").read_text(encoding="utf-8"))
    texts: dict[Path, str] = {}
    titles: dict[str, str] = {}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        titles[path.name] = _title(notebook)
        first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        source, count = _FIELD.subn(f'REPOSITORY = "{address}"', "".join(first["source"]))
        if count != 1:
            raise ValueError(
                f"{path.name}: its first code cell has no line that begins with REPOSITORY ="
            )
        first["source"] = source.splitlines(keepends=True)
        # As nbformat writes it.
        texts[path] = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    readme, online = root / "README.md", root / "docs" / "online.md"
    texts[readme] = _between(readme, LIST, listed(titles))
    texts[online] = _between(online, BADGES, badges(address, titles))
    return texts


def _title(notebook: dict[str, Any]) -> str:
    return "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")


def main(arguments: list[str], root: Path = ROOT) -> int:
    try:
        if arguments:
            address = "" if arguments[0] == "none" else cleaned(arguments[0])
            project = root / "pyproject.toml"
            project.write_text(
                with_address(project.read_text(encoding="utf-8"), address), encoding="utf-8"
            )
        for path, text in written(root).items():
            if path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(path.relative_to(root))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
