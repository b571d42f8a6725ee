"""Turns of an agent's size through the real loop, over the wire; what was billed is counted.

Rule: every token that is counted went through the Tinker adapter, the SDK and our wire server.
Scripted are the judge's words only, because the model behind it is a tiny random one: its votes are
sampled as always, billed, and then replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from local_gpu.demo import MODEL_DIR
from tinker_claw.backends.tinker import TinkerConfig, TinkerTrainer
from tinker_claw.config import Judge as JudgeSettings
from tinker_claw.config import Training
from tinker_claw.judge import Endpoint, Judge, SamplerEndpoint
from tinker_claw.learner import (
    Health,
    HintScorer,
    Judging,
    JudgingDeps,
    Learner,
    LearnerDeps,
    restore,
)
from tinker_claw.ledger import Ledger, NewTurn
from tinker_claw.ledger.spend import Purpose
from tinker_claw.metering import charged
from tinker_claw.methods import build, student_topk
from tinker_claw.policy import PolicyHolder, Sampler
from tinker_claw.prices import Price
from tinker_claw.render import Renderer
from tinker_claw.spending import Spending
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import (
    Completion,
    Kind,
    Message,
    NextState,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    Usage,
)

NAME = "tiny"
VOCABULARY = 4096
MARK = "elsewise"
"""A word in the next state of the turns that get a hint."""
HINTS = tuple(
    f"Answer in {n} short sentences, without a list, and name the file that you have read first; "
    "leave out the summary at the end, because the user reads the file himself anyway."
    for n in ("two", "three", "four")
)
Bills = dict[Purpose, Usage]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of what is measured, in tokens."""

    turns: int = 10
    prompt: int = 11_000
    reply: int = 300
    vote: int = 300
    m: int = 3
    case: int = 369
    """Of request, reply and next state in the judge's prompt. With the shipped tokenizer, which
    cuts its instructions into more tokens than Qwen's, this makes prompts of the size that Qwen's
    gives for a request of 80, a reply of 300 and a next state of 60 tokens (684; measured)."""


class Fresh(Sampler):
    """No two requests share a prefix, so that no cache helps: ours and naive pay in full.

    Nothing ends early either: a random model would stop where it likes.
    """

    _numbers = itertools.count()

    def __init__(self, inner: Sampler) -> None:
        self.ref = inner.ref
        self._inner = inner

    def _begin(self, tokens: Tokens) -> tuple[int, ...]:
        return (10 + next(self._numbers) % (VOCABULARY - 10), *tokens[1:])

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncIterator[TokenChunk]:
        return self._inner.stream(self._begin(prompt), params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        return await self._inner.sample(self._begin(prompt), replace(params, stop_tokens=()), n)

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        return await self._inner.logprobs(
            self._begin(tokens), start=start, targets=targets, top_k=top_k
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class Scripted(Endpoint):
    """Asks the real endpoint, which is billed, and answers by the marks in the case."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        await self._inner.answers(messages, n)
        marked = MARK in messages[-1]["content"]
        if "[HINT]" in messages[0]["content"]:
            return [f"\\boxed{{1}}[HINT]{HINTS[0]}[/HINT]" if marked else "\\boxed{-1}"] * n
        return ["\\boxed{-1}" if marked else "\\boxed{1}"] * n

    async def aclose(self) -> None: ...


class OneByOne(Endpoint):
    """Every vote is a request of its own, all at the same time."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        votes = await asyncio.gather(*(self._inner.answers(messages, 1) for _ in range(n)))
        return [vote for (vote,) in votes]

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """One server with its model, and what every run on it shares."""

    shape: Shape
    url: str
    renderer: Renderer
    folder: Path
    cfg: Training

    @property
    def judge(self) -> JudgeSettings:
        return JudgeSettings(prm_m=self.shape.m, prm_max_tokens=self.shape.vote)

    async def trainer(self) -> TinkerTrainer:
        config = TinkerConfig(model=NAME, base_url=self.url, key="tml-benchmark", rank=8)
        trainer = await TinkerTrainer.start(config)
        await trainer.capabilities()  # probes the server; billed to nobody
        return trainer


def captured(bench: Bench, prompt: Tokens, done: Completion, *, session: int) -> NewTurn:
    return NewTurn(
        session_id=session,
        kind=Kind.MAIN,
        kind_reason="benchmark",
        policy_version=0,
        prompt=tuple(prompt),
        completion=done,
        hint_at=len(prompt) - 20,
        request_text="word " * 80,
        reply_text="word " * (bench.shape.case - 140),
        history=(),
        reply_digest="",
    )


async def serve_turns(bench: Bench) -> tuple[list[tuple[Tokens, Completion]], Usage]:
    """Sample the replies that all runs learn from; and what that was billed."""
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
    """One batch through judging and learner, the first `hinted` turns with a hint."""
    trainer = await bench.trainer()
    ledger = Ledger(bench.folder / f"ours-{hinted}")
    policy = PolicyHolder(await restore(ledger, trainer))
    base, telemetry, health = Fresh(await trainer.base()), Telemetry(None), Health()
    method, spending = build("combine"), Spending(Price(), ledger.spend, telemetry)
    for number, (prompt, done) in enumerate(turns):
        session = ledger.turns.session("me", str(number))
        turn_id = ledger.turns.add(captured(bench, prompt, done, session=session))
        ledger.turns.add_next_state(turn_id, _next_state(number < hinted))
    learner = Learner(
        LearnerDeps(
            *(ledger, trainer, base, method, policy, telemetry, health, spending, bench.cfg),
            learning_rate=1e-4,
        )
    )
    judge = Judge(
        Scripted(SamplerEndpoint(base, bench.renderer, bench.judge)), bench.judge, hint_candidates=1
    )
    scorer = HintScorer(base, bench.renderer, bench.cfg)
    judging = Judging(
        JudgingDeps(
            *(ledger, judge, scorer, method, policy, telemetry, health, spending),
            on_sample=learner.wake,
            concurrency=8,
        )
    )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part.run()) for part in (judging, learner)]
        while policy.current.version.id == 0:  # noqa: ASYNC110 - the loop tells nobody
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
    found: Bills = {purpose: spent.usage for purpose, spent in ledger.spend.by_purpose().items()}
    ledger.close()
    await trainer.aclose()
    return found


