"""The demo's model, learning in this process from users who follow a script.

Rule: ledger, judging, learner and trainer are the real ones. Left out are HTTP and the gateway: a
session samples from the version that answers, and writes its turns down itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.demo.judge import answer
from examples.demo.recipe.grammar import (
    Problem,
    accepts,
    approval,
    correction,
    first_message,
    new_problem,
    shows_work,
)
from examples.demo.scoring import EXAM_SEED, Exam, Score
from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import JudgeSettings, Training
from tinker_claw.judge.judge import Judge
from tinker_claw.learner.guard import WINDOW, Guard
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turns import NewTurn
from tinker_claw.methods import build
from tinker_claw.policy import PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Kind, Message, NextState, SamplingParams

IN_FLIGHT = 6
MAX_TURNS = 8
MAX_TOKENS = 128
TERSE_SHARE = 0.3


@dataclass(frozen=True)
class User:
    """Somebody with a script."""

    content: Callable[[str, Problem], bool]
    terse: float
    """Share of their corrections that do not say what is wrong."""
    right: Callable[[str, Problem], bool] = shows_work
    """What an auditor thinks of a reply."""


HONEST = User(accepts, TERSE_SHARE, right=accepts)
NEVER_CONTENT = User(lambda reply, problem: False, 1.0)
PRAISES_GARBAGE = User(lambda reply, problem: not shows_work(reply, problem), 1.0)


class Rules:
    """The demo's judge, without HTTP."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        return [answer([dict(m) for m in messages], self._rng) for _ in range(n)]

    async def aclose(self) -> None: ...


@dataclass
class Run:
    """A run, its users, and what they got."""

    parts: LoopParts
    learner: Learner
    judging: Judging
    renderer: Renderer
    seed: int
    right: dict[int, float]
    """What an auditor says of a turn, by id: 1 or -1."""

    @property
    def held(self) -> bool:
        return self.parts.health.learner.state == "held"

    @property
    def step(self) -> int:
        return self.parts.policy.newest.version.step

    async def exam(self, exam: Exam) -> tuple[float, Score]:
        """Mean characters of first replies of the version that answers, and its score."""
        sampler = self.parts.policy.current.sampler

        async def reply(number: int, question: str) -> str:
            prompt = self.renderer.prompt([{"role": "user", "content": question}]).tokens
            params = SamplingParams(
                MAX_TOKENS, seed=EXAM_SEED + number, stop_tokens=self.renderer.stop_tokens
            )
            (done,) = await sampler.sample(prompt, params)
            return self.renderer.parse(done.tokens, prompt).text

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reply(i, text)) for i, text in enumerate(exam.questions())]
        replies = [task.result() for task in tasks]
        return fmean(map(len, replies[: len(exam.problems)])), exam.grade(replies)

    async def session(self, number: int, user: User) -> None:
        """One conversation, until the user is content or has lost patience."""
        rng = random.Random(f"session-{self.seed}-{number}")
        problem, turns = new_problem(rng), self.parts.ledger.turns
        session = turns.session("default", f"{self.seed}-{number}")
        messages: list[Message] = [{"role": "user", "content": first_message(problem)}]
        for _ in range(MAX_TURNS):
            policy = self.parts.policy.current
            prompt = self.renderer.prompt(messages, hint_message=len(messages) - 1)
            params = SamplingParams(
                MAX_TOKENS,
                seed=rng.randrange(2**31),
                stop_tokens=self.renderer.stop_tokens,
                student_topk=self.parts.training.opd_topk,
            )
            (done,) = await policy.sampler.sample(prompt.tokens, params)
            reply = self.renderer.parse(done.tokens, prompt.tokens).text
            turn_id = turns.add(
                NewTurn(
                    session_id=session,
                    kind=Kind.MAIN,
                    kind_reason="scripted",
                    policy_version=policy.version.id,
                    prompt=prompt.tokens,
                    completion=done,
                    hint_at=prompt.hint_at,
                    request_text=messages[-1]["content"],
                    reply_text=reply,
                    history=(),
                    reply_digest="",
                )
            )
            self.right[turn_id] = 1.0 if user.right(reply, problem) else -1.0
            pleased = user.content(reply, problem)
            terse = rng.random() < user.terse
            said = approval(rng) if pleased else correction(rng, directive=not terse)
            turns.add_next_state(turn_id, NextState("user", said))
            self.judging.wake()
            if pleased:
                return
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]

    async def talk(self, user: User, enough: Callable[[], bool]) -> None:
        """Sessions, six at a time, until there are enough."""
        numbers = count()

        async def one_by_one() -> None:
            while not enough():
                while self.parts.ledger.samples.waiting() > 3 * self.parts.training.batch_size:
                    await asyncio.sleep(0.02)
                    if enough():
                        return
                await self.session(next(numbers), user)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(one_by_one())


@asynccontextmanager
async def demo_run(
    path: Path, *, seed: int = 0, audited: bool = False, **training: Any
) -> AsyncGenerator[Run]:
    """The demo's settings, but for those that are given. `audited`: the guard hears an auditor."""
    demo: dict[str, Any] = {"learning_rate": 6e-3, "lora_rank": 16}
    cfg = Training(**(demo | training))
    ledger = Ledger(path)
    config = LocalConfig(
        model=str(MODEL_DIR), root=path, rank=cfg.lora_rank, alpha=32, seed=seed, threads=1
    )
    trainer = await LocalTrainer.start(config)
    renderer = Renderer.load(str(MODEL_DIR), "qwen3")
    telemetry = Telemetry(path / "metrics.jsonl")
    try:
        parts = LoopParts(
            ledger=ledger,
            trainer=trainer,
            base=await trainer.base(),
            method=build("combine"),
            policy=PolicyHolder(await restore(ledger, trainer)),
            telemetry=telemetry,
            health=Health(),
            spending=Spending(Price(), ledger.spend, telemetry),
            training=cfg,
        )
        assert isinstance(cfg.learning_rate, float)
        right = dict[int, float]()

        def opinions(after: int) -> list[tuple[float, float]]:
            newest = ledger.judgements.lately(WINDOW, after)
            return [(reply.verdict, right[reply.turn_id]) for reply in newest]

        guard = Guard(parts, opinions=opinions if audited else lambda after: ())
        learner = Learner(parts, learning_rate=cfg.learning_rate, guard=guard)
        judge = Judge(Rules(seed), JudgeSettings(), hint_candidates=cfg.hint_candidates)
        can = await trainer.capabilities()
        scorer = HintScorer(parts, renderer, context_tokens=can.context_tokens)
        judging = Judging(parts, judge, scorer, learner.wake)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (judging, learner)]
            yield Run(parts, learner, judging, renderer, seed, right)
            for task in tasks:
                task.cancel()
    finally:
        await trainer.aclose()
        ledger.close()
