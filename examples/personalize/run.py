"""One run: a gateway with its users, exams and results.

Rule: progress is saved every few seconds, so a run that was killed continues; its server continues
from its ledger, as it does for any user. Results are read from the ledger.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

from examples import ROOT, say
from examples.demo import DemoError, report, server
from examples.demo.client import connected
from examples.demo.conduct import Cast, Watch, conduct
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
from tinker_claw.ledger.database import open_read_only

SAVE_S = 2.0
STATE = "progress.json"
LEDGER = Path("run") / "ledger.sqlite3"
_PASSED = ("TINKER_", "HF_", "CUDA_", "NUM_GPUS", "ROLLOUT_GPUS")
"""Prefixes of variables by which a product reaches its service, its models and its GPUs."""


def written(out: Path, run: Run) -> dict[str, Any] | None:
    """Results of a run; None: it has not run, or was cut short."""
    path = out / run.name / report.REPORT
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if results.get("whole") else None


async def perform(run: Run, experiment: Experiment, out: Path, player: Model | None) -> None:
    """Perform a run, or the rest of it, and write its results.

    Args:
        player: model that plays users with a persona, and scores where a scenario wants that.

    Raises:
        DemoError: what went wrong.
    """
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(_options(run, experiment, folder))
    if (state := folder / STATE).is_file():
        progress.take_up(json.loads(state.read_text()))
    try:
        async with _stage(run, experiment, folder, player) as (cast, watch):
            await conduct(cast, progress, (watch, lambda: _follow(progress, state)))
    finally:
        progress.ended = time.monotonic()
        _replace(state, progress.state())
    results = report.contents(progress) | _counted(folder / LEDGER) | circumstances()
    if experiment.judged:
        rule = judges.honest([experiment.scenarios[run.scenario]])
        results |= {"by_rule": _by_rule(folder / LEDGER, rule)}
    _replace(folder / report.REPORT, results)


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
    run: Run, experiment: Experiment, folder: Path, player: Model | None
) -> AsyncGenerator[tuple[Cast, Watch]]:
    """Set up the clients, users and server of a run, from the moment that the server answers."""
    scenario = experiment.scenarios[run.scenario]
    everybody = ["admin", *(f"user-{number}" for number in range(experiment.users))]
    keys = {name: token_hex(16) for name in everybody if experiment.users > 1}
    passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
    if keys:
        roles = {"admin": "admin"}
        users = [{"name": n, "key": k, "role": roles.get(n, "user")} for n, k in keys.items()]
        passed["TINKER_CLAW_USERS"] = json.dumps(users)
    flags = [f"--config={experiment.config}", f"--method={run.method}", f"--seed={run.seed}"]
    judged, model, most = experiment.judged, experiment.settings.served_name, experiment.max_tokens
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        flags.extend(experiment.flags)
        if not judged and (think := _judge(run, scenario)) is not None:
            flags.append(f"--judge-url={await enter(in_background(create_app(run.seed, think)))}")
        launch = server.Launch(folder, tuple(flags), passed, keys.get("admin"))
        child = await enter(server.running(launch))
        clients = [
            await enter(connected(child.url, keys.get(person), model, most)) for person in everybody
        ]
        speaker = _speaker(scenario, player)
        cast = Cast(
            clients[0],
            [(client, speaker) for client in clients[1:]],
            _exam(scenario, experiment, player, with_rule=run.condition == TOLD),
            experiment.at_once,
            lambda: judged and unjudged(folder / LEDGER) >= CONCURRENCY,
        )
        yield cast, child.watch


def _judge(run: Run, scenario: Scenario) -> judges.Think | None:
    """Judge that is asked; None: the product's, or the demo's."""
    honest = judges.honest([scenario])
    if run.condition in judges.LIES:
        if not scenario.other_hints:
            raise DemoError(f"{run.scenario}: a lying judge needs other_hints, of another rule")
        return judges.LIES[run.condition](honest, scenario.other_hints)
    return honest if scenario.hints else None


def _speaker(scenario: Scenario, player: Model | None) -> Speaker:
    return Played(scenario, _named(player, scenario)) if scenario.persona else scenario.speaker()


def _exam(
    scenario: Scenario, experiment: Experiment, player: Model | None, *, with_rule: bool
) -> Exam:
    exam = scenario.exam(experiment.questions, with_rule=with_rule)
    if scenario.scored == "rule":
        return exam
    return ScoredExam(exam, scenario, _named(player, scenario))


def _named(player: Model | None, scenario: Scenario) -> Model:
    if player is None:
        raise DemoError(f"{scenario.name} needs a model that plays or scores: give --user-url")
    return player


async def _follow(progress: Progress, state: Path) -> None:
    """Save the progress every few seconds, and print a line for every new step and score."""
    printed = ""
    while True:
        scores, options = progress.scores, progress.options
        score = f"{scores[max(scores)].accepted:.2f}" if scores else "-"
        line = f"step {progress.version}/{options.steps}  {len(scores)} scores, newest {score}"
        if line != printed:
            sessions = f"session {progress.sessions}/{options.sessions}"
            say(f"  {progress.seconds:5.0f} s  {sessions}  {line}")
            printed = line
        await asyncio.sleep(SAVE_S)
        _replace(state, progress.state())


def _replace(path: Path, contents: Any) -> None:
    """Replace a JSON file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(contents, indent=1) + "\n")
    new.replace(path)


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
    names = {1: "+1", 0: "0", -1: "-1", None: "none"}
    with open_read_only(ledger) as rows:
        verdicts = rows.pairs("SELECT value, COUNT(*) FROM verdicts GROUP BY value")
        return {
            "verdicts": {names[value]: count for value, count in verdicts.items()},
            "hints": rows.one("SELECT COUNT(*) FROM hints"),
            "usd": rows.one("SELECT TOTAL(usd) FROM spend"),
        }


def unjudged(ledger: Path) -> int:
    """Return how many turns wait for the judge."""
    with open_read_only(ledger) as rows:
        return rows.one(
            "SELECT COUNT(*) FROM turns "
            "WHERE state = 'judging' AND id NOT IN (SELECT turn_id FROM verdicts)"
        )


def _by_rule(ledger: Path, rule: judges.Think) -> list[dict[str, Any]]:
    """Count verdicts and hints by what the rule says of the same words."""
    counts: Counter[tuple[int, bool, int | None, bool]] = Counter()
    with open_read_only(ledger) as rows:
        for text, value, hinted in rows.rows(
            "SELECT text, value, turn_id IN (SELECT turn_id FROM hints) "
            "FROM verdicts JOIN next_states USING (turn_id)"
        ):
            right, hint = rule(Case("user", text, text), Random(0))
            counts[right, hint is not None, value, bool(hinted)] += 1
    names = ("rule", "asks", "verdict", "hint")
    return [dict(zip(names, key, strict=True)) | {"turns": n} for key, n in counts.items()]
