"""The ledger through real SQLite: rows come back exactly, steps are all or nothing."""

from __future__ import annotations

import math
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ledger import (
    COMPLETION,
    judgeable,
    new_turn,
    queue,
    sample_counts,
    sql,
    step_counts,
    verdict_counts,
)
from tinker_claw.errors import LedgerError
from tinker_claw.learner.batch import choose
from tinker_claw.ledger.codec import flat, pack_floats, pack_ids, rows_of, unpack_floats, unpack_ids
from tinker_claw.ledger.database import Database
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.judgements import Ballot
from tinker_claw.ledger.ledger import Ledger, holds_run
from tinker_claw.ledger.versions import read_line, read_versions
from tinker_claw.turn_state import TurnRefusal
from tinker_claw.types import (
    HintScores,
    Kind,
    NextState,
    PolicyVersion,
    Verdict,
)


def test_turn_comes_back_exactly(ledger: Ledger) -> None:
    turn = ledger.turns.get(ledger.turns.add(new_turn(ledger)))
    assert turn.completion == COMPLETION
    assert (turn.prompt, turn.hint_at, turn.index, turn.kind) == ((1, 2, 3, 4), 3, 0, Kind.MAIN)
    assert (turn.request_text, turn.reply_text) == ("do it", "done")


def test_turns_are_numbered_within_session_and_kind(ledger: Ledger) -> None:
    ids = [
        ledger.turns.add(new_turn(ledger, "a")),
        ledger.turns.add(new_turn(ledger, "a", kind=Kind.SIDE, untrained_because="side")),
        ledger.turns.add(new_turn(ledger, "b")),
        ledger.turns.add(new_turn(ledger, "a")),
    ]
    assert [ledger.turns.get(i).index for i in ids] == [0, 0, 0, 1]


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
def test_long_prompts_come_back_exactly(ledger: Ledger, length: int) -> None:
    prompt = tuple((i * 7919) % 151_936 for i in range(length))
    turn = ledger.turns.add(new_turn(ledger, prompt=prompt))
    assert ledger.turns.get(turn).prompt == prompt
    ledger.samples.add(turn, 1, None)
    assert ledger.samples.oldest(1)[0].prompt == prompt


def test_what_prompts_share_is_stored_once(ledger: Ledger) -> None:
    shared = tuple(range(11 * 1024 + 100))
    ledger.turns.add(new_turn(ledger, prompt=shared))
    before = sql(ledger).row("SELECT COUNT(*) AS n FROM prompt_blocks")
    for own in range(50):
        prompt = (*shared, *(own + 1000 * i for i in range(300)))
        assert ledger.turns.get(ledger.turns.add(new_turn(ledger, prompt=prompt))).prompt == prompt
    after = sql(ledger).row("SELECT COUNT(*) AS n, SUM(LENGTH(ids)) AS bytes FROM prompt_blocks")
    assert before is not None
    assert after is not None
    assert (before["n"], after["n"]) == (11, 11)
    own_bytes = sql(ledger).row("SELECT MAX(LENGTH(prompt) + LENGTH(blocks)) AS n FROM turns")
    assert own_bytes is not None
    assert own_bytes["n"] < 4 * 400 + 100, "no turn holds more than what is its own"


def test_prompt_that_has_lost_a_block_is_not_made_up(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger, prompt=tuple(range(3000))))
    with sql(ledger).transaction() as tx:
        tx.execute("DELETE FROM prompt_blocks WHERE id = 2")
    with pytest.raises(LedgerError, match="has lost block 2"):
        ledger.turns.get(turn)


def test_sessions_of_two_users_never_mix(ledger: Ledger) -> None:
    assert ledger.turns.session("ann", "k") != ledger.turns.session("bob", "k")
    assert ledger.turns.session("ann", "k") == ledger.turns.session("ann", "k")


def test_latest_turns_are_main_ones_the_newest_first(ledger: Ledger) -> None:
    session = ledger.turns.session("me", "s")
    assert ledger.turns.latest(session) == []
    first = ledger.turns.add(new_turn(ledger))
    newest = ledger.turns.add(new_turn(ledger, history=("a", "b", "c")))
    ledger.turns.add(new_turn(ledger, kind=Kind.SIDE, untrained_because="side"))
    found = ledger.turns.latest(session)
    assert [turn.turn_id for turn in found] == [newest, first]
    assert (found[0].history, found[0].reply_digest) == (("a", "b", "c"), "r")


def test_first_next_state_stays(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger))
    assert ledger.turns.next_state(turn) is None
    assert ledger.turns.add_next_state(turn, NextState("user", "thanks"))
    assert not ledger.turns.add_next_state(turn, NextState("user", "again"))
    assert ledger.turns.next_state(turn) == NextState("user", "thanks")


