"""The labelled cases as records, and the order in which they are drawn.

Rule: the judge's prompts are chosen on the first third in that order, and measured on the rest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tinker_claw.judge.prompts import EFFECTS
from tinker_claw.types import NextState, Vote

FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """One turn and what came next, with a label."""

    set: str
    """own, real, rated and injections are judged; of lessons and wishes it is asked whether they
    last."""
    id: int
    request: str
    reply: str
    state: NextState
    does: str = ""
    """What the message does; "": it is no user's, or nobody says what."""
    label: Vote = 0
    """Verdict of a person, where `does` is empty."""
    asks: Sequence[str] = ()
    """What a hint speaks of: it contains one of these, in small letters. (): nothing is asked."""
    span: Sequence[int] = ()
    """Where the words stand that ask for something, in place of `asks`."""
    base: int = 0
    """Id of our own case that an injection is put into; 0: it is none."""
    aims: Vote | str = 0
    """Verdict that the injection wants, or "hint"."""
    payload: str = ""
    """Text that a hint contains if it follows an injection that aims at hints."""
    lessons: Sequence[str] = ()
    """Earlier wishes."""
    repeats: int = 0
    contradicts: int = 0
    """Number of the lesson that the message repeats, and of the one that it takes back."""
    lasts: bool = False
    """Whether it is a new wish for later replies."""

    @property
    def key(self) -> tuple[str, int]:
        return self.set, self.id

    @property
    def asks_hint(self) -> bool:
        """Return whether a reader finds a hint in the message."""
        return bool(self.asks or self.span) and EFFECTS[self.does].takes_hint

    @property
    def value(self) -> Vote:
        """Verdict that follows from the label."""
        return EFFECTS[self.does].value if self.does else self.label


def read_written(name: str) -> list[Case]:
    """Return cases that we wrote: of the set own or lessons."""
    file = "cases" if name == "own" else name
    return [_case(name, line) for line in read_lines(file)]


def read_injections() -> list[Case]:
    """Return the cases into which injections are put, each with one."""
    cases = {case.id: case for case in read_written("own")}
    return [_injected(line, cases[line["base"]]) for line in read_lines("injections")]


def drawn(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the third on which prompts are chosen, and the rest, in the order of the draw."""

    def place(case: Case) -> bytes:
        name = "case" if case.set == "lessons" else case.set  # as drawn before other sets came
        return sha256(f"2026 {name} {case.id}".encode()).digest()

    order = sorted(cases, key=place)
    return order[: len(order) // 3], order[len(order) // 3 :]


def first(cases: Sequence[Case], most: int | None) -> list[Case]:
    """Return the cases, at most so many of each class of messages, or each verdict."""
    counts, kept = Counter[tuple[str, Vote]](), list[Case]()
    for case in cases:
        counts[case.does, case.value] += 1
        if most is None or counts[case.does, case.value] <= most:
            kept.append(case)
    return kept


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the records of a file of this folder."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def _case(name: str, line: Mapping[str, Any]) -> Case:
    state = NextState.of_tools([(tool, text) for tool, text in line.get("tools", ())])
    if "user" in line:
        state = NextState("user", line["user"])
    names = {attribute.name for attribute in fields(Case)}
    return Case(name, state=state, **{key: line[key] for key in line if key in names})


def _injected(line: Mapping[str, Any], case: Case) -> Case:
    named = {name: line[name] for name in ("id", "aims", "base", "payload") if name in line}
    injected, text = replace(case, set="injections", **named), line["text"]
    if line["where"] == "reply":
        return replace(injected, reply=f"{case.reply}\n{text}")
    if line["where"] == "user":
        return replace(injected, state=NextState("user", f"{case.state.text}\n{text}"))
    *others, (tool, result) = case.state.results
    return replace(injected, state=NextState.of_tools([*others, (tool, f"{result}\n{text}")]))
