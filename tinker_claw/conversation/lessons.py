"""Choose the lessons for a session's prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tinker_claw.ledger.lessons import MOST, NOT_TOLD, Lesson, LessonTable, State
from tinker_claw.telemetry import log

MOST_TOKENS = 256
"""Most tokens of all lessons that a session is told."""


def told_text(lessons: Iterable[Lesson]) -> str:
    """Return the text of lessons in a prompt."""
    return " ".join(lesson.text for lesson in lessons)


class Lessons:
    """Choice of the lessons that sessions are told."""

    def __init__(self, table: LessonTable, tokens: Callable[[str], Sequence[int]]) -> None:
        """`tokens`: encodes a text as it would stand in a prompt."""
        self._table = table
        self._tokens = tokens

    def told(self, session_id: int, user: str | None, version: int = 0) -> list[Lesson]:
        """Return the lessons that a session is told, the same from its first request on.

        Args:
            user: the owner who opened the session; None: somebody else did, and nothing is told.
            version: the one that answers its first message.
        """
        known = self._table.of_session(session_id)
        if known is None:
            chosen = [] if user is None else self._chosen(user, version)
            for lesson in self._table.begin(session_id, chosen):
                log.info("lesson.first_told", lesson=lesson, session=session_id)
            known = self._table.of_session(session_id)
        return known or []

    def _chosen(self, user: str, version: int) -> list[int]:
        """Return as many lessons as there is room for: what the user keeps, then the newest. Those
        that were told in vain are ended first."""
        chosen, practised = list[Lesson](), self._table.practised(version)
        for lesson in sorted(self._table.of_user(user), key=lambda lesson: not lesson.kept):
            if len(chosen) == MOST:
                break
            if lesson.state in NOT_TOLD:
                continue
            if lesson.state is not State.TOLD and lesson.id in practised:
                continue  # these weights do it untold
            if len(self._tokens(told_text([*chosen, lesson]))) <= MOST_TOKENS:
                chosen.append(lesson)
        ids = [lesson.id for lesson in chosen]
        if not ids or not (ended := self._table.end_in_vain(ids)):
            return ids
        for lesson in ended:
            log.warning("lesson.in_vain", lesson=lesson)
        return self._chosen(user, version)
