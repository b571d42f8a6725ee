"""Images through the gateway: three official clients over real HTTP, and what becomes of a turn."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import resource
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from PIL import Image as Pillow

from tests.support.fakes import FakeSampler
from tests.support.gateways import MODEL, World, gateway
from tests.support.ledger import everything, sql
from tests.support.openclaw import ANN, BOB, SYSTEM, TOOLS, info, message, runtime
from tests.support.pictures import (
    ANIMATIONS,
    animated,
    bombs,
    picture,
    seeing_renderer,
    shown,
    url_of,
)
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import KINDS
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason

ONE, TWO = picture(96, 64), picture(64, 64, "JPEG")
LINE = "[image, 96 x 64 pixels, "
CALL = {"id": "call1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return seeing_renderer(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
async def world(tmp_path: Path, seeing: Renderer) -> AsyncIterator[World]:
    async with gateway(tmp_path, seeing, sees=True) as world:
        yield world


def sizes(sampler: FakeSampler) -> list[tuple[int, int, str]]:
    """Size and format of each image that the sampler was shown last, where it was told."""
    prompt, found = sampler.prompts[-1], []
    for image in sampler.params[-1].images:
        assert len(set(prompt[image.at : image.at + image.tokens])) == 1
        with Pillow.open(BytesIO(image.data)) as opened:
            found.append((*opened.size, image.format))
    return found


def line(number: int) -> str:
    """The line of an image, behind words that make rules for secrets attentive."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return f"Here is the key, token: [image, 96 x 64 pixels, {digest[:12]}]"


async def test_chat_completions_show_images_and_keep_none(tmp_path: Path, seeing: Renderer) -> None:
    async with gateway(tmp_path, seeing, sees=True) as world:
        asked: Any = [shown(ONE, "What is it? ")]
        reply = await world.openai.chat.completions.create(model=MODEL, messages=asked)
        assert reply.choices[0].message.content == "fine"
        assert sizes(world.sampler) == [(96, 64, "png")]
        (turn,) = world.turns()
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(turn.prompt) == len(world.sampler.prompts[0])
        assert turn.request_text.startswith(f"What is it?\n{LINE}")  # what a judge is shown
        assert world.column("reason") == [Reason.IMAGES]
        data = world.sampler.params[0].images[0].data
        assert turn.completion.params.images == ()
    assert not Redactor([*KINDS]).holds("\n".join(map(line, range(500))))
    files = everything(tmp_path)
    assert data[-60:-20] not in files
    assert base64.b64encode(ONE)[40:80] not in files


async def test_responses_show_images_of_users_and_of_tools(world: World) -> None:
    first = {"type": "input_image", "image_url": url_of(ONE), "detail": "auto"}
    second = {"type": "input_image", "image_url": url_of(TWO, "image/jpeg")}
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, first]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [second]},
    ]
    reply = await world.openai.responses.create(model=MODEL, input=given)
    given += [*reply.output, {"role": "user", "content": "And now?"}]
    assert sizes(world.sampler) == [(96, 64, "png"), (64, 64, "jpeg")]
    await world.openai.responses.create(model=MODEL, input=given)
    assert sizes(world.sampler) == [(96, 64, "png"), (64, 64, "jpeg")]
    assert world.column("reason") == [Reason.IMAGES] * 2


async def test_messages_show_images_of_users_and_of_tools(world: World) -> None:
    def block(data: bytes, media: str) -> dict[str, Any]:
        data64 = base64.b64encode(data).decode()
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": media, "data": data64},
        }

    said: Any = [
        {
            "role": "user",
            "content": [block(ONE, "image/png"), {"type": "text", "text": "Look"}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": True,
                    "content": [{"type": "text", "text": "so"}, block(TWO, "image/jpeg")],
                },
                block(ONE, "image/png"),
            ],
        },
    ]
    async with AsyncAnthropic(
        base_url=world.url.removesuffix("/v1"), api_key="any", max_retries=0
    ) as client:
        reply = await client.messages.create(model=MODEL, max_tokens=50, messages=said)
        counted = await client.messages.count_tokens(model=MODEL, messages=said)
    three = [(96, 64, "png"), (64, 64, "jpeg"), (96, 64, "png")]
    assert sizes(world.sampler) == three
    assert reply.usage.input_tokens == counted.input_tokens == len(world.turns()[0].prompt)


