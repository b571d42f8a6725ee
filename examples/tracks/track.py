"""Tracks: settings read from a TOML file such as configs/tracks/tool-call.toml."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from examples.tracks import TrackError


@dataclass(frozen=True, slots=True)
class Track:
    """Settings of a track: a file, with the flags that override it."""

    environment: str
    """Name of the environment, from `environments.ENVIRONMENTS`."""
    model: str = "demo"
    """The gateway's name for the model."""
    url: str = "http://127.0.0.1:30000/v1"
    key_variable: str = "TINKER_CLAW_GATEWAY__API_KEY"
    """Environment variable with the gateway's key; if it is not set, no key is sent."""
    concurrency: int = 32
    """Episodes at the same time."""
    group_size: int = 8
    """Episodes per task, which are compared with one another."""
    steps: int = 30
    """Policy versions to train; no group is begun after the last of them."""
    groups: int = 1000
    """Most groups."""
    waiting: int = 64
    """Samples waiting at the gateway above which no group is begun: they would grow too old. Only
    an admin's key is told how many wait; with another this has no effect."""
    max_turns: int = 6
    """Most replies of an episode. An episode that needs more, or a longer context than the model
    has, has failed."""
    max_tokens: int = 256
    """Most tokens of a reply."""
    exam_tasks: int = 64
    """Held-out tasks, each tried once by the first and by the last version; 0: no exam."""
    seed: int = 0
    """Seed of the tasks."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options for the environment, from the table [options]."""

    @property
    def key(self) -> str | None:
        return os.environ.get(self.key_variable) or None


def read(path: Path, **flags: Any) -> Track:
    """Read a track's file; flags that are not None override it.

    Raises:
        TrackError: there is no such file, or it says something that is no setting.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise TrackError(f"{path} cannot be read as TOML: {error}") from error
    options = settings.pop("options", {})
    settings |= {name: value for name, value in flags.items() if value is not None}
    attributes = {field.name: field for field in fields(Track) if field.name != "options"}
    for name, value in settings.items():
        if name not in attributes:
            raise TrackError(f"{path}: {name} is no setting; there are {', '.join(attributes)}.")
        wanted = int if attributes[name].type == "int" else str
        least = 0 if name in ("seed", "exam_tasks") else 1
        if type(value) is not wanted or (isinstance(value, int) and value < least):
            raise TrackError(f"{path}: {name} must be {_NAMED[wanted]}, not {value!r}.")
    if "url" in settings and not _ADDRESS.match(settings["url"]):
        raise TrackError(
            f"{path}: url must begin with http:// or https://, not {settings['url']!r}."
        )
    missing = [
        n for n, field in attributes.items() if field.default is MISSING and n not in settings
    ]
    if missing:
        raise TrackError(f"{path} does not say {', '.join(missing)}.")
    return Track(**settings, options=tuple(sorted(options.items())))


_ADDRESS = re.compile(r"https?://[^\s/]")
_NAMED = {int: "a number that is large enough", str: "a text"}
