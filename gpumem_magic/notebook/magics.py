"""The IPython face: ``%%gpumem``, ``%gpumem`` and ``%gpumem_device``, ``_smi``, ``_watch``. Parses, runs and displays.

What is measured, and how, is `gpumem_magic.session`'s business. Loading the extension imports no torch.
"""

# IPython's decorators carry no types.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import functools
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.notebook import auto, devices
from gpumem_magic.notebook.advising import advise, advise_last
from gpumem_magic.notebook.engines import on_engines
from gpumem_magic.notebook.fitting import compare_compiled, fit
from gpumem_magic.notebook.flags import words
from gpumem_magic.notebook.help import card
from gpumem_magic.notebook.holding import free, who
from gpumem_magic.notebook.load import load
from gpumem_magic.notebook.measured_cell import MeasuredCell
from gpumem_magic.notebook.ranks import ranks
from gpumem_magic.notebook.shell_hooks import ShellHooks, value_or_coroutine
from gpumem_magic.notebook.trial import try_remedy
from gpumem_magic.notebook.watching import watch, watch_words
from gpumem_magic.recording import under_way
from gpumem_magic.recording.cell import CellRun, prepare
from gpumem_magic.session import device as choosing
from gpumem_magic.uninterrupted import whole
from gpumem_magic.views.sheet import show


