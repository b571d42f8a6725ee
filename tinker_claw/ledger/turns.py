"""Sessions, turns, next states, and what the judge said of them.

Rule: a turn, its blocks and its bill are one transaction, and so is everything that the judge said
of one turn.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

from tinker_claw.ledger.codec import (
    load,
    pack_float_rows,
    pack_floats,
    pack_id_rows,
    pack_ids,
    raw_ids,
    store,
    unpack_float_rows,
    unpack_floats,
    unpack_id_rows,
    unpack_ids,
)
from tinker_claw.ledger.database import Database
from tinker_claw.ledger.spend import Bill, write
from tinker_claw.privacy.marker import Privacy
from tinker_claw.types import (
    Attempt,
    Completion,
    Kind,
    Lost,
    NextState,
    SamplingParams,
    StopReason,
    Turn,
    Verdict,
    Vote,
)


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn as it leaves the gateway, before it has an id."""

    session_id: int
    kind: Kind
    kind_reason: str
    policy_version: int
    prompt: tuple[int, ...]
    completion: Completion
    hint_at: int | None
    request_text: str
    reply_text: str
    history: tuple[str, ...]
    """Digests of the request's messages, without those that the client drops from its history."""
    reply_digest: str
    """Digest of the assistant message that the client will send back as history."""
    untrained_because: str | None = None
    call: str = ""
    """What the request was for."""
    trace: str | None = None
    """The client's trace id."""
    response_id: str | None = None
    """The reply's name for its client."""
    fallback: str | None = None
    """Why another than the current version answered; None: it did not."""
    misfit: str | None = None
    """How a call breaks the schema of a strict tool; None: none does."""
    packed_prompt: bytes | None = field(default=None, repr=False)
    """The prompt as little-endian int32, where it is at hand."""
    keeps_tokens: bool = True
    """False: they are counted and not kept, and neither are the digests of the texts."""
    lost: Lost | None = None
    """Why no earlier turn got this request as its next state, although one waits for it."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """What the gateway needs to see whether a request extends this turn."""

    turn_id: int
    history: tuple[str, ...]
    reply_digest: str
    settled: bool
    followed: bool
    """It has its next state."""

    @property
    def chain(self) -> tuple[str, ...]:
        """What a request that goes on from it repeats."""
        return (*self.history, self.reply_digest)


_NO_TOKENS = dict.fromkeys(("tokens", "logprobs", "topk_ids", "topk_logprobs"), ())
TRIES = 3
"""In vain; then a turn is set aside."""
SET_ASIDE = "set aside: three times it could not be judged; `run.py rejudge` takes it up again"
"""Stands as the reason why such a turn is not trained."""
OVER = "it came after its episode had its outcome, or its group was over"
"""Why such a turn is not trained."""
OUTCOME = (
    "SELECT score FROM feedback WHERE feedback.session_id = sessions.id AND final = 1 "
    "ORDER BY feedback.id DESC LIMIT 1"
)
"""How an episode ended, for a row of `sessions`; nothing: nobody has said so."""
JUDGEABLE = f"""
(EXISTS (SELECT 1 FROM next_states WHERE turn_id = turns.id)
  OR EXISTS (SELECT 1 FROM verdicts WHERE turn_id = turns.id)
  OR EXISTS (SELECT 1 FROM sessions WHERE sessions.id = turns.session_id AND episode = 1
    AND ({OUTCOME}) IS NOT NULL AND turns.kind = 'main' AND turns.idx = (
      SELECT MAX(idx) FROM turns AS last WHERE last.session_id = sessions.id AND kind = 'main'
        AND last.untrained_because IS NOT '{OVER}')))
"""
"""Of an open row of `turns`, whether there is something to make a sample of: the last turn of an
episode has no next state, and its outcome is enough."""
_LONGEST = 2000
"""Characters that are kept of what came of a try in vain."""
DEMONSTRATION = """
SELECT CASE given.value WHEN 1 THEN NULLIF(later.reply_text, '') END FROM turns AS later
JOIN verdicts AS given ON given.turn_id = later.id AND given.value IS NOT -1
LEFT JOIN next_states AS said ON said.turn_id = later.id
WHERE (said.role = 'user' OR given.score IS NOT NULL)
  AND later.session_id = turns.session_id AND later.kind = 'main' AND later.idx > turns.idx
