"""The whole road, from a cell in IPython to the numbers of its report, on virtual devices."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell, show_text_alone
from torch import nn
from torch_versions import BIAS_WORKSPACE, WORKSPACES_ARE_KEPT

import gpumem_magic
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.report.model import Row
from gpumem_magic.units import MIB
from gpumem_magic.user_report import Report
from gpumem_magic.virtual.engine import rules
from gpumem_magic.virtual.operators import reductions

SETUP = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1632, 1500), nn.ReLU(), nn.Linear(1500, 3000))
    def forward(self, image, comb):
        return self.layers((image + comb).flatten(0, 2))

def my_loss(output, target):
    return ((output - target) ** 2).mean()

def get_accuracy(output, target):
    return ((output - target).abs() < 0.1).float().mean().item()

trainloader = [(f"batch {i}", torch.zeros(400, 3000), torch.zeros(4, 1, 100, 1632)) for i in range(2)]
"""

COLAB = """%%gpumem
learning_rate = 0.001
num_epochs = 1
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
print('check 1')
!nvidia-smi | grep MiB | awk '{print $9 $10 $11}'
model = MyModel()
model = model.to(device)
print('check 3')
!nvidia-smi | grep MiB | awk '{print $9 $10 $11}'
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, foreach=False)
for epoch in range(num_epochs):
    train_running_loss = 0.0
    model = model.train()
    ## training step
    for i, (name, output_array, input) in enumerate(trainloader):
        output_array = output_array.to(device)
        input = input.to(device)
        comb = torch.zeros(1,1,100,1632).to(device)
        print('check 6')
        !nvidia-smi | grep MiB | awk '{print $9 $10 $11}'
        ## forward + backprop + loss
        output = model(input, comb)
        loss = my_loss(output, output_array)
        optimizer.zero_grad()
        loss.backward()
        print('check 10')
        !nvidia-smi | grep MiB | awk '{print $9 $10 $11}'
        ## update model params
        optimizer.step()
        print('check 11')
        !nvidia-smi | grep MiB | awk '{print $9 $10 $11}'
        train_running_loss += loss.detach().item()
        temp = get_accuracy(output, output_array)
"""

# ((1632 + 1) * 1500 + (1500 + 1) * 3000) numbers of 4 bytes
PARAMETER_BYTES = 4 * ((1632 + 1) * 1500 + (1500 + 1) * 3000)


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        show_text_alone(shell)
        # (Whatever another test has left on: here it is the cells that choose a device.)
        shell.run_line_magic("gpumem_device", "off")
        yield shell
        shell.user_ns.clear()
        gc.collect()
        shell.run_line_magic("gpumem_device", "off")


def run(shell: Any, cell: str) -> tuple[Any, str]:
    with capture_output(display=False) as captured:
        result = shell.run_cell(cell, store_history=True)
    return result, captured.stdout


def report() -> Report:
    last = gpumem_magic.last_report()
    assert last is not None
    return last


def rows(of: Report, statement: str) -> list[Row]:
    return [row for row in of.checkpoints if row.kind == "statement" and row.statement.startswith(statement)]


def every_row(of: Report) -> Iterator[Row]:
    def inside(row: Row) -> Iterator[Row]:
        yield row
        for part in row.parts:
            yield from inside(part)

    for row in of.checkpoints:
        yield from inside(row)


def check_conservation(of: Report) -> None:
    """The ledger's sum, and the unknown at most 1 %, at every row, part and the peak."""
    for row in (*every_row(of), of.peak):
        bytes_of = {name: size or 0 for name, size in row.categories.items()}
        outside = bytes_of["context"] + bytes_of["other_processes"] + bytes_of["context_or_others"]
        in_tensors = sum(bytes_of.values()) - outside - bytes_of["cached"]
        assert in_tensors == row.allocated
        assert in_tensors + bytes_of["cached"] == row.reserved
        assert sum(bytes_of.values()) == row.device_used
        assert bytes_of["unknown"] <= 0.01 * row.allocated
    assert sum(of.evidence.values()) == of.peak.allocated - (of.peak.categories["rounding"] or 0)


