"""The fate of a turn has the same words in explain, log and status."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ledger import postpone
from tests.support.stories import TEACHER, Told, every_state
from tinker_claw.cli import main
from tinker_claw.ledger import prune
from tinker_claw.ledger.jobs import SET_ASIDE, TRIES
from tinker_claw.ledger.versions import LEFT_BEHIND
from tinker_claw.privacy.marker import Privacy
from tinker_claw.why import Why

WORDS = {
    "trained": "trained in step 1",
    "trained on its verdict": "trained in step 1",
    "expired": "its sample expired",
    "quarantined": "its sample was set aside",
    "side": "side turn",
    "refused when captured": "the client hung up",
    "passed over": "waits for a next state, and may wait for ever",
    "waits for a next state": "waits for a next state",
    "lost": "waits for a next state, and may wait for ever",
    "answers nobody knows what": "waits for a next state",
    "ended": "waits for a next state in an idle session",
    "waits for the judge": "waits for the judge",
    "waits for the teacher": "waits to be queued",
    "waits to be queued": "waits to be queued",
    "refused when judged": "neutral verdict, no hint",
    "no verdict": "no valid vote, no hint",
    "queued": "waits for its step",
    "queued again": "waits for its step",
    "in training": "being trained right now",
    "by another version": "waits for a next state",
    "tried in vain": "waits for the judge",
    "set aside": SET_ASIDE,
    "without a score": "the teacher could not score it",
    "private": "waits for a next state, and may wait for ever",
    "no place for a hint": "waits to be queued",
}
AFTER_A_ROLLBACK = {
    "dropped": "nothing followed it before it was dropped for its age",
    "trained, left behind": "trained in step 1",
    "trained, forgotten": "trained in step 1",
    "expired, left behind": LEFT_BEHIND,
    "followed by what was forgotten": "what followed it was forgotten",
    "queued again after a crash": "waits for its step",
}
SENTENCES = {
    "tried in vain": f"and is tried again, at most {TRIES} times; 1 failed.",
    "without a score": "It is not trained: the teacher could not score it: no adapter.",
    "private": "its session is private now, and nothing of it is kept.",
    "expired, left behind": f"It is not trained: {LEFT_BEHIND}.",
    "trained, left behind": "A rollback has left that version behind.",
    "queued again after a crash": "Step 2 with it was void: the process ended before",
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
    ledger.turns.refuse(turns["without a score"], Why.UNSCORED.says("no adapter."))
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
    with ledger._db.transaction() as tx:
        tx.execute("UPDATE turns SET created_at = 1")
    assert asyncio.run(ledger.trim(before=2)) == 1
    turns["trained, left behind"], first = told.sampled("t", 1, TEACHER)
    turns["trained, forgotten"], second = told.sampled("f", -1, TEACHER)
    told.step(first, second)
    turns["expired, left behind"], _ = told.sampled("e", 1)
    told.version = ledger.steps.roll_back(base)
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
        assert SENTENCES.get(state, "") in explained
    status = json.loads(run("status", "--json", status=2))["ledger"]
    untrained = [word for word in words.values() if not word.startswith("trained")]
    assert status["not_trained"] == Counter(untrained)
    assert status["samples"].get("trained", 0) == len(words) - len(untrained)
