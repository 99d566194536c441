"""Conservation on the virtual GPU: counters, segments, logs and the storages that are alive say the same, after any program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.snapshot.plain import snapshot_from_data
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import attention

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    gpu.turn_off()


class Program:
    """A notebook's worth of tensors, changed by made-up steps."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def step(self, kind: str, first: int, second: int, size: int) -> None:
        x = self.tensors[first % len(self.tensors)] if self.tensors else torch.zeros(1, device="cuda")
        y = self.tensors[second % len(self.tensors)] if self.tensors else x
        match kind:
            case "make":
                self.tensors.append(torch.empty(size, device="cuda"))
            case "drop":
                if self.tensors:
                    del self.tensors[first % len(self.tensors)]
            case "view":
                self.tensors.append(x[: max(1, size % (x.numel() + 1))])
            case "copy":
                self.tensors.append(x.clone())
            case "half":
                self.tensors.append(x.half())
            case "mix":
                self.tensors.append(x.float().mean() * y.float().flatten())
            case "write":
                x.detach().fill_(float(size))
            case "resize":
                self.tensors.append(torch.zeros(size, device="cuda").resize_(size * 2))
            case "train":
                w = torch.ones(size, device="cuda", requires_grad=True)
                (w.sin() * x.float().mean().detach()).sum().backward()
                self.tensors.append(w.grad)
            case "host":
                self.tensors.append(x.cpu().to("cuda"))
            case "empty_cache":
                torch.cuda.empty_cache()
            case "too_much":
                with pytest.raises(torch.OutOfMemoryError):
                    torch.empty(1 << 40, device="cuda")


KINDS = ("make", "drop", "view", "copy", "half", "mix", "write", "resize", "train", "host", "empty_cache", "too_much")
SIZES = st.one_of(st.integers(1, 2000), st.integers(1, 4 * MIB))
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9), SIZES), max_size=25)


def blocks_of(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages that the program holds."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


@settings(max_examples=40)
@given(program=STEPS, setting=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]))
def test_after_any_program_all_accounts_agree(program: list[tuple[str, int, int, int]], setting: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
        device = gpu.turn_on("virtual:1GiB").devices[0]
    notebook = Program()
    log = device.start_log()
    for kind, first, second, size in program:
        notebook.step(kind, first, second, size)

    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    held = blocks_of(notebook.tensors)
    snapshot = torch.cuda.memory_snapshot()
    live = {
        block["address"]: block
        for segment in snapshot
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert set(live) == set(held), "what is allocated is what the program holds, and nothing else"
    assert all(live[address]["requested_size"] == size for address, size in held.items())
    assert sum(block["size"] for block in live.values()) == allocated
    assert sum(segment["total_size"] for segment in snapshot) == reserved
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == sum(held.values())
    free, total = torch.cuda.mem_get_info()
    assert total - free == device.used_bytes() == device.model.idle_bytes + device.context_bytes() + reserved

    stopped = log.stop()
    timeline = Timeline(stopped.start, stopped.events, stopped.settings)
    end = len(stopped.events)
    assert (timeline.allocated_at(end), timeline.reserved_at(end)) == (allocated, reserved)

    del notebook
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_the_snapshot_is_whole() -> None:
    gpu.turn_on("T4")
    torch.cuda.memory._record_memory_history()
    kept = [torch.zeros(size * 1000, device="cuda") for size in range(1, 30)]
    del kept[::2]
    snapshot = snapshot_from_data(torch.cuda.memory._snapshot())
    assert sum(segment.allocated_size for segment in snapshot.segments) == torch.cuda.memory_allocated()


# ---- attention: the kernel that CUDA would take


def shaped(*shape: int, dtype: torch.dtype = torch.float16, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda", requires_grad=grad)


@pytest.mark.parametrize(
    ("device", "dtype", "head", "mask", "kernel"),
    [
        ("A100-40GB", torch.float16, 64, False, attention.FLASH),
        ("A100-40GB", torch.bfloat16, 256, False, attention.FLASH),
        ("A100-40GB", torch.float16, 64, True, attention.EFFICIENT),
        ("A100-40GB", torch.float32, 64, False, attention.EFFICIENT),
        ("T4", torch.float16, 64, False, attention.EFFICIENT),
        ("T4", torch.bfloat16, 64, False, attention.MATH),
        ("T4", torch.float32, 64, False, attention.EFFICIENT),
        ("A100-40GB", torch.float64, 64, False, attention.MATH),
        ("A100-40GB", torch.float32, 63, False, attention.MATH),
        ("H100", torch.bfloat16, 64, True, attention.CUDNN),
        ("H100", torch.float16, 65, False, attention.FLASH),
    ],
)
def test_attention_takes_the_kernel_of_the_generation(
    device: str, dtype: torch.dtype, head: int, mask: bool, kernel: str
) -> None:
    machine = gpu.turn_on(device)
    query = shaped(2, 4, 128, head, dtype=dtype)
    given_mask: Any = torch.zeros(2, 1, 128, 128, dtype=dtype, device="cuda") if mask else None
    which = attention.Chooser(machine.devices[0].model.capability, (2, 13))
    fits = attention.fitting(attention.unmet(which, query, query, query, given_mask, False, False))
    assert attention.first_of(fits, which) == kernel


def test_only_the_math_kernel_writes_the_scores() -> None:
    gpu.turn_on("A100-40GB")
    scores = 8 * 16 * 1024 * 1024 * 2
    peaks = {}
    for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH):
        q, k, v = (shaped(8, 16, 1024, 64, grad=True) for _ in range(3))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.nn.attention.sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v).sum().backward()
        assert q.grad is not None
        peaks[backend.name] = torch.cuda.max_memory_allocated() - before
    # (Its gradient copies what lies in another order: a sixteenth of that each.)
    assert peaks["FLASH_ATTENTION"] < scores * 5 / 8
    assert peaks["MATH"] > 2 * scores
