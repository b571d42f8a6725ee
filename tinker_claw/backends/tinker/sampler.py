"""One version's weights at the service: sampling and scoring.

Rule: weights never change under a sampler. A session that the service has lost is renewed once per
request, transparently; the ids and logprobs that come back are passed on unchanged.

A refusal is about the request, or about the weights. Only missing weights refuse the smallest
request, one token after one token, so that is asked next, by a new client. If it is answered, the
refusal is a `RequestError`. If it is refused, too, the weights are gone (`GoneError`): those of a
published version where the base model answers, else the base model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.convert import (
    candidates,
    completion,
    model_input,
    named,
    named_ids,
    tail,
)
from tinker_claw.backends.tinker.failures import Fault, failing, fault_of, outage, reason
from tinker_claw.backends.tinker.session import ServiceSession
from tinker_claw.errors import (
    BackendError,
    GoneError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.policy import check_sampling, check_scoring
from tinker_claw.types import (
    Charge,
    Completion,
    Images,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    Usage,
    uncharged,
)

T = TypeVar("T")

BASE_REF = "base"
_SMALLEST: Tokens = (1,)
_ONE = sdk.SamplingParams(max_tokens=1, temperature=1.0)
"""Parameters of one token."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Forms of scoring that this server supports, by the probe."""

    last_n: bool = True
    """It can score the end of a prompt only, and take the rest from its cache."""
    sparse: bool = True
    """It takes the ids to score as compressed sparse rows."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request to sample, and who pays it."""

    prompt: sdk.ModelInput
    n: int
    params: sdk.SamplingParams
    options: dict[str, Any]
    charge: Charge


