"""The cell runner: rows where the cell wrote statements, and a cell that runs exactly as it would without us."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shell_fakes import FakeObserver, clean_shell

from gpumem_magic.recording.cell import CellRun, compiles, names_in, prepare
from gpumem_magic.recording.progress import CellProgress


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as shell:
        yield shell


def observe(shell: Any, body: str, observer: FakeObserver | None = None) -> tuple[Any, FakeObserver]:
    """Runs a body (dedented) below a magic's line; returns its value and what the observer saw."""
    observer = observer or FakeObserver()
    run = CellRun(shell, prepare(shell, textwrap.dedent(body).lstrip("\n")))
    run.observe(observer)
    return run.run(), observer


class AtEndsOnly(FakeObserver):
    """Wants to hear of ends alone."""

    wants_beginnings = False


def fail(shell: Any, body: str) -> tuple[BaseException, Any]:
    """The error of a failing body, and where it is said to have failed: (line, text, iteration, loops)."""
    run = CellRun(shell, prepare(shell, textwrap.dedent(body).lstrip("\n")))
    run.observe(FakeObserver())
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        run.run()
    found = run.failed(caught.value.__traceback__)
    assert found is not None
    text, *rest = found
    return caught.value, (rest[0], text, *rest[1:])


# ---- rows


def test_a_row_for_every_statement_with_the_notebooks_lines(shell: Any) -> None:
    value, seen = observe(
        shell,
        """
        a = 1; b = 2
        for i in range(2):  # a comment
            a += i
            if a:
                b = a
        a + b
        """,
    )
    assert value == 4
    assert seen.rows == [
        (2, "a = 1", (), ()),
        (2, "b = 2", (), ()),
        (4, "a += i", (1,), (3,)),
        (6, "b = a", (1,), (3,)),
        (4, "a += i", (2,), (3,)),
        (6, "b = a", (2,), (3,)),
        (7, "a + b", (), ()),
    ]
    assert [row for row in seen.headers if row[0] == 3] == [
        (3, "for i in range(2):", (1,), (3,)),
        (3, "for i in range(2):", (2,), (3,)),
        (3, "for i in range(2):", (), ()),
    ]


def test_every_row_began(shell: Any) -> None:
    _, seen = observe(shell, "for i in range(2):\n    x = i\ny = x\n")
    assert [(line, iteration) for line, _, iteration, _ in seen.rows] == [
        start for start in seen.started if start != (2, ())
    ]


def test_what_an_error_left_has_its_row_before_what_handles_it(shell: Any) -> None:
    _, seen = observe(
        shell,
        """
        import contextlib
        for i in range(2):
            try:
                a = 1 // i
            except ZeroDivisionError:
                a = 0
            finally:
                b = a
        try:
            try:
                {}[1]
            finally:
                c = 1
        except KeyError:
            d = 1
        with contextlib.suppress(IndexError):
            [][1]
        if a:
            b = 2
        """,
    )
    assert [row[:3] for row in seen.rows] == [
        (2, "import contextlib", ()),
        (5, "a = 1 // i", (1,)),
        (7, "a = 0", (1,)),
        (9, "b = a", (1,)),
        (5, "a = 1 // i", (2,)),
        (9, "b = a", (2,)),
        (12, "{}[1]", ()),
        (14, "c = 1", ()),
        (16, "d = 1", ()),
        (18, "[][1]", ()),
        (20, "b = 2", ()),
    ]


def test_nested_loops_count_from_one_outermost_first(shell: Any) -> None:
    _, seen = observe(
        shell,
        """
        for i in "ab":
            k = 0
            while k < 2:
                k += 1
        """,
    )
    assert [(iteration, loops) for line, _, iteration, loops in seen.rows if line == 5] == [
        ((1, 1), (2, 4)),
        ((1, 2), (2, 4)),
        ((2, 1), (2, 4)),
        ((2, 2), (2, 4)),
    ]


