"""Programs that go by the values they read: searches, samplers, early ends, adaptive steps, selections."""

# ruff: noqa: B007 - programs print after their loops how far they came
from __future__ import annotations

import copy
import heapq
import itertools
import math
import queue
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def net(device: str, *widths: int) -> nn.Sequential:
    layers = [(nn.Linear(before, after), nn.Tanh()) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*[one for pair in layers for one in pair][:-1]).to(device)


def data(device: str, count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 64)
    return x.to(device), (x[:, :1] - 2 * x[:, 1:2]).to(device)


def clipped_norm(device: str) -> None:
    model = net(device, 64, 512, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(device)
    skipped = 0
    for step in range(12):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if step % 4 == 3:
            loss = loss * math.inf
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            skipped += 1
            continue
        optimizer.step()
    print(skipped, f"{loss.item():.4f}")


def replay_priorities(device: str) -> None:
    priorities = torch.rand(512, device=device)
    seen: set[int] = set()
    while len(seen) < 200:
        drawn = torch.multinomial(priorities, 32, replacement=True)
        seen.update(drawn.tolist())
        priorities[drawn] *= 0.9
    chosen = torch.tensor(sorted(seen), device=device)
    rows = torch.randn(512, 256, device=device)[chosen]
    print(len(seen), rows.shape)


def least_of_items(device: str) -> None:
    models = [net(device, 64, width, 1) for width in (16, 2048, 256)]
    x, y = data(device)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return F.mse_loss(model(x), y).item()

    best = min(models, key=loss)
    for step in range(3):
        F.mse_loss(best(x), y).backward()
    print([tuple(one.shape) for one in best.parameters()])


def where_of_numpy(device: str) -> None:
    scores = torch.randn(4000, device=device).sigmoid().cpu().numpy()
    kept = np.where(scores > 0.9)[0]
    features = torch.randn(4000, 128, device=device)
    print(len(kept), features[torch.from_numpy(kept).to(device)].square().sum(1).shape)


def beams_that_end(device: str) -> None:
    model, end = net(device, 32, 256, 50), 3
    words = nn.Embedding(50, 32).to(device)
    beams: list[tuple[float, list[int]]] = [(0.0, [1])]
    done: list[tuple[float, list[int]]] = []
    while beams and len(beams[0][1]) < 12:
        longer: list[tuple[float, list[int]]] = []
        for score, path in beams:
            with torch.no_grad():
                logits = model(words(torch.tensor(path, device=device)).mean(0))
            values, places = logits.log_softmax(-1).topk(6)
            for value, place in zip(values.tolist(), places.tolist(), strict=True):
                longer.append((score + value, [*path, place]))
        longer.sort(reverse=True)
        done += [one for one in longer[:4] if one[1][-1] == end]
        beams = [one for one in longer[:4] if one[1][-1] != end]
    print(len(done), max(done + beams)[1])


def nucleus_sampling(device: str) -> None:
    model = net(device, 16, 128, 200)
    state = torch.randn(16, device=device)
    told = []
    for step in range(20):
        with torch.no_grad():
            probabilities = (4 * model(state)).softmax(-1)
        ordered, places = probabilities.sort(descending=True)
        kept = int((ordered.cumsum(0) < 0.8).sum()) + 1
        token = places[torch.multinomial(ordered[:kept] / ordered[:kept].sum(), 1)]
        told.append((kept, token.item()))
        if token.item() == 7:
            break
        state = state + 0.1 * torch.randn(16, device=device)
    print(told)


def patience(device: str) -> None:
    model = net(device, 64, 256, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    (x, y), (other, wanted) = data(device), data(device)
    best, patience, kept = math.inf, 0, model.state_dict()
    for epoch in range(60):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            validation = float(F.mse_loss(model(other), wanted))
        if validation < best - 1e-3:
            best, patience = validation, 0
            kept = copy.deepcopy(model.state_dict())
        else:
            patience += 1
        if patience >= 4:
            break
    print(epoch, f"{best:.3f}", len(kept))


def curriculum(device: str) -> None:
    model = net(device, 64, 128, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    level, levels = 32, []
    for step in range(30):
        x, y = data(device, level)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        levels.append(level)
        level = level * 2 if loss.item() < 2.0 and level < 2048 else level
    print(levels)


def loss_scaling(device: str) -> None:
    model = net(device, 64, 128, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data(device)
    scale, good = 2.0**130, 0
    for step in range(20):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * scale).backward()
        gradients = [one.grad for one in model.parameters()]
        overflow = any(not torch.isfinite(one).all().item() for one in gradients if one is not None)
        if overflow:
            scale, good = scale / 4, 0
            continue
        for one in gradients:
            one.div_(scale)
        optimizer.step()
        good += 1
        if good == 5:
            scale, good = scale * 2, 0
    print(math.log2(scale), good)


def suppressed_boxes(device: str) -> None:
    corners = torch.rand(200, 2, device=device) * 80
    boxes = torch.cat([corners, corners + 5 + torch.rand(200, 2, device=device) * 20], 1)
    order = torch.rand(200, device=device).argsort(descending=True)
    kept = []
    while order.numel():
        first = order[0]
        kept.append(int(first))
        rest = order[1:]
        low = torch.maximum(boxes[first, :2], boxes[rest, :2])
        high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        order = rest[shared / (area[first] + area[rest] - shared) <= 0.3]
    print(len(kept), kept[:5])


def means_until_still(device: str) -> None:
    points = torch.randn(3000, 8, device=device) + 4 * torch.randint(0, 3, (3000, 1), device=device)
    centers = points[torch.randperm(3000)[:6].to(device)]
    for step in range(50):
        nearest = torch.cdist(points, centers).argmin(1)
        moved = torch.stack([points[nearest == one].mean(0) for one in range(6)])
        if torch.allclose(moved, centers, atol=1e-3):
            break
        centers = moved
    print(step, nearest.bincount(minlength=6).tolist())


def expectation_maximisation(device: str) -> None:
    x = torch.cat([torch.randn(500, device=device) - 3, 0.5 * torch.randn(800, device=device) + 2])
    mean, deviation, weight = torch.tensor([-1.0, 1.0]).to(device), torch.ones(2, device=device), torch.full((2,), 0.5)
    weight = weight.to(device)
    last = -math.inf
    for step in range(200):
        logs = -((x[:, None] - mean) ** 2) / (2 * deviation**2) - deviation.log() + weight.log()
        likelihood = logs.logsumexp(1).mean()
        shares = logs.softmax(1)
        total = shares.sum(0)
        mean = (shares * x[:, None]).sum(0) / total
        deviation = ((shares * (x[:, None] - mean) ** 2).sum(0) / total).sqrt()
        weight = total / len(x)
        if (likelihood - last).abs() < 1e-5:
            break
        last = likelihood.item()
    print(step, [f"{one:.2f}" for one in mean.tolist()])


def random_consensus(device: str) -> None:
    x = torch.rand(400, device=device)
    y = 3 * x + 1 + 0.01 * torch.randn(400, device=device)
    y[::3] = 5 * torch.rand(134, device=device)
    best, most, needed, tried = None, 0, 1000.0, 0
    while tried < needed:
        pair = torch.randperm(400)[:2].to(device)
        (x0, x1), (y0, y1) = x[pair], y[pair]
        if x0 == x1:
            continue
        slope = (y1 - y0) / (x1 - x0)
        inliers = (y - y0 - slope * (x - x0)).abs() < 0.05
        count = inliers.sum().item()
        if count > most:
            best, most = inliers, count
            share = count / 400
            needed = math.log(0.01) / math.log(1 - share**2 + 1e-9)
        tried += 1
    solved = torch.linalg.lstsq(torch.stack([x[best], torch.ones_like(x[best])], 1), y[best, None]).solution
    print(tried, most, [f"{one:.2f}" for one in solved.flatten().tolist()])


def adaptive_steps(device: str) -> None:
    y, t, h, taken, refused = torch.randn(64, 2, device=device), 0.0, 0.5, 0, 0

    def slope(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([y[:, 1], -4 * y[:, 0] - 0.2 * y[:, 1]], 1)

    while t < 3:
        k1 = slope(y)
        k2 = slope(y + h * k1)
        error = (h * (k2 - k1) / 2).abs().max().item()
        if error > 0.02:
            h, refused = h * max(0.3, 0.9 * (0.02 / error) ** 0.5), refused + 1
            continue
        y, t, taken = y + h * (k1 + k2) / 2, t + h, taken + 1
        h *= min(2.0, 0.9 * (0.02 / max(error, 1e-9)) ** 0.5)
    print(taken, refused, f"{y.norm().item():.3f}")


def evolution_until_good(device: str) -> None:
    population = [torch.randn(16, device=device) for _ in range(12)]
    for generation in range(15):
        scored = sorted(population, key=lambda one: one.square().sum().item())
        parents = scored[:4]
        population = parents + [parents[one % 4] + 0.3 * torch.randn(16, device=device) for one in range(8)]
        if scored[0].square().sum() < 2.0:
            break
    print(generation, f"{scored[0].square().sum().item():.3f}")


class Node:
    def __init__(self, prior: float) -> None:
        self.prior, self.visits, self.total = prior, 0, 0.0
        self.children: dict[int, Node] = {}

    def score(self, child: Node) -> float:
        value = child.total / child.visits if child.visits else 0.0
        return value + child.prior * math.sqrt(self.visits + 1) / (1 + child.visits)


def tree_search(device: str) -> None:
    policy, value = net(device, 8, 64, 4), net(device, 8, 64, 1)
    root, moves = Node(1.0), torch.randn(4, 8, device=device)
    deepest = 0
    for turn in range(40):
        node, state, path = root, torch.zeros(8, device=device), [root]
        while node.children:
            move, node = max(node.children.items(), key=lambda one: path[-1].score(one[1]))
            state = state + moves[move]
            path.append(node)
        with torch.no_grad():
            priors = policy(state).softmax(-1).tolist()
            estimate = value(state).tanh().item()
        for move, prior in enumerate(priors):
            node.children[move] = Node(prior)
        for one in path:
            one.visits += 1
            one.total += estimate
        deepest = max(deepest, len(path))
    print(deepest, [one.visits for one in root.children.values()])


def episodes(device: str) -> None:
    policy = net(device, 4, 64, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    lengths = []
    for episode in range(6):
        state, logs, done = torch.randn(4), [], False
        while not done and len(logs) < 100:
            chances = policy(state.to(device)).softmax(-1)
            action = torch.multinomial(chances, 1)
            logs.append(chances[action].log())
            push = 1.0 if action.item() == 1 else -1.0
            state = 0.98 * state + 0.2 * torch.tensor([push, -push, 0.5, 0.1])
            done = bool(state.abs().max() > 2.5)
        optimizer.zero_grad()
        (-torch.cat(logs).sum() * len(logs) / 50).backward()
        optimizer.step()
        lengths.append(len(logs))
    print(lengths)


def balanced_gan(device: str) -> None:
    maker, judge = net(device, 8, 128, 2), net(device, 2, 128, 1)
    make, check = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (maker, judge))
    turns = []
    for step in range(20):
        real, fake = torch.randn(128, 2, device=device) + 2, maker(torch.randn(128, 8, device=device))
        against = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
        if against.item() > 1.0:
            check.zero_grad()
            against.backward()
            check.step()
            turns.append("D")
        fooled = F.softplus(-judge(fake)).mean()
        if fooled.item() > 0.7:
            make.zero_grad()
            fooled.backward()
            make.step()
            turns.append("G")
    print("".join(turns))


def pruning(device: str) -> None:
    model = net(device, 64, 256, 128, 10)
    sizes = []
    for layer in (one for one in model if isinstance(one, nn.Linear)):
        strength = layer.weight.abs().sum(1)
        limit = strength.quantile(0.3)
        keep = (strength > limit).nonzero().flatten()
        smaller = nn.Linear(layer.in_features, len(keep)).to(device)
        smaller.weight.data.copy_(layer.weight[keep])
        sizes.append(tuple(smaller.weight.shape))
    print(sizes)


def quantile_clipping(device: str) -> None:
    history: list[float] = []
    model = net(device, 64, 256, 1)
    x, y = data(device)
    clipped = 0
    for step in range(15):
        model.zero_grad()
        F.mse_loss(model(x * (1 + step % 3)), y).backward()
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        history.append(norm.item())
        limit = float(np.quantile(history, 0.5))
        if history[-1] > limit:
            clipped += 1
            for one in model.parameters():
                one.grad.mul_(limit / history[-1])
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.01 * one.grad
    print(clipped, f"{history[-1]:.3f}")


def active_learning(device: str) -> None:
    model = net(device, 64, 128, 3)
    pool, labels = torch.randn(600, 64, device=device), torch.randint(0, 3, (600,), device=device)
    known = list(range(20))
    for turn in range(4):
        for step in range(3):
            model.zero_grad()
            F.cross_entropy(model(pool[known]), labels[known]).backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.1 * one.grad
        with torch.no_grad():
            chances = model(pool).softmax(-1)
        doubt = -(chances * chances.log()).sum(1)
        asked = [one for one in doubt.argsort(descending=True).tolist() if one not in known][:20]
        known += asked
    print(len(known), sorted(known)[:8])


def weight_averages(device: str) -> None:
    model = net(device, 64, 128, 1)
    average, averaged, losses = torch.optim.swa_utils.AveragedModel(model), 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = data(device)
    for step in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if loss.item() <= np.mean(losses[-4:]):
            average.update_parameters(model)
            averaged += 1
    print(averaged, int(average.n_averaged))


def hard_examples(device: str) -> None:
    model = net(device, 64, 256, 5)
    x, labels = torch.randn(512, 64, device=device), torch.randint(0, 5, (512,), device=device)
    counts = []
    for step in range(6):
        losses = F.cross_entropy(model(x), labels, reduction="none")
        hard = losses > losses.mean()
        counts.append(int(hard.sum()))
        F.cross_entropy(model(x[hard]), labels[hard]).backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
                one.grad = None
    print(counts)


def speculative_decoding(device: str) -> None:
    small, large = net(device, 16, 32, 40), net(device, 16, 256, 40)
    words = nn.Embedding(40, 16).to(device)
    tokens, calls = [1], 0
    with torch.no_grad():
        while len(tokens) < 40:
            draft = list(tokens)
            for _ in range(4):
                draft.append(int(small(words(torch.tensor(draft[-3:], device=device)).mean(0)).argmax()))
            for place in range(len(tokens), len(draft)):
                wanted = large(words(torch.tensor(draft[:place][-3:], device=device)).mean(0)).argmax().item()
                if wanted != draft[place]:
                    draft = [*draft[:place], wanted]
                    break
            tokens, calls = draft, calls + 1
    print(calls, len(tokens), tokens[:8])


def gradients_to_a_tolerance(device: str) -> None:
    square = torch.randn(200, 200, device=device)
    matrix, b = square @ square.T + 200 * torch.eye(200, device=device), torch.randn(200, device=device)
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    steps = 0
    while rr.sqrt() > 1e-4:
        q = matrix @ p
        alpha = rr / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        rr, before = r @ r, rr
        p = r + rr / before * p
        steps += 1
    print(steps)


def vectors_to_a_tolerance(device: str) -> None:
    half = torch.randn(100, 100, device=device)
    matrix, v = half @ half.T, torch.ones(100, device=device)
    last = 0.0
    for step in range(500):
        v = matrix @ v
        v = v / v.norm()
        value = float(v @ matrix @ v)
        if abs(value - last) < 1e-3 * value:
            break
        last = value
    print(step, f"{value:.0f}")


def line_search(device: str) -> None:
    x = torch.full((50,), 3.0, device=device).requires_grad_()
    scale = torch.linspace(1, 30, 50, device=device)
    tried = []
    for step in range(8):
        loss = (scale * x.square()).sum() + x.cos().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        rate, tries = 1.0, 0
        with torch.no_grad():
            while True:
                new = x - rate * gradient
                if (scale * new.square()).sum() + new.cos().sum() <= loss - 0.3 * rate * gradient.square().sum():
                    break
                rate, tries = rate / 2, tries + 1
            x = new.requires_grad_()
        tried.append(tries)
    print(tried, f"{loss.item():.3f}")


def shortest_paths(device: str) -> None:
    weights = torch.rand(60, 60, device=device)
    distances = [math.inf] * 60
    distances[0] = 0.0
    queue, looked = [(0.0, 0)], 0
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances[node]:
            continue
        looked += 1
        for other, further in enumerate((weights[node] + distance).tolist()):
            if further < distances[other]:
                distances[other] = further
                heapq.heappush(queue, (further, other))
    print(looked, f"{max(distances):.3f}")


def dynamic_time_warping(device: str) -> None:
    left, right = torch.randn(30, 4, device=device).cumsum(0), torch.randn(25, 4, device=device).cumsum(0)
    cost = torch.cdist(left, right).cpu().numpy()
    total = np.full((31, 26), np.inf)
    total[0, 0] = 0
    for i in range(30):
        for j in range(25):
            total[i + 1, j + 1] = cost[i, j] + min(total[i, j], total[i, j + 1], total[i + 1, j])
    i, j, path = 30, 25, []
    while i > 0 and j > 0:
        path.append((i, j))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
    aligned = left[[one[0] - 1 for one in path]]
    print(len(path), aligned.shape)


def experts_by_gate(device: str) -> None:
    experts = [net(device, 32, 512, 32) for _ in range(6)]
    gate = net(device, 32, 6)
    tokens = torch.randn(300, 32, device=device)
    chances, chosen = gate(tokens).softmax(-1).max(-1)
    out, used = torch.zeros_like(tokens), []
    for number, expert in enumerate(experts):
        mine = torch.where(chosen == number)[0]
        if mine.numel() == 0:
            continue
        out[mine] = expert(tokens[mine]) * chances[mine, None]
        used.append(len(mine))
    print(used)


def adaptive_depth(device: str) -> None:
    layers = [net(device, 32, 64, 32) for _ in range(12)]
    halting = net(device, 32, 1)
    x, total, passed = torch.randn(16, 32, device=device), torch.zeros(16, device=device), 0
    for layer in layers:
        if (total < 1).sum() == 0:
            break
        going = total < 1
        x = torch.where(going[:, None], x + layer(x), x)
        total = total + going * halting(x).sigmoid().flatten()
        passed += 1
    print(passed)


def rejection_sampling(device: str) -> None:
    accepted: list[torch.Tensor] = []
    draws = 0
    while sum(map(len, accepted)) < 500:
        points = torch.rand(256, 3, device=device) * 2 - 1
        accepted.append(points[points.norm(dim=1) < 1])
        draws += 1
    print(draws, torch.cat(accepted)[:500].shape)


def accepted_chain(device: str) -> None:
    x, taken, chain = torch.zeros(5, device=device), 0, []
    energy = x.square().sum().item()
    for step in range(60):
        proposed = x + 0.5 * torch.randn(5, device=device)
        new = proposed.square().sum().item()
        if math.log(torch.rand(()).item() + 1e-9) < (energy - new) / 2:
            x, energy, taken = proposed, new, taken + 1
            chain.append(x.clone())
    print(taken, len(chain))


def successive_halving(device: str) -> None:
    x, y = data(device)
    trials = {rate: net(device, 64, 256, 1) for rate in (0.001, 0.01, 0.1, 0.5, 1.0, 2.0)}
    while len(trials) > 1:
        losses: dict[float, float] = {}
        for rate, model in trials.items():
            for step in range(4):
                model.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                with torch.no_grad():
                    for one in model.parameters():
                        one -= rate * one.grad
            losses[rate] = loss.item() if math.isfinite(loss.item()) else math.inf
        kept = sorted(losses, key=losses.__getitem__)[: len(trials) // 2]
        trials = {rate: trials[rate] for rate in kept}
    print(list(trials))


def greedy_text(device: str) -> None:
    model, words = nn.GRU(16, 64, batch_first=True).to(device), nn.Embedding(30, 16).to(device)
    head, hidden, token = net(device, 64, 30), None, torch.tensor([[1]], device=device)
    told: list[int] = []
    for step in range(40):
        out, hidden = model(words(token), hidden)
        token = head(out).argmax(-1)
        told.append(token.item())
        if len(told) > 6 and len(set(told[-4:])) == 1:
            break
    print(told)


def buckets_by_length(device: str) -> None:
    lengths = torch.randint(5, 60, (64,), device=device)
    batches: dict[int, list[int]] = {}
    for place, length in enumerate(lengths.cpu().numpy()):
        batches.setdefault(int(length) // 16, []).append(place)
    shapes = []
    for bucket in sorted(batches):
        longest = max(int(lengths[place]) for place in batches[bucket])
        shapes.append(tuple(torch.zeros(len(batches[bucket]), longest, 32, device=device).shape))
    print(shapes)


def novelty_archive(device: str) -> None:
    archive: list[torch.Tensor] = []
    for step in range(40):
        found = torch.randn(3, device=device)
        distances = [(found - other).norm().item() for other in archive]
        if not distances or min(distances) > 1.2:
            archive.append(found)
    print(len(archive), torch.stack(archive).shape)


def plateau(device: str) -> None:
    model = net(device, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.1)
    x, y = data(device)
    for step in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss)
        if optimizer.param_groups[0]["lr"] < 1e-3:
            break
    print(step, optimizer.param_groups[0]["lr"])


def self_training(device: str) -> None:
    model = net(device, 64, 128, 4)
    pool: Any = torch.randn(800, 64, device=device)
    x, labels = torch.randn(64, 64, device=device), torch.randint(0, 4, (64,), device=device)
    sizes = []
    for turn in range(5):
        for step in range(10):
            model.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.5 * one.grad
        with torch.no_grad():
            sure, guess = model(pool).softmax(-1).max(-1)
        mask = sure > 0.8
        x, labels, pool = torch.cat([x, pool[mask]]), torch.cat([labels, guess[mask]]), pool[~mask]
        sizes.append(len(x))
        if not len(pool):
            break
    print(sizes)


class _Converged(Exception):
    pass


class _Kept:
    """A context manager that keeps an error to itself."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return kind is not None and issubclass(kind, ValueError)


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    def __bool__(self) -> bool:
        return self.count > 0 and self.total / self.count < 2


def _train(device: str, width: int = 256) -> Any:
    model = net(device, 64, width, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = data(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, x, y, step


def error_caught_elsewhere(device: str) -> None:
    _, x, _, step = _train(device)

    def check(value: float) -> None:
        if value < 1.5:
            raise _Converged

    turns = 0
    try:
        for turns in range(50):
            check(step().item())
    except _Converged:
        pass
    print(turns, (x @ x.T).shape)


def error_kept_by_a_manager(device: str) -> None:
    _, x, _, step = _train(device)
    large = 0
    for _ in range(6):
        with _Kept():
            if step().item() > 2.5:
                raise ValueError("it diverges")
            large += len(x @ x.T)
    print(large)


def assertion_caught(device: str) -> None:
    _, x, _, step = _train(device)
    rows = 0
    for _ in range(6):
        try:
            assert step().item() < 3
            rows += len(x @ x.T)
        except AssertionError:
            rows += len(torch.cat([x, x]) @ x.T)
    print(rows)


def mean_asked_for_truth(device: str) -> None:
    _, x, _, step = _train(device)
    mean = _Mean()
    rows = 0
    for _ in range(10):
        mean.update(step().item())
        if mean:
            rows += len(x @ x.T)
    print(rows)


def frozen_layers(device: str) -> None:
    model = net(device, 64, 512, 512, 1)
    x, y = data(device)
    F.mse_loss(model(x), y).backward()
    kept = {name: one.grad.abs().mean().item() > 0.02 for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    for name, one in model.named_parameters():
        one.requires_grad_(kept[name])
    F.mse_loss(model(x), y).backward()
    print([one.grad is not None for one in model.parameters()])


def gradients_while_large(device: str) -> None:
    model, x, _, step = _train(device)
    kept = []
    for _ in range(6):
        loss = step().item()
        with torch.set_grad_enabled(loss < 3):
            kept.append(model(x).requires_grad)
    print(kept)


def stop_by_setattr(device: str) -> None:
    _, _, _, step = _train(device)
    state = types.SimpleNamespace(stop=False)
    turns = 0
    for turns in range(60):
        setattr(state, "stop", step().item() < 1)  # noqa: B010 - what programs write
        if getattr(state, "stop"):  # noqa: B009
            break
    print(turns, torch.zeros(turns, 1000, device=device).shape)


def least_is_deleted(device: str) -> None:
    x, _ = data(device)
    cache = {key: torch.zeros(256 * (key + 1), 100, device=device) for key in range(5)}
    score = {key: x[key].sum().item() for key in range(5)}
    worst = min(score, key=lambda key: score[key])
    del cache[worst]
    print(worst, torch.zeros(2000, 100, device=device).shape, len(cache))


def root_of_a_function(device: str) -> None:
    x, _ = data(device)
    model = net(device, 64, 1)

    def objective(shift: float) -> float:
        return model(x).mean().item() + 3 - shift

    def first_below(function: Any) -> int:
        turns = 0
        while function(turns / 10) > 0.5 and turns < 50:
            turns += 1
        return turns

    print(torch.zeros(first_below(objective), 1000, device=device).shape)


class _Until:
    def __init__(self, function: Any) -> None:
        self.function, self.turns = function, 0

    def __iter__(self) -> _Until:
        return self

    def __next__(self) -> float:
        self.turns += 1
        value: float = self.function()
        if value < 1 or self.turns > 60:
            raise StopIteration
        return value


def iterator_that_stops(device: str) -> None:
    _, _, _, step = _train(device)
    losses = list(_Until(lambda: step().item()))
    print(torch.zeros(len(losses), 1000, device=device).shape)


class _Rows:
    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def add(self, row: torch.Tensor, score: float) -> None:
        if score > 0:
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)


def as_many_as_were_kept(device: str) -> None:
    x, _ = data(device)
    rows = _Rows()
    for row in x[:64]:
        rows.add(row, row.sum().item())
    print(torch.zeros(len(rows), 1000, device=device).shape)


def names_by_value(device: str) -> None:
    _, x, _, step = _train(device)
    names = {0: "small", 1: "middle"}
    rows = 0
    for _ in range(5):
        try:
            name = names[int(step().item())]
        except KeyError:
            rows += len(x @ x.T)
        else:
            rows += len(torch.cat([x, x]) @ x.T) + len(name)
    print(rows)


def least_in_a_queue(device: str) -> None:
    x, y = data(device)
    waiting: queue.PriorityQueue[Any] = queue.PriorityQueue()
    for number, width in enumerate((16, 2048, 64, 512)):
        model = net(device, 64, width, 1)
        waiting.put((F.mse_loss(model(x), y).item(), number, model))
    _, number, model = waiting.get()
    F.mse_loss(model(x), y).backward()
    print(number)


def kept_where_it_is_large(device: str) -> None:
    _, _, _, step = _train(device)
    kept = []
    for _ in range(6):
        loss = step().item()
        kept.append(torch.ones(500, 1000).to(device if loss > 2.5 else "cpu"))
    print(len(kept))


def gradients_dropped(device: str) -> None:
    model = net(device, 64, 256, 1)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = data(device)
    dropped = 0
    for _ in range(4):
        F.mse_loss(model(x), y).backward()
        for one in model.parameters():
            if one.grad is not None and one.grad.norm() < 1:
                one.grad = None
                dropped += 1
        optimizer.step()
    print(dropped)


def sorted_in_place(device: str) -> None:
    models = [net(device, 64, width, 1) for width in (16, 2048, 64, 512)]
    x, y = data(device)
    models.sort(key=lambda one: F.mse_loss(one(x), y).item())
    F.mse_loss(models[0](x), y).backward()
    print([tuple(one.shape) for one in models[0].parameters()])


def autocast_while_large(device: str) -> None:
    model, x, _, step = _train(device)
    kinds = []
    for _ in range(4):
        loss = step().item()
        with torch.autocast(device, enabled=loss > 2.5, dtype=torch.bfloat16):
            kinds.append(model(x).dtype)
    print(kinds)
