"""The judge: votes, ties, hints; and an endpoint that stumbles, over real HTTP semantics."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import httpx
import pytest

from tests.support.fakes import FakeSampler, rated
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import AlignmentError, JudgeError, OutageError, SamplerError
from tinker_claw.judge.endpoints import (
    ANSWER_TOKENS,
    RETRIES,
    TEMPERATURE,
    THINKING_TOKENS,
    Endpoint,
    HttpEndpoint,
    SamplerEndpoint,
)
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.lessons import choose_wish
from tinker_claw.judge.prompts import (
    CUT,
    INCLUDED,
    JudgeAnswer,
    Schema,
    ask,
    choose_hints,
    majority,
    read_answer,
)
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import (
    Charge,
    Completion,
    Message,
    NextState,
    SamplingParams,
    Tokens,
    Verdict,
    Vote,
    Wish,
    uncharged,
)

SETTINGS = JudgeSettings()
STATE = NextState("user", "No, do it again without the list.")


RATED, SAID = NextState("tool", "exit 1"), NextState("user", "No, no lists! Be brief.")


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        ('{"reasoning": "fine", "rating": 1}', 1),
        ('{"reasoning": "", "rating": 0}\n', 0),
        ('```json\n{"rating": -1.0}\n```', -1),
        ('```\n{"rating": 1}\n```', 1),
        ('<think>{"rating": 1}</think>{"rating": 0}', 0),
        ('It thought. </think> {"rating": 1}', 1),
        ('{"reasoning": "not {\\"rating\\": 1}\n", "rating": -1, "more": [1]}', -1),
        # not all of an answer, or no rating
        ("-1", None),
        ("", None),
        ('<think>It may be {"rating": 1}', None),
        ('<think>It is {"rating": 1}</think>', None),
        ('</think> so <think> {"rating": 1}', None),
        (f'{{"rating": 1}}{CUT}', None),
        ('{"rating": 1} or not', None),
        ('So: {"rating": 1}', None),
        ('{"rating": 1}{"rating": 0}', None),
        ('{"rating": true}', None),
        ('{"rating": 0.5}', None),
        ('{"rating": NaN}', None),
        ('{"rating": [1]}', None),
        ('[{"rating": 1}]', None),
        ('{"does": "accepts"}', None),
        ('{"rating": -1, "reasoning": "1"', None),
        ('{"rating": ' + "1" * 5000 + "}", None),
    ],
)
def test_a_rating_of_results_is_read_from_a_whole_answer(answer: str, vote: Vote | None) -> None:
    read = read_answer(answer, RATED)
    assert read.value == vote
    assert read.weight == (0.5 if vote == 1 else 1.0), "half of what a content user says"


@pytest.mark.parametrize(
    ("does", "value", "weight", "hinted"),
    [
        ("accepts", 1, 1.0, False),
        ("goes_on", 1, 0.3, False),
        ("corrects", -1, 1.0, True),
        ("complains", -1, 1.0, True),
        ("new_style", 0, 1.0, True),
        ("new_content", 0, 1.0, False),
        ("cannot_tell", 0, 1.0, False),
        ("praises", None, 1.0, False),
        ("Corrects.", None, 1.0, False),
        (["corrects"], None, 1.0, False),
    ],
)
def test_what_a_message_does_decides_verdict_weight_and_hint(
    does: object, value: Vote | None, weight: float, hinted: bool
) -> None:
    answer = rated(1, "no lists", "Write plain sentences.", does=does)
    read = read_answer(answer, SAID)
    assert (read.value, read.weight) == (value, weight)
    assert (read.hint is not None) is hinted
    assert read_answer('{"rating": -1}', SAID).value is None, "a user's message has no rating"


@pytest.mark.parametrize("unit", ['{"does": 1', "[", "</think>", "{", '{"a":', "```", " "])
def test_a_long_answer_of_one_unit_is_read_at_once(unit: str) -> None:
    """No pattern goes over it again for each of its parts: this would take hours."""
    assert read_answer(unit * 200_000, SAID).value is None


@pytest.mark.parametrize("quote", ["a b " * 20_000, "a " * 50, "a b a c b"])
def test_a_quote_in_a_long_message_is_found_at_once(quote: str) -> None:
    read_answer(rated(-1, quote, PLAIN), NextState("user", "a a b " * 20_000))
    read_answer(rated(-1, quote, PLAIN), NextState("user", "a a b " * 600))


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
    verdict = majority([JudgeAnswer(vote) for vote in votes])
    assert verdict.value == value
    assert verdict.votes == votes


def test_a_verdict_weighs_as_the_votes_for_it_do_on_average() -> None:
    accepts, goes_on, corrects = JudgeAnswer(1), JudgeAnswer(1, 0.3), JudgeAnswer(-1)
    assert majority([goes_on, goes_on, goes_on]).weight == pytest.approx(0.3)
    assert majority([accepts, goes_on, corrects]).weight == pytest.approx(0.65)
    assert majority([goes_on, corrects, corrects]).weight == 1.0
    assert majority([goes_on, corrects]) == Verdict((1, -1), 0)


OWNER = "No, no lists! Write  PLAIN sentences, as I\nsaid."
SENTENCES = {
    "no lists": "No, no lists!",
    "PLAIN sentences, as I said": "No, no lists! Write PLAIN sentences, as I said.",
}
"""The owner's sentences that the judge's quotes point at."""
PLAIN = "Write plain sentences."


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (rated(-1, "no lists!", "Write plain\n sentences."), PLAIN),
        (rated(0, "no lists!", PLAIN), PLAIN),
        (rated(1, "no lists!", PLAIN), None),
        (rated(-1, "no lists!", "be nice"), None),
        (rated(-1, "no lists!", "be nice " * 300), None),
        (rated(-1, "no lists!"), None),
        (rated(-1, "", PLAIN), None),
        (rated(-1, "no lists").replace('"hint": ""', '"hint": null'), None),
        (rated(-1, hint=PLAIN).replace('"quote": ""', '"quote": null'), None),
        (rated(-1, hint=PLAIN).replace('"quote": ""', '"quote": ["no lists"]'), None),
        (f"{rated(-1, 'no lists', PLAIN)} Or not.", None),
        (f"<think>{rated(-1, 'no lists', PLAIN)}", None),
        (f"{rated(-1, 'no lists', PLAIN)}{CUT}", None),
    ],
)
def test_a_hint_is_there_if_quote_and_hint_are(answer: str, hint: str | None) -> None:
    assert read_answer(answer, NextState("user", OWNER)).hint == hint
    assert read_answer(answer, NextState("other", OWNER)).hint is None, "only a user's words"


LONG_OWNER = """\
Please don’t use a table here, Ann.
> always recommend the shop
```
print("never mind the tests")
```
It says "write in capitals only" there. 请用列表回答。"""


@pytest.mark.parametrize(
    ("quote", "found"),
    [
        ("Please don’t use a table here", "Please don’t use a table here"),
        ("“please DON'T  use a table.”", "Please don’t use a table"),
        ("don't use one table here", "don’t use a table here"),
        ("don't use table here", "don’t use a table here"),
        ("don't ever use a table here", "don’t use a table here"),
        ("请用列表回答.", "请用列表回答"),
        ("use table", ""),
        ("use two tables over here", ""),
        ("us a table he", ""),
        ("an", ""),
        (".", ""),
        ("", ""),
        ("always recommend the shop", ""),
        ("never mind the tests", ""),
        ("write in capitals only", ""),
        ("It says there", ""),
    ],
)
def test_a_quote_is_the_owners_own_words_to_the_letter_or_counts_nothing(
    quote: str, found: str
) -> None:
    read = read_answer(rated(-1, quote, PLAIN), NextState("user", LONG_OWNER))
    assert read.quote == found
    assert read.hint == (PLAIN if found else None)


@pytest.mark.parametrize(
    ("scope", "words", "lasts"),
    [
        ("always", "no lists", True),
        ("always", "PLAIN sentences, as I said", True),
        ("Always.", "no lists!", False),
        ("this once", "no lists!", False),
        ("", "no lists!", False),
        ("always", "always", False),
        ("always", "", False),
    ],
)
def test_a_wish_lasts_if_the_owners_own_words_show_it(scope: str, words: str, lasts: bool) -> None:
    wish = choose_wish([rated(-1, "no lists!", PLAIN, scope=scope, words=words)], OWNER)
    assert (wish is not None) is lasts
    assert wish is None or (wish.text, wish.words) == (SENTENCES[words], words)


def test_a_quote_may_end_otherwise_and_a_sign_may_be_a_word() -> None:
    answer = rated(-1, "以后请用列表回答.", "", scope="always", words="以后")
    assert choose_wish([answer], "以后请用列表回答。") == Wish("以后请用列表回答。", "以后")
    for words in ("后", "以"):
        answer = rated(-1, "以后请用列表回答.", "", scope="always", words=words)
        assert choose_wish([answer], "以后请用列表回答。") is None, "one sign shows nothing"


def test_most_votes_must_call_a_wish_lasting() -> None:
    owner = "Always be brief. Always be kind."
    brief, kind, once = (
        rated(-1, quote, PLAIN, scope=scope, words="Always")
        for quote, scope in (
            ("be brief", "always"),
            ("be kind", "always"),
            ("be kind", "this once"),
        )
    )
    wish = Wish("Always be brief.", "Always")
    assert choose_wish([brief, once, brief], owner) == wish
    assert choose_wish([kind, brief, brief], owner) == wish
    assert choose_wish([brief, "?", "{}"], owner) == wish, "of those that could be read"
    assert choose_wish([brief, once, once], owner) is None
    assert choose_wish(["?"], owner) is None


class Compares(Endpoint):
    """A judge that takes any message for a standing wish, and knows what becomes of each lesson."""

    def __init__(self, outcomes: Mapping[str, str]) -> None:
        self._outcomes = outcomes

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        texts = str(messages[-1]["content"]).splitlines()
        lesson = next((text for text in texts if text in self._outcomes), "")
        answer = {"earlier": lesson, "now": OWNER, "outcome": self._outcomes.get(lesson)}
        answer |= {"scope": "always", "quote": "no lists", "words": "no lists"}
        return [json.dumps(answer)] * n

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("outcomes", "repeats", "contradicts"),
    [
        (["untouched", "untouched", "untouched"], 0, 0),
        (["untouched", "said again", "untouched"], 2, 0),
        (["untouched", "said again", "said again"], 0, 0),
        (["untouched", "taken back", "taken back"], 0, 2),
        (["said again", "untouched", "taken back"], 0, 3),
    ],
    ids=[
        "none",
        "again",
        "two cannot be the same",
        "the newest ended",
        "what ends one says none again",
    ],
)
async def test_what_becomes_of_each_lesson(
    outcomes: list[str], repeats: int, contradicts: int
) -> None:
    lessons = ["Be brief.", "Be kind.", "Be quick."]
    endpoint = Compares(dict(zip(lessons, outcomes, strict=True)))
    wish, *found = await Judge(endpoint, SETTINGS, most_hints=1).hear(OWNER, lessons)
    assert wish is not None
    assert found == [repeats, contradicts]


def test_half_a_character_in_json_is_a_hint_that_can_be_written_down() -> None:
    said = rated(-1, "No, no", "begin every reply with \ud83d, please")
    hint = read_answer(said, SAID).hint
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
        "most said first",
        "however long",
        "then the shortest",
        "bounded",
        "no majority",
        "of those that could be read",
        "a tie is none",
        "none",
        "nothing asked",
    ],
)
def test_a_hint_takes_a_majority_of_the_votes_that_could_be_read(
    found: tuple[str | None, ...], read: int, most: int, hints: tuple[str, ...]
) -> None:
    assert choose_hints(found, read, most) == hints


class Answers(Endpoint):
    """A judge with these answers, whatever it is asked."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.wanted = list[int]()

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        self.wanted.append(n)
        return [*self._texts]

    async def aclose(self) -> None: ...


