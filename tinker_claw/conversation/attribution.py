"""Attribution: assign a writer to every piece of a message.

Rule: only this module separates a person's words from what an agent's harness writes around them.
Feedback, judge, hints, privacy, session names and histories read its pieces; none of them
parses a text by itself. Pure: the same text gives the same pieces, and together they are the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from tinker_claw.conversation import openclaw
from tinker_claw.conversation.harnesses import HARNESSES, Block, after_blanks
from tinker_claw.conversation.machinery import looks_like_machinery
from tinker_claw.conversation.openclaw import FORWARDED, Automation, Carried, Sender
from tinker_claw.formats.base import Attached, parts_of
from tinker_claw.images import placed
from tinker_claw.served import Surface
from tinker_claw.types import Message, Piece, Writer, noted

Attribute = Callable[[Message], Sequence[Piece]]
"""Gives every piece of a message its writer; `attribute`, for one conversation."""
PERSONS: Final = (Writer.OWNER, Writer.MEMBER)


@dataclass(slots=True)
class Reading:
    """Parsed user message, before it is known who the person is."""

    pieces: tuple[Piece, ...] = ()
    """A person's words are the owner's here; `attribute` corrects this."""
    sender: Sender | None = None
    """Who wrote, as the first leading `Conversation info` says; None: there is none."""
    typed: bool = False
    """Whether the harness's own marks show that a person typed it."""
    automation: Automation | None = None
    """OpenClaw's automatic prompt, if it is one; None: it is none."""
    asks: str | None = None
    """Kind of request that the harness makes with it, a value of `RequestKind`; None: none."""
    summary: bool = False
    """It stands for messages that were compacted."""
    answered: bool = False
    """The harness wrote the reply to it, too."""
    doubted: bool = False
    """Something in it is not as OpenClaw writes it: it holds no owner's words."""
    lead: str = ""
    """Text before the frame."""
    framed: str | None = None
    """Text inside OpenClaw's frame around a message that got no complete answer; None: there is
    no frame."""

    @property
    def retry(self) -> bool:
        """The frame asks for the same again."""
        return any(piece.what == "retry" for piece in self.pieces)

    @property
    def words(self) -> str:
        """The person's own words, without blanks around them; "" where a harness wrote it all."""
        return words_of(self.pieces, *PERSONS)

    @property
    def unknown(self) -> bool:
        """Whether the text looks like a harness's, although no table knows it."""
        return any(piece.writer is Writer.UNKNOWN for piece in self.pieces)

    @property
    def said(self) -> str:
        """Words that anybody said to the agent, by which histories are compared."""
        sent = (*PERSONS, Writer.EXTERNAL, Writer.UNKNOWN)
        said = (p.words for p in self.pieces if p.writer in sent or p.what == FORWARDED)
        return "\n".join(part for part in said if part)

    @property
    def note(self) -> bool:
        """Whether it is a harness's note: nobody said anything, and nothing is asked."""
        return self.asks is None and not self.said

    @property
    def sayings(self) -> list[str]:
        """Texts that a person's command may begin, earlier messages without an answer included."""
        if self.framed is not None:
            return self.framed.split("\n\n")
        typed = (*PERSONS, Writer.UNKNOWN)
        return [piece.words for piece in self.pieces if piece.writer in typed and piece.words]


def read(message: Message) -> Reading:
    """Split a user message into pieces with writers; cached on the message."""
    return noted(_read, message)


def _asks(message: Message) -> bool:
    """Whether a user message asks something of the model, which a note does not."""
    return message["role"] == "user" and not read(message).note


def attribute(
    message: Message,
    surface: Surface,
    is_owner: Callable[[Sender], bool],
    *,
    trusted: bool = False,
    carried: Carried | None = None,
) -> tuple[Piece, ...]:
    """Give every piece of a message its writer.

    Args:
        surface: where the conversation takes place.
        is_owner: whether the sender of a channel's message is an owner of this gateway.
        trusted: the client says that its turn is main: the words may look like anything.
        carried: what OpenClaw says of the request's newest message beside it.
    """
    role = message["role"]
    if role == "assistant":
        return (Piece(Writer.AGENT, message["content"]),)
    if role == "tool":
        return result_pieces(message)
    if role != "user":
        return (Piece(Writer.HARNESS, message["content"], "instructions"),)
    found = read(message)
    if carried is not None and not carried.text.endswith(message["content"]):
        carried = None
    writer = _person(found, surface, is_owner, carried)
    what = {"what": FORWARDED} if writer is Writer.QUOTATION else {}
    return tuple(
        replace(piece, writer=writer, **what)
        if piece.writer is Writer.OWNER
        or (trusted and piece.writer is Writer.UNKNOWN and piece.what != AMBIGUOUS)
        else piece
        for piece in found.pieces
    )


