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
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from subprocess import CalledProcessError

from examples import as_ctrl_c
from examples.judge_check import real
from examples.judge_check.cases import (
    Case,
    drawn,
    in_turn,
    read_injections,
    read_lessons,
    read_own,
)
from examples.judge_check.measure import ask_all, costs, table, wrong
from examples.judge_check.model import served
from local_gpu.model.small import default_cache
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ClawError, ConfigError, first_cause
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Prompts

SETS = ("own", "injections", "real", "lessons", "wishes")


async def _run(settings: JudgeSettings, own: argparse.Namespace) -> None:
    if settings.judge_url is None:
        raise ConfigError("name the judge by --judge-url, or take --real")
    prompts = Prompts.read(settings.judge_prompts) if settings.judge_prompts else INCLUDED
    sets = [drawn(cases)[not own.third] for cases in _read(own)]
    cases = [case for some in sets for case in some[: own.most or None]]
    work = in_turn([some[: own.most or None] for some in sets], read_own())
    by = f"{prompts.version} {settings.asked_model} m{settings.prm_m} T{own.temperature:g}"
    async with HttpEndpoint(settings.judge_url, settings, temperature=own.temperature) as endpoint:
        judge = Judge(endpoint, settings, most_hints=1, prompts=prompts)
        rows = await ask_all(judge, endpoint, by, work, own.cache / own.runs, own.at_once)
    print(f"{by}, {'a third' if own.third else 'the rest'}\n", *table(cases, rows), sep="\n")
    print(f"\n{costs({key: rows[key] for key in rows})}")
    if own.show:
        print(*wrong(cases, rows), sep="\n")


def _read(own: argparse.Namespace) -> list[list[Case]]:
    """Return the sets that were asked for. Real ones are left out where they are not there."""
    cases, names = read_own(), own.sets.split(",")
    read = {
        "own": lambda: cases,
        "injections": lambda: read_injections(cases),
        "lessons": read_lessons,
    }
    sets = [read[name]() for name in names if name in read]
    if public := [name for name in names if name in ("real", "wishes")]:
        try:
            talks = real.read_talks(real.fetched(own.cache))
            sets += [real.read_cases(talks, name) for name in public]
        except CalledProcessError:
            print(f"Without real messages: {real.PACKAGE} could not be fetched.", file=sys.stderr)
    return sets


def parser() -> argparse.ArgumentParser:
    """Parser of the command's own flags; unknown ones are settings."""
    made = argparse.ArgumentParser(
        prog="python -m examples.judge_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--sets", default="own,injections,real", help=f"some of {','.join(SETS)}")
    made.add_argument("--most", type=int, default=40, help="cases of each set; 0: all (40)")
    made.add_argument("--third", action="store_true", help="those on which prompts are chosen")
    made.add_argument("--show", action="store_true", help="name what was judged otherwise")
    made.add_argument("--at-once", type=int, default=8, help="questions asked at a time (8)")
    made.add_argument("--temperature", type=float, default=0.6, help="of the answers (0.6)")
    made.add_argument("--real", action="store_true", help="the real model, at 0, one vote")
    made.add_argument("--cache", type=Path, default=default_cache(), help="folder of what is kept")
    made.add_argument("--runs", default="judged.jsonl", help="file of answers there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    own, rest = parser().parse_known_args(arguments)
    as_ctrl_c()
    try:
        with served(own.cache) if own.real else nullcontext() as url:
            if url is not None:
                own.temperature, own.at_once = 0.0, 1
                model = ["--judge-model", "qwen2.5-coder-1.5b", "--prm-m", "1"]
                rest = ["--judge-url", url, *model, *rest]
            asyncio.run(_run(load(rest).judge, own))
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
