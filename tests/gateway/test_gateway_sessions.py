"""Conversations over HTTP: which turn gets which next state, and how the next prompt begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.conversation.test_classify import QUEUED, compacted
from tests.gateway.test_session_privacy import MARK, nothing_of
from tests.support.fakes import Script
from tests.support.gateways import World, chat, gateway, spell
from tests.support.ledger import sql
from tests.support.openclaw import (
    EVENT,
    HEARTBEAT,
    NUDGE,
    REMINDER,
    TRACE,
    announced,
    assistant,
    openclaw,
    retried,
    runtime,
    tool,
    tools,
    user,
    utility,
)
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import NextState

SUMMARISE = utility("You are a context summarization assistant", f"<conversation> {MARK}")


def closed(world: World) -> dict[str, bool]:
    """Whether the ledger calls each session closed."""
    rows = sql(world.ledger).rows("SELECT key, closed_at FROM sessions ORDER BY id")
    return {row["key"]: row["closed_at"] is not None for row in rows}


async def talk(
    world: World, first: str, *rest: str | dict[str, Any], **headers: str
) -> dict[str, Any]:
    """Let OpenClaw send a conversation, whose texts are the assistant's and the user's in turn."""
    sides = (assistant, user)
    messages = [
        sides[at % 2](message) if isinstance(message, str) else message
        for at, message in enumerate(rest)
    ]
    return await world.reply(openclaw(first, *messages), **headers)


async def test_a_user_reply_becomes_the_next_state_of_the_turn_before(
    world: World, renderer: Renderer
) -> None:
    world.say("Four.")
    await talk(world, "2+2?")
    assert world.woken == []
    await talk(world, "2+2?", "Four.", "just the digit")
    assert world.next_states() == {1: NextState("user", "just the digit"), 2: None}
    assert world.woken == ["judge"]
    first, second = world.turns()
    assert (first.session_id, first.index) == (second.session_id, second.index - 1)
    assert (first.request_text, first.reply_text) == ("2+2?", "Four.")
    assert second.request_text == "just the digit"
    # The hint goes behind the user's words, not behind OpenClaw's volatile message.
    assert second.hint_at is not None
    assert renderer.decode(second.prompt[: second.hint_at]).endswith("just the digit")
    assert renderer.decode(second.prompt).count("<<<BEGIN_OPENCLAW") == 1, "not gone on from"
    assert renderer.decode(second.prompt[second.hint_at :]).endswith(
        "<<<END_OPENCLAW_INTERNAL_CONTEXT>>><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_side_calls_neither_judge_nor_are_judged(world: World) -> None:
    await talk(world, "hi")
    await talk(world, "hi", "fine", HEARTBEAT)
    await world.reply(utility("Write an Activity recap for", "user: hi"))
    assert world.next_states() == {1: None, 2: None, 3: None}
    assert world.woken == []
    assert world.column("kind") == ["main", "side", "side"]
    assert world.column("reason") == [None, Reason.SIDE, Reason.SIDE]
    details = world.column("detail")[1:]
    assert [detail.split(": ")[0] for detail in details] == ["heartbeat", "recap"]
    assert world.column("request_kind") == ["user turn", "heartbeat", "recap"]
    assert [params.student_topk for params in world.sampler.params] == [2, 0, 0]
    # The user's answer still finds the main turn.
    await talk(world, "hi", "fine", "great")
    assert world.next_states()[1] == NextState("user", "great")


async def test_after_a_restart_the_reply_that_was_kept_is_found_among_those_sent_again(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("one", "two", "three")
        for _ in range(3):
            await talk(world, "hi")
    async with gateway(tmp_path, renderer) as world:
        await talk(world, "hi", "one", "thanks")
        assert world.next_states()[1] == NextState("user", "thanks")
        assert [turn.index for turn in world.turns()] == [0, 1, 2, 3]


async def test_sessions_that_overlap_do_not_mix(world: World, renderer: Renderer) -> None:
    world.sampler.say(
        *(Script(spell(renderer, text), gap_s=0.02) for text in ("aa bb", "cc dd", "ee ff"))
    )
    one, two = {"X-Session-Id": "one"}, {"X-Session-Id": "two"}
    body = {"messages": chat("hi")}
    replies = await asyncio.gather(
        world.reply(body, **one), world.reply(body, **two), world.reply(body, **one)
    )
    texts = [reply["content"] for reply in replies]
    assert sorted(texts) == ["aa bb", "cc dd", "ee ff"]
    # Both overlapping turns of session one can be gone on from.
    await world.ask("hi", texts[0], "first", headers=one)
    await world.ask("hi", texts[2], "third", headers=one)
    await world.ask("hi", texts[0], "not here", headers=two)
    by_reply = {t.reply_text: world.ledger.turns.next_state(t.id) for t in world.turns()[:3]}
    assert by_reply == {
        texts[0]: NextState("user", "first"),
        texts[1]: None,
        texts[2]: NextState("user", "third"),
    }


async def test_a_session_that_ends_is_closed_and_its_last_turn_says_why_it_is_not_trained(
    world: World,
) -> None:
    session = {"X-Session-Id": "s"}
    await world.ask("hi", headers=session)
    assert closed(world) == {"s": False}
    await world.ask("hi", "fine", "bye", headers=session | {"X-Session-Done": "true"})
    assert closed(world) == {"s": True}
    assert world.next_states() == {1: NextState("user", "bye"), 2: None}
    assert world.column("reason") == [None, Reason.SESSION_DONE]
    # Whoever comes back opens it again; what he says judges nothing that was closed.
    await world.ask("hi", "fine", "bye", "fine", "wait", headers=session)
    assert closed(world) == {"s": False}
    assert world.next_states()[2] is None


async def test_new_begins_another_session_under_the_same_name(
    tmp_path: Path, renderer: Renderer
) -> None:
    """OpenClaw's `/new` and `/reset` keep the session's id; its history begins anew."""
    named = {"session_id": "s:0", "traceparent": TRACE["traceparent"]}
    anew = {"session_id": "s:1"}
    async with gateway(tmp_path, renderer) as world:
        world.say("Four.", "Five.", "Six.")
        await talk(world, "2+2?", **named)
        await talk(world, "2+2?", "Four.", "and 2+3?", **named)
        await talk(world, "What is 3+3?", **anew)
        assert closed(world) == {"s#1": True, "s": False}
        assert [(turn.session_id, turn.index) for turn in world.turns()] == [(1, 0), (1, 1), (2, 0)]
        assert world.next_states()[2] is None, "nothing was said about it"
        assert set(world.column("lost")) == {None}
    async with gateway(tmp_path, renderer) as world:
        world.say("Seven.")
        await talk(world, "What is 3+3?", "Six.", "thanks", **anew)
        assert world.next_states()[3] == NextState("user", "thanks")
        assert [turn.session_id for turn in world.turns()] == [1, 1, 2, 2]


async def test_what_is_sent_again_or_summarised_begins_no_other_session(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await talk(world, "2+2?")
        await talk(world, "2+2?")
        await talk(world, retried("2+2?"))
        await talk(world, "2+2?", user("and 2+3?"))
        await talk(world, "2+2?", HEARTBEAT)
        assert list(closed(world)) == ["s"]
    async with gateway(tmp_path / "private", renderer) as world:
        await talk(world, "/private\n2+2?")
        await talk(world, "What is 3+3?")
        assert world.turns() == [], "it stays private"


async def test_an_idle_session_is_closed_and_goes_on_with_the_next_word(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, idle_s=1e-9) as world:
        await talk(world, "hi")
        await world.ask("hello", headers={"X-Session-Id": "other"})
        assert closed(world) == {"s": True, "other": False}
        assert world.column("reason") == [None, None]
        await talk(world, "hi", "fine", "good morning")
        assert closed(world) == {"s": False, "other": True}
        assert world.next_states()[1] == NextState("user", "good morning")
    async with gateway(tmp_path, renderer, idle_s=1e-9) as world:
        assert closed(world) == {"s": True, "other": True}


@pytest.mark.parametrize("prompt", [HEARTBEAT, REMINDER, announced("42")])
async def test_what_an_automatic_prompt_made_the_agent_say_is_not_the_turn_before(
    world: World, prompt: dict[str, Any]
) -> None:
    world.say("Four.", "Tea time!", "Sorry.")
    await talk(world, "2+2?")
    body = openclaw("2+2?", assistant("Four."), prompt)
    if prompt == announced("42"):
        body["messages"][-1] = EVENT
    await world.reply(body)
    assert world.column("kind") == ["main", "side"]
    await talk(world, "2+2?", "Four.", prompt, "Tea time!", "stop that")
    assert world.next_states() == {1: None, 2: None, 3: None}


async def test_a_retry_that_rewrites_the_users_message_changes_nothing(world: World) -> None:
    world.say("one", "lost", "two", "three")
    await talk(world, "hi")
    await talk(world, "hi", "one", "more")
    await talk(world, "hi", "one", retried("more"))
    assert world.next_states() == {1: NextState("user", "more"), 2: None, 3: None}
    assert world.column("request_kind") == ["user turn", "user turn", "retry"]
    assert [turn.request_text for turn in world.turns()] == ["hi", "more", "more"]
    await talk(world, "hi", "one", "more", "two", "ok")
    assert world.next_states()[3] == NextState("user", "ok")
    assert world.next_states()[2] is None
    assert world.woken == ["judge", "judge"]


async def test_a_re_ask_is_no_next_state_and_its_tools_are_followed(world: World) -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    world.say("", call, "done", "bye")
    await talk(world, "look")
    message = await talk(world, "look", user(NUDGE))
    call_id = message["tool_calls"][0]["id"]
    replied = assistant("", (call_id, "read", '{"path":"x"}'))
    loop = (replied, tool(call_id, "BANANA"))
    await talk(world, "look", user(NUDGE), *loop)
    await talk(world, "look", *loop, "done", "thanks")
    assert world.column("request_kind") == ["user turn", "re-ask", "tool loop", "user turn"]
    assert world.next_states() == {
        1: None,
        2: NextState("tool", "[result 1 of 1, read]\nBANANA"),
        3: NextState("user", "thanks"),
        4: None,
    }


async def test_a_side_call_is_filed_with_the_turn_of_its_trace(world: World) -> None:
    await talk(world, "hi", **TRACE)
    child = runtime("agent:main:subagent:6c", "child")
    await world.reply(openclaw("[Subagent Context] Do it.", line=child), **TRACE)
    flushing = runtime("agent:main:internal-session-effects:1", "internal-1")
    flush = user("Pre-compaction memory flush.")
    await world.reply(
        openclaw("hi", assistant("fine"), flush, line=flushing, tools=tools("read", "write")),
        **TRACE,
    )
    await world.reply(SUMMARISE, **TRACE)
    other = TRACE["traceparent"].replace("249", "777")
    await world.reply(openclaw("x", line=flushing), traceparent=other)
    main, child_session, *filed, stranger = (turn.session_id for turn in world.turns())
    assert filed == [main, main]
    assert len({main, child_session, stranger}) == 3
    assert world.column("kind") == ["main", *["side"] * 4]
    assert set(world.column("trace")) == {TRACE["traceparent"][3:35], other[3:35]}


async def test_a_compaction_is_filed_with_the_turn_that_it_was_made_for(world: World) -> None:
    await talk(world, "hi", "fine", HEARTBEAT)
    await asyncio.gather(*(world.reply(SUMMARISE, **TRACE) for _ in range(2)))
    other = TRACE["traceparent"].replace("249", "777")
    await world.reply(SUMMARISE, traceparent=other)
    await world.reply(utility("Write an Activity recap", "x"))
    assert len({turn.session_id for turn in world.turns()[1:]}) == 1
    await talk(world, "A summary.", user("go on"), **TRACE)
    heartbeat, *filed, stranger, recap, turn = world.turns()
    assert {one.session_id for one in (heartbeat, *filed)} == {turn.session_id}
    assert len({one.index for one in (heartbeat, *filed)}) == 3
    assert stranger.session_id == recap.session_id != turn.session_id


BIG = "".join(f"{n}\n" for n in range(3000))
CUT = f"{BIG[:8000]}\n[... 5,893 more characters truncated; rerun with narrower args if needed]"
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "seq"}}\n</tool_call>'


async def call_of(world: World, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Assistant message with a tool call, as the client sends it back."""
    (call,) = (await world.reply(body, **headers))["tool_calls"]
    return assistant("", (call["id"], "exec", '{"command":"seq"}'))


