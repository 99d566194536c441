"""What `gpumem calibrate` measured on this computer, and the one file that keeps it for the virtual GPU.

The file is JSON, in the user's configuration folder, with an entry for each GPU by its name. A file that can't be used is one
warning and nothing more: the catalogue's figures are then taken. Imports neither torch nor anything of NVIDIA's.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from gpumem_magic.snapshot.whole_file import printable, replace_file
from gpumem_magic.virtual.card.models import NO_FIRST_USES, GpuModel

VARIABLE = "GPUMEM_CALIBRATION"
"""Names another file; set and empty, no file is read or written."""

_FORMAT = 1
_MOST_BYTES = 1 << 20
_LARGEST = 8 << 40


class BadCalibration(ValueError):
    """The file can't be used. The text is one line and names it."""


@dataclass(frozen=True)
class Calibration:
    """The constants of one GPU with one build of PyTorch. Sizes in bytes; None where nobody could say.

    context_bytes: after the first tensor. context_with_libraries_bytes: after products and a convolution, kernels loaded at their
    first use. context_eager_bytes: likewise, all kernels loaded at once. library_bytes: how much of the context came with
    each library's first use. cublas_workspace_bytes: what PyTorch's allocator keeps after the first product. measured: "process"
    (the driver tells this process's memory) or "difference" (the device's memory before and after, which others may have
    changed). date: as in 2026-11-21.
    """

    name: str
    torch: str
    total_bytes: int
    smi_total_bytes: int | None
    context_bytes: int
    context_with_libraries_bytes: int
    cublas_workspace_bytes: int
    measured: str
    context_eager_bytes: int | None = None
    library_bytes: Mapping[str, int] = field(default_factory=dict)
    driver: str | None = None
    date: str = ""

    @property
    def source(self) -> str:
        """Where the figures are from, for a reader: ``on 2026-11-21 with torch 2.13.0, driver 580.65``."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{f'on {self.date} ' if self.date else ''}with torch {self.torch}{driver}"

    @classmethod
    def from_dict(cls, given: Any) -> Calibration:
        """Raises ValueError for anything that no calibration could have said."""
        if not isinstance(given, dict):
            raise ValueError("an entry is not an object")
        for name in ("name", "torch", "measured"):
            _checked_text(name, given.get(name))
        if given.get("driver") is not None:
            _checked_text("driver", given["driver"])
        date.fromisoformat(_checked_text("date", given.get("date")))
        for name in ("total_bytes", "context_bytes", "context_with_libraries_bytes", "cublas_workspace_bytes"):
            _checked_size(name, given.get(name))
        for name in ("smi_total_bytes", "context_eager_bytes"):
            if given.get(name) is not None:
                _checked_size(name, given[name])
        libraries = given.get("library_bytes", {})
        if not isinstance(libraries, dict):
            raise ValueError("library_bytes is not an object")
        for name, size in libraries.items():
            _checked_size(_checked_text("a library's name", name), size)
        known = cls.__dataclass_fields__
        found = cls(**{name: value for name, value in given.items() if name in known})
        contexts = (found.context_bytes, found.context_with_libraries_bytes, found.context_eager_bytes or 0)
        if max(contexts) >= found.total_bytes:
            raise ValueError("a context is larger than the GPU")
        return found


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 95 or not value.isascii() or not value.isprintable():
        raise ValueError(f"{name} is not a short text")
    return value


def _checked_size(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is not a size in bytes")
    return value


# ---- the file


def file_path() -> Path | None:
    """Where the file lies or would lie; None where the variable is set and empty, or the user has no home."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    try:
        return _folder() / "gpumem_magic" / "calibration.json"
    except RuntimeError:
        return None


def _folder() -> Path:
    """The user's configuration folder. Raises RuntimeError where there is no home."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification wants a relative path ignored.
    if os.path.isabs(configured):
        return Path(configured)
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path.home() / ".config"


def load() -> dict[str, Calibration]:
    """Every GPU's constants by its name; none where there is no file. Raises BadCalibration, in one line, for a bad file."""
    path = file_path()
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise BadCalibration(_words(path, error.strerror or str(error))) from None
    if len(content) > _MOST_BYTES:
        raise BadCalibration(_words(path, "it is too large"))
    try:
        found = json.loads(content)
        if not isinstance(found, dict) or not isinstance(found.get("gpus"), list):
            raise ValueError("it has no list of GPUs")
        if found.get("format") != _FORMAT:
            raise ValueError("it is of another version")
        entries = [Calibration.from_dict(one) for one in found["gpus"]]
    except (ValueError, RecursionError) as error:
        why = (
            "it is not JSON"
            if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RecursionError))
            else str(error)
        )
        raise BadCalibration(_words(path, why)) from None
    return {one.name: one for one in entries}


def _words(path: Path, why: str) -> str:
    shown = printable(path)
    return (
        f"{shown}: this calibration can't be used ({why}); `gpumem calibrate` writes a new one, `--forget` removes it"
    )


def known() -> dict[str, Calibration]:
    """As `load`; a bad file is a warning, and counts as none."""
    try:
        return load()
    except BadCalibration as error:
        warnings.warn(str(error), stacklevel=2)
        return {}


def save(found: Calibration) -> Path:
    """Keeps the constants, in place of earlier ones of a GPU of that name, and returns the file.

    What was there stays whole until the new file is. Raises OSError or ValueError in one line. A bad file is replaced.
    """
    path = file_path()
    if path is None:
        raise ValueError(f"there is nowhere to save it: {VARIABLE} is set and empty, or there is no home folder")
    try:
        everything = load()
    except BadCalibration:
        everything = {}
    everything[found.name] = Calibration.from_dict(asdict(found))
    gpus = [asdict(everything[name]) for name in sorted(everything)]
    text = json.dumps({"format": _FORMAT, "gpus": gpus}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode("ascii")))
    return path


def forget() -> Path | None:
    """Takes the file away, also a bad one, and returns it; None where there is none. Raises OSError."""
    path = file_path()
    if path is None:
        return None
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return path


# ---- its use


def applied(
    model: GpuModel, loading: str | None = None, calibrations: Mapping[str, Calibration] | None = None
) -> GpuModel:
    """The model with what was measured on this computer's GPU of the same name, if one was; itself otherwise.

    loading: "eager" or "lazy", how kernels are loaded; None is as "lazy". A model of another era stays what it is.
    """
    if model.torch_version is not None or model.oom_text_version is not None:
        return model
    found = (known() if calibrations is None else calibrations).get(model.name)
    if found is None:
        return model
    eager = (loading or "lazy").casefold() == "eager"
    context = found.context_eager_bytes if eager else found.context_with_libraries_bytes
    if context is None:
        return model
    return replace(
        model,
        context_bytes=context,
        context_is_estimate=False,
        first_uses=NO_FIRST_USES,
        cublas_workspace_bytes=found.cublas_workspace_bytes,
        total_bytes=found.total_bytes,
        smi_total_bytes=found.smi_total_bytes or found.total_bytes + model.driver_reserved_bytes,
        calibrated=found.source,
    )
