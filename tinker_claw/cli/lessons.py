"""`tinker-claw lessons`: list what was learned of the user's wishes, and let the user change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import click

from tinker_claw.cli.common import (
    AS_JSON,
    Column,
    Invocation,
    command,
    table,
    wrapped,
    write,
    write_json,
)
from tinker_claw.config.settings import DEFAULT_USER
from tinker_claw.errors import UndoError
from tinker_claw.ledger.lessons import Rule, read_lessons
from tinker_claw.ledger.turn_view import Record
from tinker_claw.words import practised, short

_COLUMNS = (
    Column("id"),
    Column("user"),
    Column("state"),
    Column("instead", "replaced_by"),
    Column("lesson", "text"),
    Column("your words", "words", lambda text: short(60, text)),
    Column("turn", "turn_id"),
    Column("first told", "first"),
)


@command("lessons")
@click.argument("do", type=click.Choice(["list", *get_args(Rule)]), default="list")
@click.argument(
    "words", nargs=-1, metavar="ID or TEXT", help="a lesson's number, and the new text of one"
)
@click.option("--user", metavar="USER", help="whose lessons; all of them, or the default user")
@AS_JSON
def lessons(
    invoked: Invocation,
    do: Literal["list"] | Rule,
    words: Sequence[str],
    user: str | None,
    as_json: bool,
) -> None:
    """List what you want of all replies; keep, edit, drop or add a lesson.

    New sessions are told the newest. Candidate: the judge takes it for a wish that lasts, and it is
    told once you keep it. turn: where you said it; first told: the first turn that was told it.
    Aside: you said otherwise since; keep brings it back. Provisional: practised, and no longer
    told; your next six to twelve verdicts make it learned, or bring it back. A drop acts at once;
    what the model has learned stays until a rollback.
    """
    if do == "list":
        if words:
            raise UndoError(f"`list` takes no {' '.join(words)!r}: `tinker-claw lessons`")
        records = _records(invoked, user)
        if as_json:
            write_json(records)
        else:
            write(_listing(records))
        return
    number, text = None, list(words)
    if do == "add":
        user = user or DEFAULT_USER
    elif text and text[0].isdecimal():
        number = int(text.pop(0))
    else:
        raise UndoError(f"which one? `tinker-claw lessons {do} 3`; `lessons` lists them")
    if text and do in ("keep", "drop"):
        raise UndoError(f"one at a time: `tinker-claw lessons {do} {number}`")
    from tinker_claw.privacy.redact import Redactor  # not needed to list

    redacted = Redactor(invoked.settings.privacy.kinds).redact(" ".join(text))
    arguments = {"rule": do, "user": user, "lesson": number, "text": redacted}
    done, _ = invoked.carry_out(
        "lesson", arguments, lambda ledger: ledger.lessons.rule(do, user, number, redacted)
    )
    write([f"Lesson {done}: {_DONE[do]}."])
    if do == "drop":
        back = next(lesson["back"] for lesson in _records(invoked, None) if lesson["id"] == done)
        if back is not None:
            write(wrapped(_UNDO.format(back)))


def _records(invoked: Invocation, user: str | None) -> list[Record]:
    with invoked.rows() as ledger:
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
    "add": "it is told from the next session on",
}
