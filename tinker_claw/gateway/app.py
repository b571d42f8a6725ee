"""Routes, and the path of a turn through them.

A turn: `_principal` authenticates the client; `Limits.admission` holds a place for it until its
answer is complete; `read_body` reads the body; `admit` (request.py) parses it, ties it to the turn
before and renders its prompt. A `ReplyResponse` (respond.py) runs a `Generation` (generation.py):
it waits for a slot, gets the tokens from a `Sampling` (sampling.py) and writes the turn to the
ledger.

Rule: no body is read before its sender is authenticated, is known to be no web page, and has a
place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from tinker_claw.conversation.classify import is_episode
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import Route, WireFormat
from tinker_claw.gateway import errors, feedback
from tinker_claw.gateway.auth import Principal
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.limits import MAX_QUEUE, Limits, read_body
from tinker_claw.gateway.request import admit, count, version_named
from tinker_claw.gateway.respond import StreamedAnswer, WholeAnswer
from tinker_claw.gateway.wires import Wires
from tinker_claw.origin import is_loopback, refuse_forms, refuse_pages


def create_app(
    deps: GatewayDeps, formats: Sequence[WireFormat], healthz: Callable[[], Mapping[str, Any]]
) -> FastAPI:
    """The gateway as an ASGI application.

    Args:
        formats: those served; a request that none claims is answered in the first one's shape.
        healthz: returns the body of /healthz.
    """
    app = FastAPI(title="tinker-claw", openapi_url=None, redirect_slashes=False)
    errors.install(app, formats)
    app.router.routes.extend(_Endpoints(deps, formats, healthz).routes())
    paths = (route.path for wire in formats for route in wire.routes)
    app.add_middleware(Wires, paths=[*paths], origins=deps.settings.origins)
    return app


class _Endpoints:
    """Endpoints of the gateway's routes."""

    def __init__(
        self,
        deps: GatewayDeps,
        formats: Sequence[WireFormat],
        healthz: Callable[[], Mapping[str, Any]],
    ) -> None:
        cfg = deps.settings
        self._deps = deps
        self._formats = formats
        self._formats_by_route = {
            route: [wire for wire in formats if route in wire.routes]
            for wire in formats
            for route in wire.routes
        }
        self._healthz = healthz
        self._keys = deps.keys
        self._limits = Limits(self._keys.users, cfg.max_concurrent, MAX_QUEUE)
        self._local = is_loopback(cfg.host) and not self._keys.needed
        self._since = int(time.time())

    def routes(self) -> Iterator[HttpRoute]:
        """Yield all routes, those of the formats first."""
        # Not FastAPI's own routes, which resolve parameters on every request.
        for route in self._formats_by_route:
            turn = route.purpose in ("turn", "count")
            endpoint = partial(self._turn if turn else self._models, route)
            yield HttpRoute(route.path, endpoint, methods=[route.method])
        yield HttpRoute(feedback.PATH, self._feedback, methods=["POST"])
        yield HttpRoute("/", self._what)
        yield HttpRoute("/health", self._health)
        yield HttpRoute("/healthz", self._health)
        yield HttpRoute("/metrics", self._metrics)

    async def _turn(self, route: Route, request: Request) -> Response:
        deps, headers, wire = self._deps, request.headers, self._speaker(route, request)
        who = self._principal(request, wire)
        refuse_forms(headers, *wire.body_types)
        if route.purpose == "turn" and (spent := deps.spending.refused()) is not None:
            status = HTTPStatus.PAYMENT_REQUIRED
            raise RequestError(spent, status=status, code="insufficient_quota")
        with ExitStack() as held:
            place = self._limits.admission(who.name, who.cache_salt, episode=is_episode(headers))
            caller = held.enter_context(place)
            body = await read_body(request, caller=caller)
            if route.purpose == "count":
                return JSONResponse(wire.counted(await count(deps, wire, route, body, caller)))
            job = await admit(deps, wire, route, body, headers, caller)
            answer = StreamedAnswer if job.request.stream else WholeAnswer
            return answer(deps, wire, job, held.pop_all())

    async def _models(self, route: Route, request: Request) -> Response:
        wire, served = self._speaker(route, request), self._deps.served_name
        self._principal(request, wire)
        if route.purpose == "models":
            names = [served, *self._deps.settings.aliases(served)]
            return JSONResponse(wire.models(names, self._since))
        name = request.path_params["name"]
        if name != served:  # a folder's name may end in a slash
            name = name.rstrip("/")
        version_named(self._deps, name)
        return JSONResponse(wire.model(name, self._since))

    async def _feedback(self, request: Request) -> Response:
        """Record a user's explicit feedback."""
        who = self._principal(request)
        refuse_forms(request.headers)
        with self._limits.admission(who.name, who.cache_salt) as caller:
            body = await read_body(request, feedback.MAX_BYTES, caller)
            return JSONResponse(await feedback.take(self._deps, body, request.headers, caller))

    async def _what(self, request: Request) -> Response:
        refuse_pages(request.headers, local=self._local)
        text = f"{errors.what(self._formats)} Its status: /health.\n"
        return Response(text, media_type="text/plain")

    async def _health(self, request: Request) -> Response:
        refuse_pages(request.headers, local=self._local)
        health = self._healthz()
        well = {"status": health["status"]}
        try:
            who = self._principal(request)
        except RequestError:
            return JSONResponse(well)  # a probe without a key sees the status only
        if not who.admin:
            # Errors may quote addresses and paths, and all other figures cover all users.
            return JSONResponse(well | {"user": who.name} | self._limits.figures(who.name))
        return JSONResponse(health)

    async def _metrics(self, request: Request) -> Response:
        if not self._principal(request).admin:
            raise RequestError(
                "These are the figures of all users: they are for admins. /healthz shows yours.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )
        figures = self._deps.telemetry.exposition()
        return Response(figures, media_type="text/plain; version=0.0.4")

    def _speaker(self, route: Route, request: Request) -> WireFormat:
        """Return the client's format, among those that have the route; errors are written in it."""
        formats = self._formats_by_route[route]
        wire = errors.speaker(formats, request.url.path, request.headers)
        request.scope["wire"] = wire
        return wire

    def _principal(self, request: Request, wire: WireFormat | None = None) -> Principal:
        """Return the user who sends a request.

        Raises:
            RequestError: a web page sent it, or the key is missing or wrong.
        """
        headers, client = request.headers, request.client
        # Without a key, a named origin would identify no user.
        allowed = self._deps.settings.origins if wire is not None and self._keys.needed else ()
        refuse_pages(headers, local=self._local, allowed=allowed)
        here = client is not None and is_loopback(client.host) and "x-forwarded-for" not in headers
        wire = wire or self._formats[0]
        return self._keys.principal(*wire.keys(headers), place=wire.key_header, local=here)
