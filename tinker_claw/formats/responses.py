"""OpenAI's Responses: every field of a request, and how it is handled.

Rule: the items of a reply (reasoning, a message, calls) come back one by one, and are merged into
one message for the chat template. No reply is kept for its client, who sends all of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    NO_ITEMS,
    CachingFormat,
    Fields,
    Neutral,
    Object,
    PartReader,
    raw_items,
)
from tinker_claw.formats.chat_reply import error_body
from tinker_claw.formats.fields import (
    PLAIN_TEXT,
    arguments_of,
    assistant,
    conversation,
    effort_level,
    function_call,
    function_tool,
    name_of,
    offered,
    openai,
    refuse_deep,
    result,
    system_message,
    unmade_edits,
    unmet_verbosity,
)
from tinker_claw.formats.parts import (
    READS_TEXT,
    answered,
    as_text,
    line,
    plain_part,
    read_parts,
    seen_part,
    thought_in,
    with_parts,
)
from tinker_claw.formats.responses_reply import Names, ResponsesReply
from tinker_claw.images import MessagePart
from tinker_claw.types import KnownMessage, KnownTools, Message, Tool

_RUNS_NOTHING = "this server runs no tools itself; offer functions"
_KEEPS_NOTHING = "no reply is kept here for its client; send the whole conversation as input"
_REFERENCE = line(READS_TEXT, "item_reference")
"""What stands for an item that is named only."""
_TRIGGER = line(READS_TEXT, "compaction_trigger")
"""What stands for an item that, at the end, asks for a compaction in place of a reply."""

FIELDS = Fields(
    honoured=(
        "model input instructions tools tool_choice parallel_tool_calls stream stream_options "
        "max_output_tokens temperature top_p reasoning text include prompt_cache_key metadata "
        "context_management"
    ),
    ignored=(
        "user safety_identifier client_metadata access_programs service_tier store "
        "prompt_cache_retention prompt_cache_options"
    ),
    neutral={
        "background": Neutral("a reply comes to the client that waits for it; leave it out", False),
        "previous_response_id": Neutral(_KEEPS_NOTHING),
        "conversation": Neutral(_KEEPS_NOTHING),
        "prompt": Neutral("no prompt is kept here; send instructions and input"),
        "truncation": Neutral(
            "nothing is taken out of a history here; send a shorter input", "disabled"
        ),
        "top_logprobs": Neutral("no logprobs are returned; the ledger has them", 0),
        "max_tool_calls": Neutral("this server runs no tools itself; leave it out"),
        "moderation": Neutral("nothing is moderated here"),
        "image": Neutral("no images are drawn here"),
        "personality": Neutral("ask for it in the instructions"),
    },
)

_REASONING = Fields(
    honoured="effort",
    ignored="summary generate_summary",  # reasoning goes out as it was sampled
    neutral={
        "context": Neutral("the chat template says which reasoning is shown again", "auto"),
        "mode": Neutral("there is one mode", "standard"),
    },
)
_TEXT = Fields("verbosity", neutral={"format": PLAIN_TEXT})
_INCLUDED = "reasoning.encrypted_content"
"""Asks for reasoning that comes back with the next request; it is sent in clear anyway."""
_STREAM = Fields("", neutral={"include_obfuscation": Neutral("no padding is sent", False)})
_FUNCTION = Fields(
    honoured="type name description parameters strict",
    ignored="output_schema defer_loading",  # the model is shown all tools at once
    neutral={
        "async": Neutral("an agent goes on once all its calls have results", False),
        "allowed_callers": Neutral(_RUNS_NOTHING, ["direct"]),
    },
)
_NAMESPACE = Fields("type name description tools")


_ROLES = ("user", "assistant", "system", "developer")
_ASKED = (
    "arguments",
    "input",
    "action",
    "actions",
    "operation",
    "code",
    "queries",
    "revised_prompt",
)
"""Members of an item that say what a service's own tool was asked."""
_ANSWERED = ("output", "outputs", "results", "result", "tools", "error", "approve", "reason")
"""Members that say what it answered."""


