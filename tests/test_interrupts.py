"""Interrupts at any moment of our own work: nothing stays behind, and what a signal handler raises reaches the program."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import asyncio
import dis
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from IPython.utils.capture import capture_output
from shell_fakes import shell_with_device
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import gpumem_magic
from gpumem_magic.failures import is_own_failure
from gpumem_magic.notebook.measured_cell import MeasuredCell
from gpumem_magic.recording import under_way
from gpumem_magic.recording.guard import Guard
from gpumem_magic.session.recording import ActiveRecording, open_recording
from gpumem_magic.uninterrupted import whole
from gpumem_magic.virtual import gpu

PACKAGE = os.path.dirname(gpumem_magic.__file__)
CELL = """%%gpumem
layer = torch.nn.Linear(8, 8).cuda()
for i in range(2):
    loss = layer(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()
"""
QUIET_CELL = CELL.replace("%%gpumem", "%%gpumem -q")
# Again after a while: Python drops what is raised while it clears a weak reference away, and the loop would not end.
TIMEOUT = """%%gpumem -q
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05, 20)
    while True:
        x = 1
except TooLong:
    signal.setitimer(signal.ITIMER_REAL, 0)
    y = 'ended'
"""


class Interruption:
    """A Ctrl-C in our own code, at the `number`-th place where Python looks for signals; counts them.

    It is handed to whoever hears it there: within an operator it waits, as C++ may have no way to pass it on.

    only: the names of the functions in which it does so, if not in all.
    """

    def __init__(self, number: int = 0, only: tuple[str, ...] = ()) -> None:
        self.count = 0
        self._number = number
        self._only = only
        self._places: dict[CodeType, set[int]] = {}

    def __enter__(self) -> Interruption:
        # Python 3.12 tells of single steps only if some frame had asked for them by then.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if self._only and frame.f_code.co_name not in self._only:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # Looked up once for all steps of a call: a code object's hash reads all of its constants.
        places = self._places_of(frame.f_code)

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode" and frame.f_lasti in places:
                self.count += 1
                if self.count == self._number:
                    hears = _signal.getsignal(signal.SIGINT)
                    assert callable(hears)
                    hears(signal.SIGINT, frame)
            return stepped

        return stepped

    def _places_of(self, code: CodeType) -> set[int]:
        """Python looks for signals as a function begins, as a loop turns, and behind a call."""
        if code not in self._places:
            found = set()
            before = ""
            for step in dis.get_instructions(code):
                if before.startswith("CALL") or step.opname.startswith(("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                    found.add(step.offset)
                before = step.opname
            self._places[code] = found
        return self._places[code]


def state(machine: Any) -> dict[str, Any]:
    """All that a recording replaces."""
    tables = [table for place in (nn_module, nn_optimizer) for table in vars(place).values() if isinstance(table, dict)]
    return {
        "hooks": [list(table) for table in tables if all(isinstance(key, int) for key in table)],
        "engine": (vars(torch.autograd)["_engine_run_backward"], vars(torch.autograd.graph)["_engine_run_backward"]),
        "ranges": vars(torch.autograd.profiler.record_function)["__enter__"],
        "checkpoint": torch.utils.checkpoint._recomputation_hook.__enter__,
        "quiet": nn_module._has_any_global_hook,
        "replay": torch.cuda.CUDAGraph.replay,
        "sinks": [len(device.allocator.sinks) for device in machine.devices],
        "modes": _get_current_dispatch_mode_stack(),
        "dispatch": (torch._C._is_torch_function_enabled(), repr(torch._C._dispatch_tls_local_exclude_set())),
        "collects": gc.isenabled(),
        "active": under_way._run,
    }


@pytest.fixture
def shell() -> Iterator[Any]:
    with shell_with_device() as made:
        yield made


def machine_on() -> Any:
    return gpu.current()


def run(shell: Any, text: str) -> Any:
    with capture_output():
        return shell.run_cell(text)


@pytest.mark.skipif(sys.gettrace() is not None, reason="something traces already")
# Six of ten places of the cell that shows its report are in the drawing of it, when all has been put back.
@pytest.mark.parametrize(("cell", "places"), [(QUIET_CELL, 16), (CELL, 5)], ids=["quiet", "shown"])
def test_an_interrupt_anywhere_leaves_nothing(shell: Any, cell: str, places: int) -> None:
    machine = machine_on()
    run(shell, cell)
    before = state(machine)
    with Interruption() as counted:
        run(shell, cell)
    assert counted.count > 1_000
    assert state(machine) == before
    numbers = set(range(1, counted.count, counted.count // places))
    if cell == QUIET_CELL:
        # The first thousands are the beginning, where most is replaced.
        numbers.update(range(1, 1_000, 97))
    for number in sorted(numbers):
        landed = False
        # How many places a run has varies by some hundredths with what is cached: a place beyond its end moves into it.
        for _ in range(3):
            # IPython does not catch it everywhere: in transformers of its input, say.
            with Interruption(number) as interrupted, suppress(KeyboardInterrupt):
                run(shell, cell)
            landed = interrupted.count >= number
            assert state(machine) == before, number
            assert shell.magics_manager.registry["GpuMemMagics"].running is None, number
            if landed:
                break
            number = interrupted.count * 9 // 10
        assert landed
    assert run(shell, cell).success
    assert run(shell, "%gpumem_device off").success


@pytest.mark.skipif(sys.gettrace() is not None, reason="something traces already")
def test_an_interrupt_anywhere_in_a_look_at_a_tensor_leaves_the_threads_state(shell: Any) -> None:
    machine = machine_on()
    x = torch.empty(1000, device="cuda")
    before = state(machine)
    with Interruption() as counted:
        machine.engine.locate(x)
    assert counted.count > 9
    for number in range(1, counted.count + 1):
        with pytest.raises(KeyboardInterrupt) as caught, Interruption(number):
            machine.engine.locate(x)
        assert state(machine) == before, number
        # (Until here its frames were kept, as a notebook keeps those of the last error.)
        del caught


@pytest.mark.skipif(sys.gettrace() is not None, reason="something traces already")
def test_an_interrupt_anywhere_while_a_layer_moves_leaves_the_threads_state(shell: Any) -> None:
    machine = machine_on()
    torch.nn.Linear(2, 2).cuda()
    before = state(machine)
    layer = torch.nn.Linear(2, 2)
    with Interruption() as counted:
        layer.cuda()
    assert counted.count > 100
    for number in range(1, counted.count + 1, 3):
        layer = torch.nn.Linear(2, 2)
        with suppress(KeyboardInterrupt), Interruption(number):
            layer.cuda()
        assert state(machine) == before, number


def test_what_two_interrupts_left_is_no_recording_any_more(shell: Any) -> None:
    """`off`, a measured cell and `%unload_ext` find a recording whose cell is gone."""
    magics = shell.magics_manager.registry["GpuMemMagics"]
    for then in ("%gpumem_device T4", "%%gpumem -q\nx = 1", "%gpumem_device off", "%unload_ext gpumem_magic"):
        if gpu.current() is None:
            gpu.turn_on("T4")
        before = state(machine_on())
        open_recording(is_running=lambda: False)
        machine_on().devices[0].start_log()
        result = run(shell, then)
        assert result.success, then
        if then.startswith("%%"):
            assert state(machine_on()) == before
        assert under_way._run is None
        assert magics.running is None


def test_a_cell_whose_end_was_interrupted_runs_no_longer(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is not taken for a part of it."""
    before = state(machine_on())

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        for owner in (MeasuredCell, ActiveRecording):
            patches.setattr(owner, "put_back", interrupted)
        assert not run(shell, CELL).success
    assert state(machine_on()) != before
    assert run(shell, "%%gpumem -q -o found\nx = torch.empty(1000, device='cuda')").success
    assert shell.user_ns["found"].checkpoints[-1].allocated >= 4096
    assert state(machine_on()) == before


