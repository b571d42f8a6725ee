"""Remove turns from the ledger: forgotten on request, or dropped for their age. Their outcomes can
still be shown and counted.

Rule: only requested data is removed, and no turn is dropped that may still be trained. Forgetting
is one transaction, in a thread where a gateway runs: all of it is gone, or nothing.

SQLite overwrites deleted data (secure_delete), free pages are released, and the log is emptied.
Where SQLite moved rows between pages, copies may stay between a page's cells; VACUUM, which needs
the file for itself, rewrites every page without them.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.codec import load_prompt, store_prompt, unraw_ids
from tinker_claw.ledger.database import PAUSE_S, Rows, WritingConnection
from tinker_claw.ledger.images import let_go, move
from tinker_claw.ledger.lessons import UNTOLD, orphans, taught_by, unlearn
from tinker_claw.ledger.steps import withdraw_from_step
from tinker_claw.ledger.turns import (
    NO_IDS,
    OPEN,
    mark_private,
    refuse,
    remove_sample,
    set_state,
    told_of,
)
from tinker_claw.ledger.versions import live_versions
from tinker_claw.privacy.redact import name_digest
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState

FORGOTTEN = "forgotten"
"""Prefix of the new key of a forgotten session."""
MOST = 1000
"""Turns that one transaction forgets, in a fraction of a second: replies wait for it."""
_ROWS = 25
"""Turns that one transaction drops."""
_BLOCKS = 100
"""Prompt blocks that one transaction deletes."""
_ANY = 1 << 62
"""Larger than every id."""
_PAGES = 64
"""Pages released at a time."""
_SPARE = 256
"""Free pages kept for later writes."""
_PATIENCE_S: Final = 10.0
"""Seconds to wait for readers to release the log."""
_RETRY_S: Final = 0.05
_THESE = "(SELECT value FROM json_each(?))"
"""SQL of the numbers in a JSON array."""

# Blanking

_SAID = {
    "next_states": "text = '', beside = '[]'",
    "jobs": "error = ''",
    "votes": "answer = ''",
    "hints": "text = ''",
    "feedback": "text = '', key = NULL",
    "samples": "hint = CASE WHEN hint IS NOT NULL THEN '' END, untaught = NULL, "
    "teacher_logprobs = NULL, teacher_targets = NULL, teacher_ids = NULL, teacher_own = NULL, "
    "teacher_reply = NULL, teacher_text = NULL, advantages = NULL",
}
"""Columns to blank of a turn's next state, votes, hints, feedback and sample, by table."""
_ASKED = (
    "request_text = '', reply_text = '', reply_digest = '', history = '[]', "
    f"params = json_set(params, '$.stop', json_array()), {NO_IDS}"
)
"""Columns with the texts and ids of a turn."""
_NAMES = (
    "kind_reason = '', request_kind = '', trace = NULL, response_id = NULL, fallback = NULL, "
    "client = '', voices = '[]', told = NULL"
)
"""Columns that may quote or name a client, or name its lessons."""


def _unsay(tx: sqlite3.Connection, turn: int) -> None:
    """Blank a turn's next state, and everything derived from it."""
    for table, blank in _SAID.items():
        tx.execute(f"UPDATE {table} SET {blank} WHERE turn_id = ?", (turn,))


# Dropping turns by age

_DROPPABLE = """
SELECT turns.id
FROM turns JOIN sessions ON sessions.id = session_id
WHERE NOT dropped AND (state IN ('trained', 'refused')
    OR (state = 'waiting' AND closed_at IS NOT NULL AND episode <> 1))
  AND turns.id BETWEEN ? AND ? AND turns.created_at < ? ORDER BY turns.id LIMIT ?
"""
"""SQL of turns in a range of ids, captured before a time, that can no longer be trained."""


def drop_some(database: WritingConnection, before: float, at: int) -> tuple[int, int | None]:
    """Blank some old turns, from an id on; their numbers and outcomes stay.

    Args:
        before: drop turns captured earlier, in seconds since 1970.

    Returns the number of turns dropped, and the id from which to go on; None: that was all.
    """
    droppable = database.column(_DROPPABLE, at, _ANY, before, _ROWS)
    if not droppable:
        return 0, None
    with database.transaction() as tx:
        # Without those that were taken up again meanwhile.
        still = tx.execute(_DROPPABLE, (droppable[0], droppable[-1], before, _ROWS)).fetchall()
        for (turn,) in still:
            refuse(tx, TurnRefusal(Reason.UNFOLLOWED), "id = ? AND state = 'waiting'", turn)
            tx.execute(f"UPDATE turns SET dropped = 1, {_ASKED} WHERE id = ?", (turn,))
            let_go(tx, turn)
            _unsay(tx, turn)
    return len(still), droppable[-1] + 1


