"""Task sets and harnesses of verifiers, unmodified.

    .venv-verifiers/bin/python -m examples.tracks run configs/tracks/verifiers.toml

Runs in an environment of its own, which `make verifiers` makes: verifiers wants an older OpenAI
client than this project's tests. A rollout's client is told an address here, on which the episode
asks for it: so its headers, its patience and its answers after a kill are those of every track.

Rule: a rollout that broke has no outcome; none is made up for it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError
from verifiers.v1.utils.loaders import load_environment

from examples.tracks import TrackError
from examples.tracks.environments import options, outcome
from examples.tracks.episode import Episode
from examples.tracks.sandbox import HARMLESS
from examples.tracks.track import Track

_HELD_OUT = 5
"""Every fifth task of a set is kept from training."""
_LARGEST_BODY = 1 << 28
"""Of a request, in bytes: histories hold pictures."""


def outcome_of(trace: Any) -> float | None:
    """Rewards from 0 to 1 are outcomes from -1 to 1; None: it broke, or was not scored."""
    if trace.has_error or not any(trace.rewards.values()):
        return None
    return outcome(2 * trace.reward - 1)


class Verifiers:
    """A task set that one harness plays. A finite one is shuffled, and played over and over."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, track: Track, environment: Any) -> None:
        self.track = track
        self.environment = environment
        found = environment.taskset
        self._tasks = iter(found.shuffle(track.seed) if found.bounded else found)
        self._read: list[Any] = []
        self._calls = _Calls()
        self._open = AsyncExitStack()

    @classmethod
    def of(cls, track: Track) -> Verifiers:
        said = options(track, taskset=..., harness="null", runtime="subprocess")
        named = {name: _named(said[name], "type" if name == "runtime" else "id") for name in said}
        harness, runtime = named["harness"].get("id"), named["runtime"].get("type")
        if runtime == "subprocess" and harness != "null" and track.model not in HARMLESS:
            raise TrackError(
                f"The harness {harness} runs what {track.model} writes: say runtime = 'docker', "
                "'podman' or 'apptainer'. Without it only the shipped demo models may."
            )
        agent: dict[str, Any] = {name: named[name] for name in ("harness", "runtime")}
        agent["max_turns"] = track.max_turns
        try:
            config = {"taskset": named["taskset"], "agent": agent}
            return cls(track, load_environment(vf.SingleAgentEnvConfig.model_validate(config)))
        except (ValidationError, ValueError, ImportError, AttributeError, TypeError) as error:
            raise TrackError(f"verifiers cannot play this: {error}") from error

    async def __aenter__(self) -> Verifiers:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._calls.served())
            await opening.enter_async_context(self.environment.serving())
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *what: Any) -> None:
        await self._open.__aexit__(*what)

    def task(self, number: int) -> Rollout:
        return self._task(number, number + number // (_HELD_OUT - 1) + 1, held_out=False)

    def held_out(self, number: int) -> Rollout:
        return self._task(number, number * _HELD_OUT, held_out=True)

    def _task(self, number: int, index: int, *, held_out: bool) -> Rollout:
        """One of the set, which is read only as far as it is asked for."""
        self._read += itertools.islice(self._tasks, max(0, index + 1 - len(self._read)))
        if index < len(self._read):
            return Rollout(self, self._read[index])
        fit = [t for i, t in enumerate(self._read) if (i % _HELD_OUT == 0) == held_out]
        if not fit:
            raise TrackError("The task set has fewer than two tasks: one to train on, one to try.")
        return Rollout(self, fit[number % len(fit)])

    async def play(self, task: Any, episode: Episode) -> float | None:
        """One rollout."""
        async with self._calls.of(episode) as line:
            sampling = {"temperature": 1.0, "max_tokens": self.track.max_tokens}
            sampling |= {} if episode.seed is None else {"seed": episode.seed}
            context = vf.ModelContext(
                episode.gateway.model(episode.version),
                vf.EvalClientConfig(base_url=line.url, api_key_var="NO_KEY_IS_NEEDED"),
                vf.SamplingConfig(**sampling),
            )
            (slot,) = self.environment.slots(task)
            done = await self.environment.run_slot(slot, context)
            if line.problem is not None:
                raise line.problem
        scores = [outcome_of(trace) for trace in done.traces]
        return scores[0] if done.ok and len(scores) == 1 else None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A task."""

    of: Verifiers
    task: Any

    @property
    def name(self) -> str:
        return str(self.task.data.name or self.task.data.idx)

    async def play(self, episode: Episode) -> float | None:
        return await self.of.play(self.task, episode)


@dataclass(slots=True)
class _Line:
    """Where one rollout calls."""

    url: str
    episode: Episode
    problem: TrackError | None = None
    """What ends the run."""


class _Calls:
    """A server on this machine's own address; each rollout has a secret path on it."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._port = 0

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[None]:
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/{line}/v1/{path:.+}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def of(self, episode: Episode) -> AsyncGenerator[_Line]:
        name = secrets.token_urlsafe()
        line = self._lines[name] = _Line(f"http://127.0.0.1:{self._port}/{name}/v1", episode)
        try:
            yield line
        finally:
            del self._lines[name]

    async def _answer(self, request: web.Request) -> web.Response:
        line = self._lines.get(request.match_info["line"])
        if line is None:
            return web.Response(status=404)
        try:
            said = await line.episode.ask(request.match_info["path"], await request.json())
        except TrackError as error:
            line.problem = error
            return web.Response(status=503, text=str(error))
        headers = {"Content-Type": said.kind}
        return web.Response(status=said.status, body=said.text.encode(), headers=headers)


def _named(said: Any, name: str) -> dict[str, Any]:
    """A plugin's name, or a table as verifiers has it."""
    return dict(said) if isinstance(said, Mapping) else {name: said}
