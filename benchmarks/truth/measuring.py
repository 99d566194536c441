"""One workload, run once and measured on the device that is on, in a process that has not used CUDA before.

A workload is a script of `workloads`, run statement by statement as ``gpumem run`` does, which needs no IPython.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "workloads"
MODELS = ROOT / "tests" / "gpu"
SCHEMA = 1
SECONDS = 300
"""A workload that takes longer is given up."""

SMALLEST = ("linear_sgd", "streams", "oom_growing_list")
"""The workloads that take least: the tests run these."""


class NotRun(Exception):
    """A workload that could not be measured here. The text is one line."""


def names() -> list[str]:
    """All workloads."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def digest(name: str) -> str:
    """Changes with the script: rows of another text of it have other lines."""
    return hashlib.sha256((SCRIPTS / f"{name}.py").read_bytes()).hexdigest()[:16]


def needs(name: str) -> str | None:
    """The package that a workload needs and that is not installed here, or None."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    missing = "transformers" in text and importlib.util.find_spec("transformers") is None
    return "transformers" if missing else None


def in_new_process(name: str, device: str) -> dict[str, Any]:
    """What `measure` finds, in a process of its own: no context, library or workspace of another workload is there yet.

    Raises NotRun.
    """
    missing = needs(name)
    if missing is not None:
        raise NotRun(f"{missing} is not installed")
    try:
        done = subprocess.run(
            [sys.executable, str(HERE), "--one", name, "--device", device],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotRun(f"took longer than {SECONDS} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise NotRun((done.stderr.strip().splitlines() or ["no answer"])[-1])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure(name: str, device: str) -> dict[str, Any]:
    """Runs a workload on `device` (``cuda``, or a virtual GPU's name) and returns its fixture: numbers and a few words."""
    import torch

    from gpumem_magic.recording.script import ScriptRun, as_main, main_of
    from gpumem_magic.session.recording import open_recording

    script = ScriptRun(str(SCRIPTS / f"{name}.py"))
    # Not the first: `as_main` puts the script's folder there.
    sys.path.append(str(MODELS))
    torch.manual_seed(0)
    error: BaseException | None = None
    told: tuple[int, int, int] | None = None
    module = main_of(script.path)
    recording = open_recording(device, names=script.names, own_file=script.path)
    place = None
    try:
        with warnings.catch_warnings(), as_main(module, ()):
            warnings.simplefilter("ignore")
            script.observe(recording.observer(None, True, source=script.source))
            try:
                script.run(module)
            except torch.OutOfMemoryError as raised:
                error = raised
                place = script.failed(raised.__traceback__)
            told = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
    finally:
        sys.path.remove(str(MODELS))
        report = recording.close(error, place, module.__dict__)
        # The frames of a failed program hold its tensors.
        error = None
    assert told is not None
    if script.hook_failure is not None:
        raise NotRun(f"measuring stopped half way: {script.hook_failure}")
    return fixture(name, report.to_dict(), told, machine(torch, report.device.kind))


def machine(torch: Any, kind: str) -> dict[str, str | None]:
    """The versions that figures depend on. None: not there, or not told; a virtual GPU has no driver."""
    from gpumem_magic.devices.driver import Driver

    driver = Driver.open().ask("SystemGetDriverVersion") if kind == "cuda" else None
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    transformers = sys.modules.get("transformers")
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "transformers": None if transformers is None else str(transformers.__version__),
        "python": platform.python_version(),
    }


def fixture(
    name: str, report: dict[str, Any], told: tuple[int, int, int], versions: dict[str, str | None]
) -> dict[str, Any]:
    """The part of a report that is compared. Sizes in bytes; None is not available.

    rows: line, iteration, allocated, reserved, driver, highest allocated within. driver: this process's memory as the driver
    tells it, or else what the device has grown by since the beginning (`driver_by` says which).
    """
    rows = [row for row in report["checkpoints"] if row["kind"] != "part"]
    by_process = all(row["device_used"] is None or row["categories"]["other_processes"] is not None for row in rows)
    began = rows[0]["device_used"]

    def driver(row: dict[str, Any]) -> int | None:
        if row["device_used"] is None or began is None:
            return None
        return int(row["device_used"]) - int(row["categories"]["other_processes"] if by_process else began)

    error = report["error"]
    return {
        "schema": SCHEMA,
        "workload": name,
        "script": digest(name),
        "kind": report["device"]["kind"],
        "gpu": report["device"]["name"],
        "total_bytes": report["device"]["total_bytes"],
        "versions": versions,
        "driver_by": "process" if by_process else "growth",
        "told": dict(zip(("allocated", "reserved", "highest_allocated"), told, strict=True)),
        "rows": [
            [row["kind"], row["line"], row["iteration"], row["allocated"], row["reserved"], driver(row), row["peak_allocated"],
             row["peak_reserved"]]
            for row in rows
        ],
        "peak": {
            "where": report["peak"]["where"],
            "categories": {key: size for key, size in report["peak"]["categories"].items() if size},
        },
        "error": None if error is None else {key: error[key] for key in ("type", "line", "requested", "segment")},
        "notes": [note for note in report["notes"] if "add up" in note or "dropped" in note],
    }  # fmt: skip
