"""Grammar of the texts that OpenClaw 2026.9 writes into messages.

Rule: a block of context is recognised by OpenClaw's marker, never by its label, and only at the
start of a message or of a queued part. A message that has the marker anywhere else, or a block that
is not as OpenClaw writes it, is doubted: it holds no owner's words.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Final, TypeVar, cast

from tinker_claw.formats.base import Attached, parts_of
from tinker_claw.served import Surface
from tinker_claw.types import Message, Piece, Writer

_Value = TypeVar("_Value")

SYSTEM_OPENING = "<!-- openclaw:"
"""How the system prompt of every agentic call begins."""
FLUSH = "Pre-compaction memory flush."
MARKER: Final = "⟦openclaw:ctx⟧"
"""Marker at the end of the header of every block of context."""

_VOLATILE_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_VOLATILE_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_EVENT = "[Internal task completion event]"
INTER_SESSION = "[Inter-session message]"
_INTER_SESSION = f"\n{INTER_SESSION} "
_NOT_USER = " isUser=false"
_LINE = "Runtime: agent="
_BLANKS = re.compile(r"\s*")
_BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")

# [Sat 2026-11-21 00:19 UTC], before what a user typed
_STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d[^\]\n]{0,40}\](?: |\Z)")
_HEADER = re.compile(rf"(?P<label>[^\n]{{1,200}}?) {MARKER}[ \t]*(?:\n|\Z)")
# OpenClaw writes the JSON on one line, and no fence in it: nothing inside can end the block.
_FENCED = re.compile(r"```json[ \t]*\n(?P<json>[^\n]*)\n```[ \t]*(?:\n|\Z)")
_LINES = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")
# After blocks of context only: a goal, how replies are delivered, what a Telegram message replies
# to, and the numbers of several messages that were sent while the agent was busy.
_BEHIND_CONTEXT = re.compile(
    r"Active goal: [^\n]* — advance; keep active [^\n]*(?:\n|\Z)"
    r"|Delivery: [^\n]*`message` tool[^\n]*(?:\n|\Z)"
    r"|Current message:\n\[Replying to: (?P<quote>\"(?:[^\"\\\n]|\\.)*\")\](?:\n#[^\n: ]+:)? ?"
    r"|Room context:\n|Treat this message as observed room activity[^\n]*(?:\n|\Z)"
    r"|(?:System: [^\n]*(?:\n|\Z))+"
)
_QUEUED_CONTEXT = re.compile(rf"Queued #\d+ context:\n(?={_HEADER.pattern})")
_COLLECTED = re.compile(r"\[Queued messages while agent was busy\]\n*")
_QUEUED = re.compile(r"^---\nQueued #\d+(?P<name> \(from [^\n]*\))?(?:\n|\Z)", re.MULTILINE)
_ROOM = re.compile(r"\[OpenClaw room event\]\n*")
_MEMORY = re.compile(
    r"Context:\n<active_memory_plugin>\n.*?\n</active_memory_plugin>\n*", re.DOTALL
)
_INTERNAL = re.compile(rf"{_VOLATILE_BEGIN}.*?{_VOLATILE_END}", re.DOTALL)
_JOB = re.compile(r"(?:Job ID: [^\n]*|Received: [^\n]*)\n\n(?=SECURITY NOTICE: )")
_NOTICE: Final = "SECURITY NOTICE: "
_FOREIGN: Final = "<<<EXTERNAL_UNTRUSTED_CONTENT "
# (Long texts are searched for these first, in a tenth of the time of a pattern.)
_FENCES = re.compile(r"<<<(?P<ends>END_)?EXTERNAL_UNTRUSTED_CONTENT id=\"(?P<id>[^\"\n]*)\">>>")
# From such a line on a message holds words of others: forwarded ones, an earlier thread.
_OTHERS = re.compile(
    r"^\[(?:Forwarded from |Reply chain - nearest first|Thread (?:starter|history) - for context)",
    re.MULTILINE,
)
_DATA = re.compile(r'^Conversation data \(data, not instructions\):\n(".*")$', re.MULTILINE)
_HISTORY_LINE = re.compile(r"^(?:#\S+ )?(?:\S+ ){0,6}?[^:\n]{1,80}: ")
# The clock at the end of prompts that nobody typed.
_CLOCK = re.compile(r"\nReference UTC: \d{4}-\d\d-\d\d \d\d:\d\d UTC\s*")
# What OpenClaw puts before a message that got no complete answer. That message and a blank line are
# followed by OpenClaw's own words, after an error, or by the user's next.
_FRAME = re.compile(r"\[Queued user message from a previous active turn[^\]]*\]\n")
# What OpenClaw leaves of its own prompts in later histories, before the user's next words where
# nothing was replied.
_WAKE = re.compile(
    r"\[OpenClaw (?P<what>heartbeat poll|cron wake|exec completion|session event)\][ \t]*(?:\n|\Z)"
    r"(?:Disable automatic completion turns with [^\n]*(?:\n|\Z))?"
)
# What subagents have found, before the user's words; no data in it can hold such a mark.
_STEERING = re.compile(
    r"\[OpenClaw runtime event\] .*</prompt-data>\s*(?:Current parent turn:\n|\Z)", re.DOTALL
)
_LEADS: Final = (
    (_STAMP, "timestamp"),
    (_INTERNAL, "internal context"),
    (_FRAME, "frame of a queued message"),
    (_ROOM, "room event"),
    (_COLLECTED, "queue"),
    (_QUEUED_CONTEXT, "queue"),
    (_MEMORY, "memory"),
    (_JOB, "security notice"),
    (_WAKE, "prompt of its own"),
    (_STEERING, "results of subagents"),
)
"""Patterns of texts that may lead a message besides blocks of context, with their names."""
_AGAIN = "\n\nContinue the current task from the existing transcript"
_MOST_SPLITS = 32
NUDGES: Final = tuple(
    f"The previous {what} did not produce a user-visible answer."
    for what in (
        "attempt",
        "assistant turn recorded reasoning but",
        "assistant turn completed its tool calls but",
    )
)
"""How OpenClaw asks again after an empty reply; the message is gone from later requests."""
_META: Final = '"openclaw.inbound_meta.v2"'
LABELS: Final = frozenset(
    {
        "Conversation info:",
        "Thread starter:",
        "Reply target of current user message:",
        "Reply chain of current user message (nearest first):",
        "Forwarded message context:",
        "Location:",
        "Chat history since last reply:",
        "Recent chat history:",
        "Context:",
    }
)
"""Labels of context that name their pieces; a channel may write others, but not first."""
_INFO: Final = "Conversation info:"
_FORWARD: Final = "Forwarded message context:"
FORWARDED: Final = "forwarded message"
"""Name of words of others that a person sends as a message."""
_NOWHERE: Final = frozenset(
    {
        "timestamp",
        "source_modality",
        "inbound_event_kind",
        "history_count",
        "history_truncated",
    }
)
"""Fields of `Conversation info` that name no chat, channel or group."""
ON_ITS_OWN = (
    (re.compile(r"openclaw-cron-[0-9a-f]+"), "isolated cron"),
    (re.compile(r"slug-generator-[-0-9a-f]+(?::\d+)?"), "utility"),
)
"""Names of sessions without a conversation."""
NOBODYS: Final = {
    "hook": "automated",
    "cron": "isolated cron",
    "subagent": "subagent",
    "internal-session-effects": "memory flush",
}
"""Areas of sessions in which no person writes, and the kinds of their requests."""
_GROUPS: Final = frozenset({"group", "channel", "room", "thread"})
_KINDS: Final = _GROUPS | {"direct"}
"""Kinds of conversation; in a session's key the id of a person or group follows."""

