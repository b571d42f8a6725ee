"""Ends of replies that a request asks for: stop strings in the text, and the second of two
calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import config_from_name

from tests.render.test_prompt_cache import tokenizer_for
from tests.support.gateways import chat, spell
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import CutStream, StopSearch
from tinker_claw.turn_state import Reason
from tinker_claw.types import Delta, Reply

CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
PIECES = (CALL, "END", *"END", "<think>", "</think>", " ", "\n\n", "word", "ü🙂", "<|im_end|>")


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


def shown(
    renderer: Renderer, chunks: list[list[int]], stop: list[str], one_call: bool = False
) -> tuple[Reply, list[Delta], CutStream]:
    """Return the reply, its deltas and the stream, which is left as soon as it says that it is
    cut."""
    inner = renderer.stream(renderer.prompt(chat("hi")).tokens)
    stream = CutStream(inner, stop, one_call=one_call)
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


@pytest.mark.parametrize(
    ("text", "stop", "one_call", "expected", "because"),
    [
        (f"<think>hm</think>Look.\n{CALL}\n{CALL}", [], False, ("Look.", "hm", 2), None),
        (f"<think>ls END</think>{CALL}", ["END", "ls"], False, ("", "ls END", 1), None),
        (f"a END b{CALL}", ["END"], False, ("a ", None, 0), Reason.STOP_STRING),
        ("the EN and EN", ["END"], False, ("the EN and EN", None, 0), None),
        (f"Look.{CALL}", [], True, ("Look.", None, 1), None),
        (f"Look.{CALL}and{CALL}more", [], True, ("Look.and", None, 1), Reason.ONE_CALL),
    ],
)
def test_a_reply_is_cut_at_a_stop_string_of_its_text_or_a_second_call(
    renderer: Renderer,
    text: str,
    stop: list[str],
    one_call: bool,
    expected: tuple[Any, ...],
    because: Reason | None,
) -> None:
    reply, _, stream = shown(renderer, [list(spell(renderer, text))], stop, one_call)
    assert said(reply) == expected
    assert (stream.cut_because and stream.cut_because.reason) == because


@pytest.mark.parametrize("stop", [["END"], []])
def test_a_family_that_is_parsed_at_the_end_is_cut_at_the_end(stop: list[str]) -> None:
    buffered = Renderer(tokenizer_for("llama-3"), config_from_name("llama-3"))
    told = spell(buffered, "one END two", end="<|eot_id|>")
    reply, _, stream = shown(buffered, [[t] for t in told], stop)
    assert reply.text == ("one " if stop else "one END two")
    assert bool(stream.cut_because) is bool(stop)
