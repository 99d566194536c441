"""An object that is handed to listeners beside a value, and given back: whether the value may be in it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gpumem_magic.looks import decisions
from gpumem_magic.looks.decisions import chooses_a_way, ends_a_loop

_TRAINER = """
class Trainer:
    def train(self):
        for x in range(9):
            logs = {"loss": x.item()}
            self.control = self.handler.NAME(self.state, self.control, logs)
            if self.control.stop:
                break
"""
# What hands it on to all listeners, as they are.
_HANDLER = """
class Handler:
    def NAME(self, state, control, logs):
        control.told = False
        return self.deal("NAME", state, control, logs=logs)

    def deal(self, event, state, control, **more):
        for one in self.listeners:
            result = getattr(one, event)(state, control, **more)
            if result is not None:
                control = result
        return control

class Silent:
    def NAME(self, state, control, logs):
        '''For others to write anew.'''

class Later(Silent):
    def step(self, state, control):
        if state.step > 9:
            control.stop = True
"""
_NUMBER = itertools.count()


@pytest.fixture
def name() -> str:
    """A method that no other test defines, as classes live until they are collected."""
    return f"on_told_{next(_NUMBER)}"


@pytest.fixture
def decides(tmp_path: Path, name: str) -> Callable[[str], bool]:
    alive: list[ModuleType] = []

    def asked(listeners: str) -> bool:
        place = tmp_path / f"listeners_{name}.py"
        place.write_text((_HANDLER + listeners).replace("NAME", name), "utf-8")
        spec = importlib.util.spec_from_file_location(place.stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        alive.append(module)
        trainer = tmp_path / "trainer.py"
        trainer.write_text(_TRAINER.replace("NAME", name), "utf-8")
        decisions.forget()
        return ends_a_loop(str(trainer), 5)

    return asked


@pytest.mark.parametrize(
    "listeners",
    [
        # Nobody but those that do nothing.
        "",
        # It is shown, and kept.
        "class Shows:\n    def NAME(self, state, control, logs):\n        if state.on:\n            self.bar.write(str(logs))\n"
        "        self.last = logs\n",
        # Somebody else stops, who is not told.
        "class Stops:\n    def step(self, state, control):\n        control.stop = state.step > 9\n",
        # Another way to do nothing.
        "class Passes:\n    def NAME(self, state, control, logs):\n        pass\n",
        # An error by what was not told.
        "class Strict:\n    def begin(self, state, control):\n        if self.wrong:\n            raise ValueError\n"
        "    def NAME(self, state, control, logs):\n        print(logs)\n",
    ],
)  # fmt: skip
def test_what_listeners_only_show_decides_nothing(decides: Callable[[str], bool], listeners: str) -> None:
    assert not decides(listeners)


_TELLS = "class Tells:\n    def NAME(self, state, control, logs):\n"


@pytest.mark.parametrize(
    "listeners",
    [
        # It stops by the value, or gives back something that does.
        _TELLS + "        if logs['loss'] < 1:\n            control.stop = True\n",
        _TELLS + "        control.stop = logs['loss'] < 1\n",
        _TELLS + "        control['stop'] = logs['loss'] < 1\n",
        _TELLS + "        return Control(logs['loss'] < 1)\n",
        _TELLS + "        control = Control(logs['loss'] < 1)\n        return control\n",
        _TELLS + "        self.other(control)\n    def other(self, control):\n        control.stop = self.low\n",
        _TELLS + "        set_stop(control, logs)\n",
        _TELLS + "        setattr(control, 'stop', logs['loss'] < 1)\n",
        _TELLS + "        one = control\n        one.stop = logs['loss'] < 1\n",
        _TELLS + "        self.trainer.control.stop = logs['loss'] < 1\n",
        _TELLS + "        state.limit = logs['loss']\n",
        _TELLS + "        if logs['loss'] < 1:\n            raise StopIteration\n",
        # It keeps the value, and another of its methods, or an heir's, goes by it.
        _TELLS + "        self.loss = logs['loss']\n"
        "    def step(self, state, control):\n        if self.loss < 1:\n            control.stop = True\n",
        _TELLS + "        self.losses.append(logs['loss'])\n"
        "class Heir(Tells):\n    def step(self, state, control):\n        control.stop = self.losses[-1] < 1\n",
        _TELLS + "        self.loss = logs['loss']\n"
        "    def step(self, state, control):\n        if self.loss < 1:\n            raise StopIteration\n",
    ],
)  # fmt: skip
def test_what_a_listener_goes_by_decides(decides: Callable[[str], bool], listeners: str) -> None:
    assert decides(listeners)


def test_where_no_listener_is_known_or_a_function_has_the_name_the_value_decides(tmp_path: Path, name: str) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(_TRAINER.replace("NAME", name), "utf-8")
    assert ends_a_loop(str(trainer), 5)
    # (`update` is a method of many classes and a function of some modules.)
    trainer.write_text(_TRAINER.replace("NAME", "main"), "utf-8")
    assert ends_a_loop(str(trainer), 5)


@pytest.mark.parametrize(
    ("code", "chooses"),
    [
        # Where a tensor lies, and how, says nothing of its values.
        ("y = x.cpu()\nif y.device.type == 'cpu':\n    train(y)\n", False),
        ("y = x.cpu()\nif y.dtype.is_floating_point:\n    train(y)\n", False),
        ("y = x.cpu()\nat = y.data_ptr()\nif at == 0:\n    train(y)\n", False),
        ("y = x.cpu()\nif y.untyped_storage().data_ptr() != at:\n    train(y)\n", False),
        ("y = x.cpu()\nif y.type == 2:\n    train(y)\n", True),
        ("y = x.cpu()\nif y.data[0] == 2:\n    train(y)\n", True),
    ],
)  # fmt: skip
def test_what_asks_where_a_tensor_lies_goes_by_no_value(tmp_path: Path, code: str, chooses: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert chooses_a_way(str(place), 1) is chooses
