"""A report's remarks for somebody at a command line, who has no magics."""

from __future__ import annotations

import re
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


def for_a_script(text: str) -> str:
    """A remark in the words of the command line."""
    for said, instead in _WORDS:
        text = said.sub(instead, text)
    return text


def told_of_a_script(report: ReportData) -> ReportData:
    """The report with its answer and all its remarks in these words."""
    return replace(
        report,
        answer=for_a_script(report.answer),
        remarks=tuple(
            replace(one, text=for_a_script(one.text), remedy=for_a_script(one.remedy))
            if isinstance(one, Cause)
            else for_a_script(one)
            for one in report.remarks
        ),
        devices=tuple(told_of_a_script(one) for one in report.devices),
    )
