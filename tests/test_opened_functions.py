"""A script's own functions, opened: which they are, what is told of them, and that nobody else sees it."""

from __future__ import annotations

import ast
import json
import subprocess
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from hypothesis import HealthCheck, given, settings
from test_cell import _MANAGER, _bodies
from test_resting_loops import Still

from gpumem_magic.recording import hook
from gpumem_magic.recording.functions import opened_functions
from gpumem_magic.recording.instrument import Statement
from gpumem_magic.recording.script import ScriptRun, as_main, main_of


class Told:
    """Keeps what is told: ``label iteration``."""

    devices: Still | None = None

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.loops: list[tuple[int, ...]] = []

    def before_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None: ...

    def after_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        if statement.kind != "def" and (not statement.header or statement.ended):
            self.rows.append(f"{statement.label} {'.'.join(map(str, iteration))}".strip())
            self.loops.append(loops)

    def wants_stop(self, loop: Statement, iteration: tuple[int, ...]) -> bool:
        return False


Run = Callable[..., tuple[Told | None, dict[str, Any], str, ScriptRun]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def running(
        text: str, opens: bool = True, observed: bool = True
    ) -> tuple[Told | None, dict[str, Any], str, ScriptRun]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        script, told, error = ScriptRun(str(path)), Told() if observed else None, ""
        if told is not None:
            script.observe(told, opens=opens)
        with as_main(main_of(str(path)), []) as main:
            try:
                script.run(main)
            except BaseException as raised:
                running.failed = script.failed(raised.__traceback__)  # type: ignore[attr-defined]
                error = "".join(
                    traceback.format_exception(type(raised), raised, script.own_frames(raised.__traceback__))
                )
        assert script.hook_failure is None
        return told, dict(vars(main)), error, script

    return running


TRAINING = """
def train(model, batches):
    '''One epoch.'''
    for batch in batches:
        seen.append(batch)
    return len(seen)

def evaluate(model):
    return helper(model)

def helper(model):
    return model

def main():
    seen.clear()
    for epoch in range(2):
        train("net", "ab")
        evaluate("net")
    return seen

seen = []
if __name__ == "__main__":
    main()
"""


def test_the_statements_of_functions_are_told_with_the_loops_around_their_calls(run: Run) -> None:
    told, _, _, _ = run(TRAINING)
    assert told is not None
    assert told.rows == [
        "seen = []",
        "main: seen.clear()",
        *(
            row
            for epoch in (1, 2)
            for row in (
                f"train: seen.append(batch) {epoch}.1",
                f"train: seen.append(batch) {epoch}.2",
                f"train: return len(seen) {epoch}",
                f'main: end of train("net", "ab") {epoch}',
                # It has no loop, and is called in one.
                f'main: evaluate("net") {epoch}',
            )
        ),
        "main: return seen",
        "end of main()",
    ]
    assert told.loops[2] == (16, 4)
    assert run(TRAINING, opens=False)[0].rows == ["seen = []", "main()"]  # type: ignore[union-attr]


def test_what_an_error_left_has_a_row_also_in_a_function_that_was_opened(run: Run) -> None:
    text = """
    def train(n):
        for k in (1, n):
            kept = 1 / k
        return kept
    def main():
        for n in (0, 1):
            try:
                train(n)
            except ZeroDivisionError:
                again = True
        with contextlib.suppress(KeyError):
            {}[1]
    main()
    """
    told = run(f"import contextlib\n{textwrap.dedent(text)}")[0]
    assert told is not None
    assert told.rows == [
        "import contextlib",
        "train: kept = 1 / k 1.1",
        "train: kept = 1 / k 1.2",
        "main: again = True 1",
        "train: kept = 1 / k 2.1",
        "train: kept = 1 / k 2.2",
        "train: return kept 2",
        "main: end of train(n) 2",
        "main: {}[1]",
        "end of main()",
    ]
    # Nobody caught it: it is told once, as what failed.
    told = run("def train(n):\n    for k in (1, n):\n        kept = 1 / k\ntrain(0)\n")[0]
    assert told is not None
    assert told.rows == ["train: kept = 1 / k 1"]


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("def main(): pass\nmain()", {"main"}),
        ("def main(): pass\nfire.Fire(main)", {"main"}),
        ("def main(): pass\nraise SystemExit(main())", {"main"}),
        ("@hydra.main(config_path=None)\ndef main(cfg): pass\nmain()", {"main"}),
        ("@torch.no_grad()\ndef score(): pass\nscore()", {"score"}),
        ("class Trainer:\n  def fit(self): pass\nTrainer().fit()", {"Trainer.fit"}),
        # Handed on as values: somebody may look at the code, or run it elsewhere.
        ("def step(x): pass\nfast = torch.compile(step)\nstep(1)", set()),
        ("def step(x): pass\nfast = partial(step, 1)\nfast()", set()),
        ("@torch.compile\ndef step(x): pass\nstep(1)", set()),
        ("def step(x): pass\ndef outer(): step(1)\nfast = torch.compile(outer)\nfast()\nstep(1)", set()),
        ("def step(x): pass\ncall = lambda: step(1)\ncall()", set()),
        # Called by what is not told.
        ("class Net:\n  def forward(self): help()\ndef help(): pass\nNet()()", set()),
        # Suspended, or awaited.
        ("def batches():\n  yield 1\nfor x in batches(): pass", set()),
        ("async def main(): pass\nasyncio.run(main())", set()),
        # Called in a loop, with none inside.
        ("def step(x): pass\nfor x in y: step(x)", set()),
        ("def never(): pass", set()),
    ],
)
def test_which_are_opened(text: str, opened: set[str]) -> None:
    assert set(opened_functions(ast.parse(text)).values()) == opened


