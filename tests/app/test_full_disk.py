"""A disk without room: no reply is called complete that was not written, and all goes on by itself
when there is room again; and a directory that may not be written at all.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.clients import Talkers, talking
from tests.support.ledger import check, one, read
from tests.support.lives import Fate, Life, life, until

FLAGS = ("--batch-size", "2", "--learning-rate", "1e-3")
SMALL = (*FLAGS, "--lora-rank", "4")
LIMITLESS = -1


@pytest.mark.slow
def test_reply_that_cannot_be_written_is_refused_and_a_judgement_waits(tmp_path: Path) -> None:
    data = tmp_path / "data"
    slow = Fate(slow={"tinker_claw.judge.judge:Judge.judge": 1.0})
    due = "SELECT COUNT(*) FROM turns WHERE state = 'judging'"
    with life(data, *SMALL, fate=slow) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        until(lambda: one(data, due) > 0)
        running.writes_at_most(0)  # the judge has begun, and has not ended
        until(lambda: running.health()["judge"] == "failing")
        until(lambda: len(who.errors) > 6)
        told = running.health()
        assert told["status"] == "degraded"
        assert "cannot be written" in told["judge_error"]
        who.wanted.clear()
        check(data, who.seen, batch_size=2)
        seen = len(who.seen)
        running.writes_at_most(LIMITLESS)
        who.wanted.set()
        goes_on(running, who, seen)
        who.over.set()
        assert running.stop() == 0
    assert all("cannot write its records" in error for error in who.errors), who.errors
    check(data, who.seen, batch_size=2)
    assert "Traceback" not in running.said()


@pytest.mark.slow
def test_health_tells_what_the_ledger_refused_until_it_takes_a_write(tmp_path: Path) -> None:
    def ask() -> int:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        return httpx.post(f"{running.url}/chat/completions", json=body, timeout=240).status_code

    with life(tmp_path / "data", "--batch-size", "64") as running:
        assert running.serves()
        assert ask() == 200
        assert running.health()["status"] == "ok"
        running.writes_at_most(0)
        assert ask() == 503
        told = running.health()
        assert (told["status"], told["records"]) == ("degraded", "failing")
        assert "ledger.sqlite3 cannot be written" in told["records_error"]
        assert told["meaning"].startswith("Requests are refused")
        running.writes_at_most(LIMITLESS)
        assert running.health()["status"] == "degraded", "nothing was written since"
        assert ask() == 200
        until(lambda: running.health()["status"] == "ok")
        assert running.stop() == 0
        assert len(running.events("ledger.recovered")) == 1, "said once, as is the failure"


@pytest.mark.slow
def test_step_that_cannot_be_written_is_void_and_learning_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    slow = Fate(slow={"local_gpu.trainer:LocalTrainer.train_step": 1.0})
    with life(data, *SMALL, fate=slow) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        until(lambda: running.health()["learner"] == "training")
        running.writes_at_most(0)
        # First the files of this step cannot be written, then the row of the next one.
        until(lambda: running.health()["learner_attempts"] > 1)
        told = running.health()
        assert told["learner"] == "stalled"
        assert "cannot be written" in told["learner_error"]
        running.writes_at_most(LIMITLESS)
        goes_on(running, who, len(who.seen))
        who.over.set()
        assert running.stop() == 0
    check(data, who.seen, batch_size=2)
    said = [row[0] for row in read(data, "SELECT error FROM steps WHERE status = 'void'")]
    assert said[0] == "it could not be closed when it ended"


def goes_on(running: Life, who: Talkers, seen: int) -> None:
    """Check that replies, verdicts and steps go on without a restart."""
    version = running.health()["policy_version"]
    until(lambda: len(who.seen) > seen + 3)
    until(lambda: running.health()["policy_version"] > version)
    until(lambda: running.health()["status"] == "ok")


@pytest.mark.slow
def test_states_without_room_leave_the_gateway_answering(tmp_path: Path) -> None:
    """Room for the ledger's rows, and none for the files of an adapter."""
    data = tmp_path / "data"
    with life(data, *FLAGS, "--lora-rank", "256") as running, talking(running.url) as who:
        assert running.serves()
        (first,) = (data / "adapters").iterdir()
        size = (first / "adapter_model.safetensors").stat().st_size
        assert size > 5_000_000, "well above what the ledger will have"
        running.writes_at_most(size - 1)
        who.wanted.set()
        until(lambda: running.health()["learner"] == "stalled")
        before = len(who.seen)
        until(lambda: len(who.seen) > before + 2)
        told = running.health()
        assert "There is no room in" in told["last_error"]
        assert "learning waits" in told["meaning"]
        assert who.errors == []
        assert list((data / "states").glob(".draft-*")) == [], "nothing half is left"
        running.writes_at_most(LIMITLESS)
        until(lambda: running.health()["policy_version"] >= 1)
        until(lambda: running.health()["status"] == "ok")
        who.over.set()
        assert running.stop() == 0
    check(data, who.seen, batch_size=2)
    void = read(data, "SELECT DISTINCT void > 1 FROM steps WHERE status = 'void'")
    assert [row[0] for row in void] == [1], "no sample is to blame"
    assert one(data, "SELECT COUNT(*) FROM turns WHERE reason = 'steps with it failed'") == 0


@pytest.mark.slow
def test_stop_on_a_full_disk_is_in_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with life(data, *SMALL) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        until(lambda: len(who.seen) > 3)
        running.writes_at_most(0)
        until(lambda: len(who.errors) > 2)
        assert running.stop() == 0
        who.over.set()
    with life(data, *SMALL) as again:
        assert again.serves()
        check(data, who.seen, batch_size=2)
        assert again.stop() == 0
