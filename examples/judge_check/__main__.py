"""Measure a judge: how its verdicts agree with a person's, and what injections move.

    python -m examples.judge_check --judge-url https://host/v1 --judge-model NAME
    python -m examples.judge_check --config mine.toml          the judge of a settings file
    python -m examples.judge_check                             the scripted one, by rules

Takes the settings of `run.py` that describe a judge: --prm-m, --judge-prompts, headers and keys of
a settings file. A real judge is asked some 530 questions, of 3 votes each; a service bills them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from examples.judge_check.cases import read_cases, read_injections
from examples.judge_check.measure import (
    against_labels,
    as_meant,
    by_place,
    inject,
    judge_all,
)
from examples.judge_check.scripted import ScriptedJudge
from tinker_claw.app.server import in_background
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ClawError, first_cause
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Prompts


async def _run(settings: JudgeSettings, *, show: bool, at_once: int) -> None:
    prompts = Prompts.read(settings.judge_prompts) if settings.judge_prompts else INCLUDED
    cases, injections = read_cases(), read_injections()
    async with AsyncExitStack() as stack:
        url = settings.judge_url
        if url is None:
            url = await stack.enter_async_context(in_background(ScriptedJudge().app()))
            print("No --judge-url: the scripted judge answers, by word lists.")
        endpoint = await stack.enter_async_context(HttpEndpoint(url, settings))
        judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
        print(f"{len(cases)} cases, {settings.prm_m} votes, prompts {prompts.version}\n")
        if settings.judge_url is None:
            reading = await as_meant(settings, prompts, cases)
            print(*reading.ratings.lines(), "", *reading.hints.lines(), "", sep="\n")
            judged = reading.judged
        else:
            judged = await judge_all(judge, cases, at_once, _dot)
            print("\n")
        print(*against_labels(cases, judged).lines(), "", sep="\n")
        if show:
            for case, judgement in zip(cases, judged, strict=True):
                if judgement.verdict.value != case.label:
                    print(f"case {case.id} ({case.language}, {case.about}): label {case.label}, "
                          f"votes {judgement.verdict.votes}")  # fmt: skip
        moved, by_itself, bases = await inject(judge, cases, injections, at_once, _dot)
        print(f"\n\n{len(injections)} injections; of {bases} cases without one, judged twice, "
              f"{by_itself} moved by themselves\n")  # fmt: skip
        print(*by_place(moved), sep="\n")
        if show:
            for one in moved:
                if one.moved:
                    what = one.injection
                    print(f"injection {what.id} ({what.where}, {what.about}): {one.before} to "
                          f"{one.after}, hint {one.hinted}")  # fmt: skip


def _dot() -> None:
    print(".", end="", flush=True)


def parser() -> argparse.ArgumentParser:
    """Parser of the command's own flags; unknown ones are settings."""
    made = argparse.ArgumentParser(
        prog="python -m examples.judge_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--show", action="store_true", help="name what was judged otherwise")
    made.add_argument("--at-once", type=int, default=8, help="questions asked at a time (8)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    own, rest = parser().parse_known_args(arguments)
    try:
        settings = load(rest).judge
        asyncio.run(_run(settings, show=own.show, at_once=own.at_once))
    except (ClawError, ExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, ClawError):
            raise
        print(f"\n{cause}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
