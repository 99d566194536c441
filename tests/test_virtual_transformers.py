"""transformers and accelerate on the virtual GPU, unmodified: training steps, generation, the Trainer, device maps."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    forget_accelerators_state()
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()
    forget_accelerators_state()


def forget_accelerators_state() -> None:
    """accelerate remembers for the whole process which device and precision it began with."""
    if importlib.util.find_spec("accelerate") is not None:
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def tokens() -> torch.Tensor:
    return torch.arange(3, 27).view(2, 12)


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    options = {**SMALL, "image_size": 32, "patch_size": 8}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**options))


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "batch"),
    [(gpt2, text), (llama, text), (t5, text), (bert, text), (mixtral, text), (vit, images), (resnet, images)],
)
def test_a_training_step_costs_weights_gradients_and_two_moments(make: Any, batch: Any) -> None:
    model = make().to("cuda").train()
    weights = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
    others = sum(-(-buffer.nbytes // 512) * 512 for buffer in model.buffers())
    assert weights <= torch.cuda.memory_allocated() <= weights + others
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(**{name: value.to("cuda") for name, value in batch().items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = sum(
        -(-value.nbytes // 512) * 512
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    assert all(value.is_cuda for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert moments == 2 * sum(-(-parameter.nbytes // 512) * 512 for parameter in optimizer.state)
    assert torch.cuda.memory_allocated() >= weights + moments


@pytest.mark.parametrize("make", [gpt2, llama, t5])
@pytest.mark.parametrize("sampled", [False, True])
def test_generation_with_a_cache_ends_at_its_length(make: Any, sampled: bool) -> None:
    model = make().to("cuda").eval()
    ids = tokens().to("cuda")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=sampled, pad_token_id=0)
    assert out.is_cuda
    assert out.shape == ((2, 6) if make is t5 else (2, 17))


def test_the_cache_grows_by_two_tensors_a_layer_and_token() -> None:
    model = llama().to("cuda").eval()
    with torch.no_grad():
        out = model(tokens().to("cuda"), use_cache=True)
    keys = out.past_key_values.layers[0].keys
    assert keys.shape == (2, 2, 12, 8)
    assert keys.is_cuda


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_gradient_checkpointing(dtype: torch.dtype) -> None:
    model = llama().to("cuda", dtype).train()
    model.gradient_checkpointing_enable()
    ids = tokens().to("cuda")
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {dtype}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fp16": True},
        {"bf16": True, "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "optim": "adafactor"},
    ],
)
def test_the_trainer_trains(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model=gpt2(), args=arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().global_step == 2
    assert trainer.model.device == torch.device("cuda:0")
    assert "eval_loss" in trainer.evaluate()


def test_the_trainers_checkpoints_are_new_files_of_zeros(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=2, report_to=[], save_steps=1, disable_tqdm=True
    )
    with pytest.warns(UserWarning, match="contains zeros in place of the values"):
        transformers.Trainer(model=gpt2(), args=arguments, train_dataset=data).train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}


def test_saved_on_the_host_and_loaded_by_a_device_map(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = gpt2()
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = gpt2()
    assert empty.transformer.wte.weight.is_meta
    for device_map in ("cuda", "auto", {"": 0}, {"transformer": 0, "lm_head": "cpu"}):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, device_map=device_map)
        assert loaded.transformer.h[0].attn.c_attn.weight.is_cuda
        assert loaded(tokens().to("cuda")).logits.shape == (2, 12, 100)
        del loaded
    half = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, device_map="cuda", dtype=torch.float16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}


def test_accelerate_prepares_a_loop_and_offloads_a_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16")
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in tokens()], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert model.device.type == "cuda"
    before = torch.cuda.memory_allocated()
    offloaded = accelerate.cpu_offload(gpt2(), execution_device="cuda:0")
    with torch.no_grad():
        offloaded(tokens().to("cuda"))
    assert torch.cuda.memory_allocated() - before <= 4096, "the weights went back to the host"
