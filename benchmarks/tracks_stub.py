"""`python -m benchmarks.tracks_stub`: a model server that takes a fixed time for every reply.

It serves the same model by three APIs: chat completions, whole, for agents that ask it directly;
vLLM's completions of token ids, in events spread over that time, for a gateway in between; and the
judge's. It does sums: it calls the calculator, and then answers with the result, every third time
wrongly, so that the tries at a task differ.

Rule: every request takes equally long, and any number of them are answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from benchmarks.bare_server import serve_app

MODEL = "stub"
CONTEXT_TOKENS = 32_768
JUDGED_S = 0.2
"""Seconds that a verdict takes."""
_LOGPROB = -0.5
_PADDING = "so"
_ASKED = re.compile(r"What is ([-+\d ]+)\?")
_TOLD = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass
class Stub:
    """A model server that takes a fixed time for every reply."""

    tokenizer: Tokenizer
    latency_s: float
    tokens: int
    """Tokens of every reply, or one more; a longer text keeps all of its tokens."""
    together: int = 1
    """Tokens per event, as with `stream-interval` of vLLM."""
    replies: int = 0
    ends: list[float] = field(default_factory=list[float])
    """Times, by time.time(), at which episodes that ask here directly ended."""
    _tries: itertools.count[int] = field(default_factory=itertools.count)

    def decide(self, asked: str | None, told: str | None) -> tuple[str, str | None]:
        """Return the words of a reply, and the expression for the calculator, if it calls it."""
        if told is not None:
            right = next(self._tries) % 3
            return f"It is {told if right else 'hard'}.", None
        return ("", asked) if asked is not None else ("I am well.", None)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        messages: Sequence[dict[str, Any]] = body["messages"]
        if body["model"] == "judge":
            await asyncio.sleep(JUDGED_S)
            said = [{"role": "assistant", "content": "\\boxed{1}"}] * body.get("n", 1)
            return JSONResponse({"choices": [_whole(n, one) for n, one in enumerate(said)]})
        last = messages[-1]
        found = _ASKED.search(last["content"])
        words, expression = self.decide(
            found and found[1], last["content"] if last["role"] == "tool" else None
        )
        text, message = self._padded(words, expression), {"role": "assistant", "content": words}
        if expression is not None:
            message["content"] = text.partition("<tool_call>")[0]
            function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
            calls = [{"id": "call-1", "type": "function", "function": function}]
            message |= {"tool_calls": calls}
        else:
            message["content"] = text
        await asyncio.sleep(self.latency_s)
        self.replies += 1
        usage = {"prompt_tokens": 100, "completion_tokens": self.tokens, "total_tokens": 0}
        return JSONResponse(
            {"choices": [_whole(0, message)], "system_fingerprint": "v0", "usage": usage}
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = self.tokenizer.decode(body["prompt"], skip_special_tokens=False)
        last = prompt.rpartition("<|im_start|>user")[2]
        asked, told = _ASKED.search(last), _TOLD.search(last)
        text = self._padded(*self.decide(asked and asked[1], told and told[1]))
        ids = self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
        return StreamingResponse(self._events(ids), media_type="text/event-stream")

    async def _events(self, ids: Sequence[int]) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        began = now()
        for at in range(0, len(ids), self.together):
            some = ids[at : at + self.together]
            until = at + len(some)
            await asyncio.sleep(began + self.latency_s * until / len(ids) - now())
            names = [f"token_id:{token}" for token in some]
            choice = {
                "index": 0,
                "text": "",
                "token_ids": some,
                "logprobs": {
                    "tokens": names,
                    "token_logprobs": [_LOGPROB] * len(some),
                    "top_logprobs": [{name: _LOGPROB} for name in names],
                },
                "finish_reason": "stop" if until == len(ids) else None,
            }
            yield _event({"id": "c", "model": MODEL, "choices": [choice]})
        yield _event({"id": "c", "choices": [], "usage": {"completion_tokens": len(ids)}})
        yield b"data: [DONE]\n\n"

    def _padded(self, words: str, expression: str | None) -> str:
        """Text of a reply of about `tokens` tokens, ending with the words or the call."""
        end = words
        if expression is not None:
            call = {"name": "calculator", "arguments": {"expression": expression}}
            end = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        has = len(self.tokenizer.encode(end, add_special_tokens=False).ids) + 1
        return f"{_PADDING} " * max(0, self.tokens - has) + end


def stub_app(stub: Stub) -> FastAPI:
    """Make the app: the stub's routes, and those of a gateway that an agent also asks."""

    async def models(_: Request) -> Response:
        card = {"id": MODEL, "max_model_len": CONTEXT_TOKENS, "owned_by": "vllm"}
        return JSONResponse({"object": "list", "data": [card]})

    async def feedback(_: Request) -> Response:
        stub.ends.append(time.time())
        return JSONResponse({"counts": True})

    async def told(_: Request) -> Response:
        """Return the replies and ended episodes since the last call."""
        said = {"replies": stub.replies, "ends": stub.ends}
        stub.replies, stub.ends = 0, []
        return JSONResponse(said)

    async def health(_: Request) -> Response:
        return JSONResponse({"samples_waiting": 0, "policy_version": 0})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse("")

    return FastAPI(
        openapi_url=None,
        routes=[
            Route("/v1/chat/completions", stub.chat, methods=["POST"]),
            Route("/v1/completions", stub.complete, methods=["POST"]),
            Route("/v1/feedback", feedback, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/told", told),
            Route("/healthz", health),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
    )


def _whole(index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "message": message, "finish_reason": "stop"}


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def main() -> None:
    """Serve the stub until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracks_stub")
    parser.add_argument("tokenizer", type=Path, help="folder")
    parser.add_argument("latency", type=float, help="seconds of a reply")
    parser.add_argument("tokens", type=int, help="of a reply")
    parser.add_argument("together", type=int, help="tokens of an event")
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.tokenizer / "tokenizer.json"))
    serve_app(stub_app(Stub(tokenizer, asked.latency, asked.tokens, asked.together)))


if __name__ == "__main__":
    sys.exit(main())
