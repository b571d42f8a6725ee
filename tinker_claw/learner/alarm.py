"""What follows when sampler and trainer do not agree: the user is told, then learning stops.

Rule: one batch raises the alarm, and the next that agrees ends it. The second in a row is not
committed: its step is void and learning ends until a restart, while the gateway goes on answering.
Ratios against wrong logprobs teach what nobody meant, and nothing here can mend a sampler; but one
batch may be a fluke.

A restart tries again, and knows of no alarm. The replies that were sampled wrongly are still
queued: one batch of them is trained on; the rest is then of an older version, hence scored anew,
and tokens with a large ratio are left out (METHOD 5.6). A batch with too few fresh tokens to tell
changes nothing.
"""

from __future__ import annotations

from tinker_claw.errors import DisagreementError
from tinker_claw.learner.agreement import Agreement
from tinker_claw.learner.health import Health
from tinker_claw.telemetry import log


class Alarm:
    """Remembers whether the batch of the last committed step agreed."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._raised = False

    def admit(self, found: Agreement | None) -> None:
        """Let the step over this batch be committed.

        Raises:
            DisagreementError: it is the second in a row that does not agree.
        """
        if self._raised and found is not None and found.agrees is False:
            self._health.agreement_is("alarm", found.told())
            raise DisagreementError(
                "Sampler and trainer did not agree on two batches in a row, and the second step is "
                "not kept. Mend the sampler (`agreement` says what to look at), then restart."
            )

    def committed(self, found: Agreement | None, step_id: int) -> None:
        """The step over this batch is."""
        if found is None or found.agrees is None:
            return
        if not found.agrees:
            self._health.agreement_is("alarm", found.told())
            log.warning("agreement.alarm", step_id=step_id, reason=found.told())
        elif self._raised:
            self._health.agreement_is("ok")
            log.info("agreement.back", step_id=step_id)
        self._raised = not found.agrees
