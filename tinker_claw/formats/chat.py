"""OpenAI's chat completions: every field of a request, and what becomes of it.

Rule: what depends on the model's chat template is read here and judged behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Format,
    GenerationRequest,
    Json,
    Purpose,
    ReplyHead,
    ReplyWriter,
    Route,
)
from tinker_claw.formats.body import (
    INT64,
    Known,
    Read,
    anew,
    flag,
    integer,
    items,
    load_body,
    members,
    number,
    raw_items,
    shown,
    string,
)
from tinker_claw.formats.chat_reply import ChatReply, error_body
from tinker_claw.formats.fields import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    TEXT_ONLY,
    Fields,
    Neutral,
    attempt_in,
    cache_session,
    check_function,
    effort_level,
    function_call,
    model_name,
    openai_calls,
    refuse_deep,
    schema_of,
    stop_strings,
    text_of,
    unreadable,
)
from tinker_claw.types import KnownMessage, KnownTools, Message, Tool

_UNTEMPERED = "replies are drawn from the model's own distribution"
_TOOLS = "use tools and tool_choice"

FIELDS = Fields(
    honoured=(
        "model messages tools tool_choice parallel_tool_calls stream stream_options "
        "max_tokens max_completion_tokens temperature top_p top_k seed stop n logprobs "
        "top_logprobs response_format reasoning_effort chat_template_kwargs prompt_cache_key "
        "metadata"
    ),
    # The ledger keeps every turn anyway (store); a prediction makes a reply faster, never another.
    ignored=(
        "user safety_identifier store service_tier prompt_cache_retention "
        "prompt_cache_options prediction"
    ),
    neutral={
        "logit_bias": Neutral(({},), _UNTEMPERED),
        "presence_penalty": Neutral((0,), _UNTEMPERED),
        "frequency_penalty": Neutral((0,), _UNTEMPERED),
        "repetition_penalty": Neutral((1,), _UNTEMPERED),
        "min_p": Neutral((0,), _UNTEMPERED),
        "modalities": Neutral((["text"],), TEXT_ONLY),
        "audio": Neutral((), TEXT_ONLY),
        "functions": Neutral(([],), _TOOLS),
        "function_call": Neutral(("auto", "none"), _TOOLS),
        "verbosity": Neutral(("medium",), "ask for it in the prompt"),
        "web_search_options": Neutral((), "this server searches nothing; offer a tool that does"),
        "moderation": Neutral((), "nothing is moderated here"),
    },
)

_STREAM = Fields(
    "include_usage", neutral={"include_obfuscation": Neutral((False,), "no padding is sent")}
)
# What OpenAI's clients send back of an earlier reply without meaning by it.
_EMPTY: Mapping[str, Neutral] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call"),
    Neutral(("", [], {}), "it is nobody's but the assistant's, and is not read"),
)
_OTHERS = Fields("role content name", neutral=_EMPTY)
_MESSAGES = {
    **dict.fromkeys(("system", "developer", "user"), _OTHERS),
    "assistant": Fields("role content name tool_calls reasoning_content refusal", neutral=_EMPTY),
    "tool": Fields("role content name tool_call_id", neutral=_EMPTY),
}
# Hints to a cache change no reply.
_PART = Fields("type text", "cache_control prompt_cache_breakpoint")


class Chat(Format):
    """What nearly every client speaks, OpenClaw among them."""

    about = (
        "OpenAI's chat completions: POST /v1/chat/completions. In OpenClaw set api to "
        '"openai-completions" and baseUrl to this address with /v1 at its end'
    )
    routes = (
        Route("POST", "/v1/chat/completions", Purpose.TURN),
        Route("GET", "/v1/models", Purpose.MODELS),
        Route("GET", "/v1/models/{name:path}", Purpose.MODEL),
    )

    def __init__(self) -> None:
        self._known = Known()

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        new: dict[Any, Any] = {}
        return parse_chat(body, self._known.reader(user, new), new)

    def remember(self, request: GenerationRequest, user: str) -> None:
        self._known.learn(request.own)

    def forget(self) -> None:
        self._known.clear()

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return ChatReply(request, head)

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def models(self, names: Sequence[str], since: int) -> Json:
        return {"object": "list", "data": [self.model(name, since) for name in names]}

    def model(self, name: str, since: int) -> Json:
        return {"id": name, "object": "model", "created": since, "owned_by": "tinker-claw"}


def parse_chat(
    body: bytes, read: Read = anew, own: Mapping[Any, Any] | None = None
) -> GenerationRequest:
    """Read the body of POST /v1/chat/completions.

    Args:
        own: what the format needs again later.

    Raises:
        RequestError: names the first field that is malformed or cannot be honoured.
    """
    fields = load_body(body, raw=("messages", "tools"))
    FIELDS.refuse_unknown(fields)
    tools = read(_tools, fields["tools"], "tools") if "tools" in fields else ()
    calls = openai_calls(fields.get("tool_choice", "auto"), tools, nested=True)
    return GenerationRequest(
        model=model_name(fields),
        messages=_messages(fields.get("messages"), read),
        tools=calls.tools,
        may_call=calls.may,
        must_call=calls.must,
        one_call=not flag(fields.get("parallel_tool_calls"), "parallel_tool_calls", True),
        stream=flag(fields.get("stream"), "stream"),
        wants_usage=_include_usage(fields),
        max_tokens=_max_tokens(fields),
        temperature=number(fields.get("temperature", 1.0), "temperature", 0, 2),
        top_p=number(fields.get("top_p", 1.0), "top_p", 0, 1, open_low=True),
        top_k=_top_k(fields),
        seed=integer(fields["seed"], "seed", -INT64, INT64) if "seed" in fields else None,
        stop=stop_strings(fields.get("stop"), "stop"),
        schema=schema_of(fields.get("response_format"), "response_format", "json_schema"),
        top_logprobs=_top_logprobs(fields),
        choices=_choices(fields),
        template=_template(fields),
        reasoning_effort=effort_level(fields.get("reasoning_effort"), "reasoning_effort"),
        session=cache_session(fields),
        attempt=attempt_in(fields.get("metadata")),
        own=own or {},
    )


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = _STREAM.members(fields.get("stream_options"), "stream_options")
    return flag(options.get("include_usage"), "stream_options.include_usage")


def _top_logprobs(fields: Mapping[str, Any]) -> int | None:
    name = "top_logprobs"
    most = integer(fields.get(name, 0), name, 0, MOST_LOGPROBS + 1)
    if flag(fields.get("logprobs"), "logprobs"):
        return most
    if most:
        raise RequestError(f"{name} is told with logprobs: true only.", param=name)
    return None


def _choices(fields: Mapping[str, Any]) -> int:
    asked = integer(fields.get("n", 1), "n", 1, MOST_CHOICES + 1)
    if asked > 1 and fields.get("stream"):
        raise RequestError("n: one reply is streamed; several come whole.", param="n")
    return asked


def _template(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    options = members(fields.get(name), name)
    for option, value in options.items():
        if not isinstance(value, str | int | float):
            where = f"{name}.{shown(option)}"
            raise RequestError(f"{where} must be a string, a number or a boolean.", param=where)
    return options


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


def _tools(raw: Any, at: str) -> KnownTools:
    """Check the shape of tools. Schemas go into the prompt as they came, and bind no reply."""
    listed = items(raw, at)
    tools = KnownTools([_tool(tool, f"{at}[{i}]") for i, tool in enumerate(listed)])
    refuse_deep(listed)
    return tools


def _tool(raw: Any, at: str) -> Tool:
    tool = members(raw, at)
    if tool.get("type") != "function":
        raise RequestError(f"{at} must be an object of type function.", param=at)
    check_function(members(tool.get("function"), f"{at}.function"), f"{at}.function")
    return raw


def _messages(raw: Raw | None, read: Read) -> tuple[Message, ...]:
    """Check `messages`. Content leaves here as one string, which knows its parts; what this model
    cannot read (images, audio, files) is never skipped.

    Raises:
        RequestError: names the message and the field.
    """
    messages = raw_items(raw, "messages")
    if not messages:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    return tuple([read(_message, said, f"messages[{i}]") for i, said in enumerate(messages)])


def _message(raw: Any, at: str) -> KnownMessage:
    given = members(raw, at)
    role = given.get("role")
    if not isinstance(role, str) or role not in _MESSAGES:
        raise RequestError(f"{at}.role must be one of {', '.join(_MESSAGES)}.", param=f"{at}.role")
    _MESSAGES[role].refuse_unknown(given, f"{at}.")
    message = _assistant(given, at) if role == "assistant" else _other(given, role, at)
    if "name" in given:
        message["name"] = string(given["name"], f"{at}.name")
    return KnownMessage(message)


def _other(given: dict[str, Any], role: str, at: str) -> dict[str, Any]:
    """A message of anyone but the assistant."""
    if "content" not in given:
        raise RequestError(f"{at}.content is missing.", param=f"{at}.content")
    message = {
        # OpenAI's newer name for the same role.
        "role": "system" if role == "developer" else role,
        "content": text_of(given["content"], f"{at}.content", _part),
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
    content = text_of(given["content"], f"{at}.content", _part) if "content" in given else ""
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
    call = members(raw, at)
    if call.get("type", "function") != "function":
        raise RequestError(f"{at}.type must be function.", param=f"{at}.type")
    function = members(call.get("function"), f"{at}.function")
    return function_call(
        string(call.get("id"), f"{at}.id"),
        string(function.get("name"), f"{at}.function.name"),
        string(function.get("arguments"), f"{at}.function.arguments", empty=True),
    )


def _part(raw: Any, at: str) -> str:
    part = members(raw, at)
    kind = part.get("type")
    if kind == "refusal":
        return string(part.get("refusal"), f"{at}.refusal", empty=True)
    if kind != "text":
        raise unreadable(kind, at)
    _PART.refuse_unknown(part, f"{at}.")
    return string(part.get("text"), f"{at}.text", empty=True)
