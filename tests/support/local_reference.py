"""Reference for the local trainer: peft's model, full logits, the losses spelled out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from local_gpu.trainer import LocalTrainer
from tests.support.backends import VOCABULARY
from tinker_claw.types import Adam, Datum, LossPass

RL_LOSSES = ("ppo", "importance_sampling")
WARM = Adam(learning_rate=0.01)


def sequence(length: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 17 + i * i * 5 + i * salt) % VOCABULARY for i in range(length))


def rl_datum(length: int, start: int, salt: int) -> Datum:
    rows = length - start
    return Datum(
        tokens=sequence(length, salt),
        start=start,
        logprobs=tuple(-4.0 - 0.3 * ((i + salt) % 5) for i in range(rows)),
        advantages=tuple(0.1 * ((i * salt) % 7 - 3) for i in range(rows)),
    )


def entropy_datum(length: int, start: int, salt: int, width: int = 3) -> Datum:
    rows = length - start
    return Datum(
        tokens=sequence(length, salt),
        start=start,
        targets=tuple(tuple((i + 11 * k) % VOCABULARY for k in range(width)) for i in range(rows)),
        weights=tuple(tuple(0.1 * (k - 1) + 0.02 * i for k in range(width)) for i in range(rows)),
    )


async def warmed(trainer: LocalTrainer) -> LocalTrainer:
    """Give B values, so that A has gradients, and drop the moments by a fresh export."""
    await trainer.train_step([LossPass("ppo", (rl_datum(20, 8, 1),))], WARM)
    return trainer


async def adapter_of(trainer: LocalTrainer, folder: Path) -> dict[str, torch.Tensor]:
    await trainer.export_adapter(folder)
    return load_file(folder / "adapter_model.safetensors")


def reference(model: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load peft's own model with that adapter, all of it in `dtype`; with eyes, where it has
    any."""
    eyes = "vision_config" in json.loads((model / "config.json").read_text())
    whole: Any = AutoModelForImageTextToText if eyes else AutoModelForCausalLM
    base = whole.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).to(dtype).eval()


def full_logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logprobs [T - 1, vocabulary]: row i - 1 predicts tokens[i]."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def reference_loss(name: str, rows: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formulas of TINKER.md A2, spelled out a second time."""
    picked = rows[torch.arange(len(rows)), torch.tensor(datum.tokens[datum.start :])]
    if name == "cross_entropy":
        at = rows.gather(1, torch.tensor(datum.targets)) if datum.targets else picked[:, None]
        return -(at * torch.tensor(datum.weights).to(rows)).sum()
    # float32 numbers, as every backend is sent
    ratio = torch.exp(picked - torch.tensor(datum.logprobs).to(rows))
    gain = torch.tensor(datum.advantages).to(rows)
    if name == "importance_sampling":
        return -(ratio * gain).sum()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain).sum()


SETTINGS = settings(derandomize=True, deadline=None, database=None)


@st.composite
def batches(draw: st.DrawFn, *, most: int = 8) -> list[list[int]]:
    """Draw sequences, many of which extend, repeat or cut short an earlier one."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(found)) if found else []
        kept = parent[: draw(st.integers(0, len(parent)))]
        longest = draw(st.sampled_from([0, 2, 9]))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=longest or 1))
        found.append(kept + tail)
    return found


def tensors(sequences: list[list[int]], stretch: int = 1) -> list[Tensor]:
    """Tensors for the packing; each token is repeated, for longer ones with the same forks."""
    return [torch.tensor(s).repeat_interleave(stretch) for s in sequences]
