"""Follow-ups of USS: users' messages in task-oriented dialogues, rated by three to five annotators.

W. Sun et al., Simulating User Satisfaction for the Evaluation of Task-oriented Dialogue Systems,
arXiv 2105.03748. Its files (SGD.txt, MWOZ.txt …) name no licence, so they are not fetched.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Final

from examples.judge_check.cases import Case
from tinker_claw.errors import ConfigError
from tinker_claw.types import NextState

NAME: Final = "uss"
DISSATISFIED: Final = 2.0
"""Highest mean rating, of 1 to 5, that is taken for a rejection of the reply before."""


def read_cases(file: Path) -> list[Case]:
    """Return the messages that follow a reply, with a verdict by their mean rating.

    A line holds speaker, text, action and ratings, separated by tabs; dialogues are separated by
    blank lines, and end with a rating of the whole.

    Raises:
        ConfigError: the file cannot be read.
    """
    cases, request, reply = list[Case](), "", ""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--uss {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        speaker, text, _, ratings, *_ = [*line.split("\t"), "", "", "", ""]
        if speaker == "SYSTEM":
            reply = text
        elif speaker == "USER" and text != "OVERALL":
            if reply and ratings:
                mean = fmean(int(rating) for rating in ratings.split(","))
                label = -1 if mean <= DISSATISFIED else 1
                cases.append(
                    Case(NAME, number, request, reply, NextState("user", text), label=label)
                )
            request, reply = text, ""
        else:
            request = reply = ""
    return cases
