"""What a program saves in a trial: a checkpoint goes into the trial's own folder and is loaded from there.

Else the user's own would be overwritten by one that nothing was computed for, or the next trial would find this one's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch


def keep_apart() -> None:
    """From now on, in a process that has no other program: nothing is put back."""
    # That there are zeros in them is meant here.
    warnings.filterwarnings("ignore", message=".* tensors on a virtual GPU", category=UserWarning)
    files = _OwnFiles()
    scripted: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
    for owner, name, save in ((torch, "save", True), (torch, "load", False), (torch.jit, "load", False)):
        setattr(owner, name, files.given(getattr(owner, name), int(save), save))
    scripted.save = files.given(scripted.save, 1, True)
    if importlib.util.find_spec("safetensors") is not None:
        module: Any = importlib.import_module("safetensors.torch")
        plain = getattr(module, "safe_open", None)
        if plain is None or not hasattr(module, "serialize_file"):
            return
        module.serialize_file = files.given(module.serialize_file, 1, True)
        opened = files.given(plain, 0, False)
        for other in list(sys.modules.values()):
            # Other libraries have its name already.
            if type(other) is type(sys) and vars(other).get("safe_open") is plain:
                vars(other)["safe_open"] = opened


class _OwnFiles:
    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def given(self, original: Callable[..., Any], place: int, saves: bool) -> Callable[..., Any]:
        """The function, which takes a file's name as this argument, with the name of the file in the trial's folder."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], self._own(args[place], saves), *args[place + 1 :])
            else:
                kwargs = {
                    name: self._own(value, saves) if name in ("f", "filename") else value
                    for name, value in kwargs.items()
                }
            return original(*args, **kwargs)

        return call

    def _own(self, file: Any, saves: bool) -> Any:
        if not isinstance(file, (str, os.PathLike)):
            return file
        path = os.path.realpath(os.fspath(file))
        if saves and path not in self._places and os.path.isdir(os.path.dirname(path)):
            self._places[path] = os.path.join(tempfile.gettempdir(), f"saved-{len(self._places)}")
        return self._places.get(path, file)
