"""What a server on this machine answers to whoever started it: no event loop, and a time limit.

Rule: an answer is told apart from none, and nothing is said about why there is none.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Any, Final

HOST: Final = "127.0.0.1"
_LOOK_S: Final = 5.0
"""For what a server says of itself."""


def ask_health(port: int) -> int | None:
    """The HTTP status; None where nobody answers."""
    return _status(port, "GET", "/health", None, _LOOK_S)


def hangs(port: int, model: str, within_s: float) -> bool:
    """Whether it takes so long over one token, and its engine does nothing else meanwhile.

    It does not hang while nobody listens: it has ended, or is starting.
    """
    began, before = time.monotonic(), _progress(port)
    status = ask_for_one_token(port, model, within_s)
    in_time = time.monotonic() - began < within_s
    return status is None and not in_time and _progress(port) in (None, before)


def _progress(port: int) -> list[bytes] | None:
    """What changes with each step of its engine. None: there is no answer."""
    answer = _answer(port, "GET", "/metrics", None, _LOOK_S)
    lines = answer[1].splitlines() if answer else None
    return None if lines is None else [line for line in lines if line.startswith(b"vllm:")]


def ask_for_one_token(port: int, model: str, within_s: float) -> int | None:
    body = {"model": model, "prompt": [0], "max_tokens": 1, "logprobs": 1}
    return _status(port, "POST", "/v1/completions", body, within_s)


def _status(port: int, method: str, path: str, body: Any, within_s: float) -> int | None:
    """The HTTP status of a request; None where nobody answers."""
    answer = _answer(port, method, path, body, within_s)
    return answer[0] if answer else None


def _answer(
    port: int, method: str, path: str, body: Any, within_s: float
) -> tuple[int, bytes] | None:
    """Status and body of an answer; None where there is none."""
    connection = http.client.HTTPConnection(HOST, port, timeout=within_s)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
