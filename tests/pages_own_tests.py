"""The pages' own tests, which node runs (``tests/js``)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def run(name: str) -> None:
    """Those of one file. Raises AssertionError with what node says; skips where node is missing or too old."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(int(part) for part in version.strip().lstrip("v").split(".")[:2]) < (20, 19):
        pytest.skip(f"node {version.strip()} can't import a module by its content; 20.19 can")
    file = Path(__file__).parent / "js" / name
    done = subprocess.run([node, "--test", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
