"""Sampled tokens to replies: streamed, at once, and in three families of formats."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from renderers import config_from_name, create_renderer
from renderers.base import load_tokenizer

from tests.render.test_prompt_cache import tokenizer_for
from tests.support.gateways import OFF, chat, spell
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import Delta, Reply

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "ü"}}\n</tool_call>'
PIECES = (
    *MARKERS, CALL, "\n", "  ", "\n\n", "word", " ü €", "🙂", '{"name": "f", "arguments": {}}', "[",
)  # fmt: skip


def parsed(renderer: Renderer, text: str, *, thinking: bool = False) -> Reply:
    return renderer.parse(spell(renderer, text), opened(renderer, thinking))


def opened(renderer: Renderer, thinking: bool) -> tuple[int, ...]:
    """Return a prompt; `thinking`: one that opens the thinking block itself, as Qwen3.5's does."""
    prompt = renderer.prompt(chat("hi")).tokens
    return (*prompt, *renderer.encode("<think>\n")) if thinking else prompt


def said(reply: Reply) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in reply.tool_calls]
    return reply.text, reply.reasoning, calls


WELL_FORMED: list[tuple[str, tuple[Any, ...]]] = [
    ("Hello.", ("Hello.", None, [])),
    ("<think>\nhm\n</think>\n\nyes", ("yes", "hm", [])),
    ("<think>never closed", ("", "never closed", [])),
    (f"<think>x</think>Look.\n{CALL}\n{CALL}", ("Look.", "x", [("ls", '{"path":"ü"}')] * 2)),
    (f"<think>x {CALL}", ("", "x", [("ls", '{"path":"ü"}')])),
    (f"<think>x {CALL} y</think>z", ("z", f"x {CALL} y", [])),
]
REPLIES: list[tuple[str, tuple[Any, ...]]] = [
    *WELL_FORMED,
    ("\n  Hello \n\n there.  \n", ("Hello \n\n there.", None, [])),
    ("", ("", None, [])),
    ("\n<think></think>yes", ("yes", "", [])),
    ("<think>a<think>b</think>c", ("c", "ab", [])),
    (f"a\n{CALL}\nb", ("a\n\nb", None, [("ls", '{"path":"ü"}')])),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}', ("", None, [("f", '{"a":1}')])),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", None, [("f", '{"a":1}')]),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        ("", None, [("f", '{"a":"\ufffd"}')]),
    ),
    ("a<|im_end|>b", ("a", None, [])),
]
TEXTS = [
    "yes <think>no</think>",
    "a</think>b",
    '<tool_call>{"name": "f"',
    *(
        f"<tool_call>{call}</tool_call>"
        for call in (
            "{oops",
            "[1]",
            '{"name": "f"}',
            '{"name": "f", "arguments": {"a": 1}, "b": 2}',
            '{"name": "f", "arguments": {"a": 1, "a": 2}}',
            '{"arguments": {}}',
            '{"name": 5, "arguments": {}}',
            '{"name": "\\ud800", "arguments": {}}',
            '{"name": "f", "arguments": [1]}',
            '{"name": "f", "arguments": {"a": NaN}}',
            '{"name": "f", "arguments": ' + "9" * 5000 + "}",
            '{"name": "f", "arguments": ' + "[" * 3000,
        )
    ),
]
"""Replies that are text from end to end."""


@pytest.mark.parametrize(
    ("text", "expected"), [*REPLIES, *((text, (text, None, [])) for text in TEXTS)]
)
def test_replies(renderer: Renderer, text: str, expected: tuple[Any, ...]) -> None:
    assert said(parsed(renderer, text)) == expected


def test_a_thinking_block_that_the_prompt_has_opened(renderer: Renderer) -> None:
    assert said(parsed(renderer, "hm</think>yes", thinking=True)) == ("yes", "hm", [])
    assert said(parsed(renderer, "</think>yes", thinking=True)) == ("yes", "", [])
    assert said(parsed(renderer, "hm", thinking=True)) == ("", "hm", [])
    off = renderer.prompt(chat("hi"), switches=OFF).tokens
    assert said(renderer.parse(spell(renderer, "yes"), off)) == ("yes", None, [])


