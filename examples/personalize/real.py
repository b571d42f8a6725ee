"""`python -m examples.personalize.real`: eight users and a real small model, on a CPU.

SmolLM2-135M-Instruct serves and learns; the users want short plain answers (`--wish short`), or a
question back (`--wish asks`); their reactions are judged by rules. One run per seed, and a table.

Rule: everything goes over HTTP, as in any use. A run that was cut short goes on where it was: the
product knows its own versions, and state.json the sessions and scores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from examples.demo import DemoError, server
from examples.demo.client import MODEL, Client, Request
from examples.demo.judge import create_app
from examples.demo.options import ROOT, Options
from examples.personalize import smollm2
from examples.personalize.everyday import (
    APPROVALS,
    FIELDS,
    WISHES,
    exam,
    has_markup,
    question,
    words,
)
from tinker_claw.app.server import in_background
from tinker_claw.files import for_owner_only

MAX_TURNS: Final = 3
"""Replies in a session; then the user gives up."""
REPLY_TOKENS: Final = 96
FAREWELL_TOKENS: Final = 4
"""Of the reply to thanks, which nobody reads."""
SCORE_EVERY: Final = 4
EXAM_SEED: Final = 77
POLL_S: Final = 1.0
_STATE: Final = "state.json"


@dataclass(frozen=True, slots=True)
class Score:
    """What a version answers to the exam's 24 questions; shares from 0 to 1."""

    accepted: float
    words: float
    """Of a reply, in the mean."""
    markup: float
    """Replies with a list, a heading or bold text."""
    names: float
    """Replies that name the thing that was asked about."""
    alike: float
    """Replies that begin with the commonest three words."""


@dataclass(slots=True)
class State:
    """How far a run is."""

    sessions: int = 0
    """That ended."""
    content: int = 0
    """In which a reply pleased."""
    seconds: float = 0.0
    load: list[float] = field(default_factory=list[float])
    """Of the machine over five minutes, at each score."""
    at_sessions: dict[str, int] = field(default_factory=dict[str, int])
    """By version: sessions that had ended when it began to serve."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    replies: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @classmethod
    def read(cls, folder: Path) -> State:
        path = folder / _STATE
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()

    def write(self, folder: Path) -> None:
        draft = folder / f"{_STATE}.draft"
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(folder / _STATE)


@dataclass(frozen=True, slots=True)
class Run:
    """One seed."""

    wish: str
    method: str
    seed: int
    steps: int
    folder: Path
    settings: Path

    @property
    def milestones(self) -> tuple[int, ...]:
        """Versions that are scored."""
        return (*range(0, self.steps, SCORE_EVERY), self.steps)

    def done(self, state: State) -> bool:
        return all(str(version) in state.scores for version in self.milestones)


class Conduct:
    """A run: users, and an examiner who watches for new versions."""

    def __init__(self, run: Run, client: Client, console: Console) -> None:
        self._run = run
        self._client = client
        self._console = console
        self._state = State.read(run.folder)
        self._wish = WISHES[run.wish]
        self._numbers = count(self._state.sessions)
        self._version = 0
        self._began = time.monotonic() - self._state.seconds

    async def __call__(self) -> None:
        await self._look()
        async with asyncio.TaskGroup() as group:
            for _ in FIELDS:
                group.create_task(self._talk())
            group.create_task(self._examine())

    async def _talk(self) -> None:
        while self._version < self._run.steps:
            content = await self._session(next(self._numbers))
            self._state.sessions += 1
            self._state.content += content
            self._save()

    async def _session(self, number: int) -> bool:
        """One question, until a reply pleases or the user gives up. Whether one did."""
        rng = Random(f"{self._run.seed}-{number}")
        asked = question(number, self._run.seed)
        name = f"{asked.user}-{self._run.seed}-{number}-{os.getpid()}"
        messages = [{"role": "user", "content": asked.text}]
        for _ in range(MAX_TURNS):
            reply = await self._client.ask(
                Request(tuple(messages), name, stream=number % 2 == 1, max_tokens=REPLY_TOKENS)
            )
            pleased = self._wish.accepts(reply)
            said = rng.choice(APPROVALS if pleased else self._wish.corrections)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": said},
            ]
            if pleased:
                break
        await self._client.ask(
            Request(tuple(messages), name, last=True, max_tokens=FAREWELL_TOKENS)
        )
        return pleased

    async def _examine(self) -> None:
        while not self._run.done(self._state):
            await self._look()
            for version in self._run.milestones:
                if version <= self._version and str(version) not in self._state.scores:
                    await self._score(version)
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        health = await self._client.health()
        if health.learner in ("failed", "held"):
            raise DemoError(f"learning ended: {health.last_error or health.learner}")
        for version in range(self._version, health.policy_version + 1):
            self._state.at_sessions.setdefault(str(version), self._state.sessions)
        self._version = health.policy_version

    async def _score(self, version: int) -> None:
        slots = asyncio.Semaphore(len(FIELDS))

        async def answer(number: int, text: str) -> str:
            async with slots:
                return await self._client.ask(
                    Request(
                        messages=({"role": "user", "content": text},),
                        session=f"exam-v{version}-{number}",
                        kind="side",
                        model=f"{MODEL}@v{version}",
                        last=True,
                        seed=EXAM_SEED + number,
                        max_tokens=REPLY_TOKENS,
                    )
                )

        asked = exam()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(i, q.text)) for i, q in enumerate(asked)]
        replies = [task.result() for task in tasks]
        openings = Counter(" ".join(text.split()[:3]).lower() for text in replies)
        score = Score(
            accepted=fmean(map(self._wish.accepts, replies)),
            words=fmean(map(words, replies)),
            markup=fmean(map(has_markup, replies)),
            names=fmean(
                q.thing.split()[-1].lower() in text.lower()
                for q, text in zip(asked, replies, strict=True)
            ),
            alike=max(openings.values()) / len(replies),
        )
        self._state.scores[str(version)] = asdict(score)
        self._state.replies[str(version)] = replies
        self._state.load.append(os.getloadavg()[1])
        self._save()
        self._console.print(
            f"{self._run.wish}, seed {self._run.seed}: step {version}, "
            f"{self._state.sessions} sessions, {self._state.seconds:.0f} s: "
            f"accepted {score.accepted:.2f}, {score.words:.0f} words",
            highlight=False,
            soft_wrap=True,
        )

    def _save(self) -> None:
        self._state.seconds = time.monotonic() - self._began
        self._state.write(self._run.folder)


async def hold(run: Run, model: Path, console: Console) -> None:
    """One run, from where it is to its last step.

    Raises:
        DemoError: the product ended or stopped learning.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    async with _judge(run.seed) as judge:
        config = run.folder / "run.toml"
        added = f'[run]\nmodel_name = "{model}"\n', f'[judge]\njudge_url = "{judge}"\n'
        config.write_text(_joined(run.settings.read_text(), *added))
        options = Options(out=run.folder, method=run.method, seed=run.seed, config=config)
        try:
            async with server.running(options) as child, asyncio.TaskGroup() as group:
                watch = group.create_task(child.watch())
                await Conduct(run, child.client, console)()
                watch.cancel()
        except* DemoError as errors:
            found: Any = errors
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            raise DemoError(str(found)) from errors


