"""Size of a model, from its config.json alone, and the GPU memory that each job takes.

Rule: no weights are read. The model is built on torch's meta device, where tensors have shapes and
no memory, so the parameters of every architecture in transformers can be counted.

Rule: memory is pure arithmetic over a `ModelSize`, in bytes. What cannot be derived (reserves, the
share of gradients in flight) is estimated by named constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tinker_claw.errors import ModelFileError

_UNUSABLE: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises for a value in config.json that it cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameter counts and widths of a model."""

    parameters: int
    """All parameters; a head that is tied to the embeddings counts once."""
    linear: int
    """Parameters of the body's linear layers, which LoRA adapts and 4 bits may hold."""
    lora: int
    """Adapter parameters per unit of rank: inputs and outputs of those layers, added up."""
    largest_layer: int
    """Parameters of the largest layer of the body."""
    layers: int
    caching_layers: int
    """Layers that keep keys and values of every token; linear attention does not."""
    hidden: int
    feed_forward: int
    queries: int
    """Heads times their size."""
    keys: int
    """Key-value heads times their size."""
    vocabulary: int
    context_tokens: int
    targets: tuple[str, ...]
    """Last names of the layers that LoRA is on; servers would reserve memory for others, too."""
    experts: int = 0
    """Experts that each token goes through, see `layer_bytes`; 0: the model is dense."""
    expert: int = 0
    """Inner width of each expert."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token, in bfloat16."""
        return 2 * self.caching_layers * self.keys * 2


def model_size(source: str) -> ModelSize:
    """Size up the model of a folder or hub id.

    Raises:
        ModelFileError: there is no config.json that transformers can build.
        ConfigError: its weights are quantised.
    """
    import torch  # not needed to compute with a ModelSize
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    from local_gpu.device import first_line
    from local_gpu.model.load import text_half
    from local_gpu.model.lora import refuse_quantized

    try:
        config: Any = AutoConfig.from_pretrained(source)
        refuse_quantized(config, source)
        with torch.device("meta"):
            config = text_half(config).get("config", config)  # the vision half is small beside it
            module: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, StrictDataclassError, *_UNUSABLE) as error:
        raise ModelFileError(
            f"The config.json of {source!r} is missing, or of a kind that this release of "
            f"transformers cannot build. ({first_line(error)})"
        ) from error
    return counted(module)


def counted(module: Any) -> ModelSize:
    """Size up a transformers causal LM.

    Raises:
        ModelFileError: its config.json does not give the width of its layers, or they differ in
            width.
    """
    from local_gpu.device import first_line

    try:
        return _counted(module)
    except _UNUSABLE as error:
        kind = module.config.model_type
        raise ModelFileError(
            f"The memory of a model of the kind {kind} cannot be computed from its config.json. "
            f"({first_line(error)})"
        ) from error


def _counted(module: Any) -> ModelSize:
    from torch import nn

    from local_gpu.model.lora import fused_experts, lora_targets

    text = module.config.get_text_config()
    head = module.get_output_embeddings()
    linear = [m for m in module.modules() if isinstance(m, nn.Linear) and m is not head]
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    layers = int(text.num_hidden_layers)
    fields = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    chosen = next((int(n) for name in fields if (n := getattr(text, name, None))), 1)
    experts = chosen if fused_experts(module) else 0
    return ModelSize(
        parameters=sum(p.numel() for p in module.parameters()),
        linear=sum(m.weight.numel() for m in linear),
        lora=sum(m.in_features + m.out_features for m in linear),
        largest_layer=max(
            sum(p.numel() for p in child.parameters())
            for block in module.base_model.modules()
            if isinstance(block, nn.ModuleList)
            for child in block
        ),
        layers=layers,
        caching_layers=sum("linear" not in kind for kind in kinds) if kinds else layers,
        hidden=int(text.hidden_size),
        feed_forward=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        queries=heads * size,
        keys=int(getattr(text, "num_key_value_heads", None) or heads) * size,
        vocabulary=int(text.vocab_size),
        context_tokens=int(text.max_position_embeddings),
        targets=tuple(lora_targets(module)),
        experts=experts,
        expert=int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size),
    )


GIB: Final = 1 << 30
DEFAULT_TOKENS: Final = 32_768
"""Most tokens of one pass, except a single longer sample; by arithmetic more is no faster."""
FOUR_BITS: Final = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of an nf4 weight: half a byte, a byte of scale for 64, and a float32 for 256 of these."""
_UNDER_WAY: Final = 1.5
"""Factor on a layer's activations in the backward pass, for the gradients beside them."""
_ADAPTER: Final = 16 + 4 + 2 * 2
"""Bytes per adapter parameter: float32 weight, gradient and two moments; the module's copy and its
gradient, and the copies of two published versions for scoring, in bfloat16."""
_HEAD: Final = 4 * 4 * (1 << 24)
"""A chunk of logits, with what its backward pass keeps."""
_TRAINER_RESERVE: Final = 1.5 * GIB
"""CUDA's context, its libraries and their workspaces."""
_PROCESS: Final = 1.0 * GIB
"""A gateway's process on a CPU, with the weights' pages aside."""
_SPARE: Final = 0.04
"""Share of a GPU for fragmentation and what its driver keeps."""
_SAMPLER_RESERVE: Final = 2.5 * GIB
"""A vLLM server's context and its CUDA graphs."""
_LOGITS: Final = 16
"""Bytes of a logit while a server samples: as computed, in float32, as logprobs, and a copy."""
SAMPLER_MOST: Final = 0.9
"""Share of a GPU that a sampler takes where it is alone."""
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM makes room for."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The most that a server computes in one step of its engine."""

    tokens: int
    """Prompt and reply tokens together: longer prompts are computed in chunks, and between two of
    them every stream gets its next token."""
    sequences: int
    """Sequences that get a token in one step."""


