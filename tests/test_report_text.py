"""The report as text, and the sentences that every face shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_samples as samples
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpumem_magic
from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.failure import failed_request, named_error
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, Cause, Folded, ReportError, Skipped, TensorGroup
from gpumem_magic.session import device
from gpumem_magic.views import explain, what_failed
from gpumem_magic.views.lines import Line, SizeFormat, columns, first_line, fit, lines, shown_lines, wrap
from gpumem_magic.views.palette import ASCII_LETTERS, LETTERS
from gpumem_magic.views.story import lead_of, story_of
from gpumem_magic.views.text import bar, render

MIB = samples.MIB

TWO_T4_FIRST = """\
Peak 3,120 MiB allocated at first = first.to('cuda:0'); at most 3,233 of 15,360 MiB (21 %) in use on
  the virtual Tesla T4.

MiB                           allocated  change  peak
before                                0
first = first.to('cuda:0')        3,120  +3,120        PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP
second = second.to('cuda:1')      3,120       0        PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP
after                             3,120       0        PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP

Bars: P parameters.

nvidia-smi, virtual Tesla T4: 3.0 MiB before, at most 3,233 MiB of 15,360 MiB (21 %); at the end
  allocated 3,120 MiB, CUDA context 110 MiB, other processes 3.0 MiB."""


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_a_report_of_two_devices_is_two_texts():
    text = render(samples.two_devices(), width=100)
    assert text.startswith(TWO_T4_FIRST)
    second = text[len(TWO_T4_FIRST) :].strip()
    assert second == render(samples.two_devices().devices[0], width=100)
    assert second.startswith(
        "Peak 1,400 MiB allocated at second = second.to('cuda:1'); at most 1,513 of 15,360 MiB (10"
    )
    assert "virtual Tesla T4 (cuda:1)" in " ".join(second.split())


def test_rows_of_the_investigation():
    text = render(samples.colab(), width=140)
    assert row_of(text, "1: optimizer.step()").split()[2:5] == ["9,687", "+4,784", "14,439"]
    assert row_of(text, "1: loss = my_loss( …")
    # A peak inside is one above what was there before and is there after.
    assert row_of(text, "1: input").split()[4:6] == ["2,471", "+78"]
    assert row_of(text, "1: input").split()[6].strip("P") == ""
    failed = row_of(text, "! 2: optimizer.step()")
    assert "out of memory" in failed
    assert "+2,376" in failed
    assert "T" in failed[-45:]
    assert "retries" not in text
    names = [line.strip()[:18].strip() for line in text.splitlines()]
    assert names[names.index("1: optimizer.step(") + 1] == "at the peak"
    assert names.index("before") < names.index("at the peak") < names.index("after")


@given(st.integers(-2 * MIB, 2 * MIB))
def test_what_changed_never_reads_as_nothing_with_a_sign(size: int) -> None:
    shown = SizeFormat(samples.colab()).change(size)
    assert (shown == "0") == (size == 0)
    assert shown not in ("+0", "-0")
    assert SizeFormat(samples.colab()).change(-MIB // 2) == "-<1"


def test_first_the_answer_then_what_stood_in_the_way_then_the_rows():
    text = " ".join(render(replace(samples.colab(), answer="Step 2 ran out of memory."), width=100).split())
    places = [
        text.index(words)
        for words in (
            "Step 2 ran out",
            "Nearly full: even",
            "MiB allocated change peak",
            "nvidia-smi, virtual",
            "More:",
        )
    ]
    assert places == sorted(places)
    assert "Out of memory at line 17: 2,376 MiB wanted." in " ".join(render(samples.colab()).splitlines()[:2])
    # What is folded is not lost.
    assert "did not fit at first" not in text
    assert "did not fit at first" in str(samples.colab().explain())
    assert "1 remark, categories" in text


def test_what_is_in_the_peak_stands_below_the_rows():
    groups = (
        TensorGroup(
            6000 * MIB, 4, "activations", "float32", (20000, 20000), "sub", statement="loss = f(x)", line=3,
            keeper="backward", kept_by="SubBackward0",
        ),
        TensorGroup(2000 * MIB, 2, "parameters", kept_by="model", keeper="name"),
        TensorGroup(40 * MIB, 9, "inputs"),
        TensorGroup(60 * MIB, 5, ""),
    )  # fmt: skip
    report = replace(samples.trainer(), peak=replace(samples.trainer().peak, tensors=groups))
    text = render(report, width=100)
    assert "  MiB  at the peak" in text
    first = [cell for cell in row_of(text, "6,000").split("  ") if cell]
    assert first == ["6,000", "4 × (20000, 20000) float32: activations", "sub, line 3", "SubBackward0"]
    assert row_of(text, "2,000").split() == ["2,000", "2", "×", "parameters", "model"]
    # The rest is one row, so that the rows add up to what is allocated.
    assert row_of(text, "100").split()[:3] == ["100", "14", "others:"]
    assert max(columns(line) for line in render(report, width=60).splitlines()) <= 60


def test_where_nothing_was_on_the_device_there_is_only_text():
    empty = samples.state(0, 0)
    rows = tuple(replace(row, **samples.figures(empty)) for row in samples.two_devices().checkpoints)
    nothing = 'Nothing was put on a device: the model and the data stayed on the host (`.to("cuda")` moves them).'
    report = replace(
        samples.two_devices(), checkpoints=rows, devices=(), remarks=("This ran on a virtual T4, which stays on.", nothing),
        peak=replace(samples.two_devices().peak, **samples.figures(empty)),
    )  # fmt: skip
    text = render(report, width=140)
    assert text == f"This ran on a virtual T4, which stays on.\n\n{nothing}"


def test_the_category_table_has_before_peak_after_and_the_change():
    text = str(samples.colab().explain())
    assert row_of(text, "temporaries").split() == ["temporaries", "0", "4,752", "0", "0"]
    assert row_of(text, "optimizer state ").split()[2:] == ["0", "4,784", "4,784", "+4,784"]
    assert "category (MiB)" not in render(samples.colab(), width=100)


def test_parts_are_indented_below_their_row_and_folding_is_said():
    text = render(samples.trainer(), width=100)
    names = [line[:20].rstrip() for line in text.splitlines()]
    start = names.index("trainer.train()")
    assert names[start + 1 : start + 9] == [
        "  iteration 1",
        "    forward",
        "    backward",
        "    optimizer step",
        "  iteration 2",
        "    forward",
        "    backward",
        "      at the peak",
    ]
    assert "Loop at line 4: 2 of 1,000 iterations have rows." in str(samples.trainer().explain())


def test_the_words_of_what_is_folded():
    def turn(number, grown=0, **more):
        made = samples.row(
            "x = f(x)", samples.state(activations=20 + grown), line=4, iteration=(number,), peak=90 + grown
        )
        return replace(made, loops=(3,), **more)

    still = [samples.row("pass", samples.state(), line=line) for line in (1, 2)]
    gap = turn(5, kind="skipped", statement="", label="iterations 5-7", skipped=Skipped(5, 7, None))
    report = replace(
        samples.small(),
        checkpoints=(*still, *map(turn, (1, 2, 3)), turn(4, 8), gap, *(turn(8, 2), turn(9, 4), turn(10, 6))),
    )
    words = [f"{line.iteration} {line.text}".strip() for line in shown_lines(report)]
    assert words == [
        "lines 1-2: no change", "1: x = f(x)", "2: x = f(x)", "3: as 2", "4: x = f(x)", "at the peak",
        "5-7: 3 iterations", "8: x = f(x)", "9-10: as 8, each +2.0 MiB",
    ]  # fmt: skip
    assert len(shown_lines(report, None)) == len(report.checkpoints) + 1


def test_without_statements_the_parts_stand_before_the_peak():
    report = samples.trainer()
    before, train, after = report.checkpoints[0], report.checkpoints[2], report.checkpoints[3]
    report = replace(report, checkpoints=(before, replace(after, parts=train.parts)))
    names = [(line.depth, line.text) for line in lines(report)]
    phases = [(1, "forward"), (1, "backward"), (1, "optimizer step")]
    peak = (0, "peak: trainer.train(), iteration 2, backward")
    assert names == [(0, "before"), (0, "iteration 1"), *phases, (0, "iteration 2"), *phases, peak, (0, "after")]
    assert [line.text for line in lines(report, parts=False)] == ["before", peak[1], "after"]


def test_a_lone_phase_says_nothing_new_but_a_mark_does():
    report = samples.colab()
    step = report.checkpoints[7]
    lone = replace(step, kind="part", statement="", label="optimizer step")
    mark = replace(lone, label="after embedding")
    for part, shown in ((lone, 0), (mark, 1)):
        one = replace(report, checkpoints=(replace(step, parts=(part,)),))
        assert sum(line.depth for line in lines(one)) == shown
    failed = replace(report, checkpoints=(replace(report.checkpoints[11], parts=(replace(lone, kind="error"),)),))
    assert "  ! optimizer step  " in render(failed, width=140)


def test_what_is_not_known_is_not_a_zero():
    text = render(samples.small(), width=100)
    assert "NVIDIA L4: PyTorch reserved at most 2.0 MiB; nvidia-smi's figure was not available." in text
    assert row_of(text, "x = torch.ones").split()[-3:-1] == ["1.0", "+1.0"]
    assert "CUDA context" not in text
    assert row_of(text, "before").split() == ["before", "0.0"]
    report = samples.small()
    mixed = replace(report, checkpoints=(replace(report.checkpoints[0], device_used=3 * MIB), *report.checkpoints[1:]))
    assert "at most 3.0 MiB" in render(mixed, width=100)


def test_small_sizes_do_not_read_as_nothing():
    row = samples.row("x = tiny()", samples.state(None, None, activations=1))
    tiny = replace(row, allocated=512, reserved=2 * MIB, categories={**row.categories, "activations": 512})
    report = replace(samples.small(), checkpoints=(samples.small().checkpoints[0], tiny))
    assert row_of(render(report, width=100), "x = tiny()").split()[3:6] == ["<0.1", "+<0.1", "1.0"]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("make", [samples.colab, samples.trainer, samples.two_devices, samples.small])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal(make, width, ascii_only):
    report = make()
    first = report.checkpoints[1]
    wide = replace(first, statement="결과 = 모델(입력, 아주_긴_이름_하나, 아주_긴_이름_둘, 셋)")
    report = replace(report, checkpoints=(report.checkpoints[0], wide, *report.checkpoints[2:]), remarks=("긴 " * 90,))
    text = render(report, width=width, ascii_only=ascii_only)
    if ascii_only:
        assert text.isascii()
        bars = [line for line in text.splitlines() if line.startswith("after")]
        assert any("PP" in line for line in bars) is (make is not samples.small)
    assert max(columns(line) for line in text.splitlines()) <= width
    assert render(report, width=1) == render(report, width=60)


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert str(samples.colab()) == render(samples.colab(), width=72)
    assert str(samples.colab().view("table")) == render(samples.colab(), width=72, bars=False)
    assert str(samples.colab().show()) == render(samples.colab(), width=72, most=None)
    assert str(samples.colab().show(8)) == render(samples.colab(), width=72, most=8)
    with pytest.raises(ValueError, match="cannot show 'some' rows"):
        samples.colab().show("some")


def test_where_the_rest_is_names_a_variable_that_there_is() -> None:
    report = samples.colab()
    shown = [str(replace(report.show(3), name=name)).replace("\n  ", " ") for name in ("report", "kept", "")]
    assert 'More: `print(report.show("all"))` has ' in shown[0]
    assert 'More: `print(kept.show("all"))` has ' in shown[1]
    assert (
        'after `import gpumem_magic; report = gpumem_magic.last_report()`, `print(report.show("all"))` has' in shown[2]
    )


@given(st.fixed_dictionaries(dict.fromkeys(CATEGORIES, st.integers(0, 10**12))), st.integers(1, 60))
def test_a_bar_is_as_long_as_what_is_allocated(sizes, width):
    total = sum(sizes[name] for name in ALLOCATED_CATEGORIES)
    row = replace(samples.row("x", samples.state()), categories=sizes, allocated=total, peak_allocated=total)
    line = Line(row, 0, None, None)
    cells = bar(line, total, width, LETTERS)
    assert len(cells) == (width if total else 0)
    for name in ALLOCATED_CATEGORIES:
        if sizes[name]:
            # A cell at either edge goes to who has most of it, which among several small ones may be little.
            assert abs(cells.count(LETTERS[name]) - width * sizes[name] / total) < 2
    assert len(bar(line, 2 * total, width, ASCII_LETTERS)) in ((0,) if not total else (width // 2, (width + 1) // 2))


@given(st.text(max_size=60), st.integers(2, 30))
def test_trimming_and_wrapping_respect_the_width(text, width):
    assert columns(fit(text, width)) <= width
    assert all(columns(line) <= width for line in wrap(text, width))
    assert not any(character in first_line(text) for character in "\n\t\r\x1b\x00")


# Sentences


def test_headlines():
    assert explain.headline(samples.colab()) == (
        "Peak 14,439 MiB allocated at optimizer.step() (iteration 1); "
        "at most 16,071 of 16,160 MiB (99 %) in use on the virtual Tesla V100-SXM2-16GB."
    )
    assert explain.headline(samples.small()).endswith("; at most 2.0 MiB reserved on the NVIDIA L4.")


def test_what_was_in_use_at_most_is_not_what_was_at_the_allocated_peak():
    report = samples.colab()
    assert report.peak.device_used == 16053 * MIB
    # The second backward reserved more, and less of it was allocated.
    assert explain.highest_in_use(report) == 16071 * MIB
    rows = (replace(report.checkpoints[4], peak_reserved=report.checkpoints[4].reserved + 99 * MIB),)
    inside = explain.highest_in_use(replace(report, checkpoints=rows, peak=replace(report.peak, device_used=None)))
    assert inside == rows[0].device_used + 99 * MIB


def test_what_a_statement_added():
    moves = [explain.moves(line) for line in lines(samples.colab())]
    assert moves[0] == ""
    assert moves[3] == "inputs 78"
    assert moves[7] == "optimizer state 4,784, cached 1,508"
    assert moves[8] == ""
    assert moves[9] == "activations +2,270, cached -2,252"
    assert moves[10] == "activations -2,270, cached +2,270"


def failing(**error):
    report = samples.colab()
    figures = {"requested": 2376 * MIB, "rounded": 2376 * MIB, "segment": 2376 * MIB, "largest_free": 2252 * MIB}
    return replace(report, error=ReportError("OutOfMemoryError", "CUDA out of memory.", 17, **{**figures, **error}))


def test_fragmentation():
    smaller = failing(requested=1876 * MIB, rounded=1876 * MIB, segment=1876 * MIB, largest_free=1700 * MIB)
    found = failed_request(smaller)
    assert found is not None
    assert (found.cause, found.free, found.spare) == ("fragmentation", 183 * MIB, (183 + 2539 - 1876) * MIB)
    assert what_failed.verdict(smaller) == (
        "Out of memory at line 17: 1,876 MiB wanted. There were 183 MiB free on the device, and 2,539 MiB cached but free "
        "(largest piece 1,700 MiB). Fragmentation, not size: with perfect packing, 846 MiB would be left."
    )


def test_a_full_device_is_not_called_fragmented():
    """What perfect packing would leave is next to nothing, and nobody knows whether it would last."""
    found = failed_request(samples.colab())
    assert found is not None
    assert (found.cause, found.spare) == ("capacity", (183 + 2539 - 2376) * MIB)
    assert what_failed.verdict(samples.colab()) == (
        "Out of memory at line 17: 2,376 MiB wanted. There were 183 MiB free on the device, and 2,539 MiB cached but free "
        "(largest piece 2,252 MiB). Nearly full: even with perfect packing, only 346 MiB (2 % of the device) would be left."
    )


def test_size():
    verdict = what_failed.verdict(failing(requested=4000 * MIB, rounded=4000 * MIB, segment=4000 * MIB))
    assert "Too big for the device: even with perfect packing, 1,278 MiB would be missing." in verdict
    assert verdict.endswith("The largest share: optimizer state, 4,784 MiB.")
    huge = 40_000 * MIB
    verdict = what_failed.verdict(failing(requested=huge, rounded=huge, segment=huge))
    assert verdict.endswith("Too big for the device: it has 16,159 MiB in all.")


def test_a_file_without_the_row_of_its_error():
    report = failing(requested=4000 * MIB, rounded=4000 * MIB, segment=4000 * MIB)
    found = failed_request(report)
    assert report.error is not None
    for cause in ("capacity", "other_process"):
        error = replace(report.error, verdict=replace(found, cause=cause))
        rows = tuple(row for row in report.checkpoints if row.kind != "error")
        assert what_failed.verdict(replace(report, error=error, checkpoints=rows)).endswith(
            "1,278 MiB would be missing."
        )


def test_rounding_and_segment_are_said_where_they_differ():
    verdict = what_failed.verdict(failing(requested=1025 * MIB, rounded=1026 * MIB, segment=1028 * MIB))
    assert "1,025 MiB wanted (rounded to 1,026 MiB, a segment of 1,028 MiB)." in verdict


def test_no_cause_is_given_where_the_figures_do_not_show_one():
    # A piece was large enough: neither size nor fragmentation explains it.
    assert failed_request(failing(largest_free=2400 * MIB)).cause == "unknown"
    # The device had room: a limit of the program's own.
    small = 10 * MIB
    assert failed_request(failing(requested=small, rounded=small, segment=20 * MIB)).cause == "limit"
    # No figure of the device.
    report = failing()
    rows = tuple(replace(row, device_used=None) for row in report.checkpoints)
    blind = replace(report, checkpoints=rows)
    assert failed_request(blind).cause == "unknown"
    assert "free on the device" not in what_failed.verdict(blind)
    assert "Fragmentation" not in what_failed.verdict(blind)
    # No size at all.
    unknown = failing(requested=None)
    assert failed_request(unknown) is None
    assert what_failed.verdict(unknown) == "OutOfMemoryError at line 17: CUDA out of memory."
    assert what_failed.failure_word(unknown) == "out of memory"


def test_other_errors_and_none():
    error = ReportError("ValueError", "no such thing\nsecond line", None)
    assert what_failed.verdict(replace(samples.small(), error=error)) == "ValueError: no such thing"
    assert what_failed.failure_word(replace(samples.small(), error=error)) == "ValueError"
    assert what_failed.verdict(samples.small()) is None
    assert failed_request(samples.small()) is None


def test_remarks():
    report = samples.colab()
    remarks = explain.remarks(report)
    assert remarks[0] == ("2 allocations did not fit at first: the allocator released cached memory and tried again.")
    assert "`loss_ = loss.detach().item()` (2 times)" in remarks[1]
    assert remarks[2] == report.notes[0]
    assert len(remarks) == 3
    places = (StandIn("14", 1), StandIn("trainer.py:210", 3), StandIn("20", 1), StandIn("21", 1))
    assert explain.remarks(replace(report, stand_ins=places))[1] == (
        "Values on this device are stand-ins; they were read at line 14, `trainer.py:210` (3 times), line 20 and 1 more place."
    )
    calm = replace(report, retries=0, stand_ins=(), remarks=(), folded=(Folded(3, 1000, 8),))
    assert explain.remarks(calm) == ["Loop at line 3: 8 of 1,000 iterations have rows."]
    assert explain.remarks(replace(samples.small(), remarks=())) == ["nvidia-smi's figure was not available."]


def test_at_most_three_causes_are_shown_and_the_others_are_folded():
    causes = tuple(Cause(f"cause{number}", f"Cause {number}.", f"Cure {number}.", 0) for number in range(5))
    report = replace(samples.colab(), remarks=(*causes, "A note."), answer=f"Peak. {causes[0].sentence}")
    told = story_of(report)
    assert [sentence for sentence in told.others if "Cause" in sentence] == [causes[1].sentence, causes[2].sentence]
    assert [sentence for sentence in told.folded if "Cause" in sentence] == [causes[3].sentence, causes[4].sentence]
    assert "A note." in told.others
    told = story_of(replace(report, answer="Peak."))
    assert [sentence for sentence in told.others if "Cause" in sentence] == [one.sentence for one in causes[:3]]
    # Whatever is said is said once.
    text = f"{told.answer} {' '.join(told.others)} {' '.join(told.folded)}"
    assert all(text.count(one.sentence) == 1 for one in causes)


def test_the_unknown_is_said_above_one_percent():
    report = samples.small()
    categories = {**report.peak.categories, "activations": 99 * MIB, "unknown": MIB}
    peak = replace(report.peak, allocated=100 * MIB, categories=categories)
    assert not any("Unknown" in text for text in explain.remarks(replace(report, peak=peak)))
    peak = replace(peak, categories={**categories, "activations": 98 * MIB, "unknown": 2 * MIB})
    assert (
        "Unknown: 2.0 MiB (2 %) of the memory allocated at the peak could not be put in a category."
        in explain.remarks(replace(report, peak=peak))
    )


def test_context_and_others_as_one_figure_is_said():
    report = samples.colab()
    categories = {**report.peak.categories, "context": None, "other_processes": None, "context_or_others": 1374 * MIB}
    one = replace(report, peak=replace(report.peak, categories=categories))
    assert any("could not tell this process from others" in text for text in explain.remarks(one))


def test_evidence_and_alt_text():
    assert explain.evidence(samples.small()) == ""
    assert explain.evidence(samples.colab()).endswith(
        "identity (a live object holds it) 67 %, lifetime and phase 33 %."
    )
    alt = explain.alt_text(samples.colab())
    assert alt.startswith(
        "Stacked bars of GPU memory by category, after each of 11 statements. Out of memory at line 17"
    )
    assert "Largest at the peak: optimizer state 4,784 MiB, temporaries 4,752 MiB, parameters 2,392 MiB." in alt
    assert alt.endswith(what_failed.verdict(samples.colab()))


def test_device_names():
    device = DeviceFacts("Virtual 24 GiB", "virtual", 0, None, None, None)
    assert explain.device_name(device) == "Virtual 24 GiB"
    assert explain.device_name(replace(device, name="Tesla T4", index=1)) == "virtual Tesla T4 (cuda:1)"
    assert explain.device_name(replace(device, name="Tesla T4", kind="cuda")) == "Tesla T4"


LEADS = [
    (
        "`a. B; 2` (line 3) makes 1.5 GiB. Use less. Peak 3 GiB.",
        "`a. B; 2` (line 3) makes 1.5 GiB.",
        "Use less. Peak 3 GiB.",
    ),
    ("Nothing piles up: the last ones are alike.", "Nothing piles up: the last ones are alike.", ""),
    (
        "Of 98.1 MiB at the peak, 32.3 MiB are optimizer state of `optimizer`; 16.2 MiB are parameters of `net`; 16.2 MiB are "
        "gradients of `net`; 8.1 MiB are workspace of `loss = f(x)`. Peak at f.",
        "Of 98.1 MiB at the peak, 32.3 MiB are optimizer state of `optimizer`; 16.2 MiB are parameters of `net`; 16.2 MiB are "
        "gradients of `net`.",
        "8.1 MiB are workspace of `loss = f(x)`. Peak at f.",
    ),
    (
        "Out of memory at line 7. Attention scores are stored in full (`att.softmax(-1)`, line 3): 10.1 GiB in 9 tensors of "
        "2048 x 2048 for each head. Use less.",
        "Out of memory at line 7. Attention scores are stored in full (`att.softmax(-1)`, line 3): 10.1 GiB in 9 tensors of "
        "2048 x 2048 for each head.",
        "Use less.",
    ),
    (
        "Out of memory at line 7: 5 GiB are one tensor. Use less.",
        "Out of memory at line 7: 5 GiB are one tensor.",
        "Use less.",
    ),
    ("KeyError at line 2. Peak 5 GiB.", "KeyError at line 2. Peak 5 GiB.", ""),
    (
        "Of 2,885 MiB at the peak, 2,646 MiB are 108 tensors of `train(32)` (line 2), kept for backward (largest: 294 MiB, three "
        "(32, 256, 56, 56) float32 tensors of forward, from In [7]:13 train). Use less.",
        "Of 2,885 MiB at the peak, 2,646 MiB are 108 tensors of `train(32)` (line 2), kept for backward.",
        "Largest: 294 MiB, three (32, 256, 56, 56) float32 tensors of forward, from In [7]:13 train. Use less.",
    ),
    (
        "Fragmentation: 2,522 MiB were cached and free (largest piece 1,599 MiB) and 166 MiB free on the device, and 2,372 MiB "
        "were wanted in one piece. Use less.",
        "Fragmentation.",
        "2,522 MiB were cached and free (largest piece 1,599 MiB) and 166 MiB free on the device, and 2,372 MiB were wanted "
        "in one piece. Use less.",
    ),
    (
        "Of 9 MiB, 8 MiB are two tensors (largest: 5 MiB). Use less.",
        "Of 9 MiB, 8 MiB are two tensors (largest: 5 MiB).",
        "Use less.",
    ),
]


@pytest.mark.parametrize(("answer", "first", "rest"), LEADS)
def test_the_first_sentence_stands_out_and_is_short(answer: str, first: str, rest: str) -> None:
    assert lead_of(answer) == (first, rest)


def test_devices_that_peak_alike_are_one_sentence() -> None:
    with gpumem_magic.measure("4xT4") as measured:
        kept = [torch.empty((2 if number == 2 else 1) << 20, device=f"cuda:{number}") for number in range(4)]
    device.off()
    assert len(kept) == 4
    assert "On cuda:1, 3 the peak is 4.0 MiB each. On cuda:2 the peak is 8.0 MiB." in measured.report.answer


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        (" (when checking argument in method wrapper_CUDA_addmm)", "cuda:0."),
        (" (of both), and words that go on for very long behind it", " …"),
    ],
)
def test_a_long_errors_parentheses_are_left_out_first(behind: str, ends: str) -> None:
    said = (
        "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0"
    )
    assert named_error(ReportError("RuntimeError", said + behind, 84)).endswith(ends)
