"""Keep text from outside as text, even where it spells control tokens.

Rule: only a chat format writes control tokens. A text that spells some (a tool result with
`<|im_end|>` in it) is cut inside each of them before the format sees it. Nothing is merged over a
cut, and decoding gives the text back. Any other text is not touched, and its ids do not change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any, TypeAlias, cast

from tinker_claw.types import Tool, cached

_Encoded: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""Ids of a text, and the start and end of each in it; [] where positions are not needed."""

CUT = "\udc00"
"""Half a surrogate pair: the one character that no outside text can hold. Formats pass it through,
and `CutTokenizer` removes it."""

_AT_ONCE = 1_000
"""Pieces that are encoded in one call."""

# Keys of a tool's schema that formats look up by name.
_STRUCTURE = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items"}
)
# In JSON: an escape that stands for one whole character.
_ESCAPE = re.compile(r"\\(?:u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|[^u])")


class Guard:
    """Cuts every text that the tokenizer would read as one of its added tokens.

    A switch for this exists only for tokens marked special, and Qwen's <think> and <tool_call> are
    not. Added tokens of blanks only do not count, and one of one character cannot be cut.
    """

    def __init__(self, added: Iterable[str]) -> None:
        """Guard against `added`, the texts of the added tokens."""
        marks = {token for token in added if len(token) > 1 and token.strip(" \t\r\n▁")}
        self._mark = re.compile(_shortest_of(marks) if marks else "(?!)")
        # Some formats put a key of a schema between brackets.
        self._bracketed = {t.strip("<>").removeprefix("/") for t in marks if t[0] + t[-1] == "<>"}
        self._bracketed |= {f"/{key}" for key in self._bracketed}
        self._bracketed -= _STRUCTURE

    def text(self, text: str) -> str:
        """Return the text with a cut inside every added token.

        Raises:
            ValueError: it holds half a surrogate pair.
        """
        if CUT in text:
            raise ValueError("half a surrogate pair is no text")
        match = self._mark.search(text)
        pieces: list[str] = []
        done = 0
        while match:
            start, end = match.span()
            if done <= start:  # else the cut before is inside this one, too
                middle = (start + end) // 2
                pieces.append(text[done:middle])
                done = middle
            match = self._mark.search(text, start + 1)
        return CUT.join([*pieces, text[done:]])

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with every text guarded; roles are ours. Shared, as `tools` are."""
        return [cached(self._message, message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v if k == "role" else self._value(v, k) for k, v in message.items()}

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Return the schemas with every text guarded, keys among them.

        An agent sends the same schemas with every request: the result is shared, and must not be
        changed.
        """
        return cached(self._value, tools)

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
        """Return a call's guarded arguments. Some formats parse the JSON, which decodes its
        escapes."""
        text = self.text(written)
        if "\\" not in written:
            return text
        try:
            read = json.loads(text)
        except ValueError:
            return text
        return _ESCAPE.sub(rf"{CUT}\g<0>{CUT}", text) if self._is_cut_short(read) else text

    def _is_cut_short(self, read: Any) -> bool:
        """Return whether an added token appears after parsing a guarded text."""
        if isinstance(read, str):
            return bool(self._mark.search(read))
        if isinstance(read, dict):
            entries = cast("dict[str, Any]", read)
            return any(map(self._is_cut_short, [*entries, *entries.values()]))
        return isinstance(read, list) and any(map(self._is_cut_short, cast("list[Any]", read)))


def _shortest_of(words: Iterable[str]) -> str:
    """Return a pattern for the shortest of the words that begins at a position, tried letter by
    letter."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: Mapping[str, Any]) -> str:
    if "" in node:
        return ""
    ways = [re.escape(letter) + _pattern(rest) for letter, rest in sorted(node.items())]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


class CutTokenizer:
    """A tokenizer that encodes the pieces between cuts separately; otherwise the one it wraps."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap `tokenizer`, as the `renderers` package wants it; a fast one reports where ids
        begin."""
        self._tokenizer = tokenizer
        self._text_of_one = cache(self._decoded)
        """Text of single ids, since streaming samplers give one at a time. At most as many as there
        are ids, some 10 MB."""
        self.tells_starts = bool(getattr(tokenizer, "is_fast", False))
        # Texts come one at a time: its own threads would have nothing to share.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return [i for ids, _ in self._pieces(text, with_places=False) for i in ids]

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        """Return the ids of a text, and the start and end of each."""
        if not self.tells_starts:
            raise NotImplementedError
        at, ids, offsets = 0, list[int](), list[tuple[int, int]]()
        for piece, (piece_ids, places) in zip(text.split(CUT), self._pieces(text), strict=True):
            ids += piece_ids
            offsets += [(at + start, at + end) for start, end in places]
            at += len(piece) + len(CUT)
        return {"input_ids": ids, "offset_mapping": offsets}

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Return the ids of the template's text."""
        return self.encode(self.template_text(messages, **options))

    def template_text(self, messages: Sequence[Any], **options: Any) -> str:
        """Return the template's text for the messages, before it is encoded.

        Raises:
            ValueError: the tokenizer has no template.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        options = {k: v for k, v in options.items() if k not in ("tokenize", "return_dict")}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens spelled out."""
        return self._text_of_one(*ids) if len(ids) == 1 else self._decoded(*ids)

    def _decoded(self, *ids: int) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _pieces(self, text: str, *, with_places: bool = True) -> Iterator[_Encoded]:
        """Encode each piece between two cuts separately."""
        first, *rest = text.split(CUT)
        before = (
            self._before if rest else ""
        )  # tokenizers may treat the start of a text differently
        texts = [first, *(before + piece for piece in rest)]
        encoded, n = self._encoded(texts, with_places=with_places), len(before)
        yield next(encoded)
        for ids, places in encoded:
            if before:
                ids, places = ids[1:], [(max(0, b - n), e - n) for b, e in places[1:]]
            yield ids, places

    def _encoded(self, texts: Sequence[str], *, with_places: bool = False) -> Iterator[_Encoded]:
        if not self.tells_starts:
            yield from ((self._tokenizer.encode(t, add_special_tokens=False), []) for t in texts)
            return
        # Not encode(), which holds the GIL all the time.
        backend = self._tokenizer.backend_tokenizer
        encode = backend.encode_batch if with_places else backend.encode_batch_fast
        # Some at a time: handing a million pieces over and back holds it, too.
        for at in range(0, len(texts), _AT_ONCE):
            for encoding in encode(texts[at : at + _AT_ONCE], add_special_tokens=False):
                yield encoding.ids, encoding.offsets if with_places else []

    @cached_property
    def _before(self) -> str:
        """Return a prefix for encoding a piece, so that it is not treated as the start of a text.

        Some tokenizers prepend a blank to every text, but not after an added token.
        """
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        able = (t for t, i in added.items() if [*self._encoded([t])] == [([i], [])])
        return next((before for before in chain([""], able) if self._joins_after(before)), "")

    def _joins_after(self, before: str) -> bool:
        """Return whether two pieces are one text where the second is encoded after a prefix."""
        (first, _), (second, _) = self._encoded(["a", before + "a"])
        return self.text([*first, *second[bool(before) :]]) == "aa"
