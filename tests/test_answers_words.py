"""The answer's sentences: code is recognisable as code, an error is told as what it is, and what is next to nothing as that."""

from __future__ import annotations

import collections
import gc
import re
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook
from test_filling import group

from gpumem_magic.attribution.tensors import words_of_place
from gpumem_magic.recording.identity import _with_members
from gpumem_magic.recording.model import Checkpoint, Moment
from gpumem_magic.report.filling import in_words
from gpumem_magic.report.notes import place_of


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4,values=auto") as one:
        yield one


def answer(book: Notebook, code: str) -> str:
    with book.forgetting():
        return book.measured(code).answer


def test_a_statement_in_a_sentence_is_code() -> None:
    moment = Moment({}, {}, 0)
    turn = Checkpoint("statement", "x", "return x\n", 13, moment, iteration=(2, 1))
    assert place_of(turn) == "`return x` in iteration 2.1, line 13"
    assert place_of(Checkpoint("mark", "epoch 3", "", 0, moment)) == "epoch 3"


def test_what_was_there_before_a_loop_is_of_no_iteration(book: Notebook) -> None:
    said = answer(book, "a = mib(400)\nfor n in range(3):\n    b = mib(n + 1)\n    del b\n")
    assert "Peak at `b = mib(n + 1)` in iteration 3, line 4 (all but 3.0 MiB of it since line 2)." in said


@pytest.mark.parametrize("code", ["import math", "for n in range(3):\n    a.shape"])
def test_a_cell_that_allocates_nothing_says_so(book: Notebook, code: str) -> None:
    with book.forgetting():
        book.measured("a = mib(400)")
        said = book.measured(code).answer
        assert said.startswith("Nothing was added to the 400 MiB from before: 400 MiB are ")
        assert "Peak at" not in said
        failed = book.measured(f"{code}\nnobody").answer
        assert "name 'nobody' is not defined. Memory did not run out. Nothing was added to the 400 MiB from" in failed
        assert "Nothing was added" not in book.measured("b = mib(1)\ndel b").answer
        assert book.measured("del a").answer.endswith("Peak at the start.")


def test_an_error_of_another_kind_is_told_before_memory_and_small_memory_not_at_all(book: Notebook) -> None:
    small = answer(book, "a = mib(4)\nimport nobody_has_this_module")
    missing = "No module named 'nobody_has_this_module'"
    assert small == f"ModuleNotFoundError at line 3: {missing}. Memory did not run out. At most 4.0 MiB were allocated."
    large = answer(book, "a = mib(400)\nimport nobody_has_this_module")
    assert large.startswith(
        f"ModuleNotFoundError at line 3: {missing}. Memory did not run out. Of 400 MiB at the peak, "
    )
    assert answer(book, "import nobody_has_this_module") == f"ModuleNotFoundError at line 2: {missing}."
    library = answer(book, "a = mib(400)\nraise RuntimeError('CUBLAS_STATUS_ALLOC_FAILED')")
    assert library.startswith("RuntimeError at line 3: CUBLAS_STATUS_ALLOC_FAILED. Of 400 MiB at the peak, ")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("KeyError('images')", "KeyError at line 3: 'images'. Memory did not run out. "),
        ("RuntimeError('on cuda:0 and cpu!')", "RuntimeError at line 3: on cuda:0 and cpu! Memory did not run out. "),
        ("RuntimeError('`a` is\\n\\tnot `b`.')", "RuntimeError at line 3: 'a' is not 'b'. Memory did not run out. "),
        ("ValueError()", "ValueError at line 3. Memory did not run out. "),
        ("ValueError('word ' * 100)", f"ValueError at line 3: {'word ' * 27}… Memory did not run out. "),
        ("KeyboardInterrupt('now')", "KeyboardInterrupt at line 3. "),
    ],
)
def test_an_errors_own_words_are_in_the_headline(book: Notebook, raised: str, said: str) -> None:
    assert answer(book, f"a = mib(4)\nraise {raised}").startswith(f"{said}At most 4.0 MiB")


