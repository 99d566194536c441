"""What stays though its work is done, and what is made once more than needed: what is said helps as it is said."""

from __future__ import annotations

import re

import pytest
from causes_cells import Notebook, named, names, notebook

from gpumem_magic import Report
from gpumem_magic.devices.reads import _stack
from gpumem_magic.report.model import Cause
from gpumem_magic.units import MIB


def run(book: Notebook, before: str, cell: str) -> Report:
    book.cell(f"import torch.nn.functional as F\n{before}")
    report = book.measured(cell)
    assert report.error is None
    return report


def peak_said(cause: Cause) -> float:
    """In MiB."""
    found = re.search(r"peak (?:would be (?:at most )?)?([\d,.]+) MiB", cause.remedy)
    assert found is not None, cause.remedy
    return float(found[1].replace(",", ""))


STEPS = """
small = nn.Sequential(nn.Linear(4096, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
batches = [torch.zeros(16384, 4096) for _ in range(3)]
"""
LOOP = """
for batch in batches:
    x = batch.cuda()
    loss = small(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_batch_before_is_let_go_of_at_the_end_of_a_turn() -> None:
    with notebook() as book:
        report = run(book, STEPS, LOOP)
        cause = named(report, "held_over")
        assert "`x` (line 4) still holds the previous one's result: 256 MiB twice at the peak" in cause.text
        assert cause.remedy.startswith("`del x` at the end of each iteration")
        book.cell("del x, loss")
        better = book.measured(LOOP + "    del x\n")
        assert report.peak.allocated - better.peak.allocated > 200 * MIB
        assert "held_over" not in names(better)
        # Small ones are nobody's trouble.
        book.cell("batches = [torch.zeros(64, 4096) for _ in range(3)]")
        assert "held_over" not in names(book.measured(LOOP))


KEPT = """
def sample(n): return torch.zeros(n, 4096, device="cuda").relu()
wide = nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 1)).cuda()
"""
SAMPLES = """
for step in range(3):
    loss = wide(torch.zeros(8192, 64, device="cuda")).mean()
    loss.backward()
    wide.zero_grad()
    if step == 0:
        samples = sample(8192)
        mean = samples.mean().item(){after}
"""


def test_what_the_rest_of_a_cell_does_not_read_could_be_on_the_host() -> None:
    with notebook() as book:
        cause = named(run(book, KEPT, SAMPLES.format(after="")), "unread_results")
        assert "`samples` (line 8) still keeps its result at the peak: 128 MiB" in cause.text
        assert "The rest of the cell does not read it: on the host (`.cpu()`)" in cause.remedy
        book.cell("del samples, loss")
        moved = book.measured(SAMPLES.format(after="\n        samples = samples.cpu()"))
        assert peak_said(cause) == pytest.approx(moved.peak.allocated / MIB, abs=1)
        assert "unread_results" not in names(moved)
        for after in ("\n    if step:\n        print(samples.std())", "\nprint(samples.std())"):
            assert "unread_results" not in names(book.measured(SAMPLES.format(after=after)))
        # A function from before may read it.
        book.cell("def later(): return samples.std()")
        assert "unread_results" not in names(book.measured(SAMPLES.format(after="")))


TWO = """
def blocks(width, n): return nn.Sequential(*[nn.Linear(width, width) for _ in range(n)]).cuda()
first, second = blocks(4096, 4), blocks(64, 2)
x = torch.zeros(16, 4096, device="cuda")
"""
ONE_AFTER_THE_OTHER = """
with torch.no_grad():
    y = first(x)
    {move}
    z = second(y.view(-1, 64).repeat(512, 1)){again}
"""


def test_a_model_that_is_done_is_moved_before_the_next_one_works() -> None:
    with notebook() as book:
        cause = named(run(book, TWO, ONE_AFTER_THE_OTHER.format(move="pass", again="")), "unused_models")
        assert "`first` has run for the last time before line 6" in cause.text
        book.cell("del y, z")
        moved = book.measured(ONE_AFTER_THE_OTHER.format(move="first.cpu()", again=""))
        assert peak_said(cause) == pytest.approx(moved.peak.allocated / MIB, abs=1)
        book.cell("first.cuda()")
        again = book.measured(ONE_AFTER_THE_OTHER.format(move="pass", again="\n    w = first(x)"))
        assert "unused_models" not in names(again)
        read = book.measured(ONE_AFTER_THE_OTHER.format(move="pass", again=" + first[0].weight.mean()"))
        assert "unused_models" not in names(read)


REPLACED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 512), nn.Linear(512, 32768)
    def forward(self, x): return self.head(self.body(x))
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
x = torch.zeros(8, 64, device="cuda")
def steps():
    for _ in range(2):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
steps()
optimizer.zero_grad()
"""


