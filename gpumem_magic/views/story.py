"""What a report says in words, in the order in which a reader wants it: the answer, what else to know, and what is folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.report.failure import failed_row
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, LABELS, ReportData, TensorGroup
from gpumem_magic.units import counted, listed, mib, shape_words
from gpumem_magic.views import explain, what_failed

MOST_CAUSES = 3
_MOST_NOTES = 3
# So many groups of tensors are shown, and more where what is left would be larger than the last of them.
_MOST_GROUPS, _MOST_SHOWN = 5, 8
# So many words are read at a glance; what follows a part of a sentence begins one of its own.
_LEAD = 25
_TO_THE_BRACKET = r"(?:[^()]|\([^()]*\))*\)"
_BRACKETS = re.compile(rf"\({_TO_THE_BRACKET}")
_PARTS = re.compile(rf"[;:] (?=[0-9x])| (?=\(largest{_TO_THE_BRACKET}$)")
# A sentence that says where it failed; the next says why.
_FAILED = re.compile(r"(Out of memory|\w+(Error|Exception|Interrupt)\b)[^.:]*$")
# Of the others so many categories are named.
_MOST_NAMED = 2
# A group of tensors with less than one part in so many of what is allocated joins the rest.
_SMALL = 50
_KEPT = {
    "backward": "backward",
    "temporary": "nothing (temporary)",
    "list": "a list",
    "name": "a variable",
    "unknown": "",
}


@dataclass(frozen=True)
class Story:
    """answer: one or two sentences. obstacle: what stood in a failed request's way. others: causes and notes that are shown.
    folded: those that are left to who asks for more."""

    answer: str
    obstacle: str
    others: tuple[str, ...]
    folded: tuple[str, ...]


def story_of(report: ReportData) -> Story:
    """At most three causes are shown, the answer's included, and the notes that come first."""
    answer = explain.answer(report)
    causes = [one.sentence for one in report.causes]
    left = [sentence for sentence in causes if sentence not in answer]
    room = MOST_CAUSES - (len(causes) - len(left))
    notes = [" ".join(one.split()) for one in report.remarks if isinstance(one, str)]
    notes = [note for note in notes if note not in answer]
    most = _MOST_NOTES if explain.used_device(report) else len(notes)
    obstacle = [
        sentence for sentence in what_failed.obstacle(report, told=bool(report.answer)) if sentence not in answer
    ]
    told = [*left[:room], *explain.caveats(report), *notes[:most]]
    return Story(answer, " ".join(obstacle), tuple(told), (*left[room:], *explain.particulars(report), *notes[most:]))


def lead_of(answer: str) -> tuple[str, str]:
    """The first sentence, which stands out, and the rest. A long one ends where one of its parts does; "Out of memory at line 7."
    has the next with it, which says why."""
    bare = re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), answer)
    # (What is in brackets belongs to what they follow.)
    bare = _BRACKETS.sub(lambda inside: re.sub("[;:.]", "x", inside[0]), bare)
    sentences = [*(one.start() for one in re.finditer(r"\. ", bare)), len(bare.rstrip("."))]
    only_where = len(sentences) > 1 and _FAILED.match(bare[: sentences[0]])
    end = sentences[1] if only_where else sentences[0]
    ends = [*(each for each in sentences if each <= end), *(part.start() for part in _PARTS.finditer(bare[:end]))]
    most = _LEAD + (len(bare[: sentences[0]].split()) if only_where else 0)
    short = [each for each in ends if len(bare[:each].split()) <= most]
    end = max(short, default=min(ends))
    rest = answer[end:].lstrip(".;: ")
    inside = _BRACKETS.match(bare[end:].lstrip(".;: "))
    if inside:
        # A sentence of its own, it needs no brackets.
        rest = f"{rest[1].upper()}{rest[2 : inside.end() - 1]}{rest[inside.end() :]}"
    return f"{answer[:end].rstrip('.')}.", rest


def tensor_heading(report: ReportData) -> str:
    """Over the table of tensors."""
    return "At the failure" if _at_failure(report) else "At the peak"


def tensor_table(report: ReportData) -> list[list[str]]:
    """The largest groups of the peak, or of the failure, as `tensor_rows`."""
    at_failure = _at_failure(report)
    state = (failed_row(report) if at_failure else None) or report.peak
    return tensor_rows(at_failure or report.peak.tensors, state.categories)


