"""Every cause of the catalogue: cells that show it, and innocent twins where nothing is claimed."""

from __future__ import annotations

import gc
import inspect
import pkgutil
import re
from dataclasses import dataclass
from importlib import import_module

import pytest
from causes_cells import SETUP, named, names, notebook
from test_causes_at_the_peak import TOLD

from gpumem_magic import causes
from gpumem_magic.causes import catalog, from_files, shortage
from gpumem_magic.causes.program import read_program
from gpumem_magic.causes.written import Written
from gpumem_magic.units import human


@dataclass(frozen=True)
class Case:
    """cells: those before, plain; the last one is measured. says: words of the sentence. tells: the cause's name."""

    tells: str
    cells: tuple[str, ...]
    says: str = ""
    # Of one version, whichever runs the tests: what is worth saying is a share of all memory, of which workspaces are a part.
    device: str = "A100-40GB,torch=2.13"


TRAIN = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(512, 512, device="cuda")
"""

LOOP = "for _ in range(4):\n    optimizer.zero_grad()\n    loss = model(x).mean()\n    loss.backward()\n    optimizer.step()"

SCORED = "part = torch.empty(size, 512, device='cuda')\n    right = model(part).argmax(1).sum().item()"
SAMPLING = (
    "kept, state = [], x.repeat(8, 1)\nfor _ in range(64):\n    state = model(state)\n    kept.append(state.cpu())"
)
NUMBERS = "\nlosses = []\nfor _ in range(4):\n    loss = model(x).mean()\n    losses.append(loss.{taken})\n    loss.backward()"

# Six layers, of which each keeps a copy.
ON_CTX = """
class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.extra = x.clone()
        return x * 2
    @staticmethod
    def backward(ctx, slope):
        return slope * 2
h = torch.randn(8192, 512, device="cuda", requires_grad=True)
"""
LAYERS = "for _ in range(6):\n    h = Mine.apply(h)\nh.mean().backward()"
WHOLE = """
import torch.utils.checkpoint
whole = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]).cuda()
x = torch.randn(4096, 512, device="cuda")
"""
LAZY = """
from functools import cached_property
class Lazy:
    def __init__(self):
        self.x = torch.randn(2048, 64, device="cuda")
    @cached_property
    def gram(self):
        return self.x @ self.x.T
lazy = [Lazy() for _ in range(6)]
"""
SAVED = TRAIN + "import io\nfile = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)"
IN_FUNCTION = """
def load():
    other = net()
    state = torch.load(file, map_location="{where}")
    other.load_state_dict(state)
    return other
file.seek(0)
other = load()
"""
RUNNER = """
class Runner:
    def __init__(self):
        self.models = []
    def prepare(self, model):
        self.models.append(model)
        return model
    def free(self):
        self.models.clear()
runner = Runner()
model = runner.prepare(net())
"""
RETAINING = """
G = nn.Sequential(nn.Linear(64, 1024)).cuda()
D = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)], nn.Linear(1024, 1)).cuda()
to_g, to_d = torch.optim.SGD(G.parameters(), 0.1), torch.optim.SGD(D.parameters(), 0.1)
"""
RETAINING_STEP = """
for _ in range(2):
    fake = G(torch.randn(4096, 64, device="cuda"))
    d_loss = D(fake).mean() - D(torch.randn(4096, 1024, device="cuda")).mean()
    to_d.zero_grad()
    d_loss.backward(retain_graph=True)
    to_d.step()
    g_loss = -D(fake).mean()
    to_g.zero_grad()
    g_loss.backward()
    to_g.step()
"""
AHEAD = """
class Ahead:
    def __init__(self, batches):
        self.items = [one.cuda() for one in batches]
    def __iter__(self):
        return iter(self.items)
"""
GUILTY = [
    # a checkpoint that no name, or a function's own, keeps
    Case("loaded_beside", (SAVED, "model.load_state_dict(torch.load(file, map_location='cuda'))"), "(line 2)"),
    Case("loaded_beside", (SAVED, IN_FUNCTION.format(where="cuda")), "(line 5)"),
    # https://github.com/pytorch/pytorch/issues/9669 and the "My model reports OOM" FAQ: losses kept with their graphs
    Case("kept_graphs", (TRAIN, "losses = []\nfor _ in range(4):\n    losses.append(model(x).mean())"), "`losses`"),
    # The last of two has a name of its own, and training has begun again.
    Case(
        "kept_graphs",
        (TRAIN, "model(x).mean().backward()\nkept = []\nfor _ in range(2):\n    out = model(x)\n    kept.append(out)"),
        "`kept`",
    ),
    Case("kept_graphs", (TRAIN, "total = 0\nfor _ in range(4):\n    total = total + model(x).mean()"), "`total`"),
    Case("kept_graphs", (TRAIN, "log = {}\nfor i in range(4):\n    log[i] = model(x).mean()"), "`log`"),
    # pytorch/pytorch#20275: memory rises with each iteration, as results stay on the device
    Case("growth", (TRAIN, "kept = []\nfor _ in range(6):\n    kept.append(mib(4))"), "held by `kept`"),
    Case(
        "growth",
        (TRAIN, "for i in range(6):\n    globals()[f'part_{i}'] = mib(4)"),
        "6 variables, `part_0` to `part_5`",
    ),
    # A metric's list has as much in its own tensors as in their graphs: who only detaches them still grows.
    Case(
        "growth",
        (
            TRAIN,
            "kept = []\n"
            + LOOP.replace("loss = model(x).mean()", "out = model(x)").replace("loss.back", "out.mean().back")
            + "\n    kept.append((out - x) ** 2)",
        ),
        "held by `kept`",
    ),
    Case(
        "growth",
        (
            TRAIN,
            "outs = []\nfor _ in range(6):\n    optimizer.zero_grad()\n    out = model(x)\n    out.mean().backward()\n"
            "    optimizer.step()\n    outs.append(out.detach())",
        ),
        "held by `outs`",
    ),
    Case("missing_no_grad", (TRAIN, "model.eval()\noutput = model(x)"), "`model` is in evaluation mode"),
    # What a loop gathered, until a later statement or the end of a function lets go of it.
    Case(
        "growth",
        (
            "kept = []",
            "for _ in range(8):\n    kept.append(mib(8))\nparts = [one.sum().item() for one in kept]\ndel kept",
        ),
        "and `del kept` (line 5) lets go of it: 56.0 MiB",
    ),
    Case(
        "growth",
        (
            TRAIN,
            "def scores():\n    with torch.no_grad():\n        kept = [model(x) for _ in range(8)]\n"
            "    return [one.sum().item() for one in kept]\nfound = scores()",
        ),
        "`found = scores()` (line 6) lets go of it only as it ends",
    ),
    # An optimizer that gets more and more parameters: it has no `clear()`.
    Case(
        "growth",
        (
            TRAIN,
            "for _ in range(6):\n    more = nn.Linear(512, 512).cuda()\n    optimizer.add_param_group("
            "{'params': more.parameters()})\n"
            "    loss = model(more(x)).mean()\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()",
        ),
        "`del optimizer` frees",
    ),
    # Nothing of the graph is kept, and each layer's results are there while it runs.
    Case(
        "missing_no_grad",
        (TRAIN, f"{LOOP}\nfor part in x.repeat(4, 1).split(len(x)):\n    right = model(part).argmax(1).sum().item()"),
        "`model(part)` (line 8) saves",
    ),
    Case(
        "missing_no_grad",
        (TRAIN, "model.eval()\ndef score(x):\n    return model(x).mean().item()", "for _ in range(2):\n    score(x)"),
        "`model(x)` (line 3, In [",
    ),
    # The very first batch does not fit; the loop around it neither goes backward nor steps.
    Case(
        "missing_no_grad",
        (TRAIN, f"{LOOP}\nmodel.eval()\nfor size in (2_000_000, 1):\n    {SCORED}"),
        "`model` is in evaluation mode, yet `model(part)` (line 10) keeps a graph, though no backward follows",
        device="T4",
    ),
    # A sampler that carries its state on runs out of memory, and the program has no backward left to run.
    Case(
        "missing_no_grad",
        (TRAIN, f"{LOOP}\n{SAMPLING}"),
        "keeps the graphs of ",
        device="virtual:1GiB",
    ),
    # The same in time: one says what to detach, and how no graph would be made.
    Case("kept_graphs", (TRAIN, f"{LOOP}\n{SAMPLING.replace('64', '4')}"), "inside `with torch.no_grad():`"),
    Case("missing_no_grad", (TRAIN, "model.eval()\nfor _ in range(3):\n    out = model(x)"), "`out` keeps a graph"),
    Case(
        "late_zero_grad",
        (
            TRAIN,
            "for _ in range(3):\n    loss = model(x).mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
            "    optimizer.step()",
        ),
        "zero_grad",
    ),
    Case(
        "held_checkpoint",
        (
            TRAIN + "import io\nfile = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)",
            "state = torch.load(file, map_location='cuda')\nmodel.load_state_dict(state)",
        ),
        "`state`",
    ),
    Case(
        "held_checkpoint",
        (
            TRAIN + "import io\nfile = io.BytesIO()\ntorch.save({'model': model.state_dict()}, file)\nfile.seek(0)",
            "ckpt = torch.load(file, map_location='cuda')\nmodel.load_state_dict(ckpt['model'])",
        ),
        "`ckpt`",
    ),
    Case(
        "map_location_missing",
        (
            TRAIN + "import io\nfile = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)",
            "state = torch.load(file)\nmodel.load_state_dict(state)\ndel state",
        ),
        "torch.load",
    ),
    Case(
        "optimizer_of_the_former",
        (TRAIN + "model = net()", LOOP),
        "Make `optimizer` anew from `model.parameters()`",
    ),
    # pytorch/pytorch#22684: running one cell again eats memory
    Case(
        "model_built_again",
        ("%%gpumem -q\nmodel = net(1024)", "model = net(1024)"),
        "built a model while the previous one",
    ),
    Case(
        "model_built_again",
        ("%%gpumem -q\n" + TRAIN + "model(x).sum().backward()\noptimizer.step()\ndel x", "model = net()"),
        "`optimizer` holds its parameters",
    ),
    Case(
        "model_built_again",
        (
            "%%gpumem -q\n" + TRAIN + "model(x).sum().backward()\noptimizer.step()\ndel x",
            "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        ),
        "until `optimizer = torch",
    ),
    # the discriminator's part of a graph that is retained for the generator's
    Case(
        "retained_graph",
        (RETAINING, RETAINING_STEP),
        "`.detach()` its output in the loss of `to_d`, and leave out `retain_graph=True`",
    ),
    Case(
        "data_ready",
        (AHEAD, "ahead = Ahead([torch.randn(4096, 4096) for _ in range(12)])\nfor x in ahead:\n    y = x.sum()"),
        "`ahead.items` takes",
    ),
    Case("model_built_again", (RUNNER, "model = runner.prepare(net())"), "`runner.free()` empties it"),
    Case("pinned_by_out", (TRAIN, "mib(30)", "y = mib(1)"), "Out["),
    # pytorch/pytorch#27600, ipython/ipython#13103: after an error the memory does not come back
    Case("pinned_by_traceback", ("def bad():\n    big = mib(30)\n    1 / 0", "bad()", "y = mib(1)"), "traceback"),
    Case("pinned_by_traceback", ("def bad():\n    big = mib(30)\n    1 / 0", "bad()"), "traceback"),
    Case("del_freed_nothing", (TRAIN, "del model"), "`optimizer` still holds"),
    Case("del_freed_nothing", (TRAIN.replace("SGD", "Adam"), LOOP + "\ndel model"), "`optimizer`"),
    Case("del_freed_nothing", ("x = mib(8)\nviews = [x[:4]]", "y = x + 1\ndel y, x"), "`views` still holds"),
    Case("only_cached", ("x = mib(200)", "y = mib(1)\ndel x"), "nvidia-smi's figure did not fall"),
    Case("only_cached", ("x = mib(200)", "x = x.cpu()"), "nvidia-smi's figure did not fall"),
    Case(
        "optimizer_temporaries",
        (
            "model = net(1024)\noptimizer = torch.optim.Adam(model.parameters(), foreach=True)\n"
            "x = torch.randn(4, 1024, device='cuda')",
            "for _ in range(2):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()",
        ),
        "foreach=False",
    ),
    Case(
        "optimizer_states",
        (
            "model = net(1024)\noptimizer = torch.optim.Adam(model.parameters())\nx = torch.randn(4, 1024, device='cuda')",
            "model(x).mean().backward()\noptimizer.step()",
        ),
        "2 x the",
    ),
    Case(
        "double_precision",
        (
            "deep = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).double().cuda()",
            "out = deep(torch.randn(4096, 512, dtype=torch.float64, device='cuda'))",
        ),
        "line 2",
    ),
    # https://github.com/karpathy/nanoGPT/issues/158: two names for one checkpoint
    Case(
        "held_checkpoint",
        (
            "import io\nfile = io.BytesIO()\ntorch.save({'model': net().state_dict()}, file)\nfile.seek(0)",
            "model = net()\ncheckpoint = torch.load(file, map_location='cuda')\nstate = checkpoint['model']\n"
            "model.load_state_dict(state)",
        ),
        "`del checkpoint, state`",
    ),
    Case(
        "idle_states",
        (
            TRAIN,
            "before = torch.optim.Adam(model.parameters())\nmodel(x).mean().backward()\nbefore.step()\n"
            "optimizer = torch.optim.AdamW(model.parameters())\nmodel(x).mean().backward()\noptimizer.step()",
        ),
        "`before`",
    ),
    # https://github.com/WenjieDu/PyPOTS/issues/599
    Case(
        "idle_states",
        (
            TRAIN + "optimizer = torch.optim.Adam(model.parameters())\nmodel(x).mean().backward()\noptimizer.step()",
            "model.cpu()\nother = net()",
        ),
        "not on this device any more",
    ),
    Case(
        "gradients_in_evaluation",
        (
            TRAIN.replace("net()", "net(1024)").replace("512, 512", "512, 1024"),
            "model(x).mean().backward()\noptimizer.step()\noptimizer.zero_grad(set_to_none=False)\n"
            "with torch.no_grad():\n    model(torch.cat([x] * 8))",
        ),
        "(line 4) fills them with zeros",
    ),
    # https://github.com/basiclab/GNGAN-PyTorch/issues/2
    Case(
        "input_gradients",
        (
            TRAIN + "images = [mib(4).view(-1, 512) for _ in range(4)]",
            "for one in images:\n    one.requires_grad_()\n    optimizer.zero_grad()\n    model(one).mean().backward()\n"
            "    optimizer.step()",
        ),
        "line 3",
    ),
    # https://github.com/TransformerLensOrg/TransformerLens/pull/493
    Case(
        "alike_buffers",
        (
            "class Masked(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('mask', torch.ones(4096, 4096).tril().bool())\n"
            "    def forward(self, x):\n        return x.masked_fill(self.mask[:8, :8], 0)",
            "masked = nn.Sequential(*[Masked() for _ in range(4)]).cuda()\nmasked(torch.zeros(8, 8, device='cuda'))",
        ),
        "In [3], line 4",
    ),
    # labels from NumPy, and a loss that is computed with them
    Case(
        "wide_numbers",
        (
            "import numpy as np\nmodel = net(1024)\ny = np.zeros((4096, 1024))\nx = torch.ones(4096, 1024, device='cuda')",
            "labels = torch.from_numpy(y).cuda()\nloss = ((model(x) - labels) ** 2 * labels).mean()\nloss.backward()",
        ),
        "computed with it",
    ),
    Case("wide_numbers", ("import numpy as np", "x = torch.from_numpy(np.zeros((1024, 1024))).cuda()"), "`x`"),
    Case(
        "dominating_layer",
        (
            "model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32768), nn.ReLU(), nn.Linear(32768, 16),\n"
            "    nn.Linear(16, 16)).cuda()\n"
            "x = torch.randn(2048, 64, device='cuda')",
            "model(x).sum().backward()",
        ),
        "`model.3`, with the operations after it, 256 MiB of 257 MiB. Most of that is its input",
    ),
    # What functions make of its output is not its input.
    Case(
        "dominating_layer",
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.conv, self.fc, self.out = nn.Conv2d(1, 64, 3, padding=1), nn.Linear(64, 16), nn.Linear(16, 16)\n"
            "    def forward(self, x):\n"
            "        return self.out(self.fc(F.max_pool2d(F.relu(self.conv(x)), 64).flatten(1)))",
            "import torch.nn.functional as F\nmodel = Net().cuda()\nx = torch.randn(64, 1, 64, 64, device='cuda')",
            "model(x).sum().backward()",
        ),
        "a block with that layer and these operations",
    ),
    # Of a variable of a function.
    Case(
        "dominating_layer",
        (
            "def train(x):\n"
            "    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32768), nn.ReLU(), nn.Linear(32768, 16)).cuda()\n"
            "    model(x).sum().backward()\n"
            "    yield",
            "x = torch.randn(2048, 64, device='cuda')\nsteps = train(x)",
            "next(steps)",
        ),
        "for backward: `model.3`, with",
    ),
    # What it makes itself it need not keep.
    Case(
        "dominating_layer",
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.before, self.lstm = nn.Linear(8, 16), nn.LSTM(16, 1024, batch_first=True)\n"
            "        self.after, self.last = nn.Linear(1024, 1), nn.Linear(1, 1)\n"
            "    def forward(self, x):\n        return self.last(self.after(self.lstm(self.before(x))[0][:, -1]))\n"
            "class Trainer: pass\ntrainer = Trainer()\ntrainer.net = Net().cuda()\n"
            "x = torch.randn(32, 128, 8, device='cuda')",
            "trainer.net(x).sum().backward()",
        ),
        "`trainer.net.lstm`, with the operations after it",
    ),
    Case(
        "graphs_ahead",
        (
            "lin = nn.Linear(256, 256).cuda()\nx = torch.randn(262144, 256, device='cuda')",
            "h = x\nfor _ in range(64):\n    h = lin(h)\n    h = h.relu()\nh.sum().backward()",
        ),
        "wait for their backward (line 6)",
        device="T4",
    ),
    Case(
        "attention_scores",
        (
            "q = nn.Linear(64, 64).cuda()\nx = torch.randn(8, 512, 64, device='cuda')",
            "h = q(x)\np = torch.softmax(h @ h.transpose(1, 2) / 8, -1)\n(p @ h).sum().backward()",
        ),
        "scaled_dot_product_attention",
    ),
    Case("another_process", ("x = mib(1)", "y = mib(1)"), "Other processes hold", device="T4,idle=6GiB"),
    # a fifth, in a cell that comes near the end
    Case("another_process", ("x = mib(1)", "y = mib(10_500)"), "Other processes hold", device="T4,idle=3GiB"),
    # blocks below 10 MiB share segments of 20: half of every one stays in use
    Case(
        "fragmentation",
        ("a = [mib(9) for _ in range(1400)]", "del a[::2]\nbig = mib(1500)"),
        "in one piece",
        device="T4",
    ),
    Case(
        "fragmentation",
        ("a = [mib(9) for _ in range(1000)]", "del a[::2]\ny = mib(1)"),
        "free pieces between",
        device="T4",
    ),
]

# the loop of PyTorch's "Understanding GPU Memory 1" has its zero_grad commented out
FORGOTTEN = (
    "for _ in range(3):\n    pred = model(x)\n    nn.functional.mse_loss(pred, x).backward()\n    optimizer.step()\n"
    "    # optimizer.zero_grad(set_to_none=True)"
)
EVALUATING = (
    "def evaluate(model, count):\n    model.eval()\n    outputs, total = [], 0.0\n    for _ in range(count):\n"
    "        out = model(torch.randn(4096, 512, device='cuda'))\n        total += out.mean()\n        outputs.append(out)\n"
    "    return total"
)
EPOCHS = (
    "for epoch in range(2):\n    model.train()\n    for _ in range(3):\n"
    "        optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()\n    model.train(False)\n"
    "    val = evaluate(model, {count})"
)
NODE = "class Node:\n    def __init__(self, x):\n        self.x = x\n        self.me = self"
PROGRAM = (
    "import os\n\nwith open('program_of_a_cell.py', 'w') as file:\n    file.write(\"\"\"\nimport torch\n"
    'def train():\n    return weights * 1\nweights = torch.randn(3, 1024, 1024, 64, device=\'cuda\')\n""")\n'
    "runpy.run_path('program_of_a_cell.py')\nos.remove('program_of_a_cell.py')"
)
NODES = "for _ in range(3):\n    node = Node(torch.randn(1024, 1024, 64, device='cuda'))\ndel node"
NOTES = (
    "from torch._dynamo.side_effects import SideEffects\n\n"
    "def Node(x):\n    notes = SideEffects.__new__(SideEffects)\n    notes.keepalive = [x, notes]\n    return notes"
)
STALE_STATES = """
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
    opt.state[grown] = dict(opt.state[points])
    points = grown
"""
WAITING_THREADS = """
import queue, threading
inbox, outbox = queue.Queue(), queue.Queue()
def serve():
    batch = inbox.get()
    while batch is not None:
        out = batch.cuda() * 2
        outbox.put(out.sum().item())
        batch = inbox.get()
workers = [threading.Thread(target=serve, daemon=True) for _ in range(3)]
for worker in workers:
    worker.start()
"""
GUILTY += [
    # many rows that were made of few, and a layer that works on all of them
    Case(
        "carried_on",
        (
            TRAIN,
            "r = torch.rand(1024, 512, device='cuda')\nh = model(r.repeat_interleave(64, 0)).relu()\nh.sum().backward()",
        ),
        "64 times the rows",
    ),
    # scores of a thousand negatives each
    Case(
        "products_summed",
        ("u, v = mib(1).view(1024, 1, 256), mib(512).view(1024, 512, 256)", "s = (u * v).sum(-1)"),
        "only to add them up",
    ),
    # a bag of words by hand
    Case(
        "rows_averaged",
        (
            "e = nn.Embedding(100, 512).cuda()\nids = torch.randint(100, (256, 1024), device='cuda')",
            "w = e(ids).mean(1)",
        ),
        '`nn.EmbeddingBag` with `mode="mean"`',
    ),
    # a forecast's windows, of which batches are taken
    Case(
        "overlapping_windows",
        (
            "x = torch.rand(60000, 16, device='cuda')",
            "windows = x.unfold(0, 96, 1).contiguous()\nw = windows[:64].mean()",
        ),
        "each number is in 96 of them",
    ),
]
GUILTY += [
    Case("missing_zero_grad", (TRAIN, FORGOTTEN), "never calls `zero_grad`"),
    Case("missing_zero_grad", (TRAIN.replace("SGD", "Adam"), FORGOTTEN), "`optimizer.zero_grad()` right after"),
    Case(
        "missing_zero_grad",
        (TRAIN.replace("SGD", "Adam").replace("optimizer", "opt"), FORGOTTEN.replace("optimizer", "opt")),
        "`opt.zero_grad()` right after `opt.step()`",
    ),
    Case("reference_cycle", (NODE, NODES), "768 MiB is held only by reference cycles: Node.me -> Node"),
    Case("reference_cycle", (NODE, NODES), "%gpumem_free cycles"),
    # what Dynamo keeps of a function that it traced, as it is left behind a break in a model of transformers
    Case(
        "reference_cycle", (NOTES, NODES), "768 MiB is held only by reference cycles that `torch.compile` left behind"
    ),
    Case("reference_cycle", (NOTES, NODES), "`gc.collect()` once"),
    # a program that a cell runs, which leaves its namespace behind
    Case(
        "reference_cycle", ("import runpy", PROGRAM), "768 MiB is held only by a namespace that nothing uses any more"
    ),
    Case(
        "reference_cycle",
        ("import runpy", PROGRAM),
        "(train's globals -> train), as `runpy.run_path` and `exec` leave them",
    ),
    # forum threads that end with "restart the kernel": what is full, and what could go
    Case("memory_ran_out", ("old = mib(3000)\nx = mib(9000)", "y = x + 1"), "`x` 9,000 MiB, `old` 3,000 MiB", "T4"),
    Case(
        "memory_ran_out",
        ("old = mib(3000)\nx = mib(7000)", "mib(500)", "y = torch.cat([x, x[:1]])"),
        "`del old` would have saved 3,000 MiB (the cell does not mention it, enough for this request); `%gpumem_free out` would "
        "have saved 500 MiB (results in Out)",
        "T4",
    ),
    Case(
        "pinned_by_earlier_error",
        ("def bad():\n    big = mib(6000)\n    1 / 0", "bad()", "y = mib(10000)"),
        "The traceback of an earlier error (ZeroDivisionError, In [4]) still held 6,000 MiB that nothing else did. "
        "`%gpumem_free` frees it, before the cell is run again.",
        "T4",
    ),
    # of which the attempt that fails now is no part
    Case(
        "pinned_by_earlier_error",
        (
            "def bad(n):\n    first = mib(n)\n    second = mib(n)\n    return first, second",
            "bad(9000)",
            "y = mib(2000)\nbad(4000)",
        ),
        "(OutOfMemoryError, In [4]) still held 9,000 MiB that nothing else did",
        "T4",
    ),
    # one behind which another error came, so that only a cycle has it still
    Case(
        "pinned_by_earlier_error",
        ("def bad():\n    big = mib(6000)\n    1 / 0", "bad()", "1 / 0", "y = mib(10000)"),
        "Tracebacks of earlier errors still held 6,000 MiB that nothing else did.",
        "T4",
    ),
    Case(
        "pinned_by_earlier_error",
        (
            "class Node: pass\nclass Other: pass",
            "def left():\n    one = Node()\n    one.other = Other()\n    one.other.back = one\n    one.big = mib(6000)\nleft()",
            "y = mib(10000)",
        ),
        "Reference cycles from before this cell still held 6,000 MiB that nothing else did.",
        "T4",
    ),
]
GUILTY += [
    Case(
        "summed_losses",
        (TRAIN, "total = 0\nfor _ in range(4):\n    total = total + model(x).mean()\ntotal.backward()"),
        "`total`",
    ),
    Case(
        "summed_losses",
        (
            TRAIN,
            "losses = []\nfor _ in range(4):\n    losses.append(model(x).mean())\ntorch.stack(losses).mean().backward()",
        ),
    ),
    Case("retained_graph", (TRAIN, LOOP.replace("backward()", "backward(retain_graph=True)")), "no further backward"),
    Case(
        "gradients_with_graphs",
        (TRAIN, "z = x.clone().requires_grad_()\nmodel(z).sum().backward(create_graph=True)\nz.grad.norm().backward()"),
        "`z.grad = None`",
    ),
    Case(
        "untrained_gradients",
        (TRAIN + "teacher = net()", LOOP.replace("model(x)", "(model(x) - teacher(x)).pow(2)")),
        "`teacher.requires_grad_(False)`",
    ),
    Case(
        "retry_in_except",
        (
            "def first():\n    h = mib(9000)\n    return mib(9000)",
            "try:\n    y = first()\nexcept torch.OutOfMemoryError:\n    y = mib(4000)",
        ),
        "Line 5",
        "T4",
    ),
]
CACHE = (
    "from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM\nwith torch.device('cuda'):\n"
    "    llm = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2,\n"
    "        num_attention_heads=4)).eval()\nids = torch.randint(0, 64, (64, 512), device='cuda')\ncache = DynamicCache()"
)
# A cache that takes what is left, as serving engines do; the first in one function, the other by way of a second one.
ROOM = """
class Engine(nn.Module):
    def allocate(self, share):
        free, total = torch.cuda.mem_get_info()
        self.blocks = int(free * share) // (1 << 20)
        self.kv_cache = torch.empty(2, self.blocks, 1 << 18, dtype=torch.half, device="cuda")
    def blocks_left(self, share):
        free = torch.cuda.mem_get_info()[0]
        return int(free * share) // (1 << 20)
    def allocate_after(self, share):
        size = self.blocks_left(share)
        self.kv_cache = torch.empty(2, size, 1 << 18, dtype=torch.half, device="cuda")
    def allocate_so_many(self, size):
        print(torch.cuda.mem_get_info())
        self.kv_cache = torch.empty(2, size, 1 << 18, dtype=torch.half, device="cuda")
"""
GUILTY += [
    Case(
        "key_value_cache",
        (ROOM, "engine = Engine()\nengine.allocate(0.9)"),
        "`free, total = torch.cuda.mem_get_info()`",
        "T4",
    ),
    Case(
        "key_value_cache",
        (ROOM, "engine = Engine()\nengine.allocate_after(0.9)"),
        "`free = torch.cuda.mem_get_info()[0]`",
        "T4",
    ),
    Case("key_value_cache", (ROOM, "engine = Engine()\nengine.allocate_so_many(64)"), "A smaller batch", "T4"),
    Case(
        "data_on_device",
        (
            "class Frames(torch.utils.data.Dataset):\n    pass\nds = Frames()\nds.all = mib(9000)",
            "y = mib(3000)\nz = mib(4000)",
        ),
        "`ds.all`",
        "T4",
    ),
    Case(
        "copied_weights",
        (
            "model = nn.Sequential(*[nn.Linear(8192, 8192, device='cuda') for _ in range(40)])\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "import copy\nother = copy.deepcopy(model)",
        ),
        "copy.deepcopy(model)",
        "T4",
    ),
    Case(
        "key_value_cache",
        (CACHE, "with torch.no_grad():\n    out = llm(ids, past_key_values=cache, logits_to_keep=1)"),
        "`cache`",
    ),
]

