"""The headline: whether it helps, in one line, from the first judged turns of a real ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import time
from typing import Any

import pytest

from tests.support.ledger import new_turn, sql
from tests.support.stories import Told as Story
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.figures import headline, read_headlines, read_live, read_overview
from tinker_claw.ledger.firsts import First
from tinker_claw.ledger.prune import in_session
from tinker_claw.types import Attempt, LessonBlock, NextState, Vote, Wish


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.ledger.close()


def answered(story: Story, key: str, role: Any, value: Vote | None, **changes: Any) -> int:
    """Add a turn of a session, what came next, and the judge's verdict on it."""
    given = {"session_id": story.ledger.turns.session("me", key), **changes}
    turn = story.ledger.turns.add(new_turn(story.ledger, **given))
    story.ledger.turns.add_next_state(turn, NextState(role, "so it is"))
    story.judge(turn, value)
    return turn


def rated(story: Story, good: int, of: int, user: str = "me", **changes: Any) -> None:
    """Add sessions whose owner judged the first reply, the good ones last."""
    for number in range(of):
        session = story.ledger.turns.session(user, f"{user} {changes} {number}")
        value: Vote = 1 if number >= of - good else -1
        answered(story, "", "user", value, **{"session_id": session, **changes})


def said(story: Story, user: str | None = None) -> list[str]:
    rows = sql(story.ledger)
    return [line["said"] for line in read_headlines(rows, read_live(rows, user), user)]


HEAD = "First judged turns accepted: "


# What counts


def test_it_counts_what_the_owner_judged_first_and_not_what_came_first(story: Story) -> None:
    """An agent: a tool loop, then the reply that the person judges."""
    for number in range(9):
        key = f"agent {number}"
        answered(story, key, "tool", 1)
        answered(story, key, "other", 1)
        answered(story, key, "user", None)
        answered(story, key, "user", 0)
        first = answered(story, key, "user", -1)
        answered(story, key, "user", 1)
        assert read_live(sql(story.ledger))[-1] == First(0, first, "me", accepted=False)
    assert said(story) == [HEAD + "0% (0% to 41%) of 9 by the base model: too few to compare"]


def test_what_tools_and_programs_judge_is_no_first_judged_turn(story: Story) -> None:
    give = story.ledger.feedback.give
    for number in range(20):
        answered(story, f"tools {number}", "tool", 1)
        turn = answered(story, f"program {number}", "user", 1)
        assert give("me", About("turn", turn), Feedback(1.0, source="client"))
        answered(story, f"neutral {number}", "user", 0)
    assert said(story) == [HEAD + "none yet"]
    assert read_overview(story.ledger.path.parent, 16)["accepted"] == []
    turn = answered(story, "tools 0", "tool", -1)
    assert give("me", About("turn", turn), Feedback(1.0))
    assert read_live(sql(story.ledger)) == [First(0, turn, "me", accepted=True)]


def test_versions_that_a_rollback_has_left_behind_do_not_count(story: Story) -> None:
    base = story.version
    rated(story, 12, 16)
    only_base = said(story)
    rated(story, 40, 40, fallback="v1 failed: it is not loaded")
    assert said(story) == only_base, "replies of a stand-in count for no version"
    story.step(story.sampled("s", -1)[1])
    rated(story, 0, 16, policy_version=1)
    assert ": worse (evidence" in said(story)[0]
    story.ledger.versions.roll_back(base)
    assert said(story) != only_base, "the one that was trained has come to the base's"
    assert said(story)[0].endswith("of 17 by the base model: too few to compare")


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


def test_told_turns_count_without_their_words_and_without_their_lesson(story: Story) -> None:
    ledger, rows = story.ledger, sql(story.ledger)
    source = story.followed("source")
    wish = Wish("Be brief.", "always brief")
    ledger.judgements.add(source, value=-1, ballots=[], hints=["Be brief."], wish=wish)
    (lesson,) = ledger.lessons.of_user("me")
    told = LessonBlock((lesson.id,), 1, 2)
    rated(story, 9, 9, told=told, untrained_because="no valid vote")
    before = read_live(rows)
    assert len(before) == 10
    assert asyncio.run(ledger.trim(time() + 1)) == 9
    assert read_live(rows) == before
    rated(story, 4, 4, told=told, request_kind="later")
    ledger.forget(in_session("source", "me"))
    assert len(read_live(rows)) == 13


