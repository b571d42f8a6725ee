"""Replies of OpenAI's Responses, and their events.

Rule: shapes are OpenAI's. A reply is a list of items, one open at a time. An item begins with the
first piece of its kind; it is complete in the event that ends it, and in the reply at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    FinishedReply,
    Json,
    ReplyHead,
    TokenCounts,
    event,
)
from tinker_claw.types import Delta, ToolCall

Names = dict[str, tuple[str, str]]
"""Namespace and name of a function, by the name that the model uses."""


_PARTS = {"reasoning": "reasoning_text", "text": "output_text"}
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Fields that a reply repeats from its request, with their defaults."""


class ResponsesReply:
    """A response, or its events as bytes."""

    def __init__(self, fields: Mapping[str, Any], names: Names, head: ReplyHead) -> None:
        """`fields`: of the request."""
        self.id = f"resp_{uuid4().hex}"
        self._names = names
        echoed = {name: fields.get(name, usual) for name, usual in _ECHOED.items()}
        self._common: Json = {
            "id": self.id,
            "object": "response",
            "created_at": head.created,
            "model": fields["model"],
            "background": False,
            **echoed,
        }
        self._events = 0
        self._output: list[Json] = []
        """The items that have ended."""
        self._kind: str | None = None
        """Kind of the open item: reasoning or text; None: no item is open."""
        self._item = ""
        """Id of the open item."""
        self._written: list[str] = []
        """Text of the open item, in pieces."""

    def whole(self, done: FinishedReply) -> Json:
        return self._finish(done, done.reply.deltas)[1]

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self.keep_alive()

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def end(self, done: FinishedReply) -> bytes:
        last, response = self._finish(done)
        return last + self._event(f"response.{response['status']}", response=response)

    def error(self, error: RequestError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failure = {"error": {"code": code, "message": str(error)}}
        return self._event("response.failed", response=self._response("failed") | failure)

    def _finish(self, done: FinishedReply, deltas: Sequence[Delta] = ()) -> tuple[bytes, Json]:
        """The last events of the items, and the response; `deltas`: what is still to be shown."""
        self.deltas(deltas, done.version)
        last = self._close()
        if all(item["type"] == "reasoning" for item in self._output):
            last += self._begin("text") + self._close()
        cut = done.finish == "length"
        return last, self._response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(done.tokens),
        }

    def _response(self, status: str) -> Json:
        return self._common | {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
        }

    def _delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            return self._close() + self._whole_call(delta.call)
        begun = b""
        if delta.kind != self._kind:
            begun = self._close() + self._begin(delta.kind)
        self._written.append(delta.text)
        part = _PARTS[delta.kind]
        more: Json = {"logprobs": []} if delta.kind == "text" else {}
        return begun + self._event(
            f"response.{part}.delta", **self._in_item(), delta=delta.text, **more
        )

    def _begin(self, kind: str) -> bytes:
        self._kind, self._written = kind, []
        self._item = _id("rs" if kind == "reasoning" else "msg")
        item = _item(kind, self._item, None)
        part = _part(kind, "")
        return self._event("response.output_item.added", item=item, **self._at()) + self._event(
            "response.content_part.added", part=part, **self._in_item()
        )

    def _close(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        text, place = "".join(self._written), self._in_item()
        more: Json = {"logprobs": []} if kind == "text" else {}
        item = _item(kind, self._item, text)
        last = (
            self._event(f"response.{_PARTS[kind]}.done", text=text, **place, **more)
            + self._event("response.content_part.done", part=item["content"][0], **place)
            + self._event("response.output_item.done", item=item, **self._at())
        )
        self._output.append(item)
        return last

    def _whole_call(self, call: ToolCall) -> bytes:
        space, name = self._names.get(call.name, (None, call.name))
        item = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": name}
        if space is not None:
            item["namespace"] = space
        begun = item | {"arguments": "", "status": "in_progress"}
        item |= {"arguments": call.arguments, "status": "completed"}
        place = self._at()
        reference = {"item_id": item["id"], **place}
        self._output.append(item)
        kind = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", item=begun, **place)
            + self._event(f"{kind}.delta", delta=call.arguments, **reference)
            + self._event(f"{kind}.done", arguments=call.arguments, name=name, **reference)
            + self._event("response.output_item.done", item=item, **place)
        )

    def _at(self) -> Json:
        return {"output_index": len(self._output)}

    def _in_item(self) -> Json:
        return {"item_id": self._item, "content_index": 0, **self._at()}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event(kind, sequence_number=number, **fields)


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def _item(kind: str, id: str, text: str | None) -> Json:
    """`text`: None where the item begins."""
    content = [] if text is None else [_part(kind, text)]
    if kind == "reasoning":
        return {"type": "reasoning", "id": id, "summary": [], "content": content}
    status = "in_progress" if text is None else "completed"
    return {
        "type": "message",
        "id": id,
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(tokens: TokenCounts) -> Json:
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.completion,
        "output_tokens_details": {"reasoning_tokens": tokens.thought},
        "total_tokens": tokens.prompt + tokens.completion,
    }
