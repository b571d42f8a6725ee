"""Attribution: whose words a message holds.

Rule: a message's known frames are cut from its two ends; what is left is a person's words if it is
prose, and nobody's otherwise. Whose the person's words are, the session says, never the message.
Feedback, judge, hints, privacy and histories read this; none of them parses a text by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from tinker_claw.conversation import openclaw
from tinker_claw.conversation.harnesses import HARNESSES, Block, after_blanks
from tinker_claw.conversation.openclaw import Automation, Carried, Sender
from tinker_claw.formats.base import Attached, parts_of
from tinker_claw.images import Image, placed, split
from tinker_claw.prose import is_typed_line, odd_line, quotable
from tinker_claw.served import Belongs, Surface
from tinker_claw.types import Message, Piece, Writer, noted

Attribute = Callable[[Message], Sequence[Piece]]
"""Gives every piece of a message its writer; `attribute`, for one conversation."""
_IMAGE: Final = "image"
UNCLEAR: Final = "unclear"
"""How the name of a piece begins that nobody can be said to have written."""


@dataclass
class Reading:
    """Parsed user message, before it is clear who the person is."""

    pieces: Sequence[Piece] = ()
    """Frames, and what is left, which stands here as the owner's."""
    sender: Sender | None = None
    """Who wrote it, as OpenClaw says; None: it says nothing."""
    automation: Automation | None = None
    """OpenClaw's automatic prompt, if it is one; None: it is none."""
    asks: str | None = None
    """Kind of request that the harness makes with it, a value of `RequestKind`; None: none."""
    summary: bool = False
    """It stands for messages that were compacted."""
    answered: bool = False
    """The harness wrote the reply to it, too."""
    stamped: bool = False
    """OpenClaw's stamp or block leads it, as it leads what somebody sends."""
    lead: str = ""
    """Text before the frame of a queued message."""
    framed: str | None = None
    """Text inside that frame, around a message that got no complete answer; None: no frame."""
    doubt: str | None = None
    """A line of a frame behind which the words may be anybody's; None: there is none."""
    marks: Sequence[str] = field(default=(), repr=False)
    """Ends of its blocks; a block whose end comes again may have ended elsewhere."""

    @property
    def retry(self) -> bool:
        """Whether the frame asks for the same again."""
        return any(piece.what == "retry" for piece in self.pieces)

    @cached_property
    def words(self) -> str:
        """What is left of it, without blanks around it; "" where a harness wrote it all."""
        return words_of(self.pieces, Writer.OWNER)

    @property
    def note(self) -> bool:
        """Whether it is a harness's note: nobody said anything, and nothing is asked."""
        return self.asks is None and not self.words

    @cached_property
    def odd(self) -> str | None:
        """The line because of which its words are nobody's; None: they are prose."""
        if self.doubt is not None:
            return self.doubt
        words = words_of([piece for piece in self.pieces if piece.what != _IMAGE], Writer.OWNER)
        if not words:
            return None
        cut = next((mark for mark in self.marks if mark in words), None)
        if cut is not None or openclaw.MARK in words:
            mark = cut or openclaw.MARK
            return next(line.strip() for line in words.splitlines() if mark in line)
        if self.framed is not None and not self.retry:
            return "[Queued user message …]"
        odd = odd_line(words)
        return words.strip()[:80] if odd is None and not quotable(words).strip(" …\n") else odd

    @property
    def sayings(self) -> list[str]:
        """Texts that a person's command may begin, earlier messages without an answer included."""
        if self.framed is not None:
            return self.framed.split("\n\n")
        return [piece.words for piece in self.pieces if piece.writer is Writer.OWNER]


def read(message: Message) -> Reading:
    """Split a user message into frames and words; cached on the message."""
    return noted(_read, message)


def _asks(message: Message) -> bool:
    """Whether a user message asks something of the model, which a note does not."""
    return message["role"] == "user" and not read(message).note


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
    role = message["role"]
    if role == "assistant":
        return (Piece(Writer.AGENT, message["content"]),)
    if role == "tool":
        return (Piece(Writer.TOOL, message["content"]),)
    if role != "user":
        return (Piece(Writer.HARNESS, message["content"], "instructions"),)
    reading = read(message)
    if carried is not None and not carried.text.endswith(message["content"]):
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
    return read_text(message["content"])


def read_text(text: str) -> Reading:
    """Split the text of a user message into pieces, which together are the text."""
    parts = parts_of(text) or [text]
    shows = len(parts) > 1 or "\n" in parts[0] or parts[0] in _RESULTS
    if shows and parts[0].startswith(_RESULTS):
        return Reading((Piece(Writer.TOOL, text, "images"),))
    automatic = openclaw.automation(text)
    if automatic is not None:
        whole = Piece(Writer.HARNESS, text, automatic.what)
        return Reading((whole,), automation=automatic, asks=automatic.what)
    return _Reader(parts).read()


_BLOCKS: Final = tuple(block for harness in HARNESSES for block in harness.blocks)
_RESULTS: Final = tuple(mark for harness in HARNESSES for mark in harness.results)
_TRAILING: Final = tuple(block for block in _BLOCKS if block.trails)
_KEY: Final = 3
_LEADING: Final[dict[str, list[Block]]] = {}
"""The other blocks, by the first characters of their openings."""
for _block in _BLOCKS:
    if not _block.trails:
        _LEADING.setdefault(_block.opens[:_KEY], []).append(_block)