def streamed(renderer: Renderer, chunks: list[list[int]], thinking: bool) -> list[Delta]:
    """Check one stream against the reply parsed at once; return the deltas."""
    prompt = opened(renderer, thinking)
    stream = renderer.stream(prompt)
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)]
    rest, reply = stream.finish()
    deltas += rest
    assert "".join(d.text for d in deltas if d.kind == "text") == reply.text
    assert "".join(d.text for d in deltas if d.kind == "reasoning") == (reply.reasoning or "")
    assert tuple(d.call for d in deltas if d.call) == reply.tool_calls
    whole = renderer.parse([token for chunk in chunks for token in chunk], prompt)
    assert said(whole) == said(reply)
    ids = [call.id for call in reply.tool_calls]
    assert len(set(ids)) == len(ids)
    assert all(i.isalnum() and i.isascii() and 1 <= len(i) <= 40 for i in ids)
    return deltas


@given(data=st.data(), thinking=st.booleans())
def test_a_stream_adds_up_to_the_reply(
    renderer: Renderer, data: st.DataObject, thinking: bool
) -> None:
    drawn = data.draw(st.lists(st.sampled_from(PIECES), max_size=12))
    tokens = [token for piece in drawn for token in renderer.encode(piece)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    edges = [0, *cuts, len(tokens)]
    streamed(renderer, [tokens[a:b] for a, b in pairwise(edges)], thinking)


@given(tokens=st.lists(st.integers(0, 599), max_size=60), thinking=st.booleans())
def test_any_tokens_at_all(renderer: Renderer, tokens: list[int], thinking: bool) -> None:
    """The first ids of the vocabulary are markers and single bytes: mostly broken text."""
    streamed(renderer, [[token] for token in tokens], thinking)


@given(text=st.text(max_size=40))
@example("<|endoftext|>")
def test_text_streams_as_it_is_decoded(renderer: Renderer, text: str) -> None:
    tokens = renderer.encode(text)
    marks = {*renderer.stop_tokens, *(renderer.encode(marker)[0] for marker in MARKERS)}
    if not marks.isdisjoint(tokens):
        return
    deltas = streamed(renderer, [[token] for token in tokens], False)
    assert "".join(delta.text for delta in deltas) == renderer.decode(tokens).strip()


def test_text_comes_token_by_token_and_characters_whole(renderer: Renderer) -> None:
    tokens = renderer.encode("one two 🙂🙂 three")
    deltas = streamed(renderer, [[token] for token in tokens], False)
    assert len(deltas) > 3
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_a_call_comes_with_its_closing_token(renderer: Renderer) -> None:
    stream = renderer.stream(opened(renderer, False))
    *start, last = renderer.encode(CALL)
    assert stream.feed(start) == []
    (delta,) = stream.feed([last])
    assert delta.call is not None
    assert delta.call.name == "ls"


def test_the_package_reads_well_formed_replies_the_same(renderer: Renderer) -> None:
    package = create_renderer(load_tokenizer(str(MODEL_DIR)), config_from_name("qwen3"))
    for text, expected in WELL_FORMED:
        ids = list(spell(renderer, text))
        theirs = package.parse_response(ids, prompt_ids=list(opened(renderer, False)))
        calls = [(call.name, json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":")))
                 for call in theirs.tool_calls]  # fmt: skip
        assert (theirs.content, theirs.reasoning_content, calls) == expected, text


@pytest.mark.parametrize(
    ("family", "text", "thinking"),
    [
        ("qwen3", "<think>Hm, ü.</think>Yes.<|im_end|>", "Hm, ü."),
        ("qwen3", "<think>Hm <tool_call> no</think>Yes.<|im_end|>", "Hm <tool_call> no"),
        ("qwen3", "<think>never closed", "never closed"),
        ("gemma4", "<|channel>thought\nHm, ü.<channel|>Yes.<turn|>", "Hm, ü."),
        ("llama-3", "Yes.<|eot_id|>", ""),
    ],
)
def test_tokens_of_thinking_are_counted(family: str, text: str, thinking: str) -> None:
    renderer = Renderer(tokenizer_for(family), config_from_name(family))
    stream = renderer.stream(renderer.prompt(chat("hi")).tokens)
    for token in renderer.encode(text):
        stream.feed([token])
    assert stream.finish()[1].reasoning == (thinking or None)
    assert stream.thought == len(renderer.encode(thinking))
