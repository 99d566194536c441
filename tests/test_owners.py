"""Who holds what: names for every live byte, and a promise of freed bytes that comes true when the statement is run."""

from __future__ import annotations

import gc
import importlib.machinery
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_fakes import FakeDevice, FakeMachine
from torch_versions import TORCH

from gpumem_magic.owners.graph import HoldGraph
from gpumem_magic.owners.model import Holdings, size_of
from gpumem_magic.owners.search import find_owners
from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture
def machine() -> Iterator[Any]:
    machine = gpu.turn_on("A100-40GB")
    yield machine
    gpu.turn_off()


def ran(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "cell", "torch": torch}
    exec("def mib(n):\n    return torch.empty(n << 18, device='cuda')\n" + code, namespace)
    return namespace


def places(holdings: Holdings) -> dict[str, int]:
    return {one.place: one.size for one in holdings.held}


def freed_by(machine: Any, namespace: dict[str, Any], statement: str) -> int:
    gc.collect()
    machine.settle()
    before = machine.devices[0].counters().allocated
    exec(statement, namespace)
    machine.settle()
    return before - machine.devices[0].counters().allocated


TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(512, 512, device="cuda")
for step in range(2):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""

LAYERS = "[torch.nn.Linear(1024, 1024).cuda() for _ in range(3)]"

# Code, and then (place, MiB) that must be among the names.
NAMES = [
    ("x = mib(8)", "x", 8),
    ("outputs = [mib(1) for _ in range(4)]", "outputs[3]", 1),
    ("state = {'model': {'weight': mib(8)}}", "state['model']['weight']", 8),
    ("class A: pass\na = A()\na.cache = [mib(8)]", "a.cache[0]", 8),
    ("class S:\n    __slots__ = ('kept',)\ns = S()\ns.kept = mib(8)", "s.kept", 8),
    ("class C:\n    cache = mib(8)\nC.__module__ = '__main__'", "C.cache", 8),
    ("from collections import namedtuple\np = namedtuple('P', 'left right')(mib(1), mib(2))", "p.right", 2),
    ("from collections import deque\nd = deque([mib(8)])", "d[0]", 8),
    ("def f():\n    y = mib(8)\n    return lambda: y\ng = f()", "closure variable `y` of g", 8),
    ("def h(a, cache=mib(8)):\n    pass", "default argument `cache` of h", 8),
    ("def h(a, b=1, *, kept=mib(8)):\n    pass", "default argument `kept` of h", 8),
    ("def h(a, b=[mib(8)], c=2):\n    pass", "default argument `b[0]` of h", 8),
    ("def gen():\n    z = mib(8)\n    yield 1\nit = gen()\nnext(it)", "local `z` of the generator gen() of it", 8),
    ("from functools import partial\nq = partial(print, mib(8))", "q.args[0]", 8),
    ("class M:\n    def __init__(self): self.t = mib(8)\n    def go(self): pass\ncall = M().go", "call.__self__.t", 8),
    ("net = torch.nn.ModuleDict({'enc': torch.nn.Linear(1024, 1024)}).cuda()", "net.enc.weight", 4),
    ("bn = torch.nn.BatchNorm1d(1 << 18).cuda()", "bn.running_mean", 1),
    ("w = mib(8).requires_grad_()\nw.grad = torch.empty_like(w)", "w.grad", 8),
    ("w = mib(8).requires_grad_()\nloss = w.exp()", "loss", 8),
    ("w = mib(8).requires_grad_()\nloss = w.exp().sum()", "graph of loss: result saved by exp", 8),
    (
        "w = mib(8).requires_grad_()\ntry:\n    raise ValueError(w)\nexcept ValueError as e:\n    err = e\ndel w",
        "err.args[0]",
        8,
    ),
    (
        "def bad():\n    big = mib(8)\n    1 / 0\ntry:\n    bad()\nexcept Exception as e:\n    err = e",
        "local `big` of bad(), in the traceback of err",
        8,
    ),
    (
        "def bad():\n    big = [{'x': mib(8)}]\n    1 / 0\ntry:\n    bad()\nexcept Exception as e:\n    told = e.__traceback__",
        "local `big[0]['x']` of bad(), in the traceback told",
        8,
    ),
    # A tensor as a key: its own name within the function is enough.
    (
        "def bad():\n    w = mib(1)\n    states = {w: [mib(8)]}\n    1 / 0\ntry:\n    bad()\nexcept Exception as e:\n    err = e",
        "local `states[w][0]` of bad(), in the traceback of err",
        8,
    ),
    ("def f():\n    y = [mib(8)]\n    return lambda: y\ng = f()", "closure variable `y[0]` of g", 8),
    # A function's forward that failed: its context has no node any more.
    (
        "class Fails(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.kept = mib(8)\n"
        "        made.append(ctx)\n        raise ValueError\nmade = []\ntry:\n    Fails.apply(mib(1).requires_grad_())\n"
        "except ValueError:\n    pass",
        "made[0].kept",
        8,
    ),
    ("x = mib(8)[:4]", "x", 8),
    # A view, and what `state_dict()` gives, are not the first on their memory.
    ("whole = mib(8)\na = whole[:4]", "whole", 8),
    ("nets = [torch.nn.Linear(1024, 1024).cuda()]\na = nets[0].state_dict()", "nets[0].weight", 4),
    # What a loop over a model's blocks left in its variable is the model's; what has a name for each is called by it.
    (f"net = torch.nn.ModuleList({LAYERS})\nfor b in net:\n    b.requires_grad_()", "net.2.weight", 4),
    (f"net = torch.nn.Sequential(*{LAYERS})\na, b, c = net", "b.weight", 4),
    (
        "body, head = torch.nn.Linear(1024, 1024).cuda(), torch.nn.ReLU()\nnet = torch.nn.Sequential(body, head)",
        "body.weight",
        4,
    ),
]


