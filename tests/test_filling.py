"""What fills the memory, in words: by shape, by line, or by category, whichever has most of it."""

from __future__ import annotations

from gpumem_magic.report.filling import in_words
from gpumem_magic.report.model import TensorGroup
from gpumem_magic.units import MIB


def group(size: int, side: int, line: int, keeper: str = "backward", category: str = "activations") -> TensorGroup:
    """side: of a square float32 tensor, to tell shapes apart."""
    return TensorGroup(
        size * MIB, 2, category, "float32", (side, side), "mul", statement="y = f(x)", line=line, keeper=keeper
    )


def told(*groups: TensorGroup) -> str:
    return in_words(groups, {})


def test_a_line_of_many_shapes_is_told_as_a_whole_with_its_largest() -> None:
    groups = [group(size, size, 7) for size in (40, 35, 30, 25)]
    assert told(group(50, 9, 3), *groups).startswith(
        "130 MiB are eight tensors of `y = f(x)` (line 7), kept for backward "
        "(largest: 40.0 MiB, two (40, 40) float32 tensors); 50.0 MiB are two (9, 9) float32 tensors"
    )


def test_a_shape_that_is_most_of_its_line_is_told_by_itself() -> None:
    assert told(group(100, 5, 7), group(30, 6, 7)).startswith("100 MiB are two (5, 5) float32 tensors of `y = f(x)`")


def test_what_keeps_most_bytes_of_a_line_is_told_and_not_what_keeps_most_tensors() -> None:
    small = [group(1, side, 7, "temporary") for side in range(2, 12)]
    large = [group(50, side, 7) for side in (20, 21)]
    assert ", most of it kept for backward (" in told(*large, group(14, 30, 7, "temporary"))
    assert ", kept for backward (" in told(*large, *small)
    others = [group(60, side, 7, "temporary") for side in (31, 32)]
    assert "backward" not in told(*large, *others)


def test_a_category_of_many_lines_is_told_as_a_whole() -> None:
    lines = [group(20 + line, line, line) for line in range(1, 11)]
    weights = TensorGroup(50 * MIB, 4, "parameters", kept_by="net")
    assert told(weights, *lines) == (
        "255 MiB are activations: 20 tensors of 10 lines, kept for backward (largest: 30.0 MiB, two (10, 10) float32 tensors "
        "of `y = f(x)` (line 10))"
    )


def test_few_lines_are_told_one_by_one() -> None:
    assert told(group(60, 1, 1), group(50, 2, 2), group(40, 3, 3)).count("(line ") == 3


def test_what_is_needed_is_told_behind_what_is_enough() -> None:
    whole = [
        TensorGroup(size * MIB, 4, kind, kept_by="m") for size, kind in ((90, "optimizer_state"), (9, "gradients"))
    ]
    assert "gradients" not in in_words(whole, {})
    assert in_words(whole, {}, needed={"gradients"}).endswith("; 9.0 MiB are gradients of `m`")


def test_a_parameter_is_no_part_of_the_line_that_made_it() -> None:
    weights = TensorGroup(90 * MIB, 4, "parameters", "float32", (9, 9), line=7, statement="y = f(x)", kept_by="net")
    assert told(weights, group(50, 1, 7)).startswith("90.0 MiB are parameters of `net`")


def test_a_category_of_small_parts_is_named_where_nothing_else_is_told_of_it() -> None:
    """As a cache of keys and values beside the weights of a model, in a file."""
    weights = TensorGroup(820 * MIB, 9, "parameters", kept_by="m")
    caches = [TensorGroup(45 * MIB, 9, "kv_cache", kept_by=f"cache{number}") for number in range(4)]
    both = {"parameters": 820 * MIB, "kv_cache": 180 * MIB}
    assert in_words([weights, *caches], both) == "820 MiB are parameters of `m`; 180 MiB are KV cache"
    assert "KV" not in in_words([weights, *caches[:2]], {**both, "kv_cache": 90 * MIB}), "less than an eighth"
    # What one line made may be of two categories.
    made = [group(80, 8, 3), group(60, 8, 3, category="activation_gradients")]
    assert told(*made) == "140 MiB are four (8, 8) float32 tensors of `y = f(x)` (line 3), kept for backward"
