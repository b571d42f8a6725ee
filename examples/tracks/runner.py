"""Run episodes in groups until enough steps were trained, and exams of fixed versions.

Rule: a group is begun only when the ones before it are all being played, and while the gateway has
few samples waiting; whatever was begun is finished, also by a run that continues this one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from examples.tracks import BrokenError, TooLongError, TrackError
from examples.tracks.client import Gateway, Place, Reply
from examples.tracks.environments import Environment, Graded, Program, Task, fenced, result
from examples.tracks.episode import Episode, Seen
from examples.tracks.state import State
from examples.tracks.track import Track

LOOK_S = 0.5
"""Seconds between two checks of how many samples wait."""
SHOW_S = 5.0
"""Seconds between two lines of progress."""
_IDLE = {"held", "paused"}
"""States of the gateway in which nothing is learned; replies go on, and go on costing."""


@dataclass(slots=True)
class Run:
    """A run of a track."""

    track: Track
    environment: Environment
    gateway: Gateway
    state: State
    say: Callable[[str], None]
    seen: Seen = field(default_factory=Seen)
    playing: int = 0
    began: float = field(default_factory=time.monotonic)
    held: str | None = None
    """Gateway's reason for holding learning; None: it learns."""
    _open: deque[tuple[str, int]] = field(default_factory=deque[tuple[str, int]])
    _choosing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def train(self) -> None:
        """Run the whole track: an exam, episodes until there were enough steps, an exam."""
        self.seen.version = await self._serving()
        if self.state.fact("first version") is None:
            self.state.set_fact("first version", str(self.seen.version))
        await self.examine(self.first)
        self._open.extend(self.state.open_episodes())
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(self._show())
            async with asyncio.TaskGroup() as players:
                for _ in range(self.track.concurrency):
                    players.create_task(self._play())
            showing.cancel()
        # Samples left over at the last step may have become further steps.
        last = min(await self._serving(), self.first + self.track.steps)
        self.state.set_fact("last version", str(last))
        await self.examine(last)
        self.state.set_fact("held", self.held or "")
        if self.held is not None:
            raise TrackError(f"{self.held} Then the same command goes on.")

    @property
    def first(self) -> int:
        """Version that served when the run began."""
        return int(self.state.fact("first version") or 0)

    async def examine(self, version: int) -> None:
        """Try each held-out task once with one version, by its name. Earlier results are kept."""
        done = self.state.examined(version)
        places = asyncio.Semaphore(self.track.concurrency)

        async def one(number: int) -> None:
            task = self.environment.held_out(number)
            place = Place(f"{self.state.fact('run')}-exam-v{version}-{number}", task.name)
            async with places:
                score = await self._attempt(task, self._episode(place, version, seed=number))
            if score is not None:
                self.state.examine(version, number, score > 0)

        async with asyncio.TaskGroup() as group:
            for number in set(range(self.track.exam_tasks)) - set(done):
                group.create_task(one(number))
        if solved := self.state.examined(version):
            share = sum(solved.values()) / len(solved)
            self.say(f"v{version} solves {share:.2f} of {len(solved)} held-out tasks")

    async def _play(self) -> None:
        """Play one episode after the other."""
        while (chosen := await self._next()) is not None:
            session, number = chosen
            task = self.environment.task(number)
            place = Place(session, task.name, self._group(number), self.track.group_size)
            self.playing += 1
            score = self.state.score(session)
            if score is None:
                score = await self._attempt(task, self._episode(place))
            if score is None:
                self.say(f"{session}, task {task.name}: it broke, and has no outcome")
            else:
                self.state.end(session, score)
                if why := await self.gateway.outcome(session, score):
                    self.say(f"{session}, task {task.name}: its outcome is not trained: {why}")
            self.state.reported(session)
            self.playing -= 1

    async def _next(self) -> tuple[str, int] | None:
        """Session and task of the next episode; None: there were enough."""
        async with self._choosing:
            while not self._open:
                number = self.state.groups()
                steps = self.seen.version - self.first
                if steps >= self.track.steps or number >= self.track.groups:
                    return None
                health = await self.gateway.health()
                self.seen.version = max(self.seen.version, health.get("policy_version", 0))
                # No step would come. A key that is no admin's is only told the status.
                if _IDLE & {health.get("learner"), health.get("status")}:
                    whys = map(health.get, ("meaning", "learner_error", "spending_paused"))
                    self.held = " ".join(filter(None, whys)) or "The gateway's budget is spent."
                    return None
                if health.get("samples_waiting", 0) >= self.track.waiting:
                    await asyncio.sleep(LOOK_S)
                    continue
                group = self._group(number)
                sessions = [f"{group}-{attempt}" for attempt in range(self.track.group_size)]
                self.state.begin_group(number, sessions)
                self._open.extend((session, number) for session in sessions)
            return self._open.popleft()

    def _episode(
        self, place: Place, version: int | None = None, seed: int | None = None
    ) -> Episode:
        return Episode(self.gateway, self.state, place, self.seen, version, seed)

    async def _attempt(self, task: Task | Program, episode: Episode) -> float | None:
        """Play a task once; return the outcome, or None where it broke."""
        if isinstance(task, Program):
            return await task.play(episode)
        try:
            return 1.0 if await self._solves(task, episode) else -1.0
        except BrokenError as error:
            self.say(str(error))
            return None

    async def _solves(self, task: Task, episode: Episode) -> bool:
        """Play until the model calls no tool any more; return whether the task is then solved."""
        demonstration: Sequence[Mapping[str, Any]] = getattr(self.environment, "demonstration", ())
        tools = self.environment.tools
        messages: list[Mapping[str, Any]] = [*demonstration, *task.messages]
        async with task.attempt() as attempt:
            for turn in range(self.track.max_turns):
                try:
                    reply = await episode.reply(messages, () if demonstration else tools)
                except TooLongError:
                    if turn == 0:
                        raise
                    return False
                calls = fenced(reply.text, tools) if demonstration else reply.calls
                if not calls:
                    with self._answers(task, "its grade"):
                        return await attempt.solved(reply.text)
                messages.append(reply.message)
                for call in calls:
                    with self._answers(task, f"the tool {call['function']['name']}"):
                        returned = await result(call, attempt.call)
                    messages.append(
                        {"role": "user", "content": returned["content"]}
                        if demonstration
                        else returned
                    )
                    if episode.trains and isinstance(attempt, Graded):
                        # Before the next request: the judge is not asked about a scored reply.
                        await self.gateway.step(reply, attempt.grade(returned["content"]))
        return False

    @contextmanager
    def _answers(self, task: Task, what: str) -> Generator[None]:
        """Name what of the environment failed. Its own `TrackError` ends the run."""
        try:
            yield
        except TrackError:
            raise
        except Exception as error:
            where = f"The environment {self.track.environment}, task {task.name}"
            raise BrokenError(f"{where}: {what} failed: {error!r}.") from error

    async def _serving(self) -> int:
        """Version that serves now, according to a reply."""
        completion = self.gateway.completion([{"role": "user", "content": "Hello"}])
        place = Place(f"{self.state.fact('run')}-version", "version", turn_type="side")
        return Reply.of(await self.gateway.ask(place, "chat/completions", completion)).version

    def _group(self, task: int) -> str:
        return f"{self.state.fact('run')}-{task}"

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            self.say(self.progress())

    def progress(self) -> str:
        """Line of progress: how far, how well lately, how fast."""
        ((episodes,),) = self.state.rows("SELECT COUNT(*) FROM episodes WHERE reported")
        lately = self.state.rows(
            "SELECT AVG(score), AVG(score > 0) FROM (SELECT score FROM episodes "
            "WHERE score IS NOT NULL ORDER BY ended_at DESC LIMIT 100)"
        )
        reward, solved = lately[0]
        seconds = time.monotonic() - self.began
        return (
            f"tasks {self.state.groups()}  episodes {episodes} (+{self.playing})  "
            f"step {self.seen.version - self.first}/{self.track.steps}  "
            + ("" if reward is None else f"reward {reward:+z.2f}  solved {solved:.2f}  ")
            + f"v{self.seen.version}  {self.seen.tokens / seconds:.0f} tokens/s"
        )
