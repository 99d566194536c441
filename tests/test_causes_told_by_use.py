"""What is done with a tensor says what would do without it; and what only looks like a waste is left alone."""

from __future__ import annotations

import pytest
from causes_cells import names, notebook

from gpumem_magic import Report


def measured(*cells: str, device: str = "T4") -> Report:
    with notebook(device) as book:
        for cell in cells[:-1]:
            book.cell(cell)
        return book.measured(cells[-1])


def told(report: Report, name: str) -> str:
    """A cause's sentence and remedy."""
    return next((f"{one.text} {one.remedy}" for one in report.causes if one.name == name), "")


TRAINS = """
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)]).cuda()
model(torch.ones(64, 1024, device="cuda")).sum().backward()
"""
ONE_HOT = "numbers = torch.zeros(4096, dtype=torch.long, device='cuda')\nrows = torch.ones(4096, 64, device='cuda')"
SCAN = """
layer = nn.Linear(64, 512).cuda()
def loss_of(x):
    a = layer(x)
    return {pairs}.mean()
x = torch.randn(64, 128, 64, device="cuda")
"""
SHAMPOO = """
class Shampoo(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            left = p.grad @ p.grad.t()
            p -= 0.1 * left @ p.grad
table = nn.Embedding(8192, 64).cuda()
opt = Shampoo(table.parameters(), {})
table(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
"""


def test_weights_in_one_piece_are_neither_gradients_nor_a_batch() -> None:
    joins = (
        "flat = torch.cat([p.detach().flatten() for p in model.parameters()])\ntwice = flat * 2\nmore = twice * flat"
    )
    assert "joined_gradients" not in names(measured(f"{TRAINS}{joins}"))
    gradients = "flat = torch.cat([p.grad.flatten() for p in model.parameters()])"
    assert "joined_gradients" in names(measured(f"{TRAINS}{gradients}"))
    large = TRAINS.replace("1024, 1024", "4096, 4096").replace("64, 1024", "64, 4096")
    steps = f"{joins}\nfor _ in range(2):\n    model(torch.ones(64, 4096, device='cuda')).sum().backward()\n    y = twice * flat"
    assert "whole_batch" not in names(measured(large, steps))


@pytest.mark.parametrize(
    ("use", "instead"),
    [
        ("counts = hot.sum(0)", "only counts, as `torch.bincount(numbers)` does"),
        ("counts = hot.view(64, 64, 8192).sum(1)", "`scatter_add_` of ones into zeros of (64, 8192)"),
        ("sums = hot.float().t() @ rows", "only puts or adds up rows: `zeros.index_add_(0, numbers, rows)` does so"),
        (
            "y = nn.functional.mse_loss(torch.ones(4096, 8192, device='cuda'), hot.float())",
            "`F.cross_entropy` takes the class numbers",
        ),
    ],
)
def test_what_one_hot_numbers_are_for(use: str, instead: str) -> None:
    said = told(measured(ONE_HOT, f"hot = nn.functional.one_hot(numbers, 8192)\n{use}"), "one_hot")
    assert instead in said, said


def test_the_small_pairs_of_many_steps_are_no_broadcast_to_mend() -> None:
    step = "a = (a.unsqueeze(2) + t).logsumexp(1)"
    before = "t = nn.Parameter(torch.zeros(40, 40, device='cuda'))\na = torch.zeros(32, 40, device='cuda')"
    assert "all_pairs" not in names(measured(before, f"for _ in range(100):\n    {step}\na.sum().backward()"))
    large = before.replace("40, 40", "1024, 1024").replace("32, 40", "32, 1024")
    assert "all_pairs" in names(measured(large, f"for _ in range(3):\n    {step}\na.sum().backward()"))


def test_parts_of_the_rows_are_checkpointed_where_a_backward_is_to_come_though_memory_ran_out_before_it() -> None:
    pairs = SCAN.format(pairs="(a.unsqueeze(2) * a.unsqueeze(3)).exp()")
    said = told(measured(pairs, "loss = loss_of(x)\nloss.backward()", device="virtual:4GiB"), "all_pairs")
    assert (
        "each part in a function that `torch.utils.checkpoint.checkpoint` calls with `use_reentrant=False`" in said
    ), said
    assert "checkpoint" not in told(measured(pairs, "loss = loss_of(x)", device="virtual:4GiB"), "all_pairs")


PAIRS = """def part(rows, classes):
    return F.cross_entropy(rows @ b.T, classes, reduction="sum")
a, b, classes = encoder(x), encoder(x), torch.arange(8192, device="cuda")
"""


