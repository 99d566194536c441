"""Products whose sizes a card's kernels take slowly: Inductor times them padded, too, and takes the faster way.

Here nothing is timed. Those that a card would time are padded, which is what they are timed for: they are bound by computation,
and the kernels for rows that do not begin at multiples of 16 bytes are the slower ones. A published run whose peak tells the two
ways apart had padded them (`benchmarks/accuracy`, GPT-2 with 50,257 words). Which ones they are is kept, also for graphs from
the compiler's cache. After `torch/_inductor/fx_passes/pad_mm.py`, the same in 2.9 to 2.13.
"""

from __future__ import annotations

import importlib
from typing import Any

from gpumem_magic.patching import Patches

# What a compiled graph has beside its own attributes, and takes into the cache.
_UNTIMED = "gpumem_magic_untimed_products"


class Padding:
    """`untimed`: products of compiled graphs that a card would have timed, by sizes, strides and types."""

    def __init__(self) -> None:
        self.untimed: set[str] = set()
        self._since_a_graph: set[str] = set()

    def install(self, patches: Patches, compiled: Any) -> None:
        """compiled: the class of Inductor's compiled graphs."""
        padding = importlib.import_module("torch._inductor.fx_passes.pad_mm")
        plain = compiled.post_compile

        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> None:
            plain(graph, *args, **kwargs)
            self.untimed.update(vars(graph).get(_UNTIMED, ()))

        patches.set(compiled, "post_compile", post_compile)
        patches.set(padding, "has_triton", lambda: True)
        patches.set(padding, "get_cached_should_pad", self._padded)
        if (decided := getattr(padding, "_should_pad", None)) is not None:
            # Without the table on disk, where a card's own trials are kept (2.11 and newer).
            patches.set(padding, "_should_pad", getattr(decided, "__wrapped__", decided))

    def note(self, compiled: Any) -> None:
        """What was compiled of a graph has the products that were met since the graph before."""
        setattr(compiled, _UNTIMED, sorted(self._since_a_graph))
        self._since_a_graph.clear()

    def _padded(self, key: str) -> bool:
        """Asked in place of the table of earlier trials, when only a trial is left to decide."""
        self._since_a_graph.add(key)
        return True
