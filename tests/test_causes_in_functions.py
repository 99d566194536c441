"""What programs do in functions and objects of their own: the answer names it, and its twin is left alone."""

from __future__ import annotations

import re

import pytest
from causes_cells import names, notebook

from gpumem_magic import Report
from gpumem_magic.views.text import render

GAN = """
G = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
D = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
opt_g, opt_d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
def train_step(n=8192):
    fake = G(torch.randn(n, 64, device="cuda"))
    loss_d = D(fake{detached}).mean() - D(torch.randn(n, 512, device="cuda")).mean()
    opt_d.zero_grad()
    loss_d.backward({retain})
    opt_d.step()
    loss_g = -D(fake).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
"""
RETAINS = GAN.format(detached="", retain="retain_graph=True")
DETACHES = GAN.format(detached=".detach()", retain="")
TABLES = """
class Recommender(nn.Module):
    def __init__(self, rows=1 << 19):
        super().__init__()
        self.items = nn.Embedding(rows, 32, sparse=SPARSE)
        self.users = nn.EmbeddingBag(rows, 32, mode="mean", sparse=SPARSE)
        self.others = nn.EmbeddingBag(rows, 32, mode="mean", sparse=SPARSE)
    def forward(self, history, item):
        return (self.users(history) * self.items(item) + self.others(history)).sum(1)
rec = Recommender().cuda()
opt = OPT
def step():
    history, item = torch.randint(0, 1 << 19, (256, 8), device="cuda"), torch.randint(0, 1 << 19, (256,), device="cuda")
    loss = rec(history, item).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
QUEUE = """
def ahead(batches, depth):
    queue = []
    for batch in batches:
        queue.append(batch.cuda())
        if len(queue) == depth:
            yield queue.pop(0)
    yield from queue
def batches():
    for _ in range(12):
        yield torch.randn(1024, 4096)
weight = torch.zeros(4096, 1, device="cuda")
"""
CACHE = """
TABLES = {}
def table(n):
    if n not in TABLES:
        TABLES[n] = torch.ones(8, n, n, device="cuda")
    return TABLES[n]
"""
ADAPTERS = """
class LoRALinear(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))
model = nn.Sequential(*[LoRALinear() for _ in range(4)]).cuda()
for name, p in model.named_parameters():
    p.requires_grad = "lora" in name or TRAINED
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
"""
STEPS = """for _ in range(3):
    loss = model(torch.randn(8, 1024, device="cuda")).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def cause(report: Report, name: str) -> str:
    (found,) = [one.sentence for one in report.causes if one.name == name]
    return found


def test_a_graph_that_a_function_retains_is_told_with_whom_it_serves() -> None:
    with notebook() as book:
        book.cell(RETAINS)
        report = book.measured("for _ in range(3):\n    train_step()")
        said = cause(report, "retained_graph")
        assert re.search(r"`backward\(retain_graph=True\)` \(In \[\d+\], line 8\) keeps the graph", said)
        assert "goes on into `G`" in said
        assert "`.detach()` its output in the loss of `opt_d`" in said
        # What it says once it says no second time.
        assert "wasted_gradients" not in names(report)
    with notebook() as book:
        book.cell(DETACHES)
        found = names(book.measured("for _ in range(3):\n    train_step()"))
        assert not {"retained_graph", "wasted_gradients"}.intersection(found)


def test_a_graph_of_which_two_losses_share_a_part_is_told_with_that_part() -> None:
    shared = (
        "body = nn.Sequential(nn.Linear(256, 1024), nn.ReLU()).cuda()\nheads = nn.ModuleList(net(1024, 2) for _ in '12').cuda()\n"
        "def step():\n    h = body(torch.randn(4096, 256, device='cuda'))\n    first = heads[0](h).mean()\n"
        "    second = heads[1](h).mean()\n    first.backward({})\n    {}second.backward()\n"
    )
    with notebook() as book:
        book.cell(shared.format("retain_graph=True", ""))
        said = cause(book.measured("for _ in range(3):\n    step()"), "retained_graph")
        assert "Where the next loss shares a part of it" in said
        assert "add up both losses for one backward" in said
    with notebook() as book:
        book.cell(shared.replace("first.backward({})\n    {}second", "(first + second)"))
        assert "retained_graph" not in names(book.measured("for _ in range(3):\n    step()"))


def test_phases_in_functions_go_by_the_notebooks_names() -> None:
    with notebook() as book:
        book.cell(DETACHES)
        said = render(book.measured("train_step()"))
        assert "forward of G" in said
        assert "optimizer step of opt_d" in said
        assert "SGD" not in said


