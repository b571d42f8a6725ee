"""`run.py versions`, `pin`, `unpin` and `rollback`: what there is, what answers, what learns on.

Rule: what lies on this machine is looked at; of what lies at a service nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tinker_claw.cli.common import (
    Column,
    LedgerFlags,
    is_running,
    table,
    tell,
    until_left,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.errors import UndoError
from tinker_claw.ledger.database import Rows, reading
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.outcome import moment
from tinker_claw.ledger.versions import VersionRecord, read_versions


@dataclass(frozen=True, slots=True)
class Kept:
    """A version, and what is left of it."""

    record: VersionRecord
    state: bool | None
    """Learning can go on from it. None: it was saved, and the service knows whether it still is."""
    sampler: bool | None
    """It can answer. None: the service knows."""

    @property
    def id(self) -> int:
        return self.record.version.id

    @property
    def name(self) -> str:
        return f"v{self.id}"


def backend_of(rows: Rows) -> str | None:
    return rows.one("SELECT value FROM meta WHERE key = 'backend'")


def read_kept(rows: Rows) -> list[Kept]:
    """All versions of the ledger, oldest first."""
    local, directory = backend_of(rows) == "local", rows.path.parent
    return [_kept(record, directory, local=local) for record in read_versions(rows)]


def _kept(record: VersionRecord, directory: Path, *, local: bool) -> Kept:
    state, sampler = record.version.state_ref, record.version.sampler_ref
    if not local:
        return Kept(record, False if state is None else None, None)
    return Kept(
        record,
        state is not None and (directory / "states" / state).is_dir(),
        (directory / "adapters" / sampler).is_dir(),
    )


def number(text: str) -> int:
    """A version's number: 3 or v3.

    Raises:
        UndoError: it is neither.
    """
    found = re.fullmatch(r"v?(\d{1,18})", text)
    if found is None:
        raise UndoError(f"{text!r} is no version; give one as `python run.py versions` shows it")
    return int(found[1])


def named(kept: Sequence[Kept], version: int, *, with_state: bool = False) -> Kept:
    """The version of that number, whose weights (and state) are there as far as one can see.

    Raises:
        UndoError: they are not; names the versions that are possible.
    """
    possible = [one for one in kept if _usable(one, with_state=with_state)]
    known = ", ".join(one.name for one in possible[-40:]) or "none"
    found = next((one for one in kept if one.id == version), None)
    if found is None:
        raise UndoError(f"there is no v{version}; possible: {known}")
    if found not in possible:
        if found.sampler is False:
            why = "its weights are not there any more"
        elif found.record.version.state_ref is None:
            why = "its state was not saved (--save-interval)"
        else:
            why = "its state is not there any more"
        raise UndoError(
            f"v{version} cannot be used: {why}; possible: {known} "
            "(the newest 8 states and 32 samplers are kept)"
        )
    return found


def _usable(one: Kept, *, with_state: bool) -> bool:
    return one.sampler is not False and (one.state is not False or not with_state)


# `run.py versions`


class VersionsFlags(LedgerFlags):
    """List the policy versions of a run, also while the gateway runs.

    Learning can go on from a version whose state is there (rollback), and one whose sampler is
    there can answer (pin, MODEL@vN). `step` counts optimizer steps since the base along the line;
    versions that a rollback has left are `left behind`.
    """

    as_json: bool = Field(False, alias="json", description="one JSON object a line")


def versions(given: VersionsFlags) -> int:
    """Print the versions.

    Raises:
        ConfigError: a flag or setting is wrong.
        LedgerError: there is no ledger, or it cannot be read.
    """
    with until_left(), reading(given.ledger) as ledger:
        with ledger.moment():
            records = [_record(kept) for kept in read_kept(ledger)]
        if given.as_json:
            write_json(records)
        else:
            write(table(_COLUMNS, records))
    return 0


def _record(kept: Kept) -> dict[str, Any]:
    record, version = kept.record, kept.record.version
    return {
        "id": version.id,
        "parent": version.parent,
        "step": version.step,
        "created_at": record.created_at,
        "made_by_step": record.made_by_step,
        "samples": record.samples,
        "saved": version.state_ref is not None,
        "state": kept.state,
        "sampler": kept.sampler,
        "live": record.live,
        "pinned": record.pinned,
        "serving": record.serving,
    }


def _state(record: Mapping[str, Any]) -> str:
    return _there(record["state"]) if record["saved"] else "not saved"


def _there(there: bool | None) -> str:
    return "at the service" if there is None else "there" if there else "deleted"


def _mark(record: Mapping[str, Any]) -> str:
    marks = [name for name in ("pinned", "serving") if record[name]]
    return ", ".join(marks if record["live"] else [*marks, "left behind"])


_COLUMNS = (
    Column("version", lambda r: f"v{r['id']}"),
    Column("parent", lambda r: "-" if r["parent"] is None else f"v{r['parent']}"),
    Column("step", lambda r: str(r["step"]), right=True),
    Column("made", lambda r: moment(r["created_at"])),
    Column("samples", lambda r: str(r["samples"] or "-"), right=True),
    Column("state", _state),
    Column("sampler", lambda r: _there(r["sampler"])),
    Column("", _mark),
)


# `run.py pin`, `unpin` and `rollback`


class VersionFlags(LedgerFlags):
    """Of a command that changes which version answers."""

    MORE: ClassVar[str] = (
        "A gateway that runs does it at once; else it holds from its next start on. "
        + LedgerFlags.MORE
    )


class PinFlags(VersionFlags):
    """Answer with one version from now on, whatever is learned.

    Learning goes on from the newest version, on what the pinned one samples, as long as that is not
    too old for it (--max-staleness steps); after that samples expire. `unpin` ends it, `rollback`
    too.
    """

    version: Annotated[str, WORD] = Field(description="v3, say; `run.py versions` lists them")


class UnpinFlags(VersionFlags):
    """Let the newest version answer again."""


class RollbackFlags(VersionFlags):
    """Answer with an earlier version at once, and learn on from its state, optimizer included, once
    the step in hand has ended.

    It becomes a new version whose parent it is: numbers only grow, and nothing is deleted, so that
    a rollback can be taken back with another. Samples of the versions that are left expire; what
    they have trained on is not trained again. A pin ends, and so does a hold of learning; to go on
    from where it is, name the newest version.
    """

    version: Annotated[str, WORD] = Field(
        description="v3, say; `run.py versions` says which have their state"
    )


def pin(given: PinFlags) -> int:
    """Let one version answer.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    version = _named(given.ledger, given.version).id
    if is_running(given.directory):
        tell(given.directory, {"do": "pin", "version": version})
        write([f"v{version} answers from now on; learning goes on."])
        return 0
    with closing(Ledger(given.directory)) as ledger:
        ledger.pin.to(version)
    write([f"v{version} will answer when the gateway is started; learning will go on."])
    return 0


