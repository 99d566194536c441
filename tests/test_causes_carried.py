"""What is as large as it is because of rows that were made of few, products that are only added up, and graphs that no backward
goes through: what is said helps as it is said."""

from __future__ import annotations

import pytest
from causes_cells import measured, named, names

LAYERS = (
    "x = torch.rand(8, 512, 64, device='cuda')\n"
    "few = torch.randint(0, 512, (8, 512, 64), device='cuda')\n"
    "rows = torch.arange(8, device='cuda')[:, None, None]\n"
    "layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()).cuda()\n"
    "images = torch.rand(8, 3, 64, 64, device='cuda')\n"
    "small = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1), nn.ReLU()).cuda()\n"
    "many = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 192, 3, padding=1), nn.ReLU()).cuda()\n"
    "flat = nn.Linear(64, 4096).cuda()\n"
)


@pytest.mark.parametrize(
    ("cell", "less", "said"),
    [
        (
            "layers(x[rows, few]).amax(2).sum().backward()",
            "layers(x[rows, few[:, :, :8]]).amax(2).sum().backward()",
            "(8, 512, 64, 64) from (8, 512, 64), 64 times the rows",
        ),
        (
            "small(F.interpolate(images, scale_factor=8)).sum().backward()",
            "F.pixel_shuffle(many(images), 8).sum().backward()",
            "all layers behind it work on 64 times the pixels",
        ),
        (
            "layers(x[:, :, None] + x[:, None, :256]).amax(2).sum().backward()",
            "layers(x[:, :, None] + x[:, None, :16]).amax(2).sum().backward()",
            "256 times the rows",
        ),
        (
            "z = flat(x[0])\nc = z.T @ z\nc.flatten()[:-1].view(4095, 4097)[:, 1:].flatten().pow_(2).sum().backward()",
            "z = flat(x[0])[:, :512]\n"
            "c = z.T @ z\n"
            "c.flatten()[:-1].view(511, 513)[:, 1:].flatten().pow_(2).sum().backward()",
            "one number for every pair, (4096, 4096), and what is computed of them is as large",
        ),
    ],
)
def test_what_is_computed_of_many_rows_is_told_with_where_they_come_from(cell: str, less: str, said: str) -> None:
    report = measured(LAYERS, cell)
    assert said in named(report, "carried_on").text
    assert measured(LAYERS, less).peak.allocated < report.peak.allocated / 2


@pytest.mark.parametrize(
    "cell",
    [
        # An image that was made small before, and has its size again.
        "h = F.max_pool2d(small[:2](images.repeat(1, 1, 8, 8)), 4)\n"
        "small[0](F.interpolate(h, scale_factor=4)[:, :3]).sum().backward()",
        "layers(x).sum().backward()",
        # Rows that a batch has anyway, gathered.
        "layers(x.repeat(1, 1, 2).view(8, -1, 64)).sum().backward()",
    ],
)
def test_rows_that_were_there_before_are_not_told(cell: str) -> None:
    assert not any("interpolate" in one.text for one in measured(LAYERS, cell).causes if one.name == "carried_on")


FACTORS = "u = nn.Parameter(torch.rand(1024, 1, 64, device='cuda'))\nv = nn.Parameter(torch.rand(1024, 2048, 64, device='cuda'))"


def test_products_that_are_only_added_up_are_not_needed() -> None:
    report = measured(FACTORS, "with torch.no_grad():\n    s = (u * v).sum(-1)")
    assert "stores products, (1024, 2048, 64), only to add them up" in named(report, "products_summed").text
    better = measured(FACTORS, "with torch.no_grad():\n    s = torch.einsum('bij,bkj->bk', u, v)")
    assert better.peak.allocated < report.peak.allocated - (400 << 20)
    assert "products_summed" not in names(better)
    kept = measured(FACTORS, "with torch.no_grad():\n    p = u * v\n    s = p.exp().sum(-1)")
    assert "products_summed" not in names(kept)


# Each pixel has weights of its own: `einsum` would bring its factors into another order, by copies of both.
OF_EACH_PIXEL = "patches, weights = (torch.rand(4, 4, each, 49, 64, 64, device='cuda') for each in (16, 1))"