def test_a_part_that_was_replaced_behind_the_optimizer_stays_in_it() -> None:
    with notebook() as book:
        cause = named(run(book, REPLACED, "net.head = nn.Linear(512, 8).cuda()\nsteps()"), "optimizer_of_the_former")
        line = "(since line 2, `net.head = nn.Linear(512, 8).cuda()`)"
        assert cause.text.startswith(
            f"`optimizer` {line} alone holds 64.1 MiB of parameters that no model has any more"
        )
        (freed,) = re.findall(r"frees ([\d.]+) MiB", cause.remedy)
        before = book.allocated()
        book.cell("optimizer = torch.optim.Adam(net.parameters())")
        # (With the states of the rest.)
        assert before - book.allocated() == pytest.approx(float(freed) * MIB, rel=0.02)
        assert "optimizer_of_the_former" not in names(book.measured("steps()"))


STORED = """
class Own(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["start"] = START
            self.state[p]["far"] = p.flatten()[::8].sub(self.state[p]["start"]).norm()
layers = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
optimizer = Own(layers.parameters())
layers(torch.zeros(4, 2048, device="cuda")).sum().backward()
"""


def test_a_view_in_an_optimizers_state_keeps_all() -> None:
    with notebook() as book:
        report = run(book, STORED.replace("START", "p.clone().flatten()[::8]"), "optimizer.step()")
        cause = named(report, "pinned_by_view")
        assert 'line 9, `self.state[p]["start"] = ' in cause.text
        assert "frees 56.0 MiB" in cause.remedy
    with notebook() as book:
        other = run(book, STORED.replace("START", "p.flatten()[::8].clone()"), "optimizer.step()")
        assert "pinned_by_view" not in names(other)
        assert report.peak.allocated - other.peak.allocated > 50 * MIB


HOOKED = """
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
def look(x):
    def keep(module, args, out):
        module.seen = SEEN
    handles = [layer.register_forward_hook(keep) for layer in net]
    mean = net(x).mean()
    for handle in handles:
        handle.remove()
    return mean.item()
"""


def test_a_hook_that_is_gone_has_left_what_it_kept() -> None:
    with notebook() as book:
        cell = "with torch.no_grad():\n    mean = look(torch.zeros(16384, 256, device='cuda'))"
        cause = named(run(book, HOOKED.replace("SEEN", "out"), cell), "kept_by_hook")
        assert "has left what modules put out in `net.0.seen` and 2 other places: 128 MiB" in cause.text
        assert "Take it off" not in cause.remedy
        before = book.allocated()
        book.cell("for layer in net: del layer.seen")
        assert before - book.allocated() == pytest.approx(cause.bytes, rel=0.01)
        assert "kept_by_hook" not in names(run(book, HOOKED.replace("SEEN", "out.shape"), cell))


STREAMS = """
def turn(stream):
    with torch.cuda.stream(stream):
        x = torch.zeros(128 << 18, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    return x.sum()
"""


def test_each_stream_has_blocks_of_its_own() -> None:
    with notebook() as book:
        report = run(book, STREAMS, "for _ in range(4):\n    stream = torch.cuda.Stream()\n    y = turn(stream)")
        cause = named(report, "other_streams")
        assert "512 MiB" in cause.text
        assert "`stream = torch.cuda.Stream()`, line 3" in cause.text
    with notebook() as book:
        once = run(book, STREAMS, "stream = torch.cuda.Stream()\nfor _ in range(4):\n    y = turn(stream)")
        assert "other_streams" not in names(once)
        reserved = [max(row.peak_reserved for row in one.checkpoints) for one in (report, once)]
        assert reserved[0] - reserved[1] == cause.bytes == 384 * MIB


PACKED = """
deep = nn.Sequential(nn.Linear(512, 4096), nn.Sigmoid()).cuda()
x = torch.zeros(2048, 512, device="cuda")
def look():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: KEPT, lambda t: t):
        return deep(x).mean().item()
"""


def test_a_pack_hook_makes_a_circle_that_python_does_not_see() -> None:
    with notebook() as book:
        report = run(book, PACKED.replace("KEPT", "t"), "for _ in range(4):\n    look()")
        assert "A pack hook (`with torch.autograd.graph.saved_tensors_hooks(" in named(report, "growth").text
        assert "`t.detach()`" in named(report, "growth").remedy
    with notebook() as book:
        assert "growth" not in names(run(book, PACKED.replace("KEPT", "t.detach()"), "for _ in range(4):\n    look()"))


TRAINED = """
layers = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
layers(torch.zeros(4, 2048, device="cuda")).sum().backward()
"""
CRITIC = """
critic = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).cuda()
actor = nn.Linear(64, 4).cuda()
x = torch.zeros(16384, 64, device="cuda")
def learn(advantage):
    actor(x).mean().mul(advantage.detach().mean()).backward()
"""