SAMPLER_BATCH: Final = Batch(2048, 128)
"""Batch of a server that agents wait for. With vLLM's defaults a prompt of 8k tokens is computed at
once and stalls every stream meanwhile. For the number of sequences see `fits.streams`."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of a memory plan."""

    what: str
    size: float
    """Bytes."""


def checkpoint_bytes(model: ModelSize, width: int = 2) -> int:
    """Bytes kept per token from forward to backward pass: the input of every layer."""
    return model.layers * model.hidden * width


def layer_bytes(model: ModelSize, width: int = 2) -> int:
    """Bytes per token in one layer, while it is recomputed and in its backward pass.

    The sum of:

    - 5 h: two norms' inputs and outputs, the residual
    - 3 q: before and after rotation, attended
    - 4 k: keys likewise, values
    - 4 f: gate, its activation, up, their product

    In a mixture the last is at an expert's width, and counts for each expert that a token goes
    through, with h more: its output, which the router weighs. Frozen weights need no copy of their
    input.
    """
    h, q, k, f = model.hidden, model.queries, model.keys, model.feed_forward
    fed = model.experts * (h + 4 * model.expert) if model.experts else 4 * f
    return (5 * h + 3 * q + 4 * k + fed) * width


def token_bytes(model: ModelSize, *, checkpointing: bool, width: int = 2) -> float:
    """Bytes per token of a forward and backward pass."""
    layer = layer_bytes(model, width)
    kept = checkpoint_bytes(model, width) if checkpointing else model.layers * layer
    return kept + _UNDER_WAY * layer


def base_bytes(model: ModelSize, quantization: Literal["none", "4bit"]) -> float:
    """Bytes of the trainer's frozen base, whose linear layers may be in 4 bits."""
    if quantization == "none":
        return model.parameters * 2
    return model.linear * FOUR_BITS + (model.parameters - model.linear) * 2


def sharded_bytes(model: ModelSize, ranks: int) -> float:
    """Bytes of the base over several ranks: a part of it, two whole layers, and what is in no
    layer."""
    outside = model.parameters - model.layers * model.largest_layer
    return (model.parameters / ranks + 2 * model.largest_layer + max(0, outside)) * 2


def adapter_part(model: ModelSize, rank: int) -> MemoryPart:
    count = model.lora * rank
    return MemoryPart(f"adapter and Adam: {count / 1e6:.1f} million parameters", count * _ADAPTER)


def cpu_parts(
    model: ModelSize, rank: int, dtype: Literal["float32", "bfloat16"]
) -> list[MemoryPart]:
    """Memory of a CPU that learns and samples, before any sequence is computed."""
    width = 2 if dtype == "bfloat16" else 4
    return [
        MemoryPart(f"base, {dtype}", model.parameters * width),
        adapter_part(model, rank),
        MemoryPart("Python, torch and the gateway", _PROCESS),
    ]


def sequence_bytes(model: ModelSize, dtype: Literal["float32", "bfloat16"]) -> float:
    """Bytes per token of a sequence on a CPU: one and a half in the sampler's cache, and a pass of
    the learner, which takes half of what is free."""
    width = 2 if dtype == "bfloat16" else 4
    kept = 1.5 * model.kv_bytes * width / 2
    return kept + token_bytes(model, checkpointing=True, width=width)


def trainer_reserve(total: int) -> MemoryPart:
    return MemoryPart("CUDA, head and fragments", _TRAINER_RESERVE + _HEAD + _SPARE * total)


def room_for(rank: int) -> int:
    """Rank of vLLM's adapter slots: the next of those it supports."""
    return next((slot for slot in _RANKS if slot >= rank), rank)


def batch_bytes(model: ModelSize, batch: Batch) -> int:
    """Bytes that one step of a server's engine takes while it runs.

    Per token 2 h (residual and norm), 2 q and 2 k (projected, attended) and 3 f (gate, up, their
    product) in bfloat16; per sequence its logits.
    """
    h, q, k, f = model.hidden, model.queries, model.keys, model.feed_forward
    token = 2 * (2 * h + 2 * q + 2 * k + 3 * f)
    return batch.tokens * token + batch.sequences * model.vocabulary * _LOGITS


def sampler_parts(
    model: ModelSize,
    batch: Batch,
    *,
    tensor_parallel: int,
    rank: int,
    adapters: int,
) -> list[MemoryPart]:
    """Memory of a sampler before its KV cache."""
    slots = model.lora * room_for(rank) * 2 * adapters
    return [
        MemoryPart("weights, bfloat16", model.parameters * 2 / tensor_parallel),
        MemoryPart(f"{adapters} adapters of rank {room_for(rank)}", slots),
        MemoryPart("CUDA graphs and batches", _SAMPLER_RESERVE + batch_bytes(model, batch)),
    ]


def total_of(parts: Sequence[MemoryPart]) -> float:
    return sum(part.size for part in parts)
