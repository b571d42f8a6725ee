"""What this server can do, found out by asking for very little of everything.

Servers that speak Tinker's API differ: some have no [N, K] targets, no scores at given ids, no
candidates. A few requests over three tokens tell; `methods.require` compares the answer with what
the method needs.

Rule: a refusal is an answer; an outage is not, and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.datums import csr, to_sdk
from tinker_claw.backends.tinker.failures import (
    Fault,
    fault_of,
    lost_at_the_service,
    outage,
    reason,
)
from tinker_claw.backends.tinker.link import Link
from tinker_claw.backends.tinker.sampler import Scoring
from tinker_claw.types import Datum, LossName, LossPass

_TOKENS: Final = (1, 2, 3)
_LOSSES: Final[tuple[LossName, ...]] = get_args(LossName)


@dataclass(frozen=True, slots=True)
class Abilities:
    """The outcome."""

    losses: frozenset[str]
    two_d_targets: bool
    sparse_targets: bool
    """[N, K] targets may go as compressed sparse rows."""
    student_topk: bool
    target_logprobs: bool
    scoring: Scoring


async def probe(
    training: tinker.TrainingClient, sampling: tinker.SamplingClient, link: Link, deadline_s: float
) -> Abilities:
    """Ask for a forward pass per loss and for a sample per option.

    Raises:
        OutageError: the service does not answer.
    """

    def forward(loss: LossName, *, wide: bool = False, sparse: bool = False) -> Awaitable[Any]:
        one_pass = LossPass(loss, (_datum(loss, wide),))
        data = to_sdk(one_pass, sparse=sparse)
        return link.wait(training.forward(data, loss), deadline_s)

    def sample(**options: Any) -> Awaitable[Any]:
        prompt = sdk.ModelInput.from_ints(list(_TOKENS))
        params = sdk.SamplingParams(max_tokens=1)
        return link.wait(sampling.sample(prompt, 1, params, **options), deadline_s)

    asked: dict[str, Awaitable[Any]] = {loss: forward(loss) for loss in _LOSSES}
    asked["wide"] = forward("cross_entropy", wide=True)
    asked["wide sparse"] = forward("cross_entropy", wide=True, sparse=True)
    asked["top-k"] = sample(topk_sample_logprobs=2)
    asked["targets"] = sample(target_prompt_logprobs=_dense())
    asked["sparse targets"] = sample(target_prompt_logprobs=csr(_ids(), before=1))
    asked["last n"] = sample(include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    found = dict(zip(asked, await asyncio.gather(*map(_tried, asked.values())), strict=True))
    sparse = _named(found["sparse targets"])
    return Abilities(
        losses=frozenset(loss for loss in _LOSSES if _sums(found[loss])),
        two_d_targets=_sums(found["wide"]) or _sums(found["wide sparse"]),
        sparse_targets=_sums(found["wide sparse"]),
        student_topk=_has_candidates(found["top-k"]),
        target_logprobs=sparse or _named(found["targets"]),
        scoring=Scoring(last_n=found["last n"] is not None, sparse=sparse),
    )


async def _tried(call: Awaitable[Any]) -> Any:
    """The answer, or None where the server refuses."""
    try:
        return await call
    except Exception as error:
        if fault_of(error) is Fault.AWAY or lost_at_the_service(error):
            raise outage("the probe of what it can do", reason(error)) from error
        return None


def _datum(loss: LossName, wide: bool) -> Datum:
    rows = len(_TOKENS) - 2
    if loss == "cross_entropy":
        return Datum(
            _TOKENS,
            start=2,
            targets=((1, 2),) * rows if wide else (),
            weights=((0.5, -0.5),) * rows if wide else ((0.5,),) * rows,
        )
    return Datum(_TOKENS, start=2, logprobs=(-1.0,) * rows, advantages=(1.0,) * rows)


def _ids() -> Any:
    return np.asarray([[1, 2]], dtype=np.int64)


def _dense() -> sdk.TensorData:
    table = np.full((len(_TOKENS) - 1, 2), -1, dtype=np.int64)
    table[1:] = _ids()
    return sdk.TensorData.from_numpy(table)


def _sums(output: sdk.ForwardBackwardOutput | None) -> bool:
    """A usable answer has the summed loss and the logprobs."""
    return (
        output is not None
        and "loss:sum" in output.metrics
        and len(output.loss_fn_outputs) == 1
        and "logprobs" in output.loss_fn_outputs[0]
    )


def _has_candidates(response: sdk.SampleResponse | None) -> bool:
    return response is not None and response.sequences[0].topk_logprobs_np is not None


def _named(response: sdk.SampleResponse | None) -> bool:
    return response is not None and response.target_prompt_logprobs is not None
