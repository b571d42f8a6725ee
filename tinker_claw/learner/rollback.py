"""Pins, rollbacks, accepting, forgetting and judging again while the loop runs.

Rule: serving changes at once, and forgotten turns stop being used at once: a step in progress over
them is void. Work on the trainer happens between two steps, so that a step is committed before it
or sees its result; a failure changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tinker_claw.errors import BackendError, OutageError, UndoError
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.prune import Forgetting, left
from tinker_claw.policy import Policy
from tinker_claw.telemetry import log
from tinker_claw.types import PolicyVersion


class RollbackOperations:
    """Undo operations on a running loop, one at a time."""

    def __init__(
        self,
        parts: LoopParts,
        learner: Learner,
        forget_session: Callable[[int], None],
        wake_judging: Callable[[], None],
    ) -> None:
        """Set up the undo operations of a run. `forget_session`: called with a session whose turns
        are forgotten."""
        self.ledger = parts.ledger
        self._trainer = parts.trainer
        self._policy = parts.policy
        self._learner = learner
        self._forget_session = forget_session
        self._wake_judging = wake_judging
        self._lock = asyncio.Lock()

    async def pin(self, version_id: int) -> None:
        """Serve this version from now on; learning continues.

        Raises:
            UndoError: there is no such version, or its weights cannot be loaded.
        """
        async with self._lock:
            policy = await self._opened(version_id)
            self.ledger.versions.pin(version_id)
            self._answer_with(policy)
            log.info("pinned", version=version_id)

    async def unpin(self) -> int:
        """Serve the newest version again; return its number."""
        async with self._lock:
            self.ledger.versions.pin(None)
            self._answer_with(None)
            newest = self._policy.current.version.id
            log.info("unpinned", version=newest)
            return newest

    async def roll_back(self, version_id: int) -> PolicyVersion:
        """Serve this version at once, and go on learning from its state, as a new version.

        A step in progress ends first, and its version is left behind. A hold ends.

        Raises:
            UndoError: there is no such version, or its weights or state cannot be loaded.
        """
        async with self._lock:
            policy = await self._opened(version_id)
            before = self._policy.pin(policy)
            try:
                async with self._learner.between_steps():
                    new = await self._load(policy.version)
                    self._learner.retire(self._policy.swap(Policy(new, policy.sampler)))
                    self._policy.pin(None)
            except BaseException:
                self._answer_with(before)
                raise
            if before is not None:
                self._learner.retire(before)
            log.info("rolled_back", to=version_id, version=new.id, step=new.step)
            return new

    async def accept(self) -> int:
        """Compare canaries with the newest version from now on; return its number. A step in
        progress ends first."""
        async with self._learner.between_steps():
            accepted = self.ledger.reference.accept()
        log.info("accepted", version=accepted)
        return accepted

    async def forget(self, select: Callable[[Rows], Forgetting]) -> Forgetting:
        """Forget turns, in the ledger and in the gateway's memory.

        Forgotten turns are no longer judged, trained or answered with. It ends when no step in
        progress has them in memory.

        Raises:
            UndoError: there is no such session or turn.
            LedgerError: it could not be written.
        """
        forgotten = await self.ledger.forget_in_thread(select)
        self._forget_session(forgotten.session)  # from here on no reply in flight is kept
        late = left(self.ledger.rows, forgotten)
        if late is not None:  # replies that ended just before
            await self.ledger.forget_in_thread(late)
        self._trainer.forget()
        async with self._learner.between_steps():
            log.info("forgotten", session=forgotten.session, turns=len(forgotten.turns))
        return forgotten

    def judge_again(self, turn_ids: Sequence[int] | None) -> list[int]:
        """Take up turns that were set aside, all or some; return their ids.

        Raises:
            LedgerError: it cannot be written.
        """
        again = self.ledger.jobs.take_up(turn_ids)
        self._wake_judging()
        log.info("judged_again", turns=len(again))
        return again

    async def _load(self, version: PolicyVersion) -> PolicyVersion:
        try:
            await self._trainer.load_state(version.state_ref)
        except (asyncio.CancelledError, OutageError):
            self._learner.recovery.suspect = True  # it may have been loaded all the same
            raise
        except BackendError as error:
            raise UndoError(f"the state of v{version.id} cannot be loaded: {error}") from error
        self._learner.recovery.suspect = True  # until the ledger has the version of these weights
        new = self.ledger.versions.roll_back(version)
        self._learner.recovery.suspect = False
        return new

    async def _opened(self, version_id: int) -> Policy:
        version = self.ledger.versions.get(version_id)
        if version is None:
            raise UndoError(f"there is no v{version_id}; `tinker-claw versions` lists them")
        try:
            return Policy(version, await self._trainer.open(version.sampler_ref))
        except OutageError:
            raise
        except BackendError as error:
            raise UndoError(f"the weights of v{version.id} cannot be loaded: {error}") from error

    def _answer_with(self, pinned: Policy | None) -> None:
        replaced = self._policy.pin(pinned)
        if replaced is not None:
            self._learner.retire(replaced)
