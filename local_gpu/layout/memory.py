"""What each job takes of a GPU's memory, in bytes.

Rule: pure arithmetic over a `ModelSize`. Figures that stand for what cannot be derived (reserves,
the share of gradients under way) are constants with a name, and are estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from local_gpu.layout.model_size import ModelSize

GIB: Final = 1 << 30
FOUR_BITS: Final = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of an nf4 weight: half a byte, a byte of scale for 64, and a float32 for 256 of these."""
_UNDER_WAY: Final = 1.5
"""A layer's values while it goes backwards, with gradients beside them."""
_ADAPTER: Final = 16 + 4 + 2 * 2
"""Bytes per adapter parameter: float32 weight, gradient and two moments; the copy that computes and
its gradient, and the copies of two published versions for scoring, in bfloat16."""
_HEAD: Final = 4 * 4 * (1 << 24)
"""A chunk of logits, with what its backward pass keeps."""
_TRAINER_RESERVE: Final = 1.5 * GIB
"""CUDA's context, its libraries and their workspaces."""
_SPARE: Final = 0.04
"""Of a GPU: fragments, and what its driver keeps."""
_SAMPLER_RESERVE: Final = 3 * GIB
"""A vLLM server's context, CUDA graphs, and the activations of its largest batch."""
SAMPLER_MOST: Final = 0.9
"""Share of a GPU that a sampler takes where it is alone."""
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM makes room for."""
EMBEDDED_RESERVE: Final = 1.5 * GIB
"""The context and the workspaces of CUDA in the process of the embedded sampler."""
EMBEDDED_VERSIONS: Final = 3
"""Versions that may be live at once in the embedded sampler: base, present and last."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a sum."""

    what: str
    size: float
    """Bytes."""


def checkpoint_bytes(model: ModelSize, width: int = 2) -> int:
    """Kept of a token from forward to backward pass: the input of every layer."""
    return model.layers * model.hidden * width


def layer_bytes(model: ModelSize, width: int = 2) -> int:
    """Kept of a token in one layer, while that layer is computed again and goes backwards.

    5 h (two norms' inputs and outputs, the residual) + 3 q (before and after rotation, attended) +
    4 k (keys likewise, values) + 4 f (gate, its activation, up, their product).
    """
    h, q, k, f = model.hidden, model.queries, model.keys, model.feed_forward
    return (5 * h + 3 * q + 4 * k + 4 * f) * width


def token_bytes(model: ModelSize, *, checkpointing: bool, width: int = 2) -> float:
    """What a token of a forward and backward pass takes."""
    layer = layer_bytes(model, width)
    kept = checkpoint_bytes(model, width) if checkpointing else model.layers * layer
    return kept + _UNDER_WAY * layer


def base_bytes(model: ModelSize, quantization: Literal["none", "4bit"], width: int = 2) -> float:
    """The frozen base of what learns."""
    if quantization == "none":
        return model.parameters * width
    return model.linear * FOUR_BITS + (model.parameters - model.linear) * 2


def sharded_bytes(model: ModelSize, ranks: int, width: int = 2) -> float:
    """The base over several ranks: a part of it, two layers at a time, and what is in no layer."""
    outside = model.parameters - model.layers * model.largest_layer
    return (model.parameters / ranks + 2 * model.largest_layer + max(0, outside)) * width


def adapter_part(model: ModelSize, rank: int) -> Part:
    count = model.lora * rank
    return Part(f"adapter and Adam: {count / 1e6:.1f} million parameters", count * _ADAPTER)


def trainer_reserve(total: int) -> Part:
    return Part("CUDA, head and fragments", _TRAINER_RESERVE + _HEAD + _SPARE * total)


def weights_bytes(model: ModelSize, quantization: str | None) -> float:
    """A sampler's base; quantised weights take one byte where the method's name has an 8 in it."""
    if quantization is None:
        return model.parameters * 2
    one = 1.0 if "8" in quantization else FOUR_BITS
    return model.linear * one + (model.parameters - model.linear) * 2


def room_for(rank: int) -> int:
    """The rank that vLLM's slots are made for: the next of those it has."""
    return next((known for known in _RANKS if known >= rank), rank)


def sampler_parts(
    model: ModelSize, *, tensor_parallel: int, quantization: str | None, rank: int, adapters: int
) -> list[Part]:
    """What a sampler takes before its KV cache; no adapters: rank and adapters 0."""
    held = weights_bytes(model, quantization) / tensor_parallel
    parts = [Part(f"weights, {quantization or 'bfloat16'}", held)]
    if adapters:
        slots = model.lora * room_for(rank) * 2 * adapters
        parts.append(Part(f"{adapters} adapters of rank {room_for(rank)}", slots))
    return [*parts, Part("CUDA graphs and batches", _SAMPLER_RESERVE)]


def total_of(parts: Sequence[Part]) -> float:
    return sum(part.size for part in parts)
