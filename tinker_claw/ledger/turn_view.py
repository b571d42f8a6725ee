"""One turn as readers see it, even while a gateway writes.

Rule: nothing is locked or written. Words of users and agents, and ids from which they can be read,
are only in `Contents`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.codec import load_prompt, unpack_floats
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.lessons import read_runs
from tinker_claw.ledger.turns import OUTCOME, completion_of, read_next_state
from tinker_claw.ledger.versions import live_versions
from tinker_claw.turn_state import TurnRefusal, TurnState
from tinker_claw.types import Completion, NextState, Vote

Record = dict[str, Any]

_WAITS = {
    TurnState.WAITING: "waits for the next message",
    TurnState.JUDGING: "waits for the judge",
    TurnState.HELD: "waits for an outcome",
    TurnState.QUEUED: "waits for a step",
}
TURNS = """
turns JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN groups ON groups.id = group_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
"""
"""SQL joining turns with their sessions, groups, next states, verdicts and samples."""
_TURN = f"""
SELECT turns.id, turns.session_id AS session, sessions.user, turns.idx AS "index", sessions.task,
  groups.name AS "group", turns.kind, turns.kind_reason, turns.request_kind, turns.policy_version,
  turns.fallback, turns.prompt_tokens, turns.completion_tokens, turns.created_at,
  next_states.role AS next_role, verdicts.turn_id IS NOT NULL AS judged, value AS verdict,
  verdicts.source AS verdict_by,
  (SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints,
  turns.state, turns.reason, turns.detail, samples.step_id AS trained_in_step,
  (SELECT step_id FROM step_samples JOIN steps ON steps.id = step_samples.step_id
    WHERE sample_id = samples.id AND status = 'intent') AS in_step
FROM {TURNS}
"""
"""SQL whose columns are the fields of a turn, without its texts.

`next_role` is None where no next state has come, and `verdict` of a judged turn where no vote was
valid. `in_step`: step under way with its sample.
"""


def turns_where(rows: Rows, which: str, *values: Any) -> list[Record]:
    """Return the turns selected by `which`, the end of the query, as `log turns --json` shows
    them. `outcome`: what became of each in words, or what it waits for."""
    turns = [dict(row) for row in rows.rows(f"{_TURN} {which}", *values)]
    return [turn | {"judged": bool(turn["judged"]), "outcome": _outcome(turn)} for turn in turns]


def _outcome(turn: Record) -> str:
    match TurnState(turn["state"]):
        case TurnState.TRAINED:
            return f"trained in step {turn['trained_in_step']}"
        case TurnState.REFUSED:
            return f"not trained: {TurnRefusal(turn['reason'], turn['detail'] or '')}"
        case TurnState.FORGOTTEN:
            return f"forgotten after step {turn['trained_in_step']}"
        case TurnState.QUEUED if turn["in_step"] is not None:
            return f"in step {turn['in_step']}"
        case state:
            return str(TurnRefusal(_WAITS[state], turn["detail"] or ""))


def count_outcomes(rows: Rows) -> Counter[str]:
    """Count the turns that no step has trained: by their reason, or by what they wait for."""
    counts = rows.rows(
        "SELECT state, reason, COUNT(*) AS turns FROM turns "
        "WHERE state NOT IN ('trained', 'forgotten') GROUP BY state, reason"
    )
    return Counter(
        {row["reason"] or _WAITS[TurnState(row["state"])]: row["turns"] for row in counts}
    )


# Contents of a turn

_CONTENTS = f"""
SELECT sessions.key AS session_key, ({OUTCOME}) AS session_outcome, turns.lost, request_text,
  voices, reply_text, params, trace, verdicts.prompt AS judge_prompt,
  verdicts.judged AS judge_verdict, hint, untaught, overlap, teacher_text, reward,
  advantage, advantages,
  steps.version,
  (SELECT json_group_object(id, error) FROM (SELECT begun.id, error
    FROM step_samples JOIN steps AS begun ON begun.id = step_samples.step_id
    WHERE sample_id = samples.id AND status = 'void' ORDER BY begun.id)) AS void,
  (SELECT SUM(usd) FROM spend WHERE spend.turn_id = turns.id) AS usd,
  (SELECT json_group_array(json_object('value', value, 'answer', answer))
    FROM (SELECT * FROM votes WHERE votes.turn_id = turns.id ORDER BY n)) AS answers,
  (SELECT error FROM jobs WHERE jobs.turn_id = turns.id) AS failed_try,
  COALESCE((SELECT tries FROM jobs WHERE jobs.turn_id = turns.id), 0) AS tries,
  (SELECT json_group_array(text)
    FROM (SELECT text FROM hints WHERE hints.turn_id = turns.id ORDER BY rank)) AS hints,
  (SELECT json_group_array(json_object('id', lessons.id, 'text', text))
    FROM json_each(turns.told, '$[0]') AS its JOIN lessons ON lessons.id = its.value) AS lessons
FROM {TURNS} LEFT JOIN steps ON steps.id = samples.step_id WHERE turns.id = ?
"""
"""SQL whose columns are fields of `Contents`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Full contents of a turn."""

    turn: Record
    """Its fields, as `turns_where` returns them."""
    session_key: str
    """The client's name for its session."""
    session_outcome: float | None
    lost: int | None
    """1: the request could not be tied to a reply."""
    request_text: str
    lessons: Sequence[Record]
    """Lessons in its prompt, each with `id` and `text` as it is now."""
    runs: Sequence[Record]
    """Steps that practised a lesson and rest on it, as `read_runs` returns them."""
    voices: Sequence[tuple[str, str, int]]
    """Writer, name and length in characters of each new piece in the request."""
    reply_text: str
    completion: Completion
    params: Mapping[str, Any]
    trace: str | None
    next_state: NextState | None
    answers: Sequence[Record]
    """The judge's answers, each with `value` and `answer`."""
    failed_try: str | None
    """What the judge said at the last failed try, or why it did not; None: none failed."""
    tries: int
    """Failed tries for which the turn is to blame."""
    feedback: Sequence[Record]
    """Explicit feedback on it, or on its session at the end, oldest first."""
    judge_prompt: str | None
    """Version of the judge prompts; None: it was not judged, or by no judge."""
    judge_verdict: Vote | None
    """Majority of the judge's votes, even where another's verdict counts."""
    hints: Sequence[str]
    hint: str | None
    """Text that the teacher was told."""
    untaught: str | None
    """Why the teacher was not asked, though there was something to tell."""
    overlap: int | None
    teacher_text: str | None
    """Reply that the teacher wrote, which is trained in place of a rejected one; None or empty: it
    wrote none, or it is gone."""
    reward: float | None
    """Reward of its sample; for an episode's step it includes the outcome, once known."""
    advantage: float | None
    """Advantage of the reply, in the newest step that took it; None: no step has."""
    advantages: tuple[float, ...]
    """(T,) advantage of each sampled token, in the newest step that took it; (): none has, or they
    are gone."""
    version: int | None
    """Version that the step with it made."""
    left_behind: bool
    """Whether a rollback has left that version behind."""
    void: Mapping[str, str | None]
    """Why each step with it is void, by step id, oldest first."""
    usd: float | None
    """Cost in dollars of serving, judging and teaching it; None: no price was known."""


_JSON = ("voices", "params", "answers", "hints", "lessons", "void")


def read_contents(rows: Rows, turn_id: int) -> Contents | None:
    """Return the contents of a turn; None: there is no such turn any more."""
    row = rows.row(_CONTENTS, turn_id)
    if row is None:
        return None
    fields = dict(row) | {name: json.loads(row[name]) for name in _JSON}
    fields["advantages"] = unpack_floats(row["advantages"]) if row["advantages"] else ()
    (sampled,) = rows.rows("SELECT * FROM turns WHERE id = ?", turn_id)
    feedback = rows.rows(
        'SELECT created_at, score, source, final, task, task_group AS "group", unused, text '
        "FROM feedback WHERE turn_id = ? ORDER BY id",
        turn_id,
    )
    return Contents(
        turn=turns_where(rows, "WHERE turns.id = ?", turn_id)[0],
        **fields,
        runs=read_runs(rows, turn=turn_id),
        completion=completion_of(sampled),
        next_state=read_next_state(rows, turn_id),
        feedback=[dict(entry) | {"final": bool(entry["final"])} for entry in feedback],
        left_behind=row["version"] is not None and row["version"] not in live_versions(rows),
    )


def read_openings(rows: Rows, turns: Iterable[int], most: int) -> dict[int, str]:
    """Return the first `most` characters of what each main turn answers, by id."""
    return rows.pairs(
        "SELECT id, SUBSTR(request_text, 1, ?) FROM turns "
        "WHERE id IN (SELECT value FROM json_each(?)) AND kind = 'main'",
        most,
        json.dumps([*turns]),
    )


def read_prompt(rows: Rows, turn_id: int) -> tuple[int, ...]:
    """Return the prompt's token ids; () where they are gone, or hold a secret."""
    row = rows.row("SELECT id, blocks, prompt FROM turns WHERE id = ? AND NOT secret", turn_id)
    return () if row is None else load_prompt(rows, row)


def run_of(rows: Rows) -> dict[str, str]:
    """Return model, method and backend of the run."""
    return rows.pairs("SELECT * FROM meta WHERE key IN ('model', 'method', 'backend')")
