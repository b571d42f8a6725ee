"""OpenAI's Responses: every field of a request, and what becomes of it.

Rule: the items of a reply (reasoning, a message, calls) come back one by one, and are one message
to the chat template again. A reply that the client may go on from by its id is remembered for its
user, in memory only; to everyone else, and after a restart, there is no such reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, cast

from cachetools import LRUCache

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
    flag,
    integer,
    items,
    load_body,
    members,
    number,
    shown,
    string,
)
from tinker_claw.formats.chat_reply import error_body
from tinker_claw.formats.fields import (
    MOST_LOGPROBS,
    Fields,
    Neutral,
    assistant,
    attempt_in,
    cache_session,
    check_function,
    effort_level,
    function_call,
    model_name,
    openai_calls,
    parted,
    refuse_deep,
    schema_of,
    text_of,
    unreadable,
)
from tinker_claw.formats.responses_reply import Names, ResponsesReply
from tinker_claw.types import KnownMessage, KnownTools, Message, Reply, Tool

_RUNS_NOTHING = "this server runs no tools itself; offer functions"
_KEEPS_NOTHING = "nothing is kept here for clients but their last replies; send the input itself"

FIELDS = Fields(
    honoured=(
        "model input instructions previous_response_id store tools tool_choice "
        "parallel_tool_calls stream stream_options max_output_tokens temperature top_p "
        "reasoning text include top_logprobs prompt_cache_key metadata"
    ),
    ignored=(
        "user safety_identifier client_metadata access_programs service_tier "
        "prompt_cache_retention prompt_cache_options"
    ),
    neutral={
        "background": Neutral((False,), "a reply comes to the client that waits for it"),
        "conversation": Neutral((), _KEEPS_NOTHING),
        "prompt": Neutral((), _KEEPS_NOTHING),
        "context_management": Neutral(([],), "nothing is taken out of a history here"),
        "truncation": Neutral(("disabled",), "nothing is taken out of a history here"),
        "max_tool_calls": Neutral((), _RUNS_NOTHING),
        "moderation": Neutral((), "nothing is moderated here"),
        "image": Neutral((), "this model reads text only"),
        "personality": Neutral((), "ask for it in the instructions"),
    },
)

_REASONING = Fields(
    honoured="effort",
    ignored="summary generate_summary",  # reasoning goes out as it was sampled
    neutral={
        "context": Neutral(("auto",), "the chat template says which reasoning is shown again"),
        "mode": Neutral(("standard",), "there is one mode"),
    },
)
_TEXT = Fields(
    honoured="format",
    neutral={"verbosity": Neutral(("medium",), "ask for it in the prompt")},
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""The second asks for reasoning that comes back with the next request; it is sent in clear anyway.
"""
_STREAM = Fields("", neutral={"include_obfuscation": Neutral((False,), "no padding is sent")})
_FUNCTION = Fields(
    honoured="type name description parameters strict",
    ignored="output_schema",
    neutral={
        "async": Neutral((False,), "an agent goes on once all its calls have results"),
        "defer_loading": Neutral((False,), "all tools are shown to the model"),
        "allowed_callers": Neutral((["direct"],), _RUNS_NOTHING),
    },
)
_NAMESPACE = Fields("type name description tools")


_ITEMS = {
    "message": Fields("type role content", "id status phase"),
    "reasoning": Fields("type content", "id status summary encrypted_content"),
    "function_call": Fields("type call_id name namespace arguments", "id status caller async"),
    "function_call_output": Fields("type call_id output", "id status caller name namespace"),
}
_PARTS = {
    "input_text": Fields("type text", "prompt_cache_breakpoint"),
    "output_text": Fields("type text", "annotations logprobs"),
    "refusal": Fields("type refusal"),
    "reasoning_text": Fields("type text"),
}
_ROLES = ("user", "assistant", "system", "developer")
_ROOM = 64_000_000
"""For replies that may be gone on from by their ids, in characters of all that led to them: some
six hundred of long sessions, of which the messages are shared."""


