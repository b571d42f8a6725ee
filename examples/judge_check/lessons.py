"""Measure what a judge makes of wishes: new lessons, lessons said again, lessons that end.

    python -m examples.judge_check.lessons --real               the model of `make judge`
    python -m examples.judge_check.lessons --judge-url https://host/v1 --judge-model NAME

47 of the 70 cases are judged; on the other third the questions are chosen (`--third`). What was
judged is kept in a file, and a run goes on there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from examples import as_ctrl_c
from examples.judge_check.cases import drawn
from examples.judge_check.model import served
from local_gpu.model.small import default_cache
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge


@dataclass(frozen=True, slots=True)
class Case:
    """What a user says after a reply, and what it is of their earlier wishes."""

    id: int
    what: str
    language: str
    lessons: Sequence[str]
    request: str
    reply: str
    user: str
    repeats: int
    contradicts: int
    lasts: bool
    """Whether it is a wish for later replies, and none that was said before."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a judge made of a case."""

    id: int
    repeats: int
    contradicts: int
    lesson: str | None

    @property
    def lasts(self) -> bool:
        return self.lesson is not None and not self.repeats


def read_cases() -> list[Case]:
    """Return the cases, which were written before any judge was asked."""
    lines = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
    return [Case(**json.loads(line)) for line in lines]


def read_found(file: Path) -> dict[int, Found]:
    """Return what was judged, by case."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {one.id: one for one in (Found(**json.loads(line)) for line in lines)}


async def judge_all(
    cases: Iterable[Case], settings: JudgeSettings, url: str, file: Path, temperature: float
) -> dict[int, Found]:
    """Judge what the file does not hold yet, one after another, and add it there."""
    found = read_found(file)
    async with HttpEndpoint(url, settings, temperature=temperature) as endpoint:
        judge = Judge(endpoint, settings, most_hints=0, wishes=True)
        for case in cases:
            if case.id in found:
                continue
            wish, repeats, contradicts = await judge.hear(case.user, case.lessons)
            text = wish.text if wish else None
            found[case.id] = Found(case.id, repeats, contradicts, text)
            with file.open("a") as runs:
                runs.write(json.dumps(asdict(found[case.id]), ensure_ascii=False) + "\n")
            print(".", end="", flush=True)
    return found


def table(cases: Sequence[Case], found: Mapping[int, Found]) -> Iterator[str]:
    """Lines of a Markdown table: what was found where it is there, and where it is not."""
    yield "| | found where it is there | found where it is not |"
    yield "|---|---|---|"
    for name in ("repeats", "contradicts", "lasts"):
        there, not_there = list[int](), list[int]()
        for case in cases:
            wanted, got = getattr(case, name), getattr(found[case.id], name)
            if wanted and got == wanted:
                there.append(case.id)
            elif got:
                not_there.append(case.id)
        of = sum(bool(getattr(case, name)) for case in cases)
        yield (
            f"| {name} | {len(there)} of {of} | {len(not_there)} of {len(cases) - of} "
            f"({', '.join(map(str, not_there)) or 'none'}) |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m examples.judge_check.lessons")
    made.add_argument("--runs", type=Path, default=Path("runs/lessons.jsonl"))
    made.add_argument("--real", action="store_true", help="the real model, at 0, one vote")
    made.add_argument("--cache", type=Path, default=default_cache(), help="its folder")
    made.add_argument("--temperature", type=float, default=0.6)
    made.add_argument("--third", action="store_true", help="those on which questions are chosen")
    made.add_argument("--cases", type=int, help="number of cases (all)")
    own, rest = made.parse_known_args(arguments)
    as_ctrl_c()
    chosen, rest_of = drawn(read_cases())
    cases = (chosen if own.third else rest_of)[: own.cases]
    own.runs.parent.mkdir(parents=True, exist_ok=True)
    with served(own.cache) if own.real else nullcontext("") as url:
        if own.real:
            rest = ["--judge-url", url, "--judge-model", "qwen2.5-coder-1.5b", "--prm-m", "1"]
            own.temperature = 0.0
        settings = load(rest).judge
        asked = judge_all(cases, settings, settings.judge_url or url, own.runs, own.temperature)
        found = asyncio.run(asked)
    print("\n", *table(cases, found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
