"""Restore a run from the newest committed state of its ledger, at the start and after failures.

`restore` is for the start. `Recovery` loads the committed state again after a failed step.

Rule: weights after a failed step are suspect, so nothing is done with them before a committed state
is loaded. An outage, a full disk and a lack of memory are no failure of the step: they are waited
out, and learning continues by itself.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tinker_claw.errors import (
    BackendError,
    ClawError,
    GoneError,
    LedgerError,
    OutageError,
    StepError,
    first_cause,
)
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.versions import pinned
from tinker_claw.policy import Policy, Sampler, Trainer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.types import PolicyVersion, SamplingParams

WAITS = Backoff(first_s=5.0, longest_s=300.0)
"""Waits between attempts while the service is away."""


async def load(ledger: Ledger, trainer: Trainer, state_ref: str) -> None:
    """Load a state, without the optimizer's moments if the gate refused the versions after it, or
    if a practice made it.

    Momentum alone can carry the next step over the same limit, whatever its batch holds. The
    gradients of a practice are of another scale than a live step's.

    Raises:
        BackendError: it cannot be loaded; says how to go on from another.
    """
    try:
        fresh = ledger.steps.refused_lately() or ledger.practice.is_practised(state_ref)
        await trainer.load_state(state_ref, moments=not fresh)
    except OutageError:
        raise
    except BackendError as error:
        raise BackendError(
            f"{error} If it is gone, `tinker-claw rollback vN` continues from an earlier version "
            "(`tinker-claw versions`)."
        ) from error


async def restore(ledger: Ledger, trainer: Trainer, *, learns: bool = True) -> Policy:
    """Void uncommitted steps, load the newest version's state, and open its sampler.

    Args:
        learns: whether there are steps to come; else no state is loaded.

    Raises:
        BackendError: the state cannot be loaded, or no sampler opened for it.
    """
    if unfinished := ledger.steps.void_unfinished():
        log.warning("steps.void", step_ids=unfinished, reason="never committed")
    saved = ledger.versions.newest()
    if saved is None:
        state_ref = await trainer.save_state("start")
        sampler = await trainer.publish()
        version = ledger.versions.add_first(state_ref=state_ref, sampler_ref=sampler.ref)
        return Policy(version, sampler)
    if not learns:
        return Policy(saved, await trainer.open(saved.sampler_ref))
    await load(ledger, trainer, saved.state_ref)
    sampler = await _reopened(trainer, saved)
    if sampler.ref != saved.sampler_ref:
        saved = ledger.versions.republish(saved, sampler.ref)
    log.info("resumed", version=saved.id, step=saved.step, waiting=ledger.samples.queued())
    return Policy(saved, sampler)


async def _reopened(trainer: Trainer, loaded: PolicyVersion) -> Sampler:
    """Open the sampler of the version whose state is loaded, or publish its weights anew."""
    try:
        return await trainer.open(loaded.sampler_ref)
    except OutageError:
        raise
    except BackendError as error:
        log.warning("sampler.gone", version=loaded.id, error=str(error))
        return await trainer.publish()


async def restore_pin(ledger: Ledger, trainer: Trainer) -> Policy | None:
    """Open the pinned version; None: none is pinned, or its weights are gone, which ends the pin.

    Raises:
        BackendError: it cannot be opened now, though it may be there.
    """
    number = pinned(ledger.rows)
    if number is None or (version := ledger.versions.get(number)) is None:
        return None
    try:
        return Policy(version, await trainer.open(version.sampler_ref))
    except GoneError as error:
        log.warning("pin.gone", version=version.id, error=str(error))
        ledger.versions.pin(None)
        return None
    except OutageError:
        raise
    except BackendError as error:
        raise BackendError(
            f"v{number} is pinned and cannot be opened: {error} "
            "`tinker-claw unpin` lets the newest version answer."
        ) from error


class Recovery:
    """Restores the trainer, and the policy where its sampler is gone."""

    def __init__(
        self,
        parts: LoopParts,
        one_step: asyncio.Lock,
        retire: Callable[[Policy], None],
        waits: Backoff,
    ) -> None:
        """Set up recovery for a run.

        Args:
            one_step: see `loop`; held during each attempt, and never while waiting for one.
            retire: called with the policy that a restored one replaces.
        """
        self._parts = parts
        self._ledger = parts.ledger
        self._health = parts.health
        self._one_step = one_step
        self._retire = retire
        self._waits = waits
        self.suspect = False
        """Whether the trainer's weights or moments may differ from the newest version's."""

    async def restore_if_suspect(self, error: ClawError | None = None) -> None:
        """Wait out an outage, and load the newest committed state, retrying as often as needed. Do
        nothing where another has loaded it meanwhile, or nothing was touched.

        A ledger that refuses is an outage, too: it takes writes again when its disk has room. A
        sampler that is gone is published anew, or every batch that it is to score would seem at
        fault. `error` None: an earlier failure.

        Raises:
            BackendError: the state cannot be loaded, and not because the service is away.
        """
        sampler_gone = isinstance(error, GoneError)
        self.suspect |= sampler_gone
        outage = error if isinstance(error, OutageError | LedgerError) else None
        if self.suspect and outage is None:
            reason = str(error) if error else self._health.learner.error
            self._health.learner_is("recovering", reason)
        while self.suspect or outage is not None:
            if outage is not None:
                # Counted until a step succeeds: one that loads states but takes no steps is away.
                self._health.outages.seen("learning", outage)
                wait_s = self._waits.after(self._health.outages.attempts("learning"))
                self._health.learner_is("stalled", str(outage), wait_s)
                await asyncio.sleep(wait_s)
            outage = None
            try:
                async with self._one_step:
                    if self.suspect:
                        await self._restore(sampler_gone=sampler_gone)
            except (OutageError, LedgerError) as still_away:
                outage = still_away

    async def keep_published(self) -> None:
        """Publish the version that should answer anew whenever its sampler is gone, until
        cancelled.

        Its weights are loaded from its state: the service may have dropped the trainer's session,
        too. Replies wait for none of this.
        """
        outages, tries = self._health.outages, 0
        while True:
            await outages.gone.wait()
            refused = outages.refused
            lost = refused and self._with_version(refused.version)
            if refused is None or lost is None or lost.sampler.ref != refused.ref:
                outages.gone.clear()  # another version or sampler answers now
                continue
            tries = 1 if await self._is_published_anew(lost, refused.by) else tries + 1
            await asyncio.sleep(self._waits.after(tries))

    async def _is_published_anew(self, lost: Policy, stand_in: str | None) -> bool:
        """Publish a version anew; return whether it answers."""
        outages, number = self._health.outages, lost.version.id
        try:
            await self._publish_anew(lost)
        except (BackendError, LedgerError) as error:
            now = self._with_version(number)
            if now is not None and outages.gone.is_set():  # else it has answered meanwhile
                outages.refuses(number, now.sampler.ref, error, stand_in)
            log.warning("version.publish_failed", version=number, error=str(error))
            return False
        outages.answers(number)
        return True

    def _with_version(self, number: int) -> Policy | None:
        """Return the pinned or the newest policy, if it is of this version."""
        policies = self._parts.policy.pinned, self._parts.policy.newest
        return next((open for open in policies if open and open.version.id == number), None)

    async def _publish_anew(self, lost: Policy) -> None:
        """Publish a version anew from its state, and check that its new sampler answers."""
        policy = self._parts.policy
        async with self._one_step:
            if not self._health.outages.gone.is_set():
                return  # it has answered meanwhile
            if policy.newest is lost:
                await self._restore(sampler_gone=True)
            elif policy.pinned is lost:
                await self._publish_pinned(lost)
        if (now := self._with_version(lost.version.id)) is None or now is lost:
            return  # a step, a rollback or another pin came first
        await now.sampler.sample((1,), SamplingParams(max_tokens=1))
        log.info("version.republished", version=now.version.id, sampler=now.sampler.ref)

    async def _publish_pinned(self, lost: Policy) -> None:
        """Load the state of the pinned version, publish it, and go back to the newest state."""
        ledger, trainer, policy = self._parts.ledger, self._parts.trainer, self._parts.policy
        self.suspect = True  # until the newest state is loaded; the next step sees to it otherwise
        await load(ledger, trainer, lost.version.state_ref)
        sampler = await trainer.publish()
        if policy.pinned is lost:
            version = ledger.versions.republish(lost.version, sampler.ref)
            policy.reopen(lost, Policy(version, sampler))
            self._retire(lost)
        else:
            await sampler.aclose()  # unpinned meanwhile
        await self._restore(sampler_gone=False)

    async def _restore(self, *, sampler_gone: bool) -> None:
        """Load the newest state, and open its version's sampler where another one serves."""
        self.suspect = True
        trainer, policy = self._parts.trainer, self._parts.policy
        saved = self._ledger.versions.newest()
        assert saved is not None  # the start has added the first
        await load(self._ledger, trainer, saved.state_ref)
        if sampler_gone or saved.id != policy.newest.version.id:
            # A service that refuses a sampler may open it all the same.
            sampler = await (trainer.publish() if sampler_gone else _reopened(trainer, saved))
            try:
                version = self._ledger.versions.republish(saved, sampler.ref)
            except LedgerError:  # the next attempt publishes it anew
                await sampler.aclose()
                raise
            lost, now = policy.newest, Policy(version, sampler)
            if saved.id == lost.version.id:
                policy.reopen(lost, now)
            else:  # committed, and stopped before it could serve
                policy.swap(now)
            self._retire(lost)
        self.suspect = False


@contextmanager
def accidents_are_failures() -> Generator[None]:
    """Turn unexpected errors into failures of the step, with the line that raised: a sample may
    cause them. A lack of memory is an outage."""
    try:
        yield
    except ClawError:
        raise
    except Exception as error:  # whatever it is: which ones a sample can cause is not known
        cause = first_cause(error)
        if isinstance(cause, MemoryError):
            raise OutageError("There is not enough memory for a step now.") from error
        line = traceback.extract_tb(cause.__traceback__)[-1]
        location = f"{Path(line.filename).name}, line {line.lineno}"
        raise StepError(f"{type(cause).__name__}: {cause} ({location})") from error
