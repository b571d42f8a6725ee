"""Conduct a run: sessions, scores and the watching of the server, side by side.

Rule: one TaskGroup holds all of it; the first failure ends everything. Scoring runs beside the
sessions because a version can be asked for by name at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from examples.demo import DemoError
from examples.demo.client import Client
from examples.demo.progress import Progress
from examples.demo.scoring import Exam, Scorer
from examples.demo.user import IN_FLIGHT, Outcome, Speaker, hold_sessions

OBSERVE_S = 0.3
DEGRADED_S = 60.0
"""Seconds until a failing judge ends the run. It is asked again until then."""

Watch = Callable[[], Awaitable[None]]
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


async def conduct(cast: Cast, progress: Progress, watches: tuple[Watch, ...]) -> None:
    """Run until there are enough sessions and steps, and all scores are in.

    Raises:
        DemoError: the first thing that went wrong.
    """
    failures: list[DemoError] = []
    try:
        async with asyncio.TaskGroup() as group:
            await _conduct(cast, progress, watches, group)
    except* DemoError as errors:
        failures += _leaves(errors)
    if failures:
        raise failures[0]


async def _conduct(
    cast: Cast, progress: Progress, watches: tuple[Watch, ...], group: asyncio.TaskGroup
) -> None:
    client, options = cast.client, progress.options
    scorer = Scorer(client, cast.exam, progress.scores)

    async def ended(outcome: Outcome) -> None:
        progress.outcomes.append(outcome)
        sessions = progress.sessions  # others end while the next line waits
        if sessions in options.marks:
            version = (await client.health()).policy_version
            progress.mark(sessions, version)
            scorer.add(version)

    async def observe() -> None:
        await _observe(cast, progress, scorer)

    for version in _unscored(progress):  # of a run that this one takes up
        scorer.add(version)
    beside = [group.create_task(_run(watch)) for watch in (observe, *watches)]
    scoring = group.create_task(scorer.run())
    await hold_sessions(
        cast.talkers,
        options.seed,
        step=lambda: progress.version,
        enough=lambda: progress.enough,
        ended=ended,
        at_once=cast.at_once,
        first=max((o.number + 1 + cast.at_once for o in progress.outcomes), default=0),
        behind=lambda: progress.behind or (cast.at_once == 1 and progress.trains) or cast.waits(),
    )
    for version in progress.saw(await client.health()):  # since it was last looked at
        if progress.options.scores(version):
            scorer.add(version)
    progress.last = progress.version
    scorer.add(progress.last)
    scorer.close()
    await scoring
    for task in beside:
        task.cancel()


def _unscored(progress: Progress) -> list[int]:
    """Versions that were met and are due to be scored, but have no score."""
    marked = {moment.version for moment in progress.marks.values()}
    met = {*filter(progress.options.scores, progress.births), *marked}
    return sorted(met - progress.scores.keys())


async def _run(watch: Watch) -> None:
    await watch()


async def _observe(cast: Cast, progress: Progress, scorer: Scorer) -> None:
    """Keep `progress` up to date, and score every fourth version as it appears.

    Raises:
        DemoError: learning has stopped, or has been failing for too long.
    """
    client, clock = cast.client, asyncio.get_running_loop().time
    well_at = clock()
    while True:
        health = await client.health()
        for version in progress.saw(health):
            if progress.options.scores(version):
                scorer.add(version)
        progress.figures = await client.figures()
        well_at = clock() if health.status == "ok" or progress.held else well_at
        if health.learner == "failed" or clock() - well_at > DEGRADED_S:
            raise DemoError(f"the server stopped learning: {health.last_error or health.learner}")
        await asyncio.sleep(OBSERVE_S)


def _leaves(errors: BaseExceptionGroup[DemoError]) -> list[DemoError]:
    """Flatten groups of groups of errors, in the order in which they occurred."""
    leaves: list[DemoError] = []
    for error in errors.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
