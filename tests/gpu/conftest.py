"""Tests that need an NVIDIA GPU: ``python -m pytest tests/gpu -s`` on a computer that has one; elsewhere they are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def why_not() -> str | None:
    """Why this computer can't run them, or None."""
    if not torch.cuda.is_available():
        build = (
            "built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "no GPU is visible"
        )
        return f"needs a GPU that PyTorch can use (torch {torch.__version__}: {build})"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason is not None:
        for item in items:
            if "gpu" in item.path.parent.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> Any:
    """Each test begins with an empty cache, as a fresh process would, and leaves one."""
    if why_not() is None:
        torch.cuda.empty_cache()
    yield
    if why_not() is None:
        torch.cuda.empty_cache()
