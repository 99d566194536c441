"""Constructs from public threads: what is said of them is so, its remedy helps, and what is meant is not blamed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from causes_cells import Notebook, names, notebook

from gpumem_magic import Report
from gpumem_magic.causes.source import mentioned_and_unread
from gpumem_magic.report.model import Cause

TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("cuda"):
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4)).train()
optimizer = torch.optim.SGD(llm.parameters(), lr=0.1)
ids = torch.randint(0, 64, (32, 512), device="cuda")
def steps(**more):
    for _ in range(3):
        out = llm(input_ids=ids, labels=ids, **more)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "cell",
    [
        "models = []\nfor _ in range(6):\n    models.append(nn.Linear(2048, 2048).cuda())\n"
        "with torch.no_grad():\n    y = sum(one(x) for one in models)",
        "for layer in layers:\n    layer.adapter = nn.Linear(2048, 2048).cuda()\n"
        "y = sum(one.adapter(x) for one in layers).sum()\ny.backward()",
        "for layer in layers:\n    layer.register_buffer('cache', torch.zeros(1 << 20, device='cuda'))\n"
        "with torch.no_grad():\n    for layer in layers:\n        layer.cache[:8].copy_(x[0, :8])",
    ],
)
def test_a_loop_that_puts_a_model_together_is_no_growth(cell: str) -> None:
    with notebook() as book:
        book.cell("layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(6)).cuda()\n" + X)
        report = book.measured(cell)
        assert report.error is None
        assert "growth" not in names(report)


def test_a_loop_that_trains_and_keeps_models_is_told_as_models() -> None:
    with notebook() as book:
        book.cell(X)
        report = book.measured(
            "kept = []\nfor _ in range(6):\n    model = nn.Linear(2048, 2048).cuda()\n    model(x).sum().backward()\n"
            "    kept.append(model)"
        )
        (cause,) = [one for one in report.causes if one.name == "growth"]
        assert "keep the models that are used later on the host (`.cpu()`)" in cause.remedy


X = "x = torch.randn(64, 2048, device='cuda')\n"
THROUGH = """
body = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3)]).cuda()
{trained}
optimizer = torch.optim.SGD({parameters}, lr=0.1)
def steps():
    for _ in range(3):
        optimizer.zero_grad()
        {given}.pow(2).mean().backward()
        optimizer.step()
"""


def untrained(book: Notebook, trained: str, parameters: str, given: str) -> tuple[Report, Cause]:
    """What three steps show, and that no optimizer trains the body."""
    book.cell(THROUGH.format(trained=trained, parameters=parameters, given=given))
    report = book.measured("steps()")
    (cause,) = [one for one in report.causes if one.name == "untrained_gradients"]
    return report, cause


def test_what_gradients_go_through_is_kept_for_what_is_trained_in_front_of_it() -> None:
    """Freezing it spares its weights' gradients and the inputs that they need, and no more."""
    with notebook() as book:
        before, cause = untrained(
            book,
            trained="image = torch.randn(16384, 512, device='cuda', requires_grad=True)",
            parameters="[image]",
            given="body(image)",
        )
        assert "goes" not in cause.text
        assert "go through it to what is trained" in cause.remedy
        assert "no_grad" not in cause.remedy
        book.cell("body.zero_grad()\nbody.requires_grad_(False)")
        after = book.measured("steps()")
        assert "untrained_gradients" not in names(after)
        saved = before.peak.allocated - after.peak.allocated
        assert 0.7 * cause.bytes <= saved <= 1.1 * cause.bytes


def test_a_network_that_only_measures_behind_another_is_still_told() -> None:
    with notebook() as book:
        _, cause = untrained(
            book,
            trained="head = nn.Linear(512, 512).cuda()\nx = torch.randn(16384, 512, device='cuda')",
            parameters="head.parameters()",
            given="(head(x) - body(x))",
        )
        assert "torch.no_grad()" in cause.remedy


