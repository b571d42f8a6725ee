"""Every reason why a turn is not trained, from its row in a real ledger to its words."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ledger import new_turn
from tests.support.stories import Told
from tinker_claw.cli import main
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.outcome import count_outcomes
from tinker_claw.types import Kind
from tinker_claw.why import COUNTED, Why, why_of

WAITS = [why for why in Why if why < Why.SIDE]
"""Reasons of which the ledger writes nothing: they are what it looks like."""
GIVEN = [why for why in Why if why >= Why.SIDE]
DETAIL = "the detail"


def shown(capsys: pytest.CaptureFixture[str], directory: Path, *command: str) -> str:
    assert main.main([*command, "--data-dir", str(directory)]) in (0, 2)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("why", GIVEN, ids=lambda why: why.name)
@pytest.mark.parametrize("how", ["captured", "judged", "expired"])
def test_reason_comes_from_the_row_to_log_explain_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: Why, how: str
) -> None:
    said = why.says(DETAIL)
    with closing(Ledger(tmp_path)) as ledger:
        ledger.steps.add_first_version(state_ref="s", sampler_ref="a")
        side = {"kind": Kind.SIDE} if why is Why.SIDE and how != "expired" else {}
        because = said if how == "captured" else None
        turn = ledger.turns.add(new_turn(ledger, untrained_because=because, **side))
        if how == "judged":
            ledger.turns.refuse(turn, said)
        elif how == "expired":
            ledger.samples.expire_these([ledger.samples.add(turn, 1, None)], said)
        table, column = ("samples", "expired_why") if how == "expired" else ("turns", "why")
        assert ledger._db.one(f"SELECT {column} FROM {table}") == why == why_of(said)
        told = str(said) if how == "expired" or why not in COUNTED else why.head
        assert count_outcomes(ledger._db) == Counter({told: 1})
    record = json.loads(shown(capsys, tmp_path, "log", "turns", "--json"))
    assert record["outcome"] == told
    assert told in shown(capsys, tmp_path, "explain", str(turn))
    status = json.loads(shown(capsys, tmp_path, "status", "--json"))
    assert status["ledger"]["not_trained"] == {told: 1}


@pytest.mark.parametrize("why", WAITS, ids=lambda why: why.name)
def test_what_a_turn_waits_for_has_words_without_a_detail(why: Why) -> None:
    assert why.head == why.words == why.says()


def test_the_words_of_a_method_count_as_the_methods(tmp_path: Path) -> None:
    told = Told(tmp_path)
    turn = told.turn("s")
    told.ledger.turns.refuse(turn, "neutral verdict, no hint")
    assert told.ledger._db.one("SELECT why FROM turns") == Why.METHOD
    assert count_outcomes(told.ledger._db) == Counter({"neutral verdict, no hint": 1})
    told.ledger.close()


def test_sql_of_the_ledger_holds_no_words_of_a_reason() -> None:
    """A reason that is told otherwise decides nothing otherwise."""
    heads = "|".join(re.escape(why.head) for why in Why if len(why.head) > 9)
    for file in (Path(__file__).parents[2] / "tinker_claw" / "ledger").glob("*.py"):
        assert re.findall(f"'(?:{heads})", file.read_text()) == [], file.name
