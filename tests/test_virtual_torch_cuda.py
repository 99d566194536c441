"""The face of `torch.cuda` on the virtual GPU: every question has the answer of the emulated device."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import device as device_taken_before

from gpumem_magic.files.loaded import load
from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xT4")
    gpu.turn_off()


def zeros(mib: int, device: str = "cuda") -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8, device=device)


# ---- which devices there are


def test_there_are_devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:1") == "Tesla T4"
    assert torch.cuda.get_device_capability(0) == (7, 5)
    assert torch.cuda.get_arch_list() == ["sm_75"]
    properties = torch.cuda.get_device_properties("cuda")
    assert (properties.name, properties.major, properties.minor) == ("Tesla T4", 7, 5)
    assert properties.total_memory == torch.cuda.mem_get_info()[1]
    assert properties.multi_processor_count == 40
    assert "Tesla T4" in repr(properties)
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.cuda.is_bf16_supported(including_emulation=False) is False
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.backends.cuda.is_built() in (True, False)


def test_a_bare_number_is_a_device_of_the_type_that_it_always_is() -> None:
    """A library goes by `type(device) is torch.device` (torchtuples, under pycox), and took the name before."""
    for kind in (torch.device, device_taken_before, torch._C.device):
        found = kind(1)
        assert found == torch.device("cuda", 1)
        assert type(found) is torch.device is kind
        assert isinstance(found, kind)
        assert kind("cuda:1") == kind("cuda", 1) == kind(type="cuda", index=1) == found
    assert type(torch.zeros(1, device="cuda").device) is torch.device
    assert (torch.device.__module__, torch.device.__qualname__) == ("torch", "device")
    for dump, load_again in ((pickle.dumps, pickle.loads), (pickle._dumps, pickle._loads)):  # type: ignore[attr-defined]
        assert load_again(dump(torch.device)) is torch.device
        assert load_again(dump(torch.device("cuda", 1))) == torch.device("cuda", 1)
    assert copy.deepcopy({"on": torch.device, "it": torch.device(0)}) == {
        "on": torch.device,
        "it": torch.device("cuda", 0),
    }
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        torch.device("nonsense")
    with pytest.raises(TypeError, match="device"):
        torch.device(1.5)  # type: ignore[call-overload]


def test_scripts_and_compiled_functions_know_the_type_of_devices() -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor, to: torch.device) -> torch.Tensor:
        return x.to(torch.device("cpu")).to(to)

    assert scripted(zeros(1), torch.device("cpu")).device.type == "cpu"

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        to = torch.device("cuda", 0)
        return x.to(to) + 1 if type(to) is torch.device and isinstance(x.device, torch.device) else x

    assert compiled(torch.zeros(2)).device == torch.device(0)


def test_initialisation_is_said_as_cuda_says_it() -> None:
    torch.cuda.init()
    assert torch.cuda.is_initialized()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()


@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_what_waits_for_the_device_is_told_in_sync_debug_mode(values: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"T4,values={values}")
    x, host, one = torch.ones(4, device="cuda"), torch.ones(4), torch.ones((), device="cuda")
    waiting: list[Callable[[], object]] = [
        lambda: x.sum().item(), lambda: bool(x[0] > 0), x.cpu, x.tolist, host.cuda, lambda: x.copy_(host),
        lambda: host.copy_(x), x.nonzero, lambda: x[x > 0], lambda: torch.equal(x, x), lambda: x[torch.tensor([1, 3])],
        lambda: x.index_put_((torch.tensor([1, 3]),), one), lambda: x.index_put_((x > 0,), one),
        lambda: x.repeat_interleave(x.long()),
    ]  # fmt: skip
    going_on: list[Callable[[], object]] = [
        lambda: x + 1, lambda: x.half(), lambda: host.cuda(non_blocking=True), lambda: x.to("cpu", non_blocking=True),
        lambda: x.copy_(host, non_blocking=True), lambda: torch.zeros(3, device="cuda"), lambda: x[:2].clone(),
        torch.cuda.synchronize, lambda: x.repeat_interleave(x.long(), output_size=4),
        lambda: x[torch.zeros(3, dtype=torch.long, device="cuda")], lambda: x.__setitem__(x > 0, 1.0),
    ]  # fmt: skip
    for way in (*waiting, *going_on):
        way()  # (With values=real the second call takes a shorter way.)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.set_sync_debug_mode("warn")
    for way in waiting:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as told:
            way()
        assert told[0].filename == __file__
    torch.cuda.set_sync_debug_mode(2)
    for way in waiting:
        with pytest.raises(RuntimeError, match=r"^called a synchronizing CUDA operation$"):
            way()
    for way in going_on:
        way()
    torch.cuda.set_sync_debug_mode("default")
    for way in waiting:
        way()
    with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
        torch.cuda.set_sync_debug_mode("loud")


@pytest.mark.parametrize(
    ("asks", "initialises"),
    [
        # As `torch.cuda` has it: whether the function, or what it calls, calls `_lazy_init`.
        (lambda: torch.zeros(1, device="cuda"), True),
        (lambda: torch.nn.Linear(1, 1).cuda(), True),
        (lambda: torch.cuda.current_device(), True),
        (lambda: torch.cuda.set_device(0), True),
        (lambda: torch.cuda.get_device_name(), True),
        (lambda: torch.cuda.is_bf16_supported(), True),
        (lambda: torch.cuda.synchronize(), True),
        (lambda: torch.cuda.current_stream(), True),
        (lambda: torch.cuda.get_rng_state(), True),
        (lambda: torch.cuda.is_available(), False),
        (lambda: torch.cuda.device_count(), False),
        (lambda: torch.cuda.memory_allocated(), False),
        (lambda: torch.cuda.empty_cache(), False),
        (lambda: torch.manual_seed(0), False),
        (lambda: torch.zeros(1), False),
    ],
)
def test_what_initialises_cuda(asks: Callable[[], object], initialises: bool) -> None:
    gpu.turn_on("T4")
    assert not torch.cuda.is_initialized()
    asks()
    assert torch.cuda.is_initialized() is initialises


def test_the_current_device() -> None:
    torch.cuda.set_device(1)
    try:
        assert zeros(1).device.index == 1
        with torch.cuda.device(0):
            assert zeros(1).device.index == 0
            assert torch.cuda.current_device() == 0
        # As bitsandbytes asks.
        assert torch.cuda.get_device_capability(torch.cuda.device(0)) == torch.cuda.get_device_capability(0)
        with torch.cuda.device_of(zeros(1, "cuda:0")):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
        assert torch.zeros(2).cuda().device.index == 1
        assert torch.zeros(2).to("cuda").device.index == 1
    finally:
        torch.cuda.set_device(0)


def test_each_thread_has_its_own_current_device() -> None:
    found: list[object] = []

    def look() -> None:
        torch.cuda.set_device(1)
        found.append(torch.zeros(3, device="cuda").device.index)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [1]
    assert torch.cuda.current_device() == 0


# ---- memory


def test_how_much_memory() -> None:
    kept = zeros(3)
    other = zeros(5, "cuda:1")
    assert torch.cuda.memory_allocated() == torch.cuda.memory_allocated("cuda:0") == 3 * MIB
    assert torch.cuda.memory_allocated(1) == 5 * MIB
    assert torch.cuda.memory_reserved() == 20 * MIB
    del kept
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 3 * MIB
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 20 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_reserved(1) == 20 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.max_memory_reserved() == 0
    del other


def test_statistics_have_pytorchs_keys() -> None:
    kept = zeros(3)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB
    assert stats["reserved_bytes.large_pool.peak"] == 20 * MIB
    assert stats["allocation.all.allocated"] == 1
    assert stats["num_ooms"] == 0
    assert list(stats) == sorted(stats)
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == 3 * MIB
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert "3072 KiB" in torch.cuda.memory_summary() or "3.00 MiB" in torch.cuda.memory_summary()
    assert torch.accelerator.memory_allocated() == 3 * MIB
    assert torch.accelerator.max_memory_reserved() == 20 * MIB
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    if hasattr(torch.accelerator, "random"):
        torch.cuda.manual_seed(7)
        assert torch.accelerator.random.initial_seed() == 7
    del kept


def test_the_driver_sees_context_and_segments(machine: gpu.VirtualMachine) -> None:
    free, total = torch.cuda.mem_get_info()
    kept = zeros(3)
    assert torch.cuda.mem_get_info() == (free - 20 * MIB, total)
    assert torch.cuda.device_memory_used() == machine.devices[0].used_bytes()
    assert "uses" in torch.cuda.list_gpu_processes()
    del kept


def test_old_names_of_memory_functions() -> None:
    kept = zeros(3)
    assert torch.cuda.memory_cached() == 20 * MIB
    assert torch.cuda.max_memory_cached() == 20 * MIB
    torch.cuda.reset_max_memory_allocated()
    del kept


def test_memory_taken_by_hand() -> None:
    address = torch.cuda.caching_allocator_alloc(3 * MIB)
    assert torch.cuda.memory_allocated() == 3 * MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.get_allocator_backend() == "native"


def test_a_memory_fraction() -> None:
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.5
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
    with pytest.raises(ValueError, match="Invalid fraction value"):
        torch.cuda.set_per_process_memory_fraction(1.5)
    with pytest.raises(TypeError, match="must be `float`"):
        torch.cuda.set_per_process_memory_fraction(1)  # type: ignore[arg-type]


# ---- snapshots


def test_a_recorded_history_is_written_and_read(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    kept = zeros(3)
    torch.zeros(7, device="cuda")
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    zeros(1)
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces", "allocator_settings"} <= set(snapshot)
    assert len(snapshot["device_traces"]) == 2
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions[:3] == ["segment_alloc", "alloc", "segment_alloc"]
    assert "free_completed" in actions
    event = snapshot["device_traces"][0][1]
    assert event["size"] == 3 * MIB
    assert event["frames"][0]["name"] == "zeros"
    assert event["frames"][0]["filename"] == __file__
    assert not any("gpumem_magic" in frame["filename"] for frame in event["frames"])
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == 3 * MIB
    # What was recorded goes when recording stops.
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    del kept


def test_an_observer_writes_a_snapshot_when_memory_runs_out(tmp_path: Path) -> None:
    """The recipe of PyTorch's blog: the file says where memory ran out, before anything was let go."""
    path = tmp_path / "oom.pickle"
    told = []

    def observer(device: int, asked: int, most: int, free: int) -> None:
        told.append((device, asked, most, free))
        torch.cuda.memory._dump_snapshot(str(path))

    torch.cuda.memory._record_memory_history()
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]
    kept = zeros(3)
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._record_memory_history(enabled=None)
    ((device, asked, most, left),) = told
    assert (device, most, left) == (0, total, free)
    assert asked >= 2 * total
    report = load(path)
    assert report.error is not None
    assert report.error.place.endswith("test_an_observer_writes_a_snapshot_when_memory_runs_out")
    assert report.peak.allocated == 3 * MIB
    del kept


