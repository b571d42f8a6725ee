"""Explain a failure of the service in one sentence, and say whether waiting helps.

Rule: an error that says nothing about the request itself (no answer, no credit, too many requests,
a session that is gone) is an `OutageError`; the caller waits. Everything else is about the request,
and keeps the service's own words. The SDK retries for minutes before it reports a cause, so the
service gets one plain request beside it, which costs nothing and is answered within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from http import HTTPStatus

import httpx
import tinker
from tinker.types import RequestErrorCategory

from tinker_claw.errors import BackendError, OutageError

DEFAULT_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
_LOST = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.GONE)
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

BILLING = (
    "it says that billing is not in order (HTTP 402): look at the account's balance and payment "
    "method in the Tinker console"
)
_PATIENCE_S = 10.0
"""Timeout of asking the service whether it answers."""


class Fault(Enum):
    """Kind of a failure, which decides what to do."""

    AWAY = "away"
    """The service does not answer, or refuses for a time."""
    LOST = "lost"
    """The service does not know our session, model or request any more: begin a new session."""
    ASKED = "asked"
    """The service refuses what was asked."""
    BROKE = "broke"
    """The service failed on what was asked, and does not say that the request was wrong.

    The sender of a batch cannot tell a passing failure from a batch that breaks the service; for
    a request without a batch (save, publish, load) it can only be the former.
    """


class Deadline(Exception):
    """Our own deadline has passed."""


def fault_of(error: BaseException) -> Fault:
    """Sort a failure of the SDK."""
    for cause in _causes(error):
        if isinstance(cause, Deadline | tinker.APIConnectionError):
            return Fault.AWAY
        if isinstance(cause, tinker.APIStatusError):
            return _fault_of_status(cause.status_code)
        if isinstance(cause, tinker.RequestFailedError):
            user = cause.category is RequestErrorCategory.User
            return Fault.ASKED if user else Fault.BROKE
        if isinstance(cause, tinker.APIError):  # an answer that the SDK cannot read
            return Fault.BROKE
        if isinstance(cause, tinker.TinkerError):  # of its credentials: expired or missing
            return Fault.AWAY
    if isinstance(error, ValueError | TypeError | AssertionError):
        return Fault.ASKED
    # A closed or poisoned client (RuntimeError), a promise that the service has dropped.
    return Fault.LOST


def _fault_of_status(status: int) -> Fault:
    if status in _LOST:
        return Fault.LOST
    away = status in (*_BUSY, *_REFUSED, HTTPStatus.PAYMENT_REQUIRED)
    return Fault.AWAY if away or status >= HTTPStatus.INTERNAL_SERVER_ERROR else Fault.ASKED


def reason(error: BaseException) -> str:
    """The part of a sentence that follows "because"; never a user's words beyond the service's."""
    for cause in _causes(error):
        if isinstance(cause, Deadline):
            return str(cause)
        if isinstance(cause, tinker.RequestFailedError):
            # The SDK appends its own ids and types to the service's words.
            message = str(cause).removeprefix("Request failed: ")
            return message.split(" for self.request_id=", 1)[0].rstrip(".")
        if isinstance(cause, tinker.APIStatusError):
            return about_status(cause.status_code, cause.body)
        if isinstance(cause, tinker.APIConnectionError):
            return "it cannot be reached"
    return str(error).rstrip(".") or type(error).__name__


def about_status(status: int, body: object = None) -> str:
    """An HTTP status as a part of a sentence."""
    if status == HTTPStatus.PAYMENT_REQUIRED:
        return BILLING
    if status in _REFUSED:
        return f"it refuses the key (HTTP {status}): check TINKER_API_KEY"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "it limits the rate of requests (HTTP 429)"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"it answers HTTP {status}"
    message = _message_of(body)
    return f"it answers HTTP {status}" + (f": {message}" if message else "")


def _message_of(body: object) -> str:
    """The service's own words in an error body, shortened."""
    if isinstance(body, dict):
        words: object = body.get("detail") or body.get("error") or body.get("message")  # pyright: ignore[reportUnknownMemberType]
        return str(words)[:300].rstrip(".") if isinstance(words, str) else ""
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from: the SDK wraps an HTTP status into a ValueError."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


class Unreachable(Exception):
    """Raised where the service did not answer; the text is a part of a sentence."""


async def ask_what_it_has(base_url: str, key: str | None) -> httpx.Response:
    """The answer to get_server_capabilities, whatever its status.

    Raises:
        Unreachable: there was none.
    """
    headers = {"X-API-Key": key} if key else {}
    try:
        async with httpx.AsyncClient(timeout=_PATIENCE_S, headers=headers) as client:
            return await client.get(f"{base_url}/api/v1/get_server_capabilities")
    except httpx.ConnectError as error:
        raise Unreachable(f"{base_url} cannot be reached") from error
    except httpx.TimeoutException as error:
        raise Unreachable(f"{base_url} does not answer at all") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{base_url} cannot be asked ({type(error).__name__})") from error


async def unwell(base_url: str, key: str | None, *, late: bool) -> str | None:
    """Return why the service answers no requests now, as a part of a sentence; None: it does.

    `late`: our own deadline has passed, so a refusal counts as well. Before, it does not mean that
    nothing will come: the SDK may have another key than this plain request, and a client that is
    rate-limited is being served.
    """
    try:
        answer = await ask_what_it_has(base_url, key)
    except Unreachable as error:
        return f"{error}; check the network and the address"
    if answer.status_code in _REFUSED and key is None:
        return None
    if answer.status_code in (*_REFUSED, *_BUSY) and not late:
        return None
    if _fault_of_status(answer.status_code) is Fault.AWAY:
        return about_status(answer.status_code)
    return None


def lost_at_the_service(error: BaseException) -> bool:
    """Return whether the service itself said that it does not know our session, model or
    request."""
    return any(
        isinstance(cause, tinker.APIStatusError) and cause.status_code in _LOST
        for cause in _causes(error)
    )


def outage(what: str, why: str) -> OutageError:
    return OutageError(f"Tinker: {what} failed, because {why}.")


@contextmanager
def failing(what: str, *, lost: bool = False) -> Generator[None]:
    """Raise what fails inside as an error of ours.

    Args:
        lost: what the service does not know any more stays lost; else waiting helps.

    Raises:
        OutageError: waiting helps.
        BackendError: it does not.
    """
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if fault_of(error) is Fault.ASKED or (lost and fault_of(error) is Fault.LOST):
            raise BackendError(f"Tinker: {what} failed: {reason(error)}.") from error
        raise outage(what, reason(error)) from error


class Notices(logging.Handler):
    """Handler that finds in the SDK's log what it does not raise: a pause for billing.

    On HTTP 402 the SDK sleeps and retries for up to an hour, and reports it in its log only.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.billing = 0
        """How often a pause for billing was announced."""

    def emit(self, record: logging.LogRecord) -> None:
        if "billing" in record.getMessage():
            self.billing += 1


def _abandoned(record: logging.LogRecord) -> bool:
    """Filter out the error of a poll whose session was closed.

    The SDK's polls survive being cancelled, and fail when we close their session.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and "client holder is closed" in str(error))


logging.getLogger("asyncio").addFilter(_abandoned)
NOTICES = Notices()
_SDK_LOG = logging.getLogger("tinker")
_SDK_LOG.addHandler(NOTICES)
# Its lines are about single requests, and repeat; what matters is raised, or is a notice.
_SDK_LOG.propagate = False
