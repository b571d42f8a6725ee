"""Draws and scores of samplers, in numbers, on every backend."""

from __future__ import annotations

import math
from contextlib import aclosing

import pytest

from tests.support.backends import Backend
from tests.support.contract import drawn, prompt, scored
from tinker_claw.errors import ClawError, RequestError
from tinker_claw.policy import Trainer
from tinker_claw.types import Completion, SamplingParams


async def test_scores_are_of_a_distribution_and_candidates_are_its_likeliest(
    backend: Backend, trainer: Trainer
) -> None:
    sampler, tokens = await trainer.publish(), prompt(backend, 12)
    every = tuple(range(backend.vocabulary))
    read = await sampler.logprobs(tokens, start=2, targets=[every] * 10, top_k=5)
    own = await sampler.logprobs(tokens, start=2)
    assert own.start == read.start == 2
    of_own = [row[token] for row, token in zip(read.targets, tokens[2:], strict=True)]
    assert of_own == pytest.approx(list(own.logprobs), abs=backend.tolerance)
    for row, ids, best in zip(read.targets, read.topk_ids, read.topk_logprobs, strict=True):
        assert math.fsum(map(math.exp, row)) == pytest.approx(1, abs=10 * backend.tolerance)
        assert list(best) == pytest.approx(sorted(row, reverse=True)[:5], abs=backend.tolerance)
        assert [row[i] for i in ids] == pytest.approx(list(best), abs=backend.tolerance)


async def test_scores_do_not_depend_on_where_they_start(backend: Backend, trainer: Trainer) -> None:
    sampler, tokens = await trainer.publish(), prompt(backend, 20)
    whole = await sampler.logprobs(tokens, start=1)
    for start in (2, 11, 19):
        part = await sampler.logprobs(tokens, start=start)
        assert part.logprobs == pytest.approx(whole.logprobs[start - 1 :], abs=backend.tolerance)


async def test_a_seed_decides_the_completion(backend: Backend, trainer: Trainer) -> None:
    sampler, start = await trainer.publish(), prompt(backend)
    same = [await drawn(sampler, start, seed=11) for _ in range(2)]
    assert same[0].tokens == same[1].tokens
    others = {(await drawn(sampler, start, seed=seed)).tokens for seed in range(4)}
    assert len(others) == 4


async def test_what_one_salt_has_computed_is_not_told_under_another(
    backend: Backend, trainer: Trainer
) -> None:
    sampler, tokens = await trainer.publish(), prompt(backend, 200)
    alone = await drawn(sampler, tokens, seed=11)
    for salt in ("anna", "ben"):
        first = await drawn(sampler, tokens, seed=11, cache_salt=salt)
        assert first.cached_tokens == 0, "others had it computed"
        again = await drawn(sampler, tokens, seed=11, cache_salt=salt)
        assert first.tokens == again.tokens == alone.tokens
        assert again.logprobs == pytest.approx(alone.logprobs, abs=backend.tolerance)


async def test_temperature_zero_takes_the_likeliest_and_tells_its_untempered_logprob(
    backend: Backend, trainer: Trainer
) -> None:
    sampler, start = await trainer.publish(), prompt(backend)
    greedy = await drawn(sampler, start, temperature=0.0, seed=None)
    read = await sampler.logprobs((*start, *greedy.tokens), start=len(start), top_k=1)
    assert greedy.tokens == tuple(row[0] for row in read.topk_ids)
    assert greedy.logprobs == pytest.approx(read.logprobs, abs=backend.tolerance)


async def test_tokens_come_as_often_as_their_logprobs_say(
    backend: Backend, trainer: Trainer
) -> None:
    """Logprobs of drawn tokens are minus the entropy on average; within 4 standard deviations."""
    sampler, start = await trainer.publish(), prompt(backend, 10)
    every, excess, variance = tuple(range(backend.vocabulary)), 0.0, 0.0
    for completion in await sampler.sample(start, SamplingParams(max_tokens=60, seed=40), n=8):
        tokens = (*start, *completion.tokens)
        read = await sampler.logprobs(tokens, start=len(start), targets=[every] * 60)
        for logprob, row in zip(completion.logprobs, read.targets, strict=True):
            mean = math.fsum(math.exp(z) * z for z in row)
            excess += logprob - mean
            variance += math.fsum(math.exp(z) * (z - mean) ** 2 for z in row)
    assert abs(excess) < 4 * math.sqrt(variance)


async def test_top_k_and_top_p_leave_only_the_likeliest(backend: Backend, trainer: Trainer) -> None:
    sampler, start = await trainer.publish(), prompt(backend)
    greedy = await drawn(sampler, start, temperature=0.0)
    for only in ({"top_k": 1}, {"top_p": 1e-6}):
        assert (await drawn(sampler, start, **only)).tokens == greedy.tokens


async def test_a_stream_is_the_completion_in_parts(backend: Backend, trainer: Trainer) -> None:
    sampler, start = await trainer.publish(), prompt(backend)
    params = SamplingParams(max_tokens=10, seed=4)
    async with aclosing(sampler.stream(start, params)) as stream:  # type: ignore[type-var]
        chunks = [chunk async for chunk in stream]
    assert [chunk.stop_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]
    streamed = Completion.collect(chunks, params)
    whole = await drawn(sampler, start, max_tokens=10, seed=4)
    assert streamed.tokens == whole.tokens
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=backend.tolerance)


async def test_a_late_request_to_a_closed_sampler_is_served(
    backend: Backend, trainer: Trainer
) -> None:
    sampler, start = await trainer.publish(), prompt(backend)
    before = await drawn(sampler, start)
    await sampler.aclose()
    await sampler.aclose()
    late = await drawn(sampler, start)
    assert late.tokens == before.tokens
    assert await scored(sampler, start, late) == pytest.approx(late.logprobs, abs=backend.tolerance)


async def test_a_context_may_be_filled_and_not_overfilled(
    backend: Backend, trainer: Trainer
) -> None:
    sampler = await trainer.base()
    context = (await trainer.capabilities()).context_tokens
    full = await drawn(sampler, prompt(backend, context - 2), max_tokens=2)
    assert len(full.tokens) == 2
    for asking in (
        sampler.logprobs(prompt(backend, context + 1), start=1),
        drawn(sampler, prompt(backend, context - 4), max_tokens=5),
    ):
        with pytest.raises(RequestError) as refused:
            await asking
        assert refused.value.code == "context_length_exceeded"
    for start, tokens in (((), 1), (prompt(backend), 0)):
        with pytest.raises(ClawError):
            await drawn(sampler, start, max_tokens=tokens)
