"""The picture: what is drawn, where, and that drawing it leaves no trace in the user's matplotlib."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import pytest
import report_samples as samples
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpumem_magic.report.model import CATEGORIES, LABELS
from gpumem_magic.views import explain, layout
from gpumem_magic.views.figure import MAX_ROWS, WIDTH, draw, png, select
from gpumem_magic.views.palette import ALARM, ASCII_LETTERS, COLOURS, LETTERS

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


def test_every_row_is_a_bar_in_the_order_and_with_the_lengths_of_the_categories():
    report = samples.colab()
    figure = draw(report)
    drawn = bars(figure)
    shown, _ = select(report, None, MAX_ROWS)
    assert len(drawn) == len(shown) == 14
    capacity = report.device.capacity
    dashed = next(line for line in figure.axes[0].lines if to_hex(line.get_color()).upper() == ALARM)
    left, right = drawn[0][0][0], dashed.get_xdata()[0]
    for line, pieces in zip(shown, drawn, strict=True):
        expected = [name for name in CATEGORIES if line.row.categories[name]]
        assert [piece[4] for piece in pieces] == [COLOURS[name] for name in expected]
        total = 0
        for name, piece in zip(expected, pieces, strict=True):
            assert piece[0] == pytest.approx(left + (right - left) * total / capacity, abs=1e-6)
            assert piece[2] == pytest.approx((right - left) * line.row.categories[name] / capacity, abs=0.0081)
            total += line.row.categories[name]
        assert total == line.used


def test_the_words_of_the_picture():
    words = texts(draw(samples.colab()))
    for word in (
        "model = model.to(device)",
        "1:",
        "loss = my_loss( …",
        "optimizer.step()  out of memory",
        "16,160 MiB",
        "nvidia-smi",
    ):
        assert word in words
    for word in (
        "3,769",
        "+3,767",
        "+6,292",
        "-95",
        ".",
        "before",
        "after",
        "peak: optimizer.step() (iteration 1)",
        "4 GiB",
    ):
        assert word in words
    assert "virtual Tesla V100-SXM2-16GB" in words
    assert any("values on the device are stand-ins" in word for word in words)
    assert explain.verdict(samples.colab()) in " ".join(words)
    bare = texts(draw(samples.colab(), title=False, words=False))
    assert "virtual Tesla V100-SXM2-16GB" not in bare
    assert not any("Fragmentation" in word for word in bare)


def test_the_failing_row_and_the_verdict_are_red():
    red = {text.get_text() for text in draw(samples.colab()).axes[0].texts if to_hex(text.get_color()).upper() == ALARM}
    assert {"optimizer.step()  out of memory", "15,976", "16,160 MiB"} <= red
    assert any(text.startswith("Out of memory at line 17") for text in red)
    assert len(red) == 5


def test_the_legend_has_what_is_there_and_nothing_else():
    words = texts(draw(samples.two_devices()))
    assert [word for word in words if word in LABELS.values()] == [
        "parameters",
        "buffers",
        "CUDA context",
        "other processes",
    ]
    assert not any("highest" in word for word in words)
    words = texts(draw(samples.trainer()))
    assert "highest allocated inside" in words
    assert "highest reserved inside" in words
    assert "activation gradients" in words


def test_parts_are_thinner_and_can_be_left_out():
    whole, parts = bars(draw(samples.trainer(), parts=False)), bars(draw(samples.trainer()))
    assert (len(whole), len(parts)) == (5, 13)
    heights = [pieces[0][3] for pieces in parts]
    assert heights[2] > heights[3] > heights[4]
    assert heights[3] == heights[7]
    assert "    forward" not in texts(draw(samples.trainer()))  # indented by its place, not by spaces


def test_in_a_long_picture_statements_that_moved_nothing_are_slim():
    report = samples.colab()
    moved = report.checkpoints[3]
    quiet = replace(moved, statement="print('check')", peak_allocated=moved.allocated, peak_reserved=moved.reserved)
    for count, slim in ((3, False), (30, True)):
        long = replace(report, checkpoints=(*report.checkpoints[:4], *[quiet] * count, *report.checkpoints[4:]))
        heights = [round(max(piece[3] for piece in bar), 4) for bar in bars(draw(long))]
        assert len(heights) == len(report.checkpoints) + count + 1
        assert (max(heights[4 : 4 + count]) < heights[0]) is slim
        assert draw(long).axes[0].texts
        assert texts(draw(long)).count("print('check')") == count


def test_the_hairline_stands_at_the_highest_allocated():
    report = samples.colab()
    figure = draw(report)
    dashed = next(line for line in figure.axes[0].lines if to_hex(line.get_color()).upper() == ALARM)
    left, right = bars(figure)[0][0][0], dashed.get_xdata()[0]
    wanted = {
        round(left + (right - left) * row.peak_allocated / report.device.capacity, 3)
        for row in report.checkpoints
        if row.peak_allocated - row.allocated > 100 * MIB
    }
    ends = {round(float(max(line.get_xdata())), 3) for line in figure.axes[0].lines if line.get_zorder() == 4}
    assert wanted == ends
    assert len(wanted) == 5


def test_a_device_that_is_nearly_empty_says_its_capacity_beside_the_scale():
    assert "capacity 15,360 MiB →" in texts(draw(samples.two_devices()))
    assert "capacity 15,360 MiB →" not in texts(draw(samples.colab()))


def test_without_a_capacity_or_figures_of_the_driver():
    words = texts(draw(samples.small()))
    assert "reserved" in words
    assert "nvidia-smi" not in words
    assert not any("capacity" in word for word in words)
    assert "+2.0" in words
    first, *rest = samples.small().checkpoints
    mixed = draw(replace(samples.small(), checkpoints=(replace(first, device_used=3 * MIB), *rest)))
    assert "nvidia-smi" in texts(mixed)
    assert "2.0*" in texts(mixed)
    assert any(word.startswith("* reserved by PyTorch") for word in texts(mixed))


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
    figure = draw(report)
    width, height = figure.get_size_inches()
    assert width == WIDTH
    assert 1 < height < 55
    assert len(bars(figure)) == min(count + 1, MAX_ROWS)
    said = [word for word in texts(figure) if "more rows in the table" in word]
    assert said == (["… 301 more rows in the table"] if count == 500 else [])


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
    from io import BytesIO

    from PIL import Image

    data, width, height = png(samples.colab())
    assert len(data) < 150_000
    image = Image.open(BytesIO(data)).convert("RGB")
    assert image.size == (width, height)
    usual = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "cached", "context")
    assert all(contains(image, COLOURS[name]) for name in usual)
    image = Image.open(BytesIO(png(samples.trainer(), title=False, words=False)[0])).convert("RGB")
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
