"""Parse sampled tokens to a reply (text, thinking, tool calls), as they arrive or all at once.

Rules: a piece that was handed out never changes, and `finish` gives exactly the reply whose pieces
were streamed; parsing at once is streaming in one piece. Structure is found by token ids, so text
that merely looks like a marker is text. A call that an agent could not execute is shown as text
instead.

Where a request ends its reply before the model does, the cut falls in the same place however the
tokens were chunked. Only the reply is cut, never the sampled tokens. A stop string counts where it
is in the reply's text, as the client sees it: not in thinking, not in a tool call, and not in white
space that is stripped from a reply's text. Where one call is allowed, the reply ends before the
second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, Protocol, cast
from uuid import uuid4

from renderers import ParsedToolCall, ToolCallParseStatus

from tinker_claw.types import Delta, Reply, Tokens, ToolCall

# The agent checks whether a tool exists and whether an argument has the declared type.
_EXECUTABLE = frozenset(
    {
        ToolCallParseStatus.OK,
        ToolCallParseStatus.UNKNOWN_TOOL,
        ToolCallParseStatus.INVALID_JSON,
    }
)


def tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    """Return the call, with an id that agents keep unchanged, or None when it is malformed.

    Its arguments become compact JSON, written as JavaScript writes it.
    """
    if attempt.status not in _EXECUTABLE:
        return None
    name, said = cast("Any", attempt.name), cast("Any", attempt.arguments)
    try:
        value = json.loads(said) if isinstance(said, str) else said
        value = {} if value is None else value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # Half a surrogate pair in a name can neither be sent nor stored.
        if not name.encode() or not isinstance(value, dict):
            return None
    except (AttributeError, ValueError, RecursionError):
        return None
    # Nor can it in an argument, escaped neither: the call comes back as JSON, which is refused.
    arguments = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return ToolCall(id=f"call{uuid4().hex}", name=name, arguments=arguments)


class CutStream:
    """A ReplyStream that may end early."""

    def __init__(
        self, inner: ReplyStream, stop: Sequence[str] = (), *, one_call: bool = False
    ) -> None:
        self._inner = inner
        self.text_at = inner.text_at
        """See `ReplyStream`."""
        self._search = StopSearch(stop)
        self._one_call = one_call
        self._shown: list[Delta] = []
        self.cut_because: str | None = None
        """Why the reply has ended early, so that sampling on is useless; None: it has not."""

    @property
    def stop_string(self) -> str | None:
        """Stop string at which the reply was cut."""
        return self._search.found

    def feed(self, tokens: Tokens) -> list[Delta]:
        return [] if self.cut_because else self._pass(self._inner.feed(tokens))

    def finish(self) -> tuple[list[Delta], Reply]:
        rest, reply = self._inner.finish()
        rest = [] if self.cut_because else self._pass(rest)
        if not self.cut_because:
            held = self._search.held
            return [*rest, Delta("text", held)] if held else rest, reply
        return rest, replace(
            reply,
            text="".join(delta.text for delta in self._shown if delta.kind == "text"),
            tool_calls=tuple(delta.call for delta in self._shown if delta.call),
        )

    def _pass(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas that are shown, up to a cut."""
        begin = len(self._shown)
        for delta in deltas:
            if delta.kind == "text":
                text = self._search.feed(delta.text)
                if text:
                    self._shown.append(Delta("text", text))
                if self._search.found:
                    self.cut_because = "its text was cut at a stop string of the request"
            elif delta.call and self._one_call and any(shown.call for shown in self._shown):
                self.cut_because = "it was ended before a second call, as the request asked"
            else:
                self._shown.append(delta)
            if self.cut_because:
                break
        return self._shown[begin:]