@asynccontextmanager
async def _judge(seed: int) -> AsyncGenerator[str]:
    """The demo's rules, over HTTP: they read what a judge prompt holds."""
    async with in_background(create_app(seed)) as url:
        yield url


def _joined(text: str, *added: str) -> str:
    """The settings with lines put under their headings."""
    for one in added:
        heading, lines = one.split("\n", 1)
        text = text.replace(heading + "\n", f"{heading}\n{lines}", 1)
    return text


def table(runs: Sequence[Run]) -> Table:
    """A row per scored version: means over seeds, with the spread of what was accepted."""
    shown = Table(title="means over seeds, ± standard deviation", title_justify="left")
    for name in ("wish", "method", "step"):
        shown.add_column(name)
    for name in ("seeds", "sessions", "accepted", "words", "markup", "on topic", "alike"):
        shown.add_column(name, justify="right")
    for wish, method in dict.fromkeys((run.wish, run.method) for run in runs):
        alike = [run for run in runs if (run.wish, run.method) == (wish, method)]
        states = [State.read(run.folder) for run in alike]
        for version in map(str, alike[0].milestones):
            found = [state for state in states if version in state.scores]
            if not found:
                continue
            scores = [Score(**state.scores[version]) for state in found]
            sessions = fmean(state.at_sessions[version] for state in found)
            shown.add_row(
                *(wish, method, version, str(len(found)), f"{sessions:.0f}"),
                _spread([score.accepted for score in scores]),
                f"{fmean(score.words for score in scores):.0f}",
                *(
                    f"{fmean(getattr(score, name) for score in scores):.2f}"
                    for name in ("markup", "names", "alike")
                ),
            )
    return shown


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ±{stdev(values) if len(values) > 1 else 0.0:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and show all. 1: a run failed, and the end of its log is shown."""
    for_owner_only()
    asked, console = _parser().parse_args(arguments), Console()
    runs = [
        Run(
            asked.wish,
            asked.method,
            seed,
            asked.steps,
            (asked.out / f"{asked.method}-{asked.wish}-{seed}").resolve(),
            asked.config.resolve(),
        )
        for seed in range(asked.seeds)
    ]
    try:
        model = smollm2.ready(asked.cache, console.print)
        for run in runs:
            if run.done(State.read(run.folder)):
                continue
            try:
                asyncio.run(hold(run, model, console))
            except DemoError as error:
                log = run.folder / "server.log"
                console.print(f"{error}. The end of {log}:", style="red", markup=False)
                console.print(server.last_lines(log), markup=False)
                return 1
    except smollm2.NotHere as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        console.print(table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.personalize.real",
        description="SmolLM2-135M-Instruct learns what eight users want, on a CPU. What --out "
        "holds is not run again, and a run that was cut short goes on.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--wish", choices=tuple(WISHES), default="short", help="what users want (default short)")
    add("--method", default="binary", help="default binary")
    add("--seeds", type=int, default=3, help="so many runs, from 0 (default 3)")
    add("--steps", type=int, default=12, help="of each run (default 12)")
    add("--config", type=Path, default=ROOT / "configs" / "real.toml")
    add("--cache", type=Path, default=ROOT / "runs" / "models", help="where the model is kept")
    add("--out", type=Path, default=ROOT / "runs" / "real", help="results (default runs/real)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
