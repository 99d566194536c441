"""Our categories beside those of PyTorch's own tools: MemTracker on fakes, and the profiler's on a step that runs on the host.

    python benchmarks/agreement.py [--profiler]

Small models of transformers, eager attention and the same optimizer (AdamW or SGD, foreach) on both sides; bytes at the peak of a
second step. What is done so that both count the same thing, and nothing else:

* MemTracker's fakes are on the host, where dropout's masks have the type of the values (CUDA's: one byte); dropout is 0.
* MemTracker's hooks hold a module's output gradient a while longer. The same hooks, without MemTracker, are on our side.
* MemTracker calls all that is born in an optimizer's step its state; here that is what lasts, and the rest is work.
* A gradient counts as work until it is the parameter's with them, and for its whole life with us: so gradients and work may
  differ by the last gradient, and their sum does not.
* Adam's counters (4 bytes for each parameter) are on the host, and count where the host's memory is counted.
* The profiler calls buffers inputs, and counts the host kernels' own scratch memory (without a tensor), which is left out.

Work is what is left: activations, their gradients and temporaries.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils

from gpumem_magic import measure
from gpumem_magic.devices import machines
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import engine
from gpumem_magic.virtual.operators import gradients_that_meet, reductions

KINDS = ("parameters", "inputs and buffers", "gradients", "optimizer state", "work")
Bytes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and its optimizer. `build` and `inputs` make tensors on the default device."""

    name: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    sgd: bool = False


def _text(batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _classified(batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.zeros(batch, length, dtype=torch.int64),
            "labels": torch.zeros(batch, dtype=torch.int64),
        }

    return make


def _images(batch: int, size: int) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.int64)}

    return make


def _bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=1000,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, vocab_size=1000, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=352,
        vocab_size=1000, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _vit() -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=96, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _resnet() -> torch.nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


def _bottlenecks(depths: list[int]) -> Callable[[], torch.nn.Module]:
    return lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=depths))


CASES = (
    Case("BERT", _bert, _classified(16, 256)),
    Case("GPT-2", _gpt2, _text(16, 128)),
    Case("Llama", _llama, _text(16, 128)),
    Case("ViT", _vit, _images(16, 96)),
    Case("ResNet", _resnet, _images(16, 96), sgd=True),
)
# The profiler's pages are made of every Python call, which takes a while.
PROFILED = (CASES[1], Case("ResNet-50", _bottlenecks([3, 4, 6, 3]), _images(8, 96), sgd=True))


def _optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    if case.sgd:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    return torch.optim.AdamW(model.parameters(), foreach=True)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> None:
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def ours(case: Case, hooks: bool = False) -> Bytes:
    """Bytes asked for by tensors at the peak of a second step on the virtual GPU, by kind. Turns the device on and off.

    hooks: with the hooks that MemTracker puts on modules, which keep gradients.
    """
    # The other tools know nothing of what libraries take beside tensors.
    gpu.turn_on("virtual:40GiB,cudnn=none")
    try:
        with torch.device("cuda"):
            model, inputs = case.build().train(), case.inputs()
        optimizer = _optimizer(case, model)
        _step(model, optimizer, inputs)
        with _as_counted_on_fakes(hooks), _hooks() if hooks else nullcontext(), measure() as measured:
            _step(model, optimizer, inputs)
        found = {name: size or 0 for name, size in measured.report.peak.categories.items()}
        del model, inputs, optimizer
    finally:
        gpu.turn_off()
    work = ("activations", "activation_gradients", "temporaries", "unknown")
    return {
        "parameters": found["parameters"],
        "gradients": found["gradients"],
        "optimizer state": found["optimizer_state"],
        "inputs and buffers": found["inputs"] + found["buffers"],
        "work": sum(found[name] for name in work),
    }


def _forget_operators() -> None:
    """An engine asks each operator's rules once, and remembers what calls that look the same took."""
    machine = machines.in_use()
    if machine is not None:
        machine.engine._met.clear()  # type: ignore[attr-defined]
        machine.engine.alike.forget()  # type: ignore[attr-defined]


@contextmanager
def _as_counted_on_fakes(apart: bool) -> Iterator[None]:
    """Without what other tools do not see: what reductions share, what CUDA's gradient of softmax multiplies before it adds, and,
    if `apart`, gradients that are added in place."""
    meet = engine.Engine._meet

    def without(self: Any, function: Any) -> Any:
        met = meet(self, function)
        if function in reductions.KERNELS or function is torch.ops.aten._softmax_backward_data.default:
            met = self._met[id(function)] = met._replace(beside=None)
        return met

    _forget_operators()
    engine.Engine._meet = without  # type: ignore[method-assign]
    is_free = gradients_that_meet.is_free
    if apart:
        gradients_that_meet.is_free = lambda args: False
    try:
        yield
    finally:
        engine.Engine._meet = meet  # type: ignore[method-assign]
        _forget_operators()
        gradients_that_meet.is_free = is_free


@contextmanager
def _hooks() -> Iterator[None]:
    """The hooks of MemTracker (torch 2.9 to 2.13), which do nothing here but be there."""
    from torch.distributed._tools.mod_tracker import ModTracker

    def nothing(*args: Any) -> None:
        pass

    tracker = ModTracker()
    tracker.register_user_hooks(nothing, nothing, nothing, nothing)
    with tracker:
        yield


