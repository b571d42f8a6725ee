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
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import httpx

from examples import as_ctrl_c
from examples.demo import DemoError, server
from examples.demo.options import positive
from examples.judge_check.model import served
from examples.personalize import report
from examples.personalize.experiment import CONDITIONS, TINY, Experiment, Run, load
from examples.personalize.played import Model
from examples.personalize.run import Surroundings, perform, written
from examples.personalize.users import USERS
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.files import for_owner_only
from tinker_claw.methods import names

EXIT_FAILED = 1
MODEL_ANSWER_S = 300.0
_OVERRIDES = (
    "methods",
    "conditions",
    "seeds",
    "steps",
    "sessions",
    "questions",
    "scenarios",
    "users",
    "at_once",
    "max_tokens",
    "model",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and report all; returns the exit status."""
    for_owner_only()
    as_ctrl_c()
    try:
        options = _parser().parse_args(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    try:
        flags = {name: getattr(options, name) for name in _OVERRIDES}
        flags["config"] = options.config and str(options.config.resolve())
        flags["flags"] = tuple(shlex.split(options.flags)) if options.flags else None
        experiment = load(options.experiment, **flags)
        out = (options.out or Path("runs") / f"personalize-{experiment.name}").resolve()
        out.mkdir(parents=True, exist_ok=True)
        if not options.report_only:
            with alone(out), ExitStack() as judge:
                if options.real_judge:
                    url = judge.enter_context(served(Path("runs/models")))
                    flags = f"--judge-url={url}", "--judge-model=qwen2.5-coder-1.5b"
                    experiment = replace(experiment, flags=(*experiment.flags, *flags))
                asyncio.run(_all(experiment, options, out))
        paths = report.write(experiment, out)
        print(*report.table(experiment, report.rows(experiment, out)), *paths, sep="\n")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (DemoError, ClawError) as error:
        print(f"The experiment stopped: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


@contextmanager
def alone(out: Path) -> Generator[None]:
    """Lock the folder. Raises `DemoError` where another process runs an experiment in it."""
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DemoError(f"another process runs an experiment in {out}") from error
        yield


async def _all(experiment: Experiment, options: argparse.Namespace, out: Path) -> None:
    """Perform every run that is missing, one after another; the report is rewritten after each."""
    runs = experiment.runs()
    missing = [run for run in runs if written(out, run) is None]
    _say(f"{len(missing)} runs, {len(runs) - len(missing)} are there already")
    async with (
        _model(options.user_url, options.user_model, options.user_key) as player,
        _model(
            options.scorer_url or options.user_url,
            options.scorer_model or options.user_model,
            # another host is not sent the key of the model that plays
            options.scorer_key or ("" if options.scorer_url else options.user_key),
        ) as scorer,
    ):
        around, started = Surroundings(out, _say, player, scorer), monotonic()
        for number, run in enumerate(missing, 1):
            _say(f"{number} of {len(missing)}: {run.name}")
            await _one(run, experiment, around)
            report.write(experiment, out)
            left = (monotonic() - started) / number * (len(missing) - number)
            _say(f"  done; about {left / 60:.0f} minutes to go")


async def _one(run: Run, experiment: Experiment, around: Surroundings) -> None:
    try:
        await perform(run, experiment, around)
    except DemoError as error:
        log = around.out / run.name / "server.log"
        raise DemoError(f"{run.name}: {error}\n{server.last_lines(log)}") from error


@asynccontextmanager
async def _model(url: str | None, name: str | None, key: str) -> AsyncGenerator[Model | None]:
    if url is None:
        yield None
        return
    secret = os.environ.get(key)
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    base = url.rstrip("/") + "/"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=MODEL_ANSWER_S) as http:
        yield Model(http, name or "default")


def _say(line: str) -> None:
    print(line, flush=True)


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
    add(
        "--scenarios",
        nargs="+",
        metavar="SCENARIO",
        help=f"files, or users of the demo: {', '.join(USERS)}",
    )
    add("--conditions", nargs="+", choices=CONDITIONS, help="which parts (default: the file's)")
    add("--seeds", type=positive, metavar="N", help="of each kind of run, from 0")
    add("--steps", type=positive, metavar="N", help="optimizer steps of a run")
    add("--sessions", type=positive, metavar="N", help="sessions of a run, at least")
    add("--questions", type=positive, metavar="N", help="fresh first messages for each score")
    add("--users", type=positive, metavar="N", help="people who talk, with a key each (default 1)")
    add("--at-once", type=positive, metavar="N", help="sessions at a time")
    add("--max-tokens", type=positive, metavar="N", help="of a reply")
    add("--config", type=Path, help="the product's settings")
    add("--flags", help="further flags of run.py, in one string")
    add("--model", help="the gateway's name for the model (default: as in the settings)")
    add("--user-url", help="OpenAI-compatible endpoint (…/v1) of the model that plays the users")
    add("--user-model", help="its name there")
    add("--user-key", metavar="VARIABLE", default="USER_API_KEY", help="variable with its key")
    add("--scorer-url", help="the same for the model that scores (default: the one that plays)")
    add("--scorer-model")
    add("--scorer-key", metavar="VARIABLE", help="variable with the key of --scorer-url")
    add("--real-judge", action="store_true", help="the model of `make judge` judges, no rule")
    add("--report-only", action="store_true", help="run nothing, and report what is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
