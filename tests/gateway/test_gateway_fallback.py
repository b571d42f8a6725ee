"""Replies that break off, and versions that cannot answer: the agent gets one whole reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, World, gateway, spell, text_of
from tinker_claw.gateway.fallback import lineage
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import (
    Charge,
    PolicyVersion,
    SamplingParams,
    StopReason,
    TokenChunk,
    Tokens,
    uncharged,
)

WORDS = "one two three four five six"


def broken(renderer: Renderer) -> FakeSampler:
    return FakeSampler(Script(spell(renderer, "x"), fail_after=0))


def learned(directory: Path, *refs: str) -> None:
    """Make a ledger with a version for each step, after version 0."""
    ledger = Ledger(directory)
    version = ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    for ref in refs:
        step = ledger.steps.begin(version.id, [])
        version = ledger.steps.commit(step, version, state_ref="s", sampler_ref=ref, metrics={})
    ledger.close()


async def text(world: World, stream: bool, version: str = "", **body: Any) -> str:
    """Text of a reply, which ends as it should and names the version that gave it."""
    if stream:
        events = await world.events("hi", **body)
        *_, last, _ = events
        text = text_of(events)
    else:
        last = (await world.ask("hi", **body)).json()
        text = last["choices"][0]["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["system_fingerprint"] == version or not version
    return text


# A reply that breaks off


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["fail_after", "away_after"])
async def test_a_reply_that_breaks_off_is_gone_on_with(
    tmp_path: Path, renderer: Renderer, stream: bool, how: str
) -> None:
    tokens = spell(renderer, WORDS)
    sampler = FakeSampler(
        Script(tokens, **{how: 2}),
        Script(tokens[2:], **{how: 3}),
        Script(tokens[5:], cached_tokens=10_000),
        opinion=lambda token: -token / 1000,
    )
    async with gateway(tmp_path, renderer, sampler) as world:
        assert await text(world, stream, max_tokens=50, seed=7) == WORDS
        (turn,) = world.turns()
        done = turn.completion
        assert done.tokens == tokens
        assert done.logprobs == pytest.approx([-t / 1000 for t in tokens])
        assert done.topk_ids == tuple((t, t + 1) for t in tokens)
        assert done.stop_reason is StopReason.STOP
        assert replace(done.params, person=True) == sampler.params[0]
        assert done.cached_tokens == len(turn.prompt), "the reply's own tokens are not the prompt's"
        assert sampler.prompts == [turn.prompt + tokens[:n] for n in (0, 2, 5)]
        assert [p.max_tokens for p in sampler.params] == [50, 48, 45]
        assert len({p.seed for p in sampler.params}) == 3, "the draws go on, they are not repeated"
        assert world.column("reason") == [None], "one version sampled all of it"
        assert world.column("fallback") == [None]


class Forgetful(FakeSampler):
    """A sampler that never says that it is done."""

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in super().stream(prompt, params, charge):
            yield replace(chunk, stop_reason=None)


@pytest.mark.parametrize(("limit", "finish"), [(100, "stop"), (3, "length")])
async def test_a_stream_that_is_cut_after_its_last_token_is_whole(
    tmp_path: Path, renderer: Renderer, limit: int, finish: str
) -> None:
    sampler = Forgetful(spell(renderer, WORDS))
    async with gateway(tmp_path, renderer, sampler) as world:
        response = await world.ask("hi", max_tokens=limit)
        assert response.json()["choices"][0]["finish_reason"] == finish
        assert len(sampler.prompts) == 1
        assert world.turns()[0].completion.stop_reason.value == finish


# A version that cannot answer


@pytest.mark.parametrize("stream", [False, True])
async def test_the_version_before_answers_where_the_current_one_fails(
    tmp_path: Path, renderer: Renderer, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    learned(tmp_path, "p1", "p2")
    old, base = FakeSampler(spell(renderer, "as before")), FakeSampler(spell(renderer, "base"))
    failing = broken(renderer)
    async with gateway(tmp_path, renderer, failing, versions={1: old}, base=base) as world:
        assert await text(world, stream, "v1") == "as before"
        assert [len(s.prompts) for s in (failing, old, base)] == [3, 1, 0]
        (turn,) = world.turns()
        assert turn.policy_version == 1
        assert world.column("fallback") == ["v2 failed: the script says so"]
        assert world.observer.seen[0]["version"] == 1
        logged = capsys.readouterr().out
        assert "fallback.answered" in logged
        assert "as before" not in logged
        # It is trained like any turn of an earlier version, and expires like one.
        assert world.column("reason") == [None]
        assert world.column("kind") == ["main"]
        world.ledger.samples.add(turn.id, 1, None)
        assert world.ledger.samples.load()[0].policy_step == 1
        assert world.ledger.samples.expire(current_step=5, max_staleness=4) == 0
        assert world.ledger.samples.expire(current_step=6, max_staleness=4) == 1


@pytest.mark.parametrize("deleted", [False, True])
async def test_the_base_answers_where_the_version_before_fails_too_or_is_gone(
    tmp_path: Path, renderer: Renderer, deleted: bool
) -> None:
    learned(tmp_path, "p1", "p2")
    old, base = broken(renderer), FakeSampler(spell(renderer, "from the base"))
    versions: dict[int, Sampler] = {} if deleted else {1: old}
    async with gateway(tmp_path, renderer, broken(renderer), versions=versions, base=base) as world:
        assert await text(world, stream=deleted, version="v0") == "from the base"
        assert len(old.prompts) == (not deleted), "a stand-in is asked once"
        assert world.column("policy_version") == [0]
        assert world.column("reason") == [Reason.BASE_MODEL]
        assert world.column("fallback") == ["v2 failed: the script says so"]


@pytest.mark.parametrize("stream", [False, True])
async def test_another_version_ends_a_reply_that_is_then_not_trained(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    tokens = spell(renderer, WORDS)
    failing = FakeSampler(Script(tokens, fail_after=2), Script(tokens, fail_after=0))
    old = FakeSampler(Script(tokens[2:], fail_after=1))
    base = FakeSampler(tokens[3:])
    learned(tmp_path, "p1", "p2")
    async with gateway(tmp_path, renderer, failing, versions={1: old}, base=base) as world:
        assert await text(world, stream) == WORDS
        (turn,) = world.turns()
        assert turn.completion.tokens == tokens
        assert [s.prompts[-1][len(turn.prompt) :] for s in (failing, old, base)] == [
            tokens[:2],
            tokens[:2],
            tokens[:3],
        ]
        assert world.column("reason") == [Reason.TWO_POLICIES]
        assert world.column("detail") == ["v2 and v1 and the base model"]
        assert turn.policy_version == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_only_when_nobody_answers_the_agent_is_told(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    learned(tmp_path, "p1")
    old, base = broken(renderer), broken(renderer)
    async with gateway(tmp_path, renderer, broken(renderer), versions={0: old}, base=base) as world:
        if stream:
            events = await world.events("hi")
            assert events[-1]["error"]["type"] == "server_error"
            assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
        else:
            response = await world.ask("hi")
            assert (response.status_code, response.headers["retry-after"]) == (503, "30")
            assert "script" not in response.text, "nothing of our insides"
        assert world.turns() == []
        assert (len(old.prompts), len(base.prompts)) == (1, 1)


async def test_nobody_stands_in_for_a_version_that_was_asked_for(
    tmp_path: Path, renderer: Renderer
) -> None:
    learned(tmp_path, "p1")
    base = FakeSampler(spell(renderer, "base"))
    versions: dict[int, Sampler] = {0: broken(renderer)}
    async with gateway(tmp_path, renderer, versions=versions, base=base) as world:
        assert (await world.ask("hi", model=f"{MODEL}@v0")).status_code == 503
        assert base.prompts == []


async def test_stand_ins_are_tried_once_and_shortly_when_the_service_is_away(
    tmp_path: Path, renderer: Renderer
) -> None:
    learned(tmp_path, "p1")
    old = FakeSampler(Script(spell(renderer, "late"), first_after_s=30))
    base = FakeSampler(Script(spell(renderer, "the base, slowly"), gap_s=0.25))
    settings: dict[str, Any] = {"patience_s": 0.2, "stand_in_s": 0.6}
    async with gateway(tmp_path, renderer, versions={0: old}, base=base, **settings) as world:
        world.sampler.away = UNTIL_TOLD
        assert await text(world, stream=True) == "the base, slowly"
        assert old.aborted == 1
        assert world.health.outages.away == {"serving"}, "the version that should answer is away"
        base.away = UNTIL_TOLD
        response = await world.ask("hi")
        assert "The service that runs the model is away" in response.json()["error"]["message"]


def test_stand_ins_have_other_weights_than_the_version_that_failed() -> None:
    parents = {0: (None, "p0"), 1: (0, "p1"), 2: (1, "p1"), 3: (2, "p1"), 4: (3, "p4")}

    def known(number: int) -> PolicyVersion | None:
        if number not in parents:
            return None
        parent, ref = parents[number]
        return PolicyVersion(id=number, parent=parent, step=0, state_ref="s", sampler_ref=ref)

    async def opened(number: int) -> Sampler:
        raise AssertionError("nobody asked")

    stand_ins = lineage(known, opened, FakeSampler((1,)))
    names = {number: [s.name for s in stand_ins(number)] for number in (4, 3, 1, 0, 99)}
    base = "the base model"
    assert names == {4: ["v3", base], 3: ["v0", base], 1: ["v0", base], 0: [base], 99: [base]}
