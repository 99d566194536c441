"""The IPython face: ``%%gpumem``, ``%gpumem`` and ``%gpumem_device``, ``_smi``, ``_watch``. It parses, runs and displays.

What is measured, and how, is `gpumem_magic.session`'s business, which is imported when it is first needed: loading the
extension imports no torch.
"""

# IPython's decorators carry no types.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import argparse
import keyword
import re
import sys
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from gpumem_magic.recording.cell import CellRun, prepare
from gpumem_magic.shell_hooks import ShellHooks, hide_frames_once, value_or_coroutine

_WORD = re.compile(r"""\s*("[^"]*"|'[^']*'|\S+)""")
_FLAGS = (
    "--budget",
    "--device",
    "--into",
    "--max-delta",
    "--max-iterations",
    "--no-lines",
    "--output",
    "--plot",
    "--quiet",
    "--table",
    "--until-repeat",
    "--warn",
)


def _identifier(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name for a variable")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    from gpumem_magic.virtual.catalog import UnknownDevice, parse_size

    try:
        return parse_size(text)
    except UnknownDevice as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@magics_class
class GpuMemMagics(Magics):
    """The magics of one shell. ``%reload_ext`` makes a new object of it."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.running = False
        self._hooks = ShellHooks(shell, self._statement_of)
        for key in ("%gpumem", "%%gpumem"):
            self._hooks.complete(key, _complete_flags)
        self._hooks.complete("%gpumem_device", _complete_devices)
        self._hooks.complete("%gpumem_watch", _complete_watch)
        self._hooks.complete("%gpumem_who", _complete_who)
        self._hooks.complete("%gpumem_free", _complete_free)
        self._hooks.complete("%gpumem_auto", lambda _event: ["on", "off"])
        self._hooks.complete("%gpumem_load", _complete_load)

    @magic_arguments()
    @argument("-o", "--output", metavar="NAME", type=_identifier, help="Binds the report to the variable NAME.")
    @argument("-q", "--quiet", action="store_true", help="Shows nothing; see -o and gpumem_magic.last_report().")
    @argument("--no-lines", action="store_true", help="Only before, peak and after, without a row for each statement.")
    @argument("--plot", action="store_true", help="Shows only the picture.")
    @argument("--table", action="store_true", help="Shows only the table.")
    @argument("--max-iterations", metavar="N", type=_count, help="Ends training after N iterations.")
    @argument("--until-repeat", action="store_true", help="Ends training once its iterations repeat exactly.")
    @argument(
        "--budget", metavar="SIZE", type=_size, help="Fails if the peak of allocated memory is more, as in 10GiB."
    )
    @argument("--max-delta", metavar="SIZE", type=_size, help="Fails if the cell leaves more allocated than it found.")
    @argument(
        "--into", metavar="NAME[,NAME]", help="Also shows the statements inside these functions: train_step,utils.fit."
    )
    @argument("--warn", action="store_true", help="With --budget and --max-delta: warns, and does not fail.")
    @argument(
        "--device", metavar="NAME", help="The device to measure: cuda:1, T4, A100-40GB, 2xT4 (see %%gpumem_device)."
    )
    @no_var_expand
    @line_cell_magic
    def gpumem(self, line: str, cell: str | None = None) -> Any:
        """Shows where GPU memory goes while a cell runs: a row for each statement, by category.

        ::

          %%gpumem --device T4
          model = torch.nn.Linear(4096, 4096).cuda()
          optimizer = torch.optim.Adam(model.parameters())
          for step in range(2):
              optimizer.zero_grad()
              loss = model(torch.randn(64, 4096, device="cuda")).sum()
              loss.backward()
              optimizer.step()

        The cell runs once, as it would without the first line; its last value is shown as ever. With no GPU and no device
        chosen, a virtual T4 is used.

        ``%gpumem -q -o report train()`` measures one statement (write ``--`` between flags and a statement that begins with a
        minus), and ``%gpumem`` alone prints the state of the devices.

        Where ``--max-iterations`` or ``--until-repeat`` ends a loop of the cell itself, the cell goes on behind the loop; where
        the loop is inside a call, the cell ends there.
        """
        __tracebackhide__ = True
        options, statement = self._parse(line)
        if cell is None and not statement:
            if line.strip():
                raise UsageError("%gpumem: the flags want a statement behind them; %gpumem alone prints the state")
            print(_session().state_text())
            return None
        if cell is not None and statement:
            raise UsageError(f"unexpected {statement!r} behind %%gpumem: the code goes on the lines below")
        body, lines_above = (statement, 0) if cell is None else (cell, 1)
        prepared = prepare(self.shell, body, lines_above)
        if prepared.empty:
            print("gpumem: nothing ran, there is no statement in the cell")
            return None
        run = CellRun(self.shell, prepared)
        if not prepared.needs_await:
            return self._run(run, options)
        return value_or_coroutine(self.shell, self._run_awaited(run, options))

    @magic_arguments()
    @argument("name", nargs="*", help="A GPU's name, or off.")
    @line_magic
    def gpumem_device(self, line: str) -> None:
        """Chooses the GPU: a virtual one (T4, A100-40GB, colab-2021, 2xT4, virtual:24GiB), a real one (cuda, cuda:1), or off.

        ::

          %gpumem_device T4
          %gpumem_device T4,context=400MiB
          %gpumem_device off

        Alone it says what is on, and the names that it knows.
        """
        session = _session()
        name = line.strip().strip("\"'")
        try:
            if not name:
                print(session.device_state())
            elif name == "off":
                print(session.device_off())
            else:
                print(session.choose_device(name))
        except session.DeviceError as error:
            raise UsageError(str(error)) from None

    @line_magic
    def gpumem_smi(self, line: str) -> None:
        """Prints used and total memory of each device, as nvidia-smi says it: ``3769MiB / 16160MiB``."""
        if line.strip():
            raise UsageError("%gpumem_smi takes no arguments")
        session = _session()
        try:
            print("\n".join(session.smi_lines()))
        except session.DeviceError as error:
            raise UsageError(str(error)) from None

    @no_var_expand
    @line_magic
    def gpumem_watch(self, line: str) -> None:
        """Shows the GPU's memory by category, live, while other cells run.

        ::

          %gpumem_watch
          %gpumem_watch --hz 5
          %gpumem_watch --static
          %gpumem_watch mark warm-up is over
          %gpumem_watch pause
          %gpumem_watch resume
          %gpumem_watch stop

        ``stop`` leaves a picture in the place of the live chart; `gpumem_magic.last_watch()` has the samples. ``--static`` is a
        plain picture, updated in place, for notebooks without custom widgets.
        """
        from gpumem_magic.widgets.magic import watch_line

        watch_line(self.shell, line)

    @no_var_expand
    @line_magic
    def gpumem_who(self, line: str) -> None:
        """Says who holds the GPU's memory, and what deleting each would really free.

        ::

          %gpumem_who
          %gpumem_who model
          %gpumem_who losses[0]
          %gpumem_who --modules --depth 4
          %gpumem_who --cycles

        ``--modules`` is a tree of layers, ``--cycles`` also looks for reference cycles that wait for Python's garbage collector,
        ``--all`` leaves nothing out.
        """
        from gpumem_magic.owners.magic import who_line

        who_line(self.shell, line)

    @no_var_expand
    @line_magic
    def gpumem_free(self, line: str) -> None:
        """Gives back what Python, IPython and PyTorch keep by themselves, and never a variable.

        ::

          %gpumem_free
          %gpumem_free --dry-run
          %gpumem_free out cache

        ``traceback`` is the last error's, ``out`` the results in Out, ``cycles`` runs Python's garbage collector and ``cache``
        empties PyTorch's cache. Without words: traceback, cycles and cache.
        """
        from gpumem_magic.owners.magic import free_line

        free_line(self.shell, line)

    @no_var_expand
    @line_magic
    def gpumem_try(self, line: str) -> None:
        """Runs the last failed cell again with one thing changed, and says whether it passes then.

        ::

          %gpumem_try expandable_segments:True
          %gpumem_try foreach=False

        An allocator's option is set for this run, on a virtual device; ``foreach``, ``fused`` and ``set_to_none`` are put into
        the cell's own calls. It says first what it will run. On a real device it wants ``--yes``.
        """
        if self.running:
            raise UsageError("%gpumem_try runs a cell of its own: type it in a cell that is not measured")
        from gpumem_magic.notebook.trial import try_line

        try_line(self.shell, line)

    @line_magic
    def gpumem_load(self, line: str) -> None:
        """Reports memory snapshots (``torch.cuda.memory._dump_snapshot``) as it does cells, with an interactive timeline.

        ::

          %gpumem_load snapshot.pickle
          %gpumem_load rank0.pickle rank1.pickle
          %gpumem_load snapshot.pickle.gz --device 1 --at end -o report
          %gpumem_load snapshot.pickle --html timeline.html --quiet

        ``--at`` is peak, end, or an event's number; ``--no-timeline`` shows only the report. Nothing in a file is executed.
        """
        from gpumem_magic.commands.load_magic import load_line

        load_line(self.shell, line)

    @line_magic
    def gpumem_auto(self, line: str) -> None:
        """Records every cell from now on, cheaply: the counters before and after it.

        ::

          %gpumem_auto on
          %gpumem_auto off
        """
        from gpumem_magic.notebook.magic import auto_line

        auto_line(self.shell, line)

    @line_magic
    def gpumem_history(self, line: str) -> None:
        """Shows what each recorded cell did to the GPU's memory, and which added more when it was run again."""
        from gpumem_magic.notebook.magic import history_line

        history_line(line)

    def unload(self) -> None:
        """Takes the magics and everything that came with them out of the shell, ends a watch, and turns a virtual device off."""
        auto = sys.modules.get("gpumem_magic.notebook.auto")
        if auto is not None:
            auto.forget()
        watch = sys.modules.get("gpumem_magic.widgets.watch")
        if watch is not None:
            watch.stop_if_running()
        session = sys.modules.get("gpumem_magic.session")
        if session is not None and session.is_device_chosen():
            try:
                print(session.device_off())
            except session.DeviceError as error:
                raise UsageError(str(error)) from None
        self._hooks.remove()
        manager = self.shell.magics_manager
        for kind, names in self.magics.items():
            for name in names:
                if getattr(manager.magics[kind].get(name), "__self__", None) is self:
                    del manager.magics[kind][name]
        manager.registry.pop(type(self).__name__, None)
        configurables: list[Any] = self.shell.configurables
        if self in configurables:
            configurables.remove(self)

    def _run(self, run: CellRun, options: argparse.Namespace) -> Any:
        __tracebackhide__ = True
        with _Measurement(self, run, options):
            return run.run()
        return None

    async def _run_awaited(self, run: CellRun, options: argparse.Namespace) -> Any:
        __tracebackhide__ = True
        with _Measurement(self, run, options):
            return await run.run_awaited()
        return None

    def _statement_of(self, line: str) -> str:
        return self._parse(line)[1]

    def _parse(self, line: str) -> tuple[argparse.Namespace, str]:
        """The flags at the front of a line, and the rest of it untouched. Raises UsageError, in one line."""
        parser = self.gpumem.parser
        flags: list[str] = []
        rest = line
        while (found := _WORD.match(rest)) and found[1].startswith("-"):
            flag, rest = found[1], rest[found.end() :]
            if flag == "--":
                break
            flags.append(flag)
            try:
                parser.parse_args([flag])
            except UsageError as error:
                # It wants a value, or it is wrong.
                value = _WORD.match(rest)
                if value is None or not str(error).endswith("expected one argument"):
                    raise UsageError(f"%gpumem: {error}") from None
                flags.append(value[1].strip("\"'"))
                rest = rest[value.end() :]
        try:
            options = parser.parse_args(flags)
        except UsageError as error:
            raise UsageError(f"%gpumem: {error}") from None
        if options.plot and options.table:
            raise UsageError("%gpumem: choose one of --plot and --table")
        rest = rest.strip()
        return options, "" if rest.startswith("#") else rest


class _Measurement:
    """The measuring around one run. What fails in it becomes a warning; the cell's own result or error stands."""

    def __init__(self, magics: GpuMemMagics, run: CellRun, options: argparse.Namespace) -> None:
        self._magics = magics
        self._shell = magics.shell
        self._run = run
        self._options = options
        self._recording: Any = None
        self._nested = False
        self._inside: Any = None

    def __enter__(self) -> None:
        self._nested = self._magics.running
        if self._nested:
            _warn("a %gpumem inside another does not measure: its code runs plainly, as a part of the outer one")
            return
        run = self._run
        session = None
        self._look_inside()
        try:
            session = _session()
            self._recording = session.open_recording(
                self._options.device, names=run.names, user_ns=self._shell.user_ns, own_file=run.filename
            )
            observer = self._recording.observer(
                self._options.max_iterations,
                not self._options.no_lines,
                until_repeat=self._options.until_repeat,
                source=run.source,
            )
            run.observe(observer)
        except Exception as error:
            if session is not None and isinstance(error, session.DeviceError):
                self._leave_inside()
                raise UsageError(str(error)) from None
            _warn(f"measuring is not possible here ({_in_one_line(error)}); the cell runs as it would without it")
        self._magics.running = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """True, which ends the cell without an error, only where a limit on iterations left it."""
        self._magics.running = self._nested
        self._leave_inside()
        stopped = error is not None and not self._nested and _is_stop(error)
        exceeded = None
        try:
            if stopped:
                self._run.leave(traceback)
            if self._recording is not None:
                place = None if error is None or stopped else self._run.failed(traceback)
                self._show(self._recording.close(None if stopped else error, place, self._shell.user_ns))
                exceeded = self._exceeded()
            if not stopped:
                hide_frames_once(self._shell, traceback)
        except Exception as own:
            _warn(f"the report could not be made ({_in_one_line(own)}); the cell itself ran as it would without it")
        if self._run.hook_failure is not None:
            _warn(f"measuring stopped half way ({self._run.hook_failure}); the cell itself ran on")
        if exceeded is not None:
            if self._options.warn or (error is not None and not stopped):
                _warn(exceeded)
            else:
                from gpumem_magic.notebook.budget import BudgetExceeded

                raise BudgetExceeded(exceeded) from None
        return stopped

    def _look_inside(self) -> None:
        """Rewrites the functions of ``--into`` for the run. Raises UsageError, in one line."""
        if self._options.into is None:
            return
        from gpumem_magic.recording.inside import Inside, InsideError, find_function

        names = [name.strip() for name in self._options.into.split(",") if name.strip()]
        try:
            functions = [find_function(name, self._shell.user_ns) for name in names]
            self._inside = Inside(functions, lambda label: _session().begin_range(label))
            self._inside.install()
        except InsideError as error:
            raise UsageError(str(error)) from None
        except Exception as error:
            _warn(f"--into is not possible here ({_in_one_line(error)}); the cell is measured without it")

    def _leave_inside(self) -> None:
        if self._inside is not None:
            self._inside.remove()

    def _exceeded(self) -> str | None:
        """What the cell used or left beyond its budgets, or None."""
        if self._options.budget is None and self._options.max_delta is None:
            return None
        from gpumem_magic.notebook.budget import Budget

        report = _session().last_report()
        return None if report is None else Budget(self._options.budget, self._options.max_delta).exceeded(report)

    def _show(self, report: Any) -> None:
        if self._options.output is not None:
            self._shell.user_ns[self._options.output] = report
        if self._options.quiet:
            return
        from IPython.display import display

        view = "plot" if self._options.plot else "table" if self._options.table else None
        display(report if view is None else report.view(view))


def _session() -> Any:
    from gpumem_magic import session

    return session


def _is_stop(error: BaseException) -> bool:
    """Whether our own limit on iterations left a call. Its module is there if it did: it is not imported for the question."""
    limit = sys.modules.get("gpumem_magic.recording.limit")
    return limit is not None and isinstance(error, limit.StopRun)


def _warn(text: str) -> None:
    # Not warnings.warn: a filter may turn that into an error, which would take the place of the cell's result.
    print(f"gpumem: {text}", file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _complete_flags(event: Any) -> list[str]:
    """The flags, and the devices' names behind ``--device``."""
    words = event.line.split()
    before = words[:-1] if event.symbol and words and words[-1] == event.symbol else words
    if before and before[-1] == "--device":
        return _device_names()
    return list(_FLAGS) if event.symbol.startswith("-") or not event.symbol else []


def _complete_devices(_event: Any) -> list[str]:
    return [*_device_names(), "off"]


def _complete_watch(event: Any) -> list[str]:
    from gpumem_magic.widgets.magic import complete

    return complete(event)


def _complete_load(event: Any) -> list[str]:
    from gpumem_magic.commands.load_magic import complete

    return complete(event)


def _complete_who(event: Any) -> list[str]:
    from gpumem_magic.owners.magic import complete_who

    return complete_who(event)


def _complete_free(event: Any) -> list[str]:
    from gpumem_magic.owners.magic import complete_free

    return complete_free(event)


def _device_names() -> list[str]:
    from gpumem_magic.virtual.models import CATALOG

    return ["cuda", *CATALOG]


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gpumem_magic``: registers the magics, and nothing else."""
    shell.register_magics(GpuMemMagics(shell))


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpumem_magic``: leaves the shell, and torch, as they were before."""
    magics = shell.magics_manager.registry.get(GpuMemMagics.__name__)
    if magics is not None:
        magics.unload()
