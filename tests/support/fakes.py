"""Test doubles that are adapters: a sampler that recites, a trainer that only counts.

Rule: they keep the promises of `tinker_claw.policy` (lengths agree, refs survive, closing a stream
aborts it), so that a test which passes on them says something about the code that uses them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_claw.errors import BackendError, GoneError, OutageError, SamplerError, StepError
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Adam,
    Capabilities,
    Charge,
    Completion,
    Images,
    LossPass,
    SamplingParams,
    StepReport,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    Usage,
    uncharged,
)

UNTIL_TOLD = 1_000_000
"""Number of outages that lasts until the test ends them."""
LOGPROB = -0.5
"""Logprob of every token, unless a sampler is given another opinion."""

Opinion = Callable[[int], float]
"""Returns the logprob of a token, in nats."""


@dataclass(frozen=True)
class Script:
    """One completion to recite."""

    tokens: tuple[int, ...]
    chunk: int = 1
    """Tokens per chunk."""
    first_after_s: float = 0.0
    gap_s: float = 0.0
    """Seconds between chunks."""
    fail_after: int | None = None
    """Tokens after which SamplerError is raised."""
    cached_tokens: int = 0
    away_after: int | None = None
    """Tokens after which OutageError is raised."""
    holds_after: int | None = None
    """Tokens after which, once they are taken, the sampler waits until it is told to go on."""


class FakeSampler:
    """A sampler that recites its scripts in order, the last one for ever."""

    def __init__(
        self,
        *scripts: Script | Tokens,
        ref: str = "fake:0",
        bills: bool = False,
        opinion: Opinion = lambda token: LOGPROB,
    ) -> None:
        self.ref = ref
        self.bills = bills
        """Whether it bills like a service: the prompt first, then the sampled tokens."""
        self.prompts: list[tuple[int, ...]] = []
        self.params: list[SamplingParams] = []
        self.scored: list[tuple[int, ...]] = []
        self.scored_images: list[Images] = []
        self.aborted = 0
        self.closed = False
        self.fail_logprobs = 0
        """Number of calls of `logprobs` that fail from now on."""
        self.away = 0
        """Number of requests of any kind that find the service away from now on."""
        self.gone = False
        """Whether somebody has deleted its weights."""
        self.holding, self.go_on = asyncio.Event(), asyncio.Event()
        self._scripts = [s if isinstance(s, Script) else Script(tuple(s)) for s in scripts]
        self._opinion = opinion

    def say(self, *scripts: Script | Tokens) -> None:
        """Recite these from now on."""
        self._scripts = [s if isinstance(s, Script) else Script(tuple(s)) for s in scripts]

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        script = self._take(prompt, params)
        self._answers()
        self._bill(charge, Usage(prefill=len(prompt)))
        tokens = script.tokens[: params.max_tokens]
        stopped = bool(tokens) and tokens[-1] in params.stop_tokens
        reason = StopReason.STOP if stopped else StopReason.LENGTH
        try:
            await asyncio.sleep(script.first_after_s)
            for at in range(0, max(1, len(tokens)), script.chunk):
                if script.fail_after is not None and at >= script.fail_after:
                    raise SamplerError("the script says so")
                if script.away_after is not None and at >= script.away_after:
                    raise OutageError("the service is away, as told")
                if script.holds_after is not None and at >= script.holds_after:
                    self.holding.set()
                    await self.go_on.wait()
                last = at + script.chunk >= len(tokens)
                self._bill(charge, Usage(sampled=len(tokens[at : at + script.chunk])))
                yield self._chunk(tokens[at : at + script.chunk], params, script, last, reason)
                if not last:
                    await asyncio.sleep(script.gap_s)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        drawn = []
        for _ in range(n):
            chunks = [chunk async for chunk in self.stream(prompt, params, charge)]
            drawn.append(Completion.collect(chunks, params))
        again = (n - 1) * len(prompt)
        self._bill(charge, Usage(prefill=-again, cached=again))
        return drawn

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
        charge: Charge = uncharged,
    ) -> TokenLogprobs:
        self._answers()
        if self.fail_logprobs:
            self.fail_logprobs -= 1
            raise SamplerError("scoring fails, as told")
        self.scored.append(tuple(tokens))
        self.scored_images.append(images)
        self._bill(charge, Usage(prefill=len(tokens), sampled=1))
        tail = tuple(tokens[start:])
        assert targets is None or len(targets) == len(tail)
        near = [tuple(range(token, token + top_k)) for token in tail] if top_k else []
        return TokenLogprobs(
            start=start,
            logprobs=tuple(map(self._opinion, tail)),
            targets=tuple(tuple(map(self._opinion, row)) for row in targets or ()),
            topk_ids=tuple(near),
            topk_logprobs=tuple(tuple(map(self._opinion, row)) for row in near),
        )

    async def aclose(self) -> None:
        self.closed = True

    def _answers(self) -> None:
        if self.away:
            self.away -= 1
            raise OutageError("the service is away, as told")
        if self.gone:
            raise GoneError(f"no sampler {self.ref!r}")

    def _bill(self, charge: Charge, usage: Usage) -> None:
        if self.bills:
            charge(usage)

    def _take(self, prompt: Tokens, params: SamplingParams) -> Script:
        self.prompts.append(tuple(prompt))
        self.params.append(params)
        return self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]

    def _chunk(
        self,
        tokens: tuple[int, ...],
        params: SamplingParams,
        script: Script,
        last: bool,
        reason: StopReason,
    ) -> TokenChunk:
        k = params.student_topk
        near = tuple(tuple(range(token, token + k)) for token in tokens) if k else ()
        return TokenChunk(
            tokens=tokens,
            logprobs=tuple(map(self._opinion, tokens)),
            topk_ids=near,
            topk_logprobs=tuple(tuple(map(self._opinion, row)) for row in near),
            stop_reason=reason if last else None,
            cached_tokens=script.cached_tokens if last else 0,
        )


@dataclass
class FakeTrainer:
    """A trainer that counts its steps; its weights are the number of steps taken.

    It does as it is told, so that a test can say what fails and when. It has no model, and so
    meets no more of the contract than lengths and refs.
    """

    script: Script = Script((1,))
    """Script that its samplers recite."""
    written: Tokens = (6, 8)
    """What the base says, as a teacher that writes; 8 ends the turns of `learning.World`."""
    context_tokens: int = 4096
    bills: bool = False
    """Whether it bills like a service, its samplers included."""
    losses: frozenset[str] = frozenset({"ppo", "importance_sampling", "cross_entropy"})
    fail: dict[str, int] = field(default_factory=dict)
    """Number of calls that fail from now on, by method: train_step, save_state, publish,
    load_state, open."""
    away: dict[str, int] = field(default_factory=dict)
    """Number of calls that find the service away from now on, by method; it comes before any
    failure."""
    refuse: Callable[[Sequence[LossPass]], bool] = lambda passes: False
    """Returns whether the step of a batch always fails."""
    weights: int = 0
    steps: list[tuple[LossPass, ...]] = field(default_factory=list)
    """Passes of every step that succeeded, voided ones included."""
    states: dict[str, int] = field(default_factory=dict)
    samplers: dict[str, FakeSampler] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    """Number of calls by name, failed ones included."""
    suspect: bool = False
    """Whether a step failed, and no state was loaded since."""
    kept_moments: list[bool] = field(default_factory=list)
    """For each state that was loaded, whether the optimizer's moments came along."""
    closed: bool = False

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model="fake",
            losses=self.losses,
            two_d_targets=True,
            student_topk=True,
            context_tokens=self.context_tokens,
        )

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        assert not self.suspect, "stepped on weights that a failed step left behind"
        if self.bills:
            charge(Usage(trained=sum(len(d.tokens) - 1 for p in passes for d in p.datums)))
        self.suspect = True
        self.weights += 1  # half a step may have been applied, where it fails
        if self.fails("train_step") or self.refuse(passes):
            raise StepError("the step failed, as told")
        self.suspect = False
        self.steps.append(tuple(passes))
        return StepReport(
            losses=tuple(0.0 for _ in passes),
            logprobs=tuple(
                tuple(d.logprobs or (LOGPROB,) * (len(d.tokens) - d.start) for d in p.datums)
                for p in passes
            ),
            grad_norm=1.0,
            tokens=sum(len(d.tokens) for p in passes for d in p.datums),
        )

    async def publish(self) -> Sampler:
        if self.fails("publish"):
            raise BackendError("publishing failed, as told")
        return self._sampler(f"fake:{len(self.samplers)}@{self.weights}")

    async def open(self, ref: str) -> Sampler:
        if self.fails("open"):
            raise BackendError("Opening failed, as told.")
        if ref not in self.samplers:
            raise GoneError(f"no sampler {ref!r}")
        return self.samplers[ref]

    async def base(self) -> Sampler:
        if "base" not in self.samplers:
            self.samplers["base"] = self._sampler("base")
            self.samplers["base"].say(self.written)
        return self.samplers["base"]

    async def save_state(self, name: str) -> str:
        if self.fails("save_state"):
            raise BackendError("saving failed, as told")
        self.states[f"state:{name}"] = self.weights
        return f"state:{name}"

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        if self.fails("load_state") or ref not in self.states:
            raise BackendError(f"no state {ref!r}")
        self.weights = self.states[ref]
        self.suspect = False
        self.kept_moments.append(moments)

    async def export_adapter(self, directory: Path) -> None:
        """Do nothing: nothing was learned."""

    def forget(self) -> None:
        self.asked["forget"] += 1

    async def aclose(self) -> None:
        self.closed = True

    def _sampler(self, ref: str) -> FakeSampler:
        self.samplers[ref] = FakeSampler(self.script, ref=ref, bills=self.bills)
        return self.samplers[ref]

    def fails(self, what: str) -> bool:
        self.asked[what] += 1
        if self.away.get(what):
            self.away[what] -= 1
            raise OutageError(f"the service is away for {what}, as told")
        left = self.fail.get(what, 0)
        self.fail[what] = max(0, left - 1)
        return left > 0


def rated(value: int, quote: str = "", hint: str = "", **more: Any) -> str:
    """Return an answer in the forms that judges are asked for, about users and about tools."""
    does = {1: "accepts", 0: "new_style" if hint else "cannot_tell", -1: "corrects"}[value]
    said = {"quote": quote, "does": does, "hint": hint, "rating": value, **more}
    return json.dumps(said)
