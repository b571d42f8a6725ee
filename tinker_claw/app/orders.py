"""Orders of commands to the gateway that runs on their data directory, and its address.

Rule: whoever answers must prove first that it has the token of `control.json`; nobody else is sent
anything. A killed gateway leaves its file, and another process may have its port. No command sends
an API key.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.database import is_locked

ROOT = "/admin"
CONTROL_FILE = "control.json"
ENDED = "the gateway ended before it was done; look with `tinker-claw versions`"
TIMEOUT_S = 5.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Loopback address for each wildcard address that a gateway may listen on."""


def address(directory: Path) -> tuple[str, int] | None:
    """Host and port of the gateway that runs on this directory; None: none takes orders."""
    try:
        return _control(directory)[:2] if is_locked(directory) else None
    except (OSError, ValueError, KeyError, LedgerError):
        return None


def url(host: str, port: int) -> str:
    """URL of a gateway for callers on its own machine, without /v1."""
    host = ANYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def health(directory: Path) -> dict[str, Any] | None:
    """Return the /healthz of the gateway that runs on this directory; None: none runs.

    Raises:
        UndoError: a process has the directory, and does not answer.
        LedgerError: the directory cannot be used.
    """
    if not is_locked(directory):
        return None
    with _proven(directory) as (gateway, token):
        return _send(gateway, "GET", "health", token)


def order(directory: Path, name: str, arguments: Mapping[str, Any]) -> Any:
    """Give an order to the gateway that runs on this directory, and wait until it is done.

    Leaving (Ctrl-C) withdraws an order that has not been carried out yet; forgetting that has
    begun goes on.

    Raises:
        UndoError: the gateway says why it cannot be done, or does not answer.
    """
    with _proven(directory) as (gateway, token):
        gateway.sock.settimeout(None)  # a step in progress may take minutes
        try:
            answer = _send(gateway, "POST", name, token, json.dumps(arguments))
        except (OSError, HTTPException) as error:
            raise UndoError(ENDED) from error
    if "done" not in answer:
        raise UndoError(answer["error"])
    return answer["done"]


def proof(token: str, nonce: str) -> str:
    """Return what shows that a gateway has the token, for a nonce that nobody has used before."""
    return hmac.digest(token.encode(), nonce.encode(), "sha256").hex()


@contextmanager
def _proven(directory: Path) -> Generator[tuple[HTTPConnection, str]]:
    """Yield a connection whose other end has proved that it is this directory's gateway, and the
    token for it.

    Raises:
        UndoError: there is none.
    """
    try:
        host, port, token = _control(directory)
        nonce = token_urlsafe(16)
        gateway = HTTPConnection(ANYWHERE.get(host, host), port, timeout=TIMEOUT_S)
        with closing(gateway):
            gateway.request("GET", f"{ROOT}/proof/{nonce}")
            gateway.auto_open = 0  # another connection would have to prove it anew
            answer = gateway.getresponse().read()
            if not hmac.compare_digest(answer, proof(token, nonce).encode()):
                raise ValueError("what answers is not its gateway")
            yield gateway, token
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise UndoError(
            f"a process has {directory} in use and takes no orders ({error}); it may be starting "
            "or stopping: try again, or stop it first"
        ) from error


def _control(directory: Path) -> tuple[str, int, str]:
    """Return host, port and token that the gateway wrote down."""
    control = json.loads((directory / CONTROL_FILE).read_text())
    host, port = control["gateway"]
    return str(host), int(port), str(control["token"])


def _send(
    gateway: HTTPConnection, method: str, name: str, token: str, body: str | None = None
) -> dict[str, Any]:
    gateway.request(method, f"{ROOT}/{name}", body, {"authorization": f"Bearer {token}"})
    with gateway.getresponse() as answer:
        return json.loads(answer.read())
