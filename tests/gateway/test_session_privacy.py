"""Text that must not be kept: secrets, and what was said in private."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.support.captures import load
from tests.support.chats import parse_chat
from tests.support.fakes import FakeSampler
from tests.support.gateways import World, gateway, spell
from tests.support.ledger import judgeable, sql
from tinker_claw.cli.status import board as lines_of
from tinker_claw.cli.status import describe
from tinker_claw.formats.chat import Chat
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.prune import in_session
from tinker_claw.ledger.samples import NO_GRADIENT, STEPS_FAILED
from tinker_claw.ledger.turn_view import read_prompt
from tinker_claw.privacy.marker import NEAR_MISS
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.render.prompt_cache import PromptCache
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason, TurnRefusal

SECRET = "sk-" + "q7Zk2Wm9Xv4Tb8Nc3Rd6"
MARK = "quetzalcoatl"
REASON = ("private data", "a secret (API key)")


def written(world: World) -> bytes:
    """All bytes of the ledger's files."""
    files = world.ledger.path.parent.glob("ledger.sqlite3*")
    return b"".join(file.read_bytes() for file in files)


def rows(world: World) -> list[dict[str, Any]]:
    return [dict(row) for row in sql(world.ledger).rows("SELECT * FROM turns ORDER BY id")]


def nothing_of(text: str, world: World) -> bool:
    """Check that neither the text nor its tokens nor usual digests of it are anywhere."""
    kept = written(world)
    ids = array("i", world.renderer.encode(text)[1:-1]).tobytes()
    plain = hashlib.sha256(text.encode()).hexdigest()[:32].encode()
    blocks = sql(world.ledger).rows("SELECT * FROM prompt_blocks")
    turns = world.turns()
    inside = [array("i", (*t.prompt, *t.completion.tokens)).tobytes() for t in turns]
    assert not blocks or len(ids) > 8
    return text.encode() not in kept and plain not in kept and not any(ids in i for i in inside)


async def test_secret_of_the_user_is_in_no_row_and_no_tokens(world: World) -> None:
    long = "x y z " * 500  # so that the prompt has blocks
    said = f"use {SECRET} for it. {long}"
    answer = (await world.ask(said)).json()["choices"][0]["message"]["content"]
    await world.ask(said, answer, "thanks")
    first, second = rows(world)
    for row in (first, second):
        assert (row["reason"], row["detail"]) == REASON
        assert row["state"] == "refused"
        assert row["prompt_tokens"] > 1100
        assert row["completion_tokens"] == len(spell(world.renderer, "fine"))
        assert (row["history"], row["reply_digest"], row["topk"]) == ("[]", "", 0)
    assert first["request_text"].startswith("use [redacted: API key] for it.")
    assert second["request_text"] == "thanks", "only the history holds it"
    assert all(turn.prompt == turn.completion.tokens == () for turn in world.turns())
    assert nothing_of(SECRET, world)
    assert (
        world.sampler.prompts[0]
        == world.renderer.prompt([{"role": "user", "content": said}]).tokens
    ), "the model sees what was said"


async def test_secret_in_a_reply_reaches_the_user_and_nothing_else(world: World) -> None:
    world.say(f"Your key is {SECRET}.")
    reply = (await world.ask("which key?")).json()["choices"][0]["message"]["content"]
    assert reply == f"Your key is {SECRET}."
    world.say("fine")
    assert len(await world.events("which key?", reply, "thanks")) > 2
    first, second = rows(world)
    assert [(row["reason"], row["detail"]) for row in (first, second)] == [REASON, REASON]
    assert first["reply_text"] == "Your key is [redacted: API key]."
    assert world.next_states()[1] is not None, "it is still known what came next"
    assert nothing_of(SECRET, world)


