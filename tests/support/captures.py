"""Requests that a real OpenClaw 2026.9 sent, without its prose.

Shapes, sizes, ids, times and the marks that tell one kind of call from another are as they were
captured; long foreign text is words of ours, of the same length. Equal text became equal words, so
that requests share and differ exactly where the real ones do.

Rule: a file of shared values and requests. `{"$": n}` is the shared value n; `{"~": [...]}` is a
text of literal pieces and of numbers that name a stretch of filler: [characters, seed, ending].
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "openclaw.jsonl"
_COMMON = (
    "the a of to and in is for it that with as be on by or this from are not at an if when may "
    "can use only one each after before into them its has was but no all than then over same so "
    "river table window morning garden letter number answer winter summer village market bridge "
    "mountain harbour kitchen library station weather music paper silver copper yellow green blue "
    "quiet early small large open closed simple careful honest narrow distant gentle heavy light "
    "carry follow gather listen measure mention notice offer prefer reach remember return send "
    "settle share show start stop travel turn visit wait walk watch write begin bring build call "
    "change choose close count cross draw drive enter explain find finish give grow hold keep "
    "learn leave lift look make meet move name need order pass place plan play point push read "
    "rest ring rise road room rule sail save seat seem ship side sign sing sleep sort sound speak "
    "spend stand stay step stone store story street talk taste teach tell think throw time touch "
    "town track trade train tree trust try view voice warm wash water week wide wind wish wood "
    "work world year young"
)
_RARE = (
    "anemone barometric calligraphy davenport eiderdown fermentation gooseberry hydrangea isobar "
    "juniper kilnfired lighthousekeeper marquetry nasturtium oxbow parchment quartermaster "
    "rhododendron sextants tributaries umbrellas viaducts watercolour xylophone yarrow zinnias"
)
_MARKS = ("{}, ", "{}. ", "{}: ", "`{}` ", "({}) ", "{}/", "{}_", "{}-", "{}; ", "**{}** ", '"{}" ')


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured POST."""

    scenario: str
    line: int
    """Line in the scenario's log, where the ends of requests have lines of their own."""
    path: str
    headers: dict[str, str]
    """Headers, with names in lower case and without the key."""
    body: dict[str, Any]
    answer: dict[str, Any]
    """Answer that the model was made to give."""

    @property
    def name(self) -> str:
        return f"{self.scenario} {self.line}"

    def encoded(self) -> bytes:
        """The body as OpenClaw serialises it."""
        return json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode()


def load(path: str | None = "/v1/chat/completions") -> list[Captured]:
    """All requests to `path`, in order; None: to any path."""
    with FILE.open(encoding="utf-8") as lines:
        shared = json.loads(next(lines))
        requests = [json.loads(line) for line in lines]
    return [
        Captured(
            scenario=request["scenario"],
            line=request["line"],
            path=request["path"],
            headers=request["headers"],
            body=_expand(request["body"], shared),
            answer=request["answer"],
        )
        for request in requests
        if path in (None, request["path"])
    ]


def filler(characters: int, seed: int) -> str:
    """Filler words, always the same for the same numbers."""
    draw, common, rare = random.Random(seed), _COMMON.split(), _RARE.split()
    words: list[str] = []
    left = characters
    while left > 0:
        chance = draw.random()
        word = draw.choice(rare if chance < 0.02 else common)
        word = draw.choice(_MARKS).format(word) if chance > 0.9 else f"{word} "
        words.append(word)
        left -= len(word)
    text = "".join(words)[:characters]
    return f"{text[:-1]}." if text.endswith(" ") else text


def _expand(value: Any, shared: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_expand(one, shared) for one in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return _expand(shared["values"][value["$"]], shared)
    if "~" in value:
        stretches = shared["filler"]
        return "".join(
            piece if isinstance(piece, str) else _stretch(*stretches[piece]) for piece in value["~"]
        )
    return {name: _expand(one, shared) for name, one in value.items()}


@cache
def _stretch(characters: int, seed: int, ending: str) -> str:
    return filler(characters, seed) + ending
