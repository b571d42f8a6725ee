"""Anthropic's Messages: every field of a request, and how it is handled.

Rule: a request is converted to the messages that a chat template knows: the system text comes
first, tool results are messages of their own, and consecutive replies are merged. Thinking is
returned if the client asks for it; it is sampled and trained either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    GenerationRequest,
    Json,
    ReplyHead,
    ReplyWriter,
    Route,
    bearer,
)
from tinker_claw.formats.body import (
    INT64,
    NO_ITEMS,
    CachingFormat,
    Fields,
    Neutral,
    Object,
    PartReader,
    members,
    raw_items,
)
from tinker_claw.formats.fields import (
    PLAIN_TEXT,
    arguments_of,
    assistant,
    common,
    conversation,
    effort_level,
    forced,
    function_call,
    function_tool,
    name_of,
    offered,
    refuse_deep,
    result,
    stop_strings,
    system_message,
    top_k,
    unmade_edits,
)
from tinker_claw.formats.messages_reply import MessagesReply, error_body
from tinker_claw.formats.parts import (
    READS_TEXT,
    answered,
    attached,
    joined,
    kind_of,
    line,
    plain_part,
    read_parts,
    seen_part,
    unreadable,
    with_parts,
)
from tinker_claw.images import MessagePart
from tinker_claw.types import KnownMessage, KnownTools, Message, Tool

STOP_SEQUENCES = 64
"""Most stop sequences of a request."""
_RUNS_NOTHING = "this server runs no tools itself; offer your own"

FIELDS = Fields(
    honoured=(
        "model messages system max_tokens metadata stop_sequences stream temperature top_p "
        "top_k thinking output_config tools tool_choice context_management"
    ),
    # Prompts are cached without being asked (cache_control).
    ignored=(
        "cache_control service_tier speed user_profile_id workspace_id billing_policy "
        "fallback_credit_token"
    ),
    neutral={
        "container": Neutral(_RUNS_NOTHING),
        "mcp_servers": Neutral(_RUNS_NOTHING, []),
        "diagnostics": Neutral("a reply comes without diagnostics"),
        "inference_geo": Neutral("replies are sampled where the model runs"),
        "fallbacks": Neutral("one model is served here", []),
        "compaction": Neutral("ask for a summary in a message"),
        "thread": Neutral("send the whole conversation"),
    },
)

_USUAL = "high"
"""The default effort: equal to naming none."""

_TOOL = Fields(
    honoured="type name description input_schema strict",
    # A call comes when it is complete, and the model is shown all tools at once.
    ignored="cache_control eager_input_streaming defer_loading",
    neutral={
        "allowed_callers": Neutral(_RUNS_NOTHING, ["direct"]),
        "input_examples": Neutral("write them into the description", []),
    },
)
_METADATA = Fields("user_id")
_THINKING = Fields("type budget_tokens display")
_OUTPUT = Fields("effort", neutral={"format": PLAIN_TEXT})
_MANAGEMENT = Fields("edits")
_CHOICE = Fields("type name disable_parallel_tool_use")
_ROLES = ("user", "assistant", "system")
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_RESULT = "tool_result"
"""How the types of blocks end that hold the result of a call."""
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\s*")
"""Line for Anthropic's accounts before the system text. Claude Code writes another into every
request, so that no prompt would begin like the one before."""
# Session in the user_id of clients that write more than an account there.
_SESSION = re.compile(r"_session_([0-9a-f-]{36})\Z")


class Messages(CachingFormat):
    """Anthropic's Messages, which its clients use, Claude Code among them."""

    about = (
        "Anthropic's Messages: POST /v1/messages. For Claude Code set ANTHROPIC_BASE_URL to this "
        "address without a path, and each of its models (docs/clients.md) to the model's name"
    )
    routes = (
        Route("POST", "/v1/messages", "turn"),
        Route("POST", "/v1/messages/count_tokens", "count"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{name:path}", "model"),
    )
    fields = FIELDS
    raw = ("messages", "tools")
    key_header = "x-api-key"

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/messages") or "anthropic-version" in headers

    def keys(self, headers: Mapping[str, str]) -> Sequence[str]:
        # Some clients send a placeholder in one header, and the key in the other.
        return headers.get("x-api-key", "").strip(), bearer(headers)

    def request(self, fields: Object, route: Route, reader: PartReader) -> GenerationRequest:
        if route.purpose == "turn" and "max_tokens" not in fields:
            raise fields.wrong("is missing", "max_tokens")
        choice = fields.object("tool_choice", _CHOICE)
        output = fields.object("output_config", _OUTPUT)
        effort, effort_at, shows = _thinking(fields, output)
        tools, missing = reader.read(_tools, fields.get("tools", NO_ITEMS), "tools")
        system = _system(fields, reader)
        sent = raw_items(fields, "messages", "a list of at least one message")
        messages, places = conversation(sent, _messages, "messages", reader)
        edits = fields.object("context_management", _MANAGEMENT).objects("edits")
        return GenerationRequest(
            **common(fields, 1, "max_tokens"),
            **_calls(fields, choice, tools),
            messages=(*system, *messages),
            places=(*("system" for _ in system), *places),
            one_call=choice.flag("disable_parallel_tool_use"),
            top_k=top_k(fields),
            stop=stop_strings(fields, "stop_sequences", STOP_SEQUENCES),
            reasoning_effort=effort,
            effort_at=effort_at,
            session=_session(fields.object("metadata", _METADATA)),
            left_out=(*missing, *unmade_edits(edits)),
            own={"thinking": shows},
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return MessagesReply(request, head, shows=request.own["thinking"])

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def models(self, names: Sequence[str], since: int) -> Json:
        return {
            "data": [self.model(name, since) for name in names],
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,
        }

    def model(self, name: str, since: int) -> Json:
        created = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created,
            "lifecycle": "active",
        }

    def counted(self, tokens: int) -> Json:
        return {"input_tokens": tokens}


def _session(metadata: Object) -> tuple[str, str] | None:
    """The session in `user_id`, which names a user, and with some clients their session, too."""
    user, where = metadata.text("user_id"), metadata.place("user_id")
    if match := _SESSION.search(user):
        return match[1], where
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        return None
    named = members(parsed).get("session_id")
    return (named, where) if named and isinstance(named, str) else None


def _thinking(fields: Object, output: Object) -> tuple[str | None, str, bool]:
    """The effort, the field that sets it, and whether thinking is shown."""
    effort, thinking = effort_level(output, "effort"), fields.object("thinking", _THINKING)
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive")) if thinking else None
    thinking.integer("budget_tokens", 1, INT64)  # only checked: it is an upper bound
    display = thinking.one_of("display", ("summarized", "omitted"), "summarized")
    if kind == "disabled":
        return "none", thinking.place("type"), False
    shows = kind is not None and display == "summarized"
    if kind == "enabled" and effort is None:
        return _USUAL, thinking.place("type"), shows
    usual = kind != "enabled" and effort == _USUAL
    return None if usual else effort, output.place("effort"), shows


def _tools(raw: Any, at: str) -> tuple[KnownTools, tuple[str, ...]]:
    tools = Object({at: raw}).objects(at)
    for tool in tools:
        tool.setdefault("type", "custom")
    return offered(tools, "custom", _tool, "offer your own.")


def _calls(fields: Object, choice: Object, tools: KnownTools) -> Json:
    """Read `tool_choice`."""
    kind = choice.get("type", "auto")
    if kind in ("any", "tool"):
        name = choice.string("name") if kind == "tool" else None
        if fields.object("thinking").get("type") == "enabled":
            raise RequestError(
                "tool_choice begins the reply with a call, so thinking cannot be enabled: disable "
                "it, or send auto.",
                param="tool_choice",
            )
        return forced(tools, name, choice.at)
    if kind not in ("auto", "none"):
        raise choice.wrong("must be auto, any, tool or none", "type")
    return {"tools": tools} if kind == "auto" else {"may_call": False}


def _tool(tool: Object) -> Tool:
    refuse_deep(tool)
    if "input_schema" not in _TOOL.check(tool):
        raise tool.wrong("is missing", "input_schema")
    return function_tool(tool, "input_schema")


def _system(fields: Object, reader: PartReader) -> list[Message]:
    system = fields.get("system", "")
    whole = isinstance(system, str)
    sent = [system] if whole else [_text(block) for block in fields.objects("system")]
    texts = [stripped for text in sent if (stripped := _BILLING.sub("", text))]
    # By its text: Claude Code's billing line, which is gone by now, is another in every request.
    return [system_message(texts, reader)] if texts else []


def _text(block: Object) -> str:
    if block.get("type") != "text":
        raise unreadable(block)
    return block.string("text", empty=True)


def _messages(fields: Object) -> list[KnownMessage]:
    """Convert one message of the client's into neutral messages."""
    role = fields.one_of("role", _ROLES)
    content = fields.get("content", [])
    if not isinstance(content, list):
        return [with_parts({"role": role}, read_parts(fields, "content", plain_part))]
    items = (
        {"type": "text", "text": item} if isinstance(item, str) else item
        for item in cast("list[Any]", content)
    )
    blocks = [Object(item, f"{fields.at}.content[{i}]") for i, item in enumerate(items)]
    return _replies(blocks) if role == "assistant" else _others(blocks, role)


def _others(blocks: Sequence[Object], role: str) -> list[KnownMessage]:
    """Messages of anyone but the assistant: results of tools first, as they answer its calls."""
    results = [_result(block) for block in blocks if kind_of(block).endswith(_RESULT)]
    read = seen_part if role == "user" else plain_part
    others = [block for block in blocks if not kind_of(block).endswith(_RESULT)]
    if not others and results:
        return results
    parts = list[MessagePart]()
    for block in others:
        kind = kind_of(block)
        parts += [attached(line(READS_TEXT, kind))] if kind in _CALLS else read(block)
    return [*results, with_parts({"role": role}, joined(parts))]


def _replies(blocks: Sequence[Object]) -> list[KnownMessage]:
    """Messages of one by the assistant: what a service's own tools answered in its middle is a
    result like any other, and what follows another reply."""
    messages, parts = list[KnownMessage](), list[MessagePart]()
    thought, calls = list[str](), list[Any]()
    for block in blocks:
        kind = kind_of(block)
        if kind.endswith(_RESULT):
            if parts or thought or calls:
                messages.append(assistant(parts, thought, calls))
                parts, thought, calls = [], [], []
            messages.append(_result(block))
        elif kind in _CALLS:
            calls.append(_call(block))
        elif kind == "thinking":
            thought.append(block.text("thinking"))
        elif kind == "compaction" and isinstance(block.get("content"), str):
            parts.append(MessagePart(block["content"]))
        else:
            parts += plain_part(block)
    if parts or thought or calls or not messages:
        messages.append(assistant(parts, thought, calls))
    return messages


def _call(block: Object) -> dict[str, Any]:
    return function_call(block.text("id"), name_of(block), arguments_of(block, "input"))


def _result(block: Object) -> KnownMessage:
    if kind_of(block) == _RESULT:
        parts = read_parts(block, "content", seen_part)
    else:
        parts = answered(block.get("content"), block.place("content"))
    failed = [MessagePart("Error: ")] if block.flag("is_error") else []
    return result(block.text("tool_use_id"), joined([*failed, *parts], glued=True))