def test_batches_that_lie_ready_are_no_batch_of_which_half_would_take_half() -> None:
    moved = "parts = [one.cuda() for one in torch.empty(60, 256, 8192)]\n"
    with notebook() as book:
        book.cell("net = nn.Linear(8192, 4).cuda()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
        report = book.measured(
            f"{moved}for part in parts:\n    optimizer.zero_grad()\n    net(part).sum().backward()\n    optimizer.step()"
        )
        assert "whole_batch" not in names(report)


def test_unpacked_weights_are_no_batch() -> None:
    with notebook() as book:
        book.cell(
            "class Packed(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('q', torch.zeros(4096, 4096, dtype=torch.int8))\n"
            "    def forward(self, x):\n        return x @ (self.q.float() * 2).t()\n"
            "packed = nn.Sequential(*[Packed() for _ in range(6)]).cuda()\nfirst = nn.Linear(4096, 4096).cuda()"
        )
        report = book.measured("packed(first(torch.randn(16, 4096, device='cuda'))).sum().backward()")
        assert report.peak.allocated > 384 << 20
        assert "whole_batch" not in names(report)


def test_all_who_hold_the_former_optimizer_have_to_let_go() -> None:
    build = (
        "model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()\n"
        "{optimizer} = torch.optim.Adam(model.parameters())"
    )
    with notebook() as book:
        book.cell(build.format(optimizer="first") + f"\n{X}model(x).sum().backward()\nfirst.step()")
        book.cell("scheduler = torch.optim.lr_scheduler.StepLR(first, 1)")
        report = book.measured(build.format(optimizer="second"))
        (cause,) = [one for one in report.causes if one.name == "model_built_again"]
        assert "`first` and `scheduler` hold" in cause.text
        before = book.allocated()
        book.cell("del first, scheduler")
        assert before - book.allocated() == cause.bytes > 4 * 60 << 20


def test_a_cache_that_training_makes_is_not_needed() -> None:
    pytest.importorskip("transformers")
    with notebook() as book:
        book.cell(TRANSFORMERS)
        cached, plain = book.measured("steps()"), book.measured("steps(use_cache=False)")
        (cause,) = [one for one in cached.causes if one.name == "cache_in_training"]
        assert "`use_cache=False`" in cause.remedy
        assert not {"cache_in_training", "key_value_cache"}.intersection(names(plain))
        assert cached.peak.allocated - plain.peak.allocated >= 0.5 * cause.bytes


def test_a_cache_of_a_given_length_says_for_how_many_positions_it_has_room() -> None:
    pytest.importorskip("transformers")
    with notebook() as book:
        book.cell(TRANSFORMERS)
        report = book.measured(
            "from transformers import StaticCache\ncache = StaticCache(config=llm.config, max_cache_len=4096)\n"
            "with torch.no_grad():\n    out = llm.eval()(ids[:, :8], past_key_values=cache, use_cache=True)"
        )
        (cause,) = [one for one in report.causes if one.name == "key_value_cache"]
        assert "with room for 4,096 positions of every sequence of the batch, of which 8 were written to" in cause.text
        assert "`max_cache_len`" in cause.remedy


def test_scores_without_a_backward_are_no_loss_in_parts() -> None:
    cell = "{on}:\n    y = head(h).log_softmax(-1){then}"
    with notebook() as book:
        book.cell("head = nn.Linear(64, 50000).cuda()\nh = torch.randn(2048, 64, device='cuda')")
        assert "wide_loss" not in names(book.measured(cell.format(on="with torch.no_grad()", then="")))
        assert "wide_loss" in names(book.measured(cell.format(on="if True", then="\n    y.mean().backward()")))


def test_a_graph_in_a_traceback_goes_by_the_variable_that_has_it() -> None:
    with notebook() as book:
        book.cell(
            f"model = net(512)\n{X}def train():\n    loss = model(x.repeat(64, 1)[:, :512]).mean()\n    raise OSError"
        )
        book.cell("train()")
        report = book.measured("y = x + 1")
        (cause,) = [one for one in report.causes if one.name == "pinned_by_traceback"]
        assert "chiefly the graph of local `loss` of train()." in cause.text


def test_what_a_library_calls_its_own_is_no_name_of_what_an_error_pins() -> None:
    with notebook() as book:
        book.cell("nn.Linear(3, 3).cuda()(mib(64))")
        report = book.measured("y = mib(1)")
        (cause,) = [one for one in report.causes if one.name == "pinned_by_traceback"]
        assert cause.text == "The last error's traceback (RuntimeError, In [3]) pins 64.0 MiB that nothing else holds."


def test_what_grows_is_placed_where_a_function_of_another_cell_hands_it_over() -> None:
    with notebook() as book:
        book.cell(
            "import threading, queue\nresults = queue.Queue()\nmodel = nn.Linear(2048, 2048).cuda()\n@torch.no_grad()\n"
            "def work():\n    for _ in range(8):\n        results.put(model(torch.ones(1024, 2048, device='cuda')))"
        )
        report = book.measured("thread = threading.Thread(target=work)\nthread.start()\nthread.join()")
        (cause,) = [one for one in report.causes if one.name == "growth"]
        put = "In [3], line 7 (`results.put(model(torch.ones(1024, 2048, device='cuda')))`)"
        assert f"it is held by `results.queue`, put there at {put}." in cause.text
    with notebook() as book:
        book.cell("from functools import lru_cache\n@lru_cache\ndef made(a, b):\n    return mib(8).add(1)")
        report = book.measured("for i in range(6):\n    made(i, 1)")
        (cause,) = [one for one in report.causes if one.name == "growth"]
        assert "held by `made`," in cause.text


LOGITS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(20000, 64), nn.Linear(64, 20000, bias=False)
    def forward(self, ids):
        return self.head(self.emb(ids))
model = Words().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(0, 20000, (4096,), device="cuda")
"""
STEP = """
for _ in range(3):
    logits = model(ids){more}
    loss = F.cross_entropy(logits, ids)
    {let_go}loss.backward()
    opt.step()
    opt.zero_grad(){after}
"""


def peak_with(book: Notebook, cell: str) -> float:
    """The peak of a cell as its row has it, in MiB."""
    return book.measured(cell).peak.allocated / 2**20


def promised(cause: Cause) -> float:
    found = re.search(r"the peak would be (?:about )?([\d,.]+) MiB", cause.remedy)
    assert found is not None, cause.remedy
    return float(found[1].replace(",", ""))


def test_what_nothing_reads_any_more_is_told_with_the_peak_that_comes_of_it() -> None:
    with notebook("T4") as book:
        book.cell(f"import torch.nn.functional as F{LOGITS}")
        report = book.measured(STEP.format(more="", let_go="", after=""))
        (cause,) = [one for one in report.causes if one.name == "wide_loss"]
        assert "`del logits` before `loss.backward()` (line 6)" in cause.remedy
        assert "unread_results" not in names(report)
        peak = peak_with(book, STEP.format(more="", let_go="del logits; ", after=""))
        assert abs(peak - promised(cause)) < 1
        assert report.peak.allocated / 2**20 - peak > 300


# A step that is a function, and a model that keeps what it has put out.
IN_A_FUNCTION = """
def step(ids):
    logits = model(ids){more}
    loss = F.cross_entropy(logits, ids)
    {let_go}loss.backward()
    {after}
"""
IN_AN_ATTRIBUTE = """
class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, ids):
        self.kept = self.model(ids){more}
        return F.cross_entropy(self.kept, ids)
