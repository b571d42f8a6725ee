"""Fifty steps through a service that fails in every way it can: the same end as without.

The real learner, ledger, adapter, SDK and stand-in; two runs over the same samples, one of them
in trouble all the time. A step that fails is void and taken again from the committed state, so both
runs end with the same versions and the same weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.backends import VOCABULARY, start_local, start_tinker
from tests.support.faults import Fault
from tests.support.ledger import outcome, sql, step_counts
from tests.support.tinker import Served, served
from tests.support.waits import eventually
from tinker_claw.backends.tinker.trainer import TinkerTrainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Training
from tinker_claw.learner.health import Health
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import build
from tinker_claw.policy import PolicyHolder, Trainer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import Telemetry
from tinker_claw.turn_state import Reason
from tinker_claw.types import Completion, HintScores, Kind, SamplingParams, Vote

STEPS = 50
BATCH = 4
K = 4


@dataclass(frozen=True)
class Recorded:
    """A turn with its signal, sampled once and trained in both runs."""

    prompt: tuple[int, ...]
    done: Completion
    reward: Vote
    teacher: HintScores | None


async def record(trainer: Trainer, count: int) -> list[Recorded]:
    rng, base = random.Random(5), await trainer.base()
    turns: list[Recorded] = []
    for number in range(count):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(8, 30)))
        params = SamplingParams(max_tokens=rng.randrange(2, 8), seed=number, student_topk=K)
        (done,) = await base.sample(prompt, params)
        told = tuple(tuple(b + rng.uniform(-1, 1) for b in row) for row in done.topk_logprobs)
        teacher = HintScores("shorter", done.logprobs, told) if number % 3 == 0 else None
        turns.append(Recorded(prompt, done, rng.choice((-1, 1)), teacher))
    return turns


def enqueue(ledger: Ledger, turns: Sequence[Recorded]) -> None:
    session = ledger.turns.session("me", "soak")
    for turn in turns:
        turn_id = ledger.turns.add(
            outcome(
                session_id=session,
                kind=Kind.MAIN,
                kind_reason="test",
                policy_version=0,
                prompt=turn.prompt,
                completion=turn.done,
                hint_at=3,
                request_text="",
                reply_text="",
                history=(),
                reply_digest="",
            )
        )
        ledger.samples.add(turn_id, turn.reward, turn.teacher)


@dataclass(frozen=True)
class Ending:
    versions: list[tuple[int, int | None, int]]
    quarantined: list[int]
    counts: dict[str, int]
    trained_once: bool
    adapter: dict[str, np.ndarray]


async def soak(
    folder: Path,
    trainer: Trainer,
    turns: Sequence[Recorded],
    trouble: Served | None = None,
    steps: int = STEPS,
) -> Ending:
    ledger = Ledger(folder / "data")
    policy = PolicyHolder(await restore(ledger, trainer))
    enqueue(ledger, turns)
    cfg = Training(batch_size=BATCH, opd_topk=K, max_staleness=STEPS)
    telemetry = Telemetry(None)
    learner = Learner(
        LoopParts(
            ledger,
            trainer,
            await trainer.base(),
            build("combine"),
            policy,
            telemetry,
            Health(),
            Spending(Price(), ledger.spend, telemetry),
            cfg,
        ),
        learning_rate=1e-4,
        waits=Backoff(first_s=0.02, longest_s=0.2),
    )
    learning = asyncio.create_task(learner.run())
    if trouble is not None:
        await make_trouble(trouble, policy, learning)
    await until(lambda: policy.current.version.step >= steps, learning)
    learning.cancel()
    await trainer.export_adapter(folder / "adapter")
    rows = sql(ledger).rows("SELECT id, parent, step FROM versions ORDER BY id")
    doubles = sql(ledger).rows(
        "SELECT sample_id FROM step_samples JOIN steps ON steps.id = step_id "
        "WHERE status = 'committed' GROUP BY sample_id HAVING COUNT(*) > 1"
    )
    bad = sql(ledger).rows(
        "SELECT samples.id FROM samples JOIN turns ON turns.id = turn_id WHERE reason = ?",
        Reason.STEPS_FAILED,
    )
    ending = Ending(
        versions=[tuple(row) for row in rows],
        quarantined=[row["id"] for row in bad],
        counts=step_counts(ledger),
        trained_once=not doubles,
        adapter=load_file(folder / "adapter" / "adapter_model.safetensors"),
    )
    ledger.close()
    return ending


async def until(happened: Callable[[], bool], learning: asyncio.Task[None]) -> None:
    """Wait, and fail with the learner if it fails."""
    await eventually(lambda: happened() or learning.done(), 600)
    if learning.done():
        learning.result()


def troubles() -> list[list[Fault]]:
    """Every way of failing, each for a short while."""
    futures = ("ForwardBackward", "OptimStep", "SaveWeights", "SaveWeightsForSampler", "Sample")
    failing = [[Fault("retrieve_future", "fail", of=of, times=1)] for of in futures]
    hanging = [[Fault("retrieve_future", "again", of=of, times=50)] for of in futures[:4]]
    paths = ("forward_backward", "optim_step", "save_weights", "asample", "load_weights")
    down = [[Fault(path, status=503, times=1)] for path in paths]
    busy = [[Fault(path, status=429, times=1, lost=True)] for path in paths[:3]]
    return [
        *failing,
        *hanging,
        *down,
        *busy,
        [Fault("optim_step", status=402, times=1)],
        [Fault("forward_backward", status=404, times=1)],
        [Fault("retrieve_future", status=410, of="OptimStep", times=1)],
        [Fault("retrieve_future", "cut", times=2)],
    ]


async def make_trouble(there: Served, policy: PolicyHolder, learning: asyncio.Task[None]) -> None:
    """One trouble after the other, each on another step, and the server killed in between."""
    rng = random.Random(1)
    for number, faults in enumerate(rng.sample(troubles(), len(troubles()))):
        step = policy.current.version.step
        if number % 9 == 4:
            await asyncio.to_thread(there.restart)
        there.faulty.spoil(*faults)
        await until(lambda step=step: policy.current.version.step > step + 1, learning)


@pytest.mark.slow
# uvicorn leaves a connection that comes while it stops to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_fifty_steps_in_trouble_end_where_fifty_quiet_ones_end(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path)
    assert isinstance(trainer, TinkerTrainer)
    await trainer.capabilities()
    turns = await record(trainer, STEPS * BATCH)
    quiet = await soak(tmp_path / "quiet", trainer, turns)
    await trainer.aclose()

    limits = {"step_timeout_s": 2.0, "save_timeout_s": 6.0, "sample_timeout_s": 6.0}
    trainer = await start_tinker(tmp_path, **limits)
    troubled = await soak(tmp_path / "troubled", trainer, turns, served(tmp_path))
    await trainer.aclose()

    assert quiet.counts == {"intent": 0, "committed": STEPS, "void": 0}
    assert troubled.counts["committed"] == STEPS
    assert troubled.counts["void"] >= 10, "the faults did hit"
    assert troubled.versions == quiet.versions
    assert len(quiet.versions) == STEPS + 1
    assert quiet.trained_once
    assert troubled.trained_once
    worst = max(
        float(np.abs(troubled.adapter[name] - quiet.adapter[name]).max()) for name in quiet.adapter
    )
    assert worst < 1e-5, "the same weights"


async def test_learner_comes_to_the_same_versions_and_weights_on_both_backends(
    tmp_path: Path,
) -> None:
    remote = await start_tinker(tmp_path, alpha=8)
    local = await start_local(tmp_path, alpha=8)
    turns = await record(remote, 3 * BATCH)
    endings = [
        await soak(tmp_path / name, trainer, turns, steps=3)
        for name, trainer in (("r", remote), ("l", local))
    ]
    for trainer in (remote, local):
        await trainer.aclose()
    assert (
        endings[0].versions
        == endings[1].versions
        == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3)]
    )
    there, here = endings[0].adapter, endings[1].adapter
    assert max(float(np.abs(there[name] - here[name]).max()) for name in here) < 1e-5
