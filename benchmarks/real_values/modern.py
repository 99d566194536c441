"""What newer pages of PyTorch show, and what programs do around tensors: traces, hooks, files, loaders, streams, graphs."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from basics import show
from networks import fit
from torch import nn
from torch.nn.utils import parametrizations

# ---- programs as data


def symbolic_trace(device: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x) * self.scale) + x.sum(-1, keepdim=True)

    traced = torch.fx.symbolic_trace(Net().to(device))
    for node in traced.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    traced.recompile()
    x = torch.randn(3, 4, device=device)
    found = []

    class Shapes(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            out = super().run_node(n)
            found.append((n.op, tuple(out.shape)))
            return out

    show(Shapes(traced).run(x).sum().item(), traced(x).mean().item())
    print(found)


def fused_for_inference(device: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(device)
    model(torch.randn(8, 3, 8, 8, device=device))
    model.eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    x = torch.randn(2, 3, 8, 8, device=device)
    print(
        torch.allclose(fused(x), model[1](model[0](x)), atol=1e-5),
        fused.weight.device.type == torch.device(device).type,
    )


def traced_and_scripted(device: str) -> None:
    def steps(x: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i in range(n):
            if bool(out.sum() < 5):
                out = out + x * (i + 1)
        return out

    x = torch.full((2, 2), 0.5, device=device)
    traced = torch.jit.trace(lambda a: (a * 2.5 + 1) / 3 - 0.5, x)
    show(torch.jit.script(steps)(x, 6).sum().item(), traced(x + 1).sum().item())
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).to(device)), file)
    file.seek(0)
    show(torch.jit.load(file, map_location=device)(x).sum().item())


def compiled_on_the_way(device: str) -> None:
    layer = nn.Linear(4, 4).to(device)
    called = torch.compile(lambda x: layer(x).relu().sum(), backend="eager")
    x = torch.randn(3, 4, device=device)
    show(called(x).item(), called(x * 2).item())


def own_operator(device: str) -> None:
    @torch.library.custom_op("modern::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x.detach().cpu()) ** 3).to(x.device)

    cube.register_autograd(
        lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    cube.register_fake(torch.empty_like)
    x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    cube(x).sum().backward()
    print(x.grad.tolist())


# ---- gradients


class _Exp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


def functions_of_ones_own(device: str) -> None:
    x = torch.linspace(0, 1, 4, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(_Exp.apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    show(first.sum().item(), second.sum().item())
    show(*torch.func.vmap(torch.func.grad(lambda a: _Exp.apply(a)))(x.detach()).tolist())


def straight_through(device: str) -> None:
    logits = torch.randn(4, 5, device=device, requires_grad=True)
    hard = F.gumbel_softmax(logits, tau=0.7, hard=True)
    (hard * torch.arange(5.0, device=device)).sum().backward()
    print(hard.argmax(-1).tolist())
    show(logits.grad.abs().sum().item())


def hooks_of_all_kinds(device: str) -> None:
    said = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, out: out.clamp(max=1))
    model[2].register_full_backward_hook(lambda m, given, out: said.append(round(out[0].sum().item(), 4)))
    x = torch.randn(3, 4, device=device, requires_grad=True)
    x.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: said.append(tuple(p.grad.shape)))
    out = model(x)
    out.grad_fn.register_hook(lambda given, out: said.append(len(given)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
        out = out + model(x).exp()
    out.sum().backward()
    print(said)
    show(x.grad.sum().item())


def optimizer_in_backward(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    x, y = torch.randn(8, 4, device=device), torch.randn(8, 1, device=device)
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        show(loss.item())


def saved_on_the_host(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to(device)
    x = torch.randn(8, 4, device=device)
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        loss = model(x).square().mean()
    loss.backward()
    show(loss.item(), model[0].weight.grad.norm().item())


def anomalies(device: str) -> None:
    x = torch.tensor([-1.0, 4.0], device=device, requires_grad=True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            (x.sqrt() * 0 + x).sum().backward()
    except RuntimeError as error:
        print(str(error).splitlines()[0])


def selective_checkpoint(device: str) -> None:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    layer, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device, requires_grad=True)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda a: layer(a).sin().cos() @ a.t(), x, use_reentrant=False, context_fn=context)
    out.sum().backward()
    show(out.sum().item(), x.grad.sum().item())


def hessian_vector_products(device: str) -> None:
    def loss(w: torch.Tensor) -> torch.Tensor:
        return (w.sin() * w.flip(0)).sum()

    w, v = torch.linspace(0, 1, 5, device=device), torch.ones(5, device=device)
    show(*torch.func.jvp(torch.func.grad(loss), (w,), (v,))[1].tolist())
    show(torch.func.hessian(loss)(w).diagonal().sum().item(), torch.autograd.functional.vhp(loss, w, v)[1].sum().item())


# ---- files, copies, other libraries


def checkpoints_across_devices(device: str) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "rng": torch.get_rng_state()},
        file,
    )
    for place in ("cpu", device, torch.device(device), lambda storage, location: storage, {"cuda:0": "cpu"}):
        file.seek(0)
        found = torch.load(file, map_location=place, weights_only=True)
        again = nn.Linear(3, 2).to(device)
        again.load_state_dict(found["model"])
        other = torch.optim.Adam(again.parameters(), lr=0.1)
        other.load_state_dict(found["optimizer"])
        again(torch.ones(1, 3, device=device)).sum().backward()
        other.step()
        show(again.weight.sum().item(), other.state_dict()["state"][0]["exp_avg"].sum().item())


def assigned_and_empty(device: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    whole = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model.load_state_dict({name: value.to(device) for name, value in whole.state_dict().items()}, assign=True)
    with torch.device("meta"):
        other = nn.Linear(3, 4)
    other = other.to_empty(device=device)
    nn.init.ones_(other.weight), nn.init.zeros_(other.bias)
    x = torch.ones(2, 3, device=device)
    show(model(x).abs().sum().item(), other(x).sum().item())


def modules_and_tensors_in_files(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    model(torch.randn(8, 3, device=device))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.ones(2, 3, device=device)
    models = [
        torch.load(file, weights_only=False), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)
    ]  # fmt: skip
    show(*[one.eval()(x).sum().item() for one in models])
    tensor = torch.arange(6.0, device=device).view(2, 3).t()
    shared = {"whole": tensor, "part": tensor[1:]}
    copied = copy.deepcopy(shared)
    copied["whole"].zero_()
    print(copied["part"].sum().item(), pickle.loads(pickle.dumps(tensor)).tolist(), tensor.clone().stride())


def arrays(device: str) -> None:
    x = torch.arange(6, dtype=torch.float32, device=device).view(2, 3)
    array = x.cpu().numpy()
    print(np.asarray(x.cpu()).sum(), x.numpy(force=True).mean(), array.dtype, np.float32(2) * x.sum().cpu().numpy())
    print(
        torch.from_numpy(array).to(device).add(np.float32(1)).tolist(),
        torch.as_tensor(array, device=device).sum().item(),
    )
    print(
        torch.tensor(np.array([1, 2]), device=device).dtype, (x * np.float64(0.5)).dtype, x[np.array([1, 0])].tolist()
    )
    print(
        [float(value) for value in x[0]],
        list(map(int, x[1])),
        int(x.sum()),
        x.sum().item() // 2,
        round(float(x.std()), 4),
    )


def exchanged_by_dlpack(device: str) -> None:
    x = torch.arange(4.0, device=device)
    again = torch.from_dlpack(x)
    again += 1
    print(x.tolist(), again.device == x.device)
    print(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).sum().item())


def printed_tensors(device: str) -> None:
    x = torch.linspace(0, 1, 12, device=device).view(3, 4)
    print(x, x[0, 0], x.to(torch.int64), x > 0.5, torch.empty(0, device=device), nn.Parameter(x[0]))
    print(f"{x.mean():.3f} {x[0, 1]:.2e} {x.dtype!s} {x.sum()}", len(x), 0.5 in x, x.tolist()[0])
    torch.set_printoptions(precision=2, sci_mode=False)
    print(x * 1000, torch.arange(2000, device=device))
    torch.set_printoptions(profile="default")


def default_devices(device: str) -> None:
    with torch.device(device):
        x, layer = torch.arange(4.0), nn.Linear(4, 2)
        show(layer(x).sum().item(), torch.tensor([1.0, 2.0]).sum().item())
    torch.set_default_device(device)
    try:
        noise = torch.randn(3)
        index = torch.randperm(4)
        print(
            noise.device.type == torch.device(device).type,
            sorted(index.tolist()),
            torch.get_default_device().type == device,
        )
    finally:
        torch.set_default_device(None)
    show(noise.sum().item())


# ---- loading, streams, graphs, precision


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(number)), "y": number % 2, "name": str(number)}


def loaded_by_workers(device: str) -> None:
    weights = torch.tensor([1.0, 3.0] * 6)
    sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), 8, generator=torch.Generator().manual_seed(1))
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            _Rows(), 4, sampler=sampler, num_workers=workers, pin_memory=device != "cpu", persistent_workers=workers > 0
        )
        for _ in range(2):
            total = 0.0
            for batch in loader:
                x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(device)
                total += (x.sum(1) * y).sum().item()
            print(total, batch["name"])


def prefetched_by_a_stream(device: str) -> None:
    cuda = device != "cpu"
    stream = torch.cuda.Stream() if cuda else None
    batches = iter([torch.full((4,), float(number)) for number in range(5)])

    def fetch() -> Any:
        batch = next(batches, None)
        if batch is None or stream is None:
            return batch
        with torch.cuda.stream(stream):
            return batch.pin_memory().to(device, non_blocking=True).mul_(2).div_(2)

    found, following = 0.0, fetch()
    while following is not None:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
            following.record_stream(torch.cuda.current_stream())
        batch = following
        following = fetch()
        found += batch.sum().item()
    print(found)


def captured_graphs(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(6, 4, device=device), torch.randn(6, 1, device=device)) for _ in range(3)]
    if device != "cpu":
        sample = torch.zeros(6, 4, device=device)
        state = copy.deepcopy(model.state_dict())
        model = torch.cuda.make_graphed_callables(model, (sample,))
        model.load_state_dict(state)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        show(loss.item())
    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    if device == "cpu":
        out = x * 3
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = x * 3
        x.fill_(1)
        graph.replay()
    print(out.tolist())


def older_names_of_mixed_precision(device: str) -> None:
    kind = torch.device(device).type
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, 8, device=device), torch.randn(16, 1, device=device)
    scaler = torch.amp.GradScaler(kind, enabled=False)
    for step in range(3):
        on = (
            torch.cuda.amp.autocast(dtype=torch.bfloat16)
            if kind == "cuda" and step
            else torch.autocast(kind, torch.bfloat16)
        )
        with on:
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(out.dtype, torch.is_autocast_enabled(kind), round(loss.item(), 2), round(norm.item(), 1))


def eight_bits(device: str) -> None:
    x = torch.linspace(-3, 3, 7, device=device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        print(x.to(dtype).to(torch.float32).tolist(), torch.finfo(dtype).max)
    scale = x.abs().amax() / 127
    whole = (x / scale).round().clamp(-128, 127).to(torch.int8)
    print(whole.tolist())
    show((whole.float() * scale - x).abs().max().item())


def quantised_in_training(device: str) -> None:
    fake = torch.ao.quantization.FakeQuantize(
        torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ).to(device)
    layer, x = nn.Linear(4, 4).to(device), torch.randn(8, 4, device=device)
    for _ in range(2):
        out = fake(layer(x))
        out.square().mean().backward()
    show(out.sum().item(), fake.scale.item(), layer.weight.grad.norm().item())
    small = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(copy.deepcopy(layer)).cpu(), {nn.Linear}, dtype=torch.qint8
    )
    show(small(x.cpu()).sum().item())


def random_states(device: str) -> None:
    torch.manual_seed(3)
    generator = torch.Generator(device).manual_seed(5)
    show(torch.rand(2, generator=generator, device=device).sum().item())
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device=device)
    generator.set_state(state)
    print(torch.equal(first, torch.randn(3, generator=generator, device=device)), generator.initial_seed())
    with torch.random.fork_rng():
        torch.manual_seed(9)
        inside = torch.rand(1, device=device).item()
    torch.manual_seed(9)
    print(inside == torch.rand(1, device=device).item())
    print(sorted(torch.multinomial(torch.ones(5, device=device), 5, generator=generator).tolist()))


# ---- newer layers, optimizers and agents


def parametrised_layers(device: str) -> None:
    layers = [
        parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    ]  # fmt: skip
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(6, 4, device=device)
    fit(model, lambda: (model(x) - 1).square().mean(), device, steps=2)
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    show(model(x).sum().item())


def newer_optimizers(device: str) -> None:
    made = {
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True),
        "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
        "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
        "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
        **({"Muon": lambda p: torch.optim.Muon(p, lr=0.1)} if hasattr(torch.optim, "Muon") else {}),
    }
    x, y = torch.randn(8, 6, device=device), torch.randn(8, 4, device=device)
    start = torch.randn(6, 4, device=device)
    for name, make in made.items():
        weight = nn.Parameter(start.clone())
        optimizer = make([weight])
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(x @ weight, y)
            loss.backward()
            optimizer.step()
        print(name, f"{loss.item():.3f}")


def attention_by_kernels(device: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(2, 4, 6, 8, device=device, requires_grad=True) for _ in range(3))
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        show(out.sum().item())
    plain = (q.detach(), k.detach(), v.detach())
    near = flex_attention(*plain, score_mod=lambda score, b, h, i, j: torch.where((i - j).abs() < 2, score, -math.inf))
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    grouped.sum().backward()
    show(near.sum().item(), q.grad.sum().item(), grouped.sum().item())


def selective_scan(device: str) -> None:
    batch, length, width, states = 2, 10, 4, 3
    x = torch.randn(batch, length, width, device=device, requires_grad=True)
    step = F.softplus(torch.randn(batch, length, width, device=device))
    decay = -torch.rand(width, states, device=device).exp()
    into, out_of = torch.randn(2, batch, length, states, device=device).unbind(0)
    state, outs = x.new_zeros(batch, width, states), []
    for t in range(length):
        state = (step[:, t, :, None] * decay).exp() * state + (step[:, t] * x[:, t])[..., None] * into[:, t, None]
        outs.append((state * out_of[:, t, None]).sum(-1))
    y = torch.stack(outs, 1)
    y.square().mean().backward()
    show(y.sum().item(), x.grad.norm().item())


def receptance_weighted_keys(device: str) -> None:
    r, k, v = (torch.randn(2, 8, 4, device=device) for _ in range(3))
    decay, first = torch.rand(4, device=device).neg(), torch.randn(4, device=device)
    above, below, most = (
        torch.zeros(2, 4, device=device),
        torch.zeros(2, 4, device=device),
        torch.full((2, 4), -1e38, device=device),
    )
    outs = []
    for t in range(8):
        now = torch.maximum(most, first + k[:, t])
        a, b = (most - now).exp(), (first + k[:, t] - now).exp()
        outs.append(r[:, t].sigmoid() * (a * above + b * v[:, t]) / (a * below + b))
        now = torch.maximum(most + decay, k[:, t])
        a, b = (most + decay - now).exp(), (k[:, t] - now).exp()
        above, below, most = a * above + b * v[:, t], a * below + b, now
    show(torch.stack(outs).sum().item())


def spline_network(device: str) -> None:
    grid = torch.linspace(-1.5, 1.5, 11, device=device)

    def basis(x: torch.Tensor) -> torch.Tensor:
        x = x[..., None]
        bases = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
        for k in range(1, 4):
            left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * bases[..., :-1]
            bases = left + (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
        return bases

    weights = nn.Parameter(torch.randn(3, 7, 2, device=device) * 0.1)
    x = torch.rand(16, 3, device=device) * 2 - 1
    y = torch.stack([x.sin().sum(1), x.square().sum(1)], 1)
    optimizer = torch.optim.LBFGS([weights], lr=0.5, max_iter=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(torch.einsum("bik,iko->bo", basis(x), weights), y)
        loss.backward()
        return loss

    show(*[optimizer.step(closure).item() for _ in range(3)])


def sparse_queries(device: str) -> None:
    """Informer's attention: the queries that differ most from the mean get scores, the others the mean of the values."""
    q, k, v = (torch.randn(2, 3, 12, 4, device=device) for _ in range(3))
    sampled = torch.randint(12, (12, 5), device=device)
    scores = torch.einsum("bhqd,bhqsd->bhqs", q, k[:, :, sampled])
    measure = scores.amax(-1) - scores.sum(-1) / 12
    top = measure.topk(4, sorted=False).indices.sort(-1).values
    picked = q.gather(2, top[..., None].expand(-1, -1, -1, 4))
    out = v.mean(2, keepdim=True).expand(-1, -1, 12, -1).clone()
    out.scatter_(2, top[..., None].expand(-1, -1, -1, 4), (picked @ k.transpose(2, 3) / 2).softmax(-1) @ v)
    print(top[0].tolist())
    show(out.sum().item())


