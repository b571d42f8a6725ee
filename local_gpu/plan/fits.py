"""Check that a layout fits into the memory of its GPUs, and choose the settings that follow.

Rule: arithmetic before anything is loaded. The user's settings stand; the tokens of a pass, the
sharding of the base and the samplers' share of memory are chosen so that it fits. If nothing does,
`cure` names the longest context that does, if an agent can do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Final, Literal

from local_gpu.plan.layout import Gpu, Layout, spans
from local_gpu.plan.memory import (
    DEFAULT_TOKENS,
    GIB,
    SAMPLER_BATCH,
    SAMPLER_MOST,
    MemoryPart,
    ModelSize,
    adapter_part,
    base_bytes,
    sampler_parts,
    sharded_bytes,
    token_bytes,
    total_of,
    trainer_reserve,
)

MAX_ADAPTERS: Final = 4
"""LoRA adapters that a sampler holds: the present version, the last, the next, and a requested
one."""
_SHARD_ABOVE: Final = 0.45
"""Share of a GPU above which an unsharded base leaves too little for activations."""
_MARGIN: Final = 1.1
"""Factor of spare memory for activations: their bytes are an estimate, and over a sharded base a
pass that does not fit ends all ranks."""
_STEP: Final = 256
"""Token counts are rounded to multiples of it."""
_LONG: Final = 32_768
_UNUSED: Final = 0.03
_STREAM_TOKENS: Final = 4096
"""KV cache tokens of one agent's stream beyond the prefix that it shares with others."""
_FEWEST_STREAMS: Final = 16
_SHORTEST: Final = 8192
"""Shortest context worth naming: an agent's system prompt and tools need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Model, context and placement that the GPUs must have memory for."""

    model: ModelSize
    rank: int
    context_tokens: int
    """Prompt and reply together; every pass and every cache must hold one such sequence."""
    quantization: Literal["none", "4bit"] = "none"

    def describe(self) -> str:
        """Describe the model whose memory is added up."""
        adapter = self.model.lora * self.rank / 1e6
        return (
            f"{self.model.parameters / 1e9:.2f} billion parameters, {adapter:.1f} million in an "
            f"adapter of rank {self.rank}, context {self.context_tokens:,}. Estimated, in GiB:"
        )


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory use of each of several equal GPUs; the one with the least free memory counts."""

    who: str
    gpu: Gpu
    parts: tuple[MemoryPart, ...]

    def lines(self) -> list[str]:
        used = [MemoryPart("other programs", self.gpu.used)] if self.gpu.used > GIB / 2 else []
        free = self.gpu.total - self.gpu.used - total_of(self.parts)
        rest = MemoryPart("free" if free >= 0 else "too much", abs(free))
        sums = [f"{p.size / GIB:6.1f}  {p.what}" for p in (*used, *self.parts, rest)]
        return [f"{self.who}, {self.gpu.total / GIB:.1f} GiB:", *sums]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Memory plan of a layout, and the settings chosen for it."""

    shares: tuple[MemoryShare, ...]
    short: tuple[str, ...]
    """Sentences about GPUs that lack memory; () means that all fits."""
    micro_batch_tokens: int
    shard: bool
    sampler_memory: float | None
    """Share of a GPU's memory for each sampler server; None: none is started."""
    sampler_cache: int | None
    """Bytes of KV cache on a GPU that learns, too; None: what is left of its share."""
    learner_memory: float | None
    """Share of a shared GPU for training; None: it is not shared."""
    streams: int
    """Sequences that each sampler server computes at once."""
    longest: int
    """Longest context that would fit."""

    def lines(self) -> list[str]:
        """Lines of a table in GiB."""
        return [line for share in self.shares for line in share.lines()]


