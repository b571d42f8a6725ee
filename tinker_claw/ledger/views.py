"""Turns with their outcomes, and rows of the other tables, for readers, even while a gateway
writes.

Rule: nothing is locked or written. Words of users and agents, and ids from which they can be read,
are only in full views: `Contents`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tinker_claw.ledger.codec import load, unpack_floats
from tinker_claw.ledger.database import Outside, Rows
from tinker_claw.ledger.turns import OUTCOME, completion_of, state_of
from tinker_claw.ledger.versions import Line, read_line
from tinker_claw.ledger.words import TURNS, WORD
from tinker_claw.privacy.redact import name_digest
from tinker_claw.types import Completion, Kind, NextState, Source, Vote
from tinker_claw.why import Why, in_words

Record = dict[str, Any]

# One turn with its outcome

_TURN = f"""
SELECT turns.id, turns.session_id, sessions.user, episode, sessions.task, groups.name AS "group",
  size AS group_size, ({OUTCOME}) AS session_outcome, (SELECT COUNT(*) FROM sessions AS mate
    WHERE mate.group_id = groups.id AND EXISTS (SELECT 1 FROM feedback
      WHERE feedback.session_id = mate.id AND final = 1)) AS group_done,
  turns.idx AS "index", turns.kind, turns.kind_reason,
  turns.call, turns.policy_version, versions.step AS version_step, turns.created_at,
  turns.prompt_tokens, turns.completion_tokens, turns.hint_at IS NOT NULL AS has_hint_place,
  turns.fallback, turns.lost, turns.untrained_because, turns.blanked,
  next_states.role AS next_role, passing.id AS passed_by, passing.lost AS passed_lost,
  verdicts.turn_id IS NOT NULL AS judged, value AS verdict, verdicts.source,
  verdicts.judged AS found, said.source AS said_by, said.unused,
  (SELECT json_group_array(value) FROM (SELECT value FROM votes
    WHERE votes.turn_id = turns.id AND about = 'verdict' ORDER BY n)) AS votes,
  (SELECT COUNT(*) FROM votes WHERE votes.turn_id = turns.id AND about = 'in vain') AS tries,
  (SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints,
  IIF(samples.id IS NULL, 'null', json_object(
    'state', state, 'reward', reward, 'advantage', advantage, 'step', samples.step_id,
    'version', steps.version, 'finished_at', steps.finished_at, 'together',
    (SELECT COUNT(*) FROM step_samples WHERE step_samples.step_id = samples.step_id),
    'begun', (SELECT MAX(step_id) FROM step_samples WHERE sample_id = samples.id),
    'void', json((SELECT json_group_object(id, error) FROM (SELECT begun.id, error
      FROM step_samples JOIN steps AS begun ON begun.id = step_samples.step_id
      WHERE sample_id = samples.id AND status = 'void' ORDER BY begun.id))))) AS sample,
  turns.why AS refused, {WORD} AS outcome
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
    finished_at: float | None
    together: int
    """Number of samples in that step."""
    left_behind: bool
    """Whether a rollback left that version behind."""
    begun: int | None
    """Newest step that began with it."""
    void: Mapping[str, str | None]
    """Why each step with it is void, by step id, oldest first."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn from its request to the version it helped to make, without its texts."""

    id: int
    session_id: int
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
    kind_reason: str
    call: str
    policy_version: int
    version_step: int
    """Optimizer steps of that version."""
    created_at: float
    prompt_tokens: int
    completion_tokens: int
    has_hint_place: bool
    fallback: str | None
    lost: str | None
    """Why the request could not be tied to the turn that it answers, as `types.Lost`."""
    untrained_because: str | None
    blanked: str | None
    """forgotten or dropped: its texts and tokens are gone."""
    next_role: str | None
    """Role of the next state; None: none has come."""
    passed_by: int | None
    """Next main turn of the session, where this one still waits for a next state."""
    passed_lost: str | None
    """Why that turn could not be tied to the turn that it answers, as `types.Lost`."""
    judged: bool
    verdict: Vote | None
    """Verdict; None for a judged turn: no vote was valid."""
    source: Source | None
    """Source of the verdict; None: not judged."""
    found: Vote | None
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
    """Words for its outcome; `outcome.py` has the sentence."""

    @property
    def trained_in_step(self) -> int | None:
        return self.sample.step if self.sample and self.sample.state == "trained" else None


def read_turn(rows: Rows, turn_id: int) -> TurnView | None:
    """Return a turn; None: there is none of that id."""
    return next(iter(turns_where(rows, "WHERE turns.id = ?", turn_id)), None)


def read_turns(rows: Rows, limit: int) -> list[TurnView]:
    """Return the newest `limit` turns, oldest first."""
    newest = "(SELECT id FROM turns ORDER BY id DESC LIMIT ?)"
    return turns_where(rows, f"WHERE turns.id IN {newest} ORDER BY turns.id", limit)


def turns_where(rows: Rows, which: str, *values: Any) -> list[TurnView]:
    """Return the turns selected by `which`, the end of the query."""
    line = read_line(rows)
    return [_turn(dict(row), line) for row in rows.rows(f"{_TURN} {which}", *values)]


def _turn(row: Record, line: Line) -> TurnView:
    sample = json.loads(row["sample"])
    row["kind"] = Kind(row["kind"])
    row["votes"] = tuple(json.loads(row["votes"]))
    if sample is not None:
        version = sample["version"]
        behind = version is not None and not line.leads_on(version)
        sample = SampleView(**sample, left_behind=behind)
    row["sample"] = sample
    found = row["outcome"]
    row["why"] = Why(found) if isinstance(found, int) and found > 0 else None
    row["outcome"] = in_words(found)
    row["refused"] = None if row["refused"] is None else Why(row["refused"])
    return TurnView(**row)


# Contents of a turn

_FEEDBACK = (
    "feedback.created_at, feedback.score, feedback.source, final, feedback.task, "
    'task_group AS "group", unused'
)
_CONTENTS = f"""
SELECT sessions.key AS session_key, ({OUTCOME}) AS session_outcome, request_text, voices,
  reply_text, params, trace, verdicts.prompt AS judge_prompt, hint, untaught,
  overlap, advantages, (SELECT SUM(usd) FROM spend WHERE spend.turn_id = turns.id) AS usd,
  (SELECT json_group_array(json_object('about', about, 'value', value, 'answer', answer))
    FROM (SELECT * FROM votes WHERE votes.turn_id = turns.id ORDER BY about DESC, n)) AS answers,
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
    voices: Sequence[tuple[str, str, int]]
    """Writer, name and length in characters of each new piece in the request."""
    reply_text: str
    completion: Completion
    params: Mapping[str, Any]
    trace: str | None
    next_state: NextState | None
    answers: Sequence[Record]
    """The judge's answers, each with `about`, `value` and `answer`."""
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
    known = dict(row)
    known |= {name: json.loads(row[name]) for name in _LISTS}
    known["advantages"] = unpack_floats(row["advantages"]) if row["advantages"] else ()
    state = rows.row("SELECT * FROM next_states WHERE turn_id = ?", turn_id)
    (sampled,) = rows.rows("SELECT * FROM turns WHERE id = ?", turn_id)
    feedback = rows.rows(
        f"SELECT {_FEEDBACK}, feedback.text FROM feedback WHERE turn_id = ? ORDER BY id", turn_id
    )
    return Contents(
        **known,
        completion=completion_of(sampled),
        next_state=state_of(state) if state else None,
        feedback=[dict(said) | {"final": bool(said["final"])} for said in feedback],
    )


def read_prompt(rows: Rows, turn_id: int) -> tuple[int, ...]:
    """Return the prompt's token ids; () where they are gone."""
    row = rows.row("SELECT id, blocks, prompt FROM turns WHERE id = ?", turn_id)
    return () if row is None else load(rows, row)


# Filtered rows of a table, oldest first

Table = Literal["turns", "verdicts", "feedback", "samples", "steps"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter on rows; a field that is None selects all."""

    session: str | None = None
    """The ledger's number of a session, or the client's name for it."""
    user: str | None = None
    kind: str | None = None
    verdict: str | None = None
    """One of "1", "0", "-1", or "none": judged, and no vote was valid."""
    trained: bool | None = None
    since: float | None = None
    """Earliest time, in seconds since 1970."""
    before: int | None = None
    """Only rows of turns with lower ids."""
    id: int | None = None


_OF_TURN = "turns.id AS turn, turns.session_id AS session, sessions.user, policy_version"
_ATTEMPT = 'sessions.task, groups.name AS "group"'
_HINTS = "(SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints"
_FIELDS: Mapping[Table, str] = {
    "turns": 'turns.id, session_id AS session, sessions.user, idx AS "index", '
    f"{_ATTEMPT}, turns.kind, "
    "kind_reason AS reason, call, policy_version, fallback, prompt_tokens, "
    "completion_tokens, turns.created_at, role AS next_role, "
    "verdicts.turn_id IS NOT NULL AS judged, value AS verdict, verdicts.source AS verdict_by, "
    f"{_HINTS}, state AS sample, "
    "CASE state WHEN 'trained' THEN step_id END AS trained_in_step, untrained_because, "
    f"{WORD} AS outcome",
    "verdicts": f"{_OF_TURN}, verdicts.created_at, value AS verdict, "
    "verdicts.source AS verdict_by, verdicts.judged AS judge, verdicts.score, "
    "(SELECT json_group_array(value) FROM (SELECT value FROM votes WHERE votes.turn_id = turns.id "
    f"AND about = 'verdict' ORDER BY n)) AS votes, {_HINTS}",
    "feedback": f"feedback.id, {_OF_TURN}, {_FEEDBACK}",
    "samples": f"samples.id, {_OF_TURN}, samples.created_at, state, reward, advantage, "
    f'hint IS NOT NULL AS hinted, {_ATTEMPT}, idx AS "index", step_id AS step',
    "steps": "id, status, parent, version, created_at, finished_at, "
    "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, "
    # A field for programs only is long; SQLite removes it without Python's lock.
    "json_remove(metrics, '$.rule') AS metrics, error, void > 1 AS outage, void = 3 AS refused",
}
"""Fields of a record, in order."""
_READ_AS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("judged", "hinted", "outage", "refused", "final"), bool),
    "votes": json.loads,
    "outcome": in_words,
    "metrics": lambda text: json.loads(text or "{}"),
}
"""Converters of fields that SQLite stores as numbers or texts."""
_FROM: Mapping[Table, str] = {
    "steps": "steps",
    "feedback": f"{TURNS} JOIN feedback ON feedback.turn_id = turns.id",
}


def read(rows: Rows, table: Table, wanted: Filter, limit: int | None) -> list[Record]:
    """Return the newest `limit` matching rows, oldest first."""
    where, values = _where(table, wanted)
    most = -1 if limit is None else limit
    by = "verdicts.created_at DESC, turns" if table == "verdicts" else table
    if table == "turns":
        # Rows of turns are wide, so the wanted ids are selected first.
        where = f"WHERE turns.id IN (SELECT id FROM turns {where} ORDER BY id DESC LIMIT ?)"
        values.append(most)
    found = rows.rows(
        f"SELECT {_FIELDS[table]} FROM {_FROM.get(table, TURNS)} "
        f"{where} ORDER BY {by}.id DESC LIMIT ?",
        *values,
        most,
    )
    records = [dict(row) for row in reversed(found)]
    for record in records:
        for name in _READ_AS.keys() & record.keys():
            record[name] = _READ_AS[name](record[name])
    return records


# "+" keeps SQLite from an index, so that turns are read in order of id.
_CONDITIONS: Mapping[str, str] = {
    "session": "turns.session_id IN (SELECT sessions.id FROM json_each(?) AS named "
    "CROSS JOIN sessions ON named.value IN (sessions.key, CAST(sessions.id AS TEXT)))",
    "user": "+turns.session_id IN (SELECT id FROM sessions WHERE user = ?)",
    "kind": "+turns.kind = ?",
    "verdict": "EXISTS (SELECT 1 FROM verdicts AS v WHERE v.turn_id = turns.id "
    "AND v.value IS NULLIF(?, 'none'))",
    "trained": "? = EXISTS (SELECT 1 FROM samples AS s INDEXED BY samples_by_turn "
    "WHERE s.state = 'trained' AND s.turn_id = turns.id)",
    "since": "{table}.created_at >= ?",
    "before": "turns.id < ?",
    "id": "{table}.id = ?",
}
"""SQL of the fields of a filter."""


def _where(table: Table, wanted: Filter) -> tuple[str, list[Any]]:
    given = {name: value for name, value in asdict(wanted).items() if value is not None}
    if (which := wanted.session) is not None:
        given["session"] = json.dumps([which, name_digest(which)])
    conditions = [_CONDITIONS[name].format(table=table) for name in given]
    if table in ("verdicts", "samples"):
        conditions.append(f"{table}.turn_id IS NOT NULL")
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", [*given.values()]


_TOKENS = ("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs", "advantages")
"""Fields with a value for each token."""


def turns_in_full(ledger: Outside, *, tokens: bool) -> Iterator[Record]:
    """Yield all turns except forgotten ones, oldest first, each from one consistent snapshot.

    Args:
        tokens: whether to include ids and logprobs.
    """
    for turn in ledger.column("SELECT id FROM turns WHERE blanked IS NOT 'forgotten' ORDER BY id"):
        with ledger.moment():
            for record in read(ledger, "turns", Filter(id=turn), 1):
                full = _more(ledger, turn, record, prompt=tokens)
                yield {k: v for k, v in full.items() if tokens or k not in _TOKENS}


def in_full(ledger: Outside, table: Table, record: Record) -> Record:
    """Return a record of `read` with the texts and samples of its turn, or with the settings of a
    step, from one snapshot."""
    with ledger.moment():
        if table == "steps":
            query = "SELECT metrics -> '$.rule' FROM steps WHERE id = ?"
            return record | {"rule": json.loads(ledger.one(query, record["id"]) or "null")}
        return _more(ledger, record["turn" if "turn" in record else "id"], record)


def _more(rows: Rows, turn_id: int, record: Record, *, prompt: bool = True) -> Record:
    """Return the record with all that is known of the turn; unchanged where it was forgotten
    meanwhile. `prompt`: whether to read its ids, tens of thousands in long sessions."""
    known = read_contents(rows, turn_id)
    if known is None:
        return record
    more = {**_fields(known.completion), **_fields(known)}
    more["prompt"] = read_prompt(rows, turn_id) if prompt else ()
    more |= {"next_state": known.next_state and asdict(known.next_state)}
    more["hint_texts"] = more.pop("hints")
    del more["completion"]
    return record | more


def _fields(record: Completion | Contents) -> Record:
    return {field.name: getattr(record, field.name) for field in fields(record)}
