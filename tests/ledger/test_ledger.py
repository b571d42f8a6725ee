"""The ledger through real SQLite: rows come back exactly, steps are all or nothing."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import (
    COMPLETION,
    new_turn,
    queue,
    sql,
    step_counts,
)
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.codec import (
    BLOCK,
    flat,
    pack_floats,
    pack_ids,
    rows_of,
    unpack_floats,
    unpack_ids,
)
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.ledger import Ledger, holds_run
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.samples import STEPS_FAILED
from tinker_claw.types import (
    HintScores,
    Kind,
    NextState,
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
    assert ledger.turns.session("ann", "k") != ledger.turns.session("bob", "k")


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
def test_long_prompts_come_back_exactly(ledger: Ledger, length: int) -> None:
    prompt = tuple((i * 7919) % 151_936 for i in range(length))
    turn = ledger.turns.add(new_turn(ledger, prompt=prompt))
    assert ledger.turns.get(turn).prompt == prompt
    ledger.samples.add(turn, 1, None)
    assert ledger.samples.load()[0].prompt == prompt


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


@pytest.mark.parametrize("case", ["kept", "forgotten", "secret before", "secret", "not kept"])
def test_a_prompt_that_extends_a_turns_shares_its_blocks(ledger: Ledger, case: str) -> None:
    first, more = tuple(range(2 * BLOCK + 9)), tuple(range(7, 2 * BLOCK))
    before = new_turn(ledger, prompt=first)
    later = new_turn(ledger, prompt=(*first, *more), keeps_tokens=case != "not kept")
    if case == "secret before":
        before = replace(before, place=replace(before.place, holds_secret=True))
    if case == "secret":
        later = replace(later, place=replace(later.place, holds_secret=True))
    turn = ledger.turns.add(before)
    if case == "forgotten":
        ledger.forget(from_turn(turn))
    number = ledger.turns.add(replace(later, prompt=replace(later.prompt, extends=turn)))
    assert ledger.turns.get(number).prompt == (() if case == "not kept" else (*first, *more))
    rows = sql(ledger).rows("SELECT blocks FROM turns ORDER BY id")
    own = rows[-1]["blocks"]
    assert len(own) == 4 * (0 if case in ("secret", "not kept") else 4)
    assert case != "kept" or own.startswith(rows[0]["blocks"])


def test_prompt_that_has_lost_a_block_is_not_made_up(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger, prompt=tuple(range(3000))))
    with sql(ledger).transaction() as tx:
        tx.execute("DELETE FROM prompt_blocks WHERE id = 2")
    with pytest.raises(LedgerError, match="has lost block 2"):
        ledger.turns.get(turn)


def test_first_next_state_stays(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger))
    assert ledger.turns.next_state(turn) is None
    assert ledger.turns.add_next_state(turn, NextState("user", "thanks"))
    assert not ledger.turns.add_next_state(turn, NextState("user", "again"))
    assert ledger.turns.next_state(turn) == NextState("user", "thanks")


def test_a_verdicts_weight_is_kept_and_explicit_feedback_weighs_1(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    turns = [ledger.turns.add(new_turn(ledger, key)) for key in "ab"]
    for turn in turns:
        ballots = [("goes on", 1)]
        ledger.judgements.add(turn, value=1, weight=0.3, ballots=ballots, hints=[])
    assert ledger.feedback.give("me", About("turn", turns[1]), Feedback(1.0)) is not None
    for turn in turns:
        ledger.samples.add(turn, 1.0, None)
    ledger.close()
    with closing(Ledger(tmp_path)) as again:
        assert [again.judgements.verdict(turn) for turn in turns] == [
            Verdict((1,), 1, weight=0.3),
            Verdict((1,), 1, "user", 1.0),
        ]
        assert [one.weight for one in again.samples.load()] == [0.3, 1.0]


def test_no_verdict_is_not_a_neutral_verdict(ledger: Ledger) -> None:
    ballots, hints = [("?", None), ("-1", -1)], ("be brief", "be short and brief")
    for key, value in (("a", None), ("b", 0)):
        turn = ledger.turns.add(new_turn(ledger, key))
        ledger.judgements.add(turn, value=value, ballots=ballots, hints=hints)
        assert ledger.judgements.verdict(turn) == Verdict(votes=(None, -1), value=value)
        assert ledger.judgements.hints(turn) == hints
    assert ledger.judgements.verdict(999) is None


def test_sample_carries_turn_and_teacher_exactly(ledger: Ledger) -> None:
    teacher = HintScores("hint", (-1.0, -2.0, -3.0), ((-1.0, -2.0),) * 3, overlap=4)
    turn = ledger.turns.add(new_turn(ledger))
    number = ledger.samples.add(turn, None, teacher)
    (sample,) = ledger.samples.load()
    assert (sample.id, sample.turn_id, sample.reward) == (number, turn, None)
    assert sample.teacher == teacher
    assert sample.completion == COMPLETION
    assert (sample.policy_version, sample.policy_step) == (0, 0)


def test_a_turn_is_a_sample_at_most_once(ledger: Ledger) -> None:
    turn = ledger.turns.add(new_turn(ledger))
    ledger.samples.add(turn, 1, None)
    with pytest.raises(LedgerError):
        ledger.samples.add(turn, 1, None)
    assert ledger.samples.queued() == 1


def test_step_that_was_left_open_is_void_before_the_next_one_begins(ledger: Ledger) -> None:
    version = ledger.versions.newest()
    assert version is not None
    samples = queue(ledger, 2)
    done: dict[str, Any] = {"state_ref": "s", "sampler_ref": "p", "metrics": {}}
    first = ledger.steps.begin(version.id, samples)
    assert ledger.steps.void_unfinished() == [first]
    second = ledger.steps.begin(version.id, samples)
    with pytest.raises(LedgerError, match="it is not open"):
        ledger.steps.commit(first, version, **done)
    ledger.steps.commit(second, version, **done)
    ledger.steps.void(second, "too late")
    assert step_counts(ledger) == {"intent": 0, "committed": 1, "void": 1}
    assert sql(ledger).one("SELECT void > 1 FROM steps WHERE status = 'void'") == 1
    (gone,) = queue(ledger, 1)
    third = ledger.steps.begin(version.id, [gone])
    ledger.samples.refuse([gone], STEPS_FAILED)
    with pytest.raises(LedgerError, match="of its 1 samples"):
        ledger.steps.commit(third, version, **done)


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


def test_new_directory_is_the_users_alone(tmp_path: Path) -> None:
    Ledger(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite3"
    file.write_bytes(b"this is not a database, but somebody's notes" * 40)
    before = file.read_bytes()
    with pytest.raises(LedgerError, match="move it away"):
        Ledger(tmp_path)
    assert file.read_bytes() == before


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
    with closing(Ledger(tmp_path)) as ledger:
        assert sql(ledger).one("SELECT COUNT(*) FROM turns") >= seen >= 20
        assert sql(ledger).one("PRAGMA integrity_check") == "ok"


@pytest.mark.parametrize(("length", "top"), [(0, 7), (1, 7), (128, 150_000), (1000, 2**31 - 1)])
def test_ids_come_back_exactly(length: int, top: int) -> None:
    rng = random.Random(length)
    ids = tuple(rng.randrange(-top - 1, top) for _ in range(length))
    assert unpack_ids(pack_ids(ids)) == ids
    rows = tuple(ids[at : at + 4] for at in range(0, length - length % 4, 4))
    assert rows_of(unpack_ids(pack_ids(flat(rows))), 4) == rows


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


def test_a_figure_that_is_not_finite_leaves_a_steps_metrics_readable(ledger: Ledger) -> None:
    first = ledger.versions.newest()
    assert first is not None
    figures = {"k3": math.nan, "gate": {"asked": 2, "loss": -math.inf}}
    step = ledger.steps.begin(first.id, [])
    ledger.steps.commit(step, first, state_ref="s", sampler_ref="p", metrics=figures)
    assert sql(ledger).one("SELECT json_extract(metrics, '$.gate.asked') FROM steps") == 2
    assert sql(ledger).one("SELECT json_extract(metrics, '$.k3') FROM steps") is None
