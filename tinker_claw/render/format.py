"""One chat format of a model: the switches that a request may set, and rendering of prompts.

Rules: a switch is set exactly as asked or refused by name. A template's default is expressed by no
switch, so that requests which mean the same have the same prompt.

The prompt is the package's full render, id for id. Cached ids of a prompt's beginning are used only
with formats that passed a test: the ids of a message may depend on its neighbours and on whether a
question follows, and on nothing else.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice, product
from typing import Any, NamedTuple, TypeAlias, cast

import renderers
from renderers.base import merge_chat_template_kwargs

from tinker_claw.errors import RequestError
from tinker_claw.images import images_in, placed, split
from tinker_claw.render.begun import Beginnings
from tinker_claw.render.eyes import Eyes
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.own_template import UNFIT, OwnTemplate
from tinker_claw.render.prompt_cache import NOTHING, Ids, Known, Prompt, PromptCache
from tinker_claw.types import Message, Tokens, noted

Switches: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, sorted by name; () leaves all to the template."""

_ON_OFF = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF = ("none", "minimal")
_NO_THINKING = "no_think"


def switches(
    config: Any, template: Mapping[str, Any], effort: str | None, effort_at: str = _EFFORT
) -> Switches:
    """Return the switches that a request sets.

    Args:
        config: the chat format's config, of the `renderers` package.
        template: the request's chat_template_kwargs.
        effort: reasoning effort that the request asks for.
        effort_at: the field that holds it.

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
    """Return the switches nearest to an effort: a level where there are any, else on or off."""
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
"""Formats over OpenAI's own encoder, which treats all text as text and writes control tokens
singly."""

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
_TALKED = [_ASKED, _SOUGHT, _FOUND[0], _THANKED, _ASKED, _GUESSED, _SAID, _CALLED, *_FOUND, _SAID]
_WORKED = [_ASKED, *[_SOUGHT, _FOUND[0], _THANKED] * 2, *[_SOUGHT, _FOUND[0]] * 2, _SAID, _THANKED]
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_ASKED], []),
    ([_SYSTEM, *_TALKED, _ASKED, _SAID], [_TOOL]),
    ([_SYSTEM, *_WORKED, _SOUGHT, _FOUND[0], _THANKED], [_TOOL]),
    (_WORKED, []),
)
"""Sample conversations that cover all pairs of neighbours between which one may be divided, with
thinking before a call in front of them, and an answer to the user behind them."""
_MOVED = "[System message]\n\n"
"""Prefix of a system message's words inside a user message, where the format allows no system
message."""
_NUMBERS = count(-1, -1)
_BACK = 8
"""Most places, from the end, at which the cache is looked up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request with the cached parts of its prompt."""

    messages: Sequence[Message]
    """Messages as the format takes them."""
    tools: Tools | None
    hint: int | None
    """Index of the message at whose end a hint would go."""
    head: int
    """Number of system messages in front."""
    front: bytes | None
    """Cache key of the ids of these and of the tools; None: they cannot be cached by themselves."""
    in_front: Known | None
    """Cached ids of the front, where there are any."""
    places: Sequence[tuple[int, bytes]]
    """Places where the conversation may be divided: a message's index, and the cache key of
    everything between the front and it."""
    start: int
    """Index of the first message without cached ids."""
    known: Known
    """Cached ids of the messages from the head to `start`."""

    @property
    def size(self) -> int:
        """Bytes of text that have to be rendered."""
        first = () if self.in_front else self.messages[: self.head]
        new = sum(noted(_digest, said)[1] for said in (*first, *self.messages[self.start :]))
        return new if self.in_front else new + noted(_digest_of_tools, self.tools or ())[1]


class Format:
    """A format of the `renderers` package over one tokenizer."""

    def __init__(
        self,
        tokenizer: CutTokenizer,
        guard: Guard,
        cache: PromptCache,
        config: Any,
        switches: Any = None,
        eyes: Eyes | None = None,
    ) -> None:
        """Set up a format.

        Args:
            guard: guard for the tokenizer's added tokens.
            config: config of the package, or None to go by the tokenizer's name.
            switches: template switches, as in chat_template_kwargs.
            eyes: of the model; None: it sees nothing.
        """
        self._eyes = eyes
        self.plain = renderers.create_renderer(
            cast("Any", tokenizer), config, chat_template_kwargs=switches
        )
        self._tokenizer = tokenizer
        self._cache = cache
        self._salted = hashlib.sha256(os.urandom(32))
        name: str = cast("Any", self.plain).config.name
        self._guard = Guard(()) if name in _ENCODES_BY_ITSELF else guard
        self.beginnings = Beginnings(self.plain, tokenizer, self._guard)
        self.own: OwnTemplate | None = None
        """The tokenizer's own template, where the package has no format for the model."""
        self._divides: frozenset[tuple[str, str]] = frozenset()
        self._stands_in = False
        self._texts = _Texts(tokenizer)
        self._frames: dict[str, list[int]] = {}
        """Ids of texts seen in the tests, most of which formats write again and again."""
        self._ends_texts = True
        """Whether a user's words end a text that is encoded as a whole."""
        self._of_texts: renderers.Renderer | None = None
        if name == "default":
            self.own = OwnTemplate(tokenizer, config, switches)
        else:
            self._of_texts = renderers.create_renderer(
                cast("Any", self._texts), config, chat_template_kwargs=switches
            )
            if self._tried_out():
                self._divides = self._tried_to_divide()
                self._stands_in = self._tried_stand_ins()
            else:
                self._of_texts = None
        self._moves_system = False
        fits = self._fits(_ASKED, _SAID, _THANKED)
        self._moves_system = fits and not self._fits(_ASKED, _SAID, _SYSTEM, _THANKED)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        hint: int | None,
        *,
        remembers: bool = True,
    ) -> Prompt:
        """Render a request.

        Args:
            hint: index of the user's message at whose end a hint would go.
            remembers: whether to cache the ids for a request that continues this one.

        Raises:
            RequestError: the format refuses these messages.
        """
        return self.render(self.plan(messages, tools, hint), remembers=remembers)

    def plan(
        self, messages: Sequence[Message], tools: Tools | None, hint: int | None = None
    ) -> Plan:
        """Look up the cached parts of a request's prompt."""
        head = _head(messages)
        messages = self._placed(messages, head)
        # Behind an image in the same message it is not known where a hint would go.
        if hint is not None and placed(messages[hint]["content"]):
            hint = None
        hint = hint if self._tokenizer.tells_starts else None
        kinds, last = _kinds(messages), _last_question(messages)
        front, in_front = None, None
        places: list[tuple[int, bytes]] = []
        if last is not None and "system" not in kinds[head:]:
            digest = self._salted.copy()
            digest.update(noted(_digest_of_tools, tools or ())[0] + _digests(messages[:head]))
            digest.update(b"|")
            if self._stands_in:
                front = digest.digest()
                in_front = self._cache.get(front)
            # Not behind the last question: before it formats leave out what the model thought.
            ends = (i for i in range(last, head, -1) if (kinds[i - 1], kinds[i]) in self._divides)
            done = head
            for end in sorted(islice(ends, _BACK)):
                digest.update(_digests(messages[done:end]))
                places.append((end, digest.digest()))
                done = end
        start, known = head, NOTHING
        for end, name in reversed(places):
            found = self._cache.get(name)
            if found is not None and (hint not in range(end) or hint == found.hint):
                start, known = end, found
                break
        return Plan(messages, tools, hint, head, front, in_front, places, start, known)

    def render(self, plan: Plan, *, remembers: bool = True) -> Prompt:
        """Render the new parts and append them to the cached ones; see `prompt`."""
        try:
            if self.own is not None:
                return self.own.prompt(*self._guarded(plan.messages, plan.tools), plan.hint)
            return self._spread(self._render(plan, remembers), plan.messages)
        except UNFIT as error:
            raise RequestError(
                f"The model's chat format does not take these messages: {first_line(error)}.",
                param="messages",
            ) from error

    def _render(self, plan: Plan, remembers: bool) -> Prompt:
        first, tools, front = plan.messages[: plan.head], plan.tools, plan.in_front
        if plan.front is not None:
            if front is None:
                alone = self._rendered([*first, _THANKED], tools, None)
                end = _first_of(alone.messages, plan.head)
                front = Known(Ids.of(alone.ids[:end]))
                if remembers:
                    self._cache.keep(plan.front, front)
            first, tools = _stand_ins(first, tools)
        hint, known, left_out = plan.hint, plan.known, plan.start - plan.head
        asked = hint - left_out if hint is not None and hint >= plan.start else None
        new = self._rendered([*first, *plan.messages[plan.start :]], tools, asked)
        cut = _first_of(new.messages, plan.head)
        before = Ids.of(new.ids[:cut]) if front is None else front.ids
        hint_at = known.hint_at if hint == known.hint else None
        if new.hint_at is not None:
            hint_at = new.hint_at + len(known.ids.tokens) - cut
        if remembers and plan.places and plan.places[-1][0] > plan.start:
            (until, name), instead_of = plan.places[-1], dict(plan.places).get(plan.start)
            end = _first_of(new.messages, until - left_out)
            ids, cut = Ids.joined([known.ids, Ids.of(new.ids[cut:end])]), end
            known = Known(ids, hint, hint_at) if hint in range(until) else Known(ids)
            self._cache.keep(name, known, instead_of)
        whole = Ids.joined([before, known.ids, Ids.of(new.ids[cut:])])
        if hint_at is not None:
            hint_at += len(before.tokens)
        return Prompt(whole.tokens, hint_at, whole.packed)

    def extend(
        self,
        prompt: Tokens,
        completion: Tokens,
        messages: Sequence[Message],
        tools: Tools | None,
        hint: int | None,
    ) -> Prompt | None:
        """Return the sampled stream followed by `messages`, or None where the format forbids it."""
        messages = self._placed(messages, 0)
        seen = {"process_multimodal": False} if images_in(messages) else {}
        try:
            said, offered = self._guarded(messages, tools)
            rendered = cast("Any", self.plain).bridge_to_next_turn(
                list(prompt), list(completion), said, tools=offered, **seen
            )
        except UNFIT:  # a full render says what is wrong
            return None
        if rendered is None:
            return None
        if hint is not None and placed(messages[hint]["content"]):
            hint = None
        found = Prompt(tuple(rendered.token_ids), _content_end(rendered, hint))
        return self._spread(found, messages)

    def _spread(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Return the prompt with the tokens of the images in these, its last messages."""
        images = images_in(messages)
        return self._eyes.spread(prompt, images) if images and self._eyes else prompt

    def _placed(self, messages: Sequence[Message], head: int) -> Sequence[Message]:
        """Return the messages as the format takes them: where it allows no system message after the
        first `head` ones, a user message in the same place holds its words."""
        if not self._moves_system:
            return messages
        return [
            {"role": "user", "content": _MOVED + said["content"]}
            if at >= head and said["role"] == "system"
            else said
            for at, said in enumerate(messages)
        ]

    def _fits(self, *messages: Message) -> bool:
        """Return whether the format takes these messages."""
        try:
            self.prompt(messages, None, None, remembers=False)
        except RequestError:
            return False
        return True

    def _guarded(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if self._eyes is None and (images := images_in(messages)):
            raise images[0].wrong("is an image, and this model reads text only")
        said = [{**m, "content": _parted(m["content"])} if _sees(m) else m for m in messages]
        return self._guard.messages(said), self._guard.tools(tools) if tools else None

    def _rendered(
        self, messages: Sequence[Message], tools: Tools | None, hint: int | None
    ) -> _Rendered:
        said, offered = self._guarded(messages, tools)
        found = self._by_text(said, offered, hint) if self._of_texts is not None else None
        return found or _plainly(self.plain, said, offered, hint)

    def _by_text(
        self, said: Sequence[Message], tools: Tools | None, hint: int | None
    ) -> _Rendered | None:
        """Encode text by text, which costs far less than the package's work for each id.

        None: the position of the hint can only be found by a plain render.
        """
        content: str = "" if hint is None else said[hint]["content"]
        with self._texts.noting() as texts:
            rendered = _render(self._of_texts, said, tools)
        ids, messages, ends = list[int](), list[int](), list[int]()
        for entry, at in zip(rendered.token_ids, rendered.message_indices, strict=True):
            text = texts.get(entry)
            if text is None:
                new = [entry]
                if entry < 0:  # the format keeps ids between renders
                    self._of_texts = None
                    return None
            else:
                new = self._frames.get(text) or self._tokenizer.encode(text)
            ids += new
            messages += [at] * len(new)
            # Some formats strip it. Where several texts end so, it is not known which is meant.
            if text and at == hint and text.endswith((content, content.strip())):
                ends.append(len(ids))
        if hint is not None and not (content.strip() and len(ends) == 1 and self._ends_texts):
            return None
        return _Rendered(ids, messages, ends[0] if ends else None)

    def _tried_out(self) -> bool:
        """Test whether encoding text by text equals a plain render, wherever the format takes it.

        Also finds out whether a user's words end a text.
        """
        told = list[bool]()
        for messages, tools in _PROBES:
            hint, said = _last_question(messages), self._guarded(messages, tools)
            try:
                expected = _plainly(self.plain, *said, hint)
            except UNFIT:
                continue
            try:
                found, hinted = self._by_text(*said, None), self._by_text(*said, hint)
            except (*UNFIT, AssertionError):
                return False
            if found is None or found.ids != expected.ids:
                return False
            if hinted is not None:
                told.append(hinted.hint_at == expected.hint_at)
        self._ends_texts = bool(told) and all(told)
        return True

    def _tried_to_divide(self) -> frozenset[tuple[str, str]]:
        """Test between which kinds of neighbours a conversation may be divided.

        It may where the ids before the place equal those rendered when a question stood there, and
        the ids after it equal those rendered without what was before.
        """
        good, bad = set[tuple[str, str]](), set[tuple[str, str]]()
        for messages, tools in _PROBES:
            head, kinds = _head(messages), _kinds(messages)
            try:
                whole = self._seen(messages, tools)
            except UNFIT:
                return frozenset()
            for at in range(head + 1, (_last_question(messages) or 0) + 1):
                if kinds[at] == "tool":  # it belongs to the call
                    continue
                try:
                    before = self._seen([*messages[:at], _THANKED], tools)
                    rest = [*messages[:head], *messages[at:]]
                    behind = self._seen(rest, tools, head, left_out=at - head)
                except UNFIT:
                    before = behind = []
                cut = _cut(behind, at)
                between = before[_cut(before, head) : _cut(before, at)]
                same = [*behind[:cut], *between, *behind[cut:]] == whole
                (good if same else bad).add((kinds[at - 1], kinds[at]))
        return frozenset(good - bad)

    def _tried_stand_ins(self) -> bool:
        """Test whether system messages and tools affect later ids only by their presence, and are
        not affected by later messages."""
        heads: tuple[list[dict[str, Any]], ...] = ([], [_SYSTEM], [_SYSTEM, _SYSTEM])
        for head, tools, said in product(heads, ([], [_TOOL]), (_TALKED, _WORKED, [_ASKED])):
            try:
                whole = self._seen([*head, *said], tools)
            except UNFIT:
                continue
            short, few = _stand_ins(head, tools)
            try:
                front, behind = (
                    self._seen([*head, _THANKED], tools),
                    self._seen([*short, *said], few),
                )
            except UNFIT:
                return False
            at = len(head)
            if [*front[: _cut(front, at)], *behind[_cut(behind, at) :]] != whole:
                return False
        return True

    def _seen(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        head: int = 0,
        *,
        left_out: int = 0,
    ) -> list[tuple[int, int | str]]:
        """Return the rendered ids and texts, each with the index of its message.

        Args:
            left_out: number of messages left out after the first `head` ones.
        """
        with self._texts.noting() as texts:
            rendered = _render(self._of_texts, messages, tools)
        self._frames |= {text: self._tokenizer.encode(text) for text in texts.values()}
        return [
            (at + left_out if at >= head else at, texts.get(entry, entry))
            for at, entry in zip(rendered.message_indices, rendered.token_ids, strict=True)
        ]


class _Texts(threading.local):
    """Tokenizer that records the texts it is asked to encode, and returns a unique negative number
    instead of their ids. Each thread has its own records."""

    def __init__(self, tokenizer: CutTokenizer) -> None:
        self._tokenizer = tokenizer
        self._notes: dict[int, str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @contextmanager
    def noting(self) -> Generator[Mapping[int, str]]:
        """Record texts, and yield them by number."""
        self._notes = {}
        try:
            yield self._notes
        finally:
            self._notes = None

    def encode(self, text: str, **options: Any) -> list[int]:
        if self._notes is None:
            return self._tokenizer.encode(text)
        number = next(_NUMBERS)
        self._notes[number] = text
        return [number] if text else []

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text), "offset_mapping": [(0, len(text))]}


class _Rendered(NamedTuple):
    """Ids of a prompt, the message index of each, and the position for a hint."""

    ids: Sequence[int]
    messages: Sequence[int]
    hint_at: int | None


def _plainly(
    chat: renderers.Renderer, said: Sequence[Message], tools: Tools | None, hint: int | None
) -> _Rendered:
    found = _render(chat, said, tools)
    return _Rendered(found.token_ids, found.message_indices, _content_end(found, hint))


def _render(
    chat: renderers.Renderer | None, said: Sequence[Message], tools: Tools | None
) -> renderers.RenderedTokens:
    assert chat is not None
    # Images are given a placeholder each, and processed by whoever samples.
    seen = any(isinstance(message["content"], list) for message in said)
    options = {"process_multimodal": False} if seen else {}
    return cast("Any", chat).render(said, tools=tools, add_generation_prompt=True, **options)


def _sees(message: Message) -> bool:
    return bool(placed(message.get("content") or ""))


def _parted(content: str) -> list[dict[str, str]]:
    """Return content with images as the package takes it."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in split(content)
    ]


