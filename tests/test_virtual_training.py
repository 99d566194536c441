"""Modules and optimizers on the virtual GPU: identity of parameters, the path an optimizer takes, and what a step costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps
from torch.utils.checkpoint import checkpoint
from torch_versions import WORKSPACES_ARE_KEPT

from gpumem_magic.virtual import gpu

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB,context=0")
    gpu.turn_off()


def allocated() -> int:
    return torch.cuda.memory_allocated()


# ---- parameters


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cuda"),
        lambda model: model.cuda(),
        lambda model: model.to(torch.device("cuda", 0), torch.float16),
        lambda model: model.cuda().half(),
        lambda model: model.to("cuda").cpu().to("cuda"),
        lambda model: model._apply(lambda tensor: tensor.cuda()),
    ],
)
def test_moving_a_module_keeps_its_parameters(move: Callable[[torch.nn.Module], Any]) -> None:
    model = torch.nn.Sequential(torch.torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert move(model) is model
    for old, new, held in zip(before, model.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert old is new
        assert old is held
        assert isinstance(new, torch.nn.Parameter)
        assert new.is_cuda
        assert new.is_leaf
        assert new.requires_grad
    assert all(buffer.is_cuda for buffer in model.buffers())
    model(torch.zeros(2, 4, device="cuda", dtype=model[0].weight.dtype)).sum().backward()
    optimizer.step()
    assert all(state["momentum_buffer"].is_cuda for state in optimizer.state.values())


def test_back_on_the_host_a_parameter_is_an_ordinary_one_again() -> None:
    class Own(torch.nn.Parameter):
        """A parameter of the program's own kind."""

    model = torch.torch.nn.Linear(4, 4)
    model.extra = Own(torch.ones(3))
    kinds = [type(parameter) for parameter in model.parameters()]
    model.cuda().cpu()
    assert [type(parameter) for parameter in model.parameters()] == kinds
    assert model(torch.zeros(1, 4)).shape == (1, 4)


def test_a_parameter_that_moves_away_keeps_only_what_a_backward_pass_has_saved_of_it() -> None:
    model = torch.nn.Linear(1024, 256).cuda()
    loss = model(torch.zeros(4, 1024, device="cuda", requires_grad=True)).sum()
    held = torch.cuda.memory_allocated()
    model.cpu()
    # The product has saved its weight, for the input's gradient, and the sum no bias.
    assert held - torch.cuda.memory_allocated() == 256 * 4
    del loss
    assert held - torch.cuda.memory_allocated() >= 256 * 4 + 1024 * 256 * 4


def test_backward_from_nothing_is_as_without_a_device() -> None:
    torch.autograd.backward([])
    torch.autograd.backward(iter(()))


def test_hooks_gradients_and_attributes_go_with_a_parameter() -> None:
    model = torch.torch.nn.Linear(4, 4)
    seen: list[str] = []
    model.weight.register_hook(lambda gradient: seen.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    model.weight.decay = 0.5  # type: ignore[assignment]
    model(torch.zeros(1, 4)).sum().backward()
    gradient = model.weight.grad
    model.cuda()
    assert model.weight.grad is gradient
    assert gradient is not None
    assert gradient.is_cuda
    assert model.weight.decay == 0.5
    seen.clear()
    model(torch.zeros(1, 4, device="cuda")).sum().backward()
    assert seen == ["hook", "after"]


def test_tied_parameters_stay_tied_and_are_held_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256, bias=False))
    model[1].weight = model[0].weight
    model.cuda()
    assert model[1].weight is model[0].weight
    assert allocated() == 256 * 64 * 4


def test_a_module_is_converted_one_parameter_at_a_time() -> None:
    model = torch.nn.Module()
    for index in range(4):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(MIB, device="cuda")))
    assert allocated() == 16 * MIB
    torch.cuda.reset_peak_memory_stats()
    model.half()
    assert torch.cuda.max_memory_allocated() == 18 * MIB
    assert allocated() == 8 * MIB


