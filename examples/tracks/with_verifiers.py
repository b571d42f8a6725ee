"""Environments of verifiers, unmodified: task sets, environments and harnesses.

    .venv-verifiers/bin/python -m examples.tracks run configs/tracks/verifiers.toml

Runs in an environment of its own, which `make verifiers` makes: verifiers wants an older OpenAI
client than this project's tests. A rollout's client gets an address here, and the episode sends its
requests: so headers, retries and answers after a kill are those of every track. An environment may
have several roles: all of them ask the gateway, and one trains.

Rule: a rollout that broke has no outcome; none is made up for it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError

from examples import say
from examples.tracks import TrackError
from examples.tracks.environments import first_line, options, outcome
from examples.tracks.episode import Episode
from examples.tracks.sandbox import HARMLESS
from examples.tracks.track import Track

_HELD_OUT = 5
"""Every fifth task of a set is held out from training."""
_LARGEST_BODY = 1 << 28
"""Largest body of a request in bytes: histories hold pictures."""


def outcome_of(trace: Any) -> float | None:
    """Map rewards from 0 to 1 to outcomes from -1 to 1; None: it broke, or was not scored."""
    if trace.has_error or not any(trace.rewards.values()):
        return None
    return outcome(2 * trace.reward - 1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Verifiers:
    """A task set that one harness plays. A finite one is shuffled, and played over and over."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, track: Track, environment: Any, trains: str) -> None:
        self.track = track
        self.environment = environment
        self._name = environment.taskset.config.name
        taskset = environment.taskset
        self._tasks = iter(taskset.shuffle(track.seed) if taskset.bounded else taskset)
        self._trains = trains
        at_once = dict(track.options).get("at_once") or cores()
        self._places = asyncio.Semaphore(at_once)
        """Rollouts that may run: each may start processes."""
        if at_once < track.concurrency:
            say(
                f"{at_once} episodes of {self._name} run at a time: at_once in [options], else one "
                "for each core of this machine."
            )
        self._read: list[Any] = []
        self._calls = _Calls(trains)
        self._open = AsyncExitStack()

    @classmethod
    def of(cls, track: Track) -> Verifiers:
        settings = options(
            track,
            taskset=...,
            env={},
            harness="null",
            runtime="subprocess",
            trains=None,
            at_once=None,
        )
        if (most := settings["at_once"]) is not None and (type(most) is not int or most < 1):
            raise TrackError(f"at_once in [options] must be a number from 1 on, not {most!r}.")
        named = {name: _named(settings[name]) for name in ("taskset", "env")}
        config = named["env"] | {"taskset": named["taskset"]}
        try:
            kind = vf.env_config_type(named["taskset"].get("id", ""), config.get("id", ""))
            roles = {
                name: field.default
                for name, field in kind.model_fields.items()
                if isinstance(field.default, vf.AgentConfig)
            }
            for name, usual in roles.items():
                config[name] = _role(usual, settings, track) | _named(config.get(name, {}))
            loaded = kind.model_validate(config)
            _check(track, loaded)
            trains = settings["trains"] or next(iter(roles))
            if trains not in roles:
                raise TrackError(f"There is no role {trains}; there are {', '.join(roles)}.")
            say(f"waiting for the task set {loaded.taskset.name}")
            return cls(track, vf.load_environment(loaded), trains)
        except (ValidationError, ValueError, ImportError, AttributeError, TypeError) as error:
            raise TrackError(f"verifiers cannot play this: {error}") from error

    async def __aenter__(self) -> Verifiers:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._calls.served())
            say(f"waiting for the tool servers of {self._name}, and of a harness for what it needs")
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
        """Return a task of the set, which is read only as far as needed."""
        try:
            self._read += itertools.islice(self._tasks, max(0, index + 1 - len(self._read)))
        except Exception as error:  # of the set's own code, which may read from anywhere
            raise TrackError(
                f"The tasks of {self._name} cannot be read: {first_line(error)}"
            ) from error
        if index < len(self._read):
            return Rollout(self, self._read[index])
        fit = [t for i, t in enumerate(self._read) if (i % _HELD_OUT == 0) == held_out]
        if not fit:
            raise TrackError("The task set has fewer than two tasks: one to train on, one to try.")
        return Rollout(self, fit[number % len(fit)])

    async def play(self, task: Any, episode: Episode) -> float | None:
        """Play one rollout."""
        async with self._places, self._calls.of(episode) as line:
            sampling = {"temperature": 1.0, "max_tokens": self.track.max_tokens}
            sampling |= {} if episode.seed is None else {"seed": episode.seed}
            context = vf.ModelContext(
                episode.gateway.model(episode.version),
                vf.EvalClientConfig(base_url=line.url, api_key_var="NO_KEY_IS_NEEDED"),
                vf.SamplingConfig(**sampling),
            )
            (slot,) = self.environment.slots(task)
            done = await self.environment.run_slot(slot, context, on_trace=line.begins)
            if line.problem is not None:
                raise line.problem
        scores = [outcome_of(trace) for trace in done.traces if trace.agent.name == self._trains]
        if len(scores) > 1:
            raise TrackError(
                f"{self._trains} plays {len(scores)} times in an episode of {self._name}; what "
                "trains plays once. Let another role train (trains in [options])."
            )
        return scores[0] if done.ok and len(scores) == 1 else None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A task, played as one rollout."""

    of: Verifiers
    task: Any

    @property
    def name(self) -> str:
        return str(self.task.data.name or self.task.data.idx)

    async def play(self, episode: Episode) -> float | None:
        return await self.of.play(self.task, episode)


@dataclass(slots=True)
class _Line:
    """Address that one rollout calls, and its episodes."""

    url: str
    episodes: dict[str, Episode]
    """Episodes by role; the first one's trains."""
    roles: dict[str, str] = field(default_factory=dict[str, str])
    """Roles by the rollout's id, which verifiers sends in every request."""
    problem: TrackError | None = None
    """Error that ends the run."""

    def begins(self, trace: Any) -> None:
        """Record the role of a rollout."""
        self.roles[trace.id] = trace.agent.name

    def asks(self, rollout: str) -> Episode:
        """Return the episode of the role that asks."""
        first = next(iter(self.episodes))
        role = self.roles.get(rollout, first)
        if role not in self.episodes:
            self.episodes[role] = self.episodes[first].beside(role)
        return self.episodes[role]


