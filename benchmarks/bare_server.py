"""`python -m benchmarks.bare_server`: a FastAPI route that answers a canned stream, or one event.

Rule: it reads the JSON and does nothing else. Its times are what HTTP costs on the product's
server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from benchmarks.agent_requests import MODEL, RELAYED
from tinker_claw.app.server import GatewayServer, url_of
from tinker_claw.connections import listen

TEXT = "Yes. The file is read, and what stands in it is what you said it was."


def bare_app() -> FastAPI:
    """Make an app that reads the JSON and answers the same kind of stream, with nothing in
    between."""
    app = FastAPI(openapi_url=None)
    head: dict[str, Any] = {
        "id": "chatcmpl-bare",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
    }
    pieces = [{"role": "assistant", "content": ""}, *({"content": TEXT[i::4]} for i in range(4))]
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": piece, "finish_reason": None}] for piece in pieces
    ]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    events = [head | {"choices": choice} for choice in choices]
    usage = {"prompt_tokens": 12_000, "completion_tokens": 20, "total_tokens": 12_020}
    events.append(head | {"choices": [], "usage": usage})
    stream = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]

    async def canned(tokens: int) -> AsyncIterator[bytes]:
        for _ in range(tokens):
            yield stream[1]
            await asyncio.sleep(0)  # as from a sampler: each on its own
        for event in [*stream, b"data: [DONE]\n\n"]:
            yield event

    @app.post("/v1/{path:path}", response_model=None)
    async def answer(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            return JSONResponse(events[0])
        tokens = RELAYED if body.get("max_completion_tokens") == RELAYED else 0
        return StreamingResponse(canned(tokens), media_type="text/event-stream")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    _ = (answer, healthz)  # reached through the router
    return app


def serve_app(app: FastAPI) -> None:
    """Print the address on standard output, and serve until killed."""

    async def serve() -> None:
        with listen("127.0.0.1", 0) as listening:
            print(f"serving {url_of(listening)}", flush=True)
            await GatewayServer(app).serve(sockets=[listening])

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(serve_app(bare_app()))