# Space


def sweep(database: WritingConnection) -> None:
    """Delete the blocks that no prompt uses any more, and release what is free."""
    newest = _newest(database)
    used = _used(database)
    unused = sorted({*database.column("SELECT id FROM prompt_blocks")} - used)
    for at in range(0, len(unused), _BLOCKS):
        with database.transaction() as tx:
            _delete_blocks(tx, set(unused[at : at + _BLOCKS]) - _used(database, f"id > {newest}"))
        time.sleep(PAUSE_S)  # writers go first
    give_back(database)


def _newest(rows: Rows) -> int:
    return rows.one("SELECT MAX(id) FROM turns") or 0


def _used(rows: Rows, which: str = "TRUE", *values: object) -> set[int]:
    """Return the blocks of the prompts of some turns, given by a condition."""
    blobs = rows.column(f"SELECT blocks FROM turns WHERE {which}", *values)
    return {block for blob in blobs for block in unraw_ids(blob)}


def _delete_blocks(tx: sqlite3.Connection, blocks: Collection[int]) -> None:
    tx.executemany("DELETE FROM prompt_blocks WHERE id = ?", [(block,) for block in blocks])


def give_back(database: WritingConnection) -> None:
    """Release free pages, which makes the file smaller, and empty the log.

    Raises:
        LedgerError: a reader of the log did not end in time.
    """
    while database.one("PRAGMA freelist_count") > _SPARE:
        database.give_back(_PAGES)
        time.sleep(PAUSE_S)
    until = time.monotonic() + _PATIENCE_S
    while not database.empty_log():
        if time.monotonic() > until:
            raise LedgerError(
                f"the rows are gone, but another program reads {database.path} without a pause, so "
                "that its log holds them; end that program, and they leave it within minutes, or "
                "at the next start"
            )
        time.sleep(_RETRY_S)


# Forgetting


@dataclass(frozen=True, slots=True)
class UsedIn:
    """A step that trained on turns to be forgotten."""

    step: int
    version: int
    """Version that the step made."""
    before: int
    """Version from which the step began."""
    samples: int
    """Samples of the step, or prompts that it practised on, that are to be forgotten."""
    live: bool
    """Whether the newest version descends from it."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Description of the data to forget."""

    session: int
    first: int
    """First turn to forget; 0: the whole session."""
    turns: tuple[int, ...]
    unsaid: tuple[int, ...]
    """Turns that stay, but lose their next state, votes and hints, because the next state, or the
    reply shown to their teacher, is among the forgotten data."""
    lesson_turns: tuple[int, ...]
    """Turns that stay, without the lessons in their prompts that came from the forgotten data."""
    withdrawn: int
    """Number of samples taken out of the queue."""
    steps: tuple[UsedIn, ...]

    @property
    def whole(self) -> bool:
        return self.first == 0

    @property
    def roll_back_to(self) -> int | None:
        """Version before everything that was learned from it; None: no live version learned from
        it."""
        return min((used.before for used in self.steps if used.live), default=None)


def in_session(which: str, user: str | None) -> Callable[[Rows], Forgetting]:
    """Select a whole session, by its number or by the client's name for it."""

    def find(rows: Rows) -> Forgetting:
        matches = rows.rows(
            "SELECT id, user FROM sessions WHERE (key IN (?1, ?3) OR CAST(id AS TEXT) = ?1) "
            "AND (?2 IS NULL OR user = ?2)",
            which,
            user,
            name_digest(which),
        )
        if not matches:
            whose = "" if user is None else f" of user {user}"
            raise UndoError(
                f"{rows.path} has no session {which!r}{whose}; "
                "`tinker-claw log turns` lists them by their numbers"
            )
        if len(matches) > 1:
            several = ", ".join(f"{row['id']} (of {row['user']})" for row in matches)
            raise UndoError(
                f"{which!r} may be session {several}; give the number, or --user, or forget the "
                "first turn of the one that is meant (`tinker-claw log turns`)"
            )
        return _forgetting(rows, matches[0]["id"], first=0)

    return find


