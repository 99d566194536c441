"""``gpumem replay FILE...``: whether our allocator decides as the recorded one did, and what other settings would have done."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from gpumem_magic.commands.common import FAILED, UNREADABLE, guarded
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import human
from gpumem_magic.views.lines import table

if TYPE_CHECKING:
    from gpumem_magic.allocator.replayable import Replayable


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints what came out, a line for each device of each file."""
    conf = options.conf
    if conf is not None:
        from gpumem_magic.allocator.settings import parse

        try:
            parse(conf)
        except ValueError as error:
            raise ValueError(f"--conf: {error}") from None
    results = [result for path in options.files for result in _of_file(path, conf)]
    print(
        json.dumps({"agrees": _agree(results, conf), "devices": results}, indent=2) if options.json else _text(results)
    )
    if any("why_not" in result for result in results):
        return UNREADABLE
    return 0 if _agree(results, conf) is not False else FAILED


def _agree(results: list[dict[str, Any]], conf: str | None) -> bool | None:
    """Whether everything was decided as recorded; None where that was not asked."""
    return None if conf is not None else all(result.get("agrees", False) for result in results)


def _of_file(path: str, conf: str | None) -> list[dict[str, Any]]:
    """A result for each device. A file or device without one has `why_not` instead of figures."""
    from gpumem_magic.allocator.replayable import replayables
    from gpumem_magic.snapshot.files import read
    from gpumem_magic.snapshot.unpickle import one_line

    try:
        found = replayables(read(path))
    except (OSError, ValueError) as error:
        # The line begins with the file's name.
        words = " ".join(str(error).split()).removeprefix(f"{one_line(path)}: ")
        return [{"file": path, "device": None, "why_not": words}]
    results = []
    for one in found:
        result: dict[str, Any] = {"file": path, "device": one.device, "notes": list(one.notes)}
        if one.seed.reason is not None:
            result["why_not"] = one.seed.reason
        else:
            try:
                result.update(_compared(one) if conf is None else _with_settings(one, conf))
            except ValueError as error:
                result["why_not"] = f"its events and segments do not fit together: {' '.join(str(error).split())}"
        results.append(result)
    return results or [{"file": path, "device": None, "why_not": "it holds no segments and no events"}]


def _compared(one: Replayable) -> dict[str, Any]:
    from gpumem_magic.allocator.replay import figures, replay

    result = replay(one.seed.start, one.events, one.settings, one.device, one.final)
    return {
        "events": len(one.events),
        "allocations": result.allocations,
        "placed": result.placed,
        "decisions": result.decisions,
        "decided": result.decisions - len(result.misjudged),
        "unmatched": result.unmatched,
        "agrees": result.agrees,
        "first_difference": min([*result.misplaced, *result.misjudged], default=None),
        "pools": [vars(pool) for pool in figures(result, one.events, one.settings)],
    }


def _with_settings(one: Replayable, conf: str) -> dict[str, Any]:
    from gpumem_magic.allocator.program import Program
    from gpumem_magic.allocator.settings import parse_with_notes
    from gpumem_magic.allocator.verdict import capacity_of
    from gpumem_magic.allocator.what_if import what_if
    from gpumem_magic.snapshot.timeline import Timeline

    settings, notes = parse_with_notes(conf)
    timeline = Timeline(one.seed.start, one.events, one.settings)
    capacity = capacity_of(one.events, timeline, one.settings)
    program = Program(one.seed.start, one.events, one.final)
    was = what_if(program, one.settings, capacity, device=one.device)
    would = what_if(program, settings, capacity, device=one.device)
    if one.seed.start and settings.expandable_segments != one.settings.expandable_segments:
        notes.append(
            "Memory from before the recording keeps its layout: these settings apply only to what was allocated since."
        )
    return {
        "conf": conf,
        "available": capacity.available,
        "recorded_peak_reserved": timeline.peak_reserved(0, len(timeline))[0],
        "was": was.to_dict(),
        "would_be": would.to_dict(),
        "notes": [*one.notes, *notes],
    }


def _text(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        name = printable(result["file"])
        device = "" if result["device"] is None else f", device {result['device']}"
        if "why_not" in result:
            lines.append(f"{name}{device}: not replayed: {result['why_not']}")
        elif "conf" not in result:
            verdict = "all agree" if result["agrees"] else f"first difference at event {result['first_difference']}"
            lines.append(
                f"{name}{device}: {result['placed']:,} of {result['allocations']:,} allocations placed, "
                f"{result['decided']:,} of {result['decisions']:,} segment decisions: {verdict}"
            )
        else:
            lines.append(_comparison(f"{name}{device}", result))
        lines += [f"  {note}" for note in result.get("notes", ())]
    return "\n".join(lines)


def _comparison(name: str, result: dict[str, Any]) -> str:
    was, would = result["was"], result["would_be"]
    rows = [["", "as recorded", result["conf"]]]
    for key, words in (
        ("peak_allocated", "highest allocated"),
        ("peak_reserved", "highest reserved"),
        ("cached", "cached but free then"),
    ):
        rows.append([words, human(was[key]), human(would[key])])
    rows.append(["fragmentation then", *(f"{one['fragmentation']:.1%}" for one in (was, would))])
    rows.append(["cache flushes to make room", *(f"{one['retries']:,}" for one in (was, would))])
    return f"{name}\n{table(rows)}\n{_answer(was, would, result['available'])}"


def _answer(was: dict[str, Any], would: dict[str, Any], available: int | None) -> str:
    saved = was["peak_reserved"] - would["peak_reserved"]
    answer = "It reserves as much."
    if saved:
        answer = f"It reserves {human(abs(saved))} {'less' if saved > 0 else 'more'}."
    failures = was["recorded_failures"]
    if available is None:
        return f"{answer} No request failed in the recording, so the capacity is unknown."
    if would["failed"]:
        first = would["failed"][0]["event"]
        return f"{answer} An allocation that the recording served would have failed, first at event {first:,}."
    errors = "out-of-memory error" if failures == 1 else f"{failures:,} out-of-memory errors"
    if would["passed"] == failures:
        return f"{answer} The recorded {errors} would not have happened."
    if would["passed"]:
        return f"{answer} Of the recorded {errors}, {would['passed']:,} would not have happened."
    return f"{answer} The recorded {errors} would still have happened."