async def test_secret_that_only_the_thinking_holds_is_found(world: World) -> None:
    call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    world.say(f"<think>\nhe gave me {SECRET}\n</think>\n\n{call}", "fine")
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    reply = (await world.ask("go on", tools=tools)).json()["choices"][0]["message"]
    (made,) = reply["tool_calls"]
    answer = {"role": "assistant", "content": None, "tool_calls": [made]}
    result = {"role": "tool", "tool_call_id": made["id"], "content": "done"}
    await world.ask("go on", answer, result, tools=tools)
    assert SECRET not in world.renderer.decode(world.sampler.prompts[1])
    first, second = rows(world)
    assert (first["reason"], first["detail"]) == REASON
    assert second["reason"] is None
    assert not any(SECRET[5:15] in world.renderer.decode(t.prompt) for t in world.turns())
    assert nothing_of(SECRET, world)


@pytest.mark.parametrize("place", ["tool", "arguments", "tools", "thought"])
async def test_secret_is_found_wherever_a_prompt_holds_it(world: World, place: str) -> None:
    def put(here: str) -> str:
        return f"Authorization: Bearer {SECRET}" if here == place else "nothing"

    function = {"name": "run", "arguments": json.dumps({"command": put("arguments")})}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": put("system")},
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "", "tool_calls": [call]}
        | {"reasoning_content": put("thought")},
        {"role": "tool", "tool_call_id": "c1", "content": put("tool")},
    ]
    properties = {"command": {"type": "string", "description": put("tools")}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "run", "parameters": parameters}}]
    assert (await world.ask(*messages, tools=tools)).status_code == 200
    (row,) = rows(world)
    assert str(row["detail"]).startswith("a secret (")
    assert nothing_of(SECRET, world)


KEYED = {"role": "system", "content": f"You are Claw.\n\n# TOOLS.md\nBearer {SECRET}"}
HELLO = {"role": "user", "content": "hello"}
NOTES = f"<system-reminder>\nContents of CLAUDE.md: export API_KEY={SECRET}\n</system-reminder>"
CLAUDE = {"user-agent": "claude-cli/2.1.330 (external, cli)"}


def ids_of(world: World, turn: int) -> tuple[int, ...]:
    return world.ledger.turns.get(turn).prompt


async def test_secret_in_the_system_prompt_does_not_silence_its_session(world: World) -> None:
    world.say("fine")
    await world.ask(KEYED, HELLO)
    answer = {"role": "assistant", "content": "fine"}
    await world.ask(KEYED, HELLO, answer, {"role": "user", "content": "no, shorter"})
    assert [row["reason"] for row in rows(world)] == [None, None]
    assert judgeable(world.ledger) == [1]
    assert ids_of(world, 1) == world.sampler.prompts[0], "to be trained it is needed whole"
    assert not sql(world.ledger).rows("SELECT * FROM prompt_blocks"), "no other turn shares its ids"
    assert SECRET.encode() not in written(world), "no text holds it"
    with open_read_only(world.ledger.path) as found:
        assert read_prompt(found, 1) == (), "nobody is shown it"


@pytest.mark.parametrize("end", ["trained", "expired", "quarantined", "refused", "closed"])
async def test_ids_of_a_prompt_with_a_secret_go_with_the_end_of_its_turn(
    world: World, end: str
) -> None:
    for who in ("a", "b"):
        keyed = KEYED | {"content": KEYED["content"] + who}
        await world.ask(keyed, HELLO, headers={"x-session-id": who})
    ledger = world.ledger
    if end == "closed":
        ledger.turns.close([rows(world)[0]["session_id"]])
    elif end == "refused":
        ledger.turns.refuse(1, TurnRefusal(Reason.EMPTY))
    else:
        sample = ledger.samples.add(1, 1.0, None)
        assert ids_of(world, 1) == world.sampler.prompts[0], "it is in the queue"
        if end == "trained":
            step, base = ledger.steps.begin(0, [sample]), ledger.versions.newest()
            assert base is not None
            ledger.steps.commit(step, base, state_ref="s1", sampler_ref="p1", metrics={})
        elif end == "expired":
            ledger.samples.refuse([sample], NO_GRADIENT)
        else:
            ledger.samples.refuse([sample], STEPS_FAILED)
    assert (ids_of(world, 1), ledger.turns.get(1).completion.tokens) == ((), ())
    assert rows(world)[0]["state"] in ("trained", "refused")
    assert ids_of(world, 2) == world.sampler.prompts[1], "and of no other"


