"""Secrets in what a client names: sessions, tasks, groups, programs, keys."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import MODEL, chat, gateway
from tests.support.stories import run
from tinker_claw.ledger.database import FILE
from tinker_claw.render.renderer import Renderer

SECRET = "sk-ant-api03-" + "Zq7Xw2Lk9Pb4Rt6Vn8Mc1Hd3Jf5Gs0Ya" * 2 + "AA"
PIECE = SECRET[13:29]
"""A part of it, for a name that was cut."""
NAME = f"work with {SECRET}"
HELLO = chat("hi")
RUNTIME = f"Runtime: agent=main | session=agent:main:subagent:{SECRET} | sessionId={SECRET} | x=y"
CHANNEL = f"Runtime: agent=main | session=agent:main:{SECRET}:direct:1 | sessionId=s-2 | x=y"
OPENCLAW = {"role": "system", "content": "You are a personal assistant running inside OpenClaw."}

Way = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers of a request."""


def by_chat(headers: dict[str, str] | None = None, **body: Any) -> Way:
    return "/chat/completions", {"messages": HELLO} | body, headers or {}


EPISODE = {"x-session-id": "s", "x-task-id": "t", "x-turn-type": "episode"}
USER = {"user_id": f"user_a_account__session_{SECRET}"}
WAYS: dict[str, Way] = {
    "session": by_chat({"x-session-id": NAME}),
    "affinity": by_chat({"x-session-affinity": NAME}),
    "cache key": by_chat(prompt_cache_key=NAME),
    "cache key of Responses": ("/responses", {"input": "hi", "prompt_cache_key": NAME}, {}),
    "user of Messages": ("/messages", {"messages": HELLO, "max_tokens": 9, "metadata": USER}, {}),
    "program": by_chat({"user-agent": f"{SECRET}/1"}),
    "program, cut": by_chat({"user-agent": f"my own {SECRET}"}),
    "task": by_chat(EPISODE | {"x-task-id": SECRET}),
    "group": by_chat(EPISODE | {"x-group-id": SECRET, "x-group-size": "2"}),
    "model": by_chat(model=f"claude-{SECRET}"),
    "stop string": by_chat(stop=[SECRET]),
    "subagent of OpenClaw": by_chat(messages=[OPENCLAW, *chat(f"hi\n\n{RUNTIME}")]),
    "channel of OpenClaw": by_chat(messages=[OPENCLAW, *chat(f"hi\n\n{CHANNEL}")]),
    "response": ("/responses", {"input": "hi", "previous_response_id": SECRET}, {}),
}


def holds(data: Path) -> list[str]:
    """Where a part of the secret stands in the ledger."""
    with sqlite3.connect(data / FILE) as raw:
        lines = [line[:200] for line in raw.iterdump() if PIECE in line]
    return lines or [file.name for file in data.iterdir() if PIECE.encode() in file.read_bytes()]


@pytest.mark.parametrize("way", WAYS)
async def test_no_name_of_a_client_keeps_a_secret(
    tmp_path: Path, renderer: Renderer, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, body, headers = WAYS[way]
    async with gateway(tmp_path, renderer, models="claude-*") as world:
        for _ in range(2):
            answer = await world.http.post(path, json={"model": MODEL} | body, headers=headers)
            assert answer.status_code in ((404, 400) if way == "response" else (200,)), answer.text
    assert holds(tmp_path) == []
    shown = capsys.readouterr()
    assert PIECE not in shown.out + shown.err


async def test_a_session_is_found_again_by_such_a_name(tmp_path: Path, renderer: Renderer) -> None:
    """By the next request, by feedback, and by the commands."""
    async with gateway(tmp_path, renderer) as world:
        named = {"x-session-id": NAME}
        await world.ask("hi", headers=named)
        await world.ask("hi", "fine", "And now?", headers=named)
        other = {"x-session-id": NAME.replace("work", "play")}
        await world.ask("hi", headers=other)
        assert world.column("session_id") == [1, 1, 2]
        said = {"session": NAME, "score": 1, "task": SECRET, "group": SECRET, "key": SECRET}
        first = (await world.http.post("/feedback", json=said)).json()
        assert first["turn"] == 2
        again = (await world.http.post("/feedback", json=said)).json()
        assert (again["id"], again["repeated"]) == (first["id"], True)
        key = {"idempotency-key": f"{SECRET} 2"}
        assert (
            await world.http.post("/feedback", json={"turn": 1, "score": -1}, headers=key)
        ).status_code == 200
    assert holds(tmp_path) == []
    shown = run("log", "turns", "--session", NAME, "--json", directory=tmp_path).stdout
    assert len(shown.splitlines()) == 2
    gone = run("forget", "session", NAME, "--yes", directory=tmp_path)
    assert gone.returncode == 0, gone.stderr
    assert "2 turns" in gone.stdout


async def test_sessions_of_a_group_with_such_a_name_are_one_group(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        for session in ("one", "two"):
            headers = {"x-session-id": session, "x-task-id": SECRET, "x-group-id": NAME}
            await world.ask("hi", headers=headers | {"x-group-size": "2"})
    with sqlite3.connect(tmp_path / FILE) as raw:
        assert raw.execute("SELECT group_id FROM sessions").fetchall() == [(1,), (1,)]


async def test_a_private_session_with_such_a_name_stays_private(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.ask("hi", headers={"x-session-id": NAME, "x-private": "1"})
    async with gateway(tmp_path, renderer) as world:
        await world.ask("hi", "fine", "And now?", headers={"x-session-id": NAME})
        assert world.column("request_text") == []
    assert holds(tmp_path) == []