def test_a_history_of_states_and_a_short_one() -> None:
    torch.cuda.memory._record_memory_history("state")
    kept = zeros(3)
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) <= 1
    torch.cuda.memory._record_memory_history(max_entries=3, clear_history=True)
    for _ in range(5):
        zeros(1)
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 3
    torch.cuda.memory._record_memory_history(False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="expected state to be"):
        torch.cuda.memory._record_memory_history("everything")  # type: ignore[call-overload]
    del kept


@pytest.mark.parametrize("context", ["state", "alloc", "all"])
def test_a_history_has_stacks_where_the_program_wants_them(context: str) -> None:
    def taken() -> torch.Tensor:
        return zeros(30)

    def given_back(tensors: list[torch.Tensor]) -> None:
        tensors.clear()

    torch.cuda.memory._record_memory_history(context=context)
    kept = taken()
    given_back([taken()])
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    traced, blocks = str(snapshot["device_traces"]), str(snapshot["segments"])
    assert "taken" in blocks
    assert ("taken" in traced) == (context != "state")
    assert ("given_back" in traced) == (context == "all")
    released = [event for event in snapshot["device_traces"][0] if event["action"] == "segment_free"]
    assert [frame["name"] for event in released for frame in event.get("frames", ())[:1]] == {
        "state": [],
        "alloc": ["zeros"],
        "all": ["test_a_history_has_stacks_where_the_program_wants_them"],
    }[context]
    with pytest.raises(RuntimeError, match="expected context to be"):
        torch.cuda.memory._record_memory_history(context="some")
    del kept


