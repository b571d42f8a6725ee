"""The learner: sixteen samples, one optimizer step, one new policy version.

Rule: a step is intent row, train, save state, publish, one commit of step, samples and version,
swap. Until the commit nothing has happened: the samples are queued, the old policy serves, and a
restart loads the last committed state. Nothing here is awaited by the gateway. An outage blames no
sample and never ends learning, and neither does a ledger that cannot be written for a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

from tinker_claw.billing.budget import Spending
from tinker_claw.billing.estimate import step_usage
from tinker_claw.config.settings import Training
from tinker_claw.errors import (
    ClawError,
    DisagreementError,
    LearningEndedError,
    LedgerError,
    OutageError,
    StepError,
)
from tinker_claw.learner.diagnostics import Alarm, agreement, step_metrics, step_rule
from tinker_claw.learner.health import Health
from tinker_claw.learner.recovery import (
    FAILURES,
    WAITS,
    Recovery,
    accidents_are_failures,
    as_outage,
    known_good,
    nobody_to_blame,
    waiting_for_the_ledger,
)
from tinker_claw.learner.scoring import batch_items
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import SampleTable
from tinker_claw.methods.base import Method
from tinker_claw.methods.passes import BatchItem
from tinker_claw.policy import Policy, PolicyHolder, Sampler, Trainer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Adam, LossPass, Sample, StepReport

FAILURES_BEFORE_BISECTING = 2
FAILURES_BEFORE_STOPPING = 4
"""Of one batch in which no single sample is to blame: by then it is no passing trouble."""


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
    observing: Observing | None = None
    """Is told of the queue instead of a step being taken; None: steps are taken."""
    score_fresh: bool = False
    """See `Capabilities`."""


class Learner:
    """Turns queued samples into policy versions, one step at a time."""

    def __init__(self, deps: LearnerDeps) -> None:
        self._deps = deps
        self._wake = asyncio.Event()
        self._finishing = False
        self.suspect = False
        """The trainer's weights are not those of the newest version."""
        self._step_at_a_time = asyncio.Lock()
        self._holds = 0
        """How often steps were held off."""
        self.stepping = False
        """A step is in hand."""
        self._adam = Adam(learning_rate=deps.learning_rate)
        self._retired: asyncio.Queue[Policy] = asyncio.Queue()
        self._alarm = Alarm(deps.health)
        self._recovery = Recovery(
            *(deps.ledger, deps.trainer, deps.policy, deps.health),
            waits=deps.waits,
            retire=self.retire,
        )

    def wake(self) -> None:
        """A sample has been queued."""
        self._wake.set()

    async def run(self) -> None:
        """Take a step whenever a batch is complete, until `finish` or cancelled.

        May be called again after it has ended by accident.
        """
        self._wake.set()
        async with asyncio.TaskGroup() as group:
            retiring = group.create_task(self._retire())
            while not self._finishing:
                self._deps.health.learner_is("observing" if self._deps.observing else "waiting")
                await self._wake.wait()
                self._wake.clear()
                while not self._finishing and (batch := await self._next()):
                    await self._take(batch)
            self._deps.health.learner_is("finished")
            retiring.cancel()

    @asynccontextmanager
    async def between_steps(self) -> AsyncGenerator[None]:
        """Hold further steps off, once the one in hand has ended; the next batch is taken anew."""
        async with self._step_at_a_time:
            try:
                yield
            finally:
                self._holds += 1
                self.wake()

    def retire(self, policy: Policy) -> None:
        """Close a policy's sampler when the last reply that uses it has ended."""
        self._retired.put_nowait(policy)

    def finish(self) -> None:
        """Begin no further step; `run` returns after the one in hand."""
        self._finishing = True
        self._wake.set()

    async def save(self) -> None:
        """Save the state that serves, where its step did not (`save_interval` above 1).

        Raises:
            BackendError, LedgerError: it cannot be saved; a restart voids the steps since the last.
        """
        version = self._deps.policy.newest.version
        if version.state_ref is None and not self.suspect:
            state_ref = await self._deps.trainer.save_state(f"version-{version.id:08d}")
            self._deps.ledger.steps.save(version, state_ref)
            log.info("state.saved", version=version.id)

    async def _next(self) -> list[Sample] | None:
        """The next batch, as soon as the ledger can be written."""
        while True:
            try:
                return self._batch()
            except LedgerError as error:
                outage = as_outage(error)
                self._deps.health.backend.seen("learning", outage)
                await self._recovery.after(outage)

    def _batch(self) -> list[Sample] | None:
        """Exactly `batch_size` fresh samples, oldest first; None while there are fewer."""
        samples, cfg = self._deps.ledger.samples, self._deps.cfg
        step = self._deps.policy.newest.version.step
        if expired := samples.expire(step, cfg.max_staleness):
            self._deps.telemetry.sample("expired", count=expired)
        waiting = samples.waiting()
        self._deps.telemetry.waiting(waiting)
        if self._deps.observing is not None:
            self._deps.observing.look(waiting)
            return None
        return samples.oldest(cfg.batch_size) if waiting >= cfg.batch_size else None

    def _room(self, samples: Sequence[Sample]) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for a step over these samples."""
        deps, version = self._deps, self._deps.policy.newest.version.id
        return deps.spending.room_to_step(step_usage(samples, version, deps.method, deps.cfg))

    async def _take(self, batch: Sequence[Sample]) -> None:
        """Take a step, unless the batch is another one by the time that there is room for it."""
        holds, failed = self._holds, None
        async with self._room(batch), self._step_at_a_time:
            if self.suspect:
                await self._restored(None)
            elif holds == self._holds:
                failed = await self._step(batch)
        if failed:
            async with self._step_at_a_time:
                await self._recover(batch, *failed)

    async def _step(self, batch: Sequence[Sample]) -> tuple[int, ClawError] | None:
        """One step, or a void one, with its failure, after which the same samples are queued."""
        deps, self.stepping = self._deps, True
        if not deps.health.backend.attempts("learning"):  # else it is the outage's next attempt
            deps.health.learner_is("training")
        step_id = 0  # of no step
        try:
            with deps.health.backend.watching("learning"), waiting_for_the_ledger():
                step_id = deps.ledger.steps.begin(
                    deps.policy.newest.version.id, [sample.id for sample in batch]
                )
                await self._train_and_swap(step_id, batch)
        except asyncio.CancelledError:
            self._void(step_id, "the gateway was stopped", outage=True)
            raise
        except DisagreementError as error:  # no sample is to blame, and trying again is no use
            self._void(step_id, str(error), outage=True)
            raise
        except FAILURES as error:
            self._void(step_id, str(error), outage=isinstance(error, OutageError))
            return step_id, error
        except Exception as error:  # behind the training: learning ends, and starts again
            self._void(step_id, f"{type(error).__name__}: {error}", outage=False)
            raise
        finally:
            self.stepping = False
        return None

    def _void(self, step_id: int, error: str, *, outage: bool) -> None:
        with suppress(LedgerError):  # the next step or start does it
            self._deps.ledger.steps.void(step_id, error, outage=outage)
        self._deps.telemetry.step_void(step_id=step_id, error=error, outage=outage)

    async def _recover(self, batch: Sequence[Sample], step_id: int, error: ClawError) -> None:
        """Undo a failed step, and look for the sample that is to blame where one seems to be.

        Raises:
            LearningEndedError: the batch fails again and again, and neither a sample nor the
                trainer alone is to blame.
        """
        await self._restored(error)
        if isinstance(error, OutageError):
            return
        failures = self._deps.ledger.steps.failures([sample.id for sample in batch])
        if failures >= FAILURES_BEFORE_BISECTING and await self._works(step_id):
            found = await self._quarantine_culprit(batch, step_id)
            if not found and failures >= FAILURES_BEFORE_STOPPING:
                raise LearningEndedError(
                    f"A step over the same samples failed {failures} times, and no single one of "
                    f"them is to blame: {error}"
                ) from error

    async def _train_and_swap(self, step_id: int, batch: Sequence[Sample]) -> None:
        deps, started = self._deps, time.monotonic()
        parent = deps.policy.newest
        with (
            deps.spending.paying("train", step_id=step_id) as account,
            accidents_are_failures(),
        ):
            items = await self._items(batch, parent)
            passes, report = await self._train(items)
        agreed = agreement(items, passes, report, parent.version.id)
        self._alarm.admit(agreed)
        step = parent.version.step + 1
        save = step % deps.cfg.save_interval == 0
        state_ref = await deps.trainer.save_state(f"step-{step_id:08d}") if save else None
        publishing = time.monotonic()
        sampler = await deps.trainer.publish()
        metrics = step_metrics(items, passes, report, parent.version.step, agreed)
        metrics |= deps.spending.figures(account.usage)
        try:
            version = deps.ledger.steps.commit(
                step_id,
                parent.version,
                state_ref=state_ref,
                sampler_ref=sampler.ref,
                metrics=metrics | {"rule": step_rule(deps.method.name, deps.cfg)},
            )
        except LedgerError:  # the next attempt publishes anew
            await sampler.aclose()
            raise
        self.retire(deps.policy.swap(Policy(version, sampler)))
        self.suspect = False
        self._alarm.committed(agreed, step_id)
        now = time.monotonic()
        deps.telemetry.step(
            seconds=publishing - started, step_id=step_id, step=step, version=version.id, **metrics
        )
        deps.telemetry.publish(version=version.id, step=step, seconds=now - publishing)

    async def _items(self, samples: Sequence[Sample], policy: Policy) -> list[BatchItem]:
        deps = self._deps
        return await batch_items(samples, policy, deps.base, deps.cfg, score_fresh=deps.score_fresh)

    async def _train(self, items: Sequence[BatchItem]) -> tuple[list[LossPass], StepReport]:
        passes = self._deps.method.passes(items, self._deps.cfg)
        if not passes:
            raise StepError("no sample of the batch carries a gradient")
        self.suspect = True
        return passes, await self._deps.trainer.train_step(passes, self._adam)

    async def _quarantine_culprit(self, batch: Sequence[Sample], step_id: int) -> bool:
        """Halve the batch until one sample alone fails; that one is never trained.

        It is blamed only if right afterwards a step succeeds that cannot be at fault: the trainer
        might have begun to fail meanwhile.

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
        if not await self._works(step_id):
            return True
        self._deps.ledger.samples.quarantine(culprit.id)
        self._deps.telemetry.sample("quarantined", sample=culprit.id, turn=culprit.turn_id)
        return True

    async def _fails(self, samples: Sequence[Sample], step_id: int) -> bool:
        """Whether a step over these samples fails. An outage is no answer: it is waited out."""
        while True:
            failure: ClawError | None = None
            async with self._room(samples):
                try:
                    with self._deps.health.backend.watching("learning"):
                        await self._rehearse(samples, step_id)
                except FAILURES as error:
                    failure = error
            await self._restored(failure)
            if not isinstance(failure, OutageError):
                return failure is not None

    async def _works(self, step_id: int) -> bool:
        """Whether the trainer takes a step that cannot be at fault; if not, it is waited for."""
        sample, at_once = known_good(self._deps.policy.newest.version.id, self._deps.cfg), True
        while True:
            failure: OutageError | None = None
            async with self._room([sample]):
                try:
                    with self._deps.health.backend.watching("learning"), nobody_to_blame():
                        await self._rehearse([sample], step_id)
                except OutageError as error:
                    failure = error
            await self._restored(failure)
            if failure is None:
                return at_once
            at_once = False

    async def _restored(self, error: ClawError | None) -> None:
        await self._recovery.after(error)
        self.suspect = False

    async def _rehearse(self, samples: Sequence[Sample], step_id: int) -> None:
        """A step that is not committed, charged to the one that failed."""
        deps, policy = self._deps, self._deps.policy.newest
        with deps.spending.paying("train", step_id=step_id), accidents_are_failures():
            await self._train(await self._items(samples, policy))

    async def _retire(self) -> None:
        """Close replaced samplers; each ends when the last reply that uses it has ended."""
        while True:
            policy = await self._retired.get()
            await policy.sampler.aclose()


# Learning that only looks: what would be trained, and what it would cost.
#
# Rule: nothing leaves the queue. A later run may train on all of it while it is fresh, and
# samples
# grow old by steps, of which there are none here.


class Observing:
    """Tells of every batch that a step would have taken."""

    def __init__(
        self, samples: SampleTable, batch_size: int, step_usd: Callable[[], float | None]
    ) -> None:
        """`step_usd`: what a step would cost with what is known by now; None: no price is."""
        self._samples = samples
        self._batch_size = batch_size
        self._step_usd = step_usd
        self._told = 0

    def look(self, waiting: int) -> None:
        """So many samples are queued."""
        steps = waiting // self._batch_size
        if steps > self._told:
            queued, usd = self._samples.summary(), self._step_usd()
            log.info(
                "observed",
                samples=queued.samples,
                steps=steps,
                reward_mean=queued.reward_mean,
                hints=queued.hints,
                step_usd=usd,
                usd=None if usd is None else round(steps * usd, 6),
            )
        self._told = steps
