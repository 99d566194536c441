"""Results that could take the place of what they are made of: a chain of operators, of which each makes a tensor of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from gpumem_magic.causes.alike import bytes_of, goes_by_numbers, made_at, of_birth
from gpumem_magic.causes.model import WORTH, Scene, partnered, requested
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.written import name_given
from gpumem_magic.devices.base import Birth
from gpumem_magic.looks.parsing import expression_of
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD
from gpumem_magic.report.model import OF_A_MODEL, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

_METHODS: dict[type[ast.operator], str] = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
_LONGEST = 40
# So many parts are no single tensor.
_PARTS = 3
# What is saved is one part in so many of the peak, or more.
_SHARE = 8


def in_place(scene: Scene) -> Iterator[Cause]:
    """Where autograd has no part: ``x.float() / 255``, of which the first part is there once more at the peak."""
    if scene.report.error is not None or any(scene.start_of(one) < scene.moment for one in scene.spans(BACKWARD)):
        # (What backward needs must stay as it is; data that is made ready before the first is no part of it.)
        return
    found = [pair for pair in _pairs(scene) if pair[1].born < scene.moment and (pair[0].freed or 0) >= scene.moment]
    for given, result, words in found:
        highest = scene.highest_without([replace(given, born=result.born)])[0]
        saved = scene.report.peak.allocated - highest
        if saved < max(WORTH, scene.part_of_peak(_SHARE)):
            continue
        yield Cause(
            "in_place",
            f"{made_at(scene, result)} makes a second tensor of {human(size_of([result]))} beside the one that it is made of, "
            "which nothing else reads.",
            f"In place (`{words}`) it takes that one's memory: the peak would be {human(highest)}.",
            max(saved, size_of([result])),
            describes=True,
        )
        return


def second_of_its_size(scene: Scene) -> Iterator[Cause]:
    """A request that failed was for a second tensor as large as one from before the cell, number by number from it."""
    birth, error = scene.failed, scene.report.error
    if error is None or not error.wanted or birth is None or not birth.inputs or scene.spans(BACKWARD):
        return
    form = birth.shape, birth.dtype
    if birth.node or birth.inputs[0] != form or not goes_by_numbers(birth.kernel):
        return
    kept = [
        one
        for one in scene.held
        if one.kind == "tensor"
        and (one.shape, one.dtype) == form
        and (made := scene.alive.get(one.address)) is not None
        and made.born < 0
        and scene.holdings.roots[one.roots[0]].kind == "variable"
    ]
    if not kept or 2 * error.wanted < scene.report.peak.allocated:
        return
    yield Cause(
        "second_of_its_size",
        f"{of_birth(scene, scene.moment - 1, birth)} makes a second tensor of {human(error.wanted)} beside "
        f"{quoted(kept[0].place)}, all of which it goes through.",
        "Where it gives the same each time, do so once, and keep its result in that one's place; else a part of the rows at a "
        "time.",
        error.wanted,
    )


def rebuilt_beside(scene: Scene) -> Iterator[Cause]:
    """``cache = [f(part) for part in cache]``: all parts of the new one are made while the name has the old one's."""
    point = scene.tensors.statement_at(scene.moment - 1) if scene.tensors is not None else None
    name = name_given(point.statement) if point is not None else ""
    trains = scene.report.error is not None and scene.program.goes_on_backward(scene.left.way)
    if not name or point is None or scene.tensors is None or trains or scene.spans(BACKWARD):
        # (A graph needs the old ones.)
        return
    begin = scene.start_of_row(scene.moment - 1)
    of_it = re.compile(rf"{re.escape(name)}[.\[]")
    living = scene.timeline.live_at(scene.moment)
    old = [
        one
        for one in living
        if one.born < begin
        and scene.labels[one.index].category not in OF_A_MODEL
        and of_it.match(scene.tensors.keeper(one, begin)[1])
    ]
    fresh = [one for one in living if one.born >= begin]
    new = partnered(fresh, requested, map(requested, old))
    if len(new) < _PARTS or 2 * size_of(new) < size_of(old) or size_of(new) < scene.part_of_peak(4):
        return
    yield Cause(
        "rebuilt_beside",
        f"`{point.statement.strip()}` (line {point.line}) makes all of a new `{name}` while the old one is there still: "
        f"{human(size_of(old))} and {human(size_of(new))}.",
        f"In a loop that puts each part in the old one's place (`{name}[i] = new`), one at a time is there twice: about "
        f"{human(size_of(new) - max(one.size for one in new))} less here.",
        size_of(new),
    )


def _pairs(scene: Scene) -> Iterator[tuple[Allocation, Allocation, str]]:
    """What was made of a tensor that the statement itself had made, or whose name then gets the result, and let go of as soon as
    the result was there; and the call that would do so in place."""
    births = scene.recording.logs[scene.device].births
    forwards = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(FORWARD)]
    by_start = sorted(scene.timeline.live_at(scene.moment), key=lambda one: one.born)
    for result in by_start:
        birth = births.get(result.born)
        if birth is None or birth.node or not birth.shape or any(a <= result.born < b for a, b in forwards):
            continue
        words, named = _in_place(birth, _target(scene, result))
        begin = 0 if named else scene.start_of_row(result.born)
        for given in by_start if words else ():
            its = births.get(given.born)
            # (Of what is from before the cell, the shape is not known.)
            fits = (
                (its.shape, its.dtype) == (birth.shape, birth.dtype)
                if its is not None
                else named and given.requested == bytes_of(birth.shape, birth.dtype)
            )
            if (
                fits
                and (named or begin <= given.born)
                and given.born < result.born
                and _goes_with_it(scene, given, result)
            ):
                yield given, result, words


def _target(scene: Scene, result: Allocation) -> str:
    """The one name to which the statement that made it gives its value; "" for another statement."""
    return name_given(scene.tensors.facts(result).statement) if scene.tensors is not None else ""


def _goes_with_it(scene: Scene, given: Allocation, result: Allocation) -> bool:
    """Whether nothing was made between the result and the end of what it is made of."""
    return given.freed is not None and not scene.allocates_between(result.born + 1, given.freed)


def _in_place(birth: Birth, target: str) -> tuple[str, bool]:
    """``.div_(255.0)`` for what stands behind ``/`` where its left side has the result's size; "" where that is not plain. With
    it, whether that side is the name that the result goes to."""
    place = birth.place
    given = birth.inputs[0] if birth.inputs else ((), "")
    same = given[0] == birth.shape and given[1] == birth.dtype and bytes_of(given[0], given[1]) > 0
    if place is None or not same or not goes_by_numbers(birth.kernel) or not hasattr(torch.Tensor, f"{birth.kernel}_"):
        return "", False
    node = expression_of(place.expression)
    named = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and node.left.id == target
    if not isinstance(node, ast.BinOp) or (isinstance(node.left, (ast.Name, ast.Attribute)) and not named):
        return "", False
    method = _METHODS.get(type(node.op), "")
    other = ast.unparse(node.right)
    fits = method.rstrip("_") == birth.kernel and len(other) <= _LONGEST
    return f"{target if named else ''}.{method}({other})" if fits else "", named