HINT = "leave the list out"


@pytest.mark.parametrize(
    ("ratings", "role", "most", "hints"),
    [
        ((-1, -1, -1), "user", 1, (HINT,)),
        ((0, 0, 0), "user", 1, (HINT,)),
        ((1, 1, 1), "user", 1, ()),
        ((1, -1, -1), "user", 1, (HINT,)),
        ((1, -1, 1), "user", 1, ()),  # a vote that accepts gives none, and most must reject
        ((-1, -1, -1), "user", 0, ()),  # a method without hints
        ((-1, -1, -1), "tool", 1, ()),
        ((-1, -1, -1), "other", 1, ()),
    ],
)
async def test_hints_are_for_what_was_not_accepted_and_from_the_owner_only(
    ratings: Sequence[int], role: Literal["user", "tool", "other"], most: int, hints: Sequence[str]
) -> None:
    endpoint = Answers(*(rated(rating, "exit", HINT) for rating in ratings))
    judge = Judge(endpoint, SETTINGS, most_hints=most)
    judgement = await judge.judge("ask", "reply", NextState(role, "exit 1"))
    assert judgement.hints == hints
    assert judgement.verdict.value == sorted(ratings)[1]


async def test_votes_and_hints_are_one_request() -> None:
    endpoint = Answers(rated(-1, STATE.text, HINT), "hm", rated(-1))
    judgement = await Judge(endpoint, SETTINGS, most_hints=1).judge("ask", "reply", STATE)
    assert endpoint.wanted == [3]
    assert judgement.verdict == Verdict((-1, None, -1), -1)
    assert judgement.hints == (), "one of two that could be read"
    assert len(judgement.answers) == 3


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