def test_parts_of_the_rows_that_are_checkpointed_take_what_they_take() -> None:
    """All pairs of what one encoder made: a backward for each part would go through that a second time."""
    before = "import torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint\n"
    before += "encoder = nn.Linear(64, 64).cuda()\nx = torch.randn(8192, 64, device='cuda')"
    whole = measured(before, f"{PAIRS}part(a, classes).backward()")
    assert "`use_reentrant=False`" in told(whole, "all_pairs")
    parts = (
        "loss = sum(checkpoint(part, *some, use_reentrant=False) for some in zip(a.split(1024), classes.split(1024)))\n"
        "loss.backward()"
    )
    report = measured(before, f"{PAIRS}{parts}")
    assert report.peak.allocated < whole.peak.allocated // 3
    assert "all_pairs" not in names(report)
    again = "for some in zip(a.split(1024), classes.split(1024)):\n    part(*some).backward()"
    error = measured(before, f"{PAIRS}{again}").error
    assert error is not None
    assert "a second time" in error.message


def test_another_order_of_an_einsum_is_no_way_where_the_result_is_what_is_large() -> None:
    products = "a, b = torch.ones(512, 1024, device='cuda'), torch.ones(512, 64, device='cuda')\nc = a * 2"
    large = told(measured(products, "y = torch.einsum('ld,ln,ld->ldn', a, b, c)"), "all_pairs")
    assert large, large
    assert "in another order" not in large, large
    small = told(measured(products, "y = torch.einsum('ld,ln,ld->n', a, b, c)"), "all_pairs")
    assert "in another order" in small, small


def test_a_covariance_of_few_rows_has_a_small_twin() -> None:
    rows = "x = torch.ones(64, 16384, device='cuda')"
    said = told(measured(rows, "c = x.t() @ x"), "all_pairs")
    assert "`x @ x.T` (64, 64)" in said, said
    assert "pca_lowrank(x)" in said, said
    assert "pca_lowrank" not in told(measured("x = torch.ones(16384, 64, device='cuda')", "c = x @ x.t()"), "all_pairs")


def test_an_optimizer_leaves_out_long_sides() -> None:
    assert "leave out sides of a weight" in told(measured(SHAMPOO, "opt.step()"), "all_pairs")


def test_a_hessian_has_its_product_with_a_vector() -> None:
    before = "from torch.autograd.functional import hessian\nx = torch.ones(4096, device='cuda')"
    said = told(measured(before, "H = hessian(lambda z: z.tanh().sum(), x, vectorize=True)"), "grown_result")
    assert "vhp" in said, said


SOUND = "wave = torch.ones(8, 480000, device='cuda')\nwindow = torch.ones(1024, device='cuda')"
LAYERS = """
from torch.utils.checkpoint import checkpoint
class Few(nn.Module):
    def __init__(self, n=1024):
        super().__init__()
        self.register_buffer("q", torch.randint(-8, 7, (n, n), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(n, 1))
        self.bias = nn.Parameter(torch.zeros(n))
    def base(self, x):
        w = self.q.float() * self.scale
        return nn.functional.linear(x, w)
    def forward(self, x):
        return BASE + self.bias
model = nn.Sequential(*[Few() for _ in range(8)]).cuda()
"""
STEP = "model(torch.ones(8, 1024, device='cuda')).sum().backward()"
PRUNES = "from torch.nn.utils import prune\nmodel = net(2048, 4)"
CACHE = "cache = [torch.ones(1 << 20, device='cuda') for _ in range(16)]\nrows = torch.arange(1 << 20, device='cuda')"
BATCHES = "for i in range(0, 4096, 256):\n    y = data[i:i + 256].mean()"


def test_windows_of_a_spectrum_that_overlap_many_times() -> None:
    said = told(measured(SOUND, "s = torch.stft(wave, 1024, 32, window=window, return_complex=True)"), "many_windows")
    assert "one every 32" in said, said
    assert "`hop_length=256`" in said, said
    assert "8 times fewer" in said, said
    usual = measured(SOUND, "s = torch.stft(wave, 1024, 256, window=window, return_complex=True)")
    assert "many_windows" not in names(usual)


def test_one_long_sequence_pads_all() -> None:
    pads = "from torch.nn.utils.rnn import pad_sequence\nlengths = {lengths}\n"
    pads += "its = [torch.ones(n, 64, device='cuda') for n in lengths]"
    said = told(measured(pads.format(lengths="[20000] + [100] * 63"), "x = pad_sequence(its)"), "padded_sequences")
    assert "pads 64 sequences of 410 rows on average to the longest one's 20,000" in said, said
    alike = measured(pads.format(lengths="[900, 1000] * 32"), "x = pad_sequence(its, batch_first=True)")
    assert "padded_sequences" not in names(alike)