@pytest.mark.parametrize(("code", "place", "size"), NAMES, ids=[name for _, name, _ in NAMES])
def test_the_name_of_what_holds_it(machine: Any, code: str, place: str, size: int) -> None:
    holdings = find_owners(machine, ran(code))
    assert places(holdings).get(place) == size * MIB, places(holdings)
    assert holdings.lost == ()


def test_a_training_loop_has_an_owner_for_every_byte(machine: Any) -> None:
    holdings = find_owners(machine, ran(TRAINING))
    assert holdings.found == holdings.allocated == machine.devices[0].counters().allocated
    names = places(holdings)
    assert names["model.0.weight"] == 2 * MIB
    assert names["model.0.weight.grad"] == 2 * MIB
    assert names["optimizer.state[model.2.weight]['exp_avg_sq']"] == 2 * MIB
    kinds = {kind: size_of(one for one in holdings.held if one.kind == kind) for kind in ("parameter", "gradient")}
    assert kinds["parameter"] == kinds["gradient"]
    assert size_of(one for one in holdings.held if one.kind == "optimizer_state") == 2 * kinds["parameter"]


def test_a_parameter_that_only_the_optimizer_knows(machine: Any) -> None:
    names = places(find_owners(machine, ran(TRAINING + "del model, loss")))
    first = "optimizer.param_groups[0]['params'][0]"
    assert names[first] == names[f"{first}.grad"] == names[f"optimizer.state[{first}]['exp_avg']"] == 2 * MIB


