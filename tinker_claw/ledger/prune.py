"""Remove turns from the ledger: forgotten on request, or dropped for age or the file's size. Their
outcomes can still be shown and counted.

Rule: only requested data is removed, and no turn is dropped that may still be trained. Both blank
turns alike: the row keeps its numbers, and its space is released. A transaction takes a few
milliseconds, and the gateway can write between two. Forgetting that was begun is finished, at the
next start if need be.

From the request on, forgotten turns are not judged, trained or added to. SQLite overwrites deleted
data (secure_delete), free pages are released, and the log is emptied. Where SQLite moved rows
between pages, copies may stay between a page's cells; VACUUM, which needs the file for itself,
rewrites every page without them.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.codec import load, raw_ids, store, unraw_ids
from tinker_claw.ledger.database import Rows, Writer, set_meta
from tinker_claw.ledger.images import let_go, move
from tinker_claw.ledger.lessons import FORGOTTEN_LESSON, UNTOLD, orphans, taught_by
from tinker_claw.ledger.turns import BEGUN, mark_private, remove_sample, told_of
from tinker_claw.ledger.versions import read_line, withdraw_from_step
from tinker_claw.privacy.redact import name_digest

UNFOLLOWED = "nothing followed it before it was dropped for its age or the ledger's size"
UNSAID = "what followed it was forgotten"
FORGOTTEN = "forgotten"
"""Prefix of the new key of a forgotten session."""
SAFE_STATES = 8
"""Newest saved states whose samples are kept: a restart may go back that far and queue them
again."""
SLICE_S = 0.003
"""Seconds that a transaction may take, roughly."""
_ROWS = 25
_ANY = 1 << 62
"""Larger than every id."""
_PAGES = 64
"""Pages released at a time."""
_SPARE = 256
"""Free pages kept for later writes."""
_PATIENCE_S: Final = 60.0
"""Seconds to wait for readers to release the log."""
_RETRY_S: Final = 0.05

# Blanking

_SAID = {
    "next_states": "text = '', beside = '[]'",
    "votes": "answer = ''",
    "hints": "text = ''",
    "feedback": "text = '', key = NULL",
    "samples": "hint = CASE WHEN hint IS NOT NULL THEN '' END, untaught = NULL, "
    "teacher_logprobs = NULL, teacher_targets = NULL, teacher_ids = NULL, teacher_own = NULL, "
    "advantages = NULL",
}
"""Columns to blank of a turn's next state, votes, hints, feedback and sample, by table."""
_NOTHING = "x'00'"
"""Blob of no ids and no floats, as codec packs them."""
_ASKED = (
    f"settled = 1, blanked = ?1, request_text = '', reply_text = '', reply_digest = '', "
    "history = '[]', params = json_set(params, '$.stop', json_array()), hint_at = NULL, "
    f"blocks = x'', prompt = {_NOTHING}, tokens = {_NOTHING}, logprobs = {_NOTHING}, topk = 0, "
    f"topk_ids = {_NOTHING}, topk_logprobs = {_NOTHING}"
)
_NAMES = (
    "kind_reason = '', call = '', trace = NULL, response_id = NULL, fallback = NULL, "
    "client = '', voices = '[]', told = NULL"
)
"""Columns that may quote or name a client, or name its lessons."""


def _blank(tx: sqlite3.Connection, turn: int, why: Literal["forgotten", "dropped"]) -> None:
    """Blank a turn's texts and tokens; keep its numbers and outcome."""
    more = f", {_NAMES}" if why == "forgotten" else ""
    tx.execute(f"UPDATE turns SET {_ASKED}{more} WHERE id = ?2", (why, turn))
    _close_up(tx, "turns", "id", turn)
    let_go(tx, turn)
    _unsay(tx, turn)


def _unsay(tx: sqlite3.Connection, turn: int) -> None:
    """Blank a turn's next state, and everything derived from it."""
    for table, blank in _SAID.items():
        tx.execute(f"UPDATE {table} SET {blank} WHERE turn_id = ?", (turn,))
        _close_up(tx, table, "turn_id", turn)


