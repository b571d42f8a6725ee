"""Prompts, hints and extensions, in Qwen3's format over the demo model's tokenizer."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import config_from_name
from renderers.base import load_tokenizer

from tests.render.test_prompt_cache import FAMILIES, tokenizer_for
from tests.support.gateways import OFF, chat, spell
from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import HINT_TEMPLATE, Delta, Reply

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "ü"}}\n</tool_call>'


def test_a_prompt_is_the_packages_render(renderer: Renderer) -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    prompt = renderer.prompt(chat("hi", "yo", "bye"), tools, hint_message=0)
    text = renderer.decode(prompt.tokens)
    assert json.dumps(tools[0]) in text
    assert text.endswith("<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.decode(prompt.tokens[: prompt.hint_at]).endswith("user\nhi")


def test_a_hint_goes_behind_the_message_that_is_named(renderer: Renderer) -> None:
    messages = chat("hi", "yo", "do it  \n", "done", "thanks")
    for at, message in enumerate(messages):
        prompt = renderer.prompt(messages, hint_message=at)
        if message["role"] == "user":
            assert renderer.decode(prompt.tokens[: prompt.hint_at]).endswith(message["content"])
    assert renderer.prompt(messages).hint_at is None
    assert renderer.prompt(chat(""), hint_message=0).hint_at is None


@given(pieces=st.lists(st.sampled_from([*MARKERS, "<", "|", ">", "a", "🙂", "\n", "</"])))
def test_a_hint_never_holds_a_control_token(renderer: Renderer, pieces: list[str]) -> None:
    hint = "".join(pieces)
    tokens = renderer.hint_tokens(hint)
    added = set(renderer._tokenizer.get_added_vocab().values())
    assert not added & set(tokens)
    assert renderer.decode(tokens) == HINT_TEMPLATE.format(hint=hint)


def test_what_a_teacher_is_told_is_bounded_in_tokens(renderer: Renderer) -> None:
    assert renderer.shorten("as it is <|im_end|>", 100) == "as it is <|im_end|>"
    for text in ("word " * 9000 + "end", "🙂" * 9000, " " * 400_000, "<|im_end|>" * 5000):
        short = renderer.shorten(text, 100)
        assert len(renderer.hint_tokens(short, "{hint}")) <= 110
        assert " [...] " in short
        assert "\ufffd" not in short
        assert text.startswith(short.partition(" [...] ")[0])
        assert text.endswith(short.rpartition(" [...] ")[2])


def test_text_stands_in_the_words_of_its_method(renderer: Renderer) -> None:
    tokens = renderer.hint_tokens("no <think>", "\n\n[quoted: {hint}]")
    assert renderer.decode(tokens) == "\n\n[quoted: no <think>]"


@given(hint=st.text(max_size=50))
def test_removing_the_hint_gives_the_prompt_back(renderer: Renderer, hint: str) -> None:
    prompt = renderer.prompt(chat("a", "b", "c"), hint_message=2)
    assert prompt.hint_at is not None
    hinted = renderer.splice(prompt.tokens, prompt.hint_at, hint)
    size = len(renderer.hint_tokens(hint))
    assert len(hinted) == len(prompt.tokens) + size
    assert hinted[: prompt.hint_at] + hinted[prompt.hint_at + size :] == prompt.tokens


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
    results = [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    extended = renderer.extend(first.tokens, sampled, results)
    assert extended is not None
    assert extended.tokens[: len(first.tokens) + len(sampled)] == (*first.tokens, *sampled)
    tail = renderer.decode(extended.tokens[len(first.tokens) + len(sampled) :])
    assert tail == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_extension_finds_its_own_hint_place(renderer: Renderer) -> None:
    first = renderer.prompt(chat("hi"), switches=OFF)
    sampled = spell(renderer, "yo")
    new = [{"role": "user", "content": "thanks"}]
    extended = renderer.extend(first.tokens, sampled, new, hint_message=0, switches=OFF)
    full = renderer.prompt(chat("hi", "yo", "thanks"), hint_message=2, switches=OFF)
    assert extended == full


def test_with_thinking_a_new_user_message_is_rendered_in_full(renderer: Renderer) -> None:
    first = renderer.prompt(chat("hi"))
    new = [{"role": "user", "content": "thanks"}]
    assert renderer.extend(first.tokens, spell(renderer, "yo"), new) is None


class Inside:
    """A tokenizer whose backend reports when it is at work."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._backend = inner, inner.backend_tokenizer
        self.backend_tokenizer = SimpleNamespace(
            encode_batch=partial(self._work, self._backend.encode_batch),
            encode_batch_fast=partial(self._work, self._backend.encode_batch_fast),
        )
        self.working = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._inner(*args, **options)

    def _work(self, encode: Any, *args: Any, **options: Any) -> Any:
        self.working = True
        try:
            return encode(*args, **options)
        finally:
            self.working = False


async def test_the_event_loop_goes_on_while_one_long_text_is_encoded(renderer: Renderer) -> None:
    tokenizer = Inside(load_tokenizer(str(MODEL_DIR)))
    long = chat("".join(f"{number:x}-" for number in range(60_000)))
    rendering = asyncio.create_task(
        Renderer(tokenizer, renderer.thinking.config).prompt_aside(long)
    )
    rounds = 0
    while not rendering.done():
        await asyncio.sleep(0.001)
        rounds += tokenizer.working
    await rendering
    assert rounds > 20, "a few come before a thread that keeps all others out has said that it ends"


def test_an_unknown_model_gets_its_own_template() -> None:
    unknown = Renderer.load(str(MODEL_DIR), "auto")
    assert unknown.family == "default"
    prompt = unknown.prompt(chat("hi"), hint_message=0)
    assert unknown.decode(prompt.tokens[: prompt.hint_at]).endswith("hi")
    stream = unknown.stream(prompt.tokens)
    tokens = spell(unknown, "Hello.")
    assert stream.feed(tokens) == [Delta("text", "Hello.")]
    assert stream.finish() == ([], Reply("Hello."))
    assert unknown.extend(prompt.tokens, tokens, chat("x")) is None
    with pytest.raises(RequestError, match="enable_thinking"):
        unknown.thinking.switches({"enable_thinking": False})


def test_what_cannot_be_loaded_is_said_in_a_sentence(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="'morse' is no chat format"):
        Renderer.load(str(tmp_path), "morse")
    with pytest.raises(ConfigError, match="choose another --renderer"):
        Renderer.load(str(tmp_path / "nothing"), "qwen3")
    folder = str(MODEL_DIR)
    with pytest.raises(ConfigError, match="'glm-5' does not work with the tokenizer"):
        Renderer.load(folder, "glm-5")
