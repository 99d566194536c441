"""Cells that no one wrote: statements of every kind in every order, most of them sound, some of them wrong in one place."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

NAMES = ["a", "b", "c", "d", "e", "total", "items", "näme"]
EXCEPTIONS = ["ValueError", "KeyError", "ZeroDivisionError", "StopIteration", "RuntimeError", "Exception", "OSError"]
RARE_EXCEPTIONS = [
    "KeyboardInterrupt",
    "SystemExit",
    "GeneratorExit",
    "BaseException",
    "StopAsyncIteration",
    "SyntaxError",
]

# What each cell may use, so that most of it runs.
PRELUDE = """\
import asyncio, contextlib, itertools, sys, warnings
class Box:
    value = 3
    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs
    def __enter__(self):
        print("enter", self.args)
        return self
    def __exit__(self, kind, error, trace):
        print("exit", kind and kind.__name__)
        return bool(self.kwargs.get("swallow"))
    async def __aenter__(self):
        await asyncio.sleep(0)
        return self
    async def __aexit__(self, *error):
        await asyncio.sleep(0)
    def __iter__(self):
        return iter(self.args)
    async def __aiter__(self):
        for one in self.args:
            await asyncio.sleep(0)
            yield one
    def __repr__(self):
        return f"Box{self.args}"
    def __getattr__(self, name):
        raise AttributeError(f"no {name} here")
def same(value):
    return value
async def later(value):
    await asyncio.sleep(0)
    return value
def count(limit):
    try:
        for number in range(limit):
            got = yield number
            if got:
                print("got", got)
    finally:
        print("count is over")