async def naive(bench: Bench, turns: Sequence[tuple[Tokens, Completion]]) -> Bills:
    """Judge and teacher as a straightforward loop has them: each vote alone, three hints always."""
    trainer = await bench.trainer()
    ledger = Ledger(bench.folder / "naive")
    policy = PolicyHolder(await restore(ledger, trainer))
    base = Fresh(await trainer.base())
    endpoint = OneByOne(SamplerEndpoint(base, bench.renderer, bench.judge))
    judge = Judge(endpoint, bench.judge, hint_candidates=len(HINTS))
    scorer = HintScorer(base, bench.renderer, bench.cfg)
    found: Bills = {}
    with charged() as account:
        turn = captured(bench, *turns[0], session=0)
        asked = (turn.request_text, turn.reply_text, _next_state(False))
        await asyncio.gather(*(judge.judge(*asked) for _ in turns))
        found["judge"] = account.usage
    with charged() as account:
        for number, (prompt, done) in enumerate(turns):
            session = ledger.turns.session("me", str(number))
            turn_id = ledger.turns.add(captured(bench, prompt, done, session=session))
            await scorer.score(ledger.turns.get(turn_id), HINTS, policy.current)
        found["teacher"] = account.usage
    ledger.close()
    await trainer.aclose()
    return found


def _next_state(marked: bool) -> NextState:
    return NextState("user", "word " * 58 + (MARK if marked else "word word"))


@contextmanager
def server(folder: Path, context_tokens: int, threads: int) -> Generator[str]:
    """`python -m local_gpu.serve` with a random model of two layers; yields its address."""
    model = folder / "models" / "tiny"
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(model)
    command = [sys.executable, "-m", "local_gpu.serve", "--port", "0", "--name", NAME]
    command += ["--model", str(model), "--root", str(folder / "served"), "--threads", str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                raise RuntimeError("the wire server did not start; it says why above")
            yield line.split(" at ")[1].split()[0]
        finally:
            process.terminate()
            process.wait(60)


def bench_on(url: str, folder: Path, shape: Shape) -> Bench:
    return Bench(
        shape=shape,
        url=url,
        renderer=Renderer.load(str(MODEL_DIR), "qwen3"),
        folder=folder,
        cfg=Training(batch_size=shape.turns, opd_mode="topk", opd_topk=4),
    )
