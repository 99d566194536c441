"""The virtual GPU beside the host: files, threads, data loaders, and values that a program reads."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.torch_face.hooks import _stays_on_host
from gpumem_magic.virtual.torch_face.saving import SWITCH, StandInsNotSaved


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xT4")
    gpu.turn_off()


def line_of(marker: str) -> int:
    """The line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


# ---- files


def test_saved_and_loaded_back_to_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model = torch.nn.Linear(8, 8).to("cuda:1")
    whole = torch.zeros(100, device="cuda:1")
    with pytest.warns(UserWarning, match="contains zeros in place of the values"):
        torch.save(
            {"model": model.state_dict(), "whole": whole, "part": whole[10:], "host": torch.ones(3), "step": 4}, path
        )
    loaded = torch.load(path)
    assert loaded["step"] == 4
    assert torch.equal(loaded["host"], torch.ones(3))
    assert loaded["model"]["weight"].device.index == 1
    assert loaded["part"].data_ptr() == loaded["whole"].data_ptr() + 40
    assert loaded["part"].untyped_storage().nbytes() == 400
    assert torch.nn.Linear(8, 8).to("cuda").load_state_dict(loaded["model"]).missing_keys == []


@pytest.mark.parametrize(
    ("place", "device"),
    [
        ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), (torch.device("cuda", 0), "cuda:0"), (1, "cuda:1"),
        ({"cuda:1": "cuda:0"}, "cuda:0"), (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(0), "cuda:0"), (None, "cuda:1"),
    ],
)  # fmt: skip
def test_every_kind_of_map_location(tmp_path: Path, place: Any, device: str) -> None:
    path = tmp_path / "tensor.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save([torch.zeros(4, device="cuda:1")], path)
    (loaded,) = torch.load(path, map_location=place)
    assert str(loaded.device) == device
    if device == "cpu":
        assert type(loaded) is torch.Tensor


def test_a_host_file_is_read_as_it_is_and_sent_to_the_device(tmp_path: Path) -> None:
    path = tmp_path / "host.pt"
    gpu.turn_off()
    layer = torch.nn.Linear(3, 3)
    torch.save(layer.state_dict(), path)
    torch.save(layer, tmp_path / "layer.pt")
    gpu.turn_on("T4")
    assert torch.equal(torch.load(path)["weight"], layer.weight)
    assert torch.load(path, map_location="cuda")["weight"].is_cuda
    whole = torch.load(tmp_path / "layer.pt", map_location="cuda", weights_only=False)
    assert whole.weight.is_cuda
    assert isinstance(whole.weight, torch.nn.Parameter)
    assert whole(torch.zeros(1, 3, device="cuda")).is_cuda


def test_the_state_of_an_optimizer_goes_round(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 8, device="cuda")).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="zeros"):
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", map_location="cpu"))
    state = other.state[model.weight]
    assert state["exp_avg"].is_cuda
    assert state["step"].item() == 1
    other.step()


def test_a_file_that_exists_is_not_overwritten_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "good.pt"
    torch.save(torch.ones(3), path)
    before = path.read_bytes()
    with pytest.raises(StandInsNotSaved, match="was left as it is"):
        torch.save(torch.zeros(3, device="cuda"), path)
    assert path.read_bytes() == before
    torch.save(torch.zeros(3), path)
    monkeypatch.setenv(SWITCH, "1")
    with pytest.warns(UserWarning, match="contains zeros"):
        torch.save(torch.zeros(3, device="cuda"), path)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("storage_of", [torch.Tensor.storage, torch.Tensor.untyped_storage])
def test_nor_with_those_of_a_storage(tmp_path: Path, storage_of: Any) -> None:
    path = tmp_path / "good.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        for value in (1.0, 2.0):
            torch.save(storage_of(torch.full((4,), value)), path)
    before = path.read_bytes()
    with pytest.raises(StandInsNotSaved, match="was left as it is") as caught:
        torch.save(storage_of(torch.rand(3, device="cuda")), path)
    assert caught.value.__cause__ is None
    assert path.read_bytes() == before