AWAITS = """%%gpumem -q
done = False
asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
await asyncio.sleep(0.05)
x = torch.zeros(1024, 1024, device="cuda")
done = True
"""


@pytest.fixture
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("shell", "usual_handler")
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_waits_for_the_end_of_an_operator(monkeypatch: pytest.MonkeyPatch, twice: bool) -> None:
    """All memory has an owner afterwards. A second one does not wait."""
    machine = machine_on()
    x = torch.ones(1000, device="cuda")
    kind = type(machine.devices[0].allocator)
    malloc, allocated, ended = kind.malloc, machine.devices[0].allocator.allocated, []

    def interrupted(self: Any, *given: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        found = malloc(self, *given, **options)
        if twice:
            signal.raise_signal(signal.SIGINT)
        ended.append(found)
        return found

    for make in (lambda: x + 1, lambda: torch.empty(1000, device="cuda")):
        with monkeypatch.context() as patches:
            patches.setattr(kind, "malloc", interrupted)
            with pytest.raises(KeyboardInterrupt):
                make()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        machine.settle()
        assert twice or machine.devices[0].allocator.allocated == allocated
    assert len(ended) == (0 if twice else 2)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("shell", "usual_handler")
def test_between_operators_a_program_sees_pythons_own_handler() -> None:
    machine_on()
    x = torch.ones(1000, device="cuda")
    x + 1
    # (It stays, as to change it takes a call of the system's.)
    assert _signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

    heard: list[int] = []
    assert signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) is signal.default_int_handler
    x + 1
    signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x + 1
    gpu.turn_off()
    assert _signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio left Ctrl-C alone before")
