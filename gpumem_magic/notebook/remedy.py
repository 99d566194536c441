"""What may follow ``%gpumem_try``: options of the allocator, or one argument of the cell's own calls."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from gpumem_magic.advice.draft import CellDraft, Unchangeable, called
from gpumem_magic.allocator.settings import parse_with_notes
from gpumem_magic.looks.optimizers import FUSED, OPTIMIZERS

_ARGUMENT = re.compile(r"(?P<name>foreach|fused|set_to_none)\s*=\s*(?P<value>True|False)$")
_OPTION = re.compile(r"\w+:")


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
    """A cell's Python code with the remedy's argument in every call that takes it, and the lines where it then stands.

    Raises RemedyError where there is no such call.
    """
    draft = CellDraft(code)
    lines: set[int] = set()
    is_there = True
    for call in (node for node in ast.walk(draft.tree) if isinstance(node, ast.Call) and _takes(node, remedy)):
        old = next((word.value for word in call.keywords if word.arg == remedy.argument), None)
        if old is not None and old.lineno != old.end_lineno:
            raise RemedyError(
                f"{remedy.argument} at line {old.lineno} of the cell is written over several lines: change it by hand"
            )
        lines.add(_last_line(call) if old is None else old.lineno)
        if old is None or draft.text(old) != remedy.value:
            draft.argument(call, remedy.argument, remedy.value)
            is_there = False
    if not lines:
        where = "calls `zero_grad`" if remedy.argument == "set_to_none" else "makes an optimizer that takes it"
        raise RemedyError(
            f"{remedy.text}: no line of the failed cell {where}; change it where it is, and run the cell again"
        )
    try:
        return code if is_there else draft.finished(), sorted(lines)
    except Unchangeable:
        raise RemedyError(
            f"{remedy.text} cannot be put into the failed cell automatically: change it by hand"
        ) from None


def _last_line(call: ast.Call) -> int:
    """Of a call's arguments, or of its name where it has none."""
    parts: list[ast.expr | ast.keyword] = [call.func, *call.args, *call.keywords]
    return max(one.end_lineno or one.lineno for one in parts)


def _takes(call: ast.Call, remedy: Remedy) -> bool:
    if any(word.arg is None for word in call.keywords):
        # `**options` may hold the argument already.
        return False
    words = {word.arg for word in call.keywords}
    # An optimizer refuses both at once.
    if remedy.argument in ("foreach", "fused") and remedy.argument not in words and words & {"foreach", "fused"}:
        return False
    if remedy.argument == "set_to_none":
        return called(call) == "zero_grad" and not call.args
    return called(call) in (FUSED if remedy.argument == "fused" else OPTIMIZERS)
