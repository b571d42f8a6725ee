"""A method with an estimator and a state of its own, of an installed package: its advantages are
computed once a step, and all who train on them or tell of them have the same numbers.

Rule: the numbers wanted are computed here by hand, from the rewards that the ledger holds.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.learner.test_rollback import undoing
from tests.plugins.test_plugins import HERE
from tests.support.clients import talking
from tests.support.fakes import LOGPROB, FakeTrainer
from tests.support.learning import World, has_token, world
from tests.support.ledger import sample_counts, sql, step_counts
from tests.support.lives import Fate, Life, life, until
from tinker_claw.cli import main
from tinker_claw.config.settings import Gateway
from tinker_claw.ledger.codec import unpack_floats
from tinker_claw.methods import METHODS, Method, Signal

NAME = "running-mean"
LINE = """
WITH RECURSIVE line (id) AS (SELECT MAX(id) FROM versions UNION ALL
  SELECT parent FROM versions JOIN line USING (id) WHERE parent IS NOT NULL)
SELECT samples.id, turn_id, user, reward, advantage, advantages, logprobs, steps.id AS step,
  method_state FROM line JOIN steps ON steps.version = line.id
JOIN step_samples ON step_samples.step_id = steps.id JOIN samples ON samples.id = sample_id
JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id
WHERE steps.status = 'committed' ORDER BY steps.id, samples.id
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def checked(data: Path) -> list[sqlite3.Row]:
    """Check every number that the line of the newest version was trained on; return its rows."""
    with closing(sqlite3.connect(data / "ledger.sqlite3")) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(LINE).fetchall()
    means, states = dict[str, float](), dict[int, Any]()
    for row in found:
        mean = means.get(row["user"], 0.0)
        advantage = row["reward"] - mean
        means[row["user"]] = 0.9 * mean + 0.1 * row["reward"]
        states[row["step"]] = dict(means)
        assert row["advantage"] == pytest.approx(advantage)
        down = advantage < 0  # then times the probability of all others
        each = [
            advantage * ((1 - math.exp(q)) if down else 1) for q in unpack_floats(row["logprobs"])
        ]
        assert unpack_floats(row["advantages"]) == pytest.approx(each)
    for row in found:
        assert json.loads(row["method_state"]) == pytest.approx(states[row["step"]])
    return found


async def batch(w: World, to: int, *said: str) -> None:
    """Add replies of two users, until version `to` is the newest."""
    for number, what in enumerate(said):
        w.turn(what, user=("anna", "ben")[number % 2])
    await w.until(lambda: w.policy.newest.version.id >= to)


async def test_step_that_is_tried_again_trains_on_the_same_numbers_and_counts_once(
    tmp_path: Path,
) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, method=NAME, trainer=trainer) as w:
        trainer.fail["publish"] = 1
        await batch(w, 1, "NO", "NO", "YES", "YES")
        assert len(trainer.steps) == 2
        assert trainer.steps[0] == trainer.steps[1]
        await batch(w, 2, "NO", "YES", "NO", "YES")
        found = checked(tmp_path)
        assert [row["step"] for row in found] == [2] * 4 + [3] * 4
        # anna: -1, then 1 - -.1; ben likewise. Over the most tokens of a reply and four samples.
        over = 4 * Gateway().max_reply_tokens
        by_token = [-1 * (1 - math.exp(LOGPROB)), 1.1]
        for (ppo,) in trainer.steps[:2]:
            moved = sorted(datum.advantages for datum in ppo.datums)
            assert moved == [pytest.approx([a / over] * 2) for a in by_token for _ in range(2)]


async def test_batch_that_is_set_aside_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    trainer = FakeTrainer(refuse=has_token(666))
    async with world(tmp_path, method=NAME, trainer=trainer) as w:
        await batch(w, 1, "NO", "NO", "YES", "YES")
        then = w.ledger.steps.method_state()
        w.turn("NO", user="ben", tokens=(666, 7))
        await batch(w, 1, "NO", "YES", "YES")
        await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 4)
        assert w.ledger.steps.method_state() == then
        await batch(w, 2, "NO", "YES", "NO", "YES")
        assert len(checked(tmp_path)) == 8


