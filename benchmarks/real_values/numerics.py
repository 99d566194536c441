"""Numbers: linear algebra, FFT, indexing, sorting, sparse matrices, distributions, derivatives of all kinds, solvers."""

# ruff: noqa: B007 - programs print after their loops how far they came
from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from basics import show
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


def linear_algebra(device: str) -> None:
    a = torch.randn(5, 5, device=device)
    spd = a @ a.T + 5 * torch.eye(5, device=device)
    b = torch.randn(5, 2, device=device)
    show(torch.linalg.det(spd).item(), torch.linalg.cond(spd).item(), torch.linalg.norm(a).item())
    print(torch.linalg.solve(spd, b), torch.linalg.cholesky(spd), torch.linalg.eigvalsh(spd), torch.linalg.svdvals(a))
    q, r = torch.linalg.qr(a)
    print((q @ r - a).abs().max() < 1e-5, torch.linalg.matrix_rank(a), torch.linalg.pinv(a).shape)
    print(torch.linalg.lstsq(a, b).solution.sum().item().__format__(".3f"), torch.linalg.matrix_exp(a / 5).trace())


def through_a_decomposition(device: str) -> None:
    a = torch.randn(4, 4, device=device, requires_grad=True)
    spd = a @ a.T + torch.eye(4, device=device)
    (torch.linalg.slogdet(spd)[1] + torch.linalg.inv(spd).sum() + torch.linalg.eigvalsh(spd)[0]).backward()
    print(a.grad)


def principal_components(device: str) -> None:
    x = torch.randn(100, 6, device=device) @ torch.diag(torch.tensor([5.0, 3, 1, 0.5, 0.1, 0.01], device=device))
    _, s, v = torch.pca_lowrank(x, 3)
    print(s, (x - x.mean(0)) @ v.abs()[:, :2].sum(1)[:, None][:6] is not None)


def power_iteration(device: str) -> None:
    a = torch.tensor([[4.0, 1.0], [2.0, 3.0]], device=device)
    v = torch.ones(2, device=device)
    for step in range(100):
        new = a @ v / (a @ v).norm()
        if torch.allclose(new, v, atol=1e-7):
            break
        v = new
    show(step, (v @ a @ v / (v @ v)).item())


def conjugate_gradients(device: str) -> None:
    a = torch.randn(20, 20, device=device)
    a = a @ a.T + torch.eye(20, device=device)
    b = torch.ones(20, device=device)
    x = torch.zeros_like(b)
    r = b - a @ x
    p = r.clone()
    steps = 0
    while r.norm() > 1e-4 and steps < 200:
        alpha = (r @ r) / (p @ (a @ p))
        x = x + alpha * p
        after = r - alpha * (a @ p)
        p = after + (after @ after) / (r @ r) * p
        r = after
        steps += 1
    print(steps > 5, (a @ x - b).norm().item() < 1e-3)


def fourier(device: str) -> None:
    t = torch.arange(256, device=device) / 256
    signal = torch.sin(2 * math.pi * 12 * t) + 0.5 * torch.sin(2 * math.pi * 40 * t)
    spectrum = torch.fft.rfft(signal)
    print(spectrum.abs().topk(2).indices, torch.allclose(torch.fft.irfft(spectrum), signal, atol=1e-5))
    image = torch.randn(8, 8, device=device)
    low = torch.fft.fftshift(torch.fft.fft2(image))
    low[:2] = 0
    print(torch.fft.ifft2(torch.fft.ifftshift(low)).real.sum())
    window = torch.hann_window(64, device=device)
    stft = torch.stft(signal, 64, 16, window=window, return_complex=True)
    print(
        stft.abs().mean(1).argmax(), torch.istft(stft, 64, 16, window=window, length=256).sub(signal).abs().max() < 1e-4
    )


def complex_numbers(device: str) -> None:
    z = torch.randn(3, dtype=torch.complex64, device=device, requires_grad=True)
    (z.abs().sum() + (z.conj() * z * 2j).imag.sum()).backward()
    print(z, z.grad, torch.view_as_real(z.detach()), torch.vdot(z.detach(), z.detach()))


def einsum_of_all_kinds(device: str) -> None:
    a, b = torch.randn(3, 4, 5, device=device), torch.randn(3, 5, 2, device=device)
    for text, given in (("bij,bjk->bik", (a, b)), ("bij->bji", (a,)), ("bij->", (a,)), ("bii->bi", (a[:, :, :4],))):
        show(text, torch.einsum(text, *given).double().abs().sum().item())
    show(torch.tensordot(a, b, dims=([2], [1])).sum().item(), torch.kron(a[0, :2, :2], b[0, :2]).sum().item())


