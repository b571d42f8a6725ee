"""Workloads of the comparison: streams, and a further turn after a long prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.baseline import Plain
from local_gpu.trainer import LocalTrainer
from tinker_claw.policy import Sampler
from tinker_claw.types import SamplingParams

VOCABULARY = 4096
STREAMS = 24
NEW_TOKENS = 60
AGENT_PROMPT = 8000
"""Tokens of an agent's prompt."""


@dataclass(frozen=True)
class Case:
    what: str
    ours: Callable[[], Awaitable[object]]
    other_name: str
    other: Callable[[], Awaitable[object]]


def cases(trainer: LocalTrainer, plain: Plain) -> list[Case]:
    """Make the comparisons, with fixed seeds."""
    rng = random.Random(0)
    prompts = [_tokens(rng, rng.randint(40, 200)) for _ in range(STREAMS)]
    agent = _tokens(rng, AGENT_PROMPT)

    async def streams() -> None:
        sampler = await trainer.base()
        await asyncio.gather(*(sampler.sample(p, _params(NEW_TOKENS)) for p in prompts))
        await sampler.aclose()

    warm: list[Sampler] = []

    async def further_turn() -> None:
        if not warm:
            warm.append(await trainer.publish())
            await warm[0].sample(agent, _params(1))
        await warm[0].sample((*agent, *_tokens(rng, 30)), _params(8))

    return [
        Case(
            f"{STREAMS} streams of {NEW_TOKENS} tokens",
            streams,
            "generate, one by one",
            _call(lambda: plain.generate(prompts, NEW_TOKENS)),
        ),
        Case(
            f"{STREAMS} streams of {NEW_TOKENS} tokens",
            streams,
            "generate, one padded batch (no streaming)",
            _call(lambda: plain.generate_batch(prompts, NEW_TOKENS)),
        ),
        Case(
            f"further turn behind {AGENT_PROMPT} tokens, 8 new",
            further_turn,
            "generate, whole prompt again",
            _call(lambda: plain.generate([(*agent, *_tokens(rng, 30))], 8)),
        ),
    ]


def _call(run: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def called() -> None:
        run()

    return called


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, seed=1)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, VOCABULARY) for _ in range(count))