def test_the_colab_cell_runs_unmodified_and_its_numbers_are_exact(shell: Any) -> None:
    # With its pictures, as in a notebook.
    shell.display_formatter.active_types = shell.display_formatter.format_types
    run(shell, SETUP)
    run(shell, "%gpumem_device colab-2021")
    result, printed = run(shell, COLAB)
    assert result.success
    of = report()
    check_conservation(of)
    lines = [number for number, line in enumerate(COLAB.splitlines(), 1) if line.strip() and number > 1]
    body = [n for n in lines if n > 15 and not COLAB.splitlines()[n - 1].strip().startswith("#")]
    # One row for each statement of the loop in each of its two iterations; the loops' own lines only where memory moved.
    for line in body[1:]:
        assert [row.iteration for row in of.checkpoints if row.line == line] == [(1, 1), (1, 2)], line
    assert rows(of, "model = model.to(device)")[0].categories["parameters"] == PARAMETER_BYTES
    for iteration, (forward, backward, step) in enumerate(
        zip(rows(of, "output ="), rows(of, "loss.backward"), rows(of, "optimizer.step"), strict=True)
    ):
        assert forward.categories["gradients"] == (0 if iteration == 0 else PARAMETER_BYTES)
        assert forward.categories["activations"] > 0
        assert backward.categories["gradients"] == PARAMETER_BYTES
        # What is left after backward is what names of the cell hold: `output` (400 x 3000) and `loss`.
        assert backward.categories["activations"] == 400 * 3000 * 4 + 4
        assert step.categories["parameters"] == step.categories["gradients"] == PARAMETER_BYTES
        # Adam's two moments; the step counters are on the host.
        assert step.categories["optimizer_state"] == 2 * PARAMETER_BYTES
    inputs = 400 * 3000 * 4 + 4 * 100 * 1632 * 4 + 100 * 1632 * 4
    assert rows(of, "print('check 6')")[0].categories["inputs"] == inputs
    # What the author's own lines printed is what the report says of those rows.
    shown = re.findall(r"(\d+)MiB/16160MiB", printed)
    smi_rows = rows(of, "!nvidia-smi")
    assert len(shown) == len(smi_rows) == 8
    assert [int(text) for text in shown] == [row.device_used // MIB for row in smi_rows]
    assert int(shown[0]) == 2
    assert of.stand_ins
    assert of.device.smi_total_bytes // MIB == 16160


def dropout_in_parts(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as PyTorch's fakes have it: the mask has the type of the tensor, where CUDA's kernel keeps a byte."""
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p) if training and p else x


def bert_large_for_two_steps() -> Report:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    from gpumem_magic.virtual import gpu

    gpu.turn_on("V100-16GB")
    try:
        with gpumem_magic.measure() as measured:
            model = model.to_empty(device="cuda").train()
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")
            labels = torch.zeros(4, dtype=torch.long, device="cuda")
            for _ in range(2):
                model(input_ids=tokens, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        del model, optimizer, tokens, labels
        gpu.turn_off()
    return measured.report


def in_tensors(report: Report) -> int:
    """Bytes asked for by tensors at the peak: the rounding and the libraries' workspaces come beside them."""
    peak = report.peak.categories
    return report.peak.allocated - (peak["rounding"] or 0) - (peak["workspace"] or 0)


def test_bert_large_as_measured_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's MemTracker gives 11,968 MiB on fakes; CUDA's dropout keeps 60 MiB less in each of the 24 layers.

    What sums share between blocks while they run, and what CUDA's gradient of softmax multiplies first, fakes do not know.
    """
    whole = in_tensors(bert_large_for_two_steps())
    for function in (*reductions.KERNELS, torch.ops.aten._softmax_backward_data.default):
        monkeypatch.delitem(rules.BESIDE, function)
    of = bert_large_for_two_steps()
    check_conservation(of)
    assert round(of.peak.categories["parameters"] / MIB) == 1278
    # One for each thread that has a handle, forward's and backward's; from 2.15 on, only that of the product at the peak.
    workspaces = 2 * 8_519_680 + BIAS_WORKSPACE if WORKSPACES_ARE_KEPT else 8_519_680
    assert of.peak.categories["workspace"] == workspaces
    assert of.peak.categories["unknown"] == 0
    (after,) = [row for row in of.checkpoints if row.kind == "after"]
    assert [part.label.split()[0] for part in after.parts if part.label.startswith("iteration")] == ["iteration"] * 2
    assert round(in_tensors(of) / MIB) == 11968 - 24 * 60
    assert 0 < whole - in_tensors(of) < 64 * MIB
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_in_parts)
    assert round(in_tensors(bert_large_for_two_steps()) / MIB) == 11968


TRAIN = (
    SETUP
    + """
def train(model, loader, steps=6):
    optimizer = torch.optim.AdamW(model.parameters())
    for name, target, image in loader * (steps // 2):
        output = model(image.cuda(), torch.zeros(1, 1, 100, 1632, device="cuda"))
        loss = my_loss(output, target.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)


def phases(row: Row) -> list[str]:
    return [part.label.split()[0] for part in row.parts]


def test_a_call_that_trains_shows_its_iterations_and_phases(shell: Any) -> None:
    run(shell, TRAIN)
    run(shell, "%gpumem_device T4")
    result, _ = run(shell, "%%gpumem\nmodel = MyModel().to('cuda')\ntrain(model, trainloader)\n'done'\n")
    assert result.result == "done"
    of = report()
    check_conservation(of)
    (row,) = rows(of, "train(")
    assert phases(row) == ["iteration"] * 6
    for part in row.parts:
        assert phases(part)[:3] == ["forward", "backward", "optimizer"]
    assert "iteration" in of.peak.where


def test_out_of_memory_inside_a_call_names_the_part_and_is_raised_once_at_the_users_line(shell: Any) -> None:
    run(shell, TRAIN)
    run(shell, "%gpumem_device virtual:512MiB,context=400MiB")
    result, printed = run(shell, "%%gpumem\nmodel = MyModel().to('cuda')\ntrain(model, trainloader)\nreached = True\n")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert "reached" not in shell.user_ns
    assert printed.count("Traceback (most recent call last)") == 1
    assert re.search(r"-+> 3 train\(model, trainloader\)", re.sub(r"\x1b\[[\d;]*m", "", printed))
    of = report()
    check_conservation(of)
    assert of.error is not None
    assert of.error.type == "torch.OutOfMemoryError"
    assert (of.error.line, of.error.rounded is not None, of.error.segment is not None) == (3, True, True)
    (row,) = [row for row in of.checkpoints if row.kind == "error"]
    assert row.statement == "train(model, trainloader)"
    assert phases(row)[-1] in ("optimizer", "backward", "forward")
    assert printed.index("Out of memory at line 3") < printed.index("Traceback")
    # The next cell works: nothing of the failed one is held by us.
    result, _ = run(shell, "%%gpumem\nx = torch.ones(1000, device='cuda')\n")
    assert result.success


def test_a_trainer_shows_its_iterations(shell: Any, tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run(shell, "%gpumem_device T4")
    cell = f"""%%gpumem
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=500)
model = BertForSequenceClassification(config)
data = [dict(input_ids=torch.ones(16, dtype=torch.long), labels=torch.tensor(0)) for _ in range(8)]
arguments = TrainingArguments(output_dir={str(tmp_path)!r}, max_steps=3, per_device_train_batch_size=2, report_to="none",
                              save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
"""
    result, printed = run(shell, cell)
    assert result.success, printed
    of = report()
    check_conservation(of)
    (row,) = rows(of, "trainer.train()")
    assert phases(row) == ["iteration"] * 3
    parameters = 4 * sum(p.numel() for p in shell.user_ns["model"].parameters())
    assert row.categories["parameters"] == parameters
    # The Trainer's AdamW is fused: its step counters, 4 bytes for each parameter, are on the device too.
    count = len(list(shell.user_ns["model"].parameters()))
    assert row.categories["optimizer_state"] == 2 * parameters + 4 * count


def test_with_no_gpu_and_no_device_chosen_one_line_says_what_was_done(shell: Any) -> None:
    result, printed = run(shell, "%%gpumem\nimport torch\nx = torch.ones(1 << 20, device='cuda')\n")
    assert result.success
    assert sum("virtual T4 was turned on, and stays on" in note for note in report().notes) == 1
    assert "%gpumem_device NAME" in " ".join(printed.split())
    result, _ = run(shell, "y = x + 1; torch.cuda.memory_allocated()")
    assert result.result == 2 << 22


def test_a_model_that_went_to_the_cpu_before_is_explained(shell: Any) -> None:
    run(shell, SETUP + "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel = MyModel().to(device)\n")
    result, _ = run(shell, "%%gpumem\nout = model(torch.zeros(4, 1, 100, 1632), torch.zeros(1, 1, 100, 1632)).sum()\n")
    assert result.success
    notes = " ".join(report().notes)
    assert "Nothing was put on a device" in notes
    assert "Where an earlier cell chose the device" in notes
    assert "there was no GPU yet: run it again." in notes


def test_the_limit_on_iterations_ends_loops_of_the_cell_and_calls(shell: Any) -> None:
    run(shell, TRAIN)
    run(shell, "%gpumem_device T4")
    result, _ = run(shell, "%%gpumem --max-iterations 2\nmodel = MyModel().cuda()\ntrain(model, trainloader, 50)\n")
    assert result.success
    (row,) = rows(report(), "train(")
    assert sum(phases(part).count("optimizer") for part in row.parts) == 2
    assert any("Stopped as asked, after 2 training iterations" in note for note in report().notes)
    loop = """%%gpumem --max-iterations 3
model = MyModel().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10):
    for name, target, image in trainloader:
        loss = my_loss(model(image.cuda(), torch.zeros(1, 1, 100, 1632, device="cuda")), target.cuda())
        loss.backward()
        optimizer.step()
reached = epoch
"""
    result, _ = run(shell, loop)
    assert result.success
    assert shell.user_ns["reached"] == 1  # as `break` leaves it
    assert [row.iteration for row in rows(report(), "optimizer.step")] == [(1, 1), (1, 2), (2, 1)]


def test_a_loop_that_only_prepares_on_the_host_is_not_ended(shell: Any) -> None:
    run(shell, "%gpumem_device T4")
    cell = """%%gpumem --max-iterations 3
import torch
data = []
for k in range(20):
    data.append(torch.full((4,), float(k)))
for row in data:
    out = row.cuda()
"""
    result, _ = run(shell, cell)
    assert result.success
    assert len(shell.user_ns["data"]) == 20
    assert shell.user_ns["row"][0] == 2


def test_stop_once_iterations_repeat(shell: Any) -> None:
    run(shell, TRAIN)
    run(shell, "%gpumem_device T4")
    run(shell, "%%gpumem\nmodel = MyModel().cuda()\ntrain(model, trainloader, 20)\n")
    assert any("--until-repeat" in note for note in report().notes)
    result, _ = run(shell, "%%gpumem --until-repeat\nmodel = MyModel().cuda()\ntrain(model, trainloader, 1000)\n")
    assert result.success
    assert any(note.startswith("Stopped as asked") for note in report().notes)


def test_two_devices_in_one_report(shell: Any) -> None:
    run(shell, "%gpumem_device 2xT4")
    result, _ = run(
        shell,
        "%%gpumem\nimport torch\na = torch.ones(1 << 20, device='cuda')\nb = torch.ones(1 << 21, device='cuda:1')\n",
    )
    assert result.success
    of = report()
    assert (of.device.index, [other.device.index for other in of.devices]) == (0, [1])
    for one in (of, *of.devices):
        check_conservation(one)
    assert of.checkpoints[-1].allocated == 4 << 20
    assert of.devices[0].checkpoints[-1].allocated == 8 << 20


def test_categories_are_remembered_from_cell_to_cell(shell: Any) -> None:
    run(shell, TRAIN)
    run(shell, "%gpumem_device T4")
    run(shell, "%%gpumem\nmodel = MyModel().cuda()\ntrain(model, trainloader, 2)\n")
    run(shell, "%%gpumem\nmodel.eval()\nx = 1\n")
    before = report().checkpoints[0].categories
    assert (before["parameters"], before["gradients"], before["unknown"]) == (PARAMETER_BYTES, PARAMETER_BYTES, 0)


def test_a_report_survives_its_file(shell: Any, tmp_path: Any) -> None:
    run(shell, SETUP)
    run(shell, "%gpumem_device T4")
    run(shell, "%%gpumem -o kept -q\nmodel = MyModel().cuda()\n")
    kept = shell.user_ns["kept"]
    assert kept is gpumem_magic.last_report()
    kept.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == kept


def test_mark_and_ranges_are_parts(shell: Any) -> None:
    run(shell, "%gpumem_device T4")
    run(
        shell,
        """
import torch, gpumem_magic
def work():
    with torch.profiler.record_function("loading"):
        x = torch.ones(1 << 20, device="cuda")
    gpumem_magic.mark("half way")
    return x + 1
""",
    )
    run(shell, "%%gpumem\ny = work()\n")
    (row,) = rows(report(), "y = work()")
    labels = [part.label for part in row.parts]
    assert any("loading" in label for label in labels)
    assert any("half way" in label for label in labels)
    gpumem_magic.mark("outside a recording this does nothing")


def test_measure_outside_notebooks_and_its_errors() -> None:
    layer = nn.Linear(1000, 1000)

    def fail(layer: nn.Module) -> None:
        layer.cuda()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), gpumem_magic.measure(device="T4") as measured:
        fail(layer)
    assert measured.report.error is not None
    assert measured.report.error.type == "ValueError"
    check_conservation(measured.report)
    del layer
    with pytest.raises(DeviceError, match="T4"), gpumem_magic.measure(device="nonsense"):
        pass
    from gpumem_magic.virtual import gpu

    gpu.turn_off()
    assert not torch.cuda.is_available()


def test_nothing_of_the_users_is_kept_alive(shell: Any) -> None:
    import weakref

    run(shell, SETUP)
    run(shell, "%gpumem_device T4")
    run(shell, "%%gpumem -q\nmodel = MyModel().cuda()\nx = torch.ones(3, device='cuda')\n")
    held = [weakref.ref(shell.user_ns["model"]), weakref.ref(shell.user_ns["x"])]
    for name in ("model", "x"):
        del shell.user_ns[name]
    sys.last_traceback = None
    gc.collect()
    assert [reference() for reference in held] == [None, None]


@pytest.mark.parametrize("between", ["optimizer.zero_grad(set_to_none=False)", "pass", "optimizer.zero_grad()"])
def test_gradients_in_a_file_are_gradients_in_every_iteration(shell: Any, tmp_path: Path, between: str) -> None:
    run(shell, "%gpumem_device T4")
    result, _ = run(
        shell,
        f"""
import torch
torch.cuda.memory._record_memory_history()
net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    x = torch.randn(64, 512, device="cuda")
    {between}
    net(x).square().mean().backward()
    optimizer.step()
torch.cuda.memory._dump_snapshot({str(tmp_path / "trace.pickle")!r})
torch.cuda.memory._record_memory_history(None)
""",
    )
    assert result.success
    view = gpumem_magic.load(tmp_path / "trace.pickle").source
    assert view is not None
    weights = [
        view.labels[one.index].category
        for one in view.timeline.allocations
        if one.requested == 4 * 512 * 2048
        and view.frames_of(one)
        and any("backward" in f.name for f in view.frames_of(one))
    ]
    # Two weights, each of whose gradients is made anew in every iteration, be it kept or added to the one that is there.
    assert weights == ["gradients"] * 8