def reckon(layout: Layout, gpus: Sequence[Gpu], demand: Demand) -> Fit:
    """Add up the memory of every GPU; `gpus` in the order of the layout's numbers."""
    learns = _Side(layout.train, "learn", gpus)
    shard = _shards(learns.gpu, layout, demand)
    learns.parts += _learner(learns.gpu, len(layout.train), demand, shard=shard)
    sides = [learns]
    per_token = _MARGIN * token_bytes(demand.model, checkpointing=True)
    share = None
    if layout.shared:
        learns.verb = "learns and samples"
        learned = total_of(learns.parts)
        tokens, memory, cached, longest = _together(learns, demand, per_token)
        share = _hundredths((learned + tokens * per_token) / learns.gpu.total)
    else:
        tokens, longest = _alone(learns, demand, per_token)
        memory, cached = None, 0
        if layout.serve:
            samples = _Side(layout.sampling, "sample", gpus)
            sides.append(samples)
            memory, cached = _serves(samples, demand, len(layout.serve[0]))
            longest = min(longest, cached)
    return Fit(
        shares=tuple(MemoryShare(side.who, side.gpu, tuple(side.parts)) for side in sides),
        short=tuple(wrong for side in sides for wrong in side.short),
        micro_batch_tokens=max(1, min(tokens, DEFAULT_TOKENS)),
        shard=shard,
        sampler_memory=memory,
        sampler_cache=cached * demand.model.kv_bytes if layout.shared else None,
        learner_memory=share,
        streams=streams(cached),
        longest=max(0, longest),
    )


def cure(layout: Layout, gpus: Sequence[Gpu], demand: Demand) -> str:
    """Name the settings that would fit: the longest context that does, if an agent can use it."""
    longest = reckon(layout, gpus, demand).longest // 1024 * 1024
    if longest >= _SHORTEST:
        shorter = replace(demand, context_tokens=longest)
        if not reckon(layout, gpus, shorter).short:
            return f"--context-tokens {longest}"
    return (
        "larger GPUs, a smaller model, or a base split over several GPUs (configs/8x80GB-32B.toml)"
    )


class _Side:
    """GPUs with one task, while their memory is added up."""

    def __init__(self, chosen: Sequence[int], verb: str, gpus: Sequence[Gpu]) -> None:
        self._chosen = chosen
        self.verb = verb if len(chosen) > 1 else f"{verb}s"
        self.gpu = min((gpus[i] for i in chosen), key=lambda gpu: gpu.total - gpu.used)
        self.parts: list[MemoryPart] = []
        self.short: list[str] = []

    @property
    def who(self) -> str:
        suffix = ", each" if len(self._chosen) > 1 else ""
        return f"GPU {spans(self._chosen)} {self.verb}{suffix}"

    @property
    def room(self) -> float:
        """Bytes that are still free."""
        return self.gpu.total - self.gpu.used - total_of(self.parts)

    def lacks(self, needs: str) -> None:
        self.short.append(f"GPU {spans(self._chosen)}: {needs}")


def _shards(gpu: Gpu, layout: Layout, demand: Demand) -> bool:
    too_large = base_bytes(demand.model, "none") > _SHARD_ABOVE * gpu.total
    return len(layout.train) > 1 and demand.quantization == "none" and too_large


def _learner(gpu: Gpu, ranks: int, demand: Demand, *, shard: bool) -> list[MemoryPart]:
    """Memory of a training rank, without activations."""
    model = demand.model
    if shard:
        sharded = sharded_bytes(model, ranks)
        base = MemoryPart(
            f"base, bfloat16, over {ranks} ranks (FSDP2), and two layers whole", sharded
        )
    else:
        kept = "4 bits" if demand.quantization == "4bit" else "bfloat16"
        base = MemoryPart(f"base, {kept}", base_bytes(model, demand.quantization))
    return [base, adapter_part(model, demand.rank), trainer_reserve(gpu.total)]


def _activations(tokens: int, per_token: float) -> MemoryPart:
    return MemoryPart(
        f"activations: {tokens:,} tokens, {per_token / 1e6:.2f} MB each, a tenth spare",
        tokens * per_token,
    )


