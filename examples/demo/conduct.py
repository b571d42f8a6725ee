"""Conduct a run: sessions, scores and the watching of the server, side by side.

Rule: one TaskGroup holds all of it; the first failure ends everything. Scoring runs beside the
sessions because a version can be asked for by name at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo import DemoError
from examples.demo.client import Client, Health
from examples.demo.progress import Progress
from examples.demo.scoring import Exam, Scorer
from examples.demo.user import IN_FLIGHT, Speaker, hold_sessions
from tinker_claw.errors import first_cause

OBSERVE_S = 0.3
DEGRADED_S = 60.0
"""Seconds until a failing judge ends the run. It is asked again until then."""

Watch = Callable[[], Coroutine[Any, Any, None]]
"""A task that runs beside everything until it is cancelled; if it raises, everything ends."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Clients, speakers and exam of a run."""

    client: Client
    """Client whose key may read the server's health."""
    talkers: Sequence[tuple[Client, Speaker]]
    """Speakers with their clients, who take turns."""
    exam: Exam
    at_once: int = IN_FLIGHT
    """Sessions at the same time."""
    waits: Callable[[], bool] = lambda: False
    """Whether so much is left to judge that no session begins meanwhile."""


async def conduct(cast: Cast, progress: Progress, watches: Sequence[Watch]) -> None:
    """Run until there are enough sessions and steps, and all scores are in.

    Raises:
        DemoError: the first thing that went wrong.
    """
    scorer = Scorer(cast.client, cast.exam, progress.scores)
    for version in filter(progress.options.scores, progress.births):  # of a run taken up
        scorer.add(version)
    try:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(watch()) for watch in watches]
            beside.append(group.create_task(_observe(cast, progress, scorer)))
            scoring = group.create_task(scorer.run())
            await _talk(cast, progress)
            _see(await cast.client.health(), progress, scorer)  # since it was last looked at
            progress.last = progress.version
            scorer.add(progress.last)
            scorer.close()
            await scoring
            for task in beside:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from failures


async def _talk(cast: Cast, progress: Progress) -> None:
    """Hold sessions until there are enough."""
    await hold_sessions(
        cast.talkers,
        progress.options.seed,
        step=lambda: progress.version,
        enough=lambda: progress.enough,
        ended=progress.outcomes.append,
        at_once=cast.at_once,
        first=max((o.number + 1 + cast.at_once for o in progress.outcomes), default=0),
        behind=lambda: progress.behind or (cast.at_once == 1 and progress.trains) or cast.waits(),
    )


def _see(health: Health, progress: Progress, scorer: Scorer) -> None:
    """Record the health, and have new versions scored where that is due."""
    for version in progress.saw(health):
        if progress.options.scores(version):
            scorer.add(version)


async def _observe(cast: Cast, progress: Progress, scorer: Scorer) -> None:
    """Keep `progress` up to date.

    Raises:
        DemoError: learning has stopped, or has been failing for too long.
    """
    client, clock = cast.client, asyncio.get_running_loop().time
    well_at = clock()
    while True:
        health = await client.health()
        _see(health, progress, scorer)
        progress.figures = await client.figures()
        well_at = clock() if health.status == "ok" or progress.held else well_at
        if health.learner == "failed" or clock() - well_at > DEGRADED_S:
            raise DemoError(f"the server stopped learning: {health.last_error or health.learner}")
        await asyncio.sleep(OBSERVE_S)
