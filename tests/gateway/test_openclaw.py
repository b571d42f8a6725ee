"""Stock OpenClaw from npm, with nothing but a provider block, against the gateway it would meet."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from examples.day.npm import npm
from examples.day.openclaw import Gateway, readme_block
from tests.gateway.test_session_privacy import MARK, nothing_of
from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import World, gateway, spell
from tests.support.ledger import read, sql
from tests.support.lives import product
from tests.support.real_openclaw import LocalOpenClaw
from tests.support.waits import eventually
from tinker_claw.app.server import in_background
from tinker_claw.cli.openclaw import TRIED
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import RequestKind
from tinker_claw.turn_state import Reason
from tinker_claw.types import Kind, NextState, SamplingParams, Tokens, Turn

pytestmark = [
    pytest.mark.openclaw,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run"),
]

MESSAGES = ("Hello, who are you?", "What is 3 + 4?", "Thanks, that is great.")
SLOW_S = 62
"""Seconds to the first token. The agent gives up earlier, unless it gets keep-alives."""
GIVES_UP_S = 30


@pytest.mark.parametrize("release", TRIED)
def test_three_turns_land_in_the_ledger_of_the_running_product(
    tmp_path: Path, release: str
) -> None:
    data = tmp_path / "data"
    with product(data) as running:
        claw = LocalOpenClaw.create(tmp_path / "user", running.url, "demo", release=release)
        for message in MESSAGES:
            assert claw.say("first", message)
        assert running.health()["policy_version"] == 0
        assert running.stop() == 0

    main = read(data, "SELECT * FROM turns WHERE kind = 'main' ORDER BY id")
    assert len({turn["session_id"] for turn in main}) == 1
    assert [turn["idx"] for turn in main] == list(range(len(main)))
    said = [turn["request_text"] for turn in main]
    assert [text for text in dict.fromkeys(said) if text in MESSAGES] == list(MESSAGES)
    assert said[0] == MESSAGES[0], "timestamp and Runtime line are not the user's words"

    answered = {row["turn_id"]: row for row in read(data, "SELECT * FROM next_states")}
    # OpenClaw asks again after an empty reply.
    replied = [turn for turn in main if turn["reply_text"]]
    assert all(turn["id"] in answered for turn in replied[:-1])
    assert answered[replied[-2]["id"]]["text"] == MESSAGES[2]
    assert replied[-1]["id"] not in answered

    opening, following = main[0], main[1]
    assert opening["prompt_tokens"] > 5_000, "OpenClaw's own system prompt and tools"
    assert following["cached_tokens"] > 0.8 * opening["prompt_tokens"], "the prefix is reused"
    assert all(turn["kind_reason"] for turn in main)


MACHINERY = "BEGIN_OPENCLAW_INTERNAL_CONTEXT", "[System message]"
"""Marks of messages that the prompt shows as the user's, and no user has written."""


class Listener(FakeSampler):
    """A model that answers by the first saying found in the last message. Each saying has its
    scripts, the last of which is for ever."""

    def __init__(self, renderer: Renderer, answers: dict[str, list[Script | Tokens]]) -> None:
        super().__init__((0,))
        self._renderer = renderer
        self._scripts_of = {
            saying: [s if isinstance(s, Script) else Script(tuple(s)) for s in scripts]
            for saying, scripts in answers.items()
        }
        self.heard: list[str] = []
        """Last message of every prompt."""

    def _take(self, prompt: Tokens, params: SamplingParams) -> Script:
        said = [
            part
            for part in self._renderer.decode(prompt).split("<|im_start|>")
            if part.startswith("user\n") and not any(mark in part for mark in MACHINERY)
        ][-1]
        self.heard.append(said)
        self.prompts.append(tuple(prompt))
        self.params.append(params)
        scripts = next(s for saying, s in self._scripts_of.items() if saying in said)
        return scripts.pop(0) if len(scripts) > 1 else scripts[0]


TALK = "Hello, who are you?", "Please read notes.txt for me.", "Thanks, that is great."
NOTE = "The number in the note is forty-two."
TROUBLE = "Tell me about bees.", "And about wasps?"
WAIT = "Take your time with this one."


