"""What reports once said wrongly, or the virtual GPU did: one cell for each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook

from gpumem_magic.views.text import render

NET = """
import copy, io
net_ = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)).cuda()
x = torch.zeros(64, 512, device="cuda")
net_(x).mean().backward()
"""
RESUMED = """
opt = torch.optim.Adam(net_.parameters())
opt.step()
file = io.BytesIO()
torch.save(opt.state_dict(), file)
file.seek(0)
opt.load_state_dict(torch.load(file, map_location="cuda"))
opt.step()
"""
TWICE = """
losses, again = [], []
for _ in range(5):
    loss = body(torch.zeros(4096, 1024, device="cuda")).mean()
    losses.append(loss)
    again.append(loss)
"""
BODY = """
body = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]).cuda().requires_grad_(False)
head = nn.Linear(1024, 4).cuda()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Notebook]:
    with notebook("T4") as found:
        yield found


@pytest.fixture
def book(shared: Notebook) -> Iterator[Notebook]:
    with shared.forgetting() as found:
        yield found


def test_a_copied_model_has_no_gradients(book: Notebook) -> None:
    book.cell(NET)
    before = book.allocated()
    weights = sum(one.nbytes for one in book.shell.user_ns["net_"].state_dict().values())
    book.cell("other = copy.deepcopy(net_)")
    assert weights <= book.allocated() - before < 1.2 * weights


def test_adam_goes_on_with_states_that_were_read_onto_the_device(book: Notebook) -> None:
    book.cell(NET)
    assert book.measured(RESUMED).error is None


@pytest.mark.parametrize(
    ("before", "cell", "blamed"),
    [
        # A softmax over classes or channels is no attention.
        ("", "maps = torch.randn(8, 64, 256, 256, device='cuda').softmax(1)", "attention_scores"),
        # What is frozen saves nothing, and a loss is no layer.
        (BODY, "head(body(torch.zeros(8, 1024, device='cuda'))).mean().backward()", "dominating_layer"),
        # A frozen batch norm in evaluation mode, within a model that trains.
        (NET + "net_[1].eval().requires_grad_(False)", "for _ in range(3):\n    net_(x).mean().backward()", "missing_no_grad"),
    ],
)  # fmt: skip
def test_nothing_is_blamed_for_what_it_is_not(book: Notebook, before: str, cell: str, blamed: str) -> None:
    book.cell(before)
    report = book.measured(cell)
    assert report.error is None
    assert blamed not in [one.name for one in report.causes]


def test_a_graph_that_several_names_reach_is_told_once_with_all_of_it(book: Notebook) -> None:
    book.cell(BODY + "body.requires_grad_(True)")
    report = book.measured(TWICE)
    (cause,) = [one for one in report.causes if one.name == "kept_graphs"]
    assert cause.bytes >= 0.9 * 4 * 8 * 4096 * 1024 * 4
    assert "losses" in cause.text or "again" in cause.text


def test_what_is_said_to_let_go_of_several_graphs_does(book: Notebook) -> None:
    book.cell(
        "base = [torch.randn(1024, 1024, device='cuda', requires_grad=True) for _ in range(4)]\n"
        "support = torch.randn(512, 1024, device='cuda')\n"
        "def predict(x, weights):\n    for weight in weights:\n        x = torch.tanh(x @ weight)\n    return x"
    )
    told = book.measured(
        "fast = base\nfor _ in range(8):\n    loss = predict(support, fast).pow(2).mean()\n"
        "    slopes = torch.autograd.grad(loss, fast, create_graph=True)\n"
        "    fast = [weight - 0.01 * slope for weight, slope in zip(fast, slopes)]"
    ).answer
    found = re.search(r"detaching ((?:`\w+`(?:, )?)+) frees ([\d,]+) MiB", told)
    assert found is not None, told
    before = torch.cuda.memory_allocated()
    for name in re.findall(r"`(\w+)`", found[1]):
        thing = book.shell.user_ns[name]
        book.shell.user_ns[name] = (
            thing.detach() if isinstance(thing, torch.Tensor) else [one.detach() for one in thing]
        )
    del thing
    assert (before - torch.cuda.memory_allocated()) >> 20 == int(found[2].replace(",", ""))


def test_a_failed_request_is_the_headline_also_where_the_start_was_highest(book: Notebook) -> None:
    book.cell("held = mib(9000)")
    report = book.measured("del held\ny = mib(20000)")
    assert report.error is not None
    first = render(report, width=160).splitlines()[0]
    assert "20,000 MiB" in first or "19.5 GiB" in first
    assert "the start" not in first


def test_a_zero_is_no_dot(book: Notebook) -> None:
    last = next(one for one in render(book.measured("y = mib(64)"), width=160).splitlines() if one.startswith("after"))
    assert re.match(r"after +\d+ +0 ", last), last