def test_weights_computed_of_what_layers_store() -> None:
    keeps = told(measured(LAYERS.replace("BASE", "self.base(x)"), STEP), "recomputed_weights")
    assert "`self.q.float() * self.scale`" in keeps, keeps
    assert "torch.utils.checkpoint" in keeps, keeps
    again = measured(LAYERS.replace("BASE", "checkpoint(self.base, x, use_reentrant=False)"), STEP)
    assert "recomputed_weights" not in names(again)
    # Nobody would have all layers use the same random numbers.
    assert "alike_buffers" not in names(again)


def test_pruned_weights_stay_as_they_were() -> None:
    prunes = "for layer in model:\n    prune.l1_unstructured(layer[0], 'weight', amount=0.9)\n"
    said = told(measured(PRUNES, f"{prunes}y = model(torch.ones(8, 2048, device='cuda'))"), "pruned_weights")
    assert '`prune.remove(layer, "weight")`' in said, said
    assert "(`weight_mask`)" in said, said
    removes = f"{prunes}    prune.remove(layer[0], 'weight')\ny = model(torch.ones(8, 2048, device='cuda'))"
    assert "pruned_weights" not in names(measured(PRUNES, removes))


def test_a_list_that_is_made_anew_beside_the_old_one() -> None:
    said = told(measured(CACHE, "cache = [one.index_select(0, rows) for one in cache]"), "rebuilt_beside")
    assert "makes all of a new `cache`" in said, said
    assert "`cache[i] = new`" in said, said
    part = "for i, one in enumerate(cache):\n    cache[i] = one.index_select(0, rows)"
    assert "rebuilt_beside" not in names(measured(CACHE, part))


@pytest.mark.parametrize(
    ("makes", "copy"),
    [
        ("torch.zeros(4096, 64, 64, 16, dtype=torch.uint8, device='cuda')", "raw.permute(0, 3, 1, 2).contiguous()"),
        ("torch.zeros(4096, 256, 64, dtype=torch.uint8, device='cuda')", "raw.long()"),
    ],
)
def test_data_that_is_copied_whole_though_batches_are_taken(makes: str, copy: str) -> None:
    whole = told(
        measured(f"raw = {makes}", f"data = {copy}\n{BATCHES.replace('.mean', '.float().mean')}"), "copied_rows"
    )
    assert "copies all of `raw`, which stays beside `data`" in whole, whole
    parts = BATCHES.replace("data[i:i + 256]", copy.replace("raw", "raw[i:i + 256]") + ".float()")
    assert "copied_rows" not in names(measured(f"raw = {makes}", parts))


def test_data_of_which_slices_are_taken_lies_ready() -> None:
    data = "data = torch.ones(4096, 1 << 16, device='cuda')\nmodel = nn.Linear(1 << 16, 2).cuda()"
    slices = "for i in range(0, 4096, 256):\n    y = model(data[i:i + 256])"
    assert "`data` takes 1,024 MiB" in told(measured(data, slices), "data_ready")
    assert "data_ready" not in names(measured(data, "for i in range(4):\n    y = model(data)"))


def test_a_bilinear_layer_is_one_weight() -> None:
    pair = "model = nn.ModuleDict({'a': nn.Linear(64, WIDE), 'f': nn.Bilinear(WIDE, WIDE, 64)}).cuda()\n"
    use = "a = model['a'](torch.ones(8, 64, device='cuda'))\nmodel['f'](a, a).sum().backward()"
    assert "for each pair of its inputs' 1,024 and 1,024" in told(
        measured(pair.replace("WIDE", "1024"), use), "one_weight"
    )


def test_a_models_weights_are_not_called_as_an_optimizer_calls_them_inside() -> None:
    trains = (
        "def main():\n    model = nn.Linear(16384, 8192).cuda()\n    optimizer = torch.optim.Adam(model.parameters())\n"
        "    model(torch.ones(1, 16384, device='cuda')).sum().backward()\n    optimizer.step()"
    )
    answer = measured(trains, "main()", device="virtual:2GiB").answer
    assert "of `model`" in answer, answer
    assert "_init_group" not in answer, answer
    assert "`grads`" not in answer, answer