def from_turn(turn_id: int) -> Callable[[Rows], Forgetting]:
    """Select a turn and the later ones of its session."""

    def find(rows: Rows) -> Forgetting:
        row = rows.row("SELECT session_id FROM turns WHERE id = ?", turn_id)
        if row is None:
            raise UndoError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists")
        return _forgetting(rows, row["session_id"], first=turn_id)

    return find


_BEFORE = f"""
-- The turn before the first forgotten one. Turns whose client hung up have no next state.
SELECT id FROM (SELECT turns.id, next_states.turn_id AS said FROM turns
    LEFT JOIN next_states ON next_states.turn_id = turns.id
  WHERE session_id = ?1 AND turns.id < ?2 AND kind = 'main'
    AND (next_states.turn_id IS NOT NULL OR {OPEN}) ORDER BY turns.id DESC LIMIT 1)
WHERE said IS NOT NULL
UNION
-- Turns whose teacher may have been shown a forgotten one instead of a hint: it was asked after
-- that one came, or is being asked.
SELECT turns.id FROM turns JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
WHERE session_id = ?1 AND turns.id < ?2 AND value = -1
  AND NOT EXISTS (SELECT 1 FROM hints WHERE hints.turn_id = turns.id)
  AND ({OPEN} OR (hint IS NOT NULL
    AND samples.created_at >= (SELECT created_at FROM turns WHERE id = ?2)))
ORDER BY 1
"""
"""SQL of earlier turns of a session that were told something of turn `?2` or a later one."""


def _forgetting(rows: Rows, session: int, *, first: int, last: int = _ANY) -> Forgetting:
    turns = rows.column(_LEFT, session, first, last)
    before = tuple(rows.column(_BEFORE, session, first))
    lesson_turns = [
        turn for turn in taught_by(rows, json.dumps([*turns, *before])) if turn not in turns
    ]
    touched = json.dumps([*turns, *before, *lesson_turns])
    return Forgetting(
        session=session,
        first=first,
        turns=tuple(turns),
        unsaid=before,
        lesson_turns=tuple(lesson_turns),
        withdrawn=rows.one(
            f"SELECT COUNT(*) FROM turns WHERE state IN ('queued', 'held') AND id IN {_THESE}",
            touched,
        ),
        steps=_steps(rows, touched),
    )


_LEFT = (
    "SELECT id FROM turns WHERE session_id = ? AND id BETWEEN ? AND ? "
    "AND state <> 'forgotten' ORDER BY id"
)
"""SQL of a session's turns in a range of ids that are not forgotten yet."""


def left(rows: Rows, what: Forgetting) -> Callable[[Rows], Forgetting] | None:
    """Select the turns that were added to forgotten data since; None: there are none."""
    if not (late := rows.column(_LEFT, what.session, what.first, _ANY)):
        return None
    return lambda rows: _forgetting(rows, what.session, first=what.first, last=late[-1])


def _steps(rows: Rows, turns: str) -> tuple[UsedIn, ...]:
    live = live_versions(rows)
    step_rows = rows.rows(
        "SELECT steps.id AS step, version, parent AS before, COUNT(*) AS samples FROM ("
        f"SELECT step_id, turn_id FROM samples WHERE step_id IS NOT NULL AND turn_id IN {_THESE} "
        f"UNION SELECT step_id, turn_id FROM step_prompts WHERE turn_id IN {_THESE}) "
        "JOIN steps ON steps.id = step_id WHERE status = 'committed' "
        "GROUP BY steps.id ORDER BY steps.id",
        turns,
        turns,
    )
    return tuple(UsedIn(**row, live=row["version"] in live) for row in step_rows)


def forget(database: WritingConnection, select: Callable[[Rows], Forgetting]) -> Forgetting:
    """Erase data, in one transaction; of a long session the newest turns first, each time whole.

    Raises:
        LedgerError: it cannot be written, or a reader holds the log.
    """
    forgetting = select(database)
    for first in reversed(forgetting.turns[MOST::MOST]):
        _erase(database, from_turn(first))
        time.sleep(PAUSE_S)  # writers go first
    last = _erase(database, select)
    give_back(database)
    return replace(forgetting, turns=tuple(sorted({*forgetting.turns, *last.turns})))


