"""Images in prompts: as many tokens as the model's own processor makes, where they stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from renderers import config_from_name, create_renderer
from renderers.base import load_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.chats import parse_chat
from tests.support.pictures import PROCESSOR, picture, seeing_renderer, seeing_tokenizer, shown
from tinker_claw.errors import RequestError
from tinker_claw.images import Image, images_in
from tinker_claw.render.eyes import Eyes
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Message

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module", params=["qwen3-vl", "qwen3.5"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return seeing_renderer(tmp_path_factory.mktemp("seeing"), request.param)


def said(*messages: dict[str, Any]) -> Sequence[Message]:
    return parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).messages


def eyes_of(renderer: Renderer) -> Eyes:
    assert renderer.eyes is not None
    return renderer.eyes


def sized(width: int, height: int) -> Image:
    out = BytesIO()
    Pillow.new("1", (width, height)).save(out, "PNG")
    return Image(out.getvalue(), "at")


@given(width=st.integers(1, 900), height=st.integers(1, 900))
def test_an_image_takes_as_many_tokens_as_the_processor_makes(width: int, height: int) -> None:
    options = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**options)
    eyes, image = Eyes(7, 32, 64 * 64, 512 * 512), sized(width, height)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(RequestError, match="more than 200 times"):
            eyes.tokens(image)
        return
    with Pillow.open(BytesIO(image.clean())) as decoded:
        grid = processor(images=[decoded], return_tensors="np")["image_grid_thw"][0]
    assert eyes.tokens(image) == grid.prod() // PROCESSOR["merge_size"] ** 2


def test_a_prompt_shows_each_image_where_it_stands(seeing: Renderer) -> None:
    messages = said(
        shown(picture(96, 64), "First <|image_pad|> "),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": shown(picture(64, 128))["content"]},
        {"role": "user", "content": "[image, 96 x 64 pixels] and <|image_pad|> are words."},
    )
    prompt, eyes = seeing.prompt(messages, hint_message=3), eyes_of(seeing)
    assert [tokens for _, tokens in prompt.images] == [6, 8]
    marked = 0
    for (at, tokens), image in zip(prompt.images, images_in(messages), strict=True):
        assert tokens == eyes.tokens(image)
        assert set(prompt.tokens[at : at + tokens]) == {eyes.placeholder}
        ends = prompt.tokens[at - 1], prompt.tokens[at + tokens]
        assert tuple(map(seeing.decode, [[end] for end in ends])) == (
            "<|vision_start|>",
            "<|vision_end|>",
        )
        marked += tokens
    assert prompt.tokens.count(eyes.placeholder) == marked  # words are words
    assert seeing.decode(prompt.tokens[: prompt.hint_at]).endswith("are words.")
    assert "First <|image_pad|> <|vision_start|>" in seeing.decode(prompt.tokens)


def test_the_prompt_is_the_packages_own(seeing: Renderer, tmp_path: Path) -> None:
    texts, reply = ("What is it? ", "And?"), {"role": "assistant", "content": "It"}
    messages = said(shown(picture(), texts[0]), reply, shown(picture(64, 64), texts[1]))
    first, last = (
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}
        for text in texts
    )
    package: Any = create_renderer(
        load_tokenizer(str(seeing_tokenizer(tmp_path))), config_from_name(seeing.family)
    )
    rendered = package.render(
        [first, reply, last], add_generation_prompt=True, process_multimodal=False
    ).token_ids
    pad, sizes = eyes_of(seeing).placeholder, iter((6, 4))
    wanted = [new for id_ in rendered for new in [id_] * (next(sizes) if id_ == pad else 1)]
    for _ in range(2):  # rendered, and from the cache
        assert list(seeing.prompt(messages).tokens) == wanted


def test_a_text_like_an_image_is_another_prompt(seeing: Renderer) -> None:
    seen = said(shown(picture(), "See "), {"role": "assistant", "content": "Yes"}, shown(picture()))
    words = said(
        {"role": "user", "content": str(seen[0]["content"])},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "And?"},
    )
    with_image, without = seeing.prompt(seen), seeing.prompt(words)
    assert len(with_image.images) == 2
    assert without.images == ()
    assert "[image, 96 x 64 pixels" in seeing.decode(without.tokens)


def test_a_known_turn_is_extended_with_its_images_as_they_were(seeing: Renderer) -> None:
    first = seeing.prompt(said(shown(picture(), "What?")))
    reply = (*seeing.hint_tokens("A ramp.", "{hint}"), seeing.stop_tokens[0])
    new = said(shown(picture(64, 64), "And this?"))
    longer = seeing.extend(first.tokens, reply, new)
    if longer is None:  # the format thinks, and drops what was thought
        assert seeing.family == "qwen3.5"
        return
    before = (*first.tokens, *reply)
    assert longer.tokens[: len(before)] == before
    ((at, tokens),) = longer.images
    assert (at > len(before), tokens) == (True, 4)


def test_no_hint_goes_into_a_message_with_an_image(seeing: Renderer) -> None:
    assert seeing.prompt(said(shown(picture(), "What?")), hint_message=0).hint_at is None


def test_who_has_no_processor_sees_nothing(tmp_path: Path, renderer: Renderer) -> None:
    assert renderer.eyes is None
    with pytest.raises(RequestError, match="reads text only"):
        renderer.prompt(said(shown(picture())))
    folder = tmp_path / "blind"
    assert seeing_renderer(folder).eyes is not None
    (folder / "preprocessor_config.json").unlink()
    assert Renderer.load(str(folder), "qwen3-vl").eyes is None