GUILTY += [
    Case(
        "joined",
        ("x = 1", "parts = [mib(16) for _ in range(4)]\nwhole = torch.cat(parts)"),
        "`torch.cat(parts)` (line 3)",
    ),
    Case(
        "grown_result",
        ("x = torch.randn(4, 16, 64, 64, device='cuda')", "y = nn.functional.unfold(x, 7, padding=3)"),
        "49 times as much",
    ),
    # The gradient of what is gathered from an expanded view has all of the view's shape.
    Case(
        "expanded_gradient",
        (
            "f = torch.randn(2, 1024, 16, device='cuda', requires_grad=True)\n"
            "i = torch.zeros(2, 512, 8, 1, dtype=torch.long, device='cuda')",
            "wide = f[:, None].expand(-1, 512, -1, -1)\nnear = torch.gather(wide, 2, i.expand(-1, -1, -1, 16))\n"
            "near.sum().backward()",
        ),
        "(2, 512, 1024, 16)",
    ),
    # In the loop around the training: one copy of the weights for each epoch.
    Case(
        "growth",
        (
            TRAIN,
            "seen = []\nfor _ in range(5):\n    for _ in range(2):\n        optimizer.zero_grad()\n"
            "        model(x).mean().backward()\n        optimizer.step()\n"
            "    seen.append({k: v.clone() for k, v in model.state_dict().items()})",
        ),
        "held by `seen`",
    ),
    # A state that the loop makes from itself: the results and the losses only reach the graphs through it.
    Case(
        "kept_graphs",
        (
            "import torch\ncell = torch.nn.LSTM(256, 512).cuda()\nx = torch.randn(64, 16, 256, device='cuda')\nh = None",
            "total = 0\nfor _ in range(4):\n    out, h = cell(x, h)\n    loss = out.mean()\n    total += loss\n"
            "    loss.backward(retain_graph=True)",
        ),
        "`h` (line 4, `out, h = cell(x, h)`) carries the graph on from each iteration to the next, so those of 4 iterations",
    ),
    # A tensor that is carried on, and so goes by its own name.
    Case(
        "kept_graphs",
        (
            "import torch\ncell = torch.nn.GRU(256, 512).cuda()\nx = torch.randn(64, 16, 256, device='cuda')\nh = None",
            "for _ in range(4):\n    out, h = cell(x, h)\n    out.mean().backward(retain_graph=True)",
        ),
        "`h` (line 3, `out, h = cell(x, h)`) carries the graph on from each iteration to the next, so those of 4 iterations",
    ),
    # A custom function's own attribute is there behind the backward that frees what was saved for it.
    Case(
        "kept_on_ctx",
        (TRAIN, f"{ON_CTX}\n{LAYERS}"),
        "`mine` keeps tensors in `ctx.extra`, which no backward frees: 96.0 MiB",
    ),
    # What lies deep in an attribute, and what a closure keeps that is one.
    Case(
        "kept_on_ctx",
        (TRAIN, f"{ON_CTX.replace('ctx.extra = x.clone()', 'ctx.extra = dict(own=[x.clone()])')}\n{LAYERS}"),
        "`mine` keeps tensors in `ctx.extra`, which no backward frees: 96.0 MiB",
    ),
    Case(
        "kept_on_ctx",
        (TRAIN, f"{ON_CTX.replace('ctx.extra = x.clone()', 'y = x.clone(); ctx.extra = lambda: y')}\n{LAYERS}"),
        "`mine` keeps tensors in `ctx.extra`, which no backward frees: 96.0 MiB in the graph of `",
    ),
    # A graph through which a backward has gone keeps its leaf, and that its gradient.
    Case(
        "growth",
        (
            TRAIN,
            "kept = []\nfor _ in range(4):\n    own = torch.randn(8192, 512, device='cuda', requires_grad=True)\n"
            "    score = model(own).mean()\n    score.backward()\n    kept.append(score)",
        ),
        "it is held by the graph of `kept`, put there at line 7 (`kept.append(score)`). Put `score.detach()` there (or "
        "`score.item()`, if its value is all you need); for now `kept = [one.detach() for one in kept]` frees ",
    ),
    # A statement that takes something out of a list put nothing into it.
    Case(
        "growth",
        ("x = 1", "kept = []\nfor _ in range(6):\n    kept.append(mib(64))\nkept = kept[1:]"),
        "put there at line 4",
    ),
    Case(
        "caught_shortage",
        (
            TRAIN,
            "size = 16\nwhile size:\n    try:\n        mib(size << 8), mib(size << 10)\n        break\n"
            "    except torch.OutOfMemoryError:\n        size //= 16",
        ),
        "Memory ran out at line 5, and the program caught the error and went on: the peak is of an attempt that failed.",
        "T4",
    ),
    # The same in a function that runs out of memory: in its own words.
    Case(
        "kept_graphs",
        (
            "def train():\n    cell = torch.nn.LSTM(256, 512).cuda()\n    x = torch.randn(64, 64, 256, device='cuda')\n"
            "    h, scale = None, torch.nn.Parameter(torch.ones((), device='cuda'))\n    optimizer = torch.optim.SGD([scale])\n"
            "    for _ in range(400):\n        out, h = cell(x, h)\n        (out.mean() + scale).backward(retain_graph=True)\n"
            "        optimizer.step()",
            "train()",
        ),
        "carries the graph on from each iteration to the next",
        "virtual:1GiB",
    ),
    # Out of memory in the middle of an iteration, which so leaves less than those before.
    Case(
        "growth",
        (
            TRAIN,
            "kept = []\nfor _ in range(100):\n    big = torch.ones(2**23, device='cuda')\n    kept.append(big)\n"
            "    kept.append(big.repeat(2))",
        ),
        "leaves 96.0 MiB more allocated than the previous one (7 iterations): it is held by `kept`, put there at line ",
        "virtual:1GiB",
    ),
    # What two lists of a function held when it failed: by their names in it, and where they were filled.
    Case(
        "growth",
        (
            "wide = torch.nn.Linear(512, 8192).cuda()\nx = torch.randn(1024, 512, device='cuda')",
            "def gather(count):\n    kept = {'first': [], 'second': []}\n    for _ in range(count):\n"
            "        kept['first'].append(wide(x))\n        kept['second'].append(kept['first'][-1] * 2)\ngather(100)",
        ),
        "it is held by `kept['first']` of gather() (",
        "virtual:1GiB",
    ),
    # Validation after an epoch, between the optimizer's steps.
    Case(
        "kept_graphs",
        (TRAIN, f"{LOOP}\ntotal = 0\nfor _ in range(4):\n    total += model(x).mean()"),
        "`total` (line 9) keeps the graphs of 4 iterations",
    ),
    # A function that evaluates after each epoch; the second time is out of memory in it.
    Case(
        "missing_no_grad",
        (EVALUATING, TRAIN, EPOCHS.format(count=8)),
        "`model` is in evaluation mode, yet `val` keeps the graphs of 8 iterations (line 7)",
    ),
    Case(
        "missing_no_grad",
        (EVALUATING, TRAIN, EPOCHS.format(count=64)),
        "yet `outputs` and `total` of evaluate() keep the graphs of ",
        "virtual:1GiB",
    ),
    # A batch at the peak of a training that is as it should be.
    Case(
        "whole_batch",
        (TRAIN, "model(torch.randn(65536, 512, device='cuda')).mean().backward()"),
        "65,536 items",
    ),
    # All batches are on the device, and a loop takes one after the other.
    Case(
        "data_on_device",
        ("batches = [mib(900) for _ in range(10)]", "for x in batches:\n    y = x.repeat(7)"),
        "`batches`",
        "T4",
    ),
]

