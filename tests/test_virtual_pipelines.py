"""PEFT's LoRA and diffusers' pipelines on the virtual GPU, small and built from configurations. Skipped without the libraries."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield gpu.turn_on("T4")
    gpu.turn_off()


# ---- PEFT


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.long, device="cuda")


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True, "lora_dropout": 0.1}])
def test_lora_trains_its_own_weights_only(options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
    model = peft.get_peft_model(llama(), config).cuda()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    states = torch.cuda.memory_allocated() - before
    asked = sum(2 * parameter.numel() * 4 for parameter in trained)
    assert asked <= states <= asked + 2 * 512 * len(trained)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    merged = model.merge_and_unload()
    assert merged(tokens()).logits.shape == (2, 16, 512)


def test_lora_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"])).cuda()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(llama().cuda(), tmp_path)
    assert all(parameter.is_cuda for parameter in again.parameters())
    assert again(tokens()).logits.is_cuda


# ---- diffusers


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


def pipeline() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000,
            bos_token_id=0, eos_token_id=2, pad_token_id=1,
        )
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=8, sample_size=32,
    )  # fmt: skip
    made = diffusers.StableDiffusionPipeline(
        unet=unet(), vae=vae, text_encoder=text, tokenizer=None, scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def draw(made: Any, size: int = 64, dtype: torch.dtype = torch.float32) -> Any:
    prompt = torch.zeros(1, 7, 32, dtype=dtype)
    return made(
        prompt_embeds=prompt, negative_prompt_embeds=prompt.clone(), num_inference_steps=2, output_type="np",
        height=size, width=size, generator=torch.Generator("cuda").manual_seed(0),
    ).images  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "dtype"),
    [("DDIMScheduler", torch.float32), ("EulerDiscreteScheduler", torch.float16),
     ("DPMSolverMultistepScheduler", torch.float16)],
)  # fmt: skip
def test_a_pipeline_draws_a_picture(scheduler: str, dtype: torch.dtype) -> None:
    made = pipeline().to("cuda", dtype)
    made.scheduler = getattr(pytest.importorskip("diffusers"), scheduler)()
    assert draw(made, dtype=dtype).shape == (1, 64, 64, 3)


def test_decoding_in_tiles_peaks_lower() -> None:
    peaks = []
    for tiled in (False, True):
        made = pipeline().to("cuda")
        if tiled:
            made.vae.enable_tiling()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            image = made.vae.decode(torch.zeros(1, 4, 64, 64, device="cuda")).sample
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert image.shape == (1, 3, 128, 128)
        del made, image
        gc.collect()
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("kind", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_gives_the_weights_back(kind: str) -> None:
    whole = pipeline().to("cuda")
    weights = torch.cuda.memory_allocated()
    del whole
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert before < weights / 10
    made = pipeline()
    getattr(made, kind)()
    assert draw(made).shape == (1, 64, 64, 3)
    assert torch.cuda.max_memory_allocated() > before
    made.maybe_free_model_hooks()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() < weights / 10


def test_a_training_step_with_activation_checkpointing() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = unet().cuda()
    model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters())
    noise = torch.randn(2, 4, 8, 8, device="cuda")
    steps = torch.randint(0, 1000, (2,), device="cuda")
    noisy = diffusers.DDPMScheduler().add_noise(torch.zeros_like(noise), noise, steps)
    predicted = model(noisy, steps, torch.zeros(2, 7, 32, device="cuda")).sample
    torch.nn.functional.mse_loss(predicted, noise).backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_safetensors_of_the_host_go_to_the_device(tmp_path: Path) -> None:
    kind = type(unet())
    unet().save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    half = kind.from_pretrained(tmp_path, torch_dtype=torch.float16).to("cuda")
    assert half.conv_in.weight.dtype == torch.float16
    placed = kind.from_pretrained(tmp_path, device_map="cuda")
    assert all(parameter.is_cuda for parameter in placed.parameters())
