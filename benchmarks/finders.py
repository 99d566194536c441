"""The largest batch that fits, as three tools find it on the same virtual card: `what_fits`, Accelerate's
`find_executable_batch_size` and Lightning's batch-size finder.

    python benchmarks/finders.py [--device T4]

Each is given the same training (a virtual card computes nothing) and batches from 1 to 4096; counted are the trainings that it
ran, to their end or to the error. Accelerate begins with the largest batch, as one does who knows nothing. Lightning runs where
it is installed. Exit status 1 where an answer is larger than that of `what_fits`, or was found in fewer runs and is as large.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

import gpumem_magic
from gpumem_magic.session import device as choosing
from gpumem_magic.trials.process import in_a_fork

MOST = 4096
STEPS = 5


class Training:
    """One small transformer, trained for some steps; how often it was."""

    def __init__(self) -> None:
        self.runs = 0

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 256, 512, device="cuda")

    def run(self, batch_size: int) -> None:
        self.runs += 1
        model = self.model().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(self.batch(batch_size)).square().mean().backward()
            optimizer.step()


def by_what_fits(training: Training, device: str) -> int:
    fits = gpumem_magic.what_fits(lambda batch: training.run(batch), batch=range(1, MOST + 1), device=device)
    training.runs = len(fits.trials)
    largest: int = fits.largest
    return largest


def by_accelerate(training: Training, device: str) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=MOST)  # type: ignore[untyped-decorator]
    def found(batch_size: int) -> int:
        training.run(batch_size)
        return batch_size

    answer: int = found()
    return answer


def by_lightning(mode: str) -> Callable[[Training, str], int]:
    def found(training: Training, device: str) -> int:
        import lightning.pytorch as pl
        from lightning.pytorch.tuner import Tuner

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = training.model()
                self.batch_size = 2

            def training_step(self, rows: torch.Tensor, place: int) -> torch.Tensor:
                loss: torch.Tensor = self.model(rows).square().mean()
                return loss

            def on_train_start(self) -> None:
                training.runs += 1

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

            def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
                rows = torch.randn(1, 256, 512).expand(MOST * STEPS, 256, 512)
                return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

        trainer = pl.Trainer(
            accelerator="gpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        tuner = Tuner(trainer)
        answer = tuner.scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, max_trials=25)
        return int(answer or 0)

    return found


def asked(way: Callable[[Training, str], int], device: str) -> tuple[int, int]:
    """The answer, on an empty card, and in how many trainings."""
    choosing.choose(device)
    training = Training()
    return way(training, device), training.runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="T4")
    options = parser.parse_args()
    ways: dict[str, Callable[[Training, str], int]] = {"what_fits": by_what_fits}
    if find_spec("accelerate") is not None:
        ways["accelerate: find_executable_batch_size"] = by_accelerate
    if find_spec("lightning") is not None:
        ways["lightning: scale_batch_size, power"] = by_lightning("power")
        ways["lightning: scale_batch_size, binsearch"] = by_lightning("binsearch")
    warnings.simplefilter("ignore")
    answers: dict[str, tuple[int, int]] = {}
    print(f"{'':42} {'batch':>6} {'runs':>5}   on a virtual {options.device}")
    for name, way in ways.items():
        answers[name] = in_a_fork(partial(asked, way, options.device))
        print(f"{name:42} {answers[name][0]:6} {answers[name][1]:5}", flush=True)
    ours, runs = answers.pop("what_fits")
    return int(any(batch > ours or (batch == ours and fewer < runs) for batch, fewer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
