"""`tinker-claw lessons`: list what was learned of the user's wishes, and let the user change it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinker_claw.cli.common import (
    Column,
    LedgerCommand,
    short,
    table,
    version,
    wrapped,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import DEFAULT_USER
from tinker_claw.errors import UndoError
from tinker_claw.evidence import in_words
from tinker_claw.ledger.lessons import read_lessons


def _share(accepted: dict[str, Any] | None) -> str | None:
    return in_words(accepted) if accepted else None


_COLUMNS = (
    Column("id"),
    Column("user"),
    Column("state"),
    Column("version", show=version),
    Column("kept"),
    Column("lesson", "text"),
    *(
        Column(name, lambda lesson, name=name: lesson["accepted"].get(name), _share)
        for name in ("before", "told", "untold")
    ),
    Column("your words", "words", lambda text: short(60, text)),
    Column("turn", "turn_id"),
    Column("why", "reason"),
)


class Lessons(LedgerCommand):
    """List lessons, which say what you want of all replies; keep, edit, drop or add one.

    A lesson is tried in three sessions of four, told in all but a few, learned by a version (and
    told no more), or dropped.
    Beside it stands the share of first replies accepted, with its 95 % interval: before it was
    said, and since then with it (told) and without it (untold).
    What you keep, edit or add is always told. A drop acts at once; what the model has learned from
    it stays until a rollback to a version before.
    """

    do: Annotated[Literal["list", "keep", "edit", "drop", "add"], WORD] = "list"
    words: Annotated[tuple[str, ...], WORD] = Field(
        (), title="ID or TEXT", description="a lesson's number, and the new text of one"
    )
    user: str | None = Field(None, description="whose lessons; all of them, or the default user")
    as_json: bool = Field(False, alias="json", description="one JSON object a line")

    def run(self) -> int:
        if self.do == "list":
            with self.rows() as ledger:
                found = read_lessons(ledger, self.user)
            write_json(found) if self.as_json else write(table(_COLUMNS, found))
            return 0
        number, user, text = None, self.user, list(self.words)
        if self.do == "add":
            user = user or DEFAULT_USER
        elif text and text[0].isdecimal():
            number = int(text.pop(0))
        else:
            raise UndoError(f"which one? `tinker-claw lessons {self.do} 3`; `lessons` lists them")
        from tinker_claw.privacy.redact import Redactor  # not needed to list

        said = Redactor(self.settings.privacy.kinds).redact(" ".join(text))
        given = {"rule": self.do, "user": user, "lesson": number, "text": said}
        values = self.do, user, number, said
        done, _ = self.carry_out("lesson", given, lambda ledger: ledger.lessons.rule(*values))
        write([f"Lesson {done}: {_DONE[self.do]}."])
        if self.do == "drop":
            with self.rows() as ledger:
                back = next(one["back"] for one in read_lessons(ledger, None) if one["id"] == done)
            if back is not None:
                write(wrapped(_UNDO.format(back)))
        return 0


_UNDO = (
    "What the model has learned of it stays; `tinker-claw rollback v{}` goes back to the version "
    "that answered when it was said."
)
_DONE = {
    "keep": "kept, it is always told",
    "edit": "changed, it is always told",
    "drop": "dropped, it is told no more",
    "add": "added, with --lessons tell or distill it is told from the next session on",
}
