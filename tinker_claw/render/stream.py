"""Sampled tokens to a reply: text, thinking and tool calls, as they arrive or all at once.

Parsed tool calls of the `renderers` package to ours.

Rule: an attempt that an agent could not execute is no call; its text is shown instead.

Where a request ends its reply before the model does. Rule: the cut falls in the same place however
the tokens were chunked: a service that answers in one piece and a sampler that streams show the
same reply. Only the reply is cut, never what was sampled.

A stop string counts where it is in the reply's text, as the client sees it: not in thinking, not in
a tool call, and not in white space that a reply's text is stripped of. Where one call is allowed,
the reply ends before the second.

Token ids to text while they are still arriving. Rule: a piece that was handed out never changes.
Bytes of an unfinished character and white space that may turn out to be trailing are held back.

Sampled tokens to a reply, while they arrive. Rule: `finish` gives exactly the reply whose pieces
were streamed; parsing at once is streaming in one piece. Structure is told by token ids, so text
that merely looks like a marker is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, Protocol
from uuid import uuid4

from renderers import ParsedToolCall, ToolCallParseStatus

from tinker_claw.types import Delta, Reply, Tokens, ToolCall

# Whether a tool exists and whether an argument has the declared type is for the agent to say.
_EXECUTABLE = frozenset(
    {
        ToolCallParseStatus.OK,
        ToolCallParseStatus.UNKNOWN_TOOL,
        ToolCallParseStatus.INVALID_JSON,
    }
)


def tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    """The call, with an id that agents keep as it is, or None when it is malformed."""
    if attempt.status not in _EXECUTABLE or not attempt.name:
        return None
    arguments = _compact(attempt.arguments)
    if arguments is None or not _is_text(attempt.name):
        return None
    return ToolCall(id=f"call{uuid4().hex}", name=attempt.name, arguments=arguments)


def only_call(attempts: Sequence[ParsedToolCall]) -> ToolCall | None:
    """The call in a block that should hold exactly one."""
    return tool_call(attempts[0]) if len(attempts) == 1 else None


def _is_text(name: Any) -> bool:
    """Half a surrogate pair is none: it can neither be sent nor stored."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _compact(arguments: Any) -> str | None:
    """Compact JSON of an object, written as JavaScript writes it; None when it is no object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        value = {} if value is None else value
        if not isinstance(value, dict):
            return None
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # Half a surrogate pair cannot be sent as it is; escaped it can.
    return text.encode(errors="backslashreplace").decode()


class CutStream:
    """A ReplyStream that may end early. Of one that cannot, it changes nothing."""

    def __init__(
        self, inner: ReplyStream, stop: Sequence[str] = (), *, one_call: bool = False
    ) -> None:
        self._inner = inner
        self._may_end_early = bool(stop) or one_call
        self._search = StopSearch(stop)
        self._one_call = one_call
        self._shown: list[Delta] = []
        self.cut_because: str | None = None
        """Set when the reply has ended: there is no use in sampling on."""

    @property
    def text_at(self) -> Sequence[int]:
        """See `ReplyStream`."""
        return self._inner.text_at

    @property
    def stop_string(self) -> str | None:
        """The one that the reply was cut at."""
        return self._search.found

    def feed(self, tokens: Tokens) -> list[Delta]:
        if self.cut_because:
            return []
        deltas = self._inner.feed(tokens)
        return self._pass(deltas) if self._may_end_early else deltas

    def finish(self) -> tuple[list[Delta], Reply]:
        rest, reply = self._inner.finish()
        if not self._may_end_early:
            return rest, reply
        rest = [] if self.cut_because else self._pass(rest)
        if not self.cut_because:
            held = self._search.flush()
            return [*rest, Delta("text", held)] if held else rest, reply
        return rest, replace(
            reply,
            text="".join(delta.text for delta in self._shown if delta.kind == "text"),
            tool_calls=tuple(delta.call for delta in self._shown if delta.call),
        )

    def _pass(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas that are shown, up to a cut."""
        out: list[Delta] = []
        for delta in deltas:
            if delta.kind == "text":
                text = self._search.feed(delta.text)
                if text:
                    out.append(Delta("text", text))
                if self._search.found:
                    self.cut_because = "its text was cut at a stop string of the request"
            elif delta.call and self._one_call and self._called(out):
                self.cut_because = "it was ended before a second call, as the request asked"
            else:
                out.append(delta)
            if self.cut_because:
                break
        self._shown += out
        return out

    def _called(self, out: Sequence[Delta]) -> bool:
        return any(delta.call for delta in (*self._shown, *out))


