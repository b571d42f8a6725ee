"""`tinker-claw log`: show rows of the ledger as a table or as JSON lines.

Rule: no user's words without --full, but for how a turn begins on a terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tinker_claw.cli.common import (
    Column,
    LedgerCommand,
    note,
    number,
    short,
    table,
    version,
    write,
    write_json,
)
from tinker_claw.config.flags import WORD
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import Outside, open_read_only
from tinker_claw.ledger.turn_view import Record, read_openings
from tinker_claw.ledger.views import Filter, Table, in_full, read
from tinker_claw.words import moment, step_word, vote

ROWS = 50
"""Rows of a table, unless --limit says otherwise."""
_VERDICTS = {"good": "1", "+1": "1", "neutral": "0", "bad": "-1"}
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_OF_TURNS = {"session", "user", "kind", "verdict", "trained", "untrained"}
"""Filters that do not apply to steps."""


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


class Log(LedgerCommand):
    """Show rows of the ledger, the newest last, also while the gateway runs.

    Texts are shown with --full only; on a terminal, how each turn began. by: the policy version
    that answered (*: not the current one). prompt, reply: tokens. next: role of the message after
    the reply. advantage: the reward as it trains, above 0 for more of this. Of steps, losses: one a
    pass. gradient: its norm. mean reward: -1 to 1. clipped: a share of tokens. apart (sampler and
    trainer): nats a token. cost: US dollars.
    """

    table: Annotated[Table, WORD] = Field("turns", description="what to show (default turns)")
    session: str | None = Field(
        None, title="S", description="of this session: its number, or the client's name"
    )
    user: str | None = Field(None, description="of this user")
    kind: Literal["main", "side"] | None = Field(None, description="turns of this kind")
    verdict: Literal["good", "+1", "1", "neutral", "0", "bad", "-1", "none"] | None = Field(
        None, description="none: no vote was valid"
    )
    since: Annotated[float | None, BeforeValidator(lambda text: since(text, time.time()))] = Field(
        None, title="WHEN", description="from then on: 2026-03-05T14:00, or 2h, 3d"
    )
    trained: bool = Field(False, description="only rows that a step has trained on")
    untrained: bool = Field(False, description="only rows that no step has trained on")
    limit: int | None = Field(
        None,
        ge=1,
        title="N",
        description=f"the newest N rows (default {ROWS}; as JSON all)",
    )
    as_json: bool = Field(False, alias="json", description="one JSON object a line")
    full: bool = Field(False, description="with texts, ids and logprobs, as JSON lines")

    def run(self) -> int:
        limit = self.limit or (None if self.json_lines else ROWS)
        with open_read_only(self.ledger) as ledger:
            # One row more shows whether there are more than a table holds.
            most = limit if limit is None or self.json_lines else limit + 1
            with ledger.moment():
                records = read(ledger, self.table, self._filter, most)
            if records or self.json_lines:
                self._show(ledger, records if limit is None else records[-limit:])
            else:
                note(f"no {self.table} in {ledger.path} fit")
            if limit is not None and len(records) > limit:
                note(f"earlier {self.table} are left out; --limit N shows more")
        return 0

    @property
    def json_lines(self) -> bool:
        return self.as_json or self.full

    @property
    def _filter(self) -> Filter:
        if self.trained and self.untrained:
            raise ConfigError("--trained and --untrained exclude one another")
        if self.table == "steps":
            for name in self.model_fields_set & _OF_TURNS:
                raise ConfigError(f"--{name} goes with turns, verdicts, feedback and samples")
        return Filter(
            **self.model_dump(include={"session", "user", "kind", "since"}),
            verdict=_VERDICTS.get(self.verdict or "", self.verdict),
            trained=self.trained if self.trained or self.untrained else None,
        )

    def _show(self, ledger: Outside, records: Sequence[Record]) -> None:
        # Not in one moment: while that lasts, the file cannot be tidied up; readers may be slow.
        if self.full:
            write_json(in_full(ledger, self.table, record) for record in records)
        elif self.as_json:
            write_json(records)
        else:
            write(table(self._columns(ledger, records), records))

    def _columns(self, ledger: Outside, records: Sequence[Record]) -> tuple[Column, ...]:
        columns = COLUMNS[self.table]
        if self.table != "turns" or not sys.stdout.isatty():
            return columns
        began = read_openings(ledger, (r["id"] for r in records), 2 * _LONGEST)
        words = Column("words", lambda r: short(_LONGEST, " ".join(began.get(r["id"], "").split())))
        return (*columns[:-1], words, columns[-1])


# What the tables show

_LONGEST = 40


def _judged(record: Record) -> str | None:
    if not record.get("judged", True):
        return None
    by = "" if record["verdict_by"] == "judge" else f" {record['verdict_by']}"
    return vote(record["verdict"]) + by + (" hint" if record["hints"] else "")


def _version(record: Record) -> str:
    """Format the version that answered; `*` marks one that was not the current one."""
    return f"v{record['policy_version']}" + "*" * (record.get("fallback") is not None)


def _rewarded(record: Record) -> str | None:
    """Format the reward; `-` where that of an episode's step lacks its outcome."""
    has_reward = record["reward"] is not None and record["state"] != "held"
    return vote(record["reward"]) if has_reward else None


