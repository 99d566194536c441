"""Reports made by hand for the tests of the report's faces. The figures are made up, but they add up as the ledger says."""

from __future__ import annotations

from pathlib import Path

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.model import CATEGORIES, Folded, Peak, ReportError, Row
from gpumem_magic.user_report import Report

MIB = 1 << 20
ROOT = Path(__file__).parents[1]
V100 = DeviceFacts("Tesla V100-SXM2-16GB", "virtual", 0, "GPU-0", round(15.78 * 1024) * MIB, 16160 * MIB)


def state(context: int | None = 1372, others: int | None = 2, cached: int = 0, **tensors: int) -> dict[str, int | None]:
    """Categories in bytes from MiB."""
    sizes: dict[str, int | None] = dict.fromkeys(CATEGORIES, 0)
    sizes |= {name: size * MIB for name, size in tensors.items()}
    sizes |= {
        "cached": cached * MIB,
        "context": None if context is None else context * MIB,
        "other_processes": None if others is None else others * MIB,
        "context_or_others": None,
    }
    return sizes


def figures(categories: dict[str, int | None], peak: int | None = None, peak_reserved: int | None = None) -> dict:
    allocated = sum(categories[name] or 0 for name in CATEGORIES[: CATEGORIES.index("cached")])
    reserved = allocated + (categories["cached"] or 0)
    context, others = categories["context"], categories["other_processes"]
    return {
        "allocated": allocated,
        "reserved": reserved,
        "device_used": None if context is None or others is None else reserved + context + others,
        "peak_allocated": max(allocated, 0 if peak is None else peak * MIB),
        "peak_reserved": max(reserved, 0 if peak_reserved is None else peak_reserved * MIB),
        "categories": categories,
    }


def row(
    statement: str,
    categories: dict[str, int | None],
    *,
    kind: str = "statement",
    line: int = 0,
    iteration: tuple[int, ...] = (),
    parts: tuple[Row, ...] = (),
    label: str = "",
    peak: int | None = None,
    peak_reserved: int | None = None,
) -> Row:
    return Row(
        kind=kind,
        label=label or statement,
        statement=statement,
        line=line,
        iteration=iteration,
        parts=parts,
        **figures(categories, peak, peak_reserved),
    )


def colab() -> Report:
    """The investigation: two iterations, the second optimizer step out of memory."""
    held = {"parameters": 2392, "rounding": 1}
    grown = {**held, "gradients": 2392}
    full = {**grown, "optimizer_state": 4784}
    batch = {"inputs": 78}
    left = {"inputs": 78, "activations": 40}
    rows = [
        row("", state(0, 2), kind="before", label="before"),
        row("model = model.to(device)", state(**held, cached=2), line=6),
        row("optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)", state(**held, cached=2), line=7),
        row("input = input.to(device)", state(**held, **batch, cached=2), line=11, iteration=(1,)),
        row(
            "output = model(input, comb)",
            state(**held, **batch, activations=2270, cached=610),
            line=13,
            iteration=(1,),
            peak=5158,
        ),
        row(
            "loss = my_loss(\n    output,\n    output_array,\n)",
            state(**held, **batch, activations=2270, cached=610),
            line=14,
            iteration=(1,),
        ),
        row("loss.backward()", state(**grown, **left, cached=3484), line=16, iteration=(1,), peak=7460),
        row("optimizer.step()", state(**full, **left, cached=4992), line=17, iteration=(1,), peak=14439),
        row("input = input.to(device)", state(**full, **left, cached=4992), line=11, iteration=(2,)),
        row(
            "output = model(input, comb)",
            state(**full, inputs=78, activations=2310, cached=2740),
            line=13,
            iteration=(2,),
            peak=12700,
        ),
        row("loss.backward()", state(**full, **left, cached=5010), line=16, iteration=(2,), peak=13100),
        row(
            "optimizer.step()",
            state(**full, **left, temporaries=2376, cached=2539),
            kind="error",
            line=17,
            iteration=(2,),
        ),
    ]
    rows.append(row("", state(**full, **left, cached=4915), kind="after", label="after"))
    peak = state(**full, **left, temporaries=4752, cached=240)
    return Report(
        torch="2.13.0+cpu",
        device=V100,
        checkpoints=tuple(rows),
        peak=Peak(where="optimizer.step() (iteration 1)", **figures(peak)),
        error=ReportError(
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.32 GiB.",
            17,
            2376 * MIB,
            2376 * MIB,
            2376 * MIB,
            2252 * MIB,
        ),
        evidence={"identity": 9646 * MIB, "lifetime": 4792 * MIB},
        retries=2,
        stand_ins=(StandIn("loss_ = loss.detach().item()", 2),),
        remarks=("The totals are a V100-SXM2-16GB's; a P100 shows 16280 MiB.",),
        overhead_seconds=0.12,
    )


