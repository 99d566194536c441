"""Ending a trial's loops: each as ``break`` would, in the program's own functions and files too, so that what follows it is run.

A loop that trains ends once its iterations repeat. A loop around it, over epochs say, goes on until its own turns come back to
where they were: what lies between two of them, an evaluation, may need more than any step, and leave something behind.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from statistics import fmean
from types import CodeType, FunctionType
from typing import Any

from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.recording.as_written import Definition, InCode, keep_for_compiler
from gpumem_magic.recording.hook import new_hook_name
from gpumem_magic.recording.inside import InsideError, compiled_again
from gpumem_magic.recording.instrument import Statement, with_constants
from gpumem_magic.recording.limit import IterationLimit
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.trials.counting import CHEAP_EVENTS
from gpumem_magic.trials.further_turns import FurtherTurns
from gpumem_magic.virtual.engine.device import VirtualDevice

Key = tuple[str, int]
"""A loop: the file or function that it stands in, and its number there."""

# What grows from the first half of the iterations to the second is run on while that is cheap; by more than this of what is held,
# until the allocator has done so much: half a minute's work.
_GROWTH, _MANY_EVENTS = 1 / 1000, 100_000
# Where turns of an outer loop never leave memory just as it was: so many that took and left the same.
_TURNS_ALIKE = 4


@dataclass
class _Loop:
    """A loop that runs. steps: of the optimizer, when it began. around: whether a loop inside it trained in this turn. seen:
    after each such turn, where everything lies, how much that is, and how high it went."""

    steps: int
    around: bool = False
    seen: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


class TrialLimit(IterationLimit):
    """Ends the loops of a trial's program. What a library's own loop does is left at its next forward, as ever.

    After `most` iterations only what takes no more than before is long enough; after `last` everything is. runs_in: where
    trials share their beginning, each goes on in a copy of the process that began.
    """

    def __init__(
        self,
        most: int | None,
        further: FurtherTurns,
        devices: Sequence[VirtualDevice],
        runs_in: Callable[[], int],
        last: int | None = None,
    ) -> None:
        super().__init__(most, further.are_known, lambda: further.events, runs_in)
        self._last = last
        self._further = further
        self._devices = devices
        self._loops: dict[Key, _Loop] = {}
        self._heads = self._heads_at_step = 0
        self._is_a_librarys = False
        # What was held after each step, or at the head of each turn of a loop of the cell's that makes none.
        self._held: list[int] = []
        # Where the allocators' work stood when that loop began; None while steps are counted.
        self._begun: int | None = None
        # What each iteration still added when it was ended, in bytes, and after how many that was.
        self.growing = self.left_after = 0
        # Whether what follows in a call was not run.
        self.left_a_call = False

    @property
    def grown(self) -> int:
        """By how many bytes more was held after the last iteration than after the first, or second."""
        return max(0, self._held[-1] - self._held[1]) if len(self._held) > 1 else 0

    def _at_most(self, count: int) -> bool:
        if not super()._at_most(count):
            return False
        if self._begun is not None and self._further.events - self._begun < CHEAP_EVENTS:
            # It may be what freezes parameters, or fills a list: cut short, it would make another program.
            return False
        half = len(self._held) // 2
        before = max(self._held[:half], default=0)
        growth = max(self._held[half:], default=0) - before if before else 0
        worth = _MANY_EVENTS if growth > _GROWTH * before else CHEAP_EVENTS
        if growth > 0 and (count < self._last if self._last is not None else self._further.events < worth):
            return False
        if half:
            self._note_growth(self._held[:half], self._held[half:], count)
        return True

    def _note_growth(self, first: Sequence[int], second: Sequence[int], count: int) -> None:
        """Sizes may differ from iteration to iteration, so that one of the later ones has more by chance."""
        if min(second) > fmean(first):
            self.growing = round((fmean(second) - fmean(first)) * 2 / (len(first) + len(second)))
            self.left_after = self.left_after or count

    def _note_held(self) -> None:
        self._held.append(sum(device.allocator.allocated for device in self._devices))

    def statement_began(self, statement: Statement) -> None:
        super().statement_began(statement)
        if statement.kind in ("for", "while"):
            self.began(("", statement.index))

    def should_end(self, loop: Statement, iteration: tuple[int, ...], steps_expected: bool) -> bool:
        if self._most is not None:
            if len(iteration) == 1 and self.steps == self._at_start.get(loop.index, 0):
                if iteration[0] == 1:
                    self._begun = self._further.events
                    self._held.clear()
                self._note_held()
            return super().should_end(loop, iteration, steps_expected)
        return self.ends(("", loop.index))

    def began(self, key: Key) -> None:
        """A loop is about to begin."""
        if self._in_its_thread():
            self._loops.pop(key, None)
            self._loops[key] = _Loop(self.steps)

    def ends(self, key: Key) -> bool:
        """Whether a loop, at the head of an iteration, is to end."""
        loop = self._loops.get(key)
        if loop is None or not self._in_its_thread():
            return False
        self._heads += 1
        if self.steps == loop.steps:
            return False
        if self._most is None and loop.around:
            loop.around = False
            loop.seen.append(self._state())
            if self._enough() and not _comes_back(loop.seen):
                # Its next turn's iterations have to repeat anew.
                self._further.begin_anew()
        # It trains, so that those that began before it are around it.
        for other in itertools.takewhile(lambda one: one is not loop, self._loops.values()):
            other.around = True
        if not self._enough() or (loop.seen and not _comes_back(loop.seen)):
            return False
        self.stopped = True
        return True

    def _state(self) -> tuple[int, tuple[int, ...]]:
        segments = [one for device in self._devices for one in device.segments()]
        places = hash(tuple((one.address, one.total_size, tuple(map(repr, one.blocks))) for one in segments))
        return places, tuple(
            size for one in self._devices for size in (one.allocator.allocated, one.allocator.peak_reserved)
        )

    def _stepped(self, optimizer: Any) -> None:
        before = self.steps
        super()._stepped(optimizer)
        if self.steps > before:
            if self._begun is not None:
                self._begun = None
                self._held.clear()
            self._note_held()
            self._is_a_librarys = self._heads == self._heads_at_step
            self._heads_at_step = self._heads

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._is_a_librarys:
            try:
                super()._before_forward(module, args)
            except StopRun:
                self.left_a_call = True
                raise


def _comes_back(seen: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Whether an outer loop's turns, of which `seen` are the ends, leave everything where it was."""
    if len(seen) > 1 and seen[-1] == seen[-2]:
        return True
    last = [sizes for _, sizes in seen[-_TURNS_ALIKE:]]
    return len(last) == _TURNS_ALIKE and len(set(last)) == 1


