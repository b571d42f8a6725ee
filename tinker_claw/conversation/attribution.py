"""Attribution: whose words a message holds.

Rule: a message's known frames are cut from its two ends; what is left is a person's words if it is
prose, and nobody's otherwise. Whose the person's words are, the session says, never the message.
Feedback, judge, hints, privacy and histories read this; none of them parses a text by itself.

Which message asks is a question with several answers. Volatile messages never count, and notes of a
harness only where it is said:

    request_indexes            all user messages that ask, from the first on
    last_request_index         the newest of those, however long ago
    asking                     those since the last reply; in a tool loop those that began it
    newest_request             the newest since the last reply, attached files included; none where
                               a tool's results ask
    newest_message_with_words  the newest that holds a person's words
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from tinker_claw.conversation import openclaw
from tinker_claw.conversation.harnesses import HARNESSES, Block, after_blanks
from tinker_claw.conversation.openclaw import Sender
from tinker_claw.images import MessagePart, parts_of
from tinker_claw.prose import is_typed_line, odd_line, quotable
from tinker_claw.served import Belongs, Surface
from tinker_claw.types import Message, Piece, Writer, cached

Attribute = Callable[[Message], Sequence[Piece]]
"""Gives every piece of a message its writer; `attribute`, for one conversation."""
_IMAGE: Final = "image"
_STAMP: Final = "timestamp"
_SENDER: Final = "Conversation info:"
_OTHER: Final = "other context"
_QUEUE: Final = "queue"
_EARLIER: Final = "earlier message"
_RETRY: Final = "retry"
"""Blocks of OpenClaw's that say more than that they are none of the person's words."""
_BY_ROLE: Final = {"assistant": Writer.AGENT, "tool": Writer.TOOL}
UNCLEAR: Final = "unclear"
"""How the name of a piece begins that nobody can be said to have written."""


@dataclass
class Reading:
    """Parsed user message, before it is clear who the person is."""

    pieces: list[Piece] = field(default_factory=list[Piece])
    """Frames, and what is left, which stands here as the owner's."""
    sender: Sender | None = None
    """Who wrote it, as OpenClaw says; None: it says nothing."""
    prompt: Block | None = None
    """A prompt of OpenClaw's own in it; None: there is none."""
    asks: str | None = None
    """Kind of request that another text in it makes, a value of `RequestKind`; None: none."""
    summary: bool = False
    """It stands for messages that were compacted."""
    answered: bool = False
    """The harness wrote the reply to it, too."""
    stamped: bool = False
    """OpenClaw's stamp or block leads it, as it leads what somebody sends."""
    queued: bool = False
    """A message that got no complete answer stands in it, perhaps before others."""
    doubt: str | None = None
    """A line of a frame behind which the words may be anybody's; None: there is none."""
    ends: list[str] = field(default_factory=list[str], repr=False)
    """Ends of its blocks; a block whose end comes again may have ended elsewhere."""

    @property
    def retry(self) -> bool:
        """Return whether OpenClaw asks for the same again."""
        return any(piece.what == _RETRY for piece in self.pieces)

    @cached_property
    def words(self) -> str:
        """Words that are left of it, without blanks around them; "" if a harness wrote it all."""
        return words_of(self.pieces, Writer.OWNER)

    @property
    def automation(self) -> Block | None:
        """OpenClaw's own prompt, behind which nobody has typed anything; None: it is none."""
        return None if self.words else self.prompt

    @property
    def note(self) -> bool:
        """Return whether it is a harness's note: nobody said anything, and nothing is asked."""
        return not (self.words or self.prompt or self.asks)

    @cached_property
    def odd(self) -> str | None:
        """The line because of which its words are nobody's; None: they are prose."""
        if self.doubt is not None:
            return self.doubt
        if self.queued and not self.retry:
            return "[Queued user message …]"
        words = words_of([piece for piece in self.pieces if piece.what != _IMAGE], Writer.OWNER)
        mark = next((mark for mark in (openclaw.MARK, *self.ends) if mark in words), None)
        if mark is not None:
            return next(line.strip() for line in words.splitlines() if mark.strip() in line)
        odd = odd_line(words)
        return odd or (None if quotable(words).strip(" …\n") or not words else words.strip()[:80])

    @property
    def sayings(self) -> list[str]:
        """Texts that a person's command may begin, earlier messages without an answer included."""
        own = [p for p in self.pieces if p.writer is Writer.OWNER or p.what == _EARLIER]
        texts = [piece.text.strip() for piece in own]
        return "\n\n".join(texts).split("\n\n") if self.queued else texts


