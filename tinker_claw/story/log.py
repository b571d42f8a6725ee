"""`run.py log`: rows of the ledger as a table or as JSON lines, and new ones as they come.

Rule: no user's words without --full.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import get_args

from tinker_claw import config
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.full import in_full
from tinker_claw.ledger.listing import Filter, Record, Table, read
from tinker_claw.ledger.reading import Outside, reading
from tinker_claw.story.columns import COLUMNS
from tinker_claw.story.command import FLAGS_FROM_RUN, ledger_file, parse, until_left, write
from tinker_claw.story.follow import Following
from tinker_claw.story.table import table

ROWS = 50
"""Rows of a table, unless --limit says otherwise."""
FIRST_ROWS = 10
"""Rows with which --follow begins."""
_VERDICTS = {"good": "1", "+1": "1", "1": "1", "neutral": "0", "0": "0", "bad": "-1", "-1": "-1"}
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_OF_TURNS = ("session", "user", "kind", "verdict", "trained")
"""Filters that steps and versions know nothing of."""


def main(arguments: Sequence[str]) -> int:
    """Print the rows that are asked for.

    Raises:
        ConfigError: a flag or setting is wrong.
        LedgerError: there is no ledger, or it cannot be read.
    """
    given, settings = parse(parser(), arguments)
    wanted, limit = _filter(given), _limit(given)
    with until_left(), reading(ledger_file(settings)) as ledger:
        if given.follow:
            following = Following(ledger, given.table, wanted, full=given.full)
            following.run(limit, as_json=given.json or given.full)
        elif given.json or given.full:
            _as_json(ledger, given.table, wanted, limit, full=given.full)
        else:
            _as_table(ledger, given.table, wanted, limit)
    return 0


def _as_json(
    ledger: Outside, name: Table, wanted: Filter, limit: int | None, *, full: bool
) -> None:
    with ledger.moment():
        records = read(ledger, name, wanted, limit)
    # Not in one moment: while that lasts, the file cannot be tidied up, and readers may be slow.
    shown = (in_full(ledger, name, record) if full else record for record in records)
    write(map(json.dumps, shown))


def _as_table(ledger: Outside, name: Table, wanted: Filter, limit: int | None) -> None:
    with ledger.moment():
        records = read(ledger, name, wanted, None if limit is None else limit + 1)
    if not records:
        sys.stderr.write(f"tinker-claw: no {name} in {ledger.path} fit\n")
        return
    left_out = limit is not None and len(records) > limit
    shown: list[Record] = records[1:] if left_out else records
    write(table(COLUMNS[name], shown))
    if left_out:
        sys.stderr.write(f"tinker-claw: earlier {name} are left out; --limit N shows more\n")


def _limit(given: argparse.Namespace) -> int | None:
    if given.limit is not None:
        if given.limit < 1:
            raise ConfigError(f"--limit {given.limit}: give a number of rows, 1 or more")
        return int(given.limit)
    if given.follow:
        return FIRST_ROWS
    return None if given.json or given.full else ROWS


def _filter(given: argparse.Namespace) -> Filter:
    if given.table in ("steps", "versions"):
        for name in _OF_TURNS:
            if getattr(given, name) is not None:
                flag = "untrained" if given.trained is False and name == "trained" else name
                raise ConfigError(
                    f"--{flag} goes with turns, verdicts and samples, not with {given.table}"
                )
    return Filter(
        session=given.session,
        user=given.user,
        kind=given.kind,
        verdict=None if given.verdict is None else _VERDICTS.get(given.verdict, given.verdict),
        trained=given.trained,
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


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    top = config.Flags(
        prog="run.py log",
        description="Show rows of the ledger, the newest last, also while the gateway runs.",
        epilog=f"{FLAGS_FROM_RUN} Texts are shown with --full only.",
        allow_abbrev=False,
    )
    top.add_argument("table", choices=get_args(Table), help="what to show")
    top.add_argument(
        "--session", metavar="S", help="of this session: its number, or the client's name"
    )
    top.add_argument("--user", help="of this user")
    top.add_argument("--kind", choices=("main", "side"), help="turns of this kind")
    top.add_argument("--verdict", choices=(*_VERDICTS, "none"), help="none: no vote was valid")
    top.add_argument("--since", metavar="WHEN", help="from then on: 2026-03-05T14:00, or 2h, 3d")
    trained = top.add_mutually_exclusive_group()
    trained.add_argument(
        "--trained", action="store_true", default=None, help="what a step has trained on"
    )
    trained.add_argument(
        "--untrained", action="store_false", dest="trained", default=None, help="the others"
    )
    top.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"the newest N rows (default {ROWS}; as JSON all; {FIRST_ROWS} before --follow)",
    )
    top.add_argument("--json", action="store_true", help="one JSON object a line")
    top.add_argument(
        "--full", action="store_true", help="with texts, ids and logprobs, as JSON lines"
    )
    top.add_argument(
        "--follow",
        action="store_true",
        help="show new rows as they come, and a row again when something in it has changed, as "
        "when a verdict arrives: the last line of a row is how it stands",
    )
    return top