def tensor_rows(groups: Sequence[TensorGroup], categories: Mapping[str, int | None]) -> list[list[str]]:
    """MiB, the tensors, what made them, and what keeps them: the largest groups of a moment.

    The rows add up to what is allocated then. Empty where nothing is known of them. categories: all that is allocated then.
    """
    total = sum(group.bytes for group in groups)
    large = [group for group in groups if group.category and group.bytes * _SMALL >= total]
    shown = large[:_MOST_GROUPS]
    if not shown:
        return []
    while len(shown) < min(_MOST_SHOWN, len(large)) and total - sum(one.bytes for one in shown) > shown[-1].bytes:
        shown.append(large[len(shown)])
    # One line that made all says nothing where a place inside it is known.
    only = len({group.line for group in shown if group.line}) == 1 and len(shown) > 1
    rows = [[_size(group.bytes), _tensors(group), _made(group, only), _kept(group)] for group in shown]
    rest = total - sum(group.bytes for group in shown)
    count = sum(group.count for group in groups) - sum(group.count for group in shown)
    # What is left may be rounding alone, and next to nothing.
    if count or rest >= 1 << 20:
        words = f"{counted(count, 'other')}{_of_which(shown, categories)}" if count else LABELS["rounding"]
        rows.append([_size(rest), words, "", ""])
    return rows


def _of_which(shown: Sequence[TensorGroup], categories: Mapping[str, int | None]) -> str:
    """What the others chiefly are: ``: activations 160, workspace 16``, in MiB."""
    left = Counter({name: categories.get(name) or 0 for name in ALLOCATED_CATEGORIES})
    for group in shown:
        left[group.category] -= group.bytes
    words = [f"{LABELS[name]} {mib(size)}" for name, size in left.most_common(_MOST_NAMED) if size >= 1 << 20]
    return f": {', '.join(words)}" if words else ""


TENSOR_HEADS = ("MiB", "tensors", "made by", "kept by")


def _at_failure(report: ReportData) -> tuple[TensorGroup, ...]:
    return report.error.tensors if report.error is not None else ()


def _size(size: int) -> str:
    return mib(size) if size >= 1 << 20 else "<1"


def _tensors(group: TensorGroup) -> str:
    what = LABELS[group.category]
    if group.shape is None:
        return f"{group.count:,} × {what}" if group.count > 1 else what
    times = f"{group.count:,} × " if group.count > 1 else ""
    return f"{times}{shape_words(group.shape)} {group.dtype}".strip() + f": {what}"


def _made(group: TensorGroup, only: bool) -> str:
    """only: whether it is of the same line as all others."""
    words = [group.operator] if group.operator else []
    if group.line and not (only and group.inner):
        words.append(f"line {group.line}")
    elif group.statement and not group.line:
        words.append(group.statement)
    if group.inner:
        # The function's name is in `report.tensors()`.
        words.append(group.inner.partition(" ")[0] if not group.inner.startswith("In [") else group.inner)
    return ", ".join(words)


def _kept(group: TensorGroup) -> str:
    return group.kept_by or _KEPT[group.keeper]


def more(folded: Sequence[str], hidden: int, page: str = "", name: str = "report") -> str:
    """The line that says where the rest is, where there is any. hidden: rows that are not shown; page: what has them, where the
    reader is in no Python (```--html PATH` writes a page with``); name: the report's variable, or what
    `gpumem_magic.` gives it, "" where it has none yet."""
    said = counted(len(folded), "remark") if folded else ""
    rows = f"{counted(hidden, 'row')} more" if hidden else ""
    if page:
        return f"More: {page} {listed([one for one in (rows, said) if one])}." if rows or said else ""
    bound = "after `import gpumem_magic`, " if name.startswith("gpumem_magic.") else ""
    bound = bound if name else "after `import gpumem_magic; report = gpumem_magic.last_report()`, "
    name = name or "report"
    said = f"`print({name}.explain())` has {said}, categories and how the bytes are known" if said else ""
    rows = f'`print({name}.show("all"))` has {rows}' if rows else ""
    return f"More: {bound}{'; '.join(one for one in (rows, said) if one)}." if rows or said else ""
