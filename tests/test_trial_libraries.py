"""Libraries that a program imports are imported before its trials part; its own files are not."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from gpumem_magic.trials.libraries import import_ahead
from gpumem_magic.trials.process import in_a_fork


def test_what_is_installed_is_imported_and_own_files_and_failures_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("library_one", "library_two", "library_three"):
        (installed / f"{name}.py").write_text(
            "import sys\nsys.modules['library_two_was_run'] = sys\n" * (name[-1] == "o")
        )
    (installed / "library_broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "own_file.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(installed))
    program = ast.parse(
        "from __future__ import annotations\nimport own_file, library_one\nimport library_broken, no_such_library\n"
        "import library_broken\nfrom library_two import no_such_name\nfrom . import near\n"
        "if True:\n    import library_three\n"
    )

    def imported() -> list[str]:
        before = set(sys.modules)
        import_ahead(program)
        return sorted(name for name in set(sys.modules) - before if "library" in name or "own" in name)

    assert in_a_fork(imported) == ["library_two", "library_two_was_run"]
