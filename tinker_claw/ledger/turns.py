"""Sessions, turns and next states.

Rule: a turn, its blocks and its bill are one transaction.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from tinker_claw.errors import ForgottenError
from tinker_claw.ledger.codec import (
    flat,
    load_prompt,
    pack_floats,
    pack_ids,
    rows_of,
    store_prompt,
    unpack_floats,
    unpack_ids,
)
from tinker_claw.ledger.database import LedgerTable, Rows, insert
from tinker_claw.ledger.images import images_of, store_images
from tinker_claw.ledger.spend import Bill, write_bill
from tinker_claw.privacy.marker import Privacy
from tinker_claw.served import Place, Prompt, ServedTurn
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState
from tinker_claw.types import (
    Attempt,
    Completion,
    Kind,
    LessonBlock,
    NextState,
    SamplingParams,
    StopReason,
    Turn,
    Writer,
)


@dataclass(frozen=True, slots=True)
class LastTurn:
    """Data of a turn that show whether a request extends it."""

    turn_id: int
    history: tuple[str, ...]
    reply_digest: str
    settled: bool
    """Whether it is a sample, or refused."""
    followed: bool
    """Whether it has its next state."""

    @property
    def chain(self) -> tuple[str, ...]:
        """Digests with which a request that extends this turn begins."""
        return (*self.history, self.reply_digest)


_NO_TOKENS = dict.fromkeys(("tokens", "logprobs", "topk_ids", "topk_logprobs"), ())
NO_IDS = (
    "hint_at = NULL, blocks = x'', prompt = x'00', tokens = x'00', logprobs = x'00', topk = 0, "
    "topk_ids = x'00', topk_logprobs = x'00'"
)
"""SQL that deletes a turn's token ids: x'00' is a blob of none, as codec packs it."""
OPEN = "state IN ('waiting', 'judging')"
"""SQL on a row of `turns`: it is neither a sample nor refused yet."""
OUTCOME = """
SELECT score FROM feedback WHERE feedback.session_id = sessions.id AND final = 1
  AND unused IS NULL ORDER BY feedback.id DESC LIMIT 1
"""
"""SQL on a row of `sessions`: the outcome of an episode; no row where none came in time."""
EPISODE_STEP = """
(SELECT COUNT(*) FROM turns AS before JOIN next_states ON next_states.turn_id = before.id
  WHERE before.session_id = turns.session_id AND before.kind = 'main' AND before.idx < turns.idx)
"""
"""SQL on a row of `turns`: the number of earlier replies that its episode built on: 0, 1, 2 ... A
reply requested again, because its client hung up, does not shift later steps."""
_KEPT_PARAMS = [field.name for field in fields(SamplingParams) if field.name != "images"]
_NEXT_INDEX = "SELECT COALESCE(MAX(idx) + 1, 0) FROM turns WHERE session_id = ? AND kind = ?"
_HIDDEN = re.compile(r"private-[0-9a-f]{32}")
_LATELY = 4
"""Newest turns of a session among which a request's predecessor is looked for."""
_RECENT_TURNS = 1000
"""Newest turns of all sessions among which those of a trace are looked for."""


def hidden(user: str, key: str) -> str:
    """Return a digest as the name under which a private session is remembered."""
    if _HIDDEN.fullmatch(key):
        return key
    return f"private-{hashlib.sha256(f'{user} {key}'.encode()).hexdigest()[:32]}"


def set_state(
    tx: sqlite3.Connection,
    to: TurnState,
    where: str,
    *values: Any,
    reason: str | None = None,
    detail: str | None = None,
) -> int:
    """Set the state of the turns that a condition selects; return how many.

    A turn whose system prompt holds a secret loses its ids in a final state. `detail`: what it
    waits for, for people.
    """
    moved = tx.execute(
        f"UPDATE turns SET state = ?, reason = ?, detail = ? WHERE {where} RETURNING id, secret",
        (to, reason, detail, *values),
    ).fetchall()
    if to.is_final:
        secret = [(row["id"],) for row in moved if row["secret"]]
        tx.executemany(f"UPDATE turns SET {NO_IDS} WHERE id = ?", secret)
    return len(moved)


def refuse(tx: sqlite3.Connection, refusal: TurnRefusal, where: str, *values: Any) -> int:
    """Refuse to train the turns that a condition selects; return how many."""
    reason, detail = refusal.reason, refusal.detail or None
    return set_state(tx, TurnState.REFUSED, where, *values, reason=reason, detail=detail)