async def test_a_reply_with_a_secret_of_the_system_prompt_is_not_trained(world: World) -> None:
    """The reply has it without the form by which it is known."""
    bare = SECRET.removeprefix("sk-") + "x"
    keyed = KEYED | {"content": f"password = {bare}"}
    world.say(f"Type {bare}, then Enter.", "fine")
    said = (await world.ask(keyed, HELLO)).json()["choices"][0]["message"]
    (row,) = rows(world)
    assert row["detail"] == "a secret of the system prompt"
    assert row["reply_text"] == "Type [redacted: a secret of the system prompt], then Enter."
    answer = {"role": "assistant", "content": said["content"]}
    await world.ask(keyed, HELLO, answer, {"role": "user", "content": f"{bare}?"})
    assert rows(world)[1]["detail"] == "a secret of the system prompt"
    assert nothing_of(bare, world)


async def test_secret_in_a_file_that_the_harness_shows_is_as_in_the_system_prompt(
    world: World,
) -> None:
    for words in ("hello", f"use {SECRET}"):
        parts = [{"type": "text", "text": text} for text in (NOTES, words)]
        said = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": parts}]}
        response = await world.http.post("/messages", json=said, headers=CLAUDE)
        assert response.status_code == 200, response.text
    shown, typed = rows(world)
    assert shown["reason"] is None
    assert str(typed["detail"]).startswith("a secret")
    assert SECRET.encode() not in written(world)


async def test_secret_in_what_came_next_leaves_the_turn_before_to_be_trained(
    world: World,
) -> None:
    await world.ask("hello")
    await world.ask("hello", "fine", f"no, with {SECRET}")
    before, after = rows(world)
    assert (before["reason"], after["reason"], after["detail"]) == (None, *REASON)
    state = world.next_states()[1]
    assert state is not None
    assert state.text == "no, with [redacted: API key]"
    assert judgeable(world.ledger) == [1]
    assert world.turns()[0].prompt == world.sampler.prompts[0]
    assert nothing_of(SECRET, world)


async def test_name_of_a_session_is_no_digest_of_a_secret(world: World) -> None:
    await world.ask(f"my key is {SECRET}")
    await world.ask("my key is [redacted: API key]")
    assert len(sql(world.ledger).rows("SELECT * FROM sessions")) == 1, "what is left names both"


async def test_header_makes_a_session_private(world: World) -> None:
    await world.ask("hello", headers={"X-Session-Id": "s"})
    private = {"X-Session-Id": "s", "X-Private": "true"}
    for body in ({}, {"stream": True}):
        answer = await world.ask("hello", "fine", f"I am {MARK}", headers=private, **body)
        assert answer.status_code == 200
    # Its history is private from now on, header or not.
    await world.ask("hello", "fine", f"I am {MARK}", "fine", "and?", headers={"X-Session-Id": "s"})
    assert [row["request_text"] for row in rows(world)] == ["hello"]
    assert world.next_states() == {1: None}, "it judges nothing"
    assert nothing_of(MARK, world)
    kinds = [seen["kind"] for seen in world.observer.seen]
    assert kinds == ["main", "private", "private", "private"]
    await world.ask("hello", headers={"X-Session-Id": "other"})
    assert len(rows(world)) == 2


