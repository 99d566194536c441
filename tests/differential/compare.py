"""Holding two runs of the same cell against each other.

What two plain runs differ in already is no difference of measuring: it is learnt from further plain runs, shaken a little, and
compared without addresses, times and numbers of processes. What then remains is a difference, unless `explained` says why the
plain run is no measure: each reason there is narrow, and its uses are counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zygote import PROCESS, without_process

MARGIN = re.compile(r"(?m)(?:^|(?<=\\n)) {3,}1(?: +#| %%gpumem.*?| +)?(?:\n|\\+n)")
# Two plain runs differ in these.
BY_CHANCE = [
    (re.compile(r"0x[0-9A-Fa-f]{4,}"), "0x"),
    (re.compile(r"\d+(\.\d+)?(e[+-]\d+)? ?(s|ms|us|µs|μs|ns|seconds|sec)\b"), "TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?"), "DATE"),
    (re.compile(r"\b(pid=|process |Thread-)\d+"), "NUMBER"),
    (re.compile(r"(?<!\.)\b[0-9a-f]{16}\b"), "DIGEST"),
    (re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?"), "0"),
]
WORD = re.compile(r"\w+|\W")


@dataclass(frozen=True)
class Difference:
    place: str
    plain: Any
    measured: Any

    def __str__(self) -> str:
        plain, measured = cut(self.plain, self.measured)
        return f"{self.place}\n    plain:    {plain}\n    measured: {measured}"


def cut(one: Any, other: Any, around: int = 160) -> tuple[str, str]:
    """Two values as texts, from shortly before they part."""
    texts = repr(one), repr(other)
    place = next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    first = max(0, place - 60)
    return texts[0][first : place + around], texts[1][first : place + around]


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every single thing that was found, under its name."""
    if isinstance(value, dict):
        value = {key: part for key, part in value.items() if place or key != PROCESS}
        yield f"{place}/keys", list(value)
        for key, part in value.items():
            yield from leaves(part, f"{place}/{key}")
    elif place.endswith("/cells"):
        for number, part in enumerate(value):
            yield from leaves(part, f"{place}/{number}")
    elif place.endswith(("/In", "/last inputs")):
        yield place, [without_magic(one) if isinstance(one, str) else one for one in value]
    else:
        yield place, without_first_lines(value)


def without_first_lines(value: Any) -> Any:
    if isinstance(value, str):
        return without_first_line(value)
    return [without_first_lines(one) for one in value] if isinstance(value, list | tuple) else value


def without_first_line(text: str) -> str:
    """A cell's first line is the magic in one run and a comment in the other; also where a value holds what was typed."""
    text = re.sub(r"(?<=['\"])(%%gpumem[^\n\\]*|#)\\+n", "", text)
    # (As `cgitb` writes it.)
    text = re.sub(r"(?<=\b1</small>&nbsp;)(#|%%gpumem[^<]*)(?=<br>)", "", text)
    text = re.sub(r"(<|&lt;)ipython-input-(\d+)-[0-9a-f]+(>|&gt;)", r"\1ipython-input-\2\3", text)
    text = re.sub(r"\bat 0x[0-9A-Fa-f]+", "at 0x", text)
    return MARGIN.sub("", re.sub(r"^dict\('version': \d+", "dict('version': 0", text))


def without_magic(text: str) -> str:
    return re.sub(r"\A(%%gpumem[^\n]*|\s*(?:>>> ?|In \[\d+\]: )?#)\n", "", text)


# Of a tensor: all digits of its values, before the first three.
DIGITS = re.compile(r"\b[0-9a-f]{16} (?=about [0-9a-f]{16}\b)")
LAPACK = re.compile(r"\b(linalg|lstsq|svd\w*|eig\w*|qr|p?inv(erse)?|solve\w*|cholesky\w*|matrix_power|lu\w*)\b")


def differences(plain: dict[str, Any], measured: dict[str, Any]) -> list[Difference]:
    ones, others = dict(leaves(plain)), dict(leaves(measured))
    found = []
    for place in ones | others:
        one, other = ones.get(place, "nothing"), others.get(place, "nothing")
        # The number of one process may be any number in the other.
        if one != other and without_numbers(one, measured) != without_numbers(other, plain):
            found.append(Difference(place, one, other))
    return found


def without_numbers(value: Any, other: dict[str, Any]) -> Any:
    """What one run found, without the number of the other's process."""
    return without_process(value, other[PROCESS]) if PROCESS in other else value


