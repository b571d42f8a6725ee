"""--keep-days: old turns lose text and tokens, and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import World, gateway
from tests.support.ledger import (
    COMPLETION,
    new_turn,
    sample_counts,
    sql,
    sql_connection,
    step_counts,
    verdict_counts,
)
from tinker_claw.app.main import once
from tinker_claw.cli.explain import explained
from tinker_claw.config.settings import Keeping
from tinker_claw.errors import ForgottenError, LedgerError
from tinker_claw.ledger import prune
from tinker_claw.ledger.database import WritingConnection, open_read_only
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import read_contents
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import HintScores, NextState, PolicyVersion

WORDS = "quetzalcoatl"
TEACHER = HintScores("be brief", (-1.0,) * 3, ((-1.0, -2.0),) * 3, 1, text=WORDS)


def add(ledger: Ledger, key: str, **changes: Any) -> int:
    rng = random.Random(key)
    prompt = (*range(3000), *(rng.randrange(150_000) for _ in range(2000)))
    said = {"request_text": f"{WORDS} {key}", "reply_text": WORDS, "prompt": prompt}
    return ledger.turns.add(new_turn(ledger, key, **(said | changes)))


def follow(ledger: Ledger, turn: int) -> None:
    ledger.turns.add_next_state(turn, NextState("user", WORDS))
    ballots = [(f"{WORDS}: -1", -1)] * 3
    ledger.judgements.add(turn, value=-1, ballots=ballots, hints=[f"no {WORDS}"])


def sampled(ledger: Ledger, key: str) -> int:
    turn = add(ledger, key)
    follow(ledger, turn)
    ledger.samples.add(turn, -1, TEACHER)
    return turn


def step(ledger: Ledger, parent: PolicyVersion, turns: list[int]) -> PolicyVersion:
    marks = ", ".join("?" * len(turns))
    found = sql(ledger).rows(f"SELECT id FROM samples WHERE turn_id IN ({marks})", *turns)
    number = ledger.steps.begin(parent.id, [row["id"] for row in found])
    ledger.steps.store_advantages(number, [(row["id"], -1.0, (-0.5,) * 3) for row in found], None)
    return ledger.steps.commit(
        number, parent, state_ref=f"s{number}", sampler_ref="p", metrics={"samples": len(found)}
    )


def trim(ledger: Ledger, before: float) -> int:
    return asyncio.run(ledger.trim(before))


def full(ledger: Ledger) -> set[int]:
    """Turns that have their text."""
    return {row["id"] for row in sql(ledger).rows("SELECT id FROM turns WHERE request_text <> ''")}


def test_what_is_done_with_goes_and_what_may_be_trained_stays(ledger: Ledger) -> None:
    parent = ledger.versions.newest()
    assert parent is not None
    trained = [sampled(ledger, f"t{n}") for n in range(2)]
    step(ledger, parent, trained)
    queued = sampled(ledger, "q")
    refused = add(ledger, "r", untrained_because="side turn: recap")
    waits = add(ledger, "w")
    judged = add(ledger, "j")
    follow(ledger, judged)
    ended = add(ledger, "e")
    row = sql(ledger).row("SELECT session_id FROM turns WHERE id = ?", ended)
    assert row is not None
    ledger.turns.close([row["session_id"]])

    assert trim(ledger, before=time.time() + 1) == 4
    gone = {*trained, refused, ended}
    assert full(ledger).isdisjoint(gone)
    assert {queued, waits, judged} <= full(ledger)
    assert ledger.samples.load()[0].prompt == ledger.turns.get(queued).prompt
    assert len(ledger.turns.get(queued).prompt) == 5000
    assert ledger.turns.get(waits).completion == COMPLETION
    assert trim(ledger, before=time.time() + 1) == 0, "there is nothing more to do"
    refusals = dict(tuple(r) for r in sql(ledger).rows("SELECT id, reason FROM turns"))
    assert (refusals[ended], refusals[refused]) == (Reason.UNFOLLOWED, "side turn: recap")
    assert refusals[waits] is None


def test_emptied_turns_are_still_counted_and_told(ledger: Ledger) -> None:
    parent = ledger.versions.newest()
    assert parent is not None
    turn = sampled(ledger, "t")
    step(ledger, parent, [turn])
    figures = (sample_counts(ledger), verdict_counts(ledger), step_counts(ledger))
    assert trim(ledger, before=time.time() + 1) == 1
    assert (sample_counts(ledger), verdict_counts(ledger), step_counts(ledger)) == figures
    with open_read_only(ledger.path) as rows, rows.moment():
        contents = read_contents(rows, turn)
        text = " ".join(explained(rows, turn, text=True))
    assert contents is not None
    view = contents.turn
    assert (view["prompt_tokens"], view["completion_tokens"]) == (5000, 3)
    assert view["state"] == "trained"
    assert (contents.request_text, contents.reply_text, contents.hints) == ("", "", [""])
    assert (view["verdict"], contents.reward, contents.advantage) == (-1, -1, -1)
    assert (contents.advantages, contents.completion.tokens) == ((), ())
    assert "trained in step 1" in text


def test_nothing_follows_a_turn_whose_words_are_gone(ledger: Ledger) -> None:
    trained = sampled(ledger, "a")
    step = ledger.steps.begin(0, [sample.id for sample in ledger.samples.load()[:1]])
    ledger.steps.commit(step, ledger.versions.get(0), state_ref="s1", sampler_ref="p1", metrics={})
    ledger.forget(prune.in_session("a", None))
    assert sql(ledger).one("SELECT state FROM turns WHERE id = ?", trained) == "forgotten"
    gone = add(ledger, "b")
    ledger.forget(prune.in_session("b", None))
    for turn in (trained, gone):
        assert not ledger.turns.add_next_state(turn, NextState("user", WORDS))
    assert sql(ledger).rows("SELECT * FROM next_states") == []


def test_texts_are_gone_from_the_file_and_shared_blocks_stay(ledger: Ledger) -> None:
    for n in range(40):
        add(ledger, f"x{n}", untrained_because="side")
    kept = add(ledger, "kept")
    prompt = ledger.turns.get(kept).prompt
    before = ledger.live_bytes()
    assert trim(ledger, before=time.time() + 1) == 40
    assert ledger.turns.get(kept).prompt == prompt
    row = sql(ledger).row("SELECT COUNT(*) AS n FROM prompt_blocks")
    assert row is not None
    assert row["n"] == 4, "the kept one's own"
    assert ledger.live_bytes() < 0.7 * before, "rows keep their pages until VACUUM"
    sql(ledger).rows("PRAGMA wal_checkpoint(TRUNCATE)")
    assert ledger.path.read_bytes().count(WORDS.encode()) == 2, "request and reply of the kept one"


def test_block_that_a_new_turn_shares_with_dropped_ones_is_not_deleted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tuple(range(50_000, 55_000))
    for n in range(30):  # so many blocks that they are deleted in several transactions
        add(ledger, f"x{n}", untrained_because="side")
    add(ledger, "shared", untrained_because="side", prompt=shared)
    monkeypatch.setattr(prune, "_BLOCKS", 5)
    new = list[int]()

    def sleep(seconds: float) -> None:
        new[:] = new or [add(ledger, "new", prompt=(*shared, 7))]

    assert trim(ledger, before=time.time() + 1) == 31
    with closing(WritingConnection(ledger.path)) as writer, monkeypatch.context() as between:
        add(ledger, "y", untrained_because="side")
        between.setattr("tinker_claw.ledger.prune.time.sleep", sleep)
        at: int | None = 0
        while at is not None:
            _, at = prune.drop_some(writer, time.time() + 1, at)
        prune.sweep(writer)
    assert ledger.turns.get(new[0]).prompt == (*shared, 7)


def test_a_turn_that_is_taken_up_again_meanwhile_is_not_dropped(ledger: Ledger) -> None:
    turns = [add(ledger, f"x{n}", untrained_because="side") for n in range(20)]

    class Interrupted(WritingConnection):
        def column(self, query: str, *values: Any) -> list[Any]:
            found = super().column(query, *values)
            sql(ledger).write(
                "UPDATE turns SET state = 'judging', reason = NULL WHERE id = ?", turns[-1]
            )
            return found

    with closing(Interrupted(ledger.path)) as writer:
        assert prune.drop_some(writer, time.time() + 1, 0)[0] == 19
    assert full(ledger) == {turns[-1]}


def test_a_block_that_was_dropped_or_forgotten_is_written_again(ledger: Ledger) -> None:
    shared = tuple(range(3000))
    add(ledger, "a", prompt=(*shared, 1), untrained_because="side")
    assert trim(ledger, before=time.time() + 1) == 1
    last = add(ledger, "c", prompt=(*shared, 3))
    assert ledger.turns.get(last).prompt == (*shared, 3)
    ledger.forget(prune.from_turn(last))
    again = add(ledger, "d", prompt=(*shared, 4))
    assert ledger.turns.get(again).prompt == (*shared, 4)


def test_blocks_of_a_turn_that_could_not_be_written_are_not_remembered(ledger: Ledger) -> None:
    sql_connection(ledger).execute(
        "CREATE TEMP TRIGGER no AFTER INSERT ON turns BEGIN SELECT RAISE(ABORT, 'disk'); END"
    )
    with pytest.raises(LedgerError, match="disk"):
        add(ledger, "a")
    sql_connection(ledger).execute("DROP TRIGGER no")
    turn = add(ledger, "a")
    assert ledger.turns.get(turn).prompt[:3000] == tuple(range(3000))


def test_age_is_what_counts_and_only_the_old_go(ledger: Ledger) -> None:
    old = add(ledger, "old", untrained_because="side")
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE turns SET created_at = created_at - 10 * 86400")
    young = add(ledger, "young", untrained_because="side")
    assert asyncio.run(once(ledger, Keeping())) == 0, "nothing goes unless it was asked for"
    assert asyncio.run(once(ledger, Keeping(keep_days=11))) == 0
    assert asyncio.run(once(ledger, Keeping(keep_days=9))) == 1
    assert full(ledger) == {young}
    assert old < young


async def test_gateway_answers_while_old_turns_go(world: World) -> None:
    for n in range(100):
        add(world.ledger, f"x{n}", untrained_because="side")
    trimming = asyncio.create_task(once(world.ledger, Keeping(keep_days=1e-9)))
    assert (await world.ask("hello")).status_code == 200
    assert await trimming >= 100
    assert replace(world.turns()[-1].completion).tokens


async def test_gateway_answers_while_a_long_session_is_forgotten_and_loses_no_turn(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "MOST", 50)
    async with gateway(tmp_path, renderer) as world:
        for _ in range(180):
            add(world.ledger, "long")
        forgetting = asyncio.create_task(
            world.ledger.forget_in_thread(prune.in_session("long", None))
        )
        served = 0
        while not forgetting.done() or not served:
            assert (await world.ask(f"hello {served}")).status_code == 200
            served += 1
        assert len((await forgetting).turns) == 180
        kept = world.turns()
        assert [turn.request_text for turn in kept] == [f"hello {n}" for n in range(served)]
        assert all(turn.prompt for turn in kept)
    assert WORDS.encode() not in world.ledger.path.read_bytes()


def test_forgetting_that_fails_has_forgotten_nothing(ledger: Ledger) -> None:
    turn = sampled(ledger, "a")
    prompt = ledger.turns.get(turn).prompt
    sql_connection(ledger).execute(
        "CREATE TEMP TRIGGER no BEFORE DELETE ON prompt_blocks BEGIN SELECT RAISE(ABORT, 'disk'); "
        "END"
    )
    with pytest.raises(LedgerError, match="disk"):
        ledger.forget(prune.in_session("a", None))
    assert ledger.turns.get(turn).prompt == prompt
    assert ledger.samples.queued() == 1
    sql_connection(ledger).execute("DROP TRIGGER no")
    assert ledger.forget(prune.in_session("a", None)).turns == (turn,)
    assert sql(ledger).rows("SELECT * FROM prompt_blocks") == []


def test_what_is_written_about_a_turn_that_was_forgotten_meanwhile_is_refused(
    ledger: Ledger,
) -> None:
    """A judge or teacher was asked before, and answers after."""
    before, gone = add(ledger, "a"), add(ledger, "a")
    ledger.turns.add_next_state(before, NextState("user", WORDS))
    ledger.forget(prune.from_turn(gone))
    ballots = [(WORDS, -1)]
    for turn in (before, gone):
        with pytest.raises(ForgottenError):
            ledger.judgements.add(turn, value=-1, ballots=ballots, hints=[WORDS])
        assert not ledger.jobs.postpone(turn, 1, 0.0, WORDS)
        with pytest.raises(ForgottenError):
            ledger.samples.add(turn, -1, TEACHER)
    for table in ("jobs", "votes", "hints", "verdicts", "samples"):
        assert sql(ledger).rows(f"SELECT * FROM {table}") == []


def test_turns_that_came_to_a_forgotten_session_just_before_it_was_out_of_mind_go_too(
    ledger: Ledger,
) -> None:
    first = add(ledger, "a")
    forgotten = ledger.forget(prune.in_session("a", None))
    assert prune.left(ledger.rows, forgotten) is None
    session = forgotten.session
    late = ledger.turns.add(new_turn(ledger, "b", request_text=WORDS, session_id=session))
    found = prune.left(ledger.rows, forgotten)
    assert found is not None
    new = ledger.turns.add(new_turn(ledger, "b", session_id=session))
    assert ledger.forget(found).turns == (late,)
    assert [row["id"] for row in sql(ledger).rows("SELECT id FROM turns")] == [new]
    assert first < late