class _Calls:
    """A server on the loopback address; each rollout has a secret path on it."""

    def __init__(self, trains: str) -> None:
        self._trains = trains
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
        url = f"http://127.0.0.1:{self._port}/{name}/v1"
        line = self._lines[name] = _Line(url, {self._trains: episode})
        try:
            yield line
        finally:
            del self._lines[name]

    async def _answer(self, request: web.Request) -> web.Response:
        line = self._lines.get(request.match_info["line"])
        if line is None:
            return web.Response(status=404)
        try:
            episode = line.asks(request.headers.get("X-Session-ID", ""))
            answer = await episode.ask(request.match_info["path"], await request.json())
        except TrackError as error:
            line.problem = error
            return web.Response(status=503, text=str(error))
        headers = {"Content-Type": answer.kind}
        return web.Response(status=answer.status, body=answer.text.encode(), headers=headers)


def _named(setting: Any, name: str = "id") -> dict[str, Any]:
    """Settings from a plugin's name, or from a table as verifiers has it."""
    return dict(setting) if isinstance(setting, Mapping) else {name: setting}


def _role(usual: Any, settings: Mapping[str, Any], track: Track) -> dict[str, Any]:
    """Settings of a role that the environment leaves open."""
    role: dict[str, Any] = {"runtime": _named(settings["runtime"], "type")}
    if usual.harness is None:
        role["harness"] = _named(settings["harness"])
    if usual.max_turns is None:
        role["max_turns"] = track.max_turns
    return role


def _check(track: Track, config: Any) -> None:
    """Refuse a role that does not ask the gateway, or that would run its output on this machine."""
    for name, harness in config.agent_harnesses().items():
        role = getattr(config, name)
        if role.client is not None:
            raise TrackError(f"{name} has a client of its own; all roles ask the gateway.")
        bare = role.runtime.type == "subprocess" and harness.id != "null"
        if bare and track.model not in HARMLESS:
            raise TrackError(
                f"The harness {harness.id} runs what {track.model} writes: say runtime = 'docker', "
                "'podman' or 'apptainer'. Without it only the shipped demo models may."
            )
