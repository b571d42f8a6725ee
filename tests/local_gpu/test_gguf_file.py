"""A GGUF file read into a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from local_gpu.model.gguf_file import converted
from local_gpu.model.small import tie

gguf = pytest.importorskip("gguf")
LAYERS, HIDDEN, HEADS, KEYS, FFN, WORDS = 2, 64, 4, 2, 128, 259
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
"""transformers' names of weights, and GGUF's."""


def write_gguf(file: Path) -> Qwen2ForCausalLM:
    """Write a random Qwen2 as a GGUF file whose embedding, apart from its head, has lost bits;
    return it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).float().eval()
    writer: Any = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(f"t{n}" for n in range(WORDS - 3)), "a", "b", "ab"])
    writer.add_token_types([3, 3, 3, *[1] * (WORDS - 3)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight}
    for name, weight in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        raw = weight.detach().numpy()
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quantize(raw, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_file_becomes_a_folder_with_the_same_logits_and_one_embedding(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    folder = converted(tmp_path / "m.gguf", tmp_path / "m", dtype="bfloat16", mend=tie)
    read: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    tokens = torch.arange(50)[None] * 5
    with torch.no_grad():
        assert torch.allclose(read(tokens).logits, model(tokens).logits, atol=1e-5)
    assert {one.name for one in tmp_path.iterdir()} == {"m", "m.gguf"}
