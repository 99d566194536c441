"""How long the search for owners takes, and how much of the memory it explains, after a training step of a BERT.

    python benchmarks/owners.py [--layers 24] [--objects 100000]

Prints the median of several searches: with the model alone, and with as many objects of the user's around (dictionaries, lists,
tuples and instances, as data pipelines leave them).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

from gpumem_magic.owners.search import find_owners
from gpumem_magic.virtual import gpu

MIB = 1 << 20


class Record:
    """What a user's data set is made of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [str(number), "train"]


def user_objects(count: int) -> dict[str, object]:
    """About `count` objects that Python's collector knows: a third of them instances, their lists, and nested dictionaries."""
    records = [Record(number) for number in range(count // 3)]
    table = {number: {"row": [number, []]} for number in range(count // 9)}
    return {"records": records, "table": table}


def trained(layers: int) -> dict[str, object]:
    """A bert-large (or a part of it) after two steps of AdamW, with its last graph still there."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=layers, num_labels=2
    )
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    model = model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.zeros(8, 128, dtype=torch.int64, device="cuda")
    labels = torch.zeros(8, dtype=torch.int64, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
    outputs = model(input_ids=tokens, labels=labels)
    return {
        "model": model,
        "optimizer": optimizer,
        "tokens": tokens,
        "labels": labels,
        "loss": loss,
        "outputs": outputs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    machine = gpu.turn_on("A100-40GB")
    namespace = trained(options.layers)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.layers} layers")
    for words, more in (
        ("the model alone", {}),
        (f"and {options.objects:,} objects", user_objects(options.objects)),
    ):
        found, busy = [], []
        for _ in range(options.repeats):
            began = time.process_time()
            found.append(find_owners(machine, {**namespace, **more}))
            busy.append(time.process_time() - began)
        seconds = sorted(one.seconds for one in found)
        last = found[-1]
        print(
            f"{words:>24}: {statistics.median(seconds):.3f} s (median of {len(seconds)}, {seconds[0]:.3f} to "
            f"{seconds[-1]:.3f}; of the processor {statistics.median(busy):.3f}), "
            f"{last.objects:,} objects met, {len(last.held):,} allocations, "
            f"{100 * last.found / last.allocated:.2f} % of {last.allocated / MIB:,.0f} MiB have an owner"
        )
    gpu.turn_off()


if __name__ == "__main__":
    main()