# Code, the statement, and whose promise it is.
STATEMENTS = [
    (TRAINING, "del optimizer", ["optimizer"]),
    (TRAINING, "del model", ["model"]),
    (TRAINING, "del model, optimizer", ["model", "optimizer"]),
    (TRAINING, "del model, optimizer, loss", ["model", "optimizer", "loss"]),
    (TRAINING, "del x", ["x"]),
    ("x = mib(8)\ny = x[:2]", "del x", ["x"]),
    ("x = mib(8)\ny = x[:2]", "del x, y", ["x", "y"]),
    ("w = mib(8).requires_grad_()\nlosses = [w.exp().sum() for _ in range(3)]", "del losses", ["losses"]),
    ("w = mib(8).requires_grad_()\na = w.exp()\nb = a.sum()", "del a", ["a"]),
    ("w = mib(8).requires_grad_()\na = w.exp()\nb = a.sum()", "del b", ["b"]),
    ("w = mib(8).requires_grad_()\na = w.exp()\nb = a.sum()", "del a, b", ["a", "b"]),
    ("a = [mib(2)]\nb = {'k': a, 'l': mib(3)}", "del b", ["b"]),
    ("def f():\n    y = mib(8)\n    return (lambda: y), (lambda: y)\ng, h = f()", "del g", ["g"]),
]


@pytest.mark.parametrize(("code", "statement", "names"), STATEMENTS)
def test_a_statement_frees_what_was_promised(machine: Any, code: str, statement: str, names: list[str]) -> None:
    namespace = ran(code)
    holdings = find_owners(machine, namespace)
    numbers = [number for name in names if (number := holdings.number(name)) is not None]
    promised = [one for one in holdings.freed(numbers) if not one.cyclic]
    del holdings
    assert freed_by(machine, namespace, statement) == size_of(promised)


def test_what_zero_grad_and_detaching_would_free(machine: Any) -> None:
    namespace = ran(TRAINING)
    promised = size_of(find_owners(machine, namespace).freed_without("grad"))
    assert promised > 4 * MIB
    assert freed_by(machine, namespace, "optimizer.zero_grad()") == promised
    namespace = ran("w = mib(8).requires_grad_()\nlosses = [w.exp().sum() for _ in range(3)]")
    promised = size_of(find_owners(machine, namespace).freed_without("graph"))
    assert promised == 24 * MIB
    assert freed_by(machine, namespace, "losses = [one.detach() for one in losses]") == promised


def test_saved_tensors_are_read_without_running_hooks(machine: Any) -> None:
    namespace = ran(
        "unpacked = []\nw = mib(8).requires_grad_()\n"
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: ('packed', t + 1), lambda p: unpacked.append(1) or p[1]):\n"
        "    loss = w.exp().sum()\n"
    )
    holdings = find_owners(machine, namespace)
    assert namespace["unpacked"] == []
    if TORCH < (2, 10):
        # It does not say what a hook made, and so nothing is known to hold it.
        assert [one.size for one in holdings.lost] == [8 * MIB]
        return
    assert holdings.lost == ()
    assert places(holdings)["graph of loss: result saved by exp[1]"] == 8 * MIB


def test_a_function_of_the_users_keeps_tensors_on_its_context(machine: Any) -> None:
    namespace = ran(
        "class Mine(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, a):\n"
        "        ctx.save_for_backward(a.exp())\n        ctx.other = a * 2\n        return a.sum()\n"
        "    @staticmethod\n    def backward(ctx, g): return g\n"
        "w = mib(8).requires_grad_()\nloss = Mine.apply(w)\n"
    )
    holdings = find_owners(machine, namespace)
    assert holdings.lost == ()
    assert sum(one.size for one in holdings.held if one.kind == "graph") == 16 * MIB
    assert places(holdings)["graph of loss: ctx.other of mine"] == 8 * MIB


CYCLE = "class Node: pass\ndef make():\n    a = Node()\n    a.me, a.kept = a, mib(8)\n"


