"""One chat format of a model: the switches that a request may set, and messages to prompts.

Rules: a switch is set exactly as asked or refused by name. What a template does by itself is said
by no switch, so that requests which mean the same have the same prompt.

The prompt is the package's full render, id for id. What is faster (a layout, the remembered ids of
a history) is used only with formats that passed its try-out, and a request of which it cannot tell
exactly is rendered the plain way.
"""

from __future__ import annotations

import hashlib
import marshal
import os
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import Any, TypeAlias, cast

import renderers
from renderers.base import merge_chat_template_kwargs

from tinker_claw.errors import RequestError
from tinker_claw.render.begun import Beginnings
from tinker_claw.render.outside_text import CutTokenizer, Guard, written_tools
from tinker_claw.render.own_template import UNFIT, OwnTemplate
from tinker_claw.render.prompt_cache import (
    Encoder,
    History,
    Keep,
    Piece,
    PlaceholderTokenizer,
    Prompt,
    PromptLayout,
    TextPiece,
    UnknownPlaceholder,
)
from tinker_claw.types import Message, Tokens, noted

Switches: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, in the order of the names; () leaves all to the template."""

_ON_OFF = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF = ("none", "minimal")
_NO_THINKING = "no_think"


def switches(
    config: Any, template: Mapping[str, Any], effort: str | None, effort_at: str = _EFFORT
) -> Switches:
    """The switches that a request sets.

    Args:
        config: the chat format's config, of the `renderers` package.
        template: what chat_template_kwargs says.
        effort: how much the model shall think.
        effort_at: the field that says so.

    Raises:
        RequestError: this chat format has no such switch, or does not take the value.
    """
    for name, value in template.items():
        where = f"chat_template_kwargs.{name}"
        if name not in renderers.template_field_names(config):
            raise RequestError(f"{where} is not a switch of this model.", param=where)
        if not _takes(config, {name: value}):
            raise RequestError(f"{where} does not take this value.", param=where)
    meant = {} if effort is None else _of_effort(config, effort, effort_at)
    for name, value in meant.items():
        if template.get(name, value) != value:
            raise RequestError(
                f"{effort_at} {effort} contradicts chat_template_kwargs.{name}.",
                param=effort_at,
            )
    asked = {**template, **meant}
    return tuple(
        (name, asked[name]) for name in sorted(asked) if asked[name] != getattr(config, name)
    )


def _of_effort(config: Any, effort: str, at: str) -> Mapping[str, Any]:
    """Switches that come nearest to an effort: a level where there are any, else on or off."""
    known = renderers.template_field_names(config)
    switch = next((name for name in _ON_OFF if name in known), None)
    off = effort in _OFF
    if _EFFORT in known:
        level = {_EFFORT: effort}
        if _takes(config, level):
            return level if switch is None else {**level, switch: not off}
        if off and _takes(config, {_EFFORT: _NO_THINKING}):
            return {_EFFORT: _NO_THINKING}
        if switch is None or not off:
            raise RequestError(f"{at} {effort} is not a level of this model.", param=at)
    if switch is None:
        raise RequestError(
            f"{at} is not a switch of this model, nor is there one for thinking.",
            param=at,
        )
    return {switch: not off}


def _takes(config: Any, options: Mapping[str, Any]) -> bool:
    try:
        merged = merge_chat_template_kwargs(config, options)
    except (ValueError, TypeError):
        return False
    # The package reads "no" and 0 as False; here a value is what it says.
    return all(
        getattr(merged, name) == value
        and isinstance(getattr(merged, name), bool) is isinstance(value, bool)
        for name, value in options.items()
    )


Tools = Sequence[Mapping[str, Any]]

_ENCODES_BY_ITSELF = frozenset({"gpt-oss"})
"""Over OpenAI's own encoder, which takes all text for text and writes control tokens one by one."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_STAND_IN = {
    "type": "function",
    "function": {"name": "stand", "description": "", "parameters": {"type": "object"}},
}
_CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASKED = {"role": "user", "content": " Look there,\nand here. "}
_CALLED = {"role": "assistant", "content": "So I do.", "tool_calls": [_CALL, _CALL | {"id": "b2"}]}
_FOUND = [
    {"role": "tool", "tool_call_id": "a1", "content": "nothing"},
    {"role": "tool", "tool_call_id": "b2", "content": "grüße\n\n"},
]
_SAID = {"role": "assistant", "content": "Nothing.", "reasoning_content": "I looked."}
_THANKED = {"role": "user", "content": "user"}
_GUESSED = {"role": "assistant", "content": "Here?"}
_SOUGHT = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Where?",
    "tool_calls": [_CALL],
}
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_ASKED], []),
    ([_SYSTEM, _ASKED], [_TOOL]),
    ([_SYSTEM, _ASKED, _CALLED, *_FOUND], [_TOOL]),
    ([_SYSTEM, _ASKED, _CALLED, *_FOUND, _SAID, _THANKED], [_TOOL]),
    ([_SYSTEM, _ASKED, _SAID, _THANKED, _ASKED], []),
)
"""Conversations with everything that changes how a format puts messages together."""

