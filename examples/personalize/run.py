"""One run: a gateway with its users, exams and results.

Rule: progress is saved every few seconds, so a run that was killed continues; its server continues
from its ledger, as it does for any user. Results are read from the ledger.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

from examples import ROOT
from examples.demo import DemoError, report, server
from examples.demo.client import Client, connected
from examples.demo.conduct import Cast, conduct
from examples.demo.judge import Case, create_app
from examples.demo.options import Options
from examples.demo.progress import Progress
from examples.demo.scoring import Exam
from examples.demo.user import Speaker
from examples.personalize import judges
from examples.personalize.experiment import TOLD, Experiment, Run
from examples.personalize.played import Model, Played, ScoredExam
from examples.personalize.scenario import Scenario
from tinker_claw.app.server import in_background
from tinker_claw.learner.judging import CONCURRENCY

SAVE_S = 2.0
STATE = "progress.json"
LEDGER = Path("run") / "ledger.sqlite3"
_PASSED = ("TINKER_", "HF_", "CUDA_", "NUM_GPUS", "ROLLOUT_GPUS")
"""Prefixes of variables by which a product reaches its service, its models and its GPUs."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings of a run, shared by the whole experiment."""

    out: Path
    say: Callable[[str], None]
    player: Model | None = None
    """Model that plays users with a persona."""
    scorer: Model | None = None
    """Model that scores replies where a scenario wants that."""


def written(out: Path, run: Run) -> dict[str, Any] | None:
    """Results of a run; None: it has not run, or was cut short."""
    path = out / run.name / report.REPORT
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if results.get("whole") else None


async def perform(run: Run, experiment: Experiment, around: Surroundings) -> None:
    """Perform a run, or the rest of it, and write its results.

    Raises:
        DemoError: what went wrong.
    """
    folder = around.out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(_options(run, experiment, folder))
    if (state := folder / STATE).is_file():
        progress.take_up(json.loads(state.read_text()))
    try:
        async with _stage(run, experiment, around, folder) as (cast, watch):
            watches = (watch, lambda: _saved(progress, state), lambda: _shown(progress, around.say))
            await conduct(cast, progress, watches)
    finally:
        progress.ended = time.monotonic()
        _save(progress, state)
    results = report.contents(progress) | _counted(folder / LEDGER) | circumstances()
    if experiment.judged:
        rule = judges.honest([experiment.scenarios[run.scenario]])
        results |= {"by_rule": _by_rule(folder / LEDGER, rule)}
    _replace(folder / report.REPORT, json.dumps(results, indent=1) + "\n")


def _options(run: Run, experiment: Experiment, folder: Path) -> Options:
    learns = run.condition != TOLD
    return Options(
        out=folder,
        method=run.method,
        user=run.scenario,
        seed=run.seed,
        steps=experiment.steps if learns else 0,
        sessions=experiment.sessions if learns else 0,
        eval_prompts=experiment.questions,
        config=experiment.config,
    )


@asynccontextmanager
async def _stage(
    run: Run, experiment: Experiment, around: Surroundings, folder: Path
) -> AsyncGenerator[tuple[Cast, Callable[[], Awaitable[None]]]]:
    """Set up the clients, users and server of a run, from the moment that the server answers."""
    scenario = experiment.scenarios[run.scenario]
    async with AsyncExitStack() as stack:
        flags = [f"--config={experiment.config}", f"--method={run.method}", f"--seed={run.seed}"]
        flags += experiment.flags
        if not experiment.judged and (think := _judge(run, scenario)) is not None:
            app = create_app(run.seed, think)
            judge = await stack.enter_async_context(in_background(app))
            flags += [f"--judge-url={judge}"]
        people = [f"user-{number}" for number in range(experiment.users)]
        keys = {name: token_hex(16) for name in ("admin", *people)} if len(people) > 1 else {}
        passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
        if keys:
            roles = {"admin": "admin"}
            users = [{"name": n, "key": k, "role": roles.get(n, "user")} for n, k in keys.items()]
            passed["TINKER_CLAW_USERS"] = json.dumps(users)
        admin = keys.get("admin")
        launch = server.Launch(folder, tuple(flags), passed, admin)
        child = await stack.enter_async_context(server.running(launch))

        async def client(key: str | None) -> Client:
            model, most = experiment.served, experiment.max_tokens
            return await stack.enter_async_context(connected(child.url, key, model, most))

        speaker = _speaker(scenario, around)
        talkers = [(await client(keys.get(name)), speaker) for name in people]
        exam = _exam(scenario, experiment, around, with_rule=run.condition == TOLD)

        def waits() -> bool:
            return experiment.judged and unjudged(folder / LEDGER) >= CONCURRENCY

        yield Cast(await client(admin), talkers, exam, experiment.at_once, waits), child.watch


