"""One chat format of a model, and rendering of prompts in it.

Rule: the prompt is the package's full render, id for id. With a format that passed a test, each
text in it is encoded by itself, and its ids are cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, groupby, takewhile
from typing import Any, NamedTuple, cast

import renderers

from tinker_claw.errors import RequestError
from tinker_claw.images import images_in, parts_of
from tinker_claw.render.eyes import Eyes
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.own_template import UNFIT, OwnTemplate
from tinker_claw.render.prompt_cache import Ids, PromptCache, interned
from tinker_claw.render.switches import Switches
from tinker_claw.served import Prompt
from tinker_claw.types import Message, Tokens

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
_CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
_SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": " Look there,\nand here. "}
_CALLED = {"role": "assistant", "content": "So I do.", "tool_calls": [_CALL, _CALL | {"id": "b2"}]}
_FOUND = [
    {"role": "tool", "tool_call_id": "a1", "content": "nothing"},
    {"role": "tool", "tool_call_id": "b2", "content": "grüße\n\n"},
]
_SAID = {"role": "assistant", "content": "Nothing.", "reasoning_content": "I looked."}
_THANKED = {"role": "user", "content": "user"}
_GUESSED = {"role": "assistant", "content": "Here?"}
SOUGHT = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Where?",
    "tool_calls": [_CALL],
}
_TALKED = [ASKED, SOUGHT, _FOUND[0], _THANKED, ASKED, _GUESSED, _SAID, _CALLED, *_FOUND, _SAID]
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([ASKED], []),
    ([_SYSTEM, *_TALKED, ASKED, _SAID], [_TOOL]),
    (_TALKED, []),
)
"""Sample conversations that test whether a format encodes text by text."""
_MOVED = "[System message]\n\n"
"""Prefix of a system message's words inside a user message, where the format allows no system
message."""
_NUMBERS = count(-1, -1)


class Plan(NamedTuple):
    """A prompt before its texts are encoded."""

    size: int
    """Characters of the texts whose ids are not known."""
    encode: Callable[[], Prompt]


class ChatFormat:
    """A format of the `renderers` package over one tokenizer."""

    def __init__(
        self,
        tokenizer: CutTokenizer,
        guard: Guard,
        cache: PromptCache,
        config: Any,
        eyes: Eyes | None = None,
        switches: Switches = (),
    ) -> None:
        """Set up a format.

        Args:
            guard: guard for the tokenizer's added tokens.
            config: config of the package, or None to go by the tokenizer's name.
            eyes: the model's image processor; None: it reads text only.
            switches: template switches, as in chat_template_kwargs.
        """
        self._eyes = eyes
        chosen = dict(switches)
        self.plain = renderers.create_renderer(
            cast("Any", tokenizer), config, chat_template_kwargs=chosen
        )
        self._tokenizer = tokenizer
        self._cache = cache
        name: str = cast("Any", self.plain).config.name
        self._guard = Guard(()) if name in _ENCODES_BY_ITSELF else guard
        self.own: OwnTemplate | None = None
        """The tokenizer's own template, where the package has no format for the model."""
        self._texts = _Texts(tokenizer)
        self._frames: dict[str, Ids] = {}
        """Ids of texts seen in the tests of the format, most of which recur in prompts."""
        self._ends_texts = True
        """Whether a user's words end a text that is encoded as a whole."""
        self._of_texts: renderers.Renderer | None = None
        if name == "default":
            self.own = OwnTemplate(tokenizer, config, chosen)
        else:
            self._of_texts = renderers.create_renderer(
                cast("Any", self._texts), config, chat_template_kwargs=chosen
            )
            if not self._tried_out():
                self._of_texts = None
        self._moves_system = False
        without = self._tried(ASKED, _SAID, _THANKED)
        late = self._tried(ASKED, _SAID, _SYSTEM, _THANKED)
        # Some formats refuse a system message after the first, and some leave it out.
        self._moves_system = without is not None and late in (None, without)
        self.takes_system = self._shows_system_first()
        """Whether it shows a system prompt, before what the user says."""

    def plan(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        hint: int | None,
        *,
        remembers: bool = True,
    ) -> Plan:
        """Lay out a prompt as texts and control tokens, and look up the texts.

        Args:
            hint: index of the user's message at whose end a hint would go.
            remembers: whether to cache the ids of its texts for later requests.

        Raises:
            RequestError: the format refuses these messages; the plan's `encode` raises it, too.
        """
        systems = (message["role"] == "system" for message in messages)
        head = sum(takewhile(bool, systems))
        if self._moves_system and head > 1:
            text = "\n\n".join(message["content"] for message in messages[:head])
            messages = [{"role": "system", "content": text}, *messages[head:]]
            hint, head = None if hint is None else hint - head + 1, 1
        messages = self._placed(messages, head)
        place = _before_images(messages, hint) if self._tokenizer.tells_starts else None
        with _refused():
            guarded, offered = self._guarded(messages, tools)
            laid = self._laid_out(guarded, offered, place)

        def encode() -> Prompt:
            with _refused():
                if self.own is not None:
                    return self.own.prompt(guarded, offered, place)
                prompt = (
                    _plainly(self.plain, guarded, offered, place)
                    if laid is None
                    else self._joined(laid, remembers=remembers)
                )
                return self._spread(prompt, messages)

        new = (m["content"] for m in guarded) if laid is None else laid.entries
        return Plan(sum(len(text) for text in new if isinstance(text, str)), encode)

    def plain_ids(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        reply_follows: bool = False,
    ) -> list[int]:
        """Return the ids that the package itself renders."""
        return self.plain.render_ids(
            cast("Any", self._guard.messages(messages)),
            tools=cast("Any", self._guard.tools(tools) if tools else None),
            add_generation_prompt=reply_follows,
        )

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
            guarded, offered = self._guarded(messages, tools)
            rendered = cast("Any", self.plain).bridge_to_next_turn(
                list(prompt), list(completion), guarded, tools=offered, **seen
            )
        except UNFIT:  # a full render says what is wrong
            return None
        if rendered is None:
            return None
        place = _before_images(messages, hint)
        extended = Prompt(tuple(rendered.token_ids), _content_end(rendered, place))
        return self._spread(extended, messages)

    def _spread(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Return the prompt with the tokens of the images in these, its last messages."""
        images = images_in(messages)
        return self._eyes.spread(prompt, images) if images and self._eyes else prompt

    def _placed(self, messages: Sequence[Message], head: int) -> Sequence[Message]:
        """Return the messages as the format takes them: where it shows no system message after the
        first `head` ones, a user message in the same place holds its words."""
        if not self._moves_system:
            return messages
        return [
            {"role": "user", "content": _MOVED + message["content"]}
            if at >= head and message["role"] == "system"
            else message
            for at, message in enumerate(messages)
        ]

    def _shows_system_first(self) -> bool:
        tokens = self._tried(_SYSTEM, ASKED, _SAID, _THANKED)
        system, _, behind = self._tokenizer.text(tokens or ()).partition("Look there")
        return bool(behind) and _SYSTEM["content"] in system

    def _tried(self, *messages: Message) -> Tokens | None:
        """Return the prompt of these messages; None: the format does not take them."""
        try:
            return self.plan(messages, None, None, remembers=False).encode().tokens
        except RequestError:
            return None

    def _guarded(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if self._eyes is None and (images := images_in(messages)):
            raise images[0].wrong("is an image, and this model reads text only")
        parted = [{**m, "content": _parted(m)} if images_in([m]) else m for m in messages]
        return self._guard.messages(parted), self._guard.tools(tools) if tools else None

    def _laid_out(
        self, messages: Sequence[Message], tools: Tools | None, hint: int | None
    ) -> _LaidOut | None:
        """Render with texts in place of their ids, which costs far less than the package's work for
        each id.

        None: the format, or the position of the hint, requires a plain render.
        """
        if self._of_texts is None:
            return None
        content: str = "" if hint is None else messages[hint]["content"]
        entries, ends = list[int | str | Ids](), list[int]()
        texts = self._texts.notes = dict[int, str]()
        try:
            rendered = _render(self._of_texts, messages, tools)
        finally:
            self._texts.notes = None
        for entry, at in zip(rendered.token_ids, rendered.message_indices, strict=True):
            text = texts.get(entry)
            if text is None:
                entries.append(entry)
                if entry < 0:  # the format keeps ids between renders
                    self._of_texts = None
                    return None
            else:
                entries.append(self._frames.get(text) or self._cache.get(text) or text)
                # Some formats strip it. Where several texts end so, it is not known which is meant.
                if at == hint and text.endswith((content, content.strip())):
                    ends.append(len(entries))
        if hint is not None and not (content.strip() and len(ends) == 1 and self._ends_texts):
            return None
        return _LaidOut(entries, ends[0] if ends else None)

    def _joined(self, laid: _LaidOut, *, remembers: bool) -> Prompt:
        """Encode the texts that are not known, and join the ids of all."""
        tokens, ends = list[int](), [0]
        for entry in laid.entries:
            if isinstance(entry, str):
                entry = self._cache.encoded(entry, self._tokenizer.encode, remembers=remembers)
            tokens += (entry,) if isinstance(entry, int) else entry
            ends.append(len(tokens))
        return Prompt(tuple(tokens), None if laid.hint is None else ends[laid.hint])

    def _tried_out(self) -> bool:
        """Test whether encoding text by text equals a plain render, wherever the format takes it.

        Also finds out whether a user's words end a text.
        """
        hint_matches = list[bool]()
        for messages, tools in _PROBES:
            hint = max(at for at, message in enumerate(messages) if message["role"] == "user")
            guarded = self._guarded(messages, tools)
            try:
                expected = _plainly(self.plain, *guarded, hint)
            except UNFIT:
                continue
            try:
                laid, hinted = self._laid_out(*guarded, None), self._laid_out(*guarded, hint)
            except (*UNFIT, AssertionError):
                return False
            if laid is None or self._joined(laid, remembers=False).tokens != expected.tokens:
                return False
            if hinted is not None:
                prompt = self._joined(hinted, remembers=False)
                hint_matches.append(prompt.hint_at == expected.hint_at)
            texts = (text for text in laid.entries if isinstance(text, str))
            self._frames |= {text: interned(self._tokenizer.encode(text)) for text in texts}
        self._ends_texts = bool(hint_matches) and all(hint_matches)
        return True


class _Texts(threading.local):
    """Tokenizer that records the texts it is asked to encode, and returns a unique negative number
    instead of their ids. Each thread has its own records."""

    def __init__(self, tokenizer: CutTokenizer) -> None:
        self._tokenizer = tokenizer
        self.notes: dict[int, str] | None = None
        """Texts by their numbers; None: none are recorded, and texts are encoded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if self.notes is None:
            return self._tokenizer.encode(text)
        number = next(_NUMBERS)
        self.notes[number] = text
        return [number] if text else []

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text), "offset_mapping": [(0, len(text))]}


