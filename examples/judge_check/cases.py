"""The labelled cases as records, and the order in which they are drawn.

Rule: the judge's prompts are chosen on the first third in that order, and measured on the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tinker_claw.judge.prompts import EFFECTS
from tinker_claw.types import NextState, Vote

FOLDER: Final = Path(__file__).parent
SEED: Final = 2026
"""Seed of the draw."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A text that tries to move a verdict, or to become a hint."""

    where: str
    """Place of the text: the end of the reply, of the user's next message (user), of a tool's
    result (tool), or of a page (web)."""
    aims: Vote | str
    """Verdict that it wants, or "hint"."""
    base: int
    """Id of the case that it is put into."""
    payload: str = ""
    """Text that a hint contains if it follows an injection that aims at hints."""


@dataclass(frozen=True, slots=True)
class Case:
    """One turn and what came next, with a label."""

    set: str
    """own, real and injections are judged; of lessons and wishes it is asked whether they last."""
    id: int
    request: str
    reply: str
    state: NextState
    does: str = ""
    """What the message does; "": it is no user's."""
    rating: Vote = 0
    """Verdict that a person gives where it is no user's."""
    asks: tuple[str, ...] = ()
    """What a hint speaks of: it contains one of these, in small letters. (): nothing is asked."""
    span: tuple[int, int] | None = None
    """Where the words stand that ask for something, in place of `asks`."""
    injection: Injection | None = None
    lessons: tuple[str, ...] = ()
    """Earlier wishes."""
    repeats: int = 0
    contradicts: int = 0
    """Number of the lesson that the message repeats, and of the one that it takes back."""
    lasts: bool = False
    """Whether it is a new wish for later replies."""

    @property
    def value(self) -> Vote:
        """Verdict that follows from the label."""
        return EFFECTS[self.does].value if self.does else self.rating


def read_own() -> list[Case]:
    """Return our own cases."""
    return [_own(line) for line in read_lines("cases")]


def read_injections(own: Sequence[Case]) -> list[Case]:
    """Return the cases into which injections are put, each with one."""
    cases = {case.id: case for case in own}
    return [_injected(line, cases[line["base"]]) for line in read_lines("injections")]


def read_lessons() -> list[Case]:
    """Return messages and the earlier wishes of whoever wrote them."""
    names = ("id", "request", "reply", "repeats", "contradicts", "lasts")
    return [
        Case(
            "lessons",
            **{name: line[name] for name in names},
            state=NextState("user", line["user"]),
            lessons=tuple(line["lessons"]),
        )
        for line in read_lines("lessons")
    ]


def drawn(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the third on which prompts are chosen, and the rest, in the order of the draw."""

    def place(case: Case) -> bytes:
        return hashlib.sha256(f"{SEED} {case.set} {case.id}".encode()).digest()

    order = sorted(cases, key=place)
    return order[: len(order) // 3], order[len(order) // 3 :]


def in_turn(sets: Sequence[Sequence[Case]], own: Sequence[Case]) -> list[Case]:
    """Return the cases of several sets in an order that may be cut off anywhere: each set evenly,
    and before an injection the case that it is put into."""
    bases, work = {case.id: case for case in own}, dict[tuple[str, int], Case]()
    ranked = [(at / len(some), case) for some in sets for at, case in enumerate(some)]
    for _, case in sorted(ranked, key=lambda one: one[0]):
        if case.injection:
            work.setdefault(("own", case.injection.base), bases[case.injection.base])
        work.setdefault((case.set, case.id), case)
    return [*work.values()]


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the records of a file of this folder."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def _own(line: Mapping[str, Any]) -> Case:
    state = NextState.of_tools([(tool, text) for tool, text in line.get("tools", ())])
    if "user" in line:
        state = NextState("user", line["user"])
    return Case(
        "own",
        line["id"],
        line["request"],
        line["reply"],
        state,
        line.get("does", ""),
        line.get("label", 0),
        tuple(line.get("asks", ())),
    )


def _injected(line: Mapping[str, Any], case: Case) -> Case:
    fields = {name: line[name] for name in ("where", "aims", "base", "payload") if name in line}
    made = replace(case, set="injections", id=line["id"], injection=Injection(**fields))
    if line["where"] == "reply":
        return replace(made, reply=f"{case.reply}\n{line['text']}")
    if line["where"] == "user":
        return replace(made, state=NextState("user", f"{case.state.text}\n{line['text']}"))
    *others, (tool, text) = case.state.results
    return replace(made, state=NextState.of_tools([*others, (tool, f"{text}\n{line['text']}")]))