def result_pieces(message: Message) -> tuple[Piece, ...]:
    """The pieces of a tool's result; cached on the message."""
    return noted(_result_pieces, message)


def _result_pieces(message: Message) -> tuple[Piece, ...]:
    return tuple(openclaw.external(message["content"], Writer.TOOL))


def _person(
    found: Reading,
    surface: Surface,
    is_owner: Callable[[Sender], bool],
    carried: Carried | None,
) -> Writer:
    """Return who wrote a user message: an owner, another member, or the harness."""
    if surface.area in openclaw.NOBODYS:
        return Writer.HARNESS
    if carried is not None and carried.forwarded:
        return Writer.QUOTATION
    sender = _one_sender(found.sender, carried.sender if carried else None)
    if sender is None and (surface.group or surface.area in ("direct", surface.channel)):
        return Writer.MEMBER  # of a chat service's session: a stranger or the owner
    if sender is None or not (sender.in_channel or surface.group):
        # The Control UI and the like: whoever has the key.
        return Writer.UNKNOWN if found.doubted or (sender and sender.mixed) else Writer.OWNER
    if found.doubted or sender.mixed or sender.id is None:
        return Writer.MEMBER
    sender = replace(sender, channel=surface.channel, group=sender.group or surface.group)
    return Writer.OWNER if is_owner(sender) else Writer.MEMBER


def _one_sender(written: Sender | None, beside: Sender | None) -> Sender | None:
    """The sender that a message and what is said beside it name; two are nobody."""
    if written is None or beside is None:
        return written or beside
    return replace(
        written,
        in_channel=written.in_channel or beside.in_channel,
        group=written.group or beside.group,
        bot=written.bot or beside.bot,
        mixed=written.mixed or beside.mixed or written.id != beside.id,
    )


def words_of(pieces: Sequence[Piece], *writers: Writer) -> str:
    """Join the words of these writers, each piece on a line of its own."""
    said = (piece.words for piece in pieces if piece.writer in writers)
    return "\n".join(part for part in said if part)


def _read(message: Message) -> Reading:
    return read_text(message["content"])


def read_text(text: str) -> Reading:
    """Split the text of a user message into pieces."""
    first, *rest = parts_of(text) or [text]
    if first.startswith(_RESULTS) and (rest or first in _RESULTS):
        return Reading((Piece(Writer.TOOL, text, "images"),))
    automatic = openclaw.automation(text)
    if automatic is not None:
        whole = Piece(Writer.HARNESS, text, automatic.what)
        return Reading((whole,), automation=automatic, asks=automatic.what)
    reader = _Reader(parts_of(text))
    pieces = [*reader.pieces()]
    if not reader.found.typed:
        foreign = any(piece.writer is Writer.EXTERNAL for piece in pieces)
        pieces = [_doubted(piece, foreign=foreign) for piece in pieces]
    # OpenClaw names no sender of a message that begins like one from another session.
    reader.found.doubted |= any(
        piece.writer is Writer.OWNER and piece.words.startswith(openclaw.INTER_SESSION)
        for piece in pieces
    )
    reader.found.pieces = tuple(pieces)
    return reader.found


def _doubted(piece: Piece, *, foreign: bool) -> Piece:
    """Correct the writer of words without evidence that a person typed them."""
    if piece.writer is not Writer.OWNER or not piece.words:
        return piece
    if foreign:  # text beside a mail was written by the program that delivers it
        return replace(piece, writer=Writer.HARNESS, what="delivery")
    if looks_like_machinery(piece.text):
        return replace(piece, writer=Writer.UNKNOWN)
    return piece


_BLOCKS: Final = tuple(block for harness in HARNESSES for block in harness.blocks)
_RESULTS: Final = tuple(mark for harness in HARNESSES for mark in harness.results)
_LINE: Final = re.compile(r"^[ \t]*", re.MULTILINE)
_TRAILING: Final = tuple(block for block in _BLOCKS if block.trails)
_KEY: Final = 3
_LEADING: Final[dict[str, list[Block]]] = {}
"""The other blocks, by the first characters of their openings."""
for _block in _BLOCKS:
    if not _block.trails:
        _LEADING.setdefault(_block.opens[:_KEY], []).append(_block)
AMBIGUOUS: Final = "behind an ambiguous end"
"""Name of text behind a block of which nobody can say where it ended."""


