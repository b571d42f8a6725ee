"""Tool calls in a reply: the marks of each chat format, and how what stands between them is read.

Rules: a call is read as a whole or not at all; where a tag is missing, doubled or ambiguous, there
is no call, and the client gets the text. Marks are found by token ids, so that text which merely
looks like one is text. An argument's value is what stands between its tags, except for the newlines
that the format itself writes there.

In XML the tags of arguments are text. A closing tag is part of a value only where the value opens
it, too: with one tag lost, their numbers differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import uuid4

from renderers import ParsedToolCall, ToolCallParseStatus

from tinker_claw.render.schema import no_constant, typed
from tinker_claw.types import Tool, ToolCall

Tools: TypeAlias = Sequence[Tool]
Decode: TypeAlias = Callable[[Sequence[int]], str]

_TAG = "\udc02"
"""Half a surrogate pair, which no decoded text can hold: precedes a tag that is a single token."""
_NAME = re.compile(r"""[^\s<>{}()\[\]"'=,;]+""")
"""Name of a tool that is not on offer; the agent answers that it does not exist."""
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters", "args")
_EXECUTABLE = frozenset(
    {
        ToolCallParseStatus.OK,
        ToolCallParseStatus.UNKNOWN_TOOL,
        ToolCallParseStatus.INVALID_JSON,
    }
)


class Call(NamedTuple):
    """A call as a format writes it."""

    name: str
    arguments: Mapping[str, Any]


Read: TypeAlias = Callable[[str, Tools], Sequence[Call] | None]
"""Reads the text of a block; None: it is no whole call."""


@dataclass(frozen=True, slots=True)
class Family:
    """The marks of replies in one family of chat formats, each a single token."""

    read: Read | None = None
    """Reads calls in a form of its own; None: there is none but JSON."""
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Around one block of calls."""
    section: tuple[str, str] | None = None
    """Around all blocks of a reply."""
    think: tuple[str, str] = ("<think>", "</think>")
    inner: tuple[str, ...] = ()
    """Tags within a block that are single tokens."""
    end: str = ""
    """Ends a call of this form, and shows that no argument is missing; "": nothing does."""


class CallReader:
    """Reads the blocks of calls in one tokenizer's replies."""

    def __init__(self, family: Family, added: Mapping[str, int], decode: Decode) -> None:
        """Set up a reader. `added`: the tokenizer's added tokens, with the family's marks."""
        self._family = family
        self._decode = decode
        self._tags = {added[tag]: _TAG + tag for tag in family.inner}

    def read(self, block: Sequence[int], tools: Tools) -> list[ToolCall] | None:
        """Return the calls between two marks; None: they are not whole."""
        text, read = self._text(block), self._family.read
        try:
            calls = (read and read(text, tools)) or [read_json(text, tools)]
        except (ValueError, RecursionError):  # numbers of thousands of digits, endless nesting
            return None
        tool_calls = [call and tool_call(call, tools) for call in calls]
        return [call for call in tool_calls if call] if all(tool_calls) else None

    def breaks_off(self, block: Sequence[int]) -> bool:
        """Return whether a block may end within its arguments."""
        text = self._text(block).strip()
        end = "}" if text.startswith("{") else self._family.end
        if not end or not text.endswith(end):
            return True
        # In JSON an argument ends with its quotation mark.
        return not end.endswith(">") and _ESCAPED.sub("", text).count('"') % 2 == 1

    def _text(self, block: Sequence[int]) -> str:
        if self._tags.keys().isdisjoint(block):
            return self._decode(block)
        pieces, run = list[str](), list[int]()
        for token in block:
            if token not in self._tags:
                run.append(token)
                continue
            pieces += (self._decode(run) if run else "", self._tags[token])
            run = []
        return "".join([*pieces, self._decode(run) if run else ""])


def tool_call(call: Call, tools: Tools) -> ToolCall | None:
    """Return the call, with an id that agents keep unchanged, or None where it cannot be sent.

    Its arguments become compact JSON, written as JavaScript writes it.
    """
    name, value = call
    if not (_NAME.fullmatch(name) or _schemas(name, tools)):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # Half a surrogate pair in a name can neither be sent nor stored.
        name.encode()
    except (ValueError, RecursionError):
        return None
    # Nor can it in an argument, escaped neither: the call comes back as JSON, which is refused.
    arguments = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return ToolCall(id=f"call{uuid4().hex}", name=name, arguments=arguments)