@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart"])
@pytest.mark.parametrize("later", [CUT, "", None], ids=["shortened", "emptied", "dropped"])
async def test_the_answer_to_a_large_tool_result_finds_its_turn_however_it_comes_back(
    tmp_path: Path, renderer: Renderer, later: str | None, *, restarted: bool
) -> None:
    async with gateway(tmp_path, renderer, context_tokens=100_000) as world:
        world.say(CALL, "It counts.", "Good.", "Bye.")
        called = await call_of(world, openclaw("count"))
        call_id = called["tool_calls"][0]["id"]
        await talk(world, "count", called, tool(call_id, BIG))
        if not restarted:
            await go_on(world, called, later)
    if restarted:
        async with gateway(tmp_path, renderer, context_tokens=100_000) as world:
            world.say("Good.", "Bye.")
            await go_on(world, called, later)


async def go_on(world: World, called: dict[str, Any], later: str | None) -> None:
    cut = [] if later is None else [tool(called["tool_calls"][0]["id"], later)]
    thanks = (assistant("It counts."), user("Thanks, perfect."))
    await talk(world, "count", called, *cut, *thanks)
    assert world.next_states()[2] == NextState("user", "Thanks, perfect.")
    await talk(world, "count", called, *cut, *thanks, assistant("Good."), user("bye"))
    assert world.next_states()[3] == NextState("user", "bye")
    assert set(world.column("lost")) == {None}