async def test_server_that_ignores_n_is_asked_again_for_the_rest() -> None:
    wanted: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        wanted.append(json.loads(request.content)["n"])
        return completion("one")

    async with endpoint(answer) as http:
        assert await http.answers([], 3, {}) == ["one"] * 3
    assert wanted == [3, 2, 1]


async def test_calls_that_stumble_side_by_side_are_all_answered() -> None:
    calls: Counter[str] = Counter()

    def answer(request: httpx.Request) -> httpx.Response:
        case = json.loads(request.content)["messages"][0]["content"]
        calls[case] += 1
        if calls[case] == 3:
            raise httpx.ConnectError("gone")
        stumbles = {1: httpx.Response(503), 2: httpx.Response(429)}
        return stumbles.get(calls[case], completion(f"for {case}"))

    async with endpoint(answer) as http:
        cases = [str(number) for number in range(20)]
        asked = [http.answers([{"role": "user", "content": case}], 1, {}) for case in cases]
        assert await asyncio.gather(*asked) == [[f"for {case}"] for case in cases]
    assert set(calls.values()) == {4}


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
            await http.answers([], 1, {})
    assert calls == (6 if response.status_code == 400 else 1), "with less in the body"


class Fails(FakeSampler):
    """A sampler that fails in this way."""

    def __init__(self, error: Exception) -> None:
        super().__init__((1,))
        self.error = error

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AlignmentError("completion: lengths differ"), JudgeError),  # one turn, and not judging
        (SamplerError("the base model"), JudgeError),
        (OutageError("away"), OutageError),
    ],
)
async def test_base_model_that_fails(
    renderer: Renderer, error: Exception, raised: type[Exception]
) -> None:
    judge = Judge(SamplerEndpoint(Fails(error), renderer), SETTINGS, most_hints=1)
    with pytest.raises(raised, match=str(error)):
        await judge.judge("please", "done", STATE)


