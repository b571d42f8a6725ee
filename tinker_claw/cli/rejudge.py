"""`run.py rejudge`: turns that were set aside are judged again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinker_claw.cli.common import LedgerFlags, carry_out, write
from tinker_claw.config.flags import WORD
from tinker_claw.errors import UndoError
from tinker_claw.ledger.database import reading


class RejudgeFlags(LedgerFlags):
    """Judge turns again that were set aside.

    Three times the judge gave nothing that could be read while it judged others: judge again after
    its model, its prompt or its settings have changed, say. `run.py explain TURN` shows what came
    of each try. A gateway that runs does it at once; else it holds from its next start on.
    """

    turns: Annotated[tuple[int, ...], WORD] = Field(
        (), title="TURN", description="which; all of them unless given"
    )


def rejudge(given: RejudgeFlags) -> int:
    """Take up turns that were set aside."""
    wanted = list(given.turns) or None
    with reading(given.ledger):
        pass  # it is one, of this schema
    order = {"do": "rejudge", "turns": wanted}
    again, running = carry_out(
        given.directory, order, lambda ledger: ledger.judgements.take_up(wanted)
    )
    when = "now" if running else "when the gateway is started"
    if again:
        write([f"Judged again {when}: {', '.join(f'turn {turn}' for turn in again)}."])
    elif wanted is None:
        write(["No turn is set aside."])
    if missing := sorted(set(wanted or ()) - set(again)):
        raise UndoError(
            f"not set aside, or its words are gone: {', '.join(f'turn {one}' for one in missing)}; "
            "`python run.py explain TURN` says what became of it"
        )
    return 0
