"""LoRA shapes, with and without the head: gradients, files, and how peft reads them.

The reference is peft's own model with the written adapter, in float64, through full logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft.utils.integrations import init_empty_weights

from local_gpu.learn import head
from local_gpu.model.load import open_base
from local_gpu.model.lora import (
    BaseModel,
    LoraShape,
    for_sampling,
    with_lora,
)
from tests.local_gpu.learners import gradient, learner, peft_gradient, warm
from tests.support.backends import VOCABULARY, tiny_model
from tests.support.local_reference import (
    entropy_datum,
    rl_datum,
)
from tests.support.models import FAMILIES, tiny_of
from tinker_claw.types import LossPass

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


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_autograds_through_full_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, tied: str
) -> None:
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 7 * VOCABULARY)  # several chunks a record
    model = tiny_model(tmp_path / "model", tie_word_embeddings=TIED[tied])
    base, wanted = opened(model), SHAPES[shape]
    (folder := tmp_path / "adapter").mkdir()
    learning = learner(base, wanted)
    expected = peft_gradient(base, learning, model, folder, PASSES, torch.float64)
    got = gradient(learning, PASSES)
    assert ("lm_head.lora_B.weight" in got) == wanted.head
    for name, tensor in expected.items():
        assert tensor.norm() > 0
        assert (got[name] - tensor).norm() / tensor.norm() < ROUNDING, name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_samples_computes_what_learns(tmp_path: Path, family: str) -> None:
    """Also while peft builds elsewhere: it changes for the whole process how parameters are
    assigned to modules, a while at a time."""
    base = opened(tiny_of(FAMILIES[family], tmp_path / "model"))
    ids = torch.arange(1, 12)[None] % base.vocabulary
    learns, samples = (with_lora(base, ALL, warm(base, ALL)) for _ in range(2))
    with init_empty_weights():
        samples = for_sampling(samples)
    layers = {name.partition(".lora_")[0] for name in warm(base, ALL)}
    assert any(layer.endswith("lm_head") for layer in layers)
    assert any("attn" in layer for layer in layers)
    with torch.no_grad():
        expected, sampling, plain = (
            module(input_ids=ids, use_cache=False).logits
            for module in (learns, samples, base.module)
        )
    assert torch.allclose(sampling, expected, rtol=ROUNDING, atol=ROUNDING)
    assert not torch.allclose(sampling, plain, rtol=1e-3, atol=1e-3), "the adapter does something"
    assert not any(hasattr(layer, "lora_A") for layer in samples.modules())
