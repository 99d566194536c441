"""What keeps memory where no row and no plain name shows it: the answer names it, and its twin is left alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from causes_cells import named, names, notebook


def said_of(setup: str, cell: str, name: str, device: str = "A100-40GB") -> str:
    with notebook(device) as book:
        book.cell(setup)
        cause = named(book.measured(cell), name)
        return f"{cause.text} {cause.remedy}"


def blamed(setup: str, cell: str) -> list[str]:
    with notebook() as book:
        book.cell(setup)
        return [one.name for one in book.measured(cell).causes if not one.describes]


WHITEN = """
class Audit:
    def __init__(self): self.calls = []
    def note(self, x): self.calls.append({kept})
audit = Audit()
def whiten(x):
    y = x - x.mean(0)
    audit.note(y)
    return y.std().item()
"""
SPREAD = "spread = [whiten(torch.randn(2048, 1024, device='cuda')) for _ in range(8)]"


def test_what_grows_in_a_comprehension_is_told_by_the_line_that_makes_it() -> None:
    said = said_of(WHITEN.format(kept="x"), SPREAD, "growth")
    assert "Each iteration leaves 8.0 MiB more" in said
    assert "`audit.calls`" in said
    assert "`self.calls.append(x)`" in said
    assert blamed(WHITEN.format(kept="tuple(x.shape)"), SPREAD) == []


def test_data_that_a_comprehension_makes_are_no_growth() -> None:
    assert blamed("", "data = [torch.randn(2048, 1024, device='cuda') for _ in range(8)]") == []
    assert blamed("host = [torch.randn(2048, 1024) for _ in range(8)]", "data = [x.cuda() for x in host]") == []


ROUND = """
weights = {{n: torch.randn(1024, 1024, device="cuda") for n in range(4)}}
def round_of(clients):
    {start}
    for client in range(clients):
        after = {{n: w + client for n, w in weights.items()}}
        {each}
    return {end}
"""


def test_what_a_function_gathers_and_lets_go_of_is_told_where_it_is_put() -> None:
    gathers = ROUND.format(
        start="updates = []", each="updates.append({n: after[n] - weights[n] for n in after})", end="len(updates)"
    )
    said = said_of(gathers, "round_of(8)", "growth")
    assert "it is put into `updates` at In [" in said
    adds = ROUND.format(
        start="total = {n: torch.zeros_like(w) for n, w in weights.items()}",
        each="[total[n].add_(after[n] - weights[n]) for n in after]",
        end="len(total)",
    )
    assert blamed(adds, "round_of(8)") == []


STATES = """
class State:
    def __init__(self, field, previous=None):
        self.field, self.previous = field, previous
def step(state):
    return State(state.field + 1, {previous})
state = State(mib(8))
"""
STEPS = "for _ in range(8):\n    state = step(state)"


def test_a_chain_of_objects_is_told_by_its_link() -> None:
    said = said_of(STATES.format(previous="state"), STEPS, "growth")
    assert "`state.previous`, which leads from each to the one before" in said
    assert "`state.previous = None`" in said
    assert blamed(STATES.format(previous="None"), STEPS) == []


PROTOTYPES = """
class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.episode = nn.Linear(512, 1024), 0
    @torch.no_grad()
    def adapt(self, x):
        self.register_buffer(f"proto_{{self.episode}}", self.embed(x))
        self.episode {again}= 1
shots = Prototypes().cuda()
"""
ADAPTS = "for _ in range(8):\n    shots.adapt(torch.randn(4096, 512, device='cuda'))"


def test_attributes_that_differ_by_a_number_are_one_place() -> None:
    said = said_of(PROTOTYPES.format(again="+"), ADAPTS, "growth")
    assert "8 attributes, `shots.proto_0` to `shots.proto_7`" in said
    assert 'self.register_buffer(f"proto_{self.episode}"' in said
    assert blamed(PROTOTYPES.format(again=""), ADAPTS) == []


SESSIONS = """
import weakref
class Session:
    def __init__(self, user):
        self.keys = mib(16)
        weakref.finalize(self, {function})
    def release(self): pass
"""
OPENS = "for user in range(8):\n    session = Session(user)"


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """(The tests hide from the collector what was there before them: the registry of finalizers, too.)"""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_finalizer_keeps_is_told_with_what_to_give_it(unfrozen: None) -> None:
    said = said_of(SESSIONS.format(function="self.release"), OPENS, "growth")
    assert "it is held by `weakref.finalize`, put there" in said
    assert "`weakref.finalize(self, self.release)`" in said
    assert "give it a function outside of the class" in said
    assert blamed(SESSIONS.format(function="print, user"), OPENS) == []


SPANS = """
import contextvars
spans = contextvars.ContextVar("spans", default=())
def traced(x):
    y = x * 2
    spans.set((*spans.get(), {kept}))
    return y
