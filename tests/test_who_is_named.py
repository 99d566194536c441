"""Whom a report names as what memory is, and as what keeps it, where a name is used again, or has copies of something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from causes_cells import Notebook, names, notebook

LAYERS = "model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)]).cuda()\n"
TRAIN = "loss = model(torch.randn(8, 1024, device='cuda')).square().mean(); loss.backward()\n"
WEIGHTS = 3 * 1025 * 4096


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4") as made:
        yield made


def test_a_name_that_is_given_anew_keeps_its_former_tensor_meanwhile(book: Notebook) -> None:
    with book.forgetting():
        book.cell("y = torch.randn(4096, 4096, device='cuda')")
        report = book.measured("if True:\n    y = y * 2")
    assert (
        "are inputs, kept by the former `y`; 64.0 MiB are one (4096, 4096) float32 tensor of `y * 2`" in report.answer
    )
    assert [one.kept_by for one in report.tensors()] == ["the former `y`", "y"]
    with book.forgetting():
        book.cell("y = torch.randn(4096, 4096, device='cuda')")
        report = book.measured("z = y * 2")
    assert {one.kept_by for one in report.tensors()} == {"y", "z"}
    with book.forgetting():
        book.cell("model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 512)).cuda()")
        report = book.measured("model = model.half()")
    assert "8.0 MiB are parameters, kept by the former `model.0.weight`. Peak" in report.answer
    with book.forgetting():
        book.cell("model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda()")
        report = book.measured(
            "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)"
        )
    assert "8.0 MiB are parameters of the former `model`;" in report.answer


def test_what_a_name_gets_later_leaves_its_tensor_its_name_until_then(book: Notebook) -> None:
    """A step aside, after which the weights are put back by their copies."""
    with book.forgetting():
        book.cell("model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda()\nold = []")
        report = book.measured(
            "for p in model.parameters():\n    old.append(p.data.clone())\nx = torch.ones(4096, 1024, device='cuda')\n"
            "y = model(x)\ndel x, y\nfor p, kept in zip(model.parameters(), old):\n    p.data = kept"
        )
    assert "former" not in report.answer
    assert {one.kept_by for one in report.tensors() if one.category == "parameters"} >= {"model"}
    assert not report.causes


@pytest.mark.parametrize(
    "copy",
    [
        "kept = {k: v.clone() for k, v in model.state_dict().items()}",
        "kept = {k: v.detach().clone() for k, v in model.named_parameters()}",
        "kept = [{'module.' + k: 0.9 * v.detach() for k, v in model.named_parameters()}]",
    ],
)
def test_copies_of_weights_by_their_names_are_weights(book: Notebook, copy: str) -> None:
    with book.forgetting():
        book.cell(LAYERS)
        report = book.measured(TRAIN + copy)
    after = report.checkpoints[-1].categories
    assert after["parameters"] == 2 * WEIGHTS
    assert after["gradients"] == WEIGHTS
    assert (after["activations"] or 0) < 1024
    assert any(one.category == "parameters" and one.kept_by == "kept" for one in report.tensors())


@pytest.mark.parametrize(
    "copy",
    [
        "kept = [p.detach().clone() for p in model.parameters()]",
        "kept = {p: p.detach().clone() for p in model.parameters()}",
        "kept = {'average': [p.detach() * 1 for p in model.parameters()]}",
        "class Keeper:\n    def __init__(self, ps):\n        self.ps = [p.data.clone() for p in ps]\n"
        "kept = Keeper(model.parameters())",
    ],
)
def test_a_copy_of_each_weight_in_their_order_is_weights(book: Notebook, copy: str) -> None:
    with book.forgetting():
        report = book.measured(f"{LAYERS}{copy}\n{TRAIN}")
        assert report.checkpoints[-1].categories["parameters"] == 2 * WEIGHTS
        later = book.measured("z = torch.zeros(1, device='cuda')")
    assert later.checkpoints[-1].categories["parameters"] == 2 * WEIGHTS


def test_zeros_for_each_weight_are_an_optimizers_that_was_written_by_hand(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(f"{LAYERS}kept = [torch.zeros_like(p) for p in model.parameters()]\n{TRAIN}")
    after = report.checkpoints[-1].categories
    # (Of small ones it is not known which operator made them.)
    assert after["optimizer_state"] == 3 << 22
    assert (after["activations"] or 0) < 1024


def test_copies_of_gradients_are_no_weights(book: Notebook) -> None:
    with book.forgetting():
        book.cell(LAYERS)
        report = book.measured(f"{TRAIN}kept = [p.grad.clone() for p in model.parameters()]")
        assert report.checkpoints[-1].categories["parameters"] == WEIGHTS
        assert report.checkpoints[-1].categories["gradients"] == 2 * WEIGHTS
        report = book.measured(
            "model.zero_grad()\nkept = torch.autograd.grad(model(torch.randn(8, 1024, device='cuda')).sum(), model.parameters())"
        )
    assert report.checkpoints[-1].categories["parameters"] == WEIGHTS


STEPPED = (
    LAYERS
    + "optimizer = torch.optim.Adam(model.parameters())\n"
    + TRAIN
    + "optimizer.step()\nmodel.zero_grad()\nimport copy\n"
)
MOMENTS = 2 * WEIGHTS
"""Of a step before: each weight has two."""


@pytest.mark.parametrize(
    ("copy", "size", "dtype"),
    [
        ("copy.deepcopy(optimizer.state_dict())", MOMENTS, "float32"),
        ("copy.deepcopy(optimizer.state_dict()['state'])", MOMENTS, "float32"),
        ("[{k: v.clone() for k, v in one.items()} for one in optimizer.state.values()]", MOMENTS, "float32"),
        ("[one['exp_avg'].detach().clone() for one in optimizer.state.values()]", MOMENTS // 2, "float32"),
        ("[one['exp_avg'].to(torch.bfloat16) for one in optimizer.state.values()]", MOMENTS // 4, "bfloat16"),
    ],
)
def test_a_copy_of_states_is_optimizer_state(book: Notebook, copy: str, size: int, dtype: str) -> None:
    with book.forgetting():
        book.cell(STEPPED)
        report = book.measured(f"kept = {copy}")
        before, after = report.checkpoints[0].categories, report.checkpoints[-1].categories
        # (Adam counts its steps in a number of each state's, on the host.)
        assert (after["optimizer_state"] or 0) - (before["optimizer_state"] or 0) == size
        assert after["activations"] == before["activations"]
        kept = [one for one in report.tensors(at=report.checkpoints[-1]) if one.kept_by.startswith("kept")]
        assert {one.dtype for one in kept} == {dtype}
        later = book.measured("z = torch.zeros(1, device='cuda')")
    assert later.checkpoints[-1].categories["optimizer_state"] == after["optimizer_state"]


def test_what_is_copied_as_bytes_looks_as_what_it_is_a_copy_of(book: Notebook) -> None:
    with book.forgetting():
        book.cell("import copy\nx = torch.randn(1024, 2048, device='cuda')")
        report = book.measured("y = copy.deepcopy({'x': x})")
    assert "one (1024, 2048) float32 tensor" in report.answer


def test_states_that_were_loaded_are_optimizer_state(book: Notebook) -> None:
    loaded = "kept = {'epoch': 1, 'optimizer': {'state': {0: {'exp_avg': torch.ones(1024, 1024).cuda()}}, 'param_groups': [{}]}}"
    with book.forgetting():
        report = book.measured(loaded)
    assert report.checkpoints[-1].categories["optimizer_state"] == 4 << 20


@pytest.mark.parametrize(
    "code",
    [
        # what a forward works with
        "def doubled(x):\n    return x @ model[0].weight.clone().t()\nout = model(torch.randn(8, 1024, device='cuda'))\n",
        # what is gone at once
        "total = 0\nfor p in model.parameters():\n    total += p.detach().clone().square_().sum()\n",
    ],
)
def test_what_is_copied_for_a_moment_is_no_second_copy(book: Notebook, code: str) -> None:
    with book.forgetting():
        book.cell(LAYERS)
        report = book.measured(code)
    assert all((row.categories["parameters"] or 0) <= WEIGHTS for row in report.checkpoints)
    assert (report.peak.categories["parameters"] or 0) <= WEIGHTS


def test_other_dictionaries_are_no_weights(book: Notebook) -> None:
    with book.forgetting():
        book.cell(LAYERS)
        report = book.measured(
            TRAIN + "kept = {k: v.detach().sum(0) for k, v in model.named_parameters() if v.ndim == 2}"
        )
        assert report.checkpoints[-1].categories["parameters"] == WEIGHTS
        report = book.measured("kept = {k: v.grad for k, v in model.named_parameters()}")
    assert report.checkpoints[-1].categories["gradients"] == WEIGHTS


def test_a_batch_that_a_thread_moves_while_a_phase_runs_is_an_input(book: Notebook) -> None:
    """Whichever phase it is: a hook waits for the thread, which would reach that moment by chance."""
    with book.forgetting():
        book.cell(
            LAYERS + "import threading\nbatches = []\n"
            "def load():\n    batches.append(torch.randn(4096, 1024).to('cuda'))\n"
            "def meanwhile(*_):\n    one = threading.Thread(target=load)\n    one.start()\n    one.join()\n"
            "model[0].register_forward_hook(meanwhile)\nmodel[1].register_full_backward_hook(meanwhile)\nload()"
        )
        report = book.measured("for _ in range(3):\n    model(batches[0]).sum().backward()\n    del batches[0]")
    loaded = [one for one in report.tensors(at=report.checkpoints[-1]) if one.inner.endswith("load")]
    assert sum(one.count for one in loaded) == 4
    assert {one.category for one in loaded} == {"inputs"}


def test_what_a_loop_over_optimizers_steps_belongs_to_their_list(book: Notebook) -> None:
    with book.forgetting():
        book.cell(
            "nets = [nn.Linear(1024, 1024).cuda() for _ in range(4)]\n"
            "opts = [torch.optim.AdamW(one.parameters()) for one in nets]"
        )
        report = book.measured(
            "for _ in range(3):\n"
            "    sum(one(torch.randn(8, 1024, device='cuda')).mean() for one in nets).backward()\n"
            "    for o in opts:\n        o.step()"
        )
    owners = {one.category: one.kept_by for one in report.tensors() if one.category in ("optimizer_state", "gradients")}
    assert owners == {"optimizer_state": "opts", "gradients": "nets"}
    assert "`o`" not in report.answer


def test_an_optimizer_for_each_turn_is_told_apart_from_one_that_is_gone(book: Notebook) -> None:
    """Its id may be that of one that was there before, as chance would have it."""
    with book.forgetting():
        book.cell("model = nn.Linear(1024, 1024).cuda()")
        report = book.measured(
            "for _ in range(4):\n    o = torch.optim.AdamW(model.parameters())\n    "
            + TRAIN.strip()
            + "; o.step(); o.zero_grad()"
        )
    steps = [span.label for span in report.source.recording.spans if span.kind == "optimizer"]
    assert steps == ["o"] * 4
    assert "The first step of `o` allocated its states" in str(report.explain())
    assert "steady" in names(report)


def test_a_state_of_several_tensors_in_an_attribute_is_carried_on_without_its_graph(book: Notebook) -> None:
    trainer = (
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.net, self.state = nn.LSTM(64, 512).cuda(), None\n"
        "    def step(self, x):\n"
        "        out, self.state = self.net(x, self.state)\n"
        "{0}"
        "        loss = out.square().mean()\n"
        "        loss.backward({1})\n"
        "        return loss\n"
        "trainer = Trainer()\n"
    )
    loop = "for _ in range(4):\n    loss = trainer.step(torch.randn(64, 64, 64, device='cuda'))"
    with book.forgetting():
        book.cell(trainer.format("", "retain_graph=True"))
        report = book.measured(loop)
        remedy = "tuple(one.detach() for one in trainer.state)"
        assert f"Carry on `{remedy}`: the graph then ends with its iteration" in report.answer
        book.cell("del trainer, loss")
        book.cell(trainer.format(f"        self.state = {remedy.replace('trainer', 'self')}\n", ""))
        mended = book.measured(loop)
    assert mended.peak.allocated < 0.7 * report.peak.allocated
    assert "kept_graphs" not in names(mended)


def test_a_cell_moves_a_lazy_module_as_its_first_thing(book: Notebook) -> None:
    """Where it is told which operator made what, an operator's arguments are looked at."""
    with book.forgetting():
        report = book.measured(
            "layer = torch.nn.LazyLinear(1024).cuda()\ny = layer(torch.ones(8, 1024, device='cuda'))"
        )
    assert report.error is None
    assert report.peak.categories["parameters"] == 1025 * 4096


def test_what_is_read_from_a_file_looks_as_whoever_has_it_sees_it(book: Notebook) -> None:
    """(Its storage is read as bytes.)"""
    with book.forgetting():
        book.cell(
            "import io\nfile = io.BytesIO()\ntorch.save(torch.nn.Linear(1024, 1024, bias=False).cuda().state_dict(), file)"
        )
        report = book.measured("file.seek(0)\nread = torch.load(file)")
    (read,) = [one for one in report.tensors() if one.kept_by.startswith("read")]
    assert (read.dtype, read.shape) == ("float32", (1024, 1024))
