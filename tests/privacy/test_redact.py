"""A user's words are in the ledger and nowhere else: not in events, figures or health."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.lives import Life, product

MARK = "quetzalcoatl"
"""Mark in every word that a client sends here."""
CHAT = "/chat/completions"
KEY = f"{MARK}-0123456789abcdef"


def refused() -> Iterator[bytes]:
    """Invalid bodies whose errors quote the user."""
    said = {"role": "user", "content": MARK}
    good: dict[str, Any] = {"model": "demo", "messages": [said]}
    for fields in (
        {"model": MARK},
        {MARK: MARK},
        {"messages": [{"role": MARK, "content": MARK}]},
        {"messages": MARK},
        {"temperature": MARK},
        {"tools": [{"type": "function", "function": {"name": MARK, "parameters": MARK}}]},
        {"tool_choice": MARK},
        {"response_format": {"type": MARK}},
        {"messages": [{"role": "user", "content": f"{MARK} " * 60_000}]},
    ):
        yield json.dumps(good | fields).encode()
    whole = json.dumps(good).encode()
    yield whole[:-9]
    yield whole + MARK.encode()
    yield whole.replace(MARK.encode(), MARK.encode() + b"\xff")


def converse(running: Life, client: httpx.Client) -> None:
    """Send requests that are read: odd, streamed, judged, and aborted."""
    messages = [{"role": "user", "content": f"Hello, I am {MARK}. What is 2 + 3?"}]
    odd = [
        {"role": "tool", "content": MARK},
        {"role": "user", "content": [{"type": MARK, "text": f"{MARK} \ud800"}], MARK: MARK},
    ]
    answer = client.post(CHAT, content=json.dumps({"model": "demo", "messages": odd}))
    assert answer.status_code == 200, answer.text
    for stream in (False, True, False):
        body = {"model": "demo", "messages": messages, "max_tokens": 40}
        headers = {"X-Session-Id": MARK, "traceparent": MARK, "user-agent": MARK}
        if stream:
            with client.stream(
                "POST", CHAT, json=body | {"stream": True}, headers=headers
            ) as answer:
                next(answer.iter_bytes())
            continue
        answer = client.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": f"No, no, no, {MARK}! Shorter, please."}]


def test_what_a_user_says_is_nowhere_but_in_the_ledger(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "metrics.jsonl").touch()
    data.chmod(0o755)  # as of somebody who made it
    (data / "metrics.jsonl").chmod(0o644)
    env = {"TINKER_CLAW_USERS": json.dumps([{"name": "anna", "key": KEY}])}
    with product(
        data, env=env, constants={"tinker_claw.gateway.limits:MAX_BODY_BYTES": 600_000}
    ) as running:
        root, known = running.url.removesuffix("/v1"), {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=running.url, headers=known, timeout=240) as client:
            converse(running, client)
            for body in refused():
                answer = client.post(
                    CHAT, content=body, headers={"content-type": "application/json"}
                )
                assert 400 <= answer.status_code < 500, answer.text
            client.post(CHAT, content=MARK.encode() * 60_000)
            client.get(f"{root}/{MARK}?{MARK}={MARK}")
            client.post(CHAT, json={}, headers={"authorization": f"Bearer {MARK}"})
            client.post(CHAT, json={}, headers={"origin": f"https://{MARK}.example"})
            deadline = time.monotonic() + 180
            while "verdict" not in (kinds := {event["event"] for event in running.events()}):
                assert time.monotonic() < deadline, kinds
                time.sleep(0.1)
            told = [client.get(f"{root}/{page}").text for page in ("healthz", "metrics")]
        assert httpx.get(f"{root}/healthz").json() == {"status": "ok"}
        opened = [path for path in (data, *data.rglob("*")) if path.stat().st_mode & 0o077]
        assert opened == [], "closed to others"
        assert "data_dir.closed" in {event["event"] for event in running.events()}
        assert running.stop() == 0
    told += [running.log.read_text(), *(f.read_text() for f in data.glob("*.jsonl"))]
    assert not any(MARK in text.lower() for text in told)
    turns = [event for event in running.events() if event["event"] == "turn.captured"]
    assert {event["user"] for event in turns} == {"anna"}
    with sqlite3.connect(data / "ledger.sqlite3") as ledger:
        (kept,) = ledger.execute("SELECT COUNT(*) FROM next_states WHERE text LIKE '%quetz%'")
    assert kept == (1,), "the mark has come through"
