"""Routes, keys and sizes.

Rule: nothing is read of a request before its key and its size are known to be good.
"""

from __future__ import annotations

import hmac
import time
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from tinker_claw.errors import RequestError
from tinker_claw.gateway import errors
from tinker_claw.gateway.admit import admit
from tinker_claw.gateway.book import Book
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.respond import StreamedAnswer, WholeAnswer
from tinker_claw.wire import model_list


def create_app(deps: GatewayDeps) -> FastAPI:
    """The gateway as an ASGI application."""
    app = FastAPI(title="tinker-claw", openapi_url=None, redirect_slashes=False)
    book = Book(deps.turns)
    since = int(time.time())
    errors.install(app)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        _check_key(deps, request)
        try:
            body = await _body(request, deps.settings.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
        job = await admit(deps, book, body, request.headers)
        answer = StreamedAnswer if job.request.stream else WholeAnswer
        return answer(deps, book, job)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        _check_key(deps, request)
        return JSONResponse(model_list([deps.served_name], since))

    @app.get("/healthz", response_model=None)
    async def healthz() -> Response:
        return JSONResponse(dict(deps.health()))

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        _check_key(deps, request)
        return Response(deps.metrics(), media_type="text/plain; version=0.0.4")

    _ = (chat, models, healthz, metrics)  # reached through the router
    return app


def _check_key(deps: GatewayDeps, request: Request) -> None:
    if deps.settings.api_key is None:
        return
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    expected = deps.settings.api_key.get_secret_value().encode()
    # Header bytes arrive decoded as Latin-1.
    same = hmac.compare_digest(sent.strip().encode("latin-1"), expected)
    if scheme.lower() != "bearer" or not same:
        raise RequestError(
            "The API key is missing or wrong; send it as Authorization: Bearer.",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )


async def _body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be too long."""
    too_long = RequestError(
        f"The body is longer than {limit} bytes.",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="request_too_large",
    )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit:
        raise too_long
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_long
    return bytes(body)