"""
REQUESTS = "for _ in range(8):\n    total = traced(mib(8)).sum().item()"


def test_a_context_variable_is_a_name() -> None:
    said = said_of(SPANS.format(kept="y"), REQUESTS, "growth")
    assert "`spans" in said
    assert "`spans.set((*spans.get(), y))`" in said
    assert blamed(SPANS.format(kept="tuple(y.shape)"), REQUESTS) == []


CONTENDERS = """
class Contender:
    def __init__(self, width=2048):
        self.net = net(width, 4)
        self.opt = torch.optim.Adam(self.net.parameters())
    def train(self):
        loss = self.net(torch.randn(64, 2048, device="cuda")).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()
def halving(count):
    contenders = [Contender() for _ in range(count)]
    return min(one.train() for one in contenders)
"""


def test_models_in_a_list_of_a_function_that_ran_out_of_memory() -> None:
    said = said_of(CONTENDERS, "halving(20)", "models_in_a_list", "virtual:3GiB")
    assert "`contenders` of halving()" in said
    assert "`contenders = [Contender() for _ in range(count)]`" in said


@pytest.mark.parametrize("used", [False, True])
def test_models_of_earlier_cells_are_told_first_where_they_would_have_been_enough(used: bool) -> None:
    with notebook("virtual:3GiB") as book:
        book.cell(CONTENDERS)
        book.cell("first = Contender(5120)")
        report = book.measured(f"second = Contender(4096)\n{'first.net; ' if used else ''}x = mib(1500)\ny = mib(700)")
        assert report.error is not None
        if used:
            assert "left_from_before" not in names(report)
        else:
            cause = named(report, "left_from_before")
            assert "`first` is there from earlier cells, and this one does not use it" in cause.text
            assert report.causes[0].name == "left_from_before"


DENOISER = """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.state = nn.Linear(512, 512), torch.zeros(4096, 512, device="cuda")
    def push(self, x):
        {push}
        return self.state.mean()
denoiser = Denoiser().cuda().eval()
"""
PUSHES = """
means = 0.0
for _ in range(8):
    out = denoiser.push(torch.randn(4096, 512, device="cuda"))
    means += out.item()
"""


@pytest.mark.parametrize(
    "push",
    ["self.state = torch.tanh(self.mix(x + self.state))", "self.state[:2048] = self.mix(x + self.state)[:2048].tanh()"],
)
def test_the_attribute_that_hands_a_graph_on_is_named_in_an_evaluation(push: str) -> None:
    said = said_of(DENOISER.format(push=push), PUSHES, "missing_no_grad")
    assert "`denoiser.state` keeps the graphs of 8 iterations" in said
    assert push.partition(" = ")[0] in said
    without = DENOISER.format(push=push).replace("    def push", "    @torch.no_grad()\n    def push")
    assert blamed(without, PUSHES) == []


POLICY = """
policy = net(512, 3)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
log_probs = []
def episode():
    for _ in range(3):
        log_probs.append(policy(torch.randn(1024, 512, device="cuda")).log_softmax(1)[:, 0])
    loss = -torch.stack(log_probs).mean()
    optimizer.zero_grad()
    loss.backward({retain})
    {clear}
"""


def test_a_list_that_each_backward_goes_through_again_is_to_be_cleared() -> None:
    said = said_of(
        POLICY.format(retain="retain_graph=True", clear=""), "for _ in range(5):\n    episode()", "kept_graphs"
    )
    assert "`log_probs.clear()` behind that" in said
    assert "leave out `retain_graph=True`" in said
    assert blamed(POLICY.format(retain="", clear="log_probs.clear()"), "for _ in range(5):\n    episode()") == []


MAPS = """
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda().eval()
maps = []
def seen(module, args, out):
    {keep}
model[0].register_forward_hook(seen)
"""


def test_a_hook_that_keeps_the_last_forwards_only_is_not_blamed() -> None:
    cell = "with torch.no_grad():\n    for _ in range(6):\n        y = model(torch.randn(4096, 512, device='cuda'))"
    assert blamed(MAPS.format(keep="maps[:] = [out]"), cell) == []
    assert blamed(MAPS.format(keep="maps.append(out)"), cell) == ["growth"]


SHUFFLED = """
import random
def moved(count):
    for _ in range(count):
        yield torch.ones(1 << 18).cuda()
def shuffled(stream, size):
    buffer = []
    for one in stream:
        if len(buffer) < size:
            buffer.append(one)
            continue
        spot = random.randrange(size)
        one, buffer[spot] = buffer[spot], one
        yield one
    yield from buffer