def test_judgeable_is_what_has_a_next_state_and_is_not_settled(ledger: Ledger) -> None:
    turns = [ledger.turns.add(new_turn(ledger, str(i))) for i in range(4)]
    side = ledger.turns.add(new_turn(ledger, "x", kind=Kind.SIDE, untrained_because="side"))
    for turn in [*turns[1:], side]:
        ledger.turns.add_next_state(turn, NextState("user", "ok"))
    ledger.turns.refuse(turns[2], TurnRefusal("neutral verdict"))
    ledger.samples.add(turns[3], 1, None)
    assert judgeable(ledger) == [turns[1]]


def test_a_verdicts_weight_is_kept_and_explicit_feedback_weighs_1(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    turns = [ledger.turns.add(new_turn(ledger, str(i))) for i in range(3)]
    for turn in turns[:2]:
        ballots = [Ballot("goes on", 1)]
        ledger.judgements.add(turn, value=1, weight=0.3, ballots=ballots, hints=[])
    ledger.samples.add(turns[0], 1.0, None)
    assert ledger.feedback.give("me", About("turn", turns[1]), Feedback(1.0)) is not None
    ledger.samples.add(turns[1], 1.0, None)
    ledger.samples.add(turns[2], 1.0, None)
    ledger.close()
    again = Ledger(tmp_path)
    verdicts = [again.judgements.verdict(turn) for turn in turns[:2]]
    assert verdicts[0] == Verdict((1,), 1, weight=0.3)
    assert verdicts[1] == Verdict((1,), 1, "user", 1.0)
    assert [one.weight for one in again.samples.oldest(9)] == [0.3, 1.0, 1.0]
    again.close()


def test_no_verdict_is_not_a_neutral_verdict(ledger: Ledger) -> None:
    turns = [ledger.turns.add(new_turn(ledger, str(i))) for i in range(3)]
    for turn, value in zip(turns, (None, 0, -1), strict=True):
        ledger.judgements.add(
            turn,
            value=value,
            ballots=[Ballot("?", None), Ballot("-1", -1)],
            hints=["be brief", "be short and brief"] if value == -1 else [],
        )
    assert ledger.judgements.verdict(turns[0]) == Verdict(votes=(None, -1), value=None)
    assert ledger.judgements.verdict(turns[1]) == Verdict(votes=(None, -1), value=0)
    assert ledger.judgements.hints(turns[2]) == ("be brief", "be short and brief")
    assert verdict_counts(ledger) == {"good": 0, "neutral": 1, "bad": 1, "none": 1, "hints": 1}
    assert ledger.judgements.verdict(999) is None


def test_sample_carries_turn_and_teacher_exactly(ledger: Ledger) -> None:
    teacher = HintScores("hint", (-1.0, -2.0, -3.0), ((-1.0, -2.0),) * 3, overlap=4)
    turn = ledger.turns.add(new_turn(ledger))
    number = ledger.samples.add(turn, None, teacher)
    (sample,) = ledger.samples.oldest(99)
    assert (sample.id, sample.turn_id, sample.reward) == (number, turn, None)
    assert sample.teacher == teacher
    assert sample.completion == COMPLETION
    assert (sample.policy_version, sample.policy_step) == (0, 0)


def test_a_turn_is_a_sample_at_most_once(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger))
    ledger.samples.add(turn, 1, None)
    with pytest.raises(LedgerError):
        ledger.samples.add(turn, 1, None)
    assert ledger.samples.waiting() == 1


def test_forty_queued_in_batches_of_sixteen_lose_none(ledger: Ledger) -> None:
    queue(ledger, 40)
    trained: list[int] = []
    version = ledger.steps.newest_version()
    assert version is not None
    for waiting in (24, 8):
        batch = [sample.id for sample in ledger.samples.oldest(16)]
        step = ledger.steps.begin(version.id, batch)
        version = ledger.steps.commit(step, version, state_ref="s", sampler_ref="p", metrics={})
        trained += batch
        assert ledger.samples.waiting() == waiting
    assert len(set(trained)) == 32
    assert sample_counts(ledger) == {"queued": 8, "trained": 32, "expired": 0, "quarantined": 0}
    assert (version.id, version.parent, version.step) == (2, 1, 2)


def test_old_samples_expire_by_optimizer_steps(ledger: Ledger) -> None:
    queue(ledger, 2)
    assert ledger.samples.expire(current_step=4, max_staleness=4) == 0
    assert ledger.samples.expire(current_step=5, max_staleness=4) == 2
    assert ledger.samples.waiting() == 0


