"""Texts that OpenClaw writes into messages, and whose its sessions are.

Rule: whose a session is, its key says, which OpenClaw writes into the Runtime line, and nothing
else does. A key or a frame that is not exactly as here belongs to nobody.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from tinker_claw.formats.base import Attached, parts_of
from tinker_claw.served import Belongs, Surface
from tinker_claw.types import Message, Writer

SYSTEM_OPENING = "<!-- openclaw:"
"""How the system prompt of every agentic call begins."""
SYSTEM_NAME: Final = "You are a personal assistant running inside OpenClaw."
"""How it begins in releases before 2026.8."""
FLUSH = "Pre-compaction memory flush."
MARK: Final = "⟦"
"""Begins the mark that ends every header of OpenClaw's; nobody types it."""

_MARKER = "⟦openclaw:ctx⟧"
_VOLATILE_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_VOLATILE_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_EVENT = "[Internal task completion event]"
_INTER_SESSION = "\n[Inter-session message] "
_NOT_USER = " isUser=false"
_LINE = "Runtime: "
_LINE_BEGINS = re.compile(r"Runtime: (?:name=[^\n]*? \| )?agent=")


class Frame(NamedTuple):
    """A text that OpenClaw writes before a person's words."""

    name: str
    form: re.Pattern[str]
    writer: Writer = Writer.HARNESS
    behind: bool = False
    """It stands only behind a stamp or a block."""


def _block(label: str) -> re.Pattern[str]:
    """A header and a line of JSON in a fence: nothing inside can end it."""
    fence = r"```json[ \t]*\n(?P<json>[^\n]*)\n```[ \t]*(?:\n|\Z)"
    return re.compile(rf"{label} {_MARKER}[ \t]*\n{fence}(?:[ \t]*\n)*")


