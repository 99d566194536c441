"""Which of the program's lines each buffer of a compiled graph is for.

Inductor's nodes are made of the graph's, which have the stack of the line that Dynamo traced, a gradient's that of its forward.
So the line of generated code that asks for a buffer is known by the node that is written there first. A kernel that fuses
several lines writes the result of one of them. The cache keeps numbers of stacks and no stacks, as the program's lines may have
moved since; Dynamo traces in every process.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.code import LIBRARY, OWN, line_at, whose
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.modes import STATE

# What a compiled graph has beside its own attributes, and takes into the cache: the sign of Dynamo's graph, and line -> stack.
_LINES = "gpumem_magic_lines"
# ``buf4 = empty_strided_cuda((4096, 512), (512, 1), torch.float32)``
_MADE = re.compile(r"\s*(\w*buf\d+) = ")
# A frame as Python writes it. (Below it is the line's text, and from Python 3.11 on marks, which go on to the end of the line.)
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')


class SourceLines:
    """`begins` with a graph of Dynamo's, `note` what was compiled of it."""

    def __init__(self) -> None:
        # Of Dynamo's graph: each stack once, and what tells it from others.
        self._stacks: dict[str, int] = {}
        self._sign = ""
        # Of the graph for which code was generated last: buffer -> stack.
        self._buffers: dict[str, str] = {}

    def install(self, patches: Patches, compiled: Any) -> None:
        """compiled: the class of Inductor's compiled graphs."""
        lowering = importlib.import_module("torch._inductor.graph").GraphLowering
        generate = lowering.codegen

        def codegen(graph: Any, *args: Any, **kwargs: Any) -> Any:
            code = generate(graph, *args, **kwargs)
            self._buffers = {name: _stack_of(one) for name, one in graph.name_to_buffer.items()}
            return code

        patches.set(lowering, "codegen", codegen)
        plain = compiled.post_compile

        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> None:
            plain(graph, *args, **kwargs)
            sign, numbers = vars(graph).get(_LINES, ("", {}))
            if numbers and sign == self._sign:
                places = [_place_of(stack) for stack in self._stacks]
                lines = {line: place for line, number in numbers.items() if (place := places[number]) is not None}
                graph.current_callable = _with_lines(graph.current_callable, lines)

        patches.set(compiled, "post_compile", post_compile)

    def begins(self, graph: torch.fx.GraphModule) -> str:
        """Takes the stacks of a graph of Dynamo's. What tells it from others: which nodes are of the same line."""
        self._stacks, numbers = {}, []
        for node in graph.graph.nodes:
            stack = node.meta.get("stack_trace") or ""
            numbers.append((node.name, self._stacks.setdefault(stack, len(self._stacks))))
        self._sign = hashlib.sha256(repr(numbers).encode()).hexdigest()
        return self._sign

    def note(self, compiled: Any) -> None:
        """What was compiled of a graph has the numbers of the stacks for which its lines ask for buffers."""
        numbers = {}
        for line, text in enumerate(compiled.source_code.splitlines(), 1):
            made = _MADE.match(text)
            number = self._stacks.get(self._buffers.get(made[1], "")) if made else None
            if number is not None:
                numbers[line] = number
        self._buffers = {}
        setattr(compiled, _LINES, (self._sign, numbers))


def _stack_of(buffer: Any) -> str:
    """The stack of the line for which a buffer is written; "" where none is known."""
    node = buffer.get_origin_node()
    # (What stands for a buffer that was changed in place has no nodes of its own.)
    nodes = [*(() if node is None else (node,)), *getattr(buffer, "origins", ())]
    return next((stack for one in nodes if (stack := one.meta.get("stack_trace"))), "")


def _place_of(stack: str) -> CodePlace | None:
    """The innermost frames of a stack's, as `CodePlace` has them; None where all are PyTorch's."""
    inner: re.Match[str] | None = None
    own: re.Match[str] | None = None
    for frame in _FRAME.finditer(stack):
        kind = whose(frame[1])
        inner = frame if kind in (OWN, LIBRARY) else inner
        own = frame if kind is OWN else own
    if inner is None:
        return None
    theirs = ("", 0, "", "", "")
    if own is not None:
        file, line = own[1], int(own[2])
        theirs = file, line, own[3], line_at(file, line), ""
    return CodePlace(inner[1], int(inner[2]), inner[3], *theirs)


def _with_lines(call: Callable[..., Any], lines: dict[int, CodePlace]) -> Callable[..., Any]:
    def called(inputs: Any) -> Any:
        before, STATE.generated_lines = STATE.generated_lines, lines
        try:
            return call(inputs)
        finally:
            STATE.generated_lines = before

    return called
