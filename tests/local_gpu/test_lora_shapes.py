"""LoRA shapes, with and without the head: gradients, files, and how peft reads them.

The reference is peft's own model with the written adapter, in float64, through full logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.integrations import init_empty_weights
from transformers import AutoModelForCausalLM

from local_gpu.learn import head
from local_gpu.learn.losses import records_of
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.export import export_merged
from local_gpu.model.files import read_adapter, read_state, write_adapter, write_state
from local_gpu.model.load import open_base
from local_gpu.model.lora import (
    BaseModel,
    LoraShape,
    for_sampling,
    fresh_adapter,
    lora_targets,
    with_lora,
)
from local_gpu.tree.body import Body
from local_gpu.tree.kernels import SdpaKernel
from tests.support.backends import VOCABULARY, tiny_model
from tests.support.local_reference import (
    entropy_datum,
    full_logprobs,
    reference,
    reference_loss,
    rl_datum,
)
from tests.support.models import FAMILIES, tiny_of
from tinker_claw.errors import BackendError
from tinker_claw.types import Adam, LossPass

pytestmark = [
    # peft 0.21 reads a property that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # A warning of peft about a tied head when it opens the reference.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

ALL = LoraShape(4, 8, head=True)
SHAPES = {"with the head": ALL, "without": LoraShape(4, 8)}
TIED = {"untied": False, "tied": True}
ROUNDING = 5e-6
"""Relative rounding error of float32."""
PASSES = [
    LossPass("ppo", (rl_datum(40, 25, 2), rl_datum(30, 1, 3))),
    LossPass("cross_entropy", (entropy_datum(40, 25, 2),)),
]


def opened(model: Path) -> BaseModel:
    return open_base(str(model), device="cpu", dtype="float32", threads=1)


def warm(base: BaseModel, shape: LoraShape) -> dict[str, torch.Tensor]:
    """An adapter with values in both halves, so that both have gradients."""
    draw = torch.Generator().manual_seed(5)
    fresh = fresh_adapter(base, shape, seed=0)
    return {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in fresh.items()}


def optimizer(base: BaseModel, shape: LoraShape) -> LoraOptimizer:
    return LoraOptimizer(
        base,
        shape,
        warm(base, shape),
        passes=Passes(Body(SdpaKernel(), base.device), PassBudget(None)),
        context_tokens=base.context_tokens,
        checkpointing=False,
    )


def gradient(learner: LoraOptimizer) -> dict[str, torch.Tensor]:
    for one in records_of(PASSES, vocabulary=VOCABULARY, context_tokens=10_000):
        learner.forward_backward(one)
    masters: Any = learner._masters
    return {name: masters._part(masters.gradient, name).double() for name in masters._copies}


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_autograds_through_full_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, tied: str
) -> None:
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 7 * VOCABULARY)  # several chunks a record
    model = tiny_model(tmp_path / "model", tie_word_embeddings=TIED[tied])
    base, wanted = opened(model), SHAPES[shape]
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", base, wanted, warm(base, wanted))
    exact = reference(model, tmp_path / "adapter", torch.float64)
    for one in PASSES:
        for datum in one.datums:
            rows = full_logprobs(exact, datum.tokens)[datum.start - 1 :]
            reference_loss(one.loss, rows, datum).backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default.", "."): p.grad
        for name, p in exact.named_parameters()
        if p.grad is not None
    }
    got = gradient(optimizer(base, wanted))
    assert got.keys() == expected.keys()
    assert ("lm_head.lora_B.weight" in got) == wanted.head
    for name, tensor in expected.items():
        assert tensor.norm() > 0
        assert (got[name] - tensor).norm() / tensor.norm() < ROUNDING, name


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("shape", SHAPES)
def test_peft_and_the_merged_model_give_our_logits(tmp_path: Path, shape: str, tied: str) -> None:
    model = tiny_model(tmp_path / "model", tie_word_embeddings=TIED[tied])
    base, wanted, folder = opened(model), SHAPES[shape], tmp_path / "adapter"
    folder.mkdir()
    write_adapter(folder, base, wanted, warm(base, wanted))
    saved = read_adapter(folder, base)
    assert saved.shape == wanted
    export_merged(str(model), folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(30)[None] * 7 % VOCABULARY
    with torch.no_grad():
        ours = with_lora(base, saved.shape, saved.tensors)(tokens, use_cache=False).logits
        plain = base.module(tokens, use_cache=False).logits
        torch.testing.assert_close(reference(model, folder)(tokens).logits, ours, rtol=0, atol=2e-4)
        torch.testing.assert_close(merged(tokens).logits, ours, rtol=0, atol=2e-4)
    assert (ours - plain).abs().max() > 0.1


def test_a_state_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    base = opened(tiny_model(tmp_path / "model"))
    one, two = optimizer(base, ALL), optimizer(base, ALL)
    adam = Adam(learning_rate=0.01)
    one.step(PASSES, adam)
    write_state(tmp_path / "states" / "a", base, ALL, one.state())
    two.load(read_state(tmp_path / "states" / "a", base, ALL))
    for learner in (one, two):
        learner.step(PASSES, adam)
    first, second = one.adapter(), two.adapter()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(BackendError, match="has LoRA on the head, unlike"):
        read_state(tmp_path / "states" / "a", base, replace(ALL, head=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_lora_on_all_layers_and_on_the_head_where_asked(
    tmp_path: Path, family: str
) -> None:
    base = opened(tiny_of(FAMILIES[family], tmp_path / "model"))
    for shape in SHAPES.values():
        paths = {name.partition(".lora_")[0] for name in fresh_adapter(base, shape, seed=0)}
        assert any(path.endswith("lm_head") for path in paths) == shape.head
        assert any("attn" in path for path in paths)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_samples_computes_what_learns(tmp_path: Path, family: str) -> None:
    base = opened(tiny_of(FAMILIES[family], tmp_path / "model"))
    shape = LoraShape(4, 8, head=True)
    ids = torch.arange(1, 12)[None] % base.vocabulary
    learns = with_lora(base, shape, warm(base, shape))
    samples = for_sampling(with_lora(base, shape, warm(base, shape)))
    with torch.no_grad():
        wanted = learns(input_ids=ids, use_cache=False).logits
        found = samples(input_ids=ids, use_cache=False).logits
        plain = base.module(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, wanted, rtol=ROUNDING, atol=ROUNDING)
    assert not torch.allclose(found, plain, rtol=1e-3, atol=1e-3), "the adapter does something"
    assert not any(hasattr(layer, "lora_A") for layer in samples.modules())


def test_what_samples_keeps_its_values_while_peft_builds_elsewhere(tmp_path: Path) -> None:
    """peft changes for the whole process how parameters are assigned to modules, a while at a
    time."""
    base = opened(tiny_of(FAMILIES["Qwen3"], tmp_path / "model"))
    shape = LoraShape(4, 8)
    ids = torch.arange(1, 12)[None] % base.vocabulary
    learns = with_lora(base, shape, warm(base, shape))
    samples = with_lora(base, shape, warm(base, shape))
    with init_empty_weights():
        samples = for_sampling(samples)
    with torch.no_grad():
        wanted = learns(input_ids=ids, use_cache=False).logits
        found = samples(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, wanted, rtol=ROUNDING, atol=ROUNDING)


def test_lora_targets_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    assert lora_targets(GPT2LMHeadModel(small)) == ["c_attn", "c_fc", "c_proj"]