def test_exact_bytes_of_a_training_step() -> None:
    """Weights, gradients and Adam's two moments, to the byte; one batch of activations between."""
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512, bias=False), torch.nn.ReLU(), torch.nn.Linear(512, 128, bias=False)
    )
    weights = (256 * 512 + 512 * 128) * 4
    model.cuda()
    assert allocated() == weights
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(64, 256, device="cuda")
    loss = model(x).sum()
    kept = gpu.current().devices[0].model.cublas_workspace_bytes  # type: ignore[union-attr]
    workspace = kept if WORKSPACES_ARE_KEPT else 0
    assert allocated() == weights + 64 * 256 * 4 + 64 * 512 * 4 + 512 + workspace  # the ReLU's output, the loss
    loss.backward()
    assert allocated() == 2 * weights + 64 * 256 * 4 + 512 + 2 * workspace
    optimizer.step()
    assert allocated() == 4 * weights + 64 * 256 * 4 + 512 + 2 * workspace
    optimizer.zero_grad()
    assert allocated() == 3 * weights + 64 * 256 * 4 + 512 + 2 * workspace


# ---- optimizers


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[int, int]:
    """(bytes that the step left, bytes that it took in passing) of one step over 4 parameters of 1 MiB."""
    parameters = [torch.nn.Parameter(torch.zeros(256 * KIB, device="cuda")) for _ in range(4)]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert allocated() == before
    return before - 8 * MIB, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_takes_the_path_that_it_takes_on_a_device(kind: Any) -> None:
    left, by_default = stepped(kind)
    assert 8 * MIB <= left <= 8 * MIB + 4 * 512
    _, foreach = stepped(functools.partial(kind, foreach=True))
    _, single = stepped(functools.partial(kind, foreach=False))
    _, fused = stepped(functools.partial(kind, fused=True))
    assert by_default == foreach
    assert foreach >= 4 * MIB, "a temporary for all parameters at once"
    assert single == 3 * MIB, "a root, a quotient, and the quotient of the parameter before"
    assert fused <= 4 * 512


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 * MIB, 4 * MIB),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 4 * MIB, 4 * MIB),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), 4 * MIB, 4 * MIB),
        (lambda p: torch.optim.RMSprop(p), 4 * MIB, 4 * MIB + 4 * 512),
        (lambda p: torch.optim.Adagrad(p), 4 * MIB, 4 * MIB + 4 * 512),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 12 * MIB, 12 * MIB + 4 * 512),
        (lambda p: torch.optim.Adadelta(p), 8 * MIB, 8 * MIB + 4 * 512),
        (lambda p: torch.optim.NAdam(p), 8 * MIB, 8 * MIB + 8 * 512),
        (lambda p: torch.optim.Adam(p, capturable=True), 8 * MIB, 8 * MIB + 4 * 512),
    ],
)  # fmt: skip
def test_what_optimizers_keep(make: Callable[[Any], torch.optim.Optimizer], least: int, most: int) -> None:
    assert least <= stepped(make)[0] <= most


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        # Decay added to all gradients; the look ahead goes into these.
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1), [8000, 8000]),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), []),
        # One by one: the decayed gradient, then the one that looks ahead.
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False), [8000] * 4),
        # The squares' average less the square of the average.
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), [8000, 8000]),
        # A parameter's norm, rows' and columns', their product, the rows' mean, the update's norm.
        (lambda p: torch.optim.Adafactor(p), [4, 160, 200, 8000, 4, 4] * 2),
    ],
)
def test_what_a_step_takes_in_its_order(make: Callable[[Any], torch.optim.Optimizer], parts: list[int]) -> None:
    weights = [torch.nn.Parameter(torch.zeros(40, 50, device="cuda")) for _ in range(2)]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert made(optimizer.step) == parts


