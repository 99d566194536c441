"""What PyTorch has one operator for, written out: each step's result is kept for backward, where the operator keeps its input.

What these keep: tools/autograd/derivatives.yaml (``gelu``, ``silu``, ``mish``, ``native_dropout``, ``native_layer_norm``, and
``_fused_rms_norm`` since 2.9).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.written import Text, Written
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.expressions import called
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

# A function with more statements does something else besides: there the statement counts alone.
_SHORT = 8
_OF_TANH = 0.044715
_ROOT_OF_TWO = re.compile(r"sqrt\(2|1\.41421|0\.7071")
_MEAN_OF_SQUARES = re.compile(
    r"(pow\(2(\.0)?\)|square\(\)|\*\* 2\)?|pow\(\w+, 2\)|square\(\w+\))(\.|, )?.*mean\(|mean\(.*\*\* 2"
)
_ROOT = re.compile(r"sqrt\(")
# Of each row, as layers are normed; not of a batch, nor of all of a loss.
_OVER_ROWS = re.compile(r"\b(?:mean|var|std|var_mean)\((?:[^()]|\([^()]*\))*-1[^()]*keepdim=True")
_LESS_THE_MEAN = re.compile(r"- \w*(?:mean|mu)\w*\b|- \w+\.mean\(")
_SPREAD = re.compile(r"\b(?:var|std|var_mean)\(")
_DRAWS = frozenset({"rand", "rand_like", "bernoulli", "bernoulli_"})
_SCALED = re.compile(r"/ \(?1(\.0)? - |/ \w*keep|/ self\.keep")


_Key = tuple[str, int, int]


class _OneOperator(NamedTuple):
    """is_so: whether it stands in this piece of a program. instead: PyTorch's own, and what that keeps."""

    is_so: Callable[[ast.AST], bool]
    name: str
    instead: str


def written_out(scene: Scene) -> Iterator[Cause]:
    """An activation, a norm or a dropout in several operators, of which each keeps something for backward."""
    if scene.tensors is None:
        return
    groups: dict[_Key, list[tuple[Allocation, CodePlace]]] = defaultdict(list)
    pieces: dict[_Key, _Piece] = {}
    # (One place makes many.)
    looked: dict[CodePlace, _Piece | None] = {}
    for one in scene.living_in(scene.moment, "activations"):
        birth = scene.tensors.birth_of(one)
        place = birth.place if birth is not None and not birth.node else None
        if place is None or place.file != place.own_file:
            continue
        if place not in looked:
            looked[place] = _piece_at(scene, place)
        if (piece := looked[place]) is not None:
            pieces[piece.key] = piece
            groups[piece.key].append((one, place))
    found = sorted(((_on_the_way(its), key) for key, its in groups.items()), key=lambda pair: -size_of(pair[0]))
    for way, key in found[:1]:
        piece = pieces[key]
        if size_of(way) < scene.part_of_peak(8):
            continue
        what = "" if piece.name == piece.known.name else f"{piece.known.name} "
        many = "keeps a tensor" if len(way) == 1 else f"keeps {counted(len(way), 'tensor')}"
        yield Cause(
            "written_out",
            f"`{piece.name}` ({piece.place.words}) is {what}written out, and {many} on the way to its result for "
            f"backward: {human(size_of(way))}.",
            f"{piece.known.instead}.",
            size_of(way),
        )


class _Piece(NamedTuple):
    """A statement, or a short function: its text, first and last line are the key. name: how it is told."""

    key: _Key
    name: str
    place: Written
    known: _OneOperator


def _piece_at(scene: Scene, place: CodePlace) -> _Piece | None:
    """What stands at a place, if PyTorch has it as one operator."""
    text = scene.program.text_of(place.own_file, scene.recording.own_file)
    number = place.own_line - (text.ahead if text is not None else 0)
    if text is None or (statement := _statement_at(text, number)) is None:
        return None
    function = text.function_at(number, place.own_function)
    short = function is not None and len(function.body) <= _SHORT
    node: ast.stmt = function if short else statement
    known = next((one for one in _OPERATORS if one.is_so(node)), None)
    if known is None:
        return None
    name = text.place(statement).shown
    if short:
        kinds = text.nodes_around(number, (ast.ClassDef,))
        name = kinds[-1].name if kinds and function.name in ("forward", "__call__") else f"{function.name}()"
    first = function.body[0] if short else statement
    return _Piece((text.where, node.lineno, node.end_lineno or 0), name, text.place(first), known)


