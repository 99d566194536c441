"""The fuzzers of `differential` see what they are there to see, and a small sample of what they do at length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "differential"))

import random

import generate
from compare import differences
from run import Case, Kind, Zygote

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "pidfd_open"), reason="forks and waits as only Linux can")

# Each line does something that a measuring must not; where it is to be seen.
SPOILT = {
    "x = 2": "/shell/namespace/x",
    "y = 1": "/shell/namespace/keys",
    "print('more')": "/cells/0/shown",
    "import warnings; warnings.warn('one')": "/cells/0/shown",
    "import this_is_nowhere": "/cells/0/error_in_exec",
    "import wave": "/interpreter/modules/new",
    "import signal; signal.signal(signal.SIGUSR1, print)": "/interpreter/signals",
    "import sys; sys.setprofile(lambda *a: None)": "/interpreter/profile",
    "import sys; sys.settrace(lambda *a: None)": "/interpreter/trace",
    "import builtins; builtins.len = lambda x: 3": "/interpreter/builtins/other",
    "import os; os.environ['MORE'] = '1'": "/interpreter/environment/new",
    "open('more.txt', 'w').close()": "/files/more.txt",
    "import torch; torch.cuda.synchronize = print": "/interpreter/torch's attributes/other",
    "import random; random.random()": "/interpreter/random",
    "import torch; torch.rand(1)": "/interpreter/torch/random",
    "import torch; torch.overrides.TorchFunctionMode().__enter__()": "/interpreter/torch/function modes",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "/interpreter/threads",
    "import os; os.write(1, b'more')": "/written to stdout",
    "import gc; gc.disable()": "/interpreter/gc",
    "get_ipython().events.register('post_run_cell', print)": "/shell/events/post_run_cell",
    "del In": "/shell/missing",
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(Kind(sys.executable, device="T4"))
    yield zygote
    zygote.close()


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_a_cell_does_is_seen(zygote: Zygote, spoilt: str) -> None:
    plain = zygote.run(Case("plain", ["x = 1"]), "plain")
    other = zygote.run(Case("spoilt", [f"x = 1; {spoilt}"]), "plain")
    assert any(one.place.startswith(SPOILT[spoilt]) for one in differences(plain, other))


def test_two_plain_runs_are_alike(zygote: Zygote) -> None:
    for number in range(3):
        case = Case("generated", [generate.cell(random.Random(number))], [generate.PRELUDE])
        assert not differences(zygote.run(case, "plain"), zygote.run(case, "plain")), number