async def test_line_in_the_chat_makes_the_rest_private(world: World) -> None:
    await world.ask("hello")
    await world.ask("hello", "fine", f"/private\nI am {MARK}")
    await world.ask("hello", "fine", f"/private\nI am {MARK}", "fine", f"still {MARK}")
    assert [row["request_text"] for row in rows(world)] == ["hello"]
    assert world.next_states() == {1: None}
    assert nothing_of(MARK, world)
    assert MARK in world.renderer.decode(world.sampler.prompts[-1]), "the model reads it"
    await world.ask("hello", "fine", "no, shorter")
    assert world.next_states()[1] is not None, "the turn before is as it was"


@pytest.mark.parametrize(
    "line", ["/private.", "`/private`", "/private\u200b", "hello\n/private on", "／Private, please"]
)
async def test_something_near_the_line_is_private_and_is_said(world: World, line: str) -> None:
    session = {"X-Session-Id": "s"}
    with capture_logs() as events:
        await world.ask(f"{line}\nI am {MARK}", headers=session)
        await world.ask(f"{line}\nI am {MARK}", "fine", f"still {MARK}", headers=session)
        await world.ask(f"{line}\nI am {MARK}", "fine", "/private off!", headers=session)
    assert rows(world) == []
    assert nothing_of(MARK, world)
    assert [event["event"] for event in events].count("private.near_miss") == 1
    assert MARK not in str(events)
    health = (await world.http.get("/../healthz")).json()
    assert health["private_near_misses"] == 1, "once for a session"
    assert NEAR_MISS in "\n".join(describe(health, world.url, time.time()))
    board = await asyncio.to_thread(read_overview, world.ledger.path.parent, 16)
    assert board["private_sessions"] == 1
    assert "1 private" in "\n".join(lines_of(board))
    await world.ask("/private off", headers=session)
    await world.ask("what does /private do?", headers={"X-Session-Id": "other"})
    assert len(rows(world)) == 2, "where it ends, and where the word is asked about"


async def test_nothing_private_stays_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wire,) = [wire for wire in world.formats if isinstance(wire, Chat)]
    encoded, cached = PromptCache.encoded, list[str]()

    def noted(cache: PromptCache, text: str, encode: Any, *, remembers: bool) -> Any:
        cached.extend([text] if remembers else [])
        return encoded(cache, text, encode, remembers=remembers)

    monkeypatch.setattr(PromptCache, "encoded", noted)

    def remembered(response: httpx.Response) -> bool:
        """A message that is known is not parsed again."""
        body = response.request.content
        first, again = (wire.parse(body, wire.routes[0], "default") for _ in range(2))
        return first.messages[0] is again.messages[0]

    private = f"/private\nI am {MARK} {'and more ' * 2000}"
    assert not remembered(await world.ask(private))
    counted = {"model": "demo", "input": private}
    response = await world.http.post("/responses/input_tokens", json=counted)
    assert response.json()["input_tokens"] > 2000
    over = await world.ask(f"/private\nI am {MARK}", "fine", "/private off\nthanks")
    assert not remembered(over), "nor when it is over, and in the history"
    assert MARK not in "".join(cached), "nor of what is only counted"
    assert remembered(await world.ask(f"I am {MARK}", "fine", "thanks")), "where it would be"
    assert MARK in "".join(cached)


async def test_private_off_ends_it_and_the_past_is_not_trained(world: World) -> None:
    said = [f"/private\nI am {MARK}", "fine", "/private off\nwhat is 2 + 3?"]
    await world.ask(said[0])
    await world.ask(*said)
    await world.ask(*said, "fine", "thanks")
    first, second = rows(world)
    for row in (first, second):
        assert row["reason"] == Reason.AFTER_PRIVATE
        assert (row["prompt"], row["blocks"], row["history"]) == (b"\0", b"", "[]")
    assert second["request_text"] == "thanks"
    assert nothing_of(MARK, world)
    await world.ask("something else")
    assert rows(world)[-1]["reason"] is None


