"""Whose module's results a compiled graph returns, as Dynamo noted it, also where the graph comes from the compiler's cache.

The cache keeps the modules' paths; which modules have these now is known whenever Dynamo has made a graph. Alike modules share
one graph (`L['self'].norm` of each layer), so that a path is followed anew at each call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from gpumem_magic.looks.objects import locals_of
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# What a compiled graph has beside its own attributes, and takes into the cache.
_PATHS = "gpumem_magic_paths"
# The function's own module, and what is below it: ``L['self'].blocks.0``.
_OF_SELF = re.compile(r"L\['self'\]((?:\.\w+)*)")
# The compiler's frames between its graph and the function, with room for some more.
_MOST_FRAMES = 30


class Whose:
    """The modules of the graph that Dynamo made last, each by its path: their `id`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._modules: dict[str, int] = {}

    def install(self, patches: Patches, compiled: Any) -> None:
        """compiled: the class of Inductor's compiled graphs."""
        plain = compiled.post_compile

        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> None:
            plain(graph, *args, **kwargs)
            paths = vars(graph).get(_PATHS, ())
            modules = [self._modules.get(path, 0) for path in paths]
            if any(modules):
                below = [_OF_SELF.fullmatch(path) for path in paths]
                graph.current_callable = self._saying(
                    graph.current_callable, [(one, path and path[1]) for one, path in zip(modules, below, strict=True)]
                )

        patches.set(compiled, "post_compile", post_compile)

    def begins(self, graph: torch.fx.GraphModule) -> tuple[str, ...]:
        """Takes the modules of a graph of Dynamo's; their paths."""
        stacks = (stack for node in graph.graph.nodes for stack in _stack(node))
        self._modules = {path: int(name) for name, path in stacks if name.isdecimal()}
        return tuple(self._modules)

    @staticmethod
    def note(graph: torch.fx.GraphModule, compiled: Any) -> None:
        """What was compiled of a graph has the paths of its results' modules; "" where there is none."""
        outputs = graph.graph.output_node().args[0]
        stacks = [list(_stack(one)) for one in (outputs if isinstance(outputs, (list, tuple)) else ())]
        setattr(compiled, _PATHS, [stack[-1][1] if stack else "" for stack in stacks])

    def _saying(self, call: Callable[..., Any], modules: list[tuple[int, str | None]]) -> Callable[..., Any]:
        """Notes the results as their modules'. What passes through keeps the note that it has.

        modules: as it was when Dynamo made the graph, and its path below the function's own module, None where it has none."""
        at_first = {path: module for module, path in modules if module and path is not None}

        def called(inputs: Any) -> Any:
            results = call(inputs)
            now = _followed(at_first, sys._getframe(1)) if at_first else at_first
            for result, (module, path) in zip(results, modules, strict=False):
                if module and isinstance(result, VirtualTensor):
                    self._engine.made_by(result, module if path is None else now[path])
            return results

        return called


def _stack(node: Any) -> Iterator[tuple[str, str]]:
    """The modules that a node is of, outermost first: `id` and path."""
    if isinstance(node, torch.fx.Node) and node.op != "placeholder":
        for name, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
            yield str(name).partition("@")[0], path


def _followed(at_first: dict[str, int], frame: FrameType | None) -> dict[str, int]:
    """The modules that have these paths now: below the module of the innermost frame around that has them all."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        own = locals_of(frame).get("self")
        if isinstance(own, torch.nn.Module) and not isinstance(own, torch.fx.GraphModule):
            found = {path: _below(own, path) for path in at_first}
            if None not in found.values():
                return {path: id(module) for path, module in found.items()}
        frame = frame.f_back
    return at_first


def _below(module: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        module = None if module is None else module._modules.get(name)
    return module
