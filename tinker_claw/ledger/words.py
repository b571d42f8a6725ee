"""Short words for a turn's outcome or what it waits for, for tables and counts.

The word is computed in SQL, so that a table of turns and a count over all of them need no other
query; `outcome.py` makes a sentence of it.
"""

from __future__ import annotations

from collections import Counter

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.turns import OUTCOME

SIDE = "side turn"
NEXT = "waits for a next state"
IDLE = "waits for a next state in an idle session"
PASSED = "waits for a next state, and may wait for ever"
ENDING = "waits for its outcome"
GROUP = "waits for its group"
JUDGE = "waits for the judge"
QUEUE = "waits to be queued"
STEP = "waits for its step"
TRAINING = "being trained right now"
EXPIRED = "its sample expired"
QUARANTINED = "its sample was set aside"
_HEADS = (
    SIDE,
    "the teacher could not score it",
    "what its teacher would be told does not fit",
)
"""Beginnings of reasons that end with details of the turn."""
_REFUSED = " ".join(
    [
        "CASE",
        *(f"WHEN turns.untrained_because LIKE '{head}%' THEN '{head}'" for head in _HEADS),
        "ELSE RTRIM(turns.untrained_because, '.') END",
    ]
)
RUNNING = f"IIF(({OUTCOME}) IS NULL, '{ENDING}', IIF(group_id IS NULL, '{QUEUE}', '{GROUP}'))"
"""SQL on a row of `sessions`: the word for what its episode waits for."""
WORD = f"""
CASE state
  WHEN 'trained' THEN 'trained in step ' || samples.step_id
  WHEN 'queued' THEN IIF(EXISTS (SELECT 1 FROM step_samples JOIN steps AS taking
    ON taking.id = step_samples.step_id WHERE sample_id = samples.id AND taking.status = 'intent'),
    '{TRAINING}', '{STEP}')
  WHEN 'held' THEN {RUNNING}
  WHEN 'expired' THEN COALESCE(expired_because, '{EXPIRED}')
  WHEN 'quarantined' THEN '{QUARANTINED}'
  ELSE CASE
    WHEN turns.kind = 'side' THEN '{SIDE}'
    WHEN turns.untrained_because IS NOT NULL THEN {_REFUSED}
    WHEN verdicts.turn_id IS NOT NULL THEN '{QUEUE}'
    WHEN next_states.turn_id IS NOT NULL THEN '{JUDGE}'
    WHEN private = 1 OR EXISTS (SELECT 1 FROM turns AS later
      WHERE later.session_id = turns.session_id AND later.kind = 'main' AND later.idx > turns.idx)
      THEN '{PASSED}'
    WHEN episode = 1 THEN IIF(({OUTCOME}) IS NULL, '{ENDING}', '{QUEUE}')
    WHEN closed_at IS NULL THEN '{NEXT}'
    ELSE '{IDLE}' END END
"""
"""SQL on a row of `TURNS`: the word for its outcome."""
TURNS = (
    "turns JOIN sessions ON sessions.id = turns.session_id "
    "LEFT JOIN groups ON groups.id = group_id "
    "LEFT JOIN next_states ON next_states.turn_id = turns.id "
    "LEFT JOIN verdicts ON verdicts.turn_id = turns.id "
    "LEFT JOIN samples ON samples.turn_id = turns.id"
)
"""SQL joining turns with their sessions, groups, next states, verdicts and samples."""
_COUNTED = f"""
SELECT word, COUNT(*) FROM (
  SELECT {WORD} AS word FROM {TURNS} WHERE turns.id IN (SELECT id FROM turns WHERE settled = 0
    UNION SELECT turn_id FROM samples WHERE state IN ('queued', 'held'))
  UNION ALL SELECT {_REFUSED} FROM turns WHERE untrained_because IS NOT NULL
  UNION ALL SELECT IIF(state = 'expired', COALESCE(expired_because, '{EXPIRED}'), '{QUARANTINED}')
    FROM samples WHERE state IN ('expired', 'quarantined'))
GROUP BY word
"""


def count_outcomes(rows: Rows) -> Counter[str]:
    """Count the turns by the word for their outcome; those trained in a step are left out.

    Only the rows of `turns` that are open, held or queued are read, however many there are.
    """
    return Counter[str](rows.pairs(_COUNTED))
