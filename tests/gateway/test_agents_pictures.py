"""Real agents show a picture: one that a tool read, or one that the user attached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from examples.day.npm import npm
from tests.gateway.test_openclaw import scripted
from tests.support.coding_agents import ClaudeCode, Codex, OpenCode
from tests.support.gateways import World, gateway
from tests.support.ledger import sql
from tests.support.pictures import picture, seeing_renderer
from tests.support.real_openclaw import LocalOpenClaw
from tinker_claw.ledger.prune import in_session
from tinker_claw.turn_state import Reason
from tinker_claw.types import Kind, Turn

pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be run"),
]

HELLO, LOOK, GOOD = "Hello, who are you?", "What does picture.png show?", "\N{THUMBS UP SIGN}"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
SEEN = "A grey ramp."
FILE, LINE = picture(96, 64), "[image, 96 x 64 pixels, "
PLACE = "<|image_pad|>"


def openclaw(url: str, home: Path) -> Callable[[str], str]:
    sees, patient = ["text", "image"], {"timeoutSeconds": 60}
    claw = LocalOpenClaw.create(home, url, "demo", provider=patient, input=sees)
    return lambda message: claw.say("talk", message)


def claude_code(url: str, home: Path) -> Callable[[str], str]:
    return ClaudeCode.create(home, url, "demo", "any").say


def codex(url: str, home: Path) -> Callable[[str], str]:
    return Codex.create(home, url, "demo", "any").say


def opencode(url: str, home: Path) -> Callable[[str], str]:
    agent = OpenCode.create(home, url, "demo", "any")
    agent.see()
    return agent.say


@pytest.mark.parametrize(
    ("start", "tool", "argument"),
    [
        (openclaw, "read", "path"),
        (claude_code, "Read", "file_path"),
        (codex, "view_image", "path"),
        (opencode, "read", "filePath"),
    ],
)
async def test_a_picture_that_a_tool_read_is_answered_judged_kept_to_train_and_forgotten(
    tmp_path: Path, start: Any, tool: str, argument: str
) -> None:
    file = tmp_path / "home" / "workspace" / "picture.png"
    renderer = seeing_renderer(tmp_path / "model")
    looks = f"I will look.\n{CALL.format(tool, argument, file)}"
    says = {PLACE: SEEN, HELLO: "I am Claw.", LOOK: looks, GOOD: "Thank you."}
    sampler = scripted(renderer, says)
    async with gateway(
        tmp_path / "data", renderer, sampler, context_tokens=200_000, sees=True, images="train"
    ) as world:
        say = start(world.url, tmp_path / "home")
        file.write_bytes(FILE)
        heard = [await asyncio.to_thread(say, said) for said in (HELLO, LOOK, GOOD)]
        assert heard == ["I am Claw.", SEEN, "Thank you."]
        turns = [turn for turn in world.turns() if turn.kind is Kind.MAIN]
        assert len({turn.session_id for turn in turns}) == 1
        assert [turn.request_text for turn in turns] == [HELLO, LOOK, LOOK, GOOD]
        _, asks, sees, thanks = turns
        result, verdict = (world.ledger.turns.next_state(turn.id) for turn in (asks, sees))
        assert result is not None
        assert result.role == "tool"
        assert LINE in result.text, "a judge reads where the image stood"
        assert verdict is not None
        assert verdict.text == GOOD
        shows_it(world, sees, thanks)
        judged = sql(world.ledger).rows("SELECT turn_id, score FROM feedback")
        assert [(row["turn_id"], row["score"]) for row in judged] == [(sees.id, 1.0)]
        because = world.column("reason")
        assert [because[turn.id - 1] for turn in turns] == [None, None, None, Reason.RATING]
        assert sees.images == world.sampler.params[-2].images, "it trains as it was seen"
        images = "SELECT id FROM images"
        assert len(sql(world.ledger).rows(images)) == 1
        world.ledger.forget(in_session(str(sees.session_id), None))
        assert sql(world.ledger).rows(images) == []


def shows_it(world: World, *turns: Turn) -> None:
    """Check that the sampler was shown the picture in these turns, the last ones, and that its
    places are recorded."""
    expected = Pillow.open(BytesIO(FILE)).convert("RGB").tobytes()
    for turn, params in zip(turns, world.sampler.params[-len(turns) :], strict=True):
        (image,) = params.images
        with Pillow.open(BytesIO(image.data)) as opened:
            assert (opened.size, opened.tobytes()) == ((96, 64), expected)
        assert image.tokens == 6
        placed = turn.prompt[image.at : image.at + image.tokens]
        assert world.renderer.decode(placed) == PLACE * image.tokens
        assert world.renderer.decode(turn.prompt).count(PLACE) == image.tokens


PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]>>endobj\n"
    b"trailer<</Root 1 0 R>>\n%%EOF\n"
)


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, OpenCode])
async def test_a_picture_that_the_user_attached_is_answered_and_recorded(
    tmp_path: Path, kind: Any
) -> None:
    renderer = seeing_renderer(tmp_path / "model")
    async with gateway(
        tmp_path / "data", renderer, scripted(renderer, {PLACE: SEEN}), context_tokens=200_000,
        sees=True,
    ) as world:  # fmt: skip
        agent = kind.create(tmp_path / "home", world.url, "demo", "any")
        (agent.workspace / "picture.png").write_bytes(FILE)
        if not isinstance(agent, ClaudeCode):
            agent.attached = agent.workspace / "picture.png"
        if isinstance(agent, OpenCode):
            agent.see()
        asked = "What does @picture.png show?"
        assert await asyncio.to_thread(agent.say, asked) == SEEN
        (turn,) = (turn for turn in world.turns() if turn.kind is Kind.MAIN)
        line, _, words = turn.request_text.partition("\n")
        assert line.startswith(LINE)
        assert words == asked, "what the harness wrote around the image is not the user's"
        shows_it(world, turn)
        assert world.column("reason")[turn.id - 1] == Reason.IMAGES
