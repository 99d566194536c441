"""Our own work leaves Python's garbage collection as it is, and does not set it off."""

import gc
from typing import Any

import pytest
from test_first_road import check_conservation

import gpumem_magic
from gpumem_magic.recording.quiet import no_automatic_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_is_as_before(enabled: bool) -> None:
    def fail() -> None:
        with no_automatic_collection():
            assert not gc.isenabled()
            raise ValueError("mine")

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="mine"):
            fail()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_nothing_is_collected_while_a_recording_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from gpumem_magic.causes.why import Why
    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.virtual import gpu

    seen: list[bool] = []

    def spied(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(gc.isenabled())
            return original(self, *args, **kwargs)

        return call

    for owner, name in ((Why, "stop"), (Recorder, "finish")):
        monkeypatch.setattr(owner, name, spied(getattr(owner, name)))
    with gpumem_magic.measure(device="T4") as measured:
        kept = torch.empty(2**20, device="cuda")
        assert gc.isenabled()
    assert seen == [False, False]
    assert gc.isenabled()
    check_conservation(measured.report)
    del kept
    gpu.turn_off()
