"""Versions of a run, and whether what they need is still there.

Rule: what lies on this machine is looked at; of what lies at a service nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_claw.errors import UndoError
from tinker_claw.ledger.lineage import VersionRecord, read_versions
from tinker_claw.ledger.reading import Rows


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