def read(message: Message) -> Reading:
    """Split a user message into pieces, which together are its text; cached on the message."""
    return cached(_read, message)


@dataclass(frozen=True, slots=True)
class Carried:
    """OpenClaw's description of the newest message, in the volatile one that follows it."""

    text: str
    """Text of the message."""
    sender: Sender | None
    odd: bool
    """It says more than who wrote it: that the words are forwarded, say."""


def carried(messages: Sequence[Message]) -> Carried | None:
    """Read from the volatile messages at the end what they say of the user message before them.

    OpenClaw says there who wrote in which chat, and that the words are forwarded; it says so once.
    """
    kept = openclaw.without_volatile(messages)
    if len(kept) == len(messages):
        return None
    context = "\n\n".join(openclaw.contexts(messages[len(kept) :]))
    about = next((m for m in reversed(kept) if m["role"] == "user"), None)
    if about is None or not context:
        return None
    reading = read({"content": context})
    odd = reading.doubt is not None or openclaw.MARK in reading.words
    return Carried(about["content"], reading.sender, odd)


def attribute(
    message: Message,
    surface: Surface,
    is_owner: Callable[[Sender], bool],
    *,
    carried: Carried | None = None,
) -> tuple[Piece, ...]:
    """Give every piece of a message its writer.

    Args:
        surface: where the conversation takes place, and whose it is.
        is_owner: whether the sender of a channel's message is an owner of this gateway.
        carried: what OpenClaw says of the request's newest message beside it.
    """
    content = message["content"]
    if message["role"] != "user":
        return (Piece(_BY_ROLE.get(message["role"], Writer.HARNESS), content),)
    reading = read(message)
    if carried is not None and not carried.text.endswith(content):
        carried = None
    writer, why = _writer(reading, surface, is_owner, carried)
    name = message.get("name")
    if name not in (None, "", "user"):  # teams of agents send one another's words so
        writer, why = Writer.UNKNOWN, f"{UNCLEAR}: sent under the name {name!r}"
    return tuple(
        replace(piece, writer=writer, what=why or piece.what)
        if piece.writer is Writer.OWNER
        else piece
        for piece in reading.pieces
    )


def _writer(
    reading: Reading,
    surface: Surface,
    is_owner: Callable[[Sender], bool],
    carried: Carried | None,
) -> tuple[Writer, str]:
    """Return who wrote what is left of a message, and why it is not the owner."""
    odd = reading.odd if reading.words else None
    if carried is not None and carried.odd:
        odd = "what OpenClaw says beside it"
    typed = surface.local and reading.doubt is None and is_typed_line(reading.words)
    if odd is not None and not typed:
        return Writer.UNKNOWN, f"{UNCLEAR}: {odd}"
    sender = openclaw.one_sender(reading.sender, carried.sender if carried else None)
    if surface.belongs is Belongs.NOBODY:
        return Writer.MEMBER, surface.because
    if sender is None or not sender.in_channel:
        if surface.belongs is Belongs.OWNER:
            return Writer.OWNER, ""
        return Writer.MEMBER, "OpenClaw names no sender"
    sender = replace(sender, channel=surface.channel)
    return (Writer.OWNER, "") if is_owner(sender) else (Writer.MEMBER, "no owner")


def words_of(pieces: Sequence[Piece], *writers: Writer) -> str:
    """Join the words of these writers, each piece on a line of its own."""
    words = (piece.words for piece in pieces if piece.writer in writers)
    return "\n".join(text for text in words if text)


def _read(message: Message) -> Reading:
    text: str = message["content"]
    parts = parts_of(message)
    shows = len(parts) > 1 or "\n" in text or text in _RESULTS
    if shows and parts[0].text.startswith(_RESULTS):
        return Reading([Piece(Writer.TOOL, text, "images")])
    whole = "\n".join(part.text[: openclaw.runtime_at(part.text)] for part in parts)
    for block in _WHOLE:
        if block.holds in whole and block.pattern.fullmatch(whole):
            return Reading([Piece(Writer.HARNESS, text, block.what)], prompt=block)
    return _Reader(parts).reading


