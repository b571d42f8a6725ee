"""Summary figures of a ledger.

Rule: figures come from indexes and narrow tables; the wide rows of `turns` are not scanned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_claw.evidence import CLAIM, Rate, TwoRates, in_words, odds, record
from tinker_claw.ledger.database import FILE, Rows, reading
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.firsts import First, read_firsts
from tinker_claw.ledger.samples import read_queue, ready
from tinker_claw.ledger.turn_view import Record, count_outcomes, run_of
from tinker_claw.ledger.turns import OUTCOME
from tinker_claw.ledger.versions import gate_of, pinned, read_line, read_spent, read_versions
from tinker_claw.ledger.views import Filter, read

_VERDICTS = """
SELECT COUNT(*) FILTER (WHERE value = 1) AS good, COUNT(*) FILTER (WHERE value = 0) AS neutral,
  COUNT(*) FILTER (WHERE value = -1) AS bad, COUNT(*) FILTER (WHERE value IS NULL) AS none
FROM verdicts
"""
_LESSONS = """
SELECT COUNT(*) FILTER (WHERE state = 'told') AS told,
  COUNT(*) FILTER (WHERE state IN ('provisional', 'learned')) AS practised,
  MAX(id) FILTER (WHERE state = 'candidate') AS candidate,
  (SELECT id FROM lessons ORDER BY told_in DESC, id DESC LIMIT 1) AS newest,
  MAX(told_in) FILTER (WHERE state = 'told') AS session FROM lessons
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

_UNHEARD = """
SELECT user, SUM(judged = -1) AS rejections, SUM(hinted) AS hints FROM (
  SELECT user, judged, EXISTS (
      SELECT 1 FROM hints WHERE hints.turn_id = turns.id AND hints.source = 'judge') AS hinted,
    ROW_NUMBER() OVER (PARTITION BY user ORDER BY turns.id DESC) AS newest
  FROM verdicts CROSS JOIN next_states USING (turn_id) CROSS JOIN turns ON turns.id = turn_id
    CROSS JOIN sessions ON sessions.id = session_id
  WHERE judged IS NOT NULL AND verdicts.prompt IS NOT NULL AND role = 'user')
WHERE newest <= 100 GROUP BY user HAVING COUNT(*) = 100 AND (rejections < 4 OR hints = 0)
"""
"""SQL: the users of whose newest 100 judged messages the judge rejected fewer than 4, or made no
hint. People reject 11 %, so fewer than 4 come by chance in less than 1 % of such windows."""


LAST_STEPS = 5


