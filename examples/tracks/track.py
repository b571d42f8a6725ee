"""What a track is, read from a TOML file such as configs/tracks/tool-call.toml."""

from __future__ import annotations

import os
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from examples.tracks import TrackError


@dataclass(frozen=True, slots=True)
class Track:
    """One file, with the flags that went before it."""

    environment: str
    """A name of `environments.ENVIRONMENTS`."""
    model: str = "demo"
    """The gateway's name for the model."""
    url: str = "http://127.0.0.1:30000/v1"
    key_variable: str = "TINKER_CLAW_GATEWAY__API_KEY"
    """The environment variable with the gateway's key; none is sent where it is not set."""
    concurrency: int = 32
    """Episodes at a time."""
    group_size: int = 8
    """Episodes of a task, which are compared with one another."""
    steps: int = 30
    """Policy versions that are to come; no group is begun after the last of them."""
    groups: int = 1000
    """At most."""
    waiting: int = 64
    """No group is begun while so many samples wait at the gateway for a step: they would grow too
    old. Only an admin's key is told how many wait; with another this does nothing."""
    max_turns: int = 6
    """Replies of an episode, at most. An episode that needs more has failed."""
    max_tokens: int = 256
    """Of a reply."""
    exam_tasks: int = 64
    """Held-out tasks, tried once each by the first and by the last version; 0: no exam."""
    seed: int = 0
    """Of the tasks."""
    options: tuple[tuple[str, Any], ...] = ()
    """What the table [options] tells the environment."""

    @property
    def key(self) -> str | None:
        return os.environ.get(self.key_variable) or None


def read(path: Path, **flags: Any) -> Track:
    """A track's file; flags that are not None go before it.

    Raises:
        TrackError: there is no such file, or it says something that is no setting.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrackError(f"{path} cannot be read as TOML: {error}") from error
    options = found.pop("options", {})
    found |= {name: value for name, value in flags.items() if value is not None}
    known = {field.name: field for field in fields(Track) if field.name != "options"}
    for name, value in found.items():
        if name not in known:
            raise TrackError(f"{path}: {name} is no setting; there are {', '.join(known)}.")
        wanted = int if known[name].type == "int" else str
        least = 0 if name in ("seed", "exam_tasks") else 1
        if type(value) is not wanted or (isinstance(value, int) and value < least):
            raise TrackError(f"{path}: {name} must be {_NAMED[wanted]}, not {value!r}.")
    missing = [n for n, field in known.items() if field.default is MISSING and n not in found]
    if missing:
        raise TrackError(f"{path} does not say {', '.join(missing)}.")
    return Track(**found, options=tuple(sorted(options.items())))


_NAMED = {int: "a number that is large enough", str: "a text"}
