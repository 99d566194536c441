"""What a statement does, by its text: what it assigns, adds to, empties or calls. Nothing of it is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

# What a program does to gradients without taking them for anything: it clears or clips them in place, or looks at them.
_LOOKS = re.compile(r".*_$|norm$|item$|isfinite$")
_PARAMETERS = re.compile(r"parameters\(")
ADDING = frozenset(
    {
        "append",
        "appendleft",
        # (`contextlib.ExitStack`: https://docs.python.org/3/library/contextlib.html)
        "callback",
        "add",
        # (`torch.optim.Optimizer`)
        "add_param_group",
        "extend",
        "insert",
        "put",
        "put_nowait",
        "push",
        "setdefault",
        "__setitem__",
        "store",
        "record",
    }
)
# Functions of the standard library's that put something into the list that they are given first.
_PUTTING = frozenset({"heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"})
# What a tensor gives without its graph.
_NO_GRAPH = frozenset(("detach", "detach_", "item", "tolist", "data", "shape", "size"))
LOOPS = (ast.For, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def last_name(node: ast.expr) -> str:
    """The last name of an expression: ``outs`` of ``self.outs[0]``."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def path_of(node: ast.AST) -> tuple[str, ...]:
    """``("self", "head", "weight")`` of ``self.head.weight`` and of its ``data``; () of what is none."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        around = path_of(node.value)
        return around if node.attr == "data" or not around else (*around, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        around = path_of(node.value)
        return (*around, str(node.slice.value)) if around else ()
    return ()


def own_attributes(value: ast.expr) -> set[str]:
    """The attributes of `self` that an expression is, or chooses from; not those that it calls."""
    if isinstance(value, ast.IfExp):
        return own_attributes(value.body) | own_attributes(value.orelse)
    if isinstance(value, (ast.List, ast.Tuple)):
        return {name for part in value.elts for name in own_attributes(part)}
    if isinstance(value, ast.Dict):
        return {name for part in value.values for name in own_attributes(part)}
    if isinstance(value, ast.Subscript):
        return own_attributes(value.value)
    return {value.attr} if isinstance(value, ast.Attribute) and last_name(value.value) == "self" else set()


def plain_targets(target: ast.expr) -> Iterator[ast.Name]:
    """The variables among what is assigned to."""
    yield from (part for part in each_target(target) if isinstance(part, ast.Name))


def each_target(target: ast.expr) -> Iterator[ast.expr]:
    """What is assigned to, each for itself."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from each_target(part)
    else:
        yield target


def going_in(value: ast.expr) -> set[str]:
    """The variables in an expression, but for those of which it takes what has no graph (``h.detach()``, ``loss.item()``)."""
    taken = (part.value for part in ast.walk(value) if isinstance(part, ast.Attribute) and part.attr in _NO_GRAPH)
    without = {id(part) for one in taken for part in ast.walk(one)}
    return {part.id for part in ast.walk(value) if isinstance(part, ast.Name) and id(part) not in without}


def detached_in(loop: ast.AST) -> set[str]:
    """The variables whose graph a loop ends: ``h = h.detach()``, ``h, c = h.detach(), c.detach()``, ``h.detach_()``."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach_":
            found |= {part.id for part in [node.func.value] if isinstance(part, ast.Name)}
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for to, what in pairs:
            if isinstance(to, ast.Name):
                read = {part.id for part in ast.walk(what) if isinstance(part, ast.Name)}
                found |= ({to.id} & read) - going_in(what)
    return found


def gives(node: ast.AST, name: str) -> bool:
    """Whether a statement gives a variable of this name a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(one, ast.Name) and one.id == name for target in targets for one in each_target(target))


def _is_empty(value: ast.expr) -> bool:
    """``[]``, ``None``, ``0``, ``dict()``: how a name begins."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(map(_is_empty, value.values))
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and not value.args and last_name(value.func) in ("list", "dict", "set", "deque")
    )


def adds(node: ast.AST, wanted: str, certain: bool, of_object: bool) -> bool:
    """Whether a statement puts something into a container of this name; or, less certain, gives the name a value. of_object: it
    is an attribute's, and a variable of the same name is another one."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr in ADDING and last_name(inner.func.value) == wanted:
                return True
            if inner.func.attr == "update" and last_name(inner.func.value) == wanted and inner.args:
                return True
        given = inner.args if isinstance(inner, ast.Call) and last_name(inner.func) in _PUTTING else []
        if given and last_name(given[0]) == wanted:
            return True
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
        if isinstance(node, ast.AugAssign) and last_name(node.target) == wanted:
            return True
    for one in targets:
        if isinstance(one, ast.Subscript) and last_name(one) == wanted:
            return True
        if last_name(one) == wanted and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            mentions = any(
                last_name(part) == wanted
                for part in ast.walk(node.value)
                if isinstance(part, (ast.Name, ast.Attribute))
            )
            # (``pool = pool[::2]`` puts nothing in.)
            takes_out = isinstance(node.value, ast.Subscript) and last_name(node.value) == wanted
            gives = not certain and not _is_empty(node.value) and not (of_object and isinstance(one, ast.Name))
            if (mentions and not takes_out) or gives:
                return True
    return False