def answers(renderer: Renderer) -> dict[str, list[Script | Tokens]]:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "notes.txt"}}\n</tool_call>'
    bees = spell(renderer, "Bees dance in the dark.")
    return {
        TALK[0]: [spell(renderer, "I am Claw.")],
        TALK[1]: [spell(renderer, f"I will look.\n{call}")],
        f"<tool_response>\n{NOTE}": [spell(renderer, "It says forty-two.")],
        TALK[2]: [spell(renderer, "You are welcome.")],
        WAIT: [Script(spell(renderer, "Here it is."), first_after_s=SLOW_S)],
        TROUBLE[0]: [
            *[Script(bees, away_after=0)] * 3,
            Script(bees, fail_after=0),
            Script(bees, fail_after=3),
            bees[3:],
        ],
        TROUBLE[1]: [spell(renderer, "Wasps do not.")],
    }


async def test_agent_hears_of_no_trouble_and_no_session_of_another(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Three users at once: one with a tool, one whose model is slow, one whose model breaks."""
    sampler = Listener(renderer, answers(renderer))

    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        heard = await asyncio.gather(
            converse(world, tmp_path / "talk", *TALK),
            converse(world, tmp_path / "wait", WAIT),
            converse(world, tmp_path / "trouble", *TROUBLE),
        )
        assert heard == [
            ["I am Claw.", "It says forty-two.", "You are welcome."],
            ["Here it is."],
            ["Bees dance in the dark.", "Wasps do not."],
        ]
        sessions = {
            row["key"]: row["id"] for row in sql(world.ledger).rows("SELECT id, key FROM sessions")
        }
        assert set(sessions) == {"talk", "wait", "trouble"}
        talk, wait, trouble = (story(world, sessions[n]) for n in ("talk", "wait", "trouble"))
        assert [turn.request_text for turn, _ in talk] == [TALK[0], TALK[1], TALK[1], TALK[2]]
        assert [state and state.role for _, state in talk] == ["user", "tool", "user", None]
        assert [state and state.text.splitlines()[-1] for _, state in talk] == [
            TALK[1],
            NOTE,
            TALK[2],
            None,
        ]
        assert talk[2][0].reply_text == "It says forty-two."
        assert [(t.request_text, t.reply_text) for t, _ in wait] == [(WAIT, "Here it is.")]
        assert [state and state.text for _, state in trouble] == [TROUBLE[1], None]
        assert trouble[0][0].reply_text == "Bees dance in the dark."
        assert len([text for text in sampler.heard if TROUBLE[0] in text]) == 6
        rewritten = [t for t in map(renderer.decode, sampler.prompts) if "[Queued user me" in t]
        assert rewritten == [], "OpenClaw has never tried anything again"
        did = dict(zip([t.id for t in world.turns()], called(world), strict=True))
        assert [did[t.id][0] for t, _ in talk] == [
            RequestKind.USER,
            RequestKind.USER,
            RequestKind.TOOL,
            RequestKind.USER,
        ]
        traces = [did[t.id][1] for t, _ in talk]
        assert traces[1] == traces[2], "one run of the agent: the tool and what it said of it"
        assert len(set(traces)) == 3
        assert {did[t.id][0] for t, _ in wait + trouble} == {RequestKind.USER}
        assert set(world.column("kind")) == {"main"}
        assert set(world.column("reason")) == {None}


SMALL = 32768
"""Tokens of a context that holds two long messages, but not three."""
COMPACTION = {"<conversation>": "## Goal\nLists of words.", "memory flush": "NO_REPLY"}
"""OpenClaw's request for a compaction, and the answer to it."""


def long(message: str) -> str:
    return f"{message} {'alpha bravo charlie delta echo foxtrot golf hotel india juliett ' * 165}"


def scripted(renderer: Renderer, answers: dict[str, str]) -> Listener:
    spelled = {saying: spell(renderer, answer) for saying, answer in answers.items()}
    return Listener(renderer, {saying: [tokens] for saying, tokens in spelled.items()})


@pytest.mark.parametrize("affinity", [False, True], ids=["unnamed", "named"])
async def test_compactions_lose_neither_the_session_nor_a_turn(
    tmp_path: Path, renderer: Renderer, *, affinity: bool
) -> None:
    messages = [long("One."), long("Two."), long("Three."), "Thanks, perfect."]
    heard = ["first", "second", "third", "bye"]
    said = {m.split(maxsplit=1)[0]: answer for m, answer in zip(messages, heard, strict=True)}
    sampler = scripted(renderer, COMPACTION | said)
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        home = tmp_path / "talk"
        entry = named(affinity=affinity) | {"contextWindow": SMALL}
        assert await converse(world, home, *messages, **entry) == heard
        assert spoken(world) == in_order(messages), "before a compaction, too"
        assert RequestKind.COMPACTION in world.column("request_kind")


async def test_large_tool_result_keeps_its_turn_its_answer(
    tmp_path: Path, renderer: Renderer
) -> None:
    call = {"name": "exec", "arguments": {"command": "seq 1 30000"}}
    said = {
        "Count": f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
        "<tool_response>": "It has counted.",
        "Thanks": "Any time.",
        "Bye": "Bye.",
    }
    sampler = scripted(renderer, said)
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        messages = ("Count to thirty thousand.", "Thanks, perfect.", "Bye now.")
        heard = await converse(world, tmp_path / "talk", *messages, gives_up_s=300)
        assert heard == ["It has counted.", "Any time.", "Bye."]
        (_, result), *rest = spoken(world)
        assert len(result or "") > 10_000
        assert rest == in_order(messages)
        seen, again = (
            prompt.split("<tool_response>")[1].split("</tool_response>")[0]
            for prompt in map(renderer.decode, sampler.prompts[1:3])
        )
        assert seen != again, "OpenClaw has cut it another time"


async def test_a_message_in_the_frame_of_a_queue_is_answered_and_unclear(
    tmp_path: Path, renderer: Renderer
) -> None:
    """OpenClaw puts a message that was interrupted at a terminal before the next one."""
    old, new = "Tell me of bees.", "No, of wasps.\n\nIn German."
    slow = Script(spell(renderer, "Bees dance in the dark."), holds_after=3)
    sampler = Listener(
        renderer,
        {
            "wasps": [spell(renderer, "Wespen tanzen nicht.")],
            "bees": [slow],
            "Hello": [spell(renderer, "Hi.")],
            "Thanks": [spell(renderer, "Bye.")],
        },
    )
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        claw = LocalOpenClaw.create(tmp_path / "talk", world.url, "demo")
        assert await asyncio.to_thread(claw.say, "talk", "Hello.") == "Hi."
        process = claw.begin("talk", old)
        try:
            await sampler.holding.wait()
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.communicate, timeout=300)
        finally:
            process.kill()
        assert process.returncode != 0
        assert await asyncio.to_thread(claw.say, "talk", new) == "Wespen tanzen nicht."
        assert await asyncio.to_thread(claw.say, "talk", "Thanks.") == "Bye."
        framed = renderer.decode(sampler.prompts[2])
        assert "[Queued user message" in framed
        assert old in framed, "the model reads both"
        assert world.column("asked_by") == ["owner", "owner", "unknown", "owner"]
        states = list(world.next_states().values())
        assert states == [NextState("user", old), None, NextState("user", "Thanks."), None]
        assert world.column("reason")[1] == Reason.HUNG_UP


