"""Ends of replies that a request asks for: stop strings in the text, and the second of two
calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import config_from_name

from tests.render.test_prompt_cache import tokenizer_for
from tests.support.gateways import chat, spell
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import CutStream, StopSearch
from tinker_claw.types import Delta, Reply

CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
PIECES = (
    CALL,
    "END",
    "E",
    "N",
    "D",
    "<think>",
    "</think>",
    " ",
    "\n\n",
    "word",
    "ü🙂",
    "<|im_end|>",
)


def read_singly(text: str, stop: list[str]) -> str:
    """Reference for stop strings: characters come one by one, and the first full match ends the
    text."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


@given(
    text=st.text("ab", max_size=14),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_a_cut_is_where_single_characters_would_find_it(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    search, out = StopSearch(stop), ""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(edges):
        out += "" if search.match else search.feed(text[start:end])
        # Nothing is held back but what a stop string begins with.
        held = text[len(out) : end]
        assert search.match or not held or any(s.startswith(held) for s in stop)
    out += search.held
    assert out == read_singly(text, stop)
    assert (search.match is not None) == (out != text)


def cut_stream(renderer: Renderer, stop: list[str], one_call: bool = False) -> CutStream:
    inner = renderer.stream(renderer.prompt(chat("hi")).tokens)
    return CutStream(inner, stop, one_call=one_call)


def shown(
    renderer: Renderer, chunks: list[list[int]], stop: list[str], one_call: bool = False
) -> tuple[Reply, list[Delta], CutStream]:
    """Return the reply, its deltas and the stream, which is left as soon as it says that it is
    cut."""
    stream = cut_stream(renderer, stop, one_call)
    deltas: list[Delta] = []
    for chunk in chunks:
        deltas += stream.feed(chunk)
        if stream.cut_because:
            break
    rest, reply = stream.finish()
    deltas += rest
    assert "".join(d.text for d in deltas if d.kind == "text") == reply.text
    assert "".join(d.text for d in deltas if d.kind == "reasoning") == (reply.reasoning or "")
    assert tuple(d.call for d in deltas if d.call) == reply.tool_calls
    return reply, deltas, stream


def said(reply: Reply) -> tuple[str, str | None, int]:
    return reply.text, reply.reasoning, len(reply.tool_calls)


@given(data=st.data(), one_call=st.booleans())
def test_a_cut_falls_in_the_same_place_whatever_the_chunks(
    renderer: Renderer, data: st.DataObject, one_call: bool
) -> None:
    drawn = data.draw(st.lists(st.sampled_from(PIECES), max_size=12))
    tokens = [token for piece in drawn for token in renderer.encode(piece)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    chunks = [tokens[a:b] for a, b in pairwise([0, *cuts, len(tokens)])]
    streamed, _, _ = shown(renderer, chunks, ["END", "\n\nw"], one_call)
    at_once, _, _ = shown(renderer, [tokens], ["END", "\n\nw"], one_call)
    assert said(streamed) == said(at_once)
    assert "END" not in streamed.text
    assert not one_call or len(streamed.tool_calls) <= 1


def test_without_a_stop_string_nothing_changes(renderer: Renderer) -> None:
    tokens = list(spell(renderer, f"<think>hm</think>Look.\n{CALL}\n{CALL}"))
    reply, deltas, stream = shown(renderer, [[t] for t in tokens], [])
    assert said(reply) == ("Look.", "hm", 2)
    assert stream.cut_because is None
    plain = renderer.stream(renderer.prompt(chat("hi")).tokens)
    expected = [(d.kind, d.text) for token in tokens for d in plain.feed([token])]
    assert [(d.kind, d.text) for d in deltas] == expected


def test_thinking_and_calls_may_hold_a_stop_string(renderer: Renderer) -> None:
    text = f"<think>ls END</think>{CALL}"
    reply, _, stream = shown(renderer, [list(spell(renderer, text))], ["END", "ls"])
    assert said(reply) == ("", "ls END", 1)
    assert stream.cut_because is None


def test_what_follows_a_stop_string_is_gone(renderer: Renderer) -> None:
    reply, _, stream = shown(renderer, [list(spell(renderer, f"a END b{CALL}"))], ["END"])
    assert said(reply) == ("a ", None, 0)
    assert stream.cut_because is not None
    assert stream.feed(spell(renderer, "more")) == []


def test_a_beginning_that_goes_on_otherwise_is_shown(renderer: Renderer) -> None:
    tokens = [[t] for t in spell(renderer, "the EN and EN")]
    reply, deltas, _ = shown(renderer, tokens, ["END"])
    assert reply.text == "the EN and EN"
    assert any("the" in d.text for d in deltas[:2]), "only the possible beginning waits"


def test_a_second_call_ends_the_reply_and_a_lone_one_does_not(renderer: Renderer) -> None:
    one, _, stream = shown(renderer, [list(spell(renderer, f"Look.{CALL}"))], [], one_call=True)
    assert said(one) == ("Look.", None, 1)
    assert stream.cut_because is None
    two, _, stream = shown(
        renderer, [list(spell(renderer, f"Look.{CALL}and{CALL}more"))], [], one_call=True
    )
    assert said(two) == ("Look.and", None, 1)
    assert "second call" in str(stream.cut_because)


@pytest.mark.parametrize("stop", [["END"], []])
def test_a_family_that_is_parsed_at_the_end_is_cut_at_the_end(stop: list[str]) -> None:
    buffered = Renderer(tokenizer_for("llama-3"), config_from_name("llama-3"))
    told = spell(buffered, "one END two", end="<|eot_id|>")
    reply, _, stream = shown(buffered, [[t] for t in told], stop)
    assert reply.text == ("one " if stop else "one END two")
    assert bool(stream.cut_because) is bool(stop)
