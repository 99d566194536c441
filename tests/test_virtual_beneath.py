"""What lies under `torch.cuda`: the functions of `torch._C`, streams and events by their numbers, CUDA's runtime."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.viz._cycles import observe_tensor_cycles

from gpumem_magic.virtual import gpu

_C: Any = torch._C


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xT4")
    gpu.turn_off()


def test_the_device_is_set_below_torch_cuda() -> None:
    _C._cuda_setDevice(1)
    assert torch.cuda.current_device() == _C._cuda_getDevice() == 1
    assert _C._cuda_exchangeDevice(0) == 1
    assert _C._cuda_maybeExchangeDevice(-1) == 0 == torch.cuda.current_device()


def test_a_stream_is_set_by_its_numbers() -> None:
    stream = torch.cuda.Stream(device=1)
    _C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=int(stream.device_type)
    )
    assert torch.cuda.current_device() == 1
    assert torch.cuda.current_stream() == stream == torch.cuda.Stream(**_numbers(*_C._cuda_getCurrentStream(1)))
    assert _C._cuda_getDefaultStream(0) == (0, 0, 1)
    made = torch.cuda.Stream()
    assert made != torch.cuda.Stream(**_numbers(*_C._cuda_getCurrentStream(1))), "a stream without numbers is a new one"


def _numbers(stream_id: int, device_index: int, device_type: int) -> dict[str, int]:
    return {"stream_id": stream_id, "device_index": device_index, "device_type": device_type}


def test_memory_is_told_alike_on_both_floors() -> None:
    kept = torch.zeros(3 << 20, device="cuda")
    torch.zeros(5 << 20, device="cuda")
    below = _C._cuda_memoryStats(0)
    assert below["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated() == kept.nbytes
    assert below["reserved_bytes"]["all"]["current"] == torch.cuda.memory_reserved() > kept.nbytes
    _C._cuda_emptyCache()
    assert torch.cuda.memory_reserved() == kept.nbytes
    _C._cuda_resetPeakMemoryStats(0)
    assert torch.cuda.max_memory_allocated() == kept.nbytes
    _C._cuda_setMemoryFraction(0.001, 0)
    assert _C._cuda_getMemoryFraction(0) == 0.001
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(5 << 20, device="cuda")
    _C._cuda_setMemoryFraction(1.0, 0)
    address = _C._cuda_cudaCachingAllocator_raw_alloc(1 << 20, 0)
    assert torch.cuda.memory_allocated() == kept.nbytes + (1 << 20)
    _C._cuda_cudaCachingAllocator_raw_delete(address)
    assert torch.cuda.memory_allocated() == kept.nbytes


def test_an_event_has_a_number_once_it_is_recorded() -> None:
    events: list[Any] = [torch.Event("cuda"), torch.cuda.Event()]
    assert [event.event_id for event in events] == [0, 0]
    assert repr(events[1]) == "<torch.cuda.Event uninitialized>"
    for event in events:
        event.record()
    assert 0 != events[0].event_id != events[1].event_id != 0
    assert repr(events[1]) == f"<torch.cuda.Event {events[1].cuda_event:#x}>"


def test_a_storage_has_its_bytes() -> None:
    gpu.turn_on("T4,values=real")
    x = torch.tensor([1.0, 2.0], device="cuda")
    storage = x.untyped_storage()
    assert storage.tolist() == [0, 0, 128, 63, 0, 0, 0, 64]
    storage[6] = 128
    assert storage[6] == 128
    assert x.tolist() == [1.0, 4.0]
    before = torch.cuda.memory_allocated()
    storage.fill_(0)
    assert x.tolist() == [0.0, 0.0]
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(NotImplementedError, match="no slices of a storage"):
        storage[2:4]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        torch.ones(3, device="meta").untyped_storage().cpu()


def test_pytorchs_finder_of_cycles_sees_virtual_tensors() -> None:
    found: list[str] = []
    disarm = observe_tensor_cycles(found.append)  # type: ignore[no-untyped-call]
    try:
        _a_function_that_holds_itself_and_a_tensor()
        gc.collect()
        # (It reports at the first call after a collection.)
        _nothing()
    finally:
        disarm()
        torch.cuda.memory._record_memory_history(None)
        gc.set_debug(0)
        gc.garbage.clear()
    assert len(found) == 1
    assert "_a_function_that_holds_itself_and_a_tensor" in found[0]


def _a_function_that_holds_itself_and_a_tensor() -> None:
    x = torch.empty(3, 4, device="cuda")

    def again(once_more: bool) -> Any:
        return again(False) if once_more else x


def _nothing() -> None: ...


def test_registered_host_memory_is_pinned_until_it_is_unregistered() -> None:
    runtime: Any = torch.cuda.cudart()
    layer = nn.Linear(30, 30)
    weight, other = layer.weight, torch.ones(3)
    place = weight.data_ptr()
    before = torch.cuda.memory.host_memory_stats()
    assert runtime.cudaHostRegister(place, weight.nbytes, 0) == 0
    assert weight.is_pinned()
    assert weight.detach().is_pinned()
    assert weight[3:].is_pinned()
    assert not other.is_pinned()
    assert torch.cuda.memory.host_memory_stats() == before, "PyTorch's allocator has no part in it"
    # cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered
    assert runtime.cudaHostRegister(place, weight.nbytes, 0) == 712
    assert runtime.cudaHostUnregister(place) == 0
    assert not weight.is_pinned()
    assert runtime.cudaHostUnregister(place) == 713


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for a card has a limit of its own")
def test_cudnns_limit_of_plans_is_there_while_the_device_is_on() -> None:
    cudnn: Any = torch.backends.cudnn
    assert cudnn.benchmark_limit == 10
    with cudnn.flags(benchmark_limit=3):
        assert cudnn.benchmark_limit == 3
    assert cudnn.benchmark_limit == 10
    cudnn.benchmark_limit = 0
    assert cudnn.benchmark_limit == 0
    gpu.turn_off()
    assert cudnn.benchmark_limit is None


def test_the_build_says_for_which_cuda_it_is() -> None:
    major, minor = map(int, str(torch.version.cuda).split("."))
    assert _C._cuda_getCompiledVersion() == 1000 * major + 10 * minor