STAMP: Final = "timestamp"
SENDER: Final = "Conversation info:"
QUEUED: Final = "frame of a queued message"
OWN_PROMPT: Final = "prompt of its own"
OTHER: Final = "other context"
"""A block of another label, behind which nobody can say whose the words are."""
# [Sat 2026-11-21 00:19 UTC], before what a user typed
_STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d[^\]\n]{0,40}\](?: |\Z)")
_REPLY = re.compile(
    r"Current message:\n\[Replying to: (?P<json>\"(?:[^\"\\\n]|\\.)*\")\](?:\n#[^\n: ]+:)? ?"
)
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
FRAMES: Final = (
    Frame(STAMP, _STAMP),
    Frame(SENDER, _block(SENDER)),
    Frame("Location:", _block("Location:")),
    Frame("Thread starter:", _block("Thread starter:"), Writer.QUOTATION, behind=True),
    Frame(
        "Reply target of current user message:",
        _block("Reply target of current user message:"),
        Writer.QUOTATION,
        behind=True,
    ),
    Frame(
        "Reply chain of current user message (nearest first):",
        _block(r"Reply chain of current user message \(nearest first\):"),
        Writer.QUOTATION,
        behind=True,
    ),
    Frame("reply target", _REPLY, Writer.QUOTATION, behind=True),
    Frame("internal context", re.compile(rf"{_VOLATILE_BEGIN}.*?{_VOLATILE_END}", re.DOTALL)),
    Frame(
        "goal",
        re.compile(r"Active goal: [^\n]* — advance; keep active [^\n]*(?:\n|\Z)"),
        behind=True,
    ),
    Frame("delivery", re.compile(r"Delivery: [^\n]*`message` tool[^\n]*(?:\n|\Z)"), behind=True),
    Frame("system events", re.compile(r"(?:System: [^\n]*(?:\n|\Z))+"), behind=True),
    Frame(
        OTHER,
        re.compile(
            rf"[^\n]{{1,200}}? {_MARKER}[ \t]*\n"
            r"(?:```json[ \t]*\n[^\n]*\n```[ \t]*(?:\n|\Z)|(?:[^\n]*\S[^\n]*(?:\n|\Z))+)"
        ),
        Writer.QUOTATION,
    ),
    Frame(OWN_PROMPT, _WAKE),
    Frame("results of subagents", _STEERING),
    Frame(QUEUED, re.compile(r"\[Queued user message from a previous active turn[^\]]*\]\n")),
)
# The clock at the end of prompts that nobody typed.
_CLOCK = re.compile(r"\nReference UTC: \d{4}-\d\d-\d\d \d\d:\d\d UTC\s*")
_AGAIN = "\n\nContinue the current task from the existing transcript"
_DATA = re.compile(r'^Conversation data \(data, not instructions\):\n(".*")$', re.MULTILINE)
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
_NOWHERE: Final = frozenset(
    {"timestamp", "source_modality", "inbound_event_kind", "history_count", "history_truncated"}
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
_NAME = r"[^:\s]+"
_OWN_AREA = re.compile(r"main|(?:explicit|dashboard):.+")
"""Sessions of whoever runs OpenClaw; chat services may write into the first, too."""
_DIRECT_AREA = re.compile(rf"(?:(?P<channel>{_NAME}):(?:{_NAME}:)?)?direct:\S+")
_GROUP_AREA = re.compile(r"(?:^|:)(?:group|channel|room|thread):")

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
    def area(self) -> str:
        """The session's key without the agent: main, explicit:x, telegram:direct:1 …"""
        kind, _, rest = self.session_key.partition(":")
        return rest.partition(":")[2] if kind == "agent" else self.session_key

    @property
    def name(self) -> str:
        """Name of the session: its id or key; a digest of a key that may hold a person's id."""
        if self.session_id is not None:
            return self.session_id
        area = self.area.partition(":")[0]
        if _OWN_AREA.fullmatch(self.area) or area in NOBODYS:
            return self.session_key
        return f"{area}:{hashlib.sha256(self.session_key.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class Sender:
    """Who wrote a channel's message, as OpenClaw says."""

    id: str | None
    """Id within the channel; None: OpenClaw names none."""
    in_channel: bool
    """The message came by a chat service, and not from whoever runs OpenClaw."""
    name: str = ""
    channel: str | None = None
    group: bool = False
    bot: bool = False


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
            begins = _LINE_BEGINS.match(part, max(at, 0))
            if begins and (at == 0 or part[at - 1] == "\n"):
                return _fields(part[at:].partition("\n")[0])
    user = next((m["content"] for m in messages if m["role"] == "user"), None)
    if in_user_message and user is not None:
        own = (part for part in parts_of(user) if not isinstance(part, Attached))
        ends = ((part, runtime_at(part)) for part in own)
        lines = {_fields(part[end:].lstrip()) for part, end in ends if end < len(part)}
        if len(lines) == 1:  # of several one may be a person's
            return lines.pop()
    return None


def runtime_at(text: str) -> int:
    """End of the words before the Runtime line that ends `text`; its length if there is none."""
    at = text.rfind(_LINE)
    if at < 0 or (at and text[at - 1] != "\n") or "\n" in text[at:].rstrip():
        return len(text)
    if not _LINE_BEGINS.match(text, at):
        return len(text)
    return len(text[:at].rstrip("\n")) if " | session=" in text[at:] else len(text)


def _fields(line: str) -> Runtime | None:
    pairs = (part.partition("=") for part in line.split(" | "))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if "session" not in fields:
        return None
    return Runtime(fields["session"], fields.get("sessionId") or None)


def surface(line: Runtime | None, system: str) -> Surface:
    """Return where a session of OpenClaw takes place, and whose it is.

    The channel is that of the session's key, or else the one that the system prompt names.
    """
    if line is None:
        return Surface(Belongs.NOBODY, because="OpenClaw does not say which session it is")
    meta = _inbound_meta(system)
    group = meta.get("chat_type", "direct") != "direct" or bool(_GROUP_AREA.search(line.area))
    direct = _DIRECT_AREA.fullmatch(line.area)
    channel = direct["channel"] if direct else None
    if channel is None and isinstance(meta.get("channel"), str):
        channel = cast("str", meta["channel"])
    area = line.area.partition(":")[0]
    if group:
        belongs, because = Belongs.NOBODY, "a group"
    elif _OWN_AREA.fullmatch(line.area):
        belongs, because = Belongs.OWNER, ""
    elif direct:
        belongs, because = Belongs.SENDER, ""
    else:
        belongs, because = Belongs.NOBODY, f"a session of OpenClaw's of the area {area[:40]!r}"
    return Surface(belongs, because=because, channel=channel, group=group)


def _inbound_meta(system: str) -> Mapping[str, Any]:
    """Metadata of the newest message in the system prompt; {}: none, or several."""
    at = system.find(_META)
    if at < 0 or system.find(_META, at + 1) >= 0:
        return {}
    begin, end = system.rfind("```json\n", 0, at), system.find("\n```", at)
    return _object(system[begin + 8 : end]) if 0 <= begin < end else {}


def sender_in(json_line: str) -> Sender:
    """Read the sender of a message from the JSON of `Conversation info`."""
    info = _object(json_line)
    who = info.get("sender")
    named: Mapping[str, Any] = cast("Mapping[str, Any]", who) if isinstance(who, dict) else {}
    id, name = named.get("id"), named.get("name")
    return Sender(
        id=str(id) if isinstance(id, str | int) else None,
        in_channel=not info or not _NOWHERE.issuperset(info),
        name=name if isinstance(name, str) else "",
        group=info.get("is_group_chat") is True or "group_subject" in info,
        bot=named.get("is_bot") is True,
    )


def one_sender(first: Sender | None, second: Sender | None) -> Sender | None:
    """Return the sender whom two texts about one message name; they may name nobody together."""
    if first is None or second is None:
        return first or second
    return replace(
        first,
        id=first.id if first.id == second.id else None,
        in_channel=first.in_channel or second.in_channel,
        group=first.group or second.group,
        bot=first.bot or second.bot,
    )


def _parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: str) -> Mapping[str, Any]:
    """Parse a JSON object; an empty one if it is none."""
    value = _parsed(text)
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def bodies(json_line: str) -> str:
    """Return the words in a block, without who wrote them and when."""
    texts, stack = list[str](), [_parsed(json_line)]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for name, inner in cast("dict[str, Any]", value).items():
                if name in ("body", "text", "caption") and isinstance(inner, str):
                    texts.append(inner)
                else:
                    stack.append(inner)
        elif isinstance(value, list):
            stack.extend(reversed(cast("list[Any]", value)))
        elif isinstance(value, str) and not texts:
            texts.append(value)
    return "\n".join(texts)


