"""Errors in OpenAI's shape.

Rule: a client learns what it can do about an error, and nothing of our insides; the log has those.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tinker_claw.errors import BackendError, ClawError, LedgerError, OutageError, RequestError
from tinker_claw.formats.body import shown
from tinker_claw.formats.chat_reply import error_body
from tinker_claw.telemetry import log

WHAT = (
    "This is tinker-claw, which speaks OpenAI's chat completions: POST /v1/chat/completions. In "
    'OpenClaw set api to "openai-completions" and baseUrl to this address with /v1 at its end; '
    "`python run.py openclaw-config` prints what belongs there."
)
RETRY_AFTER_S = 30
"""For clients that wait as they are told: the request was tried again here for long enough."""


def answer(error: ClawError) -> JSONResponse:
    """The whole answer for an error of ours."""
    status, body = describe(error)
    headers = error.headers if isinstance(error, RequestError) else None
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"retry-after": str(RETRY_AFTER_S)}
    return JSONResponse(body, status, headers=headers)


def describe(error: ClawError) -> tuple[HTTPStatus, dict[str, Any]]:
    """Status and body for an error of ours."""
    if isinstance(error, RequestError):
        body = error_body(str(error), error.status, code=error.code, param=error.param)
        return error.status, body
    log.error("gateway.failed", kind=type(error).__name__, error=str(error))
    if isinstance(error, BackendError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
        told = "The model cannot answer at the moment; try again."
        if isinstance(error, OutageError):
            told = "The service that runs the model is away; try again in a few minutes."
        return status, error_body(told, status)
    if isinstance(error, LedgerError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
        told = (
            "The gateway cannot write its records, so it gives no answer that would be lost; its "
            "disk may be full. Try again when there is room."
        )
        return status, error_body(told, status)
    return _internal()


def _internal() -> tuple[HTTPStatus, dict[str, Any]]:
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return status, error_body("The server failed; its log says why.", status)


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in OpenAI's shape."""
    app.add_exception_handler(ClawError, _claw_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _claw_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClawError)
    return answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{status.phrase}: {request.method} {shown(request.url.path)}. {WHAT}"
    if status is HTTPStatus.NOT_FOUND and request.method == "POST":
        # Another format. To OpenClaw a 404 says that the model is unknown, whatever stands in it.
        status = HTTPStatus.BAD_REQUEST
    body = error_body(message, status, code="unknown_url")
    return JSONResponse(body, status, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    status, body = _internal()
    return JSONResponse(body, status)
