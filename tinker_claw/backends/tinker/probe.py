"""Probe what a server supports with one tiny request per feature.

Servers that speak Tinker's API differ: some have no [N, K] targets, or flatten them, no scores at
given ids, no candidates. A few requests over four tokens show it; `methods.require` compares the
answer with what the method needs.

Rule: a refusal, or an answer of another shape, means that the feature is missing; an outage does
not, and is raised.
"""

from __future__ import annotations

import asyncio
import math
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, get_args

import numpy as np
import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.convert import candidates, named, named_ids, rows_of, tail, to_sdk
from tinker_claw.backends.tinker.failures import (
    Fault,
    fault_of,
    lost_at_the_service,
    outage,
    reason,
)
from tinker_claw.backends.tinker.sampler import Scoring
from tinker_claw.backends.tinker.session import ServiceSession
from tinker_claw.errors import AlignmentError, SamplerError, first_cause
from tinker_claw.types import Datum, LossName, LossPass, PlacedImage

T = TypeVar("T")

_TOKENS: Final = (1, 2, 3, 4)
_WIDE: Final = (1, 2)
_K: Final = len(_WIDE)
_IDS: Final = np.asarray([_WIDE] * (len(_TOKENS) - 2), dtype=np.int64)
# A white square of 32 x 32 pixels, as PNG.
_IMAGE: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKUlEQVR4nO3NMQEAAAjDMMC/52ECvlRA00nqs3m9"
    "AwAAAAAAAAAAgMMWx/EDPS4YA2MAAAAASUVORK5CYII="
)
_LOSSES: Final[tuple[LossName, ...]] = get_args(LossName)


@dataclass(frozen=True, slots=True)
class Abilities:
    """Features that the server supports."""

    losses: frozenset[str]
    two_d_targets: bool
    sparse_targets: bool
    """[N, K] targets may go as compressed sparse rows."""
    student_topk: bool
    target_logprobs: bool
    scoring: Scoring
    images: bool
    trains_images: bool


async def probe(
    training: tinker.TrainingClient,
    sampling: tinker.SamplingClient,
    session: ServiceSession,
    deadline_s: float,
    *,
    images: bool = False,
) -> Abilities:
    """Ask for a forward pass per loss and for a sample per option.

    Args:
        images: the model may take images, so ask with one, too.

    Raises:
        OutageError: the service does not answer.
    """

    def forward(loss: LossName, datum: Datum, *, sparse: bool = False) -> Awaitable[Any]:
        data = to_sdk(LossPass(loss, (datum,)), sparse=sparse)
        return session.wait(training.forward(data, loss), deadline_s)

    def sample(*image: sdk.ImageChunk, **options: Any) -> Awaitable[Any]:
        text = sdk.EncodedTextChunk(tokens=list(_TOKENS))
        params = sdk.SamplingParams(max_tokens=1)
        prompt = sdk.ModelInput(chunks=[*image, text])
        return session.wait(sampling.sample(prompt, 1, params, **options), deadline_s)

    asked: dict[str, Awaitable[Any]] = {
        loss: forward(loss, _datum(loss, wide=False)) for loss in _LOSSES
    }
    table = _datum("cross_entropy", wide=True)
    asked["wide"] = forward("cross_entropy", table)
    asked["wide sparse"] = forward("cross_entropy", table, sparse=True)
    asked["top-k"] = sample(topk_sample_logprobs=_K)
    dense, compressed = (named_ids(_IDS, before=1, sparse=sparse) for sparse in (False, True))
    asked["targets"] = sample(target_prompt_logprobs=dense)
    asked["sparse targets"] = sample(target_prompt_logprobs=compressed)
    asked["last n"] = sample(include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    if images:
        shown = sdk.ImageChunk(data=_IMAGE, format="png")
        asked["image"] = sample(shown)
        asked["scored image"] = sample(shown, include_prompt_logprobs=True)

    async def trains(answer: sdk.SampleResponse | None) -> bool:
        # How many tokens the image takes here is known only from this answer.
        count = len(answer.prompt_logprobs or ()) - len(_TOKENS) if answer else 0
        if count < 1:
            return False
        image, plain = PlacedImage(0, count, _IMAGE, "png"), _datum("ppo", wide=False)
        tokens, start = (0,) * count + plain.tokens, count + plain.start
        datum = replace(plain, tokens=tokens, start=start, images=(image,))
        return _sums(await _tried(forward("ppo", datum)), datum)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {what: group.create_task(_tried(one)) for what, one in asked.items()}
    except ExceptionGroup as failed:
        raise first_cause(failed) from failed
    found = {what: task.result() for what, task in tasks.items()}
    sparse = _usable(found["sparse targets"], _named)
    sparse_table = _sums(found["wide sparse"], table)
    return Abilities(
        losses=frozenset(loss for loss in _LOSSES if _sums(found[loss], _datum(loss, wide=False))),
        two_d_targets=sparse_table or _sums(found["wide"], table),
        sparse_targets=sparse_table,
        student_topk=_usable(found["top-k"], _has_candidates),
        target_logprobs=sparse or _usable(found["targets"], _named),
        scoring=Scoring(last_n=_usable(found["last n"], _tail), sparse=sparse),
        images=found.get("image") is not None,
        trains_images=await trains(found.get("scored image")),
    )


async def _tried(call: Awaitable[Any]) -> Any:
    """The answer, or None where the server refuses."""
    try:
        return await call
    except Exception as error:
        if fault_of(error) is Fault.AWAY or lost_at_the_service(error):
            raise outage("the probe of what it can do", reason(error)) from error
        return None


def _datum(loss: LossName, *, wide: bool) -> Datum:
    rows = len(_TOKENS) - 2
    if loss == "cross_entropy":
        return Datum(
            _TOKENS,
            start=2,
            targets=(_WIDE,) * rows if wide else (),
            weights=((0.5, -0.5),) * rows if wide else ((0.5,),) * rows,
        )
    return Datum(_TOKENS, start=2, logprobs=(-1.0,) * rows, advantages=(1.0,) * rows)


def _usable(answer: T | None, read: Callable[[T], Any]) -> bool:
    """Whether the answer has the shape of the request and passes `read`."""
    try:
        return answer is not None and bool(read(answer))
    except (AlignmentError, SamplerError, ValueError, KeyError):
        # ValueError: its own shape does not fit its own values
        return False


def _sums(output: sdk.ForwardBackwardOutput | None, datum: Datum) -> bool:
    """Whether an answer has the summed loss and a logprob for every target."""

    def read(output: sdk.ForwardBackwardOutput) -> bool:
        (found,) = output.loss_fn_outputs
        numbers = (output.metrics["loss:sum"], *rows_of(datum, found["logprobs"]))
        return all(map(math.isfinite, numbers))

    return _usable(output, read)


def _has_candidates(response: sdk.SampleResponse) -> bool:
    """Whether every token has as many candidates as were asked for."""
    return all(candidates(s.topk_logprobs_np, len(s.tokens), _K) for s in response.sequences)


def _named(response: sdk.SampleResponse) -> bool:
    """Whether every requested id has a finite logprob."""
    scores = named(response.target_prompt_logprobs, len(_IDS), _K)
    return bool(np.isfinite(scores).all())


def _tail(response: sdk.SampleResponse) -> Any:
    """Logprobs of the end of the prompt, in their place."""
    return len(tail(response.prompt_logprobs_np, len(_TOKENS), 1, "prompt logprobs"))
