"""The documentation: `python -m sphinx -W docs build/docs`. Notebooks are shown with the outputs that they are stored with."""

import inspect
import shutil
from pathlib import Path

import gpumem_magic

HERE = Path(__file__).resolve().parent

project = "gpumem_magic"
author = copyright = "The gpumem_magic developers"
release = version = gpumem_magic.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["build", "notebooks/.ipynb_checkpoints"]
templates_path: list[str] = []
html_theme = "furo"
html_title = "gpumem_magic"
html_static_path: list[str] = []
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
    HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py")
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
        parts += [f"## {title}", f"```text\n{text}\n```"]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


write_magics(HERE / "magics.md")