def indexing(device: str) -> None:
    x = torch.arange(24.0, device=device).reshape(4, 6)
    print(x[[0, 2]], x[x > 10], x[torch.tensor([1, 3], device=device), [0, 5]], x[..., -1], x[:, None, 1:4:2].shape)
    x[x % 2 == 0] = -1
    x[[1, 2], 3] = 100
    x[0] += torch.ones(6, device=device)
    x[:, 1] = torch.tensor([9.0, 8, 7, 6], device=device)
    print(x)
    y = torch.zeros(4, 6, device=device, requires_grad=True)
    (y[[0, 0, 1]] * 3 + y[:, 2:5].sum()).sum().backward()
    print(y.grad)


def gather_and_scatter(device: str) -> None:
    x = torch.arange(12.0, device=device).reshape(3, 4)
    index = torch.tensor([[0, 1, 3], [2, 2, 0], [1, 0, 3]], device=device)
    print(x.gather(1, index), torch.zeros(3, 4, device=device).scatter_add_(1, index, torch.ones(3, 3, device=device)))
    print(
        torch.zeros(5, device=device).index_add_(
            0, torch.tensor([0, 4, 0], device=device), torch.ones(3, device=device)
        )
    )
    print(
        x.scatter_reduce(1, index, torch.full((3, 3), 7.0, device=device), "amax"),
        x.take(torch.tensor([0, 11], device=device)),
    )
    print(
        torch.take_along_dim(x, x.argsort(descending=True), 1), x.index_select(1, torch.tensor([3, 0], device=device))
    )


def boolean_masks(device: str) -> None:
    x = torch.randn(6, 5, device=device)
    mask = x > 0
    print(
        mask.sum().item(), x[mask].shape, x.masked_select(mask).sum(), x.masked_fill(mask, 0).sum(), mask.nonzero()[:3]
    )
    print(torch.where(mask, x, -x).min() >= 0, mask.any(1), mask.all(0), torch.argwhere(mask).shape)
    i, j = torch.where(mask)
    print(i.tolist()[:4], j.tolist()[:4], torch.count_nonzero(mask))
    if (x.sum() > 0).item():
        print("positive")
    else:
        print("negative")


def sorting(device: str) -> None:
    x = torch.tensor([3, 1, 2, 3, 1, 9, 0], device=device)
    print(*x.sort(), *x.unique(return_inverse=True, return_counts=True), *x.topk(3), x.msort())
    print(x.unique_consecutive(), x.bincount(), x.float().histc(3), x.float().median(), x.mode(), x.kthvalue(2))
    print(
        torch.searchsorted(x.sort().values, torch.tensor([2, 5], device=device)), x.float().quantile(0.3), x.cumsum(0)
    )
    print(
        x.repeat_interleave(torch.tensor([1, 0, 2, 0, 1, 1, 3], device=device)),
        torch.combinations(x[:3]),
        x.flip(0),
        x.roll(2),
    )


def sizes_from_values(device: str) -> None:
    labels = torch.tensor([0, 4, 2, 4], device=device)
    print(
        F.one_hot(labels), torch.zeros(int(labels.max()) + 1, 2).shape, nn.Linear(3, int(labels.max()) + 1).weight.shape
    )
    lengths = torch.tensor([3, 1, 2], device=device)
    print(
        torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None],
        torch.split(torch.arange(6), lengths.tolist()),
    )
    for row in range(int(lengths[0])):
        print(row)


def sparse_matrices(device: str) -> None:
    indices = torch.tensor([[0, 1, 1, 2], [2, 0, 2, 1]], device=device)
    s = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4, 5, 6], device=device), (3, 3))
    dense = torch.randn(3, 2, device=device)
    print(
        torch.sparse.mm(s, dense),
        s.to_dense(),
        (s + s).coalesce().values(),
        s.t().coalesce().indices(),
        torch.sparse.sum(s),
    )
    double = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]], device=device), torch.ones(2, device=device), (2, 2)
    )
    print(double.coalesce().values(), dense.relu().to_sparse()._nnz() > 0)


def graph_convolution(device: str) -> None:
    edges = torch.randint(0, 20, (2, 60), device=device)
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(60, device=device), (20, 20)).coalesce()
    features, labels = torch.randn(20, 7, device=device), torch.randint(0, 3, (20,), device=device)
    w1 = nn.Parameter(torch.randn(7, 8, device=device) * 0.1)
    w2 = nn.Parameter(torch.randn(8, 3, device=device) * 0.1)
    optimizer = torch.optim.Adam([w1, w2], lr=0.05)
    for _ in range(5):
        out = torch.sparse.mm(adjacency, torch.sparse.mm(adjacency, features @ w1).relu() @ w2)
        loss = F.cross_entropy(out, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss.item())


