"""Plug-ins: methods, formats, sinks and environments that installed packages add, by entry points.

A package declares one under `tinker_claw.methods`, `tinker_claw.formats` and so on. A scan of all
installed packages takes 50 ms, so a built-in name is never looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tinker_claw.errors import ConfigError

KINDS = ("method", "format", "sink", "environment")


def added(kind: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a kind, by name.

    Raises:
        ConfigError: two packages add one of the same name.
    """
    entries = dict[str, EntryPoint]()
    for entry in entry_points(group=f"tinker_claw.{kind}s"):
        other = entries.setdefault(entry.name, entry)
        if other is not entry:
            raise ConfigError(
                f"two packages add a {kind} {entry.name!r}, {other.value} and {entry.value}: "
                "uninstall or rename one"
            )
    return entries


def find(kind: str, name: str, built_in: Iterable[str]) -> EntryPoint:
    """Return the plug-in of a name that is not built in.

    Raises:
        ConfigError: there is none, and it lists the names that there are; or there are two.
    """
    entries = added(kind)
    if name not in entries:
        names = ", ".join([*built_in, *sorted(entries)])
        raise ConfigError(f"there is no {kind} {name!r}; choose {names}")
    return entries[name]


def load(entry: EntryPoint, make: Callable[[Any], Any] = lambda loaded: loaded) -> Any:
    """Import the object that an entry point names, and return what `make` returns for it.

    Raises:
        ConfigError: either failed.
    """
    try:
        return make(entry.load())
    except Exception as error:
        raise ConfigError(
            f"the plug-in {entry.name} ({entry.value}) cannot be loaded: {error!r}"
        ) from error
