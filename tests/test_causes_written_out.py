"""What PyTorch has one operator for, weights that are there several times, and containers that a library or Python fills."""

from __future__ import annotations

import pytest
from causes_cells import named, names, notebook

from gpumem_magic.views.text import render

BLOCKS = """
import math
import torch.nn.functional as F
class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(512, 2048), nn.Linear(2048, 512), act
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))
def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
def exact(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
def swish(x):
    return x * torch.sigmoid(x)
def mish(x):
    return x * torch.tanh(F.softplus(x))
def gate(x):
    return x * torch.sigmoid(x + 1)
def dropout_layer(X, dropout=0.5):
    mask = (torch.rand(X.shape, device=X.device) > dropout).float()
    return mask * X / (1.0 - dropout)
class LayerNorm(nn.Module):
    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return 2 * (x - mean) / (std + 1e-6) + 1
def rmse(x):
    return x + ((x - 1) ** 2).mean(-1).sqrt()[:, None]
def draws(x):
    return x / (1 - 0.1) if torch.rand(1) > 0.5 else x / (1 - 0.2)
class Norm(nn.Module):
    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
def train(act, dtype=torch.float32):
    blocks = nn.Sequential(*[Block(act) for _ in range(4)]).cuda().to(dtype)
    blocks(torch.randn(8192, 512, device="cuda", dtype=dtype)).mean().backward()
"""
TRAINED = "model = {model}\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.randn(64, 1024, device='cuda')"


@pytest.mark.parametrize(
    ("act", "name", "instead"),
    [
        ("gelu", "`gelu()` (In [3], line 10) is GELU written out", 'F.gelu(x, approximate="tanh")'),
        ("exact", "`exact()` (In [3], line 12) is GELU", "`F.gelu(x)`"),
        ("swish", "`swish()` (In [3], line 14) is SiLU", "F.silu"),
        ("mish", "`mish()` (In [3], line 16) is Mish", "F.mish"),
        ("dropout_layer", "`dropout_layer()` (In [3], line 20) is dropout", "F.dropout"),
        ("LayerNorm()", "`LayerNorm` (In [3], line 24) is layer norm", "F.layer_norm"),
    ],
)
def test_what_is_written_out_is_named_with_pytorchs_own(act: str, name: str, instead: str) -> None:
    with notebook("T4") as book:
        book.cell(BLOCKS)
        cause = named(book.measured(f"train({act})"), "written_out")
    assert cause.text.startswith(name), cause.text
    assert instead in cause.remedy


@pytest.mark.parametrize("act", ["nn.GELU()", "nn.SiLU()", "gate", "nn.Dropout(0.5)", "rmse", "draws"])
def test_nothing_is_written_out_where_pytorchs_own_is_used_or_there_is_none(act: str) -> None:
    with notebook("T4") as book:
        book.cell(BLOCKS)
        assert "written_out" not in names(book.measured(f"train({act})"))


@pytest.mark.parametrize(
    ("fused", "less"),
    [
        ("lambda x: F.layer_norm(x, x.shape[-1:])", "LayerNorm()"),
        ("lambda x: F.gelu(x, approximate='tanh')", "gelu"),
        ("F.silu", "swish"),
        ("F.mish", "mish"),
        ("F.dropout", "dropout_layer"),
    ],
)
def test_pytorchs_own_takes_less(fused: str, less: str) -> None:
    with notebook("T4") as book:
        book.cell(BLOCKS)
        written, own = (book.measured(f"train({one})").to_dict()["peak"]["allocated"] for one in (less, fused))
    assert own < written


def test_a_norm_that_is_written_out_in_float32_takes_more_than_pytorchs_own() -> None:
    with notebook("T4") as book:
        book.cell(BLOCKS)
        report = book.measured("train(Norm(), torch.float16)")
        own = book.measured("train(lambda x: F.rms_norm(x, x.shape[-1:], None, 1e-6), torch.float16)")
    cause = named(report, "written_out")
    assert cause.text.startswith("`Norm` (In [3], line 32) is RMSNorm written out"), cause.text
    assert "F.rms_norm" in cause.remedy
    assert "written_out" not in names(own)
    assert own.to_dict()["peak"]["allocated"] < report.to_dict()["peak"]["allocated"]


