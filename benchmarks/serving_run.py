"""Run streams of endless requests while the policy behind them learns and is published.

Rule: a request keeps the sampler that it began with, as in the gateway; one that fails is counted,
and never asked again.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.training_shapes import FIRST_ID, with_loss
from local_gpu.trainer import LocalTrainer
from tinker_claw.errors import ClawError
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

Phase = Literal["alone", "step", "step beside nobody", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_AFTER_FAILURE_S = 0.1
_SETTLES_S = 1.0
"""Seconds until the prompts' shared prefix is computed for a new version."""


@dataclass(frozen=True)
class Load:
    """Sizes of requests and training samples, in tokens."""

    streams: int
    """Requests in flight at any time."""
    shared: int
    """Tokens of the prefix that all prompts share."""
    own: int
    """Further prompt tokens of each request's own."""
    new_tokens: int
    """Tokens sampled by each request."""
    seconds: float
    """Seconds that streams run alone before each step."""
    steps: int
    """Training steps that make room for people, as many that do not, and as many publications."""
    samples: int
    """Samples of a step; each has a prompt like the streams' and a reply of `new_tokens`."""
    vocabulary: int


@dataclass
class Figures:
    """Figures of one phase, in seconds."""

    phase: Phase
    seconds: float = 0.0
    """Length of the phase."""
    requests: int = 0
    """Requests that began in the phase."""
    failed: int = 0
    first: list[float] = field(default_factory=list[float])
    """Times from a request to its first token."""
    each: list[float] = field(default_factory=list[float])
    """Times from one token to the next."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all streams."""
        return (len(self.first) + len(self.each)) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Published:
    """Times in seconds until a new version served."""

    persons: bool
    """Whether the step made room for people."""
    step: float
    publish: float
    """Time from asking for a publication to its sampler."""
    first_token: float
    """Time to the first token of the first request to that sampler, with a new prompt."""


def quantile(values: Sequence[float], share: float) -> float | None:
    """Quantile of the values; None where there are none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


class Traffic:
    """The streams, and the figures by phase."""

    def __init__(self, load: Load, sampler: Sampler) -> None:
        self.figures = {phase: Figures(phase) for phase in PHASES}
        self.sampler = sampler
        """Sampler of the requests from now on."""
        self.failures: list[str] = []
        self._load = load
        self._prefix = _tokens(random.Random(0), load.shared, load.vocabulary)
        self.persons = True
        """Whether people ask: sampler and step make room for them."""
        self._phase: Phase = "alone"
        self._since = time.perf_counter()
        self._ended = False

    def enter(self, phase: Phase) -> None:
        """Begin a phase: later figures belong to it."""
        now = time.perf_counter()
        self.figures[self._phase].seconds += now - self._since
        self._phase, self._since = phase, now

    def end(self) -> None:
        """Start no more requests; those in flight end."""
        self.enter(self._phase)
        self._ended = True

    async def stream(self, salt: int) -> None:
        """Send one request after the other."""
        rng = random.Random(salt)
        while not self._ended:
            prompt = (*self._prefix, *_tokens(rng, self._load.own, self._load.vocabulary))
            self.figures[self._phase].requests += 1
            params = SamplingParams(max_tokens=self._load.new_tokens, person=self.persons)
            try:
                await self._request(prompt, params)
            except ClawError as error:
                self.figures[self._phase].failed += 1
                self.failures.append(str(error))
                # A server that refuses at once would otherwise be asked without a pause.
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        before, asked, first = time.perf_counter(), self.figures[self._phase], True
        async with aclosing(self.sampler.stream(prompt, params)) as chunks:  # pyright: ignore
            async for chunk in chunks:
                now, seen = time.perf_counter(), self.figures[self._phase]
                if chunk.tokens and not self._ended:
                    # A chunk of several tokens came at once: each took its part.
                    gaps = [(now - before) / len(chunk.tokens)] * len(chunk.tokens)
                    (asked.first if first else seen.each).extend(gaps[:1])
                    seen.each.extend(gaps[1:])
                    before, first = now, False


async def run(trainer: LocalTrainer, load: Load) -> tuple[Traffic, list[Published]]:
    """Run streams alone, beside steps of both kinds in turn, and beside publications."""
    traffic = Traffic(load, await trainer.publish())
    published: list[Published] = []
    async with asyncio.TaskGroup() as group:
        for salt in range(load.streams):
            group.create_task(traffic.stream(salt + 1))
        traffic.enter("publish")
        await asyncio.sleep(_SETTLES_S)
        for number in range(2 * load.steps):
            traffic.enter("alone")
            await asyncio.sleep(load.seconds)
            published.append(await _improve(trainer, traffic, load, number))
        traffic.enter("alone")
        await asyncio.sleep(load.seconds)
        traffic.end()
    return traffic, published


async def _improve(trainer: LocalTrainer, traffic: Traffic, load: Load, number: int) -> Published:
    """Take a step, publish it, and swap the sampler."""
    rng = random.Random(f"step {number}")
    datums = _datums(rng, load)
    persons = traffic.persons = number % 2 == 0
    traffic.enter("step" if persons else "step beside nobody")
    started = time.perf_counter()
    await trainer.train_step([LossPass("ppo", datums)], Adam(1e-5))
    stepped = time.perf_counter()
    traffic.enter("publish")
    traffic.persons = True
    sampler = await trainer.publish()
    there = time.perf_counter()
    await sampler.sample(_tokens(rng, load.own, load.vocabulary), SamplingParams(max_tokens=1))
    answered = time.perf_counter()
    before, traffic.sampler = traffic.sampler, sampler
    await before.aclose()
    await asyncio.sleep(_SETTLES_S)
    return Published(persons, stepped - started, there - stepped, answered - there)


def _datums(rng: random.Random, load: Load) -> tuple[Datum, ...]:
    prefix = _tokens(random.Random(0), load.shared, load.vocabulary)
    return tuple(
        with_loss(
            rng,
            (*prefix, *_tokens(rng, load.own + load.new_tokens, load.vocabulary)),
            load.vocabulary,
        )
        for _ in range(load.samples)
    )


def _tokens(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, vocabulary) for _ in range(count))