class _Reader:
    """Reader of one message's parts; collects what they say about the whole."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts
        self._pieces = list[Piece]()
        self._marks = list[str]()
        self._reading = Reading(self._pieces, marks=self._marks)

    def read(self) -> Reading:
        """Read every part."""
        number = 0
        while number < len(self._parts):
            part = self._parts[number]
            if isinstance(part, Attached):  # a document, or a line in place of an image
                self._pieces.append(Piece(Writer.QUOTATION, part, "attachment"))
            elif placed(part) and all(isinstance(piece, Image) for piece in split(part)):
                self._pieces.append(Piece(Writer.OWNER, part, _IMAGE))
            elif last := self._spanned(number):
                block, end = last
                between = self._parts[number : end + 1]
                self._pieces += [Piece(Writer.HARNESS, text, block.what) for text in between]
                self._marks.append(block.mark("", 0).strip())
                number = end
            else:
                self._read_part(part)
            number += 1
        return self._reading

    def _spanned(self, number: int) -> tuple[Block, int] | None:
        """A block that begins with this part, and the later part that is its end mark."""
        part = self._parts[number]
        start = after_blanks(part, 0)
        for block in _LEADING.get(part[start : start + _KEY], ()):
            if block.spans and block.begins(part, start) and block.end(part, start) is None:
                ends = (n for n in range(number + 1, len(self._parts)))
                end = next((n for n in ends if self._parts[n].strip() == block.closes), None)
                return None if end is None else (block, end)
        return None

    def _read_part(self, part: str) -> None:
        """Read one part: frames, the words, and the blocks behind them."""
        reading, at, queued_at = self._reading, 0, None
        end = openclaw.runtime_at(part)
        body = part[:end]
        while at < len(body):
            piece = self._frame(body, at)
            if piece is None and not reading.stamped:  # OpenClaw's own messages have no other's
                piece = self._block(body, at)
            if piece is None:
                break
            if piece.what == openclaw.QUEUED:
                queued_at = at
            self._pieces.append(piece)
            at += len(piece.text)
        words, tail = (body[at:], None) if reading.stamped else self._trailing(body[at:])
        if queued_at is not None:
            reading.lead, reading.framed = body[:queued_at], body[at:].strip()
            again = openclaw.again_at(words)
            if again >= 0:
                words, tail = words[:again], Piece(Writer.HARNESS, words[again:], "retry")
            elif "\n\n" in words:  # what they sent before was asked already
                before, blank, words = words.partition("\n\n")
                self._pieces.append(Piece(Writer.QUOTATION, before + blank, "earlier message", ""))
        if words:
            writer = Writer.OWNER if words.strip() else Writer.HARNESS
            self._pieces.append(Piece(writer, words, "" if words.strip() else "blank"))
        if tail is not None:
            self._pieces.append(tail)
        if end < len(part):
            self._pieces.append(Piece(Writer.HARNESS, part[end:], "runtime"))

    def _frame(self, body: str, at: int) -> Piece | None:
        """The frame of OpenClaw's that begins here, after blanks."""
        reading, start = self._reading, after_blanks(body, at)
        for frame in openclaw.FRAMES:
            match = frame.form.match(body, start)
            if match is None or (frame.behind and not reading.stamped):
                continue
            if frame.name == openclaw.OWN_PROMPT and reading.sender is not None:
                continue  # nobody sends OpenClaw's own prompts
            reading.stamped |= frame.name in (openclaw.STAMP, openclaw.SENDER)
            text, data = body[at : match.end()], match.groupdict().get("json")
            if frame.name == openclaw.SENDER and data is not None:
                reading.sender = openclaw.one_sender(reading.sender, openclaw.sender_in(data))
            if frame.name == openclaw.OTHER:
                reading.doubt = body[start : match.end()].partition("\n")[0]
            quoted = openclaw.bodies(data or "") if frame.writer is Writer.QUOTATION else None
            return Piece(frame.writer, text, frame.name, quoted)
        return None

    def _block(self, body: str, at: int) -> Piece | None:
        """The block of a table that begins here, after blanks."""
        start = after_blanks(body, at)
        for block in _LEADING.get(body[start : start + _KEY], ()):
            end = block.end(body, start) if block.begins(body, start) else None
            if end is None:
                continue
            if block.wraps:
                self._marks.append(block.mark(body, start).rstrip(">"))
            return self._mark(block, body[at:end])
        return None

    def _trailing(self, words: str) -> tuple[str, Piece | None]:
        """The words, and the block that follows them."""
        for block in _TRAILING:
            if block.begins(words, at := words.find(block.opens)):
                at = 0 if block.summary else at  # it also describes the text before it
                return words[:at], self._mark(block, words[at:])
        return words, None

    def _mark(self, block: Block, text: str) -> Piece:
        """Return a block as a piece, and record what it says about the message."""
        reading = self._reading
        reading.asks = block.asks or reading.asks
        reading.summary |= block.summary
        reading.answered |= block.answered
        return Piece(Writer.HARNESS, text, block.what)


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
    readings = list[Reading]()
    for message in reversed(without_volatile(messages)):
        if message["role"] == "assistant" and readings:
            break
        if _asks(message):
            readings.append(read(message))
    return readings


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
    return next((message for message in users if read(message).words), None)


def asked_by(pieces: Sequence[Piece]) -> Writer:
    """Return the writer of the words in a message; the harness if there are none."""
    writers = {piece.writer for piece in pieces}
    people = (Writer.OWNER, Writer.MEMBER, Writer.UNKNOWN, Writer.QUOTATION)
    return next((writer for writer in people if writer in writers), Writer.HARNESS)


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
    return read(message).words.startswith(openclaw.NUDGES)


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