PUSHED = """
import heapq
hard = []
for i in range(6):
    images = torch.empty(4, 1 << 20, device="cuda")
    heapq.heappush(hard, (i, images[0]))
    if len(hard) > 100:
        heapq.heappop(hard)
"""
CACHED = """
import functools
def remember(function):
    memo = {}
    @functools.wraps(function)
    def wrapper(key):
        if key not in memo:
            memo[key] = function(key)
        return memo[key]
    return wrapper
@remember
def features(key):
    return mib(8)
"""
KEEPER = """
class Keeper:
    def __init__(self):
        self.seen = []
    def look(self, x):
        self.seen.append(x)
    def {name}(self{more}):
        self.seen = []
keeper = Keeper()
"""
STEPS = """
from dataclasses import dataclass
@dataclass
class Step:
    loss: torch.Tensor
    logits: torch.Tensor
def train(model, opt, x):
    steps = []
    for _ in range(8):
        logits = model(x)
        loss = logits.square().mean()
        steps.append(Step(loss{kept}, logits{kept}))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return len(steps)
"""


def test_what_a_heap_keeps_was_pushed() -> None:
    with notebook("T4") as book:
        answer = book.measured(PUSHED).to_dict()["answer"]
    assert "put there at line 7 (`heapq.heappush(hard, (i, images[0]))`)" in answer


def test_a_closures_variable_is_filled_by_the_function_inside() -> None:
    with notebook("T4") as book:
        book.cell(CACHED)
        cause = named(book.measured("for i in range(6):\n    y = features(i)"), "growth")
    assert "put there at In [3], line 7 (`memo[key] = function(key)`)" in cause.text


@pytest.mark.parametrize(("name", "more", "told"), [("free", "", True), ("_free", "", False), ("free", ", now", False)])
def test_a_method_that_empties_what_grows_is_named(name: str, more: str, told: bool) -> None:
    with notebook("T4") as book:
        book.cell(KEEPER.format(name=name, more=more))
        cause = named(book.measured("for i in range(6):\n    keeper.look(mib(8))"), "growth")
    assert ("`keeper.free()` empties it" in cause.remedy) is told


def test_what_all_batches_wait_for_is_named_though_the_last_ones_have_other_names_too() -> None:
    with notebook("T4") as book:
        book.cell(
            "import itertools\nfirst, second = itertools.tee(mib(4) for _ in range(90))\nshape = next(second).shape"
        )
        cause = named(book.measured("for x in first:\n    y = x * 2"), "growth")
    assert "held by `second`" in cause.text
    assert "`del second` lets go of it" in cause.remedy


def test_what_a_functions_list_of_objects_keeps_is_told_by_the_list() -> None:
    with notebook("T4") as book:
        book.cell(TRAINED.format(model="net(1024)"))
        book.cell(STEPS.replace("{kept}", ""))
        book.cell("big = torch.randn(4096, 1024, device='cuda')")
        cause = named(book.measured("n = train(model, opt, big)"), "growth")
        book.cell(STEPS.replace("{kept}", ".sum().item()"))
        assert "growth" not in names(book.measured("n = train(model, opt, big)"))
    assert "it is put into `steps` at In [4], line 11" in cause.text
    assert "no_grad" not in cause.remedy


QUEUE = """
queue = asyncio.Queue({most})
async def produce():
    for _ in range(20):
        await queue.put(images.cuda())
    await queue.put(None)
async def consume():
    done = []
    while (batch := await queue.get()) is not None:
        done.append(model(batch).argmax(1).cpu())
    return done
async def both():
    return (await asyncio.gather(produce(), consume()))[1]
found = await both()
"""


@pytest.mark.parametrize(("most", "told"), [("", True), ("maxsize=2", False)])
def test_what_a_queue_without_an_end_has_on_the_device_is_told(most: str, told: bool) -> None:
    with notebook("T4") as book:
        book.cell("import asyncio\nmodel = nn.Linear(1024, 8).cuda()\nimages = torch.randn(2048, 1024)")
        with_causes = book.measured(QUEUE.format(most=most))
    assert ("data_ahead" in names(with_causes)) is told
    if told:
        assert (
            "Give the queue a `maxsize` (`queue = asyncio.Queue()`, line 3)" in named(with_causes, "data_ahead").remedy
        )


THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
local, meet = threading.local(), threading.Barrier(4)
shared = net(1024)
def work(x):
    meet.wait()
    if not hasattr(local, "model"):
        local.model = {model}
    with torch.no_grad():
        return local.model(x).sum().item()
