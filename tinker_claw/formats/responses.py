"""OpenAI's Responses: every field of a request, and how it is handled.

Rule: the items of a reply (reasoning, a message, calls) come back one by one, and are merged into
one message for the chat template. A reply that the client may continue by its id is cached for its
user, in memory only; for everyone else, and after a restart, it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, cast

from cachetools import LRUCache
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
    CachingFormat,
    Fields,
    Neutral,
    Object,
    Read,
    load_body,
    text_or_items,
    written,
)
from tinker_claw.formats.chat_reply import error_body
from tinker_claw.formats.fields import (
    MOST_LOGPROBS,
    as_message,
    assistant,
    conversation,
    effort_level,
    function_call,
    function_tool,
    image_url,
    one_reply,
    openai,
    refuse_deep,
    schema_of,
    system_message,
    text_of,
    unreadable,
)
from tinker_claw.formats.responses_reply import Names, ResponsesReply
from tinker_claw.images import images_in
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
        "image": Neutral((), "no images are drawn here"),
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
# The model's own files set the tokens of an image.
_IMAGE = Fields("type image_url", "detail prompt_cache_breakpoint")
_ROLES = ("user", "assistant", "system", "developer")
_ROOM = 64_000_000
"""Cache size for replies that may be continued by id, in characters of the conversations before
them: some six hundred of long sessions, which share their messages."""


_Said = LRUCache[tuple[str, str], tuple[Message, ...]]
"""Conversation up to and including each reply, by user and id, without instructions."""


class Responses(CachingFormat):
    """OpenAI's Responses, which its newer clients use, Codex among them."""

    about = (
        "OpenAI's Responses: POST /v1/responses. In Codex add a provider whose base_url is this "
        "address with /v1 at its end"
    )
    routes = (
        Route("POST", "/v1/responses", "turn"),
        Route("POST", "/v1/responses/input_tokens", "count"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._said = _Said(_ROOM, getsizeof=_size)
        self._lock = Lock()  # large bodies are read in a thread

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/responses")

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        read, own = self._reading(user)
        fields = FIELDS.check(load_body(body, raw=("input", "tools")))
        replies = self._said  # what is forgotten meanwhile is not remembered in another
        said = self._history(fields, user, replies, read)
        tools, names, fields["tools"] = read(_tools, fields.get("tools", Raw(b"[]")), "tools")
        head = [fields.string("instructions")] if fields.get("instructions") else []
        effort = effort_level(fields.object("reasoning", _REASONING), "effort")
        fields.object("stream_options", _STREAM)
        return GenerationRequest(
            **openai(fields, tools, "max_output_tokens", nested=False),
            messages=_with_one_head(head, said, read),
            schema=schema_of(fields.object("text", _TEXT), "format"),
            top_logprobs=_top_logprobs(fields),
            reasoning_effort=effort,
            effort_at="reasoning.effort",
            follows=fields.get("previous_response_id"),
            own=own
            | {
                "fields": fields
                | {
                    "reasoning": {"effort": effort, "summary": None},
                    "metadata": fields.scalars("metadata", "must be a string"),
                },
                "names": names,
                "said": said,
                "kept": fields.flag("store", True),
                "user": user,
                "replies": replies,
            },
        )

    def _history(
        self, fields: Object, user: str, replies: _Said, read: Read
    ) -> tuple[Message, ...]:
        """Return the conversation so far, without instructions."""
        where, before = "previous_response_id", ()
        if (name := fields.optional(where)) is not None:
            with self._lock:
                found = replies.get((user, name))
            if found is None:
                raise RequestError(
                    f"{where}: there is no such reply any more; they are kept in memory, a few "
                    "hundred at most, and none of a private session or with store false. Send the "
                    "whole conversation as input.",
                    code="previous_response_not_found",
                    param=where,
                )
            before = found
        return (*before, *_conversation(fields, read))

    def remember(self, request: GenerationRequest, user: str) -> None:
        super().remember(request, user)
        cast("dict[str, Any]", request.own)["open"] = True

    def forget(self) -> None:
        super().forget()
        self._said = _Said(_ROOM, getsizeof=_size)

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        own = request.own
        keeps = own["kept"] and "open" in own

        def keep(id: str, reply: Reply) -> None:
            with self._lock, suppress(ValueError):  # larger than the cache
                said = KnownMessage(as_message(reply))
                own["replies"][own["user"], id] = (*own["said"], said)

        return ResponsesReply(own["fields"], own["names"], head, keep if keeps else None)

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def counted(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _size(said: Sequence[Message]) -> int:
    """Size in characters, with an overhead per message."""
    calls = (call["function"] for message in said for call in message.get("tool_calls", ()))
    texts = sum(len(m["content"]) + len(m.get("reasoning_content", "")) for m in said)
    images = sum(len(image.clean()) for image in images_in(said))
    return 1000 * len(said) + texts + images + sum(len(call["arguments"]) for call in calls)


def _with_one_head(head: list[str], said: Sequence[Message], read: Read) -> tuple[Message, ...]:
    """Merge instructions and leading developer messages into one system message: many chat
    templates accept only one."""
    at = next((i for i, m in enumerate(said) if m["role"] != "system"), len(said))
    texts = [*head, *(message["content"] for message in said[:at])]
    found = (read(system_message, written(texts), "instructions"),) if texts else ()
    return (*found, *said[at:])


def _top_logprobs(fields: Object) -> int | None:
    included = fields.listed("include")
    for i, one in enumerate(included):
        if one not in _INCLUDED:
            raise fields.wrong("is not supported", f"include[{i}]")
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS + 1) or 0
    return most if most or _LOGPROBS in included else None


def _tools(raw: Any, at: str) -> tuple[KnownTools, Names, list[Any]]:
    """Return the tools, the names of those in a namespace, by the name the model is shown, and the
    list as it was sent, which the reply repeats."""
    names, given = Names(), Object({at: raw}).objects(at)
    return KnownTools([found for one in given for found in _tool(one, names)]), names, raw


def _tool(given: Object, names: Names) -> list[Tool]:
    refuse_deep(given)
    kind = given.get("type")
    if kind == "function":
        return [_function(given)]
    if kind != "namespace":
        what = f"of type {kind[:80]}" if isinstance(kind, str) else "without a type"
        raise given.wrong(
            f'is {what}, but {_RUNS_NOTHING}; in Codex, web_search = "disabled" leaves its own out'
        )
    space, found = _NAMESPACE.check(given).string("name"), list[Tool]()
    for one in given.objects("tools", required=True):
        function = _function(one)["function"]
        names[shown := _shown(space, function["name"])] = (space, function["name"])
        found.append({"type": "function", "function": {**function, "name": shown}})
    return found


def _function(given: Object) -> Tool:
    if given.get("type") != "function":
        raise given.wrong("must be of type function")
    return function_tool(_FUNCTION.check(given))


def _shown(space: str, name: str) -> str:
    """Name by which the model calls a function of a namespace."""
    return f"{space}__{name}"


def _conversation(fields: Object, read: Read) -> list[Message]:
    """Convert the items of an input to messages."""
    wrong = fields.wrong("must be a string or a list of items", "input")
    items = text_or_items(fields.get("input"), wrong)
    if not items:
        raise wrong
    if isinstance(items, str):
        return [KnownMessage({"role": "user", "content": items})]
    said = conversation(items, _item, _reply, "input", read, thought_begins=True)
    if not said:
        raise RequestError("input holds nothing that this model can read.", param="input")
    return said


def _item(raw: Any, at: str) -> tuple[KnownMessage, ...]:
    """Convert an item to a message; () where it is another server's reasoning."""
    given = Object(raw, at)
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        why = _KEEPS_NOTHING if kind == "item_reference" else "no reply of this server has one"
        raise given.wrong(f"is an item of type {str(kind)[:80]}: {why}")
    _ITEMS[kind].check(given)
    message = _READ[kind](given)
    hidden = kind == "reasoning" and "reasoning_content" not in message
    return () if hidden else (KnownMessage(message),)


def _reply(raw: list[Any], at: str) -> KnownMessage:
    return KnownMessage(one_reply([said for one in raw for said in _item(one, at)]))


def _reasoning(given: Object) -> Message:
    """Reasoning in clear; ciphertext and summaries were for another server and are dropped."""
    return assistant([], [_part(part) for part in given.objects("content")], [])


def _message(given: Object) -> Message:
    role = given.get("role")
    if role not in _ROLES:
        raise given.wrong(f"must be one of {', '.join(_ROLES)}", "role")
    if role == "assistant":
        return assistant([text_of(given, "content", _part, empty=True)], [], [])
    content = text_of(given, "content", _seen if role == "user" else _part)
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(given: Object) -> str:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise unreadable(given)
    name = "refusal" if kind == "refusal" else "text"
    return _PARTS[kind].check(given).string(name, empty=True)


def _seen(given: Object) -> str:
    """A part of a message that may hold images."""
    if given.get("type") != "input_image":
        return _part(given)
    return image_url(_IMAGE.check(given), "image_url")


def _call(given: Object) -> Message:
    name, arguments = given.string("name"), given.string("arguments", empty=True)
    if "namespace" in given:
        name = _shown(given.string("namespace"), name)
    return assistant([], [], [function_call(given.string("call_id"), name, arguments)])


def _result(given: Object) -> Message:
    output = text_of(given, "output", _seen, empty=True)
    return {"role": "tool", "tool_call_id": given.string("call_id"), "content": output}


_READ: Mapping[str, Callable[[Object], Message]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _result,
}
