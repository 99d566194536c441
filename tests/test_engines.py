"""`%%gpumem --engines` on a real cluster of engines of ipyparallel, on this computer alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from causes_cells import Notebook, notebook

import gpumem_magic
from gpumem_magic.report.ranks import DONE, FAILED, GONE, OUT_OF_MEMORY

ipyparallel: Any = pytest.importorskip("ipyparallel", reason="ipyparallel is not installed: pip install '.[engines]'")


@contextmanager
def cluster() -> Iterator[Any]:
    """Four engines; what they import is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(gpumem_magic.__file__).parents[1]), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        found = ipyparallel.Cluster(n=4, controller_ip="127.0.0.1", log_level=40)
        try:
            yield found.start_and_connect_sync(activate=False)
        finally:
            found.stop_cluster_sync()


def test_a_cell_on_four_engines() -> None:
    """(One test: worth one start of the engines.)"""
    from ipyparallel.client.magics import ParallelMagics

    with cluster() as client, notebook("T4", "import os") as book:
        book.shell.register_magics(ParallelMagics(book.shell, client[:]))
        client[:].scatter("mine", range(4), flatten=True, block=True)
        it_runs_on_the_engines_and_one_report_has_them(book, client)
        an_error_is_ipyparallels_and_the_others_report_is_there(book)
        what_is_no_engine_is_one_line(book)
        book.cell("%%gpumem -q -o report --engines [0,1]\nimport os\nif mine == 1:\n    os.kill(os.getpid(), 9)")
        assert [(rank, state) for rank, state, _ in rows(book)] == [(1, GONE), (0, DONE)]


def rows(book: Notebook) -> list[tuple[int, str, int | None]]:
    ranks = book.shell.user_ns["report"].ranks
    return [(row.rank, row.state, row.peak_allocated) for row in ranks.rows]


def it_runs_on_the_engines_and_one_report_has_them(book: Notebook, client: Any) -> None:
    said = book.cell(
        "%%gpumem -q -o report --engines all --device A100-40GB --budget 1GiB\nimport torch\nprint('on', mine)\n"
        "kept = torch.empty((mine + 1) << 18, device='cuda')"
    )
    assert [f"on {number}" in said for number in range(4)] == [True] * 4
    assert gpumem_magic.last_report() is book.shell.user_ns["report"]
    assert rows(book) == [(rank, DONE, (rank + 1) << 20) for rank in (3, 2, 1, 0)]
    assert "kept" not in book.shell.user_ns
    assert client[3]["mine"] == 3


def an_error_is_ipyparallels_and_the_others_report_is_there(book: Notebook) -> None:
    said = book.cell("%%gpumem -q -o report --engines [0,3]\nif mine == 3:\n    torch.empty(1 << 40, device='cuda')")
    assert "OutOfMemoryError" in said
    assert [(rank, state) for rank, state, _ in rows(book)] == [(1, OUT_OF_MEMORY), (0, DONE)]
    assert book.shell.user_ns["report"].remarks[0] == "Rank 0 is engine 0, rank 1 is engine 3."
    plain = book.cell("%%px --block --targets [3]\n1 / 0")
    measured = book.cell("%%gpumem -q -o report --engines 3\n1 / 0")
    for words in ("[3:execute]", "ZeroDivisionError", ": division by zero"):
        assert words in plain
        assert words in measured
    assert [state for _, state, _ in rows(book)] == [FAILED]


def what_is_no_engine_is_one_line(book: Notebook) -> None:
    for flags in ("--engines 7", "--engines x", "--engines 0 --ranks 2"):
        assert "UsageError: %%gpumem: --engines" in book.cell(f"%%gpumem {flags}\nn = 1")
    assert "n" not in book.shell.user_ns


def test_without_a_cluster_the_line_says_how_to_get_one() -> None:
    with notebook("T4", "import os") as alone:
        assert "there is no %%px" in alone.cell("%%gpumem --engines all\nn = 1")
