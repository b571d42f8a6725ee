"""Judging and learning over a real ledger, with a judge and a trainer that do as they are told."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer, rated
from tests.support.ledger import judgeable, outcome, sample_counts, sql
from tests.support.waits import eventually
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import JudgeSettings, Training
from tinker_claw.errors import JudgeError, OutageError
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner import judging
from tinker_claw.learner.gate import Gate
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.lesson_replies import LessonReplies
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.practice import Practice
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import COMBINE, build
from tinker_claw.methods.base import HINT as HINT_TEACHING
from tinker_claw.methods.base import Method
from tinker_claw.policy import PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.served import Prompt
from tinker_claw.telemetry import Telemetry
from tinker_claw.turn_state import TurnRefusal
from tinker_claw.types import (
    Charge,
    Completion,
    Images,
    LossPass,
    Message,
    NextState,
    Reply,
    SamplingParams,
    StopReason,
    Tokens,
    Usage,
    uncharged,
)

PROMPT = (1, 2, 3, 4)
HINT = (90, 91)
LESSON = (80, 81)
"""Ids of every lesson, before the prompt."""
BETTER = (90, 92)
SHORT = Backoff(first_s=0.01, longest_s=0.04)


OPPOSITE = "This time with headings."
"""Stands in a question about a reply to a request for the opposite."""


class Splicer:
    """The part of a renderer that hints need."""

    def shorten(self, text: str, most: int) -> str:
        return text if len(text) <= most else f"{text[:most]} [...]"

    def hint_tokens(self, hint: str, words: str) -> tuple[int, ...]:
        return BETTER if "better" in hint else HINT

    def splice(self, prompt: Tokens, hint_at: int, hint: str, words: str) -> tuple[int, ...]:
        return (*prompt[:hint_at], *self.hint_tokens(hint, words), *prompt[hint_at:])

    def with_system_text(self, prompt: Tokens, text: str) -> tuple[int, ...]:
        return (*LESSON, *prompt)

    def prompt(self, messages: Sequence[Message], *, remembers: bool) -> Prompt:
        """Return the numbers in the last message."""
        text = messages[-1]["content"]
        return Prompt((1, *map(int, re.findall(r"\b\d+\b", text))), None)

    def begin_text(self) -> tuple[int, ...]:
        return ()

    def decode(self, tokens: Tokens) -> str:
        return " ".join(map(str, tokens))

    def parse(self, tokens: Tokens, prompt: Tokens) -> Reply:
        return Reply(" ".join(map(str, tokens)))


@dataclass
class Says:
    """A judge's endpoint whose answers follow from the next state in the prompt."""

    failing: int = 0
    away: int = 0
    """Number of questions that find the service away."""
    asked: int = 0
    billed: Usage = Usage()  # noqa: RUF009 - frozen
    """Bill of one question, whatever its result."""

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        self.asked += 1
        charge(self.billed)
        text = messages[-1]["content"]
        if self.away:
            self.away -= 1
            raise OutageError("the service is away, as told")
        if self.failing or "UNJUDGEABLE" in text:
            self.failing = max(0, self.failing - 1)
            raise JudgeError("the judge is away")
        bad, good = "NO" in text, "YES" in text
        if "MUMBLE" in text:
            return ["I'm sorry, I cannot rate that."] * n
        told = ("how", "do it the other way") if "HOW" in text else ("", "")
        return [rated(-1 if bad else 1 if good else 0, *told)] * n

    async def aclose(self) -> None: ...


