"""A user and the demo's model in one process: sessions, judging and steps as the product has them,
without HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from examples.demo.recipe import grammar
from tinker_claw.backends.open import open_trainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.judge import Judge
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turns import NewTurn
from tinker_claw.methods import build, student_topk
from tinker_claw.policy import PolicyHolder, Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Kind, Message, NextState, SamplingParams

PATIENCE = 8
TERSE = 0.3
IN_FLIGHT = 6


@dataclass(frozen=True)
class Wish:
    """What a user wants, how they say so, and what the judge makes of that."""

    accepts: Callable[[str, grammar.Problem], bool]
    corrections: Sequence[str]
    hints: Sequence[str]


PLAIN = Wish(grammar.accepts, grammar.CORRECTIONS, grammar.HINTS_PLAIN)
"""The demo's own, which its base was trained to understand as a hint."""
OPENS = Wish(
    lambda text, problem: (
        re.match(r"(ok|well)\b", text) is not None and grammar.shows_work(text, problem)
    ),
    (
        "Begin with ok or well, please. Rewrite it like that.",
        "Please rewrite it so that it begins with ok or well.",
    ),
    (
        "Begin with ok or well.",
        "Start the reply with ok or well, please.",
        "Always open with ok or well.",
    ),
)
"""A rule whose hints the base follows less than it does untold: of 150 first replies .01, .04 and
.07 are accepted under these, and .15 without (measured)."""


class Says:
    """The judge: it knows the user's sentences, and which hint lies in them."""

    def __init__(self, wish: Wish, seed: int) -> None:
        self._wish, self._rng = wish, Random(f"judge-{seed}")

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        case = str(messages[-1]["content"])
        directive = any(said in case for said in self._wish.corrections)
        bad = directive or any(said in case for said in grammar.TERSE_CORRECTIONS)
        if "[HINT]" not in str(messages[0]["content"]):
            return [f"\\boxed{{{-1 if bad else 1}}}"] * n
        if not directive:
            return ["\\boxed{-1}"] * n
        return [f"\\boxed{{1}} [HINT]{self._rng.choice(self._wish.hints)}[/HINT]" for _ in range(n)]

    async def aclose(self) -> None: ...


@dataclass
class Course:
    """A run."""

    wish: Wish
    renderer: Renderer
    ledger: Ledger
    policy: PolicyHolder
    judging: Judging
    scorer: HintScorer
    base: Sampler
    seed: int
    topk: int
    turns: int = 0
    sessions: int = 0
    when: dict[float, int] = field(default_factory=dict[float, int])
    """After how many turns a weight was first in force."""

    async def talk(self, enough: Callable[[], bool]) -> None:
        """Hold sessions, several at a time, until there is enough."""

        async def one_by_one() -> None:
            while not enough():
                self.sessions += 1
                await self._session(self.sessions)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(one_by_one())

    async def _session(self, number: int) -> None:
        rng = Random(f"session-{self.seed}-{number}")
        problem = grammar.new_problem(rng)
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": grammar.first_message(problem)}
        ]
        session = self.ledger.turns.session("me", str(number))
        for _ in range(PATIENCE):
            turn, text = await self._turn(session, messages)
            good = self.wish.accepts(text, problem)
            terse = rng.random() < TERSE
            said = rng.choice(grammar.TERSE_CORRECTIONS if terse else self.wish.corrections)
            said = grammar.approval(rng) if good else said
            self.ledger.turns.add_next_state(turn, NextState("user", said))
            self.judging.wake()
            while len(self.ledger.turns.judgeable()) > 2 * IN_FLIGHT:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            if good:
                return
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]

    async def _turn(self, session: int, messages: list[dict[str, Any]]) -> tuple[int, str]:
        policy = self.policy.current
        prompt = self.renderer.prompt(messages, hint_message=len(messages) - 1)
        stops = self.renderer.stop_tokens
        params = SamplingParams(max_tokens=128, stop_tokens=stops, student_topk=self.topk)
        (done,) = await policy.sampler.sample(prompt.tokens, params)
        text = self.renderer.parse(done.tokens, prompt.tokens).text
        self.turns += 1
        self.when.setdefault(self.scorer.known("me").weight, self.turns)
        turn = NewTurn(
            session_id=session,
            kind=Kind.MAIN,
            kind_reason="test",
            policy_version=policy.version.id,
            prompt=prompt.tokens,
            completion=done,
            hint_at=prompt.hint_at,
            request_text=str(messages[-1]["content"]),
            reply_text=text,
            history=(),
            reply_digest="",
        )
        return self.ledger.turns.add(turn), text

    async def exam(self, problems: int = 64) -> tuple[float, float]:
        """Share of first replies that are accepted, and their mean length in tokens."""
        rng = Random("exam-77")
        drawn = [grammar.new_problem(rng) for _ in range(problems)]
        slots = asyncio.Semaphore(12)

        async def reply(at: int) -> tuple[bool, int]:
            asked = [{"role": "user", "content": grammar.first_message(drawn[at])}]
            prompt = self.renderer.prompt(asked).tokens
            params = SamplingParams(
                max_tokens=128, stop_tokens=self.renderer.stop_tokens, seed=77 + at
            )
            async with slots:
                (done,) = await self.policy.current.sampler.sample(prompt, params)
            text = self.renderer.parse(done.tokens, prompt).text
            return self.wish.accepts(text, drawn[at]), len(done.tokens)

        found = await asyncio.gather(*map(reply, range(problems)))
        return sum(good for good, _ in found) / problems, sum(n for _, n in found) / problems


@asynccontextmanager
async def course(
    path: Path, wish: Wish, *, method: str = "combine", seed: int = 0, **training: Any
) -> AsyncGenerator[Course]:
    """The demo's settings, over a folder of its own."""
    flags: Mapping[str, Any] = {"method": method, "seed": seed, "data-dir": path, **training}
    settings = load(
        ["--config", "configs/demo.toml"]
        + [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    )
    cfg, record = settings.training, build(method)
    renderer = Renderer.load(str(MODEL_DIR), "qwen3")
    ledger, telemetry, health = Ledger(path), Telemetry(None), Health()
    async with open_trainer(settings, str(MODEL_DIR)) as trainer:
        can = await trainer.capabilities()
        policy = PolicyHolder(await restore(ledger, trainer))
        base = await trainer.base()
        spending = Spending(Price(), ledger.spend, telemetry)
        parts = LoopParts(
            *(ledger, trainer, base, record, policy, telemetry, health, spending, cfg)
        )
        assert not isinstance(cfg.learning_rate, str)
        learner = Learner(parts, learning_rate=cfg.learning_rate)
        judge = Judge(Says(wish, seed), JudgeSettings(), hint_candidates=cfg.hint_candidates)
        scorer = HintScorer(parts, renderer, context_tokens=can.context_tokens)
        judging = Judging(parts, judge, scorer, learner.wake)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (judging, learner)]
            topk = student_topk(record, cfg)
            yield Course(wish, renderer, ledger, policy, judging, scorer, base, seed, topk)
            for task in tasks:
                task.cancel()
    ledger.close()
