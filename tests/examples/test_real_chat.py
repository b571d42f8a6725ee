"""The larger real model: its file as a folder, and the chat with it, on models made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from examples.real_chat import brief
from local_gpu.model.gguf_file import converted
from local_gpu.model.small import tie
from tests.support.lives import ROOT

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


def made(at: Path) -> Qwen2ForCausalLM:
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
    file: Any = gguf.GGUFWriter(at, "qwen2")
    file.add_block_count(LAYERS)
    file.add_context_length(128)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(FFN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KEYS)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(1e6)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list([*(f"t{n}" for n in range(WORDS - 3)), "a", "b", "ab"])
    file.add_token_types([3, 3, 3, *[1] * (WORDS - 3)])
    file.add_token_merges(["a b"])
    file.add_eos_token_id(2)
    weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight}
    for name, weight in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        raw = weight.detach().numpy()
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q4_0
            file.add_tensor(name, gguf.quantize(raw, kind), raw_dtype=kind)
        else:
            file.add_tensor(name, raw)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def test_a_file_becomes_a_folder_with_the_same_logits_and_one_embedding(tmp_path: Path) -> None:
    model = made(tmp_path / "m.gguf")
    folder = converted(tmp_path / "m.gguf", tmp_path / "m", dtype="bfloat16", mend=tie)
    read: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    tokens = torch.arange(50)[None] * 5
    with torch.no_grad():
        assert torch.allclose(read(tokens).logits, model(tokens).logits, atol=1e-5)
    assert {one.name for one in tmp_path.iterdir()} == {"m", "m.gguf"}


def test_what_one_short_sentence_is() -> None:
    assert brief("It scatters blue light, e.g. at noon.") is False, "a full stop before a blank"
    assert brief("Air scatters blue light most, by 3.5 times.")
    assert not brief("It does. It is blue.")
    assert not brief("so " * 26)


@pytest.mark.slow
def test_every_part_of_the_chat_runs_with_the_demos_model(tmp_path: Path) -> None:
    """It speaks no sense and calls nothing, but is rated, and learns a step."""
    command = [sys.executable, "-m", "examples.real_chat", "--model=demo", "--context-tokens=1500"]
    done = subprocess.run(
        [*command, "--base-dtype=auto"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for part in ("eight questions with it", "turn 3", "a call is forced", "one step of 4 samples"):
        assert any(part in row for row in rows)
    assert "version 1" in done.stdout
    assert "Processor time" in done.stdout
