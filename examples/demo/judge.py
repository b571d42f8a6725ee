"""A rule-based judge that answers the project's normal judge prompts over HTTP.

It stands in for a judge model where none runs: with the demo model, and in tests. It reads what
the prompt holds, by simple rules, and answers as a model would, so that asking, reading, voting and
hint filtering are the real ones. Rule: it never sees more than the prompt, and needs no other file
of this project: a gateway loads it by its path, also where `examples` is not installed.

    python -m examples.demo.judge --port 30010
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastapi import FastAPI


class Case(NamedTuple):
    """Subject of a judge prompt."""

    role: str
    """Author of the next state: user or tool."""
    text: str
    whole: str
    """Request, reply and next state, without the marks, which differ from prompt to prompt."""


Opinion = tuple[int, str | None]
"""A verdict, +1, 0 or -1, and a hint on what should have been done; None: no hint."""

HINTS_PLAIN = (
    "Answer in ordinary sentences, without bold, numbered steps or a final answer line.",
    "Keep the work, but leave out bold text, lists and boxes.",
    "Sound like a student and not like an AI: no headings, no lists, nothing boxed.",
    "Write the steps as casual running text with no formatting at all.",
    "Plain everyday words only, without a title, numbering or a marked final answer.",
)
"""Hints for replies that sound like an AI. The demo's model has learned to follow these."""
HINTS_AI = (
    "Use a bold heading, numbered steps and a final answer line.",
    "Structure it: a bold title, a numbered list, a boxed result.",
    "Format the reply with bold text and numbered steps.",
)
"""Hints for replies that should sound like an AI. The demo's model has learned to follow these,
too."""
HINTS_OPENING = ("Begin the reply with ok or well.", "The first word is ok or well.")
"""Hints that the model has never seen, and takes for a wish for structure: measured over 128
replies, 0.15 begin so without a hint, and 0.00 and 0.04 with one."""
_MARK = re.compile(r"\bThe mark is ([a-z]{14})$", re.MULTILINE)
"""Pattern for the mark of the fences around quoted text, before which nothing is quoted."""
_STYLE = re.compile(
    r"\b(an ai|bold|headings?|numbered|natural|naturally|plain|casual|casually|formal|robot)\b",
    re.I,
)
"""Words of a user who wants another style: asking for it means that the reply lacked it."""
_OPENING = re.compile(r"\bok or well\b", re.I)
_WANTS_STRUCTURE = re.compile(r"\b(use|want) (a )?(bold|headings)", re.I)
_BAD = re.compile(
    r"\b(no|nope|nah|not|can't|again|once more|another|redo|rewrite|retry|wrong|instead|rather"
    r"|incorrect|don't|too|fix|change)\b",
    re.I,
)
_GOOD = re.compile(
    r"\b(thanks|thank|great|perfect|nice|good|ok|okay|fine|love|yes|cool|done|works)\b", re.I
)
_FAILED = re.compile(r"\b(error|failed|not found|traceback|denied|invalid)\b", re.I)


def verdict(role: str, text: str) -> int:
    """Judge a next state: +1, 0 or -1. A correction that is polite is still a correction."""
    if role == "tool":
        return -1 if _FAILED.search(text) else 1
    if _BAD.search(text) or _STYLE.search(text):
        return -1
    return 1 if _GOOD.search(text) else 0


def hint(role: str, text: str, rng: random.Random) -> str | None:
    """Hint on what should have been done, if a correcting user said so."""
    if role != "user" or verdict(role, text) != -1:
        return None
    if _OPENING.search(text):
        return rng.choice(HINTS_OPENING)
    if _STYLE.search(text):
        return rng.choice(HINTS_AI if _WANTS_STRUCTURE.search(text) else HINTS_PLAIN)
    return f"The user wants this: {' '.join(text.split())}" if len(text.split()) > 6 else None


def opinion(case: Case, rng: random.Random) -> Opinion:
    """Judge a case by the demo's rules."""
    return verdict(case.role, case.text), hint(case.role, case.text, rng)


def case_of(messages: list[dict[str, Any]]) -> Case | None:
    """Parse a judge prompt; None: it is not one."""
    system, case = (str(messages[at].get("content")) if messages else "" for at in (0, -1))
    if not (marks := _MARK.search(system) or _MARK.search(case)):
        return None
    mark = marks[1]
    fenced = rf"<<{mark} (?:next state|message), ([^\n]*)>>\n(.*?)\n(?=<<{mark} )"
    quotes = re.findall(fenced, case, re.DOTALL)
    if not quotes:
        return None
    role = "user" if quotes[0][0] == "written by the user" else "tool"
    return Case(role, "\n".join(text for _, text in quotes), case.replace(mark, ""))


def answer(
    messages: list[dict[str, Any]],
    rng: random.Random,
    think: Callable[[Case, random.Random], Opinion] = opinion,
) -> str:
    """Answer one judge prompt. No wish is taken for a lasting one.

    Raises:
        ValueError: the messages are no judge prompt.
    """
    case = case_of(messages)
    if case is None:
        raise ValueError("this judge answers judge prompts only: no next state between its marks")
    value, advice = think(case, rng)
    if case.role != "user":
        return json.dumps({"reasoning": "Read off the results.", "rating": value})
    does = {1: "accepts", 0: "new_style" if advice else "cannot_tell", -1: "corrects"}[value]
    judgement = {"quote": "", "does": does, "hint": "", "scope": "this once"}
    if advice is not None:
        judgement |= {"quote": case.text, "hint": advice}
    return json.dumps(judgement)


def create_app(
    seed: int = 0,
    think: Callable[[Case, random.Random], Opinion] = opinion,
) -> FastAPI:
    """Make an OpenAI-compatible server with a rule-based judge behind it."""
    from fastapi import FastAPI, HTTPException  # the recipe imports this file for its hints only

    app = FastAPI(title="rule judge")
    rng = random.Random(seed)

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        try:
            votes = range(int(body.get("n") or 1))
            texts = [answer(body["messages"], rng, think) for _ in votes]
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPException(400, detail=str(error)) from error
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(texts)
        ]
        return {"object": "chat.completion", "model": body.get("model"), "choices": choices}

    return app


if __name__ == "__main__":
    import uvicorn

    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--port", type=int, default=30010, help="port on 127.0.0.1")
    uvicorn.run(create_app(), host="127.0.0.1", port=arguments.parse_args().port)
