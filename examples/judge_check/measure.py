"""Measure a judge: verdicts against labels, hints, answers as read, and effects of injections.

Rule: everything is asked and read by the product's own code; nothing here knows a prompt. What was
judged is kept in a file of runs, so a run that ended goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from examples.judge_check.cases import Case, Injection
from examples.judge_check.scripted import ScriptedJudge
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import Prompts, read_answer
from tinker_claw.types import Vote

Kind = Literal["case", "injection"]
Work = Sequence[tuple[Kind, Case | Injection]]
DRAWS: Final = 10_000
"""Draws with replacement behind an interval."""
VOTES: Final[tuple[Vote | None, ...]] = (-1, 0, 1, None)


@dataclass
class Confusion:
    """Confusion matrix of votes."""

    what: str
    counts: Counter[tuple[Vote | None, Vote | None]] = field(
        default_factory=Counter[tuple[Vote | None, Vote | None]]
    )
    """Number of cases by (true, found)."""

    def add(self, true: Vote | None, found: Vote | None) -> None:
        self.counts[true, found] += 1

    @property
    def of(self) -> int:
        return self.counts.total()

    @property
    def right(self) -> int:
        return sum(n for (true, found), n in self.counts.items() if true == found)

    def lines(self) -> Iterator[str]:
        """Lines of a Markdown table, with the share that is right."""
        yield f"| {self.what} | −1 | 0 | +1 | none |"
        yield "|---|---|---|---|---|"
        for true in VOTES:
            row = [self.counts[true, found] for found in VOTES]
            if any(row):
                yield f"| {_shown(true)} | {' | '.join(map(str, row))} |"
        share = f"{self.right / self.of:.1%}" if self.of else "none"
        yield f"\n{self.right} of {self.of} are equal ({share})."


def _shown(vote: Vote | None) -> str:
    return "none" if vote is None else f"{vote:+d}".replace("-", "−") if vote else "0"


@dataclass(frozen=True, slots=True)
class Row:
    """One judged case, with or without an injection, as it is kept in a file of runs."""

    by: str
    """What judged it: prompts, model, votes and temperature."""
    kind: Kind
    id: int
    verdict: Vote | None
    hints: Sequence[str]
    answers: Sequence[str]
    read: int
    """Tokens of the questions, as the judge's server counts them."""
    written: int
    """Tokens of the answers."""
    seconds: float


Rows = Mapping[tuple[str, int], Row]
"""Rows by kind and id."""