class _Hook(InCode):
    """What the loops of a file or function call."""

    def __init__(self, limit: TrialLimit, name: str) -> None:
        self._limit = limit
        self._name = name
        # What a loop has fetched, until its variable has it: the loop may end before.
        self.item: object = None

    def began(self, number: int) -> None:
        self._limit.began((self._name, number))

    def ends(self, number: int) -> bool:
        ends = self._limit.ends((self._name, number))
        if ends:
            self.item = None
        return ends

    def take(self) -> object:
        item, self.item = self.item, None
        return item


class _Endable(ast.NodeTransformer):
    """Asks the hook at the head of each iteration of the loops in functions."""

    def __init__(self, hook_name: str) -> None:
        self._hook_name = hook_name
        # For each function that it is in: whether a loop of it was changed.
        self._in_functions: list[bool] = []
        self._numbers = itertools.count()

    def in_definition(self, node: ast.AST, source: str) -> None:
        self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._inside(node)

    def _inside(self, node: Definition) -> ast.AST:
        written = deepcopy(node.body)
        self._in_functions.append(False)
        self.generic_visit(node)
        if self._in_functions.pop():
            keep_for_compiler(node, written)
        return node

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.AST]:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.AST]:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        if not self._in_functions:
            return node
        self._in_functions[-1] = True
        number = ast.Constant(next(self._numbers))
        head: list[ast.stmt] = [ast.If(self._call("ends", number), [ast.Break()], [])]
        if isinstance(node, ast.For):
            # The next item goes to the hook first, and to the loop's variable only if the loop goes on.
            head.append(ast.Assign([node.target], self._call("take")))
            node.target = ast.Attribute(ast.Constant(self._hook_name), "item", ast.Store())
        node.body = [*(ast.copy_location(one, node) for one in head), *node.body]
        return [ast.copy_location(ast.Expr(self._call("began", number)), node), node]

    def _call(self, method: str, *given: ast.expr) -> ast.expr:
        return ast.Call(ast.Attribute(ast.Constant(self._hook_name), method, ast.Load()), list(given), [])


class LoopEnds:
    """Has a program's loops ask `TrialLimit`. Nothing is put back: the process is the trial's own, and ends with it."""

    def __init__(self, limit: TrialLimit) -> None:
        self._limit = limit

    def in_tree(self, tree: ast.Module, name: str) -> Callable[[CodeType], CodeType]:
        """Rewrites a file's functions; what is compiled of it has to go through what this returns."""
        hook_name = new_hook_name()
        _Endable(hook_name).visit(tree)
        ast.fix_missing_locations(tree)
        return lambda code: _with_inner(code, {hook_name: _Hook(self._limit, name)})

    def in_functions(self, functions: Iterable[FunctionType]) -> None:
        """Of cells that ran before, and of modules that are imported already. A function whose source is not there stays."""
        for function in functions:
            hook_name = new_hook_name()
            with suppress(InsideError):
                code = compiled_again(function, "", _Endable(hook_name).in_definition)
                hook = _Hook(self._limit, f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}")
                function.__code__ = _with_inner(code, {hook_name: hook})

    def in_imports(self) -> None:
        """Of the program's own files that are imported from now on."""
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            if whose(path) != OWN:
                return plain(loader, fullname)
            tree = ast.parse(loader.get_data(path), path)
            finished = self.in_tree(tree, path)
            return finished(compile(tree, path, "exec", dont_inherit=True))

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def _with_inner(code: CodeType, objects: Mapping[str, object]) -> CodeType:
    """`with_constants`, also in the functions within."""
    inner = [_with_inner(one, objects) if isinstance(one, CodeType) else one for one in code.co_consts]
    return with_constants(code.replace(co_consts=tuple(inner)), objects)
