"""The fast path of PyTorch's attention and encoder layers in inference: what CUDA makes of it, worked out from its source."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made, steps
from torch import nn

from gpumem_magic.virtual import gpu

BATCH, LENGTH, HEADS, SIZE = 4, 16, 8, 64
ROWS = BATCH * LENGTH
# Of float32 values.
RESULT, QKV, SCORES = ROWS * SIZE * 4, 3 * ROWS * SIZE * 4, BATCH * HEADS * LENGTH * LENGTH * 4
WEIGHTS = BATCH * LENGTH * LENGTH * 4
# cuBLASLt's, for a product with a bias.
LT = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB,torch=2.2")
    gpu.turn_off()


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(SIZE, HEADS, batch_first=True).cuda().eval()


def tokens() -> torch.Tensor:
    return torch.zeros(BATCH, LENGTH, SIZE, device="cuda")


def warm(layer: nn.Module, *args: Any, **kwargs: Any) -> list[int]:
    """What the second call asks for: cuBLAS has its workspace then."""
    with torch.no_grad():
        layer(*args, **kwargs)
        return made(lambda: layer(*args, **kwargs))


def test_with_weights_all_are_in_one_buffer_and_scores_are_overwritten() -> None:
    """The products, the buffer of queries, keys and values, the scores, the context's copy, the result, the weights' mean."""
    x = tokens()
    assert warm(attention(), x, x, x) == [QKV, QKV, SCORES, RESULT, RESULT, LT, WEIGHTS]


def test_each_is_let_go_as_soon_as_cuda_does() -> None:
    layer, x = attention(), tokens()
    with torch.no_grad():
        layer(x, x, x)
        taken = steps(lambda: layer(x, x, x))
    assert taken[:3] == [("alloc", QKV), ("alloc", QKV), ("free_requested", QKV)]
    end = [("free_requested", LT), ("free_requested", RESULT), ("alloc", WEIGHTS)]
    assert taken[7:] == [*end, ("free_requested", SCORES), ("free_requested", QKV)]


def test_without_weights_a_fused_kernel_is_taken() -> None:
    x = tokens()
    fused = warm(attention(), x, x, x, need_weights=False)
    assert fused[0] == QKV
    assert SCORES not in fused


def test_a_mask_takes_a_softmax_of_its_own() -> None:
    """The module makes the mask numbers, expanded to every head; the kernel makes them one byte each again."""
    x, mask = tokens(), torch.zeros(LENGTH, LENGTH, dtype=torch.bool, device="cuda")
    asked = warm(attention(), x, x, x, attn_mask=mask, need_weights=False)
    assert asked == [LENGTH * LENGTH * 4, QKV, QKV, SCORES, SCORES // 4, SCORES, RESULT, RESULT, LT]


def test_keys_of_another_tensor_are_projected_apart_and_joined() -> None:
    x, other = tokens(), tokens()
    # Not self-attention: `nn.MultiheadAttention` itself does not go this way.
    layer = attention()
    with torch.no_grad():
        args = (SIZE, HEADS, layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias)
        torch._native_multi_head_attention(x, other, other, *args)
        asked = made(lambda: torch._native_multi_head_attention(x, other, other, *args))
    assert asked == [RESULT, 2 * RESULT, QKV, QKV, SCORES, RESULT, RESULT, LT, WEIGHTS]


@pytest.mark.parametrize("first", [False, True])
def test_an_encoder_layer_adds_in_place(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 4 * SIZE, batch_first=True, norm_first=first).cuda().eval()
    x = tokens()
    attend = [*warm(layer.self_attn, x, x, x, need_weights=False)]
    norm, net = [RESULT, ROWS * 4, ROWS * 4], [4 * RESULT, LT, RESULT, LT]
    expected = [*norm, *attend, *norm, *net] if first else [*attend, *norm, *net, *norm]
    assert [one for one in warm(layer, x) if one] == expected


def test_training_and_gradients_take_the_ordinary_way() -> None:
    x = tokens()
    layer = attention()
    ordinary = made(lambda: layer(x, x, x))
    assert ordinary[:2] != [QKV, QKV]


def test_a_class_of_the_programs_own_is_still_asked() -> None:
    class Own(torch.Tensor):
        pass

    own = torch.zeros(2, 2).as_subclass(Own)
    assert torch.overrides.has_torch_function((own,))
    assert torch.overrides.has_torch_function((tokens(),)), "outside these modules nothing changed"


@pytest.mark.timeout(300)
def test_compiled_it_is_one_graph() -> None:
    counters = importlib.import_module("torch._dynamo.utils").counters
    layer, x = nn.TransformerEncoderLayer(SIZE, HEADS, batch_first=True).cuda().eval(), tokens()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer(x)
        counters.clear()
        torch.compile(layer, backend="aot_eager")(x)
    assert not counters["graph_break"], next(iter(counters["graph_break"]))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sequences_of_known_lengths_are_packed() -> None:
    """Every allocation and free as an H100 with PyTorch 2.11 was asked for them: four sequences of 33 tokens at most."""
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    batch, length, size, heads, net, lengths = 4, 33, 256, 4, 128, torch.tensor([33, 30, 27, 24])
    layer = nn.TransformerEncoderLayer(size, heads, net, batch_first=True, dtype=torch.half, device="cuda")
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(batch, length, size, device="cuda", dtype=torch.half)
    padding = (torch.arange(length) >= lengths[:, None]).cuda()
    with torch.no_grad():
        encoder(x, src_key_padding_mask=padding)
        taken = steps(lambda: encoder(x, src_key_padding_mask=padding))
    rows = int(lengths.sum())
    all_ = 2 * rows * size
    # Flags, a column of them, both, as integers, each row's end; how often one is set, in 64 bits.
    looked = [batch * length, batch, batch * (length + 1), 4 * batch * (length + 1), 8 * batch, 8 * batch * length]
    # Three times the tokens, two lists of ends, the context, the sums, the seeds, the projection; a norm with its figures.
    norm = [all_, 4 * rows, 4 * rows]
    attended = [3 * all_, 4 * (batch + 1), 4 * (batch + 1), all_, 4 * heads * rows, 16, 8, all_]
    expected = [
        *[2 * batch * length, *looked, 8 * batch * length, batch, 1],
        *[*looked, 8 * batch * length, 8 * batch, 16 * batch],
        *[all_, 4 * (3 * batch + 4), 8 * (3 * batch + 4)],
        *2 * [*attended, *norm, 2 * rows * net, all_, *norm],
        *[2 * batch * length * size, 4 * (3 * batch + 1)],
    ]
    assert [size for action, size in taken if action == "alloc"] == expected
    freed = [size for action, size in taken if action == "free_requested"]
    assert freed[-4:] == [all_, expected[-1], all_, 2 * batch * length]
    context = [4 * heads * rows, 4 * (batch + 1), 4 * (batch + 1), 16, 8, all_, 3 * all_, 4 * rows, 4 * rows, all_]
    assert any(freed[at : at + len(context)] == context for at in range(len(freed)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_scripted_an_encoder_runs_on_padded_sequences() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, 32, batch_first=True), 1).cuda().eval()
    padding = (torch.arange(LENGTH) >= torch.tensor([16, 9, 5, 12])[:, None]).cuda()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(encoder)
        assert scripted(tokens(), src_key_padding_mask=padding).shape == (BATCH, LENGTH, SIZE)