def _statement_at(text: Text, line: int) -> ast.stmt | None:
    return next((one for one in text.everywhere if one.lineno <= line <= (one.end_lineno or one.lineno)), None)


def _on_the_way(its: list[tuple[Allocation, CodePlace]]) -> list[Allocation]:
    """Those that are not its result, which is what it made last: whatever comes next works with that."""
    last = max(its, key=lambda pair: pair[0].born)[1]
    return [one for one, place in its if place != last]


# What it is


def _has(code: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Call) and called(node) == name for node in ast.walk(code))


def _is_gelu(code: ast.AST) -> bool:
    return _has(code, "tanh") and any(
        isinstance(node, ast.Constant) and node.value == _OF_TANH for node in ast.walk(code)
    )


def _is_exact_gelu(code: ast.AST) -> bool:
    return _has(code, "erf") and _ROOT_OF_TWO.search(ast.unparse(code)) is not None


def _times_a_function_of_itself(code: ast.AST, *names: str) -> bool:
    """``x * torch.sigmoid(x)``, ``x * torch.tanh(F.softplus(x))``, either way round."""
    for node in ast.walk(code):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if (inner := _argument(other, names)) is not None and ast.dump(inner) == ast.dump(one):
                    return True
    return False


def _argument(node: ast.expr, names: tuple[str, ...]) -> ast.expr | None:
    """What functions of these names, one within the other, are given; None for anything else."""
    for name in names:
        if not isinstance(node, ast.Call) or called(node) != name:
            return None
        if node.args:
            node = node.args[0]
        elif isinstance(node.func, ast.Attribute):
            node = node.func.value
    return node


def _is_layer_norm(code: ast.AST) -> bool:
    words = ast.unparse(code)
    spread = _SPREAD.search(words) or (_MEAN_OF_SQUARES.search(words) and _ROOT.search(words))
    return bool(spread and _OVER_ROWS.search(words) and _LESS_THE_MEAN.search(words))


def _is_rms_norm(code: ast.AST) -> bool:
    words = ast.unparse(code)
    return bool(_MEAN_OF_SQUARES.search(words) and _OVER_ROWS.search(words) and _ROOT.search(words))


def _is_dropout(code: ast.AST) -> bool:
    """What is drawn is compared, or drawn as 0 and 1, and multiplied; and the rest is scaled up."""
    masks = {
        target.id
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and _is_drawn(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    multiplied = any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(_is_drawn(one) or (isinstance(one, ast.Name) and one.id in masks) for one in (node.left, node.right))
        for node in ast.walk(code)
    )
    return multiplied and _SCALED.search(ast.unparse(code)) is not None


def _is_drawn(value: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and called(node) in _DRAWS for node in ast.walk(value))


def _is_label_smoothing(code: ast.AST) -> bool:
    return _has(code, "scatter_") and "smooth" in ast.unparse(code)


_OPERATORS = (
    _OneOperator(_is_gelu, "GELU", '`F.gelu(x, approximate="tanh")` keeps its input alone'),
    _OneOperator(_is_exact_gelu, "GELU", "`F.gelu(x)` keeps its input alone"),
    _OneOperator(
        lambda code: _times_a_function_of_itself(code, "tanh", "softplus"), "Mish", "`F.mish(x)` keeps its input alone"
    ),
    _OneOperator(
        lambda code: _times_a_function_of_itself(code, "sigmoid"), "SiLU", "`F.silu(x)` keeps its input alone"
    ),
    _OneOperator(
        _is_layer_norm,
        "layer norm",
        "`F.layer_norm(x, x.shape[-1:], weight, bias, eps)` keeps its input as it is, and two numbers a row",
    ),
    _OneOperator(
        _is_rms_norm,
        "RMSNorm",
        "`F.rms_norm(x, x.shape[-1:], weight, eps)` keeps its input as it is, and a number a row",
    ),
    _OneOperator(
        _is_label_smoothing,
        "label smoothing",
        "`F.cross_entropy(logits, target, label_smoothing=...)` makes no distribution as large as the logits",
    ),
    _OneOperator(_is_dropout, "dropout", "`F.dropout(x, p, training)` keeps one byte for each number"),
)
