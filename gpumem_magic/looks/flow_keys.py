"""Under which keys the names of an expression are known: in its scope, by what is asked of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gpumem_magic.looks.expressions import (
    arguments,
    attribute_named,
    called,
    calls,
    dictionaries,
    dotted,
    entry_of,
    functions_asked,
    imported_modules,
    targets,
)
from gpumem_magic.looks.flow_records import Key, Place, Uses, length
from gpumem_magic.looks.given_names import GivenNames

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What makes an object of its own, which is never None.
_OBJECTS = (
    ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip
# What makes a number of a tensor, or a tensor of one number.
_READS = (
    "item", "int", "float", "bool", "tolist", "numpy", "max", "min", "sum", "amax", "amin", "argmax", "prod", "count_nonzero",
)  # fmt: skip
# What gives no None, whatever it is given.
_NEVER_NONE = frozenset((
    *_READS, "str", "len", "abs", "round", "cpu", "cuda", "to", "detach", "clone", "mean", "list", "tuple", "dict", "set",
    "sorted", "format", "join", "array", "asarray", "tensor", "as_tensor", "range", "isinstance", "ravel", "flatten", "copy",
))  # fmt: skip
# Attributes of a tensor that hold its values, and what asks for its shape, its type or its place, whatever the values are.
_ITSELF = frozenset(("data", "T"))
_OF_SHAPE = frozenset(("shape", "ndim", "device", "dtype", "_cdata", "_version", "requires_grad", "is_leaf", "grad_fn"))
_ASKING_SHAPE = frozenset((
    "size", "dim", "numel", "nelement", "len", "isinstance", "stride", "storage_offset", "element_size", "data_ptr",
    "is_contiguous", "is_floating_point", "is_complex", "get_device",
))  # fmt: skip
# What a generator that waits in a ``yield`` is handed.
_SENT = frozenset((0, f"{name}(0") for name in ("send", "asend"))
# How objects say how they compare.
_COMPARING = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


class KeyReader:
    """Asks expressions of a file, within the scopes that are entered (`_scopes`: where each begins, and its own names).

    _once, _statement: of what is read now, as `Uses` has them.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._scopes: list[tuple[int, frozenset[str]]] = []
        self._dictionaries = dictionaries(tree)
        self._modules = imported_modules(tree)
        self._given = GivenNames(tree)
        functions = [one for one in ast.walk(tree) if isinstance(one, FUNCTIONS)]
        self._defined = frozenset(one.name for one in functions)
        self._giving_self = frozenset(one.name for one in functions if _gives_self(one))
        self._once = 0
        self._statement: Place = (0, 0)

    def _name_called(self, call: ast.Call) -> str:
        """Under which its arguments and its result are known."""
        name = called(call)
        of_module = isinstance(call.func, ast.Attribute) and dotted(call.func.value) in self._modules
        return f"::{name}" if of_module else name

    def _key(self, name: str) -> Key:
        if "." in name:
            return 0, f".{name.rpartition('.')[2]}"
        bare = name.partition("[")[0]
        for at, own in reversed(self._scopes):
            if bare in own:
                return at, name
        return 0, name

    def _uses(self, node: ast.expr | ast.stmt, as_test: bool = False) -> Uses:
        reads = any(called(call) in _READS for call in calls(node))
        keys = frozenset(self._keys(node, "truth" if as_test else ""))
        return Uses(node.lineno, node.end_lineno or node.lineno, keys, reads, self._once, self._statement)

    def _lengths(self, node: ast.expr) -> Uses:
        uses = self._uses(node)
        return uses._replace(keys=frozenset(map(length, uses.keys)))

    def _keys(self, node: ast.AST, asked: str) -> Iterator[Key]:
        """What is used. asked: of a name only its "truth" (whether something is in it), its "length", or what it is "itself"."""
        if isinstance(node, ast.Call):
            name = called(node)
            # (A dictionary's keys are not what is in it.)
            about = "length" if name in _ASKING_SHAPE else "truth" if name == "keys" and not arguments(node) else ""
            yield from _asked((0, f"{self._name_called(node)}()"), asked)
            if asked == "truth":
                yield from self._truth_of(self._object_given(node))
            if (function := dotted(node.func)) and function not in self._defined:
                yield result_of(self._key(function))
            if isinstance(node.func, ast.Attribute):
                yield from self._keys(node.func.value, about or ("itself" if asked == "truth" else asked))
            for argument in arguments(node):
                yield from self._keys(argument, about)
            for function in functions_asked(node):
                yield 0, f"{function}()"
            if name in ("eval", "exec") and isinstance(node.func, ast.Name) and len(node.args) == 1:
                # (A text may name whatever has a name there.)
                yield from ((self._scopes[-1][0], own) for own in self._scopes[-1][1])
            if name == "len" and any(self._has_method(one, "__len__") for one in node.args):
                yield 0, "__len__()"
            if name == "getattr" and (key := attribute_named(node)):
                yield from _asked((0, f".{key}"), asked)
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.Is, ast.IsNot))
            and isinstance(node.comparators[0], ast.Constant)
            and node.comparators[0].value is None
        ):
            own, others = self._asked_of_none(node.left)
            yield from own
            for one in others:
                yield from one.keys
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[-1], (ast.In, ast.NotIn))
            and dotted(node.comparators[-1]) in self._dictionaries
        ):
            # (As of its `keys()`.)
            for compared in (node.left, *node.comparators[:-1]):
                yield from self._keys(compared, "")
            yield from self._keys(node.comparators[-1], "truth")
        elif isinstance(node, ast.Subscript) and (entry := entry_of(node)) is not None:
            yield from (self._key(f"{entry[0]}{where}") for where in ("", f"[={entry[1]}]", "[*]"))
            parts = entry[0].split(".")
            yield from (self._key(".".join(parts[:number])) for number in range(1, len(parts)))
            while isinstance(node, ast.Subscript):
                yield from self._keys(node.slice, "")
                node = node.value
        elif found := dotted(node):
            parts = found.split(".")
            # (Whatever is asked of a shape or a device, as in ``x.device.type``, says nothing of values.)
            for number, part in enumerate(parts[1:], 1):
                if part in _OF_SHAPE:
                    parts, asked = parts[:number], "length"
                    break
            while len(parts) > 1 and parts[-1] in _ITSELF:
                parts.pop()
            if asked == "truth":
                yield from self._truth_of(node)
            yield from _asked(self._key(".".join(parts)), asked)
            yield from (self._key(".".join(parts[:number])) for number in range(1, len(parts)))
        elif asked == "length" and isinstance(node, ast.Subscript) and self._are_rows(node.value):
            yield from self._keys(node.value, asked)
        elif isinstance(node, ast.Attribute) and node.attr in _OF_SHAPE:
            yield from self._keys(node.value, "length")
        else:
            if isinstance(node, ast.Yield):
                yield from _SENT
            if isinstance(node, ast.Compare):
                yield from self._compared(node)
            asks = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
            for child in ast.iter_child_nodes(node):
                yield from self._keys(child, asked if asks else "")

    def _asked_of_none(self, value: ast.expr) -> tuple[frozenset[Key], Sequence[Uses]]:
        """By what an expression is None: names and results that may be, and values that may make it so."""
        if isinstance(value, ast.IfExp):
            ways = [self._asked_of_none(one) for one in (value.body, value.orelse)]
            return ways[0][0] | ways[1][0], [self._uses(value.test), *ways[0][1], *ways[1][1]]
        if isinstance(value, ast.Call):
            name = called(value)
            if name in _NEVER_NONE or name[:1].isupper():
                return frozenset(), ()
            known = name in self._defined
            return frozenset(((0, f"{self._name_called(value)}()!"),)), () if known else [
                self._uses(one) for one in (*arguments(value), *receiver_of(value))
            ]
        if found := dotted(value):
            parts = found.split(".")
            before = frozenset(self._key(".".join(parts[:number])) for number in range(1, len(parts)))
            return before | {nothing_of(self._key(found))}, ()
        if isinstance(value, _OBJECTS):
            return frozenset(), ()
        return frozenset(), [self._uses(value)]

    def _truth_of(self, node: ast.AST) -> Iterator[Key]:
        """What an object of the file's own classes says of whether it is true."""
        return ((0, f"{one}()") for one in ("__bool__", "__len__") if self._has_method(node, one))

    def _object_given(self, call: ast.Call) -> ast.expr:
        """What a call gives: the object itself, where its method ends so (``stop.step(loss)``, ``stop(loss)``)."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in self._giving_self:
            return call.func.value
        return call.func if "__call__" in self._giving_self else call

    def _compared(self, node: ast.Compare) -> Iterator[Key]:
        """What objects of the file's own classes say of how they compare."""
        for one in (node.left, *node.comparators):
            yield from ((0, f"{method}()") for method in _COMPARING if self._has_method(one, method))

    def _has_method(self, node: ast.AST, method: str) -> bool:
        name = dotted(node)
        if name == "self":
            # (Of which class, its text alone does not tell.)
            return method in self._defined
        return bool(name) and self._given.follows(self._key(name), method)

    def _are_rows(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and self._given.are_rows(self._key(node.id))

    def _targets(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> Iterator[Key]:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from map(self._key, targets(target))


def mask_of(key: Key) -> Key:
    return key[0], f"{key[1]}?"


def result_of(key: Key) -> Key:
    return key[0], f"{key[1]}()"


def nothing_of(key: Key) -> Key:
    return key[0], f"{key[1]}!"


def _gives_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = (one.value for one in ast.walk(function) if isinstance(one, ast.Return))
    return any(isinstance(one, ast.Name) and one.id == "self" for one in given)


def receiver_of(call: ast.Call) -> Sequence[ast.expr]:
    return [call.func.value] if isinstance(call.func, ast.Attribute) else ()


def _asked(key: Key, asked: str) -> Iterator[Key]:
    yield length(key) if asked == "length" else key
    if not asked:
        yield key[0], f"{key[1]}[]"


def own_names(scope: Scope) -> Iterator[str]:
    """The names that are given a value in this scope."""
    if isinstance(scope, FUNCTIONS):
        yield from (one.arg for one in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs))
    shared: set[str] = set()
    found: set[str] = set()
    left: list[ast.AST] = list(scope.body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            shared.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            left.extend(ast.iter_child_nodes(node))
    yield from found - shared