def without_chance(found: list[Difference], plain: list[dict[str, Any]]) -> tuple[list[Difference], int]:
    """What is left where the plain runs differ among themselves; how many places could not be compared at all."""
    runs = [dict(leaves(run)) for run in plain]
    left, lost = [], 0
    for one in found:
        values = [run.get(one.place, "nothing") for run in runs]
        if any(one.measured == value for value in values):
            continue
        if all(value == values[0] for value in values):
            left.append(one)
            continue
        has_all = has_what_is_common([smoothed(value) for value in values], smoothed(one.measured))
        if has_all is None:
            lost += 1
        elif not has_all:
            left.append(one)
    return left, lost


def has_what_is_common(plain: list[str], measured: str) -> bool | None:
    """Whether a text agrees with those of plain runs in each word in which they agree; None where they have not as many words."""
    columns = [WORD.findall(text) for text in (*plain, measured)]
    if len({len(words) for words in columns[:-1]}) > 1:
        return None
    return len(columns[-1]) == len(columns[0]) and all(
        words[-1] == words[0] or len(set(words[:-1])) > 1 for words in zip(*columns, strict=True)
    )


def smoothed(value: Any) -> str:
    text = repr(value)
    for pattern, replacement in BY_CHANCE:
        text = pattern.sub(replacement, text)
    return text


# (Generated cells have a generator that says so at its end.)
FORGOTTEN = re.compile(
    r"[^\n]*RuntimeWarning: coroutine '[^']*' was never awaited\n( [^\n]*\n)*(RuntimeWarning: Enable tracemalloc[^\n]*\n)?"
    r"|count is over\n"
)
ADDRESS = re.compile(r"\b\d{12,15}\b|\b0x[0-9a-f]{8,16}\b")
# IPython's own: inputs that it does not keep.
UNKEPT = re.compile(r"(exit|quit)(\s*\(.*\))?$")
OPENS = re.compile(r"mkstemp|os\.(open|dup|pipe)|fileno")
POOLED = re.compile(r"asyncio_\d+|ThreadPoolExecutor-\d+_\d+")


TURNED_OFF = re.compile(r"(Cells were not recorded\.|The virtual [\w -]+ is off, and PyTorch is as before\.)\\+n")
HIDDEN = re.compile(r" *\[\.\.\. skipping hidden \d+ frames?\](\\n)*")
NOTHING_RAN = "gpumem: nothing ran: the cell has no statement\n"
# A warning without its place, and the line there.
WARNED_AT = re.compile(r"[^\s'\"]*:\d+: (\w*Warning: [^\n]*?)\\n(?:  [^\n]*?\\n)?")
REGISTRY = re.compile(r", '__warningregistry__'|'__warningregistry__', ")
OWN_FOLDER = re.compile(r"[^':\s]*gpumem-magic-\w+:")
SYNTAX_WARNING = re.compile(r"<ipython-input-\d+[^>\n]*>:\d+: SyntaxWarning: [^\n]*\n(?: [^\n]*\n)?")


def once(shown: Any) -> Any:
    """What was shown, with every warning about the cell's text in the place of its first time only."""
    if not isinstance(shown, list):
        return shown
    seen: set[str] = set()

    def first(found: re.Match[str]) -> str:
        known, _ = found[0] in seen, seen.add(found[0])
        return "" if known else found[0]

    return [one for one in ([one[0], SYNTAX_WARNING.sub(first, one[1])] for one in shown) if one[1]]


def is_profile(one: Difference, plain: dict[str, Any]) -> bool:
    """Whether it is a variable that a profile's figures are in: `pstats` says what they are."""
    found = plain["shell"]["namespace"]
    names = [name for name, value in found.items() if "pstats.StatsProfile" in value or "pstats.Stats " in value]
    return (
        bool(names)
        and one.place.startswith("/shell/namespace/")
        and (
            one.place.rpartition("/")[2] in names or (one.plain.startswith("set(") and "_lsprof.Profiler" in one.plain)
        )
    )


def said(shown: Any) -> list[Any]:
    """What was shown, without warnings that come whenever Python collects something."""
    if not isinstance(shown, list):
        return [shown]
    return [one for one in ([one[0], FORGOTTEN.sub("", one[1])] for one in shown) if one[1]]


