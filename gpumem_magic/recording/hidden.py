"""What a recording can't look into: compiled code and replayed CUDA graphs. It is counted, so that a report can say so."""

from __future__ import annotations

import sys
from typing import Any

import torch

from gpumem_magic.looks.objects import attribute, name_of_class
from gpumem_magic.patching import Patches
from gpumem_magic.recording.model import CompiledCode
from gpumem_magic.units import counted


class Hidden:
    """Counts while a recording runs; `notes` says it in sentences."""

    def __init__(self) -> None:
        self._compiled = False
        self._graphs = False
        self._unseen = False
        self._passed_over = False
        self._captures = 0
        self._replays = 0

    def watch_graphs(self, patches: Patches) -> None:
        """Counts captures and replays. `torch.cuda.CUDAGraph` has these two names from 1.10 on."""
        graph = getattr(torch.cuda, "CUDAGraph", None)
        if graph is None or not callable(getattr(graph, "replay", None)):
            return
        replay, capture = graph.replay, graph.capture_begin

        def watched_replay(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self._replays += 1
            return replay(self_, *args, **kwargs)

        def watched_capture(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self._captures += 1
            return capture(self_, *args, **kwargs)

        patches.set(graph, "replay", watched_replay)
        patches.set(graph, "capture_begin", watched_capture)

    def compiled_graph(self) -> None:
        """What Inductor compiled is called."""
        self._graphs = True

    def eager(self, graphs: int) -> bool | None:
        """Whether nothing ran that was compiled; None where that is not known. graphs: how many the compiler took meanwhile."""
        if self._graphs:
            return False
        return None if graphs or self._compiled or self._unseen else True

    def forward_of(self, module: torch.nn.Module) -> None:
        """An outermost module that is called."""
        self._compiled = self._compiled or (name_of_class(type(module)) == "OptimizedModule" and not _forced_eager())

    def exists(self, module: torch.nn.Module) -> None:
        """A module of the notebook, called or not."""
        if attribute(module, "_compiled_call_impl") is not None:
            self._passed_over = self._passed_over or _is_pytorchs(module)
            self._unseen = self._unseen or not _is_pytorchs(module)

    def notes(self, compiled: CompiledCode) -> list[str]:
        found = []
        # (A model whose every function was given up is not.)
        if self._compiled and (self._graphs or compiled.graphs or not compiled.failed):
            found.append(
                "A compiled model ran: its compiler decides what is kept for backward and reuses buffers, and what happens "
                "inside it has no parts here."
            )
        if self._passed_over and self.eager(compiled.graphs):
            found.append(
                "`module.compile()` of PyTorch's own layers, such as `nn.TransformerEncoderLayer`, compiles nothing: the "
                "compiler passes over a call that begins in PyTorch's code. They ran eagerly; "
                "`torch.compile(module)` compiles them."
            )
        if self._unseen:
            found.append(
                "A module was compiled in place (`module.compile()`): its forward is not seen, so that what was born in it may "
                "be `unknown` or `temporaries`."
            )
        if self._captures or self._replays:
            captures, replays = counted(self._captures, "capture"), counted(self._replays, "replay")
            found.append(
                f"CUDA graphs ran ({captures}, {replays}). A replay allocates nothing: it works in the private pool that its "
                "capture took, and what lives there when is not seen."
            )
        return found


def _forced_eager() -> bool:
    """Whether `torch.compiler.set_stance` has said that compiled code runs eagerly (``values=real`` says so, too)."""
    # Not imported for the question: that costs seconds where nothing is compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(getattr(frames, "_stance", None), "stance", "") == "force_eager"


def _is_pytorchs(module: torch.nn.Module) -> bool:
    """Whether its forward and those of all modules in it are PyTorch's, which Dynamo compiles only within code of others."""
    return not any(
        "forward" in vars(one) or not str(getattr(type(one).forward, "__module__", "")).startswith("torch.")
        for one in module.modules()
    )
