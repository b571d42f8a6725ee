"""Whatever scores or trains a turn with images is given these, where they stand in its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.learner.test_agreement import sample
from tests.support.fakes import FakeSampler, rated
from tests.support.learning import HINT, SCORING, Says, world
from tinker_claw.config.settings import Training
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner.scoring import batch_items
from tinker_claw.methods import COMBINE
from tinker_claw.policy import Policy
from tinker_claw.types import Charge, Message, PlacedImage, PolicyVersion, uncharged

PROMPT = (1, 9, 9, 3, 9, 9, 9, 4)
IMAGES = (PlacedImage(1, 2, b"one", "png"), PlacedImage(4, 3, b"two", "jpeg"))
"""One before the place of a hint, and one behind it."""
HINTED = (IMAGES[0], replace(IMAGES[1], at=4 + len(HINT)))
NEWEST = PolicyVersion(5, 4, 5, "s", "p")


async def test_the_teacher_and_the_trainer_see_them(tmp_path: Path) -> None:
    async with world(tmp_path, method=SCORING, batch_size=2) as w:
        w.turn("YES", prompt=PROMPT, images=IMAGES, hint_at=4)
        w.turn("NO, HOW it should be", prompt=PROMPT, images=IMAGES, hint_at=4)
        await w.version(1)
        asked = dict(zip(w.base.scored, w.base.scored_images, strict=True))
        hinted = (*PROMPT[:4], *HINT, *PROMPT[4:], 7, 8)
        assert asked[hinted] == HINTED
        assert all(images == IMAGES for tokens, images in asked.items() if HINT[0] not in tokens)
        datums = [datum for one in w.trainer.steps[0] for datum in one.datums]
        assert len(datums) == 2
        assert {datum.images for datum in datums} == {IMAGES}


async def test_a_judge_that_sees_is_shown_them(tmp_path: Path) -> None:
    class Seeing(Says):
        async def answers(
            self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
        ) -> list[str]:
            seen.append(messages[-1]["content"])
            return [rated(1)] * n

    for shows, found in ((True, 2), (False, 0)):
        seen = list[Any]()
        path = tmp_path / str(found)
        async with world(path, endpoint=Seeing(), judge_images=shows) as w:
            w.turn("YES", prompt=PROMPT, images=IMAGES)
            await w.settled()
        assert json.dumps(seen).count("data:image") == found


async def test_scores_of_a_step_are_asked_with_them() -> None:
    policy = FakeSampler((1,))
    one = replace(sample(1, 1), prompt=PROMPT, images=IMAGES, reward=1)
    cfg = Training(batch_size=1)
    (item,) = await batch_items([one], Policy(NEWEST, policy), cfg, score_fresh=True)
    reply = one.completion.tokens
    assert dict(zip(policy.scored, policy.scored_images, strict=True)) == {PROMPT + reply: IMAGES}
    prepared = COMBINE.prepare([item], cfg, None, 8)
    placed = {
        (len(datum.tokens), datum.images) for each in prepared.passes for datum in each.datums
    }
    assert placed == {(len(PROMPT + reply), IMAGES)}