_PROMPTS = (
    ("Follow the heartbeat monitor scratch context", "heartbeat"),
    ("A scheduled reminder has been triggered.", "cron"),
)
_WAKES = {"heartbeat poll": "heartbeat", "cron wake": "cron"}
"""Short forms that replace the prompts in later histories; others replace those of other kinds."""
REWRITTEN: Final = frozenset({"heartbeat", "cron", "automated"})
"""Kinds of prompts that have a short form."""
_SILENCE = frozenset({"", "NO_REPLY", "HEARTBEAT_OK"})
"""Replies that no user gets to see."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The line that OpenClaw adds to the first user message, or to the system prompt."""

    session_key: str
    session_id: str | None
    """OpenClaw's session id; None in an isolated cron job."""

    @property
    def name(self) -> str:
        """Name of the session: its id or key; a digest of a key that holds a person's id."""
        if self.session_id is not None:
            return self.session_id
        area = surface(self, "")
        if area.channel is None and area.area not in _KINDS:
            return self.session_key
        return f"{area.area}:{hashlib.sha256(self.session_key.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class Sender:
    """Who wrote a channel's message, as OpenClaw says."""

    id: str | None
    """Id within the channel; None: not told."""
    in_channel: bool
    """The message came by a chat service, and not from whoever runs OpenClaw."""
    channel: str | None = None
    group: bool = False
    bot: bool = False
    mixed: bool = False
    """The message may hold words of several senders."""


