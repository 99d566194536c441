"""Constructs from public threads: what is said of them is so, its remedy helps, and what is meant is not blamed."""

from __future__ import annotations

import re

import pytest
from causes_cells import Notebook, names, notebook

from gpumem_magic import Report
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


def test_what_grows_without_a_statement_that_adds_it_is_placed_where_it_was_made() -> None:
    with notebook() as book:
        book.cell(
            "import threading, queue\nresults = queue.Queue()\nmodel = nn.Linear(2048, 2048).cuda()\n@torch.no_grad()\n"
            "def work():\n    for _ in range(8):\n        results.put(model(torch.ones(1024, 2048, device='cuda')))"
        )
        report = book.measured("thread = threading.Thread(target=work)\nthread.start()\nthread.join()")
        (cause,) = [one for one in report.causes if one.name == "growth"]
        # (The cell's own thread may still be at the line before.)
        made = re.escape("made by `model(torch.ones(1024, 2048, device='cuda'))`")
        assert re.search(rf"{made} \(line [34], In \[3\]:7 work\)", cause.text), cause.text
    with notebook() as book:
        book.cell("from functools import lru_cache\n@lru_cache\ndef made(a, b):\n    return mib(8).add(1)")
        report = book.measured("for i in range(6):\n    made(i, 1)")
        (cause,) = [one for one in report.causes if one.name == "growth"]
        assert "held by `made`," in cause.text
