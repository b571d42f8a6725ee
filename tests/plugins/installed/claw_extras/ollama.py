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
    Format,
    GenerationRequest,
    Json,
    Purpose,
    ReplyHead,
    Route,
)
from tinker_claw.formats.body import INT64, flag, integer, items, load_body, members, number, string
from tinker_claw.formats.fields import Fields, Neutral, function_call, model_name, stop_strings
from tinker_claw.types import Delta, Message, ToolCall

FIELDS = Fields(
    honoured="model messages tools stream options",
    ignored="keep_alive",
    neutral={"format": Neutral(("",), "ask for it in the prompt")},
)
OPTIONS = Fields(
    honoured="temperature top_p top_k seed num_predict stop",
    ignored="num_ctx num_gpu num_thread",
)


class Ollama(Format):
    """The format of Ollama. `curl -d` names no type, so its body comes as a form's."""

    about = "Ollama's chat: POST /api/chat"
    routes = (
        Route("POST", "/api/chat", Purpose.TURN),
        Route("GET", "/api/tags", Purpose.MODELS),
    )
    media_type = "application/x-ndjson"
    body_types = ("application/x-www-form-urlencoded",)

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        fields = load_body(body)
        FIELDS.refuse_unknown(fields)
        options = members(fields.get("options"), "options")
        OPTIONS.refuse_unknown(options, "options.")
        most = options.get("num_predict")
        return GenerationRequest(
            model=model_name(fields),
            messages=_messages(items(fields.get("messages"), "messages")),
            tools=tuple(items(fields.get("tools") or [], "tools")),
            stream=flag(fields.get("stream"), "stream", True),
            max_tokens=None if most in (None, -1) else integer(most, "num_predict", 1, INT64),
            temperature=number(options.get("temperature", 1.0), "temperature", 0, 2),
            top_p=number(options.get("top_p", 1.0), "top_p", 0, 1, open_low=True),
            top_k=options.get("top_k") and integer(options["top_k"], "top_k", 1, INT64),
            seed=options.get("seed") and integer(options["seed"], "seed", -INT64, INT64),
            stop=stop_strings(options.get("stop"), "options.stop"),
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> Lines:
        return Lines(request.model, head)

    def error(self, error: RequestError) -> Json:
        return {"error": str(error)}

    def models(self, names: Sequence[str], since: int) -> Json:
        return {"models": [{"name": name, "model": name} for name in names]}


def _messages(sent: list[Any]) -> tuple[Message, ...]:
    """Ollama's calls have no ids: results belong to the calls before them, in their order."""
    made, open_calls = list[Message](), list[str]()
    for at, raw in enumerate(sent):
        fields = members(raw, f"messages[{at}]")
        role = string(fields.get("role"), f"messages[{at}].role")
        text = string(fields.get("content", ""), f"messages[{at}].content", empty=True)
        message: dict[str, Any] = {"role": role, "content": text}
        if role not in ("system", "user", "assistant", "tool") or "images" in fields:
            raise RequestError(f"messages[{at}] is no text of a known role.", param="messages")
        if role == "tool":
            if not open_calls:
                raise RequestError(f"messages[{at}] answers no call.", param="messages")
            message["tool_call_id"] = open_calls.pop(0)
        if calls := items(fields.get("tool_calls", []), f"messages[{at}].tool_calls"):
            open_calls = [f"call_{at}_{n}" for n in range(len(calls))]
            message["tool_calls"] = [
                function_call(
                    name, string(f.get("name"), "name"), json.dumps(f.get("arguments", {}))
                )
                for name, f in zip(
                    open_calls,
                    (members(members(c, "call").get("function"), "function") for c in calls),
                    strict=True,
                )
            ]
        if fields.get("thinking"):
            message["reasoning_content"] = string(fields["thinking"], "thinking")
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
