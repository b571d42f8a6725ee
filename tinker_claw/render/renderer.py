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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from pathlib import PurePath
from typing import Any, cast

import renderers
from renderers.base import MODEL_RENDERER_MAP
from renderers.reasoning import prompt_ends_in_reasoning

from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.render.eyes import Eyes
from tinker_claw.render.format import Format, Switches, Tools, first_line
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.own_template import THINK
from tinker_claw.render.prompt_cache import Prompt, PromptCache
from tinker_claw.render.stream import (
    BufferedStream,
    MarkedStream,
    Markers,
    ReplyStream,
    tool_call,
)
from tinker_claw.render.tokenizer import load
from tinker_claw.types import HINT_TEMPLATE, Message, Reply, Tokens, ToolCall

# Families whose replies are <think>…</think>, text and <tool_call>…</tool_call>, each marker one
# token. Others of the package are parsed when they are complete.
_MARKED = frozenset({"qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"})

_CALL = ("<tool_call>", "</tool_call>")
_NO_ID = -1
"""Stand-in for a marker that the tokenizer does not have."""
_ASIDE = 8_000
"""Characters of new text from which encoding moves to another thread: milliseconds of work."""
_FORMATS = 16
"""Formats kept at a time: a switch may be any text, a date or a name."""
_LONGEST_NAME = 256
"""Most characters of a tool's name that a reply may be begun with: each is rendered some twenty
times, while all others wait. OpenAI's have 64 at most, Anthropic's 128."""
_BEGINNINGS = 256
"""Most beginnings kept: one for each set of tools, in each format."""
_TAILS = 64
"""Most ends of prompts for which it is known whether they open thinking."""
_LETTERS = 16
"""Most characters of a token, for limiting a text before it is encoded."""
_GAP = " [...] "
_UNFINISHED = "\ufffd"
_UNUSABLE = (
    *(OSError, ValueError, TypeError, KeyError, AssertionError, ImportError),
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
    same = (family for known, family in MODEL_RENDERER_MAP.items() if _name(known) == _name(model))
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
        self._encode = self._tokenizer.encode
        self._guard = Guard(tokenizer.get_added_vocab())
        self._cache = PromptCache()
        # One thread: more of them would only take the processor from the event loop.
        self._thread = ThreadPoolExecutor(1, "render", initializer=_after_the_event_loop)
        self._format = lru_cache(_FORMATS)(partial(self._new_format, config))
        first = self._format(())
        self._base = first.plain
        self._own = first.own
        self.config: Any = cast("Any", self._base).config
        """The `renderers` package's config, which names the chat template's switches."""
        self.family: str = self.config.name
        stops = [*self._base.get_stop_token_ids(), *(self._own.stop_tokens if self._own else ())]
        self.stop_tokens = tuple(dict.fromkeys(stops))
        self.refusals = self._own.refusals if self._own else ()
        """Features that the model's own chat template was found to lack, each with its reason."""
        self._opens_thinking = lru_cache(_TAILS)(self._ends_in_thinking)
        self._begin = lru_cache(_BEGINNINGS)(self._beginning)
        self._decode_one = cache(self._decoded)
        """Cached text of single ids, since streaming samplers give one at a time. At most as many
        as there are ids, some 10 MB."""
        self._markers = self._find_markers()

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
            renderer.prompt([{"role": "user", "content": "probe"}])
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
        """Render like `prompt`, but encode long new text in a thread, one request at a time, so
        that the event loop goes on and a text that requests share is encoded once.

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
        ids = self._encode(self._guard.text(text))
        if len(ids) <= most:
            return text
        head, tail = self.decode(ids[:half]), self.decode(ids[-half:])
        return f"{head.rstrip(_UNFINISHED)}{_GAP}{tail.lstrip(_UNFINISHED)}"

    def hint_tokens(self, hint: str, words: str = HINT_TEMPLATE) -> tuple[int, ...]:
        """Return a hint as tokens. Text that looks like a control token stays text.

        Args:
            words: template of the text in the prompt, with {hint}.
        """
        return tuple(self._encode(self._guard.text(words.format(hint=hint))))

    def splice(
        self, prompt: Tokens, hint_at: int, hint: str, words: str = HINT_TEMPLATE
    ) -> tuple[int, ...]:
        """Return the hinted prompt: the same ids, with the hint's in between."""
        return (*prompt[:hint_at], *self.hint_tokens(hint, words), *prompt[hint_at:])

    def stream(
        self, prompt: Tokens, tools: Tools | None = None, *, may_call: bool = True
    ) -> ReplyStream:
        """Return a parser for one completion of `prompt`.

        Args:
            may_call: False reads text that looks like a call as text.
        """
        if self._markers is None:
            return BufferedStream(
                lambda tokens: self._parse_complete(tokens, prompt, tools, may_call)
            )
        thinking = self._opens_thinking(_behind_last(prompt, self._markers.stop))
        return MarkedStream(
            self._markers,
            self._own.decode if self._own else self.decode,
            lambda block: self._parse_call(block, tools) if may_call else None,
            thinking=thinking,
        )

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

    def begin_text(self, switches: Switches = ()) -> tuple[int, ...] | None:
        """Return the first ids of a reply that is text at once, () where there are none; None: this
        chat format is not known to have such replies."""
        return self._begin((), switches)

    def _beginning(self, names: tuple[str, ...], switches: Switches) -> tuple[int, ...] | None:
        found = self._format(switches)
        return None if found.own and names else found.beginnings.ids(names, self.parse)

    @property
    def tells_text(self) -> bool:
        """Whether a reply's text is known token by token."""
        return self._markers is not None

    def forget(self) -> None:
        """Drop everything kept of earlier requests from memory."""
        self._cache.clear()

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ids, control tokens spelled out."""
        return self._decode_one(*tokens) if len(tokens) == 1 else self._decoded(*tokens)

    def _decoded(self, *tokens: int) -> str:
        return self._tokenizer.text(tokens)

    def _new_format(self, config: Any, switches: Switches) -> Format:
        return Format(self._tokenizer, self._guard, self._cache, config, dict(switches), self.eyes)

    def _find_markers(self) -> Markers | None:
        """Return the format's markers; None where replies can only be parsed when they are
        complete."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        think, think_end, call, call_end = (added.get(mark, _NO_ID) for mark in (*THINK, *_CALL))
        if self._own is not None:  # calls of tools are text: their form is not known
            call, call_end, known = _NO_ID, _NO_ID, not self._own.no_streaming
        else:
            known = self.family in _MARKED and _NO_ID not in (think, think_end, call, call_end)
        stop = frozenset(self.stop_tokens)
        return Markers(think, think_end, call, call_end, stop) if known else None

    def _ends_in_thinking(self, tail: tuple[int, ...]) -> bool:
        """Return whether a prompt with this end has opened the thinking block; cached, as most end
        alike."""
        if self._own is not None and self._own.marks_no_thinking:
            return False
        return prompt_ends_in_reasoning(
            cast("Any", self._tokenizer), list(tail), stop_ids=set(self.stop_tokens)
        )

    def _parse_call(self, block: Sequence[int], tools: Tools | None) -> ToolCall | None:
        """Parse one call, markers included."""
        try:
            parsed = self._base.parse_response(list(block), tools=cast("Any", tools))
        except (ValueError, RecursionError):  # numbers of thousands of digits, endless nesting
            return None
        calls = parsed.tool_calls
        return tool_call(calls[0]) if len(calls) == 1 else None

    def _parse_complete(
        self, tokens: Tokens, prompt: Tokens, tools: Tools | None, may_call: bool
    ) -> Reply:
        ids = list(tokens)
        try:
            parsed = self._base.parse_response(
                ids, tools=cast("Any", tools), prompt_ids=list(prompt)
            )
        except (ValueError, RecursionError):
            end = next((i for i, t in enumerate(ids) if t in self.stop_tokens), len(ids))
            return Reply(text=self.decode(ids[:end]).strip())
        text, calls = parsed.content, list[ToolCall]()
        for attempt in parsed.tool_calls:
            call = tool_call(attempt) if may_call else None
            if call is not None:
                calls.append(call)
            elif attempt.token_span is None:
                text += attempt.raw
            else:
                text += self.decode(ids[slice(*attempt.token_span)])
        return Reply(text.strip(), parsed.reasoning_content, tuple(calls))


def _after_the_event_loop() -> None:
    """Lower the thread's priority, so that the event loop's replies go before new requests."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _behind_last(tokens: Tokens, stops: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens after the last stop token."""
    at = next((at for at in range(len(tokens), 0, -1) if tokens[at - 1] in stops), 0)
    return tuple(tokens[at:])
