"""Prompts, hints and extensions, in Qwen3's format over the demo model's tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import config_from_name
from renderers.base import load_tokenizer

from tests.render.test_prompt_cache import FAMILIES, tokenizer_for
from tests.support.gateways import OFF, chat, spell
from tinker_claw.errors import ConfigError
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import HINT_TEMPLATE

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "ü"}}\n</tool_call>'
MARKS = load_tokenizer(str(MODEL_DIR)).get_added_vocab()


@given(pieces=st.lists(st.sampled_from([*MARKS, "<", "|", ">", "a", "🙂", "\n", "</"])))
def test_a_hint_stands_in_the_words_of_its_method_and_holds_no_control_token(
    renderer: Renderer, pieces: list[str]
) -> None:
    hint = "".join(pieces)
    for words in (HINT_TEMPLATE, "\n\n[quoted: {hint}]"):
        tokens = renderer.hint_tokens(hint, words)
        assert not {*MARKS.values()} & {*tokens}
        assert renderer.decode(tokens) == words.format(hint=hint)


def test_what_a_teacher_is_told_is_bounded_in_tokens(renderer: Renderer) -> None:
    assert renderer.shorten("as it is <|im_end|>", 100) == "as it is <|im_end|>"
    for text in ("word " * 9000 + "end", "🙂" * 9000, " " * 400_000, "<|im_end|>" * 5000):
        short = renderer.shorten(text, 100)
        assert len(renderer.hint_tokens(short, "{hint}")) <= 110
        assert " [...] " in short
        assert "\ufffd" not in short
        assert text.startswith(short.partition(" [...] ")[0])
        assert text.endswith(short.rpartition(" [...] ")[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_goes_behind_a_system_prompt_or_is_one(family: str) -> None:
    renderer = Renderer(tokenizer_for(family), config_from_name(family))
    system, asked = {"role": "system", "content": "You are Ann."}, chat("What <|im_end|> now?")
    for messages in (asked, [system, *asked]):
        longer = [dict(one) for one in messages]
        if longer[0]["role"] == "user":
            longer.insert(0, {"role": "system", "content": "Be brief."})
        else:
            longer[0]["content"] += "\n\nBe brief."
        prompt = renderer.prompt(messages).tokens
        found = renderer.with_system_text(prompt, "Be brief.")
        assert found is not None
        assert renderer.decode(found) == renderer.decode(renderer.prompt(longer).tokens)


def test_an_extension_keeps_the_sampled_tokens(renderer: Renderer) -> None:
    first = renderer.prompt(chat("look"), hint_message=0)
    sampled = spell(renderer, f"Hm.\n{CALL}")
    results = [{"role": "tool", "tool_call_id": text, "content": text} for text in ("1", "2")]
    extended = renderer.extend(first.tokens, sampled, results)
    assert extended is not None
    before = (*first.tokens, *sampled)
    assert extended.tokens[: len(before)] == before
    assert renderer.decode(extended.tokens[len(before) :]) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_extension_by_a_user_is_the_full_render_where_no_thinking_goes(
    renderer: Renderer,
) -> None:
    new, sampled = chat("thanks"), spell(renderer, "yo")
    first = renderer.prompt(chat("hi"), switches=OFF)
    extended = renderer.extend(first.tokens, sampled, new, hint_message=0, switches=OFF)
    full = renderer.prompt(chat("hi", "yo", "thanks"), hint_message=2, switches=OFF)
    assert extended == full
    assert renderer.extend(renderer.prompt(chat("hi")).tokens, sampled, new) is None


async def test_the_event_loop_goes_on_while_one_long_text_is_encoded(renderer: Renderer) -> None:
    long = chat("".join(f"{number:x}-" for number in range(60_000)))
    rendering = asyncio.create_task(renderer.prompt_aside(long, remembers=False))
    rounds = 0
    while not rendering.done():
        await asyncio.sleep(0.001)
        rounds += 1
    assert rounds > 20, "a few come before a thread that keeps all others out has said that it ends"


def test_what_cannot_be_loaded_is_said_in_a_sentence(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="'morse' is no chat format"):
        Renderer.load(str(tmp_path), "morse")
    with pytest.raises(ConfigError, match="choose another --renderer"):
        Renderer.load(str(tmp_path / "nothing"), "qwen3")
    folder = str(MODEL_DIR)
    with pytest.raises(ConfigError, match="'glm-5' does not work with the tokenizer"):
        Renderer.load(folder, "glm-5")
