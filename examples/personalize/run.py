"""One run: a gateway, started or given, with its users, exams and results.

Rule: progress is saved every few seconds, so a run that was killed continues; its server continues
from its ledger, as it does for any user. Results are read from the ledger where there is one.
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
from functools import partial
from pathlib import Path
from random import Random
from secrets import token_hex
from statistics import fmean
from typing import Any

from examples.demo import DemoError, report, server
from examples.demo.client import Client, connected
from examples.demo.conduct import Cast, conduct
from examples.demo.judge import Case, Opinion, create_app
from examples.demo.options import ROOT, Options
from examples.demo.progress import Progress
from examples.demo.scoring import Exam, Score
from examples.demo.user import Speaker
from examples.personalize import judges
from examples.personalize.controls import CONTROLS, TOLD, Control, Presses
from examples.personalize.experiment import Experiment, Run
from examples.personalize.openclaw import Agent, ThroughOpenClaw
from examples.personalize.played import Model, Played, ScoredExam
from examples.personalize.scenario import Scenario
from examples.personalize.users import USERS
from tinker_claw.app.server import in_background
from tinker_claw.learner.gate import REFUSED

SAVE_S = 2.0
STATE = "progress.json"
LEDGER = Path("run") / "ledger.sqlite3"
GUARDS_OFF = (
    "--max-step-kl=0",
    "--gate=off",
)
_PASSED = ("TINKER_", "HF_", "CUDA_", "NUM_GPUS", "ACTOR_GPUS", "ROLLOUT_GPUS", "PRM_GPUS")
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
    gateway: str | None = None
    """Address of a gateway that runs already; None: each run starts one."""
    key: str | None = None
    """Admin key of that gateway."""
    agent: Agent | None = None
    """Agent between the users and that gateway; None: they ask it themselves."""


def written(out: Path, run: Run) -> dict[str, Any] | None:
    """Results of a run; None: it has not run, or was cut short."""
    path = out / run.name / report.REPORT
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if found.get("whole") else None


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
        stage = _stage(run, experiment, around, folder, lambda: progress.version)
        async with stage as (cast, watch):
            watches = (watch, lambda: _saved(progress, state), lambda: _shown(progress, around.say))
            await conduct(cast, progress, watches)
    finally:
        progress.ended = time.monotonic()
        _save(progress, state)
    found = report.contents(progress) | {
        "run": {"method": run.method, "scenario": run.scenario, "condition": run.condition}
    }
    found |= told_by(folder / LEDGER) | _circumstances()
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
    run: Run,
    experiment: Experiment,
    around: Surroundings,
    folder: Path,
    step: Callable[[], int],
) -> AsyncGenerator[tuple[Cast, Callable[[], Any]]]:
    """Set up the clients, users and server of a run, from the moment that the server answers.

    Args:
        step: how many optimizer steps were taken.
    """
    scenarios, control = experiment.cast(run), CONTROLS.get(run.condition, Control())
    async with AsyncExitStack() as stack:

        async def judge(think: judges.Think) -> str:
            return await stack.enter_async_context(in_background(create_app(run.seed, think)))

        flags = [f"--config={experiment.config}", f"--method={run.method}", f"--seed={run.seed}"]
        flags += [f"--data-dir={folder / 'run'}", *experiment.flags]
        honest, think = _judges(run, control, list(scenarios.values()), step)
        if think is not None:
            flags += [f"--judge-url={await judge(think)}"]
        flags += () if control.guarded else GUARDS_OFF
        keys = _keys(scenarios, experiment.users) if around.gateway is None else {}
        passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
        admin = around.key if around.gateway is not None else keys.get("admin")
        url, watch = around.gateway, asyncio.Event().wait
        if url is None:
            if keys:
                passed["TINKER_CLAW_USERS"] = json.dumps(_users(keys))
            if control.audited:
                second = {"url": await judge(honest), "role": "auditor", "share": control.audited}
                passed["TINKER_CLAW_JUDGE__SECOND"] = json.dumps(second)
            launch = server.Launch(folder, tuple(flags), passed, admin)
            child = await stack.enter_async_context(server.running(launch))
            url, watch = child.url, child.watch

        async def client(key: str | None, presses: float = 0.0) -> Client:
            model, most = experiment.served, experiment.max_tokens
            of = partial(Presses, share=presses) if presses else None
            return await stack.enter_async_context(connected(url, key, model, most, of))

        first = await client(admin)
        talkers = list[tuple[Client, Speaker]]()
        for number in range(max(experiment.users, 1)):
            for label, scenario in scenarios.items():
                key = keys.get(_person(label, number), admin)
                asked = await client(key, control.presses)
                if around.agent is not None:
                    asked = ThroughOpenClaw(asked, around.agent)
                instead = USERS[control.user] if control.user else None
                talkers.append((asked, instead or _speaker(scenario, around)))
        exam = _exam(scenarios, experiment, around, told=run.condition == TOLD)

        async def overrule() -> None:
            await to_thread(_go_on, folder / "run", (await first.health()).policy_version)

        held = None if control.guarded or around.gateway is not None else overrule
        yield Cast(first, talkers, exam, experiment.at_once, held), watch


def _judges(
    run: Run, control: Control, scenarios: Sequence[Scenario], step: Callable[[], int]
) -> tuple[judges.Think, judges.Think | None]:
    """Return an honest rule-based judge, and the judge that is asked; None: the product's, or the
    demo's."""
    honest = judges.honest(scenarios)
    if control.lie is None:
        own = any(s.hints or (s.later and s.later.hints) for s in scenarios)
        return honest, honest if own else None
    others = [hint for scenario in scenarios for hint in scenario.other_hints]
    if not others:
        raise DemoError(f"{run.scenario}: a control needs other_hints, of another rule")
    lie = control.lie(honest, others)

    def think(case: Case, rng: Random) -> Opinion:
        return (lie if step() >= control.lies_from else honest)(case, rng)

    return honest, think