@contextmanager
def foreach_for(kind: type) -> Iterator[None]:
    """Inside, optimizers take their foreach path for this class of parameters, which PyTorch keeps for its own classes."""
    places: list[Any] = [optim, _foreach_utils]
    before = [place._foreach_supported_types for place in places]
    for place, kinds in zip(places, before, strict=True):
        place._foreach_supported_types = [*kinds, kind]
    try:
        yield
    finally:
        for place, kinds in zip(places, before, strict=True):
            place._foreach_supported_types = kinds


def _made_fake(mode: FakeTensorMode, model: torch.nn.Module) -> torch.nn.Module:
    """The model with fakes for its parameters and buffers; tied ones stay tied. Initialising fakes would read values."""
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    known = fakes.setdefault(id(tensor), mode.from_tensor(tensor, static_shapes=True))
                    table[name] = known  # type: ignore[assignment]
    return model


def memtracker(case: Case) -> Bytes:
    """The same by MemTracker (torch 2.9 to 2.13), on fakes of the host."""
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _made_fake(mode, case.build().train())
    with mode:
        inputs = case.inputs()
    with foreach_for(type(next(model.parameters()))):
        optimizer = _optimizer(case, model)
        with mode:
            _step(model, optimizer, inputs)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *inputs.values())
        with mode, tracker:
            _step(model, optimizer, inputs)
            after = _of_the_host(tracker.get_tracker_snapshot("current"))
        peak = _of_the_host(tracker.get_tracker_snapshot("peak"))
    lasting = min(after["Optstate"], peak["Optstate"])
    return {
        "parameters": peak["Parameter"],
        "gradients": peak["Gradient"],
        "optimizer state": lasting,
        "inputs and buffers": peak["Other"] + peak["Buffer"],
        "work": peak["Activation"] + peak["Temp"] + peak["Optstate"] - lasting,
    }


def _of_the_host(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    (figures,) = (figures for device, figures in snapshot.items() if device.type == "cpu")
    return {str(getattr(kind, "value", kind)): size for kind, size in figures.items()}


def profiled(case: Case) -> Bytes:
    """The same by the categories of `torch.profiler` (torch 2.9 to 2.13), on a step that really runs on the host.

    With one thread oneDNN's convolutions lay their tensors out in another way than with several.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return _profiled(case)
    finally:
        torch.set_num_threads(threads)


def _profiled(case: Case) -> Bytes:
    from torch.profiler._memory_profiler import Action, Category, TensorKey

    torch.manual_seed(0)
    model, inputs = case.build().train(), case.inputs()
    optimizer = _optimizer(case, model)
    _step(model, optimizer, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
        ) as profile:
            _step(model, optimizer, inputs)
        memory = profile._memory_profile()
    figures: Counter[Any] = Counter()
    peak: Counter[Any] = Counter()
    for _, action, (key, version), size in memory.timeline:
        if not isinstance(key, TensorKey) or key.device.type != "cpu":
            # What a host kernel takes for itself (oneDNN's scratch memory): CUDA's kernels have other ones.
            continue
        category = memory._categories.get(key, version)
        if action is Action.INCREMENT_VERSION:
            figures[category] -= size
            figures[memory._categories.get(key, version + 1)] += size
        else:
            figures[category] += -size if action is Action.DESTROY else size
        if figures.total() > peak.total():
            peak = figures.copy()
    work = (None, Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.TEMPORARY)
    return {
        "parameters": peak[Category.PARAMETER],
        "gradients": peak[Category.GRADIENT],
        "optimizer state": peak[Category.OPTIMIZER_STATE],
        "inputs and buffers": peak[Category.INPUT],
        "work": sum(peak[kind] for kind in work),
    }


def worst(mine: Bytes, theirs: Bytes) -> float:
    """The largest difference as a share of the peak; gradients and work are one here, since the border is drawn otherwise."""
    total = sum(mine.values())
    apart = [abs(mine[kind] - theirs[kind]) for kind in KINDS if kind not in ("gradients", "work")]
    together = abs(sum(mine[kind] - theirs[kind] for kind in ("gradients", "work")))
    return max(*apart, together) / total


def show(case: Case, other: str, mine: Bytes, theirs: Bytes) -> None:
    print(f"\n{case.name}{'':{12 - len(case.name)}}{'ours':>14}{other:>14}{'difference':>13}   of that kind")
    for kind in (*KINDS, "all"):
        a, b = (sum(side.values()) if kind == "all" else side[kind] for side in (mine, theirs))
        share = f"{100 * (a - b) / b:+.2f} %" if b else ""
        print(f"{kind:>18}{a / MIB:8.3f} MiB{b / MIB:10.3f} MiB{a - b:>11,} B   {share:>10}")
    print(f"  worst difference, as a share of the peak: {100 * worst(mine, theirs):.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiler", action="store_true", help="run GPT-2 and ResNet-50 under torch.profiler as well")
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for case in CASES:
        show(case, "MemTracker", ours(case, hooks=True), memtracker(case))
    for case in PROFILED if options.profiler else ():
        show(case, "profiler", ours(case), profiled(case))


if __name__ == "__main__":
    main()
