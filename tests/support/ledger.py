"""What a ledger holds: its invariants, rows by state, bills, and outcomes from its columns.

Rule: it only reads. SQLite's own recovery after a kill is the product's to do.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tinker_claw.ledger.codec import unpack_ids
from tinker_claw.ledger.database import Database
from tinker_claw.ledger.jobs import TRIES
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import PURPOSES, Bill, Purpose, Spent
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import Identity, Place, Prompt, ServedTurn
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Completion, Kind, LessonBlock, SamplingParams, StopReason, Usage

KEPT_STATES, KEPT_ADAPTERS = 8, 32


@dataclass(frozen=True)
class Seen:
    """A reply that a client received to its end."""

    session: str
    text: str
    prompt_tokens: int
    completion_tokens: int


@cache
def _renderer() -> Renderer:
    return Renderer.load(str(MODEL_DIR), "qwen3")


class Row(tuple[Any, ...]):
    """Values of a row, by place or column."""

    columns: list[str]

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(self.columns.index(at) if isinstance(at, str) else at)


def _row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Row:
    row = Row(values)
    row.columns = [column[0] for column in cursor.description]
    return row


def everything(data: Path) -> bytes:
    """Contents of all files, without those that vanish during the search."""
    contents = list[bytes]()
    for folder, _, names in os.walk(data):
        for name in names:
            with suppress(FileNotFoundError):
                contents.append((Path(folder) / name).read_bytes())
    return b"".join(contents)


def read(data: Path, query: str, *values: Any) -> list[Row]:
    """Rows of the ledger, read without changing a byte of it."""
    with closing(_open(data)) as ledger:
        return ledger.execute(query, values).fetchall()


def sql(ledger: Ledger) -> Database:
    """The ledger's tables, for what no reader returns and no part of the product writes."""
    return ledger._db


def sql_connection(ledger: Ledger) -> sqlite3.Connection:
    """The ledger's connection, to count what it is asked."""
    return sql(ledger)._connection


def one(data: Path, query: str, *values: Any) -> Any:
    return read(data, query, *values)[0][0]


def judgeable(ledger: Ledger) -> list[int]:
    """Turns that wait to be judged, scored or queued, oldest first."""
    return sorted(job.turn_id for job in ledger.jobs.due())


def tries(ledger: Ledger, turn_id: int) -> int:
    """Failed tries to judge a turn for which it is to blame."""
    return sql(ledger).one("SELECT tries FROM jobs WHERE turn_id = ?", turn_id) or 0


def postpone(ledger: Ledger, turn_id: int, error: str, *, last: bool = False) -> None:
    """Record a try to judge a turn that failed by its own fault, or the last that may."""
    ledger.jobs.postpone(turn_id, TRIES if last else tries(ledger, turn_id) + 1, 1.0, error)


def _open(data: Path) -> sqlite3.Connection:
    ledger = sqlite3.connect(f"file:{data / 'ledger.sqlite3'}?mode=ro", uri=True, timeout=30)
    ledger.row_factory = _row
    return ledger


def check(data: Path, seen: Iterable[Seen], *, batch_size: int, remote: bool = False) -> int:
    """Check the invariants. Raises AssertionError where something was lost, doubled or made up.

    Returns the newest version. `remote`: states and samplers are not on this disk.
    """
    with closing(_open(data)) as ledger:
        ledger.execute("BEGIN")  # one moment for everything below
        assert ledger.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert ledger.execute("PRAGMA foreign_key_check").fetchall() == []
        _nothing_seen_is_missing(ledger, seen)
        _steps_have_their_samples(ledger, batch_size)
        newest = _versions_only_grow(ledger)
        _nothing_is_trained_twice(ledger, newest["id"])
    if not remote:
        assert (data / "states" / newest["state_ref"] / "optimizer.safetensors").is_file()
        assert (data / "adapters" / newest["sampler_ref"] / "adapter_model.safetensors").is_file()
        # Beyond those that are kept: what serves, what was loaded, what is being written.
        assert len(list((data / "states").iterdir())) <= KEPT_STATES + 3
        assert len(list((data / "adapters").iterdir())) <= KEPT_ADAPTERS + 3
    return newest["id"]


