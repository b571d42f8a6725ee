"""The JSON that goes back: completions, chunks, errors, models.

Rule: shapes are OpenAI's; the one addition is `reasoning_content`, as reasoning servers send it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from tinker_claw.types import Reply, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


def sse(event: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


@dataclass(frozen=True, slots=True)
class UsageBody:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every chunk of one reply has in common."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    version: int
    """The policy version that answers."""

    def completion(self, reply: Reply, finish: FinishReason, usage: UsageBody) -> dict[str, Any]:
        """The whole reply as one object."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.tool_calls else ""),
        }
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [call_json(call) for call in reply.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        rest = {"choices": [choice], "usage": usage.as_json()}
        return self.fields("chat.completion") | rest

    def fields(self, kind: str) -> dict[str, Any]:
        """What completion and chunks have in common."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"v{self.version}",
        }


def call_json(call: ToolCall) -> dict[str, Any]:
    """A call without its index."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def error_body(
    message: str, status: HTTPStatus, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    }.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_object(name: str, created: int) -> dict[str, Any]:
    """The answer to GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tinker-claw"}


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """The answer to GET /v1/models."""
    return {"object": "list", "data": [model_object(name, created) for name in names]}


# The events of a streamed reply.
#
# Rule: what all chunks of a reply have in common is written once; a chunk costs its own text.


DONE = b"data: [DONE]\n\n"

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ReplyChunks:
    """Chunks of one reply as bytes, each an event."""

    def __init__(self, head: ReplyHead) -> None:
        self._opening = "data: " + _json(head.fields("chat.completion.chunk"))[:-1]
        self._start = self._opening + ',"choices":[{"index":0,"delta":'

    def role(self) -> bytes:
        """The first chunk."""
        return self._chunk('{"role":"assistant","content":""}')

    def empty(self) -> bytes:
        """A chunk that says nothing: a sign of life to agents, which SSE comments are not."""
        return self._chunk("{}")

    def text(self, text: str) -> bytes:
        return self._chunk('{"content":' + _json(text) + "}")

    def reasoning(self, text: str) -> bytes:
        return self._chunk('{"reasoning_content":' + _json(text) + "}")

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        return self._chunk(_json({"tool_calls": [{"index": index, **call_json(call)}]}))

    def finish(self, reason: FinishReason) -> bytes:
        return self._chunk("{}", _json(reason))

    def usage(self, usage: UsageBody) -> bytes:
        return (
            self._opening + ',"choices":[],"usage":' + _json(usage.as_json()) + "}\n\n"
        ).encode()

    def _chunk(self, delta: str, finish_reason: str = "null") -> bytes:
        return (self._start + delta + ',"finish_reason":' + finish_reason + "}]}\n\n").encode()