def test_a_reference_cycle_is_found_when_asked(machine: Any, request: pytest.FixtureRequest) -> None:
    # (Python's collector comes when it likes.)
    request.addfinalizer(gc.enable)
    gc.disable()
    namespace = ran(CYCLE + "make()")
    assert [one.size for one in find_owners(machine, namespace).lost] == [8 * MIB]
    holdings = find_owners(machine, namespace, cycles=True)
    (held,) = holdings.held
    assert (held.size, held.cyclic) == (8 * MIB, True)
    root = holdings.roots[held.roots[0]]
    assert (root.kind, root.name, root.statement) == (
        "cycle",
        "a reference cycle (Node.me -> Node)",
        "%gpumem_free cycles",
    )
    del holdings
    gc.collect()
    assert find_owners(machine, namespace, cycles=True).held == ()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "class Child: pass\nclass Parent: pass\ndef make():\n    p, c = Parent(), Child()\n"
            "    p.children, c.parent, c.kept = [c], p, mib(8)\nmake()",
            ("Parent.children[0] -> Child.parent -> Parent", "Child.parent -> Parent.children[0] -> Child"),
        ),
        (
            "class Node:\n    __slots__ = ('me', 'kept')\ndef make():\n    a = Node()\n    a.me, a.kept = a, mib(8)\nmake()",
            ("Node.me -> Node",),
        ),
        ("def make():\n    a = [mib(8)]\n    a.append(a)\nmake()", ("list",)),
        (
            "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.part = torch.nn.Identity()\n        self.kept = mib(8)\n"
            "        def remember(*_):\n            self.seen = 1\n        self.part.register_forward_hook(remember)\nNet()",
            (
                "Net.part -> Identity._forward_hooks -> remember's self -> Net",
                "Identity._forward_hooks -> remember's self -> Net.part -> Identity",
                "remember's self -> Net.part -> Identity._forward_hooks -> remember",
            ),
        ),
    ],
    ids=["two objects", "slots", "a list", "a hook that uses its module"],
)
def test_a_cycle_is_told_by_the_way_it_runs(machine: Any, code: str, words: tuple[str, ...]) -> None:
    holdings = find_owners(machine, ran(code), cycles=True)
    (held,) = holdings.held
    assert holdings.roots[held.roots[0]].name in [f"a reference cycle ({one})" for one in words]


def test_who_decides_on_the_search_for_cycles_is_told_what_is_missing(machine: Any) -> None:
    asked = []
    namespace = ran(CYCLE + "make()\ny = mib(2)")
    holdings = find_owners(machine, namespace, cycles=lambda missing, total: bool(asked.append((missing, total))))
    assert [(sorted(missing.values()), total) for missing, total in asked] == [([8 * MIB], 10 * MIB)]
    assert [one.size for one in holdings.lost] == [8 * MIB]
    assert find_owners(machine, namespace, cycles=lambda missing, total: True).lost == ()


def test_a_cycle_that_a_variable_holds_is_no_garbage(machine: Any) -> None:
    namespace = ran("class Node: pass\na = Node()\na.me, a.kept = a, mib(8)")
    (held,) = find_owners(machine, namespace, cycles=True).held
    assert (held.place, held.cyclic) == ("a.kept", True)


def test_an_object_that_something_else_holds_is_not_called_a_cycle(machine: Any) -> None:
    elsewhere = [ran("kept = {'x': mib(8)}").pop("kept")]
    holdings = find_owners(machine, {}, cycles=True)
    assert [one.size for one in holdings.lost] == [8 * MIB]
    assert holdings.held == ()
    del elsewhere


