"""OpenAI's chat completions: every field of a request, and how it is handled.

Rule: what depends on the model's chat template is read here and checked later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    NO_ITEMS,
    CachingFormat,
    Fields,
    Neutral,
    Object,
    PartReader,
    raw_items,
)
from tinker_claw.formats.chat_reply import ChatReply, error_body
from tinker_claw.formats.fields import (
    PLAIN_TEXT,
    TEXT_ONLY,
    arguments_of,
    assistant,
    effort_level,
    function_call,
    function_tool,
    item_messages,
    name_of,
    offered,
    openai,
    paired,
    refuse_deep,
    result,
    stop_strings,
    top_k,
    unmet_verbosity,
)
from tinker_claw.formats.parts import (
    READS_TEXT,
    as_text,
    line,
    plain_part,
    read_parts,
    seen_part,
    thought_in,
    with_parts,
)
from tinker_claw.images import MessagePart
from tinker_claw.types import KnownMessage, KnownTools, Tool

_UNTEMPERED = "replies are drawn from the model's own distribution; leave it out"
_TOOLS = "use tools and tool_choice"
_NO_LOGPROBS = "no logprobs are returned; the ledger has them (export --tokens)"

FIELDS = Fields(
    honoured=(
        "model messages tools tool_choice parallel_tool_calls stream stream_options "
        "max_tokens max_completion_tokens temperature top_p top_k seed stop "
        "reasoning_effort verbosity chat_template_kwargs prompt_cache_key"
    ),
    # The ledger keeps every turn anyway (store); a prediction makes a reply faster, never another.
    ignored=(
        "user safety_identifier store service_tier prompt_cache_retention "
        "prompt_cache_options prediction metadata"
    ),
    neutral={
        "n": Neutral("a request has one reply; send it again for another", 1),
        "logprobs": Neutral(_NO_LOGPROBS, False),
        "top_logprobs": Neutral(_NO_LOGPROBS, 0),
        "response_format": PLAIN_TEXT,
        "logit_bias": Neutral(_UNTEMPERED, {}),
        "presence_penalty": Neutral(_UNTEMPERED, 0),
        "frequency_penalty": Neutral(_UNTEMPERED, 0),
        "repetition_penalty": Neutral(_UNTEMPERED, 1),
        "min_p": Neutral(_UNTEMPERED, 0),
        "modalities": Neutral(TEXT_ONLY, ["text"]),
        "audio": Neutral(TEXT_ONLY),
        "functions": Neutral(_TOOLS, []),
        "function_call": Neutral(_TOOLS, "auto", "none"),
        "web_search_options": Neutral("this server searches nothing; offer a tool that does"),
        "moderation": Neutral("nothing is moderated here"),
    },
)

_STREAM = Fields(
    "include_usage", neutral={"include_obfuscation": Neutral("no padding is sent", False)}
)
# Roles of messages: developer is OpenAI's newer name for system, function its older one for tool.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_THOUGHT = ("reasoning_content", "reasoning", "reasoning_text")
"""Names that servers give to the thinking of their replies."""


class Chat(CachingFormat):
    """OpenAI's chat completions, which nearly every client uses, OpenClaw among them."""

    about = (
        "OpenAI's chat completions: POST /v1/chat/completions. In OpenClaw set api to "
        '"openai-completions" and baseUrl to this address with /v1 at its end'
    )
    fields = FIELDS
    raw = ("messages", "tools")
    routes = (
        Route("POST", "/v1/chat/completions", "turn"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{name:path}", "model"),
    )

    def request(self, fields: Object, route: Route, reader: PartReader) -> GenerationRequest:
        tools, missing = reader.read(_tools, fields.get("tools", NO_ITEMS), "tools")
        sent = raw_items(fields, "messages", "a list of at least one message")
        messages = (
            message
            for i, raw in enumerate(sent)
            for message in item_messages(_message, raw, f"messages[{i}]", reader)
        )
        template_value = "must be a string, a number or a boolean"
        return GenerationRequest(
            **openai(fields, tools, "max_completion_tokens", "max_tokens", nested=True),
            messages=tuple(paired(messages)),
            wants_usage=fields.object("stream_options", _STREAM).flag("include_usage"),
            top_k=top_k(fields),
            seed=fields.integer("seed", -INT64, INT64),
            stop=stop_strings(fields, "stop"),
            template=fields.scalars("chat_template_kwargs", template_value),
            reasoning_effort=effort_level(fields, "reasoning_effort"),
            left_out=(*missing, *unmet_verbosity(fields)),
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return ChatReply(request, head)

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def models(self, names: Sequence[str], since: int) -> Json:
        return {"object": "list", "data": [self.model(name, since) for name in names]}

    def model(self, name: str, since: int) -> Json:
        return {"id": name, "object": "model", "created": since, "owned_by": "tinker-claw"}


def _tools(raw: Any, at: str) -> tuple[KnownTools, tuple[str, ...]]:
    tools = Object({at: raw}).objects(at, required=True)
    return offered(tools, "function", _function, "offer functions.")


def _function(tool: Object) -> Tool:
    """Check a function's shape. It goes into the prompt unchanged, and constrains no reply."""
    function_tool(tool.object("function"))
    refuse_deep(tool)
    return {**tool}


def _message(fields: Object) -> list[KnownMessage]:
    """Convert a message. Content becomes one string, which knows its parts and images. Members that
    are not known are other servers' notes on their replies, and passed over."""
    role = fields.one_of("role", _ROLES)
    message = _assistant(fields) if role == "assistant" else _other(fields, _ROLES[role])
    if name := fields.text("name"):
        message["name"] = name
    return [message]


def _other(fields: Object, role: str) -> KnownMessage:
    """A message of anyone but the assistant."""
    content = read_parts(fields, "content", plain_part if role == "system" else seen_part)
    if role == "tool":
        return result(fields.text("tool_call_id"), content)
    return with_parts({"role": role}, content)


def _assistant(fields: Object) -> KnownMessage:
    calls = [_call(call) for call in fields.objects("tool_calls")]
    if "function_call" in fields:
        calls.append(_called("", fields.object("function_call")))
    # A refusal is what the assistant said instead.
    parts = [
        *read_parts(fields, "content", plain_part, glued=True),
        MessagePart(fields.text("refusal")),
    ]
    if "audio" in fields:
        parts.append(MessagePart(line(READS_TEXT, "audio")))
    # "" is sent by agents whose service demands the field.
    thought = [text for name in _THOUGHT if isinstance(text := fields.get(name), str)]
    return assistant(parts, thought[:1] or thought_in(fields.get("content")), calls)


def _call(call: Object) -> dict[str, Any]:
    """A call in the history, whatever kind of tool it was."""
    id, kind = call.text("id"), call.get("type", "function")
    if kind != "function" and isinstance(kind, str):
        custom = call.object(kind)
        return function_call(id, name_of(custom), as_text({"input": custom.get("input")}))
    return _called(id, call.object("function"))


def _called(id: str, function: Object) -> dict[str, Any]:
    return function_call(id, name_of(function), arguments_of(function, "arguments"))
