"""The Tinker backend when the service fails: the real SDK against a server that misbehaves.

What is tested is the promise behind each case: no half step is ever built upon, sampling goes on,
and an outage is told apart from a batch that is at fault.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tinker import RestClient

from tests.support.faults import Fault
from tests.support.tinker import KEY, Served, served, start_tinker
from tests.support.tinker_dialects import Delisted
from tinker_claw.backends.tinker import session
from tinker_claw.backends.tinker.trainer import TinkerTrainer
from tinker_claw.billing.budget import Account
from tinker_claw.errors import (
    BackendError,
    LearningEndedError,
    OutageError,
    SamplerError,
    StepError,
)
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams, Usage, uncharged

ADAM = Adam(learning_rate=0.01)
PROMPT = tuple(range(1, 30))
PARAMS = SamplingParams(max_tokens=6, seed=1)


@dataclass
class Run:
    """A trainer one step away from its committed state."""

    trainer: TinkerTrainer
    there: Served
    passes: list[LossPass]
    committed: str
    done: Completion
    short_s: int
    """Seconds longer than a step without trouble takes on this machine now."""

    def limit(self, **settings: float) -> None:
        """Limit the time of later calls only, as starting takes long on a busy machine."""
        self.trainer._limits = replace(self.trainer._limits, **settings)

    def spoil(self, *faults: Fault) -> None:
        self.there.faulty.spoil(*faults)

    def behave(self) -> None:
        self.there.faulty.behave()
        self.limit(step_timeout_s=120)

    async def score(self) -> tuple[float, ...]:
        """Score the reply under the present weights."""
        sampler = await self.trainer.publish()
        tokens = PROMPT + self.done.tokens
        return (await sampler.logprobs(tokens, start=len(PROMPT))).logprobs


async def begin(folder: Path, **settings: Any) -> Run:
    """Start a run, with more time than a busy machine takes, unless told otherwise."""
    began = time.monotonic()
    patient = {"step_timeout_s": 120, "save_timeout_s": 120, "sample_timeout_s": 120}
    trainer = await start_tinker(folder, **(patient | settings))
    assert isinstance(trainer, TinkerTrainer)
    await trainer.capabilities()
    (done,) = await (await trainer.publish()).sample(PROMPT, PARAMS)
    tokens, rows = PROMPT + done.tokens, len(done.tokens)
    rl = Datum(tokens, len(PROMPT), logprobs=done.logprobs, advantages=(0.1,) * rows)
    told = Datum(tokens, len(PROMPT), targets=((1, 2),) * rows, weights=((0.1, -0.1),) * rows)
    passes = [LossPass("ppo", (rl,)), LossPass("cross_entropy", (told,))]
    committed = await trainer.save_state("committed")
    short_s = max(2, math.ceil(2 * (time.monotonic() - began)))
    return Run(trainer, served(folder), passes, committed, done, short_s)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = await begin(tmp_path)
    yield made
    made.behave()
    await made.trainer.aclose()


async def recovers(run: Run) -> None:
    """Check that the suspect weights are not used, and that all goes well from the committed
    state."""
    run.behave()
    for attempt in (
        run.trainer.train_step(run.passes, ADAM),
        run.trainer.publish(),
        run.trainer.save_state("suspect"),
    ):
        with pytest.raises(StepError, match="suspect; load a committed state"):
            await attempt
    await run.trainer.load_state(run.committed)
    assert await run.score() == pytest.approx(run.done.logprobs, abs=1e-5), "as before the step"
    await run.trainer.train_step(run.passes, ADAM)
    assert await run.score() != pytest.approx(run.done.logprobs, abs=1e-5), "and it learns again"


FUTURES = [("ForwardBackward", 0), ("ForwardBackward", 1), ("OptimStep", 0)]
NAMES = ["forward_backward 1 (ppo)", "forward_backward 2 (cross_entropy)", "optim_step"]
EACH = list(zip(FUTURES, NAMES, strict=True))


@pytest.mark.parametrize(("future", "name"), EACH, ids=NAMES)
@pytest.mark.parametrize("how", ["fail", "hang", pytest.param("again", marks=pytest.mark.slow)])
async def test_each_future_that_fails_or_is_late_voids_the_step_and_is_named(
    run: Run, future: tuple[str, int], name: str, how: Any
) -> None:
    says = "the test says so"
    if how != "fail":
        run.limit(step_timeout_s=run.short_s)
        says = f"nothing came back within {run.short_s} s"
    run.spoil(Fault("retrieve_future", how, of=future[0], number=future[1]))
    with pytest.raises((StepError, OutageError), match=re.escape(f"{name}: {says}")) as caught:
        await run.trainer.train_step(run.passes, ADAM)
    assert isinstance(caught.value, OutageError) == (how != "fail")
    await recovers(run)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("retrieve_future", 429),
        ("forward_backward", 503),
        ("optim_step", 429),
    ],
)
async def test_status_for_ever_is_an_outage_after_our_deadline(
    run: Run, path: str, status: int
) -> None:
    run.limit(step_timeout_s=run.short_s)
    run.spoil(Fault(path, status=status))
    with pytest.raises(OutageError, match=f"nothing came back within {run.short_s} s"):
        await run.trainer.train_step(run.passes, ADAM)
    await recovers(run)


@pytest.mark.slow
async def test_outage_says_what_a_plain_question_is_answered(run: Run) -> None:
    run.limit(step_timeout_s=run.short_s)
    run.spoil(Fault("optim_step"), Fault("get_server_capabilities", status=503))
    with pytest.raises(OutageError, match="it answers HTTP 503"):
        await run.trainer.train_step(run.passes, ADAM)
    run.spoil(Fault("optim_step"), Fault("get_server_capabilities", status=401))
    await run.trainer.load_state(run.committed)
    with pytest.raises(OutageError, match=r"refuses the key .* check TINKER_API_KEY"):
        await run.trainer.train_step(run.passes, ADAM)


@pytest.mark.parametrize("path", ["retrieve_future", "optim_step"])
async def test_missing_credit_is_told_at_once_not_after_an_hour(tmp_path: Path, path: str) -> None:
    run = await begin(tmp_path, step_timeout_s=3600)
    run.spoil(Fault(path, status=402))
    async with asyncio.timeout(240):
        with pytest.raises(OutageError, match="billing is not in order"):
            await run.trainer.train_step(run.passes, ADAM)
    await recovers(run)
    await run.trainer.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("status", [408, 429, 500])
async def test_short_trouble_is_ridden_out_by_the_sdk_and_nothing_is_done_twice(
    tmp_path: Path, status: int
) -> None:
    run = await begin(tmp_path)
    await run.trainer.train_step(run.passes, ADAM)
    expected = await run.score()
    await run.trainer.load_state(run.committed)
    run.spoil(
        Fault("forward_backward", status=status, times=1),
        Fault("optim_step", status=status, times=1, lost=True),
        Fault("retrieve_future", status=status, times=2),
    )
    await run.trainer.train_step(run.passes, ADAM)
    assert await run.score() == pytest.approx(expected, abs=1e-6)
    await run.trainer.aclose()


async def test_connection_that_breaks_off_is_ridden_out(tmp_path: Path) -> None:
    run = await begin(tmp_path)
    run.spoil(Fault("retrieve_future", "cut", times=2), Fault("optim_step", "cut", times=1))
    await run.trainer.train_step(run.passes, ADAM)
    run.behave()
    assert await run.score() != pytest.approx(run.done.logprobs, abs=1e-5)
    await run.trainer.aclose()


async def test_restarted_server_is_a_lost_session_for_training_and_nothing_for_serving(
    run: Run,
) -> None:
    serving = await run.trainer.publish()
    base = await run.trainer.base()
    await base.sample(PROMPT, PARAMS)
    await asyncio.to_thread(run.there.restart)
    for sampler in (serving, base):
        (again,) = await sampler.sample(PROMPT, PARAMS)
        assert again.tokens == run.done.tokens
    account = Account(uncharged)
    with pytest.raises(OutageError):
        await run.trainer.train_step(run.passes, ADAM, account.add)
    assert account.usage == Usage(), "what nobody computed is not billed"
    await recovers(run)


@pytest.mark.parametrize(
    ("how", "category", "away"),
    [("fail", "user", False), ("fail", "server", True), ("again", "", True)],
)
async def test_publishing_that_fails_leaves_the_old_sampler_answering(
    tmp_path: Path, how: Any, category: str, away: bool
) -> None:
    run = await begin(tmp_path)
    serving = await run.trainer.publish()
    await run.trainer.train_step(run.passes, ADAM)
    run.limit(save_timeout_s=run.short_s)
    run.spoil(Fault("retrieve_future", how, of="SaveWeightsForSampler", category=category))
    with pytest.raises(BackendError) as caught:
        await run.trainer.publish()
    assert isinstance(caught.value, OutageError) == away
    (again,) = await serving.sample(PROMPT, PARAMS)
    assert again.tokens == run.done.tokens
    await run.trainer.aclose()


@pytest.mark.slow
async def test_sampler_that_hangs_is_an_outage_and_one_that_fails_is_not(tmp_path: Path) -> None:
    run = await begin(tmp_path)
    run.limit(sample_timeout_s=run.short_s)
    sampler = await run.trainer.publish()
    run.spoil(Fault("retrieve_future", "again", of="Sample"))
    account = Account(uncharged)
    with pytest.raises(OutageError, match="nothing came back"):
        await sampler.sample(PROMPT, PARAMS, charge=account.add)
    assert account.usage == Usage(), "what nobody computed is not billed"
    with pytest.raises(OutageError):
        await sampler.logprobs(PROMPT, start=5)
    run.spoil(Fault("retrieve_future", "fail", of="Sample"))
    with pytest.raises(SamplerError, match="the test says so"):
        await sampler.sample(PROMPT, PARAMS)
    run.behave()
    (again,) = await sampler.sample(PROMPT, PARAMS)
    assert again.tokens == run.done.tokens
    await run.trainer.aclose()


async def test_sampler_that_was_deleted_at_the_service_is_no_outage(tmp_path: Path) -> None:
    run = await begin(tmp_path)
    sampler = await run.trainer.publish()
    client = RestClient(base_url=run.there.url, api_key=KEY)
    await client.delete_checkpoint_from_tinker_path(sampler.ref)
    await asyncio.to_thread(run.there.restart)
    # Another version stands in for what a sampler could not do.
    with pytest.raises(SamplerError, match="no longer has the sampler") as caught:
        await sampler.sample(PROMPT, PARAMS)
    assert not isinstance(caught.value, OutageError)
    again = await (await run.trainer.base()).sample(PROMPT, PARAMS)
    assert again[0].tokens == run.done.tokens, "the others go on"
    await run.trainer.aclose()


async def test_model_that_the_service_trains_no_more_ends_learning_with_what_to_do(
    tmp_path: Path,
) -> None:
    line_up = Delisted()
    run = await begin(tmp_path, server={"speaking": line_up})
    line_up.gone = True
    run.spoil(Fault("retrieve_future", "fail", of="ForwardBackward", number=0))
    with pytest.raises(LearningEndedError, match=r"does not train tiny any more: .*export"):
        await run.trainer.train_step(run.passes, ADAM)
    await run.trainer.aclose()


async def test_batch_at_fault_is_no_outage(run: Run) -> None:
    rows = len(run.done.tokens)
    tokens = PROMPT + run.done.tokens
    bad = Datum(tokens, len(PROMPT), targets=((99_999, 1),) * rows, weights=((1.0, 1.0),) * rows)
    with pytest.raises(StepError, match=r"outside 0\.\.63") as caught:
        await run.trainer.train_step([LossPass("cross_entropy", (bad,))], ADAM)
    assert not isinstance(caught.value, OutageError)
    await recovers(run)


async def test_cancelled_step_leaves_suspect_weights(run: Run) -> None:
    run.spoil(Fault("retrieve_future", "hang", of="OptimStep"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await run.trainer.train_step(run.passes, ADAM)
    await recovers(run)


@pytest.mark.slow
async def test_service_that_is_gone_is_noticed_long_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await begin(tmp_path, step_timeout_s=600, sample_timeout_s=600)
    sampler = await run.trainer.publish()
    monkeypatch.setattr(session, "QUESTION_S", 0.2)
    await asyncio.to_thread(run.there.stop)
    async with asyncio.timeout(200):
        with pytest.raises(OutageError, match="cannot be reached"):
            await sampler.sample(PROMPT, PARAMS)
        with pytest.raises(OutageError, match="cannot be reached"):
            await run.trainer.train_step(run.passes, ADAM)
    monkeypatch.undo()
    async with asyncio.timeout(60):  # it is known to be away: the next request is told at once
        with pytest.raises(OutageError, match="cannot be reached"):
            await sampler.sample(PROMPT, PARAMS)
    await run.trainer.aclose()


async def test_slow_service_that_is_there_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await begin(tmp_path)
    monkeypatch.setattr(session, "QUESTION_S", 0.2)
    run.spoil(Fault("retrieve_future", "again", of="OptimStep", times=60))
    await run.trainer.train_step(run.passes, ADAM)
    await run.trainer.aclose()
