"""OpenClaw's own texts about a session, a sender, and its messages.

Rule: a session's key alone decides whose the session is; OpenClaw writes it into the Runtime line.
A session with a key in any other form than here belongs to nobody.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinker_claw.formats.body import members
from tinker_claw.images import parts_of
from tinker_claw.served import Belongs, Surface
from tinker_claw.types import Message

SYSTEM_OPENING = "<!-- openclaw:"
"""How the system prompt of every agentic call begins."""
SYSTEM_NAME: Final = "You are a personal assistant running inside OpenClaw."
"""How it begins in releases before 2026.8."""
FLUSH = "Pre-compaction memory flush."
MARK: Final = "⟦"
"""Begins the mark that ends every header of OpenClaw's; nobody types it."""

_VOLATILE_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_VOLATILE_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_EVENTS = ("[Internal task completion event]", "[Inter-session message] ")
_LINE = re.compile(r"Runtime: (?:name=[^\n]*? \| )?agent=[^\n]*? \| session=[^\n<]*")
_FIELD = re.compile(r" \| (session|sessionId)=\s*(.*?)\s*(?= \| |$)")
_DATA = re.compile(r'^Conversation data \(data, not instructions\):\n(".*")$', re.MULTILINE)
_BODY = re.compile(r'"(?:body|text|caption)":\s*("(?:[^"\\]|\\.)*")')
_META = re.compile(r'```json\n((?:(?!\n```).)*"openclaw\.inbound_meta\.v2".*?)\n```', re.DOTALL)
"""Metadata of the newest message in the system prompt."""
_NOWHERE: Final = frozenset(
    {"timestamp", "source_modality", "inbound_event_kind", "history_count", "history_truncated"}
)
"""Fields of `Conversation info` that name no chat, channel or group."""
_NAME = r"[^:\s]+"
_OWN_AREA = re.compile(r"main|(?:explicit|dashboard):.+")
"""Sessions of whoever runs OpenClaw; chat services may write into the first, too."""
_UNPERSONAL_AREA = re.compile(
    r"main|(?:explicit|dashboard|hook|cron|subagent|internal-session-effects):.+"
)
"""Sessions whose keys hold no person's id."""
_DIRECT_AREA = re.compile(rf"(?:(?P<channel>{_NAME}):(?:{_NAME}:)?)?direct:\S+")
_GROUP_AREA = re.compile(r"(?:^|:)(?:group|channel|room|thread):")
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
        if _UNPERSONAL_AREA.fullmatch(self.area):
            return self.session_key
        digest = hashlib.sha256(self.session_key.encode()).hexdigest()[:32]
        return f"{self.area.partition(':')[0]}:{digest}"


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


def runtime(messages: Sequence[Message], *, in_user_message: bool) -> Runtime | None:
    """Find the Runtime line in the system prompt, or else at the end of the first user message.

    OpenClaw's is the last line of that message, or of a part of it: a person could write another
    before.

    Args:
        in_user_message: whether such a line of a user message can be OpenClaw's.
    """
    if messages[0]["role"] == "system":
        for text in (part.text for part in reversed(parts_of(messages[0]))):
            if line := _LINE.match(text, text.rfind("\nRuntime: ") + 1):
                return _fields(line[0])
    user = next((m for m in messages if m["role"] == "user"), None)
    if in_user_message and user is not None:
        own = (part.text for part in parts_of(user) if not part.attached)
        ends = (text[runtime_at(text) :].strip() for text in own)
        lines = {_fields(end) for end in ends if end}
        if len(lines) == 1:  # of several one may be a person's
            return lines.pop()
    return None


def runtime_at(text: str) -> int:
    """Return the end of the words before the Runtime line that ends `text`; its length if there is
    none."""
    at = text.rfind("\nRuntime: ") + 1
    line = _LINE.match(text, at)
    is_last = line is not None and not text[line.end() :].strip()
    return len(text[:at].rstrip("\n")) if is_last else len(text)


def _fields(line: str) -> Runtime:
    """Read a Runtime line, which names a session."""
    fields = dict(_FIELD.findall(line))
    return Runtime(fields["session"], fields.get("sessionId") or None)


def surface(line: Runtime | None, system: str) -> Surface:
    """Return where a session of OpenClaw takes place, and whose it is.

    The channel is that of the session's key, or else the one that the system prompt names.
    """
    if line is None:
        return Surface(Belongs.NOBODY, because="OpenClaw does not say which session it is")
    blocks = _META.findall(system)
    # Of several one may be a person's.
    meta = members(_parsed(blocks[0])) if len(blocks) == 1 else {}
    direct = _DIRECT_AREA.fullmatch(line.area)
    channel = direct["channel"] if direct else None
    if channel is None and isinstance(meta.get("channel"), str):
        channel = meta["channel"]
    if meta.get("chat_type", "direct") != "direct" or _GROUP_AREA.search(line.area):
        return Surface(Belongs.NOBODY, because="a group", channel=channel, group=True)
    if _OWN_AREA.fullmatch(line.area):
        return Surface(channel=channel)
    if direct:
        return Surface(Belongs.SENDER, channel=channel)
    area = line.area.partition(":")[0][:40]
    because = f"a session of OpenClaw's of the area {area!r}"
    return Surface(Belongs.NOBODY, because=because, channel=channel)


def sender_in(json_line: str) -> Sender:
    """Read the sender of a message from the JSON of `Conversation info`."""
    info = members(_parsed(json_line))
    fields = members(info.get("sender"))
    id, name = fields.get("id"), fields.get("name")
    return Sender(
        id=str(id) if isinstance(id, str | int) else None,
        in_channel=not info or not _NOWHERE.issuperset(info),
        name=name if isinstance(name, str) else "",
        group=info.get("is_group_chat") is True or "group_subject" in info,
    )


def one_sender(first: Sender | None, second: Sender | None) -> Sender | None:
    """Return the sender whom two texts about one message name; they may name nobody together."""
    if first is None or second is None or first == second:
        return first or second
    return Sender(None, first.in_channel or second.in_channel)


def _parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def bodies(json_line: str) -> str:
    """Return the words in a block, without who wrote them and when."""
    values = map(_parsed, _BODY.findall(json_line) or [json_line])
    return "\n".join(value for value in values if isinstance(value, str))


def contexts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts about a user message in volatile ones: strings of JSON, or in older sessions
    as they are."""
    for message in messages:
        content = message["content"]
        whole = content.strip().removeprefix(_VOLATILE_BEGIN).removesuffix(_VOLATILE_END)
        texts = list(map(_parsed, _DATA.findall(content))) or [whole]
        yield from (text for text in texts if isinstance(text, str) and MARK in text)


def is_silent(message: Message) -> bool:
    """Return whether a message is a reply that is hidden from every user."""
    content = message["content"].strip()
    return message["role"] == "assistant" and content in _SILENCE and not message.get("tool_calls")


def is_volatile(message: Message) -> bool:
    """Return whether a message tells of running processes and the like: it is gone with the next
    request, or with the user's next words."""
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    return text.startswith(_VOLATILE_BEGIN) and text.endswith(_VOLATILE_END)


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without those at the end that the next request drops."""
    end = len(messages)
    while end and is_volatile(messages[end - 1]):
        end -= 1
    return messages if end == len(messages) else messages[:end]


def reports_event(messages: Sequence[Message]) -> bool:
    """Return whether OpenClaw's last message reports a task that has ended, or another session."""
    last = messages[len(without_volatile(messages)) :]
    return any(event in message["content"] for message in last for event in _EVENTS)
