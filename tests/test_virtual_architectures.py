"""More of transformers' models on the virtual GPU, small: a training step each, and every way to generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 100}
SEEN = {**SMALL, "image_size": 32, "patch_size": 8}
HALVES = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 100, "pad_token_id": 98,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}  # fmt: skip


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    transformers.logging.set_verbosity_error()
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


def words(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.arange(3, 3 + rows * length).view(rows, length)


def text(**more: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": words(), "attention_mask": torch.ones(2, 12, dtype=torch.long), "labels": words(), **more}


def pixels(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.rand(2, 3, size, size), "labels": torch.tensor([0, 1])}


MODELS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "Mistral, sliding window": ("MistralForCausalLM", "MistralConfig",
                                {**TEXT, "num_key_value_heads": 2, "sliding_window": 8}, text),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "num_key_value_heads": 2, "head_dim": 8}, text),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, "num_key_value_heads": 2, "head_dim": 8}, text),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {**TEXT, "state_size": 4}, text),
    "DeBERTa": ("DebertaV2ForSequenceClassification", "DebertaV2Config",
                {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
                lambda: text(labels=torch.tensor([0, 1]))),
    "ELECTRA": ("ElectraForPreTraining", "ElectraConfig", {**TEXT, "embedding_size": 16},
                lambda: text(labels=torch.zeros(2, 12, dtype=torch.long))),
    "BART": ("BartForConditionalGeneration", "BartConfig", HALVES, text),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                {**HALVES, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 40},
                lambda: {"input_features": torch.rand(2, 8, 100), "labels": words()}),
    "wav2vec 2": ("Wav2Vec2ForCTC", "Wav2Vec2Config",
                  {**SMALL, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
                   "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
                   "mask_time_length": 2},
                  lambda: {"input_values": torch.rand(2, 1600), "labels": torch.full((2, 6), 3)}),
    "Swin": ("SwinForImageClassification", "SwinConfig",
             {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
             pixels),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, lambda: pixels(64)),
    "SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2],
                   "decoder_hidden_size": 16},
                  lambda: {**pixels(64), "labels": torch.zeros(2, 64, 64, dtype=torch.long)}),
    "CLIP": ("CLIPModel", "CLIPConfig",
             {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": SEEN, "projection_dim": 16},
             lambda: {"input_ids": words(), "pixel_values": torch.rand(2, 3, 32, 32), "return_loss": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_training(name: str) -> None:
    kind, config, options, batch = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).train()
    parts = {id(part): part for part in [*model.parameters(), *model.buffers()]}
    expected = sum(-(-part.nbytes // 512) * 512 for part in parts.values())
    model.cuda()
    gc.collect()
    assert torch.cuda.memory_allocated() == expected, "every weight once, in blocks of 512 bytes"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    arguments = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch().items()}
    model(**arguments).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert len(trained) > len(list(model.parameters())) / 2
    assert all(parameter.grad.is_cuda and parameter.grad.shape == parameter.shape for parameter in trained)  # type: ignore[union-attr]
    assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == sum(p.numel() for p in trained)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"use_cache": False},
        {"do_sample": True, "top_k": 5, "top_p": 0.9, "num_return_sequences": 2},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_every_way_to_generate_goes_on_to_its_length(options: dict[str, Any]) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)).cuda().eval()
    lengths: list[int] = []
    model.register_forward_hook(lambda module, args, out: lengths.append(out.logits.shape[1]))
    prompt = words(1 if "prompt_lookup_num_tokens" in options else 2).cuda()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, pad_token_id=98, eos_token_id=99, **options
    )
    assert out.is_cuda
    assert len(out) == len(prompt) * options.get("num_return_sequences", 1)
    if "num_beams" not in options:
        # Which of the beams are cut where depends on values.
        assert out.shape[1] == 16
    if "prompt_lookup_num_tokens" not in options:
        assert len(lengths) == 4, "a step for each new token"


def test_a_streamer_a_stopping_rule_and_a_rule_for_scores() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).cuda().eval()
    seen: list[Any] = []

    class Streamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            seen.append(value.tolist())

        def end(self) -> None:
            seen.append("end")

    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 5] = -float("inf")
        return scores

    def enough(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 15, device=ids.device, dtype=torch.bool)

    out = model.generate(
        words(1).cuda(), max_new_tokens=20, streamer=Streamer(), logits_processor=[forbid], stopping_criteria=[enough],
        pad_token_id=98, eos_token_id=99,
    )  # fmt: skip
    assert out.shape == (1, 15)
    assert (len(seen), seen[-1]) == (5, "end")


def test_speech_is_written_down() -> None:
    config = transformers.WhisperConfig(
        **HALVES, num_mel_bins=8, max_source_positions=50, max_target_positions=40, begin_suppress_tokens=None
    )
    model = transformers.WhisperForConditionalGeneration(config).cuda().eval()
    out = model.generate(torch.rand(2, 8, 100).cuda(), max_new_tokens=5)
    assert out.is_cuda
    assert out.shape[0] == 2