ACCUMULATING = """
for i in range(4):
    model(x).mean().backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
"""
CONVOLVED = "conv = nn.Conv2d(1, 32, 3, padding=1).cuda()\nimage = torch.randn(1, 1, 512, 512)"
FILLED = """
with torch.no_grad():
    out = torch.zeros(32, 512, 512, device="cuda")
    for i in range(0, 512, 8):
        out[:, i : i + 8] += conv(image[..., i : i + 8, :].cuda())[0]
"""
SEARCH = """
for _ in range(3):
    {first}model = net(1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1024, device="cuda")).mean().backward()
        optimizer.step()
"""
GUILTY += [
    Case(
        "checkpointed_whole",
        (WHOLE, "torch.utils.checkpoint.checkpoint(whole, x, use_reentrant=False).mean().backward()"),
        "line 2",
    ),
    Case("wide_indices", ("", "order = torch.rand(64, 1 << 18, device='cuda').argsort(dim=1)"), "kept by `order`"),
    # the mask as each head has it, in another shape afterwards
    Case(
        "expanded_copy",
        (
            'pad = torch.zeros(2, 512, dtype=torch.bool, device="cuda")',
            "mask = pad[:, None, None, :].expand(2, 8, 512, 512).reshape(16, 512, 512).float()",
        ),
        "(2, 1, 1, 512) to (2, 8, 512, 512)",
    ),
    # nothing but an addition reads the copy
    Case(
        "expanded_copy",
        (
            'x = torch.randn(64, 1, 4096, device="cuda")\nbias = torch.randn(1, 64, 4096, device="cuda")',
            "a = x.repeat(1, 64, 1)\nb = a + bias",
        ),
        "`a + bias` (line 3) reads one as it is",
    ),
    Case(
        "expanded_copy",
        (
            "x, noise = torch.ones(64, 1, 4096, device='cuda'), torch.ones(64, 64, 4096, device='cuda')",
            "rows = x.repeat(1, 64, 1)\nboth = torch.cat([rows, noise], -1)",
        ),
        "`torch.cat([rows, noise], -1)` (line 3) reads one as it is",
    ),
    # ljwztc/CLIP-Driven-Universal-Model#55
    Case("filled_in_parts", (CONVOLVED, FILLED), "the peak would be at most"),
    # huggingface/transformers#13019
    Case(
        "built_beside",
        ("", "for _ in range(3):\n    model = net(1024)"),
        "`del model` at the end of each turn: the peak would be 12.0 MiB, not 24.0 MiB",
    ),
    Case(
        "built_beside",
        (
            "class Keeper:\n    pass",
            "for _ in range(3):\n    model = net(1024)\n    keeper = Keeper()\n    keeper.net = model",
        ),
        "`del keeper, model` at the end of each turn",
    ),
    Case("built_beside", ("", SEARCH.format(first="")), "`del model, optimizer` at the end of each turn"),
    # each keeps what it has computed
    Case("growth", (LAZY, "for one in lazy:\n    total = one.gram.sum().item()"), "(`return self.x @ self.x.T`)"),
]
SECOND = (
    "import copy\nfrom torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    "model = net(1024, 6)\noptimizer = torch.optim.Adam(model.parameters())\nx = torch.randn(8, 1024, device='cuda')\n"
    "def step(model):\n    model(x).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\nstep(model)"
)
LATER = (
    "optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), None\n"
    "def average(other):\n    for o, p in zip(other.parameters(), model.parameters()):\n        o.lerp_(p, 0.1)\n"
    "for _ in range(4):\n    step(model)\n    if other is None:\n        other = copy.deepcopy(model)\n"
    "    with torch.no_grad():\n        "
)
GUILTY += [
    # The last output of an earlier cell's loop keeps its graph.
    Case(
        "left_results",
        (
            "model = net(256)\nfor _ in range(2):\n    x = torch.randn(8192, 256, device='cuda')\n    out = model(x)\n"
            "    loss = out.pow(2).mean()",
            "with torch.no_grad():\n    score = model(torch.randn(4096, 256, device='cuda')).mean().item()",
        ),
        "`del out, loss` before it frees that",
    ),
    Case(
        "unused_models",
        (
            "old = net(2048)\nmodel = net()\nx = torch.zeros(64, 512, device='cuda')",
            "with torch.no_grad():\n    y = model(x)",
        ),
        "`old.cpu()` frees",
    ),
    # https://github.com/foundation-model-stack/fms-fsdp/pull/152
    Case(
        "unread_results",
        (
            "head, x = nn.Linear(512, 16384).cuda(), torch.zeros(2048, 512, device='cuda')",
            "for _ in range(3):\n    big = head(x)\n    loss = big.mean()\n    loss.backward()",
        ),
        "`del big` before",
    ),
    Case(
        "zeroed_gradients",
        (
            f"{TRAIN}model = net(2048)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "x = torch.zeros(64, 2048, device='cuda')",
            LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"),
        ),
        "fills gradients with zeros",
    ),
    Case(
        "retained_gradients",
        (
            "layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)).cuda()\n"
            "x = torch.zeros(8192, 512, device='cuda')",
            "acts, h = [], x\nfor layer in layers:\n    h = layer(h)\n    h.retain_grad()\n    acts.append(h)\n"
            "h.sum().backward()",
        ),
        "`h.retain_grad()` (line 5)",
    ),
    Case(
        "matrices_of_rows",
        (
            "rows, given = mib(4).view(-1, 32), mib(1).view(-1, 8)",
            "made = nn.Linear(8, 32 * 32).cuda()\ny = torch.bmm(rows[:, None], made(given).view(-1, 32, 32)).sum()",
        ),
        "each of 32,768 rows with a matrix of its own",
    ),
    Case(
        "asked_for",
        (
            "def run(x, output_states=False):\n    kept = [x.add(n) for n in range(6)]\n"
            "    return {'last': kept[-1] * 2, 'states': kept if output_states else None}\nx = mib(16)",
            "out = run(x, output_states=True)\ny = out['last'].sum()",
        ),
        "the states of every layer kept in `out['states']`",
    ),
]

JACOBIAN = (
    "from torch.func import jacrev\nfrom torch.autograd.functional import jacobian\n"
    "deep = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 512)).cuda()\n"
    "x = torch.randn(32, 64, device='cuda')"
)
ROWS = "J = jacrev(lambda x: deep(x).sum(0){chunks})(x)"
OWN_METHOD = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2048, 2048)
        self.pool = {kept}
    def mean(self, x):
        return x.mean(0)
x = torch.randn(8, 2048, device="cuda")
import gc
"""
# (Python's collector comes by at the end, whatever else it does.)
ENCODERS = (
    "gc.disable()\nfor _ in range(5):\n    encoder = Encoder().cuda()\n    y = encoder.body(x).detach()\n    del encoder\n"
    "y = None\ngc.collect()\ngc.enable()"
)
GUILTY += [
    Case(
        "jacobian_graph",
        (JACOBIAN, ROWS.format(chunks="")),
        "`chunk_size=64` in the call of `jacrev` computes 64 of the 512",
    ),
    Case(
        "jacobian_rows",
        (JACOBIAN, f"with torch.no_grad():\n    {ROWS.format(chunks='')}"),
        "all 512 rows of the Jacobian at once",
    ),
    Case(
        "jacobian_of_a_batch",
        (
            "from torch.autograd.functional import jacobian\nx = torch.randn(64, 4096, device='cuda')\n"
            "wide = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 2)).cuda()",
            "J = jacobian(wide, x)",
        ),
        "64 times less",
    ),
    Case(
        "summed_as_integers",
        ("seen = torch.ones(4096, 4096, dtype=torch.bool, device='cuda')", "counts = seen.sum(0)"),
        "from bool to int64 before it adds them up: 128 MiB beside 16.0 MiB",
    ),
    Case(
        "compared_with_each",
        (
            "ids, few = torch.arange(4 << 20, device='cuda'), torch.arange(64, device='cuda')",
            "y = torch.isin(ids, few)",
        ),
        "compares each of 4,194,304 numbers with each of 64",
    ),
    Case(
        "rebuilt_beside",
        (
            "cache = [mib(8) for _ in range(16)]\nrows = torch.arange(2 << 20, device='cuda')",
            "cache = [one.index_select(0, rows) for one in cache]",
        ),
        "makes all of a new `cache` while the old one is there still",
    ),
    Case(
        "pruned_weights",
        (
            "from torch.nn.utils import prune\nmodel = net(2048, 4)",
            "for layer in model:\n    prune.l1_unstructured(layer[0], 'weight', amount=0.9)\n"
            "y = model(torch.ones(8, 2048, device='cuda'))",
        ),
        "their product (`weight`)",
    ),
    Case(
        "same_masks",
        ("n = 1024", "mask = torch.full((4, 8, n, n), float('-inf'), device='cuda').triu(1)"),
        "makes the same mask for each of 32",
    ),
    Case(
        "long_tables",
        (
            "class Rotary(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('cos', torch.ones(100000, 64))\n"
            "    def forward(self, x):\n        return x * self.cos[:x.shape[1]]\nrotary = Rotary().cuda()",
            "y = rotary(torch.ones(2, 512, 64, device='cuda'))",
        ),
        "100,000 rows, of which the program takes the first ones",
    ),
    Case(
        "many_windows",
        (
            "wave = torch.ones(8, 480000, device='cuda')\nwindow = torch.ones(1024, device='cuda')",
            "s = torch.stft(wave, 1024, 32, window=window, return_complex=True)",
        ),
        "one every 32",
    ),
    Case(
        "padded_sequences",
        (
            "from torch.nn.utils.rnn import pad_sequence\n"
            "its = [torch.ones(n, 64, device='cuda') for n in [20000] + [100] * 63]",
            "x = pad_sequence(its)",
        ),
        "to the longest one's 20,000",
    ),
    Case(
        "joined_gradients",
        (f"{TRAIN}model(x).sum().backward()", "every = torch.cat([p.grad.flatten() for p in model.parameters()])"),
        "copies all gradients into one piece",
    ),
    Case(
        "promoted",
        (
            "x = torch.ones(4096, 4096, device='cuda', dtype=torch.bfloat16)\nw = torch.ones(4096, device='cuda')",
            "y = x + w",
        ),
        "`w.to(torch.bfloat16)` leaves the result in bfloat16",
    ),
    Case(
        "narrowed",
        ("n = 16384", "before = torch.ones(n, n, device='cuda').tril().bool()"),
        "makes (16384, 16384) in float32, of which only truth values are wanted: 2,048 MiB for 256 MiB of them",
    ),
    Case(
        "zeros_for_where",
        (
            "x, seen = torch.ones(4096, 4096, device='cuda'), torch.ones(4096, 1, dtype=torch.bool, device='cuda')",
            "y = torch.where(seen, x, torch.zeros_like(x))",
        ),
        "`torch.zeros_like(x)` (line 2) makes 64.0 MiB of one number",
    ),
    Case(
        "log_of_softmax",
        (
            "x = torch.zeros(1024, 32000, device='cuda', requires_grad=True)",
            "y = torch.log(x.softmax(-1) + 1e-9)\ny.mean().backward()",
        ),
        "3 tensors of (1024, 32000) that are there at once: 378 MiB",
    ),
    Case(
        "other_streams",
        (
            "def sums(stream):\n    with torch.cuda.stream(stream):\n        return mib(200).sum()",
            "for _ in range(4):\n    stream = torch.cuda.Stream()\n    total = sums(stream)",
        ),
        "4 streams of the program's own",
    ),
    Case(
        "models_in_a_list",
        (
            "x = torch.ones(8, 2048, device='cuda')",
            "several = [nn.Linear(2048, 2048).cuda() for _ in range(4)]\n"
            "for one in several:\n    one(x).mean().backward()",
        ),
        " for _ in range(4)]`) keeps 4 models on the device: 128 MiB, 32.0 MiB each",
    ),
    Case(
        "in_place",
        ("images = torch.zeros(400, 512, 512, dtype=torch.uint8)", "x = images.cuda().float() / 255"),
        "`.div_(255)`",
    ),
    Case(
        "one_weight",
        (
            "first, head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(256, 10)\n"
            "flat = nn.Sequential(first, nn.Flatten(), nn.Linear(64 * 64 * 64, 256), head).cuda()\n"
            "optimizer = torch.optim.Adam(flat.parameters())\nx = torch.zeros(2, 3, 64, 64, device='cuda')",
            "for _ in range(3):\n    flat(x).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()",
        ),
        "`flat.2.weight`, (256, 262144)",
    ),
    Case(
        "collected_late", (OWN_METHOD.format(kept="self.mean"), ENCODERS), "until Python's garbage collector comes by"
    ),
]

# Layers that are checkpointed one by one; data of which a cell takes batches.
IN_PARTS = """
from torch.utils.checkpoint import checkpoint
layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8)).cuda()
x = torch.randn(8192, 512, device="cuda")
def run(h, part):
    for layer in layers:
        h = checkpoint({part}, h, use_reentrant=False)
    return h.mean()
