"""What may follow ``%gpumem_try``: options of the allocator, or one argument of the cell's own calls."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from gpumem_magic.allocator.settings import parse_with_notes

_ARGUMENT = re.compile(r"(?P<name>foreach|fused|set_to_none)\s*=\s*(?P<value>True|False)$")
_OPTION = re.compile(r"\w+:")
_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_FUSED = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})


class RemedyError(ValueError):
    """What was typed is no remedy, or not one for this cell. The text is one line."""


@dataclass(frozen=True)
class Remedy:
    """conf: options as PYTORCH_CUDA_ALLOC_CONF has them, or "". argument, value: of the cell's calls, or ""."""

    text: str
    conf: str = ""
    argument: str = ""
    value: str = ""


def remedy_of(text: str) -> Remedy:
    """What a user typed. Raises RemedyError where it is none."""
    text = text.strip().strip("\"'")
    argument = _ARGUMENT.fullmatch(text)
    if argument is not None:
        return Remedy(text, argument=argument["name"], value=argument["value"])
    conf = text.removeprefix("PYTORCH_CUDA_ALLOC_CONF=")
    if not _OPTION.match(conf):
        raise RemedyError(f"{text!r} is no remedy, as expandable_segments:True, foreach=False and set_to_none=True are")
    try:
        notes = parse_with_notes(conf)[1]
    except ValueError as error:
        raise RemedyError(str(error)) from None
    if notes:
        raise RemedyError(notes[0])
    return Remedy(text, conf=conf)


def edited(code: str, remedy: Remedy) -> tuple[str, list[int]]:
    """A cell's Python code with the remedy's argument in every call that takes it, and the lines of these calls.

    Raises RemedyError where there is no such call.
    """
    lines = code.encode().splitlines(keepends=True)
    changes: list[tuple[int, int, int, bytes]] = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and _takes(node, remedy)):
        old = next((word.value for word in call.keywords if word.arg == remedy.argument), None)
        if old is not None:
            if old.lineno != old.end_lineno or old.end_col_offset is None:
                raise RemedyError(
                    f"{remedy.argument} at line {old.lineno} of the cell is written over several lines: change it by hand"
                )
            changes.append((old.lineno, old.col_offset, old.end_col_offset, remedy.value.encode()))
        else:
            row, place = _bracket(call)
            changes.append((row, place, place, _added(call, lines, remedy)))
    if not changes:
        where = "calls `zero_grad`" if remedy.argument == "set_to_none" else "makes an optimizer that takes it"
        raise RemedyError(
            f"{remedy.text}: no line of the failed cell {where}; change it where it is, and run the cell again"
        )
    for line, begin, end, text in sorted(changes, reverse=True):
        whole = lines[line - 1]
        lines[line - 1] = whole[:begin] + text + whole[end:]
    changed = b"".join(lines).decode()
    try:
        ast.parse(changed)
    except SyntaxError:
        raise RemedyError(
            f"{remedy.text} cannot be put into the failed cell automatically: change it by hand"
        ) from None
    return changed, sorted({line for line, _, _, _ in changes})


def _bracket(call: ast.Call) -> tuple[int, int]:
    """The line and column of a call's closing bracket."""
    return call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1


def _takes(call: ast.Call, remedy: Remedy) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(word.arg is None for word in call.keywords):
        # `**options` may hold the argument already.
        return False
    words = {word.arg for word in call.keywords}
    # An optimizer refuses both at once.
    if remedy.argument in ("foreach", "fused") and remedy.argument not in words and words & {"foreach", "fused"}:
        return False
    if remedy.argument == "set_to_none":
        return name == "zero_grad" and not call.args
    return name in (_FUSED if remedy.argument == "fused" else _OPTIMIZERS)


def _added(call: ast.Call, lines: list[bytes], remedy: Remedy) -> bytes:
    row, place = _bracket(call)
    before = lines[row - 1][:place].rstrip()
    has_arguments = bool(call.args or call.keywords)
    comma = b", " if has_arguments and before and not before.endswith(b",") else b""
    if has_arguments and not before:
        # The bracket has a line of its own: whether a comma ends the line above is not worth guessing at.
        above = b"".join(lines[: row - 1]).rstrip()
        comma = b"" if above.endswith(b",") else b", "
    return comma + remedy.text.encode()