def embeddings_with_sparse_gradients(device: str) -> None:
    table = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3], device=device)).pow(2).sum().backward()
        optimizer.step()
    print(
        table.weight,
        F.embedding_bag(torch.tensor([1, 2, 4], device=device), table.weight, torch.tensor([0, 2], device=device)),
    )


def distributions(device: str) -> None:
    from torch import distributions as d

    loc, scale = torch.zeros(3, device=device), torch.ones(3, device=device)
    normal = d.Normal(loc, scale)
    print(normal.sample(), normal.log_prob(loc + 1), d.kl_divergence(normal, d.Normal(loc + 1, scale)))
    print(
        d.Categorical(logits=torch.tensor([0.1, 3.0, 0.2], device=device)).sample((6,)), d.Bernoulli(scale / 2).sample()
    )
    print(
        d.Gamma(scale * 2, scale).sample(),
        d.Beta(scale, scale * 2).rsample(),
        d.Dirichlet(scale).sample(),
        d.Poisson(scale * 4).sample(),
    )
    print(
        d.MultivariateNormal(loc, torch.eye(3, device=device)).sample(),
        d.Exponential(scale).sample(),
        d.Laplace(loc, scale).sample(),
    )
    try:
        d.Normal(loc, -scale)
    except ValueError:
        print("refused")


def sampling(device: str) -> None:
    weights = torch.tensor([0.0, 0.1, 0.7, 0.2], device=device)
    print(torch.multinomial(weights, 3), torch.multinomial(weights, 8, replacement=True), torch.bernoulli(weights))
    print(
        torch.normal(0.0, 1.0, (2,), device=device),
        torch.randint(0, 9, (4,), device=device),
        torch.empty(3, device=device).exponential_(),
    )
    print(
        torch.empty(2, device=device).uniform_(2, 3),
        torch.empty(2, device=device).cauchy_(),
        F.gumbel_softmax(weights.log()[1:], hard=True),
    )


def monte_carlo_pi(device: str) -> None:
    points = torch.rand(5000, 2, device=device)
    print(4 * (points.norm(dim=1) < 1).float().mean().item())


def metropolis(device: str) -> None:
    x, accepted = torch.zeros((), device=device), 0
    for _ in range(100):
        proposal = x + torch.randn((), device=device)
        if torch.rand((), device=device) < torch.exp((x**2 - proposal**2) / 2):
            x, accepted = proposal, accepted + 1
    show(accepted, x.item())


def jacobians(device: str) -> None:
    w = torch.randn(3, 3, device=device)
    x = torch.randn(3, device=device)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(w @ x)

    print(jacrev(f)(x), torch.allclose(jacrev(f)(x), jacfwd(f)(x), atol=1e-6), hessian(lambda x: f(x).sum())(x))
    print(vjp(f, x)[1](torch.ones(3, device=device))[0], jvp(f, (x,), (torch.ones(3, device=device),))[1])
    print(torch.autograd.functional.hessian(lambda x: (x**3).sum(), x))


