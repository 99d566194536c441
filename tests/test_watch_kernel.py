"""The watch in real kernels: what is published, what is open, and what is left when the kernel goes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("anywidget", reason="the live chart needs anywidget")

from jupyter_client.manager import AsyncKernelManager, KernelManager  # noqa: E402

PATIENCE = 300.0
SETUP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
%load_ext gpumem_magic
%gpumem_device T4
import comm, threading, torch, gpumem_magic
def state():
    threads = sum(thread.name == "gpumem-watch" for thread in threading.enumerate())
    return threads, len(comm.get_comm_manager().comms)
"""
TRAIN = "%%gpumem -q\nkept = torch.zeros(1 << 22, device='cuda')\nother = torch.zeros(1 << 20, device='cuda')"


class Kernel:
    """A kernel with somebody in front of it: messages of widgets go out, and input could be asked for."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = warm.executable()
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.heard: list[dict[str, Any]] = []

    def run(self, source: str) -> str:
        """Runs a cell and returns its value as text. Raises AssertionError with the cell's own error."""
        return self.result(self.client.execute(source))

    def result(self, request: str, *, fails: bool = False) -> str:
        value = ""
        while True:
            message = self.next()
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "execute_result":
                value = content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                assert fails, "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return value

    def next(self) -> dict[str, Any]:
        message: dict[str, Any] = self.client.get_iopub_msg(timeout=PATIENCE)
        self.heard.append(message)
        return message

    def wait_for(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if true(message := self.next()):
                return message
        pytest.fail("it never came")

    def shown(self, kind: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.heard if message["msg_type"] == kind]

    def stop(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    try:
        made.run(SETUP)
        yield made
    finally:
        made.stop()


def is_rows(message: dict[str, Any]) -> bool:
    data = message["content"].get("data", {})
    return message["msg_type"] == "comm_msg" and data.get("method") == "custom" and data["content"]["k"] == "rows"


def is_mark(message: dict[str, Any], label: str) -> bool:
    return is_rows(message) and label in [mark["label"] for mark in message["content"]["data"]["content"].get("m", ())]


def test_one_thread_or_none_and_no_comm_left_behind(kernel: Kernel) -> None:
    for _ in range(3):
        kernel.run("%gpumem_watch --hz 20")
        assert kernel.run("state()") == "(1, 2)", "a widget and its layout"
    kernel.run("%load_ext gpumem_magic")
    assert kernel.run("state()") == "(1, 2)"
    kernel.run("%reload_ext gpumem_magic\n%gpumem_device T4")
    assert kernel.run("state()") == "(0, 0)"
    kernel.run("%gpumem_watch --static")
    assert kernel.run("state()") == "(1, 0)"
    kernel.run("%gpumem_watch stop")
    assert kernel.run("state()") == "(0, 0)"
    # Each left its picture where its live view was.
    left = kernel.shown("update_display_data")
    identities = [content["transient"]["display_id"] for content in kernel.shown("display_data")]
    assert len(set(identities)) == 4
    for identity in identities:
        last = [content for content in left if content["transient"]["display_id"] == identity][-1]
        assert set(last["data"]) == {"text/html", "text/plain"}
        assert "GPU memory, watched" in last["data"]["text/plain"]


def test_rows_and_marks_come_while_the_cell_runs_and_after_an_interrupt(kernel: Kernel) -> None:
    kernel.run("%gpumem_watch --hz 20")
    request = kernel.client.execute(
        "%%gpumem -q\nkept = torch.zeros(1 << 22, device='cuda')\nimport time\nwhile True:\n    time.sleep(0.01)"
    )
    kernel.wait_for(lambda message: is_mark(message, "time.sleep(0.01)"))
    for _ in range(3):
        kernel.wait_for(is_rows)
    kernel.manager.interrupt_kernel()
    kernel.result(request, fails=True)
    errors = kernel.shown("error")
    assert [error["ename"] for error in errors] == ["KeyboardInterrupt"]
    assert kernel.run("state()") == "(1, 2)"
    kernel.run("%gpumem_watch mark here\nkept = None")
    if not any(is_mark(message, "here") for message in kernel.heard):
        kernel.wait_for(lambda message: is_mark(message, "here"))
    kernel.run("%gpumem_watch stop")
    assert kernel.run("state()") == "(0, 0)"
    assert kernel.run("len(gpumem_magic.last_watch().devices), gpumem_magic.last_watch().notes") == "(1, ())"


def test_a_kernel_that_is_shut_down_leaves_the_picture(kernel: Kernel) -> None:
    kernel.run("%gpumem_watch --hz 20")
    kernel.run(TRAIN)
    # The picture so far, for a kernel that is killed.
    soon = kernel.shown("update_display_data")[-1]["data"]["text/html"]
    assert "data:image/svg+xml;base64," in soon
    assert "gpumem-place" in soon
    kernel.wait_for(is_rows)
    kernel.client.shutdown()
    try:
        left = kernel.wait_for(lambda message: message["msg_type"] == "update_display_data")
    except queue.Empty:
        pytest.fail("no picture came")
    assert "data:image/png;base64," in left["content"]["data"]["text/html"]


def test_a_kernel_that_is_restarted_has_no_watch(kernel: Kernel) -> None:
    kernel.run("%gpumem_watch")
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=PATIENCE)
    kernel.run(SETUP)
    assert kernel.run("state(), gpumem_magic.last_watch()") == "((0, 0), None)"


# ---- where nobody looks on


def executed(*sources: str) -> Any:
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = warm.executable()
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, km=manager, timeout=PATIENCE, allow_errors=True).execute(cleanup_kc=True)
    return notebook


@pytest.mark.parametrize("end", [("%gpumem_watch stop",), ()])
def test_a_notebook_that_a_program_runs_gets_the_summary_alone(end: tuple[str, ...]) -> None:
    notebook = executed(SETUP, "%gpumem_watch --hz 20", TRAIN, *end)
    (shown,) = notebook.cells[1].outputs
    assert set(shown.data) == {"text/html", "text/plain"}
    assert "data:image/png;base64," in shown.data["text/html"]
    assert "peak allocated 20.0 MiB" in shown.data["text/plain"]
    assert notebook.metadata.get("widgets") is None
    for cell in notebook.cells[2:]:
        assert not cell.outputs