model = nn.Linear(512, 512).cuda()
"""


@pytest.mark.parametrize(("size", "told"), [(40, True), (2, False)])
def test_samples_that_wait_in_a_shuffled_buffer_are_told(size: int, told: bool) -> None:
    cell = f"with torch.no_grad():\n    for one in shuffled(moved(80), {size}):\n        y = model(one.view(512, 512))"
    with notebook() as book:
        book.cell(SHUFFLED)
        report = book.measured(cell)
        assert ("data_ahead" in names(report)) is told


def test_data_of_an_earlier_cell_are_told_with_the_line_that_put_them_there() -> None:
    with notebook() as book:
        book.cell("soft = {}\nfor n in range(40):\n    soft[n] = torch.randn(4096, 512).cuda()")
        book.cell("model = nn.Linear(512, 8).cuda()")
        report = book.measured("with torch.no_grad():\n    for n in range(40):\n        y = model(soft[n])")
        assert "`soft[n] = torch.randn(4096, 512).cuda()`" in named(report, "data_ready").text


THREADS = """
import queue, threading, time
inbox, outbox = queue.Queue(), queue.Queue()
def serve():
    while (batch := inbox.get()) is not None:
        out = batch.cuda() * 2
        outbox.put(out.sum().item())
        {end}
workers = [threading.Thread(target=serve, daemon=True) for _ in range(3)]
for worker in workers:
    worker.start()
"""
SERVES = """
for _ in workers:
    inbox.put(torch.ones(1 << 21))
    time.sleep(0.5)
sums = [outbox.get() for _ in workers]
time.sleep(0.5)
"""


@pytest.mark.parametrize(("end", "told"), [("pass", True), ("del out, batch", False)])
def test_what_threads_keep_while_they_wait_is_told(end: str, told: bool) -> None:
    with notebook() as book:
        book.cell(THREADS.format(end=end))
        report = book.measured(SERVES)
        assert ("kept_by_threads" in names(report)) is told
        if told:
            cause = named(report, "kept_by_threads")
            assert "`out`" in cause.text
            assert "serve()" in cause.text
            assert "`del out`" in cause.remedy
            assert cause.describes
        book.cell("for _ in workers: inbox.put(None)\nfor worker in workers: worker.join()")


CACHED = """
from functools import lru_cache
class Encoder:
    @lru_cache(maxsize={size})
    def encode(self, text):
        return mib(8) + len(text)
encoder = Encoder()
def draw(text): return encoder.encode(text).sum().item()
"""


def test_a_cached_method_is_told_by_its_decorator() -> None:
    said = said_of(CACHED.format(size=64), "pictures = [draw('a' * n) for n in range(8)]", "growth")
    assert "`Encoder.encode`, put there at In [" in said
    assert "`@lru_cache(maxsize=64)`" in said
    assert blamed(CACHED.format(size=1), "pictures = [draw('a' * n) for n in range(8)]") == []


def test_several_forwards_of_one_call_are_told_where_they_are() -> None:
    loss = (
        "model = net(512, 6).eval()\ndef scores():\n    found = []\n    for _ in range(4):\n"
        "        found.append(model(torch.randn(2048, 512, device='cuda')).mean())\n    return torch.stack(found).mean()"
    )
    said = said_of(loss, "score = scores()", "missing_no_grad")
    assert "`score` keeps a graph of 4 forwards (line 2, In [" in said


CLOUD = """
points = nn.Parameter(mib(32))
opt = torch.optim.Adam([points])
def fit():
    points.square().mean().backward()
    opt.step()
    opt.zero_grad()
def split():
    global points
    grown = nn.Parameter(points.detach().clone())
    opt.param_groups[0]["params"] = [grown]
    opt.state[grown] = opt.state.{takes}(points)
    points = grown
"""


@pytest.mark.parametrize(("takes", "told"), [("get", True), ("pop", False)])
def test_states_of_parameters_that_were_replaced_are_told(takes: str, told: bool) -> None:
    cell = "for _ in range(6):\n    fit()\n    split()"
    with notebook() as book:
        book.cell(CLOUD.format(takes=takes).replace("opt.state.get(points)", "dict(opt.state[points])"))
        report = book.measured(cell)
        assert ("stale_states" in names(report)) is told
        if told:
            cause = named(report, "stale_states")
            assert '`opt.param_groups[0]["params"] = [grown]`' in cause.text
            assert "`del opt.state[old]`" in cause.remedy


def test_states_of_parameters_that_went_to_the_host_are_not_those_of_others() -> None:
    with notebook() as book:
        book.cell("model = nn.Linear(4096, 4096).cuda()\nopt = torch.optim.Adam(model.parameters())")
        book.cell("model(torch.randn(8, 4096).cuda()).mean().backward()\nopt.step()\nopt.zero_grad()")
        report = book.measured("model.cpu()")
        assert "idle_states" in names(report)
        assert "stale_states" not in names(report)


WRAPPED = """
import weakref
wrapped = weakref.WeakKeyDictionary()
class Wrapper:
    def __init__(self, module): self.module = {module}
