"""Text from outside stays text, whatever it says.

Rule: only a chat format writes control tokens. A text that spells one (a tool result with
`<|im_end|>` in it) is cut inside each before the format sees it, nothing is merged over a cut, and
decoding gives the text back. A text that spells none is not touched, and has the ids it always had.
"""

from __future__ import annotations

import json
import marshal
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from cachetools import LRUCache

from tinker_claw.render.tokenizer import load_fast
from tinker_claw.types import Tool, noted

CUT = "\udc00"
"""Half a surrogate pair: the one sign that no text from outside can hold. Formats carry it through,
and `CutTokenizer` leaves it out."""

_TOOL_SETS = 32
"""Sets of tools that are remembered: one for each surface of each agent."""
# Of a tool's schema, which formats look up by name.
_STRUCTURE = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items"}
)
# In JSON: an escape that stands for one whole character.
_ESCAPE = re.compile(r"\\(?:u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|[^u])")


class Guard:
    """Cuts what a tokenizer would take for one of its added tokens.

    A switch for this exists only for tokens marked special, and Qwen's <think> and <tool_call> are
    not. Added tokens of nothing but blanks are no marks, and one of one character cannot be cut.
    """

    def __init__(self, added: Iterable[str]) -> None:
        """`added`: the added tokens' texts."""
        marks = {token for token in added if len(token) > 1 and token.strip(" \t\r\n▁")}
        self._mark = re.compile(_shortest_of(marks)) if marks else None
        self._tools = LRUCache[bytes, list[dict[str, Any]]](_TOOL_SETS)
        # Some formats put a key of a schema between brackets.
        self._bracketed = {t.strip("<>").removeprefix("/") for t in marks if t[0] + t[-1] == "<>"}
        self._bracketed |= {f"/{key}" for key in self._bracketed}
        self._bracketed -= _STRUCTURE

    def text(self, text: str) -> str:
        """The text with a cut inside every added token.

        Raises:
            ValueError: it holds half a surrogate pair.
        """
        if CUT in text:
            raise ValueError("half a surrogate pair is no text")
        found = self._mark.search(text) if self._mark else None
        if self._mark is None or found is None:
            return text
        pieces: list[str] = []
        done = 0
        while found:
            start, end = found.span()
            if done <= start:  # else the cut before is inside this one, too
                middle = (start + end) // 2
                pieces.append(text[done:middle])
                done = middle
            found = self._mark.search(text, start + 1)
        return CUT.join([*pieces, text[done:]])

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Every text of the messages; roles are ours."""
        return [
            {k: v if k == "role" else self._value(v, k) for k, v in message.items()}
            for message in messages
        ]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Every text of the schemas, keys among them.

        An agent sends the same schemas with every request: the last sets are remembered, and what
        is returned must not be changed.
        """
        key = noted(written_tools, tools)
        guarded = self._tools.get(key)
        if guarded is None:
            guarded = self._tools[key] = [self._value(tool) for tool in tools]
        return guarded

    def _value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            if key == "arguments":
                return self._arguments(value)
            return self.text(value)
        if isinstance(value, Mapping):
            entries = cast("Mapping[str, Any]", value).items()
            return {self._key(k): self._value(v, k) for k, v in entries}
        if isinstance(value, (list, tuple)):
            return [self._value(entry) for entry in cast("Sequence[Any]", value)]
        return value

    def _key(self, key: str) -> str:
        return CUT + key if key in self._bracketed else self.text(key)

    def _arguments(self, written: str) -> str:
        """A call's arguments. Some formats read the JSON, and what is escaped in it comes out."""
        text = self.text(written)
        if "\\" not in written:
            return text
        try:
            read = json.loads(text)
        except ValueError:
            return text
        return _ESCAPE.sub(rf"{CUT}\g<0>{CUT}", text) if self._is_cut_short(read) else text

    def _is_cut_short(self, read: Any) -> bool:
        """Whether an added token is in what was read of a text that had its cuts."""
        if isinstance(read, str):
            return bool(self._mark and self._mark.search(read))
        if isinstance(read, dict):
            entries = cast("dict[str, Any]", read)
            return any(map(self._is_cut_short, [*entries, *entries.values()]))
        return isinstance(read, list) and any(map(self._is_cut_short, cast("list[Any]", read)))


