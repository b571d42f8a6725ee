"""Episodes of agents, over HTTP, in the product with its small model: they are compared in their
groups, and no kill leaves a group in halves."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo import homework
from tests.support.ledger import one, read
from tests.support.lives import Fate, life, until
from tests.support.ports import free_port
from tinker_claw.turn_state import Reason

FLAGS = ("--batch-size", "4", "--lora-rank", "4", "--learning-rate", "1e-3")
FLAGS += ("--method", "binary", "--prm-m", "1")
SIZE, STEPS = 2, 2
OUTCOMES = {("one", 0): 1.0, ("one", 1): -1.0, ("two", 0): 0.0, ("two", 1): 0.5}


@dataclass(frozen=True)
class Agent:
    """A client that sends again what a dead gateway did not answer."""

    url: str

    def post(self, path: str, headers: dict[str, str], **body: Any) -> Any:
        while True:
            try:
                answer = httpx.post(f"{self.url}/{path}", json=body, headers=headers, timeout=180)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()

    def try_it(self, group: str, number: int) -> None:
        """Play an episode of two steps, and report its outcome."""
        session = f"{group}-{number}"
        headers = {"X-Session-Id": session, "X-Turn-Type": "episode", "X-Task-Id": "sums"}
        headers |= {"X-Group-Id": group, "X-Group-Size": str(SIZE)}
        problem = homework.new_problem(random.Random(number))
        messages = [{"role": "user", "content": homework.first_message(problem)}]
        for _ in range(STEPS):
            reply = self.post("chat/completions", headers, model="demo", messages=messages)
            said = reply["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": random.Random(number).choice(homework.APPROVALS)},
            ]
        score = OUTCOMES[group, number]
        self.post(
            "feedback", {}, session=session, score=score, final=True, source="client", key=session
        )

    def try_all(self) -> None:
        with ThreadPoolExecutor(len(OUTCOMES)) as pool:
            list(pool.map(lambda which: self.try_it(*which), OUTCOMES))


SAMPLES = """
SELECT groups.name, sessions.key, turns.idx, state, reason, reward, samples.step_id,
  (SELECT AVG(value) FROM votes WHERE votes.turn_id = turns.id) AS vote
FROM samples JOIN turns ON turns.id = samples.turn_id JOIN sessions ON sessions.id = session_id
  JOIN groups ON groups.id = group_id ORDER BY samples.id
"""


def is_whole(data: Path) -> None:
    """Check that a group is held whole or not at all, and was trained in one step."""
    for name in ("one", "two"):
        found = [row for row in read(data, SAMPLES) if row["name"] == name]
        assert len({row["state"] == "held" for row in found}) <= 1, [tuple(row) for row in found]
        assert len({row["step_id"] for row in found if row["state"] == "trained"}) <= 1
        assert len({row["state"] for row in found if row["state"] != "refused"}) <= 1


def is_told(data: Path) -> None:
    """Check that each step of each episode was trained once, with outcome and vote as its reward,
    or was left out because all rewards of its step agree."""
    found = read(data, SAMPLES)
    assert len({(row["key"], row["idx"]) for row in found}) == len(found)
    for row in found:
        outcome = OUTCOMES[row["name"], int(row["key"][-1])]
        assert row["reward"] == pytest.approx(outcome + (row["vote"] or 0.0))
        assert row["state"] == "trained" or row["reason"] == Reason.EQUAL_REWARDS
    assert one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 2") == len(OUTCOMES)
    # The end of an episode has no next state; the steps before it have.
    last = read(
        data,
        "SELECT MAX(idx), next_states.turn_id FROM samples "
        "JOIN turns ON turns.id = samples.turn_id "
        "LEFT JOIN next_states ON next_states.turn_id = turns.id GROUP BY session_id",
    )
    assert [tuple(row)[1] for row in last] == [None] * len(OUTCOMES)


OVER = "SELECT COUNT(*) FROM turns WHERE state IN ('held', 'queued')"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fate",
    [
        Fate("queued", passes=3),  # held, that is
        Fate("tinker_claw.ledger.groups:_refuse"),  # while a group is queued
        Fate("tinker_claw.ledger.groups:GroupTable._end"),
        Fate("intent"),
        Fate("committing"),
        Fate("swapped"),
    ],
    ids=lambda fate: f"{fate.dies_at}".rpartition(":")[2],
)
def test_killed_anywhere_groups_are_whole_and_train_once(tmp_path: Path, fate: Fate) -> None:
    data, port = tmp_path / "data", free_port()
    with ThreadPoolExecutor(1) as pool:
        with life(data, *FLAGS, port=port, fate=fate) as doomed:
            playing = pool.submit(Agent(doomed.url).try_all)
            assert doomed.ends() == -9
        is_whole(data)
        with life(data, *FLAGS, port=port) as again:
            playing.result(timeout=240)
            until(lambda: one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 2") == 4)
            until(lambda: one(data, OVER) == 0)
            assert again.stop() == 0
    is_whole(data)
    is_told(data)
    assert "sums" not in again.said(), "what a client calls its task is in no log"
    # A request that was answered into the void was asked again: the agent went on from the second.
    left = read(data, "SELECT DISTINCT reason FROM turns WHERE kind = 'main'")
    assert {row[0] for row in left} <= {None, Reason.NOT_CONTINUED, Reason.HUNG_UP}