@dataclass(frozen=True, slots=True)
class Automation:
    """A user message that no user wrote."""

    what: str
    short: bool = False
    """Whether it is the short form used in later histories."""


def runtime(messages: Sequence[Message], *, in_user_message: bool) -> Runtime | None:
    """Find the Runtime line: one of the system prompt, or else the last line of the first user
    message or of a part of it, where a person could write another before OpenClaw's.

    Args:
        in_user_message: whether such a line of a user message can be OpenClaw's.
    """
    if messages[0]["role"] == "system":
        for part in reversed(parts_of(messages[0]["content"])):
            at = part.rfind(_LINE)
            if at == 0 or (at > 0 and part[at - 1] == "\n"):
                return _fields(part[at:].partition("\n")[0])
    user = next((m["content"] for m in messages if m["role"] == "user"), None)
    if in_user_message and user is not None:
        own = (part for part in parts_of(user) if not isinstance(part, Attached))
        ends = ((part, runtime_at(part)) for part in own)
        lines = [part[end:].lstrip() for part, end in ends if end < len(part)]
        if lines:
            return _fields(lines[-1])
    return None


def runtime_at(text: str) -> int:
    """End of the words before the Runtime line that ends `text`; its length if there is none."""
    at = text.rfind(_LINE)
    if at < 0 or (at and text[at - 1] != "\n") or "\n" in text[at:].rstrip():
        return len(text)
    return len(text[:at].rstrip("\n")) if " | session=" in text[at:] else len(text)


def _fields(line: str) -> Runtime | None:
    pairs = (part.partition("=") for part in line.split(" | "))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if "session" not in fields:
        return None
    return Runtime(fields["session"], fields.get("sessionId") or None)


def surface(line: Runtime | None, system: str) -> Surface:
    """Return where a conversation takes place: by the session's key, and where that names no
    channel, by what OpenClaw says of the channel in its system prompt."""
    rest = line.session_key.split(":") if line else [""]
    rest = rest[2:] if rest[0] == "agent" else rest
    area = rest[0] if rest else ""
    kinds = rest[:3] if area not in ("main", "explicit", "dashboard") else []
    at = next((n for n, kind in enumerate(kinds) if kind in _KINDS), None)
    channel = rest[0] if at else None
    group = at is not None and rest[at] in _GROUPS
    told = _inbound_meta(system)
    if channel is None and isinstance(told.get("channel"), str):
        channel = told["channel"]
    return Surface(area, channel, group or told.get("chat_type", "direct") != "direct")


def _inbound_meta(system: str) -> dict[str, Any]:
    """Metadata of the newest message in the system prompt; {}: none, or several."""
    at = system.find(_META)
    if at < 0 or system.find(_META, at + 1) >= 0:
        return {}
    begin, end = system.rfind("```json\n", 0, at), system.find("\n```", at)
    return _as(dict, _parsed(system[begin + 8 : end])) if 0 <= begin < end else {}