ORDER BY later.idx LIMIT 1
"""
"""The reply of `JudgementTable.demonstration`, for a row of `turns`."""
_SET_ASIDE = """
SELECT turns.id FROM turns JOIN next_states ON turn_id = turns.id
WHERE untrained_because = ? AND LENGTH(tokens) > 1 AND text <> '' ORDER BY turns.id
"""
_COLUMNS = (
    *("session_id", "kind", "policy_version", "created_at", "settled", "untrained_because"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "topk", "hint_at", "stop_reason"),
    *("call", "kind_reason", "fallback", "lost", "misfit", "trace", "response_id", "params"),
    *("reply_digest", "history", "request_text", "reply_text", "blocks", "prompt", "tokens"),
    *("logprobs", "topk_ids", "topk_logprobs"),
)
_INSERT = (
    f"INSERT INTO turns (idx, {', '.join(_COLUMNS)}) VALUES ((SELECT COALESCE(MAX(idx) + 1, 0) "
    f"FROM turns WHERE session_id = :session_id AND kind = :kind), "
    f"{', '.join(f':{name}' for name in _COLUMNS)})"
)
_LATELY = 4
"""Newest turns of a session among which the one before a request is sought."""
_RECENT_TURNS = 1000
"""Newest turns of all sessions among which those of a run are sought."""


class TurnTable:
    """Rows that the gateway writes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def session(self, user: str, key: str) -> int:
        """The id of this session, made when it is new, and open from now on."""
        row = self._db.row(
            "SELECT id FROM sessions WHERE user = ? AND key = ? AND closed_at IS NULL", user, key
        )
        if row is not None:
            return int(row["id"])
        with self._db.transaction() as tx:
            row = tx.execute(
                "INSERT INTO sessions (user, key, created_at) VALUES (?, ?, ?) "
                "ON CONFLICT (user, key) DO UPDATE SET closed_at = NULL RETURNING id",
                (user, key, time.time()),
            ).fetchone()
        return int(row["id"])

    def enrol(self, session_id: int, user: str, said: Attempt) -> bool:
        """What a session is an attempt at; what was said first holds.

        False: it is of another group.
        """
        with self._db.transaction() as tx:
            known = tx.execute(
                "SELECT group_id, name, groups.task FROM sessions LEFT JOIN groups "
                "ON groups.id = group_id WHERE sessions.id = ?",
                (session_id,),
            ).fetchone()
            group, over = known["group_id"], 0
            if said.group is not None and group is not None:
                if known["name"] != said.group or known["task"] != (said.task or known["task"]):
                    return False
                tx.execute("UPDATE groups SET size = MAX(size, ?) WHERE id = ?", (said.size, group))
            elif said.group is not None:
                group, over = tx.execute(
                    "INSERT INTO groups (user, task, name, size) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (user, task, name) DO UPDATE SET size = MAX(size, excluded.size) "
                    "RETURNING id, over",
                    (user, said.task or "", said.group, said.size),
                ).fetchone()
            tx.execute(
                "UPDATE sessions SET task = COALESCE(task, ?), group_id = ?, "
                "episode = CASE WHEN episode = 0 AND ? THEN ? ELSE episode END WHERE id = ?",
                (said.task, group, said.episode, 1 + over, session_id),
            )
        return True

    def open_sessions(self) -> list[tuple[int, float]]:
        """Sessions that are not closed, and when they were last heard of, the longest ago first."""
        rows = self._db.rows(
            "SELECT id, COALESCE((SELECT created_at FROM turns WHERE id = "
            "(SELECT MAX(id) FROM turns WHERE session_id = sessions.id)), created_at) AS seen "
            "FROM sessions WHERE closed_at IS NULL ORDER BY seen, id"
        )
        return [(row["id"], row["seen"]) for row in rows]

    def file(self, session_id: int, trace: str, unfiled_id: int) -> None:
        """This trace's side turns in session `unfiled_id` belong to `session_id`, it turned out."""
        with self._db.transaction() as tx:
            tx.execute(
                "UPDATE turns SET session_id = :to, idx = idx + 1 + (SELECT COALESCE(MAX(idx), -1) "
                "FROM turns WHERE session_id = :to AND kind = 'side') "
                "WHERE session_id = :unfiled AND kind = 'side' AND trace = :trace "
                f"AND id > (SELECT MAX(id) FROM turns) - {_RECENT_TURNS}",
                {"to": session_id, "unfiled": unfiled_id, "trace": trace},
            )

    def private_sessions(self) -> dict[tuple[str, str], Privacy]:
        """Those that are or once were private, by user and key."""
        rows = self._db.rows("SELECT user, key, private FROM sessions WHERE private <> 0")
        return {(row["user"], row["key"]): Privacy(row["private"]) for row in rows}

    def mark_private(self, user: str, key: str, privacy: Privacy) -> None:
        """A session is private from now on, or no longer; made when it is new."""
        with self._db.transaction() as tx:
            tx.execute(
                "INSERT INTO sessions (user, key, created_at, private) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (user, key) DO UPDATE SET private = excluded.private",
                (user, key, time.time(), int(privacy)),
            )

    def close(self, session_ids: Sequence[int]) -> None:
        """These sessions are over, until they are asked for again."""
        with self._db.transaction() as tx:
            tx.executemany(
                "UPDATE sessions SET closed_at = ? WHERE id = ?",
                [(time.time(), session_id) for session_id in session_ids],
            )

    def add(self, turn: NewTurn, bill: Bill | None = None) -> int:
        """Write a turn and what serving it cost; returns its id. Durable when this returns."""
        done, keeps = turn.completion, turn.keeps_tokens
        kept = done if keeps else replace(done, **_NO_TOKENS)
        raw = raw_ids(turn.prompt) if turn.packed_prompt is None else turn.packed_prompt
        values = {
            **{"session_id": turn.session_id, "kind": turn.kind, "kind_reason": turn.kind_reason},
            **{"policy_version": turn.policy_version, "created_at": time.time()},
            **{"call": turn.call, "trace": turn.trace, "fallback": turn.fallback},
            **{"response_id": turn.response_id, "lost": turn.lost, "misfit": turn.misfit},
            **{"request_text": turn.request_text, "reply_text": turn.reply_text},
            "hint_at": turn.hint_at,
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(done.tokens),
            "cached_tokens": done.cached_tokens,
            "stop_reason": done.stop_reason,
            "params": _params_json(done.params if keeps else replace(done.params, stop=())),
            "history": json.dumps(turn.history if keeps else ()),
            "reply_digest": turn.reply_digest if keeps else "",
            "tokens": pack_ids(kept.tokens),
            "logprobs": pack_floats(kept.logprobs),
            "topk": len(kept.topk_ids[0]) if kept.topk_ids else 0,
            "topk_ids": pack_id_rows(kept.topk_ids),
            "topk_logprobs": pack_float_rows(kept.topk_logprobs),
        }
        with self._db.transaction() as tx:
            because = turn.untrained_because or _over(tx, turn)
            values |= {"untrained_because": because, "settled": because is not None}
            values["blocks"], values["prompt"] = store(tx, raw if keeps else b"")
            turn_id = int(tx.execute(_INSERT, values).lastrowid or 0)
            if bill is not None:
                write(tx, bill, turn_id=turn_id)
        return turn_id

    def latest(
        self, session_id: int, kind: Kind = Kind.MAIN, *, most: int = _LATELY
    ) -> list[LastTurn]:
        """The newest turns of a session, the newest first.

        More than one, because a request may have been sent again, and conversations that open
        alike may share a session.
        """
        rows = self._db.rows(
            "SELECT id, history, reply_digest, settled, turn_id IS NOT NULL AS followed "
            "FROM turns LEFT JOIN next_states ON next_states.turn_id = id "
            "WHERE session_id = ? AND kind = ? ORDER BY idx DESC LIMIT ?",
            *(session_id, kind, most),
        )
        return [
            LastTurn(
                turn_id=row["id"],
                history=tuple(json.loads(row["history"])),
                reply_digest=row["reply_digest"],
                settled=bool(row["settled"]),
                followed=bool(row["followed"]),
            )
            for row in rows
        ]

    def add_next_state(self, turn_id: int, state: NextState) -> bool:
        """Attach what arrived after a turn. False: it had one, and the first one stays; or its
        words are gone, or are to go."""
        with self._db.transaction() as tx:
            cursor = tx.execute(
                "INSERT OR IGNORE INTO next_states (turn_id, role, text, created_at) "
                "SELECT id, ?, ?, ? FROM turns WHERE id = ? AND blanked IS NULL "
                f"AND NOT {IS_BEING_FORGOTTEN}",
                (state.role, state.text, time.time(), turn_id),
            )
        return cursor.rowcount == 1

    def get(self, turn_id: int) -> Turn:
        row = self._db.row(
            "SELECT turns.*, episode FROM turns JOIN sessions ON sessions.id = session_id "
            "WHERE turns.id = ?",
            turn_id,
        )
        if row is None:
            raise KeyError(turn_id)
        return _turn(row, load(self._db, row))

    def next_state(self, turn_id: int) -> NextState | None:
        row = self._db.row("SELECT role, text FROM next_states WHERE turn_id = ?", turn_id)
        return NextState(role=row["role"], text=row["text"]) if row else None

    def judgeable(self) -> list[int]:
        """Turns with a next state, or judged without one, or ended by the outcome of their episode,
        that are neither samples nor refused yet, oldest first."""
        rows = self._db.rows(
            # From the open turns to their next states, of which there are far more.
            f"SELECT id FROM turns WHERE settled = 0 AND {JUDGEABLE} ORDER BY id"
        )
        return [row["id"] for row in rows]

    def is_open(self, turn_id: int) -> bool:
        """Whether there is such a turn, and it is neither a sample nor refused yet."""
        return self._db.row("SELECT 1 FROM turns WHERE id = ? AND settled = 0", turn_id) is not None

    def refuse(self, turn_id: int, reason: str) -> None:
        """This turn will not be trained, and why."""
        with self._db.transaction() as tx:
            tx.execute(
                "UPDATE turns SET settled = 1, untrained_because = ? WHERE id = ?",
                (reason, turn_id),
            )