@pytest.mark.usefixtures("shell", "usual_handler")
def test_asyncio_cancels_at_ctrl_c_on_a_device_too() -> None:
    machine_on()
    x = torch.ones(1000, device="cuda")
    ended = []

    async def main() -> None:
        x + 1
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    x + 1
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert ended == ["cancelled"]


@pytest.mark.usefixtures("shell", "usual_handler")
@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_device_goes_whole_however_often_ctrl_c_is_pressed(monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
    """Until that has taken too long."""
    machine = machine_on()
    kind = type(machine)
    remove, went_on = kind.remove, []

    def interrupted(self: Any, because: str) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        went_on.append(because)
        remove(self, because)

    monkeypatch.setattr(whole, "_patience", patience)
    with monkeypatch.context() as patches:
        patches.setattr(kind, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gpu.turn_off()
    assert bool(went_on) == bool(patience)
    assert (gpu.current() is None) == bool(patience)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    gpu.turn_off()
    assert gpu.current() is None
    assert not machine.replaced()


def test_a_cell_that_is_left_where_it_awaits_is_no_longer_measured(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a terminal Ctrl-C ends IPython's run of the event loop, and the next cell that awaits goes on with both."""
    shell.run_cell("import asyncio, signal")
    before, events = state(machine_on()), {name: [*those] for name, those in shell.events.callbacks.items()}
    assert not run(shell, AWAITS).success
    assert state(machine_on()) == before
    assert shell.events.callbacks == events
    assert shell.magics_manager.registry["GpuMemMagics"].running is None
    assert run(
        shell, "%%gpumem -q -o found\nawait asyncio.sleep(0.2)\ny = torch.zeros(2048, 1024, device='cuda')"
    ).success
    assert shell.user_ns["done"]
    found = shell.user_ns["found"]
    assert (found.checkpoints[-1].allocated, found.notes) == (12 << 20, ())
    assert state(machine_on()) == before
    assert "gpumem:" not in capsys.readouterr().err


def test_the_device_stays_on_in_a_cell_that_is_measured(shell: Any) -> None:
    result = run(shell, "%%gpumem -q\n%gpumem_device off\n")
    assert "a recording is under way" in str(result.error_in_exec)
    assert gpu.current() is not None


def test_unloading_in_a_measured_cell_ends_the_measuring(shell: Any) -> None:
    result = run(shell, "%%gpumem -q\n%unload_ext gpumem_magic\nx = 5\n")
    assert result.success
    assert shell.user_ns["x"] == 5
    assert gpu.current() is None
    assert under_way._run is None


@pytest.mark.skipif(sys.gettrace() is not None, reason="something traces already")
@pytest.mark.parametrize(
    "then",
    ["%gpumem_device off", "%%gpumem -q -o found\nx = torch.empty(1000, device='cuda')", "%unload_ext gpumem_magic"],
)
def test_a_device_that_an_interrupt_left_half_off(shell: Any, then: str) -> None:
    functions = ("undo", "remove", "_remove", "_off")
    with Interruption(only=functions) as counted:
        run(shell, "%gpumem_device off")
    assert gpu.current() is None
    for number in range(1, counted.count, counted.count // 9):
        machine = gpu.turn_on("T4")
        with Interruption(number, functions) as interrupted, suppress(KeyboardInterrupt):
            run(shell, "%gpumem_device off")
        assert interrupted.count >= number
        assert run(shell, then).success
        if then.startswith("%%"):
            assert shell.user_ns["found"].checkpoints[-1].allocated == 4096
            assert run(shell, "%gpumem_device off").success
        elif then.startswith("%unload"):
            shell.run_line_magic("load_ext", "gpumem_magic")
        assert gpu.current() is None
        assert not machine.replaced()
        # (A build for a card has its own.)
        assert ("_cuda_setDevice" in vars(torch._C)) == (torch.version.cuda is not None)


def test_a_mode_that_was_left_on_the_stack_does_not_keep_the_device_on(shell: Any) -> None:
    torch._C._push_on_torch_dispatch_stack(machine_on().engine.mode)
    assert run(shell, "%gpumem_device off").success
    assert gpu.current() is None


# ---- what signal handlers raise


class TooLong(Exception):
    """A timeout of the program's own."""


def _raise(number: int, frame: Any) -> None:
    raise TooLong


def _raise_any(*given: Any) -> None:
    raise TooLong


@pytest.fixture
def alarm() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGALRM)
    # What a handler raises in the middle of one of these (Hypothesis has one) goes nowhere, and a loop would not end.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.callbacks[:] = callbacks


@pytest.mark.parametrize("handler", [_raise, _raise_any, lambda number, frame: _raise(number, frame)])
def test_a_guard_swallows_its_own_and_nothing_of_a_handlers(alarm: Any, handler: Any) -> None:
    guard = Guard()
    alarm(handler)
    with guard("a division"):
        1 / 0  # noqa: B018
    assert len(guard.notes) == 1
    with pytest.raises(TooLong), guard("a signal"):
        signal.raise_signal(signal.SIGALRM)
    assert len(guard.notes) == 1
    with guard("another"):
        pass


def test_who_raised_it_is_seen_through_calls(alarm: Any) -> None:
    def work() -> None:
        signal.raise_signal(signal.SIGALRM)
        time.sleep(1)

    alarm(_raise)
    with pytest.raises(TooLong) as caught:
        work()
    assert not is_own_failure(caught.value)
    with pytest.raises(TooLong) as caught:
        _raise(0, None)
    assert is_own_failure(caught.value)


def test_a_timeout_ends_a_measured_loop_and_is_the_users(shell: Any, alarm: Any) -> None:
    """It comes while our hooks work, which most of the time they do."""
    alarm(_raise)
    shell.user_ns.update(TooLong=TooLong, signal=signal)
    for _ in range(5):
        shell.user_ns.pop("y", None)
        assert run(shell, TIMEOUT).success
        assert shell.user_ns["y"] == "ended"


def test_the_traceback_of_an_interrupt_shows_no_line_of_ours(shell: Any, alarm: Any) -> None:
    alarm(_raise)
    shell.user_ns.update(signal=signal)
    result = run(shell, "%%gpumem -q\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 20)\nwhile True:\n    x = 1\n")
    assert isinstance(result.error_in_exec, TooLong)
    entry, names = result.error_in_exec.__traceback__, []
    while entry is not None:
        names.append(entry.tb_frame.f_code.co_filename)
        entry = entry.tb_next
    inside = [name for name in names[names.index(names[-1]) - 1 :] if name.startswith(PACKAGE)]
    assert inside == []


@pytest.mark.parametrize("raised", ["", "1 / 0"])
def test_an_interrupt_of_the_report_is_told_in_a_line_and_takes_no_errors_place(
    shell: Any, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ActiveRecording, "close", interrupted)
    with capture_output() as said:
        result = shell.run_cell(f"%%gpumem\nx = 1\n{raised}")
    assert said.stderr == "gpumem: interrupted while the report was made: there is none. The cell itself had ended\n"
    assert type(result.error_in_exec) is (ZeroDivisionError if raised else KeyboardInterrupt)
    assert "measured_cell.py" not in said.stdout
    assert "close(" not in said.stdout
    assert shell.user_ns["x"] == 1