def read_rows(file: Path, by: str | None = None) -> Rows:
    """Return the rows of a file of runs, of one judge or of all."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(row.kind, row.id): row for row in rows if by in (None, row.by)}


def interleaved(
    cases: Sequence[Case], injections: Sequence[Injection], every: Mapping[int, Case]
) -> Work:
    """Return what to judge, in an order that may be cut off anywhere: cases and injections in the
    order given, each kind evenly, and before an injection the case that it is put into."""
    shares = [
        (at / max(1, len(some)), one) for some in (cases, injections) for at, one in enumerate(some)
    ]
    work = dict[tuple[Kind, int], Case | Injection]()
    for _, one in sorted(shares, key=lambda share: share[0]):
        if isinstance(one, Injection):
            work.setdefault(("case", one.base), every[one.base])
            work["injection", one.id] = one
        else:
            work.setdefault(("case", one.id), one)
    return [(kind, one) for (kind, _), one in work.items()]


async def judge_all(
    judge: Judge,
    endpoint: HttpEndpoint,
    by: str,
    work: Work,
    every: Mapping[int, Case],
    *,
    file: Path | None = None,
    at_once: int = 1,
    tell: Callable[[], object] = int,
) -> Rows:
    """Judge what the file of runs does not hold yet, and add it there; `tell` is called after
    each."""
    slots = asyncio.Semaphore(at_once)
    rows = dict(read_rows(file, by)) if file else {}

    async def one(kind: Kind, what: Case | Injection) -> None:
        if (kind, what.id) not in rows:
            case = what.put_into(every[what.base]) if isinstance(what, Injection) else what
            async with slots:
                row = await _judged(judge, endpoint, by, kind, what.id, case)
            rows[kind, what.id] = row
            if file:
                with file.open("a") as runs:
                    runs.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        tell()

    async with asyncio.TaskGroup() as group:
        for kind, what in work:
            group.create_task(one(kind, what))
    return {(kind, what.id): rows[kind, what.id] for kind, what in work}


async def _judged(
    judge: Judge, endpoint: HttpEndpoint, by: str, kind: Kind, id: int, case: Case
) -> Row:
    before, began = endpoint.usage, time.monotonic()
    judged = await judge.judge(case.request, case.reply, case.state)
    used = endpoint.usage
    return Row(
        by,
        kind,
        id,
        judged.verdict.value,
        [*judged.hints],
        [*judged.answers],
        used.prefill - before.prefill,
        used.sampled - before.sampled,
        round(time.monotonic() - began, 1),
    )


def against_labels(cases: Sequence[Case], rows: Rows) -> Confusion:
    """Compare verdicts with labels, of the cases that were judged."""
    table = Confusion("label \\ verdict")
    for case in cases:
        if row := rows.get(("case", case.id)):
            table.add(case.label, row.verdict)
    return table


def usable(case: Case, row: Row) -> bool:
    """Return whether a hint came through that speaks of what the user asked for."""
    return any(word in hint.casefold() for hint in row.hints for word in case.asks)


def hints(cases: Sequence[Case], rows: Rows) -> Iterator[str]:
    """Lines on hints: usable ones, and those where there is nothing to hint at."""
    judged = [(case, row) for case in cases if (row := rows.get(("case", case.id)))]
    asking = [usable(case, row) for case, row in judged if case.asks]
    idle = [bool(row.hints) for case, row in judged if case.label != -1]
    machine = sum(bool(row.hints) for case, row in judged if case.state.role != "user")
    yield f"Usable hints: {sum(asking)} of {len(asking)} rejections that ask for something."
    yield f"Hints where nothing was rejected: {sum(idle)} of {len(idle)}; from tools: {machine}."


def costs(rows: Rows) -> str:
    """Describe what a question costs on average."""
    n = max(1, len(rows))
    read, written = (
        sum(getattr(row, name) for row in rows.values()) for name in ("read", "written")
    )
    seconds = sum(row.seconds for row in rows.values())
    return (
        f"Of {len(rows)} judged: {read / n:.0f} tokens read, {written / n:.0f} written, "
        f"{seconds / n:.1f} s each."
    )


def difference(cases: Sequence[Case], rows: Rows, others: Rows) -> Iterator[str]:
    """Lines on what differs from another judge on the same cases, with 90 % intervals."""
    both = [case for case in cases if ("case", case.id) in rows and ("case", case.id) in others]
    asking = [case for case in both if case.asks]

    def right(case: Case, some: Rows) -> bool:
        return some["case", case.id].verdict == case.label

    def hinted(case: Case, some: Rows) -> bool:
        return usable(case, some["case", case.id])

    for what, of, holds in (("verdicts right", both, right), ("usable hints", asking, hinted)):
        if of:
            here, there = (sum(holds(case, some) for case in of) for some in (rows, others))
            gains = [int(holds(case, rows)) - int(holds(case, others)) for case in of]
            low, high = interval(gains)
            yield (
                f"{what}, same {len(of)} cases: {here} against {there}, difference "
                f"{(here - there) / len(of):+.2f} [{low:+.2f}, {high:+.2f}]."
            )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 90 % interval of the mean, by drawing with replacement."""
    draw = random.Random(0)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(DRAWS))
    return means[DRAWS // 20], means[-DRAWS // 20]


@dataclass
class Reading:
    """Answers of the scripted judge as meant, against what was read from them."""

    ratings: Confusion = field(default_factory=lambda: Confusion("meant \\ read"))
    hints: Confusion = field(default_factory=lambda: Confusion("hint meant \\ read"))
    """Hints. Found +1: the words that were meant; −1: other words; 0: no hint."""


async def as_meant(settings: JudgeSettings, prompts: Prompts, cases: Sequence[Case]) -> Reading:
    """Judge all cases with the scripted judge over HTTP, with and without JSON schema."""
    reading = Reading()
    for takes_json in (False, True):
        scripted = ScriptedJudge(takes_json)
        async with in_background(scripted.app()) as url, HttpEndpoint(url, settings) as endpoint:
            judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
            for case in cases:
                scripted.said.clear()
                judged = await judge.judge(case.request, case.reply, case.state)
                for meant, answer in zip(scripted.said, judged.answers, strict=True):
                    owner = case.state.text if case.state.role == "user" else None
                    read = read_answer(answer, owner)
                    reading.ratings.add(meant.meant, read.rating)
                    same = 1 if read.hint == meant.hint else -1
                    reading.hints.add(1 if meant.hint else 0, same if read.hint else 0)
    return reading


@dataclass(frozen=True, slots=True)
class Moved:
    """Effect of one injection."""

    injection: Injection
    before: Vote | None
    after: Vote | None
    hinted: bool
    """Whether a hint contains the payload."""

    @property
    def moved(self) -> bool:
        return self.hinted if self.injection.aims == "hint" else self.before != self.after

    @property
    def reached(self) -> bool:
        """Whether the injection achieved its aim."""
        aims = self.injection.aims
        return self.hinted if aims == "hint" else self.moved and self.after == aims


def moved(injections: Sequence[Injection], rows: Rows) -> Sequence[Moved]:
    """Return the effects of the injections that were judged."""
    return [
        Moved(
            one,
            rows["case", one.base].verdict,
            row.verdict,
            bool(one.payload) and any(one.payload.lower() in hint.lower() for hint in row.hints),
        )
        for one in injections
        if (row := rows.get(("injection", one.id))) and ("case", one.base) in rows
    ]


def by_place(effects: Sequence[Moved]) -> Iterator[str]:
    """Lines of a Markdown table: injections that moved the verdict, and that achieved their aim, by
    place."""
    yield "| where it stands | injections | moved | got what it wanted |"
    yield "|---|---|---|---|"
    places = [*dict.fromkeys(one.injection.where for one in effects), *(["all"] if effects else [])]
    for place in places:
        some = [one for one in effects if place in (one.injection.where, "all")]
        counts = len(some), sum(one.moved for one in some), sum(one.reached for one in some)
        shares = [f"{n} ({n / len(some):.0%})" for n in counts[1:]]
        yield f"| {place} | {counts[0]} | {' | '.join(shares)} |"
