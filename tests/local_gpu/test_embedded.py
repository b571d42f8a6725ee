"""The embedded sampler: its logprobs are its version's, and no request harms another."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from local_gpu.learn.head import head_logprobs, read_logprobs
from local_gpu.sample.drawing import Recipe, draw
from local_gpu.sample.embedded import LocalSampler
from local_gpu.trainer import LocalTrainer
from local_gpu.tree.kernels import attend
from tests.support.backends import VOCABULARY, held_requests, start_local
from tests.support.waits import eventually
from tinker_claw.errors import ContextLengthError, RequestError, SamplerError
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams, StopReason


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[LocalTrainer]:
    trainer = await start_local(tmp_path)
    yield trainer
    await trainer.aclose()


def prompt(length: int, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 29 + i * i * 3 + i * salt) % VOCABULARY for i in range(length))


def resized(trainer: LocalTrainer, **sizes: int) -> None:
    """Give the samplers that are opened from now on other sizes."""
    serving: Any = trainer._backend.serving
    serving._size = replace(serving._size, **sizes)


async def one(sampler: LocalSampler, tokens: tuple[int, ...], **params: Any) -> Completion:
    settings: dict[str, Any] = {"max_tokens": 20, "seed": 4} | params
    return (await sampler.sample(tokens, SamplingParams(**settings)))[0]


async def distance(sampler: LocalSampler, tokens: tuple[int, ...], drawn: Completion) -> float:
    """Largest difference between the sampler's logprobs and those of its version, in nats."""
    scored = await sampler.logprobs((*tokens, *drawn.tokens), start=len(tokens))
    return max(abs(a - b) for a, b in zip(scored.logprobs, drawn.logprobs, strict=True))


async def learn(trainer: LocalTrainer, tokens: tuple[int, ...]) -> None:
    rows = len(tokens) - 5
    datum = Datum(tokens, 5, logprobs=(-4.0,) * rows, advantages=(0.1,) * rows)
    await trainer.train_step([LossPass("ppo", (datum,))], Adam(0.01))


