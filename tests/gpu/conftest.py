"""Tests that need an NVIDIA GPU: ``python -m pytest tests/gpu -s`` on a computer that has one; elsewhere they are skipped.

``python -m pytest tests/gpu -s --virtual H100`` runs the same tests on a virtual GPU that answers as a real one, through the real
device's code: a dry run of the tests, whose figures are not a GPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import measured  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--virtual", metavar="NAME", help="tests/gpu on a virtual GPU in place of a real one: a dry run")


def why_not() -> str | None:
    """Why this computer can't run them, or None."""
    if not torch.cuda.is_available():
        build = (
            "built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "no GPU is visible"
        )
        return f"needs a GPU that PyTorch can use (torch {torch.__version__}: {build})"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real: has no meaning on a virtual GPU (the reason says why)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Where the tests are collected from further up, the option does not exist.
    virtual = config.getoption("--virtual", None)
    reason = why_not() if virtual is None else None
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        real = item.get_closest_marker("real")
        if virtual is not None and real is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a virtual GPU: {real.args[0]}"))


@pytest.fixture(autouse=True)
def the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with an empty cache, as a fresh process would, and leaves one. With --virtual, on a GPU of its own."""
    virtual = request.config.getoption("--virtual", None)
    if virtual is None:
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()
        return
    from virtual_as_real import Machine, real

    from gpumem_magic.session import device, recording

    with real(virtual) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "stand_in", machine)
        patch.setattr(recording, "for_recording", lambda name: device.Chosen(Machine(machine), 0))
        yield
