"""Summary figures of a ledger.

Rule: figures come from indexes and narrow tables; the wide rows of `turns` are not scanned.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from tinker_claw.evidence import CLAIM, Rate, TwoRates, in_words, odds, record
from tinker_claw.ledger.database import FILE, Rows, open_read_only
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.firsts import First, read_firsts, share_of
from tinker_claw.ledger.reference import gate_of, read_fallen
from tinker_claw.ledger.samples import read_queue, ready
from tinker_claw.ledger.turn_view import Record, count_outcomes, run_of
from tinker_claw.ledger.versions import live_versions, pinned, read_versions
from tinker_claw.ledger.views import read_steps

_SUMS = """
SELECT (SELECT MAX(id) FROM versions) AS policy_version,
  COALESCE((SELECT step FROM versions ORDER BY id DESC LIMIT 1), 0) AS step,
  (SELECT COUNT(*) FROM sessions) AS sessions,
  (SELECT COUNT(*) FROM sessions WHERE private = 1) AS private_sessions,
  (SELECT COUNT(*) FROM turns WHERE lost IS NOT NULL) AS lost_next_states,
  (SELECT COUNT(*) FROM hints WHERE rank = 0) AS hints,
  (SELECT COUNT(DISTINCT turn_id) FROM feedback WHERE final = 0) AS rated,
  (SELECT COUNT(*) FROM verdicts WHERE score IS NOT NULL AND judged <> value) AS unlike_judge,
  (SELECT MAX(id) FROM lessons WHERE state = 'candidate') AS candidate
"""
"""Figures that are numbers. `policy_version`: the newest; None: the run has not begun. `step`:
committed steps from the base to it. `lost_next_states`: requests that could not be tied to a reply.
`candidate`: the newest lesson that its user has not kept yet."""
_GROUPS: Mapping[str, str] = {
    "turns": "SELECT kind, COUNT(*) FROM turns GROUP BY kind",
    "samples": "SELECT state, COUNT(*) FROM turns WHERE state IN ('held', 'queued', 'trained') "
    "GROUP BY state",
    "usd": "SELECT purpose, TOTAL(usd) FROM spend GROUP BY purpose",
}
"""Figures that are numbers by what they are of. `usd`: as far as prices were known."""
_VERDICTS = """
SELECT COUNT(*) FILTER (WHERE value = 1) AS good, COUNT(*) FILTER (WHERE value = 0) AS neutral,
  COUNT(*) FILTER (WHERE value = -1) AS bad, COUNT(*) FILTER (WHERE value IS NULL) AS none
FROM verdicts
"""
"""none: no vote was valid."""
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
_STRANGERS = "SELECT channel, sender, name FROM channels ORDER BY 1"
"""SQL: the first in each chat service who wrote to the agent without being an owner."""
LAST_STEPS = 5


def read_overview(directory: Path, batch_size: int) -> Record:
    """Return the figures of a data directory.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with open_read_only(directory / FILE) as ledger, ledger.moment():
        return read_figures(ledger, batch_size)


def read_figures(rows: Rows, batch_size: int) -> Record:
    """Return the sums, and the newest steps, as `status --json` shows them.

    Args:
        batch_size: samples of a step.
    """
    firsts, steps = read_live(rows), read_steps(rows, LAST_STEPS)
    groups = {name: rows.pairs(query) for name, query in _GROUPS.items()}
    return {
        "data_dir": str(rows.path.parent),
        "batch_size": batch_size,
        # Whether learning helps, one line per user.
        "headlines": read_headlines(rows, firsts),
        "run": run_of(rows),
        # The pinned version, which answers; None: the newest does.
        "pinned": pinned(rows),
        # Why learning is paused; None: it is not, or for refusals, which `gate` has.
        "held": read_fallen(rows) or ((fallen := read_decline(rows)) and str(fallen)),
        # Queued samples that steps could take.
        "samples_waiting": ready(read_queue(rows), batch_size),
        **dict(rows.rows(_SUMS)[0]),
        **groups,
        "turns": {"main": 0, "side": 0} | groups["turns"],
        "verdicts": dict(rows.rows(_VERDICTS)[0]),
        # Users whom the judge hardly hears.
        "unheard": [dict(row) for row in rows.rows(_UNHEARD)],
        "strangers": [dict(row) for row in rows.rows(_STRANGERS)],
        "steps": steps,
        # The gate's results for their versions, newest first.
        "gate": [result for step in reversed(steps) if (result := gate_of(step))],
        "not_trained": dict(count_outcomes(rows).most_common()),
        # Shares of first judged turns accepted, by version.
        "accepted": [*accepted_by(firsts).values()],
    }


