"""The demo's model, learning in this process from the demo's users.

Rule: ledger, judging, learner and trainer are the real ones, and users, judge and exam are the
demo's. Left out are HTTP and the gateway: `Direct` samples from the version that answers, and
writes the turns down itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from examples.demo.client import MAX_TOKENS, Client, Request
from examples.demo.homework import Problem
from examples.demo.judge import answer, opinion
from examples.demo.scoring import RuleExam, Score, score_version
from examples.demo.user import IN_FLIGHT, Outcome, Rule, User, hold_sessions
from examples.personalize.judges import Think
from tests.support.ledger import outcome
from tinker_claw.backends.open import open_trainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.canaries import read
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner.gate import Gate, canary_questions
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import usable
from tinker_claw.methods import build
from tinker_claw.methods.base import student_topk
from tinker_claw.policy import PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import DEMO_CANARIES, MODEL_DIR
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Charge, Kind, Message, NextState, SamplingParams, uncharged

NAME = "me"
"""Name of the user whose sessions they are."""


class Rules:
    """The demo's judge, without HTTP."""

    def __init__(self, seed: int, think: Think = opinion) -> None:
        self._rng = Random(seed)
        self._think = think

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        return [answer([dict(m) for m in messages], self._rng, self._think) for _ in range(n)]

    async def aclose(self) -> None: ...


class Direct(Client):
    """Does what the gateway does for the demo's users, without HTTP."""

    def __init__(self, parts: LoopParts, judging: Judging, renderer: Renderer) -> None:
        self._parts, self._judging, self._renderer = parts, judging, renderer
        self._open: dict[str, int] = {}
        """Turn that waits for its next state, by session."""
        self.enough: Callable[[], bool] = lambda: False

    async def ask(self, request: Request) -> str:
        said, ledger = str(request.messages[-1]["content"]), self._parts.ledger
        if (turn := self._open.pop(request.session, None)) is not None:
            ledger.turns.add_next_state(turn, NextState("user", said))
            self._judging.wake()
        if request.last and request.kind == "main":
            return ""  # which no user looks at
        if request.kind == "main":
            await self._until_wanted()
        policy, renderer = self._parts.policy.current, self._renderer
        messages = [dict(message) for message in request.messages]
        prompt = renderer.prompt(messages, hint_message=len(messages) - 1)
        params = SamplingParams(
            MAX_TOKENS,
            seed=request.seed,
            stop_tokens=renderer.stop_tokens,
            student_topk=student_topk(self._parts.method, self._parts.training),
        )
        (done,) = await policy.sampler.sample(prompt.tokens, params)
        reply = renderer.parse(done.tokens, prompt.tokens).text
        if request.kind == "main":
            self._open[request.session] = ledger.turns.add(
                outcome(
                    session_id=ledger.turns.session(NAME, request.session),
                    kind=Kind.MAIN,
                    kind_reason="scripted",
                    policy_version=policy.version.id,
                    prompt=prompt.tokens,
                    completion=done,
                    hint_at=prompt.hint_at,
                    request_text=said,
                    reply_text=reply,
                    history=(),
                    reply_digest="",
                )
            )
        return reply

    async def _until_wanted(self) -> None:
        """Wait while judge and trainer are behind, so that turns do not get stale: all share one
        process."""
        most = 3 * self._parts.training.batch_size
        while not self.enough() and (  # noqa: ASYNC110 - nobody tells
            len(usable(self._parts.ledger.samples.queue())) > most
            or len(self._parts.ledger.jobs.waiting()) > 2 * IN_FLIGHT
        ):
            await asyncio.sleep(0.02)


@dataclass
class Run:
    """A run, and the users who talk to it."""

    parts: LoopParts
    client: Direct
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
        """Score the version that serves."""
        return await score_version(self.client, self.step, RuleExam.draw(user, problems))

    async def talk(self, user: User, enough: Callable[[], bool]) -> None:
        """Hold sessions, six at a time, until there are enough."""

        async def ended(outcome: Outcome) -> None: ...

        later = user.later and self._watched(user.later)
        watched = replace(user, wants=self._watched(user.wants), later=later)
        self.client.enough = enough
        await hold_sessions(
            [(self.client, watched)],
            self.seed,
            step=lambda: self.step,
            enough=enough,
            ended=ended,
        )

    def _watched(self, rule: Rule) -> Rule:
        """Make the same rule, and count what the user reads."""

        def accepts(reply: str, problem: Problem) -> bool:
            self.turns += 1
            return rule.accepts(reply, problem)

        return replace(rule, accepts=accepts)


@asynccontextmanager
async def demo_run(path: Path, think: Think = opinion, **flags: object) -> AsyncGenerator[Run]:
    """Run the demo's settings, except for the given flags, in a folder of its own. `think`: the
    judge's opinions."""
    given = {"data_dir": path, **flags}
    settings = load(
        ["--config", "configs/demo.toml"]
        + [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    )
    cfg, seed = settings.training, settings.run.seed
    assert isinstance(cfg.learning_rate, float)
    renderer = Renderer.load(str(MODEL_DIR), "qwen3")
    ledger, telemetry = Ledger(path), Telemetry(None)
    try:
        async with open_trainer(settings, str(MODEL_DIR)) as trainer:
            can = await trainer.capabilities()
            parts = LoopParts(
                ledger=ledger,
                trainer=trainer,
                base=await trainer.base(),
                method=build(settings.run.method),
                policy=PolicyHolder(await restore(ledger, trainer)),
                telemetry=telemetry,
                health=Health(),
                spending=Spending(Price(), ledger.spend, telemetry),
                training=cfg,
            )
            asked = canary_questions(read(DEMO_CANARIES), renderer)
            gate = Gate(parts, asked) if cfg.gate != "off" else None
            learner = Learner(parts, learning_rate=cfg.learning_rate, gate=gate)
            judge = Judge(Rules(seed, think), JudgeSettings(), most_hints=cfg.hints_scored)
            scorer = HintScorer(parts, renderer, context_tokens=can.context_tokens)
            judging = Judging(parts, judge, scorer, learner.wake)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part.run()) for part in (judging, learner)]
                yield Run(parts, Direct(parts, judging, renderer), seed)
                for task in tasks:
                    task.cancel()
    finally:
        ledger.close()