class StopSearch:
    """Lets text through up to the stop string that is complete first."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What can be shown for certain: a beginning of a stop string is held back."""
        if self.found:
            return ""
        text = self._held + text
        starts = {stop: text.find(stop) for stop in self._stop}
        # The one that ends first, as a reader of single characters would find it; of two that end
        # together the longer one.
        ends = [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        self._held = self._beginning(text)
        return text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> str:
        """The longest end of `text` that some stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return end
        return ""


Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
_CHARACTER_TOKENS = 4
"""A character has at most four bytes, so at most this many tokens are an unfinished one."""
_GARBAGE_TOKENS = 32
"""So many ids without one boundary between characters are no text; stop waiting for it."""


class _Decoder:
    """Decodes a growing run of ids, without the bytes of an unfinished last character."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # characters of the decoded ids that were handed out

    @property
    def waiting(self) -> bool:
        return bool(self._ids)

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED) or len(self._ids) > _GARBAGE_TOKENS + len(ids):
            return self._take_all(text)
        # Only the last sign can still change: broken bytes before it stay broken.
        piece = text[self._shown : -1]
        self._shown = max(self._shown, len(text) - 1)
        self._trim()
        return piece

    def flush(self) -> str:
        return self._take_all(self._decode(self._ids)) if self._ids else ""

    def _take_all(self, text: str) -> str:
        piece = text[self._shown :]
        self._ids, self._shown = [], 0
        return piece

    def _trim(self) -> None:
        """Forget ids up to the last boundary, so that feeding costs the new ids only."""
        for kept in range(1, min(_CHARACTER_TOKENS, len(self._ids) - 1) + 1):
            head = self._decode(self._ids[:-kept])
            # Some decoders show a run of bytes only when all of it is whole.
            if not head.endswith(_UNFINISHED) and len(head) <= self._shown:
                self._ids = self._ids[-kept:]
                self._shown -= len(head)
                return


class Channel:
    """One of the strings of a reply, stripped of white space at both ends as it streams."""

    def __init__(self, decode: Decode) -> None:
        self._decoder = _Decoder(decode)
        self._held = ""
        self._pieces: list[str] = []

    @property
    def blank(self) -> bool:
        """Nothing but white space so far."""
        return not self._pieces and not self._decoder.waiting

    @property
    def text(self) -> str:
        """All that was handed out."""
        return "".join(self._pieces)

    def feed(self, ids: Sequence[int]) -> str:
        """What can be shown now that `ids` have arrived."""
        return self._show(self._decoder.feed(ids)) if ids else ""

    def cut(self) -> str:
        """A marker follows: an unfinished character will not be completed."""
        return self._show(self._decoder.flush())

    def _show(self, piece: str) -> str:
        if not self._pieces:
            piece = piece.lstrip()
        body = (self._held + piece).rstrip()
        self._held = (self._held + piece)[len(body) :]
        if body:
            self._pieces.append(body)
        return body


