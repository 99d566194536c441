"""Runs one program on a virtual GPU, in a process of its own, and keeps the snapshots that it writes.

    python program.py CASE_AS_JSON FOLDER_FOR_SNAPSHOTS

Started by ``python benchmarks/recordings`` in the program's folder. Weights stay untouched: `torch.nn.init` does nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def main(case: dict[str, Any], kept: Path) -> None:
    for name in case.get("before_torch", ()):
        importlib.import_module(name)
    import torch

    from gpumem_magic.virtual import gpu

    for name, version in case.get("packages", {}).items():
        if importlib.metadata.version(name) != version:
            sys.exit(f"it needs {name} {version}")
    for name in dir(torch.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    # The script's folder, as Python has it, and those that the case names.
    own = [str(Path(case["script"]).parent.resolve())] if "script" in case else []
    sys.path[:0] = [*own, *(os.path.abspath(folder) for folder in case["path"])]
    _have_versions(case["path"])
    for name in case.get("stand_ins", ()):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock(name=name, __spec__=importlib.machinery.ModuleSpec(name, None))
    gpu.turn_on(case["device"])
    _keep_snapshots(kept, case.get("dump"))
    if case.get("trace"):
        _keep_profiles()
    sys.argv = [case.get("script", "entry"), *case.get("arguments", ())]
    if "entry" in case:
        exec(compile(case["entry"], "entry", "exec"), {"__name__": "__main__"})
        return
    runpy.run_path(case["script"], run_name="__main__")


def _have_versions(folders: list[str]) -> None:
    """A program that asks for the version of a package of its own gets one: it lies in these folders, and is not installed."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return installed(name)
        except importlib.metadata.PackageNotFoundError:
            if any(Path(folder, name.replace("-", "_")).exists() for folder in folders):
                return "0"
            raise

    importlib.metadata.version = version


def _keep_snapshots(kept: Path, last: int | None) -> None:
    """Copies each snapshot that is written, numbered in their order. The program ends after the last that is wanted."""
    import torch

    memory: Any = torch.cuda.memory
    take, dump = memory._snapshot, memory._dump_snapshot
    count = [0]

    def name() -> Path:
        count[0] += 1
        return kept / f"{count[0]:04}.pickle"

    def dump_snapshot(filename: Any = "dump_snapshot.pickle", *args: Any, **kwargs: Any) -> None:
        dump(filename, *args, **kwargs)
        shutil.copy(filename, name())
        if count[0] == last:
            sys.exit()

    def snapshot(*args: Any, **kwargs: Any) -> Any:
        import pickle

        found = take(*args, **kwargs)
        name().write_bytes(pickle.dumps(found))
        return found

    memory._dump_snapshot, memory._snapshot = dump_snapshot, snapshot


def _keep_profiles() -> None:
    """What the profiler would trace, as a snapshot for each time that it runs. It does not run itself."""
    import torch
    import torch.profiler as profilers

    memory: Any = torch.cuda.memory

    def start(profiler: Any) -> Any:
        memory._record_memory_history(None)
        memory._record_memory_history()
        return profiler

    def stop(profiler: Any, *error: Any) -> None:
        memory._dump_snapshot()
        memory._record_memory_history(None)

    base: Any = profilers.profiler._KinetoProfile
    base.prepare_trace, base.start_trace, base.stop_trace = lambda profiler: None, start, stop
    older: Any = torch.autograd.profiler.profile
    older.__enter__, older.__exit__ = start, stop
    for name in (
        "key_averages",
        "total_average",
        "events",
        "export_chrome_trace",
        "export_stacks",
        "export_memory_timeline",
    ):
        setattr(base, name, MagicMock())
        setattr(older, name, MagicMock())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