def _ended(record: Record) -> str:
    return moment(record.get("finished_at") or record["created_at"])


def _apart(metrics: Mapping[str, Any]) -> float | str | None:
    """Format the k3 of sampler and trainer, in nats; `!` marks a real difference."""
    apart = metrics.get("agreement_k3")
    return f"{number(apart)}!" if metrics.get("agrees") is False else apart


def _metric(name: str, of: str) -> Column:
    return Column(name, "metrics", lambda metrics: metrics.get(of))


_SHOWN: Mapping[str, Column] = {
    column.name: column
    for column in (
        Column("when", _ended),
        Column("user", show=partial(short, 14)),
        Column("for", "request_kind", partial(short, 16)),
        Column("by", _version),
        Column("prompt", "prompt_tokens"),
        Column("reply", "completion_tokens"),
        Column("next", "next_role"),
        Column("verdict", _judged),
        Column("votes", show=lambda votes: " ".join(map(vote, votes))),
        Column("score", show=lambda score: None if score is None else vote(score)),
        Column("said by", "source"),
        Column("of", "final", lambda final: "session" if final else "reply"),
        Column("not trained because", "unused"),
        Column("reward", _rewarded),
        Column("hint", "hinted"),
        Column("status", show=step_word),
        Column("from", "parent", version),
        Column("made", "version", version),
        Column("losses", "metrics", lambda m: " ".join(map(number, m.get("losses", ())))),
        _metric("hinted", "hinted"),
        _metric("gradient", "grad_norm"),
        _metric("mean reward", "reward_mean"),
        _metric("clipped", "clip_share"),
        Column("apart", "metrics", _apart),
        Column("cost", "metrics", lambda m: None if m.get("usd") is None else f"${m['usd']:.4f}"),
        Column("error", show=partial(short, _LONGEST)),
    )
}
"""Columns that show something else than the field of their name."""
_NAMES: Mapping[Table, str] = {
    "turns": "id,when,user,session,index,kind,for,by,prompt,reply,next,verdict,outcome",
    "verdicts": "turn,when,user,session,by,verdict,score,votes",
    "feedback": "id,turn,when,user,session,score,said by,of,task,group,not trained because",
    "samples": "id,turn,when,user,session,by,task,group,index,reward,hint,advantage,state,step",
    "steps": "id,when,status,from,made,samples,lesson,hinted,losses,gradient,mean reward,clipped,"
    "apart,cost,error",
}
COLUMNS: Mapping[Table, tuple[Column, ...]] = {
    table: tuple(_SHOWN.get(name) or Column(name) for name in names.split(","))
    for table, names in _NAMES.items()
}
