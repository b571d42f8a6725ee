"""`run.py log`: rows of the ledger as a table or as JSON lines, and new ones as they come.

Rule: no user's words without --full.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

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
    vote,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import Outside, reading
from tinker_claw.ledger.outcome import moment, outcome
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
        if self.limit is not None or self.follow:
            return self.limit or FIRST_ROWS
        return None if self.as_lines else ROWS


def log(given: LogFlags) -> int:
    """Print the rows that are asked for.

    Raises:
        ConfigError: a flag or setting is wrong.
        LedgerError: there is no ledger, or it cannot be read.
    """
    batch_size = given.settings.training.batch_size
    wanted, limit = _filter(given), given.rows
    with until_left(), reading(given.ledger) as ledger:
        if given.follow:
            following = Following(ledger, given.table, wanted, batch_size, full=given.full)
            following.run(limit, as_json=given.as_lines)
            return 0
        # A row more says whether there are more than a table shows.
        most = limit if limit is None or given.as_lines else limit + 1
        with ledger.moment():
            records = _read(ledger, given.table, wanted, most, batch_size)
        # Not in one moment: while that lasts, the file cannot be tidied up; readers may be slow.
        if given.full:
            write_json(in_full(ledger, given.table, record) for record in records)
        elif given.as_json:
            write_json(records)
        elif not records:
            note(f"no {given.table} in {ledger.path} fit")
        else:
            write(table(COLUMNS[given.table], records if limit is None else records[-limit:]))
            if limit is not None and len(records) > limit:
                note(f"earlier {given.table} are left out; --limit N shows more")
    return 0


def _filter(given: LogFlags) -> Filter:
    if given.trained and given.untrained:
        raise ConfigError("--trained and --untrained exclude one another")
    if given.table in ("steps", "versions"):
        for name in given.model_fields_set & _OF_TURNS:
            raise ConfigError(
                f"--{name} goes with turns, verdicts and samples, not with {given.table}"
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


def _when(record: _Record) -> str:
    return moment(record["created_at"])


def _as_is(name: str) -> Column:
    return Column(name, lambda record: _text(record[name]))


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _right(name: str, key: str | None = None, least: int = 0) -> Column:
    return Column(name, lambda record: _text(record[key or name]), right=True, least=least)


def _version(name: str, key: str, least: int = 3) -> Column:
    return Column(name, lambda r: "-" if r[key] is None else f"v{r[key]}", least=least)


def _judged(record: _Record) -> str:
    if not record["judged"]:
        return "-"
    return vote(record["verdict"]) + (" hint" if record["hints"] else "")


def _by(record: _Record) -> str:
    return f"v{record['policy_version']}" + ("*" if record["fallback"] is not None else "")


def _usd(record: _Record) -> str:
    usd = record["metrics"].get("usd")
    return "-" if usd is None else f"${usd:.4f}"


def _metric(name: str, key: str) -> Column:
    return Column(name, lambda record: number(record["metrics"].get(key)), right=True, least=5)


def _losses(record: _Record) -> str:
    return " ".join(number(loss) for loss in record["metrics"].get("losses", ())) or "-"


_WHEN = Column("when", _when, least=8)
_ID = _right("id", least=4)
_TURN = _right("turn", least=4)
_SESSION = _right("session", least=4)
_USER = Column("user", lambda record: short(record["user"], 14), least=4)

COLUMNS: dict[Table, tuple[Column, ...]] = {
    "turns": (
        *(_ID, _WHEN, _USER, _SESSION, _right("index"), _as_is("kind")),
        Column("for", lambda record: short(_text(record["call"]), 16)),
        Column("by", _by, least=3),
        _right("prompt", "prompt_tokens", least=5),
        _right("reply", "completion_tokens", least=4),
        Column("next", lambda record: "yes" if record["has_next_state"] else "-"),
        Column("verdict", _judged, least=7),
        Column("outcome", lambda record: record["outcome"]),
    ),
    "verdicts": (
        *(_TURN, _WHEN, _USER, _SESSION, _version("by", "policy_version")),
        Column("verdict", lambda record: vote(record["verdict"])),
        Column("votes", lambda record: " ".join(map(vote, record["votes"])) or "-", least=8),
        _right("hints"),
    ),
    "samples": (
        *(_ID, _TURN, _WHEN, _USER, _SESSION, _version("by", "policy_version")),
        Column("reward", lambda r: "-" if r["reward"] is None else vote(r["reward"])),
        Column("hint", lambda record: "yes" if record["hinted"] else "-"),
        Column("state", lambda record: record["state"], least=7),
        _right("step"),
    ),
    "steps": (
        *(_ID, _WHEN, Column("status", lambda record: record["status"], least=9)),
        *(_version("from", "parent"), _version("made", "version")),
        *(_right("samples"), _metric("hinted", "hinted"), Column("losses", _losses, least=12)),
        *(_metric("gradient", "grad_norm"), _metric("reward", "reward_mean")),
        _metric("clipped", "clip_share"),
        _metric("moved", "moved"),
        Column("apart", lambda record: apart(record["metrics"]), right=True, least=5),
        Column("cost", _usd),
        Column("error", lambda record: short(record["error"] or "", _LONGEST)),
    ),
    "versions": (
        *(_version("version", "id"), _WHEN, _version("from", "parent"), _right("step")),
        Column("saved", lambda record: "yes" if record["saved"] else "-"),
        *(_right("made by step", "made_by_step"), _right("replies", "main_turns")),
    ),
}


# New rows as they come

POLL_S = 0.3
WATCHED = 500
"""Rows behind the newest that are watched for changes."""


class Following:
    """Watches a table of a ledger.

    A row is shown when it appears, and again, whole, when something in it has changed; of several
    lines with one id the last one holds. What changes far behind the newest rows is not shown.
    """

    def __init__(
        self, ledger: Outside, name: Table, wanted: Filter, batch_size: int, *, full: bool
    ) -> None:
        self._ledger = ledger
        self._batch_size = batch_size
        self._name: Table = name
        self._wanted = wanted
        self._full = full
        self._known: dict[int, Record] = {}

    def run(self, first: int | None, *, as_json: bool) -> None:
        """Show the newest `first` rows, then what comes, until interrupted."""
        with self._ledger.moment():
            records = self._read()
        shown = records if first is None else records[-first:]
        if as_json:
            self._show_json(shown)
        else:
            write(table(COLUMNS[self._name], shown))
        self._known = {_id(record): record for record in records}
        seen = -1
        while True:
            changes = self._ledger.changes()
            if changes != seen:
                seen = changes
                with self._ledger.moment():
                    new = self._new()
                if as_json:
                    self._show_json(new)
                elif new:
                    write(table(COLUMNS[self._name], new, heading=False))
            time.sleep(POLL_S)

    def _new(self) -> list[Record]:
        records = self._read()
        new = [record for record in records if self._known.get(_id(record)) != record]
        self._known = {_id(record): record for record in records}
        return new

    def _read(self) -> list[Record]:
        # What lies far behind is not looked through again with every change.
        newest = self._ledger.one("SELECT MAX(id) FROM turns") or 0
        turns = self._name in ("turns", "verdicts", "samples")
        after = max(0, newest - 2 * WATCHED) if turns else 0
        wanted = replace(self._wanted, after=after)
        return _read(self._ledger, self._name, wanted, WATCHED, self._batch_size)

    def _show_json(self, records: list[Record]) -> None:
        for record in records:
            shown = in_full(self._ledger, self._name, record) if self._full else record
            write_json([shown])


def _read(
    ledger: Outside, name: Table, wanted: Filter, limit: int | None, batch_size: int
) -> list[Record]:
    run = read_run_view(ledger, batch_size)
    return read(ledger, name, wanted, limit, lambda turn: outcome(turn, run).word)


def _id(record: Record) -> int:
    return int(record.get("id", record.get("turn", 0)))
