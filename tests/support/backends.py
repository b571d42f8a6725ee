"""The trainers that the contract suite runs against, each with a tiny model of its own.

Rule: a backend is a name and a way to start a trainer on a folder; starting again on the same
folder is a restart. Everything else the suite learns through the Protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tinker_claw.policy import Trainer

VOCABULARY = 64
CONTEXT = 2048


@dataclass(frozen=True)
class Backend:
    start: Callable[[Path], Awaitable[Trainer]]
    """Starts, or restarts, a trainer whose model and files are in that folder."""
    vocabulary: int
    tolerance: float
    """Largest difference between the sampler's and the trainer's logprobs of a token, in nats."""


def tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random two-layer Qwen3 with grouped key heads and peaked logits."""
    if not (folder / "config.json").exists():
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = Qwen3Config(**(settings | overrides), pad_token_id=0, eos_token_id=None)
            model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(15)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(10)
                layer.mlp.down_proj.weight.mul_(20)
        model.save_pretrained(folder)
    return folder


async def start_local(folder: Path, **settings: Any) -> LocalTrainer:
    model = tiny_model(folder / "model")
    defaults: dict[str, Any] = {"rank": 4, "alpha": 8, "threads": 1}
    config = LocalConfig(model=str(model), root=folder / "run", **(defaults | settings))
    return await LocalTrainer.start(config)


def held_requests(sampler: Any) -> int:
    """Number of requests of an embedded sampler that hold cache or wait for it."""
    engine = sampler._engine
    return len(engine._requests) + len(engine._arrived)


async def start_tinker(folder: Path, **settings: Any) -> Trainer:
    """Start the adapter and the SDK against the stand-in with the tiny model, over HTTP."""
    from tests.support.tinker import start_tinker as start  # which serves the model of this module

    return await start(folder, **settings)


BACKENDS: Mapping[str, Backend] = {
    "local": Backend(start_local, VOCABULARY, tolerance=1e-4),
    "tinker": Backend(start_tinker, VOCABULARY, tolerance=1e-4),
}