_BLOCKS: Final = [block for harness in HARNESSES for block in harness.blocks]
_RESULTS: Final = tuple(mark for harness in HARNESSES for mark in harness.results)
_NUDGES: Final = tuple(text for harness in HARNESSES for text in harness.nudges)
_WHOLE: Final = [block for block in _BLOCKS if block.prompt == "whole"]
_TRAILING: Final = [block for block in _BLOCKS if block.trails]
_KEY: Final = 3
_LEADING: Final[dict[str, list[Block]]] = {}
"""The other blocks, by the first characters of their openings."""
for _block in _BLOCKS:
    if not (_block.trails or _block.prompt == "whole"):
        _LEADING.setdefault(_block.opens[:_KEY], []).append(_block)


class _Reader:
    """Reader of one message's parts; collects what they say about the whole."""

    def __init__(self, parts: Sequence[MessagePart]) -> None:
        self.reading = reading = Reading()
        self._until: str | None = None
        """The later part that ends the last block; "": the next one, which it announces; None: it
        has ended."""
        self._quoted = False
        """A block with words of others came before."""
        for part in parts:
            if self._until is not None:
                reading.pieces.append(Piece(Writer.HARNESS, part.text, reading.pieces[-1].what))
                if self._until in ("", part.text.strip()):
                    self._until = None
            elif part.attached:
                reading.pieces.append(Piece(Writer.QUOTATION, part.text, "attachment"))
            elif part.image:
                reading.pieces.append(Piece(Writer.OWNER, part.text, _IMAGE))
            else:
                self._read_part(part.text)
        if self._until:
            reading.doubt = f"a block without its end, {self._until}"

    def _read_part(self, part: str) -> None:
        """Read one part: frames, the words, and the block behind them."""
        pieces, at = self.reading.pieces, 0
        body = part[: openclaw.runtime_at(part)]
        while at < len(body) and (piece := self._leading(body, at)):
            pieces.append(piece)
            at += len(piece.text)
        words, trailing = body[at:], self._trailing(body[at:])
        if trailing is not None:
            words = words.removesuffix(trailing.text)
            opening = trailing.text.strip().partition("\n")[0]
            if any(opening in piece.text for piece in pieces):  # the first may have ended elsewhere
                self.reading.doubt = opening
        elif self.reading.queued and "\n\n" in words:  # later requests show it no more
            earlier, blank, words = words.partition("\n\n")
            pieces.append(Piece(Writer.QUOTATION, earlier + blank, _EARLIER, ""))
        if words:
            pieces.append(Piece(Writer.OWNER if words.strip() else Writer.HARNESS, words))
        if trailing is not None:
            pieces.append(trailing)
        if len(body) < len(part):
            pieces.append(Piece(Writer.HARNESS, part[len(body) :], "runtime"))

    def _leading(self, body: str, at: int) -> Piece | None:
        """Return the block that begins here, after blanks."""
        start = after_blanks(body, at)
        for block in (*_LEADING[""], *_LEADING.get(body[start : start + _KEY], ())):
            fits = block.stamp == "any" or (block.stamp == "before") is self.reading.stamped
            fits &= not (block.prompt and self.reading.sender)  # nobody sends those
            if fits and (match := block.pattern.match(body, start)):
                return self._piece(block, body[at : match.end()], match.groupdict(""))
        return None

    def _trailing(self, words: str) -> Piece | None:
        """Return the block behind the words, which may describe them, too."""
        for block in _TRAILING:
            fits = self.reading.queued if block.what == _RETRY else not self.reading.stamped
            if fits and block.opens in words and (match := block.pattern.search(words)):
                return self._piece(block, words[0 if block.summary else match.start() :], {})
        return None

    def _piece(self, block: Block, text: str, groups: Mapping[str, str]) -> Piece:
        """Return a block as a piece, and record what it says about the message."""
        reading, data = self.reading, groups.get("json", "")
        if block.prompt:
            reading.prompt = block
        else:
            reading.asks = block.asks or reading.asks
        reading.summary |= block.summary
        reading.answered |= block.answered
        reading.stamped |= block.what in (_STAMP, _SENDER)
        reading.queued |= block.what == _QUEUE
        if block.shows:
            self._until = ""
        if block.what == _SENDER:
            reading.sender = openclaw.one_sender(reading.sender, openclaw.sender_in(data))
            # OpenClaw names the sender first; what others said may hold another.
            if self._quoted:
                reading.doubt = "a sender behind other context"
        if block.what == _OTHER:
            reading.doubt = text.strip().partition("\n")[0]
        if "end" in groups:
            reading.ends.append(groups["end"] or block.spans)
            if not groups["end"]:
                self._until = block.spans
        self._quoted |= block.writer is Writer.QUOTATION
        quoted = openclaw.bodies(data) if block.writer is Writer.QUOTATION else None
        return Piece(block.writer, text, block.what, quoted)


