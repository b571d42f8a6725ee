"""Messages of a request, brought into one shape.

Rule: content leaves here as one string, which knows its parts. What this model cannot read (images,
audio, files) is refused with its place; it is never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.types import Message
from tinker_claw.wire.values import items, shown, string

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_COMMON = frozenset({"role", "content", "name"})
_OWN: Mapping[str, frozenset[str]] = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "refusal"}),
    "tool": frozenset({"tool_call_id"}),
}
# What OpenAI's clients send back of an earlier reply without meaning by it.
_EMPTY = frozenset({"refusal", "annotations", "audio", "function_call"})
# Of a part of text. Hints to a cache change no reply.
_PART = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})


class Joined(str):
    """Text that came in several parts. To the model it is one; the agent's own words may be a part.

    `starts`: where each part begins.
    """

    __slots__ = ("starts",)

    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[str]) -> Joined:
        """Without a separator, as the renderers join them."""
        joined = cls("".join(parts))
        joined.starts = (0, *accumulate(len(part) for part in parts[:-1]))
        return joined


def parts_of(text: str) -> list[str]:
    """As the client sent them; a string is one part."""
    if not isinstance(text, Joined):
        return [text]
    return [text[begin:end] for begin, end in pairwise((*text.starts, len(text)))]


def parse_messages(raw: Any) -> tuple[Message, ...]:
    """Check `messages`.

    Raises:
        RequestError: names the message and the field.
    """
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    messages = cast("list[Any]", raw)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(raw: Any, at: str) -> Message:
    if not isinstance(raw, dict):
        raise RequestError(f"{at} must be an object.", param=at)
    given = {k: v for k, v in cast("dict[str, Any]", raw).items() if v is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{at}.role must be one of {', '.join(sorted(_ROLES))}.", param=f"{at}.role"
        )
    _refuse_unknown(given, role, at)
    message = _assistant(given, at) if role == "assistant" else _other(given, role, at)
    if "name" in given:
        message["name"] = string(given["name"], f"{at}.name")
    return message


def _refuse_unknown(given: dict[str, Any], role: str, at: str) -> None:
    known = _COMMON | _OWN.get(role, frozenset())
    for name, value in given.items():
        if name in known or (name in _EMPTY and not value):
            continue
        where = f"{at}.{shown(name)}"
        raise RequestError(f"{where} is not supported for role {role}.", param=where)


def _other(given: dict[str, Any], role: str, at: str) -> dict[str, Any]:
    """A message of anyone but the assistant."""
    if "content" not in given:
        raise RequestError(f"{at}.content is missing.", param=f"{at}.content")
    message = {
        # OpenAI's newer name for the same role.
        "role": "system" if role == "developer" else role,
        "content": _text(given["content"], f"{at}.content"),
    }
    if role == "tool":
        message["tool_call_id"] = string(given.get("tool_call_id"), f"{at}.tool_call_id")
    return message


def _assistant(given: dict[str, Any], at: str) -> dict[str, Any]:
    calls = items(given.get("tool_calls", []), f"{at}.tool_calls")
    refusal = string(given.get("refusal", ""), f"{at}.refusal", empty=True)
    if "content" not in given and not calls and not refusal:
        raise RequestError(
            f"{at}.content is missing, and there are no tool_calls.", param=f"{at}.content"
        )
    # A refusal is what the assistant said instead.
    content = _text(given["content"], f"{at}.content") if "content" in given else ""
    message: dict[str, Any] = {"role": "assistant", "content": content + refusal}
    if calls:
        message["tool_calls"] = [
            _call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if "reasoning_content" in given:
        where = f"{at}.reasoning_content"
        message["reasoning_content"] = string(given["reasoning_content"], where, empty=True)
    return message


def _call(raw: Any, at: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RequestError(f"{at} must be an object.", param=at)
    call = cast("dict[str, Any]", raw)
    if call.get("type", "function") != "function":
        raise RequestError(f"{at}.type must be function.", param=f"{at}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{at}.function must be an object.", param=f"{at}.function")
    function = cast("dict[str, Any]", function)
    return {
        "id": string(call.get("id"), f"{at}.id"),
        "type": "function",
        "function": {
            "name": string(function.get("name"), f"{at}.function.name"),
            "arguments": string(function.get("arguments"), f"{at}.function.arguments", empty=True),
        },
    }


def _text(content: Any, at: str) -> str:
    """Text of a string or of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{at} must be a string or a list of parts.", param=at)
    parts = cast("list[Any]", content)
    texts = [_part(part, f"{at}[{j}]") for j, part in enumerate(parts)]
    return texts[0] if len(texts) == 1 else Joined.of(texts)


def _part(raw: Any, at: str) -> str:
    if not isinstance(raw, dict):
        raise RequestError(f"{at} must be an object.", param=at)
    part = cast("dict[str, Any]", raw)
    kind = part.get("type")
    if kind == "refusal":
        return string(part.get("refusal"), f"{at}.refusal", empty=True)
    if kind != "text":
        what = f"of type {shown(kind)}" if isinstance(kind, str) else "without a type"
        raise RequestError(f"{at}: this model reads text only, not a part {what}.", param=at)
    for name, value in part.items():
        if name not in _PART and value is not None:
            where = f"{at}.{shown(name)}"
            raise RequestError(f"{where} is not supported.", param=where)
    return string(part.get("text"), f"{at}.text", empty=True)