@magics_class
class GpuMemMagics(Magics):
    """The magics of one shell. ``%reload_ext`` makes a new object of it."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        # The cell that is measured now.
        self.running: MeasuredCell | None = None
        self._hooks = ShellHooks(shell, self._statement_of)
        for kind, names in self.magics.items():
            for name in names:
                self._hooks.complete(f"{'%' if kind == 'line' else '%%'}{name}", getattr(self, name).parser.complete)
        self._hooks.suggest(self.magics)

    @words()
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

        ``%%gpumem --fit batch_size=1..1024 --on T4,A100-40GB`` runs nothing here: copies of the cell run on virtual cards, in
        processes of their own. So does ``%%gpumem --ranks 8 --device H100``, where the cell runs as ranks of eight, with ``RANK``
        and ``WORLD_SIZE`` in its environment and process groups of this size; one report has all ranks.
        ``%%gpumem --engines [0,3]`` runs it on engines of ipyparallel, as ``%%px`` does, with one report of them.
        ``%%gpumem --compare compile`` runs copies without torch.compile and with it.

        ``%%gpumem --advise`` runs copies of the cell in the same way, each with a change that may save memory.
        """
        __tracebackhide__ = True
        options, statement = self.gpumem.parser.read_front(line)
        if cell is None and not statement:
            if line.strip():
                raise UsageError("%gpumem: the flags need a statement after them; %gpumem alone prints the state")
            print(devices.memory_text())
            return None
        if cell is not None and statement:
            raise UsageError(f"unexpected {statement!r} after %%gpumem: put the code on the lines below")
        body, lines_above = (statement, 0) if cell is None else (cell, 1)
        if options.engines is not None:
            return on_engines(self.shell, body, options)
        prepared = prepare(self.shell, body, lines_above)
        if prepared.empty:
            if not options.quiet:
                print("gpumem: nothing ran: the cell has no statement")
            return None
        if options.ranks is not None:
            return ranks(self.shell, prepared, options)
        if options.advise:
            return advise(self.shell, prepared, options, lines_above)
        if options.fit:
            return fit(self.shell, prepared, options)
        if options.compare:
            return compare_compiled(self.shell, prepared, options)
        if options.on is not None:
            raise UsageError("%%gpumem: --on names the cards for --fit")
        if options.as_ranks is not None:
            raise UsageError("%%gpumem: --as names ranks of --ranks N")
        run = CellRun(self.shell, prepared)
        measured = MeasuredCell(self, run, options, (GpuMemMagics._run.__code__,))
        if not prepared.needs_await:
            return self._run(measured, run)
        measured.coroutine = self._run_awaited(measured, run)
        return value_or_coroutine(self.shell, measured.coroutine)

    @words(str.split)
    @line_magic
    def gpumem_device(self, line: str) -> None:
        """Chooses the GPU: a virtual one (T4, A100-40GB, colab-2021, 2xT4, virtual:24GiB), a real one (cuda, cuda:1), or off.

        ::

          %gpumem_device T4
          %gpumem_device T4,context=400MiB,cudnn=none
          %gpumem_device off

        Alone it says what is on, and the names that it knows.
        """
        name = " ".join(self.gpumem_device.parser.read(line).name).strip("\"'")
        try:
            if not name:
                print(devices.state())
            elif name == "off":
                print(choosing.off())
            else:
                print(choosing.choose(name))
        except DeviceError as error:
            raise UsageError(str(error)) from None

    @words()
    @line_magic
    def gpumem_help(self, line: str) -> None:
        """Says what to type for what you want to know."""
        self.gpumem_help.parser.read(line)
        show(card())

    @words()
    @line_magic
    def gpumem_smi(self, line: str) -> None:
        """Prints used and total memory of each device, as nvidia-smi says it: ``3769MiB / 16160MiB``."""
        self.gpumem_smi.parser.read(line)
        print("\n".join(devices.smi_lines()))

    @words(watch_words)
    @no_var_expand
    @line_magic
    def gpumem_watch(self, line: str) -> None:
        """Shows the GPU's memory by category, live, while other cells run.

        ::

          %gpumem_watch
          %gpumem_watch --hz 5
          %gpumem_watch --static
          %gpumem_watch --engines [0,3]
          %gpumem_watch mark warm-up is over
          %gpumem_watch pause
          %gpumem_watch resume
          %gpumem_watch stop

        ``stop`` leaves a picture in the place of the live chart; `gpumem_magic.last_watch()` has the samples.
        """
        watch(self.shell, self.gpumem_watch.parser.read(line))

    @words(functools.partial(shlex.split, posix=False))
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
        """
        who(self.shell, self.gpumem_who.parser.read(line))

    @words()
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
        free(self.shell, self.gpumem_free.parser.read(line))

    @words(str.split)
    @no_var_expand
    @line_magic
    def gpumem_try(self, line: str) -> None:
        """Runs the last failed cell again with one thing changed, and says whether it passes then.

        ::

          %gpumem_try expandable_segments:True
          %gpumem_try foreach=False

        An allocator's option is set for this run, on a virtual device; ``foreach``, ``fused`` and ``set_to_none`` are put into
        the cell's own calls. It says first what it will run.
        """
        if self.running is not None and self.running.is_running():
            raise UsageError("%gpumem_try runs a cell of its own: type it in a cell that is not measured")
        options = self.gpumem_try.parser.read(line)
        try_remedy(self.shell, " ".join(options.remedy), sure=options.yes)

    @words()
    @line_magic
    def gpumem_advise(self, line: str) -> None:
        """Says what would make the last cell fit, or leave room: each change is made to a copy of it, and run.

        ::

          %gpumem_advise
          %gpumem_advise --device A100-40GB -o advice

        The copies run on a virtual card, in processes of their own; the notebook is as before. ``%%gpumem --advise`` above a
        cell does the same without running the cell itself.
        """
        if self.running is not None and self.running.is_running():
            raise UsageError("%gpumem_advise is for the cell before: type it in a cell that is not measured")
        advise_last(self.shell, self.gpumem_advise.parser.read(line))

    @words()
    @line_magic
    def gpumem_load(self, line: str) -> None:
        """Reports memory snapshots (``torch.cuda.memory._dump_snapshot``) as it does cells, with an interactive timeline.

        ::

          %gpumem_load snapshot.pickle
          %gpumem_load rank0.pickle rank1.pickle
          %gpumem_load snapshot.pickle.gz --device 1 --at end -o report
          %gpumem_load snapshot.pickle --html timeline.html --quiet

        Nothing in a file is executed.
        """
        load(self.shell, self.gpumem_load.parser.read(line))

    @words()
    @line_magic
    def gpumem_auto(self, line: str) -> None:
        """Records every cell from now on, cheaply: the counters before and after it.

        ::

          %gpumem_auto on
          %gpumem_auto off
        """
        state = self.gpumem_auto.parser.read(line).state
        if state is None:
            print(
                "Every cell is recorded."
                if auto.is_on()
                else "Cells are not recorded: `%gpumem_auto on` starts recording."
            )
        else:
            print(auto.turn_on(self.shell) if state == "on" else auto.turn_off())

    @words()
    @line_magic
    def gpumem_history(self, line: str) -> None:
        """Shows what each recorded cell did to the GPU's memory, and which added more when it was run again."""
        self.gpumem_history.parser.read(line)
        show(auto.history_sheet())

    def unload(self) -> None:
        """Takes the magics and everything that came with them out of the shell, ends a watch, and turns a virtual device off."""
        from gpumem_magic.widgets.watch import stop_if_running

        auto.forget()
        stop_if_running()
        # Also in a cell that is measured: it goes on without.
        under_way.abandon()
        if choosing.is_any():
            try:
                print(choosing.off())
            except DeviceError as error:
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

    def _run(self, measured: MeasuredCell, run: CellRun) -> Any:
        __tracebackhide__ = True
        try:
            with measured:
                return run.run()
        finally:
            measured.end()
        return None

    async def _run_awaited(self, measured: MeasuredCell, run: CellRun) -> Any:
        __tracebackhide__ = True
        try:
            with measured:
                return await run.run_awaited()
        finally:
            measured.end()
        return None

    def _statement_of(self, line: str) -> str:
        return str(self.gpumem.parser.read_front(line)[1])


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gpumem_magic``: registers the magics, and nothing else."""
    try:
        with whole:
            shell.register_magics(GpuMemMagics(shell))
    except BaseException:
        # IPython does not count it as loaded then.
        unload_ipython_extension(shell)
        raise


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpumem_magic``: leaves the shell, and torch, as they were before."""
    magics = shell.magics_manager.registry.get(GpuMemMagics.__name__)
    if magics is not None:
        with whole:
            magics.unload()
