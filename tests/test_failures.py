"""What is swallowed is counted, everywhere, and shown to who asks for it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_magic import failures

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"
BROAD = {"Exception", "BaseException"}
# Handlers that hand the error on without `raise`: as a value, to another function here, or to Python's own hook.
HANDED_ON = {
    ("recording/hook.py", "_failed"),
    ("patching.py", "failure"),
    ("commands/run.py", "excepthook"),
    ("snapshot/unpickle.py", "_refuse"),
    ("virtual/torch_face/saving.py", "error"),
    ("virtual/engine/mismatch.py", "hosts"),
    # Says what was swallowed, and counts it.
    ("session/launches.py", "_say"),
    # A callback's error is its own future's, as PyTorch has it.
    ("virtual/torch_face/futures.py", "set_exception"),
    # What a trial ends with is its result.
    ("trials/one_run.py", "place"),
    ("trials/cell_ranks.py", "place"),
}


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def accounts(handler: ast.ExceptHandler) -> bool:
    """Whether the error goes on, or is counted."""
    names = {node.id for node in ast.walk(handler) if isinstance(node, ast.Name)}
    return bool(names & {"swallows", "swallowed"}) or any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_no_broad_except_swallows_uncounted() -> None:
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and is_broad(node) and not accounts(node):
                words = {word.id for word in ast.walk(node) if isinstance(word, ast.Name)}
                words |= {word.attr for word in ast.walk(node) if isinstance(word, ast.Attribute)}
                if not any((name, word) in HANDED_ON for word in words):
                    silent.append(f"{name}:{node.lineno}")
        assert "suppress(Exception" not in text, name
        assert "suppress(BaseException" not in text, name
    assert silent == []


def test_each_is_counted_and_shown_the_first_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "SWALLOWED", failures.Counter())
    for debug in ("", "1", "1"):
        monkeypatch.setenv("GPUMEM_DEBUG", debug)
        with pytest.raises(ValueError, match="no way") as caught:
            int("no way")
        assert failures.swallows(caught.value)
    (kind,) = failures.SWALLOWED
    assert kind.startswith("ValueError at test_failures.py:")
    assert failures.SWALLOWED[kind] == 3
    assert capsys.readouterr().err == ""  # it had come before somebody asked
    failures.SWALLOWED.clear()
    failures.swallowed(KeyError("gone"))
    shown = capsys.readouterr().err
    assert shown.startswith("gpumem debug: swallowed:\n")
    assert "KeyError: 'gone'" in shown


def test_they_are_told_at_the_end() -> None:
    code = "from gpumem_magic import failures\nfor _ in range(3): failures.swallowed(OSError('x'))"
    for debug, told in (("1", "gpumem debug: 3 errors were swallowed: OSError: 3\n"), ("0", "")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "GPUMEM_DEBUG": debug},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stderr.endswith(told)
        assert bool(run.stderr) is (debug == "1")


def test_an_interrupt_is_not_swallowed() -> None:
    before = failures.SWALLOWED.copy()
    assert not failures.swallows(KeyboardInterrupt())
    assert not failures.swallows(None)
    assert before == failures.SWALLOWED