def test_gradients_of_activations_that_outlive_their_backward_were_asked_for() -> None:
    net = (
        "taps = []\nlayers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6)).cuda()\n"
        "class Probe:\n    def __init__(self):\n        self.taps = []\nprobe = Probe()\n"
        "def run(x):\n    probe.taps.clear()\n    for layer in layers:\n        x = layer(x).tanh()\n        KEEP\n"
        "        probe.taps.append(x)\n    return x.mean()"
    )
    steps = "for _ in range(3):\n    run(torch.ones(8192, 512, device='cuda')).backward()"
    said = told(measured(net.replace("KEEP", "x.retain_grad()"), steps), "retained_gradients")
    assert "keeps the gradients of 5 activations" in said, said
    assert "retained_gradients" not in names(measured(net.replace("KEEP", "pass"), steps))


def test_what_an_exit_stack_keeps_until_the_error() -> None:
    before = "from contextlib import ExitStack\ndef done(name, batch): pass"
    loop = (
        "for i in range(40):\n        batch = torch.ones(1 << 24, device='cuda')\n"
        "        stack.callback(done, i, batch)\n        y = batch.sum().item()"
    )
    said = told(measured(before, f"with ExitStack() as stack:\n    {loop}", device="virtual:2GiB"), "growth")
    assert "put into `stack` at line 5" in said, said
    assert "only the error let go of it" in said, said
    each = loop.replace("        batch =", "        with ExitStack() as stack:\n          batch =").replace(
        "        stack.", "          stack."
    )
    assert "growth" not in names(measured(before, f"if True:\n    {each}", device="virtual:2GiB"))


def test_a_cached_function_is_emptied_and_not_deleted() -> None:
    cached = "from functools import lru_cache\n@lru_cache(maxsize=1)\ndef get(n): return net(n, 2)"
    loop = "for n in (1024, 1536, 2048):\n    y = get(n)(torch.ones(8, n, device='cuda')).sum().item()"
    said = told(measured(cached, loop), "built_beside")
    assert "`get.cache_clear()` at the end of each turn" in said, said


def test_models_of_a_registry_that_a_training_does_not_use() -> None:
    makes = "MODELS = {n: net(n, 3) for n in (512, 768, 1024, 1280)}"
    trains = (
        "model = MODELS[512]\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    opt.zero_grad()\n    model(torch.ones(8, 512, device='cuda')).sum().backward()\n    opt.step()"
    )
    said = told(measured(makes, trains), "unused_models")
    assert "`MODELS`" in said, said
    assert "3 models on the device that this cell neither runs nor trains" in said, said
    every = trains.replace("model = MODELS[512]\n", "model = nn.ModuleList(MODELS.values())\n").replace(
        "model(torch.ones(8, 512, device='cuda'))",
        "sum(m(torch.ones(8, n, device='cuda')).sum() for n, m in MODELS.items())",
    )
    assert "unused_models" not in names(measured(makes, every))


def test_turns_of_a_solver_inside_a_forward() -> None:
    solver = (
        "class Deq(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.cell = nn.Linear(512, 512)\n"
        "    def forward(self, u):\n        z = torch.zeros_like(u)\n        for _ in range(40):\n"
        "            z = torch.tanh(self.cell(z) + u)\n        return z.mean()\nmodel = Deq().cuda()"
    )
    run = "model(torch.ones(4096, 512, device='cuda')).backward()"
    said = told(measured(solver, run), "waiting_graphs")
    assert "40 turns of a loop" in said, said
    assert "`with torch.no_grad():` keeps nothing" in said, said
    deep = (
        "class Deep(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(24))\n"
        "    def forward(self, x):\n        for layer in self.layers:\n            x = layer(x)\n        return x.mean()\n"
        "model = Deep().cuda()"
    )
    assert "waiting_graphs" not in names(measured(deep, run))


def test_what_a_loss_in_a_function_only_compares_with() -> None:
    steps = (
        "teacher, student = net(512, 6), net(512, 2)\n"
        "def loss_of(x):\n    wanted = teacher(x)\n    return nn.functional.mse_loss(student(x), wanted)\n"
        "opt = torch.optim.SGD([*teacher.parameters(), *student.parameters()], lr=0.1)"
    )
    run = "for _ in range(2):\n    opt.zero_grad()\n    loss_of(torch.ones(16384, 512, device='cuda')).backward()\n    opt.step()"
    said = told(measured(steps, run), "target_graphs")
    assert "`wanted = teacher(x)` (In [3], line 3)" in said, said
    without = steps.replace("wanted = teacher(x)", "with torch.no_grad(): wanted = teacher(x)")
    assert "target_graphs" not in names(measured(without, run))


