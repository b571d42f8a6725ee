"""Sampler and trainer compared on every batch: faults are found, rounding is tolerated, and
learning stops."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.backends import VOCABULARY, start_local, tiny_model
from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.support.learning import World, world
from tests.support.ledger import COMPLETION, outcome, sample_counts, sql, step_counts
from tests.support.local_reference import reference
from tests.support.waits import eventually
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Training
from tinker_claw.errors import LearningEndedError, OutageError
from tinker_claw.learner.diagnostics import agreement, compare
from tinker_claw.learner.health import Health
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.recovery import restore
from tinker_claw.learner.scoring import batch_items
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import build
from tinker_claw.methods.passes import BatchItem, Prepared
from tinker_claw.policy import Policy, PolicyHolder, Sampler, Trainer
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import (
    Adam,
    Charge,
    Completion,
    Datum,
    Kind,
    LossPass,
    NextState,
    PolicyVersion,
    Sample,
    SamplingParams,
    StepReport,
    Tokens,
    uncharged,
)

# The figures.


def test_k3_of_gaps_that_was_computed_by_hand() -> None:
    # Ratios 1, 1.5, 0.5 and 1.05.
    found = compare([0.0, math.log(1.5), math.log(0.5), math.log(1.05)])
    mean = (0.405465 - 0.693147 + 0.048790) / 4
    assert found.k3 == pytest.approx((1 + 1.5 + 0.5 + 1.05) / 4 - 1 - mean, abs=1e-6)
    assert (found.tokens, found.agrees) == (4, None)
    assert compare([0.0, 9.0]).k3 == pytest.approx((math.e - 2) / 2), "one token has a bound"


def sample(number: int, version: int) -> Sample:
    done = replace(COMPLETION, tokens=(number, 8, 9), logprobs=(-1.0, -2.0, -3.0))
    return Sample(
        number,
        number,
        number,
        version,
        version,
        prompt=(1, 2),
        completion=done,
        reward=1,
        teacher=None,
    )


def test_fresh_tokens_are_compared_once_and_those_of_older_versions_never() -> None:
    fresh, older, unseen = (BatchItem(sample(n, v)) for n, v in ((1, 5), (2, 4), (3, 5)))
    datums = [Datum((1, 2, *i.sample.completion.tokens), 2) for i in (fresh, older)]
    passes = [LossPass("ppo", tuple(datums)), LossPass("cross_entropy", (datums[0],))]
    near, far = (-1.0, -1.5, -3.0), (-9.0, -9.0, -9.0)
    report = StepReport((0.0, 0.0), ((near, far), (near,)), None, 15)
    found = agreement(Prepared([fresh, older, unseen], [], passes, None), report, 5)
    assert found is not None
    assert (found.tokens, found.k3) == (3, pytest.approx((math.exp(0.5) - 1.5) / 3))
    assert agreement(Prepared([older], [], passes, None), report, 5) is None


def noise(tokens: int, sd: float, *, tails: bool = False, seed: int = 0) -> list[float]:
    """Rounding noise; with tails as kernels have them: rarely ten times as large."""
    draw = random.Random(seed)
    return [
        draw.gauss(0, sd) * (10 if tails and draw.random() < 0.005 else 1) for _ in range(tokens)
    ]


@pytest.mark.parametrize("tokens", [20, 300, 3000])
def test_rounding_raises_no_alarm_whatever_the_number_of_tokens(tokens: int) -> None:
    for seed in range(50):
        assert compare(noise(tokens, 1e-5, seed=seed)).agrees
        assert compare(noise(tokens, 0.05, tails=True, seed=seed)).agrees, seed


def test_one_token_alone_raises_no_alarm_and_too_few_say_nothing() -> None:
    for outlier in (-9999.0, 9999.0, math.nan, -math.inf):
        assert compare([*noise(30, 0.05), outlier]).agrees
    assert compare([3.0] * 19).agrees is None
    assert compare([3.0] * 20).agrees is False
    broken = compare([math.nan, math.inf] * 20)
    assert broken.agrees is False
    assert math.isfinite(broken.k3)


# The learner, with a trainer that says what it is told.


class Apart(FakeTrainer):
    """A trainer whose logprobs differ from those of its samplers."""

    def __init__(self, *gaps: float) -> None:
        super().__init__()
        self.gaps = list(gaps)
        """Difference at each coming step, the last one for ever."""

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        report = await super().train_step(passes, adam, charge)
        gap = self.gaps.pop(0) if len(self.gaps) > 1 else self.gaps[0]
        moved = tuple(
            tuple(tuple(z + gap for z in row) for row in rows) for rows in report.logprobs
        )
        return replace(report, logprobs=moved)


def batch(w: World, tokens: int = 8) -> None:
    for number in range(4):
        w.turn("YES" if number % 2 else "NO", tokens=(7,) * tokens)


def seen(w: World) -> dict[str, Any]:
    return w.health.snapshot(version=1, waiting=0, batch_size=4)


async def test_first_batch_that_does_not_agree_stops_learning_and_is_told(tmp_path: Path) -> None:
    trainer, healths = Apart(0.4), list[dict[str, Any]]()

    async def until_it_stops() -> None:
        async with world(tmp_path, trainer=trainer) as w:
            try:
                batch(w)
                await w.until(lambda: False)
            finally:
                healths.append(seen(w))

    with pytest.raises(ExceptionGroup) as failed:
        await until_it_stops()
    assert failed.group_contains(LearningEndedError, match="do not agree: the step is not kept")
    (told,) = healths
    assert (told["status"], told["agreement"]) == ("degraded", "alarm")
    assert "On 32 fresh tokens" in told["agreement_error"]
    trainer.gaps = [0.0]  # mended
    async with world(tmp_path, trainer=trainer) as w:
        assert step_counts(w.ledger) == {"intent": 0, "committed": 0, "void": 1}
        assert sql(w.ledger).one("SELECT void > 1 FROM steps WHERE status = 'void'") == 1
        assert sample_counts(w.ledger)["quarantined"] == 4, "their logprobs are wrong"
        assert trainer.weights == 0, "the void step left nothing in the weights"
        batch(w)
        await w.version(1)
        assert seen(w)["agreement"] == "ok"


async def test_batch_of_an_older_version_is_not_compared(tmp_path: Path) -> None:
    trainer = Apart(0.0, 0.4)
    async with world(tmp_path, trainer=trainer) as w:
        for _ in range(2):
            batch(w)
        await w.version(2)
        first, second = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert first["agrees"] is True
        assert (second["agrees"], second["fresh_tokens"], second["agreement_k3"]) == (None, 0, None)
        assert seen(w)["agreement"] == "ok"
        assert all(len(ppo.datums) == 4 for (ppo,) in trainer.steps), "nothing is sampled for it"


# Truncated ratios.

RARE = 9


class Surer(FakeTrainer):
    """A trainer whose versions find a rare token three times as likely as it was."""

    async def publish(self) -> Sampler:
        ref = (await super().publish()).ref
        self.samplers[ref] = FakeSampler(
            self.script,
            ref=ref,
            opinion=lambda token: LOGPROB + (math.log(3) if token == RARE else 0.0),
        )
        return self.samplers[ref]


@pytest.mark.parametrize("score_fresh", [False, True])
async def test_token_that_the_trainer_finds_three_times_as_likely_gets_no_advantage(
    tmp_path: Path, score_fresh: bool
) -> None:
    trainer = Surer()
    async with world(tmp_path, trainer=trainer, score_fresh=score_fresh) as w:
        sampler = trainer.samplers[w.policy.current.sampler.ref]
        for number in range(4):
            w.turn("YES" if number % 2 else "NO", tokens=(7, RARE, 8))
        await w.version(1)
        ((ppo,),) = trainer.steps
        left_out = [[a == 0 for a in datum.advantages] for datum in ppo.datums]
        assert left_out == [[False, score_fresh, False]] * 4
        assert len(sampler.scored) == (4 if score_fresh else 0)
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["fresh_tokens"] == 12, "scored or not, they are fresh"


class AllAtOnce(FakeSampler):
    """A sampler that answers nobody before four have asked."""

    def __init__(self) -> None:
        super().__init__((1,))
        self._asked = asyncio.Barrier(4)

    async def logprobs(self, tokens: Tokens, **how: Any) -> Any:
        async with asyncio.timeout(60):
            await self._asked.wait()
        return await super().logprobs(tokens, **how)


async def test_scores_of_a_batch_are_asked_for_at_once_and_fail_with_their_own_error() -> None:
    samples, sampler = [sample(n, 0) for n in range(4)], AllAtOnce()
    policy = Policy(PolicyVersion(1, 0, 1, None, "now"), sampler)
    items = await batch_items(samples, policy, Training())
    assert [item.sample.id for item in items] == [0, 1, 2, 3]
    assert all(item.current is not None for item in items)
    sampler.away = 1
    with pytest.raises(OutageError):
        await batch_items(samples, policy, Training())
    assert len(sampler.scored) == 7


# A real model, and samplers with a fault.


class Faulty:
    """A sampler that answers with other weights, or in another way, as `wrong` does."""

    def __init__(self, right: Sampler, wrong: Sampler, temperature: float = 1.0) -> None:
        self.ref = right.ref
        self._right = right
        self._wrong = wrong
        self._temperature = temperature

    def stream(self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged) -> Any:
        return self._wrong.stream(prompt, replace(params, temperature=self._temperature), charge)

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        asked = replace(params, temperature=self._temperature)
        return [
            replace(done, params=params)
            for done in await self._wrong.sample(prompt, asked, n, charge)
        ]

    async def logprobs(self, tokens: Tokens, **how: Any) -> Any:
        return await self._right.logprobs(tokens, **how)

    async def aclose(self) -> None:
        await self._right.aclose()


Fault = Callable[[Trainer, Path, list[Sampler]], Awaitable[Sampler]]
"""Makes a faulty sampler from the versions published so far, the newest last."""


async def none(trainer: Trainer, root: Path, published: list[Sampler]) -> Sampler:
    return published[-1]


async def adapter_not_applied(trainer: Trainer, root: Path, published: list[Sampler]) -> Sampler:
    return Faulty(published[-1], await trainer.base())


async def alpha_doubled(trainer: Trainer, root: Path, published: list[Sampler]) -> Sampler:
    written = root / "adapters" / published[-1].ref
    other = written.with_name(f"{written.name}-doubled")
    other.mkdir()
    for file in written.iterdir():
        other.joinpath(file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    (other / "adapter_config.json").write_text(json.dumps(config))
    return Faulty(published[-1], await trainer.open(other.name))


async def weights_of_the_version_before(
    trainer: Trainer, root: Path, published: list[Sampler]
) -> Sampler:
    if len(published) < 3:
        return published[-1]
    return Faulty(published[-1], await trainer.open(published[-2].ref))


async def stale_prefix_cache(trainer: Trainer, root: Path, published: list[Sampler]) -> Sampler:
    if len(published) < 3:
        return published[-1]
    before, now = (
        reference(root.parent / "model", root / "adapters" / sampler.ref)
        for sampler in published[-2:]
    )
    return StalePrefix(published[-1], before, now)


class StalePrefix(Faulty):
    """A sampler with the right weights, but with keys and values of the prompt from older ones."""

    def __init__(self, right: Sampler, before: Any, now: Any) -> None:
        super().__init__(right, right)
        self._before = before
        self._now = now

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        draw = torch.Generator().manual_seed(params.seed or 0)
        tokens, logprobs = [prompt[-1]], list[float]()
        with torch.no_grad():
            cache = self._before(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
            for _ in range(params.max_tokens):
                last = torch.tensor([tokens[-1:]])
                rows = self._now(last, past_key_values=cache, use_cache=True).logits[0, -1]
                scores = rows.log_softmax(-1)
                tokens.append(int(torch.multinomial(scores.exp(), 1, generator=draw)))
                logprobs.append(float(scores[tokens[-1]]))
        bare = replace(COMPLETION, topk_ids=(), topk_logprobs=(), params=params)
        return [replace(bare, tokens=tuple(tokens[1:]), logprobs=tuple(logprobs))]


async def temperature_of_its_own(trainer: Trainer, root: Path, published: list[Sampler]) -> Sampler:
    return Faulty(published[-1], published[-1], temperature=0.7)


class Publishing:
    """A trainer whose samplers have a fault."""

    def __init__(self, trainer: Trainer, root: Path, fault: Fault) -> None:
        self._trainer = trainer
        self._root = root
        self._fault = fault
        self._published: list[Sampler] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def publish(self) -> Sampler:
        self._published.append(await self._trainer.publish())
        return await self._fault(self._trainer, self._root, self._published)


@dataclass
class Small:
    """A learner over a real ledger and a real, tiny model."""

    ledger: Ledger
    policy: PolicyHolder
    learner: Learner
    health: Health
    metrics: Path

    async def step(self) -> dict[str, Any]:
        """Sample a batch with the newest policy, train on it, and return the step's metrics."""
        policy = self.policy.newest
        for number in range(4):
            await self._sample(policy, number)
        self.learner.wake()
        await eventually(lambda: self.policy.newest is not policy, 120)
        return json.loads(self.metrics.read_text().splitlines()[-1])

    async def _sample(self, policy: Policy, number: int) -> None:
        prompt = tuple((number * 7 + i * i) % VOCABULARY for i in range(24))
        params = SamplingParams(max_tokens=40, seed=policy.version.id * 4 + number)
        (done,) = await policy.sampler.sample(prompt, params)
        turn = self.ledger.turns.add(
            outcome(
                session_id=self.ledger.turns.session("me", f"{policy.version.id}:{number}"),
                kind=Kind.MAIN,
                kind_reason="test",
                policy_version=policy.version.id,
                prompt=prompt,
                completion=done,
                hint_at=None,
                request_text="please",
                reply_text="done",
                history=(),
                reply_digest="",
            )
        )
        self.ledger.turns.add_next_state(turn, NextState("user", "well"))
        self.ledger.samples.add(turn, 1 if number % 2 else -1, None)


