"""A backend that is a table: logits W[previous token, next token] = frozen base + what it learned.

A real language model, with exact scores, gradients and steps, that needs no torch: the fake that
the contract suite holds to every promise of `tinker_claw.policy`. A token is drawn after the one
before it.

Rule: like a service far away, it lets nothing be done after a failed step until a state is loaded.
The table is never written to, so a sampler needs nothing of its trainer. The arithmetic is written
from the formulas (TINKER.md A2) in numpy and float64, and shares nothing with `local_gpu`, so that
the two can be wrong in different ways only.

Shapes: V = vocabulary, M = loss tokens of a datum, K = ids per loss token.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ContextLengthError,
    RequestError,
    SamplerError,
    StepError,
    same_length,
)
from tinker_claw.types import (
    Adam,
    Capabilities,
    Charge,
    Completion,
    Datum,
    Images,
    LossPass,
    SamplingParams,
    StepReport,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    uncharged,
)

BASE_REF = "base"


def base_logits(vocabulary: int) -> Array:
    """Base logits (V, V), always the same, and peaked: a few tokens are likely after each."""
    return np.random.default_rng(0).normal(scale=2.0, size=(vocabulary, vocabulary))


class TableTrainer:
    """Implements `tinker_claw.policy.Trainer`. Another one on the same folder is a restart."""

    def __init__(self, root: Path, *, vocabulary: int, context_tokens: int) -> None:
        self._samplers = root / "samplers"
        self._states = root / "states"
        self._context_tokens = context_tokens
        self._base = base_logits(vocabulary)
        self._weights = Weights.zero(vocabulary)
        self._suspect = False
        self._closed = False

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model="table",
            losses=frozenset(NEEDS),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._context_tokens,
        )

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        self._ready()
        self._suspect = True  # until the step is whole, however it ends
        await asyncio.sleep(0)
        table = log_softmax(self._base + self._weights.delta)
        try:
            self._check(passes)
            with np.errstate(over="ignore", invalid="ignore"):
                report, gradient = _forward_backward(table, passes)
        except AlignmentError as error:
            raise StepError(f"The step is void: {error}.") from error
        self._weights = self._weights.stepped(gradient, adam)
        self._suspect = False
        return report

    async def publish(self) -> TableSampler:
        self._ready()
        ref = _write(self._samplers, "v", delta=self._weights.delta)
        return await self.open(ref)

    async def open(self, ref: str) -> TableSampler:
        if ref == BASE_REF:
            return await self.base()
        delta = _read(self._samplers, ref, "sampler")["delta"]
        return TableSampler(ref, self._base + delta, self._context_tokens)

    async def base(self) -> TableSampler:
        return TableSampler(BASE_REF, self._base, self._context_tokens)

    async def save_state(self, name: str) -> str:
        self._ready()
        return _write(self._states, name, **self._weights.arrays())

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        saved = _read(self._states, ref, "state")
        steps = int(saved.pop("steps"))
        self._weights = Weights(**saved, steps=steps)
        if not moments:
            self._weights = replace(Weights.zero(len(self._base)), delta=self._weights.delta)
        self._suspect = False

    async def export_adapter(self, directory: Path) -> None:
        """Export as LoRA of full rank on a linear layer that reads one-hot tokens: B = delta^T, A =
        1."""
        self._ready()
        _export(directory, self._weights.delta)

    def forget(self) -> None:
        """Do nothing: no prompt is kept."""

    async def aclose(self) -> None:
        """Close the trainer; samplers hold their tables themselves, and go on."""
        self._closed = True

    def _ready(self) -> None:
        if self._closed:
            raise BackendError("The trainer is closed.")
        if self._suspect:
            raise StepError("A step failed and the weights are suspect; load a saved state first.")

    def _check(self, passes: Sequence[LossPass]) -> None:
        if not any(one.datums for one in passes):
            raise StepError("The step has no datums.")
        for one in passes:
            for datum in one.datums:
                check(one.loss, datum, one.config)
                ids = (*datum.tokens, *(i for row in datum.targets for i in row))
                if min(ids) < 0 or max(ids) >= len(self._base):
                    raise StepError(f"A datum has an id outside 0..{len(self._base) - 1}.")
                if len(datum.tokens) > self._context_tokens:
                    raise StepError(f"A datum has more than {self._context_tokens} tokens.")


def _forward_backward(table: Array, passes: Sequence[LossPass]) -> tuple[StepReport, Array]:
    """Return the report of a step and the gradient (V, V) of the sum of all its losses."""
    gradient = np.zeros_like(table)
    losses: list[float] = []
    logprobs: list[tuple[tuple[float, ...], ...]] = []
    for one in passes:
        values, rows = [], []
        for datum in one.datums:
            previous = np.array(datum.tokens[datum.start - 1 : -1])
            sampled = np.array(datum.tokens[datum.start :])[:, None]
            rows.append(tuple(table[previous[:, None], sampled][:, 0].tolist()))
            soft = one.loss == "cross_entropy" and datum.targets
            ids = np.array(datum.targets) if soft else sampled
            z = table[previous[:, None], ids]
            value, slope = loss_and_slope(one.loss, z, datum, one.config)
            gradient += gradient_of(table, previous, ids, slope)
            values.append(value)
        losses.append(math.fsum(values))
        logprobs.append(tuple(rows))
    norm = float(np.linalg.norm(gradient))
    if not math.isfinite(norm + sum(losses)):
        raise StepError(f"The losses are {losses} and the gradient's norm is {norm}.")
    tokens = sum(len(d.tokens) - 1 for p in passes for d in p.datums)
    return StepReport(tuple(losses), tuple(logprobs), norm, tokens), gradient


def _write(folder: Path, name: str, **arrays: Any) -> str:
    """Write a file that appears whole, under a name that was never used; returns the name."""
    folder.mkdir(parents=True, exist_ok=True)
    ref = f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{token_hex(8)}"
    draft = folder / f"{ref}.draft"
    with draft.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(draft, folder / f"{ref}.npz")
    return ref


def _read(folder: Path, ref: str, what: str) -> dict[str, Any]:
    file = folder / f"{ref}.npz"
    if not re.fullmatch("[A-Za-z0-9-]+", ref) or not file.is_file():
        raise BackendError(f"There is no {what} named {ref!r} in {folder}.")
    with np.load(file) as arrays:
        return dict(arrays)


def _export(folder: Path, delta: Array) -> None:
    layer, rank = "base_model.model.table", len(delta)
    tensors = {
        f"{layer}.lora_A.weight": np.eye(rank, dtype=np.float32),
        f"{layer}.lora_B.weight": np.ascontiguousarray(delta.T, dtype=np.float32),
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["table"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


class TableSampler:
    """Implements `tinker_claw.policy.Sampler` over a table that nobody writes to."""

    def __init__(self, ref: str, logits: Array, context_tokens: int) -> None:
        self.ref = ref
        self._logits = logits
        self._logprobs = log_softmax(logits)
        self._context_tokens = context_tokens
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk]:
        self._check(prompt, params)
        self._in_flight += 1
        self._idle.clear()
        random, previous = Random(params.seed), prompt[-1]
        try:
            for left in reversed(range(params.max_tokens)):
                await asyncio.sleep(0)
                token, logprob = draw(self._logits[previous], params, random.random())
                ids, logprobs = likeliest(self._logprobs[previous], params.student_topk)
                stopped = StopReason.STOP if token in params.stop_tokens else None
                reason = stopped or (None if left else StopReason.LENGTH)
                near = ((ids,), (logprobs,)) if ids else ((), ())
                yield TokenChunk((token,), (logprob,), *near, stop_reason=reason)
                if reason is not None:
                    return
                previous = token
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        """Sample n completions. With a seed, completion i is drawn with seed + i."""
        if n < 1:
            raise RequestError(f"n is {n}, not at least 1.", param="n")
        drawn: list[Completion] = []
        for i in range(n):
            own = params if params.seed is None else replace(params, seed=params.seed + i)
            async with aclosing(self.stream(prompt, own)) as stream:
                drawn.append(Completion.collect([chunk async for chunk in stream], params))
        return drawn

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
        charge: Charge = uncharged,
    ) -> TokenLogprobs:
        if not 1 <= start < len(tokens):
            raise AlignmentError(f"logprobs: start {start} outside 1..{len(tokens) - 1}")
        if len(tokens) > self._context_tokens:
            raise ContextLengthError(len(tokens), 0, self._context_tokens)
        if targets is not None:
            same_length("logprobs", tail=tokens[start:], targets=targets)
            if len({len(row) for row in targets}) != 1:
                raise AlignmentError("logprobs: rows of targets differ in length")
        self._check_ids((*tokens, *(i for row in targets or () for i in row)))
        return scores(self._logprobs, tokens, start, targets, top_k)

    async def aclose(self) -> None:
        """Wait for the streams that have begun; one that comes later is served all the same."""
        await self._idle.wait()

    def _check(self, prompt: Tokens, params: SamplingParams) -> None:
        fits = {
            "messages": len(prompt) >= 1,
            "max_tokens": params.max_tokens >= 1,
            "temperature": params.temperature >= 0,
            "top_p": 0 < params.top_p <= 1,
            "top_k": params.top_k is None or params.top_k >= 1,
        }
        for name, fine in fits.items():
            if not fine:
                raise RequestError(f"{name} is out of range.", param=name)
        if len(prompt) + params.max_tokens > self._context_tokens:
            raise ContextLengthError(len(prompt), params.max_tokens, self._context_tokens)
        self._check_ids(prompt)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if min(ids) < 0 or max(ids) >= len(self._logits):
            raise SamplerError(f"There is a token outside 0..{len(self._logits) - 1}.")


Array = NDArray[np.float64]
Ids = NDArray[np.int64]

BOUNDS: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "ppo": ("logprobs", "advantages"),
    "importance_sampling": ("logprobs", "advantages"),
    "cross_entropy": ("weights",),
}
"""Losses, each with the arrays that a datum must have for it."""


def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def loss_and_slope(
    name: str, z: Array, datum: Datum, config: Mapping[str, float]
) -> tuple[float, Array]:
    """A loss, and its derivative by each logprob: (M, K) logprobs -> a sum, and (M, K).

    q = behaviour logprobs, A = advantages, rho = exp(z - q):
    ppo -min(rho A, clip(rho) A), importance_sampling -rho A, cross_entropy -w z.
    """
    if name == "cross_entropy":
        slope = -np.array(datum.weights, dtype=float)
        return float((slope * z).sum()), slope
    advantages = np.array(datum.advantages)[:, None]
    ratio = np.exp(z - np.array(datum.logprobs)[:, None])
    bounds = BOUNDS | dict(config)
    clipped = ratio.clip(bounds["clip_low_threshold"], bounds["clip_high_threshold"])
    if name == "importance_sampling":
        return float(-(ratio * advantages).sum()), -ratio * advantages
    free, bound = ratio * advantages, clipped * advantages
    return float(-np.minimum(free, bound).sum()), np.where(free <= bound, -free, 0.0)


def check(name: str, datum: Datum, config: Mapping[str, float]) -> None:
    """Raise StepError or AlignmentError for an invalid datum, before anything is computed."""
    if name not in NEEDS:
        raise StepError(f"Unknown loss {name!r}; there are {', '.join(NEEDS)}.")
    known = set(BOUNDS) if name == "ppo" else set()
    if unknown := sorted(set(config) - known):
        raise StepError(f"The loss {name} does not know the setting {unknown[0]!r}.")
    bounds = BOUNDS | dict(config)
    if not 0 <= bounds["clip_low_threshold"] <= bounds["clip_high_threshold"]:
        raise StepError(f"The bounds {bounds} are ratios; the low one is at most the high one.")
    if missing := [array for array in NEEDS[name] if not getattr(datum, array)]:
        raise StepError(f"The loss {name} needs the datum's {missing[0]}.")
    if name == "cross_entropy":
        widths = {len(row) for row in datum.weights} | {len(row) for row in datum.targets or [(0,)]}
        if len(widths) != 1:
            raise AlignmentError(f"cross_entropy: rows of targets and weights are {widths} wide")


def gradient_of(table: Array, previous: Ids, ids: Ids, slope: Array) -> Array:
    """(V, V) gradient by the logits, of logprobs of `ids` (M, K) after `previous` (M,).

    d log p(i | row) / d logits[row] = onehot(i) - p.
    """
    gradient = np.zeros_like(table)
    np.add.at(gradient, (previous[:, None], ids), slope)
    np.add.at(gradient, previous, -slope.sum(1, keepdims=True) * np.exp(table[previous]))
    return gradient


@dataclass(frozen=True)
class Weights:
    """Learned weights with Adam's moments; all (V, V)."""

    delta: Array
    """Learned logits, added to the frozen base logits."""
    first: Array
    second: Array
    steps: int

    @classmethod
    def zero(cls, size: int) -> Weights:
        return cls(*(np.zeros((size, size)) for _ in range(3)), steps=0)

    def stepped(self, gradient: Array, adam: Adam) -> Weights:
        """AdamW on the gradient, scaled to a norm of `grad_clip_norm` at most."""
        norm = float(np.linalg.norm(gradient))
        if adam.grad_clip_norm > 0:
            gradient = gradient * min(1.0, adam.grad_clip_norm / (norm or 1.0))
        steps = self.steps + 1
        first = adam.beta1 * self.first + (1 - adam.beta1) * gradient
        second = adam.beta2 * self.second + (1 - adam.beta2) * gradient**2
        scale = np.sqrt(second / (1 - adam.beta2**steps)) + adam.eps
        move = first / (1 - adam.beta1**steps) / scale + adam.weight_decay * self.delta
        return Weights(self.delta - adam.learning_rate * move, first, second, steps)

    def moved_to(self, delta: Array) -> Weights:
        return replace(self, delta=delta)

    def arrays(self) -> dict[str, Any]:
        return {**vars(self)}


