"""Servers that speak Tinker's API with deviations: wrappers around the real application.

Rule: only what is said differs, never what is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from tests.support.faults import App, Receive, Scope, Send, _answer, _body, _replay

_OURS = re.compile(r"tinker://[^/]+/((?:sampler_)?weights)/[^/]+")
_IDS = re.compile(r"(.*/checkpoints/)(.+)")
_Change: TypeAlias = Callable[[bytes], bytes]


class OtherPaths:
    """Uses opaque paths and ids for everything but exports.

    Exports keep theirs: the SDK itself downloads no others.
    """

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._own: dict[str, str] = {}

    def __call__(self, app: App) -> App:
        """Wrap the application; wrap that of a restarted server with the same object."""

        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            if found := _IDS.fullmatch(scope["path"]):
                here = found[1] + self._own.get(found[2], found[2])
                scope = scope | {"path": here, "raw_path": here.encode()}
            body = await _body(receive)
            if _is_json(scope["headers"]):
                body = _through(body, self._heard)
            headers = _with_length(scope["headers"], body)
            await app(scope | {"headers": headers}, _replay(body, receive), _Rewriting(send, self))

        return speaking

    def body(self, kind: str, body: bytes) -> bytes:
        return _through(body, self._said) if kind == "application/json" else body

    def _said(self, value: Any) -> Any:
        if isinstance(value, dict):
            said = {key: self._said(inner) for key, inner in value.items()}
            if "checkpoint_id" in value and value["checkpoint_type"] != "external":
                said["checkpoint_id"] = self._id(value["checkpoint_id"])
            return said
        if isinstance(value, list):
            return [self._said(inner) for inner in value]
        if isinstance(value, str) and _OURS.fullmatch(value):
            if value not in self._paths:
                number = len(self._paths)
                self._paths[value] = f"tinker://model_5c33ec6f/v-{number}?w=\u00fc b#..%2F;"
                self._own[self._paths[value]] = value
            return self._paths[value]
        return value

    def _heard(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._heard(inner) for key, inner in value.items()}
        return self._own.get(value, value) if isinstance(value, str) else value

    def _id(self, own: str) -> str:
        said = f"{own.replace('/', '?')} #1"
        self._own[said] = own
        return said


class Flattened:
    """Answers [N, K] targets with one row of N x K logprobs, and gives the loss by token alone, as
    SkyRL 0.4.0 does."""

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, _Rewriting(send, self) if scope["type"] == "http" else send)

        return speaking

    def body(self, kind: str, body: bytes) -> bytes:
        if kind != "application/x-protobuf":
            return body
        message = pb.ForwardBackwardOutput()
        try:
            message.ParseFromString(body)
        except DecodeError:
            return body
        if message.loss_fn_output_type != "ArrayRecord":
            return body  # of a sample
        for record in message.loss_fn_outputs:
            del record.fields["logprobs"].trailing_shape[:]
            record.fields["elementwise_loss"].CopyFrom(record.fields["logprobs"])
        message.metrics.clear()
        return message.SerializeToString()


class Unnumbered:
    """Promises samples without ids, which the SDK from 0.38 on refuses: SkyRL 0.4.0's are so."""

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, _Rewriting(send, self) if scope["type"] == "http" else send)

        return speaking

    def body(self, kind: str, body: bytes) -> bytes:
        return _through(body, _without_ids) if kind == "application/json" else body


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        value.pop("sample_sequence_ids", None)
    return value


class Uncancelling:
    """Offers no cancellation of samples, as services that know no such request."""

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").rsplit("/", 1)[-1]
            if path == "dynamic_config":
                return await _answer(send, 200, {"sample_cancel_enabled": False})
            await app(scope, receive, send)

        return speaking


class Keyed:
    """Answers those who send its key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and dict(scope["headers"]).get(b"x-api-key") != self._key:
                return await _answer(send, 401, {"detail": "the key is wrong"})
            await app(scope, receive, send)

        return speaking


class Delisted:
    """Serves its model until `gone`: then it lists another, and refuses what is asked for."""

    def __init__(self) -> None:
        self.gone = False
        self.refuses: set[str] = set()
        """Of what is gone: `training`, `weights` (to sample what was learned), `base`."""

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not self.gone:
                return await app(scope, receive, send)
            path, body = scope["path"].rsplit("/", 1)[-1], await _body(receive)
            if path == "get_server_capabilities":
                listed = {"model_name": "another", "trainable": True, "sampleable": True}
                return await _answer(send, 200, {"supported_models": [listed]})
            asks = "training" if path in ("create_model", "load_weights") else None
            if path == "create_sampling_session":
                asks = "weights" if json.loads(body).get("model_path") else "base"
            if asks in self.refuses:
                return await _answer(send, 400, {"detail": "the model is not offered any more"})
            await app(scope, _replay(body, receive), send)

        return speaking


class _Rewriting:
    """Sends an answer, once it is whole, with another body."""

    def __init__(self, send: Send, by: OtherPaths | Flattened | Unnumbered) -> None:
        self._send = send
        self._by = by
        self._start: dict[str, Any] = {}
        self._body = b""

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        headers = dict(self._start["headers"])
        kind = headers.get(b"content-type", b"").decode()
        body = self._by.body(kind, self._body)
        start = self._start | {"headers": _with_length(self._start["headers"], body)}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _through(body: bytes, change: Callable[[Any], Any]) -> bytes:
    return json.dumps(change(json.loads(body))).encode() if body else body


def _is_json(headers: list[tuple[bytes, bytes]]) -> bool:
    return dict(headers).get(b"content-type", b"").startswith(b"application/json")


def _with_length(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(len(body)).encode())]


@contextmanager
def answering(answer: Callable[[str], tuple[int, Any]]) -> Iterator[str]:
    """Run a server that answers everything with one status and text: it is no Tinker, or one whose
    account has a problem. Yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, told = answer(self.headers.get("X-API-Key", ""))
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
