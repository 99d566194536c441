"""Whose module's results a compiled graph returns, as Dynamo noted it, also where the graph comes from the compiler's cache.

The cache keeps the modules' paths; which modules have these now is known whenever Dynamo has made a graph. Alike modules share
one graph (`L['self'].norm` of each layer, `L['fn'].0` of each model), so that a path is followed anew at each call.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from gpumem_magic.looks.objects import locals_of, name_of_class
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# What a compiled graph has beside its own attributes, and takes into the cache.
_PATHS = "gpumem_magic_paths"
# A variable of the compiled function's, or a global one, and what is below it: ``L['self'].blocks.0``.
_PATH = re.compile(r"([LG])\['(\w+)'\]((?:\.\w+)*)")
_Path = tuple[str, str, str]
# A step below a module as PyTorch 2.9 writes it, where later ones have ``.0``.
_ENTRY = re.compile(r"\._modules\['(\w+)'\]")
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
                found = [_PATH.fullmatch(path) for path in paths]
                parts = [None if one is None else (one[1], one[2], one[3]) for one in found]
                graph.current_callable = self._saying(graph.current_callable, list(zip(modules, parts, strict=True)))

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

    def _saying(self, call: Callable[..., Any], modules: list[tuple[int, _Path | None]]) -> Callable[..., Any]:
        """Notes the results as their modules'. What passes through keeps the note that it has.

        modules: as it was when Dynamo made the graph, and its path, None where that is of another kind."""
        at_first = {path: module for module, path in modules if module and path is not None}

        def called(inputs: Any) -> Any:
            results = call(inputs)
            now = self._followed(at_first, sys._getframe(1)) if at_first else at_first
            for result, (module, path) in zip(results, modules, strict=False):
                if module and isinstance(result, VirtualTensor):
                    self._engine.made_by(result, module if path is None else now[path])
            return results

        return called

    def _followed(self, at_first: dict[_Path, int], frame: FrameType | None) -> dict[_Path, int]:
        """The modules that have these paths now: in the innermost frame around that has them all."""
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            variables = locals_of(frame)
            found = {path: _at(path, variables if path[0] == "L" else frame.f_globals) for path in at_first}
            if None not in found.values():
                for kind, name in {path[:2] for path in at_first}:
                    if isinstance(root := (variables if kind == "L" else frame.f_globals)[name], torch.nn.Module):
                        self._engine.compiled_roots[name_of_class(type(root)) if name == "self" else name] = (
                            weakref.ref(root)
                        )
                return {path: id(module) for path, module in found.items()}
            frame = frame.f_back
        return at_first


def _stack(node: Any) -> Iterator[tuple[str, str]]:
    """The modules that a node is of, outermost first: `id` and path."""
    if isinstance(node, torch.fx.Node) and node.op != "placeholder":
        for name, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
            yield str(name).partition("@")[0], _ENTRY.sub(r".\1", path)


def _at(path: _Path, variables: Mapping[str, Any]) -> torch.nn.Module | None:
    _, name, below = path
    module = variables.get(name)
    for part in below.split(".")[1:]:
        module = module._modules.get(part) if isinstance(module, torch.nn.Module) else None
    return module if isinstance(module, torch.nn.Module) and not isinstance(module, torch.fx.GraphModule) else None
