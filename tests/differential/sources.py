"""Where cells come from: other people's tests and documentation, as far as they are installed, and `generate`."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import generate
import tools
from run import HERE, OLDEST, Case

# Tests that need a network, minutes, gigabytes, or other processes that outlive them.
_LEFT_OUT = re.compile(
    r"socket|ssl|urllib|http|ftp|smtp|poplib|imap|nntp|telnet|asyn(cio|c)(hat|ore)|multiprocessing|concurrent|subprocess|_pty|test_pty|"
    r"largefile|bigmem|idle|tkinter|tk\b|turtle|curses|regrtest|test_gdb|venv|ensurepip|distutils|peg_generator|tools|lib2to3|"
    r"test_faulthandler|test_wsgiref|xmlrpc|kqueue|test_dbm|winreg|msilib|winsound|test_zipfile64|test_os\b|test_posix\b|pyrepl|"
    r"test_signal|test_fork|test_wait|test_popen|cmd_line|test_embed|test_site\b|devpoll|epoll|selectors|ioctl|openpty|test_tty|test_crashers|"
    r"test_resource|test_capi|test_pdb|profile|test_code\b|test_trace|test_bdb|sys_settrace|monitoring|test_thread|perf|free_threading"
)
_NEVER = re.compile(
    r"os\.kill|kill\(|os\._exit|abort\(|system\(|chroot|setuid|reboot|bigmem|sleep\(|\bself\.fork|os\.fork|SIGKILL|run_unittest"
)


# Of one text: a process costs more than most cells.
MOST_CELLS = 4


def of_this(name: str, source: random.Random) -> Iterator[Case]:
    """The cases of one source, in a random order; those of `generated` never end."""
    every = {
        "generated": generated,
        "cpython": cpython,
        "doctests": doctests,
        "ipython": ipython,
        "numpy": numpy,
        "innocent": innocent,
        "tools": tools.cases,
    }
    return every[name](source)


def _folders(package: str) -> list[Path]:
    """Where a package's files are; nowhere, where it is not installed."""
    found = importlib.util.find_spec(package)
    return [] if found is None else [Path(one) for one in found.submodule_search_locations or ()]


def generated(source: random.Random) -> Iterator[Case]:
    while True:
        number = source.getrandbits(48)
        own = random.Random(number)
        cells = [generate.cell(own) for _ in range(own.choice([1, 1, 2, 3, 4, 6]))]
        interactivity = own.choices(["last_expr", "all", "last", "none", "last_expr_or_assign"], [80, 6, 6, 2, 6])[0]
        # IPython itself refuses a magic without a body.
        yield Case(f"generated {number}", [cell for cell in cells if cell.strip()], [generate.PRELUDE], interactivity)


def cpython(source: random.Random) -> Iterator[Case]:
    """The bodies of the tests of Python's own suite, where `test` is installed."""
    for folder in _folders("test"):
        yield from _bodies(folder, "test", source)


def numpy(source: random.Random) -> Iterator[Case]:
    for folder in _folders("numpy"):
        yield from _bodies(folder, "numpy", source)


def ipython(source: random.Random) -> Iterator[Case]:
    """The cells that IPython's own tests run: the texts that they give to ``run_cell`` and its like."""
    folders = [OLDEST / "IPython", *_folders("IPython")]
    cells = []
    for folder in folders:
        for path in sorted(folder.rglob("test*.py")):
            for call in (node for node in ast.walk(_parsed(path)) if isinstance(node, ast.Call)):
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                for argument in call.args:
                    text = _text(argument)
                    if (
                        text
                        and text.strip()
                        and (name.startswith("run_cell") or name in ("ex", "push", "transform_cell", "dedent"))
                    ):
                        cells.append((f"IPython's {path.name}:{call.lineno}", text))
    source.shuffle(cells)
    for place, text in cells:
        if not _NEVER.search(text):
            yield Case(place, [text], [generate.PRELUDE])


def _text(node: ast.expr) -> str | None:
    """The text that an expression is, where it is one that can be known: a constant, or constants joined by a constant."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "join"
            and node.args
        ):
            try:
                return "\n".join(ast.literal_eval(node.args[0]))
            except (ValueError, TypeError):
                return None
        return None
    return value if isinstance(value, str) else None


def innocent(source: random.Random) -> Iterator[Case]:
    """The tutorials' cells of this project: they train on a device."""
    texts = sorted((HERE.parent / "innocent_cells").glob("*.txt"))
    books = [part for path in texts for part in re.split(r"(?m)^== ", path.read_text("utf-8"))[1:]]
    source.shuffle(books)
    start = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'"
    for book in books:
        title, _, body = book.partition("\n")
        yield Case(f"innocent {title}", [start, *body.split("# %%\n")], seconds=60.0)


