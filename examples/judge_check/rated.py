"""Follow-ups of public dialogues whose annotators rated how satisfied the user is.

USS: W. Sun et al., Simulating User Satisfaction for the Evaluation of Task-oriented Dialogue
Systems, arXiv 2105.03748; its files (SGD.txt, MWOZ.txt …) name no licence. AB-ReDial: C. Siro et
al., Understanding and Predicting User Satisfaction with Conversational Recommender Systems,
doi.org/10.1145/3624989; MIT. Neither is fetched.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from examples.judge_check.cases import Case
from tinker_claw.errors import ConfigError
from tinker_claw.types import NextState

NAME: Final = "rated"
DISSATISFIED: Final = 2.0
"""Highest mean rating, of 1 to 5, that is taken for a rejection of the reply before."""
_TURN: Final = ("SYSTEM", "USER", "SYSTEM", "USER")
"""Who speaks in a turn of AB-ReDial, of which the third utterance is rated."""

_Rated = tuple[str, str, str, list[float]]
"""Request, reply and follow-up, and the annotators' ratings."""


def read_cases(file: Path) -> list[Case]:
    """Return the messages that follow a reply, with a verdict by their mean rating.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        turns = _of_redial(lines) if file.suffix == ".csv" else _of_uss(lines)
        return [
            Case(
                NAME,
                number,
                request,
                reply,
                NextState("user", text),
                label=-1 if fmean(ratings) <= DISSATISFIED else 1,
            )
            for number, (request, reply, text, ratings) in enumerate(turns)
        ]
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise ConfigError(f"--rated {file}: {error!r}") from error


def _of_uss(lines: Sequence[str]) -> Iterator[_Rated]:
    """Read lines of speaker, text, action and ratings, separated by tabs; dialogues are separated
    by blank lines, and end with a rating of the whole."""
    request = reply = ""
    for line in lines:
        speaker, text, _, ratings, *_ = [*line.rstrip("\n").split("\t"), "", "", "", ""]
        if speaker == "SYSTEM":
            reply = text
        elif speaker == "USER" and text != "OVERALL":
            if reply and ratings:
                yield request, reply, text, [float(rating) for rating in ratings.split(",")]
            request, reply = text, ""
        else:
            request = reply = ""


def _of_redial(lines: Sequence[str]) -> Iterator[_Rated]:
    """Read a table of three turns a row, each of four utterances and its ratings by one annotator;
    the same turn stands in the rows of several."""
    turns = defaultdict[tuple[str, ...], list[float]](list)
    for row in csv.DictReader(lines, restval=""):  # a row may be cut off
        for turn in range(3):
            said_by = [row[f"utterance{4 * turn + n}"].partition("\t") for n in range(4)]
            speakers, _, texts = zip(*said_by, strict=True)
            if speakers == _TURN and row[f"overall{turn + 1}"]:
                turns[texts[1:]].append(float(row[f"overall{turn + 1}"]))
    for (request, reply, text), ratings in turns.items():
        yield request, reply, text, ratings