# What is said


def test_the_shares_that_are_compared_are_shown(story: Story) -> None:
    assert said(story) == [HEAD + "none yet"]
    rated(story, 2, 5)
    assert said(story) == [HEAD + "40% (3% to 91%) of 5 by the base model: too few to compare"]
    story.step(story.sampled("s", -1)[1])
    rated(story, 9, 15, policy_version=1)
    (line,) = said(story)
    assert "33% (2% to 85%) of 6 by the base model; 60% (" in line
    assert line.endswith(") of 15 by later versions: too few to compare")
    (headline,) = read_headlines(sql(story.ledger), read_live(sql(story.ledger)))
    shares = read_overview(story.ledger.path.parent, 16)["accepted"]
    assert [(one["good"], one["of"]) for one in shares] == [
        (headline[side]["good"], headline[side]["of"]) for side in ("base", "since")
    ], "the block below is of the same turns"


def test_after_a_rollback_the_shares_that_are_compared_are_shown(story: Story) -> None:
    """The first turns were not all the base's: two good versions, the second left behind."""
    rated(story, 2, 10)
    kept = story.step(story.sampled("a", -1)[1])[1]
    rated(story, 20, 40, policy_version=1, request_kind="first")
    story.step(story.sampled("b", -1)[1])
    rated(story, 40, 40, policy_version=2, request_kind="second")
    assert ": better (evidence" in said(story)[0]
    story.ledger.versions.roll_back(kept)
    (line,) = said(story)
    assert " of 11 by the base model; 49% (26% to 72%) of 41 by later versions" in line
    assert line.endswith(", 94% of the newest 16: no clear change")


def test_it_claims_nothing_that_the_newest_contradict() -> None:
    """A change of mind: what was better for long is not better now."""
    good, bad = ([First(v, n, "me", a) for n in range(64)] for v, a in ((1, True), (2, False)))
    firsts = [First(0, n, "me", n >= 12) for n in range(16)] + good
    assert ": better" in headline(firsts, {0})["said"]
    line = headline(firsts + bad[:16], {0})
    assert line["evidence"] > 20
    assert line["said"].endswith(", 0% of the newest 16: no clear change")


def test_user_who_came_after_the_first_step_is_compared_with_their_own_first_turns() -> None:
    rng = Random(0)
    firsts = [First(1 + n // 16, n, "me", n >= 16 or n % 3 == 0) for n in range(23)]
    assert headline(firsts, {0})["said"].endswith(": too few to compare")
    firsts += [First(3, n, "me", rng.random() < 0.88) for n in range(23, 100)]
    line = headline(firsts, {0})["said"]
    assert "of 16 at first;" in line
    assert ": better" in line
    # With enough of the base it stays the base's.
    assert "by the base model" in headline(firsts, {0, 1})["said"]


def test_each_user_has_a_line_and_sees_their_own(story: Story) -> None:
    rated(story, 6, 16, "ann")
    rated(story, 3, 4, "ben")
    line = HEAD + "38% (9% to 74%) of 16 by the base model: too few to compare"
    assert said(story) == [
        f"ann: {line}",
        f"ben: {HEAD}75% (13% to 100%) of 4 by the base model: too few to compare",
    ]
    assert said(story, "ann") == [line]


def claimed(shares: list[float], seed: int, sessions: int, joined: int = 0) -> bool:
    """Whether it ever claims a change, looked at after every fourth of these sessions. `joined`:
    the version that answers the user's first."""
    rng, firsts = Random(seed), list[First]()
    for n in range(sessions):
        version = max(0, n // 8 - 1)
        share = shares[min(version, len(shares) - 1)]
        firsts.append(First(joined + version, n, "me", rng.random() < share))
        line = headline(firsts, {0})["said"] if n % 4 == 3 else ""
        if ": better" in line or ": worse" in line:
            return True
    return False


def test_a_change_is_rarely_claimed_where_there_is_none_however_often_one_looks() -> None:
    assert sum(claimed([0.5], seed, 160) for seed in range(40)) <= 2
    assert sum(claimed([0.3, 0.6, 0.9], seed, 160) for seed in range(20)) >= 17
    assert sum(claimed([0.5], seed, 160, joined=3) for seed in range(40)) <= 2
    assert sum(claimed([0.3, 0.6, 0.9], seed, 160, joined=3) for seed in range(20)) >= 17