def read_private(rows: Rows) -> dict[tuple[str, str], Privacy]:
    """Return sessions that are or were private, by user and hidden name."""
    marked = rows.rows("SELECT user, key, private FROM sessions WHERE private <> 0 ORDER BY id")
    return {(user, hidden(user, key)): Privacy(private) for user, key, private in marked}


def mark_private(tx: sqlite3.Connection, user: str, key: str, private: int) -> None:
    updated = tx.execute(
        "UPDATE sessions SET private = ? WHERE user = ? AND key = ?", (private, user, key)
    )
    if not updated.rowcount:
        tx.execute(
            "INSERT INTO sessions (user, key, created_at, private) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (user, key) DO UPDATE SET private = excluded.private",
            (user, hidden(user, key), time.time(), private),
        )


class TurnTable(LedgerTable):
    """Table of sessions and turns, written by the gateway."""

    def session(self, user: str, key: str) -> int:
        """Return the id of this session, created where it is new, and open it."""
        session_id = self._db.one(  # the statement below would use up a number
            "SELECT id FROM sessions WHERE user = ? AND key = ? AND closed_at IS NULL", user, key
        )
        if session_id is not None:
            return session_id
        with self._db.transaction() as tx:
            return tx.execute(
                "INSERT INTO sessions (user, key, created_at) VALUES (?, ?, ?) "
                "ON CONFLICT (user, key) DO UPDATE SET closed_at = NULL RETURNING id",
                (user, key, time.time()),
            ).fetchone()[0]

    def begin_anew(self, session_id: int) -> int:
        """Close a session for good; return the id of a new one of its name. The closed one keeps
        the name with its number behind it."""
        with self._db.transaction() as tx:
            user, key = tx.execute(
                "SELECT user, key FROM sessions WHERE id = ?", (session_id,)
            ).fetchone()
            tx.execute(
                "UPDATE sessions SET key = key || '#' || id, closed_at = ? WHERE id = ?",
                (time.time(), session_id),
            )
            return tx.execute(
                "INSERT INTO sessions (user, key, created_at) VALUES (?, ?, ?) RETURNING id",
                (user, key, time.time()),
            ).fetchone()[0]

    def enrol(self, session_id: int, user: str, attempt: Attempt) -> bool:
        """Record the task and group of a session, unless they are known.

        False: it belongs to another group.
        """
        with self._db.transaction() as tx:
            row = tx.execute(
                "SELECT group_id, name, groups.task FROM sessions LEFT JOIN groups "
                "ON groups.id = group_id WHERE sessions.id = ?",
                (session_id,),
            ).fetchone()
            group, over = row["group_id"], 0
            if attempt.group is not None and group is not None:
                if row["name"] != attempt.group or row["task"] != (attempt.task or row["task"]):
                    return False
                tx.execute(
                    "UPDATE groups SET size = MAX(size, ?) WHERE id = ?", (attempt.size, group)
                )
            elif attempt.group is not None:
                group, over = tx.execute(
                    "INSERT INTO groups (user, task, name, size) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (user, task, name) DO UPDATE SET size = MAX(size, excluded.size) "
                    "RETURNING id, over",
                    (user, attempt.task or "", attempt.group, attempt.size),
                ).fetchone()
            tx.execute(
                "UPDATE sessions SET task = COALESCE(task, ?), group_id = ?, "
                "episode = CASE WHEN episode = 0 AND ? THEN ? ELSE episode END WHERE id = ?",
                (attempt.task, group, attempt.episode, 1 + over, session_id),
            )
        return True

    def open_sessions(self) -> list[tuple[int, float]]:
        """Return open sessions with the time of their latest turn, longest ago first."""
        rows = self._db.rows(
            "SELECT id, COALESCE((SELECT created_at FROM turns WHERE id = "
            "(SELECT MAX(id) FROM turns WHERE session_id = sessions.id)), created_at) AS seen "
            "FROM sessions WHERE closed_at IS NULL ORDER BY seen, id"
        )
        return [(session, seen) for session, seen in rows]

    def file(self, session_id: int, trace: str, unfiled_id: int) -> None:
        """Move a trace's side turns from session `unfiled_id` to `session_id`, once that is
        known."""
        self._db.write(
            "UPDATE turns SET session_id = ?1, idx = idx + 1 + (SELECT COALESCE(MAX(idx), -1) "
            "FROM turns WHERE session_id = ?1 AND kind = 'side') "
            "WHERE session_id = ?2 AND kind = 'side' AND trace = ?3 "
            f"AND id > (SELECT MAX(id) FROM turns) - {_RECENT_TURNS}",
            session_id,
            unfiled_id,
            trace,
        )

    def first_stranger(self, user: str, channel: str, sender: str, name: str) -> bool:
        """Record who wrote in a channel without being an owner; return whether they are the first
        there."""
        query = "INSERT OR IGNORE INTO channels (user, channel, sender, name) VALUES (?, ?, ?, ?)"
        return self._db.write(query, user, channel, sender, name) == 1

    def forget_strangers(self) -> None:
        """Delete who wrote without being an owner, as the settings name the owners."""
        self._db.write("DELETE FROM channels")

    def mark_private(self, user: str, key: str, privacy: Privacy) -> None:
        """Set whether a session is private. A new session is stored under its hidden name."""
        with self._db.transaction() as tx:
            mark_private(tx, user, key, privacy)

    def close(self, session_ids: Sequence[int]) -> None:
        """Close these sessions until their next request."""
        with self._db.transaction() as tx:
            for session_id in session_ids:
                closed = "UPDATE sessions SET closed_at = ? WHERE id = ?"
                tx.execute(closed, (time.time(), session_id))
                secrets = "session_id = ? AND secret AND state = 'waiting'"
                refuse(tx, TurnRefusal(Reason.UNFOLLOWED_SECRET), secrets, session_id)

    def add(self, turn: ServedTurn, bill: Bill | None = None) -> int:
        """Write a turn and the bill for serving it; return its id. Durable when this returns.

        A turn may be refused here, too: its session is over, or a lesson in its prompt has been
        forgotten. A refused turn with a secret in its prompt is kept as text only.
        """
        place, who, prompt, done = turn.place, turn.place.identity, turn.prompt, turn.completion
        secret = place.holds_secret and turn.keeps_tokens
        voices = [(v.writer, v.what, len(v.words or v.text)) for v in place.voices]
        values: dict[str, Any] = {
            "session_id": place.session_id,
            "created_at": time.time(),
            "kind": who.kind,
            "kind_reason": who.reason,
            "request_kind": who.request_kind,
            "trace": who.trace,
            "client": who.client,
            "policy_version": turn.version,
            "fallback": turn.fallback,
            "response_id": turn.response_id,
            "lost": place.lost or None,
            "asked_by": place.asked_by,
            "request_text": place.text,
            "reply_text": turn.reply_text,
            "voices": json.dumps(voices, ensure_ascii=False),
            "secret": secret,
            "prompt_tokens": len(prompt.tokens),
            "completion_tokens": len(done.tokens),
            "cached_tokens": done.cached_tokens,
            "stop_reason": done.stop_reason,
            "history": json.dumps(place.history) if turn.keeps_tokens else "[]",
            "reply_digest": turn.reply_digest if turn.keeps_tokens else "",
        }
        with self._db.transaction() as tx:
            refusal = turn.untrained_because or _over(tx, place)
            keeps_ids = turn.keeps_tokens and not (secret and refusal)
            if keeps_ids and (lessons := prompt.lesson_block) and _lacks_lesson(tx, lessons):
                refusal, keeps_ids = TurnRefusal(Reason.FORGOTTEN_LESSON), not secret
                prompt = Prompt(lessons.without(prompt.tokens), hint_at=None)
            if not keeps_ids:
                done = replace(done, params=replace(done.params, stop=()), **_NO_TOKENS)
            kept = prompt if keeps_ids else Prompt((), hint_at=None)
            head = _blocks(tx, kept.extends)
            blocks, rest = store_prompt(tx, kept.tokens, head=head, shared=not secret)
            values |= {
                "state": TurnState.REFUSED if refusal else TurnState.WAITING,
                "reason": refusal and refusal.reason,
                "detail": refusal and (refusal.detail or None),
                "told": kept.lesson_block and json.dumps(astuple(kept.lesson_block)),
                "hint_at": kept.hint_at,
                "blocks": blocks,
                "prompt": rest,
                **_completion_columns(done),
                "idx": tx.execute(_NEXT_INDEX, (place.session_id, who.kind)).fetchone()[0],
            }
            turn_id = insert(tx, "turns", values)
            if refusal is None:
                store_images(tx, turn_id, turn.images)
            if bill is not None:
                write_bill(tx, bill, turn_id=turn_id)
        return turn_id

    def latest(
        self, session_id: int, kind: Kind = Kind.MAIN, *, most: int = _LATELY
    ) -> list[LastTurn]:
        """Return the newest turns of a session, newest first.

        More than one, because a request may have been repeated, and conversations that begin alike
        may share a session.
        """
        rows = self._db.rows(
            f"SELECT id AS turn_id, history, reply_digest, NOT {OPEN} AS settled, "
            "next_states.turn_id IS NOT NULL AS followed "
            "FROM turns LEFT JOIN next_states ON next_states.turn_id = id "
            "WHERE session_id = ? AND kind = ? ORDER BY idx DESC LIMIT ?",
            session_id,
            kind,
            most,
        )
        return [replace(LastTurn(**row), history=tuple(json.loads(row["history"]))) for row in rows]

    def add_next_state(self, turn_id: int, state: NextState) -> bool:
        """Attach a turn's next state. False: it already had one, which stays; or its text is
        gone."""
        with self._db.transaction() as tx:
            written = tx.execute(
                "INSERT OR IGNORE INTO next_states (turn_id, role, text, beside) "
                "SELECT id, ?, ?, ? FROM turns WHERE id = ? AND state <> 'forgotten' "
                "AND NOT dropped AND reason IS NOT ?",
                (state.role, state.text, json.dumps(state.beside), turn_id, Reason.UNCLEAR),
            ).rowcount
            if written:
                set_state(tx, TurnState.JUDGING, "id = ? AND state = 'waiting'", turn_id)
        return written == 1

    def get(self, turn_id: int) -> Turn:
        row = self._db.row(
            "SELECT turns.*, episode FROM turns JOIN sessions ON sessions.id = session_id "
            "WHERE turns.id = ?",
            turn_id,
        )
        if row is None:
            raise KeyError(turn_id)
        return Turn(
            id=turn_id,
            session_id=row["session_id"],
            index=row["idx"],
            kind=Kind(row["kind"]),
            policy_version=row["policy_version"],
            prompt=load_prompt(self._db, row),
            completion=completion_of(row),
            hint_at=row["hint_at"],
            request_text=row["request_text"],
            asked_by=Writer(row["asked_by"]),
            client=row["client"],
            reply_text=row["reply_text"],
            episode=row["episode"] > 0,
            lesson_block=told_of(row),
            images=images_of(self._db, turn_id),
            secret=bool(row["secret"]),
        )

    def next_state(self, turn_id: int) -> NextState | None:
        return read_next_state(self._db, turn_id)

    def opening(self, turn_id: int, most: int) -> str | None:
        """Return the first `most` characters of what a main turn answers; None: its owner did not
        ask it."""
        return self._db.one(
            "SELECT SUBSTR(request_text, 1, ?) FROM turns WHERE id = ? AND kind = 'main' "
            "AND asked_by = 'owner' AND request_kind <> 'tool loop' AND request_text <> ''",
            most,
            turn_id,
        )

    def is_open(self, turn_id: int) -> bool:
        """Return whether the turn exists and is neither a sample nor refused yet."""
        return self._db.row(f"SELECT 1 FROM turns WHERE id = ? AND {OPEN}", turn_id) is not None

    def stop_waiting(self, turn_id: int) -> None:
        """Refuse a turn that waits, as the writer after it is unknown: no later message answers
        it."""
        with self._db.transaction() as tx:
            refuse(tx, TurnRefusal(Reason.UNCLEAR), "id = ? AND state = 'waiting'", turn_id)

    def refuse(self, turn_id: int, refusal: TurnRefusal) -> None:
        """Refuse to train a turn."""
        with self._db.transaction() as tx:
            refuse(tx, refusal, "id = ?", turn_id)


