"""A cell of the experiment: an arm, a wish and a seed, through the whole product.

Rule: whatever was measured stands in the cell's journal before the next thing is asked. A cell that
was killed goes on in the same data directory, and its product as after any kill; only sessions that
were in progress are held again, under other names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from examples import say
from examples.demo import DemoError, server
from examples.demo.client import Health, connected
from examples.demo.judge import create_app
from examples.personalize.run import circumstances, unjudged
from examples.real import cost
from examples.real.person import MODEL, MOST_TOKENS, Person, exam, judge
from examples.real.wishes import WISHES
from tinker_claw.app.server import in_background
from tinker_claw.learner.judging import CONCURRENCY
from tinker_claw.ledger.database import open_read_only
from tinker_claw.tasks import together

CELLS, JOURNAL = "cells.jsonl", "journal.jsonl"
LEDGER: Final = Path("run") / "ledger.sqlite3"
TURNS: Final = 3
"""Replies of a session that the person judges, where steps are to come of it."""
AT_ONCE: Final = 4
"""Sessions at a time, where steps are to come of them."""
MOST_SESSIONS: Final = 20
"""Sessions for each step that is wanted, at most: where all is accepted, no step comes."""
EXAM_AT_ONCE: Final = 8
LOOK_S: Final = 0.5
DEGRADED_S: Final = 600.0
"""Seconds until a product that is not well ends the cell: a judge that cannot be read, say."""
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_EVERYTHING: Final = ("follow", "contrary", "facts")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way in which the wish reaches the model."""

    flags: tuple[str, ...]
    cost: int
    """Rough cost beside that of other arms, in replies, until a cell has ended."""
    step_cost: int = 0
    """What a step adds, with the sessions that lead to it."""
    wishes: int | None = None
    """First wishes of the experiment that it is run for; None: all."""
    all_seeds: bool = False
    says: bool = False
    """Whether the person says the wish by `/always`, after the first session."""
    sessions: int = 0
    """Sessions of one question, one after another; 0: some at a time, until there were enough
    optimizer steps, where a step has a cost."""
    by_rule: bool = True
    """Whether a rule judges; False: the product's own judge."""
    exams: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"untold": _EVERYTHING, "told": ("follow",)}
    )
    """Parts of the exam, untold and told."""


_NO_LESSONS: Final = ("--lessons=off",)
ARMS: Final[Mapping[str, Arm]] = {
    "base": Arm(_NO_LESSONS, 100, exams={"untold": _EVERYTHING, "told": _EVERYTHING}),
    "told": Arm((), 30, all_seeds=True, says=True, sessions=13, exams={}),
    "practised": Arm(("--practice=on",), 350, all_seeds=True, says=True, sessions=15),
    "combine": Arm(_NO_LESSONS, 80, 45, wishes=2),
    "own-judge": Arm(_NO_LESSONS, 80, 110, wishes=1, by_rule=False),
}
"""The arms, in the order in which they are run."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell."""

    arm: str
    wish: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.arm}-{self.wish}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all cells share."""

    out: Path
    steps: int = 16
    flags: tuple[str, ...] = ()
    """Further flags of `run.py`."""

    def cost(self, cell: Cell) -> int:
        """Return what a cell costs, in replies."""
        return ARMS[cell.arm].cost + ARMS[cell.arm].step_cost * self.steps


class Lines:
    """A file of JSON lines, of which a kill can cut the last; that one is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_bytes() if path.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(path, len(whole))
        self.all: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        """Add a line, and have it on the disk."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.all.append(line)


class Journal:
    """Measurements of a cell so far, each with the time since the start in which it was made."""

    def __init__(self, path: Path, seconds: Callable[[], tuple[float, float]]) -> None:
        """Set up. `seconds`: returns those since the start, and those of processor."""
        self._lines, self._seconds = Lines(path), seconds
        self.start = 1 + max((line["start"] for line in self._lines.all), default=0)

    def add(self, what: str, **fields: Any) -> None:
        wall, cpu = self._seconds()
        self._lines.add({"what": what, **fields, "start": self.start, "wall": wall, "cpu": cpu})

    def of(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self._lines.all if line["what"] == what]

    def minutes(self, kind: str) -> float:
        """Return the minutes of all starts: `wall`, or `cpu`."""
        latest = {line["start"]: line[kind] for line in self._lines.all}
        return round(sum(latest.values()) / 60, 2)


async def perform(cell: Cell, setup: Setup, stepped: Callable[[float], None]) -> dict[str, Any]:
    """Perform a cell, or the rest of it; return its figures.

    Args:
        stepped: called after the first step, with the minutes so far.

    Raises:
        DemoError: what went wrong.
    """
    arm, wish, folder = ARMS[cell.arm], WISHES[cell.wish], setup.out / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--model-name={MODEL}", "--backend=local", f"--seed={cell.seed}", *arm.flags]
    flags += [f"--max-reply-tokens={MOST_TOKENS}", "--context-tokens=4096", *setup.flags]
    async with AsyncExitStack() as stack:
        if arm.by_rule:
            app = create_app(cell.seed, judge(wish))
            flags.append(f"--judge-url={await stack.enter_async_context(in_background(app))}")
        began = time.monotonic()
        launch = server.Launch(folder, tuple(flags))
        child = await stack.enter_async_context(server.running(launch))
        speaking = connected(child.url, model=MODEL, max_tokens=MOST_TOKENS)
        person = Person(await stack.enter_async_context(speaking), wish, cell.seed)
        journal = Journal(folder / JOURNAL, partial(_seconds, began, child.process.pid))
        running = _Running(cell, setup, journal, child, person, stepped)
        await (running.learn() if arm.step_cost else running.talk())
        await running.examine()
        learner = (await child.client.health()).learner
    named = {"arm": cell.arm, "wish": cell.wish, "seed": cell.seed, "flags": [*setup.flags]}
    return named | _figures(journal, folder / LEDGER) | {"learner": learner} | circumstances()


def drop_weights(cell: Cell, setup: Setup) -> None:
    """Delete the versions of a cell that has ended: gigabytes."""
    for path in (setup.out / cell.name / "run").iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _seconds(began: float, pid: int) -> tuple[float, float]:
    """Return the seconds since then, and the processor seconds of a child and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.monotonic() - began, sum(map(int, fields[11:15])) / _CLOCK_TICKS


