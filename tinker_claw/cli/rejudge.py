"""`run.py rejudge`: turns that were set aside are judged again.

Rule: a gateway that runs does it itself, at once; else the ledger is told, and the next start goes
by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from tinker_claw.cli.common import FLAGS_FROM_RUN, is_running, ledger_file, parse, tell, write
from tinker_claw.config.load import Flags
from tinker_claw.errors import UndoError
from tinker_claw.ledger.database import reading
from tinker_claw.ledger.ledger import Ledger


def main(arguments: Sequence[str]) -> int:
    """Take up turns that were set aside.

    Raises:
        ClawError: one that was named was not set aside, or the ledger cannot be written.
    """
    given, settings = parse(parser(), arguments)
    directory, wanted = settings.run.directory, given.turns or None
    with reading(ledger_file(settings)):
        pass  # it is one, of this schema
    running = is_running(directory)
    if running:
        again: list[int] = tell(directory, {"do": "rejudge", "turns": wanted})
    else:
        with closing(Ledger(directory)) as ledger:
            again = ledger.judgements.take_up(wanted)
    when = "now" if running else "when the gateway is started"
    if again:
        write([f"Judged again {when}: {', '.join(f'turn {turn}' for turn in again)}."])
    else:
        write(["No turn is set aside."] if wanted is None else [])
    if missing := sorted(set(wanted or ()) - set(again)):
        raise UndoError(
            f"not set aside, or its words are gone: {', '.join(f'turn {one}' for one in missing)}; "
            "`python run.py explain TURN` says what became of it"
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    top = Flags(
        prog="run.py rejudge",
        description="Judge turns again that were set aside, because three times the judge gave "
        "nothing that could be read while it judged others: after its model, its prompt or its "
        "settings have changed, say. `run.py explain TURN` shows what came of each try. A gateway "
        "that runs does it at once; else it holds from its next start on.",
        epilog=FLAGS_FROM_RUN,
        allow_abbrev=False,
    )
    top.add_argument(
        "turns", nargs="*", type=int, metavar="TURN", help="which; all of them unless given"
    )
    return top