def per_sample_gradients(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    F.cross_entropy(model(x), y).backward()
    print(all(torch.allclose(each[n].mean(0), p.grad, atol=1e-5) for n, p in model.named_parameters()))
    show(*(one.norm().item() for one in each.values()))


def ensembles(device: str) -> None:
    from torch.func import stack_module_state

    models = [nn.Linear(3, 2).to(device) for _ in range(4)]
    params, buffers = stack_module_state(models)
    x = torch.randn(5, 3, device=device)
    out = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(params, buffers)
    print(out.shape, torch.allclose(out[2], models[2](x), atol=1e-6), out.sum())


def neural_tangent_kernel(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(4, 3, device=device)
    jac = vmap(jacrev(lambda p, x: functional_call(model, p, (x,))), (None, 0))(params, x)
    print(sum(torch.einsum("naf,mbf->nmab", j.flatten(2), j.flatten(2)) for j in jac.values()).sum())


def gradient_penalty(device: str) -> None:
    critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
    x = torch.randn(8, 4, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
    penalty.backward()
    show(penalty.item(), critic[0].weight.grad.abs().sum().item())


def heat_equation_by_a_network(device: str) -> None:
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(10):
        points = torch.rand(50, 2, device=device, requires_grad=True)
        u = net(points)
        du = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        uxx = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)[0][:, 0]
        loss = (du[:, 1] - 0.1 * uxx).square().mean() + (
            net(points * torch.tensor([1.0, 0.0], device=device)) - points[:, :1].sin()
        ).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(loss.item())


def runge_kutta_with_steps_that_adapt(device: str) -> None:
    def f(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([y[1], (1 - y[0] ** 2) * y[1] - y[0]])

    y, t, h, steps = torch.tensor([2.0, 0.0], device=device, dtype=torch.float64), 0.0, 0.1, 0
    while t < 3.0 and steps < 500:
        k1 = f(y)
        k2 = f(y + h / 2 * k1)
        k3 = f(y + 3 * h / 4 * k2)
        new = y + h / 9 * (2 * k1 + 3 * k2 + 4 * k3)
        error = (h * (-5 / 72 * k1 + k2 / 12 + k3 / 9 - f(new) / 8)).norm()
        if error < 1e-4:
            y, t = new, t + h
        h = min(float(0.9 * h * (1e-4 / (error + 1e-12)) ** (1 / 3)), 3.0 - t + 1e-9)
        steps += 1
    show(steps, *y.tolist())


def neural_ode(device: str) -> None:
    f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-2)
    target = torch.tensor([0.0, 1.0], device=device)
    times = torch.linspace(0, 1, 11, device=device)
    assert (times[1:] > times[:-1]).all(), "times must increase"
    for _ in range(10):
        y = torch.tensor([1.0, 0.0], device=device)
        for t0, t1 in itertools.pairwise(times):
            k = f(y)
            y = y + (t1 - t0) * f(y + (t1 - t0) / 2 * k)
        loss = (y - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(loss.item())


def gaussian_process(device: str) -> None:
    x = torch.linspace(0, 1, 15, device=device)
    y = torch.sin(6 * x) + 0.1 * torch.randn(15, device=device)
    log_length = torch.zeros((), device=device, requires_grad=True)
    log_noise = torch.tensor(-2.0, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([log_length, log_noise], lr=0.1)
    for _ in range(15):
        k = torch.exp(-0.5 * (x[:, None] - x[None]) ** 2 / log_length.exp() ** 2) + log_noise.exp() * torch.eye(
            15, device=device
        )
        lower = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], lower)
        loss = 0.5 * (y @ alpha[:, 0]) + lower.diagonal().log().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(loss.item(), log_length.item())


def k_means(device: str) -> None:
    points = torch.cat([torch.randn(30, 2, device=device) + 5 * i for i in range(3)])
    centres = points[[0, 30, 60]].clone()
    for step in range(20):
        labels = torch.cdist(points, centres).argmin(1)
        new = torch.stack([points[labels == k].mean(0) for k in range(3)])
        if torch.equal(new, centres):
            break
        centres = new
    print(step, labels.bincount().tolist(), centres)


def wavelets_of_half(device: str) -> None:
    x = torch.randn(64, device=device, dtype=torch.float16)
    low, high = (x[::2] + x[1::2]) / 2, (x[::2] - x[1::2]) / 2
    print(low.sum(), high.abs().max(), torch.stack([low + high, low - high], 1).flatten().sub(x).abs().max() < 0.01)


def integers_and_bits(device: str) -> None:
    x = torch.tensor([5, 12, 255], device=device, dtype=torch.uint8)
    print(
        x & 6,
        x >> 1,
        ~x,
        x ^ 255,
        x.bitwise_or(1),
        x.to(torch.int32) << 4,
        torch.iinfo(x.dtype).max,
        x.float().log2().floor(),
    )
    print(
        torch.gcd(torch.tensor([12, 18], device=device), torch.tensor(8, device=device)),
        x // 4,
        x % 7,
        x.view(torch.int8),
    )


def other_looks(device: str) -> None:
    """Tensors that have been read, and look at their memory in another way afterwards."""

    def read() -> torch.Tensor:
        x = torch.arange(6.0, device=device).view(2, 3) + 1
        print(x.sum().item())
        return x

    turned, longer, moved, emptied = read(), read(), read(), read()
    turned.t_().unsqueeze_(0)
    longer.resize_(4, 2)[3] = 7
    moved.data = torch.ones(3, 2, device=device).t()
    emptied.untyped_storage().resize_(0)
    emptied.untyped_storage().resize_(24)
    print((turned * 2).tolist(), (longer * 2).tolist(), (moved * 2).tolist(), emptied.fill_(2).mul(2).tolist())
    print((longer.resize_(2, 3) * 3).tolist(), (read().set_(torch.ones(4, device=device)) * 2).tolist())
    numbers = torch.complex(read(), read())
    print((numbers * 1).conj().add(1).tolist(), (numbers.conj().imag * 2).tolist(), (numbers.imag * 2).tolist())
    weight = read().requires_grad_()
    with torch.inference_mode():
        doubled = weight * 2
    (weight * 2).sum().backward()
    weight.data.mul_(2)
    print(weight.tolist(), weight.grad.tolist(), (doubled + 1).tolist())
    same, part = read(), read()
    for one in (same.contiguous(), same.to(torch.float32), part[1:]):
        one += 1
    print(same.tolist(), (part + 0).tolist(), (part[0].expand(4, 3) + 0).tolist())
