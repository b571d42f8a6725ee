"""`run.py versions`: the policy versions of a run, and which of them can still be used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_claw import config
from tinker_claw.ledger.reading import reading
from tinker_claw.story.command import FLAGS_FROM_RUN, ledger_file, parse, until_left, write
from tinker_claw.story.table import Column, moment, table
from tinker_claw.undo.kept import Kept, read_kept


def main(arguments: Sequence[str]) -> int:
    """Print the versions.

    Raises:
        ConfigError: a flag or setting is wrong.
        LedgerError: there is no ledger, or it cannot be read.
    """
    given, settings = parse(parser(), arguments)
    with until_left(), reading(ledger_file(settings)) as ledger:
        with ledger.moment():
            records = [_record(kept) for kept in read_kept(ledger)]
        if given.json:
            write(json.dumps(record) for record in records)
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


def _parent(record: Mapping[str, Any]) -> str:
    return "-" if record["parent"] is None else f"v{record['parent']}"


def _state(record: Mapping[str, Any]) -> str:
    return _there(record["state"]) if record["saved"] else "not saved"


def _there(there: bool | None) -> str:
    return "at the service" if there is None else "there" if there else "deleted"


def _mark(record: Mapping[str, Any]) -> str:
    marks = [name for name in ("pinned", "serving") if record[name]]
    return ", ".join(marks if record["live"] else [*marks, "left behind"])


_COLUMNS = (
    Column("version", lambda r: f"v{r['id']}"),
    Column("parent", _parent),
    Column("step", lambda r: str(r["step"]), right=True),
    Column("made", lambda r: moment(r["created_at"])),
    Column("samples", lambda r: str(r["samples"] or "-"), right=True),
    Column("state", _state),
    Column("sampler", lambda r: _there(r["sampler"])),
    Column("", _mark),
)


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    top = config.Flags(
        prog="run.py versions",
        description="List the policy versions of a run, also while the gateway runs. Learning can "
        "go on from a version whose state is there (rollback), and one whose sampler is there can "
        "answer (pin, MODEL@vN). `step` counts optimizer steps since the base along the line; "
        "versions that a rollback has left are `left behind`.",
        epilog=FLAGS_FROM_RUN,
        allow_abbrev=False,
    )
    top.add_argument("--json", action="store_true", help="one JSON object a line")
    return top
