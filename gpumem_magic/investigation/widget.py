"""The stepper in a notebook: a model with one dictionary of settled facts and the number of the step, drawn by ``stepper.js``."""

# traitlets and anywidget carry types that a strict check does not accept as base classes.
# mypy: disallow-any-unimported=False, disallow-subclassing-any=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from pathlib import Path
from typing import Any

import traitlets

from gpumem_magic.investigation.page import still
from gpumem_magic.investigation.readings import Published
from gpumem_magic.investigation.steps import Investigation, facts, investigation_of
from gpumem_magic.report.model import ReportData
from gpumem_magic.views.display import in_terminal
from gpumem_magic.views.pages import one_script
from gpumem_magic.views.placed import PlacedWidget

_FOLDER = Path(__file__).parent


class InvestigationWidget(PlacedWidget):
    """Steps through the checkpoints of a report. step: from 0; may be set, and follows what the reader does. None is the failure,
    or the peak.

    Displayed alone it is a picture of all checkpoints, which is what a saved notebook keeps; where the kernel runs the stepper
    stands in its place.
    """

    _esm = one_script(_FOLDER, ("../units.js", "../place.js", "stepper.js"))
    _css = "".join((_FOLDER / name).read_text("utf-8") for name in ("../views/notebook.css", "stepper.css"))

    facts = traitlets.Dict().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, investigation: Investigation, step: int | None = None) -> None:
        self.investigation = investigation
        super().__init__(facts=facts(investigation), step=investigation.opens_at if step is None else step)

    @traitlets.validate("step")
    def _within(self, proposal: Any) -> int:
        return max(0, min(int(proposal["value"]), len(self.investigation.steps) - 1))

    def __repr__(self) -> str:
        return f"<InvestigationWidget: {len(self.investigation.steps)} checkpoints of {self.investigation.report!r}>"

    def _ipython_display_(self, **_options: Any) -> None:
        from IPython.display import display

        if in_terminal():
            print(self.investigation.text())
            return
        live = self._repr_mimebundle_()
        bundle = live[0] if isinstance(live, tuple) else live
        display(bundle, raw=True)
        if "text/html" not in bundle:
            display(self.still(), raw=True)

    def still(self) -> dict[str, Any]:
        return still(self.investigation)


def investigate(
    report: ReportData, *, published: Published | None = None, source: str | None = None, step: int | None = None
) -> InvestigationWidget:
    """A stepper through the checkpoints of a report, for any measured cell.

    ::

        gpumem_magic.investigate(gpumem_magic.last_report())
        gpumem_magic.investigate(report, published={"!nvidia-smi": [2, 2, 3769]})

    published: readings that somebody else took, in whole MiB: a part of a statement's text, and what nvidia-smi said after its
    first run, its second and so on. source: the cell's text; by default it is looked up in the session. step: where it opens,
    by default at the failure or the peak.
    Raises TypeError for what is no report, and ValueError for one without rows, or for readings that fit no statement.
    """
    if not isinstance(report, ReportData):
        raise TypeError(f"investigate needs a report (gpumem_magic.last_report()), not {type(report).__name__}")
    return InvestigationWidget(investigation_of(report, published=published, source=source), step)
