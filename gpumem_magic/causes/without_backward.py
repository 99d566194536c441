"""Graphs for which no backward runs: those of an evaluation, say."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.graph_counts import backward_ahead, born_at, come_again, graphs_of, keeps_numbers
from gpumem_magic.causes.model import EQUAL_ITERATIONS, LEAST, Scene
from gpumem_magic.causes.places import (
    quoted,
    spots,
)
from gpumem_magic.causes.written import Written
from gpumem_magic.owners.model import Held, by_root, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, Span
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

# What keeps autograd from recording, as a context.
_WITHOUT_GRAPHS = ("no_grad", "inference_mode")


def graph_without_backward(scene: Scene) -> Cause | None:
    """Forwards whose graph something keeps, where no backward is meant to follow: in evaluation mode, or again and again where
    nothing is trained."""
    backwards = scene.spans(BACKWARD)
    last = max(map(scene.end_of, backwards), default=0)
    forwards = [one for one in scene.spans(FORWARD) if scene.start_of(one) >= last]
    if not forwards:
        return None
    starts = sorted(map(scene.start_of, forwards))
    ours = [one for one in scene.held if one.kind == "graph" and born_at(scene, one) >= starts[0]]
    freed = size_of(ours)
    kept = len({bisect_right(starts, born_at(scene, one)) for one in ours})
    if freed < LEAST or backward_ahead(scene, spots(ours)) is not None:
        return None
    place = scene.left.place if scene.report.error is not None else None
    only_looks = place is not None and scene.program.loop_only_looks(place)
    ends = bool(backwards) and kept >= 2 and _ends_without_backward(scene, ours, starts)
    if place is not None and not only_looks and not ends and scene.program.trains(place):
        # It failed on the way to a backward.
        return None
    if backwards:
        # A single one may be the next iteration's, of a model that is trained in evaluation mode.
        told_by_mode = (kept >= 2 or only_looks) and _trained_places(scene)
        if not told_by_mode and not ends:
            return None
    elif may_train(scene, forwards):
        return None
    if (
        (scene.report.error is None or not backwards)
        and not (scene.evaluating or _evaluate(forwards))
        and any(graphs_of(scene, spot) >= 2 for spot in spots(ours)[:1])
    ):
        # Losses that are kept or added up: `graphs_alive` says which.
        return None
    root = scene.holdings.roots[by_root(ours).most_common(1)[0][0]]
    graphs = kept if backwards else max(graphs_of(scene, spot) for spot in spots(ours))
    what = f"the graphs of {graphs} iterations" if graphs > 1 else "a graph"
    row = next((point for point, begin, end in scene.statements if begin <= born_at(scene, ours[0]) < end), None)
    at = f" (line {row.line})" if row is not None else ""
    largest = scene.alive[max(ours, key=lambda one: one.size).address]
    if graphs == 1 and row is not None and kept > 1 and scene.tensors is not None:
        # (Of several forwards of one call it is told where they are.)
        inner = scene.tensors.facts(largest).inner
        at = f" of {kept} forwards (line {row.line}{f', {inner}' if inner else ''})"
    evaluating = sorted(scene.evaluating)
    names = ", ".join(f"`{name}`" for name in evaluating[:3])
    why = f"{names} {'is' if len(evaluating) == 1 else 'are'} in evaluation mode, yet " if names else ""
    keeper, keeps = quoted(root.name), "keeps"
    if graphs > 1 and (carrier := _carrier(scene, ours)) is not None:
        keeper, at = f"`{carrier[0]}`", f" ({carrier[1].words}, `{carrier[1].shown}`)"
    if root.kind == "traceback":
        made = made_at(scene, largest) if not scene.left.told else ""
        keeper, keeps = scene.left.told or keeper, "keep" if " and " in scene.left.told else "keeps"
        if made:
            keeper, at = made, ""
    return Cause(
        "missing_no_grad",
        f"{why}{keeper} {keeps} {what}{at}, though no backward follows: {human(freed)}.",
        without_a_graph(
            scene,
            f"{'Evaluate' if names else 'Run it'} inside `with torch.inference_mode():` (or `torch.no_grad()`).",
            row.line if row is not None else 0,
        ),
        freed,
    )


def _carrier(scene: Scene, graphs: Sequence[Held]) -> tuple[str, Written] | None:
    """The attribute of an object by which each call hands its graph on to the next, and where it does."""
    for number in sorted({number for one in graphs for number in one.roots}):
        root = scene.holdings.roots[number]
        if root.kind == "variable" and root.type not in ("", "Tensor"):
            state = scene.program.carried(root.type) or scene.program.carried_in_parts(root.type)
            if state is not None:
                return f"{root.name}.{state[0]}", state[1]
    return None


def without_a_graph(scene: Scene, remedy: str, line: int) -> str:
    """The remedy, with what the program does to this end, and why that does not help: a context manager that is only called, or
    one that another thread knows nothing of (autograd's mode is each thread's own: c10/core/AutogradState.cpp). line: the cell's,
    at which the graphs were made."""
    if (call := scene.program.does_nothing(_WITHOUT_GRAPHS)) is not None:
        return (
            f"{remedy} `{call.shown}` by itself ({call.words}) switches nothing off: it wants a `with` in front of it."
        )
    around = scene.program.inside_with(line, _WITHOUT_GRAPHS)
    if around is None or scene.program.calls("enable_grad") or scene.program.calls("set_grad_enabled"):
        return remedy
    return (
        f"`{around.shown}` ({around.words}) holds for its own thread, and this was computed in another one: enter "
        "`torch.no_grad()` in the function that the threads run."
    )


def _ends_without_backward(scene: Scene, graphs: Sequence[Held], starts: Sequence[int]) -> bool:
    """Whether it failed where nothing that was still to run, in any of the functions that led there, goes backward; or ended, and
    of what several turns made only numbers are kept. starts: where the forwards began that made the graphs."""
    again, left = [place for place, its in come_again(scene, graphs, starts).items() if len(its) > 1], scene.left
    if scene.report.error is None:
        return bool(again) and all(keeps_numbers(scene, spot) for spot in spots(graphs))
    if not left.way or left.called_back:
        return False
    texts = ((scene.program.text_of(one.own_file, scene.recording.own_file), one.own_line) for one in again)
    line = next((line for text, line in texts if text is not None and text.where == left.way[-1].where), 0)
    ways = (0, line) if line else (0,)
    return not all(scene.program.may_go_backward(left.way, one) for one in ways)


def _trained_places(scene: Scene) -> bool:
    """Whether a model in evaluation mode is one that an optimizer trains."""
    return any((scene.device, address) in scene.holdings.optimized for address in scene.evaluated)


def may_train(scene: Scene, forwards: list[Span]) -> bool:
    """Whether a backward may follow in another cell: a module in evaluation mode is trained, too, where batch norm is frozen."""
    source = "".join(one.source for one in scene.program.cells[:1])
    if not scene.evaluating:
        if _evaluate(forwards):
            # (Models that no variable is: of a list, or of an object.)
            return bool(scene.holdings.optimized) and len(forwards) == 1
        most = max(Counter(span.label for span in forwards).values())
        return bool(scene.holdings.optimized) or most < EQUAL_ITERATIONS or "optim" in scene.typed
    return _trained_places(scene) and len(forwards) == 1 and ".eval(" not in source


def _evaluate(forwards: Sequence[Span]) -> bool:
    """Whether all that has a graph is of modules in evaluation mode."""
    graphs = [one for one in forwards if one.graph]
    return bool(graphs) and all(one.evaluating for one in graphs)
