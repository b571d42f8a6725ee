"""Probe what a server supports with two tiny requests: a forward pass, and a scored sample.

Servers that speak Tinker's API differ: some have no [N, K] targets, or flatten them, no scores at
given ids, no candidates. Where the richest form of a request is refused or answered in another
shape, a plainer one is tried. `methods.require` compares the answer with what the method needs.

Rule: a refusal, or an answer of another shape, means that the feature is missing; an outage does
not, and is raised.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import numpy as np
import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.convert import (
    candidates,
    loss_of,
    named,
    named_ids,
    rows_of,
    tail,
    to_sdk,
)
from tinker_claw.backends.tinker.failures import (
    Fault,
    failing,
    fault_of,
    lost_at_the_service,
    outage,
    reason,
)
from tinker_claw.backends.tinker.sampler import Scoring
from tinker_claw.backends.tinker.session import ServiceSession
from tinker_claw.errors import AlignmentError, SamplerError
from tinker_claw.tasks import together
from tinker_claw.types import Capabilities, Datum, LossName, LossPass, PlacedImage

T = TypeVar("T")

_TOKENS = (1, 2, 3, 4)
_WIDE = (1, 2)
_K = len(_WIDE)
_IDS = np.asarray([_WIDE] * (len(_TOKENS) - 2), dtype=np.int64)
# A white square of 32 x 32 pixels, as PNG.
_IMAGE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKUlEQVR4nO3NMQEAAAjDMMC/52ECvlRA00nqs3m9"
    "AwAAAAAAAAAAgMMWx/EDPS4YA2MAAAAASUVORK5CYII="
)
_TABLE = Datum(_TOKENS, start=2, targets=(_WIDE,) * 2, weights=((0.5, -0.5),) * 2)
_PLAIN = Datum(_TOKENS, start=2, logprobs=(-1.0,) * 2, advantages=(1.0,) * 2)


@dataclass(frozen=True, slots=True)
class Abilities:
    """Features that the server supports, and the forms of requests that it takes."""

    can: Capabilities
    sparse_targets: bool
    """[N, K] targets may go as compressed sparse rows."""
    scoring: Scoring


async def probe(
    training: tinker.TrainingClient,
    sampling: tinker.SamplingClient,
    session: ServiceSession,
    deadline_s: float,
    *,
    model: str,
    context_tokens: int,
    images: bool = False,
) -> Abilities:
    """Ask for a forward pass and for a scored sample, at once.

    Args:
        model, context_tokens: see `Capabilities`.
        images: the model may take images, so ask with one, too.

    Raises:
        OutageError: the service does not answer.
        BackendError: it cannot sample.
    """
    server = _Server(training, sampling, session, deadline_s, images)
    questions: list[Coroutine[Any, Any, Any]] = [server.trains(), server.samples(), server.sees()]
    (trains, table, sparse_table), (answer, sparse), (sees, trains_images) = await together(
        questions
    )
    can = Capabilities(
        model=model,
        losses=frozenset(get_args(LossName)) if trains else frozenset(),
        two_d_targets=table,
        student_topk=_usable(answer, _has_candidates),
        context_tokens=context_tokens,
        target_logprobs=_usable(answer, _named),
        sees=sees,
        trains_images=trains_images,
    )
    scoring = Scoring(last_n=sparse and _usable(answer, _tail), sparse=sparse)
    return Abilities(can, sparse_table, scoring)


@dataclass(frozen=True, slots=True)
class _Server:
    """The server that is asked."""

    training: tinker.TrainingClient
    sampling: tinker.SamplingClient
    session: ServiceSession
    deadline_s: float
    images: bool

    async def trains(self) -> tuple[bool, bool, bool]:
        """Return whether it trains, takes [N, K] targets, and takes them as sparse rows."""
        for sparse in (True, False):
            if _sums(await self._forward("cross_entropy", _TABLE, sparse=sparse), _TABLE):
                return True, True, sparse
        return _sums(await self._forward("ppo", _PLAIN), _PLAIN), False, False

    async def samples(self) -> tuple[Any, bool]:
        """Return the answer with all options, and whether it names ids in sparse rows.

        Raises:
            BackendError: it cannot sample at all.
        """
        for sparse in (True, False):
            ids = named_ids(_IDS, before=1, sparse=sparse)
            last = len(_IDS) if sparse else None
            answer = await self._sample(
                topk_sample_logprobs=_K, target_prompt_logprobs=ids, prompt_logprobs_last_n=last
            )
            if _usable(answer, _named):
                return answer, sparse
        answer = await self._sample(topk_sample_logprobs=_K)
        if answer is None:  # else it would serve, and each reply fail
            with failing("a sample of one token"):
                await self.session.wait(self._one_token(), self.deadline_s)
        return answer, False

    async def sees(self) -> tuple[bool, bool]:
        """Return whether it takes images in samples, and in what it trains on."""
        if not self.images:
            return False, False
        answer = await self._sample(sdk.ImageChunk(data=_IMAGE, format="png"))
        # How many tokens the image takes here is known only from this answer.
        count = len(answer.prompt_logprobs or ()) - len(_TOKENS) if answer else 0
        if count < 1:
            return answer is not None, False
        datum = replace(
            _PLAIN,
            tokens=(0,) * count + _PLAIN.tokens,
            start=count + _PLAIN.start,
            images=(PlacedImage(0, count, _IMAGE, "png"),),
        )
        return True, _sums(await self._forward("ppo", datum), datum)

    async def _forward(self, loss: LossName, datum: Datum, *, sparse: bool = False) -> Any:
        data = to_sdk(LossPass(loss, (datum,)), sparse=sparse)
        call = self.training.forward(data, loss)
        return await _tried(self.session.wait(call, self.deadline_s))

    async def _sample(self, *image: sdk.ImageChunk, **options: Any) -> Any:
        call = self._one_token(*image, include_prompt_logprobs=True, **options)
        return await _tried(self.session.wait(call, self.deadline_s))

    def _one_token(self, *image: sdk.ImageChunk, **options: Any) -> Any:
        """Ask for a sample of one token."""
        text = sdk.EncodedTextChunk(tokens=list(_TOKENS))
        prompt = sdk.ModelInput(chunks=[*image, text])
        return self.sampling.sample(prompt, 1, sdk.SamplingParams(max_tokens=1), **options)


async def _tried(call: Awaitable[Any]) -> Any:
    """The answer, or None where the server refuses."""
    try:
        return await call
    except Exception as error:
        if fault_of(error) is Fault.AWAY or lost_at_the_service(error):
            raise outage("the probe of what it can do", reason(error)) from error
        return None


def _usable(answer: T | None, read: Callable[[T], Any]) -> bool:
    """Return whether the answer has the shape of the request and passes `read`."""
    try:
        return answer is not None and bool(read(answer))
    except (AlignmentError, SamplerError, ValueError, KeyError):
        # ValueError: its own shape does not fit its own values
        return False


def _sums(output: sdk.ForwardBackwardOutput | None, datum: Datum) -> bool:
    """Return whether an answer has the summed loss and a logprob for every target."""

    def read(output: sdk.ForwardBackwardOutput) -> bool:
        (arrays,) = output.loss_fn_outputs
        numbers = (loss_of(output), *rows_of(datum, arrays["logprobs"]))
        return all(map(math.isfinite, numbers))

    return _usable(output, read)


def _has_candidates(response: sdk.SampleResponse) -> bool:
    """Return whether every token has as many candidates as were asked for."""
    return all(candidates(s.topk_logprobs_np, len(s.tokens), _K) for s in response.sequences)


def _named(response: sdk.SampleResponse) -> bool:
    """Return whether every requested id has a finite logprob."""
    scores = named(response.target_prompt_logprobs, len(_IDS), _K)
    return bool(np.isfinite(scores).all())


def _tail(response: sdk.SampleResponse) -> Any:
    """Logprobs of the end of the prompt, in their place."""
    own = tail(response.prompt_logprobs_np, len(_TOKENS), len(_IDS), "prompt logprobs")
    return np.isfinite(own).all()
