"""Error rates of the rule that decides whether a lesson is told, by simulated users.

    python -m benchmarks.lesson_trials --users 200

A session's first reply is accepted with one probability where the lesson is told and with another
where it is not. Every session asks the product's own rule. Printed are the shares of users whose
lesson was told or dropped by then, and the median number of sessions until one of these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from statistics import median

from tinker_claw.conversation.lessons import is_probe, settle
from tinker_claw.ledger.lessons import Evidence, Lesson, State

CASES = ((0.9, 0.2), (0.9, 0.5), (0.7, 0.5), (0.9, 0.9), (0.5, 0.5), (0.2, 0.2), (0.3, 0.5))
"""Probability of acceptance, told and untold."""
SESSIONS = 96
LOOKS = (24, SESSIONS)
BEFORE = 8
"""Sessions before the lesson was known."""


def trial(told: float, untold: float, rng: Random) -> tuple[State, int]:
    """Return what became of one lesson, and after how many sessions."""
    lesson = Lesson(rng.randrange(10**6), "u", "", "", "", 1, State.TRIED, False, None, None, 0, 0)
    before = tuple(rng.random() < untold for _ in range(BEFORE))
    replies = list[tuple[bool, bool, float]]()
    for number in range(SESSIONS):
        ruled = settle(lesson, Evidence(tuple(reversed(replies)), before, ()))
        if ruled is not None:
            return ruled[0], number
        tells = not is_probe(lesson.id, number, lesson.state)
        replies.append((tells, rng.random() < (told if tells else untold), float(number)))
    return lesson.state, SESSIONS


def table(users: int) -> Iterator[str]:
    """Yield the lines of the table."""
    looks = " | ".join(f"told by {n} | dropped by {n}" for n in LOOKS)
    yield f"| accepted told | untold | {looks} | sessions until decided, median |"
    yield "|---" * (3 + 2 * len(LOOKS)) + "|"
    for told, untold in CASES:
        rng = Random(f"{told} {untold}")
        found = [trial(told, untold, rng) for _ in range(users)]
        shares = [
            f"{sum(ended is state and n <= by for ended, n in found) / users:.2f}"
            for by in LOOKS
            for state in (State.TOLD, State.DROPPED)
        ]
        ended = [n for state, n in found if state is not State.TRIED]
        middle = f"{median(ended):.0f}" if ended else "-"
        yield f"| {told} | {untold} | {' | '.join(shares)} | {middle} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=200)
    for line in table(parser.parse_args().users):
        print(line)
