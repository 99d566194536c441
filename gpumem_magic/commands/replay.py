"""``gpumem replay FILE...``: whether our allocator decides as the recorded one did, and what other settings would have done."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
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
        from gpumem_magic.allocator.settings import parse_with_notes

        try:
            _, not_emulated = parse_with_notes(conf)
        except ValueError as error:
            raise ValueError(f"--conf: {error}") from None
        if not_emulated:
            option = not_emulated[0].partition(" ")[0]
            raise ValueError(f"--conf: {option} is not emulated, so nothing can be said about it")
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
    from gpumem_magic.allocator.other_settings import with_other_settings

    found = with_other_settings(one, conf)
    result: dict[str, Any] = {"conf": conf, "was": found.was.to_dict(), "notes": list(one.notes)}
    if found.would_be is None:
        return {**result, "cannot_tell": found.cannot_tell}
    if found.kept:
        result["notes"].append(
            f"The {human(found.kept)} from before the recording keep their layout: the settings apply to what came since."
        )
    return {
        **result,
        "available": found.available,
        "available_at_most": found.at_most,
        "would_be": found.would_be.to_dict(),
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
            placed = f"{result['placed']:,} of {result['allocations']:,} allocations placed"
            decided = f"{result['decided']:,} of {result['decisions']:,} segment decisions"
            # A recording in which no segment came or went proves nothing about them.
            lines.append(f"{name}{device}: {', '.join([placed, *[decided] * bool(result['decisions'])])}: {verdict}")
        elif "cannot_tell" in result:
            lines.append(f"{name}{device}: {result['cannot_tell']}\n{_figures([('as recorded', result['was'])])}")
        else:
            lines.append(_comparison(f"{name}{device}", result))
        lines += [f"  {note}" for note in result.get("notes", ()) if "cannot_tell" not in result]
    return "\n".join(lines)


def _comparison(name: str, result: dict[str, Any]) -> str:
    was, would = result["was"], result["would_be"]
    figures = _figures([("as recorded", was), (result["conf"], would)])
    return f"{name}: {_answer(was, would, result)}\n{figures}"


def _figures(outcomes: Sequence[tuple[str, dict[str, Any]]]) -> str:
    rows = [["", *(name for name, _ in outcomes)]]
    for key, words in (
        ("peak_allocated", "highest allocated"),
        ("peak_reserved", "highest reserved"),
        ("cached", "cached but free then"),
    ):
        rows.append([words, *(human(one[key]) for _, one in outcomes)])
    rows.append(["fragmentation then", *(f"{one['fragmentation']:.1%}" for _, one in outcomes)])
    rows.append(["requests that had cached memory given back", *(f"{one['given_back']:,}" for _, one in outcomes)])
    return table(rows)


def _answer(was: dict[str, Any], would: dict[str, Any], result: dict[str, Any]) -> str:
    if would["failed"]:
        first = would["failed"][0]
        return (
            f"It fails at event {first['event']:,}: a request of {human(first['size'])}, which the recording served, finds no "
            "memory. The figures are of what goes on without it."
        )
    saved = was["peak_reserved"] - would["peak_reserved"]
    answer = "It reserves as much."
    if saved:
        answer = f"It reserves {human(abs(saved))} {'less' if saved > 0 else 'more'}."
    if result["available"] is None:
        return f"{answer} Memory never ran short in the recording, so how much there was is unknown."
    if result["available_at_most"]:
        return f"{answer} No request fails in the {human(result['available'])} that there were at most."
    failures = was["recorded_failures"]
    errors = "out-of-memory error" if failures == 1 else f"{failures:,} out-of-memory errors"
    if would["passed"] == failures:
        return f"{answer} The recorded {errors} would not have happened."
    if would["passed"]:
        return f"{answer} Of the recorded {errors}, {would['passed']:,} would not have happened."
    return f"{answer} The recorded {errors} would still have happened."
