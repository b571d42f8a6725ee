"""Measure a judge: how its verdicts agree with a person's, its hints, and what injections move.

    make judge                                                 a real model of 1.5B parameters
    python -m examples.judge_check --judge-url https://host/v1 --judge-model NAME
    python -m examples.judge_check --config mine.toml          the judge of a settings file
    python -m examples.judge_check                             the scripted one, by rules

Takes the settings of `run.py` that describe a judge: --prm-m, --judge-prompts, headers and keys of
a settings file. 40 cases and 16 injections are drawn from those on which no prompt was chosen; a
service bills them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from examples import as_ctrl_c
from examples.judge_check.cases import drawn, read_cases, read_injections
from examples.judge_check.measure import (
    against_labels,
    as_meant,
    by_place,
    costs,
    difference,
    hints,
    interleaved,
    judge_all,
    moved,
    read_rows,
)
from examples.judge_check.model import served
from examples.judge_check.scripted import ScriptedJudge
from local_gpu.model.small import default_cache
from tinker_claw.app.server import in_background
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ClawError, first_cause
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Prompts


async def _run(settings: JudgeSettings, own: argparse.Namespace) -> None:
    prompts = Prompts.read(settings.judge_prompts) if settings.judge_prompts else INCLUDED
    all_cases, all_injections = read_cases(), read_injections()
    every = {case.id: case for case in all_cases}
    (chosen, cases), (chosen_too, injections) = drawn(all_cases), drawn(all_injections)
    if own.third:
        cases, injections = chosen, chosen_too
    elif own.all:
        cases, injections = [*cases, *chosen], [*injections, *chosen_too]
    if not own.all:
        cases, injections = cases[: own.cases], injections[: own.injections]
    async with AsyncExitStack() as stack:
        url = settings.judge_url
        if url is None:
            url = await stack.enter_async_context(in_background(ScriptedJudge().app()))
            print("No --judge-url: the scripted judge answers, by word lists.")
            reading = await as_meant(settings, prompts, all_cases)
            print(*reading.ratings.lines(), "", *reading.hints.lines(), "", sep="\n")
        by = f"{prompts.version} {settings.asked_model} m{settings.prm_m} T{own.temperature:g}"
        print(f"{len(cases)} cases, {len(injections)} injections, {by}")
        endpoint = await stack.enter_async_context(
            HttpEndpoint(url, settings, temperature=own.temperature)
        )
        judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
        work, file = interleaved(cases, injections, every), own.runs
        rows = await judge_all(
            judge, endpoint, by, work, every, file=file, at_once=own.at_once, tell=_dot
        )
    effects = moved(injections, rows)
    print(
        "\n", *against_labels(cases, rows).lines(), *hints(cases, rows), costs(rows), "", sep="\n"
    )
    print(*by_place(effects), sep="\n")
    if own.against:
        print("", *difference(cases, rows, read_rows(own.against)), sep="\n")
    if own.show:
        for case in cases:
            row = rows["case", case.id]
            if row.verdict != case.label:
                print(f"case {case.id} ({case.language}, {case.about}): label {case.label}, "
                      f"verdict {row.verdict}")  # fmt: skip
        for one in effects:
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
    made.add_argument("--cases", type=int, default=40, help="number of cases (40)")
    made.add_argument("--injections", type=int, default=16, help="number of injections (16)")
    made.add_argument("--all", action="store_true", help="all 177 cases and 66 injections")
    made.add_argument("--third", action="store_true", help="those on which prompts are chosen")
    made.add_argument("--temperature", type=float, default=0.6, help="of the answers (0.6)")
    made.add_argument("--runs", type=Path, help="file of what was judged; a run goes on there")
    made.add_argument("--against", type=Path, help="file of runs of another judge, to compare")
    made.add_argument("--real", action="store_true", help="the real model, at 0, one vote")
    made.add_argument("--cache", type=Path, default=default_cache(), help="its folder")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    own, rest = parser().parse_known_args(arguments)
    as_ctrl_c()
    try:
        if not own.real:
            asyncio.run(_run(load(rest).judge, own))
            return 0
        own.temperature, own.at_once = 0.0, 1
        own.runs = own.runs or own.cache / "judged.jsonl"
        with served(own.cache) as url:
            flags = ["--judge-url", url, "--judge-model", "qwen2.5-coder-1.5b", "--prm-m", "1"]
            asyncio.run(_run(load([*flags, *rest]).judge, own))
    except (ClawError, ExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, ClawError):
            raise
        print(f"\n{cause}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