keeping = Keeping()
def look(): return {look}
"""
STEPS = "for _ in range(3):\n    step(ids)"
KEEPING = "for _ in range(3):\n    loss = keeping(ids)\n    {let_go}loss.backward()\n    {after}"


@pytest.mark.parametrize(
    ("setup", "cell", "says", "let_go"),
    [
        (IN_A_FUNCTION.format(more="", let_go="{let_go}", after="pass"), STEPS, "`del logits` before", "del logits; "),
        (
            IN_AN_ATTRIBUTE.format(more="", look="None"),
            KEEPING.format(let_go="{let_go}", after="pass"),
            "`keeping.kept = None` before `loss.backward()` (line 4)",
            "keeping.kept = None; ",
        ),
    ],
)
def test_so_is_what_a_function_or_an_object_keeps(setup: str, cell: str, says: str, let_go: str) -> None:
    with notebook("T4") as book:
        book.cell(f"import torch.nn.functional as F{LOGITS}{setup.replace('{let_go}', '')}")
        report = book.measured(cell.replace("{let_go}", ""))
        (cause,) = [one for one in report.causes if one.name == "wide_loss"]
        assert says in cause.remedy
        book.cell(setup.replace("{let_go}", let_go))
        peak = peak_with(book, cell.replace("{let_go}", let_go))
        assert abs(peak - promised(cause)) < 1
        assert report.peak.allocated / 2**20 - peak > 300


@pytest.mark.parametrize(
    ("setup", "cell"),
    [
        # read behind the backward, by what is returned, by a function in it, by all that it has; saved by the graph
        (IN_A_FUNCTION.format(more="", let_go="", after="print(logits[0, 0] * 0)"), STEPS),
        (IN_A_FUNCTION.format(more="", let_go="", after="return logits"), STEPS),
        (IN_A_FUNCTION.format(more="", let_go="f = lambda: logits; ", after="pass"), STEPS),
        (IN_A_FUNCTION.format(more="", let_go="", after="len(locals())"), STEPS),
        (IN_A_FUNCTION.format(more=".exp()", let_go="", after="pass"), STEPS),
        # whoever called it has it, too
        ("def step(logits):\n    logits.logsumexp(1).mean().backward()", "for _ in range(3):\n    step(model(ids))"),
        # another part of the program reads it
        (IN_AN_ATTRIBUTE.format(more="", look="keeping.kept.sum()"), KEEPING.format(let_go="", after="pass")),
        (IN_AN_ATTRIBUTE.format(more="", look="getattr(keeping, 'kept')"), KEEPING.format(let_go="", after="pass")),
        (IN_AN_ATTRIBUTE.format(more="", look="None"), KEEPING.format(let_go="", after="top = keeping.kept.sum()")),
        (IN_AN_ATTRIBUTE.format(more=".exp()", look="None"), KEEPING.format(let_go="", after="pass")),
    ],
)
def test_and_not_what_may_be_read(setup: str, cell: str) -> None:
    with notebook("T4") as book:
        book.cell(f"import torch.nn.functional as F{LOGITS}{setup}")
        report = book.measured(cell)
        assert report.error is None
        assert not any("nothing reads any more" in one.sentence for one in report.causes)


@pytest.mark.parametrize(
    ("more", "after"),
    [
        # read behind the step; by the next turn, before it has another; saved by the graph; read by a function
        ("", "\n    top = logits[:, 0].sum()"),
        ("\n    seen = old.sum() if _ else 0\n    old = logits", ""),
        (".exp()", ""),
        ("\n    shown = lambda: logits", ""),
    ],
)
def test_what_is_read_or_saved_is_not_to_be_let_go_of(more: str, after: str) -> None:
    with notebook("T4") as book:
        book.cell(f"import torch.nn.functional as F{LOGITS}")
        report = book.measured(STEP.format(more=more, let_go="", after=after))
        assert not [one for one in report.causes if "del logits" in one.remedy], more or after


def test_models_from_before_that_a_cell_does_not_use_are_told_and_come_back() -> None:
    with notebook("T4") as book:
        book.cell(
            "encoder = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()\nmodel = nn.Linear(512, 512).cuda()\n"
            "x = torch.zeros(64, 512, device='cuda')\ndef through(x):\n    return encoder(x)"
        )
        cell = "with torch.no_grad():\n    y = model(x)"
        (cause,) = [one for one in book.measured(cell).causes if one.name == "unused_models"]
        assert cause.text.startswith("This cell does not use `encoder` (128 MiB)")
        assert cause.remedy == "`encoder.cpu()` frees 128 MiB, and `encoder.cuda()` brings the weights back."
        # A function of the user's that it names leads there.
        assert "unused_models" not in names(book.measured(f"{cell}\nuses = through"))
        before = book.allocated()
        book.cell("encoder.cpu()")
        assert before - book.allocated() == 128 << 20 | (8 * 2048 * 4)


def test_an_optimizer_and_its_model_from_before_go_together() -> None:
    with notebook("T4") as book:
        book.cell(
            "old = nn.Linear(2048, 2048).cuda()\nopt = torch.optim.Adam(old.parameters())\n"
            "old(torch.zeros(8, 2048, device='cuda')).sum().backward()\nopt.step(); opt.zero_grad()\n"
            "for p in old.parameters():\n    pass\n"
            "best = nn.Linear(2048, 2048).cuda()\nx = torch.zeros(64, 2048, device='cuda')"
        )
        (cause,) = [one for one in book.measured("y = best(x)").causes if one.name == "unused_models"]
        assert cause.text.startswith("This cell uses neither `opt` (32.0 MiB) nor `old` (16.0 MiB)"), cause.text
        # (The bias, which a loop has left in `p`, goes with its model.)
        assert cause.remedy.startswith("Where no later cell needs `opt`, `del opt; old.cpu()` frees "), cause.remedy
        assert cause.remedy.endswith(" An optimizer's states are lost then."), cause.remedy
        before = book.allocated()
        book.cell("del opt; old.cpu()")
        freed = re.search(r"frees ([\d.]+) MiB", cause.remedy)
        assert freed is not None
        assert abs((before - book.allocated()) / 2**20 - float(freed[1])) < 0.2


USERS = """
import copy, functools
def average(new, old):
    with torch.no_grad():
        for one, other in zip(new.parameters(), old.parameters()):
            other.lerp_(one, 0.1)
