"""Parse sampled tokens to a reply (text, thinking, tool calls), as they arrive or all at once.

Rules: a piece that was handed out never changes, and `finish` gives exactly the reply whose pieces
were streamed; parsing at once is streaming in one piece. Structure is found by token ids, so text
that merely looks like a marker is text. A call that is not whole is shown as text instead, unless
the token limit cut it off: half a call is nobody's words.

Where a request ends its reply before the model does, the cut falls in the same place however the
tokens were chunked. Only the reply is cut, never the sampled tokens. A stop string counts where it
is in the reply's text, as the client sees it: not in thinking, not in a tool call, and not in white
space that is stripped from a reply's text. Where one call is allowed, the reply ends before the
second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal, Protocol

from tinker_claw.render.calls import CallReader, Decode, Tools
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Delta, Reply, Tokens, ToolCall


class CutStream:
    """A ReplyStream that may end early."""

    def __init__(
        self, inner: ReplyStream, stop: Sequence[str] = (), *, one_call: bool = False
    ) -> None:
        self._inner = inner
        self._search = StopSearch(stop)
        self._one_call = one_call
        self._shown: list[Delta] = []
        self.cut_because: TurnRefusal | None = None
        """Why the reply has ended early, so that sampling on is useless; None: it has not."""
        self.stop_string: str | None = None
        """Stop string at which the reply was cut."""

    @property
    def thought(self) -> int:
        """See `ReplyStream`."""
        return self._inner.thought

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
                if self._search.match:
                    self.stop_string = self._search.match
                    self.cut_because = TurnRefusal(Reason.STOP_STRING)
            elif delta.call and self._one_call and any(earlier.call for earlier in self._shown):
                self.cut_because = TurnRefusal(Reason.ONE_CALL)
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
        self.match: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown for certain; a possible beginning of a stop string is
        held back."""
        if not self._stop:
            return text
        text = self.held + text
        # The one that ends first, as a reader of single characters would find it; of two that end
        # together the longer one.
        hits = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.match = min(hits)
            self.held = ""
            return text[:at]
        longest = max(map(len, self._stop))
        ends = (text[-n:] for n in range(min(len(text), longest - 1), 0, -1))
        begun = (end for end in ends if any(stop.startswith(end) for stop in self._stop))
        self.held = next(begun, "")
        return text[: len(text) - len(self.held)]


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
        """Return whether the channel holds only white space so far."""
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
    def thought(self) -> int:
        """Number of tokens of thinking, without its marks; complete after `finish`."""
        ...

    def feed(self, tokens: Tokens) -> list[Delta]:
        """Return the pieces that these tokens add; the work is proportional to the new tokens."""
        ...

    def finish(self) -> tuple[list[Delta], Reply]:
        """Return the pieces held back, and the whole reply."""
        ...


NO_ID = -1
"""Stand-in for a marker that a format or tokenizer does not have."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The single tokens that structure a reply."""

    stop: frozenset[int]
    think: int = NO_ID
    think_end: int = NO_ID
    tool_call: int = NO_ID
    tool_call_end: int = NO_ID
    section: int = NO_ID
    """Opens the part with all calls, in some formats."""
    section_end: int = NO_ID

    @property
    def without_calls(self) -> Markers:
        return Markers(self.stop, self.think, self.think_end)


class _State(Enum):
    START = auto()
    """Only white space so far: a thinking block may open."""
    REASONING = auto()
    DRAFT = auto()
    """A call inside open reasoning: a draft if the reasoning is closed later, else a call."""
    TEXT = auto()
    SECTION = auto()
    """The part with calls has begun, and no call yet."""
    CALL = auto()
    DONE = auto()


