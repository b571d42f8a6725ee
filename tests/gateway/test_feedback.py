"""Feedback over HTTP and by message: permissions, effects and refusals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.test_auth import bearer
from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import MODEL, World, chat, gateway, served, spell
from tests.support.ledger import judgeable, postpone, sample_counts, session_outcome, sql, tries
from tests.support.lives import ROOT
from tests.support.openclaw import TRACE, assistant, openclaw, user
from tinker_claw.errors import RequestError
from tinker_claw.gateway.feedback import FIELDS, MAX_BYTES, MAX_NAME, read
from tinker_claw.gateway.request import NOTHING_TO_RATE
from tinker_claw.ledger.feedback import LONGEST_TEXT
from tinker_claw.ledger.prune import from_turn, in_session
from tinker_claw.privacy.marker import Privacy
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import NextState, Verdict

UP, DOWN = "\N{THUMBS UP SIGN}\U0001f3fd", "\N{THUMBS DOWN SIGN}\ufe0f"
SECRET = "sk-ant-api03-" + "Zq7Xw2Lk9Pb4Rt6Vn8Mc1Hd3Jf5Gs0Ya" * 2 + "AA"


async def give(world: World, **body: Any) -> httpx.Response:
    headers = body.pop("headers", {})
    return await world.http.post("/feedback", json=body, headers=headers)


def said_of(world: World, turn: int) -> Verdict | None:
    return world.ledger.judgements.verdict(turn)


def rows(world: World) -> list[sqlite3.Row]:
    return sql(world.ledger).rows("SELECT * FROM feedback ORDER BY id")


# What it changes


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_is_judged_by_its_name_without_a_next_state(world: World, stream: bool) -> None:
    reply = (await world.events("hi"))[0] if stream else (await world.ask("hi")).json()
    answer = await give(world, response_id=reply["id"], score=-0.5, text=" say hello back ")
    assert answer.status_code == 200
    assert answer.json() == {
        **{"object": "feedback", "id": 1, "turn": 1, "repeated": False},
        **{"counts": True, "because": None},
    }
    assert said_of(world, 1) == Verdict((), -1, "user", -0.5)
    assert world.ledger.judgements.hints(1) == ("say hello back",)
    assert judgeable(world.ledger) == [1], "it waits for no next state"
    assert world.woken == ["judge"]
    assert session_outcome(world.ledger, 1) is None


async def test_the_verdict_is_the_scores_sign(world: World) -> None:
    signs = ((1, 1), (0.4, 1), (0, 0), (-0.0, 0), (-1.0, -1))
    for turn, (score, value) in enumerate(signs, 1):
        await world.ask("hi")
        await give(world, turn=turn, score=score, source="client")
        assert said_of(world, turn) == Verdict((), value, "client", score)


async def test_a_session_stands_for_its_newest_main_turn(world: World) -> None:
    long = "s" * 300
    await world.ask("hi", headers={"X-Session-Id": long})
    await world.ask("hi", "fine", "more", headers={"X-Session-Id": long})
    await world.ask("recap", headers={"X-Session-Id": long, "X-Turn-Type": "side"})
    assert (await give(world, session=long, score=1)).json()["turn"] == 2
    assert said_of(world, 2) is not None
    assert said_of(world, 1) is None


async def test_final_feedback_is_the_outcome_of_its_session_and_judges_no_reply(
    world: World,
) -> None:
    await world.ask("hi", headers={"X-Session-Id": "one"})
    assert session_outcome(world.ledger, 1) is None, "a missing outcome is none, never 0"
    answer = await give(world, session="one", score=0, final=True, task="t", group="g")
    assert not answer.json()["counts"]
    assert session_outcome(world.ledger, 1) == 0
    (row,) = rows(world)
    assert (row["task"], row["task_group"]) == ("t", "g")
    await give(world, turn=1, score=0.75, final=True, text="it works")
    assert session_outcome(world.ledger, 1) == 0.75, "the newest counts"
    await give(world, turn=1, score=-1)
    assert session_outcome(world.ledger, 1) == 0.75


async def test_a_reason_is_the_hint_before_the_judge_s(world: World) -> None:
    await world.ask("hi")
    world.ledger.turns.add_next_state(1, NextState("user", "thanks"))
    await give(world, turn=1, score=-1, text="too long")
    world.ledger.judgements.add(  # it had been asked before
        1, value=1, ballots=[], hints=["be kind"]
    )
    assert said_of(world, 1) == Verdict((), -1, "user", -1.0)
    assert world.ledger.judgements.hints(1) == ("too long",)
    await give(world, turn=1, score=-0.5)
    assert world.ledger.judgements.hints(1) == ("be kind",), "they gave none this time"
    await give(world, turn=1, score=1, text="no, it is fine")
    assert world.ledger.judgements.hints(1) == (), "nothing is to be done otherwise"


async def test_a_rating_of_a_reply_in_training_is_recorded_only(world: World) -> None:
    ledger = world.ledger
    await world.ask("hi")
    step = ledger.steps.begin(0, [ledger.samples.add(1, 1, None)])
    during = (await give(world, turn=1, score=-1)).json()
    assert (during["counts"], during["because"]) == (False, "the reply is being trained")
    parent = world.policy.current.version
    ledger.steps.commit(step, parent, state_ref="s", sampler_ref="p", metrics={})
    await world.ask("hi", "fine", DOWN)
    assert [row["unused"] for row in rows(world)][-1] == "the reply was trained already"
    assert said_of(world, 1) == Verdict((), -1, "user", -1.0), "it is shown all the same"
    assert judgeable(ledger) == []
    assert sample_counts(ledger)["trained"] == 1


@pytest.mark.parametrize("how", ["the step failed", "the process ended"])
async def test_what_was_said_while_a_step_trained_counts_where_that_came_to_nothing(
    world: World, how: str
) -> None:
    ledger = world.ledger
    await world.ask("hi")
    step = ledger.steps.begin(0, [ledger.samples.add(1, 1, None)])
    for score in (1, -1):
        await give(world, turn=1, score=score)
    assert ledger.samples.queued() == 1
    if how == "the step failed":
        ledger.steps.void(step, "it failed")
    else:
        assert ledger.steps.void_unfinished() == [step]
    assert ledger.samples.queued() == 0
    assert judgeable(ledger) == [1]
    assert [row["unused"] for row in rows(world)] == [None, None]
    again = ledger.samples.add(1, -1, None)
    ledger.steps.void(ledger.steps.begin(0, [again]), "it failed")
    assert [sample.id for sample in ledger.samples.load()[:2]] == [again], "once is enough"


@pytest.mark.parametrize("how", ["refused", "set aside", "ended"])
async def test_turns_that_got_no_signal_get_one(world: World, how: str) -> None:
    await world.ask("hi", headers={"X-Session-Done": "1"} if how == "ended" else {})
    if how == "refused":
        world.ledger.judgements.add(1, value=0, ballots=[], hints=[])
        world.ledger.turns.refuse(1, TurnRefusal("neutral verdict"))
    if how == "set aside":
        postpone(world.ledger, 1, "I would rather not.", last=True)
    assert (world.column("reason") == [Reason.UNJUDGED]) == (how == "set aside")
    assert world.column("state") == ["refused"]
    assert (await give(world, turn=1, score=1)).json()["counts"]
    assert (world.column("state"), world.column("reason")) == (["judging"], [None])
    assert judgeable(world.ledger) == [1]
    assert tries(world.ledger, 1) == 0


async def test_turns_that_cannot_be_trained_keep_their_reason(world: World) -> None:
    await world.ask("hi", temperature=0.2)
    await world.ask("recap", headers={"X-Turn-Type": "side"})
    await world.ask(f"my key is {SECRET}")
    reasons = world.column("reason")
    for turn in (1, 2, 3):
        for _ in range(2):
            answer = (await give(world, turn=turn, score=1)).json()
            assert not answer["counts"]
            assert answer["because"].startswith(reasons[turn - 1])
        assert said_of(world, turn) is None
    assert world.column("reason") == reasons
    assert judgeable(world.ledger) == []


# Who may give it


async def test_nobody_learns_whose_or_what_a_turn_is_that_is_not_theirs(
    tmp_path: Path, renderer: Renderer
) -> None:
    users = {"ann": "key-a", "bob": "key-b"}
    async with gateway(tmp_path, renderer, users=users) as world:
        ann, bob = bearer("key-a"), bearer("key-b")
        names = list[str]()
        for session in ("forgotten", "private", "kept"):
            reply = await world.ask("hi", headers=ann | {"X-Session-Id": session})
            names.append(reply.json()["id"])
        secretly = await world.ask("hi", headers=ann | {"X-Private": "true"})
        world.ledger.forget(in_session("forgotten", "ann"))
        world.ledger.turns.mark_private("ann", "private", Privacy.PRIVATE)
        theirs = await give(world, response_id=names[2], score=1, headers=ann)
        assert theirs.status_code == 200
        of_ann: dict[str, list[Any]] = {
            "response_id": [*names[:2], secretly.json()["id"]],
            "turn": [1, 2, 99],
            "session": ["forgotten", "private", "never", "forgotten-1"],
        }
        of_bob: dict[str, list[Any]] = {
            "response_id": [names[2], "chatcmpl-0"],
            "turn": [3],
            "session": ["kept"],
        }
        answers = [
            await give(world, score=-1, text="x", headers=who, **{field: value})
            for who, fields in ((ann, of_ann), (bob, of_bob))
            for field, values in fields.items()
            for value in values
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.content for answer in answers}) == 1, "the same for every one of them"
        assert len(rows(world)) == 1
        for headers in ({}, bearer("wrong")):
            refused = await give(world, turn=3, score=1, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"


async def test_forgetting_takes_what_was_said_and_the_names_with_it(world: World) -> None:
    await world.ask("hi")
    sample = world.ledger.samples.add(1, 1, None)
    step = world.ledger.steps.begin(0, [sample])
    parent = world.policy.current.version
    world.ledger.steps.commit(step, parent, state_ref="s", sampler_ref="p", metrics={})
    await give(world, turn=1, score=-1, text="xochiquetzal", key="xochiquetzal 1")
    await give(world, turn=1, score=1, final=True, task="xochiquetzal")
    world.ledger.forget(from_turn(1))
    assert rows(world) == []
    assert world.column("response_id") == [None]
    assert session_outcome(world.ledger, 1) is None
    assert (await give(world, turn=1, score=1)).status_code == 404, "though its row stays"
    assert b"xochiquetzal" not in world.ledger.path.read_bytes()


async def test_forgetting_a_message_takes_the_reason_that_it_gave(world: World) -> None:
    await world.ask("hi")
    await world.ask("hi", "fine", "/bad xochiquetzal")
    assert world.ledger.judgements.hints(1) == ("xochiquetzal",)
    world.ledger.forget(from_turn(2))
    (row,) = rows(world)
    assert (row["turn_id"], row["score"], row["text"], row["key"]) == (1, -1, "", None)
    assert judgeable(world.ledger) == []
    assert b"xochiquetzal" not in world.ledger.path.read_bytes()


async def test_dropping_takes_the_words_and_leaves_the_score(world: World) -> None:
    await world.ask("hi", temperature=0.5)
    await give(world, turn=1, score=-1, text="xochiquetzal", key="xochiquetzal 1")
    assert await world.ledger.trim(before=1e12) == 1
    (row,) = rows(world)
    assert (row["score"], row["text"], row["key"]) == (-1, "", None)


@pytest.mark.parametrize("by_message", [False, True])
async def test_secrets_in_a_reason_are_not_kept(world: World, by_message: bool) -> None:
    reason = f"use {SECRET} instead"
    await world.ask("hi")
    if by_message:
        await world.ask("hi", "fine", f"/bad {reason}")
    else:
        answers = [await give(world, turn=1, score=-1, text=reason, key="a") for _ in range(2)]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        assert SECRET not in answers[0].text
    (row,) = rows(world)
    assert row["text"].startswith("use ")
    assert world.ledger.judgements.hints(1)[0].startswith("use ")
    assert SECRET.encode() not in world.ledger.path.read_bytes()
    assert SECRET not in "".join(map(str, dict(row).values()))


# Sent again


@pytest.mark.parametrize("where", ["header", "body"])
async def test_a_key_names_one_piece_of_feedback(
    tmp_path: Path, renderer: Renderer, where: str
) -> None:
    users = {"ann": "key-a", "bob": "key-b"}
    async with gateway(tmp_path, renderer, users=users) as world:

        async def rate(key: str, who: str = "key-a", **body: Any) -> httpx.Response:
            headers = bearer(who)
            if where == "header":
                headers["idempotency-key"] = key
            else:
                body["key"] = key
            return await give(world, headers=headers, **body)

        for who in ("key-a", "key-b"):
            await world.ask("hi", headers=bearer(who) | {"X-Session-Id": "s"})
        no = {"session": "s", "score": -1, "text": "no"}
        first = (await rate("one", **no)).json()
        world.woken.clear()
        assert (await rate("one", **no)).json() == first | {"repeated": True}
        assert world.woken == []
        changed: list[dict[str, Any]] = [
            {"session": "s", "score": 1, "text": "no"},
            {"turn": 1, "score": -1, "text": "n"},
            {"turn": 1, "score": -1, "text": "no", "final": True},
            {"turn": 1, "score": -1},
        ]
        for body in changed:
            reused = await rate("one", **body)
            assert reused.status_code == 422
            assert reused.json()["error"]["code"] == "key_reused"
        other = (await rate("one", "key-b", session="s", score=1)).json()
        assert (other["repeated"], other["turn"]) == (False, 2), "another user's key is another"
        assert not (await rate("two", **no)).json()["repeated"]
        assert len(rows(world)) == 3


async def test_one_key_sent_many_times_at_once_is_recorded_once(world: World) -> None:
    await world.ask("hi")
    answers = await asyncio.gather(*[give(world, turn=1, score=1, key="k") for _ in range(20)])
    assert [answer.json()["repeated"] for answer in answers].count(False) == 1
    assert {answer.json()["id"] for answer in answers} == {1}


# What is refused


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"turn": 1}, "score"),
    ({"score": 1}, "Give one of"),
    ({"turn": 1, "session": "s", "score": 1}, "Give one of"),
    ({"turn": 1, "score": 1.01}, "score"),
    ({"turn": 1, "score": 10**400}, "score"),
    ({"turn": 1, "score": True}, "score"),
    ({"turn": 1, "score": None}, "score"),
    ({"turn": "1", "score": 1}, "turn"),
    ({"turn": 0, "score": 1}, "turn"),
    ({"turn": 2**63, "score": 1}, "turn"),
    ({"response_id": "", "score": 1}, "response_id"),
    ({"session": "", "score": 1}, "session"),
    ({"turn": 1, "score": 1, "stars": 5}, "stars"),
    ({"turn": 1, "score": 1, "text": 5}, "text"),
    ({"turn": 1, "score": 1, "text": "x" * (LONGEST_TEXT + 1)}, "text"),
    ({"turn": 1, "score": 1, "source": "judge"}, "source"),
    ({"turn": 1, "score": 1, "final": "yes"}, "final"),
    ({"turn": 1, "score": 1, "task": "x" * (MAX_NAME + 1)}, "task"),
    ({"turn": 1, "score": 1, "group": ["g"]}, "group"),
    ({"turn": 1, "score": 1, "key": "a\nb"}, "key"),
]


async def post(world: World, content: str | bytes, kind: str = "application/json") -> Any:
    headers = {"content-type": kind}
    return await world.http.post("/feedback", content=content, headers=headers)


async def test_what_is_wrong_is_named(world: World) -> None:
    await world.ask("hi")
    for body, names in WRONG:
        answer = await post(world, json.dumps(body))
        assert answer.status_code == 400, body
        assert names in answer.json()["error"]["message"]
    for content in (b'{"turn": 1, "score": NaN}', b"[]", b"thumbs up", b""):
        assert (await post(world, content)).status_code == 400, content
    long = b'{"turn": 1, "score": 1, "text": "' + b"x" * MAX_BYTES + b'"}'
    assert (await post(world, long)).status_code == 413
    assert rows(world) == []


async def test_half_a_surrogate_pair_is_read_as_everywhere_else(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.ask("hi")
    for n, text in enumerate(('"cut \\ud83d here"', '"cut \\uDC00 here"')):
        answer = await post(world, f'{{"turn": 1, "score": 1, "text": {text}, "key": "{n}"}}')
        assert answer.status_code == 200, answer.text
    assert [row["text"] for row in rows(world)] == ["cut \ufffd here"] * 2
    assert capsys.readouterr().out.count("half an emoji") == 1


async def test_the_longest_text_fits_however_it_is_escaped(world: World) -> None:
    await world.ask("hi")
    content = json.dumps({"turn": 1, "score": -1, "text": "\u00e9" * LONGEST_TEXT})
    assert (await post(world, content)).status_code == 200


async def test_pages_forms_and_other_methods_are_refused(world: World) -> None:
    await world.ask("hi")
    page = {"origin": "https://evil.example"}
    assert (await give(world, turn=1, score=1, headers=page)).status_code == 403
    assert (await post(world, '{"turn": 1, "score": 1}', "text/plain")).status_code == 415
    assert (await world.http.get("/feedback")).status_code == 405
    assert rows(world) == []


async def test_feedback_takes_a_place_like_a_turn(tmp_path: Path, renderer: Renderer) -> None:
    slow = FakeSampler(Script(spell(renderer, "slow"), holds_after=0))
    async with gateway(tmp_path, renderer, slow, max_concurrent=1, max_queue=0) as world:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(world.ask("hi"))
            await slow.holding.wait()
            full = await give(world, turn=1, score=1)
            slow.go_on.set()
            await waiting
        assert full.status_code == 429
        assert (await give(world, turn=1, score=1)).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "turn": st.integers(-1, 5) | JSON,
        "response_id": st.text(max_size=300) | JSON,
        "session": st.text(max_size=300) | JSON,
        "score": st.floats() | JSON,
        "text": st.text() | JSON,
        "source": st.sampled_from(["user", "client", "judge"]) | JSON,
        "final": st.booleans() | JSON,
        "task": st.text(max_size=300) | JSON,
        "key": st.text(max_size=300) | JSON,
        "other": JSON,
    },
)


@settings(max_examples=40)
@given(st.binary(max_size=200) | BODIES, st.dictionaries(st.just("idempotency-key"), st.text()))
def test_whatever_is_sent_is_understood_or_refused(
    sent: bytes | Mapping[str, Any], headers: dict[str, str]
) -> None:
    body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    refused: RequestError | None = None
    try:
        about, said = read(body, headers)
    except RequestError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        return
    assert -1 <= said.score <= 1
    assert said.source in ("user", "client")
    assert about.what in ("turn", "response", "session")
    assert said.key is None or (said.key.isprintable() and len(said.key) <= 256)
    said.text.encode()


# What the page says


def page() -> str:
    return (ROOT / "docs" / "feedback.md").read_text()


@served(api_key="the-key")
async def test_the_pages_command_does_what_it_says(world: World) -> None:
    (command,) = re.findall(r"```bash\n(.*?)```", page(), re.DOTALL)
    (answer,) = re.findall(r"```json\n(.*?)```", page(), re.DOTALL)
    reply = (await world.ask("hi", headers=bearer("the-key"))).json()
    place = world.url.removesuffix("/v1")
    assert "http://127.0.0.1:30000" in command
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-euc",
        command.replace("http://127.0.0.1:30000", place),
        env={**os.environ, "TINKER_CLAW_GATEWAY__API_KEY": "the-key", "REPLY": reply["id"]},
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(told) == json.loads(answer)
    assert said_of(world, 1) == Verdict((), -1, "user", -1.0)
    assert world.ledger.judgements.hints(1) == ("Two sentences will do.",)


def test_the_page_knows_the_fields_and_the_bounds() -> None:
    fields = page().split("| field |")[1].split("\n\n")[0]
    named = [name for line in fields.splitlines()[2:] for name in code(line.split("|")[1])]
    assert set(named) == FIELDS.honoured
    for bound in (LONGEST_TEXT, MAX_BYTES):
        assert f"{bound:,} " in page()


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# By message


async def talk(world: World, *messages: str, agent: bool, stream: bool = False) -> str:
    """Send the messages of both sides, as a client or as OpenClaw; return the answer."""
    if not agent:
        return (await world.ask(*messages, stream=stream)).text
    first, *rest = messages
    sides = [(user if at % 2 else assistant)(text) for at, text in enumerate(rest)]
    body = {"model": MODEL, "stream": stream} | openclaw(first, *sides)
    return (await world.http.post("/chat/completions", json=body, headers=TRACE)).text


@pytest.mark.parametrize(
    ("words", "value", "hints"),
    [
        (UP, 1, ()),
        (DOWN, -1, ()),
        ("/good because it is short", 1, ()),
        ("/bad too long", -1, ("too long",)),
    ],
)
@pytest.mark.parametrize("agent", [False, True], ids=["client", "openclaw"])
async def test_a_message_that_is_a_verdict_judges_the_reply_before(
    world: World, words: str, value: int, hints: Any, *, agent: bool
) -> None:
    await talk(world, "hi", agent=agent)
    for _ in range(2):  # sent again, as after a lost connection
        await talk(world, "hi", "fine", words, agent=agent)
    assert said_of(world, 1) == Verdict((), value, "user", float(value))
    assert world.ledger.judgements.hints(1) == hints
    assert world.ledger.turns.next_state(1) == NextState("user", words)
    (row,) = rows(world)
    assert (row["source"], row["final"], row["unused"]) == ("user", 0, None)
    asks = words.startswith("/bad ")
    assert world.column("reason")[1:] == [None if asks else Reason.RATING] * 2
    assert set(world.column("kind")) == {"main"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rating_as_the_first_message_is_answered_without_the_model(
    world: World, *, stream: bool
) -> None:
    answers = [
        await talk(world, words, agent=agent, stream=stream)
        for words in (UP, "/good", "/bad too long")
        for agent in (False, True)
    ]
    answers.append(await talk(world, UP, NOTHING_TO_RATE, UP, agent=False, stream=stream))
    for path, ended, body in (
        ("/responses", "completed", {"input": UP}),
        ("/messages", "end_turn", {"messages": chat(UP), "max_tokens": 9}),
    ):
        body = {"model": MODEL, "stream": stream, **body}
        answers.append((await world.http.post(path, json=body)).text)
        assert ended in answers[-1]
    assert all("There is nothing to rate yet" in answer for answer in answers)
    assert (world.turns(), rows(world), world.sampler.prompts) == ([], [], [])
    await world.ask(UP, "There is nothing to rate yet.", "hi")
    assert world.column("lost") == [None]


@pytest.mark.parametrize("by_page", [False, True])
async def test_of_a_verdict_that_is_edited_back_the_newest_counts(
    world: World, *, by_page: bool
) -> None:
    await world.ask("hi")
    for words, score in ((UP, 1), (DOWN, -1), (UP, 1), (UP, 1)):
        if words == DOWN and by_page:
            await give(world, turn=1, score=-1)
        else:
            await world.ask("hi", "fine", words)
        assert said_of(world, 1) == Verdict((), score, "user", float(score))
    assert [row["score"] for row in rows(world)] == [1, -1, 1], "a retry is no new one"


async def test_the_talk_goes_on_from_the_reply_to_a_verdict(world: World) -> None:
    world.say("Four.", "Thanks!", "Six.")
    await world.ask("2+2?")
    await world.ask("2+2?", "Four.", UP)
    await world.ask("2+2?", "Four.", UP, "Thanks!", "3+3?")
    await world.ask("2+2?", "Four.", UP, "Thanks!", "3+3?", "Six.", "/bad it is 6.0")
    assert world.column("lost") == [None] * 4
    assert [state and state.text for state in world.next_states().values()] == [
        UP,
        "3+3?",
        "/bad it is 6.0",
        None,
    ]
    assert [row["turn_id"] for row in rows(world)] == [1, 3]
    assert judgeable(world.ledger) == [1, 3]


async def test_nothing_is_recorded_of_a_thumb_in_private(world: World) -> None:
    session = {"X-Session-Id": "s"}
    await world.ask("hi", headers=session)
    await world.ask("hi", "fine", UP, headers=session | {"X-Private": "true"})
    assert rows(world) == []
    assert said_of(world, 1) is None
