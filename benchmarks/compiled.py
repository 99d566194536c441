"""Compiled programs on a virtual card: ten models eager and compiled, and many small programs beside a real card's recordings.

    python benchmarks/compiled.py [--only NAME ...] [--device A100-80GB]          ten models
    python benchmarks/compiled.py --save DIR [--at-once N]                        on a computer with a GPU: record the programs
    python benchmarks/compiled.py --against DIR [--device CARD]                  anywhere: run them, too, and compare

Each of the models trains three steps with AdamW, first as it is and then by `torch.compile`. The table has the highest allocated
memory of the third step, the graphs and breaks that Dynamo made, the processor's seconds of the first compiled step and of later
ones (the median of fifteen), these beside the eager ones', and what went another way than on a card (the last column; empty is
good). Small configurations: widths and depths are given to transformers. `bert-large` is whole, for the time.

The programs are those of `compiled_programs.py`, each in a process of its own, four steps. They are compared allocation by
allocation; --explain says where they differ. The virtual card is to have the card's PyTorch, and best the same one installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from compiled_compared import HEADING, explained, line, read
from compiled_programs import PROGRAMS

from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu

HERE = Path(__file__).resolve().parent

# What the programs were recorded on. Of free blocks of one size that with the lowest address is taken: there they fell.
RECORDED = "H100,torch=2.11,addresses=falling"
STEPS = 3
# And so many for the time.
LATER = 15
_TEXT = {"vocab_size": 8000}


def _language(name: str, **settings: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    def make() -> tuple[Any, dict[str, Any]]:
        import transformers

        config = getattr(transformers, f"{name}Config")(**_TEXT, **settings)
        config.use_cache = False
        model = transformers.AutoModelForCausalLM.from_config(config)
        # GPT-2's name does not say it, and transformers' warning of that breaks the graph.
        model.loss_type = "ForCausalLM"
        ids = torch.randint(0, 8000, (4, 256))
        return model, {"input_ids": ids, "labels": ids}

    return make


def _masked(**settings: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    def make() -> tuple[Any, dict[str, Any]]:
        import transformers

        ids = torch.randint(0, 8000, (4, 256))
        config = transformers.BertConfig(**{**_TEXT, **settings})
        return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}

    return make


def _encoder_decoder() -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.T5Config(**_TEXT, num_layers=2, decoder_start_token_id=0)
    config.use_cache = False
    ids = torch.randint(0, 8000, (4, 128))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def _images(name: str, **settings: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    def make() -> tuple[Any, dict[str, Any]]:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_labels=10, **settings)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        return model, {"pixel_values": torch.rand(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}

    return make


def _speech() -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.WhisperConfig(
        encoder_layers=2,
        decoder_layers=2,
        d_model=384,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        use_cache=False,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.rand(2, 80, 3000), "labels": torch.randint(0, 8000, (2, 64))}


class _Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import diffusers

        self.unet = diffusers.UNet2DModel(
            sample_size=64, block_out_channels=(64, 128), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=32,
        )  # fmt: skip

    def forward(self, noisy: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.unet(noisy, times).sample, noise)}


def _diffusion() -> tuple[Any, dict[str, Any]]:
    image = torch.rand(4, 3, 64, 64)
    return _Denoiser(), {"noisy": image, "times": torch.randint(0, 1000, (4,)), "noise": image}


_SMALL = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "num_attention_heads": 8}
MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "GPT-2": _language("GPT2", n_layer=2),
    "Llama": _language("Llama", **_SMALL),
    "BERT": _masked(num_hidden_layers=2),
    "T5": _encoder_decoder,
    "Mixtral": _language("Mixtral", num_local_experts=4, num_key_value_heads=4, **_SMALL),
    "ViT": _images("ViT", num_hidden_layers=2),
    "ResNet-50": _images("ResNet"),
    "ConvNeXt": _images("ConvNext"),
    "Whisper": _speech,
    "UNet": _diffusion,
    "bert-large": _masked(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}


def _steps(run: Any, model: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, float, float]:
    """The highest allocated bytes of the third step, and the processor's seconds of the first and of a later one."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        torch.cuda.reset_peak_memory_stats()
        begun = time.process_time()
        run(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    first, *_ = [step() for _ in range(STEPS)]
    peak = torch.cuda.max_memory_allocated()
    return peak, first, statistics.median(step() for _ in range(LATER))


def _models(only: list[str], device: str) -> None:
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    sizes, seconds = f"{'eager':>9} {'compiled':>9} MiB", f"{'first':>6} {'later':>6} {'times':>6}"
    print(f"{'model':<10} {sizes}  {'graphs':>6} {'breaks':>6}  {seconds}  otherwise")
    for name in only or MODELS:
        peaks, notes, counted, times = [], [], "", []
        try:
            for compiled in (False, True):
                machine = gpu.turn_on(device)
                model, inputs = MODELS[name]()
                model, inputs = model.cuda(), {key: value.cuda() for key, value in inputs.items()}
                run = torch.compile(model) if compiled else model
                peak, *seconds = _steps(run, model, inputs)
                times += seconds
                peaks.append(f"{peak / MIB:9,.1f}")
                notes = machine.notes()
            counters = sys.modules["torch._dynamo.utils"].counters  # type: ignore[attr-defined]
            counted = f"{counters['stats']['unique_graphs']:6} {sum(counters['graph_break'].values()):6}"
            counters.clear()
        except Exception as error:
            notes = [f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"]
        took = f"{times[2]:6.1f} {times[3]:6.3f} {times[3] / times[1]:6.2f}" if len(times) == 4 else ""
        print(f"{name:<10} {' '.join(peaks)}      {counted}  {took}    {' '.join(notes)}", flush=True)
    gpu.turn_off()


def _run(name: str, file: Path, device: str | None, seconds: float) -> str:
    """A program in a process of its own; what it said, where it failed."""
    further = [] if device is None else ["--device", device]
    command = [sys.executable, str(HERE / "compiled_programs.py"), name, str(file), *further]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, text=True)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    return "" if done.returncode == 0 else done.stdout[-2000:]


def _save(folder: Path, only: list[str], at_once: int, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> None:
        failed = _run(name, folder / f"{name}.xz", None, seconds)
        print(f"{name:<26} {failed or 'done'}", flush=True)

    with ThreadPoolExecutor(at_once) as workers:
        list(workers.map(one, only or PROGRAMS))


def _against(folder: Path, only: list[str], device: str, seconds: float, explain: bool) -> None:
    print(HEADING)
    for path in sorted(folder.glob("*.xz")):
        name = path.stem
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch, path.name)
            failed = _run(name, here, device, seconds)
            if not here.exists():
                print(f"{name:<26} {failed}", flush=True)
                continue
            real, virtual = read(path), read(here)
        print(line(real, virtual), flush=True)
        for part in real.parts if explain else ():
            if part in virtual.parts:
                print(f"\n{name}, {part}:\n{explained(real.parts[part], virtual.parts[part])}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--device", metavar="CARD", help=f"(default: A100-80GB, with --against {RECORDED})")
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--against", type=Path, metavar="DIR")
    parser.add_argument("--explain", action="store_true", help="with --against: where they differ")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="with --save: how many programs")
    parser.add_argument("--seconds", type=float, default=300, help="for each of the programs (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.save:
        _save(chosen.save, chosen.only, chosen.at_once, chosen.seconds)
    elif chosen.against:
        _against(chosen.against, chosen.only, chosen.device or RECORDED, chosen.seconds, chosen.explain)
    else:
        _models(chosen.only, chosen.device or "A100-80GB")


if __name__ == "__main__":
    main()