def read_overview(directory: Path, batch_size: int) -> Record:
    """Return the figures of a data directory.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with reading(directory / FILE) as ledger, ledger.moment():
        return read_figures(ledger, batch_size)


def read_figures(rows: Rows, batch_size: int) -> Record:
    """Return the sums, and the newest steps, as `status --json` shows them.

    Args:
        batch_size: samples of a step.
    """
    firsts = read_live(rows)
    return (
        {
            "data_dir": str(rows.path.parent),
            "batch_size": batch_size,
            # Whether learning helps, one line per user.
            "headlines": read_headlines(rows, firsts),
            "run": run_of(rows),
            # The newest; None: the run has not begun.
            "policy_version": rows.one("SELECT MAX(id) FROM versions"),
            # The pinned version, which answers; None: the newest does.
            "pinned": pinned(rows),
            # Why learning is paused; None: it is not, or for refusals, which `gate` has.
            "held": read_spent(rows) or ((fallen := read_decline(rows)) and str(fallen)),
            # Optimizer steps from the base to the newest version.
            "step": rows.one("SELECT step FROM versions ORDER BY id DESC LIMIT 1") or 0,
            # Queued samples that steps could take.
            "samples_waiting": ready(read_queue(rows), batch_size),
        }
        | _conversations(rows)
        | _learning(rows)
        | _not_understood(rows)
        | _bills(rows)
        # Shares of first judged turns accepted, by version.
        | {"accepted": [share.record for share in accepted_by(firsts)]}
    )


def _conversations(rows: Rows) -> Record:
    """Sums over sessions and turns."""
    return {
        "sessions": rows.one("SELECT COUNT(*) FROM sessions"),
        # Private sessions, of which nothing is recorded.
        "private_sessions": rows.one("SELECT COUNT(*) FROM sessions WHERE private = 1"),
        # Episodes that wait for their outcome, and those that are over.
        "episodes": dict(rows.rows(_EPISODES)[0]),
        "turns": {"main": 0, "side": 0}
        | rows.pairs("SELECT kind, COUNT(*) FROM turns GROUP BY kind"),
    }


def _learning(rows: Rows) -> Record:
    """Sums over what was judged and trained."""
    return {
        # Judged turns by verdict; `none`: no vote was valid.
        "verdicts": dict(rows.rows(_VERDICTS)[0]),
        # Number of lessons that are told, and of those practised instead; the newest candidate, and
        # the one told first of late.
        "lessons": dict(rows.rows(_LESSONS)[0]),
        # Replies and sessions with explicit feedback, and replies where the judge's verdict
        # differs.
        "feedback": dict(rows.rows(_OUTRIGHT)[0]),
        # Turns with a hint.
        "hints": rows.one("SELECT COUNT(*) FROM hints WHERE rank = 0"),
        # Users whom the judge hardly hears.
        "unheard": [dict(row) for row in rows.rows(_UNHEARD)],
        # Samples by the state of their turn.
        "samples": rows.pairs(
            "SELECT state, COUNT(*) FROM turns WHERE state IN ('held', 'queued', 'trained') "
            "GROUP BY state"
        ),
        "steps": (steps := read(rows, "steps", Filter(), LAST_STEPS)),
        # The gate's results for their versions, newest first.
        "gate": [gate_result for step in reversed(steps) if (gate_result := gate_of(step))],
        "not_trained": dict(count_outcomes(rows).most_common()),
    }


def _not_understood(rows: Rows) -> Record:
    """Sums over what was not understood, or was not the owner's."""
    return {
        # Requests that could not be tied to a reply.
        "lost_next_states": rows.one("SELECT COUNT(*) FROM turns WHERE lost IS NOT NULL"),
        "unclear": rows.pairs(
            "SELECT client, COUNT(*) FROM turns WHERE asked_by = 'unknown' GROUP BY client"
        ),
        # The first in each chat service who wrote to the agent without being an owner.
        "strangers": [
            dict(row) for row in rows.rows("SELECT channel, sender, name FROM channels ORDER BY 1")
        ],
    }


def _bills(rows: Rows) -> Record:
    return {
        # By purpose, as far as prices were known; empty: nothing was billed.
        "usd": rows.pairs("SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose"),
        "judge_billed": dict(
            rows.rows(
                "SELECT COUNT(DISTINCT turn_id) AS turns, COALESCE(SUM(sampled), 0) AS answered, "
                "COALESCE(SUM(prefill + cached), 0) AS asked, TOTAL(usd) AS usd "
                "FROM spend WHERE purpose = 'judge'"
            )[0]
        ),
        "bills_without_price": rows.one("SELECT COUNT(*) FROM spend WHERE usd IS NULL"),
    }


# Whether learning helps on this user's own traffic, as far as their turns can tell. People look at
# these figures after every session, so claims need the e-values of evidence.py.


@dataclass(slots=True)
class Share(Rate):
    """A rate over the turns of a version."""

    version: int = 0

    @property
    def record(self) -> Record:
        return {"version": self.version, **record(self)}


def read_live(rows: Rows, user: str | None = None) -> list[First]:
    """Return the first judged turns, without those of versions that a rollback has left behind.
    `user`: only theirs; None: everybody's."""
    return read_firsts(rows, user, versions=read_line(rows).live)


def accepted_by(firsts: Iterable[First]) -> list[Share]:
    """Return the share of first judged turns accepted of each version, in order."""
    shares = dict[int, Share]()
    for first in firsts:
        shares.setdefault(first.version, Share(version=first.version)).add(first.accepted)
    return list(shares.values())


# The headline