def test_jumps_have_their_row_before_they_jump(shell: Any) -> None:
    _, seen = observe(
        shell,
        """
        for i in range(9):
            if i == 0:
                continue
            if i == 1:
                break
        """,
    )
    assert [(text, iteration) for _, text, iteration, _ in seen.rows] == [("continue", (1,)), ("break", (2,))]


def test_functions_and_classes_are_one_row_each(shell: Any) -> None:
    value, seen = observe(
        shell,
        """
        def f(a: int = 1,
              b=2) -> int:
            c = a + b
            return c
        class K:
            x = f()
        g = lambda: f()
        [f() for _ in range(3)]
        """,
    )
    assert value == [3, 3, 3]
    assert [row[:2] for row in seen.rows] == [
        (2, "def f(a: int = 1,\n      b=2) -> int:"),
        (6, "class K:"),
        (8, "g = lambda: f()"),
        (9, "[f() for _ in range(3)]"),
    ]


def test_heads_of_compound_statements_end_at_their_colon(shell: Any) -> None:
    _, seen = observe(
        shell,
        """
        import contextlib
        with contextlib.nullcontext({1: 2}) as a, \\
             contextlib.nullcontext(lambda: 0) as b:  # two
            pass
        if (lambda x: x)(0): pass
        elif a[1:2] if isinstance(a, list) else True:
            pass
        while (n := 0): pass
        match {"k": 1}:
            case {"k": v}:
                pass
        try:
            1 / 0
        except (ZeroDivisionError,
                KeyError) as e:
            pass
        """,
    )
    heads = [text for _, text, _, _ in seen.headers]
    assert heads == [
        "with contextlib.nullcontext({1: 2}) as a, \\\n     contextlib.nullcontext(lambda: 0) as b:",
        "with contextlib.nullcontext({1: 2}) as a, \\\n     contextlib.nullcontext(lambda: 0) as b:",
        "if (lambda x: x)(0):",
        "elif a[1:2] if isinstance(a, list) else True:",
        "while (n := 0):",
        'match {"k": 1}:',
        'match {"k": 1}:',
        "except (ZeroDivisionError,\n        KeyError) as e:",
    ]


