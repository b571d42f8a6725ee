"""A user who only gives feedback teaches the running product."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.clients import HELLO
from tests.support.ledger import read
from tests.support.lives import product, until
from tests.support.stories import run


@pytest.mark.slow
def test_feedback_alone_makes_a_step_without_a_call_of_the_judge(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, "--gate=off") as running:  # it would hold out one of the sixteen
        place = running.url.removesuffix("/v1") + "/v1/feedback"

        def session(number: int) -> None:
            asked = {"model": "demo", "messages": [HELLO], "max_tokens": 40}
            named = {"X-Session-Id": f"s{number}"}
            url = f"{running.url}/chat/completions"
            reply = httpx.post(url, json=asked, headers=named, timeout=240).json()
            told = {"response_id": reply["id"], "score": 0.5 if number % 2 else -1, "text": "Hm."}
            answer = httpx.post(place, json=told, headers={"Idempotency-Key": f"k{number}"})
            assert answer.json()["counts"], answer.text

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(session, range(16)))
        until(lambda: running.health()["policy_version"] == 1)
        health = running.health()
        late = httpx.post(place, json={"turn": 1, "score": 1.0})
        assert late.json()["because"] == "the reply was trained already"
        ended = httpx.post(place, json={"session": "s1", "score": 1.0, "final": True})
        assert not ended.json()["counts"]
        assert running.stop() == 0
    assert health["judge"] == "ok"
    assert read(data, "SELECT COUNT(*) FROM votes") == [(0,)], "nobody was asked"
    assert read(data, "SELECT COUNT(*) FROM next_states") == [(0,)]
    assert read(
        data,
        "SELECT DISTINCT state, reward FROM samples JOIN turns ON turns.id = turn_id ORDER BY 2",
    ) == [
        ("trained", -1),
        ("trained", 0.5),
    ]
    hinted = read(data, "SELECT COUNT(*) FROM samples WHERE hint = 'Hm.' AND reward = -1")
    assert hinted == [(8,)], "the teacher was told why"
    log = running.log.read_text()
    assert "Hm." not in log, "logs carry no user text"
    assert log.count('"feedback"') == 18

    assert "the reply was trained already" in run("log", "--full", directory=data).stdout
    lines = run("status", directory=data).stdout
    assert "16 rated (0 unlike the judge)" in " ".join(lines.split())
