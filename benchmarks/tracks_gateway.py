"""`python -m benchmarks.tracks_gateway`: the product as `run.py` starts it, over the stub.

Its sampler is the local backend's connection to a vLLM server. Its trainer stands for one on
another machine: it takes time, but no processor time here. Everything else is the product's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gateway_server import Elsewhere
from benchmarks.tracks_stub import CONTEXT_TOKENS
from local_gpu.sample.vllm import VllmServer
from tinker_claw.app.main import serve
from tinker_claw.config.settings import Gateway, JudgeSettings, Run, Settings, Training
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Capabilities,
    Completion,
    Images,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)

_LOGPROB = -0.5
"""Logprob of every token, as the stub reports it."""
_RATE = 1e-4


class Served(Sampler):
    """A sampler that takes its replies from one vLLM server."""

    ref = "stub"

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncIterator[TokenChunk]:
        return self._server.stream(None, prompt, params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        return await self._server.sample(None, prompt, params, n)

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
    ) -> TokenLogprobs:
        """Return the logprobs as they were sampled, so that every step stays close to the
        sampler."""
        return TokenLogprobs(start, (_LOGPROB,) * (len(tokens) - start))

    async def aclose(self) -> None:
        """Do nothing: all versions share the connections."""


class Slow(Elsewhere):
    """A trainer whose steps take as long as asked."""

    def __init__(self, sampler: Sampler, step_s: float) -> None:
        super().__init__(sampler)
        self._step_s = step_s

    async def capabilities(self) -> Capabilities:
        losses = frozenset({"ppo", "cross_entropy"})
        return Capabilities("bench", losses, True, True, CONTEXT_TOKENS)

    async def _take(self, what: str) -> None:
        await asyncio.sleep(self._step_s if what == "step" else 0)


def main() -> None:
    """Serve until killed; events are logged on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracks_gateway")
    parser.add_argument("directory", type=Path, help="of the run")
    parser.add_argument("model", help="folder of the tokenizer")
    parser.add_argument("stub", help="its address")
    parser.add_argument("concurrent", type=int, help="--max-concurrent")
    parser.add_argument("batch", type=int, help="--batch-size")
    parser.add_argument("step", type=float, help="seconds of a step")
    asked = parser.parse_args()
    settings = Settings(
        run=Run(
            model_name=asked.model,
            backend="local",
            method="binary",
            renderer="qwen3",
            data_dir=asked.directory,
        ),
        gateway=Gateway(port=0, served_model_name="stub", max_concurrent=asked.concurrent),
        judge=JudgeSettings(judge_url=asked.stub, prm_m=1),
        training=Training(batch_size=asked.batch, learning_rate=_RATE),
    )

    @asynccontextmanager
    async def elsewhere(*_: Any, **__: Any) -> AsyncGenerator[Slow]:
        server = VllmServer(asked.stub)
        yield Slow(Served(server), asked.step)
        await server.aclose()

    with patch("tinker_claw.app.wiring.open_trainer", elsewhere):
        asyncio.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
