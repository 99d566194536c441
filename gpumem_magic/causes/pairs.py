"""What is broadcast, or made for every pair of rows."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod

import torch

from gpumem_magic.causes.alike import (
    Alike,
    births_alive,
    bytes_of,
    first_reader,
    made_by,
    numbers_alive,
    of_birth,
    size_words,
    squeezed,
    taken_in_by,
)
from gpumem_magic.causes.model import LEAST, WORTH, Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.looks.parsing import expression_of, parsed, parsed_expression
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import MIB, human, shape_words

COPIES = frozenset({"clone", "_to_copy", "copy", "repeat", "contiguous", "copy_"})
PRODUCTS = frozenset({"mm", "bmm", "matmul", "baddbmm", "dot", "ger", "outer", "addr"})
_TABLE = "torch.nn.modules.sparse.Embedding"
MULTIPLIES = re.compile(r"@|\b(?:matmul|b?mm|einsum|outer|inner|tensordot|ger|cdist)\s*\(")
# What is made so often, a few rows each time, is made in parts.
_PARTS = 3
# Pairs that are meant are worth a word where they take one part in so many of the peak.
_SHARE, _MEANT_FROM = 3, 8 * MIB
# Smaller ones are no fault.
_FAULT = WORTH
# A product of two weights has so many times the length that they share in both directions.
_LOW = 4
_DISTANCES = re.compile(r"cdist|pairwise|euclidean")
# Decompositions and solvers, of ATen/native/BatchLinearAlgebra.cpp and its neighbours.
_FACTORS = re.compile(r"cholesky|^_?linalg_(?:eigh?|svd|lu|ldl|qr|inv|solve|slogdet|det)|geqrf|^inverse|logdet|lstsq")
# (Over the last dimension: its own choice is the second.)
_COSINES = re.compile(r"cosine_similarity\(.*(?:dim\s*=\s*)?(?:-1|2)\s*\)$")
_TRANSPOSED = re.compile(r"\.(?:[tT]\(\)|m?[TH]|transpose\((?:0, 1|1, 0|-1, -2|-2, -1)\))$")
_EINSUM = re.compile(r"(?:torch\.)?einsum\(")
_MEANT = re.compile(r"\bNone\b|unsqueeze|\[\s*:\s*,")
_INDEXED = re.compile(r"\[.*\]$|\.unsqueeze\(.*\)$")
_MOST_NAMES = 40
# ``x.norm(p=1, dim=-1)``, ``x.norm(1, -1)``, ``vector_norm(x, ord=1)``.
_NORM = re.compile(r"\b(?:p|ord)\s*=\s*([\d.]+)|\.norm\(\s*([\d.]+)")
_CHECKPOINTED = ", each part in a function that `torch.utils.checkpoint.checkpoint` calls with `use_reentrant=False`"
# So many of one operator and one line, in one statement, are a loop's.
_TURNS = 8
_OF_A_TURN = (
    "A function for what a turn does, called by `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`, keeps only what "
    "goes into it, and computes the rest again in backward."
)
# Two matrices for whose rows all pairs are made: rows, rows and what is summed over.
_PAIR, _PLANES = 2, 3


def broadcast(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    shapes = [shape for shape, _ in birth.inputs if prod(shape) > 1]
    if birth.kernel in PRODUCTS or birth.kernel in COPIES or len(shapes) < 2 or _joint(shapes) != alike.shape:
        return None
    first, second = sorted(shapes[:2], key=lambda shape: -prod(shape)) if len(shapes) > 2 else shapes[:2]
    # (Distances have a way that needs no such tensor, however few rows there are of a time.)
    distances = birth.kernel == "sub" and first[-1] == second[-1] and alike.bytes >= scene.part_of_peak(2)
    if is_in_parts(scene, alike) and not (distances and _is_summed(scene, alike)):
        return None
    expression = birth.place.expression if birth.place is not None else ""
    what = made_by(scene, alike)
    pair = f"{shape_words(first)} with {shape_words(second)}"
    turns = _turns_kept(scene, alike)
    in_turns = f", from {turns} turns of a loop" if turns else ""
    told = f"{what} broadcasts {pair} to {shape_words(alike.shape)}: {size_words(alike)}{in_turns}."
    same = squeezed(first) == squeezed(second)
    if same and not _MEANT.search(expression) and (len(first) != len(second) or birth.operator.endswith("loss")):
        return Cause("broadcast", told, _squeeze(first, second, operands(expression)), alike.bytes)
    if alike.bytes < max(_MEANT_FROM, scene.part_of_peak(_SHARE)) or bytes_of(alike.shape, birth.dtype) < LEAST:
        # Meant, and one thing among others; or the many small ones of a loop's steps.
        return None
    small = alike.bytes < _FAULT
    remedy = _OF_A_TURN if turns else _fewer(scene, alike, (first, second))
    return Cause("all_pairs", told, remedy, alike.bytes, describes=small)


def _turns_kept(scene: Scene, alike: Alike) -> int:
    """Of how many turns of a loop within one statement a graph keeps what has the shape, where one turn has little of it; else
    0."""
    if not _goes_backward(scene, alike):
        return 0
    row = scene.start_of_row(alike.event)
    kept = Counter(
        (birth.place, birth.kernel)
        for event, _, birth in births_alive(scene)
        if birth.shape == alike.shape and not birth.node and scene.start_of_row(event) == row
    )
    turns = max(kept.values(), default=0)
    return turns if turns >= _TURNS else 0


def _fewer(scene: Scene, alike: Alike, shapes: tuple[tuple[int, ...], ...]) -> str:
    """What to do about pairs that are meant."""
    birth = alike.birth
    if line := _diagonal(scene, alike):
        return (
            f"Only the diagonal of its result is read (line {line}): give each row its own partner, without the broadcast, and "
            "no other pairs are made."
        )
    rows = rows_at_a_time(scene, alike)
    expression = birth.place.expression if birth.place is not None else ""
    if len(alike.shape) >= 3 and shapes[0][-1] == shapes[1][-1] and birth.kernel == "sub" and _is_summed(scene, alike):
        names = [
            (_not_expanded(words), _INDEXED.search(words) is not None or len(shape) < len(alike.shape))
            for words, shape in zip(operands(expression), shapes, strict=False)
        ]
        whole = bool(names) and all(small for _, small in names)
        norm = [f"p={power}"] if (power := _power(scene, alike)) else []
        them = (
            f"`torch.cdist({', '.join([*(name for name, _ in names), *norm])})`"
            if whole
            else f"`torch.cdist` of both, not expanded{f' and with `{norm[0]}`' if norm else ''},"
        )
        fewer = "" if is_in_parts(scene, alike) else f"; or {rows}"
        return f"{them} gives distances between all pairs without it{fewer}."
    if _COSINES.search(expression) and len(alike.shape) == _PLANES and operands(expression):
        one, other = (f"F.normalize({_not_expanded(words)}, dim=-1)" for words in operands(expression))
        return f"`{one} @ {other}.T` makes the cosines of all pairs without it; or {rows}."
    if birth.kernel == "mul" and shapes[0][-1] == shapes[1][-1] > 1 and _is_summed(scene, alike):
        return f"{_product(shapes, operands(expression))} multiplies and sums without storing them; or {rows}."
    if _is_on_the_way(expression):
        # (`einsum` of ATen/native/Linear.cpp, PyTorch 2.13, where no path is given: opt_einsum is not there, or not used.)
        return (
            "`torch.einsum` takes its operands from the left: in another order, with those first that share their letters, it "
            f"may need no such tensor; or {rows}."
        )
    # Who writes the dimension of 1 means it.
    unsure = "" if _MEANT.search(expression) else ", if every pair is meant; else give both the same shape"
    return f"{rows[0].upper()}{rows[1:]}{unsure}."


def _product(shapes: Sequence[tuple[int, ...]], operands: Sequence[str]) -> str:
    """The product of matrices that sums, over their last dimension, what was multiplied for all pairs."""
    (one, other), names = shapes, list(map(_not_expanded, operands))
    rows_first = one[-2:-1] == (1,) and (len(other) < _PLANES or other[-_PLANES] == 1)
    if len(names) == _PAIR and all(map(str.isidentifier, names)) and max(map(len, shapes)) == _PLANES and rows_first:
        return f"`{names[0]} @ {names[1]}.T`"
    return "`torch.einsum` of both, not expanded,"


def rows_at_a_time(scene: Scene, alike: Alike) -> str:
    """A graph keeps each part for its backward."""
    # (A backward of its own for each would go through what they share a second time.)
    return f"work on some of the rows at a time{_CHECKPOINTED if _goes_backward(scene, alike) else ''}"


def _goes_backward(scene: Scene, alike: Alike) -> bool:
    trains = any(scene.start_of(one) > alike.event for one in scene.spans(BACKWARD))
    return trains or (scene.report.error is not None and scene.program.goes_on_backward(scene.left.way))


def product_with(scene: Scene, alike: Alike) -> str:
    """The product of matrices that is the first to take it in, in whatever view; "" where something else reads it first."""
    event, birth = first_reader(scene, alike) or (0, None)
    return of_birth(scene, event, birth) if birth is not None and birth.kernel in PRODUCTS and not birth.node else ""


def _is_on_the_way(expression: str) -> bool:
    """Whether it is an `einsum` of three operands or more that sums over something: its result is smaller than all pairs."""
    node = expression_of(expression) if _EINSUM.match(expression) else None
    if not isinstance(node, ast.Call) or len(node.args) <= 1 + _PAIR:
        return False
    letters = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
    given, arrow, result = letters.partition("->") if isinstance(letters, str) else ("", "", "")
    return not arrow or bool(set(filter(str.isalpha, given)) - set(result))


def _is_summed(scene: Scene, alike: Alike) -> bool:
    """Whether its last dimension goes in a sum or a norm, as far as that is known: distances."""
    if scene.report.error is not None:
        return True
    later = (birth for event, birth in scene.births if event > alike.event and not birth.node)
    return any(one.shape == alike.shape[:-1] and alike.shape in (shape for shape, _ in one.inputs) for one in later)


def _power(scene: Scene, alike: Alike) -> str:
    """The norm in which distances are taken, as the operator that reads it next has it; "" for the ordinary one."""
    later = (birth for event, birth in scene.births if event > alike.event and not birth.node)
    reader = next((one for one in later if alike.shape in (shape for shape, _ in one.inputs)), None)
    words = reader.place.expression if reader is not None and reader.place is not None else ""
    written = _NORM.search(words)
    power = next(filter(None, written.groups()), "") if written is not None else ""
    return "1" if reader is not None and reader.kernel == "abs" else power.removesuffix(".0") if power != "2" else ""


def _not_expanded(words: str) -> str:
    """``a[:200]`` of ``a[:200, None]``, and ``a`` of ``a[:, None]`` and ``a.unsqueeze(1)``."""
    node = parsed_expression(words)
    if not isinstance(node, ast.Subscript):
        return _INDEXED.sub("", words)
    index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [ast.unparse(one) for one in index if not (isinstance(one, ast.Constant) and one.value is None)]
    while parts and parts[-1] == ":":
        parts.pop()
    return f"{ast.unparse(node.value)}[{', '.join(parts)}]" if parts else ast.unparse(node.value)


def _diagonal(scene: Scene, alike: Alike) -> int:
    """The line of the cell that takes the diagonal of what a function makes of it, and nothing else of that; else 0."""
    place = alike.birth.place
    one = next((each for each in scene.timeline.allocations if each.born == alike.event), None)
    facts = scene.tensors.facts(one) if scene.tensors is not None and one is not None else None
    if facts is None or place is None:
        return 0
    try:
        calls = [node for node in ast.walk(parsed(facts.statement.strip())) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return 0
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[2] not in ("diag", "diagonal"):
            continue
        of = next(iter(call.args), call.func.value if isinstance(call.func, ast.Attribute) else None)
        made = ast.unparse(of.func).rpartition(".")[2] if isinstance(of, ast.Call) else ""
        if made and made == place.function.rpartition(".")[2]:
            return facts.line
    return 0


def _squeeze(first: tuple[int, ...], second: tuple[int, ...], names: list[str]) -> str:
    """What makes the two shapes the same: without the dimension of 1, or with it in the other."""
    number = 0 if first and first[-1] == 1 else 1
    shape, other = (first, second) if number == 0 else (second, first)
    if shape and shape[-1] == 1:
        name = names[number] if names else "the first" if number == 0 else "the second"
        call = (
            f"`{name}.squeeze({len(shape) - 1})`"
            if names and name.isidentifier()
            else f"`.squeeze({len(shape) - 1})` of {name}"
        )
        other = squeezed(other)
        return (
            f"Unless every pair is meant, the result is wrong, too: {call} gives both the shape {shape_words(other)}."
        )
    return "Unless every pair is meant, the result is wrong, too: give both the same shape (`squeeze` or `unsqueeze`)."


def _joint(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape to which they broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def pairs(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    words = f"{birth.operator} {birth.place.expression or birth.place.text if birth.place is not None else ''}"
    distances = _DISTANCES.search(birth.operator) is not None
    shape = alike.shape
    square = len(shape) >= 2 and min(shape[-2:]) >= 256
    if not square or not (distances or (birth.kernel in PRODUCTS and MULTIPLIES.search(words))):
        return None
    alive = numbers_alive(scene, prod(shape))
    if alive < scene.part_of_peak(_SHARE) or is_in_parts(scene, alike):
        return None
    shapes = " and ".join(shape_words(one) for one, _ in birth.inputs[:2])
    if rank := _rank_of_weights(scene, birth):
        names = operands(birth.place.expression) if birth.place is not None else []
        instead = f"`x @ {names[1]}.T @ {names[0]}.T`" if names and "@" in words else "one after the other"
        return Cause(
            "weights_multiplied",
            f"{made_by(scene, alike)} multiplies two weights, {shapes}, into one of {shape_words(shape)}: {size_words(alike)}.",
            f"Multiply the input with {instead}: of each row that makes {rank:,} numbers on the way, and no weight.",
            alike.bytes,
        )
    rows = rows_at_a_time(scene, alike)
    remedy = f"{rows[0].upper()}{rows[1:]}, and keep of each part only what is needed (its `topk`, its sum)."
    if few := _rank_of_features(birth):
        name = _TRANSPOSED.sub("", operands(birth.place.expression)[0]) if birth.place is not None else "x"
        remedy = (
            f"Of {few:,} rows, no more of it than `{name} @ {name}.T` {shape_words((few, few))} has, whose eigenvalues are the "
            f"same but for zeros; `torch.pca_lowrank({name})` gives the first directions without either."
        )
    elif any(scene.start_of(one) <= alike.event < scene.end_of(one) for one in scene.spans(OPTIMIZER)):
        remedy = (
            "In an optimizer, leave out sides of a weight that are this long, or keep the diagonal alone of theirs."
        )
    elif factored := taken_in_by(scene, alike, _FACTORS.search):
        remedy = (
            f"{factored} needs all of it at once: fewer rows (some of the points, chosen or drawn) make it smaller."
        )
    # (Views have other shapes.)
    more = f", {human(alive)} with all that has as many numbers" if alive > alike.bytes else ""
    return Cause(
        "all_pairs",
        f"{made_by(scene, alike)} makes one number for every pair, {shape_words(shape)} from {shapes}: {size_words(alike)}"
        f"{more}.",
        remedy,
        alike.bytes,
        describes=alive < _FAULT,
    )


def _rank_of_features(birth: Birth) -> int:
    """How many rows ``x.T @ x`` sums over, where they are far fewer than the features of which it makes all pairs; else 0."""
    names = operands(birth.place.expression) if birth.place is not None else []
    (features, *rest), _ = birth.inputs[0] if birth.inputs else ((0,), "")
    if len(names) != _PAIR or len(rest) != 1 or _LOW * rest[0] > features:
        return 0
    return rest[0] if _TRANSPOSED.search(names[0]) and _TRANSPOSED.sub("", names[0]) == names[1] else 0


def _rank_of_weights(scene: Scene, birth: Birth) -> int:
    """The length that two weights have in common whose product is far larger than both, as adapters of a low rank have it; else
    0. (Of tables that are looked up, the product is one of all rows.)"""
    weights = {one.shape for one in scene.held if one.kind == "parameter" and not one.goes_through(_TABLE)}
    first, second = (shape for shape, _ in birth.inputs[:2])
    if len(first) != 2 or len(second) != 2 or not all(weights & {shape, shape[::-1]} for shape in (first, second)):
        return 0
    rank = first[1]
    return rank if _LOW * rank <= min(first[0], second[1]) else 0


def is_in_parts(scene: Scene, alike: Alike) -> bool:
    """Whether some rows at a time are worked on already: again and again, of a few rows with many, none kept for a backward."""
    sizes = sorted(prod(shape) for shape, _ in alike.birth.inputs if prod(shape) > 1)
    if scene.report.error is not None or len(sizes) < 2 or 2 * sizes[0] > sizes[-1]:
        return False
    return is_repeated(scene, alike)


def is_repeated(scene: Scene, alike: Alike) -> bool:
    """Whether a place makes it again and again, and none is kept for a backward."""
    births = scene.recording.logs[scene.device].births
    place = alike.birth.place
    its = [
        one
        for one in scene.timeline.allocations
        if (birth := births.get(one.born)) is not None
        and (birth.place, birth.kernel, birth.shape) == (place, alike.birth.kernel, alike.birth.shape)
    ]
    # (A checkpoint makes them once more in its backward; a training makes one in each of its turns.)
    backwards = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD)]
    turns: dict[int, list[Allocation]] = defaultdict(list)
    for one in its:
        if not any(begin <= one.born < end for begin, end in backwards):
            turns[sum(begin <= one.born for begin, _ in backwards)].append(one)
    of_a_turn = max(turns.values(), key=len, default=[])
    if place is None or len(of_a_turn) < _PARTS:
        return False
    # The next one is made while a name still has the last.
    return all(
        one.freed is not None and one.freed <= later.born for one, later in zip(of_a_turn, of_a_turn[2:], strict=False)
    )


def operands(expression: str) -> list[str]:
    """The two operands of an expression in its own words: ``a - b``, ``a.sub(b)``, ``f(a, b)``; [] for another one."""
    node = expression_of(expression)
    found: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        found = [node.left, node.right]
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        found = [node.left, node.comparators[0]]
    elif isinstance(node, ast.Call):
        of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        modules = ("torch", "F", "functional", "nn")
        found = [*(one for one in of if ast.unparse(one).rpartition(".")[2] not in modules), *node.args][:2]
    words = [ast.unparse(one) for one in found]
    return words if len(words) == 2 and max(map(len, words)) <= _MOST_NAMES else []
