"""`tinker-claw forget` and `rejudge`: delete turns from the ledger, or judge them again.

Rule: first it says what goes, and what forgetting does not undo: what was learned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict

import click

from tinker_claw.cli.common import Invocation, command, wrapped, write
from tinker_claw.errors import UndoError
from tinker_claw.ledger.figures import read_stored, usable
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import Forgetting, from_turn, in_session
from tinker_claw.ledger.turn_view import Record
from tinker_claw.words import plural

EXIT_LEFT = 1
"""Exit status if the user declined and nothing was forgotten."""
_NAMED = 20
"""Turns that are named."""


@command("forget")
@click.argument("what", type=click.Choice(["session", "turn", "leftovers"]))
@click.argument(
    "which", default="", help="its number in the ledger; of a session also the client's name"
)
@click.option(
    "--user", metavar="USER", help="whose session it is, where several have one of that name"
)
@click.option("--dry-run", is_flag=True, help="say what would go, and change nothing")
@click.option("--yes", is_flag=True, help="do not ask")
def forget(
    invoked: Invocation,
    what: str,
    which: str,
    user: str | None,
    dry_run: bool,
    yes: bool,
) -> int | None:
    """Forget a session, or a turn with all later ones of its session.

    They are deleted from the ledger, its free pages and its log, and from the memory of a running
    gateway, which keeps answering. What SQLite may leave between other rows while a gateway runs
    is deleted by `forget leftovers`, with the gateway stopped. Copies elsewhere stay: in OpenClaw's
    history and memory files, at services that were asked, in backups.
    """
    if what == "leftovers":
        with closing(Ledger(invoked.ledger.parent)) as ledger:
            ledger.vacuum()
        write(["Nothing is left of what was forgotten."])
        return None
    if what == "session":
        find = in_session(which, user)
    elif user is not None:
        raise UndoError("--user goes with a session; turns are known by their numbers")
    elif not which.isdecimal():
        raise UndoError(f"{which!r} is no turn; `tinker-claw log turns` lists them")
    else:
        find = from_turn(int(which))
    with invoked.rows() as ledger:
        forgetting, kept = find(ledger), read_stored(ledger)
    write(_describe(forgetting, kept))
    if dry_run:
        return None
    if not yes:
        print("This cannot be taken back. Forget it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            write(["Nothing was forgotten."])
            return EXIT_LEFT
    # There may be more turns by now than were shown.
    forgotten, running = invoked.carry_out(
        f"forget-{what}", {what: which, "user": user}, lambda ledger: asdict(ledger.forget(find))
    )
    write([f"Forgotten: {_turns(forgotten['turns'])} of session {forgotten['session']}."])
    if running:
        write(
            wrapped(
                "SQLite may have left copies between other rows, where nothing reads them: "
                "`tinker-claw forget leftovers` clears them once the gateway is stopped."
            )
        )
    return None


def _describe(forgetting: Forgetting, kept: Sequence[Record]) -> Iterator[str]:
    rest = "" if forgetting.whole else ", all from there on, because later prompts repeat it"
    yield f"Of session {forgetting.session}: {_turns(forgetting.turns)}{rest}."
    parts = "Text, images, ids, logprobs, next states, votes, feedback and hints go"
    yield f"{parts}; sums of what was spent stay."
    for turn in forgetting.unsaid:
        yield f"Turn {turn} stays, without what followed it and what the judge made of that."
    if forgetting.lesson_turns:
        turns = _turns(forgetting.lesson_turns)
        yield f"{turns} held a lesson from it, which goes; they are not trained."
    if forgetting.withdrawn:
        are = "is" if forgetting.withdrawn == 1 else "are"
        yield f"{plural(forgetting.withdrawn, 'queued sample')} {are} withdrawn."
    for used in forgetting.steps:
        trained = f"Step {used.step} trained on {used.samples} of them and made v{used.version}"
        yield f"{trained}." if used.live else f"{trained}, which a rollback has left behind."
    if (before := forgetting.roll_back_to) is None:
        return
    possible = [
        version["id"]
        for version in kept
        if version["id"] <= before and version["live"] and usable(version, with_state=True)
    ]
    stays = "What was learned from it stays learned"
    if possible:
        back = f"tinker-claw rollback v{max(possible)}"
        yield f"{stays}, until you go back before it: {back}"
    else:
        reason = "has no state to go back to any more"
        yield f"{stays}: v{before}, the version before that, {reason}."


def _turns(turns: Sequence[int]) -> str:
    if not turns:
        return "no turn"
    if len(turns) == 1:
        return f"turn {turns[0]}"
    named = ", ".join(str(turn) for turn in turns[:_NAMED])
    more = f" and {len(turns) - _NAMED} more" if len(turns) > _NAMED else ""
    return f"{len(turns)} turns ({named}{more})"


@command("rejudge")
@click.argument("turns", type=int, nargs=-1, metavar="TURN", help="which; all of them unless given")
def rejudge(invoked: Invocation, turns: Sequence[int]) -> None:
    """Judge turns again that were set aside, after three answers that could not be read.

    Try it after a change of the judge's model, prompt or settings. `tinker-claw explain TURN` shows
    each answer. A running gateway does it at once; otherwise the next start does.
    """
    wanted = list(turns) or None
    with invoked.rows():
        pass  # checks that it is a ledger of this schema
    again, running = invoked.carry_out(
        "rejudge", {"turns": wanted}, lambda ledger: ledger.jobs.take_up(wanted)
    )
    when = "now" if running else "when the gateway is started"
    if again:
        write([f"Judged again {when}: {', '.join(f'turn {turn}' for turn in again)}."])
    elif wanted is None:
        write(["No turn is set aside."])
    if missing := sorted(set(turns) - set(again)):
        named = ", ".join(f"turn {turn}" for turn in missing)
        raise UndoError(
            f"not set aside, or its words are gone: {named}; "
            "`tinker-claw explain TURN` says what became of it"
        )
