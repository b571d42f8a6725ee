"""`tinker-claw log`: show turns or steps as a table or as JSON lines.

Rule: no user's words without --full, but for how a turn begins on a terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import click

from tinker_claw.cli.common import (
    AS_JSON,
    Column,
    Invocation,
    command,
    note,
    number,
    table,
    version_name,
    write,
    write_json,
)
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import Rows, open_read_only
from tinker_claw.ledger.turn_view import Record, read_openings
from tinker_claw.ledger.views import VERDICTS, Filter, read_steps, read_turns, turns_in_full
from tinker_claw.words import moment, short, vote

ROWS = 50
"""Rows of a table, unless --limit says otherwise."""
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LONGEST = 40
"""Characters of a text in a table."""


def earliest(text: str) -> float:
    """Seconds since 1970 for an ISO time (local, unless it says otherwise) or a span like 2h.

    Raises:
        ConfigError: it is neither.
    """
    if span := re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)", text):
        return time.time() - float(span[1]) * _UNITS[span[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"--since {text}: give a time like 2026-03-05T14:00, or a span like 90min, 2h or 3d"
        ) from error


@command("log")
@click.argument(
    "what",
    type=click.Choice(["turns", "steps"]),
    default="turns",
    help="what to show (default turns)",
)
@click.option("--session", metavar="S", help="of this session: its number, or the client's name")
@click.option("--user", metavar="USER", help="of this user")
@click.option("--kind", type=click.Choice(["main", "side"]), help="turns of this kind")
@click.option("--verdict", type=click.Choice(VERDICTS), help="none: no vote was valid")
@click.option(
    "--trained/--untrained", default=None, help="turns that a step has trained on, or none has"
)
@click.option(
    "--since", type=earliest, metavar="WHEN", help="from then on: 2026-03-05T14:00, or 2h, 3d"
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help=f"the newest N rows (default {ROWS}; as JSON all)",
)
@AS_JSON
@click.option("--full", is_flag=True, help="turns with texts, ids and logprobs, as JSON lines")
def log(
    invoked: Invocation,
    *,
    what: str,
    limit: int | None,
    as_json: bool,
    full: bool,
    **filters: Any,
) -> None:
    """Show turns or steps, the newest last, also while the gateway runs.

    Texts are shown with --full only; on a terminal, how each turn began. by: the policy version
    that answered (*: not the current one). prompt, reply: tokens. Of steps, losses: one a pass.
    gradient: its norm. mean reward: -1 to 1. apart (sampler and trainer): nats a token. cost: US
    dollars.
    """
    limit, wanted = limit or (None if as_json or full else ROWS), Filter(**filters)
    if what == "steps" and (full or replace(wanted, since=None) != Filter()):
        raise ConfigError("of steps only --since and --limit choose some, and --full shows turns")
    with open_read_only(invoked.ledger) as ledger:
        with ledger.moment():
            # One row more shows whether there are earlier ones.
            records = _read(ledger, what, wanted, limit and limit + 1)
        newest = records[-limit:] if limit else records
        # Readers may be slow, and while a moment lasts the file cannot be tidied up.
        if full:
            write_json(turns_in_full(ledger, [row["id"] for row in newest], tokens=True))
        elif as_json:
            write_json(newest)
        elif newest:
            write(table(STEPS if what == "steps" else _turn_columns(ledger, newest), newest))
        else:
            note(f"no {what} in {ledger.path} fit")
    if len(newest) < len(records):
        note(f"earlier {what} are left out; --limit N shows more")


def _read(rows: Rows, what: str, wanted: Filter, limit: int | None) -> list[Record]:
    if what == "steps":
        return read_steps(rows, limit, wanted.since or 0)
    return read_turns(rows, wanted, limit)


def _turn_columns(ledger: Rows, records: Sequence[Record]) -> Sequence[Column]:
    if not sys.stdout.isatty():
        return _TURNS
    began = read_openings(ledger, (r["id"] for r in records), 2 * _LONGEST)
    words = Column("words", lambda r: short(_LONGEST, " ".join(began.get(r["id"], "").split())))
    return (*_TURNS[:-1], words, _TURNS[-1])


# What the tables show


def _verdict(record: Record) -> str | None:
    if not record["judged"]:
        return None
    by = "" if record["verdict_by"] == "judge" else f" {record['verdict_by']}"
    return vote(record["verdict"]) + by + (" hint" if record["hints"] else "")


def _version(record: Record) -> str:
    """Format the version that answered; `*` marks one that was not the current one."""
    return f"v{record['policy_version']}" + "*" * (record["fallback"] is not None)


def _apart(metrics: Mapping[str, Any]) -> float | str | None:
    """Format the k3 of sampler and trainer, in nats; `!` marks a real difference."""
    apart = metrics.get("agreement_k3")
    return f"{number(apart)}!" if metrics.get("agrees") is False else apart


_TURNS = (
    Column("id"),
    Column("when", "created_at", moment),
    Column("user", show=partial(short, 14)),
    Column("session"),
    Column("kind"),
    Column("for", "request_kind", partial(short, 16)),
    Column("by", _version),
    Column("prompt", "prompt_tokens"),
    Column("reply", "completion_tokens"),
    Column("verdict", _verdict),
    Column("outcome"),
)
_STATUS = {"committed": "taken", "intent": "under way"}
STEPS = (
    Column("step", "id"),
    Column("when", lambda step: moment(step["finished_at"] or step["created_at"])),
    Column("status", show=lambda status: _STATUS.get(status, status)),
    Column("made", "version", version_name),
    Column("samples"),
    Column("lesson"),
    Column("losses", "metrics", lambda metrics: " ".join(map(number, metrics.get("losses", ())))),
    Column("gradient", "metrics", lambda metrics: metrics.get("grad_norm")),
    Column("mean reward", "metrics", lambda metrics: metrics.get("reward_mean")),
    Column("apart", "metrics", _apart),
    Column("cost", "metrics", lambda metrics: (usd := metrics.get("usd")) and f"${usd:.4f}"),
    Column("error", show=partial(short, _LONGEST)),
)
