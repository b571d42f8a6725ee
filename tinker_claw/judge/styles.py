"""How an endpoint is asked and how its answer is read: chat completions, or Responses. Pure.

Rule: what an endpoint does not take is found out from its refusal, and left out from then on. An
answer becomes texts, one of which is marked where it was cut off, or an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from tinker_claw.judge.prompts import CUT, SCHEMA
from tinker_claw.types import Message

REFUSALS: Final = (400, 422)
"""HTTP status of an endpoint that does not take a field."""
_ENDED_EARLY: Final = {"length", "max_tokens", "content_filter", "abort", "error"}
_NAMES: Final = {
    "schema": r"response_format|json.?schema|structured.output|guided|text\.format",
    "max_tokens": r"max_tokens|max_completion_tokens",
    "temperature": r"temperature",
    "many": r"""['"`]n['"`]|\bn\s*(?:=|>|must|should|is|parameter)|parameter:? n\b"""
    r"|(?:multiple|several) (?:choices|completions|answers)",
}
"""How refusals name what they refuse, by the field of `Dialect`."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an endpoint takes, as far as it has refused nothing of it."""

    schema: bool = True
    """Answers by a JSON schema."""
    many: bool = True
    """Several answers to one request."""
    temperature: bool = True
    max_tokens: bool = True
    """Chat's older field; False: `max_completion_tokens` in its place."""

    def without(self, refusal: bytes) -> Dialect | None:
        """What is left to try after a refusal; None: nothing, it is about something else.

        One that names nothing may be about the schema, which is asked for most rarely.
        """
        said = refusal[:10_000].decode(errors="replace")
        named = {
            name: False
            for name, pattern in _NAMES.items()
            if getattr(self, name) and re.search(pattern, _param(said) or said, re.IGNORECASE)
        }
        if not named and self.schema:
            named = {"schema": False}
        return replace(self, **named) if named else None


def _param(refusal: str) -> str | None:
    """The field that a refusal names as such, in quotation marks; None: it has only words."""
    try:
        param = json.loads(refusal)["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return f"'{param}'" if isinstance(param, str) and param else None


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of which model, and within which bounds."""

    model: str
    messages: Sequence[Message]
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Style:
    """One HTTP API."""

    path: str
    dialect: Dialect
    """To begin with."""
    body: Callable[[Question, int, Dialect], dict[str, Any]]
    """For n answers, where the dialect takes more than one."""
    texts: Callable[[Any], list[str]]
    """Of a decoded answer. Raises KeyError, TypeError or ValueError where it is none."""


def style_of(url: str) -> tuple[Style, str]:
    """How an address is asked, and where: a base (…/v1), or a whole one, which says the style."""
    base, mark, query = url.partition("?")
    base = base.rstrip("/")
    for style in (RESPONSES, CHAT):
        if base.endswith(style.path):
            return style, base + mark + query
    return CHAT, base + CHAT.path + mark + query


def _chat_body(question: Question, n: int, dialect: Dialect) -> dict[str, Any]:
    limit = "max_tokens" if dialect.max_tokens else "max_completion_tokens"
    body: dict[str, Any] = {
        "model": question.model,
        "messages": list(question.messages),
        limit: question.max_tokens,
    }
    if dialect.many:
        body["n"] = n
    if dialect.temperature:
        body["temperature"] = question.temperature
    if dialect.schema:
        schema = {"name": "rating", "strict": True, "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _chat_texts(answer: Any) -> list[str]:
    choices = answer["choices"]
    if not isinstance(choices, list):
        raise TypeError("choices are no list")
    return [
        _text(choice["message"]["content"], choice.get("finish_reason") in _ENDED_EARLY)
        for choice in cast("list[Any]", choices)
    ]


def _responses_body(question: Question, n: int, dialect: Dialect) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": question.model,
        "input": list(question.messages),
        "max_output_tokens": question.max_tokens,
        "store": False,  # these servers keep what they are asked unless they are told not to
    }
    if dialect.temperature:
        body["temperature"] = question.temperature
    if dialect.schema:
        body["text"] = {
            "format": {"type": "json_schema", "name": "rating", "strict": True, "schema": SCHEMA}
        }
    return body


def _responses_texts(answer: Any) -> list[str]:
    parts = [
        part.get("text")
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("text is no text")
    return [_text("".join(parts), answer.get("status", "completed") != "completed")]


def _text(content: Any, cut: bool) -> str:
    """What an answer says; "" where it says nothing, which is a vote that cannot be read."""
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    # Half of a surrogate pair, as an answer that is cut within an emoji ends, is no text that can
    # be kept.
    return (content or "").encode(errors="replace").decode() + (CUT if cut else "")


CHAT: Final = Style("/chat/completions", Dialect(), _chat_body, _chat_texts)
RESPONSES: Final = Style("/responses", Dialect(many=False), _responses_body, _responses_texts)


def refused(status: int, content: bytes, url: str) -> str:
    """Why, where that is about key, address or model; other answers may repeat a user's words."""
    words = " ".join(content.decode(errors="replace").split())[:200]
    told = f": {words}" if status in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {status}){told}"
