"""Run turns of an agent's size through the real loop, over the wire, and count what is billed.

Rule: every token that is counted went through the Tinker adapter, the SDK and our wire server.
Only the judge's answers are scripted, because its model is a tiny random one: its votes are sampled
as always, billed, and then replaced.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cost_adapters import HINTS, MARK, Fresh, OneByOne, Scripted
from benchmarks.tiny_server import NAME, VOCABULARY
from tinker_claw.backends.tinker.trainer import TinkerTrainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.meter import charged
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import JudgeSettings, Run, Settings, Training
from tinker_claw.judge.endpoints import SamplerEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import ready
from tinker_claw.ledger.spend import PURPOSES, Purpose
from tinker_claw.methods import build
from tinker_claw.methods.base import student_topk
from tinker_claw.policy import PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import Identity, Outcome, Place, Prompt, RequestKind
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import (
    Completion,
    Kind,
    NextState,
    SamplingParams,
    StopReason,
    Tokens,
    Usage,
)

Bills = dict[Purpose, Usage]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the turns and votes, in tokens."""

    turns: int = 10
    prompt: int = 11_000
    reply: int = 300
    m: int = 3
    case: int = 335
    """Tokens of request, reply and next state in the judge's prompt. The shipped tokenizer cuts the
    judge's instructions into more tokens than Qwen's does; this number gives prompts of the size
    that Qwen's gives for a request of 80, a reply of 300 and a next state of 60 tokens (about 970:
    instructions and fences are 520)."""

    @property
    def context(self) -> int:
        return self.prompt + self.reply + 2048  # the judge's question and its longest answer fit


@dataclass(frozen=True, slots=True)
class Bench:
    """One server with its model, shared by every run on it."""

    shape: Shape
    url: str
    renderer: Renderer
    folder: Path
    cfg: Training

    @property
    def judge(self) -> JudgeSettings:
        return JudgeSettings(prm_m=self.shape.m)

    async def trainer(self) -> TinkerTrainer:
        run = Run(model_name=NAME, base_url=self.url)
        settings = Settings(run=run, training=Training(lora_rank=8))
        trainer = await TinkerTrainer.start(settings, key="tml-benchmark")
        await trainer.capabilities()  # probes the server; not billed
        return trainer


def captured(bench: Bench, prompt: Tokens, done: Completion, *, session: int) -> Outcome:
    """Make a turn whose reply ends where the random model's reply was cut off."""
    who = Identity("key", Kind.MAIN, "benchmark", RequestKind.USER)
    return Outcome(
        Place(who, session, (), "word " * 80),
        "me",
        0,
        Prompt(tuple(prompt), len(prompt) - 20),
        replace(done, stop_reason=StopReason.STOP),
        reply_text="word " * (bench.shape.case - 140),
    )


async def serve_turns(bench: Bench) -> tuple[list[tuple[Tokens, Completion]], Usage]:
    """Sample the replies that all runs learn from; return them and their bill."""
    rng = random.Random(0)
    trainer = await bench.trainer()
    sampler = Fresh(await trainer.publish())
    topk = student_topk(build("combine"), bench.cfg)
    params = SamplingParams(max_tokens=bench.shape.reply, seed=1, student_topk=topk)
    length = bench.shape.prompt
    prompts = [
        tuple(rng.randrange(10, VOCABULARY) for _ in range(length))
        for _ in range(bench.shape.turns)
    ]
    with charged() as account:
        replies = await asyncio.gather(*(sampler.sample(prompt, params) for prompt in prompts))
    await trainer.aclose()
    return [(prompt, done) for prompt, (done,) in zip(prompts, replies, strict=True)], account.usage


