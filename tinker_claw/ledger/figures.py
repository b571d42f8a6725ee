"""Summary figures of a ledger.

Rule: figures come from indexes and narrow tables; the wide rows of `turns` are not scanned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tinker_claw.evidence import CLAIM, Rate, TwoRates, record
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.outcome import RunView, run_of
from tinker_claw.ledger.turns import OUTCOME
from tinker_claw.ledger.versions import gate_of, pinned, read_line
from tinker_claw.ledger.views import Filter, Record, read
from tinker_claw.ledger.words import count_outcomes

# First replies are the first main turns of their sessions. A stand-in's replies count for no
# version: the base model's would be v0's, and others came while the service was in trouble.
# Episodes are left out, as they have an outcome: the reply that solves a task has no next state, so
# the other replies are rejected ones.
_BY_VERSION = """
SELECT policy_version AS version, user, COUNT(*) AS firsts,
  COUNT(*) FILTER (WHERE value >= 0) AS accepted
FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id
CROSS JOIN sessions ON sessions.id = session_id
WHERE kind = 'main' AND idx = 0 AND fallback IS NULL AND value IS NOT NULL AND episode = 0
  AND user = COALESCE(?, user)
GROUP BY 1, 2 ORDER BY 1
"""
_VERDICTS = """
SELECT COUNT(*) FILTER (WHERE value = 1) AS good, COUNT(*) FILTER (WHERE value = 0) AS neutral,
  COUNT(*) FILTER (WHERE value = -1) AS bad, COUNT(*) FILTER (WHERE value IS NULL) AS none
FROM verdicts
"""
_EPISODES = f"""
SELECT COUNT(*) FILTER (WHERE running) AS running, COUNT(*) FILTER (WHERE NOT running) AS over
FROM (SELECT episode = 1 AND ({OUTCOME}) IS NULL AS running FROM sessions WHERE episode <> 0)
"""
_OUTRIGHT = """
SELECT COUNT(DISTINCT CASE WHEN final = 0 THEN turn_id END) AS replies,
  COUNT(DISTINCT CASE WHEN final = 1 THEN session_id END) AS sessions,
  (SELECT COUNT(*) FROM verdicts WHERE score IS NOT NULL AND judged <> value) AS unlike
