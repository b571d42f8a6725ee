"""Billing by the adapter: counted at the wire, request by request, as the service counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import CONTEXT
from tests.support.faults import Fault
from tests.support.gateways import gateway
from tests.support.tinker import served, start_tinker
from tests.support.tinker_dialects import Uncancelling
from tests.support.waits import eventually
from tinker_claw.billing.budget import Account, Spending
from tinker_claw.billing.prices import Price
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Trainer
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams, Usage, uncharged

PROMPT = tuple(range(40))


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Trainer]:
    made = await start_tinker(tmp_path)
    await made.capabilities()
    yield made
    await made.aclose()


async def test_votes_pay_the_prompt_once(trainer: Trainer) -> None:
    base = await trainer.base()
    account = Account(uncharged)
    votes = await base.sample(PROMPT, SamplingParams(max_tokens=5, seed=1), n=3, charge=account.add)
    sampled = sum(len(vote.tokens) for vote in votes)
    assert account.usage == Usage(prefill=40, cached=2 * 40, sampled=sampled)


async def test_prompt_that_the_service_has_in_its_cache_is_billed_as_cached(
    tmp_path: Path,
) -> None:
    trainer = await start_tinker(tmp_path)
    sampler = await trainer.publish()
    long = tuple(i % 60 for i in range(400))
    first = Account(uncharged)
    (done,) = await sampler.sample(long, SamplingParams(max_tokens=4, seed=1), charge=first.add)
    assert (first.usage.prefill, first.usage.cached) == (400, 0)
    second = Account(uncharged)
    (again,) = await sampler.sample(
        (*long, *done.tokens, 7), SamplingParams(max_tokens=4, seed=1), charge=second.add
    )
    assert again.cached_tokens == second.usage.cached > 300
    assert second.usage.prefill + second.usage.cached == 405
    await trainer.aclose()


async def test_cancelled_request_ends_at_the_service(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path)
    there, sampler = served(tmp_path), await trainer.publish()
    params = SamplingParams(max_tokens=CONTEXT - len(PROMPT), seed=1)
    account = Account(uncharged)
    asked = asyncio.create_task(anext(sampler.stream(PROMPT, params, account.add)))
    await eventually(lambda: there.server.held_requests == 1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await eventually(lambda: there.faulty.seen["cancel_future"] == 1)
    await eventually(lambda: there.server.held_requests == 0)
    assert account.usage == Usage(prefill=40)
    (done,) = await sampler.sample(PROMPT, SamplingParams(max_tokens=4, seed=1), charge=account.add)
    assert account.usage.sampled == len(done.tokens)
    await trainer.aclose()


@pytest.mark.parametrize("cancels", [True, False])
async def test_client_that_hangs_up_pays_what_the_service_sampled(
    tmp_path: Path, renderer: Renderer, cancels: bool
) -> None:
    """In the ledger, without a turn: no token of the reply came."""
    options = {"root": tmp_path / "served", "model": "demo"}
    there = served(tmp_path, **options, **({} if cancels else {"speaking": Uncancelling()}))
    trainer = await start_tinker(tmp_path)
    sampler: Any = await trainer.publish()
    there.faulty.seen.clear()
    there.faulty.spoil(Fault("retrieve_future", "again", of="Sample"))

    def spending(ledger: Ledger) -> Spending:
        return Spending(Price(1.0, 0.2, 2.0, 3.0), ledger.spend, Telemetry(None))

    async with gateway(tmp_path / "data", renderer, sampler, spending=spending) as world:
        asking = asyncio.create_task(world.ask("hi", max_tokens=5))
        await eventually(lambda: there.faulty.seen["retrieve_future"] > 1)
        asking.cancel()
        await eventually(lambda: world.ledger.spend.total().usage.prefill > 0)
        assert world.ledger.spend.total().usage.sampled == 0
        there.faulty.behave()
        if cancels:
            await eventually(lambda: there.faulty.seen["cancel_future"] == 1)
        else:
            await eventually(lambda: world.ledger.spend.total().usage.sampled > 0)
            assert there.faulty.seen["cancel_future"] == 0
        assert world.turns() == []
    await trainer.aclose()


async def test_scores_are_a_prefill_and_one_token(trainer: Trainer) -> None:
    base = await trainer.base()
    account = Account(uncharged)
    await base.logprobs(PROMPT, start=30, targets=[(1, 2)] * 10, charge=account.add)
    assert account.usage.prefill + account.usage.cached == 40
    assert account.usage.sampled == 1


async def test_step_bills_the_tokens_of_every_pass(trainer: Trainer) -> None:
    rl = Datum(PROMPT, 35, logprobs=(-1.0,) * 5, advantages=(0.1,) * 5)
    told = Datum(PROMPT, 35, targets=((1, 2),) * 5, weights=((0.1, -0.1),) * 5)
    account = Account(uncharged)
    report = await trainer.train_step(
        [LossPass("ppo", (rl, rl)), LossPass("cross_entropy", (told,))],
        Adam(learning_rate=1e-3),
        account.add,
    )
    assert account.usage == Usage(trained=3 * 39)
    assert report.tokens == account.usage.trained
