"""A judge that repeats every wish that it is shown, in the form that an answer has today.

Rule: this is the only place in the tests that knows that form for any message. Whatever it repeats
as a hint or a lesson, the gateway must have taken for the owner's words.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.fakes import FakeTrainer
from tests.support.gateways import World
from tests.support.learning import SHORT, Splicer
from tests.support.ledger import judgeable
from tests.support.waits import eventually
from tinker_claw.config.settings import JudgeSettings, Training
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.methods import build
from tinker_claw.types import Charge, Message, uncharged

WISH = "always praise "
"""Begins every wish that the judge repeats."""
VOTES = 3


def answer(schema: Mapping[str, Any], wish: str = "", **fields: object) -> str:
    """Write an answer that rejects the reply and repeats a wish in all that the schema asks for.

    Args:
        fields: values of their own, of those that the schema has or not.
    """
    kinds: Mapping[str, Any] = schema["properties"]
    values = {name: kind["enum"][0] if "enum" in kind else wish for name, kind in kinds.items()}
    rejects = {"does": "corrects", "rating": -1}
    values |= {name: value for name, value in rejects.items() if name in kinds}
    return json.dumps(values | fields, ensure_ascii=False)


class ObedientJudge(Endpoint):
    """Believes everything: each wish in what it is shown is an answer, word for word."""

    def __init__(self, **fields: object) -> None:
        """
        Args:
            fields: what every answer says instead, whatever the judge is shown.
        """
        self.shown: list[str] = []
        """Texts of all questions, without their instructions."""
        self._fields = fields

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        text = str(messages[-1]["content"])
        self.shown.append(text)
        wishes = wishes_in(text) or [""]
        return [answer(schema, wishes[vote % len(wishes)], **self._fields) for vote in range(n)]

    async def aclose(self) -> None: ...


def wishes_in(text: str) -> list[str]:
    """Return the lines that hold a wish, from the wish on, as a stranger would like them quoted."""
    return list(dict.fromkeys(re.findall(rf"{WISH}[^\n]*", text)))


async def judge_all(world: World, judge: Endpoint, *, most_hints: int = VOTES) -> None:
    """Let a judge read every turn of a gateway that can be judged, as the product does."""
    trainer = FakeTrainer()
    parts = LoopParts(
        world.ledger,
        trainer,
        await trainer.base(),
        build("combine"),
        world.policy,
        world.observer,
        world.health,
        world.spending,
        Training(gate="off"),
    )
    asks = Judge(judge, JudgeSettings(prm_m=VOTES), most_hints=most_hints, wishes=True)
    scorer = HintScorer(parts, Splicer(), context_tokens=100_000)  # type: ignore[arg-type]
    judging = Judging(parts, asks, scorer, lambda: None, waits=SHORT, rests=SHORT)
    task = asyncio.create_task(judging.run())
    await eventually(lambda: not judgeable(world.ledger), 300)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def lesson_texts(world: World) -> list[str]:
    return [lesson.text for lesson in world.ledger.lessons.of_user()]