"""
DATA = (
    "X = torch.zeros(200000, 512, device='cuda')\nlayer = nn.Linear(512, 8).cuda()\n"
    "order = torch.randperm(200000, device='cuda')\n"
    "def train(rows):\n    layer(rows).mean().backward()"
)
GUILTY += [
    Case(
        "checkpointed_for_nothing",
        (IN_PARTS.format(part="layer"), "run(x, 1).backward()"),
        "keeps each part's input",
    ),
    Case(
        "copied_rows",
        (DATA, "X_train = X[order[:180000]]\nfor i in range(0, 4096, 512):\n    train(X_train[i:i + 512])"),
        "`X[numbers[i:j]]`",
    ),
    Case(
        "diagonal_matrix",
        ("A = mib(100).view(5120, 5120)", "D = torch.diag(A.sum(1))\nscaled = D @ A"),
        "`d[:, None] * A`",
    ),
    Case(
        "all_pairs",
        (
            "x = torch.randn(6000, 8, device='cuda')",
            "K = torch.exp(-torch.cdist(x, x))\nL = torch.linalg.cholesky(K + torch.eye(6000, device='cuda'))",
        ),
        "needs all of it at once",
    ),
    Case(
        "sorted",
        ("", "best = torch.rand(64, 1 << 18, device='cuda').argsort(dim=1)[:, :5]"),
        "Only the first ones are read",
    ),
    Case("unit_matrix", ("", "rows = torch.eye(4096, device='cuda')[torch.arange(64, device='cuda')]"), "F.one_hot"),
    Case("both_halves", ("x = torch.rand(1024, 16384, device='cuda')", "s = torch.fft.fft2(x)"), "torch.fft.rfft2"),
    Case(
        "block_diagonal", ("x = torch.rand(64, 256, 256, device='cuda')", "b = torch.block_diag(*x)"), "Keep the blocks"
    ),
    Case(
        "weights_too_large",
        (
            "with torch.device('meta'):\n    body = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(50)])",
            "body = body.to_empty(device='cuda')",
        ),
        "before they are moved",
    ),
    Case(
        "weights_too_large",
        ("", "body = nn.Sequential(*[nn.Linear(16384, 16384, device='cuda') for _ in range(50)])"),
        "they take half of that; in four bits (bitsandbytes) about an eighth",
    ),
    Case(
        "weights_too_large",
        (
            "class Narrow(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        numbers = torch.empty(1 << 30, dtype=torch.int8, device='cuda')\n"
            "        self.weight = nn.Parameter(numbers, requires_grad=False)",
            "body = nn.Sequential(*[Narrow() for _ in range(50)])",
        ),
        "In four bits (bitsandbytes) about half of that.",
    ),
    Case(
        "models_of_graphs",
        (
            "def train():\n    body = net(2048, 4)\n    loss = body(torch.rand(64, 2048, device='cuda')).mean()\n"
            "    loss.backward()\n    return loss",
            "final = train()",
        ),
        "`final = final.detach()` frees",
    ),
    Case(
        "mostly_zeros",
        (
            "edges = torch.randint(0, 8192, (2, 20000), device='cuda')",
            "adj = torch.zeros(8192, 8192, device='cuda')\nadj[edges[0], edges[1]] = 1\ndegree = adj.sum(1)",
        ),
        "torch.sparse_coo_tensor",
    ),
    Case(
        "target_graphs",
        (
            "body = net(1024, 4)\na, b = torch.rand(16384, 1024, device='cuda'), torch.rand(16384, 1024, device='cuda')",
            "q = body(a)\ngoal = 0.9 * body(b)\nloss = nn.functional.mse_loss(q, goal)\nloss.backward()",
        ),
        "learned through `goal`",
    ),
]

# Each has twins in `test_causes_written_out`.
SWISHES = "def swish(x):\n    return x * torch.sigmoid(x)\nlayer = nn.Linear(2048, 2048).cuda()"
SHARED = "import threading\nlocal, meet = threading.local(), threading.Barrier(3)\n"
WORK = "def work():\n    local.model = net(1024)\n    meet.wait()\n    meet.wait()"
LLAMA_TRAINED = (
    "from transformers import LlamaConfig, LlamaForCausalLM\nmodel = LlamaForCausalLM(LlamaConfig(vocab_size=500, "
    "hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4)).cuda()\n"
    "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nids = torch.randint(0, 500, (16, 512), device='cuda')"
)
NORMED = "from torch.nn.utils.parametrizations import weight_norm\nstep = weight_norm(nn.Linear(1024, 1024)).cuda()"
GUILTY += [
    Case(
        "written_out",
        (
            SWISHES,
            "x = torch.randn(4096, 2048, device='cuda')\nfor _ in range(4):\n    x = swish(layer(x))\nx.mean().backward()",
        ),
        "is SiLU written out",
    ),
    Case(
        "models_of_threads",
        (
            SHARED.replace("3", "4") + WORK,
            "threads = [threading.Thread(target=work) for _ in range(3)]\n[one.start() for one in threads]\nmeet.wait()",
        ),
        "Each of 3 threads has a model of its own",
    ),
    Case(
        "stacked_weights",
        (
            "models = [net(1024) for _ in range(4)]",
            "from torch.func import stack_module_state\nstacks, _ = stack_module_state(models)",
        ),
        "copies the weights of 4 models into stacks",
    ),
    Case(
        "room_elsewhere",
        ("", "a = [mib(100) for _ in range(20)]"),
        "cuda:1 is free, 1,024 MiB",
        "2xvirtual:1GiB,torch=2.13",
    ),
    Case(
        "without_checkpointing",
        (LLAMA_TRAINED, "model(input_ids=ids, labels=ids).loss.backward()"),
        "The layers of `model` keep",
        "virtual:1GiB,torch=2.13",
    ),
    Case("widened_weights", ("model = net(1024).half()", "model.float()"), "from float16 to float32"),
    Case(
        "recomputed_weights",
        (
            NORMED,
            "x = torch.randn(8, 1024, device='cuda')\nfor _ in range(8):\n    x = torch.tanh(step(x))\nx.mean().backward()",
        ),
        "computes the weight of `step` from its parametrization anew",
    ),
    Case(
        "second_of_its_size",
        ("data = torch.randn(300000, 1024, device='cuda')", "y = (data * 2).sum()"),
        "a second tensor of 1,172 MiB beside `data`",
        "virtual:2GiB,torch=2.13",
    ),
]

INNOCENT = [
    # each part is another one that lies where one was
    Case(
        "",
        (
            "parts = [mib(40) for _ in range(6)]",
            "for turn in range(2):\n    for i, part in enumerate(parts):\n        parts[i] = part * 2\n        del part",
        ),
    ),
    # parts that have something to keep; batches by their numbers, and rows of which all are read at once
    Case("", (IN_PARTS.format(part="lambda h: nn.functional.gelu(layer(h)) * 2"), "run(x, 1).backward()")),
    Case("", (DATA, "for i in range(0, 4096, 512):\n    train(X[order[i:i + 512]])")),
    Case("", (DATA, "some = X[order[:180000]]\ntotal = some.sum()")),
    # some rows at a time, and no graph
    Case("", (JACOBIAN, f"with torch.no_grad():\n    {ROWS.format(chunks=', chunk_size=64')}")),
    # one weight is nearly all of a model, and no image is flattened for it
    Case("", ("x = torch.randn(8, 4096, device='cuda')", "wide = nn.Linear(4096, 4096).cuda()\nout = wide(x)")),
    # what is read once more
    Case("", ("images = mib(400)", "x = (y := images * 2) / 255\ny.sum()")),
    # its name, and what another object holds
    *(
        Case("", (OWN_METHOD.format(kept=kept), ENCODERS))
        for kept in ("'mean'", "torch.mean", "self.mean(torch.ones(1))")
    ),
    Case("", (SAVED, "model.load_state_dict(torch.load(file, map_location='cpu'))")),
    Case("", (SAVED, IN_FUNCTION.format(where="cpu"))),
    # A copy that was made in an earlier turn and is still at work: it follows the weights, or runs.
    # Which numbers are positive is asked of what is there.
    Case(
        "",
        (
            SECOND,
            "optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4096, 1024, device='cuda')\n"
            "for _ in range(4):\n    out = model(x)\n    out.mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
            "    share = (out > 0).float().mean()",
        ),
    ),
    *(Case("", (SECOND, LATER + work)) for work in ("average(other)", "other(x)")),
    # a fifth of the device is somebody else's, and most of it is free
    Case("", ("x = mib(1)", "y = mib(1)"), device="A100-40GB,idle=8GiB"),
    # each part is read again
    Case("", (CONVOLVED, FILLED.replace("+=", "= out[:, i : i + 8] +"))),
    Case("", (TRAIN, LOOP)),
    Case("", (TRAIN + "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)", LOOP)),
    Case("", (TRAIN, LOOP + NUMBERS.format(taken="item()"))),
    Case("", (TRAIN, NUMBERS.format(taken="detach()"))),
    Case(
        "",
        (
            TRAIN,
            LOOP
            + "\nmodel.eval()\nwith torch.no_grad():\n    for _ in range(4):\n        right = model(x).argmax(1).sum().item()",
        ),
    ),
    # (Nothing is trained: it tries a forward.)
    Case("", (TRAIN, "losses = []\nfor _ in range(4):\n    losses.append(model(x).mean().item())")),
    Case("", (TRAIN, "losses = [model(x).mean() for _ in range(2)]\nsum(losses).backward()\ndel losses")),
    # one graph, of which several numbers are made; a state that is carried on
    Case("", (TRAIN, "y = model(x)\nloss = y.mean() + y.pow(2).mean() + y.abs().mean()\nloss.backward()")),
    Case(
        "",
        (
            TRAIN,
            "h = x\nlosses = []\nfor _ in range(4):\n    h = model(h)\n    losses.append(h.mean())\nsum(losses).backward()",
        ),
    ),
    # the first of two backward passes needs the graph; a frozen teacher; a retry after the block
    Case("", (TRAIN, LOOP.replace("loss.backward()", "loss.backward(retain_graph=True)\n    loss.backward()"))),
    Case(
        "",
        (TRAIN + "teacher = net().requires_grad_(False)", LOOP.replace("model(x)", "(model(x) - teacher(x)).pow(2)")),
    ),
    Case(
        "",
        (
            "def first():\n    h = mib(9000)\n    return mib(9000)",
            "try:\n    y = first()\nexcept torch.OutOfMemoryError:\n    y = None\nif y is None:\n    y = mib(4000)",
        ),
        device="T4",
    ),
    # batch norm is frozen, and the model trained
    Case("", (TRAIN + "model.eval()", "loss = model(x).mean()")),
    Case("", (TRAIN, "buffers = [mib(4) for _ in range(6)]")),
    Case("", (TRAIN, "for _ in range(6):\n    y = mib(4)")),
    Case("", (TRAIN, "model.eval()\nwith torch.no_grad():\n    output = model(x)")),
    Case("", (TRAIN, "output = model(x)")),
    Case("", (TRAIN, "model.eval()\nx.requires_grad_()\nmodel(x).sum().backward()")),
    # gradients are added up over two micro-batches on purpose
    Case(
        "",
        (
            TRAIN,
            ACCUMULATING,
        ),
    ),
    # cleared in a function of an earlier cell, also one that a function calls; and by hand
    Case(
        "",
        (TRAIN + "def clear(o):\n    o.zero_grad(set_to_none=False)\n", FORGOTTEN.replace("#", "clear(optimizer) #")),
    ),
    Case(
        "",
        (
            TRAIN
            + "class Loop:\n    def done(self, o): again(o)\ndef again(o): o.zero_grad(set_to_none=False)\nloop = Loop()",
            FORGOTTEN.replace("#", "loop.done(optimizer) #"),
        ),
    ),
    Case("", (TRAIN, FORGOTTEN.replace("#", "for p in model.parameters(): p.grad.zero_() #"))),
    # one step to a cell; two models with a step each
    Case("", (TRAIN, "model(x).sum().backward()\noptimizer.step()")),
    Case(
        "",
        (
            TRAIN + "other = net()\nsecond = torch.optim.SGD(other.parameters(), lr=0.1)",
            "model(x).sum().backward()\noptimizer.step()\nother(x).sum().backward()\nsecond.step()",
        ),
    ),
    # an error that the program expects
    Case("", ("y = mib(1)", "x = 1\ntry:\n    z = mib(20000)\nexcept torch.OutOfMemoryError:\n    pass"), device="T4"),
    # no cycle; one that a variable holds; one that was collected; one too small for words
    Case("", (NODE.replace("self.me = self", "self.me = None"), NODES.replace("64", "4"))),
    Case("", (NODE, NODES.replace("del node", ""), "y = 1")),
    Case("", (NODE, "node = Node(mib(64))\nother = node")),
    Case("", (NODE, NODES + "\nimport gc\ngc.collect()\ny = mib(1)")),
    Case("", (NODE + "\nbig = mib(200)", "node = Node(mib(2))\ndel node")),
    Case("", (TRAIN, "state = model.state_dict()\nmodel.load_state_dict(state)")),
    Case("", (TRAIN, "average = {name: one.clone() for name, one in model.state_dict().items()}")),
    Case(
        "",
        (
            TRAIN + "import io\nfile = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)",
            "state = torch.load(file, map_location='cpu')\nmodel.load_state_dict(state)",
        ),
    ),
    Case(
        "",
        (
            "x = torch.zeros(4)\nimport io\nfile = io.BytesIO()\ntorch.save(x, file)\nfile.seek(0)",
            "y = torch.load(file)",
        ),
    ),
    Case("", ("%%gpumem -q\nstudent = net(1024)", "teacher = net(1024)")),
    Case("", ("model = net(1024)", "del model\nmodel = net(1024)")),
    Case("", (TRAIN, "x.sum()")),
    Case("", ("def bad():\n    big = [0] * 1000\n    1 / 0", "bad()", "y = mib(1)")),
    Case("", (TRAIN, "del x")),
    Case("", (TRAIN, "del model, optimizer")),
    Case("", ("x = mib(200)", "del x\ntorch.cuda.empty_cache()")),
    Case("", ("x = mib(200)", "del x\ny = mib(200)")),
    Case("", ("x = torch.zeros(1024, 1024, dtype=torch.float64)", "y = x.cuda()")),
    Case("", ("import numpy as np", "x = torch.from_numpy(np.zeros((1024, 1024), dtype='float32')).cuda()")),
    Case("", (TRAIN, "model(x).sum().backward()")),
    Case(
        "",
        (
            "q = nn.Linear(64, 64).cuda()\nx = torch.randn(8, 1, 512, 64, device='cuda')",
            "h = q(x)\nnn.functional.scaled_dot_product_attention(h, h, h).sum().backward()",
        ),
    ),
    Case("", ("x = mib(1)", "y = mib(1)"), device="T4"),
    Case("", ("a = [mib(300) for _ in range(10)]", "big = mib(300)"), device="T4"),
    Case("", ("x = 1", "big = mib(20000)"), device="T4"),
]
INNOCENT += [
    # a softmax over the classes of each pixel; what a loss saves is no layer's; frozen weights are no activations
    Case(
        "",
        (
            "net1 = nn.Conv2d(3, 8, 3, padding=1).cuda()\nx = torch.randn(2, 3, 256, 256, device='cuda')",
            "torch.softmax(net1(x), dim=1).pow(2).mean().backward()",
        ),
    ),
    Case(
        "",
        (
            "body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8192)).cuda()\n"
            "x = torch.randn(2048, 64, device='cuda')\ny = torch.randint(0, 8192, (2048,), device='cuda')",
            "nn.functional.cross_entropy(body(x), y).backward()",
        ),
    ),
]


COLUMN = 'pred = torch.empty(8192, 1, device="cuda", requires_grad=True)\ny = torch.empty(8192, device="cuda")'
POINTS = 'x = torch.empty(2048, 64, device="cuda")\ny = torch.empty(3000, 64, device="cuda")'
HALF = 'head = nn.Linear(256, 32000, bias=False).cuda().half()\nhidden = torch.randn(4, 512, 256, device="cuda").half()'
# Under autocast softmax has its input in float32; what is alive at the peak was never anything else.
# What is saved for it a backward frees: layers one after the other are no iterations whose graphs pile up.
INNOCENT.append(Case("", (TRAIN, f"{ON_CTX.replace('ctx.extra = x.clone()', 'pass')}\n{LAYERS}")))
INNOCENT.append(
    Case(
        "",
        (
            'head = nn.Linear(256, 32000).cuda()\nhidden = torch.randn(2048, 256, device="cuda")',
            "with torch.no_grad():\n    with torch.autocast('cuda', torch.bfloat16):\n        p = head(hidden).softmax(-1)\n"
            "    del p\n    p = head(hidden).softmax(-1)\n    q = head(-hidden).softmax(-1)",
        ),
    )
)
# Weights that the cell steps by hand are no batch.
INNOCENT.append(
    Case(
        "",
        (
            "w = torch.randn(8192, 4096, device='cuda', requires_grad=True)\naverage = torch.zeros_like(w)",
            "for _ in range(3):\n    (torch.randn(64, 8192, device='cuda') @ w).relu().mean().backward()\n"
            "    w.data -= 0.01 * w.grad\n    w.grad = None\n    average = 0.9 * average + 0.1 * w.detach()",
        ),
    )
)
# Under autocast each weight's gradient is cast to float32, too: those are gradients, and no copies.
INNOCENT.append(
    Case(
        "",
        (
            "mixed = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()\n"
            "x = torch.randn(1024, 1024, device='cuda')",
            "with torch.autocast('cuda', torch.float16):\n    loss = mixed(x).float().pow(2).mean()\nloss.backward()\ndel loss\n"
            "filled = torch.zeros(3 << 20, device='cuda')",
        ),
    )
)
TABLE = (
    "table = nn.Embedding(400000, 64).cuda()\noptimizer = torch.optim.SGD(table.parameters(), lr=0.1)\n"
    'rows = torch.randint(0, 400000, (512,), device="cuda")'
)
CHECKPOINTED = """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.gradient_checkpointing = net(layers=8), True
    def forward(self, x):
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x
import torch.utils.checkpoint
deep = Deep().cuda()
optimizer = torch.optim.SGD(deep.parameters(), lr=0.1)
x = torch.randn(8192, 512, device="cuda")
"""
GUILTY += [
    # pytorch/pytorch#16045: a column minus a row
    Case(
        "broadcast",
        (COLUMN, "loss = ((pred - y) ** 2).mean()\nloss.backward()"),
        "(8192, 1) with (8192,) to (8192, 8192)",
    ),
    Case(
        "broadcast",
        (
            f"import warnings\n{COLUMN}",
            "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n"
            "    loss = nn.functional.l1_loss(pred, y)\nloss.backward()",
        ),
        "`pred.squeeze(1)`",
    ),
    Case("all_pairs", (POINTS, "near = (x[:, None] - y[None]).pow(2).sum(-1).argmin(1)"), "`torch.cdist(x, y)`"),
    # (Of the rows that the program takes, in its own norm.)
    Case(
        "all_pairs",
        (POINTS, "near = (x[:1500, None] - y[None]).abs().sum(-1).argmin(1)"),
        "`torch.cdist(x[:1500], y, p=1)`",
    ),
    Case(
        "all_pairs",
        (POINTS, "a = x.sum(1, keepdim=True)\nb = y.sum(1)[None]\nclose = (a - b).abs() < 1"),
        "Work on some of the rows at a time, if every pair is meant; else give both the same shape.",
    ),
    # Who writes the dimension of 1 where the two meet means it.
    Case(
        "all_pairs",
        (POINTS, "close = (x.sum(1).unsqueeze(1) - y.sum(1).unsqueeze(0)).abs() < 1"),
        "MiB. Work on some of the rows at a time.",
    ),
    # However often, with the same few rows.
    Case(
        "all_pairs",
        (POINTS, "for _ in range(5):\n    near = (x[:, None] - y[:300][None]).pow(2).sum(-1).argmin(1)"),
        "`torch.cdist(x, y[:300])`",
    ),
    Case("all_pairs", (POINTS, "best = torch.cdist(x, y).argmin(1)"), "one number for every pair, (2048, 3000)"),
    # each turn of a loop trains on all pairs of a batch with a bank
    Case(
        "all_pairs",
        (
            POINTS
            + "\nw = torch.ones(64, device='cuda', requires_grad=True)\nbank = torch.randn(40000, 64, device='cuda')",
            "for i in range(4):\n    near = torch.cdist(x[i * 512 : i * 512 + 512] * w, bank)\n    near.mean().backward()",
        ),
        "(512, 40000)",
    ),
    # huggingface/diffusers#3094: a pipeline of its own to validate with stays while the next epoch trains
    Case(
        "left_over_copy",
        (
            "model = net(1024)\noptimizer = torch.optim.SGD(model.parameters())\nx = torch.randn(64, 1024, device='cuda')",
            "for epoch in range(2):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()\n"
            "    other = net(1024)\n    with torch.no_grad():\n        y = other(x)",
        ),
        "`del other`",
    ),
    Case(
        "optimizer_history",
        (
            "model = net()\nopt = torch.optim.LBFGS(model.parameters(), history_size=20, tolerance_change=0, tolerance_grad=0)\n"
            "x = torch.randn(8, 512, device='cuda')\n"
            "def closure():\n    opt.zero_grad()\n    loss = model(x).square().mean()\n    loss.backward()\n    return loss",
            "for _ in range(2):\n    opt.step(closure)",
        ),
        "up to `history_size` (20)",
        device="A100-40GB,torch=2.13,values=real",
    ),
    # pytorch/pytorch#154128
    Case(
        "expanded_copy",
        ('a = torch.rand(512, 64, 1, 32, device="cuda")\nb = torch.rand(64, 32, 32, device="cuda")', "c = a.matmul(b)"),
        "expands (1, 64, 32, 32) to (512, 64, 32, 32) and copies it",
    ),
    Case(
        "one_hot",
        ('y = torch.randint(0, 9000, (4096,), device="cuda")', "h = nn.functional.one_hot(y, 9000).float()"),
        "int64",
    ),
    Case("float32_copy", (HALF, "logits = head(hidden).float()\np = logits.softmax(-1)"), "from float16 to float32"),
    Case(
        "float32_copy",
        (
            "x = torch.randn(16, 32, 128, 128, device='cuda')\n"
            "model = nn.Sequential(nn.Conv2d(32, 32, 1), nn.GroupNorm(4, 32), nn.Conv2d(32, 4, 1)).cuda()",
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = model(x)\ny.sum().backward()",
        ),
        "runs `group_norm` in float32, as autocast has it",
        device="A100-40GB,cudnn=none",
    ),
    # Weights of 16 bits, in a block that hasn't ended at the peak.
    Case(
        "float32_copy",
        (
            "model = nn.Linear(2048, 2048).cuda().half()\nx = torch.randn(8192, 2048, device='cuda', dtype=torch.half)",
            "with torch.autocast('cuda'):\n    for _ in range(2):\n        loss = nn.functional.mse_loss(model(x), x)\n"
            "        loss.backward()",
        ),
        "runs `mse_loss` in float32, as autocast has it",
    ),
    # huggingface/transformers#30860
    Case(
        "all_positions",
        (HALF, "with torch.no_grad():\n    token = head(hidden)[:, -1].argmax(-1)"),
        "all 512 positions",
    ),
    Case(
        "joined_in_a_loop",
        (
            TRAIN,
            'bank = torch.empty(0, 512, device="cuda")\nfor _ in range(6):\n    bank = torch.cat([bank, x.repeat(20, 1)])',
        ),
        "the old tensor and the new one at once",
    ),
    Case("idle_checkpointing", (CHECKPOINTED, "deep.eval()\ndeep(x).mean().backward()"), "`deep.train()`"),
    Case("dense_lookup_gradient", (TABLE, "table(rows).sum().backward()\noptimizer.step()"), "all 400,000 rows"),
    # Another model has a parameter of the same name, and the gradient is gone at the end.
    Case(
        "dense_lookup_gradient",
        (
            TABLE + "\nhead = nn.Linear(64, 1).cuda()",
            "head(table(rows)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()",
        ),
        "The gradient of `table.weight` (line 2)",
    ),
    Case(
        "convolution_scratch",
        (
            "torch.backends.cudnn.benchmark = True\nconv = nn.Conv2d(64, 64, 3, padding=1).cuda()\n"
            'x = torch.randn(32, 64, 64, 64, device="cuda")',
            "with torch.no_grad():\n    y = conv(x)\ntorch.backends.cudnn.benchmark = False",
        ),
        "cuDNN works with",
    ),
    Case(
        "wide_inference",
        (
            "with torch.device('cuda'):\n    model = net(8192, 5)",
            'with torch.no_grad():\n    y = model(torch.randn(8, 8192, device="cuda"))',
        ),
        "bfloat16",
        "virtual:2GiB",
    ),
    Case(
        "whole_batch",
        (TRAIN, "x = mib(2).view(-1, 512)\nout = model(x.repeat(4096, 1))"),
        "A smaller batch",
        "virtual:12GiB",
    ),
]
GAN = """
G, D = net(512, 4), nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
opt_d, opt_g = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (D, G))
z, real = torch.randn(2, 1024, 512, device="cuda")
"""
GAN_STEP = """
for _ in range(3):
    opt_d.zero_grad()
    fake = G(z)
    (D(fake{detached}).mean() - D(real).mean()).backward()
    opt_d.step()
    opt_g.zero_grad()
    (-D({again}).mean()).backward()
    opt_g.step()