def doctests(source: random.Random) -> Iterator[Case]:
    """The examples in the documentation of the standard library, numpy and torch, those of each text as one cell."""
    parser = doctest.DocTestParser()
    paths = [path for path in Path(ast.__file__).parent.glob("*.py") if not _LEFT_OUT.search(path.stem)]
    for package in ("numpy", "torch"):
        for folder in _folders(package):
            paths += [path for path in folder.rglob("*.py") if not {"test", "tests"} & set(path.parts)]
    source.shuffle(paths)
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if ">>> " not in text:
            continue
        module = path.stem
        setup = (
            f"import numpy as np, torch, torch.nn as nn, torch.nn.functional as F, math\nfrom {module} import *"
            if "-packages" not in str(path)
            else ("import numpy as np, torch, math\nimport torch.nn as nn, torch.nn.functional as F")
        )
        cells = []
        for documentation in _documentation(text):
            try:
                examples = parser.get_examples(documentation)
            except ValueError:
                continue
            cell = "".join(example.source for example in examples)
            if cell.strip() and not _NEVER.search(cell) and not _LEFT_OUT.search(cell):
                cells.append(cell)
        for number in range(0, len(cells), MOST_CELLS):
            name = f"documentation {path.parent.name}/{path.name} {number}"
            yield Case(name, cells[number : number + MOST_CELLS], [setup])


def _documentation(text: str) -> Iterator[str]:
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            yield node.value


def _parsed(path: Path) -> ast.AST:
    try:
        return _parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return ast.Module([], [])


def _parse(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _bodies(root: Path, package: str, source: random.Random) -> Iterator[Case]:
    """Test functions and methods of the files below `root`: the body is the cell, what is around it is set up plainly."""
    paths = [path for path in root.rglob("test_*.py") if not _LEFT_OUT.search(str(path.relative_to(root)))]
    source.shuffle(paths)
    # From many files at once, so that a few hundred cells have something of everything.
    open_ones = [
        _bodies_of(path, f"{package}.{'.'.join(path.relative_to(root).with_suffix('').parts)}", source)
        for path in paths
    ]
    while open_ones:
        for one in list(open_ones):
            case = next(one, None)
            if case is None:
                open_ones.remove(one)
            else:
                yield case


def _bodies_of(path: Path, module: str, source: random.Random) -> Iterator[Case]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    tree = _parse(text)
    lines = text.split("\n")
    found: list[tuple[str | None, ast.FunctionDef]] = []
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append((None, node))
        elif isinstance(node, ast.ClassDef):
            found += [
                (node.name, one)
                for one in node.body
                if isinstance(one, ast.FunctionDef) and one.name.startswith("test")
            ]
    bodies: dict[str | None, list[tuple[ast.FunctionDef, str]]] = {}
    for holder, function in found:
        cell = _body(function, lines)
        if cell is not None and not _NEVER.search(cell) and "support.requires" not in cell:
            bodies.setdefault(holder, []).append((function, cell))
    groups = []
    for holder, ones in bodies.items():
        source.shuffle(ones)
        groups += [(holder, ones[number : number + MOST_CELLS]) for number in range(0, len(ones), MOST_CELLS)]
    source.shuffle(groups)
    for holder, ones in groups:
        function = ones[0][0]
        setup = [
            f"import {module} as _module\nglobals().update({{k: v for k, v in vars(_module).items() if not k.startswith('__')}})"
        ]
        if holder is not None:
            setup.append(
                f"try:\n    self = {holder}({function.name!r})\nexcept (TypeError, ValueError):\n    self = {holder}()\n"
                "for _set_up in ('setUpClass', 'setUp', 'setup_method'):\n"
                "    try:\n        getattr(self, _set_up, lambda: None)()\n    except TypeError:\n        getattr(self, _set_up)(None)\ndel _set_up"
            )
        yield Case(f"{module}:{function.lineno} {function.name}", [cell for _, cell in ones], setup)


def _body(function: ast.FunctionDef, lines: list[str]) -> str | None:
    """The body's text; None where it is no module's: it returns, yields, or takes arguments."""
    if any(one.arg != "self" for one in function.args.args) or (
        function.decorator_list and "bigmem" in ast.dump(function)
    ):
        return None
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Nonlocal):
            return None
        if isinstance(node, ast.Name) and node.id in ("super", "__class__"):
            return None
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))
    first = function.body[0]
    if first.lineno == function.lineno:
        return None
    return textwrap.dedent("\n".join(lines[first.lineno - 1 : function.end_lineno]))
