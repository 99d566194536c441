"""The text of a program as its author wrote it, found again from the positions in its syntax tree.

IPython rewrites a cell before Python reads it (``!ls`` becomes a call). `align` puts the rewritten lines back beside the lines
that they came from, so that line numbers are the notebook's and a statement can be shown as it was typed.
"""

from __future__ import annotations

import ast
import io
import tokenize
from difflib import SequenceMatcher

from gpumem_magic.looks.parsing import parsed

Position = tuple[int, int]  # line from 1, column from 0 in UTF-8 bytes, as in `ast`

_FINDS_BODY = (
    ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith | ast.Match | ast.ExceptHandler
    | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
)  # fmt: skip


def split_lines(text: str) -> list[str]:
    """The lines of `text` without their ends, counted as Python's parser counts them."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


class Source:
    """Python text, and the text that its author sees on the same lines.

    extents: where one line of Python stands for several lines of the author's, its line number -> the last of theirs.
    """

    def __init__(self, python: str, shown: str | None = None, extents: dict[int, int] | None = None) -> None:
        self._python = split_lines(python)
        self._shown = self._python if shown is None else split_lines(shown)
        self._extents = extents or {}

    def span(self, node: ast.stmt | ast.ExceptHandler) -> tuple[Position, Position]:
        """Start and end of a statement, decorators included; of a compound one only its head, up to the colon."""
        start = min([(node.lineno, node.col_offset), *_decorators(node)])
        if isinstance(node, _FINDS_BODY):
            return start, self._colon(node, start)
        return start, (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)

    def text(self, start: Position, end: Position) -> str:
        """What the author wrote from `start` to `end`; whole lines where IPython rewrote them."""
        last = self._extents.get(end[0], end[0])
        python, shown = self._python[start[0] - 1 : last], self._shown[start[0] - 1 : last]
        if [line.strip() for line in python] != [line.strip() for line in shown]:
            return "\n".join(shown).strip()
        return self._segment(start, end).strip()

    def is_elif(self, node: ast.stmt) -> bool:
        """Whether an `if` is written ``elif``."""
        if not isinstance(node, ast.If):
            return False
        return self._python[node.lineno - 1].encode()[node.col_offset :].startswith(b"elif")

    def _segment(self, start: Position, end: Position) -> str:
        lines = [line.encode() for line in self._python[start[0] - 1 : end[0]]]
        if not lines:
            return ""
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        return "\n".join(line.decode(errors="replace") for line in lines)

    def _colon(self, node: _FINDS_BODY, start: Position) -> Position:
        """The end of the head of a compound statement: after the first colon outside brackets that follows its expressions."""
        if isinstance(node, ast.Match):
            first: Position = (node.cases[0].pattern.lineno, node.cases[0].pattern.col_offset)
        else:
            first = min([(node.body[0].lineno, node.body[0].col_offset), *_decorators(node.body[0])])
        behind = max(
            ((part.end_lineno, part.end_col_offset) for part in _head(node) if part.end_lineno and part.end_col_offset),
            default=start,
        )
        text = self._segment(start, first)
        rows = text.split("\n")
        depth = 0
        try:
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type != tokenize.OP:
                    continue
                depth += (token.string in "([{") - (token.string in ")]}")
                line = start[0] + token.end[0] - 1
                column = len(rows[token.end[0] - 1][: token.end[1]].encode()) + (start[1] if token.end[0] == 1 else 0)
                if token.string == ":" and depth == 0 and (line, column) > behind:
                    return line, column
        except (tokenize.TokenError, SyntaxError):  # the text stops in the middle of a statement
            pass
        return start[0], len(self._python[start[0] - 1].encode())


def _decorators(node: ast.AST) -> list[Position]:
    # A decorator's position is its expression's; the "@" is one column before it.
    return [(part.lineno, max(0, part.col_offset - 1)) for part in getattr(node, "decorator_list", [])]


def _head(node: _FINDS_BODY) -> list[ast.expr]:
    """The expressions in the head of a compound statement."""
    parts = [getattr(node, field, None) for field in ("iter", "test", "subject", "type")]
    for item in getattr(node, "items", []):
        parts += [item.context_expr, item.optional_vars]
    return [part for part in (*parts, *getattr(node, "decorator_list", [])) if part is not None]


def align(raw: str, rewritten: str) -> tuple[str, dict[int, int]] | None:
    """`rewritten` with blank lines put in so that each line stands where the author wrote it in `raw`; and the extents.

    None where the lines cannot be matched, or where blank lines would change the meaning.
    """
    before, after = split_lines(raw.rstrip("\n")), split_lines(rewritten.rstrip("\n"))
    placed: list[str] = []
    extents: dict[int, int] = {}
    # IPython takes away the indentation that all lines have, and blank lines above the first.
    first_line = next((line for line in before if line.strip()), "")
    indentation = first_line[: len(first_line) - len(first_line.lstrip())]
    texts = [[line.strip() for line in lines] for lines in (before, after)]
    for tag, a, b, c, d in SequenceMatcher(None, texts[0], texts[1], autojunk=False).get_opcodes():
        if tag == "equal":
            spans = [(line, line + 1) for line in range(a, b)]
        else:
            spans = _groups(before, a, b)
            if len(spans) != d - c:
                spans = [(a, b)] * (d - c)
        for line, (first, last) in zip(after[c:d], spans, strict=True):
            if len(placed) > first:
                return None
            placed.extend(_blank(one, indentation) for one in before[len(placed) : first])
            placed.append(line)
            if last > first + 1:
                extents[len(placed)] = last
    aligned = "\n".join(placed) + (rewritten[len(rewritten.rstrip("\n")) :] or "\n")
    unmoved = aligned.rstrip("\n") == rewritten.rstrip("\n")
    return (aligned, extents) if unmoved or _same_program(aligned, rewritten) else None


def _blank(line: str, indentation: str) -> str:
    """A line that IPython took away, where it was blank; an empty one in the place of any other."""
    return "" if line.strip() else line.removeprefix(indentation)


def _groups(lines: list[str], start: int, stop: int) -> list[tuple[int, int]]:
    """Lines `start` to `stop` as (first, behind last) of what belongs together: ``!ls \\`` goes on in the next line."""
    groups: list[tuple[int, int]] = []
    first = start
    for index in range(start, stop):
        if not lines[index].rstrip().endswith("\\"):
            # A blank line that IPython dropped is no statement.
            if lines[index].strip():
                groups.append((first, index + 1))
            first = index + 1
    return groups


def _same_program(one: str, other: str) -> bool:
    try:
        return ast.dump(parsed(one)) == ast.dump(parsed(other))
    except (SyntaxError, ValueError, RecursionError):
        return False