def test_unfinished_step_is_void_and_its_samples_stay_queued(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    version = ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    step = ledger.steps.begin(version.id, queue(ledger, 3))
    ledger.close()

    ledger = Ledger(tmp_path)
    assert ledger.steps.void_unfinished() == [step]
    assert ledger.samples.waiting() == 3
    assert ledger.steps.newest_version() == version
    with pytest.raises(LedgerError, match="cannot be committed"):
        ledger.steps.commit(step, version, state_ref="s", sampler_ref="p", metrics={})
    assert ledger.steps.newest_version() == version
    ledger.close()


def test_step_with_a_sample_that_was_taken_out_meanwhile_is_refused(ledger: Ledger) -> None:
    version = ledger.steps.newest_version()
    assert version is not None
    samples = queue(ledger, 2)
    step = ledger.steps.begin(version.id, samples)
    ledger.samples.quarantine(samples[0])
    with pytest.raises(LedgerError, match="1 of its 2 samples"):
        ledger.steps.commit(step, version, state_ref="s", sampler_ref="p", metrics={})
    assert ledger.steps.newest_version() == version


def test_step_that_was_left_open_is_void_before_the_next_one_begins(ledger: Ledger) -> None:
    version = ledger.steps.newest_version()
    assert version is not None
    samples = queue(ledger, 2)
    first = ledger.steps.begin(version.id, samples)
    assert ledger.steps.void_unfinished() == [first]
    second = ledger.steps.begin(version.id, samples)
    with pytest.raises(LedgerError, match="it is not open"):
        ledger.steps.commit(first, version, state_ref="s", sampler_ref="p", metrics={})
    ledger.steps.commit(second, version, state_ref="s", sampler_ref="p", metrics={})
    ledger.steps.void(second, "too late")
    assert step_counts(ledger) == {"intent": 0, "committed": 1, "void": 1}
    assert sql(ledger).one("SELECT void > 1 FROM steps WHERE status = 'void'") == 1


def test_ledger_of_another_run_is_refused_by_name(ledger: Ledger) -> None:
    run = {"model": "demo", "method": "combine"}
    assert not holds_run(sql(ledger), run)
    ledger.bind(run)
    assert holds_run(sql(ledger), run)
    with pytest.raises(LedgerError, match="method 'combine', not 'binary'"):
        ledger.bind({"model": "demo", "method": "binary"})


_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.ledger import Ledger
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    Ledger(Path(sys.argv[1]))
except LedgerError as error:
    print(error)
"""


def test_a_full_disk_at_the_start_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "disk I/O error); check its disk" in said


def test_second_process_on_the_same_directory_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="in use by another process"):
        Ledger(ledger.path.parent)


def test_lock_of_a_killed_process_does_not_hold(tmp_path: Path) -> None:
    script = (
        "import os, signal, pathlib; from tinker_claw.ledger.ledger import Ledger\n"
        f"ledger = Ledger(pathlib.Path({str(tmp_path)!r}))\n"
        "ledger.steps.add_first_version(state_ref='s', sampler_ref='p')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    ledger = Ledger(tmp_path)
    assert ledger.steps.newest_version() is not None
    ledger.close()


def test_new_directory_is_the_users_alone(tmp_path: Path) -> None:
    Ledger(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"cannot be written.*--data-dir"):
        Ledger(tmp_path / "file" / "deeper")


def test_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite3"
    file.write_bytes(b"this is not a database, but somebody's notes" * 40)
    before = file.read_bytes()
    with pytest.raises(LedgerError, match="move it away"):
        Ledger(tmp_path)
    assert file.read_bytes() == before


def test_failed_transaction_leaves_nothing_behind(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger))
    with pytest.raises(LedgerError):
        ledger.judgements.add(
            turn,
            value=1,
            ballots=[Ballot("a", 1)],
            hints=[None],  # type: ignore[list-item]
        )
    assert ledger.judgements.verdict(turn) is None
    ledger.judgements.add(turn, value=1, ballots=[Ballot("a", 1)], hints=[])


def test_turn_of_a_version_that_there_never_was_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="FOREIGN KEY"):
        ledger.turns.add(new_turn(ledger, policy_version=9))
    assert ledger.turns.add(new_turn(ledger)) == 1


def test_committed_turn_survives_sigkill(tmp_path: Path) -> None:
    script = (
        "import pathlib; from tests.support.ledger import write_turns_for_ever\n"
        f"write_turns_for_ever(pathlib.Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as child:
        assert child.stdout is not None
        seen = len(child.stdout.read(20))
        child.kill()
        seen += len(child.stdout.read())
    ledger = Ledger(tmp_path)
    connection = sqlite3.connect(ledger.path)
    (turns,) = connection.execute("SELECT COUNT(*) FROM turns").fetchone()
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    ledger.close()
    assert turns >= seen >= 20


@pytest.mark.parametrize("length", [0, 1, 127, 128, 1000])
@pytest.mark.parametrize("top", [7, 150_000, 2**31 - 1])
def test_ids_come_back_exactly(length: int, top: int) -> None:
    rng = random.Random(length)
    ids = tuple(rng.randrange(-top - 1, top) for _ in range(length))
    assert unpack_ids(pack_ids(ids)) == ids
    rows = tuple(ids[at : at + 4] for at in range(0, length - length % 4, 4))
    assert rows_of(unpack_ids(pack_ids(flat(rows))), 4) == rows


def test_ids_of_a_vocabulary_take_less_than_three_bytes_each() -> None:
    ids = [int(151_936 ** random.Random(n).random()) for n in range(1024)]
    assert len(pack_ids(ids)) < 3 * 1024


@pytest.mark.parametrize(
    ("floats", "width"),
    [
        ((0.0, -0.0, -1.5, float("-inf")), 4),
        ((-0.1, -1e300), 8),  # beyond float32
        ((-0.1,), 8),
        ((), 4),
        (tuple(-n / 7 for n in range(300)), 8),
    ],
)
def test_floats_come_back_exactly_in_half_the_room_where_that_is_enough(
    floats: tuple[float, ...], width: int
) -> None:
    packed = pack_floats(floats)
    assert list(map(repr, unpack_floats(packed))) == list(map(repr, floats))
    assert len(packed) <= 1 + width * len(floats)
    assert math.isnan(unpack_floats(pack_floats((math.nan,)))[0])


def test_one_line_says_what_a_rollback_left_behind(ledger: Ledger) -> None:
    """v0 - v1 - v2, back to v1 as v3, from which v4 is learned."""
    base = ledger.steps.newest_version()
    assert base is not None

    def step(parent: PolicyVersion) -> PolicyVersion:
        (sample,) = queue(ledger, 1, parent.id)
        number = ledger.steps.begin(parent.id, [sample])
        return ledger.steps.commit(number, parent, state_ref="s", sampler_ref="p", metrics={})

    first = step(base)
    left = step(first)
    newest = step(ledger.steps.roll_back(first))
    (by_newest,) = queue(ledger, 1, newest.id)
    (by_left,) = queue(ledger, 1, left.id)
    assert read_line(sql(ledger)).live == {0, 1, 3, 4}
    assert [record["live"] for record in read_versions(sql(ledger))] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert ledger.samples.expire(2, 9) == 1
    state = dict(
        map(
            tuple,
            sql(ledger).rows(
                "SELECT samples.id, state FROM samples JOIN turns ON turns.id = turn_id"
            ),
        )
    )
    assert (state[by_newest], state[by_left]) == ("queued", "refused")


def test_what_each_step_asks_takes_no_longer_in_a_long_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is asked between two tokens of the gateway's replies."""
    plans, rows = list[str](), type(sql(ledger)).rows

    def seen(database: Database, query: str, *values: object) -> list[sqlite3.Row]:
        found = rows(database, f"EXPLAIN QUERY PLAN {query}", *values)
        plans.append("\n".join(row["detail"] for row in found))
        return rows(database, query, *values)

    monkeypatch.setattr(type(sql(ledger)), "rows", seen)
    ledger.decline()
    assert not any("TEMP B-TREE" in plan for plan in plans), "all turns would be read and sorted"
    assert any("SEARCH sessions" in plan for plan in plans), "from the newest on"


def test_a_sample_without_a_next_state_was_judged_by_no_tool(ledger: Ledger) -> None:
    """For example the last turn of an episode: a step may take such samples, too."""
    queue(ledger, 2)
    waiting = ledger.samples.queue()
    assert [sample.judge for sample in waiting] == ["user", "user"]
    assert len(choose(waiting, batch_size=2, most=16, share=0.5, now=0.0).ids) == 2


def test_a_figure_that_is_not_finite_leaves_a_steps_metrics_readable(ledger: Ledger) -> None:
    first = ledger.steps.newest_version()
    assert first is not None
    figures = {"k3": math.nan, "gate": {"asked": 2, "loss": -math.inf}}
    step = ledger.steps.begin(first.id, [])
    ledger.steps.commit(step, first, state_ref="s", sampler_ref="p", metrics=figures)
    assert sql(ledger).one("SELECT json_extract(metrics, '$.gate.asked') FROM steps") == 2
    assert sql(ledger).one("SELECT json_extract(metrics, '$.k3') FROM steps") is None