class StopSearch:
    """Passes text through up to the stop string that is complete first."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self.held = ""
        """Text that may be the beginning of a stop string."""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown for certain; a possible beginning of a stop string is
        held back."""
        text = self.held + text
        # The one that ends first, as a reader of single characters would find it; of two that end
        # together the longer one.
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            self.held = ""
            return text[:at]
        longest = max(map(len, self._stop), default=0)
        ends = (text[-n:] for n in range(min(len(text), longest - 1), 0, -1))
        begun = (end for end in ends if any(stop.startswith(end) for stop in self._stop))
        self.held = next(begun, "")
        return text[: len(text) - len(self.held)]


Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
_GARBAGE = 32
"""Feeds without a boundary between characters after which the bytes are shown although they are no
text."""


class Channel:
    """One of the strings of a reply, decoded and stripped of white space as it streams.

    The bytes of an unfinished last character are held back, and white space that may be the last.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._waits = 0
        """Number of feeds since the last boundary between characters."""
        self._shown = 0
        """Characters of the decoded ids that were handed out."""
        self._blanks = ""
        self._pieces: list[str] = []

    @property
    def blank(self) -> bool:
        """Whether the channel holds only white space so far."""
        return not self._pieces and not self._ids

    @property
    def text(self) -> str:
        """Text returned so far."""
        return "".join(self._pieces)

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that can be shown now that `ids` have arrived."""
        self._ids.extend(ids)
        self._waits += 1
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED) or self._waits > _GARBAGE:
            return self.cut()
        # Only the last sign can still change: broken bytes before it stay broken.
        piece = text[self._shown : -1]
        self._shown = max(self._shown, len(text) - 1)
        return self._show(piece)

    def cut(self) -> str:
        """Return the rest before a marker: an unfinished character will not be completed."""
        piece = self._decode(self._ids)[self._shown :]
        self._ids, self._waits, self._shown = [], 0, 0
        return self._show(piece)

    def _show(self, piece: str) -> str:
        if not self._pieces:
            piece = piece.lstrip()
        body = (self._blanks + piece).rstrip()
        self._blanks = (self._blanks + piece)[len(body) :]
        if body:
            self._pieces.append(body)
        return body


