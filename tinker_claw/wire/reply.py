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

DONE = b"data: [DONE]\n\n"


def sse(event: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


@dataclass(frozen=True, slots=True)
class Usage:
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

    def completion(self, reply: Reply, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        """The whole reply as one object."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.tool_calls else ""),
        }
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_call(call) for call in reply.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion", [choice], usage)

    def role(self) -> dict[str, Any]:
        """The first chunk."""
        return self._chunk({"role": "assistant", "content": ""})

    def empty(self) -> dict[str, Any]:
        """A chunk that says nothing: a sign of life to agents, which SSE comments are not."""
        return self._chunk({})

    def text(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text})

    def reasoning(self, text: str) -> dict[str, Any]:
        return self._chunk({"reasoning_content": text})

    def tool_call(self, index: int, call: ToolCall) -> dict[str, Any]:
        return self._chunk({"tool_calls": [{"index": index, **_call(call)}]})

    def finish(self, reason: FinishReason) -> dict[str, Any]:
        return self._chunk({}, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._object("chat.completion.chunk", [], usage)

    def _chunk(
        self, delta: dict[str, Any], finish_reason: FinishReason | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def _object(
        self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"v{self.version}",
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage.as_json()
        return body


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def error_body(
    message: str, status: HTTPStatus, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = {HTTPStatus.UNAUTHORIZED: "authentication_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """The answer to GET /v1/models."""
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": created, "owned_by": "tinker-claw"}
            for name in names
        ],
    }
