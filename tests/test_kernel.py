"""The magics in a real kernel, as a notebook runs them. The session in the kernel is a fake: nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

SETUP = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]
import gpumem_magic, shell_fakes
session = shell_fakes.FakeSession()
session.install(setattr)
%load_ext gpumem_magic
"""


class Kernel:
    """Runs cells one by one in one kernel of this Python."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str) -> Any:
        """The executed cell. Raises CellExecutionError for a failing one."""
        cells = self._client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        return self._client.execute_cell(cells[-1], len(cells) - 1, store_history=True)

    def fail(self, source: str) -> Any:
        """The executed cell, which must fail."""
        with pytest.raises(nbclient.exceptions.CellExecutionError):
            self.run(source)
        return self._client.nb.cells[-1]


def _client(notebook: Any) -> Any:
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = warm.executable()  # this Python, whichever one the kernel's name is registered for
    return nbclient.NotebookClient(notebook, km=manager, timeout=300, allow_errors=False)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    client = _client(nbformat.v4.new_notebook())
    with client.setup_kernel(cleanup_kc=True):
        kernel = Kernel(client)
        kernel.run(SETUP)
        yield kernel


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_value_and_report(kernel: Kernel) -> None:
    cell = kernel.run("%%gpumem\nx = 20\nx + 1\n")
    assert [output.data["text/plain"] for output in outputs(cell, "execute_result")] == ["21"]
    assert [output.data["text/plain"] for output in outputs(cell, "display_data")] == ["<<report>>"]
    assert outputs(kernel.run("_ + 1"), "execute_result")[0].data["text/plain"] == "22"
    assert not outputs(kernel.run("%%gpumem -q\nx;\n"), "execute_result")


def test_await(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%gpumem\nimport asyncio\ndone = []\nasync def other():\n    done.append(1)\ntask = asyncio.ensure_future(other())\n"
        "for i in range(2):\n    await asyncio.sleep(0.01)\ndone, asyncio.get_running_loop() is task.get_loop()\n"
    )
    assert outputs(cell, "execute_result")[0].data["text/plain"] == "([1], True)"
    assert outputs(cell, "display_data")[0].data["text/plain"] == "<<report>>"
    rows = kernel.run("session.observer.rows[-3:-1]")
    assert "(8, 'await asyncio.sleep(0.01)', (2,), (7,))" in outputs(rows, "execute_result")[0].data["text/plain"]


@pytest.mark.parametrize("prefix", ["", "import asyncio; await asyncio.sleep(0)\n"])
def test_an_error_is_shown_once_and_fails_the_cell(kernel: Kernel, prefix: str) -> None:
    cell = kernel.fail(f"%%gpumem\n{prefix}def f():\n    return 1 / 0\nf()\n")
    (error,) = outputs(cell, "error")
    assert error.ename == "ZeroDivisionError"
    text = plain("\n".join(error.traceback))
    lines = 4 + bool(prefix)
    assert text.count("Traceback (most recent call last)") == 1
    assert f"----> {lines} f()" in text
    assert f"----> {lines - 1}     return 1 / 0" in text
    assert "run_cell_magic" not in text
    assert "magics.py" not in text
    assert [output.output_type for output in cell.outputs] == ["display_data", "error"]


def test_the_cells_number_in_a_traceback(kernel: Kernel) -> None:
    cell = kernel.fail("%%gpumem -q\n1 / 0\n")
    other = kernel.fail("\n1 / 0\n"[1:])
    text, plainly = ("\n".join(plain(line) for line in each.outputs[-1].traceback) for each in (cell, other))
    if "In[" in plainly or "In [" in plainly:
        assert re.search(rf"In ?\[{cell.execution_count}\]", text)
        assert re.search(rf"In ?\[{other.execution_count}\]", plainly)


def test_run_all_stops_behind_an_error() -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(source)
        for source in (SETUP, "%%gpumem\nawait __import__('asyncio').sleep(0)\n{}['missing']\n", "print('reached')\n")
    ]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyError"):
        _client(notebook).execute(cleanup_kc=True)
    assert notebook.cells[2].execution_count is None
    assert notebook.cells[2].outputs == []


def test_a_syntax_error(kernel: Kernel) -> None:
    (error,) = outputs(kernel.fail("%%gpumem\nx = 1\ny = = 2\n"), "error")
    assert error.ename == "SyntaxError"
    text = plain("\n".join(error.traceback))
    assert "line 3" in text
    assert "magics.py" not in text


def test_a_wrong_flag(kernel: Kernel) -> None:
    cell = kernel.fail("%%gpumem --bad\n1\n")
    text = "".join(output.get("text", "") + "".join(output.get("traceback", [])) for output in cell.outputs)
    said, _, flags = plain(text).strip().partition("; there are ")
    assert said == "UsageError: %gpumem: unrecognized arguments: --bad"
    assert {"--plot", "--quiet", "--table"} <= set(flags.split(", "))


def test_an_interrupt(kernel: Kernel) -> None:
    cell = kernel.fail("%%gpumem\nimport os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    (error,) = outputs(cell, "error")
    assert error.ename == "KeyboardInterrupt"
    assert outputs(cell, "display_data")[0].data["text/plain"] == "<<report>>"
    cell = kernel.fail(
        "%%gpumem\nimport asyncio\nasyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)\n"
        "await asyncio.sleep(20)\n"
    )
    assert outputs(cell, "display_data")[0].data["text/plain"] == "<<report>>"
    assert outputs(kernel.run("session.open"), "execute_result")[0].data["text/plain"] == "False"
    assert outputs(kernel.run("%%gpumem -q\n3\n"), "execute_result")[0].data["text/plain"] == "3"
