"""Anthropic's Messages: every field of a request, and what becomes of it.

Rule: what the client keeps outside of its messages, or several to a message, becomes the messages
that a chat template knows: the system text comes first, results of tools are messages of their own,
and replies that follow one another are one. Thinking is shown to those who ask for it; it is
sampled and trained either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Format,
    GenerationRequest,
    Json,
    Purpose,
    ReplyHead,
    ReplyWriter,
    Route,
    bearer,
)
from tinker_claw.formats.body import INT64, flag, integer, items, load_body, members, number, string
from tinker_claw.formats.fields import (
    Calls,
    Fields,
    Neutral,
    assistant,
    check_function,
    effort_level,
    function_call,
    joined,
    model_name,
    parted,
    refuse_deep,
    schema_of,
    stop_strings,
    text_of,
    unreadable,
)
from tinker_claw.formats.messages_reply import (
    MessagesReply,
    error_body,
)
from tinker_claw.types import KnownMessage, KnownTools, Message, Tool

_RUNS_NOTHING = "this server runs no tools itself; offer your own"

FIELDS = Fields(
    honoured=(
        "model messages system max_tokens metadata stop_sequences stream temperature top_p "
        "top_k thinking output_config tools tool_choice context_management"
    ),
    # What was computed is used again without being asked (cache_control).
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

_EFFORT = "output_config.effort"
_USUAL = "high"
"""The effort that says as much as none."""

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
    "thinking": Fields("type thinking", "cache_control signature"),
    "redacted_thinking": Fields("type", "cache_control data"),
    "tool_use": Fields("type id name input", "cache_control caller"),
    "tool_result": Fields("type tool_use_id content is_error", "cache_control"),
}
_BY: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
# How clients that write more than an account into user_id name the session there.
_SESSION = re.compile(r"_session_([0-9a-f-]{36})\Z")


class Messages(Format):
    """What Anthropic's clients speak, Claude Code among them."""

    about = (
        "Anthropic's Messages: POST /v1/messages. For Claude Code set ANTHROPIC_BASE_URL to this "
        "address without a path, and ANTHROPIC_MODEL to the model's name"
    )
    routes = (
        Route("POST", "/v1/messages", Purpose.TURN),
        Route("POST", "/v1/messages/count_tokens", Purpose.COUNT),
        Route("GET", "/v1/models", Purpose.MODELS),
        Route("GET", "/v1/models/{name:path}", Purpose.MODEL),
    )
    key_place = "x-api-key"

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/messages") or "anthropic-version" in headers

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "").strip() or bearer(headers)

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        fields = load_body(body)
        FIELDS.refuse_unknown(fields)
        if route.purpose is Purpose.TURN and "max_tokens" not in fields:
            raise RequestError("max_tokens is missing.", param="max_tokens")
        calls, one_call = _calls(fields)
        effort, effort_at, shows = _thinking(fields)
        _check_edits(fields)
        most = fields.get("max_tokens")
        top_k = fields.get("top_k")
        said = [*_system(fields.get("system")), *_conversation(fields.get("messages"))]
        return GenerationRequest(
            model=model_name(fields),
            messages=tuple(map(KnownMessage, said)),
            tools=KnownTools(calls.tools),
            may_call=calls.may,
            must_call=calls.must,
            one_call=one_call,
            stream=flag(fields.get("stream"), "stream"),
            max_tokens=None if most is None else integer(most, "max_tokens", 1, INT64),
            temperature=number(fields.get("temperature", 1.0), "temperature", 0, 1),
            top_p=number(fields.get("top_p", 1.0), "top_p", 0, 1, open_low=True),
            top_k=None if top_k is None else integer(top_k, "top_k", 1, INT64),
            stop=stop_strings(fields.get("stop_sequences"), "stop_sequences"),
            schema=schema_of(
                members(fields.get("output_config"), "output_config").get("format"),
                "output_config.format",
            ),
            reasoning_effort=effort,
            effort_at=effort_at,
            session=_session(fields),
            own={"thinking": shows},
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return MessagesReply(request, head, shows=request.own["thinking"])

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def models(self, names: Sequence[str], since: int) -> Json:
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return {"data": [self.model(name, since) for name in names]} | ends

    def model(self, name: str, since: int) -> Json:
        created = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        known = {"type": "model", "id": name, "display_name": name}
        return known | {"created_at": created, "lifecycle": "active"}

    def counted(self, tokens: int) -> Json:
        return {"input_tokens": tokens}


def _session(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Of `metadata.user_id`, which names a user, and with some clients their session, too."""
    given = _METADATA.members(fields.get("metadata"), "metadata")
    where = "metadata.user_id"
    if "user_id" not in given:
        return None
    user = string(given["user_id"], where, empty=True)
    if found := _SESSION.search(user):
        return found[1], where
    try:
        told = json.loads(user)
    except (ValueError, RecursionError):
        return None
    named = cast("dict[str, Any]", told).get("session_id") if isinstance(told, dict) else None
    return (named, where) if named and isinstance(named, str) else None


def _thinking(fields: Mapping[str, Any]) -> tuple[str | None, str, bool]:
    """The effort, the field that says so, and whether thinking is shown."""
    config = _OUTPUT.members(fields.get("output_config"), "output_config")
    effort = effort_level(config.get("effort"), _EFFORT)
    given = _THINKING.members(fields.get("thinking"), "thinking")
    kind = given.get("type")
    if kind not in ("enabled", "disabled", "adaptive", None) or (given and kind is None):
        raise RequestError(
            "thinking.type must be enabled, disabled or adaptive.", param="thinking.type"
        )
    if "budget_tokens" in given:  # of how many it uses, no client may rely on more than the most
        integer(given["budget_tokens"], "thinking.budget_tokens", 1, INT64)
    display = given.get("display", "summarized")
    if display not in ("summarized", "omitted"):
        raise RequestError(
            "thinking.display must be summarized or omitted.", param="thinking.display"
        )
    shows = kind in ("enabled", "adaptive") and display == "summarized"
    if kind == "disabled":
        return "none", "thinking.type", shows
    if kind == "enabled":
        return effort or _USUAL, _EFFORT if effort else "thinking.type", shows
    return (None if effort == _USUAL else effort), _EFFORT, shows


def _check_edits(fields: Mapping[str, Any]) -> None:
    """Which thinking of earlier replies is shown again, the chat template says; nothing else of a
    history is taken out."""
    management = _MANAGEMENT.members(fields.get("context_management"), "context_management")
    for i, edit in enumerate(items(management.get("edits", []), "context_management.edits")):
        at = f"context_management.edits[{i}]"
        kind = members(edit, at).get("type")
        if not isinstance(kind, str) or not kind.startswith("clear_thinking"):
            raise RequestError(
                f"{at} is not supported: nothing is taken out of a history here.", param=at
            )


def _calls(fields: Mapping[str, Any]) -> tuple[Calls, bool]:
    """What of calls there may be, and whether only one."""
    raw = items(fields.get("tools", []), "tools")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw))
    refuse_deep(raw)
    choice = _CHOICE.members(fields.get("tool_choice"), "tool_choice")
    at = "tool_choice.disable_parallel_tool_use"
    one_call = flag(choice.get("disable_parallel_tool_use"), at)
    kind = choice.get("type", "auto")
    if kind in ("any", "tool"):
        name = string(choice.get("name"), "tool_choice.name") if kind == "tool" else None
        if members(fields.get("thinking"), "thinking").get("type") == "enabled":
            raise RequestError(
                "tool_choice begins the reply with a call, so thinking cannot be enabled.",
                param="tool_choice",
            )
        return Calls.forced(tools, name, "tool_choice"), one_call
    if kind not in ("auto", "none"):
        at = "tool_choice.type"
        raise RequestError(f"{at} must be auto, any, tool or none.", param=at)
    return (Calls(tools), one_call) if kind == "auto" else (Calls(may=False), False)


def _tool(raw: Any, at: str) -> Tool:
    given = members(raw, at)
    kind = given.get("type", "custom")
    if kind != "custom":
        raise RequestError(
            f"{at}: {_RUNS_NOTHING}, with a name and an input_schema, not one of type "
            f"{string(kind, f'{at}.type')[:80]}.",
            param=at,
        )
    _TOOL.refuse_unknown(given, f"{at}.")
    check_function(given, at, "input_schema")
    if "input_schema" not in given:
        raise RequestError(f"{at}.input_schema is missing.", param=f"{at}.input_schema")
    function: dict[str, Any] = {"name": given["name"]}
    if "description" in given:
        function["description"] = given["description"]
    function["parameters"] = given["input_schema"]
    if "strict" in given:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def _system(raw: Any) -> list[Message]:
    if raw is None or raw == "":
        return []
    if isinstance(raw, str):
        return [{"role": "system", "content": raw}]
    texts = [_text(block, f"system[{i}]") for i, block in enumerate(items(raw, "system"))]
    return [{"role": "system", "content": parted(texts)}] if texts else []


def _conversation(raw: Any) -> list[Message]:
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    said: list[Message] = []
    for i, one in enumerate(cast("list[Any]", raw)):
        for message in _messages(one, f"messages[{i}]"):
            if said and message["role"] == said[-1]["role"] == "assistant":
                message = _one_reply(said.pop(), message)
            said.append(message)
    if said[-1]["role"] == "assistant":
        raise RequestError(
            f"messages[{len(cast('list[Any]', raw)) - 1}] is the assistant's: a reply cannot be "
            "begun for the model here.",
            param="messages",
        )
    return said


def _one_reply(first: Message, second: Message) -> Message:
    """Two messages of the assistant in a row, as one."""
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    thought = [m["reasoning_content"] for m in (first, second) if "reasoning_content" in m]
    return assistant([m["content"] for m in (first, second)], thought, calls)


def _messages(raw: Any, at: str) -> list[Message]:
    """What one message of the client's comes to."""
    given = members(raw, at)
    role = given.get("role")
    if not isinstance(role, str) or role not in _BY:
        raise RequestError(f"{at}.role must be one of {', '.join(_BY)}.", param=f"{at}.role")
    _MESSAGE.refuse_unknown(given, f"{at}.")
    at = f"{at}.content"
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_block(block, role, f"{at}[{i}]") for i, block in enumerate(items(content, at))]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if role == "assistant":
        thought = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = [block["call"] for block in blocks if block["type"] == "tool_use"]
        return [assistant(texts, thought, calls)]
    if not blocks:
        raise RequestError(f"{at} must be a string or a list of blocks.", param=at)
    kinds = [block["type"] for block in blocks]
    if "tool_result" in kinds[kinds.index("text") if "text" in kinds else len(kinds) :]:
        raise RequestError(f"{at}: results of tools must come before text.", param=at)
    results = [block["result"] for block in blocks if block["type"] == "tool_result"]
    return [*results, *([{"role": role, "content": joined(texts)}] if texts else [])]


def _block(raw: Any, role: str, at: str) -> dict[str, Any]:
    """A block with what it comes to."""
    given = members(raw, at)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise unreadable(kind, at)
    if kind not in _BY[role]:
        raise RequestError(f"{at}: a block of type {kind} is not the {role}'s.", param=at)
    _BLOCKS[kind].refuse_unknown(given, f"{at}.")
    if kind == "text":
        given["text"] = string(given.get("text"), f"{at}.text", empty=True)
    elif kind == "thinking":
        given["thinking"] = string(given.get("thinking"), f"{at}.thinking", empty=True)
    elif kind == "tool_use":
        given["call"] = _call(given, at)
    elif kind == "tool_result":
        given["result"] = _result(given, at)
    return given  # of redacted thinking nothing: it is another server's, in cipher


def _text(raw: Any, at: str) -> str:
    """Of a block that can be nothing else."""
    return _block(raw, "system", at)["text"]


def _call(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(given.get("input"), dict):
        raise RequestError(f"{at}.input must be an object.", param=f"{at}.input")
    try:
        arguments = json.dumps(given["input"], ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError(f"{at}.input is nested too deeply.", param=f"{at}.input") from error
    name = string(given.get("name"), f"{at}.name")
    return function_call(string(given.get("id"), f"{at}.id"), name, arguments)


def _result(given: Mapping[str, Any], at: str) -> Message:
    content = given.get("content", "")
    told = "" if content in ("", []) else text_of(content, f"{at}.content", _text)
    failed = flag(given.get("is_error"), f"{at}.is_error")
    return {
        "role": "tool",
        "tool_call_id": string(given.get("tool_use_id"), f"{at}.tool_use_id"),
        "content": joined(["Error: ", told]) if failed else told,
    }