def test_memory_snapshot_lists_segments() -> None:
    kept = zeros(3)
    (segment,) = torch.cuda.memory_snapshot()
    assert segment["total_size"] == 20 * MIB
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    del kept


# ---- streams, events, generators


def test_streams_keep_their_places() -> None:
    stream = torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        stream.wait_stream(torch.cuda.default_stream())
        event = stream.record_event()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(event)
    stream.synchronize()
    assert stream.query()
    assert event.query()
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = torch.cuda.Stream(device=1)
    with torch.cuda.stream(other):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    assert other != stream
    assert len({stream, stream, other}) == 2


def test_a_pool_has_32_streams_of_each_priority() -> None:
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert len({*streams}) == 32
    assert streams[0] == streams[32]
    assert torch.cuda.Stream(priority=-1) not in streams
    assert torch.cuda.default_stream() not in streams


def test_memory_belongs_to_the_stream_that_took_it() -> None:
    side = torch.cuda.Stream()
    first = zeros(3)
    del first
    with torch.cuda.stream(side):
        second = zeros(3)
    assert torch.cuda.memory_reserved() == 40 * MIB, "another stream's cached block is not taken"
    second.record_stream(torch.cuda.current_stream())
    del second
    assert torch.cuda.memory_allocated() == 0


def test_events_measure_the_hosts_time() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(end)
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_generators_and_seeds() -> None:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(42)
    assert generator.initial_seed() == 42
    assert generator.device == torch.device("cuda:0")
    assert isinstance(generator, torch.Generator)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda
    assert torch.randperm(5, device="cuda", generator=generator).is_cuda
    assert torch.empty(3, device="cuda").normal_(generator=generator).is_cuda
    assert torch.Generator().manual_seed(3).device == torch.device("cpu")
    torch.cuda.manual_seed_all(11)
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(12)
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == torch.cuda.default_generators[0].initial_seed() == 11
    assert len(torch.cuda.get_rng_state_all()) == 2
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(99)
    assert torch.cuda.initial_seed() == 11