def read_next_state(rows: Rows, turn_id: int) -> NextState | None:
    """Return the next state of a turn; None: none has come."""
    row = rows.row("SELECT role, text, beside FROM next_states WHERE turn_id = ?", turn_id)
    if row is None:
        return None
    beside = tuple((Writer(writer), words) for writer, words in json.loads(row["beside"]))
    return NextState(row["role"], row["text"], beside)


def _over(tx: sqlite3.Connection, place: Place) -> TurnRefusal | None:
    """Return why a turn of this session is no longer trained; None: it may be."""
    if place.identity.kind is Kind.SIDE:
        return None
    late = tx.execute(
        f"SELECT 1 FROM sessions WHERE id = ? AND (episode = 2 OR (episode = 1 AND ({OUTCOME}) "
        "IS NOT NULL))",
        (place.session_id,),
    ).fetchone()
    return TurnRefusal(Reason.EPISODE_OVER) if late else None


def _lacks_lesson(tx: sqlite3.Connection, lesson_block: LessonBlock) -> bool:
    """Return whether one of these lessons is gone."""
    ids = json.dumps(lesson_block.lessons)
    query = "SELECT 1 FROM json_each(?) WHERE value NOT IN (SELECT id FROM lessons)"
    return tx.execute(query, (ids,)).fetchone() is not None