def again_at(words: str) -> int:
    """Where OpenClaw asks to go on with the words before; -1: it does not, or more follows."""
    at = words.rfind(_AGAIN)
    return at if at >= 0 and "\n" not in words[at:].strip() else -1


@dataclass(frozen=True, slots=True)
class Carried:
    """What OpenClaw says of the newest message in the volatile one that follows it."""

    text: str
    """Text of the message."""
    sender: Sender | None
    odd: bool
    """It says more than who wrote it: that the words are forwarded, say."""


def carried(messages: Sequence[Message]) -> Carried | None:
    """Read what the volatile messages at the end say of the user message before them.

    OpenClaw says there who wrote in which chat, and that the words are forwarded; it says so once.
    """
    end = _volatile_from(messages)
    about = next((m for m in reversed(messages[:end]) if m["role"] == "user"), None)
    texts = [text for message in messages[end:] for text in _data(message["content"])]
    if about is None or not any(MARK in text for text in texts):
        return None
    sender, odd = None, False
    for text in (text for text in texts if MARK in text):
        rest = text
        while frame := next(((f, m) for f in FRAMES if (m := f.form.match(rest.lstrip()))), None):
            if frame[0].name == SENDER:
                sender = one_sender(sender, sender_in(frame[1]["json"]))
            odd |= frame[0].name == OTHER
            rest = rest.lstrip()[frame[1].end() :]
        odd |= MARK in rest
    return Carried(about["content"], sender, odd)


def _data(content: str) -> Iterator[str]:
    """Texts of context in a volatile message: strings of JSON, or in older sessions as they are."""
    strings = _DATA.findall(content)
    yield from (text for string in strings if isinstance(text := _parsed(string), str))
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
    if again_at(framed) >= 0:
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