def _keys(scenarios: Mapping[str, Scenario], users: int) -> dict[str, str]:
    """Keys by label, one per user where there are several."""
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
    """Exams of several users combined: `accepted` is their mean."""

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
    """Continue learning after a hold, as an owner would: roll back to a version."""
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
    """Replace a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def _shown(progress: Progress, say: Callable[[str], None]) -> None:
    """Print a line for every new score."""
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


def told_by(ledger: Path) -> dict[str, Any]:
    """Read a ledger's verdicts, hints, bill, and actions of gate and guard; empty where the ledger
    is elsewhere."""
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
        guard = _guard(rows)
    names = {1: "+1", 0: "0", -1: "-1", None: "none"}
    return {
        "verdicts": {names[value]: count for value, count in verdicts},
        "hints": sum(count for _, count in hints),
        "hint_texts": [[text, count] for text, count in hints[:8]],
        "usd": usd,
        "tokens": {"sampled": int(sampled), "trained": int(trained)},
        "guard": guard,
    }


def _guard(rows: sqlite3.Connection) -> dict[str, Any]:
    """Count committed steps, versions that the gate refused and steps with a warning by alarm;
    where learning is held, add the reason and the alarm."""
    ((steps, refused),) = rows.execute(
        "SELECT TOTAL(status = 'committed'), TOTAL(error LIKE ? || '%') FROM steps", (REFUSED,)
    ).fetchall()
    warned = rows.execute(
        "SELECT key, COUNT(*) FROM steps, json_each(metrics, '$.alarms') "
        "WHERE status = 'committed' GROUP BY key"
    ).fetchall()
    hold = rows.execute("SELECT key, value FROM meta WHERE key IN ('held', 'alarm')").fetchall()
    counted = {"steps": int(steps), "refused": int(refused), "warned": dict(warned)}
    return counted | dict(hold)
