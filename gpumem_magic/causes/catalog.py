"""All detectors, in the order in which a report gives their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpumem_magic.allocator.verdict import LIMIT
from gpumem_magic.causes import (
    again,
    at_once,
    batches,
    carried,
    copies,
    coroutines,
    device_memory,
    errors,
    graph_of_gradients,
    graphs,
    growth,
    holding,
    idle,
    in_place,
    jacobians,
    joins,
    kept,
    largest_ids,
    left_models,
    loops,
    made_whole,
    operators,
    own_functions,
    padding,
    precision,
    recomputable,
    reduced,
    selected,
    sets_of_weights,
    settings,
    several_devices,
    shapes,
    shortage,
    spikes,
    squares,
    stale_states,
    threads,
    ties,
    too_large,
    training,
    unread,
    untrained,
    unused,
    unused_graphs,
    waiting,
    wide_layers,
    written_out,
)
from gpumem_magic.causes.model import Detector, Scene, answers_of
from gpumem_magic.report.model import Cause, ReportError

DETECTORS: tuple[Detector, ...] = (
    errors.caught_shortage,
    loops.retry_while_handling,
    kept.data_on_device,
    kept.copied_weights,
    kept.data_ready,
    kept.data_ahead,
    coroutines.waiting_with_data,
    device_memory.limited,
    device_memory.fragmentation,
    device_memory.varying_sizes,
    device_memory.private_pools,
    device_memory.other_streams,
    shortage.memory_ran_out,
    shortage.left_from_before,
    too_large.weights_too_large,
    device_memory.another_process,
    graphs.graphs_alive,
    own_functions.kept_on_ctx,
    left_models.models_of_graphs,
    graphs.gradients_with_graphs,
    loops.summed_losses,
    waiting.unused_graphs,
    waiting.waiting_graphs,
    waiting.forwards_ahead,
    loops.kept_by_retain_graph,
    loops.held_over,
    loops.steady,
    growth.growth,
    loops.grown_in_call,
    loops.given_back_by_the_error,
    kept.key_value_cache,
    kept.asked_for,
    kept.pinned_by_view,
    kept.kept_by_hook,
    threads.kept_by_threads,
    errors.kept_errors,
    several_devices.gathered,
    several_devices.room_elsewhere,
    several_devices.gradients_in_buckets,
    graph_of_gradients.graph_of_gradients,
    unused_graphs.missing_no_grad,
    unused_graphs.passed_over,
    unused_graphs.target_graphs,
    untrained.untrained_gradients,
    untrained.wasted_gradients,
    untrained.frozen_too_late,
    untrained.kept_by_optimizer,
    stale_states.stale_states,
    untrained.trained_beside_adapters,
    ties.broken_ties,
    copies.built_again,
    copies.built_beside,
    copies.left_over,
    copies.second_copy,
    copies.held_checkpoint,
    copies.loaded_to_device,
    copies.loaded_beside,
    holding.freed_nothing,
    holding.pinned,
    shortage.earlier_error,
    holding.reference_cycle,
    holding.collected_late,
    training.late_zero_grad,
    training.missing_zero_grad,
    training.zeroed_gradients,
    idle.idle_states,
    idle.gradients_in_evaluation,
    idle.input_gradients,
    idle.retained_gradients,
    idle.alike_buffers,
    idle.long_tables,
    unused.unused_models,
    unused.left_results,
    unused.unused_of_several,
    unused.finished_models,
    unused.models_in_a_list,
    again.models_of_threads,
    again.stacked_weights,
    again.widened_weights,
    again.recomputed_weights,
    again.computed_weights,
    again.pruned_weights,
    unread.unread_results,
    training.optimizer_history,
    training.optimizer_states,
    training.optimizer_temporaries,
    settings.idle_checkpointing,
    settings.checkpointed_whole,
    settings.without_checkpointing,
    settings.checkpointed_for_nothing,
    settings.wide_inference,
    settings.autocast_copies,
    largest_ids.sized_by_the_largest,
    settings.dense_lookup_gradient,
    settings.convolution_scratch,
    spikes.largest_batch,
    padding.padded_batch,
    batches.whole_batch,
    batches.large_images,
    at_once.all_at_once,
    reduced.joined_to_be_reduced,
    reduced.products_summed,
    reduced.rows_averaged,
    precision.outside_of_autocast,
    sets_of_weights.sets_of_weights,
    recomputable.kept_steps,
    recomputable.repeated_modules,
    jacobians.rows_at_once,
    jacobians.jacobian_of_a_batch,
    in_place.in_place,
    in_place.second_of_its_size,
    in_place.rebuilt_beside,
    written_out.written_out,
    operators.grown_results,
    carried.carried_on,
    operators.matrices_of_rows,
    operators.wide_copies,
    operators.promoted,
    operators.narrowed,
    operators.wide_losses,
    joins.joined_in_a_loop,
    joins.joined_gradients,
    joins.joined_weights,
    joins.filled_in_parts,
    made_whole.made_whole,
    squares.mostly_zeros,
    shapes.attention_scores,
    shapes.dominating_layer,
    shapes.wide_numbers,
    shapes.wide_indices,
    wide_layers.one_weight,
    selected.copied_rows,
    holding.only_cached,
)
# Told where nothing is to be mended.
_SOUND = "steady"
_FREE = "`%gpumem_free"
_WASTED = "wasted_gradients"
_OF_THE_ATTEMPT = "pinned_by_traceback"
# What these say of the memory is so in sound programs, too.
DESCRIBING = frozenset(
    {
        "dominating_layer",
        "attention_scores",
        "only_cached",
        "wide_inference",
        "convolution_scratch",
        "whole_batch",
        "key_value_cache",
        "held_over",
        "autocast_copies",
        "optimizer_history",
        "left_over_copy",
        "double_precision",
        "gradients_in_evaluation",
        "alike_buffers",
        "waiting_graphs",
        "largest_batch",
        "data_ready",
        "padding",
        "unread_results",
        "unused_models",
        "left_results",
        "retained_gradients",
        "asked_for",
        "jacobian_rows",
        "in_place",
        "copied_rows",
        "one_weight",
        "jacobian_of_a_batch",
        "matrices_of_rows",
        "all_at_once",
        "sets_of_weights",
        "kept_steps",
        "repeated_modules",
        "joined_to_be_reduced",
        "outside_of_autocast",
        "joined_weights",
        "carried_on",
        "products_summed",
        "rows_averaged",
        "diagonal_matrix",
        "overlapping_windows",
        _SOUND,
        shortage.NAME,
    }
)
_ALLOCATORS = "fragmentation"
# What a sound training needs is told behind what nobody needs, however much that is.
_NEEDED = frozenset({"optimizer_states", "optimizer_temporaries", "whole_batch"})
_NOT_NEEDED = "left_from_before"
# It says why a second try failed, too.
_FIRST = "retry_in_except"
# A smaller batch is always another way: told where nothing is to be mended, and after all else.
_LAST = "whole_batch"
# Small at this peak, and more with every iteration.
_GROWING = frozenset({"growth", "kept_graphs"})
# A cause that another one explains better is not told twice.
_COVERED = {
    "model_built_again": ("optimizer_of_the_former",),
    "optimizer_states": ("stale_states", "optimizer_history", "optimizer_of_the_former"),
    "growth": (
        "models_of_graphs",
        "stale_states",
        "pruned_weights",
        "kept_errors",
        "gradients_with_graphs",
        "input_gradients",
    ),
    "retained_graph": ("kept_graphs", "gradients_with_graphs"),
    # (Which keeps what the cache held before it grew.)
    "key_value_cache": ("missing_no_grad", "rebuilt_beside"),
    "dominating_layer": ("attention_scores", "repeated_modules", "joined_weights", "outside_of_autocast"),
    "wide_inference": ("models_of_threads",),
    # (Of data that stays there is as much whatever a batch has.)
    "whole_batch": ("copied_rows", "second_of_its_size", "recomputed_weights", "rebuilt_beside", "mostly_zeros"),
    # (Whose parts PyTorch's own function joins.)
    "joined": ("jacobian_of_a_batch",),
    "map_location_missing": ("held_checkpoint",),
    "loaded_beside": ("held_checkpoint", "map_location_missing"),
    "all_pairs": ("attention_scores", "diagonal_matrix"),
    "grown_result": ("matrices_of_rows",),
    "float32_copy": ("outside_of_autocast",),
    # (A mask of their shape is not what they are made of.)
    "carried_on": ("attention_scores", "mostly_zeros", "kept_steps"),
    "dense_lookup_gradient": ("sized_by_the_largest",),
    # (What a loop carries on may be for a backward still to come.)
    "graph_of_gradients": ("kept_graphs", "growth"),
    # (They say what it is that is made at once; and of all that a batch takes, which part could be computed again.)
    "all_at_once": (
        "whole_batch",
        "all_pairs",
        "grown_result",
        "sorted",
        "expanded_copy",
        "joined_to_be_reduced",
        "one_hot",
        "sets_of_weights",
        "compared_with_each",
        "summed_as_integers",
        "unit_matrix",
        "many_windows",
        "both_halves",
        "block_diagonal",
        "zeros_for_where",
        "written_out",
        "copied_rows",
        # (Whose parts come one after the other as it is.)
        "joined",
        "mostly_zeros",
        "carried_on",
        "products_summed",
        "rows_averaged",
        "diagonal_matrix",
    ),
    "repeated_modules": ("attention_scores", "kept_steps", "outside_of_autocast"),
    # (Of what no backward goes through there is less to be computed in parts.)
    "wide_loss": ("float32_copy", "unused_graphs"),
    "data_ahead": ("growth", "kept_graphs"),
    "data_ready": ("growth", "kept_graphs", "joined_in_a_loop", "overlapping_windows"),
    "large_images": ("whole_batch", "graphs_ahead"),
    # (In a list in which models pile up each of them has room.)
    "weights_too_large": ("growth", "models_in_a_list", "built_beside"),
    "built_beside": ("left_over_copy",),
    "second_copy": ("growth", "left_over_copy", "model_built_again", "held_checkpoint"),
    "left_over_copy": ("growth",),
    "pinned_by_view": ("growth",),
    # (What a cycle keeps of a graph is no graph that somebody made in vain, whenever Python has collected the rest.)
    "unused_graphs": (
        "reference_cycle",
        "kept_on_ctx",
        "growth",
        "kept_graphs",
        "missing_no_grad",
        "retained_graph",
        "gradients_with_graphs",
    ),
    "waiting_graphs": ("summed_losses", "kept_graphs", "growth", "unused_graphs"),
    "forwards_ahead": ("kept_graphs", "growth", "unused_graphs", "waiting_graphs"),
    "varying_sizes": ("joined_in_a_loop", "growth", "kept_graphs"),
    "kept_by_hook": ("growth", "kept_graphs"),
    "kept_errors": ("retry_in_except",),
    "held_over": ("missing_no_grad", "kept_graphs", "growth", "joined_in_a_loop"),
    "collected_late": ("reference_cycle",),
    "target_graphs": ("untrained_gradients", "kept_graphs"),
    # (They are there in training, too.)
    "gradients_in_evaluation": ("late_zero_grad",),
    "pinned_by_traceback": ("retry_in_except",),
    "pinned_by_out": (shortage.NAME,),
    "reference_cycle": (shortage.NAME,),
}
# The same where that one explains so much of it, in per cent.
_NEARLY = 80
_COVERED_IF_AS_LARGE = {
    # Who detaches what goes into a list keeps the list's own tensors.
    "growth": ("missing_no_grad", "kept_graphs", "sets_of_weights"),
    "kept_graphs": ("missing_no_grad",),
    # Many are there because they are kept, one from each iteration.
    "all_pairs": ("growth",),
    "products_summed": ("all_pairs", "growth", "grown_result"),
    "expanded_copy": ("growth",),
    # (They are steps of it.)
    "float32_copy": ("written_out",),
    "grown_result": ("written_out", "copied_rows"),
    "dominating_layer": ("grown_result", "waiting_graphs", "carried_on"),
    # (They tell what it is that is as large.)
    "carried_on": (
        "all_pairs",
        "products_summed",
        "grown_result",
        "expanded_copy",
        "broadcast",
        "one_hot",
        "wide_loss",
        "copied_rows",
        "written_out",
        "waiting_graphs",
        "missing_no_grad",
    ),
    # (Nobody keeps them but for that.)
    "attention_scores": ("asked_for",),
    # (Of a loss over all pairs.)
    "wide_loss": ("all_pairs",),
    # There is something better to do about them than fewer at once.
    "graphs_ahead": ("attention_scores",),
}


def find_causes(scene: Scene) -> tuple[list[Cause], list[str]]:
    """What the detectors found; and, for each that failed, a line about it. A detector's failure is not the others'."""
    found, failures = answers_of(DETECTORS, scene)
    failed = scene.report.error is not None
    found = [replace(one, describes=one.describes or _describes(one.name, failed)) for one in found]
    # (However little the gradients are.)
    found = _with_what_is_shared(found)
    found = [one for one in found if one.describes or one.name in _GROWING or scene.is_large(one.bytes)]
    names = {one.name for one in found}
    if _NOT_NEEDED in names:
        found = [replace(one, describes=True) if one.name in _NEEDED else one for one in found]
    found = [one for one in found if not names.intersection(_COVERED.get(one.name, ()))]
    found = [one for one in found if not _is_the_same(one, found) and not _is_told_with(one, found)]
    if scene.report.error is None and any(not one.describes for one in found):
        found = [one for one in found if one.name not in (_LAST, _SOUND)]
    return sorted(found, key=lambda one: _rank(one, _explained(found), scene.report.error)), failures


def _with_what_is_shared(found: list[Cause]) -> list[Cause]:
    """Of a graph that is retained, what the next loss shares, where the backward that goes into that in vain is known: as one."""
    shared = next((one for one in found if one.remedy == loops.SHARED), None)
    wasted = next((one for one in found if one.name == _WASTED), None)
    if shared is None or wasted is None:
        return found
    return [replace(one, remedy=wasted.sentence) if one is shared else one for one in found if one is not wasted]


def _is_the_same(cause: Cause, found: Iterable[Cause]) -> bool:
    better = _COVERED_IF_AS_LARGE.get(cause.name, ())
    return any(one.name in better and 100 * one.bytes >= _NEARLY * cause.bytes for one in found)


def _is_told_with(cause: Cause, found: Iterable[Cause]) -> bool:
    """Whether another one's remedy begins with this one's, or an earlier one frees the same."""
    if not cause.remedy:
        return False
    if cause.remedy.startswith(_FREE):
        found = list(found)
        return any(one.remedy == cause.remedy for one in found[: found.index(cause)]) or _is_longer(cause, found)
    return _is_longer(cause, found)


def _is_longer(cause: Cause, found: Iterable[Cause]) -> bool:
    return any(one is not cause and one.remedy.startswith(f"{cause.remedy} ") for one in found)


def _describes(name: str, failed: bool) -> bool:
    # What this cell's own error pins is there because it failed, and not the other way round.
    return name in DESCRIBING or (failed and name == _OF_THE_ATTEMPT)


def _explained(found: Iterable[Cause]) -> int:
    """Bytes that could be had back, without the allocator's help."""
    return max((one.bytes for one in found if not one.describes and one.name != _ALLOCATORS), default=0)


def _rank(cause: Cause, explained: int, error: ReportError | None) -> tuple[int, int]:
    """What explains the most comes first, and what only describes after what can be changed. Where a request failed, the
    allocator's settings come before all, unless what somebody holds would have been enough."""
    if cause.name == _FIRST:
        return -2, 0
    if cause.name == LIMIT and error is not None:
        return -1, 0
    if cause.name == _ALLOCATORS and not cause.describes and error is not None and explained < (error.wanted or 0):
        return -1, 0
    # (What an error keeps of the attempt that failed is no reason for it.)
    last = cause.name == (_LAST if error is None else _OF_THE_ATTEMPT if error.wanted else "")
    return 2 * int(cause.describes) - int(cause.name == shortage.NAME) + int(last), -cause.bytes
