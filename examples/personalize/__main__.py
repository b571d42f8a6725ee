"""`python -m examples.personalize`: the experiment, and a report of what came out.

    python -m examples.personalize                               # the tiny one: no GPU, no network

    python -m examples.personalize --methods combine --seeds 1   # a part of it

    python -m examples.personalize configs/personalize/real.toml --user-url URL --user-model NAME

    make real-judge                       # a real small model under the real judge of `make judge`

Finished runs are not repeated, and a run that was cut short continues where it was.
Exit status: 0 done, 1 something stopped it, 2 wrong flags, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from openai import AsyncOpenAI

from examples import exit_status, locked, say
from examples.demo import DemoError
from examples.demo.options import positive
from examples.judge_check.model import JUDGE, served
from examples.personalize import report
from examples.personalize.experiment import CONDITIONS, TINY, Experiment, load
from examples.personalize.played import TRIES, Model
from examples.personalize.run import perform, written
from examples.personalize.users import USERS
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.methods import names

_KEY = "USER_API_KEY"
_NUMBERS = {
    "seeds": "of each kind of run, from 0",
    "steps": "optimizer steps of a run",
    "sessions": "sessions of a run, at least",
    "questions": "fresh first messages for each score",
    "users": "people who talk, with a key each (default 1)",
    "at_once": "sessions at a time",
    "max_tokens": "of a reply",
}
_OVERRIDES = ("methods", "conditions", "scenarios", "config", "flags", *_NUMBERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and report all; returns the exit status."""
    try:
        options = _parser().parse_args(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    return exit_status(lambda: _run(options), ClawError)


def _run(options: argparse.Namespace) -> None:
    experiment = load(options.experiment, **{name: getattr(options, name) for name in _OVERRIDES})
    out = (options.out or Path("runs") / f"personalize-{experiment.name}").resolve()
    player = None
    if options.user_url:
        key = os.environ.get(_KEY) or "none"
        sdk = AsyncOpenAI(base_url=options.user_url, api_key=key, max_retries=TRIES)
        player = Model(sdk, options.user_model)
    with ExitStack() as stack:
        stack.enter_context(locked(out))
        if options.real_judge:
            url = stack.enter_context(served(Path("runs/models")))
            flags = (*experiment.flags, f"--judge-url={url}", f"--judge-model={JUDGE}")
            experiment = experiment.model_copy(update={"flags": flags})
        asyncio.run(_all(experiment, out, player))
    paths = report.write(experiment, out)
    print(*report.table(experiment, report.rows(experiment, out)), *paths, sep="\n")


async def _all(experiment: Experiment, out: Path, player: Model | None) -> None:
    """Perform every run that is missing, one after another; the report is rewritten after each."""
    runs = experiment.runs()
    missing = [run for run in runs if written(out, run) is None]
    say(f"{len(missing)} runs, {len(runs) - len(missing)} are there already")
    started = monotonic()
    for number, run in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {run.name}")
        try:
            await perform(run, experiment, out, player)
        except DemoError as error:
            raise DemoError(f"{run.name}: {error}") from error
        report.write(experiment, out)
        left = (monotonic() - started) / number * (len(missing) - number)
        say(f"  done; about {left / 60:.0f} minutes to go")


def _path(text: str) -> str:
    return str(Path(text).resolve())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.personalize",
        description="Users talk to the running system until its first replies are what they want; "
        "methods, scenarios, controls and seeds beside each other.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("experiment", nargs="?", type=Path, default=TINY, help="a file (default: the tiny one)")
    add("--out", type=Path, help="results (default runs/personalize-<name>); goes on with them")
    add("--methods", nargs="+", choices=names(), help="how turns become training")
    users = ", ".join(USERS)
    add("--scenarios", nargs="+", metavar="SCENARIO", help=f"files, or users of the demo: {users}")
    add("--conditions", nargs="+", choices=CONDITIONS, help="which parts (default: the file's)")
    for name, about in _NUMBERS.items():
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=about)
    add("--config", type=_path, help="the product's settings")
    add("--flags", type=shlex.split, help="further flags of run.py, in one string")
    add("--user-url", help="OpenAI-compatible endpoint (…/v1) of the model that plays and scores")
    add("--user-model", default="default", help=f"its name there; its key stands in {_KEY}")
    add("--real-judge", action="store_true", help="the model of `make judge` judges, no rule")
    return parser


if __name__ == "__main__":
    sys.exit(main())