def test_adafactor_keeps_rows_and_columns() -> None:
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
    optimizer = torch.optim.Adafactor([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = gpu.current().devices[0].model.cublas_workspace_bytes  # type: ignore[union-attr]
    workspace = kept if WORKSPACES_ARE_KEPT else 0
    assert 0 < allocated() - 8 * MIB - workspace <= 2 * 1024 * 4 + 512


def test_an_optimizer_of_ones_own() -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-4) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(average.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                    average.lerp_(p.grad, 0.01)

    left, passing = stepped(Lion)
    assert (left, passing) == (4 * MIB, MIB)


def test_gradients_kept_as_zeros_accumulated_and_dropped() -> None:
    layer = torch.nn.Linear(512, 512, bias=False, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.zeros(8, 512, device="cuda")
    layer(x).sum().backward()
    address, with_gradient = layer.weight.grad.data_ptr(), allocated()  # type: ignore[union-attr]
    for _ in range(3):
        layer(x).sum().backward()
    assert allocated() == with_gradient
    optimizer.zero_grad(set_to_none=False)
    assert (layer.weight.grad.data_ptr(), allocated()) == (address, with_gradient)  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert allocated() == with_gradient - MIB


def test_clipping_and_schedulers() -> None:
    layer = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    layer(torch.zeros(2, 8, device="cuda")).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.is_cuda
    torch.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 1e-3


def test_an_optimizer_step_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # a product's workspace would come and go in 2.15
    gpu.turn_on("A100-40GB,context=0")
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    x = torch.zeros(1, 512, device="cuda")
    model(x).sum().backward()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    assert allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 3 * MIB, "gradients never all at once"


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_what_it_casts_on_a_device(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.zeros(8, 64, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        y = layer(x)
        assert y.dtype == dtype
        assert torch.mm(x, x.t()).dtype == dtype
        assert F.softmax(y, -1).dtype == torch.float32
        assert F.layer_norm(y, (64,)).dtype == torch.float32
        assert F.cross_entropy(y, torch.zeros(8, dtype=torch.long, device="cuda")).dtype == torch.float32
        assert (y + x).dtype == torch.float32
        assert y.relu().dtype == dtype
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y.sigmoid(), y)
    assert layer(x).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_autocast_holds_cast_weights_until_it_ends() -> None:
    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    x = torch.zeros(1, 1024, device="cuda")
    with torch.no_grad():
        layer(x)
    before = allocated()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        layer(x)
        assert allocated() - before == 2 * MIB
        layer(x)
        assert allocated() - before == 2 * MIB
    assert allocated() == before


def _casts(run: Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor], version: str) -> list[tuple[str, int]]:
    """Steps that are as large as the copy of a weight in half precision, of a backward inside of a region of bfloat16."""
    gpu.turn_on(f"A100-40GB,context=0,torch={version}")
    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    x = torch.zeros(8, 1024, device="cuda", requires_grad=True)
    layer(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = run(layer, x).sum()
        found = steps(loss.backward)
    assert layer.weight.grad is None or layer.weight.grad.dtype == torch.float32
    return [(action, size) for action, size in found if size == 2 * MIB]


def test_a_backward_inside_of_a_region_casts_to_float16_before_2_5() -> None:
    """As the CUDA builds of 2.2 and 2.3 do, and that of 2.7 does not."""
    run = lambda layer, x: layer(x)  # noqa: E731
    made, gone = ("alloc", 2 * MIB), ("free_requested", 2 * MIB)
    # The gradient of the weight alone.
    assert _casts(run, "2.5") == [made, gone]
    # That in float16; the weight in float16, for the gradient of x; the first in bfloat16.
    assert _casts(run, "2.4") == [made, made, gone, made, gone, gone]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_worked_out_anew_inside_of_a_region_casts_its_weights_anew(reentrant: bool) -> None:
    """As the CUDA builds of 2.3, 2.7 and 2.12 do: a thread counts the regions that it is in, and the one that goes backward is in
    none but those that the parts begin."""

    def twice(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        part = functools.partial(checkpoint, layer, use_reentrant=reentrant)
        return part(part(x))  # type: ignore[no-any-return]

    copies = [action for action, _ in _casts(twice, "2.7")]
    # The copy of the region goes at the end of the first part, which goes on with it; the second makes one of its own.
    assert copies.count("free_requested") - copies.count("alloc") == 1
    # Without gradients (as a part with `reentrant` runs first) no gradient came to the weight through it before 2.11.
    assert copies.count("alloc") == (2 if reentrant else 4)
    assert _casts(twice, "2.11").count(("alloc", 2 * MIB)) == (3 if reentrant else 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(2):
        with torch.autocast("cuda", dtype=dtype):
            loss = model(torch.zeros(8, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(optimizer.state) == 4, "a step that is not skipped: the scaler finds no infinity"
    assert scaler.get_scale() == (65536.0 if dtype == torch.float16 else 1.0)


def test_the_old_names_of_autocast_and_scaler() -> None:
    with pytest.warns(FutureWarning):
        scaler = torch.cuda.amp.GradScaler()
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast():
        assert torch.mm(*[torch.zeros(2, 2, device="cuda")] * 2).dtype == torch.float16
    assert scaler.is_enabled()


def test_a_model_changes_its_type_under_a_default_device() -> None:
    gpu.turn_on("T4")
    with torch.device("cuda"):
        layer = torch.nn.Linear(4, 4).half()
    assert layer.weight.dtype == torch.half
    assert layer.weight.is_leaf
