"""The documentation: `python -m sphinx -W docs build/docs`. Notebooks are shown with the outputs that they are stored with."""

import base64
import inspect
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpumem_magic

HERE = Path(__file__).resolve().parent
# Sphinx does not look beside this file.
sys.path.insert(0, str(HERE))
from json_schema import json_schema  # noqa: E402

project = "gpumem_magic"
author = copyright = "The gpumem_magic developers"
release = version = gpumem_magic.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["build", "notebooks/.ipynb_checkpoints"]
templates_path: list[str] = []
html_theme = "furo"
html_title = "gpumem_magic"
html_static_path = [str(HERE.parent / "build" / "gallery"), "static"]
html_css_files = ["rows.css"]
html_copy_source = False
# Nothing comes from elsewhere: no fonts, no scripts, no counters.
html_theme_options = {"top_of_page_buttons": []}

nb_execution_mode = "off"
# Widgets are shown as the pictures that they leave: their scripts would come from a CDN.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [
    ("html", "image/png", 0),
    ("html", "text/html", 10),
    ("html", "text/plain", 20),
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# A notebook's own outputs may hold a table as HTML with a picture beside it.
suppress_warnings = ["mystnb.unknown_mime_type"]

# Sphinx reads only what lies below this folder.
shutil.copytree(
    HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "*.toml")
)


def write_magics(path: Path) -> None:
    """The page of the magics is what `%%gpumem?` and the others say."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumem_magic")
    magics = shell.magics_manager.magics
    parts = ["# Magics", "`%load_ext gpumem_magic` brings them. Each explains itself: `%%gpumem?`."]
    for name in sorted(name for name in magics["line"] if name.startswith("gpumem")):
        title = f"`%%{name}`, `%{name}`" if name in magics["cell"] else f"`%{name}`"
        text = inspect.cleandoc(magics["line"][name].__doc__ or "").strip()
        # What comes before the list of flags is reStructuredText.
        words, heading, flags = re.split(r"^(options|positional arguments):\n|\Z", text, maxsplit=1, flags=re.MULTILINE)
        parts += [f"## {title}", f"```{{eval-rst}}\n.. highlight:: text\n\n{words.strip()}\n```"]
        if heading:
            parts.append(f"```text\n{heading}:\n{flags}\n```")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_gallery(path: Path, pictures: Path) -> None:
    """A picture (of the cell tagged `gallery`, or the first), the title and the first sentences of each notebook."""
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [
        "# Notebooks",
        "They run from top to bottom without a GPU, and on one. What each claims is checked by assertions in folded cells, "
        "and it asks you questions; the answers are folded, too.",
    ]
    files = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
    for file in files:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        title, _, words = "".join(cells[0]["source"]).partition("\n\n")
        tagged = [cell for cell in cells if "gallery" in cell["metadata"].get("tags", ())]
        picture = next(picture for cell in tagged or cells for picture in pictures_of(cell))
        data = base64.b64decode(picture)
        (pictures / f"{file.stem}.png").write_bytes(data)
        width, height = struct.unpack(">II", data[16:24])  # where a PNG says them
        # A strip of a large picture, not of its first rows where there are many; a small one whole.
        fit = "contain" if width < 1000 else f"cover;object-position:left {30 if height > width else 0}%"
        parts += [
            f"## [{title.removeprefix('# ')}](notebooks/{file.stem})",
            words.partition("\n\n")[0],
            f'<a href="notebooks/{file.stem}.html"><img src="_static/{file.stem}.png" alt="A picture from this notebook" '
            f'style="width:100%;height:240px;object-fit:{fit};background:#FFF;border:1px solid #8886"/></a>',
        ]
    names = "\n".join(f"notebooks/{file.stem}" for file in files)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{names}\n```")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def pictures_of(cell: dict[str, Any]) -> Iterator[str]:
    """The pictures of a cell's outputs, in base64: a PNG of its own, or one inside the HTML."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            yield "".join(data["image/png"])
        yield from re.findall(r'src="data:image/png;base64,([^"]+)"', "".join(data.get("text/html", "")))


write_magics(HERE / "magics.md")
(HERE / "report.schema.json").write_text(
    json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
)
write_gallery(HERE / "gallery.md", HERE.parent / "build" / "gallery")