def wrapper_of(module):
    if module not in wrapped:
        wrapped[module] = Wrapper(module)
    return wrapped[module]
"""


def test_a_weak_key_that_its_value_holds_is_told() -> None:
    cell = """
for _ in range(6):
    one = nn.Linear(1024, 2048).cuda()
    w = wrapper_of(one)
    y = one(mib(1).view(256, 1024))
"""
    said = said_of(WRAPPED.format(module="module"), cell, "growth")
    assert "it is held by `wrapped`, put there at In [3], line 4 (`self.module = module`)" in said
    assert "a `weakref.ref` of it" in said
    assert blamed(WRAPPED.format(module="weakref.ref(module)"), cell) == []


def test_what_a_cached_function_is_given_is_told_as_its_cache() -> None:
    cached = "import functools\n@functools.cache\ndef spread(x):\n    return x.std().item()"
    cell = "for _ in range(6):\n    total = spread(mib(8).clone())"
    said = said_of(cached, cell, "growth")
    assert "it is held by `spread`, put there at In [3], line 2 (`@functools.cache`)" in said
    assert "`spread.cache_clear()`" in said


JOBS = """
import gc
gc.disable()
class Step:
    def __init__(self, job, x):
        self.job, self.x = job, x
class Job:
    def __init__(self):
        self.steps = [Step(self, mib(8)) for _ in range(3)]
    def run(self):
        total = sum(step.x.sum() for step in self.steps).item()
        {end}
        return total
"""


def test_the_line_of_a_link_that_makes_a_cycle_is_told() -> None:
    try:
        said = said_of(JOBS.format(end="pass"), "sums = [Job().run() for _ in range(6)]", "reference_cycle")
        assert (
            "make `Step.job` a `weakref.ref`, or set it to None when done; In [3], line 5, `self.job, self.x = job, x`"
            in said
        )
        assert blamed(JOBS.format(end="self.steps.clear()"), "sums = [Job().run() for _ in range(6)]") == []
    finally:
        gc.enable()


SHAKY = """
import gc
gc.disable()
def fetch(x):
    y = x.cuda().repeat(8, 1)
    failure = None
    try:
        raise OSError("not there")
    except OSError as error:
        failure = {kept}
    return (y.mean(), failure is None)[0].item()
"""


def test_an_error_in_a_variable_of_its_own_frame_is_told_as_a_cycle() -> None:
    cell = "means = [fetch(torch.ones(512, 512)) for _ in range(8)]"
    try:
        with notebook() as book:
            book.cell(SHAKY.format(kept="error"))
            report = book.measured(cell)
            assert [one.name for one in report.causes if not one.describes] == ["reference_cycle"]
            assert "`failure = None` at the end of fetch()" in report.causes[0].remedy
        assert blamed(SHAKY.format(kept="str(error)"), cell) == []
    finally:
        gc.enable()


LOGGED = """
import logging, logging.handlers
handler = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)
log = logging.getLogger("scores")
log.addHandler(handler)
log.propagate = False
def score(x):
    y = x.cuda() * 2
    raise ValueError("no label")
def safely(x):
    try:
        return score(x)
    except ValueError:
        log.{call}("could not score")
"""


def test_errors_in_the_records_of_a_log_are_told_as_errors() -> None:
    cell = "scores = [safely(torch.ones(1 << 21)) for _ in range(6)]"
    said = said_of(LOGGED.format(call="exception"), cell, "kept_errors")
    assert "caught errors: their tracebacks hold" in said or "tracebacks, which hold" in said
    assert "Keep the text" in said
    assert "frees 0 B" not in said
    assert blamed(LOGGED.format(call="error"), cell) == []


TREE = """
class Node:
    def __init__(self, hidden, parent=None):
        self.hidden, self.parent, self.children = hidden, parent, {{}}
    def expand(self, dynamics, action):
        child = self.children[action] = Node(dynamics(self.hidden + action), parent={parent})
        return child
@torch.no_grad()
def search(root):
    for action in range(6):
        root.children.get(action) or root.expand(dynamics, action)
    return 3
dynamics = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).cuda()
root = Node(torch.randn(8, 64, 32, 32, device="cuda"))
"""
MOVES = """
moves = []
for move in range(10):
    action = search(root)
    moves.append(action)
    root = root.children[action]
"""


def test_what_each_turn_works_with_and_lets_go_of_is_no_growth() -> None:
    assert "growth" not in blamed(TREE.format(parent="None"), MOVES)
    # Each root knows the one before, with all that was tried there.
    with notebook() as book:
        book.cell(TREE.format(parent="self"))
        assert "growth" in names(book.measured(MOVES))
