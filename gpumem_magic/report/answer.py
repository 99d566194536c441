"""The answer: a report in a sentence or two. What fills the memory, why, what to do about it; then where the peak or failure was.

Where a cause explains it, the answer is that cause's own sentence, so that the two cannot differ. Else it says what the tensors
are, which line made them and what keeps them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION
from gpumem_magic.recording.model import OPTIMIZER, StandIn
from gpumem_magic.report.failure import error_in_words, failed_request, failed_row, is_of_memory, named_error
from gpumem_magic.report.filling import MOST, in_words
from gpumem_magic.report.model import LABELS, OUTSIDE_CATEGORIES, Cause, Peak, ReportData, Row
from gpumem_magic.report.tensors import all_groups
from gpumem_magic.units import MIB, amount, counted, listed, shape_words, spans

# So many groups are told where a sentence says what to do, which is not to be buried.
_MOST_BEFORE_ADVICE = 2
_OF_A_STEP = frozenset({"gradients"})
# What only describes is told if it is one part in so many of the peak.
_WORTH = 8
# What says what to do about one part in so many is the answer, and comes before the tensors.
_MAIN = 2
# Its text says what the groups say.
_LISTS_HOLDERS = "memory_ran_out"
# These are there whatever fills the memory: the list, and that a smaller batch, or smaller images, take less.
_OF_ANYTHING = frozenset({_LISTS_HOLDERS, "whole_batch", "large_images", "repeated_modules", FRAGMENTATION})
_TELLS_TEMPORARIES = "optimizer_temporaries"
# It says that nothing is wrong.
_SOUND = "steady"
# What nothing needs: where this is one part in so many, it is the answer of a program that is otherwise sound.
_WASTE = frozenset(
    {
        "unused_models",
        "double_precision",
        "built_beside",
        "held_over",
        "left_over_copy",
        "alike_buffers",
        "retained_gradients",
        "sets_of_weights",
        "joined_weights",
        "outside_of_autocast",
        "kept_steps",
    }
)
_MUCH = 4
# What a cause is told before.
_WORDS, _ALL = "words", "all"
# What these say comes first, whatever fills the memory.
_BEFORE_ALL = (_SOUND, "caught_shortage")
# What these say of each iteration is so however many there are.
_OF_EACH = frozenset({"growth", "kept_graphs"})
_REAL = "`%gpumem_device NAME,values=real` computes values"
# What a value that nobody knows may have done, the graver first.
_DOUBTS = {
    "except": "the error that the program caught may not come",
    "try": "an error may come that the program catches",
    "end": "the program may not end where it did",
    "loop": "a loop may end earlier or later",
    "size": "a size may be different",
    "branch": "an `if` may go the other way",
    "gradients": "gradients may be kept for something else",
    "choice": "another object may be chosen",
    "selection": "a selection may have another size",
    "operator": "an operator may take other memory for its work",
    "check": "a check may find numbers that are not finite",
    "step": "`GradScaler` may skip a step of the optimizer, whose state then comes later",
    "text": "the program may print something else",
}
_ALL_SELECTED = "a selection may be far smaller than the most that was taken here, on which this answer rests"
# The program's way is the same, as far as these tell.
_MILD = frozenset({"selection", "check", "step", "text", "operator"})
# Where a program failed for another reason, less than this is no matter: PyTorch's allocator takes as much at a time from the
# device (kLargeBuffer, c10/cuda/CUDACachingAllocator.cpp).
_TAKEN_AT_ONCE = 20 * MIB
# What an error keeps was in use when it came, and is no reason for it.
_KEPT_AFTERWARDS = "pinned_by_traceback"


def answer_of(report: ReportData) -> str:
    """From the report's own figures and causes, with a word about what unknown values may have done to it: before them where they
    may be others, behind them where only selections may be smaller, or a loop longer of whose iterations the answer is."""
    doubt, grave = _doubt(report)
    said = (doubt, _plain(report)) if grave else (_plain(report), doubt)
    return " ".join(filter(None, said))


def _doubt(report: ReportData) -> tuple[str, bool]:
    """Where the program failed, or ended a loop, after it had read values that a virtual GPU does not know; whether its way
    may be another, and not only what was selected."""
    read = [one for one in report.stand_ins if one.supplied < one.count]
    error = report.error
    failing = [one for one in read if one.fails]
    if error is not None and error.requested is None and failing:
        latest = next((one for one in failing if one.latest), failing[-1])
        guilty = next((one for one in failing if error.line is not None and one.line == str(error.line)), latest)
        place = _read_at(guilty)
        return (
            f"This may have failed because of a value that the virtual GPU does not know, read at {place}: {_REAL}.",
            True,
        )
    deciding = [one for one in read if one.decides]
    kinds = [kind for kind in _DOUBTS if any(one.decides == kind for one in deciding)]
    if not kinds:
        return "", False
    told = [kind for kind in kinds if not (kind == "selection" and "size" in kinds)]
    place = _read_at(next(one for one in deciding if one.decides == kinds[0]))
    values = "a value"
    if len(deciding) > 1:
        values, place = "values", f"{place} and at {counted(len(deciding) - 1, 'other line')}"
    rests = _rests_on(report, {one.widest for one in deciding if one.widest})
    doubts = {**_DOUBTS, "selection": _ALL_SELECTED} if rests else _DOUBTS
    doubt = (
        f"On a real GPU {listed([doubts[kind] for kind in told])}: this depends on {values} that the virtual GPU does not know, "
        f"read at {place}; {_REAL}."
    )
    mild = _MILD | {"loop"} if _is_answered(report) else _MILD
    return doubt, rests or not mild.issuperset(kinds)


def _rests_on(report: ReportData, counts: Set[int]) -> bool:
    """Whether what failed, or most of the memory, is as large as so many, which were selected."""
    error = report.error
    if error is not None and error.asked is not None and not counts.isdisjoint(error.asked.shape):
        return True
    groups = all_groups(report, report.peak.position, report.peak.tensors) if counts else ()
    its = sum(one.bytes for one in groups if one.shape is not None and not counts.isdisjoint(one.shape))
    return 2 * its > report.peak.allocated


def _is_answered(report: ReportData) -> bool:
    """Whether the answer is so however often a loop goes round: what each iteration leaves, what most of the memory is for, or
    why a request failed that was made on the way."""
    causes = report.shown_causes
    if any(cause.name == _SOUND for cause in causes) or any(cause.name in _OF_EACH for cause in causes[:1]):
        return True
    blaming = _blaming(report)
    failed = report.error is not None and report.error.requested is not None
    return failed or (blaming is not None and _is_part(blaming, report, _MAIN))


def _blaming(report: ReportData) -> Cause | None:
    """The first cause that could be mended."""
    return next((cause for cause in report.shown_causes if not cause.describes), None)


def _read_at(one: StandIn) -> str:
    """The program's own line, which its author can look at, and where a library read, called from there."""
    inner = f" (in `{one.line}`)" if one.caller else ""
    place = one.caller or one.line
    return f"{f'line {place}' if place.isdecimal() else f'`{place}`'}{inner}"