class ReplyStream(Protocol):
    """Turns one completion into a reply."""

    @property
    def text_at(self) -> Sequence[int]:
        """Places, among all tokens that were fed, of those of the reply's text and of blanks around
        it; () where the format does not tell."""
        ...

    def feed(self, tokens: Tokens) -> list[Delta]:
        """What these tokens add; the work is that of the new tokens alone."""
        ...

    def finish(self) -> tuple[list[Delta], Reply]:
        """What was held back, and the whole reply."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    """The single tokens that give a reply its structure."""

    think: int
    think_end: int
    tool_call: int
    tool_call_end: int
    stop: frozenset[int]


class _State(Enum):
    START = auto()
    """Nothing but white space yet: a thinking block may open."""
    REASONING = auto()
    DRAFT = auto()
    """A call inside open reasoning: a draft if the reasoning is closed later, else a call."""
    TEXT = auto()
    CALL = auto()
    DONE = auto()


class MarkedStream:
    """For formats whose markers are single tokens."""

    def __init__(
        self,
        markers: Markers,
        decode: Decode,
        parse_call: Callable[[Sequence[int]], ToolCall | None],
        *,
        thinking: bool,
    ) -> None:
        """`thinking`: the prompt has opened the thinking block already."""
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
        """Its first token's place."""
        self._place = 0
        """How many tokens have come."""
        self.text_at: list[int] = []
        self._calls: list[ToolCall] = []
        self._out: list[Delta] = []

    def feed(self, tokens: Tokens) -> list[Delta]:
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

    def _plain(self, ids: list[int]) -> None:
        """Ids between two markers."""
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
        if token in self._markers.stop:
            self._close()
            self._state = _State.DONE
            return
        step = {
            _State.START: self._mark_in_start,
            _State.REASONING: self._mark_in_reasoning,
            _State.DRAFT: self._mark_in_draft,
            _State.TEXT: self._mark_in_text,
            _State.CALL: self._mark_in_call,
        }.get(self._state)
        if step is not None:
            step(token)

    def _mark_in_start(self, token: int) -> None:
        if token == self._markers.think:
            self._thought = True
            self._state = _State.REASONING
        else:
            self._state = _State.TEXT
            self._mark_in_text(token)

    def _mark_in_reasoning(self, token: int) -> None:
        if token == self._markers.think:
            return  # opened twice
        if token == self._markers.tool_call:
            self._block, self._block_from = [token], self._place
            self._state = _State.DRAFT
            return
        if token == self._markers.think_end:
            self._show("reasoning", self._reasoning.cut())
            self._state = _State.TEXT
            return
        self._show("reasoning", self._reasoning.feed([token]))

    def _mark_in_draft(self, token: int) -> None:
        if token != self._markers.think_end:
            self._block.append(token)
            return
        draft = [t for t in self._block if t != self._markers.think]
        self._show("reasoning", self._reasoning.feed(draft) + self._reasoning.cut())
        self._block = []
        self._state = _State.TEXT

    def _mark_in_text(self, token: int) -> None:
        if token == self._markers.tool_call:
            self._show("text", self._text.cut())
            self._block, self._block_from = [token], self._place
            self._state = _State.CALL
        else:
            self._show_text(self._place, [token])

    def _mark_in_call(self, token: int) -> None:
        self._block.append(token)
        if token != self._markers.tool_call_end:
            return
        block, self._block = self._block, []
        self._state = _State.TEXT
        call = self._parse_call(block)
        if call is None:
            self._show_text(self._block_from, block)
        else:
            self._calls.append(call)
            self._out.append(Delta("tool_call", call=call))

    def _close(self) -> None:
        """No more tokens: settle what was left open."""
        if self._state is _State.DRAFT:
            block, self._block = self._block, []
            self._show("reasoning", self._reasoning.cut())
            self._state = _State.TEXT
            self._place = self._block_from
            for token in block:
                if token in self._marks:
                    self._mark(token)
                    self._place += 1
                else:
                    self._place += 1
                    self._plain([token])
        if self._state is _State.CALL:
            self._show_text(self._block_from, self._block)
            self._block = []
        self._show("reasoning", self._reasoning.cut())
        self._show("text", self._text.cut())

    def _show_text(self, place: int, ids: Sequence[int]) -> None:
        self.text_at.extend(range(place, place + len(ids)))
        self._show("text", self._text.feed(ids))

    def _show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if text:
            self._out.append(Delta(kind, text))


class BufferedStream:
    """For all other formats: the reply is parsed when it is complete."""

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