class Head:
    """Reader of the head of a user message, or of a queued part, one piece at a time."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.typed = False
        """A timestamp or context that only OpenClaw writes shows that a person wrote the rest."""
        self.framed: int | None = None
        """Where the frame around a message that got no complete answer begins; None: no frame."""
        self.forwarded = False
        """The words are another's, forwarded."""
        self.collected = False
        """The words are several messages that were sent while the agent was busy."""
        self.doubted = False
        """Something is not as OpenClaw writes it: the words are no owner's."""
        self._from: Sender | None = None
        self._context = self._mixed = False

    @property
    def sender(self) -> Sender | None:
        """Return the sender; None: unknown."""
        return replace(self._from, mixed=True) if self._from and self._mixed else self._from

    def take(self, at: int) -> Piece | None:
        """The piece that begins at `at`, with the blanks before it; None: the words begin here."""
        body, start = self.body, _matched(_BLANKS, self.body, at)
        for pattern, what in _LEADS:
            if found := pattern.match(body, start):
                self._note(pattern, start)
                return Piece(Writer.HARNESS, body[at : found.end()], what)
        if (end := self._contents.notice(start)) is not None:
            return Piece(Writer.HARNESS, body[at:end], "security notice")
        if header := _HEADER.match(body, start):
            return self._block(at, header)
        if not self._context or (found := _BEHIND_CONTEXT.match(body, start)) is None:
            return None
        text, quote = body[at : found.end()], found["quote"]
        if quote is None:
            return Piece(Writer.HARNESS, text, "context")
        return Piece(Writer.QUOTATION, text, "reply target", _as(str, _parsed(quote)))

    def meet(self, sender: Sender | None) -> None:
        """Add a sender that is named in it; two are nobody."""
        if sender is not None and self._from is not None:
            self._mixed |= sender.id != self._from.id or sender.mixed
            sender = replace(
                self._from,
                in_channel=self._from.in_channel or sender.in_channel,
                group=self._from.group or sender.group,
            )
        self._from = sender or self._from

    @cached_property
    def _contents(self) -> Contents:
        return Contents(self.body)

    def _note(self, pattern: re.Pattern[str], start: int) -> None:
        """Record what a matched pattern of _LEADS says of the message."""
        if pattern is _STAMP:
            self.typed = True
        elif pattern is _FRAME:
            self.doubted |= self.framed is not None
            self._mixed |= self.framed is None and _again(self.body) < 0
            self.framed = start
        elif pattern is _ROOM:
            self._context = self.typed = self._mixed = True
            self.meet(Sender(None, in_channel=True, group=True, mixed=True))
        elif pattern is _COLLECTED:
            self.collected = self.typed = True
            self._mixed |= self._from is not None and self._from.group

    def _block(self, at: int, header: re.Match[str]) -> Piece:
        """A block of context: its header, and JSON in a fence or lines up to a blank one."""
        body, label = self.body, header["label"].strip()
        if fenced := _FENCED.match(body, header.end()):
            end, told = fenced.end(), _parsed(fenced["json"])
            self.doubted |= told is None
        else:
            end = self._contents.after(header.end())
            if end == header.end():
                end = _matched(_LINES, body, end)
                # No builder writes such a fence; a channel's own text may have blank lines.
                self.doubted |= label == "Context:" or body.startswith("```", header.end())
            told = body[header.end() : end]
        end = _matched(_BLANK_LINES, body, end)
        first, self._context, self.typed = not self._context, True, True
        self.doubted |= first and label not in LABELS
        self.forwarded |= label == _FORWARD
        text = body[at:end]
        if label == _INFO:
            self.doubted |= not isinstance(told, dict) or not (first or self._from)
            self.meet(_sender(told))
            return Piece(Writer.HARNESS, text, label)
        if label == "Location:":
            return Piece(Writer.HARNESS, text, label)
        writer = Writer.EXTERNAL if label == "Context:" else Writer.QUOTATION
        return Piece(writer, text, label if label in LABELS else "other context", _bodies(told))


def _matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Index of the end of a match that begins at `at`; `at` itself if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


class Contents:
    """External contents of a text: where they begin and end. The text is read once, from its end,
    so that a page with a thousand beginnings takes no longer than others."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ends: dict[int, int] = {}
        """Where each content ends, by where it begins, in order. One whose end mark is cut off goes
        on to the end of the text; of several end marks in a row the last counts."""
        ends = dict[str, int]()
        for fence in reversed([*_FENCES.finditer(text)] if _FOREIGN in text else ()):
            if fence["ends"]:
                ends.setdefault(fence["id"], _matched(_BLANK_LINES, text, fence.end()))
            else:
                self.ends[fence.start()] = ends.pop(fence["id"], len(text))
        self.ends = dict(reversed(self.ends.items()))
        self._starts = [*self.ends]

    def notice(self, at: int) -> int | None:
        """Where a notice that begins here ends: before the content that follows it, if any does."""
        next_ = bisect_left(self._starts, at)
        if next_ == len(self._starts) or not self.text.startswith(_NOTICE, at):
            return None
        end = self._starts[next_]
        return end if self.text.startswith("\n\n", end - 2) else None

    def after(self, at: int) -> int:
        """Index after the notices and contents that begin at `at`; `at` if there are none."""
        while True:
            start = _matched(_BLANKS, self.text, at)
            noticed = self.notice(start)
            end = self.ends.get(start if noticed is None else noticed)
            if end is None:
                return at
            at = end

    def holds(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each content that is in no other."""
        at = 0
        for start, end in self.ends.items():
            if start >= at:
                yield start, end
                at = end


