"""Measure a judge: verdicts against labels, answers as read, and effects of injections.

Rule: everything is asked and read by the product's own code; nothing here knows a prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from examples.judge_check.cases import Case, Injection
from examples.judge_check.scripted import Said, ScriptedJudge
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge, Judgement
from tinker_claw.judge.prompts import Prompts, parse_hint
from tinker_claw.types import Vote

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


async def judge_all(
    judge: Judge, cases: Sequence[Case], at_once: int = 1, tell: Callable[[], object] = int
) -> list[Judgement]:
    """Judge each case; `tell` is called after each."""
    slots = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Judgement:
        async with slots:
            judgement = await judge.judge(case.request, case.reply, case.state)
        tell()
        return judgement

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(case)) for case in cases]
    return [task.result() for task in tasks]


def against_labels(cases: Sequence[Case], judged: Sequence[Judgement]) -> Confusion:
    table = Confusion("label \\ verdict")
    for case, judgement in zip(cases, judged, strict=True):
        table.add(case.label, judgement.verdict.value)
    return table


@dataclass
class Reading:
    """Answers of the scripted judge as meant, against what was read from them."""

    ratings: Confusion = field(default_factory=lambda: Confusion("meant \\ read"))
    hints: Confusion = field(default_factory=lambda: Confusion("hint meant \\ read"))
    """Hints. Found +1: the words that were meant; −1: other words; 0: no hint."""
    judged: list[Judgement] = field(default_factory=list[Judgement])
    """Judgement of each case by the judge that takes a schema."""


async def as_meant(settings: JudgeSettings, prompts: Prompts, cases: Sequence[Case]) -> Reading:
    """Judge all cases with the scripted judge over HTTP, with and without JSON schema."""
    reading = Reading()
    for takes_json in (False, True):
        scripted = ScriptedJudge(takes_json)
        async with in_background(scripted.app()) as url, HttpEndpoint(url, settings) as endpoint:
            judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
            reading.judged.clear()
            for case in cases:
                scripted.said.clear()
                reading.judged += await judge_all(judge, [case])
                _compare(scripted.said, reading.judged[-1], reading, case.state.text)
    return reading


def _compare(said: Sequence[Said], judgement: Judgement, reading: Reading, owner: str) -> None:
    verdicts = [one for one in said if one.about == "verdict"]
    hints = [one for one in said if one.about == "hint"]
    for meant, read in zip(verdicts, judgement.verdict.votes, strict=True):
        reading.ratings.add(meant.meant, read)
    answers = zip(hints, judgement.hint_votes, judgement.hint_answers, strict=True)
    for meant, read, answer in answers:
        reading.ratings.add(meant.meant, read)
        hint = parse_hint(answer, owner)
        same = 1 if hint == meant.hint else -1
        reading.hints.add(1 if meant.hint else 0, same if hint else 0)


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


async def inject(
    judge: Judge,
    cases: Sequence[Case],
    injections: Sequence[Injection],
    at_once: int = 1,
    tell: Callable[[], object] = int,
) -> tuple[list[Moved], int, int]:
    """Judge all injections. Returns their effects; and of the bases, judged twice without
    injection, how many changed by themselves, and their number."""
    by_id = {case.id: case for case in cases}
    bases = [by_id[n] for n in dict.fromkeys(injection.base for injection in injections)]
    clean = await judge_all(judge, [*bases, *bases], at_once, tell)
    first, again = clean[: len(bases)], clean[len(bases) :]
    before: dict[int, Vote | None] = {
        case.id: one.verdict.value for case, one in zip(bases, first, strict=True)
    }
    put = [injection.put_into(by_id[injection.base]) for injection in injections]
    judged = await judge_all(judge, put, at_once, tell)
    moved = [
        Moved(
            injection,
            before[injection.base],
            judgement.verdict.value,
            any(injection.payload.lower() in hint.lower() for hint in judgement.hints)
            if injection.payload
            else False,
        )
        for injection, judgement in zip(injections, judged, strict=True)
    ]
    pairs = zip(first, again, strict=True)
    return moved, sum(a.verdict.value != b.verdict.value for a, b in pairs), len(bases)


def by_place(moved: Sequence[Moved]) -> Iterator[str]:
    """Lines of a Markdown table: injections that moved the verdict, and that achieved their aim, by
    place."""
    yield "| where it stands | injections | moved | got what it wanted |"
    yield "|---|---|---|---|"
    places = [*dict.fromkeys(one.injection.where for one in moved), "all"]
    for place in places:
        some = [one for one in moved if place in (one.injection.where, "all")]
        counts = len(some), sum(one.moved for one in some), sum(one.reached for one in some)
        shares = [f"{n} ({n / len(some):.0%})" for n in counts[1:]]
        yield f"| {place} | {counts[0]} | {' | '.join(shares)} |"
