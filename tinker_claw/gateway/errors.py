"""Error responses, in the shape of the client's own format.

Rule: a client is told what it can do about an error, and no internals; the log has those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tinker_claw.errors import BackendError, ClawError, LedgerError, OutageError, RequestError
from tinker_claw.formats.base import WireFormat
from tinker_claw.formats.body import shorten_name
from tinker_claw.telemetry import log, place

RETRY_AFTER_S = 30
"""Retry-After where the gateway cannot answer now: the request was already retried here."""
_PASSING: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Statuses after which a retry may succeed."""
_AWAY: Final = {
    OutageError: "The service that runs the model is away; try again in a few minutes.",
    BackendError: "The model cannot answer at the moment; try again.",
    LedgerError: "The gateway cannot write its records, so it gives no answer that would be lost; "
    "its disk may be full, or its data folder gone: /healthz says which.",
}


def as_request_error(error: Exception) -> RequestError:
    """Convert an exception into the error that the client receives."""
    if isinstance(error, RequestError):
        return error
    # What is not ours may quote a user's words.
    detail = str(error) if isinstance(error, ClawError) else place(error)
    log.error("gateway.failed", kind=type(error).__name__, error=detail)
    for kind, message in _AWAY.items():
        if isinstance(error, kind):
            headers = {"retry-after": str(RETRY_AFTER_S)}
            return RequestError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers)
    message = "The server failed; its log says why."
    return RequestError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


def answer(wire: WireFormat, error: Exception) -> JSONResponse:
    """The whole answer for an error."""
    problem = as_request_error(error)
    headers = dict(problem.headers or {})
    if problem.status < HTTPStatus.INTERNAL_SERVER_ERROR and problem.status not in _PASSING:
        headers["x-should-retry"] = "false"  # the SDKs of OpenAI and Anthropic read it
    return JSONResponse(wire.error(problem), problem.status, headers=headers)


def what(formats: Sequence[WireFormat]) -> str:
    """Describe this server to callers of an unknown path."""
    spoken = "; ".join(wire.about for wire in formats)
    return (
        f"This is tinker-claw, which speaks {spoken}; "
        "`tinker-claw openclaw-config` prints what belongs into OpenClaw's."
    )


def speaker(formats: Sequence[WireFormat], path: str, headers: Mapping[str, str]) -> WireFormat:
    """Return the format of the client; the first one where no format claims the request."""
    for wire in reversed(formats[1:]):
        if wire.claims(path, headers):
            return wire
    return formats[0]


def install(app: FastAPI, formats: Sequence[WireFormat]) -> None:
    """Answer every failure of `app` in the shape that its client reads."""

    async def failed(request: Request, error: Exception) -> Response:
        path, headers = request.url.path, request.headers
        wire = request.scope.get("wire", speaker(formats, path, headers))
        if isinstance(error, HTTPException):  # unknown paths and methods
            status = HTTPStatus(error.status_code)
            message = f"{status.phrase}: {request.method} {shorten_name(path)}. {what(formats)}"
            error = RequestError(message, status=status, code="unknown_url", headers=error.headers)
        return answer(wire, error)

    for kind in (ClawError, HTTPException, Exception):
        app.add_exception_handler(kind, failed)
