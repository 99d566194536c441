"""What is made whole though a part would do, for all pairs, or kept by every turn of a loop: what is said helps as it is said."""

from __future__ import annotations

import pytest
from causes_cells import measured, named, names

NUMBERS = "x = torch.rand(1024, 16384, device='cuda')\ny = torch.randint(0, 4096, (64,), device='cuda')\n"


@pytest.mark.parametrize(
    ("cell", "better", "said"),
    [
        (
            "w = x.sort(1, descending=True)[0][:, :8].sum()",
            "w = x.topk(8, 1)[0].sum()",
            "Only the first ones are read: `topk`",
        ),
        ("w = x.argsort(1)[:, :8].sum()", "w = x.topk(8, 1, largest=False)[1].sum()", "with `largest=False` `topk`"),
        ("w = torch.sort(x, descending=True).values", "w = x.topk(8, 1)[0]", "sort some of the rows at a time"),
        (
            "w = x.flatten()[:9000000].quantile(0.9)",
            "w = x.flatten()[::20].quantile(0.9)",
            "A sample of the numbers takes less",
        ),
        ("w = torch.eye(4096, device='cuda')[y].sum()", "w = F.one_hot(y, 4096).sum()", "`F.one_hot(numbers, 4096)`"),
        (
            "w = torch.block_diag(*x.view(64, 512, 512)) @ x.view(32768, -1)",
            "w = torch.bmm(x.view(64, 512, 512), x.view(64, 512, 512))",
            "needs none of the zeros: `torch.bmm(torch.stack(blocks), ...)`",
        ),
        (
            "w = (x > 0.5).sum(1)",
            "w = (x > 0.5).sum(1, dtype=torch.int32)",
            "With `dtype=torch.int32` the copy is half as large",
        ),
        ("w = (x > 0.5).count_nonzero(1)", "w = (x > 0.5).any(1)", "`.any()` and `.all()` need none"),
        (
            "ids = y.repeat(65536)\nw = torch.isin(ids, y)",
            "ids = y.repeat(65536)\nt = torch.zeros(4096, dtype=torch.bool, device='cuda')\nt[y] = True\nw = t[ids]",
            "`table[y] = True`, `table[ids]`",
        ),
        ("w = torch.fft.fft2(x)", "w = torch.fft.rfft2(x)", "`torch.fft.rfft2` makes one half, (1024, 8193)"),
        (
            "w = torch.fft.fft(x, dim=1)",
            "w = torch.fft.rfft(x, dim=1)",
            "`torch.fft.rfft` makes one half, (1024, 8193)",
        ),
    ],
)
def test_a_part_of_what_is_made_whole_takes_less(cell: str, better: str, said: str) -> None:
    report = measured(NUMBERS, cell)
    assert any(said in cause.remedy for cause in report.causes), report.causes
    assert said in " ".join(str(report).split())
    other = measured(NUMBERS, better)
    assert other.peak.allocated < report.peak.allocated
    assert not {"sorted", "unit_matrix", "both_halves", "compared_with_each"} & set(names(other))


@pytest.mark.parametrize(
    "cell",
    [
        "w = torch.eye(1024, device='cuda') @ x",
        "w = torch.fft.fft2(x.to(torch.complex64))",
        "w = x.sum(1)",
        "w = (x > 0.5).all(1)",
        "w = x.sort(1).values\ndel w\nz = torch.rand(4096, 40960, device='cuda')",
    ],
)
def test_what_is_wanted_whole_is_not_blamed(cell: str) -> None:
    told = {"sorted", "unit_matrix", "both_halves", "summed_as_integers"}
    assert not told & set(names(measured(NUMBERS, cell)))


def test_an_index_that_is_repeated_may_be_expanded() -> None:
    before = "h, b = torch.rand(100000, 128, device='cuda'), torch.randint(0, 9, (100000,), device='cuda')\n"
    cell = "i = b.unsqueeze(1).{}(100000, 128)\nw = torch.zeros(9, 128, device='cuda').scatter_add_(0, i, h)"
    report = measured(before, cell.replace("100000, 128)\n", "1, 128)\n").format("repeat"))
    assert "scatter_add_(0, i, h)` (line 3) reads one as it is" in named(report, "expanded_copy").remedy
    assert measured(before, cell.format("expand")).peak.allocated < report.peak.allocated - (90 << 20)


PAIRS = "w = torch.rand(512, 256, device='cuda', requires_grad=True)\nlayer = nn.Linear(512, 1).cuda()\n"


@pytest.mark.parametrize(
    ("cell", "better", "said"),
    [
        (
            "d = (w[:, None] - w[None]).norm(p=1, dim=-1)\nd.sum().backward()",
            "torch.cdist(w, w, p=1).sum().backward()",
            "p=1",
        ),
        (
            "d = (w[:, None] - w[None]).norm(dim=-1)\nd.sum().backward()",
            "torch.cdist(w, w).sum().backward()",
            "cdist(w, w)`",
        ),
        (
            "F.cosine_similarity(w[:, None], w[None], dim=-1).sum().backward()",
            "(F.normalize(w, dim=-1) @ F.normalize(w, dim=-1).T).sum().backward()",
            "`F.normalize(w, dim=-1) @ F.normalize(w, dim=-1).T`",
        ),
        (
            "n = len(w)\np = torch.cat([w.repeat_interleave(n, 0), w.repeat(n, 1)], 1)\nlayer(p).sum().backward()",
            "a, b = layer.weight.split(256, 1)\n(w @ a.T + (w @ b.T).T).sum().backward()",
            "apply its weight's parts to the parts before they are paired",
        ),
    ],
)
def test_pairs_have_another_way_that_is_the_same(cell: str, better: str, said: str) -> None:
    report = measured(PAIRS, cell)
    assert any(said in cause.remedy for cause in report.causes), report.causes
    assert measured(PAIRS, better).peak.allocated < report.peak.allocated / 2


