"""Build chat completion requests to an endpoint, and read its answers. Pure.

Rule: an answer becomes an error, or texts, which are marked where they were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from tinker_claw.judge.prompts import CUT, SCHEMA
from tinker_claw.types import Message

TEMPERATURE: Final = 0.6
"""Temperature of the votes, as in OpenClaw-RL."""
_PATH: Final = "/chat/completions"
REFUSALS: Final = (400, 422)
"""HTTP statuses of a server that may lack a field."""
_ENDED_EARLY: Final = {"length", "max_tokens", "content_filter", "abort", "error"}


def address_of(url: str) -> str:
    """Return the full URL for a base URL (…/v1) or a full one."""
    base, mark, query = url.partition("?")
    base = base.rstrip("/").removesuffix(_PATH)
    return base + _PATH + mark + query


def body_of(
    model: str, messages: Sequence[Message], n: int, max_tokens: int, *, minimal: bool
) -> dict[str, Any]:
    """Build the request body for n answers.

    Args:
        minimal: ask for one answer to the texts, with the fields alone that every server takes.
    """
    if minimal:
        return {"model": model, "messages": [*map(_without_images, messages)]}
    schema = {"name": "rating", "strict": True, "schema": SCHEMA}
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "n": n,
        "temperature": TEMPERATURE,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


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
