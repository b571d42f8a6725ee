"""What goes back to a client of Anthropic's Messages: replies and errors.

Rule: shapes are Anthropic's. A stream is a row of blocks, one open at a time; a block begins with
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
    to_json,
    to_string,
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
"""The words by which agents see that they must compact their history."""
_SIGNATURE = "dW5zaWduZWQ="
"""Of thinking, which nobody checks here; clients drop thinking without one."""

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesReply:
    """A message, or its events as bytes."""

    def __init__(self, request: GenerationRequest, head: ReplyHead, *, shows: bool) -> None:
        """`shows`: thinking is a part of the reply."""
        self.id = f"msg_{uuid4().hex}"
        self._model = request.model
        self._prompt_tokens = head.prompt_tokens
        self._shows = shows
        self._blocks = 0
        """Begun so far."""
        self._silent = True
        """None of them is more than thinking."""
        self._open: str | None = None
        """The kind of the one that is open."""

    def whole(self, done: FinishedReply) -> Json:
        reply = done.reply
        blocks: list[Json] = []
        if self._shows and reply.reasoning:
            thinking = {"type": "thinking", "thinking": reply.reasoning}
            blocks.append(thinking | {"signature": _SIGNATURE})
        if reply.text or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.text})
        blocks += [_call(call, json.loads(call.arguments)) for call in reply.tool_calls]
        ending = {"stop_reason": _FINISH[done.finish], "stop_sequence": done.stop_string}
        return self._message(blocks) | ending | {"usage": _usage(done.tokens)}

    def begin(self) -> bytes:
        usage = _usage(TokenCounts(self._prompt_tokens, 0, 0))
        ending = {"stop_reason": None, "stop_sequence": None}
        message = self._message([]) | ending | {"usage": usage}
        return event("message_start", message=message) + _PING

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keep_alive(self) -> bytes:
        return _PING

    def end(self, done: FinishedReply) -> bytes:
        last = self._close()
        if self._silent:
            last += self._begin("text") + self._close()
        ending = {"stop_reason": _FINISH[done.finish], "stop_sequence": done.stop_string}
        last += event("message_delta", delta=ending, usage=_usage(done.tokens))
        return last + event("message_stop")

    def error(self, error: RequestError) -> bytes:
        # No message_stop follows.
        return f"event: error\ndata: {to_json(error_body(error))}\n\n".encode()

    def _message(self, content: list[Json]) -> Json:
        common = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return common | {"content": content}

    def _delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            return (
                self._close()
                + self._begin("tool_use", delta.call)
                + self._piece("input_json_delta", "partial_json", delta.call.arguments)
                + self._close()
            )
        if delta.kind == "text":
            begun = b"" if self._open == "text" else self._close() + self._begin("text")
            return begun + self._piece("text_delta", "text", delta.text)
        if not self._shows:
            return b""
        begun = b"" if self._open == "thinking" else self._close() + self._begin("thinking")
        return begun + self._piece("thinking_delta", "thinking", delta.text)

    def _begin(self, kind: str, call: ToolCall | None = None) -> bytes:
        self._blocks += 1
        self._open = kind
        self._silent = self._silent and kind == "thinking"
        block: Json = {"type": "text", "text": ""}
        if kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = _call(call, {})
        return event("content_block_start", index=self._blocks - 1, content_block=block)

    def _piece(self, kind: str, name: str, text: str) -> bytes:
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
            f'{self._blocks - 1},"delta":{{"type":"{kind}","{name}":{to_string(text)}}}}}\n\n'
        ).encode()

    def _close(self) -> bytes:
        was, self._open = self._open, None
        if was is None:
            return b""
        signed = b""
        if was == "thinking":
            signed = self._piece("signature_delta", "signature", _SIGNATURE)
        return signed + event("content_block_stop", index=self._blocks - 1)


def _call(call: ToolCall, arguments: Any) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _usage(tokens: TokenCounts) -> Json:
    """Tokens that came from a cache are no input tokens here."""
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
    told = f"{_TOO_LONG if error.code == 'context_length_exceeded' else ''}{error}"
    return {"type": "error", "error": {"type": kind, "message": told}}
