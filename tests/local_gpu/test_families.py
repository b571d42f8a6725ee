"""Families of models: each trains exactly, over a tree or one by one, or is refused in a sentence.

The reference is peft's own model with full logits, one sequence at a time (`local_reference`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from local_gpu.config import LocalConfig
from local_gpu.halves import ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.model.export import export_merged
from local_gpu.model.files import read_adapter, write_adapter
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel, fresh_adapter
from local_gpu.plan.memory import model_size
from local_gpu.sample.member import PoolOptions
from local_gpu.trainer import LocalTrainer
from tests.local_gpu.learners import (
    SHAPE,
    STILL,
    apart,
    gradient,
    learner,
    peft_gradient,
    warm,
)
from tests.support.local_reference import (
    full_logprobs,
    reference,
    rl_datum,
    sequence,
    warmed,
)
from tests.support.models import FAMILIES, REFUSED, Family, tiny_of
from tinker_claw.errors import ConfigError
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
STEM = sequence(24, 5)


def datums() -> tuple[Datum, ...]:
    """Datums of which the last three continue one beginning that is longer than any window here."""
    own = [rl_datum(20, 8, 1)]
    for salt, length in ((2, 9), (3, 14), (4, 6)):
        tokens = STEM + sequence(length, salt)
        start = len(STEM) - 2
        rows = len(tokens) - start
        own.append(
            Datum(tokens, start, (-4.0,) * rows, (0.1, -0.2) * (rows // 2) + (0.3,) * (rows % 2))
        )
    return tuple(own)


def opened(family: Family, folder: Path) -> tuple[Path, BaseModel]:
    model = tiny_of(family, folder / "model")
    return model, open_base(str(model), device="cpu", dtype="float32", threads=1)


def core_of(model: Path, folder: Path, **settings: Any) -> LearningCore:
    """A learner after one step, so that its adapter changes the output."""
    config = LocalConfig(model=str(model), root=folder, rank=4, alpha=8, threads=1, **settings)
    base = open_base(
        str(model),
        device="cpu",
        dtype=config.dtype,
        threads=1,
        quantization=config.quantization,
    )
    core = LearningCore(config, base, say=[].append)
    core.step([LossPass("ppo", datums())], Adam(learning_rate=0.02))
    return core


def scores(core: LearningCore, adapter: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    (read,) = core.score(adapter, [ScoreAsk.of(core.facts, tokens, 1, None, 0)])
    return torch.tensor(read.logprobs)


@torch.no_grad()
def plain(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    rows = full_logprobs(model, tokens).float()
    return rows[torch.arange(len(rows)), torch.tensor(tokens[1:])]


def learns_exactly(model: Path, base: BaseModel, folder: Path, *, checkpointing: bool) -> None:
    """Compare logprobs and gradients with the reference."""
    learning, passes = learner(base, checkpointing=checkpointing), [LossPass("ppo", datums())]
    expected = peft_gradient(base, learning, model, folder, passes)
    assert apart(gradient(learning, passes), expected) < 1e-4
    peft_model, report = reference(model, folder), learning.step(passes, STILL)
    for datum, ours in zip(datums(), report.logprobs[0], strict=True):
        theirs = plain(peft_model, datum.tokens)[datum.start - 1 :]
        assert ours == pytest.approx(theirs.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_gradients_of_every_family_are_those_of_peft_with_full_logits(
    family: Family, tmp_path: Path
) -> None:
    model, base = opened(family, tmp_path)
    assert base.packs == (family.why_not is None)
    assert (family.why_not or "") in (base.obstacle or "")
    learns_exactly(model, base, tmp_path, checkpointing=False)


@pytest.mark.parametrize(
    "family",
    [
        Family("mistral", {"sliding_window": 8, "attention_dropout": 0.5}),
        Family("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.3}),
    ],
    ids=["dropout", "jitter"],
)
def test_checkpointing_brings_no_noise_of_training_with_it(family: Family, tmp_path: Path) -> None:
    model, base = opened(family, tmp_path)
    learns_exactly(model, base, tmp_path, checkpointing=True)


@pytest.mark.parametrize(("family", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_family_that_would_be_computed_wrongly_is_refused(
    family: Family, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{sentence}.*Use a model such as Qwen3"):
        fresh_adapter(opened(family, tmp_path)[1], SHAPE, seed=0)


def test_weights_that_are_quantised_already_are_refused_before_they_are_loaded(
    tmp_path: Path,
) -> None:
    model = tiny_of(FAMILIES["Qwen3"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (model / "model.safetensors").unlink()
    for refused in (
        lambda: open_base(str(model), device="cpu", dtype="float32", threads=1),
        lambda: model_size(str(model)),
    ):
        with pytest.raises(ConfigError, match="AWQ"):
            refused()


async def test_what_does_not_pack_learns_and_scores_but_is_sampled_elsewhere(
    tmp_path: Path,
) -> None:
    model = tiny_of(FAMILIES["Qwen3.5, text"], tmp_path / "model")
    core = core_of(model, tmp_path)
    (note,) = core.facts.notes
    assert "one by one" in note
    core.write_adapter(tmp_path / "one")
    told = scores(core, tmp_path / "one", STEM)
    assert torch.allclose(told, plain(reference(model, tmp_path / "one"), STEM), atol=1e-4)
    assert not torch.allclose(told, scores(core, None, STEM), atol=1e-2)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"has linear_attention layers.*--sampler-urls"):
        await LocalTrainer.start(
            LocalConfig(model=str(model), root=tmp_path, threads=1), PoolOptions(say=said.append)
        )
    assert set(core.facts.notes) <= set(said), "the log says why"


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3-MoE"])
async def test_what_packs_is_sampled_in_this_process_as_it_is_scored(
    name: str, tmp_path: Path
) -> None:
    model = tiny_of(FAMILIES[name], tmp_path / "model")
    trainer = await LocalTrainer.start(LocalConfig(model=str(model), root=tmp_path, threads=1))
    sampler = await (await warmed(trainer)).publish()
    (drawn,) = await sampler.sample(STEM, SamplingParams(max_tokens=12, temperature=1.0, seed=1), 1)
    read = await sampler.logprobs((*STEM, *drawn.tokens), start=len(STEM))
    await trainer.aclose()
    assert list(read.logprobs) == pytest.approx(list(drawn.logprobs), abs=1e-4)


async def test_experts_and_routers_stay_as_they_are_and_it_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    model = tiny_of(FAMILIES["Qwen3-MoE"], tmp_path / "model")
    config = LocalConfig(model=str(model), root=tmp_path, threads=1)
    trainer = await LocalTrainer.start(config, PoolOptions(say=said.append))
    await trainer.export_adapter(tmp_path / "one")
    await trainer.aclose()
    assert any("is a mixture of experts" in sentence for sentence in said)
    written = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert not written["target_parameters"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_adapter_names_each_layer_as_the_checkpoint_does(family: Family, tmp_path: Path) -> None:
    """Servers load a checkpoint by its own names, and skip an adapter's other names."""
    model, base = opened(family, tmp_path)
    given = warm(base)
    write_adapter(tmp_path, base, SHAPE, given)
    with safe_open(model / "model.safetensors", "pt") as file:
        weights = set(file.keys())
    written = load_file(tmp_path / "adapter_model.safetensors")
    layers = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in written}
    assert {f"{layer}.weight" for layer in layers} <= weights
    read = read_adapter(tmp_path, base).tensors
    assert given.keys() == read.keys()
    assert all(torch.equal(given[name], read[name]) for name in given)