def check_kept(tx: sqlite3.Connection, turn_id: int) -> None:
    """Check that a turn may still be written about.

    Raises:
        ForgottenError: it was forgotten meanwhile, or what followed it.
    """
    kept = (
        "SELECT 1 FROM turns WHERE id = ? AND state <> 'forgotten' AND NOT dropped "
        "AND reason IS NOT ?"
    )
    if tx.execute(kept, (turn_id, Reason.FORGOTTEN_NEXT)).fetchone() is None:
        raise ForgottenError(f"turn {turn_id} was forgotten meanwhile")


def remove_sample(tx: sqlite3.Connection, turn_id: int) -> None:
    """Remove the sample of a turn, unless it was trained."""
    which = "SELECT id FROM samples WHERE turn_id = ? AND step_id IS NULL"
    tx.execute(f"DELETE FROM step_samples WHERE sample_id IN ({which})", (turn_id,))
    tx.execute(f"DELETE FROM samples WHERE id IN ({which})", (turn_id,))


def reopen(tx: sqlite3.Connection, turn_id: int) -> None:
    """Judge a turn again, without its sample and its failed tries, so that it becomes a new one."""
    remove_sample(tx, turn_id)
    tx.execute("DELETE FROM jobs WHERE turn_id = ?", (turn_id,))
    set_state(tx, TurnState.JUDGING, "id = ?", turn_id)


