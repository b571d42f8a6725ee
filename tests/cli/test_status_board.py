"""`tinker-claw status` over a ledger: with a gateway, without one, as JSON and as a live view."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import new_turn
from tests.support.stories import SECRET, Told, every_state, run
from tinker_claw.cli.status import board
from tinker_claw.ledger.decline import SIZE
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Bill
from tinker_claw.types import NextState, Usage, Vote
from tinker_claw.words import run_fields


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("every") / "data"
    every_state(directory)
    return directory


def story_of(ledger: Ledger) -> Callable[..., None]:
    """Function that adds a judged turn of a user."""

    def judged(
        value: Vote, *hints: str, role: Any = "user", user: str = "me", key: str = "s"
    ) -> None:
        turn = ledger.turns.add(new_turn(ledger, session_id=ledger.turns.session(user, key)))
        ledger.turns.add_next_state(turn, NextState(role, "so it is"))
        ledger.judgements.add(turn, value=value, ballots=(), hints=hints, prompt="p")

    return judged


@pytest.mark.parametrize(
    ("rejections", "hints", "says"),
    [
        (3, 2, "me: 3 rejections and 2 hints in the newest 100 judged messages"),
        (4, 1, None),
    ],
)
def test_a_judge_that_hears_nothing_is_told(
    tmp_path: Path, rejections: int, hints: int, says: str | None
) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.versions.add_first(state_ref="s", sampler_ref="a")
        judged = story_of(ledger)
        for _ in range(9):
            judged(-1, "an old hint")
        for n in range(100):
            judged(-1 if n < rejections else 1, *["be brief"] * (n < hints))
            judged(-1, role="tool")
        for _ in range(99):
            judged(1, user="another")
    unheard = dict(run_fields(read_overview(tmp_path, 16))).get("unheard")
    assert unheard is None if says is None else says in str(unheard)


def test_without_a_gateway_the_ledger_is_told_all_the_same(directory: Path) -> None:
    done = run("status", directory=directory)
    assert done.returncode == 2
    assert f"No gateway runs on {directory}." in done.stderr
    assert done.stdout.startswith(
        "First judged turns accepted: 100% (14% to 100%) of 2 by the base model; "
    )
    for part in (
        f"run        combine · demo · local · {directory}",
        "policy     v1, 1 step from the base",
        "next step  [####....................] 3 of 16 samples",
        "turns      19 main, 1 side · 18 sessions · 1 message could not be tied to a reply",
        "outcomes   trained: 2 · waits for the next message: 6 · ",
        "verdicts   6 good, 1 neutral, 3 bad · 1 without a valid vote · 3 hints",
    ):
        assert f"\n{part}" in done.stdout, part
    lines = done.stdout.splitlines()
    (taken,) = [line for line in lines if line.split()[0:1] == ["1"] and "taken" in line]
    assert taken.split()[3:6] == ["v1", "2", "-"]
    assert taken.split()[6:] == ["0.25", "-0.5", "1.5", "0", "0.0312", "$0.0625", "-"]
    (void,) = [line for line in lines if line.endswith("it makes no sense")]
    assert "void" in void
    assert SECRET not in done.stdout


def test_hold_is_told_until_a_rollback(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        version = ledger.versions.add_first(state_ref="s", sampler_ref="a")
        judged = story_of(ledger)
        for number in range(2 * SIZE):
            judged(1 if number < SIZE else -1, key=str(number))
        (hold,) = [line for line in board(read_overview(tmp_path, 16)) if line.startswith("paused")]
        assert "learning is paused: 0% of the newest 32 first judged tu" in hold
        ledger.versions.roll_back(version)
        assert read_overview(tmp_path, 16)["held"] is None


def test_a_pin_and_bills_are_told_and_versions_left_behind_do_not_count(tmp_path: Path) -> None:
    story = Told(tmp_path)
    base = story.version
    for number in range(40):
        story.judged(f"base {number}", 1)
    story.step(story.sampled("s", -1)[1])
    for number in range(40):
        story.judged(f"worse {number}", -1)

    def accepted() -> Any:
        report = json.loads(run("status", "--json", directory=tmp_path).stdout)["ledger"]
        return report["pinned"], [(row["version"], row["share"]) for row in report["accepted"]]

    assert accepted() == (None, [(0, 40 / 41), (1, 0)])
    story.ledger.versions.pin(0)
    assert accepted()[0] == 0
    story.ledger.spend.add(Bill("serve", Usage(1), 0.25))
    for usd in (0.5, None):
        story.ledger.spend.add(Bill("judge", Usage(1), usd))
    text = run("status", directory=tmp_path).stdout
    assert "policy     v1, 1 step from the base · v0 answers, which is pinned" in text
    assert "spent      $0.7500 · judge $0.5000, serve $0.2500" in text
    story.ledger.versions.roll_back(base)
    assert accepted() == (None, [(0, 40 / 41)])
    story.ledger.close()


def test_a_ledger_that_cannot_be_read_does_not_hide_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database at all, but something else" * 100)
    sentences = run("status", directory=tmp_path).stderr
    assert "No gateway runs on" in sentences
    assert "cannot be read as a ledger" in sentences