class ReplyStream(Protocol):
    """Turns one completion into a reply."""

    @property
    def text_at(self) -> Sequence[int]:
        """Indices, among all tokens fed, of those of the reply's text and of blanks around it; ()
        where the format does not show them."""
        ...

    def feed(self, tokens: Tokens) -> list[Delta]:
        """Return the pieces that these tokens add; the work is proportional to the new tokens."""
        ...

    def finish(self) -> tuple[list[Delta], Reply]:
        """Return the pieces held back, and the whole reply."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    """The single tokens that structure a reply."""

    think: int
    think_end: int
    tool_call: int
    tool_call_end: int
    stop: frozenset[int]


class _State(Enum):
    START = auto()
    """Only white space so far: a thinking block may open."""
    REASONING = auto()
    DRAFT = auto()
    """A call inside open reasoning: a draft if the reasoning is closed later, else a call."""
    TEXT = auto()
    CALL = auto()
    DONE = auto()


class MarkedStream:
    """Stream of a format whose markers are single tokens."""

    def __init__(
        self,
        markers: Markers,
        decode: Decode,
        parse_call: Callable[[Sequence[int]], ToolCall | None],
        *,
        thinking: bool,
    ) -> None:
        """Set up a stream. `thinking`: the prompt has already opened the thinking block."""
        self._markers = markers
        self._marks = markers.stop | {
            markers.think,
            markers.think_end,
            markers.tool_call,
            markers.tool_call_end,
        }
        self._parse_call = parse_call
        self._text = Channel(decode)
        self._reasoning = Channel(decode)
        self._thought = thinking
        self._state = _State.REASONING if thinking else _State.START
        self._block: list[int] = []
        self._block_from = 0
        """Index of the first token of the block."""
        self._place = 0
        """Number of tokens fed."""
        self.text_at: list[int] = []
        self._calls: list[ToolCall] = []
        self._out: list[Delta] = []

    def feed(self, tokens: Tokens) -> list[Delta]:
        self._take(tokens)
        out, self._out = self._out, []
        return out

    def finish(self) -> tuple[list[Delta], Reply]:
        self._close()
        out, self._out = self._out, []
        reply = Reply(
            text=self._text.text,
            reasoning=self._reasoning.text if self._thought else None,
            tool_calls=tuple(self._calls),
        )
        return out, reply

    def _take(self, tokens: Tokens) -> None:
        run: list[int] = []
        for token in tokens:
            if token in self._marks:
                self._plain(run)
                run = []
                self._mark(token)
            else:
                run.append(token)
            self._place += 1
        self._plain(run)

    def _plain(self, ids: list[int]) -> None:
        """Handle ids between two markers."""
        if not ids or self._state is _State.DONE:
            return
        if self._state in (_State.CALL, _State.DRAFT):
            self._block.extend(ids)
        elif self._state is _State.REASONING:
            self._show("reasoning", self._reasoning.feed(ids))
        else:
            self._show_text(self._place - len(ids), ids)
            if not self._text.blank:
                self._state = _State.TEXT

    def _mark(self, token: int) -> None:
        marks, state = self._markers, self._state
        if token in marks.stop:
            self._close()
            self._state = _State.DONE
        elif state is _State.START and token == marks.think:
            self._thought = True
            self._state = _State.REASONING
        elif state in (_State.START, _State.TEXT):
            self._state = _State.TEXT
            if token == marks.tool_call:
                self._show("text", self._text.cut())
                self._open(_State.CALL, token)
            else:
                self._show_text(self._place, [token])
        elif state is _State.REASONING:
            if token == marks.tool_call:
                self._open(_State.DRAFT, token)
            elif token == marks.think_end:
                self._show("reasoning", self._reasoning.cut())
                self._state = _State.TEXT
            elif token != marks.think:  # else it is opened twice
                self._show("reasoning", self._reasoning.feed([token]))
        elif state is _State.DRAFT and token == marks.think_end:
            draft = [t for t in self._block if t != marks.think]
            self._show("reasoning", self._reasoning.feed(draft) + self._reasoning.cut())
            self._state = _State.TEXT
        elif state in (_State.DRAFT, _State.CALL):
            self._block.append(token)
            if state is _State.CALL and token == marks.tool_call_end:
                self._state = _State.TEXT
                self._show_call(self._parse_call(self._block))

    def _open(self, state: _State, token: int) -> None:
        self._state, self._block, self._block_from = state, [token], self._place

    def _show_call(self, call: ToolCall | None) -> None:
        if call is None:
            self._show_text(self._block_from, self._block)
        else:
            self._calls.append(call)
            self._out.append(Delta("tool_call", call=call))

    def _close(self) -> None:
        """Settle open parts when no more tokens come."""
        if self._state is _State.DRAFT:
            self._show("reasoning", self._reasoning.cut())
            self._state = _State.TEXT
            self._place = self._block_from
            self._take(self._block)
        if self._state is _State.CALL:
            self._show_call(None)
        self._show("reasoning", self._reasoning.cut())
        self._show("text", self._text.cut())

    def _show_text(self, place: int, ids: Sequence[int]) -> None:
        self.text_at.extend(range(place, place + len(ids)))
        self._show("text", self._text.feed(ids))

    def _show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if text:
            self._out.append(Delta(kind, text))


class BufferedStream:
    """Stream of any other format: the reply is parsed when it is complete."""

    text_at: Sequence[int] = ()

    def __init__(self, parse: Callable[[Tokens], Reply]) -> None:
        self._parse = parse
        self._tokens: list[int] = []

    def feed(self, tokens: Tokens) -> list[Delta]:
        self._tokens.extend(tokens)
        return []

    def finish(self) -> tuple[list[Delta], Reply]:
        reply = self._parse(self._tokens)
        return reply.deltas, reply
