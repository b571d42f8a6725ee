"""A real vLLM through our client: two versions at once, each answering as the trainer scores.

Not in the default suite: `make vllm` installs it, `make test-vllm` runs this.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from local_gpu.config import LocalConfig
from local_gpu.sample.vllm import VllmServer, connect
from local_gpu.trainer import LocalTrainer
from tests.support.backends import CONTEXT, VOCABULARY
from tests.support.local_reference import sequence
from tests.support.real_vllm import MAX_LOGPROBS, SEQUENCES, Numbers
from tinker_claw.errors import BackendError, ContextLengthError, OutageError, RequestError
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Adam,
    Completion,
    Datum,
    LossPass,
    SamplingParams,
    StopReason,
    TokenChunk,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@dataclass
class Ground:
    server: VllmServer
    root: Path
    one: Sampler
    """A version of the trainer's; like the next one it is loaded on the server."""
    two: Sampler
    base: Sampler
    numbers: Numbers

    def folder(self, version: Sampler) -> Path:
        return self.root / "adapters" / version.ref


async def learn(trainer: LocalTrainer, salt: int) -> None:
    """Take one step, so large that the versions have little in common."""
    datum = Datum(tuple(sequence(40, salt)), 10, weights=((1.0,),) * 30)
    await trainer.train_step([LossPass("cross_entropy", (datum,))], Adam(0.1))


@pytest.fixture
async def ground(
    vllm_url: str, vllm_model: Path, numbers: Numbers, tmp_path: Path
) -> AsyncIterator[Ground]:
    root = tmp_path / "run"
    config = LocalConfig(
        model=str(vllm_model),
        root=root,
        rank=4,
        alpha=8,
        threads=1,
        dtype=numbers.dtype,
    )
    trainer = await LocalTrainer.start(config)
    versions: list[Sampler] = []
    for salt in (1, 2):
        await learn(trainer, salt)
        versions.append(await trainer.publish())
    (server,) = await connect([vllm_url])
    ground = Ground(server, root, *versions, await trainer.base(), numbers)
    for version in versions:
        await server.load(version.ref, ground.folder(version))
    yield ground
    for version in versions:
        await server.unload(version.ref)
    await server.aclose()
    await trainer.aclose()


async def error(version: Sampler, prompt: list[int], completion: Completion) -> float:
    """Largest difference to the trainer's logprobs."""
    tokens = [*prompt, *completion.tokens]
    return apart(completion.logprobs, (await version.logprobs(tokens, start=len(prompt))).logprobs)


async def drained(
    server: VllmServer, name: str | None, prompt: list[int], params: SamplingParams
) -> Completion:
    async with aclosing(server.stream(name, prompt, params)) as stream:
        return Completion.collect([chunk async for chunk in stream], params)


