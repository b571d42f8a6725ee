"""The learner: sixteen samples, one optimizer step, one new policy version.

Rule: a step is intent row, train, save state, publish, one commit of step, samples and version,
swap. Until the commit nothing has happened: the samples are queued, the old policy serves, and a
restart loads the last committed state. Nothing here is awaited by the gateway. An outage blames no
sample and never ends learning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from tinker_claw.config import Training
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ClawError,
    OutageError,
    RequestError,
    StepError,
)
from tinker_claw.learner.health import Health
from tinker_claw.learner.metrics import step_metrics
from tinker_claw.learner.recovery import WAITS, Recovery
from tinker_claw.learner.scoring import batch_items
from tinker_claw.ledger import Ledger
from tinker_claw.methods import BatchItem, Method
from tinker_claw.outages import Backoff
from tinker_claw.policy import Policy, PolicyHolder, Sampler, Trainer
from tinker_claw.spending import Spending, step_usage
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Adam, LossPass, Sample, StepReport

FAILURES_BEFORE_BISECTING = 2
FAILURES_BEFORE_STOPPING = 4
"""Of one batch in which no single sample is to blame: by then it is no passing trouble."""
_FAILURES = (BackendError, AlignmentError, RequestError)
"""What a step can fail with: the backend, or a sample that does not fit it (any more)."""


@dataclass(frozen=True, slots=True)
class LearnerDeps:
    """What the learner needs."""

    ledger: Ledger
    trainer: Trainer
    base: Sampler
    method: Method
    policy: PolicyHolder
    telemetry: Telemetry
    health: Health
    spending: Spending
    cfg: Training
    learning_rate: float
    waits: Backoff = WAITS
    """Between attempts while the service is away."""


class Learner:
    """Turns queued samples into policy versions, one step at a time."""

    def __init__(self, deps: LearnerDeps) -> None:
        self._deps = deps
        self._wake = asyncio.Event()
        self._wake.set()
        self._adam = Adam(learning_rate=deps.learning_rate)
        self._retired: asyncio.Queue[Policy] = asyncio.Queue()
        self._recovery = Recovery(
            *(deps.ledger, deps.trainer, deps.policy, deps.health),
            waits=deps.waits,
            retire=self._retired.put_nowait,
        )

    def wake(self) -> None:
        """A sample has been queued."""
        self._wake.set()

    async def run(self) -> None:
        """Take a step whenever a batch is complete, until `max_steps` or cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._retire())
            while not self._finished():
                self._deps.health.learner_is("waiting")
                await self._wake.wait()
                self._wake.clear()
                while not self._finished() and (batch := self._batch()):
                    async with self._room(batch):
                        failed = await self._step(batch)
                    if failed:
                        await self._recover(batch, *failed)
            self._deps.health.learner_is("finished")

    def _finished(self) -> bool:
        limit = self._deps.cfg.max_steps
        return limit is not None and self._deps.policy.current.version.step >= limit

    def _batch(self) -> list[Sample] | None:
        """Exactly `batch_size` fresh samples, oldest first; None while there are fewer."""
        samples, cfg = self._deps.ledger.samples, self._deps.cfg
        step = self._deps.policy.current.version.step
        if expired := samples.expire(step, cfg.max_staleness):
            self._deps.telemetry.sample("expired", count=expired)
        waiting = samples.waiting()
        self._deps.telemetry.waiting(waiting)
        return samples.oldest(cfg.batch_size) if waiting >= cfg.batch_size else None

    def _room(self, samples: Sequence[Sample]) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for a step over these samples."""
        deps, version = self._deps, self._deps.policy.current.version.id
        return deps.spending.room_to_step(step_usage(samples, version, deps.method, deps.cfg))

    async def _step(self, batch: Sequence[Sample]) -> tuple[int, ClawError] | None:
        """One step, or a void one, with its failure, after which the same samples are queued."""
        deps = self._deps
        if not deps.health.backend.attempts("learning"):  # else it is the outage's next attempt
            deps.health.learner_is("training")
        step_id = deps.ledger.steps.begin(
            deps.policy.current.version.id, [sample.id for sample in batch]
        )
        try:
            with deps.health.backend.watching("learning"):
                await self._train_and_swap(step_id, batch)
        except _FAILURES as error:
            outage = isinstance(error, OutageError)
            deps.ledger.steps.void(step_id, str(error), outage=outage)
            deps.telemetry.step_void(step_id=step_id, error=str(error), outage=outage)
            return step_id, error
        return None

    async def _recover(self, batch: Sequence[Sample], step_id: int, error: ClawError) -> None:
        """Undo a failed step, and look for the sample that is to blame where one seems to be.

        Raises:
            ClawError: the batch fails again and again, and no sample of it is to blame.
        """
        await self._recovery.after(error)
        if isinstance(error, OutageError):
            return
        failures = self._deps.ledger.steps.failures([sample.id for sample in batch])
        if failures >= FAILURES_BEFORE_BISECTING:
            found = await self._quarantine_culprit(batch, step_id)
            if not found and failures >= FAILURES_BEFORE_STOPPING:
                raise error

    async def _train_and_swap(self, step_id: int, batch: Sequence[Sample]) -> None:
        deps, started = self._deps, time.monotonic()
        parent = deps.policy.current
        with deps.spending.paying("train", step_id=step_id) as account:
            items = await batch_items(batch, parent, deps.base, deps.cfg)
            passes, report = await self._train(items)
        step = parent.version.step + 1
        save = step % deps.cfg.save_interval == 0
        state_ref = await deps.trainer.save_state(f"step-{step_id:08d}") if save else None
        publishing = time.monotonic()
        sampler = await deps.trainer.publish()
        metrics = step_metrics(items, passes, report, parent.version.step)
        metrics |= deps.spending.figures(account.usage)
        version = deps.ledger.steps.commit(
            step_id, parent.version, state_ref=state_ref, sampler_ref=sampler.ref, metrics=metrics
        )
        self._retired.put_nowait(deps.policy.swap(Policy(version, sampler)))
        now = time.monotonic()
        deps.telemetry.step(
            seconds=publishing - started, step_id=step_id, step=step, version=version.id, **metrics
        )
        deps.telemetry.publish(version=version.id, step=step, seconds=now - publishing)

    async def _train(self, items: Sequence[BatchItem]) -> tuple[list[LossPass], StepReport]:
        passes = self._deps.method.passes(items, self._deps.cfg)
        if not passes:
            raise StepError("no sample of the batch carries a gradient")
        return passes, await self._deps.trainer.train_step(passes, self._adam)

    async def _quarantine_culprit(self, batch: Sequence[Sample], step_id: int) -> bool:
        """Halve the batch until one sample alone fails; that one is never trained.

        False: none fails alone, as when the trouble has passed meanwhile.
        """
        suspects = list(batch)
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            rest = suspects[len(suspects) // 2 :]
            suspects = half if await self._fails(half, step_id) else rest
        if not await self._fails(suspects, step_id):
            log.warning("step.no_culprit", step_id=step_id)
            return False
        culprit = suspects[0]
        self._deps.ledger.samples.quarantine(culprit.id)
        self._deps.telemetry.sample("quarantined", sample=culprit.id, turn=culprit.turn_id)
        return True

    async def _fails(self, samples: Sequence[Sample], step_id: int) -> bool:
        """Whether a step over these samples fails. An outage is no answer: it is waited out."""
        while True:
            failure: ClawError | None = None
            async with self._room(samples):
                try:
                    await self._rehearse(samples, step_id)
                except _FAILURES as error:
                    failure = error
            await self._recovery.after(failure)
            if not isinstance(failure, OutageError):
                return failure is not None

    async def _rehearse(self, samples: Sequence[Sample], step_id: int) -> None:
        """A step that is not committed, charged to the one that failed."""
        deps, policy = self._deps, self._deps.policy.current
        with (
            deps.health.backend.watching("learning"),
            deps.spending.paying("train", step_id=step_id),
        ):
            await self._train(await batch_items(samples, policy, deps.base, deps.cfg))

    async def _retire(self) -> None:
        """Close replaced samplers; each ends when the last reply that uses it has ended."""
        while True:
            policy = await self._retired.get()
            await policy.sampler.aclose()
