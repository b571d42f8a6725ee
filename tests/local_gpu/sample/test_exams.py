"""Exams: no server answers with other weights than the trained ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from local_gpu.halves import BASE_REF, Facts, Score, ScoreAsk
from local_gpu.model.load import load_base
from local_gpu.model.lora import BaseModel, clone
from local_gpu.sample.exam import (
    POSITIONS,
    Exam,
    ExamSample,
    adapter_fault,
    differences,
    distance_fault,
    rms_difference,
)
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.serving import Examiner, PoolServing
from local_gpu.sample.vllm import VllmServer
from tests.local_gpu.prompts import prompt
from tests.support.backends import tiny_model
from tests.support.inference_servers import InferenceServer, inference_servers
from tests.support.pools import FAST, TEXT, Probes, Trainer, facts_of, site, tiny_base
from tests.support.waits import eventually
from tinker_claw.errors import BackendError, ConfigError
from tinker_claw.types import SamplingParams, TokenLogprobs

FAULTS: dict[str, dict[str, Any]] = {
    "adapter not applied": {"ignores_adapters": True},
    "alpha twice as large": {"alpha": 2.0},
    "alpha half as large": {"alpha": 0.5},
    "no alpha but minus one": {"alpha": -1.0},
    "prefix cache of the version before": {"stale": True},
}


@pytest.mark.parametrize(
    "fault", [pytest.param(n, marks=pytest.mark.slow if "alpha" in n else ()) for n in FAULTS]
)
async def test_a_server_that_answers_with_other_weights_leaves(tmp_path: Path, fault: str) -> None:
    async with site(tmp_path) as place:
        await place.publish("v1")
        for name, value in FAULTS[fault].items():
            setattr(place.servers[0].faults, name, value)
        new = await place.publish("v2", change=0.02)
        ((url, why),) = place.pool.away()
        assert url == place.servers[0].url
        # On some draws so large a change is no longer along u, and the mean |d| tells it.
        assert "what tells 'v2' from" in why or "'v2' that are" in why
        assert "prefix cache of older weights?" in why
        for salt in range(4):
            tokens = prompt(150, salt)
            (drawn,) = await new.sample(tokens, SamplingParams(max_tokens=8))
            assert place.errors("v2", tokens, drawn) < 1e-4


async def test_a_version_that_all_servers_get_wrong_is_not_served(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        await place.publish("v1")
        place.servers[0].faults.stale = True
        with pytest.raises(BackendError, match="No server serves 'v2'"):
            await place.publish("v2", change=0.02)
        assert place.pool.live() == {"v1"}
        assert place.pool.away() == ()
        await eventually(lambda: set(place.servers[0].adapters) == {"v1"})


async def test_a_change_too_small_to_tell_does_no_harm_and_is_let_pass(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        place.servers[0].faults.ignores_adapters = True
        sampler = await place.publish("v1", change=2e-6)
        (drawn,) = await sampler.sample(prompt(100), SamplingParams(max_tokens=8))
        assert place.errors("v1", prompt(100), drawn) < 0.01
        await place.publish("v2", change=0.0)  # before the first step


async def test_a_server_that_comes_back_wrong_stays_away(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        place.servers[0].faults.ignores_adapters = True
        place.servers[0].restart()
        for salt in range(8):
            await sampler.sample(prompt(30, salt), SamplingParams(max_tokens=2))
        await eventually(lambda: any("what tells 'v1'" in why for _, why in place.pool.away()))
        scored = len(place.trainer.scored)
        place.servers[0].faults.ignores_adapters = False
        place.servers[0].restart()
        await eventually(lambda: place.pool.away() == ())
        assert len(place.trainer.scored) == scored  # the trainer was not asked again


async def start(
    *servers: InferenceServer,
    folder: Path,
    options: PoolOptions = FAST,
    probes: Probes | None = None,
    facts: Facts | None = None,
    score: Score | None = None,
) -> PoolServing:
    connected = [VllmServer(server.url) for server in servers]
    facts, score = facts or facts_of(tiny_base()), score or Trainer(tiny_base(), folder).score
    write = probes and probes.write
    return await PoolServing.start(connected, facts, score, TEXT, options, write)


async def test_a_server_that_applies_no_adapters_is_refused_before_anything_is_learned(
    tmp_path: Path,
) -> None:
    """The logprobs are those of the base; with a first version they would be too near to tell."""
    probes = Probes(tiny_base(), tmp_path)
    with inference_servers(tiny_base(), 1) as (server,):
        pool = await start(server, folder=tmp_path, probes=probes)
        assert not server.adapters, "the probe is gone"
        await pool.aclose()
        server.faults.ignores_adapters = True
        with pytest.raises(ConfigError, match=r"what tells 'probe-\d' from 'base'.*applies them"):
            await start(server, folder=tmp_path, probes=probes)


async def test_servers_that_do_not_fit_are_refused_before_anybody_asks(tmp_path: Path) -> None:
    source = str(tiny_model(tmp_path / "other", seed=1))
    other = load_base(source, device=torch.device("cpu"), dtype=torch.float32)
    with (
        inference_servers(tiny_base(), 1) as (server,),
        inference_servers(tiny_base(), 1, model="b") as (named,),
        inference_servers(other, 1) as (wrong,),
    ):
        with pytest.raises(ConfigError, match="another base model"):
            await start(wrong, folder=tmp_path)
        with pytest.raises(ConfigError, match="serves 'b'"):
            await start(server, named, folder=tmp_path)
        server.faults.most_candidates = 3
        with pytest.raises(ConfigError, match="--max-logprobs"):
            await start(server, folder=tmp_path, options=replace(FAST, student_topk=4))
        pool = await start(server, folder=tmp_path, options=replace(FAST, student_topk=3))
        await pool.aclose()
        server.faults.static = True
        server.restart()
        with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await start(server, folder=tmp_path)


def roughly(base: BaseModel) -> BaseModel:
    """Nearly the same model: a server that computes otherwise."""
    module = clone(base.module)
    head = module.get_output_embeddings()
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
    head.weight = torch.nn.Parameter(head.weight * (1 + 0.2 * noise), requires_grad=False)
    return replace(base, module=module)


class Rounds:
    """A trainer that differs from itself by some nats where it computes a text again."""

    def __init__(self, folder: Path, by: float) -> None:
        self._trainer, self._by = Trainer(tiny_base(), folder), by
        self._seen = set[tuple[int, ...]]()

    async def score(self, ref: str, ask: ScoreAsk) -> TokenLogprobs:
        again = ask.tokens in self._seen
        self._seen.add(ask.tokens)
        scored = await self._trainer.score(ref, ask)
        rows = [[x + again * self._by for x in row] for row in scored.topk_logprobs]
        return replace(scored, topk_logprobs=tuple(map(tuple, rows)))


async def test_a_server_may_differ_from_the_trainer_as_the_trainer_does_from_itself(
    tmp_path: Path,
) -> None:
    with inference_servers(roughly(tiny_base()), 1) as (server,):
        with pytest.raises(ConfigError, match=r"nats from the trainer's on average.*0\.1 are"):
            await start(server, folder=tmp_path)
        with pytest.raises(ConfigError, match=r"where 0\.12 are expected"):
            await start(server, folder=tmp_path, score=Rounds(tmp_path, 0.03).score)
        pool = await start(server, folder=tmp_path, score=Rounds(tmp_path, 0.5).score)
        await pool.aclose()


async def test_a_mixture_of_experts_is_warned_of_and_taken(tmp_path: Path) -> None:
    said: list[str] = []
    facts = replace(facts_of(tiny_base()), mixture=True)
    options = replace(FAST, say=said.append)
    with inference_servers(roughly(tiny_base()), 1) as (server,):
        pool = await start(server, folder=tmp_path, facts=facts, options=options)
        assert ["other experts" in sentence for sentence in said] == [True]
        await pool.aclose()
        server.faults.ignores_adapters = True
        probes = Probes(tiny_base(), tmp_path)
        with pytest.raises(ConfigError, match="what tells 'probe-"):
            await start(server, folder=tmp_path, facts=facts, options=options, probes=probes)


async def test_the_probe_is_as_large_as_it_takes(tmp_path: Path) -> None:
    base, probes = tiny_base(), Probes(tiny_base(), tmp_path)
    score = Trainer(base, tmp_path).score
    examiner = await Examiner.start(facts_of(base), score, FAST, TEXT)
    found = await examiner.probe(probes.write)
    assert rms_difference(found.exam.right, examiner.base.right) >= 0.4
    assert found.exam.decisive
    sizes: list[float] = []

    async def nothing(size: float) -> tuple[str, Path]:
        sizes.append(size)
        return BASE_REF, tmp_path

    with pytest.raises(BackendError, match="Adapters change nothing"):
        await examiner.probe(nothing)
    assert sizes == sorted(sizes)
    assert len(sizes) > len(probes.sizes)


# The figures, on numbers that are made up: tokens drawn from known distributions, with noise.


def row(logits: list[float]) -> dict[int, float]:
    total = math.log(math.fsum(map(math.exp, logits)))
    return {token: value - total for token, value in enumerate(logits)}


def exam(chance: random.Random, change: float) -> Exam:
    """Exam on a base and a version, whose logits differ by `change` as a standard deviation."""
    base = [[chance.gauss(0, 1.5) for _ in range(200)] for _ in range(POSITIONS)]
    moved = [[x + chance.gauss(0, change) for x in logits] for logits in base]
    right, before = tuple(map(row, moved)), tuple(map(row, base))
    return Exam("v1", (1,) * 20, right, before, tolerance=0.2, advice="")


def drawn(chance: random.Random, rows: Any, noise: float, count: int = 4) -> list[ExamSample]:
    """Samples with noise that belongs to a position as much as to a token: the normaliser is
    rounded, too."""
    answers, own = [], noise / math.sqrt(2)
    for place, row in enumerate(rows):
        tokens = chance.choices(list(row), [math.exp(x) for x in row.values()], k=count)
        shared, off = chance.gauss(0, own), {t: chance.gauss(0, own) for t in row}
        answers += [ExamSample(place, t, row[t] + shared + off[t]) for t in tokens]
    return answers


def verdict(paper: Exam, answers: list[ExamSample], noise: float) -> str | None:
    d = differences(paper, answers)
    return adapter_fault(paper, answers, d, noise) or distance_fault(paper, d)


@pytest.mark.parametrize("change", [0.0, 0.05, 1.0])
def test_rounding_as_bfloat16_makes_it_fails_no_exam(change: float) -> None:
    chance = random.Random(1)
    for _ in range(300):
        made = exam(chance, change)
        # Half as noisy again as it was when the noise was measured.
        fault = verdict(made, drawn(chance, made.right, 0.075), noise=0.05)
        assert fault is None


@pytest.mark.parametrize(("change", "caught"), [(0.01, 0), (0.15, 95), (0.3, 100)])
def test_an_adapter_that_is_not_applied_is_caught_where_its_change_exceeds_the_rounding(
    change: float, caught: int
) -> None:
    chance, faults = random.Random(2), 0
    for _ in range(100):
        made = exam(chance, change)
        fault = verdict(made, drawn(chance, made.base, 0.05), noise=0.05)
        faults += fault is not None
    assert faults >= caught
    assert caught or not faults
