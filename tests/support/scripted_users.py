"""The demo's users talk to the product's parts in this process, and it learns from them.

Rule: users, judge and exam are the demo's. Nothing is told of lessons, so that weights alone learn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.demo.client import ANSWER_S, Client, Reply, Request
from examples.demo.homework import Problem
from examples.demo.judge import create_app, opinion
from examples.demo.scoring import RuleExam, Score, score_version
from examples.demo.user import IN_FLIGHT, Rule, User, hold_sessions
from examples.personalize.judges import Think
from tests.support.gateways import wired
from tinker_claw.app.server import in_background
from tinker_claw.config.load import load
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.samples import read_queue, usable


class PatientClient(Client):
    """Waits while judge and trainer are behind, so that turns do not get stale: all share one
    process."""

    def __init__(self, sdk: AsyncOpenAI, parts: LoopParts) -> None:
        super().__init__(sdk)
        self._parts = parts
        self.enough: Callable[[], bool] = lambda: False

    async def ask(self, request: Request) -> Reply:
        most = 3 * self._parts.training.batch_size
        while (  # noqa: ASYNC110 - nobody tells
            request.kind == "main"
            and not self.enough()
            and (
                len(usable(read_queue(self._parts.ledger.rows))) > most
                or len(self._parts.ledger.jobs.due()) > 2 * IN_FLIGHT
            )
        ):
            await asyncio.sleep(0.02)
        return await super().ask(request)


@dataclass
class Run:
    """A run, and the users who talk to it."""

    parts: LoopParts
    client: PatientClient
    seed: int
    turns: int = 0
    """Number of replies that a user has read."""

    @property
    def held(self) -> bool:
        return self.parts.health.learner.state == "held"

    @property
    def step(self) -> int:
        return self.parts.policy.newest.version.step

    async def exam(self, user: User, problems: int = 60) -> Score:
        """Score the newest version."""
        version = self.parts.policy.newest.version.id
        return await score_version(self.client, version, RuleExam.draw(user, problems))

    async def talk(self, user: User, enough: Callable[[], bool]) -> None:
        """Hold sessions, six at a time, until there are enough."""
        later = user.later and self._watched(user.later)
        watched = replace(user, wants=self._watched(user.wants), later=later)
        self.client.enough = enough
        await hold_sessions(
            [(self.client, watched)],
            self.seed,
            step=lambda: self.step,
            enough=enough,
            ended=lambda outcome: None,
        )

    def _watched(self, rule: Rule) -> Rule:
        """Make the same rule, and count what the user reads."""

        def accepts(reply: str, problem: Problem) -> bool:
            self.turns += 1
            return rule.accepts(reply, problem)

        return replace(rule, accepts=accepts)


@asynccontextmanager
async def demo_run(
    path: Path, think: Think = opinion, *, seed: int = 0, gate: str = "on"
) -> AsyncGenerator[Run]:
    """Run the demo's settings in a folder of its own. `think`: the judge's opinions."""
    async with AsyncExitStack() as stack:
        judge = await stack.enter_async_context(in_background(create_app(seed, think)))
        flags = {"data-dir": path, "seed": seed, "gate": gate, "judge-url": judge}
        words = [f"--{name}={value}" for name, value in flags.items()]
        settings = load(["--config", "configs/demo.toml", "--lessons=off", *words])
        system, http = await stack.enter_async_context(wired(settings))
        sdk = AsyncOpenAI(
            base_url=str(http.base_url.join("/v1")),
            api_key="none",
            timeout=ANSWER_S,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
        )
        await stack.enter_async_context(sdk)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(part.run()) for part in (system.judging, system.learner)]
        yield Run(system.parts, PatientClient(sdk, system.parts), seed)
        for task in tasks:
            task.cancel()