@pytest.mark.parametrize(
    ("cell", "words", "left"),
    [
        ("for i in range(100):\n    y = mib(1)", "after 3 iterations of a loop.", 2),
        (
            "for i in range(100):\n    net_(x).mean().backward()\n    opt.step()",
            "after 3 training iterations.",
            2,
        ),
    ],
)
def test_a_loop_that_is_ended_early_is_left_as_break_leaves_it(
    book: Notebook, cell: str, words: str, left: int
) -> None:
    book.cell(NET + "opt = torch.optim.SGD(net_.parameters(), lr=0.1)")
    assert words in book.cell("%%gpumem --max-iterations 3\n" + cell)
    assert book.shell.user_ns["i"] == left


def test_parts_are_in_the_order_of_their_numbers(book: Notebook) -> None:
    # Of equal size, in shapes of their own.
    book.cell("parts = [mib(8).view(1 << n, -1) for n in range(12)]")
    numbers = [int(one) for one in re.findall(r"parts\[(\d+)\]", book.cell("%gpumem_who parts"))]
    assert numbers == list(range(12))
    book.cell("parts = [mib(8) for _ in range(12)]")
    assert "12 × parts[0…11]" in book.cell("%gpumem_who parts")


def test_tied_weights_are_the_heads_and_no_embedding_is_to_be_recomputed(book: Notebook) -> None:
    book.cell(
        "class Tied(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.wte = nn.Embedding(8192, 64)\n"
        "        self.blocks = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])\n"
        "        self.head = nn.Linear(64, 8192, bias=False)\n        self.head.weight = self.wte.weight\n"
        "    def forward(self, ids): return self.head(self.blocks(self.wte(ids)))\n"
        "tied = Tied().cuda()\nids = torch.zeros(16, 128, dtype=torch.long, device='cuda')"
    )
    report = book.measured("torch.nn.functional.cross_entropy(tied(ids).flatten(0, 1), ids.flatten()).backward()")
    said = " ".join(cause.sentence for cause in report.causes)
    assert "wte" not in said, said


def test_a_caught_errors_frames_have_no_raw_numbers(book: Notebook) -> None:
    report = book.measured(
        "def fails():\n    large = mib(64)\n    raise ValueError\nkept = []\nfor _ in range(2):\n    try:\n        fails()\n"
        "    except ValueError as error:\n        kept.append(error)"
    )
    words = render(report, width=160) + book.cell("%gpumem_who")
    assert "`kept`" in words
    assert not re.search(r"tb_frame\[|\[\d{9,}\]|0x[0-9a-f]{6,}", words), words


AVERAGE = """
net_ = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
avg = [p.detach().clone() for p in net_.parameters()]
"""


@pytest.mark.parametrize(
    ("before", "cell", "told", "not_told"),
    [
        # Sixteen weights are averaged in each of six iterations.
        (
            AVERAGE,
            "for _ in range(6):\n    net_(torch.randn(64, 1024, device='cuda')).mean().backward()\n"
            "    avg = [0.9 * a + 0.1 * p * p for a, p in zip(avg, net_.parameters())]",
            "the graphs of 6 iterations",
            "16",
        ),
        # The mask is of one byte; what has its shape, of four, is no such copy.
        (
            "padding = torch.ones(4, 1024, dtype=torch.bool, device='cuda')",
            "mask = padding[:, None, None, :].expand(4, 16, 1024, 1024).reshape(64, 1024, 1024)\nmask = mask.float()",
            "expands (4, 1, 1, 1024) to (4, 16, 1024, 1024) and copies it: 64.0 MiB in bool.",
            "shape at once",
        ),
    ],
)
def test_numbers_are_those_of_what_is_told(book: Notebook, before: str, cell: str, told: str, not_told: str) -> None:
    book.cell(before)
    first = book.measured(cell).answer
    assert told in first
    assert not_told not in first


def test_what_a_recurrent_layer_keeps_is_no_tensor_to_make_smaller(book: Notebook) -> None:
    book.cell(
        "rnn = nn.LSTM(256, 512, num_layers=2, batch_first=True).cuda()\nx = torch.randn(64, 200, 256, device='cuda')"
    )
    report = book.measured("for _ in range(2):\n    rnn(x)[0].mean().backward()")
    assert "MiB are what cuDNN keeps for the backward of `rnn(x)" in report.answer
    assert "grown_result" not in [one.name for one in report.causes]
    # Items are counted along the input's first dimension, steps along its second.
    assert "200 items" not in render(report)


def test_a_failed_request_says_for_which_tensor_it_was(book: Notebook) -> None:
    book.cell("masks = torch.rand(100, 3000, 4000, device='cuda') > 0.5")
    report = book.measured("areas = masks.long(), masks.long()")
    assert report.error is not None
    assert report.error.asked is not None
    assert f"Wanted {report.error.requested >> 20:,} MiB for a (100, 3000, 4000) int64 tensor" in report.answer


def test_who_asks_first_says_nothing_of_what_a_library_keeps(book: Notebook) -> None:
    book.cell("a = torch.randn(64, 64, device='cuda')")
    (kept,) = [one for one in book.measured("b = a @ a").peak.tensors if one.category == "workspace"]
    assert (kept.bytes > 8e6, kept.line, kept.statement) == (True, 0, "")
