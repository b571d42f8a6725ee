"""A judge over real HTTP that misbehaves in one way for a turn that asks for it, and else answers.

Rule: what it does is bytes on a connection; nothing of the product is changed for it.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.support.fakes import rated

MARK = "SPOIL"
"""Prefix, in a user's message, of the name of a way to misbehave."""
_BOMB_BYTES = 100_000_000


def _http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", "Connection: close", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _said(*contents: Any) -> bytes:
    choices = [{"index": i, "message": {"content": c}} for i, c in enumerate(contents)]
    return json.dumps({"choices": choices}).encode()


def _vote(text: str = "") -> bytes:
    return _said(*[rated(1, text)] * 3)


def _bomb() -> bytes:
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1_000_000)
    pieces = [packing.compress(zeros) for _ in range(_BOMB_BYTES // len(zeros))]
    return b"".join([*pieces, packing.flush()])


_SURROGATE = _said(*[rated(1, "CUT").replace("CUT", "\ud83d")] * 3)
"""JSON with surrogate escapes, as a server writes an answer that was cut within an emoji."""
_HINT = rated(1, "good", "do it otherwise " * 10_000)

UNREAD: dict[str, Callable[[], bytes]] = {
    "bad gzip": lambda: _http(b"no gzip at all", "Content-Encoding: gzip"),
    "cut gzip": lambda: _http(gzip.compress(_vote())[:20], "Content-Encoding: gzip"),
    "gzip bomb": lambda: _http(_bomb(), "Content-Encoding: gzip"),
    "packed twice": lambda: _http(_vote(), "Content-Encoding: gzip, gzip"),
    "brackets": lambda: _http(b"[" * 100_000 + b"]" * 100_000),
    "brackets inside": lambda: _http(
        b'{"choices": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"
    ),
    "long": lambda: _http(_vote("x" * 3_000_000)),
    "invalid UTF-8": lambda: _http(_vote("NAME").replace(b"NAME", b"\xff\xfe\x80")),
    "no JSON": lambda: _http(b"<html>busy</html>"),
    "nothing": lambda: _http(b""),
    "no content": lambda: _http(b"", status="204 No Content"),
    "not a number": lambda: _http(b"NaN"),
    "a number": lambda: _http(b"17"),
    "a long number": lambda: _http(b'{"choices": ' + b"9" * 5000 + b"}"),
    "a list": lambda: _http(b"[]"),
    "an error": lambda: _http(b'{"error": {"message": "busy"}}'),
    "no choices": lambda: _http(_said()),
    "choices as text": lambda: _http(b'{"choices": "1"}'),
    "choices as object": lambda: _http(b'{"choices": {"0": {"message": {"content": "1"}}}}'),
    "choice null": lambda: _http(b'{"choices": [null, null, null]}'),
    "message null": lambda: _http(b'{"choices": [{"message": null}]}'),
    "message as text": lambda: _http(b'{"choices": [{"message": "1"}]}'),
    "content as number": lambda: _http(_said(1, 1, 1)),
    "content as object": lambda: _http(_said({"text": rated(1)})),
    "content as list": lambda: _http(_said([{"type": "text", "text": rated(1)}])),
    "content not a number": lambda: _http(_said(float("nan"), True, False)),
    "content null": lambda: _http(_said(None, None, None)),
    "refusal": lambda: _http(_said(*["I'm sorry, I cannot help with that."] * 3)),
    "redirect": lambda: _http(
        b"", "Location: /v1/chat/completions", status="307 Temporary Redirect"
    ),
    "refused": lambda: _http(b'{"error": "content filter"}', status="400 Bad Request"),
    "long header": lambda: _http(_vote(), "X-Long: " + "x" * 1_000_000),
    "no HTTP": lambda: rated(1).encode() + b"\r\n\r\n",
    "hangs up": lambda: b"",
    "short body": lambda: _http(_vote())[:-30],
}
"""Answers without a readable verdict, by name."""

READ: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: _http(gzip.compress(_vote()), "Content-Encoding: gzip"),
    "deflate": lambda: _http(zlib.compress(_vote()), "Content-Encoding: deflate"),
    "half a surrogate pair": lambda: _http(_SURROGATE),
    "NUL": lambda: _http(_vote("a\0b ")),
    "fewer": lambda: _http(_said(rated(1))),
    "more": lambda: _http(_said(*[rated(1)] * 7)),
    "one null of three": lambda: _http(_said(None, rated(1), rated(1))),
    "a hint without end": lambda: _http(_said(_HINT, _HINT, rated(1))),
}
"""Odd answers that still hold a verdict, by name."""

AWAY = {"away": lambda: _http(b"", status="503 Service Unavailable")}
SLOW = "a byte now and then"
"""Way to misbehave: an answer that never ends."""
ENDLESS = "without end"
"""Way to misbehave: an endless answer, sent as fast as possible."""


@dataclass
class BadJudge:
    """A running judge server."""

    url: str
    asked: Counter[str] = field(default_factory=Counter)
    """Number of requests by way to misbehave; "" counts good answers."""
    spoilt: str | None = None
    """Way to misbehave on every request; None: only where asked."""
    vote: Callable[[str], str] = lambda case: rated(-1 if "NO" in case else 1)
    """Returns a good answer about a case."""


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        judge: BadJudge = self.server.judge  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        case = body["messages"][-1]["content"]
        how = judge.spoilt or (case.split(MARK + " ")[1].split("\n")[0] if MARK in case else "")
        judge.asked[how] += 1
        spoil = (UNREAD | READ | AWAY).get(how)
        with suppress(ConnectionError):  # it has read enough
            if how in (SLOW, ENDLESS):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
                while True:
                    self.wfile.write(b" " * (1 if how == SLOW else 65_536))
                    time.sleep(0.02 if how == SLOW else 0)
            votes = [judge.vote(case)] * body["n"]
            self.wfile.write(spoil() if spoil else _http(_said(*votes)))

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def bad_judge_beside() -> Generator[BadJudge]:
    """Run a bad judge while the context lasts."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        judge = BadJudge(f"http://127.0.0.1:{server.server_port}/v1")
        server.judge = judge  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        yield judge
        server.shutdown()


@asynccontextmanager
async def bad_judge() -> AsyncGenerator[BadJudge]:
    """Run one, among contexts of which some are asynchronous."""
    with bad_judge_beside() as judge:
        yield judge
