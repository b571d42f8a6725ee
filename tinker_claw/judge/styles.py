"""Build chat completion requests to an endpoint, and read its answers. Pure.

Rule: a field that an endpoint refuses is left out from then on. An answer becomes an error, or
texts, which are marked where they were cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.prompts import CUT, SCHEMA
from tinker_claw.types import Message

TEMPERATURE: Final = 0.6
"""Temperature of the votes, as in OpenClaw-RL."""
_PATH: Final = "/chat/completions"
REFUSALS: Final = (400, 422)
"""HTTP statuses that refuse a field."""
_ENDED_EARLY: Final = {"length", "max_tokens", "content_filter", "abort", "error"}
_NAMES: Final = {
    "images": r"image|vision|multi.?modal|content.{0,40}(?:string|text)",
    "schema": r"response_format|json.?schema|structured.output|guided|text\.format",
    "max_tokens": r"max_tokens|max_completion_tokens",
    "temperature": r"temperature",
    "many": r"""['"`]n['"`]|\bn\s*(?:=|>|must|should|is|parameter)|parameter:? n\b"""
    r"|(?:multiple|several) (?:choices|completions|answers)",
}
"""Patterns of how refusals name a field, by the field of `Dialect`."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Fields that an endpoint accepts; all of them until it refuses one."""

    images: bool = True
    """Whether a message may have images."""
    schema: bool = True
    """Whether answers follow a JSON schema."""
    many: bool = True
    """Whether one request can ask for several answers."""
    temperature: bool = True
    max_tokens: bool = True
    """Whether chat takes the older `max_tokens`; False sends `max_completion_tokens`."""

    def without(self, refusal: bytes, *, images: bool = False) -> Dialect | None:
        """Return the dialect to try after a refusal; None when the refusal is about something else.

        A refusal that names no field may be about the schema, the least supported of them.

        Args:
            images: whether the request had any.
        """
        said = refusal[:10_000].decode(errors="replace")
        named = {
            name: False
            for name, pattern in _NAMES.items()
            if getattr(self, name)
            and (images or name != "images")
            and re.search(pattern, _param(said) or said, re.IGNORECASE)
        }
        if not named and self.schema:
            named = {"schema": False}
        if not named and self.images and images:
            named = {"images": False}
        return replace(self, **named) if named else None


def _param(refusal: str) -> str | None:
    """Return the field that a refusal names as its `param`, in quotation marks, or None."""
    try:
        param = json.loads(refusal)["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return f"'{param}'" if isinstance(param, str) and param else None


def address_of(url: str) -> str:
    """Return the full URL for a base URL (…/v1) or a full one."""
    base, mark, query = url.partition("?")
    base = base.rstrip("/").removesuffix(_PATH)
    return base + _PATH + mark + query


def has_images(messages: Sequence[Message]) -> bool:
    return any(isinstance(message["content"], list) for message in messages)


def body_of(
    judge: JudgeSettings, messages: Sequence[Message], n: int, dialect: Dialect
) -> dict[str, Any]:
    """Build the request body for n answers, where the dialect takes more than one."""
    limit = "max_tokens" if dialect.max_tokens else "max_completion_tokens"
    if not dialect.images and has_images(messages):
        messages = [*map(_without_images, messages)]
    body: dict[str, Any] = {
        "model": judge.asked_model,
        "messages": messages,
        limit: judge.prm_max_tokens,
    }
    if dialect.many:
        body["n"] = n
    if dialect.temperature:
        body["temperature"] = TEMPERATURE
    if dialect.schema:
        schema = {"name": "rating", "strict": True, "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _without_images(message: Message) -> Message:
    parts = message["content"]
    return {**message, "content": parts[0]["text"]} if isinstance(parts, list) else message


def texts_of(answer: Any) -> list[str]:
    """Read the texts from a decoded answer; KeyError, TypeError or ValueError on anything else."""
    choices = answer["choices"]
    if not isinstance(choices, list):
        raise TypeError("choices are no list")
    return [
        _text(choice["message"]["content"], choice.get("finish_reason") in _ENDED_EARLY)
        for choice in cast("list[Any]", choices)
    ]


def _text(content: Any, cut: bool) -> str:
    """Return the text of an answer; empty where there is none, which is a vote that cannot be
    read."""
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    # An answer cut within an emoji ends in a lone surrogate, which cannot be encoded.
    return (content or "").encode(errors="replace").decode() + (CUT if cut else "")


def refused(status: int, content: bytes, url: str) -> str:
    """Describe a refusal. Only errors about key, address or model are quoted: others may repeat a
    user's words."""
    words = " ".join(content.decode(errors="replace").split())[:200]
    told = f": {words}" if status in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {status}){told}"
