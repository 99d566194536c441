"""`%gpumem_who` and `%gpumem_free`: what they say is what happens, and a user's variable is never touched."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

MIB = 1 << 20


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        run(shell, "%gpumem_device A100-40GB")
        run(shell, "import torch\ndef mib(n): return torch.empty(n << 18, device='cuda')")
        yield shell
        shell.user_ns.clear()
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        shell.run_line_magic("gpumem_device", "off")


def run(shell: Any, cell: str) -> str:
    """What a cell prints, as IPython shows it, errors too."""
    with capture_output(display=False) as captured:
        shell.run_cell(cell, store_history=True)
    return captured.stdout + captured.stderr


def allocated() -> int:
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    assert machine is not None
    machine.settle()
    return machine.devices[0].counters().allocated


def row(text: str, name: str) -> tuple[float, float]:
    """The two figures, in MiB, of the line about a holder."""
    (found,) = [line for line in text.splitlines() if re.search(rf"^\s*\S+\s+\S+\s+{re.escape(name)}( |$)", line)]
    left, right = found.split()[:2]
    return float(left), float(right)


def test_everybody_by_bytes_and_what_deleting_frees(shell: Any) -> None:
    run(shell, "a = mib(8)\nb = {'view': a[:2], 'own': mib(4)}\nc = [mib(2)]")
    text = run(shell, "%gpumem_who")
    assert text.startswith("14.0 MiB in 3 allocations")
    assert row(text, "a (Tensor)") == (8.0, 0.0)
    assert row(text, "b (dict)") == (4.0, 4.0)
    assert row(text, "c (list)") == (2.0, 2.0)
    assert "del a, b (frees 12.0)" in text
    before = allocated()
    run(shell, "del a, b")
    assert before - allocated() == 12 * MIB


def test_one_name(shell: Any) -> None:
    run(shell, "w = mib(8).requires_grad_()\nlosses = [w.exp().sum() for _ in range(3)]")
    text = run(shell, "%gpumem_who losses")
    assert "`del losses` frees 24.0 MiB." in text
    assert "Detaching frees 24.0 MiB: `losses = [one.detach() for one in losses]`." in text
    assert "result saved by exp" in text
    before = allocated()
    run(shell, "losses = [one.detach() for one in losses]")
    assert before - allocated() == 24 * MIB
    assert "graph of losses" not in run(shell, "%gpumem_who losses")


def test_a_part_of_a_variable(shell: Any) -> None:
    run(shell, "outputs = [mib(1), mib(2)]")
    text = run(shell, "%gpumem_who outputs[1]")
    assert text.startswith("outputs[1] keeps 2.0 MiB in 1 allocation.")


def test_a_part_keeps_the_graphs_of_its_tensors_and_alike_lines_are_one(shell: Any) -> None:
    run(
        shell,
        "class Probe: pass\nprobe = Probe()\nweight = mib(1).requires_grad_()\n"
        "probe.history = [(weight * mib(2)[: 1 << 18]).sum() for _ in range(5)]",
    )
    whole, part = run(shell, "%gpumem_who probe"), run(shell, "%gpumem_who probe.history")
    assert re.match(r"probe keeps (\S+ MiB in \d+ allocations)\.", whole)
    assert part.startswith(whole.partition("\n")[0].replace("probe", "probe.history"))
    assert re.search(r"^10\.0 +5 × graph of probe\.history\[0…4\]: \w+ saved by mul ", part, re.MULTILINE)


def test_a_cache_is_cleared_and_its_function_stays(shell: Any) -> None:
    run(shell, "import functools\n@functools.lru_cache\ndef made(n): return mib(n)\nmade(3), made(4);")
    text = run(shell, "%gpumem_who made")
    assert "`made.cache_clear()` frees 7.0 MiB." in text
    before = allocated()
    run(shell, "made.cache_clear()")
    assert before - allocated() == 7 * MIB
    # With something else in its hands, only the function's end lets go of all.
    run(shell, "@functools.lru_cache\ndef made(n, base=mib(1)): return mib(n)\nmade(3);")
    assert "`del made` frees 4.0 MiB." in run(shell, "%gpumem_who made")


def test_keys_of_names_and_numbers_are_shown_as_they_are_written(shell: Any) -> None:
    run(shell, "class Own(tuple):\n    def __repr__(self): 1 / 0\nkept = {('block0', 3): mib(1), Own((1, 2)): mib(2)}")
    text = run(shell, "%gpumem_who kept")
    assert "kept[('block0', 3)]" in text
    assert "kept[Own]" in text


def test_a_name_that_holds_nothing_is_one_clear_line(shell: Any) -> None:
    run(shell, "output = mib(1)")
    text = run(shell, "%gpumem_who outptu").strip()
    assert text.splitlines()[-1] == "UsageError: there is no variable outptu; did you mean output?"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%gpumem_who --nonsense", "%gpumem_who: unrecognized arguments: --nonsense"),
        ("%gpumem_who a b", "%gpumem_who: unrecognized arguments: b"),
        ("%gpumem_who 'a", "No closing quotation"),
        ("%gpumem_who --depth x", "argument --depth: 'x' is not a whole number of at least 1"),
        ("%gpumem_who --modules nobody", "no layer 'nobody'"),
        ("%gpumem_free model", "'model' is none of traceback, out, cycles, cache; a variable is freed with `del NAME`"),
    ],
)
def test_wrong_lines_are_one_clear_line(shell: Any, line: str, words: str) -> None:
    (text,) = run(shell, line).strip().splitlines()
    assert text.startswith("UsageError: ")
    assert words in text


def test_without_a_device_one_line_says_so(shell: Any) -> None:
    run(shell, "%gpumem_device off")
    for line in ("%gpumem_who", "%gpumem_free"):
        assert run(shell, line).strip() == "UsageError: no device is on: `%gpumem_device NAME` turns a virtual one on"


NET = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(512, 2048)
        self.out = nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.out(torch.nn.functional.gelu(self.fc(x)))
model = nn.Sequential(*[Block() for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(256, 512, device="cuda")
for step in range(2):
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


def test_layers_as_a_tree(shell: Any) -> None:
    run(shell, NET + "loss = model(x).mean()")
    text = run(shell, "%gpumem_who --modules")
    top = next(line for line in text.splitlines() if line.startswith("model"))
    # 6 x (2 x 512 x 2048 weights + 2560 biases) x 4 bytes
    assert top.split()[1:4] == ["48.1", "48.1", "96.1"]
    inner = next(line for line in text.splitlines() if "(each of " in line)
    assert inner.split("(each of ")[1].split()[1:4] == ["8.0", "8.0", "16.0"]
    deeper = run(shell, "%gpumem_who --modules model.0")
    assert deeper.splitlines()[1].split()[0] == "model.0"
    saved = next(line for line in deeper.splitlines() if line.split()[0] == "fc")
    # What gelu saved: 256 x 2048 x 4 bytes. The first linear's input is `x`, and the second one's belongs to `out`.
    assert saved.split()[4] == "2.0"


def test_gradients_are_promised_as_zero_grad_frees_them(shell: Any) -> None:
    run(shell, NET)
    text = run(shell, "%gpumem_who")
    assert "Gradients: 48.1 MiB; `optimizer.zero_grad()` frees 48.1 MiB." in text


def test_nothing_on_the_device(shell: Any) -> None:
    assert run(shell, "%gpumem_who").strip() == "Nothing is on the device."


# ---- free


def figures(text: str) -> tuple[str, str]:
    found = re.match(
        r"(?:(.+?) in|.+: no) tensors? (?:would be|was) freed.*, and (.+?) (?:would be|was) returned", text
    )
    assert found is not None, text
    return found[1], found[2]


SITUATIONS = [
    ("def f():\n    big = mib(30)\n    1 / 0\n", "f()", ""),
    ("", "mib(30)", "out"),
    ("", "mib(30)", "out cache"),
    ("class Node: pass\ndef make():\n    node = Node()\n    node.me, node.kept = node, mib(30)", "make()", ""),
    ("def f():\n    big = mib(30)\n    1 / 0\n", "f()", "traceback"),
    ("", "mib(30); None", "cache"),
]


@pytest.mark.parametrize(("setup", "cell", "words"), SITUATIONS)
def test_the_forecast_comes_true(shell: Any, setup: str, cell: str, words: str) -> None:
    gc.collect()
    gc.disable()
    try:
        run(shell, setup)
        run(shell, "kept = mib(4)")
        run(shell, cell)
        before = allocated()
        forecast = run(shell, f"%gpumem_free --dry-run {words}")
        assert allocated() == before
        done = run(shell, f"%gpumem_free {words}")
    finally:
        gc.enable()
    assert figures(forecast) == figures(done)
    assert ("has no name" in forecast) == ("has no name" in done) == (words == "traceback")
    assert allocated() in (before, 4 * MIB)
    assert "kept (4.0 MiB)" in done


def test_a_traceback_is_let_go_and_said(shell: Any) -> None:
    run(shell, "def f():\n    big = mib(30)\n    1 / 0\n")
    run(shell, "f()")
    text = run(shell, "%gpumem_who")
    assert "the last error's traceback (ZeroDivisionError, In [4])" in text
    assert figures(run(shell, "%gpumem_free")) == ("30.0 MiB", "30.0 MiB")
    assert allocated() == 0
    assert not hasattr(sys, "last_value")


def test_an_error_that_a_variable_holds_stays(shell: Any) -> None:
    run(shell, "def f():\n    big = mib(30)\n    1 / 0\ntry:\n    f()\nexcept Exception as error:\n    mine = error")
    text = run(shell, "%gpumem_free")
    assert allocated() == 30 * MIB
    assert "mine (30.0 MiB)" in text


def test_results_are_let_go_only_when_asked_and_never_a_variable(shell: Any) -> None:
    run(shell, "mib(10)")
    run(shell, "_9 = mib(2)\nfor _ in [mib(3)]: pass")
    text = run(shell, "%gpumem_free")
    assert "Results in Out are kept: `%gpumem_free out` releases them." in text
    assert allocated() == 15 * MIB
    run(shell, "%gpumem_free out")
    assert allocated() == 5 * MIB
    assert shell.user_ns["_9"].numel() == 2 << 18
    assert shell.user_ns["_"].numel() == 3 << 18
    assert shell.user_ns["_oh"] == {}
    run(shell, "41 + 1")
    assert shell.user_ns["_"].numel() == 3 << 18
    assert list(shell.user_ns["_oh"].values()) == [42]


def test_what_an_error_before_the_last_one_left_is_found_unasked(shell: Any) -> None:
    """Its frames hold themselves in a cycle, which no name leads to and Python has not collected yet."""
    run(shell, "def bad():\n    big = mib(64)\n    1 / 0")
    gc.disable()
    try:
        run(shell, "bad()")
        text = run(shell, "%gpumem_who")
        assert "the last error's traceback (ZeroDivisionError, In [" in text
        run(shell, "1 / 0")
        text = " ".join(run(shell, "%gpumem_who").split())
        assert "64.0 64.0 a reference cycle" in text
        assert "%gpumem_free cycles" in text
        assert "no name was found" not in text
        run(shell, "%gpumem_free cycles")
        assert allocated() == 0
    finally:
        gc.enable()