def shaped(logits: Array, params: SamplingParams) -> Array:
    """The logprobs (V,) that a token is drawn from; at temperature 0 the untempered ones."""
    if params.temperature == 0:
        return log_softmax(logits)
    logprobs = log_softmax(logits / params.temperature)
    if params.top_k is not None:
        least = np.sort(logprobs)[-min(params.top_k, len(logprobs))]
        logprobs = log_softmax(np.where(logprobs < least, -np.inf, logprobs))
    if params.top_p < 1:
        order = np.argsort(-logprobs, kind="stable")
        chances = np.exp(logprobs[order])
        dropped = order[np.cumsum(chances) - chances >= params.top_p]
        logprobs[dropped] = -np.inf
        logprobs = log_softmax(logprobs)
    return logprobs


def draw(logits: Array, params: SamplingParams, uniform: float) -> tuple[int, float]:
    """A token and its logprob, by inversion of the cumulative distribution at `uniform`."""
    logprobs = shaped(logits, params)
    if params.temperature == 0:
        token = int(logits.argmax())
    else:
        cumulative = np.exp(logprobs).cumsum()
        token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return token, float(logprobs[token])


def scores(
    table: Array,
    tokens: Tokens,
    start: int,
    targets: Sequence[Sequence[int]] | None,
    top_k: int,
) -> TokenLogprobs:
    """Logprobs of the tokens from `start` on, of the targets, and of the likeliest."""
    rows = table[list(tokens[start - 1 : -1])]
    named = [] if targets is None else list(zip(rows, targets, strict=True))
    near = [likeliest(row, top_k) for row in rows] if top_k else []
    return TokenLogprobs(
        start=start,
        logprobs=tuple(float(r[t]) for r, t in zip(rows, tokens[start:], strict=True)),
        targets=tuple(tuple(row[list(ids)].tolist()) for row, ids in named),
        topk_ids=tuple(ids for ids, _ in near),
        topk_logprobs=tuple(logprobs for _, logprobs in near),
    )


def likeliest(logprobs: Array, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The k likeliest ids of (V,), descending, with their logprobs."""
    ids = np.argsort(-logprobs, kind="stable")[:k]
    return tuple(ids.tolist()), tuple(logprobs[ids].tolist())