def _nothing_seen_is_missing(ledger: sqlite3.Connection, seen: Iterable[Seen]) -> None:
    rows = ledger.execute(
        "SELECT key, reply_text, prompt_tokens, completion_tokens, tokens FROM turns "
        "JOIN sessions ON sessions.id = session_id ORDER BY turns.id"
    ).fetchall()
    written = Counter(Seen(*row[:4]) for row in rows)
    missing = Counter(seen) - written
    assert not missing, f"seen by a client and not in the ledger: {missing}"
    for row in rows[-50:]:
        tokens = unpack_ids(row["tokens"])
        assert len(tokens) == row["completion_tokens"]
        said = _renderer().decode(tokens).removesuffix("<|im_end|>")
        assert said.strip() == row["reply_text"].strip(), "the tokens say something else"


def _steps_have_their_samples(ledger: sqlite3.Connection, batch_size: int) -> None:
    def count(rows: str, *values: Any) -> int:
        return ledger.execute(f"SELECT COUNT(*) FROM {rows}", values).fetchone()[0]

    for step in ledger.execute("SELECT * FROM steps"):
        whole = batch_size if step["lesson"] is None else 0
        committed = step["status"] == "committed"
        assert count("step_samples WHERE step_id = ?", step["id"]) == whole, step
        trained = count("samples WHERE step_id = ?", step["id"])
        assert trained == (whole if committed else 0), step
        unsaved = step["error"] == "its state was not saved"
        assert (step["version"] is not None) == (committed or unsaved), step
    assert not count(
        "samples JOIN turns ON turns.id = turn_id "
        "WHERE (state IN ('trained', 'forgotten')) <> (step_id IS NOT NULL)"
    )
    assert not count(
        "turns LEFT JOIN samples ON turn_id = turns.id "
        "WHERE (state = 'refused') <> (reason IS NOT NULL) "
        "OR (state IN ('waiting', 'judging') AND samples.id IS NOT NULL) "
        "OR (state IN ('held', 'queued', 'trained', 'forgotten') AND samples.id IS NULL)"
    )
    assert not count("steps WHERE status = 'intent' AND id < (SELECT MAX(id) FROM steps)")


def _versions_only_grow(ledger: sqlite3.Connection) -> Row:
    versions = ledger.execute("SELECT * FROM versions ORDER BY id").fetchall()
    assert [row["id"] for row in versions] == list(range(len(versions)))
    by_id = {row["id"]: row for row in versions}
    for row in versions[1:]:
        parent = by_id[row["parent"]]
        assert parent["id"] < row["id"]
        made = ledger.execute("SELECT parent FROM steps WHERE version = ?", (row["id"],)).fetchall()
        assert row["step"] == parent["step"] + len(made), "a step more, or the same state again"
        assert [step["parent"] for step in made] in ([], [row["parent"]])
        if not made:
            assert row["state_ref"] == parent["state_ref"], "it takes up the state of its parent"
    return versions[-1]


def _nothing_is_trained_twice(ledger: sqlite3.Connection, version: int) -> None:
    """Check that nothing is trained twice along the lineage of a version, by its steps."""
    trained = ledger.execute(
        "WITH RECURSIVE line (id) AS (SELECT ? UNION SELECT parent FROM versions "
        "JOIN line USING (id) WHERE parent IS NOT NULL) "
        "SELECT sample_id FROM steps JOIN line ON line.id = steps.version "
        "JOIN step_samples ON step_id = steps.id",
        (version,),
    ).fetchall()
    doubles = [sample for sample, n in Counter(row[0] for row in trained).items() if n > 1]
    assert not doubles, f"trained twice: {doubles}"


def sample_counts(ledger: Ledger) -> dict[str, int]:
    """Samples by what became of them; those that are held, where there are any."""
    none = dict.fromkeys(("queued", "trained", "expired", "quarantined"), 0)
    query = (
        "SELECT CASE WHEN step_id IS NOT NULL THEN 'trained' WHEN reason = ? THEN 'quarantined' "
        "WHEN state = 'refused' THEN 'expired' ELSE state END, COUNT(*) "
        "FROM samples JOIN turns ON turns.id = turn_id GROUP BY 1"
    )
    return none | sql(ledger).pairs(query, Reason.STEPS_FAILED)


def step_counts(ledger: Ledger) -> dict[str, int]:
    """Steps of each status."""
    none = dict.fromkeys(("intent", "committed", "void"), 0)
    return none | sql(ledger).pairs("SELECT status, COUNT(*) FROM steps GROUP BY status")


