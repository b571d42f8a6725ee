"""The arithmetic of the table model: log-softmax, losses with their gradients, AdamW, a draw.

Rule: written from the formulas (TINKER.md A2) in numpy and float64, and shares nothing with
`local_gpu`, so that the two can be wrong in different ways only.

Shapes: V = vocabulary, M = loss tokens of a datum, K = ids per loss token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Adam, Datum, SamplingParams

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

BOUNDS: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "ppo": ("logprobs", "advantages"),
    "importance_sampling": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
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
    ppo -min(rho A, clip(rho) A), importance_sampling -rho A, cispo -clip(rho) A z with clip(rho)
    held constant, cross_entropy -w z.
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
    if name == "cispo":
        slope = -clipped * advantages
        return float((slope * z).sum()), slope
    free, bound = ratio * advantages, clipped * advantages
    return float(-np.minimum(free, bound).sum()), np.where(free <= bound, -free, 0.0)


def check(name: str, datum: Datum, config: Mapping[str, float]) -> None:
    """Raise StepError or AlignmentError for an invalid datum, before anything is computed."""
    if name not in NEEDS:
        raise StepError(f"Unknown loss {name!r}; there are {', '.join(NEEDS)}.")
    known = set(BOUNDS) if name in ("ppo", "cispo") else set()
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


def likeliest(logprobs: Array, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The k likeliest ids of (V,), descending, with their logprobs."""
    ids = np.argsort(-logprobs, kind="stable")[:k]
    return tuple(ids.tolist()), tuple(logprobs[ids].tolist())
