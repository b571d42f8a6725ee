"""Sampled tokens to a reply, while they arrive.

Rule: `finish` gives exactly the reply whose pieces were streamed; parsing at once is streaming in
one piece. Structure is told by token ids, so text that merely looks like a marker is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol

from tinker_claw.render.text import Channel, Decode
from tinker_claw.types import Reply, Tokens, ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply."""

    kind: Literal["text", "reasoning", "tool_call"]
    text: str = ""
    call: ToolCall | None = None
    """Whole: a call is handed out when its closing token has arrived."""


class ReplyStream(Protocol):
    """Turns one completion into a reply."""

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
            self._show("text", self._text.feed(ids))
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
            self._block = [token]
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
            self._block = [token]
            self._state = _State.CALL
        else:
            self._show("text", self._text.feed([token]))

    def _mark_in_call(self, token: int) -> None:
        self._block.append(token)
        if token != self._markers.tool_call_end:
            return
        block, self._block = self._block, []
        self._state = _State.TEXT
        call = self._parse_call(block)
        if call is None:
            self._show("text", self._text.feed(block))
        else:
            self._calls.append(call)
            self._out.append(Delta("tool_call", call=call))

    def _close(self) -> None:
        """No more tokens: settle what was left open."""
        if self._state is _State.DRAFT:
            block, self._block = self._block, []
            self._show("reasoning", self._reasoning.cut())
            self._state = _State.TEXT
            for token in block:
                if token in self._marks:
                    self._mark(token)
                else:
                    self._plain([token])
        if self._state is _State.CALL:
            self._show("text", self._text.feed(self._block))
            self._block = []
        self._show("reasoning", self._reasoning.cut())
        self._show("text", self._text.cut())

    def _show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if text:
            self._out.append(Delta(kind, text))


class BufferedStream:
    """For all other formats: the reply is parsed when it is complete."""

    def __init__(self, parse: Callable[[Tokens], Reply]) -> None:
        self._parse = parse
        self._tokens: list[int] = []

    def feed(self, tokens: Tokens) -> list[Delta]:
        self._tokens.extend(tokens)
        return []

    def finish(self) -> tuple[list[Delta], Reply]:
        reply = self._parse(self._tokens)
        out: list[Delta] = []
        if reply.reasoning:
            out.append(Delta("reasoning", reply.reasoning))
        if reply.text:
            out.append(Delta("text", reply.text))
        out.extend(Delta("tool_call", call=call) for call in reply.tool_calls)
        return out, reply
