"""The learner: sixteen samples or whole groups, one optimizer step, one new policy version.

`Learner.run` calls, each within the one above it:

- `_wait_for_work`: until there may be a batch.
- `_do_next`: chooses a batch, or a practice that is due.
- `_step_with_retry`: waits for room in the budget, and does what the step's result asks for.
- `_step_or_void`: begins the step's row, and makes every error its result.
- `_train_and_commit`: trains, commits, and lets the version serve.
- `_train_batch`: scores and advantages, `_optimizer_step`, `publish`, the gate's `ask`.

A batch whose step fails twice for its own reason is set aside, and so is one whose version the gate
refuses, which never serves.

Rule: a step takes effect only with its commit: until then the samples are queued, the old policy
serves, and a restart loads the last committed state. The gateway awaits nothing here. Neither an
outage nor a ledger that cannot be written for a time counts against a batch or ends learning.
`recovery` restores the trainer after a step that failed.

One lock, `_one_step`, guards the trainer's weights and the newest version. Its holder does one
thing with them (a step, a load or a save) and leaves the weights of the newest
version, or marks them `suspect`. It is never held while waiting out an outage or for budget, so a
user's undo waits for one such thing at most; after a wait the batch is checked again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random

from tinker_claw.errors import (
    BackendError,
    ClawError,
    GoneError,
    LearningEndedError,
    LedgerError,
    OutageError,
    StepError,
)
from tinker_claw.learner.batch import GROUPED, choose
from tinker_claw.learner.diagnostics import agreement, require_agreement, step_metrics
from tinker_claw.learner.gate import AFTER_REFUSAL, Gate, Pause
from tinker_claw.learner.parts import LoopParts, TrainedWeights
from tinker_claw.learner.practice import BETA1, RATE, Practice, PracticePlan
from tinker_claw.learner.recovery import WAITS, Recovery, accidents_are_failures
from tinker_claw.learner.scoring import batch_items
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.samples import NO_GRADIENT, STEPS_FAILED, read_queue, ready
from tinker_claw.ledger.steps import LEFT_OPEN, Void, VoidStepError
from tinker_claw.policy import Policy, Sampler
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.types import Adam, Charge, LossPass, PolicyVersion, Sample, StepReport

BATCHES = 2
"""Batches in a row whose steps fail before learning ends: then the cause is hardly in them."""


@dataclass(frozen=True, slots=True)
class VoidStep:
    """Result of a step that left no version; its samples are queued again."""

    why: Void
    error: ClawError


def void_of(error: ClawError) -> Void:
    """Return why a step is void that ended in this error."""
    match error:
        case VoidStepError():
            return error.why
        case LearningEndedError():
            return Void.ENDED
        case OutageError() | LedgerError() | GoneError():
            return Void.AWAY
        case _:
            return Void.FAILED


class Learner:
    """Turns queued samples into policy versions, one step at a time."""

    def __init__(
        self,
        parts: LoopParts,
        *,
        learning_rate: float,
        gate: Gate | None = None,
        practice: Practice | None = None,
        score_fresh: bool = False,
        ended: str | None = None,
        waits: Backoff = WAITS,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Set up the learner of a run.

        Args:
            gate: None: versions are not tested.
            practice: None: lessons are only told.
            score_fresh, ended: see `Capabilities`.
            waits: waits between attempts while the service is away.
            now: returns seconds since 1970, as the ledger counts them.
        """
        self._parts = parts
        self._ledger = parts.ledger
        self._adam = Adam(learning_rate=learning_rate)
        self._score_fresh = score_fresh
        self._ended = ended
        self._gate = gate
        self._practice = practice
        self._undoing = 0
        """Number of undos that wait for the step in progress; a practice ends for them."""
        self.stepping = False
        """Whether a step is in progress."""
        self._now = now
        self._wake = asyncio.Event()
        self._look_at: float | None = None
        """When to look for a batch although no sample has come, in seconds since 1970."""
        self._pause: Pause | None = None
        """Why learning is paused, at the last look."""
        self._finishing = False
        self._one_step = asyncio.Lock()
        self.recovery = Recovery(parts, self._one_step, self.retire, waits)
        self._failed = 0
        """Batches in a row that were set aside because their steps failed."""
        self._interruptions = 0
        """Number of times that steps were held off."""
        self._retired: asyncio.Queue[Policy] = asyncio.Queue()

    @property
    def _newest(self) -> PolicyVersion:
        return self._parts.policy.newest.version

    # Called by other parts

    def wake(self) -> None:
        """Look for a batch: a sample has been queued."""
        self._wake.set()

    def finish(self) -> None:
        """Begin no further step; `run` returns after the one in progress."""
        self._finishing = True
        self._wake.set()

    @asynccontextmanager
    async def between_steps(self) -> AsyncGenerator[None]:
        """Hold off further steps, once the one in progress has ended; then choose the next batch
        anew. A practice does not go on."""
        self._undoing += 1
        try:
            async with self._one_step:
                try:
                    yield
                finally:
                    self._interruptions += 1
                    self.wake()
        finally:
            self._undoing -= 1

    def retire(self, policy: Policy) -> None:
        """Close a policy's sampler when the last reply that uses it has ended."""
        self._retired.put_nowait(policy)

    # The loop

    async def run(self) -> None:
        """Take a step whenever a batch is complete, until `finish` or cancelled.

        May be called again after an unexpected end.

        Raises:
            LearningEndedError: there is no step to come until a restart.
        """
        if self._ended:
            raise LearningEndedError(self._ended)
        health = self._parts.health
        self._wake.set()
        with suppress(LedgerError):  # it is looked at again before a step
            self._look_at_pause()
        async with asyncio.TaskGroup() as group:
            retiring = group.create_task(self._close_retired())
            while not self._finishing:
                self._show_idle()
                await self._wait_for_work()
                while not self._finishing and await self._do_next():
                    pass
            health.learner_is("finished")
            retiring.cancel()

    async def _wait_for_work(self) -> None:
        """Wait until there may be a batch."""
        wait_s = None if self._look_at is None else max(0.0, self._look_at - self._now())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        self._wake.clear()
        self._look_at = None  # the next look at the queue sets it again

    def _show_idle(self) -> None:
        health = self._parts.health
        health.outages.over("learning")  # it asks for nothing now
        if self._pause is not None:
            health.learner_is("held", f"{self._pause.because}.")
        else:
            health.learner_is("waiting")

    async def _do_next(self) -> bool:
        """Do the next piece of work, as far as service and ledger allow; False: there is none."""
        try:
            if self._pause and self._look_at_pause():
                return False
            batch = self._batch()
            plan = await self._to_practise() if batch is None else None
            if (batch is None and plan is None) or self._look_at_pause():
                return False
            await self._step_with_retry(batch or [], plan)
        except LedgerError as error:
            await self.recovery.restore_if_suspect(error)
        return True

    def _look_at_pause(self) -> bool:
        """Look whether learning is paused, and show it.

        Raises:
            LedgerError: that cannot be read now.
        """
        pause = self._gate and self._gate.pause()
        paper = self._parts.training.recipe == "paper"  # nothing but the published form
        if pause is None and not paper and (decline := read_decline(self._ledger.rows)):
            pause = Pause(str(decline))
        before, self._pause = self._pause, pause
        if pause:
            self._look_at = pause.until
        if pause and not before:
            log.warning("learning.held", because=pause.because)
        if before and not pause:
            log.info("learning.resumed")
        if pause or before:
            self._show_idle()
        return pause is not None

    def _batch(self) -> list[Sample] | None:
        """Return the samples of the next step; None while there is no batch."""
        parts, ledger, cfg = self._parts, self._ledger, self._parts.training
        most = GROUPED * cfg.batch_size
        expired = ledger.samples.expire(self._newest.step, cfg.max_staleness)
        released = ledger.groups.release(self._now(), most)
        if expired := expired + released.expired:
            parts.telemetry.sample("expired", count=expired)
        self._look_at = released.look_at
        queue = read_queue(ledger.rows)
        waiting = ready(queue, cfg.batch_size)
        parts.telemetry.waiting(waiting)
        if waiting < cfg.batch_size:
            return None
        choice = choose(queue, batch_size=cfg.batch_size, most=most, now=self._now())
        if choice.ids:
            return ledger.samples.load(choice.ids)
        self._look_at = min(filter(None, (self._look_at, choice.look_at)), default=None)
        return None

    async def _to_practise(self) -> PracticePlan | None:
        """Return the practice that is due; first undo one that its owner rejects.

        Live samples go before it.
        """
        if self._practice is None or self.recovery.suspect:
            return None
        if self._undoing:
            return None  # `between_steps` wakes the loop
        async with self._one_step:
            self.recovery.suspect |= self._practice.settle()
        await self.recovery.restore_if_suspect()
        return self._practice.due()

    async def _step_with_retry(self, batch: Sequence[Sample], plan: PracticePlan | None) -> None:
        """Take a step over the batch, a second one if it fails, and do what its result asks for. A
        practice is tried once.

        The batch is given up where it has changed while waiting for room in the budget, and after
        an outage.

        Raises:
            LearningEndedError: steps over several batches in a row have failed, or going on would
                do harm.
            LedgerError: a step that is over cannot be closed.
        """
        if self.recovery.suspect:
            await self.recovery.restore_if_suspect()
            return
        interruptions = self._interruptions
        tries = 2 if plan is None else 1
        for number in range(1, tries + 1):
            await self._parts.spending.room()
            async with self._one_step:
                if interruptions != self._interruptions:
                    break
                self._ledger.steps.void_unfinished(LEFT_OPEN)
                if not self._ledger.samples.still_queued(batch):  # feedback takes samples out
                    break
                result = await self._step_or_void(batch, plan)
            match result:  # first, as what follows may wait or never come
                case PolicyVersion():
                    self._failed = 0
                case VoidStep(Void.EMPTY):
                    self._ledger.samples.refuse([sample.id for sample in batch], NO_GRADIENT)
                    self._parts.telemetry.sample("expired", count=len(batch))
                case VoidStep(Void.REFUSED):
                    self._set_aside(batch)
                case VoidStep(Void.FAILED, error) if number == tries and plan is None:
                    self._set_aside(batch)
                    self._failed += 1
                    if self._failed == BATCHES:
                        raise LearningEndedError(
                            f"The steps over {BATCHES} batches in a row failed, and both are set "
                            "aside. The cause is hardly in the batches: find it, then restart. "
                            f"{error}"
                        ) from error
                case VoidStep(Void.DISAGREES, error):
                    with suppress(LedgerError):  # else it is compared again after the restart
                        drawn = self._ledger.samples.queued_of(self._newest.id)
                        self._ledger.samples.refuse(drawn, STEPS_FAILED)
                    raise LearningEndedError(str(error)) from error
                case VoidStep(Void.ENDED, error):
                    raise error
                case _:  # away, withdrawn or not learned; or it is tried once more
                    pass
            await self.recovery.restore_if_suspect(
                result.error if isinstance(result, VoidStep) else None
            )
            if not (isinstance(result, VoidStep) and result.why is Void.FAILED):
                break
        self._look_at_pause()  # shown now, not when there is another batch

    def _set_aside(self, batch: Sequence[Sample]) -> None:
        """Exclude a batch from training."""
        self._ledger.samples.refuse([sample.id for sample in batch], STEPS_FAILED)
        self._parts.telemetry.sample("quarantined", count=len(batch))

    async def _step_or_void(
        self, batch: Sequence[Sample], plan: PracticePlan | None
    ) -> PolicyVersion | VoidStep:
        """Take one step. Whatever error ends it becomes its result here."""
        parts, self.stepping = self._parts, True
        outages = parts.health.outages
        if not outages.attempts("learning"):  # else it is the outage's next attempt
            parts.health.learner_is("training")
        step_id, ids = 0, [sample.id for sample in batch]  # 0: none yet
        try:
            with accidents_are_failures():
                parent, lesson = self._newest.id, plan and plan.lesson.id
                prompts = plan.prompts if plan else ()
                step_id = self._ledger.steps.begin(parent, ids, lesson, prompts)
                result = await self._train_and_commit(step_id, batch, plan)
        except asyncio.CancelledError:
            self._void(step_id, "the gateway was stopped", Void.AWAY)
            raise
        except ClawError as error:
            result = VoidStep(void_of(error), error)
            self._void(step_id, str(error), result.why)
            if isinstance(error, OutageError | LedgerError):
                return result  # the outage goes on: only an answer ends it
        finally:
            self.stepping = False
        outages.over("learning")
        return result

    async def _train_and_commit(
        self, step_id: int, batch: Sequence[Sample], plan: PracticePlan | None
    ) -> PolicyVersion:
        """Train a batch or practise, commit, and let the version serve.

        Raises:
            ClawError: there is no new version; `void_of` says why.
        """
        parts, started = self._parts, time.monotonic()
        rate = AFTER_REFUSAL if self._ledger.steps.refused_lately() else 1.0
        with parts.spending.paying("train", step_id=step_id) as account:
            if plan is None:
                trained = await self._train_batch(step_id, batch, rate, account.add)
            else:
                trained = await self._practise(step_id, plan, rate, account.add)
        metrics = {"rate": rate} | trained.metrics | parts.spending.figures(account.usage)
        with self._closed_on_failure(trained.sampler):  # the next attempt publishes anew
            state_ref = await parts.trainer.save_state(f"step-{step_id:08d}")
            rule = {"method": parts.method.name, **parts.training.model_dump(mode="json")}
            version = self._ledger.steps.commit(
                step_id,
                self._newest,
                state_ref=state_ref,
                sampler_ref=trained.sampler.ref,
                metrics=metrics | {"rule": rule},
            )
        self.retire(parts.policy.swap(Policy(version, trained.sampler)))
        self.recovery.suspect = plan is not None  # its moments are not the next step's
        seconds = trained.published_at - started
        of = {"step": version.step, "version": version.id}
        parts.telemetry.step(seconds=seconds, step_id=step_id, **of, **metrics)
        parts.telemetry.publish(**of, seconds=time.monotonic() - trained.published_at)
        return version

    async def _train_batch(
        self, step_id: int, batch: Sequence[Sample], rate: float, charge: Charge
    ) -> TrainedWeights:
        """Score a batch under the current weights, train it, publish its version, and ask the gate.

        Raises:
            VoidStepError: no sample carries a gradient, sampler and trainer disagree, or the gate
                refuses the version.
        """
        parts, policy, cfg = self._parts, self._parts.policy.newest, self._parts.training
        items = await batch_items(batch, policy, cfg, charge, score_fresh=self._score_fresh)
        state = self._ledger.steps.method_state()
        prepared = parts.method.prepare(items, cfg, state, parts.reply_tokens)
        self._ledger.steps.store_advantages(step_id, prepared.stored, prepared.state)
        if not prepared.passes:
            raise VoidStepError(Void.EMPTY, "no sample of the batch carries a gradient")
        adam = replace(self._adam, learning_rate=rate * self._adam.learning_rate)
        report = await self._optimizer_step(prepared.passes, adam, charge)
        agreed = agreement(prepared, report, policy.version.id)
        require_agreement(agreed, parts.health)
        published_at, sampler = time.monotonic(), await parts.trainer.publish()
        with self._closed_on_failure(sampler):
            gate_figures = await self._gate.ask(sampler, charge) if self._gate else {}
        metrics = step_metrics(prepared, report, policy.version.step, agreed) | gate_figures
        return TrainedWeights(sampler, metrics, published_at)

    async def _practise(
        self, step_id: int, plan: PracticePlan, rate: float, charge: Charge
    ) -> TrainedWeights:
        """Practise a lesson with moments of its own, unless an undo or the end of learning comes
        first."""
        assert self._practice is not None  # the plan is from there
        parts = self._parts
        rate *= RATE * self._adam.learning_rate
        adam = replace(self._adam, learning_rate=rate, beta1=BETA1)
        self.recovery.suspect = True
        await parts.trainer.load_state(self._newest.state_ref, moments=False)

        def check_wanted() -> None:
            if self._undoing or self._finishing:
                raise VoidStepError(Void.WITHDRAWN, "something else came first; it begins again")

        async def train(one_pass: LossPass) -> StepReport:
            return await self._optimizer_step([one_pass], adam, charge)

        return await self._practice.run(
            plan, Random(step_id), train, self._closed_on_failure, check_wanted, charge
        )

    async def _optimizer_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge
    ) -> StepReport:
        """Take an optimizer step.

        Raises:
            StepError: the loss or its gradient is not a number.
        """
        self.recovery.suspect = True
        report = await self._parts.trainer.train_step(passes, adam, charge)
        if not all(map(math.isfinite, (*report.losses, report.grad_norm or 0.0))):
            raise StepError("the loss or its gradient is not a number")
        return report

    def _void(self, step_id: int, error: str, why: Void) -> None:
        with suppress(LedgerError):  # the next step or start does it
            self._ledger.steps.void(step_id, error, why)
        if why is Void.REFUSED:
            log.warning("gate.refused", step_id=step_id, error=error)
        if why is Void.UNLEARNED:
            log.warning("practice.failed", step_id=step_id, error=error)
        failed = why is Void.FAILED
        self._parts.telemetry.step_void(step_id=step_id, error=error, logged=failed)

    @contextmanager
    def _closed_on_failure(self, sampler: Sampler) -> Generator[None]:
        """Close a sampler that has answered nobody, if what is done inside fails."""
        try:
            yield
        except BaseException:
            self.retire(Policy(self._newest, sampler))
            raise

    async def _close_retired(self) -> None:
        """Close replaced samplers; each ends when the last reply that uses it has ended."""
        while True:
            policy = await self._retired.get()
            try:
                with accidents_are_failures():
                    await policy.sampler.aclose()
            except asyncio.CancelledError:
                self.retire(policy)  # the next run closes it
                raise
            except BackendError as error:  # no reason to end the step in progress
                log.warning("sampler.close_failed", sampler=policy.sampler.ref, error=str(error))
