"""Reports as examples: `python benchmarks/examples.py` runs the cells below on virtual cards and writes docs/examples/*.txt.

`tests/test_examples.py` compares the texts with today's, so that a change of wording is seen, and read.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "docs" / "examples"
WIDTH = 100


@dataclass(frozen=True)
class Example:
    """device: "" for none, as in a notebook without a GPU. setup: runs before the measured cell."""

    name: str
    device: str
    setup: str
    cell: str
    flags: str = ""


_NET = """import torch
from torch import nn
net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
"""
_LOOP = """for step in range({steps}):
    x = torch.randn({batch}, 1024, device="cuda")
    y = torch.randint(10, ({batch},), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
"""

CELLS = (
    Example("long_loop", "T4", _NET, _LOOP.format(steps=400, batch=256)),
    Example(
        "losses_in_a_list",
        "T4",
        _NET,
        "losses = []\n" + _LOOP.format(steps=60, batch=1024).replace("loss.backward()", "losses.append(loss)"),
    ),
    Example(
        "broadcast_loss",
        "T4",
        "import torch\nnet = torch.nn.Linear(64, 1).cuda()\nx = torch.randn(16000, 64, device='cuda')\n"
        "y = torch.randn(16000, device='cuda')\n",
        "pred = net(x)\nloss = ((pred - y) ** 2).mean()\nloss.backward()\n",
    ),
    Example(
        "out_of_memory",
        "virtual:6GiB",
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(16)]).cuda()\n"
        "optimizer = torch.optim.Adam(net.parameters())\n",
        'for step in range(9):\n    x = torch.randn(8192, 4096, device="cuda")\n    loss = net(x).square().mean()\n'
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    ),
    Example(
        "mostly_cached",
        "RTX4090",
        _NET + 'big = torch.empty(5600 * 2**20, dtype=torch.uint8, device="cuda")\ndel big\n',
        _LOOP.format(steps=3, batch=8192),
    ),
    Example(
        "epochs_and_batches",
        "T4",
        _NET,
        "best = None\nhistory = []\nfor epoch in range(4):\n    net.train()\n    total = 0.0\n    for batch in range(6):\n"
        '        x = torch.randn(64, 1024, device="cuda")\n        y = torch.randint(10, (64,), device="cuda")\n'
        "        optimizer.zero_grad()\n        loss = nn.functional.cross_entropy(net(x), y)\n        loss.backward()\n"
        "        optimizer.step()\n        total += 64\n    net.eval()\n    with torch.no_grad():\n"
        '        score = net(torch.randn(256, 1024, device="cuda")).argmax(1)\n    history.append(total)\n'
        "    best = {name: one.detach().clone() for name, one in net.state_dict().items()}\nprint(len(history))\n",
    ),
    Example(
        "inference_with_gradients",
        "L4",
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12)]).cuda().eval()\n",
        'outputs = []\nfor batch in range(20):\n    x = torch.randn(512, 2048, device="cuda")\n'
        "    outputs.append(net(x))\nprint(len(outputs))\n",
    ),
    Example(
        "sixty_lines",
        "T4",
        "import torch\n",
        'a0 = torch.randn(1024, 1024, device="cuda")\n'
        + "".join(f"n{number} = {number}\n" for number in range(8))
        + "".join(f"a{number + 1} = a{number} @ a{number}\n" for number in range(24))
        + "".join(f"s{number} = a{number}.sum()\n" for number in range(12))
        + "".join(f"del a{number}\n" for number in range(15)),
    ),
    Example(
        "two_devices",
        "2xT4",
        "import torch\n",
        'a = torch.randn(4000, 4000, device="cuda:0")\nb = torch.randn(8000, 4000, device="cuda:1")\n'
        'c = b @ a.to("cuda:1")\n',
    ),
    Example(
        "nothing_on_a_device",
        "",
        "import torch\n",
        "net = torch.nn.Linear(10, 10)\nnet(torch.randn(4, 10)).sum().backward()\n",
    ),
)


def text_of(example: Example) -> str:
    """The example as it stands in its file: the report, and below it the cell that nobody needs to know to read it."""
    import torch

    import gpumem_magic
    from gpumem_magic.views.text import render

    with _shell() as shell:
        if example.device:
            shell.run_line_magic("gpumem_device", example.device)
        shell.run_cell(example.setup)
        shell.run_cell(f"%%gpumem -q {example.flags}\n{example.cell}")
        report = gpumem_magic.last_report()
        assert report is not None
        text = render(report, width=WIDTH)
    device = example.device or "no device chosen"
    return f"{text}\n\n{'-' * WIDTH}\nThe cell ({device}, torch {torch.__version__}):\n\n{example.cell}"


@contextlib.contextmanager
def _shell() -> Iterator[Any]:
    """A notebook of its own, without a word on the terminal."""
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        shell.run_line_magic("load_ext", "gpumem_magic")
        try:
            yield shell
        finally:
            shell.reset(new_session=False)
            shell.run_line_magic("gpumem_device", "off")
            shell.run_line_magic("unload_ext", "gpumem_magic")
            InteractiveShell.clear_instance()


def main() -> None:
    """Writes the files, or with --compare says which differ."""
    different = []
    for example in CELLS:
        path = EXAMPLES / f"{example.name}.txt"
        text = text_of(example)
        if "--compare" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            different.append(example.name)
            print(f"{example.name} reads now:\n{text}")
    if different:
        sys.exit(f"{', '.join(different)}: read what changed, then run `python benchmarks/examples.py`")


if __name__ == "__main__":
    main()
