"""A notebook server on this computer and a headless Chromium in front of it, for tests. Nothing may leave the computer."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import warm

PATIENCE = 300_000  # milliseconds; a busy machine with two cores is slow, and a test that waits longer has failed
_LOCAL = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
)
_CURRENT = "const panel = window.jupyterapp.shell.currentWidget; const cells = panel.content.widgets;"
_PAPER = "() => getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"


@functools.cache
def chromium() -> str | None:
    """The browser's file, or None: the system's, or the one that Playwright brought."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is not None:
        return found
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            own = playwright.chromium.executable_path
        return own if Path(own).exists() else None
    except Exception:
        return None


def write_notebook(path: Path, cells: list[str]) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = [nbformat.v4.new_code_cell(text, id=f"cell-{number}") for number, text in enumerate(cells)]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), path)


class Server:
    """app: "lab" or "notebook"."""

    def __init__(self, app: str, folder: Path, own: Path) -> None:
        self.app = app
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self._log = own / "server.log"
        settings = own / "settings" / "@jupyterlab"
        for name, values in {
            # A cell that is out of sight must stay in the page.
            "notebook-extension/tracker": {"windowingMode": "none"},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        }.items():
            file = settings / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(values))
        kernel = own / "data" / "kernels" / "python3" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        command = [warm.executable(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
        root = Path(__file__).parents[1]
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(own / "config"),
            "JUPYTER_DATA_DIR": str(own / "data"),
            "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
            "IPYTHONDIR": str(own / "ipython"),
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            # What a kernel starts, too.
            warm.HANDED_ON: warm.executable(),
        }
        module, kind = {"lab": ("jupyterlab", "LabApp"), "notebook": ("notebook", "JupyterNotebookApp")}[app]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", module, "--no-browser", "--allow-root", "--ip=127.0.0.1",
                    f"--port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={folder}", f"--{kind}.expose_app_in_browser=True", "--LabApp.news_url=",
                ],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE / 1000
        request = urllib.request.Request(f"{self.base}/api/status", headers={"Authorization": f"token {self.token}"})
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).read()
                return
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the notebook server did not start:\n{self._log.read_text()[-3000:]}") from None
                time.sleep(0.2)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# What Jupyter's page says, without a stack, of its questions that a restarted kernel no longer answers.
_KERNEL_WENT = ("Canceled future for ", "Error: Canceled future for ")