WEBCHAT = {
    "<conversation>": "## Goal\nAnts.",
    "Hello": "Hi.",
    "of ants": "Ants walk and walk.",
    "No, shorter": "Ants walk.",
    "Thanks, three": "One, two, three.",
    "Run it": '<tool_call>\n{"name": "exec", "arguments": {"command": "sleep 3; echo 42", '
    '"background": true}}\n</tool_call>',
    "<tool_response>": "It runs.",
    "An async command": "NO_REPLY",
    "Wait for it": "I do.",
    "Bye": "Bye.",
}
"""Answers by what the message says."""


class WebChat:
    """A person in OpenClaw's web chat, who writes once the answer before is there."""

    session = "agent:main:main"

    def __init__(self, claw: Gateway, sampler: Listener) -> None:
        self._claw = claw
        self._heard = sampler.heard

    async def send(self, message: str) -> str:
        run = str(uuid.uuid4())
        sent = {"sessionKey": self.session, "message": message, "idempotencyKey": run}
        await self._claw.call("chat.send", **sent)
        return run

    async def say(self, message: str) -> None:
        """Send a message and wait for the end of the run that it begins."""
        run = await self.send(message)
        await self.until(message)
        await self._claw.call("agent.wait", runId=run, timeoutMs=60_000)

    async def until(self, words: str) -> None:
        """Wait until the model hears these words."""
        await eventually(lambda: any(words in heard for heard in self._heard), 300)

    async def abort(self) -> None:
        await self._claw.call("chat.abort", sessionKey=self.session)


