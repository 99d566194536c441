"""The picture: what is drawn, where, and that drawing it leaves no trace in the user's matplotlib."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist

import matplotlib as mpl
import pytest
import report_samples as samples
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, TensorGroup
from gpumem_magic.views import layout, what_failed
from gpumem_magic.views.figure import MAX_ROWS, draw, png
from gpumem_magic.views.lines import shown_lines
from gpumem_magic.views.palette import (
    ALARM,
    ASCII_LETTERS,
    COLOURS,
    DARK,
    LETTERS,
    ON_DARK,
    ON_LIGHT,
    PATTERNS,
    line_on,
)
from gpumem_magic.views.pen import WIDTH

MIB = samples.MIB


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure: Figure) -> list[tuple[float, float, float, float, str]]:
    """(x, y of the middle, width, height, colour) of the bars' pieces; the legend's squares are smaller than any row."""
    found = []
    for patch in figure.axes[0].patches:
        assert isinstance(patch, Rectangle)
        x, y, width, height = patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()
        found.append((x, round(y + height / 2, 4), width, height, to_hex(patch.get_facecolor()).upper()))
    return found


def bars(figure: Figure) -> list[list[tuple[float, float, float, float, str]]]:
    """The pieces of each bar, from the top; the legend is what lies below the last tick."""
    ticks = [text for text in figure.axes[0].texts if re.fullmatch(r"[\d,]+ [KMG]iB", text.get_text())]
    end = max((text.get_position()[1] for text in ticks), default=0.0)
    rows: dict[float, list[tuple[float, float, float, float, str]]] = {}
    for box in boxes(figure):
        if box[1] < end:
            rows.setdefault(box[1], []).append(box)
    return [rows[y] for y in sorted(rows)]


def place_of(figure: Figure, word: str) -> float:
    """Where a mark of the axis stands."""
    return next(text.get_position()[0] for text in figure.axes[0].texts if text.get_text() == word)


def scale_of(figure: Figure, word: str, size: int) -> tuple[float, float]:
    """(where the bars begin, inches a byte), from the mark of so many bytes."""
    left = place_of(figure, "0")
    return left, (place_of(figure, word) - left) / size


def test_every_row_is_a_bar_in_the_order_and_with_the_lengths_of_the_categories():
    report = samples.colab()
    figure = draw(report)
    shown = [line for line in shown_lines(report) if line.row.allocated]
    drawn = bars(figure)
    assert len(drawn) == len(shown) == 13
    left, inch = scale_of(figure, "8 GiB", 8 << 30)
    for line, pieces in zip(shown, drawn, strict=True):
        expected = [name for name in ALLOCATED_CATEGORIES if line.row.categories[name]]
        assert [piece[4] for piece in pieces] == [COLOURS[name] for name in expected]
        total = 0
        for name, piece in zip(expected, pieces, strict=True):
            assert piece[0] == pytest.approx(left + inch * total, abs=1e-6)
            assert piece[2] == pytest.approx(inch * line.row.categories[name], abs=0.0081)
            total += line.row.categories[name]
        assert total == line.row.allocated


def test_the_words_of_the_picture():
    words = texts(draw(samples.colab()))
    for word in (
        "model = model.to(device)",
        "1:",
        "loss = my_loss( …",
        "optimizer.step()  out of memory",
        "16,071 of 16,160",
        "nvidia-smi at its highest",
    ):
        assert word in words
    for word in ("2,393", "9,687", "14,439", "13,100", "before", "after", "at the peak", "4 GiB", "2,376 wanted"):
        assert word in words
    assert what_failed.failure(samples.colab()) in words
    assert any("stand-ins" in word for word in words)
    assert " ".join(what_failed.obstacle(samples.colab()))[:60] in " ".join(words)
    bare = texts(draw(samples.colab(), title=False, words=False))
    assert what_failed.failure(samples.colab()) not in bare
    assert not any("perfect packing" in word for word in bare)


def test_a_letter_that_no_font_has_is_drawn_without_a_warning():
    report = samples.colab()
    row = replace(report.checkpoints[1], label="a\u0378b", statement="a\u0378b\x07")
    figure = draw(replace(report, checkpoints=(report.checkpoints[0], row, *report.checkpoints[2:])))
    assert "a\u0378b" in texts(figure)
    figure.text(0, 0, "\x07")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        figure.savefig(io.BytesIO(), format="png")
        figure.savefig(io.BytesIO(), format="svg", bbox_inches="tight")
    assert said == []


def test_the_tensors_at_the_peak_stand_below_the_picture():
    group = TensorGroup(6000 * MIB, 4, "activations", "float32", (2, 3), "sub", line=3, keeper="backward")
    report = replace(samples.trainer(), peak=replace(samples.trainer().peak, tensors=(group,)))
    words = texts(draw(report))
    for word in ("At the peak", "6,000", "4 × (2, 3) float32: activations", "sub, line 3", "backward"):
        assert word in words
    assert "At the peak" not in texts(draw(report, words=False))


def test_the_failing_row_and_what_stood_in_the_way_are_red():
    red = {text.get_text() for text in draw(samples.colab()).axes[0].texts if to_hex(text.get_color()).upper() == ALARM}
    assert {"optimizer.step()  out of memory", "12,063", "2,376 wanted"} <= red
    assert any(text.startswith("There were 183 MiB free") for text in red)
    assert len(red) == 5


def test_the_request_that_failed_is_an_empty_box_behind_what_was_allocated():
    report = samples.colab()
    for wanted, whole in ((2376 * MIB, True), (900_000 * MIB, False)):
        figure = draw(replace(report, error=replace(report.error, requested=wanted, rounded=wanted)))
        left, inch = scale_of(figure, "8 GiB", 8 << 30)
        edges = [line for line in figure.axes[0].lines if to_hex(line.get_color()).upper() == ALARM]
        assert len(edges) == (3 if whole else 2)
        assert min(line.get_xdata()[0] for line in edges) == pytest.approx(left + inch * 12063 * MIB, abs=1e-6)
        assert max(max(line.get_xdata()) for line in edges) <= WIDTH - 1.6


def test_the_legend_has_what_is_there_and_nothing_else():
    words = texts(draw(samples.two_devices()))
    assert [word for word in words if word in LABELS.values()] == ["parameters", "buffers", "CUDA context"]
    assert not any("highest allocated" in word for word in words)
    words = texts(draw(samples.trainer()))
    assert "the peak within the row" in words
    assert "activation gradients" in words


def test_parts_are_thinner():
    parts = bars(draw(samples.trainer()))
    assert len(parts) == 12
    heights = [pieces[0][3] for pieces in parts]
    assert heights[1] > heights[2] == heights[3]
    assert "    forward" not in texts(draw(samples.trainer()))  # indented by its place, not by spaces


def test_statements_that_moved_nothing_are_one_slim_line():
    report = samples.colab()
    moved = report.checkpoints[3]
    quiet = replace(
        moved, statement="print('check')", line=12, peak_allocated=moved.allocated, peak_reserved=moved.reserved
    )
    long = replace(report, checkpoints=(*report.checkpoints[:4], *[quiet] * 30, *report.checkpoints[4:]))
    drawn = bars(draw(long))
    assert len(drawn) == 14
    assert drawn[3][0][3] < drawn[2][0][3] / 2
    assert texts(draw(long)).count("line 12: no change") == 1
    assert texts(draw(long, most=None)).count("print('check')") == 30


def test_the_whisker_stands_at_the_highest_allocated_inside():
    report = samples.colab()
    figure = draw(report)
    left, inch = scale_of(figure, "8 GiB", 8 << 30)
    wanted = {
        round(left + inch * row.peak_allocated, 3)
        for before, row in pairwise(report.checkpoints)
        if row.peak_allocated - max(row.allocated, before.allocated) > 100 * MIB
    }
    text = to_hex(figure.axes[0].texts[0].get_color())
    marks = [line for line in figure.axes[0].lines if line.get_zorder() == 4 and to_hex(line.get_color()) == text]
    gauge = max(max(line.get_ydata()) for line in marks)
    ends = {round(float(max(line.get_xdata())), 3) for line in marks if max(line.get_ydata()) < gauge}
    assert wanted == ends
    assert len(wanted) == 5


def test_the_scale_belongs_to_what_is_allocated():
    """A card of 24 GiB with 5.6 GiB cached, of which a step uses 370 MiB."""
    device = replace(samples.V100, smi_total_bytes=24564 * MIB)
    rows = tuple(
        samples.row(f"step({number})", samples.state(cached=5600 - size, activations=size), line=number)
        for number, size in enumerate((16, 370, 120), start=2)
    )
    peak = replace(samples.two_devices().peak, **samples.figures(rows[1].categories))
    report = replace(samples.two_devices(), device=device, checkpoints=rows, devices=(), peak=peak)
    figure = draw(report)
    left, inch = scale_of(figure, "256 MiB", 256 * MIB)
    widest = max(piece[2] for pieces in bars(figure) for piece in pieces)
    assert widest == pytest.approx(inch * 370 * MIB, abs=0.01)
    assert widest > 4
    # The card and what is cached on it are one thin bar below.
    thin = [box for box in boxes(figure) if box[4] == COLOURS["cached"]]
    assert len(thin) == 2  # the other is the legend's
    assert max(box[3] for box in thin) < 0.12
    assert left < min(box[0] for box in thin if box[2] > 0.2) < left + 1


def test_on_dark_paper_letters_are_light():
    report = samples.colab()
    categories = {**report.peak.categories, "unknown": 900 * MIB}
    figure = draw(replace(report, peak=replace(report.peak, categories=categories)), dark=True)
    assert to_hex(figure.get_facecolor()).upper() == ON_DARK.paper
    inks = {to_hex(text.get_color()).upper() for text in figure.axes[0].texts}
    assert inks == {ON_DARK.text, ON_DARK.quiet, ON_DARK.alarm}
    assert all(contrast(ink, ON_DARK.paper) >= 4.5 for ink in inks)
    assert any(box[4] == DARK["unknown"] for box in boxes(figure))
    data, *_ = png(report, dark=True)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert contains(image, ON_DARK.paper)
    assert contains(image, COLOURS["activations"])
    assert not contains(image, "#FFFFFF")


def contrast(one: str, other: str) -> float:
    def lightness(colour: str) -> float:
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted((lightness(one), lightness(other)))
    return (light + 0.05) / (dark + 0.05)


def test_without_a_capacity_or_figures_of_the_driver():
    words = texts(draw(samples.small()))
    assert "MiB allocated" in words
    assert not any("nvidia-smi at" in word for word in words)
    assert words.count("1.0") == 2
    first, *rest = samples.small().checkpoints
    mixed = draw(replace(samples.small(), checkpoints=(replace(first, device_used=3 * MIB), *rest)))
    assert {"nvidia-smi at its highest", "3.0"} <= set(texts(mixed))


def test_a_report_of_nothing_can_be_drawn():
    empty = samples.state(0, 0)
    report = replace(
        samples.small(), checkpoints=(), peak=replace(samples.small().peak, where="", **samples.figures(empty))
    )
    assert png(report)[0].startswith(b"\x89PNG")
    assert bars(draw(report)) == []


@pytest.mark.parametrize("count", [1, 40, 198, 500])
def test_many_rows(count):
    report = samples.two_devices()
    report = replace(report, checkpoints=(report.checkpoints[1],) * count)
    assert len(bars(draw(report))) <= 2
    figure = draw(report, most=None)
    width, height = figure.get_size_inches()
    assert width == WIDTH
    assert 1 < height < 80
    assert len(bars(figure)) == min(count, MAX_ROWS)
    said = [word for word in texts(figure) if "more rows in the table" in word]
    assert said == (["… 200 more rows in the table"] if count == 500 else [])


def test_nothing_is_drawn_outside_the_picture():
    report = samples.colab()
    long = replace(report.checkpoints[1], statement="result = " + "some_function(" * 30, iteration=(12, 345))
    report = replace(report, checkpoints=(*report.checkpoints, long), remarks=("a note that goes on " * 40, "x" * 400))
    report = replace(report, peak=replace(report.peak, where="somewhere " * 40))
    figure = draw(report)
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.axes[0].texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0, text.get_text()
        assert box.x1 <= width, text.get_text()
        assert box.y0 >= -1, text.get_text()
        assert box.y1 <= height + 1, text.get_text()
    code = next(text for text in figure.axes[0].texts if text.get_text().startswith("result = some"))
    assert code.get_text().endswith("…")
    assert code.get_window_extent(renderer).x1 <= bars(figure)[0][0][0] * figure.dpi


def test_code_is_never_read_as_a_formula():
    report = samples.two_devices()
    rows = (replace(report.checkpoints[1], statement=r"x = '$\frac{1}{2}$ and \$3'"), *report.checkpoints)
    # The white margin and the letters would differ if it were; what must not happen is an error or a lost character.
    figure = draw(replace(report, checkpoints=rows))
    text = next(text for text in figure.axes[0].texts if text.get_text().startswith("x = "))
    parsed, is_math = text._preprocess_math(text.get_text())
    assert (parsed, is_math) == (r"x = '$\frac{1}{2}$ and \$3'", False)


def test_letters_without_a_font_do_not_warn():
    report = samples.two_devices()
    rows = (replace(report.checkpoints[1], statement="損失 = 계산(ꙮ, 🙂)"),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(replace(report, checkpoints=rows))[0].startswith(b"\x89PNG")


def test_the_users_settings_neither_change_nor_matter():
    ordinary = png(samples.trainer())
    hostile = {"font.size": 30, "axes.facecolor": "red", "text.usetex": True, "savefig.bbox": "tight", "lines.linewidth": 9,
               "figure.constrained_layout.use": True, "savefig.transparent": True}  # fmt: skip
    with mpl.rc_context(hostile):
        before = dict(mpl.rcParams)
        assert png(samples.trainer()) == ordinary
        assert dict(mpl.rcParams) == before


def test_pyplot_is_not_loaded():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import report_samples as s; s.colab().plot();"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=samples.ROOT)
    assert result.stdout.split() == ["True", "False", "False"]


def contains(image, colour):
    """Whether the colour is there, to within what nobody sees."""
    wanted = [255 * part for part in to_rgb(colour)]
    return any(
        all(abs(one - other) <= 3 for one, other in zip(found, wanted, strict=True))
        for _, found in image.getcolors(1 << 20)
    )


def test_the_png_is_small_and_keeps_the_palette():
    data, width, height = png(samples.colab())
    assert len(data) < 150_000
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert image.size == (width, height)
    usual = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "cached", "context")
    assert all(contains(image, COLOURS[name]) for name in usual)
    image = Image.open(io.BytesIO(png(samples.trainer(), title=False, words=False)[0])).convert("RGB")
    # Small areas must not be averaged away.
    assert all(contains(image, COLOURS[name]) for name in ("workspace", "activation_gradients"))
    assert not contains(image, COLOURS["temporaries"])
    assert samples.colab().plot()._repr_png_().startswith(b"\x89PNG")


# The palette


def simulate(colour, matrix):
    """A colour as a reader with that kind of colour blindness sees it (linear light), as (L*, a*, b*)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    seen = [min(1, max(0, sum(weight * part for weight, part in zip(row, linear, strict=True)))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [
        sum(weight * part for weight, part in zip(row, seen, strict=True)) / w
        for row, w in zip(to_xyz, white, strict=True)
    ]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


# Severe protanomaly, deuteranomaly and tritanomaly as matrices on linear RGB (Machado, Oliveira and Fernandes 2009).
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


@pytest.mark.parametrize("sight", SIGHT)
def test_neighbours_in_a_bar_can_be_told_apart(sight):
    def distance(first, second):
        pairs = zip(simulate(COLOURS[first], SIGHT[sight]), simulate(COLOURS[second], SIGHT[sight]), strict=True)
        return sum((one - other) ** 2 for one, other in pairs) ** 0.5

    usual = ["parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries", "cached", "context"]
    for first, second in [*pairwise(CATEGORIES[:-1]), *pairwise(usual)]:
        assert distance(first, second) > 15, (first, second)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("dark", [False, True])
def test_what_some_readers_take_for_one_colour_differs_in_pattern(sight, dark):
    seen = {name: simulate((ON_DARK if dark else ON_LIGHT).colour(name), SIGHT[sight]) for name in CATEGORIES}
    alike = [
        (one, other)
        for one, other in combinations(CATEGORIES, 2)
        if one in ALLOCATED_CATEGORIES and dist(seen[one], seen[other]) < 20
    ]
    assert [pair for pair in alike if PATTERNS.get(pair[0]) == PATTERNS.get(pair[1])] == []
    # Lines can be seen on their colour, and do not cover it.
    for name in PATTERNS:
        colour = (ON_DARK if dark else ON_LIGHT).colour(name)
        assert dist(simulate(line_on(colour), SIGHT[sight]), seen[name]) > 15, name


def test_every_category_has_one_colour_name_and_letter():
    assert tuple(COLOURS) == tuple(LABELS) == tuple(LETTERS) == CATEGORIES
    assert len(set(COLOURS.values())) == len(set(LABELS.values())) == len(CATEGORIES)
    assert all(letter.isascii() and len(letter) == 1 for letter in ASCII_LETTERS.values())


@pytest.mark.parametrize("top", [1, 1000, 512 * 1024, 3 * MIB, 100 * MIB, 16160 * MIB, 143771 * MIB, 10**13])
def test_ticks(top):
    marks = layout.ticks(top)
    assert marks[0] == (0, "0")
    assert len(marks) <= 6
    assert all(0 <= size <= top for size, _ in marks)
    assert len({word for _, word in marks}) == len(marks)
    if top > 4096:
        assert len(marks) >= 3


def test_flow():
    assert layout.flow([3, 3, 3, 7, 1], 7) == [[0, 1], [2], [3], [4]]
    assert layout.flow([], 7) == []
    assert layout.flow([9, 1], 7) == [[0], [1]]