# Whether learning helps on this user's own traffic, as far as their turns can tell. People look at
# these figures after every session, so claims need the e-values of evidence.py.


def read_live(rows: Rows, user: str | None = None) -> list[First]:
    """Return the first judged turns, without those of versions that a rollback has left behind.
    `user`: only theirs; None: everybody's."""
    live = live_versions(rows)
    return [first for first in read_firsts(rows, user) if first.version in live]


def accepted_by(firsts: Iterable[First]) -> dict[int, Record]:
    """Return the share of first judged turns accepted of each version, in order."""
    shares = defaultdict[int, Rate](Rate)
    for first in firsts:
        shares[first.version].add(first.accepted)
    return {id: {"version": id, **record(share)} for id, share in shares.items()}


# The headline

NEWEST = 16
"""First judged turns that the share of the newest is of, and that of a user who came later at
first."""
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
    the base's in the same direction. So it holds however often one looks. A user who came when the
    base had ceased to answer is compared with their own first 16 turns.

    Args:
        firsts: the user's first judged turns, in order.
        base: versions that are the base.
    """
    before = [first for first in firsts if first.version in base]
    later, by = [first for first in firsts if first.version not in base], "by the base model"
    if len(before) < LEAST and len(firsts) >= NEWEST + LEAST:
        before, later, by = list(firsts[:NEWEST]), list(firsts[NEWEST:]), "at first"
    at_first, since, newest = map(share_of, (before, later, later[-NEWEST:]))
    evidence, claim = _claim(at_first, since, newest)
    comparison = (
        f"{in_words(record(at_first)) if at_first.of else 'none'} {by}"
        + f"; {in_words(record(since))} by later versions" * bool(since.of)
        + f", {newest.value:.0%} of the newest {NEWEST}" * (since.of > NEWEST)
        + f": {claim}"
    )
    return {
        "said": f"First judged turns accepted: {comparison if firsts else 'none yet'}",
        "base": record(at_first),
        "since": record(since),
        "newest": record(newest),
        "evidence": evidence,
    }


def _claim(at_first: Rate, since: Rate, newest: Rate) -> tuple[float | None, str]:
    """Return the evidence that the rate has changed, and what it lets one say."""
    if min(at_first.of, since.of) < LEAST:
        return None, "too few to compare"
    evidence, rises = TwoRates(at_first, since).e_value, since.value > at_first.value
    if evidence >= CLAIM and rises == (newest.value > at_first.value):
        return evidence, f"{'better' if rises else 'worse'} ({odds(evidence)})"
    return evidence, "no clear change"


# Versions


def read_stored(rows: Rows) -> list[Record]:
    """Return all versions of the ledger, oldest first, and which of their files are left.

    `state`: learning can go on from it; `sampler`: it can answer. None: only the service knows.
    `lost`: why learning cannot go back to it; None: it can, as far as known. `accepted`: share of
    its first judged turns that were accepted; None: it has none.
    """
    records, directory = read_versions(rows), rows.path.parent
    accepted = accepted_by(read_firsts(rows))
    local = run_of(rows).get("backend") == "local"
    states, samplers = _names(directory / "states"), _names(directory / "adapters")
    for version in records:
        version["state"] = version["state_ref"] in states if local else None
        version["sampler"] = version["sampler_ref"] in samplers if local else None
        version["accepted"] = accepted.get(version["id"])
        deleted = [name for name in ("state", "sampler") if version[name] is False]
        are = "are" if deleted[1:] else "is"
        version["lost"] = f"its {' and its '.join(deleted)} {are} deleted" if deleted else None
    return records


def _names(folder: Path) -> frozenset[str]:
    """Return the names in a folder; none where it is absent."""
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def usable(version: Record, *, with_state: bool = False) -> bool:
    """Return whether a version's weights, and its state if asked for, are there as far as known."""
    return version["sampler"] is not False and (version["state"] is not False or not with_state)