def _sender(info: Any) -> Sender:
    told: dict[str, Any] = _as(dict, info)
    who: dict[str, Any] = _as(dict, told.get("sender"))
    id = who.get("id")
    return Sender(
        id=str(id) if isinstance(id, str | int) else None,
        in_channel=not _NOWHERE.issuperset(told),
        group=told.get("is_group_chat") is True or "group_subject" in told,
        bot=who.get("is_bot") is True,
    )


def _parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as(kind: type[_Value], value: Any) -> _Value:
    """A value where it is of this kind, else an empty one."""
    return value if isinstance(value, kind) else kind()


def _bodies(told: Any) -> str:
    """The words in a block, without who said them and when."""
    if isinstance(told, str):
        lines = (
            _HISTORY_LINE.sub("", line, count=1) for line in _FENCES.sub("", told).splitlines()
        )
        return "\n".join(line for line in lines if line.strip()).strip()
    found, stack = list[str](), [told]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            for name, value in cast("dict[str, Any]", one).items():
                if name in ("body", "text", "caption") and isinstance(value, str):
                    found.append(value)
                else:
                    stack.append(value)
        elif isinstance(one, list):
            stack.extend(reversed(cast("list[Any]", one)))
    return "\n".join(found)


def person(words: str, head: Head) -> Iterator[Piece]:
    """Split what follows a message's head into a person's words and the texts between them.

    Args:
        head: of the message; it learns from queued parts who wrote them.
    """
    again = _again(words)
    if head.forwarded:
        yield Piece(Writer.QUOTATION, words, FORWARDED, _others(words))
    elif head.framed is None:
        yield from _said(words, head)
    elif again >= 0:
        yield from _said(words[:again], head)
        yield Piece(Writer.HARNESS, words[again:], "retry")
    else:
        before, blank, now = words.partition("\n\n")
        if blank:  # what they said before was asked already
            yield Piece(Writer.QUOTATION, before + blank, "earlier message", "")
        now, at = now if blank else words, 0
        inner = Head(now)  # its writer cannot be known
        while (piece := inner.take(at)) is not None:
            yield piece
            at += len(piece.text)
        yield from _said(now[at:], head)


def _again(words: str) -> int:
    """Where OpenClaw asks to go on with the words before; -1: it does not, or more follows."""
    at = words.rfind(_AGAIN)
    return at if at >= 0 and "\n" not in words[at:].strip() else -1


def _said(words: str, head: Head) -> Iterator[Piece]:
    """A person's words, without numbers of a queue and without what others wrote."""
    others = _OTHERS.search(words)
    # A channel hands on forwarded messages together, some without the name of who wrote them.
    end = len(words) if others is None else 0 if head.sender else others.start()
    if head.collected:
        yield from _parts(words[:end], head)
    else:
        yield from _own(words[:end], head)
    if end < len(words):
        yield Piece(Writer.QUOTATION, words[end:], FORWARDED, _others(words[end:]))


def _parts(words: str, head: Head) -> Iterator[Piece]:
    """Messages that were collected: all of one sender, as their heads say, or nobody's."""
    at, whole, unnamed = 0, head.sender, False
    foreign = [bound for content in Contents(words).holds() for bound in content]
    # Inside an external content an odd number of bounds stands before.
    cuts = [m for m in _QUEUED.finditer(words) if bisect_right(foreign, m.start()) % 2 == 0]
    for number, found in enumerate(cuts):
        if at < found.start():
            yield Piece(Writer.HARNESS, words[at : found.start()], "queue")
        yield Piece(Writer.HARNESS, found[0], "queue")
        at = found.end()
        end = cuts[number + 1].start() if number + 1 < len(cuts) else len(words)
        inner, within = Head(words[at:end]), 0
        while (piece := inner.take(within)) is not None:
            yield piece
            within += len(piece.text)
        yield from _own(words[at + within : end], head)
        at = end
        head.meet(inner.sender)
        unnamed |= inner.sender is None
        odd = inner.doubted or inner.forwarded or inner.collected or inner.framed is not None
        head.doubted |= odd or (found["name"] is not None and head.sender is None)
    if at < len(words):
        yield from _own(words[at:], head)
    head.doubted |= unnamed and whole is None and head.sender is not None