def of_package(family: str, attempt: ParsedToolCall, tools: Tools) -> ToolCall | None:
    """Return a call as the package has read it; None: it is not whole."""
    if attempt.status not in _EXECUTABLE:
        return None
    name, value = cast("Any", attempt.name), cast("Any", attempt.arguments)
    try:
        if family in ("inkling", "llama-3"):
            parsed = read_json(attempt.raw, tools)
            return parsed and tool_call(parsed, tools)
        value = _object(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(value, dict):
        return None
    call = tool_call(Call(name, cast("dict[str, Any]", value)), tools)
    late = LATE.get(family)
    if call and late and any(tag in call.arguments.replace('\\"', '"') for tag in late.tags):
        return None  # an argument reaches over its own end
    return call


def read_json(text: str, tools: Tools) -> Call | None:
    """Read a call that is one JSON object: a name and its arguments, nothing else."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        fields = _object(text)
    except ValueError:
        return None
    name = fields.pop("name", None)
    if not isinstance(name, str) or len(fields) > 1 or not fields.keys() <= {*_ARGUMENTS}:
        return None
    arguments = next(iter(fields.values()), None)
    if arguments is None:  # complete only if there is nothing to give
        takes_nothing = any(not s or s.get("properties") == {} for s in _schemas(name, tools))
        return Call(name, {}) if takes_nothing else None
    try:
        arguments = _object(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    return Call(name, cast("dict[str, Any]", arguments)) if isinstance(arguments, dict) else None


class _Xml(NamedTuple):
    """Tags of a call and of its arguments."""

    begin: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]
    line: bool
    """Whether a value stands on lines of its own."""


_QWEN = _Xml(
    re.compile(r"\s*<function=([^<>\n]+)>"),
    re.compile(r"\s*<parameter=([^<>\n]+)>"),
    re.compile(r"\s*</function>"),
    line=True,
)
_MINIMAX = _Xml(
    re.compile(r'\s*<invoke name="([^"<>\n]+)">'),
    re.compile(r'\s*<parameter name="([^"<>\n]+)">'),
    re.compile(r"\s*</invoke>"),
    line=False,
)
_ARGUMENT = re.compile(r"(</parameter>)|<parameter(?:=[^<>\n]*|\s[^<>]*)?>")


def _read_xml(form: _Xml, text: str, tools: Tools) -> list[Call] | None:
    """Read calls whose tags are text."""
    calls, at = list[Call](), 0
    while begun := form.begin.match(text, at):
        at, values = begun.end(), dict[str, str]()
        while argument := form.argument.match(text, at):
            end = _closing(text, argument.end())
            if end is None or argument[1] in values:
                return None
            value = text[argument.end() : end[0]]
            if form.line:
                value = value.removeprefix("\n").removesuffix("\n")
            values[argument[1]], at = value, end[1]
        end_tag = form.end.match(text, at)
        if end_tag is None:
            return None
        at = end_tag.end()
        calls.append(_typed(begun[1], values, tools))
    return calls if not text[at:].strip() else None


def _closing(text: str, at: int) -> tuple[int, int] | None:
    """Return where the tag that closes the argument begins and ends."""
    depth = 1
    for tag in _ARGUMENT.finditer(text, at):
        if not tag[0].endswith("/>"):
            depth += -1 if tag[1] else 1
        if not depth:
            return tag.span()
    return None


class _Pairs(NamedTuple):
    """A name and pairs of tags, which are single tokens or, in some formats, text."""

    name: re.Pattern[str]
    pair: re.Pattern[str]
    tag: re.Pattern[str]


def _pairs(mark: str, suffix: str = "", name_end: str = "") -> _Pairs:
    tags = [mark + re.escape(f"<{tag}{suffix}>") for tag in ("arg_key", "/arg_key")]
    tags += [mark + re.escape(f"<{tag}{suffix}>") for tag in ("arg_value", "/arg_value")]
    key, key_end, value, value_end = tags
    return _Pairs(
        re.compile(rf"\s*([^\s{_TAG}<>{{}}\"]+)\s*{name_end}\s*"),
        re.compile(rf"{key}([^<{_TAG}]*){key_end}\s*{value}(.*?){value_end}\s*", re.DOTALL),
        re.compile("|".join([*tags, _TAG])),
    )


_GLM = _pairs(_TAG)
_LAGUNA = _pairs("")
_HY3_SUFFIX = ":opensource"
_HY3 = _pairs(_TAG, _HY3_SUFFIX, name_end=_TAG + re.escape(f"<tool_sep{_HY3_SUFFIX}>"))


def _read_pairs(form: _Pairs, text: str, tools: Tools) -> Sequence[Call] | None:
    begun = form.name.match(text)
    if begun is None:
        return None
    values, at = dict[str, str](), begun.end()
    while pair := form.pair.match(text, at):
        key, value = pair[1].strip(), pair[2]
        if key in values or form.tag.search(value):
            return None
        values[key], at = value, pair.end()
    return [_typed(begun[1], values, tools)] if at == len(text) else None


_KIMI_CALL = re.compile(
    rf"\s*(?:functions\.)?([^\s{_TAG}:]+)(?::\d+)?\s*"
    rf"{_TAG}<\|tool_call_argument_begin\|>([^{_TAG}]*)"
)
_DEEPSEEK_CALL = re.compile(
    rf"\s*function\s*{_TAG}<｜tool▁sep｜>\s*([^\s{_TAG}]+)\s*?\n```json\n([^{_TAG}]*?)\n?```\s*"
)


def _read_named(form: re.Pattern[str], text: str, tools: Tools) -> Sequence[Call] | None:
    """Read a name, and arguments in JSON."""
    match = form.fullmatch(text)
    return match and [Call(match[1], _object(match[2]))]


HERMES = Family()
_XML = Family(partial(_read_xml, _QWEN), end="</function>")
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_FAMILY = Family(partial(_read_pairs, _GLM), inner=_GLM_TAGS)
_LAGUNA_FAMILY = Family(partial(_read_pairs, _LAGUNA))
_KIMI = Family(
    partial(_read_named, _KIMI_CALL),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
    end="}",
)
_DEEPSEEK = Family(
    partial(_read_named, _DEEPSEEK_CALL),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=("<｜tool▁sep｜>",),
    end="```",
)
_HUNYUAN = Family(
    partial(_read_pairs, _HY3),
    (f"<tool_call{_HY3_SUFFIX}>", f"</tool_call{_HY3_SUFFIX}>"),
    (f"<tool_calls{_HY3_SUFFIX}>", f"</tool_calls{_HY3_SUFFIX}>"),
    (f"<think{_HY3_SUFFIX}>", f"</think{_HY3_SUFFIX}>"),
    (*(tag.replace(">", f"{_HY3_SUFFIX}>") for tag in _GLM_TAGS), f"<tool_sep{_HY3_SUFFIX}>"),
)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), HERMES),
    **dict.fromkeys(("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"), _XML),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _XML),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM_FAMILY),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA_FAMILY),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), _KIMI),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), _DEEPSEEK),
    "minimax-m2": Family(
        partial(_read_xml, _MINIMAX),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        end="</invoke>",
    ),
    "hy3": _HUNYUAN,
}
"""By the names of the `renderers` package. Replies of its other formats are read by the package,
when they are complete."""


class Late(NamedTuple):
    """Tags of a format whose replies the package reads."""

    tags: tuple[str, ...]
    """Pieces of the tags of its calls."""
    think: tuple[str, str]
    begin: str
    """What its calls begin with."""


LATE: Mapping[str, Late] = {
    "deepseek-v4": Late(("｜DSML｜",), ("<think>", "</think>"), "<｜DSML｜"),
    "gemma4": Late(
        ("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|channel>", "<channel|>"), "<|tool_call>"
    ),
}


def _typed(name: str, values: Mapping[str, str], tools: Tools) -> Call:
    schema: Any = next(iter(_schemas(name, tools)), {})
    return Call(name, {key: typed(value, key, schema) for key, value in values.items()})


def _schemas(name: str, tools: Tools) -> list[Mapping[str, Any]]:
    """Return the schemas of the arguments of the tools of a name."""
    functions = (tool["function"] for tool in tools)
    return [f.get("parameters") or {} for f in functions if f["name"] == name]


def _object(text: str) -> dict[str, Any]:
    """Raises ValueError where a text is no JSON object, or has a key twice."""
    # Newlines may stand in strings as they are: nothing else can be meant.
    value = json.loads(text, strict=False, object_pairs_hook=_unique, parse_constant=no_constant)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields
