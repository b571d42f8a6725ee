"""Figures of a day, read from its ledger when it is over."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinker_claw.billing.prices import Price
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.figures import read_live
from tinker_claw.ledger.samples import JUDGED_BY
from tinker_claw.types import Usage

TOKENS_A_SECOND: Final = 50
"""Speed at which the model is taken to sample: no model ran, so the seconds are reckoned."""
_SAMPLES: Final = f"""
SELECT ({JUDGED_BY}) = 'tools' AS by_tools, step_id, reward, hint
FROM samples JOIN turns ON turns.id = samples.turn_id
  JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
"""
_STEPS: Final = f"""
SELECT SUM(NOT by_tools), SUM(by_tools), SUM(COALESCE(reward, 0) > 0),
  SUM(COALESCE(reward, 0) < 0), SUM(hint IS NOT NULL)
FROM ({_SAMPLES}) JOIN steps ON steps.id = step_id
WHERE steps.status = 'committed' GROUP BY step_id ORDER BY step_id
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """Samples that one step trained, by who judged them."""

    user: int
    """Judged by the person's own words."""
    tools: int
    praised: int
    rejected: int
    hinted: int

    def __str__(self) -> str:
        return f"{self.user} + {self.tools} ({self.praised}, {self.rejected}, {self.hinted})"


@dataclass(frozen=True, slots=True)
class Day:
    """Figures of one day."""

    seed: int
    main: int
    """Requests of the agent's own conversation."""
    side: int
    """Summaries and other requests that are never trained."""
    judged_by_user: int
    judged_by_tools: int
    steps: tuple[Trained, ...]
    usage: Usage
    usd: dict[str, float]
    """Dollars by purpose, with nothing found in the service's cache."""
    shared: int
    """Prompt tokens that began like an earlier prompt: at most these can come from a cache."""
    firsts: int
    """First judged turns."""
    silences: tuple[float, ...]
    """Seconds between each message and its reply, reckoned."""

    @property
    def total_usd(self) -> float:
        return sum(self.usd.values())


def read(data: Path, seed: int, silences: Sequence[int], shared: int) -> Day:
    """Read a day's figures. `silences`: tokens sampled for each message."""
    with open_read_only(data / "ledger.sqlite3") as rows:
        kinds = rows.pairs("SELECT kind, COUNT(*) FROM turns GROUP BY kind")
        judges = rows.pairs(f"SELECT by_tools, COUNT(*) FROM ({_SAMPLES}) GROUP BY by_tools")
        sums = rows.row("SELECT SUM(prefill), SUM(cached), SUM(sampled), SUM(trained) FROM spend")
        return Day(
            seed=seed,
            main=kinds.get("main", 0),
            side=kinds.get("side", 0),
            judged_by_user=judges.get(0, 0),
            judged_by_tools=judges.get(1, 0),
            steps=tuple(Trained(*row) for row in rows.rows(_STEPS)),
            usage=Usage(*(int(count or 0) for count in sums or ())),
            usd=rows.pairs("SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose"),
            shared=shared,
            firsts=len(read_live(rows)),
            silences=tuple(tokens / TOKENS_A_SECOND for tokens in silences),
        )


COLUMNS: Final = (
    "day",
    "requests: main, side",
    "samples: user, tools",
    "steps, each of user + tools (praised, rejected, hints)",
    "thousand tokens: in, out, trained",
    "dollars: serving, judging, learning",
    "in all; with every shared prefix cached",
    "silence: median, longest",
    "first judged turns",
)


def markdown(days: Sequence[Day], price: Price) -> str:
    """The table, one row a day."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(day, price) for day in days)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(day: Day, price: Price) -> Sequence[str]:
    usd, usage = day.usd, day.usage
    learning = usd.get("teacher", 0.0) + usd.get("train", 0.0)
    saved = price.usd(Usage(prefill=day.shared, cached=-day.shared)) or 0.0
    tokens = (usage.prefill + usage.cached, usage.sampled, usage.trained)
    return (
        str(day.seed),
        f"{day.main}, {day.side}",
        f"{day.judged_by_user}, {day.judged_by_tools}",
        "; ".join(map(str, day.steps)) or "none",
        ", ".join(f"{n / 1000:,.0f}" for n in tokens),
        ", ".join(f"{n:.2f}" for n in (usd.get("serve", 0.0), usd.get("judge", 0.0), learning)),
        f"${day.total_usd:.2f}; ${day.total_usd - saved:.2f}",
        f"{statistics.median(day.silences):.0f} s, {max(day.silences):.0f} s",
        str(day.firsts),
    )
