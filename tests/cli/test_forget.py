"""Forgotten turns are nowhere in the data directory, and the rest is unchanged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import gateway, spell
from tests.support.ledger import everything, judgeable, new_turn, sample_counts, sql
from tests.support.stories import METRICS, run
from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.codec import BLOCK, pack_ids, raw_ids
from tinker_claw.ledger.database import WritingConnection, open_read_only
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import forget, from_turn, in_session
from tinker_claw.ledger.spend import Bill
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Completion, HintScores, NextState, SamplingParams, StopReason, Usage

SYSTEM = tuple(range(1000, 1000 + BLOCK))
"""Token block that all prompts share."""
MARK = "XYZZY-mark"
PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def own(number: int) -> tuple[int, ...]:
    """Token block that only this turn's prompt has; no other array holds its ids."""
    return tuple(100_000 + number * 2000 + (i * 7919) % 1999 for i in range(BLOCK))


class Talk:
    """Turns with a marked text in every field, over the real ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.count = 0

    def turn(self, key: str, *, user: str = "me", tail: int = 300) -> int:
        self.count += 1
        n, ids = self.count, own(self.count)
        done = Completion(
            tokens=ids[:tail],
            logprobs=tuple(-(i + n) / 977 for i in range(tail)),
            topk_ids=tuple((i, n) for i in ids[:tail]),
            topk_logprobs=tuple((-(i + n) / 991, -5.0) for i in range(tail)),
            stop_reason=StopReason.STOP,
            params=SamplingParams(max_tokens=500, stop=(f"{MARK}{n}!stop",)),
        )
        fields = ("reply_text", "reply_digest", "kind_reason", "trace", "fallback")
        turn = new_turn(
            self.ledger,
            key,
            session_id=self.ledger.turns.session(user, key),
            prompt=(*SYSTEM, *ids, *ids[:tail]),
            completion=done,
            request_text=f"{MARK}{n}!request " * 90,
            history=(f"{MARK}{n}!history",),
            **{name: f"{MARK}{n}!{name}" for name in fields},
        )
        return self.ledger.turns.add(turn, Bill("serve", Usage(prefill=10), 0.25))

    def judged(self, turn: int, said: int) -> None:
        """Judge a turn. `said`: the turn whose request followed."""
        self.ledger.turns.add_next_state(turn, NextState("user", f"{MARK}{said}!request"))
        ballot, hint = (f"{MARK}{said}!vote", 1), f"{MARK}{said}!hint"
        self.ledger.judgements.add(turn, value=1, ballots=[ballot], hints=[hint])

    def sampled(self, turn: int, said: int) -> int:
        self.judged(turn, said)
        scores = tuple(-(i + said) / 953 for i in range(300))
        targets = tuple((x, x - 1) for x in scores)
        written = own(said)[:300], f"{MARK}{said}!written"
        teacher = HintScores(f"{MARK}{said}!hint", scores, targets, 1, (), (), *written)
        return self.ledger.samples.add(turn, 1, teacher)

    def step(self, *samples: int) -> int:
        parent = self.ledger.versions.newest()
        assert parent is not None
        step = self.ledger.steps.begin(parent.id, samples)
        self.ledger.steps.commit(
            step, parent, state_ref=f"s{step}", sampler_ref=f"p{step}", metrics=METRICS
        )
        return step


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    ledger = Ledger(tmp_path)
    ledger.bind({"model": "demo", "method": "combine", "backend": "tinker"})
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    talk = Talk(ledger)
    yield talk
    ledger.close()


def found(directory: Path, number: int) -> list[str]:
    """Traces of a turn in any file, packed or plain."""
    raw, ids = everything(directory), own(number)
    packed = {
        "text": f"{MARK}{number}!".encode(),
        "ids": raw_ids(ids[:8]),
        "tokens": pack_ids(ids[:300])[:80],
        "block": pack_ids(ids)[:80],
        "rows": pack_ids([i for token in ids[:300] for i in (token, number)])[:80],
    }
    return [name for name, bytes_ in packed.items() if bytes_ in raw]


def test_forgotten_session_is_in_no_file_and_another_one_is_whole(
    talk: Talk, tmp_path: Path
) -> None:
    trained = talk.turn("secret-name")
    first = talk.sampled(trained, 2)
    kept = talk.turn("b")  # 2
    talk.judged(kept, 2)
    queued = talk.turn("secret-name")  # 3
    talk.sampled(queued, 3)
    side = talk.turn("secret-name")  # 4
    step = talk.step(first)
    before, spent = talk.ledger.turns.get(kept), talk.ledger.spend.total()
    forgotten = talk.ledger.forget(in_session("secret-name", None))
    assert forgotten.turns == (trained, queued, side)
    assert forgotten.withdrawn == 1
    (used,) = forgotten.steps
    assert (used.step, used.version, used.before, used.live) == (step, 1, 0, True)
    assert forgotten.roll_back_to == 0
    for number in (1, 3, 4):
        assert found(tmp_path, number) == [], number
    assert b"secret-name" not in everything(tmp_path)
    assert talk.ledger.turns.get(kept) == before, "its prompt shares blocks with theirs"
    assert found(tmp_path, 2) == ["text", "tokens", "block", "rows"]
    assert talk.ledger.spend.total() == spent
    counts = sample_counts(talk.ledger)
    assert counts == {"queued": 0, "trained": 1, "expired": 0, "quarantined": 0}
    assert '"samples": 2' in run("log", "steps", "--json", directory=tmp_path).stdout


def test_forgotten_turn_takes_what_follows_it_and_what_was_said_before_it(
    talk: Talk, tmp_path: Path
) -> None:
    """Later prompts repeat the turn; the turn before has it as its next state, with a hint from
    it."""
    first, second, third = talk.turn("a"), talk.turn("a"), talk.turn("a")
    talk.sampled(first, 2)
    talk.judged(second, 3)
    forgotten = talk.ledger.forget(from_turn(second))
    assert (forgotten.turns, forgotten.unsaid) == ((second, third), (first,))
    assert found(tmp_path, 2) == []
    assert found(tmp_path, 3) == []
    assert "text" in found(tmp_path, 1)
    assert talk.ledger.samples.queued() == 0, "its hint said what was to be forgotten"
    assert judgeable(talk.ledger) == []


def test_session_of_two_users_is_asked_for_by_user(talk: Talk) -> None:
    talk.turn("a")
    mine = talk.turn("a", user="you")
    other = talk.turn("1")
    rows = sql(talk.ledger)
    with pytest.raises(UndoError, match=r"may be session 1 \(of me\), 2 \(of you\)"):
        in_session("a", None)(rows)
    assert in_session("a", "you")(rows).turns == (mine,)
    with pytest.raises(UndoError, match="forget the first turn of the one that is meant"):
        in_session("1", "me")(rows)  # the number of one, and the name of another
    with pytest.raises(UndoError, match="has no session 'zz'"):
        in_session("zz", None)(rows)
    with pytest.raises(UndoError, match="has no turn 77"):
        from_turn(77)(rows)
    assert talk.ledger.forget(from_turn(other)).turns == (other,)


async def test_reply_that_is_being_written_is_not_kept_when_its_session_is_forgotten(
    tmp_path: Path, renderer: Renderer
) -> None:
    slow = FakeSampler(Script(spell(renderer, "a b c d e f g h"), gap_s=0.05))
    async with gateway(tmp_path, renderer, slow) as w:
        headers = {"X-Session-Id": "secret"}
        asking = asyncio.create_task(w.ask(f"I am {MARK}", headers=headers))
        while not slow.prompts:  # noqa: ASYNC110 - it has no event for this
            await asyncio.sleep(0.005)
        w.index.forget(w.ledger.forget(in_session("secret", None)).session)
        assert (await asking).status_code == 200, "the user still has his reply"
        assert w.turns() == []
        assert MARK.encode() not in everything(tmp_path)
        await w.ask("Hello", headers=headers)
        assert [turn.session_id for turn in w.turns()] == [2]


def test_command_clears_what_sqlite_left_between_other_rows(talk: Talk, tmp_path: Path) -> None:
    """Rows change their length and neighbours: SQLite leaves copies where they were."""
    rng, sessions = random.Random(6), 400  # which leaves two with SQLite 3.40
    for number in range(1, sessions + 1):
        turn = talk.turn(f"{rng.getrandbits(64):016x}-{MARK}{number}-key", tail=2)
        talk.judged(turn, number)
        for earlier in (turn, rng.randint(max(1, turn - 30), turn)):
            with sql(talk.ledger).transaction() as tx:
                text = f"{MARK}{earlier}-request " * rng.randint(1, 120)
                tx.execute("UPDATE turns SET request_text = ? WHERE id = ?", (text, earlier))
                tx.execute("UPDATE next_states SET text = ? WHERE turn_id = ?", (text, earlier))
                tx.execute("UPDATE hints SET text = ? WHERE turn_id = ?", (text[:1800], earlier))
    gone = rng.sample(range(1, sessions + 1), sessions // 2)
    for number in gone:
        forget(sql(talk.ledger), in_session(str(number), None))
    log = (tmp_path / "ledger.sqlite3-wal").read_bytes()
    assert [number for number in gone if f"{MARK}{number}-".encode() in log] == []
    refused = run("forget", "leftovers", directory=tmp_path)
    assert (refused.returncode, "in use by another process" in refused.stderr) == (2, True)
    talk.ledger.close()
    assert run("forget", "leftovers", directory=tmp_path).returncode == 0
    left = everything(tmp_path)
    assert [number for number in gone if f"{MARK}{number}-".encode() in left] == []
    assert f"{MARK}{max(set(range(sessions)) - set(gone))}-".encode() in left
    talk.ledger = Ledger(tmp_path)
    assert sql(talk.ledger).one("PRAGMA integrity_check") == "ok"
    assert sql(talk.ledger).one("PRAGMA auto_vacuum") == 2, "incremental"


def test_without_room_for_a_copy_it_is_forgotten_and_the_error_says_so(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(writer: WritingConnection) -> None:
        raise LedgerError("there is no room")

    talk.turn("a")
    monkeypatch.setattr(WritingConnection, "vacuum", refused)
    with pytest.raises(LedgerError, match="is forgotten, but there is no room; "):
        talk.ledger.forget(in_session("a", None))
    assert found(tmp_path, 1) == []


async def test_others_go_on_while_it_waits_for_a_reader(talk: Talk, tmp_path: Path) -> None:
    talk.turn("a")
    with open_read_only(talk.ledger.path) as outside:
        with outside.moment():
            assert outside.one("SELECT COUNT(*) FROM turns") == 1
            found_it = in_session("a", None)
            forgetting = asyncio.create_task(talk.ledger.forget_in_thread(found_it))
            for _ in range(50):
                talk.turn("b")  # which no lock keeps out
                await asyncio.sleep(0.01)
            assert outside.one("SELECT COUNT(*) FROM turns") == 1, "its moment"
            assert not forgetting.done()
        await forgetting
    assert found(tmp_path, 1) == []
    assert len(found(tmp_path, 2)) > 2


async def test_it_is_out_of_the_way_and_gone_when_it_is_done(talk: Talk, tmp_path: Path) -> None:
    queued, open_turn = talk.turn("a"), talk.turn("a")
    talk.sampled(queued, 1)
    await talk.ledger.forget_in_thread(in_session("a", None))
    assert talk.ledger.samples.load()[:1] == []
    assert talk.ledger.turns.is_open(open_turn) is False
    assert talk.ledger.turns.session("me", "a") == 2, "what is said now is another session's"
    assert found(tmp_path, 1) == found(tmp_path, 2) == []


def test_command_says_what_goes_and_asks(talk: Talk, tmp_path: Path) -> None:
    talk.step(talk.sampled(talk.turn("a"), 1))
    talk.turn("a")
    talk.ledger.close()
    shown = run("forget", "session", "a", "--dry-run", directory=tmp_path)
    assert shown.returncode == 0
    of, goes, step, *_ = shown.stdout.splitlines()
    assert (of, step) == (
        "Of session 1: 2 turns (1, 2).",
        "Step 1 trained on 1 of them and made v1.",
    )
    assert goes in PAGE.read_text()
    assert "tinker-claw rollback v0" in shown.stdout
    asked = run("forget", "session", "a", directory=tmp_path)  # nobody answers
    assert asked.returncode == 1
    assert "Nothing was forgotten." in asked.stdout
    assert "text" in found(tmp_path, 1)
    done = run("forget", "session", "a", "--yes", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Forgotten: 2 turns (1, 2) of session 1.\n")
    assert found(tmp_path, 1) == []
    for command in (("explain", "1"), ("log", "turns", "--full")):
        of_a_step = run(*command, directory=tmp_path)
        assert (of_a_step.returncode, f"{MARK}1!" in of_a_step.stdout) == (0, False)
    assert run("forget", "turn", "9", "--yes", directory=tmp_path).returncode == 2
    undone = run("rollback", "v0", directory=tmp_path)  # its state is at the service
    assert undone.stdout.startswith("v2, with the weights of v0, will answer when the gateway")
    talk.ledger = Ledger(tmp_path)
