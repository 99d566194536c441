"""In which module, and in which operator, an error was raised: read from its traceback, which is not kept.

The module's frames are those of ``torch.nn.Module._call_impl``, whose ``self`` is the module: tried on torch 2.9 to
2.15. Where a PyTorch calls them otherwise, no module is named. The operator is the call at which the innermost frame stands:
Python tells its place in the line from 3.11 on; before that it is named where the line holds only one call.
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from types import BuiltinFunctionType, CodeType, FrameType, TracebackType

import torch

from gpumem_magic.looks.objects import attribute, entry, locals_of, name_of_class, text, traceback_of
from gpumem_magic.looks.parsing import expression_of, parsed
from gpumem_magic.looks.tensors import COMPILED, is_module, modules_in

_CALLS = "_call_impl"
# What carries a call on and is none of its own.
_CARRIERS = frozenset({"__torch_function__", "__torch_dispatch__", "_wrapped_call_impl", "_call_impl"})
# Where an operator's own work begins, as far as that is Python.
_BELOW = (
    "torch._ops",
    "torch.overrides",
    "torch._library",
    "torch._decomp",
    "torch._refs",
    "torch._prims",
    "gpumem_magic.patching",
    "gpumem_magic.virtual",
)
_NOT_OPERATORS = frozenset({"run_backward", "_engine_run_backward", "super", "forward"})
# PyTorch's functions give themselves to a tensor that has a way of its own: the first argument is the function.
_HANDING_ON = "handle_torch_function"
_SIGNS = {
    ast.MatMult: "matmul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
}
_LONGEST = 60


def failing_place(error: BaseException) -> tuple[str, str, str]:
    """(module's path in the outermost one, its class, operator); "" for each that is not known. Runs nothing of the user's."""
    modules: list[torch.nn.Module] = []
    # What was called since the innermost module began.
    inside: list[TracebackType] = []
    trace = traceback_of(error)
    while trace is not None:
        inside.append(trace)
        module = _module_of(trace.tb_frame)
        if module is not None:
            modules.append(module)
            inside.clear()
        trace = trace.tb_next
    return (_path(modules), name_of_class(type(modules[-1])), _operator(inside)) if modules else ("", "", "")


def _module_of(frame: FrameType) -> torch.nn.Module | None:
    if frame.f_code.co_name != _CALLS or entry(frame.f_globals, "__name__") != "torch.nn.modules.module":
        return None
    found = locals_of(frame).get("self")
    return found if is_module(found) else None


def _path(modules: list[torch.nn.Module]) -> str:
    """Only modules around the failure are looked for: down from the outermost, and from the last one found. A compiled module
    goes by the name of what it was made of."""
    names = {id(module): name for name, module in modules_in(modules[0])}
    for number in range(len(modules) - 1, -1, -1):
        name = names.get(id(modules[number]))
        if name is not None:
            beyond = [name_of_class(type(module)) for module in modules[number + 1 :]]
            return ".".join([part for part in (*name.split("."), *beyond) if part not in ("", COMPILED)])
    return ""


def _operator(entries: list[TracebackType]) -> str:
    """The call at which the innermost frame stands that is not below an operator."""
    last = None
    for trace in entries:
        frame = trace.tb_frame
        module = text(entry(frame.f_globals, "__name__"))
        if module.startswith(_BELOW):
            break
        if not module.startswith("gpumem_magic") and frame.f_code.co_name not in _CARRIERS:
            last = trace
    return "" if last is None else _called(last.tb_frame, last.tb_lasti, last.tb_lineno)


def _called(frame: FrameType, instruction: int, line: int) -> str:
    node = _at(frame.f_code, instruction, line)
    if isinstance(node, ast.Assign | ast.Return | ast.Expr) and node.value is not None:
        node = node.value
    word = ""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == _HANDING_ON and node.args:
        word = ast.unparse(node.args[0]).rpartition(".")[2]
    elif isinstance(node, ast.Call):
        word = _behind(node.func, frame) or ast.unparse(node.func).rpartition(".")[2]
    elif isinstance(node, ast.BinOp):
        word = _SIGNS.get(type(node.op), "")
    elif isinstance(node, ast.AugAssign):
        word = f"{_SIGNS[type(node.op)]}_" if type(node.op) in _SIGNS else ""
    elif isinstance(node, ast.Subscript):
        word = "index"
    return word if word.isidentifier() and word not in _NOT_OPERATORS and len(word) <= _LONGEST else ""


def _behind(function: ast.expr, frame: FrameType) -> str:
    """The own name of what a variable, or ``self.act``, stands for where it is one of PyTorch's built-in functions."""
    found: object = None
    if isinstance(function, ast.Name):
        found = locals_of(frame).get(function.id)
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        # Read past the user's own attributes, which may be code.
        owner = locals_of(frame).get("self")
        found = attribute(owner, function.attr) if is_module(owner) else None
    return found.__name__ if type(found) is BuiltinFunctionType else ""


def _at(code: CodeType, instruction: int, line: int) -> ast.AST | None:
    """The expression at which an instruction stands."""
    if sys.version_info >= (3, 11):
        positions = list(code.co_positions())
        first, last, start, end = positions[instruction // 2] if instruction // 2 < len(positions) else (None,) * 4
        if first is None or last is None or start is None or end is None:
            return None
        lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
        if not lines or not lines[0]:
            return None
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        return _parsed(b"".join(lines).decode(errors="replace"))
    text = linecache.getline(code.co_filename, line).strip()
    tree = _parsed_statement(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.BinOp)] if tree is not None else []
    return calls[0] if len(calls) == 1 else None


def _parsed(text: str) -> ast.AST | None:
    """One expression, which may go over lines, or an assignment such as ``x += y``."""
    return expression_of(f"(\n{text}\n)") or _parsed_statement(text)


def _parsed_statement(text: str) -> ast.AST | None:
    try:
        body = parsed(textwrap.dedent(text)).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return body[0] if body else None
