"""`tinker-claw explain`: one turn from its request to the version that it helped to make.

Rule: the user's words are shown here, on their own terminal, unless they say --no-text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

from pydantic import Field

from tinker_claw.app import orders
from tinker_claw.cli.common import LedgerCommand, wrapped, write
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import Training
from tinker_claw.errors import ClawError, LedgerError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.outcome import read_contents, read_run, read_turn
from tinker_claw.words import tell

LONGEST = 1500
"""Characters of a text that are shown."""


class Explain(LedgerCommand):
    """Explain what became of one turn, and why. The gateway may be running."""

    turn: Annotated[int | None, WORD] = Field(
        None, description="its id, as `tinker-claw log` shows (default: the newest)"
    )
    no_text: bool = Field(False, description="leave out the texts of user, model and tools")

    def run(self) -> int:
        training = self.settings.training
        with suppress(ClawError):  # the ledger is there all the same
            if running := orders.health(self.ledger.parent):
                training = training.model_copy(update={"batch_size": running["batch_size"]})
        with self.rows() as ledger:
            turn = self.turn or _newest(ledger)
            lines = explained(ledger, turn, training, text=not self.no_text)
        write(lines)
        return 0


def _newest(rows: Rows) -> int:
    """Return the newest main turn; raises LedgerError where there is none."""
    turn = rows.one("SELECT MAX(id) FROM turns WHERE kind = 'main'")
    if turn is None:
        raise LedgerError(f"{rows.path} has no turn yet: talk to the agent first")
    return turn


def explained(rows: Rows, turn_id: int, training: Training, *, text: bool) -> list[str]:
    """Return the lines. What `training` leaves to its default is as in the last step.

    Raises:
        LedgerError: there is no such turn.
    """
    turn, contents = read_turn(rows, turn_id), read_contents(rows, turn_id)
    if turn is None or contents is None:
        raise LedgerError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists them")
    run = read_run(rows, training.batch_size, sure="batch_size" in training.model_fields_set)
    lines = list[str]()
    for entry in (entry for part in tell(turn, contents, run).values() for entry in part):
        lines += wrapped(entry.sentence)
        lines += [] if entry.quote is None else _quote(entry.quote, text)
    return lines


def _quote(words: str, text: bool) -> Iterator[str]:
    if not text:
        yield f"    ({len(words)} characters)"
        return
    for line in words[:LONGEST].splitlines() or [""]:
        yield from wrapped(line, "  | ") or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"