def _close_up(tx: sqlite3.Connection, table: str, column: str, turn: int) -> None:
    """Release the space that a turn's rows no longer need.

    SQLite joins pages where a row is deleted, but not where it is updated to a shorter one.
    """
    tx.execute("PRAGMA defer_foreign_keys = ON")  # until this transaction ends
    rows = tx.execute(f"SELECT * FROM {table} WHERE {column} = ?", (turn,)).fetchall()
    tx.execute(f"DELETE FROM {table} WHERE {column} = ?", (turn,))
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        tx.executemany(f"INSERT INTO {table} VALUES ({marks})", map(tuple, rows))


# Dropping turns by age or file size

_DROPPABLE = f"""
SELECT turns.id, turns.created_at
FROM turns JOIN sessions ON sessions.id = session_id
  LEFT JOIN samples ON samples.turn_id = turns.id
  LEFT JOIN steps ON steps.id = samples.step_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
WHERE blanked IS NULL AND CASE WHEN settled THEN
    COALESCE(samples.state NOT IN ('queued', 'held'), 1)
    AND (samples.step_id IS NULL OR COALESCE(steps.version <= (
      SELECT id FROM versions WHERE state_ref IS NOT NULL ORDER BY id DESC
      LIMIT 1 OFFSET {SAFE_STATES - 1}), 0))
  ELSE closed_at IS NOT NULL AND next_states.turn_id IS NULL AND episode <> 1
    AND NOT EXISTS (SELECT 1 FROM verdicts WHERE verdicts.turn_id = turns.id) END
  AND turns.id BETWEEN ? AND ? ORDER BY turns.id LIMIT ?
"""
"""SQL of turns in a range of ids that can no longer be trained."""