def _blocks(tx: sqlite3.Connection, turn_id: int | None) -> bytes:
    """Return the blocks of a turn's prompt; none without a turn, or if it was forgotten
    meanwhile."""
    row = tx.execute("SELECT blocks FROM turns WHERE id = ?", (turn_id,)).fetchone()
    return row["blocks"] if row else b""


def _completion_columns(done: Completion) -> dict[str, Any]:
    params = {name: getattr(done.params, name) for name in _KEPT_PARAMS}
    return {
        "params": json.dumps(params),
        "tokens": pack_ids(done.tokens),
        "logprobs": pack_floats(done.logprobs),
        "topk": len(done.topk_ids[0]) if done.topk_ids else 0,
        "topk_ids": pack_ids(flat(done.topk_ids)),
        "topk_logprobs": pack_floats(flat(done.topk_logprobs)),
    }


def told_of(row: sqlite3.Row) -> LessonBlock | None:
    """Return the lessons in the prompt of a row of `turns`."""
    if row["told"] is None:
        return None
    lessons, at, tokens, instead = json.loads(row["told"])
    return LessonBlock(tuple(lessons), at, tokens, tuple(instead))


def completion_of(row: sqlite3.Row) -> Completion:
    """Return the completion in a row of `turns`, as it was sampled."""
    params = json.loads(row["params"])
    params |= {name: tuple(params[name]) for name in ("stop_tokens", "stop")}
    return Completion(
        tokens=unpack_ids(row["tokens"]),
        logprobs=unpack_floats(row["logprobs"]),
        topk_ids=rows_of(unpack_ids(row["topk_ids"]), row["topk"]),
        topk_logprobs=rows_of(unpack_floats(row["topk_logprobs"]), row["topk"]),
        stop_reason=StopReason(row["stop_reason"]),
        params=SamplingParams(**params),
        cached_tokens=row["cached_tokens"],
    )
