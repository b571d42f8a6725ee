"""Estimate of a cell's cost at a service's prices, counted from its ledger.

The local backend bills nothing. Prompts count in full, since what a cache would save is unknown.
Exams do not count. The judge counts as the service's own model, by the product's estimate of a
question.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tinker_claw.billing.estimate import CANARIES, JUDGE_PROMPT_TOKENS, VOTE_TOKENS
from tinker_claw.billing.prices import load
from tinker_claw.learner import practice
from tinker_claw.ledger.database import open_read_only
from tinker_claw.types import Usage

PRICED_AS: Final = "Qwen/Qwen3-8B"
_VOTES: Final = 3
_HINT_TOKENS: Final = 20
"""A hint in the teacher's prompt, with the words around it."""
_SERVED: Final = """
SELECT TOTAL(prompt_tokens), TOTAL(completion_tokens) FROM turns WHERE kind = 'main'
"""
_TRAINED: Final = f"""
SELECT TOTAL(tokens), TOTAL(hint IS NOT NULL), TOTAL((hint IS NOT NULL) * (tokens + {_HINT_TOKENS}))
FROM step_samples JOIN samples ON samples.id = sample_id
JOIN (SELECT id, prompt_tokens + completion_tokens AS tokens FROM turns) AS one ON one.id = turn_id
"""
_PRACTISED: Final = """
SELECT COUNT(*), AVG(prompt_tokens), AVG(completion_tokens)
FROM step_prompts JOIN turns ON turns.id = turn_id WHERE purpose <> 'source' GROUP BY step_id
"""


def usd(ledger: Path) -> float:
    """Return dollars at the prices of `PRICED_AS`."""
    return load()[PRICED_AS].usd(_usage(ledger)) or 0.0


def _usage(ledger: Path) -> Usage:
    with open_read_only(ledger) as rows:

        def counts(query: str) -> list[list[int]]:
            return [[round(value) for value in row] for row in rows.rows(query)]

        ((prompts, replies),) = counts(_SERVED)
        ((trained, taught, teacher),) = counts(_TRAINED)
        ((judged,),) = counts("SELECT COUNT(*) FROM verdicts")
        ((versions,),) = counts("SELECT COUNT(*) FROM versions WHERE id > 0")
        runs = [practice.run_usage(*row) for row in counts(_PRACTISED)]
    served = Usage(prefill=prompts, sampled=replies)
    judge = Usage(
        prefill=judged * JUDGE_PROMPT_TOKENS,
        cached=judged * (_VOTES - 1) * JUDGE_PROMPT_TOKENS,
        sampled=judged * _VOTES * VOTE_TOKENS,
    )
    steps = Usage(prefill=teacher, sampled=taught, trained=trained)
    gate = Usage(prefill=versions * CANARIES.prefill, sampled=versions * CANARIES.sampled)
    return sum(runs, served + judge + steps + gate)