def test_tables_of_which_each_is_a_small_part_are_told_together() -> None:
    with notebook() as book:
        book.cell(TABLES.replace("SPARSE", "False").replace("OPT", "torch.optim.Adam(rec.parameters())"))
        said = cause(book.measured("for _ in range(3):\n    step()"), "dense_lookup_gradient")
        assert "`rec.items.weight`, `rec.others.weight` and `rec.users.weight`" in said
        assert "192 MiB" in said
        assert "524,288 rows" in said
    with notebook() as book:
        book.cell(TABLES.replace("SPARSE", "True").replace("OPT", "torch.optim.SGD(rec.parameters(), lr=0.1)"))
        assert "dense_lookup_gradient" not in names(book.measured("for _ in range(3):\n    step()"))


@pytest.mark.parametrize(("depth", "told"), [(8, True), (2, False)])
def test_batches_that_wait_for_a_loop_are_told_and_are_not_its_variables_yet(depth: int, told: bool) -> None:
    with notebook() as book:
        book.cell(QUEUE)
        report = book.measured(f"for x in ahead(batches(), {depth}):\n    y = x @ weight")
        assert ("data_ahead" in names(report)) is told
        if told:
            assert re.search(r"[67] batches wait on the device for their turn as `x`", cause(report, "data_ahead"))
            (named,) = [one for one in report.tensors() if one.kept_by == "x"]
            assert named.count <= 2


LISTED = """
host = [(torch.randn(1024, 1024), torch.randn(1024, 8)) for _ in range(80)]
net = nn.Linear(1024, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
EPOCHS = """
ready = [(x.cuda(), y.cuda()) for x, y in host]
for _ in range(2):
    for x, y in ready:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
