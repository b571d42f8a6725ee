"""Memory plans of GPUs: arithmetic beside figures that were worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from local_gpu.plan.fits import Demand, Fit, cure, reckon
from local_gpu.plan.layout import Gpu, Layout, Wanted, plan
from local_gpu.plan.memory import (
    GIB,
    ModelSize,
    layer_bytes,
    model_size,
    token_bytes,
)
from tests.support.backends import tiny_model
from tinker_claw.backends.local import Arrangement, arrange, why_not
from tinker_claw.cli.openclaw import too_small
from tinker_claw.config.load import load
from tinker_claw.errors import ModelFileError
from tinker_claw.shipped import MODEL_DIR

CONFIGS = Path(__file__).parents[3] / "configs"
FOR_GPUS = sorted(
    file for file in CONFIGS.glob("*.toml") if file.stem not in ("canaries", "demo", "prices")
)

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}


def model_folders(root: Path) -> dict[str, str]:
    """Make a folder for each hub id, with only a config.json of its shapes."""
    folders: dict[str, str] = {}
    for name, shape in SHAPES.items():
        folder = root / name.rpartition("/")[2]
        Qwen3Config(
            vocab_size=151_936,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            **shape,
        ).save_pretrained(folder)
        folders[name] = str(folder)
    return folders


def table_of(file: Path, gib: float, folders: Mapping[str, str]) -> list[str]:
    """Table that the doctor prints for a settings file; checks that all fits."""
    named = load(["--config", str(file)])
    flags = ["--config", str(file), "--model-name", folders[named.run.model_name]]
    arranged = on_gpus(gib, named.local.gpus or 1, flags)
    assert arranged.fit is not None
    assert why_not(arranged) is None
    return [arranged.layout.describe(), *arranged.fit.lines()]


def on_gpus(gib: float, count: int, flags: list[str]) -> Arrangement:
    """What is arranged where there are GPUs of this size, and no vLLM yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("local_gpu.plan.layout.visible", lambda: tuple(gpus(count, gib)))
        return arrange(load(flags), only_reckon=True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_GPUS", "ROLLOUT_GPUS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def sizes(folders: dict[str, str]) -> dict[str, ModelSize]:
    return {name.rpartition("-")[2]: model_size(folder) for name, folder in folders.items()}


def gpus(count: int, gib: float, used: float = 0) -> list[Gpu]:
    return [Gpu(str(n), "GPU", int(gib * GIB), int(used * GIB)) for n in range(count)]


def demand(model: ModelSize, **changed: Any) -> Demand:
    return replace(Demand(model=model, rank=32, context_tokens=model.context_tokens), **changed)


def test_the_page_shows_what_the_doctor_says(folders: dict[str, str]) -> None:
    page = (CONFIGS.parent / "docs" / "gpus.md").read_text()
    (flags,) = re.findall(r"doctor (--backend local --model-name Qwen/Qwen3-8B .*)", page)
    flags = flags.replace("Qwen/Qwen3-8B", folders["Qwen/Qwen3-8B"])
    wrong = why_not(on_gpus(60, 1, flags.split()))
    (shown,) = re.findall(r"^    (It does not fit.*\n    What would fit.*)$", page, re.MULTILINE)
    assert wrong == re.sub(r"\s+", " ", shown)


def test_sizes_agree_with_a_loaded_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for folder in (str(MODEL_DIR), str(tiny_model(tmp_path / "tiny"))):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert model_size(folder).parameters == sum(p.numel() for p in loaded.parameters())


def test_no_weights_are_needed_but_a_config_is(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json of .* is missing"):
        model_size(str(tmp_path))


@pytest.mark.parametrize("experts", [0, 4])
def test_the_formula_of_a_layer_is_what_a_layer_saves(tmp_path: Path, experts: int) -> None:
    """The formula is compared with what autograd keeps of a token, in a real layer with LoRA in
    bfloat16."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    settings: dict[str, Any] = {
        **{"vocab_size": 64, "hidden_size": 256, "intermediate_size": 768},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
        "head_dim": 128,
    }
    if experts:
        settings |= {"num_experts": 16, "num_experts_per_tok": experts}
        shape: Any = Qwen3MoeConfig(**settings, moe_intermediate_size=128)
    else:
        shape = Qwen3Config(**settings)
    shape.save_pretrained(tmp_path)
    how = {"experts_implementation": "grouped_mm"} if experts else {}
    module: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, **how)
    module.requires_grad_(False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"
    lora = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    inject_adapter_in_model(lora, module)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.requires_grad_(True)
    tokens = 64
    rows = torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    angles = module.model.rotary_emb(rows, torch.arange(tokens)[None])
    shared = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *angles)}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.model.layers[0](rows, position_embeddings=angles, attention_mask=None)
    saved = sum(storage.nbytes() for storage in kept.values()) / tokens
    reckoned = layer_bytes(model_size(str(tmp_path)))
    assert 0.97 * reckoned <= saved <= 1.3 * reckoned, "and 1.5 times that is what is set aside"


def test_8b_on_eight_gpus(sizes: dict[str, ModelSize]) -> None:
    """16.4 GB of weights, 0.7 of adapters and 3 GiB leave 0.9 of 80 GiB room for 387,000 tokens.

    The last are 2.5 GiB, 110,592 bytes for each of 2048 tokens and 16 for each of 128 x 151,936
    logits.
    """
    fit = reckon(plan(Wanted(gpus=8)), gpus(8, 80), demand(sizes["8B"]))
    assert fit.short == ()
    assert (fit.shard, fit.sampler_memory) == (False, 0.9)
    assert (fit.sampler_cache, fit.learner_memory) == (None, None), "nobody else is on their GPUs"
    fixed = 2 * sizes["8B"].parameters + 4 * 2 * 87_293_952 + 2.5 * GIB
    fixed += 2048 * 110_592 + 128 * 151_936 * 16
    assert kv_tokens(fit) == int((0.9 * 80 * GIB - fixed) / 147_456)
    assert fit.streams == kv_tokens(fit) // 4096 // 8 * 8 == 88
    shared = fitted(demand(sizes["8B"]), gpus(1, 80))
    assert 16 <= shared.streams < fit.streams, "there what learns has half of it"
    assert fit.micro_batch_tokens == 32_768, "more at once is no faster"
    (room,) = (part for part in fit.shares[0].parts if part.what.startswith("activations"))
    token = token_bytes(sizes["8B"], checkpointing=True)
    assert room.size == pytest.approx(1.1 * 40_960 * token), "one sample, and a tenth of margin"


def test_32b_is_split_and_sampled_by_pairs(sizes: dict[str, ModelSize]) -> None:
    wanted = Wanted(gpus=8, rollout=4, tensor_parallel=2)
    fit = reckon(plan(wanted), gpus(8, 80), demand(sizes["32B"]))
    assert (fit.short, fit.shard) == ((), True), "65.5 GB are over 45 % of 80 GiB"
    alone = reckon(plan(Wanted(gpus=2)), gpus(2, 140), demand(sizes["32B"]))
    assert (alone.short, alone.shard) == ((), False), "on one GPU there is nothing to split"


def test_the_cure_is_the_longest_context_that_fits(sizes: dict[str, ModelSize]) -> None:
    layout, there = Layout((0,), ((0,),)), gpus(1, 60)
    asked = demand(sizes["8B"])
    told = re.fullmatch(r"--context-tokens (\d+)", cure(layout, there, asked))
    assert told
    longest = int(told[1])
    fitted(replace(asked, context_tokens=longest), there)
    assert reckon(layout, there, replace(asked, context_tokens=longest + 2048)).short
    assert cure(layout, gpus(1, 40), asked).startswith("larger GPUs, a smaller model")
    split = plan(Wanted(gpus=8, rollout=4, tensor_parallel=2))
    assert reckon(split, gpus(8, 80), demand(sizes["32B"])).short == (), "as that file has it"


def test_memory_that_others_have_is_not_counted_on(sizes: dict[str, ModelSize]) -> None:
    free = fitted(demand(sizes["8B"]), gpus(1, 80))
    layout = Layout((0,), ((1,),))
    busy = reckon(layout, [*gpus(1, 80), Gpu("1", "GPU", 80 * GIB, 40 * GIB)], demand(sizes["8B"]))
    assert busy.sampler_memory is not None
    assert busy.sampler_memory < 0.5
    assert "  40.0  other programs" in busy.lines()
    half_gone = reckon(Layout((0,), ((0,),)), gpus(1, 80, used=20), demand(sizes["8B"]))
    assert half_gone.short
    assert not free.short


@pytest.mark.parametrize("file", FOR_GPUS, ids=lambda file: file.stem)
def test_the_figures_in_a_settings_file_are_what_is_reckoned(
    file: Path, folders: dict[str, str]
) -> None:
    text = file.read_text()
    command = re.search(r"doctor --config (\S+)` prints it for GPUs of ([\d.]+) GiB:", text)
    assert command, file
    assert command[1] == f"configs/{file.name}"
    told = table_of(file, float(command[2]), folders)
    assert "\n".join(f"#   {line}".rstrip() for line in told) in text


@pytest.mark.parametrize("file", FOR_GPUS, ids=lambda file: file.stem)
def test_openclaw_can_be_served_from_every_settings_file(file: Path) -> None:
    context = load(["--config", str(file)]).run.context_tokens
    assert context is None or too_small(context) is None


def fitted(what: Demand, there: list[Gpu]) -> Fit:
    fit = reckon(Layout((0,), ((0,),)), there, what)
    assert fit.short == ()
    return fit


def kv_tokens(fit: Fit) -> int:
    (told,) = (part.what for part in fit.shares[-1].parts if part.what.startswith("KV cache:"))
    return int(told.split()[2].replace(",", ""))