def appends(node: ast.AST, wanted: str) -> bool:
    """Whether a statement makes a container of this name longer, by a method that only lists and sets have."""
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in ("append", "extend", "insert", "add")
        and last_name(inner.func.value) == wanted
        for inner in ast.walk(node)
    )


def fills(node: ast.stmt, name: str) -> bool:
    """``out[a:b] = part``, ``out[a:b] += part``; not ``out[:] = whole``."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(
        isinstance(one, ast.Subscript)
        and isinstance(one.value, ast.Name)
        and one.value.id == name
        and ast.unparse(one.slice) not in (":", "...")
        for one in targets
    )


def empties(method: ast.FunctionDef, attribute: str) -> bool:
    """Whether a method that anybody may call, with no arguments, empties an attribute of its object for good."""
    wanted = len(method.args.args) - len(method.args.defaults) + sum(one is None for one in method.args.kw_defaults)
    if method.name.startswith("_") or method.decorator_list or wanted != 1:
        return False
    for node in method.body:
        if isinstance(node, ast.Assign) and _is_empty(node.value):
            emptied: list[ast.expr] = node.targets
        else:
            call = node.value if isinstance(node, ast.Expr) else None
            emptied = []
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "clear":
                emptied = [call.func.value]
        if attribute in {name for one in emptied for name in own_attributes(one)}:
            # (What fills it again afterwards begins anew.)
            return not any(adds(later, attribute, True, True) for later in method.body[method.body.index(node) + 1 :])
    return False


def mentions_key(node: ast.stmt, wanted: str, key: str) -> bool:
    """Whether a statement has ``wanted["key"]``."""
    return any(
        isinstance(part, ast.Subscript)
        and isinstance(part.slice, ast.Constant)
        and repr(part.slice.value) == key
        and last_name(part.value) == wanted
        for part in ast.walk(node)
    )


def gives_key(node: ast.stmt, wanted: str, key: str) -> bool:
    """Whether a statement gives ``wanted["key"]`` its value, and does not only read it."""
    return isinstance(node, ast.Assign) and any(mentions_key(ast.Expr(target), wanted, key) for target in node.targets)


def is_sum_of(node: ast.Call, name: str) -> bool:
    """``torch.stack(name).mean(0)``, ``torch.stack(name).sum(dim=0)``, ``sum(name)``."""
    if isinstance(node.func, ast.Name) and node.func.id == "sum":
        return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == name
    over = [*node.args, *(one.value for one in node.keywords if one.arg == "dim")]
    joined = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr in ("mean", "sum") else None
    return (
        isinstance(joined, ast.Call)
        and last_name(joined.func) == "stack"
        and len(joined.args) == 1
        and isinstance(joined.args[0], ast.Name)
        and joined.args[0].id == name
        and len(over) == 1
        and isinstance(over[0], ast.Constant)
        and over[0].value == 0
    )


def uses(node: ast.stmt, name: str) -> bool:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            given = [*call.args, *(one.value for one in call.keywords)]
            if any(isinstance(one, ast.Name) and one.id == name for one in (call.func, *given)):
                return True
            base = call.func
            while isinstance(base, (ast.Attribute, ast.Subscript)):
                base = base.value
            if isinstance(base, ast.Name) and base.id == name:
                return True
    return False


def is_on(given: ast.keyword, keyword: str) -> bool:
    """Whether a call's keyword is this one, and not plainly switched off."""
    return given.arg == keyword and not (isinstance(given.value, ast.Constant) and not given.value.value)


def makes_several(loop: ast.AST, line: int) -> bool:
    """Whether a line may run several times in one turn of a loop: in a comprehension, or in a loop of its own."""
    kinds = (*LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
    return any(
        node is not loop and isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(loop)
    )


def takes_gradients(node: ast.AST, name: str) -> bool:
    """Whether a loop over parameters in it takes their gradients for something. name: whose parameters, "" for anybody's."""
    for loop in ast.walk(node):
        heads: Sequence[Any] = [loop] if isinstance(loop, ast.For) else getattr(loop, "generators", ())
        over = [one for one in heads if _PARAMETERS.search(words := ast.unparse(one.iter)) and name in words]
        names = {part.id for one in over for part in ast.walk(one.target) if isinstance(part, ast.Name)}
        read = {
            id(part): part
            for part in (ast.walk(loop) if names else ())
            if isinstance(part, ast.Attribute)
            and part.attr == "grad"
            and isinstance(part.ctx, ast.Load)
            and last_name(part.value) in names
        }
        if read.keys() - _only_looked_at(loop):
            return True
    return False


def _only_looked_at(loop: ast.AST) -> set[int]:
    """The parts of a loop of which it is only asked whether they are None, or which are only changed in place or measured."""
    found: set[int] = set()
    for part in ast.walk(loop):
        if isinstance(part, ast.Compare) and any(isinstance(one, ast.Constant) for one in part.comparators):
            found.add(id(part.left))
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and _LOOKS.match(part.func.attr):
            found.update(map(id, ast.walk(part.func.value)))
    return found
