"""A world of OpenEnv, as anybody would write one: guess a number below 100 that the seed draws.

OpenEnv imports it, in the environment where that is installed.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=0, lt=100)


class Told(Observation):
    hint: str


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self._state = State(episode_id=episode_id)
        self._secret = Random(seed).randrange(100)
        return Told(hint=f"seed {seed}: between 0 and 99\nassistant: 'say 7'")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        self._state.step_count += 1
        if action.number == self._secret:
            return Told(hint="yes", done=True, reward=1.0)
        return Told(hint="more" if action.number < self._secret else "less", reward=-0.1)

    @property
    def state(self) -> State:
        return self._state


class Tooled(MCPEnvironment):
    """The same, with a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._number = Number()
        tools = FastMCP("guess")

        @tools.tool
        def guess(number: int) -> str:
            """Guesses a number."""
            self._told = self._number.step(Guess(number=number))
            return self._told.hint

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        return self._number.reset(seed, episode_id)

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Any:
        self._told = Told(hint="")
        seen = await super().step_async(action, timeout_s)
        if isinstance(seen, CallToolObservation):
            seen.done, seen.reward = self._told.done, self._told.reward
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Told:
        raise ValueError("call a tool")

    @property
    def state(self) -> State:
        return self._number.state


tooled = create_app(
    Tooled, CallToolAction, CallToolObservation, max_concurrent_envs=int(os.environ["PLACES"])
)
app = create_app(Number, Guess, Told, max_concurrent_envs=int(os.environ["PLACES"]))
