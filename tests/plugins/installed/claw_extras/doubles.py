"""Sums of a number with itself."""

from __future__ import annotations

from dataclasses import dataclass

from examples.tracks.tool_call import CALCULATOR, Sum
from examples.tracks.track import Track


@dataclass(frozen=True, slots=True)
class Doubles:
    """The held-out ones are negative."""

    tools = (CALCULATOR,)

    @classmethod
    def of(cls, track: Track) -> Doubles:
        return cls()

    def task(self, number: int) -> Sum:
        return Sum(f"{number} + {number}")

    def held_out(self, number: int) -> Sum:
        return Sum(f"-{number} - {number}")
