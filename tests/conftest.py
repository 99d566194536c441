"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The machines of CI are slow and shared: how long an example takes says nothing.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

# What `gpumem calibrate` measured on a developer's computer changes no test; tests of it name a file of their own.
os.environ["GPUMEM_CALIBRATION"] = ""
# Nor that they run on CI, where pytest compares long texts that differ line by line and sign by sign, for hours.
os.environ.pop("CI", None)
# Nor does a terminal's width: processes that run tests side by side are told one.
os.environ.pop("COLUMNS", None)
# Nor that a shell lets nobody interrupt what it starts in the background: tests interrupt themselves and what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor what the compiler kept of earlier runs.
_compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name


# Nor is anything garbage of what is imported for good.
gc.disable()
_modules_looked_at = 0


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Modules stay for good: looking through all of them whenever Python collects is half of what many tests cost."""
    global _modules_looked_at
    if len(sys.modules) > _modules_looked_at + 100:
        _modules_looked_at = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _excepthook() -> Iterator[None]:
    """`torch.distributed.init_process_group` replaces it for good, and errors would look different in every later test."""
    before = sys.excepthook
    yield
    sys.excepthook = before