def _over(tx: sqlite3.Connection, turn: NewTurn) -> str | None:
    """Why a turn of this session is not trained any more; None: it may be."""
    if turn.kind is Kind.SIDE:
        return None
    late = tx.execute(
        f"SELECT 1 FROM sessions WHERE id = ? AND (episode = 2 OR (episode = 1 AND ({OUTCOME}) "
        "IS NOT NULL))",
        (turn.session_id,),
    ).fetchone()
    return OVER if late else None


def reopen(tx: sqlite3.Connection, turn_id: int) -> None:
    """A turn whose verdict is another one now goes its way to a sample again: one that waits gives
    way to it."""
    queued = "SELECT id FROM samples WHERE turn_id = ? AND state IN ('queued', 'held')"
    tx.execute(f"DELETE FROM step_samples WHERE sample_id IN ({queued})", (turn_id,))
    tx.execute(f"DELETE FROM samples WHERE id IN ({queued})", (turn_id,))
    tx.execute("UPDATE turns SET settled = 0, untrained_because = NULL WHERE id = ?", (turn_id,))


@lru_cache(maxsize=64)
def _params_json(params: SamplingParams) -> str:
    return json.dumps(asdict(params))


def _turn(row: sqlite3.Row, prompt: tuple[int, ...]) -> Turn:
    return Turn(
        id=row["id"],
        session_id=row["session_id"],
        index=row["idx"],
        kind=Kind(row["kind"]),
        policy_version=row["policy_version"],
        prompt=prompt,
        completion=completion_of(row),
        hint_at=row["hint_at"],
        request_text=row["request_text"],
        reply_text=row["reply_text"],
        episode=row["episode"] > 0,
    )


