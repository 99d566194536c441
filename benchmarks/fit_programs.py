"""The programs of `fits.py` and `advice.py`: cells with a name `n`, and some with two names, `n` and `m`."""

from __future__ import annotations

from collections.abc import Iterator

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\nn = 1\n"
LOOP = """
for step in range(10):
    optimizer.zero_grad()
    loss = model({batch}).float().square().mean()
    loss.backward()
    optimizer.step()
"""


def trained(model: str, batch: str, optimizer: str = "torch.optim.Adam(model.parameters())", loop: str = LOOP) -> str:
    return f"{HEAD}model = {model}.cuda()\noptimizer = {optimizer}\n" + loop.format(batch=batch)


def programs() -> Iterator[tuple[str, str]]:
    """(name, cell). Sizes are such that the walls of cards of 15 to 40 GiB lie between 1 and 40, or beyond."""
    mlp = "nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))"
    rows = "torch.randn(n * 6000, 2048, device='cuda')"
    for name, optimizer in {
        "adam": "torch.optim.Adam(model.parameters())",
        "adam-single": "torch.optim.Adam(model.parameters(), foreach=False)",
        "adam-fused": "torch.optim.Adam(model.parameters(), fused=True)",
        "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
        "momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    }.items():
        yield f"mlp-{name}", trained(mlp, rows, optimizer)
    yield "mlp-autocast", trained(mlp, rows, loop=_indented(LOOP, "torch.autocast('cuda', torch.float16)"))
    yield "mlp-kept-gradients", trained(mlp, rows, loop=LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"))
    yield "mlp-late-zero", trained(mlp, rows, loop=LOOP.replace("    optimizer.zero_grad()\n", "").rstrip()
                                   + "\n    optimizer.zero_grad()\n")  # fmt: skip
    conv = "nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU())"
    for size in (128, 200, 256):
        yield f"conv-{size}", trained(conv, f"torch.randn(n * 12, 3, {size}, {size}, device='cuda')")
    yield "conv-strided", trained("nn.Sequential(nn.Conv2d(3, 96, 7, 4), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(96, 256, 5))",
                                  "torch.randn(n * 100, 3, 224, 224, device='cuda')")  # fmt: skip
    yield "conv-half", trained(f"{conv}.half()", "torch.randn(n * 20, 3, 160, 160, device='cuda').half()")
    for heads, length in ((8, 256), (16, 512), (4, 777)):
        layer = f"nn.TransformerEncoder(nn.TransformerEncoderLayer(512, {heads}, 2048, batch_first=True), 3)"
        yield (
            f"transformer-{length}",
            trained(layer, f"torch.randn(n * {8 * 256 // length + 1}, {length}, 512, device='cuda')"),
        )
    yield "length", trained("nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)",
                            "torch.randn(8, n * 128, 256, device='cuda')")  # fmt: skip
    for rows_of, width in ((4, 1024), (1, 2048)):
        yield (
            f"scores-{width}",
            (
                f"{HEAD}q = torch.randn({rows_of}, n * 512, {width}, device='cuda', requires_grad=True)\n"
                "for step in range(8):\n    out = (q @ q.transpose(1, 2)).softmax(-1) @ q\n    out.sum().backward()\n"
            ),
        )
    yield (
        "pairs",
        HEAD + "x = torch.randn(n * 1500, 64, device='cuda')\nd = (x[:, None] - x[None]).square().sum(-1).sqrt()\n",
    )
    yield "cube", HEAD + "for step in range(4):\n    v = torch.zeros(n * 40, n * 40, n * 40, device='cuda').cumsum(0)\n"
    for keep in ("x", "x[:1]", "x.sum()"):
        yield (
            f"growing-{len(keep)}",
            (
                f"{HEAD}kept = []\nfor step in range(12):\n"
                f"    x = torch.randn(n, 1 << 25, device='cuda')\n    kept.append({keep})\n"
            ),
        )
    yield (
        "growing-graph",
        (
            f"{HEAD}w = torch.randn(1 << 22, device='cuda', requires_grad=True)\ntotal = 0\n"
            "for step in range(12):\n    total = total + (torch.randn(n, 1 << 22, device='cuda') * w).sigmoid().mean()\n"
        ),
    )
    for spread in (3, 5, 7):
        batch = f"torch.randn(n * 16, 512 + 97 * (step * {spread} % 11), 512, device='cuda')"
        model = "nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))"
        yield f"lengths-{spread}", trained(model, batch)
    for share in (2, 3, 5):
        yield (
            f"pieces-{share}",
            (
                f"{HEAD}M = 1 << 18\nbig = [torch.empty(n * 140 * M, device='cuda') for _ in range({share})]\ndel big\n"
                f"small = [torch.empty(n * 90 * M, device='cuda') for _ in range({share})]\n"
                f"again = [torch.empty(n * 140 * M, device='cuda') for _ in range({share})]\n"
            ),
        )
    for holes in (3, 4):
        yield (
            f"holes-{holes}",
            (
                f"{HEAD}M = 1 << 18\n"
                f"parts = [torch.empty((41 + 14 * (i % {holes})) * n * M // 4, device='cuda') for i in range(40)]\n"
                f"parts = parts[::{holes}]\nx = torch.empty(n * 200 * M, device='cuda')\ny = x * 2\n"
            ),
        )
    yield (
        "inference",
        HEAD
        + (
            f"model = {mlp}.cuda()\nwith torch.no_grad():\n    for step in range(8):\n"
            "        y = model(torch.randn(n * 9000, 2048, device='cuda'))\n"
        ),
    )
    yield "words", trained("nn.Sequential(nn.Embedding(50000, 256), nn.Linear(256, 50000))",
                           "torch.zeros(n * 700, dtype=torch.long, device='cuda')")  # fmt: skip
    yield (
        "joined",
        HEAD
        + (
            "out = torch.empty(0, 4096, device='cuda')\nfor step in range(12):\n"
            "    out = torch.cat([out, torch.randn(n * 2000, 4096, device='cuda')])\n"
        ),
    )
    yield "sorted", HEAD + "for step in range(5):\n    x, order = torch.randn(n, 30_000_000, device='cuda').sort()\n"
    yield "weights", trained("nn.Linear(n * 1024, 4096)", "torch.randn(64, n * 1024, device='cuda')")
    yield (
        "layers",
        trained("nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(n)])", "torch.randn(4096, 4096, device='cuda')"),
    )
    yield (
        "recomputed",
        HEAD
        + (
            "from torch.utils.checkpoint import checkpoint\n"
            f"model = nn.ModuleList([{mlp} for _ in range(3)]).cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
            "for step in range(8):\n    x = torch.randn(n * 4000, 2048, device='cuda', requires_grad=True)\n"
            "    for block in model:\n        x = checkpoint(block, x, use_reentrant=False)\n"
            "    x.sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        ),
    )


def _indented(loop: str, manager: str) -> str:
    return loop.replace("    loss = model", f"    with {manager}:\n        loss = model")


def tables() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, cell, values of `m`, each of which makes a row)."""
    layer = "nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)"
    yield "batch-length", _of_two(trained(layer, "torch.randn(n * 2, m, 512, device='cuda')")), (256, 700, 1536)
    conv = "nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU())"
    yield "batch-picture", _of_two(trained(conv, "torch.randn(n * 4, 3, m, m, device='cuda')")), (128, 225, 512)
    deep = "nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(m)])"
    yield "rows-layers", _of_two(trained(deep, "torch.randn(n * 2000, 2048, device='cuda')")), (8, 40, 160)
    wide = "nn.Sequential(nn.Linear(1024, m), nn.GELU(), nn.Linear(m, 1024))"
    yield "rows-width", _of_two(trained(wide, "torch.randn(n * 3000, 1024, device='cuda')")), (4096, 10000, 100000)
    yield (
        "pieces-parts",
        _of_two(
            f"{HEAD}M = 1 << 18\nbig = [torch.empty(n * 140 * M, device='cuda') for _ in range(m)]\ndel big\n"
            "again = [torch.empty(n * 90 * M, device='cuda') for _ in range(m + 1)]\n"
            "rest = torch.empty(n * 200 * M, device='cuda')\n"
        ),
        (2, 3, 7),
    )
    yield (
        "growing-turns",
        _of_two(
            f"{HEAD}kept = []\nfor step in range(m):\n    x = torch.randn(n, 1 << 23, device='cuda')\n"
            "    kept.append(x.sigmoid() if step % 3 else x[:1])\n"
        ),
        (5, 12, 40),
    )


def _of_two(cell: str) -> str:
    return cell.replace("n = 1\n", "n = 1\nm = 1\n", 1)
