"""Canaries: questions with known right replies, which `learner.gate` asks every new version.

Rule: a file is read once in a process, and an error names its place in the file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tinker_claw.config.load import read_as
from tinker_claw.config.settings import Settings
from tinker_claw.shipped import CANARIES, DEMO_CANARIES, MODELS

_Text = Annotated[str, Field(min_length=1)]


class Canary(BaseModel):
    """A conversation that begins and ends with the user, and the replies that count as correct."""

    model_config = ConfigDict(strict=True, extra="forbid")

    messages: list[_Text] = Field(min_length=1)
    replies: list[_Text] = []
    tools: dict[_Text, _Text] = {}
    """Descriptions of the tools that are offered, by name."""
    call: _Text | None = None
    """Name of the tool that must be called; None: the reply is one of `replies`."""

    @field_validator("messages")
    @classmethod
    def _ends_with_the_user(cls, messages: list[str]) -> list[str]:
        if len(messages) % 2 == 0:
            raise ValueError("the last one must be the user's, so their number is odd")
        return messages

    @model_validator(mode="after")
    def _has_one_kind_of_reply(self) -> Self:
        if bool(self.replies) == bool(self.call):
            raise ValueError("it needs either replies, or the tool to call")
        if self.call and self.call not in self.tools:
            raise ValueError(f"its call, {self.call}, is none of its tools")
        return self


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    canary: list[Canary] = []


def in_force(settings: Settings) -> tuple[Canary, ...]:
    """Canaries of the file --canaries, else those shipped for the model.

    There are none for the tracks' beginners, which have learned their tools and nothing else. Their
    tasks' outcomes measure what they must not lose.

    Raises:
        ConfigError: as `read`.
    """
    ours = {**dict.fromkeys(MODELS), "demo": DEMO_CANARIES}
    shipped = ours.get(settings.run.model_name, CANARIES)
    file = settings.training.canaries or shipped
    return read(file) if file and settings.training.gate != "off" else ()


@cache
def read(path: Path) -> tuple[Canary, ...]:
    """Read the canaries of a file without duplicates; configs/canaries.toml describes the format.

    Raises:
        ConfigError: it cannot be read, or an entry is none; names all that is wrong.
    """
    canaries = read_as(_File, "--canaries", path).canary
    return tuple(canary for at, canary in enumerate(canaries) if canary not in canaries[:at])
