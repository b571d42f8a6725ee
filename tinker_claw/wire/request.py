"""The body of a chat request.

Rule: every top-level field is in one of the tables below. Honoured fields are checked and read,
neutral ones may only hold the value that changes nothing, ignored ones have no meaning here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.types import Message
from tinker_claw.wire.body import load_body
from tinker_claw.wire.messages import parse_messages
from tinker_claw.wire.tools import parse_tools

_HONOURED = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "chat_template_kwargs",
        "prompt_cache_key",
    }
)
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": (),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}
"""Values besides null under which a field changes nothing."""

_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that can be honoured in full."""

    model: str
    messages: tuple[Message, ...]
    """Text content joined to one string each; role developer has become system."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's envelope; empty also when tool_choice is none."""
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    """None: the client set no limit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    """None: the model's default."""
    prompt_cache_key: str | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        RequestError: names the first field that is malformed or cannot be honoured.
    """
    fields = load_body(body)
    _refuse_unknown(fields)
    return ChatRequest(
        model=_model(fields),
        messages=parse_messages(fields.get("messages")),
        tools=_tools(fields),
        stream=_flag(fields.get("stream"), "stream"),
        include_usage=_include_usage(fields.get("stream_options")),
        max_tokens=_max_tokens(fields),
        temperature=_number(fields, "temperature", 0, 2),
        top_p=_number(fields, "top_p", 0, 1, open_low=True),
        top_k=_top_k(fields.get("top_k")),
        seed=_seed(fields.get("seed")),
        enable_thinking=_enable_thinking(fields.get("chat_template_kwargs")),
        prompt_cache_key=_cache_key(fields.get("prompt_cache_key")),
    )


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise RequestError(f"{name} is not supported with this value.", param=name)
        elif name not in _HONOURED and name not in _IGNORED:
            raise RequestError(f"{name} is not a field that this server knows.", param=name)


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError("model must name a model.", param="model")
    return model


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = parse_tools(fields.get("tools"))
    choice = fields.get("tool_choice", "auto")
    if choice == "none":
        return ()
    if choice != "auto":
        raise RequestError(
            "tool_choice must be auto or none: this server cannot force a call.",
            param="tool_choice",
        )
    return tools


def _flag(value: Any, name: str, default: bool = False) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false.", param=name)
    return value


def _object(value: Any, name: str, known: frozenset[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object.", param=name)
    inner = cast("dict[str, Any]", value)
    for key in inner:
        if key not in known:
            raise RequestError(f"{name}.{key} is not supported.", param=f"{name}.{key}")
    return inner


def _include_usage(value: Any) -> bool:
    options = _object(value, "stream_options", frozenset({"include_usage", "include_obfuscation"}))
    return _flag(options.get("include_usage"), "stream_options.include_usage")


def _enable_thinking(value: Any) -> bool | None:
    options = _object(value, "chat_template_kwargs", frozenset({"enable_thinking"}))
    if options.get("enable_thinking") is None:
        return None
    return _flag(options["enable_thinking"], "chat_template_kwargs.enable_thinking")


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise RequestError(f"{name} must be an integer of at least {low}.", param=name)
    return value


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """max_completion_tokens is the newer name of max_tokens and wins."""
    given = [
        _integer(fields[name], name, 1, _INT64)
        for name in ("max_completion_tokens", "max_tokens")
        if name in fields
    ]
    return given[0] if given else None


def _number(
    fields: Mapping[str, Any], name: str, low: float, high: float, *, open_low: bool = False
) -> float:
    value = fields.get(name, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise RequestError(f"{name} must be a number.", param=name)
    if not low <= value <= high or (open_low and value == low):
        least = f"above {low}" if open_low else f"at least {low}"
        raise RequestError(f"{name} must be {least} and at most {high}.", param=name)
    return float(value)


def _top_k(value: Any) -> int | None:
    if value is None or (type(value) is int and value in (0, -1)):
        return None  # 0 and -1 are in use elsewhere for "all tokens"
    return _integer(value, "top_k", 1, _INT64)


def _seed(value: Any) -> int | None:
    return None if value is None else _integer(value, "seed", -_INT64, _INT64)


def _cache_key(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError("prompt_cache_key must be a string.", param="prompt_cache_key")
    return value
