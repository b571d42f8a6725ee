"""The events of a streamed reply.

Rule: what all chunks of a reply have in common is written once; a chunk costs its own text.
"""

from __future__ import annotations

import json

from tinker_claw.types import ToolCall
from tinker_claw.wire.reply import FinishReason, ReplyHead, Usage, call_json

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

    def usage(self, usage: Usage) -> bytes:
        return (
            self._opening + ',"choices":[],"usage":' + _json(usage.as_json()) + "}\n\n"
        ).encode()

    def _chunk(self, delta: str, finish_reason: str = "null") -> bytes:
        return (self._start + delta + ',"finish_reason":' + finish_reason + "}]}\n\n").encode()
