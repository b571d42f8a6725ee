"""One run: a server or a gateway that is there, the users, the exams, and what came out.

Rule: what has happened is on disk every few seconds, so a run that was killed goes on; its server
goes on from its ledger, as anybody's does. What came out is told by the ledger where there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from asyncio import to_thread
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from statistics import fmean
from typing import Any

from examples.demo import DemoError, report, server
from examples.demo.client import Client, connected
from examples.demo.conduct import Cast, conduct
from examples.demo.judge import create_app
from examples.demo.options import ROOT, Options
from examples.demo.progress import Progress
from examples.demo.scoring import Exam, Score
from examples.demo.user import Speaker
from examples.personalize import judges
from examples.personalize.experiment import TOLD, Experiment, Run
from examples.personalize.judges import FLIPPED, SHUFFLED
from examples.personalize.openclaw import Agent, ThroughOpenClaw
from examples.personalize.played import Model, Played, ScoredExam
from examples.personalize.scenario import Scenario
from tinker_claw.app.server import in_background

SAVE_S = 2.0
STATE = "progress.json"
GUARDS_OFF = (
    "--max-step-kl=0",
    "--gate=off",
)
_PASSED = ("TINKER_", "HF_", "CUDA_", "NUM_GPUS", "ACTOR_GPUS", "ROLLOUT_GPUS", "PRM_GPUS")
"""Variables by which a product reaches its service, its models and its GPUs."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run has around it, besides its experiment."""

    out: Path
    say: Callable[[str], None]
    player: Model | None = None
    """Plays users who have a persona."""
    scorer: Model | None = None
    """Scores replies where a scenario wants that."""
    gateway: str | None = None
    """Address of a gateway that runs already; None: each run starts one."""
    key: str | None = None
    """Its key, of an admin."""
    agent: Agent | None = None
    """Stands between the users and that gateway; None: they ask it themselves."""


def written(out: Path, run: Run) -> dict[str, Any] | None:
    """What a run left; None: nothing yet, or it was cut short."""
    path = out / run.name / report.REPORT
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if found.get("whole") else None