def _plain(report: ReportData) -> str:
    """What fills the memory, why, and what to do about it; then where the peak was, or what the failed request found."""
    if not report.peak.allocated and report.error is None:
        return "Nothing was put on the device."
    shown = report.shown_causes
    blaming = _blaming(report)
    if blaming is not None and _is_part(blaming, report, _WORTH):
        # (What it leaves open is told besides.)
        less = report.error is None and not _is_part(blaming, report, _MAIN)
        peak = report.peak
        groups = all_groups(report, peak.position, peak.tensors) if less else ()
        words = in_words(groups, peak.categories, _MOST_BEFORE_ADVICE, ()) if less else ""
        return _composed(report, words, [blaming.sentence], before=_WORDS)
    # What only describes is worth a word here where it says what to do about a good part of the memory, and comes first where
    # that is most of it.
    # (What an error keeps is no reason for it, and worth knowing where memory was none.)
    out_of_memory = report.error is not None and (report.error.requested is not None or is_of_memory(report.error))
    describing = [one for one in shown if one.remedy and not (out_of_memory and one.name == _KEPT_AFTERWARDS)]
    main = next(
        (cause for cause in describing if cause.name not in _OF_ANYTHING and _is_part(cause, report, _MAIN)), None
    )
    told_of_others = (
        cause for cause in describing if cause.name not in _OF_ANYTHING and _is_part(cause, report, _WORTH)
    )
    useful = main or next(told_of_others, None)
    # (What grows is small at first.)
    if blaming is not None and (useful is None or useful.bytes <= blaming.bytes or blaming.name in _OF_EACH):
        useful = blaming
    useful = useful or next((cause for cause in describing if _is_part(cause, report, _WORTH)), None)
    groups, categories = all_groups(report, report.peak.position, report.peak.tensors), report.peak.categories
    if report.error is not None and report.error.tensors:
        state = _failed(report)
        groups, categories = all_groups(report, state.position, report.error.tensors), state.categories
    if useful is not None and useful.name == _TELLS_TEMPORARIES:
        groups = [one for one in groups if one.category != "temporaries"]
    told = [] if useful is None else [useful.remedy if useful.name == _LISTS_HOLDERS else useful.sentence]
    sound = [cause.sentence for cause in shown if cause.name in _BEFORE_ALL]
    most = _MOST_BEFORE_ADVICE if told else MOST
    words = in_words(groups, categories, most, _OF_A_STEP if _failed_in_a_step(report) else ())
    if report.error is None and not told and 2 * (report.peak.categories.get("rounding") or 0) > report.peak.allocated:
        return f"Next to nothing was put on the device{_on(report)}: {amount(report.peak.allocated)} at the peak."
    wasted = useful is not None and useful.name in _WASTE and _is_part(useful, report, _MUCH)
    before = _ALL if wasted else _WORDS if useful is not None and useful is main else ""
    return _composed(report, words, told, sound, before=before)


