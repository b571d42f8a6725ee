"""Learning that only looks: what would be trained, and what it would cost.

Rule: nothing leaves the queue. A later run may train on all of it while it is fresh, and samples
grow old by steps, of which there are none here.
"""

from __future__ import annotations

from collections.abc import Callable

from tinker_claw.ledger.samples import SampleTable
from tinker_claw.telemetry import log


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
