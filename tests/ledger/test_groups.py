"""Episodes and groups in a real ledger: who waits for whom, what becomes of those that never get
whole, and what is said of it. No order in which it all arrives makes a difference."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ledger.test_costs import plans_of, steps_of
from tests.support.ledger import judgeable, new_turn, postpone, sample_counts, sql
from tinker_claw.cli.explain import explained
from tinker_claw.config.settings import Training
from tinker_claw.ledger import groups, prune
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.groups import LIMIT_S
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import read_queue
from tinker_claw.ledger.turn_view import count_outcomes, turns_where
from tinker_claw.methods.passes import batch_advantages
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Attempt, NextState, PolicyVersion

SOON, LATE = 0.0, 10 * LIMIT_S
"""Times of looking at a ledger, in seconds since the newest row."""


@dataclass
class Told:
    """A ledger with the calls of clients and judge."""

    ledger: Ledger
    version: PolicyVersion
    keys: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self, key: str, attempt: Attempt | None) -> None:
        self.keys[key] = self.ledger.turns.session("me", key)
        if attempt is not None:
            assert self.ledger.turns.enrol(self.keys[key], "me", attempt)

    def turn(self, key: str) -> int:
        turn = new_turn(self.ledger, session_id=self.keys[key], policy_version=self.version.id)
        return self.ledger.turns.add(turn)

    def judge(self, turn: int, votes: tuple[int, ...]) -> None:
        self.ledger.turns.add_next_state(turn, NextState("tool", "ok"))
        ballots = [("", vote) for vote in votes]  # type: ignore[arg-type]
        self.ledger.judgements.add(turn, value=None, ballots=ballots, hints=())
        self.ledger.samples.add(turn, sum(votes) / len(votes), None)

    def end(self, key: str, score: float) -> None:
        """Report an outcome, and judge the last turn."""
        assert self.ledger.feedback.give("me", About("session", key), Feedback(score, final=True))
        for turn in judgeable(self.ledger):
            if self.ledger.turns.next_state(turn) is None:
                self.ledger.samples.add(turn, None, None)

    def look(self, later: float = SOON, most: int = 128) -> groups.Released:
        self.ledger.samples.expire(0, 4)
        newest = sql(self.ledger).one("SELECT MAX(created_at) FROM turns") or 0.0
        ended = sql(self.ledger).one("SELECT MAX(created_at) FROM feedback") or 0.0
        return self.ledger.groups.release(max(newest, ended) + later, most)

    def newly_queued(self, later: float = SOON) -> int:
        """Number of samples that a look queues."""
        self.ledger.samples.expire(0, 4)
        before = self.ledger.samples.queued()
        self.look(later)
        return self.ledger.samples.queued() - before

    def queued(self) -> dict[tuple[str, int], float]:
        """Rewards by session and step."""
        rows = sql(self.ledger).rows(
            "SELECT key, idx, reward FROM samples JOIN turns ON turns.id = turn_id "
            "JOIN sessions ON sessions.id = session_id WHERE state = 'queued'"
        )
        return {(row["key"], row["idx"]): row["reward"] for row in rows}

    def words(self) -> set[str]:
        """States of the turns; both ways to read them agree."""
        turns = turns_where(sql(self.ledger), "ORDER BY turns.id")
        counted = count_outcomes(sql(self.ledger))
        assert counted == Counter(turn["reason"] or turn["outcome"] for turn in turns)
        return set(counted)


def open_ledger(path: Path) -> Told:
    ledger = Ledger(path)
    return Told(ledger, ledger.versions.add_first(state_ref="s0", sampler_ref="p0"))


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    found = open_ledger(tmp_path)
    yield found
    found.ledger.close()


def in_group(name: str = "g", size: int = 2, task: str | None = "t") -> Attempt:
    return Attempt(task, name, size, episode=True)


def test_step_reward_is_outcome_and_mean_of_valid_votes_once_the_group_is_whole(
    told: Told,
) -> None:
    for key in "ab":
        told.begin(key, in_group())
        told.judge(told.turn(key), (1, 1, -1) if key == "a" else (-1, 0, -1))
        told.turn(key)
    told.look()
    assert told.queued() == {}
    assert told.words() == {"waits for an outcome", "waits for the next message"}
    told.end("a", 1.0)
    assert told.newly_queued() == 0
    assert told.words() == {"waits for an outcome", "waits for the next message"}
    told.end("b", -0.5)
    assert told.newly_queued() == 4
    assert told.queued() == pytest.approx(
        {("a", 0): 4 / 3, ("a", 1): 1.0, ("b", 0): -0.5 - 2 / 3, ("b", 1): -0.5}
    )
    assert told.words() == {"waits for a step"}
    text = " ".join(explained(sql(told.ledger), 1, text=True))
    assert "task t · group g · outcome +1 · reward +1.33" in text
    assert [one.group for one in read_queue(told.ledger.rows)] == [1] * 4
    advantages = batch_advantages(told.ledger.samples.load(), Training())
    assert advantages == pytest.approx([1.0, -1.0, 1.0, -1.0])


def test_reply_that_is_asked_for_again_moves_no_later_step(told: Told) -> None:
    for key in "ab":
        told.begin(key, in_group())
        if key == "a":
            told.turn(key)  # its client hung up, and asked again
        told.judge(told.turn(key), (1,) if key == "a" else (-1,))
        told.turn(key)
        told.end(key, 0.5)
    assert told.newly_queued() == 2, "the second step's rewards agree, so nothing is learned there"
    first, second = told.ledger.samples.load()
    assert first.bucket == second.bucket
    assert batch_advantages([first, second], Training()) == pytest.approx([1.0, -1.0])


def test_episode_of_no_group_goes_by_its_own_outcome_of_which_zero_is_one(told: Told) -> None:
    told.begin("a", Attempt(episode=True))
    turn = told.turn("a")
    told.end("a", 0.0)
    told.look()
    assert told.queued() == {("a", 0): 0.0}
    late = Feedback(1.0, final=True)
    answer = told.ledger.feedback.give("me", About("session", "a"), late)
    assert answer is not None
    assert answer.unused
    text = " ".join(explained(sql(told.ledger), turn, text=True))
    assert "outcome 0 · reward 0" in text, "the one that counted"
    (sample,) = told.ledger.samples.load()
    assert sample.bucket is None


def test_place_in_the_queue_begins_with_the_outcome(told: Told) -> None:
    """However long the episode took: what it has over its share waits for others from then on."""
    told.begin("a", Attempt(episode=True))
    for _ in range(2):
        told.judge(told.turn("a"), (1,))
    told.end("a", 1.0)
    now = time.time() + LIMIT_S / 2
    told.ledger.groups.release(now, 128)
    assert told.ledger.samples.queued() == 2
    assert {one.queued_at for one in read_queue(told.ledger.rows)} == {now}


@pytest.mark.parametrize("size", [1, 2], ids=["announced", "what came in time"])
def test_group_of_one_is_measured_as_an_episode_of_none(told: Told, size: int) -> None:
    for name, score in (("a", 1.0), ("b", 0.0)):
        for number in range(size):
            told.begin(f"{name}{number}", in_group(name, size))
            told.turn(f"{name}{number}")
        told.end(f"{name}0", score)
    told.look(LATE)
    assert told.queued() == {("a0", 0): 1.0, ("b0", 0): 0.0}
    samples = told.ledger.samples.load()
    assert [sample.bucket for sample in samples] == [None, None]
    assert batch_advantages(samples, Training()) == [0.5, -0.5]
    told.ledger.steps.begin(0, [sample.id for sample in samples])
    if size == 2:  # after its group was over: it changes nothing that was trained
        late = Feedback(1.0, final=True)
        assert told.ledger.feedback.give("me", About("session", "a1"), late)
    assert [sample.bucket for sample in told.ledger.samples.load()] == [None, None]


def test_look_at_running_episodes_reads_none_of_their_turns(told: Told) -> None:
    """The learner looks whenever a sample arrives, while twenty thousand turns may be running."""
    for n in range(8):
        told.begin(f"s{n}", in_group(f"g{n // 4}", 4) if n < 6 else Attempt(episode=True))
        told.turn(f"s{n}")
    told.end("s0", 1.0)
    plans = plans_of(told.ledger, lambda: told.ledger.groups.release(time.time(), 128))
    assert plans
    assert not [plan for plan in plans if "turns" in plan]

    def steps(turns: int) -> int:
        for _ in range(turns):
            for name in ("s1", "s2"):
                told.judge(told.turn(name), (1,))
        return steps_of(told.ledger, lambda: told.ledger.samples.expire(0, 9))

    few = steps(8)
    assert steps(24) < 6 * few, "four times as many: it was sixteen times as long"


def test_task_without_an_episode_changes_nothing(told: Told) -> None:
    told.begin("a", Attempt("t"))
    told.judge(told.turn("a"), (1,))
    assert told.queued() == {("a", 0): 1.0}
    assert told.look().look_at is None


def test_short_group_trains_after_the_limit_and_a_missing_outcome_is_none(told: Told) -> None:
    for key in "abc":
        told.begin(key, in_group(size=4))
        told.judge(told.turn(key), (1,))
        told.turn(key)
    told.end("a", 1.0)
    told.end("c", -1.0)
    before = told.look()
    assert before.look_at is not None
    assert told.newly_queued(LIMIT_S - 1) == 0
    assert told.ledger.samples.queued() == 0
    released = told.look(LIMIT_S)
    assert (released.expired, released.look_at) == (1, None)
    assert told.ledger.samples.queued() == 4
    assert set(told.queued()) == {("a", 0), ("a", 1), ("c", 0), ("c", 1)}
    assert told.words() == {"waits for a step", Reason.NO_OUTCOME}
    told.begin("alone", Attempt(episode=True))
    alone = told.turn("alone")
    told.look(LATE)
    assert sql(told.ledger).one("SELECT reason FROM turns WHERE id = ?", alone) == Reason.NO_OUTCOME


def test_what_the_judge_has_in_hand_is_waited_for_whatever_the_limit_says(told: Told) -> None:
    told.begin("a", in_group(size=1))
    turn = told.turn("a")
    told.ledger.turns.add_next_state(turn, NextState("tool", "ok"))
    told.end("a", 1.0)
    assert told.newly_queued(LATE) == 0
    told.ledger.turns.refuse(turn, TurnRefusal(Reason.UNSCORED))
    told.turn("a")
    assert told.newly_queued() == 0
    assert told.words() == {Reason.UNSCORED, Reason.EPISODE_OVER}


def test_what_comes_after_an_outcome_or_when_the_group_is_over_is_not_trained(told: Told) -> None:
    told.begin("a", in_group(size=1))
    told.turn("a")
    told.end("a", 1.0)
    told.turn("a")
    told.look()
    told.begin("late", in_group(size=1))
    told.turn("late")
    assert set(told.queued()) == {("a", 0)}
    assert told.words() == {"waits for a step", Reason.EPISODE_OVER}


def test_turn_that_the_agent_did_not_go_on_from_holds_up_nobody(told: Told) -> None:
    told.begin("a", in_group(size=1))
    told.turn("a")  # sent again, perhaps
    told.judge(told.turn("a"), (1,))
    told.turn("a")
    told.end("a", 1.0)
    assert told.newly_queued() == 2
    assert told.words() == {"waits for a step", Reason.NOT_CONTINUED}


def test_steps_at_which_all_had_the_same_reward_are_no_part_of_a_batch(told: Told) -> None:
    for key, votes in (("a", (1, 1, -1)), ("b", (-1, 1, 1)), ("c", (1, -1, 1))):
        told.begin(key, in_group(size=3))
        told.judge(told.turn(key), votes)
        told.judge(told.turn(key), (1,) if key == "a" else (0,))
        told.end(key, 1.0)
    assert told.ledger.samples.queued() == 0
    assert told.look().expired == 3
    assert told.ledger.samples.queued() == 3
    assert {step for _, step in told.queued()} == {1}
    assert Reason.EQUAL_REWARDS in told.words()


def test_group_that_is_too_large_for_a_step_expires_by_name(told: Told) -> None:
    for key in "ab":
        told.begin(key, in_group())
        for _ in range(3):
            told.judge(told.turn(key), (1,) if key == "a" else (-1,))
        told.end(key, 1.0)
    assert told.look(most=5).expired == 6
    assert told.words() == {Reason.LARGE_GROUP}


def test_group_grows_old_as_one(told: Told) -> None:
    for key in "ab":
        told.begin(key, in_group())
        told.judge(told.turn(key), (1,) if key == "a" else (-1,))
        told.end(key, 1.0)
        told.version = told.ledger.steps.commit(
            told.ledger.steps.begin(told.version.id, []),
            told.version,
            state_ref="s",
            sampler_ref="p",
            metrics={},
        )
    told.look()
    assert len(told.queued()) == 2
    assert told.ledger.samples.expire(2, 1) == 2
    assert told.queued() == {}
    assert told.words() == {Reason.TOO_OLD, Reason.BROKEN_GROUP}
    told.begin("c", in_group())
    told.turn("c")
    assert Reason.EPISODE_OVER in told.words()


def test_group_that_grew_old_while_an_episode_ran_is_over_and_says_so(told: Told) -> None:
    told.begin("a", in_group())
    told.judge(told.turn("a"), (1,))
    step = told.ledger.steps.begin(told.version.id, [])
    told.version = told.ledger.steps.commit(
        step, told.version, state_ref="s", sampler_ref="p", metrics={}
    )
    told.begin("b", in_group())
    told.judge(told.turn("b"), (-1,))
    assert told.ledger.samples.expire(1, 0) == 2
    assert told.look().look_at is None, "it waits for nobody"
    told.turn("b")
    assert told.words() == {Reason.TOO_OLD, Reason.BROKEN_GROUP, Reason.EPISODE_OVER}


def test_turn_that_is_judged_anew_after_its_episode_is_not_trained(told: Told) -> None:
    told.begin("a", in_group(size=1))
    turn = told.turn("a")
    told.ledger.turns.add_next_state(turn, NextState("tool", "ok"))
    postpone(told.ledger, turn, "no answer that can be read", last=True)
    told.end("a", 1.0)
    told.look()
    assert told.ledger.jobs.take_up(None) == [turn]
    told.judge(turn, (1,))
    assert told.words() == {Reason.EPISODE_OVER}
    assert told.queued() == {}


def test_session_is_of_one_group_for_good(told: Told) -> None:
    told.begin("a", in_group("g"))
    assert not told.ledger.turns.enrol(told.keys["a"], "me", in_group("h"))
    assert told.ledger.turns.enrol(told.keys["a"], "me", in_group("g", 5))
    assert sql(told.ledger).rows("SELECT name, size FROM groups")[0]["size"] == 5
    # Another user's group of that name, and another task's, are other ones.
    told.ledger.turns.enrol(told.ledger.turns.session("you", "a"), "you", in_group("g"))
    told.begin("b", in_group("g", task=None))
    assert sql(told.ledger).one("SELECT COUNT(*) FROM groups") == 3


def test_forgotten_session_leaves_no_name_and_its_group_goes_on_without_it(told: Told) -> None:
    for key in "abc":
        told.begin(key, in_group(size=3))
        told.judge(told.turn(key), (1,) if key == "a" else (-1,))
        told.end(key, 1.0)
    told.look()
    assert len(told.queued()) == 3
    told.ledger.forget(prune.in_session("b", "me"))
    told.look()
    assert set(told.queued()) == {("a", 0), ("c", 0)}
    told.ledger.forget(prune.in_session("a", "me"))
    told.ledger.forget(prune.in_session("c", "me"))
    assert sql(told.ledger).one("SELECT COUNT(*) FROM groups") == 0
    assert sql(told.ledger).one("SELECT COUNT(*) FROM sessions WHERE task IS NOT NULL") == 0


def test_feedback_changes_what_is_held_and_nothing_of_a_group_that_is_queued(told: Told) -> None:
    told.begin("a", in_group(size=1))
    turn = told.turn("a")
    told.judge(turn, (1,))
    given = told.ledger.feedback.give("me", About("turn", turn), Feedback(-0.5))
    assert given is not None
    assert given.unused is None
    assert judgeable(told.ledger) == [turn]
    told.ledger.samples.add(turn, -0.5, None)
    told.end("a", 1.0)
    told.look()
    assert told.queued() == {("a", 0): 0.5}
    for said in (Feedback(1.0), Feedback(-1.0, final=True)):
        late = told.ledger.feedback.give("me", About("turn", turn), said)
        assert late is not None
        assert late.unused is not None
        assert "the episode is over" in late.unused
    assert told.queued() == {("a", 0): 0.5}


EPISODES = st.lists(
    st.tuples(
        st.integers(0, 1),  # group
        st.lists(st.sampled_from([(1,), (1, 1, -1), (0,), (-1, -1, 1)]), max_size=2),
        st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(EPISODES, st.data())
def test_no_order_of_arrival_changes_rewards_or_advantages(episodes: list[Any], data: Any) -> None:
    """Turns, verdicts, outcomes and looks are mixed, each session's own in their order."""

    def live(path: Path, order: list[int]) -> tuple[dict[tuple[str, int], float], ...]:
        told = open_ledger(path)
        sizes = [sum(g == group for group, _, _ in episodes) for g in (0, 1)]
        left = {n: ["begin", *votes, "last", "end"] for n, (_, votes, _) in enumerate(episodes)}
        for n in order:
            (group, _, score), what, key = episodes[n], left[n].pop(0), f"s{n}"
            if what == "begin":
                told.begin(key, in_group(f"g{group}", sizes[group]))
            elif what == "last":
                told.turn(key)
            elif what == "end":
                told.end(key, score)
            else:
                told.judge(told.turn(key), what)
            told.look()
            counts = {
                row["name"]: row["states"]
                for row in sql(told.ledger).rows(
                    "SELECT name, COUNT(DISTINCT state = 'held') AS states FROM samples "
                    "JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id "
                    "JOIN groups ON groups.id = group_id GROUP BY name"
                )
            }
            assert set(counts.values()) <= {1}, "a group is held, or it is not"
        samples = told.ledger.samples.load()
        advantages = zip(samples, batch_advantages(samples, Training()), strict=True)
        names = {id: key for key, id in told.keys.items()}
        found = {
            (names[sample.session_id], told.ledger.turns.get(sample.turn_id).index): advantage
            for sample, advantage in advantages
        }
        assert found.keys() == told.queued().keys()
        assert sample_counts(told.ledger).get("held", 0) == 0
        rewards = told.queued()
        told.ledger.close()
        return found, rewards

    steps = [n for n, (_, votes, _) in enumerate(episodes) for _ in range(len(votes) + 3)]
    with tempfile.TemporaryDirectory() as folder:
        by_session = live(Path(folder) / "one", steps)
        mixed = live(Path(folder) / "two", data.draw(st.permutations(steps)))
    assert mixed == by_session
