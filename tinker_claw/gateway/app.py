"""Routes, and the way of a turn through them.

A turn: `caller_of` finds out who sends it; `Limits.place` keeps a place for it, until its answer is
complete; `read_body` takes it in; `admit` (request.py) reads it, ties it to the turn before and
renders its prompt; an `Answer` (respond.py) runs a `Generation` (generation.py), which waits for a
slot, draws the tokens from a `Sampling` (sampling.py) and writes the turn to the ledger.

Rule: nothing is read of a request before it is known who sends it, that no web page does, and that
there is a place for it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from tinker_claw.conversation.classify import is_episode
from tinker_claw.errors import ClawError, RequestError
from tinker_claw.formats.base import Format, Purpose, Route, bearer
from tinker_claw.gateway import errors, feedback
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.limits import BODY_S, MAX_BODY_BYTES, MAX_QUEUE, Limits, read_body
from tinker_claw.gateway.request import GatewayDeps, admit, count, not_served
from tinker_claw.gateway.respond import StreamedAnswer, WholeAnswer
from tinker_claw.origin import is_loopback, refuse_forms, refuse_pages


def create_app(deps: GatewayDeps, formats: Sequence[Format]) -> FastAPI:
    """The gateway as an ASGI application.

    Args:
        formats: what is spoken; whatever no format claims is answered in the first one's shape.
    """
    app = FastAPI(title="tinker-claw", openapi_url=None, redirect_slashes=False)
    cfg = deps.settings
    keys = Keys(cfg.api_key, deps.users)
    limits = Limits(keys.users, cfg.max_concurrent, MAX_QUEUE)
    local = is_loopback(cfg.host) and not keys.needed
    since = int(time.time())
    errors.install(app, formats)

    async def turn(call: _Call) -> Response:
        refuse_pages(call.headers, local=local)
        who = keys.caller(call.wire.key(call.headers), _address(call.scope), call.wire.key_place)
        refuse_forms(call.headers, *call.wire.body_types)
        with ExitStack() as held:
            place = limits.place(who.name, who.cache_salt, episode=is_episode(call.headers))
            caller = held.enter_context(place)
            try:
                body = await read_body(
                    call.receive,
                    call.headers,
                    most=MAX_BODY_BYTES,
                    limit_s=BODY_S,
                    context_tokens=deps.context_tokens,
                    caller=caller,
                )
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
            if call.route.purpose is Purpose.COUNT:
                tokens = await count(deps, call.wire, call.route, body, caller)
                return JSONResponse(call.wire.counted(tokens))
            job = await admit(deps, call.wire, call.route, body, call.headers, caller)
            answer = StreamedAnswer if job.request.stream else WholeAnswer
            return answer(deps, call.wire, job, held.pop_all())

    async def models(call: _Call) -> Response:
        refuse_pages(call.headers, local=local)
        keys.caller(call.wire.key(call.headers), _address(call.scope), call.wire.key_place)
        if call.route.purpose is Purpose.MODELS:
            return JSONResponse(call.wire.models([deps.served_name], since))
        name = call.scope["path_params"]["name"]
        if name != deps.served_name:
            raise not_served(deps, name)
        return JSONResponse(call.wire.model(name, since))

    for route in dict.fromkeys(route for wire in formats for route in wire.routes):
        endpoint = _Endpoint(
            turn if route.purpose in (Purpose.TURN, Purpose.COUNT) else models,
            route,
            [wire for wire in formats if route in wire.routes],
        )
        # Not FastAPI's own way, which looks for parameters to fill in with every request.
        routed = Path(route.path, endpoint)
        routed.methods = {route.method}
        app.router.routes.append(routed)

    _add_feedback(app, deps, keys, limits, local=local)
    _add_probes(app, deps, formats, keys, limits, local=local)
    return app


def _add_feedback(
    app: FastAPI, deps: GatewayDeps, keys: Keys, limits: Limits, *, local: bool
) -> None:
    """The route on which users say outright what replies were like."""

    @app.post(feedback.PATH, response_model=None)
    async def said(request: Request) -> Response:
        headers = dict(reversed(request.headers.items()))  # of those sent twice, the first
        refuse_pages(headers, local=local)
        who = keys.caller(bearer(headers), _address(request.scope))
        refuse_forms(headers)
        with limits.place(who.name, who.cache_salt) as caller:
            try:
                body = await read_body(
                    request.receive,
                    headers,
                    most=feedback.MAX_BYTES,
                    limit_s=BODY_S,
                    context_tokens=deps.context_tokens,
                    caller=caller,
                )
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
            return JSONResponse(await feedback.take(deps, body, headers, caller))

    _ = said  # reached through the router


def _add_probes(
    app: FastAPI,
    deps: GatewayDeps,
    formats: Sequence[Format],
    keys: Keys,
    limits: Limits,
    *,
    local: bool,
) -> None:
    """The routes that say how the gateway is."""

    @app.get("/", response_model=None)
    async def what(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        said = f"{errors.what(formats)} How it is: /health.\n"
        return Response(said, media_type="text/plain")

    @app.get("/health", response_model=None)
    @app.get("/healthz", response_model=None)
    async def healthz(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        health = {**deps.health(), "private_near_misses": deps.privacy.near_misses}
        well = {"status": health["status"]}
        try:
            who = keys.caller(bearer(request.headers), _address(request.scope))
        except RequestError:
            return JSONResponse(well)  # a probe without a key learns whether all is well
        if not who.admin:
            # Errors may quote addresses and paths, and all other figures are of everybody.
            return JSONResponse(well | {"user": who.name} | limits.figures(who.name))
        return JSONResponse(dict(health))

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        if not keys.caller(bearer(request.headers), _address(request.scope)).admin:
            raise RequestError(
                "These are the figures of all users: they are for admins. /healthz shows yours.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )
        return Response(deps.telemetry.exposition(), media_type="text/plain; version=0.0.4")

    _ = (what, healthz, metrics)  # reached through the router


@dataclass(frozen=True, slots=True)
class _Call:
    """A request to a route of a format."""

    scope: Scope
    receive: Receive
    headers: Mapping[str, str]
    """Names in lower case; of those that were sent twice, the first."""
    wire: Format
    route: Route


def _address(scope: Scope) -> str:
    """Where a request comes from; behind a proxy that is the proxy."""
    client = scope.get("client")
    return client[0] if client else ""


class _Endpoint:
    """The ASGI application of one route."""

    def __init__(
        self,
        serve: Callable[[_Call], Awaitable[Response]],
        route: Route,
        formats: Sequence[Format],
    ) -> None:
        """`formats`: those that have the route."""
        self._serve = serve
        self._route = route
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = reversed(scope["headers"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent}
        wire = self._formats[0]
        if len(self._formats) > 1:
            wire = errors.speaker(self._formats, scope["path"], headers)
        try:
            answer = await self._serve(_Call(scope, receive, headers, wire, self._route))
        except ClawError as error:
            answer = errors.answer(wire, error)
        await answer(scope, receive, send)
