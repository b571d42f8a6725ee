"""A screen of icons: the model is shown a screenshot and clicks on the icon that is asked for.

Rule: the place of a click is all that counts; one within `NEAR` pixels of the icon's centre, in
both directions, is right.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from examples.tracks.environments import tool
from examples.tracks.episode import Episode
from examples.tracks.track import Track

CLICK = tool(
    "click", "Clicks on the screen.", x="pixels from its left", y="pixels from its upper edge"
)
SIDE, CELL, NEAR = 96, 32, 12
CENTRES = range(CELL // 2, SIDE, CELL)
ICONS = {
    "ball": "#d03030",
    "box": "#3050d0",
    "cross": "#202020",
    "ring": "#30a040",
    "tent": "#e08020",
    "bar": "#8030b0",
    "gem": "#20a0b0",
    "pole": "#906030",
}
"""Icons, each with its colour."""
SHOWN = 4
"""Icons on a screen, all different."""
_ASIDE = 4
"""Pixels by which an icon may be beside the middle of its cell."""
_HALF = 10


@dataclass(frozen=True, slots=True)
class Screen:
    """A task: icons with their centres, and the one to click on."""

    name: str
    icons: Mapping[str, tuple[int, int]]
    target: str

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        url = f"data:image/png;base64,{base64.b64encode(self.png()).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        request = {"type": "text", "text": f"Click on the {self.target}."}
        return ({"role": "user", "content": [image, request]},)

    async def play(self, episode: Episode) -> float:
        reply = await episode.reply(self.messages, (CLICK,))
        return 1.0 if self.hit(reply.calls) else -1.0

    def hit(self, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the first call is a click on the icon."""
        try:
            function = calls[0]["function"]
            arguments = json.loads(function["arguments"])
            place = int(arguments["x"]), int(arguments["y"])
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return False
        aim = self.icons[self.target]
        near = all(
            abs(clicked - wanted) <= NEAR for clicked, wanted in zip(place, aim, strict=True)
        )
        return function["name"] == "click" and near

    def drawn(self) -> Image.Image:
        image = Image.new("RGB", (SIDE, SIDE), "#e8e8e8")
        pen = ImageDraw.Draw(image)
        for icon, (x, y) in self.icons.items():
            ink = ICONS[icon]
            left, top, right, low = x - _HALF, y - _HALF, x + _HALF, y + _HALF
            match icon:
                case "ball":
                    pen.ellipse((left, top, right, low), fill=ink)
                case "ring":
                    pen.ellipse((left, top, right, low), outline=ink, width=5)
                case "box":
                    pen.rectangle((left, top, right, low), fill=ink)
                case "bar":
                    pen.rectangle((left, y - 3, right, y + 3), fill=ink)
                case "pole":
                    pen.rectangle((x - 3, top, x + 3, low), fill=ink)
                case "tent":
                    pen.polygon([(x, top), (right, low), (left, low)], fill=ink)
                case "gem":
                    pen.polygon([(x, top), (right, y), (x, low), (left, y)], fill=ink)
                case _:
                    pen.line((left, top, right, low), fill=ink, width=5)
                    pen.line((left, low, right, top), fill=ink, width=5)
        return image

    def png(self) -> bytes:
        out = BytesIO()
        self.drawn().save(out, "PNG")
        return out.getvalue()


class Screens:
    """Environment of screens."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @classmethod
    def of(cls, track: Track) -> Screens:
        return cls(track.seed)

    def task(self, number: int) -> Screen:
        return draw(Random(f"{self._seed} train {number}"), f"screen {number}")

    def held_out(self, number: int) -> Screen:
        return draw(Random(f"{self._seed} exam {number}"), f"exam screen {number}")


def draw(rng: Random, name: str = "", count: int = SHOWN) -> Screen:
    """Draw a task: which icons, where, and which of them is asked for."""
    cells = rng.sample([*product(CENTRES, CENTRES)], count)
    names = rng.sample([*ICONS], count)
    aside = [(rng.randint(-_ASIDE, _ASIDE), rng.randint(-_ASIDE, _ASIDE)) for _ in names]
    places = [(x + right, y + down) for (x, y), (right, down) in zip(cells, aside, strict=True)]
    return Screen(name, dict(zip(names, places, strict=True)), rng.choice(names))
