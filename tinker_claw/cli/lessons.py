"""`tinker-claw lessons`: list what was learned of the user's wishes, and let the user change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from tinker_claw.cli.common import (
    Column,
    LedgerCommand,
    short,
    table,
    wrapped,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import DEFAULT_USER
from tinker_claw.errors import UndoError
from tinker_claw.ledger.lessons import read_lessons
from tinker_claw.ledger.turn_view import Record
from tinker_claw.words import practised

_COLUMNS = (
    Column("id"),
    Column("user"),
    Column("state"),
    Column("instead", "replaced_by"),
    Column("lesson", "text", wraps=True),
    Column("your words", "words", lambda text: short(60, text), wraps=True),
    Column("turn", "turn_id"),
    Column("first told", "first"),
)


class Lessons(LedgerCommand):
    """List what you want of all replies; keep, edit, drop or add a lesson.

    New sessions are told the newest. Candidate: the judge takes it for a wish that lasts, and it is
    told once you keep it. turn: where you said it; first told: the first turn that was told it.
    Aside: you said otherwise since; keep brings it back. Provisional: practised, and no longer
    told; your next six to twelve verdicts make it learned, or bring it back. A drop acts at once;
    what the model has learned stays until a rollback.
    """

    do: Annotated[Literal["list", "keep", "edit", "drop", "add"], WORD] = "list"
    words: Annotated[tuple[str, ...], WORD] = Field(
        (), title="ID or TEXT", description="a lesson's number, and the new text of one"
    )
    user: str | None = Field(None, description="whose lessons; all of them, or the default user")
    as_json: bool = Field(False, alias="json", description="one JSON object a line")

    def run(self) -> int:
        if self.do == "list":
            if self.words:
                raise UndoError(f"`list` takes no {' '.join(self.words)!r}: `tinker-claw lessons`")
            lessons = self._read(self.user)
            if self.as_json:
                write_json(lessons)
            else:
                write(_listing(lessons))
            return 0
        number, user, text, newest = None, self.user, list(self.words), 0
        if self.do == "add":
            user = user or DEFAULT_USER
            with self.rows() as ledger:
                newest = ledger.one("SELECT MAX(id) FROM lessons") or 0
        elif text and text[0].isdecimal():
            number = int(text.pop(0))
        else:
            raise UndoError(f"which one? `tinker-claw lessons {self.do} 3`; `lessons` lists them")
        if text and self.do in ("keep", "drop"):
            raise UndoError(f"one at a time: `tinker-claw lessons {self.do} {number}`")
        from tinker_claw.privacy.redact import Redactor  # not needed to list

        redacted = Redactor(self.settings.privacy.kinds).redact(" ".join(text))
        arguments = {"rule": self.do, "user": user, "lesson": number, "text": redacted}
        values = self.do, user, number, redacted
        done, _ = self.carry_out("lesson", arguments, lambda ledger: ledger.lessons.rule(*values))
        existed = self.do == "add" and done <= newest
        write([f"Lesson {done}: {_DONE['known' if existed else self.do]}."])
        if self.do == "drop":
            back = next(lesson["back"] for lesson in self._read(None) if lesson["id"] == done)
            if back is not None:
                write(wrapped(_UNDO.format(back)))
        return 0

    def _read(self, user: str | None) -> list[Record]:
        with self.rows() as ledger:
            return read_lessons(ledger, user)


def _listing(lessons: Sequence[Record]) -> Iterator[str]:
    """Yield the table of lessons, then those that are told in vain and the newest practice."""
    yield from table(_COLUMNS, lessons) if lessons else wrapped(_NONE)
    for lesson in lessons:
        if lesson["vain"]:
            yield from wrapped(f"Lesson {lesson['id']} is told in vain: {lesson['vain']}.")
    for lesson in lessons:
        for run in lesson["runs"][-1:]:
            yield from wrapped(practised(run))


_NONE = (
    "No lessons yet. Write `/always answer in French` to your agent, or `tinker-claw lessons add "
    "TEXT`; later sessions are told it."
)
_UNDO = (
    "What the model has learned of it stays; `tinker-claw rollback v{}` goes back to the version "
    "that answered when it was said."
)
_DONE = {
    "keep": "kept, it is told",
    "edit": "changed, it is told",
    "drop": "dropped, it is told no more",
    "add": "added, it is told from the next session on",
    "known": "it was there already, and is told in these words",
}
