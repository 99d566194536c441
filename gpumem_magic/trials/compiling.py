"""A program with and without `torch.compile`: each in a process of its own, and both side by side."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpumem_magic.looks.objects import attribute, name_of_class
from gpumem_magic.report.kept import side_by_side
from gpumem_magic.report.model import CATEGORIES, LABELS
from gpumem_magic.trials import cards
from gpumem_magic.trials.one_run import tried
from gpumem_magic.trials.programs import Running, Subject
from gpumem_magic.trials.tried import FITS, Tried
from gpumem_magic.units import amount
from gpumem_magic.views.compared import moves, row
from gpumem_magic.views.display import HTML, PLAIN, asked_for, in_terminal
from gpumem_magic.views.inside import tree
from gpumem_magic.views.sheet import Sheet
from gpumem_magic.virtual.compiler.tuning import leave_out_trials

# Lines for modules.
_MOST_MODULES = 12
_COMPILE = re.compile(r"\bcompile\b")


def compare(program: Subject, device: str | None = None) -> Compared:
    """Runs the program twice on a virtual card. device: its name; None as for what fits. Raises DeviceError, in one line."""
    name = device or cards.usual()
    return Compared(tried(_Eagerly(program), name, {}), tried(_Compiled(program), name, {}))


class _Eagerly:
    """The program without what it compiles itself."""

    def __init__(self, program: Subject) -> None:
        self._program = program

    def prepared(self, values: Mapping[str, int]) -> Running:
        torch.compiler.set_stance("force_eager")
        return self._program.prepared(values)


class _Compiled:
    """The program as it is, where it compiles something; else with its models compiled. What the compiler tries in a first run is
    left out: it would hide what compiled code takes."""

    def __init__(self, program: Subject) -> None:
        self._program = program

    def prepared(self, values: Mapping[str, int]) -> Running:
        leave_out_trials()
        running = self._program.prepared(values)
        if not _compiles(running):
            _compile_models()
        return running


def _compiles(running: Running) -> bool:
    """Whether the program mentions `compile`, or something that was compiled before."""
    known = running.namespace()
    return bool(_COMPILE.search(running.source)) or any(
        _is_compiled(known[name]) for name in running.names if name in known
    )


def _is_compiled(thing: Any) -> bool:
    kept = attribute(thing, "_torchdynamo_orig_callable") or attribute(thing, "_compiled_call_impl")
    return kept is not None or name_of_class(type(thing)) == "OptimizedModule"


def _compile_models() -> None:
    """From now on every module with parameters that is called from outside all others is compiled first. In a trial's own
    process: it is never undone."""
    plain: Any = torch.nn.Module.__call__
    compiled: dict[int, tuple[torch.nn.Module, Any]] = {}

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The compiler looks at how modules are called, and shall find what PyTorch has there.
        torch.nn.Module.__call__ = plain  # type: ignore[method-assign]
        try:
            if id(self) in compiled:
                # Also in a backward, where a checkpoint runs it once more.
                return compiled[id(self)][1](*args, **kwargs)
            # (What `torch.jit` traces may not be compiled.)
            elsewhere = torch._C._current_graph_task_id() != -1 or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
            if elsewhere or _is_compiled(self) or next(self.parameters(), None) is None:
                return plain(self, *args, **kwargs)
            compiled[id(self)] = self, torch.compile(self)
            return compiled[id(self)][1](*args, **kwargs)
        finally:
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


class Compared:
    """Two runs: `eager` and `compiled`, shown side by side."""

    def __init__(self, eager: Tried, compiled: Tried) -> None:
        self.eager = eager
        self.compiled = compiled

    def __repr__(self) -> str:
        return str(self._sheet())

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        data: dict[str, Any] = {PLAIN: repr(self)}
        if not in_terminal():
            data[HTML] = self._sheet().html()
        wanted = asked_for(include, exclude)
        return {kind: text for kind, text in data.items() if kind in wanted}

    def _sheet(self) -> Sheet:
        return Sheet(self._answer(), list(self._rows()), after="\n".join(self._after()))

    def _answer(self) -> str:
        failed = [
            f"{word} it {_ending(one)}"
            for word, one in (("Eagerly", self.eager), ("Compiled", self.compiled))
            if one.ending != FITS
        ]
        before, now = self.eager.allocated, self.compiled.allocated
        if failed:
            return f"{'; '.join(failed)}."
        changes = moves(self.eager.categories, self.compiled.categories, max(before, now))
        if not changes and amount(before) == amount(now):
            return f"Compiled and eagerly it peaks alike, at {amount(now)} allocated."
        if not changes:
            return f"Compiled it peaks at {amount(now)} allocated, eagerly at {amount(before)}: nearly the same."
        return f"Compiled it peaks at {amount(now)} allocated, eagerly at {amount(before)}: {changes}."

    def _categories(self) -> Iterator[tuple[str, int, int]]:
        for name in CATEGORIES:
            size, other = self.eager.categories.get(name, 0), self.compiled.categories.get(name, 0)
            if size or other:
                yield name, size, other

    def _rows(self) -> Iterator[Sequence[str]]:
        yield "at the peak", "eager", "compiled", "difference"
        for name, size, other in self._categories():
            yield row(LABELS[name], size, other)
        yield row("allocated", self.eager.allocated, self.compiled.allocated)
        yield row("nvidia-smi at its highest", self.eager.used, self.compiled.used)
        yield from self._by_module()

    def _by_module(self) -> Iterator[Sequence[str]]:
        """What is kept for backward by module, as deep as compiled code says; alike modules in one line."""
        before, now = (sum(one.kept.values()) for one in (self.eager, self.compiled))
        if not (before and now):
            return
        yield row("kept at the first backward", before, now)
        for line in tree(side_by_side(self.eager.kept, self.compiled.kept), _MOST_MODULES):
            size, _, other = line.bytes
            yield row(f"{'  ' * (line.depth + 1)}{line.name}{', each' if line.times > 1 else ''}", size, other)

    def _after(self) -> Iterator[str]:
        yield (
            f"Both ran on a virtual {self.eager.device}, each in a process of its own. Compiled was what the cell compiles "
            "itself, or, where it compiles nothing, each model that it calls."
        )
        yield from (note for note in self.compiled.notes if "torch.compile" in note)


def _ending(one: Tried) -> str:
    place = f" at line {one.line}, `{one.statement}`" if one.line else ""
    return f"raises {one.error}{place}" if one.error and one.ending != "memory" else f"runs out of memory{place}"