def verdict_counts(ledger: Ledger) -> dict[str, int]:
    """Verdicts of each value, and turns with hints."""
    rows = sql(ledger)
    found = rows.pairs("SELECT value, COUNT(*) FROM verdicts GROUP BY value")
    names = {1: "good", 0: "neutral", -1: "bad", None: "none"}
    hints = rows.one("SELECT COUNT(DISTINCT turn_id) FROM hints")
    return {name: found.get(value, 0) for value, name in names.items()} | {"hints": hints}


def session_outcome(ledger: Ledger, session_id: int) -> float | None:
    """How a session ended, as it was said last; None: nobody has said so."""
    return sql(ledger).one(
        "SELECT score FROM feedback WHERE session_id = ? AND final = 1 ORDER BY id DESC LIMIT 1",
        session_id,
    )


def billed(ledger: Ledger, where: str = "1", *values: Any) -> Spent:
    """Sum of some rows."""
    spent = Spent()
    for row in sql(ledger).rows(f"SELECT * FROM spend WHERE {where}", *values):
        usage = Usage(row["prefill"], row["cached"], row["sampled"], row["trained"])
        spent = spent.plus(Bill(row["purpose"], usage, row["usd"]))
    return spent


def of_turn(ledger: Ledger, turn: int) -> Usage:
    return billed(ledger, "turn_id = ?", turn).usage


def of_step(ledger: Ledger, step: int) -> Usage:
    return billed(ledger, "step_id = ?", step).usage


def by_purpose(ledger: Ledger) -> dict[Purpose, Spent]:
    return {purpose: ledger.spend.total(purpose=purpose) for purpose in PURPOSES}


def outcome(
    *,
    session_id: int,
    prompt: tuple[int, ...],
    completion: Completion,
    kind: Kind = Kind.MAIN,
    kind_reason: str = "test",
    policy_version: int = 0,
    hint_at: int | None = None,
    told: LessonBlock | None = None,
    request_text: str = "",
    history: tuple[str, ...] = (),
    **more: Any,
) -> ServedTurn:
    """Return an outcome with these values, whichever of its records holds them."""
    who: Any = {name: more.pop(name) for name in ("trace", "client") if name in more}
    place = {n: more.pop(n) for n in ("lost", "voices", "asked_by", "holds_secret") if n in more}
    if isinstance(reason := more.get("untrained_because"), str):
        more["untrained_because"] = TurnRefusal(reason)
    identity = Identity("key", kind, kind_reason, more.pop("request_kind", ""), **who)
    return ServedTurn(
        Place(identity, session_id, history, request_text, **place),
        more.pop("user", "me"),
        policy_version,
        Prompt(prompt, hint_at, lesson_block=told),
        completion,
        **more,
    )


COMPLETION = Completion(
    tokens=(5, 151_000, 7),
    logprobs=(-0.1, -1.2345678901234567, -1e-9),
    topk_ids=((5, 6), (151_000, 1), (7, 8)),
    topk_logprobs=((-0.1, -3.0), (-1.2345678901234567, -1.5), (-1e-9, -20.0)),
    stop_reason=StopReason.STOP,
    params=SamplingParams(max_tokens=9, seed=3, stop_tokens=(7,), student_topk=2),
    cached_tokens=2,
)


def new_turn(ledger: Ledger, key: str = "s", **changes: Any) -> ServedTurn:
    usual: dict[str, Any] = {
        "session_id": ledger.turns.session("me", key),
        "prompt": (1, 2, 3, 4),
        "completion": COMPLETION,
        "hint_at": 3,
        "request_text": "do it",
        "reply_text": "done",
        "history": ("a", "b"),
        "reply_digest": "r",
    }
    return outcome(**usual | changes)


def queue(ledger: Ledger, count: int, version: int = 0) -> list[int]:
    return [
        ledger.samples.add(
            ledger.turns.add(new_turn(ledger, f"q{i}", policy_version=version)), 1, None
        )
        for i in range(count)
    ]


def write_turns_for_ever(directory: Path) -> None:
    """Write turns for ever, in a process of its own; print a dot for every turn that is durable."""
    ledger = Ledger(directory)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    for number in range(1_000_000):
        ledger.turns.add(new_turn(ledger, str(number % 7)))
        os.write(1, b".")
