"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The machines of CI are slow and shared: how long an example takes says nothing.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

# What `gpumem calibrate` measured on a developer's computer changes no test; tests of it name a file of their own.
os.environ["GPUMEM_CALIBRATION"] = ""
# Nor does a cuDNN that is installed there.
os.environ["GPUMEM_CUDNN"] = ""
# Nor that they run on CI, where pytest compares long texts that differ line by line and sign by sign, for hours.
os.environ.pop("CI", None)
# Nor does a terminal's width: processes that run tests side by side are told one.
os.environ.pop("COLUMNS", None)
# Nor that a shell lets nobody interrupt what it starts in the background: tests interrupt themselves and what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor how busy the cores are: threads that wait for each other in turning loops take five times the work's own CPU time beside
# two more processes. (Read when PyTorch is loaded; processes that tests start have it from here.)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nor what the compiler kept of earlier runs.
_compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name


# Nor is anything garbage of what is imported for good.
gc.disable()
_modules_looked_at = 0
_collected = 0
# More objects than these, alive behind a collection, are left out of the next ones.
_HEAVY = 40_000
# The modules of all tests, by name.
_of_tests: dict[str, ModuleType] = {}


def pytest_collection_finish() -> None:
    _of_tests.update({name: module for name, module in sys.modules.items() if name.startswith("test_")})
    gc.enable()


def _is_heavy() -> bool:
    """Whether much is alive that was looked through since it was last asked."""
    global _collected
    before, _collected = _collected, gc.get_stats()[2]["collections"]
    return _collected != before and len(gc.get_objects()) > _HEAVY


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Modules stay for good, and so does much of what they keep: looking through all of it whenever Python collects is half of
    what many tests cost.

    Those of other tests are not loaded, as far as this one knows: each cell that is measured would look there for memory, as in
    the user's own files.
    """
    global _modules_looked_at
    here = getattr(getattr(item, "module", None), "__name__", "")
    for name, module in _of_tests.items():
        if name == here:
            sys.modules[name] = module
        elif sys.modules.get(name) is module:
            del sys.modules[name]
    if _is_heavy() or len(sys.modules) > _modules_looked_at + 100:
        _modules_looked_at = len(sys.modules)
        gc.collect()
        gc.freeze()


# What made the virtual device that a module's tests find on, and that device.
_kept: list[tuple[pytest.FixtureDef[Any], Any, Any]] = []


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Iterator[None]:
    before = _virtual_machine()
    made = yield
    machine = _virtual_machine()
    if fixturedef.scope == "module" and machine is not None and machine is not before:
        _kept[:] = [(fixturedef, request, machine)]
    return made


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    if _kept and _kept[0][0] is fixturedef:
        _kept.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Tests run in any order: behind one that put another device in place of its module's, that is made anew for the next.

    A module's last test leaves none on, whatever it measured, and modules find none that others chose.
    """
    yield
    if _kept and _virtual_machine() is not _kept[0][2]:
        fixturedef, request, _ = _kept[0]
        fixturedef.finish(request)
    if (nextitem is None or nextitem.path != item.path) and _virtual_machine() is not None:
        from gpumem_magic.virtual import gpu

        gpu.turn_off()


def _virtual_machine() -> Any:
    machines = sys.modules.get("gpumem_magic.devices.machines")
    return None if machines is None else machines.virtual()


@pytest.fixture(autouse=True)
def _excepthook() -> Iterator[None]:
    """`torch.distributed.init_process_group` replaces it for good, and errors would look different in every later test."""
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.fixture(params=["T4", "T4,values=auto", "T4,values=real"])
def card_with_values(request: pytest.FixtureRequest) -> Iterator[str]:
    """A virtual GPU with each kind of values in turn; what it is called."""
    from gpumem_magic.virtual import gpu

    gpu.turn_on(request.param)
    yield request.param
    gpu.turn_off()