@pytest.mark.parametrize(
    ("before", "cell", "better", "told", "said"),
    [
        (
            TRAINED,
            "flat = torch.cat([p.grad.flatten() for p in layers.parameters()])\nn = flat.norm()",
            "n = torch.nn.utils.get_total_norm(p.grad for p in layers.parameters())",
            "joined_gradients",
            "`torch.nn.utils.get_total_norm(",
        ),
        (
            "w = nn.Embedding(8192, 4096).to('cuda', torch.bfloat16)\n"
            "w(torch.zeros(4, dtype=torch.long, device='cuda')).sum().backward()",
            "n = w.weight.grad.float().pow(2).sum().sqrt()",
            "n = torch.linalg.vector_norm(w.weight.grad, dtype=torch.float32)",
            "float32_copy",
            "`torch.linalg.vector_norm(x, dtype=torch.float32)`",
        ),
        (
            "x = torch.zeros(4096, 8192, device='cuda', dtype=torch.float16)\nrow = torch.ones(4096, 1, device='cuda')",
            "y = x * row",
            "y = x * row.to(torch.float16)",
            "promoted",
            "`row.to(torch.float16)` leaves the result in float16",
        ),
        (
            "x = torch.zeros(128, 1024, 1024, device='cuda')\ncounts = torch.ones(1024, 1024, device='cuda')",
            "x = x / counts\ny = x[:4].argmax(0)",
            "x.div_(counts)\ny = x[:4].argmax(0)",
            "in_place",
            "(`x.div_(counts)`)",
        ),
        (
            "x, w = torch.zeros(4096, 128, device='cuda'), torch.zeros(4096, device='cuda')",
            "y = torch.einsum('ki,k,kj,k->ij', x, w, x, w)",
            "y = torch.einsum('ki,k,k,kj->ij', x, w, w, x)",
            "all_pairs",
            "another order",
        ),
        (
            "x, seen = torch.ones(8192, 8192, device='cuda'), torch.ones(8192, 1, dtype=torch.bool, device='cuda')",
            "y = torch.where(seen, x, torch.zeros_like(x))",
            "y = torch.where(seen, x, 0.0)",
            "zeros_for_where",
            "`torch.where(mask, x, 0.0)`",
        ),
        (
            "x = torch.zeros(1024, 32000, device='cuda', requires_grad=True)",
            "y = torch.log(torch.softmax(x, -1) + 1e-9)\ny.mean().backward()",
            "y = F.log_softmax(x, -1)\ny.mean().backward()",
            "log_of_softmax",
            "`F.log_softmax` makes one",
        ),
        (
            "x, w = torch.ones(3, 1024, 1024, device='cuda'), torch.ones(1, device='cuda')",
            "y = torch.stack([x] * 16) * w",
            "y = x.expand(16, *x.shape) * w",
            "expanded_copy",
            "`x.expand(16, *x.shape)` is a view",
        ),
        (
            "wide = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()).cuda()\nx = torch.ones(1, 3, 4096, 4096)",
            "with torch.no_grad():\n    y = wide(x.cuda()).mean()",
            "with torch.no_grad():\n    y = sum(wide(part.cuda()).mean() for part in x.split(512, 2))",
            "large_images",
            "give it parts of them (crops, tiles)",
        ),
        (
            CRITIC,
            "advantage = 1 - critic(x)\nlearn(advantage)",
            "with torch.no_grad():\n    advantage = 1 - critic(x)\nlearn(advantage)",
            "unused_graphs",
            "`with torch.no_grad():`",
        ),
    ],
)
def test_the_other_way_takes_less(before: str, cell: str, better: str, told: str, said: str) -> None:
    with notebook() as book:
        report = run(book, before, cell)
        cause = named(report, told)
        assert said in cause.remedy
    with notebook() as book:
        other = run(book, before, better)
        assert told not in names(other)
        assert other.peak.allocated < 0.9 * report.peak.allocated
        if "peak would be" in cause.remedy:
            assert peak_said(cause) == pytest.approx(other.peak.allocated / MIB, rel=0.02)


@pytest.mark.parametrize(
    "cell",
    [
        # The other name has it still; what another function reads, too.
        "z = x\nx = x / 2\ny = x[:4].argmax(0)",
        "x = 2 / x\ny = x[:4].argmax(0)",
    ],
)
def test_what_something_else_has_is_not_changed_in_place(cell: str) -> None:
    with notebook() as book:
        assert "in_place" not in names(run(book, "x = torch.ones(128, 1024, 1024, device='cuda')", cell))


