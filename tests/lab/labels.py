"""What our labels of real follow-ups say: shares, agreement of two readings, and the draw.

    python -m tests.lab.labels

Rule: 150 of the 600 messages were drawn before by another reader; the others are drawn here. The
labels were written by one reader, who saw no answer of a judge, and read 200 a second time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from examples.judge_check.real import (
    Place,
    Talks,
    fetched,
    follow_ups,
    read_labels,
    read_talks,
    wilson,
)

SEED: Final = 54
DRAWN: Final = 450


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
    labels, talks = read_labels(), read_talks(fetched(Path("runs")))
    shared = {(one.conversation, one.turn) for one in labels if one.shared}
    drawn = {(one.conversation, one.turn) for one in labels if not one.shared}
    print("the same draw:", drawn == set(draw(talks, shared)))
    for label, count in Counter(one.label for one in labels).most_common():
        print(f"{label:3} {wilson(count, len(labels))}")
    same, kappa = agreement([(one.label, one.again) for one in labels if one.again])
    print(f"second reading: {same:.1%} equal, kappa {kappa:.2f}")


if __name__ == "__main__":
    main()