def _failed_in_a_step(report: ReportData) -> bool:
    """Whether memory ran out in an optimizer's step: what it steps by is there, too."""
    spans = report.recording.spans if report.recording is not None and report.error is not None else ()
    return any(one.failed and one.kind == OPTIMIZER for one in spans[-1:])


def _is_part(cause: Cause, report: ReportData, share: int) -> bool:
    """Whether it is one part in `share` of the peak, or more."""
    return share * cause.bytes >= report.peak.allocated


def _composed(
    report: ReportData,
    words: str,
    told: Sequence[str],
    sound: Sequence[str] = (),
    *,
    before: str = "",
) -> str:
    """words: what is allocated, "" where a cause tells it. sound: that nothing is to be mended. before: what is told comes before
    these, the words or all of it; "" behind them."""
    sentences: list[str] = []
    error = report.error
    if error is not None and error.requested is not None:
        if before and words:
            sentences += [f"{_failure(report)}.", *told, f"{words}."]
        else:
            sentences += [f"{_failure(report)}: {words}." if words else f"{_failure(report)}.", *told]
        return " ".join([*sentences, *sound, _request(report)])
    size, on = amount(report.peak.allocated), _on(report)
    if error is not None:
        if not report.peak.allocated:
            return named_error(error)
        sentences.append(error_in_words(error))
        if report.peak.allocated < _TAKEN_AT_ONCE and not told and not is_of_memory(error):
            return " ".join([*sentences, f"At most {size} were allocated{on}.", *_other_devices(report.devices)])
    sentences += () if before == _ALL else sound
    where = f" at {report.peak.where}{_since(report)}" if report.peak.where else ""
    if not words:
        sentences += [*told, f"Peak {size}{on}{where}."]
    else:
        is_from_before = _added_nothing(report)
        said = f"Nothing was added to the {size} from before{on}" if is_from_before else f"Of {size} at the peak{on}"
        said += f"{':' if is_from_before else ','} {words}."
        sentences += [*told, said] if before else [said, *told]
        sentences += sound if before == _ALL else ()
        # (Where the peak was is no question where nothing was added.)
        sentences += [f"Peak{where}."] if where and not is_from_before else []
    return " ".join([*sentences, *_other_devices(report.devices)])


