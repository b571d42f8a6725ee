"""A 4-bit base: shared, never written, and its adapters work on the whole model.

The first tests need no bitsandbytes; the others are left out where it is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from local_gpu.config import LocalConfig
from local_gpu.model.export import export_merged
from local_gpu.model.load import check_quantization, open_base
from local_gpu.model.lora import BaseModel, clone, fresh_adapter, with_lora
from tests.local_gpu.learners import SHAPE, apart, gradient, learner, peft_gradient
from tests.support.backends import start_local, tiny_model
from tests.support.local_reference import (
    full_logprobs,
    reference,
    rl_datum,
    sequence,
    warmed,
)
from tests.support.models import FAMILIES, tiny_of
from tinker_claw.backends.open import check_backend
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError
from tinker_claw.types import LossPass, SamplingParams

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
INSTALLED = find_spec("bitsandbytes") is not None
installed = pytest.mark.skipif(not INSTALLED, reason="bitsandbytes is not installed")
TOKENS = sequence(30, 4)


def tiny(folder: Path) -> Path:
    """Make a model whose rows are as long as a block of weights that share a scale."""
    return tiny_model(folder / "model", hidden_size=64, head_dim=16, intermediate_size=128)


def in_four_bits(model: Path, dtype: Any = "float32") -> BaseModel:
    return open_base(str(model), device="cpu", dtype=dtype, threads=1, quantization="4bit")


def four_bits_of(module: torch.nn.Module) -> dict[str, Any]:
    from bitsandbytes.nn import Params4bit

    return {n: p for n, p in module.named_parameters() if isinstance(p, Params4bit)}


def test_four_bits_are_not_split_over_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not split over GPUs.*or the split"):
        LocalConfig(model="m", root=tmp_path, quantization="4bit", shard="on")


@pytest.mark.skipif(INSTALLED, reason="bitsandbytes is installed")
async def test_what_is_missing_for_four_bits_is_said_before_a_sampler_starts() -> None:
    flags = ("--backend", "local", "--model-name", "/m", "--base-quantization", "4bit")
    with pytest.raises(ConfigError, match="bitsandbytes"):
        await check_backend(load(flags))


@installed
def test_a_device_without_four_bits_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot be had on mps: take --device cuda or cpu"):
        check_quantization(torch.device("mps"))


@installed
def test_a_mixture_whose_experts_would_stay_whole_is_refused(tmp_path: Path) -> None:
    model = tiny_of(FAMILIES["Qwen3-MoE"], tmp_path / "model")
    with pytest.raises(ConfigError, match=r"experts in model\.layers\.0\.mlp are no linear"):
        in_four_bits(model)


@installed
def test_every_version_shares_the_quantised_weights_and_their_scales(tmp_path: Path) -> None:
    base = in_four_bits(tiny(tmp_path))
    whole = four_bits_of(base.module)
    assert len(whole) == 14, "seven linear layers in each of two"
    worn = with_lora(base, SHAPE, fresh_adapter(base, SHAPE, 0))
    for module in (clone(base.module), worn):
        named = four_bits_of(module)
        for weight, shared in zip(named.values(), whole.values(), strict=True):
            assert weight is shared
            assert weight.quant_state is shared.quant_state
    held = {id(t) for t in whole.values()}
    bytes_ = sum(p.numel() * p.element_size() for p in base.module.parameters() if id(p) in held)
    assert bytes_ == sum(s.quant_state.shape.numel() for s in whole.values()) / 2


@installed
def test_gradients_are_those_of_the_rounded_weights(tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    base = in_four_bits(tiny(tmp_path))
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for name, weight in four_bits_of(base.module).items():
            rounded.get_parameter(name).copy_(dequantize_4bit(weight.data, weight.quant_state))
    rounded.save_pretrained(tmp_path / "rounded")

    learning = learner(base, checkpointing=True)
    passes = [LossPass("ppo", (rl_datum(30, 8, 1), rl_datum(24, 3, 2)))]
    expected = peft_gradient(base, learning, tmp_path / "rounded", tmp_path, passes)
    assert apart(gradient(learning, passes), expected) < 1e-4


@installed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_it_learns_and_samples_and_the_base_stays_as_it_was(
    tmp_path: Path, dtype: str
) -> None:
    tiny(tmp_path)
    trainer = await start_local(tmp_path, quantization="4bit", dtype=dtype)
    base = await (await trainer.base()).logprobs(TOKENS, start=1)
    await warmed(trainer)
    sampler = await trainer.publish()
    read = await sampler.logprobs(TOKENS, start=1)
    assert max(abs(a - b) for a, b in zip(read.logprobs, base.logprobs, strict=True)) > 0.05

    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    (drawn,) = await sampler.sample(TOKENS[:8], params, 1)
    again = await sampler.logprobs((*TOKENS[:8], *drawn.tokens), start=8)
    pairs = zip(again.logprobs, drawn.logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) < (1e-4 if dtype == "float32" else 0.3)
    assert await (await trainer.base()).logprobs(TOKENS, start=1) == base
    await trainer.aclose()


@installed
async def test_what_was_learned_goes_home_to_the_whole_base(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    trainer = await warmed(await start_local(tmp_path, quantization="4bit"))
    sampler = await trainer.publish()
    here = await sampler.logprobs(TOKENS, start=1)
    await trainer.aclose()
    adapter = tmp_path / "run" / "adapters" / sampler.ref
    export_merged(str(model), adapter, tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    chosen = torch.tensor(TOKENS[1:])[:, None]
    with torch.no_grad():
        wanted = full_logprobs(reference(model, adapter), TOKENS).gather(1, chosen)[:, 0]
        got = full_logprobs(merged, TOKENS).gather(1, chosen)[:, 0]
    assert torch.allclose(got, wanted, atol=2e-4)
    # It learned around the rounding of four bits, which is not there any more.
    assert not torch.allclose(got, torch.tensor(here.logprobs), atol=1e-2)