def test_what_is_joined_with_something_else_is_not_all_pairs() -> None:
    report = measured(
        "a, b = torch.rand(64, 1, 1024, device='cuda'), torch.rand(64, 64, 1024, device='cuda')\n"
        "layer = nn.Linear(2048, 64).cuda()",
        "r = a.repeat(1, 64, 1)\nwith torch.no_grad():\n    out = layer(torch.cat([r, b], -1))",
    )
    assert not any("times as much" in one.text and "torch.cat" in one.text for one in report.causes)


def test_scores_of_two_tables_are_no_weight() -> None:
    before = "a, b = nn.Embedding(20000, 64).cuda(), nn.Embedding(20000, 64).cuda()"
    report = measured(before, "with torch.no_grad():\n    best = (a.weight @ b.weight.t()).topk(5)[1]")
    assert "for every pair, (20000, 20000)" in named(report, "all_pairs").text
    low, x = "a, b = nn.Linear(64, 20000).cuda(), nn.Linear(64, 20000).cuda()", "x = a.weight @ b.weight.t()"
    assert "weights_multiplied" in names(measured(low, x))


def test_data_that_are_shuffled_are_there_twice() -> None:
    before = "data = torch.rand(200000, 784, device='cuda')\nnet = nn.Linear(784, 10).cuda()\n"
    step = "    for i in range(0, 2048, 1024):\n        net({}).sum().backward()"
    cell = "for epoch in range(2):\n    data = data[torch.randperm(len(data), device='cuda')]\n"
    report = measured(before, cell + step.format("data[i:i + 1024]"))
    cause = named(report, "copied_rows")
    assert "(line 3) copies all rows of `data` while it still has the old ones" in cause.text
    assert "whole_batch" not in names(report)
    less = "for epoch in range(2):\n    numbers = torch.randperm(len(data), device='cuda')\n"
    assert (
        measured(before, less + step.format("data[numbers[i:i + 1024]]")).peak.allocated < report.peak.allocated / 1.8
    )


def test_products_of_pairs_are_told_whatever_views_they_have() -> None:
    report = measured(
        "f = nn.Conv2d(3, 64, 3, padding=1).cuda()\na = torch.rand(1, 3, 96, 96, device='cuda')\n",
        "x = f(a).flatten(2)\nc = torch.matmul(x.transpose(1, 2), x)\n"
        "loss = c.view(-1, 1, 96, 96).mean() + F.avg_pool2d(c.view(-1, 1, 96, 96), 2).mean()\nloss.backward()",
    )
    assert "makes one number for every pair, (1, 9216, 9216)" in named(report, "all_pairs").text
    assert "whole_batch" not in names(report)


def test_steps_of_time_are_no_batch() -> None:
    report = measured(
        "cell = nn.LSTMCell(512, 512).cuda()\nxs = torch.randn(8, 16384, 512, device='cuda')\n",
        "h = c = torch.zeros(16384, 512, device='cuda')\nfor x in xs:\n    h, c = cell(x, (h.detach(), c.detach()))\n"
        "    h.pow(2).mean().backward()",
    )
    assert "16,384 items" in named(report, "whole_batch").text


TURNS = "w = torch.rand(2048, 2048, device='cuda', requires_grad=True)\n"


def test_every_turn_of_a_loop_keeps_something_for_one_backward() -> None:
    report = measured(TURNS, "y = w\nfor _ in range(12):\n    y = y.sin().cos()\ny.sum().backward()")
    cause = named(report, "waiting_graphs")
    assert "12 turns of a loop (line 4) come before one backward (line 5)" in cause.text
    less = "from torch.utils.checkpoint import checkpoint\ny = w\nfor _ in range(12):\n"
    less += "    y = checkpoint(lambda x: x.sin().cos(), y, use_reentrant=False)\ny.sum().backward()"
    assert "`torch.utils.checkpoint` around a turn" in cause.remedy
    assert measured(TURNS, less).peak.allocated < report.peak.allocated
    each = measured(TURNS, "for _ in range(12):\n    w.sin().cos().sum().backward()")
    assert "waiting_graphs" not in names(each)


TARGETS = "net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()\n"
TARGETS += "a, b = torch.rand(8192, 512, device='cuda'), torch.rand(8192, 512, device='cuda')\n"


def test_what_a_loss_compares_with_needs_no_graph() -> None:
    report = measured(TARGETS, "q = net(a)\ngoal = 0.9 * net(b)\nloss = F.mse_loss(q, goal + 1)\nloss.backward()")
    cause = named(report, "target_graphs")
    assert "`goal = 0.9 * net(b)` (line 3) has a graph of its own" in cause.text
    less = "q = net(a)\nwith torch.no_grad():\n    goal = 0.9 * net(b)\nloss = F.mse_loss(q, goal + 1)\nloss.backward()"
    other = measured(TARGETS, less)
    assert "target_graphs" not in names(other)
    assert other.peak.allocated < report.peak.allocated


@pytest.mark.parametrize(
    "cell",
    [
        "out = net(a)\nloss = F.mse_loss(out, a)\nloss.backward()",
        "out = net(a)\nback = net(out)\nloss = F.mse_loss(back, a) + F.l1_loss(out, b)\nloss.backward()",
        "out = net(a)\nloss = F.mse_loss(out - b, b - out)\nloss.backward()",
    ],
)
def test_a_target_without_a_graph_of_its_own_is_none(cell: str) -> None:
    assert "target_graphs" not in names(measured(TARGETS, cell))
