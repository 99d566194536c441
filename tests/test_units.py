"""Sizes in words: the same in Python and in the pages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gpumem_magic.units import GIB, MIB, human

PAGES = Path(__file__).parents[1] / "gpumem_magic" / "units.js"
WORDS = {
    0: "0 B",
    512: "512 B",
    2048: "2.0 KiB",
    round(8.1 * MIB): "8.1 MiB",
    1278 * MIB: "1,278 MiB",
    round(14.7 * GIB): "14.7 GiB",
}


def test_a_size_keeps_three_or_four_digits_and_names_its_unit() -> None:
    assert {size: human(size) for size in WORDS} == WORDS


def test_the_pages_write_sizes_as_python_does(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    sizes = [*WORDS, *(near + more for near in (1024, MIB, 100 * MIB, 10 * GIB) for more in (-1, 0, 1)), 2000 * GIB]
    module = tmp_path / "units.mjs"  # an older node takes .js files for another kind of module
    module.write_text(PAGES.read_text("utf-8"), "utf-8")
    program = f"import {{ human }} from {json.dumps(module.as_uri())}; console.log(JSON.stringify({sizes}.map(human)))"
    done = subprocess.run(
        [node, "--input-type=module", "--eval", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [human(size) for size in sizes]