async def test_corrections_in_the_web_chat_reach_the_reply_before(
    tmp_path: Path, renderer: Renderer
) -> None:
    """A stopped message, `/compact`, `/new` and the end of a command stand later in one message
    with the words behind them."""
    answers: dict[str, list[Script | Tokens]] = {
        saying: [spell(renderer, answer)] for saying, answer in WEBCHAT.items()
    }
    answers["wasps"] = [Script(spell(renderer, "Wasps sting and sting."), holds_after=3)]
    sampler = Listener(renderer, answers)
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        openclaw = LocalOpenClaw.create(tmp_path / "user", world.url, "demo")
        async with openclaw.gateway() as claw:
            chat = WebChat(claw, sampler)
            await chat.say("Hello.")
            await chat.send("Tell me of wasps.")
            await sampler.holding.wait()
            await chat.abort()
            await chat.say("Tell me of ants.")
            await chat.say("No, shorter.")
            await chat.send("/compact")
            await chat.until("<conversation>")
            await chat.say("Thanks, three.")
            await chat.say("Run it.")
            await chat.until("An async command")
            await chat.say("Wait for it.")
            await chat.send("/new")
            await chat.say("Bye.")
        talk = spoken(world)
        assert [pair for pair in talk if pair[0] != "Run it."] == [
            ("Hello.", "Tell me of wasps."),
            ("Tell me of wasps.", None),
            ("Tell me of ants.", "No, shorter."),
            ("No, shorter.", "/compact\n\nThanks, three."),
            ("Thanks, three.", "Run it."),
            ("Wait for it.", "/new\n\nBye."),
            ("Bye.", None),
        ]
        assert talk[6] == ("Run it.", "Wait for it."), "behind the end of the command"


async def test_private_session_stays_private_through_compactions(
    tmp_path: Path, renderer: Renderer, capfd: pytest.CaptureFixture[str]
) -> None:
    private = [long(f"{MARK} {number}.") for number in ("one", "two", "three")]
    messages = [long("Hello."), "/private", *private]
    said = dict.fromkeys(("Hello", "/private", MARK), "fine")
    sampler = scripted(renderer, COMPACTION | said)
    data = tmp_path / "data"
    async with gateway(data, renderer, sampler, context_tokens=65536) as world:
        home = tmp_path / "talk"
        await converse(world, home, *messages, contextWindow=SMALL, **named(affinity=False))
        summaries = [said for said in sampler.heard if "<conversation>" in said]
        assert len(summaries) >= 2
        assert any("/private" not in said for said in summaries), "it was summarised long ago"
        assert all(MARK in said for said in summaries)
        assert [turn.request_text for turn in world.turns()] == [messages[0].strip()]
        assert world.next_states() == {1: None}
        assert nothing_of(MARK, world)
    assert MARK not in "".join(capfd.readouterr())


async def test_thumbs_and_commands_judge_the_reply_before(
    tmp_path: Path, renderer: Renderer
) -> None:
    """OpenClaw passes on what it does not know as a command: a user needs no plug-in."""
    said = {
        "bees": ("Tell me of bees.", "Bees dance."),
        "thumb": ("\N{THUMBS UP SIGN}\U0001f3fd", "Glad to hear it."),
        "wasps": ("And of wasps?", "Wasps, too, as far as anybody has seen."),
        "bad": ("/bad too long, please", "Wasps do not."),
        "good": ("/good", "Good."),
        "bye": ("Thanks, bye.", "Bye."),
    }
    sampler = scripted(renderer, dict(said.values()))
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        heard = await converse(world, tmp_path / "talk", *(words for words, _ in said.values()))
        assert heard == [answer for _, answer in said.values()], "the agent answers as ever"
        turn = dict(zip(said, [turn.id for turn in world.turns()], strict=True))
        verdicts = {name: world.ledger.judgements.verdict(turn[name]) for name in said}
        assert {name: v.score for name, v in verdicts.items() if v is not None} == {
            **{"bees": 1.0, "wasps": -1.0, "bad": 1.0},
        }
        assert world.ledger.judgements.hints(turn["wasps"]) == ("too long, please",)
        calls = dict(zip(said, world.column("request_kind"), strict=True))
        bare = {name for name, call in calls.items() if call == RequestKind.VERDICT}
        assert bare == {"thumb", "good"}
        untrained = dict(zip(said, world.column("reason"), strict=True))
        assert {name for name, why in untrained.items() if why == Reason.RATING} == bare
        assert untrained["bad"] is None, "another try is a reply like any other"
        assert spoken(world)


