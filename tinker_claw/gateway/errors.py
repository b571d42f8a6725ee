"""What a client is told of an error, in the shape of its own format.

Rule: a client learns what it can do about an error, and nothing of our insides; the log has those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tinker_claw.errors import BackendError, ClawError, LedgerError, OutageError, RequestError
from tinker_claw.formats.base import Format
from tinker_claw.formats.body import shown
from tinker_claw.telemetry import log

RETRY_AFTER_S = 30
"""For clients that wait as they are told: the request was tried again here for long enough."""
_PASSING: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Refusals after which the same request may be served."""


def told(error: ClawError) -> RequestError:
    """What a client is told of it."""
    if isinstance(error, RequestError):
        return error
    log.error("gateway.failed", kind=type(error).__name__, error=str(error))
    if isinstance(error, OutageError):
        return _away("The service that runs the model is away; try again in a few minutes.")
    if isinstance(error, BackendError):
        return _away("The model cannot answer at the moment; try again.")
    if isinstance(error, LedgerError):
        return _away(
            "The gateway cannot write its records, so it gives no answer that would be lost; its "
            "disk may be full. Try again when there is room."
        )
    return _internal()


def _away(message: str) -> RequestError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return RequestError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers)


def _internal() -> RequestError:
    message = "The server failed; its log says why."
    return RequestError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


def answer(wire: Format, error: ClawError) -> JSONResponse:
    """The whole answer for an error."""
    problem = told(error)
    headers = dict(problem.headers or {})
    if problem.status < HTTPStatus.INTERNAL_SERVER_ERROR and problem.status not in _PASSING:
        headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic go by it
    return JSONResponse(wire.error(problem), problem.status, headers=headers)


def what(formats: Sequence[Format]) -> str:
    """What this server is, for those who call an address that it does not have."""
    spoken = "; ".join(wire.about for wire in formats)
    return (
        f"This is tinker-claw, which speaks {spoken}; "
        "`tinker-claw openclaw-config` prints what belongs into OpenClaw's."
    )


def speaker(formats: Sequence[Format], path: str, headers: Mapping[str, str]) -> Format:
    """Whose client sends this; the first format's, where no other one claims it."""
    claiming = (wire for wire in reversed(formats) if wire.claims(path, headers))
    return next(claiming, formats[0])


def install(app: FastAPI, formats: Sequence[Format]) -> None:
    """Answer every failure of `app` in the shape that its client reads."""

    def answered(request: Request, error: ClawError) -> Response:
        claimed = speaker(formats, request.url.path, request.headers)
        return answer(request.scope.get("wire", claimed), error)

    async def claw_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClawError)
        return answered(request, error)

    async def http_error(request: Request, error: Exception) -> Response:
        """Unknown paths and methods."""
        assert isinstance(error, HTTPException)
        status, path = HTTPStatus(error.status_code), request.url.path
        message = f"{status.phrase}: {request.method} {shown(path)}. {what(formats)}"
        claimed = any(wire.claims(path, request.headers) for wire in formats)
        if status is HTTPStatus.NOT_FOUND and request.method == "POST" and not claimed:
            # A format that is not spoken. To OpenClaw a 404 says that the model is unknown,
            # whatever stands in it.
            status = HTTPStatus.BAD_REQUEST
        code = "unknown_url"
        return answered(
            request, RequestError(message, status=status, code=code, headers=error.headers)
        )

    async def unexpected(request: Request, error: Exception) -> Response:
        return answered(request, _internal())

    app.add_exception_handler(ClawError, claw_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
