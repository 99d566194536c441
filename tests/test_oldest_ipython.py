"""The magics' tests once more, on the oldest IPython that is supported: Colab's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
OLDEST = Path(sys.prefix) / "oldest-ipython"
VERSION = "7.34.0"

pytestmark = pytest.mark.skipif(not OLDEST.is_dir(), reason="`python3 dev.py test` installs IPython 7.34 for this test")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=HERE.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_it_is_that_version() -> None:
    assert run("-c", "import IPython; print(IPython.__version__)").stdout.strip() == VERSION


def test_the_magics_work_on_it() -> None:
    # What runs in no shell is the same on every IPython.
    files = [str(HERE / name) for name in ("test_magics.py", "test_cell.py", "test_first_road.py")]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bert_large and not trainer", *files)
    assert done.returncode == 0, done.stdout[-4000:]
