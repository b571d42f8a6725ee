"""State of a run in one SQLite file, so that a killed run resumes where it was.

Rule: a reply is written down before the environment acts on it, a score before it is reported. So
after a kill a reply is asked for again only if its answer was lost on the way. An outcome is
reported again only under the key that it had.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from examples import locked
from examples.tracks import TrackError
from examples.tracks.client import Answer
from examples.tracks.track import Track

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) STRICT;
CREATE TABLE IF NOT EXISTS episodes (
  session TEXT PRIMARY KEY, task INTEGER NOT NULL, try INTEGER NOT NULL,
  score REAL, reported INTEGER NOT NULL DEFAULT 0, ended_at REAL
) STRICT;
CREATE TABLE IF NOT EXISTS replies (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES episodes,
  asked TEXT NOT NULL, kind TEXT NOT NULL, answer TEXT NOT NULL,
  version INTEGER NOT NULL, tokens INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS replies_of ON replies (session);
CREATE TABLE IF NOT EXISTS exams (
  version INTEGER NOT NULL, task INTEGER NOT NULL, solved INTEGER NOT NULL,
  PRIMARY KEY (version, task)
) STRICT;
"""
_FIXED = ("environment", "model", "group_size", "seed", "options")
"""Settings that cannot change during a run."""


Kept = tuple[str, Answer]
"""Digest of a request, so that only the same one gets its answer again; and the answer."""


class State:
    """The file of one run. Every method writes through before it returns."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def begin(self, track: Track) -> None:
        """Continue a run, or begin one.

        Raises:
            TrackError: the folder holds another run.
        """
        now = json.dumps({name: asdict(track)[name] for name in _FIXED})
        if self.fact("track") is None:
            self.set_fact("run", uuid4().hex[:8])
            self.set_fact("track", now)
        elif self.fact("track") != now:
            raise TrackError(
                f"The folder holds a run with other settings: {self.fact('track')}. Choose another "
                "with --out."
            )

    def fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row and row[0]

    def set_fact(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def begin_group(self, task: int, sessions: Sequence[str]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO episodes (session, task, try) VALUES (?, ?, ?)",
                [(session, task, number) for number, session in enumerate(sessions)],
            )

    def open_episodes(self) -> list[tuple[str, int]]:
        """Session and task of the episodes whose outcome the gateway does not have."""
        query = "SELECT session, task FROM episodes WHERE reported = 0 ORDER BY task, try"
        return [(session, task) for session, task in self._db.execute(query)]

    def groups(self) -> int:
        """Number of groups that were begun."""
        return self._db.execute("SELECT COUNT(DISTINCT task) FROM episodes").fetchone()[0]

    def keep(self, session: str, kept: Kept, version: int) -> None:
        """Record an answer, with the version that gave it, or the newest that was seen."""
        digest, answer = kept
        newest = version if answer.version is None else answer.version
        self._db.execute(
            "INSERT INTO replies (session, asked, kind, answer, version, tokens) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (session, digest, answer.kind, answer.text, newest, answer.tokens),
        )

    def kept(self, session: str) -> list[Kept]:
        """Recorded answers of an episode, in order."""
        query = "SELECT asked, kind, answer FROM replies WHERE session = ? ORDER BY id"
        return [
            (digest, Answer(200, kind, answer))
            for digest, kind, answer in self._db.execute(query, (session,))
        ]

    def score(self, session: str) -> float | None:
        """Outcome of an episode; None: it has not ended."""
        query = "SELECT score FROM episodes WHERE session = ?"
        return self._db.execute(query, (session,)).fetchone()[0]

    def end(self, session: str, score: float) -> None:
        """Record the end of an episode, to be reported to the gateway."""
        self._db.execute(
            "UPDATE episodes SET score = ?, ended_at = ? WHERE session = ?",
            (score, time.time(), session),
        )

    def reported(self, session: str) -> None:
        """Record that an episode is finished; without a score it broke."""
        self._db.execute("UPDATE episodes SET reported = 1 WHERE session = ?", (session,))

    def examined(self, version: int) -> dict[int, bool]:
        """Return whether each task was solved, by its number."""
        query = "SELECT task, solved FROM exams WHERE version = ?"
        return {task: bool(solved) for task, solved in self._db.execute(query, (version,))}

    def examine(self, version: int, task: int, solved: bool) -> None:
        self._db.execute("INSERT OR REPLACE INTO exams VALUES (?, ?, ?)", (version, task, solved))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Run a query for the report."""
        return self._db.execute(query).fetchall()


@contextmanager
def opened(folder: Path) -> Generator[State]:
    """Open the state in a folder, for this process alone."""
    with locked(folder):
        database = sqlite3.connect(folder / "state.sqlite3", isolation_level=None)
        with closing(database):
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_SCHEMA)
            yield State(database)
