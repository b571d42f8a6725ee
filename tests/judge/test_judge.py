"""The judge: votes, ties, hints; and an endpoint that stumbles, over real HTTP semantics."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeSampler, Script
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import AlignmentError, JudgeError, OutageError
from tinker_claw.judge.endpoints import (
    ANSWER_TOKENS,
    RETRIES,
    TEMPERATURE,
    HttpEndpoint,
    SamplerEndpoint,
)
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import (
    CUT,
    choose_hints,
    choose_wish,
    majority,
    parse_hint,
    parse_hint_vote,
    parse_vote,
    parse_wish,
    verdict_messages,
)
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Completion, Message, NextState, SamplingParams, Tokens, Vote, Wish

SETTINGS = JudgeSettings()
STATE = NextState("user", "No, do it again without the list.")


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        (r"It was fine. \boxed{1}", 1),
        (r"\boxed{+1}", 1),
        (r"\boxed{ -1 }", -1),
        (r"\boxed{0}", 0),
        (r"first \boxed{1}, no: \boxed{-1}", -1),
        ("maybe \\boxed{1}? No: \\boxed{\u22121}", -1),
        ("\\boxed{\uff0d1}\u3002", -1),
        (r"\boxed{-1.0}", -1),
        (r"$\boxed{\text{-1}}$.", -1),
        (r"**\boxed{\mathbf{ +1 }}**" + "\n", 1),
        (r"\[\boxed{1}\]", 1),
        (r"(\boxed{1})!", 1),
        ("<think>\\boxed{-1}?</think>\n\\boxed{1}", 1),
        ("It thought. </think> \\boxed{1}", 1),
        ('{"reasoning": "fine", "rating": 1, "hint": ""}', 1),
        ('```json\n{"rating": -1.0}\n```', -1),
        ('<think>{"rating": 1}</think>{"rating": 0}', 0),
        ('{"reasoning": "not \\\\boxed{1}", "rating": -1}', -1),
        # what follows the box, or is wrong with it, leaves nothing
        (r"\boxed{1} then \boxed{7}", None),
        (r"\boxed{1} then \boxed{}", None),
        (r"\boxed{1} then \boxed{-1", None),
        (r"\boxed{1} would be too kind", None),
        (r"\boxed{1}?", None),
        (r"\boxed{1}, or 0", None),
        ("\\boxed{1}\n[HINT]do it the other way[/HINT]", None),
        (r"\boxed{1/2}", None),
        (r"\boxed{10}", None),
        (r"\boxed{1.5}", None),
        (r"\boxed{good}", None),
        (r"\boxed{\text{1}", None),
        ("-1", None),
        ("", None),
        # not all of an answer
        (r"<think>It may be \boxed{1}", None),
        (r"<think>It is \boxed{1}</think>", None),
        (r"</think> so <think> \boxed{1}", None),
        (rf"\boxed{{1}}{CUT}", None),
        (f'{{"rating": 1}}{CUT}', None),
        ('{"rating": 1} or not', None),
        ('{"rating": true}', None),
        ('{"rating": "1"}', None),
        ('{"rating": 2}', None),
        ('{"rating": null}', None),
        ('[{"rating": 1}]', None),
        ('{"reasoning": "\\\\boxed{1}"}', None),
        ('{"rating": -1, "reasoning": "\\\\boxed{1}"', None),
    ],
)
def test_a_rating_counts_that_ends_a_whole_answer(answer: str, vote: Vote | None) -> None:
    assert parse_vote(answer) == vote


@given(st.text())
def test_whatever_follows_a_box_but_closing_punctuation_leaves_no_rating(behind: str) -> None:
    closes = set(
        ".!\u2026\u3002\uff01)]}\u3011\uff09\u300b\u300f\u300d*_~$`\"'\u2019\u201d\u00bb\\"
    )
    if any(not (sign.isspace() or sign in closes) for sign in behind) and "boxed" not in behind:
        assert parse_vote(f"\\boxed{{1}}{behind}") is None


@pytest.mark.parametrize("unit", [r"\boxed{1", "[HINT]", "</think>", "{", "\\boxed{\\text{", " "])
def test_a_long_answer_of_one_thing_is_read_at_once(unit: str) -> None:
    """No pattern goes over it again for each of its parts: this would take hours."""
    for read in (parse_vote, parse_hint_vote, partial(parse_hint, owner="no")):
        assert read(unit * 200_000) is None


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ((1, 1, -1), 1),
        ((-1, None, None), -1),
        ((1, -1), 0),
        ((1, -1, None), 0),
        ((0, 0, 1, 1), 0),
        ((None, None), None),
        ((), None),
    ],
)
def test_majority(votes: tuple[Vote | None, ...], value: Vote | None) -> None:
    verdict = majority(votes)
    assert verdict.value == value
    assert verdict.votes == votes


OWNER = "No, no lists! Write  PLAIN sentences, as I\nsaid."
SENTENCES = {
    "no lists!": "No, no lists!",
    "no lists": "No, no lists!",
    "PLAIN sentences, as I said": "No, no lists! Write PLAIN sentences, as I said.",
}
"""The owner's sentences that the judge's quotes point at."""
Q = "They say [QUOTE]no lists![/QUOTE] "


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (f"{Q}\\boxed{{1}}\n[HINT]Write plain\n sentences.[/HINT]", "Write plain sentences."),
        (
            f"[HINT]old hint, replaced[/HINT] {Q}\\boxed{{1}} [HINT]the newer hint[/HINT]",
            "the newer hint",
        ),
        (f"{Q}They wrote [HINT]always use sudo[/HINT]. \\boxed{{1}}", None),
        (f"{Q}\\boxed{{-1}}\n[HINT]Write plain sentences.[/HINT]", None),
        (f"{Q}\\boxed{{1}}\n[HINT]be nice[/HINT]", None),
        (f"{Q}\\boxed{{1}} no marks", None),
        (f"{Q}\\boxed{{1}}. [HINT]Write plain sentences.[/HINT].\n", "Write plain sentences."),
        (
            f"{Q}\\boxed{{1}}[HINT]Say \\boxed{{42}} at the end.[/HINT]",
            "Say \\boxed{42} at the end.",
        ),
        (
            '{"reasoning": "", "rating": 1, "quote": "no lists", "hint": "Write plain sentences."}',
            "Write plain sentences.",
        ),
        ('{"rating": -1, "quote": "no lists", "hint": "Write plain sentences."}', None),
        ('{"rating": 1, "quote": "no lists", "hint": null}', None),
        ('{"rating": 1, "quote": null, "hint": "Write plain sentences."}', None),
        (f"{Q}\\boxed{{1}}[HINT]Write plain sentences.[/HINT] Or not.", None),
        (f"{Q}\\boxed{{1}} It is this: [HINT]Write plain sentences.[/HINT]", None),
        (f"<think>{Q}\\boxed{{1}}[HINT]Write plain sentences.[/HINT]", None),
        (f"{Q}\\boxed{{1}}[HINT]Write plain sentences.[/HINT]{CUT}", None),
    ],
)
def test_hint_needs_a_positive_box_and_some_length(answer: str, hint: str | None) -> None:
    assert parse_hint(answer, OWNER) == hint


@pytest.mark.parametrize(
    ("quote", "counts"),
    [
        ("Write plain sentences, as I said", True),
        ("“no LISTS”", True),
        ("no", False),
        ("", False),
        ("always recommend the shop", False),
        ("no lists at all", False),
    ],
)
def test_hint_needs_words_that_the_owner_said(quote: str, counts: bool) -> None:
    answer = f"[QUOTE]{quote}[/QUOTE] \\boxed{{1}} [HINT]Write plain sentences.[/HINT]"
    assert (parse_hint(answer, OWNER) is not None) is counts


@pytest.mark.parametrize(
    ("scope", "words", "lasts"),
    [
        ("always", "no lists!", True),
        ("Always.", "PLAIN sentences, as I said", True),
        ("for this kind of request", "no lists", True),
        ("this once", "no lists!", False),
        ("", "no lists!", False),
        ("always", "always", False),
        ("always", "", False),
    ],
)
def test_a_wish_lasts_if_the_owners_own_words_show_it(scope: str, words: str, lasts: bool) -> None:
    marked = f"[QUOTE]no lists![/QUOTE][SCOPE]{scope}[/SCOPE][WORDS]{words}[/WORDS] \\boxed{{1}}"
    answer = f"{marked} [HINT]Write plain sentences.[/HINT]"
    fields = {"rating": 1, "quote": "no lists", "hint": "Write plain sentences."}
    for said in (answer, json.dumps(fields | {"scope": scope, "words": words})):
        assert parse_hint(said, OWNER) == "Write plain sentences."
        wish = parse_wish(said, OWNER)
        assert (wish is not None) is lasts
        assert wish is None or (wish.text, wish.words) == (SENTENCES[words], words)


def test_most_votes_must_call_a_wish_lasting() -> None:
    wish, other = Wish("Be brief.", "brief", "always"), Wish("Be short.", "brief", "always")
    assert choose_wish([wish, None, wish], 3) == wish
    assert choose_wish([other, wish, wish], 3) == wish
    assert choose_wish([wish, None, None], 3) is None


def test_half_a_character_in_json_is_a_hint_that_can_be_written_down() -> None:
    said = '{"rating": 1, "quote": "No, no", "hint": "begin every reply with \\ud83d, please"}'
    hint = parse_hint(said, OWNER)
    assert hint == "begin every reply with ?, please"
    assert hint.encode()


LONG, SHORT = "use short sentences, please", "no lists at all"


@pytest.mark.parametrize(
    ("found", "read", "most", "hints"),
    [
        ((LONG, SHORT, SHORT), 3, 3, (SHORT, LONG)),
        ((LONG, LONG, SHORT), 3, 3, (LONG, SHORT)),
        ((LONG, SHORT, None), 3, 3, (SHORT, LONG)),
        ((LONG, LONG, SHORT), 3, 1, (LONG,)),
        ((SHORT, None, None), 3, 3, ()),
        ((SHORT, None, None), 1, 3, (SHORT,)),
        ((SHORT, None), 2, 3, ()),
        ((None, None, None), 3, 3, ()),
        ((), 0, 3, ()),
    ],
    ids=[
        *("most said first", "however long", "then the shortest", "bounded", "no majority"),
        *("of those that could be read", "a tie is none", "none", "nothing asked"),
    ],
)
def test_a_hint_takes_a_majority_of_the_votes_that_could_be_read(
    found: tuple[str | None, ...], read: int, most: int, hints: tuple[str, ...]
) -> None:
    assert choose_hints(found, read, most) == hints


@pytest.mark.parametrize(
    ("votes", "role", "heard"),
    [
        ("\\boxed{-1}", "user", True),
        ("\\boxed{0}", "user", True),
        ("hm", "user", True),
        ("\\boxed{1}", "user", False),
        ("\\boxed{-1}", "tool", False),
        ("\\boxed{-1}", "other", False),
    ],
)
async def test_hints_are_for_what_was_not_accepted_and_from_the_owner_only(
    votes: str, role: Literal["user", "tool", "other"], heard: bool
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"][0]["content"])
        hint = r"[QUOTE]exit[/QUOTE]\boxed{1}[HINT]leave the list out[/HINT]"
        return completion(*[hint if "[HINT]" in asked[-1] else votes] * 3)

    async with endpoint(answer) as http:
        judge = Judge(http, JudgeSettings(), most_hints=1)
        judgement = await judge.judge("ask", "reply", NextState(role, "exit 1"))
    assert judgement.hints == (("leave the list out",) if heard else ())
    asks_for_one = any("[HINT]" in system for system in asked)
    assert asks_for_one is heard, "what cannot count is not paid for"


def completion(*texts: str) -> httpx.Response:
    choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
    return httpx.Response(200, json={"choices": choices})


def endpoint(answer: Callable[[httpx.Request], httpx.Response]) -> HttpEndpoint:
    def streamed(request: httpx.Request) -> httpx.Response:
        whole = answer(request)
        return httpx.Response(whole.status_code, stream=httpx.ByteStream(whole.content))

    return HttpEndpoint(
        "http://judge/v1",
        SETTINGS,
        transport=httpx.MockTransport(streamed),
        retries=replace(RETRIES, longest_s=0.01),
    )


async def test_votes_and_hints_are_one_request_each_with_n() -> None:
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body)
        if "[HINT]" in body["messages"][0]["content"]:
            hint = f"[QUOTE]{STATE.text}[/QUOTE]\\boxed{{1}}[HINT]leave the list out[/HINT]"
            return completion(*[hint] * 3)
        return completion(r"\boxed{-1}", "hm", r"\boxed{-1}")

    async with endpoint(answer) as http:
        judgement = await Judge(http, SETTINGS, most_hints=1).judge("ask", "reply", STATE)
    assert [body["n"] for body in asked] == [3, 3]
    assert judgement.verdict.votes == (-1, None, -1)
    assert judgement.verdict.value == -1
    assert judgement.hints == ("leave the list out",)
    assert len(judgement.verdict_answers) == len(judgement.hint_answers) == 3


async def test_method_without_hints_asks_for_none() -> None:
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return completion(*[r"\boxed{1}"] * 3)

    async with endpoint(answer) as http:
        judgement = await Judge(http, SETTINGS, most_hints=0).judge("ask", "reply", STATE)
    assert calls == 1
    assert judgement.hint_answers == ()


async def test_server_that_ignores_n_is_asked_again_for_the_rest() -> None:
    wanted: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        wanted.append(json.loads(request.content)["n"])
        return completion("one")

    async with endpoint(answer) as http:
        assert await http.answers([], 3) == ["one"] * 3
    assert wanted == [3, 2, 1]


async def test_calls_that_stumble_side_by_side_are_all_answered() -> None:
    calls: Counter[str] = Counter()

    def answer(request: httpx.Request) -> httpx.Response:
        case = json.loads(request.content)["messages"][0]["content"]
        calls[case] += 1
        return completion(f"for {case}") if calls[case] > 3 else httpx.Response(503)

    async with endpoint(answer) as http:
        cases = [str(number) for number in range(20)]
        asked = [http.answers([{"role": "user", "content": case}], 1) for case in cases]
        assert await asyncio.gather(*asked) == [[f"for {case}"] for case in cases]
    assert set(calls.values()) == {4}


async def test_passing_failures_are_retried() -> None:
    replies = iter([httpx.Response(503), httpx.Response(429), completion("fine")])

    def answer(request: httpx.Request) -> httpx.Response:
        try:
            return next(replies)
        except StopIteration:
            raise httpx.ConnectError("gone") from None

    async with endpoint(answer) as http:
        assert await http.answers([], 1) == ["fine"]
        with pytest.raises(JudgeError, match=r"http://judge/v1.*ConnectError gone"):
            await http.answers([], 1)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (httpx.Response(401, text="bad key"), "HTTP 401.*bad key"),
        (httpx.Response(400, text="invalid: 'my secret'"), r"refuses \(HTTP 400\)$"),
        (httpx.Response(200, text="<html>"), "no chat completion"),
        (httpx.Response(200, json={"choices": []}), "no choices"),
    ],
)
async def test_what_will_not_heal_is_not_retried(response: httpx.Response, says: str) -> None:
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return response

    async with endpoint(answer) as http:
        with pytest.raises(JudgeError, match=says):
            await http.answers([], 1)
    assert calls == (2 if response.status_code == 400 else 1), "once more, without a schema"


async def test_base_model_judges_with_one_prompt_for_all_votes(renderer: Renderer) -> None:
    answer = tuple(renderer._encode("It was refused. \\boxed{-1}<|im_end|>"))
    sampler = FakeSampler(answer)
    endpoint = SamplerEndpoint(sampler, renderer)
    judgement = await Judge(endpoint, SETTINGS, most_hints=0).judge("ask", "reply", STATE)
    assert judgement.verdict.votes == (-1, -1, -1)
    assert len(set(sampler.prompts)) == 1
    assert {p.temperature for p in sampler.params} == {TEMPERATURE}
    assert {p.max_tokens for p in sampler.params} == {ANSWER_TOKENS}


async def test_base_model_judges_a_long_turn_in_what_its_context_leaves(
    renderer: Renderer,
) -> None:
    answer = tuple(renderer._encode("It was refused. \\boxed{-1}<|im_end|>"))
    sampler, context = FakeSampler(answer), ANSWER_TOKENS + 1000
    endpoint = SamplerEndpoint(sampler, renderer, context)
    judge = Judge(endpoint, SETTINGS, most_hints=0)
    await judge.judge("ask", "word " * 1000, STATE)
    (prompt, *_), (params, *_) = sampler.prompts, sampler.params
    assert 1000 < len(prompt) < context
    assert len(prompt) + params.max_tokens == context, "no sampler takes more"


async def test_answers_of_the_base_model_that_are_cut_or_think_on_cast_no_vote(
    renderer: Renderer,
) -> None:
    for said in (r"\boxed{1}", r"<think>It may be \boxed{1}<|im_end|>"):
        sampler = FakeSampler(tuple(renderer._encode(said)))  # one without a stop token is cut
        endpoint = SamplerEndpoint(sampler, renderer)
        judgement = await Judge(endpoint, SETTINGS, most_hints=0).judge("a", "b", STATE)
        assert judgement.verdict.votes == (None, None, None)
        assert judgement.unread is not None


async def test_base_model_whose_arrays_differ_in_length_fails_one_turn_and_not_judging(
    renderer: Renderer,
) -> None:
    class Uneven(FakeSampler):
        async def sample(
            self, prompt: Tokens, params: SamplingParams, n: int = 1
        ) -> list[Completion]:
            raise AlignmentError("completion: lengths differ")

    asked: list[Message] = [{"role": "user", "content": "x"}]

    with pytest.raises(JudgeError, match="lengths differ"):
        await SamplerEndpoint(Uneven((1,)), renderer).answers(asked, 1)


@pytest.mark.parametrize(
    ("rating", "asked"), [(1, [False]), (0, [False, True]), (-1, [False, True])]
)
async def test_hint_is_asked_for_only_where_the_verdict_leaves_room_for_one(
    rating: int, asked: list[bool]
) -> None:
    found: list[bool] = []

    class Rates:
        async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
            found.append("[HINT]" in messages[0]["content"])
            return [f"\\boxed{{{rating}}}"] * n

        async def aclose(self) -> None: ...

    judged = await Judge(Rates(), SETTINGS, most_hints=1).judge("please", "done", STATE)
    assert (judged.verdict.value, found) == (rating, asked)


async def test_base_model_that_fails_is_a_judge_that_fails(renderer: Renderer) -> None:
    sampler = FakeSampler(Script((1, 2), fail_after=0))
    with pytest.raises(JudgeError, match="base model could not judge"):
        await SamplerEndpoint(sampler, renderer).answers([*verdict_messages("a", "b", STATE)], 3)


async def test_base_model_whose_service_is_away_is_an_outage(renderer: Renderer) -> None:
    sampler = FakeSampler((1,))
    sampler.away = 1
    judge = Judge(SamplerEndpoint(sampler, renderer), SETTINGS, most_hints=1)
    with pytest.raises(OutageError):
        await judge.judge("please", "done", NextState("user", "thanks"))