def test_a_few_numbers_are_next_to_nothing(book: Notebook) -> None:
    said = answer(book, "b = torch.zeros(10, device='cuda')")
    assert said == "Next to nothing was put on the device: 512 B at the peak."
    assert answer(book, "b = torch.zeros(200, device='cuda')").startswith("Of 1.0 KiB at the peak, 800 B are ")


def test_the_expression_is_named_that_made_nearly_all_of_the_bytes() -> None:
    def of(expression: str, size: int, side: int, inner: str) -> object:
        one = group(size, side, 2)
        return type(one)(**{**vars(one), "statement": "train(32)", "expression": expression, "inner": inner})

    inside = [of("model(x)", 50, side, f"net.py:{side} forward, from In [1]:3 train") for side in range(10, 14)]
    data = of("torch.randn(n)", 10, 5, "In [1]:2 train")
    assert in_words([*inside, data], {}).startswith(
        "210 MiB are ten tensors of `model(x)` (line 2), kept for backward (largest: 50.0 MiB, two (10, 10) float32 tensors of "
    )
    assert "of `model(x)` (line 2: In [1]:3 train)" in in_words(inside, {})
    other = of("torch.randn(n)", 60, 5, "In [1]:2 train")
    assert "of `train(32)` (line 2)" in in_words([*inside, other], {})


READ = "x = torch.rand(300, 300, device='cuda')\n"
UNRELATED = {
    "a key of the program's own": READ + "print(x.mean().item())\nconfig = {'a': 1}\nconfig['b']",
    "a place in a list": "def f(x):\n    return x.std().item()\n" + READ + "v = f(x)\nprint([][3])",
    "in the same function": (
        "def train(m):\n    for _ in range(3):\n        loss = m(torch.rand(300, 300, device='cuda')).mean()\n"
        "        print(loss.item())\n        history['loss'].append(1)\nhistory = {}\ntrain(nn.Linear(300, 3).cuda())"
    ),
}
OF_THE_VALUE = {
    "looked up": READ + "label = int(x.argmax())\nnames = {7: 'cat'}\nprint(names[label])",
    "through a list": "kept = []\n" + READ + "kept.append(x.mean().item())\nassert min(kept) > 5",
    "given back": "def f(x):\n    s = x.std()\n    return s.item()\n" + READ + "v = f(x)\nassert v > 5",
    "through an attribute": (
        "class A:\n    def run(self, x):\n        self.best = x.max().item()\n    def end(self):\n        assert self.best > 5\n"
        + READ
        + "a = A()\na.run(x)\na.end()"
    ),
    "called back": READ + "v = list(map(lambda t: x.sum().item() * t, [1, 2]))\nassert v[1] < 0",
    "a size": READ + "n = int((x > 2).sum()) + 1\nm = nn.Linear(300, n)\nassert len(m.weight) < 1",
}


@pytest.mark.parametrize("name", UNRELATED)
def test_an_error_in_which_no_value_took_part_is_not_put_down_to_one(book: Notebook, name: str) -> None:
    said = answer(book, UNRELATED[name])
    assert "Error at line" in said
    assert "does not know" not in said


@pytest.mark.parametrize("name", OF_THE_VALUE)
def test_an_error_into_which_a_value_flows_is_put_down_to_it(book: Notebook, name: str) -> None:
    assert answer(book, OF_THE_VALUE[name]).startswith(
        "This may have failed because of a value that the virtual GPU does"
    )


BLOCK = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        {made}
    def forward(self, x):
        return x @ self.weight