def test_what_only_a_librarys_module_or_class_holds_goes_by_its_name(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType("a_library")
    library.__file__ = "/somewhere/site-packages/a_library.py"
    kind = type("Registry", (), {"__module__": "a_library", "kept": [ran("kept = {'x': mib(8)}").pop("kept")]})
    vars(library).update(Registry=kind, cache={"y": ran("kept = mib(4)").pop("kept")})
    monkeypatch.setitem(sys.modules, "a_library", library)
    assert len(find_owners(machine, {}).lost) == 2
    holdings = find_owners(machine, {}, cycles=True)
    assert places(holdings) == {"a_library.Registry.kept[0]['x']": 8 * MIB, "a_library.cache['y']": 4 * MIB}
    assert {(root.kind, root.statement) for root in holdings.roots} == {("module", None)}
    monkeypatch.delitem(sys.modules, "a_library")
    assert len(find_owners(machine, {}, cycles=True).lost) == 2
    del kind, library


def test_the_value_of_a_context_variable_is_held_by_it(machine: Any) -> None:
    namespace = ran("import contextvars\nspans = contextvars.ContextVar('spans')\nspans.set([mib(8)])")
    holdings = find_owners(machine, namespace)
    assert places(holdings) == {"spans[0]": 8 * MIB}
    (root,) = holdings.roots
    assert (root.name, root.statement) == ("spans", "spans.set(None)")
    assert freed_by(machine, namespace, "spans.set(None)") == 8 * MIB


def test_nothing_is_collected_and_nothing_is_kept(machine: Any) -> None:
    namespace = ran(TRAINING + CYCLE + "make()\n" + "def g():\n    t = mib(1)\n    yield\ni = g()\nnext(i)")
    watched = [weakref.ref(namespace[name]) for name in ("model", "optimizer", "x", "loss", "i")]
    before = machine.devices[0].counters().allocated
    was_on, often = gc.isenabled(), gc.get_threshold()
    gc.set_threshold(1_000_000)  # what Python itself collects, when enough objects are there, is another matter
    try:
        holdings = find_owners(machine, namespace, cycles=True)
        machine.settle()
    finally:
        gc.set_threshold(*often)
    assert gc.isenabled() is was_on
    assert machine.devices[0].counters().allocated == before
    namespace.clear()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 5
    machine.settle()
    assert holdings.lost == ()
    assert machine.devices[0].counters().allocated == size_of(one for one in holdings.held if one.kind == "workspace")


def test_what_cublas_keeps_for_each_stream_of_a_card_is_not_lost() -> None:
    """PyTorch 2.11 on an H100: for each stream 32 MiB in the program's thread, and in backward's, and 1 MiB of cuBLASLt's."""
    device = FakeDevice(kind="cuda")
    for stream in (0, 7, 8):
        for size in (32 * MIB, 32 * MIB, MIB):
            device.alloc(size, stream=stream)
    lost = [device.alloc(3 * MIB)]
    holdings = find_owners(FakeMachine(device), {})
    assert [one.kind for one in holdings.held] == ["workspace"] * 9
    assert [one.address for one in holdings.lost] == lost


def test_nothing_is_kept_even_while_python_collects_no_garbage(machine: Any) -> None:
    namespace = ran("x = mib(8)\nd = {'k': [mib(4)]}")
    # What no name leads to has all of Python's objects looked through.
    elsewhere = [ran("lost = mib(2)").pop("lost")]
    gc.disable()
    try:
        assert [one.size for one in find_owners(machine, namespace, cycles=True).lost] == [2 * MIB]
        del elsewhere
        namespace.clear()
        machine.settle()
        assert machine.devices[0].counters().allocated == 0
    finally:
        gc.enable()


def test_nothing_of_the_users_runs(machine: Any) -> None:
    namespace = ran(
        "calls = []\n"
        "class Loud:\n"
        "    kept = property(lambda self: calls.append('property'))\n"
        "    def __init__(self): self.__dict__['t'] = mib(8)\n"
        "    def __getattr__(self, name): calls.append(name); raise AttributeError(name)\n"
        "    def __iter__(self): calls.append('iter'); return iter(())\n"
        "    def __len__(self): calls.append('len'); return 0\n"
        "    def __eq__(self, other): calls.append('eq'); return True\n"
        "    def __hash__(self): calls.append('hash'); return 1\n"
        "    def __bool__(self): calls.append('bool'); return False\n"
        "    def __repr__(self): calls.append('repr'); return ''\n"
        "loud = Loud()\n"
        "class D(dict):\n"
        "    def __getitem__(self, k): calls.append('getitem')\n"
        "    def values(self): calls.append('values'); return []\n"
        "d = D(k=mib(4))\n"
    )
    holdings = find_owners(machine, namespace, cycles=True)
    assert namespace["calls"] == []
    assert places(holdings) == {"loud.t": 8 * MIB, "d['k']": 4 * MIB}


def test_a_users_module_is_a_root(machine: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_tools.py").write_text("import torch\nCACHE = {'k': torch.empty(1 << 21, device='cuda')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        holdings = find_owners(machine, ran("import users_tools"))
        (held,) = holdings.held
        assert held.place == "users_tools.CACHE['k']"
        assert holdings.roots[held.roots[0]].statement == "del users_tools.CACHE"
    finally:
        sys.modules.pop("users_tools", None)


# ---- the numbers alone

edges = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=40),
        st.sets(st.integers(0, count - 1), min_size=1),
    )
)