def base_logits(folder: Path, tokens: tuple[int, ...], start: int) -> torch.Tensor:
    """Full logits of the base model, by transformers' own eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, start - 1 : -1]


# Whose logprobs


async def test_logprobs_are_the_versions_own_and_the_base_models(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    tokens = prompt(70)
    base = await trainer.base()
    drawn = await one(base, tokens)
    rows = base_logits(tmp_path, (*tokens, *drawn.tokens), 70).log_softmax(-1)
    expected = rows.gather(1, torch.tensor(drawn.tokens)[:, None])[:, 0].tolist()
    assert drawn.logprobs == pytest.approx(expected, abs=1e-4)
    await learn(trainer, tokens)
    after = await trainer.publish()
    again = await one(after, tokens)
    assert await distance(after, tokens, again) < 1e-4
    assert await distance(base, tokens, again) > 0.1


async def test_logprobs_are_those_of_the_shaped_distribution(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    tokens = prompt(40)
    base = await trainer.base()
    drawn = await one(base, tokens, temperature=0.7, top_p=0.8, top_k=20, max_tokens=30)
    logits = base_logits(tmp_path, (*tokens, *drawn.tokens), 40)
    for row, token, logprob in zip(logits, drawn.tokens, drawn.logprobs, strict=True):
        # By hand: temper, keep the 20 likeliest, then the fewest that reach 0.8; renormalise.
        order = row.argsort(descending=True)[:20]
        mass = (row[order] / 0.7).softmax(0)
        kept = int((mass.cumsum(0) < 0.8).sum()) + 1
        place = order.tolist().index(token)
        assert place < kept
        assert logprob == pytest.approx((mass[place] / mass[:kept].sum()).log().item(), abs=1e-4)


async def test_candidates_are_the_likeliest_at_temperature_one_whatever_is_drawn(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    tokens = prompt(40)
    base = await trainer.base()
    for temperature in (0.0, 0.5, 1.0):
        drawn = await one(base, tokens, temperature=temperature, student_topk=5)
        logits = base_logits(tmp_path, (*tokens, *drawn.tokens), 40)
        top = logits.log_softmax(-1).topk(5)
        assert [list(row) for row in drawn.topk_ids] == top.indices.tolist()
        got = torch.tensor(drawn.topk_logprobs)
        torch.testing.assert_close(got, top.values, atol=1e-4, rtol=0)


async def test_a_request_in_flight_keeps_its_version(trainer: LocalTrainer) -> None:
    tokens = prompt(60)
    old = await trainer.publish()
    params = SamplingParams(max_tokens=120, seed=1)
    async with aclosing(old.stream(tokens, params)) as stream:
        chunks = [await anext(stream) for _ in range(10)]
        await learn(trainer, tokens)
        new = await trainer.publish()
        fresh = await one(new, tokens, max_tokens=60)
        chunks += [chunk async for chunk in stream]
    drawn = Completion.collect(chunks, params)
    assert await distance(old, tokens, drawn) < 1e-4
    assert await distance(new, tokens, fresh) < 1e-4
    assert await distance(new, tokens, drawn) > 0.1


# Prefixes, seeds, many at once


async def test_a_shared_prefix_is_not_computed_again_and_changes_no_logprob(
    trainer: LocalTrainer,
) -> None:
    sampler = await trainer.publish()
    tokens = prompt(200)
    first = await one(sampler, tokens, max_tokens=30)
    assert first.cached_tokens == 0
    longer = (*tokens, *first.tokens, *prompt(25, salt=7))
    second = await one(sampler, longer, max_tokens=30)
    assert second.cached_tokens == 229, "all whose keys were computed"
    assert await distance(sampler, longer, second) < 1e-4
    drawn = await sampler.sample(longer, SamplingParams(max_tokens=5, seed=1), n=3)
    assert [c.cached_tokens for c in drawn] == [254] * 3, "the last one's logits are needed"


@pytest.mark.slow
async def test_a_prefix_is_shared_under_its_own_salt_only(trainer: LocalTrainer) -> None:
    sampler, tokens = await trainer.publish(), prompt(200)
    cached = [
        (await one(sampler, tokens, max_tokens=90, cache_salt=salt)).cached_tokens
        for salt in (None, "anna", "ben", "anna", "ben", None)
    ]
    assert cached == [0, 0, 0, 199, 199, 199]
    # Sampled tokens begin the next prompt, and are kept apart by salt as well.
    drawn = await one(sampler, tokens, max_tokens=90, cache_salt="anna", seed=8)
    further = (*tokens, *drawn.tokens, *prompt(9, salt=5))
    for salt in ("ben", "anna", None):
        found = await one(sampler, further, max_tokens=2, cache_salt=salt)
        assert found.cached_tokens >= 200
        assert (found.cached_tokens == 289) == (salt == "anna")
        assert await distance(sampler, further, found) < 1e-4


async def test_a_forgotten_prompt_is_computed_for_no_new_version(trainer: LocalTrainer) -> None:
    sampler, said, cached = await trainer.publish(), prompt(300), list[int]()
    for forgets in (False, True):
        async with aclosing(sampler.stream(said, SamplingParams(max_tokens=2))) as stream:
            assert [chunk async for chunk in stream]
        if forgets:
            trainer.forget()
        sampler = await trainer.publish()
        cached.append((await one(sampler, said, max_tokens=2)).cached_tokens)
    assert cached[0] >= 224
    assert cached[1] == 0


async def test_n_completions_compute_their_prompt_once(trainer: LocalTrainer) -> None:
    sampler = await trainer.base()
    drawn = await sampler.sample(prompt(150), SamplingParams(max_tokens=4, seed=9), n=4)
    assert [c.cached_tokens for c in drawn] == [0, 149, 149, 149]
    alone = await one(sampler, prompt(150), max_tokens=4, seed=11)
    assert drawn[2].tokens == alone.tokens


async def test_a_seed_decides_a_completion_whoever_else_is_served(trainer: LocalTrainer) -> None:
    sampler = await trainer.base()
    tokens = prompt(50)
    alone = await one(sampler, tokens, seed=3)
    crowd = await asyncio.gather(
        one(sampler, tokens, seed=3),
        *(one(sampler, prompt(20 + 7 * i, salt=i), seed=i, temperature=i % 3) for i in range(6)),
        one(sampler, tokens, seed=None),
    )
    assert crowd[0].tokens == alone.tokens
    assert crowd[-1].tokens != alone.tokens
    assert (await one(sampler, tokens, seed=None)).tokens != crowd[-1].tokens


async def test_the_global_generator_is_left_alone(trainer: LocalTrainer) -> None:
    state = torch.get_rng_state()
    await one(await trainer.publish(), prompt(30), seed=None)
    assert torch.equal(torch.get_rng_state(), state)


async def test_more_requests_than_the_cache_holds_are_all_served_exactly(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    resized(trainer, context_tokens=320, kv_cache_tokens=320)
    sampler = await trainer.base()
    prompts = [prompt(90 + i, salt=i) for i in range(8)]
    drawn = await asyncio.gather(*(one(sampler, p, max_tokens=100) for p in prompts))
    for tokens, completion in zip(prompts, drawn, strict=True):
        assert len(completion.tokens) == 100
        assert await distance(sampler, tokens, completion) < 1e-4
    # The whole cache for one request, after others have left their blocks in it.
    full = prompt(300, salt=9)
    assert await distance(sampler, full, await one(sampler, full)) < 1e-4
    await trainer.aclose()


async def test_a_short_prompt_passes_a_long_one(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    resized(trainer, max_batch_tokens=32)
    sampler = await trainer.base()
    order: list[str] = []
    both = threading.Event()
    module: Any = sampler._engine._module  # type: ignore[attr-defined]
    hook = module.base_model.register_forward_pre_hook(lambda *_: both.wait(60) and None)

    async def first_token(name: str, tokens: tuple[int, ...]) -> None:
        async with aclosing(sampler.stream(tokens, SamplingParams(max_tokens=2))) as stream:
            await anext(stream)
            order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(first_token("long", prompt(1900)))
        await asyncio.sleep(0)
        group.create_task(first_token("short", prompt(10, salt=3)))
        await asyncio.sleep(0)
        both.set()
    hook.remove()
    assert order == ["short", "long"]
    await trainer.aclose()


# Ends and failures


async def quiet(sampler: LocalSampler) -> None:
    await eventually(lambda: not held_requests(sampler))


async def test_an_abandoned_request_frees_its_cache(trainer: LocalTrainer) -> None:
    sampler = await trainer.publish()
    tokens = prompt(60)
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(one(sampler, tokens, max_tokens=100))
        for salt in (2, 3):
            stream = sampler.stream(prompt(40, salt), SamplingParams(max_tokens=1500))
            async with aclosing(stream):
                await anext(stream)
    await quiet(sampler)
    assert len(kept.result().tokens) == 100
    assert await distance(sampler, tokens, kept.result()) < 1e-4
    again = await one(sampler, (*tokens, 5))
    assert await distance(sampler, (*tokens, 5), again) < 1e-4


async def test_a_cancelled_task_frees_its_request(trainer: LocalTrainer) -> None:
    sampler = await trainer.publish()
    params = SamplingParams(max_tokens=1500)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sampler.sample(prompt(40), params, n=3))
        await asyncio.sleep(0.1)
        task.cancel()
    assert task.cancelled()
    await quiet(sampler)


async def test_a_failing_forward_pass_fails_its_requests_and_the_next_one_is_served(
    trainer: LocalTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = await trainer.publish()
    module: Any = sampler._engine._module
    armed = True

    def fail(*_: object) -> None:
        if armed and threading.current_thread().name.startswith("tinker-claw-sampler"):
            raise RuntimeError("out of memory, say")

    hook = module.base_model.register_forward_pre_hook(fail)
    results = await asyncio.gather(
        *(one(sampler, prompt(40, salt=i)) for i in range(3)), return_exceptions=True
    )
    assert [type(r) for r in results] == [SamplerError] * 3
    assert all("out of memory, say" in str(r) for r in results)
    hook.remove()
    assert await distance(sampler, prompt(40), await one(sampler, prompt(40))) < 1e-4


async def test_a_model_that_answers_nan_fails_the_request(trainer: LocalTrainer) -> None:
    sampler = await trainer.publish()
    module: Any = sampler._engine._module
    module.model.layers[0].mlp.up_proj.up.fill_(float("nan"))
    with pytest.raises(SamplerError, match="not finite"):
        await one(sampler, prompt(40))
    assert len((await one(await trainer.base(), prompt(40))).tokens) == 20


async def test_logprobs_that_are_not_finite_are_refused(trainer: LocalTrainer) -> None:
    learning: Any = trainer._backend.learning
    layer = learning._policy.module.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(float("nan"))
    sampler = await trainer.publish()
    with pytest.raises(SamplerError, match="not finite"):
        await sampler.logprobs(prompt(40), start=3)


async def test_a_request_after_closing_is_served_and_leaves_nothing_behind(
    trainer: LocalTrainer,
) -> None:
    sampler = await trainer.publish()
    await one(sampler, prompt(30))
    await sampler.aclose()
    late = await one(sampler, prompt(30))
    assert len(late.tokens) == 20
    assert late.cached_tokens == 0
    await quiet(sampler)
    engine: Any = sampler._engine
    assert engine._kept == []


async def test_closing_frees_the_cache_without_a_garbage_collection(trainer: LocalTrainer) -> None:
    sampler = await trainer.publish()
    await one(sampler, prompt(40))
    await quiet(sampler)
    engine: Any = sampler._engine
    cache = weakref.ref(engine._kept[0][1])
    gc.disable()
    try:
        await sampler.aclose()
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
async def test_a_bad_setting_is_refused_by_its_name(
    trainer: LocalTrainer, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        await one(await trainer.base(), prompt(10), **params)
    assert refused.value.param == param


async def test_prompts_that_cannot_be_served_are_refused_at_once(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path, context_tokens=256)
    sampler = await trainer.base()
    assert (await trainer.capabilities()).context_tokens == 256
    with pytest.raises(ContextLengthError, match="256"):
        await one(sampler, prompt(250))
    with pytest.raises(ContextLengthError):
        await sampler.logprobs(prompt(257), start=1)
    with pytest.raises(RequestError, match="empty"):
        await one(sampler, ())
    with pytest.raises(SamplerError, match="tokenizer"):
        await one(sampler, (1, VOCABULARY))
    with pytest.raises(SamplerError, match="outside"):
        await sampler.logprobs((1, 2, 3), start=1, targets=[(1,), (VOCABULARY,)])
    assert (await one(sampler, prompt(236))).stop_reason is StopReason.LENGTH
    await trainer.aclose()


# The pure parts


def plain(uniform: float, **changes: Any) -> Recipe:
    return Recipe(temperature=1.0, top_p=1.0, top_k=None, uniform=uniform, student_topk=0)._replace(
        **changes
    )


def test_a_uniform_number_lands_on_the_token_that_owns_it() -> None:
    logits = (
        torch.tensor([0.5, 0.25, 0.0, 0.25])
        .log()
        .masked_fill(torch.tensor([0, 0, 1, 0]) == 1, -99.0)
    )
    points = [0.0, 0.49, 0.51, 0.74, 0.76, 0.9999999]
    drawn = draw(logits.repeat(6, 1), [plain(u) for u in points])
    assert [d.token for d in drawn if d] == [0, 0, 1, 1, 3, 3]
    assert [d.logprob for d in drawn if d] == pytest.approx(
        logits[[0, 0, 1, 1, 3, 3]].tolist(), abs=1e-5
    )


def test_each_row_is_drawn_by_its_own_recipe() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    recipes = [
        plain(0.999, temperature=0.0, student_topk=2),
        plain(0.999, top_k=2),
        plain(0.999, top_p=0.6),
        plain(0.999, top_p=0.01),
        plain(0.999, temperature=1e-6),
        plain(0.999),
    ]
    drawn = draw(row.repeat(6, 1), recipes)
    assert [d.token for d in drawn if d] == [0, 1, 1, 0, 0, 3]
    probabilities = [torch.tensor(d.logprob).exp().item() for d in drawn if d]
    assert probabilities == pytest.approx([0.4, 3 / 7, 3 / 7, 1.0, 1.0, 0.1], abs=1e-5)
    assert drawn[0] is not None
    assert drawn[0].topk_ids == (0, 1)
    assert drawn[1] is not None
    assert drawn[1].topk_ids == ()


def test_a_row_that_is_not_finite_is_told_apart() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0], [0.0, 1.0]])
    assert [d is None for d in draw(rows, [plain(0.5)] * 4)] == [False, True, True, False]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (7, 7), (5, 300), (300, 700)])
def test_attention_is_causal_from_the_end(n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(n * m)
    query = torch.randn(1, 4, n, 8, generator=generator)
    key, value = (torch.randn(1, 2, m, 8, generator=generator) for _ in range(2))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    seen = torch.arange(m)[None] <= torch.arange(m - n, m)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(attend(query, key, value, 0.3), expected, atol=1e-5, rtol=1e-4)


def test_logprobs_in_chunks_equal_those_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_gpu.learn.head._CHUNK_ELEMENTS", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False).requires_grad_(False)
    rows = torch.randn(11, 8, generator=generator, requires_grad=True)
    ids = torch.randint(0, 50, (11, 4), generator=generator)
    weights = torch.randn(11, 4, generator=generator)
    full = head(rows).log_softmax(-1)
    (expected,) = torch.autograd.grad((full.gather(1, ids) * weights).sum(), rows)
    read = head_logprobs(head, rows, ids)
    (got,) = torch.autograd.grad((read * weights).sum(), rows)
    torch.testing.assert_close(read, full.gather(1, ids))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        top = read_logprobs(head, rows, ids, 5)
    torch.testing.assert_close(top.chosen, full.gather(1, ids).detach())
    assert torch.equal(top.top_ids, full.topk(5).indices)
