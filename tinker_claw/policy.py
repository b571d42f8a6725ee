"""The interface that a backend must offer, and the holder of the policy that serves.

Rule: a policy version is immutable. To let one serve is one assignment here; requests in flight
keep the sampler that they read. Nothing in this file knows any backend.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tinker_claw.errors import AlignmentError, ContextLengthError, RequestError, same_length
from tinker_claw.types import (
    Adam,
    Capabilities,
    Charge,
    Completion,
    Images,
    LossPass,
    PolicyVersion,
    SamplingParams,
    StepReport,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    uncharged,
)

KEPT_DAYS = 14
"""Days, of those on which something was saved, of which the last state and sampler stay."""
KEPT_STATES, KEPT_SAMPLERS = 8, 32
"""How many of the newest stay besides."""
_DAY_S = 86_400


def to_keep(written: Mapping[str, float], newest: int) -> set[str]:
    """Return which states or samplers of a run stay: the first, the last of each day, and the
    newest, so that a bad week can be undone as well as a bad hour.

    Args:
        written: time at which each was written, in seconds since 1970; a day is one of UTC.
        newest: how many of the newest stay.
    """
    order = sorted(written, key=lambda name: (written[name], name))
    last_of_day = {written[name] // _DAY_S: name for name in order}
    days = sorted(last_of_day)[-KEPT_DAYS:]
    return {*order[:1], *(last_of_day[day] for day in days), *order[-newest:]}


def check_sampling(prompt: Tokens, params: SamplingParams, context_tokens: int) -> None:
    """Raise RequestError or ContextLengthError for what no sampler can serve. Servers would cut the
    reply short without an error, or crash."""
    p = params
    rules = (
        ("messages", len(prompt) >= 1, "The prompt is empty; it needs at least one token."),
        ("max_tokens", p.max_tokens >= 1, f"max_tokens is {p.max_tokens}, not at least 1."),
        (
            "temperature",
            0 <= p.temperature < math.inf,
            f"temperature is {p.temperature:g}, not in [0, inf).",
        ),
        ("top_p", 0 < p.top_p <= 1, f"top_p is {p.top_p:g}, not in (0, 1]."),
        ("top_k", p.top_k is None or p.top_k >= 1, f"top_k is {p.top_k}, not at least 1."),
    )
    for name, holds, sentence in rules:
        if not holds:
            raise RequestError(sentence, param=name)
    if len(prompt) + p.max_tokens > context_tokens:
        raise ContextLengthError(len(prompt), p.max_tokens, context_tokens)


def check_scoring(
    tokens: Tokens, start: int, targets: Sequence[Sequence[int]] | None, context_tokens: int
) -> None:
    """Raise AlignmentError or ContextLengthError for what `Sampler.logprobs` cannot score."""
    if not 1 <= start < len(tokens):
        raise AlignmentError(f"logprobs: start {start} outside 1..{len(tokens) - 1}")
    if len(tokens) > context_tokens:
        raise ContextLengthError(len(tokens), 0, context_tokens)
    if targets is not None:
        same_length("logprobs", tail=tokens[start:], targets=targets)
        if len({len(row) for row in targets}) != 1:
            raise AlignmentError("logprobs: rows of targets differ in length")


@runtime_checkable
class Sampler(Protocol):
    """Immutable weights that sample and score."""

    ref: str
    """Name of the weights that survives the process: `Trainer.open(ref)` opens them again."""

    def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncIterator[TokenChunk]:
        """Yield tokens as they are sampled; closing the iterator aborts the generation.

        Args:
            charge: takes what a service bills for it, here and in the other methods.

        Raises:
            SamplerError: the generation failed.
        """
        ...

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        """Draw n completions of one prompt, computing the prompt once where possible."""
        ...

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
        """Score `tokens[start:]`, and at each of those positions the ids in `targets` [M, k].

        Raises, never pads.

        Args:
            images: in `tokens`; only where `Capabilities.trains_images` is true.
        """
        ...

    async def aclose(self) -> None:
        """Free the resources that serving needs, once the requests in flight have ended.

        The ref stays valid, and a late request is still served.
        """
        ...


@runtime_checkable
class Trainer(Protocol):
    """LoRA weights that learn."""

    async def capabilities(self) -> Capabilities: ...

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        """Add up the gradients of all passes and take one optimizer step.

        Raises:
            StepError: the step is void and the weights are suspect; load a committed state.
        """
        ...

    async def publish(self) -> Sampler:
        """Freeze the present weights as a new, persistent sampler."""
        ...

    async def open(self, ref: str) -> Sampler:
        """Open a sampler published earlier, perhaps by another process."""
        ...

    async def base(self) -> Sampler:
        """Return the frozen base weights: judge and teacher."""
        ...

    async def save_state(self, name: str) -> str:
        """Save weights and optimizer; return a ref for `load_state`."""
        ...

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        """Load a saved state; without `moments` the optimizer starts anew."""
        ...

    async def export_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format."""
        ...

    def forget(self) -> None:
        """Forget the prompts that are kept to be computed again under a new version."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy version with the sampler that serves it."""

    version: PolicyVersion
    sampler: Sampler


@dataclass(slots=True, eq=False)
class PolicyHolder:
    """Holder of the serving policy. A request reads `current` once and keeps it to its end."""

    newest: Policy
    """Policy from which learning goes on; it answers unless another is pinned."""
    pinned: Policy | None = None
    """Policy that answers in place of the newest."""

    @property
    def current(self) -> Policy:
        """Policy that answers."""
        return self.pinned or self.newest

    def swap(self, policy: Policy) -> Policy:
        """Continue with `policy`; return the replaced one for its owner to close."""
        if policy.version.id <= self.newest.version.id:
            raise ValueError(
                f"version {policy.version.id} is not newer than {self.newest.version.id}"
            )
        replaced, self.newest = self.newest, policy
        return replaced

    def reopen(self, lost: Policy, reopened: Policy) -> None:
        """Continue with another sampler of the same weights in place of `lost`, the newest policy
        or the pinned one, which its owner then closes."""
        if lost.version.id != reopened.version.id or lost not in (self.newest, self.pinned):
            raise ValueError(f"version {reopened.version.id} neither is the newest nor pinned")
        if self.pinned is lost:
            self.pinned = reopened
        else:
            self.newest = reopened

    def pin(self, policy: Policy | None) -> Policy | None:
        """Let `policy` answer, with a sampler of its own, or the newest again (None); return the
        one that was pinned, for its owner to close."""
        replaced, self.pinned = self.pinned, policy
        return replaced
