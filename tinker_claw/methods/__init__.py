"""Methods: records of how judged samples become loss passes, and of what they need."""

from __future__ import annotations

from functools import cache

from tinker_claw import plugins
from tinker_claw.errors import ConfigError
from tinker_claw.methods.base import (
    BINARY,
    COMBINE,
    OPD,
    Evidence,
    Method,
    Signal,
    Teaching,
)
from tinker_claw.methods.passes import BatchItem
from tinker_claw.methods.sdft import SDFT
from tinker_claw.methods.sdpo import SDPO

__all__ = [
    "METHODS",
    "BatchItem",
    "Evidence",
    "Method",
    "Signal",
    "Teaching",
    "build",
    "names",
]

METHODS: dict[str, Method] = {m.name: m for m in (COMBINE, BINARY, OPD, SDPO, SDFT)}
"""Built-in methods, by name."""


def build(name: str) -> Method:
    """Return the record of a method, built in or from an installed package.

    Raises:
        ConfigError: there is no such method; the message lists those that exist.
    """
    return METHODS.get(name) or _added(name)


def names() -> tuple[str, ...]:
    """Return the names of all methods, built in and from installed packages."""
    return (*METHODS, *plugins.added("method"))


@cache
def _added(name: str) -> Method:
    plugin = plugins.load(plugins.find("method", name, METHODS))
    if not isinstance(plugin, Method) or plugin.name != name:
        raise ConfigError(f"the plug-in {name} is not a Method of that name: {plugin!r:.100}")
    return plugin