def unpin(given: UnpinFlags) -> int:
    """Let the newest version answer again.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    if given.ledger and is_running(given.directory):
        version = tell(given.directory, {"do": "unpin"})
        write([f"v{version}, the newest, answers from now on."])
        return 0
    with closing(Ledger(given.directory)) as ledger:
        ledger.pin.end()
    write(["The newest version will answer when the gateway is started."])
    return 0


def rollback(given: RollbackFlags) -> int:
    """Go back to a version, and learn on from there.

    Raises:
        ClawError: it cannot; the sentence says why.
    """
    kept = _named(given.ledger, given.version, with_state=True)
    if is_running(given.directory):
        made = int(tell(given.directory, {"do": "rollback", "version": kept.id})["id"])
        answers = "answers from now on"
    else:
        with closing(Ledger(given.directory)) as ledger:
            if kept.state is None:
                raise UndoError(
                    "its state lies at the service, which only the gateway asks; start it, and "
                    "give the command again while it runs"
                )
            ledger.steps.void_unfinished()
            made = ledger.steps.roll_back(kept.record.version).id
        answers = "will answer when the gateway is started"
    write(
        [
            f"v{made}, with the weights of {kept.name}, {answers}, and learning goes on from its "
            "state. What was sampled by versions since then, and not trained on, has expired."
        ]
    )
    return 0


def _named(file: Path, text: str, *, with_state: bool = False) -> Kept:
    with reading(file) as ledger, ledger.moment():
        if backend_of(ledger) is None:
            raise UndoError(f"{ledger.path} holds no run")
        return named(read_kept(ledger), number(text), with_state=with_state)
