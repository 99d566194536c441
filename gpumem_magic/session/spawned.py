"""What a rank runs that a measured program starts afresh, in the place of `multiprocessing.spawn.spawn_main`."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumem_magic.failures import swallowed
from gpumem_magic.patching import Patches
from gpumem_magic.session import device as choosing
from gpumem_magic.session.launches import as_rank, replace_wrap
from gpumem_magic.session.rank_process import RankProcess
from gpumem_magic.session.recording import open_recording


def main(device: str | None, folder: str, count: int, **pipe: Any) -> None:
    """device: the virtual devices, which are there before any of the program's modules. Leaves by SystemExit."""

    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        def wrap(function: Any, number: int, args: Any, error_file: Any) -> None:
            rank = RankProcess(Path(folder), number, number, count)
            as_rank(rank, open_recording, lambda: original(function, number, args, error_file))

        return wrap

    try:
        if device is not None:
            choosing.choose(device)
        replace_wrap(Patches(), wrapped)
    except Exception as error:
        print(f"gpumem: measuring is not possible here ({swallowed(error).splitlines()[0]})", file=sys.stderr)
    multiprocessing.spawn.spawn_main(**pipe)
