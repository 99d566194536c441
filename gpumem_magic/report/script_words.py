"""A report's remarks for somebody who has no magics: at a command line, or in a script of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpumem_magic.report.model import Cause, ReportData

# What a notebook's sentence says -> what to do where the program is a script.
_WORDS = tuple(
    (re.compile(said), instead)
    for said, instead in (
        (r"`%gpumem_try ([^`]+)` runs the cell again with it", r"`PYTORCH_CUDA_ALLOC_CONF=\1` before the command runs it so"),
        (r"`%%gpumem (--[^`]+)`", r"`gpumem run \1`"),
        (r" was turned on, and stays on: `%gpumem_device NAME` chooses another, `%gpumem_device off` turns it off\.",
         " was turned on. `--device NAME` chooses another, `gpumem devices` lists them."),
        (r"`%gpumem_device (NAME,values=\w+)`", r"`--device \1`"),
        (r"`%gpumem_free cycles`", "`gc.collect()`"),
        (r"`%gpumem_who` shows (what holds it|more)", "`gpumem_magic.last_report().owners` tells who holds what"),
        (r"`%gpumem_free( out| traceback)?( cache)?` frees", "Letting go of it frees"),
        (r"`%gpumem_free( out| traceback)?( cache)?`", "letting go of it"),
        (r"Where an earlier cell chose the device", "Where the program chose the device"),
        (r"there was no GPU yet: run it again", "there was no GPU yet: with `--device` in the command it is there first"),
    )
)  # fmt: skip


# The same where the program measures itself: what differs.
_IN_PYTHON = tuple(
    (re.compile(said), instead)
    for said, instead in (
        (r"`%gpumem_try ([^`]+)` runs the cell again with it", "a setting must be there before CUDA is first used"),
        (r" was turned on, and stays on: `%gpumem_device NAME` chooses another, `%gpumem_device off` turns it off\.",
         " was turned on, and stays on. `measure(device=NAME)` chooses another, `gpumem devices` lists them."),
        (r"`%gpumem_device (NAME,values=\w+)`", r'`measure(device="\1")`'),
    )
)  # fmt: skip


def for_a_script(text: str) -> str:
    """A remark in the words of the command line."""
    return _replaced(text, _WORDS)


def _in_python(text: str) -> str:
    return _replaced(text, (*_IN_PYTHON, *_WORDS))


def _replaced(text: str, words: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for said, instead in words:
        text = said.sub(instead, text)
    return text


def told_of_a_script(report: ReportData) -> ReportData:
    """The report with its answer and all its remarks in the words of the command line."""
    return _told(report, for_a_script)


def told_in_python(report: ReportData) -> ReportData:
    """The same for a program that measures itself, and for a file."""
    return _told(report, _in_python)


def _told(report: ReportData, words: Callable[[str], str]) -> ReportData:
    return replace(
        report,
        answer=words(report.answer),
        remarks=tuple(
            replace(one, text=words(one.text), remedy=words(one.remedy)) if isinstance(one, Cause) else words(one)
            for one in report.remarks
        ),
        devices=tuple(_told(one, words) for one in report.devices),
    )