class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.Sequential(*[Block(width) for _ in range(layers)])
model = Model(8192, 200)
"""


@pytest.mark.parametrize(
    "made",
    [
        "self.weight = nn.Parameter(torch.empty(width, width).cuda().bfloat16())",
        "self.weight = nn.Parameter(torch.empty(width, width)); self.cuda(); self.bfloat16()",
        "self.weight = nn.Parameter(torch.empty(width, width)); self.weight.data = self.weight.data.cuda().bfloat16()",
    ],
)
def test_what_a_constructor_cast_before_memory_ran_out_are_parameters(book: Notebook, made: str) -> None:
    said = answer(book, BLOCK.replace("{made}", made))
    book.cell("%gpumem_free")
    assert re.search(r"while they were made, 1[34]\.\d GiB of them in bfloat16,", said), said


def test_a_module_that_an_error_left_half_made_has_parameters(book: Notebook) -> None:
    made = (
        "self.weight = nn.Parameter(torch.empty(width, width)); self.weight.data = self.weight.data.cuda().bfloat16()"
    )
    code = BLOCK.replace("{made}", made).replace(
        "nn.Sequential(*[Block(width) for _ in range(layers)])",
        "nn.ModuleList()\n        for _ in range(layers):\n            self.layers.append(Block(width))",
    )
    said = answer(book, code)
    book.cell("%gpumem_free")
    assert re.search(r"while they were made, 14\.0 GiB of them in bfloat16,.* Wanted 128 MiB", said), said


def test_conversion_by_swapping_works_while_parameters_are_registered(book: Notebook) -> None:
    code = (
        "torch.__future__.set_swap_module_params_on_conversion(True)\n"
        "try:\n    one, other = nn.Linear(512, 512), nn.Linear(512, 512)\n    one.cuda(); other.cuda()\n"
        "finally:\n    torch.__future__.set_swap_module_params_on_conversion(False)\n"
    )
    with book.forgetting():
        report = book.measured(code)
    assert report.error is None
    assert report.peak.categories["parameters"] >= 2 * 512 * 512 * 4


AVERAGE = """
import copy
class Ema:
    def __init__(self, model):
        self.model = copy.deepcopy(model)
    def update(self, model):
        with torch.no_grad():
            for a, b in zip(self.model.parameters(), model.parameters()):
                a.data = a.data * 0.99 + b.data * 0.01
model = net(1024)
ema = Ema(model)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    ema.update(model)
"""


def test_an_average_of_the_weights_is_parameters_also_where_its_data_was_replaced(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(AVERAGE)
    assert "activations" not in report.answer
    assert report.peak.categories["parameters"] >= 2 * report.peak.categories["gradients"] > 0


SHADOW = """
class Ema:
    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}
    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * value
model = net(1024)
ema = Ema(model)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    ema.update(model)
"""


def test_an_average_that_an_object_keeps_by_names_is_parameters(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(SHADOW)
    weights = sum(one.bytes for one in report.peak.tensors if one.category == "parameters")
    assert weights >= 2 * report.peak.categories["gradients"] > 0
    assert "activations" not in {one.category for one in report.peak.tensors if one.bytes >= 1 << 20}


def test_a_look_at_an_objects_attributes_makes_it_no_dictionary() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2)

    keeper = Keeper()
    before = gc.get_referents(keeper)
    assert keeper.model in list(_with_members(keeper))
    assert len(gc.get_referents(keeper)) == len(before)


def test_a_replay_buffer_is_not_listed_after_every_line() -> None:
    class Buffer(collections.deque[int]):
        pass

    assert list(map(type, _with_members(Buffer(range(9))))) == [Buffer]


def test_graphs_are_counted_by_the_turns_of_their_loop_and_not_by_the_steps_inside_it(book: Notebook) -> None:
    code = (
        "model = net(1024)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nlosses = []\nfor _ in range(5):\n"
        "    x = torch.randn(512, 1024).cuda()\n    model(x).mean().backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n    losses.append(model(x).mean())\n"
    )
    assert answer(book, code).startswith("`losses` (line 10) keeps the graphs of 5 iterations alive")


def test_where_several_carry_a_graph_on_and_no_backward_runs_the_remedy_is_to_run_without_autograd(
    book: Notebook,
) -> None:
    code = (
        "layer, past = nn.Linear(1024, 2048).cuda(), None\nx = torch.randn(64, 64, 1024, device='cuda')\nfor _ in range(8):\n"
        "    k, v = layer(x).chunk(2, -1)\n    past = k if past is None else torch.cat([past, k], 1)\n"
        "    x = nn.functional.scaled_dot_product_attention(v, past, past)[:, -1:]\n"
    )
    assert "run it inside `with torch.no_grad():`" in answer(book, code)


def test_a_set_of_data_on_the_device_is_no_part_of_a_batch(book: Notebook) -> None:
    code = (
        "data = torch.randn(4096, 3, 128, 128, device='cuda')\nmodel = nn.Conv2d(3, 8, 3).cuda()\nfor n in range(2):\n"
        "    model(data[n * 1024 : n * 1024 + 1024] * 1).mean().backward()\n"
    )
    with book.forgetting():
        report = book.measured(code)
    assert "kept by `data`" in report.answer
    assert not [one for one in report.causes if one.name == "whole_batch" and one.bytes > report.peak.allocated // 2]


def test_a_model_whose_constructor_fails_is_told_by_the_line_that_makes_its_layers() -> None:
    """It has no name yet."""
    with notebook("virtual:64MiB,context=0MiB") as book:
        book.cell(
            "class Layer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)\n"
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.first = nn.Linear(512, 512)\n        self.layers = nn.Sequential(*[Layer() for _ in range(50)])"
        )
        said = book.measured("with torch.device('cuda'):\n    model = Net()").answer
    wanted = r"Wanted 2.0 MiB for a \(1024, 512\) float32 tensor of `nn\.Linear\(512, 1024\)` \(line 3: In \[\d+\]:4 __init__\)"
    assert re.search(rf"while they were made, 5\d\.\d MiB of them in float32,.* {wanted}", said), said


LOGGED = """
import logging
class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []
    def emit(self, record):
        self.records.append(record)