"""


@pytest.mark.parametrize(("model", "told"), [("net(1024)", True), ("shared", False)])
def test_threads_with_a_model_each(model: str, told: bool) -> None:
    with notebook("T4") as book:
        book.cell(THREADS.format(model=model))
        book.cell("x = torch.randn(8, 1024, device='cuda')")
        book.cell("pool = ThreadPoolExecutor(4)")
        report = book.measured("sums = list(pool.map(work, [x] * 8))")
    assert ("models_of_threads" in names(report)) is told
    if told:
        assert "Each of 4 threads has a model of its own as `local.model`" in named(report, "models_of_threads").text


def test_models_that_are_stacked_are_there_twice() -> None:
    with notebook("T4") as book:
        book.cell("from torch.func import stack_module_state\nmodels = [net(1024) for _ in range(4)]")
        report = book.measured("params, buffers = stack_module_state(models)")
        cause = named(report, "stacked_weights")
        assert "copies the weights of 4 models into stacks" in cause.text
        before = book.allocated()
        book.cell("del models")
        assert f"`del models` frees {round((before - book.allocated()) / 2**20, 1)} MiB" in cause.remedy
        book.cell("few = [torch.randn(1024, 1024, device='cuda') for _ in range(4)]")
        assert "stacked_weights" not in names(book.measured("joined = torch.stack(few)"))


def test_weights_that_a_library_widens_are_told() -> None:
    peft = pytest.importorskip("peft")
    assert peft
    llama = (
        "from transformers import LlamaConfig, LlamaForCausalLM\nconfig = LlamaConfig(vocab_size=2000, hidden_size=512, "
        "intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8)\n"
        "from peft import prepare_model_for_kbit_training\nbase = LlamaForCausalLM(config).to(torch.bfloat16).cuda()"
    )
    with notebook("T4") as book:
        book.cell(llama)
        cause = named(book.measured("base = prepare_model_for_kbit_training(base)"), "widened_weights")
        assert "turns weights of `base` from bfloat16 to float32" in cause.text
        assert not cause.describes
        book.cell(llama)
        assert named(book.measured("base = base.float()"), "widened_weights").describes


RECURRENT = """
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils import parametrize
step = weight_norm(nn.Linear(1024, 1024)).cuda()
def run(x):
    for _ in range(12):
        x = torch.tanh(step(x))
    return x
x = torch.randn(8, 1024, device="cuda")
"""


def test_a_weight_that_each_call_computes_anew_is_told_and_the_remedy_helps() -> None:
    with notebook("T4") as book:
        book.cell(RECURRENT)
        report = book.measured("run(x).mean().backward()")
        assert "computes the weight of `step` from its parametrization anew" in named(report, "recomputed_weights").text
        cached = book.measured("with parametrize.cached():\n    run(x).mean().backward()")
    assert "recomputed_weights" not in names(cached)
    assert cached.to_dict()["peak"]["allocated"] < report.to_dict()["peak"]["allocated"]


def test_what_python_keeps_until_its_end_is_put_down_to_its_registration() -> None:
    run = "class Run:\n    def __init__(self):\n        self.model = net(1024)\n{register}    def save(self):\n        pass"
    with notebook("T4") as book:
        book.cell("import atexit\n" + run.format(register="        atexit.register(self.save)\n"))
        cause = named(book.measured("for _ in range(5):\n    run = Run()"), "growth")
        assert "`atexit.register(self.save)` (In [3], line 5) keeps each function" in cause.text
        book.cell("import atexit\natexit._clear()\n" + run.format(register=""))
        assert "growth" not in names(book.measured("for _ in range(5):\n    run = Run()"))


def test_an_attribute_of_a_module_freezes_nothing() -> None:
    cell = "opt = torch.optim.SGD(head.parameters())\nfor _ in range(3):\n    head(body(x)).mean().backward()\n    opt.step()"
    with notebook("T4") as book:
        book.cell("body, head = net(1024), nn.Linear(1024, 8).cuda()\nx = torch.randn(512, 1024, device='cuda')")
        cause = named(book.measured(f"body.requires_grad = False\n{cell}"), "untrained_gradients")
        assert cause.remedy.startswith(
            "`body.requires_grad = False` (line 2) only gives the module an attribute: `body.requ"
        )
        book.cell("body.requires_grad_(False)\nbody.zero_grad()")
        assert "untrained_gradients" not in names(book.measured(cell))


ACCUMULATED = """
class Trainer:
    def run(self, model, batches):
        acc = 0.0
        for x in batches:
            acc = acc + model(x).mean() / len(batches)
        acc.backward()
