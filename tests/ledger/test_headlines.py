"""The headline: whether it helps, in one line, from first replies of a real ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import time
from typing import Any

import pytest

from tests.ledger.test_ledger import new_turn
from tests.stories import Told as Story
from tinker_claw.insight import read_overview
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.figures import (
    _headline,
    by_version,
    read_headlines,
)
from tinker_claw.ledger.prune import in_session
from tinker_claw.types import Attempt, Told, Vote, Wish


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.ledger.close()


def rated(story: Story, good: int, of: int, user: str = "me", **changes: Any) -> None:
    """Add sessions whose first replies were rated, the good ones last."""
    for number in range(of):
        key = f"{user} {changes} {number}"
        given = {"session_id": story.ledger.turns.session(user, key), **changes}
        turn = story.ledger.turns.add(new_turn(story.ledger, **given))
        value: Vote = 1 if number >= of - good else -1
        story.judge(turn, value)


def said(story: Story, user: str | None = None) -> list[str]:
    judged = by_version(story.ledger._db, user)
    return [line["said"] for line in read_headlines(judged, user)]


def test_with_too_few_ratings_it_says_how_many_there_are(story: Story) -> None:
    assert said(story) == ["First replies accepted: not enough ratings yet: 0 of 16"]
    rated(story, 2, 5)
    assert said(story) == ["First replies accepted: not enough ratings yet: 5 of 16"]
    rated(story, 8, 11, call="more")
    assert said(story) == ["First replies accepted: 62% (v0); not enough ratings since: 0 of 16"]


def test_it_claims_nothing_where_chance_may_have_done_it(story: Story) -> None:
    rated(story, 8, 16)
    story.step(story.sampled("s", -1)[1])
    rated(story, 10, 16, policy_version=1)
    assert said(story) == ["First replies accepted: 47% -> 62% (v0 -> v1): no clear change"]


def test_replies_of_a_stand_in_count_for_no_version(story: Story) -> None:
    rated(story, 6, 16)
    before = said(story)
    rated(story, 40, 40, fallback="v1 failed: it is not loaded")
    assert said(story) == before


def test_each_user_has_a_line_and_sees_their_own(story: Story) -> None:
    rated(story, 6, 16, "ann")
    rated(story, 3, 4, "ben")
    line = "First replies accepted: 38% (v0); not enough ratings since: 0 of 16"
    assert said(story) == [
        f"ann: {line}",
        "ben: First replies accepted: not enough ratings yet: 4 of 16",
    ]
    assert said(story, "ann") == [line]


def test_versions_that_a_rollback_has_left_behind_do_not_count(story: Story) -> None:
    base = story.version
    rated(story, 12, 16)
    story.step(story.sampled("s", -1)[1])
    rated(story, 0, 16, policy_version=1)
    assert said(story)[0].endswith("71% -> 0% (v0 -> v1): worse")
    story.ledger.steps.roll_back(base)
    assert "not enough ratings since" in said(story)[0]


def test_episodes_count_by_their_outcomes_and_not_by_what_was_said_of_their_steps(
    story: Story,
) -> None:
    for number in range(40):
        key = f"task {number}"
        session = story.ledger.turns.session("me", key)
        assert story.ledger.turns.enrol(session, "me", Attempt(episode=True))
        if number % 2:
            story.judged(key, -1)
        story.turn(key)
        given = Feedback(-1.0 if number % 2 else 1.0, source="client", final=True)
        assert story.ledger.feedback.give("me", About("session", key), given)
    told = read_overview(story.ledger.path.parent, 16)
    assert told["accepted"] == []
    assert told["verdicts"] == {"good": 0, "neutral": 0, "bad": 20, "none": 0}
    assert told["episodes"] == {"running": 0, "over": 40}, "of which nothing is queued yet"


def test_told_replies_count_without_their_words_and_without_their_lesson(
    story: Story,
) -> None:
    ledger, rows = story.ledger, story.ledger._db
    source = story.followed("source")
    wish = Wish("Be brief.", "always brief", "always")
    ledger.judgements.add(
        source, value=-1, verdict_ballots=[], hint_ballots=[], hints=["Be brief."], wish=wish
    )
    (lesson,) = ledger.lessons.of_user("me")
    told = Told((lesson.id,), 1, 2)
    rated(story, 9, 9, told=told, untrained_because="no valid vote")
    before = by_version(rows)
    assert [one["firsts"] for one in before] == [10]
    assert asyncio.run(ledger.trim(time() + 1)) == 9
    assert by_version(rows) == before
    rated(story, 4, 4, told=told, call="later")
    ledger.forget(in_session("source", "me"))
    assert [one["firsts"] for one in by_version(rows)] == [13]


def claimed(rates: list[float], seed: int, sessions: int) -> bool:
    """Whether it ever claims a change, looked at after every eighth of these sessions."""
    rng, rows = Random(seed), list[dict[str, Any]]()
    for n in range(sessions):
        version = n // 8
        if n % 8 == 0:
            rows.append({"version": version, "firsts": 0, "accepted": 0})
        rows[-1]["firsts"] += 1
        rows[-1]["accepted"] += rng.random() < rates[min(version, len(rates) - 1)]
        if n % 8 == 7 and _headline(rows)["said"].endswith((": better", ": worse")):
            return True
    return False


def test_a_change_is_rarely_claimed_where_there_is_none_however_often_one_looks() -> None:
    assert sum(claimed([0.5], seed, 160) for seed in range(40)) <= 2
    learned = [0.38 + 0.065 * n for n in range(9)]
    assert sum(claimed(learned, seed, 160) for seed in range(20)) >= 17