def _asks(message: Message) -> bool:
    """Return whether a user message asks something of the model: a person's words or a harness's
    prompt, but not a note."""
    return message["role"] == "user" and not read(message).note


def request_indexes(messages: Sequence[Message]) -> list[int]:
    """Return the indexes of the user messages that ask something; the first is the same in every
    request of a session."""
    return [at for at, message in enumerate(without_volatile(messages)) if _asks(message)]


def last_request_index(messages: Sequence[Message]) -> int | None:
    """Return the index of the newest user message that asks something; None: there is none."""
    kept = without_volatile(messages)
    for at in reversed(range(len(kept))):
        if _asks(kept[at]):
            return at
    return None


def asking(messages: Sequence[Message]) -> list[Reading]:
    """Return the user messages that ask for the reply, the newest first: those since the last
    reply, without notes; in a tool loop those that began it."""
    readings = list[Reading]()
    for message in reversed(without_volatile(messages)):
        if message["role"] == "assistant" and readings:
            break
        if _asks(message):
            readings.append(read(message))
    return readings


def newest_request(messages: Sequence[Message]) -> Message | None:
    """Return the newest message of a user that asks for the reply; None: results of tools do."""
    newest = None
    for message in reversed(without_volatile(messages)):
        if message["role"] == "assistant":
            break
        if is_result(message):
            return None
        is_asked = message["role"] == "user" and (attached_to(message) or not read(message).note)
        if newest is None and is_asked:
            newest = message
    return newest


def attached_to(message: Message) -> list[MessagePart]:
    """Return the parts of a message that nobody typed."""
    return [part for part in parts_of(message) if part.attached]


def newest_message_with_words(messages: Sequence[Message]) -> Message | None:
    """Return the newest message that says something to the agent; None: there is none."""
    for message in reversed(without_volatile(messages)):
        if message["role"] == "user" and read(message).words:
            return message
    return None


def asked_by(pieces: Sequence[Piece]) -> Writer:
    """Return the writer of the words in a message; the harness if there are none."""
    writers = [piece.writer for piece in pieces]
    for writer in (Writer.OWNER, Writer.MEMBER, Writer.UNKNOWN, Writer.QUOTATION):
        if writer in writers:
            return writer
    return Writer.HARNESS


def shows_own(message: Message, pieces: Sequence[Piece]) -> bool:
    """Return whether the images in a message are all an owner's or a tool's.

    Args:
        pieces: of the message.
    """
    ends, parts = [*accumulate(len(piece.text) for piece in pieces)], parts_of(message)
    starts = accumulate((len(part.text) for part in parts[:-1]), initial=0)
    image_starts = [at for at, part in zip(starts, parts, strict=True) if part.image]
    writers = {pieces[bisect_right(ends, at)].writer for at in image_starts}
    return writers <= {Writer.OWNER, Writer.TOOL}


def is_result(message: Message) -> bool:
    """Return whether a message is a tool's result, or shows the images of one."""
    if message["role"] != "user":
        return message["role"] == "tool"
    return any(piece.writer is Writer.TOOL for piece in read(message).pieces)


def is_nudge(message: Message, before: Message | None) -> bool:
    """Return whether a message asks for a visible answer after an empty reply.

    The empty reply is in no history: what a user types comes after an assistant's message.
    """
    if message["role"] != "user" or before is None or before["role"] not in ("user", "tool"):
        return False
    return read(message).words.startswith(_NUDGES)


def nudged(messages: Sequence[Message]) -> bool:
    """Return whether the request asks again after an empty reply."""
    return len(without_volatile(messages)) < len(openclaw.without_volatile(messages))


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages that will be in later requests too.

    OpenClaw ends every request with a message about running processes, and drops it afterwards; in
    some formats it stays where it is until the user goes on, see `openclaw.is_volatile`.
    """
    kept = openclaw.without_volatile(messages)
    while len(kept) > 1 and is_nudge(kept[-1], kept[-2]):
        kept = openclaw.without_volatile(kept[:-1])
    return kept