a, b, c, d, e, total, items, näme = 1, 2, 3, "four", [5, 6], 0, {"k": 1}, None
"""


class Program:
    """One cell. source: where all chance comes from."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.numbers = 0
        self.awaits = source.random() < 0.25
        self.depth = 0
        # Wild programs fail early; calm ones get far.
        self.calm = source.random() < 0.7
        self.kind = ["module"]

    # ---- small things

    def pick(self, *choices: object) -> str:
        return str(self.source.choice(choices))

    def chance(self, one_in: float) -> bool:
        return self.source.random() < 1 / one_in

    def fresh(self) -> str:
        self.numbers += 1
        return f"v{self.numbers}"

    def name(self) -> str:
        if self.calm:
            return self.pick("a", "b", "c")
        return self.source.choice(NAMES)

    def expression(self, depth: int = 3) -> str:
        source = self.source
        if self.calm and self.chance(1.1):
            return self.calm_expression(depth)
        if depth == 0 or self.chance(4):
            return self.pick(
                *NAMES, source.randint(-3, 12), repr(source.choice(["", "text", "ü\n", "a'b"])), "None", "True", "[]",
                "1.5", "b'bytes'", "...", "Box", "_", "1_000", "0x1f", "2j",
            )  # fmt: skip
        below = depth - 1
        one, two = self.expression(below), self.expression(below)
        target = self.fresh()
        kinds = [
            f"{one} {self.pick('+', '-', '*', '//', '%', '==', '<', 'is', 'in', 'not in', 'and', 'or', '@', '|', '<<')} {two}",
            f"({one} if {two} else {self.expression(below)})",
            f"[{one}, {two}]",
            f"({one}, *{two})",
            f"{{{one}: {two}}}",
            f"{{**{one}, 'k': {two}}}",
            f"[{target} for {target} in {self.iterable(below)} if {two}]",
            f"{{{target}: {one} for {target} in {self.iterable(below)}}}",
            f"sum({target} for {target} in range({source.randint(0, 5)}))",
            f"(lambda {target}={one}: {target})()",
            f"(lambda *args, **kwargs: (args, kwargs))({one}, key={two})",
            f"({target} := {one})",
            f'f"{{{self.name()}!r:>5}} and {{{source.randint(0, 9)}:03d}}"',
            f"same({one})",
            f"Box({one}, {self.pick('swallow=True', 'key=1', '*e', '**items')})",
            f"str({one})[{source.randint(-2, 2)}:]",
            f"not {one}",
            f"len([{one}])",
            f"print({one}, {two})",
            f"list(itertools.islice({self.iterable(below)}, 3))",
            f"sorted([{source.randint(0, 9)}, {source.randint(0, 9)}], key=lambda {target}: -{target})",
            f"{self.name()}.{self.pick('value', 'args', 'missing', '__class__.__name__')}",
            f"{self.name()}[{source.randint(0, 2)}]",
            f"(yield_ := [{one}])[0]",
            f"max({source.randint(0, 9)}, {source.randint(0, 9)})",
            f"getattr({self.name()}, 'value', {one})",
        ]
        if self.awaits and self.kind[-1] in ("module", "async"):
            kinds += [f"(await later({one}))", f"[{target} async for {target} in Box({one}, {two})]"] * 3
        if self.kind[-1] == "generator":
            kinds += [f"(yield {one})", f"(yield from {self.iterable(below)})"]
        return source.choice(kinds)

    def calm_expression(self, depth: int) -> str:
        """One that does not fail, as long as a, b and c are numbers."""
        if depth == 0 or self.chance(3):
            return self.pick("a", "b", "c", "total", self.source.randint(0, 9), "len(e)")
        one, two, target = self.calm_expression(depth - 1), self.calm_expression(depth - 1), self.fresh()
        kinds = [
            f"{one} {self.pick('+', '-', '*', '==', '<', 'and', 'or')} ({two})", f"({one} if {two} else 7)", f"same({one})",
            f"({target} := {one})", f"sum({target} * {two} for {target} in range(3))", f"max([{one}, {two}])", f"Box({one}).value",
            f"(lambda {target}={one}: {target} + 1)()", f"int(f'{{{one}!s}}' and 3)", f"print({one}) or {two}", f"len([{one}, *e])",
        ]  # fmt: skip
        if self.awaits and self.kind[-1] in ("module", "async"):
            kinds += [f"(await later({one}))"] * 4
        return self.source.choice(kinds)

    def iterable(self, depth: int = 2) -> str:
        return self.pick(
            f"range({self.source.randint(0, 4)})", "e", "'abc'", "items", f"Box({self.expression(max(0, depth - 1))}, 2)",
            f"count({self.source.randint(0, 3)})", "zip('ab', e)", "enumerate(e)", "reversed(e)",
        )  # fmt: skip

    def target(self) -> str:
        if self.calm:
            return self.pick("a", "b", "c", self.fresh(), "Box.value", "items['k']")
        return self.pick(
            *NAMES[:5],
            f"{self.name()}, {self.fresh()}",
            f"{self.fresh()}, *{self.fresh()}",
            "e[0]",
            "items['k']",
            "Box.value",
        )

    # ---- statements

    def block(self, least: int = 1) -> list[str]:
        self.depth += 1
        lines = [line for _ in range(self.source.randint(least, 3)) for line in self.statement()]
        self.depth -= 1
        return [f"    {line}" for line in lines]

    def statement(self) -> list[str]:
        simple = self.depth > 3 or self.chance(1.7)
        made = self.source.choice(SIMPLE if simple else COMPOUND)(self)
        return "\n".join(made).split("\n")

    def _expression(self) -> list[str]:
        return [self.expression() + (";" if self.chance(8) else "")]

    def _assign(self) -> list[str]:
        return [f"{self.target()} = {self.expression()}"]

    def _several(self) -> list[str]:
        return [
            f"{self.name()} = {self.name()} = {self.expression(2)}; {self.expression(1)}; {self.name()} = {self.expression(1)}"
        ]

    def _augmented(self) -> list[str]:
        return [f"{self.name()} {self.pick('+=', '*=', '-=', '//=', '|=')} {self.expression(2)}"]

    def _annotated(self) -> list[str]:
        return [
            f"{self.fresh()}: {self.pick('int', 'list[int]', repr('later'), 'unknown')}"
            + (f" = {self.expression(2)}" if self.chance(2) else "")
        ]

    def _print(self) -> list[str]:
        return [
            f"print({self.expression(2)}, {self.name()}, sep={self.pick(repr('-'), 'None')}, file={self.pick('sys.stdout', 'sys.stderr')})"
        ]

    def _delete(self) -> list[str]:
        return [self.pick("del e[0]", f"del {self.name()}", "del items['k'], items", f"del {self.fresh()}")]

    def _raise(self) -> list[str]:
        kind = self.source.choice(EXCEPTIONS if not self.chance(12) else RARE_EXCEPTIONS)
        cause = self.pick("", " from None", f" from ValueError({self.source.randint(0, 9)})")
        return [f"if {self.expression(1)}:", f"    raise {kind}({self.expression(1)}){cause}"]

    def _assert(self) -> list[str]:
        return [f"assert {self.expression(2)}, {self.expression(1)}"]

    def _import(self) -> list[str]:
        return [
            self.pick(
                "import math as m",
                "from math import *",
                "import os.path",
                "from collections import (OrderedDict,\n    deque)",
                "import nowhere",
                "from __future__ import annotations",
                "import this_is_not_there.at_all",
            )
        ]

    def _warn(self) -> list[str]:
        return [
            self.pick(
                "warnings.warn('careful')", "for _i in range(3): warnings.warn('again')", "warnings.warn('old', DeprecationWarning)",
                "warnings.warn('up', stacklevel=2)", "1 is 1", r"'\d'", "assert (a, 'always')", "[1](2)",
                "with warnings.catch_warnings():\n    warnings.simplefilter('error')\n    warnings.warn('now an error')",
            )
        ]  # fmt: skip

    def _magic(self) -> list[str]:
        if self.kind[-1] != "module":
            return ["pass"]
        return [
            self.pick(
                "%pwd", "here = %pwd", "!echo hello", "lines = !echo one two", "%xmode Plain", "%env NEW_VARIABLE=1",
                "%config InteractiveShell.ast_node_interactivity", "%precision 3", "same?", "?same", "%pinfo same",
                "%unknown_magic", "%who int", "%alias_magic t timeit", "%colors NoColor", "/same a", ",same a b", ";same a b",
                "%%time", "%time same(a)", "%cd .", "%reset_selective -f total", "%macro -q mine 1", "%store",
                "%autoawait", "%load_ext autoreload", "%dirs", "%run nothing.py", "%xdel a", "%psearch sam*",
            )
        ]  # fmt: skip

    def _look(self) -> list[str]:
        return [
            self.pick(
                "print(sorted(locals()) == sorted(globals()))", "print(__name__, __doc__)", "print(sys._getframe().f_code.co_name)",
                "print(sys._getframe().f_lineno)", "import inspect; print(inspect.getsource(same))", "print(sys.exc_info())",
                "import traceback; traceback.print_exc()", "eval('a + 1')", "exec('z = 1\\nprint(z)')", "print(dir()[:3])",
                "print([n for n in dir(__import__('builtins')) if 'hook' in n and n[0] == '_'])", "Out", "In[-1:] and None", "_", "__", "_1",
                "print(sys.gettrace(), sys.getprofile())", "print(len(_dh))", "import gc; print(gc.isenabled())",
                "import threading; print(threading.active_count())", "print(same.__code__.co_firstlineno)",
                "exit", "get_ipython().user_ns is globals()", "compile('1 +', 'x', 'eval')", "sys.displayhook", "help",
                "from IPython.display import display, HTML; display(a, HTML('<b>'))", "display(e)", "globals()['new'] = 1",
                "import random; print(random.random())", "print(__annotations__)", "vars()['other'] = 2", "print(1, end='')",
                "get_ipython().run_cell('a + 1\\nb')", "get_ipython().ex('q = 5')", "input('name? ')", "breakpoint",
                "import os; os.environ['MINE'] = '1'", "open('made.txt', 'w').write('x')", "print(__file__)",
                "import signal; print(signal.getsignal(signal.SIGINT))", "sys.setrecursionlimit(5000)",
            )
        ]  # fmt: skip

    def _torch(self) -> list[str]:
        return [
            self.pick(
                "import torch; t = torch.ones(2, 3); t", "import torch\nw = torch.ones(3, requires_grad=True)\n(w * 2).sum().backward()\nw.grad",
                "import torch; torch.randn(2)", "import torch\nwith torch.no_grad():\n    print((torch.ones(2, requires_grad=True) * 2).requires_grad)",
                "import torch; torch.ones(2) + torch.ones(3)", "from torch import nn; nn.Linear(2, 2)",
                "import torch\nclass Seen(torch.overrides.TorchFunctionMode):\n    def __torch_function__(self, f, types, args=(), kwargs=None):\n"
                "        print(getattr(f, '__name__', f))\n        return f(*args, **(kwargs or {}))\nwith Seen():\n    torch.ones(2) + 1\n    a = 5",
                "import torch\nclass Mine(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
                "        print('f', getattr(f, '__name__', f))\n        return super().__torch_function__(f, types, args, kwargs)\nm = torch.ones(2).as_subclass(Mine)\nm2 = m + 1",
                "import torch\nclass Loud:\n    def __getattribute__(self, name):\n        print('asked', name)\n        return object.__getattribute__(self, name)\nloud = Loud()\na = 1",
                "import weakref\nclass Gone: pass\ngone = Gone()\nproxy = weakref.proxy(gone)\ndel gone\na = 2",
                "class Odd:\n    @property\n    def __class__(self):\n        raise TypeError('none of yours')\nodd = Odd()\na = 3",
            )
        ]  # fmt: skip

    def _if(self) -> list[str]:
        lines = [f"if {self.expression(2)}:", *self.block()]
        for _ in range(self.source.randint(0, 2)):
            lines += [f"elif {self.expression(1)}:", *self.block()]
        return [*lines, "else:", *self.block()] if self.chance(2) else lines

    def _for(self) -> list[str]:
        lines = [f"for {self.pick(self.name(), self.fresh())} in {self.iterable()}:", *self.block()]
        lines += (
            [f"    if {self.expression(1)}:", f"        {self.pick('break', 'continue', 'pass')}"]
            if self.chance(2)
            else []
        )
        return [*lines, "else:", *self.block()] if self.chance(4) else lines

    def _while(self) -> list[str]:
        counter = self.fresh()
        lines = [
            f"{counter} = 0",
            f"while {counter} < {self.source.randint(0, 3)}:",
            f"    {counter} += 1",
            *self.block(),
        ]
        lines += ["    if not a:", "        break"] if self.chance(3) else []
        return [*lines, "else:", *self.block()] if self.chance(4) else lines

    def _try(self) -> list[str]:
        star = "*" if sys.version_info >= (3, 11) and self.chance(6) else ""
        lines = ["try:", *self.block()]
        kind = self.source.choice(EXCEPTIONS)
        raised = f"ExceptionGroup('group', [{kind}(1), ValueError(2)])" if star else f"{kind}({self.expression(1)})"
        lines += [f"    raise {raised}"] if self.chance(2) else []
        finish = self.chance(3)
        if not finish or self.chance(2):
            lines += [
                f"except{star} {self.pick(kind, 'Exception', '(KeyError, ValueError)')} as error:",
                *self.block(),
                "    print(type(error), error)",
            ]
            lines += (
                ["    raise" if self.chance(2) else "    raise LookupError('other') from error"]
                if self.chance(5)
                else []
            )
            lines += ["else:", *self.block()] if self.chance(3) else []
        return [*lines, "finally:", *self.block()] if finish else lines

    def _with(self) -> list[str]:
        word = "async with" if self.awaits and self.kind[-1] in ("module", "async") and self.chance(2) else "with"
        first = f"Box({self.expression(1)}, swallow={self.pick(True, False)}) as {self.name()}"
        if word == "with" and self.chance(3):
            first += self.pick(", contextlib.suppress(KeyError)", ", Box() as c", ", contextlib.ExitStack() as stack")
        return [f"{word} {first}:", *self.block()]

    def _async_for(self) -> list[str]:
        if not (self.awaits and self.kind[-1] in ("module", "async")):
            return self._for()
        return [f"async for {self.name()} in Box({self.expression(1)}, 2):", *self.block()]

    def _match(self) -> list[str]:
        return [
            f"match {self.expression(2)}:",
            f"    case {self.pick('[x, *rest]', '0 | 1', '{**rest}', 'str() as text', 'Box(value=v)', 'None', '(1, 2)')}:",
            *[f"    {line}" for line in self.block()],
            f"    case _ if {self.expression(1)}:",
            *[f"    {line}" for line in self.block()],
        ]

    def _function(self) -> list[str]:
        name = self.fresh()
        kind = self.pick("function", "function", "generator", "async") if self.awaits or self.chance(2) else "function"
        self.kind.append(kind)
        body = self.block()
        head = self.source.choice([f"global {self.name()}", '"""A docstring."""', "nonlocal_ = 1", "pass"])
        if kind == "generator":
            body.append(f"    yield {self.expression(1)}")
        body.append(self.pick("    return", f"    return {self.expression(2)}", "    pass"))
        self.kind.pop()
        decorator = [self.pick("@same", "@contextlib.contextmanager", "@(lambda f: f)")] if self.chance(5) else []
        arguments = self.pick("", "x=1, /, *, y=2", "*args, **kwargs", "x: int = 3 * 4", "self=None")
        define = [*decorator, f"{'async ' if kind == 'async' else ''}def {name}({arguments}):", f"    {head}", *body]
        if kind == "async":
            call = f"await {name}()" if self.awaits and self.kind[-1] in ("module", "async") else f"{name}().close()"
        else:
            call = f"list({name}())" if kind == "generator" else f"{name}()"
        return [*define, call if not self.chance(4) else "pass"]

    def _closure(self) -> list[str]:
        name = self.fresh()
        return [
            f"def {name}(step={self.expression(1)}):", "    state = 0", "    def inner():", "        nonlocal state",
            f"        state += {self.source.randint(1, 4)}", f"        return state, {self.expression(1)}", "    return inner",
            f"{self.name()} = {name}()()",
        ]  # fmt: skip

    def _class(self) -> list[str]:
        name = f"C{self.fresh()}"
        self.kind.append("class")
        body = self.block()
        self.kind.pop()
        return [
            f"class {name}({self.pick('', 'Box', 'dict', 'Exception', 'object, metaclass=type')}):", *body,
            "    __slots__ = ()" if self.chance(8) else "    field: int = 1",
            "    def method(self):", f"        return self, {self.expression(1)}", f"{self.name()} = {name}()",
        ]  # fmt: skip

    def _generator(self) -> list[str]:
        name = self.fresh()
        return [
            f"{name} = count({self.source.randint(1, 4)})", f"next({name})",
            self.pick(f"{name}.send({self.expression(1)})", f"{name}.throw(KeyError('thrown'))", f"{name}.close()", f"next({name})", f"del {name}"),
        ]  # fmt: skip

    def text(self) -> str:
        lines = [line for _ in range(self.source.choice([1, 1, 2, 3, 5, 8])) for line in self.statement()]
        if self.chance(3):
            lines.append(self.expression())
        if self.chance(20):
            lines.insert(
                0,
                self.pick(
                    '"""What the cell is about."""', "from __future__ import annotations", "# -*- coding: utf-8 -*-"
                ),
            )
        text = "\n".join(lines)
        return self._bent(text) if self.chance(5) else text

    def _bent(self, text: str) -> str:
        """Unusual ways to write it, and mistakes."""
        source = self.source
        place = source.randint(0, len(text))
        line = source.randrange(text.count("\n") + 1)
        rows = text.split("\n")
        indent = "\n".join(f"    {row}" for row in rows)
        middle = "\n".join([*rows[:line], source.choice(["", "  # a remark", "\f", "    ", "\\"]), *rows[line:]])
        prompts = "\n".join((">>> " if not row.startswith(" ") else "... ") + row for row in rows)
        return source.choice(
            [
                text[:place] + text[place + 1 :], text[:place] + source.choice("()[]{}:,'\"\\\t;=@$?!é%") + text[place:], text[:place],
                "\n" * source.randint(1, 3) + text, "   \n\n" + text, text + "\n\n\n", text + ";", text + "  # why", indent, middle,
                text.replace("    ", "\t"), text.replace("\n", "\r\n"), text + "\n  x = 1", prompts, "\n".join([*rows[:line], " " + rows[line], *rows[line + 1 :]]),
                "\n".join([*rows[:line], "await later(1)", *rows[line:]]), text + "\nfrom __future__ import annotations\nx = await later(2)",
                text + "\nreturn 5", text + "\nyield 5", text + "\nbreak", "'''" + text, text + "\n1 +", "\n".join(rows[:line]) + "\nif a:",
                text + "\nprint(\x00)", text + "\ndef f(x, x): pass", text + "\n+".join(["\nn = 0"] + ["1"] * 60),
                text + "\nif a == 100:\n    pass\n" + "".join(f"elif a == {n}:\n    b = {n}\n" for n in range(30)),
            ]
        )  # fmt: skip


SIMPLE: list[Callable[[Program], list[str]]] = [
    Program._expression, Program._expression, Program._assign, Program._assign, Program._several, Program._augmented,
    Program._annotated, Program._print, Program._print, Program._delete, Program._raise, Program._assert, Program._import,
    Program._warn, Program._magic, Program._look, Program._look, Program._torch, Program._generator,
]  # fmt: skip
COMPOUND: list[Callable[[Program], list[str]]] = [
    Program._if, Program._for, Program._while, Program._try, Program._try, Program._with, Program._async_for, Program._match,
    Program._function, Program._closure, Program._class,
]  # fmt: skip


def cell(source: random.Random) -> str:
    return Program(source).text()
