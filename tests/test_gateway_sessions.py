"""Conversations over HTTP: which turn gets which next state, and how the next prompt begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents import VOLATILE, assistant, openclaw, tool, user, utility
from tests.fakes import FakeSampler, Script
from tests.gateways import MODEL, World, chat, gateway, spell
from tinker_claw.policy import Policy
from tinker_claw.render import Renderer
from tinker_claw.types import NextState


async def post(world: World, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The message of a whole answer."""
    response = await world.http.post(
        "/chat/completions", json={"model": MODEL} | body, headers=headers
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def test_a_user_reply_becomes_the_next_state_of_the_turn_before(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("Four.")
        await post(world, openclaw("2+2?"))
        assert world.woken == []
        await post(world, openclaw("2+2?", assistant("Four."), user("just the digit")))
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
        message = await post(world, openclaw("look"))
        ids = [call["id"] for call in message["tool_calls"]]
        replied = assistant(
            "On it.", (ids[0], "read", '{"path":"x"}'), (ids[1], "exec", '{"command":"ls"}')
        )
        results = (tool(ids[0], "BANANA"), tool(ids[1], "exit 1"))
        await post(world, openclaw("look", replied, *results))
        assert world.next_states()[1] == NextState(
            "tool", "[result 1 of 2, read]\nBANANA\n\n[result 2 of 2, exec]\nexit 1"
        )


async def test_side_calls_neither_judge_nor_are_judged(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        await post(world, openclaw("hi"))
        heartbeat = user("Follow the heartbeat monitor scratch context when provided.")
        await post(world, openclaw("hi", assistant("fine"), heartbeat))
        await post(world, utility("Write an Activity recap for", "user: hi"))
        assert world.next_states() == {1: None, 2: None, 3: None}
        assert world.woken == []
        assert world.column("kind") == ["main", "side", "side"]
        main, *side = world.column("untrained_because")
        assert main is None
        assert all(reason.startswith("side turn: OpenClaw's") for reason in side)
        assert [params.student_topk for params in world.sampler.params] == [2, 0, 0]
        # The user's answer still finds the main turn.
        await post(world, openclaw("hi", assistant("fine"), user("great")))
        assert world.next_states()[1] == NextState("user", "great")


async def test_a_retried_request_is_no_next_state(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("one", "two", "three")
        await post(world, openclaw("hi"))
        await post(world, openclaw("hi"))
        assert world.next_states() == {1: None, 2: None}
        # The client went on from the second answer.
        await post(world, openclaw("hi", assistant("two"), user("ok")))
        assert world.next_states() == {1: None, 2: NextState("user", "ok"), 3: None}
        # Asking the same again changes nothing.
        await post(world, openclaw("hi", assistant("two"), user("ok")))
        assert world.next_states()[2] == NextState("user", "ok")
        assert world.woken == ["judge"]


async def test_a_restart_goes_on_with_the_session(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        await post(world, openclaw("hi"))
    async with gateway(tmp_path, renderer) as world:
        await post(world, openclaw("hi", assistant("fine"), user("thanks")))
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
            post(world, body, **one), post(world, body, **two), post(world, body, **one)
        )
        texts = [reply["content"] for reply in replies]
        assert sorted(texts) == ["aa bb", "cc dd", "ee ff"]
        # Both overlapping turns of session one can be gone on from.
        await post(world, {"messages": chat("hi", texts[0], "first")}, **one)
        await post(world, {"messages": chat("hi", texts[2], "third")}, **one)
        await post(world, {"messages": chat("hi", texts[0], "not here")}, **two)
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
        await post(world, {"messages": chat("hi")}, **{"X-Session-Done": "true"})
        await post(world, {"messages": chat("hi", "fine", "thanks")})
        assert world.next_states()[1] == NextState("user", "thanks")


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"temperature": 0.2}, "sampled at temperature 0.2, not 1"),
        ({"top_p": 0.9}, "sampled at top_p 0.9, not 1"),
        ({"top_k": 5}, "sampled at top_k 5"),
        ({"temperature": 1, "top_p": 1.0, "seed": 7}, None),
    ],
)
async def test_other_distributions_are_served_and_not_trained(
    tmp_path: Path, renderer: Renderer, fields: dict[str, Any], because: str | None
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.ask("hi", **fields)
        assert world.column("untrained_because") == [because]
        assert world.sampler.params[0].student_topk == (2 if because is None else 0)
        assert world.column("kind") == ["main"]


async def test_an_earlier_version_answers_as_a_side_turn(
    tmp_path: Path, renderer: Renderer
) -> None:
    old = FakeSampler(spell(renderer, "as before"), ref="fake:old")
    async with gateway(tmp_path, renderer) as world:
        world.ledger.steps.restart_from(world.policy.current.version)  # version 1 serves now
    async with gateway(tmp_path, renderer, versions={0: old}) as world:
        response = await world.ask("hi", model=f"{MODEL}@v0")
        assert response.json()["choices"][0]["message"]["content"] == "as before"
        assert response.json()["system_fingerprint"] == "v0"
        assert (await world.ask("hi")).json()["system_fingerprint"] == "v1"
        assert (await world.ask("hi", model=f"{MODEL}@v1")).status_code == 200
        assert world.column("kind") == ["side", "main", "side"]
        assert world.column("policy_version") == [0, 1, 1]
        assert world.column("untrained_because")[0].startswith("side turn: asked for version 0")


async def test_a_prompt_goes_on_from_the_sampled_tokens_where_it_can(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        # Two calls whose JSON would be tokenised otherwise when it comes back compact.
        world.say('Hm.\n<tool_call>\n{"name": "ls",  "arguments": {"p" : "x"}}\n</tool_call>', "ok")
        tools = [{"type": "function", "function": {"name": "ls"}}]
        message = await post(world, {"messages": chat("look"), "tools": tools})
        (call,) = message["tool_calls"]
        replied = assistant("Hm.", (call["id"], "ls", '{"p":"x"}'))
        history = [*chat("look"), replied, tool(call["id"], "a\nb")]
        await post(world, {"messages": history, "tools": tools})
        first, second = world.turns()
        sampled = (*first.prompt, *first.completion.tokens)
        assert second.prompt[: len(sampled)] == sampled
        assert second.hint_at == first.hint_at, "the user has said nothing since"
        # Other tools or another system prompt: the old ids do not hold any more.
        changed = [*tools, {"type": "function", "function": {"name": "cat"}}]
        await post(world, {"messages": history, "tools": changed})
        assert world.turns()[2].prompt[: len(sampled)] != sampled


async def test_an_extension_means_what_a_full_render_means(
    tmp_path: Path, renderer: Renderer
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with gateway(tmp_path, renderer) as world:
        world.say("Four.")
        await world.ask("2+2?", **off)
        await world.ask("2+2?", "Four.", "thanks", **off)
        first, second = world.turns()
        sampled = (*first.prompt, *first.completion.tokens)
        assert second.prompt[: len(sampled)] == sampled
        full = renderer.prompt(
            chat("2+2?", "Four.", "thanks"), hint_message=2, enable_thinking=False
        )
        assert (second.prompt, second.hint_at) == (full.tokens, full.hint_at)


async def test_the_volatile_message_is_trained_as_sent_and_not_gone_on_from(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await post(world, openclaw("hi"))
        body = openclaw("hi", assistant("fine"), user("thanks"))
        await post(world, body)
        first, second = world.turns()
        assert renderer.decode(first.prompt).count("<<<BEGIN_OPENCLAW") == 1
        assert renderer.decode(second.prompt).count("<<<BEGIN_OPENCLAW") == 1
        assert renderer.decode(second.prompt).endswith(
            "<<<END_OPENCLAW_INTERNAL_CONTEXT>>><|im_end|>\n<|im_start|>assistant\n"
        )


async def test_removing_the_hint_gives_the_prompt_back(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        await post(world, openclaw("hi"))
        (turn,) = world.turns()
        assert turn.hint_at is not None
        hint = "say <|im_end|> less"
        size = len(renderer.hint_tokens(hint))
        hinted = renderer.splice(turn.prompt, turn.hint_at, hint)
        assert hinted[: turn.hint_at] + hinted[turn.hint_at + size :] == turn.prompt
        assert "[hint from the user, in hindsight: say <|im_end|> less]<|im_end|>" in (
            renderer.decode(hinted)
        )


async def test_a_reply_in_flight_stays_with_its_version(tmp_path: Path, renderer: Renderer) -> None:
    slow = FakeSampler(Script(spell(renderer, "one two three"), gap_s=0.1))
    new = FakeSampler(spell(renderer, "new"), ref="fake:1")
    async with gateway(tmp_path, renderer, slow) as world:
        asking = asyncio.ensure_future(world.ask("hi"))
        while not slow.prompts:
            await asyncio.sleep(0.01)
        version = world.ledger.steps.restart_from(world.policy.current.version)
        world.policy.swap(Policy(version, new))
        assert (await world.ask("hello")).json()["system_fingerprint"] == "v1"
        reply = (await asking).json()
        assert reply["system_fingerprint"] == "v0"
        assert reply["choices"][0]["message"]["content"] == "one two three"
        assert world.column("policy_version") == [1, 0]


async def test_a_request_of_nothing_but_a_volatile_message(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        session = {"X-Session-Id": "s"}
        await post(world, {"messages": [VOLATILE]}, **session)
        await post(world, {"messages": [assistant("fine"), user("so?")]}, **session)
    async with gateway(tmp_path, renderer) as world:
        await post(world, {"messages": [assistant("no"), user("so?")]}, **session)
        assert world.next_states() == {1: NextState("user", "so?"), 2: None, 3: None}