class Responses(Format):
    """What OpenAI's newer clients speak, Codex among them."""

    about = (
        "OpenAI's Responses: POST /v1/responses. In Codex add a provider whose base_url is this "
        "address with /v1 at its end"
    )
    routes = (
        Route("POST", "/v1/responses", Purpose.TURN),
        Route("POST", "/v1/responses/input_tokens", Purpose.COUNT),
    )

    def __init__(self) -> None:
        self._said = LRUCache[tuple[str, str], tuple[Message, ...]](_ROOM, getsizeof=_size)
        """Of each reply, by user and id: all that was said until then, without instructions."""
        self._forgotten = 0
        """How often; what was asked before is not remembered any more."""
        self._lock = Lock()  # large bodies are read in a thread

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/responses")

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        fields = load_body(body)
        FIELDS.refuse_unknown(fields)
        names: Names = {}
        tools = _tools(fields, names)
        calls = openai_calls(fields.get("tool_choice", "auto"), tools, nested=False)
        instructions, said = fields.get("instructions"), self._history(fields, user)
        head = [string(instructions, "instructions", empty=True)] if instructions else []
        most = fields.get("max_output_tokens")
        metadata, effort = _metadata(fields), _effort(fields)
        kept = flag(fields.get("store"), "store", True)
        _check_extras(fields)
        return GenerationRequest(
            model=model_name(fields),
            messages=tuple(map(KnownMessage, _with_one_head(head, said))),
            tools=KnownTools(calls.tools),
            may_call=calls.may,
            must_call=calls.must,
            one_call=not flag(fields.get("parallel_tool_calls"), "parallel_tool_calls", True),
            stream=flag(fields.get("stream"), "stream"),
            max_tokens=None if most is None else integer(most, "max_output_tokens", 1, INT64),
            temperature=number(fields.get("temperature", 1.0), "temperature", 0, 2),
            top_p=number(fields.get("top_p", 1.0), "top_p", 0, 1, open_low=True),
            schema=schema_of(members(fields.get("text"), "text").get("format"), "text.format"),
            top_logprobs=_top_logprobs(fields),
            reasoning_effort=effort,
            effort_at="reasoning.effort",
            session=cache_session(fields),
            follows=fields.get("previous_response_id"),
            attempt=attempt_in(metadata),
            own={
                "fields": fields | {"reasoning": {"effort": effort, "summary": None}},
                "names": names,
                "said": said,
                "kept": kept,
                "user": user,
            },
        )

    def _history(self, fields: Mapping[str, Any], user: str) -> tuple[Message, ...]:
        """What was said until now, without instructions."""
        name, before = fields.get("previous_response_id"), ()
        if name is not None:
            where = "previous_response_id"
            with self._lock:
                found = self._said.get((user, string(name, where)))
            if found is None:
                raise RequestError(
                    f"{where}: there is no such reply any more; they are kept in memory, a few "
                    "hundred at most, and none of a private session or with store false. Send the "
                    "whole conversation as input.",
                    code="previous_response_not_found",
                    param=where,
                )
            before = found
        return (*before, *_conversation(fields.get("input")))

    def remember(self, request: GenerationRequest, user: str) -> None:
        cast("dict[str, Any]", request.own)["open"] = self._forgotten

    def forget(self) -> None:
        with self._lock:
            self._said.clear()
            self._forgotten += 1

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        own = request.own
        keeps = own["kept"] and "open" in own

        def keep(id: str, reply: Reply) -> None:
            with self._lock:
                said = (*own["said"], _of_reply(reply))
                if own["open"] == self._forgotten and _size(said) <= _ROOM:
                    self._said[own["user"], id] = said

        return ResponsesReply(own["fields"], own["names"], head, keep if keeps else None)

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def counted(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _size(said: Sequence[Message]) -> int:
    """Characters, and as many as a message takes beside them."""
    calls = (call["function"] for message in said for call in message.get("tool_calls", ()))
    texts = sum(len(m["content"]) + len(m.get("reasoning_content", "")) for m in said)
    return 1000 * len(said) + texts + sum(len(call["arguments"]) for call in calls)


def _of_reply(reply: Reply) -> Message:
    """As a client would send it back."""
    calls = [function_call(call.id, call.name, call.arguments) for call in reply.tool_calls]
    return assistant([reply.text], [reply.reasoning] if reply.reasoning else [], calls)


def _with_one_head(head: list[str], said: Sequence[Message]) -> tuple[Message, ...]:
    """Instructions and what developers say at the beginning are one system message: many chat
    templates know no second one."""
    at = next((i for i, m in enumerate(said) if m["role"] != "system"), len(said))
    texts = [*head, *(message["content"] for message in said[:at])]
    found = ({"role": "system", "content": parted(texts)},) if texts else ()
    return (*found, *said[at:])


def _metadata(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """It goes back with the reply."""
    given = members(fields.get("metadata"), "metadata")
    for name, value in given.items():
        if not isinstance(value, str | int | float):
            at = f"metadata.{shown(name)}"
            raise RequestError(f"{at} must be a string.", param=at)
    return given


def _effort(fields: Mapping[str, Any]) -> str | None:
    given = _REASONING.members(fields.get("reasoning"), "reasoning")
    return effort_level(given.get("effort"), "reasoning.effort")


def _top_logprobs(fields: Mapping[str, Any]) -> int | None:
    name = "top_logprobs"
    most = integer(fields.get(name, 0), name, 0, MOST_LOGPROBS + 1)
    return most if most or _LOGPROBS in items(fields.get("include", []), "include") else None


def _check_extras(fields: Mapping[str, Any]) -> None:
    _TEXT.members(fields.get("text"), "text")
    _STREAM.members(fields.get("stream_options"), "stream_options")
    for i, one in enumerate(items(fields.get("include", []), "include")):
        if one not in _INCLUDED:
            raise RequestError(f"include[{i}] is not supported.", param=f"include[{i}]")


def _tools(fields: Mapping[str, Any], names: Names) -> tuple[Tool, ...]:
    """
    Args:
        names: gets the names of those that stand in a namespace, by what the model is shown.
    """
    raw = items(fields.get("tools", []), "tools")
    tools = [found for i, one in enumerate(raw) for found in _tool(one, f"tools[{i}]", names)]
    refuse_deep(raw)
    return tuple(tools)


def _tool(raw: Any, at: str, names: Names) -> list[Tool]:
    given = members(raw, at)
    kind = given.get("type")
    if kind == "function":
        return [_function(given, at)]
    if kind != "namespace":
        what = f"of type {kind[:80]}" if isinstance(kind, str) else "without a type"
        raise RequestError(
            f'{at}: {_RUNS_NOTHING}, not a tool {what}; in Codex, web_search = "disabled" leaves '
            "its own out.",
            param=at,
        )
    _NAMESPACE.refuse_unknown(given, f"{at}.")
    space, found = string(given.get("name"), f"{at}.name"), list[Tool]()
    for i, one in enumerate(items(given.get("tools"), f"{at}.tools")):
        tool = _function(members(one, f"{at}.tools[{i}]"), f"{at}.tools[{i}]")
        name = tool["function"]["name"]
        names[shown := _shown(space, name)] = (space, name)
        found.append({"type": "function", "function": {**tool["function"], "name": shown}})
    return found


def _function(given: Mapping[str, Any], at: str) -> Tool:
    if given.get("type") != "function":
        raise RequestError(f"{at} must be of type function.", param=at)
    _FUNCTION.refuse_unknown(given, f"{at}.")
    check_function(given, at)
    told = {n: given[n] for n in ("name", "description", "parameters", "strict") if n in given}
    return {"type": "function", "function": told}


def _shown(space: str, name: str) -> str:
    """What the model calls a function of a namespace."""
    return f"{space}__{name}"


def _conversation(raw: Any) -> list[Message]:
    """The messages that the items of an input come to."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise RequestError("input must be a string or a list of items.", param="input")
    said, reply = list[Message](), _ReplyItems()
    for i, one in enumerate(cast("list[Any]", raw)):
        at = f"input[{i}]"
        given = members(one, at)
        kind = given.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEMS:
            why = _KEEPS_NOTHING if kind == "item_reference" else "no reply of this server has one"
            raise RequestError(f"{at}: an item of type {str(kind)[:80]}: {why}.", param=at)
        _ITEMS[kind].refuse_unknown(given, f"{at}.")
        if kind == "reasoning" and reply.said:
            said, reply = [*said, *reply.message()], _ReplyItems()
        if not reply.takes(given, kind, at):
            other = _message(given, at) if kind == "message" else _result(given, at)
            said, reply = [*said, *reply.message(), other], _ReplyItems()
    said += reply.message()
    if not said:
        raise RequestError("input holds nothing that this model can read.", param="input")
    return said


class _ReplyItems:
    """The items of one reply, as far as they have come."""

    def __init__(self) -> None:
        self._thought: list[str] = []
        self._texts: list[str] = []
        self._calls: list[Any] = []
        self.said = False
        """There is more than reasoning."""

    def takes(self, given: Mapping[str, Any], kind: str, at: str) -> bool:
        """Whether it is one of them."""
        if kind == "reasoning":
            # What is in cipher, or a summary, was for another server.
            parts = items(given.get("content", []), f"{at}.content")
            self._thought += [_part(p, f"{at}.content[{j}]") for j, p in enumerate(parts)]
            return True
        if kind == "function_call":
            self._calls.append(_call_of(given, at))
        elif kind == "message" and given.get("role") == "assistant":
            content = given.get("content")
            empty = isinstance(content, list) and not content
            self._texts.append("" if empty else text_of(content, f"{at}.content", _part))
        else:
            return False
        self.said = True
        return True

    def message(self) -> list[Message]:
        """What they come to; nothing where none has come."""
        if not self.said and not self._thought:
            return []
        return [assistant(self._texts, self._thought, self._calls)]


def _message(given: Mapping[str, Any], at: str) -> Message:
    """Of anyone but the assistant."""
    role = given.get("role")
    if role not in _ROLES:
        raise RequestError(f"{at}.role must be one of {', '.join(_ROLES)}.", param=f"{at}.role")
    content = text_of(given.get("content"), f"{at}.content", _part)
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(raw: Any, at: str) -> str:
    given = members(raw, at)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise unreadable(kind, at)
    _PARTS[kind].refuse_unknown(given, f"{at}.")
    name = "refusal" if kind == "refusal" else "text"
    return string(given.get(name), f"{at}.{name}", empty=True)


def _call_of(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    name = string(given.get("name"), f"{at}.name")
    if "namespace" in given:
        name = _shown(string(given["namespace"], f"{at}.namespace"), name)
    arguments = string(given.get("arguments"), f"{at}.arguments", empty=True)
    return function_call(string(given.get("call_id"), f"{at}.call_id"), name, arguments)


def _result(given: Mapping[str, Any], at: str) -> Message:
    output = given.get("output")
    return {
        "role": "tool",
        "tool_call_id": string(given.get("call_id"), f"{at}.call_id"),
        "content": "" if output == [] else text_of(output, f"{at}.output", _part),
    }
