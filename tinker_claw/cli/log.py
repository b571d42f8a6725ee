"""`run.py log`: rows of the ledger as a table or as JSON lines, and new ones as they come.

Rule: no user's words without --full.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from tinker_claw.cli.common import (
    Column,
    LedgerFlags,
    apart,
    note,
    number,
    read_run_view,
    short,
    table,
    until_left,
    version,
    vote,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import Outside, Rows, reading
from tinker_claw.ledger.outcome import add_outcomes, moment
from tinker_claw.ledger.views import Filter, Record, Table, in_full, read

ROWS = 50
"""Rows of a table, unless --limit says otherwise."""
FIRST_ROWS = 10
"""Rows with which --follow begins."""
_VERDICTS = {"good": "1", "+1": "1", "1": "1", "neutral": "0", "0": "0", "bad": "-1", "-1": "-1"}
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_OF_TURNS = {"session", "user", "kind", "verdict", "trained", "untrained"}
"""Filters that steps and versions know nothing of."""


class LogFlags(LedgerFlags):
    """Show rows of the ledger, the newest last, also while the gateway runs.

    Texts are shown with --full only.
    """

    table: Annotated[Table, WORD] = Field(description="what to show")
    session: str | None = Field(
        None, title="S", description="of this session: its number, or the client's name"
    )
    user: str | None = Field(None, description="of this user")
    kind: Literal["main", "side"] | None = Field(None, description="turns of this kind")
    verdict: Literal["good", "+1", "1", "neutral", "0", "bad", "-1", "none"] | None = Field(
        None, description="none: no vote was valid"
    )
    since: str | None = Field(
        None, title="WHEN", description="from then on: 2026-03-05T14:00, or 2h, 3d"
    )
    trained: bool = Field(False, description="what a step has trained on")
    untrained: bool = Field(False, description="the others")
    limit: int | None = Field(
        None,
        ge=1,
        title="N",
        description=f"the newest N rows (default {ROWS}; as JSON all; {FIRST_ROWS} before "
        "--follow)",
    )
    as_json: bool = Field(False, alias="json", description="one JSON object a line")
    full: bool = Field(False, description="with texts, ids and logprobs, as JSON lines")
    follow: bool = Field(
        False,
        description="show new rows as they come, and a row again when something in it has changed, "
        "as when a verdict arrives: the last line of a row is how it stands",
    )

    @property
    def as_lines(self) -> bool:
        return self.as_json or self.full

    @property
    def rows(self) -> int | None:
        """How many at most."""
        return self.limit or (FIRST_ROWS if self.follow else None if self.as_lines else ROWS)


def log(given: LogFlags) -> int:
    """Print the rows that are asked for."""
    batch_size = given.settings.training.batch_size
    wanted, limit = _filter(given), given.rows
    with until_left(), reading(given.ledger) as ledger:
        if given.follow:
            _follow(ledger, given, wanted, batch_size)
        # A row more says whether there are more than a table shows.
        most = limit if limit is None or given.as_lines else limit + 1
        with ledger.moment():
            records = read_log(ledger, given.table, wanted, most, batch_size)
        if records or given.as_lines:
            _show(ledger, given, records if limit is None else records[-limit:])
        else:
            note(f"no {given.table} in {ledger.path} fit")
        if limit is not None and len(records) > limit:
            note(f"earlier {given.table} are left out; --limit N shows more")
    return 0


def read_log(
    rows: Rows, name: Table, wanted: Filter, limit: int | None, batch_size: int
) -> list[Record]:
    """Records for `COLUMNS`. `batch_size`: samples of a step, where none was taken yet."""
    records = read(rows, name, wanted, limit)
    if name == "turns":
        add_outcomes(rows, read_run_view(rows, batch_size), records)
    return records


def _show(
    ledger: Outside, given: LogFlags, records: Sequence[Record], *, heading: bool = True
) -> None:
    # Not in one moment: while that lasts, the file cannot be tidied up; readers may be slow.
    if given.full:
        write_json(in_full(ledger, given.table, record) for record in records)
    elif given.as_json:
        write_json(records)
    else:
        write(table(COLUMNS[given.table], records, heading=heading))


POLL_S = 0.3
WATCHED = 500
"""Rows behind the newest that are watched for changes."""


def _follow(ledger: Outside, given: LogFlags, wanted: Filter, batch_size: int) -> NoReturn:
    """Show the newest rows; then, until interrupted, each that appears, and each again, whole, in
    which something has changed. What changes far behind the newest rows is not shown."""
    known, seen = dict[int, Record](), None
    while True:
        if (changes := ledger.changes()) != seen:
            if given.table not in ("steps", "versions"):
                # What lies far behind is not looked through again with every change.
                newest = ledger.one("SELECT MAX(id) FROM turns") or 0
                wanted = replace(wanted, after=max(0, newest - 2 * WATCHED))
            with ledger.moment():
                found = read_log(ledger, given.table, wanted, WATCHED, batch_size)
            by_id = {record.get("id", record.get("turn", 0)): record for record in found}
            new = [record for key, record in by_id.items() if known.get(key) != record]
            if seen is None:
                _show(ledger, given, new[-(given.rows or FIRST_ROWS) :])
            elif new:
                _show(ledger, given, new, heading=False)
            known, seen = by_id, changes
        time.sleep(POLL_S)


def _filter(given: LogFlags) -> Filter:
    if given.trained and given.untrained:
        raise ConfigError("--trained and --untrained exclude one another")
    if given.table in ("steps", "versions"):
        for name in given.model_fields_set & _OF_TURNS:
            raise ConfigError(
                f"--{name} goes with turns and what became of them, not with {given.table}"
            )
    return Filter(
        session=given.session,
        user=given.user,
        kind=given.kind,
        verdict=_VERDICTS.get(given.verdict or "", given.verdict),
        trained=given.trained if given.trained or given.untrained else None,
        since=None if given.since is None else since(given.since, time.time()),
    )


def since(text: str, now: float) -> float:
    """Seconds since 1970 for an ISO time (local, unless it says otherwise) or a span like 2h.

    Raises:
        ConfigError: it is neither.
    """
    if span := re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)", text):
        return now - float(span[1]) * _UNITS[span[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"--since {text}: give a time like 2026-03-05T14:00, or a span like 90min, 2h or 3d"
        ) from error


# What the tables show

_Record = Mapping[str, Any]
_LONGEST = 40
_TAKEN = {"committed": "taken", "intent": "under way"}


def _version(name: str, of: str, least: int = 3) -> Column:
    return Column(name, lambda record: version(record[of]), least=least)


def _judged(record: _Record) -> str | None:
    if not record["judged"]:
        return None
    by = "" if record["verdict_by"] == "judge" else f" {record['verdict_by']}"
    return vote(record["verdict"]) + by + (" hint" if record["hints"] else "")


def _by(record: _Record) -> str:
    return f"v{record['policy_version']}" + ("*" if record["fallback"] is not None else "")


def _metric(name: str, of: str) -> Column:
    return Column(name, lambda record: number(record["metrics"].get(of)), right=True, least=5)


def _losses(record: _Record) -> str:
    return " ".join(number(loss) for loss in record["metrics"].get("losses", ()))


def _usd(record: _Record) -> str | None:
    usd = record["metrics"].get("usd")
    return None if usd is None else f"${usd:.4f}"


WHEN = Column("when", lambda record: moment(record["created_at"]), least=8)
_ID = Column("id", right=True, least=4)
_OF_TURN = (
    Column("turn", right=True, least=4),
    WHEN,
    Column("user", lambda record: short(record["user"], 14), least=4),
    Column("session", right=True, least=4),
)

COLUMNS: dict[Table, tuple[Column, ...]] = {
    "turns": (
        _ID,
        *_OF_TURN[1:],
        Column("index", right=True),
        Column("kind"),
        Column("for", lambda record: short(record["call"], 16)),
        Column("by", _by, least=3),
        Column("prompt", "prompt_tokens", right=True, least=5),
        Column("reply", "completion_tokens", right=True, least=4),
        Column("next", "next_role", least=4),
        Column("verdict", _judged, least=7),
        Column("outcome", least=20, wraps=True),
    ),
    "verdicts": (
        *_OF_TURN,
        _version("by", "policy_version"),
        Column("verdict", lambda record: vote(record["verdict"])),
        Column("said by", "verdict_by"),
        Column("score", lambda record: number(record["score"]), right=True, least=5),
        Column("votes", lambda record: " ".join(map(vote, record["votes"])), least=8),
        Column("hints", right=True),
    ),
    "feedback": (
        _ID,
        *_OF_TURN,
        Column("score", lambda record: f"{record['score']:+.3g}", right=True, least=5),
        Column("said by", "source"),
        Column("of", lambda record: "session" if record["final"] else "reply", least=7),
        Column("task"),
        Column("group"),
        Column("not trained because", "unused", least=20, wraps=True),
    ),
    "samples": (
        _ID,
        *_OF_TURN,
        _version("by", "policy_version"),
        Column("task"),
        Column("group"),
        Column("index", right=True),
        Column("reward", lambda r: None if r["reward"] is None else vote(r["reward"])),
        Column("hint", "hinted"),
        Column("state", least=7),
        Column("step", right=True),
    ),
    "steps": (
        _ID,
        Column(
            "when", lambda record: moment(record["finished_at"] or record["created_at"]), least=8
        ),
        Column("status", lambda record: _TAKEN.get(record["status"], record["status"]), least=9),
        _version("from", "parent"),
        _version("made", "version"),
        Column("samples", right=True),
        _metric("hinted", "hinted"),
        Column("losses", _losses, least=12),
        _metric("gradient", "grad_norm"),
        _metric("reward", "reward_mean"),
        _metric("clipped", "clip_share"),
        _metric("moved", "moved"),
        Column("apart", lambda record: apart(record["metrics"]), right=True, least=5),
        Column("cost", _usd),
        Column("error", lambda record: short(record["error"] or "", _LONGEST)),
    ),
    "versions": (
        _version("version", "id"),
        WHEN,
        _version("from", "parent"),
        Column("step", right=True),
        Column("saved"),
        Column("made by step", "made_by_step", right=True),
        Column("replies", "main_turns", right=True),
    ),
}