class MarkedStream:
    """Stream of a format whose markers are single tokens."""

    def __init__(
        self,
        markers: Markers,
        decode: Decode,
        calls: CallReader,
        tools: Tools,
        *,
        thinking: bool,
    ) -> None:
        """Set up a stream.

        Args:
            calls: reads what stands between the markers of a call.
            thinking: the prompt has already opened the thinking block.
        """
        self._set(markers)
        self._decode = decode
        self._reader = calls
        self._tools = tools
        self._text = Channel(decode)
        self._reasoning = Channel(decode)
        self._thought = thinking
        self._state = _State.REASONING if thinking else _State.START
        self._block: list[int] = []
        """A call from its marker on, and the marker of a section before it."""
        self._after_call = False
        """No text has followed the last call."""
        self.thought = 0
        self._calls: list[ToolCall] = []
        self._out: list[Delta] = []

    def feed(self, tokens: Tokens) -> list[Delta]:
        self._take(tokens)
        out, self._out = self._out, []
        return out

    def finish(self) -> tuple[list[Delta], Reply]:
        if self._state is not _State.DONE:
            self._close(cut=True)
        out, self._out = self._out, []
        reply = Reply(
            text=self._text.text,
            reasoning=self._reasoning.text if self._thought else None,
            tool_calls=tuple(self._calls),
        )
        return out, reply

    def _set(self, markers: Markers) -> None:
        self._markers = markers
        self._openers = {markers.tool_call, markers.section} - {NO_ID}
        self._marks = markers.stop | {
            markers.think,
            markers.think_end,
            *self._openers,
            markers.tool_call_end,
            markers.section_end,
        }

    def _take(self, tokens: Tokens) -> None:
        run: list[int] = []
        for token in tokens:
            if token in self._marks:
                self._plain(run)
                run = []
                self._mark(token)
            else:
                run.append(token)
        self._plain(run)

    def _plain(self, ids: list[int]) -> None:
        """Handle ids between two markers."""
        if not ids or self._state is _State.DONE:
            return
        if self._state in (_State.CALL, _State.DRAFT):
            self._block.extend(ids)
        elif self._state is _State.REASONING:
            self._think(ids)
        elif self._state is _State.SECTION:
            self._block.extend(ids)
            if self._decode(ids).strip():
                self._unread()
        else:
            self._show_text(ids)
            if not self._text.blank:
                self._state = _State.TEXT

    def _mark(self, token: int) -> None:
        marks, state = self._markers, self._state
        if state is _State.DONE:
            return
        if token in marks.stop:
            self._close(cut=False)
            self._state = _State.DONE
        elif state is _State.START and token == marks.think:
            self._thought = True
            self._state = _State.REASONING
        elif state in (_State.START, _State.TEXT):
            self._state = _State.TEXT
            if token in self._openers:
                self._show("text", self._text.cut())
                self._open(_State.CALL if token == marks.tool_call else _State.SECTION, token)
            elif token != marks.section_end or not self._after_call:
                self._show_text([token])
        elif state is _State.REASONING:
            if token in self._openers:
                self._open(_State.DRAFT, token)
            elif token == marks.think_end:
                self._show("reasoning", self._reasoning.cut())
                self._state = _State.TEXT
            elif token != marks.think:  # else it is opened twice
                self._think([token])
        elif state is _State.DRAFT and token == marks.think_end:
            self._think_draft()
            self._state = _State.TEXT
        else:
            self._block.append(token)
            if state is _State.SECTION:
                self._state = _State.CALL
                if token != marks.tool_call:
                    self._unread()
            elif state is _State.CALL and token == marks.tool_call_end:
                self._end_call(closed=True)

    def _open(self, state: _State, token: int) -> None:
        self._state, self._block = state, [token]

    def _end_call(self, *, closed: bool) -> None:
        """Handle a block that is over. `closed`: its closing marker has come."""
        self._state = _State.TEXT
        opener, end = self._markers.tool_call, self._markers.tool_call_end
        inner = self._block[self._block.index(opener) + 1 :]
        if inner[-1:] == [end]:
            inner.pop()
        pieces = _split(inner, opener)
        whole = self._reader.read(inner, self._tools) if closed else None
        calls = whole or self._read_apart(pieces, open_ends=pieces[:-1] if closed else pieces)
        if calls is None:
            if any(map(self._reader.breaks_off, pieces)):  # what follows may be part of an argument
                self._set(self._markers.without_calls)
            self._unread()
            return
        self._calls += calls
        self._out += [Delta("tool_call", call=call) for call in calls]
        self._after_call = True

    def _read_apart(
        self, pieces: list[list[int]], open_ends: list[list[int]]
    ) -> list[ToolCall] | None:
        """Read the calls of a block in which markers between them are missing.

        A call without its closing marker counts where it ends as a whole one does.
        """
        read = [self._reader.read(piece, self._tools) for piece in pieces]
        if not all(read) or any(map(self._reader.breaks_off, open_ends)):
            return None
        return [call for calls in read for call in calls or ()]

    def _unread(self) -> None:
        """Show the block as text: it is no call."""
        self._show_text(self._block)
        self._state = _State.TEXT

    def _close(self, *, cut: bool) -> None:
        """Settle open parts when no more tokens come.

        Args:
            cut: the model has not ended its reply.
        """
        if self._state is _State.DRAFT and cut:
            self._think_draft()
        elif self._state is _State.DRAFT:
            self._show("reasoning", self._reasoning.cut())
            self._state = _State.TEXT
            self._take(self._block)
        if self._state is _State.CALL and not cut:
            self._end_call(closed=False)
        elif self._state is _State.SECTION and not cut:
            self._unread()
        self._show("reasoning", self._reasoning.cut())
        self._show("text", self._text.cut())

    def _think(self, ids: list[int]) -> None:
        self.thought += len(ids)
        self._show("reasoning", self._reasoning.feed(ids))

    def _think_draft(self) -> None:
        self._think([t for t in self._block if t != self._markers.think])
        self._show("reasoning", self._reasoning.cut())

    def _show_text(self, ids: Sequence[int]) -> None:
        text = self._text.feed(ids)
        self._after_call = self._after_call and not text
        self._show("text", text)

    def _show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if text:
            self._out.append(Delta(kind, text))


def _split(ids: Sequence[int], at: int) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == at:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


class BufferedStream:
    """Stream of any other format: the reply is parsed when it is complete."""

    def __init__(self, parse: Callable[[Tokens], tuple[Reply, int]]) -> None:
        """`parse`: returns the reply, and the number of tokens of its thinking."""
        self._parse = parse
        self._tokens: list[int] = []
        self.thought = 0

    def feed(self, tokens: Tokens) -> list[Delta]:
        self._tokens.extend(tokens)
        return []

    def finish(self) -> tuple[list[Delta], Reply]:
        reply, self.thought = self._parse(self._tokens)
        return reply.deltas, reply
