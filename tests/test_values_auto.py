"""Values that follow from known ones (``values=auto``): programs whose way depends on values go as on the host."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


# ---- programs whose way depends on values: what they print, on the host and on the virtual GPU


def times_of_a_solver(device: str) -> object:
    times = torch.linspace(0, 2, 50, device=device)
    assert (times[1:] > times[:-1]).all()
    state, steps = torch.ones(3, device=device), 0
    for step in times.diff():
        state = state - step * state
        steps += 1
    return steps, round(state.sum().item(), 4)


def steps_that_adapt(device: str) -> object:
    time, step, y, taken, refused = 0.0, 0.5, torch.tensor([1.0, 0.0], device=device), 0, 0
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], device=device)
    while time < 3:
        slope = turn @ y
        error = (step * step * (turn @ slope) / 2).norm().item()
        if error > 1e-2:
            step, refused = step / 2, refused + 1
            continue
        y, time, taken = y + step * slope, time + step, taken + 1
        step *= 1.2
    return taken, refused


def classes_of_the_labels(device: str) -> object:
    labels = torch.arange(50_000).remainder(7).to(device)
    head = nn.Linear(4, int(labels.max()) + 1)
    return head.weight.shape, F.one_hot(labels).shape, labels.bincount().tolist(), labels.unique().tolist()


def classes_in_inference_mode(device: str) -> object:
    with torch.inference_mode():
        labels = torch.tensor([0, 4, 2], device=device)
        return F.one_hot(labels).tolist(), (labels > 1).nonzero().tolist()


def lengths_and_masks(device: str) -> object:
    lengths = torch.tensor([3, 1, 5], device=device)
    padded = torch.zeros(len(lengths), int(lengths.max()), device=device)
    mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]
    return padded.shape, padded[mask].shape, mask.sum().item(), mask.cpu().sum().item()


def second_order(device: str) -> object:
    point = torch.tensor([-1.2, 1.0], device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([point], line_search_fn="strong_wolfe")
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return calls, len(optimizer.state[point]["old_dirs"]), [round(x, 3) for x in point.tolist()]


def early_stopping(device: str) -> object:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)
    x, y = torch.randn(40, 8), torch.randn(40, 1)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    best, bad, epochs = math.inf, 0, 0
    while bad < 3:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        bad = 0 if loss.item() < best - 1e-3 else bad + 1
        best, epochs = min(best, loss.item()), epochs + 1
    return epochs


def suppressed_boxes(device: str) -> object:
    corner = torch.tensor([[0.0, 0], [1, 1], [10, 10], [11, 10], [30, 0]])
    boxes = torch.cat([corner, corner + 8], 1).to(device)
    scores = torch.tensor([0.9, 0.8, 0.7, 0.95, 0.2], device=device)
    kept, order = [], scores.argsort(descending=True)
    while order.numel():
        first, order = order[0], order[1:]
        kept.append(first.item())
        low = torch.maximum(boxes[first, :2], boxes[order, :2])
        high = torch.minimum(boxes[first, 2:], boxes[order, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        order = order[shared / (128 - shared) < 0.5]
    return kept


def tokens_until_the_end(device: str) -> object:
    table = torch.tensor([3, 0, 1, 4, 2], device=device)
    ids = torch.tensor([[0], [4]], device=device)
    done = torch.zeros(2, dtype=torch.bool, device=device)
    while not done.all():
        following = table[ids[:, -1]]
        ids = torch.cat([ids, following[:, None]], 1)
        done |= following == 1
    return ids.shape, ids.tolist()


def shortest_ways(device: str) -> object:
    cost = torch.tensor([[0.0, 4, 1], [9, 0, 9], [9, 2, 0]], device=device)
    reach, rounds = torch.tensor([0.0, math.inf, math.inf], device=device), 0
    while True:
        better = (reach[:, None] + cost).amin(0)
        rounds += 1
        if torch.equal(better, reach):
            return rounds, reach.tolist()
        reach = better


def fixed_point(device: str) -> object:
    x, count = torch.tensor(1.0, device=device), 0
    while (x.cos() - x).abs() > 1e-4:
        x, count = x.cos(), count + 1
    return count


def decibels(device: str) -> object:
    mse = F.mse_loss(torch.linspace(0, 1, 9, device=device), torch.full((9,), 0.5, device=device))
    return round((10 * torch.log10(1 / mse)).item(), 4)


def graph_of_components(device: str) -> object:
    edges = torch.tensor([[0, 1, 3], [1, 2, 4]], device=device)
    label, rounds = torch.arange(5, device=device), 0
    while True:
        low = torch.minimum(label[edges[0]], label[edges[1]])
        after = label.clone().scatter_reduce_(0, edges[0], low, "amin").scatter_reduce_(0, edges[1], low, "amin")
        rounds += 1
        if (after == label).all():
            return rounds, label.unique().numel()
        label = after


def values_that_went_by_the_host(device: str) -> object:
    scores = torch.tensor([0.1, 0.9, 0.4, 0.8], device=device)
    chosen = [place for place, keep in enumerate((scores > 0.3).cpu().tolist()) if keep]
    places = torch.tensor(scores.cpu().numpy().argsort().copy(), device=device)
    return chosen, scores[places].tolist(), scores[[0, 2]].tolist()


def written_part_by_part(device: str) -> object:
    out = torch.empty(6, device=device)
    out[:3] = torch.tensor([1.0, 2.0, 3.0])
    out[3:] = 7
    view = out.view(2, 3)
    view[1, 0] += 1
    return out.tolist(), (view > 2).sum().item()


def a_schedule_on_the_device(device: str) -> object:
    betas = torch.linspace(1e-4, 0.02, 1000, device=device)
    kept = torch.cumprod(1 - betas, 0)
    return int((kept > 0.5).sum()), [t for t in range(0, 1000, 100) if kept[t] < 0.1]


def repeated_by_counts(device: str) -> object:
    counts = torch.tensor([2, 0, 3], device=device)
    return torch.repeat_interleave(counts).tolist(), torch.arange(3, device=device).repeat_interleave(counts).shape


def clusters(device: str) -> object:
    points = torch.tensor([[0.0, 0], [0, 1], [9, 9], [9, 8], [4, 4]], device=device)
    centres, rounds = points[:2].clone(), 0
    while True:
        nearest = torch.cdist(points, centres).argmin(1)
        moved = torch.stack([points[nearest == one].mean(0) for one in range(2)])
        rounds += 1
        if torch.allclose(moved, centres):
            return rounds, nearest.tolist()
        centres = moved


def per_sample_gradients(device: str) -> object:
    weight = torch.tensor([1.0, -2.0], device=device)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    each = torch.func.vmap(torch.func.grad(lambda w, row: (w @ row) ** 2), (None, 0))(weight, x)
    one = torch.stack([torch.func.grad(lambda w, row: (w @ row) ** 2)(weight, row) for row in x])
    return torch.allclose(each, one), each.tolist()


def loss_scale(device: str) -> object:
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    weight = torch.ones(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for factor in (1.0, math.inf, 1.0):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), [round(x, 3) for x in weight.tolist()]


def saved_and_loaded(device: str) -> object:
    buffer = io.BytesIO()
    torch.save({"step": torch.tensor(7, device=device), "best": torch.tensor([0.5, 0.25], device=device)}, buffer)
    buffer.seek(0)
    found = torch.load(buffer)
    copied = copy.deepcopy(found["best"]), pickle.loads(pickle.dumps(found["best"]))
    return found["step"].item(), [one.tolist() for one in copied]


def matrix_is_definite(device: str) -> object:
    matrix, shift = torch.tensor([[1.0, 2.0], [2.0, 1.0]], device=device), 0
    while torch.linalg.cholesky_ex(matrix + shift * torch.eye(2, device=device)).info.item():
        shift += 1
    return shift


def bisection(device: str) -> object:
    low, high, count = torch.tensor(0.0, device=device), torch.tensor(2.0, device=device), 0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if middle**2 > 2:
            high = middle
        else:
            low = middle
        count += 1
    return count, round(low.item(), 3)


def sampled_by_their_sums(device: str) -> object:
    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.1], device=device)
    ordered, places = probabilities.sort(descending=True)
    keep = (ordered.cumsum(0) - ordered) < 0.6
    return places[keep].tolist(), int(keep.sum())


def data_that_was_exchanged(device: str) -> object:
    a, b = torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0, 4.0], device=device)
    a.data = b.data
    view = a[1:]
    b.mul_(2)
    a.untyped_storage().resize_(16)
    return view.item(), a.sum().item()


def places_in_lists_and_tuples(device: str) -> object:
    x = torch.arange(24.0, device=device).reshape(2, 4, 3)
    found = [x[:, (1, 3)], x[:, [1, 3]], x[(0, 1), (2, 3)], x[..., (0, 2)], x[:, range(1, 3)], x[0, [(1, 2), (0, 1)]]]
    found += [x[:, (True, False, True, False)], x[[False, True]]]
    with warnings.catch_warnings():
        # That a list of lists is an index for two dimensions is to change one day.
        warnings.simplefilter("ignore")
        found.append(x[[[0, 1], [3, 2]]])
    x[:, (1, 3)] = 0
    x[..., (0,)] += 5
    return [one.tolist() for one in found], x.tolist()


PROGRAMS: list[Callable[[str], object]] = [
    times_of_a_solver, steps_that_adapt, classes_of_the_labels, classes_in_inference_mode, lengths_and_masks, second_order,
    early_stopping, suppressed_boxes, tokens_until_the_end, shortest_ways, fixed_point, decibels, graph_of_components,
    values_that_went_by_the_host, written_part_by_part, a_schedule_on_the_device, repeated_by_counts, clusters,
    per_sample_gradients, loss_scale, saved_and_loaded, matrix_is_definite, bisection, sampled_by_their_sums,
    data_that_was_exchanged, places_in_lists_and_tuples,
]  # fmt: skip


def test_a_list_of_flags_selects_as_many_of_unknown_values_as_it_says() -> None:
    gpu.turn_on("T4")
    x = torch.randn(300, 4, 300, device="cuda")
    assert x[:, (True, False, True, False)].shape == (300, 2, 300)
    assert x[[True] * 7 + [False] * 293].shape == (7, 4, 300)
    assert x[:, [[True, False, False]] * 0].shape == (300, 0, 300)
    assert x[True].shape == (1, 300, 4, 300)
    x[:, [True, False, False, True]] = 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("values", ["auto", "real"])
def test_the_way_is_that_of_a_run_on_the_host(program: Callable[[str], object], values: str) -> None:
    wanted = program("cpu")
    machine = gpu.turn_on(f"T4,values={values}")
    assert program("cuda") == wanted
    assert not machine.reads.counts
    assert not machine.engine.largest_sizes


# ---- what is not known


@pytest.fixture
def machine() -> gpu.VirtualMachine:
    return gpu.turn_on("T4,values=auto")


def test_what_unknown_values_are_written_into_is_unknown(machine: gpu.VirtualMachine) -> None:
    x = torch.zeros(10, device="cuda")
    part = x[2:4]
    part += torch.rand(2, device="cuda")
    x[0] = 3
    x.sum().item()
    assert sum(machine.reads.counts.values()) == 1
    x.zero_()
    assert part.tolist() == [0, 0]
    x.uniform_()
    part.tolist()
    assert sum(machine.reads.counts.values()) == 2


def test_asking_for_a_shape_makes_nothing_known(machine: gpu.VirtualMachine) -> None:
    loss = torch.rand(300, 300, device="cuda").requires_grad_().square().mean()
    loss.backward()
    loss.item()
    assert sum(machine.reads.counts.values()) == 1


def test_nothing_is_drawn_from_the_hosts_generator(machine: gpu.VirtualMachine) -> None:
    state = torch.get_rng_state()
    x = torch.ones(9, device="cuda")
    F.dropout(x, 0.5)
    torch.bernoulli(x / 2)
    torch.multinomial(x, 2)
    torch.randperm(9, device="cuda")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_captured_graph_leaves_nothing_known_that_it_writes(machine: gpu.VirtualMachine) -> None:
    weight = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight += 1
    weight.zero_()
    assert weight.tolist() == [0, 0, 0]
    before = sum(machine.reads.counts.values())
    graph.replay()
    weight.tolist()
    assert sum(machine.reads.counts.values()) == before + 1


def test_large_tensors_take_nothing_of_the_host(machine: gpu.VirtualMachine) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    for equal in (x, torch.zeros(8, device="cuda").expand(1 << 20, 8) + 1):
        assert machine.engine.known(equal).host.untyped_storage().nbytes() == 4  # type: ignore[arg-type]
    assert machine.engine.known(torch.arange(1 << 20, device="cuda")) is None  # type: ignore[arg-type]


def test_guesses_keep_programs_on_their_way(machine: gpu.VirtualMachine) -> None:
    logits = torch.nn.Linear(300, 1000, device="cuda")(torch.rand(400, 300, device="cuda"))
    even = logits.softmax(-1)
    assert even.sum(-1)[0].item() == pytest.approx(1)
    assert even.max().item() == pytest.approx(1e-3)
    assert torch.multinomial(even, 3)[5].tolist() == [0, 1, 2]
    assert logits.topk(4).indices[0].tolist() == [0, 1, 2, 3]
    assert torch.randperm(100_000, device="cuda")[:3].tolist() == [0, 1, 2]
    assert logits[0].softmax(-1).multinomial(1).squeeze().item() == 0
    assert torch.distributions.Categorical(logits=logits).sample()[7].item() >= 0
    assert logits.std().item() > 0
    assert logits.norm().item() > 0
    assert logits.sigmoid()[0, 0].item() == 0.5
    assert math.isfinite((10 * torch.log10(1 / F.mse_loss(logits, even))).item())
    assert not logits.isnan().any()
    losses = [F.cross_entropy(logits, torch.zeros(400, dtype=torch.int64, device="cuda")).item() for _ in range(9)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 9


def test_bounds_hold_for_what_is_guessed(machine: gpu.VirtualMachine) -> None:
    unknown = torch.randn(300, 300, device="cuda")
    assert unknown.clip(min=3).max().item() >= 3
    assert unknown.clamp(-5, -4).max().item() == -4
    assert unknown.clamp_max(-2.0).mean().item() <= -2
    # What is within them stays.
    assert torch.sigmoid(unknown).clamp(0, 1).mean().item() == 0.5
    assert 0 < unknown.square().mean().clamp(max=100).item() < 100


def test_a_solver_takes_its_steps_where_the_slopes_are_unknown(machine: gpu.VirtualMachine) -> None:
    layer = nn.Linear(4, 4).cuda()
    state, time, step, taken = torch.randn(6, 4, device="cuda"), torch.zeros((), device="cuda"), 0.01, 0
    while time < 1:
        slopes = [-layer(state) * factor for factor in (0.9, 1.1)]
        after = state + step * slopes[1]
        error = (step * (slopes[1] - slopes[0])).abs() / (1e-9 + 1e-7 * torch.max(state.abs(), after.abs()))
        assert error.pow(2).mean().sqrt() <= 1
        state, time, step, taken = after, time + step, step * 2, taken + 1
    assert taken == 7


def test_a_mask_selects_as_many_on_the_host_as_on_the_device(machine: gpu.VirtualMachine) -> None:
    x = torch.rand(400, 300, device="cuda")
    for mask in (x > 0.7, x == 0.5, torch.isfinite(x)):
        assert len(x[mask]) == int(mask.cpu().sum()) == mask.sum().item()
        assert mask.any()


def test_values_stay_known_after_a_call_that_is_wrong(machine: gpu.VirtualMachine) -> None:
    """What a mask marks is counted before the operator runs, which then refuses in its own words."""
    mask, places = torch.zeros(5, 5, dtype=torch.int64, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    with pytest.raises(IndexError, match="Dimension out of range"):
        mask.index_fill_(7, places, 1)
    with pytest.raises(IndexError, match="shape mismatch"):
        mask[places, places[:2]] = 1
    assert torch.tensor([4, 2]).cuda().sum().item() == 6


def test_a_number_is_filled_by_a_list_of_places(machine: gpu.VirtualMachine) -> None:
    """As the gradient of `index_copy` does with a source of one element."""
    number, source = (torch.zeros((), device="cuda", requires_grad=True) for _ in range(2))
    places = torch.zeros(1, dtype=torch.int64, device="cuda")
    number.index_copy(0, places, source).backward()
    assert number.grad is not None
    assert torch.tensor([4, 2]).cuda().sum().item() == 6


def test_an_unknown_problem_keeps_the_history_of_lbfgs(machine: gpu.VirtualMachine) -> None:
    model = nn.Linear(1000, 1000).cuda()
    optimizer = torch.optim.LBFGS(model.parameters())
    x = torch.rand(50, 1000, device="cuda")
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert calls > 40
    assert len(optimizer.state[next(model.parameters())]["old_dirs"]) > 40


@pytest.mark.parametrize("values", ["auto", "real", "stand-in"])
def test_layers_whose_size_is_known_later_are_on_the_device_they_were_moved_to(values: str) -> None:
    gpu.turn_on(f"T4,values={values}")
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3)).to("cuda")
    before = torch.cuda.memory_allocated()
    out = model(torch.rand(4, 5, device="cuda"))
    assert out.device == torch.device("cuda", 0)
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    assert [tuple(one.shape) for one in model.parameters()][:2] == [(8, 5), (8,)]
    assert all(isinstance(one, nn.Parameter) for one in model.parameters())
    out.sum().backward()
    assert torch.cuda.memory_allocated() > before
