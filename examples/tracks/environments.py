"""What every environment has: tasks, attempts at them, tools, and a grade in the end.

Rule: the same task, attempted with the same calls, comes to the same state. So an episode that was
killed is brought back to where it was by its calls, and nobody is asked again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from examples.tracks import TrackError
from examples.tracks.track import Track


class Attempt(Protocol):
    """A world in which one episode acts."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool returns. What the model got wrong is told to it in words."""
        ...

    async def solved(self, answer: str) -> bool:
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


@asynccontextmanager
async def prepared(track: Track) -> AsyncGenerator[Environment]:
    """The environment of a track, with what its attempts share, such as a browser: such an
    environment is a context manager besides.

    Raises:
        TrackError: as `environment`.
    """
    made = environment(track)
    async with AsyncExitStack() as shared:
        if isinstance(made, AbstractAsyncContextManager):
            await shared.enter_async_context(made)
        yield made


def environment(track: Track) -> Environment:
    """The environment of a track.

    Raises:
        TrackError: there is none of this name, or it cannot run here.
    """
    from examples.tracks.swe import Swe
    from examples.tracks.terminal import Terminal
    from examples.tracks.tool_call import ToolCall

    made: dict[str, Callable[[Track], Environment]] = {
        "tool-call": ToolCall.of,
        "terminal": Terminal.of,
        "swe": Swe.of,
        "gui": _gui,
    }
    if track.environment not in made:
        known = ", ".join(made)
        raise TrackError(f"There is no environment {track.environment!r}; there are {known}.")
    return made[track.environment](track)


def _gui(track: Track) -> Environment:
    try:
        from examples.tracks.gui import Gui
    except ModuleNotFoundError as error:
        raise TrackError(
            "The gui track drives a browser with playwright: pip install -e '.[gui]'"
        ) from error
    return Gui.of(track)


def tool(name: str, about: str, **arguments: str) -> dict[str, Any]:
    """A tool whose arguments are texts, each with its meaning, in OpenAI's form."""
    meanings = {
        argument: {"type": "string", "description": meaning}
        for argument, meaning in arguments.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": meanings, "required": [*arguments]},
        },
    }