async def test_rollback_goes_on_from_the_state_of_its_version(tmp_path: Path) -> None:
    async with world(tmp_path, method=NAME) as w:
        await batch(w, 1, "NO", "NO", "YES", "YES")
        then = w.ledger.steps.method_state()
        await batch(w, 2, "NO", "NO", "NO", "YES")
        assert w.ledger.steps.method_state() != then
        await undoing(w).pin(1)
        assert w.ledger.steps.method_state() != then, "a pin learns on"
        await undoing(w).roll_back(1)
        assert w.ledger.steps.method_state() == then
        await batch(w, 4, "YES", "NO", "YES", "NO")
        assert {row["step"] for row in checked(tmp_path)} == {1, 3}


class Bytes(Method):
    def reply_advantages(self, samples: Any, *_: Any) -> Any:
        return [0.5 for _ in samples], b"raw"


class Hasty(Method):
    def reply_advantages(self, *_: Any) -> Any:
        return {}["mean"]


LINE_OF_HASTY = Hasty.reply_advantages.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (Bytes, "not JSON serializable"),
        (Hasty, f"KeyError: 'mean' (test_running_mean.py, line {LINE_OF_HASTY})"),
    ],
)
async def test_step_that_a_method_fails_is_void_before_it_is_trained_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type[Method], why: str
) -> None:
    method = of("mine", "verdicts", frozenset({Signal.REWARD}), reward_weight=1.0)
    monkeypatch.setitem(METHODS, "mine", method)
    async with world(tmp_path, method="mine") as w:
        await batch(w, 0, "NO", "NO", "YES", "YES")
        await w.until(lambda: step_counts(w.ledger)["void"] > 0)
        assert why in sql(w.ledger).one("SELECT error FROM steps LIMIT 1")
        assert w.trainer.steps == []


# The product


FLAGS = ("--method", NAME, "--batch-size", "4", "--lora-rank", "4", "--learning-rate", "1e-3")
FLAGS += ("--gate", "off")


def learns(running: Life, version: int) -> None:
    """Talk to it until it serves this version, or dies."""

    def done() -> bool:
        with suppress(httpx.TransportError):
            return running.health()["policy_version"] >= version
        return running.ended is not None

    with talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        until(done)
        who.over.set()


@pytest.mark.slow
def test_page_explain_and_log_tell_the_numbers_after_two_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    with life(data, *FLAGS, fate=Fate("intent")) as first:
        learns(first, 1)
    shutil.copytree(data, other)
    with life(other, *FLAGS) as free:
        learns(free, 1)
    wanted = {row["id"]: row["advantage"] for row in checked(other)}
    # The same batch is trained; then it is killed, its state saved and nothing committed.
    with life(data, *FLAGS, fate=Fate("saved")) as second:
        learns(second, 1)
        assert second.ended == -9
    with closing(sqlite3.connect(data / "ledger.sqlite3")) as ledger:
        steps = ledger.execute("SELECT status, method_state FROM steps ORDER BY id")
        _, (status, state) = steps.fetchall()
        kept = dict(ledger.execute("SELECT id, advantage FROM samples WHERE advantage IS NOT NULL"))
    assert (status, state is None, kept) == ("intent", False, wanted)
    with life(data, *FLAGS) as third:
        learns(third, 3)
        found = checked(data)
        row = min(found[1:], key=lambda one: one["advantage"])
        assert row["advantage"] != row["reward"], "it was measured from a mean"
        page = f"{third.url.removesuffix('/v1')}/ui/turns/{row['turn_id']}"
        shown = re.findall(r'title="([^"]+)"', httpx.get(page, timeout=240).text)
        assert third.stop() == 0
    each = unpack_floats(row["advantages"])
    assert set(shown) == {f"{a:+z.3g}" for a in each}
    where = ("--data-dir", str(data))
    assert main.main(["explain", str(row["turn_id"]), *where]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"advantage {row['advantage']:+z.3f}" in told
    assert f"tokens {min(each):+z.3f} to" in told
    assert main.main(["log", "--full", *where]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (logged,) = [line for line in lines if line["id"] == row["turn_id"]]
    assert logged["advantage"] == row["advantage"]
    assert logged["advantages"] == pytest.approx(each)
