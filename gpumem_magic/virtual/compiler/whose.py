"""Whose module's results a compiled graph returns, as Dynamo noted it, also where the graph comes from the compiler's cache.

The cache keeps the modules' paths; which modules have these now is known whenever Dynamo has made a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# What a compiled graph has beside its own attributes, and takes into the cache.
_PATHS = "gpumem_magic_paths"


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
            modules = [self._modules.get(path, 0) for path in vars(graph).get(_PATHS, ())]
            if any(modules):
                graph.current_callable = self._saying(graph.current_callable, modules)

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

    def _saying(self, call: Callable[..., Any], modules: list[int]) -> Callable[..., Any]:
        """Notes the results as their modules'. What passes through keeps the note that it has."""

        def called(inputs: Any) -> Any:
            results = call(inputs)
            for result, module in zip(results, modules, strict=False):
                if module and isinstance(result, VirtualTensor):
                    self._engine.made_by(result, module)
            return results

        return called


def _stack(node: Any) -> Iterator[tuple[str, str]]:
    """The modules that a node is of, outermost first: `id` and path."""
    if isinstance(node, torch.fx.Node) and node.op != "placeholder":
        for name, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
            yield str(name).partition("@")[0], path
