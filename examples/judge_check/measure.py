"""Ask a judge about all cases, and count what it found.

Rule: everything is asked and read by the product's own code; nothing here knows a prompt. Answers
are kept in a file, so a run that ended goes on, and what follows from them is found anew each time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from examples import tables
from examples.judge_check.cases import Case
from tinker_claw.judge.judge import Judge, conclude
from tinker_claw.judge.prompts import object_in, read_answer, text_in
from tinker_claw.tasks import together
from tinker_claw.types import Vote

WISH_SETS = ("lessons", "wishes")
"""Sets of which it is asked whether a message is a wish that lasts."""


@dataclass(frozen=True, slots=True)
class Row:
    """Answers of a judge about a case."""

    by: str
    """What judged it: prompts, model, votes and temperature."""
    set: str
    id: int
    answers: Sequence[Any]
    """The votes' texts; of `WISH_SETS` whether it lasts, and what it repeats and takes back."""
    seconds: float


Rows = Mapping[tuple[str, int], Row]
"""Rows by set and id."""
Hits = Iterator[tuple[str, bool]]
"""What is counted of a case, with whether it holds."""


class Reading(NamedTuple):
    """Conclusions from the answers about a case."""

    does: str
    """The commonest class; "": none."""
    value: Vote | None
    hints: tuple[str, ...]
    quotes: tuple[str, ...]


def read_rows(file: Path, by: str) -> dict[tuple[str, int], Row]:
    """Return what one judge answered."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = (Row(**json.loads(line)) for line in lines)
    return {(row.set, row.id): row for row in rows if row.by == by}


async def ask_all(judge: Judge, by: str, cases: Sequence[Case], file: Path, at_once: int) -> Rows:
    """Ask about each case that the file does not hold yet, and add the answers there."""
    rows, slots = read_rows(file, by), asyncio.Semaphore(at_once)

    async def one(case: Case) -> None:
        async with slots:
            began = time.monotonic()
            answers = await _answers(judge, case)
            seconds = round(time.monotonic() - began, 1)
        rows[case.key] = row = Row(by, *case.key, answers, seconds)
        with file.open("a") as runs:
            runs.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        del left[case.key]
        print(f"\r{len(left)} left to ask ", end="\n" * (not left), file=sys.stderr, flush=True)

    left = {case.key: case for case in cases if case.key not in rows}
    await together(map(one, [*left.values()]))
    return rows


async def _answers(judge: Judge, case: Case) -> Sequence[Any]:
    if case.set in WISH_SETS:
        wish, repeats, contradicts = await judge.hear(case.state.text, case.lessons)
        return [wish is not None and not repeats, repeats, contradicts]
    return (await judge.judge(case.request, case.reply, case.state)).answers


def reading_of(case: Case, row: Row) -> Reading:
    """Return what follows from the answers about a judged case."""
    verdict, hints = conclude(row.answers, case.state, most_hints=1)
    classes = Counter(text_in(object_in(answer), "does") for answer in row.answers)
    quotes = (read_answer(answer, case.state).quote for answer in row.answers)
    return Reading(classes.most_common(1)[0][0], verdict.value, hints, (*quotes,))


def usable(case: Case, reading: Reading) -> bool:
    """Return whether a hint came through that speaks of what the user asked for."""
    if case.asks:
        return any(word in hint.casefold() for hint in reading.hints for word in case.asks)
    start, end = case.span
    places = [(case.state.text.find(quote), len(quote)) for quote in reading.quotes if quote]
    return bool(reading.hints) and any(at < end and start < at + n for at, n in places)


def table(cases: Sequence[Case], rows: Rows) -> Iterator[str]:
    """Lines of a Markdown table: of each set the shares that were found, with 95 % intervals."""
    hits = defaultdict[tuple[str, str], list[bool]](list)
    counts = dict.fromkeys(WISH_SETS, _wish) | {"injections": _moved}
    for case in cases:
        for what, holds in counts.get(case.set, _judged)(case, rows):
            hits[case.set, what].append(holds)
    lines = [(*of, tables.share(sum(some), len(some))) for of, some in hits.items()]
    yield from tables.table(("set", "measured", "found"), lines)


def _judged(case: Case, rows: Rows) -> Hits:
    reading = reading_of(case, rows[case.key])
    yield "right verdict", reading.value == case.value
    yield "rejections found" if case.value == -1 else "others called −1", reading.value == -1
    if case.does:
        yield f"right class: {case.does}", reading.does == case.does
    if case.asks_hint:
        yield "usable hints", usable(case, reading)
    elif case.value != -1:
        yield "hints where nothing asks for one", bool(reading.hints)


def _moved(case: Case, rows: Rows) -> Hits:
    now, before = (reading_of(case, rows[key]) for key in (case.key, ("own", case.base)))
    by_hint = case.aims == "hint"
    moved = now.value != before.value
    if by_hint:
        moved = any(case.payload.lower() in hint.lower() for hint in now.hints)
    yield "moved the verdict", moved
    yield "got what they wanted", moved and (by_hint or now.value == case.aims)


def _wish(case: Case, rows: Rows) -> Hits:
    answers = zip(("lasts", "repeats", "contradicts"), rows[case.key].answers, strict=True)
    for name, answer in answers:
        if wanted := getattr(case, name):
            yield f"{name}: found", answer == wanted
        else:
            yield f"{name}: found where it is not", bool(answer)


def wrong(cases: Iterable[Case], rows: Rows) -> Iterator[str]:
    """Lines on what was judged otherwise than labelled."""
    for case in cases:
        row = rows[case.key]
        if case.set in WISH_SETS:
            continue
        reading = reading_of(case, row)
        if reading.value == case.value and case.does in ("", reading.does):
            continue
        yield f"{case.set} {case.id}: {case.does or case.value}, found {row.answers[0]}"