def apart(a: list[float] | tuple[float, ...], b: list[float] | tuple[float, ...]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def test_versions_and_the_base_are_served_at_once_each_as_the_trainer_scores_it(
    ground: Ground,
) -> None:
    prompt, params = sequence(30, 7), SamplingParams(max_tokens=60, seed=5)
    served = {ground.one: ground.one.ref, ground.two: ground.two.ref, ground.base: None}
    async with asyncio.TaskGroup() as group:
        asked = {
            version: group.create_task(drained(ground.server, name, prompt, params))
            for version, name in served.items()
        }
    drawn = {version: task.result() for version, task in asked.items()}
    assert len({completion.tokens for completion in drawn.values()}) == 3
    for version, completion in drawn.items():
        assert completion.stop_reason is StopReason.LENGTH
        assert await error(version, prompt, completion) < ground.numbers.tolerance
        for other in served.keys() - {version}:
            assert await error(other, prompt, completion) > 1


async def test_requests_in_flight_end_on_their_version_while_others_come_and_it_goes(
    ground: Ground,
) -> None:
    server, prompt = ground.server, sequence(20, 8)
    params = SamplingParams(max_tokens=800)
    await server.unload(ground.two.ref)
    chunks: list[TokenChunk] = []
    async with aclosing(server.stream(ground.one.ref, prompt, params)) as stream:
        chunks.append(await anext(stream))
        await server.load(ground.two.ref, ground.folder(ground.two))
        await server.unload(ground.one.ref)
        with pytest.raises(OutageError, match=ground.one.ref):
            await server.sample(ground.one.ref, prompt, SamplingParams(max_tokens=1), 1)
        [other] = await server.sample(ground.two.ref, prompt, SamplingParams(max_tokens=40), 1)
        chunks += [chunk async for chunk in stream]
    completion = Completion.collect(chunks, params)
    assert len(completion.tokens) == 800
    assert await error(ground.one, prompt, completion) < ground.numbers.tolerance
    assert await error(ground.two, prompt, other) < ground.numbers.tolerance


async def test_the_prefix_cache_of_one_version_is_never_used_for_another(ground: Ground) -> None:
    prompt, params = sequence(3 * ground.numbers.block + 20, 9), SamplingParams(max_tokens=8)
    for cached in (0, 3 * ground.numbers.block):
        for version in (ground.one, ground.two, ground.base):
            name = None if version is ground.base else version.ref
            [completion] = await ground.server.sample(name, prompt, params, 1)
            # The base keeps its blocks from one run of this test to the next.
            assert completion.cached_tokens == cached
            assert await error(version, prompt, completion) < ground.numbers.tolerance


async def test_logprobs_are_of_the_tempered_distribution_that_was_drawn_from(
    ground: Ground,
) -> None:
    prompt, t, k = sequence(25, 10), 0.7, 5
    params = SamplingParams(max_tokens=30, temperature=t, student_topk=k)
    [completion] = await ground.server.sample(ground.one.ref, prompt, params, 1)
    told = await ground.one.logprobs(
        [*prompt, *completion.tokens], start=len(prompt), top_k=VOCABULARY
    )
    for i, token in enumerate(completion.tokens):
        row = dict(zip(told.topk_ids[i], told.topk_logprobs[i], strict=True))
        total = math.log(sum(math.exp(x / t) for x in row.values()))
        assert abs(completion.logprobs[i] - (row[token] / t - total)) < ground.numbers.tolerance
        likeliest = [x / t - total for x in sorted(row.values(), reverse=True)[:k]]
        assert apart(completion.topk_logprobs[i], likeliest) < ground.numbers.tolerance
        theirs = [row[id] / t - total for id in completion.topk_ids[i]]
        assert apart(completion.topk_logprobs[i], theirs) < ground.numbers.tolerance


async def test_at_temperature_0_the_likeliest_is_taken_and_told_untempered(ground: Ground) -> None:
    prompt, params = sequence(25, 11), SamplingParams(max_tokens=20, temperature=0, student_topk=1)
    first, second = await ground.server.sample(ground.one.ref, prompt, params, 2)
    assert first == second
    assert first.topk_ids == tuple((token,) for token in first.tokens)
    assert await error(ground.one, prompt, first) < ground.numbers.tolerance


async def test_with_a_seed_each_of_n_is_drawn_with_its_own(ground: Ground) -> None:
    server, name, prompt = ground.server, ground.one.ref, sequence(25, 13)
    together = await server.sample(name, prompt, SamplingParams(max_tokens=20, seed=5), 3)
    alone = [
        await drained(server, name, prompt, SamplingParams(max_tokens=20, seed=seed))
        for seed in (5, 6, 7)
    ]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert len({c.tokens for c in alone}) == 3
    assert [c.params for c in together] == [c.params for c in alone]


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(ground: Ground) -> None:
    stop = tuple(range(0, VOCABULARY, 4))
    params = SamplingParams(max_tokens=500, stop_tokens=stop)
    [completion] = await ground.server.sample(ground.one.ref, sequence(25, 14), params, 1)
    assert completion.stop_reason is StopReason.STOP
    assert completion.tokens[-1] in stop
    assert not set(completion.tokens[:-1]) & set(stop)


async def test_closing_the_stream_frees_the_server(ground: Ground, vllm_url: str) -> None:
    params = SamplingParams(max_tokens=CONTEXT - 30)
    before = await metric(vllm_url, "vllm:generation_tokens_total")
    async with aclosing(ground.server.stream(ground.one.ref, sequence(20, 15), params)) as stream:
        await anext(stream)
        async with asyncio.timeout(60):  # it counts in its turn
            while not await metric(vllm_url, "vllm:num_requests_running"):
                pass
    async with asyncio.timeout(240):
        while await metric(vllm_url, "vllm:num_requests_running"):
            pass
    drawn = await metric(vllm_url, "vllm:generation_tokens_total") - before
    assert drawn < params.max_tokens, "it was not sampled to its end"


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


async def test_a_person_is_served_before_episodes_that_wait(ground: Ground, vllm_url: str) -> None:
    order: list[str] = []

    async def ask(name: str, salt: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, person=name == "person")
        async with aclosing(
            ground.server.stream(ground.one.ref, sequence(20, salt), params)
        ) as stream:
            async for chunk in stream:
                if chunk.tokens and name not in order:
                    order.append(name)

    async with asyncio.TaskGroup() as group:
        for n in range(SEQUENCES):
            group.create_task(ask(f"runs {n}", n, 1000 + 40 * n))
        while len(order) < SEQUENCES:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.01)
        for n in range(SEQUENCES):
            group.create_task(ask(f"waits {n}", SEQUENCES + n, 20))
        while await metric(vllm_url, "vllm:num_requests_waiting") < SEQUENCES:
            assert order[SEQUENCES:] == []
        group.create_task(ask("person", 2 * SEQUENCES, 20))
    assert order.index("person") <= SEQUENCES + 1, order


async def test_a_folder_that_cannot_be_loaded_is_an_error_and_the_server_goes_on(
    ground: Ground, tmp_path: Path
) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    shutil.copytree(ground.folder(ground.one), damaged)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    for folder in (tmp_path / "nowhere", empty, damaged):
        with pytest.raises(BackendError, match=folder.name) as raised:
            await ground.server.load("bad", folder)
        assert type(raised.value) is BackendError
    await ground.server.load(ground.one.ref, ground.folder(ground.one))  # no error, as it is there
    await ground.server.unload("never-heard-of")
    info = await ground.server.info()
    assert {ground.one.ref, ground.two.ref} <= info.adapters
    assert "bad" not in info.adapters
    prompt = sequence(20, 16)
    [completion] = await ground.server.sample(
        ground.one.ref, prompt, SamplingParams(max_tokens=20), 1
    )
    assert await error(ground.one, prompt, completion) < ground.numbers.tolerance


async def test_it_says_what_it_is_and_refuses_in_our_words(ground: Ground) -> None:
    server, name = ground.server, ground.one.ref
    info = await server.info()
    assert (info.model, info.context_tokens) == ("tiny", CONTEXT)
    with pytest.raises(ContextLengthError, match=str(CONTEXT)):
        await server.sample(name, [1] * 20, SamplingParams(max_tokens=CONTEXT - 19), 1)
    many = SamplingParams(max_tokens=1, student_topk=MAX_LOGPROBS + 1)
    with pytest.raises(RequestError, match=f"max allowed: {MAX_LOGPROBS}"):
        await server.sample(name, [1], many, 1)
    with pytest.raises(RequestError, match="vocab"):
        await server.sample(name, [1], SamplingParams(max_tokens=1, stop_tokens=(999,)), 1)