log = logging.Logger("train")
log.addHandler(Kept())
for step in range(5):
    loss = mib(8)
    log.info("step %d", step, extra={"loss": loss})
"""


def test_what_a_logger_keeps_is_found_where_it_was_put(book: Notebook) -> None:
    said = answer(book, LOGGED)
    assert (
        "it is held by `log.handlers[0].records[0…3].loss`, put there at line 9 (`self.records.append(record)`)" in said
    )
    assert "`log.handlers[0].records.clear()` frees 32.0 MiB" in said


@pytest.mark.parametrize(
    ("make", "put", "holder"),
    [
        ("numpy.empty(6, object)", "kept[n] = mib(8)", "`kept[0…5]`"),
        ("numpy.empty((3, 2), object)", "kept[n // 2, n % 2] = mib(8)", "`kept[0][0]` and 5 more"),
        ("{'of': [numpy.empty(6, object)[::-1]]}", "kept['of'][0][n] = mib(8)", "`kept['of'][0][0…5]`"),
    ],
)
def test_arrays_of_objects_are_looked_into(book: Notebook, make: str, put: str, holder: str) -> None:
    with book.forgetting():
        report = book.measured(f"import numpy\nkept = {make}\nfor n in range(6):\n    {put}\n")
        assert "6 iterations): it is held by `kept" in report.answer
        later = book.measured("y = mib(1)")
    assert f"kept by {holder}" in later.answer
    assert later.peak.categories["unknown"] == 0


# As pandas 3 keeps a frame's columns; without the blocks' places, which say nothing to a user.
FRAME = """
import numpy
class Frame:
    __module__ = "pandas"
    def __init__(self, kept): self.kept = kept
class Manager:
    __module__ = "pandas.core.internals.managers"
    def __init__(self, column): self.blocks = (column,)
column = numpy.empty((1, 4), object)
frame = Frame(Manager(column))
del column
for n in range(4):
    frame.kept.blocks[0][0, n] = mib(8)
