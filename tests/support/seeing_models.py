"""A tiny Qwen3-VL with random weights, over the shipped tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from renderers.base import load_tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.support.pictures import VISION, seeing_tokenizer


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