@torch.no_grad()
def decorated():
    average(net, mean)
def made(new, old):
    def closure():
        average(new, old)
    return closure
class Trainer:
    def __init__(self):
        self.hooks = [made(net, mean)]
    def run(self):
        [hook() for hook in self.hooks]
net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
mean = copy.deepcopy(net)
closed, part, trainer, tasks = made(net, mean), functools.partial(average, net, mean), Trainer(), {"mean": decorated}
other = lambda: None
x = torch.ones(8, 2048, device="cuda")
"""


@pytest.mark.parametrize(
    ("call", "used"),
    [
        ("decorated()", True),
        ("closed()", True),
        ("part()", True),
        ("trainer.run()", True),
        ("tasks['mean']()", True),
        ("other()", False),
    ],
)
def test_a_model_that_a_function_leads_to_is_used(call: str, used: bool) -> None:
    with notebook("T4") as book:
        book.cell(USERS)
        causes = names(book.measured(f"y = net(x)\n{call}"))
        assert ("unused_models" not in causes) == used


ZEROED = """
for _ in range(3):
    model(x).pow(2).mean().backward()
    opt.step()
    {clear}
"""


@pytest.mark.parametrize(
    "clear", ["opt.zero_grad(set_to_none=False)", "for p in model.parameters(): p.grad.data.zero_()"]
)
def test_gradients_filled_with_zeros_are_there_in_the_next_forward(clear: str) -> None:
    with notebook("T4") as book:
        book.cell(
            "model = net(2048, 8)\nopt = torch.optim.Adam(model.parameters())\nx = torch.zeros(4096, 2048, device='cuda')"
        )
        (cause,) = [one for one in book.measured(ZEROED.format(clear=clear)).causes if one.name == "zeroed_gradients"]
        book.cell("opt.zero_grad()")
        after = book.measured(ZEROED.format(clear="opt.zero_grad()"))
        assert "zeroed_gradients" not in names(after)
        peak = after.peak.allocated / 2**20
        assert abs(peak - promised(cause)) < 0.03 * peak


def test_the_gradients_of_activations_go_where_a_hook_looks_at_them() -> None:
    loop = "h, {name} = x, []\nfor layer in model:\n    h = layer(h)\n    {keep}\nh.pow(2).mean().backward()"
    with notebook("T4") as book:
        book.cell(
            "model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]).cuda()\n"
            "x = torch.zeros(16384, 1024, device='cuda')"
        )
        report = book.measured(loop.format(name="acts", keep="h.retain_grad(); acts.append(h)"))
        (cause,) = [one for one in report.causes if one.name == "retained_gradients"]
        assert "`h.register_hook(lambda g: norms.append(g.norm()))`" in cause.remedy
        book.cell("del acts, h; model.zero_grad()")
        peak = peak_with(book, loop.format(name="norms", keep="h.register_hook(lambda g: norms.append(g.norm()))"))
        assert abs(peak - promised(cause)) < 0.05 * peak


def test_what_a_call_was_asked_to_give_of_every_layer_goes_by_its_keyword() -> None:
    with notebook("T4") as book:
        book.cell(
            "class Encoder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))\n"
            "    def forward(self, x, output_hidden_states=False):\n        states = []\n        for layer in self.layers:\n"
            "            x = layer(x)\n            states += [x] if output_hidden_states else []\n"
            "        return {'last': x, 'hidden_states': tuple(states)}\n"
            "model = Encoder().cuda()\nx = torch.zeros(16384, 512, device='cuda')"
        )
        cell = "with torch.no_grad():\n    out = model(x{more})\n    y = out['last'].mean()"
        (cause,) = [
            one
            for one in book.measured(cell.format(more=", output_hidden_states=True")).causes
            if one.name == "asked_for"
        ]
        assert "(line 3) has the hidden states of every layer kept in `out['hidden_states']`" in cause.text
        assert "asked_for" not in names(book.measured(cell.format(more="")))


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("torch.no_grad()\nkept = []", "`torch.no_grad()` by itself (line 2) switches nothing off"),
        ("kept = []\ntorch.set_grad_enabled(True)", ""),
    ],
)
def test_a_context_that_is_only_called_is_told(switch: str, words: str) -> None:
    with notebook("T4") as book:
        book.cell("model = net(1024).eval()\nx = torch.zeros(4096, 1024, device='cuda')")
        report = book.measured(f"{switch}\nfor _ in range(5):\n    kept.append(model(x))")
        (cause,) = [one for one in report.causes if one.name == "missing_no_grad"]
        assert words in cause.remedy
        assert bool(words) == ("by itself" in cause.remedy)


def test_no_grad_is_each_threads_own() -> None:
    cell = (
        "from concurrent.futures import ThreadPoolExecutor\nwith torch.no_grad(), ThreadPoolExecutor(2) as pool:\n"
        "    outs = list(pool.map({run}, [x] * 5))"
    )
    with notebook("T4") as book:
        book.cell("model = net(1024).eval()\nx = torch.zeros(4096, 1024, device='cuda')")
        (cause,) = [one for one in book.measured(cell.format(run="model")).causes if one.name == "missing_no_grad"]
        assert "(line 3) holds for its own thread" in cause.remedy
        assert "missing_no_grad" not in names(book.measured(cell.format(run="torch.no_grad()(lambda x: model(x))")))


def test_threads_are_known_by_what_runs() -> None:
    # Nothing that is typed in the notebook says so.
    cell = (
        "import concurrent.futures as futures\nwith torch.no_grad(), {pool} as pool:\n"
        "    outs = list(pool.map(model, [x] * 5))"
    )
    with notebook("T4") as book:
        book.cell("model = net(1024).eval()\nx = torch.zeros(4096, 1024, device='cuda')")
        book.cell("import concurrent.futures as futures\nMADE = getattr(futures, 'Thr' + 'eadPoolExecutor')")
        (cause,) = [one for one in book.measured(cell.format(pool="MADE(2)")).causes if one.name == "missing_no_grad"]
        assert "keeps the graphs of 5 iterations" in cause.text


POOL = """
class Pool:
    def __init__(self): self.images = []
    def query(self, image):
        if len(self.images) < {most}:
            self.images.append(image)
        else:
            old, self.images[0] = self.images[0], image
