"""Functions that only a build for a card has, below `torch.cuda` and `torch.backends.cuda`: they answer, or say what to do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from gpumem_magic.virtual import gpu

MIB = 1 << 20

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="a build for a card has its own answers")


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    gpu.turn_on("H100,torch=2.13")
    yield
    gpu.turn_off()


def test_cublas_handle_comes_with_its_workspace() -> None:
    assert torch.cuda.current_blas_handle() > 0
    assert torch.cuda.memory_allocated() == 32 * MIB
    square = torch.ones(8, 8, device="cuda")
    square @ square
    assert torch.cuda.memory_allocated() == 32 * MIB + 512
    gpu.turn_on("H100,torch=2.15")
    torch.cuda.current_blas_handle()
    assert torch.cuda.memory_allocated() == 0


def test_a_workspace_grows_with_the_size_that_is_chosen_and_does_not_shrink() -> None:
    sizes = torch.backends.cuda
    if not hasattr(sizes, "cublas_workspace_size"):
        pytest.skip("came with PyTorch 2.13")
    assert sizes.cublas_workspace_size() == 32 * MIB
    assert sizes.cublas_workspace_size(8 * MIB) == 8 * MIB
    assert sizes.cublaslt_workspace_size(16 * MIB) == 8 * MIB  # they share one
    square = torch.ones(8, 8, device="cuda")
    held = []
    for chosen in (8, 16, 4):
        sizes.cublas_workspace_size(chosen * MIB)
        square @ square
        held.append(torch.cuda.memory_allocated() // MIB)
    assert held == [8, 16, 16]
    assert torch.cuda.max_memory_allocated() // MIB == 24
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 512
    with pytest.raises(RuntimeError, match="must not be negative"):
        sizes.cublas_workspace_size(-1)


@pytest.mark.parametrize(("library", "held"), [("default", 32), ("cublaslt", 33)])
def test_a_program_may_prefer_cublaslt(library: str, held: int) -> None:
    """Which has a workspace of its own beside cuBLAS's with 2.11."""
    gpu.turn_on("H100,torch=2.11")
    before = torch.backends.cuda.preferred_blas_library()
    chosen = torch.backends.cuda.preferred_blas_library(library)
    square = torch.ones(8, 8, device="cuda")
    square @ square
    assert torch.cuda.memory_allocated() // MIB == held
    assert torch.backends.cuda.preferred_blas_library() == chosen
    assert torch.backends.cuda.preferred_blas_library("cublas") == before
    gpu.turn_off()
    assert torch.backends.cuda.preferred_blas_library() == before


def test_a_kernel_for_every_element_has_results_of_the_common_shape_and_type() -> None:
    scaled = torch.cuda.jiterator._create_jit_fn(
        "template <typename T> T scaled(T x, T y, T a) { return x + a * y; }", a=1.0
    )
    tall, flat = torch.ones(300, 1, device="cuda"), torch.ones(200, device="cuda", dtype=torch.half)
    before = torch.cuda.memory_allocated()
    out = scaled(tall, flat, a=2.0)
    assert (out.shape, out.dtype) == ((300, 200), torch.float32)
    assert torch.cuda.memory_allocated() - before == 300 * 200 * 4 // 512 * 512 + 512
    turned = torch.ones(3, 4, device="cuda").t()
    both = torch.cuda.jiterator._create_multi_output_jit_fn(
        "template <typename T> void both(T x, T& a, T& b) { a = x; b = x; }", num_outputs=2
    )(turned)
    assert [one.stride() for one in both] == [turned.stride()] * 2
    with pytest.raises(RuntimeError, match="expected tensors on one CUDA device"):
        scaled(tall, flat.cpu())
    gpu.turn_on("H100,values=real")
    with pytest.raises(NotImplementedError, match="values=real cannot run scaled"):
        scaled(torch.ones(3, device="cuda"), torch.ones(3, device="cuda"))


def test_tunableop_keeps_its_settings_and_says_what_it_does_not_count() -> None:
    settings = torch.cuda.tunable
    assert (settings.is_enabled(), settings.tuning_is_enabled(), settings.get_max_tuning_iterations()) == (
        False,
        True,
        100,
    )
    with pytest.warns(UserWarning, match="a virtual GPU tunes no products"):
        settings.enable()
    settings.enable(False)
    settings.tuning_enable(False)
    settings.enable()  # what was tuned before is read, and nothing is tried
    settings.set_max_tuning_duration(7)
    settings.set_filename("found.csv")
    settings.set_rotating_buffer_size(2)
    assert (settings.get_max_tuning_duration(), settings.get_filename(), settings.get_results()) == (7, "found.csv", ())
    assert settings.get_rotating_buffer_size() == 2 * MIB
    settings.set_rotating_buffer_size(-1)
    assert settings.get_rotating_buffer_size() == torch.cuda.get_device_properties(0).L2_cache_size
    assert not settings.read_file("found.csv")


def test_the_plans_of_transforms_can_be_limited() -> None:
    cache = torch.backends.cuda.cufft_plan_cache
    assert cache.max_size == 4096
    cache.max_size = 12
    assert (cache.max_size, cache[0].max_size) == (12, 12)
    cache.clear()
    with pytest.raises(NotImplementedError, match="makes no plans"):
        _ = cache.size
    with pytest.raises(RuntimeError, match="must be non-negative"):
        cache.max_size = -1


def test_what_is_not_emulated_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"use torch\.distributed, or real GPUs"):
        torch.cuda.nccl.unique_id()
    with pytest.raises(NotImplementedError, match="PyTorch's own allocator and no other"):
        torch._C._cuda_changeCurrentAllocator(None)
    with pytest.raises(RuntimeError, match="leave this line out here, or run it on a real GPU"):
        torch.cuda.power_draw()


