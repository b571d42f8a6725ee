"""`run.py pin`, `unpin` and `rollback`: which version answers, and which one learns on.

Rule: a gateway that runs does it itself, at once; else the ledger is told, and the next start goes
by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from tinker_claw import config
from tinker_claw.config import Settings
from tinker_claw.errors import UndoError
from tinker_claw.ledger import Ledger
from tinker_claw.ledger.reading import reading
from tinker_claw.story.command import FLAGS_FROM_RUN, ledger_file, parse, write
from tinker_claw.undo.kept import Kept, backend_of, named, number, read_kept
from tinker_claw.undo.reach import is_running, tell


def pin(arguments: Sequence[str]) -> int:
    """Let one version answer.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    given, settings = parse(pin_parser(), arguments)
    version = _named(settings, given.version).id
    if is_running(settings.run.directory):
        tell(settings.run.directory, {"do": "pin", "version": version})
        write([f"v{version} answers from now on; learning goes on."])
        return 0
    with closing(Ledger(settings.run.directory)) as ledger:
        ledger.pin.to(version)
    write([f"v{version} will answer when the gateway is started; learning will go on."])
    return 0


def unpin(arguments: Sequence[str]) -> int:
    """Let the newest version answer again.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    _, settings = parse(unpin_parser(), arguments)
    ledger_file(settings)
    if is_running(settings.run.directory):
        version = tell(settings.run.directory, {"do": "unpin"})
        write([f"v{version}, the newest, answers from now on."])
        return 0
    with closing(Ledger(settings.run.directory)) as ledger:
        ledger.pin.end()
    write(["The newest version will answer when the gateway is started."])
    return 0


def rollback(arguments: Sequence[str]) -> int:
    """Go back to a version, and learn on from there.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    given, settings = parse(rollback_parser(), arguments)
    kept = _named(settings, given.version, with_state=True)
    directory = settings.run.directory
    if is_running(directory):
        done = tell(directory, {"do": "rollback", "version": kept.id})
        write([_rolled_back(kept, done["id"], "answers from now on")])
        return 0
    with closing(Ledger(directory)) as ledger:
        if kept.state is None:
            raise UndoError(
                "its state lies at the service, which only the gateway asks; start it, and give "
                "the command again while it runs"
            )
        ledger.steps.void_unfinished()
        version = ledger.steps.roll_back(kept.record.version)
    write([_rolled_back(kept, version.id, "will answer when the gateway is started")])
    return 0


def _rolled_back(kept: Kept, version: int, answers: str) -> str:
    return (
        f"v{version}, with the weights of {kept.name}, {answers}, and learning goes on from its "
        "state. What was sampled by versions since then, and not trained on, has expired."
    )


def _named(settings: Settings, text: str, *, with_state: bool = False) -> Kept:
    with reading(ledger_file(settings)) as ledger, ledger.moment():
        if backend_of(ledger) is None:
            raise UndoError(f"{ledger.path} holds no run")
        return named(read_kept(ledger), number(text), with_state=with_state)


def pin_parser() -> argparse.ArgumentParser:
    top = _parser(
        "pin",
        "Answer with one version from now on, whatever is learned. Learning goes on from the "
        "newest version, on what the pinned one samples, as long as that is not too old for it "
        "(--max-staleness steps); after that samples expire. `unpin` ends it, `rollback` too.",
    )
    top.add_argument("version", help="v3, say; `run.py versions` lists them")
    return top


def unpin_parser() -> argparse.ArgumentParser:
    return _parser("unpin", "Let the newest version answer again.")


def rollback_parser() -> argparse.ArgumentParser:
    top = _parser(
        "rollback",
        "Answer with an earlier version at once, and learn on from its state, optimizer included, "
        "once the step in hand has ended. It becomes a new version whose parent it is: numbers "
        "only grow, and nothing is deleted, so that a rollback can be taken back with another. "
        "Samples of the versions that are left expire; what they have trained on is not trained "
        "again. A pin ends.",
    )
    top.add_argument("version", help="v3, say; `run.py versions` says which have their state")
    return top


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return config.Flags(
        prog=f"run.py {name}",
        description=f"{description} A gateway that runs does it at once; else it holds from its "
        "next start on.",
        epilog=FLAGS_FROM_RUN,
        allow_abbrev=False,
    )