trainer = Trainer()
"""


def test_losses_that_a_method_adds_up_are_told_by_their_name() -> None:
    with notebook("T4") as book:
        book.cell(
            ACCUMULATED + "model = net(1024)\nbatches = [torch.randn(2048, 1024, device='cuda') for _ in range(4)]"
        )
        cause = named(book.measured("trainer.run(model, batches)"), "summed_losses")
    assert cause.text.startswith("`acc` (In [3], line 5 and In [3], line 6) adds up the losses of 4 batches")


def test_a_limit_of_the_programs_own_is_named() -> None:
    with notebook("T4") as book:
        book.cell("torch.cuda.set_per_process_memory_fraction(0.3)")
        report = book.measured("a = [mib(500) for _ in range(12)]")
        answer = report.to_dict()["answer"]
        assert (
            "`torch.cuda.set_per_process_memory_fraction(0.3)` (In [3], line 1) lets this process reserve only"
            in answer
        )
        assert render(report, width=1000).count("A limit was reached") == 1
        book.cell("torch.cuda.set_per_process_memory_fraction(1.0)")
        assert "limit" not in names(book.measured("b = [mib(500) for _ in range(40)]"))


def test_what_an_earlier_cell_left_is_told_with_its_line() -> None:
    with notebook("virtual:2GiB") as book:
        book.cell("feats = mib(4)\nsim = feats.repeat(300)")
        answer = book.measured("y = mib(900)").to_dict()["answer"]
        assert "`sim` is there from an earlier cell (made at In [3], line 2, `sim = feats.repeat(300)`)" in answer
        assert "`del sim` frees 1,200 MiB" in answer
        assert "an earlier cell" not in book.measured("y = sim.sum()\nz = mib(900)").to_dict()["answer"]


def test_states_that_have_no_room_are_told_with_what_they_need() -> None:
    with notebook("virtual:2GiB") as book:
        book.cell(
            "model = nn.Linear(8192, 8192, bias=False).cuda()\nmodel = nn.Sequential(model, nn.Linear(8192, 8192).cuda())"
        )
        cell = "opt = torch.optim.{}(model.parameters())\nmodel(torch.ones(4, 8192, device='cuda')).mean().backward()\nopt.step()"
        answer = book.measured(cell.format("Adam")).to_dict()["answer"]
        assert "The first step of `opt` makes its states, two numbers for each weight: 1,024 MiB" in answer
        book.cell("del opt\nmodel.zero_grad()")
        assert "two numbers" not in book.measured(cell.format("SGD")).to_dict()["answer"]


def test_a_first_forward_that_would_pass_but_for_pieces_is_too_large() -> None:
    with notebook("virtual:2GiB,context=0MiB") as book:
        book.cell("gaps = [torch.empty(3 << 18, device='cuda') for _ in range(3)]\nmodel = nn.Linear(256, 1024).cuda()")
        book.cell("big = mib(1000)\ndel big\nkeeps = [mib(11) for _ in range(3)]")
        report = book.measured("with torch.no_grad():\n    y = model(torch.randn(300000, 256, device='cuda'))")
    assert [one.describes for one in report.causes if one.name == "fragmentation"] in ([True], [])


def test_a_second_tensor_of_what_stays_is_no_batch() -> None:
    with notebook("virtual:2GiB") as book:
        book.cell("corpus = torch.randn(300000, 1024, device='cuda')\ndef cos(a, b):\n    return a @ (b * 2).T")
        report = book.measured("for _ in range(3):\n    score = cos(torch.randn(1, 1024, device='cuda'), corpus)")
    assert "makes a second tensor of 1,172 MiB beside `corpus`" in named(report, "second_of_its_size").text
    assert "whole_batch" not in names(report)


TWO = "def make():\n    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(10)])"


@pytest.mark.parametrize(("where", "told"), [("cuda", True), ("cuda:0", False)])
def test_a_card_that_nobody_uses_is_named_where_memory_runs_out_on_another(where: str, told: bool) -> None:
    with notebook("2xvirtual:1GiB,context=0MiB") as book:
        book.cell(TWO)
        answer = book.measured(f"writer = make().to('{where}')\njudge = make().to('{where}')").to_dict()["answer"]
    assert ("cuda:1 is free, 1,024 MiB: `cuda` alone means cuda:0." in answer) is told, answer
    # What a method calls its object is no name of the program's.
    assert "`self`" not in answer
    assert f"320 MiB are parameters made by `judge = make().to('{where}')` (line 3)" in answer


NARROW = """
class Adapted(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.whole = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)
    def forward(self, x):
        return self.whole(x) + self.up(self.down(x))