NEWEST = 16
"""First judged turns that the share of the newest is of."""
LEAST = 8
"""Fewest first judged turns of the base, and of later versions, that are compared."""


def read_headlines(rows: Rows, firsts: Sequence[First], user: str | None = None) -> list[Record]:
    """Describe in one line per user whether learning helps: the shares accepted of the base's first
    judged turns and of later versions', whether these differ, and the share of the newest 16.

    Measured with a check after each of 240 sessions, the base's 16 first and eight a version. A
    change was claimed for none of 180 users without one. It was claimed for 38 of 60 users whose
    share rose from .38 to .90 over eight versions, after 120 sessions in the median.

    Args:
        firsts: of `read_live`.
        user: the only user; None: all.
    """
    of = defaultdict[str, list[First]](list)
    for first in firsts:
        of[first.user].append(first)
    base = {*rows.column("SELECT id FROM versions WHERE step = 0")}
    users = sorted(of) or [user or ""]
    lines = [headline(of[name], base) for name in users]
    return [
        {"user": name, **line, "said": f"{name}: " * (len(users) > 1) + line["said"]}
        for name, line in zip(users, lines, strict=True)
    ]


def headline(firsts: Sequence[First], base: Container[int]) -> Record:
    """Describe whether learning helps a user.

    A change is claimed if the two shares differ by the evidence, and the newest turns differ from
    the base's in the same direction. So it holds however often one looks.

    Args:
        firsts: the user's first judged turns, in order.
        base: versions that are the base.
    """
    later = [first for first in firsts if first.version not in base]
    of_base = _rate([first for first in firsts if first.version in base])
    since, newest = _rate(later), _rate(later[-NEWEST:])
    evidence, claim = None, "too few to compare"
    if min(of_base.of, since.of) >= LEAST:
        evidence, claim = TwoRates(of_base, since).e_value, "no clear change"
        rises = since.value > of_base.value
        if evidence >= CLAIM and rises == (newest.value > of_base.value):
            claim = f"{'better' if rises else 'worse'} ({odds(evidence)})"
    comparison = "none yet"
    if firsts:
        comparison = f"{in_words(record(of_base)) if of_base.of else 'none'} by the base model"
        comparison += f"; {in_words(record(since))} by later versions" * bool(since.of)
        comparison += f", {newest.value:.0%} of the newest {NEWEST}" * (since.of > NEWEST)
        comparison += f": {claim}"
    return {
        "said": f"First judged turns accepted: {comparison}",
        "base": record(of_base),
        "since": record(since),
        "newest": record(newest),
        "evidence": evidence,
    }


def _rate(firsts: Sequence[First]) -> Rate:
    return Rate(sum(first.accepted for first in firsts), len(firsts))


# Versions


def read_kept(rows: Rows) -> list[Record]:
    """Return all versions of the ledger, oldest first, and which of their files are left.

    `state`: learning can go on from it; `sampler`: it can answer. None: only the service knows.
    `lost`: why learning cannot go back to it; None: it can, as far as known. `accepted`: share of
    its first judged turns that were accepted; None: it has none.
    """
    records, directory = read_versions(rows), rows.path.parent
    accepted = {share.version: share.record for share in accepted_by(read_firsts(rows))}
    local = run_of(rows).get("backend") == "local"
    for version in records:
        there = (directory / "states" / version["state_ref"]).is_dir() if local else None
        sampler = (directory / "adapters" / version["sampler_ref"]).is_dir() if local else None
        version |= {"state": there, "sampler": sampler}
        version["accepted"] = accepted.get(version["id"])
        version["lost"] = _lost(version)
    return records


def _lost(version: Record) -> str | None:
    """Return why learning cannot go back to a version; None: it can, as far as known."""
    deleted = [name for name in ("state", "sampler") if version[name] is False]
    return (
        f"its {' and its '.join(deleted)} {'are' if deleted[1:] else 'is'} deleted"
        if deleted
        else None
    )


def usable(version: Record, *, with_state: bool = False) -> bool:
    """Return whether a version's weights, and its state if asked for, are there as far as known."""
    return version["sampler"] is not False and (version["state"] is not False or not with_state)