@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart"])
@pytest.mark.parametrize(
    ("results", "later"),
    [(("works" * 9000, "fails" * 9000), "works... cut"), (("same", "same"), "same")],
    ids=["two results", "one result"],
)
async def test_of_two_branches_with_the_same_words_the_one_with_the_call_is_meant(
    tmp_path: Path, renderer: Renderer, results: tuple[str, str], later: str, *, restarted: bool
) -> None:
    async def go_on(world: World) -> None:
        first = (branches[0], tool(branches[0]["tool_calls"][0]["id"], later))
        await talk(world, "count", *first, assistant("Done."), user("thanks"))
        states = world.next_states()
        assert (states[2], states[4]) == (NextState("user", "thanks"), None)

    async with gateway(tmp_path, renderer, context_tokens=100_000) as world:
        world.say(CALL, "Done.", CALL, "Done.", "Fine.")
        branches = list[dict[str, Any]]()
        for result in results:
            branches.append(await call_of(world, openclaw("count")))
            call_id = branches[-1]["tool_calls"][0]["id"]
            await talk(world, "count", branches[-1], tool(call_id, result))
        if not restarted:
            await go_on(world)
    if restarted:
        async with gateway(tmp_path, renderer, context_tokens=100_000) as world:
            await go_on(world)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart"])
