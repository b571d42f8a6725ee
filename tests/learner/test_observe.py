"""--observe: turns are judged, queued and reported, but not trained; a later run trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from tests.support.clients import converse, rows
from tests.support.fakes import FakeTrainer, rated
from tests.support.learning import Says, world
from tests.support.ledger import sample_counts
from tests.support.processes import product
from tinker_claw.judge.prompts import Schema
from tinker_claw.privacy.redact import Redactor


def told(logs: Any, event: str) -> list[dict[str, Any]]:
    return [entry for entry in logs if entry["event"] == event]


async def test_batches_are_told_of_and_none_is_trained(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    with structlog.testing.capture_logs() as logs:
        async with world(tmp_path, trainer=trainer, observe=True) as w:
            for said in ("NO", "NO, HOW it should be", "YES"):
                w.turn(said)
            await w.settled()
            assert told(logs, "observed") == [], "three are no batch of four"
            w.turn("NO")
            await w.settled()
            await w.until(lambda: len(told(logs, "observed")) == 1)
            for _ in range(3):
                w.turn("GOOD")
            await w.settled()
            await w.until(lambda: w.health.learner.state == "observing")
            seen = w.health.snapshot(version=0, waiting=7, batch_size=4)
            assert (seen["status"], seen["learner"]) == ("ok", "observing")
            assert seen["meaning"].endswith(
                "observing: nothing is trained, and 7 samples are queued."
            )
            w.turn("YES")
            await w.until(lambda: len(told(logs, "observed")) == 2)
            assert w.ledger.samples.waiting() == 8
    assert trainer.steps == []
    first, second = told(logs, "observed")
    assert (first["samples"], first["steps"]) == (4, 1)
    assert (second["samples"], second["steps"]) == (8, 2)


async def test_what_was_observed_is_trained_later(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer, observe=True) as w:
        for _ in range(9):
            w.turn("GOOD")
        await w.settled()
    async with world(tmp_path, trainer=trainer) as w:
        await w.version(2)
        assert sample_counts(w.ledger)["trained"] == 8
        assert sample_counts(w.ledger)["queued"] == 1


async def test_judge_gets_and_leaves_only_redacted_text(tmp_path: Path) -> None:
    secret = "sk-" + "q7Zk2Wm9Xv4Tb8Nc3Rd6"
    asked: list[str] = []

    class Leaks(Says):
        async def answers(self, messages: Any, n: int, schema: Schema) -> list[str]:
            asked.append(json.dumps(list(messages)))
            told = rated(-1, "NO, with", f"use {secret} next time", so=f"he said {secret}")
            return [told] * n

    async with world(tmp_path, running=False, redact=Redactor(["secrets"]).redact) as w:
        w.judging._judge._endpoint = Leaks()
        turn = w.turn(f"NO, with {secret}")  # as an older release has kept it
        await w.judging._handle(turn)
        assert len(asked) == 1
        assert not any(secret in prompt for prompt in asked)
        kept = w.ledger._db.rows("SELECT answer FROM votes UNION ALL SELECT text FROM hints")
        assert len(kept) == 4
        assert not any(secret in row[0] for row in kept)
        (sample,) = w.ledger.samples.oldest(1)
        assert sample.teacher is not None
        assert sample.teacher.hint == "use [redacted: API key] next time"


@pytest.mark.slow
def test_product_observes_and_then_trains_on_that(tmp_path: Path) -> None:
    data, flags = tmp_path / "data", ("--batch-size", "4", "--lora-rank", "16")
    with product(data, *flags, "--observe") as running:
        assert running.health()["learner"] == "observing"
        for seed in range(4):
            converse(running, seed)
        while running.health()["samples_waiting"] < 4:
            assert running.process.poll() is None
        assert running.health()["policy_version"] == 0
        assert running.stop() == 0
        assert [e["steps"] for e in running.events() if e["event"] == "observed"][:1] == [1]
    assert rows(data, "SELECT COUNT(*) FROM steps") == [(0,)]
    with product(data, *flags) as running:
        while running.health()["policy_version"] < 1:
            assert running.process.poll() is None
        assert running.stop() == 0
    assert rows(data, "SELECT COUNT(*) FROM samples WHERE state = 'trained' AND id <= 4") == [(4,)]