def trainer() -> Report:
    """One statement that calls a lot: its iterations and their phases are parts. Its loop is folded."""
    held = {"parameters": 1278, "workspace": 16}
    trained = {**held, "optimizer_state": 2556}

    def iteration(number: int, start: dict[str, int], peak: int) -> Row:
        end = state(**trained, inputs=1, cached=6900)
        phases = (
            row("", state(**start, inputs=1, activations=6100, cached=700), kind="part", label="forward", peak=7500),
            row(
                "",
                state(**start, inputs=1, gradients=1278, cached=6500),
                kind="part",
                label="backward",
                peak=peak,
                peak_reserved=peak + 600,
            ),
            row("", end, kind="part", label="optimizer step", peak=9000),
        )
        return row("", end, kind="part", label=f"iteration {number}", parts=phases, peak=peak, peak_reserved=peak + 600)

    parts = (iteration(1, held, 8900), iteration(2, trained, 11968))
    end = state(**trained, cached=6900)
    return Report(
        torch="2.13.0+cpu",
        device=V100,
        checkpoints=(
            row("", state(0, 2), kind="before", label="before"),
            row("trainer = Trainer(model, args, train_dataset=data)", state(**held, cached=4), line=3),
            row("trainer.train()", end, line=4, parts=parts, peak=11968, peak_reserved=12568),
            row("", end, kind="after", label="after"),
        ),
        peak=Peak(
            "trainer.train(), iteration 2, backward",
            **figures(
                state(**trained, inputs=1, activations=6500, activation_gradients=339, gradients=1278, cached=600)
            ),
        ),
        evidence={"identity": 5113 * MIB, "lifetime": 6855 * MIB},
        folded=(Folded(4, 1000, 2),),
    )


def two_devices() -> Report:
    """2xT4: the second device's report is in `devices`."""
    t4 = DeviceFacts("Tesla T4", "virtual", 0, "GPU-T4-0", 15095 * MIB, 15360 * MIB)
    second = Report(
        torch="2.13.0+cpu",
        device=DeviceFacts("Tesla T4", "virtual", 1, "GPU-T4-1", 15095 * MIB, 15360 * MIB),
        checkpoints=(
            row("", state(0, 3), kind="before", label="before"),
            row("second = second.to('cuda:1')", state(110, 3, parameters=1400), line=3),
            row("", state(110, 3, parameters=1400), kind="after", label="after"),
        ),
        peak=Peak("second = second.to('cuda:1')", **figures(state(110, 3, parameters=1400))),
    )
    return Report(
        torch="2.13.0+cpu",
        device=t4,
        checkpoints=(
            row("", state(0, 3), kind="before", label="before"),
            row("first = first.to('cuda:0')", state(110, 3, parameters=3100, buffers=20), line=2),
            row("second = second.to('cuda:1')", state(110, 3, parameters=3100, buffers=20), line=3),
            row("", state(110, 3, parameters=3100, buffers=20), kind="after", label="after"),
        ),
        peak=Peak("first = first.to('cuda:0')", **figures(state(110, 3, parameters=3100, buffers=20))),
        devices=(second,),
    )


def small() -> Report:
    """A few tensors, read on a real device without NVML; nothing is in device_used."""
    return Report(
        torch="2.9.0",
        device=DeviceFacts("NVIDIA L4", "cuda", 0, None, None, None),
        checkpoints=(
            row("", state(None, None), kind="before", label="before"),
            row("x = torch.ones(2**18, device='cuda')", state(None, None, activations=1, cached=1), line=2),
            row("", state(None, None, activations=1, cached=1), kind="after", label="after"),
        ),
        peak=Peak("x = torch.ones(2**18, device='cuda')", **figures(state(None, None, activations=1, cached=1))),
    )
