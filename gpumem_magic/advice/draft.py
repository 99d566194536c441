"""Changing a program's text: only what is meant to change does, so that a diff of it can be copied."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterator, Sequence

from gpumem_magic.looks.fresh import names_given
from gpumem_magic.looks.parsing import begins_at, function_named, parsed

# What a loop gives a name anew is the same thing again, as in ``model = model.train()``; functions have names of their own.
_NOT_MAKING = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Unchangeable(ValueError):
    """The text is written so that a change in it would be a guess."""


class CellDraft:
    """A copy of a program with changes. Positions are those of the text as it was; `finished` puts all changes into it.

    of: the name of the function that the text defines, where it is no cell. has: lines of import that it needs not repeat.
    """

    def __init__(self, code: str, of: str = "", has: Collection[str] = ()) -> None:
        self.tree = parsed(code)
        self._has = has
        self._function = function_named(self.tree, of)
        self._raw = code.encode()
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        # (from, to, text): later ones at the same place stand behind earlier ones.
        self._changes: list[tuple[int, int, bytes]] = []
        # So many of the first are for the top.
        self._at_top = 0

    # ---- reading

    def text(self, node: ast.expr | ast.stmt) -> str:
        """What is written there."""
        return self._raw[self._begin(node) : self._end(node)].decode()

    def suites(self) -> Iterator[list[ast.stmt]]:
        """Every list of statements: the program's own, and those of loops, functions and so on."""
        for node in ast.walk(self.tree):
            for field in ("body", "orelse", "finalbody"):
                found = getattr(node, field, None)
                if isinstance(found, list) and found and isinstance(found[0], ast.stmt):
                    yield found

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        """The calls of what has one of these names, as `Adam` in ``torch.optim.Adam(...)``."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called(node) in names]

    # ---- changing

    def replace(self, node: ast.expr, text: str) -> None:
        self._changes.append((self._begin(node), self._end(node), text.encode()))

    def before(self, statement: ast.stmt, *lines: str) -> None:
        """Lines of their own above a statement, as far to the right as it is."""
        place = self._starts[begins_at(statement) - 1]
        self._changes.append((place, place, self._indented(statement, lines)))

    def after(self, statement: ast.stmt, *lines: str) -> None:
        end = self._end(statement)
        place = self._line_end(end)
        if self._raw[end:place].split(b"#")[0].strip():
            raise Unchangeable("another statement stands on the same line")
        text = self._indented(statement, lines)
        if self._raw[place - 1 : place] != b"\n":
            text = b"\n" + text
        self._changes.append((place, place, text))

    def wrap(self, statements: Sequence[ast.stmt], head: str) -> None:
        """Puts statements that follow each other below a line such as ``with torch.no_grad():``."""
        first, last = statements[0], statements[-1]
        margin = self._indented(first, [head])
        self._no_lines_of_strings(statements)
        begin = self._starts[first.lineno - 1]
        end = self._line_end(self._end(last))
        if self._raw[self._end(last) : end].split(b"#")[0].strip():
            raise Unchangeable("another statement stands on the same line")
        self._changes.append((begin, begin, margin))
        for line in self._raw[begin:end].splitlines(keepends=True):
            if line.strip():
                self._changes.append((begin, begin, b"    "))
            begin += len(line)

    def argument(self, call: ast.Call, name: str, value: str, instead_of: Collection[str] = ()) -> None:
        """``name=value`` among a call's arguments, in the place of one of that name, or of one of `instead_of`."""
        if any(word.arg is None for word in call.keywords):
            raise Unchangeable("the call has ** arguments, which may hold it already")
        others = [word for word in call.keywords if word.arg in instead_of and word.arg != name]
        same = [word for word in call.keywords if word.arg == name]
        if others and not same:
            self._changes.append((self._begin(others[0]), self._end(others[0]), f"{name}={value}".encode()))
            others = others[1:]
        for word in others:
            self.without(call, word)
        if same:
            self.replace(same[0].value, value)
        elif not any(word.arg in instead_of for word in call.keywords):
            place, last = self._last_word(call)
            comma = "" if last == "(" else " " if last == "," else ", "
            self._changes.append((place, place, f"{comma}{name}={value}".encode()))

    def without(self, call: ast.Call, word: ast.keyword) -> None:
        """A call without one of its named arguments."""
        begin, end = self._begin(word), self._end(word)
        before = self._raw[:begin].rstrip()
        after = self._raw[end:]
        if before.endswith(b","):
            begin = len(before) - 1
        elif (rest := after.lstrip()).startswith(b","):
            end += len(after) - len(rest) + 1
            end += len(self._raw[end:]) - len(self._raw[end:].lstrip(b" "))
        self._changes.append((begin, end, b""))

    def behind(self, name: str, *lines: str) -> None:
        """Lines behind the statement that gives a variable its last value before it is used in loops; above all others where
        the program finds the variable there. What a function is given was made by others, who may call it again."""
        body = self.tree.body if self._function is None else self._function.body
        made = [one for one in body if not isinstance(one, _NOT_MAKING) and name in names_given(one)]
        if made:
            self.after(made[-1], *lines)
        elif self._function is not None:
            raise Unchangeable(f"`{name}` is not made here")
        elif self.tree.body:
            self.before(self.tree.body[0], *lines)

    def at_top(self, *lines: str) -> None:
        """Imports and functions above the program. What is there already is not written again."""
        known = {*self._raw.decode().splitlines(), *self._has}
        body = self.tree.body
        is_first = [isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in body]
        place = body[is_first.count(True)]
        count = len(self._changes)
        self.before(place, *(line for line in lines if not line.startswith(("import ", "from ")) or line not in known))
        # Above what else stands before the first statement, whichever came first.
        here, self._changes[count:] = self._changes[count:], []
        self._changes[self._at_top : self._at_top] = here
        self._at_top += len(here)

    def with_torch(self) -> None:
        """For changes that mention torch, where the program does not."""
        if not any(isinstance(node, ast.Name) and node.id == "torch" for node in ast.walk(self.tree)):
            self.at_top("import torch")

    def finished(self) -> str:
        """The changed text. Raises Unchangeable where it is no program, or as it was."""
        raw, last = b"", 0
        for begin, end, text in sorted(self._changes, key=lambda change: change[:2]):
            if begin < last:
                raise Unchangeable("two changes meet in one place")
            raw += self._raw[last:begin] + text
            last = end
        code = (raw + self._raw[last:]).decode()
        try:
            parsed(code)
        except SyntaxError:
            raise Unchangeable("the changed text is no program") from None
        if code == self._raw.decode():
            raise Unchangeable("nothing is there to change")
        return code

    # ---- places

    def _begin(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _last_word(self, call: ast.Call) -> tuple[int, str]:
        """Where the last word before a call's closing bracket ends, and the word; comments are none."""
        text = self.text(call)
        words = [
            one for one in tokenize.generate_tokens(io.StringIO(text).readline)
            if one.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
            and one.string.strip()
        ]  # fmt: skip
        row, column = words[-2].end
        lines = text.splitlines(keepends=True)
        return self._begin(call) + len(("".join(lines[: row - 1]) + lines[row - 1][:column]).encode()), words[-2].string

    def _line_end(self, place: int) -> int:
        found = self._raw.find(b"\n", place)
        return len(self._raw) if found < 0 else found + 1

    def _indented(self, statement: ast.stmt, lines: Sequence[str]) -> bytes:
        margin = self._raw[self._starts[statement.lineno - 1] : self._begin(statement)]
        if margin.strip(b" \t"):
            raise Unchangeable("the statement does not begin its line")
        return b"".join(margin + line.encode() + b"\n" if line else b"\n" for line in lines)

    def _no_lines_of_strings(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            for node in ast.walk(statement):
                is_text = isinstance(node, ast.JoinedStr) or (
                    isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
                )
                if is_text and isinstance(node, ast.expr) and node.lineno != node.end_lineno:
                    raise Unchangeable("a text over several lines would change")


def called(call: ast.expr) -> str:
    """The last name of what is called: `step` in ``optimizer.step()``; "" where it has none."""
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def call_of(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement consists of, as ``loss.backward()``."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value if isinstance(value, ast.Call) else None


def has_call(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Call) and called(one) == name for one in ast.walk(node))
