"""Sample the tokens of one reply, with retries and stand-ins.

Rule: agents rewrite the user's message when they retry themselves, so failures are retried here. A
reply that breaks off is continued from the prompt and all that was sampled: no token is drawn
twice, and the client sees one reply. The versions that sampled are recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from tinker_claw.errors import BackendError, GoneError, OutageError, RequestError, SamplerError
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.fallback import PATIENCE_S, Retries, StandIn
from tinker_claw.gateway.request import Job
from tinker_claw.policy import Sampler
from tinker_claw.telemetry import log
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Charge, Completion, SamplingParams, StopReason, TokenChunk, Tokens

Take = Callable[[TokenChunk], Awaitable[bool]]
"""Takes a chunk, and returns whether to sample on."""


class Sampling:
    """The sampling of one job."""

    def __init__(self, deps: GatewayDeps, job: Job, charge: Charge) -> None:
        """`charge`: takes what a service bills for it."""
        self._serving = deps.serving
        self._job = job
        self._charge = charge
        self.version = job.version
        """The version that answers."""
        self._chunks: list[TokenChunk] = []
        self._tokens: list[int] = []
        self._token_at = 0.0
        """time.monotonic() of the last token."""
        self._stand_in: StandIn | None = None
        """Stand-in that samples now; None: the job's own version."""
        self._gave: list[StandIn | None] = []
        """What has sampled tokens, in order; None: the job's own version."""
        self.fallback: str | None = None
        """Why a stand-in was asked; None: none was."""

    @property
    def begun(self) -> bool:
        """Return whether a token has been sampled."""
        return bool(self._tokens)

    def unfit_because(self) -> TurnRefusal | None:
        """Return why the tokens are not those of one version of the policy; None: they are."""
        if len(self._gave) > 1:
            names = [f"v{self._job.version}" if s is None else s.name for s in self._gave]
            return TurnRefusal(Reason.TWO_POLICIES, " and ".join(names))
        only = self._gave[0] if self._gave else None
        return TurnRefusal(Reason.BASE_MODEL) if only is not None and only.base else None

    def completion(self, *, aborted: bool = False, cut: bool = False) -> Completion:
        """Return everything that was sampled as one completion."""
        done = Completion.collect(self._chunks, self._job.params, aborted=aborted, cut=cut)
        # A continued reply may have had its own first tokens cached as well.
        return replace(done, cached_tokens=min(done.cached_tokens, len(self._job.prompt.tokens)))

    async def run(self, take: Take) -> None:
        """Sample to the end, handing every chunk to `take` as it comes: from the job's own version,
        with retries, and then from its stand-ins.

        Raises:
            BackendError: none could answer; it is the error of the job's own version.
        """
        serving, retries = self._serving, None
        while True:
            began = time.monotonic()
            try:
                with serving.outages.watching("serving"):
                    await self._attempt(self._job.sampler, take)
                serving.outages.answers(self._job.version)
                return
            except (SamplerError, OutageError) as error:
                if self._over():
                    return
                if retries is None:
                    retries = Retries(began + PATIENCE_S, serving.waits, serving.retries)
                if self._token_at > began:
                    retries.went_well(self._token_at - began)
                wait_s = retries.wait_s(error)
                refused = serving.outages.refused
                is_refused = refused is not None and refused.ref == self._job.sampler.ref
                if is_refused or isinstance(error, GoneError):
                    wait_s = None  # asked once, in case it is there again
                if wait_s is not None and await self._waited(error, wait_s):
                    continue
                if serving.outages.closing or not await self._replaced(error, take):
                    raise
                return

    def _refused(self, error: SamplerError | OutageError, by: str | None) -> None:
        """Report that the version could not answer, and what did instead."""
        if by is not None or isinstance(error, SamplerError):
            job = self._job
            self._serving.outages.refuses(job.version, job.sampler.ref, error, by)

    async def _waited(self, error: SamplerError | OutageError, seconds: float) -> bool:
        """Wait before a retry; return whether to retry."""
        outages = self._serving.outages
        if outages.closing:
            return False
        if isinstance(error, OutageError):  # `outages` has logged it, once for all requests
            await outages.rest("serving", seconds)
            return not outages.closing
        sampled = len(self._tokens)
        log.warning("sampler.failed", error=str(error), sampled=sampled, again_in_s=seconds)
        await asyncio.sleep(seconds)
        return True

    async def _replaced(self, error: SamplerError | OutageError, take: Take) -> bool:
        """Ask each stand-in once; return whether one has answered."""
        job = self._job
        if job.by_name:
            return False  # another version's answer would be a wrong answer
        for stand_in in self._serving.stand_ins(job.version):
            self._stand_in, self.version = stand_in, stand_in.version
            self.fallback = f"v{job.version} failed: {error}"
            limit_s = self._serving.stand_in_s if isinstance(error, OutageError) else None
            try:
                await self._ask(stand_in, limit_s, take)
            except (BackendError, RequestError, TimeoutError) as failure:
                if self._over():
                    return True
                cause = f"{type(failure).__name__}: {failure}"
                log.warning("fallback.failed", by=stand_in.name, error=cause)
                continue
            log.warning("fallback.answered", version=job.version, by=stand_in.name)
            self._refused(error, stand_in.name)
            return True
        self._refused(error, None)
        return False

    async def _ask(self, stand_in: StandIn, limit_s: float | None, take: Take) -> None:
        """Raises TimeoutError when no token has come in time; SamplerError as any other failure."""
        try:
            async with asyncio.timeout(limit_s) as clock:

                async def take_chunk(chunk: TokenChunk) -> bool:
                    clock.reschedule(None)
                    return await take(chunk)

                await self._attempt(await stand_in.open(), take_chunk)
        except LookupError as error:
            raise SamplerError(f"There is no version {stand_in.version}.") from error

    async def _attempt(self, sampler: Sampler, take: Take) -> None:
        chunks = sampler.stream(*self._rest(), self._charge)
        try:
            async for chunk in chunks:
                self._chunks.append(chunk)
                if chunk.tokens:
                    self._tokens.extend(chunk.tokens)
                    self._token_at = time.monotonic()
                    if not self._gave or self._gave[-1] is not self._stand_in:
                        self._gave.append(self._stand_in)
                if not await take(chunk):
                    return
        finally:
            # At once, however the loop ends: this aborts the generation.
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        if not self._over():
            raise SamplerError("The sampler's stream ended without a stop reason.")

    def _rest(self) -> tuple[Tokens, SamplingParams]:
        """Return the prompt with the tokens so far, and the parameters for the rest."""
        prompt, sampled = self._job.prompt.tokens, len(self._tokens)
        # Not in the job's own params, which are kept with the turn.
        caller = self._job.caller
        params = replace(
            self._job.params,
            cache_salt=caller.cache_salt,
            person=not caller.episode,
            images=self._job.images,
        )
        if not sampled:
            return prompt, params
        # The seed has been used for the first tokens; the same draws again would not be random.
        seed = None if params.seed is None else params.seed ^ sampled
        rest = replace(params, max_tokens=params.max_tokens - sampled, seed=seed)
        return (*prompt, *self._tokens), rest

    def _over(self) -> bool:
        """Return whether nothing is left to sample, even without an end from the sampler."""
        if not self._chunks or self._chunks[-1].stop_reason is not None:
            return bool(self._chunks)
        stopped = self._tokens[-1:] and self._tokens[-1] in self._job.params.stop_tokens
        if not stopped and len(self._tokens) < self._job.params.max_tokens:
            return False
        reason = StopReason.STOP if stopped else StopReason.LENGTH
        self._chunks.append(TokenChunk((), (), stop_reason=reason))
        return True
