"""Admin routes: the gateway carries out orders of commands (orders.py).

Rule: they take the token of `control.json` alone, which only the user who runs the gateway can
read: no API key, no origin. Without the token they are not there.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tinker_claw.app.orders import CONTROL_FILE, ENDED, ROOT, proof
from tinker_claw.errors import ClawError, RequestError, UndoError
from tinker_claw.files import write_private
from tinker_claw.gateway.limits import read_body
from tinker_claw.ledger.prune import from_turn, in_session
from tinker_claw.origin import refuse_pages

if TYPE_CHECKING:
    from tinker_claw.learner.rollback import RollbackOperations

_MOST_BYTES = 65_536


class Orders:
    """Carry out what commands ask of a running gateway."""

    def __init__(
        self, undoing: RollbackOperations, health: Callable[[], Mapping[str, Any]], *, local: bool
    ) -> None:
        """`local`: whether the gateway is bound to loopback and needs no key."""
        self._undoing = undoing
        self._health = health
        self._local = local
        self._token = token_urlsafe(32)
        self._running = set[asyncio.Task[Any]]()
        self._ended = False

    def routes(self) -> list[Route]:
        """Return the routes for the gateway's application."""
        return [
            Route(f"{ROOT}/proof/{{nonce}}", self._prove),
            Route(f"{ROOT}/{{name}}", self._answer, methods=["GET", "POST"]),
        ]

    @asynccontextmanager
    async def announced(self, directory: Path, gateway: tuple[str, int]) -> AsyncGenerator[None]:
        """Accept orders while the context lasts; at its end none is left.

        Args:
            gateway: host and port at which the gateway listens, for the commands.
        """
        file = directory / CONTROL_FILE
        file.unlink(missing_ok=True)  # of a process that was killed, perhaps with other rights
        write_private(file, json.dumps({"gateway": gateway, "token": self._token}))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            self.end()
            # A forget order has a thread on the ledger, which is closed next.
            await asyncio.gather(*self._running, return_exceptions=True)

    def end(self) -> None:
        """Withdraw the orders in hand, and accept no more."""
        self._ended = True
        for task in self._running:
            task.cancel()

    async def _prove(self, request: Request) -> Response:
        """Show a command that this is the gateway of its directory, before it sends the token."""
        refuse_pages(request.headers, local=self._local)
        return PlainTextResponse(proof(self._token, request.path_params["nonce"]))

    async def _answer(self, request: Request) -> Response:
        refuse_pages(request.headers, local=self._local)
        sent = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            raise HTTPException(HTTPStatus.NOT_FOUND)
        name = request.path_params["name"]
        if name == "health":
            return JSONResponse(self._health())
        try:
            order: dict[str, Any] = dict(json.loads(await read_body(request, _MOST_BYTES)))
            return await self._carry_out(name, order, request)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"The order cannot be read: {error!r}.") from error

    async def _carry_out(self, name: str, order: dict[str, Any], request: Request) -> Response:
        """Answer one order. A long one is withdrawn when its sender leaves."""
        doing = asyncio.ensure_future(self._do(name, order))
        self._running.add(doing)
        leaving = asyncio.ensure_future(request.receive())
        try:
            if self._ended:
                doing.cancel()
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done() and not doing.cancelled():
                return JSONResponse({"done": doing.result()})
        except ClawError as error:
            return JSONResponse({"error": str(error)}, HTTPStatus.CONFLICT)
        finally:
            for task in (doing, leaving):
                task.cancel()
            await asyncio.wait({doing, leaving})
            self._running.discard(doing)
        return JSONResponse({"error": ENDED}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _do(self, name: str, order: dict[str, Any]) -> Any:
        undoing = self._undoing
        match name:
            case "pin":
                await undoing.pin(order["version"])
                return order["version"]
            case "unpin":
                return await undoing.unpin()
            case "rollback":
                return asdict(await undoing.roll_back(order["version"]))
            case "accept":
                return await undoing.accept()
            case "forget-turn":
                return asdict(await undoing.forget(from_turn(int(order["turn"]))))
            case "forget-session":
                return asdict(await undoing.forget(in_session(order["session"], order["user"])))
            case "lesson":
                rule = order["rule"], order["user"], order["lesson"], order["text"]
                return undoing.ledger.lessons.rule(*rule)
            case "rejudge":
                return undoing.judge_again(order["turns"])
            case other:
                raise UndoError(f"the gateway that runs does not know how to {other}; restart it")
