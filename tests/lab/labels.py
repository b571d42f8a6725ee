"""What our labels of real follow-ups say: shares, agreement of two readings, and the draw.

    python -m tests.lab.labels

Rule: 150 of the 600 messages were drawn before by another reader; the others are drawn here. The
labels were written by one reader, who saw no answer of a judge, and read 200 a second time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from examples.judge_check.cases import read_lines
from examples.judge_check.real import (
    USERS,
    Talks,
    fetched,
    read_talks,
)
from examples.tables import share

SEED: Final = 54
DRAWN: Final = 450
Place = tuple[str, int]
"""A conversation's id, and the place of a message in it."""


def follow_ups(talks: Talks) -> list[Place]:
    """Return the places of what users say behind a reply."""
    return [
        (key, turn)
        for key, talk in talks.items()
        for turn, (before, message) in enumerate(pairwise(talk), 1)
        if message["from"] in USERS and before["from"] not in USERS and message["value"].strip()
    ]


def draw(talks: Talks, shared: Collection[Place]) -> list[Place]:
    """Draw the messages that are labelled, beside those that another reader has drawn."""
    others = [place for place in follow_ups(talks) if place not in shared]
    return random.Random(SEED).sample(others, DRAWN)


def agreement(pairs: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return the share of labels on which two readings agree, and Cohen's kappa."""
    first, second = (Counter(side) for side in zip(*pairs, strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    chance = sum(n * second[label] for label, n in first.items()) / len(pairs) ** 2
    return same, (same - chance) / (1 - chance)


def main() -> None:
    """Print what the labels say, and whether this machine draws the same messages."""
    labels, talks = read_lines("real"), read_talks(fetched(Path("runs")))
    places = [(line["conversation"], line["turn"]) for line in labels]
    shared = {place for place, line in zip(places, labels, strict=True) if line.get("shared")}
    print("the same draw:", {*places} - shared == {*draw(talks, shared)})
    for label, count in Counter(line["label"] for line in labels).most_common():
        print(f"{label:3} {share(count, len(labels))}")
    pairs = [(line["label"], line["again"]) for line in labels if "again" in line]
    same, kappa = agreement(pairs)
    print(f"second reading: {same:.1%} equal, kappa {kappa:.2f}")


if __name__ == "__main__":
    main()