def _added_nothing(report: ReportData) -> bool:
    """Whether as much was allocated all the time as before the cell."""
    rows = report.checkpoints
    if not rows or rows[0].kind != "before":
        return False
    return all(report.peak.allocated == row.allocated for row in rows)


def _other_devices(devices: Sequence[ReportData]) -> Iterator[str]:
    by_peak = defaultdict(list)
    for one in devices:
        by_peak[amount(one.peak.allocated)].append(one.device.index)
    for size, numbers in by_peak.items():
        yield f"On cuda:{', '.join(spans(numbers))} the peak is {size}{' each' if len(numbers) > 1 else ''}."


def _on(report: ReportData) -> str:
    """Which device it is, where there are several."""
    return f" on cuda:{report.device.index}" if report.devices or report.device.index else ""


def _since(report: ReportData) -> str:
    """Since which statement nearly all of the peak was there, where the one that reached it added next to nothing."""
    peak = report.peak.allocated
    rows = [row for row in report.checkpoints if row.kind in ("before", "statement")]
    last = next((number for number, row in enumerate(rows) if row.peak_allocated == peak), 0)
    first = last
    while first and 100 * rows[first - 1].allocated >= 99 * peak:
        first -= 1
    row = rows[first] if rows else None
    if row is None or first == last or not row.line:
        return ""
    # (What stands before a loop, or in its head, is in no iteration.)
    other = row.iteration and row.iteration != rows[last].iteration
    turn = f" in iteration {'.'.join(map(str, row.iteration))}" if other else ""
    return f" (all but {amount(peak - row.allocated)} of it since line {row.line}{turn})"


def _failure(report: ReportData) -> str:
    """That memory ran out, where, and by how much."""
    found = failed_request(report)
    missing = -(found.spare or 0) if found is not None and found.cause == CAPACITY else 0
    short = f", {amount(missing)} short" if missing > 0 else ""
    return f"Out of memory{_on(report)}{report.error.at if report.error is not None else ''}{short}"


def _request(report: ReportData) -> str:
    """What was wanted, how much was free (in how large a piece, where that is the reason), and what was allocated."""
    error, found = report.error, failed_request(report)
    assert error is not None
    asked = error.asked
    tensor = f" for a {shape_words(asked.shape)} {asked.dtype} tensor" if asked is not None else ""
    # (Without a line of the cell the place is told with the failure.)
    place = error.place if error.line is not None else ""
    words = [f"Wanted {amount(error.requested or 0)}{tensor}{place}"]
    if found is not None and found.free is not None and found.cached is not None:
        piece = max(found.free, error.largest_free or 0)
        split = found.cause in (CAPACITY, FRAGMENTATION) and found.spare is not None and found.spare >= 0
        in_pieces = f", in pieces of at most {amount(piece)}" if split else ""
        words.append(f"free {amount(found.free + found.cached)}{in_pieces}")
    state = _failed(report)
    total = f" of {amount(report.device.capacity)}" if report.device.capacity else ""
    # Free and allocated memory alone would not add up to the device's.
    outside = [(LABELS[name], state.categories.get(name) or 0) for name in OUTSIDE_CATEGORIES]
    beside = ", ".join(f"{label} {amount(size)}" for label, size in outside if size >= MIB)
    return "; ".join([*words, f"allocated {amount(state.allocated)}{total}{f' ({beside})' if beside else ''}."])


def _failed(report: ReportData) -> Row | Peak:
    return failed_row(report) or report.peak
