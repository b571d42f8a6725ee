"""Tiny random models of many families, made on the spot; one has eyes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from renderers.base import load_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from local_gpu.model.small import FOLDER
from tests.support.backends import VOCABULARY
from tests.support.pictures import VISION, seeing_tokenizer
from tinker_claw.shipped import MODEL_DIR

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_LOUDER = 4
"""Factor on fresh weights, so that attention decides the output."""


@dataclass(frozen=True)
class Family:
    kind: str
    """transformers' model_type."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    why_not: str | None = None
    """Why its sequences cannot share rows; None: they can."""


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
_LONG = {
    "sliding_window": None,
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
    },
}
_LINEAR_LAYERS = "has linear_attention layers"
_ANOTHER_WAY = "computes something else over a prefix tree"

FAMILIES: Mapping[str, Family] = {
    "Qwen3": Family("qwen3"),
    "Qwen3, tied": Family("qwen3", {"tie_word_embeddings": True}),
    "Qwen2.5": Family("qwen2"),
    "Llama": Family("llama"),
    "Mistral": Family("mistral", {"sliding_window": None}),
    "Mistral, window": Family("mistral", {"sliding_window": 8}, "the last 8 tokens only"),
    "Qwen3-MoE": Family("qwen3_moe", _EXPERTS),
    "Mixtral": Family("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "DeepSeek-V3": Family("deepseek_v3", _LATENT),
    "Qwen3-Next": Family(
        "qwen3_next", {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}, _LINEAR_LAYERS
    ),
    "Qwen3.5, text": Family("qwen3_5_text", _LINEAR, _LINEAR_LAYERS),
    "Qwen3.5, eyes": Family("qwen3_5", _LINEAR, _LINEAR_LAYERS),
    "Qwen3.5-MoE, eyes": Family(
        "qwen3_5_moe",
        {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16},
        _LINEAR_LAYERS,
    ),
    "Gemma 3": Family(
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "has sliding_attention layers",
    ),
    "Phi 3, long": Family("phi3", _LONG, "by the length of the longest sequence (longrope)"),
    # Nothing in these configurations tells; what the models compute does.
    "gpt-oss, no window": Family(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 256,
            "layer_types": ["full_attention"] * 2,
        },
        _ANOTHER_WAY,
    ),
    "StableLM": Family("stablelm", {}, _ANOTHER_WAY),
}
_FROM_128 = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 32}
_TURNED = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
}
EYES_ON_VLLM = Family("qwen3_5", {**_LINEAR, **_FROM_128, "rope_parameters": _TURNED})
"""A family with heads as wide as vLLM's CPU kernels want them."""
REFUSED: Mapping[str, tuple[Family, str]] = {
    "Gemma 2": (Family("gemma2"), "transforms its logits after the head"),
    "Cohere": (Family("cohere"), "transforms its logits after the head"),
    "Llama 4": (Family("llama4_text"), "no hidden states apart from its logits"),
    "Mamba": (Family("mamba"), "peft puts no adapter on"),
}


def tiny_of(family: Family, folder: Path, *, files_of: str = "1GB") -> Path:
    """Write the model to `folder`, in safetensors of at most that size."""
    make, text = CONFIG_MAPPING[family.kind], {**_SHAPE, **family.settings}
    if "vision_config" in make.sub_configs:
        config = make(text_config=text, vision_config={**_EYES, "out_hidden_size": 32})
        kind: Any = AutoModelForImageTextToText
    else:
        config, kind = make(**text), AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(_LOUDER)
                else:  # biases and sinks begin at 0, norms at 1 or 0
                    weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder, max_shard_size=files_of)
    return folder


def tiny_small(cache: Path) -> Path:
    """Write a tiny model with the demo's words where a cache of `--model-name small` has it."""
    words, context = {"vocab_size": 4096}, {"max_position_embeddings": 4096}
    folder = tiny_of(Family("qwen2", words | context), cache / "tinker-claw" / FOLDER)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (MODEL_DIR / name).exists():
            shutil.copy(MODEL_DIR / name, folder / name)
    return folder


def tiny_qwen3_vl(folder: Path, *, head_dim: int = 8) -> Path:
    """Write the model, its tokenizer and its image processor to a folder.

    Args:
        head_dim: width of an attention head of the text half.
    """
    turns = head_dim // 2
    tokenizer = load_tokenizer(str(seeing_tokenizer(folder)))
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [turns - 2 * (turns // 4), turns // 4, turns // 4],
            "mrope_interleaved": True,
        },
        "eos_token_id": None,
    }
    eyes = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=eyes,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
        for weight in model.model.visual.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # what is seen decides the output
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.mul_(10)
            layer.mlp.down_proj.weight.mul_(20)
    model.save_pretrained(folder)
    return folder
