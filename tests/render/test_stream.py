"""Sampled tokens to replies: streamed, at once, and in three families of formats."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from renderers import Qwen35RendererConfig, config_from_name
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


REPLIES: list[tuple[str, tuple[Any, ...]]] = [
    ("Hello.", ("Hello.", None, [])),
    ("\n  Hello \n\n there.  \n", ("Hello \n\n there.", None, [])),
    ("", ("", None, [])),
    ("<think>\nhm\n</think>\n\nyes", ("yes", "hm", [])),
    ("\n<think></think>yes", ("yes", "", [])),
    ("<think>\nnever closed", ("", "never closed", [])),
    ("<think>a<think>b</think>c", ("c", "ab", [])),
    ("yes <think>no</think>", ("yes <think>no</think>", None, [])),
    ("a</think>b", ("a</think>b", None, [])),
    (CALL, ("", None, [("ls", '{"path":"ü"}')])),
    (f"Look.\n{CALL}\n{CALL}", ("Look.", None, [("ls", '{"path":"ü"}')] * 2)),
    (f"a\n{CALL}\nb", ("a\n\nb", None, [("ls", '{"path":"ü"}')])),
    (f"<think>x</think>{CALL}", ("", "x", [("ls", '{"path":"ü"}')])),
    (f"<think>x {CALL}", ("", "x", [("ls", '{"path":"ü"}')])),
    (f"<think>x {CALL} y</think>z", ("z", f"x {CALL} y", [])),
    ("<tool_call>{oops</tool_call>", ("<tool_call>{oops</tool_call>", None, [])),
    ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", None, [])),
    ('<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', None, [])),
    ('<tool_call>{"name": "f"}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}', ("", None, [("f", '{"a":1}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "arguments": ' + "9" * 5000 + "}</tool_call>", None),  # type: ignore[list-item]
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


@pytest.mark.parametrize(("text", "expected"), REPLIES, ids=[text[:30] for text, _ in REPLIES])
def test_replies(renderer: Renderer, text: str, expected: tuple[Any, ...] | None) -> None:
    """Expected None: the whole text comes back as text."""
    assert said(parsed(renderer, text)) == (expected or (text, None, []))


def test_a_thinking_block_that_the_prompt_has_opened(renderer: Renderer) -> None:
    assert said(parsed(renderer, "hm</think>yes", thinking=True)) == ("yes", "hm", [])
    assert said(parsed(renderer, "</think>yes", thinking=True)) == ("yes", "", [])
    assert said(parsed(renderer, "hm", thinking=True)) == ("", "hm", [])
    off = renderer.prompt(chat("hi"), switches=OFF).tokens
    assert said(renderer.parse(spell(renderer, "yes"), off)) == ("yes", None, [])


def test_endless_nesting_in_a_call_is_text(renderer: Renderer) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 3000 + "</tool_call>"
    assert said(parsed(renderer, text)) == (text, None, [])


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


def test_thousands_of_broken_bytes_do_not_pile_up(renderer: Renderer) -> None:
    (byte, *_) = renderer.encode("🙂")
    deltas = streamed(renderer, [[byte]] * 1000, False)
    assert len("".join(delta.text for delta in deltas)) == 1000


WELL_FORMED = (
    "Hello.",
    "<think>\nhm\n</think>\n\nyes",
    "<think>never closed",
    f"<think>x</think>Look.\n{CALL}\n{CALL}",
    f"<think>x {CALL}",
    f"<think>x {CALL} y</think>z",
)


@pytest.mark.parametrize("text", WELL_FORMED)
def test_the_package_reads_well_formed_replies_the_same(renderer: Renderer, text: str) -> None:
    ids = list(spell(renderer, text))
    theirs = renderer._base.parse_response(ids, prompt_ids=list(opened(renderer, False)))
    assert said(parsed(renderer, text)) == (
        theirs.content,
        theirs.reasoning_content,
        [(c.name, json.dumps(c.arguments, ensure_ascii=False, separators=(",", ":")))
         for c in theirs.tool_calls],
    )  # fmt: skip


@pytest.fixture(scope="module")
def qwen35() -> Renderer:
    """Qwen3.5's format: the prompt opens the thinking block, calls are XML."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    vision = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(vision)})
    return Renderer(tokenizer, Qwen35RendererConfig(enable_thinking=True))


def test_a_newer_family_with_calls_in_xml(qwen35: Renderer) -> None:
    prompt = qwen35.prompt(chat("hi"), hint_message=0)
    assert qwen35.decode(prompt.tokens).endswith("<think>\n")
    assert qwen35.decode(prompt.tokens[: prompt.hint_at]).endswith("user\nhi")
    text = (
        "hm\n</think>\n\nLook.\n<tool_call>\n<function=ls>\n<parameter=path>\na b\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    stream = qwen35.stream(prompt.tokens)
    deltas = [d for token in spell(qwen35, text) for d in stream.feed([token])]
    rest, reply = stream.finish()
    assert rest == []
    assert said(reply) == ("Look.", "hm", [("ls", '{"path":"a b"}')])
    assert "".join(d.text for d in deltas if d.kind == "text") == "Look."
    broken = text.replace("<function=ls>", "oops")
    assert "oops" in qwen35.parse(spell(qwen35, broken), prompt.tokens).text


def test_a_family_that_is_parsed_at_the_end_loses_nothing() -> None:
    buffered = Renderer(tokenizer_for("gemma4"), config_from_name("gemma4"))
    prompt = buffered.prompt(chat("hi"), hint_message=0)
    good, bad = '<|tool_call>call:ls{p:<|"|>x<|"|>}<tool_call|>', "<|tool_call>oops<tool_call|>"
    stream = buffered.stream(prompt.tokens)
    assert stream.feed(spell(buffered, f"Look.\n{good}\n{bad}", end="<turn|>")) == []
    deltas, reply = stream.finish()
    assert said(reply) == (f"Look.{bad}", None, [("ls", '{"p":"x"}')])
    assert [d.kind for d in deltas] == ["text", "tool_call"]


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