def test_pickling_a_tensor_keeps_a_debugger() -> None:
    """(Python takes a debugger's function off where it finds no room for another call.)"""
    called = []

    def follow(frame: types.FrameType, event: str, given: object) -> None:
        called.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        pickle.dumps(torch.rand(3, device="cuda"))
        kept = sys.gettrace()
    finally:
        sys.settrace(before)
    assert kept is follow
    assert 0 < called.count("save") <= 2


class _PickledOnce:
    """Pickles a device tensor at the second try only, as an object does that saves what a generator gives."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __reduce__(self) -> tuple[object, ...]:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("not now")
        return (list, ([torch.zeros(3, device="cuda")],))


def test_a_file_that_exists_is_not_overwritten_by_what_cannot_be_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    torch.save(torch.ones(3), path)
    before = path.read_bytes()
    with pytest.raises(StandInsNotSaved, match=r"may hold tensors on a virtual GPU.*not now") as caught:
        torch.save(_PickledOnce(1), path)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert path.read_bytes() == before
    with pytest.warns(UserWarning, match="may contain zeros"):
        torch.save(_PickledOnce(1), tmp_path / "new.pt")
    with warnings.catch_warnings():
        # PyTorch's own error, and nothing of ours with it.
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="not now"):
            torch.save(_PickledOnce(2), tmp_path / "never.pt")


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}])
def test_an_optimizer_goes_on_with_states_that_were_loaded_to_the_device(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    layer = torch.nn.Linear(4, 4, device="cuda")
    first = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4, device="cuda")).sum().backward()
    first.step()
    torch.save(first.state_dict(), tmp_path / "steps.pt")
    states = torch.load(tmp_path / "steps.pt", map_location="cuda")
    assert states["state"][0]["step"].item() == 1
    second = torch.optim.AdamW(layer.parameters(), **settings)
    second.load_state_dict(states)
    second.step()
    assert second.state[layer.weight]["step"].item() == 2


def test_stand_ins_are_found_with_the_pickler_that_saves(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    torch.save(torch.ones(3), path)

    class OfLambdas(pickle.Pickler):
        def reducer_override(self, obj: object) -> object:
            return (int, ()) if getattr(obj, "__name__", "") == "<lambda>" else NotImplemented

    module = types.ModuleType("pickles_lambdas")
    vars(module).update(vars(pickle), Pickler=OfLambdas)
    torch.save([torch.zeros(3), lambda: 0], path, pickle_module=module)
    with pytest.raises(StandInsNotSaved, match="have no values"):
        torch.save([lambda: 0, torch.zeros(3, device="cuda")], path, module)


def test_a_file_of_this_run_may_be_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="contains zeros"):
            torch.save(torch.zeros(3, device="cuda"), tmp_path / "latest.pt")


def test_safetensors_are_careful_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    with pytest.warns(UserWarning, match="contains zeros"):
        safetensors.save_file({"x": torch.zeros(3, 4, device="cuda")}, str(path))
    assert safetensors.load_file(str(path))["x"].shape == (3, 4)
    good = tmp_path / "good.safetensors"
    safetensors.save_file({"x": torch.ones(3)}, str(good))
    with pytest.raises(StandInsNotSaved):
        safetensors.save_file({"x": torch.zeros(3, device="cuda")}, str(good))
    assert torch.equal(safetensors.load_file(str(good))["x"], torch.ones(3))


def test_safetensors_are_loaded_to_the_device(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "host.safetensors"
    safetensors.save_file({"x": torch.ones(300)}, str(path))
    loaded = safetensors.load_file(str(path), device="cuda")
    assert loaded["x"].is_cuda
    assert torch.cuda.memory_allocated() == 1536


# ---- threads


def test_every_thread_can_use_the_device() -> None:
    results: list[Any] = []

    def train() -> None:
        try:
            layer = torch.nn.Linear(64, 32).to("cuda")
            for _ in range(5):
                loss = layer(torch.randn(4, 64).cuda()).sum()
                loss.backward()
            results.append(loss.item())
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0.0] * 4


def test_counters_hold_when_threads_allocate_at_once() -> None:
    kept: list[torch.Tensor] = []

    def allocate(seed: int) -> None:
        for size in range(1, 60):
            kept.append(torch.empty(size * 100 + seed, device="cuda"))
            torch.empty(size * 1000, device="cuda")

    threads = [threading.Thread(target=allocate, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.cuda.memory_allocated() == sum(-(-tensor.nbytes // 512) * 512 for tensor in kept)
    assert torch.cuda.memory_allocated() == sum(segment["allocated_size"] for segment in torch.cuda.memory_snapshot())


# ---- data loaders


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_of_a_loader_go_to_the_device(pin_memory: bool) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    loader = DataLoader(data, batch_size=4, shuffle=True, pin_memory=pin_memory)
    shapes = [tuple(x.to("cuda", non_blocking=True).shape) for x, _ in loader]
    assert shapes == [(4, 2), (2, 2)]


class SeesTheDevice(torch.utils.data.Dataset[int]):
    """In a worker there is no device, as with CUDA after a fork."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            try:
                torch.zeros(3, device="cuda")
            except RuntimeError as error:
                return 10 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else -1
            return -2
        return int(torch.cuda.is_available())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_in_a_forked_worker_the_device_is_out_of_reach() -> None:
    loader = DataLoader(SeesTheDevice(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    assert [int(batch) for batch in loader] == [0, 0, 0, 10]
    assert torch.cuda.is_available()


# ---- values that are not there


def test_lines_that_read_a_value_are_listed(machine: gpu.VirtualMachine) -> None:
    x = torch.rand(3, device="cuda")
    for _ in range(4):
        x.sum().item()  # reads
    if x.sum() > 0:  # compares
        pytest.fail("a stand-in is zero")
    x.cpu()  # copies
    x.tolist()  # lists
    found = {line: count for (file, line), count in machine.reads.counts.items() if file == __file__}
    assert found == {line_of("reads"): 4, line_of("compares"): 1, line_of("copies"): 1, line_of("lists"): 1}


def test_a_host_program_is_not_touched(machine: gpu.VirtualMachine) -> None:
    x = torch.arange(4.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert x.max().item() == 3.0
    assert torch.save is not None
    assert not machine.reads.counts
    assert torch.cuda.memory_allocated() == 0


def test_copies_to_the_host_are_real_tensors() -> None:
    x = torch.rand(3, 4, device="cuda").t()
    host = x.cpu()
    assert type(host) is torch.Tensor
    assert (host.shape, host.stride()) == (x.shape, x.stride())
    host += 1
    assert host.sum().item() == 12.0
    assert x.detach().cpu().numpy().shape == (4, 3)
    target = torch.ones(4, 3)
    target.copy_(x)
    assert target.sum().item() == 0.0
    w = torch.ones(2, device="cuda", requires_grad=True)
    (w.cpu() * torch.tensor([3.0, 4.0])).sum().backward()
    assert w.grad is not None
    assert w.grad.is_cuda


def test_distributions_are_not_checked_by_values() -> None:
    normal = torch.distributions.Normal(torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"))
    assert normal.rsample((2,)).shape == (2, 3)
    assert normal.log_prob(torch.zeros(3, device="cuda")).is_cuda
    categorical = torch.distributions.Categorical(logits=torch.zeros(2, 5, device="cuda"))
    assert categorical.sample().shape == (2,)


def test_distributions_check_what_they_are_given() -> None:
    """For a parameter, and for a sample, a flag for each element and one for all. (The second's are made while the first's are
    held.) All that nobody knows is as it has to be, and nothing was read of it."""
    mean, deviation = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    mean.normal_()
    deviation.exponential_()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    normal = torch.distributions.Normal(mean, deviation, validate_args=True)
    assert torch.cuda.max_memory_allocated() - start == 1024 + 1024
    sample = normal.sample()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    normal._validate_sample(sample)
    assert torch.cuda.max_memory_allocated() - held == 1024 + 512
    assert not gpu.current().engine.reads.counts  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(mean, torch.tensor(-1.0).cuda(), validate_args=True)


def test_a_subprocess_sees_the_device_only_through_nvidia_smi() -> None:
    assert "gpumem" in os.environ["PATH"].split(os.pathsep)[0]


# ---- backward passes of the host's own


class ThroughDevice(torch.autograd.Function):
    """Comes to the device and back where nobody sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.cuda().cpu()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return (grad.cuda() * 2).cpu()


def test_only_graphs_of_the_host_alone_are_not_watched() -> None:
    host = torch.ones(3, requires_grad=True)
    device = torch.zeros(3, device="cuda", requires_grad=True)
    into = torch.zeros(3)
    into.copy_(device)
    part = torch.zeros(6)
    part[:3] = device
    assert _stays_on_host([(host * 2).exp().sum(), host.sum()])
    for output in (
        device.sum(), device.cpu().sum(), host.cuda().cpu().sum(), (host * device.cpu()).sum(), into.sum(), part.sum(),
        ThroughDevice.apply(host).sum(), device.to("cpu", torch.float64).sum(),
    ):  # fmt: skip
        assert not _stays_on_host([output])
        assert not _stays_on_host([host.sum(), output + 1])
        output.backward()
    assert device.grad is not None
    assert device.grad.is_cuda
    assert host.grad is not None
    assert host.grad.device.type == "cpu"


def test_host_graphs_that_are_watched_give_the_same_gradients() -> None:
    layer = torch.nn.Linear(3, 1)
    x = torch.ones(2, 3)
    layer(x).sum().backward()
    alone = layer.weight.grad
    layer.weight.grad = None
    far = torch.zeros((), device="cuda", requires_grad=True)
    for _ in range(2):
        (layer(x).sum() + far.cpu()).backward()
    assert torch.equal(layer.weight.grad, 2 * alone)
    assert far.grad.is_cuda


def test_gradients_of_the_host_are_what_they_are_and_draw_no_memory() -> None:
    x = torch.arange(3.0, requires_grad=True)
    before = torch.cuda.memory_allocated()
    deep = x
    for _ in range(3000):
        deep = deep + 1
    deep.pow(2).sum().backward()
    assert torch.equal(x.grad, 2 * (torch.arange(3.0) + 3000))
    assert torch.cuda.memory_allocated() == before


# ---- tensors of the host, like those of the device


@pytest.mark.parametrize(
    "make",
    [
        lambda one, **there: torch.empty_like(one, **there).zero_(),
        lambda one, **there: torch.zeros_like(one, **there),
        lambda one, **there: torch.ones_like(one, **there),
        lambda one, **there: torch.rand_like(one, **there),
        lambda one, **there: torch.randn_like(one, **there),
        lambda one, **there: torch.full_like(one, 2.0, **there),
        lambda one, **there: torch.zeros_like(input=one, **there),
        lambda one, **there: one.new_zeros((4, 3), **there),
        lambda one, **there: one.new_full((4, 3), 2.0, **there),
    ],
)
@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_made_like_a_device_tensor_may_be_on_the_host(make: Any, pinned: bool) -> None:
    like = torch.nn.Parameter(torch.ones(3, 4, device="cuda").t())
    made = make(like, device="cpu", pin_memory=pinned)
    assert type(made) is torch.Tensor
    assert (made.device.type, tuple(made.shape)) == ("cpu", (4, 3))
    # It computes with tensors of the host.
    assert (made * torch.zeros(4, 3)).isfinite().all()


def test_a_module_is_emptied_onto_the_host() -> None:
    model = torch.nn.BatchNorm1d(4).cuda()
    model.to_empty(device="cpu")
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    assert {one.device.type for one in model.state_dict().values()} == {"cpu"}
    assert torch.cuda.memory_allocated() == 0


def test_steps_between_numbers_of_the_device_are_on_the_host_unless_asked_for() -> None:
    ends = torch.tensor([1.0, 4.0], device="cuda")
    steps = torch.linspace(ends[0], ends[1], 4)
    assert (type(steps), steps.tolist()) == (torch.Tensor, [1.0, 2.0, 3.0, 4.0])
    assert torch.logspace(0, ends[0], 2).tolist() == [1.0, 10.0]
    there = torch.linspace(0.0, ends[1], 3, device="cuda:1")
    assert (there.device, there.tolist()) == (torch.device("cuda:1"), [0.0, 2.0, 4.0])