def _erase(database: WritingConnection, select: Callable[[Rows], Forgetting]) -> Forgetting:
    preview, newest = select(database), _newest(database)
    # Looked up before the transaction, as that reads all turns.
    going = json.dumps([*preview.turns, *preview.lesson_turns])
    used = _used(database, f"id NOT IN {_THESE}", going)
    with database.transaction() as tx:
        forgetting = select(database)
        these = json.dumps([*forgetting.turns, *forgetting.lesson_turns])
        raced = {turn for turn in json.loads(these) if turn <= newest} - set(json.loads(going))
        blocks = _used(database, f"id IN {_THESE}", these)
        _take_back(tx, forgetting)
        _delete(tx, forgetting.turns)
        for turn in orphans(database):
            _untell(database, tx, turn)
        if raced:  # somebody came between, so all is looked up again
            blocks -= _used(database)
        else:
            blocks -= used | _used(database, f"id > {newest} OR id IN {_THESE}", going)
        _delete_blocks(tx, blocks)
    return forgetting


def _take_back(tx: sqlite3.Connection, what: Forgetting) -> None:
    """Withdraw what was made of the data: samples, lessons, names, and what earlier turns were
    told."""
    withdraw_from_step(tx, [*what.turns, *what.unsaid, *what.lesson_turns])
    for turn in what.lesson_turns:
        _untrain(tx, turn, Reason.FORGOTTEN_LESSON)
    sources = json.dumps([*what.turns, *what.unsaid])
    unlearn(tx, sources)
    for turn in what.unsaid:
        _untrain(tx, turn, Reason.FORGOTTEN_NEXT)
        _unsay(tx, turn)
    if what.whole:
        _take_name(tx, what.session)
        tx.execute(
            "DELETE FROM groups WHERE NOT EXISTS "
            "(SELECT 1 FROM sessions WHERE group_id = groups.id)"
        )


def _delete(tx: sqlite3.Connection, turns: Collection[int]) -> None:
    """Delete turns. Of those that were trained the row stays, without words."""
    these = json.dumps([*turns])
    for table in ("next_states", "jobs", "votes", "verdicts", "hints", "feedback"):
        tx.execute(f"DELETE FROM {table} WHERE turn_id IN {_THESE}", (these,))
    tx.execute(f"UPDATE spend SET turn_id = NULL WHERE turn_id IN {_THESE}", (these,))
    for turn in turns:
        let_go(tx, turn)
        if _withdraw(tx, turn):
            set_state(tx, TurnState.FORGOTTEN, "id = ?", turn)
            tx.execute(f"UPDATE turns SET {_ASKED}, {_NAMES} WHERE id = ?", (turn,))
            _unsay(tx, turn)
        else:
            tx.execute("DELETE FROM turns WHERE id = ?", (turn,))


def _take_name(tx: sqlite3.Connection, session: int) -> None:
    """Replace a session's name by a random one. The name's privacy setting is kept for new
    sessions.

    No client knows the new name, which is partly random.
    """
    row = tx.execute("SELECT user, key, private FROM sessions WHERE id = ?", (session,)).fetchone()
    tx.execute(
        "UPDATE sessions SET key = ? || '-' || id || '-' || LOWER(HEX(RANDOMBLOB(8))), "
        "private = 0, task = NULL, group_id = NULL, episode = 0, "
        "closed_at = COALESCE(closed_at, created_at) WHERE id = ?",
        (FORGOTTEN, session),
    )
    if row["private"]:
        mark_private(tx, row["user"], row["key"], row["private"])


def _untrain(tx: sqlite3.Connection, turn: int, reason: Reason) -> None:
    """Remove a turn's sample and refuse the turn, also where another reason may end; one that was
    trained stays so."""
    if not _withdraw(tx, turn):
        refuse(tx, TurnRefusal(reason), "id = ?", turn)


def _untell(database: Rows, tx: sqlite3.Connection, turn: int) -> None:
    """Remove the lessons from a turn's prompt; it still counts as one that was told some."""
    row = tx.execute("SELECT * FROM turns WHERE id = ?", (turn,)).fetchone()
    lesson_span = told_of(row)
    assert lesson_span is not None  # `orphans` chose the turn
    prompt = lesson_span.without(load_prompt(database, row))
    blocks, rest = store_prompt(tx, prompt, shared=not row["secret"])
    move(tx, turn, lesson_span.at, len(lesson_span.instead) - lesson_span.tokens)
    tx.execute(
        "UPDATE turns SET told = ?, hint_at = NULL, blocks = ?, prompt = ? WHERE id = ?",
        (UNTOLD, blocks, rest, turn),
    )


def _withdraw(tx: sqlite3.Connection, turn: int) -> bool:
    """Remove a turn's sample. True: it was trained, and so it stays."""
    remove_sample(tx, turn)
    return tx.execute("SELECT 1 FROM samples WHERE turn_id = ?", (turn,)).fetchone() is not None