def _digests(messages: Sequence[Message]) -> bytes:
    """Return the digest of all messages, concatenated: parts in a row equal the whole."""
    return b"".join([noted(_digest, message)[0] for message in messages])


def _digest(message: Message) -> tuple[bytes, int]:
    said = message.get("content")
    if isinstance(said, str) and placed(said):
        seen = [(at, image.digest) for at, image in placed(said)]
        return _digested({**message, "content": [str(said), seen]})
    # It may be a str that knows its parts, which marshal does not write.
    return _digested({**message, "content": str(said)} if isinstance(said, str) else dict(message))


def _digest_of_tools(tools: Tools) -> tuple[bytes, int]:
    return _digested(list(tools))


def _digested(told: Any) -> tuple[bytes, int]:
    """Return the digest of a value, and its size in bytes."""
    written = marshal.dumps(told, 2)
    return hashlib.sha256(written).digest(), len(written)


def _stand_ins(
    head: Sequence[Message], tools: Tools | None
) -> tuple[Sequence[Message], Tools | None]:
    """Replace system messages and tools by short ones, where there are any."""
    short = [{**said, "content": "So."} if said["content"].strip() else said for said in head]
    return short, [_STAND_IN] if tools else tools


def _head(messages: Sequence[Message]) -> int:
    """Return the number of system messages that a conversation begins with."""
    behind = (i for i, message in enumerate(messages) if message["role"] != "system")
    return next(behind, len(messages))


def _kinds(messages: Sequence[Message]) -> list[str]:
    """Return the role of each message, or `call`: some formats treat assistants that call tools
    differently."""
    return ["call" if message.get("tool_calls") else message["role"] for message in messages]


def _last_question(messages: Sequence[Message]) -> int | None:
    """Return the index of the user's last message that is not blank."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at]["role"] == "user" and messages[at]["content"].strip():
            return at
    return None


def _cut(seen: Sequence[tuple[int, int | str]], message: int) -> int:
    return _first_of([at for at, _ in seen], message)


def _first_of(messages: Sequence[int], message: int) -> int:
    """Return the index of the first id of this message or a later one. `messages`: message of each
    id."""
    return next((i for i, at in enumerate(messages) if at >= message), len(messages))


def _content_end(rendered: renderers.RenderedTokens, message: int | None) -> int | None:
    """Return the index after a message's last content token; None without exact attribution."""
    if message is None or not rendered.is_content:
        return None
    for at in range(len(rendered.token_ids) - 1, -1, -1):
        if rendered.message_indices[at] == message and rendered.is_content[at]:
            return at + 1
    return None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