class _Reader:
    """Reader of one message's parts; collects what they say about the whole."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.found = Reading()
        self._parts = parts
        self._spanning: tuple[Block, int] | None = None
        """A block that has not ended in its part, and the last part that holds its end mark."""
        self._uncertain = False
        """Nothing that follows is certainly a person's."""
        self._last_with = dict[str, int]()
        """The last part that holds an end mark, by the mark."""
        self._unnamed = False
        """Words of a part whose writer is not named were read."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of every part."""
        for number, part in enumerate(self._parts):
            if self._spanning is not None:
                block, last = self._spanning
                yield Piece(Writer.HARNESS, part, block.what)
                self._spanning = None if number == last else self._spanning
            else:
                yield from self._part(number, part)

    def _part(self, number: int, part: str) -> Iterator[Piece]:
        """Yield the pieces of one part: leading blocks, the person's words, trailing blocks."""
        found = self.found
        if isinstance(part, Attached):  # a document, or a line in place of an image
            yield Piece(Writer.QUOTATION, part, "attachment")
            return
        end = openclaw.runtime_at(part)
        body, at, wrapped = part[:end], 0, list[Block]()
        head = openclaw.Head(body)
        while at < len(body):
            piece = head.take(at)
            if piece is None and not head.typed:  # what was typed is a person's
                piece = self._block(number, body, at, wrapped)
            if piece is None:
                break
            yield piece
            at += len(piece.text)
        found.typed |= head.typed
        if head.framed is not None:
            found.lead, found.framed = body[: head.framed], body[at:].strip()
        words, tail = body[at:], None
        # Text in a block may also end in what looks like the Runtime line.
        if words and (self._uncertain or _ambiguous(part[at:], wrapped)):
            yield Piece(Writer.UNKNOWN, words, AMBIGUOUS)
        else:
            if not head.typed:
                words, tail = self._trailing(words)
            if words:
                yield from openclaw.person(words, head)
        self._meet(head, words)
        if tail is not None:
            yield tail
        if end < len(part):
            yield Piece(Writer.HARNESS, part[end:], "runtime")

    def _meet(self, head: openclaw.Head, words: str) -> None:
        """Record who wrote a part; parts of several people are nobody's."""
        found = self.found
        named = head.sender is not None
        found.doubted |= head.doubted or (named and self._unnamed)
        found.sender = _one_sender(found.sender, head.sender)
        self._unnamed |= found.sender is None and bool(words.strip())

    def _block(self, number: int, body: str, at: int, wrapped: list[Block]) -> Piece | None:
        """The known block that begins here, after blanks.

        Args:
            wrapped: gets the block, where its end mark may stand in it, too.
        """
        start = after_blanks(body, at)
        for block in _LEADING.get(body[start : start + _KEY], ()):
            if not block.begins(body, start):
                continue
            end = block.end(body, start)
            if end is None and block.spans:
                end = self._span(block, number)
            elif end is None and self._ends_later(block, number):
                self._uncertain = True
                return Piece(Writer.UNKNOWN, body[at:], AMBIGUOUS)
            elif end is None and "\n" in body[start:].strip():
                return Piece(Writer.UNKNOWN, body[at:], AMBIGUOUS)  # its end is cut off
            if end is None:
                continue
            if block.wraps:
                wrapped.append(block)
            return self._mark(block, body[at:end])
        return None

    def _ends_later(self, block: Block, number: int) -> bool:
        """Whether a later part holds the end of a block, so that the parts between may be in it."""
        if not block.wraps:
            return False
        mark = (block.closes or "").rstrip(">")
        if mark not in self._last_with:
            numbers = reversed(range(len(self._parts)))
            self._last_with[mark] = next((n for n in numbers if mark in self._parts[n]), -1)
        return self._last_with[mark] > number

    def _span(self, block: Block, number: int) -> int:
        """Begin a block that ends in a later part: the last that is its end mark."""
        mark = block.closes or ""
        later = range(number + 1, len(self._parts))
        marked = [one for one in later if mark in self._parts[one]]
        ends = [one for one in marked if self._parts[one].strip() == mark]  # others are content
        self._spanning = block, ends[-1] if ends else len(self._parts)
        self._uncertain |= len(marked) > 1
        return len(self._parts[number])

    def _trailing(self, words: str) -> tuple[str, Piece | None]:
        """The words, and the block that follows them."""
        for block in _TRAILING:
            if block.begins(words, at := words.find(block.opens)):
                at = 0 if block.summary else at  # it also describes the text before it
                return words[:at], self._mark(block, words[at:])
        return words, None

    def _mark(self, block: Block, text: str) -> Piece:
        """Return a block as a piece, and record what it says about the message."""
        self.found.asks = block.asks or self.found.asks
        self.found.summary |= block.summary
        self.found.answered |= block.answered
        return Piece(Writer.HARNESS, text, block.what)


