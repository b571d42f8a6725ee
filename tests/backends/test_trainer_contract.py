"""Contract of every trainer and sampler, whatever the backend.

Written against the Protocols alone. A backend joins by an entry in `backends.BACKENDS`; its numbers
are the subject of `test_step_contract` and `test_sampler_contract`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.backends import Backend
from tests.support.contract import ADAM, drawn, prompt, rl_pass, scored
from tinker_claw.errors import AlignmentError, BackendError
from tinker_claw.policy import Trainer
from tinker_claw.types import Completion, Datum, LossPass, SamplingParams, StopReason


async def test_a_completion_has_a_logprob_per_token_and_a_reason(
    backend: Backend, trainer: Trainer
) -> None:
    completion = await drawn(await trainer.publish(), prompt(backend), max_tokens=12)
    assert len(completion.tokens) == len(completion.logprobs) == 12
    assert completion.stop_reason is StopReason.LENGTH
    assert all(0 <= token < backend.vocabulary for token in completion.tokens)


async def test_a_stop_token_ends_the_completion_and_belongs_to_it(
    backend: Backend, trainer: Trainer
) -> None:
    sampler = await trainer.publish()
    free = await drawn(sampler, prompt(backend), max_tokens=12)
    stop = free.tokens[4]
    stopped = await drawn(sampler, prompt(backend), max_tokens=12, stop_tokens=(stop,))
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def test_sampler_and_trainer_agree_on_logprobs_before_and_after_an_update(
    backend: Backend, trainer: Trainer
) -> None:
    start = prompt(backend)
    for _ in range(2):
        sampler = await trainer.publish()
        completion = await drawn(sampler, start)
        report = await trainer.train_step([rl_pass(start, completion)], ADAM)
        assert report.logprobs[0][0] == pytest.approx(completion.logprobs, abs=backend.tolerance)
        assert await scored(sampler, start, completion) == pytest.approx(
            completion.logprobs, abs=backend.tolerance
        )


async def test_a_published_sampler_never_changes(backend: Backend, trainer: Trainer) -> None:
    start = prompt(backend)
    sampler = await trainer.publish()
    completion = await drawn(sampler, start)
    first = await scored(sampler, start, completion)
    await trainer.train_step([rl_pass(start, completion)], ADAM)
    assert await scored(sampler, start, completion) == first
    assert await scored(await trainer.open(sampler.ref), start, completion) == first
    base = await trainer.base()
    assert await scored(base, start, completion) == pytest.approx(first, abs=backend.tolerance)


async def test_the_report_says_what_was_done(backend: Backend, trainer: Trainer) -> None:
    start = prompt(backend)
    completion = await drawn(await trainer.publish(), start)
    rl = rl_pass(start, completion)
    entropy = LossPass("cross_entropy", (Datum(rl.datums[0].tokens, 1, weights=((0.01,),) * 61),))
    report = await trainer.train_step([rl, entropy], ADAM)
    # At ratio 1 the ppo loss is minus the sum of the advantages.
    assert report.losses[0] == pytest.approx(-0.05 * 12, abs=1e-3)
    assert report.losses[1] == pytest.approx(-0.01 * sum(report.logprobs[1][0]), abs=1e-3)
    assert [len(rows[0]) for rows in report.logprobs] == [12, 61]
    assert report.logprobs[1][0][-12:] == pytest.approx(report.logprobs[0][0], abs=1e-4)
    assert report.grad_norm is None or report.grad_norm > 0
    assert report.tokens == 2 * 61


async def test_samplers_report_the_candidates_that_they_promise(
    backend: Backend, trainer: Trainer
) -> None:
    sampler = await trainer.publish()
    start = prompt(backend)
    completion = await drawn(sampler, start, student_topk=3)
    read = await sampler.logprobs((*start, *completion.tokens), start=len(start), top_k=3)
    assert completion.topk_ids == read.topk_ids
    for got, expected in zip(completion.topk_logprobs, read.topk_logprobs, strict=True):
        assert got == pytest.approx(expected, abs=backend.tolerance)


async def test_n_completions_of_one_prompt(backend: Backend, trainer: Trainer) -> None:
    sampler = await trainer.base()
    start = prompt(backend)
    params = SamplingParams(max_tokens=8, seed=3)
    completions = await sampler.sample(start, params, n=4)
    assert len(completions) == 4
    assert len({c.tokens for c in completions}) == 4
    for completion in completions:
        assert await scored(sampler, start, completion) == pytest.approx(
            completion.logprobs, abs=backend.tolerance
        )


async def test_a_saved_state_continues_as_if_nothing_had_happened(
    backend: Backend, trainer: Trainer, tmp_path: Path
) -> None:
    start = prompt(backend)
    completion = await drawn(await trainer.publish(), start)
    step = rl_pass(start, completion)
    back = rl_pass(start, completion, advantage=-0.02)  # so that the moments decide where it goes
    for _ in range(2):
        await trainer.train_step([step], ADAM)
    ref = await trainer.save_state("after two")
    await trainer.train_step([back], ADAM)
    expected = await scored(await trainer.publish(), start, completion)
    again = await backend.start(tmp_path)
    try:
        for fresh in (again, trainer):
            await fresh.load_state(ref)
            await fresh.train_step([back], ADAM)
            got = await scored(await fresh.publish(), start, completion)
            assert got == pytest.approx(expected, abs=1e-6)
    finally:
        await again.aclose()


async def test_a_sampler_outlives_its_process(
    backend: Backend, trainer: Trainer, tmp_path: Path
) -> None:
    start = prompt(backend)
    completion = await drawn(await trainer.publish(), start)
    await trainer.train_step([rl_pass(start, completion)], ADAM)
    published = await trainer.publish()
    expected = await scored(published, start, completion)
    again = await backend.start(tmp_path)
    try:
        opened = await again.open(published.ref)
        assert opened.ref == published.ref
        assert await scored(opened, start, completion) == pytest.approx(expected, abs=1e-6)
    finally:
        await again.aclose()


@pytest.mark.parametrize("ref", ["", "nothing", "../run", "/etc"])
async def test_an_unknown_ref_is_a_sentence(trainer: Trainer, ref: str) -> None:
    with pytest.raises(BackendError, match=r"\.$"):
        await trainer.open(ref)
    with pytest.raises(BackendError, match=r"\.$"):
        await trainer.load_state(ref)


async def test_closing_a_stream_leaves_the_others_alone(backend: Backend, trainer: Trainer) -> None:
    sampler = await trainer.publish()
    start = prompt(backend)
    params = SamplingParams(max_tokens=30, seed=2)
    alone = await drawn(sampler, start, max_tokens=30, seed=2)

    async def abandoned() -> None:
        stream = sampler.stream(prompt(backend, salt=9), params)
        async with aclosing(stream):  # type: ignore[type-var]
            async for _ in stream:
                return

    async with asyncio.TaskGroup() as group:
        kept = group.create_task(sampler.sample(start, params))
        for _ in range(3):
            group.create_task(abandoned())
    assert kept.result()[0].tokens == alone.tokens
    assert await scored(sampler, start, kept.result()[0]) == pytest.approx(
        kept.result()[0].logprobs, abs=backend.tolerance
    )


async def test_a_closed_sampler_finishes_what_is_in_flight(
    backend: Backend, trainer: Trainer
) -> None:
    sampler = await trainer.publish()
    start = prompt(backend)
    stream = sampler.stream(start, SamplingParams(max_tokens=40, seed=1))
    chunks = [await anext(stream)]
    async with asyncio.TaskGroup() as group:
        closing = group.create_task(sampler.aclose())
        chunks += [chunk async for chunk in stream]
    assert closing.done()
    completion = Completion.collect(chunks, SamplingParams(max_tokens=40))
    assert len(completion.tokens) == 40
    opened = await trainer.open(sampler.ref)
    assert await scored(opened, start, completion) == pytest.approx(
        completion.logprobs, abs=backend.tolerance
    )


async def test_scores_are_never_padded(backend: Backend, trainer: Trainer) -> None:
    sampler = await trainer.base()
    tokens = prompt(backend, 10)
    for start in (0, 10):
        with pytest.raises(AlignmentError):
            await sampler.logprobs(tokens, start=start)
    with pytest.raises(AlignmentError):
        await sampler.logprobs(tokens, start=5, targets=[(1,)])
