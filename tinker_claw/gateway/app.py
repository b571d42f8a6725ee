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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import Format, Purpose, Route, bearer
from tinker_claw.gateway import errors
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.limits import Limits, read_body
from tinker_claw.gateway.request import GatewayDeps, admit, count, not_served
from tinker_claw.gateway.respond import StreamedAnswer, WholeAnswer
from tinker_claw.origin import is_loopback, refuse_forms, refuse_pages

_Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(deps: GatewayDeps, formats: Sequence[Format]) -> FastAPI:
    """The gateway as an ASGI application.

    Args:
        formats: what is spoken; whatever no format claims is answered in the first one's shape.
    """
    app = FastAPI(title="tinker-claw", openapi_url=None, redirect_slashes=False)
    cfg = deps.settings
    keys = Keys(cfg.api_key, deps.users)
    limits = Limits(keys.users, cfg.max_concurrent, cfg.max_queue)
    local = is_loopback(cfg.host) and not keys.needed
    since = int(time.time())
    errors.install(app, formats)

    async def turn(request: Request, wire: Format, route: Route) -> Response:
        refuse_pages(request.headers, local=local)
        who = keys.principal(wire.key(request.headers), wire.key_place)
        refuse_forms(request.headers)
        with ExitStack() as held:
            caller = held.enter_context(limits.place(who.name, who.cache_salt))
            try:
                body = await read_body(
                    request,
                    most=cfg.max_body_bytes,
                    limit_s=cfg.body_timeout_s,
                    context_tokens=deps.context_tokens,
                )
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
            if route.purpose is Purpose.COUNT:
                return JSONResponse(wire.counted(await count(deps, wire, route, body, caller)))
            job = await admit(deps, wire, route, body, request.headers, caller)
            answer = StreamedAnswer if job.request.stream else WholeAnswer
            return answer(deps, wire, job, held.pop_all())

    async def models(request: Request, wire: Format, route: Route) -> Response:
        refuse_pages(request.headers, local=local)
        keys.principal(wire.key(request.headers), wire.key_place)
        if route.purpose is Purpose.MODELS:
            return JSONResponse(wire.models([deps.served_name], since))
        name = request.path_params["name"]
        if name != deps.served_name:
            raise not_served(deps, name)
        return JSONResponse(wire.model(name, since))

    def endpoint(route: Route) -> _Endpoint:
        speaking = [
            wire
            for wire in formats
            if any((r.method, r.path) == (route.method, route.path) for r in wire.routes)
        ]
        serve = turn if route.purpose in (Purpose.TURN, Purpose.COUNT) else models

        async def spoken(request: Request) -> Response:
            wire = speaking[0]
            if len(speaking) > 1:
                wire = errors.speaker(speaking, request.url.path, request.headers)
            return await serve(request, wire, route)

        return spoken

    for route in {(r.method, r.path): r for wire in formats for r in wire.routes}.values():
        if route.method == "GET":
            app.add_api_route(route.path, endpoint(route), response_model=None)
        else:
            # FastAPI's own way would look for parameters to fill in, with every request.
            app.add_route(route.path, endpoint(route), methods=[route.method])

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
            who = keys.principal(bearer(request.headers))
        except RequestError:
            return JSONResponse(well)  # a probe without a key learns whether all is well
        if not who.admin:
            # Errors may quote addresses and paths, and all other figures are of everybody.
            return JSONResponse(well | {"user": who.name} | limits.figures(who.name))
        return JSONResponse(dict(health))

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        refuse_pages(request.headers, local=local)
        if not keys.principal(bearer(request.headers)).admin:
            raise RequestError(
                "These are the figures of all users: they are for admins. /healthz shows yours.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )
        return Response(deps.metrics(), media_type="text/plain; version=0.0.4")

    _ = (what, healthz, metrics)  # reached through the router
    return app