def test_products_that_einsum_would_copy_its_factors_for_are_left_alone() -> None:
    report = measured(OF_EACH_PIXEL, "with torch.no_grad():\n    s = (patches * weights).sum(3)")
    other = measured(
        OF_EACH_PIXEL, "with torch.no_grad():\n    s = torch.einsum('bgckhw,bgkhw->bgchw', patches, weights[:, :, 0])"
    )
    assert other.peak.allocated >= report.peak.allocated
    assert "products_summed" not in names(report)


TWO = (
    "def net():\n"
    "    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]).cuda()\n"
    "class Pair(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.q, self.k = net(), net()\n"
    "    def step(self, x):\n"
    "        q = self.q(x)\n"
    "        {with_}k = self.k(x)\n"
    "        loss = F.mse_loss(q, k{read})\n"
    "        loss.backward()\n"
    "        return k.detach().mean().item() + loss.item()\n"
    "pair = Pair()\n"
    "opt = torch.optim.SGD(pair.q.parameters(), lr=0.1)\n"
    "x = torch.rand(4096, 1024, device='cuda')\n"
)
STEPS = "for _ in range(3):\n    opt.zero_grad()\n    pair.step(x)\n    opt.step()"


def test_a_graph_that_no_backward_goes_through_is_made_in_vain() -> None:
    report = measured(TWO.format(with_="", read=".detach()"), STEPS)
    cause = named(report, "missing_no_grad")
    assert "`self.k(x)`" in cause.text
    assert "none goes through it" in cause.text
    better = measured(TWO.format(with_="with torch.no_grad(): ", read=""), STEPS)
    assert "missing_no_grad" not in names(better)
    assert better.peak.allocated < report.peak.allocated - (100 << 20)


@pytest.mark.parametrize(
    "cell",
    [
        # Each has a backward of its own, one after the other.
        "a, b = pair.q(x).mean(), pair.k(x).mean()\na.backward()\nb.backward()",
        "a, b = pair.q(x), pair.k(x)\nF.mse_loss(a, b).backward()",
    ],
)
def test_a_graph_that_another_backward_goes_through_is_not_told(cell: str) -> None:
    before = TWO.format(with_="", read="")
    assert "missing_no_grad" not in names(
        measured(before, f"def step():\n    {cell.replace(chr(10), chr(10) + '    ')}\nstep()")
    )


def test_the_same_tensor_joined_many_times_is_told_with_its_product() -> None:
    before = "W = torch.rand(1, 64, 32, 128, device='cuda')\nx = torch.rand(512, 64, 128, 1, device='cuda')"
    report = measured(before, "u = torch.cat([W] * 512, 0) @ x")
    cause = named(report, "expanded_copy")
    assert "copies the same tensor 512 times" in cause.text
    assert "`torch.einsum` multiplies with `W` itself" in cause.remedy
    better = measured(before, "u = torch.einsum('roi,bri->bro', W[0], x[..., 0])")
    assert better.peak.allocated < report.peak.allocated / 4


def test_a_third_number_for_each_weight_is_told() -> None:
    before = (
        "net = nn.Linear(4096, 4096).cuda()\n"
        "opt = torch.optim.Adam(net.parameters(){})\n"
        "x = torch.rand(8, 4096, device='cuda')"
    )
    cell = "for _ in range(2):\n    net(x).mean().backward()\n    opt.step()\n    opt.zero_grad()"
    report = measured(before.format(", amsgrad=True"), cell)
    assert "`amsgrad=True` keeps one of them: without it there are two." in named(report, "optimizer_states").remedy
    other = measured(before.format(""), cell)
    assert not named(other, "optimizer_states").remedy
    assert other.peak.allocated < report.peak.allocated - (60 << 20)


def test_what_is_joined_may_have_been_there_before_the_cell() -> None:
    report = measured("x = torch.rand(64, 1 << 20, device='cuda')", "y = torch.cat([x, x.flip(0), x + 1])")
    assert "needs its parts and the whole at once: 768 MiB and 768 MiB" in named(report, "joined").text