def trim(
    database: Writer, before: float | None = None, most_bytes: int | None = None
) -> Iterator[int]:
    """Drop old turns in one pass, oldest first; yield the number of turns per transaction.

    Args:
        before: drop turns captured earlier, in seconds since 1970.
        most_bytes: drop while the file holds more.
    """

    def wanted(turn: sqlite3.Row) -> bool:
        old = before is not None and turn["created_at"] < before
        return old or (most_bytes is not None and live_bytes(database) > most_bytes)

    # Only a sweep frees shared prompt blocks, so one runs now and then.
    some = max(20, database.one("SELECT COUNT(*) FROM turns") // 50)
    at, unswept, total, more = 0, 0, 0, True
    while more and (found := database.rows(_DROPPABLE, at, _ANY, _ROWS)):
        dropped, until = 0, time.perf_counter() + SLICE_S
        with database.transaction() as tx:
            for passed, turn in enumerate(found):
                more = wanted(turn)
                # At least one turn, even if a busy machine has used up the time.
                if not more or (passed and time.perf_counter() > until):
                    break
                at = turn["id"] + 1
                dropped += _drop_turn(tx, turn["id"])
        yield dropped
        unswept, total = unswept + dropped, total + dropped
        if unswept >= some:
            yield from sweep(database)
            unswept = 0
    if unswept:
        yield from sweep(database)
    yield from give_back(database)
    if total:
        yield from emptied_log(database)


def _drop_turn(tx: sqlite3.Connection, turn: int) -> bool:
    """Drop a turn. False: it was taken up again meanwhile and may still be trained."""
    if tx.execute(_DROPPABLE, (turn, turn, 1)).fetchone() is None:
        return False
    tx.execute(
        "UPDATE turns SET untrained_because = ? WHERE id = ? AND settled = 0", (UNFOLLOWED, turn)
    )
    _blank(tx, turn, "dropped")
    return True


# Space


def live_bytes(database: Writer) -> int:
    """Return the bytes in use in the ledger's file, without its free pages."""
    pages = database.one("PRAGMA page_count") - database.one("PRAGMA freelist_count")
    return database.one("PRAGMA page_size") * pages


def sweep(database: Writer) -> Iterator[int]:
    """Delete the blocks that no prompt uses any more."""
    used, at = set[int](), 0
    top = database.one("SELECT MAX(id) FROM prompt_blocks") or 0
    query = "SELECT id, blocks FROM turns WHERE id > ? ORDER BY id LIMIT ?"
    while rows := database.rows(query, at, 2 * _ROWS):
        at = rows[-1]["id"]
        for row in rows:
            used.update(unraw_ids(row["blocks"]))
        yield 0
    block = 0
    while block < top:
        with database.transaction() as tx:
            # Turns written meanwhile may share blocks with deleted ones.
            for row in tx.execute(query, (at, -1)):
                at = row["id"]
                used.update(unraw_ids(row["blocks"]))
            found = tx.execute(
                "SELECT id FROM prompt_blocks WHERE id > ? ORDER BY id LIMIT ?",
                (block, 2 * _ROWS),
            ).fetchall()
            block = found[-1]["id"] if found else top
            unused = [(row["id"],) for row in found if row["id"] not in used]
            tx.executemany("DELETE FROM prompt_blocks WHERE id = ?", unused)
        yield 0


def give_back(database: Writer) -> Iterator[int]:
    """Release free pages, which makes the file smaller."""
    while database.one("PRAGMA freelist_count") > _SPARE:
        database.give_back(_PAGES)
        yield 0
    database.rows("PRAGMA wal_checkpoint(PASSIVE)")


# Forgetting

_THESE = "(SELECT value FROM json_each(?))"
"""SQL of the numbers in a JSON array."""


@dataclass(frozen=True, slots=True)
class UsedIn:
    """A step that trained on turns to be forgotten."""

    step: int
    version: int
    """Version that the step made."""
    before: int
    """Version from which the step began."""
    samples: int
    """Samples of the step that are to be forgotten."""
    live: bool
    """Whether the newest version descends from it."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Description of the data to forget."""

    session: int
    whole: bool
    """Whether the whole session is forgotten."""
    turns: tuple[int, ...]
    unsaid: tuple[int, ...]
    """Turns that stay, but lose their next state, votes and hints, because the next state, or the
    reply shown to their teacher, is among the forgotten data."""
    told: tuple[int, ...]
    """Turns that stay, without the lessons in their prompts that came from the forgotten data."""
    withdrawn: int
    """Number of samples taken out of the queue."""
    steps: tuple[UsedIn, ...]

    @property
    def roll_back_to(self) -> int | None:
        """Version before everything that was learned from it; None: no live version learned from
        it."""
        return min((used.before for used in self.steps if used.live), default=None)


def in_session(which: str, user: str | None) -> Callable[[Rows], Forgetting]:
    """Select a whole session, by its number or by the client's name for it."""

    def find(rows: Rows) -> Forgetting:
        found = rows.rows(
            "SELECT id, user FROM sessions WHERE (key IN (?1, ?3) OR CAST(id AS TEXT) = ?1) "
            "AND (?2 IS NULL OR user = ?2)",
            which,
            user,
            name_digest(which),
        )
        if not found:
            whose = "" if user is None else f" of user {user}"
            raise UndoError(
                f"{rows.path} has no session {which!r}{whose}; "
                "`tinker-claw log turns` lists them by their numbers"
            )
        if len(found) > 1:
            several = ", ".join(f"{row['id']} (of {row['user']})" for row in found)
            raise UndoError(
                f"{which!r} may be session {several}; give the number, or --user, or forget the "
                "first turn of the one that is meant (`tinker-claw log turns`)"
            )
        return _forgetting(rows, found[0]["id"], first=0)

    return find


def from_turn(turn_id: int) -> Callable[[Rows], Forgetting]:
    """Select a turn and the later ones of its session."""

    def find(rows: Rows) -> Forgetting:
        row = rows.row("SELECT session_id FROM turns WHERE id = ?", turn_id)
        if row is None:
            raise UndoError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists")
        return _forgetting(rows, row["session_id"], first=turn_id)

    return find


_BEFORE = """
-- The turn before the first forgotten one. Turns whose client hung up have no next state.
SELECT id FROM (SELECT turns.id, next_states.turn_id AS said FROM turns
    LEFT JOIN next_states ON next_states.turn_id = turns.id
  WHERE session_id = ?1 AND turns.id < ?2 AND kind = 'main'
    AND (next_states.turn_id IS NOT NULL OR settled = 0) ORDER BY turns.id DESC LIMIT 1)
WHERE said IS NOT NULL
UNION
-- Turns whose teacher may have been shown a forgotten one instead of a hint: it was asked after
-- that one came, or is being asked.
SELECT turns.id FROM turns JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
WHERE session_id = ?1 AND turns.id < ?2 AND value = -1
  AND NOT EXISTS (SELECT 1 FROM hints WHERE hints.turn_id = turns.id)
  AND (settled = 0 OR (hint IS NOT NULL
    AND samples.created_at >= (SELECT created_at FROM turns WHERE id = ?2)))
ORDER BY 1
"""
"""SQL of earlier turns of a session that were told something of turn `?2` or a later one."""


def _forgetting(rows: Rows, session: int, *, first: int) -> Forgetting:
    turns = _between(rows, session, first, _ANY)
    before = tuple(rows.column(_BEFORE, session, first))
    told = [turn for turn in taught_by(rows, json.dumps([*turns, *before])) if turn not in turns]
    touched = json.dumps([*turns, *before, *told])
    return Forgetting(
        session=session,
        whole=first == 0,
        turns=tuple(turns),
        unsaid=before,
        told=tuple(told),
        withdrawn=rows.one(
            "SELECT COUNT(*) FROM samples WHERE state IN ('queued', 'held') "
            f"AND turn_id IN {_THESE}",
            touched,
        ),
        steps=_steps(rows, touched),
    )


def _between(rows: Rows, session: int, first: int, last: int) -> list[int]:
    """Return the turns of a session that are not forgotten yet, oldest first."""
    return rows.column(
        "SELECT id FROM turns WHERE session_id = ? AND id BETWEEN ? AND ? "
        "AND blanked IS NOT 'forgotten' ORDER BY id",
        session,
        first,
        last,
    )


def _steps(rows: Rows, turns: str) -> tuple[UsedIn, ...]:
    live = read_line(rows).live
    found = rows.rows(
        "SELECT steps.id AS step, version, parent AS before, COUNT(*) AS samples FROM samples "
        f"JOIN steps ON steps.id = step_id WHERE state = 'trained' AND turn_id IN {_THESE} "
        "GROUP BY steps.id ORDER BY steps.id",
        turns,
    )
    return tuple(UsedIn(**row, live=row["version"] in live) for row in found)


def begin(database: Writer, found: Callable[[Rows], Forgetting]) -> Forgetting:
    """Record the data as to be forgotten; this cannot be undone.

    Raises:
        LedgerError: it cannot be written.
    """
    what = found(database)
    these = json.dumps(what.turns)
    with database.transaction() as tx:
        withdraw_from_step(tx, [*what.turns, *what.unsaid, *what.told])
        for turn in what.told:
            _untrain(tx, turn, FORGOTTEN_LESSON)
        sources = json.dumps([*what.turns, *what.unsaid])
        tx.execute(f"DELETE FROM lessons WHERE turn_id IN {_THESE}", (sources,))
        tx.execute(
            "UPDATE samples SET expired_because = ?, "
            "state = CASE state WHEN 'trained' THEN state ELSE 'expired' END "
            f"WHERE state IN ('queued', 'held', 'trained') AND turn_id IN {_THESE}",
            (FORGOTTEN, these),
        )
        tx.execute(f"UPDATE turns SET settled = 1 WHERE settled = 0 AND id IN {_THESE}", (these,))
        for turn in what.unsaid:
            _untrain(tx, turn, UNSAID)
            _unsay(tx, turn)
        if what.whole:
            _take_name(tx, what.session)
            tx.execute(
                "DELETE FROM groups WHERE NOT EXISTS "
                "(SELECT 1 FROM sessions WHERE group_id = groups.id)"
            )
        begun = _begun(database)
        if what.turns:
            begun.append((what.session, what.turns[0], what.turns[-1]))
        _write_begun(tx, begun)
    return what


def _take_name(tx: sqlite3.Connection, session: int) -> None:
    """Replace a session's name by a random one. The name's privacy setting is kept for new
    sessions.

    No client knows the new name, which is partly random.
    """
    said = tx.execute("SELECT user, key, private FROM sessions WHERE id = ?", (session,)).fetchone()
    tx.execute(
        "UPDATE sessions SET key = ? || '-' || id || '-' || LOWER(HEX(RANDOMBLOB(8))), "
        "private = 0, task = NULL, group_id = NULL, episode = 0, "
        "closed_at = COALESCE(closed_at, created_at) WHERE id = ?",
        (FORGOTTEN, session),
    )
    if said["private"]:
        mark_private(tx, said["user"], said["key"], said["private"])


def is_begun(rows: Rows) -> bool:
    """Return whether forgetting has begun and is not finished."""
    return rows.meta(BEGUN) is not None


def finish(database: Writer) -> Iterator[int]:
    """Erase the data to be forgotten; yield turns after each transaction, newest first.

    Raises:
        LedgerError: it could not be finished; the next start goes on with it.
    """
    begun = _begun(database)
    for session, first, last in begun:
        turns = _between(database, session, first, last)
        while turns:
            gone, until = 0, time.perf_counter() + SLICE_S
            with database.transaction() as tx:
                while turns and (not gone or time.perf_counter() < until):
                    _forget_turn(tx, turns.pop())
                    gone += 1
            yield gone
    for turn in orphans(database):
        with database.transaction() as tx:
            _untell(database, tx, turn)
        yield 0
    yield from sweep(database)
    yield from give_back(database)
    yield from emptied_log(database)
    with database.transaction() as tx:
        _write_begun(tx, [one for one in _begun(database) if one not in begun])


def _begun(rows: Rows) -> list[tuple[int, int, int]]:
    """Return session, first and last turn of the data to be forgotten."""
    return [tuple(one) for one in json.loads(rows.meta(BEGUN) or "[]")]


def _write_begun(tx: sqlite3.Connection, begun: Sequence[tuple[int, int, int]]) -> None:
    set_meta(tx, BEGUN, json.dumps(begun) if begun else None)


def _forget_turn(tx: sqlite3.Connection, turn: int) -> None:
    for table in ("next_states", "votes", "verdicts", "hints", "feedback"):
        tx.execute(f"DELETE FROM {table} WHERE turn_id = ?", (turn,))
    tx.execute("UPDATE spend SET turn_id = NULL WHERE turn_id = ?", (turn,))
    if _withdraw(tx, turn):
        _blank(tx, turn, "forgotten")
    else:
        let_go(tx, turn)
        tx.execute("DELETE FROM turns WHERE id = ?", (turn,))


def _untrain(tx: sqlite3.Connection, turn: int, why: str) -> None:
    """Remove a turn's sample and refuse the turn; one that was trained is not trained again, should
    its step be lost."""
    if _withdraw(tx, turn):
        tx.execute("UPDATE samples SET expired_because = ? WHERE turn_id = ?", (why, turn))
    else:
        tx.execute(
            # Also where there was a reason, which may end.
            "UPDATE turns SET settled = 1, untrained_because = ? WHERE id = ?",
            (why, turn),
        )


def _untell(database: Writer, tx: sqlite3.Connection, turn: int) -> None:
    """Remove the lessons from a turn's prompt; it still counts as one that was told some."""
    row = tx.execute("SELECT * FROM turns WHERE id = ?", (turn,)).fetchone()
    if row is None or (told := told_of(row)) is None:
        return
    blocks, rest = store(tx, raw_ids(told.without(load(database, row))))
    move(tx, turn, told.at, -told.tokens)
    tx.execute(
        "UPDATE turns SET told = ?, hint_at = NULL, blocks = ?, prompt = ? WHERE id = ?",
        (UNTOLD, blocks, rest, turn),
    )
    _close_up(tx, "turns", "id", turn)


def _withdraw(tx: sqlite3.Connection, turn: int) -> bool:
    """Remove a turn's sample. True: it was trained, and so it stays."""
    remove_sample(tx, turn)
    return tx.execute("SELECT 1 FROM samples WHERE turn_id = ?", (turn,)).fetchone() is not None


# The log


def emptied_log(writer: Writer) -> Iterator[int]:
    """Empty the write-ahead log, waiting for its readers.

    Raises:
        LedgerError: a reader did not end in time.
    """
    until = time.monotonic() + _PATIENCE_S
    while not writer.empty_log():
        if time.monotonic() > until:
            raise LedgerError(
                f"the rows are gone, but another program reads {writer.path} without a pause, so "
                "that its log holds them; end that program, and they leave it within minutes, or "
                "at the next start"
            )
        time.sleep(_RETRY_S)
        yield 0