def _ambiguous(words: str, wrapped: Sequence[Block]) -> bool:
    """Whether words behind blocks may stand in the last of them: where the end mark of one comes
    again, or a line as only a harness begins it."""
    if not wrapped:
        return False
    marks = {block.closes.rstrip(">") for block in wrapped if block.closes}
    return any(mark in words for mark in marks) or any(
        block.wraps and block.begins(words, found.end())
        for found in _LINE.finditer(words)
        for block in _LEADING.get(words[found.end() : found.end() + _KEY], ())
    )


def last_asked(messages: Sequence[Message]) -> int | None:
    """Index of the newest user message that asks something of the model: a person's words or a
    harness's prompt, but not a note."""
    kept = without_volatile(messages)
    return next((at for at in reversed(range(len(kept))) if _asks(kept[at])), None)


def first_asked(messages: Sequence[Message]) -> int | None:
    """Index of the first user message that asks something of the model, the same in every request
    of a session; None: there is none."""
    kept = enumerate(without_volatile(messages))
    return next((at for at, message in kept if _asks(message)), None)


def asking(messages: Sequence[Message]) -> list[Reading]:
    """Return the user messages that ask for the reply: those since the last reply, without notes;
    in a tool loop those that began it."""
    found = list[Reading]()
    for message in reversed(without_volatile(messages)):
        if message["role"] == "assistant" and found:
            break
        if _asks(message):
            found.append(read(message))
    return found


def newest_asked(messages: Sequence[Message]) -> Message | None:
    """The newest message of a user that asks for the reply; None: the results of tools do."""
    since = list[Message]()
    for message in reversed(without_volatile(messages)):
        if message["role"] == "assistant":
            break
        if is_result(message):
            return None
        since.append(message)
    users = (message for message in since if message["role"] == "user")
    return next((m for m in users if attached_to(m) or not read(m).note), None)


def attached_to(message: Message) -> list[Attached]:
    """Parts of a message that nobody typed."""
    return [part for part in parts_of(message["content"]) if isinstance(part, Attached)]


def last_said(messages: Sequence[Message]) -> Message | None:
    """The newest message that says something to the agent; None: there is none."""
    users = (m for m in reversed(without_volatile(messages)) if m["role"] == "user")
    return next((message for message in users if read(message).said), None)


def asked_by(pieces: Sequence[Piece]) -> Writer:
    """Return the writer of the words in a message, owners first; the harness if there are none."""
    writers = {piece.writer for piece in pieces}
    if any(piece.what == FORWARDED for piece in pieces):
        writers.add(Writer.EXTERNAL)
    said = (Writer.OWNER, Writer.MEMBER, Writer.EXTERNAL, Writer.UNKNOWN, Writer.QUOTATION)
    return next((writer for writer in said if writer in writers), Writer.HARNESS)


def shows_own(message: Message, pieces: Sequence[Piece]) -> bool:
    """Return whether the images in a message are all an owner's or a tool's.

    Args:
        pieces: of the message.
    """
    ends = [*accumulate(len(piece.text) for piece in pieces)]
    shown = (pieces[bisect_right(ends, at)] for at, _ in placed(message["content"]))
    return all(piece.writer in (Writer.OWNER, Writer.TOOL) for piece in shown)


def is_result(message: Message) -> bool:
    """Whether a message is a tool's result, or shows the images of one."""
    if message["role"] != "user":
        return message["role"] == "tool"
    return any(piece.writer is Writer.TOOL for piece in read(message).pieces)


def is_nudge(message: Message, before: Message | None) -> bool:
    """Whether a message asks for a visible answer after an empty reply.

    The empty reply is in no history: what a user types comes after an assistant's message.
    """
    if message["role"] != "user" or before is None or before["role"] not in ("user", "tool"):
        return False
    return read(message).said.startswith(openclaw.NUDGES)


def nudged(messages: Sequence[Message]) -> bool:
    """Whether the request asks again after an empty reply."""
    kept = openclaw.without_volatile(messages)
    return len(kept) > 1 and is_nudge(kept[-1], kept[-2])


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that will be in later requests too.

    OpenClaw ends every request with a message about running processes, and drops it afterwards; in
    some formats it stays where it is until the user goes on, see `openclaw.is_volatile`.
    """
    kept = openclaw.without_volatile(messages)
    end = len(kept)
    while end > 1 and is_nudge(kept[end - 1], kept[end - 2]):
        end -= 1
    return kept[:end]