def written_tools(tools: Sequence[Tool]) -> bytes:
    """All that the tools say."""
    return marshal.dumps(list(tools), 2)


def _shortest_of(words: Iterable[str]) -> str:
    """A pattern for the shortest of the words that begins at a place, tried letter by letter."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        if "" in node:
            return ""
        ways = [re.escape(letter) + pattern(rest) for letter, rest in sorted(node.items())]
        return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"

    return pattern(tree)


class CutTokenizer:
    """A tokenizer that knows the cuts; in all else the one that it is made of."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: as the `renderers` package wants it; a fast one tells where ids begin."""
        self._tokenizer = tokenizer
        self.tells_starts = bool(getattr(tokenizer, "is_fast", False))
        self._fast: Callable[[str], list[int]] | None = None

    def quicken(self, met: Sequence[str]) -> None:
        """From now on a faster way to the same ids, where there is one for this tokenizer.

        Args:
            met: texts that it is tried out on, besides those that every tokenizer is tried out on.
        """
        self._fast = load_fast(self._tokenizer, met)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        if CUT not in text:
            return self._tokenizer.encode(text, *args, **options)
        return self.encoded(text)[0]

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        if CUT not in text or not options.get("return_offsets_mapping"):
            return self._tokenizer(text, *args, **options)
        if not self.tells_starts:
            raise NotImplementedError
        ids, starts = self.encoded(text, with_starts=True)
        assert starts is not None
        # Of an end it is only asked whether it lies behind the start.
        return {"input_ids": ids, "offset_mapping": [(at, at + 1) for at in starts]}

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """The ids of the template's text."""
        return self.encode(self.template_text(messages, **options), add_special_tokens=False)

    def template_text(self, messages: Sequence[Any], **options: Any) -> str:
        """What the template makes of the messages, before it is encoded."""
        options = {k: v for k, v in options.items() if k not in ("tokenize", "return_dict")}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def encoded(
        self, text: str, *, with_starts: bool = False
    ) -> tuple[list[int], array[int] | None]:
        """Ids, and the index in the text of each id's first character where that is wanted."""
        if CUT not in text:
            return self._piece(text, with_starts)
        ids: list[int] = []
        starts = array("i")
        # A token may be there very often. How a text begins is not how it goes on.
        known: dict[tuple[str, bool], tuple[list[int], array[int] | None]] = {}
        at = 0
        for piece in text.split(CUT):
            if piece:
                place = piece, at > 0
                if place not in known:
                    known[place] = self._piece(piece, with_starts, self._before if at else "")
                found, begin = known[place]
                ids += found
                starts.extend(at + start for start in begin or ())
            at += len(piece) + len(CUT)
        return ids, starts if with_starts else None

    def _piece(
        self, text: str, with_starts: bool, before: str = ""
    ) -> tuple[list[int], array[int] | None]:
        if not self.tells_starts:
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            return ids[1:] if before else ids, None
        if self._fast is not None and not with_starts and not before:
            return self._fast(text), None
        # Not encode(), which holds the interpreter's lock all the time.
        backend = self._tokenizer.backend_tokenizer
        encode = backend.encode_batch if with_starts else backend.encode_batch_fast
        (found,) = encode([before + text], add_special_tokens=False)
        skip, ids = bool(before), found.ids
        if not with_starts:  # for a long prompt the starts alone take milliseconds
            return ids[skip:], None
        starts = array("i", [max(0, start - len(before)) for start, _ in found.offsets[skip:]])
        return ids[skip:], starts

    @cached_property
    def _before(self) -> str:
        """What to encode a piece behind, so that it does not begin as a text does.

        Some tokenizers put a blank before whatever they are given; none behind an added token.
        """

        def joined(before: str) -> str:
            return self._tokenizer.decode(
                [*self._piece("a", False)[0], *self._piece("a", False, before)[0]],
                skip_special_tokens=False,
            )

        if joined("") == "aa":
            return ""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        able = (t for t, i in added.items() if self._piece(t, False)[0] == [i])
        return next((token for token in able if joined(token) == "aa"), "")
