"""`tinker-claw explain`: one turn from its request to the version that it helped to make.

Rule: the user's words are shown here, on their own terminal, unless they say --no-text.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from tinker_claw.cli.common import Invocation, command, field_lines, wrapped, write
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.turn_view import read_contents
from tinker_claw.words import turn_fields

LONGEST = 1500
"""Characters of a text that are shown."""


@command("explain")
@click.argument(
    "turn", type=int, required=False, help="id, as `tinker-claw log` shows (default: the newest)"
)
@click.option("--no-text", is_flag=True, help="leave out the texts of user, model and tools")
def explain(invoked: Invocation, turn: int | None, no_text: bool) -> None:
    """Explain what became of one turn, and why. The gateway may be running."""
    with invoked.rows() as ledger:
        lines = [*explained(ledger, turn or _newest(ledger), text=not no_text)]
    write(lines)


def _newest(rows: Rows) -> int:
    """Return the newest main turn; raises LedgerError where there is none."""
    turn = rows.one("SELECT MAX(id) FROM turns WHERE kind = 'main'")
    if turn is None:
        raise LedgerError(f"{rows.path} has no turn yet: talk to the agent first")
    return turn


def explained(rows: Rows, turn_id: int, *, text: bool) -> Iterator[str]:
    """Yield the lines: the fields of a turn, with their texts below.

    Raises:
        LedgerError: there is no such turn.
    """
    if (contents := read_contents(rows, turn_id)) is None:
        raise LedgerError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists them")
    for field in turn_fields(contents):
        yield from field_lines(field.name, field.value)
        if field.quote is not None:
            yield from _quote(field.quote, text)


def _quote(words: str, text: bool) -> Iterator[str]:
    if not text:
        yield f"    ({len(words)} characters)"
        return
    for line in words[:LONGEST].splitlines() or [""]:
        yield from wrapped(line, "  | ") or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"