def test_counters_are_those_of_now_without_a_collection() -> None:
    gc.disable()
    try:
        for _ in range(5):
            zeros(3)
        assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()


def test_copies_across_devices_and_data_parallel() -> None:
    x = torch.zeros(64, 16, device="cuda:0")
    y = x.to("cuda:1")
    assert (y.device.index, torch.cuda.memory_allocated(1)) == (1, 4096)
    x.copy_(y)
    model = torch.nn.DataParallel(torch.nn.Linear(16, 4).cuda())
    out = model(x)
    assert out.shape == (64, 4)
    out.sum().backward()
    assert model.module.weight.grad.device.index == 0


def test_a_model_on_two_devices() -> None:
    first, second = torch.nn.Linear(8, 8).to("cuda:0"), torch.nn.Linear(8, 8).to("cuda:1")
    out = second(first(torch.zeros(2, 8, device="cuda:0")).to("cuda:1"))
    out.sum().backward()
    assert first.weight.grad.device.index == 0  # type: ignore[union-attr]
    assert second.weight.grad.device.index == 1  # type: ignore[union-attr]
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    optimizer.step()
    assert optimizer.state[second.weight]["exp_avg"].device.index == 1


def test_pinned_memory_and_copies_that_do_not_block() -> None:
    host = torch.ones(4).pin_memory()
    device = host.to("cuda", non_blocking=True)
    assert device.is_cuda
    assert torch.zeros(4, pin_memory=True).device.type == "cpu"
    back = torch.empty(4, pin_memory=True)
    back.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert device.to("cpu", non_blocking=True).shape == (4,)


def test_what_a_device_has_no_answer_for_says_so() -> None:
    for ask in (torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.clock_rate):
        with pytest.raises(RuntimeError, match="virtual GPU has no temperature, power or clock"):
            ask()


def test_memory_is_always_cached() -> None:
    torch.ones(1, device="cuda")
    torch.cuda.caching_allocator_enable(True)
    with pytest.raises(RuntimeError, match=r"always caches memory.*caching_allocator_enable\(False\)"):
        torch.cuda.caching_allocator_enable(False)


def test_nothing_runs_on_it() -> None:
    assert (torch.cuda.utilization(), torch.cuda.memory_usage(0)) == (0, 0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for a card says its own")
def test_a_build_for_the_host_says_what_pytorchs_wheel_for_the_card_comes_with() -> None:
    # (As the wheels' metadata on PyPI name them: nvidia-cuda-runtime, or cuda-toolkit, and nvidia-cudnn.)
    told = {
        "2.9": ("12.8", 91002), "2.10": ("12.8", 91002), "2.11": ("13.0", 91900), "2.12": ("13.0", 92000),
        "2.13": ("13.0", 92000),
    }  # fmt: skip
    expected = told.get(".".join(torch.__version__.split(".")[:2]))
    if expected is None:
        pytest.skip("what its wheel has is not known")
    assert (torch.version.cuda, torch.backends.cudnn.version()) == expected
    assert torch.backends.cudnn.is_available()
    gpu.turn_off()
    assert torch.version.cuda is None
    assert torch.backends.cudnn.version() is None


@pytest.mark.parametrize(("version", "each"), [("2.1", 2), ("2.11", 1), ("2.13", 0)])
def test_a_capture_begins_with_the_two_numbers_of_a_generator(version: str, each: int) -> None:
    """Each graph has its own before 2.4, all share them since; they go with the last graph. (2.13 does not begin with them.)"""
    gpu.turn_on(f"A100-40GB,torch={version}")
    start = torch.cuda.memory_allocated()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph):
            pass
    assert torch.cuda.memory_allocated() - start == each * 2 * 512
    graph.reset()
    assert torch.cuda.memory_allocated() - start == each * 2 * 512
    del graph, graphs
    assert torch.cuda.memory_allocated() == start


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for a card has its own answer")
def test_a_library_of_linear_algebra_can_be_preferred() -> None:
    wanted = torch.backends.cuda.preferred_linalg_library
    kinds = type(wanted())
    assert wanted("magma") == kinds.Magma == wanted()
    assert wanted(kinds.Cusolver) == kinds.Cusolver == wanted()
    assert wanted("default") == kinds.Default == wanted()
    with pytest.raises(RuntimeError, match="Unknown input value"):
        wanted("lapack")
    wanted("magma")
    gpu.turn_off()
    assert torch.backends.cuda.preferred_linalg_library() == kinds.Default
