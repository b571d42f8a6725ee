"""--keep-days and --keep-gb: old or excess turns lose text and tokens, and nothing else."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import gateway
from tests.ledger.test_ledger import COMPLETION, new_turn
from tests.tallies import sample_counts, step_counts, verdict_counts
from tinker_claw.app.main import once
from tinker_claw.cli.explain import tell
from tinker_claw.config.settings import Keeping, Training
from tinker_claw.errors import LedgerError
from tinker_claw.ledger import prune
from tinker_claw.ledger.database import Writer, reading
from tinker_claw.ledger.decline import _REPLIES
from tinker_claw.ledger.judgements import Ballot
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import SAFE_STATES, UNFOLLOWED
from tinker_claw.ledger.views import read_contents, read_turn
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import HintScores, NextState, PolicyVersion

WORDS = "quetzalcoatl"
TEACHER = HintScores("be brief", (-1.0,) * 3, ((-1.0, -2.0),) * 3, 1)


def add(ledger: Ledger, key: str, **changes: Any) -> int:
    rng = random.Random(key)
    prompt = (*range(3000), *(rng.randrange(150_000) for _ in range(2000)))
    said = {"request_text": f"{WORDS} {key}", "reply_text": WORDS, "prompt": prompt}
    return ledger.turns.add(new_turn(ledger, key, **(said | changes)))


def follow(ledger: Ledger, turn: int) -> None:
    ledger.turns.add_next_state(turn, NextState("user", WORDS))
    ballots = [Ballot(f"{WORDS} \\boxed{{-1}}", -1)] * 3
    ledger.judgements.add(
        turn, value=-1, verdict_ballots=ballots, hint_ballots=ballots, hints=[f"no {WORDS}"]
    )


def sampled(ledger: Ledger, key: str) -> int:
    turn = add(ledger, key)
    follow(ledger, turn)
    ledger.samples.add(turn, -1, TEACHER)
    return turn


def step(ledger: Ledger, parent: PolicyVersion, turns: list[int]) -> PolicyVersion:
    marks = ", ".join("?" * len(turns))
    found = ledger._db.rows(f"SELECT id FROM samples WHERE turn_id IN ({marks})", *turns)
    number = ledger.steps.begin(parent.id, [row["id"] for row in found])
    ledger.steps.keep(number, [(row["id"], -1.0, (-0.5,) * 3, None) for row in found], None)
    return ledger.steps.commit(
        number, parent, state_ref=f"s{number}", sampler_ref="p", metrics={"samples": len(found)}
    )


def beside(ledger: Ledger) -> Writer:
    """A connection of its own, such as pruning uses."""
    return Writer(ledger.path)


def trim(ledger: Ledger, before: float | None = None, most: int | None = None) -> int:
    return sum(prune.trim(beside(ledger), before, most))


def full(ledger: Ledger) -> set[int]:
    """Turns that have their text."""
    return {row["id"] for row in ledger._db.rows("SELECT id FROM turns WHERE request_text <> ''")}


def test_what_is_done_with_goes_and_what_may_be_trained_stays(ledger: Ledger) -> None:
    parent = ledger.steps.newest_version()
    assert parent is not None
    trained = [sampled(ledger, f"t{n}") for n in range(2)]
    parent = step(ledger, parent, trained)
    for n in range(SAFE_STATES - 1):
        last = sampled(ledger, f"u{n}")
        parent = step(ledger, parent, [last])
    queued = sampled(ledger, "q")
    refused = add(ledger, "r", untrained_because="side turn: recap")
    waits = add(ledger, "w")
    judged = add(ledger, "j")
    follow(ledger, judged)
    ended = add(ledger, "e")
    row = ledger._db.row("SELECT session_id FROM turns WHERE id = ?", ended)
    assert row is not None
    ledger.turns.close([row["session_id"]])

    assert trim(ledger, before=time.time() + 1) == 4
    gone = {*trained, refused, ended}
    assert full(ledger).isdisjoint(gone)
    assert {queued, waits, judged, last} <= full(ledger)
    assert ledger.samples.oldest(1)[0].prompt == ledger.turns.get(queued).prompt
    assert len(ledger.turns.get(queued).prompt) == 5000
    assert ledger.turns.get(waits).completion == COMPLETION
    assert trim(ledger, before=time.time() + 1) == 0, "there is nothing more to do"
    refusals = dict(tuple(r) for r in ledger._db.rows("SELECT id, untrained_because FROM turns"))
    assert (refusals[ended], refusals[refused]) == (UNFOLLOWED, "side turn: recap")
    assert refusals[waits] is None


def test_emptied_turns_are_still_counted_and_told(ledger: Ledger) -> None:
    parent = ledger.steps.newest_version()
    assert parent is not None
    turn = sampled(ledger, "t")
    for n in range(SAFE_STATES):
        parent = step(ledger, parent, [turn] if n == 0 else [sampled(ledger, f"u{n}")])
    figures = (sample_counts(ledger), verdict_counts(ledger), step_counts(ledger))
    assert trim(ledger, before=time.time() + 1) == 1
    assert (sample_counts(ledger), verdict_counts(ledger), step_counts(ledger)) == figures
    with reading(ledger.path) as rows, rows.moment():
        view, known = read_turn(rows, turn), read_contents(rows, turn)
        text = " ".join(tell(rows, turn, Training(), text=True))
    assert view is not None
    assert known is not None
    assert (view.prompt_tokens, view.completion_tokens, view.blanked) == (5000, 3, "dropped")
    assert (known.request_text, known.reply_text, known.hints) == ("", "", [""])
    assert (view.verdict, view.votes) == (-1, (-1, -1, -1))
    assert view.sample is not None
    assert (view.sample.state, view.sample.reward, view.sample.advantage) == ("trained", -1, -1)
    assert known.advantages == (), "one of each token, whose probabilities were in it"
    assert known.completion.tokens == ()
    assert "answered with 3 tokens" in text
    assert "Its tokens are not in the ledger" in text
    assert "It was trained in step 1" in text


def test_later_replies_are_compared_with_the_same_first_ones(ledger: Ledger) -> None:
    for n in range(4):
        follow(ledger, add(ledger, f"s{n}", untrained_because="held out"))
    before = ledger._db.rows(_REPLIES, 0)
    assert len(before) == 4
    assert trim(ledger, before=time.time() + 1) == 4
    assert ledger._db.rows(_REPLIES, 0) == before


def test_nothing_follows_a_turn_whose_words_are_gone(ledger: Ledger) -> None:
    trained = sampled(ledger, "a")
    step = ledger.steps.begin(0, [sample.id for sample in ledger.samples.oldest(1)])
    ledger.steps.commit(step, ledger.steps.version(0), state_ref="s1", sampler_ref="p1", metrics={})
    ledger.forget(prune.in_session("a", None))
    assert ledger._db.one("SELECT blanked FROM turns WHERE id = ?", trained) == "forgotten"
    gone = add(ledger, "b")
    ledger.forget(prune.in_session("b", None))
    begun = add(ledger, "c")
    ledger.begin_to_forget(prune.in_session("c", None))
    for turn in (trained, gone, begun):
        assert not ledger.turns.add_next_state(turn, NextState("user", WORDS))
    assert ledger._db.rows("SELECT * FROM next_states") == []


def test_texts_are_gone_from_the_file_and_shared_blocks_stay(ledger: Ledger) -> None:
    for n in range(40):
        add(ledger, f"x{n}", untrained_because="side")
    kept = add(ledger, "kept")
    prompt = ledger.turns.get(kept).prompt
    before = ledger.live_bytes()
    assert trim(ledger, before=time.time() + 1) == 40
    assert ledger.turns.get(kept).prompt == prompt
    row = ledger._db.row("SELECT COUNT(*) AS n FROM prompt_blocks")
    assert row is not None
    assert row["n"] == 4, "the kept one's own"
    assert ledger.live_bytes() < before / 2
    ledger._db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    assert ledger.path.read_bytes().count(WORDS.encode()) == 2, "request and reply of the kept one"


@pytest.mark.parametrize("when", range(8))
def test_block_that_a_new_turn_shares_with_dropped_ones_is_not_deleted(
    ledger: Ledger, when: int
) -> None:
    shared = tuple(range(50_000, 55_000))
    for n in range(30):  # so many blocks that they are deleted in several transactions
        add(ledger, f"x{n}", untrained_because="side")
    add(ledger, "shared", untrained_because="side", prompt=shared)
    new = 0
    for at, _ in enumerate(prune.trim(beside(ledger), time.time() + 1, None)):
        if at == when:
            new = add(ledger, "new", prompt=(*shared, 7))
    new = new or add(ledger, "new", prompt=(*shared, 7))
    assert ledger.turns.get(new).prompt == (*shared, 7)


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
    ledger._db._connection.execute(
        "CREATE TEMP TRIGGER no AFTER INSERT ON turns BEGIN SELECT RAISE(ABORT, 'disk'); END"
    )
    with pytest.raises(LedgerError, match="disk"):
        add(ledger, "a")
    ledger._db._connection.execute("DROP TRIGGER no")
    turn = add(ledger, "a")
    assert ledger.turns.get(turn).prompt[:3000] == tuple(range(3000))


def test_age_is_what_counts_and_only_the_old_go(ledger: Ledger) -> None:
    old = add(ledger, "old", untrained_because="side")
    with ledger._db.transaction() as tx:
        tx.execute("UPDATE turns SET created_at = created_at - 10 * 86400")
    young = add(ledger, "young", untrained_because="side")
    assert asyncio.run(once(ledger, Keeping())) == 0, "nothing goes unless it was asked for"
    assert asyncio.run(once(ledger, Keeping(keep_days=11))) == 0
    assert asyncio.run(once(ledger, Keeping(keep_days=9))) == 1
    assert full(ledger) == {young}
    assert old < young


def test_oldest_go_until_the_file_is_small_enough_and_it_shrinks(ledger: Ledger) -> None:
    for n in range(400):
        add(ledger, f"x{n}", untrained_because="side")
    ledger._db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    size = ledger.path.stat().st_size
    assert size > 3_000_000
    dropped = trim(ledger, most=size // 2)
    assert 20 < dropped < 399
    left = full(ledger)
    assert left == set(range(dropped + 1, 401)), "the oldest"
    assert ledger.live_bytes() <= size // 2
    ledger._db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    assert ledger.path.stat().st_size < 0.85 * size
    check = sqlite3.connect(ledger.path)
    assert check.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    check.close()


def test_rows_of_emptied_turns_share_pages(ledger: Ledger) -> None:
    for n in range(300):
        add(ledger, f"x{n}", prompt=(1,), request_text=WORDS * 120, untrained_because="side")
    size = ledger.live_bytes()
    assert trim(ledger, time.time() + 60) == 300
    assert ledger.live_bytes() < size / 2


def test_a_size_out_of_reach_takes_one_pass(ledger: Ledger) -> None:
    """Most of it may still be trained, and nothing makes the file small enough."""
    for n in range(600):
        add(ledger, f"x{n}", prompt=(1,), **({"untrained_because": "side"} if n % 10 == 0 else {}))
    transactions = list(prune.trim(beside(ledger), most_bytes=1))
    assert sum(transactions) == 60
    assert len(full(ledger)) == 540
    sweeps = 2 * (2 + 600 // 50)
    assert len(transactions) < 60 + sweeps + 10, "what stays is not looked at again and again"
    ledger._db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    assert list(prune.trim(beside(ledger), most_bytes=1)) == []


def test_a_turn_that_is_taken_up_again_meanwhile_is_not_dropped(ledger: Ledger) -> None:
    turns = [add(ledger, f"x{n}", untrained_because="side") for n in range(60)]
    dropping = prune.trim(beside(ledger), before=time.time() + 1)
    gone = next(dropping)
    with ledger._db.transaction() as tx:
        tx.execute("UPDATE turns SET settled = 0 WHERE id = ?", (turns[-1],))
    assert gone + sum(dropping) == 59
    assert full(ledger) == {turns[-1]}


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_said_of_trained_turns_gives_its_room_back(
    ledger: Ledger, forgotten: bool
) -> None:
    parent = ledger.steps.newest_version()
    assert parent is not None
    turns, empty = list[int](), ledger.live_bytes()
    for n in range(200):
        turn = add(ledger, f"x{n}", prompt=(1,))
        ledger.turns.add_next_state(turn, NextState("user", WORDS * 60))
        ballots = [Ballot(WORDS * 20, -1)] * 3
        ledger.judgements.add(
            turn, value=-1, verdict_ballots=ballots, hint_ballots=ballots, hints=[WORDS * 20]
        )
        ledger.samples.add(turn, -1, TEACHER)
        turns.append(turn)
    parent = step(ledger, parent, turns)
    for n in range(SAFE_STATES):
        parent = step(ledger, parent, [sampled(ledger, f"u{n}")])
    size = ledger.live_bytes()
    if forgotten:
        for turn in turns:
            ledger.begin_to_forget(prune.from_turn(turn))
        asyncio.run(ledger.finish_forgetting())
    else:
        assert trim(ledger, before=time.time() + 1) == 201
    assert ledger.live_bytes() - empty < (size - empty) / 2
    blanked = ledger._db.rows("SELECT DISTINCT blanked FROM turns WHERE id <= 200")
    assert [row["blanked"] for row in blanked] == ["forgotten" if forgotten else "dropped"]
    assert ledger._db.one("PRAGMA foreign_key_check") is None


def test_a_transaction_that_takes_long_ends_and_the_next_one_goes_on(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(300):
        add(ledger, f"x{n}", untrained_because="side")
    monkeypatch.setattr("tinker_claw.ledger.prune.SLICE_S", -1)  # each row takes all of it
    dropped = list(prune.trim(beside(ledger), time.time() + 1, None))
    assert sum(dropped) == 300
    assert max(dropped) == 1


async def test_gateway_answers_while_old_turns_go(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        for n in range(100):
            add(world.ledger, f"x{n}", untrained_because="side")
        trimming = asyncio.create_task(once(world.ledger, Keeping(keep_days=1e-9)))
        assert (await world.ask("hello")).status_code == 200
        assert await trimming >= 100
        assert replace(world.turns()[-1].completion).tokens


async def test_dropping_and_forgetting_take_turns(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt without its lesson may take up a block that a sweep has found unused."""
    done = list[str]()

    def work(name: str) -> Callable[..., Iterator[int]]:
        def steps(*_: Any) -> Iterator[int]:
            for _ in range(3):
                done.append(name)
                yield 0

        return steps

    for name in ("trim", "finish"):
        monkeypatch.setattr(f"tinker_claw.ledger.ledger.{name}", work(name))
    add(ledger, "s")
    ledger.begin_to_forget(prune.in_session("s", None))
    await asyncio.gather(ledger.trim(None, None), ledger.finish_forgetting())
    assert done == ["trim"] * 3 + ["finish"] * 3
