"""First tokens of a reply that must be a tool call, or is text without thinking.

Rule: nothing is hard-coded for a format. It renders sample replies of that kind, and their common
prefix is the beginning: the next id is one that the model would write itself. A reply with this
beginning must parse as it was meant; otherwise the format is treated as having no such beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tinker_claw.render.outside_text import CutTokenizer
from tinker_claw.render.own_template import UNFIT
from tinker_claw.types import Reply

_ASKED = {"role": "user", "content": "So?"}
_ARGUMENTS: tuple[Mapping[str, str], ...] = ({}, {"at": "x"}, {"Zone": "y"}, {"_": "z"})
"""Arguments of calls that share only the beginning common to every call."""
_TEXTS = ("So.", '{"a": 1}', "[1]")
_THOUGHT = "Hm"
_UNTHOUGHT: tuple[Mapping[str, str], ...] = (
    {},
    {"reasoning_content": ""},
    {"reasoning_content": _THOUGHT},  # which is left out again
)
"""Ways in which a format may show that a reply has no thinking."""
_LONGEST = 40
"""Most ids that may change because the prompt ends between them."""

Tools = Sequence[Mapping[str, Any]]
Render = Callable[..., Sequence[int]]
"""Renders messages and tools; see `ChatFormat.plain_ids`."""
Reads = Callable[[Sequence[int], Sequence[int], Tools], Reply]
"""Parses ids after a prompt with tools as a reply."""


def beginning(
    render: Render, tokenizer: CutTokenizer, names: Sequence[str], reads: Reads
) -> tuple[int, ...] | None:
    """Return the ids with which every such reply begins, without thinking; () if there are none,
    None if this format does not support it.

    Args:
        names: tools of which it calls one; (): it is text.
    """
    # The first and the last in order share the common prefix of all names.
    ends = sorted({min(names), max(names)}) if names else []
    calls = [(name, arguments) for name in ends for arguments in _ARGUMENTS]
    replies = [(_call(name, arguments), [_tool(name)]) for name, arguments in calls]
    replies = replies or [({"role": "assistant", "content": text}, []) for text in _TEXTS]
    for unthought in _UNTHOUGHT:
        rows: list[Sequence[int]] = []
        for message, tools in replies:
            try:
                prompt = render([_ASKED], tools, reply_follows=True)
                conversation = render([_ASKED, {**message, **unthought}], tools)
            except UNFIT:
                break
            ids = _behind(prompt, conversation, "".join(unthought.values()), tokenizer)
            if ids is None or not _is_meant(reads(ids, prompt, tools), message):
                break
            rows.append(ids)
        if len(rows) == len(replies):
            return common(rows)
    return None


def _behind(
    prompt: Sequence[int], conversation: Sequence[int], thought: str, tokenizer: CutTokenizer
) -> list[int] | None:
    """Return the ids rendered after the prompt and the thinking; None: the reply does not continue
    the prompt.

    Text that the prompt begins may be tokenized differently where more of it follows.
    """
    same = len(common((prompt, conversation)))
    begun, rest = tokenizer.text(prompt[same:]) + thought, conversation[same:]
    if not begun:
        return list(rest)
    for n in range(1, min(len(rest), _LONGEST) + 1):
        text = tokenizer.text(rest[:n])
        if text.startswith(begun):
            return [*tokenizer.encode(text[len(begun) :]), *rest[n:]]
        if not begun.startswith(text):
            return None
    return None


def _is_meant(reply: Reply, message: Mapping[str, Any]) -> bool:
    """Return whether a reply parses back to the message it was rendered from."""
    calls = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
    functions = [wanted["function"] for wanted in message.get("tool_calls", ())]
    same = calls == [(f["name"], json.loads(f["arguments"])) for f in functions]
    return same and reply.text == message["content"] and not reply.reasoning


def common(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the common prefix of all rows."""
    alike = takewhile(lambda column: len({*column}) == 1, zip(*rows, strict=False))
    return tuple(column[0] for column in alike)


def _tool(name: str) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


def _call(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    # Some formats name the tool in the id.
    call = {"id": f"functions.{name}:0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
