"""Practice in the running product: the demo's model, killed at each point of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from examples.demo import homework
from examples.demo.judge import HINTS_PLAIN
from tests.support.ledger import check, one, read
from tests.support.lives import Fate, Life, life, until

pytestmark = pytest.mark.slow
FLAGS = ("--batch-size", "64", "--lora-rank", "4", "--learning-rate", "1e-3")
QUESTION = "Leo has 3 apples and gets 4 more. How many apples now? Please solve it for me."
_PRACTICE = "tinker_claw.learner.practice"
SHORT = {
    f"{_PRACTICE}:STEPS": (2,),
    f"{_PRACTICE}:APART": 0.0,
    f"{_PRACTICE}:FEWEST_ACCEPTED": 1,
    f"{_PRACTICE}:FEWER": 1.0,
    f"{_PRACTICE}:FEWER_ENDS": 12,
    f"{_PRACTICE}:OBEYED": 0.0,
}
"""A run of two optimizer steps that passes its check, whatever it has learned."""
POINTS = {
    "intent": 0,
    "trained": 0,
    "published": 0,
    "trained, again": 1,
    "asked": 0,
    "saved": 0,
    "committing": 0,
    "committed": 0,
    "swapped": 0,
}


def session(running: Life, name: str, said: str) -> None:
    """Ask, say something of the reply, and wait until it is judged."""
    messages = [{"role": "user", "content": QUESTION}]
    for text in (said, None):
        response = httpx.post(
            f"{running.url}/chat/completions",
            json={"model": "demo", "messages": messages, "max_tokens": 60},
            headers={"X-Session-Id": name},
            timeout=240,
        )
        response.raise_for_status()
        reply = response.json()["choices"][0]["message"]["content"]
        if text is not None:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": text}]


def judged(data: Path, sessions: int) -> bool:
    return one(data, "SELECT COUNT(*) FROM verdicts") >= sessions


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a lesson that its owner accepted twice told, and nine first messages."""
    data = tmp_path_factory.mktemp("practice") / "data"
    with life(data, *FLAGS) as running:
        assert running.serves()
        session(running, "first", f"/always {HINTS_PLAIN[0]}")
        for number in range(8):
            session(running, f"told {number}", homework.APPROVALS[number % 2])
        until(lambda: judged(data, 8))
        assert running.stop() == 0
    return data


@contextmanager
def practising(data: Path, fate: Fate | None = None) -> Iterator[Life]:
    with life(data, *FLAGS, "--practice", "on", fate=fate) as running:
        yield running


def state(data: Path) -> str:
    return one(data, "SELECT state FROM lessons")


def queued(data: Path) -> list[int]:
    rows = read(data, "SELECT id FROM turns WHERE state = 'queued' ORDER BY id")
    return [row[0] for row in rows]


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_a_practice_is_whole_or_nothing(
    point: str, accepted: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(accepted, data)
    live = queued(data)
    assert live
    fate = Fate(point.partition(",")[0], POINTS[point], constants=SHORT)
    with practising(data, fate) as running:
        assert running.ends() == -9
    done = point in ("committed", "swapped")
    assert one(data, "SELECT MAX(id) FROM versions") == done
    assert state(data) == ("provisional" if done else "told")
    with practising(data, Fate(constants=SHORT)) as again:
        assert again.serves()
        session(again, "meanwhile", homework.APPROVALS[0])
        until(lambda: state(data) == "provisional")
        until(lambda: again.health()["policy_version"] == 1)
        session(again, "untold", homework.APPROVALS[0])
        assert again.stop() == 0
    told = read(data, "SELECT policy_version, told FROM turns ORDER BY id DESC LIMIT 1")
    assert tuple(told[0]) == (1, None)
    steps = read(data, "SELECT status, lesson FROM steps ORDER BY id")
    assert [tuple(row) for row in steps] == [("void", 1)] * (not done) + [("committed", 1)]
    assert set(live) <= set(queued(data))
    check(data, [], batch_size=64)


UNDONE = {
    "unlearning": Fate("tinker_claw.ledger.practice:go_on_from", constants=SHORT),
    "unlearned": Fate("tinker_claw.ledger.practice:PracticeTable.unlearn", constants=SHORT),
    "loaded": Fate("state loaded", 1, constants=SHORT),  # the start loads one, too
}


@pytest.mark.parametrize("point", UNDONE)
def test_killed_while_a_practice_is_undone_the_version_before_answers(
    point: str, accepted: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(accepted, data)
    with practising(data, Fate(constants=SHORT)) as running:
        assert running.serves()
        until(lambda: state(data) == "provisional")
        until(lambda: running.health()["policy_version"] == 1)
        assert running.stop() == 0
    before = one(data, "SELECT sampler_ref FROM versions WHERE id = 0")
    with practising(data, UNDONE[point]) as running:
        assert running.serves()
        with suppress(httpx.HTTPError):  # it may be killed while it answers
            for number in range(2):
                session(running, f"rejected {number}", homework.TERSE_CORRECTIONS[number])
        assert running.ends() == -9
    with life(data, *FLAGS) as again:
        assert again.serves()
        if point == "unlearning":
            assert state(data) == "provisional", "its transaction was cut off"
            assert again.health()["policy_version"] == 1
            assert again.stop() == 0
            return
        assert state(data) == "told"
        assert again.health()["policy_version"] == 2
        assert again.stop() == 0
    assert one(data, "SELECT sampler_ref FROM versions WHERE id = 2") == before