async def perform(run: Run, experiment: Experiment, around: Surroundings) -> None:
    """Hold a run, or what is left of it, and write down what came out.

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
    found = report.contents(progress) | {
        "run": {"method": run.method, "scenario": run.scenario, "condition": run.condition}
    }
    found |= told_by(folder / "run" / "ledger.sqlite3") | _circumstances()
    _replace(folder / report.REPORT, json.dumps(found, indent=1) + "\n")


def _options(run: Run, experiment: Experiment, folder: Path) -> Options:
    steps, sessions, many = experiment.steps, experiment.sessions, len(experiment.cast(run))
    if run.condition == TOLD:
        steps, sessions, many = 0, 0, 1
    return Options(
        out=folder,
        method=run.method,
        user=run.scenario,
        seed=run.seed,
        steps=steps * many,
        sessions=sessions * many,
        eval_prompts=experiment.questions,
        config=experiment.config,
    )


@asynccontextmanager
async def _stage(
    run: Run, experiment: Experiment, around: Surroundings, folder: Path
) -> AsyncGenerator[tuple[Cast, Callable[[], Any]]]:
    """Whoever takes part, from the moment that the server answers."""
    scenarios = experiment.cast(run)
    async with AsyncExitStack() as stack:
        flags = [f"--config={experiment.config}", f"--method={run.method}", f"--seed={run.seed}"]
        flags += [f"--data-dir={folder / 'run'}", *experiment.flags]
        if (think := _think(run, list(scenarios.values()))) is not None:
            app = create_app(run.seed, think)
            flags += [f"--judge-url={await stack.enter_async_context(in_background(app))}"]
        lies = run.condition in (FLIPPED, SHUFFLED)
        flags += GUARDS_OFF if lies else ()
        keys = _keys(scenarios, experiment.users) if around.gateway is None else {}
        passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
        admin = around.key if around.gateway is not None else keys.get("admin")
        url, watch = around.gateway, asyncio.Event().wait
        if url is None:
            users = {"TINKER_CLAW_USERS": json.dumps(_users(keys))} if keys else {}
            launch = server.Launch(folder, tuple(flags), passed | users, admin)
            child = await stack.enter_async_context(server.running(launch))
            url, watch = child.url, child.watch

        async def client(key: str | None) -> Client:
            model, most = experiment.served, experiment.max_tokens
            return await stack.enter_async_context(connected(url, key, model, most))

        first = await client(admin)
        talkers = list[tuple[Client, Speaker]]()
        for number in range(max(experiment.users, 1)):
            for label, scenario in scenarios.items():
                key = keys.get(_person(label, number), admin)
                asked = await client(key)
                if around.agent is not None:
                    asked = ThroughOpenClaw(asked, around.agent)
                talkers.append((asked, _speaker(scenario, around)))
        exam = _exam(scenarios, experiment, around, told=run.condition == TOLD)

        async def overrule() -> None:
            await to_thread(_go_on, folder / "run", (await first.health()).policy_version)

        held = overrule if lies and around.gateway is None else None
        yield Cast(first, talkers, exam, experiment.at_once, held), watch


def _think(run: Run, scenarios: Sequence[Scenario]) -> judges.Think | None:
    """A judge by rules; None: the product's own judge, or the demo's."""
    honest = judges.honest(scenarios)
    others = [hint for scenario in scenarios for hint in scenario.other_hints]
    if run.condition in (FLIPPED, SHUFFLED):
        if not others:
            raise DemoError(f"{run.scenario}: a control needs other_hints, of another rule")
        lie = judges.flipped if run.condition == FLIPPED else judges.shuffled
        return lie(honest, others)
    return honest if any(scenario.hints for scenario in scenarios) else None


def _keys(scenarios: Mapping[str, Scenario], users: int) -> dict[str, str]:
    """A key for everybody, where there are several."""
    if len(scenarios) * users == 1:
        return {}
    people = [_person(label, number) for number in range(users) for label in scenarios]
    return {name: token_hex(16) for name in ("admin", *people)}


def _users(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"name": name, "key": key, "role": "admin" if name == "admin" else "user"}
        for name, key in keys.items()
    ]


def _person(label: str, number: int) -> str:
    return f"{label}{number or ''}"


def _speaker(scenario: Scenario, around: Surroundings) -> Speaker:
    if not scenario.persona:
        return scenario.speaker()
    if around.player is None:
        raise DemoError(f"{scenario.name} is played by a model: name one with --user-url")
    return Played(scenario, around.player)


def _exam(
    scenarios: Mapping[str, Scenario], experiment: Experiment, around: Surroundings, *, told: bool
) -> Exam:
    exams = dict[str, Exam]()
    for label, scenario in scenarios.items():
        exam = scenario.exam(experiment.questions, told=told)
        if scenario.scored == "model":
            if around.scorer is None:
                raise DemoError(f"{label} is scored by a model: name one with --user-url")
            exams[label] = ScoredExam(exam, scenario, around.scorer)
        else:
            exams[label] = exam
    return exams.popitem()[1] if len(exams) == 1 else Together(exams)


@dataclass(frozen=True, slots=True)
class Together:
    """The exams of several users, as one: `accepted` is their mean."""

    exams: Mapping[str, Exam]

    def questions(self) -> list[str]:
        return [question for exam in self.exams.values() for question in exam.questions()]

    async def grade(self, replies: Sequence[str], version: int) -> Score:
        scores, at = dict[str, Score](), 0
        for label, exam in self.exams.items():
            count = len(exam.questions())
            scores[label] = await exam.grade(replies[at : at + count], version)
            at += count
        named = {name for score in scores.values() for name in score.shares}
        shares = {
            name: fmean(s.shares[name] for s in scores.values() if name in s.shares)
            for name in sorted(named)
        }
        return Score(
            accepted=fmean(score.accepted for score in scores.values()),
            shares=shares | {label: score.accepted for label, score in scores.items()},
            alike=fmean(score.alike for score in scores.values()),
            characters=fmean(score.characters for score in scores.values()),
            shown=tuple(one for score in scores.values() for one in score.shown[:2]),
        )


def _go_on(folder: Path, version: int) -> None:
    """What an owner does who wants to go on after learning was held."""
    command = [sys.executable, str(ROOT / "run.py"), "rollback", f"v{version}"]
    subprocess.run(
        [*command, f"--data-dir={folder}"], check=False, capture_output=True, timeout=300
    )


async def _saved(progress: Progress, path: Path) -> None:
    while True:
        await asyncio.sleep(SAVE_S)
        _save(progress, path)


def _save(progress: Progress, path: Path) -> None:
    _replace(path, json.dumps(progress.state()))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def _shown(progress: Progress, say: Callable[[str], None]) -> None:
    """A line for every new score."""
    shown = -1
    while True:
        await asyncio.sleep(SAVE_S)
        if len(progress.scores) == shown:
            continue
        shown = len(progress.scores)
        score = f"{progress.scores[max(progress.scores)].accepted:.2f}" if shown else "-"
        say(
            f"  {progress.seconds:5.0f} s  step {progress.version}/{progress.options.steps}  "
            f"session {progress.sessions}/{progress.options.sessions}  accepted {score}"
        )


def _circumstances() -> dict[str, Any]:
    """Under which it was measured."""
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


def told_by(ledger: Path) -> dict[str, Any]:
    """Verdicts, hints and the bill of a whole run; nothing where the ledger is elsewhere."""
    if not ledger.is_file():
        return {}
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as rows:
        verdicts = rows.execute("SELECT value, COUNT(*) FROM verdicts GROUP BY value").fetchall()
        hints = rows.execute(
            "SELECT text, COUNT(*) FROM hints GROUP BY text ORDER BY 2 DESC, 1"
        ).fetchall()
        ((usd, sampled, trained),) = rows.execute(
            "SELECT TOTAL(usd), TOTAL(sampled), TOTAL(trained) FROM spend"
        ).fetchall()
    names = {1: "+1", 0: "0", -1: "-1", None: "none"}
    return {
        "verdicts": {names[value]: count for value, count in verdicts},
        "hints": sum(count for _, count in hints),
        "hint_texts": [[text, count] for text, count in hints[:8]],
        "usd": usd,
        "tokens": {"sampled": int(sampled), "trained": int(trained)},
    }
