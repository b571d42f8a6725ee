"""How many rows of a ledger are in which state."""

from __future__ import annotations

from tinker_claw.ledger.ledger import Ledger


def sample_counts(ledger: Ledger) -> dict[str, int]:
    """Samples in each state; of those that are held, where there are any."""
    none = dict.fromkeys(("queued", "trained", "expired", "quarantined"), 0)
    return none | ledger._db.pairs("SELECT state, COUNT(*) FROM samples GROUP BY state")


def step_counts(ledger: Ledger) -> dict[str, int]:
    """Steps of each status."""
    none = dict.fromkeys(("intent", "committed", "void"), 0)
    return none | ledger._db.pairs("SELECT status, COUNT(*) FROM steps GROUP BY status")


def verdict_counts(ledger: Ledger) -> dict[str, int]:
    """Verdicts of each value, and turns with hints."""
    rows = ledger._db
    found = rows.pairs("SELECT value, COUNT(*) FROM verdicts GROUP BY value")
    names = {1: "good", 0: "neutral", -1: "bad", None: "none"}
    hints = rows.one("SELECT COUNT(DISTINCT turn_id) FROM hints")
    return {name: found.get(value, 0) for value, name in names.items()} | {"hints": hints}


def session_outcome(ledger: Ledger, session_id: int) -> float | None:
    """How a session ended, as it was said last; None: nobody has said so."""
    return ledger._db.one(
        "SELECT score FROM feedback WHERE session_id = ? AND final = 1 ORDER BY id DESC LIMIT 1",
        session_id,
    )
