"""Servers that speak Tinker's API with deviations: wrappers around the real application.

Rule: only what is said differs, never what is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from tests.support.faults import App, Receive, Scope, Send, answer_with, body_of, replay
from tests.support.ports import serving

_OURS = re.compile(r"tinker://[^/]+/((?:sampler_)?weights)/[^/]+")
_IDS = re.compile(r"(.*/checkpoints/)(.+)")
Headers = Mapping[bytes, bytes]


class Dialect:
    """An application as it is; wrap that of a restarted server with the same object."""

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            body, headers = await body_of(receive), dict(scope["headers"])
            if answer := self.instead(scope["path"].rsplit("/", 1)[-1], headers, body):
                return await answer_with(send, *answer)
            scope, body = self.heard(scope, body)
            headers = _with_length(scope["headers"], body)
            await app(scope | {"headers": headers}, replay(body, receive), _Rewriting(send, self))

        return speaking

    def instead(self, path: str, headers: Headers, body: bytes) -> tuple[int, Any] | None:
        """Return what is answered instead; None: what the application answers."""
        return None

    def heard(self, scope: Scope, body: bytes) -> tuple[Scope, bytes]:
        """Return the request that the application gets."""
        return scope, body

    def said(self, kind: str, body: bytes) -> bytes:
        """Return the body of an answer."""
        return body


class OtherPaths(Dialect):
    """Uses opaque paths and ids for everything but exports.

    Exports keep theirs: the SDK itself downloads no others.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        """The server's own paths and ids, by those that it says."""

    def heard(self, scope: Scope, body: bytes) -> tuple[Scope, bytes]:
        if found := _IDS.fullmatch(scope["path"]):
            here = found[1] + self._own.get(found[2], found[2])
            scope = scope | {"path": here, "raw_path": here.encode()}
        return scope, _through(body, self._heard) if _is_json(scope["headers"]) else body

    def said(self, kind: str, body: bytes) -> bytes:
        return _through(body, self._said) if kind == "application/json" else body

    def _said(self, value: Any) -> Any:
        if isinstance(value, dict):
            said = {key: self._said(inner) for key, inner in value.items()}
            if "checkpoint_id" in value and value["checkpoint_type"] != "external":
                said["checkpoint_id"] = f"{value['checkpoint_id'].replace('/', '?')} #1"
                self._own[said["checkpoint_id"]] = value["checkpoint_id"]
            return said
        if isinstance(value, list):
            return [self._said(inner) for inner in value]
        if not (isinstance(value, str) and _OURS.fullmatch(value)):
            return value
        known = {own: path for path, own in self._own.items()}
        path = known.get(value, f"tinker://model_5c33ec6f/v-{len(known)}?w=\u00fc b#..%2F;")
        self._own[path] = value
        return path

    def _heard(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._heard(inner) for key, inner in value.items()}
        return self._own.get(value, value) if isinstance(value, str) else value


class Flattened(Dialect):
    """Answers [N, K] targets with one row of N x K logprobs, and gives the loss by token alone, as
    SkyRL 0.4.0 does."""

    def said(self, kind: str, body: bytes) -> bytes:
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


class Unnumbered(Dialect):
    """Promises samples without ids, which the SDK from 0.38 on refuses: SkyRL 0.4.0's are so."""

    def said(self, kind: str, body: bytes) -> bytes:
        return _through(body, _without_ids) if kind == "application/json" else body


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        value.pop("sample_sequence_ids", None)
    return value


class Uncancelling(Dialect):
    """Offers no cancellation of samples, as services that know no such request."""

    def instead(self, path: str, headers: Headers, body: bytes) -> tuple[int, Any] | None:
        return (200, {"sample_cancel_enabled": False}) if path == "dynamic_config" else None


class Keyed(Dialect):
    """Answers those who send its key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def instead(self, path: str, headers: Headers, body: bytes) -> tuple[int, Any] | None:
        return None if headers.get(b"x-api-key") == self._key else (401, {"detail": "wrong key"})


class Delisted(Dialect):
    """Serves its model until `gone`: then it lists another, and refuses what is asked for."""

    def __init__(self) -> None:
        self.gone = False
        self.refuses: set[str] = set()
        """Of what is gone: `training`, `weights` (to sample what was learned), `base`."""

    def instead(self, path: str, headers: Headers, body: bytes) -> tuple[int, Any] | None:
        if not self.gone:
            return None
        if path == "get_server_capabilities":
            listed = {"model_name": "another", "trainable": True, "sampleable": True}
            return 200, {"supported_models": [listed]}
        asks = "training" if path in ("create_model", "load_weights") else None
        if path == "create_sampling_session":
            asks = "weights" if json.loads(body).get("model_path") else "base"
        return (
            (400, {"detail": "the model is not offered any more"}) if asks in self.refuses else None
        )


class _Rewriting:
    """Sends an answer, once it is whole, with another body."""

    def __init__(self, send: Send, by: Dialect) -> None:
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
        kind = dict(self._start["headers"]).get(b"content-type", b"").decode()
        body = self._by.said(kind, self._body)
        await self._send(self._start | {"headers": _with_length(self._start["headers"], body)})
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

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"x-api-key", b"").decode()
        await answer_with(send, *answer(key))

    with serving(app) as url:
        yield url
