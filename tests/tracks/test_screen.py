"""The track of screenshots: what is drawn, which click counts, and the beginner that sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from examples.demo.recipe.screen import (
    CALL,
    Encoder,
    Hints,
    cell_json,
    draw_loss,
    new_model,
    prompt,
    screen_losses,
)
from examples.demo.recipe.train import Stage, train
from examples.tracks.screen import CENTRES, CLICK, ICONS, NEAR, SHOWN, SIDE, Screen, Screens, draw
from tests.support.chats import parse_chat
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODELS, verify

MODEL = MODELS["demo-screen"]


def click(x: Any, y: Any, name: str = "click") -> Mapping[str, Any]:
    arguments = json.dumps({"x": x, "y": y})
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}


def inks(image: Image.Image) -> set[Any]:
    return {colour for _, colour in image.getcolors() or ()}


def test_icons_are_drawn_where_the_task_says() -> None:
    for number in range(20):
        screen = draw(Random(number))
        assert len(screen.icons) == SHOWN
        image = screen.drawn()
        assert image.size == (SIDE, SIDE)
        assert len(inks(image)) == SHOWN + 1
        for icon, (x, y) in screen.icons.items():
            around = image.crop((x - 10, y - 10, x + 11, y + 11))
            assert tuple(bytes.fromhex(ICONS[icon][1:])) in inks(around)


def test_a_click_near_the_asked_icon_counts_and_nothing_else() -> None:
    screen = Screens(0).task(0)
    x, y = screen.icons[screen.target]
    assert screen.hit([click(str(x), str(y))])
    assert screen.hit([click(x - NEAR, y + NEAR)])
    assert not screen.hit([click(x - NEAR - 1, y)])
    assert not screen.hit([click(x, y, name="look")])
    assert not screen.hit([])
    for wrong in ("here", None, [1], float("inf")):
        assert not screen.hit([click(wrong, y)])
    broken = {"function": {"name": "click", "arguments": "[" * 5000}}
    assert not screen.hit([broken])
    others = [place for icon, place in screen.icons.items() if icon != screen.target]
    assert not any(screen.hit([click(*place)]) for place in others)


def test_the_beginner_was_shown_what_a_request_renders_to() -> None:
    screen = Screens(0).task(3)
    body = {"model": "m", "messages": list(screen.messages), "tools": [CLICK]}
    asked = parse_chat(json.dumps(body).encode())
    rendered = Renderer.load(str(MODEL), "qwen3-vl").prompt(asked.messages, asked.tools)
    assert tuple(rendered.tokens) == Encoder(MODEL).ids(prompt(screen.target))


@torch.no_grad()
def measure(model: Any, encoder: Encoder, tasks: int = 64) -> dict[str, float]:
    """Measure expected shares of replies to held-out tasks: clicks, and right clicks."""
    screens = [Screens(0).held_out(number) for number in range(tasks)]

    def chances(screen: Screen) -> tuple[float, float]:
        """Return the probability of a click into any cell, and into the asked icon's."""
        answers = [CALL.format(cell_json(cell)) for cell in product(CENTRES, CENTRES)]
        batch = [(screen, encoder.example(prompt(screen.target), answer)) for answer in answers]
        nats = screen_losses(model, encoder, batch).view(len(answers), -1).sum(1)
        right = answers.index(CALL.format(cell_json(screen.icons[screen.target])))
        return float(nats.neg().exp().sum()), float(nats.neg().exp()[right])

    clicks, right = zip(*map(chances, screens), strict=True)
    return {"clicks": fmean(clicks), "right clicks": fmean(right)}


@pytest.mark.slow
def test_the_beginner_seldom_clicks_but_then_mostly_on_the_asked_icon() -> None:
    verify(MODEL)
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(MODEL)
    rates = measure(model.float().eval(), Encoder(MODEL))
    # By chance a ninth of cells would be right.
    assert rates["clicks"] == pytest.approx(0.11, abs=0.03)
    assert rates["right clicks"] == pytest.approx(0.07, abs=0.03)


def test_the_recipe_makes_the_same_weights_again() -> None:
    encoder, weights = Encoder(MODEL), list[Any]()
    for _ in range(2):
        model = new_model()
        hints = Hints(model, encoder)
        for share in (0, 1):
            loss = partial(draw_loss, model, encoder, hints, Random(1), share, says=0.5, size=2)
            stage = Stage(steps=2, peak_rate=1e-2, seed=1)
            train(torch.nn.ModuleList([model, hints]), stage, loss, print)
        weights.append(model.state_dict())
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
