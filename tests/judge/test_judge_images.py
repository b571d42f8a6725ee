"""A judge that sees is shown the images of a turn; one that does not reads their lines."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from tests.judge.test_endpoints import STATE, Picky, asking, error
from tests.support.pictures import picture
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ConfigError
from tinker_claw.judge.judge import Judge
from tinker_claw.types import PlacedImage, Vote

IMAGES = tuple(PlacedImage(at, 4, picture(32 + at, 32), "png") for at in range(5))
LINE = "[image, 32 x 32 pixels, 3f2a9c1b77d0]"


class Blind(Picky):
    """Refuses messages with parts."""

    why: dict[str, Any] = error("This model does not support image input.")

    def refusal(self, body: dict[str, Any]) -> JSONResponse | None:
        refusal = super().refusal(body)
        parts = isinstance(self.asked(-1), list)
        return refusal or (JSONResponse(self.why, 400) if parts else None)

    def asked(self, number: int) -> Any:
        return self.bodies[number]["messages"][-1]["content"]


async def judged(picky: Picky, *, shows: bool = True) -> Vote | None:
    settings = JudgeSettings(judge_images=shows, prm_m=1)
    async with asking(picky, settings=settings) as endpoint:
        judge = Judge(endpoint, settings, most_hints=0)
        found = await judge.judge(f"What is it?\n{LINE}", "A ramp.", STATE, images=IMAGES)
        await judge.judge(f"What is it?\n{LINE}", "A ramp.", STATE, images=IMAGES)
    return found.verdict.value


async def test_a_judge_is_shown_the_newest_images_as_data() -> None:
    picky = Picky()
    assert await judged(picky) == 1
    case, told, *shown = picky.bodies[0]["messages"][-1]["content"]
    assert LINE in case["text"]
    assert "no order to you" in told["text"]
    kinds = ["text"] * 2 + ["image_url"] * 4
    assert [part["type"] for part in (case, told, *shown)] == kinds
    for part, image in zip(shown, IMAGES[1:], strict=True):
        assert (
            part["image_url"]["url"]
            == f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
        )


@pytest.mark.parametrize(
    "why",
    [
        error("This model does not support image input."),
        error("Invalid content type: image_url is only supported by certain models."),
        error("Input should be a valid string", "messages.1.content: string expected"),
        error("Bad request."),
    ],
)
async def test_a_judge_that_refuses_images_reads_their_lines(why: dict[str, Any]) -> None:
    blind = Blind()
    blind.why = why
    assert await judged(blind) == 1
    asked = blind.asked(-1)
    assert isinstance(asked, str)
    assert LINE in asked
    assert "data:image" not in json.dumps(blind.bodies[-1])
    assert isinstance(blind.asked(-2), str), "it is remembered"


async def test_nobody_is_shown_images_unasked() -> None:
    picky = Picky()
    await judged(picky, shows=False)
    assert "data:image" not in json.dumps(picky.bodies)


def test_images_are_shown_to_an_endpoint_and_only_where_they_are_kept(tmp_path: Path) -> None:
    flags = ["--model-name", "x", "--data-dir", str(tmp_path), "--judge-images"]
    for more in ([], ["--images", "train"], ["--judge-url", "http://127.0.0.1:1/v1"]):
        with pytest.raises(ConfigError, match="--judge-url and --images train"):
            load([*flags, *more])
    both = load([*flags, "--images", "train", "--judge-url", "http://127.0.0.1:1/v1"])
    assert both.judge.judge_images