"""
SCORES = (
    "q = torch.randn(2, 4, 512, 64, device='cuda')\nwith torch.no_grad():\n    p = (q @ q.transpose(2, 3)).softmax(-1)\n"
    "    y = p @ q"
)
GRAPHS = """
graphs, outs = [], []
with torch.no_grad():
    for rows in (4096, 4096, 4096):
        z = torch.randn(rows, 512, device="cuda")
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g{pool}):
            y = model(z)
        graphs.append(g); outs.append(y)
"""
HOOKED = (
    TRAIN + "acts = {{}}\ndef hook(module, given, out): acts[id(module)] = out{host}\n"
    "handle = model[0].register_forward_hook(hook)"
)
RAISING = "def bad():\n    big = mib(30)\n    1 / 0\nerrors = []"
HALVES = "large = net(2048, 4)\nx = torch.randn(8, 2048, device='cuda')"
TRAINER = """
import tempfile
from transformers import Trainer, TrainingArguments
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 8192)
    def forward(self, x, labels=None):
        return {"loss": self.head(x).mean(), "logits": self.head(x)}
data = [{"x": torch.randn(64), "labels": torch.tensor(0)} for _ in range(2048)]
def trainer(**settings):
    given = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_eval_batch_size=256, report_to=[], **settings)
    return Trainer(Head(), given, eval_dataset=data, compute_metrics=lambda all: {})
"""
GUILTY += [
    Case(
        "data_ahead",
        (
            "def ahead(batches):\n    yield from [one.cuda() for one in batches]",
            "for x in ahead([torch.randn(1024, 1024) for _ in range(8)]):\n    y = x.sum()",
        ),
        "batches wait on the device for their turn as `x`",
    ),
    # A function goes over a list of all, which no name leads to.
    Case(
        "data_ahead",
        (
            "layer = nn.Linear(64, 8).cuda()\ndef parts():\n    for _ in range(12):\n"
            "        yield torch.randn(16384, 64, device='cuda')\ndef run():\n    with torch.no_grad():\n"
            "        return [layer(x).sum().item() for x in list(parts())]",
            "sums = run()",
        ),
        "12 batches are on the device before the first of 12 forwards, and until behind the last",
    ),
    Case(
        "trained_beside_adapters",
        (
            "class Adapted(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.base, self.lora_a = nn.Linear(1024, 1024), nn.Linear(1024, 4)\n"
            "        self.lora_b = nn.Linear(4, 1024)\n"
            "    def forward(self, x):\n        return self.base(x) + self.lora_b(self.lora_a(x))\n"
            "model = Adapted().cuda()\nopt = torch.optim.Adam(model.parameters())",
            "for _ in range(3):\n    opt.zero_grad()\n    model(torch.randn(8, 1024, device='cuda')).mean().backward()\n"
            "    opt.step()",
        ),
        "`opt` trains the model's own weights beside the adapters",
    ),
    Case("gathered_predictions", (TRAINER, "trainer().evaluate()"), "`eval_accumulation_steps=`"),
    Case(
        "wasted_gradients", (GAN, GAN_STEP.format(detached="", again="G(z)")), "before `opt_d.step()` goes on into `G`"
    ),
    # The generator's layers have the shapes of the discriminator's.
    Case(
        "wasted_gradients",
        (
            GAN.replace("net(512, 4)", "nn.Linear(512, 512).cuda()").replace("64", "512").replace("512", "2048"),
            GAN_STEP.format(detached="", again="G(z)"),
        ),
        "before `opt_d.step()` goes on into `G`",
    ),
    Case(
        "steady",
        (TRAIN, "for _ in range(4):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()"),
        "Nothing piles up: the last iterations all end with the same",
    ),
    Case("held_over", (TRAIN, "for _ in range(3):\n    with torch.no_grad():\n        y = x.repeat(64, 1)"), "`del y`"),
    Case("pinned_by_view", ("", "big = mib(64)\nrow = big[:1024]\ndel big\ny = row + 1"), "`.clone()`"),
    Case("attention_scores", ("", SCORES), "`(q @ q.transpose(2, 3)).softmax(-1)`, line 4"),
    Case(
        "attention_scores",
        (
            "layer = nn.MultiheadAttention(64, 4, batch_first=True).cuda()\nx = torch.randn(8, 512, 64, device='cuda')",
            "layer(x, x, x)[0].sum().backward()",
        ),
        "(`layer(x, x, x)`, line 2): 32.0 MiB in 1 tensor of 512 x 512 for each head. `need_weights=False` in the call",
    ),
    # In evaluation, without gradients, one operator makes them.
    Case(
        "attention_scores",
        (
            "layer = nn.MultiheadAttention(64, 4, batch_first=True).cuda().eval()\nx = torch.randn(8, 512, 64, device='cuda')",
            "with torch.no_grad():\n    out, scores = layer(x, x, x, average_attn_weights=False)",
        ),
        "`need_weights=False` in the call",
    ),
    # The values need no gradient: no product saves the scores.
    Case(
        "attention_scores",
        (
            "q = torch.randn(2, 4, 512, 64, device='cuda', requires_grad=True)\nv = q.detach().clone()",
            "p = (q @ q.transpose(2, 3)).softmax(-1)\n(p @ v).sum().backward()",
        ),
        "`(q @ q.transpose(2, 3)).softmax(-1)`, line 2",
    ),
    Case("private_pools", (TRAIN, GRAPHS.format(pool="")), "3 CUDA graphs"),
    Case(
        "kept_by_hook",
        (HOOKED.format(host=""), "with torch.no_grad():\n    y = model(x.repeat(16, 1))"),
        "`handle.remove()`",
    ),
    Case(
        "kept_errors",
        (RAISING, "try:\n    bad()\nexcept ZeroDivisionError as error:\n    errors.append(error)"),
        "`errors[0]` (line 5, `errors.append(error)`) is a caught error",
    ),
    Case(
        "autocast_copies",
        (HALVES, "with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n    y = large(x)"),
        "`large.to(torch.float16)`",
    ),
    Case(
        "varying_sizes",
        (
            TRAIN,
            "with torch.no_grad():\n    for n in range(20000, 400000, 20000):\n"
            "        y = model(torch.randn(n, 512, device='cuda'))",
        ),
        "`expandable_segments:True`",
        "virtual:8GiB",
    ),
    Case(
        "gathered",
        (
            "model = nn.DataParallel(nn.Linear(64, 8192).cuda())\nx = torch.randn(4096, 64, device='cuda')",
            "y = model(x)\nnn.functional.cross_entropy(y, torch.zeros(4096, dtype=torch.long, device='cuda')).backward()",
        ),
        "on cuda:0 (line 2, `y = model(x)`)",
        "2xT4",
    ),
]
INNOCENT += [
    # one forward, whose loss a next cell's backward uses
    Case("", (TRAIN + "model.eval()", "loss = nn.functional.cross_entropy(model(x), x[:, 0].long())")),
    Case("", (GAN, GAN_STEP.format(detached=".detach()", again="fake"))),
    Case("", (TRAINER, "trainer(eval_accumulation_steps=1).evaluate()")),
    Case("", ("", "row = mib(32)[:1024].clone()\ny = row + 1")),
    Case("", ("", "parts = mib(64).chunk(8)\ny = parts[0] + 1")),
    Case("", (TRAIN, GRAPHS.format(pool=", pool=graphs[0].pool() if graphs else None"))),
    Case("", (HOOKED.format(host=".cpu()"), "with torch.no_grad():\n    y = model(x)")),
    Case("", (RAISING, "try:\n    bad()\nexcept ZeroDivisionError as error:\n    errors.append(str(error))")),
]
INNOCENT += [
    Case("", (COLUMN, "loss = ((pred.squeeze(1) - y) ** 2).mean()\nloss.backward()")),
    Case("", (POINTS, "c = x + y[:1]\nd = x @ x.new_ones(64, 64)")),
    Case("", ('a = torch.rand(64, 32, 64, device="cuda")\nb = torch.rand(64, 64, 32, device="cuda")', "c = a.bmm(b)")),
    Case("", (HALF, "with torch.no_grad():\n    token = head(hidden[:, -1:]).float().argmax(-1)")),
    Case("", (CHECKPOINTED, "deep.train()\ndeep(x).mean().backward()")),
    Case(
        "",
        (
            "table = nn.Embedding(2000, 512).cuda()",
            'table(torch.randint(0, 2000, (64, 512), device="cuda")).sum().backward()',
        ),
    ),
]

SAMPLED = """
head = nn.Linear(64, 4096).cuda()
def sample(steps):
    scores = []
    with torch.no_grad():
        for _ in range(steps):
            scores.append({kept})
    return torch.stack(scores, 1).mean()
tokens = torch.randn(8, 128, 64, device="cuda")
"""
# A checkpoint every other step; a number that is only shown; parts of one batch; a trainer that resumed.
SAVING = (
    "saved = []\nfor step in range(8):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()\n"
    "    if step % 2:\n        saved.append({{k: v.{kept} for k, v in model.state_dict().items()}})"
)
SHOWN = (
    "for _ in range(3):\n    optimizer.zero_grad()\n    out = model(x)\n    loss = out.mean()\n    {before}\n"
    "    loss.backward()\n    optimizer.step()\n    print(float(spread))"
)
SPREAD = "spread = -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()"
WIDE_X = TRAIN + "x = torch.randn(8192, 512, device='cuda')"
ONE_BY_ONE = """
losses = [model(x).square().mean() for _ in range({parts})]
while losses:
    losses.pop(0).backward()
"""
IN_TURNS = """
losses = []
for _ in range({parts}):
    losses.append(model(x).square().mean())
    if len(losses) == 3:
        losses.pop(0).backward()
while losses:
    losses.pop(0).backward()
"""
MICRO = (
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(3):\n"
    "    outs = [model(part) for part in x.repeat(32, 1).chunk({parts})]\n"
    "    torch.cat(outs).pow(2).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()"
)
RESUMED = """
import io
file = io.BytesIO()
torch.save(net().state_dict(), file)
class Trainer:
    def __init__(self):
        file.seek(0)
        self.model = net()
        {keep} = torch.load(file, map_location="cuda")
        self.model.load_state_dict({keep})
"""
GUILTY += [
    Case("growth", (SAMPLED.format(kept="head(tokens)[:, -1]"), "out = sample(12)"), "`.clone()` it"),
    Case("growth", (TRAIN, SAVING.format(kept="clone()")), "Every 2 iterations"),
    Case("unused_graphs", (TRAIN, SHOWN.format(before=SPREAD)), "no backward goes through"),
    # the critic's own batch of fakes, which it takes detached
    Case("unused_graphs", (GAN, GAN_STEP.format(detached=".detach()", again="G(z)")), "torch.no_grad()"),
    Case("waiting_graphs", (TRAIN, MICRO.format(parts=8)), "8 forwards of `model`"),
    Case("forwards_ahead", (WIDE_X, ONE_BY_ONE.format(parts=4)), "4 forwards wait at once, each for its own backward"),
    Case("held_checkpoint", (RESUMED.format(keep="self.state"), "trainer = Trainer()"), "`trainer.state = None`"),
    Case(
        "loaded_beside",
        (RESUMED.format(keep="state"), "trainer = Trainer()"),
        '`torch.load(file, map_location="cuda")`',
    ),
]
INNOCENT += [
    Case("", (SAMPLED.format(kept="head(tokens[:, -1])"), "out = sample(12)")),
    Case("", (TRAIN, SAVING.format(kept="cpu()"))),
    Case("", (TRAIN, SHOWN.format(before=f"with torch.no_grad():\n        {SPREAD}"))),
    Case("", (RESUMED.format(keep="state").replace('"cuda"', '"cpu"'), "trainer = Trainer()")),
]


# Where a function adds losses up, nothing but its result has their graphs.
ADDING = """
def evaluate(parts):
    total = {{}}
    for part in parts:
        total["loss"] = total.get("loss", 0.0) + model(part).mean(){taken}
    return total["loss"]
"""
VALIDATING = """
class Trainer:
    def __init__(self):
        self.seen = []
    def fit(self):
        for _ in range(2):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(4):
                self.seen.append({{"out": model(torch.randn(4096, 512, device="cuda")){taken}}})
trainer = Trainer()
"""
TRAINED = """
body, head = net(1024), nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
x = torch.randn(64, 1024, device="cuda")
def steps():
    for _ in range(2):
        head(body(x)).mean().backward()
        optimizer.step()
        {clearing}
steps()
"""
FREEZING = "for p in body.parameters():\n    p.requires_grad = {value}\nsteps()"
ONLY_MATH = """
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.randn(1, 16, 8192, 64, device="cuda", dtype=torch.half)
"""
CACHES = """
class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(64, 1 << 14))
    def forward(self, x):
        self.k[:, :16] = x
        return x + self.k[:, :16]
caches = nn.ModuleList(Caching() for _ in range(8)).cuda()
x = torch.randn(64, 16, device="cuda")
"""
WORDS = """
from torch.utils.checkpoint import checkpoint
body, head = net(256), nn.Linear(256, 50000).cuda()
ids = torch.randint(0, 50000, (2048,), device="cuda")
x = torch.randn(2048, 256, device="cuda")
def loss_of(hidden, ids):
    return nn.functional.cross_entropy(head(hidden), ids, reduction="sum")
def step(parts):
    pairs = list(zip(body(x).chunk(parts), ids.chunk(parts)))
    if parts == 1:
        loss = loss_of(*pairs[0])
    else:
        loss = sum(checkpoint(loss_of, *pair, use_reentrant=False) for pair in pairs)
    loss.backward()
    body.zero_grad(), head.zero_grad()
"""
PICTURES = """
net2d = nn.Sequential(*[nn.Conv2d(3 if n == 0 else 32, 32, 3, padding=1) for n in range(4)]).cuda()
"""
GUILTY += [
    Case("growth", (TRAIN, ADDING.format(taken=""), "mean = evaluate(x.split(64))"), "in the graph of `mean`"),
    Case("growth", (TRAIN, VALIDATING.format(taken=""), "trainer.fit()"), "`trainer.seen[0…3]['out']`"),
    # The first ones of a sequence that grows are no small part of it.
    Case(
        "growth",
        ("kept = ()", "for n in range(1, 16):\n    kept += (mib(n).view(n, -1)[-1],)"),
        "held by `kept`, put there at line 3 (`kept += (mib(n).view(n, -1)[-1],)`). Each is a view",
        "A100-40GB,torch=2.13",
    ),
    Case(
        "frozen_too_late",
        (TRAINED.format(clearing="pass"), FREEZING.format(value=False)),
        "`body` has parameters that require no gradient any more",
    ),
    Case(
        "attention_scores",
        (
            ONLY_MATH,
            "with sdpa_kernel(SDPBackend.MATH):\n    out = nn.functional.scaled_dot_product_attention(q, q, q)",
        ),
        "`sdpa_kernel(SDPBackend.MATH)` asks for PyTorch's plain kernel",
        "virtual:3GiB",
    ),
    # As with dropout, of which the mean is wanted; the list has no name yet.
    Case(
        "missing_no_grad",
        (
            "net = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(64, 1, 1)).cuda()\n"
            "x = torch.randn(16, 1, 256, 256, device='cuda')",
            "samples = torch.stack([net(x) for _ in range(40)])",
        ),
        "`net(x)` (line 2) saves",
        "virtual:8GiB",
    ),
    # The last backward was of a smaller batch.
    Case(
        "attention_scores",
        (
            "w = torch.randn(64, 64, device='cuda', requires_grad=True)",
            "for size in (1, 64):\n    q = torch.randn(size, 4, 1024, 64, device='cuda') @ w\n"
            "    loss = ((q @ q.transpose(2, 3)).softmax(-1) @ q).sum()\n    loss.backward()",
        ),
        "(`(q @ q.transpose(2, 3)).softmax(-1)`, line 4): 1,024 MiB in 1 tensor of 1024 x 1024 for each head.",
        "virtual:3GiB",
    ),
    Case(
        "attention_scores",
        (
            ONLY_MATH + "k = q[:, :4]",
            "out = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)",
        ),
        "PyTorch took its plain kernel here, and the fused ones store none: flash attention wants a card of Ampere's generation "
        "or a newer one, the memory-efficient kernel as many heads of keys and values as of queries, without `enable_gqa`.",
        "T4",
    ),
    Case(
        "attention_scores",
        ("q = torch.randn(16, 8192, 64, device='cuda')", "out = nn.functional.scaled_dot_product_attention(q, q, q)"),
        "the fused ones store none: they want four dimensions (batch, heads, length, features) and one type.",
    ),
    Case(
        "one_hot",
        (
            'table = nn.Linear(9000, 64).cuda()\ny = torch.randint(0, 9000, (4096,), device="cuda")',
            "h = table(nn.functional.one_hot(y, 9000).float())",
        ),
        "`F.embedding(numbers, weight.t())`",
    ),
    # Its memory is that of its input's size: virtual/operators/losses.py.
    Case(
        "pinned_by_view",
        ('big = torch.randn(16 << 20, device="cuda")', "loss = nn.functional.mse_loss(big, big)\ny = loss + 1"),
        "`loss` (line 2, `loss = nn.functional.mse_loss(big, big)`) is one number, and keeps 64.0 MiB",
    ),
    Case(
        "pinned_by_view",
        (
            'big = torch.rand(8 << 20, device="cuda")',
            "losses = []\nfor n in range(3):\n    losses.append(nn.functional.binary_cross_entropy(big, big))\ny = losses[0] + 1",
        ),
        "The 3 tensors in `losses` (line 4, `losses.append(nn.functional.binary_cross_entropy(big, big))`) are one number each",
    ),
    Case(
        "pinned_by_view",
        ("rows = [mib(32)[:8] for _ in range(3)]", "y = rows[0] + 1"),
        "The 3 tensors in `rows` are views of 96 B and keep all of the tensors that they were taken from: 96.0 MiB",
    ),
    # Of an earlier cell, which nobody saw make it: not a view.
    Case(
        "pinned_by_view",
        (
            'big = torch.rand(16 << 20, device="cuda")\nloss = nn.functional.binary_cross_entropy(big, big)\ndel big',
            "y = loss + 1",
        ),
        "is 4 B of the 64.0 MiB that it keeps: it was cut out of a larger tensor, or an operator made it in the size of its",
    ),
    Case(
        "pinned_by_view",
        ('big = torch.rand(16 << 20, device="cuda")\nfirst = [big[0].detach()]\ndel big', "y = first[0] + 1"),
        "it was cut out of a larger tensor, or",
    ),
]
# Low ranks whose products are made in full.
ADAPTERS = """
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(1024, 8, device="cuda"))
        self.b = nn.Parameter(torch.randn(8, 1024, device="cuda"))
    def forward(self, x):
        return nn.functional.linear(x, self.a @ self.b)