@pytest.mark.parametrize(
    "body", [{}, {"model": "demo@v0"}, {"headers": {"X-Session-Id": "s", "X-Turn-Type": "side"}}]
)
async def test_session_stays_private_through_compaction_and_restart(
    tmp_path: Path, renderer: Renderer, body: dict[str, Any]
) -> None:
    named = {"X-Session-Id": "s"}
    async with gateway(tmp_path, renderer) as world:
        await world.ask(f"/private\nI am {MARK}", **{"headers": named} | body)
        await world.ask(f"summary: {MARK}", **{"headers": named} | body)
        assert rows(world) == []
    async with gateway(tmp_path, renderer) as world:
        await world.ask(f"summary: {MARK}", headers=named)
        assert rows(world) == []
        await world.ask("/private off", headers=named)
        await world.ask(f"summary: {MARK}", headers=named)
        assert len(rows(world)) == 2
        assert all(row["prompt"] == b"\0" for row in rows(world))


async def test_name_of_a_private_session_is_not_kept(tmp_path: Path, renderer: Renderer) -> None:
    named = {"X-Session-Id": f"about {MARK}"}
    async with gateway(tmp_path, renderer) as world:
        await world.ask("/private\nhello", headers=named)
        assert nothing_of(MARK, world)
    async with gateway(tmp_path, renderer) as world:
        await world.ask("still private", headers=named)
        assert rows(world) == []
        assert nothing_of(MARK, world)
        await world.ask("/private off", headers=named)
        await world.ask("/private\nagain", headers=named)
    async with gateway(tmp_path, renderer) as world:
        await world.ask("and still", headers=named)
        assert len(rows(world)) == 1, "private again, after a restart, too"
        find = in_session(f"about {MARK}", None)
        world.index.forget(find(sql(world.ledger)).session)
        world.ledger.forget(find)
        assert rows(world) == []
        assert nothing_of(MARK, world)
    async with gateway(tmp_path, renderer) as world:
        await world.ask("and still", headers=named)
        assert rows(world) == []


async def test_forgetting_a_private_session_does_not_end_its_privacy(
    tmp_path: Path, renderer: Renderer
) -> None:
    named = {"X-Session-Id": "s"}
    async with gateway(tmp_path, renderer) as world:
        await world.ask("hello", headers=named)
        await world.ask("hello", "fine", f"/private\nI am {MARK}", headers=named)
        find = in_session("s", None)
        world.index.forget(find(sql(world.ledger)).session)
        world.ledger.forget(find)
        assert rows(world) == []
    async with gateway(tmp_path, renderer) as world:
        await world.ask(f"summary: {MARK}", headers=named)
        assert rows(world) == []
        board = await asyncio.to_thread(read_overview, world.ledger.path.parent, 16)
        assert board["private_sessions"] == 1


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Interrupted(Redactor):
    """A redactor during whose work something else happens on the event loop."""

    loop: asyncio.AbstractEventLoop
    meanwhile: Callable[[], None]

    def redact(self, text: str) -> str:
        if len(text) > 20_000:
            done = threading.Event()
            self.loop.call_soon_threadsafe(lambda: (self.meanwhile(), done.set()))
            done.wait(30)
        return super().redact(text)


class OffLoop(Redactor):
    """A redactor that refuses to work on a long text on the event loop."""

    def redact(self, text: str) -> str:
        assert len(text) < 20_000 or threading.current_thread() is not threading.main_thread()
        return super().redact(text)


async def test_long_text_full_of_secrets_is_redacted_in_a_thread() -> None:
    secrets = SecretSearch(OffLoop([SECRETS]), ComputeRounds())
    quotes = '"password": "hunter2abc", ' * 58_000  # 1.5 MB
    left = await secrets.redact_any(quotes)
    assert left.count("[redacted: password or key]") == 58_000


