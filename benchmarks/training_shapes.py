"""Shapes of models with random weights, and batches of samples, for the measurements.

Rule: a preset and its seed give the same weights and the same samples on every run of one machine.
No weights are read from disk: they are drawn where they are used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.tree.kernels import ATTENTION
from tinker_claw.types import Datum

FIRST_ID: Final = 10
CONTEXT: Final = 40_960
"""Positions of a model that is written to disk."""
LOSS_SHARE: Final = 0.1
"""Share of a sample's tokens that carry the loss: the last ones, as an agent's reply after its
prompt."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense Qwen3."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of a layer's matrices; the first three read the layer's input."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, f = self.hidden, self.ffn
        return ((h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h))


@dataclass(frozen=True)
class Batches:
    """Sizes of the samples, in tokens."""

    samples: int
    shared: int
    """Length of the prefix that all samples of the shared batch begin with."""
    own: int
    """Further tokens of each of those samples."""
    lengths: tuple[int, int]
    """Shortest and longest sample of the unshared batch, log-uniform between."""
    long: int
    """Length of the one sample that shows the memory; 0 leaves it out."""


@dataclass(frozen=True)
class Preset:
    shape: Shape
    batches: Batches


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "tiny": Preset(
            Shape(4, 128, 384, 4, 2, 32, 4096), Batches(16, 2000, 300, (64, 1815), long=0)
        ),
        "0.6b": Preset(
            Shape(28, 1024, 3072, 16, 8, 128, 151_936),
            Batches(16, 20_000, 3000, (1000, 6000), long=32_000),
        ),
        "8b": Preset(
            Shape(36, 4096, 12_288, 32, 8, 128, 151_936),
            Batches(16, 20_000, 3000, (1000, 6000), long=32_000),
        ),
    }
)


def build(shape: Shape, *, device: torch.device, dtype: torch.dtype, context: int) -> BaseModel:
    """Build a base with random weights on the device; torch's random state is kept."""
    module = _draw(shape, device, dtype, context)
    module.eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION)
    return BaseModel(
        module=module,
        source="random",
        fingerprint="random",
        vocabulary=shape.vocabulary,
        context_tokens=context,
        device=device,
        dtype=dtype,
    )


def save(shape: Shape, folder: Path, device: torch.device) -> None:
    """Write a base in bfloat16 for programs that load a folder. It has no tokenizer."""
    _draw(shape, device, torch.bfloat16, CONTEXT).save_pretrained(folder)


def _draw(shape: Shape, device: torch.device, dtype: torch.dtype, context: int) -> Any:
    settings = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=devices), device:
            torch.manual_seed(0)
            return Qwen3ForCausalLM(settings)
    finally:
        torch.set_default_dtype(before)


def adapter_of(base: BaseModel, lora: LoraShape) -> dict[str, Tensor]:
    """Make an adapter as in the middle of training: with B = 0, A would have no gradient to
    compare."""
    generator = torch.Generator().manual_seed(1)
    adapter = fresh_adapter(base, lora, seed=0)
    for name, tensor in adapter.items():
        if ".lora_B." in name:
            adapter[name] = 0.01 * torch.randn(tensor.shape, generator=generator)
    return adapter


def batches(preset: Preset) -> dict[str, tuple[Datum, ...]]:
    """Make the samples of each case."""
    rng, sizes = random.Random(0), preset.batches

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_ID, preset.shape.vocabulary) for _ in range(count))

    def sample(prompt: tuple[int, ...], own: int) -> Datum:
        return with_loss(rng, (*prompt, *tokens(own)), preset.shape.vocabulary)

    prompt = tokens(sizes.shared)
    low, high = sizes.lengths
    spread = [
        round(low * (high / low) ** (i / max(1, sizes.samples - 1))) for i in range(sizes.samples)
    ]
    rng.shuffle(spread)
    cases = {
        "shared": tuple(sample(prompt, sizes.own) for _ in range(sizes.samples)),
        "unshared": tuple(sample((), length) for length in spread),
    }
    return cases | ({"long": (sample((), sizes.long),)} if sizes.long else {})


def with_loss(
    rng: random.Random, tokens: tuple[int, ...], vocabulary: int, tail: int | None = None
) -> Datum:
    """Make a sample with a loss on its tail, of that many tokens or of the usual share. Random
    weights give a probability of about 1 / vocabulary; the behaviour logprobs stray a little from
    that, so that some ratios are clipped and most are not."""
    tail = tail or max(1, round(len(tokens) * LOSS_SHARE))
    uniform = -float(torch.tensor(float(vocabulary)).log())
    return Datum(
        tokens=tokens,
        start=len(tokens) - tail,
        logprobs=tuple(uniform + rng.uniform(-0.1, 0.1) for _ in range(tail)),
        advantages=tuple(rng.uniform(-1.0, 1.0) / tail for _ in range(tail)),
    )


def useful_tokens(datums: Sequence[Datum]) -> int:
    """Tokens of the samples: each position that predicts a token, however it is computed."""
    return sum(len(datum.tokens) - 1 for datum in datums)
