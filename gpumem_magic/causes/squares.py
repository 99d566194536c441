"""Square matrices of zeros into which a program writes a few numbers: a graph's neighbours, say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.alike import Alike, births_alive, made_by, size_words
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.written import Written, name_given
from gpumem_magic.devices.base import Birth
from gpumem_magic.report.model import OF_A_MODEL, Cause
from gpumem_magic.units import shape_words

# What makes one of a single number.
_BLANK = frozenset({"zeros", "new_zeros", "zeros_like", "eye"})
# Of fewer rows nobody makes a sparse one; and all of the shape are one part in so many of the peak.
_ROWS, _SHARE = 1024, 3
_SIDES = 2


def mostly_zeros(scene: Scene) -> Iterator[Cause]:
    """``adj = torch.zeros(n, n)``, ``adj[i, j] = 1``: a number for each pair, of which an assignment by indices sets some."""
    shapes: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for _, size, birth in births_alive(scene):
        if birth.shape is not None and _is_square(birth.shape):
            shapes[birth.shape].append((size, birth.dtype))
    for shape, its in sorted(shapes.items(), key=lambda each: -sum(size for size, _ in each[1])):
        size = sum(each for each, _ in its)
        if size < max(WORTH, scene.part_of_peak(_SHARE)):
            return
        for event, birth in _blank(scene, shape):
            alike = Alike(shape, len(its), size, birth, event, tuple(dtype for _, dtype in its))
            if (written := _written_into(scene, birth)) is not None:
                yield Cause(
                    "mostly_zeros",
                    f"{made_by(scene, alike)} has a number for each pair, {shape_words(shape)}, and `{written.shown}` "
                    f"({written.words}) sets some of them: {size_words(alike)}.",
                    "Where these are few, `torch.sparse_coo_tensor(indices, values, size)` holds them alone, and "
                    "`torch.sparse.mm` multiplies with it.",
                    size,
                )
                return


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == _SIDES and shape[0] == shape[1] >= _ROWS


def _blank(scene: Scene, shape: tuple[int, ...]) -> Iterator[tuple[int, Birth]]:
    """What made zeros of the shape that are no model's."""
    labels = {one.born: scene.labels[one.index].category for one in scene.timeline.allocations}
    for event, birth in scene.births:
        blank = birth.shape == shape and not birth.node and {birth.kernel, birth.operator} & _BLANK
        if blank and event <= scene.moment and labels.get(event) not in OF_A_MODEL:
            yield event, birth


def _written_into(scene: Scene, birth: Birth) -> Written | None:
    """The assignment by indices to the name that the matrix was given."""
    text, made = (birth.place.text.strip(), birth.place.expression) if birth.place is not None else ("", "")
    name = name_given(text)
    # (Of several in a dictionary each is whole.)
    if not name or not made or not text.startswith(f"{name} = {made}"):
        return None
    index = r"[^\[\]:]*(?:\[[^\[\]]*\][^\[\]:]*)*"
    assigned = rf"^{re.escape(name)}\[{index}\]\s*\+?=(?!=)"
    called = rf"^{re.escape(name)}\.(?:index_put_|scatter_|scatter_add_|put_)\("
    return scene.program.stating(re.compile(f"{assigned}|{called}"))
