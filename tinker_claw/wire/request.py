"""The body of a chat request.

Rule: every field is honoured, neutral, without meaning here, or refused; the tables in `fields` say
which. What depends on the model's chat format is read here and judged by `gateway.suit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.types import Message
from tinker_claw.wire.body import load_body
from tinker_claw.wire.fields import refuse_unknown
from tinker_claw.wire.messages import parse_messages
from tinker_claw.wire.tools import parse_tools
from tinker_claw.wire.values import INT64, flag, integer, members, number, shown, string

STOP_STRINGS = 4
"""As many as OpenAI takes."""
STOP_CHARACTERS = 256
"""Of one stop string: so much text may have to be held back at any time."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that can be honoured in full, as far as that does not depend on the model."""

    model: str
    messages: tuple[Message, ...]
    """Text content joined to one string each; role developer has become system."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's envelope; empty also when tool_choice is none."""
    may_call: bool = True
    """False: tool_choice is none, and whatever looks like a call is text."""
    one_call: bool = False
    """The reply ends before a second call: parallel_tool_calls is false."""
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    """None: the client set no limit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The reply's text ends before the first of these; see `render.stops`."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What chat_template_kwargs says to the model's chat template, enable_thinking for one."""
    reasoning_effort: str | None = None
    """One of EFFORTS; None: the model's default."""
    switches: tuple[tuple[str, Any], ...] = ()
    """What these two come to with the model's chat format, once that was asked."""
    prompt_cache_key: str | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        RequestError: names the first field that is malformed or cannot be honoured.
    """
    fields = load_body(body)
    refuse_unknown(fields)
    tools, may_call = _tools(fields)
    return ChatRequest(
        model=_model(fields),
        messages=parse_messages(fields.get("messages")),
        tools=tools,
        may_call=may_call,
        one_call=not flag(fields.get("parallel_tool_calls"), "parallel_tool_calls", True),
        stream=flag(fields.get("stream"), "stream"),
        include_usage=_include_usage(fields),
        max_tokens=_max_tokens(fields),
        temperature=number(fields.get("temperature", 1.0), "temperature", 0, 2),
        top_p=number(fields.get("top_p", 1.0), "top_p", 0, 1, open_low=True),
        top_k=_top_k(fields),
        seed=integer(fields["seed"], "seed", -INT64, INT64) if "seed" in fields else None,
        stop=_stop(fields),
        template=_template(fields),
        reasoning_effort=_effort(fields),
        prompt_cache_key=_cache_key(fields),
    )


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError("model must name a model.", param="model")
    return model


def _tools(fields: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], bool]:
    """The tools to show, and whether the reply may call any."""
    tools = parse_tools(fields.get("tools"))
    choice = fields.get("tool_choice", "auto")
    if choice == "none":
        return (), False
    if choice != "auto":
        raise RequestError(
            "tool_choice must be auto or none: this server cannot force a call.",
            param="tool_choice",
        )
    return tools, True


def _include_usage(fields: Mapping[str, Any]) -> bool:
    name = "stream_options"
    options = members(fields.get(name), name)
    for option in options:
        if option not in ("include_usage", "include_obfuscation"):
            where = f"{name}.{shown(option)}"
            raise RequestError(f"{where} is not supported.", param=where)
    if flag(options.get("include_obfuscation"), f"{name}.include_obfuscation"):
        where = f"{name}.include_obfuscation"
        raise RequestError(f"{where} is not supported: no padding is sent.", param=where)
    return flag(options.get("include_usage"), f"{name}.include_usage")


def _template(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    options = members(fields.get(name), name)
    for option, value in options.items():
        if not isinstance(value, str | int | float):
            where = f"{name}.{shown(option)}"
            raise RequestError(f"{where} must be a string, a number or a boolean.", param=where)
    return options


def _effort(fields: Mapping[str, Any]) -> str | None:
    effort = fields.get("reasoning_effort")
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return effort
    raise RequestError(
        f"reasoning_effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort"
    )


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """max_completion_tokens is the newer name of max_tokens and wins."""
    given = [
        integer(fields[name], name, 1, INT64)
        for name in ("max_completion_tokens", "max_tokens")
        if name in fields
    ]
    return given[0] if given else None


def _top_k(fields: Mapping[str, Any]) -> int | None:
    value = fields.get("top_k")
    if value is None or (type(value) is int and value in (0, -1)):
        return None  # 0 and -1 are in use elsewhere for "all tokens"
    return integer(value, "top_k", 1, INT64)


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None or stop == "":
        return ()
    if not isinstance(stop, str | list):
        raise RequestError("stop must be a string or a list of strings.", param="stop")
    given = [stop] if isinstance(stop, str) else cast("list[Any]", stop)
    if len(given) > STOP_STRINGS:
        raise RequestError(f"stop must hold at most {STOP_STRINGS} strings.", param="stop")
    for i, text in enumerate(given):
        at = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if len(string(text, at)) > STOP_CHARACTERS:
            raise RequestError(f"{at} is longer than {STOP_CHARACTERS} characters.", param=at)
    return tuple(dict.fromkeys(given))


def _cache_key(fields: Mapping[str, Any]) -> str | None:
    key = fields.get("prompt_cache_key")
    return None if key is None else string(key, "prompt_cache_key", empty=True)
