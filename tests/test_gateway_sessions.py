"""Conversations over HTTP: which turn gets which next state, and how the next prompt begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.agents import VOLATILE, assistant, openclaw, tool, user, utility
from tests.fakes import Script
from tests.gateways import chat, gateway, spell
from tinker_claw.render import Renderer
from tinker_claw.types import NextState


async def test_a_user_reply_becomes_the_next_state_of_the_turn_before(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("Four.")
        await world.reply(openclaw("2+2?"))
        assert world.woken == []
        await world.reply(openclaw("2+2?", assistant("Four."), user("just the digit")))
        assert world.next_states() == {1: NextState("user", "just the digit"), 2: None}
        assert world.woken == ["judge"]
        first, second = world.turns()
        assert (first.session_id, first.index) == (second.session_id, second.index - 1)
        assert (first.request_text, first.reply_text) == ("2+2?", "Four.")
        assert second.request_text == "just the digit"
        # The hint goes behind the user's words, not behind OpenClaw's volatile message.
        assert second.hint_at is not None
        assert renderer.decode(second.prompt[: second.hint_at]).endswith("just the digit")
        assert "INTERNAL_CONTEXT" in renderer.decode(second.prompt[second.hint_at :])


async def test_parallel_tool_results_are_one_next_state(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(
            'On it.\n<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
        )
        message = await world.reply(openclaw("look"))
        ids = [call["id"] for call in message["tool_calls"]]
        replied = assistant(
            "On it.", (ids[0], "read", '{"path":"x"}'), (ids[1], "exec", '{"command":"ls"}')
        )
        results = (tool(ids[0], "BANANA"), tool(ids[1], "exit 1"))
        await world.reply(openclaw("look", replied, *results))
        assert world.next_states()[1] == NextState(
            "tool", "[result 1 of 2, read]\nBANANA\n\n[result 2 of 2, exec]\nexit 1"
        )


async def test_side_calls_neither_judge_nor_are_judged(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.reply(openclaw("hi"))
        heartbeat = user("Follow the heartbeat monitor scratch context when provided.")
        await world.reply(openclaw("hi", assistant("fine"), heartbeat))
        await world.reply(utility("Write an Activity recap for", "user: hi"))
        assert world.next_states() == {1: None, 2: None, 3: None}
        assert world.woken == []
        assert world.column("kind") == ["main", "side", "side"]
        main, *side = world.column("untrained_because")
        assert main is None
        assert all(reason.startswith("side turn: OpenClaw's") for reason in side)
        assert [params.student_topk for params in world.sampler.params] == [2, 0, 0]
        # The user's answer still finds the main turn.
        await world.reply(openclaw("hi", assistant("fine"), user("great")))
        assert world.next_states()[1] == NextState("user", "great")


async def test_a_retried_request_is_no_next_state(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("one", "two", "three")
        await world.reply(openclaw("hi"))
        await world.reply(openclaw("hi"))
        assert world.next_states() == {1: None, 2: None}
        # The client went on from the second answer.
        await world.reply(openclaw("hi", assistant("two"), user("ok")))
        assert world.next_states() == {1: None, 2: NextState("user", "ok"), 3: None}
        # Asking the same again changes nothing.
        await world.reply(openclaw("hi", assistant("two"), user("ok")))
        assert world.next_states()[2] == NextState("user", "ok")
        assert world.woken == ["judge"]


async def test_a_restart_goes_on_with_the_session(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.reply(openclaw("hi"))
    async with gateway(tmp_path, renderer) as world:
        await world.reply(openclaw("hi", assistant("fine"), user("thanks")))
        assert world.next_states() == {1: NextState("user", "thanks"), 2: None}
        assert [turn.index for turn in world.turns()] == [0, 1]


async def test_sessions_that_overlap_do_not_mix(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
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
        await world.reply({"messages": chat("hi", texts[0], "first")}, **one)
        await world.reply({"messages": chat("hi", texts[2], "third")}, **one)
        await world.reply({"messages": chat("hi", texts[0], "not here")}, **two)
        by_reply = {t.reply_text: world.ledger.turns.next_state(t.id) for t in world.turns()[:3]}
        assert by_reply == {
            texts[0]: NextState("user", "first"),
            texts[1]: None,
            texts[2]: NextState("user", "third"),
        }


async def test_a_client_without_a_session_is_followed_by_its_history(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("one", "two", "three")
        await world.ask("hi")
        await world.ask("hello")
        await world.ask("hi", "one", "and you?")
        assert world.next_states() == {1: NextState("user", "and you?"), 2: None, 3: None}
        first, other, third = world.turns()
        assert first.session_id == third.session_id != other.session_id


async def test_a_word_after_the_end_of_a_session_still_counts(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.reply({"messages": chat("hi")}, **{"X-Session-Done": "true"})
        await world.reply({"messages": chat("hi", "fine", "thanks")})
        assert world.next_states()[1] == NextState("user", "thanks")


async def test_a_request_of_nothing_but_a_volatile_message(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        session = {"X-Session-Id": "s"}
        await world.reply({"messages": [VOLATILE]}, **session)
        await world.reply({"messages": [assistant("fine"), user("so?")]}, **session)
    async with gateway(tmp_path, renderer) as world:
        await world.reply({"messages": [assistant("no"), user("so?")]}, **session)
        assert world.next_states() == {1: NextState("user", "so?"), 2: None, 3: None}