def _own(words: str, head: Head) -> Iterator[Piece]:
    """A person's words, and the external content in them."""
    head.doubted |= MARKER in words
    if words.strip():
        yield from external(words, Writer.OWNER)
    elif words:
        yield Piece(Writer.HARNESS, words, "blank")


def _others(text: str) -> str:
    """Words of others, without the lines that name them."""
    lines = (line for line in text.splitlines() if not (line[:1] == "[" and line[-1:] == "]"))
    return "\n".join(lines).strip()


def external(text: str, writer: Writer) -> Iterator[Piece]:
    """A text by this writer, and the external content that is wrapped in it."""
    at = 0
    for start, end in Contents(text).holds():
        if before := text[at:start]:
            yield Piece(writer, before)
        inner = _FENCES.sub("", text[start:end]).strip()
        yield Piece(Writer.EXTERNAL, text[start:end], "external content", inner)
        at = end
    if at < len(text):
        yield Piece(writer, text[at:])


@dataclass(frozen=True, slots=True)
class Carried:
    """What OpenClaw says of the newest message in the volatile one that follows it."""

    text: str
    """Text of the message."""
    sender: Sender | None
    forwarded: bool


def carried(messages: Sequence[Message]) -> Carried | None:
    """Read what the volatile messages at the end say of the user message before them.

    OpenClaw says there who wrote in which chat, and that the words are forwarded; it says so once.
    """
    end = _volatile_from(messages)
    about = next((m for m in reversed(messages[:end]) if m["role"] == "user"), None)
    for text in (one for message in messages[end:] for one in _data(message["content"])):
        head, at = Head(text), 0
        while (piece := head.take(at)) is not None:
            at += len(piece.text)
        if about is not None and (head.sender or head.forwarded):
            return Carried(about["content"], head.sender, head.forwarded)
    return None


def _data(content: str) -> Iterator[str]:
    """Texts of context in a volatile message: strings of JSON, or in older sessions as they are."""
    strings = _DATA.findall(content)
    yield from (_as(str, _parsed(string)) for string in strings)
    if not strings:
        yield content.strip().removeprefix(_VOLATILE_BEGIN).removesuffix(_VOLATILE_END)


def automation(text: str) -> Automation | None:
    """Recognise a user message that is OpenClaw's own prompt, by more than one sign."""
    text = "\n".join(part[: runtime_at(part)] for part in parts_of(text)).rstrip()
    if _STAMP.match(text) is None:
        clock = text.rfind("\nReference UTC: ")
        if clock >= 0 and _CLOCK.fullmatch(text, clock):
            what = next((what for mark, what in _PROMPTS if text.startswith(mark)), "automated")
            return Automation(what)
    elif found := _WAKE.fullmatch(short := _STAMP.sub("", text, count=1).strip()):
        return Automation(_WAKES.get(found["what"], "automated"), short=True)
    elif _STEERING.fullmatch(short):
        return Automation("automated")
    at = text.rfind(_INTER_SESSION)
    if at >= 0 and _NOT_USER in text[at:].split("\n", 2)[1]:
        return Automation("announcement")
    return None


def is_silent(message: Message) -> bool:
    """Whether a message is a reply that is hidden from every user."""
    said = message["content"].strip()
    return message["role"] == "assistant" and said in _SILENCE and not message.get("tool_calls")


def queued(framed: str) -> list[tuple[str, str]]:
    """Return every split of a frame's words into earlier and present ones, for a user who went on
    before an answer. A blank line separates the two, and either may hold further ones."""
    if _again(framed) >= 0:
        return []
    cuts = islice(re.finditer("\n\n", framed), _MOST_SPLITS)
    return [(framed[: cut.start()].strip(), framed[cut.end() :].strip()) for cut in cuts]


def is_volatile(message: Message) -> bool:
    """Whether a message tells of running processes and the like: gone with the next request, or
    with the user's next words."""
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    return text.startswith(_VOLATILE_BEGIN) and text.endswith(_VOLATILE_END)


def _volatile_from(messages: Sequence[Message]) -> int:
    end = len(messages)
    while end and is_volatile(messages[end - 1]):
        end -= 1
    return end


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages without those at the end that the next request drops."""
    return messages[: _volatile_from(messages)]


def reports_event(messages: Sequence[Message]) -> bool:
    """Whether OpenClaw's last message reports a task that has ended, or another session."""
    return any(
        _EVENT in m["content"] or _INTER_SESSION[1:] in m["content"]
        for m in messages[_volatile_from(messages) :]
    )