class _LaidOut(NamedTuple):
    """A prompt as control tokens, texts, and ids of texts that are known."""

    entries: Sequence[int | str | Ids]
    hint: int | None
    """Number of entries before the place for a hint."""


@contextmanager
def _refused() -> Generator[None]:
    """Raise RequestError where a format refuses the messages."""
    try:
        yield
    except UNFIT as error:
        raise RequestError(
            f"The model's chat format does not take these messages: {first_line(error)}.",
            param="messages",
        ) from error


def _plainly(
    chat: renderers.Renderer, messages: Sequence[Message], tools: Tools | None, hint: int | None
) -> Prompt:
    rendered = _render(chat, messages, tools)
    return Prompt(interned(rendered.token_ids), _content_end(rendered, hint))


def _render(
    chat: renderers.Renderer, messages: Sequence[Message], tools: Tools | None
) -> renderers.RenderedTokens:
    # Each image gets a placeholder; the sampler processes it.
    seen = any(isinstance(message["content"], list) for message in messages)
    options = {"process_multimodal": False} if seen else {}
    return cast("Any", chat).render(messages, tools=tools, add_generation_prompt=True, **options)


def _parted(message: Message) -> list[dict[str, str]]:
    """Return content with images as the package takes it."""
    return [
        {"type": "image"} if image else {"type": "text", "text": "".join(p.text for p in run)}
        for image, run in groupby(parts_of(message), lambda part: part.image)
    ]


def _before_images(messages: Sequence[Message], hint: int | None) -> int | None:
    """Return the index of the message for a hint; None if an image in it hides the hint's place."""
    return hint if hint is not None and not images_in([messages[hint]]) else None


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
