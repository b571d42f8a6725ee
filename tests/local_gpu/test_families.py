"""Families of models: each trains exactly, over a tree or one by one, or is refused in a sentence.

The reference is peft's own model with full logits, one sequence at a time (`local_reference`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from local_gpu.config import LocalConfig
from local_gpu.halves import ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.losses import records_of
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.export import export_merged
from local_gpu.model.files import read_adapter, write_adapter
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.plan.memory import model_size
from local_gpu.trainer import LocalTrainer
from local_gpu.tree.body import Body
from local_gpu.tree.kernels import SdpaKernel
from tests.support.backends import VOCABULARY
from tests.support.local_reference import (
    full_logprobs,
    reference,
    reference_loss,
    rl_datum,
    sequence,
    warmed,
)
from tests.support.models import FAMILIES, REFUSED, Family, tiny_of
from tinker_claw.errors import ConfigError
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SHAPE = LoraShape(rank=4, alpha=8)
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


def adapter_of(base: BaseModel) -> dict[str, torch.Tensor]:
    """An adapter with values in both halves, so that both have gradients."""
    draw = torch.Generator().manual_seed(5)
    fresh = fresh_adapter(base, SHAPE, seed=0)
    return {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in fresh.items()}


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
    core = LearningCore(config, base, say=_unheard)
    core.step([LossPass("ppo", datums())], Adam(learning_rate=0.02))
    return core


def scores(core: LearningCore, adapter: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    (read,) = core.score(adapter, [ScoreAsk.of(core.facts, tokens, 1, None, 0)])
    return torch.tensor(read.logprobs)


def _unheard(sentence: str) -> None:
    """Ignore which kernel was chosen."""


@torch.no_grad()
def plain(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    rows = full_logprobs(model, tokens).float()
    return rows[torch.arange(len(rows)), torch.tensor(tokens[1:])]


def learns_exactly(model: Path, base: BaseModel, folder: Path, *, checkpointing: bool) -> None:
    """Compare logprobs and gradients with the reference."""
    learner = LoraOptimizer(
        base,
        SHAPE,
        adapter_of(base),
        passes=Passes(Body(SdpaKernel(), base.device, packs=base.packs), PassBudget(None)),
        context_tokens=base.context_tokens,
        checkpointing=checkpointing,
    )
    passes = [LossPass("ppo", datums())]
    (wanted,) = records_of(passes, vocabulary=VOCABULARY, context_tokens=256)
    scored = learner.forward_backward(wanted)
    got = learner._masters.gradient

    write_adapter(folder, base, SHAPE, learner.adapter())
    peft_model = reference(model, folder)
    for datum, ours in zip(datums(), scored, strict=True):
        rows = full_logprobs(peft_model, datum.tokens)[datum.start - 1 :]
        reference_loss("ppo", rows, datum).backward()
        picked = rows[torch.arange(len(rows)), torch.tensor(datum.tokens[datum.start :])]
        assert torch.allclose(ours.logprobs[:, 0], picked.detach(), atol=1e-4)
    named = dict(peft_model.named_parameters())
    names = [base.name_in_files(name) for name in learner.adapter()]
    theirs = torch.cat(
        [
            named[f"base_model.model.{name.replace('.weight', '.default.weight')}"].grad.flatten()
            for name in names
        ]
    )
    assert float((got - theirs).norm() / theirs.norm()) < 1e-4


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


@pytest.mark.parametrize("method", ["awq", "mxfp4"])
def test_weights_that_are_quantised_already_are_refused_before_they_are_loaded(
    method: str, tmp_path: Path
) -> None:
    model = tiny_of(FAMILIES["Qwen3"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (model / "model.safetensors").unlink()
    told = rf"\({method.upper()}\).* learns on whole weights.*AWQ.*were made from"
    for refused in (
        lambda: open_base(str(model), device="cpu", dtype="float32", threads=1),
        lambda: model_size(str(model)),
    ):
        with pytest.raises(ConfigError, match=rf"{told}.*\(gpt-oss\).* a copy in bfloat16"):
            refused()


async def test_what_does_not_pack_learns_and_scores_but_is_sampled_elsewhere(
    tmp_path: Path,
) -> None:
    model = tiny_of(FAMILIES["Qwen3.5, text"], tmp_path / "model")
    core = core_of(model, tmp_path)
    assert core.facts.notes == (
        f"{model} has linear_attention layers: its samples are computed one by one, without "
        "shared prefixes, which is correct and slower.",
    )
    core.write_adapter(tmp_path / "one")
    told = scores(core, tmp_path / "one", STEM)
    assert torch.allclose(told, plain(reference(model, tmp_path / "one"), STEM), atol=1e-4)
    assert not torch.allclose(told, scores(core, None, STEM), atol=1e-2)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"has linear_attention layers.*--sampler-urls"):
        await LocalTrainer.start(
            LocalConfig(model=str(model), root=tmp_path, threads=1), say=said.append
        )
    assert set(core.facts.notes) <= set(said), "the log says why"


def test_what_does_not_pack_has_passes_of_one_sequence() -> None:
    """It shares nothing, so that two would take twice the memory."""
    body = Body(SdpaKernel(), torch.device("cpu"), packs=False)
    sequences = [torch.tensor(datum.tokens) for datum in datums()]
    seen: list[list[int]] = []

    def compute(part: Sequence[int], *_: object) -> Sequence[int]:
        seen.append(list(part))
        return part

    passes = Passes(body, PassBudget(65_536))
    module = SimpleNamespace(config=Qwen3Config())
    passes.run(module, [(one, ()) for one in sequences], compute, undo=lambda: None)
    assert sorted(seen) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("name", ["Qwen2.5", "Mistral", "Qwen3-MoE"])
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
    trainer = await LocalTrainer.start(config, said.append)
    await trainer.export_adapter(tmp_path / "one")
    await trainer.aclose()
    wanted = f"{model} is a mixture of experts: LoRA is on k_proj, o_proj, q_proj, v_proj; experts"
    assert [sentence for sentence in said if sentence.startswith(wanted)]
    written = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert not written["target_parameters"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_adapter_names_each_layer_as_the_checkpoint_does(family: Family, tmp_path: Path) -> None:
    """Servers load a checkpoint by its own names, and skip an adapter's other names."""
    model, base = opened(family, tmp_path)
    given = adapter_of(base)
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


def test_the_adapter_says_all_that_a_server_asks_for(tmp_path: Path) -> None:
    model = tiny_of(FAMILIES["Qwen3"], tmp_path / "model")
    core_of(model, tmp_path).write_adapter(tmp_path / "one")
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"], config["bias"]) == (4, 8, "none")
    assert isinstance(config["target_modules"], list)
    assert len(config["target_modules"]) == 7
    for name in ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        assert not config[name]
