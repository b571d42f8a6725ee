"""The gateway over the embedded sampler: a hang-up frees its cache, and a crash does not show."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from local_gpu.config import LocalConfig
from local_gpu.sample.embedded import LocalSampler
from local_gpu.trainer import LocalTrainer
from tests.support.backends import tiny_model
from tests.support.gateways import gateway, text_of
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR

CONTEXT = 2048


@pytest.fixture
async def trainer(tmp_path: Path, renderer: Renderer) -> AsyncIterator[LocalTrainer]:
    """A random model that speaks the demo's vocabulary, and seldom ends its replies."""
    vocabulary = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab_size()
    trainer = await LocalTrainer.start(
        LocalConfig(
            model=str(tiny_model(tmp_path / "model", vocab_size=vocabulary)),
            root=tmp_path / "run",
            rank=4,
            alpha=8,
            threads=1,
            context_tokens=CONTEXT,
        )
    )
    with torch.no_grad():  # far below the likeliest logits
        module_of(await trainer.base()).get_output_embeddings().weight[
            list(renderer.stop_tokens)
        ] = 0
    yield trainer
    await trainer.aclose()


def module_of(sampler: Any) -> Any:
    return sampler._engine._module


@pytest.fixture
async def sampler(trainer: LocalTrainer) -> LocalSampler:
    return await trainer.publish()


async def test_a_call_is_begun_and_goes_on_with_tokens_of_the_policy(
    tmp_path: Path, renderer: Renderer, sampler: LocalSampler
) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    async with gateway(tmp_path, renderer, sampler, context_tokens=CONTEXT) as world:
        response = await world.ask("hi", tools=[tool], tool_choice="required", max_tokens=9, seed=1)
        (choice,) = response.json()["choices"]
        begun = '<tool_call>\n{"name": "look", "arguments":'
        assert choice["message"]["content"] == "", "half of a call is not shown"
        assert choice["finish_reason"] == "length"
        (turn,) = world.turns()
        done = turn.completion
        assert renderer.decode(turn.prompt).endswith(begun)
        scored = await sampler.logprobs((*turn.prompt, *done.tokens), start=len(turn.prompt))
        assert scored.logprobs == pytest.approx(done.logprobs, abs=1e-4)


async def test_a_crash_of_the_engine_shows_nowhere_in_the_reply(
    tmp_path: Path, renderer: Renderer, sampler: LocalSampler
) -> None:
    passes = 0

    def fail(*_: object) -> None:
        nonlocal passes
        if threading.current_thread().name.startswith("tinker-claw-sampler"):
            passes += 1
            if passes in (8, 20):
                raise RuntimeError("out of memory, say")

    module_of(sampler).base_model.register_forward_pre_hook(fail)
    async with gateway(tmp_path, renderer, sampler, context_tokens=CONTEXT) as world:
        events = await world.events("hi", max_tokens=60, seed=1)  # a reply of more than 20 tokens
        (turn,) = world.turns()
        done = turn.completion
        assert passes > 20
        assert "error" not in events[-1]
        assert events[-2]["choices"][0]["finish_reason"] in ("length", "stop")
        assert text_of(events) == turn.reply_text
        assert world.column("reason") == [None]
        # Every logprob is the version's own, as if nothing had happened.
        scored = await sampler.logprobs((*turn.prompt, *done.tokens), start=len(turn.prompt))
        assert done.logprobs == pytest.approx(scored.logprobs, abs=1e-4)
        assert len(done.topk_ids) == len(done.topk_logprobs) == len(done.tokens)
