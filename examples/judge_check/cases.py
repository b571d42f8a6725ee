"""The labelled cases and the injections, as records, and the order in which they are drawn.

Rule: the judge's prompts are chosen on the first third in that order, and measured on the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from tinker_claw.types import NextState, Vote

FOLDER: Final = Path(__file__).parent
SEED: Final = 2026
"""Seed of the draw."""


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
    asks: tuple[str, ...] = ()
    """What a hint for a rejection that asks for something speaks of: it contains one of these, in
    small letters. (): it asks for nothing."""


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


class _Record(Protocol):
    @property
    def id(self) -> int: ...


Record = TypeVar("Record", bound=_Record)


def drawn(records: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the third on which prompts are chosen, and the rest, in the order of the draw."""

    def place(record: Record) -> bytes:
        return hashlib.sha256(
            f"{SEED} {type(record).__name__.lower()} {record.id}".encode()
        ).digest()

    order = sorted(records, key=place)
    return order[: len(order) // 3], order[len(order) // 3 :]


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def _case(line: dict[str, Any]) -> Case:
    said, results = line.pop("user", None), line.pop("tools", ())
    line["asks"] = tuple(line.get("asks", ()))
    state = NextState.of_tools([(tool, text) for tool, text in results])
    return Case(state=state if said is None else NextState("user", said), **line)
