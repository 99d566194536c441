"""Results that the repository keeps, and what the documentation says of them."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS, RECORDINGS = ROOT / "benchmarks" / "programs", ROOT / "benchmarks" / "recordings"


@pytest.fixture
def kept_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("kept_rows")


def test_what_ran_again_takes_the_place_of_its_former_row(kept_rows: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    assert kept_rows.read(path) == []
    first = [{"program": name, "matched": "90 %"} for name in ("a, with a comma", "b", "c")]
    kept_rows.update(path, first, ["program"])
    kept_rows.update(path, [{"program": "b", "matched": "100 %"}, {"program": "d", "matched": ""}], ["program"])
    assert [tuple(row.values()) for row in kept_rows.read(path)] == [
        ("a, with a comma", "90 %"),
        ("b", "100 %"),
        ("c", "90 %"),
        ("d", ""),
    ]


def test_rows_of_other_columns_change_nothing(kept_rows: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    kept_rows.update(path, [{"program": "a", "matched": "90 %"}], ["program"])
    with pytest.raises(ValueError, match="program, matched; a row has program, peak"):
        kept_rows.update(path, [{"program": "a", "peak": "1"}], ["program"])
    assert kept_rows.read(path) == [{"program": "a", "matched": "90 %"}]
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_of_programs_says_what_their_table_has(kept_rows: ModuleType) -> None:
    rows = kept_rows.read(PROGRAMS / "results.csv")
    every = tomllib.loads((PROGRAMS / "programs.toml").read_text(encoding="utf-8"))["repository"]
    named = {(one["name"], program.get("name") or program["script"]) for one in every for program in one["program"]}
    assert {(row["repository"], row["program"]) for row in rows} <= named
    number = Counter(row["result"] for row in rows)
    late = number["time was up"]
    works, all_of_them, faults = number["works"] + late, len(rows), number["its own fault"]
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    share = f"{100 * works / all_of_them:.1f} %; {late} of them until their time was up"
    assert f"**Of {all_of_them} public ones {works} do** ({share}), {faults} fail by their own fault" in page
    assert f"| {works} of {all_of_them}; {faults} fail by their own fault |" in page
    assert number["refused"] == 1
    assert not number["wrong"]
    assert not any(row["way"].startswith("silent") for row in rows)
    ways = Counter(row["way"].partition(" ")[0] for row in rows)
    same, said = ways["same"], ways["said"]
    assert f"In the table {same + said} rows have a *way*: {same} the same, and {said} say that they may not" in page
    assert f"Of {all_of_them} public programs {works} run as they are" in (ROOT / "CHANGELOG.md").read_text(
        encoding="utf-8"
    )


def test_how_true_says_what_the_tables_have(kept_rows: ModuleType) -> None:
    page = (ROOT / "docs" / "how_true.md").read_text(encoding="utf-8")
    rows = kept_rows.read(RECORDINGS / "compared.csv")
    count = sum(int(row["allocations"].replace(",", "")) for row in rows)
    whole = [row for row in rows if row["matched"] == "100.00 %"]
    assert f"compared with {len(rows)} recordings" in page
    assert f"{count:,} allocations in all. **{len(whole)} are predicted in every\nallocation**" in page
    alike = [row for row in whole if row["to the byte"] == row["freed alike"] == "100.00 %"]
    assert f"in {len(alike)} of these every byte and every free agree, too" in page
    assert f"| {len(whole)} of {len(rows)} the same |" in page
    own = kept_rows.read(RECORDINGS / "own_on_an_h100.csv")
    agree = sum(row["matched"] == "100.00 %" for row in own)
    assert f"| {agree} of {len(own)} the same |" in page
    assert f"{agree} of {len(own)} are predicted in every allocation" in page


def test_what_was_tried_says_how_the_situations_are_graded() -> None:
    kept = json.loads((ROOT / "benchmarks" / "situations" / "scores.json").read_text(encoding="utf-8"))
    number = Counter(kept.values())
    page = (ROOT / "docs" / "tried.md").read_text(encoding="utf-8")
    grades = f"{number['full']} full, {number['right']} right, {number['partly']} partly"
    assert f"{len(kept)} situations: {grades} |" in page
    assert f"of {len(kept)}, {number['full']} are full, {number['right']} right, {number['partly']} say a part" in page
    assert number.total() == number["full"] + number["right"] + number["partly"]