@pytest.mark.parametrize("affinity", [False, True], ids=["", "named in a header"])
async def test_a_compaction_keeps_the_session_and_the_reply_that_it_leaves_gets_its_answer(
    tmp_path: Path, renderer: Renderer, *, affinity: bool, restarted: bool
) -> None:
    before, after = ({"session_id": f"s:{n}"} if affinity else {} for n in (0, 1))
    new = (assistant("two"), user("and then?"))
    async with gateway(tmp_path, renderer) as world:
        world.say("one", "two", "a summary", "three", "four")
        await talk(world, "hi", **before)
        await talk(world, "hi", "one", "more", **before)
        await world.reply(SUMMARISE, **TRACE, **({"session_id": "s"} if affinity else {}))
        if not restarted:
            await world.reply(compacted(*new), **after)
    async with gateway(tmp_path, renderer) as world:
        if restarted:
            await world.reply(compacted(*new), **after)
        assert world.next_states() == {
            1: NextState("user", "more"),
            2: NextState("user", "and then?"),
            3: None,
            4: None,
        }
        first, second, _, third = world.turns()
        assert first.session_id == second.session_id == third.session_id
        assert set(world.column("lost")) == {None}
        # A compacted conversation continues like any other.
        await world.reply(compacted(*new, assistant(third.reply_text), user("bye")), **after)
        assert world.next_states()[4] == NextState("user", "bye")


async def test_a_summary_in_the_place_of_a_reply_keeps_the_session(world: World) -> None:
    """Hermes sums up between the first messages and the last, so that roles alternate."""
    texts = ["hi", "one", "more", "two", "and then?", "three", "no, four"]
    summary = "[CONTEXT COMPACTION — REFERENCE ONLY] Earlier turns were compacted. More: two."
    hermes = {"role": "system", "content": "You are Hermes Agent.\nYou are a CLI AI Agent."}

    async def send(*words: str) -> None:
        roles = (user, assistant)
        messages = [roles[at % 2](text) for at, text in enumerate(words)]
        await world.reply({"messages": [hermes, *messages]})

    world.say(*texts[1::2], "four", "five")
    for end in (1, 3, 5):
        await send(*texts[:end])
    left = [*texts[:1], summary, *texts[4:]]
    await send(*left)
    await send(*left, "four", "thanks")
    states = world.next_states()
    assert [state and state.text for state in states.values()] == [
        "more",
        "and then?",
        "no, four",
        "thanks",
        None,
    ]
    assert len({turn.session_id for turn in world.turns()}) == 1
    assert set(world.column("lost")) == {None}
    # Where it leaves nothing of a reply, the words behind it answer the last one.
    await send(*left[:1], summary, "and now?")
    assert world.next_states()[5] == NextState("user", "and now?")