def _judge(run: Run, scenario: Scenario) -> judges.Think | None:
    """Judge that is asked; None: the product's, or the demo's."""
    honest = judges.honest([scenario])
    if run.condition in judges.LIES:
        if not scenario.other_hints:
            raise DemoError(f"{run.scenario}: a lying judge needs other_hints, of another rule")
        return judges.LIES[run.condition](honest, scenario.other_hints)
    return honest if scenario.hints else None


def _speaker(scenario: Scenario, around: Surroundings) -> Speaker:
    if not scenario.persona:
        return scenario.speaker()
    if around.player is None:
        raise DemoError(f"{scenario.name} is played by a model: name one with --user-url")
    return Played(scenario, around.player)


def _exam(
    scenario: Scenario, experiment: Experiment, around: Surroundings, *, with_rule: bool
) -> Exam:
    exam = scenario.exam(experiment.questions, with_rule=with_rule)
    if scenario.scored != "model":
        return exam
    if around.scorer is None:
        raise DemoError(f"{scenario.name} is scored by a model: name one with --user-url")
    return ScoredExam(exam, scenario, around.scorer)


async def _saved(progress: Progress, path: Path) -> None:
    while True:
        await asyncio.sleep(SAVE_S)
        _save(progress, path)


def _save(progress: Progress, path: Path) -> None:
    _replace(path, json.dumps(progress.state()))


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def _shown(progress: Progress, say: Callable[[str], None]) -> None:
    """Print a line for every new step and score."""
    printed = (-1, -1)
    while True:
        scores = progress.scores
        if (progress.version, len(scores)) == printed:
            await asyncio.sleep(SAVE_S)
            continue
        printed = progress.version, len(scores)
        score = f"{scores[max(scores)].accepted:.2f}" if scores else "-"
        say(
            f"  {progress.seconds:5.0f} s  step {progress.version}/{progress.options.steps}  "
            f"session {progress.sessions}/{progress.options.sessions}  accepted {score}"
        )


def circumstances() -> dict[str, Any]:
    """Commit, date, cores and load under which the run was measured."""
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        commit = subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "commit": commit or "not known",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
    }


def _counted(ledger: Path) -> dict[str, Any]:
    """Count a ledger's verdicts, hints and bill."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as rows:
        verdicts = rows.execute("SELECT value, COUNT(*) FROM verdicts GROUP BY value").fetchall()
        ((hints,),) = rows.execute("SELECT COUNT(*) FROM hints").fetchall()
        ((usd,),) = rows.execute("SELECT TOTAL(usd) FROM spend").fetchall()
    names = {1: "+1", 0: "0", -1: "-1", None: "none"}
    counts = {names[value]: count for value, count in verdicts}
    return {"verdicts": counts, "hints": hints, "usd": usd}


def unjudged(ledger: Path) -> int:
    """Return how many turns wait for the judge."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as rows:
        ((count,),) = rows.execute(
            "SELECT COUNT(*) FROM turns "
            "WHERE state = 'judging' AND id NOT IN (SELECT turn_id FROM verdicts)"
        ).fetchall()
    return count


def _by_rule(ledger: Path, rule: judges.Think) -> list[dict[str, Any]]:
    """Count verdicts and hints by what the rule says of the same words."""
    counts: Counter[tuple[int, bool, int | None, bool]] = Counter()
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as rows:
        for text, value, hinted in rows.execute(
            "SELECT text, value, turn_id IN (SELECT turn_id FROM hints) "
            "FROM verdicts JOIN next_states USING (turn_id)"
        ):
            right, hint = rule(Case("user", text, text), Random(0))
            counts[right, hint is not None, value, bool(hinted)] += 1
    names = ("rule", "asks", "verdict", "hint")
    return [dict(zip(names, key, strict=True)) | {"turns": n} for key, n in counts.items()]