def test_text_is_what_was_typed_not_what_ipython_made_of_it(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, seen = observe(
        shell,
        """
        for i in range(2):
            !echo one | grep \\
               one
            y = %time 3
        x = 1

        %time x
        """,
    )
    assert [row[:3] for row in seen.rows] == [
        (3, "!echo one | grep \\\n       one", (1,)),
        (5, "y = %time 3", (1,)),
        (3, "!echo one | grep \\\n       one", (2,)),
        (5, "y = %time 3", (2,)),
        (6, "x = 1", ()),
        (8, "%time x", ()),
    ]


def test_a_cell_magic_in_the_body_is_one_statement(shell: Any) -> None:
    body = "%%capture out\nfor i in range(2):\n    print(i)\n"
    _, seen = observe(shell, body)
    assert [row[:2] for row in seen.rows] == [(2, body.strip())]
    assert shell.user_ns["out"].stdout == "0\n1\n"


def test_blank_lines_at_the_top_keep_the_line_numbers(shell: Any) -> None:
    run = CellRun(shell, prepare(shell, "\n   \nx = 1\n1 / 0\n"))
    observer = FakeObserver()
    run.observe(observer)
    with pytest.raises(ZeroDivisionError) as caught:
        run.run()
    assert observer.rows == [(4, "x = 1", (), ())]
    assert caught.traceback[-1].lineno + 1 == 5


def test_text_with_letters_beyond_ascii(shell: Any) -> None:
    _, seen = observe(shell, "é = 'ü'; ñ = é\nif 'ß': 日本 = 1\n")
    assert [row[1] for row in seen.rows] == ["é = 'ü'", "ñ = é", "日本 = 1"]
    assert seen.headers[0][1] == "if 'ß':"


def test_an_observer_ends_a_loop_as_break_would(shell: Any) -> None:
    value, seen = observe(
        shell,
        """
        out = []
        for i in range(9):
            for j in range(9):
                out.append((i, j))
        else:
            out.append("else")
        out
        """,
        FakeObserver(max_iterations=2),
    )
    assert value == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seen.rows[-1][2] == ()


def test_a_loop_that_is_ended_leaves_its_variable_as_break_does(shell: Any) -> None:
    class Item:
        """Something that can be watched."""

    shell.user_ns["Item"] = Item
    value, _ = observe(
        shell,
        """
        import weakref
        seen = []
        for item, *rest in ([Item(), i] for i in range(9)):
            seen.append(weakref.ref(item))
            gone = [ref() is None for ref in seen[:-1]]
            del item
            gone.append(seen[-1]() is None)
        rest, gone
        """,
        FakeObserver(max_iterations=3),
    )
    # Nothing keeps an item that the loop let go of.
    assert value == ([2], [True, True, True])
    value, _ = observe(
        shell, "for k in range(3):\n    a = k\nelse:\n    k = 'whole'\nk\n", FakeObserver(max_iterations=3)
    )
    assert value == "whole"


# ---- what fails


def test_the_failing_statement_and_its_iteration(shell: Any) -> None:
    error, place = fail(shell, "for k in range(3):\n    s = 'é'; t = 1 / (1 - k); u = 2\n")
    assert isinstance(error, ZeroDivisionError)
    assert place[0] == 3
    assert place[2:] == ((2,), (2,))
    assert place[1] == "t = 1 / (1 - k)"


def test_the_failing_statement_is_not_the_last_of_finally(shell: Any) -> None:
    _, place = fail(shell, "try:\n    [][1]\nfinally:\n    a = 1\n    b = 2\n")
    assert place == (3, "[][1]", (), ())


def test_an_error_inside_a_function_of_the_cell_belongs_to_its_call(shell: Any) -> None:
    _, place = fail(shell, "def f():\n    return 1 / 0\nfor i in range(2):\n    f()\n")
    assert place == (5, "f()", (1,), (4,))


def test_an_error_while_the_next_item_is_fetched(shell: Any) -> None:
    body = "def items():\n    yield 1\n    raise KeyError(1)\nfor i in items():\n    pass\n"
    _, place = fail(shell, body)
    assert place == (5, "for i in items():", (2,), (5,))


def test_the_statement_that_raises_is_itself_the_failing_one(shell: Any) -> None:
    _, place = fail(shell, "x = 1\nraise SystemExit(3)\n")
    assert place == (3, "raise SystemExit(3)", (), ())


def test_an_error_from_elsewhere_is_no_statements(shell: Any) -> None:
    run = CellRun(shell, prepare(shell, "x = 1\n"))
    run.observe(FakeObserver())
    run.run()
    with pytest.raises(KeyError) as caught:
        {}["elsewhere"]
    assert run.failed(caught.tb) is None
    assert run.failed(None) is None


def test_a_failing_observer_is_switched_off_and_the_cell_goes_on(shell: Any) -> None:
    observer = FakeObserver(broken=RuntimeError("out of order\nsecond line"))
    run = CellRun(shell, prepare(shell, "x = 0\nfor i in range(3):\n    x += 1\nx\n"))
    run.observe(observer)
    assert run.run() == 3
    assert run.hook_failure == "RuntimeError: out of order"
    assert observer.rows == []


def test_an_interrupt_inside_the_observer_is_the_users(shell: Any) -> None:
    class Interrupted(FakeObserver):
        def after_statement(self, *_: Any) -> None:
            raise KeyboardInterrupt

    run = CellRun(shell, prepare(shell, "x = 1\ny = 2\n"))
    run.observe(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.hook_failure is None
    assert "y" not in shell.user_ns


# ---- the same as without us

PROGRAMS = {
    "multi-line strings": 'x = """one\n  two\n\tthree"""\nx',
    "continuation lines": "x = 1 + \\\n    2\nx",
    "semicolons": "a = 1; b = 2; a + b",
    "one-liners": "out = []\nfor i in range(3): out.append(i); out.append(-i)\nout",
    "del": "x = 1\ndel x\n'x' in globals()",
    "global at module level": "x = 1\nglobal x\nx = 2\nx",
    "a text alone": "'first'\nx = 1\nx",
    "annotations": "x: int = 3\ny: str\nx",
    "decorators": "def twice(f):\n    return lambda: 2 * f()\n@twice\ndef g():\n    return 4\ng()",
    "else of loops": (
        "out = []\n"
        "for i in range(2):\n"
        "    pass\n"
        "else:\n"
        "    out.append(1)\n"
        "while False:\n"
        "    pass\n"
        "else:\n"
        "    out.append(2)\n"
        "out"
    ),
    "else after break": "out = []\nfor i in range(2):\n    break\nelse:\n    out.append(1)\nout",
    "try in full": (
        "out = []\n"
        "for n in (0, 1):\n"
        "    try:\n"
        "        out.append(1 / n)\n"
        "    except ZeroDivisionError as e:\n"
        "        out.append(str(e))\n"
        "    else:\n"
        "        out.append('else')\n"
        "    finally:\n"
        "        out.append('finally')\n"
        "out"
    ),
    "continue in try with finally": (
        "out = []\n"
        "for n in range(3):\n"
        "    try:\n"
        "        if n == 1:\n"
        "            continue\n"
        "        out.append(n)\n"
        "    finally:\n"
        "        out.append('f')\n"
        "out"
    ),
    "with that swallows": "import contextlib\nwith contextlib.suppress(KeyError):\n    raise KeyError\n5",
    "match": (
        "x = (1, 2)\n"
        "match x:\n"
        "    case (a, b) if a > b:\n"
        "        r = 'gt'\n"
        "    case (a, b):\n"
        "        r = a + b\n"
        "    case _:\n"
        "        r = 0\n"
        "r"
    ),
    "walrus and comprehensions": "y = [z := n * 2 for n in range(3)]\n(y, z)",
    "nested functions and closures": (
        "def f():\n"
        "    n = 0\n"
        "    def g():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    g()\n"
        "    return g()\n"
        "f()"
    ),
    "generators": "def g():\n    yield 1\n    yield 2\nlist(g())",
    "a class": "class A:\n    x = [i for i in range(2)]\n    def f(self):\n        return self.x\nA().f()",
    "star": "a, *b = range(4)\nb",
    "locals at the top": "q = 5\nlocals() is globals()",
    "last is no expression": "x = 3",
    "None": "None",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_mean_the_same(name: str) -> None:
    body = PROGRAMS[name]
    with clean_shell() as shell:
        plain = CellRun(shell, prepare(shell, body)).run()
        plain_ns = _user_variables(shell)
    with clean_shell() as shell:
        value, observer = observe(shell, body)
        assert value == plain
        assert _user_variables(shell) == plain_ns
        assert observer.rows


def _user_variables(shell: Any) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else repr(value).split(" at 0x")[0]
        for name, value in shell.user_ns.items()
        if name not in shell.user_ns_hidden and name != "get_ipython"
    }


def _simple() -> st.SearchStrategy[str]:
    return st.sampled_from(["n += 1", "t.append(n)", "n *= 2; t.append(-n)", "pass", "del u; u = n", "(n, t)"])


def _block(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _compound(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    heads = st.sampled_from(
        ["for i in range(3):", "if n % 2:", "with C(n):", "for i in (1,):", "while next(turns, 0):"]
    )
    jumps = st.sampled_from([[], ["if n % 3 == 0: break"], ["if n % 3 == 1: continue"]])

    def loop(head: str, body: list[str], jump: list[str], orelse: list[str]) -> list[str]:
        is_loop = head.startswith(("for", "while"))
        tail = [] if head.startswith("with") else ["else:", *_block(orelse)]
        return [head, *_block([*body, *(jump if is_loop else [])]), *tail]

    def guarded(body: list[str], handler: list[str], last: list[str]) -> list[str]:
        return [
            "try:",
            *_block([*body, "1 / (n % 2)"]),
            "except ZeroDivisionError:",
            *_block(handler),
            "finally:",
            *_block(last),
        ]

    return st.one_of(st.builds(loop, heads, inner, jumps, inner), st.builds(guarded, inner, inner, inner))


_bodies = st.recursive(
    st.lists(_simple(), min_size=1, max_size=3),
    lambda inner: st.builds(
        lambda parts: [line for part in parts for line in part], st.lists(_compound(inner), min_size=1, max_size=2)
    ),
    max_leaves=5,
)


_MANAGER = """class C:
    def __init__(self, n): t.append(n)
    def __enter__(self): t.append("in")
    def __exit__(self, *error): t.append("out")
"""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies)
def test_any_program_means_the_same_and_counts_its_rows(shell: Any, body: list[str]) -> None:
    text = _MANAGER + "n, t, u, turns = 1, [], 0, iter([1] * 9)\n" + "\n".join(body) + "\n(n, t)\n"
    observer = FakeObserver()
    plain = CellRun(shell, prepare(shell, text)).run()
    run = CellRun(shell, prepare(shell, text))
    run.observe(observer)
    assert run.run() == plain
    assert run.hook_failure is None
    for line, statement, iteration, loops in (*observer.rows, *observer.headers):
        assert len(iteration) == len(loops)
        assert all(count >= 1 for count in iteration)
        assert statement.split("\n")[0] in text.split("\n")[line - 2]


def test_future_imports_are_remembered_as_in_any_cell(shell: Any) -> None:
    observe(shell, "x = 1\nfrom __future__ import annotations\ndef f(a: nothing): pass\n")
    value, _ = observe(shell, "def g(a: nothing): pass\n(f.__annotations__, g.__annotations__)\n")
    assert value == ({"a": "nothing"}, {"a": "nothing"})


@pytest.mark.parametrize(
    ("setting", "body", "value", "printed"),
    [
        ("last_expr", "1\n2\n", 2, ""),
        ("last_expr", "1\nx = 2\n", None, ""),
        ("last", "for i in range(2):\n    i\n", None, "0\n1\n"),
        ("all", "1\nfor i in range(2):\n    i + 5\n7\n", 7, "1\n5\n6\n"),
        ("none", "1\n2\n", None, ""),
        ("last_expr_or_assign", "x = 3\n", 3, ""),
        ("last_expr_or_assign", "x = 3\nx += 2\n", 5, ""),
        ("all", "1\n2;\n", None, ""),
    ],
)
def test_interactivity(
    shell: Any,
    setting: str,
    body: str,
    value: Any,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Python's own would leave `_` among the builtins.
    monkeypatch.setattr(sys, "displayhook", lambda shown: None if shown is None else print(shown))
    shell.ast_node_interactivity = setting
    found, seen = observe(shell, body)
    assert found == value
    assert capsys.readouterr().out == printed
    assert all(text in body for _, text, _, _ in seen.rows)


@pytest.mark.parametrize(
    ("body", "value"), [("x = 4\nx;\n", None), ("4;  # said\n", None), ("'a;'\n", "a;"), ("4 # ;\n", 4)]
)
def test_a_semicolon_at_the_end_silences_the_value(shell: Any, body: str, value: Any) -> None:
    assert observe(shell, body)[0] == value


@pytest.mark.parametrize("body", ["\n", "# only words\n", "   \n\n# and more\n"])
def test_nothing_to_run(shell: Any, body: str) -> None:
    assert prepare(shell, body).empty


def test_ast_transformers_of_the_user_apply_and_ours_do_not_meet_them(shell: Any) -> None:
    class Doubler(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.copy_location(ast.Constant(node.value * 2), node) if isinstance(node.value, int) else node

    shell.ast_transformers.append(Doubler())
    value, seen = observe(shell, "x = 0\nfor i in range(2):\n    x += 1\nx\n")
    assert value == 8
    assert [row[2] for row in seen.rows if row[0] == 4] == [(1,), (2,), (3,), (4,)]


def test_nothing_of_ours_stays(shell: Any) -> None:
    before = set(vars(builtins)), set(shell.user_ns), set(linecache.cache)
    run = CellRun(shell, prepare(shell, "for i in range(2):\n    x = i\nif x: 1 / 0\n"))
    run.observe(FakeObserver())
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert set(vars(builtins)) - before[0] == set()
    assert set(shell.user_ns) - before[1] == {"i", "x"}
    assert set(linecache.cache) - before[2] <= {run.filename}


def test_a_run_inside_a_run(shell: Any) -> None:
    inner = FakeObserver()

    def again() -> Any:
        run = CellRun(shell, prepare(shell, "for j in range(2):\n    y = j\ny\n"))
        run.observe(inner)
        return run.run()

    shell.user_ns["again"] = again
    value, outer = observe(shell, "for i in range(2):\n    z = again()\nz\n")
    assert value == 1
    assert len(inner.rows) == 6
    assert [row[2] for row in outer.rows] == [(1,), (2,), ()]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came in Python 3.11")
def test_exception_groups(shell: Any) -> None:
    value, seen = observe(
        shell,
        """
        try:
            raise ExceptionGroup("g", [KeyError(1), ValueError(2)])
        except* KeyError as e:
            a = 1
        except* ValueError as e:
            b = 2
        (a, b)
        """,
    )
    assert value == (1, 2)
    assert [row[0] for row in seen.headers] == [4, 6]


# ---- reading a cell


def test_names_of_the_notebook_that_a_cell_mentions() -> None:
    python = (
        "import torch as t\nmodel.train()\nfor x in loader: total += f(x)\n"
        "def g(a):\n    local = a\n    return local + weights\n"
        "class K:\n    inner = base\n    def m(self):\n        return self.a + deep\n"
        "rows = [cell for cell in table if cell.ok(limit)]\nawait later\n"
    )
    names = names_in(python)
    assert {
        "t",
        "model",
        "x",
        "loader",
        "total",
        "f",
        "g",
        "weights",
        "K",
        "base",
        "deep",
        "rows",
        "table",
        "limit",
        "later",
    } <= names
    assert not names & {"local", "a", "self", "inner", "train", "ok"}
    assert names_in("x = (") == frozenset()


@pytest.mark.parametrize(
    ("python", "good"),
    [
        ("x = 1\n", True),
        ("x = (\n", False),
        ("return 3\n", False),
        ("break\n", False),
        ("await f()\n", True),
        ("def f():\n    await g()\n", False),
        ("x = 1\nglobal x\n", True),
    ],
)
def test_what_compiles(shell: Any, python: str, good: bool) -> None:
    assert compiles(shell, python) is good


def test_top_level_await_is_no_python_where_the_user_switched_it_off(shell: Any) -> None:
    shell.autoawait = False
    assert not compiles(shell, "await f()\n")
    assert not prepare(shell, "await f()\n").needs_await


def test_an_observer_that_wants_no_beginnings_is_told_the_same_rows(shell: Any) -> None:
    body = """
        total = 0
        for i in range(2):
            total += i
            if total:
                break
        """
    _, both = observe(shell, body)
    _, ends = observe(shell, body, AtEndsOnly())
    assert both.started
    assert ends.started == []
    assert (ends.rows, ends.headers) == (both.rows, both.headers)
    assert not CellProgress(None, None, "").wants_beginnings  # type: ignore[arg-type]
    assert CellProgress(None, object(), "").wants_beginnings  # type: ignore[arg-type]
