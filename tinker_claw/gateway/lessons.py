"""Choose the lessons for a session, and put them into its system prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from tinker_claw.formats.parts import with_parts
from tinker_claw.images import MessagePart, parts_of
from tinker_claw.ledger.lessons import MOST, NOT_TOLD, Lesson, LessonTable, State
from tinker_claw.telemetry import log
from tinker_claw.types import Message
from tinker_claw.wishes import lesson_text

MOST_TOKENS = 320
"""Most tokens of a session's lessons, with the sentence above them."""


def with_lessons(
    messages: Sequence[Message], lessons: Iterable[Lesson], *, as_system: bool
) -> list[Message]:
    """Return messages with lessons behind the system prompt, or as one where there is none.

    Args:
        as_system: False: the chat format takes no system prompt, so they open the first message
            of the user.
    """
    text, changed = lesson_text(lesson.text for lesson in lessons), list(messages)
    if not as_system:
        at = next((n for n, message in enumerate(changed) if message["role"] == "user"), None)
        if at is not None:
            opened = [MessagePart(f"{text}\n\n"), *parts_of(changed[at])]
            changed[at] = with_parts(changed[at], opened)
        return changed
    systems = sum(1 for _ in takewhile(lambda message: message["role"] == "system", changed))
    if not systems:
        return [{"role": "system", "content": text}, *changed]
    last = changed[systems - 1]
    whole = "\n\n".join(filter(None, (last["content"], text)))
    changed[systems - 1] = {**last, "content": whole}
    return changed


class LessonChooser:
    """Choice of lessons for sessions."""

    def __init__(self, table: LessonTable, tokens: Callable[[str], Sequence[int]]) -> None:
        """`tokens`: encodes a text as it would stand in a prompt."""
        self._table = table
        self._tokens = tokens

    def for_session(self, session_id: int, user: str | None, version: int = 0) -> list[Lesson]:
        """Return the lessons in a session's prompts, the same from its first request on.

        Args:
            user: the owner who opened the session; None: somebody else did, and there are none.
            version: the one that answers its first message.
        """
        lessons = self._table.of_session(session_id)
        if lessons is not None:
            return lessons
        chosen = self._chosen(user, version) if user is not None else []
        if not chosen:
            return []  # nor will there be any, once it has a turn
        for lesson in self._table.begin(session_id, chosen):
            log.info("lesson.first_told", lesson=lesson, session=session_id)
        return self._table.of_session(session_id) or []

    def _chosen(self, user: str, version: int) -> list[int]:
        """Return the newest lessons, as many as there is room for, the newest last."""
        active = [each for each in self._table.of_user(user) if each.state not in NOT_TOLD]
        chosen, practised = list[Lesson](), self._table.practised(version) if active else ()
        for lesson in active:
            if len(chosen) == MOST:
                break
            if lesson.state is not State.TOLD and lesson.id in practised:
                continue  # these weights do it untold
            text = lesson_text(candidate.text for candidate in [*chosen, lesson])
            if len(self._tokens(text)) <= MOST_TOKENS:
                chosen.append(lesson)
        return [lesson.id for lesson in reversed(chosen)]
