"""Processes that run cells, and what they answer."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLDEST = Path(sys.prefix) / "oldest-ipython"


@dataclass(frozen=True)
class Case:
    """Cells that are run one after another in one process. setup: cells that are plain in both runs.

    needs: other packages' modules that are imported before. source: where it comes from.
    """

    source: str
    cells: list[str]
    setup: list[str] = field(default_factory=list)
    interactivity: str = "last_expr"
    seconds: float = 60.0


@dataclass(frozen=True)
class Kind:
    """A Python with an IPython, and whether a virtual device is on. warm: cells that are run before the first fork."""

    python: str
    oldest: bool = False
    device: str | None = None
    warm: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{Path(self.python).parents[1].name} {'IPython 7.34' if self.oldest else ''} {self.device or 'no device'}"
        )


class Zygote:
    """A warm process of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="differential-"))
        path = [str(ROOT), *([str(OLDEST)] if kind.oldest else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(reversed(path)),
            "PYTHONHASHSEED": "1",
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(self.folder / "ipython"),
            "HOME": str(self.folder),
            "MPLBACKEND": "agg",
            "GPUMEM_CALIBRATION": "",
            "TERM": "dumb",
            # All memory comes from where `zygote._shake` reaches it.
            "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        }
        for name in ("GPUMEM_DEBUG", "PYTHONWARNINGS", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [kind.python, str(HERE / "zygote.py"), kind.device or "none", json.dumps(kind.warm)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, cwd=self.folder,
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()
        self.answer: dict[str, Any] = {}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.kind}: the process that runs the cells ended ({self.process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, case: Case, mode: str, **options: Any) -> dict[str, Any]:
        """What one run of a case found: `state`'s words for everything."""
        result, folder = self.folder / "result", self.folder / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        result.unlink(missing_ok=True)
        request = {
            "mode": mode, "cells": case.cells, "setup": case.setup, "interactivity": case.interactivity,
            "seconds": case.seconds, "folder": str(folder), "result": str(result), "device": self.kind.device, **options,
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.answer = self._answer()
        if not result.exists():
            return {"ended": self.answer}
        found: dict[str, Any] = pickle.loads(result.read_bytes())
        return found

    def interrupt(self, setup: list[str], cell: str, **options: Any) -> dict[str, Any]:
        """What `interrupted` found after a cell that was interrupted, and the signals that were sent."""
        for name in ("result.ready", "result.done", "result.sent"):
            (self.folder / name).unlink(missing_ok=True)
        found = self.run(Case("interrupt", [], setup, seconds=60.0), "plain", cell=cell, **options)
        return {**found, **self.answer}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)
