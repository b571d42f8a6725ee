"""Anthropic's Messages: every field of a request, and how it is handled.

Rule: a request is converted to the messages that a chat template knows: the system text comes
first, tool results are messages of their own, and consecutive replies are merged. Thinking is
returned if the client asks for it; it is sampled and trained either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
    CachingFormat,
    Fields,
    Neutral,
    Object,
    Read,
    load_body,
    raw_items,
    written,
)
from tinker_claw.formats.fields import (
    Calls,
    assistant,
    common,
    conversation,
    effort_level,
    forced,
    function_call,
    function_tool,
    image_source,
    joined,
    one_reply,
    refuse_deep,
    schema_of,
    stop_strings,
    system_message,
    text_of,
    unreadable,
)
from tinker_claw.formats.messages_reply import MessagesReply, error_body
from tinker_claw.types import KnownMessage, KnownTools, Message, Tool

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
        "container": Neutral((), _RUNS_NOTHING),
        "mcp_servers": Neutral(([],), _RUNS_NOTHING),
        "diagnostics": Neutral((), "a reply comes without diagnostics"),
        "inference_geo": Neutral((), "replies are sampled where the model runs"),
        "fallbacks": Neutral(([],), "one model is served here"),
        "compaction": Neutral((), "ask for a summary in a message"),
        "thread": Neutral((), "send the whole conversation"),
    },
)

_USUAL = "high"
"""The default effort: equal to naming none."""

_TOOL = Fields(
    honoured="type name description input_schema strict",
    ignored="cache_control eager_input_streaming",  # a call comes when it is complete
    neutral={
        "defer_loading": Neutral((False,), "all tools are shown to the model"),
        "allowed_callers": Neutral((["direct"],), _RUNS_NOTHING),
        "input_examples": Neutral(([],), "write them into the description"),
    },
)
_METADATA = Fields("user_id")
_THINKING = Fields("type budget_tokens display")
_OUTPUT = Fields("effort format")
_MANAGEMENT = Fields("edits")
_CHOICE = Fields("type name disable_parallel_tool_use")
_MESSAGE = Fields("role content")
_BLOCKS = {
    "text": Fields("type text", "cache_control citations"),
    "image": Fields("type source", "cache_control"),
    "thinking": Fields("type thinking", "cache_control signature"),
    "redacted_thinking": Fields("type", "cache_control data"),
    "tool_use": Fields("type id name input", "cache_control caller"),
    "tool_result": Fields("type tool_use_id content is_error", "cache_control"),
}
_BY: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "image", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\s*")
"""Line for Anthropic's accounts before the system text. Claude Code writes another into every
request, so that no prompt would begin like the one before."""
# Session in the user_id of clients that write more than an account there.
_SESSION = re.compile(r"_session_([0-9a-f-]{36})\Z")


class Messages(CachingFormat):
    """Anthropic's Messages, which its clients use, Claude Code among them."""

    about = (
        "Anthropic's Messages: POST /v1/messages. For Claude Code set ANTHROPIC_BASE_URL to this "
        "address without a path, and ANTHROPIC_MODEL to the model's name"
    )
    routes = (
        Route("POST", "/v1/messages", "turn"),
        Route("POST", "/v1/messages/count_tokens", "count"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{name:path}", "model"),
    )
    key_place = "x-api-key"

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/messages") or "anthropic-version" in headers

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "").strip() or bearer(headers)

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        read, own = self._reading(user)
        fields = FIELDS.check(load_body(body, raw=("messages", "tools")))
        if route.purpose == "turn" and "max_tokens" not in fields:
            raise fields.wrong("is missing", "max_tokens")
        choice = fields.object("tool_choice", _CHOICE)
        output = fields.object("output_config", _OUTPUT)
        effort, effort_at, shows = _thinking(fields, output)
        _check_edits(fields)
        said = [*_system(fields, read), *_conversation(fields, read)]
        return GenerationRequest(
            **common(fields, 1, "max_tokens"),
            **_calls(fields, choice, read),
            messages=tuple(said),
            one_call=choice.flag("disable_parallel_tool_use"),
            top_k=fields.integer("top_k", 1, INT64),
            stop=stop_strings(fields, "stop_sequences"),
            schema=schema_of(output, "format"),
            reasoning_effort=effort,
            effort_at=effort_at,
            session=_session(fields.object("metadata", _METADATA)),
            own=own | {"thinking": shows},
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
    user, where = metadata.optional("user_id", empty=True) or "", metadata.place("user_id")
    if found := _SESSION.search(user):
        return found[1], where
    try:
        told = json.loads(user)
    except (ValueError, RecursionError):
        return None
    named = cast("dict[str, Any]", told).get("session_id") if isinstance(told, dict) else None
    return (named, where) if named and isinstance(named, str) else None


def _thinking(fields: Object, output: Object) -> tuple[str | None, str, bool]:
    """The effort, the field that sets it, and whether thinking is shown."""
    effort, given = effort_level(output, "effort"), fields.object("thinking", _THINKING)
    kind = given.get("type")
    if kind not in ("enabled", "disabled", "adaptive", None) or (given and kind is None):
        raise given.wrong("must be enabled, disabled or adaptive", "type")
    given.integer("budget_tokens", 1, INT64)  # only checked: it is an upper bound
    display = given.get("display", "summarized")
    if display not in ("summarized", "omitted"):
        raise given.wrong("must be summarized or omitted", "display")
    shows = kind in ("enabled", "adaptive") and display == "summarized"
    at = output.place("effort")
    if kind == "disabled":
        effort, at = "none", given.place("type")
    elif kind == "enabled" and effort is None:
        effort, at = _USUAL, given.place("type")
    elif kind != "enabled" and effort == _USUAL:
        effort = None
    return effort, at, shows


def _check_edits(fields: Object) -> None:
    """Accept edits of thinking only: the chat template decides which thinking is shown again, and
    nothing else of a history is removed."""
    for edit in fields.object("context_management", _MANAGEMENT).objects("edits"):
        kind = edit.get("type")
        if not isinstance(kind, str) or not kind.startswith("clear_thinking"):
            raise edit.wrong("is not supported: nothing is taken out of a history here")


def _calls(fields: Object, choice: Object, read: Read) -> Calls:
    """Read tools and `tool_choice`."""
    tools = read(_tools, fields["tools"], "tools") if "tools" in fields else KnownTools(())
    kind = choice.get("type", "auto")
    if kind in ("any", "tool"):
        name = choice.string("name") if kind == "tool" else None
        if fields.object("thinking").get("type") == "enabled":
            raise RequestError(
                "tool_choice begins the reply with a call, so thinking cannot be enabled.",
                param="tool_choice",
            )
        return forced(tools, name, choice.at)
    if kind not in ("auto", "none"):
        raise choice.wrong("must be auto, any, tool or none", "type")
    return {"tools": tools} if kind == "auto" else {"may_call": False}


def _tools(raw: Any, at: str) -> KnownTools:
    return KnownTools([_tool(tool) for tool in Object({at: raw}).objects(at)])


def _tool(given: Object) -> Tool:
    if given.get("type", "custom") != "custom":
        kind = given.string("type")[:80]
        why = f"is of type {kind}, but {_RUNS_NOTHING}, with a name and an input_schema"
        raise given.wrong(why)
    refuse_deep(given)
    if "input_schema" not in _TOOL.check(given):
        raise given.wrong("is missing", "input_schema")
    return function_tool(given, "input_schema")


def _system(fields: Object, read: Read) -> list[Message]:
    texts = [fields.get("system", "")]
    if not isinstance(texts[0], str):
        texts = [_text_in(_checked(block, "system")) for block in fields.objects("system")]
    texts = [said for text in texts if (said := _BILLING.sub("", text))]
    # By its text: Claude Code's billing line, which is gone by now, is another in every request.
    return [read(system_message, written(texts), "system")] if texts else []


def _conversation(fields: Object, read: Read) -> list[Message]:
    sent = raw_items(fields.get("messages"), "messages")
    if not sent:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    said = conversation(sent, _known_messages, _known_reply, "messages", read)
    if said[-1]["role"] == "assistant":
        why = "is the assistant's: a reply cannot be begun for the model here"
        raise Object({}, f"messages[{len(sent) - 1}]").wrong(why)
    return said


def _known_messages(raw: Any, at: str) -> tuple[KnownMessage, ...]:
    return tuple(map(KnownMessage, _messages(Object(raw, at))))


def _known_reply(raw: list[Any], at: str) -> KnownMessage:
    return KnownMessage(one_reply([said for one in raw for said in _known_messages(one, at)]))


def _messages(given: Object) -> list[Message]:
    """Convert one message of the client's into neutral messages."""
    role = given.get("role")
    if not isinstance(role, str) or role not in _BY:
        raise given.wrong(f"must be one of {', '.join(_BY)}", "role")
    content = _MESSAGE.check(given).get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_checked(block, role) for block in given.objects("content", required=True)]
    kinds = [block["type"] for block in blocks]

    def read(kind: str, make: Callable[[Object], Any]) -> list[Any]:
        return [make(block) for block in blocks if block["type"] == kind]

    texts = [_text_in(block) for block in blocks if block["type"] in ("text", "image")]
    if role == "assistant":
        thought = read("thinking", lambda block: block.string("thinking", empty=True))
        return [assistant(texts, thought, read("tool_use", _call))]
    if not blocks:
        raise given.wrong("must be a string or a list of blocks", "content")
    results = read("tool_result", _result)
    if "tool_result" in kinds[len(results) :]:
        raise given.wrong("has results of tools behind text; they must come before it", "content")
    return [*results, *([{"role": role, "content": joined(texts)}] if texts else [])]


def _checked(block: Object, role: str) -> Object:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise unreadable(block)
    if kind not in _BY[role]:
        raise block.wrong(f"is of type {kind}, which is not the {role}'s")
    return _BLOCKS[kind].check(block)  # redacted thinking, another server's, is not read


def _text_in(block: Object) -> str:
    if block["type"] == "image":
        return image_source(block.object("source"))
    return block.string("text", empty=True)


def _resulting(block: Object) -> str:
    """A block in the result of a tool."""
    if block.get("type") == "tool_result":
        raise unreadable(block)
    return _text_in(_checked(block, "user"))


def _call(block: Object) -> dict[str, Any]:
    if "input" not in block:
        raise block.wrong("must be an object", "input")
    refuse_deep(block.object("input"))
    arguments = json.dumps(block["input"], ensure_ascii=False, separators=(",", ":"))
    return function_call(block.string("id"), block.string("name"), arguments)


def _result(block: Object) -> Message:
    told = text_of(block, "content", _resulting, empty=True)
    return {
        "role": "tool",
        "tool_call_id": block.string("tool_use_id"),
        "content": joined(["Error: ", told]) if block.flag("is_error") else told,
    }