class Notebook:
    """One open notebook, which lies in `folder`. strays: requests that would have left the computer; errors: the page's own."""

    def __init__(self, page: Any, server: Server, strays: list[str], folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.strays = strays
        self.errors: list[str] = []
        self._server = server
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", self._keep)

    def _keep(self, error: Any) -> None:
        """Errors of the server's own page (Notebook 7.6 has one whenever it opens) are not a widget's; extensions' count."""
        if str(error).startswith(_KERNEL_WENT):
            return
        frames = [line for line in (error.stack or "").splitlines() if line.strip().startswith("at ") and "://" in line]
        if not frames or not all("/static/lab/" in line or "/static/notebook/" in line for line in frames):
            self.errors.append(f"{error}\n{error.stack}")

    def open(self, name: str) -> None:
        place = "lab/tree" if self._server.app == "lab" else "notebooks"
        reset = "&reset" if self._server.app == "lab" else ""
        self.page.goto(f"{self._server.base}/{place}/{name}?token={self._server.token}{reset}")
        self.page.wait_for_function(
            "() => { const panel = window.jupyterapp?.shell?.currentWidget;"
            " return panel?.sessionContext?.session?.kernel?.status === 'idle' && panel.content?.widgets?.length > 0; }"
        )

    def run(self, cell: int) -> None:
        """Begins to run a cell, and does not wait for it."""
        self.page.evaluate(
            # Without the number of an earlier run: `wait_for` looks for the new one.
            "(n) => {" + _CURRENT + " cells[n].model.executionCount = null;"
            " panel.content.activeCellIndex = n; panel.content.deselectAll();"
            " window.jupyterapp.commands.execute('notebook:run-cell'); }",
            cell,
        )

    def is_busy(self, cell: int) -> bool:
        """The prompt says it; the kernel's status does not, as messages of widgets change that too."""
        return self.page.evaluate("(n) => {" + _CURRENT + " return cells[n].node.innerText.includes('[*]'); }", cell)

    def wait_for(self, cell: int) -> str:
        """Waits until a cell has run, and returns its text output. Raises AssertionError with the cell's own error."""
        self.page.wait_for_function(
            "(n) => {" + _CURRENT + " const model = cells[n].model;"
            " return model.executionCount != null && !cells[n].node.innerText.includes('[*]'); }",
            arg=cell,
            polling=200,
        )
        outputs = self.outputs(cell)
        failed = [output for output in outputs if output["output_type"] == "error"]
        assert not failed, "\n".join(failed[0]["traceback"])
        return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")

    def outputs(self, cell: int) -> list[dict[str, Any]]:
        return self.page.evaluate("(n) => {" + _CURRENT + " return cells[n].model.outputs.toJSON(); }", cell)

    def turn_dark(self) -> None:
        """Waits until the other theme's style sheet has taken the first one's place."""
        before = self.page.evaluate(_PAPER)
        self.page.evaluate(
            "() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})"
        )
        self.page.wait_for_function(
            f"(before) => document.body.dataset.jpThemeLight === 'false' && ({_PAPER})() && ({_PAPER})() !== before",
            arg=before,
        )

    def save(self) -> None:
        self.page.evaluate("async () => {" + _CURRENT + " await panel.context.save(); }")

    def comms(self) -> int:
        """How many comms the page's kernel connection has open."""
        return self.page.evaluate(
            "async () => {" + _CURRENT + " const reply = await panel.sessionContext.session.kernel.requestCommInfo({});"
            " return Object.keys(reply.content.comms).length; }"
        )


def eventually(page: Any, check: Callable[[], None]) -> None:
    """Until `check` raises no AssertionError: a page gets to what it shows a moment after what a test can wait for."""
    deadline = time.monotonic() + PATIENCE / 1000
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        page.wait_for_timeout(100)


@contextmanager
def serving(app: str, folder: Path, own: Path) -> Iterator[Server]:
    server = Server(app, folder, own)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@contextmanager
def browsing(executable: str, profile: Path, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """(a browser context, the requests that it kept from leaving the computer)."""
    from playwright.sync_api import sync_playwright

    strays: list[str] = []

    def guard(route: Any) -> None:
        if route.request.url.startswith(_LOCAL):
            route.continue_()
        else:
            strays.append(route.request.url)
            route.abort()

    options = {"viewport": {"width": 1100, "height": 1000}, **options}
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=executable, headless=True, args=list(_FLAGS), **options
        )
        context.route("**/*", guard)
        try:
            yield context, strays
        finally:
            context.close()


# Guidelines A and AA, which have contrast of at least 4.5:1 in them, and what is good practice besides.
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


def check_accessible(page: Any, selector: str) -> None:
    """Raises AssertionError with what axe-core finds in an element of a page, or of a frame. Loads nothing from elsewhere."""
    package = find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        return
    page.evaluate(Path(package.origin).with_name("axe.min.js").read_text("utf-8"))
    found = page.evaluate(
        "async ([selector, rules]) => { const found = await axe.run(selector, { runOnly: rules, iframes: false });"
        " return [found.passes.length, found.violations.map((one) => [one.id, one.help, ...one.nodes.slice(0, 3).map("
        "(node) => `${node.html.slice(0, 200)}: ${node.failureSummary}`)])]; }",
        [selector, _RULES],
    )
    passed, violations = found
    assert passed > 0
    assert violations == []
