"""`%%gpumem --engines` and `%gpumem_watch --engines` on a real cluster of engines of ipyparallel, on this computer alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import warm
from causes_cells import Notebook, notebook
from traitlets.config import Config
from watch_fakes import wait_until

import gpumem_magic
from gpumem_magic.report.ranks import DONE, FAILED, GONE, OUT_OF_MEMORY
from gpumem_magic.widgets.columns import layers_of
from gpumem_magic.widgets.samples import DeviceSamples

ipyparallel: Any = pytest.importorskip("ipyparallel", reason="ipyparallel is not installed: pip install '.[engines]'")


@contextmanager
def cluster() -> Iterator[Any]:
    """Four engines; what they import is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(gpumem_magic.__file__).parents[1]), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        engines = Config({"EngineLauncher": {"engine_cmd": [warm.executable(), "-m", "ipyparallel.engine"]}})
        found = ipyparallel.Cluster(n=4, controller_ip="127.0.0.1", log_level=40, config=engines)
        try:
            yield found.start_and_connect_sync(activate=False)
        finally:
            found.stop_cluster_sync()


def test_a_cell_and_a_watch_on_four_engines(tmp_path: Path) -> None:
    """(One test: worth one start of the engines.)"""
    from ipyparallel.client.magics import ParallelMagics

    with cluster() as client, notebook("T4", "import os") as book:
        parallel = ParallelMagics(book.shell, client[:])
        book.shell.register_magics(parallel)
        client[:].scatter("mine", range(4), flatten=True, block=True)
        it_runs_on_the_engines_and_one_report_has_them(book, client)
        with pytest.MonkeyPatch.context() as patch:
            # With streaming, ipyparallel 9.2 loses an error that comes before it listens: all that it says is "1 errors".
            patch.setattr(parallel, "stream_output", False)
            an_error_is_ipyparallels_and_the_others_report_is_there(book)
        what_is_no_engine_is_one_line(book)
        the_watch_has_the_engines_devices_while_they_work(book, client, tmp_path / "enough")
        an_interrupt_leaves_no_watch_on_the_engines(book, client)
        book.cell("%gpumem_watch --engines all")
        book.cell("%%gpumem -q -o report --engines [0,1]\nimport os\nif mine == 1:\n    os.kill(os.getpid(), 9)")
        assert [(rank, state) for rank, state, _ in rows(book)] == [(1, GONE), (0, DONE)]
        book.cell("%gpumem_watch stop")
        assert "note: Engine 1 is gone: its last figures are from before that." in str(gpumem_magic.last_watch())
        assert watches_on(client) == [0, 0, 0]


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


def the_watch_has_the_engines_devices_while_they_work(book: Notebook, client: Any, enough: Path) -> None:
    book.cell("%%px --block\n%gpumem_device T4")
    book.cell("%gpumem_watch --engines [0,3]")
    client[[0, 3]].push({"enough": str(enough)}, block=True)
    try:
        book.cell(
            "%%px --noblock --targets [0,3]\nimport time\nimport torch\nfrom pathlib import Path\n"
            "kept = torch.nn.Linear(1024, 1024 * (mine + 1), bias=False).cuda()\n"
            "kept(torch.zeros(1, 1024, device='cuda'))\nwhile not Path(enough).exists(): time.sleep(0.01)"
        )
        wait_until(lambda: [layers_of(list(device.rows[-1]))["parameters"] for device in seen()] == [4 << 20, 16 << 20])
    finally:
        enough.touch()
    assert [device.name for device in seen()] == [f"engine {number} cuda:0  virtual Tesla T4" for number in (0, 3)]
    book.cell("%gpumem_watch stop")
    said = str(gpumem_magic.last_watch())
    assert "engine 3 cuda:0  virtual Tesla T4:  peak allocated " in said
    assert "note:" not in said
    assert watches_on(client) == [0, 0, 0, 0]


def an_interrupt_leaves_no_watch_on_the_engines(book: Notebook, client: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(*_: Any) -> None:
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(ipyparallel.AsyncResult, "wait", interrupted)
        book.cell("%gpumem_watch --engines all")
    assert watches_on(client) == [0, 0, 0, 0]


def seen() -> tuple[DeviceSamples, ...]:
    watched = gpumem_magic.last_watch()
    assert watched is not None
    return watched.devices


def watches_on(client: Any) -> list[int]:
    def threads() -> int:
        import threading

        return sum(thread.name == "gpumem-watch" for thread in threading.enumerate())

    return list(client[:].apply_sync(threads))


def what_is_no_engine_is_one_line(book: Notebook) -> None:
    for flags in ("--engines 7", "--engines x", "--engines 0 --ranks 2"):
        assert "UsageError: %%gpumem: --engines" in book.cell(f"%%gpumem {flags}\nn = 1")
    assert "n" not in book.shell.user_ns


def test_without_a_cluster_the_line_says_how_to_get_one() -> None:
    with notebook("T4", "import os") as alone:
        assert "UsageError: %%gpumem --engines: there is no %%px" in alone.cell("%%gpumem --engines all\nn = 1")
        assert "UsageError: %gpumem_watch --engines: there is no %%px" in alone.cell("%gpumem_watch --engines all")
