"""Weights, moments and versions between steps, on every backend."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from operator import sub

import pytest

from tests.support.backends import Backend
from tests.support.contract import PLAIN, Ground, drawn, pass_of, prompt, rl_pass
from tinker_claw.errors import BackendError, StepError
from tinker_claw.policy import Trainer
from tinker_claw.types import Adam, LossPass


async def test_moments_are_carried_on_and_corrected_for_having_begun_at_zero(
    backend: Backend, trainer: Trainer
) -> None:
    """Without eps a first step is rate sign(g), and one without gradient after it `share` of it."""
    start = prompt(backend)
    fresh = await trainer.save_state("fresh")
    one = rl_pass(start, await drawn(await trainer.publish(), start))
    (datum,) = one.datums
    idle = LossPass("ppo", (replace(datum, advantages=(0.0,) * len(datum.advantages)),))
    share = (0.9 * 0.1 / (1 - 0.9**2)) / math.sqrt(0.98 * 0.02 / (1 - 0.98**2))
    results = []
    for steps in ([(one, 2e-3)], [(one, 1e-3), (idle, 1e-3 / share)], [(one, 1e-3)]):
        await trainer.load_state(fresh)
        for passes, rate in steps:
            await trainer.train_step([passes], Adam(rate, eps=1e-14, grad_clip_norm=0.0))
        read = await (await trainer.publish()).logprobs(datum.tokens, start=1)
        results.append(read.logprobs)
    double, carried, single = results
    moved, off = (max(map(abs, map(sub, double, other))) for other in (single, carried))
    assert moved > 1e-3
    assert off < 0.02 * moved


async def test_a_state_without_its_moments_is_moved_by_nothing(ground: Ground) -> None:
    """A step without a gradient moves what has moments, and nothing else."""
    idle = pass_of("ppo", ground.rl(0, scale=0.0))
    before = await ground.scores()
    for moments in (True, False):
        await ground.trainer.load_state(ground.state, moments=moments)
        await ground.trainer.train_step([idle], Adam(1e-3, grad_clip_norm=0.0))
        after = await ground.scores(await ground.trainer.publish())
        assert (after == ground.near(before)) is not moments


BROKEN = {
    "missing array": lambda datum: replace(datum, advantages=()),
    "foreign token": lambda datum: replace(datum, tokens=(*datum.tokens[:-1], 10**6)),
    "nan": lambda datum: replace(datum, advantages=(math.nan,) * len(datum.advantages)),
    "infinite ratio": lambda datum: replace(datum, logprobs=(-1000.0,) * len(datum.logprobs)),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_failed_step_is_never_half_applied(ground: Ground, fault: str) -> None:
    """After a failed step a backend refuses until a state is loaded, or has its old weights."""
    trainer, good = ground.trainer, pass_of("ppo", ground.rl(0))
    before, expected = await ground.scores(), await ground.after([good])
    await trainer.load_state(ground.state)
    with pytest.raises(StepError):
        await trainer.train_step([good, pass_of("ppo", BROKEN[fault](ground.rl(1)))], PLAIN)
    with suppress(StepError):
        sampler = await trainer.publish()
        assert await ground.scores(sampler) == ground.near(before)
    saved = None
    with suppress(StepError):
        saved = await trainer.save_state("after a failure")
    with suppress(StepError):
        await trainer.train_step([good], PLAIN)
        assert await ground.scores(await trainer.publish()) == ground.near(expected)
    for state in filter(None, (saved, ground.state)):
        assert await ground.at(state).after([good]) == ground.near(expected)


async def test_versions_outlive_a_return_to_an_older_state(ground: Ground) -> None:
    first = ground.sampler
    expected = await ground.after([pass_of("ppo", ground.rl(0))])
    second = await ground.trainer.publish()
    await ground.trainer.load_state(ground.state)
    again = await ground.trainer.publish()
    assert len({first.ref, second.ref, again.ref}) == 3, "a ref is never used twice"
    for ref, scores in ((second.ref, expected), (first.ref, await ground.scores())):
        assert await ground.scores(await ground.trainer.open(ref)) == ground.near(scores)
    assert await ground.scores(again) == ground.near(await ground.scores())


async def test_states_of_one_name_are_two_states(ground: Ground) -> None:
    one = pass_of("ppo", ground.rl(0))
    refs = []
    await ground.trainer.load_state(ground.state)
    for _ in range(2):
        refs.append(await ground.trainer.save_state("the same"))
        await ground.trainer.train_step([one], PLAIN)
    first, second = [await ground.at(ref).after([one]) for ref in refs]
    assert first == ground.near(await ground.after([one]))
    assert ground.far(first, second)


async def test_a_state_that_cannot_be_loaded_leaves_the_weights(ground: Ground) -> None:
    expected = await ground.after([pass_of("ppo", ground.rl(0))])
    with pytest.raises(BackendError):
        await ground.trainer.load_state(ground.sampler.ref)
    with suppress(BackendError):  # a service may sample from a state, too
        await (await ground.trainer.open(ground.state)).aclose()
    assert await ground.scores(await ground.trainer.publish()) == ground.near(expected)
