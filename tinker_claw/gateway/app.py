"""Routes, and who may use them.

Rule: nothing is read of a request before it is known who sends it, that no web page does, and that
there is a place for it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tinker_claw.conversation.index import IDLE_S, ConversationIndex
from tinker_claw.errors import RequestError
from tinker_claw.formats.chat_reply import model_list, model_object
from tinker_claw.gateway import errors
from tinker_claw.gateway.auth import Keys, Principal
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.limits import BODY_S, MAX_BODY_BYTES, MAX_QUEUE, Limits, read_body
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.request import admit, not_served
from tinker_claw.gateway.respond import StreamedAnswer, WholeAnswer
from tinker_claw.origin import is_loopback, refuse_forms, refuse_pages


def create_app(deps: GatewayDeps) -> FastAPI:
    """The gateway as an ASGI application; its `state.book` is what it remembers of sessions."""
    app = FastAPI(title="tinker-claw", openapi_url=None, redirect_slashes=False)
    cfg = deps.settings
    book = app.state.book = ConversationIndex(deps.turns, IDLE_S)
    discretion = SessionPrivacy(deps.turns, deps.redactor, deps.turnstile)
    keys = Keys(cfg.api_key, deps.users)
    limits = Limits(keys.users, cfg.max_concurrent, MAX_QUEUE)
    local = is_loopback(cfg.host) and not keys.needed
    since = int(time.time())
    errors.install(app)

    def caller_of(request: Request) -> Principal:
        refuse_pages(request.headers, local=local)
        return keys.principal(request.headers.get("authorization", ""))

    async def chat(request: Request) -> Response:
        who = caller_of(request)
        refuse_forms(request.headers)
        with ExitStack() as held:
            caller = held.enter_context(limits.place(who.name, who.cache_salt))
            try:
                body = await read_body(
                    request,
                    most=MAX_BODY_BYTES,
                    limit_s=BODY_S,
                    context_tokens=deps.context_tokens,
                )
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
            job = await admit(deps, book, discretion, body, request.headers, caller)
            answer = StreamedAnswer if job.request.stream else WholeAnswer
            return _Placed(answer(deps, book, job), held.pop_all())

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        caller_of(request)
        return JSONResponse(model_list([deps.served_name], since))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        caller_of(request)
        if name != deps.served_name:
            raise not_served(deps, name)
        return JSONResponse(model_object(name, since))

    @app.get("/", response_model=None)
    async def what(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        return Response(f"{errors.WHAT} How it is: /health.\n", media_type="text/plain")

    @app.get("/health", response_model=None)
    @app.get("/healthz", response_model=None)
    async def healthz(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        health = {**deps.health(), "private_near_misses": discretion.near_misses}
        well = {"status": health["status"]}
        try:
            who = keys.principal(request.headers.get("authorization", ""))
        except RequestError:
            return JSONResponse(well)  # a probe without a key learns whether all is well
        if not who.admin:
            # Errors may quote addresses and paths, and all other figures are of everybody.
            return JSONResponse(well | {"user": who.name} | limits.figures(who.name))
        return JSONResponse(dict(health))

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        if not caller_of(request).admin:
            raise RequestError(
                "These are the figures of all users: they are for admins. /healthz shows yours.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )
        return Response(deps.metrics(), media_type="text/plain; version=0.0.4")

    # FastAPI's own way would look for parameters to fill in, with every request.
    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    _ = (models, model, what, healthz, metrics)  # reached through the router
    return app


class _Placed(Response):
    """An answer that keeps the place of its request until it is complete."""

    def __init__(self, answer: Response, held: ExitStack) -> None:
        super().__init__()
        self._answer = answer
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._answer(scope, receive, send)