def test_streams_and_events_say_what_a_card_says() -> None:
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert torch.cuda.get_stream_from_external(torch.cuda.current_stream().cuda_stream).device.index == 0
    event = torch.cuda.Event(interprocess=True)
    event.record()
    assert torch.cuda.Event.from_ipc_handle(torch.device("cuda"), event.ipc_handle()).query()
    assert torch.cuda.get_gencode_flags() == "-gencode compute=compute_90,code=sm_90"


def test_a_pool_shows_its_own_segments() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(1 << 20, device="cuda")
    outside = torch.ones(1 << 20, device="cuda")
    assert len(torch.cuda.memory_snapshot()) == 2
    (segment,) = torch.cuda.memory_snapshot(pool.id)
    assert segment == pool.snapshot()[0]
    assert inside.data_ptr() == segment["address"] != outside.data_ptr()


def test_a_storage_can_be_made_on_the_device() -> None:
    storage = torch.UntypedStorage(5 * MIB, device="cuda")
    assert (storage.device, storage.nbytes(), torch.cuda.memory_allocated()) == (
        torch.device("cuda", 0),
        5 * MIB,
        5 * MIB,
    )
    assert torch.UntypedStorage([1, 2], device="cuda:0").nbytes() == 2
    del storage
    assert torch.cuda.memory_allocated() == 0
    assert (torch.UntypedStorage(5).device.type, torch.UntypedStorage([1, 2]).tolist()) == ("cpu", [1, 2])


def test_pinned_memory_is_a_copy_that_says_so() -> None:
    plain = torch.arange(6.0).view(2, 3).t()
    pinned = plain.pin_memory()
    assert (pinned.is_pinned(), pinned[1:].is_pinned(), plain.is_pinned()) == (True, True, False)
    assert pinned.stride() == plain.stride()
    assert pinned.pin_memory() is pinned
    pinned.zero_()
    assert plain.sum() == 15
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros_like(plain, pin_memory=True).is_pinned()
    assert not torch.ones(3, pin_memory=False).is_pinned()
    assert torch.tensor([1, 2], pin_memory=True).is_pinned()
    assert not torch.tensor([1, 2], pin_memory=False).is_pinned()
    assert plain.new_tensor([1.0], pin_memory=True).is_pinned()
    assert pinned.untyped_storage().is_pinned()
    assert torch.UntypedStorage(4).pin_memory().is_pinned()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="cuda", pin_memory=True)
    # (Its values pass through pinned memory.)
    assert torch.tensor([1, 2], device="cuda", pin_memory=True).is_cuda
    with torch.device("cuda"):
        assert torch.tensor([1, 2], pin_memory=True).is_cuda
        assert torch.tensor([1, 2], device="cpu", pin_memory=True).is_pinned()
    gpu.turn_off()
    assert not pinned.is_pinned()


def test_pinned_memory_goes_with_its_tensors() -> None:
    """What lies later where it lay is not pinned."""
    for _ in range(300):
        assert torch.empty(1000, pin_memory=True).is_pinned()
        assert not torch.empty(1000).is_pinned()
    gc.collect()
    assert not any(torch.empty(1000).is_pinned() for _ in range(50))


def _host_stats(*names: str) -> list[int]:
    stats = torch.cuda.host_memory_stats()
    return [stats[name] for name in names]


def test_pinned_memory_is_counted() -> None:
    """The cache of pinned memory rounds up to powers of two, keeps what is given back, and gives it to the next of its size."""
    assert torch.cuda.host_memory_stats() == {}, "CUDA is not in use yet"
    kept = torch.zeros(1000).pin_memory()
    assert torch.cuda.is_initialized()
    passing = torch.empty(3, 5, dtype=torch.uint8, pin_memory=True)[1:]
    names = ("active_requests.current", "active_bytes.current", "allocated_bytes.current", "num_host_alloc")
    assert _host_stats(*names) == [2, 4096 + 16, 4096 + 16, 2]
    del passing
    assert _host_stats(*names) == [1, 4096, 4096 + 16, 2]
    torch.empty(2, pin_memory=True), torch.empty(4, pin_memory=True)
    assert _host_stats(*names) == [1, 4096, 4096 + 16 + 8, 3], "one of 8 bytes is new, that of 16 was there"
    assert _host_stats("active_bytes.peak", "active_bytes.freed", "host_alloc_time.count") == [4096 + 24, 40, 3]
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    assert _host_stats("active_bytes.peak", "active_bytes.freed", "num_host_alloc") == [4096, 0, 0]
    torch._C._host_emptyCache()
    assert _host_stats("allocations.current", "allocated_bytes.current", "num_host_free") == [1, 4096, 2]
    assert torch.cuda.memory.host_memory_stats_as_nested_dict()["active_requests"]["current"] == 1
    assert kept.is_pinned()


def test_pinned_memory_of_a_loader_is_used_again() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 100)), 4, pin_memory=True)
    assert sum(batch.to("cuda", non_blocking=True).shape[0] for (batch,) in loader) == 40
    assert _host_stats("active_requests.allocated")[0] == 10
    assert _host_stats("num_host_alloc")[0] < 10


def test_what_goes_to_another_process_is_reduced_as_its_pickler_does_it_and_memory_has_no_handle() -> None:
    tensor = torch.arange(6.0, device="cuda").view(2, 3)[1:]
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, given = reduce_tensor(tensor)
    received = rebuild(*given)
    assert received.is_cuda
    assert received.shape == (1, 3)
    assert torch.cuda.memory_allocated() == 512
    with pytest.raises(NotImplementedError, match=r"no handle that another process could open: send the tensor itself"):
        tensor.untyped_storage()._share_cuda_()
    host = torch.ones(2)
    assert reduce_tensor(host)[0] is not rebuild