pool = Pool()
"""


@pytest.mark.parametrize(("most", "found"), [(50, True), (2, False)])
def test_a_list_that_is_filled_and_then_replaced_names_the_statement_that_fills_it(most: int, found: bool) -> None:
    with notebook() as book:
        book.cell(POOL.format(most=most))
        report = book.measured("for _ in range(8):\n    pool.query(mib(8))")
        told = [one for one in report.causes if one.name == "growth"]
        assert bool(told) == found
        assert all("(`self.images.append(image)`)" in one.text for one in told)


def test_a_dictionary_under_a_key_still_names_its_own_statement() -> None:
    with notebook() as book:
        report = book.measured("seen = {}\nfor i in range(8):\n    seen[i] = mib(8)")
        (cause,) = [one for one in report.causes if one.name == "growth"]
        assert "`seen[i] = mib(8)`" in cause.text


def test_tracing_wants_no_graph() -> None:
    cell = "traced = torch.jit.trace(model, x)"
    with notebook("T4") as book:
        book.cell(
            "model = nn.Sequential(*[net(1024) for _ in range(4)]).eval()\nx = torch.zeros(16384, 1024, device='cuda')"
        )
        report = book.measured(cell)
        (cause,) = [one for one in report.causes if one.name == "missing_no_grad"]
        assert cell.removeprefix("traced = ") in cause.text
        assert "with `check_trace=False`" in cause.remedy
        after = book.measured(f"with torch.no_grad():\n    {cell.replace('x)', 'x, check_trace=False)')}")
        assert "missing_no_grad" not in names(after)
        assert after.peak.allocated <= report.peak.allocated - cause.bytes // 2


ENCODED = """
mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, {out})).cuda()
def encode(x):
    return torch.cat([torch.sin(x * 2**i) for i in range(16)], -1)
