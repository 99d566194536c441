"""What fills a peak inside a step, and what would take less: what is said helps as it is said."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import causes_cells
import pytest
from causes_cells import named, names

from gpumem_magic.causes.alike import bytes_of
from gpumem_magic.units import GIB, MIB

measured = partial(causes_cells.measured, device="T4")


class Told(NamedTuple):
    """cell: what tells the cause; better: what follows its advice. words: of the sentence."""

    cause: str
    before: str
    cell: str
    better: str
    words: str


SNAKE = """
from torch.utils.checkpoint import checkpoint
class Snake(nn.Module):
    def forward(self, x):
        return x + torch.sin(x * 2).pow(2) * torch.exp(x).sigmoid()
class MishFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        sp = F.softplus(x)
        th, sg = torch.tanh(sp), torch.sigmoid(x)
        ctx.save_for_backward({saved})
        return x * th
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        th = torch.tanh(F.softplus(x))
        return g * (th + x * torch.sigmoid(x) * (1 - th * th))
class Again(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act
    def forward(self, x):
        return checkpoint(self.act, x, use_reentrant=False)
def train(act):
    layers = [one for _ in range(6) for one in (nn.Conv1d(64, 64, 3, padding=1), act)]
    nn.Sequential(*layers).cuda()(torch.randn(16, 64, 8192, device="cuda")).mean().backward()
"""
BLOCKS = """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(64, 256, 1), nn.Conv1d(256, 64, 1)
    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
    def forward(self, x):
        for block in self.blocks:
            x = {call}
        return x.mean()
"""
TRAINED = "net = Net().cuda()\nx = torch.randn(8, 64, 8192, device='cuda')\nfor _ in range(2):\n    net(x).backward()"
BY_HAND = """
weights = [torch.randn(2048, 2048, device="cuda", requires_grad=True) for _ in range(12)]
model = nn.ParameterList(weights)
m = [torch.zeros_like(w) for w in weights]
def step():
    with torch.no_grad():
        {step}
"""
LISTS = (
    "hat = [one / 0.9 for one in m]\n        changes = [one.sign() for one in hat]\n"
    "        for w, change in zip(weights, changes):\n            w.sub_(change)"
)
LOOP = "for w, one in zip(weights, m):\n            w.sub_((one / 0.9).sign_())"
EXPERTS = """
experts = [nn.Linear(512, 512).cuda() for _ in range(16)]
x = torch.randn(8192, 512, device="cuda")
def mixed(x):
    {body}
"""
STACKED = "return torch.stack([f(x) for f in experts]).sum(0)"
ADDED = "total = torch.zeros_like(x)\n    for f in experts:\n        total += f(x)\n    return total"
MIXED = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.second = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            z = self.first(x)
{last}
"""
MIXED_STEP = "net, x = Both().cuda(), torch.randn(8, 3, 256, 256, device='cuda')\nnet(x).float().mean().backward()"
PENALTY = """
net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
old = [p.detach().clone() for p in net.parameters()]
flat = torch.nn.utils.parameters_to_vector(old)
"""
PENALISED = "((torch.nn.utils.parameters_to_vector(net.parameters()) - flat) ** 2).sum().backward()"
ONE_BY_ONE = "sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), old)).backward()"
SIMILAR = """
a, b = torch.rand(400, 3, 256, 256, device="cuda"), torch.rand(400, 3, 256, 256, device="cuda")
def likeness(a, b):
    c = a * b - a.mean() * b.mean()
    return (c / (a * a + b * b + 1)).mean((1, 2, 3))
"""
FORCES = """
body = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.SiLU())], nn.Linear(256, 1)).cuda()
def forces(at, training=False):
    at = at.requires_grad_()
    return -torch.autograd.grad(body(at).sum(), at, create_graph={graph})[0]
"""
ERROR = "x = torch.randn(65536, 256, device='cuda')\nfor _ in range(2):\n    w = forces(x).abs().mean().item()"
IDS = """
ids = [5, 2000000, 77, 1234567]
class Users(nn.Module):
    def __init__(self, ids):
        super().__init__()
        self.rows = nn.Embedding({size}, 64)
    def forward(self, u):
        return self.rows(u).sum()
"""
TOLD = [
    Told(
        "kept_steps",
        SNAKE.format(saved="x"),
        "train(Snake())",
        "train(Again(Snake()))",
        "`Snake` (In [3], line 6) keeps",
    ),
    Told(
        "kept_steps",
        SNAKE,
        "class Act(nn.Module):\n    def forward(self, x):\n        return MishFn.apply(x)\ntrain(Act())",
        "",
        "`MishFn` (In [3], line 12) keeps 3 tensors on the way to its result for backward in each of 6 calls",
    ),
    Told(
        "repeated_modules",
        BLOCKS,
        TRAINED,
        "",
        "The 8 modules of class `Block` keep",
    ),
    Told("sets_of_weights", BY_HAND.format(step=LISTS), "step()", "", "a tensor for each of 12 weights"),
    Told(
        "joined_to_be_reduced",
        EXPERTS.format(body=STACKED),
        "with torch.no_grad():\n    y = mixed(x)",
        "",
        "joins 16 results",
    ),
    Told(
        "outside_of_autocast",
        MIXED.format(last="        return self.second(z.float())"),
        MIXED_STEP,
        "",
        "runs outside of the autocast",
    ),
    Told("joined_weights", PENALTY, PENALISED, ONE_BY_ONE, "copies all weights into one piece"),
    Told(
        "all_at_once",
        SIMILAR,
        "w = likeness(a, b)",
        "w = torch.cat([likeness(*both) for both in zip(a.split(50), b.split(50))])",
        "works on all 400 rows at once",
    ),
    Told(
        "graph_of_gradients",
        FORCES.format(graph="True"),
        ERROR,
        "",
        "(In [3], line 6) makes a graph of the gradient's own",
    ),
    Told(
        "sized_by_the_largest",
        IDS.format(size="max(ids) + 1"),
        "users = Users(ids).cuda()\nusers(torch.tensor([5, 77], device='cuda')).backward()",
        "",
        "a row for each number up to the largest id, 2,000,001",
    ),
]
# What follows the advice: the definitions and the cell.
BETTER = {
    "MishFn": (
        SNAKE.format(saved="x"),
        "class Act(nn.Module):\n    def forward(self, x):\n        return MishFn.apply(x)\ntrain(Act())",
    ),
    "repeated_modules": (BLOCKS.format(call="checkpoint(block, x, use_reentrant=False)"), TRAINED),
    "sets_of_weights": (BY_HAND.format(step=LOOP), "step()"),
    "joined_to_be_reduced": (EXPERTS.format(body=ADDED), "with torch.no_grad():\n    y = mixed(x)"),
    "outside_of_autocast": (MIXED.format(last="            return self.second(z)"), MIXED_STEP),
    "graph_of_gradients": (FORCES.format(graph="training"), ERROR),
    "sized_by_the_largest": (
        IDS.format(size="len(set(ids))"),
        "users = Users(ids).cuda()\nusers(torch.tensor([0, 2], device='cuda')).backward()",
    ),
}
_SIZE = re.compile(r"would be about ([\d,.]+) (MiB|GiB)")


@pytest.mark.parametrize("told", TOLD, ids=[f"{number}-{one.cause}" for number, one in enumerate(TOLD)])
def test_what_fills_the_peak_is_told_with_what_takes_less(told: Told) -> None:
    of_own = "MishFn" in told.words
    before = told.before
    if of_own:
        before = before.format(saved="x, sp, th, sg")
    elif told.cause == "repeated_modules":
        before = before.format(call="block(x)")
    report = measured(before, told.cell)
    cause = named(report, told.cause)
    assert told.words in cause.text, cause.text
    # It is the answer.
    assert cause.sentence in report.answer, report.answer
    better = (before, told.better) if told.better else BETTER["MishFn" if of_own else told.cause]
    other = measured(*better)
    assert told.cause not in names(other), other.causes
    assert other.peak.allocated < report.peak.allocated
    if (promised := _SIZE.search(cause.remedy)) is not None:
        size = float(promised[1].replace(",", "")) * (MIB if promised[2] == "MiB" else GIB)
        # (Half of the gain, and twice of it, would be no "about".)
        assert abs(other.peak.allocated - size) <= 0.15 * report.peak.allocated, (
            cause.remedy,
            other.peak.allocated / MIB,
        )


def test_batch_norms_of_what_would_be_computed_again_are_mentioned() -> None:
    before = (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Sequential(*[nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), {norm}(16), nn.ReLU())"
        " for _ in range(3)])\n    def forward(self, x): return x + self.inner(x)\n"
        "net = nn.Sequential(*[Block() for _ in range(6)]).cuda()"
    )
    cell = "for _ in range(2):\n    net(torch.randn(16, 16, 128, 128, device='cuda')).mean().backward()"
    twice = "Their batch norms take each batch's statistics twice then."
    assert twice in named(measured(before.format(norm="nn.BatchNorm2d"), cell), "repeated_modules").remedy
    assert twice not in named(measured(before.format(norm="nn.InstanceNorm2d"), cell), "repeated_modules").remedy


def test_numbers_from_numpy_that_make_all_wide_are_told() -> None:
    before = "import numpy as np\nmean = torch.from_numpy(np.array([0.5, 0.4, 0.3])).view(1, 3, 1, 1).cuda()\n"
    before += "x = torch.rand(64, 3, 512, 512, device='cuda')"
    cause = named(measured(before, "y = x - mean"), "promoted")
    assert "gives float64, because `mean` (1, 3, 1, 1) is float64, where the rest is float32" in cause.text
    assert cause.remedy == "`mean.to(torch.float32)` leaves the result in float32, half of that."
    assert cause.bytes == bytes_of((64, 3, 512, 512), "float32")
    assert "promoted" not in names(measured(before, "y = x - mean.to(torch.float32)"))


def test_what_is_written_to_is_not_to_be_expanded() -> None:
    before = "rows = torch.arange(4096, device='cuda').view(1, -1)\nfar = torch.rand(8192, 4096, device='cuda')"
    kept = "numbers = rows.repeat(8192, 1)\nw = {} * far"
    assert "expanded_copy" in names(measured(before, kept.format("numbers")))
    written = "numbers = rows.repeat(8192, 1)\nnumbers[far > 0.5] = 0\nw = numbers * far"
    assert "expanded_copy" not in names(measured(before, written))


def test_a_loss_with_a_detached_target_is_no_loss_of_that_alone() -> None:
    before = "enc, dec = nn.Linear(512, 4096).cuda(), nn.Linear(4096, 512).cuda()\nx = torch.randn(8192, 512, device='cuda')\n"
    before += "def losses(x):\n    z = enc(x)\n    q = z.detach().round()\n    return F.mse_loss(dec(z), x) + F.mse_loss(q, {})"
    cell = "for _ in range(2):\n    losses(x).backward()"
    assert "target_graphs" not in names(measured(before.format("z.detach()"), cell))


def test_a_whole_set_at_once_is_told_though_others_came_in_batches() -> None:
    before = (
        "net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 1)).cuda().eval()\n"
        "few, all = torch.randn(4096, 64), torch.randn(400000, 64)"
    )
    cell = (
        "with torch.no_grad():\n    for part in few.split(1024):\n        net(part.cuda()).mean().item()\n"
        "    net({}.cuda()).mean().item()"
    )
    assert "whole_batch" in names(measured(before, cell.format("all")))
    assert "whole_batch" not in names(measured(before, cell.format("few[:1024]")))


def test_windows_in_a_product_are_a_convolution_and_those_with_weights_of_their_own_are_none() -> None:
    before = (
        "w = torch.randn(64, 32 * 49, device='cuda', requires_grad=True)\nx = torch.randn(8, 32, 128, 128, device='cuda')\n"
        "own = torch.rand(8, 32 * 49, 128 * 128, device='cuda', requires_grad=True)"
    )
    cell = "cols = F.unfold(x, 7, padding=3)\n({} cols).mean().backward()"
    # (The product has its windows copied into one piece first.)
    assert "F.conv2d" in named(measured(before, cell.format("w @")), "grown_result").remedy
    assert "F.conv2d" not in named(measured(before, cell.format("own *")), "grown_result").remedy


def test_what_is_known_of_a_statement_is_told_rather_than_that_it_takes_all_rows_at_once() -> None:
    before = "ids = torch.randint(0, 1000, (20_000_000,), device='cuda')\nbanned = torch.arange(100, device='cuda')"
    told = names(measured(before, "keep = ~torch.isin(ids, banned)"))
    assert "compared_with_each" in told
    assert "all_at_once" not in told


def test_an_enlarged_result_is_told_with_all_that_has_its_size_for_that() -> None:
    before = (
        "net = nn.Conv2d(3, 150, 4, 4).cuda()\nimages = torch.randn(4, 3, 512, 512, device='cuda')\n"
        "masks = torch.randint(0, 150, (4, 512, 512), device='cuda')"
    )
    cell = "F.cross_entropy(F.interpolate(net(images), size=(512, 512), mode='bilinear'), masks).backward()"
    assert (
        "(4, 150, 512, 512) from (4, 150, 128, 128), 16 times as much"
        in named(measured(before, cell), "grown_result").text
    )


def test_gradients_that_a_loop_carries_on_may_be_for_a_backward_to_come() -> None:
    before = (
        "base = [torch.randn(1024, 1024, device='cuda', requires_grad=True) for _ in range(4)]\n"
        "support = torch.randn(512, 1024, device='cuda')\n"
        "def predict(x, weights):\n    for weight in weights:\n        x = torch.tanh(x @ weight)\n    return x"
    )
    cell = (
        "fast = base\nfor step in range(8):\n    loss = predict(support, fast).pow(2).mean()\n"
        "    slopes = torch.autograd.grad(loss, fast, create_graph=True)\n"
        "    fast = [weight - 0.01 * slope for weight, slope in zip(fast, slopes)]"
    )
    told = names(measured(before, cell))
    assert "kept_graphs" in told
    assert "graph_of_gradients" not in told


def test_what_cudnn_keeps_of_sequences_is_the_batchs() -> None:
    with causes_cells.notebook("T4") as book:
        book.cell("rnn = nn.LSTM(64, 128, batch_first=True).cuda()")
        report = book.measured("rnn(torch.randn(48, 2000, 64, device='cuda'))[0].sum().backward()")
        (cause,) = [one for one in report.causes if one.name == "whole_batch"]
        assert "The batch of 48 items takes " in cause.text
        half = book.measured("rnn(torch.randn(24, 2000, 64, device='cuda'))[0].sum().backward()")
        saved = float(re.search(r"about ([\d,]+) MiB less", cause.remedy)[1].replace(",", "")) * (1 << 20)
        assert report.peak.allocated - half.peak.allocated == pytest.approx(saved, rel=0.1)
