"""OpenAI's chat completions: every field of a request, and how it is handled.

Rule: what depends on the model's chat template is read here and checked later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    GenerationRequest,
    Json,
    ReplyHead,
    ReplyWriter,
    Route,
)
from tinker_claw.formats.body import (
    INT64,
    CachingFormat,
    Fields,
    Neutral,
    Object,
    Read,
    anew,
    load_body,
    raw_items,
)
from tinker_claw.formats.chat_reply import ChatReply, error_body
from tinker_claw.formats.fields import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    TEXT_ONLY,
    effort_level,
    function_call,
    function_tool,
    image_url,
    openai,
    refuse_deep,
    schema_of,
    stop_strings,
    text_of,
    unreadable,
)
from tinker_claw.types import KnownMessage, KnownTools, Message

_UNTEMPERED = "replies are drawn from the model's own distribution"
_TOOLS = "use tools and tool_choice"

FIELDS = Fields(
    honoured=(
        "model messages tools tool_choice parallel_tool_calls stream stream_options "
        "max_tokens max_completion_tokens temperature top_p top_k seed stop n logprobs "
        "top_logprobs response_format reasoning_effort chat_template_kwargs prompt_cache_key"
    ),
    # The ledger keeps every turn anyway (store); a prediction makes a reply faster, never another.
    ignored=(
        "user safety_identifier store service_tier prompt_cache_retention "
        "prompt_cache_options prediction metadata"
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
# Fields of an earlier reply that OpenAI's clients send back empty.
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
_HINTS = "cache_control prompt_cache_breakpoint"
_PART = Fields("type text", _HINTS)
_IMAGE = Fields("type image_url", _HINTS)
_URL = Fields("url", "detail")  # the model's own files set the tokens of an image


class Chat(CachingFormat):
    """OpenAI's chat completions, which nearly every client uses, OpenClaw among them."""

    about = (
        "OpenAI's chat completions: POST /v1/chat/completions. In OpenClaw set api to "
        '"openai-completions" and baseUrl to this address with /v1 at its end'
    )
    routes = (
        Route("POST", "/v1/chat/completions", "turn"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{name:path}", "model"),
    )

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        read, own = self._reading(user)
        return parse_chat(body, read, own)

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
    fields = FIELDS.check(load_body(body, raw=("messages", "tools")))
    tools = read(_tools, fields["tools"], "tools") if "tools" in fields else ()
    return GenerationRequest(
        **openai(fields, tools, "max_completion_tokens", "max_tokens", nested=True),
        messages=_messages(fields.get("messages"), read),
        wants_usage=fields.object("stream_options", _STREAM).flag("include_usage"),
        top_k=_top_k(fields),
        seed=fields.integer("seed", -INT64, INT64),
        stop=stop_strings(fields, "stop"),
        schema=schema_of(fields, "response_format", "json_schema"),
        top_logprobs=_top_logprobs(fields),
        choices=_choices(fields),
        template=fields.scalars("chat_template_kwargs", "must be a string, a number or a boolean"),
        reasoning_effort=effort_level(fields, "reasoning_effort"),
        own=own or {},
    )


def _top_logprobs(fields: Object) -> int | None:
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS + 1) or 0
    if fields.flag("logprobs"):
        return most
    if most:
        raise fields.wrong("needs logprobs: true", "top_logprobs")
    return None


def _choices(fields: Object) -> int:
    asked = fields.integer("n", 1, MOST_CHOICES + 1) or 1
    if asked > 1 and fields.get("stream"):
        raise RequestError("n: several replies cannot be streamed; send stream: false.", param="n")
    return asked


def _top_k(fields: Object) -> int | None:
    value = fields.get("top_k")
    if type(value) is int and value in (0, -1):
        return None  # in use elsewhere for "all tokens"
    return fields.integer("top_k", 1, INT64)


def _tools(raw: Any, at: str) -> KnownTools:
    """Check the shape of tools. They go into the prompt unchanged, and constrain no reply."""
    for tool in Object({at: raw}).objects(at, required=True):
        if tool.get("type") != "function":
            raise tool.wrong("must be an object of type function")
        function_tool(tool.object("function"))
        refuse_deep(tool)
    return KnownTools(raw)


def _messages(raw: Raw | None, read: Read) -> tuple[Message, ...]:
    """Check `messages`. Content becomes one string, which knows its parts and images; parts that
    are not read here (audio, files) are refused, never skipped.

    Raises:
        RequestError: names the message and the field.
    """
    messages = raw_items(raw, "messages")
    if not messages:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    return tuple([read(_message, said, f"messages[{i}]") for i, said in enumerate(messages)])


def _message(raw: Any, at: str) -> KnownMessage:
    given = Object(raw, at)
    role = given.get("role")
    if not isinstance(role, str) or role not in _MESSAGES:
        raise given.wrong(f"must be one of {', '.join(_MESSAGES)}", "role")
    _MESSAGES[role].check(given)
    message = _assistant(given) if role == "assistant" else _other(given, role)
    if "name" in given:
        message["name"] = given.string("name")
    return KnownMessage(message)


def _other(given: Object, role: str) -> dict[str, Any]:
    """A message of anyone but the assistant."""
    if "content" not in given:
        raise given.wrong("is missing", "content")
    message = {
        # OpenAI's newer name for the same role.
        "role": "system" if role == "developer" else role,
        "content": text_of(given, "content", _seen if role in ("user", "tool") else _part),
    }
    if role == "tool":
        message["tool_call_id"] = given.string("tool_call_id")
    return message


def _assistant(given: Object) -> dict[str, Any]:
    calls = [_call(call) for call in given.objects("tool_calls")]
    refusal = given.optional("refusal", empty=True) or ""
    if "content" not in given and not calls and not refusal:
        raise given.wrong("is missing, and there are no tool_calls", "content")
    # A refusal is what the assistant said instead.
    content = text_of(given, "content", _part) if "content" in given else ""
    message: dict[str, Any] = {"role": "assistant", "content": content + refusal}
    if calls:
        message["tool_calls"] = calls
    if "reasoning_content" in given:
        message["reasoning_content"] = given.string("reasoning_content", empty=True)
    return message


def _call(call: Object) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise call.wrong("must be function", "type")
    function = call.object("function")
    name, arguments = function.string("name"), function.string("arguments", empty=True)
    return function_call(call.string("id"), name, arguments)


def _part(part: Object) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return part.string("refusal", empty=True)
    if kind != "text":
        raise unreadable(part)
    return _PART.check(part).string("text", empty=True)


def _seen(part: Object) -> str:
    """A part of a message that may hold images."""
    if part.get("type") != "image_url":
        return _part(part)
    return image_url(_IMAGE.check(part).object("image_url", _URL))
