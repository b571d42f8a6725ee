"""Learning is held while a user accepts fewer first judged turns than when it began."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import pytest

from tests.learner.test_rollback import undoing
from tests.support.fakes import FakeTrainer
from tests.support.learning import World, world
from tests.support.ledger import sample_counts, sql
from tinker_claw.evidence import CLAIM
from tinker_claw.ledger.decline import HOLD, SIZE, decline, read_decline
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.firsts import First


def replies(accepted: Sequence[bool]) -> list[First]:
    return [First(0, number, "me", each) for number, each in enumerate(accepted)]


def drawn(rng: Random, share: float, of: int) -> list[bool]:
    return [rng.random() < share for _ in range(of)]


# The rule


def test_a_user_whose_share_stays_is_hardly_ever_held() -> None:
    """Seeds 0 to 199, 300 replies each: whether learning was held at any of them."""
    held = 0
    for seed in range(200):
        rng = Random(seed)
        known = replies(drawn(rng, rng.random(), 300))
        held += any(decline(known[:n], 0) is not None for n in range(SIZE, 300, 16))
    print(f"held {held} of 200")
    assert held <= 2


@pytest.mark.parametrize(
    ("before", "since", "most"), [(0.9, 0.1, 24), (0.9, 0.4, 48), (0.8, 0.4, 110)]
)
def test_a_decline_is_found(before: float, since: float, most: int) -> None:
    """Seeds 0 to 19: the share falls after 80 replies; found after how many, in the median."""
    after = list[int]()
    for seed in range(20):
        rng = Random(seed)
        known = replies(drawn(rng, before, 80) + drawn(rng, since, 300))
        found = (n for n in range(1, 301) if decline(known[: 80 + n], 0))
        after.append(next(found, 301))
    print(f"{before} to {since}: found after {median(after)} replies")
    assert median(after) <= most


def test_learning_is_held_from_200_to_1_until_it_is_below_20_to_1() -> None:
    known = replies([True] * SIZE + [False] * SIZE)
    found = [decline(known[:n], 0) for n in range(len(known) + 1)]
    first = next(one for one in found if one)
    assert HOLD <= first.evidence < 10 * HOLD
    assert found[-1] is not None
    assert "`tinker-claw rollback v7` keeps" in str(decline(known, 7)), "not that of the last reply"
    assert (found[-1].before.good, found[-1].now.good, found[-1].now.of) == (SIZE, 0, SIZE)
    again = replies([True] * SIZE + [False] * SIZE + [True] * SIZE)
    ends = [decline(again[:n], 0) for n in range(2 * SIZE, len(again) + 1)]
    held = [one.evidence for one in ends if one]
    assert CLAIM <= min(held) < HOLD, "it is held on below 200 to 1"
    assert ends[-1] is None
    assert len(held) < len(ends) - 1


def test_a_change_of_mind_of_a_user_who_began_with_little_holds_nothing() -> None:
    """The share is compared with that of the beginning, not with the best one."""
    rng = Random(0)
    known = drawn(rng, 0.25, SIZE) + drawn(rng, 0.95, 200) + drawn(rng, 0.1, 100)
    assert decline(replies(known), 0) is None


# In a run


async def talk(w: World, said: str, count: int = SIZE) -> None:
    for _ in range(count):
        w.turn(said)
    await w.settled()


async def hold(w: World) -> None:
    """Accept a batch of first judged turns, and reject the next."""
    await talk(w, "GOOD")
    await w.version(1)
    await talk(w, "NO, HOW it should be")
    await w.until(lambda: w.health.learner.state == "held")


async def test_a_decline_holds_learning_and_says_what_to_do(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, batch_size=SIZE, trainer=trainer) as w:
        await hold(w)
        said = w.health.learner.error or ""
        assert said.startswith("0% of the newest 32 first judged turns were accepted, and 100% of ")
        assert "`tinker-claw rollback v0`" in said
        assert w.policy.current.version.id == 1, "it serves on"
        assert sample_counts(w.ledger)["queued"] == SIZE, "none is lost"
        shown = w.health.snapshot(version=1, waiting=SIZE, batch_size=SIZE)
        assert (shown["status"], shown["wrong"]) == ("degraded", ["learner"])
        assert read_overview(tmp_path, SIZE)["held"] + "." == said
    async with world(tmp_path, batch_size=SIZE, trainer=trainer) as w:
        await w.until(lambda: w.health.learner.state == "held")
        assert w.policy.newest.version.id == 1


async def test_it_goes_on_by_itself_when_replies_are_accepted_again(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=SIZE) as w:
        await hold(w)
        await talk(w, "YES", 4)
        assert w.health.learner.state == "held", "four are not enough"
        await talk(w, "YES", SIZE - 4)
        await w.version(2)
        assert w.health.learner.state != "held"
        assert read_overview(tmp_path, SIZE)["held"] is None


async def test_it_goes_on_after_a_rollback_which_begins_the_comparison_anew(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, batch_size=SIZE) as w:
        await hold(w)
        assert (await undoing(w).roll_back(0)).id == 2
        await w.until(lambda: w.health.learner.state == "waiting")
        assert read_overview(tmp_path, SIZE)["held"] is None
        await talk(w, "NO", SIZE // 2)
        await talk(w, "YES", SIZE // 2)
        await w.version(3)


async def test_a_user_who_changed_their_mind_goes_on_from_the_newest_version(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, batch_size=SIZE) as w:
        await hold(w)
        assert "`tinker-claw rollback v1` keeps what was learned" in (w.health.learner.error or "")
        assert (await undoing(w).roll_back(1)).step == 1, "the step stays"
        await w.version(3)
        assert sample_counts(w.ledger)["trained"] == 2 * SIZE, "what waited was trained"


async def test_a_user_who_contradicts_a_lesson_is_compared_from_there_on(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=SIZE) as w:
        lesson = w.ledger.lessons.rule("add", "me", None, "Use plain sentences.")
        await talk(w, "GOOD")
        await w.version(1)
        sql(w.ledger).write(
            "UPDATE lessons SET state = 'aside', changed_at = ? WHERE id = ?", time.time(), lesson
        )
        await talk(w, "NO, HOW it should be")
        await w.version(2)
        w.ledger.lessons.rule("keep", "me", lesson)
        await talk(w, "NO, HOW it should be")
        await w.until(lambda: w.health.learner.state == "held")


async def test_only_what_the_user_judged_counts_and_only_once_a_session(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=10 * SIZE) as w:
        await talk(w, "YES")
        for number in range(SIZE):
            w.turn("NO", role="tool", session=f"tools {number}")
            w.turn("YES", session=f"tools {number}")
            w.turn("NO", session=f"tools {number}")
            w.turn("who knows", session=f"neutral {number}")
            w.turn("YES", session=f"neutral {number}")
            turn = w.turn("YES", session=f"program {number}")
            program = Feedback(-1.0, source="client")
            w.ledger.feedback.give("me", About("turn", str(turn)), program)
            w.turn("YES", session=f"program {number}")
        await w.settled()
        assert read_decline(w.ledger.rows) is None
        for _ in range(SIZE):
            turn = w.turn("YES", role="tool")
            w.ledger.feedback.give("me", About("turn", str(turn)), Feedback(-1.0))
        await w.settled()
        found = read_decline(w.ledger.rows)
        assert found is not None
        assert found.now.of == SIZE


async def test_replies_of_a_pinned_version_say_nothing_of_the_newest(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=SIZE) as w:
        await hold(w)
        await undoing(w).pin(0)
        await talk(w, "YES", 2 * SIZE)
        assert read_decline(w.ledger.rows) is not None


async def test_users_are_compared_with_themselves(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=10 * SIZE) as w:
        await talk(w, "YES")
        for _ in range(SIZE):
            w.turn("NO", user="another")
        await w.settled()
        assert read_decline(w.ledger.rows) is None


async def test_of_a_long_ledger_the_first_and_the_newest_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_claw.ledger.decline._NEWEST", SIZE)
    async with world(tmp_path, batch_size=10 * SIZE) as w:
        await talk(w, "YES", 2 * SIZE)
        await talk(w, "NO")
        found = read_decline(w.ledger.rows)
        assert found is not None
        assert (found.before.good, found.now.good) == (SIZE, 0)
