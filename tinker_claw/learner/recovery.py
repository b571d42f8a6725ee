"""Where a run begins: the newest committed state of its ledger, or version 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from tinker_claw.config.settings import Training
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ClawError,
    LedgerError,
    OutageError,
    RequestError,
    StepError,
    first_cause,
)
from tinker_claw.learner.health import Health
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Policy, PolicyHolder, Trainer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.types import (
    Completion,
    HintScores,
    PolicyVersion,
    Sample,
    SamplingParams,
    StopReason,
)


async def restore(ledger: Ledger, trainer: Trainer) -> Policy:
    """Void what was never committed, load the newest saved state, and open its sampler.

    Steps committed after the last save (`--save-interval` above 1) are void as well: their weights
    are gone, so their samples are queued again and a new version takes the saved state up.

    Raises:
        BackendError: the state cannot be loaded, or no sampler made of it.
    """
    if unfinished := ledger.steps.void_unfinished():
        log.warning("steps.void", step_ids=unfinished, reason="never committed")
    saved = ledger.steps.newest_saved_version()
    if saved is None or saved.state_ref is None:
        state_ref = await trainer.save_state("start")
        sampler = await trainer.publish()
        version = ledger.steps.add_first_version(state_ref=state_ref, sampler_ref=sampler.ref)
        return Policy(version, sampler)
    await trainer.load_state(saved.state_ref)
    lost, published_anew = ledger.steps.unsaved(saved), False
    try:
        sampler = await trainer.open(saved.sampler_ref)
    except OutageError:
        raise
    except BackendError as error:
        # The state is there, and the same weights can be published again.
        log.warning("sampler.gone", version=saved.id, error=str(error))
        sampler, published_anew = await trainer.publish(), True
    if lost or published_anew:  # nothing is written before all of it is there
        restored, saved = saved.id, ledger.steps.restart_from(saved, sampler_ref=sampler.ref)
        if lost:
            log.warning("steps.void", step_ids=lost, reason="not saved", restored_version=restored)
    log.info("resumed", version=saved.id, step=saved.step, waiting=ledger.samples.waiting())
    return Policy(saved, sampler)


async def restore_pin(ledger: Ledger, trainer: Trainer) -> Policy | None:
    """The version that was pinned, opened; None: none was, or its weights are gone.

    Raises:
        OutageError: the service is away.
    """
    number = ledger.pin.version
    version = ledger.steps.version(number) if number is not None else None
    if version is None:
        return None
    try:
        return Policy(version, await trainer.open(version.sampler_ref))
    except OutageError:
        raise
    except BackendError as error:
        log.warning("pin.gone", version=version.id, error=str(error))
        return None


# Back to the newest committed state after a step that failed, however long the service is away.
#
# Rule: weights after a failed step are suspect, so nothing is done with them before a committed
# state
# is loaded. An outage is no failure of the step: it is waited out, and learning goes on by
# itself. A
# trainer that fails whatever it is given is away, too, however it words that.


WAITS = Backoff(first_s=5.0, longest_s=300.0)
FAILURES = (BackendError, AlignmentError, RequestError)
"""What a step can fail with: the backend, or a sample that does not fit it (any more)."""
_OWN, _TEACHERS = -0.1, 0.0
"""Logprobs, in nats, that no ratio of whatever weights puts outside the bounds for good."""


def known_good(version: int, cfg: Training) -> Sample:
    """Three tokens with every signal that a method may want: no trainer has a reason to refuse it.

    Where even a step over this fails no sample of a user is to blame.
    """
    candidates = tuple(range(1, cfg.opd_topk + 1))
    return Sample(
        id=0,
        turn_id=0,
        session_id=0,
        policy_version=version,
        policy_step=0,
        prompt=(1, 2),
        completion=Completion(
            tokens=(3,),
            logprobs=(_OWN,),
            topk_ids=(candidates,),
            topk_logprobs=((_OWN,) * len(candidates),),
            stop_reason=StopReason.STOP,
            params=SamplingParams(max_tokens=1),
        ),
        reward=1,
        teacher=HintScores("", (_TEACHERS,), targets=((_TEACHERS,) * len(candidates),)),
    )


@contextmanager
def nobody_to_blame() -> Generator[None]:
    """A step that cannot be at fault: its failure is an outage."""
    try:
        yield
    except OutageError:
        raise
    except FAILURES as error:
        raise OutageError(
            f"Training fails whatever it is given, so no sample is to blame: {error}"
        ) from error


@contextmanager
def accidents_are_failures() -> Generator[None]:
    """What nobody thought of may be the fault of one sample, for whatever the others do: a step
    fails with it as with any error, so it is counted, and the sample is looked for."""
    try:
        yield
    except ClawError:
        raise
    except Exception as error:  # whatever it is: which ones a sample can cause is not known
        cause = first_cause(error)
        raise StepError(f"{type(cause).__name__}: {cause}") from error


def as_outage(error: OutageError | LedgerError) -> OutageError:
    """What the ledger refuses to write it will write when its disk has room: waiting helps."""
    return error if isinstance(error, OutageError) else OutageError(str(error))


@contextmanager
def waiting_for_the_ledger() -> Generator[None]:
    """A ledger that cannot be written is an outage, too."""
    try:
        yield
    except LedgerError as error:
        raise as_outage(error) from error


class Recovery:
    """Restores the trainer, and the policy where later steps had not been saved."""

    def __init__(
        self,
        ledger: Ledger,
        trainer: Trainer,
        policy: PolicyHolder,
        health: Health,
        *,
        waits: Backoff,
        retire: Callable[[Policy], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`retire` gets the policy that a restored one replaces."""
        self._ledger = ledger
        self._trainer = trainer
        self._policy = policy
        self._health = health
        self._waits = waits
        self._retire = retire
        self._sleep = sleep

    async def after(self, error: ClawError | None) -> None:
        """Wait, if it was an outage, and load the newest committed state, as often as it takes.

        None: the step went well, and is to be undone all the same.

        Raises:
            BackendError: it cannot be loaded, and not because the service is away.
        """
        if isinstance(error, OutageError):
            outage = error
        else:
            told = str(error) if error else self._health.learner.error
            self._health.learner_is("recovering", told)
            outage = await self._try()
        while outage is not None:
            # Counted until a step succeeds: a service that loads states but takes no steps is away.
            attempts = self._health.backend.attempts("learning")
            wait_s = self._waits.after(attempts)
            self._health.learner_stalls(outage, wait_s)
            await self._sleep(wait_s)
            outage = await self._try()

    async def _try(self) -> OutageError | None:
        try:
            await self._restore()
        except (OutageError, LedgerError) as error:
            outage = as_outage(error)
            self._health.backend.seen("learning", outage)
            return outage
        return None

    async def _restore(self) -> None:
        saved = self._ledger.steps.newest_saved_version()
        if saved is None or saved.state_ref is None:
            raise StepError("there is no committed state to go back to")
        await self._trainer.load_state(saved.state_ref)
        if saved.id != self._policy.newest.version.id:
            await self._go_back_to(saved)

    async def _go_back_to(self, saved: PolicyVersion) -> None:
        """Where states are saved every k steps, the steps since the last save are void, too."""
        sampler = await self._trainer.open(saved.sampler_ref)  # may fail: nothing is written before
        try:
            lost = self._ledger.steps.unsaved(saved)
            version = self._ledger.steps.restart_from(saved)
        except LedgerError:  # the next attempt opens it anew
            await sampler.aclose()
            raise
        log.warning("steps.void", step_ids=lost, reason="not saved", restored_version=saved.id)
        self._retire(self._policy.swap(Policy(version, sampler)))
