"""What functions that PyTorch writes in Python hold on a device with an older PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.older_functions import holding

BATCH, LENGTH, WIDTH, HEADS = 4, 256, 512, 8
UNIT = BATCH * LENGTH * WIDTH * 4
SCORES = BATCH * HEADS * LENGTH * LENGTH * 4

LETS_GO = "del q_scaled" in inspect.getsource(F.multi_head_attention_forward)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    gpu.turn_off()


def _highest(version: str) -> int:
    """How much more than before is asked for at most in attention without gradients."""
    gpu.turn_on(f"T4,torch={version}")
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=False, device="cuda")
    x = torch.empty(BATCH, LENGTH, WIDTH, device="cuda")
    with torch.no_grad():
        layer(x, x, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        layer(x, x, x)
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before


@pytest.mark.skipif(not LETS_GO, reason="this PyTorch's own function lets go of nothing")
def test_attention_with_weights_keeps_the_scaled_query_before_2_12() -> None:
    # Where softmax runs: the packed projection (3 units), the scores and their softmax; before 2.12 the scaled query, too.
    assert _highest("2.12") == 3 * UNIT + 2 * SCORES
    assert _highest("2.11") == 4 * UNIT + 2 * SCORES


@pytest.mark.skipif(not LETS_GO, reason="this PyTorch's own function lets go of nothing")
def test_the_results_of_heads_of_one_number_are_laid_out_before_2_12() -> None:
    """As an H100 with 2.11 was asked for it; since then a batch of one needs no copy."""
    made = {}
    for version in ("2.11", "2.12"):
        gpu.turn_on(f"H100,torch={version}")
        layer = torch.nn.MultiheadAttention(3, 3, device="cuda")
        x = torch.empty(5, 3, device="cuda")
        layer(x, x, x)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer(x, x, x)
        made[version] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        gpu.turn_off()
    assert made["2.11"] == made["2.12"] + 1


@pytest.mark.parametrize("foreach", [None, False])
def test_the_norms_of_gradients_stay_until_these_are_clipped_before_2_6(foreach: bool | None) -> None:
    """As the builds of 2.2 to 2.4 keep them."""
    for version, kept in (("2.4", True), ("2.6", False)):
        gpu.turn_on(f"T4,torch={version}")
        parameters = [torch.nn.Parameter(torch.zeros(20, 20, device="cuda")) for _ in range(3)]
        for one in parameters:
            one.grad = torch.ones_like(one)
        found = steps(lambda parameters=parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach))
        # Behind the last number that is made the factor and its bound go, and before these all norms.
        last = max(place for place, (action, _) in enumerate(found) if action == "alloc")
        assert found[last + 1 :] == [("free_requested", 4)] * (5 if kept else 2)
        gpu.turn_off()
    # (In no way otherwise.)
    host = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for one in host:
        one.grad = torch.full((3,), 2.0)
    gpu.turn_on("T4,torch=2.4,values=real")
    assert torch.nn.utils.clip_grad_norm_(host, 1.0, foreach=foreach).item() == pytest.approx(24**0.5)
    assert host[0].grad is not None
    assert float(host[0].grad.norm()) == pytest.approx(0.5**0.5, rel=1e-4)


def test_it_runs_with_gradients() -> None:
    gpu.turn_on("T4,torch=2.6")
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda")
    x = torch.empty(BATCH, LENGTH, WIDTH, device="cuda", requires_grad=True)
    layer(x, x, x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_results_are_those_of_the_function_itself() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4)
    x = torch.randn(5, 2, 16)
    arguments = (x, x, x, 16, 4, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    for need_weights in (True, False):
        results = [
            function(*arguments, layer.out_proj.weight, layer.out_proj.bias, need_weights=need_weights)
            for function in (F.multi_head_attention_forward, holding(F.multi_head_attention_forward))
        ]
        assert torch.equal(results[0][0], results[1][0])
        assert (results[0][1] is None) == (results[1][1] is None)


def test_lines_are_those_of_the_file() -> None:
    """Recordings show where memory was asked for."""
    copy, original = (
        function.__code__ for function in (holding(F.multi_head_attention_forward), F.multi_head_attention_forward)
    )
    assert copy.co_filename == original.co_filename
    assert copy.co_firstlineno == original.co_firstlineno
    lines = {line for _, _, line in original.co_lines()} - {line for _, _, line in copy.co_lines()}
    source, first = inspect.getsourcelines(F.multi_head_attention_forward)
    assert all("del " in source[line - first] for line in lines if line is not None)


@pytest.mark.parametrize(("version", "first"), [("2.3", 30), ("2.4", 40)])
def test_optimizers_begin_with_the_first_type_of_their_parameters_before_2_4(version: str, first: int) -> None:
    gpu.turn_on(f"T4,torch={version}")
    half = torch.zeros(15, dtype=torch.half, device="cuda", requires_grad=True)
    whole = torch.zeros(10, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([half, whole], foreach=True)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert made(optimizer.step)[0] == first