points = torch.zeros({count}, 4, device="cuda")
"""


def test_many_points_at_once_are_told_and_half_of_them_take_what_is_said() -> None:
    with notebook("T4") as book:
        book.cell(ENCODED.format(out=1, count=4_000_000))
        report = book.measured("with torch.no_grad():\n    sigma = mlp(encode(points))")
        (cause,) = [one for one in report.causes if one.name == "whole_batch"]
        assert "All 4,000,000 items go through `mlp` at once" in cause.text
        halves = book.measured(
            "with torch.no_grad():\n    sigma = torch.cat([mlp(encode(one)) for one in points.chunk(2)])"
        )
        saved = report.peak.allocated - halves.peak.allocated
        said = re.search(r"about ([\d,]+) MiB less", cause.remedy)
        assert said is not None
        assert saved / 2**20 == pytest.approx(float(said[1].replace(",", "")), rel=0.05)
        # In parts it is no news.
        assert "whole_batch" not in names(halves)


@pytest.mark.parametrize(("out", "count"), [(4096, 200_000), (1, 50_000)])
def test_results_that_are_kept_and_few_items_want_no_parts(out: int, count: int) -> None:
    with notebook("T4") as book:
        book.cell(ENCODED.format(out=out, count=count))
        report = book.measured("with torch.no_grad():\n    sigma = mlp(encode(points))")
        assert "whole_batch" not in names(report)


def test_of_two_states_the_one_that_is_not_detached_carries_the_graph() -> None:
    cell = (
        "for _ in range(6):\n    h{also} = h.detach(){its}\n    h, c = cell(x, (h, c))\n"
        "    h.mean().backward(retain_graph=True)"
    )
    with notebook("T4") as book:
        book.cell("cell = nn.LSTMCell(512, 512).cuda()\nx = torch.zeros(8192, 512, device='cuda')\nh = c = x.clone()")
        (cause,) = [one for one in book.measured(cell.format(also="", its="")).causes if one.name == "kept_graphs"]
        assert "`c = c.detach()` after each iteration" in cause.remedy
        assert "kept_graphs" not in names(book.measured(cell.format(also=", c", its=", c.detach()")))


def test_the_best_of_several_is_chosen_without_graphs() -> None:
    with notebook("T4") as book:
        book.cell("model = net(1024)\nx = torch.zeros(16384, 1024, device='cuda')\nbest = None")
        report = book.measured(
            "for turn in range(4):\n    loss = model(x).mean()\n    if turn == 1:\n        best = loss\nbest.backward()"
        )
        (cause,) = [one for one in report.causes if one.name == "missing_no_grad"]
        assert cause.remedy.startswith("Choose inside `with torch.no_grad():`")


def test_an_evaluation_after_training_chooses_nothing() -> None:
    with notebook("T4") as book:
        book.cell(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = net(1024)\n"
            "    def forward(self, x):\n        return self.body(x)\n"
            "model = Net().cuda()\nx = torch.zeros(16384, 1024, device='cuda')"
        )
        report = book.measured(
            "for part in x.split(4096):\n    model(part).mean().backward()\nright = model(x).argmax(1).sum()"
        )
        (cause,) = [one for one in report.causes if one.name == "missing_no_grad"]
        assert cause.remedy.startswith("Run it inside `with torch.no_grad():`"), cause.remedy


def test_of_a_call_that_trains_and_evaluates_a_part_wants_no_graph(tmp_path: Path) -> None:
    (tmp_path / "experiment_that_evaluates.py").write_text(
        "def train(model, x):\n    for part in x.split(4096):\n        model(part).mean().backward()\n"
        "    return model(x).argmax(1).sum()\n"
    )
    with notebook("T4") as book:
        book.cell(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport experiment_that_evaluates as experiment")
        book.cell("model = net(1024)\nx = torch.zeros(16384, 1024, device='cuda')")
        report = book.measured("right = experiment.train(model, x)")
        (cause,) = [one for one in report.causes if one.name == "missing_no_grad"]
        assert cause.remedy.startswith("Run the part of it that no backward follows inside `with torch.no_grad():`")


def test_a_sum_over_all_pairs_products_is_a_product_of_matrices() -> None:
    with notebook("T4") as book:
        book.cell("a, b = torch.zeros(1024, 256, device='cuda'), torch.zeros(2048, 256, device='cuda')")
        report = book.measured("y = (a[:, None] * b[None]).sum(-1)")
        (cause,) = [one for one in report.causes if one.name == "all_pairs"]
        assert cause.remedy.startswith("`a @ b.T` multiplies and sums without storing them"), cause.remedy
        assert peak_with(book, "z = a @ b.T") < 40
        report = book.measured("y = a[:, None] * b[None]")
        assert not [one for one in report.causes if "@" in one.remedy]


def test_outputs_of_which_only_the_sum_is_read_are_added_up() -> None:
    with notebook("T4") as book:
        book.cell("model = nn.Conv2d(3, 16, 1).cuda()\nx = torch.zeros(8, 3, 512, 512, device='cuda')")
        gathers = "with torch.no_grad():\n    outs = [model(x) for _ in range(6)]\n    mean = torch.stack(outs).mean(0)"
        (cause,) = [one for one in book.measured(gathers).causes if one.name == "growth"]
        assert "add them up as they come: `torch.stack(outs).mean(0)` reads nothing else" in cause.remedy
        (cause,) = [
            one
            for one in book.measured(f"{gathers}\n    spread = torch.stack(outs).std(0)").causes
            if one.name == "growth"
        ]
        assert "add them up" not in cause.remedy


def test_one_result_that_pins_all_is_named_once() -> None:
    with notebook("T4") as book:
        book.cell("mib(64)")
        report = book.measured("y = mib(1)")
        (cause,) = [one for one in report.causes if one.name == "pinned_by_out"]
        assert cause.text.endswith("that nothing else holds."), cause.text


def test_repeated_heads_are_not_said_to_be_free_everywhere() -> None:
    cell = "with torch.no_grad():\n    q = torch.zeros(8, 32, 1, 128, device='cuda', dtype=torch.float16)\n"
    repeated = "    k = kv.repeat_interleave(8, dim=1)\n    y = F.scaled_dot_product_attention(q, k, k)"
    as_they_are = "    y = F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)"
    peaks = {}
    for card in ("T4", "A100"):
        with notebook(card) as book:
            book.cell(
                "import torch.nn.functional as F\nkv = torch.zeros(8, 4, 4096, 128, device='cuda', dtype=torch.float16)"
            )
            (cause,) = [one for one in book.measured(cell + repeated).causes if one.name == "expanded_copy"]
            assert "`enable_gqa=True`" in cause.remedy
            assert "FlashAttention (16 bits, no mask, Ampere or newer)" in cause.remedy
            book.cell("del k, y")
            peaks[card] = peak_with(book, cell + as_they_are)
    assert peaks["A100"] < 80 < 256 < peaks["T4"]


STATES = """
cells = nn.ModuleList(nn.LSTMCell(256, 256) for _ in range(2)).cuda()
zero, xs = torch.zeros(8192, 256, device="cuda"), torch.randn(6, 8192, 256, device="cuda")
def step(x, state):
    new = []
    for cell, (h, c) in zip(cells, state):
        h, c = cell(x, (h, c))
        x = h
        new.append({each})
    return x, {whole}
