"""Renderer and parser for the chat format of one model.

Rule: the package's hand-written format decides every token, or, where it has none, the model's own
template (own_template.py); this class chooses between a full render and an exact extension, finds
where a hint goes, and keeps hints from forging markers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import PurePath
from typing import Any, cast

import renderers
from renderers import ToolCallParseStatus
from renderers.base import MODEL_RENDERER_MAP

from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.render.begun import beginning, common
from tinker_claw.render.calls import FAMILIES, HERMES, LATE, CallReader, Family, of_package
from tinker_claw.render.eyes import Eyes
from tinker_claw.render.format import ChatFormat, Tools, first_line
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.own_template import THINK, UNFIT
from tinker_claw.render.prompt_cache import PromptCache
from tinker_claw.render.stream import (
    NO_ID,
    BufferedStream,
    MarkedStream,
    Markers,
    ReplyStream,
)
from tinker_claw.render.switches import Switches, Thinking
from tinker_claw.render.tokenizer import load
from tinker_claw.served import Prompt
from tinker_claw.types import HINT_TEMPLATE, Message, Reply, Tokens, ToolCall

_ASIDE = 8_000
"""Characters of new text from which encoding moves to another thread: milliseconds of work."""
_FORMATS = 16
"""Formats kept at a time: a switch may be any text, a date or a name."""
_LONGEST_NAME = 256
"""Most characters of a tool's name that a reply may be begun with: each is rendered some twenty
times, while all others wait. OpenAI's have 64 at most, Anthropic's 128."""
_BEGINNINGS = 256
"""Most beginnings kept: one for each set of tools, in each format."""
_TAIL = 64
"""Most tokens between the mark that opens thinking and the end of a prompt."""
_PROBE: Any = [{"role": "user", "content": "probe"}]
_NONE = ("", "")
"""Markers that a format does not have."""
_LETTERS = 16
"""Most characters of a token, for limiting a text before it is encoded."""
_GAP = " [...] "
_UNFINISHED = "\ufffd"
_UNUSABLE = (
    *UNFIT,
    OSError,
    AssertionError,
    ImportError,
    RequestError,  # no chat template, say
)
"""Errors of a tokenizer that cannot be used."""


def family_of(model: str) -> str:
    """Return the chat format of a hub id; "auto" where it is not known.

    A folder or copy with the name of a known model is taken for that model; of two with the same
    name the maker's own comes first.
    """
    if model in MODEL_RENDERER_MAP:
        return MODEL_RENDERER_MAP[model]
    name = _name(model)
    same = (family for hub_id, family in MODEL_RENDERER_MAP.items() if _name(hub_id) == name)
    return next(same, "auto")


def _name(model: str) -> str:
    return PurePath(model).name.lower()


class Renderer:
    """Renders and parses for one model."""

    def __init__(self, tokenizer: Any, config: Any, eyes: Eyes | None = None) -> None:
        """Set up a renderer.

        Args:
            config: of the `renderers` package, or None to go by the tokenizer's name.
            eyes: the model's image processor; None: it reads text only.
        """
        self.eyes = eyes
        self._tokenizer = CutTokenizer(tokenizer)
        self.encode = self._tokenizer.encode
        """Ids of a text, in which control tokens are tokens: the opposite of `decode`."""
        self.decode = self._tokenizer.text
        """Text of ids, control tokens spelled out."""
        self._guard = Guard(tokenizer.get_added_vocab())
        self._cache = PromptCache()
        # One thread: more of them would only take the processor from the event loop.
        self._thread = ThreadPoolExecutor(1, "render", initializer=_after_the_event_loop)
        self._format = lru_cache(_FORMATS)(
            partial(ChatFormat, self._tokenizer, self._guard, self._cache, config, eyes)
        )
        first = self._format(())
        self._base = first.plain
        self._own = first.own
        self._decode_reply = self._own.decode if self._own else self.decode
        self.takes_system = first.takes_system
        config = cast("Any", self._base).config
        self.family: str = config.name
        stops = [*self._base.get_stop_token_ids(), *(self._own.stop_tokens if self._own else ())]
        self.stop_tokens = tuple(dict.fromkeys(stops))
        self.refusals = self._own.refusals if self._own else ()
        """Features that the model's own chat template was found to lack, each with its reason."""
        self._begin = lru_cache(_BEGINNINGS)(self._beginning)
        self.thinking = self._find_thinking(config)
        family = HERMES if self._own else FAMILIES.get(self.family)
        self._marked = self._find_markers(family) if family else None

    @classmethod
    def load(cls, model: str, family: str = "auto") -> Renderer:
        """Load the tokenizer of a local folder or hub id, and the format of `family`.

        Raises:
            ConfigError: the family is unknown, or there is no usable tokenizer.
        """
        if family == "auto":
            # Not the package's own search, which imports torch to see if the model takes images:
            # where no format is known there is only its own template, which gets no images.
            family = MODEL_RENDERER_MAP.get(model, "default")
        try:
            config = renderers.config_from_name(family)
        except ValueError as error:
            raise ConfigError(
                f"--renderer {family!r} is no chat format of the renderers package; auto goes by "
                "the model's name"
            ) from error
        try:
            tokenizer = load(model)
            renderer = cls(tokenizer, config, Eyes.load(model, family, tokenizer))
            renderer.prompt(_PROBE)
        except _UNUSABLE as error:
            raise ConfigError(
                f"the chat format {family!r} does not work with the tokenizer of {model!r} "
                f"({first_line(error)}); check --model-name, name the tokenizer of a similar one "
                "with --tokenizer, or choose another --renderer"
            ) from error
        return renderer

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        hint_message: int | None = None,
        switches: Switches = (),
        remembers: bool = True,
    ) -> Prompt:
        """Render a request, ready for sampling.

        Args:
            hint_message: index of the user's message at whose end a hint would go.
            remembers: False keeps nothing of the request in memory.

        Raises:
            RequestError: the model's chat template refuses these messages.
        """
        plan = self._format(switches).plan(messages, tools, hint_message, remembers=remembers)
        return plan.encode()

    async def prompt_aside(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        hint_message: int | None = None,
        switches: Switches = (),
        remembers: bool = True,
        large: bool = False,
    ) -> Prompt:
        """Render like `prompt`, but encode long new text in a thread, one request at a time.

        The event loop goes on meanwhile, and a text that requests share is encoded once.

        Args:
            large: whether laying it out takes long, too.
        """
        lay_out = partial(
            self._format(switches).plan, messages, tools, hint_message, remembers=remembers
        )
        run_aside = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        if large:
            return await run_aside(lambda: lay_out().encode())
        plan = lay_out()
        # The thread looks texts up again, after the requests that came before.
        return plan.encode() if plan.size < _ASIDE else await run_aside(plan.encode)

    def extend(
        self,
        previous_prompt: Tokens,
        previous_completion: Tokens,
        new_messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        hint_message: int | None = None,
        switches: Switches = (),
    ) -> Prompt | None:
        """Return the sampled stream followed by `new_messages`, or None where the format forbids
        it.

        Args:
            hint_message: index into `new_messages`.
        """
        return self._format(switches).extend(
            previous_prompt, previous_completion, new_messages, tools, hint_message
        )

    def shorten(self, text: str, most: int) -> str:
        """Return the text, or only its two ends where it has more than `most` tokens."""
        half = most // 2
        widest = half * _LETTERS
        if len(text) > 2 * widest:  # a very long text is cut before it is encoded
            text = f"{text[:widest]}{_GAP}{text[-widest:]}"
        ids = self.encode(self._guard.text(text))
        if len(ids) <= most:
            return text
        head, tail = self.decode(ids[:half]), self.decode(ids[-half:])
        return f"{head.rstrip(_UNFINISHED)}{_GAP}{tail.lstrip(_UNFINISHED)}"

    def hint_tokens(self, hint: str, words: str = HINT_TEMPLATE) -> tuple[int, ...]:
        """Return a hint as tokens. Text that looks like a control token stays text.

        Args:
            words: template of the text in the prompt, with {hint}.
        """
        return tuple(self.encode(self._guard.text(words.format(hint=hint))))

    def splice(
        self, prompt: Tokens, hint_at: int, hint: str, words: str = HINT_TEMPLATE
    ) -> tuple[int, ...]:
        """Return the hinted prompt: the same ids, with the hint's in between."""
        return (*prompt[:hint_at], *self.hint_tokens(hint, words), *prompt[hint_at:])

    def with_system_text(self, prompt: Tokens, text: str) -> tuple[int, ...] | None:
        """Return the prompt with a text behind its system prompt, or as one where it has none.

        Text that looks like a control token stays text. None: it is not known where the system
        prompt of this chat format ends.
        """
        opening, ending = self._system_bounds
        if prompt[: len(opening)] == opening:
            system: Message = {"role": "system", "content": text}
            head = self._shared_head([system])
            if not self.takes_system:
                head = (*opening, *self.hint_tokens(text, "{hint}\n\n"))
            return (*head, *prompt[len(opening) :])
        at = _index(prompt, ending) if ending else None
        if at is None:
            return None
        return (*prompt[:at], *self.hint_tokens(text, "\n\n{hint}"), *prompt[at:])

    @cached_property
    def _system_bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before the user's words of a prompt without a system prompt, and those between system
        prompt and user's words; (): the format has no system prompt, or no mark ends it."""
        opening = self._shared_head([])
        if not self.takes_system:
            return opening, ()
        systems = ({"role": "system", "content": text} for text in ("Yes", "no"))
        first, second = (self._shared_head([system]) for system in systems)
        behind = common([first[::-1], second[::-1]])[::-1]
        marks = set(self._tokenizer.get_added_vocab().values())
        return opening, behind if marks & set(behind) else ()

    def _shared_head(self, before: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a prompt up to the words of the user's first message."""
        dialogues = [[*before, {"role": "user", "content": text}] for text in ("Left", "right")]
        return common([self.prompt(dialogue, remembers=False).tokens for dialogue in dialogues])

    def stream(
        self, prompt: Tokens, tools: Tools | None = None, *, may_call: bool = True
    ) -> ReplyStream:
        """Return a parser for one completion of `prompt`.

        Args:
            may_call: False reads text that looks like a call as text.
        """
        if self._marked is None:
            return BufferedStream(
                lambda tokens: self._parse_complete(tokens, prompt, tools or (), may_call)
            )
        marks, calls = self._marked
        thinking = _opens_thinking(prompt, marks)
        marks = marks if may_call else marks.without_calls
        return MarkedStream(marks, self._decode_reply, calls, tools or (), thinking=thinking)

    def parse(self, tokens: Tokens, prompt: Tokens, tools: Tools | None = None) -> Reply:
        """Parse a whole completion as a reply."""
        stream = self.stream(prompt, tools)
        stream.feed(tokens)
        return stream.finish()[1]

    def begin_call(self, names: Sequence[str], switches: Switches = ()) -> tuple[int, ...] | None:
        """Return the first ids of a reply that must call one of these tools; None: this chat format
        is not known to have calls.

        Args:
            names: at least one.
        """
        ends = min(names), max(names)
        return self._begin(ends, switches) if max(map(len, ends)) <= _LONGEST_NAME else None

    def begin_text(self, switches: Switches = ()) -> tuple[int, ...]:
        """Return the ids between a prompt and the text of a reply for which the model need not
        think; () where there are none, or it is not known how this format writes that."""
        return self._begin((), switches) or ()

    def _beginning(self, names: tuple[str, ...], switches: Switches) -> tuple[int, ...] | None:
        chat_format = self._format(switches)
        begins = partial(beginning, chat_format.plain_ids, self._tokenizer, reads=self.parse)
        unthought = begins(())
        if unthought is None and self._opened(chat_format).endswith(THINK[0]):
            unthought = tuple(self.encode(f"\n{THINK[1]}\n\n"))
        if not names:
            return unthought if self.thinking.on is not None else ()
        knows_calls = chat_format.own is None or chat_format.own.calls
        begun = begins(names) if knows_calls else None
        if begun and unthought and self.thinking.on is None:
            # The format shows that a reply has no thinking, and this model never writes that.
            return begun[len(unthought) :] if begun[: len(unthought)] == unthought else begun
        return begun

    def _opened(self, chat_format: ChatFormat) -> str:
        """Return the text of a prompt, without blanks at its end."""
        return self.decode(chat_format.plain_ids(_PROBE, reply_follows=True)).rstrip()

    def _find_thinking(self, config: Any) -> Thinking:
        own, opened = str(self._tokenizer.chat_template or ""), self._opened(self._format(()))
        return Thinking.of(config, own, opens=opened.endswith(THINK[0]))

    def forget(self) -> None:
        """Drop everything kept of earlier requests from memory."""
        self._cache.clear()

    def _find_markers(self, family: Family) -> tuple[Markers, CallReader] | None:
        """Return the format's markers, and the reader of the calls between them; None where replies
        can only be parsed when they are complete."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        stop = frozenset(self.stop_tokens)
        pairs = (family.think, family.call, family.section or ())
        if self._own is not None:
            if self._own.no_streaming:
                return None
            pairs = (
                () if self._own.marks_no_thinking else family.think,
                family.call if self._own.calls else (),
                (),
            )
        elif not {*chain(*pairs), *family.inner} <= added.keys():
            return None
        marks = Markers(stop, *(added.get(mark, NO_ID) for pair in pairs for mark in pair or _NONE))
        return marks, CallReader(family, added, self._decode_reply)

    def _parse_complete(
        self, tokens: Tokens, prompt: Tokens, tools: Tools, may_call: bool
    ) -> tuple[Reply, int]:
        """Return the package's reading of a reply, and the number of tokens of its thinking."""
        ids = list(tokens)
        end = next((i for i, t in enumerate(ids) if t in self.stop_tokens), len(ids))
        cut = end == len(ids)
        try:
            parsed = self._base.parse_response(
                ids, tools=cast("Any", tools or None), prompt_ids=list(prompt)
            )
        except (ValueError, RecursionError):  # numbers of thousands of digits, endless nesting
            return Reply(text=self.decode(ids[:end]).strip()), 0
        calls, broken = list[ToolCall](), list[str]()
        for attempt in parsed.tool_calls:
            call = of_package(self.family, attempt, tools) if may_call else None
            if call is not None:
                calls.append(call)
            elif cut and may_call and attempt.status is ToolCallParseStatus.UNCLOSED_BLOCK:
                pass  # half a call is nobody's words
            else:
                span = attempt.token_span
                broken.append(attempt.raw if span is None else self.decode(ids[slice(*span)]))
        text, reasoning = "".join([parsed.content, *broken]), parsed.reasoning_content
        if parsed.reasoning_complete is not False:
            whole = self._decode_reply(ids[:end])
            late = None if self._own else LATE.get(self.family)
            # The package leaves out special tokens, marks of calls among them.
            if late and cut and may_call:
                text = text.partition(late.begin)[0]
            elif self._own or (late and not calls and any(tag in whole for tag in late.tags)):
                text = _behind_thinking(whole, reasoning, late.think if late else THINK)
        thought = self._tokens_of(reasoning or "", ids)
        return Reply(text.strip(), reasoning, tuple(calls)), thought

    def _tokens_of(self, text: str, ids: Sequence[int]) -> int:
        """Return the number of ids that hold a text."""
        if not text or text not in self.decode(ids):  # in several parts
            return len(self.encode(text))
        numbers = range(len(ids) + 1)
        end = bisect_left(numbers, True, key=lambda n: text in self.decode(ids[:n]))
        begin = bisect_left(numbers, True, key=lambda n: text not in self.decode(ids[n:end]))
        return end - begin + 1


def _after_the_event_loop() -> None:
    """Lower the thread's priority, so that the event loop's replies go before new requests."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _behind_thinking(text: str, reasoning: str | None, marks: tuple[str, str]) -> str:
    """Return the text of a reply behind its thinking."""
    _, closed, behind = text.partition(marks[1])
    return behind if closed and (reasoning or text.lstrip().startswith(marks)) else text


def _opens_thinking(prompt: Tokens, marks: Markers) -> bool:
    """Return whether the last mark of thinking at the end of a prompt opens it."""
    ends = {marks.think, marks.think_end, *marks.stop}
    last = next((token for token in reversed(prompt[-_TAIL:]) if token in ends), None)
    return last is not None and last == marks.think


def _index(ids: Tokens, wanted: Tokens) -> int | None:
    """Return where `wanted` first stands in `ids`; None: nowhere."""
    size = len(wanted)
    return next((n for n in range(len(ids) - size + 1) if ids[n : n + size] == wanted), None)
