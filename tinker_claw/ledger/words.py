"""A turn's outcome, or what it waits for, as SQL computes it.

A table of turns, and a count over all of them, need no other query. SQL knows numbers of `Why`
only: `why.in_words` makes words of them, and `outcome.py` sentences.
"""

from __future__ import annotations

from collections import Counter

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.turns import OUTCOME
from tinker_claw.why import COUNTED, Why, in_words

_REFUSED = (
    f"IIF(turns.why IN ({', '.join(f'{why:d}' for why in COUNTED)}), turns.why, "
    "RTRIM(turns.untrained_because, '.'))"
)
RUNNING = (
    f"IIF(({OUTCOME}) IS NULL, {Why.ENDING:d}, IIF(group_id IS NULL, {Why.QUEUE:d}, {Why.GROUP:d}))"
)
"""SQL on a row of `sessions`: what its episode waits for, as a number of `Why`."""
WORD = f"""
CASE state
  WHEN 'trained' THEN -samples.step_id
  WHEN 'queued' THEN IIF(EXISTS (SELECT 1 FROM step_samples JOIN steps AS taking
    ON taking.id = step_samples.step_id WHERE sample_id = samples.id AND taking.status = 'intent'),
    {Why.TRAINING:d}, {Why.STEP:d})
  WHEN 'held' THEN {RUNNING}
  WHEN 'expired' THEN COALESCE(expired_because, {Why.EXPIRED:d})
  WHEN 'quarantined' THEN {Why.QUARANTINED:d}
  ELSE CASE
    WHEN turns.kind = 'side' THEN {Why.SIDE:d}
    WHEN turns.why IS NOT NULL THEN {_REFUSED}
    WHEN verdicts.turn_id IS NOT NULL THEN {Why.QUEUE:d}
    WHEN next_states.turn_id IS NOT NULL THEN {Why.JUDGE:d}
    WHEN private = 1 OR EXISTS (SELECT 1 FROM turns AS later
      WHERE later.session_id = turns.session_id AND later.kind = 'main' AND later.idx > turns.idx)
      THEN {Why.PASSED:d}
    WHEN episode = 1 THEN IIF(({OUTCOME}) IS NULL, {Why.ENDING:d}, {Why.QUEUE:d})
    WHEN closed_at IS NULL THEN {Why.NEXT:d}
    ELSE {Why.IDLE:d} END END
"""
"""SQL on a row of `TURNS`: its outcome, as `why.in_words` takes it."""
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
  UNION ALL SELECT {_REFUSED} FROM turns WHERE why IS NOT NULL
  UNION ALL SELECT IIF(state = 'expired', COALESCE(expired_because, {Why.EXPIRED:d}),
    {Why.QUARANTINED:d}) FROM samples WHERE state IN ('expired', 'quarantined'))
GROUP BY word
"""


def count_outcomes(rows: Rows) -> Counter[str]:
    """Count the turns by their outcome in words; those trained in a step are left out.

    Only the rows of `turns` that are open, held or queued are read, however many there are.
    """
    counts = Counter[str]()
    for found, turns in rows.pairs(_COUNTED).items():
        counts[in_words(found)] += turns
    return counts
