"""`python -m benchmarks.gateway_server`: the gateway over a sampler that answers at once.

Rule: renderer, ledger, HTTP server and all between are the product's; only the sampler is not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from fastapi import FastAPI
from tokenizers import Tokenizer

from benchmarks.agent_requests import MODEL
from benchmarks.bare_server import TEXT, serve_app
from tinker_claw.config import Gateway
from tinker_claw.gateway import GatewayDeps, create_app
from tinker_claw.learner import Health
from tinker_claw.ledger import Ledger
from tinker_claw.policy import Policy, PolicyHolder, Sampler
from tinker_claw.prices import Price
from tinker_claw.render import Renderer
from tinker_claw.spending import Spending
from tinker_claw.telemetry import Telemetry, configure
from tinker_claw.types import (
    Completion,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)

CONTEXT_TOKENS = 131_072
TOPK = 4
"""Candidates per sampled token, as methods opd and combine ask for."""
CALL = '<tool_call>\n{"name": "tool_1", "arguments": {"path1": "notes.txt"}}\n</tool_call>'


class AtOnce(Sampler):
    """Answers with text and with a tool call in turn, and does not look at the prompt."""

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self.ref = "at once"
        self._replies = itertools.cycle([(_chunk(r, TOPK), _chunk(r, 0)) for r in replies])

    async def stream(
        self, prompt: Tokens, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        with_candidates, without = next(self._replies)
        yield with_candidates if params.student_topk else without

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        raise NotImplementedError

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        raise NotImplementedError

    async def aclose(self) -> None:
        """There is nothing to free."""


def _chunk(reply: Sequence[int], topk: int) -> TokenChunk:
    """The whole reply in one, as the Tinker service gives it."""
    tokens = tuple(reply)
    return TokenChunk(
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        topk_ids=tuple(tuple(range(t, t - topk, -1)) for t in tokens) if topk else (),
        topk_logprobs=tuple(tuple(-0.5 - k for k in range(topk)) for _ in tokens) if topk else (),
        stop_reason=StopReason.STOP,
    )


def gateway_app(directory: Path, vocabulary: Path) -> FastAPI:
    """The product's parts, put together as `tinker_claw.serve.wiring` does."""
    ledger = Ledger(directory)
    renderer = Renderer.load(str(vocabulary), "qwen3")
    tokenizer = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    replies = [tokenizer.encode(f"{text}<|im_end|>").ids for text in (TEXT, CALL)]
    version = ledger.steps.add_first_version(state_ref="none", sampler_ref="none")
    policy = PolicyHolder(Policy(version, AtOnce(replies)))
    telemetry, health = Telemetry(None), Health()
    spending = Spending(Price(), ledger.spend, telemetry)

    async def open_version(number: int) -> Sampler:
        raise LookupError(number)

    return create_app(
        GatewayDeps(
            settings=Gateway(),
            served_name=MODEL,
            policy=policy,
            open_version=open_version,
            turns=ledger.turns,
            spending=spending,
            renderer=renderer,
            context_tokens=CONTEXT_TOKENS,
            student_topk=TOPK,
            on_next_state=lambda: None,
            health=lambda: spending.shown_in(
                health.snapshot(
                    version=policy.current.version.id,
                    waiting=ledger.samples.waiting(),
                    batch_size=16,
                )
            ),
            metrics=telemetry.exposition,
            observer=telemetry,
            outages=health.backend,
        )
    )


def main() -> None:
    """Build the app and serve it until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_server")
    parser.add_argument("directory", type=Path, help="of the ledger")
    parser.add_argument("vocabulary", type=Path, help="folder of the tokenizer")
    arguments = parser.parse_args()
    with Path(os.devnull).open("w") as nowhere:
        configure("json", nowhere)  # written, and read by nobody
        serve_app(gateway_app(arguments.directory, arguments.vocabulary))


if __name__ == "__main__":
    sys.exit(main())
