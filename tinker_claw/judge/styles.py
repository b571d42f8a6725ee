"""Build chat completion requests to an endpoint, and read its answers. Pure.

Rule: an answer becomes an error, or texts, which are marked where they were cut off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, cast

from tinker_claw.judge.prompts import CUT, Schema
from tinker_claw.types import Message

TEMPERATURE: Final = 0.6
"""Temperature of the votes, as in OpenClaw-RL."""
_PATH: Final = "/chat/completions"
REFUSALS: Final = (400, 422)
"""HTTP statuses of a server that may lack a field."""
_LIMITS: Final = {"length", "max_tokens"}
_ENDED_EARLY: Final = {*_LIMITS, "content_filter", "abort", "error"}


def address_of(url: str) -> str:
    """Return the full URL for a base URL (…/v1) or a full one."""
    base, mark, query = url.partition("?")
    base = base.rstrip("/").removesuffix(_PATH)
    return base + _PATH + mark + query


OPTIONAL: Final = (
    "chat_template_kwargs",
    "n",
    "temperature",
    "image",
    "response_format",
    "max_tokens",
)
"""What a request can do without, in the order in which it is dropped where an error names none:
without a schema an answer is seldom read, without a limit it has no bound."""
VOTES: Final = "n"


def response_format(schema: Schema) -> dict[str, Any]:
    """Return the field that asks for answers of this schema."""
    named = {"name": "rating", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def body_of(fields: Mapping[str, Any], n: int, dropped: Collection[str]) -> dict[str, Any]:
    """Build the request body for n answers, without what is dropped.

    Args:
        fields: those that all requests about one question share.
    """
    body = {**fields, VOTES: n}
    if "image" in dropped:
        body["messages"] = [*map(_without_images, fields["messages"])]
    return {name: value for name, value in body.items() if name not in dropped}


def refused_field(error: str, dropped: Collection[str], *, shows: bool) -> str | None:
    """Return what to drop next after a refusal: what the error names, else the next one; None:
    nothing is left.

    Args:
        shows: whether the question shows images.
    """
    left = [name for name in OPTIONAL if name not in dropped and (shows or name != "image")]
    # Not the n of an escaped line break.
    named = [name for name in left if re.search(rf"(?<![\\\w]){name}(_url)?(?!\w)", error)]
    return next(iter(named or left), None)


def _without_images(message: Message) -> Message:
    parts = message["content"]
    return {**message, "content": parts[0]["text"]} if isinstance(parts, list) else message


class Text(NamedTuple):
    """One answer; empty where there is none, which is a vote that cannot be read."""

    text: str
    cut_thinking: bool = False
    """Whether its limit came while it was thinking."""


def texts_of(answer: Any) -> list[Text]:
    """Read the texts from a decoded answer; KeyError, TypeError or ValueError on anything else."""
    choices = answer["choices"]
    if not isinstance(choices, list):
        raise TypeError("choices are no list")
    return [
        _text(choice["message"], choice.get("finish_reason"))
        for choice in cast("list[Any]", choices)
    ]


def _text(message: Any, finish: Any) -> Text:
    content = message["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    # An answer cut within an emoji ends in a lone surrogate, which cannot be encoded.
    text = (content or "").encode(errors="replace").decode()
    thinks = not text.strip() or ("<think>" in text and "</think>" not in text)
    return Text(text + (CUT if finish in _ENDED_EARLY else ""), finish in _LIMITS and thinks)


def refused(status: int, content: bytes, url: str) -> str:
    """Describe a refusal. Only errors about key, address or model are quoted: others may repeat a
    user's words."""
    words = " ".join(content.decode(errors="replace").split())[:200]
    quote = f": {words}" if status in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {status}){quote}"