async def ours(bench: Bench, turns: Sequence[tuple[Tokens, Completion]], hinted: int) -> Bills:
    """Bill a run's first batch through judging and learner; its first `hinted` turns get a hint.

    Raises:
        ExceptionGroup: the step does not come.
    """
    trainer = await bench.trainer()
    ledger = Ledger(bench.folder / f"ours-{hinted}")
    policy = PolicyHolder(await restore(ledger, trainer))
    base, telemetry, health = Fresh(await trainer.base()), Telemetry(None), Health()
    method, spending = build("combine"), Spending(Price(), ledger.spend, telemetry)
    parts = LoopParts(
        *(ledger, trainer, base, method, policy, telemetry, health, spending, bench.cfg)
    )
    learner = Learner(parts, learning_rate=1e-4)
    judge = Judge(Scripted(SamplerEndpoint(base, bench.renderer)), bench.judge, most_hints=1)
    scorer = HintScorer(parts, bench.renderer, context_tokens=bench.shape.context)
    judging = Judging(parts, judge, scorer, learner.wake, concurrency=8)
    for number, (prompt, done) in enumerate(turns):
        turn = captured(bench, prompt, done, session=ledger.turns.session("me", str(number)))
        ledger.turns.add_next_state(ledger.turns.add(turn), _next_state(number < hinted))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (judging, learner)]
            await _stepped(parts, learner)
            for task in tasks:
                task.cancel()
        return {one: ledger.spend.total(purpose=one).usage for one in PURPOSES}
    finally:
        ledger.close()
        await trainer.aclose()


async def _stepped(parts: LoopParts, learner: Learner) -> None:
    """Wait for the first step.

    Raises:
        RuntimeError: it would not come: judge or learner fails, or no work is left.
    """
    health, ledger = parts.health, parts.ledger
    while parts.policy.current.version.id == 0:
        if error := health.judge.error or health.learner.error:
            raise RuntimeError(f"There is no step: {error}")
        size = parts.training.batch_size
        waiting = ready(ledger.samples.queue(), size)
        if waiting < size and not (ledger.turns.judgeable() or learner.stepping):
            raise RuntimeError(
                f"There is no step: all turns are judged, and {waiting} of "
                f"the {size} samples of a batch are there. {health.last_error or ''}"
            )
        await asyncio.sleep(0.05)


async def naive(bench: Bench, turns: Sequence[tuple[Tokens, Completion]]) -> Bills:
    """Bill judge and teacher of a simple loop: one request per vote, and always three hints."""
    trainer = await bench.trainer()
    ledger = Ledger(bench.folder / "naive")
    policy = PolicyHolder(await restore(ledger, trainer))
    base = Fresh(await trainer.base())
    endpoint = OneByOne(SamplerEndpoint(base, bench.renderer))
    judge = Judge(endpoint, bench.judge, most_hints=len(HINTS))
    telemetry = Telemetry(None)
    parts = LoopParts(
        *(ledger, trainer, base, build("combine"), policy, telemetry, Health()),
        *(Spending(Price(), ledger.spend, telemetry), bench.cfg),
    )
    scorer = HintScorer(parts, bench.renderer, context_tokens=bench.shape.context)
    found: Bills = {}
    with charged() as account:
        turn = captured(bench, *turns[0], session=0)
        asked = (turn.place.text, turn.reply_text, _next_state(True))  # a hint is asked for, too
        await asyncio.gather(*(judge.judge(*asked) for _ in turns))
        found["judge"] = account.usage
    with charged() as account:
        for number, (prompt, done) in enumerate(turns):
            session = ledger.turns.session("me", str(number))
            turn_id = ledger.turns.add(captured(bench, prompt, done, session=session))
            await scorer.teach(ledger.turns.get(turn_id), HINTS)
        found["teacher"] = account.usage
    ledger.close()
    await trainer.aclose()
    return found


def _next_state(marked: bool) -> NextState:
    return NextState("user", "word " * 58 + (MARK if marked else "word word"))


def bench_on(url: str, folder: Path, shape: Shape) -> Bench:
    return Bench(
        shape=shape,
        url=url,
        renderer=Renderer.load(str(MODEL_DIR), "qwen3"),
        folder=folder,
        cfg=Training(batch_size=shape.turns, opd_topk=4, gate="off"),  # its questions cost, too
    )
