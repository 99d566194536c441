"""The project's scripts as modules: they lie beside the package and are not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The script at `path`, as a new module each time."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
