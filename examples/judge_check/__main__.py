"""Measure a judge: on our own cases, on injections, on real follow-ups, and on lasting wishes.

    make judge                                                 a real model of 1.5B parameters
    python -m examples.judge_check --judge-url https://host/v1 --judge-model NAME
    python -m examples.judge_check --config mine.toml          the judge of a settings file

Takes the settings of `run.py` that describe a judge: --prm-m, --judge-prompts, headers and keys of
a settings file. 40 cases of each set are drawn from those on which no prompt was chosen; a service
bills them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

from examples import StoppedError, exit_status
from examples.judge_check import rated, real
from examples.judge_check.cases import Case, drawn, first, read_injections, read_written
from examples.judge_check.measure import ask_all, table, wrong
from examples.judge_check.model import JUDGE, served
from local_gpu.model.small import default_cache
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Prompts


async def _run(settings: JudgeSettings, own: argparse.Namespace) -> None:
    if settings.judge_url is None:
        raise ConfigError("name the judge by --judge-url, or take --real")
    prompts = Prompts.read(settings.judge_prompts) if settings.judge_prompts else INCLUDED
    temperature, at_once = (0.0, 1) if own.real else (0.6, 8)
    by = f"{prompts.version} {settings.asked_model} m{settings.prm_m} T{temperature:g}"
    cases = list[Case]()
    for name in own.sets.split(","):
        third, rest = drawn(_read(name, own))
        cases += first(third if own.third else rest, own.each)[: own.most or None]
    bases = {case.base for case in cases}
    work = cases + [case for case in read_written("own") if case.id in bases]
    async with HttpEndpoint(settings.judge_url, settings, temperature=temperature) as endpoint:
        judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
        rows = await ask_all(judge, by, work, own.cache / "answers.jsonl", at_once)
    print(f"{by}, {'a third' if own.third else 'the rest'}\n", *table(cases, rows), sep="\n")
    print(f"\nA case takes {fmean(row.seconds for row in rows.values()):.1f} s.")
    if own.show:
        print(*wrong(cases, rows), sep="\n")


def _read(name: str, own: argparse.Namespace) -> list[Case]:
    """Return a set by its name. One of real messages is empty where they cannot be had."""
    if name in ("real", "wishes"):
        try:
            return real.read_cases(real.read_talks(real.fetched(own.cache)), name)
        except StoppedError as error:
            print(f"Left out: {name}. {error}", file=sys.stderr)
            return []
    if name == rated.NAME:
        if own.rated is not None:
            return rated.read_cases(own.rated)
        print("Left out: rated. Name a file of USS or AB-ReDial with --rated.", file=sys.stderr)
        return []
    if name == "injections":
        return read_injections()
    if name not in ("own", "lessons"):
        raise ConfigError(f"--sets {name}: there are own, injections, real, lessons, wishes, rated")
    return read_written(name)


def parser() -> argparse.ArgumentParser:
    """Parser of the command's own flags; unknown ones are settings."""
    own = argparse.ArgumentParser(
        prog="python -m examples.judge_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = own.add_argument
    add("--sets", default="own,injections,real", help="also: lessons, wishes, rated")
    add("--rated", type=Path, help="file of rated dialogues: SGD.txt, annotated_turns.csv")
    add("--most", type=int, default=40, help="cases of each set; 0: all (40)")
    add("--each", type=int, help="most cases of each class of messages")
    add("--third", action="store_true", help="those on which prompts are chosen")
    add("--show", action="store_true", help="name what was judged otherwise")
    add("--real", action="store_true", help="the real model, at temperature 0, one vote")
    add("--cache", type=Path, default=default_cache(), help="folder of what is kept")
    return own


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a judge; return the exit status."""
    return exit_status(lambda: _measure(*parser().parse_known_args(arguments)), ClawError)


def _measure(own: argparse.Namespace, rest: Sequence[str]) -> None:
    own.cache.mkdir(parents=True, exist_ok=True)
    with served(own.cache) if own.real else nullcontext() as url:
        if url is not None:
            rest = ["--judge-url", url, "--judge-model", JUDGE, "--prm-m", "1", *rest]
        asyncio.run(_run(load(rest).judge, own))


if __name__ == "__main__":
    sys.exit(main())