async def test_a_known_turn_goes_on_with_its_images_as_they_were(world: World) -> None:
    world.say("A ramp.", "A square.", "Yes.")
    talk = [shown(ONE, "What is it? "), "A ramp.", shown(TWO, "And this?"), "A square.", "Sure?"]
    for end in (1, 3, 5):
        await world.ask(*talk[:end])
    first, second, third = world.turns()
    for before, after in ((first, second), (second, third)):
        stream = (*before.prompt, *before.completion.tokens)
        assert after.prompt[: len(stream)] == stream
    assert sizes(world.sampler) == [(96, 64, "png"), (64, 64, "jpeg")]
    # What the user said is the next state of the turn before, in words.
    state = world.next_states()[first.id]
    assert state is not None
    assert state.text.startswith("And this?\n[image, 64 x 64 pixels, ")


@pytest.mark.parametrize("images", ["serve", "train"])
async def test_of_a_private_turn_nothing_is_kept(
    tmp_path: Path, seeing: Renderer, images: str
) -> None:
    async with gateway(tmp_path, seeing, sees=True, images=images) as world:
        await world.ask(shown(ONE, "/private What is it?"))
        assert sizes(world.sampler) == [(96, 64, "png")]
        assert world.turns() == []
        assert sql(world.ledger).rows("SELECT * FROM images") == []


async def test_images_that_train_are_kept_with_their_turns(
    tmp_path: Path, seeing: Renderer
) -> None:
    async with gateway(tmp_path, seeing, sees=True, images="train") as world:
        await world.ask(shown(ONE, "What is it? "))
        await world.ask(shown(ONE, "What is it? "), "fine", shown(TWO, "And this?"))
        first, second = world.turns()
        shown_to = [params.images for params in world.sampler.params]
        assert [first.images, second.images] == shown_to
        assert [len(turn.images) for turn in (first, second)] == [1, 2]
        assert len(first.completion.topk_ids) == len(first.completion.tokens)
        assert world.column("reason") == [None, None]
        assert len(sql(world.ledger).rows("SELECT id FROM images")) == 2
        # Of what is not trained none is kept.
        await world.ask(shown(picture(32, 32)), temperature=0.5)
        await world.ask(shown(picture(32, 32), "sk-ant-api03-" + "k3y9" * 24))
        assert [len(turn.images) for turn in world.turns()] == [1, 2, 0, 0]
        assert len(sql(world.ledger).rows("SELECT id FROM images")) == 2


async def test_images_of_others_are_shown_and_not_trained(tmp_path: Path, seeing: Renderer) -> None:
    def by(sender: str, *more: Any) -> list[Any]:
        """A group, in which this sender shows an image."""
        words = message(info(sender, group=True), words="What is it?")
        return [shown(ONE, words + runtime("agent:main:telegram:group:-100", "g")), *more]

    looked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call1"}
    answered = {"role": "assistant", "content": "A ramp."}
    then = {"role": "user", "content": message(info(ANN, group=True), words="So?")}
    asked = shown(ONE, f"What?{runtime()}")
    cases: list[tuple[list[Any], str | None]] = [
        ([asked, looked, result | {"content": shown(TWO, "so")["content"]}], None),
        (by(ANN), Reason.OTHERS_IMAGE),
        (by(BOB), Reason.OTHERS_IMAGE),
        (by(BOB, answered, then), Reason.OTHERS_IMAGE),
    ]
    owners = [f"telegram:{ANN}"]
    async with gateway(tmp_path, seeing, sees=True, images="train", owners=owners) as world:
        for messages, why in cases:
            said = [{"role": "system", "content": SYSTEM}, *messages]
            await world.reply({"messages": said, "tools": TOOLS})
            assert world.column("reason")[-1] == why, messages
        assert [len(turn.images) for turn in world.turns()] == [2, 0, 0, 0]


