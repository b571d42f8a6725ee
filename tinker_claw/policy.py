"""The narrow waist: what a backend must offer, and the holder of the policy that serves.

Rule: a policy version is immutable. Publishing one is a new name and one assignment here; requests
in flight keep the sampler that they read. Nothing in this file knows any backend.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tinker_claw.types import (
    Adam,
    Capabilities,
    Completion,
    LossPass,
    PolicyVersion,
    SamplingParams,
    StepReport,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)


@runtime_checkable
class Sampler(Protocol):
    """Immutable weights that sample and score."""

    ref: str
    """Survives the process: `Trainer.open(ref)` gives these weights again."""

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncIterator[TokenChunk]:
        """Yield tokens as they are sampled; closing the iterator aborts the generation.

        Raises:
            SamplerError: the generation failed.
        """
        ...

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        """Draw n completions of one prompt, computing the prompt once where possible."""
        ...

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        """Score `tokens[start:]`, and at each of those positions the ids in `targets` [M, k].

        Raises, never pads.
        """
        ...

    async def aclose(self) -> None:
        """Free what serving needs once requests in flight have ended. The ref stays valid."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """LoRA weights that learn."""

    async def capabilities(self) -> Capabilities: ...

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        """Add up the gradients of all passes and take one optimizer step.

        Raises:
            StepError: the step is void and the weights are suspect; load a committed state.
        """
        ...

    async def publish(self) -> Sampler:
        """Freeze the present weights as a new, persistent sampler."""
        ...

    async def open(self, ref: str) -> Sampler:
        """A sampler published earlier, perhaps by another process."""
        ...

    async def base(self) -> Sampler:
        """The frozen base weights: judge and teacher."""
        ...

    async def save_state(self, name: str) -> str:
        """Persist weights and optimizer; returns a ref for `load_state`."""
        ...

    async def load_state(self, ref: str) -> None: ...

    async def export_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A version together with the sampler that serves it."""

    version: PolicyVersion
    sampler: Sampler


class PolicyHolder:
    """Holds the policy that answers. A request takes a lease and keeps that policy to its end."""

    def __init__(self, policy: Policy) -> None:
        self._current = policy
        self._leases: Counter[int] = Counter()
        self._returned = asyncio.Condition()

    @property
    def current(self) -> Policy:
        return self._current

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[Policy]:
        """The current policy, whose sampler stays usable while the lease is held."""
        policy = self._current
        self._leases[policy.version.id] += 1
        try:
            yield policy
        finally:
            self._leases[policy.version.id] -= 1
            async with self._returned:
                self._returned.notify_all()

    async def drained(self, policy: Policy) -> None:
        """Wait until nobody holds a lease of this policy. It must not be the current one."""
        async with self._returned:
            await self._returned.wait_for(lambda: not self._leases[policy.version.id])
        del self._leases[policy.version.id]

    def swap(self, policy: Policy) -> Policy:
        """Serve `policy` from now on; returns the one it replaces, for its owner to close."""
        if policy.version.id <= self._current.version.id:
            raise ValueError(
                f"version {policy.version.id} is not newer than {self._current.version.id}"
            )
        replaced, self._current = self._current, policy
        return replaced
