"""Methods: records that say how judged samples become loss passes, and what that takes."""

from __future__ import annotations

from tinker_claw.errors import ConfigError
from tinker_claw.methods.base import (
    BINARY,
    COMBINE,
    OPD,
    Evidence,
    Method,
    Signal,
    Teaching,
    require,
    reward_of,
    step_reward,
    student_topk,
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
    "require",
    "reward_of",
    "step_reward",
    "student_topk",
]

METHODS: dict[str, Method] = {m.name: m for m in (COMBINE, BINARY, OPD, SDPO, SDFT)}
"""The registry: whoever is in it can be run, estimated, checked and explained."""


def build(name: str) -> Method:
    """The record of a method.

    Raises:
        ConfigError: there is no such method; it names those that there are.
    """
    if name not in METHODS:
        raise ConfigError(f"run.method: there is no method {name!r}; choose {', '.join(METHODS)}")
    return METHODS[name]
