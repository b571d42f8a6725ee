"""A model's own chat template, whose behaviour is known only from tests.

Rule: the prompt is the template's text as the tokenizer encodes it, and finding places never
changes it. Places are found by a mark, a character that no text can hold: the template is rendered
with it, and if the text without it is the same, the mark shows the place. Features that the tests
do not find are refused by name: such a model learns from verdicts only, or its replies are not
streamed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, cast

import renderers
from jinja2 import TemplateError

from tinker_claw.render.calls import HERMES, read_json
from tinker_claw.render.outside_text import CutTokenizer
from tinker_claw.served import Prompt

UNFIT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    TemplateError,
)
"""Errors that formats raise for messages they do not take."""
_MARK = "\udc01"
"""Half a surrogate pair, which requests cannot hold; not the one that cuts (outside_text.py)."""
_UNFINISHED = "\ufffd"
THINK = ("<think>", "</think>")
_ASKED = {"role": "user", "content": "Look there,\nand here."}
_SAID = {"role": "assistant", "content": "Nothing there"}
_THANKED = {"role": "user", "content": "Thanks"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_PROBES = (
    [_ASKED],
    [_SYSTEM, _ASKED],
    [_ASKED, _SAID, _THANKED],
    [_SYSTEM, _ASKED, _SAID, _THANKED],
)

Messages = Sequence[Mapping[str, Any]]


class OwnTemplate:
    """The template of one tokenizer, under one set of switches."""

    def __init__(self, tokenizer: CutTokenizer, config: Any, switches: Any) -> None:
        """Set up and test the template. `config`, `switches`: see `ChatFormat`."""
        self._tokenizer = tokenizer
        self._decoded = tokenizer.text
        self._letters = renderers.create_renderer(
            cast("Any", _Letters(tokenizer)), config, chat_template_kwargs=switches
        )
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        self._added = {at: text for text, at in added.items() if text.strip()}
        self._behind = self._context()
        self._frame = self._frames()
        """The control tokens that it writes around what is said."""
        self.stop_tokens: tuple[int, ...] = ()
        """The added token that it writes after a reply."""
        self.no_hints = self._no_hints()
        """Why hints have no place in its prompts; None: they have one."""
        self.no_streaming = self._no_streaming()
        """Why its replies cannot be parsed as they arrive; None: they can."""
        self.calls = self._writes_calls()
        """Whether its calls of tools are JSON between marks that are tokens."""

    def prompt(self, messages: Messages, tools: Any, hint: int | None) -> Prompt:
        """Render a prompt. `hint`: index of the message at whose end a hint would go."""
        text = self._text(messages, tools)
        at = None
        if hint is not None and not self.no_hints:
            at = self._end_of(hint, messages, tools, text)
        if at is None:
            return Prompt(tuple(self._tokenizer.encode(text)), None)
        encoded = self._tokenizer(text)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        place = bisect_left(starts, at)
        if at < len(text) and (place == len(ids) or starts[place] > at):
            # A token reaches over the end of the message: a hint goes before it if it is a blank.
            place -= 1
            if text[starts[place] : at].strip():
                return Prompt(tuple(ids), None)
        return Prompt(tuple(ids), place)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a part of a reply, without the tokens that frame messages."""
        kept = [i for i in ids if i not in self._frame]
        text = self._decoded([*self._behind, *kept])
        text = text[len(self._decoded(self._behind)) :] if self._behind else text
        whole = text.rstrip(_UNFINISHED)  # some decoders show a sign for each byte of a letter
        return whole if whole == text else whole + _UNFINISHED

    @property
    def marks_no_thinking(self) -> bool:
        """Return whether thinking has no tokens of its own, so that its marks are text."""
        return not {*THINK} <= {*self._added.values()}

    @property
    def refusals(self) -> tuple[str, ...]:
        """Features that were not found, each in a sentence."""
        sentences = []
        if self.no_hints:
            sentences.append(f"hints have no place: {self.no_hints}")
        if self.no_streaming:
            sentences.append(f"replies come when they are complete: {self.no_streaming}")
        return tuple(sentences)

    # Tests of the template

    def _no_hints(self) -> str | None:
        if not self._tokenizer.tells_starts:
            return "its tokenizer does not say where in a text a token begins"
        accepted, self.no_hints = 0, None
        for messages in _PROBES:
            try:
                prompt = self.prompt(messages, None, len(messages) - 1)
            except UNFIT:
                continue
            accepted += 1
            if prompt.hint_at is None:
                return "its chat template does not show once, and to its end, what a user says"
        return None if accepted else "its chat template takes no message of a user"

    def _no_streaming(self) -> str | None:
        """Return why replies cannot be parsed as they arrive, or None; sets the stop token."""
        try:
            prompt = self._text([_ASKED], None)
            dialogue = self._text([_ASKED, _SAID], None, reply_follows=False)
        except UNFIT:
            return "its chat template takes no reply"
        before, reply, behind = dialogue.rpartition(str(_SAID["content"]))
        if not reply or _MARK in dialogue:
            return "its chat template does not show a reply as it is"
        self.stop_tokens = self._first_added(behind)
        between = before.removeprefix(prompt)
        for mark in THINK:
            between = between.replace(mark, "")
        if not before.startswith(prompt.rstrip()) and not any(mark in prompt for mark in THINK):
            return "its chat template begins a reply otherwise than it shows one"
        if before.startswith(prompt) and between.strip():
            return f"a reply begins with {between.strip()!r}, which is no part of its text"
        written = THINK[0] in prompt + str(self._tokenizer.chat_template)
        if written and self.marks_no_thinking:
            return "it thinks between marks that are no tokens"
        return None

    def _frames(self) -> frozenset[int]:
        """Return the added tokens of prompts that show neither tools nor thinking."""
        ids = set[int]()
        for messages in _PROBES:
            try:
                ids |= {*self._tokenizer.encode(self._text(messages, None))}
            except UNFIT:
                continue
        return frozenset(i for i in ids if self._added.get(i, THINK[0]) not in THINK)

    def _writes_calls(self) -> bool:
        """Return whether the template shows a call as Hermes models write it."""
        if not {*HERMES.call} <= {*self._added.values()}:
            return False
        arguments = {"at": "x", "n": [1]}
        call = {
            "type": "function",
            "id": "a1",
            "function": {"name": "look", "arguments": arguments},
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._text([_ASKED, message], None, reply_follows=False)
        except UNFIT:
            return False
        written = text.rpartition(HERMES.call[0])[2].partition(HERMES.call[1])[0]
        return read_json(written, ()) == ("look", arguments)

    def _first_added(self, text: str) -> tuple[int, ...]:
        """Return the added token that a text begins with, after blanks; () where there is none."""
        ids = self._tokenizer.encode(text)
        first = next((i for i in ids if i in self._added or self._decoded([i]).strip()), None)
        return (first,) if first in self._added else ()

    def _context(self) -> list[int]:
        """Return ids to decode a part after, where a decoder drops the first word's blank."""
        word = self._tokenizer.encode("a b")
        apart = self._decoded(word[:1]) + "".join(self._decoded([i]) for i in word[1:])
        return [] if apart == self._decoded(word) else self._tokenizer.encode("a")

    # Reading the template

    def _text(self, messages: Messages, tools: Any, *, reply_follows: bool = True) -> str:
        copies: Any = [dict(message) for message in messages]
        letters = self._letters.render_ids(copies, tools=tools, add_generation_prompt=reply_follows)
        return "".join(map(chr, letters))

    def _end_of(self, at: int, messages: Messages, tools: Any, text: str) -> int | None:
        """Return where a message's content ends in the text, before trailing blanks if the template
        strips them; None: it is not shown exactly once and unchanged."""
        content = str(messages[at]["content"])
        if not content:
            return None
        words = content.rstrip()
        for marked in dict.fromkeys((content + _MARK, words + _MARK + content[len(words) :])):
            rendered = self._text(
                [*messages[:at], {**messages[at], "content": marked}, *messages[at + 1 :]], tools
            )
            if rendered.count(_MARK) == 1 and rendered.replace(_MARK, "") == text:
                return rendered.index(_MARK)
        return None


class _Letters(CutTokenizer):
    """A tokenizer whose tokens are the letters of the template's text."""

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> list[int]:
        return [*map(ord, self._tokenizer.template_text(messages, **options))]