PROGRAMS = {
    "globals": "total = 0\ndef main():\n  global total\n  for i in range(3):\n    total += i\n  return total\nvalue = main()",
    "nothing given back": "def main():\n  for i in range(2):\n    if i: return\nvalue = main()",
    "only a text": "def main():\n  'a text'\nvalue = main(), globals()['main'].__doc__",
    "caught": "def main():\n  try:\n    1 / 0\n  except ValueError as e:\n    return e\n  finally:\n    print(1)\nvalue = main()",
    "again in itself": "def count(n):\n  for _ in range(1):\n    pass\n  return n and 1 + count(n - 1)\nvalue = count(9)",
    "closures": "def main(n):\n  def inner():\n    return n\n  for n in range(3):\n    pass\n  return inner()\nvalue = main(5)",
    "its own variables": "def main(a, b=2):\n  for c in range(2):\n    pass\n  return sorted(locals())\nvalue = main(1)",
    "super": "class A:\n  def f(self): return 1\nclass B(A):\n  def f(self):\n    return super().f() + 1\nvalue = B().f()",
    "an error": "def main():\n  for i in range(3):\n    deep(2 - i)\ndef deep(x):\n  for _ in range(1):\n    y = 1 / x\nmain()",
    "an error while it is handled": "def main():\n  try:\n    1 / 0\n  finally:\n    len(3)\nmain()",
    "left by exit": "import sys\ndef main():\n  with open(__file__):\n    sys.exit(3)\nmain()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_did(run: Run, name: str) -> None:
    _, plain, error, _ = run(PROGRAMS[name], observed=False)
    _, measured, same_error, _ = run(PROGRAMS[name])
    assert measured.get("value") == plain.get("value")
    assert same_error == error
    assert opened_functions(ast.parse(PROGRAMS[name]))


def _text_and_loops(failed: Any) -> Any:
    return failed[0], *failed[2:]


def test_an_error_is_where_it_was_raised(run: Run) -> None:
    run(PROGRAMS["an error"])
    assert _text_and_loops(run.failed) == ("y = 1 / x", (3, 1), (2, 5))  # type: ignore[attr-defined]


def test_an_error_in_a_call_that_was_not_told_is_the_calls(run: Run) -> None:
    run("def count(n):\n  for _ in range(1):\n    pass\n  return 1 / n + count(n - 1)\ncount(2)")
    assert _text_and_loops(run.failed) == ("return 1 / n + count(n - 1)", (), ())  # type: ignore[attr-defined]


def test_another_threads_calls_are_not_told(run: Run) -> None:
    told, names, _, _ = run(
        """
        import threading
        def main():
            for i in range(2):
                seen.append(threading.get_ident())
        seen = []
        main()
        threads = [threading.Thread(target=lambda: exec("main()", globals())) for _ in range(2)]
        for one in threads:
            one.start()
            one.join()
        """
    )
    assert told is not None
    assert [row for row in told.rows if row.startswith("main:")] == [
        "main: seen.append(threading.get_ident()) 1",
        "main: seen.append(threading.get_ident()) 2",
    ]
    assert names["seen"].count(threading.get_ident()) == 2
    assert len(names["seen"]) == 6


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies)
def test_any_program_means_the_same_in_a_function(run: Run, body: list[str]) -> None:
    lines = "n, t, u, turns = 1, [], 0, iter([1] * 9)\n" + "\n".join(body) + "\nreturn n, t"
    text = f"{_MANAGER}def main():\n{textwrap.indent(lines, '    ')}\nvalue = main()\n"
    _, plain, error, _ = run(text, observed=False)
    with pytest.MonkeyPatch.context() as patches:
        for quiet in (hook.QUIET_TURNS, 0):
            patches.setattr(hook, "QUIET_TURNS", quiet)
            patches.setattr(hook, "QUIET_STATEMENTS", quiet)
            patches.setattr(Told, "devices", Still())
            _, measured, same_error, _ = run(text)
            assert (measured.get("value"), same_error) == (plain.get("value"), error)


