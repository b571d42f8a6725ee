"""Replies and errors of OpenAI's chat completions.

Rule: shapes are OpenAI's; the one addition is `reasoning_content`, as reasoning servers send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Finish,
    FinishedReply,
    GenerationRequest,
    Json,
    ReplyHead,
    TokenCounts,
    data,
)
from tinker_claw.formats.fields import as_message, called
from tinker_claw.types import Delta

_DONE = b"data: [DONE]\n\n"
_FINISH: Mapping[Finish, str] = {
    "stop": "stop",
    "stop string": "stop",
    "length": "length",
    "calls": "tool_calls",
}


class ChatReply:
    """A completion, or its chunks as bytes, each an event."""

    def __init__(self, request: GenerationRequest, head: ReplyHead) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self._model = request.model
        self._wants_usage = request.wants_usage
        self._created = head.created
        self._calls = 0
        self._version = head.version

    def whole(self, done: FinishedReply) -> Json:
        self._version = done.version
        usage = {"usage": _usage(done.tokens)}
        return self._fields("chat.completion", [_choice(done)]) | usage

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        self._version = version
        return b"".join([self._chunk(self._delta(delta)) for delta in deltas])

    def keep_alive(self) -> bytes:
        """An empty chunk: agents ignore SSE comments as keep-alives."""
        return self._chunk({})

    def end(self, done: FinishedReply) -> bytes:
        last = self._chunk({}, finish_reason=_FINISH[done.finish])
        if self._wants_usage:
            usage = {"usage": _usage(done.tokens)}
            last += data(self._fields("chat.completion.chunk", []) | usage)
        return last + _DONE

    def error(self, error: RequestError) -> bytes:
        # No finish_reason follows.
        return data(error_body(error))

    def _fields(self, kind: str, choices: Sequence[Json]) -> Json:
        """Fields that a completion and its chunks have in common."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"v{self._version}",
            "choices": choices,
        }

    def _delta(self, delta: Delta) -> Json:
        if delta.call is not None:
            self._calls += 1
            return {"tool_calls": [{"index": self._calls - 1, **called(delta.call)}]}
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return data(self._fields("chat.completion.chunk", [choice]))


def _choice(done: FinishedReply) -> Json:
    message = {**as_message(done.reply)}
    if done.reply.tool_calls and not done.reply.text:
        message["content"] = None
    finish = _FINISH[done.finish]
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}


def _usage(tokens: TokenCounts) -> Json:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.thought},
    }


def error_body(error: RequestError) -> Json:
    """OpenAI's error object."""
    kind = {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    }.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}
