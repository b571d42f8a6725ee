"""The demo's rule judge: it answers the project's real judge prompts, over real HTTP."""

from __future__ import annotations

import random

import pytest

from examples.demo import homework
from examples.demo.judge import HINTS_PLAIN, create_app, verdict
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import JudgeError
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge, Judgement
from tinker_claw.types import NextState


async def judge(state: NextState) -> Judgement:
    async with in_background(create_app()) as url, HttpEndpoint(url, JudgeSettings()) as endpoint:
        return await Judge(endpoint, JudgeSettings(), most_hints=1).judge("q", "a", state)


@pytest.mark.parametrize(
    ("state", "value", "hinted"),
    [
        (NextState("user", "No, write it without bold text."), -1, True),
        (NextState("user", "Perfect, thank you."), 1, False),
        (NextState("tool", "wrote 3 lines"), 1, False),
        (NextState("tool", "error: no such file"), -1, False),
    ],
)
async def test_verdicts_and_hints(state: NextState, value: int, hinted: bool) -> None:
    judgement = await judge(state)
    assert judgement.verdict.votes == (value,) * 3
    assert bool(judgement.hints) is hinted
    assert {*judgement.hints} <= {*HINTS_PLAIN}


async def test_what_is_no_judge_prompt_is_refused() -> None:
    async with in_background(create_app()) as url, HttpEndpoint(url, JudgeSettings()) as endpoint:
        with pytest.raises(JudgeError, match=r"refuses \(HTTP 400\)"):
            await endpoint.answers([{"role": "user", "content": "hello"}], 1, {})


def test_it_understands_everything_that_the_simulated_user_says() -> None:
    rng = random.Random(0)
    for _ in range(200):
        assert verdict("user", rng.choice(homework.APPROVALS)) == 1
        for corrections in (homework.CORRECTIONS, homework.TERSE_CORRECTIONS):
            correction = rng.choice(corrections)
            assert verdict("user", correction) == -1, correction


async def test_it_takes_no_wish_for_a_lasting_one() -> None:
    async with in_background(create_app()) as url, HttpEndpoint(url, JudgeSettings()) as endpoint:
        judge = Judge(endpoint, JudgeSettings(), most_hints=1, wishes=True)
        for said in homework.CORRECTIONS:
            assert await judge.hear(said, [said]) == (None, 0, 0)