adapted = nn.Sequential(*[Adapter() for _ in range(8)])
x = torch.randn(64, 1024, device="cuda")
"""
GUILTY += [
    Case(
        "wide_loss",
        (WORDS, "step(1)"),
        "is a loss over 50,000 classes at 2,048 positions: 391 MiB in float32, and 3 of that shape",
    ),
    Case(
        "large_images",
        (PICTURES, "out = net2d(torch.rand(2, 3, 2048, 2048, device='cuda'))"),
        "2,048 x 2,048 pixels",
        "virtual:3GiB",
    ),
]
GUILTY += [
    Case(
        "large_images",
        (PICTURES.replace("2d", "3d"), "out = net3d(torch.rand(1, 3, 160, 160, 160, device='cuda'))"),
        "160 x 160 x 160 voxels",
        "virtual:2GiB",
    ),
    # The request that failed is the whole's.
    Case("joined", ("parts = [mib(100) for _ in range(16)]\nwhole = torch.cat(parts)",), "", "virtual:3GiB"),
    Case(
        "data_on_device",
        (
            "data = torch.empty(400, 1 << 20)",
            "data = data.cuda()\nfor i in range(0, 400, 100):\n    y = data[i : i + 100] * 2 + data[i : i + 100]",
        ),
        "`data`",
        "virtual:2500MiB",
    ),
    Case(
        "grown_result",
        ("tall = torch.randn(16, 1024, 64, device='cuda')", "u, s, v = torch.linalg.svd(tall)"),
        "`full_matrices=False` makes (16, 1024, 64) of it",
    ),
    Case("alike_buffers", (CACHES, "for layer in caches:\n    layer(x)"), "each layer needs its own"),
]
GUILTY += [
    Case("weights_multiplied", (ADAPTERS, "adapted(x).pow(2).mean().backward()"), "`x @ self.b.T @ self.a.T`"),
    Case(
        "cache_in_training",
        (
            CACHE + "\nllm = llm.float().train()\noptimizer = torch.optim.SGD(llm.parameters(), lr=0.1)",
            "for _ in range(2):\n    out = llm(ids, labels=ids)\n    out.loss.backward()\n    optimizer.step()\n"
            "    optimizer.zero_grad()",
        ),
        "`use_cache=False`",
    ),
    Case(
        "second_copy",
        (
            "import copy\nmodel = net(1024, 6)\noptimizer = torch.optim.Adam(model.parameters())\n"
            "model(torch.randn(8, 1024, device='cuda')).sum().backward()\noptimizer.step()",
            "best = copy.deepcopy(optimizer.state_dict())",
        ),
        "`best` keeps a second copy of the optimizer's states on the device (line 2, ",
    ),
    Case(
        "second_copy",
        (
            "import copy\nmodel = net(1024, 6)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "half = copy.deepcopy(model).half()\nx = mib(16)",
        ),
        "`half` keeps a second copy of the weights",
    ),
    # Averages of the weights, which each iteration follows: the host is no place for them.
    Case(
        "second_copy",
        (
            SECOND,
            "shadow = {name: p.detach().clone() for name, p in model.named_parameters()}\n"
            "for _ in range(4):\n    step(model)\n    for name, p in model.named_parameters():\n"
            "        shadow[name].mul_(0.9).add_(p.data, alpha=0.1)",
        ),
        "It follows the weights. On the host (`.cpu()`) it would take nothing here",
    ),
    Case(
        "second_copy",
        (
            SECOND,
            "averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))\n"
            "for _ in range(4):\n    step(model)\n    averaged.update_parameters(model)",
        ),
        'With `AveragedModel(model, device="cpu")` it takes nothing here',
    ),
    Case(
        "second_copy",
        (
            SECOND,
            "reference = copy.deepcopy(model)\n"
            "for _ in range(4):\n    step(model)\n    with torch.no_grad():\n        reference(x)",
        ),
        "It runs, too. In bfloat16 (`reference.bfloat16()`, and what it is given) it would take half of that",
    ),
    # The best of several epochs.
    Case(
        "built_beside",
        (
            SECOND,
            "for _ in range(3):\n    step(model)\n    best = copy.deepcopy(model.state_dict())\n"
            "    states = copy.deepcopy(optimizer.state_dict())",
        ),
        "Copy them to the host (`.cpu()`): the peak would be 136 MiB",
    ),
    # Nothing was loaded from a file.
    Case(
        "left_over_copy",
        (
            SECOND,
            "for epoch in range(4):\n    step(model)\n    if epoch % 3 == 0:\n        best = copy.deepcopy(model.state_dict())\n"
            "model.load_state_dict(best)",
        ),
        "or keep it on the host (`.cpu()`)",
    ),
    # What a lambda does where it is called.
    Case(
        "kept_by_hook",
        (
            TRAIN + "acts = {}\nfor name, one in model.named_modules():\n"
            "    one.register_forward_hook(lambda m, i, o, name=name: acts.__setitem__(name, o))",
            "for _ in range(3):\n    optimizer.zero_grad()\n    model(x.repeat(16, 1)).mean().backward()\n    optimizer.step()",
        ),
        "keeps what modules put out in `acts`",
    ),
    # A mask's copy is not the scores that it is added to.
    Case(
        "attention_scores",
        (
            "attention = nn.MultiheadAttention(128, 8, batch_first=True).cuda()\nx = torch.randn(2, 2048, 128, device='cuda')",
            "mask = torch.ones(2048, 2048, dtype=torch.bool, device='cuda').expand(16, -1, -1).contiguous()\n"
            "out, _ = attention(x, x, x, attn_mask=mask)\nout.sum().backward()",
        ),
        "`need_weights=False`",
    ),
]
INNOCENT += [
    # What steps copies of a model's parameters takes its gradients for them.
    Case(
        "",
        (
            "model = net(1024)\ncopies = [p.detach().clone().requires_grad_() for p in model.parameters()]\nmodel.half()\n"
            "optimizer = torch.optim.SGD(copies, lr=0.1)\nx = torch.randn(64, 1024, dtype=torch.half, device='cuda')",
            "for _ in range(3):\n    model(x).float().mean().backward()\n"
            "    for one, p in zip(copies, model.parameters()):\n        one.grad = p.grad.float()\n    optimizer.step()\n"
            "    for one, p in zip(copies, model.parameters()):\n        p.data.copy_(one)\n        p.grad = None",
        ),
    ),
    # A loop that gives each parameter its gradient makes each once.
    Case(
        "",
        (
            "model = net(1024, 6)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "x = torch.randn(64, 1024, device='cuda')",
            "sums = {}\nfor task in range(2):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n"
            "    sums[task] = {name: p.grad.clone() for name, p in model.named_parameters()}\noptimizer.zero_grad()\n"
            "for name, p in model.named_parameters():\n    p.grad = sums[0][name] + sums[1][name]\noptimizer.step()",
        ),
    ),
    Case("", (TRAIN, ADDING.format(taken=".item()"), "mean = evaluate(x.split(64))")),
    Case("", (TRAIN, VALIDATING.format(taken=".cpu()"), "trainer.fit()")),
    Case("", (TRAINED.format(clearing="optimizer.zero_grad()"), FREEZING.format(value=False))),
]


def test_what_is_frozen_too_late_is_not_stepped_without_its_gradients() -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(TRAINED.format(clearing="pass"))
        report = book.measured(FREEZING.format(value=False))
        (cause,) = [one for one in report.causes if one.name == "frozen_too_late"]
        before = book.allocated()
        book.cell("body.zero_grad()\noptimizer = torch.optim.Adam(head.parameters())\nsteps()")
        assert before - book.allocated() == cause.bytes
        assert "frozen_too_late" not in names(book.measured("steps()"))


def test_what_is_frozen_in_turn_is_not_frozen_too_late() -> None:
    """The next iteration trains it again."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(TRAINED.format(clearing="pass"))
        assert "frozen_too_late" not in names(book.measured(f"on = False\n{FREEZING.format(value='on')}"))
    with notebook("A100-40GB,torch=2.13") as book:
        # By a library's own code, of which nothing is read: a backward adds to what is there.
        book.cell(TRAINED.format(clearing="pass"))
        turned = "for way in (True, False):\n    methodcaller('requires_grad_', way)(body)\n    way and steps()"
        report = book.measured(f"from operator import methodcaller\n{turned}\noptimizer.step()")
        assert report.error is None
        assert "frozen_too_late" not in names(report)


def test_a_wide_loss_in_parts_and_pictures_of_half_the_size_need_less() -> None:
    with notebook("virtual:3GiB,torch=2.13") as book:
        book.cell(WORDS)
        whole, parts = (book.measured(f"step({number})").peak.allocated for number in (1, 8))
        # log_softmax's backward has three of (2048, 50000) float32 at once, and then of an eighth of it.
        assert whole - parts >= 0.8 * 3 * 2048 * 50000 * 4
    with notebook("virtual:3GiB,torch=2.13") as book:
        book.cell(PICTURES)
        fits, failed = (
            book.measured(f"out = net2d(torch.rand(2, 3, {side}, {side}, device='cuda'))") for side in (1024, 2048)
        )
        assert failed.error is not None
        assert fits.error is None


def test_weights_are_those_of_a_list_of_models_though_copies_of_their_dictionaries_share_them() -> None:
    """Nothing of the models runs, and `state_dict()` has detached tensors on the same memory."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell("nets = [nn.Linear(1024, 1024).cuda() for _ in range(4)]")
        report = book.measured(
            "dicts = [one.state_dict() for one in nets]\ntotal = sum(one['weight'] for one in dicts)"
        )
        assert report.peak.categories["parameters"] == 4 * (1024 * 1024 + 1024) * 4
        assert "16.0 MiB are parameters of `nets`" in report.answer


def test_the_copies_that_autocast_keeps_are_no_iteration_of_their_own() -> None:
    """All graphs save the ones that the first forward made: a result of the last has one graph."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(TRAIN)
        report = book.measured("with torch.autocast('cuda'):\n    for _ in range(3):\n        out = model(x)")
        assert "kept_graphs" not in names(report)
        report = book.measured(
            "outs = []\nwith torch.autocast('cuda'):\n    for _ in range(3):\n        outs.append(model(x))"
        )
        assert "the graphs of 3 iterations" in " ".join(report.notes)


def test_a_batch_and_its_losses_are_one_forwards() -> None:
    """The batch is there before its forward begins, the losses after it has ended: a list of them keeps one graph."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(TRAIN + "y = torch.randn(2048, 512)")
        report = book.measured(
            "for _ in range(3):\n    out = model(y.cuda())\n    losses = [(out - i).pow(2).mean() for i in range(3)]\n"
            "    optimizer.zero_grad()\n    sum(losses).backward(retain_graph=True)\n    optimizer.step()"
        )
        assert "kept_graphs" not in names(report), report.causes
        assert "retained_graph" in names(report), report.causes


@pytest.mark.parametrize(("cell", "remedy"), [(ONE_BY_ONE, "1F1B"), (IN_TURNS, "Half the items in each")])
def test_forwards_that_wait_for_backwards_of_their_own_are_counted(cell: str, remedy: str) -> None:
    """As a pipeline's micro-batches do: all of them first, or some ahead of the backwards."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(WIDE_X)
        whole = book.measured(cell.format(parts=8))
        cause = next(one for one in whole.causes if one.name == "forwards_ahead")
        assert remedy in cause.remedy
        if cell == IN_TURNS:
            assert cause.text.startswith("3 forwards wait at once")
            book.cell("x = x[:4096].clone()\nmodel.zero_grad()")
            half = book.measured(cell.format(parts=16))
            (saved,) = [one for one in half.causes if one.name == "forwards_ahead"]
            assert saved.bytes == pytest.approx(cause.bytes / 2, rel=0.03)
            assert half.peak.allocated < whole.peak.allocated
        assert "forwards_ahead" not in names(
            book.measured("for _ in range(8):\n    model(x).square().mean().backward()")
        )
        # Two are a real and a generated batch.
        assert "forwards_ahead" not in names(book.measured(ONE_BY_ONE.format(parts=2)))


def test_what_is_trained_on_is_no_unused_graph() -> None:
    """What a number that is shown was made of, where the loss has it, too."""
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(TRAIN)
        report = book.measured(SHOWN.format(before=f"{SPREAD}\n    loss = loss - spread"))
        assert "unused_graphs" not in names(report)
        assert "waiting_graphs" not in names(book.measured(MICRO.format(parts=2)))
        # A sum's backward makes nothing anew: it is used all the same.
        report = book.measured(
            "for _ in range(3):\n    out = model(x) + x\n    out.mean().backward()\n    optimizer.step()"
        )
        assert "unused_graphs" not in names(report)


