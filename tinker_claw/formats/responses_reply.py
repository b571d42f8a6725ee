"""What goes back to a client of OpenAI's Responses: replies and their events.

Rule: shapes are OpenAI's. A reply is a row of items, one open at a time; an item begins with the
first piece of its kind, and stands whole in the event that ends it and in the reply at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    FinishedReply,
    Json,
    ReplyHead,
    TokenCounts,
    event,
    to_string,
)
from tinker_claw.formats.chat_reply import token_logprobs
from tinker_claw.types import Delta, Reply, ToolCall

Names = dict[str, tuple[str, str]]
"""Namespace and name of a function, by what the model calls it."""


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
"""What a reply repeats of its request, and what stands there where the request says nothing."""


class ResponsesReply:
    """A response, or its events as bytes."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        names: Names,
        head: ReplyHead,
        keep: Callable[[str, Reply], None] | None,
    ) -> None:
        """
        Args:
            fields: of the request.
            keep: told of id and reply once it is complete; None: nobody may go on from it by id.
        """
        self.id = f"resp_{uuid4().hex}"
        self._names = names
        self._keep = keep
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
        """Of the item that is open: reasoning or text; None: none is."""
        self._item = ""
        """Its id."""
        self._written: list[str] = []
        """Its pieces."""

    def whole(self, done: FinishedReply) -> Json:
        self._kept(done.reply)
        reply, output = done.reply, list[Json]()
        if reply.reasoning:
            output.append(_item("reasoning", _id("rs"), reply.reasoning))
        if reply.text or not reply.tool_calls:
            logprobs = token_logprobs(done.logprobs or ())
            output.append(_item("text", _id("msg"), reply.text, logprobs))
        output += [self._call(call, _id("fc"), "completed") for call in reply.tool_calls]
        return self._response(output, _status(done), done.tokens)

    def begin(self) -> bytes:
        response = self._response([], "in_progress")
        return self._event("response.created", response=response) + self.keep_alive()

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self._response([], "in_progress"))

    def end(self, done: FinishedReply) -> bytes:
        self._kept(done.reply)
        last = self._close(token_logprobs(done.logprobs or ()))
        if all(item["type"] == "reasoning" for item in self._output):
            last += self._begin("text") + self._close()
        status = _status(done)
        response = self._response(self._output, status, done.tokens)
        return last + self._event(f"response.{status}", response=response)

    def error(self, error: RequestError) -> bytes:
        response = self._response(self._output, "failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=response)

    def _kept(self, reply: Reply) -> None:
        if self._keep is not None:
            self._keep(self.id, reply)

    def _response(
        self, output: Sequence[Json], status: str, tokens: TokenCounts | None = None
    ) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._common | {
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": output,
            "usage": tokens and _usage(tokens),
        }

    def _delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            return self._close() + self._whole_call(delta.call)
        begun = b""
        if delta.kind != self._kind:
            begun = self._close() + self._begin(delta.kind)
        self._written.append(delta.text)
        return begun + self._piece(delta.text)

    def _begin(self, kind: str) -> bytes:
        self._kind, self._written = kind, []
        self._item = _id("rs" if kind == "reasoning" else "msg")
        item = _item(kind, self._item, None)
        part = _part(kind, "")
        return self._event("response.output_item.added", item=item, **self._at()) + self._event(
            "response.content_part.added", part=part, **self._in_item()
        )

    def _piece(self, text: str) -> bytes:
        kind = _PARTS[self._kind or "text"]
        logprobs = ',"logprobs":[]' if kind == "output_text" else ""
        number, self._events = self._events, self._events + 1
        return (
            f'event: response.{kind}.delta\ndata: {{"type":"response.{kind}.delta",'
            f'"sequence_number":{number},"item_id":"{self._item}","output_index":'
            f'{len(self._output)},"content_index":0,"delta":{to_string(text)}{logprobs}}}\n\n'
        ).encode()

    def _close(self, logprobs: Sequence[Json] = ()) -> bytes:
        """`logprobs`: of the text, which are known at its end only."""
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        text, place = "".join(self._written), self._in_item()
        more: Json = {"logprobs": logprobs} if kind == "text" else {}
        item = _item(kind, self._item, text, logprobs)
        last = (
            self._event(f"response.{_PARTS[kind]}.done", text=text, **place, **more)
            + self._event("response.content_part.done", part=item["content"][0], **place)
            + self._event("response.output_item.done", item=item, **self._at())
        )
        self._output.append(item)
        return last

    def _whole_call(self, call: ToolCall) -> bytes:
        id, place = _id("fc"), self._at()
        begun, item = (self._call(call, id, status) for status in ("in_progress", "completed"))
        arguments, place_in = call.arguments, {"item_id": id, **place}
        told = (
            self._event("response.output_item.added", item=begun | {"arguments": ""}, **place)
            + self._event("response.function_call_arguments.delta", delta=arguments, **place_in)
            + self._event(
                "response.function_call_arguments.done",
                arguments=arguments,
                name=item["name"],
                **place_in,
            )
            + self._event("response.output_item.done", item=item, **place)
        )
        self._output.append(item)
        return told

    def _call(self, call: ToolCall, id: str, status: str) -> Json:
        space, name = self._names.get(call.name, (None, call.name))
        item = {"type": "function_call", "id": id, "call_id": call.id, "name": name}
        if space is not None:
            item["namespace"] = space
        return item | {"arguments": call.arguments, "status": status}

    def _at(self) -> Json:
        return {"output_index": len(self._output)}

    def _in_item(self) -> Json:
        return {"item_id": self._item, "content_index": 0, **self._at()}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event(kind, sequence_number=number, **fields)


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def _item(kind: str, id: str, text: str | None, logprobs: Sequence[Json] = ()) -> Json:
    """`text`: None where the item begins."""
    content = [] if text is None else [_part(kind, text, logprobs)]
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


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status(done: FinishedReply) -> str:
    return "incomplete" if done.finish == "length" else "completed"


def _usage(tokens: TokenCounts) -> Json:
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.prompt + tokens.completion,
    }
