"""`tinker-claw versions`, `pin`, `unpin`, `rollback` and `accept`: list policy versions and choose
one.

Rule: files on this machine are checked; nothing is claimed about those at a service.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from tinker_claw.cli.common import (
    AS_JSON,
    READS,
    Column,
    Invocation,
    command,
    table,
    version_name,
    write,
    write_json,
)
from tinker_claw.errors import UndoError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.figures import read_stored, usable
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import Record
from tinker_claw.policy import KEPT_DAYS, KEPT_SAMPLERS, KEPT_STATES
from tinker_claw.words import moment

STAYS = (
    f"v0, the last of each of {KEPT_DAYS} days, the newest {KEPT_STATES} states and the newest "
    f"{KEPT_SAMPLERS} samplers stay"
)


def as_shown(text: str) -> int:
    """Read the number of a version, which may be written as it is shown: v3."""
    return int(text.removeprefix("v"))


def named(rows: Rows, version: int | None, *, with_state: bool = False) -> Record:
    """The version of that number, or the newest that serves, which has to be usable.

    Raises:
        UndoError: it is not; names the versions that are.
    """
    kept = {record["id"]: record for record in read_stored(rows)}
    if not kept:
        raise UndoError(f"{rows.path} has no version yet: the gateway makes v0 when it starts")
    if version is None:
        version = max(number for number in kept if kept[number]["serving"])
    possible = [f"v{id}" for id, record in kept.items() if usable(record, with_state=with_state)]
    names = ", ".join(possible[-40:]) or "none"
    if version not in kept:
        raise UndoError(f"there is no v{version}; possible: {names}")
    if f"v{version}" not in possible:
        lost = kept[version]["lost"]
        raise UndoError(f"v{version} cannot be used: {lost} ({STAYS}); possible: {names}")
    return kept[version]


@command("versions")
@AS_JSON
def versions(invoked: Invocation, as_json: bool) -> None:
    """List the policy versions of a run, also while the gateway runs.

    `step`: committed steps since the base. `accepted`: how many of its first judged turns
    (docs/operating.md) were accepted. `state`: needed for a rollback to it. `sampler`: needed to
    pin it or ask for MODEL@vN. `now`: whether it serves, is pinned, or was left behind by a
    rollback.
    """
    with invoked.rows() as ledger:
        records = read_stored(ledger)
    if as_json:
        write_json(records)
        return
    deleted = any(False in (record["state"], record["sampler"]) for record in records)
    write([*table(_COLUMNS, records), *([f"Deleted: {STAYS}."] if deleted else [])])


def _there(there: bool | None) -> str:
    return "at the service" if there is None else "there" if there else "deleted"


def _mark(record: Record) -> str:
    marks = [name for name in ("pinned", "serving") if record[name]]
    return ", ".join(marks if record["live"] else [*marks, "left behind"])


_COLUMNS = (
    Column("version", "id", version_name),
    Column("parent", show=version_name),
    Column("step"),
    Column("made", "created_at", moment),
    Column("samples", show=lambda samples: samples or None),
    Column("accepted", show=lambda share: share and f"{share['good']:.0f} of {share['of']}"),
    Column("state", show=_there),
    Column("sampler", show=_there),
    Column("now", _mark),
)


_AT_ONCE = f"A running gateway does it at once; otherwise the next start does. {READS}"


@command("pin", _AT_ONCE)
@click.argument("version", type=as_shown, help="v3, say; `tinker-claw versions` lists them")
def pin(invoked: Invocation, version: int) -> None:
    """Answer with one version from now on, while learning continues.

    Learning continues from the newest version, with samples of the pinned one until that is more
    than --max-staleness steps old. `unpin` or `rollback` ends it.
    """
    with invoked.rows() as ledger:
        pinned: int = named(ledger, version)["id"]
    _, now = invoked.carry_out(
        "pin", {"version": pinned}, lambda ledger: ledger.versions.pin(pinned)
    )
    write([f"v{pinned} {_answers(now)}; learning continues."])


@command("unpin", _AT_ONCE)
def unpin(invoked: Invocation) -> None:
    """Let the newest version answer again."""
    newest, now = invoked.carry_out("unpin", {}, lambda ledger: ledger.versions.pin(None))
    write([f"The newest version{f', v{newest},' if now else ''} {_answers(now)}."])


@command("rollback", _AT_ONCE)
@click.argument(
    "version", type=as_shown, help="v3, say; `tinker-claw versions` says which have their state"
)
def rollback(invoked: Invocation, version: int) -> None:
    """Answer with an earlier version at once, and continue learning from its state.

    The current step ends first. The version gets a new number, and nothing is deleted, so another
    rollback undoes this one. Samples of the versions left behind expire. It ends a pin and a pause
    of learning; to resume learning where it is, name the newest version.
    """
    with invoked.rows() as ledger:
        kept = named(ledger, version, with_state=True)

    def offline(ledger: Ledger) -> dict[str, Any]:
        to = ledger.versions.get(kept["id"])
        assert to is not None
        ledger.steps.void_unfinished()
        return asdict(ledger.versions.roll_back(to))

    new_version, now = invoked.carry_out("rollback", {"version": kept["id"]}, offline)
    write(
        [
            f"v{new_version['id']}, with the weights of v{kept['id']}, {_answers(now)}, and "
            "learning continues from its state. What later versions sampled, and was not trained "
            "on, has expired."
        ]
    )


@command("accept")
def accept(invoked: Invocation) -> None:
    """Accept the newest version as the one from which canaries may not fall far.

    It ends a pause of learning for canaries that fell since the base, or since the version that was
    accepted before. A running gateway does it at once, after the current step.
    """
    accepted, _ = invoked.carry_out("accept", {}, lambda ledger: ledger.reference.accept())
    write([f"Canaries are compared with v{accepted} from now on."])


def _answers(now: bool) -> str:
    if now:
        return "answers from now on"
    return "will answer when the gateway is started"
