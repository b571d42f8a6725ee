"""What this server can do, found out by asking for very little of everything.

Servers that speak Tinker's API differ: some have no [N, K] targets, or flatten them, no scores at
given ids, no candidates. A few requests over four tokens tell; `methods.require` compares the
answer with what the method needs.

Rule: a refusal is an answer, and so is one whose shape is not that of the question; an outage is
none, and is raised.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.convert import candidates, csr, named, rows_of, tail, to_sdk
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
from tinker_claw.types import Datum, LossName, LossPass

_TOKENS: Final = (1, 2, 3, 4)
_WIDE: Final = (1, 2)
_K: Final = len(_WIDE)
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
    training: tinker.TrainingClient,
    sampling: tinker.SamplingClient,
    session: ServiceSession,
    deadline_s: float,
) -> Abilities:
    """Ask for a forward pass per loss and for a sample per option.

    Raises:
        OutageError: the service does not answer.
    """

    def forward(loss: LossName, *, wide: bool = False, sparse: bool = False) -> Awaitable[Any]:
        one_pass = LossPass(loss, (_datum(loss, wide=wide),))
        data = to_sdk(one_pass, sparse=sparse)
        return session.wait(training.forward(data, loss), deadline_s)

    def sample(**options: Any) -> Awaitable[Any]:
        prompt = sdk.ModelInput.from_ints(list(_TOKENS))
        params = sdk.SamplingParams(max_tokens=1)
        return session.wait(sampling.sample(prompt, 1, params, **options), deadline_s)

    asked: dict[str, Awaitable[Any]] = {loss: forward(loss) for loss in _LOSSES}
    asked["wide"] = forward("cross_entropy", wide=True)
    asked["wide sparse"] = forward("cross_entropy", wide=True, sparse=True)
    asked["top-k"] = sample(topk_sample_logprobs=_K)
    asked["targets"] = sample(target_prompt_logprobs=_dense())
    asked["sparse targets"] = sample(target_prompt_logprobs=csr(_ids(), before=1))
    asked["last n"] = sample(include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {what: group.create_task(_tried(one)) for what, one in asked.items()}
    except ExceptionGroup as failed:
        raise first_cause(failed) from failed
    found = {what: task.result() for what, task in tasks.items()}
    sparse = _named(found["sparse targets"])
    table = _datum("cross_entropy", wide=True)
    sparse_table = _sums(found["wide sparse"], table)
    return Abilities(
        losses=frozenset(loss for loss in _LOSSES if _sums(found[loss], _datum(loss, wide=False))),
        two_d_targets=sparse_table or _sums(found["wide"], table),
        sparse_targets=sparse_table,
        student_topk=_has_candidates(found["top-k"]),
        target_logprobs=sparse or _named(found["targets"]),
        scoring=Scoring(last_n=_has_tail(found["last n"]), sparse=sparse),
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


def _ids() -> Any:
    return np.asarray([_WIDE] * (len(_TOKENS) - 2), dtype=np.int64)


def _dense() -> sdk.TensorData:
    table = np.full((len(_TOKENS) - 1, _K), -1, dtype=np.int64)
    table[1:] = _ids()
    return sdk.TensorData.from_numpy(table)


def _sums(output: sdk.ForwardBackwardOutput | None, datum: Datum) -> bool:
    """A usable answer has the summed loss, and a logprob for every target that was sent."""
    if output is None or len(output.loss_fn_outputs) != 1:
        return False
    found = output.loss_fn_outputs[0].get("logprobs")
    if found is None or not math.isfinite(output.metrics.get("loss:sum", math.nan)):
        return False
    try:
        return all(map(math.isfinite, rows_of(datum, found)))
    except (AlignmentError, ValueError):  # ValueError: its own shape does not fit its own values
        return False


def _has_candidates(response: sdk.SampleResponse | None) -> bool:
    """As many as were asked for, of every token."""
    if response is None:
        return False
    try:
        for sequence in response.sequences:
            candidates(sequence.topk_logprobs_np, len(sequence.tokens), _K)
    except SamplerError:
        return False
    return True


def _named(response: sdk.SampleResponse | None) -> bool:
    """A score for each id that was named."""
    if response is None:
        return False
    try:
        scores = named(response.target_prompt_logprobs, len(_ids()), _K)
    except SamplerError:
        return False
    return bool(np.isfinite(scores).all())


def _has_tail(response: sdk.SampleResponse | None) -> bool:
    """Logprobs of the end of the prompt, in their place."""
    if response is None:
        return False
    try:
        tail(response.prompt_logprobs_np, len(_TOKENS), 1, "prompt logprobs")
    except SamplerError:
        return False
    return True
