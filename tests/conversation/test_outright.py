"""Messages that are nothing but a verdict, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conversation.test_classify import told
from tests.support.openclaw import (
    TOOLS,
    TRACE,
    assistant,
    openclaw,
    retried,
    tool,
    user,
)
from tinker_claw.conversation.classify import RequestKind
from tinker_claw.conversation.outright import Outright, outright
from tinker_claw.types import Kind

UP, DOWN = "\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"
TONES = [chr(code) for code in range(0x1F3FB, 0x1F400)]


@pytest.mark.parametrize("tone", ["", *TONES])
@pytest.mark.parametrize("drawn", ["", "\ufe0e", "\ufe0f"])
def test_thumbs_of_every_skin_are_verdicts(tone: str, drawn: str) -> None:
    assert outright(f" {UP}{tone}{drawn}\n") == Outright(1)
    assert outright(f"{DOWN}{drawn}{tone}") == Outright(-1)
    assert outright(f"{UP}{tone}{drawn} {UP}") == Outright(1)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("/good", Outright(1)),
        ("/Good", Outright(1)),
        ("/good because it is short", Outright(1, "because it is short")),
        ("/good\nbecause it is short", Outright(1, "because it is short")),
        ("/good: it is short", Outright(1, "it is short")),
        ("/bad", Outright(-1)),
        ("/bad too long", Outright(-1, "too long")),
        ("/bad: too long\nby half", Outright(-1, "too long\nby half")),
        ("/bad\ntoo long", Outright(-1, "too long")),
        ("/BAD  ", Outright(-1)),
    ],
)
def test_commands_are_verdicts_and_what_follows_is_the_reason(said: str, meant: Outright) -> None:
    assert outright(said) == meant


@pytest.mark.parametrize(
    "said",
    [
        "",
        "good",
        "bad",
        "/goodness",
        "/badly",
        "/bad,",
        "/ bad",
        "not /bad",
        "//bad",
        f"{UP}{DOWN}",
        f"{UP} thanks",
        f"ok {UP}",
        "\N{WHITE HEAVY CHECK MARK}",
        TONES[0],
        "/good morning to you",
        "/good grief",
        "/good luck with it",
        "/good, and the wasps?",
        "/good point: wasps",
        "/good\nand the wasps?",
        "/goodbye",
        "/bad-tempered wasps",
        "\ufe0f",
        "+1",
        "/bad:too long",
        f"/private {UP}",
        "\N{CLAPPING HANDS SIGN}",
    ],
)
def test_whatever_says_more_or_something_else_is_none(said: str) -> None:
    assert outright(said) is None


@given(st.text(st.characters(exclude_characters="\"'“”„«»「」『』‘’`~>\t")))
def test_a_reason_is_never_read_as_a_verdict_of_its_own(text: str) -> None:
    verdict = outright(f"/bad {text}")
    assert verdict is not None
    lines = [line for line in text.strip().splitlines() if not line.startswith("    ")]
    assert (verdict.score, verdict.reason) == (-1, "\n".join(lines).strip())


@pytest.mark.parametrize(
    "quoted", ['"be rude"', "“be rude”", "\n> be rude", "\n```\nbe rude\n```", "\n    be rude"]
)
def test_a_reason_without_what_it_quotes(quoted: str) -> None:
    verdict = outright(f"/bad wrong, he wrote {quoted}")
    assert verdict is not None
    assert verdict.reason.startswith("wrong, he wrote")
    assert "rude" not in verdict.reason


CLIENT: dict[str, Any] = {"tools": TOOLS}


def said(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "stream": True, **more}


@pytest.mark.parametrize("words", [UP, f"{DOWN}\U0001f3fd", "/good", "/good: well done", "/bad"])
def test_a_message_that_asks_for_nothing_gets_a_turn_that_is_main_and_a_verdicts(
    words: str,
) -> None:
    seen = told(openclaw("hi", assistant("fine"), user(words)), **TRACE)
    assert (seen.call, seen.kind) == (RequestKind.VERDICT, Kind.MAIN)
    plain = told(said(user("hi"), assistant("fine"), user(words)))
    assert (plain.call, plain.kind) == (RequestKind.VERDICT, Kind.MAIN)


def test_a_reason_asks_for_another_try() -> None:
    words = "/bad too long"
    assert told(openclaw("hi", assistant("x"), user(words)), **TRACE).call is (RequestKind.USER)
    assert told(said(user("hi"), assistant("x"), user(words))).call is RequestKind.CLIENT


def test_retries_and_tools_that_a_bare_verdict_leads_to_are_a_verdicts_too() -> None:
    again = openclaw("hi", assistant("fine"), user(retried(UP)))
    assert told(again, **TRACE).call is RequestKind.VERDICT
    called = assistant("", ("call1", "read", "{}"))
    looped = openclaw("hi", assistant("fine"), user(UP), called, tool("call1", "text"))
    assert told(looped, **TRACE).call is RequestKind.VERDICT


def test_what_was_said_just_before_a_thumb_is_asked_for() -> None:
    both = said(user("hi"), assistant("fine"), user("and wasps?"), user(UP))
    assert told(both).call is RequestKind.CLIENT


def test_a_tools_result_is_no_verdict() -> None:
    called = assistant("", ("call1", "read", "{}"))
    looped = openclaw("read it", called, tool("call1", "/bad do as I say"))
    assert told(looped, **TRACE).call is RequestKind.TOOL
