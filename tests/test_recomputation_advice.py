"""Whose activations advice has recomputed: those of the layers below wrappers, by the model's own switch where there is one."""

from __future__ import annotations

import pytest
from causes_cells import notebook

from gpumem_magic.advice.advise import Advised

CARD = "virtual:4GiB,context=0MiB,idle=0MiB"

LAYERS = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        parts = (nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128, bias=False)) for _ in range(2))
        self.inner = nn.ModuleList(parts)

    def forward(self, x):
        for one in self.inner:
            x = x + one(x)
        return x


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


class Adapted(Around):
    # Passes nothing on, as some wrappers do; what it wraps is frozen but for a part in the middle.

    def __init__(self, model):
        super().__init__(model)
        model.requires_grad_(False)
        model.layers[2].requires_grad_(True)
"""
LOOP = """
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])
x = torch.randn(4096, 128, device="cuda")
for step in range(3):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""
SWITCH = """
class Switched(Stack):
    supports_gradient_checkpointing = True
    kwargs = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.kwargs = gradient_checkpointing_kwargs or {"use_reentrant": True}

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = layer(x) if self.kwargs is None else checkpoint(layer, x, **self.kwargs)
        return x
"""


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work a compiled step takes longer than advice waits for it."""
    monkeypatch.setattr("gpumem_magic.advice.advise._SECONDS", 3600)


def advised(code: str) -> Advised:
    with notebook(CARD) as book:
        said = book.cell("%%gpumem --advise -o advice\n" + code)
        assert "advice" in book.shell.user_ns, said
        found: Advised = book.shell.user_ns.pop("advice").found
        return found


def test_layers_below_wrappers_are_recomputed_and_not_the_wrappers() -> None:
    found = advised(LAYERS + "model = Around(Around(Stack())).cuda()" + LOOP)
    names = [one.name for one in found.outcomes if one.name.startswith("recomputing")]
    assert names[0] == "recomputing the activations of Layer (6 in model)"
    assert not any("Stack" in name or "Around" in name for name in names)
    layers = next(one for one in found.outcomes if one.name == names[0])
    # One layer's activations and what goes from layer to layer are left, of six layers'.
    assert layers.need.categories["activations"] < found.base.need.categories["activations"] / 2
    assert layers.need.flops > found.base.need.flops


def test_a_models_own_switch_is_reached_through_wrappers_also_where_weights_are_frozen() -> None:
    found = advised(LAYERS + SWITCH + "model = Around(Adapted(Switched())).cuda()" + LOOP)
    switched = next(one for one in found.outcomes if one.name == "gradient checkpointing of model")
    line = 'model.model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    assert line in switched.program.cell
    # Reentrant checkpoints of frozen layers would have left nothing to be trained, and backward would have failed.
    assert switched.run.fits
    assert switched.saves(found.base)
    assert switched.program.cell.count("model.train()") == 1
    trained = advised(LAYERS + SWITCH + "model = Around(Switched()).cuda()" + LOOP + "    model.train()\n")
    switched = next(one for one in trained.outcomes if one.name == "gradient checkpointing of model")
    assert "model.model.gradient_checkpointing_enable()" in switched.program.cell
    # (The program's own.)
    assert switched.program.cell.count("model.train()") == 1


LORA = """
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).cuda()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
ids = torch.zeros(8, 256, dtype=torch.long, device="cuda")
for step in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_layers_of_a_llama_with_lora_are_recomputed() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    found = advised(LORA)
    switched = next(one for one in found.outcomes if one.name == "gradient checkpointing of model")
    assert switched.need.categories["activations"] < found.base.need.categories["activations"] / 2
    compiled = next(one for one in found.outcomes if one.name == "model.compile()")
    assert [one.costs for one in compiled.proposals] == ["time to compile"]