def test_a_cycle_is_told_once_by_what_was_deleted_or_as_a_cycle(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(gc.enable)
    gc.disable()
    module = (
        "class Encoder(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body = torch.nn.Linear(2048, 8192)\n        self.pool = self.mean\n"
        "    def mean(self, x):\n        return x.mean(0)"
    )
    with notebook("A100-40GB") as book:
        book.cell(module)
        made = book.measured("for _ in range(3):\n    encoder = Encoder().cuda()\n    del encoder")
        assert names(made) == ["reference_cycle"]
        book.cell("pair = [Encoder().cuda(), Encoder().cuda()]")
        gone = book.measured("del pair\ny = mib(1)")
        (cause,) = gone.causes
        assert cause.name == "del_freed_nothing"
        way = "Encoder.pool -> method.__self__ -> Encoder"
        assert cause.text == f"`del pair` freed nothing: a reference cycle ({way}) still holds 128 MiB of it."


# One sequence that is longer than the others; batches that lie ready.
LENGTHS = "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nlengths = {lengths}"
OF_LENGTHS = (
    "for n in lengths:\n    x = torch.zeros(n, 512).cuda()\n    model(x).mean().backward()\n    optimizer.step()\n"
    "    optimizer.zero_grad()"
)
READY = "parts = [torch.zeros(4096, 512, device='cuda') for _ in range(80)]\nfor part in {parts}:\n    y = model(part).mean()"
GUILTY += [
    Case(
        "largest_batch", (LENGTHS.format(lengths=[64, 80, 99, 65536, 90, 64]), OF_LENGTHS), "Iteration 4 takes far more"
    ),
    Case(
        "largest_batch",
        (LENGTHS.format(lengths=[64, 80, 99, 1 << 22, 90]), OF_LENGTHS),
        "asks for far more",
        "T4,torch=2.13",
    ),
    Case(
        "data_ready", ("model = nn.Linear(512, 4).cuda().requires_grad_(False)", READY.format(parts="parts")), "`parts`"
    ),
]
INNOCENT += [
    Case("", (LENGTHS.format(lengths=[65000, 65200, 65536, 65100, 65050]), OF_LENGTHS)),
    Case(
        "",
        (
            "model = nn.Linear(512, 4).cuda().requires_grad_(False)",
            READY.format(parts="parts").replace(", device='cuda')", ")").replace("model(part)", "model(part.cuda())"),
        ),
    ),
]


# Weights that one layer has of another, and something that gives each its own.
TIED = """
class Words(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.emb, self.head = nn.Embedding(20000, 256), nn.Linear(256, 20000, bias=False)
        {ties}
    def forward(self, x): return self.head(self.emb(x))
ids = torch.zeros(4, dtype=torch.long, device="cuda")
"""
WEIGHT = "self.head.weight = self.emb.weight"
DATA = "self.head.weight.data = self.emb.weight.data"
ON_META = (
    "with torch.device('meta'):\n    model = Words(True)\nmodel.to_empty(device='cuda')\n"
    "optimizer = torch.optim.Adam(model.parameters())\nmodel(ids).sum().backward()\noptimizer.step()"
)
NEW_HEAD = "self.head.weight = nn.Parameter(torch.zeros(20000, 256))"
TARGET = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.now, self.target = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
        self.target.weight.data = self.now.weight.data
"""
HELD_DATA = (
    "model = nn.Linear(512, 4).cuda()\nfrom torch.utils.data import DataLoader, Subset, TensorDataset\n"
    "loader = DataLoader({data}, batch_size=4096)"
)
ALL_DATA = "TensorDataset(torch.zeros(1 << 18, 512, device='cuda'))"
OF_DATA = "for (part,) in loader:\n    y = model(part).mean()\n    break"
PADDED = """
def rows(lengths, longest, at_end=True):
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in zip(ids, lengths):
        row[:length] = torch.arange(1, length + 1)
    return ids if at_end else ids.flip(1)
emb = nn.Embedding(2000, 512{index}).cuda()
layers = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)]).cuda()
"""
SHORT = [40, 60, 44, 52, 90, 41, 43, 47] * 8
MASKED = "ids = rows({}, {}).to('cuda')\nmask = rows({}, {}).ne(0).to('cuda', {})\nlayers(emb(ids)).mean().backward()"
BY_INDEX = "ids = rows({}, {}, {}).cuda()\nlayers(emb(ids)).mean().backward()"
FEW_WORDS = BY_INDEX.format(SHORT, 512, True)
GUILTY += [
    Case("broken_tie", (TIED.format(ties=WEIGHT), ON_META), "MiB with its gradient and states"),
    Case("broken_tie", (TIED.format(ties=DATA), "model = Words(True).cuda()\ny = model(ids)"), "20.0 MiB more."),
    Case(
        "broken_tie",
        (TIED.format(ties="pass"), f"model = Words(True)\n{DATA.replace('self', 'model')}\nmodel.cuda()"),
        "`model.head.weight = model.emb.weight` makes them one again",
    ),
    # what was on the device before the cell, and only a loader leads to
    Case("data_ready", (HELD_DATA.format(data=ALL_DATA), OF_DATA), "`loader.dataset.tensors[0]` takes 512 MiB"),
    # (beside a long table of no tensors)
    Case(
        "data_ready",
        (
            HELD_DATA.format(data=f"Subset({ALL_DATA}, [one % 4096 for one in range(1 << 17)])"),
            OF_DATA,
        ),
        "`loader.dataset.dataset",
    ),
    Case("data_ready", (HELD_DATA.format(data=f"Subset({ALL_DATA}, range(4096))"), OF_DATA), "`loader.dataset.dataset"),
    Case(
        "padding",
        (PADDED.format(index=""), MASKED.format(SHORT, 512, [*SHORT[:-1], 512], 512, "torch.bool")),
        "padded to 512",
    ),
    Case(
        "padding",
        (PADDED.format(index=""), MASKED.format(SHORT, 512, SHORT, 512, "torch.long")),
        "or `[:, :90]`), the batch",
    ),
    Case("padding", (PADDED.format(index=", padding_idx=0"), BY_INDEX.format(SHORT, 512, False)), "or `[:, -90:]`)"),
    Case(
        "left_from_before",
        ("first = net(5120, 4)", "second = net(4096, 4)\nx = mib(1500)\ny = mib(700)"),
        "`first` is there from earlier cells, and this one does not use it",
        device="virtual:3GiB",
    ),
    Case(
        "stale_states",
        (STALE_STATES, "for _ in range(6):\n    fit()\n    split()"),
        '(`opt.param_groups[0]["params"] = [grown]`, In [3], line 10)',
    ),
    Case(
        "kept_by_threads",
        (
            WAITING_THREADS,
            "for _ in workers:\n    inbox.put(torch.ones(1 << 21))\nsums = [outbox.get() for _ in workers]",
        ),
        "in serve() still hold",
    ),
]
INNOCENT += [
    Case("", (TIED.format(ties=WEIGHT), "model = Words(True).cuda()\ny = model(ids)")),
    # tied where it is asked for, which it was not; and never
    Case("", (TIED.format(ties=f"if tied:\n            {WEIGHT}"), "model = Words(False).cuda()\ny = model(ids)")),
    Case("", (TIED.format(ties="pass"), "model = Words(True).cuda()\ny = model(ids)")),
    # made two on purpose, in the cell, in another class and in this one; and written again without
    Case(
        "",
        (TIED.format(ties=WEIGHT), "model = Words(True)\nmodel.head = nn.Linear(256, 20000, bias=False)\nmodel.cuda()"),
    ),
    Case(
        "",
        (
            TIED.format(ties=WEIGHT),
            f"class Own(Words):\n    def __init__(self):\n        super().__init__(True)\n        {NEW_HEAD}"
            "\nmodel = Own().cuda()",
        ),
    ),
    Case("", (TIED.format(ties=f"{WEIGHT}\n        {NEW_HEAD}"), "model = Words(True).cuda()\ny = model(ids)")),
    Case("", (TIED.format(ties=DATA), TIED.format(ties="pass"), "model = Words(True).cuda()\ny = model(ids)")),
    # where a target begins
    Case("", (TARGET, "model = Both().cuda()")),
]


@pytest.mark.parametrize("case", GUILTY, ids=[f"{number}-{case.tells}" for number, case in enumerate(GUILTY)])
def test_a_cause_is_found(case: Case, request: pytest.FixtureRequest) -> None:
    if case.tells in ("reference_cycle", "pinned_by_earlier_error"):
        # Python's collector comes when it likes, and would take some of them.
        request.addfinalizer(gc.enable)
        gc.disable()
    with notebook(case.device) as book:
        for code in case.cells[:-1]:
            book.cell(code)
        report = book.measured(case.cells[-1])
        assert case.tells in names(report), (report.error, report.notes)
        (cause,) = [one for one in report.causes if one.name == case.tells]
        assert case.says in f"{cause.text} {cause.remedy}"
        assert f"{cause.text} {cause.remedy}".strip() in report.notes
        for one in report.causes:
            marked = re.findall(r"`([^`]+)`", one.remedy)
            assert not [words for words in marked if "..." in words or " -> " in words], one.remedy
        # What is said to free so much does.
        freeing = re.search(r"`([^`]+)` frees (?:it|([\d,.]+ (?:KiB|MiB|GiB)))", cause.remedy)
        if freeing is not None and freeing[2]:
            before = book.allocated()
            book.cell(freeing[1])
            gone = before - book.allocated()
            assert human(gone) == freeing[2], (cause.remedy, human(gone))


@pytest.mark.parametrize(
    ("not_told", "cells"),
    [
        ("jacobian", (JACOBIAN, "J = torch.func.vmap(jacrev(deep))(x)")),
        ("in_place", ("images = torch.zeros(400, 512, 512, dtype=torch.uint8)", "x = images.cuda().float().div_(255)")),
    ],
)
def test_what_follows_the_advice_does_not_hear_it_again(not_told: str, cells: tuple[str, ...]) -> None:
    with notebook() as book:
        book.cell(cells[0])
        assert not any(name.startswith(not_told) for name in names(book.measured(cells[1])))


def test_matrices_in_a_dictionary_are_not_mostly_zeros() -> None:
    with notebook("A100-40GB") as book:
        report = book.measured(
            "sums = {n: torch.zeros(4096, 4096, device='cuda') for n in range(8)}\nfor n in range(8):\n    sums[n] += 1"
        )
        assert "mostly_zeros" not in names(report)


def test_what_is_computed_of_a_matrix_of_zeros_is_told_once() -> None:
    with notebook("A100-40GB") as book:
        book.cell("edges = torch.randint(0, 12000, (2, 60000), device='cuda')")
        report = book.measured(
            "adj = torch.zeros(12000, 12000, device='cuda')\nadj[edges[0], edges[1]] = 1\n"
            "d = adj.sum(1).pow(-0.5)\nadj = d[:, None] * adj * d[None]"
        )
        assert {"mostly_zeros", "carried_on"} & set(names(report)) == {"mostly_zeros"}


def test_a_matrix_that_is_filled_row_by_row_is_not_mostly_zeros() -> None:
    with notebook("A100-40GB") as book:
        book.cell("x = torch.rand(6000, 64, device='cuda')\nD = torch.zeros(6000, 6000, device='cuda')")
        report = book.measured("for i in range(0, 6000, 1000):\n    D[i : i + 1000] = torch.cdist(x[i : i + 1000], x)")
        assert "mostly_zeros" not in names(report)


@pytest.mark.parametrize("case", INNOCENT, ids=[str(number) for number in range(len(INNOCENT))])
def test_innocent_cells_hear_nothing(case: Case) -> None:
    with notebook(case.device) as book:
        for code in case.cells[:-1]:
            book.cell(code)
        # (That memory ran out and the program went on blames nothing, nor that there is a copy.)
        assert set(names(book.measured(case.cells[-1]))) <= {"steady", "caught_shortage", "second_copy"}


@pytest.mark.parametrize(
    ("index", "code"),
    [
        # Nobody says that zero is padding.
        ("", FEW_WORDS),
        (", padding_idx=0", BY_INDEX.format([400, 512] * 32, 512, True)),
        # A mask of what comes later is of no batch, of nothing but words (or segments) neither.
        *(
            ("", f"mask = {mask}.cuda()\n" + BY_INDEX.format([64] * 64, 64, True))
            for mask in (
                "torch.ones(64, 64).tril().bool()",
                "torch.ones(64, 64).tril(-8).long()",
                "torch.ones(32, 64).tril(16).long()",
                "torch.ones(64, 64).tril().long().repeat_interleave(8, 0)[::8]",
                "torch.ones(64, 64, dtype=torch.long)",
                "torch.zeros(64, 64, dtype=torch.long)",
                "(torch.arange(64) >= torch.tensor([[30], [20]] * 32)).long()",
                # Said to be words, or said to be none?
                "(torch.arange(64) < torch.tensor([[30], [20]] * 32))",
            )
        ),
        # A model's number is no number, and what has no hash.
        (
            "",
            "class Settings:\n    pad_token_id = None\nemb.config = Settings()\nemb.config.pad_token_id = [0]\n"
            + FEW_WORDS,
        ),
    ],
)
def test_what_may_be_no_padding_is_not_called_that(index: str, code: str) -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(PADDED.format(index=index))
        assert "padding" not in names(book.measured(code))


HELD = (
    "class Holder:\n    pass\nholder = Holder()\nwith torch.device('cuda'):\n    holder.model = net({size}, {layers})\n"
    "x = torch.randn(8, {size}, device='cuda')"
)


@pytest.mark.parametrize(
    ("device", "sizes", "code", "cause", "word"),
    [
        (
            "virtual:2GiB",
            (8192, 5),
            "with torch.no_grad():\n    y = holder.model(x)",
            "wide_inference",
            "to(torch.bfloat16)",
        ),
        (
            "virtual:1GiB",
            (1024, 4),
            "with torch.no_grad(), torch.autocast('cuda', torch.float16):\n    y = holder.model(x)\n    z = y + 1",
            "autocast_copies",
            "to(torch.float16)",
        ),
    ],
)
def test_a_model_goes_by_the_name_that_can_be_called(
    device: str, sizes: tuple[int, int], code: str, cause: str, word: str
) -> None:
    """Not by that of an object, or a module of Python's, that holds it."""
    with notebook(device) as book:
        book.cell(HELD.format(size=sizes[0], layers=sizes[1]))
        (found,) = [one for one in book.measured(code).causes if one.name == cause]
        assert f"`holder.model.{word}`" in found.remedy
        assert "`holder.model`" in found.text


def test_weights_of_several_models_are_not_said_to_be_those_of_one() -> None:
    with notebook("virtual:2GiB") as book:
        book.cell("with torch.device('cuda'):\n    models = [net(4096, 5) for _ in range(4)]")
        cell = 'with torch.no_grad():\n    y = [model(torch.randn(8, 4096, device="cuda")) for model in models]'
        cause = named(book.measured(cell), "wide_inference")
        assert "and 3 others run without training in float32: their weights take 1,280 MiB together" in cause.text
        assert "for each" in cause.remedy


def test_a_model_that_failed_before_it_came_to_train_needs_no_smaller_weights() -> None:
    with notebook("virtual:2GiB") as book:
        book.cell("model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()")
        report = book.measured("model(torch.ones(1, 5).cuda())")
        assert report.answer.startswith(
            "RuntimeError at line 2: mat1 and mat2 shapes cannot be multiplied (1x5 and 2048x2048). "
            "Memory did not run out. Of 128 MiB at the peak, "
        )
        assert "wide_inference" not in names(report)


def test_what_joins_many_is_not_said_to_make_much_of_few() -> None:
    """Of many inputs not all are noted; the whole is as large as they are together."""
    with notebook("virtual:1GiB") as book:
        book.cell("rows = [torch.randn(64, 1024, device='cuda') for _ in range(64)]")
        assert "grown_result" not in names(book.measured("whole = torch.stack(rows)"))


def test_a_loop_that_makes_nothing_is_not_said_to_end_alike() -> None:
    """Weights are filled one by one, and what the cell costs comes after: its answer is not of that loop."""
    with notebook("virtual:1GiB") as book:
        book.cell(
            "model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).cuda()\nx = torch.randn(512, 512).cuda()"
        )
        filling = "for weight in model.parameters():\n    nn.init.normal_(weight.data)\n"
        report = book.measured(f"{filling}with torch.no_grad():\n    y = model(x)")
        assert "steady" not in names(report)


def test_trainings_of_which_each_leaves_its_model_are_not_said_to_end_alike() -> None:
    """The first one's iterations end alike, and the next ones' with more."""
    training = """
def trained(seed):
    model = net(1024, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 1024, device="cuda")).mean().backward()
        optimizer.step()
    return model
"""
    with notebook("virtual:1GiB") as book:
        book.cell(training)
        assert "steady" not in names(book.measured("models = {seed: trained(seed) for seed in range(4)}"))
        assert "steady" in names(book.measured("models = None\nmodel = trained(0)"))


@pytest.mark.parametrize("order", [("zero_grad", "step"), ("step", "zero_grad")])
def test_iterations_end_where_their_loop_does(order: tuple[str, str]) -> None:
    """Gradients that are cleared behind each step are not there at a turn's end."""
    steps = {"step": "    optimizer.step()", "zero_grad": "    optimizer.zero_grad()"}
    first, last = ("    model(x).mean().backward()" if name == "step" else "" for name in order)
    lines = ["for _ in range(4):", first, steps[order[0]], last, steps[order[1]]]
    with notebook("virtual:1GiB") as book:
        book.cell(TRAIN)
        report = book.measured("\n".join(line for line in lines if line))
        (steady,) = (cause for cause in report.causes if cause.name == "steady")
        assert steady.bytes == report.checkpoints[-1].allocated
        assert ("gradients" in steady.text) is (order[1] == "step")


@pytest.mark.parametrize(
    "cell",
    [
        "best = [torch.cdist(x[i : i + 500], x).argmin(1) for i in range(0, 8000, 500)]",
        "for part in x.split(400):\n    d = (part[:, None] - x[None]).pow(2).sum(-1)\n    near = d.topk(3).indices",
    ],
)
def test_who_works_on_some_of_the_rows_at_a_time_is_not_told_to(cell: str) -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell('x = torch.randn(8000, 64, device="cuda")')
        report = book.measured(cell)
        # (Distances have a function of their own, however few rows there are of a time.)
        assert set(names(report)) <= {"steady", "grown_result", "all_pairs"}
        assert ("all_pairs" in names(report)) is ("`torch.cdist(part, x)`" in report.answer)
        assert "rows at a time" not in report.answer
        assert "part at a time" not in report.answer


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        # a layer multiplies rows in one piece: it would copy the view
        ("expanded_copy", "with torch.no_grad():\n    y = model(x[:, None].repeat(1, 64, 1))"),
        # what is repeated is no single row
        ("expanded_copy", "y = x.repeat(64, 1) + 1"),
        ("built_beside", SEARCH.format(first="model = optimizer = None\n    ")),
        # a step aside (sharpness-aware minimization): the weights are put back, by their copies
        (
            "built_beside",
            "trained = net(1024)\nold = {}\nfor _ in range(4):\n"
            "    for p in trained.parameters():\n        old[p] = p.data.clone()\n        p.data.add_(1e-3)\n"
            "    trained(torch.ones(1, 1024, device='cuda')).mean().backward()\n"
            "    for p in trained.parameters():\n        p.data = old.pop(p)\n",
        ),
        # two that step in turn; an input that is trained
        (
            "idle_states",
            "both = [kind(model.parameters()) for kind in (torch.optim.Adam, torch.optim.AdamW)]\nfirst, second = both\n"
            "for _ in range(3):\n    for one in both:\n        one.zero_grad()\n        model(x).mean().backward()\n"
            "        one.step()",
        ),
        # as Accelerate's, which passes everything on
        (
            "idle_states",
            "class Passing(torch.optim.Optimizer):\n    def __init__(self, inner):\n        self.inner = inner\n"
            "    state = property(lambda self: self.inner.state)\n"
            "    param_groups = property(lambda self: self.inner.param_groups)\n"
            "    def zero_grad(self):\n        self.inner.zero_grad()\n    def step(self):\n        self.inner.step()\n\n"
            "optimizer = torch.optim.Adam(model.parameters())\noptimizer = Passing(optimizer)\n"
            "for _ in range(3):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()",
        ),
        # the backward makes as many anew, and is as high
        (
            "late_zero_grad",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(3):\n    loss = model(x[:1]).mean()\n"
            "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()",
        ),
        (
            "input_gradients",
            "images = mib(8).view(-1, 512)\nimages.requires_grad_()\noptimizer = torch.optim.Adam([images])\n"
            "for _ in range(3):\n    optimizer.zero_grad()\n    model.requires_grad_(False)(images).mean().backward()\n"
            "    optimizer.step()",
        ),
    ],
)
def test_a_remedy_that_would_change_nothing_is_not_told(name: str, cell: str) -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell("model = net()\nx = torch.randn(64, 512, device='cuda')")
        report = book.measured(cell)
        assert name not in names(report)
        assert not [one for one in report.causes if not one.describes or "expand" in one.sentence]


def test_every_detector_has_a_case() -> None:
    modules = [import_module(f"{causes.__name__}.{one.name}") for one in pkgutil.iter_modules(causes.__path__)]
    told = set(re.findall(r'Cause\(\s*f?"(\w+)(?:\{kind\})?"', "".join(inspect.getsource(one) for one in modules)))
    told = (told - {"pinned_by_"}) | {"pinned_by_out", "pinned_by_traceback", shortage.NAME}
    # (A cell has no process group: `test_virtual_distributed` has their cases.)
    of_ranks = {"gradients_in_buckets", "buckets_made_anew"}
    assert told == {case.tells for case in GUILTY} | {one.cause for one in TOLD} | of_ranks
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__annotations__.get("return") == "Iterator[Cause]" and name[0] != "_"
    }
    known = (*catalog.DETECTORS, *from_files.DETECTORS)
    assert defined == {detector.__name__ for detector in known}


def test_what_the_cell_uses_is_not_offered_for_deletion() -> None:
    with notebook("T4") as book:
        book.cell(
            "weights = mib(6000)\nother = mib(1000)\ndef apply(x): return inner(x)\ndef inner(x): return weights + x"
        )
        report = book.measured("y = apply(1)\nz = apply(1)")
        (cause,) = [one for one in report.causes if one.name == "memory_ran_out"]
        assert "`weights` 6,000 MiB, `y` 6,000 MiB, `other` 1,000 MiB" in cause.text
        assert "`del other` would have saved 1,000 MiB" in cause.remedy
        assert "weights" not in cause.remedy
        assert report.causes[0].name == "memory_ran_out"


def test_variables_that_keep_one_graph_of_an_earlier_cell_are_offered_together() -> None:
    """Deleting one of them alone frees next to nothing. The old loss is overwritten by the cell, which never reads it."""
    with notebook("T4") as book:
        book.cell(
            "net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(12)]).cuda()\n"
            "x = torch.randn(49152, 4096, device='cuda')\n"
            "logits = net(x)\nloss = (logits * 1).relu().mean()"
        )
        cell = "for _ in range(3):\n    loss = net(torch.randn(16384, 4096, device='cuda')).mean()\n    loss.backward()"
        report = book.measured(cell)
        (cause,) = [one for one in report.causes if one.name == "memory_ran_out"]
        # Twelve of the graph and the result, but not the data that it begins with.
        assert cause.remedy.startswith(
            "By the amount saved: `del logits, loss` would have saved 9,984 MiB (the cell does not read what they hold, "
            "enough for this request)"
        )
        assert "`del logits`" not in cause.remedy
        before = book.allocated()
        book.cell("del logits, loss\n%gpumem_free traceback")
        assert before - book.allocated() >= 9984 << 20
        # Where the cell, or what it calls, reads the old value first, it stays.
        book.cell("def last(): return loss\nlogits = net(x)\nloss = (logits * 1).relu().mean()")
        report = book.measured(cell.replace("    loss.back", "    last()\n    loss.back"))
        (cause,) = [one for one in report.causes if one.name == "memory_ran_out"]
        assert ", loss`" not in cause.remedy