@dataclass
class World:
    parts: LoopParts
    ledger: Ledger
    trainer: FakeTrainer
    policy: PolicyHolder
    judging: Judging
    learner: Learner
    says: Says
    health: Health
    metrics: Path
    spending: Spending
    telemetry: Telemetry
    sessions: int = 0
    base: FakeSampler = field(default_factory=FakeSampler)

    def turn(
        self,
        said: str,
        *,
        hint_at: int | None = 3,
        tokens: Tokens = (7, 8),
        session: str | None = None,
        role: Literal["user", "tool"] = "user",
        asked: str = "please",
        reply: str = "done",
        cut: bool = False,
        user: str = "me",
        prompt: tuple[int, ...] = PROMPT,
        images: Images = (),
        k: int = 4,
        state: NextState | None = None,
        client: str = "",
        holds_secret: bool = False,
    ) -> int:
        """Add a captured main turn whose next state is `said`, of a session of its own unless
        named. GOOD is rated +1 outright, of which alone a batch may be; YES is not."""
        self.sessions += 1
        done = Completion(
            tokens=tuple(tokens),
            logprobs=(LOGPROB,) * len(tokens),
            topk_ids=tuple(tuple(range(t, t + k)) for t in tokens if k),
            topk_logprobs=((LOGPROB,) * k,) * len(tokens) if k else (),
            stop_reason=StopReason.LENGTH if cut else StopReason.STOP,
            params=SamplingParams(max_tokens=8, stop_tokens=(8,)),
        )
        turn_id = self.ledger.turns.add(
            outcome(
                session_id=self.ledger.turns.session(user, session or str(self.sessions)),
                policy_version=self.policy.current.version.id,
                prompt=prompt,
                completion=done,
                hint_at=hint_at,
                request_text=asked,
                reply_text=reply,
                images=images,
                client=client,
                holds_secret=holds_secret,
            )
        )
        self.ledger.turns.add_next_state(turn_id, state or NextState(role, said))
        if "GOOD" in said:
            assert self.ledger.feedback.give(user, About("turn", turn_id), Feedback(1.0))
        self.judging.wake()
        return turn_id

    async def until(self, happened: Callable[[], bool]) -> None:
        await eventually(happened)

    async def settled(self) -> None:
        await self.until(lambda: not judgeable(self.ledger))

    async def version(self, number: int) -> None:
        await self.until(lambda: self.policy.current.version.id >= number)

    def untaught(self, turn_id: int) -> str | None:
        """Reason why the sample of this turn has no teacher."""
        return sql(self.ledger).one("SELECT untaught FROM samples WHERE turn_id = ?", turn_id)

    def why_refused(self, turn_id: int) -> str | None:
        row = sql(self.ledger).row(  # there is no reader for it yet
            "SELECT reason, detail FROM turns WHERE id = ? AND reason IS NOT NULL", turn_id
        )
        return str(TurnRefusal(row["reason"], row["detail"] or "")) if row else None


SCORING = replace(COMBINE, teaching=HINT_TEACHING)
"""`combine` with a teacher that scores the student's reply, as `opd` has."""


@asynccontextmanager
async def world(
    path: Path,
    *,
    method: str | Method = "combine",
    trainer: FakeTrainer | None = None,
    running: bool = True,
    spending: Callable[[Ledger, Telemetry], Spending] | None = None,
    waits: Backoff = SHORT,
    redact: Callable[[str], str] = str,
    score_fresh: bool = False,
    judge_waits: Backoff = judging.WAITS,
    rests: Backoff = judging.RESTS,
    silent_s: float = judging.SILENT_S,
    endpoint: Endpoint | None = None,
    ahead_s: float = 0.0,
    gate: Callable[[LoopParts], Gate] | None = None,
    gate_is: str = "off",
    judge_images: bool = False,
    **training: Any,
) -> AsyncGenerator[World]:
    cfg = Training(**({"batch_size": 4, "gate": gate_is} | training))
    ledger = Ledger(path)
    trainer = trainer or FakeTrainer()
    policy = PolicyHolder(await restore(ledger, trainer))
    telemetry, health, says = Telemetry(path / "metrics.jsonl"), Health(), Says()
    base = await trainer.base()
    paid = spending(ledger, telemetry) if spending else Spending(Price(), ledger.spend, telemetry)
    rule = build(method) if isinstance(method, str) else method
    parts = LoopParts(ledger, trainer, base, rule, policy, telemetry, health, paid, cfg)
    scorer = HintScorer(parts, Splicer(), context_tokens=trainer.context_tokens)  # type: ignore[arg-type]
    asks = gate(parts) if gate else None
    learner = Learner(
        parts,
        learning_rate=1e-3,
        gate=asks,
        practice=_practice(parts, endpoint or says, asks) if cfg.practice == "on" else None,
        score_fresh=score_fresh,
        waits=waits,
        now=lambda: time.time() + ahead_s,
    )
    judge = Judge(
        endpoint or says, JudgeSettings(judge_images=judge_images), most_hints=cfg.hints_scored
    )
    judged = Judging(
        parts,
        judge,
        scorer,
        learner.wake,
        concurrency=4,
        redact=redact,
        waits=judge_waits,
        rests=rests,
        silent_s=silent_s,
    )
    assert isinstance(base, FakeSampler)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (judged, learner) if running]
            yield World(
                parts, ledger, trainer, policy, judged, learner, says, health,
                path / "metrics.jsonl", paid, telemetry, base=base,
            )  # fmt: skip
            for task in tasks:
                task.cancel()
    finally:
        ledger.close()


def _practice(parts: LoopParts, writer: Endpoint, gate: Gate | None) -> Practice:
    renderer = cast("Renderer", Splicer())
    replies = LessonReplies(parts, renderer, writer, context_tokens=4096, soft=True)
    return Practice(parts, replies, gate)


def has_token(token: int) -> Callable[[Sequence[LossPass]], bool]:
    return lambda passes: any(token in d.tokens for p in passes for d in p.datums)


async def bad_batch(w: World) -> None:
    """Complete a batch with a bad sample, and see it set aside."""
    w.turn("NO", tokens=(666,))
    for _ in range(3):
        w.turn("YES")
    await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 4)
