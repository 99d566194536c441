"""What stands in an expression, or in a block of a program's source: names, calls, work, checks, choices and selections."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

# Checks for numbers that are none: their answer is known.
_CHECK = re.compile(r"(^|_)(is|has|found|all|non|any)?_?(nan|inf|finite)s?(_|$)")
# What only tells or keeps: an ``if`` with no more in it takes the same memory either way.
QUIET = frozenset((
    "print", "log", "debug", "info", "warning", "warn", "error", "exception", "write", "format", "flush", "append", "extend",
    "add_scalar", "add_scalars", "set_description", "set_postfix", "save", "save_model", "save_pretrained", "state_dict", "dump",
    "item", "float", "int", "str", "bool", "len", "abs", "min", "max", "round", "sum", "range", "isinstance", "time",
    "perf_counter", "join", "exit", "copyfile", "remove", "mkdir", "makedirs", "exists", "isdir", "BytesIO", "StringIO",
    "handleError",
))  # fmt: skip
_NUMERIC = (
    ast.Constant, ast.Name, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Call, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
LEAVES = (ast.Break, ast.Return, ast.Raise)
_PLAIN_CALLS = ("min", "max", "int", "round", "len", "sum")
# What chooses among objects by a function of theirs, and what hands a function on to objects.
_CHOOSING = frozenset(("min", "max", "sorted", "sort", "nlargest", "nsmallest"))
_OF_TWO = frozenset(("min", "max"))
_APPLYING = frozenset(("map", "filter", "takewhile", "dropwhile", "filterfalse", "reduce"))
# What selects on the host, or keeps each value once.
_SELECTING = frozenset((
    "where", "nonzero", "argwhere", "flatnonzero", "unique", "compress", "set", "frozenset", "Counter", "fromkeys", "filter",
    "takewhile", "dropwhile", "filterfalse",
))  # fmt: skip
# What holds each key once; its methods that are given keys.
_KEYED = frozenset(("set", "dict", "defaultdict", "Counter", "OrderedDict"))
_DICTIONARIES = _KEYED - {"set"}
_GIVEN_KEYS = frozenset(("add", "update", "setdefault", "discard", "remove"))
# What makes a whole number, or the place of something, of what is none.
_WHOLE = frozenset((
    "int", "round", "floor", "ceil", "trunc", "argsort", "argmax", "argmin", "argpartition", "topk", "multinomial", "index",
    "bisect", "bisect_left", "bisect_right", "searchsorted", "bucketize", "digitize", "choice", "choices", "most_common",
))  # fmt: skip
# What puts something where the least comes out first.
_HEAPS = frozenset(("heappush", "heappushpop", "heapreplace"))
_PUTTING = frozenset(("put", "put_nowait"))
# What comes of a key that is not there, of a division by zero, and of a number that a function does not take.
_OF_LOOKUPS = frozenset(("KeyError", "IndexError", "LookupError"))
_OF_DIVISIONS = frozenset(("ZeroDivisionError", "ArithmeticError"))
_OF_NUMBERS = frozenset(("ValueError", "OverflowError", "ArithmeticError"))
# What says whether gradients are kept, by its first argument, and by arguments of these names.
_SWITCHES = frozenset(("requires_grad_", "set_grad_enabled", "inference_mode", "no_grad"))
_SWITCHING = frozenset(("requires_grad", "retain_graph", "create_graph", "set_to_none"))
_OF_SHAPE = frozenset(("shape", "size", "numel", "len", "ndim", "dim"))
# What compares each element with something.
_COMPARING = frozenset(("gt", "lt", "ge", "le", "eq", "ne", "isin", "logical_and", "logical_or", "logical_not", "bool"))
# What makes a tensor as long as what it is made of, but for libraries of the host.
_OF_CONTENTS = frozenset(("tensor", "as_tensor", "from_numpy", "stack", "cat", "index_select"))
# What gives a tensor as large as the one that it is given, with other numbers.
_ALTERING = frozenset((
    "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "relu", "abs", "neg", "sqrt", "exp", "log", "sigmoid", "tanh",
    "round", "floor", "ceil", "float", "half", "double", "detach", "contiguous", "clone",
))  # fmt: skip
_COPYING = frozenset(("list", "tuple", "sorted", "reversed", "array", "asarray", "from_numpy", "tensor", "as_tensor"))
_HOSTS = ("np.", "numpy.", "pd.")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.expr) -> Iterator[str]:
    """The names that an assignment gives a value: of ``self.best`` not ``self``."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for one in node.elts:
            yield from targets(one)
    elif isinstance(node, ast.Starred):
        yield from targets(node.value)
    elif isinstance(node, ast.Subscript):
        entry = entry_of(node)
        if (
            isinstance(node.value, ast.Call)
            and called(node.value) == "globals"
            and isinstance(node.slice, ast.Constant)
        ):
            yield str(node.slice.value)
        yield from inside(node.value)
        if entry is not None:
            yield f"{entry[0]}[={entry[1]}]"
        else:
            yield from anywhere_in(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # What is in `seen.setdefault(name, [])` is in `seen`.
        yield from inside(node.func.value)
        yield from anywhere_in(node.func.value)
    elif found := dotted(node):
        yield found


def inside(node: ast.expr) -> Iterator[str]:
    return (f"{one}[]" for one in _roots(node))


def anywhere_in(node: ast.expr) -> Iterator[str]:
    """The same where nobody knows at which key."""
    return (f"{one}[*]" for one in _roots(node))


def _roots(node: ast.expr) -> Iterator[str]:
    return iter(dict.fromkeys(one.partition("[")[0] for one in targets(node)))


def entry_of(node: ast.Subscript) -> tuple[str, str] | None:
    """``state['loss'][0]``: in which dictionary, and at which key, where a text says it."""
    inner: ast.expr = node
    while isinstance(inner, ast.Subscript):
        key, inner = inner.slice, inner.value
    name = dotted(inner)
    if not name or not isinstance(key, ast.Constant) or type(key.value) is not str:
        return None
    # (What else stands in a key has a meaning there.)
    return name, key.value.translate(str.maketrans(".()[]#?@^", "_________"))


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def arguments(call: ast.Call) -> Sequence[ast.expr]:
    return [*call.args, *(one.value for one in call.keywords)]


def called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else dotted(function)


def imported_modules(tree: ast.AST) -> frozenset[str]:
    """As the text names them: ``import torch.nn as nn`` and ``import os.path``. (What ``from`` imports may be anything.)"""
    imports = (one for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names)
    return frozenset(one.asname or one.name for one in imports)


def checks(test: ast.expr) -> bool:
    return any(map(_CHECK.search, _words(test)))


def is_number(node: ast.expr) -> bool:
    """Whether an expression counts: numbers and names, and what is made of them alone."""
    return all(isinstance(one, _NUMERIC) for one in ast.walk(node)) and all(
        called(call) in _PLAIN_CALLS for call in calls(node)
    )


def left_out(node: ast.AST, inner: Sequence[ast.AST], around: Sequence[ast.stmt], in_loop: bool) -> Sequence[ast.stmt]:
    """What stands behind it, where it leaves that out: the rest of a loop's turn, or of a function.

    inner: all that is in its branches; around: the block of the loop, or of the function, that it is in.
    """
    way: type[ast.AST] = ast.Continue if in_loop else ast.Return
    if not any(isinstance(one, way) for one in inner):
        return ()
    return list(_behind(node, around))


def _behind(node: ast.AST, block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What is run after it in a block, and in those within the block that it stands in."""
    begin, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    for one in block:
        if one.lineno > end:
            yield one
        elif one is not node and one.lineno <= begin and (one.end_lineno or 0) >= end:
            # (A branch or a handler beside that one is not run.)
            blocks = [
                getattr(part, "body", ()) for part in (one, *getattr(one, "handlers", ()), *getattr(one, "cases", ()))
            ]
            for inner in (*blocks, getattr(one, "orelse", ())):
                if any(part.lineno <= begin and (part.end_lineno or 0) >= end for part in inner):
                    yield from _behind(node, inner)


def functions_asked(call: ast.Call) -> Sequence[str]:
    """The functions that are asked of each object, to choose among them or to make others (``min(items, key=loss)``)."""
    named = [one.value for one in call.keywords if one.arg == "key"] if called(call) in _CHOOSING else []
    return [dotted(one).rpartition(".")[2] for one in (*named, *(call.args[:1] if called(call) in _APPLYING else ()))]


def attribute_named(call: ast.Call) -> str:
    """``getattr(state, "stop")``: the attribute, where a text says it."""
    name = call.args[1] if len(call.args) > 1 else None
    return (
        name.value if isinstance(name, ast.Constant) and type(name.value) is str and name.value.isidentifier() else ""
    )


def ordered_names(tree: ast.AST) -> frozenset[str]:
    """The names and attributes that are made as queues which give the least first."""
    return frozenset(
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Call)
        and called(node.value) == "PriorityQueue"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in targets(target)
    )


def put_in_order(call: ast.Call, ordered: frozenset[str]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a call puts where the least comes out first, and into what."""
    if called(call) in _HEAPS and len(call.args) == 2:
        yield call.args[1], call.args[0]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in _PUTTING and dotted(call.func.value) in ordered:
        yield from ((one, call.func.value) for one in call.args[:1])


def fails_by(statement: ast.stmt, handlers: Sequence[ast.ExceptHandler]) -> Iterator[ast.expr]:
    """The keys that a statement looks up, what it divides by and what it gives to Python's own functions of numbers, as far as
    one of the handlers catches what comes of a wrong one."""
    named = [one.type for one in handlers if one.type is not None]
    kinds = {
        dotted(kind).rpartition(".")[2] for one in named for kind in (one.elts if isinstance(one, ast.Tuple) else [one])
    }
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and kinds & _OF_LOOKUPS:
            yield node.slice
        elif (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod))
            and kinds & _OF_DIVISIONS
        ):
            yield node.right
        elif isinstance(node, ast.Call) and dotted(node.func).startswith("math.") and kinds & _OF_NUMBERS:
            yield from node.args


