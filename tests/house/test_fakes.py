"""The test doubles keep the contracts of what they replace."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer, Script
from tinker_claw.errors import BackendError, SamplerError, StepError
from tinker_claw.policy import Sampler, Trainer
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams, StopReason

PARAMS = SamplingParams(max_tokens=3, stop_tokens=(9,), student_topk=2)
PASS = LossPass("ppo", (Datum((1, 2, 3), 1, logprobs=(-1.0, -2.0), advantages=(1.0, 1.0)),))


def test_the_protocols_are_met() -> None:
    assert isinstance(FakeSampler((1,)), Sampler)
    assert isinstance(FakeTrainer(), Trainer)


async def test_a_sampler_recites_stops_and_is_cut() -> None:
    sampler = FakeSampler((1, 9), (1, 2, 3, 4))
    (stopped,) = await sampler.sample((5,), PARAMS)
    (cut,) = await sampler.sample((5,), PARAMS)
    assert (stopped.tokens, stopped.stop_reason) == ((1, 9), StopReason.STOP)
    assert (cut.tokens, cut.stop_reason) == ((1, 2, 3), StopReason.LENGTH)
    assert cut.topk_ids == ((1, 2), (2, 3), (3, 4))
    scored = await sampler.logprobs((5, 1, 9), start=1, targets=((7,), (8,)))
    assert (scored.logprobs, scored.targets) == ((LOGPROB,) * 2, ((LOGPROB,),) * 2)


async def test_a_sampler_fails_and_is_aborted_as_told() -> None:
    sampler = FakeSampler(Script((1, 2), fail_after=1), (1, 2, 3))
    with pytest.raises(SamplerError):
        await sampler.sample((5,), PARAMS)
    async with aclosing(sampler.stream((5,), PARAMS)) as chunks:
        await anext(chunks)
    assert sampler.aborted == 1


async def test_a_trainer_counts_and_fails_as_told() -> None:
    trainer = FakeTrainer(fail={"train_step": 1, "publish": 1})
    saved = await trainer.save_state("start")
    with pytest.raises(StepError):
        await trainer.train_step([PASS], Adam(1.0))
    await trainer.load_state(saved)
    report = await trainer.train_step([PASS], Adam(1.0))
    assert report.logprobs == (((-1.0, -2.0),),)
    assert trainer.weights == 1
    with pytest.raises(BackendError):
        await trainer.publish()
    sampler = await trainer.publish()
    assert await trainer.open(sampler.ref) is sampler
    assert await trainer.base() is await trainer.base()
