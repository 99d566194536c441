"""A widget whose output is HTML with a picture, where the page puts the live view while there is a kernel (``place.js``).

So a notebook that is opened again, exported, or shown by another kernel has the picture, and never a widget that is missing.
"""

# traitlets and anywidget carry types that a strict check does not accept as base classes.
# mypy: disallow-any-unimported=False, disallow-subclassing-any=False

from __future__ import annotations

import sys
import uuid
from typing import Any

import anywidget
import traitlets

from gpumem_magic.looks.shell import running_shell


class PlacedWidget(anywidget.AnyWidget):
    """`still` is what stands there without a kernel."""

    place = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **facts: Any) -> None:
        super().__init__(place=uuid.uuid4().hex, **facts)

    def still(self) -> dict[str, Any]:
        """A display bundle: HTML and plain text."""
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """What is displayed: the place, and the picture in it."""
        still = self.still()
        page = f'<div class="gpumem-place" data-place="{self.place}"><div class="gpumem-still">{still["text/html"]}</div></div>'
        return {**still, "text/html": page}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return super()._repr_mimebundle_(**options) if loads_widgets_on_sight() else (self.bundle(), {})


def loads_widgets_on_sight() -> bool:
    """Whether this page (Colab's, VS Code's) loads a widget's script only where an output of the widget's own kind is shown.

    VS Code's extension puts the notebook's name into the kernel's namespace.
    """
    shell = running_shell()
    return "google.colab" in sys.modules or "__vsc_ipynb_file__" in getattr(shell, "user_ns", ())
