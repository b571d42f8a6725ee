"""Fill a ledger as after long use: rows as the tables write them, in bulk."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ledger import sql
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.turn_state import Reason

SESSION = 10
"""Turns of one session; nothing follows the last one."""
PER_STEP = 16
_REFUSED = ("neutral verdict, no hint", Reason.HUNG_UP, Reason.SAMPLING)


def fill(directory: Path, turns: int, *, blob: int = 400, seed: int = 0) -> None:
    """Write `turns` turns with `blob` bytes of arrays each: most judged, half of those trained.

    The later a version, the better it is: verdicts of +1 go from a third to nine tenths.
    """
    ledger = Ledger(directory)
    ledger.bind({"model": "demo", "method": "combine", "backend": "local"})
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    rng = random.Random(seed)
    rows = list(_turns(turns, rng, blob))
    samples = [row for row in rows if row["sample"]]
    with sql(ledger).transaction() as tx:
        tx.executemany(
            "INSERT INTO sessions (id, user, key, created_at) VALUES (?, ?, ?, ?)",
            [(i + 1, f"user{i % 3}", f"key{i}", 1e9 + i) for i in range(-(-turns // SESSION))],
        )
        _steps(tx, len(samples) // PER_STEP)
        columns = [name for name in rows[0] if name not in ("next", "verdict", "hint", "sample")]
        tx.executemany(
            f"INSERT INTO turns ({', '.join(columns)}) VALUES "
            f"({', '.join(f':{name}' for name in columns)})",
            rows,
        )
        _judged(tx, rows)
        _samples(tx, samples)
        tx.executemany(
            "INSERT INTO spend (created_at, purpose, turn_id, prefill, cached, sampled, trained, "
            "usd) VALUES (1e9, ?, ?, 100, 900, 10, 0, ?)",
            [
                (purpose, row["id"], 0.001)
                for row in rows
                for purpose in (("serve", "judge") if row["verdict"] != "-" else ("serve",))
            ],
        )
    ledger.close()


def _turns(count: int, rng: random.Random, blob: int) -> Iterator[dict[str, Any]]:
    arrays = [os.urandom(blob) for _ in range(16)]
    for i in range(count):
        side, last = i % SESSION == 3, i % SESSION == SESSION - 1
        version = max(0, int((i / count) * (count // (2 * PER_STEP)) * 0.8))
        good = 0.33 + 0.57 * i / count
        luck = rng.random()
        refused = Reason.SIDE if side else rng.choice(_REFUSED) if luck > 0.9 else None
        judged = not (side or last or refused not in (None, _REFUSED[0]))
        verdict = "-" if not judged else 0 if refused else 1 if rng.random() < good else -1
        sampled = judged and refused is None and i < 0.9 * count
        index = 0 if side else i % SESSION - (i % SESSION > 3)
        yield {
            "id": i + 1,
            "session_id": i // SESSION + 1,
            "idx": index,
            "kind": "side" if side else "main",
            "kind_reason": "recap" if side else "the agent's own conversation",
            "policy_version": version,
            "created_at": 1e9 + 10 * i,
            **{name: arrays[(i + k) % 16] for k, name in enumerate(_ARRAYS)},
            "prompt_tokens": 11_000,
            "topk": 4,
            "completion_tokens": 300,
            "cached_tokens": 0,
            "stop_reason": "stop",
            "params": '{"max_tokens": 512}',
            "hint_at": None,
            "request_text": "secret request",
            "reply_text": "secret reply",
            "history": "[]",
            "reply_digest": "d",
            "state": "refused" if refused else "judging" if judged else "waiting",
            "reason": refused,
            "next": None if side or last else "user",
            "verdict": verdict,
            "hint": judged and luck < 0.2,
            "sample": sampled,
        }


_ARRAYS = ("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs")


def _steps(tx: Any, count: int) -> None:
    metrics = json.dumps({"samples": PER_STEP, "losses": [0.5, 0.25], "grad_norm": 1.5})
    tx.executemany(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)",
        [(i, i - 1, i, f"s{i}", f"p{i}", 1e9 + i) for i in range(1, count + 1)],
    )
    tx.executemany(
        "INSERT INTO steps (id, status, parent, version, created_at, finished_at, metrics) "
        "VALUES (?, 'committed', ?, ?, ?, ?, ?)",
        [(i, i - 1, i, 1e9 + i, 1e9 + i, metrics) for i in range(1, count + 1)],
    )


def _judged(tx: Any, rows: list[dict[str, Any]]) -> None:
    tx.executemany(
        "INSERT INTO next_states (turn_id, role, text, created_at) "
        "VALUES (:id, :next, 'secret answer', :created_at)",
        [row for row in rows if row["next"]],
    )
    judged = [row for row in rows if row["verdict"] != "-"]
    tx.executemany(
        "INSERT INTO verdicts (turn_id, value, created_at, judged) "
        "VALUES (:id, :verdict, :created_at, :verdict)",
        judged,
    )
    tx.executemany(
        "INSERT INTO votes VALUES (?, ?, ?, 'secret vote')",
        [(row["id"], n, row["verdict"]) for row in judged for n in range(3)],
    )
    tx.executemany(
        "INSERT INTO hints (turn_id, rank, text) VALUES (:id, 0, 'secret hint')",
        [r for r in judged if r["hint"]],
    )


def _samples(tx: Any, rows: list[dict[str, Any]]) -> None:
    steps = len(rows) // PER_STEP
    placed = [(row, i // PER_STEP + 1) for i, row in enumerate(rows)]
    tx.executemany(
        "INSERT INTO samples (id, turn_id, reward, step_id, created_at) VALUES (?, ?, ?, ?, ?)",
        [
            (i + 1, row["id"], row["verdict"], step if step <= steps else None, row["created_at"])
            for i, (row, step) in enumerate(placed)
        ],
    )
    tx.executemany(
        "UPDATE turns SET state = ? WHERE id = ?",
        [("trained" if step <= steps else "queued", row["id"]) for row, step in placed],
    )
    tx.executemany(
        "INSERT INTO step_samples VALUES (?, ?)",
        [(step, i + 1) for i, (_, step) in enumerate(placed) if step <= steps],
    )
