"""State and reason of a turn: one row, which log, explain and status show alike."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ledger import new_turn, sql
from tests.support.stories import Told
from tinker_claw.cli import main
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import count_outcomes
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind

DETAIL = "the detail"


def shown(capsys: pytest.CaptureFixture[str], directory: Path, *command: str) -> str:
    assert main.main([*command, "--data-dir", str(directory)]) in (0, 2)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
@pytest.mark.parametrize("how", ["captured", "judged", "expired"])
def test_reason_comes_from_the_row_to_log_explain_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: Reason, how: str
) -> None:
    refusal = TurnRefusal(reason, DETAIL)
    with closing(Ledger(tmp_path)) as ledger:
        ledger.steps.add_first_version(state_ref="s", sampler_ref="a")
        side = {"kind": Kind.SIDE} if reason is Reason.SIDE and how != "expired" else {}
        because = refusal if how == "captured" else None
        turn = ledger.turns.add(new_turn(ledger, untrained_because=because, **side))
        if how == "judged":
            ledger.turns.refuse(turn, refusal)
        elif how == "expired":
            ledger.samples.expire_these([ledger.samples.add(turn, 1, None)], refusal)
        row = sql(ledger).row("SELECT state, reason, detail FROM turns")
        assert row is not None
        assert tuple(row) == ("refused", reason, DETAIL)
        assert count_outcomes(sql(ledger)) == Counter({reason: 1})
    record = json.loads(shown(capsys, tmp_path, "log", "turns", "--json"))
    assert (record["state"], record["reason"], record["detail"]) == ("refused", reason, DETAIL)
    assert record["outcome"] == f"not trained: {refusal}"
    assert f"outcome {record['outcome']}" in shown(capsys, tmp_path, "explain", str(turn))
    status = json.loads(shown(capsys, tmp_path, "status", "--json"))
    assert status["ledger"]["not_trained"] == {reason: 1}


def test_words_of_a_method_are_a_reason_of_their_own(tmp_path: Path) -> None:
    told = Told(tmp_path)
    turn = told.turn("s")
    told.ledger.turns.refuse(turn, TurnRefusal("neutral verdict, no hint"))
    assert count_outcomes(sql(told.ledger)) == Counter({"neutral verdict, no hint": 1})
    told.ledger.close()


def test_reasons_differ() -> None:
    assert len({reason.value for reason in Reason}) == len(list(Reason))