"""


def test_what_a_frame_of_pandas_holds_is_the_frames(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(FRAME)
    at_the_end = report.tensors(at=report.checkpoints[-1])
    assert [(one.kept_by, one.category) for one in at_the_end if one.category != "workspace"] == [("frame", "inputs")]


def test_an_array_of_numbers_or_texts_costs_a_search_nothing(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(
            "import numpy\nkept = numpy.arange(9)\nwords = numpy.array(['a', None], object)\ny = mib(8)"
        )
    assert [one.kept_by for one in report.tensors() if one.category != "workspace"] == ["y"]


def test_growth_that_no_name_leads_to_sends_nobody_to_look_for_one(book: Notebook) -> None:
    said = answer(
        book, "import numpy\nkept = numpy.empty(6, [('one', object)])\nfor n in range(6):\n    kept[n] = (mib(8),)\n"
    )
    assert "(6 iterations), and no name of the program was found that leads to it. A library's own object" in said
    assert "%gpumem_who" not in said


def test_generators_that_wait_are_to_be_closed(book: Notebook) -> None:
    code = "def parts():\n    h = mib(8)\n    yield 1\n    yield h\nits = []\n"
    code += "for _ in range(5):\n    part = parts()\n    next(part)\n"
    said = answer(book, f"{code}    its.append(part)\n")
    assert "`its.clear()` frees 32.0 MiB; better, let each generator come to its end, or `.close()` it" in said
    assert "more allocated" not in answer(book, f"{code}    part.close()\n    its.append(part)\n")


def test_a_list_as_a_default_is_to_be_made_anew(book: Notebook) -> None:
    code = "def run(n, outs={}):\n    outs.append(mib(8))\n    return n\nfor n in range(5):\n    run(n{})\n"
    said = answer(book, code.format("[]", ""))
    assert "better, make it anew in each call (`None` as the default)" in said
    assert ".detach().cpu()" not in said
    assert "more allocated" not in answer(book, code.format("[]", ", []"))


@pytest.mark.parametrize(("first", "is_part"), [("mib(8)[:4]", True), ("mib(8)", False)])
def test_views_are_said_of_what_is_a_view(book: Notebook, first: str, is_part: bool) -> None:
    loop = f"kept = []\nfor n in range(5):\n    kept.append({{'a': {first}, 'b': mib(8)[:4]}})\n"
    assert ("Each is a view" in answer(book, loop)) is is_part


def test_what_is_made_in_a_comprehension_is_told_by_its_line() -> None:
    assert words_of_place("net.py", 3, "<listcomp>") == "net.py:3"
    assert words_of_place("net.py", 3, "forward") == "net.py:3 forward"


def test_weights_that_are_gone_by_the_end_are_their_models(book: Notebook) -> None:
    made = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.blocks = net(1024)\n"
    )
    with book.forgetting():
        book.cell(f"{made}model = Net()")
        said = book.measured("del model").answer
    # (What cuBLAS works in is there, or not, by what ran before.)
    assert re.search(r"are parameters of `model`(?:; [\d.]+ MiB are workspace \([^)]*\))?\. Peak at the start\.", said)


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        ("def pairs(x):\n    return x[:, None] - x\ny = pairs(x)", " of `x[:, None] - x` (line 3)"),
        (
            "h = x.repeat(900).reshape(-1, 900)\n(h.exp() * h).sum().backward()",
            " in the backward of `h.exp()` (line 3)",
        ),
        ("y = x[:, None] - x", ""),
    ],
)
def test_a_failed_request_is_told_with_its_own_line_where_the_statements_is_another(cell: str, place: str) -> None:
    with notebook("virtual:1500MiB") as book:
        book.cell("x = torch.randn(1 << 16, device='cuda', requires_grad=True)")
        answer = book.measured(cell).answer
    assert re.search(rf"Wanted [\d,.]+ [GM]iB for a \([\d, ]+\) float32 tensor{re.escape(place)};", answer), answer


def test_what_an_earlier_cell_left_of_a_training_is_known_though_this_one_clears_or_replaces_it() -> None:
    """Nobody has measured the earlier cell, and nothing of it is there when the cell ends."""
    with notebook("A100-40GB") as book:
        book.cell(
            "net = nn.Linear(4096, 4096, bias=False).cuda()\nopt = torch.optim.AdamW(net.parameters())\n"
            "net(torch.randn(8, 4096, device='cuda')).sum().backward()\nopt.step()\nkept = opt.state_dict()"
        )
        report = book.measured(
            "import copy\nopt.load_state_dict(copy.deepcopy(kept))\ndel kept\nopt.zero_grad()\n"
            "for each in opt.state.values():\n    each.clear()"
        )
    before, after = report.checkpoints[0].categories, report.checkpoints[-1].categories
    assert (before["gradients"], before["optimizer_state"], before.get("unknown", 0)) == (64 << 20, 128 << 20, 0)
    assert not after.get("gradients")
    assert not after.get("unknown")