FROM feedback
"""


def read_figures(rows: Rows, run: RunView, steps: int) -> Record:
    """Return the sums, and the newest `steps` steps, as `status --json` shows them."""
    judged = by_version(rows)
    return {
        # Whether learning helps, one line per user.
        "headlines": read_headlines(judged),
        "run": run_of(rows),
        # The newest; None: the run has not begun.
        "policy_version": rows.one("SELECT MAX(id) FROM versions"),
        # The pinned version, which answers; None: the newest does.
        "pinned": pinned(rows),
        # Why learning is held; None: it is not, or for refusals, which `gate` has.
        "held": (fallen := read_decline(rows)) and str(fallen),
        # Optimizer steps from the base to the newest version.
        "step": run.step,
        "samples_waiting": run.queued,
        "sessions": rows.one("SELECT COUNT(*) FROM sessions"),
        # Private sessions, of which nothing is recorded.
        "private_sessions": rows.one("SELECT COUNT(*) FROM sessions WHERE private = 1"),
        # Episodes that wait for their outcome, and those that are over.
        "episodes": dict(rows.rows(_EPISODES)[0]),
        "turns": {"main": 0, "side": 0}
        | rows.pairs("SELECT kind, COUNT(*) FROM turns GROUP BY kind"),
        # Judged turns by verdict; `none`: no vote was valid.
        "verdicts": dict(rows.rows(_VERDICTS)[0]),
        # Replies and sessions with explicit feedback, and replies where the judge's verdict
        # differs.
        "feedback": dict(rows.rows(_OUTRIGHT)[0]),
        # Turns with a hint.
        "hints": rows.one("SELECT COUNT(*) FROM hints WHERE rank = 0"),
        "samples": rows.pairs("SELECT state, COUNT(*) FROM samples GROUP BY state"),
        "steps": (taken := read(rows, "steps", Filter(), steps)),
        # The gate's results for their versions, newest first.
        "gate": [said for step in reversed(taken) if (said := gate_of(step))],
        "not_trained": dict(count_outcomes(rows).most_common()),
        # Requests that could not be tied to the turn that they answer, by cause.
        "lost_next_states": rows.pairs(
            "SELECT lost, COUNT(*) FROM turns WHERE lost IS NOT NULL GROUP BY lost"
        ),
        "not_understood": rows.pairs(
            "SELECT client, COUNT(*) FROM turns WHERE call = 'unknown' GROUP BY client"
        ),
        # Chat services in which others than the owner wrote, directly and in groups.
        "strangers": {
            name: rows.column(f"SELECT DISTINCT channel FROM channels WHERE {column} ORDER BY 1")
            for name, column in (("direct", "strangers"), ("groups", "groups"))
        },
        # By purpose, as far as prices were known; empty: nothing was billed.
        "usd": rows.pairs("SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose"),
        "bills_without_price": rows.one("SELECT COUNT(*) FROM spend WHERE usd IS NULL"),
        # Shares of first replies accepted, by version.
        "accepted": [share.record for share in accepted_by(judged)],
    }


# Whether learning helps on this user's own traffic, as far as their turns can tell. People look at
# these figures after every session, so claims need the e-values of evidence.py.


@dataclass(slots=True)
class Share(Rate):
    """A rate over the replies of some successive versions."""

    first: int = 0
    last: int = 0

    @property
    def versions(self) -> str:
        return f"v{self.first}" if self.first == self.last else f"v{self.first} to v{self.last}"

    @property
    def record(self) -> Record:
        return {"versions": self.versions, **record(self)}


def by_version(rows: Rows, user: str | None = None, *, behind: bool = False) -> list[Record]:
    """Return counts of first replies with a verdict, and of accepted ones, by version and user,
    versions in order.

    Args:
        user: only theirs; None: everybody's.
        behind: whether to include versions that a rollback has left behind.
    """
    live, found = read_line(rows).live, rows.rows(_BY_VERSION, user)
    return [dict(row) for row in found if behind or row["version"] in live]


def accepted_by(judged: Iterable[Record]) -> list[Share]:
    """Return the share of first replies accepted of each version, in order. `judged`: of
    `by_version`."""
    found = dict[int, Share]()
    for row in judged:
        share = Share(row["accepted"], row["firsts"], at := row["version"], at)
        found[at] = _join(found[at], share) if at in found else share
    return list(found.values())


def _join(one: Share, other: Share) -> Share:
    first, last = min(one.first, other.first), max(one.last, other.last)
    return Share(one.good + other.good, one.of + other.of, first, last)


def _gather(shares: Iterable[Share], enough: float = math.inf) -> Share | None:
    """Join shares until they have enough replies; None: there is no share."""
    found = None
    for found in accumulate(shares, _join):
        if found.of >= enough:
            break
    return found


# The headline

LEAST = 16
"""Fewest first replies on either side of the headline's comparison."""
MOST = 64
"""Replies at which a side takes no further version, if there are three times as many in all."""


def read_headlines(judged: Sequence[Record], user: str | None = None) -> list[Record]:
    """Describe in one line per user whether learning helps: shares of first replies accepted by the
    earliest and the newest versions.

    The two sides are chosen by numbers of replies alone, and a change is claimed by the evidence
    that they differ. Checked after each of 240 sessions, a change was claimed for 1 of 180 users
    without one, and for 57 of 60 with a rise from .38 to .90 over eight versions, after 74 sessions
    in the median.

    Args:
        judged: of `by_version`.
        user: the only user; None: all.
    """
    of = defaultdict[str, list[Record]](list)
    for row in judged:
        of[row["user"]].append(row)
    users = sorted(of) or [user or ""]
    lines = [_headline(of[name]) for name in users]
    return [
        {"user": name, **line, "said": f"{name}: " * (len(users) > 1) + line["said"]}
        for name, line in zip(users, lines, strict=True)
    ]


def _headline(judged: Sequence[Record]) -> Record:
    shares = accepted_by(judged)
    size = min(MOST, max(LEAST, sum(share.of for share in shares) // 3))
    old = _gather(shares, size) or Share()
    new = _gather([share for share in reversed(shares) if share.first > old.last], size) or Share()
    evidence = None
    if old.of < LEAST:
        said = f"not enough ratings yet: {old.of} of {LEAST}"
    elif new.of < LEAST:
        said = f"{old.value:.0%} ({old.versions}); not enough ratings since: {new.of} of {LEAST}"
    else:
        evidence = TwoRates(old, new).e_value
        change = "better" if new.value > old.value else "worse"
        change = change if evidence >= CLAIM else "no clear change"
        said = f"{old.value:.0%} -> {new.value:.0%} ({old.versions} -> {new.versions}): {change}"
    return {
        "said": f"First replies accepted: {said}",
        "before": old.record,
        "since": new.record,
        "evidence": evidence,
    }