"""


def test_batches_of_a_list_are_told_as_that_lists() -> None:
    with notebook() as book:
        book.cell(LISTED)
        report = book.measured(EPOCHS)
        assert "data_ready" in names(report)
        assert "data_ahead" not in names(report)


def test_a_cache_with_a_table_for_each_length_grows() -> None:
    lengths = [900, 700, 1000, 800, 950, 750]
    with notebook() as book:
        book.cell(CACHE)
        said = cause(book.measured(f"for n in {lengths}:\n    y = table(n).sum()"), "growth")
        assert "leaves about" in said
        assert "`TABLES`" in said
    with notebook() as book:
        book.cell(CACHE)
        assert "growth" not in names(book.measured("for n in [900] * 6:\n    y = table(n).sum()"))


def test_own_weights_that_are_trained_beside_adapters_are_told() -> None:
    with notebook() as book:
        book.cell(ADAPTERS.replace("TRAINED", "True"))
        said = cause(book.measured(STEPS), "trained_beside_adapters")
        assert "`opt` trains the model's own weights beside the adapters" in said
        assert "of states" in said
    with notebook() as book:
        book.cell(ADAPTERS.replace("TRAINED", "False"))
        assert "trained_beside_adapters" not in names(book.measured(STEPS))


def test_a_parameter_that_a_loops_variable_still_names_is_its_models() -> None:
    with notebook() as book:
        book.cell(
            "model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 4096, bias=False)).cuda()\n"
            "for p in model.parameters(): pass"
        )
        report = book.measured("y = model(torch.randn(8, 1024, device='cuda'))")
        assert "p" not in {one.kept_by for one in report.tensors()}


def test_what_a_deleted_tensor_had_goes_by_who_has_it_still() -> None:
    with notebook() as book:
        book.cell("encoder = net(1024, 4)")
        book.cell("features = encoder(torch.randn(4096, 1024, device='cuda'))\nfeatures")
        report = book.measured("del features\nz = torch.zeros(1 << 20, device='cuda')")
        said = cause(report, "del_freed_nothing")
        assert re.search(r"`Out\[\d+\]` still holds", said)
        assert "encoder" not in said
        assert "`%gpumem_free out` frees" in said
        # The same is not said twice, and the table has the name that is left.
        assert "pinned_by_out" not in names(report)
        assert "features" not in {one.kept_by for one in report.tensors()}


GENERATION = """
class Step(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.k, self.v, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
    def forward(self, x, past_key_values=None):
        k, v = self.k(x), self.v(x)
        if past_key_values is not None:
            k, v = torch.cat([past_key_values[0], k], 1), torch.cat([past_key_values[1], v], 1)
        return self.o((x @ k.transpose(1, 2)).softmax(-1) @ v), (k, v)
step = Step().cuda().eval()
def generate(x, n=8):
    past = None
    for _ in range(n):
        x, past = step(x, past)
        x = x[:, -1:]
    return x
prompt = torch.randn(8, 512, 1024, device="cuda")
"""


def test_what_graphs_keep_until_a_function_ends_is_kept_for_backward() -> None:
    with notebook() as book:
        book.cell(GENERATION)
        report = book.measured("text = generate(prompt)")
        assert "missing_no_grad" in names(report)
        kept = sum(one.bytes for one in report.tensors() if one.keeper == "backward")
        assert 2 * kept > report.peak.allocated
        # Forwards one after the other are counted.
        assert "forward 8" in report.peak.where
    with notebook() as book:
        book.cell(GENERATION)
        report = book.measured("with torch.no_grad():\n    text = generate(prompt)")
        assert "missing_no_grad" not in names(report)
        assert not any(one.keeper == "backward" for one in report.tensors())


def test_validation_in_a_function_is_told_to_go_without_a_graph() -> None:
    evaluates = (
        "model, loader = net(1024, 3), [torch.randn(2048, 1024) for _ in range(6)]\n"
        "def evaluate():\n    losses = [model(x.cuda()).square().mean() for x in loader]\n    return sum(losses).item()\n"
    )
    with notebook() as book:
        book.cell(evaluates)
        said = cause(book.measured("evaluate()"), "growth")
        assert "with torch.no_grad():" in said
        assert "(6 iterations)" in said
    with notebook() as book:
        book.cell(evaluates)
        assert "growth" not in names(book.measured("with torch.no_grad():\n    evaluate()"))


SETS = """
class Features:
    def __init__(self):
        self.all = None
    def update(self, x):
        f = x.relu()
        self.all = f if self.all is None else torch.cat([self.all, f])
    def spread(self):
        return (self.all - self.all.mean(0)).square().mean()
features = Features()
"""


def test_what_a_loop_joined_is_told_though_the_peak_comes_later() -> None:
    with notebook() as book:
        book.cell(SETS)
        report = book.measured(
            "for _ in range(8):\n    features.update(torch.randn(4096, 1024, device='cuda'))\nfeatures.spread()"
        )
        assert re.search(r"makes a larger tensor every time.*128 MiB after \d times", cause(report, "joined_in_a_loop"))
    with notebook() as book:
        book.cell(SETS)
        report = book.measured("features.update(torch.randn(32768, 1024, device='cuda'))\nfeatures.spread()")
        assert "joined_in_a_loop" not in names(report)


def test_a_cause_of_less_than_half_leaves_the_rest_to_be_told() -> None:
    with notebook() as book:
        book.cell("kept = []")
        report = book.measured(
            "for _ in range(4):\n    kept.append(torch.randn(4096, 1024, device='cuda').relu())\n"
            "all = torch.cat(kept).relu().sum()"
        )
        assert report.answer.startswith("Each iteration leaves")
        assert re.search(r"Of \d+ MiB at the peak, .*`torch\.cat\(kept\)", report.answer)


def test_data_is_scaled_in_place_where_the_training_comes_later() -> None:
    scales = "x = torch.randint(0, 255, (8192, 8192), dtype=torch.uint8, device='cuda').float() / 255\nx = (x - 0.5) / 0.25\n"
    trains = "loss = (x[:8] @ w).mean()\nloss.backward()"
    with notebook() as book:
        book.cell("w = torch.zeros(8192, 8, device='cuda', requires_grad=True)")
        assert "in_place" in names(book.measured(scales + trains))
    with notebook() as book:
        book.cell("w = torch.zeros(8192, 8, device='cuda', requires_grad=True)")
        assert "in_place" not in names(
            book.measured(scales.replace("x = (x - 0.5) / 0.25", "x.sub_(0.5).div_(0.25)") + trains)
        )


def test_numbers_that_are_no_places_in_an_order_are_left_out() -> None:
    with notebook() as book:
        book.cell("cache = {}")
        report = book.measured(
            "for n in range(6):\n    cache[hash(str(n)) | 1 << 40] = torch.randn(1024, 1024, device='cuda')"
        )
        kept = {one.kept_by for one in report.tensors() if one.kept_by.startswith("cache")}
        assert kept
        assert not any(re.search(r"\d{8}", one) for one in kept if "…" in one)


def test_waste_of_a_sound_program_is_said_first() -> None:
    with notebook() as book:
        book.cell("old = net(2048, 4)")
        report = book.measured(
            "new = net(1024, 2)\nopt = torch.optim.SGD(new.parameters(), lr=0.1)\nfor _ in range(4):\n"
            "    opt.zero_grad()\n    new(torch.randn(8, 1024, device='cuda')).mean().backward()\n    opt.step()"
        )
        assert report.answer.startswith("This cell does not use `old`"), report.answer
        assert "Nothing piles up" in report.answer


def test_tensors_that_are_as_many_as_the_gradients_by_chance_are_no_gradients() -> None:
    trains = "model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)]).cuda()\n"
    trains += "model(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
    with notebook() as book:
        others = "parts = [torch.ones(3 << 18, device='cuda') for _ in range(4)]\n"
        assert "joined_gradients" not in names(book.measured(f"{trains}{others}whole = torch.cat(parts)"))
    with notebook() as book:
        joins = "whole = torch.cat([p.grad.flatten() for p in model.parameters()])"
        assert "joined_gradients" in names(book.measured(trains + joins))


BOTH = """
m = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]).cuda()
opt = torch.optim.AdamW(m.parameters())
def run(batches, training):
    total = 0
    for b in batches:
        loss = m(b.cuda()).pow(2).mean()
        if training:
            opt.zero_grad()
            loss.backward()
            opt.step()
        total += loss
    return total / len(batches)