_TALKED = [_ASKED, _SOUGHT, _FOUND[0], _THANKED, _ASKED, _GUESSED, _SAID, _CALLED, *_FOUND, _SAID]
_WORKED = [_ASKED, *[_SOUGHT, _FOUND[0], _THANKED] * 2, *[_SOUGHT, _FOUND[0]] * 2, _SAID, _THANKED]
_DIVIDED: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_SYSTEM, *_TALKED, _ASKED, _SAID], [_TOOL]),
    ([_SYSTEM, *_WORKED, _SOUGHT, _FOUND[0], _THANKED], [_TOOL]),
    (_WORKED, []),
)
"""Conversations with all neighbours between which one may be divided, what the model thought
before a call in front of them, and an answer to the user behind them."""
_MOVED = "[System message]\n\n"
"""Before the words of a system message that a user's message holds, as its format knows none where
it stands."""
_BACK = 8
"""Places at which a conversation may have gone on that are looked at, the last ones."""


class Format:
    """A format of the `renderers` package over one tokenizer."""

    def __init__(
        self,
        tokenizer: CutTokenizer,
        guard: Guard,
        encoder: Encoder,
        config: Any,
        switches: Any = None,
    ) -> None:
        """
        Args:
            guard: of the tokenizer's added tokens.
            config: of the package, or None to go by the tokenizer's name.
            switches: template switches, as in chat_template_kwargs.
        """
        self.plain = renderers.create_renderer(
            cast("Any", tokenizer), config, chat_template_kwargs=switches
        )
        self._encoder = encoder
        self._typesetter = PlaceholderTokenizer(tokenizer, encoder)
        self._laying: renderers.Renderer | None = None
        self._divides: frozenset[tuple[str, str]] = frozenset()
        self._stands_in = False
        self._salted = hashlib.sha256(os.urandom(32))
        name: str = cast("Any", self.plain).config.name
        self._guard = Guard(()) if name in _ENCODES_BY_ITSELF else guard
        self.beginnings = Beginnings(self.plain, tokenizer, self._guard)
        self.own: OwnTemplate | None = None
        """The tokenizer's own template, where the package has no format for the model."""
        if name == "default":
            self.own = OwnTemplate(tokenizer, config, switches)
        else:
            self._laying = renderers.create_renderer(
                cast("Any", self._typesetter), config, chat_template_kwargs=switches
            )
            if self._tried_out():
                self._divides = self._tried_to_divide()
                self._stands_in = self._tried_stand_ins()
            else:
                self._laying = None
        self._moves_system = self._fits(_ASKED, _SAID, _THANKED) and not self._fits(
            *(_ASKED, _SAID, _SYSTEM, _THANKED)
        )

    @property
    def lays_out(self) -> bool:
        """Prompts cost what is new in them."""
        return self._laying is not None

    def lay_out(
        self, messages: Sequence[Message], tools: Tools | None, hint: int | None
    ) -> PromptLayout:
        """The prompt, its texts not encoded yet.

        Args:
            hint: index of the message at whose end a hint would go.

        Raises:
            RequestError: the format refuses these messages.
        """
        messages = self._placed(messages, _head(messages))
        try:
            found = self._lay(messages, tools, hint)
            if found is None:
                said, offered = self._guarded(messages, tools)
                prompt = self._render(said, offered, hint)
                found = PromptLayout(self._encoder, prompt.tokens, {}, prompt.hint_at)
        except UNFIT as error:
            raise RequestError(
                f"The model's chat format does not take these messages: {first_line(error)}.",
                param="messages",
            ) from error
        return found

    def extend(
        self,
        prompt: Tokens,
        completion: Tokens,
        messages: Sequence[Message],
        tools: Tools | None,
        hint: int | None,
    ) -> Prompt | None:
        """The sampled stream with `messages` behind it, or None where the format forbids it."""
        messages = self._placed(messages, 0)
        try:
            said, offered = self._guarded(messages, tools)
            rendered = self.plain.bridge_to_next_turn(
                list(prompt), list(completion), cast("Any", said), tools=cast("Any", offered)
            )
        except UNFIT:  # a full render says what is wrong
            return None
        if rendered is None:
            return None
        return Prompt(tuple(rendered.token_ids), content_end(rendered, hint))

    def _placed(self, messages: Sequence[Message], head: int) -> Sequence[Message]:
        """The messages as the format takes them: where it knows no system message behind the first
        `head` ones, the user's role says its words, at the same place."""
        if not self._moves_system:
            return messages
        return [
            {"role": "user", "content": _MOVED + said["content"]}
            if at >= head and said["role"] == "system"
            else said
            for at, said in enumerate(messages)
        ]

    def _fits(self, *messages: Message) -> bool:
        """Whether the format takes these messages."""
        try:
            self._render(messages, None, None)
        except UNFIT:
            return False
        return True

    def _guarded(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        return self._guard.messages(messages), self._guard.tools(tools) if tools else None

    def _lay(
        self, messages: Sequence[Message], tools: Tools | None, hint: int | None
    ) -> PromptLayout | None:
        """None: only the plain way can tell.

        Where the ids of the messages up to a place are remembered, only what is behind that place
        is rendered, and something short in place of system messages and tools that are known.
        """
        laying = self._laying
        if laying is None:
            return None
        head, kinds = _head(messages), _kinds(messages)
        first = messages[:head]
        digest = self._salted.copy()
        digest.update(noted(_digest_of_tools, tools or ()) + _digests(first) + b"|")
        front, front_digest = None, digest.digest()
        has_front = self._stands_in and _may_stand_in(kinds, head, hint)
        if has_front and (front := self._encoder.history(front_digest)) is not None:
            first, tools = _stand_ins(first, tools)
        places = self._places(messages, kinds, digest, head)
        start, known, history = self._remembered(places, head, hint)
        said, offered = self._guarded([*first, *messages[start:]], tools)
        left_out = start - head
        inside = hint is not None and head <= hint < start  # the history tells where it goes
        told = None if hint is None or inside else hint - left_out if hint >= head else hint
        with self._typesetter.recording(None if told is None else said[told]["content"]) as pieces:
            rendered = laying.render(
                cast("Any", said), add_generation_prompt=True, tools=cast("Any", offered)
            )
            before = [] if front is None else [self._typesetter.known(front.ids)]
            parts = [] if history is None else [*map(self._typesetter.known, history.parts())]
        if told is not None and _mixed(rendered, told, pieces):
            return None
        cut = _first_of(rendered.message_indices, head)
        if front is None:
            before = rendered.token_ids[:cut]
        begin = len(before)
        ids = [*before, *parts, *rendered.token_ids[cut:]]
        moved = begin + len(parts) - cut
        hint_at = content_end(rendered, told)
        if history is not None and inside:
            hint_at = None if history.hint_at is None else begin + 1
        elif hint_at is not None and hint_at > cut:
            hint_at += moved
        keep: list[Keep] = []
        if has_front and front is None:
            keep.append(Keep(front_digest, 0, begin, None, None))
        if places and places[-1][0] > start:
            until, name = places[-1]
            end = _first_of(rendered.message_indices, until - left_out) + moved
            asked = hint if hint in range(head, until) else None
            keep.append(Keep(name, begin, end, asked, known))
        try:
            return PromptLayout(self._encoder, ids, pieces, hint_at, keep)
        except UnknownPlaceholder:
            self._laying = None  # it keeps ids between renders
            return None

    def _remembered(
        self, places: Sequence[tuple[int, bytes]], head: int, hint: int | None
    ) -> tuple[int, bytes | None, History | None]:
        """The longest remembered history in which the place for the hint is known: its end, its
        digest and its ids.
        """
        for end, digest in reversed(places):
            history = self._encoder.history(digest)
            if history is not None and (hint not in range(head, end) or history.hint == hint):
                return end, digest, history
        return head, None, None

    def _places(
        self, messages: Sequence[Message], kinds: Sequence[str], digest: Any, head: int
    ) -> list[tuple[int, bytes]]:
        """Where the conversation may be divided, and digests of all that is before.

        Not behind the last question: before it formats leave out what the model thought.

        Args:
            digest: of what is in front of the conversation.
        """
        last = _last_question(messages)
        if not self._divides or last is None or _SYSTEM["role"] in kinds[head:]:
            return []
        ends = (i for i in range(last, head, -1) if (kinds[i - 1], kinds[i]) in self._divides)
        places: list[tuple[int, bytes]] = []
        done = head
        for end in sorted(islice(ends, _BACK)):
            digest.update(_digests(messages[done:end]))
            places.append((end, digest.digest()))
            done = end
        return places

    def _render(self, messages: Sequence[Message], tools: Tools | None, hint: int | None) -> Prompt:
        if self.own is not None:
            return self.own.prompt(messages, tools, hint)
        said: Any = messages
        rendered = self.plain.render(said, tools=cast("Any", tools), add_generation_prompt=True)
        return Prompt(tuple(rendered.token_ids), content_end(rendered, hint))

    def _tried_out(self) -> bool:
        """Whether a layout gives what a plain render gives, wherever the format takes the probe."""
        agreed = 0
        for messages, tools in _PROBES:
            hint = _last_question(messages)
            try:
                expected = self._render(*self._guarded(messages, tools), hint)
            except UNFIT:
                continue
            try:
                found = self._lay(messages, tools, hint)
            except (*UNFIT, AssertionError, NotImplementedError):
                return False
            if found is not None and found.prompt() != expected:
                return False
            agreed += found is not None
        return agreed > 0

    def _tried_to_divide(self) -> frozenset[tuple[str, str]]:
        """Kinds of neighbours between which a conversation may be divided.

        That is where the ids of all before are those that it had when a question stood there, and
        the ids of all behind are those that it has without what was before.
        """
        good, bad = set[tuple[str, str]](), set[tuple[str, str]]()
        for messages, tools in _DIVIDED:
            head, kinds = _head(messages), _kinds(messages)
            try:
                whole = self._attributed(messages, tools, range(len(messages)))
            except UNFIT:
                return frozenset()
            for at in range(head + 1, (_last_question(messages) or 0) + 1):
                if kinds[at] == "tool":  # it belongs to the call
                    continue
                try:
                    asked = [*messages[:at], _THANKED]
                    before = self._attributed(asked, tools, range(len(asked)))
                    places = [*range(head), *range(at, len(messages))]
                    behind = self._attributed([messages[i] for i in places], tools, places)
                except UNFIT:
                    before = behind = []
                begin, end = (_first_of([i for i, *_ in before], place) for place in (head, at))
                cut = _first_of([i for i, *_ in behind], at)
                same = [*behind[:cut], *before[begin:end], *behind[cut:]] == whole
                (good if same else bad).add((kinds[at - 1], kinds[at]))
        return frozenset(good - bad)

    def _tried_stand_ins(self) -> bool:
        """Whether system messages and tools change nothing behind them but by being there, and
        nothing behind changes them."""

        def cut(head: Sequence[Message], said: Sequence[Message], tools: Tools | None) -> list[Any]:
            found = self._attributed([*head, *said], tools or [], range(len(head) + len(said)))
            at = _first_of([place for place, *_ in found], len(head))
            return [found[:at], found[at:]]

        heads: tuple[list[dict[str, Any]], ...] = ([], [_SYSTEM], [_SYSTEM, _SYSTEM])
        tried = 0
        for head, tools, said in product(heads, ([], [_TOOL]), (_TALKED, _WORKED, [_ASKED])):
            try:
                front, behind = cut(head, said, tools)
            except UNFIT:
                continue
            try:
                short, few = _stand_ins(head, tools)
                if cut(head, [_THANKED], tools)[0] != front or cut(short, said, few)[1] != behind:
                    return False
            except UNFIT:
                return False
            tried += 1
        return tried > 0

    def _attributed(
        self, messages: Sequence[Message], tools: Tools, places: Sequence[int]
    ) -> list[tuple[int, int | Piece, bool]]:
        """Of each id or placeholder: the message's place, what it stands for, if it is content."""
        assert self._laying is not None
        with self._typesetter.recording(str(_THANKED["content"])) as pieces:
            rendered = self._laying.render(
                cast("Any", messages), add_generation_prompt=True, tools=cast("Any", tools)
            )
        return [
            (places[at] if at >= 0 else at, pieces.get(entry, entry), content)
            for at, entry, content in zip(
                rendered.message_indices,
                rendered.token_ids,
                rendered.is_content or [False] * len(rendered.token_ids),
                strict=True,
            )
        ]


def _digests(messages: Sequence[Message]) -> bytes:
    """Of all that the messages say, one after the other: parts in a row are what the whole is."""
    return b"".join([noted(_digest, message) for message in messages])


def _digest(message: Message) -> bytes:
    said = message.get("content")
    # It may be a str that knows its parts, which marshal does not write.
    plain = {**message, "content": str(said)} if isinstance(said, str) else dict(message)
    return hashlib.sha256(marshal.dumps(plain, 2)).digest()


def _digest_of_tools(tools: Tools) -> bytes:
    return hashlib.sha256(noted(written_tools, tools)).digest()


def _may_stand_in(kinds: Sequence[str], head: int, hint: int | None) -> bool:
    """Whether what is in front of a conversation stands there alone."""
    return head < len(kinds) and "system" not in kinds[head:] and hint not in range(head)


def _stand_ins(
    head: Sequence[Message], tools: Tools | None
) -> tuple[Sequence[Message], Tools | None]:
    """Short ones in place of system messages and of tools, where there are any."""
    short = [{**said, "content": "So."} if said["content"].strip() else said for said in head]
    return short, [_STAND_IN] if tools else tools


def _head(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    behind = (i for i, message in enumerate(messages) if message["role"] != "system")
    return next(behind, len(messages))


def _kinds(messages: Sequence[Message]) -> list[str]:
    """Roles; some formats treat an assistant that calls tools differently."""
    return ["call" if message.get("tool_calls") else message["role"] for message in messages]


def _last_question(messages: Sequence[Message]) -> int | None:
    """Index of the last message of the user that says anything."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at]["role"] == "user" and messages[at]["content"].strip():
            return at
    return None


def _first_of(messages: Sequence[int], message: int) -> int:
    """Index of the first id of this message or a later one; `messages`: of each id its message."""
    return next((i for i, at in enumerate(messages) if at >= message), len(messages))


def content_end(rendered: renderers.RenderedTokens, message: int | None) -> int | None:
    """Index behind the last content token of a message; None without exact attribution."""
    if message is None or not rendered.is_content:
        return None
    for at in range(len(rendered.token_ids) - 1, -1, -1):
        if rendered.message_indices[at] == message and rendered.is_content[at]:
            return at + 1
    return None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _mixed(rendered: renderers.RenderedTokens, message: int, pieces: Mapping[int, Piece]) -> bool:
    """Whether a placeholder of the message stands for content and frame at once."""
    return any(
        at == message and isinstance(piece := pieces.get(entry), TextPiece) and piece.mixed
        for entry, at in zip(rendered.token_ids, rendered.message_indices, strict=True)
    )
