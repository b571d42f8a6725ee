"""The form for a model without tools: a fenced block calls, a message answers, each call is scored.

Rule: the gateway, its ledger, judge and learner are real; what the model says is a script.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from examples.tracks.client import Gateway
from examples.tracks.environments import environment, fenced
from examples.tracks.runner import Run
from examples.tracks.state import opened
from examples.tracks.tool_call import CALCULATOR, Sum, calculate
from examples.tracks.track import Track
from tests.support.fakes import FakeSampler, FakeTrainer
from tests.support.gateways import MODEL, gateway, spell
from tests.support.learning import world
from tests.support.ledger import sql
from tinker_claw.render.renderer import Renderer

TRACK = Track(
    "fenced",
    MODEL,
    "http://127.0.0.1:1/v1",
    concurrency=1,
    group_size=2,
    groups=1,
    max_turns=3,
    exam_tasks=1,
)


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("```\n6 + 2\n```", "6 + 2"),
        ("I ask:\n```python\n6 + 2\n```\nThen I say it.", "6 + 2"),
        ("```\n6 + 2```", "6 + 2"),
        ("```\n6 +\n2\n```", "6 +\n2"),
        ("It is 8.", None),
        ("`6 + 2`", None),
        ("```\n6 + 2", None),
        ("```\n6 + 2\n```\n```\n8\n```", None),
    ],
)
def test_a_call_is_the_only_whole_block_of_a_reply(text: str, called: str | None) -> None:
    calls = fenced(text, (CALCULATOR,))
    assert [json.loads(call["function"]["arguments"]) for call in calls] == (
        [] if called is None else [{"expression": called}]
    )
    assert all(call["function"]["name"] == "calculator" for call in calls)


@pytest.mark.parametrize(
    ("episode_reward", "rewards"),
    [("steps", [2.0, 1.0, -2.0, -1.0]), ("outcome", [1.0, 1.0, -1.0, -1.0])],
)
async def test_outcome_and_score_of_each_call_reward_its_reply(
    tmp_path: Path, renderer: Renderer, episode_reward: str, rewards: list[float]
) -> None:
    """After an exam, of which nothing is reported, one try is right and one is wrong."""
    task = environment(TRACK).task(0)
    assert isinstance(task, Sum)
    result = calculate(task.expression)
    wrong = ["```\n1 + 1\n```", "It is 2."]
    says = ["Hello.", *wrong, f"```\n{task.expression}\n```", f"It is {result}."]
    says += [*wrong, "Hello."]
    sampler = FakeSampler(*(spell(renderer, text) for text in says))
    async with gateway(tmp_path, renderer, sampler) as w:
        said = list[str]()
        async with httpx.AsyncClient() as http:
            with opened(tmp_path / "track") as state:
                state.begin(TRACK)
                model = Gateway(http, replace(TRACK, url=w.url))
                await Run(TRACK, environment(TRACK), model, state, said.append).train()
        asked = [renderer.decode(prompt) for prompt in sampler.prompts[3:7]]
        feedback = sql(w.ledger).rows("SELECT score, final, unused FROM feedback ORDER BY id")
    assert [tuple(row) for row in feedback] == [
        (1.0, 0, None),
        (1.0, 1, None),
        (-1.0, 0, None),
        (-1.0, 1, None),
    ], "each call is scored before the next request, and the outcome comes last"
    for prompt in asked:
        assert prompt.index("What is 6 + 2?") < prompt.index(f"What is {task.expression}?")
        assert "calculator" not in prompt.partition("What is 6 + 2?")[2], "no tool is offered"
    assert f"<|im_start|>user\n{result}<|im_end|>" in asked[1]
    assert "<|im_start|>user\n2<|im_end|>" in asked[3]
    there = FakeTrainer(states={"s0": 0}, samplers={"p0": sampler})  # as the gateway began
    learns = world(tmp_path, method="binary", trainer=there, episode_reward=episode_reward)
    async with learns as learning:
        await learning.until(lambda: bool(learning.trainer.steps))
        rows = sql(learning.ledger).rows("SELECT reward FROM samples ORDER BY turn_id")
        assert [row["reward"] for row in rows] == rewards
        assert learning.says.asked == 0, "a scored step is not judged"