class Responses(CachingFormat):
    """OpenAI's Responses, which its newer clients use, Codex among them."""

    about = (
        "OpenAI's Responses: POST /v1/responses. In Codex add a provider whose base_url is this "
        "address with /v1 at its end, and whose name is not OpenAI, or it would ask for compactions"
    )
    fields = FIELDS
    raw = ("input", "tools")
    routes = (
        Route("POST", "/v1/responses", "turn"),
        Route("POST", "/v1/responses/input_tokens", "count"),
    )

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/v1/responses")

    def request(self, fields: Object, route: Route, reader: PartReader) -> GenerationRequest:
        history, places = _history(fields, reader)
        tools, missing, names, fields["tools"] = reader.read(
            _tools, fields.get("tools", NO_ITEMS), "tools"
        )
        head = [fields.string("instructions")] if fields.get("instructions") else []
        messages, places = _with_one_head(head, history, places, reader)
        effort = effort_level(fields.object("reasoning", _REASONING), "effort")
        fields.object("stream_options", _STREAM)
        unmet = unmet_verbosity(fields.object("text", _TEXT))
        edits = fields.objects("context_management")
        for i, entry in enumerate(fields.listed("include")):
            if entry != _INCLUDED:
                raise fields.wrong(f"is not supported; {_INCLUDED} alone is", f"include[{i}]")
        return GenerationRequest(
            **openai(fields, tools, "max_output_tokens", nested=False),
            messages=messages,
            places=places,
            left_out=(*missing, *unmet, *unmade_edits(edits), *_references(history)),
            reasoning_effort=effort,
            effort_at="reasoning.effort",
            own={
                "fields": fields
                | {
                    "reasoning": {"effort": effort, "summary": None},
                    "metadata": fields.scalars("metadata", "must be a string"),
                },
                "names": names,
            },
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return ResponsesReply(request.own["fields"], request.own["names"], head)

    def error(self, error: RequestError) -> Json:
        return error_body(error)

    def counted(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _with_one_head(
    head: list[str], messages: Sequence[Message], places: Sequence[str], reader: PartReader
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Merge instructions and leading developer messages into one system message: many chat
    templates accept only one. Return the messages, and where each stands."""
    at = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    texts = [*head, *(message["content"] for message in messages[:at])]
    if not texts:
        return tuple(messages), tuple(places)
    where = "instructions" if head else places[0]
    return (system_message(texts, reader), *messages[at:]), (where, *places[at:])


def _references(messages: Sequence[Message]) -> list[str]:
    """A sentence about items that are named only, where there are some."""
    if not any(message["content"] == _REFERENCE for message in messages):
        return []
    return [f"item_reference (input): {_KEEPS_NOTHING}, with store: false"]


def _is_reference(item: Object) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _tools(raw: Any, at: str) -> tuple[KnownTools, tuple[str, ...], Names, list[Any]]:
    """Read the tools.

    Returns:
        The functions; sentences about tools of other types, which are left out; the names of those
        in a namespace, by the name the model is shown; and the list as it was sent, which the
        reply repeats.
    """
    tools, names = list[Object](), Names()
    for entry in Object({at: raw}).objects(at):
        refuse_deep(entry)
        if entry.get("type") != "namespace":
            tools.append(entry)
            continue
        space = _NAMESPACE.check(entry).string("name")
        for tool in entry.objects("tools", required=True):
            if tool.get("type") == "function":
                name = tool.string("name")
                tool["name"] = full_name = _shown(space, name)
                names[full_name] = space, name
            tools.append(tool)
    advice = 'offer functions. In Codex, web_search = "disabled" leaves its own out.'
    return *offered(tools, "function", _function, advice), names, raw


def _function(tool: Object) -> Tool:
    return function_tool(_FUNCTION.check(tool))


def _shown(space: str, name: str) -> str:
    """Name by which the model calls a function of a namespace."""
    return f"{space}__{name}"


def _history(fields: Object, reader: PartReader) -> tuple[list[Message], list[str]]:
    """Convert the items of an input to messages; return them, and where each stands."""
    items = raw_items(fields, "input", "a string or a list of items", text=True)
    if isinstance(items, str):
        return [KnownMessage({"role": "user", "content": items})], ["input"]
    messages, places = conversation(items, _item, "input", reader, thought_begins=True)
    if not messages:
        raise RequestError("input holds nothing that this model can read.", param="input")
    if messages[-1] == {"role": "system", "content": _TRIGGER}:
        raise RequestError(
            f"{places[-1]} is a compaction_trigger, and no history is compacted here: give the "
            "provider in Codex another name than OpenAI, and it asks for a summary instead.",
            param=places[-1],
        )
    return messages, places


def _item(fields: Object) -> list[KnownMessage]:
    """Messages of one item, whoever made it. What a service's own tool was asked and has answered
    is a call and its result; of anything else a line says what stood there."""
    kind = "item_reference" if _is_reference(fields) else fields.get("type", "message")
    if not isinstance(kind, str):
        raise fields.wrong("must be a string", "type")
    if kind in _READ:
        return _READ[kind](fields)
    id = fields.text("call_id") or fields.text("id")
    if kind.endswith(("_call", "_request")) or kind == "program":
        name = fields.text("name") or kind.removesuffix("_call")
        sent = _present(fields, _ASKED)
        alone = [*sent] == ["arguments"] and isinstance(sent["arguments"], str)
        call = function_call(id, name, sent["arguments"] if alone else as_text(sent))
        has = _present(fields, _ANSWERED)
        return [assistant([], [], [call]), *([_answer(fields, id)] if has else [])]
    if kind.endswith(("_output", "_response")):
        return [_answer(fields, fields.text("approval_request_id") or id)]
    return [with_parts({"role": "system"}, [MessagePart(line(READS_TEXT, kind))])]


def _answer(fields: Object, id: str) -> KnownMessage:
    """Return the answer of a service's own tool, or of the user who was asked for leave."""
    answers = _present(fields, _ANSWERED)
    if len(answers) == 1:
        ((name, value),) = answers.items()
        content = [value] if isinstance(value, dict) else value
        return result(id, answered(content, fields.place(name)))
    return result(id, [MessagePart(as_text(answers))])


def _present(fields: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _reasoning(fields: Object) -> list[KnownMessage]:
    """Reasoning in clear; ciphertext and summaries were for another server and are dropped."""
    thought = thought_in(fields.get("content"))
    return [assistant([], thought, [])] if thought else []


def _message(fields: Object) -> list[KnownMessage]:
    role = fields.one_of("role", _ROLES)
    if role == "assistant":
        return [assistant(read_parts(fields, "content", plain_part, glued=True), [], [])]
    content = read_parts(fields, "content", seen_part if role == "user" else plain_part)
    return [with_parts({"role": "system" if role == "developer" else role}, content)]


def _call(fields: Object) -> list[KnownMessage]:
    name = name_of(fields)
    if "namespace" in fields:
        name = _shown(fields.string("namespace"), name)
    id = fields.text("call_id")
    return [assistant([], [], [function_call(id, name, arguments_of(fields, "arguments"))])]


def _result(fields: Object) -> list[KnownMessage]:
    return [result(fields.text("call_id"), read_parts(fields, "output", seen_part))]


_READ: Mapping[str, Callable[[Object], list[KnownMessage]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _result,
    "custom_tool_call_output": _result,
}