@asynccontextmanager
async def small(folder: Path, fault: Fault) -> AsyncGenerator[Small]:
    tiny_model(folder / "model")
    local = await start_local(folder)
    ledger = Ledger(folder / "data")
    trainer: Any = Publishing(local, folder / "run", fault)
    try:
        policy = PolicyHolder(await restore(ledger, trainer))
        telemetry, health = Telemetry(folder / "metrics.jsonl"), Health()
        spending = Spending(Price(), ledger.spend, telemetry)
        learner = Learner(
            LoopParts(
                ledger,
                trainer,
                await trainer.base(),
                build("binary"),
                policy,
                telemetry,
                health,
                spending,
                Training(batch_size=4),
            ),
            learning_rate=0.02,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(learner.run())
            yield Small(ledger, policy, learner, health, folder / "metrics.jsonl")
            running.cancel()
    finally:
        await local.aclose()
        ledger.close()


async def test_without_a_fault_sampler_and_trainer_agree_to_rounding(tmp_path: Path) -> None:
    async with small(tmp_path, none) as s:
        for _ in range(3):
            found = await s.step()
            # Half of them: those with a +1 are cut by their token limit, and not reinforced.
            assert found["fresh_tokens"] == 80
            assert 0 <= found["agreement_k3"] < 1e-8
            assert found["agrees"] is True
        assert s.health.agreement.state == "ok"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize(
    ("fault", "well"),
    [
        (adapter_not_applied, 1),  # the first version is the base, whatever is done to its adapter
        (alpha_doubled, 1),
        pytest.param(weights_of_the_version_before, 2, marks=pytest.mark.slow),
        (stale_prefix_cache, 2),
        (temperature_of_its_own, 0),
    ],
)
async def test_wrong_weights_or_temperature_stop_learning(
    tmp_path: Path, fault: Fault, well: int
) -> None:
    healths = list[Health]()

    async def until_it_stops() -> None:
        async with small(tmp_path, fault) as s:
            healths.append(s.health)
            for _ in range(well):
                assert (await s.step())["agrees"] is True
                assert s.health.agreement.state == "ok"
            await s.step()

    with pytest.raises(ExceptionGroup) as failed:
        await until_it_stops()
    assert failed.group_contains(LearningEndedError)
    assert healths[0].agreement.state == "alarm"
