"""`/always be brief`: hold a wish in later sessions, by a message to the agent.

Rule: only an owner's own words are a command. The model sees none of it: it is cut out of what is
asked, and out of the history with the gateway's answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_claw.conversation.attribution import (
    Attribute,
    asked_by,
    newest_message_with_words,
    read,
)
from tinker_claw.errors import UndoError
from tinker_claw.formats.parts import with_parts
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.prompt import new_messages
from tinker_claw.images import parts_of
from tinker_claw.ledger.lessons import NOT_TOLD
from tinker_claw.types import Message, Writer, cached

_COMMAND = re.compile(r"/always(?:[ \t]*:?[ \t]+(?P<wish>[^\n]*))?(?:\n|\Z)", re.IGNORECASE)
_OURS = "Lessons:"
"""How each answer of the gateway begins."""
PRIVATE = f"{_OURS} this session is private, so nothing of it is kept. The page takes lessons, too."
OFF = f"{_OURS} they are off here. Start without --lessons off to hold one."
_NONE = f"{_OURS} none yet. `/always be brief` adds one."


@dataclass(frozen=True, slots=True)
class Always:
    """A command."""

    line: str
    """The line as it was typed."""
    wish: str
    """What later sessions are to be told; "": the lessons are to be listed."""
    alone: bool
    """Whether the message asks nothing else, so that the gateway answers it."""


def take_out(
    messages: Sequence[Message], writers_of: Attribute
) -> tuple[Sequence[Message], Always | None]:
    """Return the messages without commands, and the newest one's command.

    A message that is nothing else goes, with its answer; the newest stays, to be answered.

    Args:
        writers_of: gives every piece of a message its writer.
    """
    commands = [_command(m, writers_of) for m in messages]
    if not any(commands):
        return messages, None
    newest = newest_message_with_words(messages)
    new = newest if any(m is newest for m in new_messages(messages)) else None
    kept, before = list[Message](), None
    for message, command in zip(messages, commands, strict=True):
        if command is not None and not command.alone:
            kept.append(_without_line(message, command.line))
        elif message is new or not (command or (before and before.alone and _is_ours(message))):
            kept.append(message)
        before = command
    return kept, _command(new, writers_of) if new else None


def _command(message: Message, writers_of: Attribute) -> Always | None:
    """Return the command with which an owner's words begin."""
    command = cached(_typed_command, message) if message["role"] == "user" else None
    return command if command and asked_by(writers_of(message)) is Writer.OWNER else None


def _typed_command(message: Message) -> Always | None:
    """Return the command with which a message begins, by any writer; cached on it."""
    if "/always" not in message["content"].lower():
        return None
    words = read(message).words
    line = _COMMAND.match(words)
    return line and Always(line[0], (line["wish"] or "").strip(), not words[line.end() :].strip())


def _is_ours(message: Message) -> bool:
    """Return whether a message is an answer of the gateway."""
    return message["role"] == "assistant" and message["content"].startswith(_OURS)


def _without_line(message: Message, line: str) -> Message:
    parts = list(parts_of(message))
    at = next((n for n, part in enumerate(parts) if line.strip() in part.text), None)
    if at is not None:
        text = parts[at].text
        rest = text.replace(line if line in text else line.strip(), "", 1)
        parts[at] = replace(parts[at], text=rest)
    return with_parts(message, parts)


async def hold(deps: GatewayDeps, user: str, session_id: int, command: Always) -> str:
    """Hold the wish of a command; return the answer to it."""
    lessons = deps.ledger.lessons
    if deps.lessons is None:
        return OFF
    if not command.wish:
        active = [lesson for lesson in lessons.of_user(user) if lesson.state not in NOT_TOLD]
        lines = [f"{lesson.id}. {lesson.text}" for lesson in active]
        ends = "`tinker-claw lessons drop NUMBER` ends one, and so does the page."
        return "\n".join([_OURS, *lines, ends]) if lines else _NONE
    if await deps.secrets.redact_any(command.wish) != command.wish:
        return f"{_OURS} not held, since it holds a secret or personal data."
    lessons.begin(session_id, ())  # not in this session, whose lessons are chosen by now
    latest = deps.ledger.turns.latest(session_id, most=1)
    after = latest[0].turn_id if latest else None
    try:
        number = lessons.rule("add", user, None, command.wish, turn_id=after)
    except UndoError as error:
        return f"{_OURS} not held: {error}."
    return f"{_OURS} number {number} holds from your next session on: {command.wish}"
