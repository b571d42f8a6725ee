"""Figures of a day, read from its ledger when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.day.model import NAME, Script
from examples.tables import table
from tinker_claw.billing.prices import load
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.samples import JUDGED_BY
from tinker_claw.types import Usage

_STEPS: Final = f"""
SELECT SUM(NOT by_tools), SUM(by_tools) FROM (
  SELECT ({JUDGED_BY}) = 'tools' AS by_tools, step_id
  FROM samples JOIN turns ON turns.id = samples.turn_id
    JOIN sessions ON sessions.id = turns.session_id
    LEFT JOIN next_states ON next_states.turn_id = turns.id)
JOIN steps ON steps.id = step_id
WHERE steps.status = 'committed' GROUP BY step_id ORDER BY step_id
"""
COLUMNS: Final = (
    "day",
    "main requests",
    "steps: samples by the user + by tools",
    "dollars: serving, judging, learning",
    "in all; with every shared prefix cached",
)


@dataclass(frozen=True, slots=True)
class Day:
    """Figures of one day."""

    seed: int
    main: int
    """Requests of the agent's own conversation."""
    steps: tuple[tuple[int, int], ...]
    """Samples of each step that the user judged, and that tools judged."""
    usd: dict[str, float]
    """Dollars by purpose, with nothing found in the service's cache."""
    shared: int
    """Prompt tokens that began like an earlier prompt: at most these can come from a cache."""

    @property
    def total_usd(self) -> float:
        return sum(self.usd.values())


def read(data: Path, seed: int, script: Script) -> Day:
    """Read a day's figures."""
    with open_read_only(data / "ledger.sqlite3") as rows:
        return Day(
            seed,
            rows.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'"),
            tuple((user, tools) for user, tools in rows.rows(_STEPS)),
            rows.pairs("SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose"),
            script.shared,
        )


def markdown(days: Sequence[Day]) -> str:
    """Return the table, one row a day."""
    return "\n".join(table(COLUMNS, map(_row, days))) + "\n"


def _row(day: Day) -> Sequence[object]:
    usd = {purpose: day.usd.get(purpose, 0.0) for purpose in ("serve", "judge", "teacher", "train")}
    saved = load()[NAME].usd(Usage(prefill=day.shared, cached=-day.shared)) or 0.0
    learning = usd["teacher"] + usd["train"]
    return (
        day.seed,
        day.main,
        "; ".join(f"{user} + {tools}" for user, tools in day.steps) or "none",
        f"{usd['serve']:.2f}, {usd['judge']:.2f}, {learning:.2f}",
        f"${day.total_usd:.2f}; ${day.total_usd - saved:.2f}",
    )
