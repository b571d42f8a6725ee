"""Choose the lessons for a session's prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tinker_claw.ledger.lessons import Lesson, LessonTable, State

MOST = 8
"""Most lessons that a session is told."""
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

    def told(self, session_id: int, user: str | None) -> list[Lesson]:
        """Return the lessons that a session is told, the same from its first request on.

        Args:
            user: the owner who opened the session; None: somebody else did, and nothing is told.
        """
        known = self._table.of_session(session_id)
        if known is None:
            chosen = self._chosen(user) if user is not None else []
            self._table.begin(session_id, [lesson.id for lesson in chosen])
            known = self._table.of_session(session_id)
        return known or []

    def _chosen(self, user: str) -> list[Lesson]:
        """Return the newest lessons of a user that are told, as many as there is room for."""
        chosen = list[Lesson]()
        for lesson in self._table.of_user(user):
            if len(chosen) == MOST:
                break
            text = told_text([*chosen, lesson])
            if lesson.state is State.TOLD and len(self._tokens(text)) <= MOST_TOKENS:
                chosen.append(lesson)
        return chosen
