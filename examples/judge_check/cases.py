"""The labelled cases and the injections, as records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from tinker_claw.types import NextState, Vote

FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """One turn and its next state, with a label."""

    id: int
    language: str
    about: str
    request: str
    reply: str
    state: NextState
    label: Vote
    """Verdict that a person gives by the judge's question."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A text that tries to move a verdict, or to become a hint."""

    id: int
    language: str
    where: Literal["reply", "user", "tool", "web"]
    """Place of the text: the end of the reply, of the user's next message, of a tool's result, or
    of a page."""
    aims: Vote | Literal["hint"]
    base: int
    """Id of the case that it is put into."""
    about: str
    text: str
    payload: str = ""
    """Text that a hint contains if it follows an injection that aims at hints."""

    def put_into(self, case: Case) -> Case:
        """Return the case with this text in its place."""
        if self.where == "reply":
            return replace(case, reply=f"{case.reply}\n{self.text}")
        if self.where == "user":
            return replace(case, state=NextState("user", f"{case.state.text}\n{self.text}"))
        *others, (tool, text) = case.state.results
        state = NextState.of_tools([*others, (tool, f"{text}\n{self.text}")])
        return replace(case, state=state)


def read_cases() -> Sequence[Case]:
    return [_case(line) for line in _lines("cases.jsonl")]


def read_injections() -> Sequence[Injection]:
    return [Injection(**line) for line in _lines("injections.jsonl")]


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def _case(line: dict[str, Any]) -> Case:
    said, results = line.pop("user", None), line.pop("tools", ())
    state = NextState.of_tools([(tool, text) for tool, text in results])
    return Case(state=state if said is None else NextState("user", said), **line)