@dataclass
class _Running:
    """A cell whose product runs."""

    cell: Cell
    setup: Setup
    journal: Journal
    child: server.Server
    person: Person
    stepped: Callable[[float], None]
    well_at: float = field(default_factory=time.monotonic)
    """When the product was well at last."""

    async def talk(self) -> None:
        """Hold sessions one after another; each is judged, and practised if that is due, before the
        next begins."""
        arm = ARMS[self.cell.arm]
        for number in range(len(self.journal.of("session")), arm.sessions):
            if number and arm.says and not self.journal.of("always"):
                await self.person.always()
                self.journal.add("always")
            await self._session(number, turns=1)
            await self._settled()

    async def _health(self) -> Health:
        """Return the product's health.

        Raises:
            DemoError: it has not been well for too long.
        """
        health, now = await self.child.client.health(), time.monotonic()
        if health.status == "ok" or health.learner == "held":
            self.well_at = now
        elif now - self.well_at > DEGRADED_S or health.learner == "failed":
            raise DemoError(f"the product is not well: {health.last_error or health.learner}")
        return health

    async def learn(self) -> None:
        """Hold sessions until there were enough steps, some at a time, none during a step."""
        begun = [line["number"] for line in self.journal.of("session")]
        numbers = count(max(begun, default=-1) + 1 + (AT_ONCE if begun else 0))
        most = MOST_SESSIONS * self.setup.steps

        async def one_by_one() -> None:
            while len(self.journal.of("session")) < most:
                health = await self._health()
                if health.policy_version >= self.setup.steps or health.learner == "held":
                    return
                if health.learner != "waiting" or self._unjudged() >= CONCURRENCY:
                    await asyncio.sleep(LOOK_S)
                else:
                    await self._session(next(numbers), TURNS, health.policy_version)

        await together(one_by_one() for _ in range(AT_ONCE))
        await self._settled()

    async def _session(self, number: int, turns: int, version: int | None = None) -> None:
        if version is None:
            version = (await self._health()).policy_version
        key = f"{number}-{self.journal.start}"
        first = await self.person.session(number, key, turns)
        is_first = version and not any(line["version"] for line in self.journal.of("session"))
        self.journal.add("session", number=number, first=first, version=version)
        say(f"  session {number + 1}, v{version}: {'accepted' if first else 'rejected'}")
        if is_first:
            self.stepped(self.journal.minutes("wall"))

    async def _settled(self) -> None:
        """Wait until what was said is judged, and nothing is trained, at two looks in a row."""
        idle = 0
        while idle < 2:
            await asyncio.sleep(LOOK_S)
            health = await self._health()
            still = not self._unjudged() and health.learner in ("waiting", "held")
            idle = idle + 1 if still else 0

    def _unjudged(self) -> int:
        return unjudged(self.setup.out / self.cell.name / LEDGER)

    async def examine(self) -> None:
        """Ask the questions of the exam that have not been asked."""
        if not self.journal.of("version"):
            version = (await self._health()).policy_version
            self.journal.add("version", version=version)
        version = self.journal.of("version")[0]["version"]
        replies = self.journal.of("reply")
        done = {(reply["exam"], reply["part"], reply["number"]) for reply in replies}
        slots = asyncio.Semaphore(EXAM_AT_ONCE)

        async def one(name: str, question: Any) -> None:
            async with slots:
                reply = await self.person.examine(question, version, with_wish=name == "told")
            fields = {"exam": name, "part": question.part, "number": question.number}
            fields |= {"text": reply.text, "ended": reply.ended, "good": question.good(reply)}
            self.journal.add("reply", **fields)

        await together(
            one(name, question)
            for name, parts in ARMS[self.cell.arm].exams.items()
            for question in exam(self.person.wish)
            if question.part in parts and (name, question.part, question.number) not in done
        )


def _figures(journal: Journal, ledger: Path) -> dict[str, Any]:
    """Count what a cell has measured."""
    sessions = sorted(journal.of("session"), key=lambda session: session["number"])
    exams: dict[str, dict[str, list[int]]] = {}
    for reply in journal.of("reply"):
        counts = {reply["part"]: reply["good"]}
        if reply["part"] == "follow":
            counts["ended"] = reply["ended"]
        for part, good in counts.items():
            pair = exams.setdefault(reply["exam"], {}).setdefault(part, [0, 0])
            pair[0] += good
            pair[1] += 1
    with open_read_only(ledger) as rows:
        practised = rows.rows("SELECT status, error, metrics FROM steps WHERE lesson IS NOT NULL")
    return {
        "firsts": [session["first"] for session in sessions],
        "versions": [session["version"] for session in sessions],
        "steps": journal.of("version")[0]["version"],
        "exams": exams,
        "practice": [
            {"passed": status == "committed", "because": error}
            | (json.loads(metrics).get("practice", {}) if metrics else {})
            for status, error, metrics in practised
        ],
        "wall_minutes": journal.minutes("wall"),
        "cpu_minutes": journal.minutes("cpu"),
        "usd": round(cost.usd(ledger), 4),
    }
