"""Plug-ins: methods, formats and sinks that installed packages add, by entry points.

A package declares one under `tinker_claw.methods`, `tinker_claw.formats` or `tinker_claw.sinks`. A
scan of all installed packages takes 50 ms, so a built-in name is never looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tinker_claw.errors import ConfigError


def added(kind: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a kind ("method", "format", "sink"), by name."""
    return {entry.name: entry for entry in entry_points(group=f"tinker_claw.{kind}s")}


def find(kind: str, name: str, built_in: Iterable[str]) -> EntryPoint:
    """Return the plug-in of a name that is not built in.

    Raises:
        ConfigError: there is none; it lists the names that there are.
    """
    found = added(kind)
    if name not in found:
        names = ", ".join([*built_in, *sorted(found)])
        raise ConfigError(f"there is no {kind} {name!r}; choose {names}")
    return found[name]


def load(entry: EntryPoint) -> Any:
    """Import the object that an entry point names.

    Raises:
        ConfigError: the import failed.
    """
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"the plug-in {entry.name} ({entry.value}) cannot be loaded: {error!r}"
        ) from error
