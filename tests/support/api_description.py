"""The documented routes as OpenAPI describes them.

Rule: what becomes of a field of a chat request stands in one of the tables of `formats.chat`; what
a field of theirs may hold stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.gateways import MODEL
from tinker_claw.formats.body import INT64
from tinker_claw.formats.chat import FIELDS as CHAT
from tinker_claw.formats.fields import STOP_CHARACTERS, STOP_STRINGS
from tinker_claw.gateway import feedback
from tinker_claw.ledger.feedback import LONGEST_TEXT
from tinker_claw.types import EFFORTS

Schema = dict[str, Any]

WORDS: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": INT64 - 1}


def _object(required: str = "", **members: Schema) -> Schema:
    return {
        "type": "object",
        "required": required.split(),
        "properties": {
            name: schema if name in required.split() else _or_null(schema)
            for name, schema in members.items()
        },
        "additionalProperties": False,
    }


def _open(required: str, **members: Schema) -> Schema:
    """Schema of an object that allows further fields: they go into the prompt, or are left out of
    it."""
    return _object(required, **members) | {"additionalProperties": True}


def _or_null(schema: Schema) -> Schema:
    """Schema that also allows null, which is as good as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


TOOL = _open(
    "type function",
    type={"const": "function"},
    function=_open(
        "name",
        name=WORDS,
        description={"type": "string"},
        parameters={"type": "object"},
        strict={"type": "boolean"},
    ),
)
# Histories are read, whoever wrote them: further members, parts and results without a call, too.
_PARTS: Schema = {"type": "array", "items": {"type": ["object", "string", "null"]}}
_ROLES: Schema = {"enum": ["system", "developer", "user", "assistant", "tool", "function"]}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _open("role", role=_ROLES, content={"anyOf": [{"type": "string"}, _PARTS]}),
}
FIELDS: dict[str, Schema] = {
    "model": {"const": MODEL},
    "messages": MESSAGES,
    "tools": {"type": "array", "items": TOOL},
    "tool_choice": {"enum": ["auto", "none"]},
    "parallel_tool_calls": {"type": "boolean"},
    "stream": {"type": "boolean"},
    "stream_options": _object(
        include_usage={"type": "boolean"}, include_obfuscation={"const": False}
    ),
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": INT64 - 1},
    "seed": {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1},
    "stop": {
        "anyOf": [
            {"type": "string", "maxLength": STOP_CHARACTERS},
            {
                "type": "array",
                "maxItems": STOP_STRINGS,
                "items": WORDS | {"maxLength": STOP_CHARACTERS},
            },
        ]
    },
    "reasoning_effort": {"enum": list(EFFORTS)},
    # What it may say depends on the model's template, and must not contradict reasoning_effort.
    "chat_template_kwargs": _object(),
    "prompt_cache_key": {"type": "string"},
}
"""Schemas of the honoured fields."""


def _refusal() -> Schema:
    error = {
        "type": "object",
        "required": ["message"],
        "properties": {"message": WORDS},
    }
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {"description": "why not", "content": {"application/json": {"schema": schema}}}


def _answers(*types: str, refused: str = "") -> Schema:
    answer = {"description": "the answer", "content": {kind: {"schema": {}} for kind in types}}
    return {"200": answer, **{status: _refusal() for status in refused.split()}}


_NAME: Schema = WORDS | {"maxLength": feedback.MAX_NAME}
_ABOUT: Sequence[dict[str, Schema]] = ({"turn": COUNT}, {"response_id": _NAME}, {"session": WORDS})
FEEDBACK: Schema = {
    "oneOf": [
        _object(
            f"{' '.join(about)} score",
            **about,
            score={"type": "number", "minimum": -1, "maximum": 1},
            text={"type": "string", "maxLength": LONGEST_TEXT},
            source={"enum": ["user", "client"]},
            final={"type": "boolean"},
            **dict.fromkeys(("task", "group", "key"), _NAME),
        )
        for about in _ABOUT
    ]
}


def description(url: str) -> Schema:
    """OpenAPI description of the gateway at this address."""
    assert FIELDS.keys() == CHAT.honoured
    neutral = {name: {"enum": list(each.values)} for name, each in CHAT.neutral.items()}
    ignored: dict[str, Schema] = {name: {} for name in CHAT.ignored}
    body = _object("model messages", **FIELDS, **neutral, **ignored)
    chat = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _answers("application/json", "text/event-stream", refused="400 404 413"),
    }
    name = {"name": "name", "in": "path", "required": True, "schema": WORDS}
    model = {"parameters": [name], "responses": _answers("application/json", refused="400 404")}
    said = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": FEEDBACK}}},
        "responses": _answers("application/json", refused="400 404 413 422"),
    }
    routes: dict[str, Schema] = {
        "/": _answers("text/plain"),
        "/health": _answers("application/json"),
        "/healthz": _answers("application/json"),
        "/metrics": _answers("text/plain"),
        "/v1/models": _answers("application/json"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tinker-claw", "version": "1"},
        "servers": [{"url": url}],
        "paths": {
            **{path: {"get": {"responses": answers}} for path, answers in routes.items()},
            "/v1/models/{name}": {"get": model},
            "/v1/chat/completions": {"post": chat},
            feedback.PATH: {"post": said},
        },
    }
