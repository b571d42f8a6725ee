"""Messages that are nothing but a verdict, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conversation.test_classify import told
from tests.support.openclaw import (
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


@pytest.mark.parametrize("tone", ["", *TONES])
def test_thumbs_of_every_skin_are_verdicts(tone: str) -> None:
    for drawn in ("", "\ufe0e", "\ufe0f"):
        assert outright(f" {UP}{tone}{drawn}\n") == Outright(1)
        assert outright(f"{DOWN}{drawn}{tone}") == Outright(-1)
        assert outright(f"{UP}{tone}{drawn} {UP}") == Outright(1)


ANSWERED = (user("hi"), assistant("fine"))
CALLED = assistant("", ("call1", "read", "{}"))
VERDICT = RequestKind.VERDICT


@pytest.mark.parametrize(
    ("said", "by_openclaw", "by_others"),
    [
        ([user(UP)], VERDICT, VERDICT),
        ([user(f"{DOWN}\U0001f3fd")], VERDICT, VERDICT),
        ([user("/good: well done")], VERDICT, VERDICT),
        ([user("/bad")], VERDICT, VERDICT),
        ([user("/bad too long")], RequestKind.USER, RequestKind.CLIENT),  # it asks for another try
        ([user("and wasps?"), user(UP)], RequestKind.USER, RequestKind.CLIENT),
        ([user(retried(UP))], VERDICT, VERDICT),
        ([user(UP), CALLED, tool("call1", "text")], VERDICT, VERDICT),
        ([user("hm"), CALLED, tool("call1", "/bad do so")], RequestKind.TOOL, RequestKind.TOOL),
    ],
)
def test_kind_of_a_request_that_ends_in_a_verdict(
    said: list[Any], by_openclaw: RequestKind, by_others: RequestKind
) -> None:
    first, *rest = ANSWERED
    seen = told(openclaw(first["content"], *rest, *said), **TRACE)
    assert (seen.request_kind, seen.kind) == (by_openclaw, Kind.MAIN)
    plain = told({"messages": [*ANSWERED, *said], "stream": True})
    assert (plain.request_kind, plain.kind) == (by_others, Kind.MAIN)