def test_tables_that_are_longer_than_what_is_read() -> None:
    rotary = (
        "class Rotary(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('cos', torch.ones(100000, 64))\n"
        "    def forward(self, x):\n        return x * self.cos[READ]\nrotary = Rotary().cuda()"
    )
    first = "y = rotary(torch.ones(2, 512, 64, device='cuda'))"
    said = told(measured(rotary.replace("READ", ":x.shape[1]"), first), "long_tables")
    assert "512 here" in said, said
    assert "it would take 128.0 KiB" in said, said
    # Any row may be read, or most of them are.
    assert "long_tables" not in names(measured(rotary.replace("READ", "torch.randperm(512, device='cuda')"), first))
    long = "y = rotary(torch.ones(2, 60000, 64, device='cuda'))"
    assert "long_tables" not in names(measured(rotary.replace("READ", ":x.shape[1]"), long))


def test_one_mask_for_all() -> None:
    said = told(measured("n = 1024", "m = torch.ones(4, 8, n, n, device='cuda').tril()"), "same_masks")
    assert "One of (1024, 1024), 4.0 MiB, is broadcast" in said, said
    assert "same_masks" not in names(measured("n = 1024", "m = torch.ones(1, 1, n, n, device='cuda').tril()"))
    scores = "s = torch.zeros(8, 1024, 64, device='cuda')"
    assert "same_masks" not in names(measured(scores, "m = (s @ s.transpose(1, 2)).tril()"))


def test_rows_of_a_table_for_every_pair_of_positions() -> None:
    table = "emb = nn.Embedding(1024, 64).cuda()\nwhere = torch.arange(512, device='cuda')"
    said = told(measured(table, "rel = emb(where[:, None] - where[None] + 512)"), "grown_result")
    assert "looks up 64 numbers for each pair of 512 in 1,024 rows" in said, said
    words = "emb = nn.Embedding(256, 64).cuda()\nids = torch.zeros(64, 512, dtype=torch.long, device='cuda')"
    assert "grown_result" not in names(measured(words, "x = emb(ids)"))


@pytest.mark.parametrize(
    ("layers", "x", "told_of"),
    [
        (
            "nn.Conv1d(8, 64, 3), nn.ReLU(), nn.Conv1d(64, 64, 3), nn.ReLU()",
            "1, 8, 2000000",
            "Signals of half the length take half",
        ),
        ("nn.Conv3d(1, 16, 3), nn.ReLU(), nn.Conv3d(16, 16, 3), nn.ReLU()", "2, 1, 160, 160, 160", "an eighth of that"),
    ],
)
def test_a_training_of_few_large_items_needs_smaller_ones(layers: str, x: str, told_of: str) -> None:
    steps = "for _ in range(2):\n    body(torch.ones({x}, device='cuda')).mean().backward()"
    body = f"body = nn.Sequential({layers}).cuda()"
    assert told_of in told(measured(body, steps.format(x=x)), "large_images")
    many = x.replace(x.split(",")[0], "16", 1).replace("2000000", "125000").replace("160, 160, 160", "80, 80, 80")
    assert "large_images" not in names(measured(body, steps.format(x=many)))


def test_coroutines_that_wait_with_their_data_on_the_device() -> None:
    before = "import asyncio\nrequests = [torch.zeros(1 << 22) for _ in range(12)]"
    infer = (
        "lock = asyncio.Semaphore(1)\nasync def infer(images):\n    MOVE\n    async with lock:\n        await asyncio.sleep(0)\n"
        "        return x.sum().item()\nanswers = await asyncio.gather(*(infer(r) for r in requests))"
    )
    said = told(measured(before, infer.replace("MOVE", "x = images.cuda()")), "data_ahead")
    assert "12 calls of `infer` wait (`async with lock:`, line 5) with their data on the device" in said, said
    inside = infer.replace("    MOVE\n", "").replace(
        "await asyncio.sleep(0)", "x = images.cuda()\n        await asyncio.sleep(0)"
    )
    assert "data_ahead" not in names(measured(before, inside))


PENALTY = """layers = nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
D = nn.Sequential(*layers).cuda()
kept = []
def penalty(real, fake):
    mix = (0.5 * real + 0.5 * fake).requires_grad_(True)
    out = D(mix)
    grad = torch.autograd.grad(out, mix, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()
"""
PENALIZED = """for _ in range(6):
    real, fake = torch.randn(2048, 1024, device="cuda"), torch.randn(2048, 1024, device="cuda")
    gp = penalty(real, fake)
    loss = D(fake).mean() - D(real).mean() + 10 * gp
    loss.backward(retain_graph=True)
    kept.append(gp)
"""


def test_what_a_backward_made_of_a_graph_is_no_further_one() -> None:
    """A gradient penalty's graph has parts that later backwards made of the same forward, and keep."""
    said = told(measured(PENALTY, PENALIZED), "kept_graphs")
    assert "keeps the graphs of 5 iterations" in said, said
