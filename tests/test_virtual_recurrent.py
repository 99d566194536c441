"""RNNs, LSTMs and GRUs on the virtual GPU: one kernel for all steps, with what cuDNN takes for it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_for import made
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gpumem_magic
from gpumem_magic.units import round_up
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import recurrent

KINDS = (nn.LSTM, nn.GRU, nn.RNN)
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False},
    {"batch_first": True, "bidirectional": True, "num_layers": 2, "dropout": 0.1},
)


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("V100-16GB")
    gpu.turn_off()


def allocated() -> int:
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(("mode", "reserve", "workspace"), [(2, 736_000_000, 17_730_560), (3, 864_000_000, 13_169_920)])
def test_published_sizes(mode: int, reserve: int, workspace: int) -> None:
    """Printed in PyTorch's issue 2895: 4 layers of 320 units on 123 features, 25,000 steps in a batch of 100."""
    gates = {2: 4, 3: 3}[mode]
    weights = gates * 320 * (123 + 320 + 3 * 640)
    sizes = recurrent.Sizes(mode, 25_000, 100, 320, 4, 1, weights, 4)
    assert (sizes.reserve((1, 0)), sizes.workspace((1, 0))) == (reserve, workspace)


def recorded() -> Iterator[tuple[recurrent.Sizes, int, int]]:
    """What calls took on a real H100 (driver 580.159, torch 2.11.0+cu130, November 2026): a few of each kind of 2,474."""
    modes = {"relu": 0, "rnn": 1, "lstm": 2, "gru": 3}
    with (Path(__file__).parent / "data" / "recurrent_on_an_h100.csv").open(encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            mode = modes[row["kind"]]
            dtype = getattr(torch, row["dtype"])
            width, hidden, layers, batch, projected = (
                int(row[name]) for name in ("width", "hidden", "layers", "batch", "projected")
            )
            two = int(row["two"])
            states = projected or hidden
            rows = (1, 1, 4, 3)[mode] * hidden * (1 + two)
            weights = rows * (width + states + (layers - 1) * (states * (1 + two) + states))
            weights += layers * (1 + two) * hidden * projected
            packed = row["packed"] == "1"
            limit = (384, 384, 192, 192)[mode]
            sizes = recurrent.Sizes(
                mode, int(row["steps"]), batch, hidden, layers, 1 + two, weights, dtype.itemsize, width, projected,
                int(row["longest"]) * batch, float(row["dropout"]) > 0, row["train"] == "1",
                not (packed or projected) and dtype in (torch.float32, torch.float16) and hidden <= limit, packed,
            )  # fmt: skip
            yield sizes, int(row["workspace"]), int(row["reserve"])


def test_what_is_kept_is_what_an_h100_kept() -> None:
    found = [(sizes.reserve((2, 11)), reserve) for sizes, _, reserve in recorded() if sizes.train]
    assert len(found) > 80
    assert all(abs(ours - reserve) <= 128 for ours, reserve in found)


def test_what_a_call_works_in_is_near_what_it_was_on_an_h100() -> None:
    off = [
        (sizes.layers * sizes.directions, abs(sizes.workspace((2, 11)) - workspace) / workspace)
        for sizes, workspace, _ in recorded()
    ]
    # (Of the others most are packed.)
    assert sum(share == 0 for _, share in off) >= 0.9 * len(off)
    single = sorted(share for layers, share in off if layers == 1)
    several = sorted(share for layers, share in off if layers > 1)
    assert min(len(single), len(several)) > 40
    assert single[len(single) // 2] < 0.002
    assert several[len(several) // 2] < 0.002
    packed = sorted(abs(sizes.workspace((2, 11)) - nbytes) / nbytes for sizes, nbytes, _ in recorded() if sizes.packed)
    assert len(packed) > 150
    assert packed[len(packed) * 3 // 4] < 0.002


def test_recorded_calls_by_hand() -> None:
    """A GRU of 64 units on 64 numbers, 3 steps of 3 sequences: 8 MiB, its weights, 20 numbers of a unit for each step, 6 for each
    sequence. An LSTM of three layers in bfloat16 dropped out of 1,000 steps of 128 units between them."""
    gru = recurrent.Sizes(3, 9, 3, 64, 1, 1, 3 * 64 * 128, 4, 64, padded=9, small=True)
    assert gru.reserve((2, 11)) == 9 * 6 * 64 * 4 + 256 == 14_080
    assert gru.workspace((2, 11)) == 8 * 2**20 + 4 * (3 * 64 * 128 + 9 * 20 * 64 + 6 * 3 * 64) + 256 + 32 == 8_537_888
    # Both directions of an LSTM of 1,024 units on 80 numbers, 256 steps of 100 sequences: 14 numbers of a unit for each step.
    both = recurrent.Sizes(2, 25_600, 100, 1024, 1, 2, 8 * 1024 * (80 + 1024), 4, 80, padded=25_600, train=False)
    numbers = 8 * 1024 * 1104 + 25_600 * (14 * 1024 + 80) + 24 * 102_400
    assert both.workspace((2, 11)) == 2**24 + 4 * numbers + 256 + 800 == 1_538_982_944
    weights = 4 * 128 * (50 + 5 * 128)
    lstm = recurrent.Sizes(2, 1000, 50, 128, 3, 1, weights, 2, 50, padded=1000, dropout=True, small=True)
    assert lstm.reserve((2, 11)) == 1000 * 128 * 17 * 2 + 256 + 2 * 1000 * 128 // 8 == 4_384_256


def test_dropout_makes_the_states_of_its_random_numbers_once() -> None:
    """132 multiprocessors of 2,048 threads, 24 bytes each: 6,488,064 bytes on an H100, after a seed of 8."""
    gpu.turn_on("H100,torch=2.11")
    layer, x = nn.LSTM(16, 16, num_layers=2, dropout=0.5, device="cuda"), torch.zeros(3, 2, 16, device="cuda")
    layer.eval()
    with torch.no_grad():
        assert 6_488_064 not in made(lambda: layer(x))
        layer.train()
        first, second = (made(lambda: layer(x)) for _ in range(2))
    states = [2 * 2 * 16 * 4] * 2
    assert first[:4] == [*states, 8, 6_488_064]
    assert second == [*states, *first[4:]]


def test_weights_in_bfloat16_are_gathered_for_each_call() -> None:
    """As recorded: Python does not take the type for one of cuDNN's, and C++ does."""
    gpu.turn_on("H100,torch=2.11")
    layer = nn.LSTM(16, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(3, 2, 16, device="cuda", dtype=torch.bfloat16)
    assert len({one.untyped_storage().data_ptr() for one in layer.parameters()}) == 4
    with torch.no_grad():
        assert (4 * 32 * (16 + 32) + 8 * 32) * 2 in made(lambda: layer(x))


def test_layers_in_bfloat16_run_step_by_step_before_2_10() -> None:
    """As PyTorch's CUDA builds do; float16 has a buffer and a workspace of cuDNN's in both."""
    asked = {}
    for version in ("2.9", "2.10"):
        gpu.turn_on(f"A100-40GB,torch={version}")
        for dtype in (torch.float16, torch.bfloat16):
            layer = nn.LSTM(32, 64, device="cuda", dtype=dtype)
            x = torch.zeros(20, 8, 32, device="cuda", dtype=dtype)
            asked[version, dtype] = made(partial(layer, x))
        gpu.turn_off()
    # Of each step: both halves of the gates, those that the gradient needs, and the states.
    gates, state = 8 * 4 * 64 * 2, 8 * 64 * 2
    assert asked["2.9", torch.bfloat16].count(gates) > 20
    assert asked["2.9", torch.bfloat16].count(state) > 20
    assert len(asked["2.10", torch.bfloat16]) < 12
    assert all(len(asked[version, torch.float16]) < 12 for version in ("2.9", "2.10"))


@pytest.mark.parametrize(
    ("layer", "width", "numbers"), [(partial(nn.RNN, 64, 64, 3), 64, 66_304), (partial(nn.GRU, 8, 8, 1), 8, 864)]
)
def test_the_buffer_has_room_for_biases_that_a_layer_does_without(layer: Any, width: int, numbers: int) -> None:
    """As an H100 took it for two layers of `sweeps_4` in both directions, in bfloat16 (132,608 and 1,728 bytes)."""
    options = {"bias": False, "bidirectional": True, "device": "cuda"}
    halves = layer(**options, dtype=torch.bfloat16)
    assert 2 * numbers in made(lambda: halves(torch.randn(4, 1, width, device="cuda", dtype=torch.bfloat16)))
    before = allocated()
    kept = layer(**options)
    assert allocated() - before == round_up(4 * numbers, 512)
    del kept


def test_without_biases_each_weight_s_gradient_is_copied_out_of_the_buffer() -> None:
    """As an H100 was asked: other parts are looked for in the buffer than there are (`get_parameters` in ``cudnn/RNN.cpp``)."""
    gpu.turn_on("H100,torch=2.11")
    layer = nn.GRU(8, 8, bias=False, bidirectional=True, device="cuda")
    out, _ = layer(torch.zeros(3, 2, 8, device="cuda"))
    gradient = torch.zeros_like(out)
    found = made(lambda: torch.autograd.grad(out, list(layer.parameters()), gradient))
    workspace, buffer = found[-5], 4 * 864
    assert found[-6:] == [buffer, workspace, *[3 * 8 * 8 * 4] * 4]


def test_results_of_layers_without_gates_are_kept_apart_between_layers() -> None:
    """RNNs of two and one layers of 8 units on 8 numbers, 7 steps of 33 sequences, as an H100's cuDNN took for them."""
    two = recurrent.Sizes(0, 231, 33, 8, 2, 1, 4 * 64, 4, 8, padded=231, small=True)
    assert two.workspace((2, 11)) == 16_909_728
    with_tangent = recurrent.Sizes(1, 231, 33, 8, 2, 1, 4 * 64, 4, 8, padded=231, small=True)
    one = recurrent.Sizes(1, 231, 33, 8, 1, 1, 4 * 64, 4, 8, padded=231, small=True)
    assert with_tangent.workspace((2, 11)) == two.workspace((2, 11))
    # (A second layer has 8 MiB of its own, and six states of each sequence.)
    assert two.workspace((2, 11)) - one.workspace((2, 11)) == 8 * 2**20 + 231 * 8 * 4 + 6 * 33 * 8 * 4


@pytest.mark.parametrize(
    ("steps", "hidden", "layers", "directions", "width", "projected", "bytes_each", "recorded"),
    [
        (1056, 128, 2, 1, 8, 32, 2, 18_480_416),
        (1056, 64, 2, 2, 8, 32, 4, 38_326_816),
        (33, 64, 1, 2, 100, 16, 4, 17_336_640),
        # Of wide inputs the gradient works in most.
        (1056, 64, 1, 1, 100, 16, 2, 9_455_904),
        (231, 64, 2, 2, 100, 32, 2, 34_504_448),
    ],
)
def test_projected_states_are_worked_on_beside_the_cells(
    steps: int, hidden: int, layers: int, directions: int, width: int, projected: int, bytes_each: int, recorded: int
) -> None:
    """What cuDNN worked in for LSTMs with projections of 33 sequences, on an H100 (2.11)."""
    of_layers = [width, *[projected * directions] * (layers - 1)]
    weights = directions * sum(4 * hidden * (given + projected) + hidden * projected for given in of_layers)
    sizes = recurrent.Sizes(
        2, steps, 33, hidden, layers, directions, weights, bytes_each, width, projected, padded=steps
    )
    assert sizes.workspace((2, 11)) == recorded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_in_bfloat16_are_not_kept_on_the_chip(dtype: torch.dtype) -> None:
    """A GRU of two directions, of 8 units on 8 numbers, for 32 steps of four sequences, with an H100 (2.11)."""
    gpu.turn_on("H100,torch=2.11")
    layer = nn.GRU(8, 8, 1, bias=False, bidirectional=True, batch_first=True, device="cuda", dtype=dtype)
    x = torch.zeros(4, 32, 8, device="cuda", dtype=dtype)
    assert (16_806_560 in made(lambda: layer(x))) == (dtype == torch.bfloat16)


def test_each_of_two_gradients_lays_out_the_input_for_itself() -> None:
    gpu.turn_on("H100,torch=2.11")
    layer = nn.GRU(16, 32, batch_first=True, device="cuda")
    x = torch.zeros(5, 3, 16, device="cuda")
    out, _ = layer(x)
    gradient = torch.zeros_like(out)
    found = made(lambda: torch.autograd.grad(out, list(layer.parameters()), gradient))
    state, given, weights = 5 * 32 * 4, 5 * 3 * 16 * 4, (3 * 32 * (16 + 32) + 6 * 32) * 4
    workspace = found[4]
    assert found == [state, given, given, state, workspace, given, weights, workspace]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_results_and_gradients_are_as_on_the_host(kind: Any, way: dict[str, Any]) -> None:
    shapes = []
    for device in ("cpu", "cuda"):
        layer = kind(16, 32, **way).to(device)
        x = torch.randn(7, 5, 16, device=device, requires_grad=True)
        out, states = layer(x)
        out.sum().backward()
        found = [
            out,
            x.grad,
            *(states if isinstance(states, tuple) else [states]),
            *(one.grad for one in layer.parameters()),
        ]
        assert all(one.device.type == device for one in found)
        shapes.append([(one.shape, one.dtype, one.stride()) for one in found])
    assert shapes[0] == shapes[1]


def test_an_lstm_with_projections() -> None:
    layer = nn.LSTM(16, 32, proj_size=8).cuda()
    out, (hidden, cell) = layer(torch.randn(7, 5, 16, device="cuda"))
    out.sum().backward()
    assert (out.shape, hidden.shape, cell.shape) == ((7, 5, 8), (1, 5, 8), (1, 5, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: Any) -> None:
    layer = kind(16, 32).cuda()
    packed = pack_padded_sequence(torch.randn(7, 3, 16, device="cuda"), torch.tensor([7, 5, 2]))
    out, _ = layer(packed)
    assert out.data.shape == (14, 32)
    padded, lengths = pad_packed_sequence(out)
    assert padded.shape == (7, 3, 32)
    assert lengths.tolist() == [7, 5, 2]
    padded.sum().backward()


@pytest.mark.parametrize("batch_first", [False, True])
def test_packing_copies_each_piece_of_rows_that_have_as_many_sequences(batch_first: bool) -> None:
    """PackedSequence.cpp: rows 0 and 1 of all three, 2 to 4 of two, 5 and 6 of one; what lies in one piece is not copied."""
    x = torch.randn(*((3, 7) if batch_first else (7, 3)), 16, device="cuda")
    copied = (6, 6) if batch_first else (6, 2)
    found = made(lambda: pack_padded_sequence(x, torch.tensor([7, 5, 2]), batch_first=batch_first))
    assert found == [rows * 16 * 4 for rows in (*copied, 14)]


def test_the_weights_lie_in_one_buffer_and_so_do_their_gradients() -> None:
    layer = nn.LSTM(64, 128, num_layers=2)
    size = sum(one.nbytes for one in layer.parameters())
    layer.cuda()
    assert allocated() == size
    assert len({one.untyped_storage().data_ptr() for one in layer.parameters()}) == 1
    layer(torch.randn(3, 4, 64, device="cuda"))[0].sum().backward()
    assert len({one.grad.untyped_storage().data_ptr() for one in layer.parameters() if one.grad is not None}) == 1


def test_what_is_kept_for_backward_and_what_is_not() -> None:
    steps, batch, width = 512, 64, 128
    layer = nn.LSTM(width, width).cuda()
    x = torch.randn(steps, batch, width, device="cuda")
    before = allocated()
    out, states = layer(x)
    result = out.nbytes + sum(one.nbytes for one in states)
    # The zeros that the layer begins with are kept too.
    # (What is kept has a head of 256 bytes, and blocks are of 512.)
    assert allocated() - before == result + 5 * steps * batch * width * 4 + 512 + 2 * batch * width * 4
    del out, states
    layer.eval()
    out, states = layer(x)
    assert allocated() - before == result + 2 * batch * width * 4
    del out, states
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, states = layer(x)
        assert allocated() - before == result
        del out, states


def test_weights_that_do_not_lie_together_are_copied_together() -> None:
    layer = nn.LSTM(128, 128).cuda().eval()
    x = torch.randn(2, 1, 128, device="cuda")
    rises = []
    with torch.no_grad():
        for _ in range(2):
            before = allocated()
            torch.cuda.reset_peak_memory_stats()
            layer(x)
            rises.append(torch.cuda.max_memory_allocated() - before)
            layer.weight_hh_l0.data = layer.weight_hh_l0.data.clone()
    assert rises[1] - rises[0] == sum(one.nbytes for one in layer.parameters())


def test_autocast_casts_weights_into_one_buffer() -> None:
    layer = nn.LSTM(64, 128).cuda()
    with torch.autocast("cuda", torch.float16):
        out, _ = layer(torch.randn(3, 4, 64, device="cuda"))
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert {one.grad.dtype for one in layer.parameters() if one.grad is not None} == {torch.float32}


def test_without_cudnn_it_runs_cell_by_cell() -> None:
    layer = nn.GRU(16, 16).cuda()
    x = torch.randn(20, 2, 16, device="cuda")
    with torch.backends.cudnn.flags(enabled=False):
        before = allocated()
        out, _ = layer(x)
        cells = allocated() - before
    del out
    before = allocated()
    out, _ = layer(x)
    assert cells != allocated() - before
    out.sum().backward()


def test_a_card_of_amds_runs_it_cell_by_cell_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    gpu.turn_on("A100-40GB,torch=2.9+rocm6.4")
    layer = nn.LSTM(16, 16).cuda()
    assert len({one.untyped_storage().data_ptr() for one in layer.parameters()}) == len(list(layer.parameters()))
    layer(torch.randn(3, 2, 16, device="cuda"))[0].sum().backward()
    assert not [one for one in recwarn if "cuDNN" in str(one.message)]


def test_the_report_says_what_is_estimated() -> None:
    layer = nn.LSTM(256, 256).cuda()
    x = torch.randn(64, 32, 256, device="cuda")
    with gpumem_magic.measure() as measured:
        layer(x)[0].sum().backward()
    (note,) = [one for one in measured.report.notes if "recurrent" in one]
    assert "estimate" in note
    peak = measured.report.peak
    assert (
        sum(size or 0 for name, size in peak.categories.items() if name not in ("context", "cached")) == peak.allocated
    )