def test_what_moves_in_a_loop_that_rests_has_its_row(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch

            def main():
                kept = []
                for i in range(3000):
                    if i == 2500:
                        kept.append(torch.ones(1 << 20, device="cuda"))
                work(kept)

            def work(kept):
                for i in range(3000):
                    if i % 1000 == 700:
                        kept.append(torch.ones(1 << 20, device="cuda"))
                raise ValueError(kept)

            main()
            """
        )
    )
    out = tmp_path / "out.json"
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic.cli", "run", "--device", "T4", "--json", str(out), str(path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    rows = json.loads(out.read_text())["checkpoints"]
    before, moved = 0, []
    for row in rows:
        if row["allocated"] != before:
            moved.append((row["label"], tuple(row["iteration"]), row["allocated"] >> 20))
        before = row["allocated"]
    keep = 'kept.append(torch.ones(1 << 20, device="cuda"))'
    assert moved == [
        (f"main: {keep}", (2501,), 4),
        (f"work: {keep}", (701,), 8),
        (f"work: {keep}", (1701,), 12),
        (f"work: {keep}", (2701,), 16),
    ]
    assert [row["line"] for row in rows if row["kind"] == "error"] == [15]


@pytest.mark.parametrize(
    ("body", "causes"),
    [
        (
            "    outputs = []\n    for x in batches:\n        outputs.append(net(x))\n    return torch.cat(outputs).argmax(1)",
            ["growth"],
        ),
        (
            "    outputs = []\n    for x in batches:\n        outputs.append(net(x))\n    torch.cat(outputs).sum().backward()",
            [],
        ),
        (
            "    outputs = []\n    for x in batches:\n        outputs.append(net(x).argmax(1).cpu())\n    return outputs",
            [],
        ),
    ],
)
def test_what_a_function_gathers_until_it_ends_is_a_cause(tmp_path: Path, body: str, causes: list[str]) -> None:
    path, out = tmp_path / "train.py", tmp_path / "out.json"
    path.write_text(
        "import torch\n"
        f"def evaluate(net, batches):\n{body}\n"
        "def main():\n"
        "    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).cuda()\n"
        "    batches = [torch.randn(1024, 1024, device='cuda') for _ in range(6)]\n"
        "    for _ in range(2):\n"
        "        evaluate(net, batches)\n"
        "main()\n"
    )
    command = [warm.executable(), "-m", "gpumem_magic.cli", "run", "--device", "T4", "--json", str(out), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())["causes"]
    assert [one["name"] for one in found if one["name"] == "growth"] == causes, done.stderr
    if causes:
        assert "`evaluate(net, batches)` (line 11) lets go of it only as it ends" in done.stderr.replace("\n  ", " ")


@pytest.mark.parametrize(("trials", "garbage"), [(1, []), (3, [2 * 32])])
def test_a_cycle_blames_a_script_for_what_was_garbage_at_its_peak(
    tmp_path: Path, trials: int, garbage: list[int]
) -> None:
    """Models that refer to themselves, as those of PyTorch's FSDP do: the last one is in use at the peak."""
    path, out = tmp_path / "train.py", tmp_path / "out.json"
    path.write_text(
        "import gc, torch\n"
        "def train():\n"
        "    model = torch.nn.Linear(2048, 4096, bias=False).cuda()\n"
        "    model.me = [model]\n"
        "    for _ in range(2):\n"
        "        model(torch.randn(64, 2048, device='cuda')).sum().backward()\n"
        "        model.zero_grad()\n"
        "def main():\n"
        f"    for _ in range({trials}):\n"
        "        train()\n"
        "gc.disable()\n"
        "main()\n"
    )
    command = [warm.executable(), "-m", "gpumem_magic.cli", "run", "--device", "T4", "--json", str(out), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    report = json.loads(out.read_text())
    assert [one["bytes"] >> 20 for one in report["causes"] if one["name"] == "reference_cycle"] == garbage
    if not garbage:
        assert "cycle" not in report["answer"] + str(report["peak"]["tensors"])