SIMILAR = """
encoder = net(1024, 16)
def steps(n):
    x = torch.zeros(n, 1024, device="cuda")
    z = F.normalize(encoder(x), dim=1)
    F.cross_entropy(z @ z.T, torch.arange(n, device="cuda")).backward()
"""


def test_half_a_batch_has_a_quarter_of_its_pairs() -> None:
    with notebook() as book:
        report = run(book, SIMILAR, "steps(4096)")
        cause = named(report, "whole_batch")
        (saved,) = re.findall(r"Half the batch would take about ([\d,]+) MiB less", cause.remedy)
        book.cell("encoder.zero_grad()")
        half = book.measured("steps(2048)")
        less = (report.peak.allocated - half.peak.allocated) / MIB
        assert float(saved.replace(",", "")) == pytest.approx(less, rel=0.02)


def test_half_of_what_goes_through_a_model_at_once_takes_half() -> None:
    with notebook() as book:
        layers = "layers = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()).cuda()"
        cell = "with torch.no_grad():\n    y = layers(torch.zeros({}, 3, 512, 512, device='cuda')).mean()"
        report = run(book, layers, cell.format(16))
        cause = named(report, "whole_batch")
        assert cause.text.startswith("All 16 items go through `layers` at once: 2,048 MiB")
        (saved,) = re.findall(r"about ([\d,]+) MiB less", cause.remedy)
        half = book.measured(cell.format(8))
        less = (report.peak.allocated - half.peak.allocated) / MIB
        assert float(saved.replace(",", "")) == pytest.approx(less, rel=0.05)


def test_weights_in_float32_that_are_most_of_a_forwards_memory_are_told() -> None:
    wide = "wide = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(5)]).cuda()"
    cell = "with torch.no_grad():\n    y = wide(torch.zeros(8, 8192, device='cuda'{}))"
    with notebook("A100") as book:
        cause = named(run(book, wide, cell.format("")), "wide_inference")
        assert "1,280 MiB" in cause.text
        book.cell("wide.to(torch.bfloat16)")
        assert book.allocated() < 700 * MIB
        assert "wide_inference" not in names(book.measured(cell.format(", dtype=torch.bfloat16")))


GROWS = """
import functools, itertools
batches = [torch.zeros(4096, 1024) for _ in range(5)]
@torch.no_grad()
def kept(x, seen=[]):
    seen.append(x.cuda())
class Part(nn.Module):
    every = set()
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2048, 2048, device="cuda"))
        Part.every.add(self)
    def forward(self, x): return x @ self.weight
row = torch.zeros(1, 2048, device="cuda")
around = itertools.cycle(batch.cuda() for batch in batches)
"""


@pytest.mark.parametrize(
    ("cell", "place", "said", "code"),
    [
        ("for _ in range(5):\n    mean = next(around).mean()", "held by `around`", "a generator with", "del around"),
        (
            "for batch in batches:\n    kept(batch)",
            "default argument `seen` of kept",
            "`None` as the default",
            "del kept",
        ),
        (
            "for _ in range(5):\n    with torch.no_grad():\n        y = Part()(row)",
            "held by `Part.every`",
            "",
            "Part.every.clear()",
        ),
    ],
)
def test_what_is_said_to_let_go_does(cell: str, place: str, said: str, code: str) -> None:
    with notebook() as book:
        cause = named(run(book, GROWS, cell), "growth")
        assert place in cause.text
        assert said in cause.remedy
        assert f"`{code}`" in cause.remedy
        before = book.allocated()
        book.cell(code)
        assert before - book.allocated() >= 64 * MIB


def test_a_function_that_calls_itself_is_defined_on_its_own() -> None:
    within = (
        "def largest(x):\n    def visit(n):\n        return visit(n - 1) if n else x.sum()\n    return visit(2)\n"
        "for _ in range(3):\n    y = largest(torch.zeros(4096, 4096, device='cuda'))"
    )
    alone = (
        "def visit(n, x):\n    return visit(n - 1, x) if n else x.sum()\n"
        "for _ in range(3):\n    y = visit(2, torch.zeros(4096, 4096, device='cuda'))"
    )
    with notebook() as book:
        cause = named(run(book, "", within), "reference_cycle")
        assert "define `visit` on its own, with what it reads as arguments" in cause.remedy
        book.cell("%gpumem_free cycles")
        assert "reference_cycle" not in names(book.measured(alone))


def test_what_runs_the_shell_is_no_part_of_the_program() -> None:
    with notebook() as book:
        book.shell.user_ns["stack"] = lambda line: tuple(_stack(line))
        book.cell(
            "import sys\ndef read():\n    here = sys._getframe()\n    return stack((here.f_code.co_filename, here.f_lineno))"
        )
        book.cell("places = read()")
        files = [file for file, _ in book.shell.user_ns["places"]]
        assert len(files) == 2
        assert __file__ not in files