def drops_a_gradient(node: ast.AST) -> bool:
    """``p.grad = None``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in node.targets)
    )


def placements(call: ast.Call) -> Iterator[ast.expr]:
    """What says on which device a tensor is put, or in which type (also within a block, by autocast)."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "type"):
        yield from call.args[:1]
    yield from (one.value for one in call.keywords if one.arg in ("device", "dtype", "enabled"))


def switches(node: ast.AST) -> Iterator[ast.expr]:
    """What says whether gradients are kept, or a module trains: of an assignment or a call."""
    if isinstance(node, ast.Assign):
        if any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in node.targets):
            yield node.value
    elif isinstance(node, ast.Call):
        if called(node) in _SWITCHES:
            yield from node.args[:1]
        elif called(node) == "train" and isinstance(node.func, ast.Attribute):
            # (Of a module: another method of that name is given what it trains with.)
            asked = (ast.Compare, ast.BoolOp, ast.UnaryOp)
            yield from (one for one in (*node.args, *(part.value for part in node.keywords)) if isinstance(one, asked))
        yield from (one.value for one in node.keywords if one.arg in _SWITCHING)


def selections(node: ast.expr) -> Iterator[ast.expr]:
    """What decides how many elements an expression holds, where values do."""
    for one in ast.walk(node):
        if isinstance(one, ast.comprehension):
            yield from one.ifs
        elif isinstance(one, ast.Subscript) and isinstance(one.slice, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield one.slice
        elif isinstance(one, (ast.SetComp, ast.DictComp)):
            yield one.elt if isinstance(one, ast.SetComp) else one.key
        elif (
            isinstance(one, ast.Call)
            and called(one) in _SELECTING
            and not (called(one) == "where" and len(one.args) > 1)
        ):
            yield from one.args or ([one.func.value] if isinstance(one.func, ast.Attribute) else ())


def whole_numbers(node: ast.AST) -> Iterator[ast.expr]:
    """What decides about whole numbers in an expression, where that is no number of its kind: rounded ones, places of values, and
    one or the other of two (Python's own `max` and `min` compare them)."""
    for one in ast.walk(node):
        if isinstance(one, ast.IfExp):
            yield one.test
        elif (
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in _OF_TWO
            and len(one.args) > 1
        ):
            yield from one.args
        elif isinstance(one, ast.Call) and called(one) in _WHOLE and not (called(one) == "round" and len(one.args) > 1):
            yield from (part for part in _taken(one) if not _OF_SHAPE.intersection(_words(part)))


def _taken(call: ast.Call) -> Sequence[ast.expr]:
    """A call's arguments, and what it is a method of."""
    return [*arguments(call), *([call.func.value] if isinstance(call.func, ast.Attribute) else ())]


def _words(node: ast.AST) -> Iterator[str]:
    return (
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in ast.walk(node)
        if isinstance(one, (ast.Attribute, ast.Name))
    )


def is_mask(node: ast.expr) -> bool:
    """Whether an expression compares, as an index of the elements for which that is true."""
    if isinstance(node, ast.Compare):
        return not isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return is_mask(node.left) or is_mask(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return is_mask(node.operand)
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute)
        return called(node) in _COMPARING or (method and is_mask(node.func.value))  # type: ignore[attr-defined]
    return False


def as_long_as(node: ast.expr) -> Iterator[ast.expr]:
    """The names whose lengths make that of an expression: themselves, parts, sums and copies."""
    if dotted(node):
        yield node
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from as_long_as(node.left)
        yield from as_long_as(node.right)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield from as_long_as(node.value)
    elif isinstance(node, ast.Call) and called(node) in _COPYING and len(node.args) == 1:
        yield from as_long_as(node.args[0])


def left_as_long(node: ast.Assign) -> bool:
    """``x = torch.clamp(x, 0, 1)``, ``x = x.detach().clamp(0, 1)``: whether a name keeps the length that it has."""
    name = dotted(node.targets[0]) if len(node.targets) == 1 else ""
    return bool(name) and not dotted(node.value) and _is_altered(node.value, name)


def _is_altered(node: ast.expr, name: str) -> bool:
    """Whether it is that name, or what is as large as that."""
    if isinstance(node, ast.Call) and called(node) in _ALTERING:
        # (A function of a module is given the tensor; a method has it.)
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return any(_is_altered(one, name) for one in (*node.args[:1], *owner))
    return dotted(node) == name


def keyed_names(tree: ast.AST) -> frozenset[str]:
    """The names and attributes that are made to hold each key once: sets, and dictionaries."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value
            if isinstance(value, (ast.Set, ast.Dict)) or (isinstance(value, ast.Call) and called(value) in _KEYED):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found.update(targets(target))
    return frozenset(found)


def dictionaries(tree: ast.AST) -> frozenset[str]:
    """The names and attributes that are made as dictionaries, and as nothing else."""
    made: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value
            is_one = isinstance(value, (ast.Dict, ast.DictComp)) or (
                isinstance(value, ast.Call) and called(value) in _DICTIONARIES
            )
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if name := dotted(target):
                    made[name] = is_one and made.get(name, True)
    return frozenset(name for name, is_one in made.items() if is_one)


def keys_given(call: ast.Call, keyed: frozenset[str]) -> Sequence[ast.expr]:
    """The keys that a set or a dictionary is given by one of its methods."""
    function = call.func
    if (
        not isinstance(function, ast.Attribute)
        or function.attr not in _GIVEN_KEYS
        or dotted(function.value) not in keyed
    ):
        return ()
    return [one for one in call.args[:1] if not isinstance(one, (ast.Dict, ast.Constant))]


def keys_set(node: ast.AST, keyed: frozenset[str]) -> Iterator[ast.Subscript]:
    """The places of sets and dictionaries that an assignment gives a value, by keys which are no constants."""
    for one in getattr(node, "targets", None) or [getattr(node, "target", None)]:
        if isinstance(one, ast.Subscript) and dotted(one.value) in keyed and not isinstance(one.slice, ast.Constant):
            yield one


def makes_of_contents(call: ast.Call) -> bool:
    """Whether a call makes a tensor as long as what it is made of."""
    return called(call) in _OF_CONTENTS and not dotted(call.func).startswith(_HOSTS)


# What a logger is told of something by.
LOGGING = frozenset(("log", "debug", "info", "warning", "error", "critical", "exception"))


def handling_logs(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """What runs where something is logged, of loggers' handlers and filters that a file has of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(dotted(one).endswith(("Handler", "Filter")) for one in node.bases):
            yield from (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("emit", "filter"))


def streams(tree: ast.AST) -> frozenset[str]:
    """The names of files in memory."""
    made = ((one, one.value) for one in ast.walk(tree) if isinstance(one, ast.Assign))
    return frozenset(
        name
        for node, value in made
        if isinstance(value, ast.Call) and called(value) in ("BytesIO", "StringIO")
        for target in node.targets
        for name in targets(target)
    )


def written_into(call: ast.Call, files: frozenset[str]) -> ast.expr | None:
    """The file in memory that a call writes its first argument to (``torch.save(x, buffer)``)."""
    if called(call) not in ("save", "dump") or len(call.args) < 2 or dotted(call.args[1]) not in files:
        return None
    return call.args[1]


def seeded(call: ast.Call) -> ast.expr | None:
    """What draws by the number that a call gives it. (Of what PyTorch draws on a device nothing is known.)"""
    if called(call) != "seed" or not call.args or not isinstance(call.func, ast.Attribute):
        return None
    return call.func.value


def spelled(node: ast.expr) -> Iterator[ast.expr]:
    """What decides how long a text or a repeated list is that an expression makes."""
    for one in ast.walk(node):
        if isinstance(one, ast.FormattedValue):
            yield one.value
        elif isinstance(one, ast.Call) and called(one) in ("str", "repr", "format", "hex", "bin", "oct"):
            yield from _taken(one)
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult):
            sides = one.left, one.right
            for side, other in (sides, sides[::-1]):
                if isinstance(side, ast.List) or (isinstance(side, ast.Constant) and isinstance(side.value, str)):
                    yield other


def parts_of(node: ast.expr) -> Sequence[ast.expr]:
    """What a tuple that is written out has at its places; nothing where a star leaves open how many there are."""
    if not isinstance(node, (ast.Tuple, ast.List)) or any(isinstance(one, ast.Starred) for one in node.elts):
        return ()
    return node.elts


def depth_of(node: ast.expr) -> int:
    """0 of a name, 1 of what is in something that has one, more of anything else."""
    return 0 if dotted(node) else 1 if isinstance(node, ast.Subscript) and dotted(node.value) else 2


def called_for(function: ast.expr) -> ast.expr:
    """What calling it gives."""
    if isinstance(function, ast.Lambda):
        return function.body
    return ast.copy_location(ast.Call(function, [], []), function)