def test_what_such_variables_keep_on_another_device_is_not_counted() -> None:
    with notebook("2xT4") as book:
        book.cell(
            "net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(12)]).cuda()\n"
            "logits = net(torch.randn(49152, 4096, device='cuda'))\nloss = (logits * 1).relu().mean()\n"
            "logits.elsewhere = torch.zeros(1000 << 18, device='cuda:1')"
        )
        report = book.measured("loss = net(torch.randn(32768, 4096, device='cuda')).mean()")
        (cause,) = [one for one in report.causes if one.name == "memory_ran_out"]
        # The data too: nothing else holds it here.
        assert "`del logits, loss` would have saved 10.5 GiB" in cause.remedy


def test_weights_that_an_embedding_and_the_head_share_are_not_checkpointed() -> None:
    with notebook("T4") as book:
        book.cell(
            "class Words(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.wte, self.mix = nn.Embedding(30000, 128), nn.Linear(128, 128)\n"
            "        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 30000, bias=False)\n"
            "        self.head.weight = self.wte.weight\n"
            "    def forward(self, words):\n        return self.head(self.norm(self.mix(self.wte(words)).relu()))\n"
            "model = Words().cuda()\nwords = torch.randint(0, 30000, (8, 256), device='cuda')"
        )
        report = book.measured("nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()")
        assert not [one for one in report.causes if "wte" in one.sentence], report.causes


def test_an_adapter_is_not_said_to_save_what_the_frozen_layers_behind_it_do() -> None:
    pytest.importorskip("peft", reason="the adapters are peft's")
    with notebook("T4") as book:
        book.cell(
            "from transformers import LlamaConfig, LlamaForCausalLM\nfrom peft import LoraConfig, get_peft_model\n"
            "shape = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, vocab_size=500)\n"
            "base = LlamaForCausalLM(LlamaConfig(**shape)).cuda()\n"
            "model = get_peft_model(base, LoraConfig(r=4, target_modules=['q_proj', 'v_proj']))\n"
            "tokens = torch.randint(0, 500, (8, 256), device='cuda')"
        )
        report = book.measured("model(input_ids=tokens, labels=tokens).loss.backward()")
        assert report.peak.categories["activations"] > report.peak.peak_allocated / 2
        assert "dominating_layer" not in {cause.name for cause in report.causes}


def test_an_optimizer_of_ones_own_is_not_offered_settings_that_it_lacks() -> None:
    with notebook("T4") as book:
        book.cell(
            "class Own(torch.optim.Optimizer):\n    def __init__(self, weights):\n        super().__init__(weights, {})\n"
            "    @torch.no_grad()\n    def step(self):\n        made = [w.grad.sign() for w in self.param_groups[0]['params']]\n"
            "        torch._foreach_add_(self.param_groups[0]['params'], made, alpha=-0.1)\n"
            "def train(model, x):\n    own = Own(model.parameters())\n    model(x).mean().backward()\n    own.step()\n"
            "model, x = net(1024), torch.randn(4, 1024, device='cuda')"
        )
        [cause] = [one for one in book.measured("train(model, x)").causes if one.name == "optimizer_temporaries"]
        assert "Own" in cause.sentence
        assert not cause.remedy


@pytest.mark.parametrize(
    "after",
    ["    total = total + loss\ntotal.backward()\noptimizer.step()", "    loss.backward()\n    optimizer.step()"],
)
def test_what_fails_on_the_way_to_a_backward_is_no_evaluation(after: str) -> None:
    with notebook("T4") as book:
        book.cell(TRAIN)
        report = book.measured(
            "total = 0\nmodel.eval()\nfor size in (2_000_000, 3_000_000):\n"
            f"    part = torch.empty(size, 512, device='cuda')\n    loss = model(part).mean()\n{after}"
        )
        assert report.to_dict()["error"]
        assert "missing_no_grad" not in {one.name for one in report.causes}


def test_pictures_on_the_host_are_not_said_to_be_numbers() -> None:
    with notebook("T4") as book:
        book.cell(TRAIN)
        report = book.measured(f"{LOOP}\n{SAMPLING.replace('64', '4')}")
        [cause] = [one for one in report.causes if one.name == "kept_graphs"]
        assert "Put `state.cpu().detach()` there" in cause.remedy
        assert "item()" not in cause.remedy


def test_what_a_later_backward_needs_is_no_evaluation() -> None:
    with notebook("virtual:1GiB") as book:
        book.cell(TRAIN)
        report = book.measured(f"{LOOP}\n{SAMPLING}\nsum(kept).sum().backward()")
        assert report.to_dict()["error"]
        assert "missing_no_grad" not in {one.name for one in report.causes}


def test_a_backward_may_follow_in_each_function_on_the_way() -> None:
    text = (
        "def sample(model):\n    for t in ts:\n        x = model(x)\n    return x\n"
        "def train(model):\n    sample(model)\n    loss.backward()\n"
        "for epoch in epochs:\n    for x in xs:\n        sample(model)\n    {0}\nsample(model)\n"
    )
    inner = Written("", 3, "")
    idle, trained = (read_program(text.format(one), {}) for one in ("print(1)", "optimizer.step()"))
    assert not idle.may_go_backward([inner])
    assert not idle.may_go_backward([Written("", 10, ""), inner])
    assert trained.may_go_backward([Written("", 10, ""), inner])
    assert not trained.may_go_backward([Written("", 12, ""), inner])
    assert trained.may_go_backward([Written("", 6, ""), inner])
    assert idle.may_go_backward([Written("elsewhere.py", 3, ""), inner])


def test_a_loop_only_looks_where_no_backward_follows_it() -> None:
    text = (
        "for x in xs:\n    {0}\n    for y in ys:\n        model(y)\n{1}\ndef f():\n    for x in xs:\n        model(x)\n"
    )
    program = read_program(text.format("loss.backward()", "print(1)"), {})
    assert program.loop_only_looks(Written("", 4, ""))
    assert program.loop_only_looks(Written("", 8, ""))
    assert not program.loop_only_looks(Written("", 2, ""))
    assert not program.loop_only_looks(Written("", 5, ""))
    program = read_program(text.format("pass", "total.backward()"), {})
    assert not program.loop_only_looks(Written("", 4, ""))


def test_an_attribute_carries_a_state_on_where_its_own_class_says_so() -> None:
    program = read_program(
        "class Counter:\n    def step(self):\n        self.seen = self.seen + 1\n"
        "class Cell:\n    def step(self, x):\n        self.state = self.mix(x, self.state)\n",
        {},
    )
    found = [program.carried(kind) for kind in ("Sequential", "Counter", "Cell")]
    assert [one and one[0] for one in found] == [None, "seen", "state"]


def test_a_view_of_what_was_written_to_since_hides_nobody() -> None:
    with notebook("T4") as book:
        book.cell("w = torch.randn(4, 6, device='cuda', requires_grad=True)")
        report = book.measured("rows = w.cumsum(-1).view(2, 12)\npart = rows[..., :3]\npart /= 3")
        assert not [note for note in report.notes if "failed" in note], report.notes


def test_what_most_of_the_memory_is_and_can_be_without_is_said_before_the_tensors() -> None:
    setup = "layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)).cuda()"
    scores = (
        "h = torch.randn({}, 1024, 64, device='cuda')\nfor layer in layers:\n    k = layer(h)\n"
        "    h = torch.softmax(k @ k.transpose(1, 2) / 8, -1) @ k\nh.sum().backward()"
    )
    with notebook("T4", SETUP) as book:
        book.cell(setup)
        most = book.measured(scores.format(64)).to_dict()["answer"]
        less = book.measured("kept = torch.ones(1 << 27, device='cuda')\n" + scores.format(8)).to_dict()["answer"]
        failed = book.measured(scores.format(448)).to_dict()["answer"]
    assert most.startswith("Attention scores are stored in full"), most
    assert ". Of " in most
    assert less.startswith("Of "), less
    assert "Attention scores" in less
    assert failed.startswith("Out of memory at line 5. Attention scores are stored in full"), failed


@pytest.mark.parametrize(
    "loop",
    [
        "h = x\nfor _ in range(64):\n    h = lin(h)\n    h = h.relu()\nh.sum().backward()",
        "losses = []\nfor _ in range(64):\n    losses.append(lin(x).relu().mean())\ntorch.stack(losses).sum().backward()",
        "total = 0\nfor _ in range(64):\n    total = total + lin(x).relu().mean()\nscaler.scale(total).backward()",
        "def losses():\n    kept = []\n    for _ in range(64):\n        kept.append(both(x).mean())\n    return kept\n"
        "total = sum(losses())\ntotal.backward()",
    ],
)
def test_graphs_that_wait_for_the_backward_behind_a_loop_are_not_to_be_detached(loop: str) -> None:
    setup = (
        "lin = nn.Linear(256, 256).cuda()\nboth = nn.Sequential(lin, nn.ReLU())\nscaler = torch.amp.GradScaler()\n"
        "x = torch.randn(262144, 256, device='cuda')"
    )
    with notebook("T4", SETUP) as book:
        book.cell(setup)
        answer = book.measured(loop).to_dict()["answer"]
        behind = answer.partition(". ")[2]
        head, last = (
            number for number, line in enumerate(loop.splitlines(), 2) if "for _" in line or "backward" in line
        )
        assert behind.startswith("The graphs of "), answer
        assert f" turns of the loop at line {head} wait for their backward (line {last}): " in behind
        assert "detach" not in answer
        assert "keeps its inputs only" in answer
        # Where a backward of each turn, or none at all, was to come, something is kept.
        without = loop[: loop.rindex("\n")]
        assert "wait for the backward" not in book.measured(without).to_dict()["answer"]


def test_features_of_a_result_keep_its_graph_and_no_further_iterations() -> None:
    """As a GAN's loss over patches takes them; it fails on the way to the backward, in a loop over layers."""
    cell = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = nn.Sequential(*[\n"
        "            one\n            for _ in range(4)\n"
        "            for one in (nn.Conv2d(3, 3, 3, padding=1), nn.InstanceNorm2d(3), nn.ReLU())\n        ])\n"
        "    def forward(self, x, layers=()):\n        found = []\n        for number, layer in enumerate(self.body):\n"
        "            x = layer(x)\n            if number in layers:\n                found.append(x)\n"
        "            if layers and number == layers[-1]:\n                return found\n        return x\n"
        "net = Net().cuda()\nx = torch.randn(16, 3, 256, 256, device='cuda')\nfake = net(x)\nof_fake = net(fake, [0, 3, 6])\n"
        "of_real = net(x, [0, 3, 6])\nloss = net(x.cpu())\nloss.mean().backward()"
    )
    with notebook("T4", SETUP) as book:
        report = book.measured(cell)
        assert report.error is not None
        assert {"kept_graphs", "graphs_ahead"}.isdisjoint(names(report)), report.to_dict()["answer"]


def test_a_model_is_named_as_the_notebook_calls_it_and_not_by_its_parts() -> None:
    with notebook("T4", SETUP) as book:
        book.cell(
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))\n    def forward(self, x):\n"
            "        for layer in self.layers:\n            x = layer(x).relu()\n        return x\n"
            "lm = Model().cuda().eval()\nx = torch.randn(262144, 256, device='cuda')"
        )
        answer = book.measured("kept = []\nfor _ in range(64):\n    kept.append(lm(x))").to_dict()["answer"]
    assert "`lm` is in evaluation mode" in answer, answer


def test_a_loop_whose_first_statement_fails_has_no_iterations() -> None:
    with notebook("T4") as book:
        report = book.measured("for _ in range(3):\n    whole = mib(16000)")
        assert report.error is not None
        assert not [note for note in report.notes if "failed in" in note]


def test_a_broken_detector_costs_a_line_and_not_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scene: object) -> list[object]:
        raise RuntimeError("no way")

    monkeypatch.setattr(catalog, "DETECTORS", (broken, *catalog.DETECTORS))
    with notebook(setup=SETUP) as book:
        book.cell(TRAIN)
        report = book.measured("del model")
        assert names(report) == ["del_freed_nothing"]
        assert "Looking for a cause failed in broken (RuntimeError: no way)." in report.notes


def test_what_an_inner_loop_gathers_is_not_what_grows_where_an_outer_one_keeps_more() -> None:
    with notebook("T4") as book:
        report = book.measured(
            "kept = []\nfor step in range(5):\n    new = []\n    for layer in range(6):\n        new.append(mib(8))\n"
            "    kept.append(new)"
        )
    assert "it is held by `kept`" in report.to_dict()["answer"]
    assert "(5 iterations)" in report.to_dict()["answer"]


def test_a_variable_made_anew_each_time_grows_by_its_graph_alone() -> None:
    with notebook("T4") as book:
        book.cell("layer = nn.Linear(512, 4096).cuda()\nmean = 0")
        report = book.measured(
            "for _ in range(8):\n    mean = 0.9 * mean + 0.1 * layer(torch.randn(4096, 512, device='cuda'))"
        )
    assert names(report) == ["kept_graphs"]


def test_free_pieces_are_no_reason_for_another_error() -> None:
    with notebook("T4") as book:
        book.cell("a = [mib(9) for _ in range(1000)]")
        report = book.measured("del a[::2]\ny = mib(1)\n1 / 0")
    assert report.error is not None
    assert "fragmentation" not in names(report)


def test_copies_of_gradients_are_gradients_though_they_go_by_parameters_names() -> None:
    with notebook("T4") as book:
        book.cell(TRAIN)
        report = book.measured(
            "model(x).mean().backward()\nkept = {name: p.grad.clone() for name, p in model.named_parameters()}"
        )
    assert "parameters of `kept`" not in report.to_dict()["answer"]
    first, *_, last = (row["categories"]["parameters"] for row in report.to_dict()["checkpoints"])
    assert first <= last < first + (1 << 16)


@pytest.mark.parametrize(
    ("write", "used"),
    [
        ("k_cache[layer, :, :, t] = new[:, :, 0]", 24),
        ("k_cache[layer, :, :, t : t + 1] = new", 24),
        ("k_cache[layer].index_copy_(2, torch.tensor([t], device='cuda'), new)", 24),
        ("k_cache[layer][:, :, torch.tensor([t, t + 1])] = new.repeat(1, 1, 2, 1)", 25),
        ("k_cache[layer].narrow(2, t, 1).copy_(new)", 24),
        # a place that nobody knows; and all of it
        ("k_cache[layer].index_copy_(2, torch.randint(64, (4096,), device='cuda')[:1], new)", 0),
        ("k_cache.copy_(torch.ones_like(k_cache))", 0),
    ],
)
def test_a_cache_says_to_how_many_of_its_positions_was_written(write: str, used: int) -> None:
    with notebook("T4") as book:
        book.cell(
            "k_cache = torch.zeros(2, 4, 8, 2048, 64, device='cuda')\nnew = torch.ones(4, 8, 1, 64, device='cuda')"
        )
        report = book.measured(f"for t in range(24):\n    for layer in range(2):\n        {write}")
    (cause,) = [one for one in report.causes if one.name == "key_value_cache"]
    words = f"with room for 2,048 positions of every sequence of the batch, of which {used} were written to"
    assert (words in cause.text) == bool(used), cause.text
    assert ("Made for" in cause.remedy) == bool(used)


def test_an_error_that_is_not_of_memory_says_what_its_traceback_keeps() -> None:
    with notebook("T4") as book:
        book.cell("def bad():\n    big = mib(300)\n    raise KeyboardInterrupt")
        report = book.measured("bad()")
    assert "traceback pins 300 MiB" in report.to_dict()["answer"]


def test_what_a_function_dropped_is_said_to_be_made_by_its_call() -> None:
    with notebook("T4") as book:
        book.cell(
            "def tried():\n    other = net(1024)\n    return other(torch.randn(8, 1024, device='cuda')).sum().item()"
        )
        report = book.measured("model = net(1024)\nscore = tried()")
    assert "are parameters made by `score = tried()` (line 3: In [" in report.to_dict()["answer"]


@pytest.mark.parametrize(("size", "is_reached"), [(1, False), (48, True)])
def test_temporaries_of_a_step_are_worth_what_another_setting_would_save(size: int, is_reached: bool) -> None:
    """Where another line reaches nearly as much, another way of stepping is no answer."""
    with notebook("A100-40GB") as book:
        book.cell(
            "model = net(2048, 4)\noptimizer = torch.optim.Adam(model.parameters())\n"
            "model(mib(1).view(-1, 2048)).sum().backward()"
        )
        cause = named(book.measured(f"optimizer.step()\ny = mib({size})"), "optimizer_temporaries")
    assert ("are reached at line 3 all the same" in cause.remedy) is is_reached
    assert (cause.bytes < 32 << 20) is is_reached


def test_a_list_holds_what_a_loops_variable_went_over() -> None:
    cell = """
for _ in range(3):
    step = [p.detach() * 2 for p in model.parameters()]
    for p, d in zip(model.parameters(), step): p.data.sub_(d)
    optimizer.step()
"""
    with notebook("A100-40GB") as book:
        book.cell(TRAIN + "model(x).sum().backward()")
        cause = named(book.measured(cell), "held_over")
    assert cause.text.startswith("While an iteration computes, `step` (line 4) still holds")
    assert "`del step`" in cause.remedy


def test_the_gradient_of_a_table_that_has_no_room_is_not_the_batchs() -> None:
    with notebook("T4") as book:
        book.cell(
            "table = nn.Embedding(20_000_000, 128, device='cuda')\nids = torch.zeros(64, 50, dtype=torch.long, device='cuda')"
        )
        report = book.measured("table(ids).sum().backward()")
    assert "The gradient of `table.weight` (line 2) has all 20,000,000 rows, 9,766 MiB" in report.answer
    assert "whole_batch" not in names(report)


def test_optimizers_in_a_dictionary_of_their_own_belong_to_the_models_of_another() -> None:
    cell = """
models = {w: net(w).cuda() for w in (1024, 1280, 1536, 1792)}
steps = {w: torch.optim.Adam(m.parameters()) for w, m in models.items()}
for w, model in models.items():
    model(torch.randn(16, w, device="cuda")).sum().backward()
    steps[w].step()
"""
    with notebook("A100-40GB") as book:
        cause = named(book.measured(cell), "models_in_a_list")
    assert "keeps 4 models with their gradients and states on the device" in cause.text


def test_of_two_backwards_that_keep_their_graph_the_last_is_told() -> None:
    """What the first one keeps, the second goes through, though it frees nothing."""
    with notebook("A100-40GB") as book:
        book.cell(RETAINING)
        step = RETAINING_STEP.replace("g_loss.backward()", "g_loss.backward(retain_graph=True)")
        cause = named(book.measured(step), "retained_graph")
    assert "(line 11)" in cause.text
    assert cause.remedy.startswith("Without `retain_graph=True` it is freed")


def test_where_a_list_of_models_grows_no_model_is_too_large() -> None:
    cell = "league = []\nfor _ in range(40):\n    league.append(net(2048, 4))"
    with notebook("virtual:1GiB,context=0MiB") as book:
        report = book.measured(cell)
    assert report.error is not None
    assert "weights_too_large" not in names(report)
    assert "league" in report.answer
