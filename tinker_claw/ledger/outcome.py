"""Outcome of a turn: one value, read by one query, even while a gateway writes.

Rule: nothing is locked or written. SQL knows numbers of `Why` only; `words.py` makes sentences.
Words of users and agents, and ids from which they can be read, are only in `Contents`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.codec import load, unpack_floats
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.lessons import read_runs
from tinker_claw.ledger.samples import read_queue, ready
from tinker_claw.ledger.turns import OUTCOME, completion_of, state_of
from tinker_claw.ledger.versions import Line, read_line
from tinker_claw.types import Completion, Kind, NextState, Source, Vote
from tinker_claw.why import COUNTED, Why, in_words

Record = dict[str, Any]

# What it waits for or ended with, as SQL computes it

_REFUSED = (
    f"IIF(turns.why IN ({', '.join(f'{why:d}' for why in COUNTED)}), turns.why, "
    "RTRIM(turns.untrained_because, '.'))"
)
_RUNNING = (
    f"IIF(({OUTCOME}) IS NULL, {Why.ENDING:d}, IIF(group_id IS NULL, {Why.QUEUE:d}, {Why.GROUP:d}))"
)
"""SQL on a row of `sessions`: what its episode waits for, as a number of `Why`."""
_WORD = f"""
CASE state
  WHEN 'trained' THEN -samples.step_id
  WHEN 'queued' THEN IIF(EXISTS (SELECT 1 FROM step_samples JOIN steps AS taking
    ON taking.id = step_samples.step_id WHERE sample_id = samples.id AND taking.status = 'intent'),
    {Why.TRAINING:d}, IIF(bare, {Why.BARE:d}, IIF(baseline, {Why.BASELINE:d},
    {Why.STEP:d})))
  WHEN 'held' THEN {_RUNNING}
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
  SELECT {_WORD} AS word FROM {TURNS} WHERE turns.id IN (SELECT id FROM turns WHERE settled = 0
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
    for outcome, turns in rows.pairs(_COUNTED).items():
        counts[in_words(outcome)] += turns
    return counts


# One turn with its outcome

_TURN = f"""
SELECT turns.id, turns.session_id AS session, sessions.user, episode, sessions.task,
  groups.name AS "group", size AS group_size, ({OUTCOME}) AS session_outcome,
  (SELECT COUNT(*) FROM sessions AS mate WHERE mate.group_id = groups.id AND EXISTS
    (SELECT 1 FROM feedback WHERE feedback.session_id = mate.id AND final = 1)) AS group_done,
  turns.idx AS "index", turns.kind, turns.kind_reason AS reason,
  turns.call, turns.policy_version, versions.step AS version_step, turns.created_at,
  turns.prompt_tokens, turns.completion_tokens, turns.hint_at IS NOT NULL AS has_hint_place,
  turns.fallback, turns.lost, turns.untrained_because, turns.blanked,
  next_states.role AS next_role, passing.id AS passed_by, passing.lost AS passed_lost,
  verdicts.turn_id IS NOT NULL AS judged, value AS verdict, verdicts.source AS verdict_by,
  verdicts.judged AS judge_verdict, said.source AS said_by, said.unused,
  (SELECT json_group_array(value) FROM (SELECT value FROM votes
    WHERE votes.turn_id = turns.id ORDER BY n)) AS votes,
  COALESCE((SELECT tries FROM jobs WHERE jobs.turn_id = turns.id), 0) AS tries,
  (SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints,
  IIF(samples.id IS NULL, 'null', json_object(
    'state', state, 'reward', reward, 'advantage', advantage, 'step', samples.step_id,
    'version', steps.version, 'age', (SELECT made.step FROM versions AS made
      WHERE made.id = steps.version) - 1 - versions.step,
    'finished_at', steps.finished_at, 'together',
    (SELECT COUNT(*) FROM step_samples WHERE step_samples.step_id = samples.step_id),
    'begun', (SELECT MAX(step_id) FROM step_samples WHERE sample_id = samples.id),
    'void', json((SELECT json_group_object(id, error) FROM (SELECT begun.id, error
      FROM step_samples JOIN steps AS begun ON begun.id = step_samples.step_id
      WHERE sample_id = samples.id AND status = 'void' ORDER BY begun.id))))) AS sample,
  turns.why AS refused, {_WORD} AS outcome
FROM {TURNS}
  JOIN versions ON versions.id = turns.policy_version
  LEFT JOIN steps ON steps.id = samples.step_id
  LEFT JOIN feedback AS said ON said.id = (SELECT MAX(id) FROM feedback
    WHERE feedback.turn_id = turns.id AND final = 0)
  LEFT JOIN turns AS passing ON passing.id =
    CASE WHEN turns.settled = 0 AND next_states.turn_id IS NULL THEN
      (SELECT id FROM turns AS later WHERE later.session_id = turns.session_id
        AND later.kind = 'main' AND later.idx > turns.idx ORDER BY later.idx LIMIT 1) END
"""
"""SQL whose columns are the fields of `TurnView`."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """The sample made from a turn, and its steps."""

    state: str
    """held, queued, trained, expired or quarantined"""
    reward: float | None
    """Reward; for an episode's step it includes the outcome, once known."""
    advantage: float | None
    """Advantage of the reply, in the newest step that took it; None: no step has."""
    step: int | None
    """Step that trained it."""
    version: int | None
    """Version that this step made."""
    age: int | None
    """Steps between the version that answered and that step."""
    finished_at: float | None
    together: int
    """Number of samples in that step."""
    begun: int | None
    """Newest step that began with it."""
    void: Mapping[str, str | None]
    """Why each step with it is void, by step id, oldest first."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn from its request to the version it helped to make, without its texts."""

    id: int
    session: int
    user: str
    episode: int
    """1: waits for its outcome, or its group's; 2: over; 0: the session is no episode."""
    task: str | None
    group: str | None
    group_size: int | None
    group_done: int
    """Episodes of the group that have their outcome."""
    session_outcome: float | None
    """Outcome of the session; None: not known."""
    index: int
    kind: Kind
    reason: str
    call: str
    policy_version: int
    version_step: int
    """Optimizer steps of that version."""
    created_at: float
    prompt_tokens: int
    completion_tokens: int
    has_hint_place: bool
    fallback: str | None
    lost: int | None
    """1: the request could not be tied to a reply."""
    untrained_because: str | None
    blanked: str | None
    """forgotten or dropped: its texts and tokens are gone."""
    next_role: str | None
    """Role of the next state; None: none has come."""
    passed_by: int | None
    """Next main turn of the session, where this one still waits for a next state."""
    passed_lost: int | None
    """1: that turn's request could not be tied to a reply."""
    judged: bool
    verdict: Vote | None
    """Verdict; None for a judged turn: no vote was valid."""
    verdict_by: Source | None
    """Source of the verdict; None: not judged."""
    judge_verdict: Vote | None
    """Majority of the judge's votes, even where another's verdict counts."""
    said_by: Source | None
    """Source of the latest explicit feedback."""
    unused: str | None
    """Why that feedback trains nothing; None: it is the verdict, or there was none."""
    votes: tuple[Vote | None, ...]
    tries: int
    """Failed tries to judge it."""
    hints: int
    sample: SampleView | None
    refused: Why | None
    """Reason of `untrained_because`; None: there is none."""
    why: Why | None
    """What it waits for, or what was done with it; None: it was trained, or the words of `outcome`
    have a detail."""
    outcome: str
    """Words for its outcome; `words.py` has the sentence."""

    @property
    def trained_in_step(self) -> int | None:
        return self.sample.step if self.sample and self.sample.state == "trained" else None

    @property
    def record(self) -> Record:
        """Its figures, as `log turns --json` shows them."""
        figures = {name: getattr(self, name) for name in _RECORD}
        return figures | {"sample": self.sample and self.sample.state}


# fmt: off
_RECORD = (
    "id", "session", "user", "index", "task", "group", "kind", "reason", "call", "policy_version",
    "fallback", "prompt_tokens", "completion_tokens", "created_at", "next_role", "judged",
    "verdict", "verdict_by", "hints", "sample", "trained_in_step", "untrained_because", "outcome",
)
# fmt: on


def read_turn(rows: Rows, turn_id: int) -> TurnView | None:
    """Return a turn; None: there is none of that id."""
    return next(iter(turns_where(rows, "WHERE turns.id = ?", turn_id)), None)


def turns_where(rows: Rows, which: str, *values: Any) -> list[TurnView]:
    """Return the turns selected by `which`, the end of the query."""
    return [_turn(dict(row)) for row in rows.rows(f"{_TURN} {which}", *values)]


def _turn(row: Record) -> TurnView:
    sample, outcome = json.loads(row["sample"]), row["outcome"]
    row |= {
        "kind": Kind(row["kind"]),
        "judged": bool(row["judged"]),
        "votes": tuple(json.loads(row["votes"])),
        "sample": sample and SampleView(**sample),
        "refused": None if row["refused"] is None else Why(row["refused"]),
        "why": Why(outcome) if isinstance(outcome, int) and outcome > 0 else None,
        "outcome": in_words(outcome),
    }
    return TurnView(**row)


# Contents of a turn

FEEDBACK = (
    "feedback.created_at, feedback.score, feedback.source, final, feedback.task, "
    'task_group AS "group", unused'
)
_CONTENTS = f"""
SELECT sessions.key AS session_key, ({OUTCOME}) AS session_outcome, request_text, voices,
  reply_text, params, trace, verdicts.prompt AS judge_prompt, hint, untaught,
  overlap, advantages, (SELECT SUM(usd) FROM spend WHERE spend.turn_id = turns.id) AS usd,
  (SELECT json_group_array(json_object('value', value, 'answer', answer))
    FROM (SELECT * FROM votes WHERE votes.turn_id = turns.id ORDER BY n)) AS answers,
  (SELECT error FROM jobs WHERE jobs.turn_id = turns.id) AS failed_try,
  (SELECT json_group_array(text)
    FROM (SELECT text FROM hints WHERE hints.turn_id = turns.id ORDER BY rank)) AS hints,
  (SELECT json_group_array(json_object('id', lessons.id, 'text', text))
    FROM json_each(turns.told, '$[0]') AS its JOIN lessons ON lessons.id = its.value) AS lessons
FROM {TURNS} WHERE turns.id = ?
"""
"""SQL whose columns are fields of `Contents`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Full contents of a turn, in addition to its `TurnView`."""

    session_key: str
    """The client's name for its session."""
    session_outcome: float | None
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
    feedback: Sequence[Record]
    """Explicit feedback on it, or on its session at the end, oldest first."""
    judge_prompt: str | None
    """Version of the judge prompts; None: it was not judged, or by no judge."""
    hints: Sequence[str]
    hint: str | None
    """Text that the teacher was told."""
    untaught: str | None
    """Why the teacher was not asked, though there was something to tell."""
    overlap: int | None
    advantages: tuple[float, ...]
    """(T,) advantage of each sampled token, in the newest step that took it; (): none has, or they
    are gone."""
    usd: float | None
    """Cost in dollars of serving, judging and teaching it; None: no price was known."""


_LISTS = ("voices", "params", "answers", "hints", "lessons")


def read_contents(rows: Rows, turn_id: int) -> Contents | None:
    """Return the contents of a turn; None: there is no such turn any more."""
    row = rows.row(_CONTENTS, turn_id)
    if row is None:
        return None
    fields = dict(row)
    fields |= {name: json.loads(row[name]) for name in _LISTS}
    fields["advantages"] = unpack_floats(row["advantages"]) if row["advantages"] else ()
    state = rows.row("SELECT * FROM next_states WHERE turn_id = ?", turn_id)
    (sampled,) = rows.rows("SELECT * FROM turns WHERE id = ?", turn_id)
    feedback = rows.rows(
        f"SELECT {FEEDBACK}, feedback.text FROM feedback WHERE turn_id = ? ORDER BY id", turn_id
    )
    return Contents(
        **fields,
        runs=read_runs(rows, turn=turn_id),
        completion=completion_of(sampled),
        next_state=state_of(state) if state else None,
        feedback=[dict(entry) | {"final": bool(entry["final"])} for entry in feedback],
    )


def read_openings(rows: Rows, turns: Iterable[int], most: int) -> dict[int, str]:
    """Return the first `most` characters of what each main turn answers, by id."""
    return dict(
        tuple(row)
        for row in rows.rows(
            "SELECT id, SUBSTR(request_text, 1, ?) FROM turns "
            "WHERE id IN (SELECT value FROM json_each(?)) AND kind = 'main'",
            most,
            json.dumps([*turns]),
        )
    )


def read_prompt(rows: Rows, turn_id: int) -> tuple[int, ...]:
    """Return the prompt's token ids; () where they are gone, or hold a secret."""
    row = rows.row("SELECT id, blocks, prompt FROM turns WHERE id = ? AND NOT secret", turn_id)
    return () if row is None else load(rows, row)


# The run around it


@dataclass(frozen=True, slots=True)
class RunView:
    """State of the run on which a turn's outcome depends."""

    step: int
    """Optimizer steps of the newest version since the base."""
    ready: int
    """Number of queued samples that steps could take."""
    batch: int
    """Samples of a step."""
    line: Line
    """Lineage of the newest version."""


def read_run(rows: Rows, batch_size: int, *, sure: bool = False) -> RunView:
    """Read the state of the run.

    Args:
        batch_size: samples of a step, where none was taken yet, or `sure` to be the next's.
    """
    last_size = rows.one(
        "SELECT COALESCE(json_extract(metrics, '$.rule.batch_size'), "
        "json_extract(metrics, '$.samples')) FROM steps WHERE status = 'committed' "
        "ORDER BY id DESC LIMIT 1"
    )
    batch = batch_size if sure or not last_size else last_size
    return RunView(
        step=rows.one("SELECT step FROM versions ORDER BY id DESC LIMIT 1") or 0,
        ready=ready(read_queue(rows), batch),
        batch=batch,
        line=read_line(rows),
    )


def run_of(rows: Rows) -> dict[str, str]:
    """Return model, method and backend of the run."""
    return rows.pairs("SELECT * FROM meta WHERE key IN ('model', 'method', 'backend')")
