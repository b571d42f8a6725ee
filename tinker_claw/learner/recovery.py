"""Back to the newest committed state after a step that failed, however long the service is away.

Rule: weights after a failed step are suspect, so nothing is done with them before a committed state
is loaded. An outage is no failure of the step: it is waited out, and learning goes on by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from tinker_claw.errors import ClawError, LedgerError, OutageError, StepError
from tinker_claw.learner.health import Health
from tinker_claw.ledger import Ledger
from tinker_claw.outages import Backoff
from tinker_claw.policy import Policy, PolicyHolder, Trainer
from tinker_claw.telemetry import log
from tinker_claw.types import PolicyVersion

WAITS = Backoff(first_s=5.0, longest_s=300.0)


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