async def test_words_that_come_while_their_session_is_forgotten_are_not_kept(
    tmp_path: Path, renderer: Renderer
) -> None:
    named, searcher = {"X-Session-Id": "s"}, Interrupted([])
    searcher.loop = asyncio.get_running_loop()
    async with gateway(tmp_path, renderer, redactor=searcher, context_tokens=50_000) as world:
        find = in_session("s", None)

        def forget() -> None:
            searcher.meanwhile = lambda: None
            world.index.forget(find(sql(world.ledger)).session)
            world.ledger.forget(find)

        searcher.meanwhile = lambda: None
        call = '<tool_call>\n{"name": "f", "arguments": {"n": %d}}\n</tool_call>'
        world.say("\n".join(call % n for n in range(2)))
        offered: dict[str, Any] = {"headers": named, "tools": TOOLS}
        called = (await world.ask("hello", **offered)).json()["choices"][0]["message"]
        # Together they are long, and searched once more as what followed the call.
        said = f"{MARK} again and " * 800
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": said}
            for made in called["tool_calls"]
        ]
        searcher.meanwhile = forget
        answer = await world.ask("hello", {**called, "content": ""}, *results, **offered)
        assert answer.status_code == 200
        assert rows(world) == []
        assert sql(world.ledger).rows("SELECT * FROM next_states") == []
        assert MARK.encode() not in written(world)


async def test_side_calls_about_a_private_session_are_forgotten(world: World) -> None:
    transcript = f"Summarise this.\n\n[User]: /private\\nI am {MARK}\n[Assistant]: fine"
    await world.ask(transcript, headers={"X-Turn-Type": "side"})
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await world.ask(f"/private\n{MARK}", headers={"traceparent": trace})
    of_trace = {"traceparent": trace, "X-Turn-Type": "side"}
    await world.ask(f"a title for {MARK}", headers=of_trace)
    assert rows(world) == []
    assert nothing_of(MARK, world)
    await world.ask("a title for bees", headers={"X-Turn-Type": "side"})
    assert len(rows(world)) == 1
    trace = {"traceparent": f"00-{'c' * 32}-{'b' * 16}-01"}
    await world.ask(
        f"a title for {MARK}", headers=trace | {"X-Turn-Type": "side", "X-Private": "1"}
    )
    await world.ask("hello", headers=trace | {"X-Session-Id": "s"})
    assert len(rows(world)) == 2, "of that one request it was said, and of no session"


async def test_side_calls_of_a_session_that_was_private_are_forgotten(world: World) -> None:
    named = {"X-Session-Id": "s"}
    await world.ask(f"/private\nI am {MARK}", headers=named)
    await world.ask("/private off", headers=named)
    await world.ask(f"a title for {MARK}", headers=named | {"X-Turn-Type": "side"})
    assert [row["kind"] for row in rows(world)] == ["main"]
    assert nothing_of(MARK, world)


async def test_private_reply_that_is_hung_up_on_leaves_nothing(
    tmp_path: Path, renderer: Renderer
) -> None:
    sampler = FakeSampler(spell(renderer, "a very long reply " * 20))
    async with gateway(tmp_path, renderer, sampler) as world:
        body = {"model": "demo", "stream": True}
        body["messages"] = [{"role": "user", "content": f"/private\n{MARK}"}]
        async with world.http.stream("POST", "/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
        assert nothing_of(MARK, world)
        await world.ask("hello")
        assert [row["request_text"] for row in rows(world)] == ["hello"]


class Counting(Redactor):
    """A redactor that counts its texts."""

    searched = 0

    def holds(self, text: str) -> str | None:
        self.searched += 1
        return super().holds(text)


def test_what_was_seen_of_a_history_is_not_searched_again() -> None:
    captured = max(
        (c for c in load() if c.scenario == "tools_multiturn"), key=lambda c: len(c.encoded())
    )
    assert len(captured.encoded()) > 40_000
    redactor = Counting(["secrets"])
    search = SecretSearch(redactor, ComputeRounds())
    assert search.secret_in(parse_chat(captured.encoded())) is None
    before = redactor.searched
    assert before > len(captured.body["messages"])
    assert search.secret_in(parse_chat(captured.encoded())) is None  # strings of its own
    assert redactor.searched == before
