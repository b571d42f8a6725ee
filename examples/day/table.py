"""What a day came to, read from its ledger when it is over."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinker_claw.billing.prices import Price
from tinker_claw.ledger.database import Outside, reading
from tinker_claw.ledger.figures import read_headlines, read_live
from tinker_claw.ledger.samples import JUDGED_BY
from tinker_claw.types import Usage

TOKENS_A_SECOND: Final = 50
"""Speed at which the model is taken to sample: no model ran, so the seconds are reckoned."""
_SAMPLES: Final = f"""
SELECT ({JUDGED_BY}) = 'tools' AS by_tools, COALESCE(step_id, 0) AS step, samples.state AS state,
  reward, hint IS NOT NULL AS hinted
FROM samples JOIN turns ON turns.id = samples.turn_id
  JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """What one step trained: samples by who judged them."""

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
    messages: int
    main: int
    """Requests of the agent's own conversation."""
    side: int
    """Summaries and other requests that are never trained."""
    compactions: int
    """Requests for a summary; one compaction makes several."""
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
    headline: str
    silences: tuple[float, ...]
    """Seconds between each message and its reply, reckoned."""
    lost: int
    """Requests that could not be tied to the turn that they answer."""

    @property
    def total_usd(self) -> float:
        return sum(self.usd.values())


def read(data: Path, seed: int, silences: Sequence[int], shared: int) -> Day:
    """Read a day's figures. `silences`: tokens sampled for each message."""
    with reading(data / "ledger.sqlite3") as rows:
        samples = rows.rows(_SAMPLES)
        tools = sum(row["by_tools"] for row in samples)
        kinds = rows.pairs("SELECT kind, COUNT(*) FROM turns GROUP BY kind")
        firsts = read_live(rows)
        (headline,) = read_headlines(rows, firsts)
        return Day(
            seed=seed,
            messages=len(silences),
            main=kinds.get("main", 0),
            side=kinds.get("side", 0),
            compactions=rows.one("SELECT COUNT(*) FROM turns WHERE call = 'compaction'"),
            judged_by_user=len(samples) - tools,
            judged_by_tools=tools,
            steps=_steps(rows),
            usage=_usage(rows),
            usd=rows.pairs("SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose"),
            shared=shared,
            firsts=len(firsts),
            headline=headline["said"],
            silences=tuple(tokens / TOKENS_A_SECOND for tokens in silences),
            lost=rows.one("SELECT COUNT(*) FROM turns WHERE lost IS NOT NULL"),
        )


def _steps(rows: Outside) -> tuple[Trained, ...]:
    samples = rows.rows(_SAMPLES)
    steps = rows.column("SELECT id FROM steps WHERE status = 'committed' ORDER BY id")
    found = [[row for row in samples if row["step"] == step] for step in steps]
    return tuple(
        Trained(
            user=sum(not row["by_tools"] for row in batch),
            tools=sum(row["by_tools"] for row in batch),
            praised=sum((row["reward"] or 0) > 0 for row in batch),
            rejected=sum((row["reward"] or 0) < 0 for row in batch),
            hinted=sum(row["hinted"] for row in batch),
        )
        for batch in found
    )


def _usage(rows: Outside) -> Usage:
    sums = rows.row("SELECT SUM(prefill), SUM(cached), SUM(sampled), SUM(trained) FROM spend")
    return Usage(*(int(n or 0) for n in sums or ()))


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
