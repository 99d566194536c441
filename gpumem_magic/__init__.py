"""gpumem_magic: where PyTorch GPU memory goes in a notebook, line by line and by category, with or without a GPU.

In a notebook: ``%load_ext gpumem_magic``, then ``%%gpumem`` at the head of a cell. In a script::

    import gpumem_magic

    with gpumem_magic.measure(device="T4") as m:
        train()
    print(m.report)

Importing this package imports neither torch nor matplotlib nor NVML: each name below is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Report": "gpumem_magic.user_report",
    "investigate": "gpumem_magic.investigation.widget",
    "last_report": "gpumem_magic.session.recording",
    "last_watch": "gpumem_magic.widgets.watch",
    "load": "gpumem_magic.user_report",
    "load_ipython_extension": "gpumem_magic.notebook.magics",
    "mark": "gpumem_magic.session.recording",
    "measure": "gpumem_magic.session.measure",
    "register_kernel": "gpumem_magic.virtual.engine.kernel_rules",
    "stand_in": "gpumem_magic.virtual.engine.supplied",
    "unload_ipython_extension": "gpumem_magic.notebook.magics",
    "what_fits": "gpumem_magic.trials.what_fits",
}

__all__ = [
    "Report",
    "__version__",
    "investigate",
    "last_report",
    "last_watch",
    "load",
    "load_ipython_extension",
    "mark",
    "measure",
    "register_kernel",
    "stand_in",
    "unload_ipython_extension",
    "what_fits",
]

if TYPE_CHECKING:
    from gpumem_magic.investigation.widget import investigate
    from gpumem_magic.notebook.magics import load_ipython_extension, unload_ipython_extension
    from gpumem_magic.session.measure import measure
    from gpumem_magic.session.recording import last_report, mark
    from gpumem_magic.trials.what_fits import what_fits
    from gpumem_magic.user_report import Report, load
    from gpumem_magic.virtual.engine.kernel_rules import register_kernel
    from gpumem_magic.virtual.engine.supplied import stand_in
    from gpumem_magic.widgets.watch import last_watch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpumem_magic' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
