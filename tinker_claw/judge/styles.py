"""Build chat completion requests to an endpoint, and read its answers. Pure.

Rule: an answer becomes an error, or texts, which are marked where they were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Body(NamedTuple):
    """What a request has beside model and texts."""

    rest: bool = True
    """Limit, temperature, schema, and images."""
    votes: bool = True
    """Several answers to one request."""
    switch: bool = True
    """A switch for thinking."""


BODIES: Final = (
    Body(),
    Body(switch=False),
    Body(votes=False),
    Body(votes=False, switch=False),
    Body(rest=False, votes=False, switch=False),
)
"""Bodies in the order in which they are tried. Without the limit an answer has no bound, so that
goes last."""


class Asked(NamedTuple):
    """What each request about one question asks for."""

    model: str
    messages: Sequence[Message]
    schema: Schema
    max_tokens: int
    temperature: float
    thinks: bool


def body_of(asked: Asked, n: int, body: Body) -> dict[str, Any]:
    """Build the request body for n answers, or for one where it has no votes."""
    if not body.rest:
        return {"model": asked.model, "messages": [*map(_without_images, asked.messages)]}
    schema = {"name": "rating", "strict": True, "schema": asked.schema}
    switch = {"enable_thinking": asked.thinks, "thinking": asked.thinks}
    return {
        "model": asked.model,
        "messages": asked.messages,
        "max_tokens": asked.max_tokens,
        **({"n": n} if body.votes else {}),
        "temperature": asked.temperature,
        "response_format": {"type": "json_schema", "json_schema": schema},
        **({"chat_template_kwargs": switch} if body.switch else {}),
    }


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
    said = (content or "").encode(errors="replace").decode()
    thinks = not said.strip() or ("<think>" in said and "</think>" not in said)
    return Text(said + (CUT if finish in _ENDED_EARLY else ""), finish in _LIMITS and thinks)


def refused(status: int, content: bytes, url: str) -> str:
    """Describe a refusal. Only errors about key, address or model are quoted: others may repeat a
    user's words."""
    words = " ".join(content.decode(errors="replace").split())[:200]
    told = f": {words}" if status in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {status}){told}"