async def refused(world: World, message: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response: httpx.Response = await world.ask(message)
    assert response.status_code == status, response.text
    assert world.sampler.prompts == []
    assert world.turns() == []
    return response.json()["error"]


async def test_who_does_not_see_refuses_by_name(
    tmp_path: Path, seeing: Renderer, renderer: Renderer
) -> None:
    message = shown(ONE, "What is it?")
    async with gateway(tmp_path / "a", renderer, sees=True) as world:
        error = await refused(world, message)
        assert error["param"] == "messages[0].content[1].image_url.url"
        assert "demo reads text only" in error["message"]
    async with gateway(tmp_path / "b", seeing) as world:
        assert "does not take images yet" in (await refused(world, message))["message"]
    async with gateway(tmp_path / "c", seeing, sees=True, images="off") as world:
        assert "--images off" in (await refused(world, message))["message"]


async def test_addresses_and_crowds_are_clear_errors_and_images_of_the_system_are_lines(
    world: World, seeing: Renderer
) -> None:
    away = shown(ONE)
    away["content"][0]["image_url"]["url"] = "http://127.0.0.1:1/cat.png"
    assert "nothing is fetched here" in (await refused(world, away))["message"]
    many = {"role": "user", "content": shown(picture(512, 512))["content"] * 40}
    error = await refused(world, many)
    assert error["code"] == "context_length_exceeded"
    by_system = {"role": "system", "content": shown(ONE)["content"]}
    assert (await world.ask(by_system, {"role": "user", "content": "Hi"})).status_code == 200
    assert "[image/png, 1 kB: images are shown in messages of users and results of tools only]" in (
        seeing.decode(world.sampler.prompts[-1])
    )


WIRES: dict[str, tuple[str, str, Callable[[str], dict[str, Any]]]] = {
    "chat": (
        "/chat/completions",
        "messages[0].content[0].image_url.url",
        lambda data: {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]}]},
    ),
    "responses": (
        "/responses",
        "input[0].content[0].image_url",
        lambda data: {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}]}]},
    ),
    "messages": (
        "/messages",
        "messages[0].content[0].source.data",
        lambda data: {"max_tokens": 9, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        ]}]},
    ),
}  # fmt: skip
"""Address, place of the image, and body of a request with an image, by wire."""


def thrown_at_a_gateway(folder: Path) -> tuple[dict[str, dict[str, tuple[int, str]]], int]:
    """Throw every bomb over every wire.

    Returns:
        Status and text of each answer by wire and bomb, and by how many kB the process has grown.
    """
    files = {name: base64.b64encode(data).decode() for name, (data, _) in bombs().items()}
    files |= {"garbage": "%%%", "a long body": "A" * 16_000_000}

    async def throw() -> tuple[dict[str, dict[str, tuple[int, str]]], int]:
        said = dict[str, dict[str, tuple[int, str]]]()
        async with gateway(folder / "run", seeing_renderer(folder / "model"), sees=True) as world:

            async def answer(wire: str, data: str) -> tuple[int, str]:
                path, _, body = WIRES[wire]
                given = await world.http.post(path, json={"model": MODEL} | body(data))
                return given.status_code, given.text

            await answer("chat", files["bytes"])  # its bytes, in client and server
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for wire in WIRES:
                said[wire] = {name: await answer(wire, data) for name, data in files.items()}
            assert world.sampler.prompts == world.turns() == []
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            for wire in WIRES:
                for format, options in ANIMATIONS.items():
                    file = base64.b64encode(animated(format, **options)).decode()
                    said[wire][format] = await answer(wire, file)
                    assert sizes(world.sampler) == [(500, 500, "png")]
        return said, grown

    return asyncio.run(throw())


@pytest.mark.slow
def test_bombs_over_every_wire_are_clear_errors_with_flat_memory(tmp_path: Path) -> None:
    context = get_context("spawn")  # whose memory is its own from the start
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        said, grown_kb = pool.submit(thrown_at_a_gateway, tmp_path).result()
    expected = {name: (400, why) for name, (_, why) in bombs().items()}
    expected |= {"garbage": (400, "not valid base64"), "a long body": (413, "is longer than")}
    expected |= dict.fromkeys(ANIMATIONS, (200, "fine"))
    for wire, (_, place, _) in WIRES.items():
        assert said[wire].keys() == expected.keys()
        for name, (status, text) in said[wire].items():
            assert status == expected[name][0], (wire, name, text)
            assert expected[name][1] in text, (wire, name)
            assert place in text or status != 400, (wire, name, text)
    # Pillow itself keeps up to 64 MB of texts.
    assert grown_kb < 110_000