def _most_tokens(demand: Demand) -> int:
    """Most tokens to reserve memory for: a full pass, or one sample as long as the context."""
    return max(DEFAULT_TOKENS, -(-demand.context_tokens // _STEP) * _STEP)


def _cache(tokens: int, per_token: float) -> MemoryPart:
    long = f"{tokens / _LONG:.1f} contexts of 32k"
    return MemoryPart(
        f"KV cache: {tokens:,} tokens, {per_token / 1e3:.0f} kB each, {long}", tokens * per_token
    )


def _alone(side: _Side, demand: Demand, per_token: float) -> tuple[int, int]:
    """Tokens of a pass on a GPU that is not shared, and the most that would fit."""
    most = floor(side.room / per_token)
    tokens = _round(max(0, min(most, _most_tokens(demand))))
    if tokens < demand.context_tokens:
        side.lacks(_too_few("a pass", most, demand.context_tokens))
    side.parts.append(_activations(max(0, tokens), per_token))
    return tokens, most


def _serves(side: _Side, demand: Demand, size: int) -> tuple[float, int]:
    """A server's share of each of its GPUs, and the tokens that it can keep."""
    gpu, per_token = side.gpu, demand.model.kv_bytes / size
    memory = _hundredths(min(SAMPLER_MOST, (gpu.total - gpu.used) / gpu.total - _UNUSED))
    side.parts += _sampler(demand, size)
    tokens = floor((memory * gpu.total - total_of(side.parts)) / per_token)
    if tokens < demand.context_tokens:
        side.lacks(_too_few("the sampler's cache", tokens, demand.context_tokens))
    side.parts.append(_cache(max(0, tokens), per_token))
    return memory, tokens


def streams(cached: int) -> int:
    """Number of sequences that a server with this many tokens of KV cache computes at once.

    vLLM would preempt and recompute any that do not fit; fewer leave the GPU idle. A multiple of 8,
    which CUDA graphs are captured for.
    """
    fitting = cached // _STREAM_TOKENS // 8 * 8
    return max(_FEWEST_STREAMS, min(SAMPLER_BATCH.sequences, fitting))


def _together(side: _Side, demand: Demand, per_token: float) -> tuple[int, float, int, int]:
    """Split one GPU between training and sampling.

    Returns tokens of a pass, the sampler's share and cache, and the longest context. What is left
    is halved; but each must hold one whole sequence, if there is room for both.
    """
    gpu, kept = side.gpu, demand.model.kv_bytes
    sampler = _sampler(demand, 1)
    fixed, context = total_of(sampler), demand.context_tokens
    room = side.room - fixed - gpu.total / 100  # the share is cut to hundredths
    for_passes = max(0.0, min(max(room / 2, context * per_token), room - context * kept))
    tokens = _round(min(floor(for_passes / per_token), _most_tokens(demand)))
    memory = _hundredths((side.room - tokens * per_token) / gpu.total)
    cached = max(0, floor((memory * gpu.total - fixed) / kept))
    longest = floor(room / (per_token + kept))
    side.parts += [_activations(tokens, per_token), *sampler, _cache(cached, kept)]
    if longest < context:
        side.lacks(_too_few("both a pass and the sampler's cache", longest, context))
    elif cached < context:
        side.lacks(_too_few("the sampler's cache", cached, context))
    elif tokens < context:
        side.lacks(_too_few("a pass", tokens, context))
    return tokens, memory, cached, longest


def _sampler(demand: Demand, size: int) -> list[MemoryPart]:
    return sampler_parts(
        demand.model,
        SAMPLER_BATCH,
        tensor_parallel=size,
        rank=demand.rank,
        adapters=MAX_ADAPTERS,
    )


def _too_few(use: str, tokens: int, context: int) -> str:
    if tokens <= 0:
        return f"no room is left for a single token of {use}"
    return f"there is room for {tokens:,} tokens of {use}, and the context is {context:,}"


def _round(tokens: int) -> int:
    return tokens // _STEP * _STEP


def _hundredths(share: float) -> float:
    return floor(share * 100) / 100
