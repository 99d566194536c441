"""For the tests of trials: a notebook with a small card, and a folder of temporary files that nobody else uses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from causes_cells import Notebook, notebook
from left_behind import note_others

SMALL = "virtual:256MiB,context=0MiB,idle=0MiB"


def small_notebook() -> Iterator[Notebook]:
    with notebook(SMALL) as found:
        yield found


def own_temporaries(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others run trials on this computer, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("own")))
    note_others()