def blocks_of_forecasts(device: str) -> None:
    """N-HiTS: each block tells what is left at a coarser rate, and interpolates."""
    blocks = nn.ModuleList(nn.Linear(24 // rate, 24 // rate + 6 // min(rate, 6)) for rate in (6, 2, 1)).to(device)
    x = torch.sin(torch.arange(30.0, device=device) / 3).repeat(4, 1) + torch.randn(4, 30, device=device) * 0.1

    def forecast() -> torch.Tensor:
        rest, told = x[:, :24], torch.zeros(4, 6, device=device)
        for block, rate in zip(blocks, (6, 2, 1), strict=True):
            found = block(F.max_pool1d(rest[:, None], rate)[:, 0])
            back, ahead = found.split([24 // rate, found.shape[1] - 24 // rate], 1)
            rest = rest - F.interpolate(back[:, None], 24, mode="linear")[:, 0]
            told = told + F.interpolate(ahead[:, None], 6, mode="linear")[:, 0]
        return F.l1_loss(told, x[:, 24:])

    fit(blocks, forecast, device)


def soft_actor_critic(device: str) -> None:
    actor, log_alpha = nn.Linear(3, 4).to(device), torch.zeros(1, device=device, requires_grad=True)
    critics = [nn.Linear(5, 1).to(device) for _ in range(2)]
    targets = copy.deepcopy(critics)
    optimizer = torch.optim.Adam(
        [*actor.parameters(), *critics[0].parameters(), *critics[1].parameters(), log_alpha], 1e-2
    )
    state, following, reward = (
        torch.randn(8, 3, device=device),
        torch.randn(8, 3, device=device),
        torch.randn(8, 1, device=device),
    )

    def act(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(seen).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = raw.tanh()
        return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(-1, keepdim=True)

    for _ in range(3):
        with torch.no_grad():
            action, log_prob = act(following)
            least = torch.min(*[one(torch.cat([following, action], -1)) for one in targets])
            aim = reward + 0.99 * (least - log_alpha.exp() * log_prob)
        action, log_prob = act(state)
        pairs = torch.cat([state, action], -1)
        of_critics = sum(F.mse_loss(one(pairs.detach()), aim) for one in critics)
        of_actor = (log_alpha.exp().detach() * log_prob - torch.min(*[one(pairs) for one in critics])).mean()
        of_alpha = -(log_alpha * (log_prob.detach() - 2)).mean()
        optimizer.zero_grad()
        (of_critics + of_actor + of_alpha).backward()
        optimizer.step()
        with torch.no_grad():
            for one, its in zip(critics, targets, strict=True):
                for mine, other in zip(one.parameters(), its.parameters(), strict=True):
                    other.lerp_(mine, 0.05)
        show(of_critics.item(), of_actor.item(), of_alpha.item())


def dreaming(device: str) -> None:
    """A recurrent state space model with categorical states, whose steps are drawn and passed straight through."""
    cell, prior, posterior = nn.GRUCell(8, 6).to(device), nn.Linear(6, 8).to(device), nn.Linear(10, 8).to(device)
    decoder = nn.Linear(14, 4).to(device)
    seen = torch.randn(5, 3, 4, device=device)
    modules = nn.ModuleList([cell, prior, posterior, decoder])

    def loss() -> torch.Tensor:
        hidden, drawn, total = torch.zeros(3, 6, device=device), torch.zeros(3, 8, device=device), 0.0
        for frame in seen:
            hidden = cell(drawn, hidden)
            logits = posterior(torch.cat([hidden, frame], -1)).view(3, 2, 4)
            dist = torch.distributions.OneHotCategoricalStraightThrough(logits=logits)
            before = torch.distributions.OneHotCategorical(logits=prior(hidden).view(3, 2, 4))
            drawn = dist.rsample().flatten(1)
            total = total + F.mse_loss(decoder(torch.cat([hidden, drawn], -1)), frame)
            total = total + torch.distributions.kl_divergence(dist, before).sum(-1).clamp(min=1.0).mean()
        return total  # type: ignore[return-value]

    fit(modules, loss, device, steps=3)


def found_anomalies(device: str) -> None:
    coder = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 6)).to(device)
    usual = torch.randn(32, 6, device=device) * 0.1 + 1
    fit(coder, lambda: F.mse_loss(coder(usual), usual), device, steps=3)
    rows = torch.cat([usual[:4], torch.full((2, 6), 5.0, device=device)])
    with torch.no_grad():
        error = (coder(rows) - rows).square().mean(1)
    limit = torch.quantile((coder(usual) - usual).square().mean(1).detach(), 0.95)
    print((error > limit).nonzero().flatten().tolist()[-2:], torch.nanmedian(error).isfinite().item())


def segments_of_graphs(device: str) -> None:
    values = torch.arange(10.0, device=device, requires_grad=True)
    lengths, owner = (
        torch.tensor([3, 0, 5, 2], device=device),
        torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 3, 3], device=device),
    )
    means = torch.zeros(4, device=device).scatter_reduce(0, owner, values, "mean", include_self=False)
    most = torch.zeros(4, device=device).index_reduce(0, owner, values, "amax", include_self=False)
    sums = torch.segment_reduce(values, "sum", lengths=lengths)
    (means + most + sums).sum().backward()
    print(means.tolist(), most.tolist(), sums.tolist(), values.grad.sum().item())
    print(torch.repeat_interleave(torch.arange(4, device=device), lengths).tolist(), torch.bincount(owner).tolist())


def sound(device: str) -> None:
    wave = torch.sin(torch.arange(512.0, device=device) * 0.3) + torch.randn(512, device=device) * 0.01
    window = torch.hann_window(64, device=device)
    spectrum = torch.stft(wave, 64, 16, window=window, return_complex=True)
    again = torch.istft(spectrum, 64, 16, window=window, length=512)
    show(spectrum.abs().mean().item(), (again - wave).abs().max().item())
    phase = torch.rand(spectrum.shape, device=device) * 2 * math.pi
    for _ in range(3):
        guess = torch.istft(torch.polar(spectrum.abs(), phase), 64, 16, window=window, length=512)
        phase = torch.stft(guess, 64, 16, window=window, return_complex=True).angle()
    filters = torch.linspace(0, 1, 33, device=device).expand(4, 33) * torch.arange(1, 5, device=device)[:, None]
    show((filters @ spectrum.abs().square()).clamp(min=1e-5).log10().mean().item())
    print(spectrum.abs().mean(1).argmax().item())


def decompositions_by_chance(device: str) -> None:
    a = torch.randn(20, 3, device=device) @ torch.randn(3, 8, device=device)
    _, s, _ = torch.svd_lowrank(a, q=4)
    show(s.sum().item(), torch.linalg.lstsq(a[:8, :8] + torch.eye(8, device=device), a[:8]).solution.norm().item())
    print(torch.linalg.matrix_rank(a).item(), torch.linalg.cond(torch.eye(3, device=device) * 2).item())
    show(torch.linalg.cholesky_ex(a.t() @ a + torch.eye(8, device=device)).L.diagonal().prod().item())
    show(torch.cdist(a[:3], a[3:6]).sum().item(), torch.cov(a.t()).trace().item(), torch.corrcoef(a[:3]).sum().item())


def stochastic_depth(device: str) -> None:
    from torch.nn.utils import vector_to_parameters
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)
    data = [(torch.randn(8, 4, device=device), torch.randn(8, 1, device=device)) for _ in range(3)]
    for x, y in data:
        optimizer.zero_grad()
        loss = F.huber_loss(model(x) if torch.rand(()) < 0.9 else model[3](model[0](x)), y)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        schedule.step()
    update_bn(data, averaged, device=torch.device(device))
    flat = nn.utils.parameters_to_vector(model.parameters())
    vector_to_parameters(flat * 0.5, model.parameters())
    show(loss.item(), averaged(data[0][0]).sum().item(), flat.norm().item(), model(data[0][0]).sum().item())


def masked_tensors(device: str) -> None:
    with contextlib.suppress(ImportError):
        import warnings

        from torch.masked import masked_tensor

        warnings.simplefilter("ignore")
        x = torch.arange(6.0, device=device).view(2, 3)
        held = masked_tensor(x, x > 1)
        print(held.sum().item(), held.amax(1).get_data().tolist(), torch.masked.mean(x, 1, mask=x > 1).tolist())
