"""The fate of a turn has the same words in explain, log and status."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ledger import postpone, sql
from tests.support.stories import TEACHER, Told, every_state
from tinker_claw.cli import main
from tinker_claw.ledger import prune
from tinker_claw.ledger.jobs import SET_ASIDE, TRIES
from tinker_claw.privacy.marker import Privacy
from tinker_claw.turn_state import Reason, TurnRefusal

WORDS = {
    "trained": "trained in step 1",
    "trained on its verdict": "trained in step 1",
    "expired": f"not trained: {Reason.TOO_OLD}",
    "quarantined": f"not trained: {Reason.STEPS_FAILED}",
    "side": f"not trained: {Reason.SIDE}: recap",
    "refused when captured": f"not trained: {Reason.HUNG_UP}",
    "passed over": "waits for the next message",
    "waits for a next state": "waits for the next message",
    "lost": "waits for the next message",
    "answers nobody knows what": "waits for the next message",
    "ended": "waits for the next message",
    "waits for the judge": "waits for the judge",
    "waits for the teacher": "waits for the judge",
    "waits to be queued": "waits for the judge",
    "refused when judged": "not trained: neutral verdict, no hint",
    "no verdict": "not trained: no valid vote, no hint",
    "queued": "waits for a step",
    "queued again": "waits for a step",
    "in training": "in step 4",
    "by another version": "waits for the next message",
    "tried in vain": "waits for the judge",
    "set aside": f"not trained: {SET_ASIDE}",
    "without a score": f"not trained: {Reason.UNSCORED}: no adapter",
    "private": "waits for the next message",
    "no place for a hint": "waits for the judge",
}
AFTER_A_ROLLBACK = {
    "dropped": f"not trained: {Reason.UNFOLLOWED}",
    "trained, left behind": "trained in step 1",
    "trained, forgotten": "forgotten after step 1",
    "expired, left behind": f"not trained: {Reason.LEFT_BEHIND}",
    "followed by what was forgotten": f"not trained: {Reason.FORGOTTEN_NEXT}",
    "queued again after a crash": "waits for a step",
}
MORE = {
    "tried in vain": f"1 of {TRIES} tries",
    "trained, left behind": "v1 (rolled back)",
    "queued again after a crash": "step 2 void: the process ended before",
}


def states(directory: Path) -> dict[str, int]:
    turns = every_state(directory)
    told = Told(directory)
    ledger = told.ledger
    turns["tried in vain"] = told.followed("vain")
    postpone(ledger, turns["tried in vain"], "I cannot rate that.")
    turns["set aside"] = told.followed("aside")
    postpone(ledger, turns["set aside"], "I cannot rate that.", last=True)
    turns["without a score"] = told.judged("unscored", -1, "be brief")
    ledger.turns.refuse(turns["without a score"], TurnRefusal(Reason.UNSCORED, "no adapter"))
    turns["private"] = told.turn("private")
    ledger.turns.mark_private("me", "private", Privacy.PRIVATE)
    turns["no place for a hint"] = told.judged("no place", -1, "be brief", hint_at=None)
    ledger.close()
    return turns


def states_after_a_rollback(directory: Path) -> dict[str, int]:
    told, turns = Told(directory), dict[str, int]()
    ledger, base = told.ledger, told.version
    turns["dropped"] = told.turn("old")
    ledger.turns.close([ledger.turns.session("me", "old")])
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE turns SET created_at = 1")
    assert asyncio.run(ledger.trim(before=2)) == 1
    turns["trained, left behind"], first = told.sampled("t", 1, TEACHER)
    turns["trained, forgotten"], second = told.sampled("f", -1, TEACHER)
    told.step(first, second)
    turns["expired, left behind"], _ = told.sampled("e", 1)
    told.version = ledger.versions.roll_back(base)
    ledger.forget(prune.from_turn(turns["trained, forgotten"]))
    turns["followed by what was forgotten"] = told.followed("unsaid")
    ledger.forget(prune.from_turn(told.turn("unsaid")))
    turns["queued again after a crash"], third = told.sampled("c", 1)
    ledger.steps.begin(told.version.id, [third])
    ledger.steps.void_unfinished()
    ledger.close()
    return turns


@pytest.mark.parametrize(
    ("make", "words"), [(states, WORDS), (states_after_a_rollback, AFTER_A_ROLLBACK)]
)
def test_every_outcome_is_the_same_words_everywhere(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], dict[str, int]],
    words: dict[str, str],
) -> None:
    turns = make(tmp_path)

    def run(*flags: str, status: int = 0) -> str:
        assert main.main([*flags, "--data-dir", str(tmp_path)]) == status
        return capsys.readouterr().out

    records = [json.loads(line) for line in run("log", "turns", "--json").splitlines()]
    assert {r["id"]: r["outcome"] for r in records} == {turns[s]: words[s] for s in words}
    heading, *rows = run("log", "turns").splitlines()
    at = heading.index("outcome")
    for (state, turn), row in zip(sorted(turns.items(), key=lambda t: t[1]), rows, strict=True):
        explained = " ".join(run("explain", str(turn)).split())
        assert row[at:] == words[state]
        # Lines end at hyphens, too.
        assert words[state].replace(" ", "") in explained.replace(" ", "")
        assert MORE.get(state, "") in explained
    status = json.loads(run("status", "--json", status=2))["ledger"]
    untrained = [r for r in records if r["state"] not in ("trained", "forgotten")]
    # A turn in a step still waits for it.
    waits = {"in step 4": "waits for a step"}
    counted = [r["reason"] or waits.get(r["outcome"], r["outcome"]) for r in untrained]
    assert status["not_trained"] == Counter(counted)