model = nn.Sequential(*[Adapted() for _ in range(3)], nn.Linear(1024, 2048)).cuda()
model[3].requires_grad_(TRAINED)
opt = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 1024, device="cuda")
"""
NARROWING = "model = nn.Sequential(nn.Linear(1024, 8), nn.Linear(8, 1024), nn.Linear(1024, 1024)).cuda()\n"
STEPPING = "for _ in range(3):\n    opt.zero_grad()\n    model(x).mean().backward()\n    opt.step()"


def test_adapters_are_known_by_what_they_are_beside() -> None:
    with notebook("T4") as book:
        book.cell(NARROW.replace("TRAINED", "True"))
        cause = named(book.measured(STEPPING), "trained_beside_adapters")
        # Not of what the optimizer was given and does not train.
        assert "8.0 MiB of gradients and 16.0 MiB of states, for adapters of 192.0 KiB" in cause.text, cause.text
        book.cell(NARROW.replace("TRAINED", "False"))
        assert "trained_beside_adapters" not in names(book.measured(STEPPING))
        # A narrow layer of a model that is trained as a whole is none.
        book.cell(f"{NARROWING}opt = torch.optim.AdamW(model.parameters())")
        assert "trained_beside_adapters" not in names(book.measured(STEPPING))


OWN = """
class Adapted(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.whole = whole
        self.a, self.b = nn.Parameter(torch.randn(INNER, 1024)), nn.Parameter(torch.zeros(1024, INNER))
    def forward(self, x):
        return self.whole(x) + x @ self.a.T @ self.b.T
model = nn.Sequential(*[Adapted(nn.Linear(1024, 1024)) for _ in range(3)]).cuda()
opt = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 1024, device="cuda")
"""


def test_adapters_around_layers_that_nobody_froze_are_known_by_their_shapes() -> None:
    with notebook("T4") as book:
        book.cell(OWN.replace("INNER", "8"))
        cause = named(book.measured(STEPPING), "trained_beside_adapters")
        assert "12.0 MiB of gradients and 24.0 MiB of states, for adapters of 192.0 KiB" in cause.text, cause.text
        # Two of a layer's own size are no adapters.
        book.cell(OWN.replace("INNER", "1024"))
        assert "trained_beside_adapters" not in names(book.measured(STEPPING))


def test_copies_that_peft_trains_beside_adapters_are_named() -> None:
    pytest.importorskip("peft")
    cell = (
        "from transformers import LlamaConfig, LlamaForCausalLM\nfrom peft import LoraConfig, get_peft_model\n"
        "config = LlamaConfig(vocab_size=20000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, "
        "num_attention_heads=4)\nbase = LlamaForCausalLM(config).cuda()\n"
        "lora = LoraConfig(r=4, target_modules=['q_proj'], modules_to_save=['lm_head'])\nmodel = get_peft_model(base, lora)\n"
        "opt = torch.optim.AdamW(model.parameters())\nids = torch.randint(0, 20000, (1, 64), device='cuda')"
    )
    with notebook("T4") as book:
        book.cell(cell)
        steps = STEPPING.replace("model(x).mean()", "model(input_ids=ids, labels=ids).loss")
        cause = named(book.measured(steps), "trained_beside_adapters")
    assert cause.text.startswith(
        "`opt` trains whole copies of `lm_head` beside the adapters, as `modules_to_save` has it (`"
    )
    assert "Leave out of `modules_to_save`" in cause.remedy


def test_adapters_in_the_models_own_type_copy_nothing() -> None:
    pytest.importorskip("peft")
    cell = (
        "from transformers import LlamaConfig, LlamaForCausalLM\nfrom peft import LoraConfig, get_peft_model\n"
        "config = LlamaConfig(vocab_size=500, hidden_size=256, intermediate_size=256, num_hidden_layers=2, "
        "num_attention_heads=4)\nbase = LlamaForCausalLM(config).cuda().to(torch.bfloat16)\n"
        "ids = torch.randint(0, 500, (8, 1024), device='cuda')\n"
        "lora = LoraConfig(r=4, target_modules='all-linear')\nmodel = get_peft_model(base, lora{})"
    )
    step = "model(input_ids=ids, labels=ids).loss.backward()"
    with notebook("A100-40GB") as book:
        book.cell(cell.format(""))
        report = book.measured(step)
        assert "autocast_adapter_dtype=False" in named(report, "float32_copy").remedy
        book.cell("del model, base\n" + cell.format(", autocast_adapter_dtype=False"))
        own = book.measured(step)
    assert not [one for one in own.causes if one.name == "float32_copy" and "tuners" in one.text]
    assert own.to_dict()["peak"]["allocated"] < report.to_dict()["peak"]["allocated"]


SMOOTHED = """
class LabelSmoothing(nn.Module):
    def forward(self, x, target, smoothing=0.1):
        true = torch.full_like(x, smoothing / (x.shape[1] - 1))
        true.scatter_(1, target[:, None], 1 - smoothing)
        return torch.nn.functional.kl_div(x, true.clone(), reduction="sum")