@settings(deadline=None, max_examples=200)
@given(edges)
def test_holders_and_cycles_are_what_plain_reachability_says(case: tuple[int, list[tuple[int, int]], set[int]]) -> None:
    count, pairs, roots = case
    children: dict[int, list[int]] = {node: [] for node in range(count)}
    for source, target in pairs:
        children[source].append(target)
    order = sorted(roots)
    graph = HoldGraph(order, children, {})
    holders = graph.holders()
    for node in range(count):
        bits = sum(1 << number for number, root in enumerate(order) if node in graph.reachable([root]))
        assert holders.get(node, 0) == bits
    reached = graph.reachable()
    on_cycle = {node for node in reached if any(node in graph.reachable([child]) for child in children[node])}
    assert graph.behind_cycles() == graph.reachable(on_cycle)
    times = [child for held in children.values() for child in held]
    assert graph.held_once(range(count)) == {one for one in range(count) if times.count(one) == 1 and one not in order}


DATA = """
shared = [{"row": [number]} for number in range(300)]
loop = {"data": shared}
loop["self"] = loop
class Sample:
    __module__ = "__main__"
    cache = []
    def __init__(self): self.data = loop
samples = [Sample() for _ in range(20)]
hosts = [{"x": torch.ones(3)} for _ in range(20)]
"""


def test_what_leads_to_no_memory_is_not_walked_object_by_object(machine: Any) -> None:
    holdings = find_owners(machine, ran(DATA + "x = mib(1)"))
    assert places(holdings) == {"x": MIB}
    assert holdings.objects < 100


@pytest.mark.parametrize(
    ("hidden", "place"),
    [
        ("samples[7].data['row'] = mib(1)", "loop['row']"),
        ("Sample.cache.append(mib(1))", "Sample.cache[0]"),
        ("shared[250]['row'].append(mib(1))", "shared[250]['row'][1]"),
        ("hosts[3]['x'].mine = mib(1)", "hosts[3]['x'].mine"),
        ("hosts[3]['x'].requires_grad_(); y = hosts[3]['x'] * 2; hosts[3]['y'] = y; del y; hosts[4] = mib(1)", "hosts[4]"),
        ("def function(): pass\nfunction.kept = mib(1)\nshared[9]['f'] = function; del function", "shared[9]['f'].kept"),
    ],
)  # fmt: skip
def test_memory_that_lies_deep_in_data_is_found(machine: Any, hidden: str, place: str) -> None:
    holdings = find_owners(machine, ran(DATA + hidden))
    assert holdings.lost == ()
    assert size_of(holdings.held) == MIB
    assert places(holdings) == {place: MIB}


def test_nothing_is_walked_where_nothing_is_live(machine: Any) -> None:
    holdings = find_owners(machine, ran(DATA))
    assert (holdings.objects, holdings.held, holdings.lost) == (0, (), ())