state = {begin}
"""


@pytest.mark.parametrize(
    ("each", "whole", "code"),
    [
        ("(h, c)", "tuple(new)", "tuple(tuple(one.detach() for one in part) for part in state)"),
        ("[h, c]", "new", "[[one.detach() for one in part] for part in state]"),
    ],
)
def test_states_in_states_are_detached_each(each: str, whole: str, code: str) -> None:
    turn = "for x in xs:\n    out, state = step(x, state)\n    out.mean().backward(retain_graph=True)"
    with notebook("T4") as book:
        begin = "[(zero, zero), (zero, zero)]" if whole == "new" else "((zero, zero), (zero, zero))"
        book.cell(STATES.format(each=each, whole=whole, begin=begin))
        report = book.measured(turn)
        (cause,) = [one for one in report.causes if one.name == "kept_graphs"]
        assert f"`state = {code}` after each iteration" in cause.remedy, cause.remedy
        book.cell(f"state = {begin}; del out")
        after = book.measured(f"{turn}\n    state = {code}")
        assert after.error is None
        assert "kept_graphs" not in names(after)
        assert after.peak.allocated < report.peak.allocated - 0.7 * cause.bytes


COPIED = """
import copy
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.zeros(16, 1024, device="cuda")
def step():
    optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
"""
FOLLOWS = (
    "shadow = {{name: p.detach().clone(){cpu} for name, p in model.named_parameters()}}\nfor _ in range(4):\n    step()\n"
    "    for name, p in model.named_parameters():\n        shadow[name].mul_(0.9).add_(p.data{cpu}, alpha=0.1)"
)
RUNS = (
    "reference = copy.deepcopy(model){half}\nfor _ in range(4):\n    step()\n    with torch.no_grad():\n"
    "        reference(x{half})"
)


@pytest.mark.parametrize(
    ("cell", "changed", "part"),
    [
        (FOLLOWS.format(cpu=""), FOLLOWS.format(cpu=".cpu()"), 1.0),
        (RUNS.format(half=""), RUNS.format(half=".bfloat16()"), 0.5),
    ],
)
def test_what_is_said_of_a_second_copy_comes_of_it(cell: str, changed: str, part: float) -> None:
    with notebook("T4") as book:
        book.cell(COPIED)
        report = book.measured(cell)
        (cause,) = [one for one in report.causes if one.name == "second_copy"]
        assert ("would take nothing here" if part == 1.0 else "half of that") in cause.remedy
        book.cell("shadow = reference = None; optimizer.zero_grad()")
        saved = report.peak.allocated - book.measured(changed).peak.allocated
        assert abs(saved - part * cause.bytes) < 0.02 * report.peak.allocated


def test_the_copies_of_the_best_epoch_on_the_host_have_the_peak_that_is_told() -> None:
    cell = "for _ in range(3):\n    step()\n    best = copied(model.state_dict())\n    states = copied(optimizer.state_dict())"
    setup = "optimizer = torch.optim.AdamW(model.parameters())\nfrom torch.utils._pytree import tree_map\n"
    host = "def copied(states):\n    return tree_map(lambda one: one.cpu() if isinstance(one, torch.Tensor) else one, states)"
    with notebook("T4") as book:
        book.cell(f"{COPIED}{setup}copied = copy.deepcopy")
        (cause,) = [one for one in book.measured(cell).causes if one.name == "built_beside"]
    with notebook("T4") as book:
        book.cell(f"{COPIED}{setup}{host}")
        assert abs(peak_with(book, cell) - promised(cause)) < 1


EDGES = """
import torch.utils.checkpoint
made = nn.Linear(8, 48 * 48).cuda()
rows, given = torch.zeros(20000, 48, device="cuda"), torch.zeros(20000, 8, device="cuda")
def messages(rows, given):
    return torch.bmm(rows[:, None], made(given).view(-1, 48, 48))[:, 0]