x = torch.randn(8192, 8000, device="cuda", requires_grad=True)
target = torch.randint(0, 8000, (8192,), device="cuda")
"""


def test_smoothed_labels_that_are_written_out_take_more_than_pytorchs_own() -> None:
    with notebook("virtual:1200MiB,context=0MiB") as book:
        book.cell(SMOOTHED)
        report = book.measured("LabelSmoothing()(x.log_softmax(1), target).backward()")
        assert "`LabelSmoothing` (In [3], line 3) is label smoothing written out" in named(report, "written_out").text
    with notebook("virtual:1200MiB,context=0MiB") as book:
        book.cell(SMOOTHED)
        own = book.measured("nn.functional.cross_entropy(x, target, label_smoothing=0.1).backward()")
    assert own.to_dict()["error"] is None
    assert "written_out" not in names(own)


def test_what_each_turn_uses_again_is_no_cached_memory_to_wonder_about() -> None:
    turn = "x = mib(400)\n    y = x[0] + 1\n    del x"
    with notebook("T4") as book:
        assert "only_cached" not in names(book.measured(f"for _ in range(3):\n    {turn}"))
        assert "only_cached" in names(book.measured(turn.replace("    ", "")))


CAUGHT = """
def bad(n):
    big = mib(n)
    raise ValueError("no")
errors = []
for n in (50, 60):
    try:
        bad(n)
    except ValueError as error:
        errors.append(error)
"""


def test_errors_in_a_list_are_told_with_what_to_keep_in_their_place() -> None:
    with notebook("T4") as book:
        cause = named(book.measured(CAUGHT), "kept_errors")
        assert cause.text == (
            "`errors` (line 11, `errors.append(error)`) keeps 2 caught errors: their tracebacks hold the local variables of the "
            "functions that failed: 110 MiB, in `big` of bad()."
        )
        assert (
            cause.remedy == "Keep the text (`str(error)`), or `error.with_traceback(None)`; `del errors` frees 110 MiB."
        )


def test_what_the_answer_says_of_missing_room_is_not_said_again() -> None:
    with notebook("virtual:1GiB,context=0MiB") as book:
        short = render(book.measured("a = mib(900)\nb = mib(200)"), width=1000)
        assert short.startswith("Out of memory at line 3, 76.0 MiB short: 900 MiB are one")
        assert "perfect packing" not in short
        assert short.count("76.0 MiB") == 1
        beyond = render(book.measured("c = mib(2000)"), width=1000)
    assert "Too big for the device: it has 1,024 MiB in all." in beyond


def test_what_transformers_could_compute_once_more_is_told_where_memory_runs_out_and_it_fits_then() -> None:
    pytest.importorskip("peft")
    cell = (
        "from transformers import LlamaConfig, LlamaForCausalLM\nfrom peft import LoraConfig, get_peft_model\n"
        "config = LlamaConfig(vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=8, "
        "num_attention_heads=4)\nmodel = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=['q_proj'])).cuda()\n"
        "opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)\n"
        "ids = torch.randint(0, 500, (16, 512), device='cuda')"
    )
    step = "model(input_ids=ids, labels=ids, use_cache=False).loss.backward()"
    with notebook("virtual:1GiB,context=0MiB") as book:
        book.cell(cell)
        remedy = named(book.measured(step), "without_checkpointing").remedy
        assert remedy.startswith("`model.gradient_checkpointing_enable()` keeps each layer's input alone")
    with notebook("virtual:1GiB,context=0MiB") as book:
        book.cell(cell)
        report = book.measured(f"model.gradient_checkpointing_enable()\n{step}")
    assert report.to_dict()["error"] is None
    with notebook("virtual:1GiB,context=0MiB") as book:
        book.cell(cell)
        # Nothing is kept where nothing is trained.
        book.cell("room = mib(900)")
        inference = f"with torch.no_grad():\n    {step.partition('.backward')[0]}"
        assert "without_checkpointing" not in names(book.measured(inference))
