"""Environments: tasks, attempts at them, tools, and a grade at the end.

Rule: the same task, attempted with the same calls, leads to the same state. So an episode that was
killed is restored by repeating its calls, and the model is not asked again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from examples.tracks import TrackError
from examples.tracks.episode import Episode
from examples.tracks.track import Track

_LONGEST_LINE = 300
"""Most characters of such a line."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)\n?```", re.DOTALL)
"""A fenced block."""


class Attempt(Protocol):
    """A world in which one episode acts."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result. Errors of the model are returned to it in words."""
        ...

    async def solved(self, answer: str) -> bool:
        """Return whether the task is solved, now that the model has given its last reply."""
        ...


@runtime_checkable
class Graded(Attempt, Protocol):
    """An attempt that knows whether a step was right."""

    def grade(self, returned: str) -> float:
        """Score of the call that returned this, from -1 to 1."""
        ...


class Task(Protocol):
    """A task, of which any number of attempts can be made."""

    @property
    def name(self) -> str: ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """First messages to the model."""
        ...

    def attempt(self) -> AbstractAsyncContextManager[Attempt]: ...


@runtime_checkable
class Program(Protocol):
    """A task with its own way of playing: a harness, or a world with a form of its own."""

    @property
    def name(self) -> str: ...

    async def play(self, episode: Episode) -> float | None:
        """Play once, with replies that the episode asks for; return the outcome, from -1 to 1.
        None: it broke, and has no outcome."""
        ...


class Environment(Protocol):
    """An endless set of tasks, and tasks held out from training. Its class method `of` makes it
    from a `Track`.

    One with messages `demonstration` is for a model whose format has no tools: they show the form,
    and come before each task. A reply's single fenced block is the argument of the only tool, and
    the next message of the user is what it returned.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools of tasks that are not programs."""
        ...

    def task(self, number: int) -> Task | Program: ...

    def held_out(self, number: int) -> Task | Program: ...


@asynccontextmanager
async def prepared(track: Track) -> AsyncGenerator[Environment]:
    """Open the environment of a track, with resources that attempts share, such as a browser.

    Such an environment is also a context manager.

    Raises:
        TrackError: as `environment`.
    """
    world = environment(track)
    async with AsyncExitStack() as shared:
        if isinstance(world, AbstractAsyncContextManager):
            try:
                await shared.enter_async_context(world)
            except TrackError:
                raise
            except Exception as error:
                raise TrackError(
                    f"The environment {track.environment} cannot start: {first_line(error)}"
                ) from error
        yield world


def first_line(error: Exception) -> str:
    """Return what an error of somebody else's says: its kind and first line. Where that begins a
    traceback, the last line says what happened."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    before, traced, _ = lines[0].partition("Traceback (most recent call last)")
    reason = f"{before}{lines[-1]}" if traced else lines[0]
    return f"{type(error).__name__}: {reason[:_LONGEST_LINE]}"


def environment(track: Track) -> Environment:
    """Make the environment of a track.

    Raises:
        TrackError: there is none of this name, or it cannot run here.
    """
    place = ENVIRONMENTS.get(track.environment)
    if place is None:  # only then: a scan of what is installed takes 50 ms
        added = entry_points(group="tinker_claw.environments")
        places = [entry.value for entry in added if entry.name == track.environment]
        if not places:
            available = ", ".join(dict.fromkeys([*ENVIRONMENTS, *sorted(added.names)]))
            raise TrackError(
                f"There is no environment {track.environment!r}; there are {available}."
            )
        if len(places) > 1:
            two = " and ".join(places)
            raise TrackError(f"Two packages add an environment {track.environment!r}: {two}.")
        (place,) = places
    module, _, name = place.partition(":")
    wrong = f"The environment {track.environment} ({place})"
    try:
        make = getattr(import_module(module), name).of
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise TrackError(f"{wrong} cannot be loaded: {error}.") from error
        raise TrackError(
            f"{wrong} needs {error.name}, which is not installed here. Run the same command with "
            "the Python of an environment that has it (docs/agents.md)."
        ) from error
    except AttributeError as error:
        raise TrackError(f"{wrong} cannot be loaded: {error}.") from error
    try:
        return make(track)
    except TrackError:
        raise
    except Exception as error:
        raise TrackError(f"{wrong} cannot be made: {error!r}.") from error


ENVIRONMENTS = {
    "tool-call": "examples.tracks.tool_call:ToolCall",
    "terminal": "examples.tracks.terminal:Terminal",
    "fenced": "examples.tracks.tool_call:Fenced",
    "swe": "examples.tracks.swe:Swe",
    "gui": "examples.tracks.gui:Gui",
    "screen": "examples.tracks.screen:Screens",
    "openenv": "examples.tracks.with_openenv:OpenEnv",
    "verifiers": "examples.tracks.with_verifiers:Verifiers",
}
"""Environments by name, imported only where a track asks for them: some need packages of their
own."""


def tool(name: str, about: str, **arguments: str) -> dict[str, Any]:
    """Make a tool in OpenAI's form; its arguments are strings, each with a description."""
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


async def result(
    call: Mapping[str, Any], use: Callable[[str, Mapping[str, Any]], Awaitable[str]]
) -> Mapping[str, Any]:
    """Message with the result of a model's tool call."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        returned = await use(function["name"], arguments)
    else:
        returned = "error: the arguments must be a JSON object"
    return {"role": "tool", "tool_call_id": call["id"], "content": returned}


def fenced(text: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the call of the only tool that a reply's fenced block is; several blocks are none."""
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        return ()
    (function,) = (tool["function"] for tool in tools)
    (argument,) = function["parameters"]["required"]
    call = {"name": function["name"], "arguments": json.dumps({argument: blocks[0]})}
    return ({"id": "fenced", "type": "function", "function": call},)


def outcome(score: float) -> float | None:
    """Clip a sum of rewards to an outcome within -1 and 1; None: it is not a number."""
    return None if math.isnan(score) else max(-1.0, min(1.0, score))


def options(track: Track, **usual: Any) -> dict[str, Any]:
    """Options from a track's [options], or their defaults; a `...` is required.

    Raises:
        TrackError: one is missing, or is none of these.
    """
    own = dict(track.options)
    for name in own.keys() - usual.keys():
        available = ", ".join(usual)
        raise TrackError(f"{name} is no option of {track.environment}; there are {available}.")
    for name, value in usual.items():
        if value is ... and name not in own:
            raise TrackError(f"The track does not say {name} in its [options].")
    return usual | own
