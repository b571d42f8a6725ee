"""Ollama's /api/chat: a reply, or lines of JSON, one a piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    FinishedReply,
    GenerationRequest,
    Json,
    ReplyHead,
    Route,
    WireFormat,
)
from tinker_claw.formats.body import INT64, Fields, Neutral, Object, load_body
from tinker_claw.formats.fields import function_call, stop_strings
from tinker_claw.types import Delta, Message, ToolCall

FIELDS = Fields(
    honoured="model messages tools stream options",
    ignored="keep_alive",
    neutral={"format": Neutral("ask for it in the prompt", "")},
)
OPTIONS = Fields(
    honoured="temperature top_p top_k seed num_predict stop",
    ignored="num_ctx num_gpu num_thread",
)


class Ollama(WireFormat):
    """The format of Ollama. `curl -d` names no type, so its body comes as a form's."""

    about = "Ollama's chat: POST /api/chat"
    routes = (
        Route("POST", "/api/chat", "turn"),
        Route("GET", "/api/tags", "models"),
    )
    media_type = "application/x-ndjson"
    body_types = ("application/x-www-form-urlencoded",)

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        fields = FIELDS.check(load_body(body))
        options = fields.object("options", OPTIONS)
        unbounded = options.get("num_predict") == -1
        return GenerationRequest(
            model=fields.string("model"),
            messages=_messages(fields.objects("messages", required=True)),
            tools=tuple(fields.listed("tools")),
            stream=fields.flag("stream", True),
            max_tokens=None if unbounded else options.integer("num_predict", 1, INT64),
            temperature=options.number("temperature", 0, 2, 1.0),
            top_p=options.number("top_p", 0, 1, 1.0, open_low=True),
            top_k=options.integer("top_k", 1, INT64) if options.get("top_k") else None,
            seed=options.integer("seed", -INT64, INT64),
            stop=stop_strings(options, "stop"),
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> Lines:
        return Lines(request.model, head)

    def error(self, error: RequestError) -> Json:
        return {"error": str(error)}

    def models(self, names: Sequence[str], since: int) -> Json:
        return {"models": [{"name": name, "model": name} for name in names]}


def _messages(sent: list[Object]) -> tuple[Message, ...]:
    """Ollama's calls have no ids: results belong to the calls before them, in their order."""
    made, open_calls = list[Message](), list[str]()
    for at, fields in enumerate(sent):
        role = fields.string("role")
        text = fields.text("content")
        message: dict[str, Any] = {"role": role, "content": text}
        if role not in ("system", "user", "assistant", "tool") or "images" in fields:
            raise fields.wrong("is no text of a known role")
        if role == "tool":
            if not open_calls:
                raise fields.wrong("answers no call")
            message["tool_call_id"] = open_calls.pop(0)
        if calls := fields.objects("tool_calls"):
            open_calls = [f"call_{at}_{n}" for n in range(len(calls))]
            functions = [call.object("function") for call in calls]
            message["tool_calls"] = [
                function_call(id, f.string("name"), json.dumps(f.get("arguments", {})))
                for id, f in zip(open_calls, functions, strict=True)
            ]
        if fields.get("thinking"):
            message["reasoning_content"] = fields.string("thinking")
        made.append(message)
    return tuple(made)


class Lines:
    """A reply on its way out."""

    def __init__(self, model: str, head: ReplyHead) -> None:
        self.id = f"ollama-{uuid4().hex}"
        created = datetime.fromtimestamp(head.created, UTC).isoformat()
        self._common = {"model": model, "created_at": created}

    def whole(self, done: FinishedReply) -> Json:
        reply = done.reply
        message: Json = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["thinking"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_call(call) for call in reply.tool_calls]
        return self._common | {
            "message": message,
            "done": True,
            "done_reason": "length" if done.finish == "length" else "stop",
            "prompt_eval_count": done.tokens.prompt,
            "eval_count": done.tokens.completion,
        }

    def begin(self) -> bytes:
        return b""

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join(self._piece(delta) for delta in deltas)

    def keep_alive(self) -> bytes:
        return self._piece(Delta("text"))

    def end(self, done: FinishedReply) -> bytes:
        return _line(self.whole(done) | {"message": {"role": "assistant", "content": ""}})

    def error(self, error: RequestError) -> bytes:
        return _line({"error": str(error)})

    def _piece(self, delta: Delta) -> bytes:
        message: Json = {"role": "assistant", "content": ""}
        if delta.call:
            message["tool_calls"] = [_call(delta.call)]
        else:
            message["thinking" if delta.kind == "reasoning" else "content"] = delta.text
        return _line(self._common | {"message": message, "done": False})


def _call(call: ToolCall) -> Json:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _line(fields: Json) -> bytes:
    return json.dumps(fields).encode() + b"\n"
