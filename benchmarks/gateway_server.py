"""`python -m benchmarks.gateway_server`: the gateway over a sampler that answers at once.

Rule: renderer, ledger, HTTP server and all between are the product's; only the sampler is not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from fastapi import FastAPI
from tokenizers import Tokenizer

from benchmarks.agent_requests import MODEL, RELAYED
from benchmarks.bare_server import TEXT, serve_app
from tinker_claw.app.healthz import healthz
from tinker_claw.app.server import spare_collector
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Gateway
from tinker_claw.formats import spoken
from tinker_claw.gateway.app import create_app
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.fallback import ServingDeps
from tinker_claw.gateway.index import IDLE_S, ConversationIndex
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.learner.health import Health
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Policy, PolicyHolder, Sampler
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry, configure
from tinker_claw.types import (
    Capabilities,
    Charge,
    Completion,
    Images,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    uncharged,
)

CONTEXT_TOKENS = 131_072
TOPK = 4
"""Candidates per sampled token, as methods opd and combine ask for."""
_LOGPROB = -0.5
"""Logprob of every token, under any weights."""
CALL = '<tool_call>\n{"name": "tool_1", "arguments": {"path1": "notes.txt"}}\n</tool_call>'


class AtOnce(Sampler):
    """A sampler that answers at once, in turn with text and with a tool call, whatever the
    prompt."""

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self.ref = "at once"
        self._replies = itertools.cycle([(_chunk(r, TOPK), _chunk(r, 0)) for r in replies])
        words = itertools.cycle(replies[0][:-1])
        many = [_chunk([next(words)], TOPK, None) for _ in range(RELAYED - 1)]
        self._relayed = [*many, _chunk(replies[0][-1:], TOPK)]

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        if params.max_tokens == RELAYED:
            for chunk in self._relayed:
                yield chunk
                await asyncio.sleep(0)  # each on its own
            return
        with_candidates, without = next(self._replies)
        yield with_candidates if params.student_topk else without

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        raise NotImplementedError

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
        """Return the logprobs as they were sampled, so that every step stays close to the
        sampler."""
        return TokenLogprobs(start, (_LOGPROB,) * (len(tokens) - start))

    async def aclose(self) -> None:
        """Do nothing: there is nothing to free."""


def _chunk(
    reply: Sequence[int], topk: int, stop: StopReason | None = StopReason.STOP
) -> TokenChunk:
    """The whole reply in one chunk, as the Tinker service gives it."""
    tokens = tuple(reply)
    return TokenChunk(
        tokens=tokens,
        logprobs=(_LOGPROB,) * len(tokens),
        topk_ids=tuple(tuple(range(t, t - topk, -1)) for t in tokens) if topk else (),
        topk_logprobs=tuple(tuple(_LOGPROB - k for k in range(topk)) for _ in tokens)
        if topk
        else (),
        stop_reason=stop,
    )


def gateway_app(directory: Path, vocabulary: Path, context_tokens: int) -> FastAPI:
    """Make the gateway's app from the product's parts, as `tinker_claw.app.wiring` does."""
    ledger = Ledger(directory)
    renderer = Renderer.load(str(vocabulary), "qwen3")
    tokenizer = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    replies = [tokenizer.encode(f"{text}<|im_end|>").ids for text in (TEXT, CALL)]
    version = ledger.versions.add_first(state_ref="none", sampler_ref="none")
    sampler = AtOnce(replies)
    policy = PolicyHolder(Policy(version, sampler))
    telemetry, health = Telemetry(None), Health()
    spending = Spending(Price(), ledger.spend, telemetry)

    async def open_version(number: int) -> Sampler:
        raise LookupError(number)

    settings, compute = Gateway(), ComputeRounds()
    secrets = SecretSearch(Redactor([SECRETS]), compute)
    deps = GatewayDeps(
        settings=settings,
        served_name=MODEL,
        policy=policy,
        keys=Keys(None, ()),
        serving=ServingDeps(open_version, health.outages, lambda version: ()),
        ledger=ledger,
        index=ConversationIndex(ledger.turns, IDLE_S),
        secrets=secrets,
        privacy=SessionPrivacy(ledger, secrets),
        owners=Owners(ledger.turns),
        compute=compute,
        spending=spending,
        renderer=renderer,
        can=Capabilities("bench", frozenset(), True, True, context_tokens),
        student_topk=TOPK,
        wake_judging=lambda: None,
        telemetry=telemetry,
    )
    return create_app(deps, spoken(), lambda: healthz(deps, health, 16))


def main() -> None:
    """Build the app and serve it until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_server")
    parser.add_argument("directory", type=Path, help="of the ledger")
    parser.add_argument("vocabulary", type=Path, help="folder of the tokenizer")
    parser.add_argument("context_tokens", type=int, nargs="?", default=CONTEXT_TOKENS)
    arguments = parser.parse_args()
    redactor = Redactor([SECRETS])
    redactor.load()  # as the product does before it serves
    with Path(os.devnull).open("w") as nowhere:
        configure(nowhere, redactor.redact)  # written, and discarded
        app = gateway_app(arguments.directory, arguments.vocabulary, arguments.context_tokens)
        spare_collector()
        serve_app(app)


if __name__ == "__main__":
    sys.exit(main())
