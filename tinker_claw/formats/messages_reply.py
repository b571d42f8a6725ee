"""Replies and errors of Anthropic's Messages.

Rule: shapes are Anthropic's. A stream is a list of blocks, one open at a time; a block begins with
the first piece of its kind and ends with the first of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Finish,
    FinishedReply,
    GenerationRequest,
    Json,
    ReplyHead,
    TokenCounts,
    event,
)
from tinker_claw.types import Delta, ToolCall

_FINISH: Mapping[Finish, str] = {
    "stop": "end_turn",
    "stop string": "stop_sequence",
    "length": "max_tokens",
    "calls": "tool_use",
}
_KINDS: Mapping[HTTPStatus, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "
"""Words by which agents recognise that they must compact their history."""
_SIGNATURE = "dW5zaWduZWQ="
"""Placeholder signature of thinking; clients drop thinking that has none."""


class MessagesReply:
    """A message, or its events as bytes."""

    def __init__(self, request: GenerationRequest, head: ReplyHead, *, shows: bool) -> None:
        """`shows`: thinking is a part of the reply."""
        self.id = f"msg_{uuid4().hex}"
        self._model = request.model
        self._prompt_tokens = head.prompt_tokens
        self._shows = shows
        self._blocks = 0
        """Number of blocks begun so far."""
        self._silent = True
        """Every block so far is thinking."""
        self._open: str | None = None
        """Kind of the open block; None: no block is open."""

    def whole(self, done: FinishedReply) -> Json:
        reply = done.reply
        blocks: list[Json] = []
        if self._shows and reply.reasoning:
            blocks.append(_block("thinking", reply.reasoning, _SIGNATURE))
        if reply.text or not reply.tool_calls:
            blocks.append(_block("text", reply.text))
        blocks += [_call(call, json.loads(call.arguments)) for call in reply.tool_calls]
        return self._message(blocks, done.tokens) | _ending(done)

    def begin(self) -> bytes:
        message = self._message([], TokenCounts(self._prompt_tokens, 0, 0))
        return event("message_start", message=message) + self.keep_alive()

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keep_alive(self) -> bytes:
        return event("ping")

    def end(self, done: FinishedReply) -> bytes:
        closed = self._close()
        if self._silent:
            closed += self._begin("text") + self._close()
        ending = event("message_delta", delta=_ending(done), usage=_usage(done.tokens))
        return closed + ending + event("message_stop")

    def error(self, error: RequestError) -> bytes:
        # No message_stop follows.
        return event("error", **error_body(error))

    def _message(self, content: list[Json], tokens: TokenCounts) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tokens),
        }

    def _delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            return (
                self._begin("tool_use", delta.call)
                + self._piece("input_json_delta", partial_json=delta.call.arguments)
                + self._close()
            )
        if delta.kind == "text":
            return self._begin("text") + self._piece("text_delta", text=delta.text)
        if not self._shows:
            return b""
        return self._begin("thinking") + self._piece("thinking_delta", thinking=delta.text)

    def _begin(self, kind: str, call: ToolCall | None = None) -> bytes:
        """Open a block, unless one of text or thinking goes on."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._blocks += 1
        self._open = kind
        self._silent = self._silent and kind == "thinking"
        block = _block(kind) if call is None else _call(call, {})
        return closed + event("content_block_start", index=self._blocks - 1, content_block=block)

    def _piece(self, kind: str, **piece: str) -> bytes:
        delta = {"type": kind} | piece
        return event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        was, self._open = self._open, None
        if was is None:
            return b""
        signed = b""
        if was == "thinking":
            signed = self._piece("signature_delta", signature=_SIGNATURE)
        return signed + event("content_block_stop", index=self._blocks - 1)


def _block(kind: str, text: str = "", signature: str = "") -> Json:
    block = {"type": kind, kind: text}
    return block | {"signature": signature} if kind == "thinking" else block


def _ending(done: FinishedReply) -> Json:
    return {"stop_reason": _FINISH[done.finish], "stop_sequence": done.stop_string}


def _call(call: ToolCall, arguments: Any) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _usage(tokens: TokenCounts) -> Json:
    """Token usage; cached tokens are not counted as input tokens."""
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.completion,
    }


def error_body(error: RequestError) -> Json:
    """Anthropic's error object."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, usual)
    message = f"{_TOO_LONG if error.code == 'context_length_exceeded' else ''}{error}"
    return {"type": "error", "error": {"type": kind, "message": message}}