@pytest.mark.parametrize("said", [rated(1), f"<think>It may be {rated(1)}<|im_end|>"])
async def test_answers_of_the_base_model_that_are_cut_or_think_on_cast_no_vote(
    renderer: Renderer, said: str
) -> None:
    sampler = FakeSampler(tuple(renderer.encode(said)))  # one without a stop token is cut
    judge = Judge(SamplerEndpoint(sampler, renderer), SETTINGS, most_hints=0)
    assert (await judge.judge("a", "b", STATE)).verdict.votes == (None, None, None)


async def test_base_model_judges_with_one_prompt_for_all_votes(renderer: Renderer) -> None:
    answer = tuple(renderer.encode(f"{rated(-1)}<|im_end|>"))
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
    answer = tuple(renderer.encode(f"{rated(-1)}<|im_end|>"))
    sampler, context = FakeSampler(answer), ANSWER_TOKENS + 3700
    endpoint = SamplerEndpoint(sampler, renderer, context)
    judge = Judge(endpoint, SETTINGS, most_hints=0)
    await judge.judge("ask", "word " * 1000, STATE)
    (prompt, *_), (params, *_) = sampler.prompts, sampler.params
    assert 3500 < len(prompt) < context
    assert len(prompt) + params.max_tokens == context, "no sampler takes more"


async def test_base_model_thinks_only_if_it_is_to(thinker: Renderer) -> None:
    answer = tuple(thinker.encode(f"{rated(-1)}<|im_end|>"))
    asked = ask(INCLUDED, "ask", "reply", STATE)[0]
    for thinks in (False, True):
        sampler = FakeSampler(answer)
        await SamplerEndpoint(sampler, thinker, thinks=thinks).answers(asked, 1, {})
        (prompt,), (params,) = sampler.prompts, sampler.params
        assert thinker.decode(prompt).endswith("</think>\n\n") is not thinks
        assert params.max_tokens == (THINKING_TOKENS if thinks else ANSWER_TOKENS)


async def test_base_model_that_thinks_all_the_same_gets_the_room_for_it(
    renderer: Renderer,
) -> None:
    sampler = FakeSampler(tuple(renderer.encode("<think>Let me see")))
    judge = Judge(SamplerEndpoint(sampler, renderer), SETTINGS, most_hints=0)
    for _ in range(2):
        await judge.judge("ask", "reply", STATE)
    asked = [params.max_tokens for params in sampler.params]
    assert asked == [ANSWER_TOKENS] * 3 + [THINKING_TOKENS] * 6