def test_places_come_in_the_order_of_their_numbers_and_ids_are_no_names(machine: Any) -> None:
    found = find_owners(machine, ran("x = [mib(1) for _ in range(12)]\ny = {140202411138080: mib(2)}"))
    assert [one.place for one in found.held] == ["y[id]", *(f"x[{number}]" for number in range(12))]


def test_zero_grad_frees_the_gradients_that_optimizers_know_and_no_more(machine: Any) -> None:
    found = find_owners(
        machine,
        ran(
            "m, t = torch.nn.Linear(512, 512, bias=False).cuda(), torch.nn.Linear(512, 512, bias=False).cuda()\n"
            "o = torch.optim.SGD(m.parameters())\nz = torch.ones(512, 512, device='cuda', requires_grad=True)\n"
            "(m(z) * t(z)).sum().backward()"
        ),
    )
    assert size_of(one for one in found.held if one.kind == "gradient") == 3 * MIB
    assert [one.place for one in found.freed_by_zero_grad()] == ["m.weight.grad"]


def test_parameters_that_share_their_memory_have_a_gradient_each(machine: Any) -> None:
    """As an LSTM's weights do on a device, and flattened parameters of a program's own."""
    found = find_owners(
        machine,
        ran(
            "flat = torch.zeros(2, 512, 512, device='cuda')\n"
            "m = torch.nn.ParameterList(torch.nn.Parameter(part) for part in flat)\n"
            "o = torch.optim.SGD(m.parameters())\n"
            "(m[0] @ m[1]).sum().backward()\ndel flat"
        ),
    )
    assert sorted(one.place for one in found.freed_by_zero_grad()) == ["m.0.grad", "m.1.grad"]


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement")
def test_parameters_that_wrap_others_are_where_the_others_are(machine: Any) -> None:
    """So that nobody says that an optimizer's parameters have left the device: `DTensor`, by PyTorch's own class for tests."""
    namespace = ran(
        "from torch.testing._internal.two_tensor import TwoTensor\n"
        "both = torch.nn.Parameter(TwoTensor(mib(1), mib(2).view(2, -1)[0]))\n"
        "optimizer = torch.optim.SGD([both], lr=0.1)\n"
    )
    inside = {(0, one.data_ptr()) for one in (namespace["both"].a, namespace["both"].b)}
    assert find_owners(machine, namespace).optimizers == {"optimizer": frozenset(inside)}
    assert inside == {(one.device, one.address) for one in find_owners(machine, namespace).held}


def test_a_module_made_by_hand_is_the_users(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose names `exec` filled has no file; a library's without a file is a library's."""
    tools, inner, odd = types.ModuleType("tools"), types.ModuleType("numpy.made_here"), types.ModuleType("odd")
    odd.__spec__ = importlib.machinery.ModuleSpec("odd", importlib.machinery.BuiltinImporter)
    for module in (tools, inner, odd):
        exec("history = []", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = ran("import tools\ntools.history.append(mib(3))")
    inner.history.append(torch.empty(2 << 18, device="cuda"))
    odd.history.append(torch.empty(1 << 18, device="cuda"))
    holdings = find_owners(machine, namespace)
    assert places(holdings)["tools.history[0]"] == 3 * MIB
    assert not [place for place in places(holdings) if "made_here" in place or "odd" in place]


def test_a_look_at_other_threads_keeps_nothing_of_theirs(machine: Any, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(gc.enable)
    gc.disable()
    namespace = ran(
        "import threading\nbegun, enough = threading.Event(), threading.Event()\n"
        "def work():\n    mine = mib(4)\n    begun.set()\n    enough.wait()\n"
        "thread = threading.Thread(target=work)\nthread.start()\nbegun.wait()"
    )
    (held,) = find_owners(machine, namespace).held
    assert (held.requested, held.place.partition(", in ")[0]) == (4 * MIB, "local `mine` of work()")
    namespace["enough"].set()
    namespace["thread"].join()
    assert torch.cuda.memory_allocated() == 0