class TinkerSampler:
    """Implements `tinker_claw.policy.Sampler`. The ref is a path of the service's, or `base`."""

    def __init__(
        self,
        ref: str,
        base_model: str,
        session: ServiceSession,
        *,
        context_tokens: int,
        timeout_s: float,
        scoring: Callable[[], Scoring],
        closed: Callable[[str], None],
    ) -> None:
        self.ref = ref
        self._base_model = base_model
        self._session = session
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s
        self._scoring = scoring
        self._closed = closed
        self._client: tinker.SamplingClient | None = None
        self._client_of: tinker.ServiceClient | None = None
        self._opening = asyncio.Lock()
        self._checking = asyncio.Lock()
        self._weights_gone = False
        """Whether the weights were gone when last checked, and nothing was answered since."""
        self._asking = set[asyncio.Task[sdk.SampleResponse]]()
        self._waiting = set[asyncio.Future[sdk.SampleResponse]]()
        """Futures of requests that a caller still waits for."""

    async def connect(self) -> None:
        """Make sure that the service has these weights.

        Raises:
            BackendError: it has not.
            OutageError: it cannot be asked at the moment.
        """
        with failing(f"opening the sampler {self.ref!r}", lost=True):
            await self._twice(self._connected)

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk]:
        """Yield the whole reply as one chunk: the service does not stream."""
        (done,) = await self.sample(prompt, params, charge=charge)
        yield TokenChunk(
            tokens=done.tokens,
            logprobs=done.logprobs,
            topk_ids=done.topk_ids,
            topk_logprobs=done.topk_logprobs,
            stop_reason=done.stop_reason,
            cached_tokens=done.cached_tokens,
        )

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        """Draw n completions in one request, which computes and bills the prompt once."""
        check_sampling(prompt, params, self._context_tokens)
        settings = sdk.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            seed=params.seed,
            stop=list(params.stop_tokens) or None,
        )
        options = {"topk_sample_logprobs": params.student_topk}
        response = await self._request(
            _Ask(model_input(prompt, params.images), n, settings, options, charge)
        )
        if len(response.sequences) != n:
            raise SamplerError(f"Tinker gave {len(response.sequences)} completions, not {n}.")
        # The service has no salt: all users of the account share one cache.
        cached = 0 if params.cache_salt else response.prompt_cache_hit_tokens
        return [completion(sequence, params, cached) for sequence in response.sequences]

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
        """Score in one request with one sampled token, which is thrown away."""
        check_scoring(tokens, start, targets, self._context_tokens)
        rows, scoring = len(tokens) - start, self._scoring()
        wanted = None
        if targets is not None:
            table = np.asarray(targets, dtype=np.int64)
            wanted = named_ids(table, before=start - 1, sparse=scoring.sparse)
        options = {
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": top_k,
            "target_prompt_logprobs": wanted,
            "prompt_logprobs_last_n": rows if scoring.last_n else None,
        }
        response = await self._request(_Ask(model_input(tokens, images), 1, _ONE, options, charge))
        own = tail(response.prompt_logprobs_np, len(tokens), rows, "prompt logprobs")
        scored = response.target_prompt_logprobs
        ours = () if targets is None else named(scored, rows, len(targets[0])).tolist()
        likeliest = response.topk_prompt_logprobs_np if top_k else None
        ids, best = candidates(likeliest, rows, top_k) if top_k else ((), ())
        return TokenLogprobs(
            start=start,
            logprobs=tuple(own.tolist()),
            targets=tuple(map(tuple, ours)),
            topk_ids=ids,
            topk_logprobs=best,
        )

    @property
    def _name(self) -> str:
        """Last part of the path, as a short name."""
        return self.ref.rstrip("/").rsplit("/", 1)[-1] or self.ref

    async def aclose(self) -> None:
        while self._waiting:
            await asyncio.wait(self._waiting)
        self._closed(self.ref)

    async def _request(self, ask: _Ask) -> sdk.SampleResponse:
        """Make a request, in a new session if the service has lost the old one; billed.

        A caller that is cancelled cancels it at the service, too. Where the service does not offer
        that it samples on, so its answer is awaited and billed.
        """
        asking = asyncio.create_task(self._billed(ask))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        waiting = asyncio.shield(asking)
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        try:
            return await waiting
        except asyncio.CancelledError:
            client = self._client
            if client and client.holder.get_client_dynamic_config().sample_cancel_enabled:
                asking.cancel()
            raise

    async def _billed(self, ask: _Ask) -> sdk.SampleResponse:
        tokens = ask.prompt.length
        ask.charge(Usage(prefill=tokens))
        try:
            response = await self._answered(ask)
        except OutageError:
            ask.charge(Usage(prefill=-tokens))  # it was not computed
            raise
        self._weights_gone = False
        hits = response.prompt_cache_hit_tokens
        # All but the first of n completions find the prompt in the cache, at the cache's price.
        ask.charge(
            Usage(
                prefill=-hits,
                cached=hits + (ask.n - 1) * tokens,
                sampled=sum(len(sequence.tokens) for sequence in response.sequences),
            )
        )
        return response

    async def _answered(self, ask: _Ask) -> sdk.SampleResponse:
        try:
            try:
                return await self._twice(lambda: self._once(ask))
            except Exception as error:
                if fault_of(error) is not Fault.ASKED:
                    raise
                await self._check_weights(error, ask.charge)
                return await self._once(ask)  # by a new client
        except GoneError as error:
            await self._check_weights(error, ask.charge)
            raise
        except BackendError:
            raise
        except Exception as error:
            why, fault = reason(error), fault_of(error)
            if fault is Fault.ASKED:
                raise RequestError(f"The service refuses the request: {why}.") from error
            if fault is Fault.BROKE:
                raise SamplerError(f"Tinker could not sample from {self._name}: {why}.") from error
            raise outage(f"a request to the sampler {self._name}", why) from error

    async def _check_weights(self, refusal: Exception, charge: Charge) -> None:
        """Check after a refusal whether the weights are there.

        Raises:
            GoneError: they are gone.
            SamplerError: the base model is gone, so nothing is known of these weights.
            OutageError: the service cannot be asked at the moment.
        """
        async with self._checking:
            if not self._weights_gone:
                self._client = None  # a new one may find them
                self._weights_gone = await self._refuses(self.ref, charge)
                published = self.ref != BASE_REF
                if self._weights_gone and published and await self._refuses(BASE_REF, charge):
                    self._weights_gone = False
                    raise SamplerError(
                        f"Tinker refuses the base model {self._base_model!r} and the sampler "
                        f"{self.ref!r}: {reason(refusal)}."
                    ) from refusal
        if self._weights_gone:
            raise self._gone_error(refusal) from refusal

    def _gone_error(self, refusal: Exception) -> GoneError:
        base = f"the base model {self._base_model!r}"
        what = base if self.ref == BASE_REF else f"the sampler {self.ref!r}"
        return GoneError(f"Tinker no longer has {what}: {reason(refusal)}.")

    async def _refuses(self, ref: str, charge: Charge) -> bool:
        """Return whether the service refuses the smallest request to these weights."""
        try:
            client = await self._new_client(ref)
            smallest = client.sample(model_input(_SMALLEST, ()), 1, _ONE)
            await self._session.wait(smallest, self._timeout_s)
        except Exception as error:
            if fault_of(error) is Fault.AWAY:
                raise outage("looking for the weights", reason(error)) from error
            return True
        charge(Usage(prefill=len(_SMALLEST), sampled=1))
        return False

    async def _twice(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry once if the service has lost the session or the weights in it."""
        service = self._session.service
        try:
            return await call()
        except Exception as error:
            if fault_of(error) is not Fault.LOST:
                raise
            if self._weights_gone:
                raise self._gone_error(error) from error
        self._client = None
        if not await self._lives():
            await self._session.renew(service)
        try:
            return await call()
        except Exception as error:
            if fault_of(error) is Fault.LOST:  # in a session that lives
                raise self._gone_error(error) from error
            raise

    async def _lives(self) -> bool:
        """Return whether the session still serves the base model."""
        try:
            await self._new_client(BASE_REF)
        except Exception as error:
            if fault_of(error) is Fault.AWAY:
                raise
            return False
        return True

    async def _once(self, ask: _Ask) -> sdk.SampleResponse:
        client = await self._connected()
        sampling = client.sample(ask.prompt, ask.n, ask.params, **ask.options)
        return await self._session.wait(sampling, self._timeout_s)

    async def _connected(self) -> tinker.SamplingClient:
        """The client in the present session; concurrent requests share one."""
        async with self._opening:
            if self._client is None or self._client_of is not self._session.service:
                service = self._session.service
                self._client = await self._new_client(self.ref)
                self._client_of = service
            return self._client

    async def _new_client(self, ref: str) -> tinker.SamplingClient:
        """Make a client of these weights."""
        path, base = (None, self._base_model) if ref == BASE_REF else (ref, None)
        return await self._session.ask(
            lambda service: service.create_sampling_client(model_path=path, base_model=base),
            self._timeout_s,
        )