@pytest.mark.parametrize("api", ["openai-responses", "anthropic-messages"])
async def test_agent_speaks_the_other_wires_too(
    tmp_path: Path, renderer: Renderer, api: str
) -> None:
    sampler = Listener(renderer, answers(renderer))
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        heard = await converse(world, tmp_path / "talk", *TALK, api=api)
        assert heard == ["I am Claw.", "It says forty-two.", "You are welcome."]
        first, (read, result), *rest = spoken(world)
        assert (first, read) == ((TALK[0], TALK[1]), TALK[1])
        assert NOTE in (result or "")
        assert rest == in_order(TALK[1:])
        assert world.column("reason") == [None] * 4


@asynccontextmanager
async def without_trace(url: str) -> AsyncGenerator[str]:
    """A proxy in front of a gateway, which passes on no header that it does not know."""
    async with httpx.AsyncClient(timeout=120) as http:

        async def passed_on(request: Request) -> Response:
            headers = {n: v for n, v in request.headers.items() if n not in ("traceparent", "host")}
            answer = await http.request(
                request.method,
                url.removesuffix("/v1") + request.url.path,
                content=await request.body(),
                headers=headers,
            )
            kind = answer.headers["content-type"]
            return Response(answer.content, answer.status_code, media_type=kind)

        app = FastAPI(routes=[Route("/{path:path}", passed_on, methods=["GET", "POST"])])
        async with in_background(app) as outside:
            yield outside


async def test_an_agent_without_tools_and_without_a_trace_talks_in_main_turns(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Small local models get no tools, and not every proxy passes traces on; what OpenClaw asks
    for beside the talk stays beside it."""
    said = {MESSAGES[0]: "I am Claw.", MESSAGES[1]: "It is seven.", MESSAGES[2]: "Gladly."}
    messages = [long(MESSAGES[0]), long(MESSAGES[1]), long("Three."), MESSAGES[2]]
    answers = COMPACTION | {"Three.": "third"} | said
    sampler = scripted(renderer, answers)
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        async with without_trace(world.url) as url:
            (entry,) = readme_block()["models"]["providers"]["tinker-claw"]["models"]
            entry = {"compat": entry["compat"] | {"supportsTools": False}, "contextWindow": SMALL}
            heard = await converse(world, tmp_path / "user", *messages, url=url, **entry)
        assert heard == ["I am Claw.", "It is seven.", "third", "Gladly."]
        assert set(world.column("trace")) == {None}
        assert spoken(world) == in_order(messages)
        assert RequestKind.COMPACTION in world.column("request_kind")


def named(*, affinity: bool) -> dict[str, Any]:
    """Field of a model's entry that says whether headers and body name the session."""
    fields = ("sendSessionAffinityHeaders", "supportsPromptCacheKey")
    return {"compat": dict.fromkeys(fields, affinity)}


async def converse(
    world: World,
    home: Path,
    *messages: str,
    api: str = "openai-completions",
    gives_up_s: int = GIVES_UP_S,
    **entry: Any,
) -> list[str]:
    """Let a user converse with their OpenClaw; the session is named like their folder."""
    url = world.url.removesuffix("/v1") if api == "anthropic-messages" else world.url
    provider = {"timeoutSeconds": gives_up_s, "baseUrl": entry.pop("url", url), "api": api}
    claw = LocalOpenClaw.create(home, url, "demo", provider=provider, **entry)
    (home / "workspace" / "notes.txt").write_text(NOTE)
    return [await asyncio.to_thread(claw.say, home.name, message) for message in messages]


def spoken(world: World) -> list[tuple[str, str | None]]:
    """Check that no answer was lost; return what main turns were asked, each with what followed."""
    main = [turn for turn in world.turns() if turn.kind is Kind.MAIN]
    assert len({turn.session_id for turn in main}) == 1
    assert set(world.column("lost")) == {None}
    states = [world.ledger.turns.next_state(turn.id) for turn in main]
    return [
        (turn.request_text, state and state.text) for turn, state in zip(main, states, strict=True)
    ]


def in_order(messages: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each message with the next."""
    texts = [message.strip() for message in messages]
    return [*zip(texts, [*texts[1:], None], strict=True)]


def called(world: World) -> list[tuple[str, str]]:
    """Kind and trace of every turn."""
    return list(zip(world.column("request_kind"), world.column("trace"), strict=True))


def story(world: World, session: int) -> list[tuple[Turn, NextState | None]]:
    return [
        (turn, world.ledger.turns.next_state(turn.id))
        for turn in world.turns()
        if turn.session_id == session
    ]