"""


def test_a_matrix_for_each_row_takes_little_some_rows_at_a_time() -> None:
    with notebook("T4") as book:
        book.cell(EDGES)
        report = book.measured("messages(rows, given).mean().backward()")
        (cause,) = [one for one in report.causes if one.name == "matrices_of_rows"]
        assert "multiplies each of 20,000 rows with a matrix of its own, (48, 48): 176 MiB" in cause.text
        book.cell("made.zero_grad()")
        peak = peak_with(
            book,
            "parts = zip(rows.split(1000), given.split(1000))\n"
            "whole = [torch.utils.checkpoint.checkpoint(messages, *one, use_reentrant=False) for one in parts]\n"
            "torch.cat(whole).mean().backward()",
        )
        assert peak < 60 < report.peak.allocated / 2**20
        # One matrix for many rows is none of each.
        book.cell("made.zero_grad()")
        report = book.measured("torch.bmm(rows.view(40, 500, 48), made(given[:40]).view(-1, 48, 48)).mean().backward()")
        assert "matrices_of_rows" not in names(report)


def test_a_dataset_that_only_its_loader_leads_to_gives_batches() -> None:
    with notebook("T4") as book:
        book.cell(
            "class Frames(torch.utils.data.Dataset):\n    def __init__(self):\n"
            "        self.frames = torch.empty(900, 3, 1080, 1080, device='cuda')\n    def __len__(self): return 900\n"
            "    def __getitem__(self, place): return self.frames[place]\n"
            "ds = Frames()\nloader = torch.utils.data.DataLoader(ds, batch_size=16)"
        )
        report = book.measured(
            "for frames in loader:\n    wide = torch.empty(4 << 30, dtype=torch.uint8, device='cuda')"
        )
        (cause,) = [one for one in report.causes if one.name == "data_on_device"]
        assert cause.text.startswith("The whole dataset lies on the device")


def test_a_layer_of_pytorch_leads_to_what_is_in_it_and_to_its_hooks() -> None:
    def hook(*_: object) -> object:
        return told  # type: ignore[name-defined]  # noqa: F821

    class Own(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return x + kept  # type: ignore[name-defined]  # noqa: F821

    inner = torch.nn.Linear(2, 2)
    inner.register_forward_hook(hook)
    small = torch.nn.Sequential(inner, Own())
    for one in (small, torch.nn.ModuleList([small])):
        used, _ = mentioned_and_unread("net(x)", {"net": one, "inner": inner, "own": small[1]})
        assert {"told", "kept", "inner", "own"} <= used
    assert "other" not in mentioned_and_unread("net(x)", {"net": small, "other": torch.nn.Linear(2, 2)})[0]


def test_logits_that_a_list_keeps_are_not_a_losss() -> None:
    setup = (
        "head = nn.Linear(64, 8000).cuda()\ndef fit(turns):\n    kept = []\n    for _ in range(turns):\n"
        "        logits = head(torch.randn(512, 64, device='cuda'))\n"
        "        F.cross_entropy(logits, torch.zeros(512, dtype=torch.long, device='cuda')).backward()\n"
        "        kept.append(logits.detach())\n    return torch.stack(kept)"
    )
    with notebook("T4") as book:
        book.cell(f"import torch.nn.functional as F\n{setup}")
        assert "wide_loss" not in names(book.measured("scores = fit(40)"))
        # (One loss of that size is told.)
        book.cell(
            "def wide():\n    logits = head(torch.randn(1 << 14, 64, device='cuda'))\n"
            "    F.cross_entropy(logits, torch.zeros(1 << 14, dtype=torch.long, device='cuda')).backward()"
        )
        assert "wide_loss" in names(book.measured("wide()"))