def explained(
    one: Difference, cells: list[str], plain: dict[str, Any], turns_on: bool = False, pictures: bool = False
) -> str | None:
    """Why the plain run is not one that always comes out so; None for a difference that has to go.

    turns_on: whether the measured cell has turned a device on, and the plain one has none. pictures: whether one was drawn.
    """
    half_run = [number for number, cell in enumerate(plain["cells"]) if "needs a real async loop" in repr(cell)]
    place = re.match(r"/cells/(\d+)", one.place)
    if half_run and (place is None or int(place[1]) > half_run[0] or one.place == f"/cells/{half_run[0]}/result"):
        # Its count, hooks and names are put back when Python collects it.
        return "IPython leaves a cell half run that waits where no event loop runs"
    if one.place.endswith("/shown") and said(one.plain) == said(one.measured):
        return "some things say so when Python collects them"
    if one.place == "/interpreter/modules/new" and set(one.plain) ^ set(one.measured) == {
        "_tracemalloc",
        "tracemalloc",
    }:
        return "some things say so when Python collects them"
    if ADDRESS.sub("", str(one.plain)) == ADDRESS.sub("", str(one.measured)):
        return "a number is an address"
    if sys.version_info < (3, 11) and one.place.endswith("/shown") and once(one.plain) == once(one.measured):
        return "Python 3.10's search for a failing expression compiles the cell again, and warns again"
    if (
        turns_on
        and one.place.endswith("/shown")
        and HIDDEN.sub("", str(one.plain)) == HIDDEN.sub("", str(one.measured))
    ):
        return "where a device is on, PyTorch's functions are called through one of the package, a hidden frame"
    if turns_on and (
        WARNED_AT.sub(r"\1", str(one.plain)) == WARNED_AT.sub(r"\1", str(one.measured))
        or REGISTRY.sub("", str(one.plain)) == REGISTRY.sub("", str(one.measured))
        or (one.place.endswith("/__warningregistry__") and one.measured == "nothing")
    ):
        return "where a device is on, some of PyTorch's warnings come from a function of the package"
    if turns_on and TURNED_OFF.search(str(one.measured)) and str(one.plain) == TURNED_OFF.sub("", str(one.measured)):
        return "the device is off again before what is left is looked at, and a text that is kept may have the words of that"
    if turns_on and str(one.plain) == OWN_FOLDER.sub("", str(one.measured)):
        return "where a device is on, PATH has a folder more"
    if any(UNKEPT.match(cell.strip()) for cell in cells) and one.place.startswith(
        ("/shell/In", "/shell/last inputs", "/shell/hidden")
    ):
        return "IPython keeps no input that is `exit` alone; below the magic it is not"
    if (
        "run_cell_magic(" in str(one.measured)
        and "run_cell_magic(" not in str(one.plain)
        and re.search(r"\b(_ih?|In)\b", str(one.plain))
    ):
        return "a copy of all variables has the inputs, the magic's line among them"
    if any("run_cell(" in cell and cell.rstrip().endswith(";") for cell in cells) and (
        one.place.startswith(("/shell/Out", "/shell/numbered", "/shell/hidden")) or "Out[" in str(one.measured)
    ):
        return "a cell within a cell is as quiet as the last input, and the magic's does not end with a semicolon"
    if any("\x00" in cell for cell in cells) and HIDDEN.sub("", str(one.plain)) == HIDDEN.sub("", str(one.measured)):
        return "where IPython fails to read a cell below the magic, a hidden frame is the one that asked it to"
    if any("type_get_version" in cell for cell in cells) and smoothed(one.plain) == smoothed(one.measured):
        return "versions of types count what was changed in any class"
    if any("gc.get_count" in cell for cell in cells) and smoothed(one.plain) == smoothed(one.measured):
        return "Python counts the objects that were made since the last collection, the package's among them"
    if any("linecache" in cell for cell in cells) and "run_cell_magic(" in str(one.measured):
        return "the inputs in `linecache.cache` have the magic's line"
    if pictures and any(map(OPENS.search, cells)) and str(one.plain).isdecimal() and str(one.measured).isdecimal():
        return "matplotlib keeps the fonts of a picture open, and the next file has another number"
    if any("Profile()" in cell or "%prun" in cell for cell in cells) and is_profile(one, plain):
        return "a profiler that the cell starts sees the package, too"
    if any(map(LAPACK.search, cells)) and DIGITS.sub("", str(one.plain)) == DIGITS.sub("", str(one.measured)):
        return "LAPACK's last digits go by where in memory it works"
    if one.place.endswith("/shown") and (one.plain, one.measured) == ([], [["stdout", NOTHING_RAN]]):
        return "in place of a report, a line says that a cell has no statement"
    if one.place == "/interpreter/threads" and all(map(POOLED.fullmatch, set(one.plain) ^ set(one.measured))):
        return "a pool begins a thread where none happens to be idle"
    return None