def completion_of(row: sqlite3.Row) -> Completion:
    """The completion in a row of `turns`, as it was sampled."""
    params = json.loads(row["params"])
    params |= {name: tuple(params.get(name, ())) for name in ("stop_tokens", "stop")}
    return Completion(
        tokens=unpack_ids(row["tokens"]),
        logprobs=unpack_floats(row["logprobs"]),
        topk_ids=unpack_id_rows(row["topk_ids"], row["topk"]),
        topk_logprobs=unpack_float_rows(row["topk_logprobs"], row["topk"]),
        stop_reason=StopReason(row["stop_reason"]),
        params=SamplingParams(**params),
        cached_tokens=row["cached_tokens"],
    )


@dataclass(frozen=True, slots=True)
class JudgedReply:
    """What a guard looks at of a main turn with a verdict."""

    turn_id: int
    text: str
    tokens: int
    nats: float
    """Mean -logprob of a sampled token."""
    cut: bool
    """Its limit of tokens ended it."""
    called_tools: bool
    verdict: float


# Votes, verdicts and hints


@dataclass(frozen=True, slots=True)
class Ballot:
    """One answer of the judge, as written and as understood."""

    answer: str
    value: Vote | None


class JudgementTable:
    """Rows that the judge writes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        turn_id: int,
        *,
        value: Vote | None,
        verdict_ballots: Sequence[Ballot],
        hint_ballots: Sequence[Ballot],
        hints: Sequence[str],
        prompt: str | None = None,
        by_second: bool = False,
        audit: Vote | None = None,
        audit_ballots: Sequence[Ballot] = (),
    ) -> None:
        """Write everything that a judge said of one turn. What was said outright still counts.

        Args:
            prompt: version of what the judge was asked; None: no judge was.
            audit: the auditor's verdict.
        """
        by_question = {"verdict": verdict_ballots, "hint": hint_ballots, "audit": audit_ballots}
        with self._db.transaction() as tx:
            for about, ballots in by_question.items():
                tx.executemany(
                    "INSERT INTO votes (turn_id, about, n, value, answer) VALUES (?, ?, ?, ?, ?)",
                    [(turn_id, about, n, b.value, b.answer) for n, b in enumerate(ballots)],
                )
            first = "(SELECT COALESCE(MAX(rank) + 1, 0) FROM hints WHERE turn_id = ?1)"
            tx.executemany(
                f"INSERT INTO hints (turn_id, rank, text) VALUES (?1, {first}, ?2)",
                [(turn_id, text) for text in hints],
            )
            tx.execute(
                "INSERT INTO verdicts "
                "(turn_id, value, created_at, judged, prompt, by_second, audit) "
                "VALUES (?1, ?2, ?3, ?2, ?4, ?5, ?6) ON CONFLICT (turn_id) DO UPDATE SET "
                "judged = excluded.judged, prompt = excluded.prompt, "
                "by_second = excluded.by_second, audit = excluded.audit",
                (turn_id, value, time.time(), prompt, by_second, audit),
            )

    def add_in_vain(self, turn_id: int, answer: str) -> int:
        """A try gave no verdict, by the turn's own fault; returns how many did.

        The last one sets the turn aside. `answer`: what the judge said, or what went wrong.
        """
        with self._db.transaction() as tx:
            tries = self.in_vain(turn_id)
            tx.execute(
                "INSERT INTO votes (turn_id, about, n, value, answer) "
                "VALUES (?, 'in vain', ?, NULL, ?)",
                (turn_id, tries, answer[:_LONGEST]),
            )
            if tries + 1 >= TRIES:
                tx.execute(
                    "UPDATE turns SET settled = 1, untrained_because = ? "
                    "WHERE id = ? AND settled = 0",
                    (SET_ASIDE, turn_id),
                )
        return tries + 1

    def in_vain(self, turn_id: int) -> int:
        """How many tries were in vain."""
        return self._db.one(
            "SELECT COUNT(*) FROM votes WHERE turn_id = ? AND about = 'in vain'", turn_id
        )

    def take_up(self, turn_ids: Sequence[int] | None) -> list[int]:
        """Turns that were set aside are to be judged again; returns which.

        Args:
            turn_ids: of these, those that can be; None: all. What has lost its text stays.
        """
        with self._db.transaction() as tx:
            found = [row["id"] for row in tx.execute(_SET_ASIDE, (SET_ASIDE,))]
            again = [one for one in found if turn_ids is None or one in turn_ids]
            for turn_id in again:
                tx.execute("DELETE FROM votes WHERE turn_id = ? AND about = 'in vain'", (turn_id,))
                tx.execute(
                    "UPDATE turns SET settled = 0, untrained_because = NULL WHERE id = ?",
                    (turn_id,),
                )
        return again

    def demonstration(self, turn_id: int) -> str | None:
        """The reply that the user accepted after this turn, if it is the first later one of the
        session that they answered and did not reject; None: there is none, or none yet."""
        return self._db.one(f"SELECT ({DEMONSTRATION}) FROM turns WHERE id = ?", turn_id)

    def take_up_corrected(self, accepted: int, reason: str) -> bool:
        """Rejected turns that were refused for this reason are open again, if what they lacked is a
        demonstration, and the turn `accepted` of their session has brought one. True: some are."""
        with self._db.transaction() as tx:
            found = tx.execute(
                "SELECT turns.id FROM turns JOIN turns AS later "
                "ON later.session_id = turns.session_id AND later.kind = turns.kind "
                "AND later.idx > turns.idx JOIN verdicts ON turn_id = turns.id "
                "WHERE later.id = ? AND value = -1 AND turns.untrained_because = ? "
                "AND LENGTH(turns.tokens) > 1",
                (accepted, reason),
            )
            again = [(row["id"],) for row in found if self.demonstration(row["id"])]
            tx.executemany(
                "UPDATE turns SET settled = 0, untrained_because = NULL WHERE id = ?", again
            )
        return bool(again)

    def verdict(self, turn_id: int) -> Verdict | None:
        """None: not judged yet. A verdict whose value is None: judged, no valid vote."""
        row = self._db.row("SELECT value, source, score FROM verdicts WHERE turn_id = ?", turn_id)
        if row is None:
            return None
        votes = self._db.rows(
            "SELECT value FROM votes WHERE turn_id = ? AND about = 'verdict' ORDER BY n", turn_id
        )
        return Verdict(votes=tuple(v["value"] for v in votes), **dict(row))

    def lately(self, most: int, after: int) -> list[JudgedReply]:
        """The newest main turns with a verdict, newest first; only those behind turn `after`."""
        rows = self._db.rows(
            "SELECT turns.id, reply_text, completion_tokens, logprobs, stop_reason, role, value "
            "FROM verdicts CROSS JOIN turns ON turns.id = verdicts.turn_id "
            "LEFT JOIN next_states ON next_states.turn_id = turns.id "
            "WHERE verdicts.turn_id > ? AND value IS NOT NULL AND kind = 'main' "
            "AND blanked IS NULL AND LENGTH(tokens) > 1 ORDER BY verdicts.turn_id DESC LIMIT ?",
            after,
            most,
        )
        return [
            JudgedReply(
                turn_id=row["id"],
                text=row["reply_text"],
                tokens=row["completion_tokens"],
                nats=-sum(unpack_floats(row["logprobs"])) / row["completion_tokens"],
                cut=row["stop_reason"] == StopReason.LENGTH,
                called_tools=row["role"] == "tool",
                verdict=row["value"],
            )
            for row in rows
        ]

    def verdicts(self, most: int, after: int) -> list[Vote]:
        """The newest, newest first, those without a valid vote left out; only behind turn
        `after`."""
        rows = self._db.rows(
            "SELECT value FROM verdicts WHERE turn_id > ? AND value IS NOT NULL "
            "ORDER BY turn_id DESC LIMIT ?",
            after,
            most,
        )
        return [row["value"] for row in rows]

    def opinions(self, most: int, after: int) -> list[tuple[float, float]]:
        """What the judge found, and what the user or else the auditor did, of the newest turns of
        which both are known, newest first; only behind turn `after`."""
        rows = self._db.rows(
            "SELECT judged, CASE source WHEN 'judge' THEN audit ELSE score END AS other "
            "FROM verdicts WHERE turn_id > ? AND judged IS NOT NULL AND other IS NOT NULL "
            "ORDER BY turn_id DESC LIMIT ?",
            after,
            most,
        )
        return [(row["judged"], row["other"]) for row in rows]

    def hints(self, turn_id: int) -> tuple[str, ...]:
        """Best first. What was said outright goes before what the judge has read, and where it
        accepts the reply, nothing is left to hint at."""
        rows = self._db.rows(
            "SELECT hints.text, hints.source, score FROM hints "
            "LEFT JOIN verdicts ON verdicts.turn_id = hints.turn_id "
            "WHERE hints.turn_id = ? AND COALESCE(score, -1) < 0 ORDER BY rank",
            turn_id,
        )
        outright = [row for row in rows if row["source"] != "judge"]
        return tuple(row["text"] for row in outright or rows)

    def counts(self) -> dict[str, int]:
        """How many verdicts of each value, and how many hints, so far."""
        names = {1: "good", 0: "neutral", -1: "bad", None: "none"}
        counts = dict.fromkeys([*names.values(), "hints"], 0)
        for row in self._db.rows("SELECT value, COUNT(*) AS n FROM verdicts GROUP BY value"):
            counts[names[row["value"]]] = row["n"]
        counts["hints"] = self._db.one("SELECT COUNT(DISTINCT turn_id) FROM hints")
        return counts