async def test_what_a_compaction_leaves_must_be_the_end_of_the_last_turn(world: World) -> None:
    world.say("Yes.", "Yes.", "Fine.", "Tea!", "Tea!", "Fine.")
    await talk(world, "one?")
    await talk(world, "one?", "Yes.", "two?")
    # The same reply twice: the last one is meant.
    await world.reply(compacted(assistant("Yes."), user("thanks")))
    assert world.next_states()[2] == NextState("user", "thanks")
    # A question before it that it does not answer; then one of another session.
    await world.reply(compacted(user("three?"), assistant("Fine."), user("so?")))
    stranger = runtime("agent:main:explicit:t", "t").strip()
    body = compacted(assistant("Fine."), user("so?"))
    body["messages"][1]["content"][1]["text"] = stranger
    await world.reply(body)
    assert world.next_states()[3] is None
    assert world.column("lost") == [None, None, None, 1, None]


async def test_what_a_side_call_said_is_not_taken_for_the_reply_of_the_last_turn(
    world: World,
) -> None:
    world.say("Fine.", "Fine.", "ok")
    await talk(world, "hi")
    await talk(world, "hi", "Fine.", HEARTBEAT)
    await world.reply(compacted(assistant("Fine."), user("stop that")))
    assert world.next_states()[1] is None
    assert set(world.column("lost")) == {None}


async def test_answers_that_find_no_turn_are_counted(world: World) -> None:
    await talk(world, "hi")
    await talk(world, "hello", "fine", "edited")
    await talk(world, "hi", "Fine!", "unknown")
    await talk(world, "hi", "Fine!", "unknown")  # asked again
    await world.reply(compacted(user("compacted"), assistant("no"), user("so?")))
    await talk(world, "a new beginning")
    lost = [None, 1, 1, None, 1, None]
    assert world.column("lost") == lost
    assert [seen["lost"] or None for seen in world.observer.seen] == lost
    assert set(world.next_states().values()) == {None}
    # Where nobody waits for an answer none is lost.
    sql(world.ledger).write("UPDATE turns SET state = 'refused', reason = 'test'")
    await talk(world, "hi", "Fine!", "unknown")
    assert world.column("lost")[-1] is None


async def test_a_correction_behind_a_queue_reaches_the_reply_to_it(
    world: World, renderer: Renderer
) -> None:
    """OpenClaw shows a message without an answer before the next one, and later not at all."""
    world.say("one", "cut", "two", "three")
    await talk(world, "hi")
    old, new = "Tell me.", "No, shorter.\n\nIn German."
    await talk(world, "hi", "one", old)
    await talk(world, "hi", "one", f"{QUEUED}{old}\n\n{new}")
    assert world.turns()[-1].request_text == new
    assert world.column("asked_by")[-1] == "unknown", "nobody can say where it begins"
    assert "Tell me." in renderer.decode(world.sampler.prompts[-1]), "the model reads it"
    await talk(world, "hi", "one", new, "two", "thanks")
    states = list(world.next_states().values())
    assert states == [NextState("user", old), None, NextState("user", "thanks"), None]


async def test_a_session_made_private_leaves_nothing_through_compactions_and_restarts(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Nothing but the Runtime line names the session, and the command is long summarised."""
    flush = compacted(user("Pre-compaction memory flush."), tools=tools("read", "write"))
    about = runtime("agent:main:internal-session-effects:1", "internal-session-effects-1")
    flush["messages"][1]["content"][1]["text"] = about.strip()
    subagent = openclaw(f"[Subagent Context] {MARK}", line=runtime("agent:main:subagent:6c", "6c"))
    recaps = [
        utility("Write an Activity recap", MARK),
        utility("Generate a concise session title", MARK),
    ]
    for calls in (
        [openclaw("hi", assistant("fine"), user("/private"))],
        [SUMMARISE, flush],
        [compacted(assistant("fine"), user(MARK)), subagent],
        recaps,
        [SUMMARISE, flush],
        [compacted(assistant(MARK), user(MARK))],
    ):
        async with gateway(tmp_path, renderer) as world:
            if not world.turns():
                await talk(world, "hi")
            for body in calls:
                await world.reply(body, **({} if body in recaps else TRACE))
            assert nothing_of(MARK, world)
            assert [turn.request_text for turn in world.turns()] == ["hi"]
            assert world.next_states() == {1: None}
            assert {s["kind"] for s in world.observer.seen} <= {"main", "private"}


async def test_compaction_of_a_private_session_in_the_control_ui_leaves_nothing(
    world: World,
) -> None:
    """Its calls name the session by a hash of its key, and a compaction has no Runtime line."""
    surface = TRACE | {"session_id": "openclaw-webchat-0c1f"}
    await talk(world, "/private", **surface)
    await world.reply(SUMMARISE, **surface | {"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"})
    assert nothing_of(MARK, world)
    assert world.turns() == []
