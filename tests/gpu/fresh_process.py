"""Run by the tests in a process of its own: a measured block that is the first to use CUDA. Prints one line of JSON."""

from __future__ import annotations

import json

import torch

import gpumem_magic


def keeps_a_history() -> bool:
    """Where memory comes from cudaMallocAsync, PyTorch has none, and refuses the question."""
    return torch.cuda.get_allocator_backend() == "native" and bool(torch._C._cuda_isHistoryEnabled())


def main() -> None:
    in_use = torch.cuda.is_initialized()
    with gpumem_magic.measure(device="cuda") as measured:
        kept = torch.ones(1 << 22, device="cuda")
        passing = kept * 2
        del passing
        layer = torch.nn.Linear(1024, 1024).to("cuda")
        layer(kept.view(-1, 1024)).sum().backward()
    report = measured.report
    counted = torch.cuda.memory_stats().get("allocated_bytes.all.current") is not None
    names = ("context", "other_processes", "context_or_others")
    print(
        json.dumps(
            {
                "in_use_before": in_use,
                "history_after": keeps_a_history(),
                "notes": report.notes,
                "peak": report.peak.peak_allocated,
                "highest": torch.cuda.max_memory_allocated() if counted else None,
                "allocated": torch.cuda.memory_allocated() if counted else None,
                "reserved": torch.cuda.memory_reserved() if counted else None,
                "rows": [
                    {
                        "allocated": row.allocated,
                        "reserved": row.reserved,
                        "device_used": row.device_used,
                        **{name: row.categories[name] for name in names},
                    }
                    for row in report.checkpoints
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
