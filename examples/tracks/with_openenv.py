"""OpenEnv worlds, unmodified: a server that is reset with a seed and takes actions.

    PYTHON -m examples.tracks run configs/tracks/openenv.toml

PYTHON is one that has httpx and websockets, such as that of the environment's own folder. This
speaks to the server's WebSocket, on which each connection has a world of its own: OpenEnv's client
would reconnect after a lost connection, to a world that was never reset.

Rule: a world that was lost is restarted with the same seed, and the model is not asked again.
Observations are shown as JSON, so that a text in one stays a text.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from examples.tracks import TooLongError, TrackError
from examples.tracks.client import GIVE_UP_S
from examples.tracks.environments import options, outcome, result
from examples.tracks.episode import Episode
from examples.tracks.track import Track

STEP_S = 300.0
"""Seconds without an answer after which a world is lost."""
_WORLDS = 5
"""Worlds that an episode may lose before it counts as broken."""
_PAUSE_S = 1.0
"""Seconds between two tries at a server that is full or away."""
_LARGEST = 1 << 20
"""Most tasks; held-out ones have other seeds. Seeds stay below 2 ** 31, for numpy's sake."""
_BROKEN = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})
"""Error codes of OpenEnv that are not about the action."""
_LISTING = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of schemas that only say that there are tools."""


class _Lost(Exception):
    """The world is gone."""


class _Full(_Lost):
    """The server is full."""


@dataclass(frozen=True, slots=True)
class OpenEnv:
    """Environment whose tasks are seeds."""

    address: str
    """Address of the server, without a scheme: http and ws are both used."""
    secure: bool
    reset: Mapping[str, Any]
    """Arguments of a reset, besides the seed."""
    instructions: str
    lowest: float
    highest: float
    """Sums of an episode's rewards that map to the outcomes -1 and 1."""
    first: int
    """First seed."""
    max_turns: int
    action: Mapping[str, Any]
    """JSON schema of an action."""
    lists: bool
    """Whether the world has tools (MCP) that it lists when asked; an action calls one."""

    @classmethod
    def of(cls, track: Track) -> OpenEnv:
        settings = options(track, url=..., reset={}, instructions="", lowest=0.0, highest=1.0)
        url = httpx.URL(settings["url"])
        if not settings["lowest"] < settings["highest"]:
            raise TrackError("lowest must be below highest: sums of an episode's rewards.")
        try:
            schema = httpx.get(f"{str(url).rstrip('/')}/schema", timeout=30.0, trust_env=False)
            described = schema.raise_for_status().json()["action"]
            fields = described["properties"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise TrackError(f"{url} is no server of OpenEnv that answers: {error}") from error
        action = {
            **{name: described[name] for name in described.keys() & {"$defs", "required"}},
            "type": "object",
            "properties": {n: field for n, field in fields.items() if n != "metadata"},
        }
        return cls(
            address=str(url).partition("://")[2].rstrip("/"),
            secure=url.scheme in ("https", "wss"),
            reset=settings["reset"],
            instructions=settings["instructions"],
            lowest=settings["lowest"],
            highest=settings["highest"],
            first=track.seed * _LARGEST % (1 << 30),
            max_turns=track.max_turns,
            action=action,
            lists=described.get("title") in _LISTING,
        )

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        about = "Acts in the world; what happens then is returned."
        return (_tool("act", about, self.action),)

    def task(self, number: int) -> Seed:
        return Seed(self, (self.first + number) % (1 << 30))

    def held_out(self, number: int) -> Seed:
        return Seed(self, (1 << 30) + (self.first + number) % (1 << 30))

    def outcome(self, total: float) -> float | None:
        share = (total - self.lowest) / (self.highest - self.lowest)
        return outcome(2 * share - 1)

    def reward(self, answer: Mapping[str, Any]) -> float:
        """Read the reward of an answer. Raises TrackError where it is no number."""
        reward = answer.get("reward")
        try:
            return float(reward or 0.0)
        except (TypeError, ValueError, OverflowError) as error:
            why = f"{self.address} gives the reward {str(reward)[:80]!r}, which is no number."
            raise TrackError(why) from error

    def action_in(self, text: str) -> Mapping[str, Any] | None:
        """Action in a reply without a call: JSON, or the text itself where an action is one text;
        None: there is none."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.strip("`").partition("\n")[2].strip()
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        if isinstance(action, dict):
            return action
        required = self.action.get("required", ())
        field = self.action["properties"][required[0]] if len(required) == 1 else {}
        return {required[0]: text} if text and field.get("type") == "string" else None


@dataclass(frozen=True, slots=True)
class Seed:
    """A task with its seed."""

    of: OpenEnv
    seed: int

    @property
    def name(self) -> str:
        return f"seed {self.seed}"

    async def play(self, episode: Episode) -> float | None:
        for _ in range(_WORLDS):
            world, state = await self._world()
            try:
                return self.of.outcome(await self._through(world, state, episode))
            except _Lost:
                episode.rewind()
            finally:
                await world.close()
        return None

    async def _world(self) -> tuple[_World, dict[str, Any]]:
        """Open a world and return it with its first observation; waits until there is one."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            world = None
            try:
                world = await _World.of(self.of)
                return world, await world.ask("reset", {**self.of.reset, "seed": self.seed})
            except _Full:  # others play, for as long as they like
                deadline = time.monotonic() + GIVE_UP_S
            except _Lost as error:
                if time.monotonic() > deadline:
                    why = f"{self.of.address} has no world for us any more: {error}"
                    raise TrackError(why) from error
            except ValueError as error:
                raise TrackError(f"{self.of.address} takes no reset: {error}") from error
            if world is not None:
                await world.close()
            await asyncio.sleep(_PAUSE_S)

    async def _through(self, world: _World, state: dict[str, Any], episode: Episode) -> float:
        """Play to the world's end, or to the last turn; return the sum of its rewards."""
        tools = self.of.tools
        if self.of.lists:
            try:
                listed = (await world.ask("step", {"type": "list_tools"}))["observation"]["tools"]
                tools = [_tool(t["name"], t["description"], t["input_schema"]) for t in listed]
            except (ValueError, KeyError, TypeError) as error:
                raise TrackError(f"{self.of.address} lists no tools: {error}") from error
        first = "\n\n".join(filter(None, (self.of.instructions, _shown(state))))
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": first}]
        total = 0.0

        async def act(name: str, arguments: Mapping[str, Any]) -> str:
            nonlocal state, total
            if self.of.lists:
                arguments = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            elif name != "act":
                return f"error: there is no tool {name}, but act"
            if state.get("done"):
                return "error: it is over"
            try:
                state = await world.ask("step", arguments)
            except ValueError as error:
                return f"error: {error}"
            total += self.of.reward(state)
            return _shown(state)

        for turn in range(self.of.max_turns):
            if state.get("done"):
                break
            try:
                reply = await episode.reply(messages, tools)
            except TooLongError:
                if turn == 0:
                    raise
                break
            messages.append(reply.message)
            for call in reply.calls:
                messages.append(await result(call, act))
            if not reply.calls:
                action = None if self.of.lists else self.of.action_in(reply.text)
                answer = "error: an action is a call of a tool"
                if action is not None:
                    answer = await act("act", action)
                messages.append({"role": "user", "content": answer})
        return total


class _World:
    """A connection to a world, with one request at a time."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.close = connection.close

    @classmethod
    async def of(cls, of: OpenEnv) -> _World:
        url = f"{'wss' if of.secure else 'ws'}://{of.address}/ws"
        try:
            return cls(await connect(url, max_size=None, proxy=None))
        except (OSError, WebSocketException) as error:
            raise _Lost(str(error)) from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            ValueError: the world does not take this.
            _Lost: the world is gone.
        """
        try:
            with suppress(WebSocketException):  # a server that is full says so, and closes
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            frame = json.loads(await asyncio.wait_for(self._connection.recv(), STEP_S))
            answer, what = dict(frame["data"]), frame["type"]
        except (WebSocketException, OSError, ValueError, KeyError, TypeError) as error:
            raise _Lost(str(error) or type(error).__name__) from error
        if what != "error":
            return answer
        if answer.get("code") == "CAPACITY_REACHED":
            raise _Full
        if answer.get("code") in _BROKEN:
            raise _Lost(str(answer.get("message")))
        raise ValueError(_problem(answer))


def _tool(name: str, about: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def _shown(answer: Mapping[str, Any]) -> str:
    """Observation as text, without fields that are for machines only."""
    seen = {n: value for n, value in answer.get("observation", {}).items() if n != "metadata"}
    seen |= {"done": True} if answer.get("done") else {}
    return json.dumps(seen, ensure_ascii=False)


def _problem(answer: Mapping[str, Any]) -> str:
    """Describe the error of an action, in a line."""
    wrong = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"
        for error in answer.get("errors") or ()
    ]
    return "; ".join(wrong) or str(answer.get("message"))
