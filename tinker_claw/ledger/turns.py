"""Sessions, turns and next states."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from tinker_claw.ledger.codec import (
    pack_float_rows,
    pack_floats,
    pack_id_rows,
    pack_ids,
    raw_ids,
    unpack_float_rows,
    unpack_floats,
    unpack_id_rows,
    unpack_ids,
)
from tinker_claw.ledger.database import Database
from tinker_claw.ledger.prompts import load, store
from tinker_claw.ledger.spend import Bill, write
from tinker_claw.types import Completion, Kind, NextState, SamplingParams, StopReason, Turn


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
    fallback: str | None = None
    """Why another than the current version answered; None: it did not."""
    packed_prompt: bytes | None = field(default=None, repr=False)
    """The prompt as little-endian int32, where it is at hand."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """What the gateway needs to see whether a request extends this turn."""

    turn_id: int
    history: tuple[str, ...]
    reply_digest: str


class TurnTable:
    """Rows that the gateway writes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def session(self, user: str, key: str) -> int:
        """The id of this session, made when it is new."""
        row = self._db.row("SELECT id FROM sessions WHERE user = ? AND key = ?", user, key)
        if row is not None:
            return int(row["id"])
        with self._db.transaction() as tx:
            cursor = tx.execute(
                "INSERT INTO sessions (user, key, created_at) VALUES (?, ?, ?)",
                (user, key, time.time()),
            )
        return int(cursor.lastrowid or 0)

    def add(self, turn: NewTurn, bill: Bill | None = None) -> int:
        """Write a turn and what serving it cost; returns its id. Durable when this returns."""
        done = turn.completion
        values = {
            "session_id": turn.session_id,
            "kind": turn.kind,
            "kind_reason": turn.kind_reason,
            "policy_version": turn.policy_version,
            "created_at": time.time(),
            "prompt_tokens": len(turn.prompt),
            "tokens": pack_ids(done.tokens),
            "logprobs": pack_floats(done.logprobs),
            "topk": len(done.topk_ids[0]) if done.topk_ids else 0,
            "topk_ids": pack_id_rows(done.topk_ids),
            "topk_logprobs": pack_float_rows(done.topk_logprobs),
            "completion_tokens": len(done.tokens),
            "cached_tokens": done.cached_tokens,
            "stop_reason": done.stop_reason,
            "params": _params_json(done.params),
            "hint_at": turn.hint_at,
            "request_text": turn.request_text,
            "reply_text": turn.reply_text,
            "history": json.dumps(turn.history),
            "reply_digest": turn.reply_digest,
            "settled": turn.untrained_because is not None,
            "untrained_because": turn.untrained_because,
            "call": turn.call,
            "trace": turn.trace,
            "fallback": turn.fallback,
        }
        with self._db.transaction() as tx:
            packed = raw_ids(turn.prompt) if turn.packed_prompt is None else turn.packed_prompt
            values["blocks"], values["prompt"] = store(tx, packed)
            columns = ", ".join(values)
            marks = ", ".join(f":{name}" for name in values)
            cursor = tx.execute(
                f"INSERT INTO turns (idx, {columns}) VALUES "
                f"((SELECT COALESCE(MAX(idx) + 1, 0) FROM turns "
                f"WHERE session_id = :session_id AND kind = :kind), {marks})",
                values,
            )
            turn_id = int(cursor.lastrowid or 0)
            if bill is not None:
                write(tx, bill, turn_id=turn_id)
        return turn_id

    def last(self, session_id: int) -> LastTurn | None:
        """The newest main turn of a session."""
        row = self._db.row(
            "SELECT id, history, reply_digest FROM turns "
            "WHERE session_id = ? AND kind = 'main' ORDER BY idx DESC LIMIT 1",
            session_id,
        )
        if row is None:
            return None
        return LastTurn(
            turn_id=row["id"],
            history=tuple(json.loads(row["history"])),
            reply_digest=row["reply_digest"],
        )

    def add_next_state(self, turn_id: int, state: NextState) -> bool:
        """Attach what arrived after a turn. False: it had one, and the first one stays."""
        with self._db.transaction() as tx:
            cursor = tx.execute(
                "INSERT OR IGNORE INTO next_states (turn_id, role, text, created_at) "
                "VALUES (?, ?, ?, ?)",
                (turn_id, state.role, state.text, time.time()),
            )
        return cursor.rowcount == 1

    def get(self, turn_id: int) -> Turn:
        row = self._db.row("SELECT * FROM turns WHERE id = ?", turn_id)
        if row is None:
            raise KeyError(turn_id)
        return _turn(row, load(self._db, row))

    def next_state(self, turn_id: int) -> NextState | None:
        row = self._db.row("SELECT role, text FROM next_states WHERE turn_id = ?", turn_id)
        return NextState(role=row["role"], text=row["text"]) if row else None

    def judgeable(self) -> list[int]:
        """Turns with a next state that are neither samples nor refused yet, oldest first."""
        rows = self._db.rows(
            "SELECT id FROM turns WHERE settled = 0 "
            "AND id IN (SELECT turn_id FROM next_states) ORDER BY id"
        )
        return [row["id"] for row in rows]

    def refuse(self, turn_id: int, reason: str) -> None:
        """This turn will not be trained, and why."""
        with self._db.transaction() as tx:
            tx.execute(
                "UPDATE turns SET settled = 1, untrained_because = ? WHERE id = ?",
                (reason, turn_id),
            )


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
