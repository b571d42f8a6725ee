"""Episodes and groups on their way through judge and learner, with a trainer that only counts."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fakes import LOGPROB, FakeTrainer
from tests.support.learning import World, has_token, world
from tests.support.ledger import sample_counts, sql
from tinker_claw.config.settings import Gateway
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.groups import LIMIT_S
from tinker_claw.ledger.samples import MOST_BARE, read_queue
from tinker_claw.turn_state import Reason
from tinker_claw.types import Attempt, Lacks, Tokens

FAR = 2**31
"""Batch size that is never reached."""


def begin(w: World, session: str, group: str | None = "g", size: int = 2) -> None:
    attempt = Attempt("t", group, size if group else None, episode=True)
    assert w.ledger.turns.enrol(w.ledger.turns.session("me", session), "me", attempt)


def last(w: World, session: str, tokens: Tokens = (7, 8)) -> int:
    """Add the last turn of an episode, which nothing follows."""
    turn = w.turn("", session=session, tokens=tokens)
    with sql(w.ledger).transaction() as tx:
        tx.execute("DELETE FROM next_states WHERE turn_id = ?", (turn,))
        tx.execute("UPDATE turns SET state = 'waiting' WHERE id = ?", (turn,))
    return turn


def end(w: World, session: str, score: float) -> None:
    said = Feedback(score, source="client", final=True)
    assert w.ledger.feedback.give("me", About("session", session), said)
    w.judging.wake()


def why(w: World) -> set[str | None]:
    rows = sql(w.ledger).rows(
        "SELECT reason FROM turns JOIN samples ON turn_id = turns.id WHERE state = 'refused'"
    )
    return {row[0] for row in rows}


async def test_group_of_two_trains_when_its_second_outcome_comes(tmp_path: Path) -> None:
    async with world(tmp_path, method="binary") as w:
        for session, said in (("a", "YES"), ("b", "NO")):
            begin(w, session)
            w.turn(said, session=session)
            await w.settled()
            last(w, session)
        end(w, "a", 1.0)
        await w.until(lambda: sample_counts(w.ledger).get("held") == 3)
        assert w.trainer.steps == []
        end(w, "b", 0.0)
        await w.version(1)
        assert w.says.asked == 2, "of each first step"
        rows = sql(w.ledger).rows(
            "SELECT reward, state FROM samples JOIN turns ON turns.id = turn_id ORDER BY turn_id"
        )
        assert [tuple(row) for row in rows] == [
            (2.0, "trained"),
            (1.0, "trained"),
            (-1.0, "trained"),
            (0.0, "trained"),
        ]
        ((ppo,),) = w.trainer.steps
        share = 1 / (Gateway().max_reply_tokens * 4)  # four samples
        down = -share * (1 - math.exp(LOGPROB))
        assert [d.advantages[0] for d in ppo.datums] == pytest.approx([share, down, share, down]), (
            "each against the same step of the other"
        )


async def test_outcomes_alone_reward_steps_where_so_set_and_the_judge_is_not_asked_of_any(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, method="combine", episode_reward="outcome") as w:
        for session, said in (("a", "YES"), ("b", "NO, HOW it should be")):
            begin(w, session)
            w.turn(said, session=session)
            last(w, session)
        end(w, "a", 1.0)
        end(w, "b", -1.0)
        await w.version(1)
        assert w.says.asked == 0
        rows = sql(w.ledger).rows(
            "SELECT reward, state FROM samples JOIN turns ON turns.id = turn_id ORDER BY turn_id"
        )
        assert [tuple(row) for row in rows] == [(1.0, "trained")] * 2 + [(-1.0, "trained")] * 2
        w.turn("YES", session="a conversation")
        await w.settled()
        assert w.says.asked > 0, "only episodes have an outcome"


@pytest.mark.parametrize(("by", "reward"), [("steps", 0.5), ("outcome", 1.0)])
async def test_a_steps_own_score_counts_where_steps_are_rewarded_and_nowhere_else(
    tmp_path: Path, by: str, reward: float
) -> None:
    async with world(tmp_path, method="binary", episode_reward=by, batch_size=FAR) as w:
        begin(w, "a", group=None)
        step = w.turn("", session="a", role="tool")
        said = Feedback(-0.5, source="client")
        assert w.ledger.feedback.give("me", About("turn", step), said)
        last(w, "a")
        end(w, "a", 1.0)
        await w.until(lambda: sample_counts(w.ledger).get("queued") == 2)
        rows = sql(w.ledger).rows("SELECT reward FROM samples ORDER BY turn_id")
        assert [row["reward"] for row in rows] == [reward, 1.0]


async def test_batch_is_as_large_as_its_groups(tmp_path: Path) -> None:
    async with world(tmp_path, method="binary", batch_size=2) as w:
        for n in range(5):
            begin(w, f"s{n}", size=5)
            last(w, f"s{n}")
        for n in range(5):
            end(w, f"s{n}", n / 4)
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 5
        ((ppo,),) = w.trainer.steps
        assert len(ppo.datums) == 4, "the middle one has no advantage, and counts in B"
        assert ppo.datums[0].advantages[0] == pytest.approx(
            -(2**0.5) / (Gateway().max_reply_tokens * 5) * (1 - math.exp(LOGPROB))
        )


async def test_time_limit_ends_a_group_by_itself(tmp_path: Path) -> None:
    # The clock of the learner is ahead, so that the limit comes in a moment.
    async with world(tmp_path, method="binary", batch_size=2, ahead_s=LIMIT_S - 1.0) as w:
        for session in "abc":
            begin(w, session, size=3)
            last(w, session)
        end(w, "a", 1.0)
        end(w, "b", -1.0)
        await w.settled()
        assert sample_counts(w.ledger).get("held") == 2
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 2
        assert w.why_refused(3) == Reason.NO_OUTCOME


async def test_refused_step_completes_its_episode(tmp_path: Path) -> None:
    async with world(tmp_path, method="opd", batch_size=FAR) as w:
        begin(w, "a", None)
        w.turn("NO, HOW it should be", session="a")
        await w.settled()
        turn = last(w, "a")
        end(w, "a", 1.0)
        await w.until(lambda: w.ledger.samples.queued() == 1)
        assert w.why_refused(turn) == "no hint"


async def test_batch_in_which_nothing_is_better_expires_by_name_and_learning_goes_on(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, method="binary") as w:
        for n in range(4):
            begin(w, f"s{n}", None)
            last(w, f"s{n}")
            end(w, f"s{n}", 0.0)
        await w.until(lambda: sample_counts(w.ledger)["expired"] == 4)
        assert why(w) == {Reason.NOTHING_BETTER}
        assert w.trainer.steps == []
        for said in ("YES", "NO", "YES", "NO"):
            w.turn(said)
        await w.version(1)
        assert w.health.learner.error is None


async def test_group_whose_step_fails_is_set_aside_whole_and_the_next_trains(
    tmp_path: Path,
) -> None:
    trainer = FakeTrainer(refuse=has_token(666))
    async with world(tmp_path, method="binary", trainer=trainer, batch_size=2) as w:
        for bad, group in ((666, "first"), (7, "second")):
            names = [f"{group} {n}" for n in range(3)]
            for n, name in enumerate(names):
                begin(w, name, group, 3)
                last(w, name, tokens=(bad,) if n == 0 else (7, 8))
            for n, name in enumerate(names):
                end(w, name, n / 2)
            if bad == 666:
                await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 3)
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 3


async def test_rejections_without_a_hint_wait_for_a_better_reply_and_the_newest_are_kept(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        for _ in range(MOST_BARE + 3):
            w.turn("NO")
        await w.settled()
        w.learner.wake()
        await w.until(lambda: sample_counts(w.ledger)["expired"] == 3)
        assert why(w) == {Reason.NOTHING_BETTER}
        assert (w.trainer.steps, w.ledger.samples.queued()) == ([], MOST_BARE)
        w.turn("YES")
        await w.version(1)
        assert w.ledger.samples.queued() == MOST_BARE - 3, "three went with the accepted one"
        (step,) = w.trainer.steps
        assert sum(len(one.datums) for one in step) == 4, "each has a gradient"


async def test_who_judged_a_turn_and_whether_its_rejection_is_bare_is_kept(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=FAR) as w:
        w.turn("YES")
        w.turn("NO, HOW it should be")
        tools = [w.turn("NO", role="tool") for _ in range(2)]
        w.turn("NO", cut=True)
        begin(w, "episode", None)
        w.turn("NO", session="episode")
        last(w, "episode")
        end(w, "episode", -1.0)
        await w.until(lambda: w.ledger.samples.queued() == 7)
        assert w.ledger.feedback.give("me", About("turn", tools[0]), Feedback(1.0))
        w.judging.wake()
        expected = {("user", False): 4, ("tools", True): 1, ("outcome", False): 2}
        await w.until(
            lambda: (
                Counter((one.judge, one.lacks == Lacks.BETTER) for one in read_queue(w.ledger.rows))
                == expected
            )
        )


async def test_in_the_papers_recipe_a_rejection_waits_for_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, recipe="paper") as w:
        for _ in range(4):
            w.turn("NO")
        await w.version(1)


async def test_cut_reply_is_a_sample_only_where_it_was_rejected(tmp_path: Path) -> None:
    async with world(tmp_path, method="binary", batch_size=FAR) as w:
        turns = [w.turn(said, cut=True) for said in ("YES", "NO")]
        await w.settled()
        assert w.why_refused(turns[0]) == "cut by its token limit, and not rejected"
        assert [s.turn_id for s in w.ledger.samples.load()] == turns[1:]
