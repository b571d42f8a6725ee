"""Requests of the same conversation on the three wires that the gateway serves.

Rule: a conversation is written once, as chat completions have it, and each wire says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.agent_requests import MODEL

Json = dict[str, Any]
MAX_TOKENS = 4096


@dataclass(frozen=True)
class Spoken:
    """One wire format, as a client speaks it."""

    name: str
    path: str
    """Path of a turn behind /v1."""

    def body(self, messages: Sequence[Json], tools: Sequence[Json] = (), /, **more: Any) -> bytes:
        """Return a request for a whole reply.

        Args:
            messages: as chat completions have them.
            tools: functions, with name, description and parameters.
            more: further fields of this wire.
        """
        fields = _BODIES[self.name]([*messages], [*tools]) | {"model": MODEL} | more
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()

    def reply(self, answer: bytes) -> Json:
        """Return a whole reply as a message of chat completions."""
        return _REPLIES[self.name](json.loads(answer))


def _chat(messages: list[Json], tools: list[Json]) -> Json:
    offered = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": messages, "max_tokens": MAX_TOKENS} | ({"tools": offered} if tools else {})


def _responses(messages: list[Json], tools: list[Json]) -> Json:
    items = [item for message in messages for item in _items(message)]
    offered = [{"type": "function", **tool} for tool in tools]
    return {"input": items, "max_output_tokens": MAX_TOKENS, "store": False, "tools": offered}


def _items(message: Json) -> list[Json]:
    role, content = message["role"], message["content"]
    if role == "tool":
        result = {"call_id": message["tool_call_id"], "output": content}
        return [{"type": "function_call_output", **result}]
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in _texts(content)]
    texts = [{"type": "message", "role": role, "content": parts}] if parts else []
    calls = (call["function"] | {"call_id": call["id"]} for call in message.get("tool_calls", ()))
    return [*texts, *({"type": "function_call", **call} for call in calls)]


def _messages(messages: list[Json], tools: list[Json]) -> Json:
    system = [m for m in messages if m["role"] == "system"]
    turns: list[Json] = []
    for message in messages[len(system) :]:
        turn = _blocks(message)
        if turns and turns[-1]["role"] == turn["role"] == "user" and message["role"] == "tool":
            turns[-1]["content"] += turn["content"]  # the results of one turn are one message
        else:
            turns.append(turn)
    offered = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
        for t in tools
    ]
    head = {"system": [b for m in system for b in _text_blocks(m["content"])]} if system else {}
    return head | {"messages": turns, "max_tokens": MAX_TOKENS, "tools": offered}


def _blocks(message: Json) -> Json:
    role, content = message["role"], message["content"]
    if role == "tool":
        called = message["tool_call_id"]
        result = {"type": "tool_result", "tool_use_id": called, "content": content}
        return {"role": "user", "content": [result]}
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    return {"role": role, "content": [*_text_blocks(content), *calls]}


def _text_blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": text} for text in _texts(content)]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in content]


def _of_chat(answer: Mapping[str, Any]) -> Json:
    message = answer["choices"][0]["message"]
    kept = {"role": "assistant", "content": message.get("content") or ""}
    return kept | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def _of_responses(answer: Mapping[str, Any]) -> Json:
    items = answer["output"]
    texts = [part["text"] for item in items for part in item.get("content", ())]
    calls = [
        _call(item["call_id"], item["name"], item["arguments"])
        for item in items
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": "".join(texts)} | (
        {"tool_calls": calls} if calls else {}
    )


def _of_messages(answer: Mapping[str, Any]) -> Json:
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    calls = [
        _call(block["id"], block["name"], json.dumps(block["input"], separators=(",", ":")))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": "".join(texts)} | (
        {"tool_calls": calls} if calls else {}
    )


def _call(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


_BODIES: Final = {"chat": _chat, "responses": _responses, "messages": _messages}
_REPLIES: Final = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}
WIRES: Final = (
    Spoken("chat", "/chat/completions"),
    Spoken("responses", "/responses"),
    Spoken("messages", "/messages"),
)