HOME = ("Qwen3, tied", "Qwen2.5", "Qwen3-MoE", "Qwen3-Next", "Qwen3.5, eyes", "Qwen3.5-MoE, eyes")


@pytest.mark.parametrize("name", HOME)
def test_adapter_and_merged_model_score_elsewhere_as_they_did_here(
    name: str, tmp_path: Path
) -> None:
    model = tiny_of(FAMILIES[name], tmp_path / "model", files_of="40KB")
    core = core_of(model, tmp_path)
    core.write_adapter(tmp_path / "one")
    here = scores(core, tmp_path / "one", STEM)
    assert not torch.allclose(here, scores(core, None, STEM), atol=0.05)
    assert torch.allclose(plain(reference(model, tmp_path / "one"), STEM), here, atol=2e-4)
    export_merged(str(model), tmp_path / "one", tmp_path / "merged")
    # The base came in several files, and what tells of them would mislead a server.
    told = json.loads((model / "model.safetensors.index.json").read_text())
    assert [file.name for file in (tmp_path / "merged").glob("*safetensors*")] == [
        "model.safetensors"
    ]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(plain(merged, STEM), here, atol=2e-4)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == told["weight_map"].keys()


def test_a_run_in_bfloat16_goes_home_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_of(FAMILIES["Qwen3"], tmp_path / "model")
    core = core_of(model, tmp_path, dtype="bfloat16")
    core.write_adapter(tmp_path / "one")
    here = scores(core, tmp_path / "one", STEM)
    export_merged(str(model), tmp_path / "one", tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype == torch.bfloat16
    theirs = plain(reference(model, tmp_path / "one", torch.bfloat16), STEM)
    moved = (here - scores(core, None, STEM)).abs().mean()
    for there in (theirs, plain(merged, STEM)):
        assert (there - here).abs().mean() < 0.1 * moved
