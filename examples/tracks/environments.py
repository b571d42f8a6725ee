"""What every environment has: tasks, attempts at them, tools, and a grade in the end.

Rule: the same task, attempted with the same calls, comes to the same state. So an episode that was
killed is brought back to where it was by its calls, and nobody is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from examples.tracks import TrackError
from examples.tracks.track import Track


class Attempt(Protocol):
    """A world in which one episode acts."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool returns. What the model got wrong is told to it in words."""
        ...

    def solved(self, answer: str) -> bool:
        """Whether the task is done, now that the model has given its last reply."""
        ...


class Task(Protocol):
    """Something to do, of which any number of attempts can be made."""

    @property
    def name(self) -> str: ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """What the model is told first."""
        ...

    def attempt(self) -> AbstractAsyncContextManager[Attempt]: ...


class Environment(Protocol):
    """A set of tasks without end, and tasks that are kept from training."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    def task(self, number: int) -> Task: ...

    def held_out(self, number: int) -> Task: ...


def environment(track: Track) -> Environment:
    """The environment of a track.

    Raises:
        TrackError: there is none of this name, or it cannot run here.
    """
    from examples.tracks.terminal import Terminal
    from examples.tracks.tool_call import ToolCall

    made = {"tool-call": ToolCall, "terminal": Terminal}
    if track.environment not in made:
        known = ", ".join(made)
        raise TrackError(f"There is no environment {track.environment!r}; there are {known}.")
    return made[track.environment].of(track)


def tool(name: str, about: str, argument: str, meaning: str) -> dict[str, Any]:
    """A tool with one text as its argument, in OpenAI's form."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "description": meaning}},
                "required": [argument],
            },
        },
    }