train, val = [torch.randn(512, 512)] * 3, [torch.randn(2048, 512)] * 3
"""
OF_BOTH = "for epoch in range(2):\n    tr = run(train, True)\n    va = run(val, False){}"


def test_what_a_function_sums_up_that_trains_and_evaluates_keeps_graphs() -> None:
    with notebook("A100-40GB") as book:
        book.cell(BOTH)
        assert (
            "`va` keeps the graphs of 3 iterations (line 4), though no backward follows"
            in book.measured(OF_BOTH.format("")).answer
        )
        assert "graphs of" not in book.measured(OF_BOTH.format(".item()")).answer
    with notebook("virtual:1GiB") as book:
        book.cell(BOTH)
        answer = book.measured(OF_BOTH.format("")).answer
        assert answer.startswith("Out of memory at line 4")
        assert "`va` (line 4) keeps the graphs of 3 iterations alive" in answer


@pytest.mark.parametrize(("size", "turns"), [(2048, 4), (4500, 2)])
def test_who_evaluates_with_a_graph_in_a_loop_that_would_train_is_told_so(size: int, turns: int) -> None:
    with notebook("virtual:1GiB") as book:
        book.cell(BOTH.replace("[torch.randn(2048, 512)] * 3", f"[torch.randn({size}, 512)] * 9"))
        answer = book.measured("tr = run(train, True)\nva = run(val, False)").answer
        assert answer.startswith("Out of memory at line 3")
        assert f"of run() keep the graphs of {turns} iterations, though no backward follows" in answer
        # Where the turns train, it was on its way to a backward.
        report = book.measured("tr = run(val, True)")
        assert not {"missing_no_grad", "kept_graphs"} & {one.name for one in report.causes}


@pytest.mark.parametrize(
    "call",
    [
        # Views at one line before a backward; losses that are added up for one of several turns.
        "for views in sets:\n    zs = [m(v.cuda()) for v in views]\n"
        "    loss = sum(z.pow(2).mean() for z in zs)\n"
        "    if training:\n        opt.zero_grad()\n        loss.backward()\n        opt.step()",
        "for views in sets:\n    total = 0\n    for i, v in enumerate(views):\n"
        "        total = total + m(v.cuda()).pow(2).mean()\n"
        "        if (i + 1) % len(views) == 0:\n            total.backward()\n            opt.step()",
        "zs = [m(v.cuda()) for v in sets[1]]\nsum(z.mean() for z in zs).backward()",
    ],
    ids=["views", "added up", "in a list"],
)
def test_graphs_on_the_way_to_a_backward_are_not_said_to_be_for_none(call: str) -> None:
    with notebook("virtual:1GiB") as book:
        book.cell(BOTH + "sets, training = [[torch.randn(256, 512)] * 2, [torch.randn(2048, 512)] * 9], True")
        report = book.measured(call)
        assert report.answer.startswith("Out of memory")
        assert not {"missing_no_grad", "kept_graphs"} & {one.name for one in report.causes}
        book.cell("def go():\n" + "\n".join("    " + line for line in call.splitlines()))
        report = book.measured("go()")
        assert report.answer.startswith("Out of memory")
        assert not {"missing_no_grad", "kept_graphs"} & {one.name for one in report.causes}
