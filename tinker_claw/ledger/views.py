"""Turns as a reader asks for them, with all that became of each, and rows of the other tables, also
from outside while a gateway is writing.

Rule: nothing is locked or written. What a user or their agent wrote, and ids from which it can be
read, are only in what is asked for in full: `Contents`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from tinker_claw.ledger.codec import load, unpack_floats
from tinker_claw.ledger.database import Outside, Rows
from tinker_claw.ledger.turns import OUTCOME, completion_of, state_of
from tinker_claw.ledger.versions import Line, read_line
from tinker_claw.types import Completion, Kind, Lost, NextState, Source, Vote, Writer

Record = dict[str, Any]

# One turn, with all that became of it

_TURN = f"""
SELECT turns.id, turns.session_id, sessions.key AS session_key, sessions.user,
  private = 1 AS private, episode, sessions.task, groups.name AS "group", size AS group_size,
  ({OUTCOME}) AS session_outcome, (SELECT COUNT(*) FROM sessions AS mate
    WHERE mate.group_id = groups.id AND EXISTS (SELECT 1 FROM feedback
      WHERE feedback.session_id = mate.id AND final = 1)) AS group_done,
  closed_at IS NOT NULL AS session_closed, turns.idx AS "index", turns.kind, turns.kind_reason,
  turns.call, turns.policy_version, versions.step AS version_step, turns.created_at,
  turns.prompt_tokens, turns.completion_tokens, turns.hint_at IS NOT NULL AS has_hint_place,
  turns.fallback, turns.lost, turns.settled, turns.untrained_because, turns.blanked,
  next_states.role AS next_role, passing.id AS passed_by, passing.lost AS passed_lost,
  verdicts.created_at AS judged_at, value AS verdict, verdicts.source, verdicts.judged AS found,
  (SELECT json_array(score, source, unused) FROM feedback WHERE feedback.turn_id = turns.id
    AND final = 0 ORDER BY feedback.id DESC LIMIT 1) AS said,
  (SELECT json_group_array(value) FROM (SELECT value FROM votes
    WHERE votes.turn_id = turns.id AND about = 'verdict' ORDER BY n)) AS votes,
  (SELECT COUNT(*) FROM votes WHERE votes.turn_id = turns.id AND about = 'in vain') AS tries,
  (SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints,
  samples.id AS sample_id, samples.created_at AS sampled_at, state, reward, advantage,
  expired_because,
  hint IS NOT NULL AS hinted, samples.step_id, steps.version AS step_version, steps.finished_at,
  (SELECT COUNT(*) FROM step_samples WHERE step_samples.step_id = samples.step_id) AS together,
  (SELECT json_group_array(json_array(id, status, error)) FROM (SELECT begun.* FROM step_samples
    JOIN steps AS begun ON begun.id = step_samples.step_id
    WHERE sample_id = samples.id ORDER BY begun.id)) AS begun
FROM turns JOIN sessions ON sessions.id = turns.session_id
  JOIN versions ON versions.id = turns.policy_version
  LEFT JOIN groups ON groups.id = sessions.group_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
  LEFT JOIN steps ON steps.id = samples.step_id
  LEFT JOIN turns AS passing ON passing.id =
    CASE WHEN turns.settled = 0 AND next_states.turn_id IS NULL THEN
      (SELECT id FROM turns AS later WHERE later.session_id = turns.session_id
        AND later.kind = 'main' AND later.idx > turns.idx ORDER BY later.idx LIMIT 1) END
"""
_FLAGS = ("private", "session_closed", "has_hint_place", "settled")


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that was begun with a sample."""

    id: int
    status: str
    """intent, committed or void"""
    error: str | None


@dataclass(frozen=True, slots=True)
class SampleView:
    """The sample that a turn became, and the steps that it was in."""

    id: int
    created_at: float
    state: str
    """held, queued, trained, expired or quarantined"""
    expired_because: str | None
    """None: of its age, or it has not expired."""
    reward: float | None
    """Of an episode's step with its outcome, once that is there."""
    advantage: float | None
    """The reply's, in the newest step that took it; None: none has."""
    hinted: bool
    step: int | None
    """That trained it."""
    version: int | None
    """That this step made."""
    finished_at: float | None
    together: int
    """Samples of that step."""
    left_behind: bool
    """A rollback went back behind that version."""
    begun: tuple[Begun, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of a reply outright, last."""

    score: float
    """From -1 to 1."""
    source: Source
    unused: str | None
    """Why it is not trained by that; None: that is its verdict."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn from its request to the version that it helped to make, without what was said."""

    id: int
    session_id: int
    session_key: str
    user: str
    private: bool
    """Nothing of its session is kept just now."""
    session_closed: bool
    episode: int
    """1: its outcome is to come, or that of its group; 2: it is over; 0: the session is none."""
    task: str | None
    group: str | None
    group_size: int | None
    group_done: int
    """Episodes of the group that have their outcome."""
    session_outcome: float | None
    """None: nobody has said how it ended."""
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
    lost: Lost | None
    """Why the request could not be tied to the turn that it answers."""
    settled: bool
    untrained_because: str | None
    blanked: str | None
    """forgotten or dropped: its words and tokens are gone."""
    next_role: str | None
    """None: no next state has come."""
    passed_by: int | None
    """The next main turn of the session, where this one still waits for a next state."""
    passed_lost: Lost | None
    """Why that one could not be tied to the turn that it answers."""
    judged_at: float | None
    """None: not judged."""
    verdict: Vote | None
    """None of a judged turn: no vote was valid."""
    source: Source | None
    """Whose verdict it is; None: not judged."""
    found: Vote | None
    """What the judge's votes came to, whosever the verdict is."""
    said: Said | None
    """None: nothing was."""
    votes: tuple[Vote | None, ...]
    tries: int
    """To judge it, in vain."""
    hints: int
    sample: SampleView | None
    left_behind: bool
    """A rollback went back behind the version that answered."""

    @property
    def judged(self) -> bool:
        return self.judged_at is not None

    @property
    def trained_in_step(self) -> int | None:
        return self.sample.step if self.sample and self.sample.state == "trained" else None


_READ = (*_FLAGS, "kind", "lost", "passed_lost", "said", "votes", "sample", "left_behind")
_OF_SAMPLE = (*("state", "expired_because", "reward", "advantage", "finished_at", "together"),)
_AS_IT_IS = tuple(field.name for field in fields(TurnView) if field.name not in _READ)


def read_turn(rows: Rows, turn_id: int) -> TurnView | None:
    """None: there is no such turn."""
    return next(iter(turns_where(rows, "WHERE turns.id = ?", turn_id)), None)


def read_turns(rows: Rows, limit: int | None) -> list[TurnView]:
    """The newest `limit` turns, oldest first."""
    newest = "(SELECT id FROM turns ORDER BY id DESC LIMIT ?)"
    return turns_where(
        rows, f"WHERE turns.id IN {newest} ORDER BY turns.id", -1 if limit is None else limit
    )


def turns_where(rows: Rows, which: str, *values: Any) -> list[TurnView]:
    """`which`: the end of the query."""
    found = rows.rows(f"{_TURN} {which}", *values)
    line = read_line(rows) if found else None
    return [_turn(dict(zip(row.keys(), row, strict=True)), line) for row in found if line]


def _turn(row: Record, line: Line) -> TurnView:
    known = {name: row[name] for name in _AS_IT_IS}
    known |= {name: bool(row[name]) for name in _FLAGS}
    return TurnView(
        **known,
        kind=Kind(row["kind"]),
        lost=row["lost"] and Lost(row["lost"]),
        passed_lost=row["passed_lost"] and Lost(row["passed_lost"]),
        said=Said(*json.loads(row["said"])) if row["said"] else None,
        votes=tuple(json.loads(row["votes"])) if row["judged_at"] else (),
        sample=None if row["sample_id"] is None else _sample(row, line),
        left_behind=not line.leads_on(row["policy_version"]),
    )


def _sample(row: Record, line: Line) -> SampleView:
    version = row["step_version"]
    return SampleView(
        **{name: row[name] for name in _OF_SAMPLE},
        id=row["sample_id"],
        created_at=row["sampled_at"],
        hinted=bool(row["hinted"]),
        step=row["step_id"],
        version=version,
        left_behind=version is not None and not line.leads_on(version),
        begun=tuple(Begun(*begun) for begun in json.loads(row["begun"])),
    )


# What was said and sampled


@dataclass(frozen=True, slots=True)
class Contents:
    """What a `TurnView` leaves out."""

    request_text: str
    voices: tuple[tuple[Writer, str, int], ...]
    """Writer, name and characters of each piece that was new in the request."""
    reply_text: str
    completion: Completion
    params: Mapping[str, Any]
    trace: str | None
    next_state: NextState | None
    answers: tuple[Record, ...]
    """Of the judge: `about`, `value` and `answer` of each."""
    feedback: tuple[Record, ...]
    """What was said of it outright, or of its session at its end, oldest first."""
    asked: str | None
    """Version of what the judge was asked; None: it was not judged, or by no judge."""
    by_second: bool
    """The fallback judged it."""
    audit: Vote | None
    """The auditor's verdict; None: it gave none, or was not asked."""
    hints: tuple[str, ...]
    hint: str | None
    """That the teacher was told."""
    untaught: str | None
    """Why the teacher was not asked, though there was something to tell."""
    overlap: int | None
    weight: float | None
    """The teacher's; None: none was heard."""
    advantages: tuple[float, ...]
    """Each sampled token's, in the newest step that took it; (): none has, or they are gone."""
    usd: float | None
    """What serving, judging and teaching it cost; None: no price was known."""


_UNREAD = (
    *("request_text", "reply_text", "trace", "asked", "audit"),
    *("hint", "untaught", "overlap", "weight"),
)


def read_contents(rows: Rows, turn_id: int) -> Contents | None:
    """None: there is no such turn any more."""
    row = rows.row(
        "SELECT turns.*, role, text, beside, samples.hint, untaught, weight, overlap, "
        "advantages, verdicts.prompt AS asked, by_second, audit "
        "FROM turns LEFT JOIN next_states ON next_states.turn_id = turns.id "
        "LEFT JOIN verdicts ON verdicts.turn_id = turns.id "
        "LEFT JOIN samples ON samples.turn_id = turns.id WHERE turns.id = ?",
        turn_id,
    )
    if row is None:
        return None
    answers = rows.rows(
        "SELECT about, value, answer FROM votes WHERE turn_id = ? ORDER BY about DESC, n", turn_id
    )
    hints = rows.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", turn_id)
    feedback = rows.rows(
        f"SELECT {_FEEDBACK}, feedback.text FROM feedback WHERE turn_id = ? ORDER BY id", turn_id
    )
    return Contents(
        **{name: row[name] for name in _UNREAD},
        voices=tuple((Writer(w), what, size) for w, what, size in json.loads(row["voices"])),
        completion=completion_of(row),
        params=json.loads(row["params"]),
        next_state=None if row["role"] is None else state_of(row),
        answers=tuple(dict(answer) for answer in answers),
        feedback=tuple(dict(said) | {"final": bool(said["final"])} for said in feedback),
        by_second=bool(row["by_second"]),
        hints=tuple(hint["text"] for hint in hints),
        advantages=unpack_floats(row["advantages"]) if row["advantages"] else (),
        usd=rows.one("SELECT SUM(usd) FROM spend WHERE turn_id = ?", turn_id),
    )


def read_prompt(rows: Rows, turn_id: int) -> tuple[int, ...]:
    """The ids that were sampled on; () where they are gone."""
    row = rows.row("SELECT id, blocks, prompt FROM turns WHERE id = ?", turn_id)
    return () if row is None else load(rows, row)


_PAGE = 50


def turns_in_full(ledger: Outside, *, tokens: bool) -> Iterator[Record]:
    """All turns but those that were forgotten, oldest first, a few in memory at a time, each as it
    is at one moment. `tokens`: with ids and logprobs."""
    after = 0
    while True:
        with ledger.moment():
            page = turns_where(
                ledger,
                "WHERE turns.id > ? AND turns.blanked IS NOT 'forgotten' ORDER BY turns.id LIMIT ?",
                *(after, _PAGE),
            )
            records = [_exported(ledger, turn, tokens=tokens) for turn in page]
        if not page:
            return
        yield from records
        after = page[-1].id


def _exported(rows: Rows, turn: TurnView, *, tokens: bool) -> Record:
    known = read_contents(rows, turn.id)
    if known is None:
        raise AssertionError("what is read in one moment is all there")
    record: Record = {
        **{"id": turn.id, "session": turn.session_id, "session_key": turn.session_key},
        **{"user": turn.user, "index": turn.index, "kind": turn.kind, "call": turn.call},
        **{"task": turn.task, "group": turn.group, "session_outcome": turn.session_outcome},
        **{"policy_version": turn.policy_version, "created_at": turn.created_at},
        **{"request": known.request_text, "reply": known.reply_text},
        **{"next_state": _state(known.next_state), "voices": [list(v) for v in known.voices]},
        **{"judged": turn.judged, "verdict": turn.verdict, "verdict_by": turn.source},
        **{"feedback": list(known.feedback), "hints": list(known.hints)},
        "sample": turn.sample.state if turn.sample else None,
        "trained_in_step": turn.trained_in_step,
        "untrained_because": turn.untrained_because,
    }
    if tokens:
        done, prompt = known.completion, read_prompt(rows, turn.id)
        record |= {"prompt": prompt, "tokens": done.tokens, "logprobs": done.logprobs}
    return record


def _state(state: NextState | None) -> Record | None:
    if state is None:
        return None
    return {"role": state.role, "text": state.text, "beside": [list(one) for one in state.beside]}


# Rows of a table, filtered, the newest at the end

Table = Literal["turns", "verdicts", "feedback", "samples", "steps", "versions"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows; None: all."""

    session: str | None = None
    """The ledger's number, or the client's name for it."""
    user: str | None = None
    kind: str | None = None
    verdict: str | None = None
    """"1", "0", "-1", or "none": judged, and no vote was valid."""
    trained: bool | None = None
    since: float | None = None
    """Seconds since 1970."""
    after: int = 0
    """Only rows of higher turns."""
    before: int | None = None
    """Only rows of lower turns."""


_OF_TURN = "turns.id AS turn, turns.session_id AS session, sessions.user, policy_version"
_ATTEMPT = 'sessions.task, groups.name AS "group"'
_HINTS = "(SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints"
_FEEDBACK = (
    "feedback.created_at, feedback.score, feedback.source, final, feedback.task, "
    'task_group AS "group", unused'
)
_FIELDS: Mapping[Table, str] = {
    "turns": 'turns.id, session_id AS session, sessions.user, idx AS "index", '
    f"{_ATTEMPT}, turns.kind, "
    "kind_reason AS reason, call, policy_version, fallback, prompt_tokens, "
    "completion_tokens, turns.created_at, role AS next_role, "
    "verdicts.turn_id IS NOT NULL AS judged, value AS verdict, verdicts.source AS verdict_by, "
    f"{_HINTS}, state AS sample, "
    "CASE state WHEN 'trained' THEN step_id END AS trained_in_step, untrained_because",
    "verdicts": f"{_OF_TURN}, verdicts.created_at, value AS verdict, "
    "verdicts.source AS verdict_by, verdicts.judged AS judge, verdicts.score, "
    "(SELECT json_group_array(value) FROM (SELECT value FROM votes WHERE votes.turn_id = turns.id "
    f"AND about = 'verdict' ORDER BY n)) AS votes, {_HINTS}",
    "feedback": f"feedback.id, {_OF_TURN}, {_FEEDBACK}",
    "samples": f"samples.id, {_OF_TURN}, samples.created_at, state, reward, advantage, "
    f'hint IS NOT NULL AS hinted, {_ATTEMPT}, idx AS "index", step_id AS step',
    "steps": "id, status, parent, version, created_at, finished_at, "
    "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, "
    # What is for programs alone is long; SQLite drops it without Python's lock.
    "json_remove(metrics, '$.rule', '$.answers') AS metrics, error, outage",
    "versions": "id, parent, step, created_at, state_ref IS NOT NULL AS saved, "
    "(SELECT id FROM steps WHERE steps.version = versions.id) AS made_by_step, "
    "(SELECT COUNT(*) FROM turns WHERE kind = 'main' AND policy_version = versions.id) "
    "AS main_turns",
}
"""The fields of a record, in their order. A turn's outcome is added to them by `outcome.py`."""
_READ_AS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("judged", "hinted", "outage", "saved", "final"), bool),
    "votes": json.loads,
    "metrics": lambda text: json.loads(text or "{}"),
}
"""Fields that SQLite knows only as numbers and texts."""
_TURNS = (
    "turns JOIN sessions ON sessions.id = turns.session_id "
    "LEFT JOIN groups ON groups.id = group_id "
    "LEFT JOIN next_states ON next_states.turn_id = turns.id "
    "LEFT JOIN verdicts ON verdicts.turn_id = turns.id "
    "LEFT JOIN samples ON samples.turn_id = turns.id"
)
_FROM: Mapping[Table, str] = {
    "steps": "steps",
    "versions": "versions",
    "feedback": f"{_TURNS} JOIN feedback ON feedback.turn_id = turns.id",
}
_ORDER: Mapping[Table, str] = {
    "turns": "turns.id DESC",
    "verdicts": "verdicts.created_at DESC, verdicts.turn_id DESC",
    "feedback": "feedback.id DESC",
    "samples": "samples.id DESC",
    "steps": "id DESC",
    "versions": "id DESC",
}


_NEAR = 1000
"""Turns among which those that are wanted are sought one by one."""


def read(rows: Rows, table: Table, wanted: Filter, limit: int | None) -> list[Record]:
    """The newest `limit` rows that are wanted, oldest first."""
    where, values = _where(table, wanted)
    if table != "turns" or limit is None or wanted.session is not None:
        return _read(rows, table, where, values, limit)
    # The rows of turns are wide. Most filters find enough of them among the newest; else indexes
    # say which they are.
    newest = rows.one("SELECT MAX(id) FROM turns") or 0
    top = newest if wanted.before is None else min(newest, wanted.before - 1)
    after = max(wanted.after, top - _NEAR)
    near = _read(rows, table, *_where(table, replace(wanted, after=after)), limit)
    if len(near) == limit or after == wanted.after:
        return near
    if wanted.since is not None or (found := _newest(rows, wanted, limit)) is None:
        return _read(rows, table, where, values, limit)
    return _read(rows, table, "WHERE turns.id IN (SELECT value FROM json_each(?))", [found], limit)


def _newest(rows: Rows, wanted: Filter, limit: int) -> str | None:
    """JSON of the ids of the newest turns that are wanted; None: of all that there are.

    Each condition is a set of ids in the order of an index, or sorted once, and the newest of all
    sets are merged, so that the last is read as far as it is wanted.
    """
    sets, values = list[str](), list[Any]()

    def within(name: str, query: str, *given: Any, but: bool = False) -> None:
        bounds = f"{name} > {wanted.after}"
        if wanted.before is not None:
            bounds += f" AND {name} < {wanted.before}"
        joined = ("EXCEPT " if but else "INTERSECT ") if sets else ""
        sets.append(f"{joined}SELECT {name} FROM {query} AND {bounds}")
        values.extend(given)

    if wanted.verdict is not None:
        vote = None if wanted.verdict == "none" else int(wanted.verdict)
        within("turn_id", "verdicts WHERE value IS ?", vote)
    if wanted.trained:
        within("turn_id", "samples WHERE state = 'trained'")
    if wanted.user is not None:
        of_user = "sessions CROSS JOIN turns ON session_id = sessions.id WHERE user = ?"
        within("turns.id", of_user, wanted.user)
    if wanted.kind is not None:
        within("id", "turns WHERE kind = ?", wanted.kind)
    if wanted.trained is False:
        if not sets:
            within("id", "turns WHERE TRUE")
        within("turn_id", "samples WHERE state = 'trained'", but=True)
    if not sets:
        return None
    found = rows.rows(f"{' '.join(sets)} ORDER BY 1 DESC LIMIT ?", *values, limit)
    return json.dumps([row[0] for row in found])


def _read(
    rows: Rows, table: Table, where: str, values: Sequence[Any], limit: int | None
) -> list[Record]:
    found = rows.rows(
        f"SELECT {_FIELDS[table]} FROM {_FROM.get(table, _TURNS)} "
        f"{where} ORDER BY {_ORDER[table]} LIMIT ?",
        *(*values, -1 if limit is None else limit),
    )
    names = found[0].keys() if found else []
    records = [dict(zip(names, row, strict=True)) for row in reversed(found)]
    for name in _READ_AS.keys() & set(names):
        for record in records:
            record[name] = _READ_AS[name](record[name])
    return records


def _where(table: Table, wanted: Filter) -> tuple[str, list[Any]]:
    conditions, values = list[str](), list[Any]()
    no_index = "+" if table == "turns" else ""  # which are looked at in their order

    def demand(condition: str, *given: Any) -> None:
        conditions.append(condition)
        values.extend(given)

    if table in ("verdicts", "samples"):
        demand(f"{table}.turn_id IS NOT NULL")
    if wanted.session is not None:
        named = "SELECT id FROM sessions WHERE key = ? OR CAST(id AS TEXT) = ?"
        demand(f"turns.session_id IN ({named})", *[wanted.session] * 2)
    if wanted.user is not None:
        demand(f"{no_index}sessions.user = ?", wanted.user)
    if wanted.kind is not None:
        demand(f"{no_index}turns.kind = ?", wanted.kind)
    if wanted.verdict == "none":
        demand(f"verdicts.turn_id IS NOT NULL AND {no_index}verdicts.value IS NULL")
    elif wanted.verdict is not None:
        demand(f"{no_index}verdicts.value = ?", int(wanted.verdict))
    if wanted.trained is not None:
        demand(f"{no_index}samples.state IS {'' if wanted.trained else 'NOT '}'trained'")
    if wanted.since is not None:
        demand(f"{table}.created_at >= ?", wanted.since)
    if wanted.after:
        demand("turns.id > ?", wanted.after)
    if wanted.before is not None:
        demand("turns.id < ?", wanted.before)
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", values


def in_full(ledger: Outside, table: Table, record: Record) -> Record:
    """A record of `read` with all that the ledger holds of it, at one moment."""
    with ledger.moment():
        if table == "steps":
            return record | _full_step(ledger, record["id"])
        if table == "versions":
            row = ledger.row(
                "SELECT state_ref, sampler_ref FROM versions WHERE id = ?", record["id"]
            )
            return record | (dict(row) if row else {})
        if table == "feedback":
            text = ledger.one("SELECT text FROM feedback WHERE id = ?", record["id"])
            return record | {"text": text}
        turn_id = record["id"] if table == "turns" else record["turn"]
        turn, known = read_turn(ledger, turn_id), read_contents(ledger, turn_id)
        if turn is None or known is None:  # forgotten meanwhile
            return record
        if table == "turns":
            return record | _full_turn(turn, known, read_prompt(ledger, turn_id))
        return record | (_said(known) if table == "verdicts" else _full_sample(known))


def _full_turn(turn: TurnView, known: Contents, prompt: Sequence[int]) -> Record:
    done = known.completion
    return {
        **{"session_key": turn.session_key, "trace": known.trace, "stop_reason": done.stop_reason},
        **{"params": known.params, "cached_tokens": done.cached_tokens},
        **{"request_text": known.request_text, "reply_text": known.reply_text},
        **_said(known),
        **{"prompt": prompt, "tokens": done.tokens, "logprobs": done.logprobs},
        **{"topk_ids": done.topk_ids, "topk_logprobs": done.topk_logprobs},
    }


def _said(known: Contents) -> Record:
    """What came next, and what was made of it."""
    answers, hints = list(known.answers), list(known.hints)
    return {
        **{"next_state": _state(known.next_state), "feedback": list(known.feedback)},
        **{"answers": answers, "hint_texts": hints},
        **{"judge_prompt": known.asked, "by_second": known.by_second, "audit": known.audit},
    }


def _full_sample(known: Contents) -> Record:
    return {
        **{"hint": known.hint, "untaught": known.untaught, "overlap": known.overlap},
        **{"weight": known.weight, "advantages": known.advantages},
    }


def _full_step(rows: Rows, step_id: int) -> Record:
    taken = rows.rows(
        "SELECT samples.id AS sample, turn_id AS turn FROM step_samples "
        "JOIN samples ON samples.id = sample_id WHERE step_samples.step_id = ? ORDER BY samples.id",
        step_id,
    )
    metrics = rows.one("SELECT metrics FROM steps WHERE id = ?", step_id)
    rule: Any = json.loads(metrics).get("rule") if metrics else None
    return {"taken": [dict(row) for row in taken], "rule": rule}
